//! Directories that other mounts have moved.
//!
//! The kernel has one entry for a directory, where it saw it last. When it finds it elsewhere it moves that entry, and takes
//! locks for that. A rename(2) from one directory to another holds them already, so if it is the first to find what it
//! moves, it fails with ESTALE, and when the kernel tries it a second time, too. Therefore a thread of this mount, which
//! holds nothing, looks the directory up where it is now, and what the kernel looks up meanwhile is answered after that: on the
//! way to its second attempt it asks for at least one directory, unless it has both of them open already.
//!
//! What always holds: nothing here decides what a name means; who waits does so for [`WAIT_MAX`] at most, as the
//! thread may need a lock that the waiting call holds.

use levada_base::ids::Ino;
use levada_base::reactor::{self, mailbox};
use levada_base::sync::Notify;
use lru::LruCache;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Directories whose place is known: some 4 MiB.
const PLACES_MAX: NonZeroUsize = NonZeroUsize::new(1 << 15).expect("not zero");
/// PATH_MAX of Linux.
const PATH_BYTES_MAX: usize = 4096;
/// A look takes some 100 us, unless a call is in its way.
const WAIT_MAX: Duration = Duration::from_millis(200);

/// Where the kernel has which directory, as far as it was told of it here.
pub(super) struct Places {
    table: RefCell<Table>,
    hasher: RandomState,
    /// Where the root is.
    root: OnceCell<PathBuf>,
    looker: RefCell<Option<Looker>>,
    /// Looks that were ordered.
    looks: Cell<u64>,
    looked: Notify,
}

struct Table {
    places: LruCache<Ino, Place>,
    /// By the hash of the place.
    at: HashMap<u64, Ino>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    dir: Ino,
    name: Box<[u8]>,
    hash: u64,
}

/// The thread.
struct Looker {
    orders: mpsc::Sender<Order>,
    /// Its number, as the kernel says it with its requests.
    thread: u32,
}

/// A directory is to be found at this path.
struct Order {
    ino: Ino,
    place: Place,
    path: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        let table = Table { places: LruCache::unbounded(), at: HashMap::new() };
        Self {
            table: RefCell::new(table),
            hasher: RandomState::new(),
            root: OnceCell::new(),
            looker: RefCell::default(),
            looks: Cell::default(),
            looked: Notify::default(),
        }
    }
}

impl Table {
    fn put(&mut self, ino: Ino, place: Place) {
        self.at.insert(place.hash, ino);
        let before = self.places.put(ino, place.clone());
        if let Some(before) = before.filter(|before| before.hash != place.hash) {
            self.forget_hash(before.hash, ino);
        }
        while self.places.len() > PLACES_MAX.get()
            && let Some((gone, before)) = self.places.pop_lru()
        {
            self.forget_hash(before.hash, gone);
        }
    }

    fn forget_hash(&mut self, hash: u64, ino: Ino) {
        if self.at.get(&hash) == Some(&ino) {
            self.at.remove(&hash);
        }
    }

    /// The directory at this place, which has none from now on.
    fn take(&mut self, dir: Ino, name: &[u8], hash: u64) -> Option<Ino> {
        let ino = *self.at.get(&hash)?;
        let place = self.places.peek(&ino)?;
        if place.dir != dir || *place.name != *name {
            return None;
        }
        self.at.remove(&hash);
        self.places.pop(&ino);
        Some(ino)
    }
}

impl Places {
    /// The root is at this path.
    pub(super) fn set_root(&self, root: PathBuf) {
        let _ = self.root.set(root);
    }

    fn place(&self, dir: Ino, name: &[u8]) -> Place {
        Place { dir, name: name.into(), hash: self.hasher.hash_one((dir.0, name)) }
    }

    /// The kernel is about to have the directory `ino` there. False: it has it elsewhere.
    pub(super) fn agrees(&self, ino: Ino, dir: Ino, name: &[u8]) -> bool {
        let mut table = self.table.borrow_mut();
        if let Some(known) = table.places.get(&ino) {
            return known.dir == dir && *known.name == *name;
        }
        let place = self.place(dir, name);
        table.put(ino, place);
        true
    }

    /// This mount has removed a directory.
    pub(super) fn removed(&self, dir: Ino, name: &[u8]) {
        let place = self.place(dir, name);
        self.table.borrow_mut().take(dir, name, place.hash);
    }

    /// This mount has renamed something, and the kernel has moved its entries.
    pub(super) fn renamed(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), is_exchange: bool) {
        let mut table = self.table.borrow_mut();
        if table.places.is_empty() {
            return;
        }
        let (from, to) = (self.place(from.0, from.1), self.place(to.0, to.1));
        let moved = table.take(from.dir, &from.name, from.hash);
        let other = table.take(to.dir, &to.name, to.hash);
        if let Some(ino) = moved {
            table.put(ino, to);
        }
        if let Some(ino) = other.filter(|_| is_exchange) {
            table.put(ino, from);
        }
    }

    fn path(&self, place: &Place) -> Option<PathBuf> {
        let table = self.table.borrow();
        let mut names = vec![&*place.name];
        let mut dir = place.dir;
        let mut bytes = place.name.len();
        while dir != Ino::ROOT {
            let above = table.places.peek(&dir)?;
            bytes += above.name.len() + 1;
            if bytes > PATH_BYTES_MAX {
                return None;
            }
            names.push(&above.name);
            dir = above.dir;
        }
        let mut path = self.root.get()?.clone();
        path.extend(names.iter().rev().map(|name| Path::new(OsStr::from_bytes(name))));
        Some(path)
    }

    /// The kernel is told that the directory `ino` is there. Where it had it elsewhere it is made to move it.
    pub(super) fn found(self: &Rc<Self>, ino: Ino, dir: Ino, name: &[u8]) {
        if self.agrees(ino, dir, name) {
            return;
        }
        let place = self.place(dir, name);
        let Some(path) = self.path(&place) else { return };
        let mut looker = self.looker.borrow_mut();
        if looker.is_none() {
            match Looker::start(Rc::downgrade(self)) {
                Ok(started) => *looker = Some(started),
                Err(error) => return tracing::warn!(%error, "no thread looks up what was moved"),
            }
        }
        let order = Order { ino, place, path };
        if looker.as_ref().is_some_and(|looker| looker.orders.send(order).is_ok()) {
            self.looks.set(self.looks.get() + 1);
        }
    }

    /// Before something is looked up for the thread `pid`.
    pub(super) async fn settled(&self, pid: u32) {
        if self.looks.get() == 0 {
            return;
        }
        if self.looker.borrow().as_ref().is_some_and(|looker| looker.thread == pid) {
            return;
        }
        let all = self.looked.until(|| (self.looks.get() == 0).then_some(()));
        let _ = reactor::timeout(WAIT_MAX, all).await;
    }

    fn done(&self, order: Order, is_there: bool) {
        self.looks.set(self.looks.get() - 1);
        if is_there {
            self.table.borrow_mut().put(order.ino, order.place);
        }
        self.looked.notify_all();
    }
}

impl Looker {
    fn start(places: Weak<Places>) -> io::Result<Self> {
        let (orders, ordered) = mpsc::channel::<Order>();
        let (numbers, number) = mpsc::channel();
        let (done, mut mailbox) = mailbox::channel()?;
        thread::Builder::new().name("fuse-moved".into()).spawn(move || {
            let _ = numbers.send(rustix::thread::gettid().as_raw_nonzero().get());
            for order in ordered {
                let found = std::fs::symlink_metadata(&order.path);
                let is_there = found.is_ok_and(|found| found.ino() == order.ino.0);
                if done.send((order, is_there)).is_err() {
                    break;
                }
            }
        })?;
        let thread = number.recv().map_err(io::Error::other)?.cast_unsigned();
        reactor::spawn(async move {
            while let Some((order, is_there)) = mailbox.recv().await {
                let Some(places) = places.upgrade() else { break };
                places.done(order, is_there);
            }
        });
        Ok(Self { orders, thread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(places: &Places, ino: u64) -> Option<(u64, Vec<u8>)> {
        let table = places.table.borrow();
        table.places.peek(&Ino(ino)).map(|place| (place.dir.0, place.name.to_vec()))
    }

    #[test]
    fn places_follow_what_this_mount_moves() {
        let places = Places::default();
        assert!(places.agrees(Ino(7), Ino::ROOT, b"a") && places.agrees(Ino(8), Ino(7), b"b"));
        assert!(!places.agrees(Ino(8), Ino::ROOT, b"b") && places.agrees(Ino(8), Ino(7), b"b"));
        places.set_root(PathBuf::from("/mnt"));
        let path = |dir, name: &[u8]| places.path(&places.place(dir, name));
        assert_eq!(path(Ino(8), b"c"), Some(PathBuf::from("/mnt/a/b/c")));
        assert_eq!(path(Ino(9), b"c"), None);
        let is_exchange = true;
        places.renamed((Ino::ROOT, b"a"), (Ino(7), b"b"), is_exchange);
        assert_eq!(
            (at(&places, 7), at(&places, 8)),
            (Some((7, b"b".to_vec())), Some((1, b"a".to_vec())))
        );
        places.renamed((Ino::ROOT, b"a"), (Ino::ROOT, b"c"), false);
        assert_eq!(at(&places, 8), Some((1, b"c".to_vec())));
        // Of what was there nothing is left.
        assert!(places.agrees(Ino(9), Ino::ROOT, b"d"));
        places.renamed((Ino::ROOT, b"c"), (Ino::ROOT, b"d"), false);
        assert_eq!((at(&places, 8), at(&places, 9)), (Some((1, b"d".to_vec())), None));
        places.removed(Ino::ROOT, b"d");
        assert_eq!(at(&places, 8), None);
        let table = places.table.borrow();
        assert_eq!((table.places.len(), table.at.len()), (1, 1));
    }
}

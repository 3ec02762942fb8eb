//! Open files: opening and creating, data, closing; and what the kernel may keep of a file.
//!
//! Cached pages outlive an open only while the service's change counter of the file stands
//! where it stood when the pages were last known good. Every write session moves it, so a file
//! that was written, here or elsewhere, is read anew at its next open: a program that opens a
//! file after another one closed it sees what that one wrote. With the counter goes the time of the last change:
//! a service that went on without what this mount had not synced (note 0010) gives its numbers again, but not its times.

use super::attrs::has_set_id;
use super::sharing::drop_soon;
use super::{Files, GuestCache, VALID, caller_of};
use crate::codec::operation::OpenArgs;
use crate::codec::{Caller, Errno, OpenReply, OpenReplyFlags, ReadArgs, Reply, WriteArgs};
use levada_base::Buf;
use levada_base::ids::Ino;
use levada_client::File;
use levada_wire::attr::{Attr, Time};
use levada_wire::meta::{LOCKS_MAX, NewMode, OpenMode};
use lru::LruCache;
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroUsize;

/// Files of which is known what state their cached pages show.
const PAGES_KNOWN_MAX: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");
/// The most bytes of one READ, as [`Files::limits`] and the mount options say.
const READ_BYTES_MAX: u32 = 1 << 20;

struct OpenFile {
    file: File,
    /// It may have set-id bits, which a write takes away.
    set_id: Cell<bool>,
    /// Opened with `O_SYNC` or `O_DSYNC`.
    sync: bool,
    /// What is read through it the kernel caches.
    cached: bool,
    /// Tells it from every other open file of this mount, also past ones.
    serial: u64,
    /// It holds the lock of flock(2), exclusive or not.
    flock: Cell<Option<bool>>,
    /// The kernel's numbers of those who asked for POSIX locks through it.
    lockers: BTreeSet<u64>,
}

/// Files that a guest may have open at once: each takes memory here, and at the metadata service.
const OPEN_MAX_OF_GUEST: usize = 1 << 16;

/// The open files of a mount, by the number that the kernel sends with every request.
#[derive(Default)]
pub(super) struct Handles {
    open: RefCell<Slab<OpenFile>>,
    /// How many of them are cached, by inode.
    cached: RefCell<HashMap<Ino, u32>>,
    last_serial: Cell<u64>,
}

impl Handles {
    fn add(&self, file: File, attr: &Attr, open_flags: u32, cached: bool) -> u64 {
        let set_id = Cell::new(has_set_id(attr));
        let serial = self.last_serial.get() + 1;
        self.last_serial.set(serial);
        let (flock, lockers) = (Cell::new(None), BTreeSet::new());
        let sync = is_sync(open_flags);
        if cached {
            *self.cached.borrow_mut().entry(file.ino()).or_default() += 1;
        }
        let open = OpenFile { file, set_id, sync, cached, serial, flock, lockers };
        self.open.borrow_mut().insert(open) as u64
    }

    fn len(&self) -> usize {
        self.open.borrow().len()
    }

    /// See [`OpenFile::serial`]; `fh` is open.
    pub(super) fn serial(&self, fh: u64) -> u64 {
        self.open.borrow().get(fh as usize).map_or(0, |open| open.serial)
    }

    pub(super) fn flock(&self, fh: u64) -> Option<bool> {
        self.open.borrow().get(fh as usize).and_then(|open| open.flock.get())
    }

    pub(super) fn set_flock(&self, fh: u64, is_flock: bool, held: Option<bool>) {
        if let Some(open) = self.open.borrow().get(fh as usize).filter(|_| is_flock) {
            open.flock.set(held);
        }
    }

    /// Whether what goes through `fh`, which is open, the kernel caches.
    fn is_cached(&self, fh: u64) -> bool {
        self.open.borrow().get(fh as usize).is_some_and(|open| open.cached)
    }

    /// Whether the kernel caches what goes through any open file of this inode.
    fn caches(&self, ino: Ino) -> bool {
        self.cached.borrow().contains_key(&ino)
    }

    /// Somebody asks for POSIX locks through `fh`; false: of so many nobody can be kept in mind.
    pub(super) fn locks_for(&self, fh: u64, locker: u64) -> bool {
        let mut all = self.open.borrow_mut();
        let Some(open) = all.get_mut(fh as usize) else { return true };
        let has_room = open.lockers.len() < LOCKS_MAX || open.lockers.contains(&locker);
        if has_room {
            open.lockers.insert(locker);
        }
        has_room
    }

    /// A process has given up its locks of this inode, through whatever open file it took them.
    pub(super) fn process_flushed(&self, ino: Ino, locker: u64) {
        for (_, open) in &mut *self.open.borrow_mut() {
            if open.file.ino() == ino {
                open.lockers.remove(&locker);
            }
        }
    }

    /// Those whose locks nobody but `fh` can end: it goes, and they asked through no other open file of this inode.
    pub(super) fn left_to(&self, ino: Ino, fh: u64) -> BTreeSet<u64> {
        let handles = self.open.borrow();
        let mut left =
            handles.get(fh as usize).map(|open| open.lockers.clone()).unwrap_or_default();
        let others = handles.iter().filter(|(at, open)| *at as u64 != fh && open.file.ino() == ino);
        for (_, other) in others {
            left.retain(|locker| !other.lockers.contains(locker));
        }
        left
    }

    /// The open file `fh`, which must be of inode `ino`.
    pub(super) fn file(&self, ino: Ino, fh: u64) -> Result<File, Errno> {
        let handles = self.open.borrow();
        let open = usize::try_from(fh).ok().and_then(|fh| handles.get(fh));
        let open = open.filter(|open| open.file.ino() == ino).ok_or(Errno::BADF)?;
        Ok(open.file.clone())
    }

    fn remove(&self, ino: Ino, fh: u64) -> Result<File, Errno> {
        self.file(ino, fh)?;
        let OpenFile { file, cached, .. } = self.open.borrow_mut().remove(fh as usize);
        let mut all = self.cached.borrow_mut();
        if cached && let Some(count) = all.get_mut(&ino) {
            *count -= 1;
            if *count == 0 {
                all.remove(&ino);
            }
        }
        drop(all);
        Ok(file)
    }

    /// An inode has set-id bits now.
    pub(super) fn set_id_given(&self, ino: Ino) {
        for (_, open) in &*self.open.borrow() {
            if open.file.ino() == ino {
                open.set_id.set(true);
            }
        }
    }

    /// Whether what is changed through `fh`, which is open, is to be durable at once.
    pub(super) fn is_sync(&self, fh: u64) -> bool {
        self.open.borrow().get(fh as usize).is_some_and(|open| open.sync)
    }

    fn take_set_id(&self, fh: u64) -> bool {
        self.open.borrow().get(fh as usize).is_some_and(|open| open.set_id.replace(false))
    }
}

/// The change counter that each file's cached pages belong to, and the time of that change.
pub(super) struct Pages(RefCell<LruCache<Ino, (u64, Time)>>);

impl Default for Pages {
    fn default() -> Self {
        Pages(RefCell::new(LruCache::new(PAGES_KNOWN_MAX)))
    }
}

impl Pages {
    /// A file is opened with these attributes: whether its cached pages are still good.
    fn keep(&self, attr: &Attr) -> bool {
        let mut known = self.0.borrow_mut();
        if attr.writers || attr.cut {
            // Data changes without a word to the metadata service.
            known.pop(&attr.ino);
            return false;
        }
        let state = (attr.change, attr.ctime);
        known.put(attr.ino, state) == Some(state)
    }

    /// A lock has been taken, and the file has these attributes since: whether its cached pages are still good. Writes
    /// of this mount itself, which `writers` may mean, are in them.
    pub(super) fn good_under_lock(&self, attr: &Attr) -> bool {
        let mut known = self.0.borrow_mut();
        if attr.others || attr.cut {
            known.pop(&attr.ino);
            return false;
        }
        let state = (attr.change, attr.ctime);
        known.put(attr.ino, state) == Some(state)
    }
}

/// `O_SYNC` contains `O_DSYNC`.
fn is_sync(open_flags: u32) -> bool {
    open_flags & libc::O_DSYNC.cast_unsigned() != 0
}

impl Files {
    /// One file more may be open.
    fn may_open(&self) -> Result<(), Errno> {
        let is_full = self.guest.is_some() && self.handles.len() >= OPEN_MAX_OF_GUEST;
        if is_full { Err(Errno::NFILE) } else { Ok(()) }
    }

    pub(super) async fn open(&self, ino: Ino, args: OpenArgs) -> Result<Reply, Errno> {
        self.may_open()?;
        let has = |flag: i32| args.flags & flag.cast_unsigned() != 0;
        // O_TRUNC comes as a SETATTR of its own: see `Files::limits`.
        let write = has(libc::O_WRONLY) || has(libc::O_RDWR);
        let (file, attr) = self.client.open(ino, OpenMode { write, truncate: false }).await?;
        Ok(Reply::Open(self.opened(file, &attr, args.flags)))
    }

    fn opened(&self, file: File, attr: &Attr, open_flags: u32) -> OpenReply {
        // With NOFLUSH neither a close nor the end of a process would free its POSIX locks.
        let mut flags = OpenReplyFlags::PARALLEL_DIRECT_WRITES;
        // What a guest has mapped it reads anew then.
        let is_uncached = self.guest == Some(GuestCache::None);
        flags.set(OpenReplyFlags::KEEP_CACHE, self.pages.keep(attr) && !is_uncached);
        // Without it the kernel takes the inode's lock for the whole of each direct write; with it
        // those that do not extend the file run at once. Shared mappings work all the same.
        let has = |flag: i32| open_flags & flag.cast_unsigned() != 0;
        // An append through the cache is cut in two at the edge of a page, and each may come to lie elsewhere.
        let direct = has(libc::O_DIRECT) || has(libc::O_APPEND) || file.is_shared();
        let cached = !is_uncached && (!direct || !self.direct_io.get());
        flags.set(OpenReplyFlags::DIRECT_IO, !cached);
        OpenReply { fh: self.handles.add(file, attr, open_flags, cached), flags }
    }

    pub(super) async fn create(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: NewMode,
        open: OpenArgs,
    ) -> Result<Reply, Errno> {
        self.may_open()?;
        // Always exclusive: the kernel found no such name, and has checked nobody's right to open
        // one that another mount made since. ESTALE makes it look again, and then open that.
        let how = OpenMode { write: true, truncate: false };
        let changing = self.names.change(parent, name);
        let asking = self.bare.ask();
        let made = self.client.create_file(caller_of(caller), parent, name, mode, how, true).await;
        let (file, attr, _) = made.map_err(|error| match Errno::from(error) {
            Errno::EXIST if open.flags & libc::O_EXCL.cast_unsigned() == 0 => Errno::STALE,
            errno => errno,
        })?;
        changing.done();
        self.bare.told(&attr, asking, self.client.attr_valid(&attr).min(VALID));
        let entry = self.entry_of(parent, name, &attr);
        Ok(Reply::Create { entry, open: self.opened(file, &attr, open.flags) })
    }

    /// O_TMPFILE. The kernel lets a file be linked that was made without O_EXCL, and no other.
    pub(super) async fn create_unnamed(
        &self,
        caller: Caller,
        parent: Ino,
        mode: NewMode,
        open: OpenArgs,
    ) -> Result<Reply, Errno> {
        self.may_open()?;
        let how = OpenMode { write: true, truncate: false };
        let may_link = open.flags & libc::O_EXCL.cast_unsigned() == 0;
        let asking = self.bare.ask();
        let made = self.client.create_unnamed(caller_of(caller), parent, mode, how, may_link).await;
        let (file, attr) = made?;
        self.bare.told(&attr, asking, self.client.attr_valid(&attr).min(VALID));
        let entry = self.entry_of(parent, b"", &attr);
        Ok(Reply::Create { entry, open: self.opened(file, &attr, open.flags) })
    }

    pub(super) async fn read(&self, ino: Ino, args: ReadArgs) -> Result<Reply, Errno> {
        let file = self.handles.file(ino, args.fh)?;
        let bytes = args.size.min(READ_BYTES_MAX);
        let data = file.read(args.offset, u64::from(bytes)).await?;
        // It may be for a mapping, whose pages are cached however the file was opened.
        if file.is_shared() {
            drop_soon(&self.kernel, ino, args.offset, u64::from(bytes));
        }
        Ok(Reply::Data(data))
    }

    pub(super) async fn write(
        &self,
        ino: Ino,
        args: &WriteArgs<'_>,
        data: Buf,
    ) -> Result<Reply, Errno> {
        let file = self.handles.file(ino, args.fh)?;
        let bytes = u32::try_from(data.len()).map_err(|_| Errno::INVAL)?;
        let data = data.into_vec();
        let mut at = args.offset;
        if args.flags & libc::O_APPEND.cast_unsigned() != 0 && !args.from_cache {
            at = file.append(data).await?;
            // The kernel has dropped the pages before it asked, and another program may have read the last one again since.
            // (Through a cached file it holds the page itself until it is answered.)
            if self.handles.caches(ino) && !self.handles.is_cached(args.fh) {
                self.kernel.drop_range(ino, at, u64::from(bytes)).await;
            }
        } else {
            file.write(at, data).await?;
        }
        let is_cached = self.handles.is_cached(args.fh) && !args.from_cache;
        if at != args.offset && is_cached {
            // O_APPEND was set after the open, and the kernel caches it where it took the end to be.
            drop_soon(&self.kernel, ino, 0, 0);
        } else if is_cached && file.is_shared() {
            drop_soon(&self.kernel, ino, at, u64::from(bytes));
        }
        self.changed(&file, args.fh, args.kill_set_id, is_sync(args.flags)).await?;
        Ok(Reply::Written(bytes))
    }

    /// The data of a file was changed through `fh`: what else the kernel leaves to the server.
    pub(super) async fn changed(
        &self,
        file: &File,
        fh: u64,
        kill_set_id: bool,
        sync: bool,
    ) -> Result<(), Errno> {
        if kill_set_id && self.handles.take_set_id(fh) {
            self.without_set_id(file.attr().await?, true).await?;
        }
        if sync {
            file.fsync().await?;
        }
        Ok(())
    }

    /// What was written becomes durable in the background. Waits only while very many closed
    /// files are on their way, which holds the kernel's next background requests back.
    pub(super) async fn release(&self, ino: Ino, fh: u64) -> Result<Reply, Errno> {
        self.release_locks(ino, fh)?;
        self.handles.remove(ino, fh)?.close().await;
        Ok(Reply::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::attrs::tests::attr;

    #[test]
    fn pages_are_kept_while_nothing_changed() {
        let attr =
            |change, ctime, writers| Attr { change, ctime: Time(ctime), writers, ..attr(Ino(7)) };
        let pages = Pages::default();
        assert!(!pages.keep(&attr(3, 30, false)), "never opened");
        assert!(pages.keep(&attr(3, 30, false)));
        assert!(!pages.keep(&attr(4, 40, false)));
        assert!(!pages.keep(&attr(4, 40, true)), "being written");
        assert!(!pages.keep(&attr(4, 40, false)));
        // The service lost change 4, which was this mount's, and then somebody wrote.
        assert!(!pages.keep(&attr(4, 50, false)));
        assert!(pages.keep(&attr(4, 50, false)));
    }
}

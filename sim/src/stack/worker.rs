//! A worker: one program after another on one client, in a directory of its own, so that the
//! result of every operation is known exactly.

use super::calm::Calm;
use super::model::{
    Body, Change, DIRECTORY_MODE, FILE_MODE, FileState, How, Names, Pending, SYMLINK_MODE, Tree,
};
use super::spans::{self, FILE_BYTES_MAX};
use crate::{Coverage, Rng};
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_base::{Buf, probe};
use levada_client::{Client, Error, File};
use levada_wire::attr::Attr;
use levada_wire::meta::{AttrChange, Caller, MetaFault, NewInode, OpenMode};
use std::cell::RefCell;
use std::fmt::Debug;
use std::rc::Rc;
use std::time::Duration;

pub(super) const CALLER: Caller = Caller { uid: 1000, gid: 1000 };
pub(super) const WRITE: OpenMode = OpenMode { write: true, truncate: false };
/// An operation that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(600);
const HANDLES_MAX: usize = 5;
/// Operations named in a failure.
const HISTORY: usize = 25;

/// What survives the worker: the model, and what it was doing.
pub(super) struct State {
    pub tree: Tree,
    pub pending: Option<Pending>,
    /// The names after each change of them, and which of these are durable at least.
    pub past: Vec<Names>,
    pub durable: usize,
    pub history: Vec<String>,
    pub operations: u64,
    /// Writes that found no room.
    pub refused: u64,
}

/// See the module.
pub(super) struct Worker {
    pub seed: u64,
    pub number: u64,
    pub client: Client,
    /// Another client, that uses the files of this worker in turn with the first.
    pub guest: Option<Client>,
    /// Crashes wait for it.
    pub calm: Rc<Calm>,
    pub rng: Rng,
    pub state: Rc<RefCell<State>>,
    /// The states of all workers.
    pub all: Rc<RefCell<Vec<Rc<RefCell<State>>>>>,
    pub handles: Vec<(u64, File)>,
    /// Open to be read only.
    pub reader: Option<(u64, File)>,
}

impl Worker {
    /// A worker in a fresh directory below the root.
    pub async fn new(
        seed: u64,
        number: u64,
        client: Client,
        rng: Rng,
        all: Rc<RefCell<Vec<Rc<RefCell<State>>>>>,
    ) -> Self {
        let name = format!("worker{number}");
        let made =
            client.create(CALLER, Ino::ROOT, name.as_bytes(), DIRECTORY_MODE, NewInode::Directory);
        let attr = made.await.unwrap_or_else(|error| panic!("seed {seed}: mkdir {name}: {error}"));
        let tree = Tree::new(attr.ino);
        let state = State {
            past: vec![tree.names(None)],
            tree,
            pending: None,
            durable: 0,
            history: Vec::new(),
            operations: 0,
            refused: 0,
        };
        let state = Rc::new(RefCell::new(state));
        all.borrow_mut().push(Rc::clone(&state));
        Self::heir(seed, number, client, rng, state, all)
    }

    /// A worker that goes on with what another one has left.
    pub fn heir(
        seed: u64,
        number: u64,
        client: Client,
        rng: Rng,
        state: Rc<RefCell<State>>,
        all: Rc<RefCell<Vec<Rc<RefCell<State>>>>>,
    ) -> Self {
        Self {
            seed,
            number,
            client,
            guest: None,
            calm: Rc::default(),
            rng,
            state,
            all,
            handles: Vec::new(),
            reader: None,
        }
    }

    pub(super) fn note(&self, what: String) {
        let mut state = self.state.borrow_mut();
        state.history.push(format!("[{} us] {what}", reactor::now().0 / 1000));
        state.operations += 1;
    }

    pub(super) fn fail(&self, what: &str) -> ! {
        panic!("{}", describe(self.seed, self.number, what, &self.state.borrow()))
    }

    /// Waits for an operation that must not hang.
    pub(super) async fn done<T>(&self, operation: impl Future<Output = T>) -> T {
        match reactor::timeout(PATIENCE, operation).await {
            Ok(result) => result,
            Err(_) => {
                let states = probe::states();
                self.fail(&format!("the last operation hangs for 10 minutes; busy: {states:?}"))
            }
        }
    }

    /// The result must be as the model says.
    pub(super) fn expect<T: Debug>(
        &self,
        result: Result<T, Error>,
        expected: Option<MetaFault>,
    ) -> Option<T> {
        match (result, expected) {
            (Ok(value), None) => Some(value),
            (Err(Error::Meta(fault)), Some(expected)) if fault == expected => None,
            (result, expected) => {
                let expected = expected.map_or("success".into(), |fault| format!("{fault:?}"));
                self.fail(&format!("the last operation gave {result:?}, expected {expected}"))
            }
        }
    }

    fn name(&mut self) -> Vec<u8> {
        format!("n{}", self.rng.below(12)).into_bytes()
    }

    fn directory(&mut self) -> u64 {
        let directories = self.state.borrow().tree.directories();
        *self.rng.pick(&directories)
    }

    pub(super) fn file(&mut self) -> Option<u64> {
        let files = self.state.borrow().tree.files();
        if files.is_empty() { None } else { Some(*self.rng.pick(&files)) }
    }

    pub(super) fn existing(&mut self) -> (u64, Vec<u8>) {
        let parent = self.directory();
        let names: Vec<Vec<u8>> =
            self.state.borrow().tree.entries(parent).keys().cloned().collect();
        // Now and then one that is not there.
        if names.is_empty() || self.rng.one_in(20) {
            return (parent, b"missing".to_vec());
        }
        (parent, self.rng.pick(&names).clone())
    }

    pub(super) fn handle(&mut self) -> Option<usize> {
        if self.handles.is_empty() {
            return None;
        }
        Some(self.rng.below(self.handles.len() as u64) as usize)
    }

    /// A change of names was acknowledged.
    pub(super) fn renamed(&self) {
        let mut state = self.state.borrow_mut();
        let names = state.tree.names(None);
        state.past.push(names);
        state.pending = None;
    }

    pub(super) fn pending(&self, pending: Pending) {
        self.state.borrow_mut().pending = Some(pending);
    }

    pub(super) fn entry(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.state.borrow().tree.entries(parent).get(name).copied()
    }

    pub(super) fn ino(&self, id: u64) -> Ino {
        self.state.borrow().tree.ino(id)
    }

    /// One operation.
    pub async fn step(&mut self) {
        if self.rng.one_in(3) {
            reactor::sleep(Duration::from_micros(self.rng.below(3000))).await;
        }
        let turns = if self.guest.is_some() { 3 } else { 0 };
        let weights = [10, 7, 28, 16, 7, 6, 4, 6, 4, 2, 4, 9, 5, 2, 5, turns, 1, 3, 2, 4, 6, 3];
        match self.rng.weighted(&weights) {
            0 => self.create().await,
            1 => self.open().await,
            2 => self.write().await,
            3 => self.read().await,
            4 => self.truncate().await,
            5 => self.rename().await,
            6 => self.link().await,
            7 => self.unlink().await,
            8 => self.mkdir().await,
            9 => self.rmdir().await,
            10 => self.readdir().await,
            11 => self.fsync().await,
            12 => self.stat().await,
            13 => self.symlink().await,
            14 => self.close().await,
            15 => self.take_turns().await,
            16 => self.two_at_once().await,
            17 => self.set_attributes().await,
            18 => self.sync().await,
            19 => self.open_to_read().await,
            20 => self.make_hole().await,
            _ => self.seek().await,
        }
        self.state.borrow_mut().pending = None;
    }

    async fn create(&mut self) {
        let (parent, name) = (self.directory(), self.name());
        let found = self.entry(parent, &name);
        let is_file = |id: &u64| matches!(self.state.borrow().tree.nodes[id].body, Body::File(_));
        if let Some(id) = found.filter(is_file)
            && self.rng.one_in(2)
        {
            return self.open_file(id, Some((parent, name))).await;
        }
        let exists = found.is_some();
        let body = Body::File(FileState::default());
        self.note(format!("create {:?} in {parent}", text(&name)));
        if !exists {
            self.pending(Pending::Make {
                parent,
                name: name.clone(),
                mode: FILE_MODE,
                body: body.clone(),
            });
        }
        let at = self.ino(parent);
        let made = self.client.create_file(CALLER, at, &name, FILE_MODE, WRITE, true);
        let made = self.done(made).await.map(|(file, attr, _)| (Shown(file), attr));
        if let Some((file, attr)) = self.expect(made, exists.then_some(MetaFault::Exists)) {
            let id = self.state.borrow_mut().tree.make(parent, &name, attr.ino, FILE_MODE, body);
            self.renamed();
            self.handles.push((id, file.0));
            self.trim().await;
            if self.rng.one_in(6) {
                self.open_again().await;
            }
        }
    }

    pub(super) async fn trim(&mut self) {
        while self.handles.len() > HANDLES_MAX {
            let at = self.rng.below(self.handles.len() as u64) as usize;
            let (_, file) = self.handles.swap_remove(at);
            file.close().await;
        }
    }

    async fn open(&mut self) {
        let Some(id) = self.file() else { return };
        self.open_file(id, None).await;
    }

    /// As many programs leave a file to each other: closed, and opened by the next one while the first
    /// one's end of it is under way.
    async fn open_again(&mut self) {
        let Some((id, file)) = self.handles.pop() else { return };
        self.note(format!("close node {id}"));
        self.done(file.close()).await;
        if self.state.borrow().tree.nodes[&id].links == 0 {
            return;
        }
        if self.rng.one_in(2) {
            reactor::sleep(Duration::from_micros(self.rng.below(8000))).await;
        }
        self.open_file(id, None).await;
    }

    /// Opens a file by its number, or as open(2) with `O_CREAT` does where it has this name.
    async fn open_file(&mut self, id: u64, place: Option<(u64, Vec<u8>)>) {
        let truncate = self.rng.one_in(3);
        let how = if place.is_some() { "open or create" } else { "open" };
        self.note(format!("{how} node {id}{}", if truncate { ", empty" } else { "" }));
        if truncate {
            let change = Change::Truncate { size: 0 };
            self.state.borrow_mut().tree.file(id).will(change);
        }
        let mode = OpenMode { truncate, ..WRITE };
        let opened = match place {
            None => self.done(self.client.open(self.ino(id), mode)).await,
            Some((parent, name)) => {
                let at = self.ino(parent);
                let made = self.client.create_file(CALLER, at, &name, FILE_MODE, mode, false);
                self.done(made).await.map(|(file, attr, _)| (file, attr))
            }
        };
        let opened = opened.map(|(file, attr)| (Shown(file), attr));
        let (file, attr) = self.expect(opened, None).expect("success was expected");
        if truncate {
            self.state.borrow_mut().tree.file(id).data.clear();
        }
        self.same_attr(id, &attr);
        self.handles.push((id, file.0));
        self.trim().await;
    }

    pub(super) fn size_of(&self, id: u64) -> usize {
        self.state.borrow_mut().tree.file(id).data.len()
    }

    pub(super) fn same_bytes(&self, id: u64, seen: &[u8]) {
        let what = difference(&self.state.borrow_mut().tree.file(id).data, seen);
        if let Some(what) = what {
            self.fail(&format!("file {id}: {what}"));
        }
    }

    pub(super) fn same_size(&self, id: u64, size: u64) {
        let expected = self.state.borrow_mut().tree.file(id).data.len() as u64;
        if size != expected {
            self.fail(&format!("node {id} has {size} bytes, expected {expected}"));
        }
    }

    async fn write(&mut self) {
        let Some(at) = self.handle() else { return self.create().await };
        let (id, file) = (self.handles[at].0, self.handles[at].1.clone());
        if !self.rng.one_in(6) {
            return self.write_to(id, &file).await;
        }
        let (offset, data) = self.anything(id);
        self.note(format!("write node {id} durably: {} bytes at {offset}", data.len()));
        self.put_durably(id, &file, offset, data).await;
    }

    pub(super) async fn write_to(&mut self, id: u64, file: &File) {
        let (offset, data) = self.anything(id);
        self.note(format!("write node {id}: {} bytes at {offset}", data.len()));
        self.put(id, file, offset, data).await;
    }

    /// Something to be written, and where.
    fn anything(&mut self, id: u64) -> (usize, Vec<u8>) {
        let size = self.state.borrow_mut().tree.file(id).data.len();
        let (offset, len) = spans::to_write(&mut self.rng, size);
        (offset, self.rng.bytes(len))
    }

    async fn read(&mut self) {
        let Some(at) = self.handle() else { return };
        let (id, file) = (self.handles[at].0, self.handles[at].1.clone());
        let size = self.state.borrow_mut().tree.file(id).data.len();
        let (offset, len) = spans::to_read(&mut self.rng, size);
        self.read_from(id, &file, offset, len).await;
    }

    /// Reads, and compares with the model.
    pub(super) async fn read_from(&self, id: u64, file: &File, offset: usize, len: usize) {
        self.note(format!("read node {id}: {len} bytes at {offset}"));
        let read = self.done(file.read(offset as u64, len as u64)).await;
        let read = joined(&self.expect(read, None).expect("success was expected"));
        let state = Rc::clone(&self.state);
        let mut state = state.borrow_mut();
        let data = &state.tree.file(id).data;
        let size = data.len();
        let expected = &data[offset.min(size)..offset.saturating_add(len).min(size)];
        if let Some(what) = difference(expected, &read) {
            drop(state);
            self.fail(&format!("reading node {id} at {offset}: {what}"));
        }
    }

    async fn truncate(&mut self) {
        // Also of a file that has lost its name.
        let id = match self.handle() {
            Some(at) if self.rng.one_in(2) => self.handles[at].0,
            _ => match self.file() {
                Some(id) => id,
                None => return,
            },
        };
        let now = self.state.borrow_mut().tree.file(id).data.len() as u64;
        let size = match self.rng.below(4) {
            0 => 0,
            1 => self.rng.below(now + 1),
            2 => spans::edge(&mut self.rng, FILE_BYTES_MAX) as u64,
            _ => (now + self.rng.below(20_000)).min(FILE_BYTES_MAX as u64),
        };
        self.note(format!("truncate node {id} from {now} to {size}"));
        let change = Change::Truncate { size: size as usize };
        self.state.borrow_mut().tree.file(id).will(change);
        let ino = self.ino(id);
        let change = AttrChange { size: Some(size), ..AttrChange::default() };
        let attr = self.done(self.client.set_attr(CALLER, ino, change)).await;
        let attr = self.expect(attr, None).expect("success was expected");
        self.state.borrow_mut().tree.file(id).data.resize(size as usize, 0);
        self.same_attr(id, &attr);
    }

    async fn rename(&mut self) {
        let (from, from_name) = self.existing();
        let (to, to_name) =
            if self.rng.one_in(3) { self.existing() } else { (self.directory(), self.name()) };
        let how = *self.rng.pick(&[How::Replace, How::Replace, How::NoReplace, How::Exchange]);
        let (source, target) = (self.entry(from, &from_name), self.entry(to, &to_name));
        let Some(expected) = self.state.borrow().tree.renaming((from, source), (to, target), how)
        else {
            return;
        };
        let (one, other) = (text(&from_name), text(&to_name));
        self.note(format!("rename {one:?} in {from} to {other:?} in {to}, {how:?}"));
        if expected.is_none() {
            let (from, to) = ((from, from_name.clone()), (to, to_name.clone()));
            self.pending(Pending::Rename { from, to, how });
        }
        let places = ((self.ino(from), &from_name[..]), (self.ino(to), &to_name[..]));
        let renamed = self.client.rename(CALLER, places.0, places.1, how.flags());
        let renamed = self.done(renamed).await;
        if self.expect(renamed, expected).is_some() {
            self.state.borrow_mut().tree.rename((from, &from_name), (to, &to_name), how);
            self.renamed();
        }
    }

    async fn link(&mut self) {
        let Some(id) = self.file() else { return };
        let (parent, name) = (self.directory(), self.name());
        let exists = self.entry(parent, &name).is_some();
        self.note(format!("link node {id} as {:?} in {parent}", text(&name)));
        if !exists {
            self.pending(Pending::Link { id, parent, name: name.clone() });
        }
        let (ino, at) = (self.ino(id), self.ino(parent));
        let linked = self.done(self.client.link(CALLER, ino, at, &name)).await;
        if let Some(attr) = self.expect(linked, exists.then_some(MetaFault::Exists)) {
            self.state.borrow_mut().tree.link(id, parent, &name);
            self.renamed();
            let links = self.state.borrow().tree.nodes[&id].links;
            if attr.nlink != links {
                self.fail(&format!("node {id} has {} links, expected {links}", attr.nlink));
            }
        }
    }

    async fn unlink(&mut self) {
        let (parent, name) = self.existing();
        let is_directory =
            |id: u64| matches!(self.state.borrow().tree.nodes[&id].body, Body::Directory(_));
        let expected = match self.entry(parent, &name) {
            None => Some(MetaFault::NotFound),
            Some(id) if is_directory(id) => Some(MetaFault::IsDirectory),
            Some(_) => None,
        };
        let at = self.ino(parent);
        let removed = self.client.unlink(CALLER, at, &name);
        self.remove("unlink", (parent, &name), removed, expected).await;
    }

    async fn remove<T: Debug>(
        &self,
        what: &str,
        (parent, name): (u64, &[u8]),
        removed: impl Future<Output = Result<T, Error>>,
        expected: Option<MetaFault>,
    ) {
        self.note(format!("{what} {:?} in {parent}", text(name)));
        if expected.is_none() {
            self.pending(Pending::Remove { parent, name: name.to_vec() });
        }
        let removed = self.done(removed).await;
        if self.expect(removed, expected).is_some() {
            self.state.borrow_mut().tree.unlink(parent, name);
            self.renamed();
        }
    }

    async fn mkdir(&mut self) {
        let (parent, name) = (self.directory(), self.name());
        if self.state.borrow().tree.directories().len() >= 6 {
            return;
        }
        let exists = self.entry(parent, &name).is_some();
        let body = Body::Directory(Default::default());
        self.note(format!("mkdir {:?} in {parent}", text(&name)));
        if !exists {
            self.pending(Pending::Make {
                parent,
                name: name.clone(),
                mode: DIRECTORY_MODE,
                body: body.clone(),
            });
        }
        let at = self.ino(parent);
        let made = self.client.create(CALLER, at, &name, DIRECTORY_MODE, NewInode::Directory);
        let made = self.done(made).await;
        if let Some(attr) = self.expect(made, exists.then_some(MetaFault::Exists)) {
            self.state.borrow_mut().tree.make(parent, &name, attr.ino, DIRECTORY_MODE, body);
            self.renamed();
        }
    }

    async fn symlink(&mut self) {
        let (parent, name) = (self.directory(), self.name());
        if self.entry(parent, &name).is_some() {
            return;
        }
        let target = format!("somewhere/{}", self.rng.below(1000)).into_bytes();
        let body = Body::Symlink;
        self.note(format!("symlink {:?} in {parent}", text(&name)));
        self.pending(Pending::Make {
            parent,
            name: name.clone(),
            mode: SYMLINK_MODE,
            body: body.clone(),
        });
        let at = self.ino(parent);
        let new = NewInode::Symlink { target: target.clone() };
        let made = self.done(self.client.create(CALLER, at, &name, SYMLINK_MODE, new)).await;
        let attr = self.expect(made, None).expect("success was expected");
        self.state.borrow_mut().tree.make(parent, &name, attr.ino, SYMLINK_MODE, body);
        self.renamed();
        let read = self.done(self.client.read_link(attr.ino)).await;
        if self.expect(read, None) != Some(target) {
            self.fail("a symbolic link reads something else");
        }
    }

    async fn rmdir(&mut self) {
        let (parent, name) = self.existing();
        let expected = match self.entry(parent, &name) {
            None => Some(MetaFault::NotFound),
            Some(id) => match &self.state.borrow().tree.nodes[&id].body {
                Body::Directory(entries) if entries.is_empty() => None,
                Body::Directory(_) => Some(MetaFault::NotEmpty),
                Body::File(_) | Body::Symlink => Some(MetaFault::NotDirectory),
            },
        };
        let at = self.ino(parent);
        let removed = self.client.remove_dir(CALLER, at, &name);
        self.remove("rmdir", (parent, &name), removed, expected).await;
    }

    async fn readdir(&mut self) {
        let id = self.directory();
        self.note(format!("readdir {id}"));
        let listed = self.done(list(&self.client, self.ino(id))).await;
        let listed = self.expect(listed, None).expect("success was expected");
        let state = self.state.borrow();
        let expected: Vec<(Vec<u8>, Ino)> = state
            .tree
            .entries(id)
            .iter()
            .map(|(name, id)| (name.clone(), state.tree.ino(*id)))
            .collect();
        drop(state);
        if listed != expected {
            self.fail(&format!("directory {id} lists {listed:?}, expected {expected:?}"));
        }
    }

    /// How many changes of names each program of this client was told of. A sync of anything makes all of
    /// them durable.
    pub(super) fn told(&self) -> Vec<usize> {
        self.all.borrow().iter().map(|state| state.borrow().past.len() - 1).collect()
    }

    pub(super) fn durable(&self, told: Vec<usize>) {
        for (state, told) in self.all.borrow().iter().zip(told) {
            let mut state = state.borrow_mut();
            state.durable = state.durable.max(told);
        }
    }

    /// As syncfs(2); or of names and attributes alone, as fsync(2) of a directory.
    async fn sync(&mut self) {
        let everything = self.rng.one_in(2);
        self.note(if everything { "sync".into() } else { "sync names".into() });
        let told = self.told();
        let synced = match everything {
            true => self.done(self.client.sync()).await,
            false => self.done(self.client.sync_meta()).await,
        };
        self.expect(synced, None);
        self.durable(told);
        if everything {
            // Of this program's files; the others' may have changed meanwhile.
            self.state.borrow_mut().tree.all_synced();
        }
    }

    /// A program that only reads: opened, read, and read again later, with others' work in between.
    async fn open_to_read(&mut self) {
        if let Some((id, file)) = self.reader.take() {
            let size = self.size_of(id);
            let (offset, len) = spans::to_read(&mut self.rng, size);
            self.read_from(id, &file, offset, len).await;
            self.note(format!("close node {id}, which was read"));
            return self.done(file.close()).await;
        }
        let Some(id) = self.file() else { return };
        self.note(format!("open node {id} to read"));
        let mode = OpenMode { write: false, truncate: false };
        let opened = self.done(self.client.open(self.ino(id), mode)).await;
        let opened = opened.map(|(file, attr)| (Shown(file), attr));
        let (file, attr) = self.expect(opened, None).expect("success was expected");
        self.same_attr(id, &attr);
        self.read_from(id, &file.0, 0, usize::MAX).await;
        self.reader = Some((id, file.0));
    }

    async fn fsync(&mut self) {
        let Some(at) = self.handle() else { return };
        let (id, file) = (self.handles[at].0, self.handles[at].1.clone());
        self.note(format!("fsync node {id}"));
        let told = self.told();
        let synced = self.done(file.fsync()).await;
        self.expect(synced, None);
        self.durable(told);
        self.state.borrow_mut().tree.file(id).synced_now();
    }

    async fn stat(&mut self) {
        let (parent, name) = self.existing();
        self.note(format!("lookup {:?} in {parent}", text(&name)));
        let id = self.entry(parent, &name);
        let at = self.ino(parent);
        let found = self.done(self.client.lookup(at, &name)).await;
        let expected = if id.is_none() { Some(MetaFault::NotFound) } else { None };
        let (Some(attr), Some(id)) = (self.expect(found, expected), id) else { return };
        self.same_attr(id, &attr);
    }

    async fn close(&mut self) {
        let Some(at) = self.handle() else { return };
        let last = self.handles.len() - 1;
        self.handles.swap(at, last);
        if self.rng.one_in(4) {
            return self.open_again().await;
        }
        let (id, file) = self.handles.swap_remove(last);
        self.note(format!("close node {id}"));
        self.done(file.close()).await;
    }

    /// Closes what it has open.
    pub async fn close_all(&mut self) {
        let reader = self.reader.take();
        for (id, file) in std::mem::take(&mut self.handles).into_iter().chain(reader) {
            self.note(format!("close node {id}"));
            self.done(file.close()).await;
        }
    }

    /// Reads everything back through the client that wrote it.
    pub async fn verify(&mut self, coverage: &RefCell<Coverage>) {
        let directories = self.state.borrow().tree.directories();
        for id in directories {
            self.note(format!("check directory {id}"));
            let listed = self.done(list(&self.client, self.ino(id))).await;
            let listed = self.expect(listed, None).expect("success was expected");
            let state = self.state.borrow();
            let expected: Vec<(Vec<u8>, Ino)> = state
                .tree
                .entries(id)
                .iter()
                .map(|(name, id)| (name.clone(), state.tree.ino(*id)))
                .collect();
            drop(state);
            if listed != expected {
                self.fail(&format!("directory {id} lists {listed:?}, expected {expected:?}"));
            }
        }
        let files = self.state.borrow().tree.files();
        for id in files {
            self.note(format!("check file {id}"));
            self.compare_on(&self.client, id).await;
            coverage.borrow_mut().count("files compared", 1);
        }
    }
}

/// `File` has nothing to show.
pub(super) struct Shown(pub File);

impl Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "file {:?}", self.0.ino())
    }
}

pub(super) fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// A failure with what led to it.
pub(super) fn describe(seed: u64, number: u64, what: &str, state: &State) -> String {
    // The last ones, and before them those of the same node.
    let recent = state.history.len().saturating_sub(HISTORY);
    let words: Vec<&str> = what.split_whitespace().collect();
    let node = words.windows(2).find(|pair| matches!(pair[0], "node" | "file"));
    let node = node.map(|pair| format!("node {}", pair[1].trim_end_matches([':', ','])));
    let same = |line: &&String| {
        node.as_ref()
            .is_some_and(|node| line.split(':').next().is_some_and(|l| l.contains(&**node)))
    };
    let earlier = state.history[..recent].iter().filter(same);
    let history: Vec<&str> = earlier.chain(&state.history[recent..]).map(String::as_str).collect();
    format!("seed {seed}: worker {number}: {what}\nlast operations:\n  {}", history.join("\n  "))
}

/// Where two contents differ.
pub(super) fn difference(expected: &[u8], seen: &[u8]) -> Option<String> {
    if expected == seen {
        return None;
    }
    let at = expected.iter().zip(seen).position(|(a, b)| a != b);
    let differ = expected.iter().zip(seen).filter(|(a, b)| a != b).count();
    let zeroes = seen.iter().zip(expected).filter(|(s, e)| s != e && **s == 0).count();
    Some(format!(
        "{} bytes were expected, {} are there; the first difference is at {at:?}, {differ} bytes \
         differ, {zeroes} of them are zero",
        expected.len(),
        seen.len()
    ))
}

/// Names and inodes of a directory, in order of names.
pub(super) async fn list(client: &Client, ino: Ino) -> Result<Vec<(Vec<u8>, Ino)>, Error> {
    let (mut cookie, mut names) = (0, Vec::new());
    loop {
        let (entries, end) = client.read_dir(ino, cookie, 5, false).await?;
        for entry in &entries {
            names.push((entry.name.clone(), entry.ino));
            cookie = entry.cookie;
        }
        if end {
            names.sort();
            return Ok(names);
        }
    }
}

/// A new file, open for writing.
pub(super) async fn create(client: &Client, parent: Ino, name: &[u8]) -> (File, Attr) {
    let made = client.create_file(CALLER, parent, name, FILE_MODE, WRITE, true).await;
    let (file, attr, _) = made.unwrap_or_else(|error| panic!("creating {}: {error}", text(name)));
    (file, attr)
}

/// All bytes of a file.
pub(super) async fn read_whole(client: &Client, ino: Ino) -> Result<Vec<u8>, Error> {
    let (file, attr) = client.open(ino, OpenMode { write: false, truncate: false }).await?;
    let read = file.read(0, attr.size + 1).await;
    file.close().await;
    Ok(joined(&read?))
}

pub(super) fn joined(parts: &[Buf]) -> Vec<u8> {
    let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
    parts.concat()
}

//! One file that is in use here, shared by all its handles: where its bytes lie, what was written, the session.
//!
//! - this module: reads, writes, the session;
//! - `record`: what the metadata service is told of it;
//! - `cut`: truncations;
//! - `holes`: zeroes that are not stored, and where there is data;
//! - `quota`: what may be added to it;
//! - `locks`: locks, asked for one after the other;
//! - `sharing`: what is different while other clients write it, too.
//!
//! What always holds:
//! - A write session is open, durably, before the first write is sent: else a crash could leave bytes behind
//!   that appear in the file later. (That of a new file is made with the file; both can be lost, but then so
//!   is the number that the objects are named by.)
//! - Overlapping writes take turns; a truncation takes its turn with every write.
//! - Size and times reach the metadata service only after the objects are durable, and never
//!   from before a truncation made here, nor, as far as the service can tell, by others.
//! - A truncation that the service waits for is carried to its end before anything else is written or told: its
//!   size alone counts until then.
//! - Of a write that failed the objects say how far it got.
//! - The session ends when no handle is left and nothing written here is unknown there.

mod cut;
mod holes;
mod locks;
mod quota;
mod record;
mod sharing;

pub use holes::Seek;
pub use locks::Cancel;

use crate::client::Core;
use crate::clock;
use crate::error::Error;
use crate::ranges::{Ranges, Writing};
use futures_util::future::join_all;
use levada_base::buf::bytes_in;
use levada_base::ids::{Ino, ObjectId};
use levada_base::sync::{Notify, Semaphore};
use levada_base::{Buf, BufMut, IoVec, planted, reactor};
use levada_wire::attr::{Attr, Kind, Layout, Time};
use levada_wire::frame::PAYLOAD_BYTES_MAX;
use levada_wire::meta::MetaRequest;
use levada_wire::object::Stability;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

/// No byte of a file lies beyond this.
const OFFSET_MAX: u64 = i64::MAX as u64;
/// Buffers whose allocation is larger than this many times their use are copied before they
/// are kept, so that small writes do not hold large buffers.
const WASTE_MAX: usize = 2;

/// A write session at the metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Session {
    Closed,
    Opening,
    /// Opened under this client number; worth nothing under another.
    Open(u64),
    Ending,
}

pub(crate) struct Inode {
    core: Rc<Core>,
    pub(crate) ino: Ino,
    layout: Layout,
    /// The size as far as is known here; others may have made it larger.
    size: Cell<u64>,
    /// Components whose objects must exist.
    components: Cell<u64>,
    /// Components written here, those of which that is not certain (a write failed at them, a hole was made in
    /// what another client may have made), and how far the writes reach.
    written: Cell<u64>,
    doubtful: Cell<u64>,
    written_end: Cell<u64>,
    /// A write failed: it may have reached less far than `written_end` says.
    unsure: Cell<bool>,
    /// Of the last write here that the metadata service does not know of; none when somebody
    /// here has set the time since.
    mtime: Cell<Option<Time>>,
    /// Writes and truncations.
    changes: Cell<u64>,
    /// Counts writes; `recorded` of them are known to the metadata service.
    writes: Cell<u64>,
    recorded: Cell<u64>,
    /// A task tells it of durable writes.
    recording: Cell<bool>,
    session: Cell<Session>,
    session_changed: Notify,
    /// Bytes that may be added in this session; none: not asked yet.
    allowance: Cell<Option<u64>>,
    /// A task sees to it that what is left of it goes back.
    giving_back: Cell<bool>,
    pub(crate) ranges: Ranges,
    /// Held while the metadata service is told a size or a time of modification: by a truncation
    /// from beginning to end.
    size_turn: Rc<Semaphore>,
    /// Truncations begun and ended here, and others' that were heard of: sizes asked for under another count
    /// may be from before one.
    cuts: Cell<u64>,
    /// The service waits for a truncation of this client.
    uncut: Cell<bool>,
    /// A task sees to that.
    finishing: Cell<bool>,
    /// Requests about locks go out one by one, so that the service sees them in the order in which they were made.
    lock_turn: Rc<Semaphore>,
    /// Locks that somebody asked for, also those whose answer has come.
    takings: RefCell<Vec<Weak<locks::Taking>>>,
    /// Other clients write it, too. See `sharing`.
    shared: Cell<bool>,
    /// Something was appended here.
    appended: Cell<bool>,
    /// Held by an append while no other client writes.
    append_turn: Rc<Semaphore>,
    pub(crate) handles: Cell<u32>,
    /// Background work that still needs this entry.
    pub(crate) closing: Cell<u32>,
    /// An error of background work, for the next `fsync`.
    failure: Cell<Option<Error>>,
}

/// A part of a request: one component, one piece of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    component: u32,
    offset: u64,
    bytes: u64,
}

/// Cuts `offset..offset + bytes` where the component changes and where a frame is full.
fn pieces(layout: &Layout, offset: u64, bytes: u64) -> impl Iterator<Item = Piece> + '_ {
    let end = offset + bytes;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at == end {
            return None;
        }
        let (component, run) = layout.locate(at);
        let mut bytes = run.min(end - at);
        // Neighbouring units of one component are one piece.
        while at + bytes < end && layout.locate(at + bytes).0 == component {
            bytes += layout.locate(at + bytes).1.min(end - at - bytes);
        }
        let piece = Piece { component, offset: at, bytes: bytes.min(PAYLOAD_BYTES_MAX as u64) };
        at += piece.bytes;
        Some(piece)
    })
}

/// The part of `data` from `start` on, without copying.
fn slice(data: &IoVec, start: u64, bytes: u64) -> IoVec {
    let (mut skip, mut left) = (start as usize, bytes as usize);
    let mut parts = IoVec::new();
    for part in data {
        if skip >= part.len() {
            skip -= part.len();
            continue;
        }
        let take = (part.len() - skip).min(left);
        if take == 0 {
            break;
        }
        parts.push(part.slice(skip, take));
        (skip, left) = (0, left - take);
    }
    parts
}

/// What is kept must not hold much more memory than it counts.
fn compact(data: IoVec) -> IoVec {
    let bytes = bytes_in(&data) as usize;
    let held: usize = data.iter().map(Buf::allocated_bytes).sum();
    if held <= WASTE_MAX * bytes.max(4096) {
        return data;
    }
    let mut copy = BufMut::for_overwrite(bytes);
    let mut at = 0;
    for part in &data {
        copy[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    copy.freeze().into_vec()
}

impl Inode {
    /// # Errors
    ///
    /// [`Error::Invalid`] when it is not a file, or its layout makes no sense.
    pub(crate) fn new(core: Rc<Core>, attr: &Attr) -> Result<Rc<Self>, Error> {
        let layout = attr.layout.clone().ok_or(Error::Invalid)?;
        let sound = attr.kind == Kind::File
            && layout.stripe_unit > 0
            && (1..=64).contains(&layout.targets.len())
            && layout.targets.iter().all(|target| core.object_target(*target).is_some());
        if !sound {
            return Err(Error::Dialect);
        }
        Ok(Rc::new(Self {
            core,
            ino: attr.ino,
            layout,
            size: Cell::new(attr.size),
            components: Cell::new(attr.components),
            written: Cell::default(),
            doubtful: Cell::default(),
            written_end: Cell::default(),
            unsure: Cell::default(),
            mtime: Cell::default(),
            changes: Cell::default(),
            writes: Cell::default(),
            recorded: Cell::default(),
            recording: Cell::default(),
            session: Cell::new(Session::Closed),
            session_changed: Notify::default(),
            allowance: Cell::default(),
            giving_back: Cell::default(),
            ranges: Ranges::default(),
            size_turn: Semaphore::new(1),
            cuts: Cell::default(),
            uncut: Cell::default(),
            finishing: Cell::default(),
            lock_turn: Semaphore::new(1),
            takings: RefCell::default(),
            shared: Cell::default(),
            appended: Cell::default(),
            append_turn: Semaphore::new(1),
            handles: Cell::default(),
            closing: Cell::default(),
            failure: Cell::default(),
        }))
    }

    /// Counts what changed the size here; attributes asked for before are older than that.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Takes over attributes that were asked for when [`Inode::changes`] said `asked_at`.
    fn refresh(&self, attr: &Attr, asked_at: u64) {
        self.components.set(self.components.get() | attr.components);
        if self.changes.get() == asked_at {
            self.size.set(attr.size);
        }
    }

    /// True while the metadata service waits for something from here. A file whose background
    /// work failed stays so, and the next `sync` tries again.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_dirty() || self.session.get() != Session::Closed || self.uncut.get()
    }

    /// Something is under way that comes to an end by itself.
    pub(crate) fn is_busy(&self) -> bool {
        self.closing.get() > u32::from(self.finishing.get())
    }

    /// Nobody uses it, and nobody would end its session.
    pub(crate) fn is_left_open(&self) -> bool {
        let is_unused = self.handles.get() == 0 && self.closing.get() == 0;
        let is_left =
            matches!(self.session.get(), Session::Open(_)) || self.is_dirty() || self.uncut.get();
        is_unused && is_left && self.failure.get().is_none()
    }

    fn is_dirty(&self) -> bool {
        self.writes.get() != self.recorded.get()
    }

    fn object(&self, component: u32) -> ObjectId {
        self.layout.object(self.core.fs_id(), self.ino, component)
    }

    fn target(&self, component: u32) -> Rc<crate::target::ObjectTarget> {
        let id = self.layout.targets[component as usize];
        self.core.object_target(id).expect("checked when the file came into use")
    }

    fn components_in(&self, bits: u64) -> impl Iterator<Item = u32> + '_ {
        (0..self.layout.targets.len() as u32).filter(move |component| bits >> component & 1 == 1)
    }

    fn every_component(&self) -> u64 {
        u64::MAX >> (64 - self.layout.targets.len())
    }

    pub(crate) async fn write(self: &Rc<Self>, offset: u64, data: IoVec) -> Result<(), Error> {
        self.write_as(offset, data, Stability::Unstable).await
    }

    /// Writes so that the bytes survive whatever restarts: the objects' logs have them, and the session is open, by which
    /// the service asks the objects should this client be gone. It is told of them later.
    pub(crate) async fn write_durably(
        self: &Rc<Self>,
        offset: u64,
        data: IoVec,
    ) -> Result<(), Error> {
        let is_within = offset.saturating_add(bytes_in(&data)) <= self.size.get();
        let is_forgotten = planted!("client-durable-unstable");
        let stability = if is_forgotten { Stability::Unstable } else { Stability::Durable };
        self.write_as(offset, data, stability).await?;
        // A session that is over here without a word would leave these bytes to nobody.
        let client = self.core.meta.client();
        let is_open = self.session.get() == Session::Open(client)
            && self.core.meta.certain_as(client).await?.is_some();
        if !is_within || !is_open {
            return self.sync().await;
        }
        self.record_soon();
        // The file itself may be new.
        self.core.meta.sync().await
    }

    async fn write_as(
        self: &Rc<Self>,
        offset: u64,
        data: IoVec,
        stability: Stability,
    ) -> Result<(), Error> {
        let bytes = bytes_in(&data);
        let end = offset.checked_add(bytes).filter(|end| *end <= OFFSET_MAX);
        let end = end.ok_or(Error::Invalid)?;
        if bytes == 0 {
            return Ok(());
        }
        let data = compact(data);
        self.admit(offset, bytes).await?;
        let _turn = self.turn_to_write(offset, end).await?;
        let parts = pieces(&self.layout, offset, bytes).map(|piece| {
            let part = slice(&data, piece.offset - offset, piece.bytes);
            async move {
                let (target, object) = (self.target(piece.component), self.object(piece.component));
                let write = || target.write(object, piece.offset, part.clone(), stability);
                let done = self.core.with_room(&target, (object, piece.bytes), write).await;
                self.reached(piece.component, done.is_ok());
                done
            }
        });
        self.wrote(join_all(parts).await, end)
    }

    /// Waits for the turn to write `start..end`, with the session open and no truncation half-way.
    async fn turn_to_write(self: &Rc<Self>, start: u64, end: u64) -> Result<Writing<'_>, Error> {
        loop {
            self.finish_cut().await?;
            let turn = self.ranges.write(start, end).await;
            self.begin_session().await?;
            if !self.uncut.get() {
                return Ok(turn);
            }
        }
    }

    /// A component was sent a change; its object is there now, or may be.
    fn reached(&self, component: u32, is_there: bool) {
        let reached = if is_there { &self.written } else { &self.doubtful };
        reached.set(reached.get() | 1 << component);
    }

    /// A write, of this outcome in each of its components, is over; it reached up to `end`.
    fn wrote(&self, parts: Vec<Result<(), Error>>, end: u64) -> Result<(), Error> {
        self.mtime.set(Some(clock::now()));
        self.writes.set(self.writes.get() + 1);
        self.changes.set(self.changes.get() + 1);
        self.written_end.set(self.written_end.get().max(end));
        if let Err(error) = parts.into_iter().collect::<Result<(), Error>>() {
            self.unsure.set(true);
            return Err(error);
        }
        self.size.set(self.size.get().max(end));
        Ok(())
    }

    /// The service opened the session when it made the file.
    pub(crate) fn session_began(&self) {
        if self.session.get() == Session::Closed {
            self.session.set(Session::Open(self.core.meta.client()));
            self.allowance.set(None);
        }
    }

    /// Opens the write session unless it is open.
    async fn begin_session(self: &Rc<Self>) -> Result<(), Error> {
        loop {
            let changed = self.session_changed.changed();
            match self.session.get() {
                Session::Open(client) if client == self.core.meta.client() => return Ok(()),
                Session::Closed => break,
                Session::Open(_) => {
                    // What was written may have been cut by others since the lease was lost.
                    self.unsure.set(true);
                    break;
                }
                Session::Opening | Session::Ending => changed.await,
            }
        }
        self.session.set(Session::Opening);
        self.allowance.set(None);
        let inode = Rc::clone(self);
        self.closing.set(self.closing.get() + 1);
        // A task, so that the state moves on also when the writer gives up.
        let opening = reactor::spawn(async move {
            let begin = MetaRequest::BeginWrite { ino: inode.ino };
            let begun = inode.core.meta.change_durably(begin).await;
            let result = begun.and_then(|reply| inode.core.attr_of(reply)).map(|attr| {
                if !inode.is_dirty() {
                    // What an earlier session wrote may have been cut by others since.
                    inode.written_end.set(inode.written_end.get().min(attr.size));
                }
                // Of which this client knew nothing.
                inode.uncut.set(inode.uncut.get() || attr.cut);
                inode.shared.set(inode.shared.get() || attr.others);
            });
            let client = inode.core.meta.client();
            inode.session.set(if result.is_ok() { Session::Open(client) } else { Session::Closed });
            inode.session_changed.notify_all();
            Rc::clone(&inode.core).let_go(inode);
            result
        });
        opening.await.unwrap_or(Err(Error::Closed))
    }

    /// Reads what there is of `offset..offset + bytes`: fewer bytes at the end of the file.
    pub(crate) async fn read(self: &Rc<Self>, offset: u64, bytes: u64) -> Result<IoVec, Error> {
        let wanted_end = offset.saturating_add(bytes).min(OFFSET_MAX);
        if wanted_end <= offset {
            return Ok(IoVec::new());
        }
        self.ranges.passed(offset, wanted_end).await;
        let end = wanted_end.min(self.size_upto(wanted_end).await?);
        if end <= offset {
            return Ok(IoVec::new());
        }
        let parts = pieces(&self.layout, offset, end - offset).map(|piece| async move {
            let target = self.target(piece.component);
            // Before it is asked: its first write may be done meanwhile.
            let must_exist = self.must_exist(piece.component);
            let data = target.read(self.object(piece.component), piece.offset, piece.bytes).await?;
            match data {
                Some(data) => Ok(data),
                None if must_exist => Err(self.missing(piece.component)),
                None => Ok(BufMut::zeroed(piece.bytes as usize).freeze().into_vec()),
            }
        });
        let mut whole = IoVec::new();
        for part in join_all(parts).await {
            whole.extend(part?);
        }
        Ok(whole)
    }

    /// The size; when less than `end` is known of, as the service says: somebody else may have made it larger.
    async fn size_upto(&self, end: u64) -> Result<u64, Error> {
        if end > self.size.get() {
            self.core.attr(self.ino).await?;
        }
        Ok(self.size.get())
    }

    fn must_exist(&self, component: u32) -> bool {
        (self.components.get() | self.written.get()) >> component & 1 == 1
    }

    fn missing(&self, component: u32) -> Error {
        tracing::error!(ino = self.ino.0, component, "an object is missing");
        Error::Missing { component }
    }

    /// Completes the attributes with what only the objects and this client know. They were
    /// asked for when [`Inode::changes`] said `asked_at`.
    pub(crate) async fn complete(
        self: &Rc<Self>,
        mut attr: Attr,
        asked_at: u64,
    ) -> Result<Attr, Error> {
        // What only this client wrote it knows itself.
        let is_open = self.session.get() == Session::Open(self.core.meta.client());
        let mine = !attr.others && is_open && !self.unsure.get();
        if attr.writers && mine {
            attr.size = attr.size.max(self.written_end.get());
        } else if attr.writers {
            let sizes = self.components_in(self.every_component()).map(|component| {
                let (target, object) = (self.target(component), self.object(component));
                async move { target.stat(object).await }
            });
            for stat in join_all(sizes).await {
                attr.size = attr.size.max(stat?.map_or(0, |stat| stat.size));
            }
        }
        self.refresh(&attr, asked_at);
        if let Some(mtime) = self.mtime.get() {
            attr.mtime = attr.mtime.max(mtime);
            attr.ctime = attr.ctime.max(attr.mtime);
        }
        Ok(attr)
    }
}

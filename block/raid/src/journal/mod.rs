//! The journal of levels with parity: what an overwrite changes is here, whole, before any of it is in place.
//!
//! A power cut half-way through an overwrite leaves data and parity that do not belong together; with a member lost as
//! well, blocks that nobody wrote would read as rubbish (the *write hole*). So new data and new parity first go to the
//! journals of M + 1 members as one record, and at the next open whatever was recorded is written in place again.
//! Format and proof: docs/design/0015-parity-journal.md.
//!
//! What always holds:
//! - Nothing of an update is written in place before its record is durable on as many members as may be lost from then on,
//!   and one more.
//! - A record keeps its meaning until a flush covers all that it says, and its room until a durable record says so.
//! - Stripes that get new contents in another way (declared fresh, discarded) have no record with a meaning.
//!
//! Each group of roles ([`crate::rotation::Groups`]) has a journal of its own, as losses count by group. Updates that come
//! while records are on their way share the next one.

mod record;
mod replay;
mod ring;

pub(crate) use record::{Piece, decode, seal};
pub(crate) use ring::Ring;

use crate::engine::Engine;
use crate::layout::Layout;
use crate::member::{Member, MemberState};
use futures_util::future::join_all;
use levada_base::sync::{Notify, oneshot};
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, IoVec, planted, reactor};
use levada_device::{BlockError, Durability};
use record::{Header, PAYLOAD_BLOCKS_MAX, PIECES_MAX};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

/// Records of a group on their way at once.
const IN_FLIGHT: u32 = 2;

/// Of the area, what one record's contents may take at most: room for several must be left when it is nearly full.
const RECORD_SHARE: u64 = 8;

/// See the module.
pub(crate) struct Journal {
    groups: Vec<Group>,
    /// Sequence of the next record.
    next: Cell<u64>,
    /// Records below this have no meaning, says the superblock.
    pub from: Cell<u64>,
    /// Blocks of a member's area.
    area: u64,
    /// Most blocks of contents in one record.
    limit: u64,
    /// An update is in place, a record durable, or a flush has covered some.
    changed: Notify,
}

#[derive(Default)]
struct Group {
    waiting: RefCell<VecDeque<Waiting>>,
    /// Tasks that write records.
    writers: Cell<u32>,
    /// The last record.
    last: Cell<u64>,
    /// Records that have a meaning, and how many of their updates are not in place.
    open: RefCell<BTreeMap<u64, u32>>,
    /// Records below this have no meaning: a flush covers them. And: a durable record says so.
    tail: Cell<u64>,
    durable_tail: Cell<u64>,
    /// Stripes of which a record may be found after a crash: the last one.
    stripes: RefCell<HashMap<u64, u64>>,
    /// Somebody makes room.
    clearing: Cell<bool>,
}

impl Group {
    /// Without records, whose first sequence will be `from` or a later one.
    fn from(from: u64) -> Self {
        Self { tail: Cell::new(from), durable_tail: Cell::new(from), ..Self::default() }
    }
}

/// An update that waits for its record.
struct Waiting {
    pieces: Vec<Piece>,
    payload: IoVec,
    blocks: u64,
    logged: oneshot::Sender<Result<u64, BlockError>>,
}

/// An update whose record is durable, and that is not in place yet.
#[must_use]
pub(crate) struct Logged {
    group: usize,
    sequence: u64,
}

/// Room for a record, by member.
type Holders = SmallVec<[(Rc<Member>, u64); 4]>;

impl Journal {
    /// `None` when the level needs none, or members have no room for one.
    pub fn new(layout: &Layout, journal_bytes: u64, from: u64) -> Option<Self> {
        let groups = layout.groups()?.groups;
        let area = journal_bytes / BLOCK_BYTES;
        // Never more pieces than blocks, so that whatever has few enough blocks fits.
        let limit = (area / RECORD_SHARE).min(PAYLOAD_BLOCKS_MAX).min(PIECES_MAX as u64);
        (limit >= layout.chunks() as u64).then(|| Self {
            groups: (0..groups).map(|_| Group::from(from)).collect(),
            next: Cell::new(from),
            from: Cell::new(from),
            area,
            limit,
            changed: Notify::default(),
        })
    }

    /// The smallest area with which a level is journaled, in bytes.
    pub fn bytes_min(chunks: usize) -> u64 {
        chunks as u64 * RECORD_SHARE * BLOCK_BYTES
    }

    /// Most blocks of one update.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Room that ordinary records leave: for those that tell of the tail, and for what a start records again.
    fn spare(&self) -> u64 {
        u64::from(IN_FLIGHT + 1) * (self.limit + 2)
    }

    fn group_of(&self, stripe: u64) -> usize {
        (stripe % self.groups.len() as u64) as usize
    }

    /// Records up to which all updates are in place, by group: what a flush that begins now covers.
    pub fn in_place(&self) -> SmallVec<[u64; 4]> {
        let upto = |group: &Group| {
            let open = group.open.borrow();
            let unfinished =
                open.iter().find(|(_, left)| **left > 0).map(|(sequence, _)| *sequence);
            unfinished.unwrap_or(self.next.get())
        };
        self.groups.iter().map(upto).collect()
    }

    /// A flush has covered what [`Journal::in_place`] said before it began.
    pub fn covered(&self, upto: &[u64]) {
        for (group, upto) in self.groups.iter().zip(upto) {
            if *upto > group.tail.get() {
                group.tail.set(*upto);
                let mut open = group.open.borrow_mut();
                *open = open.split_off(upto);
                self.changed.notify_all();
            }
        }
    }

    /// The update is in place.
    pub fn done(&self, logged: Logged) {
        let mut open = self.groups[logged.group].open.borrow_mut();
        if let Some(left) = open.get_mut(&logged.sequence) {
            *left -= 1;
        }
        drop(open);
        self.changed.notify_all();
    }

    /// Nothing that was recorded has a meaning any more, once the superblock says so.
    pub fn forget_all(&self) {
        let next = self.next.get();
        self.from.set(next);
        for group in &self.groups {
            group.tail.set(next);
            group.durable_tail.set(next);
            group.open.borrow_mut().clear();
            group.stripes.borrow_mut().clear();
        }
    }

    fn is_recorded(&self, group: usize, stripes: &Range<u64>) -> bool {
        let group = &self.groups[group];
        let listed = group.stripes.borrow();
        listed
            .iter()
            .any(|(stripe, last)| stripes.contains(stripe) && *last >= group.durable_tail.get())
    }
}

impl Engine {
    /// Makes an update durable in the journal; then it may be written in place, and [`Journal::done`] says that it is. At
    /// most [`Journal::limit`] blocks, all of that stripe.
    pub async fn log(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        stripe: u64,
        pieces: Vec<Piece>,
        payload: IoVec,
    ) -> Result<Logged, BlockError> {
        let number = journal.group_of(stripe);
        let group = &journal.groups[number];
        let blocks = pieces.iter().map(|piece| piece.blocks).sum();
        let (sender, logged) = oneshot::channel();
        let waiting = Waiting { pieces, payload, blocks, logged: sender };
        group.waiting.borrow_mut().push_back(waiting);
        if group.writers.get() < IN_FLIGHT {
            group.writers.set(group.writers.get() + 1);
            let (engine, journal) = (Rc::clone(self), Rc::clone(journal));
            reactor::spawn_in(&self.group, async move {
                engine.write_records(&journal, number).await;
                let writers = &journal.groups[number].writers;
                writers.set(writers.get() - 1);
            });
        }
        let sequence = logged.await.unwrap_or(Err(BlockError::Gone))?;
        Ok(Logged { group: number, sequence })
    }

    /// Records what waits, as much at once as a record takes.
    async fn write_records(self: &Rc<Self>, journal: &Rc<Journal>, number: usize) {
        let group = &journal.groups[number];
        loop {
            let mut batch: Vec<Waiting> = Vec::new();
            let mut blocks = 0;
            {
                let mut waiting = group.waiting.borrow_mut();
                while let Some(next) = waiting.front()
                    && blocks + next.blocks <= journal.limit
                {
                    blocks += next.blocks;
                    batch.extend(waiting.pop_front());
                }
            }
            if batch.is_empty() {
                return;
            }
            let pieces = batch.iter().flat_map(|update| update.pieces.iter().copied()).collect();
            let payload: IoVec =
                batch.iter().flat_map(|update| update.payload.iter().cloned()).collect();
            let updates = batch.len() as u32;
            let result = self.write_record(journal, number, pieces, &payload, updates).await;
            for update in batch {
                update.logged.send(result.clone());
            }
        }
    }

    /// Writes a record when there is room; its sequence.
    async fn write_record(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        number: usize,
        pieces: Vec<Piece>,
        payload: &[Buf],
        updates: u32,
    ) -> Result<u64, BlockError> {
        let blocks = 1 + pieces.iter().map(|piece| piece.blocks).sum::<u64>();
        loop {
            self.check_running()?;
            let changed = journal.changed.changed();
            if let Some((sequence, holders)) =
                self.reserve(journal, number, blocks, journal.spare(), updates)
            {
                let header = self.header(journal, number, sequence, pieces);
                self.write_to(journal, number, &header, payload, &holders).await?;
                return Ok(sequence);
            }
            if !self.make_room(journal, number).await? {
                changed.await;
            }
        }
    }

    fn header(
        &self,
        journal: &Journal,
        number: usize,
        sequence: u64,
        pieces: Vec<Piece>,
    ) -> Header {
        let group = &journal.groups[number];
        let mut stripes = group.stripes.borrow_mut();
        for piece in &pieces {
            stripes.insert(piece.stripe, sequence);
        }
        Header { epoch: self.epoch, sequence, tail: group.tail.get(), pieces }
    }

    /// Takes a sequence and room on the members that are to hold the record: those that have most of it.
    fn reserve(
        &self,
        journal: &Journal,
        number: usize,
        blocks: u64,
        spare: u64,
        updates: u32,
    ) -> Option<(u64, Holders)> {
        let copies = self.layout.level.tolerates() + 1;
        let copies = if planted!("raid-journal-copy-left-out") { copies - 1 } else { copies };
        let sequence = journal.next.get();
        let players = self.players_of(number);
        let holders = Self::hold(journal, players, copies, sequence, (blocks, spare))?;
        journal.next.set(sequence + 1);
        let group = &journal.groups[number];
        group.last.set(sequence);
        group.open.borrow_mut().insert(sequence, updates);
        Some((sequence, holders))
    }

    /// Takes room for so many blocks, beside what is to be spared, on as many of these members, or on all of them.
    fn hold(
        journal: &Journal,
        mut players: Vec<Rc<Member>>,
        copies: usize,
        sequence: u64,
        (blocks, spare): (u64, u64),
    ) -> Option<Holders> {
        // Equals in turns.
        let turn = (sequence as usize * copies) % players.len().max(1);
        players.rotate_left(turn);
        players.sort_by_key(|member| {
            let is_whole = member.state.get() == MemberState::InSync;
            (!is_whole, member.ring.borrow().used() / (journal.area / 8).max(1))
        });
        players.truncate(copies);
        let has_room =
            |member: &Rc<Member>| member.ring.borrow().has_room(journal.area, blocks, spare);
        if players.is_empty() || !players.iter().all(has_room) {
            return None;
        }
        let place = |member: Rc<Member>| {
            let start = member.ring.borrow_mut().reserve(journal.area, sequence, blocks, spare);
            (member, start.expect("it has room"))
        };
        Some(players.into_iter().map(place).collect())
    }

    /// Those who play a role of the group.
    fn players_of(&self, number: usize) -> Vec<Rc<Member>> {
        let width = self.layout.groups().map_or(self.layout.width, |groups| groups.width);
        (number * width..(number + 1) * width).filter_map(|role| self.player(role)).collect()
    }

    async fn write_to(
        self: &Rc<Self>,
        journal: &Journal,
        number: usize,
        header: &Header,
        payload: &[Buf],
        holders: &Holders,
    ) -> Result<(), BlockError> {
        let parts = header.encode(self.uuid, payload);
        let durability = match planted!("raid-journal-not-durable") {
            true => Durability::Volatile,
            false => Durability::Fua,
        };
        let writes = holders.iter().map(|(member, start)| {
            let at = self.areas.journal_at + start * BLOCK_BYTES;
            self.member_write(member, at, parts.clone(), durability)
        });
        join_all(writes).await;
        // Those that missed it are out, and on record as such. As long as the array bears that, enough have it.
        self.settle().await?;
        let group = &journal.groups[number];
        if header.tail > group.durable_tail.get() {
            group.durable_tail.set(header.tail);
            for member in self.players_of(number) {
                member.ring.borrow_mut().free_below(header.tail);
            }
            group.stripes.borrow_mut().retain(|_, last| *last >= header.tail);
        }
        journal.changed.notify_all();
        Ok(())
    }

    /// Flushes, so that records lose their meaning, and says so in a record. False when that brought nothing, or somebody
    /// else is at it.
    async fn make_room(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        number: usize,
    ) -> Result<bool, BlockError> {
        let group = &journal.groups[number];
        if group.clearing.replace(true) {
            return Ok(false);
        }
        let result = self.clear(journal, number).await;
        group.clearing.set(false);
        result
    }

    async fn clear(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        number: usize,
    ) -> Result<bool, BlockError> {
        self.flush().await?;
        let group = &journal.groups[number];
        let before = group.durable_tail.get();
        if group.tail.get() > before
            && let Some((sequence, holders)) = self.reserve(journal, number, 1, 0, 0)
        {
            let header = self.header(journal, number, sequence, Vec::new());
            self.write_to(journal, number, &header, &[], &holders).await?;
        }
        Ok(group.durable_tail.get() > before)
    }

    /// Makes all records so far lose their meaning, for good.
    pub async fn void_all_records(self: &Rc<Self>) -> Result<(), BlockError> {
        let Some(journal) = self.journal.clone() else { return Ok(()) };
        let upto = journal.next.get();
        for (number, group) in journal.groups.iter().enumerate() {
            loop {
                self.check_running()?;
                let changed = journal.changed.changed();
                let last = group.last.get().min(upto.saturating_sub(1));
                if last < group.durable_tail.get() {
                    break;
                }
                if !self.make_room(&journal, number).await? {
                    changed.await;
                }
            }
        }
        Ok(())
    }

    /// Makes records of these stripes lose their meaning, for good. The caller holds the stripes: no update of them is on
    /// its way.
    pub async fn void_records(self: &Rc<Self>, stripes: &Range<u64>) -> Result<(), BlockError> {
        let Some(journal) = self.journal.clone() else { return Ok(()) };
        if planted!("raid-journal-not-voided") {
            return Ok(());
        }
        for number in 0..journal.groups.len() {
            loop {
                self.check_running()?;
                let changed = journal.changed.changed();
                if !journal.is_recorded(number, stripes) {
                    break;
                }
                // Updates of other stripes may be on their way before those of these.
                if !self.make_room(&journal, number).await? {
                    changed.await;
                }
            }
        }
        Ok(())
    }
}

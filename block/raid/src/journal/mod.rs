//! The journal of levels with parity: what an overwrite changes is here, whole, before any of it is in place.
//!
//! A power cut half-way through an overwrite leaves data and parity that do not belong together; with a member lost as
//! well, blocks that nobody wrote would read as rubbish (the *write hole*). So new data and new parity first go to the
//! journals of members as one record, which can be read whichever M of them are absent: a small one is whole on M + 1, a
//! large one is [`split()`] over more. At the next open whatever was recorded is written in place again.
//! Format and proof: docs/design/0015-parity-journal.md.
//!
//! What always holds:
//! - Nothing of an update is written in place before so much of its record is durable that it can be read whoever may be lost
//!   from then on.
//! - A record keeps its meaning until a flush covers all that it says, and its room until a durable record says so.
//! - Of a stripe that is overwritten whole only its number is recorded: at the next open its parity is made anew from whatever
//!   data is there, old or new, and what is absent of it is lost ([`crate::lost`]). So the array's flush does not return
//!   before such records have lost their meaning, and a stripe that is listed has no contents in any other record with one.
//! - Stripes that get new contents in another way (declared fresh, discarded) have no record with a meaning.
//!
//! Each group of roles ([`crate::rotation::Groups`]) has a journal of its own, as losses count by group. Updates that come
//! while records are on their way share the next one.

mod record;
mod replay;
mod ring;
mod split;

pub(crate) use record::{Piece, decode, seal};
pub(crate) use ring::Ring;

use crate::engine::Engine;
use crate::layout::Layout;
use crate::member::Member;
use crate::redundancy::Redundancy;
use crate::superblock::Areas;
use futures_util::future::join_all;
use levada_base::sync::{Notify, oneshot};
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, IoVec, planted, probe, reactor};
use levada_device::{BlockError, Durability};
use levada_parity::Code;
use record::{Header, PAYLOAD_BLOCKS_MAX, PIECES_MAX};
use smallvec::SmallVec;
use split::{fragments_for, split};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

/// Records of a group on their way at once. More leave no room for any in the smallest journal.
const IN_FLIGHT: u32 = 2;
/// Updates share a record as long as it has no more blocks of contents: the header counts for little by then, and what comes
/// behind it on its members waits for it.
const SHARED_BLOCKS_MAX: u64 = 96;
/// A record of less than [`LISTED_TOGETHER`] numbers waits while so many listed stripes are being written in place: those keep
/// the members busy, and what they do not spend on records goes to data. Not of many more: what a record lets go on is to
/// queue behind the next one.
const BUSY_WITH: u32 = 4;
const LISTED_TOGETHER: usize = 4;

/// Far more records than are on their way at once.
const SEQUENCES_SKIPPED: u64 = 1 << 20;

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
    /// By number of fragments, from 2 on, their parity. Empty: records are not split.
    codes: Vec<Code>,
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
    /// Stripes of which contents may be found after a crash, and those that may be found listed: the last record.
    stripes: RefCell<HashMap<u64, u64>>,
    listed: RefCell<HashMap<u64, u64>>,
    /// Stripes that are about to be listed, and those that are and are not in place.
    listing: Cell<usize>,
    listed_under_way: Cell<u32>,
    /// The last record of which a listed stripe is in place.
    listed_done: Cell<u64>,
    /// Somebody makes room.
    clearing: Cell<bool>,
}

impl Group {
    /// Without records, whose first sequence will be `from` or a later one.
    fn from(from: u64) -> Self {
        Self { tail: Cell::new(from), durable_tail: Cell::new(from), ..Self::default() }
    }

    /// Stripes that may be found listed after a crash, or are about to be.
    fn listed_stripes(&self) -> usize {
        self.listed.borrow().len() + self.listing.get()
    }

    /// Whether what is to be recorded are a few numbers of stripes, and the members are busy with others.
    fn may_wait(&self) -> bool {
        let waiting = self.waiting.borrow();
        let are_few = waiting.len() < LISTED_TOGETHER && waiting.iter().all(|w| w.blocks == 0);
        are_few && !waiting.is_empty() && self.listed_under_way.get() >= BUSY_WITH
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
    is_listed: bool,
}

/// A member, and where on it there is room for a record.
type Holder = (Rc<Member>, u64);
type Holders = SmallVec<[Holder; 4]>;

/// A sequence for a record, how it is cut, and room for it.
struct Reserved {
    sequence: u64,
    fragments: usize,
    holders: Holders,
}

impl Journal {
    /// `None` when the level needs none, or members have no room for one.
    pub fn new(layout: &Layout, areas: &Areas, from: u64) -> Option<Self> {
        let groups = layout.groups()?;
        let area = areas.journal_bytes / BLOCK_BYTES;
        // Never more pieces than blocks, so that whatever has few enough blocks fits.
        let limit = (area / RECORD_SHARE).min(PAYLOAD_BLOCKS_MAX).min(PIECES_MAX as u64);
        // As many as there are players beside those that hold the parity.
        let most = if areas.splits_records { groups.width - layout.level.tolerates() } else { 1 };
        let code = |data: usize| Redundancy::code_of(layout.level, data)?.ok();
        let codes = (2..=most).map(code).collect::<Option<Vec<Code>>>()?;
        (limit >= layout.chunks() as u64).then(|| Self {
            groups: (0..groups.groups).map(|_| Group::from(from)).collect(),
            next: Cell::new(from),
            from: Cell::new(from),
            area,
            limit,
            codes,
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

    /// The parity of a record with so many fragments; `None` when each holder has all of it.
    fn code(&self, fragments: usize) -> Option<&Code> {
        self.codes.get(fragments.checked_sub(2)?)
    }

    /// Most blocks of several updates that share a record.
    fn shared_limit(&self) -> u64 {
        self.limit.min(SHARED_BLOCKS_MAX)
    }

    /// Room that ordinary records leave: for those that tell of the tail, and for what a start records again.
    fn spare(&self) -> u64 {
        u64::from(IN_FLIGHT + 1) * (self.limit + 2)
    }

    fn group_of(&self, stripe: u64) -> usize {
        (stripe % self.groups.len() as u64) as usize
    }

    /// Records below this are in place, all updates of them.
    fn in_place_of(&self, group: &Group) -> u64 {
        let open = group.open.borrow();
        let unfinished = open.iter().find(|(_, left)| **left > 0).map(|(sequence, _)| *sequence);
        unfinished.unwrap_or(self.next.get())
    }

    /// [`Self::in_place_of`] by group: what a flush that begins now covers.
    pub fn in_place(&self) -> SmallVec<[u64; 4]> {
        self.groups.iter().map(|group| self.in_place_of(group)).collect()
    }

    /// By group: the last record with a stripe that was overwritten whole, which a flush that begins now must cover.
    pub fn listed(&self) -> SmallVec<[u64; 4]> {
        self.groups.iter().map(|group| group.listed_done.get()).collect()
    }

    /// Stripes that may be found listed after a crash.
    pub fn listed_stripes(&self) -> usize {
        self.groups.iter().map(Group::listed_stripes).sum()
    }

    /// Whether any of these records, by group, may be found after a crash.
    pub fn is_live(&self, records: &[u64]) -> bool {
        let mut all = self.groups.iter().zip(records);
        all.any(|(group, record)| *record > 0 && *record >= group.durable_tail.get())
    }

    /// The array has stopped: nobody shall wait.
    pub fn stopped(&self) {
        self.changed.notify_all();
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
        let group = &self.groups[logged.group];
        let mut open = group.open.borrow_mut();
        if let Some(left) = open.get_mut(&logged.sequence) {
            *left -= 1;
        }
        drop(open);
        if logged.is_listed {
            group.listed_under_way.set(group.listed_under_way.get() - 1);
            group.listed_done.set(group.listed_done.get().max(logged.sequence));
        }
        self.changed.notify_all();
    }

    /// Gives no sequence to another record that an earlier owner may have given to one which nobody could read just now.
    pub fn skip_sequences(&self) {
        self.next.set(self.next.get() + SEQUENCES_SKIPPED);
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
            group.listed.borrow_mut().clear();
        }
    }

    fn is_recorded(&self, group: usize, stripes: &Range<u64>) -> bool {
        let group = &self.groups[group];
        let any = |records: &RefCell<HashMap<u64, u64>>| {
            let is_live = |(stripe, last): (&u64, &u64)| {
                stripes.contains(stripe) && *last >= group.durable_tail.get()
            };
            records.borrow().iter().any(is_live)
        };
        any(&group.stripes) || any(&group.listed)
    }

    /// Stripes of which something may be found after a crash.
    pub fn stripes(&self) -> Vec<u64> {
        let live = |group: &Group| {
            let tail = group.durable_tail.get();
            let (stripes, listed) = (group.stripes.borrow(), group.listed.borrow());
            let all = stripes.iter().chain(listed.iter()).filter(|(_, last)| **last >= tail);
            all.map(|(stripe, _)| *stripe).collect::<Vec<u64>>()
        };
        self.groups.iter().flat_map(live).collect()
    }

    /// Whether contents of this stripe may be found after a crash.
    pub fn has_contents(&self, stripe: u64) -> bool {
        let group = &self.groups[self.group_of(stripe)];
        let last = group.stripes.borrow().get(&stripe).copied();
        last.is_some_and(|last| last >= group.durable_tail.get())
    }

    /// Whether this stripe may be found listed after a crash.
    pub fn is_listed(&self, stripe: u64) -> bool {
        let group = &self.groups[self.group_of(stripe)];
        let last = group.listed.borrow().get(&stripe).copied();
        last.is_some_and(|last| last >= group.durable_tail.get())
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
        let is_listed = pieces.iter().any(Piece::is_listed);
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
        Ok(Logged { group: number, sequence, is_listed })
    }

    /// As [`Engine::log`], for a stripe that is overwritten whole: its number only. `None` when so many are listed already
    /// that no more could be lost.
    pub async fn log_listed(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        stripe: u64,
    ) -> Result<Option<Logged>, BlockError> {
        let number = journal.group_of(stripe);
        let group = &journal.groups[number];
        // Each group its share, and as many chunks of a stripe as may be absent. An eighth is for what a start cannot read
        // besides: without room for that it fails.
        let room =
            || self.lost.room() * 7 / 8 / self.layout.level.tolerates() / journal.groups.len();
        if room() == 0 {
            return Ok(None);
        }
        if group.listed_stripes() >= room() / 2 && !group.clearing.get() {
            let (engine, journal) = (Rc::clone(self), Rc::clone(journal));
            reactor::spawn_in(&self.group, async move {
                // Whoever needs the room meets the error, too.
                let _ = engine.make_room(&journal, number).await;
            });
        }
        loop {
            let changed = journal.changed.changed();
            self.check_running()?;
            if group.listed_stripes() < room() {
                break;
            }
            if room() == 0 {
                // A rebuild has taken it meanwhile.
                return Ok(None);
            }
            if !self.make_room(journal, number).await? {
                changed.await;
            }
        }
        group.listing.set(group.listing.get() + 1);
        let pieces = vec![Piece::listed(stripe)];
        let logged = self.log(journal, stripe, pieces, IoVec::new()).await;
        group.listing.set(group.listing.get() - 1);
        let logged = logged?;
        group.listed_under_way.set(group.listed_under_way.get() + 1);
        Ok(Some(logged))
    }

    /// Records what waits, as much at once as a record takes.
    async fn write_records(self: &Rc<Self>, journal: &Rc<Journal>, number: usize) {
        let group = &journal.groups[number];
        loop {
            while self.check_running().is_ok() && group.may_wait() {
                journal.changed.changed().await;
            }
            let mut batch: Vec<Waiting> = Vec::new();
            let mut pieces: Vec<Piece> = Vec::new();
            let mut blocks = 0;
            {
                let mut waiting = group.waiting.borrow_mut();
                // Numbers of stripes have no blocks, so blocks alone would not bound them.
                while let Some(next) = waiting.front()
                    && (batch.is_empty()
                        || (blocks + next.blocks <= journal.shared_limit()
                            && pieces.len() + next.pieces.len() <= PIECES_MAX))
                {
                    blocks += next.blocks;
                    pieces.extend_from_slice(&next.pieces);
                    batch.extend(waiting.pop_front());
                }
            }
            if batch.is_empty() {
                return;
            }
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
        let blocks = pieces.iter().map(|piece| piece.blocks).sum();
        loop {
            self.check_running()?;
            let changed = journal.changed.changed();
            let spare = journal.spare();
            if let Some(reserved) = self.reserve(journal, number, blocks, spare, updates) {
                let sequence = reserved.sequence;
                self.write_reserved(journal, number, reserved, pieces, payload).await?;
                return Ok(sequence);
            }
            if !self.make_room(journal, number).await? {
                changed.await;
            }
        }
    }

    /// Takes a sequence, and room for so many blocks of contents on the members that are to hold the record: those that have
    /// most of it.
    fn reserve(
        &self,
        journal: &Journal,
        number: usize,
        blocks: u64,
        spare: u64,
        updates: u32,
    ) -> Option<Reserved> {
        let parity = self.layout.level.tolerates();
        let sequence = journal.next.get();
        let players = self.players_of(number);
        let whole = players.iter().filter(|member| member.is_in_sync()).count();
        let fragments = match journal.codes.is_empty() {
            true => 1,
            false => fragments_for(blocks, parity, whole),
        };
        let count = fragments + parity;
        let count = if planted!("raid-journal-copy-left-out") { count - 1 } else { count };
        let of_each = 1 + blocks.div_ceil(fragments as u64);
        let holders = Self::hold(journal, players, count, sequence, (of_each, spare))?;
        journal.next.set(sequence + 1);
        let group = &journal.groups[number];
        group.last.set(sequence);
        group.open.borrow_mut().insert(sequence, updates);
        Some(Reserved { sequence, fragments, holders })
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
            (!member.is_in_sync(), member.ring.borrow().used() / (journal.area / 8).max(1))
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

    /// Writes a new record to those on whom it has room.
    async fn write_reserved(
        self: &Rc<Self>,
        journal: &Journal,
        number: usize,
        reserved: Reserved,
        pieces: Vec<Piece>,
        contents: &[Buf],
    ) -> Result<(), BlockError> {
        let Reserved { sequence, fragments, holders } = reserved;
        let group = &journal.groups[number];
        for piece in &pieces {
            let records = if piece.is_listed() { &group.listed } else { &group.stripes };
            records.borrow_mut().insert(piece.stripe, sequence);
        }
        let header =
            Header { epoch: self.epoch, sequence, tail: group.tail.get(), pieces, fragments };
        let numbered = holders.into_iter().enumerate().collect();
        self.write_to(journal, number, &header, contents, numbered).await
    }

    /// Writes these fragments of a record, by their numbers, each to its holder.
    async fn write_to(
        self: &Rc<Self>,
        journal: &Journal,
        number: usize,
        header: &Header,
        contents: &[Buf],
        holders: Vec<(usize, Holder)>,
    ) -> Result<(), BlockError> {
        let code = journal.code(header.fragments);
        let _busy = code.map(|_| probe::busy("array split record"));
        let parts: Vec<IoVec> = match code {
            Some(code) => {
                let fragments = split(contents, code);
                let encoded = |(number, _): &(usize, Holder)| {
                    header.encode(self.uuid, *number, &fragments[*number])
                };
                holders.iter().map(encoded).collect()
            }
            None => {
                let whole = header.encode(self.uuid, 0, contents);
                holders.iter().map(|_| whole.clone()).collect()
            }
        };
        let durability = match planted!("raid-journal-not-durable") {
            true => Durability::Volatile,
            false => Durability::Fua,
        };
        let writes = holders.into_iter().zip(parts).map(|((_, (member, start)), parts)| {
            let at = self.areas.journal_at + start * BLOCK_BYTES;
            async move { self.member_write(&member, at, parts, durability).await }
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
            group.listed.borrow_mut().retain(|_, last| *last >= header.tail);
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
        // Detached: whoever gives up while he makes room must not keep others from it.
        let (engine, journal) = (Rc::clone(self), Rc::clone(journal));
        self.detached(async move {
            let result = engine.clear(&journal, number).await;
            journal.groups[number].clearing.set(false);
            result
        })
        .await
    }

    async fn clear(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        number: usize,
    ) -> Result<bool, BlockError> {
        self.flush_members().await?;
        self.tell_tail(journal, number).await
    }

    /// Writes a record without pieces if that tells something new, and there is room.
    async fn tell_tail(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        number: usize,
    ) -> Result<bool, BlockError> {
        let group = &journal.groups[number];
        let before = group.durable_tail.get();
        if group.tail.get() > before
            && let Some(reserved) = self.reserve(journal, number, 0, 0, 0)
        {
            self.write_reserved(journal, number, reserved, Vec::new(), &[]).await?;
        }
        Ok(group.durable_tail.get() > before)
    }

    /// Waits until all updates of these records, by group, are in place.
    pub async fn wait_in_place(&self, journal: &Journal, upto: &[u64]) -> Result<(), BlockError> {
        loop {
            let changed = journal.changed.changed();
            self.check_running()?;
            let mut all = journal.groups.iter().zip(upto);
            if all.all(|(group, upto)| journal.in_place_of(group) > *upto) {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Makes records up to these, by group, lose their meaning for good. A flush has covered them.
    pub async fn retire_records(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        upto: &[u64],
    ) -> Result<(), BlockError> {
        for (number, (group, upto)) in journal.groups.iter().zip(upto).enumerate() {
            loop {
                self.check_running()?;
                let changed = journal.changed.changed();
                if group.durable_tail.get() > *upto {
                    break;
                }
                if group.clearing.replace(true) {
                    changed.await;
                    continue;
                }
                let told = self.tell_tail(journal, number).await;
                group.clearing.set(false);
                if !told? {
                    changed.await;
                }
            }
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Level;

    /// Whoever waits for room waits for ever where even an empty journal has none.
    #[test]
    fn an_empty_journal_has_room_for_the_largest_record() {
        for width in 2..=32 {
            for parity in 1..=4.min(width - 1) {
                let level = Level::NPlusM { parity };
                let layout = Layout { level, width, chunk_bytes: 4096, stripes: 1 };
                let bytes = Journal::bytes_min(layout.chunks());
                let (areas, _) = Areas::fit(64 << 20, bytes, level, width, 4096);
                let journal = Journal::new(&layout, &areas, 1).expect("large enough");
                let fits =
                    Ring::default().has_room(journal.area, 1 + journal.limit, journal.spare());
                assert!(fits, "{width} wide: {} blocks", journal.area);
            }
        }
    }
}

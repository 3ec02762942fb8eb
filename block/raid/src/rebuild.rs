//! Rebuild: brings members that took a role back into step, slot by slot.
//!
//! Per stripe: read enough surviving chunks, recompute the lost ones, write them. The next one begins
//! when one ends, so that the new member always has something to write. Other I/O continues; a stripe
//! that is being written is waited for, and writers write to the rebuilding member too, so the rebuild
//! never has to look back.
//!
//! What always holds:
//! - The cursor, in memory and on disk, never runs ahead of the data it describes; on disk it is
//!   behind a flush.
//! - A stripe is passed over as holding nothing only if that is on disk before the cursor is:
//!   a crash may undo a discard on its way, and the stripe holds data again.
//! - At most [`STRIPES_AT_ONCE`] stripes are in flight, so memory is bounded.
//!
//! Where bad places in several chunks leave too little to recompute from, a stripe is done block by block; blocks that
//! are beyond repair stop a rebuild a few times, and are then left out, so that the rest gets its redundancy back. The
//! new member lacks them: they read as unreadable until they are written, and nothing is made from them. On levels with parity
//! that is on record ([`crate::lost`]), on mirrors in the blocks themselves ([`crate::mark`]). Where that record is full the
//! rebuild is *blocked*: it stops there, whoever asks for it, until blocks of the record are written or can be read again.
//!
//! After a crash, rebuild resumes at the stored cursor. Repeating a stripe is harmless.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::layout::Place;
use crate::lost::Rows;
use crate::map::Bit;
use crate::mark;
use crate::member::{Member, MemberEvent, MemberState, add};
use crate::pace::{Limits, Pace, wait_until};
use crate::redundancy::Redundancy;
use crate::status::ArrayEvent;
use crate::vote::Copy;
use futures_util::future::{join_all, try_join_all};
use levada_base::units::MIB;
use levada_base::{BufMut, planted, probe};
use levada_device::{BlockError, Durability};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

/// Stripes rebuilt or scrubbed together.
pub(crate) const STRIPES_AT_ONCE: usize = 8;
/// Most bytes written to a member between two stores of its cursor; a 64th of a small one.
const CURSOR_EVERY_BYTES_MAX: u64 = 256 * MIB;
/// Attempts after which a stripe that is beyond repair in part is left behind.
const TRIES_MAX: u32 = 5;

/// A chunk to recompute: its number, the member it goes to, the offset there.
type Lost = (usize, Rc<Member>, u64);

/// One way through the slots, on which several stripes are under way at once.
struct Course<'a> {
    targets: &'a [Rc<Member>],
    pace: RefCell<Pace<'a>>,
    /// Where the next stripe is looked for.
    next: Cell<u64>,
    /// Stripes under way or done before one that is under way: the slot behind each, and whether it is done.
    under_way: RefCell<VecDeque<(u64, bool)>>,
    /// Number of the first of these, of all so far.
    first: Cell<u64>,
    unstored_bytes: Cell<u64>,
    storing: Cell<bool>,
    /// A target is out.
    ended: Cell<bool>,
}

impl Course<'_> {
    /// Begins a stripe; its number.
    fn begin(&self, end: u64) -> u64 {
        let mut under_way = self.under_way.borrow_mut();
        under_way.push_back((end, false));
        self.first.get() + under_way.len() as u64 - 1
    }

    /// A stripe is done: the slot below which all are, if that is another one now.
    fn done(&self, number: u64) -> Option<u64> {
        let mut under_way = self.under_way.borrow_mut();
        under_way[(number - self.first.get()) as usize].1 = true;
        let mut below = None;
        while let Some((end, true)) = under_way.front() {
            below = Some(*end);
            under_way.pop_front();
            self.first.set(self.first.get() + 1);
        }
        below
    }
}

/// Whether it needs what it missed only.
fn catches_up(member: &Rc<Member>) -> bool {
    member.held.get().is_some_and(|held| held.is_told)
}

/// How far a member is rebuilt; `None` when it is not being rebuilt any more.
fn cursor(member: &Rc<Member>) -> Option<u64> {
    match member.state.get() {
        MemberState::Rebuilding { next_slot } => Some(next_slot),
        MemberState::InSync | MemberState::Faulty | MemberState::Spare => None,
    }
}

impl Engine {
    /// Members that are rebuilding, in order of role.
    fn rebuilding(&self) -> Vec<Rc<Member>> {
        let roles = self.roles.borrow();
        let waits = |m: &&Rc<Member>| matches!(m.state.get(), MemberState::Rebuilding { .. });
        roles.iter().flatten().filter(waits).cloned().collect()
    }

    pub fn needs_rebuild(&self) -> bool {
        !self.rebuilding().is_empty()
    }

    pub async fn rebuild(self: &Rc<Self>, limits: Limits) -> Result<(), BlockError> {
        let _turn = self.rebuild_turn.acquire(1).await;
        let _busy = probe::busy("array rebuild");
        /// Takes the progress away again, also when the caller gives up.
        struct Shown<'a>(&'a Engine);
        impl Drop for Shown<'_> {
            fn drop(&mut self) {
                self.0.rebuild.set(None);
            }
        }
        let _shown = Shown(self);
        self.rebuild_blocked.set(None);
        loop {
            self.settle().await?;
            let mut targets = self.rebuilding();
            if targets.is_empty() {
                return Ok(());
            }
            if targets.iter().any(catches_up) {
                // They need less.
                targets.retain(catches_up);
            }
            if !self.layout.slot_is_stripe() {
                // Their stripes are met in another order on every role.
                targets.truncate(1);
            }
            self.rebuild_members(&targets, limits).await?;
        }
    }

    /// Rebuilds members side by side from the lowest cursor on; ends early when one fails.
    async fn rebuild_members(
        self: &Rc<Self>,
        targets: &[Rc<Member>],
        limits: Limits,
    ) -> Result<(), BlockError> {
        let slots = self.layout.slots();
        let share = self.layout.slots() * self.layout.width as u64 / self.layout.chunks() as u64;
        // Written stripes with a chunk on the target, by proportion on spread mirrors.
        let wanted = match targets.iter().all(catches_up) {
            true => self.map.missed_stripes(),
            false => self.map.written_stripes(),
        };
        let total = (u128::from(wanted) * u128::from(slots) / u128::from(share.max(1))) as u64;
        let course = Course {
            targets,
            pace: RefCell::new(Pace::new(self, limits, 0, total.min(slots))),
            next: Cell::new(targets.iter().filter_map(cursor).min().unwrap_or(slots)),
            under_way: RefCell::default(),
            first: Cell::new(0),
            unstored_bytes: Cell::new(0),
            storing: Cell::new(false),
            ended: Cell::new(false),
        };
        try_join_all((0..STRIPES_AT_ONCE).map(|_| self.rebuild_stripes(&course))).await?;
        if course.ended.get() {
            return Ok(());
        }
        self.rebuilt_to(targets, slots);
        self.persist_wanted_pages().await?;
        join_all(targets.iter().map(|member| self.member_flush(member))).await;
        self.settle().await?;
        // Whoever was taken in meanwhile has the list of lost blocks before it counts as whole.
        self.persist_lost().await?;
        // More members may be lost from then on, so records that were made with fewer must have lost their meaning.
        self.void_all_records().await?;
        if !self.lost.is_empty() {
            // What could be made this time must not pass for absent.
            self.flush_members().await?;
        }
        let done = targets.iter().filter(|member| cursor(member).is_some());
        let done: Vec<&Rc<Member>> = done.collect();
        done.iter().for_each(|member| member.is_rebuilt.set(true));
        self.rebuild_stuck.borrow_mut().clear();
        add(&self.standing_wanted, 1);
        self.settle().await?;
        // On record, so that it may be relied upon.
        for member in done.into_iter().filter(|member| member.is_live()) {
            member.apply(MemberEvent::RebuildDone);
            member.held.set(None);
            let (member, name) = (member.index, member.name.clone());
            self.emit(&ArrayEvent::RebuildDone { member, name });
        }
        self.note_roles();
        Ok(())
    }

    /// Rebuilds stripe after stripe until there is none left.
    async fn rebuild_stripes(self: &Rc<Self>, course: &Course<'_>) -> Result<(), BlockError> {
        let targets = course.targets;
        let chunk_bytes = self.layout.chunk_bytes;
        let cursor_every_bytes = (self.areas.data_bytes / 64).min(CURSOR_EVERY_BYTES_MAX);
        loop {
            self.check_running()?;
            self.rebuild.set(Some(course.pace.borrow().progress));
            let (stripe, end) = self.stripe_from(targets, course.next.get());
            course.next.set(end);
            let Some(stripe) = stripe else { return Ok(()) };
            let number = course.begin(end);
            // Detached: a rebuild that is given up must not let go of a stripe that it is writing to.
            let (engine, of_stripe) = (Rc::clone(self), targets.to_vec());
            self.detached(async move { engine.rebuild_stripe(stripe, &of_stripe).await }).await?;
            self.settle().await?;
            if course.ended.get() || targets.iter().any(|member| cursor(member).is_none()) {
                course.ended.set(true);
                return Ok(());
            }
            if let Some(below) = course.done(number) {
                self.rebuilt_to(targets, below);
            }
            course.unstored_bytes.set(course.unstored_bytes.get() + chunk_bytes);
            if course.unstored_bytes.get() >= cursor_every_bytes && !course.storing.replace(true) {
                course.unstored_bytes.set(0);
                let stored = self.store_cursor(targets).await;
                course.storing.set(false);
                stored?;
            }
            let moved = chunk_bytes * (self.layout.data_chunks() + targets.len()) as u64;
            let then = course.pace.borrow_mut().charge(1, moved);
            wait_until(then).await;
        }
    }

    /// Every slot below this holds good data on the targets.
    fn rebuilt_to(&self, targets: &[Rc<Member>], next_slot: u64) {
        for member in targets {
            if cursor(member).is_some_and(|at| at < next_slot) {
                member.apply(MemberEvent::RebuiltTo { next_slot });
            }
        }
    }

    /// The next stripe from a slot on that the targets need, if there is one, and the slot behind it.
    fn stripe_from(&self, targets: &[Rc<Member>], from: u64) -> (Option<u64>, u64) {
        let slots = self.layout.slots();
        // Written ones, or of these what they missed.
        let bit = if targets.iter().all(catches_up) { Bit::Missed } else { Bit::Written };
        if self.layout.slot_is_stripe() {
            // Long unwritten runs cost nothing.
            let mut from = from;
            while let Some(stripe) = self.map.next_set(bit, from) {
                from = stripe + 1;
                if self.map.has(Bit::Written, stripe) {
                    return (Some(stripe), from);
                }
            }
            return (None, slots);
        }
        let role = targets[0].role.get().unwrap_or(0);
        for slot in from..slots {
            let (stripe, _) = self.layout.chunk_in(Place { role, slot });
            let is_needed = |bit| self.map.has(bit, stripe);
            if stripe < self.layout.stripes && is_needed(Bit::Written) && is_needed(bit) {
                return (Some(stripe), slot + 1);
            }
        }
        (None, slots)
    }

    /// Stores the cursors, behind a flush of the data they describe.
    async fn store_cursor(self: &Rc<Self>, targets: &[Rc<Member>]) -> Result<(), BlockError> {
        let cursors: SmallVec<[_; 2]> = targets.iter().map(|member| member.state.get()).collect();
        self.persist_wanted_pages().await?;
        if !planted!("raid-cursor-ahead-of-flush") {
            join_all(targets.iter().map(|member| self.member_flush(member))).await;
        }
        for (member, cursor) in targets.iter().zip(cursors) {
            // One that failed meanwhile is out, and its cursor of no use.
            if let MemberState::Rebuilding { next_slot } = cursor {
                member.flushed_to(next_slot);
            }
        }
        add(&self.standing_wanted, 1);
        self.settle().await
    }

    /// Recomputes the chunks of `targets` in one stripe.
    async fn rebuild_stripe(
        self: &Rc<Self>,
        stripe: u64,
        targets: &[Rc<Member>],
    ) -> Result<(), BlockError> {
        let (start, end) = self.stripe_range(stripe, 1);
        let _guard = self.locks.lock(start, end).await;
        if !self.map.has(Bit::Written, stripe) {
            return Ok(());
        }
        let chunk_bytes = self.layout.chunk_bytes;
        let mut lost: SmallVec<[Lost; 2]> = SmallVec::new();
        for chunk in 0..self.layout.chunks() {
            let place = self.layout.place(stripe, chunk);
            let Some(member) = self.player(place.role) else { continue };
            let wanted = targets.iter().any(|target| Rc::ptr_eq(target, &member));
            if wanted && !member.has(place.slot) {
                let at = self.member_offset(place.slot, 0);
                lost.push((chunk, member, at));
            }
        }
        let skip = lost.iter().fold(0u64, |bits, (chunk, ..)| bits | 1 << chunk);
        if let Redundancy::Copies = self.redundancy {
            return self.rebuild_copies(stripe, skip, &lost).await;
        }
        if self.recompute(stripe, 0..chunk_bytes, skip, &lost).await {
            return Ok(());
        }
        self.check_running()?;
        if self.map.has(Bit::Dirty, stripe) && self.layout.level.has_parity() {
            // A stripe that nobody finished promises nothing.
            return Ok(());
        }
        // Bad places in several chunks are seldom at the same one.
        let block_bytes = self.least_bytes();
        let mut blocks_lost = Vec::new();
        for block in (0..chunk_bytes).step_by(block_bytes as usize) {
            if !self.recompute(stripe, block..block + block_bytes, skip, &lost).await {
                self.check_running()?;
                blocks_lost.push(block);
            }
        }
        if !blocks_lost.is_empty() {
            self.give_up(stripe, blocks_lost.len())?;
        }
        if blocks_lost.is_empty() {
            return Ok(());
        }
        for (_, member, at) in &lost {
            blocks_lost.iter().for_each(|block| member.leave_out(at + block));
        }
        if self.areas.lost_bytes == 0 {
            // There is no list, perhaps because a chunk has more blocks than it could tell of.
            return Ok(());
        }
        let mut rows = Rows::default();
        for block in &blocks_lost {
            rows.set(block / block_bytes..block / block_bytes + 1, true);
        }
        // Before anybody takes the member for whole.
        let chunks = lost.iter().map(|(chunk, ..)| *chunk);
        if !self.list_absent(stripe, chunks, rows).await? {
            tracing::error!(array = %self.name, stripe, "rebuild: no room to list what is beyond repair");
            self.rebuild_blocked.set(Some(stripe));
            return Err(BlockError::Medium { at: start, bytes: end - start });
        }
        Ok(())
    }

    /// Blocks of a stripe are beyond repair. They may come back: fails a few times, with which the rebuild ends, before
    /// the rest of the array is put first.
    fn give_up(&self, stripe: u64, blocks: usize) -> Result<(), BlockError> {
        let mut stuck = self.rebuild_stuck.borrow_mut();
        let tries = stuck.entry(stripe).or_default();
        *tries += 1;
        if *tries < TRIES_MAX {
            let (start, end) = self.stripe_range(stripe, 1);
            return Err(BlockError::Medium { at: start, bytes: end - start });
        }
        tracing::error!(array = %self.name, stripe, blocks, "rebuild: too few chunks can be read; left out");
        Ok(())
    }

    /// Writes a range of the chunks in `lost` as the others imply it. False when too few of these can be read.
    async fn recompute(
        self: &Rc<Self>,
        stripe: u64,
        within: Range<u64>,
        skip: u64,
        lost: &[Lost],
    ) -> bool {
        let enough = self.layout.data_chunks();
        let gathered = self.gather(stripe, within.clone(), skip, MemberSet::NONE, enough).await;
        let bytes = (within.end - within.start) as usize;
        let mut computed: SmallVec<[BufMut; 2]> =
            lost.iter().map(|_| BufMut::for_overwrite(bytes)).collect();
        let wanted =
            lost.iter().zip(&mut computed).map(|((chunk, ..), into)| (*chunk, &mut into[..]));
        if !self.redundancy.recompute(gathered.held(), wanted) {
            return false;
        }
        let writes = lost.iter().zip(computed).map(|((_, member, at), bytes)| async move {
            let (at, from) = (at + within.start, bytes.freeze().into_vec());
            // A failed target is out; the caller sees it by its state.
            let _ = self.member_write(member, at, from, Durability::Volatile).await;
        });
        join_all(writes).await;
        true
    }

    /// Writes the copies in `lost` anew, as the others vote. Not where those disagree: the new copy would be the
    /// second voice for what may be rot. Nor where none of them can be read.
    async fn rebuild_copies(
        self: &Rc<Self>,
        stripe: u64,
        skip: u64,
        lost: &[Lost],
    ) -> Result<(), BlockError> {
        let whole = 0..self.layout.chunk_bytes;
        let (_, vote) = self.ask_copies(stripe, &whole, skip).await;
        self.check_running()?;
        let Some(vote) = vote else {
            let at = stripe * self.layout.chunk_bytes;
            return Err(BlockError::Medium { at, bytes: self.layout.chunk_bytes });
        };
        let disputed = vote.undecided.iter().filter(|block| !vote.silent.contains(block));
        let blocks = disputed.clone().count();
        if blocks > 0 {
            tracing::error!(array = %self.name, stripe, blocks, "rebuild: copies disagree; left undecided");
        }
        let work = lost.iter().map(async |(_, member, at)| {
            let blank = Copy {
                bytes: BufMut::zeroed(vote.bytes.len()),
                unreadable: (0..vote.bytes.len()).step_by(self.info.block_bytes as usize).collect(),
            };
            let decided = vote.corrections(&blank).into_iter().map(|run| {
                let bytes = BufMut::copy_of(&vote.bytes[run.clone()]).freeze().into_vec();
                self.member_write(member, at + run.start as u64, bytes, Durability::Volatile)
            });
            join_all(decided).await;
            for block in disputed.clone() {
                self.abstain(member, at + *block as u64).await;
            }
        });
        join_all(work).await;
        if !vote.silent.is_empty() {
            self.give_up(stripe, vote.silent.len())?;
        }
        for (_, member, at) in lost {
            for at in vote.silent.iter().map(|block| at + *block as u64) {
                let mark = mark::mark(member, at, self.info.block_bytes).freeze().into_vec();
                // One that does not take it is out.
                let _ = self.member_write(member, at, mark, Durability::Volatile).await;
                member.leave_out(at);
            }
        }
        Ok(())
    }

    /// Sees to it that a rebuilt member has no opinion about a block: what the drive held when it was away may be the right
    /// bytes, but zeroes, as an empty drive or a failing one reads, must not agree with anybody.
    async fn abstain(&self, member: &Rc<Member>, at: u64) {
        let bytes = self.info.block_bytes as usize;
        let held = self.member_read(member, at, BufMut::for_overwrite(bytes).into_vec()).await;
        if held.is_ok_and(|held| held[0].iter().any(|byte| *byte != 0)) {
            return;
        }
        let mark = format!("member {:>2}: copies disagree here    ", member.index);
        let mut block = BufMut::for_overwrite(bytes);
        block.iter_mut().zip(mark.bytes().cycle()).for_each(|(byte, mark)| *byte = mark);
        let _ =
            self.member_write(member, at, block.freeze().into_vec(), Durability::Volatile).await;
    }
}

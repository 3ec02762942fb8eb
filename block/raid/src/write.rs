//! Writes: fresh stripes on every level, overwrites on levels without parity, flush, discard.
//!
//! What always holds:
//! - A stripe is marked written and dirty on disk before its first write, and its dirty bit is
//!   cleared only when a flush covers its last write.
//! - A stripe's chunks are written all at once, to every member that plays a role, rebuilding
//!   ones included. Success means that each has its chunk or is on record as out.
//!
//! After a crash, open resyncs what is dirty (docs/design/0003-array-format.md, "Crash").

use crate::array::MemberSet;
use crate::engine::{Engine, Unclean};
use crate::map::Bit;
use crate::member::Member;
use crate::redundancy::Redundancy;
use futures_util::future::join_all;
use levada_base::buf::bytes_in;
use levada_base::units::MIB;
use levada_base::{Buf, BufMut, IoVec, planted, probe};
use levada_device::{BlockError, Durability, check_range};
use levada_parity::{Code, PARITY_MAX};
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

/// Stripes that stay dirty on levels with overwrites, so that a hot one is marked once.
const UNCLEAN_KEPT: usize = 256;
/// When an overwrite meets a stripe that holds nothing, so many behind it are zeroed and marked
/// with it: growing sequentially then costs one flush and one map page per so many.
const MARKED_AHEAD: u64 = 7;
/// But no more than so many bytes.
const ZEROED_AHEAD_BYTES: u64 = 8 * MIB;

/// Takes the next `bytes` from a list of buffers.
pub(crate) struct Cutter {
    parts: IoVec,
    part: usize,
    at: usize,
}

impl Cutter {
    pub fn new(parts: IoVec) -> Self {
        Self { parts, part: 0, at: 0 }
    }

    pub fn take(&mut self, bytes: u64) -> IoVec {
        let mut left = bytes as usize;
        let mut taken = IoVec::new();
        while left > 0 {
            let part = &self.parts[self.part];
            let run = left.min(part.len() - self.at);
            if run > 0 {
                taken.push(part.slice(self.at, run));
            }
            (self.at, left) = (self.at + run, left - run);
            if self.at == part.len() {
                (self.part, self.at) = (self.part + 1, 0);
            }
        }
        taken
    }
}

/// The parity of a stripe, whose data may be cut into buffers anyhow.
pub(crate) fn encode(code: &Code, data: &[Buf], chunk_bytes: usize) -> SmallVec<[Buf; PARITY_MAX]> {
    let mut parity: SmallVec<[BufMut; PARITY_MAX]> =
        (0..code.parity_chunks()).map(|_| BufMut::for_overwrite(chunk_bytes)).collect();
    // Where each chunk goes on: a buffer and the offset in it. Cut wherever one of the buffers ends.
    let mut at = starts(data, chunk_bytes, code.data_chunks());
    let mut done = 0;
    while done < chunk_bytes {
        let left = |(part, start): &(usize, usize)| data[*part].len() - start;
        let run = at.iter().map(left).min().expect("a stripe has data").min(chunk_bytes - done);
        let chunks: SmallVec<[&[u8]; 16]> =
            at.iter().map(|(part, start)| &data[*part][*start..*start + run]).collect();
        let mut into: SmallVec<[&mut [u8]; PARITY_MAX]> =
            parity.iter_mut().map(|chunk| &mut chunk[done..done + run]).collect();
        code.encode(&chunks, &mut into);
        done += run;
        if done < chunk_bytes {
            at.iter_mut().for_each(|(part, start)| skip(data, part, start, run));
        }
    }
    parity.into_iter().map(BufMut::freeze).collect()
}

/// Where the chunks of a stripe begin.
fn starts(data: &[Buf], chunk_bytes: usize, chunks: usize) -> SmallVec<[(usize, usize); 16]> {
    let (mut part, mut start) = (0, 0);
    skip(data, &mut part, &mut start, 0);
    let mut starts = SmallVec::new();
    for chunk in 0..chunks {
        starts.push((part, start));
        if chunk + 1 < chunks {
            skip(data, &mut part, &mut start, chunk_bytes);
        }
    }
    starts
}

/// Goes on by so many bytes, past the ends of buffers.
fn skip(data: &[Buf], part: &mut usize, start: &mut usize, bytes: usize) {
    *start += bytes;
    while *start >= data[*part].len() {
        *start -= data[*part].len();
        *part += 1;
    }
}

impl Engine {
    /// So many stripes that hold nothing are made ready with the one that is overwritten before them.
    pub fn marked_ahead(&self) -> u64 {
        MARKED_AHEAD.min(ZEROED_AHEAD_BYTES / self.layout.stripe_bytes())
    }

    /// The stripes whose standing is to change; `None`: there are none.
    fn stripes_to_change(&self, first: u64, count: u64) -> Result<Option<Range<u64>>, BlockError> {
        self.check_stripes(first, count)?;
        self.check_running()?;
        Ok((count > 0).then(|| first..first + count))
    }

    pub async fn declare_fresh(self: &Rc<Self>, first: u64, count: u64) -> Result<(), BlockError> {
        let Some(range) = self.stripes_to_change(first, count)? else { return Ok(()) };
        let engine = Rc::clone(self);
        self.detached(async move {
            let _preparing = engine.preparing.lock(range.start, range.end).await;
            let (start, end) = engine.stripe_range(range.start, count);
            let _guard = engine.locks.lock(start, end).await;
            engine.void_records(&range).await?;
            engine.forget_unclean(&range);
            engine.map.set(Bit::Dirty, range.clone(), true);
            engine.map.set(Bit::Written, range.clone(), true);
            engine.map.set(Bit::Fresh, range.clone(), true);
            engine.map.begin_anew(range.clone());
            engine.updates.renew(&range);
            if !planted!("raid-map-not-persisted") {
                engine.persist(range.clone()).await?;
            }
            // Not before: a flush takes from the list what no member lacks, and the old contents may come back until here.
            engine.forget_left_out(&range);
            engine.lost.remove_stripes(&range);
            engine.persist_lost().await?;
            engine.settle().await
        })
        .await
    }

    pub async fn write_fresh(self: &Rc<Self>, stripe: u64, data: IoVec) -> Result<(), BlockError> {
        self.check_stripes(stripe, 1)?;
        let (start, end) = self.stripe_range(stripe, 1);
        let bytes = bytes_in(&data);
        if bytes != end - start {
            return Err(BlockError::Misaligned { at: start, bytes, block_bytes: end - start });
        }
        self.check_running()?;
        let engine = Rc::clone(self);
        // Detached: writes go on when their caller gives up, and nobody else may have the stripe meanwhile.
        self.detached_unless_ready(async move {
            let _guard = engine.locks.lock(start, end).await;
            if !engine.map.has(Bit::Fresh, stripe) {
                return Err(BlockError::NotFresh { stripe });
            }
            engine.map.set(Bit::Fresh, stripe..stripe + 1, false);
            engine.write_stripe(stripe, data).await;
            // Members that failed to take it are out; if the level cannot bear that, this fails.
            engine.settle().await?;
            engine.note_write(stripe);
            Ok(())
        })
        .await
    }

    /// Writes a stripe's data, `stripe_bytes` of it, and the redundancy that follows from that, to all who play a role. The
    /// caller holds the stripe and settles.
    pub async fn write_stripe(&self, stripe: u64, data: IoVec) {
        let (chunk_bytes, data_chunks) = (self.layout.chunk_bytes, self.layout.data_chunks());
        let parity = match &self.redundancy {
            Redundancy::None | Redundancy::Copies => SmallVec::new(),
            Redundancy::Parity(code) => encode(code, &data, chunk_bytes as usize),
        };
        let players: SmallVec<[(Option<Rc<Member>>, u64); 16]> = (0..self.layout.chunks())
            .map(|chunk| {
                let place = self.layout.place(stripe, chunk);
                (self.player(place.role), self.member_offset(place.slot, 0))
            })
            .collect();
        // A stripe of copies has one chunk, which all of them get.
        let copied = matches!(self.redundancy, Redundancy::Copies).then(|| data.clone());
        let mut cutter = Cutter::new(data);
        let mut parity = parity.into_iter();
        let writes = players.iter().enumerate().filter_map(|(chunk, (player, at))| {
            let from = match &copied {
                Some(copied) => copied.clone(),
                None if chunk < data_chunks => cutter.take(chunk_bytes),
                None => parity.next().expect("as many as the code has").into_vec(),
            };
            Some((player.as_ref()?, *at, from))
        });
        self.write_all(writes, Durability::Volatile).await;
    }

    /// A volatile write of this stripe completed: the next flush makes it clean.
    fn note_write(&self, stripe: u64) {
        self.writes.set(self.writes.get() + 1);
        let mut unclean = self.unclean.borrow_mut();
        let entry = unclean.entry(stripe).or_default();
        entry.sequence = self.writes.get();
    }

    /// Something that was acknowledged may not be durable yet on the members that are live, nor in the journal.
    pub fn has_unflushed(&self) -> bool {
        match &self.journal {
            // What else was acknowledged is in the journal.
            Some(journal) => {
                journal.is_live(&journal.listed()) || self.writes.get() > self.flushed.get()
            }
            None => self.live_members().iter().any(|it| it.flushed.get() < it.writes.get()),
        }
    }

    /// Makes everything durable that was acknowledged before, whichever members are absent afterwards.
    pub async fn flush(self: &Rc<Self>) -> Result<(), BlockError> {
        let Some(journal) = &self.journal else { return self.flush_members().await };
        if !self.has_unflushed() {
            return self.settle().await;
        }
        let listed = journal.listed();
        if !journal.is_live(&listed) || planted!("raid-list-outlives-flush") {
            return self.flush_members().await;
        }
        let (engine, journal) = (Rc::clone(self), Rc::clone(journal));
        self.detached(async move {
            // A record is covered when all its updates are in place, those of others as well.
            engine.wait_in_place(&journal, &listed).await?;
            engine.flush_members().await?;
            engine.retire_records(&journal, &listed).await
        })
        .await
    }

    /// Makes durable what is written; records of the journal may still tell that it was on its way.
    pub async fn flush_members(self: &Rc<Self>) -> Result<(), BlockError> {
        self.check_running()?;
        let upto = self.writes.get();
        let in_place = self.journal.as_ref().map(|journal| journal.in_place());
        let put_right = self.put_right();
        let members = self.live_members();
        let written = members.iter().filter(|member| member.flushed.get() < member.writes.get());
        join_all(written.map(|member| self.member_flush(member))).await;
        self.settle().await?;
        self.flushed.set(self.flushed.get().max(upto));
        if let (Some(journal), Some(in_place)) = (&self.journal, in_place) {
            journal.covered(&in_place);
        }
        if self.layout.level.has_parity() {
            self.retire(0);
        } else if self.unclean.borrow().len() > UNCLEAN_KEPT {
            self.retire(UNCLEAN_KEPT / 2);
        }
        self.forget_put_right(put_right).await
    }

    /// Clears the dirty bits of stripes that a flush covers, but for the `keep` latest. In
    /// memory: they reach the disk with the next write of their page.
    pub fn retire(&self, keep: usize) {
        let flushed = self.flushed.get();
        let mut unclean = self.unclean.borrow_mut();
        let spare = unclean.len().saturating_sub(keep);
        let idle = |entry: &Unclean| entry.in_flight == 0 && entry.sequence <= flushed;
        let mut clean: Vec<(u64, u64)> = unclean
            .iter()
            .filter(|(_, entry)| idle(entry))
            .map(|(stripe, entry)| (entry.sequence, *stripe))
            .collect();
        if keep > 0 {
            clean.sort_unstable();
        }
        for (_, stripe) in clean.into_iter().take(spare) {
            unclean.remove(&stripe);
            self.map.set(Bit::Dirty, stripe..stripe + 1, false);
        }
    }

    /// These stripes are being given a new beginning: what was noted about them is void.
    fn forget_unclean(&self, range: &Range<u64>) {
        let mut unclean = self.unclean.borrow_mut();
        let listed: Vec<u64> = unclean.range(range.clone()).map(|(stripe, _)| *stripe).collect();
        for stripe in listed {
            match unclean.get_mut(&stripe) {
                // A writer waits for us and will look again.
                Some(entry) if entry.in_flight > 0 => entry.marked = false,
                Some(_) | None => drop(unclean.remove(&stripe)),
            }
        }
    }

    /// An overwrite in place.
    pub async fn overwrite(
        self: &Rc<Self>,
        at: u64,
        from: IoVec,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let bytes = bytes_in(&from);
        if self.layout.level.has_parity() {
            check_range(&self.info, at, bytes)?;
            self.check_running()?;
            if bytes == 0 {
                return Ok(());
            }
            let engine = Rc::clone(self);
            return self.detached(async move { engine.update(at, from, durability).await }).await;
        }
        self.change(at, bytes, durability, move |engine| async move {
            engine.write_pieces(at, bytes, from, durability).await;
        })
        .await
    }

    /// Zeroes a range.
    pub async fn overwrite_zeroes(self: &Rc<Self>, at: u64, bytes: u64) -> Result<(), BlockError> {
        if self.layout.level.has_parity() {
            return self.update_zeroes(at, bytes).await;
        }
        self.change(at, bytes, Durability::Volatile, move |engine| async move {
            engine.zero_pieces(at, bytes).await;
        })
        .await
    }

    /// Prepares the stripes of a range, holds it while `work` changes it on every copy, and
    /// sees to it that copies that missed the change are on record.
    async fn change<W, F>(
        self: &Rc<Self>,
        at: u64,
        bytes: u64,
        durability: Durability,
        work: W,
    ) -> Result<(), BlockError>
    where
        W: FnOnce(Rc<Self>) -> F + 'static,
        F: Future<Output = ()> + 'static,
    {
        check_range(&self.info, at, bytes)?;
        self.check_running()?;
        if bytes == 0 {
            return Ok(());
        }
        let engine = Rc::clone(self);
        self.detached(async move {
            let stripes = engine.stripes_of(at, bytes);
            engine.enter(stripes.clone()).await?;
            let guard = engine.locks.lock(at, at + bytes).await;
            work(Rc::clone(&engine)).await;
            // A copy that missed the change is on record as out before the stripes may count as clean,
            // else a power cut leaves copies that differ and nothing that tells. The range is held
            // until then: a discard takes a stripe that has been left for one that nobody is in.
            let settled = engine.settle().await;
            engine.leave(stripes, durability);
            drop(guard);
            settled
        })
        .await
    }

    async fn write_pieces(&self, at: u64, bytes: u64, from: IoVec, durability: Durability) {
        let mut cutter = Cutter::new(from);
        let mut writes = Vec::new();
        self.pieces(at, bytes, |stripe, chunk, within, run_bytes| {
            let data = cutter.take(run_bytes);
            for (member, at) in self.places_of(stripe, chunk, within) {
                let data = data.clone();
                let write = async move { self.member_write(&member, at, data, durability).await };
                writes.push(write);
            }
        });
        join_all(writes).await;
    }

    async fn zero_pieces(&self, at: u64, bytes: u64) {
        let mut writes = Vec::new();
        self.pieces(at, bytes, |stripe, chunk, within, run_bytes| {
            for (member, at) in self.places_of(stripe, chunk, within) {
                writes.push(async move { self.member_zero(&member, at, run_bytes).await });
            }
        });
        join_all(writes).await;
    }

    /// Who stores a data chunk, and where: its player, or all players of its copies.
    fn places_of(
        &self,
        stripe: u64,
        chunk: usize,
        within: u64,
    ) -> SmallVec<[(Rc<Member>, u64); 4]> {
        let copies = match self.redundancy {
            Redundancy::Copies => self.layout.chunks(),
            Redundancy::None | Redundancy::Parity(_) => 1,
        };
        // Acknowledged before the last copy is there.
        let copies = if planted!("raid-copy-left-out") { copies.min(2) } else { copies };
        (chunk..chunk + copies)
            .filter_map(|chunk| {
                let place = self.layout.place(stripe, chunk);
                Some((self.player(place.role)?, self.member_offset(place.slot, within)))
            })
            .collect()
    }

    /// Marks stripes as being overwritten, on disk where they are not marked yet; those that
    /// hold nothing are zeroed first.
    async fn enter(self: &Rc<Self>, stripes: Range<u64>) -> Result<(), BlockError> {
        let is_marked =
            |stripe: &u64| self.unclean.borrow().get(stripe).is_some_and(|entry| entry.marked);
        for stripe in stripes.clone() {
            self.unclean.borrow_mut().entry(stripe).or_default().in_flight += 1;
        }
        // Again after waiting: a discard may have come between.
        while !stripes.clone().all(|stripe| is_marked(&stripe)) {
            let end = (stripes.end + self.marked_ahead()).min(self.layout.stripes);
            let preparing = self.preparing.lock(stripes.start, end).await;
            let holds = |stripe: &u64| self.map.has(Bit::Written, *stripe);
            let mut unmarked: Vec<u64> =
                stripes.clone().filter(|stripe| !is_marked(stripe)).collect();
            if !unmarked.iter().all(holds) {
                unmarked.extend((stripes.end..end).take_while(|stripe| !holds(stripe)));
            }
            let result = self.mark(unmarked).await;
            drop(preparing);
            if result.is_err() {
                self.leave(stripes, Durability::Fua);
                return result;
            }
        }
        Ok(())
    }

    /// Sets the bits of these stripes, on disk; zeroes those first that hold nothing.
    async fn mark(self: &Rc<Self>, stripes: Vec<u64>) -> Result<(), BlockError> {
        let (Some(first), Some(last)) = (stripes.first(), stripes.last()) else { return Ok(()) };
        let range = *first..last + 1;
        let empty = stripes.iter().filter(|stripe| !self.map.has(Bit::Written, **stripe));
        let empty: Vec<u64> = empty.copied().collect();
        if !empty.is_empty() {
            self.zero(&empty).await?;
        }
        for stripe in &stripes {
            self.map.set(Bit::Dirty, *stripe..stripe + 1, true);
            self.map.set(Bit::Written, *stripe..stripe + 1, true);
        }
        self.persist(range).await?;
        let mut unclean = self.unclean.borrow_mut();
        for stripe in stripes {
            unclean.entry(stripe).or_default().marked = true;
        }
        Ok(())
    }

    /// Makes stripes that hold nothing durably zero on all who play a role in them.
    pub async fn zero(self: &Rc<Self>, empty: &[u64]) -> Result<(), BlockError> {
        let _in_place: Vec<_> = empty.iter().map(|stripe| self.updates.begin(*stripe)).collect();
        loop {
            let before = self.roles.borrow().clone();
            let chunks = empty.iter().flat_map(|stripe| {
                (0..self.layout.chunks()).map(|chunk| self.layout.place(*stripe, chunk))
            });
            let zeroes = chunks.filter_map(|place| {
                let member = self.player(place.role)?;
                let at = self.member_offset(place.slot, 0);
                let bytes = self.layout.chunk_bytes;
                Some(async move { self.member_zero(&member, at, bytes).await })
            });
            join_all(zeroes).await;
            let members = self.live_members();
            join_all(members.iter().map(|member| self.member_flush(member))).await;
            self.settle().await?;
            // Who took a role meanwhile has not been zeroed, and a rebuild passes over stripes that hold nothing.
            let roles = self.roles.borrow();
            let same = |(now, then): (&Option<_>, &Option<_>)| match (now, then) {
                (Some(now), Some(then)) => Rc::ptr_eq(now, then),
                (now, _) => now.is_none(),
            };
            if roles.iter().zip(&before).all(same) {
                return Ok(());
            }
        }
    }

    fn leave(&self, stripes: Range<u64>, durability: Durability) {
        if durability == Durability::Volatile {
            self.writes.set(self.writes.get() + 1);
        }
        let mut unclean = self.unclean.borrow_mut();
        for stripe in stripes {
            let Some(entry) = unclean.get_mut(&stripe) else { continue };
            entry.in_flight -= 1;
            if durability == Durability::Volatile {
                entry.sequence = self.writes.get();
            }
        }
        drop(unclean);
        if self.unclean.borrow().len() > 2 * UNCLEAN_KEPT {
            self.retire(UNCLEAN_KEPT);
        }
    }

    pub async fn discard_stripes(
        self: &Rc<Self>,
        first: u64,
        count: u64,
    ) -> Result<(), BlockError> {
        let Some(range) = self.stripes_to_change(first, count)? else { return Ok(()) };
        let engine = Rc::clone(self);
        self.detached(async move {
            let _busy = probe::busy("array discard");
            let _preparing = engine.preparing.lock(range.start, range.end).await;
            // Overwrites that come from here on wait for `preparing` and mark anew; those that
            // came before are ahead of us in the line for the range.
            engine.forget_unclean(&range);
            let (start, end) = engine.stripe_range(range.start, count);
            let _guard = engine.locks.lock(start, end).await;
            engine.void_records(&range).await?;
            engine.forget_unclean(&range);
            for bit in [Bit::Written, Bit::Dirty, Bit::Fresh] {
                engine.map.set(bit, range.clone(), false);
            }
            engine.map.begin_anew(range.clone());
            engine.updates.renew(&range);
            engine.persist(range.clone()).await?;
            // Not before: a flush takes from the list what no member lacks, and the old contents may come back until here.
            engine.forget_left_out(&range);
            engine.lost.remove_stripes(&range);
            engine.persist_lost().await?;
            engine.settle().await
        })
        .await
    }

    /// Writes good contents where a caller's checksum proved them bad. Not where stripes were overwritten in place: what the
    /// caller read says nothing any more; nor what is lost, for parity does not agree with it.
    pub async fn repair(self: &Rc<Self>, at: u64, data: IoVec) -> Result<(), BlockError> {
        let bytes = bytes_in(&data);
        check_range(&self.info, at, bytes)?;
        self.check_running()?;
        let block_bytes = self.least_bytes();
        if !(at | bytes).is_multiple_of(block_bytes) {
            return Err(BlockError::Misaligned { at, bytes, block_bytes });
        }
        let engine = Rc::clone(self);
        // Detached, as in `write_fresh`.
        self.detached(async move {
            let _guard = engine.locks.lock(at, at + bytes).await;
            let has = |bit, stripe| engine.map.has(bit, stripe);
            let holds = |stripe: &u64| has(Bit::Written, *stripe) && !has(Bit::Patched, *stripe);
            if let Some(stripe) = engine.stripes_of(at, bytes).find(|stripe| !holds(stripe)) {
                return Err(BlockError::NotFresh { stripe });
            }
            if let Err(BlockError::Medium { at, .. }) = engine.check_not_lost(at, bytes) {
                return Err(BlockError::NotFresh { stripe: at / engine.layout.stripe_bytes() });
            }
            let stripes = engine.stripes_of(at, bytes);
            let mut cutter = Cutter::new(data);
            let mut writes = Vec::new();
            engine.pieces(at, bytes, |stripe, chunk, within, run_bytes| {
                let data = cutter.take(run_bytes);
                for (member, at) in engine.places_of(stripe, chunk, within) {
                    let (engine, data) = (&engine, data.clone());
                    writes.push(async move {
                        let written = engine.member_write(&member, at, data, Durability::Volatile);
                        if written.await.is_ok() {
                            engine.note_repair(&member, stripe);
                        }
                    });
                }
            });
            join_all(writes).await;
            engine.updates.renew(&stripes);
            engine.settle().await
        })
        .await
    }

    /// Members that hold these data bytes, all copies included.
    pub fn members_of(&self, at: u64, bytes: u64) -> MemberSet {
        let mut set = MemberSet::NONE;
        let add = |set: MemberSet, member: &Rc<Member>| set.with(member.index);
        self.pieces(at, bytes, |stripe, chunk, within, _| {
            let places = self.places_of(stripe, chunk, within);
            set = places.iter().map(|(member, _)| member).fold(set, add);
        });
        set
    }
}

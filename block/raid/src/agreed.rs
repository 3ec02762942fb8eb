//! Agreed reads: bytes that two copies hold alike.
//!
//! A mirror keeps no checksums, and not everybody who reads it has some of their own. Such a reader asks for
//! bytes about which two members agree. Where two differ all copies vote, block by block, and the ones that are
//! outvoted are written anew. Levels without copies read as they always do.
//!
//! What always holds:
//! - Every block handed out was the same on two members, or one member alone could read it.
//! - Where no majority agrees nothing is handed out, and no copy is touched.
//! - Only what was read from a member votes, never what was computed for it: rot must not get a second voice from
//!   a copy that was unreadable or new.
//! - Copies vote under the stripe's lock: a write on its way is never taken for damage.
//!
//! After a crash [`crate::resync`] makes the copies of a dirty stripe agree, before anybody reads: by the same vote,
//! but it must choose where no majority does.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::layout::{Level, Place};
use crate::map::Bit;
use crate::member::Member;
use crate::vote::{Copies, Copy, Vote, vote};
use futures_util::future::join_all;
use levada_base::buf::bytes_in;
use levada_base::{BufMut, IoVecMut, planted, probe};
use levada_device::{BlockError, Durability, check_range};
use std::ops::Range;
use std::rc::Rc;

/// A copy that was put right.
pub(crate) struct Corrected {
    pub member: Rc<Member>,
    /// Blocks of it could not be read, and all of those are right now.
    pub was_unreadable: bool,
}

impl Engine {
    /// Reads like [`Engine::read`], but from two copies.
    pub async fn read_agreed(
        self: &Rc<Self>,
        at: u64,
        mut into: IoVecMut,
    ) -> Result<IoVecMut, BlockError> {
        if !matches!(self.layout.level, Level::Raid1 { .. }) {
            return self.read(at, into, MemberSet::NONE).await;
        }
        let bytes = bytes_in(&into);
        check_range(&self.info, at, bytes)?;
        self.check_running()?;
        let mut pieces = Vec::new();
        self.pieces(at, bytes, |stripe, _, within, bytes| {
            pieces.push(self.agreed_piece(stripe, within..within + bytes));
        });
        let pieces = join_all(pieces).await;
        // As with every read: who failed on the way is on record before anything is answered.
        self.settle().await?;
        let mut parts = into.iter_mut().map(|part| &mut part[..]);
        let mut room: &mut [u8] = &mut [];
        for piece in pieces {
            let piece = piece?;
            let mut left = &piece[..];
            while !left.is_empty() {
                if room.is_empty() {
                    room = parts.next().expect("the pieces make up the parts");
                }
                let (now, later) = room.split_at_mut(room.len().min(left.len()));
                now.copy_from_slice(&left[..now.len()]);
                left = &left[now.len()..];
                room = later;
            }
        }
        Ok(into)
    }

    async fn agreed_piece(
        self: &Rc<Self>,
        stripe: u64,
        within: Range<u64>,
    ) -> Result<BufMut, BlockError> {
        if !self.map.has(Bit::Written, stripe) {
            return Ok(BufMut::zeroed((within.end - within.start) as usize));
        }
        let gathered = self.gather(stripe, within.clone(), 0, MemberSet::NONE, 2).await;
        let mut held = gathered.chunks.into_iter().flatten();
        match (held.next(), held.next(), gathered.bad) {
            (Some(one), Some(two), 0) if one[..] == two[..] => Ok(one),
            // There is nobody else to ask.
            (Some(one), None, 0) => Ok(one),
            (Some(one), ..) if planted!("raid-copies-not-compared") => Ok(one),
            _ => self.vote_on(stripe, within).await,
        }
    }

    /// What most copies hold, which all of them hold from then on. Runs to its end even if the caller goes away.
    pub async fn vote_on(
        self: &Rc<Self>,
        stripe: u64,
        within: Range<u64>,
    ) -> Result<BufMut, BlockError> {
        let engine = Rc::clone(self);
        // Detached: a reader that is not polled for a while must not hold the stripe.
        self.detached(async move {
            let _busy = probe::busy("array copies differ");
            let (start, end) = engine.stripe_range(stripe, 1);
            let _guard = engine.locks.lock(start, end).await;
            if !engine.map.has(Bit::Written, stripe) {
                return Ok(BufMut::zeroed((within.end - within.start) as usize));
            }
            let (copies, vote) = engine.ask_copies(stripe, &within, 0).await;
            engine.check_running()?;
            let at = stripe * engine.layout.chunk_bytes + within.start;
            let unreadable = BlockError::Medium { at, bytes: within.end - within.start };
            let Some(vote) = vote else { return Err(unreadable) };
            engine.correct(stripe, within.start, &copies, &vote).await;
            match vote.is_decided() {
                true => Ok(vote.bytes),
                false => {
                    let blocks = vote.undecided.len();
                    tracing::error!(array = %engine.name, stripe, blocks, "no majority of the copies agrees");
                    Err(unreadable)
                }
            }
        })
        .await
    }

    /// Reads all copies but those in `skip`, as bits, and lets them vote. The caller holds the stripe's lock.
    pub async fn ask_copies(
        &self,
        stripe: u64,
        within: &Range<u64>,
        skip: u64,
    ) -> (Copies, Option<Vote>) {
        let mut asked_again = false;
        loop {
            let reads = (0..self.layout.chunks()).map(async |copy| {
                let place = self.layout.place(stripe, copy);
                let holder = self.holder(place, MemberSet::NONE);
                self.read_copy(&holder.filter(|_| skip >> copy & 1 == 0)?, place, within).await
            });
            let copies: Copies = join_all(reads).await.into_iter().collect();
            let vote = vote(&copies, self.info.block_bytes);
            // What failed at the beginning of the reads may have been put right by their end.
            if asked_again || vote.as_ref().is_some_and(Vote::is_decided) {
                return (copies, vote);
            }
            asked_again = true;
        }
    }

    async fn read_copy(
        &self,
        member: &Rc<Member>,
        place: Place,
        within: &Range<u64>,
    ) -> Option<Copy> {
        let bytes = (within.end - within.start) as usize;
        let at = self.member_offset(place.slot, within.start);
        let read = |at: u64, bytes: usize| {
            self.member_read(member, at, BufMut::for_overwrite(bytes).into_vec())
        };
        if let Ok(mut whole) = read(at, bytes).await {
            return Some(Copy { bytes: whole.pop()?, unreadable: Vec::new() });
        }
        // One bad sector fails the request, and its neighbours have a voice all the same.
        let block_bytes = self.info.block_bytes as usize;
        let starts = (0..bytes).step_by(block_bytes);
        let blocks =
            join_all(starts.clone().map(|start| read(at + start as u64, block_bytes))).await;
        self.holder(place, MemberSet::NONE)?;
        let mut copy = Copy { bytes: BufMut::zeroed(bytes), unreadable: Vec::new() };
        for (start, block) in starts.zip(blocks) {
            match block {
                Ok(block) => copy.bytes[start..start + block_bytes].copy_from_slice(&block[0]),
                Err(_) => copy.unreadable.push(start),
            }
        }
        Some(copy)
    }

    /// Writes what was decided where a copy does not hold it, from byte `from` of the stripe's chunks on. The caller
    /// holds the stripe's lock.
    pub async fn correct(
        self: &Rc<Self>,
        stripe: u64,
        from: u64,
        copies: &Copies,
        vote: &Vote,
    ) -> Vec<Corrected> {
        let wrong = self.write_decided(stripe, from, copies, vote).await;
        for corrected in &wrong {
            tracing::warn!(array = %self.name, member = corrected.member.name, stripe, "a copy was put right");
            self.note_repair(&corrected.member, stripe);
        }
        wrong
    }

    /// As [`Engine::correct`], for copies of which nobody says that they are wrong.
    pub async fn write_decided(
        &self,
        stripe: u64,
        from: u64,
        copies: &Copies,
        vote: &Vote,
    ) -> Vec<Corrected> {
        let wrong = copies.iter().enumerate().filter_map(|(copy, held)| {
            let held = held.as_ref()?;
            let runs = vote.corrections(held);
            let place = self.layout.place(stripe, copy);
            let member = self.holder(place, MemberSet::NONE).filter(|_| !runs.is_empty())?;
            Some((member, place, held, runs))
        });
        let corrected = wrong.map(async |(member, place, held, runs)| {
            let writes = runs.into_iter().map(|run| {
                let at = self.member_offset(place.slot, from + run.start as u64);
                let bytes = BufMut::copy_of(&vote.bytes[run]).freeze().into_vec();
                self.member_write(&member, at, bytes, Durability::Volatile)
            });
            // A member that fails is out; the caller settles.
            let written = join_all(writes).await.iter().all(Result::is_ok);
            let decided = |start: &usize| vote.undecided.binary_search(start).is_err();
            let was_unreadable = !held.unreadable.is_empty() && held.unreadable.iter().all(decided);
            written.then_some(Corrected { member, was_unreadable })
        });
        join_all(corrected).await.into_iter().flatten().collect()
    }
}

//! Reads straight into memory that somebody else lends ([`levada_device::Device::read_lent`]), for arrays that have all they need at hand.
//!
//! What always holds:
//! - Nothing is recomputed, kept, repaired or judged by what lies in such memory, which its owner may change at any time: where any of that
//!   would be needed the answer is "not in this way", and an ordinary read does it.
//! - A member that fails here is thought no worse of: that memory may have failed. The ordinary read that follows finds out. Nor is one called slow
//!   for it, as that memory may have been (`slow.rs`).

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::map::Bit;
use crate::member::{Member, add};
use crate::redundancy::Redundancy;
use crate::rows::ROW_BYTES;
use crate::slow::Way;
use futures_util::future::join_all;
use levada_base::lent::bytes_lent;
use levada_base::{Lent, LentVec};
use levada_device::check_range;
use smallvec::SmallVec;
use std::future::Future;
use std::mem::take;
use std::rc::Rc;

/// A contiguous read of one member.
struct Run {
    member: Rc<Member>,
    at: u64,
    end: u64,
    into: LentVec,
}

/// Where all of a read lies.
#[derive(Default)]
struct Found {
    runs: SmallVec<[Run; 1]>,
    /// What was never written.
    holes: LentVec,
}

impl Engine {
    /// Fills `into` from `at` on; `false`: not in this way.
    pub async fn read_lent(&self, at: u64, into: LentVec) -> bool {
        let Some(Found { mut runs, holes }) = self.find_lent(at, into) else { return false };
        // Most small reads.
        if let ([run], []) = (&mut runs[..], &holes[..]) {
            let Some(reading) = self.ask(run) else { return false };
            return reading.await;
        }
        // In a box, as it would make each small read's future as large.
        Box::pin(async {
            // Nobody begins before all have said that they can: who reads again in another way reads all of it.
            let asked: Option<Vec<_>> = runs.iter_mut().map(|run| self.ask(run)).collect();
            let Some(asked) = asked else { return false };
            holes.iter().for_each(Lent::clear);
            join_all(asked).await.into_iter().all(|is_read| is_read)
        })
        .await
    }

    /// A read of a member, which begins when it is polled.
    fn ask<'a>(&'a self, run: &'a mut Run) -> Option<impl Future<Output = bool> + 'a> {
        let into = take(&mut run.into);
        let Run { member, at, end, .. } = &*run;
        let device = member.device.as_ref().filter(|_| !member.lacks(&(*at..*end)))?;
        let reading = device.read_lent(*at, into)?;
        Some(async move {
            let is_read = self.time_read(member, Way::Lent, reading, |is_read| *is_read).await;
            if is_read {
                add(&member.stats.bytes_read, end - at);
            }
            is_read
        })
    }

    /// False where [`Engine::read_lent`] is not worth while: where somebody is missing or passed over. Of a mirror, what a copy holds may be a mark that it is left out, which must be looked for.
    pub fn can_lend(&self, at: u64, into: &LentVec) -> bool {
        let are_rows = at.is_multiple_of(ROW_BYTES)
            && into.iter().all(|part| (part.len() as u64).is_multiple_of(ROW_BYTES));
        are_rows
            && !matches!(self.redundancy, Redundancy::Copies)
            && self.stopped.borrow().is_none()
            && self.lost.is_empty()
            && !self.map.is_short()
            && self.may_lend()
            && check_range(&self.info, at, bytes_lent(into)).is_ok()
    }

    /// `None` where somebody has to be done without.
    fn find_lent(&self, mut at: u64, into: LentVec) -> Option<Found> {
        let mut found = Found::default();
        // By member: its last run.
        let mut last_run = [u32::MAX; 64];
        let mut is_all_there = true;
        for part in into {
            let mut done = 0;
            self.pieces(at, part.len() as u64, |stripe, chunk, within, bytes| {
                let lent = part.part(done, bytes as usize);
                done += bytes as usize;
                if !self.map.has(Bit::Written, stripe) {
                    found.holes.push(lent);
                    return;
                }
                match self.source(stripe, chunk, MemberSet::NONE) {
                    Some((member, place)) => {
                        let at = self.member_offset(place.slot, within);
                        add_lent(&mut found.runs, &mut last_run, member, at, lent);
                    }
                    None => is_all_there = false,
                }
            });
            at += part.len() as u64;
        }
        is_all_there.then_some(found)
    }
}

/// A neighbour of the member's last read joins it.
fn add_lent(
    runs: &mut SmallVec<[Run; 1]>,
    last_run: &mut [u32; 64],
    member: Rc<Member>,
    at: u64,
    lent: Lent,
) {
    let bytes = lent.len() as u64;
    let last = &mut last_run[member.index];
    match runs.get_mut(*last as usize) {
        Some(run) if run.end == at => {
            run.end += bytes;
            run.into.push(lent);
        }
        Some(_) | None => {
            *last = runs.len() as u32;
            let into = smallvec::smallvec![lent];
            runs.push(Run { member, at, end: at + bytes, into });
        }
    }
}

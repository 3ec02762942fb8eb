//! Reads straight into memory that somebody else lends ([`levada_device::Device::read_lent`]), for arrays that have all they need at hand.
//!
//! What always holds:
//! - Nothing is recomputed, kept, repaired or judged by what lies in such memory, which its owner may change at any time: where any of that
//!   would be needed the answer is "not in this way", and an ordinary read does it.
//! - A member that fails here is thought no worse of: that memory may have failed. The ordinary read that follows finds out.

use crate::array::MemberSet;
use crate::engine::{Engine, InFlight};
use crate::map::Bit;
use crate::member::{Member, add};
use crate::redundancy::Redundancy;
use crate::rows::ROW_BYTES;
use futures_util::future::join_all;
use futures_util::poll;
use levada_base::lent::bytes_lent;
use levada_base::{Lent, LentVec, reactor};
use levada_device::check_range;
use smallvec::SmallVec;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// A contiguous read of one member.
struct Run {
    member: Rc<Member>,
    at: u64,
    end: u64,
    into: LentVec,
}

impl Engine {
    /// Fills `into` from `at` on; `false`: not in this way.
    pub async fn read_lent(self: &Rc<Self>, at: u64, into: LentVec) -> bool {
        if !self.can_lend(at, &into) {
            return false;
        }
        let Some(runs) = self.lent_runs(at, into) else { return false };
        // Most small reads.
        if let [_] = &runs[..] {
            let run = runs.into_iter().next().expect("there is one");
            return self.member_read_lent(&run.member, run.at, run.into).await;
        }
        let reads = runs
            .into_iter()
            .map(|run| async move { self.member_read_lent(&run.member, run.at, run.into).await });
        join_all(reads).await.into_iter().all(|is_read| is_read)
    }

    /// Where nobody is missing or passed over. Of a mirror, what a copy holds may be a mark that it is left out, which must be looked for.
    fn can_lend(&self, at: u64, into: &LentVec) -> bool {
        let are_rows = at.is_multiple_of(ROW_BYTES)
            && into.iter().all(|part| (part.len() as u64).is_multiple_of(ROW_BYTES));
        are_rows
            && !matches!(self.redundancy, Redundancy::Copies)
            && self.stopped.borrow().is_none()
            && self.lost.is_empty()
            && !self.map.is_short()
            && self.shunned(MemberSet::NONE).is_empty()
            && check_range(&self.info, at, bytes_lent(into)).is_ok()
    }

    /// `None` where somebody has to be done without.
    fn lent_runs(&self, mut at: u64, into: LentVec) -> Option<SmallVec<[Run; 1]>> {
        let mut runs: SmallVec<[Run; 1]> = SmallVec::new();
        // By member: its last run.
        let mut last_run = [u32::MAX; 64];
        let mut is_all_there = true;
        for part in into {
            let mut done = 0;
            self.pieces(at, part.len() as u64, |stripe, chunk, within, bytes| {
                let lent = part.part(done, bytes as usize);
                done += bytes as usize;
                if !self.map.has(Bit::Written, stripe) {
                    lent.clear();
                    return;
                }
                match self.source(stripe, chunk, MemberSet::NONE) {
                    Some((member, place)) => {
                        let at = self.member_offset(place.slot, within);
                        add_lent(&mut runs, &mut last_run, member, at, lent);
                    }
                    None => is_all_there = false,
                }
            });
            at += part.len() as u64;
        }
        is_all_there.then_some(runs)
    }

    async fn member_read_lent(&self, member: &Rc<Member>, at: u64, into: LentVec) -> bool {
        let Some(device) = &member.device else { return false };
        let bytes = bytes_lent(&into);
        if member.lacks(&(at..at + bytes)) {
            return false;
        }
        let mut reading = device.read_lent(at, into);
        let is_read = match poll!(&mut reading) {
            Poll::Ready(is_read) => {
                if is_read {
                    member.stats.latency.add(Duration::ZERO);
                }
                is_read
            }
            Poll::Pending => {
                let begun = reactor::now();
                let in_flight = InFlight::begin(&member.in_flight);
                let is_read = reading.await;
                drop(in_flight);
                let now = reactor::now();
                if is_read {
                    let took = now.since(begun);
                    member.stats.latency.add(took);
                    self.note_read(member, took, now);
                }
                is_read
            }
        };
        if is_read {
            add(&member.stats.bytes_read, bytes);
        }
        is_read
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

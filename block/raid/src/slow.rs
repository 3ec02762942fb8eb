//! Slow members: who is noticed, by name, and how reads do without them.
//!
//! A drive that is failing often gets slow long before it fails, and every request that needs it waits. So what reads take is
//! compared member by member, in rounds: one that in three rounds running took several times as long as the others, at the
//! median or at the ninth decile, and by an amount that matters, is *slow*. Reads then prefer another copy, or are recomputed
//! from the other members; one in [`PROBE_EVERY`] still goes to it, so that it is noticed when it is as fast as the others
//! again. It has to prove that for longer each time.
//!
//! What always holds:
//! - Only speed is decided here. A read that cannot be answered without a slow member asks it, as if it were not slow.
//! - Who is asked far more often than the others is not called slow for that: it may just have a queue.
//! - A member that answers within the call costs nothing here.
//! - Nobody is called slow for memory that is not ours. A read straight into memory that is lent (`lent.rs`) takes as long as that memory, too:
//!   where a guest had its pages taken away, each is a fault. So such reads raise suspicion, and then nothing is read in that way until
//!   ordinary reads have said whether who is suspected is slow. While somebody is, they alone count.
//!
//! Nothing is kept over a restart.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::map::Bit;
use crate::member::Member;
use crate::status::ArrayEvent;
use levada_base::reactor::Instant;
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// A round takes at least this long, so that what passes by itself (a drive tidying up) is not taken for a slow member.
const ROUND: Duration = Duration::from_millis(250);
/// And at least so many reads of a member, on average.
const READS_PER_ROUND: u64 = 32;
/// Reads that a member must have answered before it is judged.
const READS_LEAST: u64 = 8;
/// The last so many reads of a member in a round are looked at.
const KEPT: usize = 64;
/// Rounds running that make a member slow; half as many, at first, make it fast again.
const ROUNDS: u32 = 3;
/// It must prove itself for so many times as long at most.
const PROOF_MAX: u32 = 64;
/// Of the reads that do without a slow member, one in so many goes to it. No power of two, which the order of reads may
/// have a rhythm of.
const PROBE_EVERY: u64 = 61;
/// A suspicion ends after so many rounds in which too few reads of who is suspected say whether it is slow.
const PROOF_ROUNDS: u32 = 256;

/// How much slower than the others is too slow: at least so many times as long, and so much longer.
struct Bound {
    times: u32,
    longer: Duration,
}

/// At the median.
const MEDIAN: Bound = Bound { times: 4, longer: Duration::from_micros(500) };
/// At the ninth decile, which is chance more often.
const DECILE: Bound = Bound { times: 8, longer: Duration::from_millis(2) };

impl Bound {
    fn is_met(&self, took: Duration, others: Duration) -> bool {
        took >= others * self.times && took >= others + self.longer
    }

    /// What a slow member has to keep below to be fast again.
    fn half(&self) -> Self {
        Self { times: self.times / 2, longer: self.longer / 2 }
    }
}

/// Into whose memory a member's read goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Own,
    Lent,
}

/// A member that is suspected because of reads into memory that is lent. Until others have told there are no more of them.
#[derive(Clone, Copy)]
struct Suspicion {
    of: usize,
    rounds_left: u32,
}

/// What a member's reads took in this round.
pub(crate) struct Recent {
    took_us: RefCell<[u32; KEPT]>,
    count: Cell<u64>,
    /// Rounds running that speak for another standing than it has.
    against: Cell<u32>,
    /// How often it was called slow.
    times_slow: Cell<u32>,
    /// Some of its reads went into memory that is lent, in this round or in those that speak against it.
    has_lent: Cell<bool>,
}

impl Default for Recent {
    fn default() -> Self {
        Self {
            took_us: RefCell::new([0; KEPT]),
            count: Cell::new(0),
            against: Cell::new(0),
            times_slow: Cell::new(0),
            has_lent: Cell::new(false),
        }
    }
}

/// The pace of a member in a round.
#[derive(Clone, Copy)]
struct Told {
    count: u64,
    median: Duration,
    decile: Duration,
}

impl Recent {
    fn add(&self, took: Duration, way: Way) {
        if way == Way::Lent {
            self.has_lent.set(true);
        }
        let count = self.count.get();
        let us = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
        self.took_us.borrow_mut()[count as usize % KEPT] = us;
        self.count.set(count + 1);
    }

    /// `None` where there are too few reads to tell.
    fn told(&self) -> Option<Told> {
        let count = self.count.get();
        if count < READS_LEAST {
            return None;
        }
        let mut took: SmallVec<[u32; KEPT]> = SmallVec::from(*self.took_us.borrow());
        took.truncate(count.min(KEPT as u64) as usize);
        took.sort_unstable();
        let at = |share: usize| Duration::from_micros(took[took.len() * share / 10].into());
        Some(Told { count, median: at(5), decile: at(9) })
    }

    /// The next round begins.
    fn begin(&self) {
        self.count.set(0);
        if self.against.get() == 0 {
            self.has_lent.set(false);
        }
    }

    /// Nothing counts of what was.
    fn forget(&self) {
        self.against.set(0);
        self.begin();
    }

    /// Rounds in which it must be as fast as the others before it is called so.
    fn proof(&self) -> u32 {
        ((ROUNDS / 2) << self.times_slow.get().min(16)).min(PROOF_MAX)
    }
}

/// Who is slow now.
pub(crate) struct Slowness {
    slow: Cell<MemberSet>,
    /// Reads do without slow members.
    pub avoids: Cell<bool>,
    reads: Cell<u64>,
    round_began: Cell<Instant>,
    /// Reads that could do without a slow member.
    asked: Cell<u64>,
    suspicion: Cell<Option<Suspicion>>,
}

impl Default for Slowness {
    fn default() -> Self {
        Self {
            slow: Cell::default(),
            avoids: Cell::new(true),
            reads: Cell::new(0),
            round_began: Cell::default(),
            asked: Cell::new(0),
            suspicion: Cell::new(None),
        }
    }
}

impl Slowness {
    pub fn is_slow(&self, member: usize) -> bool {
        self.slow.get().contains(member)
    }

    pub fn set(&self, member: usize, to: bool) {
        let MemberSet(slow) = self.slow.get();
        let bit = MemberSet::only(member).0;
        self.slow.set(MemberSet(if to { slow | bit } else { slow & !bit }));
    }

    /// The members that this read had better do without; none in the turn of a probe.
    pub fn passed_over(&self) -> MemberSet {
        let slow = self.slow.get();
        if slow.is_empty() || !self.avoids.get() {
            return MemberSet::NONE;
        }
        if self.is_turn_of_a_probe() { MemberSet::NONE } else { slow }
    }

    fn is_turn_of_a_probe(&self) -> bool {
        let asked = self.asked.get() + 1;
        self.asked.set(asked);
        asked.is_multiple_of(PROBE_EVERY)
    }

    /// Reads into memory that is lent count.
    fn hears_lent(&self) -> bool {
        self.suspicion.get().is_none() && self.slow.get().is_empty()
    }
}

impl Engine {
    /// A member answered a read, not within the call. `now` is when, as its caller knows it anyway.
    pub fn note_read(&self, member: &Member, way: Way, took: Duration, now: Instant) {
        let slowness = &self.slowness;
        if way == Way::Lent && !slowness.hears_lent() {
            return;
        }
        member.recent.add(took, way);
        let reads = slowness.reads.get() + 1;
        slowness.reads.set(reads);
        let enough = READS_PER_ROUND * self.layout.width as u64;
        if reads >= enough && now.since(slowness.round_began.get()) >= ROUND {
            slowness.reads.set(0);
            slowness.round_began.set(now);
            self.judge_speed();
        }
    }

    /// The end of a round.
    fn judge_speed(&self) {
        let roles = self.roles.borrow().clone();
        let mut suspicion = self.slowness.suspicion.get();
        let in_sync = |member: &&Rc<Member>| member.is_in_sync();
        let told: SmallVec<[(&Rc<Member>, Told); 16]> = roles
            .iter()
            .flatten()
            .filter(in_sync)
            .filter_map(|member| member.recent.told().map(|told| (member, told)))
            .collect();
        let have_lent = told.iter().any(|(member, _)| member.recent.has_lent.get());
        for (at, (member, its)) in told.iter().enumerate() {
            let others = || told.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, (_, t))| *t);
            let (Some(count), Some(median), Some(decile)) = (
                middle(others().map(|told| told.count)),
                middle(others().map(|told| told.median)),
                middle(others().map(|told| told.decile)),
            ) else {
                continue;
            };
            let is_slow = self.slowness.is_slow(member.index);
            let exceeds =
                |of: Bound, took, others| if is_slow { of.half() } else { of }.is_met(took, others);
            let seems_slow = its.count <= 2 * count
                && (exceeds(MEDIAN, its.median, median) || exceeds(DECILE, its.decile, decile));
            let recent = &member.recent;
            recent.against.set(if seems_slow == is_slow { 0 } else { recent.against.get() + 1 });
            if !seems_slow {
                suspicion.take_if(|suspicion| suspicion.of == member.index);
            }
            let (index, name) = (member.index, member.name.clone());
            if !is_slow && recent.against.get() >= ROUNDS {
                if have_lent {
                    return self.suspect(index);
                }
                suspicion = None;
                recent.times_slow.set(recent.times_slow.get() + 1);
                self.slowness.set(index, true);
                let (took, others) = match MEDIAN.is_met(its.median, median) {
                    true => (its.median, median),
                    false => (its.decile, decile),
                };
                self.emit(&ArrayEvent::MemberSlow { member: index, name, took, others });
            } else if is_slow && recent.against.get() >= recent.proof() {
                self.slowness.set(index, false);
                self.emit(&ArrayEvent::MemberSlowNoMore { member: index, name });
            } else {
                continue;
            }
            recent.against.set(0);
        }
        // Who had too few goes on counting.
        told.iter().for_each(|(member, _)| member.recent.begin());
        self.slowness.suspicion.set(suspicion.and_then(|Suspicion { of, rounds_left }| {
            Some(Suspicion { of, rounds_left: rounds_left.checked_sub(1)? })
        }));
    }

    /// From now on reads go into our own memory, and what they took before does not count.
    fn suspect(&self, of: usize) {
        self.slowness.suspicion.set(Some(Suspicion { of, rounds_left: PROOF_ROUNDS }));
        self.roles.borrow().iter().flatten().for_each(|member| member.recent.forget());
    }

    /// Whether this read may go straight into memory that is lent: where nobody is suspected, or passed over as slow. Where somebody is slow and reads
    /// cannot do without, or shall not, some go the other way, by which it is noticed when it is as fast as the others again.
    pub fn may_lend(&self) -> bool {
        let slowness = &self.slowness;
        let passes_over = || slowness.avoids.get() && self.layout.level.has_parity();
        slowness.suspicion.get().is_none()
            && (slowness.slow.get().is_empty() || !passes_over() && !slowness.is_turn_of_a_probe())
    }

    /// The slow members that a read of a level with parity does without: as many as leave enough.
    pub fn shunned(&self, avoid: MemberSet) -> MemberSet {
        let slow = match avoid.is_empty() && self.layout.level.has_parity() {
            true => self.slowness.passed_over(),
            false => MemberSet::NONE,
        };
        if slow.is_empty() {
            return slow;
        }
        let mut out = self.roles_out();
        let mut shunned = MemberSet::NONE;
        for (role, member) in self.roles.borrow().iter().enumerate() {
            let Some(member) = member.as_ref().filter(|member| slow.contains(member.index)) else {
                continue;
            };
            if self.layout.survives(out | 1 << role) {
                out |= 1 << role;
                shunned = shunned.with(member.index);
            }
        }
        shunned
    }

    /// Whom a read of this stripe does without: slow members only where data and redundancy belong together, as far as is
    /// known.
    pub fn avoided_in(&self, stripe: u64, avoid: MemberSet, shunned: MemberSet) -> MemberSet {
        let belongs = || self.is_settled(stripe) && !self.map.has(Bit::Suspect, stripe);
        match !shunned.is_empty() && belongs() {
            true => MemberSet(avoid.0 | shunned.0),
            false => avoid,
        }
    }

    /// A member plays no role any more, or another one is in its place.
    pub fn forget_speed(&self, member: usize) {
        self.slowness.set(member, false);
        let suspicion = self.slowness.suspicion.get();
        self.slowness.suspicion.set(suspicion.filter(|suspicion| suspicion.of != member));
    }
}

/// The middle one, of an even number the lower.
fn middle<T: Ord>(of: impl Iterator<Item = T>) -> Option<T> {
    let mut all: SmallVec<[T; 16]> = of.collect();
    all.sort_unstable();
    let at = all.len().checked_sub(1)? / 2;
    all.into_iter().nth(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_must_be_much_slower_to_be_slow() {
        let of = |took, others| {
            MEDIAN.is_met(Duration::from_micros(took), Duration::from_micros(others))
        };
        assert!(of(5000, 80) && of(40_000, 8000));
        assert!(!of(400, 80), "too little to matter");
        assert!(!of(20_000, 8000), "such are drives");
    }

    #[test]
    fn a_few_reads_tell_nothing_and_the_last_ones_count() {
        let recent = Recent::default();
        (1..READS_LEAST).for_each(|_| recent.add(Duration::from_secs(9), Way::Own));
        assert!(recent.told().is_none());
        (0..KEPT as u64).for_each(|ms| recent.add(Duration::from_millis(ms), Way::Own));
        let told = recent.told().expect("enough");
        assert_eq!((told.median.as_millis(), told.decile.as_millis()), (32, 57));
        assert_eq!(told.count, READS_LEAST - 1 + KEPT as u64);
    }

    #[test]
    fn who_was_slow_before_proves_itself_for_longer() {
        let recent = Recent::default();
        let proofs = (1..9).map(|times| {
            recent.times_slow.set(times);
            recent.proof()
        });
        assert_eq!(proofs.collect::<Vec<_>>(), [2, 4, 8, 16, 32, 64, 64, 64]);
    }
}

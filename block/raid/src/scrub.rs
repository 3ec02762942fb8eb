//! Scrub: reads every written stripe on every member and checks that redundancy agrees.
//!
//! With parity: where more than one equation remains, one wrong chunk is located and rewritten. What cannot be read
//! is recomputed, block by block, and not where an equation that is left says that the others are wrong: one bad
//! block in each of two chunks must not become the loss of both. Copies vote, block by block ([`crate::agreed`]). Stripes that are dirty or being written are skipped: their
//! redundancy promises nothing yet. Changes nothing else, so a crash leaves nothing to undo.
//!
//! How far it is, and what it found, is in the superblocks: stored now and then, and with every other change of standing.
//! Interrupted, it goes on there. What it says of stripes that were overwritten in place ([`Bit::Patched`]) it says of those
//! that it has checked since the array was opened; of the others the next one does.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::map::Bit;
use crate::member::add;
use crate::pace::{Limits, Pace};
use crate::read::{Chunks, held};
use crate::rebuild::STRIPES_AT_ONCE;
use crate::redundancy::Redundancy;
use futures_util::future::join_all;
use levada_base::reactor;
use levada_base::{BufMut, probe};
use levada_device::{BlockError, Durability};
use levada_parity::Verdict;
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Between two stores of how far a scrub is.
const STORED_EVERY: Duration = Duration::from_secs(10);

/// What a scrub found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Stripes checked.
    pub stripes: u64,
    /// Stripes left out because they were being written, or had too few members to check.
    pub skipped: u64,
    /// Chunks that could not be read and were rewritten.
    pub unreadable_repaired: u64,
    /// Chunks that held wrong bytes, were located and rewritten.
    pub wrong_repaired: u64,
    /// Stripes that disagree, and nothing tells which chunk is wrong. What nothing tells is untouched.
    pub mismatched: u64,
    /// Stripes with fewer readable chunks than data needs.
    pub lost: u64,
}

impl ScrubReport {
    fn add(&mut self, more: &Self) {
        self.stripes += more.stripes;
        self.skipped += more.skipped;
        self.unreadable_repaired += more.unreadable_repaired;
        self.wrong_repaired += more.wrong_repaired;
        self.mismatched += more.mismatched;
        self.lost += more.lost;
    }

    fn repaired(&self) -> u64 {
        self.unreadable_repaired + self.wrong_repaired
    }
}

/// How far a scrub is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scrubbed {
    /// Every stripe below this was checked; 0: no scrub is under way.
    pub below: u64,
    /// What was found there.
    pub report: ScrubReport,
}

impl Scrubbed {
    /// As the superblock has it.
    pub fn numbers(&self) -> [u64; 7] {
        let ScrubReport { stripes, skipped, unreadable_repaired, wrong_repaired, mismatched, lost } =
            self.report;
        [self.below, stripes, skipped, unreadable_repaired, wrong_repaired, mismatched, lost]
    }

    /// From the superblock of an array of `stripes_total`; as if there were none where these numbers contradict that.
    pub fn of(numbers: [u64; 7], stripes_total: u64) -> Self {
        let [below, stripes, skipped, unreadable_repaired, wrong_repaired, mismatched, lost] =
            numbers;
        let is_sound =
            below > 0 && below <= stripes_total && numbers[1..].iter().all(|n| *n < 1 << 56);
        let report =
            ScrubReport { stripes, skipped, unreadable_repaired, wrong_repaired, mismatched, lost };
        if is_sound { Self { below, report } } else { Self::default() }
    }
}

/// What a scrub did to a part of a stripe; chunks as bits.
#[derive(Clone, Copy, Default)]
struct Found {
    repaired: u64,
    wrong: u64,
    mismatched: bool,
    lost: bool,
    /// All chunks are there, and agree.
    checked: bool,
}

impl Found {
    fn add(&mut self, other: Self) {
        self.repaired |= other.repaired;
        self.wrong |= other.wrong;
        self.mismatched |= other.mismatched;
        self.lost |= other.lost;
    }
}

/// What is the matter with a stripe.
enum Finding {
    Good,
    Wrong { chunk: usize },
    Mismatch,
}

impl Engine {
    pub async fn scrub(
        self: &Rc<Self>,
        limits: Limits,
        anew: bool,
    ) -> Result<ScrubReport, BlockError> {
        let _turn = self.scrub_turn.acquire(1).await;
        /// Takes the progress away again, also when the caller gives up.
        struct Shown<'a>(&'a Engine);
        impl Drop for Shown<'_> {
            fn drop(&mut self) {
                self.0.scrub.set(None);
            }
        }
        let _shown = Shown(self);
        let _busy = probe::busy("array scrub");
        if anew && self.scrubbed.take() != Scrubbed::default() {
            self.tell_scrubbed().await?;
        }
        let Scrubbed { below: mut from, mut report } = self.scrubbed.get();
        let before = report.stripes + report.skipped;
        let mut pace = Pace::new(self, limits, before, self.map.written_stripes().max(before));
        let mut stored = reactor::now();
        loop {
            self.check_running()?;
            self.scrub.set(Some(pace.progress));
            let mut batch: SmallVec<[u64; 8]> = SmallVec::new();
            while batch.len() < STRIPES_AT_ONCE
                && let Some(stripe) = self.map.next_set(Bit::Written, from)
            {
                batch.push(stripe);
                from = stripe + 1;
            }
            if batch.is_empty() {
                self.scrubbed.take();
                self.scrub_told.take();
                if self.map.next_set(Bit::Patched, 0).is_none() {
                    self.patched.set(false);
                }
                if !self.lost.is_empty() {
                    // What was put right is taken from the list behind a flush.
                    self.flush_members().await?;
                }
                // It is over, and finds that on record.
                add(&self.standing_wanted, 1);
                self.settle().await?;
                return Ok(report);
            }
            // Detached: a scrub that is given up must not let go of a stripe that it is writing to.
            let stripes = batch.iter().map(|stripe| {
                let (engine, stripe) = (Rc::clone(self), *stripe);
                self.detached(async move { Ok(engine.scrub_stripe(stripe).await) })
            });
            let results: Vec<ScrubReport> =
                join_all(stripes).await.into_iter().collect::<Result<_, _>>()?;
            self.settle().await?;
            results.iter().for_each(|of_stripe| report.add(of_stripe));
            self.scrubbed.set(Scrubbed { below: from, report });
            if report.repaired() == self.scrub_told.get().report.repaired() {
                self.scrub_told.set(self.scrubbed.get());
            }
            if stored.elapsed() >= STORED_EVERY {
                self.tell_scrubbed().await?;
                stored = reactor::now();
            }
            let stripes = batch.len() as u64;
            let bytes = stripes * self.layout.chunks() as u64 * self.layout.chunk_bytes;
            pace.spend(stripes, bytes).await;
        }
    }

    /// Stores how far the scrub is, behind a flush of what it repaired.
    async fn tell_scrubbed(self: &Rc<Self>) -> Result<(), BlockError> {
        let scrubbed = self.scrubbed.get();
        if scrubbed.report.repaired() > self.scrub_told.get().report.repaired() {
            self.flush_members().await?;
        }
        self.scrub_told.set(scrubbed);
        add(&self.standing_wanted, 1);
        self.settle().await
    }

    async fn scrub_stripe(self: &Rc<Self>, stripe: u64) -> ScrubReport {
        let mut report = ScrubReport::default();
        let (start, end) = self.stripe_range(stripe, 1);
        if !self.locks.is_free(start, end) {
            report.skipped = 1;
            return report;
        }
        let _guard = self.locks.lock(start, end).await;
        // Overwrites dirty a stripe without making it disagree once they are through, and the
        // lock says that they are.
        let unsettled = self.map.has(Bit::Dirty, stripe) && self.layout.level.has_parity();
        if unsettled || !self.map.has(Bit::Written, stripe) {
            report.skipped = 1;
            return report;
        }
        if let Redundancy::Copies = self.redundancy {
            return self.scrub_copies(stripe).await;
        }
        let (chunk_bytes, block_bytes) = (self.layout.chunk_bytes, self.least_bytes());
        let found = match self.scrub_range(stripe, 0..chunk_bytes).await {
            Some(found) => found,
            None => {
                let mut found = Found::default();
                for block in (0..chunk_bytes).step_by(block_bytes as usize) {
                    let of_block = self.scrub_range(stripe, block..block + block_bytes).await;
                    found.add(of_block.expect("a block is not cut further"));
                }
                found
            }
        };
        if found.checked {
            self.map.set(Bit::Patched, stripe..stripe + 1, false);
        }
        self.map.set(Bit::Suspect, stripe..stripe + 1, found.mismatched);
        if found.mismatched {
            tracing::warn!(array = %self.name, stripe, "scrub: chunks disagree");
        }
        if found.wrong != 0 {
            let chunks: Vec<u32> = (0..64).filter(|chunk| found.wrong >> chunk & 1 == 1).collect();
            tracing::warn!(array = %self.name, stripe, ?chunks, "scrub: wrong chunks");
        }
        ScrubReport {
            stripes: 1,
            skipped: 0,
            unreadable_repaired: u64::from(found.repaired.count_ones()),
            wrong_repaired: u64::from(found.wrong.count_ones()),
            mismatched: u64::from(found.mismatched),
            lost: u64::from(found.lost),
        }
    }

    /// Checks a range of every chunk of a stripe, and puts right what it can; `None` when some of it cannot be
    /// read and it is more than a block.
    async fn scrub_range(self: &Rc<Self>, stripe: u64, within: Range<u64>) -> Option<Found> {
        let all = self.layout.chunks();
        let mut held = self.gather(stripe, within.clone(), 0, MemberSet::NONE, all).await;
        if held.bad != 0 && within.end - within.start > self.least_bytes() {
            return None;
        }
        let mut found = Found::default();
        if held.count() < self.layout.data_chunks() {
            found.lost = true;
            return Some(found);
        }
        let wrong = match self.examine(&held.chunks) {
            Finding::Good => {
                found.checked = held.count() == all;
                0
            }
            // It may have rotted before it was overwritten, and then it is the parity that is wrong.
            Finding::Wrong { chunk }
                if chunk < self.layout.data_chunks() && self.map.has(Bit::Patched, stripe) =>
            {
                found.mismatched = true;
                return Some(found);
            }
            Finding::Mismatch => {
                found.mismatched = true;
                return Some(found);
            }
            Finding::Wrong { chunk } => {
                held.chunks[chunk] = None;
                1 << chunk
            }
        };
        for chunk in (0..all).filter(|chunk| (held.bad | wrong) >> chunk & 1 == 1) {
            let bytes = self.recomputed(&held.chunks, chunk, &within);
            let is_written = match &bytes {
                Some(bytes) => self.write_chunk(stripe, chunk, within.start, bytes).await,
                None => false,
            };
            match (is_written, wrong >> chunk & 1 == 1) {
                (true, true) => found.wrong |= 1 << chunk,
                (true, false) => found.repaired |= 1 << chunk,
                (false, true) => found.mismatched = true,
                (false, false) => {}
            }
            held.chunks[chunk] = bytes;
        }
        Some(found)
    }

    /// Lets the copies of a stripe vote, and puts right what is decided.
    async fn scrub_copies(self: &Rc<Self>, stripe: u64) -> ScrubReport {
        let mut report = ScrubReport { stripes: 1, ..ScrubReport::default() };
        let whole = 0..self.layout.chunk_bytes;
        let (copies, vote) = self.ask_copies(stripe, &whole, 0).await;
        let Some(vote) = vote else { return ScrubReport { lost: 1, ..report } };
        if self.check_running().is_err() {
            return report;
        }
        for corrected in self.correct(stripe, 0, &copies, &vote).await {
            match corrected.was_unreadable {
                true => report.unreadable_repaired += 1,
                false => report.wrong_repaired += 1,
            }
        }
        if !vote.silent.is_empty() {
            report.lost = 1;
        } else if !vote.is_decided() {
            tracing::warn!(array = %self.name, stripe, "scrub: copies differ, and no majority agrees");
            report.mismatched = 1;
        }
        report
    }

    /// This range of chunk `wanted` as the others imply it.
    fn recomputed(&self, chunks: &Chunks, wanted: usize, within: &Range<u64>) -> Option<BufMut> {
        let mut bytes = BufMut::for_overwrite((within.end - within.start) as usize);
        let into = std::iter::once((wanted, &mut bytes[..]));
        self.redundancy.recompute(held(chunks), into).then_some(bytes)
    }

    async fn write_chunk(
        self: &Rc<Self>,
        stripe: u64,
        chunk: usize,
        offset: u64,
        bytes: &BufMut,
    ) -> bool {
        let place = self.layout.place(stripe, chunk);
        let Some(member) = self.holder(place, MemberSet::NONE) else { return false };
        let copy = BufMut::copy_of(bytes).freeze().into_vec();
        let at = self.member_offset(place.slot, offset);
        let written = self.member_write(&member, at, copy, Durability::Volatile).await.is_ok();
        if written {
            self.updates.renew(&(stripe..stripe + 1));
            self.note_repair(&member, stripe);
        }
        written
    }

    fn examine(&self, chunks: &Chunks) -> Finding {
        match &self.redundancy {
            // Copies are not here.
            Redundancy::None | Redundancy::Copies => Finding::Good,
            Redundancy::Parity(code) => {
                let mut whole: SmallVec<[&[u8]; 16]> = SmallVec::new();
                whole.extend(chunks.iter().flatten().map(|bytes| &bytes[..]));
                if whole.len() == chunks.len() {
                    return match code.locate(&whole) {
                        Verdict::Consistent => Finding::Good,
                        Verdict::Wrong { index } => Finding::Wrong { chunk: index },
                        Verdict::Unexplained => Finding::Mismatch,
                    };
                }
                self.examine_degraded(chunks)
            }
        }
    }

    /// With one chunk missing one equation is left: it tells that something is wrong, not what.
    /// With two missing nothing is left to check.
    fn examine_degraded(&self, chunks: &Chunks) -> Finding {
        let present: SmallVec<[usize; 16]> =
            (0..chunks.len()).filter(|chunk| chunks[*chunk].is_some()).collect();
        let (Some(last), true) = (present.last(), present.len() > self.layout.data_chunks()) else {
            return Finding::Good;
        };
        let mut others: Chunks = (0..chunks.len()).map(|_| None).collect();
        for chunk in &present[..present.len() - 1] {
            others[*chunk] = chunks[*chunk].as_ref().map(|bytes| BufMut::copy_of(bytes));
        }
        let bytes = chunks[*last].as_ref().map_or(0, |held| held.len() as u64);
        let implied = self.recomputed(&others, *last, &(0..bytes));
        match (implied, &chunks[*last]) {
            (Some(implied), Some(held)) if implied[..] != held[..] => Finding::Mismatch,
            (Some(_) | None, _) => Finding::Good,
        }
    }
}

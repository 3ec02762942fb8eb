//! Which of the stripes that describe themselves count when an index is made from them:
//!
//! - Of each segment only its newest generation. Older ones are leftovers below stripes that were
//!   never written again.
//! - Nothing of a segment that a footer calls unused, of an earlier generation than that footer
//!   tells: the segment has been declared anew since, and shows what it held before.
//! - Nothing of an earlier owner past what the index of a later one knew when that one opened the
//!   log: it gave the rest back. Each footer tells how far that was.
//! - Nothing from the first stripe on that is missing or torn, as far as no flush covered it.
//!   Each footer tells the oldest stripe that was not flushed when it was closed, so only the
//!   newest stripes are in question, and only their data is read. All that comes later was not
//!   committed either, and without the missing one it would be a state that never was.
//! - Of a change whose rest is not there, nothing.
//!
//! Stripes are counted as they are closed. One whose number is missing was lost, or lay in a segment that was given back:
//! then all before it were flushed. Its successor tells in which segment it lay.

use crate::LogError;
use crate::extents::Extent;
use crate::format::{Before, Footer, RecordHeader, RecordKind, first_order};
use crate::log::Inner;
use crate::read::Plan;
use crate::rebuild::Found;
use levada_base::Epoch;
use levada_base::ids::ObjectId;
use levada_base::{planted, probe};
use levada_raid::IoClass;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;

/// A stripe that describes itself.
pub(crate) struct Stripe {
    pub footer: Footer,
    pub records: Vec<RecordHeader>,
}

/// Drops what segments show that were free when some stripe was closed.
pub(crate) fn drop_left_over(stripes: &mut Vec<Stripe>) {
    let mut void: BTreeMap<u32, u64> = BTreeMap::new();
    for Stripe { footer, .. } in &*stripes {
        for segment in footer.unused.segments.iter().flatten() {
            let before = void.entry(*segment).or_default();
            *before = footer.unused.before.max(*before);
        }
    }
    stripes.retain(|Stripe { footer, .. }| {
        void.get(&footer.segment).is_none_or(|before| footer.generation >= *before)
    });
}

/// Drops what a later owner gave back when it opened the log, and sorts the rest.
pub(crate) fn drop_given_back(stripes: &mut Vec<Stripe>) {
    let inherited: BTreeMap<Epoch, u64> =
        stripes.iter().map(|stripe| (stripe.footer.epoch, stripe.footer.inherited)).collect();
    stripes.sort_by_key(|stripe| stripe.footer.order);
    stripes.retain(|Stripe { footer, .. }| {
        let later = (Bound::Excluded(footer.epoch), Bound::Unbounded);
        inherited.range(later).all(|(_, end)| footer.order < *end)
    });
}

/// Drops from the first stripe on that holds a change whose rest is neither there nor staged. One that was closed in
/// the middle of a change holds a version that was not given out yet. The index takes in all of a change or nothing, so it knew none of
/// these. (Leaving out that change alone was not enough: its beginning stayed where it was, and the next rebuild, with
/// later stripes behind it, took it for true.)
pub(crate) fn drop_half_a_change(stripes: &mut Vec<Stripe>, staged: &BTreeSet<(u64, ObjectId)>) {
    while let Some(seq) = stripes.last().map(|last| last.footer.seq) {
        let is_half = |header: &RecordHeader| {
            header.version > seq && !staged.contains(&(header.version, header.object))
        };
        match stripes.iter().position(|stripe| stripe.records.iter().any(is_half)) {
            Some(first) => stripes.truncate(first),
            None => return,
        }
    }
}

/// True when a stripe is missing between one and the next that is there, where those before `flushed_to` do not matter.
fn is_gap(before: Option<&Footer>, next: &Footer, flushed_to: u64, segment_stripes: u32) -> bool {
    if next.before.is_none() {
        return next.order != flushed_to && is_first_gap(before, next, flushed_to, segment_stripes);
    }
    let before = before.filter(|before| before.order >= flushed_to);
    next.order != before.map_or(flushed_to, |before| before.order + 1)
}

/// The same where footers of the first version tell places alone: segments were filled one after the other.
fn is_first_gap(
    before: Option<&Footer>,
    next: &Footer,
    flushed_to: u64,
    segment_stripes: u32,
) -> bool {
    let is_of_its_segment = next.generation == flushed_to >> 32;
    // As long as a stripe of its segment is there, the oldest unflushed one should be too.
    match before.filter(|before| before.order >= first_order(flushed_to >> 32, 0)) {
        Some(before) if before.generation == next.generation => next.stripe != before.stripe + 1,
        // Only a new owner leaves a segment unfinished.
        Some(before) => {
            next.stripe != 0 || before.epoch == next.epoch && before.stripe + 1 != segment_stripes
        }
        None if is_of_its_segment => next.order != flushed_to,
        // A segment that died meanwhile leaves none behind.
        None => next.stripe != 0,
    }
}

impl Inner {
    /// Drops the first stripe that did not arrive whole, and everything after it.
    pub(crate) async fn cut_at_the_first_torn(
        self: &Rc<Self>,
        stripes: &mut Vec<Stripe>,
    ) -> Result<(), LogError> {
        let Some(flushed_to) = self.flushed_to(stripes) else { return Ok(()) };
        let tail = stripes.partition_point(|stripe| stripe.footer.order < flushed_to);
        for at in tail..stripes.len() {
            let footer = &stripes[at].footer;
            let before = at.checked_sub(1).map(|before| &stripes[before].footer);
            let gap = is_gap(before, footer, flushed_to, self.config.segment_stripes);
            if gap {
                probe::count("stripes found lost", 1);
            }
            if gap || !self.is_whole(&stripes[at]).await? {
                tracing::warn!(
                    segment = footer.segment,
                    stripe = footer.stripe,
                    dropped = stripes.len() - at,
                    "the log ends in stripes that were not committed"
                );
                stripes.truncate(at);
                break;
            }
        }
        Ok(())
    }

    /// The order below which everything was flushed, as far as that can be told.
    fn flushed_to(&self, stripes: &[Stripe]) -> Option<u64> {
        let mut flushed_to = stripes.iter().map(|stripe| stripe.footer.unflushed).max()?;
        // Of each segment the first stripe that it shows.
        let mut first_of: BTreeMap<u32, &Footer> = BTreeMap::new();
        for Stripe { footer, .. } in stripes {
            first_of.entry(footer.segment).or_insert(footer);
        }
        for (at, Stripe { footer, .. }) in stripes.iter().enumerate() {
            let is_there = at > 0 && stripes[at - 1].footer.order + 1 == footer.order;
            if let Some(before) = footer.before.filter(|_| !is_there && footer.order > flushed_to)
                && self.was_given_back(before, first_of.get(&before.segment).copied(), footer.order)
            {
                probe::count("stripes found given back", 1);
                flushed_to = footer.order;
            }
        }
        Some(flushed_to)
    }

    /// Whether the stripe before the one with that order lay in a segment that was given back, which happens to segments that
    /// are indexed whole; `first` is the first stripe that this segment shows now.
    fn was_given_back(&self, before: Before, first: Option<&Footer>, order: u64) -> bool {
        let stripes = u64::from(self.config.segment_stripes);
        let places = u64::from(before.segment) * stripes..(u64::from(before.segment) + 1) * stripes;
        match first {
            _ if planted!("log-lost-stripe-passed-over") => true,
            Some(first) if first.order < order => false,
            // What was flushed cannot have been lost.
            _ if before.is_flushed => true,
            // Were this a later use, its footers would tell that all before it was flushed.
            Some(_) => false,
            // No stripe is written before all segments are declared that those before it lie in.
            None => !places.into_iter().any(|at| self.array.is_written(at)),
        }
    }

    /// True when all data of a stripe fits its checksums, perhaps after repair.
    async fn is_whole(self: &Rc<Self>, stripe: &Stripe) -> Result<bool, LogError> {
        let Footer { segment, stripe: place, .. } = stripe.footer;
        for header in stripe.records.iter().filter(|header| header.kind == RecordKind::Data) {
            let record = Found { header: header.clone(), segment, stripe: place }.record();
            let extent = Extent { len: header.len, record };
            let plan = Plan::of_extent(self, header.offset, &extent);
            match self.fetch(plan, IoClass::Clean).await {
                Ok(_) => {}
                Err(LogError::Damaged { .. }) => {
                    self.must_be_readable(segment, place).await?;
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

//! The cleaner: copies what is live out of segments in which much is dead.
//!
//! It runs while free segments are few. A pass picks victims by what they give (dead bytes)
//! against what they cost (live bytes to copy), older ones first among equals. A round empties some of them
//! ([`empty`]): their live extents are copied, under their old versions, into the open stripe of cold data; what was copied
//! is settled; and the victims are given back like any other dead segment.
//!
//! It cannot deadlock: new data leaves it a reserve of free segments, the sum of all footprints
//! is bounded below what is left ([`Inner::capacity_bytes`]), and a pass copies no more than
//! fits what is free. A crash in a pass leaves copies that the index does not know, or a victim
//! that is half empty; both are ordinary.

mod empty;
mod marks;
mod pace;
mod sweep;

pub(crate) use pace::{Paid, free_ahead};

use crate::LogError;
use crate::extents::footprint;
use crate::heat::Heat;
use crate::log::{Inner, State};
use crate::read::Pin;
use crate::segment::SegmentState;
use crate::space::MARKS_SHARE;
use crate::write::STRIPES_PER_CHANGE;
use levada_base::probe;
use levada_base::reactor::spawn_in;
use levada_base::units::{BLOCK_BYTES, MIB};
use std::rc::Rc;

/// Segments cleaned in one pass.
const VICTIMS_MAX: usize = 8;
/// Live bytes that a round holds in memory, unless one segment has more: as much as is brought into the order of objects.
const ROUND_BYTES: u64 = 32 * MIB;

/// How far a log with few free segments has come. Passes that only moved things around would follow each
/// other for ever, and writers wait for them.
#[derive(Clone, Copy)]
struct Standing {
    seq: u64,
    outdated_min: u64,
    stripes: u64,
}

impl Standing {
    fn is_beyond(self, before: Self) -> bool {
        self.seq > before.seq
            || self.outdated_min > before.outdated_min
            || self.stripes > before.stripes
    }
}

impl State {
    /// The age of the oldest record anywhere that must not come back.
    fn outdated_min(&self) -> u64 {
        self.outdated_min_but(None)
    }

    /// The same of all segments but one.
    fn outdated_min_but(&self, segment: Option<u32>) -> u64 {
        let others = self.segments.iter().filter(|(at, _)| Some(*at) != segment);
        others.map(|(_, segment)| segment.outdated_min()).min().unwrap_or(u64::MAX)
    }
}

impl Inner {
    fn wants_cleaning(&self) -> bool {
        let state = self.state.borrow();
        state.failed.is_none()
            && !state.nothing_to_clean
            && state.segments.free_count() < self.config.reserve_segments + free_ahead(&state)
    }

    /// Starts the cleaner when free segments are few and it does not run.
    pub(crate) fn clean_if_needed(self: &Rc<Self>) {
        if self.state.borrow().cleaner_running || !self.wants_cleaning() {
            return;
        }
        self.state.borrow_mut().cleaner_running = true;
        let log = Rc::clone(self);
        spawn_in(&self.group, async move {
            let mut fruitless = 0;
            while log.wants_cleaning() {
                log.state.borrow_mut().died = false;
                match log.clean_pass().await {
                    Ok(true) => fruitless = 0,
                    Ok(false) | Err(LogError::Full) => {
                        fruitless += 1;
                        let mut state = log.state.borrow_mut();
                        // The next one looks for space alone.
                        let may_gain = state.cleaned_oldest && fruitless == 1;
                        state.nothing_to_clean = !may_gain && !state.died;
                    }
                    Err(error) => log.fail(error),
                }
            }
            log.state.borrow_mut().cleaner_running = false;
            log.changed.notify_all();
        });
    }

    /// One pass. False when nothing was gained.
    async fn clean_pass(self: &Rc<Self>) -> Result<bool, LogError> {
        let _busy = probe::busy("log clean");
        let before = self.standing();
        let mut victims = self.victims();
        if victims.is_empty() {
            // What has died may not be known to the index yet.
            self.settle().await?;
            victims = self.victims();
        }
        // Held, so that none is given back and used again under the cleaner's eyes.
        let mut victims: Vec<(u32, Pin)> = {
            let state = self.state.borrow();
            // The oldest first: once it is gone, the records without data of younger ones hide less.
            victims.sort_by_key(|victim| state.segments.get(*victim).outdated_min());
            victims.iter().map(|victim| (*victim, Pin::new(self, &state, *victim))).collect()
        };
        while !victims.is_empty() {
            let left = victims.split_off(self.round_of(&victims));
            let mut round = std::mem::replace(&mut victims, left);
            let segments: Vec<u32> = round.iter().map(|(victim, _)| *victim).collect();
            match self.empty(&segments).await {
                Ok(emptied) => {
                    round.retain(|(victim, _)| emptied.contains(victim));
                    self.give_back(round).await?;
                }
                Err(LogError::Full) => {
                    // What was copied out of them is dead in them now.
                    self.settle().await?;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(self.standing().is_beyond(before))
    }

    /// How many of these are emptied together. As their extents are copied in the order of objects, none is empty before all
    /// are: so no more than what others cannot take meanwhile. (With all that was free when a pass began, a full log
    /// was left with victims that were nearly empty, and no stripe for the rest of them.)
    fn round_of(&self, victims: &[(u32, Pin)]) -> usize {
        let state = self.state.borrow();
        let segment_bytes = self.stripe_bytes * u64::from(state.segments.stripes);
        let has_marks = victims.iter().any(|(victim, _)| state.segments.get(*victim).row.marks > 0);
        // What is sent again may take half of the reserve.
        let kept = state.segments.free_count().min(self.config.reserve_segments.div_ceil(2));
        let stripes = u64::from(kept * state.segments.stripes)
            + state.segments.stripes_left(Heat::Cold).saturating_sub(STRIPES_PER_CHANGE);
        let bytes_max = ROUND_BYTES.min(stripes * self.stripe_bytes / 16 * 15);
        let mut bytes = 0;
        for (count, (victim, _)) in victims.iter().enumerate() {
            let row = &state.segments.get(*victim).row;
            bytes += row.live_bytes + row.marks * footprint(0);
            if bytes > bytes_max && count > 0 {
                return count;
            }
            // One that holds little is given back before the next is looked at: most of what that one's
            // records without data would have to hide is gone then.
            if has_marks && row.live_bytes < segment_bytes / 2 {
                return count + 1;
            }
        }
        victims.len()
    }

    /// Makes the copies durable, gives back the segments from which everything was copied, and waits
    /// until they are free.
    async fn give_back(self: &Rc<Self>, emptied: Vec<(u32, Pin)>) -> Result<(), LogError> {
        if emptied.is_empty() {
            return Ok(());
        }
        self.settle_copies().await?;
        let is_dead = |victim| self.state.borrow().segments.get(victim).row.live_bytes == 0;
        // What was written over when it was to be copied is not indexed, perhaps.
        if !emptied.iter().all(|(victim, _)| is_dead(*victim)) {
            self.settle().await?;
        }
        let mut victims = Vec::new();
        for (victim, pin) in emptied {
            drop(pin);
            if is_dead(victim) {
                let mut state = self.state.borrow_mut();
                // Those that matter have been copied.
                state.forget_marks(victim);
                state.counters.cleaned_segments += 1;
                probe::count("segments cleaned", 1);
                victims.push(victim);
            }
        }
        self.free_dead_segments();
        self.changed
            .until(|| {
                let state = self.state.borrow();
                let is_freeing = |at: &u32| state.segments.get(*at).state == SegmentState::Freeing;
                let freeing = victims.iter().any(is_freeing);
                (!freeing || state.failed.is_some()).then_some(())
            })
            .await;
        Ok(())
    }

    fn standing(&self) -> Standing {
        let state = self.state.borrow();
        Standing {
            seq: state.seq,
            outdated_min: state.outdated_min(),
            stripes: state.segments.stripes_not_given_out(),
        }
    }

    /// Segments worth cleaning now, together no larger than what can be copied.
    fn victims(&self) -> Vec<u32> {
        let mut state = self.state.borrow_mut();
        let stripe_bytes = self.stripe_bytes - BLOCK_BYTES;
        let segment_bytes = stripe_bytes * u64::from(state.segments.stripes);
        let outdated_min = state.outdated_min();
        let mut candidates: Vec<(f64, u32, u64)> = state
            .segments
            .iter()
            .filter(|(_, segment)| segment.is_settled())
            .filter(|(at, _)| !state.segments.damaged.contains(at))
            .filter_map(|(at, segment)| {
                let row = &segment.row;
                // Those that hide nothing any more go, but for those that carry a size.
                let hides = row.version_max > outdated_min;
                let marks = if hides { row.marks } else { row.sizes };
                let copied = row.live_bytes + marks * footprint(0);
                let dead = segment_bytes.checked_sub(copied).filter(|dead| *dead > 0)?;
                let age = (state.seq.saturating_sub(row.version_max) + 1) as f64;
                // Benefit over cost; age breaks ties, since old data stays as it is.
                let score = dead as f64 / (copied + stripe_bytes) as f64 * age.powf(0.1);
                Some((score, at, copied))
            })
            .collect();
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        // What the copies may take: all free stripes but those that a change may always need.
        let stripes = state.segments.stripes_not_given_out().saturating_sub(6);
        let budget = stripes * stripe_bytes / 16 * 15;
        let dead_of = |copied: u64| segment_bytes - copied;
        // Settling leaves part of a stripe empty: less than that is no gain.
        let least_gain = 2 * stripe_bytes;
        // Every crash closes the segment that is being filled. While the reserve is in use, what
        // a pass gains must therefore be there soon, or crashes in a row would eat all of it.
        let reserve_in_use = state.segments.free_count() < self.config.reserve_segments;
        let pays_alone = |copied: u64| copied <= budget && dead_of(copied) >= least_gain;
        let alone = candidates.iter().find(|(_, _, copied)| reserve_in_use && pays_alone(*copied));
        let mut victims = Vec::new();
        if let Some((_, at, _)) = alone {
            victims.push(*at);
        } else {
            let (mut left, mut gain) = (budget, 0);
            for &(_, at, copied) in &candidates {
                if victims.len() == VICTIMS_MAX {
                    break;
                }
                // A later candidate may still fit.
                if copied > left {
                    continue;
                }
                left -= copied;
                gain += dead_of(copied);
                victims.push(at);
            }
            if gain < least_gain {
                victims.clear();
            }
        }
        // What is dead in one old segment keeps all younger records without data alive. It goes alone, so
        // that it no longer counts when those of others are judged, and every other time, so that space
        // is gained meanwhile.
        let capacity = self.capacity_bytes(&state, self.config.reserve_segments);
        let many_marks = state.mark_bytes > capacity / MARKS_SHARE;
        state.cleaned_oldest = many_marks && (victims.is_empty() || !state.cleaned_oldest);
        if state.cleaned_oldest {
            let is_oldest = |at: u32| state.segments.get(at).outdated_min() == outdated_min;
            let fits = |copied: u64| copied <= budget;
            let oldest = candidates.iter().find(|(_, at, copied)| is_oldest(*at) && fits(*copied));
            if let Some((_, at, _)) = oldest {
                return vec![*at];
            }
        }
        victims
    }
}

//! The cleaner's budget: how much it copies beside what others write.
//!
//! While free segments are at the mark at which it starts, it copies a byte for each byte written; the fewer are left above
//! the reserve, the more; and when none is, writers wait for it and it does what it can. So space comes as fast as
//! it goes, and what others write meanwhile is not held up by a pass. Nobody writes: then it goes on slowly.

use crate::LogError;
use crate::log::{Counters, Inner, State};
use levada_base::reactor;
use levada_base::units::MIB;
use std::rc::Rc;
use std::time::Duration;

/// Copied in one go.
const STEP_BYTES: u64 = MIB;
/// Nobody writes when nothing was written for so long.
const IDLE: Duration = Duration::from_millis(10);

/// Free segments above the reserve at which the cleaner starts and stops.
pub(crate) fn free_ahead(state: &State) -> u32 {
    (state.segments.count() / 64).max(2)
}

/// What was copied and written when the cleaner was within its budget last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Paid {
    copied: u64,
    written: u64,
}

impl Inner {
    /// Waits until the cleaner may copy more.
    pub(super) async fn pace(self: &Rc<Self>) -> Result<(), LogError> {
        loop {
            let changed = self.changed.changed();
            let written = {
                let mut state = self.state.borrow_mut();
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                let counters = state.counters;
                let now = Paid { copied: counters.cleaned_bytes, written: counters.written_bytes };
                let (copied, written) =
                    (now.copied - state.paid.copied, now.written - state.paid.written);
                if copied < STEP_BYTES {
                    return Ok(());
                }
                let left = state.segments.free_count().saturating_sub(self.config.reserve_segments);
                if copied * u64::from(left) <= written * u64::from(free_ahead(&state)) {
                    state.paid = now;
                    return Ok(());
                }
                now.written
            };
            let waited = reactor::timeout(IDLE, changed).await;
            let mut state = self.state.borrow_mut();
            let Counters { written_bytes, cleaned_bytes, .. } = state.counters;
            if waited.is_err() && written_bytes == written {
                state.paid = Paid { copied: cleaned_bytes, written };
            }
        }
    }
}

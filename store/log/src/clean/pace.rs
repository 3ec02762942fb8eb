//! The cleaner's budget: how much it copies beside what others write.
//!
//! While free segments are at the mark at which it starts, it copies a byte for each byte written; the fewer are left above
//! the reserve, the more; and when none is, writers wait for it and it does what it can. So space comes as fast as
//! it goes, and what others write meanwhile is not held up by a pass. Nobody writes: then it goes on slowly.

use crate::LogError;
use crate::log::{Counters, Inner, State};
use levada_base::reactor::{self, Instant};
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
        // What was written, and since when it is no more.
        let mut idle: Option<(u64, Instant)> = None;
        loop {
            let changed = self.changed.changed();
            let left = {
                let mut state = self.state.borrow_mut();
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                let Counters { cleaned_bytes, written_bytes, .. } = state.counters;
                let copied = cleaned_bytes - state.paid.copied;
                let written = written_bytes - state.paid.written;
                if copied < STEP_BYTES {
                    return Ok(());
                }
                let since = match idle {
                    Some((before, since)) if before == written_bytes => since,
                    _ => reactor::now(),
                };
                idle = Some((written_bytes, since));
                let ahead =
                    state.segments.free_count().saturating_sub(self.config.reserve_segments);
                let is_paid = copied * u64::from(ahead) <= written * u64::from(free_ahead(&state));
                let left = IDLE.saturating_sub(reactor::now() - since);
                if is_paid || left.is_zero() {
                    state.paid = Paid { copied: cleaned_bytes, written: written_bytes };
                    return Ok(());
                }
                left
            };
            // Whichever comes first.
            let _ = reactor::timeout(left, changed).await;
        }
    }
}

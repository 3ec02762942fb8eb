//! What the engine is doing now, for the simulation's table of coverage.
//!
//! A stretch of production code holds a [`Busy`] while it is in a state worth naming:
//! `let _busy = probe::busy("sealing");`. Without the feature `planted` that is nothing.

/// Held while the engine is in a state.
#[must_use]
pub struct Busy {
    #[cfg(feature = "planted")]
    state: &'static str,
}

#[cfg(feature = "planted")]
thread_local! {
    static STATES: std::cell::RefCell<std::collections::BTreeMap<&'static str, u64>> =
        const { std::cell::RefCell::new(std::collections::BTreeMap::new()) };
}

/// Says that the engine is in `state` until the result is dropped.
#[inline(always)]
pub fn busy(state: &'static str) -> Busy {
    #[cfg(feature = "planted")]
    {
        STATES.with_borrow_mut(|states| *states.entry(state).or_default() += 1);
        Busy { state }
    }
    #[cfg(not(feature = "planted"))]
    {
        let _ = state;
        Busy {}
    }
}

#[cfg(feature = "planted")]
impl Drop for Busy {
    fn drop(&mut self) {
        STATES.with_borrow_mut(|states| {
            if let Some(count) = states.get_mut(self.state) {
                *count = count.saturating_sub(1);
            }
        });
    }
}

/// The states that the engines of this thread are in now.
#[cfg(feature = "planted")]
#[must_use]
pub fn states() -> Vec<&'static str> {
    STATES.with_borrow(|states| {
        states.iter().filter(|(_, count)| **count > 0).map(|(state, _)| *state).collect()
    })
}

#[cfg(feature = "planted")]
thread_local! {
    static COUNTS: std::cell::RefCell<std::collections::BTreeMap<&'static str, u64>> =
        const { std::cell::RefCell::new(std::collections::BTreeMap::new()) };
}

/// Counts something that happened, over all lives of the engine.
#[inline(always)]
pub fn count(what: &'static str, times: u64) {
    #[cfg(feature = "planted")]
    COUNTS.with_borrow_mut(|counts| *counts.entry(what).or_default() += times);
    #[cfg(not(feature = "planted"))]
    let _ = (what, times);
}

/// What was counted on this thread since the last [`reset`].
#[cfg(feature = "planted")]
#[must_use]
pub fn counts() -> Vec<(&'static str, u64)> {
    COUNTS.with_borrow(|counts| counts.iter().map(|(what, times)| (*what, *times)).collect())
}

/// Forgets every state and count: what an earlier simulation on this thread left behind.
#[cfg(feature = "planted")]
pub fn reset() {
    STATES.with_borrow_mut(std::collections::BTreeMap::clear);
    COUNTS.with_borrow_mut(std::collections::BTreeMap::clear);
}

#[cfg(all(test, feature = "planted"))]
mod tests {
    #[test]
    fn a_state_lasts_as_long_as_its_guard() {
        let outer = super::busy("sealing");
        let inner = super::busy("sealing");
        drop(outer);
        assert_eq!(super::states(), ["sealing"]);
        drop(inner);
        assert!(super::states().is_empty());
        super::count("seals", 2);
        assert_eq!(super::counts(), [("seals", 2)]);
    }
}

//! Bugs planted on purpose, so that the simulation can prove that it would find them.
//!
//! A line of production code asks [`planted!`](crate::planted!) whether one named bug is chosen. Without the
//! feature `planted` the answer is the constant `false` and the line is gone; with it, the
//! answer is whether this thread's simulation has chosen that bug.

/// True when the simulation on this thread has chosen the bug of this name.
#[macro_export]
macro_rules! planted {
    ($bug:literal) => {
        $crate::planted::is_chosen($bug)
    };
}

#[cfg(feature = "planted")]
thread_local! {
    static CHOSEN: std::cell::Cell<Option<&'static str>> = const { std::cell::Cell::new(None) };
    static MET: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Chooses a bug for this thread, or none.
#[cfg(feature = "planted")]
pub fn choose(bug: Option<&'static str>) {
    CHOSEN.set(bug);
    MET.set(0);
}

/// How often the chosen bug's line was passed on this thread since [`choose`].
#[cfg(feature = "planted")]
#[must_use]
pub fn times_met() -> u64 {
    MET.get()
}

/// See [`planted!`](crate::planted!).
#[cfg(feature = "planted")]
#[must_use]
pub fn is_chosen(bug: &str) -> bool {
    let chosen = CHOSEN.get() == Some(bug);
    if chosen {
        MET.set(MET.get() + 1);
    }
    chosen
}

/// See [`planted!`](crate::planted!).
#[cfg(not(feature = "planted"))]
#[inline(always)]
#[must_use]
pub const fn is_chosen(_bug: &str) -> bool {
    false
}

#[cfg(all(test, feature = "planted"))]
mod tests {
    #[test]
    fn only_the_chosen_bug_is_there() {
        assert!(!crate::planted!("some-bug"));
        super::choose(Some("some-bug"));
        assert!(crate::planted!("some-bug") && !crate::planted!("another"));
        assert_eq!(super::times_met(), 1);
        super::choose(None);
        assert!(!crate::planted!("some-bug"));
    }
}

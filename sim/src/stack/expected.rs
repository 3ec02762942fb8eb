//! What a long run of the stack must have met: every kind of fault in every state that it can meet
//! often enough to be asked for.
//!
//! What is left out, and why: `docs/design/0009-simulation.md`.

use crate::Coverage;

/// States that the engine is in while the stack runs, as `levada_base::probe` names them.
pub(super) const STATES: &[&str] = &[
    "array degraded read",
    "array discard",
    "array rebuild",
    "array resync",
    "array standing",
    "client sends again",
    "kv checkpoint",
    "kv log write",
    "kv replay",
    "log clean",
    "log commit",
    "log open",
    "log read repair",
    "log scrub",
    "log seal",
    "meta replay",
    "recovering",
];

/// Of those, the ones of a node that starts, and of one whose client finds it again.
pub(super) const STARTING: &[&str] = &["array resync", "kv replay", "log open", "recovering"];
pub(super) const AFTER_START: &[&str] = &["client sends again", "meta replay"];

const FAULTS: &[&str] = &[
    "client and node die",
    "connection broken",
    "drive came back",
    "drive lost",
    "drive replaced",
    "drive slow",
    "node killed",
    "partition",
    "power cut",
    "scrub begins",
    "silent rot",
    "unreadable block",
];

/// Faults that need a node that serves, or end the run.
const WHILE_SERVING: &[&str] =
    &["client and node die", "drive came back", "drive replaced", "scrub begins", "silent rot"];

/// Faults and the states that they cannot meet, or so seldom that a run may lack them.
const NOT_ASKED_FOR: &[(&str, &[&str])] = &[
    ("client and node die", &["client sends again", "log read repair", "meta replay"]),
    ("drive came back", &["log read repair"]),
    ("drive lost", &["log read repair"]),
    ("drive replaced", &["log read repair"]),
    ("drive slow", &["log read repair"]),
    ("node killed", &["kv replay", "log open", "log read repair"]),
    ("power cut", &["log read repair"]),
    ("scrub begins", &["log read repair", "log scrub"]),
    ("silent rot", &["array degraded read", "array discard", "log read repair", "meta replay"]),
    ("unreadable block", &["meta replay"]),
];

fn is_asked_for(fault: &str, state: &str) -> bool {
    let is_listed = NOT_ASKED_FOR.iter().any(|(f, states)| *f == fault && states.contains(&state));
    let is_starting = WHILE_SERVING.contains(&fault) && STARTING.contains(&state);
    !(is_listed || is_starting)
}

/// The cells of the table that a long run must have filled, and that are empty.
#[must_use]
pub fn empty_cells(coverage: &Coverage) -> Vec<(&'static str, &'static str)> {
    let cells = FAULTS.iter().flat_map(|fault| STATES.iter().map(move |state| (*fault, *state)));
    let asked_for = cells.filter(|(fault, state)| is_asked_for(fault, state));
    asked_for.filter(|(fault, state)| coverage.met(fault, state) == 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_that_is_empty_is_named() {
        let mut coverage = Coverage::default();
        assert!(empty_cells(&coverage).contains(&("power cut", "log seal")));
        coverage.fault_in("power cut", "log seal");
        let empty = empty_cells(&coverage);
        assert!(!empty.contains(&("power cut", "log seal")));
        assert!(empty.contains(&("power cut", "kv replay")));
        assert!(!empty.contains(&("scrub begins", "log scrub")));
    }

    #[test]
    fn what_is_not_asked_for_is_in_the_table() {
        for (fault, states) in NOT_ASKED_FOR {
            assert!(FAULTS.contains(fault), "{fault}");
            states.iter().for_each(|state| assert!(STATES.contains(state), "{state}"));
        }
    }
}

//! The crash tests prove something: bugs planted in the store are found by them.

use crate::common::world::{Ground, world};
use levada_base::planted;

#[test]
fn planted_bugs_are_found() {
    let bugs = [
        "kv-log-not-durable",
        "kv-replay-skipped",
        "kv-checkpoint-not-flushed",
        "kv-checkpoint-too-early",
        "kv-tail-too-early",
        "kv-acknowledged-out-of-order",
    ];
    let missed: Vec<_> = bugs
        .into_iter()
        .filter(|bug| {
            (0..400).all(|seed| {
                planted::choose(Some(bug));
                let outcome = std::panic::catch_unwind(|| world(seed, 4, Ground::drive));
                planted::choose(None);
                outcome.is_ok()
            })
        })
        .collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

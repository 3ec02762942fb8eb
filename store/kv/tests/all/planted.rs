//! The crash tests prove something: bugs planted in the store are found by them. A file, and so a
//! process, of its own, because it silences the panics that it provokes.

mod common;

use common::world::{Ground, world};
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
    std::panic::set_hook(Box::new(|_| {}));
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
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "not found: {missed:?}");
}

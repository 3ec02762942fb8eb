//! The crash tests prove something, and the contests for locks and over leases: bugs planted in client and services are found by them. A
//! file, and so a process, of its own, because it silences the panics that it provokes.

use crate::world::contest::locks_exclude;
use crate::world::crash::{nothing_is_lost, others_stay, synced_survives};
use crate::world::leases;
use levada_base::planted;

#[test]
fn planted_bugs_are_found() {
    let bugs = [
        "client-written-not-kept",
        "client-sent-again-in-reverse",
        "client-survivors-sent-again",
        "client-size-before-commit",
        "client-durable-unstable",
        "client-objects-not-cut",
        "object-verifier-ignored",
        "meta-lock-granted-in-grace",
        "meta-notice-not-resent",
        "client-lock-not-reclaimed",
        "meta-notice-not-sent",
        "meta-lease-while-closing",
        "client-lease-after-notice",
        "client-term-from-answer",
    ];
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<_> = bugs
        .into_iter()
        .filter(|bug| {
            (0..60).all(|seed| {
                planted::choose(Some(bug));
                let outcome = std::panic::catch_unwind(|| {
                    leases::all(seed);
                    nothing_is_lost(seed, 30);
                    synced_survives(seed);
                    others_stay(seed);
                    locks_exclude(seed);
                });
                planted::choose(None);
                outcome.is_ok()
            })
        })
        .collect();
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "not found: {missed:?}");
}

//! The whole stack in the simulator.

use levada_sim::{seeds, stack};

#[test]
fn the_stack_keeps_its_promises() {
    seeds::check("stack", 120, stack::stack);
}

/// Every enclosure, and pairs of every distance: near each other and far apart. All 66 pairs are in
/// `levada-sim soak`.
#[test]
fn the_stack_bears_enclosures_and_pairs() {
    const ENCLOSURES_AT: u64 = stack::LOSSES as u64 - 6;
    seeds::check_these("losses", ENCLOSURES_AT..stack::LOSSES as u64, stack::losses);
    for pair in [0, 10, 13, 27, 44, 58] {
        seeds::check_these("losses", pair..pair + 1, stack::losses);
    }
}

#[test]
fn one_seed_fixes_the_run() {
    for scenario in [stack::stack, stack::losses] {
        assert_eq!(scenario(3).trace_hash, scenario(3).trace_hash);
    }
}

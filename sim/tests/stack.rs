//! The whole stack in the simulator.

use levada_sim::{seeds, stack};

#[test]
fn the_stack_keeps_its_promises() {
    seeds::check("stack", 60, stack::stack);
}

#[test]
fn one_seed_fixes_the_run() {
    assert_eq!(stack::stack(3).trace_hash, stack::stack(3).trace_hash);
}

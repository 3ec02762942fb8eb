//! A cluster's arrays over drives on the network, which several servers take from each other.

use levada_sim::{enclosures, seeds};

#[test]
fn arrays_over_shelves_are_one_servers_at_a_time() {
    seeds::check("enclosures", 60, enclosures::enclosures);
}

#[test]
fn one_seed_fixes_the_run() {
    let hash = |seed| enclosures::enclosures(seed).trace_hash;
    assert_eq!(hash(3), hash(3));
    assert_ne!(hash(3), hash(4));
}

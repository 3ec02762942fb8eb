//! Arrays in the simulator: random rounds, every pair of drives, every enclosure.

use levada_sim::{arrays, seeds};

#[test]
fn the_mirror_keeps_its_promises() {
    seeds::check("mirror", 100, arrays::mirror);
}

#[test]
fn raid6_keeps_its_promises() {
    seeds::check("raid6", 100, arrays::parity);
}

/// Overwrites on every level that has a journal.
#[test]
fn levels_with_parity_keep_their_promises() {
    seeds::check("journaled", 240, arrays::journaled);
}

#[test]
fn a_predecessors_cached_write_is_flushed() {
    seeds::check("regression", 20, arrays::a_predecessors_cached_write_is_flushed);
}

/// All 66 pairs of the 12 drives, and each of the 6 enclosures.
fn losses() -> Vec<Vec<usize>> {
    let pairs = (0..12).flat_map(|a| (a + 1..12).map(move |b| vec![a, b]));
    let enclosures = (0..6).map(|enclosure| vec![2 * enclosure, 2 * enclosure + 1]);
    pairs.chain(enclosures).collect()
}

fn every_loss(name: &str, scenario: fn(u64, &[usize]) -> levada_sim::Outcome) {
    let begun = std::time::Instant::now();
    let losses = losses();
    assert_eq!(losses.len(), 66 + 6);
    for (seed, drives) in losses.iter().enumerate() {
        scenario(seed as u64, drives);
    }
    println!("{name}: {} losses in {:.1} s", losses.len(), begun.elapsed().as_secs_f64());
}

#[test]
fn the_mirror_bears_every_pair_and_enclosure() {
    every_loss("mirror", arrays::mirror_loses);
}

#[test]
fn raid6_bears_every_pair_and_enclosure() {
    every_loss("raid6", arrays::parity_loses);
}

#[test]
fn one_seed_fixes_the_run() {
    for scenario in [arrays::mirror, arrays::parity] {
        assert_eq!(scenario(3).trace_hash, scenario(3).trace_hash);
        assert_ne!(scenario(3).trace_hash, scenario(4).trace_hash);
    }
}

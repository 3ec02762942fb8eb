//! Services die and come back, connections break, the network is cut: programs see no error, and what
//! was synced is there.

use crate::world::World;
use crate::world::crash::{
    TARGETS, chaos, nothing_is_lost, open_files, others_stay, synced_survives, work,
};
use levada_base::reactor::{self, Reactor};
use std::cell::Cell;
use std::rc::Rc;

#[test]
fn programs_see_no_error_and_nothing_is_lost() {
    (0..15).for_each(|seed| nothing_is_lost(seed, 60));
}

#[test]
fn what_was_synced_survives_the_end_of_everything() {
    (100..120).for_each(synced_survives);
}

#[test]
fn what_another_client_synced_is_not_written_over_after_a_restart() {
    (200..230).for_each(others_stay);
}

#[test]
fn one_seed_fixes_the_run() {
    let run = || {
        let reactor = Reactor::simulated(5);
        reactor.block_on(async {
            let world = World::new(TARGETS).await;
            world.network.break_one_in(100);
            let client = world.client("client").await;
            let files = open_files(&client).await;
            let calm = Rc::new(Cell::new(false));
            reactor::spawn(chaos(Rc::clone(&world), Rc::clone(&calm)));
            let (file, model) = files.into_iter().next().expect("files");
            work(client, file, model, 30).await;
        });
        reactor.trace_hash()
    };
    assert_eq!(run(), run());
}

//! An entry point for the fuzzer: a target under hosts that say anything, over several connections at once.
//!
//! Bytes are steps, so that random ones get past what every connection begins with: each opens a connection, sends a command that is sound
//! but for a field or two, data that were asked for or not, a proof of who the host is, or bytes; or changes what is shown. Checked is, on virtual time:
//!
//! - Nothing panics. Of what was sent soundly everything is answered, once, as its kind is, in units that are sound themselves; and a
//!   connection over which nothing else came ends for a reason only: its host's, its controller's, or a proof that may have failed.
//! - A host beside them, of another subsystem, goes on reading what it wrote.
//! - Once they are gone nothing is left of them: connections, controllers, memory, open volumes.
//! - Where a secret is needed, nothing is done or written for a connection that has not shown that it knows the right one.

mod beside;
mod line;
mod odd;
mod proof;
mod world;

use self::beside::Beside;
use self::line::nqn;
use self::odd::{Odd, opens};
use self::world::World;
use crate::subsystem::{Hosts, Subsystem};
use levada_base::choices::Choices;
use levada_base::reactor::{self, Reactor};
use std::rc::Rc;
use std::time::Duration;

const STEPS_MAX: usize = 96;
const LINES_MAX: usize = 6;
/// Of the queues that are connected as they should be.
const ENTRIES: u16 = 32;
/// Data that may be within a command of any queue.
const IN_CAPSULE_BYTES_LEAST: usize = 8192;
const BLOCK_BYTES: u64 = 4096;
const BLOCKS: u64 = 64;
/// Longer than anything takes that waits for no host: 20 s of a slow block, 30 s for a first command.
const LONG: Duration = Duration::from_secs(300);
/// For an answer that nothing holds up.
const SOON: Duration = Duration::from_secs(5);

/// See the module.
///
/// # Panics
///
/// When the target does what it must not.
pub fn connections(bytes: &[u8]) {
    Reactor::simulated(1).block_on(async {
        let run = reactor::timeout(LONG * 40, run(Choices(bytes)));
        run.await.expect("it comes to an end");
    });
}

async fn run(mut input: Choices<'_>) {
    let mut world = World::new();
    let beside = world.target.port(([10, 0, 0, 2], 4420).into());
    let subsystem = Subsystem::new(nqn("beside"), "9", Hosts::Any);
    subsystem.add(1, opens(&Odd::new(), 9));
    world.target.add(subsystem);
    let mut other = Beside::new(&beside).await;
    let alone = world.target.held();
    for step in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        world.step(&mut input).await;
        if step % 16 == 7 {
            other.goes_on().await;
        }
    }
    world.mend();
    for line in world.lines.iter().flatten() {
        line.send_rest().await;
    }
    // What the target is at ends.
    let begun = reactor::now();
    let unanswered = || world.lines.iter().flatten().map(|line| line.unanswered()).sum::<usize>();
    while unanswered() > 0 && begun.elapsed() < LONG {
        reactor::sleep(Duration::from_secs(1)).await;
    }
    for line in world.lines.iter().flatten() {
        assert_eq!(line.unanswered(), 0, "of {:?}", line.sent.borrow().keys());
    }
    other.goes_on().await;
    for line in world.lines.drain(..).flatten() {
        line.close().await;
    }
    let (volume, guarded) = (Rc::clone(&world.volume), Rc::clone(&world.guarded));
    // Opened by the namespaces that there are, and held here.
    let namespaces = 1 + usize::from(world.open.namespace(2).is_some());
    let is_left = || {
        world.target.held() != alone
            || world.open.controllers() > 0
            || Rc::strong_count(&volume) != namespaces + 2
            || Rc::strong_count(&guarded) != 1 + 2
    };
    let begun = reactor::now();
    while is_left() && begun.elapsed() < LONG {
        reactor::sleep(Duration::from_secs(1)).await;
    }
    let held = (Rc::strong_count(&volume) - 2, Rc::strong_count(&guarded) - 2);
    let controllers = world.open.controllers();
    assert!(
        !is_left(),
        "left: {:?} of {alone:?}, {controllers} controllers, {held:?} opened",
        world.target.held()
    );
    other.goes_on().await;
    let ending = reactor::timeout(LONG, world.target.end()).await;
    assert!(ending.is_ok(), "the target does not end");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        /// Whatever hosts say.
        #[test]
        fn hosts_that_say_anything_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..1500)) {
            connections(&bytes);
        }
    }
}

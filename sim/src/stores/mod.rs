//! The stores in the simulator, each over one array whose drives fail and lose power: the
//! key-value store on the mirror, the object log on RAID 6. Workloads and models are those of
//! the crates' own crash tests; the ground is faultier.

mod kv;
mod log;
#[path = "../../../store/log/tests/all/support/model.rs"]
#[allow(dead_code)] // The log's own tests use more of it.
mod objects;
#[path = "../../../store/kv/tests/all/common/model.rs"]
mod rows;

pub use kv::kv;
pub use log::log;

use crate::arrays::Rack;
use crate::arrays::rounds::{self, End};
use levada_base::reactor;
use std::rc::Rc;
use std::time::Duration;

/// What takes longer hangs.
const HANGS_AFTER: Duration = Duration::from_secs(20);

/// The output of a task of the node that lives on.
async fn ended<T: 'static>(task: reactor::JoinHandle<T>, what: &str) -> T {
    match reactor::timeout(HANGS_AFTER, task).await {
        Ok(output) => output.expect("a panic ends the run"),
        Err(_) => panic!("{what} hangs"),
    }
}

/// Opens something in the node, in some rounds with power cuts meanwhile: then again.
async fn open<T, F>(rack: &Rc<Rack>, opening: impl Fn(Rc<Rack>) -> F) -> T
where
    T: 'static,
    F: Future<Output = T> + 'static,
{
    loop {
        let mut opened = reactor::spawn_in(&rack.world.node(), opening(Rc::clone(rack)));
        let cut_us = rack.world.rng(|rng| rng.one_in(4).then(|| rng.below(40_000)));
        let Some(us) = cut_us else {
            return ended(opened, "the opening").await;
        };
        if let Ok(opened) = reactor::timeout(Duration::from_micros(us), &mut opened).await {
            return opened.expect("a panic ends the run");
        }
        rack.end_rot();
        rack.world.power_cut().await;
    }
}

/// How a round ends, and the power or the process with it. Before an orderly end `close` runs in
/// the node.
async fn end_round<F>(rack: &Rc<Rack>, close: impl FnOnce() -> F) -> End
where
    F: Future<Output = ()> + 'static,
{
    let end = rounds::draw_end(&rack.world);
    if end != End::Closed {
        rack.end_rot();
    }
    match end {
        End::PowerCut => rack.world.power_cut().await,
        End::Killed => rack.world.kill(),
        End::Closed => {
            let closed = reactor::spawn_in(&rack.world.node(), close());
            ended(closed, "the closing").await;
            rack.world.kill();
        }
    }
    end
}

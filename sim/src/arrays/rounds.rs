//! Rounds: open, work and faults side by side, then the power goes, or the node, or neither.

use crate::World;
use crate::arrays::Rack;
use levada_base::reactor;
use levada_device::BlockError;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

/// How a round ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    PowerCut,
    Killed,
    Closed,
}

/// What writes to an array, and knows what it may read.
pub trait Work {
    fn rack(&self) -> &Rc<Rack>;
    /// Starts it, on the node of now.
    fn spawn(self: &Rc<Self>);
    /// The node has ended, with the power or alone.
    fn crashed(&self, power: bool);
    /// Checks everything.
    fn verify(&self) -> impl Future<Output = ()>;
    /// Something failed that the array bears.
    fn fail(&self, what: &str, error: &BlockError) -> !;
}

/// Some rounds, and an orderly end in which everything is put right.
pub async fn all<W: Work>(work: &Rc<W>) {
    let rack = work.rack();
    let world = Rc::clone(&rack.world);
    let opened = async || {
        open(rack, || work.crashed(true)).await;
        work.verify().await;
    };
    for round in 0..world.rng(|rng| rng.between(3, 5)) {
        if round > 0 {
            opened().await;
        }
        work.spawn();
        let length = Duration::from_micros(world.rng(|rng| rng.between(2_000, 60_000)));
        faults_for(rack, length).await;
        match draw_end(&world) {
            End::PowerCut => {
                world.power_cut().await;
                work.crashed(true);
            }
            End::Killed => {
                world.kill();
                work.crashed(false);
            }
            End::Closed => {
                world.kill();
                work.crashed(false);
                opened().await;
                rack.array().close().await.unwrap_or_else(|error| work.fail("close", &error));
            }
        }
    }
    opened().await;
    rack.finish().await;
    work.verify().await;
}

/// Opens the array; in some rounds the power fails meanwhile, and it is opened again. Calls
/// `crashed` after every power cut.
pub async fn open(rack: &Rc<Rack>, crashed: impl Fn()) {
    for starts in 0.. {
        rack.world.rng(|rng| {
            rack.put_in_again(rng);
            // What a start has begun is where a loss would hurt.
            if rng.one_in(if starts == 0 { 6 } else { 2 }) {
                rack.lose_at_a_start(rng);
            }
        });
        let opening = {
            let rack = Rc::clone(rack);
            reactor::spawn_in(&rack.world.clone().node(), async move { drop(rack.open().await) })
        };
        let cut_us = rack.world.rng(|rng| match rng.one_in(4) {
            true => Some(rng.below(6000)),
            false => None,
        });
        match cut_us {
            None => {
                opening.await.expect("a panic ends the run");
                return;
            }
            Some(us) => {
                let time = reactor::sleep(Duration::from_micros(us));
                futures_util::pin_mut!(time);
                if let futures_util::future::Either::Left(_) =
                    futures_util::future::select(opening, time).await
                {
                    return;
                }
                rack.world.power_cut().await;
                crashed();
            }
        }
    }
}

/// Lets the node's tasks run for a while, with faults now and then.
pub async fn faults_for(rack: &Rc<Rack>, total: Duration) {
    let until = reactor::now() + total;
    while reactor::now() < until {
        let pause = rack.world.rng(|rng| rng.between(200, 8000));
        reactor::sleep(Duration::from_micros(pause)).await;
        let mut rng = rack.world.rng(crate::Rng::fork);
        rack.fault(&mut rng);
    }
}

/// How this round shall end.
pub fn draw_end(world: &World) -> End {
    world.rng(|rng| match rng.weighted(&[6, 2, 2]) {
        0 => End::PowerCut,
        1 => End::Killed,
        _ => End::Closed,
    })
}

//! Rounds: open, work and faults side by side, then the power goes, or the node, or neither.

use crate::World;
use crate::arrays::Rack;
use levada_base::reactor;
use std::rc::Rc;
use std::time::Duration;

/// How a round ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    PowerCut,
    Killed,
    Closed,
}

/// Opens the array; in some rounds the power fails meanwhile, and it is opened again. Calls
/// `crashed` after every power cut.
pub async fn open(rack: &Rc<Rack>, crashed: impl Fn()) {
    loop {
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

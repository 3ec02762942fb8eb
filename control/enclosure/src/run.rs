//! The process of an enclosure.

use crate::enclosure::{Enclosure, EnclosureStatus};
use crate::http;
use crate::place;
use crate::plan::{EnclosureError, Plan, system};
use crate::request::{Order, Reply};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::net::Listener;
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{self, Group, Reactor};
use levada_desk::Clerk;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

/// How long to poll for the next request before sleeping.
const SPIN: Duration = Duration::from_micros(100);

struct AtDesk(Rc<Enclosure>);

impl Clerk for AtDesk {
    type Request = Order;
    type Reply = Reply;

    fn answer(&self, order: Order) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            match self.0.carry_out(order).await {
                Ok(()) => Reply::Done(self.0.status()),
                Err(refusal) => Reply::Refused { why: refusal.to_string() },
            }
        })
    }

    fn refuse(&self, why: String) -> Reply {
        Reply::Refused { why }
    }
}

/// Serves an enclosure until told to stop. `ready` is called once hosts can connect.
///
/// # Errors
///
/// [`EnclosureError`].
pub fn serve(plan: &Plan, ready: impl FnOnce(&EnclosureStatus)) -> Result<(), EnclosureError> {
    plan.check()?;
    place::make_dir().map_err(system("make the directory of the socket"))?;
    let socket = place::socket_of(&plan.name);
    if UnixStream::connect(&socket).is_ok() {
        return Err(EnclosureError::Served { name: plan.name.clone() });
    }
    let reactor = Reactor::new().map_err(system("use io_uring"))?;
    reactor.set_spin(SPIN);
    reactor.block_on(async {
        let carried = reactor::carry_sockets(plan.network_cores);
        carried.map_err(system("start threads for the network"))?;
        let (enclosure, group) = (Rc::new(plan.open().await?), Group::new());
        if let Some(address) = plan.status {
            let failed = |source| EnclosureError::Status { address, source };
            let listener = Listener::bind(address).map_err(failed)?;
            http::serve(listener, Rc::clone(&enclosure), &group);
        }
        let signals = Signals::new().map_err(system("receive signals"))?;
        levada_desk::open(&socket, Rc::new(AtDesk(Rc::clone(&enclosure))), &group)
            .map_err(system("listen for orders"))?;
        ready(&enclosure.status());
        while let Signal::Hangup = signals.recv().await.map_err(system("receive signals"))? {}
        group.kill();
        let _ = std::fs::remove_file(&socket);
        enclosure.end().await;
        Ok(())
    })
}

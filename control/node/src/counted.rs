//! Meters of the requests that pass on their way to a metadata service.
//!
//! The kind of a request is the first byte of its body, as long as there are fewer than 128 kinds; what a kind is called is
//! looked up once, when it is met first. So nothing here needs to change when there is a new kind.

use futures_util::future::LocalBoxFuture;
use levada_base::meter::{InFlight, Meter};
use levada_base::reactor;
use levada_wire::frame::{Frame, decode_body, encode_body, flags};
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest};
use levada_wire::rpc::{ConnectionId, Handler, Pusher, Reply};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Refusals that are a fault of the target or of the request; others are answers, such as that there is no such file.
const FAULTS: [MetaFault; 4] =
    [MetaFault::Full, MetaFault::Damaged, MetaFault::Unavailable, MetaFault::Invalid];

/// A service whose requests are counted.
pub struct Counted {
    inner: Rc<dyn Handler>,
    kinds: RefCell<BTreeMap<u8, (&'static str, Rc<Meter>)>>,
    in_flight: Cell<u64>,
    /// Replies that say [`FAULTS`], encoded.
    faults: [Vec<u8>; FAULTS.len()],
}

impl Counted {
    /// Counts what goes to `inner`.
    #[must_use]
    pub fn new(inner: Rc<dyn Handler>) -> Rc<Self> {
        let faults = FAULTS.map(|fault| encode_body(&MetaReply::Failed(fault)));
        Rc::new(Self { inner, kinds: RefCell::default(), in_flight: Cell::new(0), faults })
    }

    /// Requests that ended.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.kinds.borrow().values().map(|(_, meter)| meter.count.get()).sum()
    }

    /// Requests that have begun and not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight.get()
    }

    /// Every meter with its kind.
    #[must_use]
    pub fn meters(&self) -> Vec<(&'static str, Rc<Meter>)> {
        self.kinds.borrow().values().cloned().collect()
    }

    fn meter_of(&self, body: &[u8]) -> Rc<Meter> {
        let number = body.first().copied().unwrap_or(u8::MAX);
        if let Some((_, meter)) = self.kinds.borrow().get(&number) {
            return Rc::clone(meter);
        }
        let kind = decode_body::<MetaRequest>(body).map(|request| request.kind());
        let meter = Rc::<Meter>::default();
        // What is no request is refused, and not counted.
        if let Ok(kind) = kind {
            self.kinds.borrow_mut().insert(number, (kind, Rc::clone(&meter)));
        }
        meter
    }

    /// What `answered` answers; `meter` counts it from now on.
    async fn metered(&self, meter: Rc<Meter>, answered: impl Future<Output = Reply>) -> Reply {
        let begun = reactor::now();
        let _in_flight = InFlight::begin(&self.in_flight);
        let reply = answered.await;
        let failed = reply.flags & flags::REFUSALS != 0 || self.faults.contains(&reply.body);
        meter.add(0, begun.elapsed(), failed);
        reply
    }
}

impl Handler for Counted {
    fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply> {
        let meter = self.meter_of(&request.body);
        Box::pin(self.metered(meter, self.inner.handle(request, from)))
    }

    fn one_way(&self, frame: Frame, from: ConnectionId) {
        self.inner.one_way(frame, from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::ids::Ino;
    use levada_base::reactor::Reactor;
    use std::time::Duration;

    /// What is not asked here.
    struct Nobody;

    impl Handler for Nobody {
        fn handle(&self, _: Frame, _: Pusher) -> LocalBoxFuture<'_, Reply> {
            unreachable!("replies are given")
        }
    }

    /// `request` is answered with `fault`, after a moment.
    async fn refuse(counted: &Counted, request: &[u8], fault: MetaFault) {
        let answered = async {
            reactor::sleep(Duration::from_millis(2)).await;
            Reply::new(encode_body(&MetaReply::Failed(fault)))
        };
        counted.metered(counted.meter_of(request), answered).await;
    }

    #[test]
    fn requests_are_counted_by_their_kind() {
        Reactor::simulated(1).block_on(async {
            let counted = Counted::new(Rc::new(Nobody));
            let getattr = encode_body(&MetaRequest::GetAttr { ino: Ino(7) });
            let sync = encode_body(&MetaRequest::Sync);
            drop(refuse(&counted, &sync, MetaFault::NotFound));
            let mut cut_off = Box::pin(refuse(&counted, &sync, MetaFault::NotFound));
            assert!(futures_util::poll!(&mut cut_off).is_pending());
            assert_eq!(counted.in_flight(), 1);
            drop(cut_off);
            for _ in 0..3 {
                refuse(&counted, &getattr, MetaFault::NotFound).await;
            }
            refuse(&counted, &[200, 1], MetaFault::NotFound).await;
            assert_eq!((counted.requests(), counted.in_flight()), (3, 0));
            let meters = counted.meters();
            let told: Vec<_> = meters
                .iter()
                .map(|(kind, meter)| (*kind, meter.count.get(), meter.failed.get()))
                .collect();
            assert_eq!(told, [("GetAttr", 3, 0), ("Sync", 0, 0)]);
            assert!(meters[0].1.latency.quantile(0.5) >= Duration::from_millis(2));
            // A lease that comes with an answer is no failure.
            let leased =
                Reply { flags: flags::LEASES, ..Reply::new(encode_body(&MetaReply::Done)) };
            counted.metered(counted.meter_of(&getattr), std::future::ready(leased)).await;
            assert_eq!((meters[0].1.count.get(), meters[0].1.failed.get()), (4, 0));
            for (fault, failed) in [(MetaFault::Unavailable, 1), (MetaFault::Exists, 1)] {
                refuse(&counted, &getattr, fault).await;
                assert_eq!(meters[0].1.failed.get(), failed, "{fault:?}");
            }
        });
    }
}

//! The wire by itself: requests to an object target that answers at once and keeps nothing, over
//! TCP on the loopback or the shared memory of one machine, one core per side. The ceiling of
//! everything that a client does.

use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Rate, absolute, runs};
use crate::load::Load;
use crate::service::{Service, Way};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::ids::{BootVerifier, Ino, ObjectId, Seq, TargetId};
use levada_base::reactor::Reactor;
use levada_base::units::{GIB, KIB, MIB};
use levada_base::{Buf, BufMut, IoVec};
use levada_object::{Ack, ObjectFuture, ObjectService, Objects, Space};
use levada_wire::frame::encode_body;
use levada_wire::object::{DataRanges, Hole, ObjectRequest, ObjectStat, Stability};
use levada_wire::rpc::{Call, Handler, Peer, PeerConfig, Router};
use std::future::ready;
use std::rc::Rc;

const TARGET: TargetId = TargetId(1);
/// Requests of 1 MiB in flight.
const DEPTH: usize = 16;
/// Requests of 4 KiB in flight.
const SMALL_DEPTH: usize = 64;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "wire.null.read_1m",
            what: "1 MiB reads, 16 in flight, of a target that answers at once",
            bar: Bar::None,
            take: |effort| rate(effort, Way::Tcp, Kind::Read, MIB, DEPTH, 8192),
        },
        Spec {
            name: "wire.null.write_1m",
            what: "1 MiB writes, 16 in flight, to a target that answers at once",
            bar: Bar::None,
            take: |effort| rate(effort, Way::Tcp, Kind::Write, MIB, DEPTH, 8192),
        },
        Spec {
            name: "wire.null.read_4k",
            what: "4 KiB reads, 64 in flight, of a target that answers at once",
            bar: Bar::None,
            take: |effort| rate(effort, Way::Tcp, Kind::Read, 4 * KIB, SMALL_DEPTH, 200_000),
        },
        Spec {
            name: "wire.null.same_host_read_1m",
            what: "as wire.null.read_1m, between processes of one machine",
            bar: Bar::None,
            take: |effort| rate(effort, Way::SameHost, Kind::Read, MIB, DEPTH, 32_768),
        },
        Spec {
            name: "wire.null.same_host_write_1m",
            what: "as wire.null.write_1m, between processes of one machine",
            bar: Bar::None,
            take: |effort| rate(effort, Way::SameHost, Kind::Write, MIB, DEPTH, 32_768),
        },
        Spec {
            name: "wire.null.same_host_read_4k",
            what: "as wire.null.read_4k, between processes of one machine",
            bar: Bar::None,
            take: |effort| rate(effort, Way::SameHost, Kind::Read, 4 * KIB, SMALL_DEPTH, 200_000),
        },
    ]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

fn rate(effort: Effort, way: Way, kind: Kind, bytes: u64, depth: usize, ops: u64) -> Result<Taken> {
    let service = Service::start(async |_| {
        let router = Router::default();
        router.insert(TARGET, ObjectService::new(Rc::new(NullObjects::new())));
        Ok(Rc::new(router) as Rc<dyn Handler>)
    })?;
    let load = Load::random(0..GIB, bytes, depth, effort.amount(ops), 1);
    let one_run = async |_| {
        let peer = Peer::new(way.transport(), service.address(), PeerConfig::default());
        let data = BufMut::zeroed(bytes as usize).freeze();
        load.run(move |at| request(Rc::clone(&peer), kind, at, data.clone())).await
    };
    let all = Reactor::new()?.block_on(runs(effort, one_run))?;
    let rate = if bytes < MIB { Rate::Kiops } else { Rate::GbPerS };
    Ok(absolute(rate, "wire", &all))
}

async fn request(peer: Rc<Peer>, kind: Kind, offset: u64, data: Buf) -> Result<()> {
    let object = ObjectId { fs: 1, ino: Ino(2), component: 0, version: 0 };
    let bytes = data.len() as u64;
    let call = match kind {
        Kind::Read => {
            let request = ObjectRequest::Read { object, offset, bytes };
            Call { reply_bytes_max: bytes as u32, ..Call::new(TARGET, encode_body(&request)) }
        }
        Kind::Write => {
            let stability = Stability::Unstable;
            let request = ObjectRequest::Write { object, offset, stability };
            Call { payload: data.into_vec(), ..Call::new(TARGET, encode_body(&request)) }
        }
    };
    let reply = peer.call(&call, None).await?;
    anyhow::ensure!(kind == Kind::Write || reply.payload_bytes() as u64 == bytes, "a short read");
    Ok(())
}

/// Objects that keep nothing and read as zeroes.
struct NullObjects {
    zeroes: Buf,
}

impl NullObjects {
    fn new() -> Self {
        Self { zeroes: BufMut::zeroed(MIB as usize).freeze() }
    }
}

const NOTHING: Ack = Ack { seq: Seq(1), durable: Seq(1) };

impl Objects for NullObjects {
    fn verifier(&self) -> BootVerifier {
        BootVerifier(1)
    }

    fn survived(&self, _: BootVerifier) -> Option<Seq> {
        None
    }

    fn write(&self, _: ObjectId, _: u64, _: IoVec, _: Stability) -> ObjectFuture<'_, Ack> {
        Box::pin(ready(Ok(NOTHING)))
    }

    fn read(&self, _: ObjectId, _: u64, bytes: u64) -> ObjectFuture<'_, IoVec> {
        Box::pin(ready(Ok(self.zeroes.slice(0, bytes as usize).into_vec())))
    }

    fn commit(&self, upto: Seq) -> ObjectFuture<'_, Seq> {
        Box::pin(ready(Ok(upto)))
    }

    fn truncate(&self, _: ObjectId, _: u64) -> ObjectFuture<'_, Ack> {
        Box::pin(ready(Ok(NOTHING)))
    }

    fn punch(&self, _: ObjectId, _: Hole, _: Stability) -> ObjectFuture<'_, Ack> {
        Box::pin(ready(Ok(NOTHING)))
    }

    fn data_ranges(&self, _: ObjectId, _: u64, _: u32) -> ObjectFuture<'_, DataRanges> {
        Box::pin(ready(Ok(DataRanges { ranges: Vec::new(), upto: u64::MAX })))
    }

    fn delete(&self, _: ObjectId) -> ObjectFuture<'_, Ack> {
        Box::pin(ready(Ok(NOTHING)))
    }

    fn stat(&self, _: ObjectId) -> ObjectFuture<'_, Option<ObjectStat>> {
        Box::pin(ready(Ok(None)))
    }

    fn space(&self) -> ObjectFuture<'_, Space> {
        Box::pin(ready(Ok(Space { total_bytes: 0, free_bytes: 0, coming_bytes: 0 })))
    }
}

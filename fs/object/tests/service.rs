//! The service over a network that breaks connections: nothing happens twice, and nothing
//! overtakes what a restart lost.

use levada_base::ids::{BootVerifier, Ino, ObjectId, Seq, TargetId};
use levada_base::reactor::{self, Reactor};
use levada_base::{Buf, IoVec};
use levada_object::{MemoryObjects, ObjectService};
use levada_wire::channel::Listener;
use levada_wire::frame::{decode_body, encode_body, flags};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::object::{
    DataRanges, Hole, ObjectFault, ObjectReply, ObjectRequest, RANGES_MAX, Stability,
};
use levada_wire::rpc::{Call, Peer, PeerConfig, Router, ServiceConfig, accept_all};
use std::rc::Rc;

const TARGET: TargetId = TargetId(1);
const OBJECT: ObjectId = ObjectId { fs: 1, ino: Ino(2), component: 0, version: 1 };

fn start(network: &Network, service: &Rc<ObjectService>) {
    let router = Rc::new(Router::default());
    router.insert(TARGET, Rc::clone(service) as _);
    let listener: Rc<dyn Listener> = Rc::new(network.listen("server"));
    reactor::spawn(accept_all(listener, router, ServiceConfig::default()));
}

fn write(slot: u32, sequence: u64, offset: u64, byte: u8) -> Call {
    let request = ObjectRequest::Write { object: OBJECT, offset, stability: Stability::Unstable };
    Call {
        client: 9,
        slot,
        sequence,
        payload: Buf::copy_of(&[byte; 10]).into_vec(),
        ..Call::new(TARGET, encode_body(&request))
    }
}

async fn ask(peer: &Peer, request: ObjectRequest) -> ObjectReply {
    let reply_bytes_max = match &request {
        ObjectRequest::Read { bytes, .. } => *bytes as u32,
        _ => 0,
    };
    let call = Call { reply_bytes_max, ..Call::new(TARGET, encode_body(&request)) };
    decode_body(&peer.call(&call, None).await.expect("served").body).expect("sound")
}

#[test]
fn a_repeated_write_is_done_once() {
    for seed in 0..30 {
        Reactor::simulated(seed).block_on(async {
            let network = Network::new(LinkConfig::default());
            let objects = Rc::new(MemoryObjects::new(1 << 30));
            let service = ObjectService::new(Rc::clone(&objects) as _);
            start(&network, &service);
            let peer = Peer::new(network.transport("client"), "server", PeerConfig::default());
            network.break_one_in(5);
            let tasks: Vec<_> = (0..8u32)
                .map(|slot| {
                    let peer = Rc::clone(&peer);
                    reactor::spawn(async move {
                        for sequence in 1..=10u64 {
                            let offset = u64::from(slot) * 1000 + sequence * 10;
                            let call = write(slot, sequence, offset, sequence as u8);
                            let reply = peer.call(&call, None).await.expect("served");
                            let reply = decode_body(&reply.body).expect("sound");
                            assert!(matches!(reply, ObjectReply::Done { .. }), "{reply:?}");
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("not killed");
            }
            assert_eq!(objects.writes.get(), 80, "seed {seed}");
            assert!(peer.connects() > 1);
        });
    }
}

#[test]
fn a_restarted_target_does_nothing_for_those_who_do_not_know() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let objects = Rc::new(MemoryObjects::new(1 << 30));
        start(&network, &ObjectService::new(Rc::clone(&objects) as _));
        let peer = Peer::new(network.transport("client"), "server", PeerConfig::default());
        let ObjectReply::Done { verifier, .. } =
            ask(&peer, ObjectRequest::Commit { upto: Seq(0) }).await
        else {
            panic!("not done")
        };
        let objects = Rc::new(objects.restarted());
        start(&network, &ObjectService::new(Rc::clone(&objects) as _));
        peer.disconnect();
        let call = Call { verifier, ..write(0, 1, 0, 1) };
        let reply = peer.call(&call, None).await.expect("served");
        assert_eq!(reply.header.flags, flags::RESTARTED);
        assert_ne!(reply.header.verifier, verifier);
        assert_eq!(objects.writes.get(), 0);
        let call = Call { verifier: reply.header.verifier, ..call };
        let reply = peer.call(&call, None).await.expect("served");
        assert_eq!(reply.header.flags, 0);
        assert_eq!(objects.writes.get(), 1);
    });
}

#[test]
fn a_hole_is_made_once_and_only_in_what_is_there() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let objects = Rc::new(MemoryObjects::new(1 << 30));
        start(&network, &ObjectService::new(Rc::clone(&objects) as _));
        let peer = Peer::new(network.transport("client"), "server", PeerConfig::default());
        let punch = |offset, bytes, grows| ObjectRequest::Punch {
            object: OBJECT,
            hole: Hole { offset, bytes, grows },
            stability: Stability::Unstable,
        };
        let ranges =
            |offset, ranges_max| ObjectRequest::DataRanges { object: OBJECT, offset, ranges_max };
        let missing = ObjectReply::Failed(ObjectFault::NoSuchObject);
        assert_eq!(ask(&peer, punch(0, 10, false)).await, missing);
        assert_eq!(ask(&peer, ranges(0, 1)).await, missing);
        assert!(objects.names().is_empty());

        // Of three writes of 10 bytes the one in the middle is punched, and written again.
        for (sequence, offset) in [(1, 0), (2, 10), (3, 20)] {
            peer.call(&write(0, sequence, offset, 7), None).await.expect("served");
        }
        let call = Call {
            client: 9,
            slot: 1,
            sequence: 1,
            ..Call::new(TARGET, encode_body(&punch(10, 10, false)))
        };
        let first = peer.call(&call, None).await.expect("served").body;
        let found = |ranges: &[(u64, u64)], upto| {
            let ranges = ranges.iter().map(|(start, end)| *start..*end).collect();
            ObjectReply::DataRanges(DataRanges { ranges, upto })
        };
        assert_eq!(ask(&peer, ranges(5, 9)).await, found(&[(5, 10), (20, 30)], u64::MAX));
        assert_eq!(ask(&peer, ranges(0, 1)).await, found(&[(0, 10)], 20));
        peer.call(&write(0, 4, 10, 8), None).await.expect("served");
        assert_eq!(peer.call(&call, None).await.expect("served").body, first, "a repetition");
        assert_eq!(ask(&peer, ranges(0, 9)).await, found(&[(0, 30)], u64::MAX));

        assert!(matches!(ask(&peer, punch(25, 10, true)).await, ObjectReply::Done { .. }));
        let stat = ask(&peer, ObjectRequest::Stat { object: OBJECT }).await;
        assert!(matches!(stat, ObjectReply::Stat { stat: Some(stat), .. } if stat.size == 35));
        let invalid = ObjectReply::Failed(ObjectFault::Invalid);
        for nonsense in [
            punch(u64::MAX, 10, true),
            punch(i64::MAX as u64, 1, false),
            punch(10, 0, false),
            ranges(u64::MAX, 1),
            ranges(0, 0),
            ranges(0, RANGES_MAX + 1),
        ] {
            assert_eq!(ask(&peer, nonsense).await, invalid);
        }
    });
}

#[test]
fn nonsense_is_refused() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let objects = Rc::new(MemoryObjects::new(1 << 30));
        let service = ObjectService::new(Rc::clone(&objects) as _);
        start(&network, &service);
        let peer = Peer::new(network.transport("client"), "server", PeerConfig::default());
        let invalid = ObjectReply::Failed(ObjectFault::Invalid);
        let read = ObjectRequest::Read { object: OBJECT, offset: u64::MAX, bytes: 10 };
        assert_eq!(ask(&peer, read).await, invalid);
        let truncate = ObjectRequest::Truncate { object: OBJECT, size: u64::MAX };
        assert_eq!(ask(&peer, truncate).await, invalid);
        let empty = Call { payload: IoVec::new(), ..write(0, 1, 0, 0) };
        let reply = peer.call(&empty, None).await.expect("served");
        assert_eq!(decode_body::<ObjectReply>(&reply.body), Ok(invalid));
        let garbage = Call::new(TARGET, vec![200, 1, 2]);
        assert!(peer.call(&garbage, None).await.is_err());
        let missing = ObjectRequest::Read { object: OBJECT, offset: 0, bytes: 10 };
        assert_eq!(ask(&peer, missing).await, ObjectReply::Failed(ObjectFault::NoSuchObject));
        assert_eq!(service.meters().failed(), 4);
        let stat = ask(&peer, ObjectRequest::Stat { object: OBJECT }).await;
        assert!(matches!(stat, ObjectReply::Stat { verifier, stat: None } if verifier != BootVerifier(0)));
    });
}

//! Requests and replies over connections that delay, break and stall.

use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::ids::{BootVerifier, TargetId};
use levada_base::reactor::{self, Reactor};
use levada_base::{Buf, IoVec};
use levada_wire::channel::Listener;
use levada_wire::frame::{BODY_BYTES_MAX, Frame, Header, Kind, VERSION};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::rpc::{
    Call, Caller, ConnectionId, Handler, Hello, OnConnect, Peer, PeerConfig, Pusher, Refusal,
    Reply, Router, RpcError, ServiceConfig, accept_all,
};
use levada_wire::tcp::{TcpListener, TcpTransport};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const TARGET: TargetId = TargetId(7);

/// Answers a request with its own body and payload after a random while.
#[derive(Default)]
struct Echo {
    running: Cell<usize>,
    running_max: Cell<usize>,
    served: RefCell<BTreeMap<u64, u32>>,
}

impl Handler for Echo {
    fn handle(&self, request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            self.running.set(self.running.get() + 1);
            self.running_max.set(self.running_max.get().max(self.running.get()));
            *self.served.borrow_mut().entry(request.header.sequence).or_default() += 1;
            reactor::sleep(Duration::from_micros(reactor::random_u64() % 500)).await;
            self.running.set(self.running.get() - 1);
            Reply { payload: request.payload, ..Reply::new(request.body) }
        })
    }
}

fn call(n: u64, payload_bytes: usize) -> Call {
    let payload = if payload_bytes == 0 {
        IoVec::new()
    } else {
        Buf::copy_of(&vec![n as u8; payload_bytes]).into_vec()
    };
    Call {
        sequence: n,
        payload,
        reply_bytes_max: payload_bytes as u32,
        ..Call::new(TARGET, n.to_le_bytes().to_vec())
    }
}

fn check(n: u64, payload_bytes: usize, reply: &Frame) {
    assert_eq!(reply.body, n.to_le_bytes());
    assert_eq!(reply.payload_bytes(), payload_bytes);
    assert!(reply.payload_joined().iter().all(|byte| *byte == n as u8));
}

fn hello() -> Hello {
    Hello { version_min: VERSION, version_max: VERSION, cluster: [0; 16], node: 1 }
}

fn router(echo: &Rc<Echo>) -> Rc<Router> {
    let router = Rc::new(Router::default());
    router.insert(TARGET, Rc::clone(echo) as Rc<dyn Handler>);
    router
}

fn start(network: &Network, echo: &Rc<Echo>, config: ServiceConfig) -> reactor::Group {
    let group = reactor::Group::new();
    let listener: Rc<dyn Listener> = Rc::new(network.listen("service"));
    reactor::spawn_in(&group, accept_all(listener, router(echo), config));
    group
}

#[test]
fn many_requests_are_in_flight_but_no_more_than_granted() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let echo = Rc::new(Echo::default());
        let config = ServiceConfig { requests_max: 5, ..ServiceConfig::default() };
        let _service = start(&network, &echo, config);
        let connection = network.transport("client").connect("service").await.expect("listens");
        let caller = Caller::new(connection, "here", &hello(), None).await.expect("welcome");
        let replies = join_all((0..50).map(|n| {
            let caller = &caller;
            async move { (n, caller.call(&call(n, 100)).await) }
        }));
        for (n, reply) in replies.await {
            check(n, 100, &reply.expect("served"));
        }
        assert_eq!(echo.running_max.get(), 5);
    });
}

#[test]
fn byte_credits_bound_what_is_in_flight() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig { codec: false, ..LinkConfig::default() });
        let echo = Rc::new(Echo::default());
        let config = ServiceConfig { bytes_max: 8 << 20, ..ServiceConfig::default() };
        let _service = start(&network, &echo, config);
        let connection = network.transport("client").connect("service").await.expect("listens");
        let caller = Caller::new(connection, "here", &hello(), None).await.expect("welcome");
        let calls = (0..12).map(|n| call(n, 1 << 20)).collect::<Vec<_>>();
        for reply in join_all(calls.iter().map(|call| caller.call(call))).await {
            reply.expect("served");
        }
        assert_eq!(echo.running_max.get(), 4, "1 MiB each way");
    });
}

#[test]
fn a_lost_connection_fails_what_is_in_flight_and_nothing_hangs() {
    Reactor::simulated(3).block_on(async {
        let network = Network::new(LinkConfig::default());
        let echo = Rc::new(Echo::default());
        let config = ServiceConfig { requests_max: 2, ..ServiceConfig::default() };
        let service = start(&network, &echo, config);
        let connection = network.transport("client").connect("service").await.expect("listens");
        let caller = Caller::new(connection, "here", &hello(), None).await.expect("welcome");
        let calls = (0..10).map(|n| call(n, 0)).collect::<Vec<_>>();
        let kill = async {
            reactor::sleep(Duration::from_micros(50)).await;
            service.kill();
        };
        let all = join_all(calls.iter().map(|call| caller.call(call)));
        let (replies, ()) = futures_util::join!(all, kill);
        assert!(replies.iter().all(|reply| matches!(reply, Err(RpcError::Disconnected))));
        assert!(caller.is_closed());
    });
}

#[test]
fn a_silent_service_counts_as_gone() {
    Reactor::simulated(3).block_on(async {
        let network = Network::new(LinkConfig::default());
        let echo = Rc::new(Echo::default());
        let _service = start(&network, &echo, ServiceConfig::default());
        let connection = network.transport("client").connect("service").await.expect("listens");
        let caller = Caller::new(connection, "here", &hello(), None).await.expect("welcome");
        network.partition("client", "service");
        let start = reactor::now();
        assert!(matches!(caller.call(&call(1, 0)).await, Err(RpcError::Disconnected)));
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    });
}

#[test]
fn a_peer_goes_on_over_breaks_restarts_and_partitions() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let network = Network::new(LinkConfig::default());
            let echo = Rc::new(Echo::default());
            let mut service = start(&network, &echo, ServiceConfig::default());
            let config = PeerConfig { connections: 2, ..PeerConfig::default() };
            let peer = Peer::new(network.transport("client"), "service", config);
            network.break_one_in(20);
            let tasks: Vec<_> = (0..100)
                .map(|n| {
                    let peer = Rc::clone(&peer);
                    reactor::spawn(async move {
                        reactor::sleep(Duration::from_millis(reactor::random_u64() % 50)).await;
                        check(n, 10, &peer.call(&call(n, 10), None).await.expect("forever"));
                    })
                })
                .collect();
            reactor::sleep(Duration::from_millis(10)).await;
            service.kill();
            reactor::sleep(Duration::from_millis(200)).await;
            service = start(&network, &echo, ServiceConfig::default());
            network.partition("client", "service");
            reactor::sleep(Duration::from_secs(3)).await;
            network.heal("client", "service");
            for task in tasks {
                task.await.expect("not killed");
            }
            drop(service);
            assert!(peer.connects() > 1);
            assert!(echo.served.borrow().len() == 100);
        });
    }
}

#[test]
fn a_deadline_ends_the_wait_for_a_service_that_is_down() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let peer = Peer::new(network.transport("client"), "nobody", PeerConfig::default());
        let deadline = reactor::now() + Duration::from_secs(4);
        let reply = peer.call(&call(1, 0), Some(deadline)).await;
        assert!(matches!(reply, Err(RpcError::Deadline)));
    });
}

/// Says first what no frame holds.
struct TooMuch;

impl OnConnect for TooMuch {
    fn connected<'a>(&'a self, caller: &'a Caller) -> LocalBoxFuture<'a, Result<(), RpcError>> {
        let long = Call::new(TARGET, vec![0; BODY_BYTES_MAX + 1]);
        Box::pin(async move { caller.call(&long).await.map(drop) })
    }
}

#[test]
fn what_fits_no_frame_is_not_tried_again() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let echo = Rc::new(Echo::default());
        let _service = start(&network, &echo, ServiceConfig::default());
        let peer = Peer::new(network.transport("client"), "service", PeerConfig::default());
        let long = Call { body: vec![0; BODY_BYTES_MAX + 1], ..call(1, 0) };
        let deadline = Some(reactor::now() + Duration::from_secs(9));
        let too_long = |reply| matches!(reply, Err(RpcError::TooLong(_)));
        assert!(too_long(peer.call(&long, deadline).await));
        peer.disconnect();
        peer.set_on_connect(Rc::new(TooMuch));
        assert!(too_long(peer.call(&call(1, 0), deadline).await));
        assert!(matches!(peer.reach().await, Err(RpcError::TooLong(_))));
    });
}

#[test]
fn strangers_and_other_versions_are_refused() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let echo = Rc::new(Echo::default());
        let config = ServiceConfig { cluster: [1; 16], ..ServiceConfig::default() };
        let _service = start(&network, &echo, config);
        let shake = |hello: Hello| {
            let transport = network.transport("client");
            async move {
                let connection = transport.connect("service").await.expect("listens");
                Caller::new(connection, "here", &hello, None).await.map(|caller| caller.welcome())
            }
        };
        let refused = shake(Hello { cluster: [2; 16], ..hello() }).await;
        assert_eq!(refused, Err(RpcError::Refused(Refusal::Cluster)));
        let refused = shake(Hello { version_min: 1, version_max: 1, ..hello() }).await;
        assert_eq!(
            refused,
            Err(RpcError::Refused(Refusal::Version { min: VERSION, max: VERSION }))
        );
        assert!(shake(Hello { cluster: [1; 16], ..hello() }).await.is_ok());
    });
}

#[test]
fn a_caller_that_ignores_its_credits_is_disconnected() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let echo = Rc::new(Echo::default());
        let config = ServiceConfig { requests_max: 2, ..ServiceConfig::default() };
        let _service = start(&network, &echo, config);
        let mut connection = network.transport("client").connect("service").await.expect("there");
        let hello = levada_wire::frame::encode_body(&hello());
        connection.sink.send(Frame::new(Header::new(Kind::Hello), hello)).expect("open");
        connection.source.recv().await.expect("welcome");
        for _ in 0..20 {
            let header = Header { target: TARGET, ..Header::new(Kind::Request) };
            let _ = connection.sink.send(Frame::new(header, Vec::new()));
        }
        while connection.source.recv().await.is_ok() {}
    });
}

/// Says by itself, before and after each answer, how many one-way frames it has taken in; keeps the way back.
#[derive(Default)]
struct Talker {
    taken: RefCell<Vec<(ConnectionId, Vec<u8>)>>,
    back: RefCell<Option<Pusher>>,
}

impl Handler for Talker {
    fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            from.push(
                request.header.client,
                BootVerifier(3),
                vec![self.taken.borrow().len() as u8],
            );
            *self.back.borrow_mut() = Some(from);
            Reply::new(request.body)
        })
    }

    fn one_way(&self, frame: Frame, from: ConnectionId) {
        self.taken.borrow_mut().push((from, frame.body));
    }
}

#[test]
fn both_sides_speak_first_and_in_order() {
    Reactor::simulated(1).block_on(async {
        let network = Network::new(LinkConfig::default());
        let talker = Rc::new(Talker::default());
        let router = Rc::new(Router::default());
        router.insert(TARGET, Rc::clone(&talker) as Rc<dyn Handler>);
        let listener: Rc<dyn Listener> = Rc::new(network.listen("service"));
        // Neither takes credits, so one request is enough.
        let config = ServiceConfig { requests_max: 1, ..ServiceConfig::default() };
        reactor::spawn(accept_all(listener, router, config));
        let peer = Peer::new(network.transport("client"), "service", PeerConfig::default());
        let heard: Rc<RefCell<Vec<u8>>> = Rc::default();
        let hearing = Rc::clone(&heard);
        peer.set_on_one_way(Rc::new(move |frame: &Frame| {
            assert_eq!((frame.header.verifier, frame.header.target), (BootVerifier(3), TARGET));
            hearing.borrow_mut().extend(&frame.body);
        }));
        // To nobody: there is no connection yet.
        peer.ended().await;
        assert!(!peer.push(TARGET, 1, BootVerifier(0), vec![9]));
        peer.reach().await.expect("listens");
        for n in 0..100 {
            assert!(peer.push(TARGET, 1, BootVerifier(0), vec![n]));
            peer.call(&call(n.into(), 0), None).await.expect("served");
            assert_eq!(heard.borrow().last(), Some(&(n + 1)), "before the answer");
        }
        let bodies: Vec<u8> =
            talker.taken.borrow().iter().flat_map(|(_, body)| body.clone()).collect();
        assert_eq!(bodies, (0..100).collect::<Vec<u8>>());
        // Also while nothing is asked.
        let back = talker.back.borrow().clone().expect("asked");
        back.push(1, BootVerifier(3), vec![200]);
        reactor::sleep(Duration::from_millis(10)).await;
        assert_eq!(heard.borrow().last(), Some(&200));
        let (ended, ()) =
            futures_util::join!(reactor::timeout(Duration::from_secs(1), peer.ended()), async {
                network.disconnect("client", "service")
            });
        ended.expect("noticed by an idle peer");
        // Of a connection that ended.
        back.push(1, BootVerifier(3), vec![201]);
        reactor::sleep(Duration::from_millis(10)).await;
        assert_eq!(heard.borrow().last(), Some(&200));
    });
}

#[test]
fn frames_travel_over_sockets() {
    let reactor = Reactor::new().expect("io_uring");
    reactor.block_on(async {
        let echo = Rc::new(Echo::default());
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("TCP").to_string();
        let service = reactor::Group::new();
        let listener: Rc<dyn Listener> = Rc::new(listener);
        let serving = accept_all(listener, router(&echo), ServiceConfig::default());
        reactor::spawn_in(&service, serving);
        let peer = Peer::new(Rc::new(TcpTransport), &address, PeerConfig::default());
        let sizes = [0, 1, 100, 4096, 20_000, 1 << 20, 4 << 20];
        for _ in 0..3 {
            let all =
                join_all(sizes.iter().enumerate().map(|(n, bytes)| {
                    let peer = Rc::clone(&peer);
                    let n = n as u64;
                    async move {
                        check(n, *bytes, &peer.call(&call(n, *bytes), None).await.expect("up"))
                    }
                }));
            all.await;
        }
        let long = Call { body: vec![5; 500_000], ..call(0, 3_000_000) };
        let reply = peer.call(&long, None).await.expect("up");
        assert_eq!((reply.body.len(), reply.payload_bytes()), (500_000, 3_000_000));
        service.kill();
        let deadline = reactor::now() + Duration::from_millis(300);
        assert!(peer.call(&call(1, 0), Some(deadline)).await.is_err());
    });
}

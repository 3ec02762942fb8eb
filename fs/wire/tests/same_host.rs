//! Connections within one machine: payloads stay where they lie until nobody reads them.

use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Reactor};
use levada_base::sync::Notify;
use levada_base::{Buf, BufMut, IoVec};
use levada_wire::frame::Frame;
use levada_wire::rpc::{Call, Handler, Peer, PeerConfig, Pusher, Reply, ServiceConfig, accept_all};
use levada_wire::same_host::{HostListener, HostTransport};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const BYTES: usize = 1 << 20;

/// Keeps what it gets until told to let go, then answers with a buffer of its own.
#[derive(Default)]
struct Keeper {
    kept: RefCell<Vec<IoVec>>,
    lets_go: Cell<bool>,
    changed: Notify,
}

impl Keeper {
    fn let_go(&self) {
        self.lets_go.set(true);
        self.changed.notify_all();
    }
}

fn filled(byte: u8) -> Buf {
    let mut buf = BufMut::for_overwrite(BYTES);
    buf.fill(byte);
    buf.freeze()
}

impl Handler for Keeper {
    fn handle(&self, request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            let byte = request.payload[0][0];
            self.kept.borrow_mut().push(request.payload);
            self.changed.notify_all();
            self.changed.until(|| self.lets_go.get().then_some(())).await;
            let payload = filled(byte + 1).into_vec();
            Reply { payload, ..Reply::new(Vec::new()) }
        })
    }
}

fn serve(keeper: &Rc<Keeper>) -> (reactor::Group, Rc<Peer>) {
    let listener = HostListener::bind("127.0.0.1:0").expect("binds");
    let address = listener.local_addr().to_string();
    let group = reactor::Group::new();
    let handler = Rc::clone(keeper) as Rc<dyn Handler>;
    reactor::spawn_in(&group, accept_all(Rc::new(listener), handler, ServiceConfig::default()));
    (group, Peer::new(Rc::new(HostTransport::new()), &address, PeerConfig::default()))
}

fn call(data: Buf) -> Call {
    let reply_bytes_max = BYTES as u32;
    Call { payload: data.into_vec(), reply_bytes_max, ..Call::new(TargetId(1), Vec::new()) }
}

/// A request without a payload that matters: after its answer both sides know each other's memory.
async fn warm_up(peer: &Peer, keeper: &Keeper) {
    keeper.let_go();
    peer.call(&call(filled(1).slice(0, 1)), None).await.expect("answered");
    keeper.kept.borrow_mut().clear();
    keeper.lets_go.set(false);
}

#[test]
fn payloads_are_seen_where_they_lie() {
    Reactor::new().expect("io_uring").block_on(async {
        let keeper = Rc::new(Keeper::default());
        let (_group, peer) = serve(&keeper);
        warm_up(&peer, &keeper).await;
        let data = filled(5);
        let at = data.as_ptr();
        let asking = reactor::spawn({
            let (peer, call) = (Rc::clone(&peer), call(data.clone()));
            async move { peer.call(&call, None).await.expect("answered") }
        });
        keeper.changed.until(|| (!keeper.kept.borrow().is_empty()).then_some(())).await;
        let seen = keeper.kept.borrow()[0][0].clone();
        assert!(seen.len() == BYTES && seen.iter().all(|byte| *byte == 5));
        assert!(seen.as_ptr() != at && seen.shared_offset().is_none(), "another mapping");
        assert!(seen.try_into_mut().is_err(), "only to be read");
        keeper.let_go();
        let reply = asking.await.expect("not killed");
        assert!(reply.payload[0].iter().all(|byte| *byte == 6));
        assert!(reply.payload[0].shared_offset().is_none(), "the service's memory");
    });
}

/// The bytes must not change under a reader, whatever becomes of the request.
#[test]
fn memory_is_not_used_again_while_the_other_side_reads_it() {
    Reactor::new().expect("io_uring").block_on(async {
        let keeper = Rc::new(Keeper::default());
        let (_group, peer) = serve(&keeper);
        warm_up(&peer, &keeper).await;
        let asking = reactor::spawn({
            let (peer, call) = (Rc::clone(&peer), call(filled(5)));
            async move { peer.call(&call, None).await }
        });
        keeper.changed.until(|| (!keeper.kept.borrow().is_empty()).then_some(())).await;
        // The caller gives up, and the connection ends.
        asking.abort();
        drop(asking);
        peer.disconnect();
        reactor::sleep(Duration::from_millis(20)).await;
        let others: Vec<Buf> = (0..64).map(|_| filled(9)).collect();
        let intact = keeper.kept.borrow()[0][0].iter().all(|byte| *byte == 5);
        assert!(intact, "the bytes changed under their reader");
        // Once nobody reads it, it is used again.
        let place = |buf: &Buf| buf.shared_offset().expect("shared");
        let before: Vec<u64> = others.iter().map(place).collect();
        keeper.kept.borrow_mut().clear();
        keeper.let_go();
        reactor::sleep(Duration::from_millis(20)).await;
        let next = filled(9);
        assert!(!before.contains(&place(&next)));
        assert!(place(&next) < *before.iter().max().expect("many"), "the one that came back");
    });
}

#[test]
fn many_requests_and_several_connections() {
    Reactor::new().expect("io_uring").block_on(async {
        let keeper = Rc::new(Keeper::default());
        let (group, peer) = serve(&keeper);
        keeper.let_go();
        for round in 0..40 {
            let all = (0..16).map(|n| {
                let peer = Rc::clone(&peer);
                async move {
                    let reply = peer.call(&call(filled(n)), None).await.expect("answered");
                    assert!(reply.payload[0].iter().all(|byte| *byte == n + 1));
                }
            });
            join_all(all).await;
            // More is kept than may be handed over at a time: then it is copied.
            if round % 9 == 8 {
                keeper.kept.borrow_mut().clear();
                peer.disconnect();
            }
        }
        group.kill();
    });
}

/// Memory comes back also when no frame goes that could bring it, and only the connection hears of it.
#[test]
fn memory_that_comes_back_is_no_message() {
    Reactor::new().expect("io_uring").block_on(async {
        let keeper = Rc::new(Keeper::default());
        let (_group, peer) = serve(&keeper);
        let heard = Rc::new(Cell::new(0));
        let count = Rc::clone(&heard);
        peer.set_on_one_way(Rc::new(move |_: &Frame| count.set(count.get() + 1)));
        warm_up(&peer, &keeper).await;
        keeper.let_go();
        for _ in 0..4 {
            let all = (0..16).map(|n| {
                let peer = Rc::clone(&peer);
                async move { peer.call(&call(filled(n)), None).await.expect("answered") }
            });
            join_all(all).await;
            keeper.kept.borrow_mut().clear();
            reactor::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(heard.get(), 0);
    });
}

#[test]
fn without_a_neighbour_it_is_tcp() {
    Reactor::new().expect("io_uring").block_on(async {
        let keeper = Rc::new(Keeper::default());
        keeper.let_go();
        let listener = levada_wire::tcp::TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("TCP").to_string();
        let handler = Rc::clone(&keeper) as Rc<dyn Handler>;
        reactor::spawn(accept_all(Rc::new(listener), handler, ServiceConfig::default()));
        let peer = Peer::new(Rc::new(HostTransport::new()), &address, PeerConfig::default());
        let reply = peer.call(&call(filled(3)), None).await.expect("answered");
        assert!(reply.payload[0].iter().all(|byte| *byte == 4));
    });
}

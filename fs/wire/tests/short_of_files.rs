//! A process that has no file descriptor left for a while. Alone in its program: it takes them all.

use futures_util::future::LocalBoxFuture;
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Reactor};
use levada_wire::channel::Listener;
use levada_wire::frame::Frame;
use levada_wire::rpc::{Call, Handler, Peer, PeerConfig, Pusher, Reply, ServiceConfig, accept_all};
use levada_wire::same_host::{HostListener, HostTransport};
use levada_wire::tcp::{TcpListener, TcpTransport};
use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::rc::Rc;
use std::time::Duration;

struct Nothing;

impl Handler for Nothing {
    fn handle(&self, _request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async { Reply::new(Vec::new()) })
    }
}

/// Connects while nothing can be accepted; afterwards others are served.
async fn survives(listener: Rc<dyn Listener>, address: SocketAddr, peer: Rc<Peer>) {
    reactor::spawn(accept_all(listener, Rc::new(Nothing), ServiceConfig::default()));
    let mut all: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // The accept that waits already took its descriptor when it began, or takes it now.
    let mut waiting = Vec::new();
    for _ in 0..4 {
        all.pop();
        waiting.push(TcpStream::connect(address).expect("the system queues it"));
        reactor::sleep(Duration::from_millis(50)).await;
        all.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
    }
    drop(all);
    let call = Call::new(TargetId(1), Vec::new());
    let limit = reactor::now() + Duration::from_secs(5);
    peer.call(&call, Some(limit)).await.expect("served again");
}

#[test]
fn a_service_that_was_short_of_files_takes_connections_again() {
    Reactor::new().expect("io_uring").block_on(async {
        let listener = HostListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr();
        let transport = Rc::new(HostTransport::new());
        let peer = Peer::new(transport, &address.to_string(), PeerConfig::default());
        survives(Rc::new(listener), address, peer).await;

        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("TCP");
        let peer = Peer::new(Rc::new(TcpTransport), &address.to_string(), PeerConfig::default());
        survives(Rc::new(listener), address, peer).await;
    });
}

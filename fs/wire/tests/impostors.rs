//! The short way leads nowhere: the service is reached all the same.

use futures_util::future::LocalBoxFuture;
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Instant, Reactor, net};
use levada_wire::frame::Frame;
use levada_wire::rpc::{Call, Handler, Peer, PeerConfig, Pusher, Reply, ServiceConfig, accept_all};
use levada_wire::same_host::{HostListener, HostTransport};
use levada_wire::tcp::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::rc::Rc;
use std::time::Duration;

struct Nothing;

impl Handler for Nothing {
    fn handle(&self, _request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async { Reply::new(Vec::new()) })
    }
}

/// A service that is only there by TCP, and its short way's name.
fn far_service() -> (String, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = listener.local_addr().expect("TCP").to_string();
    let handler = Rc::new(Nothing);
    reactor::spawn(accept_all(Rc::new(listener), handler, ServiceConfig::default()));
    let name = format!("levada/{address}");
    (address, name)
}

async fn is_reached(address: &str, within: Duration) {
    let peer = Peer::new(Rc::new(HostTransport::new()), address, PeerConfig::default());
    let call = Call::new(TargetId(1), Vec::new());
    let limit = reactor::now() + within;
    peer.call(&call, Some(limit)).await.expect("answered");
}

#[test]
fn one_that_hangs_up_at_once() {
    Reactor::new().expect("io_uring").block_on(async {
        let (address, name) = far_service();
        let impostor = net::Listener::bind_abstract(name.as_bytes()).expect("free");
        reactor::spawn(async move { while impostor.accept().await.is_ok() {} });
        is_reached(&address, Duration::from_secs(8)).await;
    });
}

#[test]
fn one_that_says_nothing() {
    Reactor::new().expect("io_uring").block_on(async {
        let (address, name) = far_service();
        let _impostor = net::Listener::bind_abstract(name.as_bytes()).expect("free");
        is_reached(&address, Duration::from_secs(12)).await;
    });
}

/// As a service that was stopped: the system takes no more connections for it, and says nothing.
#[test]
fn one_whose_queue_is_full() {
    Reactor::new().expect("io_uring").block_on(async {
        let (address, name) = far_service();
        let _impostor = net::Listener::bind_abstract(name.as_bytes()).expect("free");
        let mut queued = Vec::new();
        loop {
            let connecting = net::Stream::connect_abstract(name.as_bytes());
            match reactor::timeout(Duration::from_millis(300), connecting).await {
                Ok(stream) => queued.push(stream.expect("connects")),
                Err(_) => break,
            }
        }
        is_reached(&address, Duration::from_secs(3)).await;
    });
}

/// As the listener of a service that was killed, which the system closes a moment later.
#[test]
fn a_name_that_is_free_later() {
    Reactor::new().expect("io_uring").block_on(async {
        // A port that is free, for a while at least.
        let address = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
            listener.local_addr().expect("TCP").to_string()
        };
        let name = format!("levada/{address}");
        let own = SocketAddr::from_abstract_name(name.as_bytes()).expect("a name");
        let held = UnixListener::bind_addr(&own).expect("free");
        let listener = HostListener::bind(&address).expect("binds");
        let handler = Rc::new(Nothing);
        reactor::spawn(accept_all(Rc::new(listener), handler, ServiceConfig::default()));
        reactor::sleep(Duration::from_millis(30)).await;
        drop(held);
        let begun = reactor::now();
        while net::Stream::connect_abstract(name.as_bytes()).await.is_err() {
            let waited: Duration = Instant::elapsed(begun);
            assert!(waited < Duration::from_secs(3), "the short way stays closed");
            reactor::sleep(Duration::from_millis(10)).await;
        }
        is_reached(&address, Duration::from_secs(3)).await;
    });
}

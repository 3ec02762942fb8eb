//! One side is killed again and again under the other, both on one machine: every request is answered
//! in the end, no byte changes under its reader, and what the dead held comes back.
//!
//! `LEVADA_WIRE_KILLS=n` kills of each (20).

use futures_util::future::LocalBoxFuture;
use levada_base::checksum::crc32c_parts;
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Instant, Reactor};
use levada_base::{Buf, BufMut, IoVec};
use levada_wire::frame::Frame;
use levada_wire::rpc::{Call, Handler, Peer, PeerConfig, Pusher, Reply, ServiceConfig, accept_all};
use levada_wire::same_host::{HostListener, HostTransport};
use std::cell::{Cell, RefCell};
use std::process::{Child, Command};
use std::rc::Rc;
use std::time::Duration;

/// In a process that is one side of it: what it is, and where the service listens.
const ROLE: &str = "LEVADA_WIRE_ROLE";
const ADDRESS: &str = "LEVADA_WIRE_ADDRESS";
const WRITERS: usize = 24;
/// An answer that takes longer after the last start of the service does not come.
const PATIENCE: Duration = Duration::from_secs(20);

fn random_below(bound: u64) -> u64 {
    reactor::random_u64() % bound
}

/// Some bytes, of one to three buffers, that differ from all others.
fn some_bytes(bytes_max: usize) -> IoVec {
    let parts = 1 + random_below(3) as usize;
    (0..parts)
        .map(|_| {
            let mut buf = BufMut::for_overwrite(1 + random_below((bytes_max / 3) as u64) as usize);
            let mut word = reactor::random_u64();
            for chunk in buf.chunks_mut(8) {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
            }
            buf.freeze()
        })
        .collect()
}

fn sum(parts: &[Buf]) -> u32 {
    crc32c_parts(parts.iter().map(|part| &part[..]))
}

/// Checks what it gets against the sum that comes with it, also a while after it has answered.
struct Checking;

impl Handler for Checking {
    fn handle(&self, request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            let told = u32::from_le_bytes(request.body[..4].try_into().expect("a sum"));
            let check = move |payload: &[Buf], when: &str| {
                if sum(payload) != told {
                    eprintln!("the bytes of a request changed {when}");
                    std::process::exit(3);
                }
            };
            check(&request.payload, "on the way");
            reactor::sleep(Duration::from_micros(random_below(3000))).await;
            check(&request.payload, "before the answer");
            reactor::spawn(async move {
                reactor::sleep(Duration::from_millis(random_below(40))).await;
                check(&request.payload, "after the answer");
            });
            let payload = some_bytes(1 << 20);
            let body = sum(&payload).to_le_bytes().to_vec();
            Reply { payload, ..Reply::new(body) }
        })
    }
}

/// Not a test: one side, when this program is started as one.
#[test]
fn be_one_side() {
    let (Ok(role), Ok(address)) = (std::env::var(ROLE), std::env::var(ADDRESS)) else { return };
    Reactor::new().expect("io_uring").block_on(async {
        if role == "client" {
            let peer = Peer::new(Rc::new(HostTransport::new()), &address, PeerConfig::default());
            let progress = Rc::new(Progress::default());
            progress.waiting.borrow_mut().resize(WRITERS, None);
            for at in 0..WRITERS {
                reactor::spawn(work(Rc::clone(&peer), Rc::clone(&progress), at));
            }
            reactor::sleep(Duration::from_secs(600)).await;
            return;
        }
        let listener = loop {
            match HostListener::bind(&address) {
                Ok(listener) => break listener,
                // The one before may still hold it.
                Err(_) => reactor::sleep(Duration::from_millis(1)).await,
            }
        };
        accept_all(Rc::new(listener), Rc::new(Checking), ServiceConfig::default()).await;
    });
}

fn start(role: &str, address: &str) -> Child {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", "be_one_side", "--nocapture"]).env(ADDRESS, address).env(ROLE, role);
    command.stdout(std::process::Stdio::null()).spawn().expect("starts")
}

fn kill(side: &mut Child) {
    let ended = side.try_wait().expect("a child");
    assert!(ended.is_none(), "it ended by itself: {ended:?}");
    side.kill().expect("a child");
    side.wait().expect("a child");
}

fn kills() -> u64 {
    let kills = std::env::var("LEVADA_WIRE_KILLS");
    kills.map_or(20, |kills| kills.parse().expect("a number"))
}

#[derive(Default)]
struct Progress {
    answers: Cell<u64>,
    /// When each request that waits was made.
    waiting: RefCell<Vec<Option<Instant>>>,
    is_over: Cell<bool>,
}

async fn work(peer: Rc<Peer>, progress: Rc<Progress>, at: usize) {
    while !progress.is_over.get() {
        progress.waiting.borrow_mut()[at] = Some(reactor::now());
        let payload = some_bytes(1 << 20);
        let body = sum(&payload).to_le_bytes().to_vec();
        let reply_bytes_max = 1 << 20;
        let call = Call { payload, reply_bytes_max, ..Call::new(TargetId(1), body) };
        // Some give up; their memory is used again at once.
        let patience = if random_below(16) == 0 { random_below(2000) } else { u64::MAX };
        let limit = Duration::from_micros(patience);
        let answer = if patience == u64::MAX {
            Ok(peer.call(&call, None).await)
        } else {
            reactor::timeout(limit, peer.call(&call, None)).await
        };
        let Ok(answer) = answer else { continue };
        let reply = answer.expect("repeated until it is answered");
        let told = u32::from_le_bytes(reply.body[..4].try_into().expect("a sum"));
        assert_eq!(sum(&reply.payload), told, "the bytes of an answer changed");
        progress.answers.set(progress.answers.get() + 1);
        if random_below(8) == 0 {
            // Also those of a service that has been killed meanwhile.
            reactor::sleep(Duration::from_millis(random_below(60))).await;
            assert_eq!(sum(&reply.payload), told, "the bytes of an answer changed later");
        }
    }
    progress.waiting.borrow_mut()[at] = None;
}

#[test]
fn every_request_is_answered_over_kills() {
    let kills = kills();
    let address = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        listener.local_addr().expect("TCP").to_string()
    };
    Reactor::new().expect("io_uring").block_on(async {
        let peer = Peer::new(Rc::new(HostTransport::new()), &address, PeerConfig::default());
        let progress = Rc::new(Progress::default());
        progress.waiting.borrow_mut().resize(WRITERS, None);
        let workers: Vec<_> = (0..WRITERS)
            .map(|at| reactor::spawn(work(Rc::clone(&peer), Rc::clone(&progress), at)))
            .collect();
        let mut service = start("service", &address);
        for round in 0..=kills {
            // Mostly in full work, now and then while it starts or shakes hands.
            let life = if random_below(4) == 0 { random_below(40) } else { 80 };
            reactor::sleep(Duration::from_millis(life)).await;
            if round == kills {
                break;
            }
            kill(&mut service);
            service = start("service", &address);
        }
        // All that waited before the last start get their answer.
        let started = reactor::now();
        progress.is_over.set(true);
        let is_waiting = || progress.waiting.borrow().iter().flatten().count();
        while is_waiting() > 0 && started.elapsed() < PATIENCE {
            reactor::sleep(Duration::from_millis(20)).await;
        }
        let (hung, answers) = (is_waiting(), progress.answers.get());
        println!("{answers} answers over {kills} kills, {} connections", peer.connects());
        kill(&mut service);
        assert_eq!(hung, 0, "requests without an answer");
        drop(workers);
    });
}

#[test]
fn what_killed_clients_held_comes_back() {
    let open_files = || std::fs::read_dir("/proc/self/fd").expect("Linux").count();
    Reactor::new().expect("io_uring").block_on(async {
        let listener = HostListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().to_string();
        reactor::spawn(accept_all(Rc::new(listener), Rc::new(Checking), ServiceConfig::default()));
        let mut reach = Vec::new();
        let open_before = open_files();
        for _ in 0..kills() {
            let mut client = start("client", &address);
            reactor::sleep(Duration::from_millis(40 + random_below(80))).await;
            kill(&mut client);
            // Its last requests run to their end.
            reactor::sleep(Duration::from_millis(60)).await;
            let mut buf = BufMut::for_overwrite(1 << 20);
            buf.fill(0);
            reach.push(buf.freeze().shared_offset().expect("there is room"));
        }
        let open = open_files();
        println!("{open_before} and {open} files, memory used up to {:?}", reach.iter().max());
        // The other test has some of its own.
        assert!(open < open_before + 20, "{open_before} files, then {open}");
        // A client holds at most 64 MiB of answers, and its requests are seen where they lie.
        assert!(*reach.iter().max().expect("kills") < 512 << 20, "{reach:?}");
    });
}

//! Clients that break what can be broken. Afterwards the server serves: a client at the same socket, and one beside it.
#![allow(unsafe_code)] // Part of the tests' memory.

mod common;

use common::front_end::*;
use common::{Served, volume};
use message::*;
use proptest::prelude::*;
use rustix::fs::ftruncate;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// What a client does that has agreed on features and shown its memory.
type Deed = fn(&FrontEnd, &mut Guest);

fn after_each(deeds: &[(&str, Deed)]) {
    let served = Served::begin(volume);
    for (name, deed) in deeds {
        eprintln!("{name}");
        let front_end = FrontEnd::connect(&served.socket);
        front_end.greet();
        let mut guest = Guest::new();
        guest.show_table(&front_end);
        deed(&front_end, &mut guest);
        // The bad one is still connected.
        check_served(&served.neighbour);
        drop(front_end);
        check_served(&served.socket);
    }
    served.end();
}

fn tcp() -> OwnedFd {
    std::net::TcpListener::bind("127.0.0.1:0").expect("a port").into()
}

#[test]
fn messages_that_are_none() {
    after_each(&[
        ("an unknown message", |client, _| {
            client.send(99, &[], &[]);
            assert!(client.is_left());
        }),
        ("a length of gigabytes", |client, _| {
            client.send_raw(&words(&[1, 1, u32::MAX]), &[]).expect("connected");
            assert!(client.is_left());
        }),
        ("another version", |client, _| {
            client.send_raw(&words(&[1, 2, 0]), &[]).expect("connected");
            assert!(client.is_left());
        }),
        ("half a header, and nothing more", |client, _| {
            client.send_raw(&[1, 0, 0], &[]).expect("connected");
        }),
        ("half a payload, and nothing more", |client, _| {
            client.send_raw(&words(&[SET_FEATURES, 1, 8, 0]), &[]).expect("connected");
        }),
        ("a payload that is too short", |client, _| {
            client.send(SET_VRING_ADDR, &[0; 7], &[]);
            assert!(client.is_left());
        }),
        ("a table with more regions than descriptors", |client, guest| {
            let table = [words(&[2, 0]), guest.region(0, 4096), guest.region(4096, 4096)].concat();
            client.send(SET_MEM_TABLE, &table, &[guest.memory.file.as_fd()]);
            assert!(client.is_left());
        }),
        ("descriptors where none belong", |client, guest| {
            client.send(GET_FEATURES, &[], &[guest.memory.file.as_fd()]);
            assert!(client.is_left());
        }),
        ("as many descriptors as fit", |client, _| {
            let file = tcp();
            client.send(GET_FEATURES, &[], &[file.as_fd(); 253]);
            assert!(client.is_left());
        }),
        ("no descriptor where one belongs", |client, _| {
            client.send(SET_VRING_KICK, &longs(&[0]), &[]);
            assert!(client.is_left());
        }),
        ("answers that nobody takes", |client, _| {
            // Until the server's answers find no room and it leaves.
            let message = FrontEnd::header(GET_FEATURES, 0, 0).repeat(64);
            client.0.set_write_timeout(Some(Duration::from_secs(5))).expect("a limit");
            for _ in 0..10_000 {
                if client.send_raw(&message, &[]).is_err() {
                    return;
                }
            }
            panic!("it takes messages without end");
        }),
    ]);
}

/// Messages come faster than they are read, and none of them has an answer for which anybody would have to wait.
#[test]
fn a_flood_of_messages_keeps_nobody_waiting() {
    const LASTS: Duration = Duration::from_secs(3);
    let served = Served::begin(volume);
    let front_end = FrontEnd::connect(&served.socket);
    let flood = FrontEnd::header(SET_OWNER, 1, 0).repeat(4096);
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while begun.elapsed() < LASTS {
                front_end.send_raw(&flood, &[]).expect("the server reads on");
            }
        });
        check_served(&served.neighbour);
        assert!(begun.elapsed() < LASTS, "the neighbour is served meanwhile");
    });
    drop(front_end);
    served.end();
}

#[test]
fn memory_and_descriptors_that_are_not_what_they_should_be() {
    after_each(&[
        ("events that are a file or a socket", |client, guest| {
            let memory = guest.memory.file.as_fd();
            for request in [SET_VRING_KICK, SET_VRING_CALL] {
                assert!(!client.try_set(request, &longs(&[0]), &[memory]));
                assert!(!client.try_set(request, &longs(&[0]), &[tcp().as_fd()]));
            }
        }),
        ("memory that is no memory", |client, guest| {
            let file = std::fs::File::open("/proc/self/exe").expect("this program");
            let region = [longs(&[0]), longs(&[1 << 30, 4096, 1 << 40, 0])].concat();
            assert!(!client.try_set(ADD_MEM_REG, &region, &[file.as_fd()]));
            assert!(!client.try_set(ADD_MEM_REG, &region, &[tcp().as_fd()]));
            assert!(!client.try_set(ADD_MEM_REG, &region, &[guest.kick.as_fd()]));
        }),
        ("memory past the end of its file, or of all addresses", |client, guest| {
            let file = guest.memory.file.as_fd();
            for place in [
                [1 << 30, 4096, 1 << 40, GUEST_BYTES as u64],
                [1 << 30, u64::MAX, 1 << 40, 0],
                [u64::MAX - 100, 4096, 1 << 40, 0],
                [1 << 30, 4096, u64::MAX - 100, 0],
                [1 << 30, 4096, 1 << 40, u64::MAX - 100],
                [1 << 30, 0, 1 << 40, 0],
            ] {
                let region = [longs(&[0]), longs(&place)].concat();
                assert!(!client.try_set(ADD_MEM_REG, &region, &[file]), "{place:?}");
            }
        }),
        ("more memory than addresses", |client, _| {
            let file = &Shared::new(4096).file;
            let size = 100 << 40;
            ftruncate(file, size).expect("a hole");
            let region = [longs(&[0]), longs(&[1 << 50, size, 1 << 50, 0])].concat();
            assert!(!client.try_set(ADD_MEM_REG, &region, &[file.as_fd()]));
        }),
        ("regions that overlap", |client, guest| {
            let region = [longs(&[0]), guest.region(0, 4096)].concat();
            assert!(!client.try_set(ADD_MEM_REG, &region, &[guest.memory.file.as_fd()]));
        }),
        ("a region that there is not", |client, _| {
            let region = [longs(&[0]), longs(&[5, 5, 5, 5])].concat();
            assert!(!client.try_set(REM_MEM_REG, &region, &[]));
        }),
        ("a channel that is no socket", |client, guest| {
            let file = guest.memory.file.as_fd();
            assert!(!client.try_set(SET_BACKEND_REQ_FD, &[], &[file]));
            assert!(!client.try_set(SET_BACKEND_REQ_FD, &[], &[tcp().as_fd()]));
        }),
        ("memory in flight that is too short or full of nonsense", |client, guest| {
            let (place, _file) = client.inflight();
            let short = Shared::new(512);
            assert!(!client.try_set(SET_INFLIGHT_FD, &place, &[short.file.as_fd()]));
            let nonsense = Shared::new(1 << 16);
            nonsense.slice(0, 1 << 16).fill(0x5a);
            client.set(SET_INFLIGHT_FD, &place, &[nonsense.file.as_fd()]);
            client.set(SET_VRING_NUM, &words(&[0, 64]), &[]);
            let addresses = guest.addresses(guest.memory.address() as u64);
            client.set(SET_VRING_ADDR, &addresses, &[]);
            assert!(!client.try_set(SET_VRING_KICK, &longs(&[0]), &[guest.kick.as_fd()]));
        }),
        ("a call that is full", |client, guest| {
            rustix::io::write(&guest.call, &(u64::MAX - 1).to_ne_bytes()).expect("room");
            // Flags of the open file, which the server sees as well: whoever writes waits.
            rustix::fs::fcntl_setfl(&guest.call, rustix::fs::OFlags::empty()).expect("flags");
            guest.start(client, 0);
            guest.offer(0, READ, 0);
        }),
    ]);
}

#[test]
fn rings_that_break_the_rules() {
    after_each(&[
        ("a ring outside the memory", |client, guest| {
            client.set(SET_VRING_NUM, &words(&[0, 64]), &[]);
            client.set(SET_VRING_ADDR, &guest.addresses(12), &[]);
            assert!(!client.try_set(SET_VRING_KICK, &longs(&[0]), &[guest.kick.as_fd()]));
        }),
        ("a ring whose end is outside", |client, guest| {
            client.set(SET_VRING_NUM, &words(&[0, 1024]), &[]);
            let end = (guest.memory.address() + GUEST_BYTES - 4096) as u64;
            client.set(SET_VRING_ADDR, &guest.addresses(end), &[]);
            assert!(!client.try_set(SET_VRING_KICK, &longs(&[0]), &[guest.kick.as_fd()]));
        }),
        ("a size that is none", |client, guest| {
            let addresses = guest.addresses(guest.memory.address() as u64);
            client.set(SET_VRING_ADDR, &addresses, &[]);
            for size in [3, 2048, u32::MAX] {
                client.set(SET_VRING_NUM, &words(&[0, size]), &[]);
                let kick = guest.kick.as_fd();
                assert!(!client.try_set(SET_VRING_KICK, &longs(&[0]), &[kick]), "{size}");
            }
        }),
        ("a size that changes while the ring is in use", |client, guest| {
            guest.start(client, 0);
            guest.exercise(1);
            client.set(SET_VRING_NUM, &words(&[0, 2]), &[]);
            let addresses = guest.addresses(guest.memory.address() as u64);
            client.set(SET_VRING_ADDR, &addresses, &[]);
            guest.offer(0, READ, 0);
        }),
        ("a ring that there is not", |client, guest| {
            assert!(!client.try_set(SET_VRING_NUM, &words(&[77, 64]), &[]));
            assert!(!client.try_set(SET_VRING_CALL, &longs(&[255]), &[guest.call.as_fd()]));
        }),
        ("a chain that goes round", |client, guest| {
            guest.start(client, 0);
            guest.set_descriptor(0, 0, 16, 1, 0);
            guest.make_available(0);
        }),
        ("a chain of other descriptors than there are", |client, guest| {
            guest.start(client, 0);
            guest.make_available(9999);
        }),
        ("more chains than the ring holds", |client, guest| {
            guest.start(client, 0);
            guest.set_available(5000);
            guest.make_available(0);
        }),
        ("memory that goes while the ring is in use", |client, guest| {
            guest.start(client, 0);
            guest.exercise(1);
            client.set(SET_MEM_TABLE, &words(&[0, 0]), &[]);
            guest.offer(0, READ, 0);
        }),
        ("features that were not offered", |client, _| {
            assert!(!client.try_set(SET_FEATURES, &u64::MAX.to_ne_bytes(), &[]));
        }),
    ]);
}

/// Requests that can be answered are, with an error.
#[test]
fn requests_that_ask_for_what_there_is_not() {
    let served = Served::begin(volume);
    let mut guest = Guest::new();
    let _front_end = guest.connect(&served.socket);
    guest.offer(0, READ, u64::MAX / 512);
    guest.offer(1, WRITE, 1 << 40);
    guest.offer(2, 77, 0);
    let mut answers = guest.wait(3);
    answers.sort_unstable();
    assert_eq!(answers, [(0, 1), (1, 1), (2, 2)]);
    for data_at in [1 << 60, GUEST_BYTES as u64 - 100, u64::MAX - 100] {
        for kind in [READ, WRITE] {
            guest.offer_at(0, kind, 0, data_at);
            assert_eq!(guest.wait(1), [(0, 1)], "{kind} at {data_at:#x}");
        }
    }
    guest.exercise(1);
    served.end();
}

/// Without care this ends the process: touching a page behind the end of its file raises SIGBUS.
#[test]
fn memory_that_is_shortened_while_it_is_used() {
    let served = Served::begin(volume);
    for keep in [0, 0x3000, DATA_AT + SLOT_BYTES] {
        let mut guest = Guest::new();
        let front_end = guest.connect(&served.socket);
        guest.exercise(1);
        for slot in 0..SLOTS {
            guest.offer(slot, WRITE, 8 * u64::from(slot));
            if slot == SLOTS / 2 {
                ftruncate(&guest.memory.file, keep as u64).expect("shortened");
                break;
            }
        }
        rustix::io::write(&guest.kick, &1u64.to_ne_bytes()).expect("room");
        std::thread::sleep(Duration::from_millis(20));
        check_served(&served.neighbour);
        drop(front_end);
        check_served(&served.socket);
    }
    served.end();
}

/// A descriptor that is sent to be mapped, used, or closed.
#[derive(Clone, Copy, Debug)]
enum Sent {
    Memory,
    Event,
    Pipe,
    Tcp,
    Unix,
}

fn sent() -> impl Strategy<Value = Sent> {
    prop_oneof![
        Just(Sent::Memory),
        Just(Sent::Event),
        Just(Sent::Pipe),
        Just(Sent::Tcp),
        Just(Sent::Unix)
    ]
}

fn make(sent: Sent, guest: &Guest) -> OwnedFd {
    match sent {
        Sent::Memory => guest.memory.file.try_clone().expect("a descriptor"),
        Sent::Event => eventfd(),
        Sent::Pipe => std::io::pipe().expect("a pipe").1.into(),
        Sent::Tcp => tcp(),
        Sent::Unix => std::os::unix::net::UnixStream::pair().expect("a pair").0.into(),
    }
}

/// Numbers that are near something.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..4, Just(64), Just(0x1000), Just(256), any::<u32>()]
}

/// Messages in any order, with any content, to a server that serves two others afterwards.
#[test]
fn any_messages_leave_the_server_serving() {
    let served = Served::begin(volume);
    let message =
        (1u32..40, prop::collection::vec(word(), 0..20), prop::collection::vec(sent(), 0..3));
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() };
    let any = proptest::test_runner::TestRunner::new(config).run(
        &prop::collection::vec(message, 1..20),
        |messages| {
            let mut guest = Guest::new();
            let front_end = guest.connect(&served.socket);
            guest.offer(0, READ, 0);
            for (request, payload, sent) in messages {
                let fds: Vec<_> = sent.iter().map(|sent| make(*sent, &guest)).collect();
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                let payload = words(&payload);
                let header = FrontEnd::header(request, 0, payload.len());
                // It may have left.
                if front_end.send_raw(&[header, payload].concat(), &fds).is_err() {
                    break;
                }
            }
            Ok(())
        },
    );
    any.expect("the server lives");
    check_served(&served.neighbour);
    check_served(&served.socket);
    served.end();
}

/// As many as a machine full of guests has, on one thread.
#[test]
fn several_hundred_sockets() {
    use levada_base::reactor::{Reactor, mailbox};
    use levada_export_vhost::{Options, Server};
    const SOCKETS: usize = 300;
    let dir = tempfile::tempdir().expect("a directory");
    let at = |number: usize| dir.path().join(format!("{number}.sock"));
    let paths: Vec<_> = (0..SOCKETS).map(at).collect();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let serving = std::thread::spawn(move || {
        Reactor::new().expect("an io_uring").block_on(async {
            let (tell, mut told) = mailbox::channel::<()>().expect("a mailbox");
            let volume = volume().await;
            let mut servers = Vec::new();
            for path in paths {
                let listening = Server::listen(&path, volume.clone(), Options::default());
                servers.push(listening.await.expect("it listens"));
            }
            ready.send(tell).expect("somebody waits");
            told.recv().await;
        });
    });
    let tell = is_ready.recv().expect("it listens");
    let mut clients: Vec<_> = (0..SOCKETS)
        .map(|number| {
            let guest = Guest::new();
            let front_end = guest.connect(&at(number));
            (guest, front_end)
        })
        .collect();
    for round in 0..3 {
        for (guest, _) in &mut clients {
            guest.exercise(round);
        }
    }
    drop(tell);
    serving.join().expect("no panic");
}

elsewhere!(
    messages_that_are_none,
    a_flood_of_messages_keeps_nobody_waiting,
    memory_and_descriptors_that_are_not_what_they_should_be,
    rings_that_break_the_rules,
    requests_that_ask_for_what_there_is_not,
    memory_that_is_shortened_while_it_is_used,
    any_messages_leave_the_server_serving
);

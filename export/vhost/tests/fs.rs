//! Guests of a file system, with a front end by hand: what they may ask, how their sessions begin and end, and what they break.
//! Afterwards the server serves: a guest at the same socket, and one beside it.
#![allow(unsafe_code)] // Part of the tests' memory.

mod common;

use common::front_end::message::*;
use common::front_end::{FrontEnd, longs, words};
use common::fs_guest::{
    FsGuest, GUEST_BYTES, REQUESTS, SIZE, init, lock_args, long, message, op, read_args, write_args,
};
use common::plain::{Said, ServedFs};
use proptest::prelude::*;
use std::path::Path;

const EIO: i32 = -libc::EIO;
const WRITE_FLAG: u16 = 2;

fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 7) as u8 ^ seed).collect()
}

/// Mounts, and finds again what it wrote.
fn check_served(socket: &Path, name: &[u8]) {
    let mut guest = FsGuest::new();
    let _front_end = guest.mount(socket);
    let file = guest.create(name);
    let data = pattern(name.len() as u8, 70_000);
    guest.write(file, 0, &data);
    assert!(guest.read(file, 0, 100_000) == data, "what was written is not there");
}

#[test]
fn files_are_written_and_read_in_whatever_pieces() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    let file = guest.create(b"one");
    let data = pattern(1, 1 << 20);
    guest.write(file, 0, &data);
    assert!(guest.read(file, 0, 1 << 20) == data);
    assert_eq!(guest.read(file, (1 << 20) - 5, 4096).len(), 5, "the end of the file");
    for cut in [1, 3, 39, 40, 79, 80, 81, 4096, 5000] {
        let data = pattern(cut as u8, 9000);
        let arguments = [write_args(file.1, 0, data.len()), data.clone()].concat();
        let whole = message(op::WRITE, 77, file.0, &arguments);
        // As many descriptors as a ring has room for.
        let size = cut.max(whole.len().div_ceil(100));
        let (head, tail) = whole.split_at(cut);
        let parts: Vec<&[u8]> = std::iter::once(head).chain(tail.chunks(size)).collect();
        guest.offer_cut(REQUESTS, &parts, &[3, 0, 13, 8]);
        let (unique, error, _) = guest.wait(REQUESTS).expect("an answer");
        assert_eq!((unique, error), (77, 0), "cut after {cut}");
        let asks = message(op::READ, 78, file.0, &read_args(file.1, 0, 9000));
        let room: Vec<usize> = std::iter::once(cut).chain([size; 100]).chain([16]).collect();
        guest.offer_cut(REQUESTS, &[&asks], &room);
        let (_, error, read) = guest.wait(REQUESTS).expect("an answer");
        assert_eq!(error, 0);
        assert!(read == data[..read.len()] && read.len() == 9000, "cut after {cut}");
    }
    drop(front_end);
    fs.served.end();
}

#[test]
fn the_configuration_has_a_tag_and_queues() {
    let fs = ServedFs::begin();
    let front_end = FrontEnd::connect(&fs.served.socket);
    front_end.greet_with(0);
    let asks = [words(&[0, 40, 0]), vec![0; 40]].concat();
    let answer = front_end.ask(GET_CONFIG, &asks, &[]);
    assert_eq!((&answer[12..17], &answer[17..48]), (&b"files"[..], &[0; 31][..]));
    assert_eq!(answer[48..52], 8u32.to_le_bytes());
    drop(front_end);
    fs.served.end();
}

#[test]
fn what_has_no_answer_gets_none() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    // Before INIT, and after it.
    let front_end = guest.connect(&fs.served.socket);
    assert_eq!(guest.ask(op::FORGET, 5, &[&longs(&[1])], 0), None);
    let (_, error, _) = guest.ask(op::STATFS, 1, &[], 80).expect("an answer");
    assert_eq!(error, -libc::ENOTCONN);
    guest.ok(op::INIT, 0, &[&init()], 64);
    assert_eq!(guest.ask(op::FORGET, 5, &[&longs(&[1])], 0), None);
    assert_eq!(guest.ask(op::INTERRUPT, 0, &[&longs(&[4711])], 0), None, "there is none such");
    // Whatever queue it comes from.
    let forget = message(op::FORGET, 9, 5, &longs(&[1]));
    guest.offer_cut(REQUESTS, &[&forget], &[]);
    assert_eq!(guest.wait(REQUESTS), None);
    guest.ok(op::STATFS, 1, &[], 80);
    // Its process is none of ours.
    const GETLK: u32 = 31;
    let lock = guest.ok(GETLK, 2, &[&lock_args(2, 1)], 24);
    assert_eq!(lock[20..24], [0; 4]);
    drop(front_end);
    fs.served.end();
}

#[test]
fn an_answer_without_room_is_an_error_or_nothing() {
    const READLINK: u32 = 5;
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    let (_, error, body) = guest.ask(READLINK, 1, &[], 4096).expect("an answer");
    assert_eq!((error, body.len()), (EIO, 0));
    let statfs = message(op::STATFS, 5, 1, &[]);
    guest.offer_cut(REQUESTS, &[&statfs], &[16]);
    assert_eq!(guest.wait(REQUESTS), Some((5, EIO, Vec::new())));
    for room in [&[][..], &[0], &[15], &[8, 7]] {
        guest.offer_cut(REQUESTS, &[&statfs], room);
        assert_eq!(guest.wait(REQUESTS), None, "{room:?}");
    }
    // Five bytes would fit. But what may be read at once is counted by the room that there is, so no more is asked for.
    let file = guest.create(b"small");
    guest.write(file, 0, b"bytes");
    for (size, said) in [(1 << 20, Err(EIO)), (101, Err(EIO)), (100, Ok(b"bytes".to_vec()))] {
        let read = guest.ask(op::READ, file.0, &[&read_args(file.1, 0, size)], 100);
        let (_, error, bytes) = read.expect("an answer");
        assert_eq!(if error == 0 { Ok(bytes) } else { Err(error) }, said, "{size}");
    }
    guest.ok(op::STATFS, 1, &[], 80);
    drop(front_end);
    fs.served.end();
}

#[test]
fn messages_that_are_none_are_errors() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    let whole = message(op::LOOKUP, 5, 1, b"name\0");
    for bytes in [0, 1, 39] {
        guest.offer_cut(REQUESTS, &[&whole[..bytes]], &[16, 128]);
        assert_eq!(guest.wait(REQUESTS), None, "{bytes} bytes have no header");
    }
    for bytes in [40, 44] {
        guest.offer_cut(REQUESTS, &[&whole[..bytes]], &[16, 128]);
        assert_eq!(guest.wait(REQUESTS), Some((5, EIO, Vec::new())), "{bytes} of more");
    }
    // A WRITE that is longer than any.
    let file = guest.create(b"long");
    let data = vec![1; 2 << 20];
    let (_, error, _) =
        guest.ask(op::WRITE, file.0, &[&write_args(file.1, 0, data.len()), &data], 8).expect("one");
    assert_eq!(error, EIO);
    assert_eq!(guest.read(file, 0, 10), b"", "nothing of it was written");
    let (_, error, _) = guest.ask(9999, 1, &[], 8).expect("an answer");
    assert_eq!(error, -libc::ENOSYS);
    drop(front_end);
    fs.served.end();
}

#[test]
fn memory_that_was_not_shown_is_not_touched() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    for at in [GUEST_BYTES as u64 - 10, 1 << 40, u64::MAX - 5] {
        guest.offer_parts(REQUESTS, &[(at, 80, 0), (0x30000, 256, WRITE_FLAG)]);
        let statfs = message(op::STATFS, 5, 1, &[]);
        guest.memory.slice(0x30000, 40).copy_from_slice(&statfs);
        guest.offer_parts(REQUESTS, &[(0x30000, 40, 0), (at, 256, WRITE_FLAG)]);
    }
    // They are answered with nothing, and the queue goes on.
    guest.skip(REQUESTS, 6);
    guest.ok(op::STATFS, 1, &[], 80);
    drop(front_end);
    fs.served.end();
}

#[test]
fn who_waits_for_a_lock_is_interrupted_by_its_number() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    let first = guest.offer(op::SETLKW, 2, &[&lock_args(2, 1)], 0);
    let second = guest.offer(op::SETLKW, 2, &[&lock_args(2, 2)], 0);
    assert!(guest.is_quiet(REQUESTS));
    guest.ok(op::STATFS, 1, &[], 80);
    guest.ask(op::INTERRUPT, 0, &[&longs(&[second])], 0);
    assert_eq!(guest.wait(REQUESTS), Some((second, -libc::EINTR, Vec::new())));
    assert!(guest.is_quiet(REQUESTS));
    guest.ask(op::INTERRUPT, 0, &[&longs(&[first])], 0);
    assert_eq!(guest.wait(REQUESTS), Some((first, -libc::EINTR, Vec::new())));
    drop(front_end);
    fs.served.end();
}

/// Else the unlock would find no room in the ring.
#[test]
fn those_who_wait_for_locks_do_not_fill_the_ring() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    let lock = message(op::SETLKW, 5, 2, &lock_args(2, 1));
    for _ in 0..SIZE / 4 {
        guest.offer_cut(REQUESTS, &[&lock], &[16]);
    }
    assert!(guest.is_quiet(REQUESTS));
    guest.offer_cut(REQUESTS, &[&lock], &[16]);
    assert_eq!(guest.wait(REQUESTS), Some((5, -libc::ENOLCK, Vec::new())));
    drop(front_end);
    fs.served.end();
}

/// Two have the same number, as no kernel sends it: both are ended.
#[test]
fn who_waits_for_a_lock_does_not_keep_a_queue_from_ending() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    let lock = message(op::SETLKW, 5, 2, &lock_args(2, 1));
    guest.offer_cut(REQUESTS, &[&lock], &[16]);
    guest.offer_cut(REQUESTS, &[&lock], &[16]);
    assert!(guest.is_quiet(REQUESTS));
    let asks = words(&[REQUESTS as u32, 0]);
    let base = front_end.ask(GET_VRING_BASE, &asks, &[]);
    assert_eq!(base[4..8], 3u32.to_ne_bytes(), "INIT and both");
    for _ in 0..2 {
        assert_eq!(guest.wait(REQUESTS), Some((5, -libc::ENOLCK, Vec::new())));
    }
    // A machine that was stopped goes on.
    guest.start(&front_end, REQUESTS, 3);
    guest.ok(op::STATFS, 1, &[], 80);
    // And one that is gone leaves no one behind.
    guest.offer_cut(REQUESTS, &[&lock], &[16]);
    drop(front_end);
    check_served(&fs.served.socket, b"next");
    fs.served.end();
}

#[test]
fn sessions_end_with_the_mount_the_next_one_and_the_guest() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    assert_eq!(fs.heard(), [Said::Begun]);
    // Unmounted: it has ended when that is answered.
    guest.ok(op::DESTROY, 0, &[], 0);
    assert_eq!(fs.heard(), [Said::Ended]);
    let (_, error, _) = guest.ask(op::STATFS, 1, &[], 80).expect("an answer");
    assert_eq!(error, -libc::ENOTCONN);
    // Mounted again, and started anew without unmounting.
    guest.ok(op::INIT, 0, &[&init()], 64);
    guest.offer(op::SETLKW, 2, &[&lock_args(2, 1)], 0);
    let again = guest.offer(op::INIT, 0, &[&init()], 64);
    let (_, error, _) = guest.wait(REQUESTS).expect("of the session before");
    assert_eq!(error, -libc::ENOLCK);
    let (unique, error, _) = guest.wait(REQUESTS).expect("an answer");
    assert_eq!((unique, error), (again, 0));
    assert_eq!(fs.heard(), [Said::Begun, Said::Ended, Said::Begun]);
    // A kernel that is too old is refused, and one that asks twice is not.
    drop(front_end);
    assert_eq!(fs.hear(), Said::Ended);
    let mut old = init();
    old[4..8].copy_from_slice(&30u32.to_ne_bytes());
    let mut guest = FsGuest::new();
    let front_end = guest.connect(&fs.served.socket);
    let (_, error, _) = guest.ask(op::INIT, 0, &[&old], 64).expect("an answer");
    assert_eq!(error, -libc::EPROTO);
    let (_, error, _) = guest.ask(op::STATFS, 1, &[], 80).expect("an answer");
    assert_eq!(error, EIO);
    guest.ok(op::INIT, 0, &[&init()], 64);
    assert_eq!(fs.heard(), [Said::Begun]);
    // The server ends while it is mounted.
    let said = fs.said;
    fs.served.end();
    assert_eq!(said.recv(), Ok(Said::Ended));
    drop(front_end);
}

#[test]
fn guests_of_two_sockets_see_each_others_files() {
    let fs = ServedFs::begin();
    let (mut one, mut other) = (FsGuest::new(), FsGuest::new());
    let _fronts = [one.mount(&fs.served.socket), other.mount(&fs.served.neighbour)];
    let file = one.create(b"shared");
    one.write(file, 0, b"from one");
    let found = other.ok(op::LOOKUP, 1, &[b"shared\0"], 128);
    assert_eq!(long(&found, 0), file.0);
    assert_eq!(other.read(file, 0, 100), b"from one");
    fs.served.end();
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        prop::collection::vec(0u8..3, 0..200),
        Just(pattern(3, 5000)),
    ]
}

/// A descriptor: where, how long, whether to be written.
fn part() -> impl Strategy<Value = (u64, u32, u16)> {
    let at = prop_oneof![
        8 => 0x20000u64..GUEST_BYTES as u64,
        1 => any::<u64>(),
        1 => Just(GUEST_BYTES as u64 - 1),
    ];
    let bytes = prop_oneof![8 => 0u32..5000, 1 => any::<u32>(), 1 => Just(1 << 20)];
    (at, bytes, prop_oneof![Just(0), Just(WRITE_FLAG)])
}

/// Requests of any kind with any arguments, in chains of any shape, to a server that serves two others afterwards.
#[test]
fn any_chains_leave_the_server_serving() {
    let fs = ServedFs::begin();
    let request = (0u32..56, any::<u64>(), bytes(), 0usize..3, 0usize..2000);
    let step = prop_oneof![
        4 => request.prop_map(|request| (Some(request), Vec::new())),
        1 => prop::collection::vec(part(), 1..6).prop_map(|parts| (None, parts)),
    ];
    let config = ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() };
    let any = proptest::test_runner::TestRunner::new(config).run(
        &prop::collection::vec(step, 1..20),
        |steps| {
            let mut guest = FsGuest::new();
            let _front_end = guest.mount(&fs.served.socket);
            for (request, mut parts) in steps {
                let Some((opcode, number, arguments, pieces, room)) = request else {
                    // In the order that rings have.
                    parts.sort_by_key(|part| part.2);
                    guest.offer_parts(REQUESTS, &parts);
                    continue;
                };
                let node = number % 5;
                let whole = message(opcode, number % 7, node, &arguments);
                let parts: Vec<_> = whole.chunks(whole.len() / (pieces + 1) + 1).collect();
                guest.offer_cut((number % 2) as usize, &parts, &[16, room]);
            }
            Ok(())
        },
    );
    any.expect("the server lives");
    check_served(&fs.served.neighbour, b"beside");
    check_served(&fs.served.socket, b"after");
    fs.served.end();
}

/// Without care this ends the process: touching a page behind the end of its file raises SIGBUS.
#[test]
fn memory_that_is_shortened_while_it_is_used() {
    let fs = ServedFs::begin();
    let mut guest = FsGuest::new();
    let front_end = guest.mount(&fs.served.socket);
    let file = guest.create(b"gone");
    let data = pattern(1, 100_000);
    for _ in 0..20 {
        guest.offer(op::WRITE, file.0, &[&write_args(file.1, 0, data.len()), &data], 8);
    }
    rustix::fs::ftruncate(&guest.memory.file, 0x20000).expect("shortened");
    rustix::io::write(guest.kick(REQUESTS), &1u64.to_ne_bytes()).expect("room");
    std::thread::sleep(std::time::Duration::from_millis(20));
    check_served(&fs.served.neighbour, b"beside");
    drop(front_end);
    check_served(&fs.served.socket, b"after");
    fs.served.end();
}

#[test]
fn a_path_that_no_socket_can_have_is_refused() {
    use levada_base::reactor::Reactor;
    use levada_export_vhost::{ListenError, Options, Server};
    Reactor::new().expect("an io_uring").block_on(async {
        let at = std::env::temp_dir().join("a".repeat(108));
        let listening = Server::listen(&at, common::volume().await, Options::default()).await;
        assert!(matches!(listening, Err(ListenError::TooLong { .. })));
    });
}

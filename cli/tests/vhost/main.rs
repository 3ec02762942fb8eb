//! Arrays, volumes and the file system of a cluster as virtual machines have them, with a front end by hand (see export/vhost): what a
//! guest keeps when the program is killed under it, sockets that come and go with volumes, and mounts at sockets.
//!
//! Needs io_uring.

#[path = "../array/fixture.rs"]
#[allow(dead_code, reason = "nothing is mounted here")]
mod fixture;
#[path = "../../../export/vhost/tests/common/front_end.rs"]
mod front_end;
mod fs;
mod fs_caps;
#[path = "../../../export/vhost/tests/common/fs_guest.rs"]
mod fs_guest;
mod kernel;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/user_mode.rs"]
mod user_mode;

use fixture::Box;
use front_end::{FrontEnd, Guest, READ, SLOT_BYTES, SLOTS, WRITE, message::*};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use support::{Cluster, TINY, can_run, kill, wait_until};

const DRIVES: [&str; 6] = ["d0", "d1", "d2", "d3", "d4", "d5"];
const SOCKET: &str = "vm.sock";
const SLOT_SECTORS: u64 = SLOT_BYTES as u64 / 512;

fn served(ring_cores: &str) -> Box {
    let mut array = Box::new();
    for drive in DRIVES {
        array.drive(drive, 64 << 20);
    }
    array.ok(&[&["create", "vol", "--level", "6"][..], &DRIVES].concat());
    serve(&mut array, ring_cores);
    array
}

fn serve(array: &mut Box, ring_cores: &str) {
    let socket = array.path(SOCKET).display().to_string();
    array.serve_as(&["--vhost", &socket, "--ring-cores", ring_cores], SOCKET, &DRIVES);
}

#[test]
fn an_array_is_shown_to_a_guest() {
    let mut array = served("0");
    let status = array.json(&[&["show"][..], &DRIVES].concat());
    let socket = array.path(SOCKET).display().to_string();
    assert_eq!(status["open_by"]["vhost"], serde_json::json!([socket]));
    let told = array.ok(&[&["show"][..], &DRIVES].concat());
    assert!(told.contains(&format!("shown as vhost:{socket}")), "{told}");
    front_end::check_served(&array.path(SOCKET));
    array.stop();
    assert!(!array.path(SOCKET).exists(), "the socket stays");
}

/// Each volume of a pool has a socket of its own, which comes and goes with it.
#[test]
fn linear_volumes_are_shown_to_guests() {
    let mut array = Box::new();
    for drive in DRIVES {
        array.drive(drive, 64 << 20);
    }
    array.ok(&[&["create", "vol", "--level", "6"][..], &DRIVES].concat());
    let volume = |array: &Box, arguments: &[&str]| {
        let output = array.run_other(&[&["volume"], arguments].concat());
        assert!(output.status.success(), "levada volume {arguments:?}: {}", support::said(&output));
    };
    volume(&array, &[&["pool"][..], &DRIVES].concat());
    let directory = array.path("vms").display().to_string();
    array.serve_as(&["--vhost", &directory], "vms", &DRIVES);
    volume(&array, &["create", "one", "--size", "16MiB", "--on", DRIVES[0]]);
    volume(&array, &["create", "blue/two", "--size", "16MiB", "--on", DRIVES[0]]);
    let sockets = ["one.sock", "blue/two.sock"].map(|name| array.path("vms").join(name));
    wait_until("the sockets are there", || sockets.iter().all(|socket| socket.exists()));
    // What one guest wrote another volume does not have: each checks all of its own.
    sockets.iter().for_each(|socket| front_end::check_served(socket));
    let told = array.ok(&["show", DRIVES[0]]);
    assert!(told.contains(&format!("shown as vhost:{directory}")), "{told}");
    // A file in the way is left alone, and told.
    std::fs::write(array.path("vms/three.sock"), "somebody's").expect("written");
    volume(&array, &["create", "three", "--size", "1MiB", "--on", DRIVES[0]]);
    wait_until("it is told", || array.ok(&["show", DRIVES[0]]).contains("three.sock is no socket"));
    volume(&array, &["delete", "three", "--on", DRIVES[0]]);
    wait_until("it is well", || !array.ok(&["show", DRIVES[0]]).contains("three.sock"));
    volume(&array, &["delete", "one", "--on", DRIVES[0]]);
    wait_until("its socket goes with it", || !sockets[0].exists());
    array.stop();
    assert!(!sockets[1].exists(), "the socket stays");
    // They are there again with the next start.
    array.serve_as(&["--vhost", &directory], "vms", &DRIVES);
    wait_until("the socket is there", || sockets[1].exists());
    front_end::check_served(&sockets[1]);
    array.stop();
}

/// A guest that writes all the time, and whose back end is killed again and again: every request is answered once, and what
/// was answered is there.
fn loses_no_request(ring_cores: &str) {
    const ROUNDS: u8 = 8;
    let mut array = served(ring_cores);
    let socket = array.path(SOCKET);
    let mut guest = Guest::new();
    let mut notes = None;
    let mut used = 0u32;
    for round in 1..=ROUNDS {
        let front_end = FrontEnd::connect(&socket);
        front_end.greet();
        guest.show_table(&front_end);
        let (place, memory) = notes.get_or_insert_with(|| front_end.inflight());
        front_end.set(SET_INFLIGHT_FD, place, &[memory.as_fd()]);
        guest.start(&front_end, used);
        // What the one before left.
        let left = guest.out();
        let answers = guest.wait(left.len());
        used += answers.len() as u32;
        for slot in left {
            assert_eq!(guest.data(slot)[0], round - 1, "it was offered in the round before");
        }
        for slot in 0..SLOTS {
            guest.data(slot).fill(round);
            guest.offer(slot, WRITE, u64::from(slot) * SLOT_SECTORS);
            if round == ROUNDS {
                continue;
            }
            if slot == SLOTS - 3 {
                used += guest.wait(usize::from(round)).len() as u32;
                array.kill();
            }
        }
        if round == ROUNDS {
            let answers = guest.wait(SLOTS.into());
            assert!(answers.iter().all(|(_, status)| *status == 0), "{answers:?}");
            drop(front_end);
            break;
        }
        // Answers that came before it was killed.
        used += guest.answers().len() as u32;
        // The kernel takes a moment to close what a killed process had open, its desk among it.
        wait_until("its desk is closed", || {
            array.run(&[&["show"][..], &DRIVES].concat()).status.success()
        });
        serve(&mut array, ring_cores);
    }
    array.stop();
    serve(&mut array, ring_cores);
    let mut reader = Guest::new();
    let _front_end = reader.connect(&socket);
    for slot in 0..SLOTS {
        reader.offer(slot, READ, u64::from(slot) * SLOT_SECTORS);
    }
    reader.wait(SLOTS.into());
    for slot in 0..SLOTS {
        assert!(reader.data(slot).iter().all(|byte| *byte == ROUNDS), "slot {slot}");
    }
}

#[test]
fn a_guest_loses_no_request_when_the_program_is_killed() {
    loses_no_request("0");
}

#[test]
fn a_guest_loses_no_request_when_cores_for_its_rings_are_killed_too() {
    loses_no_request("2");
}

#[test]
fn a_socket_that_is_served_is_not_taken() {
    let mut array = served("0");
    let other = Box::new();
    for drive in DRIVES {
        other.drive(drive, 64 << 20);
    }
    other.ok(&[&["create", "other", "--level", "6"][..], &DRIVES].concat());
    let socket = array.path(SOCKET).display().to_string();
    let serve = [&["serve", "--vhost", &socket][..], &DRIVES].concat();
    other.refused(&serve, &["another server listens"]);
    let file = other.path("file");
    std::fs::write(&file, "something").expect("written");
    let serve = [&["serve", "--vhost", file.to_str().expect("plain")][..], &DRIVES].concat();
    other.refused(&serve, &["is no socket"]);
    array.stop();
}

fn waits_for_socket(path: &Path, is_there: bool) {
    wait_until(&format!("{} is there: {is_there}", path.display()), || path.exists() == is_there);
}

#[test]
fn sockets_come_and_go_with_the_volumes_of_their_tenant() {
    if !can_run() {
        return;
    }
    let exports = "[[export]]\nvhost = \"vm\"\n[[export]]\ntenant = \"blue\"\nvhost = \"blue\"\n";
    let text = format!("{TINY}{exports}").replace("72MiB", "200MiB");
    let cluster = Cluster::new("vhost-a", &text);
    cluster.ok(&["up"]);
    cluster.ok(&["volume", "create", "vm", "--size", "64MiB"]);
    cluster.ok(&["volume", "create", "blue/db", "--size", "64MiB"]);
    let (vm, db) = (cluster.path("vm/vm.sock"), cluster.path("blue/db.sock"));
    waits_for_socket(&vm, true);
    waits_for_socket(&db, true);
    assert!(!cluster.path("vm/db.sock").exists(), "another tenant's");
    let mut guest = Guest::new();
    let mut front_end = guest.connect(&vm);
    guest.exercise(1);
    assert_eq!(front_end.capacity(), 64 << 20);

    // What was answered is there when the node was killed: the guest goes on, and its next flush would not tell.
    for round in 1..=3 {
        guest.data(0).fill(round);
        guest.offer(0, WRITE, 0);
        assert_eq!(guest.wait(1), [(0, 0)]);
        kill(cluster.node().expect("a node"));
        cluster.ok(&["up"]);
        wait_until("its disk is shown again", || UnixStream::connect(&vm).is_ok());
        guest = Guest::new();
        front_end = guest.connect(&vm);
        guest.offer(0, READ, 0);
        assert_eq!(guest.wait(1), [(0, 0)]);
        assert!(guest.data(0).iter().all(|byte| *byte == round), "round {round}");
    }

    let (channel, theirs) = UnixStream::pair().expect("a channel");
    front_end.set(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    cluster.ok(&["volume", "grow", "vm", "128MiB"]);
    channel.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    std::io::Read::read_exact(&mut &channel, &mut [0; 12]).expect("it is told of the new size");
    assert_eq!(front_end.capacity(), 128 << 20);
    guest.offer(0, WRITE, (100 << 20) / 512);
    assert_eq!(guest.wait(1), [(0, 0)]);
    assert!(cluster.ok(&["status"]).contains("vhost sockets in"));
    cluster.refused(&["volume", "delete", "vm"], &["--"]);
    drop(front_end);
    wait_until("nobody has it open", || cluster.ok_or_not(&["volume", "delete", "vm"]));
    waits_for_socket(&vm, false);
    front_end::check_served(&db);
    cluster.ok(&["down"]);
    assert!(!db.exists(), "the socket stays");
}

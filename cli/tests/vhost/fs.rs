//! `levada mount --vhost`: guests of one file system, by hand.

use crate::fs_guest::{FsGuest, REQUESTS, init, lock_args, long, op, write_args};
use crate::support::{Cluster, TINY, can_run, said, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;

/// Locks an inode of an open file; 0, or why not.
fn lock(guest: &mut FsGuest, (node, fh): (u64, u64), owner: u64) -> i32 {
    guest.ask(op::SETLK, node, &[&lock_args(fh, owner)], 0).expect("an answer").1
}

/// Opens what another one has made: its node and handle.
fn open(guest: &mut FsGuest, name: &[u8]) -> (u64, u64) {
    let node = long(&guest.ok(op::LOOKUP, 1, &[name, &[0]], 128), 0);
    let flags = (libc::O_RDWR as u32).to_ne_bytes();
    let opened = guest.ok(op::OPEN, node, &[&flags, &[0; 4]], 16);
    (node, long(&opened, 0))
}

#[test]
fn guests_share_a_file_system_and_leave_nothing_behind() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("fs-a", TINY);
    cluster.ok(&["up"]);
    let told = cluster.ok(&["mount", "--vhost", "one.sock"]);
    assert!(told.contains("by the tag fs-a"), "{told}");
    cluster.ok(&["mount", "--vhost", "two.sock", "--tag", "mine", "--cache", "open"]);
    cluster.refused(
        &["mount", "--vhost", "two.sock"],
        &["by the tag mine, with --cache open already"],
    );
    let again = cluster.ok(&["mount", "--vhost", "one.sock"]);
    assert!(again.contains("served already"), "{again}");
    let (one_at, two_at) = (cluster.path("one.sock"), cluster.path("two.sock"));
    let (mut one, mut two) = (FsGuest::new(), FsGuest::new());
    let one_front = one.mount(&one_at);
    let _two_front = two.mount(&two_at);

    // What one writes the other reads, before and after it has become durable.
    let file = one.create(b"shared");
    let data: Vec<u8> = (0..300_000u32).map(|at| (at / 3) as u8).collect();
    one.write(file, 0, &data);
    let theirs = open(&mut two, b"shared");
    assert_eq!(theirs.0, file.0);
    assert!(two.read(theirs, 0, 1 << 19) == data);
    two.write(theirs, 1, b"other");
    assert_eq!(one.read(file, 0, 6), [&data[..1], b"other"].concat());
    // A kernel that cannot be told asks each time.
    let entry = one.ok(op::LOOKUP, 1, &[b"shared\0"], 128);
    assert_eq!((long(&entry, 16), long(&entry, 24), &entry[32..40]), (0, 0, &[0; 8][..]));

    // A lock is free when the guest is gone, whatever it did not do.
    assert_eq!(lock(&mut one, file, 1), 0);
    assert_eq!(lock(&mut two, theirs, 1), -libc::EAGAIN);
    let waits = two.offer(op::SETLKW, theirs.0, &[&lock_args(theirs.1, 1)], 0);
    assert!(two.is_quiet(REQUESTS));
    drop(one_front);
    assert_eq!(two.wait(REQUESTS), Some((waits, 0, Vec::new())));

    let status = cluster.ok(&["status"]);
    assert!(status.contains("one.sock: ") && status.contains("two.sock: "), "{status}");
    // One that started anew has none of what it had.
    two.ok(op::INIT, 0, &[&init()], 64);
    let (_, error, _) = two.ask(op::READ, theirs.0, &[&[0; 40]], 16).expect("an answer");
    assert_eq!(error, -libc::EBADF);

    cluster.refused(&["umount", "two.sock"], &["in use by a guest"]);
    two.ok(op::DESTROY, 0, &[], 0);
    cluster.ok(&["umount", "two.sock"]);
    assert!(!two_at.exists(), "the socket stays");
    // What is served goes with the cluster.
    let mut one = FsGuest::new();
    let _one_front = one.mount(&one_at);
    assert_eq!(long(&one.ok(op::LOOKUP, 1, &[b"shared\0"], 128), 0), file.0);
    cluster.refused(&["down"], &["in use by a guest"]);
    cluster.ok(&["down", "--force"]);
    assert!(!one_at.exists(), "the socket stays");
}

#[test]
fn what_cannot_be_served_is_refused() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("fs-b", TINY);
    cluster.refused(&["mount", "--vhost", "one.sock"], &["is not up"]);
    cluster.ok(&["up"]);
    let long_tag = "t".repeat(37);
    let mount = |at: &str, more: &[&str], parts: &[&str]| {
        cluster.refused(&[&["mount", "--vhost", at][..], more].concat(), parts);
    };
    mount("one.sock", &["--tag", &long_tag], &["36 bytes at most", "37"]);
    mount("one.sock", &["--tag", ""], &["at least one byte"]);
    mount("nowhere/one.sock", &[], &["nowhere"]);
    mount(&"s".repeat(108), &[], &["too long a path for a socket"]);
    mount("levada.toml", &[], &["is no socket"]);
    let listening = std::os::unix::net::UnixListener::bind(cluster.path("taken.sock"));
    mount("taken.sock", &[], &["another server listens"]);
    drop(listening);
    // Nobody listens there any more.
    cluster.ok(&["mount", "--vhost", "taken.sock"]);
    cluster.ok(&["umount", "taken.sock"]);
    assert!(cluster.ok(&["status"]).contains("none"));
    cluster.ok(&["down"]);
}

/// The guest of a process that was killed is lost; its locks are not.
#[test]
fn a_process_that_was_killed_is_told_and_replaced() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("fs-c", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "--vhost", "one.sock"]);
    let at = cluster.path("one.sock");
    let mut guest = FsGuest::new();
    let _front = guest.mount(&at);
    let file = guest.create(b"locked");
    assert_eq!(lock(&mut guest, file, 1), 0);
    let notes: Vec<_> = fs::read_dir(cluster.path("state/sockets")).expect("there").collect();
    let note = fs::read_to_string(notes[0].as_ref().expect("a note").path()).expect("text");
    let pid: i32 = note.split(' ').next().and_then(|pid| pid.parse().ok()).expect("its process");
    kill_process(Pid::from_raw(pid).expect("a process"), Signal::KILL).expect("killed");
    wait_until("it is told", || cluster.ok(&["status"]).contains("one.sock is gone"));
    cluster.ok(&["mount", "--vhost", "one.sock"]);
    assert!(!cluster.ok(&["status"]).contains("one.sock is gone"));
    let mut guest = FsGuest::new();
    let _front = guest.mount(&at);
    let file = open(&mut guest, b"locked");
    assert_eq!(lock(&mut guest, file, 2), 0, "it is free without waiting for a lease");
    cluster.ok(&["down", "--force"]);
}

/// What the node of a name is, or the error.
fn found(guest: &mut FsGuest, name: &[u8]) -> Result<u64, i32> {
    match guest.ask(op::LOOKUP, 1, &[name, &[0]], 128).expect("an answer") {
        (_, 0, entry) => Ok(long(&entry, 0)),
        (_, error, _) => Err(error),
    }
}

/// Two tenants' guests, each in a directory of its own, which `levada up` makes, gives to them and serves.
#[test]
fn guests_of_an_export_see_their_directory_alone() {
    if !can_run() {
        return;
    }
    let export = |tenant: &str, more: &str| {
        format!(
            "[[export]]\ntenant = \"{tenant}\"\nvirtiofs = \"run/{tenant}.sock\"\nsubtree = \"/guests/{tenant}\"\n{more}"
        )
    };
    let exports = export("red", "tag = \"home\"\n") + &export("blue", "");
    let cluster = Cluster::new("fs-d", &format!("{TINY}{exports}"));
    let said = cluster.ok(&["up"]);
    assert!(
        said.contains("/guests/red of fs-d is served") && said.contains("by the tag home"),
        "{said}"
    );
    assert!(cluster.ok(&["up"]).contains("served already"));
    cluster.ok(&["mount", "mnt"]);
    fs::write(cluster.mnt().join("guests/red/file"), "red").expect("written");
    fs::write(cluster.mnt().join("guests/blue/file"), "blue").expect("written");

    let sockets = ["red", "blue"].map(|tenant| cluster.path(&format!("run/{tenant}.sock")));
    let (mut red, mut blue) = (FsGuest::new(), FsGuest::new());
    let (red_front, _blue_front) = (red.mount(&sockets[0]), blue.mount(&sockets[1]));
    let file = open(&mut red, b"file");
    assert_eq!(red.read(file, 0, 10), b"red");
    let theirs = open(&mut blue, b"file");
    assert_eq!(blue.read(theirs, 0, 10), b"blue");
    assert_eq!(found(&mut red, b"guests"), Err(-libc::ENOENT));
    assert_eq!(found(&mut red, b".levada"), Err(-libc::ENOENT));
    let (_, error, _) = red.ask(op::GETATTR, theirs.0, &[&[0; 16]], 128).expect("an answer");
    assert_eq!(error, -libc::ESTALE);
    let status = cluster.ok(&["status"]);
    for part in ["red.sock (/guests/red): ", "red.sock: /guests/red of red, 1 connections"] {
        assert!(status.contains(part), "{status}");
    }

    // What is stored counts for the tenant, whose limit holds.
    cluster.ok(&["tenant", "set", "red", "--capacity", "1MiB"]);
    let made = red.create(b"large");
    let data = vec![7; 256 << 10];
    for at in 0..3 {
        red.write(made, at << 18, &data);
    }
    let beyond = [write_args(made.1, 3 << 18, data.len()), data.clone()].concat();
    let (_, error, _) = red.ask(op::WRITE, made.0, &[&beyond], 8).expect("an answer");
    assert_eq!(error, -libc::EDQUOT);
    drop(red_front);
    wait_until("it counts", || {
        let tenants = cluster.ok(&["tenant", "list"]);
        tenants
            .lines()
            .any(|line| line.starts_with("red") && line.contains("76") && line.contains(" KiB"))
    });
    cluster.refused(&["tenant", "delete", "red"], &["shows /guests/red", "levada umount"]);

    // Nothing else is shown there by mistake.
    let red_at = sockets[0].to_str().expect("plain text");
    cluster.ok(&["umount", red_at]);
    assert!(cluster.ok(&["status"]).contains("export of /guests/red at"));
    cluster.refused(&["mount", "--vhost", red_at], &["shows /guests/red"]);
    cluster.refused(&["mount", "--vhost", red_at, "--subtree", "/guests"], &["shows /guests/red"]);
    assert!(cluster.ok(&["up"]).contains("/guests/red of fs-d is served"));
    assert!(!cluster.ok(&["status"]).contains("export of /guests/red at"));

    // A path that leads to somebody else's directory by now is not followed; looked at is that at the start and each time that
    // a guest mounts.
    let of_red = ["mount", "--vhost", "other.sock", "--subtree", "/guests/blue", "--tenant", "1"];
    cluster.refused(&of_red, &["/guests/blue belongs to another tenant"]);
    let of_blue = [&of_red[..6], &["2"]].concat();
    cluster.ok(&of_blue);

    // One that is forgotten has no directory any more: who comes after it, under whatever number, is given it with what is in it.
    cluster.ok(&["umount", red_at]);
    let text = fs::read_to_string(cluster.path("levada.toml")).expect("text");
    let without = text.replace(&export("red", "tag = \"home\"\n"), "");
    fs::write(cluster.path("levada.toml"), &without).expect("written");
    cluster.ok(&["tenant", "delete", "red"]);
    let again = without + &export("green", "").replace("/guests/green", "/guests/red");
    fs::write(cluster.path("levada.toml"), again).expect("written");
    assert!(cluster.ok(&["up"]).contains("/guests/red of fs-d is served"));
    let tenants = cluster.ok(&["tenant", "list"]);
    assert!(
        tenants.lines().any(|line| line.starts_with("green") && line.contains("76")),
        "{tenants}"
    );
    cluster.ok(&["down", "--force"]);
}

#[test]
fn a_directory_that_cannot_be_shown_is_told() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("fs-e", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mount = |subtree: &str, parts: &[&str]| {
        cluster.refused(&["mount", "--vhost", "one.sock", "--subtree", subtree], parts);
    };
    mount("/absent", &["/absent", "no such"]);
    for (path, reason) in [
        ("relative", "it does not begin with /"),
        ("/", "it is the whole file system"),
        ("/.levada/volumes", "/.levada is the cluster's own"),
    ] {
        let output = cluster.run(&["mount", "--vhost", "one.sock", "--subtree", path]);
        assert_eq!(output.status.code(), Some(2), "{path}");
        assert!(said(&output).contains(reason), "{}", said(&output));
    }
    fs::write(cluster.mnt().join("file"), "").expect("written");
    mount("/file", &["/file is no directory"]);
    std::os::unix::fs::symlink("/", cluster.mnt().join("link")).expect("made");
    mount("/link", &["/link is no directory"]);
    fs::create_dir_all(cluster.mnt().join("home/ann")).expect("made");
    cluster.ok(&["mount", "--vhost", "one.sock", "--subtree", "/home"]);
    cluster.refused(&["mount", "--vhost", "one.sock"], &["shows /home by the tag", "already"]);
    // What could not be served leaves nothing that would be taken for what was.
    assert!(!cluster.ok(&["status"]).contains("is gone"));
    cluster.ok(&["mount", "--vhost", "one.sock", "--subtree", "/home/"]);

    // One that is gone when a guest comes, and is there again.
    let mut guest = FsGuest::new();
    fs::rename(cluster.mnt().join("home"), cluster.mnt().join("away")).expect("renamed");
    let _front = guest.connect(&cluster.path("one.sock"));
    let (_, error, _) = guest.ask(op::INIT, 0, &[&init()], 64).expect("an answer");
    assert_eq!(error, -libc::EIO);
    fs::rename(cluster.mnt().join("away"), cluster.mnt().join("home")).expect("renamed");
    guest.ok(op::INIT, 0, &[&init()], 64);
    assert!(found(&mut guest, b"ann").is_ok());
    cluster.ok(&["down", "--force"]);

    // A directory that has something in it is nobody's to be given away.
    let export = "[[export]]\ntenant = \"red\"\nvirtiofs = \"red.sock\"\nsubtree = \"/home\"\n";
    fs::write(cluster.path("levada.toml"), TINY.replace("NAME", "fs-e") + export).expect("written");
    cluster.refused(&["up"], &["red.sock is not served", "/home is there, is not empty"]);
    cluster.ok(&["down"]);
}

//! The program as people treat it: wrong files, wrong names, wrong moments, killed processes.
//!
//! Needs root, io_uring and /dev/fuse; without them the tests of a running cluster are skipped
//! and say so.

mod support;

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Cluster, LEVADA, TINY, can_run, kill, said, signal, wait_until};

#[test]
fn a_wrong_cluster_file_is_told_by_line() {
    for (from, to, parts) in [
        ("copies = 3", "copis = 3", &["levada.toml:21", "copis", "copies"][..]),
        ("copies = 3", "copies = 9", &["levada.toml:21", "8"]),
        ("data = 4", "data = 60", &["levada.toml:26", "30"]),
        ("\"72MiB\"", "\"72M\"", &["levada.toml:5", "MiB"]),
        ("d{2..3}", "d{0..1}", &["levada.toml:11", "d0"]),
        ("name = \"fs\"", "name = ", &["levada.toml:29"]),
    ] {
        let cluster = Cluster::new("wrong", &TINY.replacen(from, to, 1));
        for command in ["check", "up", "status"] {
            cluster.refused(&[command], parts);
        }
        assert!(!cluster.path("d0.img").exists(), "nothing was made");
    }
}

#[test]
fn without_a_cluster_it_says_what_to_do() {
    let nowhere = Cluster::new("x", TINY);
    fs::remove_file(nowhere.path("levada.toml")).expect("removed");
    for command in [&["status"][..], &["down"], &["mount", "mnt"], &["drive", "fail", "d0"]] {
        nowhere.refused(command, &["no cluster here", "levada up", "-f"]);
    }
    nowhere.refused(&["-f", "missing.toml", "status"], &["missing.toml", "No such file"]);
    let said = nowhere.refused(&["-f", ".", "status"], &["cannot read"]);
    assert_eq!(said.matches("os error").count(), 1, "said once: {said}");
}

#[test]
fn a_state_directory_too_deep_for_a_socket_is_told_before_a_drive_is_made() {
    let state = "s".repeat(100);
    let text = TINY.replacen("[drives]", &format!("state_dir = \"{state}\"\n[drives]"), 1);
    let cluster = Cluster::new("deep", &text);
    for command in ["up", "node"] {
        cluster.refused(&[command], &[&state, "at most 107", "state_dir"]);
    }
    assert!(!cluster.path("d0.img").exists() && !cluster.path(&state).exists(), "nothing was made");
}

#[test]
fn a_node_that_starts_is_told_of_and_ends_when_its_start_is_stopped() {
    // Nobody is at that address: the drives there are waited for.
    let away = "url = \"nvme+tcp://127.0.0.1:1/nqn.2014-08.org.example:e0\"\ndrives = [\"{1..2}\"]";
    let cluster = Cluster::new("slow", &TINY.replacen("drives = [\"d{0..1}.img\"]", away, 1));
    let up = || {
        let mut command = Command::new(LEVADA);
        command.args(["up", "--no-mounts"]).current_dir(cluster.dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("the program starts");
        wait_until("a node starts", || said(&cluster.run(&["status"])).contains("starting here"));
        child
    };
    let is_stopped = |up: Child| {
        let output = up.wait_with_output().expect("its output");
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("told to stop while it was starting"), "{said}");
        cluster.refused(&["status"], &["no node is running"]);
    };
    let by_down = up();
    assert!(cluster.ok(&["down"]).contains("its node was starting"));
    is_stopped(by_down);
    for which in ["-INT", "-TERM"] {
        let by_signal = up();
        signal(which, by_signal.id());
        is_stopped(by_signal);
    }
    assert!(cluster.ok(&["down"]).contains("is not up"));
}

/// As whoever supervises it does.
#[test]
fn a_node_that_serves_ends_in_order_when_it_is_told_to_by_a_signal() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("orderly", TINY);
    for which in ["-TERM", "-INT"] {
        let up = cluster.ok(&["up", "--no-mounts"]);
        assert!(up.contains("is up"), "{up}");
        let status: serde_json::Value =
            serde_json::from_str(&cluster.ok(&["status", "--json"])).expect("JSON");
        signal(which, status["pid"].as_u64().expect("a process") as u32);
        wait_until("it has ended", || {
            said(&cluster.run(&["status"])).contains("no node is running here")
        });
        assert!(cluster.ok(&["down"]).contains("is not up"));
        let log = fs::read_to_string(cluster.path("state/node.log")).expect("a log");
        assert!(log.trim_end().ends_with("stopped"), "{log}");
    }
}

#[test]
fn another_users_node_is_not_called_absent() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("mine", TINY);
    fs::set_permissions(cluster.dir.path(), Permissions::from_mode(0o755)).expect("ours");
    // A copy that anybody may run, wherever this one was built.
    fs::copy(LEVADA, cluster.path("program")).expect("copied");
    cluster.ok(&["up", "--no-mounts"]);
    for command in ["down", "status", "plan"] {
        let mut program = Command::new(cluster.path("program"));
        program.arg(command).current_dir(cluster.dir.path()).uid(65534).gid(65534);
        let output = program.output().expect("the program starts");
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "levada {command}: {said}");
        assert!(said.contains("permission denied"), "levada {command}: {said}");
    }
    assert!(cluster.ok(&["down"]).contains("is down"));
}

#[test]
fn a_reader_that_went_away_is_not_worth_a_word() {
    let cluster = Cluster::new("pipe", TINY);
    let shell = format!("{LEVADA} check | true; echo ${{PIPESTATUS[0]}}");
    let output = Command::new("bash")
        .args(["-c", &shell])
        .current_dir(cluster.dir.path())
        .output()
        .expect("a shell");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "0", "{}", said(&output));
    assert!(output.stderr.is_empty(), "{}", said(&output));
}

#[test]
fn a_cluster_bears_rough_hands() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("rough", TINY);
    let mnt = cluster.mnt();
    cluster.refused(&["mount", "mnt"], &["not up"]);
    cluster.ok(&["up"]);
    cluster.refused(&["mount", "missing"], &["missing", "no such directory"]);
    cluster.refused(&["mount", "missing/mnt"], &["missing/mnt", "No such file"]);
    cluster.refused(&["mount", "/proc"], &["/proc", "another file system (proc)"]);
    assert!(!cluster.path("missing").exists(), "nothing was made");
    assert!(!cluster.ok(&["mount", "mnt"]).contains("not empty"));
    fs::write(mnt.join("kept"), vec![7; 3_000_000]).expect("written");
    let kept = || fs::read(mnt.join("kept")).expect("read") == vec![7; 3_000_000];

    // Twice, and by others.
    assert!(cluster.ok(&["up"]).contains("up already"));
    assert!(cluster.ok(&["mount", "mnt"]).contains("mounted already"));
    std::os::unix::fs::symlink("mnt", cluster.path("link")).expect("linked");
    assert!(cluster.ok(&["mount", "link"]).contains("mounted already"));
    cluster.refused(&["up", "--force-format"], &["levada down"]);
    let drives = cluster.dir.path().join("d{0..1}").display().to_string();
    let other = TINY.replace("d{0..1}", &drives);
    Cluster::new("other", &other).refused(&["up"], &["d0", "in use"]);
    fs::write(cluster.path("file"), "").expect("written");
    cluster.refused(&["mount", "file"], &["not a directory"]);
    cluster.refused(&["umount", "."], &["not a mount"]);

    // Wrong drives.
    cluster.refused(&["drive", "fail", "d9"], &["d9", "d0, d1"]);
    cluster.refused(&["drive", "replace", "d1"], &["levada drive fail d1"]);
    cluster.refused(&["drive", "add", "d9"], &["levada.toml", "d9"]);

    // Garbage at both doors.
    let address = fs::read_to_string(cluster.path("state/address")).expect("an address");
    for byte in [0, 0x5a, 0xff] {
        let mut stream = TcpStream::connect(address.trim()).expect("listens");
        let _ = stream.write_all(&[byte; 100_000]);
    }
    let mut desk = UnixStream::connect(cluster.path("state/control.sock")).expect("listens");
    desk.write_all(b"{\"do\":\"dance\"}\n").expect("written");
    let mut answer = [0; 256];
    let got = desk.read(&mut answer).expect("answered");
    assert!(String::from_utf8_lossy(&answer[..got]).contains("not a request"));
    assert!(kept());

    // The door is removed.
    fs::remove_file(cluster.path("state/control.sock")).expect("removed");
    wait_until("it is made anew", || cluster.run(&["status"]).status.success());

    // In use.
    let mut user = Command::new("sleep").arg("60").current_dir(&mnt).spawn().expect("started");
    let name = format!("({})", user.id());
    cluster.refused(&["umount", "mnt"], &["in use", "sleep", &name]);
    cluster.refused(&["down"], &["in use", &name]);
    assert!(cluster.ok(&["status"]).contains("healthy"));
    user.kill().and_then(|()| user.wait()).expect("ended");

    // The node is killed: programs wait.
    signal("-KILL", cluster.node().expect("it runs"));
    let file = mnt.join("waits");
    let writer = std::thread::spawn(move || fs::write(file, "written meanwhile"));
    wait_until("it is gone", || said(&cluster.run(&["status"])).contains("levada up"));
    cluster.ok(&["up"]);
    writer.join().expect("no panic").expect("written");
    assert!(kept());

    // The mount is killed: it can be mounted anew, and what was synced is there.
    signal("-KILL", cluster.mount_process().expect("it runs"));
    wait_until("the mount is dead", || fs::read_dir(&mnt).is_err());
    cluster.ok(&["mount", "mnt"]);
    assert!(kept());
    signal("-KILL", cluster.mount_process().expect("it runs"));
    wait_until("the mount is dead", || fs::read_dir(&mnt).is_err());
    assert!(cluster.ok(&["down"]).contains("before everything was durable"));
    assert!(cluster.ok(&["down"]).contains("not up"));
}

#[test]
fn the_locks_of_a_killed_mount_are_free_in_the_next() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("buried", TINY);
    let path = cluster.mnt().join("file");
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    fs::write(&path, "kept").expect("written");
    fs::File::open(&path).and_then(|file| file.sync_all()).expect("durable");
    let open = || fs::File::options().read(true).write(true).open(&path).expect("there");
    // flock(2) and fcntl(2), neither of which waits.
    let lock = |file: &fs::File| {
        file.try_lock().expect("free");
        fcntl_lock(file, FlockOperation::NonBlockingLockExclusive).expect("free");
    };
    for unmounts in [false, true, false] {
        let mut held = open();
        lock(&held);
        // So that its write session is open.
        held.write_all(b"mine").expect("written");
        signal("-KILL", cluster.mount_process().expect("it runs"));
        wait_until("the mount is dead", || fs::read_dir(cluster.mnt()).is_err());
        let died = Instant::now();
        if unmounts {
            drop(held);
            cluster.refused(&["umount", "mnt"], &["before everything was durable"]);
            cluster.ok(&["mount", "mnt"]);
        } else {
            cluster.ok(&["mount", "mnt"]);
            held.write_all(b"late").expect_err("its mount is gone");
        }
        let file = open();
        lock(&file);
        assert!(died.elapsed() < Duration::from_secs(20), "after {:?}", died.elapsed());
        let read = fs::read_to_string(&path).expect("read");
        assert!(["kept", "mine"].contains(&&*read), "{read}");
    }
    cluster.ok(&["down"]);
}

/// The service awaits the mount that held what was not durable, but not one that is known to be dead.
#[test]
fn after_the_end_of_node_and_mount_together_the_next_mount_is_soon_there() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("together", TINY);
    let mnt = cluster.mnt();
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    for round in 0..3 {
        let synced = mnt.join(format!("synced-{round}"));
        fs::write(&synced, "kept").expect("written");
        fs::File::open(&synced).and_then(|file| file.sync_all()).expect("durable");
        for name in 0..50 {
            fs::create_dir(mnt.join(format!("late-{round}-{name}"))).expect("made");
        }
        signal("-KILL", cluster.node().expect("it runs"));
        signal("-KILL", cluster.mount_process().expect("it runs"));
        wait_until("the mount is dead", || fs::read_dir(&mnt).is_err());
        cluster.ok(&["up"]);
        let begun = Instant::now();
        cluster.ok(&["mount", "mnt"]);
        assert!(begun.elapsed() < Duration::from_secs(15), "after {:?}", begun.elapsed());
        assert_eq!(fs::read_to_string(&synced).expect("read"), "kept");
        fs::write(mnt.join("next"), "next").expect("written");
    }
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
}

#[test]
fn a_mount_out_of_the_tree_is_not_forgotten() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("leaving", TINY);
    let mnt = cluster.mnt();
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    fs::write(mnt.join("kept"), vec![7; 3_000_000]).expect("written");
    let held = || Command::new("sleep").arg("60").current_dir(&mnt).spawn().expect("started");
    let mut user = held();
    let name = format!("({})", user.id());
    let mut file = fs::File::create(mnt.join("file")).expect("created");
    let own_name = format!("({})", std::process::id());

    assert!(cluster.ok(&["umount", "--lazy", "mnt"]).contains(&name));
    // One that is in the directory below uses no mount.
    let mut bystander = held();
    let told = cluster.refused(&["mount", "mnt"], &["still used by", &name, &own_name]);
    assert!(!told.contains(&format!("({})", bystander.id())), "{told}");
    cluster.refused(&["umount", "mnt"], &["left the tree", &name]);
    assert!(cluster.ok(&["status"]).contains(&name));
    cluster.refused(&["down"], &["left the tree", &name, "--force"]);
    // It serves its users to their end, and then there is room for another.
    file.write_all(b"written meanwhile").expect("written");
    drop(file);
    user.kill().and_then(|()| user.wait()).expect("ended");
    cluster.ok(&["mount", "mnt"]);
    bystander.kill().and_then(|()| bystander.wait()).expect("ended");
    assert_eq!(fs::read_to_string(mnt.join("file")).expect("read"), "written meanwhile");

    // By force: in the tree, and out of it.
    for is_out in [false, true] {
        let mut user = held();
        let mut file = fs::File::create(mnt.join("file")).expect("created");
        file.write_all(b"handed over").expect("written");
        if is_out {
            cluster.ok(&["umount", "--lazy", "mnt"]);
        } else {
            cluster.refused(&["down"], &["in use"]);
        }
        assert!(cluster.ok(&["down", "--force"]).contains("is down"));
        assert!(file.write_all(b"more").is_err(), "its mount is gone");
        assert!(fs::read_dir(cluster.path("state/mounts")).expect("there").next().is_none());
        user.kill().and_then(|()| user.wait()).expect("ended");
        cluster.ok(&["up"]);
        cluster.ok(&["mount", "mnt"]);
        assert_eq!(fs::read_to_string(mnt.join("file")).expect("read"), "handed over");
    }
    cluster.ok(&["down"]);
}

#[test]
fn of_two_who_mount_at_once_the_second_waits_for_the_first() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("both", TINY);
    let mnt = cluster.mnt();
    cluster.ok(&["up"]);
    let node = cluster.node().expect("it runs");
    signal("-STOP", node);
    let mut first = Command::new(LEVADA)
        .args(["mount", "--foreground"])
        .arg(&mnt)
        .current_dir(cluster.dir.path())
        .spawn()
        .expect("the program starts");
    wait_until("the first begins", || {
        let mut notes = fs::read_dir(cluster.path("state/mounts")).into_iter().flatten().flatten();
        let is_locked = |note: fs::DirEntry| {
            let note = fs::File::open(note.path());
            note.is_ok_and(|note| note.try_lock_shared().is_err())
        };
        notes.any(is_locked)
    });
    // Nobody who is in the directory below is in its way.
    let mut bystander = Command::new("sleep").arg("60").current_dir(&mnt).spawn().expect("started");
    std::thread::scope(|scope| {
        let second = scope.spawn(|| cluster.run(&["mount", "mnt"]));
        std::thread::sleep(Duration::from_millis(500));
        assert!(!second.is_finished(), "it waits");
        signal("-CONT", node);
        let second = second.join().expect("no panic");
        assert!(second.status.success(), "{}", said(&second));
        assert!(said(&second).contains("mounted already"), "{}", said(&second));
    });
    bystander.kill().and_then(|()| bystander.wait()).expect("ended");
    cluster.ok(&["umount", "mnt"]);
    assert!(first.wait().expect("a child").success());
    cluster.ok(&["down"]);
}

#[test]
fn a_node_short_of_descriptors_takes_programs_again_when_it_has_some() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("short", TINY);
    cluster.ok(&["up"]);
    let node = Pid::from_raw(cluster.node().expect("it runs").cast_signed());
    let many = getrlimit(Resource::Nofile);
    let few = Rlimit { current: Some(3), ..many };
    prlimit(node, Resource::Nofile, few).expect("lowered");
    let connect = || UnixStream::connect(cluster.path("state/control.sock")).expect("listens");
    // The first is taken by the old limit, which the kernel has noted for it; the second waits.
    let (_first, mut second) = (connect(), connect());
    second.write_all(b"{\"do\":\"dance\"}\n").expect("written");
    let mut answer = [0; 256];
    second.set_read_timeout(Some(Duration::from_millis(300))).expect("set");
    second.read(&mut answer).expect_err("nobody can take it");
    prlimit(node, Resource::Nofile, many).expect("raised");
    second.set_read_timeout(Some(Duration::from_secs(10))).expect("set");
    let got = second.read(&mut answer).expect("answered");
    assert!(String::from_utf8_lossy(&answer[..got]).contains("not a request"));
    cluster.ok(&["down"]);
}

#[test]
fn a_full_file_system_says_so_and_deleting_helps_at_once() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("full", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    fs::write(mnt.join("kept"), vec![7; 3_000_000]).expect("written");
    let error = fs::write(mnt.join("big"), vec![8; 150 << 20]).expect_err("too much");
    assert_eq!(error.raw_os_error(), Some(28), "ENOSPC: {error}");
    assert!(fs::read(mnt.join("kept")).expect("read") == vec![7; 3_000_000]);
    fs::remove_file(mnt.join("big")).expect("deleted");
    let begun = Instant::now();
    fs::write(mnt.join("next"), vec![9; 20 << 20]).expect("there is room again");
    assert!(begun.elapsed() < Duration::from_secs(4), "after {:?}", begun.elapsed());
    assert!(fs::read(mnt.join("kept")).expect("read") == vec![7; 3_000_000]);
    cluster.ok(&["down"]);
}

#[test]
fn a_start_that_is_refused_changes_nothing() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("refused", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    fs::write(cluster.mnt().join("kept"), vec![7; 3_000_000]).expect("written");
    cluster.ok(&["down"]);
    // By force, or under another name: nothing is overwritten by mistake.
    cluster.refused(&["up", "--force-format"], &["d0, d1", "--destroy", "drive replace"]);
    cluster.refused(&["up", "--destroy", "other"], &["other", "refused"]);
    // More drives than data bears are away, and fewer than metadata does.
    let away = ["d0", "d1", "d2"];
    let image = |drive: &str| cluster.path(&format!("{drive}.img"));
    away.iter().for_each(|drive| fs::rename(image(drive), cluster.path(drive)).expect("moved"));
    cluster.refused(&["up"], &away);
    away.iter().for_each(|drive| fs::rename(cluster.path(drive), image(drive)).expect("moved"));
    cluster.ok(&["up"]);
    let said = cluster.ok(&["status"]);
    assert!(said.contains("healthy") && !said.contains("degraded"), "{said}");
    cluster.ok(&["mount", "mnt"]);
    assert!(fs::read(cluster.mnt().join("kept")).expect("read") == vec![7; 3_000_000]);
    cluster.ok(&["down"]);
    // All of them are away, as when their disk is not mounted.
    let all: Vec<String> = (0..8).map(|number| format!("d{number}")).collect();
    all.iter().for_each(|drive| fs::rename(image(drive), cluster.path(drive)).expect("moved"));
    for arguments in [&["up"][..], &["up", "--force-format"]] {
        cluster.refused(arguments, &["no drive", "--destroy refused", "d0.img"]);
        assert!(!image("d0").exists(), "nothing was made");
    }
    all.iter().for_each(|drive| fs::rename(cluster.path(drive), image(drive)).expect("moved"));
    // Given up by name, it is made anew; what somebody else has put on a drive is not given up with it.
    let ours = fs::read(image("d5")).expect("a drive");
    let mut theirs = vec![0; ours.len()];
    theirs[1080..1082].copy_from_slice(&0xef53u16.to_le_bytes()); // ext4's magic number
    fs::write(image("d5"), &theirs).expect("put there");
    let way_out = "--destroy refused --force-format";
    cluster.refused(&["up", "--destroy", "refused"], &["d5", "ext4", way_out]);
    assert!(fs::read(image("d5")).expect("a drive") == theirs);
    fs::write(image("d5"), &ours).expect("put back");
    cluster.ok(&["up", "--destroy", "refused"]);
    cluster.ok(&["mount", "mnt"]);
    assert!(!cluster.mnt().join("kept").exists());
    cluster.ok(&["down"]);
}

#[test]
fn a_wrong_copy_of_a_name_is_outvoted_and_nobody_notices() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("outvoted", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let names: Vec<String> = (0..40).map(|n| format!("a-name-like-no-other-{n}")).collect();
    for name in &names {
        fs::write(cluster.mnt().join(name), name).expect("written");
    }
    cluster.ok(&["down"]);
    let mut spoilt = 0;
    for drive in 0..8 {
        let image = cluster.path(&format!("d{drive}.img"));
        let mut bytes = fs::read(&image).expect("a drive");
        let name = names[7].as_bytes();
        let found: Vec<usize> = bytes
            .windows(name.len())
            .enumerate()
            .filter(|(_, at)| *at == name)
            .map(|(at, _)| at)
            .collect();
        if found.is_empty() {
            continue;
        }
        spoilt += 1;
        found.iter().for_each(|at| bytes[*at] ^= 1);
        fs::write(&image, &bytes).expect("spoilt");
        cluster.ok(&["up"]);
        cluster.ok(&["mount", "mnt"]);
        for name in &names {
            assert_eq!(fs::read_to_string(cluster.mnt().join(name)).expect("read"), *name);
        }
        assert_eq!(fs::read_dir(cluster.mnt()).expect("listed").count(), names.len());
        assert!(said(&cluster.run(&["status"])).contains("healthy"));
        // Of three copies a read asks two: this one finds the third before another one is spoilt.
        cluster.ok(&["scrub", "--watch"]);
        cluster.ok(&["down"]);
    }
    // Copies of the row, in logs and checkpoints, and the data itself.
    assert!(spoilt >= 3, "{spoilt} drives have it");
    let log = fs::read_to_string(cluster.path("state/node.log")).expect("a log");
    assert!(log.contains("a copy was put right"), "nobody met it while it served");
    assert!(!log.contains("amage"), "somebody was told of it");
}

#[test]
fn copies_that_are_all_wrong_stop_one_target_and_start_nothing_anew() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("hopeless", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let name = "a-name-like-no-other";
    fs::write(cluster.mnt().join(name), "").expect("written");
    cluster.ok(&["down"]);
    // Each copy in its own way.
    for drive in 0..8u8 {
        let image = cluster.path(&format!("d{drive}.img"));
        let mut bytes = fs::read(&image).expect("a drive");
        let found: Vec<usize> = bytes
            .windows(name.len())
            .enumerate()
            .filter(|(_, at)| *at == name.as_bytes())
            .map(|(at, _)| at)
            .collect();
        found.iter().for_each(|at| bytes[*at] ^= drive + 1);
        fs::write(&image, &bytes).expect("spoilt");
    }
    cluster.ok(&["up"]);
    let node = cluster.node();
    if !cluster.ok(&["status"]).contains("mdt0 is stopped") {
        cluster.ok(&["mount", "mnt"]);
        let file = cluster.mnt().join(name);
        std::thread::spawn(move || fs::metadata(file));
        wait_until("it is given up", || {
            cluster.ok(&["status"]).contains("none could be told to be right")
        });
        std::thread::sleep(Duration::from_secs(15));
    }
    let told = cluster.ok(&["status"]);
    assert!(told.contains("ost1") && told.contains("serving"), "{told}");
    let log = fs::read_to_string(cluster.path("state/node.log")).expect("a log");
    assert!(!log.contains("ended=Damaged"), "{log}");
    assert_eq!(cluster.node(), node);
}

#[test]
fn three_lost_drives_stop_it_and_nothing_is_lost() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("lost", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    fs::write(mnt.join("kept"), vec![7; 3_000_000]).expect("written");
    let lost = ["d0", "d2", "d4"];
    // While it runs, by force.
    for drive in &lost[..2] {
        cluster.ok(&["drive", "fail", drive, "--force"]);
    }
    cluster.refused(&["drive", "fail", "d4", "--force"], &["d4 takes no more I/O", "array meta"]);
    let file = mnt.join("waits");
    let writer = std::thread::spawn(move || {
        fs::write(&file, "written meanwhile").and_then(|()| fs::File::open(&file)?.sync_all())
    });
    wait_until("it stops", || {
        let said = cluster.ok(&["status"]);
        said.contains("has stopped") && lost.iter().all(|drive| said.contains(drive))
    });
    assert!(!writer.is_finished(), "the program waits");
    let said = cluster.ok(&["down"]);
    assert!(said.contains("has stopped") && said.contains("wait until the next `levada up`"));
    // While it is down: away, and back.
    for drive in lost {
        fs::rename(cluster.path(&format!("{drive}.img")), cluster.path(drive)).expect("moved");
    }
    cluster.refused(&["up"], &lost);
    for drive in lost {
        fs::rename(cluster.path(drive), cluster.path(&format!("{drive}.img"))).expect("moved");
    }
    cluster.ok(&["up"]);
    writer.join().expect("no panic").expect("written and durable");
    assert!(fs::read(mnt.join("kept")).expect("read") == vec![7; 3_000_000]);
    assert_eq!(fs::read_to_string(mnt.join("waits")).expect("read"), "written meanwhile");
    cluster.ok(&["down"]);
}

#[test]
fn a_mount_does_not_follow_its_address_into_another_cluster() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("strange", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    fs::write(mnt.join("ours"), "ours").expect("written");
    let mut open = fs::File::create(mnt.join("open")).expect("made");
    open.write_all(&[5; 200_000]).expect("written");
    signal("-KILL", cluster.node().expect("it runs"));
    wait_until("it is gone", || said(&cluster.run(&["status"])).contains("levada up"));
    let way_out = "umount --lazy";
    cluster.refused(&["up", "--destroy", "strange", "--no-mounts"], &["mnt", way_out]);
    // By hand: all that tells of the cluster but the address.
    (0..8).for_each(|drive| {
        fs::remove_file(cluster.path(&format!("d{drive}.img"))).expect("removed");
    });
    fs::remove_file(cluster.path("state/cluster")).expect("removed");
    cluster.ok(&["up", "--no-mounts"]);
    let stale = |error: std::io::Error| assert_eq!(error.raw_os_error(), Some(116), "{error}");
    stale(open.sync_all().expect_err("it is not there"));
    stale(fs::read_dir(&mnt).and_then(|mut dir| dir.next().transpose()).expect_err("not ours"));
    stale(fs::write(mnt.join("more"), "more").expect_err("not ours"));
    let told = cluster.ok(&["status"]);
    assert!(told.contains("ESTALE") && told.contains("mnt"), "{told}");
    cluster.refused(&["mount", "mnt"], &["another cluster", "umount"]);
    let log = fs::read_to_string(cluster.path("state/mount.log")).expect("a log");
    assert!(log.contains("another cluster"), "{log}");
    drop(open);
    cluster.run(&["umount", "mnt"]);
    cluster.ok(&["mount", "mnt"]);
    assert_eq!(fs::read_dir(&mnt).expect("ours").count(), 0, "nothing was written there");
    cluster.ok(&["down"]);
}

/// A scrub that is slow on purpose, of a cluster that is stopped, and then killed, in the middle of it.
#[test]
fn a_scrub_goes_on_after_a_stop_and_after_a_kill_and_tells_how_far_it_is() {
    if !can_run() {
        return;
    }
    let slow = "[scrub]\nfloor = \"10MB\"\nceiling = \"10MB\"\n";
    let cluster = Cluster::new("scrubbed", &format!("{TINY}{slow}"));
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    fs::write(cluster.mnt().join("file"), vec![7; 40 << 20]).expect("written");
    cluster.ok(&["scrub"]);
    cluster.refused(&["scrub"], &["scrub"]);
    let is_under_way = || cluster.ok(&["status"]).contains("    scrub: ");
    wait_until("it is told how far it is", is_under_way);
    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    wait_until("it goes on by itself after a stop", is_under_way);
    kill(cluster.node().expect("a node"));
    cluster.ok(&["up"]);
    wait_until("and after a kill", is_under_way);
    let log = || fs::read_to_string(cluster.path("state/node.log")).expect("a log");
    assert_eq!(log().matches("the scrub that was interrupted goes on").count(), 2);
    wait_until("it comes to its end", || !is_under_way());
    let status = cluster.ok(&["status"]);
    let found: Vec<_> = status.lines().filter(|line| line.contains("last scrub: ")).collect();
    // Of both arrays, and of the objects.
    assert!(found.len() == 3, "{status}");
    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    assert!(!is_under_way(), "what is over is not begun again");
    assert_eq!(log().matches("the scrub that was interrupted goes on").count(), 2);
    cluster.ok(&["down"]);
}

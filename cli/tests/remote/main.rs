//! Arrays of drives that are reached over NVMe/TCP: enclosures that lose paths, drives and power.
//!
//! Needs io_uring and FUSE, and root for that.

mod drawer;
mod exported;
#[path = "../array/fixture.rs"]
#[allow(dead_code, reason = "loop devices are not needed here")]
mod fixture;
mod strangers;
#[path = "../support/mod.rs"]
mod support;

use drawer::Drawer;
use fixture::Box;
use levada_base::reactor::Reactor;
use levada_base::{Buf, BufMut};
use levada_device::nvme::{Host, NvmeNamespace, NvmeUrl, Options};
use levada_device::{Device, Durability};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use support::{LEVADA, LIMIT, said, wait_until};

const MIB: usize = 1 << 20;
const IN_MEMORY: &[&str] = &["--ram", "--size", "96MiB"];
/// A drive without any path is waited for half a minute, and several go one after the other.
const GONE_WITHIN: Duration = Duration::from_secs(120);

fn free_address() -> String {
    let probe = TcpListener::bind("127.0.0.1:0").expect("a port");
    probe.local_addr().expect("bound").to_string()
}

/// What is answered there to a request.
fn asked(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it answers");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    answer
}

/// What a piece of the array holds after a round.
fn pattern(round: u8, piece: usize) -> Vec<u8> {
    (0..MIB).map(|at| (at / 11) as u8 ^ round.wrapping_mul(31) ^ piece as u8).collect()
}

/// Writes all pieces, and reads back what is there.
fn round(file: &File, number: u8, pieces: usize) {
    for piece in 0..pieces {
        let at = (piece * MIB) as u64;
        file.write_all_at(&pattern(number, piece), at).expect("written");
    }
    file.sync_data().expect("durable");
    check(file, number, pieces);
}

fn check(file: &File, number: u8, pieces: usize) {
    let mut there = vec![0; MIB];
    for piece in 0..pieces {
        file.read_exact_at(&mut there, (piece * MIB) as u64).expect("read");
        assert!(there == pattern(number, piece), "piece {piece} of round {number}");
    }
}

/// Three enclosures, and the URLs of their six drives.
fn three_drawers(array: &Box) -> (Vec<Drawer>, Vec<String>) {
    let start = |name| Drawer::start(array.dir.path(), name, IN_MEMORY);
    let drawers: Vec<Drawer> = ["e1", "e2", "e3"].into_iter().map(start).collect();
    let urls = drawers.iter().flat_map(|drawer| [drawer.url(1), drawer.url(2)]).collect();
    (drawers, urls)
}

/// Threads of a process by their names.
fn threads(process: u32, prefix: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let named = tasks.flatten().filter_map(|task| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        name.starts_with(prefix).then_some(())
    });
    named.count()
}

/// Connections of TCP that a process has (proc(5), `net/tcp`: the state is the fourth word, and the inode the tenth).
fn connections(process: u32) -> usize {
    const ESTABLISHED: &str = "01";
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs").flatten();
    let open: Vec<_> = open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    let all =
        std::fs::read_to_string(format!("/proc/{process}/net/tcp")).expect("it has a network");
    let is_its_own = |line: &&str| {
        let words: Vec<_> = line.split_whitespace().collect();
        words[3] == ESTABLISHED
            && open.iter().any(|it| it.as_os_str() == &*format!("socket:[{}]", words[9]))
    };
    all.lines().skip(1).filter(is_its_own).count()
}

#[test]
fn other_cores_carry_connections_and_whoever_is_told_to_end_ends_in_order() {
    let mut array = Box::new();
    let serving = [IN_MEMORY, &["--network-cores", "1"]].concat();
    let drawers = ["e1", "e2"].map(|name| Drawer::start(array.dir.path(), name, &serving));
    let urls: Vec<_> = drawers.iter().flat_map(|it| [it.url(1), it.url(2)]).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    array.ok(&[&["create", "far", "--level", "5"][..], &urls].concat());
    array.serve(&[&["--network-cores", "2"][..], &urls].concat());
    assert_eq!(threads(array.server(), "carrier-"), 2);
    // To each of four drives over each of two paths: one to administer, and one for I/O for each core.
    wait_until("all are connected", || connections(array.server()) == 4 * 2 * (1 + 2));
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    round(&file, 1, 16);
    drawers[0].ok("path", &["1", "down"]);
    round(&file, 2, 16);
    check(&file, 2, 16);
    drop(file);
    // A signal that a carrier got would end the process as it stands.
    array.stop();
    drawers.into_iter().for_each(Drawer::stop);
    let too_many = array.run(&["serve", "--at", "x", "--network-cores", "65", urls[0]]);
    assert!(said(&too_many).contains("0 to 64"), "{}", said(&too_many));
}

#[test]
fn an_array_outlives_paths_drives_and_an_enclosure() {
    let mut array = Box::new();
    let (drawers, urls) = three_drawers(&array);
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    array.ok(&[&["create", "far", "--level", "6"][..], &urls].concat());
    array.serve(&urls);
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    round(&file, 1, 32);

    // A path goes, and comes back; then the other one hangs. Nothing fails, and nothing waits long.
    for order in [&["1", "down"][..], &["1", "up"], &["2", "hung"], &["2", "up"]] {
        drawers[0].ok("path", order);
        let begun = Instant::now();
        round(&file, 2, 8);
        assert!(begun.elapsed() < Duration::from_secs(45), "{order:?}: {:?}", begun.elapsed());
    }
    // A drive is pulled, then all of its enclosure is without power: as many as there are parities.
    drawers[1].ok("pull", &["1"]);
    round(&file, 3, 16);
    drawers[1].ok("power", &["off"]);
    let begun = Instant::now();
    round(&file, 4, 32);
    assert!(begun.elapsed() < GONE_WITHIN, "{:?}", begun.elapsed());
    let status = array.json(&["show", urls[0]]);
    let faulty = status["members"].as_array().expect("members").iter();
    assert_eq!(faulty.filter(|member| member["state"] != "in-sync").count(), 2, "{status}");
    drop(file);
    array.stop();
    // Without the enclosure, from the drives that are left.
    let left = [urls[0], urls[1], urls[4], urls[5]];
    array.serve(&[&["--degraded"][..], &left].concat());
    check(&File::open(array.file()).expect("open"), 4, 32);
    array.stop();
}

/// An enclosure as they are sold: 24 drives, each over two paths, in one array.
#[test]
fn a_full_enclosure_is_one_array() {
    let mut array = Box::new();
    let drawer = Drawer::with_bays(24, array.dir.path(), "full", &["--ram", "--size", "24MiB"]);
    let urls: Vec<String> = (1..=24).map(|bay| drawer.url(bay)).collect();
    let found = drawer.found();
    assert_eq!(found.matches("\n  namespace ").count(), 24, "{found}");
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    array.ok(&[&["create", "all", "--level", "6", "--spares", "2"][..], &urls].concat());
    array.serve(&urls);
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    round(&file, 1, 64);
    drawer.ok("path", &["2", "down"]);
    // Pulled while they are written to: no block of theirs is bad for that.
    std::thread::scope(|scope| {
        for first in [0, 16, 32, 48] {
            let file = &file;
            scope.spawn(move || {
                for piece in (first..first + 16).cycle().take(96) {
                    file.write_all_at(&pattern(2, piece), (piece * MIB) as u64).expect("written");
                }
            });
        }
        drawer.ok("pull", &["5"]);
        drawer.ok("pull", &["20"]);
    });
    file.sync_data().expect("durable");
    check(&file, 2, 64);
    let status = array.json(&["show", urls[0]]);
    let members = status["members"].as_array().expect("members");
    assert!(members.iter().all(|member| member["io"]["medium_errors"] == 0), "{status}");
    drawer.ok("path", &["2", "up"]);
    drawer.ok("path", &["1", "down"]);
    check(&file, 2, 64);
    drop(file);
    array.stop();
}

/// In the order in which anybody would list them.
#[test]
fn copies_are_in_different_enclosures() {
    let mut array = Box::new();
    let (drawers, urls) = three_drawers(&array);
    let [first, second, third, fourth] = [0, 1, 2, 4].map(|at| urls[at].as_str());
    array.ok(&["create", "far", "--level", "10", first, second, third, fourth]);
    array.serve(&[first, second, third, fourth]);
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    round(&file, 1, 32);
    drawers[0].ok("power", &["off"]);
    check(&file, 1, 32);
    round(&file, 2, 8);
    drop(file);
    array.stop();
    // Where the order is somebody's own, it is said what that costs.
    drawers[0].ok("power", &["on"]);
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let create = ["create", "groups", "--force", "--level", "50", "--groups", "2"];
    let said = said(&array.run(&[&create[..], &urls].concat()));
    assert!(said.contains("would not survive the loss of enclosure nqn."), "{said}");
    assert!(said.contains(":e1 (e1?ns=1, e1?ns=2)"), "{said}");
    let urls = [urls[0], urls[2], urls[4], urls[1], urls[3], urls[5]];
    let said = array.ok(&[&create[..], &urls].concat());
    assert!(!said.contains("would not survive"), "{said}");
}

/// The process of an enclosure dies, with what its drives had not flushed and with all that it knew of owners, unless its drives have kept
/// that. The superblocks on its drives say who that is.
#[test]
fn an_array_outlives_an_enclosure_that_forgets_its_owner() {
    let mut array = Box::new();
    let media = |name: &'static str| ["--files", name, "--size", "96MiB"];
    let dir = array.path(".");
    let mut drawers: Vec<Drawer> =
        ["e1", "e2"].map(|name| Drawer::start(&dir, name, &media(name))).into();
    let urls: Vec<String> =
        drawers.iter().flat_map(|drawer| [drawer.url(1), drawer.url(2)]).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    array.ok(&[&["create", "far", "--level", "6"][..], &urls].concat());
    array.serve(&urls);
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    for (number, at, forgets) in [(1, 0, true), (2, 1, false), (3, 0, true)] {
        round(&file, number, 16);
        // Not flushed.
        file.write_all_at(&pattern(9, 16), 16 * MIB as u64).expect("written");
        let name = ["e1", "e2"][at];
        for bay in 1..=2 {
            let kept = array.dir.path().join(name).join(format!("bay{bay}.reservations"));
            assert!(kept.exists(), "the owner asks for it");
            if forgets {
                std::fs::remove_file(kept).expect("removed");
            }
        }
        let again = drawers.remove(at).kill(&dir, &media(name));
        drawers.insert(at, again);
        check(&file, number, 16);
        round(&file, number + 10, 17);
        let status = array.json(&["show", urls[0]]);
        let members = status["members"].as_array().expect("members");
        assert!(members.iter().all(|member| member["state"] == "in-sync"), "{status}");
    }
    drop(file);
    array.stop();
}

/// A drive that forgot who has it could be written by two.
#[test]
fn an_enclosure_with_damaged_reservations_does_not_start() {
    let array = Box::new();
    let dir = array.path(".");
    let media = ["--files", "e1", "--size", "96MiB"];
    let drawer = Drawer::start(&dir, "e1", &media);
    array.ok(&["create", "far", "--level", "1", &drawer.url(1), &drawer.url(2)]);
    drawer.stop();
    let kept = array.path("e1/bay2.reservations");
    let mut bytes = std::fs::read(&kept).expect("kept");
    *bytes.last_mut().expect("a key") ^= 1;
    std::fs::write(&kept, &bytes).expect("damaged");
    let mut command = Command::new(LEVADA);
    command.args(["enclosure", "serve", "e1", "--bays", "2", "--path", "127.0.0.1:0"]).args(media);
    command.current_dir(&dir).env("LEVADA_ENCLOSURES_DIR", array.path("enclosures"));
    let output = fixture::run(&mut command, support::LIMIT);
    let said = said(&output);
    assert!(output.status.code() == Some(1) && said.contains("bay2.reservations"), "{said}");
    assert!(said.contains("checksum"), "{said}");
}

#[test]
fn a_path_to_a_served_array_says_how_good_it_is() {
    let mut array = Box::new();
    array.drive("a", 64 << 20);
    array.drive("b", 64 << 20);
    array.ok(&["create", "near", "--level", "1", "a", "b"]);
    let places = ["--nvme", "127.0.0.1:0", "--nvme", "127.0.0.1:0"];
    array.serve_as(&places, "nvme+tcp://", &["a", "b"]);
    let said = array.ok(&["path", "2", "inaccessible", "a"]);
    assert!(said.contains("path 2 of near is inaccessible"), "{said}");
    let status = array.json(&["show", "a"]);
    let states = &status["open_by"]["nvme_states"];
    assert_eq!(*states, serde_json::json!(["optimized", "inaccessible"]), "{status}");
    assert!(array.ok(&["show", "a"]).contains("(inaccessible)"));
    array.refused(&["path", "3", "change", "a"], &["no path 3", "there are 2"]);
    array.ok(&["path", "2", "optimized", "a"]);
    assert!(!array.ok(&["show", "a"]).contains("(inaccessible)"));
    array.stop();
}

/// By their URLs, while the array is served: one that was pulled comes back, and another one waits for the next loss.
#[test]
fn remote_drives_are_replaced_and_added() {
    let mut array = Box::new();
    let (drawers, urls) = three_drawers(&array);
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let (spare, members) = urls.split_last().expect("six");
    array.ok(&[&["create", "far", "--level", "6"][..], members].concat());
    array.serve(members);
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    round(&file, 1, 16);
    drawers[0].ok("pull", &["1"]);
    round(&file, 2, 16);
    drawers[0].ok("insert", &["1"]);
    array.ok(&["replace", "0", urls[0], urls[1]]);
    array.ok(&["rebuild", urls[1]]);
    array.ok(&["add-spare", spare, urls[1]]);
    let status = array.json(&["show", urls[1]]);
    let states: Vec<&str> = status["members"]
        .as_array()
        .expect("members")
        .iter()
        .map(|member| member["state"].as_str().expect("a state"))
        .collect();
    assert_eq!(states, ["in-sync", "in-sync", "in-sync", "in-sync", "in-sync", "spare"]);
    assert_eq!(status["members"][5]["path"], *spare, "{status}");
    array.ok(&["scrub", urls[1]]);
    check(&file, 2, 16);
    drop(file);

    // A lost path is told, also as long as the other one is enough.
    let lost =
        |shown: &str| shown.matches(&format!("! no path over {}: ", drawers[2].path(1))).count();
    assert_eq!(lost(&array.ok(&["show", urls[1]])), 0);
    drawers[2].ok("path", &["2", "down"]);
    let of_drawer = members.iter().filter(|url| url.contains(drawers[2].path(1))).count();
    wait_until("it is told", || lost(&array.ok(&["show", urls[1]])) >= of_drawer);
    let status = array.json(&["show", urls[1]]);
    let paths = status["members"][members.len() - 1]["paths"].as_array().expect("paths");
    assert_eq!(paths.iter().map(|path| &path["state"]).collect::<Vec<_>>(), ["optimized", "down"]);
    drawers[2].ok("path", &["2", "up"]);
    wait_until("it is back", || lost(&array.ok(&["show", urls[1]])) == 0);

    // A drive warns by itself, and the array says so, though nobody asks. It looks once a minute anyway, so a warning that is not heard
    // passes this one time in six; tests of the initiator and of the watch are strict.
    let begun = Instant::now();
    drawers[0].ok("wear", &["2", "--spare", "8"]);
    wait_until("it is told", || array.log().contains("8 % of its spare room is left"));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    drawers[0].ok("wear", &["2", "--spare", "100"]);

    // A drive wears out: the array says so while it lasts.
    drawers[0].ok("wear", &["2", "--used", "95", "--media-errors", "2"]);
    let worn = "95 % of its endurance used, spare 100 %, 2 media errors";
    // What was looked at a moment ago is not asked for again.
    wait_until("it is told", || array.ok(&["show", urls[1]]).contains(worn));
    let shown = array.ok(&["show", urls[1]]);
    for part in [
        worn,
        "! 95 % of its endurance is used, its media errors have risen to 2; `levada array fail`, and `levada array replace` with another",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let status = array.json(&["show", urls[1]]);
    let health = |index: usize| &status["members"][index]["health"];
    assert_eq!(health(1)["complaints"], serde_json::json!(["worn", "media-errors"]), "{status}");
    assert_eq!(health(0)["complaints"], serde_json::json!([]), "{status}");
    let log = array.log();
    assert!(log.contains("95 % of its endurance is used"), "{log}");
    drawers[0].ok("wear", &["2", "--used", "3"]);
    wait_until("it is as new", || {
        !array.ok(&["show", urls[1]]).contains("of its endurance is used")
    });
    array.stop();
}

/// Drives whose reservations say that somebody else has them: those of an array that nobody uses any more.
#[test]
fn drives_of_another_array_are_taken_by_force_alone() {
    let mut array = Box::new();
    let (_drawers, urls) = three_drawers(&array);
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let old = [urls[1], urls[3], urls[5]];
    array.ok(&[&["create", "old", "--level", "5"][..], &old].concat());
    // Each owner is a later one.
    for _ in 0..3 {
        array.serve(&old);
        array.stop();
    }
    let young = [urls[0], urls[2]];
    array.ok(&[&["create", "young", "--level", "1"][..], &young].concat());
    array.serve(&young);
    let held = "member e1?ns=2 of array old";
    array.refused(&["add-spare", urls[1], urls[0]], &[held]);
    array.ok(&["add-spare", "--overwrite", urls[1], urls[0]]);
    let status = array.json(&["show", urls[0]]);
    assert_eq!(status["members"][2]["state"], "spare", "{status}");
    array.stop();
    // Nor does it matter whether the array in whose place they are was closed in order.
    array.serve(&[urls[0], urls[1], urls[2]]);
    array.kill();
    let both = [urls[0], urls[1], urls[2], urls[3]];
    array.refused(&[&["create", "next", "--level", "6"][..], &both].concat(), &["of array young"]);
    array.ok(&[&["create", "next", "--force", "--level", "6"][..], &both].concat());
    array.serve(&both);
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    round(&file, 1, 4);
    drop(file);
    array.stop();
}

/// The rest of a cluster file over one enclosure of two drives.
const MIRRORED: &str = r#"
[[array]]
name = "meta"
level = "raid1"
copies = 2
spread = "drive"
slice = "50%"
[[array]]
name = "data"
level = "raid1"
copies = 2
spread = "drive"
[[filesystem]]
name = "fs"
data = "data"
metadata = "meta"
"#;

const HOST: &str = "nqn.2014-08.org.example:lab";
const SECRET: &str = "DHHC-1:00:DxwGY8UbmsTaAN1OZlf5QUF9hLwXXN59EasSI7gLF70+3Jp0:";

/// A file with a key of [`HOST`]: its path.
fn key_file(dir: &Path, file: &str, key: &str) -> String {
    let path = dir.join(file);
    std::fs::write(&path, format!("{HOST} {key}\n")).expect("written");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, private).expect("ours");
    path.to_str().expect("text").to_owned()
}

#[test]
fn an_enclosure_lets_in_who_proves_itself_or_comes_within_tls() {
    const OTHER: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    const ANOTHER_KEY: &str = "NVMeTLSkey-1:01:BwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiMkJSYDWRHm:";
    let array = Box::new();
    let dir = array.dir.path();
    let keys = |file: &str, key: &str| key_file(dir, file, key);
    let (secret, key) = (keys("secret", SECRET), keys("key", KEY));
    let proof = Drawer::start(dir, "e1", &[IN_MEMORY, &["--keys", &secret]].concat());
    let tls = Drawer::start(dir, "e2", &[IN_MEMORY, &["--keys", &key, "--tls-only"]].concat());
    let of = |url: String, file: &str| format!("{url}&host={HOST}&keys={file}");
    let mine = [of(proof.url(1), &secret), of(tls.url(1), &key)];
    let elsewhere = mine[0].replace("enclosure:e1", "enclosure:e7");
    for (drives, why) in [
        ([proof.url(1), mine[1].clone()], "connect invalid host"),
        ([of(proof.url(1), &keys("other", OTHER)), mine[1].clone()], "does not know the secret"),
        ([mine[0].clone(), tls.url(1)], "connect invalid host"),
        ([elsewhere, mine[1].clone()], "there is no subsystem nqn.2026-11.io.levada:enclosure:e7"),
    ] {
        array.refused(&["create", "far", "--level", "1", &drives[0], &drives[1]], &[why]);
    }
    array.ok(&["create", "far", "--level", "1", &mine[0], &mine[1]]);
    // What is found with a file named from here is for a cluster file anywhere.
    let find = |enclosure: &Drawer, keys: &str| {
        let url = enclosure.enclosure_url();
        let address = url.split(['/', ',']).nth(2).expect("an address");
        let mut find = Command::new(LEVADA);
        find.current_dir(dir).args(["enclosure", "find", address, "--host", HOST, "--keys", keys]);
        find.output().expect("it runs")
    };
    let found = find(&proof, "secret");
    assert!(found.status.success(), "{}", said(&found));
    assert!(said(&found).contains(&format!("&keys={secret}\"\ndrives")), "{}", said(&found));
    let closed = find(&proof, "other");
    assert!(said(&closed).contains("could not be looked into"), "{}", said(&closed));
    assert_eq!(closed.status.code(), Some(1), "{}", said(&closed));
    // Whoever speaks TLS there, and has another key, is not asked for what it takes in the clear.
    keys("another", ANOTHER_KEY);
    let closed = find(&tls, "another");
    assert!(said(&closed).contains("it has another key"), "{}", said(&closed));
    assert_eq!(find(&tls, "key").status.code(), Some(0));
    // Nobody could come.
    for (more, why) in [(&[][..], "--keys"), (&["--keys", &secret], "no host has a key of TLS")] {
        let useless = Command::new(LEVADA)
            .args(["enclosure", "serve", "e3", "--path", "127.0.0.1:0", "--ram", "--tls-only"])
            .args(more)
            .env("LEVADA_ENCLOSURES_DIR", array.path("enclosures"))
            .output()
            .expect("it runs");
        assert!(!useless.status.success() && said(&useless).contains(why), "{}", said(&useless));
    }
}

/// Whoever comes without having to prove anything may fill up what the process has; it is for those who say what they want.
#[test]
fn who_only_comes_keeps_nobody_out_where_descriptors_are_few() {
    let place = Box::new();
    let secret = key_file(place.dir.path(), "secret", SECRET);
    let keys = ["--keys", &secret];
    type Come = fn(&str) -> TcpStream;
    let rounds: [(_, &[&str], Come); 3] = [
        ("e1", &[], strangers::silent),
        ("e2", &keys, strangers::silent),
        ("e3", &keys, strangers::looking_around),
    ];
    for (name, more, come) in rounds {
        let status = free_address();
        let options = [IN_MEMORY, &["--status", &status], more].concat();
        let drawer = Drawer::start(place.dir.path(), name, &options);
        drawer.leave_descriptors(40);
        let _strangers: Vec<_> = (0..100).map(|_| come(drawer.path(0))).collect();
        let begun = Instant::now();
        let mut find = Command::new(LEVADA);
        find.args(["enclosure", "find", drawer.path(0), "--host", HOST]).args(more);
        let found = find.output().expect("it runs");
        assert!(found.status.success(), "{name}: {}", said(&found));
        // Those who come to something else in the process have no strangers of their own who could make room.
        let shown = asked(&status, "GET /bays/1 HTTP/1.1\r\n\r\n");
        assert!(shown.starts_with("HTTP/1.1 200"), "{name}: {shown}");
        // What strangers have to say they may take half a minute for.
        assert!(begun.elapsed() < Duration::from_secs(10), "{name}: {:?}", begun.elapsed());
    }
}

/// Who is known stays, also where there is no descriptor for the next one, who is turned away; the operator is told why.
#[test]
fn where_all_are_known_the_next_is_turned_away() {
    let place = Box::new();
    let drawer = Drawer::start(place.dir.path(), "e1", IN_MEMORY);
    drawer.leave_descriptors(40);
    Reactor::new().expect("an io_uring").block_on(async {
        let url: NvmeUrl = drawer.url_by(0, 1).parse().expect("a URL");
        let open = || {
            let options = Options::new(Host::anonymous().expect("a name"));
            NvmeNamespace::open(&url, options)
        };
        let mut known = Vec::new();
        while let Ok(drive) = open().await {
            known.push(drive);
            assert!(known.len() < 40, "each has a descriptor of the enclosure");
        }
        assert!(known.len() > 5, "only {}", known.len());
        for drive in &known {
            drive.read(0, BufMut::for_overwrite(4096).into_vec()).await.expect("it stays");
        }
        let log = std::fs::read_to_string(place.dir.path().join("enclosures.log")).expect("a log");
        assert!(log.contains("as there are hardly any descriptors left: raise"), "{log}");
        for drive in known {
            drive.close().await;
        }
        // They take a moment to go.
        let begun = Instant::now();
        let again = loop {
            match open().await {
                Ok(drive) => break drive,
                Err(error) => assert!(begun.elapsed() < LIMIT, "there is room again: {error}"),
            }
        };
        again.close().await;
    });
}

/// Its cache goes with it; whoever wrote there, and has not been told that it is durable, writes that again.
#[test]
fn what_a_pulled_drive_had_in_its_cache_is_written_again() {
    let place = Box::new();
    let drawer = Drawer::start(place.dir.path(), "e1", IN_MEMORY);
    Reactor::new().expect("an io_uring").block_on(async {
        let url: NvmeUrl = drawer.url(1).parse().expect("a URL");
        let options = Options::new(Host::anonymous().expect("a name"));
        let drive = NvmeNamespace::open(&url, options).await.expect("it is there");
        // Often: what a drive keeps of its cache is chance, and it writes down by itself what is old.
        for number in 1..=20 {
            let data = Buf::copy_of(&pattern(number, 0));
            let written = drive.write(0, data.clone().into_vec(), Durability::Volatile).await;
            written.expect("written");
            drawer.ok("pull", &["1"]);
            drawer.ok("insert", &["1"]);
            drive.flush().await.expect("durable");
            // From the media: what was only in the cache is gone now.
            drawer.ok("power", &["off"]);
            drawer.ok("power", &["on"]);
            let into = BufMut::for_overwrite(MIB).into_vec();
            let read = drive.read(0, into).await.expect("read");
            let read: Vec<u8> = read.iter().flat_map(|part| part.to_vec()).collect();
            assert!(read == data[..], "of round {number} something is lost");
        }
        drive.close().await;
    });
}

/// What is said to be slow is slow, by as much, and nothing else is.
#[test]
fn a_slow_path_and_a_slow_drive_take_as_long_as_they_are_told() {
    let place = Box::new();
    let drawer = Drawer::start(place.dir.path(), "e1", IN_MEMORY);
    Reactor::new().expect("an io_uring").block_on(async {
        let took = async |path: usize, bay: usize| {
            let url: NvmeUrl = drawer.url_by(path, bay).parse().expect("a URL");
            let options = Options::new(Host::anonymous().expect("a name"));
            let drive = NvmeNamespace::open(&url, options).await.expect("it is there");
            // Other work of the machine makes one of them slow, now and then.
            let mut quickest = Duration::MAX;
            for _ in 0..3 {
                let begun = Instant::now();
                drive.read(0, BufMut::for_overwrite(4096).into_vec()).await.expect("read");
                quickest = quickest.min(begun.elapsed());
            }
            drive.close().await;
            quickest
        };
        const SLOW: Duration = Duration::from_millis(400);
        drawer.ok("path", &["2", "slow", "400"]);
        assert!(took(1, 1).await >= SLOW, "the path that is slow");
        assert!(took(0, 1).await < SLOW, "the other one");
        drawer.ok("path", &["2", "up"]);
        assert!(took(1, 1).await < SLOW, "not any more");
        drawer.ok("slow-drive", &["1", "400"]);
        assert!(took(0, 1).await >= SLOW, "the drive that is slow");
        assert!(took(0, 2).await < SLOW, "the other one");
        drawer.ok("slow-drive", &["1", "0"]);
        assert!(took(0, 1).await < SLOW, "not any more");
    });
}

/// Who is done may take the power away: it is told when everything is durable.
#[test]
fn what_was_written_is_durable_once_its_host_is_gone() {
    let place = Box::new();
    // Which takes its time to flush.
    let drawer = Drawer::start(place.dir.path(), "e1", &[IN_MEMORY, &["--model", "slow"]].concat());
    Reactor::new().expect("an io_uring").block_on(async {
        let url: NvmeUrl = drawer.url(1).parse().expect("a URL");
        let open = async || {
            let options = Options::new(Host::anonymous().expect("a name"));
            NvmeNamespace::open(&url, options).await.expect("it is there")
        };
        for number in 1..=20 {
            let drive = open().await;
            let data = Buf::copy_of(&pattern(number, 0));
            let written = drive.write(0, data.clone().into_vec(), Durability::Volatile).await;
            written.expect("written");
            drive.close().await;
            // What was only in the cache is gone.
            drawer.ok("power", &["off"]);
            drawer.ok("power", &["on"]);
            let drive = open().await;
            let into = BufMut::for_overwrite(MIB).into_vec();
            let read = drive.read(0, into).await.expect("read");
            let read: Vec<u8> = read.iter().flat_map(|part| part.to_vec()).collect();
            assert!(read == data[..], "of round {number} something is lost");
            drive.close().await;
        }
    });
}

#[test]
fn an_enclosure_says_how_it_is_and_what_it_refuses() {
    let array = Box::new();
    let at = free_address();
    let drawer = Drawer::start(array.dir.path(), "e1", &[IN_MEMORY, &["--status", &at]].concat());
    let shown = drawer.ok("show", &[]);
    assert!(shown.contains("2 of 2 drives") && shown.contains("path 2"), "{shown}");
    drawer.refused("pull", &["3"], "there is no bay 3: they are 1 to 2");
    drawer.refused("insert", &["1"], "bay 1 has its drive");
    drawer.refused("path", &["9", "down"], "there is no path 9");
    drawer.refused("path", &["9", "ana", "change"], "there is no path 9");
    drawer.refused("power", &["on"], "the power is on");
    drawer.ok("path", &["2", "ana", "inaccessible"]);
    let shown = drawer.ok("show", &[]);
    assert!(shown.contains("up, inaccessible") && shown.contains("up, optimized"), "{shown}");
    drawer.ok("path", &["2", "up"]);
    // Two names of one drive are not two drives.
    let by = [drawer.url_by(0, 1), drawer.url_by(1, 1)];
    let twice = ["create", "far", "--level", "1", &by[0], &by[1]];
    array.refused(&twice, &["are the same drive"]);
    // Found by either address, over both; and what is said of it is what a cluster file takes.
    let url = drawer.enclosure_url();
    let address = url.split(['/', ',']).nth(2).expect("an address");
    let find = |more: &[&str]| {
        let mut command = Command::new(LEVADA);
        command.args(["enclosure", "find"]).args(more).output().expect("it runs")
    };
    let found = said(&find(&[address]));
    let text = found.split_once("for a cluster file:\n\n").expect("an enclosure").1;
    assert!(found.contains("namespace   2  96.0 MiB, blocks of "), "{found}");
    assert!(text.contains(&format!("url = \"{url}\"\ndrives = [\"{{1..2}}\"]")), "{found}");
    let file = format!("[cluster]\nname = \"lab\"\n{text}{MIRRORED}");
    std::fs::write(array.path("lab.toml"), file).expect("written");
    let check = Command::new(LEVADA).args(["check", "-f"]).arg(array.path("lab.toml")).output();
    let check = check.expect("it runs");
    assert!(check.status.success(), "{}", said(&check));
    let json = find(&["--json", address]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json[0]["drives"][1]["has_reservations"], true, "{json}");
    assert!(said(&find(&["127.0.0.1:1"])).contains("Connection refused"));
    assert!(said(&find(&["no host"])).contains("is neither HOST nor HOST:PORT"));
    let ours = ["--host", "nqn.2014-08.org.example:h", "--keys", "a&b", address];
    assert!(said(&find(&ours)).contains("a&b\" cannot stand in the URL"));
    let longest = drawer.order("path", &["2", "slow", "99999999999"]);
    assert!(said(&longest).contains("is not in 0..=3600000"), "{}", said(&longest));
    assert!(shown.contains("0 % used, 100 % spare, 35 °C, 0 media errors"), "{shown}");
    drawer.ok("wear", &["1", "--used", "95", "--spare", "8", "--temperature", "81"]);
    drawer.ok("wear", &["1", "--media-errors", "3"]);
    let shown = drawer.ok("show", &[]);
    assert!(shown.contains("95 % used, 8 % spare, 81 °C, 3 media errors"), "{shown}");
    drawer.refused("wear", &["3", "--used", "1"], "there is no bay 3");
    let impossible = drawer.order("wear", &["1", "--temperature", "65535"]);
    assert!(said(&impossible).contains("is not in -40..=150"), "{}", said(&impossible));
    drawer.ok("wear", &["2", "--temperature", "-5"]);
    assert!(drawer.ok("show", &[]).contains("-5 °C"));
    drawer.ok("slow-drive", &["1", "20"]);
    assert!(drawer.ok("show", &[]).contains(", slow by 20 ms, "));
    drawer.ok("slow-drive", &["1", "0"]);
    drawer.ok("pull", &["2"]);
    drawer.refused("pull", &["2"], "bay 2 is empty");
    let ask = |request: &str| asked(&at, request);
    let answer = ask("GET /bays HTTP/1.1\r\nHost: e1\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let bays: serde_json::Value = serde_json::from_str(body).expect("JSON");
    assert_eq!((&bays[0]["state"], &bays[1]["state"]), (&"warning".into(), &"empty".into()));
    let (drive, pulled) = (&bays[0]["drive"], &bays[1]["drive"]);
    assert_eq!(drive["health"]["used_percent"], 95, "{bays}");
    assert_eq!(drive["health"]["warnings"], serde_json::json!(["spare", "temperature"]), "{bays}");
    assert!(drive["guid"].as_str().is_some_and(|guid| guid.len() == 32), "{bays}");
    assert!(pulled.is_null(), "{bays}");
    let one = ask("GET /bays/1 HTTP/1.1\r\n\r\n");
    let (_, body) = one.split_once("\r\n\r\n").expect("a body");
    assert_eq!(serde_json::from_str::<serde_json::Value>(body).expect("JSON"), bays[0]);
    let none = ask("GET /bays/3 HTTP/1.1\r\n\r\n");
    assert!(none.starts_with("HTTP/1.1 404") && none.contains("/bays/NUMBER"), "{none}");
    let whole = ask("GET / HTTP/1.1\r\n\r\n");
    let (_, body) = whole.split_once("\r\n\r\n").expect("a body");
    let whole: serde_json::Value = serde_json::from_str(body).expect("JSON");
    assert_eq!((&whole["bays"], &whole["has_power"]), (&bays, &true.into()), "{whole}");
    assert!(whole["paths"][0]["address"].is_string() && whole["subsystem"].is_string(), "{whole}");
    let head_only = ask("HEAD /bays?now=1 HTTP/1.1\r\n\r\n");
    assert!(
        head_only.starts_with("HTTP/1.1 200") && head_only.ends_with("\r\n\r\n"),
        "{head_only}"
    );
    assert!(ask("GET /else HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(ask("POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(ask("what\r\n\r\n").starts_with("HTTP/1.1 400"));
    let missing = Command::new(LEVADA)
        .args(["enclosure", "show", "e9"])
        .env("LEVADA_ENCLOSURES_DIR", array.path("enclosures"))
        .output()
        .expect("it runs");
    assert!(said(&missing).contains("no enclosure e9 is served"), "{}", said(&missing));
    let twice = Command::new(LEVADA)
        .args(["enclosure", "serve", "e1", "--path", "127.0.0.1:0", "--ram"])
        .env("LEVADA_ENCLOSURES_DIR", array.path("enclosures"))
        .output()
        .expect("it runs");
    assert!(said(&twice).contains("is served already"), "{}", said(&twice));
}

//! A cluster whose drives are in enclosures on the network: lost paths, cut power, other drives, another server.
//!
//! Needs root, io_uring and /dev/fuse; without them the tests are skipped and say so.

#[path = "../remote/drawer.rs"]
mod drawer;
#[path = "../array/fixture.rs"]
#[allow(dead_code, reason = "arrays on their own are not needed here")]
mod fixture;
#[path = "../support/mod.rs"]
mod support;

use drawer::Drawer;
use std::fs::{self, File};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{Cluster, can_run, signal, wait_until};

/// Without any path a drive is waited for half a minute.
const GONE_WITHIN: Duration = Duration::from_secs(50);
const IN_MEMORY: &[&str] = &["--ram", "--size", "96MiB"];

const ARRAYS: &str = r#"
[[array]]
name = "meta"
level = "raid1"
copies = 3
slice = "32MiB"
[[array]]
name = "data"
level = "raid6"
survives = { drives = 2, enclosures = 1, paths = 1, servers = 1 }
[[filesystem]]
name = "fs"
data = "data"
metadata = "meta"
object_targets = 1
"#;

/// The cluster file over these enclosures, named `e1` and on.
fn file_over(drawers: &[Drawer]) -> String {
    let mut text = "[cluster]\nname = \"NAME\"\n".to_owned();
    for (index, drawer) in drawers.iter().enumerate() {
        let (number, url) = (index + 1, drawer.enclosure_url());
        text += &format!(
            "[[enclosure]]\nname = \"e{number}\"\nurl = \"{url}\"\ndrives = [\"{{1..2}}\"]\n"
        );
    }
    text + ARRAYS
}

fn write_file(cluster: &Cluster, text: &str, name: &str) {
    fs::write(cluster.path("levada.toml"), text.replace("NAME", name)).expect("written");
}

/// A cluster over three enclosures, which are in a directory of their own.
fn over_three(name: &str, more: &[&str]) -> (tempfile::TempDir, Vec<Drawer>, Cluster) {
    let place = tempfile::Builder::new().prefix("levada-drawers-").tempdir().expect("a directory");
    let start = |drawer: &&str| Drawer::start(place.path(), drawer, more);
    let drawers: Vec<Drawer> = ["e1", "e2", "e3"].iter().map(start).collect();
    let cluster = Cluster::new(name, &file_over(&drawers));
    (place, drawers, cluster)
}

fn contents(seed: u32) -> Vec<u8> {
    (0..4_000_000u32).map(|at| (at / 3).wrapping_mul(seed).to_le_bytes()[1]).collect()
}

fn write(path: &Path, seed: u32) {
    let mut file = File::create(path).expect("created");
    file.write_all(&contents(seed)).expect("written");
    file.sync_all().expect("durable");
}

/// As the node has it, and not the kernel's pages.
fn check(cluster: &Cluster, names: &[&str]) {
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["mount", "mnt"]);
    for (seed, name) in names.iter().enumerate() {
        let there = fs::read(cluster.mnt().join(name)).expect("read");
        assert!(there == contents(seed as u32 + 3), "{name}");
    }
}

fn is_healthy(cluster: &Cluster) -> bool {
    cluster.ok(&["status"]).contains(": healthy; node")
}

#[test]
fn a_cluster_outlives_paths_and_an_enclosure() {
    if !can_run() {
        return;
    }
    let (_place, drawers, cluster) = over_three("far", IN_MEMORY);
    let planned = cluster.ok(&["plan"]);
    for part in [
        "enclosure e2: 2 drives, on the network by 2 paths to nqn.",
        "array data: raid6, 4+2 over 6 drives (2 in e1, 2 in e2, 2 in e3)",
        "survives any 2 drives, any 1 enclosure, any 1 path to each enclosure; at least { drives = 2",
        "servers: survives the loss of any; one that reaches the enclosures takes over with this file and `levada up`",
        "far is new: `levada up` formats these drives",
    ] {
        assert!(planned.contains(part), "{part}: {planned}");
    }
    // A layout that survives less than is asked for is no layout.
    let file = fs::read_to_string(cluster.path("levada.toml")).expect("read");
    let asks_more = file.replace("enclosures = 1", "enclosures = 2");
    fs::write(cluster.path("levada.toml"), asks_more).expect("written");
    for order in ["plan", "up"] {
        cluster.refused(&[order], &["2 enclosures, and survives that of 1"]);
    }
    fs::write(cluster.path("levada.toml"), file).expect("written");
    // All paths are looked at, though one is enough.
    let nowhere = " of enclosure e3 does not lead to its drives: ";
    assert!(!planned.contains(nowhere), "{planned}");
    drawers[2].ok("path", &["2", "down"]);
    let planned = cluster.ok(&["plan"]);
    assert!(planned.matches(nowhere).count() == 1, "{planned}");
    drawers[2].ok("path", &["2", "up"]);
    // One may lead to another enclosure, of the same name.
    let elsewhere = tempfile::tempdir().expect("a directory");
    let other = Drawer::start(elsewhere.path(), "e3", IN_MEMORY);
    let file = fs::read_to_string(cluster.path("levada.toml")).expect("read");
    let strays = file.replace(drawers[2].path(1), other.path(1));
    fs::write(cluster.path("levada.toml"), strays).expect("written");
    let planned = cluster.ok(&["plan"]);
    let stray = format!(
        "path {} of enclosure e3 does not lead to its drives: it leads to others than {}",
        other.path(1),
        drawers[2].path(0)
    );
    assert!(planned.contains(&stray), "{planned}");
    fs::write(cluster.path("levada.toml"), file).expect("written");
    drop(other);
    // A drive that is not there says nothing of the paths to the others.
    drawers[2].ok("pull", &["1"]);
    let planned = cluster.refused(&["plan"], &["far is new, and 1 drive is not"]);
    assert!(!planned.contains(nowhere), "{planned}");
    drawers[2].ok("insert", &["1"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    write(&mnt.join("first"), 3);

    // A path goes: nothing fails, nothing waits long, and it is told.
    drawers[0].ok("path", &["1", "down"]);
    let begun = Instant::now();
    write(&mnt.join("second"), 4);
    assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
    let status = cluster.ok(&["status"]);
    assert!(status.contains("! enclosure e1: no path over ") && status.contains("to e1-1, e1-2:"));
    check(&cluster, &["first", "second"]);
    drawers[0].ok("path", &["1", "up"]);
    wait_until("the path is back", || is_healthy(&cluster));

    // A drive wears out: it is told while it lasts.
    drawers[0].ok("wear", &["2", "--used", "95", "--spare", "8"]);
    let worn = "! drive e1-2: 8 % of its spare room is left, and 10 % is the least, 95 % of its endurance is used; \
                `levada drive fail e1-2`, another in its place, and `levada drive replace e1-2`";
    wait_until("the wear is told", || cluster.ok(&["status"]).contains(worn));
    let status: serde_json::Value =
        serde_json::from_str(&cluster.ok(&["status", "--json"])).expect("JSON");
    let drives = status["drives"].as_array().expect("drives");
    let health = |name: &str| {
        let of = drives.iter().find(|drive| drive["name"] == name);
        of.expect("it is listed")["health"].clone()
    };
    let (worn, well) = (health("e1-2"), health("e1-1"));
    assert_eq!(worn["complaints"], serde_json::json!(["low-spare", "worn"]), "{worn}");
    assert_eq!(well["complaints"], serde_json::json!([]), "{well}");
    let shown = cluster.ok(&["drive", "show", "e1-2"]);
    assert!(shown.contains("95 % of its endurance used, spare 8 % (at least 10 %)"), "{shown}");
    assert!(shown.contains("! low-spare, worn") && !shown.contains("e1-1"), "{shown}");
    cluster.refused(&["drive", "show", "nobody"], &["there is no drive nobody"]);
    assert!(well["written_bytes"].as_u64() > Some(1_000_000), "{well}");
    drawers[0].ok("wear", &["2", "--used", "3", "--spare", "100"]);
    wait_until("it is as new", || is_healthy(&cluster));
    let log = fs::read_to_string(cluster.path("state/node.log")).expect("a log");
    for (event, times) in [
        ("a drive is not well", 2),
        ("a drive is well again", 2),
        // Of each drive, however often it was tried.
        ("a path to a namespace is away", 2),
        ("a path to a namespace is back", 2),
    ] {
        assert_eq!(log.matches(event).count(), times, "{log}");
    }

    // An enclosure goes, with what its drives had not flushed.
    // Nobody asks anything of them: that is noticed all the same.
    drawers[1].ok("power", &["off"]);
    let begun = Instant::now();
    let is_told = |what: &str| cluster.ok(&["status"]).contains(what);
    wait_until("they do not count", || is_told("data survives no further loss now"));
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    wait_until("they are out", || is_told("array data is degraded: e2-1, e2-2 out"));
    assert!(begun.elapsed() < GONE_WITHIN, "{:?}", begun.elapsed());
    assert!(is_told("meta survives the loss of any 1 drive now"));
    write(&mnt.join("third"), 5);
    let names = ["first", "second", "third"];
    check(&cluster, &names);
    // It comes back, and is brought into step.
    drawers[1].ok("power", &["on"]);
    wait_until("it is rebuilt", || is_healthy(&cluster));
    cluster.ok(&["scrub", "--watch"]);

    // So it bears the loss of another one, which is away at the start, and comes back later.
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["down"]);
    drawers[2].ok("power", &["off"]);
    let planned = cluster.ok(&["plan"]);
    assert!(
        planned.contains("drives e3-1, e3-2 of enclosure e3 are not there: 127.0.0.1:"),
        "{planned}"
    );
    assert!(planned.contains("`levada up` opens it without 2 drives"), "{planned}");
    let now = "array data survives no further loss now; at least 2 is asked for";
    assert!(planned.contains(now), "{planned}");
    let up = cluster.ok(&["up"]);
    assert!(
        up.contains("needs attention") && up.contains("drives e3-1, e3-2 of enclosure e3: 127."),
        "{up}"
    );
    cluster.ok(&["mount", "mnt"]);
    check(&cluster, &names);
    drawers[2].ok("power", &["on"]);
    wait_until("it is taken back", || is_healthy(&cluster));
    check(&cluster, &names);
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["down"]);
}

/// A cluster file says where enclosures are, and not which drives they have: those come to stand in it with `up`.
#[test]
fn drives_that_the_file_does_not_name_are_found() {
    if !can_run() {
        return;
    }
    let (_place, drawers, cluster) = over_three("found", IN_MEMORY);
    let named = file_over(&drawers).replace("NAME", "found");
    // Of the first not even its subsystem, and only one of its paths.
    let (first, address) =
        (drawers[0].enclosure_url(), format!("nvme+tcp://{}", drawers[0].path(0)));
    let unnamed = named
        .replace("drives = [\"{1..2}\"]\n", "")
        .replace(&format!("{first:?}"), &format!("{address:?} # ours"));
    let at = cluster.path("levada.toml");
    let file = || fs::read_to_string(&at).expect("read");
    fs::write(&at, &unnamed).expect("written");
    let why = ["the drives of enclosure \"e1\" are not named", "`levada plan` asks it"];
    cluster.refused(&["check"], &why);
    let both_ways =
        |to: &str| ["1", "2"].iter().for_each(|path| drop(drawers[1].ok("path", &[path, to])));
    both_ways("down");
    for order in ["plan", "up"] {
        cluster.refused(&[order], &["enclosure \"e2\"", &drawers[1].enclosure_url()]);
    }
    both_ways("up");
    let planned = cluster.ok(&["plan"]);
    let line = |at: usize| {
        let url = drawers[at].enclosure_url();
        format!("enclosure e{}: 2 drives found at {url}, namespaces {{1..2}}\n", at + 1)
    };
    let last = "found is new: `levada up` formats";
    for part in [&line(0), &line(1), &line(2), "`levada up` writes them into ", last] {
        assert!(planned.contains(part), "{part}: {planned}");
    }
    assert_eq!(file(), unnamed, "nothing is changed");
    let said = cluster.ok(&["up"]);
    assert!(said.contains(&line(2)) && said.contains("they stand in "), "{said}");
    let with_comment = format!("{first:?} # ours");
    assert_eq!(file(), named.replace(&format!("{first:?}"), &with_comment));
    wait_until("it is healthy", || is_healthy(&cluster));
    cluster.ok(&["down"]);
    let said = cluster.ok(&["up"]);
    assert!(!said.contains("found at"), "{said}");
    cluster.ok(&["down"]);
    // Those of somebody else are found as well, and taken by nobody: nor do they come to stand in the file.
    let others = unnamed.replace("name = \"found\"", "name = \"other\"\nstate_dir = \"other\"");
    fs::write(&at, &others).expect("written");
    let why = ["e1-1", "`drives` of their enclosure", "levada.toml stays as it is"];
    cluster.refused(&["up"], &why);
    cluster.refused(
        &["up", "--destroy", "found"],
        &["the cluster here is other; nothing was changed"],
    );
    assert_eq!(file(), others);
    // What is wrong elsewhere is told of the text with the drives.
    fs::write(&at, unnamed.replace("\"raid6\"", "\"raid7\"")).expect("written");
    cluster.refused(&["up"], &["raid7", "levada.toml, with the drives that were found:"]);
}

#[test]
fn nothing_is_formatted_for_an_enclosure_that_is_away_and_another_server_takes_over() {
    if !can_run() {
        return;
    }
    let (_place, drawers, cluster) = over_three("pair", IN_MEMORY);
    drawers[2].ok("power", &["off"]);
    cluster.refused(
        &["plan"],
        &["drives e3-1, e3-2 of enclosure e3 are not there", "pair is new, and 2 drives are not"],
    );
    cluster.refused(&["up"], &["drive e3-1", "cannot connect"]);
    drawers[2].ok("power", &["on"]);
    assert!(cluster.ok(&["plan"]).contains("pair is new: "), "no label was written");
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    write(&cluster.mnt().join("first"), 3);
    cluster.ok(&["mount", "--vhost", "guest.sock"]);
    // In the middle of writes, each of which is told when it is durable.
    let told = cluster.path("told");
    let mut writer = Command::new("sh")
        .args(["-c", "n=0; while echo $n >$n.new && sync $n.new; do echo $n; n=$((n+1)); done"])
        .current_dir(cluster.mnt())
        .stdout(File::create(&told).expect("a file"))
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let durable = || fs::read_to_string(&told).expect("text").lines().count();
    wait_until("it writes", || durable() > 3);

    // Another server has its file and nothing else.
    let other = Cluster::new("pair", &file_over(&drawers));
    assert!(other.ok(&["plan"]).contains("pair exists, as the file says"));
    assert!(is_healthy(&cluster), "looking changes nothing");
    let up = other.ok(&["up"]);
    // The mount there has what is not durable, and may come to this server with it.
    assert!(up.contains("pair is up, and needs attention") && up.contains("mdt0 waits"), "{up}");
    // The first one meets that with the next change, stops, and says why.
    wait_until("it has met the other one", || {
        cluster.ok(&["status"]).contains("has stopped: another server has taken its drives over")
    });
    // Whoever asks it for something waits, for what only it could give.
    let mut late = Command::new("touch").arg(cluster.mnt().join("late")).spawn().expect("started");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(late.try_wait().expect("a child"), None, "nobody can tell it anything");
    writer.kill().expect("a child");
    let said = cluster.ok(&["down", "--force"]);
    assert!(said.contains("guest.sock is no longer served"), "{said}");
    for program in [&mut writer, &mut late] {
        wait_until("nobody waits", || program.try_wait().expect("a child").is_some());
    }
    assert!(!late.wait().expect("a child").success(), "it was told that there is no mount");
    assert_eq!(cluster.mount_process(), None);
    wait_until("nobody is waited for", || is_healthy(&other));
    other.ok(&["mount", "mnt"]);
    check(&other, &["first"]);
    for number in 0..durable() {
        let there = fs::read_to_string(other.mnt().join(format!("{number}.new")));
        assert_eq!(there.expect("it was durable"), format!("{number}\n"));
    }
    other.ok(&["umount", "mnt"]);
    other.ok(&["down"]);

    // Made anew: whoever owned the drives before, and however late its epoch, is shut out.
    other.refused(&["up", "--force-format"], &["carry cluster", "--destroy pair"]);
    other.ok(&["up", "--destroy", "pair"]);
    other.ok(&["mount", "mnt"]);
    assert_eq!(fs::read_dir(other.mnt()).expect("a directory").count(), 0);
    other.ok(&["umount", "mnt"]);
    other.ok(&["down"]);
}

/// An address that nobody has a moment ago.
fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").to_string()
}

/// Hosts of volumes have paths to both servers. Here it is an array on two volumes, which is written all the time.
#[test]
fn hosts_of_volumes_go_to_the_server_that_takes_over() {
    if !can_run() {
        return;
    }
    let (_place, drawers, cluster) = over_three("blocks", IN_MEMORY);
    let addresses = [free_address(), free_address()];
    let served_at = |address: &str| {
        format!("{}\n[[export]]\ntenant = \"blue\"\nnvme = [\"{address}\"]\n", file_over(&drawers))
    };
    write_file(&cluster, &served_at(&addresses[0]), "blocks");
    let up = cluster.ok(&["up"]);
    assert!(up.contains("blocks is up: it survives"), "{up}");
    for name in ["blue/v1", "blue/v2"] {
        cluster.ok(&["volume", "create", name, "--size", "24MiB"]);
    }
    let volume = |name: &str| {
        let nqn = format!("nqn.2026-11.io.levada:blocks:blue:{name}");
        format!("nvme+tcp://{}/{nqn}?ns=1", addresses.join(","))
    };
    let volumes = [volume("v1"), volume("v2")];
    let [v1, v2] = volumes.each_ref().map(String::as_str);
    let mut host = fixture::Box::new();
    // Volumes are shown within a second.
    wait_until("its drives are there", || {
        let create = ["create", "host", "--level", "raid1", "--copies", "2", "--force", v1, v2];
        host.run(&create).status.success()
    });
    host.serve(&[v1, v2]);
    let shown = host.file();
    let write = |seed: u32| {
        let mut file = File::options().write(true).open(&shown).expect("open");
        file.write_all(&contents(seed)).expect("written: no error while there is a server");
        file
    };
    write(3).sync_all().expect("durable");

    // Taken over in the middle of writes, none of which is flushed before the other server has it.
    let other = Cluster::new("blocks", &served_at(&addresses[1]));
    let stop = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut seed = 4;
            while !stop.load(Ordering::Relaxed) {
                write(seed);
                seed += 1;
            }
            seed - 1
        });
        std::thread::sleep(Duration::from_millis(500));
        other.ok(&["up"]);
        wait_until("the first server says so", || {
            let status = cluster.ok(&["status"]);
            status.contains("another server has its volumes; hosts are told to go there")
        });
        std::thread::sleep(Duration::from_secs(1));
        stop.store(true, Ordering::Relaxed);
        writing.join().expect("every write was answered")
    });
    assert!(last > 4, "it wrote on");
    let begun = Instant::now();
    File::open(&shown).and_then(|file| file.sync_all()).expect("durable");
    assert!(begun.elapsed() < GONE_WITHIN, "{:?}", begun.elapsed());
    let status = host.json(&["show", v1]);
    assert_eq!(fixture::members(&status, "state"), ["in-sync"; 2], "{status}");
    cluster.ok(&["down", "--force"]);
    let there = fs::read(&shown).expect("read");
    assert!(there[..contents(last).len()] == contents(last), "what was answered is there");
    host.stop();

    // Where too many enclosures are away nobody knows whose the drives are: hosts are to wait, not to give them up.
    drawers[..2].iter().for_each(|drawer| drop(drawer.ok("power", &["off"])));
    wait_until("the second server says so", || {
        let status = other.ok(&["status"]);
        status.contains("an array has stopped, so its volumes have; hosts wait: `levada down`")
    });
    drawers[..2].iter().for_each(|drawer| drop(drawer.ok("power", &["on"])));
    other.refused(&["down"], &["blocks is down, and not in order"]);
    other.ok(&["up"]);
    wait_until("all are back", || is_healthy(&other));
    let volumes = other.ok(&["volume", "list"]);
    assert!(volumes.contains("blue/v1") && volumes.contains("blue/v2"), "{volumes}");
    other.ok(&["down"]);
}

#[test]
fn drives_are_known_by_their_labels_wherever_they_are() {
    if !can_run() {
        return;
    }
    let media = tempfile::Builder::new().prefix("levada-media-").tempdir().expect("a directory");
    let in_files = |name: &str| {
        let dir = media.path().join(name);
        let dir = dir.to_str().expect("plain text").to_owned();
        ["--files".to_owned(), dir, "--size".into(), "96MiB".into()]
    };
    let place = tempfile::Builder::new().prefix("levada-drawers-").tempdir().expect("a directory");
    let start = |name: &str, files: &str| {
        let options = in_files(files);
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        Drawer::start(place.path(), name, &options)
    };
    let mut drawers = vec![start("e1", "e1"), start("e2", "e2"), start("e3", "e3")];
    let cluster = Cluster::new("moved", &file_over(&drawers));
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    write(&cluster.mnt().join("first"), 3);
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["down"]);

    // Other addresses, and drives in each other's bays: nothing to be said.
    drawers.remove(0).stop();
    let bay =
        |drawer: &str, number: u32| media.path().join(drawer).join(format!("bay{number}.img"));
    let aside = media.path().join("aside");
    for (from, to) in
        [(bay("e1", 1), aside.clone()), (bay("e1", 2), bay("e1", 1)), (aside, bay("e1", 2))]
    {
        fs::rename(from, to).expect("moved");
    }
    drawers.insert(0, start("e1", "e1"));
    write_file(&cluster, &file_over(&drawers), "moved");
    assert!(cluster.ok(&["plan"]).contains("moved exists, as the file says"));
    assert!(cluster.ok(&["up"]).contains("moved is up: it survives any 2 drives"));
    cluster.ok(&["mount", "mnt"]);
    check(&cluster, &["first"]);
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["down"]);

    // A copy of a drive in another enclosure: nobody can say which of the two is the drive.
    drawers.remove(2).stop();
    let own = media.path().join("own");
    fs::rename(bay("e3", 2), &own).expect("moved");
    fs::copy(bay("e1", 2), bay("e3", 2)).expect("copied");
    drawers.push(start("e3", "e3"));
    write_file(&cluster, &file_over(&drawers), "moved");
    cluster.refused(&["up"], &["e1-2 and e3-2 are one and the same"]);
    drawers.remove(2).stop();
    fs::rename(own, bay("e3", 2)).expect("moved");
    drawers.push(start("e3", "e3"));
    write_file(&cluster, &file_over(&drawers), "moved");

    // An enclosure that answers with other drives, which are blank: they are not taken for the old ones, and not formatted unless
    // somebody says so.
    drawers.remove(1).stop();
    drawers.insert(1, start("e2", "others"));
    write_file(&cluster, &file_over(&drawers), "moved");
    let said = cluster.ok(&["up"]);
    assert!(said.contains("drives e2-1, e2-2 of enclosure e2: not a drive of Levada"), "{said}");
    assert!(said.contains("array data is degraded: e2-1, e2-2 out"), "{said}");
    cluster.ok(&["mount", "mnt"]);
    check(&cluster, &["first"]);
    for drive in ["e2-1", "e2-2"] {
        cluster.ok(&["drive", "replace", drive]);
    }
    wait_until("they are rebuilt", || is_healthy(&cluster));
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["down"]);

    // A namespace that has shrunk is refused, and with it the other one of its enclosure is not.
    drawers.remove(2).stop();
    File::options()
        .write(true)
        .open(bay("e3", 1))
        .and_then(|file| file.set_len(64 << 20))
        .expect("cut");
    drawers.insert(2, start("e3", "e3"));
    write_file(&cluster, &file_over(&drawers), "moved");
    let said = cluster.ok(&["up"]);
    let shrunk = "drive e3-1: the drive had 100663296 bytes when it was formatted, now 67108864";
    assert!(said.contains(shrunk) && said.contains("array data is degraded: e3-1 out"), "{said}");
    cluster.refused(&["drive", "replace", "e3-1", "--force"], &["e3-1", "nothing was changed"]);
    cluster.ok(&["mount", "mnt"]);
    check(&cluster, &["first"]);
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["down"]);
}

/// Drives that nobody can reserve. The first server stands still rather than being off, and comes back: then its drives tell it.
#[test]
fn a_power_fence_keeps_two_servers_apart_where_drives_cannot() {
    if !can_run() {
        return;
    }
    let more = [IN_MEMORY, &["--no-reservations"]].concat();
    let (_place, drawers, cluster) = over_three("bare", &more);
    cluster.refused(&["up"], &["has no reservations", "power_fence"]);
    let fenced_by = |command: &str| {
        let text = file_over(&drawers);
        text.replacen("[[enclosure]]", &format!("power_fence = \"{command}\"\n[[enclosure]]"), 1)
    };
    write_file(&cluster, &fenced_by("echo >ran"), "bare");
    cluster.ok(&["up"]);
    assert!(!cluster.path("ran").exists(), "nobody can have new drives");
    cluster.ok(&["mount", "mnt"]);
    write(&cluster.mnt().join("first"), 3);
    cluster.ok(&["umount", "mnt"]);
    let node = cluster.node().expect("a node");

    let other = Cluster::new("bare", &fenced_by("echo he answers; exit 3"));
    other.refused(&["up"], &["the power fence", "has failed", "he answers"]);
    assert!(is_healthy(&cluster), "nothing was taken from it");
    let notes = other.path("told");
    let stops = format!("kill -STOP {node}; env | grep ^LEVADA_ >{}", notes.display());
    write_file(&other, &fenced_by(&stops), "bare");
    other.ok(&["up"]);
    let told = fs::read_to_string(&notes).expect("it was run");
    assert!(
        told.contains("LEVADA_NAME=bare\n") && told.contains("LEVADA_LAST_EPOCH=1\n"),
        "{told}"
    );
    other.ok(&["mount", "mnt"]);
    write(&other.mnt().join("second"), 4);
    signal("-CONT", node);
    wait_until("it is told by the drives", || {
        cluster.ok(&["status"]).contains("has stopped: another server has taken its drives over")
    });
    // Locks and what is in memory need no drive: nobody may be told of those, beside the other server.
    let status = cluster.ok(&["status"]);
    let (_, at) = status.split_once(", at ").expect("where its clients find it");
    let at = at.lines().next().expect("a line").to_owned();
    wait_until("its clients are answered no more", || TcpStream::connect(&at).is_err());
    check(&other, &["first", "second"]);
    assert!(is_healthy(&other));
    cluster.ok(&["down", "--force"]);
    other.ok(&["umount", "mnt"]);
    other.ok(&["down"]);
}

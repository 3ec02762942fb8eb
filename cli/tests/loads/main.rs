//! Loads that nobody here wrote, on a mount, while drives fail and the node is killed: `stress-ng`'s file system class,
//! `dbench`, and `fio` that reads back and checks what it wrote. No program may see an error.
//!
//! `make test` installs them (`scripts/suites`). `LEVADA_LOAD_SECONDS=n`: how long each load takes, 10 unless told;
//! `make soak` takes minutes, an hour with LONG=1. Needs root, io_uring and /dev/fuse.

#[path = "../support/mod.rs"]
mod support;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::{Cluster, TINY, can_run, said, signal};

/// Of the class, what is about no file system (binderfs), and what FUSE does not carry (FIEMAP, fs-verity).
const NOT_STRESSED: &str = "binderfs,fiemap,verity";
/// Stressors that are left.
const STRESSORS: u64 = 44;
/// Between two kills of the node.
const KILLED_EVERY: Duration = Duration::from_secs(7);
/// What a load may take beyond its time: it lays out files before, and checks them after.
const GRACE: Duration = Duration::from_secs(120);

fn seconds() -> u64 {
    std::env::var("LEVADA_LOAD_SECONDS")
        .map_or(10, |text| text.parse().expect("a whole number of seconds"))
}

/// `None`, and says so, where the programs are not known to be installed.
fn mounted(name: &str) -> Option<Cluster> {
    if !can_run() || std::env::var_os("LEVADA_TOOLS").is_none() {
        eprintln!("skipped: not run by scripts/test, which installs the programs");
        return None;
    }
    let cluster = Cluster::new(name, &TINY.replace("72MiB", "384MiB").replace("25MiB", "60MiB"));
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    Some(cluster)
}

fn start(dir: &Path, program: &str, arguments: &[&str]) -> Child {
    let mut program = Command::new(program);
    program.args(arguments).current_dir(dir).stdin(Stdio::null());
    program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
}

/// Reads all that `pipe` gives, on a thread: who writes more than it holds would wait for ever.
fn read(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        bytes
    })
}

/// Waits for `load`; meanwhile the node is killed again and again, and two drives fail.
fn disturbed(cluster: &Cluster, mut load: Child) -> Output {
    let (begun, limit) = (Instant::now(), Duration::from_secs(seconds()) + GRACE);
    let mut next = KILLED_EVERY;
    let mut fail = ["d1", "d4"].into_iter();
    let (stdout, stderr) = (read(load.stdout.take()), read(load.stderr.take()));
    let status = loop {
        if let Some(status) = load.try_wait().expect("a child") {
            break status;
        }
        if begun.elapsed() > limit {
            let _ = load.kill();
            panic!("it does not end");
        }
        if begun.elapsed() > next {
            next = begun.elapsed() + KILLED_EVERY;
            signal("-KILL", cluster.node().expect("it runs"));
            cluster.ok(&["up"]);
            if let Some(drive) = fail.next() {
                cluster.ok(&["drive", "fail", drive]);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let whole = |reader: JoinHandle<Vec<u8>>| reader.join().expect("read");
    Output { status, stdout: whole(stdout), stderr: whole(stderr) }
}

fn must_pass(what: &str, output: &Output) {
    assert!(output.status.success(), "{what}: {}", said(output));
}

fn scrubbed(cluster: &Cluster) {
    let scrub = cluster.ok(&["scrub", "--watch"]);
    assert!(scrub.matches(" 0 beyond repair").count() == 2, "{scrub}");
}

#[test]
#[ignore = "takes minutes: make soak"]
fn stress_ng_passes() {
    let Some(cluster) = mounted("stress-ng") else { return };
    let each = (seconds() / STRESSORS).max(1).to_string();
    let arguments = ["--class", "filesystem", "--sequential", "2", "--exclude", NOT_STRESSED];
    let how = ["--verify", "--timeout", &each, "--temp-path", "."];
    let load = start(&cluster.mnt(), "stress-ng", &[&arguments[..], &how[..]].concat());
    let output = load.wait_with_output().expect("its output");
    must_pass("stress-ng", &output);
    scrubbed(&cluster);
}

#[test]
fn dbench_passes() {
    let Some(cluster) = mounted("dbench") else { return };
    let load = start(
        &cluster.mnt(),
        "dbench",
        &["-c", "/usr/share/dbench/client.txt", "-t", &seconds().to_string(), "4"],
    );
    let output = disturbed(&cluster, load);
    must_pass("dbench", &output);
    let said = said(&output);
    println!("{}", said.lines().last().unwrap_or_default());
    // The first semaphore of a machine has the number 0, which dbench takes for none.
    let failures =
        said.lines().filter(|line| line.contains("failed") && !line.contains("semaphore"));
    assert_eq!(failures.count(), 0, "{said}");
    scrubbed(&cluster);
}

#[test]
fn fio_reads_what_it_wrote() {
    let Some(cluster) = mounted("fio") else { return };
    let again_and_again = format!(
        "while ((SECONDS < {})); do fio --randseed=$RANDOM$RANDOM {}; done",
        seconds(),
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/loads/verify.fio")
    );
    let load = start(&cluster.mnt(), "bash", &["-euc", &again_and_again]);
    let output = disturbed(&cluster, load);
    must_pass("fio", &output);
    scrubbed(&cluster);
}

/// Ended when dropped: what waits for a mount ends with that.
struct Load(Child);

impl Load {
    fn fio(dir: &Path, engine: &str) -> Self {
        let engine = format!("--ioengine={engine}");
        let what = ["--name=load", "--filename=file", "--rw=randwrite", "--bs=4k", "--size=1m"];
        let how = [&*engine, "--thread", "--time_based", "--runtime=60", "--output=/dev/null"];
        Self(start(dir, "fio", &[&what[..], &how[..]].concat()))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One mount writes the file that is mapped and changed on another, which so takes pages back all the time. A thread of that
/// one, waiting in the kernel for what only its process could write, would keep the connection from ending with it.
#[test]
fn a_mount_that_is_killed_while_it_takes_pages_back_is_gone() {
    let Some(cluster) = mounted("killed") else { return };
    let (mapped, other) = (cluster.mnt(), cluster.path("other"));
    std::fs::create_dir(&other).expect("made");
    cluster.ok(&["mount", "other"]);
    for round in 0..8 {
        std::fs::write(mapped.join("file"), vec![0; 1 << 20]).expect("written");
        let loads = [Load::fio(&mapped, "mmap"), Load::fio(&other, "psync")];
        std::thread::sleep(Duration::from_millis(1000 + round * 70));
        let process = cluster.mount_process().expect("it runs");
        signal("-KILL", process);
        let begun = Instant::now();
        while Path::new("/proc").join(process.to_string()).exists() {
            assert!(begun.elapsed() < Duration::from_secs(10), "round {round}: it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(loads);
        cluster.refused(&["umount", "mnt"], &["before everything was durable"]);
        cluster.ok(&["mount", "mnt"]);
    }
    cluster.ok(&["down"]);
}

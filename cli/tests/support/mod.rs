//! A cluster for tests of the program: its files in a directory of its own, all gone at the end.
#![allow(dead_code)] // Each test uses a part of it.

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const LEVADA: &str = env!("CARGO_BIN_EXE_levada");
/// Long enough for anything that ends at all.
pub const LIMIT: Duration = Duration::from_secs(60);

pub const TINY: &str = r#"
[cluster]
name = "NAME"
[drives]
size = "72MiB"
[[enclosure]]
name = "e0"
drives = ["d{0..1}.img"]
[[enclosure]]
name = "e1"
drives = ["d{2..3}.img"]
[[enclosure]]
name = "e2"
drives = ["d{4..5}.img"]
[[enclosure]]
name = "e3"
drives = ["d{6..7}.img"]
[[array]]
name = "meta"
level = "raid1"
copies = 3
slice = "25MiB"
[[array]]
name = "data"
level = "raid6"
data = 4
spares = 2
[[filesystem]]
name = "fs"
data = "data"
metadata = "meta"
object_targets = 1
"#;

/// A directory with a cluster file, and whatever runs on it; all gone at the end.
pub struct Cluster {
    pub dir: TempDir,
}

impl Cluster {
    pub fn new(name: &str, text: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("levada-rough-").tempdir().expect("a directory");
        fs::write(dir.path().join("levada.toml"), text.replace("NAME", name)).expect("written");
        fs::create_dir(dir.path().join("mnt")).expect("made");
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn mnt(&self) -> PathBuf {
        self.path("mnt")
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.run_within(LIMIT, arguments)
    }

    /// As [`Self::run`], of what may take longer.
    pub fn run_within(&self, limit: Duration, arguments: &[&str]) -> Output {
        let mut child = Command::new(LEVADA)
            .args(arguments)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let begun = Instant::now();
        while child.try_wait().expect("a child").is_none() {
            if begun.elapsed() > limit {
                let _ = child.kill();
                panic!("levada {arguments:?} does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().expect("its output")
    }

    /// What it printed; it must succeed.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = said(&output);
        assert!(output.status.success(), "levada {arguments:?}: {said}");
        said
    }

    /// Whether it succeeds.
    pub fn ok_or_not(&self, arguments: &[&str]) -> bool {
        self.run(arguments).status.success()
    }

    /// What it said; it must fail, saying all of `parts` and never panicking.
    pub fn refused(&self, arguments: &[&str], parts: &[&str]) -> String {
        let output = self.run(arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "levada {arguments:?}: {said}");
        for part in parts {
            assert!(said.contains(part), "levada {arguments:?} does not say {part:?}: {said}");
        }
        said
    }

    pub fn node(&self) -> Option<u32> {
        fs::read_to_string(self.path("state/node.lock")).ok()?.trim().parse().ok()
    }

    /// The process of the mount, by its command line, which names its directory.
    pub fn mount_process(&self) -> Option<u32> {
        mount_processes(&self.mnt()).next()
    }
}

impl Drop for Cluster {
    /// Starts no program: this process may have files open in a mount whose node is away, and whoever closes them, as a
    /// child does when it begins, may wait for it.
    fn drop(&mut self) {
        mount_processes(self.dir.path()).for_each(kill);
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        for target in mounts.lines().filter_map(|line| line.split(' ').nth(1)) {
            if Path::new(target).starts_with(self.dir.path()) {
                let _ = unmount(target, UnmountFlags::DETACH);
            }
        }
        self.node().into_iter().for_each(kill);
    }
}

/// Of mounts on `dir` or below it.
fn mount_processes(dir: &Path) -> impl Iterator<Item = u32> {
    let dir = dir.to_str().expect("plain text").to_owned();
    fs::read_dir("/proc").expect("readable").flatten().filter_map(move |process| {
        let line = fs::read(process.path().join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).into_owned();
        (line.contains("--foreground") && line.contains(&dir))
            .then(|| process.file_name().to_str()?.parse().ok())?
    })
}

/// At once, and without a program that does it.
pub fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
}

pub fn said(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    let said = String::from_utf8_lossy(&both).into_owned();
    assert!(!said.contains("panicked"), "{said}");
    said
}

pub fn signal(which: &str, pid: u32) {
    let _ = Command::new("kill").arg(which).arg(pid.to_string()).stderr(Stdio::null()).status();
}

/// Waits until `done`, within the limit.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn can_run() -> bool {
    let root = fs::metadata("/proc/self").is_ok_and(|meta| {
        use std::os::unix::fs::MetadataExt;
        meta.uid() == 0
    });
    let fuse = Path::new("/dev/fuse").exists();
    if !(root && fuse) {
        eprintln!("skipped: needs root and /dev/fuse");
    }
    root && fuse
}

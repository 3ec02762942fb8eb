//! An enclosure of two bays for tests, served by the program.
#![allow(dead_code)] // Each test uses a part of it.

use crate::fixture::run;
use crate::support::{LEVADA, LIMIT, said, signal};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// An enclosure that is served. Dropped, it ends.
pub struct Drawer {
    name: String,
    bays: u32,
    run_dir: PathBuf,
    process: Child,
    /// Addresses of its paths, and its subsystem.
    paths: Vec<String>,
    subsystem: String,
}

impl Drawer {
    /// One of two bays and two paths, with what it needs in `dir`.
    pub fn start(dir: &Path, name: &str, more: &[&str]) -> Self {
        Self::with_bays(2, dir, name, more)
    }

    /// One of so many bays.
    pub fn with_bays(bays: u32, dir: &Path, name: &str, more: &[&str]) -> Self {
        let any = ["127.0.0.1:0".to_owned(), "127.0.0.1:0".to_owned()];
        Self::try_start(bays, dir, name, &any, more).expect("it says where it is")
    }

    /// `None`: it has ended at once.
    fn try_start(
        bays: u32,
        dir: &Path,
        name: &str,
        paths: &[String],
        more: &[&str],
    ) -> Option<Self> {
        let run_dir = dir.join("enclosures");
        let log = File::options().create(true).append(true).open(dir.join("enclosures.log"));
        let mut process = Command::new(LEVADA)
            .args(["enclosure", "serve", name, "--bays", &bays.to_string()])
            .args(paths.iter().flat_map(|path| ["--path", path]))
            .args(more)
            .current_dir(dir)
            .env("LEVADA_ENCLOSURES_DIR", &run_dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.expect("a log"))
            .spawn()
            .expect("the program starts");
        let mut lines = BufReader::new(process.stdout.take().expect("its output")).lines();
        let mut paths = Vec::new();
        let mut subsystem = String::new();
        for _ in 0..2 {
            let Some(line) = lines.next() else {
                process.wait().expect("it ends");
                return None;
            };
            let line = line.expect("text");
            let place = line.strip_prefix("nvme+tcp://").expect("a URL");
            let (address, rest) = place.split_once('/').expect("a subsystem");
            paths.push(address.to_owned());
            subsystem = rest.split_once(": enclosure").expect("what it is").0.to_owned();
        }
        Some(Self { name: name.to_owned(), bays, run_dir, process, paths, subsystem })
    }

    /// Kills it, and starts it again where it was.
    pub fn kill(self, dir: &Path, more: &[&str]) -> Self {
        let (name, bays, paths) = (self.name.clone(), self.bays, self.paths.clone());
        drop(self);
        let begun = Instant::now();
        loop {
            if let Some(again) = Self::try_start(bays, dir, &name, &paths, more) {
                return again;
            }
            // The kernel may hold the locks of the dead one for a moment.
            assert!(begun.elapsed() < LIMIT, "{name} does not start again");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The process that serves it.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// It may have so many more descriptors than it has.
    pub fn leave_descriptors(&self, more: u64) {
        let used = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs").count();
        let few = Rlimit { current: Some(used as u64 + more), ..getrlimit(Resource::Nofile) };
        prlimit(Pid::from_raw(self.pid().cast_signed()), Resource::Nofile, few).expect("lowered");
    }

    /// The address of a path.
    pub fn path(&self, path: usize) -> &str {
        &self.paths[path]
    }

    /// As a cluster file names it.
    pub fn enclosure_url(&self) -> String {
        format!("nvme+tcp://{}/{}", self.paths.join(","), self.subsystem)
    }

    pub fn url(&self, bay: usize) -> String {
        format!("{}?ns={bay}", self.enclosure_url())
    }

    /// The same over one of its paths.
    pub fn url_by(&self, path: usize, bay: usize) -> String {
        format!("nvme+tcp://{}/{}?ns={bay}", self.paths[path], self.subsystem)
    }

    /// What there is at the address of its first path.
    pub fn found(&self) -> String {
        said(&run(Command::new(LEVADA).args(["enclosure", "find", &self.paths[0]]), LIMIT))
    }

    pub fn order(&self, order: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(LEVADA);
        command.args(["enclosure", order, &self.name]).args(arguments);
        command.env("LEVADA_ENCLOSURES_DIR", &self.run_dir);
        run(&mut command, LIMIT)
    }

    pub fn ok(&self, order: &str, arguments: &[&str]) -> String {
        let output = self.order(order, arguments);
        assert!(output.status.success(), "{order} {arguments:?}: {}", said(&output));
        said(&output)
    }

    pub fn refused(&self, order: &str, arguments: &[&str], part: &str) {
        let output = self.order(order, arguments);
        let said = said(&output);
        assert!(output.status.code() == Some(1) && said.contains(part), "{order}: {said}");
    }
}

impl Drawer {
    /// Told to stop, as a service manager would: what it has in files can be opened again.
    pub fn stop(mut self) {
        signal("-TERM", self.process.id());
        let begun = Instant::now();
        let ended = loop {
            if let Some(status) = self.process.try_wait().expect("a child") {
                break status;
            }
            assert!(begun.elapsed() < LIMIT, "{} does not end", self.name);
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(ended.success(), "{}: {ended}", self.name);
    }
}

impl Drop for Drawer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

//! Drives in a directory of their own, and whatever runs on them: all gone at the end, in whatever state a test leaves it.
//!
//! What always holds: nothing here waits without a limit, and nothing is killed or detached that was not started here.

use crate::support::{LEVADA, LIMIT, said, wait_until};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What programs see of the array.
pub const FILE: &str = "array.raw";

pub struct Box {
    pub dir: TempDir,
    server: Option<Child>,
    loops: Vec<String>,
    mounts: Vec<PathBuf>,
}

/// Runs a command to its end; one that takes too long is killed, and left where it cannot be.
pub fn run(command: &mut Command, limit: Duration) -> Output {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    // Read meanwhile: what says more than a pipe holds would never end.
    let mut pipes = (child.stdout.take(), child.stderr.take());
    let (done, outputs) = channel();
    std::thread::spawn(move || {
        let read = |pipe: &mut dyn std::io::Read| {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            bytes
        };
        let errors = std::thread::spawn(move || pipes.1.as_mut().map(|pipe| read(pipe)));
        let output = pipes.0.as_mut().map(|pipe| read(pipe)).unwrap_or_default();
        let errors = errors.join().ok().flatten().unwrap_or_default();
        let _ = done.send((output, errors));
    });
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if begun.elapsed() > limit {
            let _ = child.kill();
            panic!("{command:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let (stdout, stderr) = outputs.recv_timeout(limit).unwrap_or_default();
    Output { status, stdout, stderr }
}

/// Runs a program of the system, which must succeed.
pub fn sh(words: &[&str]) -> String {
    let output = run(Command::new(words[0]).args(&words[1..]), LIMIT);
    let said =
        String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert!(output.status.success(), "{words:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Box {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("levada-array-").tempdir().expect("a directory");
        Self { dir, server: None, loops: Vec::new(), mounts: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn file(&self) -> PathBuf {
        self.path(FILE)
    }

    /// Makes a blank drive.
    pub fn drive(&self, name: &str, bytes: u64) {
        File::create(self.path(name)).and_then(|file| file.set_len(bytes)).expect("made");
    }

    fn levada(&self, arguments: &[&str]) -> Command {
        self.program(&[&["array"], arguments].concat())
    }

    fn program(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(LEVADA);
        command.args(arguments).current_dir(self.dir.path());
        command.env("LEVADA_ARRAYS_DIR", self.path("run"));
        command
    }

    /// A command that is none of `levada array`.
    #[allow(dead_code, reason = "not every test has such")]
    pub fn run_other(&self, arguments: &[&str]) -> Output {
        run(&mut self.program(arguments), LIMIT)
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        run(&mut self.levada(arguments), LIMIT)
    }

    /// One that goes on meanwhile.
    pub fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.levada(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("the program starts")
    }

    /// What it printed; it must succeed.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = said(&output);
        assert!(output.status.success(), "levada array {arguments:?}: {said}");
        said
    }

    /// What it said; it must fail, saying all of `parts` and never panicking.
    pub fn refused(&self, arguments: &[&str], parts: &[&str]) -> String {
        let output = self.run(arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "levada array {arguments:?}: {said}");
        for part in parts {
            assert!(
                said.contains(part),
                "levada array {arguments:?} does not say {part:?}: {said}"
            );
        }
        said
    }

    /// With `--json`: the one line on its standard output.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let (command, rest) = arguments.split_first().expect("a command");
        let output = self.run(&[&[*command, "--json"], rest].concat());
        assert!(output.status.success(), "levada array {arguments:?}: {}", said(&output));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text.lines().count(), 1, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// Starts a process that serves the array, and waits until it is ready.
    pub fn serve(&mut self, arguments: &[&str]) {
        self.serve_as(&["--at", FILE], FILE, arguments);
    }

    /// The same, shown as `shows` says, of which the first line that it prints has `place`.
    pub fn serve_as(&mut self, shows: &[&str], place: &str, arguments: &[&str]) {
        let log = File::options().create(true).append(true).open(self.path("serve.log"));
        let mut command = self.levada(&[&["serve"], shows, arguments].concat());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log.expect("a log"));
        let mut child = command.spawn().expect("the program starts");
        let output = child.stdout.take().expect("its output");
        self.server = Some(child);
        let (sender, line) = channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = BufReader::new(output).read_line(&mut text);
            let _ = sender.send(text);
        });
        let text = line.recv_timeout(LIMIT).expect("it says something or ends");
        assert!(text.contains(place) && text.contains(" bytes, array "), "{text}: {}", self.log());
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("serve.log")).unwrap_or_default()
    }

    pub fn server(&self) -> u32 {
        self.server.as_ref().expect("it serves").id()
    }

    pub fn signal(&self, which: &str) {
        sh(&["kill", which, &self.server().to_string()]);
    }

    /// Waits for the end of the serving process; true when it ended well.
    pub fn ended(&mut self) -> bool {
        let mut child = self.server.take().expect("it serves");
        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait().expect("a child") {
                return status.success();
            }
            if begun.elapsed() > LIMIT {
                self.server = Some(child);
                panic!("it does not end: {}", self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Told to stop, as a service manager would.
    pub fn stop(&mut self) {
        self.signal("-TERM");
        assert!(self.ended(), "{}", self.log());
    }

    pub fn kill(&mut self) {
        self.signal("-KILL");
        assert!(!self.ended());
    }

    /// A loop device over the served file.
    pub fn attach(&mut self) -> String {
        let file = self.file();
        let file = file.to_str().expect("plain text");
        let device =
            sh(&["losetup", "--find", "--show", "--direct-io=on", "--sector-size", "4096", file]);
        let device = device.trim().to_owned();
        self.loops.push(device.clone());
        device
    }

    pub fn detach(&mut self, device: &str) {
        sh(&["losetup", "-d", device]);
        self.loops.retain(|other| other != device);
    }

    pub fn mount(&mut self, device: &str) -> PathBuf {
        let dir = self.path("mnt");
        let _ = std::fs::create_dir(&dir);
        sh(&["mount", device, dir.to_str().expect("plain text")]);
        self.mounts.push(dir.clone());
        dir
    }

    pub fn umount(&mut self) {
        let dir = self.mounts.pop().expect("mounted");
        // A process that another test is just starting holds what was open here when it began, until it becomes its program.
        let mut unmounted = Ok(());
        wait_until("nobody uses the mount", || {
            unmounted = unmount(&dir, UnmountFlags::empty());
            unmounted != Err(Errno::BUSY)
        });
        unmounted.expect("unmounts");
    }

    /// Out of the tree at once, whatever becomes of its users.
    pub fn umount_lazily(&mut self) {
        let dir = self.mounts.pop().expect("mounted");
        unmount(&dir, UnmountFlags::DETACH).expect("detached");
    }
}

impl Drop for Box {
    fn drop(&mut self) {
        for dir in self.mounts.drain(..) {
            let _ = unmount(&dir, UnmountFlags::DETACH);
        }
        // With its server gone, what a loop device still has to write fails rather than waits.
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let begun = Instant::now();
            while matches!(server.try_wait(), Ok(None)) && begun.elapsed() < LIMIT {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        for device in self.loops.drain(..) {
            let detach =
                Command::new("losetup").args(["-d", &device]).stderr(Stdio::null()).spawn();
            if let Ok(mut child) = detach {
                let begun = Instant::now();
                while matches!(child.try_wait(), Ok(None)) && begun.elapsed() < LIMIT {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        let _ = unmount(self.file(), UnmountFlags::DETACH);
    }
}

/// The members of what `--json` showed, by a field.
pub fn members<'a>(status: &'a Value, field: &str) -> Vec<&'a Value> {
    status["members"].as_array().expect("members").iter().map(|member| &member[field]).collect()
}

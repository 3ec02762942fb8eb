//! A cluster in a box on volatile drives, one mount, and the means to kill its node.
//!
//! Whatever happens, nothing is left behind: when this is dropped, and when a part of the test
//! takes longer than it may, the mount and the node are killed by their process ids, the mount
//! point is released, and the files are removed.

use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

const LEVADA: &str = env!("CARGO_BIN_EXE_levada");
/// No command takes longer.
const COMMAND_LIMIT: Duration = Duration::from_secs(100);
/// Lines of a log that are shown after a failure.
const LOG_LINES: usize = 25;

/// Small drives, so that the cleaner works; their indexes have room for the small appends of long runs.
fn cluster_file(seed: u64) -> String {
    let mut text = format!(
        "[cluster]\nname = \"kill\"\n\n[drives]\nsize = \"384MiB\"\n\n\
         [testing]\nwrapper = \"volatile\"\nseed = {}\n\n\
         [[array]]\nname = \"meta\"\nlevel = \"raid1\"\ncopies = 3\nslice = \"160MiB\"\n\n\
         [[array]]\nname = \"data\"\nlevel = \"raid6\"\ndata = 8\nspares = 2\n\n\
         [[filesystem]]\nname = \"fs\"\ndata = \"data\"\nmetadata = \"meta\"\n",
        seed % 1_000_000
    );
    for shelf in 0..6 {
        text += &format!(
            "\n[[enclosure]]\nname = \"shelf{shelf}\"\ndrives = [\"drives/d{:02}.img\", \"drives/d{:02}.img\"]\n",
            2 * shelf,
            2 * shelf + 1
        );
    }
    text
}

pub struct BoxUnderTest {
    dir: PathBuf,
    mount: Option<Child>,
    /// The moment by which all must be over; none when it is.
    deadline: Arc<(Mutex<Option<Instant>>, Condvar)>,
}

impl BoxUnderTest {
    pub fn new(parent: &Path, seed: u64) -> Result<Self> {
        fs::create_dir_all(parent)?;
        let dir = fs::canonicalize(parent)?.join(format!("kill-{}", std::process::id()));
        fs::create_dir_all(dir.join("mnt"))?;
        let rig = Self {
            dir: dir.clone(),
            mount: None,
            deadline: Arc::new((Mutex::new(Some(Instant::now() + COMMAND_LIMIT)), Condvar::new())),
        };
        let deadline = Arc::clone(&rig.deadline);
        std::thread::spawn(move || watch(&deadline, &dir));
        fs::write(rig.cluster(), cluster_file(seed))?;
        Ok(rig)
    }

    fn cluster(&self) -> PathBuf {
        self.dir.join("levada.toml")
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.join("mnt")
    }

    /// From now on so much time is left before everything is killed.
    pub fn patience(&self, time: Duration) {
        *self.deadline.0.lock().expect("not poisoned") = Some(Instant::now() + time);
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(LEVADA);
        command.arg("-f").arg(self.cluster()).args(arguments).stdin(Stdio::null());
        command
    }

    /// Runs a command of `levada` to its end; what it printed.
    pub fn levada(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.command(arguments);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let told = finish(child).with_context(|| format!("levada {}", arguments.join(" ")))?;
        ensure!(told.success, "levada {}: {}", arguments.join(" "), told.errors.trim());
        Ok(told.output)
    }

    pub fn up(&self) -> Result<()> {
        let told = self.levada(&["up", "--no-mounts"])?;
        ensure!(!told.contains("already"), "a dead node passed for a running one: {told}");
        Ok(())
    }

    /// Starts the node and kills it so much later, wherever it is then.
    pub fn up_killed_after(&self, delay: Duration) -> Result<()> {
        let mut command = self.command(&["up", "--no-mounts"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        sleep(delay);
        if let Some(pid) = node_pid(&self.dir) {
            kill(pid)?;
        }
        // It fails when its node was killed early; looked for too early, the node came up.
        finish(child)?;
        match node_pid(&self.dir) {
            Some(pid) => kill(pid),
            None => Ok(()),
        }
    }

    /// The power cut.
    pub fn kill_node(&self) -> Result<()> {
        let pid = node_pid(&self.dir).context("the node is gone before it was killed")?;
        kill(pid)
    }

    pub fn mount(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.dir.join("mount.log"))?;
        let mut command = self.command(&["mount", "--foreground"]);
        let mut child = command.arg(self.mnt()).stdout(Stdio::piped()).stderr(log).spawn()?;
        let output = child.stdout.take().context("no output")?;
        self.mount = Some(child);
        fs::write(self.dir.join("mount.pid"), self.mount_pid().to_string())?;
        let ready = BufReader::new(output).lines().any(|line| line.is_ok_and(|l| l == "ready"));
        ensure!(ready, "the mount ended before it served");
        Ok(())
    }

    fn mount_pid(&self) -> u32 {
        self.mount.as_ref().map_or(0, Child::id)
    }

    /// The end of the whole machine: node and mount die with all that was not synced.
    pub fn kill_node_and_mount(&mut self, mount_first: bool) -> Result<()> {
        let mut mount = self.mount.take().context("never mounted")?;
        if mount_first {
            mount.kill()?;
        }
        self.kill_node()?;
        mount.kill()?;
        mount.wait()?;
        fs::remove_file(self.dir.join("mount.pid"))?;
        let status = Command::new("umount").arg("-l").arg(self.mnt()).status()?;
        ensure!(status.success(), "the dead mount could not be taken away");
        Ok(())
    }

    /// The mount's process must outlive every kill of the node.
    pub fn still_mounted(&mut self) -> Result<()> {
        let mount = self.mount.as_mut().context("never mounted")?;
        let ended = mount.try_wait()?;
        ensure!(ended.is_none(), "the mount's process ended: {ended:?}");
        Ok(())
    }

    pub fn umount(&mut self) -> Result<()> {
        let mnt = self.mnt();
        self.levada(&["umount", mnt.to_str().context("an odd path")?])?;
        let mount = self.mount.take().context("never mounted")?;
        let told = finish(mount)?;
        ensure!(told.success, "the mount's process failed at the end");
        fs::remove_file(self.dir.join("mount.pid"))?;
        Ok(())
    }

    /// What df says is free, in MiB.
    pub fn free_mib(&self) -> Result<u64> {
        let space = rustix::fs::statvfs(self.mnt())?;
        Ok((space.f_bavail * space.f_frsize) >> 20)
    }

    /// The ends of the logs, for people.
    pub fn tell_logs(&self) {
        let status = self.levada(&["status"]).unwrap_or_else(|error| format!("{error:#}"));
        println!("--- levada status\n{status}");
        tell_logs(&self.dir);
    }
}

impl Drop for BoxUnderTest {
    fn drop(&mut self) {
        if let Ok(mut deadline) = self.deadline.0.lock() {
            *deadline = None;
            self.deadline.1.notify_all();
        }
        clean_up(&self.dir);
        if let Some(mount) = &mut self.mount {
            let _ = mount.wait();
        }
    }
}

/// Ends the whole test when its time is over: whoever hangs in the mount cannot do it.
fn watch(deadline: &(Mutex<Option<Instant>>, Condvar), dir: &Path) {
    let mut until = deadline.0.lock().expect("not poisoned");
    while let Some(at) = *until {
        let left = at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            eprintln!("kill_rounds: out of time; everything is killed");
            tell_logs(dir);
            clean_up(dir);
            std::process::exit(1);
        }
        until = deadline
            .1
            .wait_timeout(until, left.min(Duration::from_secs(1)))
            .expect("not poisoned")
            .0;
    }
}

fn clean_up(dir: &Path) {
    let pid = fs::read_to_string(dir.join("mount.pid")).ok();
    if let Some(pid) = pid.and_then(|text| text.trim().parse().ok())
        && is_ours(pid, dir)
    {
        let _ = kill(pid);
    }
    let _ = Command::new("umount").arg("-l").arg(dir.join("mnt")).stderr(Stdio::null()).status();
    if let Some(pid) = node_pid(dir) {
        let _ = kill(pid);
    }
    if std::env::var_os("LEVADA_KILL_KEEP").is_none() {
        let _ = fs::remove_dir_all(dir);
    }
}

fn tell_logs(dir: &Path) {
    for log in ["state/node.log", "mount.log"] {
        let text = fs::read_to_string(dir.join(log)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        println!("--- the end of {log}");
        for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
            println!("{line}");
        }
    }
}

/// The process that holds this very box's lock, if it lives.
fn node_pid(dir: &Path) -> Option<u32> {
    let pid = fs::read_to_string(dir.join("state/node.lock")).ok()?.trim().parse().ok()?;
    is_ours(pid, dir).then_some(pid)
}

/// True when that process was started for this box: process ids are used again.
fn is_ours(pid: u32, dir: &Path) -> bool {
    let cluster = dir.join("levada.toml");
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
        line.split(|byte| *byte == 0).any(|word| word == cluster.as_os_str().as_encoded_bytes())
    })
}

fn kill(pid: u32) -> Result<()> {
    let status = Command::new("kill").args(["-9", &pid.to_string()]).status()?;
    ensure!(status.success(), "process {pid} could not be killed");
    Ok(())
}

struct Told {
    success: bool,
    output: String,
    errors: String,
}

/// Waits for a process, but not for ever.
fn finish(mut child: Child) -> Result<Told> {
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > COMMAND_LIMIT {
            child.kill()?;
            child.wait()?;
            bail!("no end after {COMMAND_LIMIT:?}");
        }
        sleep(Duration::from_millis(5));
    };
    let (mut output, mut errors) = (String::new(), String::new());
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut output)?;
    }
    if let Some(mut pipe) = child.stderr.take() {
        pipe.read_to_string(&mut errors)?;
    }
    Ok(Told { success: status.success(), output, errors })
}

//! A cluster in a box on volatile drives, one mount, and the means to kill its node.
//!
//! Whatever happens, nothing is left behind: when this is dropped, and when a part of the test
//! takes longer than it may, the mount and the node are killed by their process ids, the mount
//! point is released, and the files are removed.

use crate::launcher::{Launcher, Started, Told};
use anyhow::{Context, Result, ensure};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
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
    launcher: Launcher,
    mount: Option<Started>,
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
            launcher: Launcher::new(&dir)?,
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

    fn start(&mut self, arguments: &[&str]) -> Result<Started> {
        let cluster = self.cluster();
        let words = [&[LEVADA, "-f", cluster.to_str().context("an odd path")?], arguments].concat();
        self.launcher.start(&words)
    }

    /// Waits for a command, but not for ever.
    fn finish(&mut self, started: &Started) -> Result<Told> {
        let told = self.launcher.finish(started, COMMAND_LIMIT);
        if told.is_err() {
            let _ = kill(started.pid);
        }
        told
    }

    /// Runs a command of `levada` to its end; what it printed.
    pub fn levada(&mut self, arguments: &[&str]) -> Result<String> {
        let started = self.start(arguments)?;
        let told =
            self.finish(&started).with_context(|| format!("levada {}", arguments.join(" ")))?;
        ensure!(told.success, "levada {}: {}", arguments.join(" "), told.errors.trim());
        Ok(told.output)
    }

    pub fn up(&mut self) -> Result<()> {
        let told = self.levada(&["up", "--no-mounts"])?;
        ensure!(!told.contains("already"), "a dead node passed for a running one: {told}");
        Ok(())
    }

    /// Starts the node and kills it so much later, wherever it is then.
    pub fn up_killed_after(&mut self, delay: Duration) -> Result<()> {
        let started = self.start(&["up", "--no-mounts"])?;
        sleep(delay);
        if let Some(pid) = node_pid(&self.dir) {
            kill(pid)?;
        }
        // It fails when its node was killed early; looked for too early, the node came up.
        self.finish(&started)?;
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
        let mnt = self.mnt();
        let mnt = mnt.to_str().context("an odd path")?;
        let mount = self.start(&["mount", "--foreground", mnt])?;
        fs::write(self.dir.join("mount.pid"), mount.pid.to_string())?;
        let mount = self.mount.insert(mount);
        let is_ready =
            || fs::read_to_string(&mount.output).is_ok_and(|said| said.contains("ready\n"));
        while !is_ready() {
            ensure!(mount.is_alive(), "the mount ended before it served");
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// The end of the whole machine: node and mount die with all that was not synced.
    pub fn kill_node_and_mount(&mut self, mount_first: bool) -> Result<()> {
        let mount = self.mount.take().context("never mounted")?;
        if mount_first {
            kill(mount.pid)?;
        }
        self.kill_node()?;
        if !mount_first {
            kill(mount.pid)?;
        }
        self.finish(&mount)?;
        fs::remove_file(self.dir.join("mount.pid"))?;
        unmount(self.mnt(), UnmountFlags::DETACH).context("the dead mount cannot be taken away")
    }

    /// The mount's process must outlive every kill of the node.
    pub fn still_mounted(&self) -> Result<()> {
        let mount = self.mount.as_ref().context("never mounted")?;
        ensure!(mount.is_alive(), "the mount's process ended");
        Ok(())
    }

    pub fn umount(&mut self) -> Result<()> {
        let mnt = self.mnt();
        self.levada(&["umount", mnt.to_str().context("an odd path")?])?;
        let mount = self.mount.take().context("never mounted")?;
        let told = self.finish(&mount)?;
        ensure!(told.success, "the mount's process failed at the end: {}", told.errors.trim());
        fs::remove_file(self.dir.join("mount.pid"))?;
        Ok(())
    }

    /// What df says is free, in MiB.
    pub fn free_mib(&self) -> Result<u64> {
        let space = rustix::fs::statvfs(self.mnt())?;
        Ok((space.f_bavail * space.f_frsize) >> 20)
    }

    /// The ends of the logs, for people.
    pub fn tell_logs(&mut self) {
        let status = self.levada(&["status"]).unwrap_or_else(|error| format!("{error:#}"));
        println!("--- levada status\n{status}");
        let mount = self.mount.as_ref().map(|mount| mount.errors.as_path());
        tell_logs(&self.dir, mount);
    }
}

impl Drop for BoxUnderTest {
    fn drop(&mut self) {
        if let Ok(mut deadline) = self.deadline.0.lock() {
            *deadline = None;
            self.deadline.1.notify_all();
        }
        clean_up(&self.dir);
    }
}

/// Ends the whole test when its time is over: whoever hangs in the mount cannot do it.
fn watch(deadline: &(Mutex<Option<Instant>>, Condvar), dir: &Path) {
    let mut until = deadline.0.lock().expect("not poisoned");
    while let Some(at) = *until {
        let left = at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            eprintln!("kill_rounds: out of time; everything is killed");
            tell_logs(dir, None);
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
    let _ = unmount(dir.join("mnt"), UnmountFlags::DETACH);
    if let Some(pid) = node_pid(dir) {
        let _ = kill(pid);
    }
    if std::env::var_os("LEVADA_KILL_KEEP").is_none() {
        let _ = fs::remove_dir_all(dir);
    }
}

fn tell_logs(dir: &Path, mount: Option<&Path>) {
    for log in [Some(dir.join("state/node.log").as_path()), mount].into_iter().flatten() {
        let text = fs::read_to_string(log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        println!("--- the end of {}", log.display());
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
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("no process id")?;
    kill_process(pid, Signal::KILL).with_context(|| format!("process {pid:?} cannot be killed"))
}

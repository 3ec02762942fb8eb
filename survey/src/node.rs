//! The node as people run it: the `levada` program, a cluster in a box on files of this
//! machine's disk, mounted.

use crate::figure::{Bar, Operand, Taken};
use crate::harness::{Effort, Meter, Rate, Run, median, pairs, spread};
use crate::suite::Spec;
use anyhow::{Context, Result};
use levada_base::reactor::Reactor;
use levada_base::units::GIB;
use levada_node::state::StateDir;
use levada_spec::{BOX_DRIVES, ClusterFile};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const DRIVE_BYTES: u64 = GIB;
/// What a node may still do after it came up, before it counts as idle.
const SETTLE: Duration = Duration::from_secs(3);
/// Long enough that a clock of 10 ms is fine: one tick is 0.2 %.
const IDLE_WINDOW: Duration = Duration::from_secs(5);

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "mount.create_of_ext4",
            what: "empty files made by one process, against ext4 on the same disk",
            bar: Bar::AtLeast(0.15),
            take: create_of_ext4,
        },
        Spec {
            name: "node.idle_cpu_percent",
            what: "percent of a core used by node and mount together while nobody asks",
            bar: Bar::Below(1.0),
            take: idle_cpu,
        },
    ]
}

/// A mounted cluster in a box, run by the `levada` program; dropping it takes it down.
struct RunningBox {
    levada: PathBuf,
    dir: TempDir,
}

impl RunningBox {
    fn up() -> Result<Self> {
        let own = std::env::current_exe()?;
        let levada = own.with_file_name("levada");
        anyhow::ensure!(levada.exists(), "{} is missing: `make build`", levada.display());
        // Beside the program: that is on a disk, while /tmp may be memory.
        let place = own.parent().context("a program lies in a directory")?;
        let dir = tempfile::Builder::new().prefix("bench-box-").tempdir_in(place)?;
        let file = ClusterFile::box_default(dir.path(), 3 * DRIVE_BYTES * BOX_DRIVES as u64)?;
        std::fs::write(dir.path().join("levada.toml"), file.to_toml())?;
        let running = Self { levada, dir };
        running.levada("up")?;
        Ok(running)
    }

    fn levada(&self, command: &str) -> Result<()> {
        let output = Command::new(&self.levada)
            .arg("-f")
            .arg(self.dir.path().join("levada.toml"))
            .arg(command)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "levada {command}: {}", said.trim());
        Ok(())
    }

    fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// The processes of the node and of the mount.
    fn pids(&self) -> Result<Vec<u32>> {
        let node = StateDir(self.dir.path().join("state")).running();
        let mut pids = vec![node.context("the node is not running")?];
        let ours = self.dir.path().as_os_str().as_encoded_bytes();
        for entry in std::fs::read_dir("/proc")? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            let exe = std::fs::read_link(entry.path().join("exe")).unwrap_or_default();
            let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let is_of_box = arguments.windows(ours.len()).any(|part| part == ours);
            if exe == self.levada && is_of_box && !pids.contains(&pid) {
                pids.push(pid);
            }
        }
        Ok(pids)
    }
}

impl Drop for RunningBox {
    fn drop(&mut self) {
        if let Err(error) = self.levada("down") {
            eprintln!("the box is still up in {}: {error:#}", self.dir.path().display());
        }
    }
}

/// CPU time of a process so far, in seconds (proc(5): fields utime and stime, in ticks of 10 ms).
fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything, also spaces.
    let (_, fields) = stat.rsplit_once(')').context("unexpected /proc/PID/stat")?;
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).flat_map(str::parse::<u64>).sum();
    Ok(ticks as f64 / 100.0)
}

fn idle_cpu(effort: Effort) -> Result<Taken> {
    let running = RunningBox::up()?;
    let pids = running.pids()?;
    anyhow::ensure!(pids.len() >= 2, "node and mount should run, found processes {pids:?}");
    std::thread::sleep(SETTLE);
    let used = || pids.iter().map(|pid| cpu_seconds(*pid)).sum::<Result<f64>>();
    let mut percents = Vec::new();
    for _ in 0..effort.runs {
        let (before, started) = (used()?, Instant::now());
        std::thread::sleep(IDLE_WINDOW);
        percents.push(100.0 * (used()? - before) / started.elapsed().as_secs_f64());
    }
    // Windows are as long as each other, so their mean is finer than the clock of one.
    let value = percents.iter().sum::<f64>() / percents.len() as f64;
    let operands = vec![Operand {
        name: "median window",
        value: median(percents.iter().copied()),
        unit: "percent",
        cpu: None,
    }];
    let spread = spread(&percents);
    Ok(Taken { value, unit: "percent", operands, cpu: None, runs: percents.len(), spread })
}

/// Makes `count` files in a new directory.
fn create_files(dir: &Path, count: u64) -> Result<Run> {
    std::fs::create_dir(dir)?;
    let meter = Meter::start()?;
    for number in 0..count {
        let path = dir.join(format!("file-{number:06}"));
        OpenOptions::new().write(true).create_new(true).open(path)?;
    }
    meter.stop(0, count)
}

fn create_of_ext4(effort: Effort) -> Result<Taken> {
    let running = RunningBox::up()?;
    let count = effort.amount(4000);
    let ours = running.mount_point();
    let theirs = running.dir.path().join("ext4");
    std::fs::create_dir(&theirs)?;
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        async |number| create_files(&ours.join(number.to_string()), count),
        async |number| create_files(&theirs.join(number.to_string()), count),
    ))?;
    Ok(pairs.ratio(Rate::Kiops, ("mount", "ext4"), 1.0))
}

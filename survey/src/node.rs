//! The node as people run it: the `levada` program, a cluster in a box on files of this
//! machine's disk, mounted.
#![allow(unsafe_code)] // sync(2).

use crate::figure::{Bar, Operand, Taken};
use crate::harness::{Effort, Meter, Rate, Run, median, pairs, spread};
use crate::running_box::{RunningBox, ensure_ext4, place};
use crate::served::idle_client;
use crate::suite::Spec;
use anyhow::{Context, Result};
use levada_base::BufMut;
use levada_base::reactor::Reactor;
use levada_base::units::{GIB, KIB, MIB};
use levada_spec::{ExportSpec, ExportWay};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind::WouldBlock;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// A run takes less than half a second, in which ext4's journal writes nothing or all of its own: the median
/// needs more of them than those of the other figures.
const CREATE_PAIRS_PER_RUN: usize = 4;
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
        Spec {
            name: "export.idle_cpu_percent",
            what: "the same with 100 volumes, each open by an NBD client that asks nothing and with a vhost socket",
            bar: Bar::Below(1.0),
            take: idle_cpu_of_exports,
        },
        Spec {
            name: "node.demo_peak_rss_mib",
            what: "most memory that the node held: the demo's files, two lost drives, rebuild, scrub",
            bar: Bar::Below(1536.0),
            take: demo_peak_rss,
        },
    ]
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
    idle_cpu_of(&RunningBox::up()?, effort)
}

fn idle_cpu_of_exports(effort: Effort) -> Result<Taken> {
    const VOLUMES: usize = 100;
    const SOCKET: &str = "nbd.sock";
    let address = format!("unix:{SOCKET}");
    let ways = [
        ExportWay::Nbd { address, tls: None, verify_clients: false },
        ExportWay::Vhost { directory: "vm".into() },
    ];
    let exports = ways.map(|way| ExportSpec { tenant: "default".into(), way });
    let running = RunningBox::up_with(exports.into())?;
    let mut clients = Vec::new();
    for number in 0..VOLUMES {
        let name = format!("vm{number}");
        running.levada(&["volume", "create", &name, "--size", "1GiB", "--overcommit"])?;
        clients.push(idle_client(&running.dir.path().join(SOCKET), &name)?);
    }
    let taken = idle_cpu_of(&running, effort);
    for mut client in clients {
        client.set_nonblocking(true)?;
        let is_open = client.read(&mut [0]).is_err_and(|error| error.kind() == WouldBlock);
        anyhow::ensure!(is_open, "the node has closed the connection of an idle client");
    }
    taken
}

fn idle_cpu_of(running: &RunningBox, effort: Effort) -> Result<Taken> {
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
    let window = median(percents.iter().copied());
    let operands = vec![Operand::new("median window", window, "percent")];
    let spread = spread(&percents);
    let runs = percents.len();
    Ok(Taken { value, unit: "percent".into(), operands, cpu: None, runs, retaken: 0, spread })
}

/// Makes `count` files in a new directory, when nothing of the run before is on its way to the disk any more.
fn create_files(dir: &Path, count: u64) -> Result<Run> {
    std::fs::create_dir(dir)?;
    // SAFETY: sync(2) takes nothing and touches no memory of ours.
    unsafe { libc::sync() };
    let meter = Meter::start()?;
    for number in 0..count {
        let path = dir.join(format!("file-{number:06}"));
        OpenOptions::new().write(true).create_new(true).open(path)?;
    }
    meter.stop(0, count)
}

fn create_of_ext4(effort: Effort) -> Result<Taken> {
    ensure_ext4(&place()?)?;
    let running = RunningBox::up()?;
    let count = effort.amount(4000);
    let effort = Effort { runs: CREATE_PAIRS_PER_RUN * effort.runs, ..effort };
    let ours = running.mount_point();
    let theirs = running.dir.path().join("ext4");
    std::fs::create_dir(&theirs)?;
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |number| create_files(&ours.join(number.to_string()), count),
        async |number| create_files(&theirs.join(number.to_string()), count),
    ))?;
    Ok(pairs.ratio(Rate::Kiops, ("mount", "ext4"), 1.0))
}

/// What `make demo` copies: small files, and one like a checkpoint.
const DEMO_FILES: u64 = 20_000;
const DEMO_CHECKPOINT_BYTES: u64 = 2 * GIB;
const DEMO_FILES_PER_DIRECTORY: u64 = 100;
/// Drives that hold copies of the same metadata, as the demo fails them.
const DEMO_FAILED: [&str; 2] = ["d00", "d02"];
/// What a file more may cost the node's memory while its caches fill (rows of names and extents, 64
/// MiB per target at most): between half of the files and all of them. More is a leak.
const DEMO_KIB_PER_FILE_MAX: f64 = 8.0;

/// The most memory that a process ever held, in MiB (proc(5): `VmHWM`).
fn peak_rss_mib(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kib = line.trim().strip_suffix(" kB").context("VmHWM is not in kB")?;
    Ok(kib.trim().parse::<f64>()? / 1024.0)
}

/// Writes the demo's small files `from..to`, of 1 to 16 KiB.
fn write_tree(dir: &Path, from: u64, to: u64) -> Result<()> {
    let data = vec![0x5a; 16 * KIB as usize];
    for number in from..to {
        let within = dir.join(format!("d{}", number / DEMO_FILES_PER_DIRECTORY));
        if number % DEMO_FILES_PER_DIRECTORY == 0 {
            std::fs::create_dir(&within)?;
        }
        let bytes = (number % 16 + 1) * KIB;
        File::create(within.join(format!("f{number}")))?.write_all(&data[..bytes as usize])?;
    }
    Ok(())
}

fn write_checkpoint(path: &Path, bytes: u64) -> Result<()> {
    let data = vec![0xa5; MIB as usize];
    let mut file = File::create(path)?;
    for _ in 0..bytes / MIB {
        file.write_all(&data)?;
    }
    Ok(file.sync_all()?)
}

/// Past the page cache: the node shall read, not the kernel remember.
fn read_back(path: &Path, bytes: u64) -> Result<()> {
    let mut data = BufMut::zeroed(MIB as usize);
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    for _ in 0..bytes / MIB {
        file.read_exact(&mut data)?;
    }
    Ok(())
}

/// The demo without its programs under load: files, a checkpoint, two lost drives, a rebuild on
/// the spares, new drives in their place, a scrub.
fn demo_peak_rss(effort: Effort) -> Result<Taken> {
    let running = RunningBox::up()?;
    let node = running.node_pid()?;
    let mount = running.pids()?.into_iter().find(|pid| *pid != node).context("no mount")?;
    let (files, bytes) = (effort.amount(DEMO_FILES), effort.amount(DEMO_CHECKPOINT_BYTES));
    let dir = running.mount_point();
    let mut marks = Vec::new();
    let mut mark = |name, value| marks.push(Operand::new(name, value, "MiB"));
    mark("node when it came up", peak_rss_mib(node)?);
    let tree = dir.join("tree");
    std::fs::create_dir(&tree)?;
    let half = files / 2 / DEMO_FILES_PER_DIRECTORY * DEMO_FILES_PER_DIRECTORY;
    write_tree(&tree, 0, half)?;
    let at_half = peak_rss_mib(node)?;
    mark("after half of the files", at_half);
    write_tree(&tree, half, files)?;
    let at_all = peak_rss_mib(node)?;
    mark("after all files", at_all);
    let checkpoint = dir.join("checkpoint");
    write_checkpoint(&checkpoint, bytes)?;
    read_back(&checkpoint, bytes)?;
    mark("after the checkpoint", peak_rss_mib(node)?);
    for drive in DEMO_FAILED {
        running.levada(&["drive", "fail", drive])?;
    }
    read_back(&checkpoint, bytes)?;
    running.levada(&["rebuild", "--watch"])?;
    for drive in DEMO_FAILED {
        running.levada(&["drive", "replace", drive])?;
    }
    running.levada(&["rebuild", "--watch"])?;
    mark("after the rebuild", peak_rss_mib(node)?);
    running.levada(&["scrub", "--watch"])?;
    mark("after the scrub", peak_rss_mib(node)?);
    mark("mount", peak_rss_mib(mount)?);
    anyhow::ensure!(running.node_pid()? == node, "the node was started again meanwhile");

    let value = peak_rss_mib(node)?;
    let kib_per_file = (at_all - at_half) * 1024.0 / (files - half) as f64;
    // The few files of a quick run cost what a node takes once.
    anyhow::ensure!(
        effort.is_quick || kib_per_file <= DEMO_KIB_PER_FILE_MAX,
        "the node grew by {kib_per_file:.1} KiB per file from {half} to {files} files ({at_half:.0} to \
         {at_all:.0} MiB); {DEMO_KIB_PER_FILE_MAX} is the bound"
    );
    let per_file = |name, value| Operand::new(name, value, "KiB/file");
    marks.push(per_file("growth over the second half", kib_per_file));
    marks.push(per_file("bound of that", DEMO_KIB_PER_FILE_MAX));
    let spread = spread(&[value]);
    Ok(Taken { value, unit: "MiB".into(), operands: marks, cpu: None, runs: 1, retaken: 0, spread })
}

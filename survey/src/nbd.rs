//! NBD: fio's client on an array of `ram` members that is served on a core of its own, against the same on nbdkit's memory.

use crate::array;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, pairs};
use crate::members::{Speed, Storage, members};
use crate::suite::Spec;
use anyhow::{Context, Result, bail, ensure};
use futures_util::future::LocalBoxFuture;
use levada_base::BufMut;
use levada_base::reactor::{Reactor, mailbox};
use levada_base::units::{KIB, MIB};
use levada_device::Durability;
use levada_export_nbd::{Address, Exports, Server};
use levada_volume::{ArrayVolume, Volume};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const MEMBERS: usize = 10;
const CHUNK_BYTES: u64 = 64 * KIB;
const MEMBER_BYTES: u64 = 160 * MIB;
/// What is written before, and then read: above any last cache.
const USED_BYTES: u64 = 1024 * MIB;
/// How long fio reads.
const SPAN: Duration = Duration::from_secs(4);
/// How long nbdkit may take to listen.
const STARTS_WITHIN: Duration = Duration::from_secs(5);
/// How long a server polls for the next request before it sleeps, as `levada array serve` does.
const SPIN: Duration = Duration::from_micros(100);

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "nbd.ram.seqread_of_nbdkit",
            what: "fio reads 1 MiB in order, 16 in flight, of a RAID 6 8 + 2, against nbdkit's memory",
            bar: Bar::AtLeast(1.0),
            take: |effort| compare(effort, Rate::GbPerS, ["--rw=read", "--bs=1m", "--iodepth=16"]),
        },
        Spec {
            name: "nbd.ram.randread4k_of_nbdkit",
            what: "fio reads 4 KiB anywhere, 128 in flight, of a RAID 6 8 + 2, against nbdkit's memory",
            bar: Bar::AtLeast(1.0),
            take: |effort| {
                compare(effort, Rate::Kiops, ["--rw=randread", "--bs=4k", "--iodepth=128"])
            },
        },
    ]
}

fn compare(effort: Effort, rate: Rate, load: [&str; 3]) -> Result<Taken> {
    let dir = tempfile::Builder::new().prefix("bench-nbd-").tempdir()?;
    let ours = Served::start(&dir)?;
    let theirs = Nbdkit::start(&dir)?;
    theirs.fill()?;
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |_| fio(effort, &dir, &ours.socket, load),
        async |_| fio(effort, &dir, &theirs.socket, load),
    ))?;
    Ok(pairs.ratio(rate, ("levada", "nbdkit"), 1.0))
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

/// What fio read in its own time, and what that took of the processor.
fn fio(effort: Effort, dir: &TempDir, socket: &Path, load: [&str; 3]) -> Result<Run> {
    let seconds = effort.amount(SPAN.as_millis() as u64) as f64 / 1e3;
    let meter = Meter::start()?;
    let output = Command::new("fio")
        .args(["--name=bench", "--ioengine=nbd", "--output-format=json", "--time_based"])
        .args(load)
        .args([format!("--runtime={:.0}", seconds.max(1.0)), format!("--size={USED_BYTES}")])
        .arg(format!("--uri={}", uri(socket)))
        .current_dir(dir.path())
        .output()
        .context("fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr).trim());
    // Notes of the program stand before it.
    let from = output.stdout.iter().position(|byte| *byte == b'{').context("fio says nothing")?;
    let said: serde_json::Value = serde_json::from_slice(&output.stdout[from..])?;
    let read = &said["jobs"][0]["read"];
    let number = |key: &str| read[key].as_u64().with_context(|| format!("fio does not tell {key}"));
    let mut run = meter.stop(number("io_bytes")?, number("total_ios")?)?;
    run.elapsed = Duration::from_millis(number("runtime")?);
    Ok(run)
}

/// The array, served on a thread of its own.
struct Served {
    socket: PathBuf,
    stop: Option<mailbox::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// The array as the one export.
struct Only(Rc<dyn Volume>);

impl Exports for Only {
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>> {
        Box::pin(async { vec![String::new()] })
    }

    fn open<'a>(&'a self, _name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        Box::pin(async { Some(Rc::clone(&self.0)) })
    }
}

impl Served {
    fn start(dir: &TempDir) -> Result<Self> {
        let socket = dir.path().join("levada.sock");
        let (started, starting) = mpsc::channel();
        let at = Address::Unix(socket.clone());
        let thread = std::thread::Builder::new().name("nbd".into()).spawn(move || {
            let reactor = Reactor::new()?;
            reactor.set_spin(SPIN);
            reactor.block_on(async {
                let members = members(Speed::Unlimited, Storage::Ram, MEMBERS, MEMBER_BYTES);
                let volume = ArrayVolume::new(array::raid6_of(&members, CHUNK_BYTES).await?);
                for at in (0..USED_BYTES).step_by(8 * MIB as usize) {
                    let mut data = BufMut::for_overwrite(8 * MIB as usize);
                    data.fill((at / MIB) as u8 | 1);
                    volume.write(at, data.freeze().into_vec(), Durability::Volatile).await?;
                }
                let server = Server::listen(&at, Rc::new(Only(Rc::new(volume))), None)?;
                let (stop, mut stopped) = mailbox::channel()?;
                // Nobody waits only when the starter has panicked.
                let _ = started.send(stop);
                stopped.recv().await;
                server.end().await;
                Ok(())
            })
        })?;
        if let Ok(stop) = starting.recv() {
            return Ok(Self { socket, stop: Some(stop), thread: Some(thread) });
        }
        let ended = thread.join().map_err(|_| anyhow::anyhow!("the server panicked"))?;
        ended.and(Err(anyhow::anyhow!("the server ended"))).context("serving an array")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("the NBD server failed: {error:#}");
        }
    }
}

/// The peer, running; it ends with this.
struct Nbdkit {
    socket: PathBuf,
    process: Child,
}

impl Nbdkit {
    fn start(dir: &TempDir) -> Result<Self> {
        let socket = dir.path().join("nbdkit.sock");
        let mut process = Command::new("nbdkit")
            .arg("--foreground")
            .arg("--unix")
            .arg(&socket)
            .args(["memory", &format!("{}K", 2 * USED_BYTES / KIB)])
            .stdin(Stdio::null())
            .spawn()
            .context("nbdkit, which Debian has under that name")?;
        let begun = Instant::now();
        while !socket.exists() {
            if process.try_wait()?.is_some() || begun.elapsed() > STARTS_WITHIN {
                let _ = process.kill();
                bail!("nbdkit does not listen");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { socket, process })
    }

    /// Writes what is read later, so that it is memory and not a hole.
    fn fill(&self) -> Result<()> {
        let written = Command::new("fio")
            .args(["--name=fill", "--ioengine=nbd", "--rw=write", "--bs=1m", "--iodepth=16"])
            .args([format!("--size={USED_BYTES}"), format!("--uri={}", uri(&self.socket))])
            .stdout(Stdio::null())
            .status()
            .context("fio")?;
        ensure!(written.success(), "fio cannot fill nbdkit's memory");
        Ok(())
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

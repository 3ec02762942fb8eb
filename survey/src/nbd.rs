//! NBD: fio's client on an array of `ram` members that is served on a core of its own, against the same on nbdkit's memory.

use crate::array;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, pairs};
use crate::members::{Speed, Storage, members};
use crate::served::{Fio, Served, Serving, Volumes, uri};
use crate::suite::Spec;
use anyhow::{Context, Result, bail};
use levada_base::BufMut;
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_device::Durability;
use levada_volume::{ArrayVolume, Volume};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
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
    let ours = Served::start(dir.path(), Serving::default(), array_of_ram)?;
    let theirs = Nbdkit::start(&dir)?;
    theirs.fill(&dir)?;
    let (our_uri, their_uri) = (ours.uri(""), uri(&theirs.socket, ""));
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |_| fio(effort, &dir, &our_uri, load),
        async |_| fio(effort, &dir, &their_uri, load),
    ))?;
    Ok(pairs.ratio(rate, ("levada", "nbdkit"), 1.0))
}

/// What fio read in its own time, and what that took of the processor.
fn fio(effort: Effort, dir: &TempDir, uri: &str, load: [&str; 3]) -> Result<Run> {
    let seconds = effort.amount(SPAN.as_millis() as u64) as f64 / 1e3;
    let meter = Meter::start()?;
    let mut load: Vec<_> = load.iter().map(ToString::to_string).collect();
    load.push("--time_based".into());
    load.push(format!("--runtime={:.0}", seconds.max(1.0)));
    load.push(format!("--size={USED_BYTES}"));
    let said = Fio::start(dir.path(), uri, &load)?.end()?;
    let number =
        |key: &str| said["read"][key].as_u64().with_context(|| format!("fio does not tell {key}"));
    let mut run = meter.stop(number("io_bytes")?, number("total_ios")?)?;
    run.elapsed = Duration::from_millis(number("runtime")?);
    Ok(run)
}

/// The array as the one export.
async fn array_of_ram() -> Result<Volumes> {
    let members = members(Speed::Unlimited, Storage::Ram, MEMBERS, MEMBER_BYTES);
    let volume = ArrayVolume::new(array::raid6_of(&members, CHUNK_BYTES).await?);
    for at in (0..USED_BYTES).step_by(8 * MIB as usize) {
        let mut data = BufMut::for_overwrite(8 * MIB as usize);
        data.fill((at / MIB) as u8 | 1);
        volume.write(at, data.freeze().into_vec(), Durability::Volatile).await?;
    }
    Ok(Volumes::from([(String::new(), Rc::new(volume) as Rc<dyn Volume>)]))
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
    fn fill(&self, dir: &TempDir) -> Result<()> {
        let load = ["--rw=write", "--bs=1m", "--iodepth=16", &format!("--size={USED_BYTES}")];
        let written = Fio::start(dir.path(), &uri(&self.socket, ""), &load.map(str::to_owned))?;
        written.end().map(|_| ()).context("filling nbdkit's memory")
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

//! The object log of one target, against the members of its array without protection.
//!
//! As in a cluster, the log's key-value store lies on a mirror of three copies over slices of
//! the same drives, so what it writes is paid by the same rates.

use crate::array::{self, CHUNK_BYTES, DATA_SHARE, RANDOM_DEPTH, READ_DEPTH, WIDTH};
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, absolute, pairs, runs};
use crate::load::Load;
use crate::members::{Drives, Raw, Speed, Storage, members};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::ids::{Ino, ObjectId, Seq, TargetId};
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_base::{Buf, BufMut, Epoch};
use levada_device::Device;
use levada_kv::Store;
use levada_log::{Config, ObjectLog, Stability};
use levada_raid::ByteRange;
use std::rc::Rc;

/// A drive's slice for the mirror.
const META_BYTES: u64 = 64 * MIB;
/// A drive's slice for data.
const DATA_BYTES: u64 = 384 * MIB;
/// What a sequential run writes or reads: less than half of the log, so that the object of the
/// run before can be given back while the next is written.
const OBJECT_BYTES: u64 = 768 * MIB;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "log.slow.seqwrite_of_ceiling",
            what: "1 MiB writes, 16 in flight, COMMIT inside the span; against members x 8/10",
            bar: Bar::None,
            take: |effort| run(seqwrite_of_ceiling(effort)),
        },
        Spec {
            name: "log.slow.seqread_of_raw",
            what: "1 MiB reads, 16 in flight, against the members without protection",
            bar: Bar::None,
            take: |effort| {
                let load = Load::sequential(0..OBJECT_BYTES, MIB, READ_DEPTH);
                run(reads_of_raw(effort, load, Rate::GbPerS))
            },
        },
        Spec {
            name: "log.slow.randread4k_of_raw",
            what: "4 KiB reads anywhere in an object, against the members without protection",
            bar: Bar::None,
            take: |effort| {
                let ops = effort.amount(50_000);
                let load = Load::random(0..OBJECT_BYTES, 4 * KIB, RANDOM_DEPTH, ops, 7);
                run(reads_of_raw(effort, load, Rate::Kiops))
            },
        },
        Spec {
            name: "log.slow.randwrite4k",
            what: "4 KiB writes anywhere in an object, COMMIT inside the span",
            bar: Bar::None,
            take: |effort| run(randwrite(effort)),
        },
        Spec {
            name: "log.ram.seqwrite",
            what: "1 MiB writes, 16 in flight, COMMIT inside the span",
            bar: Bar::None,
            take: |effort| run(ram_seqwrite(effort)),
        },
        Spec {
            name: "log.ram.seqread",
            what: "1 MiB reads, 16 in flight",
            bar: Bar::None,
            take: |effort| run(ram_seqread(effort)),
        },
    ]
}

fn run(figure: impl Future<Output = Result<Taken>>) -> Result<Taken> {
    Reactor::new()?.block_on(figure)
}

/// A new log on ten drives, each cut in two slices.
async fn new_log(speed: Speed) -> Result<ObjectLog> {
    log_on(&Drives::Model(speed)).await
}

pub(crate) async fn log_on(drives: &Drives) -> Result<ObjectLog> {
    let drives = drives.make("log", WIDTH, META_BYTES + DATA_BYTES).await?;
    let slices = |start: u64, bytes: u64| -> Result<Vec<Rc<dyn Device>>> {
        let slice = |drive: &Rc<dyn Device>| -> Result<Rc<dyn Device>> {
            Ok(Rc::new(ByteRange::new(&drive.info().name, Rc::clone(drive), start, bytes)?))
        };
        drives.iter().map(slice).collect()
    };
    let meta = array::mirror(&slices(0, META_BYTES)?).await?;
    let data = array::raid6(&slices(META_BYTES, DATA_BYTES)?).await?;
    let config = levada_kv::Config { log_bytes: 32 * MIB, ..levada_kv::Config::default() };
    let store = Store::create(meta, Epoch(1), config).await?;
    Ok(ObjectLog::create(data, store, Config::new(1, TargetId(1)), Epoch(1)).await?)
}

pub(crate) fn object(number: u64) -> ObjectId {
    ObjectId { fs: 1, ino: Ino(number + 2), component: 0, version: 0 }
}

pub(crate) fn payload(bytes: u64) -> Buf {
    let mut payload = BufMut::for_overwrite(bytes as usize);
    payload.fill(0x5a);
    payload.freeze()
}

/// Writes as `load` says to object `number`, and commits.
pub(crate) async fn write(log: &ObjectLog, number: u64, load: &Load) -> Result<Run> {
    let meter = Meter::start()?;
    let (target, data) = (log.clone(), payload(load.piece_bytes));
    load.drive(move |at| {
        let (log, data) = (target.clone(), data.clone());
        async move {
            log.write(object(number), at, data.into_vec(), Stability::Unstable).await?;
            Ok(())
        }
    })
    .await?;
    log.commit(Seq(u64::MAX)).await?;
    meter.stop(load.ops * load.piece_bytes, load.ops)
}

pub(crate) async fn read(log: &ObjectLog, number: u64, load: &Load) -> Result<Run> {
    let (target, bytes) = (log.clone(), load.piece_bytes);
    load.run(move |at| {
        let log = target.clone();
        async move {
            log.read(object(number), at, bytes).await?;
            Ok(())
        }
    })
    .await
}

/// A whole object of its own for every run; the one before is deleted first, unmeasured.
async fn write_new(log: &ObjectLog, number: usize, load: &Load) -> Result<Run> {
    let number = number as u64;
    if number > 0 {
        log.delete(object(number - 1)).await?;
    }
    write(log, number, load).await
}

fn raw() -> Raw {
    Raw::new(&members(Speed::Slow, Storage::Ram, WIDTH, OBJECT_BYTES / 8), CHUNK_BYTES)
}

async fn seqwrite_of_ceiling(effort: Effort) -> Result<Taken> {
    let load = Load::sequential(0..effort.amount(OBJECT_BYTES), MIB, READ_DEPTH);
    let (log, raw) = (new_log(Speed::Slow).await?, raw());
    let ours = async |number| write_new(&log, number, &load).await;
    let theirs = async |_| raw_write(&raw, &load).await;
    let said = Speed::Slow.says(WIDTH, CHUNK_BYTES, Rate::GbPerS);
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("log", "ceiling"), DATA_SHARE))
}

/// The same load on members without protection, flushed at the end.
pub(crate) async fn raw_write(raw: &Raw, load: &Load) -> Result<Run> {
    let chunk = payload(CHUNK_BYTES);
    let chunks = load.piece_bytes / CHUNK_BYTES;
    let meter = Meter::start()?;
    let target = raw.clone();
    load.drive(move |at| {
        let (raw, chunk) = (target.clone(), chunk.clone());
        async move { raw.write_chunks(at, (0..chunks).map(|_| chunk.clone()).collect()).await }
    })
    .await?;
    raw.flush().await?;
    meter.stop(load.ops * load.piece_bytes, load.ops)
}

pub(crate) async fn raw_read(raw: &Raw, load: &Load) -> Result<Run> {
    let (target, bytes) = (raw.clone(), load.piece_bytes);
    load.run(move |at| {
        let raw = target.clone();
        async move { raw.read(at, bytes).await }
    })
    .await
}

async fn reads_of_raw(effort: Effort, load: Load, rate: Rate) -> Result<Taken> {
    let (log, raw) = (new_log(Speed::Slow).await?, raw());
    write(&log, 0, &Load::sequential(0..OBJECT_BYTES, MIB, READ_DEPTH)).await?;
    let ours = async |_| read(&log, 0, &load).await;
    let theirs = async |_| raw_read(&raw, &load).await;
    let said = Speed::Slow.says(WIDTH, load.piece_bytes.min(CHUNK_BYTES), rate);
    Ok(pairs(effort, said, ours, theirs).await?.ratio(rate, ("log", "raw"), 1.0))
}

async fn randwrite(effort: Effort) -> Result<Taken> {
    let log = new_log(Speed::Slow).await?;
    let load = Load::random(0..OBJECT_BYTES, 4 * KIB, RANDOM_DEPTH, effort.amount(40_000), 7);
    let all = runs(effort, async |number| write_new(&log, number, &load).await).await?;
    Ok(absolute(Rate::Kiops, "log", &all))
}

async fn ram_seqwrite(effort: Effort) -> Result<Taken> {
    let load = Load::sequential(0..OBJECT_BYTES, MIB, READ_DEPTH);
    let log = new_log(Speed::Unlimited).await?;
    let all = runs(effort, async |number| write_new(&log, number, &load).await).await?;
    Ok(absolute(Rate::GbPerS, "log", &all))
}

async fn ram_seqread(effort: Effort) -> Result<Taken> {
    let load = Load::sequential(0..OBJECT_BYTES, MIB, READ_DEPTH);
    let log = new_log(Speed::Unlimited).await?;
    write(&log, 0, &load).await?;
    let all = runs(effort, async |_| read(&log, 0, &load).await).await?;
    Ok(absolute(Rate::GbPerS, "log", &all))
}

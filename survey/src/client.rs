//! The client library against a cluster in a box: node on one core, client on the other, TCP on
//! the loopback between them.

use crate::array::{CHUNK_BYTES, DATA_SHARE, RANDOM_DEPTH, READ_DEPTH, WIDTH};
use crate::cluster;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, Said, absolute, pairs, runs};
use crate::load::Load;
use crate::log::{payload, raw_read, raw_write};
use crate::members::{Drives, Raw, Speed, Storage, members};
use crate::service::{Service, Way};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::ids::Ino;
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_client::{Client, File};
use levada_wire::meta::{Caller, OpenMode};

/// What a run writes or reads: less than half of the box, so that the space of the run before
/// is there again in time.
pub(crate) const FILE_BYTES: u64 = 768 * MIB;
/// Of the ceiling.
const SEQWRITE_BAR: f64 = 0.85;
/// Of raw.
const SEQREAD_BAR: f64 = 0.95;
pub(crate) const ROOT: Caller = Caller { uid: 0, gid: 0 };

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "client.slow.seqwrite_of_ceiling",
            what: "1 MiB writes, 16 in flight, COMMIT inside the span; against members x 8/10",
            bar: Bar::AtLeast(SEQWRITE_BAR),
            take: |effort| run(seqwrite_of_ceiling(effort)),
        },
        Spec {
            name: "client.slow.seqread_of_raw",
            what: "1 MiB reads, 16 in flight, against the members without protection",
            bar: Bar::AtLeast(SEQREAD_BAR),
            take: |effort| run(reads_of_raw(effort, sequential(), Rate::GbPerS)),
        },
        Spec {
            name: "client.slow.randread4k_of_raw",
            what: "4 KiB reads anywhere in a file, against the members without protection",
            bar: Bar::None,
            take: |effort| {
                let ops = effort.amount(50_000);
                let load = Load::random(0..FILE_BYTES, 4 * KIB, RANDOM_DEPTH, ops, 7);
                run(reads_of_raw(effort, load, Rate::Kiops))
            },
        },
        Spec {
            name: "client.slow.randwrite4k",
            what: "4 KiB writes anywhere in a file, COMMIT inside the span",
            bar: Bar::None,
            take: |effort| run(randwrite(effort)),
        },
        Spec {
            name: "client.ram.seqwrite",
            what: "1 MiB writes, 16 in flight, COMMIT inside the span",
            bar: Bar::None,
            take: |effort| run(ram_seqwrite(effort)),
        },
        Spec {
            name: "client.ram.seqread",
            what: "1 MiB reads, 16 in flight",
            bar: Bar::None,
            take: |effort| run(ram_seqread(effort)),
        },
    ]
}

fn run(figure: impl Future<Output = Result<Taken>>) -> Result<Taken> {
    Reactor::new()?.block_on(figure)
}

pub(crate) fn sequential() -> Load {
    Load::sequential(0..FILE_BYTES, MIB, READ_DEPTH)
}

/// A client, and the box that it talks to.
pub(crate) struct Bench {
    pub client: Client,
    service: Service,
}

impl Bench {
    pub(crate) async fn new(speed: Speed) -> Result<Self> {
        Self::on(Drives::Model(speed), Way::Tcp).await
    }

    pub(crate) async fn on(drives: Drives, way: Way) -> Result<Self> {
        let service = cluster::start(drives)?;
        Ok(Self { client: cluster::connect(service.address(), way).await?, service })
    }

    pub(crate) fn address(&self) -> &str {
        self.service.address()
    }

    pub(crate) async fn create(&self, name: &str) -> Result<File> {
        let open = OpenMode { write: true, truncate: false };
        let name = name.as_bytes();
        let made = self.client.create_file(ROOT, Ino::ROOT, name, 0o644, open, true).await?;
        Ok(made.0)
    }

    pub(crate) async fn remove(&self, name: &str) -> Result<()> {
        let before = cluster::inodes(&self.client).await?;
        self.client.unlink(ROOT, Ino::ROOT, name.as_bytes()).await?;
        cluster::clean_up(&self.client, before - 1).await
    }

    /// Writes a whole file as `load` says and makes it durable; gives its space back after that,
    /// unmeasured.
    pub(crate) async fn write_new(&self, load: &Load) -> Result<Run> {
        let file = self.create("written").await?;
        let run = write(&file, load).await?;
        file.close().await;
        self.remove("written").await?;
        Ok(run)
    }
}

pub(crate) async fn write(file: &File, load: &Load) -> Result<Run> {
    let meter = Meter::start()?;
    let (target, data) = (file.clone(), payload(load.piece_bytes));
    load.drive(move |at| {
        let (file, data) = (target.clone(), data.clone());
        async move { Ok(file.write(at, data.into_vec()).await?) }
    })
    .await?;
    file.fsync().await?;
    meter.stop(load.ops * load.piece_bytes, load.ops)
}

pub(crate) async fn read(file: &File, load: &Load) -> Result<Run> {
    let (target, bytes) = (file.clone(), load.piece_bytes);
    load.run(move |at| {
        let file = target.clone();
        async move {
            file.read(at, bytes).await?;
            Ok(())
        }
    })
    .await
}

fn raw() -> Raw {
    Raw::new(&members(Speed::Slow, Storage::Ram, WIDTH, FILE_BYTES / 8), CHUNK_BYTES)
}

async fn seqwrite_of_ceiling(effort: Effort) -> Result<Taken> {
    let (bench, raw, load) = (Bench::new(Speed::Slow).await?, raw(), sequential());
    let ours = async |_| bench.write_new(&load).await;
    let theirs = async |_| raw_write(&raw, &load).await;
    let said = Speed::Slow.says(WIDTH, CHUNK_BYTES, Rate::GbPerS);
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("client", "ceiling"), DATA_SHARE))
}

async fn reads_of_raw(effort: Effort, load: Load, rate: Rate) -> Result<Taken> {
    let (bench, raw) = (Bench::new(Speed::Slow).await?, raw());
    let file = bench.create("read").await?;
    write(&file, &sequential()).await?;
    let ours = async |_| read(&file, &load).await;
    let theirs = async |_| raw_read(&raw, &load).await;
    let said = Speed::Slow.says(WIDTH, load.piece_bytes.min(CHUNK_BYTES), rate);
    Ok(pairs(effort, said, ours, theirs).await?.ratio(rate, ("client", "raw"), 1.0))
}

/// What a client that meets its bar does on `slow` members: where one is compared with, it must
/// come near that, or something else than the members was the limit.
pub(crate) fn says(rate: SequentialRate) -> Option<Said> {
    let share = match rate {
        SequentialRate::Write => DATA_SHARE * SEQWRITE_BAR,
        SequentialRate::Read => SEQREAD_BAR,
    };
    let members = Speed::Slow.says(WIDTH, CHUNK_BYTES, Rate::GbPerS)?;
    Some(Said { side: "client", by: "the client's bar", value: members.value * share, ..members })
}

/// Which of the two sequential loads.
#[derive(Clone, Copy)]
pub(crate) enum SequentialRate {
    Write,
    Read,
}

async fn randwrite(effort: Effort) -> Result<Taken> {
    let bench = Bench::new(Speed::Slow).await?;
    let load = Load::random(0..FILE_BYTES, 4 * KIB, RANDOM_DEPTH, effort.amount(40_000), 7);
    let all = runs(effort, async |_| bench.write_new(&load).await).await?;
    Ok(absolute(Rate::Kiops, "client", &all))
}

async fn ram_seqwrite(effort: Effort) -> Result<Taken> {
    let (bench, load) = (Bench::new(Speed::Unlimited).await?, sequential());
    let all = runs(effort, async |_| bench.write_new(&load).await).await?;
    Ok(absolute(Rate::GbPerS, "client", &all))
}

async fn ram_seqread(effort: Effort) -> Result<Taken> {
    let (bench, load) = (Bench::new(Speed::Unlimited).await?, sequential());
    let file = bench.create("read").await?;
    write(&file, &load).await?;
    let all = runs(effort, async |_| read(&file, &load).await).await?;
    Ok(absolute(Rate::GbPerS, "client", &all))
}

//! The metadata service through the client library: node on one core, client on the other, TCP on the loopback between
//! them, on `nvme` members.

use crate::client::ROOT;
use crate::cluster;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, absolute, runs};
use crate::members::{Drives, Speed};
use crate::service::{Service, Way};
use crate::suite::Spec;
use anyhow::Result;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use levada_base::ids::Ino;
use levada_base::reactor::Reactor;
use levada_client::Client;
use levada_wire::meta::NewInode;

const IN_FLIGHT: usize = 16;
/// What one request of a listing asks for.
const ENTRIES_AT_ONCE: u32 = 1024;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "meta.create_per_s",
            what: "files made in one directory, 16 in flight, each durable when it is answered",
            bar: Bar::AtLeast(20_000.0),
            take: |effort| run(creates(effort)),
        },
        Spec {
            name: "meta.readdir_plus_per_s",
            what: "entries listed with their attributes, one request at a time",
            bar: Bar::AtLeast(200_000.0),
            take: |effort| run(listing(effort)),
        },
    ]
}

fn run(figure: impl Future<Output = Result<Taken>>) -> Result<Taken> {
    Reactor::new()?.block_on(figure)
}

struct Bench {
    client: Client,
    _service: Service,
}

impl Bench {
    async fn new() -> Result<Self> {
        let service = cluster::start(Drives::Model(Speed::Nvme))?;
        let client = cluster::connect_strict(service.address(), Way::Tcp).await?;
        Ok(Self { client, _service: service })
    }

    async fn make_dir(&self, name: &str) -> Result<Ino> {
        let new = NewInode::Directory;
        Ok(self.client.create(ROOT, Ino::ROOT, name.as_bytes(), 0o755, new).await?.ino)
    }

    async fn make_files(&self, dir: Ino, count: u64) -> Result<Run> {
        let meter = Meter::start()?;
        stream::iter(0..count)
            .map(|number| async move {
                let new = NewInode::File { open: None };
                self.client.create(ROOT, dir, file_name(number).as_bytes(), 0o644, new).await
            })
            .buffer_unordered(IN_FLIGHT)
            .try_for_each(|_| std::future::ready(Ok(())))
            .await?;
        meter.stop(0, count)
    }

    /// In its own time: a store holds some rounds of them.
    async fn remove_files(&self, dir: Ino, count: u64) -> Result<()> {
        stream::iter(0..count)
            .map(|number| async move {
                self.client.unlink(ROOT, dir, file_name(number).as_bytes()).await
            })
            .buffer_unordered(IN_FLIGHT)
            .try_for_each(|_| std::future::ready(Ok(())))
            .await?;
        Ok(())
    }

    async fn list(&self, dir: Ino, count: u64) -> Result<Run> {
        let meter = Meter::start()?;
        let (mut cookie, mut seen) = (0, 0);
        loop {
            let (entries, end) = self.client.read_dir(dir, cookie, ENTRIES_AT_ONCE, true).await?;
            anyhow::ensure!(entries.iter().all(|entry| entry.attr.is_some()), "no attributes");
            seen += entries.len() as u64;
            cookie = entries.last().map_or(cookie, |last| last.cookie);
            if end {
                break;
            }
        }
        anyhow::ensure!(seen == count, "{seen} of {count} names are listed");
        meter.stop(0, count)
    }
}

fn file_name(number: u64) -> String {
    format!("file-{number:06}")
}

/// In operations per second, as the bars are.
fn per_second(name: &'static str, unit: &'static str, all: &[Run]) -> Taken {
    let mut taken = absolute(Rate::Kiops, name, all);
    taken.value *= 1e3;
    taken.unit = unit.into();
    taken.spread.lowest *= 1e3;
    taken.spread.highest *= 1e3;
    for operand in &mut taken.operands {
        operand.value *= 1e3;
        operand.unit = unit.into();
    }
    taken
}

async fn creates(effort: Effort) -> Result<Taken> {
    let bench = Bench::new().await?;
    let count = effort.amount(40_000);
    let one = async |number: usize| {
        let dir = bench.make_dir(&format!("run {number}")).await?;
        let run = bench.make_files(dir, count).await?;
        bench.remove_files(dir, count).await?;
        Ok(run)
    };
    Ok(per_second("client", "creates/s", &runs(effort, one).await?))
}

async fn listing(effort: Effort) -> Result<Taken> {
    let bench = Bench::new().await?;
    let count = effort.amount(100_000);
    let dir = bench.make_dir("listed").await?;
    bench.make_files(dir, count).await?;
    let one = async |_| bench.list(dir, count).await;
    Ok(per_second("client", "entries/s", &runs(effort, one).await?))
}

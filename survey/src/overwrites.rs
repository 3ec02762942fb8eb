//! Overwrites in place on RAID 6 8+2, and what the journal costs that closes the write hole (design note 0015).

use crate::array::{
    CHUNK_BYTES, Ceiling, DATA_SHARE, FLUSH_STRIPES, SOURCE_STRIPES, STRIPE_BYTES, WIDTH, raid6_of,
    run, source, steps, ten, write_round,
};
use crate::figure::{Bar, Operand, Taken};
use crate::harness::{Effort, Meter, Rate, Run, Said, pairs};
use crate::load::Load;
use crate::members::{Raw, Speed, Storage};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::units::KIB;
use levada_base::{Buf, BufMut, IoVec};
use levada_device::{Device, Durability};
use levada_raid::{Array, RaidArray};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Whole stripes in flight: each is recorded before it is in place, and others are to be in place meanwhile.
const STRIPE_DEPTH: usize = 16;
/// 4 KiB writes in flight.
const RANDOM_DEPTH: usize = 128;
/// I/Os that a small write of RAID 6 cannot do without: old data and old parity are read, new ones written.
const IOS_PER_SMALL_WRITE: f64 = 6.0;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "array.nvme.raid6_8p2.overwrite_seqwrite_of_ceiling",
            what: "whole stripes again, against the members without parity times 8/10",
            bar: Bar::AtLeast(0.94),
            take: |effort| run(overwrite_of_ceiling(effort)),
        },
        Spec {
            name: "array.nvme.raid6_8p2.randwrite4k_of_ideal",
            what: "4 KiB writes anywhere, against a sixth of what the members do with reads and writes by turns",
            bar: Bar::AtLeast(0.75),
            take: |effort| run(randwrite_of_ideal(effort)),
        },
        Spec {
            name: "array.nvme.write_hole_cost_overwrite",
            what: "share of the rate of whole stripes again that the journal costs",
            bar: Bar::AtMost(0.03),
            take: |effort| run(cost(effort, Speed::Nvme, Work::Stripes)),
        },
        Spec {
            name: "array.nvme_flush_100us.write_hole_cost_overwrite",
            what: "the same where a flush takes 100 us, with one after every 64 stripes",
            bar: Bar::AtMost(0.03),
            take: |effort| run(cost(effort, Speed::NvmeFlush100us, Work::Stripes)),
        },
        Spec {
            name: "array.nvme.write_hole_cost_rand4k",
            what: "share of the rate of 4 KiB writes anywhere that the journal costs",
            bar: Bar::AtMost(0.25),
            take: |effort| run(cost(effort, Speed::Nvme, Work::Small)),
        },
        Spec {
            name: "array.nvme_flush_100us.write_hole_cost_rand4k",
            what: "the same where a flush takes 100 us",
            bar: Bar::AtMost(0.25),
            take: |effort| run(cost(effort, Speed::NvmeFlush100us, Work::Small)),
        },
    ]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Whole stripes, in order.
    Stripes,
    /// 4 KiB, anywhere.
    Small,
}

/// An array all of whose stripes are written and flushed.
struct Written {
    array: RaidArray,
    source: Rc<[IoVec]>,
    stripes: u64,
}

impl Written {
    async fn new(devices: &[Rc<dyn Device>], stripes: u64) -> Result<Self> {
        let (array, source) = (raid6_of(devices, CHUNK_BYTES).await?, source());
        let whole: Rc<dyn Array> = Rc::new(array.clone());
        write_round(&whole, &source, stripes, stripes).await?;
        Ok(Self { array, source, stripes })
    }

    /// Writes every stripe again, and flushes after each `step` of them.
    async fn write_stripes(&self, step: u64) -> Result<Run> {
        let meter = Meter::start()?;
        for span in steps(self.stripes, step, STRIPE_BYTES) {
            let (array, source) = (self.array.clone(), Rc::clone(&self.source));
            let load = Load::sequential(span, STRIPE_BYTES, STRIPE_DEPTH);
            load.drive(move |at| {
                let data = source[(at / STRIPE_BYTES % SOURCE_STRIPES) as usize].clone();
                let array = array.clone();
                async move { Ok(array.write(at, data, Durability::Volatile).await?) }
            })
            .await?;
            self.array.flush().await?;
        }
        meter.stop(self.stripes * STRIPE_BYTES, self.stripes)
    }

    fn small_load(&self, ops: u64, number: usize) -> Load {
        Load::random(0..self.stripes * STRIPE_BYTES, 4 * KIB, RANDOM_DEPTH, ops, number as u64)
    }

    /// Writes 4 KiB at a time, anywhere, and flushes at the end.
    async fn write_small(&self, ops: u64, number: usize) -> Result<Run> {
        let (array, data) = (self.array.clone(), block());
        let meter = Meter::start()?;
        self.small_load(ops, number)
            .drive(move |at| {
                let (array, data) = (array.clone(), data.clone());
                async move { Ok(array.write(at, data.into_vec(), Durability::Volatile).await?) }
            })
            .await?;
        self.array.flush().await?;
        meter.stop(ops * 4 * KIB, ops)
    }

    /// I/Os of the members so far, and the bytes that these moved.
    fn moved(&self) -> (u64, u64) {
        let members = self.array.status().members;
        let ios = members.iter().map(|member| member.latency.count()).sum();
        let bytes = members.iter().map(|member| member.bytes_read + member.bytes_written).sum();
        (ios, bytes)
    }
}

fn block() -> Buf {
    let mut block = BufMut::zeroed(4 * KIB as usize);
    block.fill(0x5a);
    block.freeze()
}

async fn overwrite_of_ceiling(effort: Effort) -> Result<Taken> {
    let stripes = effort.amount(1024);
    let devices = ten(Speed::Nvme, Storage::Null, stripes * STRIPE_BYTES);
    let written = Written::new(&devices, stripes).await?;
    let ceiling = Ceiling::new(&devices, &written.source);
    let ours = async |_| written.write_stripes(stripes).await;
    let theirs = async |_| ceiling.write(stripes, stripes).await;
    let said = Speed::Nvme.says(WIDTH, CHUNK_BYTES, Rate::GbPerS);
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("array", "ceiling"), DATA_SHARE))
}

async fn randwrite_of_ideal(effort: Effort) -> Result<Taken> {
    let (stripes, ops) = (1024, effort.amount(20_000));
    let devices = ten(Speed::Nvme, Storage::Null, stripes * STRIPE_BYTES);
    let (written, raw) = (Written::new(&devices, stripes).await?, Raw::new(&devices, CHUNK_BYTES));
    let ours = async |number| written.write_small(ops, number).await;
    // As many I/Os as ours may do.
    let raw_ops = ops * IOS_PER_SMALL_WRITE as u64;
    let theirs = async |number| mixed(&raw, &written.small_load(raw_ops, number)).await;
    let said = Speed::Nvme.says(WIDTH, 4 * KIB, Rate::Kiops);
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::Kiops, ("array", "ideal"), 1.0 / IOS_PER_SMALL_WRITE))
}

/// Reads and writes by turns.
async fn mixed(raw: &Raw, load: &Load) -> Result<Run> {
    let (raw, data, bytes) = (raw.clone(), block(), load.piece_bytes);
    let reads = Cell::new(false);
    load.run(move |at| {
        let (raw, data) = (raw.clone(), data.clone());
        let is_read = reads.replace(!reads.get());
        async move {
            match is_read {
                true => raw.read(at, bytes).await,
                false => raw.write_piece(at, data.into_vec()).await,
            }
        }
    })
    .await
}

/// An array with its journal against one that records nothing, each on members of its own.
async fn cost(effort: Effort, speed: Speed, work: Work) -> Result<Taken> {
    let (stripes, ops) = (effort.amount(1024), effort.amount(20_000));
    let new = async || {
        let devices = ten(speed, Storage::Null, stripes * STRIPE_BYTES);
        Written::new(&devices, stripes).await
    };
    let (with, without) = (new().await?, new().await?);
    without.array.record_nothing_for_measurement();
    let step = match speed {
        Speed::NvmeFlush100us => FLUSH_STRIPES,
        Speed::Unlimited | Speed::Nvme | Speed::Slow => stripes,
    };
    // Of the last run: operations, and what the members did for them.
    let (did, did_without) = (RefCell::default(), RefCell::default());
    let one = async |written: &Written, number, did: &RefCell<Vec<Operand>>, of| {
        let before = written.moved();
        let run = match work {
            Work::Stripes => written.write_stripes(step).await?,
            Work::Small => written.write_small(ops, number).await?,
        };
        let after = written.moved();
        let each = |name, unit, by, amount: u64| {
            Operand::new(name, amount as f64 / run.ops as f64 / by, unit)
        };
        let (ios, bytes): (&'static str, &'static str) = of;
        *did.borrow_mut() = vec![
            each(ios, "I/Os a write", 1.0, after.0 - before.0),
            each(bytes, "KiB a write", 1024.0, after.1 - before.1),
        ];
        Ok(run)
    };
    let ours = async |number| one(&with, number, &did, ("with: members", "with: members")).await;
    let theirs = async |number| {
        one(&without, number, &did_without, ("without: members", "without: members")).await
    };
    let (rate, said) = match work {
        Work::Stripes => (Rate::GbPerS, speed.says(WIDTH, CHUNK_BYTES, Rate::GbPerS)),
        // A small write waits for several I/Os one after another: what the members could do says little.
        Work::Small => (Rate::Kiops, None),
    };
    let said = said.map(|said| Said { side: "without", value: said.value * DATA_SHARE, ..said });
    let pairs = pairs(effort, said, ours, theirs).await?;
    let mut taken = pairs.cost(rate, ("with the journal", "without"));
    taken.operands.extend(did.take());
    taken.operands.extend(did_without.take());
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Nothing but this crate may leave the journal or checksums out: not the program, not a cluster file.
    #[test]
    fn only_measurements_leave_out_journals_and_checksums() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let mut dirs: Vec<_> = ["cli", "control", "fs", "store", "base", "sim", "block"]
            .map(|part| root.join(part))
            .into();
        let mut named_in = Vec::new();
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).expect("a directory of sources") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    dirs.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = std::fs::read_to_string(&path).expect("UTF-8");
                    if text.contains("_nothing_for_measurement") {
                        named_in.push(path);
                    }
                }
            }
        }
        named_in.sort();
        let defined = ["block/raid/src/raid.rs", "store/log/src/log.rs"].map(|at| root.join(at));
        assert_eq!(named_in, defined, "where they are defined");
    }
}

//! Arrays: RAID 6 over ten members against the same members without protection.
//!
//! Chunks are 128 KiB, so a stripe of 8+2 holds 1 MiB of data, as in the default cluster. Overwrites are in
//! [`crate::overwrites`], missing members in [`crate::degraded`], the engine by itself in [`crate::engine`].

use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, pairs};
use crate::load::Load;
use crate::log::raw_read;
use crate::members::{Raw, Speed, Storage, members};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::ids::Uuid;
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_base::{BufMut, Epoch, IoVec};
use levada_device::Device;
use levada_parity::Code;
use levada_raid::{Array, ArraySpec, IoClass, Level, MemberSpec, RaidArray};
use std::ops::Range;
use std::rc::Rc;

pub(crate) const CHUNK_BYTES: u64 = 128 * KIB;
pub(crate) const WIDTH: usize = 10;
pub(crate) const DATA_CHUNKS: u64 = 8;
pub(crate) const STRIPE_BYTES: u64 = DATA_CHUNKS * CHUNK_BYTES;
/// Data over what a fresh stripe writes.
pub(crate) const DATA_SHARE: f64 = 0.8;
/// Stripes being written at once.
pub(crate) const WRITE_DEPTH: usize = 4;
/// Reads of 1 MiB in flight.
pub(crate) const READ_DEPTH: usize = 16;
/// Random reads in flight; random picks leave some members idle now and then, on both sides.
pub(crate) const RANDOM_DEPTH: usize = 256;
/// Stripes of payload that writers cycle through.
pub(crate) const SOURCE_STRIPES: u64 = 64;
/// Stripes between two flushes where flushes cost something.
pub(crate) const FLUSH_STRIPES: u64 = 64;
/// What the array keeps for itself on a member, with room to spare.
pub(crate) const MEMBER_METADATA_BYTES: u64 = 32 * MIB;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "array.nvme.raid6_8p2.fresh_seqwrite_of_ceiling",
            what: "fresh stripes, against the members without parity times 8/10",
            bar: Bar::AtLeast(0.97),
            take: |effort| run(fresh_of_ceiling(effort, Speed::Nvme, None)),
        },
        Spec {
            name: "array.nvme_flush_100us.raid6_8p2.fresh_seqwrite_of_ceiling",
            what: "the same where a flush takes 100 us, with one after every 64 stripes",
            bar: Bar::AtLeast(0.97),
            take: |effort| {
                run(fresh_of_ceiling(effort, Speed::NvmeFlush100us, Some(FLUSH_STRIPES)))
            },
        },
        Spec {
            name: "array.nvme.raid6_8p2.seqread_of_raw",
            what: "1 MiB reads in order, against the members without parity",
            bar: Bar::AtLeast(0.99),
            take: |effort| {
                let devices = ten(Speed::Nvme, Storage::Null, stripes_of(effort) * STRIPE_BYTES);
                run(async move { seqread_of_raw(effort, &devices, Speed::Nvme).await })
            },
        },
        Spec {
            name: "array.nvme.raid6_8p2.randread4k_of_raw",
            what: "4 KiB reads anywhere, against the members without parity",
            bar: Bar::AtLeast(0.97),
            take: |effort| run(randread_of_raw(effort)),
        },
        Spec {
            name: "array.ram.raid6_8p2.fresh_seqwrite_of_floor",
            what: "fresh stripes, against copying what is written and the parity kernel",
            bar: Bar::AtLeast(0.85),
            take: |effort| run(seqwrite_of_floor(effort)),
        },
    ]
}

pub(crate) fn run(figure: impl Future<Output = Result<Taken>>) -> Result<Taken> {
    Reactor::new()?.block_on(figure)
}

/// RAID 6 8+2 on new members.
pub(crate) async fn raid6(members: &[Rc<dyn Device>]) -> Result<Rc<dyn Array>> {
    Ok(Rc::new(raid6_of(members, CHUNK_BYTES).await?))
}

/// The same with all that only an array can do.
pub(crate) async fn raid6_of(members: &[Rc<dyn Device>], chunk_bytes: u64) -> Result<RaidArray> {
    create("data", Level::Raid6, chunk_bytes, members).await
}

/// A mirror of three copies, dealt over new members.
pub(crate) async fn mirror(members: &[Rc<dyn Device>]) -> Result<Rc<dyn Device>> {
    let array = create("meta", Level::Raid1 { copies: 3 }, MIB, members).await?;
    Ok(Rc::new(array))
}

async fn create(
    name: &str,
    level: Level,
    chunk_bytes: u64,
    members: &[Rc<dyn Device>],
) -> Result<RaidArray> {
    let member = |(number, device): (usize, &Rc<dyn Device>)| {
        member(Rc::clone(device), number as u128 + 1, (number / 2) as u16)
    };
    let spec = ArraySpec {
        uuid: Uuid::from_u128(0x5e),
        name: name.into(),
        level,
        chunk_bytes,
        block_bytes: None,
        journal_bytes: None,
        members: members.iter().enumerate().map(member).collect(),
        spares: 0,
    };
    Ok(RaidArray::create(spec, Epoch(1)).await?)
}

pub(crate) fn member(device: Rc<dyn Device>, uuid: u128, enclosure: u16) -> MemberSpec {
    let name = device.info().name.clone();
    MemberSpec { device, uuid: Uuid::from_u128(uuid), name, enclosure }
}

/// Members whose array holds `data_bytes`.
pub(crate) fn ten(speed: Speed, storage: Storage, data_bytes: u64) -> Vec<Rc<dyn Device>> {
    members(speed, storage, WIDTH, data_bytes / DATA_CHUNKS + MEMBER_METADATA_BYTES)
}

/// Payload of whole stripes, each chunk a buffer of its own.
pub(crate) fn source() -> Rc<[IoVec]> {
    let chunk = |number: u64| {
        let mut chunk = BufMut::for_overwrite(CHUNK_BYTES as usize);
        chunk.fill(number as u8 | 1);
        chunk.freeze()
    };
    let chunks = |stripe: u64| (0..DATA_CHUNKS).map(|i| chunk(stripe * 31 + i)).collect();
    (0..SOURCE_STRIPES).map(chunks).collect()
}

/// Declares `stripes` fresh and writes them all, `rounds` times.
pub(crate) async fn write_stripes(
    array: &Rc<dyn Array>,
    source: &Rc<[IoVec]>,
    stripes: u64,
    rounds: u64,
) -> Result<Run> {
    let meter = Meter::start()?;
    for _ in 0..rounds {
        write_round(array, source, stripes, stripes).await?;
    }
    meter.stop(rounds * stripes * STRIPE_BYTES, rounds * stripes)
}

/// Writes fresh stripes and flushes after each `step` of them.
pub(crate) async fn write_round(
    array: &Rc<dyn Array>,
    source: &Rc<[IoVec]>,
    stripes: u64,
    step: u64,
) -> Result<()> {
    array.declare_fresh(0, stripes).await?;
    for span in steps(stripes, step, STRIPE_BYTES) {
        let (target, source) = (Rc::clone(array), Rc::clone(source));
        let load = Load::sequential(span, STRIPE_BYTES, WRITE_DEPTH);
        load.drive(move |at| {
            let stripe = at / STRIPE_BYTES;
            let (target, data) =
                (Rc::clone(&target), source[(stripe % SOURCE_STRIPES) as usize].clone());
            async move { Ok(target.write_fresh(stripe, data, IoClass::Foreground).await?) }
        })
        .await?;
        array.flush().await?;
    }
    Ok(())
}

/// The bytes of each `step` of `stripes` stripes.
pub(crate) fn steps(
    stripes: u64,
    step: u64,
    stripe_bytes: u64,
) -> impl Iterator<Item = Range<u64>> {
    (0..stripes)
        .step_by(step as usize)
        .map(move |first| first * stripe_bytes..(first + step).min(stripes) * stripe_bytes)
}

/// Stripes of a sequential span.
fn stripes_of(effort: Effort) -> u64 {
    effort.amount(2048)
}

async fn fresh_of_ceiling(
    effort: Effort,
    speed: Speed,
    flush_stripes: Option<u64>,
) -> Result<Taken> {
    let devices = ten(speed, Storage::Null, stripes_of(effort) * STRIPE_BYTES);
    seqwrite_of_ceiling(effort, &devices, speed, flush_stripes).await
}

/// Fresh stripes; everything is flushed at the end, and also after each `flush_stripes`.
pub(crate) async fn seqwrite_of_ceiling(
    effort: Effort,
    devices: &[Rc<dyn Device>],
    speed: Speed,
    flush_stripes: Option<u64>,
) -> Result<Taken> {
    let stripes = stripes_of(effort);
    let step = flush_stripes.unwrap_or(stripes);
    let (array, source) = (raid6(devices).await?, source());
    let ceiling = Ceiling::new(devices, &source);
    let ours = async |_| {
        let meter = Meter::start()?;
        write_round(&array, &source, stripes, step).await?;
        meter.stop(stripes * STRIPE_BYTES, stripes)
    };
    let theirs = async |_| ceiling.write(stripes, step).await;
    let said = speed.says(WIDTH, CHUNK_BYTES, Rate::GbPerS);
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("array", "ceiling"), DATA_SHARE))
}

/// The members without parity: as many chunks per operation as a stripe has, all of them payload.
pub(crate) struct Ceiling {
    raw: Raw,
    source: Rc<[IoVec]>,
}

impl Ceiling {
    pub fn new(devices: &[Rc<dyn Device>], source: &[IoVec]) -> Self {
        let chunks = |data: &IoVec| data.iter().cycle().take(WIDTH).cloned().collect();
        let source = source.iter().map(chunks).collect();
        Self { raw: Raw::new(devices, CHUNK_BYTES), source }
    }

    pub async fn write(&self, stripes: u64, step: u64) -> Result<Run> {
        let stripe_bytes = WIDTH as u64 * CHUNK_BYTES;
        let meter = Meter::start()?;
        for span in steps(stripes, step, stripe_bytes) {
            let (target, source) = (self.raw.clone(), Rc::clone(&self.source));
            let load = Load::sequential(span, stripe_bytes, WRITE_DEPTH);
            load.drive(move |at| {
                let data = source[(at / stripe_bytes % SOURCE_STRIPES) as usize].clone();
                let target = target.clone();
                async move { target.write_chunks(at, data).await }
            })
            .await?;
            self.raw.flush().await?;
        }
        meter.stop(stripes * stripe_bytes, stripes)
    }
}

pub(crate) async fn read(array: &Rc<dyn Array>, load: &Load) -> Result<Run> {
    let (target, bytes) = (Rc::clone(array), load.piece_bytes);
    load.run(move |at| {
        let array = Rc::clone(&target);
        async move {
            array.read(at, BufMut::for_overwrite(bytes as usize).into_vec()).await?;
            Ok(())
        }
    })
    .await
}

/// Reads of an array and of its members without protection, under the same load. The stripes are
/// declared and never written: null storage keeps nothing anyway.
async fn reads_of_raw(
    effort: Effort,
    devices: &[Rc<dyn Device>],
    speed: Speed,
    load: &Load,
    rate: Rate,
) -> Result<Taken> {
    let (array, raw) = (raid6(devices).await?, Raw::new(devices, CHUNK_BYTES));
    array.declare_fresh(0, load.span.end / STRIPE_BYTES).await?;
    let ours = async |_| read(&array, load).await;
    let theirs = async |_| raw_read(&raw, load).await;
    let said = speed.says(WIDTH, load.piece_bytes.min(CHUNK_BYTES), rate);
    Ok(pairs(effort, said, ours, theirs).await?.ratio(rate, ("array", "raw"), 1.0))
}

/// Reads of 1 MiB in order.
pub(crate) async fn seqread_of_raw(
    effort: Effort,
    devices: &[Rc<dyn Device>],
    speed: Speed,
) -> Result<Taken> {
    let span = 0..stripes_of(effort) * STRIPE_BYTES;
    let load = Load::sequential(span, MIB, READ_DEPTH);
    reads_of_raw(effort, devices, speed, &load, Rate::GbPerS).await
}

async fn randread_of_raw(effort: Effort) -> Result<Taken> {
    let span = 0..2048 * STRIPE_BYTES;
    let load = Load::random(span, 4 * KIB, RANDOM_DEPTH, effort.amount(100_000), 7);
    let devices = ten(Speed::Nvme, Storage::Null, load.span.end);
    reads_of_raw(effort, &devices, Speed::Nvme, &load, Rate::Kiops).await
}

async fn seqwrite_of_floor(effort: Effort) -> Result<Taken> {
    // 1.25 GiB on the members, far above any L3.
    let (stripes, rounds) = (1024, effort.amount(4));
    let devices = ten(Speed::Unlimited, Storage::Ram, stripes * STRIPE_BYTES);
    let (array, source) = (raid6(&devices).await?, source());
    let mut floor = Floor::new(&source, stripes)?;
    let ours = async |_| write_stripes(&array, &source, stripes, rounds).await;
    let theirs = async |_| floor.write(rounds);
    let pairs = pairs(effort, None, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("array", "floor"), 1.0))
}

/// What writing fresh stripes to memory cannot do without.
struct Floor {
    code: Code,
    source: Rc<[IoVec]>,
    /// Per stripe, its ten chunks.
    kept: Vec<Vec<BufMut>>,
    parity: [BufMut; 2],
}

impl Floor {
    fn new(source: &Rc<[IoVec]>, stripes: u64) -> Result<Self> {
        let chunk = || BufMut::zeroed(CHUNK_BYTES as usize);
        Ok(Self {
            code: Code::pq(DATA_CHUNKS as usize)?,
            source: Rc::clone(source),
            kept: (0..stripes).map(|_| (0..WIDTH).map(|_| chunk()).collect()).collect(),
            parity: [chunk(), chunk()],
        })
    }

    fn write(&mut self, rounds: u64) -> Result<Run> {
        let meter = Meter::start()?;
        for _ in 0..rounds {
            self.write_round();
        }
        let stripes = rounds * self.kept.len() as u64;
        meter.stop(stripes * STRIPE_BYTES, stripes)
    }

    fn write_round(&mut self) {
        for (stripe, kept) in self.kept.iter_mut().enumerate() {
            let data = &self.source[stripe % self.source.len()];
            let chunks: [&[u8]; DATA_CHUNKS as usize] = std::array::from_fn(|i| &data[i][..]);
            let [p, q] = &mut self.parity;
            self.code.encode(&chunks, &mut [p, q]);
            let written = chunks.into_iter().chain(self.parity.iter().map(|chunk| &chunk[..]));
            for (to, from) in kept.iter_mut().zip(written) {
                to.copy_from_slice(from);
            }
        }
    }
}

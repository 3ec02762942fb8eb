//! The RAID engine by itself: RAID 6 8+2 on members that answer at once and keep nothing, one core.

use crate::array::{DATA_CHUNKS, MEMBER_METADATA_BYTES, WIDTH, raid6_of, run};
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, absolute, pairs, runs};
use crate::load::Load;
use crate::members::{Speed, Storage, members};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::units::KIB;
use levada_base::{Buf, BufMut};
use levada_parity::Code;
use levada_raid::{Array, IoClass};
use std::hint::black_box;
use std::rc::Rc;

/// With parity a stripe of these, 640 KiB, stays in the second-level cache of a core.
const CHUNK_BYTES: u64 = 64 * KIB;
const STRIPE_BYTES: u64 = DATA_CHUNKS * CHUNK_BYTES;
/// Stripes of the array, all of them written in one go.
const STRIPES: u64 = 4096;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "array.null.read4k_iops_per_core",
            what: "4 KiB reads anywhere in an array whose members answer at once",
            bar: Bar::AtLeast(3000.0),
            take: |effort| run(read4k(effort)),
        },
        Spec {
            name: "array.null.full_stripe_of_parity",
            what: "fresh stripes of 8 x 64 KiB on such members, against the parity kernel alone",
            bar: Bar::AtLeast(0.8),
            take: |effort| run(full_stripe_of_parity(effort)),
        },
    ]
}

async fn array() -> Result<Rc<dyn Array>> {
    let member_bytes = STRIPES * CHUNK_BYTES + MEMBER_METADATA_BYTES;
    let devices = members(Speed::Unlimited, Storage::Null, WIDTH, member_bytes);
    Ok(Rc::new(raid6_of(&devices, CHUNK_BYTES).await?))
}

async fn read4k(effort: Effort) -> Result<Taken> {
    let array = array().await?;
    array.declare_fresh(0, STRIPES).await?;
    // Dealt beforehand: what is measured is not the choice.
    let offsets = Load::random(0..STRIPES * STRIPE_BYTES, 4 * KIB, 1, 1 << 16, 7).offsets();
    let rounds = effort.amount(64);
    let one_run = async |_| {
        let mut buffer = BufMut::zeroed(4 * KIB as usize).into_vec();
        let meter = Meter::start()?;
        for _ in 0..rounds {
            for at in &offsets {
                buffer = array.read(*at, buffer).await?;
            }
        }
        let ops = rounds * offsets.len() as u64;
        meter.stop(ops * 4 * KIB, ops)
    };
    Ok(absolute(Rate::Kiops, "array", &runs(effort, one_run).await?))
}

async fn full_stripe_of_parity(effort: Effort) -> Result<Taken> {
    let (array, code) = (array().await?, Code::pq(DATA_CHUNKS as usize)?);
    let source = source();
    let chunk = || BufMut::zeroed(CHUNK_BYTES as usize);
    let (mut p, mut q) = (chunk(), chunk());
    let rounds = effort.amount(2);
    let bytes = rounds * STRIPES * STRIPE_BYTES;
    let ours = async |_| {
        let meter = Meter::start()?;
        for _ in 0..rounds {
            array.declare_fresh(0, STRIPES).await?;
            for stripe in 0..STRIPES {
                let data = source.clone().into_vec();
                array.write_fresh(stripe, data, IoClass::Foreground).await?;
            }
            array.flush().await?;
        }
        meter.stop(bytes, rounds * STRIPES)
    };
    let theirs = async |_| {
        let meter = Meter::start()?;
        for _ in 0..rounds * STRIPES {
            let chunks = black_box(&source[..]).chunks_exact(CHUNK_BYTES as usize);
            let mut data: [&[u8]; DATA_CHUNKS as usize] = [&[]; DATA_CHUNKS as usize];
            data.iter_mut().zip(chunks).for_each(|(data, chunk)| *data = chunk);
            code.encode(&data, &mut [&mut p, &mut q]);
        }
        meter.stop(bytes, rounds * STRIPES)
    };
    let pairs = pairs(effort, None, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("array", "parity"), 1.0))
}

/// The data of one stripe, in one buffer.
fn source() -> Buf {
    let mut data = BufMut::zeroed(STRIPE_BYTES as usize);
    data.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at ^ (at >> 8)) as u8);
    data.freeze()
}

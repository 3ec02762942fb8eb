//! The parity kernels by themselves, on one core: the floor under everything with parity.
//!
//! Rates count the data covered, 8 chunks a stripe, not the parity.

use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, absolute, runs};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::BufMut;
use levada_base::reactor::Reactor;
use levada_base::units::{GIB, KIB};
use levada_parity::{Code, Slot};
use std::hint::black_box;

/// Those of the default array.
const CHUNK_BYTES: u64 = 128 * KIB;
/// A stripe of these, 640 KiB, stays in the second-level cache of a core.
const CACHED_CHUNK_BYTES: u64 = 64 * KIB;
const DATA_CHUNKS: usize = 8;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "parity.pq_8p2.encode_cache",
            what: "P and Q of one stripe of 8+2 chunks of 64 KiB, over and over",
            bar: Bar::None,
            take: |effort| rates(effort, CACHED_CHUNK_BYTES, 1, encode),
        },
        Spec {
            name: "parity.pq_8p2.encode_dram",
            what: "P and Q of stripes far larger than the caches",
            bar: Bar::None,
            take: |effort| rates(effort, CHUNK_BYTES, 256, encode),
        },
        Spec {
            name: "parity.pq_8p2.recover2_dram",
            what: "two lost data chunks from the other eight",
            bar: Bar::None,
            take: |effort| rates(effort, CHUNK_BYTES, 256, recover),
        },
    ]
}

type Stripe = Vec<BufMut>;

fn rates(
    effort: Effort,
    chunk_bytes: u64,
    stripes: usize,
    work: fn(&Code, &mut Stripe),
) -> Result<Taken> {
    let code = Code::pq(DATA_CHUNKS)?;
    let mut stripes: Vec<Stripe> = (0..stripes).map(|_| stripe(&code, chunk_bytes)).collect();
    let stripe_bytes = DATA_CHUNKS as u64 * chunk_bytes;
    let count = effort.amount(4 * GIB / stripe_bytes);
    let one_run = async |_| -> Result<Run> {
        let meter = Meter::start()?;
        for number in 0..count as usize {
            let at = number % stripes.len();
            work(&code, black_box(&mut stripes[at]));
        }
        meter.stop(count * stripe_bytes, count)
    };
    let all = Reactor::new()?.block_on(runs(effort, one_run))?;
    Ok(absolute(Rate::GbPerS, "encoded", &all))
}

fn stripe(code: &Code, chunk_bytes: u64) -> Stripe {
    let chunk = |number: usize| {
        let mut chunk = BufMut::for_overwrite(chunk_bytes as usize);
        for (at, byte) in chunk.iter_mut().enumerate() {
            *byte = (at ^ (at >> 8) ^ (number * 41)) as u8;
        }
        chunk
    };
    let mut stripe = (0..code.chunks()).map(chunk).collect();
    encode(code, &mut stripe);
    stripe
}

fn encode(code: &Code, stripe: &mut Stripe) {
    let (data, parity) = stripe.split_at_mut(DATA_CHUNKS);
    let data: [&[u8]; DATA_CHUNKS] = std::array::from_fn(|number| &data[number][..]);
    let [p, q] = parity else { unreachable!("8 + 2 chunks") };
    code.encode(&data, &mut [p, q]);
}

fn recover(code: &Code, stripe: &mut Stripe) {
    let slot = |(number, chunk)| match number {
        0 | 1 => Slot::Wanted(chunk),
        _ => Slot::Present(chunk),
    };
    let mut slots: Vec<Slot<'_>> =
        stripe.iter_mut().map(|chunk| &mut chunk[..]).enumerate().map(slot).collect();
    code.recover_slots(&mut slots).expect("two lost of 8 + 2");
}

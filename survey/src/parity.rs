//! The parity kernels by themselves, on one core: the floor under everything with parity.
//!
//! Rates count the data covered, 8 chunks a stripe, not the parity. Against ISA-L ([`crate::isal`]) both sides stay on one
//! core, each with its chunks one behind the other in an allocation of its own.

use crate::cores::stay_on_this_core;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, absolute, pairs, runs};
use crate::isal::{Function, Isal, Stripes};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::BufMut;
use levada_base::reactor::Reactor;
use levada_base::units::{GIB, KIB};
use levada_parity::{CHUNKS_MAX, Code, PARITY_MAX, Slot};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::hint::black_box;

/// Those of the default array.
const CHUNK_BYTES: u64 = 128 * KIB;
/// A stripe of these, 640 KiB, stays in the second-level cache of a core.
const CACHED_CHUNK_BYTES: u64 = 64 * KIB;
const DATA_CHUNKS: usize = 8;
/// Stripes of 8+2 chunks of 64 KiB that make 320 MiB, far above any cache of a core.
const DRAM_STRIPES: usize = 512;
/// Pairs where a peer is named.
const PAIRS_WITH_PEER: usize = 7;

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
        Spec {
            name: "parity.pq_8p2.cache_of_isal",
            what: "P and Q of one stripe of 8+2 chunks of 64 KiB, against ISA-L's pq_gen",
            bar: Bar::AtLeast(1.6),
            take: |effort| of_isal(effort, Function::Pq, (8, 2), 1),
        },
        Spec {
            name: "parity.pq_8p2.dram_of_isal",
            what: "the same of stripes far larger than the caches",
            bar: Bar::AtLeast(0.95),
            take: |effort| of_isal(effort, Function::Pq, (8, 2), DRAM_STRIPES),
        },
        Spec {
            name: "parity.rs_8p3.cache_of_isal",
            what: "three parities of 8 chunks of 64 KiB, against ISA-L's ec_encode_data",
            bar: Bar::AtLeast(2.3),
            take: |effort| of_isal(effort, Function::Rs, (8, 3), 1),
        },
        Spec {
            name: "parity.rs_10p4.cache_of_isal",
            what: "four parities of 10 chunks of 64 KiB, against ISA-L's ec_encode_data",
            bar: Bar::AtLeast(2.1),
            take: |effort| of_isal(effort, Function::Rs, (10, 4), 1),
        },
        Spec {
            name: "parity.pq_8p2.dram_of_membw",
            what: "bytes touched, read and written, against reading the same memory",
            bar: Bar::AtLeast(0.8),
            take: of_membw,
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

/// Stripes in one allocation, one behind the other.
struct InARow {
    code: Code,
    stripes: Vec<Stripe>,
    /// The next one.
    at: usize,
}

impl InARow {
    fn new(code: Code, stripes: Stripes) -> Self {
        let chunk_bytes = stripes.chunk_bytes as usize;
        let mut all = BufMut::zeroed_to_stay(stripes.count * code.chunks() * chunk_bytes);
        all.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at ^ (at >> 8)) as u8);
        let mut stripe = || (0..code.chunks()).map(|_| all.split_to(chunk_bytes)).collect();
        let stripes = (0..stripes.count).map(|_| stripe()).collect();
        Self { code, stripes, at: 0 }
    }

    fn encode(&mut self, count: u64) {
        for _ in 0..count {
            encode(&self.code, black_box(&mut self.stripes[self.at]));
            self.at = (self.at + 1) % self.stripes.len();
        }
    }

    /// Reads all bytes of so many stripes, as plainly as can be.
    fn read(&mut self, count: u64) -> u64 {
        let mut sums = [0; 8];
        for _ in 0..count {
            for chunk in &self.stripes[self.at] {
                for line in chunk.as_chunks::<64>().0 {
                    for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                        *sum ^= u64::from_ne_bytes(*word);
                    }
                }
            }
            self.at = (self.at + 1) % self.stripes.len();
        }
        sums.into_iter().fold(0, |all, sum| all ^ sum)
    }
}

/// So many data and parity chunks of 64 KiB, in `count` stripes, against ISA-L.
fn of_isal(
    effort: Effort,
    function: Function,
    (data_chunks, parity_chunks): (usize, usize),
    count: usize,
) -> Result<Taken> {
    // Whatever this starts stays there, too.
    stay_on_this_core()?;
    let effort = effort.at_least(PAIRS_WITH_PEER);
    let stripes = Stripes { data_chunks, parity_chunks, chunk_bytes: CACHED_CHUNK_BYTES, count };
    let code = match function {
        Function::Pq => Code::pq(data_chunks)?,
        Function::Rs => Code::cauchy(data_chunks, parity_chunks)?,
    };
    let data_bytes = data_chunks as u64 * CACHED_CHUNK_BYTES;
    let work = effort.amount(2 * GIB / data_bytes);
    let (mut ours, mut theirs) = (InARow::new(code, stripes), Isal::start(function, stripes)?);
    let ours = async |_| {
        let meter = Meter::start()?;
        ours.encode(work);
        meter.stop(work * data_bytes, work)
    };
    let pairs =
        Reactor::new()?.block_on(pairs(effort, None, ours, async |_| theirs.encode(work)))?;
    Ok(pairs.ratio(Rate::GbPerS, ("levada", "isal"), 1.0))
}

fn of_membw(effort: Effort) -> Result<Taken> {
    stay_on_this_core()?;
    let effort = effort.at_least(PAIRS_WITH_PEER);
    let (data_chunks, parity_chunks) = (DATA_CHUNKS, 2);
    let (chunk_bytes, count) = (CACHED_CHUNK_BYTES, DRAM_STRIPES);
    let stripes = Stripes { data_chunks, parity_chunks, chunk_bytes, count };
    let all = RefCell::new(InARow::new(Code::pq(data_chunks)?, stripes));
    let touched_bytes = (data_chunks + parity_chunks) as u64 * chunk_bytes;
    let work = effort.amount(2 * GIB / touched_bytes);
    let ours = async |_| {
        let meter = Meter::start()?;
        all.borrow_mut().encode(work);
        meter.stop(work * touched_bytes, work)
    };
    let theirs = async |_| {
        let meter = Meter::start()?;
        black_box(all.borrow_mut().read(work));
        meter.stop(work * touched_bytes, work)
    };
    let pairs = Reactor::new()?.block_on(pairs(effort, None, ours, theirs))?;
    Ok(pairs.ratio(Rate::GbPerS, ("touched", "read"), 1.0))
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
    let (data, parity) = stripe.split_at_mut(code.data_chunks());
    let data: SmallVec<[&[u8]; CHUNKS_MAX]> = data.iter().map(|chunk| &chunk[..]).collect();
    let mut parity: SmallVec<[&mut [u8]; PARITY_MAX]> =
        parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
    code.encode(&data, &mut parity);
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

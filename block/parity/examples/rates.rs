//! Rates of every kernel, in gigabytes (10^9 bytes) per second on one core.
//!
//! `cargo run --release -p levada-parity --example rates [FILTER]`
//!
//! Counted are the bytes of data that an operation covers (k chunks; for a
//! recovery too), not the parity. *Cache* works on one stripe over and over:
//! 8+2 chunks of 64 KiB are 640 KiB. *DRAM* goes round stripes that together
//! far exceed every cache. Each figure is the median of the runs, with the
//! slowest and the fastest beside it; each run lasts at least 20 ms.
//!
//! One core of a virtual machine on an AMD EPYC of family 26 (Zen 5), 8+2 of
//! 64 KiB chunks on pages, at commit 9172454; *even* is the same code with
//! blocks of four registers (products: two) throughout, at commit 9f194f0 but
//! measured by this program, alternating:
//!
//! | cache, GB/s | even | 9172454 |
//! |---|---|---|
//! | gfni P | 130 | 195 |
//! | gfni P+Q | 129 | 148 |
//! | gfni recover 1 data from P | 109 | 190 |
//! | gfni recover 2 data | 89 | 92 |
//! | gfni verify | 105 | 102 |
//! | gfni Cauchy 8+4 | 76 | 91 |
//! | avx512 P+Q | 117 | 116 |
//! | avx2 P+Q | 76 | 76 |
//! | portable recover 2 data | 1.3 | 1.8 |
//!
//! In DRAM P+Q ran at 23 GB/s with gfni. (The message of 9172454 compares with
//! chunks that were not aligned, so it claims too much for some of these.)

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use levada_parity::{Code, Kernel, Slot};

const RUNS: usize = 11;
const RUN_TIME: Duration = Duration::from_millis(20);
const DRAM_BYTES: usize = 1 << 30;
const KIB: usize = 1024;
const PAGE_BYTES: usize = 4 * KIB;

/// A chunk that starts on a page, as those of direct I/O do.
struct Chunk {
    held: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Chunk {
    fn new(bytes: usize, seed: usize) -> Self {
        let held: Vec<u8> = (0..bytes + PAGE_BYTES).map(|b| (b ^ (b >> 8) ^ seed) as u8).collect();
        let start = held.as_ptr().align_offset(PAGE_BYTES);
        Self { held, start, bytes }
    }

    fn get(&self) -> &[u8] {
        &self.held[self.start..][..self.bytes]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut self.held[self.start..][..self.bytes]
    }
}

/// Stripes of equal shape; a code uses the first so many chunks of each.
struct Stripes(Vec<Vec<Chunk>>);

impl Stripes {
    fn new(chunks: usize, chunk_bytes: usize, total_bytes: usize) -> Self {
        let stripes = (total_bytes / (chunks * chunk_bytes)).max(1);
        let stripe = |s| (0..chunks).map(|i| Chunk::new(chunk_bytes, s * 7 + i * 41)).collect();
        Self((0..stripes).map(stripe).collect())
    }
}

/// One way to use a code on one stripe.
type Work = fn(&Code, &mut [Chunk]);

fn encode(code: &Code, chunks: &mut [Chunk]) {
    let (data, parity) = chunks.split_at_mut(code.data_chunks());
    let mut refs: [&[u8]; 32] = [&[]; 32];
    refs.iter_mut().zip(&*data).for_each(|(to, chunk)| *to = chunk.get());
    let mut outs: [&mut [u8]; 4] = Default::default();
    outs.iter_mut().zip(parity).for_each(|(to, chunk)| *to = chunk.get_mut());
    code.encode(&refs[..code.data_chunks()], &mut outs[..code.parity_chunks()]);
}

/// The first `lost` data chunks from the rest.
fn recover(code: &Code, chunks: &mut [Chunk], lost: usize) {
    let mut slots = [const { Slot::Absent }; 32];
    for (i, (slot, chunk)) in slots.iter_mut().zip(chunks).enumerate() {
        *slot = if i < lost { Slot::Wanted(chunk.get_mut()) } else { Slot::Present(chunk.get()) };
    }
    code.recover_slots(&mut slots[..code.chunks()]).expect("no more lost than tolerated");
}

fn verify(code: &Code, chunks: &mut [Chunk]) {
    let mut refs: [&[u8]; 32] = [&[]; 32];
    refs.iter_mut().zip(&*chunks).for_each(|(to, chunk)| *to = chunk.get());
    assert!(code.verify(&refs[..code.chunks()]), "encoded above");
}

/// Data chunk 0 changes into chunk 1 and back; the parity ends as it began.
fn update(code: &Code, chunks: &mut [Chunk]) {
    let (data, parity) = chunks.split_at_mut(code.data_chunks());
    let mut outs: [&mut [u8]; 4] = Default::default();
    outs.iter_mut().zip(parity).for_each(|(to, chunk)| *to = chunk.get_mut());
    let outs = &mut outs[..code.parity_chunks()];
    code.update_delta(0, data[0].get(), data[1].get(), outs);
    code.update_delta(0, data[1].get(), data[0].get(), outs);
}

fn measure(name: &str, code: &Code, data_bytes: usize, stripes: &mut Stripes, work: Work) {
    stripes.0.iter_mut().for_each(|chunks| encode(code, &mut chunks[..code.chunks()]));
    let mut turn = 0;
    let mut run = || {
        let (start, mut done) = (Instant::now(), 0_usize);
        while start.elapsed() < RUN_TIME {
            // A few stripes per look at the clock.
            for _ in 0..16 {
                turn = (turn + 1) % stripes.0.len();
                work(code, black_box(&mut stripes.0[turn][..code.chunks()]));
                done += data_bytes;
            }
        }
        done as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    run();
    let mut rates: Vec<f64> = (0..RUNS).map(|_| run()).collect();
    rates.sort_by(f64::total_cmp);
    let (median, low, high) = (rates[RUNS / 2], rates[0], rates[RUNS - 1]);
    println!("{name:42} {median:7.1} GB/s  ({low:.1} to {high:.1})");
}

fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let pq = Code::pq(8).expect("8+2");
    let works: [(&str, Code, usize, Work); 10] = [
        ("p 8+1 encode", Code::p(8).expect("8+1"), 8, encode),
        ("pq 8+2 encode", pq.clone(), 8, encode),
        ("pq 8+2 recover 1 data (P)", pq.clone(), 8, |code, chunks| recover(code, chunks, 1)),
        ("pq 8+2 recover 2 data", pq.clone(), 8, |code, chunks| recover(code, chunks, 2)),
        ("pq 8+2 verify", pq.clone(), 8, verify),
        ("pq 8+2 update, twice 1 chunk", pq, 2, update),
        ("cauchy 8+2 encode", Code::cauchy(8, 2).expect("8+2"), 8, encode),
        ("cauchy 8+3 encode", Code::cauchy(8, 3).expect("8+3"), 8, encode),
        ("cauchy 8+4 encode", Code::cauchy(8, 4).expect("8+4"), 8, encode),
        ("cauchy 8+4 recover 4 data", Code::cauchy(8, 4).expect("8+4"), 8, |code, chunks| {
            recover(code, chunks, 4);
        }),
    ];
    let sizes = [
        ("4 KiB cache", 4 * KIB, 1),
        ("64 KiB cache", 64 * KIB, 1),
        ("64 KiB DRAM", 64 * KIB, DRAM_BYTES),
        ("1 MiB DRAM", 1024 * KIB, DRAM_BYTES),
    ];
    for (place, chunk_bytes, total_bytes) in sizes {
        let mut stripes = Stripes::new(12, chunk_bytes, total_bytes);
        for kernel in Kernel::all_supported() {
            for (what, code, data_chunks, work) in &works {
                let name = format!("{} {place} {what}", kernel.name());
                if name.contains(&filter) {
                    let code = code.clone().with_kernel(kernel);
                    measure(&name, &code, data_chunks * chunk_bytes, &mut stripes, *work);
                }
            }
        }
    }
}

//! What a request to a drive costs with and without registered files and buffers.
//!
//! `drive_requests PATH [SECONDS [cached]]`: reads the file or block device, past the page cache, by random
//! 4 KiB requests at depth 32, from memory in recycled order, and by 1 MiB requests one after the
//! other. Rounds with and without take turns. Prints CPU time of this process per request in
//! microseconds, its kernel workers included; what the kernel does in threads of its own is not in it.
#![allow(unsafe_code)] // getrusage(2).

use levada_base::BufMut;
use levada_base::reactor::fs::{File, OpenOptions};
use levada_base::reactor::{self, Reactor};
use std::path::Path;
use std::time::{Duration, Instant};

const ROUNDS: usize = 7;

fn cpu_time() -> Duration {
    // SAFETY: all zeroes is a value of this plain structure, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage
    };
    let of = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// Microseconds of CPU time and of wall time per request.
fn one(
    path: &Path,
    direct: bool,
    (bytes, depth): (u64, usize),
    limit: Duration,
    registers: bool,
) -> (f64, f64) {
    let reactor = Reactor::new().expect("an io_uring");
    if !registers {
        reactor.register_nothing();
    }
    reactor.block_on(async {
        let options = OpenOptions { direct, ..OpenOptions::default() };
        let file = File::open(path, options).expect("opens");
        let blocks = file.len().expect("a length") / bytes;
        let workers: Vec<_> = (0..depth as u64)
            .map(|worker| {
                let file = file.clone();
                let mut at = worker;
                reactor::spawn(async move {
                    // So that the registering is not in the figure.
                    for _ in 0..10 {
                        let into = BufMut::for_overwrite(bytes as usize).into_vec();
                        drop(file.read_at(at * bytes, into).await.expect("a read"));
                    }
                    let (start, cpu) = (Instant::now(), cpu_time());
                    let mut requests = 0u64;
                    while start.elapsed() < limit {
                        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(worker | 1);
                        let block = if depth > 1 { (at >> 20) % blocks } else { requests % blocks };
                        let into = BufMut::for_overwrite(bytes as usize).into_vec();
                        drop(file.read_at(block * bytes, into).await.expect("a read"));
                        requests += 1;
                    }
                    (requests, cpu_time() - cpu, start.elapsed())
                })
            })
            .collect();
        let (mut requests, mut cpu, mut wall) = (0, Duration::ZERO, Duration::ZERO);
        for worker in workers {
            let one = worker.await.expect("a worker ends");
            (requests, cpu, wall) = (requests + one.0, cpu.max(one.1), wall.max(one.2));
        }
        let per_request = |time: Duration| time.as_secs_f64() * 1e6 / requests as f64;
        (per_request(cpu), per_request(wall))
    })
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("drive_requests PATH [SECONDS]");
    let seconds: f64 = args.next().map_or(0.5, |seconds| seconds.parse().expect("seconds"));
    let direct = args.next().is_none_or(|how| how != "cached");
    let limit = Duration::from_secs_f64(seconds);
    for (what, bytes, depth) in [("4 KiB random, 32 in flight", 4096, 32), ("1 MiB", 1 << 20, 1)] {
        let mut all = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for registers in [false, true] {
                let one = one(Path::new(&path), direct, (bytes, depth), limit, registers);
                all[usize::from(registers)].push(one);
            }
        }
        for (rounds, how) in all.iter_mut().zip(["plain", "registered"]) {
            rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (low, mid, high) = (rounds[0].0, rounds[ROUNDS / 2], rounds[ROUNDS - 1].0);
            println!(
                "{what:28} {how:10} cpu {:7.2} us ({low:.2} to {high:.2}), wall {:7.2} us",
                mid.0, mid.1
            );
        }
    }
}

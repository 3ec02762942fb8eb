//! What the index takes: memory as the cache counts it, disk for each row, and time where it does not fit into memory.
//! With `EXTENTS=200000`, `--release` and `--nocapture`, on a quiet machine, this prints the figures of
//! docs/design/0005-object-log.md; in any case what is counted must be near what the note says, and the bound be kept.

use crate::support::model::{below, config, object};
use crate::support::{Parts, World, bytes};
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_device::Device;
use levada_log::{Config, ObjectLog, Stability};
use std::ops::Range;
use std::time::Instant;

fn roomy(cached_bytes_max: u64) -> Config {
    let Config { page_bytes, unstable_bytes_max, .. } = Config::new(7, config().target);
    Config { cached_bytes_max, page_bytes, unstable_bytes_max, segment_stripes: 32, ..config() }
}

/// Without the slowness that the other tests want of it.
async fn open(world: &mut World, cached_bytes_max: u64, create: bool) -> ObjectLog {
    let epoch = world.next_life().epoch;
    let parts = Parts::new(world.array.clone(), world.store.clone(), epoch);
    parts.open_with(roomy(cached_bytes_max), create).await
}

async fn read_each(log: &ObjectLog, extents: u64, step: u64) {
    for n in 0..extents {
        log.read(object(1), n * step, 1).await.expect("read");
    }
}

/// Extents of `len` bytes, `step` apart, so that neighbours stay extents of their own.
fn measure(extents: u64, len: u64, step: u64, memory: Range<u64>, disk: Range<u64>) {
    Reactor::new().expect("a reactor").block_on(async {
        let stripes = (extents * (len + 400) * 5 / 4 / (64 * KIB) + 400).next_multiple_of(32);
        let mut world = World::with_index(stripes, 512 * MIB).await;
        world.array.delay_us_max.set(0);
        let log = open(&mut world, 64 * MIB, true).await;
        for n in 0..extents {
            let data = bytes(1, len);
            log.write(object(1), n * step, data, Stability::Unstable).await.expect("room");
        }
        log.settle().await.expect("settled");
        drop(log);
        let store = world.next_life().open_store().await;
        store.close().await.expect("closes");
        drop(store);
        let (mut used, mut at) = (0, 2 * MIB);
        while at < 512 * MIB {
            let into = levada_base::BufMut::zeroed(MIB as usize).into_vec();
            let read = world.store.read(at, into).await.expect("read");
            used += read[0].chunks(4096).filter(|page| page.iter().any(|b| *b != 0)).count();
            at += MIB;
        }
        let log = open(&mut world, 4 << 30, false).await;
        log.read(object(1), 0, 1).await.expect("read");
        let before = log.cached_bytes();
        read_each(&log, extents, step).await;
        let cached = log.cached_bytes();
        let per = |bytes: u64| bytes as f64 / extents as f64;
        println!(
            "{extents} extents of {len}: counted {:.0} bytes of memory each, on disk {:.0}",
            per(cached - before),
            per(used as u64 * 4096)
        );
        assert!(memory.contains(&((cached - before) / extents)), "{cached} of {extents} extents");
        assert!(
            disk.contains(&(used as u64 * 4096 / extents)),
            "{used} pages of {extents} extents"
        );
        let time = async |log: &ObjectLog, reads: u64| {
            let begun = Instant::now();
            for _ in 0..reads {
                log.read(object(1), below(extents) * step, len).await.expect("read");
            }
            begun.elapsed().as_secs_f64() * 1e6 / reads as f64
        };
        let all = time(&log, extents).await;
        drop(log);
        for share in [2, 4, 16] {
            let log = open(&mut world, cached / share, false).await;
            time(&log, extents / 10).await;
            let some = time(&log, extents / 10).await;
            assert!(log.cached_bytes() <= cached / share, "{} bytes", log.cached_bytes());
            println!("a read: {all:.2} us, with 1/{share} of it in memory {some:.2} us");
        }
    });
}

fn extents() -> u64 {
    std::env::var("EXTENTS").map_or(10_000, |extents| extents.parse().expect("a number"))
}

#[test]
fn small_extents() {
    measure(extents(), 512, 4 * KIB, 150..250, 80..260);
}

#[test]
fn large_extents() {
    measure(extents() / 50, 60_000, MIB, 200..2500, 200..2000);
}

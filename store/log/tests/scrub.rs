//! What a scrub costs on a log of small extents, and that it misses none while they move.
//!
//! `LEVADA_SCRUB_APPENDS=n` sets how many appends the measurement makes.

mod support;

use levada_base::ids::{Seq, TargetId};
use levada_base::reactor::{self, Reactor};
use levada_base::units::{KIB, MIB};
use levada_log::{Config, ObjectLog, Stability};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use support::model::{Model, TASKS, below, check_all, flat, object, payload, work};
use support::{World, seeds};

const FILES: u64 = 40;
const MOMENT: Duration = Duration::from_micros(20);

/// Appends of a few hundred bytes to files in turn, made durable a few at a time. What each holds.
async fn append(log: &ObjectLog, appends: u64) -> Vec<Vec<u8>> {
    let mut files = vec![Vec::new(); FILES as usize];
    for n in 0..appends {
        let file = below(FILES);
        let (data, bytes) = payload(100 + below(300));
        let contents = &mut files[file as usize];
        let offset = contents.len() as u64;
        log.write(object(file), offset, data, Stability::Unstable).await.expect("room");
        contents.extend_from_slice(&bytes);
        if n % 32 == 0 {
            log.commit(Seq(u64::MAX)).await.expect("committed");
        }
    }
    log.settle().await.expect("settled");
    files
}

fn stored(files: &[Vec<u8>]) -> u64 {
    files.iter().map(|file| file.len() as u64).sum()
}

#[test]
fn small_extents_cost_one_pass_over_the_array() {
    let appends = std::env::var("LEVADA_SCRUB_APPENDS").map_or(6_000, |n| n.parse().expect("n"));
    Reactor::simulated(1).block_on(async {
        let mut world = World::with_index(256 + appends / 50, 64 << 20).await;
        let config = Config::new(7, TargetId(3));
        let log = world.next_life().open_with(config, true).await;
        let files = append(&log, appends).await;
        let filled_bytes = world.array.written_stripes() * 64 * KIB;
        world.array.count_reads();
        let (before, cpu) = (reactor::now(), std::time::Instant::now());
        let report = log.scrub().await.expect("scrubbed");
        println!(
            "{appends} appends, {} KiB of filled stripes: {} array reads, {} KiB, at most {} KiB at once; \
             {:?} simulated, {:?} of this machine",
            filled_bytes / KIB,
            world.array.reads.get(),
            world.array.read_bytes.get() / KIB,
            world.array.reading_bytes_max.get() / KIB,
            before.elapsed(),
            cpu.elapsed(),
        );
        assert_eq!((report.objects, report.extents), (FILES, appends));
        assert_eq!((report.bytes, report.repaired_blocks), (stored(&files), 0));
        assert_eq!(report.damaged, []);
        assert!(world.array.read_bytes.get() <= filled_bytes);
        assert!(world.array.reads.get() <= 2 * filled_bytes.div_ceil(MIB) + 8);
        assert!(world.array.reading_bytes_max.get() <= 8 * MIB);
    });
}

/// With a cache so small that a file is many rounds, and rounds end inside of files.
#[test]
fn rot_among_small_extents_is_repaired_once_and_for_all() {
    for seed in seeds(10) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(160).await;
            let log = world.next_life().open(true).await;
            let files = append(&log, 1_000).await;
            let blocks = world.array.filled_blocks();
            for _ in 0..blocks.len() / 8 {
                world.array.rot_within(blocks[below(blocks.len() as u64) as usize], 2);
            }
            let report = log.scrub().await.expect("scrubbed");
            assert_eq!(
                (report.objects, report.extents, report.bytes),
                (FILES, 1_000, stored(&files))
            );
            assert!(report.repaired_blocks > 0 && report.damaged.is_empty(), "seed {seed}");
            // Nothing is left for readers, or for another scrub.
            let repairs = world.array.repairs.get();
            for (n, bytes) in files.iter().enumerate() {
                let read = log.read(object(n as u64), 0, bytes.len() as u64).await;
                assert!(flat(&read.expect("readable")) == *bytes, "seed {seed}: file {n}");
            }
            assert_eq!(log.scrub().await.expect("scrubbed").repaired_blocks, 0, "seed {seed}");
            assert_eq!(world.array.repairs.get(), repairs);
        });
    }
}

/// Writers and the cleaner move and free what a scrub is about to read.
#[test]
fn a_scrub_beside_writers_finds_no_damage_and_ends() {
    let (mut scrubs, mut cleaned, mut freed) = (0, 0, 0);
    for seed in seeds(20) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            let log = world.next_life().open(true).await;
            let model = Rc::new(RefCell::new(Model::default()));
            let working: Vec<_> = (0..TASKS)
                .map(|task| reactor::spawn(work(log.clone(), Rc::clone(&model), task, 300)))
                .collect();
            let done = Rc::new(Cell::new(false));
            let (scrubbed, all_done) = (log.clone(), Rc::clone(&done));
            let scrubbing = reactor::spawn(async move {
                let mut scrubs = 0;
                while !all_done.get() {
                    let report = scrubbed.scrub().await.expect("scrubbed");
                    assert_eq!((report.repaired_blocks, &report.damaged[..]), (0, &[][..]));
                    scrubs += 1;
                    reactor::sleep(MOMENT).await;
                }
                scrubs
            });
            for task in working {
                assert!(task.await.is_some(), "seed {seed}");
            }
            done.set(true);
            scrubs += scrubbing.await.expect("alive");
            check_all(&log, &model, seed).await;
            let counters = log.counters();
            cleaned += counters.cleaned_segments;
            freed += counters.freed_segments;
            assert_eq!(counters.damaged_blocks, 0);
        });
    }
    println!("{scrubs} scrubs beside {cleaned} segments cleaned, {freed} freed");
    assert!(scrubs > 20 && cleaned > 0 && freed > 0);
}

#[test]
fn progress_rises_to_its_end_and_goes() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(160).await;
        let log = world.next_life().open(true).await;
        append(&log, 1_000).await;
        assert_eq!(log.scrub_progress().checked_bytes, 0);
        let watched = log.clone();
        let scrub = reactor::spawn(async move { watched.scrub().await });
        let mut seen = vec![log.scrub_progress()];
        while seen.len() == 1 || log.scrub_progress().checked_bytes > 0 {
            reactor::sleep(MOMENT).await;
            let now = log.scrub_progress();
            if now.checked_bytes > 0 && seen.last() != Some(&now) {
                seen.push(now);
            }
        }
        scrub.await.expect("alive").expect("scrubbed");
        assert!(seen.len() > 5, "{seen:?}");
        assert!(seen.is_sorted_by_key(|progress| progress.checked_bytes));
        assert!(seen.iter().all(|progress| progress.checked_bytes <= progress.total_bytes));
        let last = seen.last().expect("some");
        assert!(last.checked_bytes > last.total_bytes * 9 / 10, "{last:?}");
        // A scrub that is given up shows nothing either.
        let mut given_up = Box::pin(log.scrub());
        while log.scrub_progress().checked_bytes == 0 {
            assert!(futures_util::poll!(&mut given_up).is_pending());
            reactor::sleep(MOMENT).await;
        }
        drop(given_up);
        assert_eq!(log.scrub_progress().checked_bytes, 0);
    });
}

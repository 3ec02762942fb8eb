//! What a scrub costs on a log of small extents, and that it misses none while they move.
//!
//! `LEVADA_SCRUB_APPENDS=n` sets how many appends the measurement makes.

use crate::support::model::{Model, TASKS, below, check_all, flat, object, payload, work};
use crate::support::{World, bytes, seeds};
use levada_base::ids::{Seq, TargetId};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::{KIB, MIB};
use levada_log::{Config, ObjectLog, ScrubOrder, ScrubReport, Stability};
use levada_raid::Limits;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

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

/// Bytes per second of the scrubs that are interrupted.
const SLOW: u64 = 64 * KIB;
const OBJECTS: u64 = 40;
const OBJECT_BYTES: u64 = 64 * KIB;

fn order(run: u64, bytes_per_second: u64) -> ScrubOrder {
    let limits = Limits {
        floor_bytes_per_second: bytes_per_second,
        ceiling_bytes_per_second: bytes_per_second,
    };
    ScrubOrder { run, limits, clock_s: || 1234 }
}

/// Objects in the order of the array, each larger than a round.
async fn fill(log: &ObjectLog) {
    for n in 0..OBJECTS {
        let data = bytes(n as u8, OBJECT_BYTES);
        log.write(object(n), 0, data, Stability::Unstable).await.expect("room");
    }
    log.settle().await.expect("settled");
}

/// Blocks of the data of the first objects and of the last.
fn first_and_last(world: &World) -> (u64, u64) {
    let blocks = world.array.filled_blocks();
    (blocks[1], blocks[blocks.len() - 64 * KIB as usize / 4096 * 3])
}

#[test]
fn an_interrupted_scrub_goes_on_where_it_was() {
    for seed in seeds(10) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            let node = Group::new();
            let parts = world.next_life();
            let log = reactor::spawn_in(&node, async move { parts.open(true).await }).await;
            let log = log.expect("alive");
            fill(&log).await;
            assert_eq!(log.scrub_record().await.expect("reads"), None);
            let whole = log.scrub().await.expect("scrubbed");
            assert_eq!(log.scrub_record().await.expect("reads"), None, "off the record");
            let scrubbed = log.clone();
            reactor::spawn_in(&node, async move { scrubbed.scrub_by_order(order(7, SLOW)).await });
            reactor::sleep(Duration::from_secs(15 + below(15))).await;
            node.kill();
            drop(log);
            world.cut_power().await;

            let log = world.next_life().open(false).await;
            let record = log.scrub_record().await.expect("reads").expect("there is one");
            assert_eq!((record.run, record.ended_s), (7, None));
            let done = record.found.objects;
            assert!((5..OBJECTS - 5).contains(&done), "seed {seed}: {done}");
            let (first, last) = first_and_last(&world);
            world.array.rot(first);
            world.array.rot(last);
            world.array.count_reads();
            let rest = log.scrub_by_order(order(7, u64::MAX)).await.expect("scrubbed");
            // What was checked is not read again, but for the round that was cut off.
            let left = (OBJECTS - done + 3) * OBJECT_BYTES;
            assert!(world.array.read_bytes.get() <= left + left / 4, "seed {seed}");
            assert_eq!(rest, ScrubReport { repaired_blocks: 1, ..whole.clone() }, "seed {seed}");
            let record = log.scrub_record().await.expect("reads").expect("there is one");
            assert_eq!((record.run, record.ended_s, &record.found), (7, Some(1234), &rest));

            // Ordered again it is over; the next one begins anew, and finds what rotted behind its back.
            world.array.count_reads();
            assert_eq!(log.scrub_by_order(order(7, SLOW)).await.expect("known"), rest);
            assert_eq!(world.array.reads.get(), 0);
            let next = log.scrub_by_order(order(8, u64::MAX)).await.expect("scrubbed");
            assert_eq!(next, ScrubReport { repaired_blocks: 1, ..whole.clone() }, "seed {seed}");
            assert_eq!(log.scrub().await.expect("scrubbed"), whole);
            drop(log);
            let store = world.next_life().open_store().await;
            let found = levada_log::check_index(&store, &|_| {}).await;
            assert_eq!(found.expect("reads").findings, []);
        });
    }
}

#[test]
fn a_scrub_keeps_its_rate() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        fill(&log).await;
        for bytes_per_second in [SLOW, 16 * SLOW] {
            world.array.count_reads();
            let begun = reactor::now();
            log.scrub_by_order(order(bytes_per_second, bytes_per_second)).await.expect("scrubbed");
            let least = world.array.read_bytes.get() as f64 / bytes_per_second as f64;
            let took = begun.elapsed().as_secs_f64();
            // The first piece goes at once.
            assert!((0.9 * least..1.1 * least).contains(&took), "{took} s, {least} s at the rate");
        }
        let begun = reactor::now();
        log.scrub_by_order(order(1, u64::MAX)).await.expect("scrubbed");
        assert!(begun.elapsed() < Duration::from_secs(1));
    });
}

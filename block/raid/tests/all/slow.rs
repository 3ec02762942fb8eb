//! Slow members: noticed by name, done without where redundancy allows, and trusted again. On modelled drives and virtual time.

use crate::common::{BLOCK, Rig, pattern, read, read_lent};
use levada_base::BufMut;
use levada_base::meter::Latency;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::sync::queue::Receiver;
use levada_base::units::KIB;
use levada_device::{Device, Durability};
use levada_raid::{Array, ArrayEvent, IoClass, Level, MemberSet, RaidArray};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const CHUNK: u64 = 32 * KIB;
const STRIPES: u64 = 48;
/// The slow one, and how slow.
const SLOW: usize = 2;
const SLOW_US: u64 = 50_000;

/// An array that is full, its drives, and what happens to it.
struct Bench {
    rig: Rig,
    array: RaidArray,
    events: Receiver<ArrayEvent>,
}

impl Bench {
    async fn new(level: Level, members: usize) -> Self {
        let rig = Rig::new(level, members, 0, CHUNK, 2 * STRIPES);
        let array = rig.create().await;
        let stripes = STRIPES.min(array.geometry().stripes);
        for stripe in 0..stripes {
            crate::common::write_stripe(&array, stripe, 1).await.expect("written");
        }
        array.flush().await.expect("flushed");
        for drive in &rig.drives {
            drive.delay_us.set(2000);
        }
        let events = array.events();
        Self { rig, array, events }
    }

    fn stripes(&self) -> u64 {
        STRIPES.min(self.array.geometry().stripes)
    }

    fn slow_down(&self, by_us: u64) {
        self.rig.drives[SLOW].least_us.set(by_us);
    }

    /// Reads of a block anywhere for so long, eight at once; how long they took.
    async fn work(&self, for_ms: u64) -> Latency {
        self.work_by(for_ms, async |array, at| read(array, at, BLOCK).await.expect("read")).await
    }

    async fn work_by(
        &self,
        for_ms: u64,
        read: impl AsyncFn(&RaidArray, u64) -> Vec<u8> + Copy + 'static,
    ) -> Latency {
        let took = Rc::new(Latency::default());
        let blocks = self.stripes() * self.array.geometry().stripe_bytes / BLOCK as u64;
        let end = reactor::now() + Duration::from_millis(for_ms);
        let workers: Vec<_> = (0..8)
            .map(|_| {
                let (array, took) = (self.array.clone(), Rc::clone(&took));
                reactor::spawn(async move {
                    while reactor::now() < end {
                        let at = reactor::random_u64() % blocks * BLOCK as u64;
                        let begun = reactor::now();
                        let held = read(&array, at).await;
                        took.add(begun.elapsed());
                        assert!(held == pattern(at, BLOCK, 1)[..], "block at {at}");
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.await;
        }
        (*took).clone()
    }

    fn slow(&self) -> Vec<String> {
        let members = self.array.status().members;
        members.into_iter().filter(|member| member.slow).map(|member| member.name).collect()
    }

    fn told(&mut self) -> Vec<ArrayEvent> {
        std::iter::from_fn(|| self.events.try_recv()).collect()
    }

    fn reads_of_slow(&self) -> u64 {
        self.rig.drives[SLOW].reads.get()
    }
}

const LEVELS: [(Level, usize); 4] = [
    (Level::Raid6, 6),
    (Level::Raid5, 5),
    (Level::Raid1 { copies: 2 }, 5),
    (Level::Raid50 { groups: 2 }, 6),
];

#[test]
fn a_slow_member_is_named_and_trusted_again() {
    for (level, members) in LEVELS {
        Reactor::simulated(1).block_on(async {
            let mut bench = Bench::new(level, members).await;
            bench.work(2000).await;
            assert!(bench.slow().is_empty() && bench.told().is_empty());
            bench.slow_down(SLOW_US);
            bench.work(4000).await;
            assert_eq!(bench.slow(), ["drive-2"], "{level}");
            let told = bench.told();
            let [ArrayEvent::MemberSlow { member: SLOW, name, took, others }] = &told[..] else {
                panic!("{level}: {told:?}")
            };
            assert_eq!(name, "drive-2");
            assert!(*took >= Duration::from_micros(SLOW_US) && *others < *took / 10, "{told:?}");
            bench.slow_down(0);
            bench.work(6000).await;
            assert!(bench.slow().is_empty(), "{level}");
            let told = bench.told();
            assert!(matches!(told[..], [ArrayEvent::MemberSlowNoMore { member: SLOW, .. }]));
        });
    }
}

#[test]
fn a_moment_is_not_enough() {
    Reactor::simulated(2).block_on(async {
        let bench = Bench::new(Level::Raid6, 6).await;
        for _ in 0..10 {
            bench.slow_down(SLOW_US);
            bench.work(300).await;
            bench.slow_down(0);
            bench.work(1000).await;
        }
        assert!(bench.slow().is_empty());
    });
}

#[test]
fn reads_do_without_a_slow_member() {
    for (level, members) in LEVELS {
        Reactor::simulated(3).block_on(async {
            let bench = Bench::new(level, members).await;
            bench.slow_down(SLOW_US);
            bench.array.avoid_slow_members(false);
            bench.work(3000).await;
            let with = bench.work(3000).await;
            assert_eq!(bench.slow(), ["drive-2"], "told also when it is not avoided");
            bench.array.avoid_slow_members(true);
            let before = bench.reads_of_slow();
            let without = bench.work(3000).await;
            let probes = bench.reads_of_slow() - before;
            let (p99, p99_without) = (with.quantile(0.99), without.quantile(0.99));
            let (rate, rate_without) = (with.count() / 3, without.count() / 3);
            println!(
                "{level}: reads of 4 KiB with one of {members} members slow: p99 {p99:?}, {rate}/s; \
                 avoided: p99 {p99_without:?}, {rate_without}/s, {probes} probes"
            );
            match level {
                // The idler copy was preferred before.
                Level::Raid1 { .. } => assert!(10 * rate_without > 12 * rate && p99_without <= p99),
                _ => assert!(rate_without > 5 * rate && p99_without < p99 / 10, "{level}"),
            }
            assert!(probes > 0 && probes < without.count() / 100, "{level}: {probes} probes");
        });
    }
}

#[test]
fn who_cannot_be_done_without_is_asked() {
    Reactor::simulated(4).block_on(async {
        let striped = Bench::new(Level::Raid0, 4).await;
        striped.array.take_for_slow(SLOW, true);
        striped.work(100).await;
        assert!(striped.reads_of_slow() > 20);

        let bench = Bench::new(Level::Raid5, 5).await;
        bench.array.take_for_slow(SLOW, true);
        bench.array.fail(0).await.expect("it bears one");
        let before = bench.reads_of_slow();
        bench.work(100).await;
        assert!(bench.reads_of_slow() > before + 20, "one is out already");
    });
}

/// What cannot be read of the others is no reason to fail: the slow one has it.
#[test]
fn unreadable_blocks_of_others_are_no_loss() {
    Reactor::simulated(5).block_on(async {
        let bench = Bench::new(Level::Raid5, 5).await;
        bench.array.take_for_slow(SLOW, true);
        for other in [0, 1, 3, 4] {
            let drive = &bench.rig.drives[other];
            let at = drive.data_at() + other as u64 * CHUNK;
            drive.make_unreadable(at, 2 * BLOCK as u64);
        }
        let bytes = bench.array.geometry().stripe_bytes;
        for stripe in 0..8 {
            let held = read(&bench.array, stripe * bytes, bytes as usize).await.expect("read");
            assert!(held == pattern(stripe * bytes, bytes as usize, 1)[..], "stripe {stripe}");
        }
        bench.work(20).await;
    });
}

/// Another one is silently wrong, and somebody who knows by a checksum looks for him. What a slow member holds is computed from
/// that one for plain reads; taken for what it holds, it was blamed, and got its neighbours' bytes written over.
#[test]
fn who_looks_for_the_wrong_one_gets_what_a_slow_one_holds() {
    Reactor::simulated(7).block_on(async {
        let bench = Bench::new(Level::Raid6, 6).await;
        bench.array.take_for_slow(SLOW, true);
        let (wrong, bytes) = (&bench.rig.drives[0], 12 * bench.array.geometry().stripe_bytes);
        for at in (0..12 * CHUNK).step_by(BLOCK) {
            wrong.corrupt(wrong.data_at() + at);
        }
        let (mut of_slow, mut computed_wrong) = (0, 0);
        for at in (0..bytes).step_by(BLOCK) {
            if !bench.array.members_of(at, BLOCK as u64).contains(SLOW) {
                continue;
            }
            let expected = pattern(at, BLOCK, 1);
            let into = BufMut::zeroed(BLOCK).into_vec();
            let nobody = MemberSet::NONE;
            let own = bench.array.read_avoiding(at, into, nobody, IoClass::Foreground).await;
            assert!(own.expect("read")[0][..] == expected[..], "block at {at}");
            of_slow += 1;
            let plain = read(&bench.array, at, BLOCK).await.expect("read");
            computed_wrong += u32::from(plain != expected[..]);
        }
        assert!(of_slow > 0 && computed_wrong > 0, "{of_slow} blocks, {computed_wrong} of them");
    });
}

/// Writers and readers of the same stripes beside each other; who is slow changes all the time.
#[test]
fn nothing_but_what_was_written_is_read() {
    for seed in 0..12 {
        Reactor::simulated(seed).block_on(async {
            let bench = Bench::new(LEVELS[seed as usize % 4].0, LEVELS[seed as usize % 4].1).await;
            let node = Group::new();
            let stripe_blocks = bench.array.geometry().stripe_bytes / BLOCK as u64;
            let reads = Rc::new(Cell::new(0));
            for task in 0..4 {
                let (array, reads) = (bench.array.clone(), Rc::clone(&reads));
                // Neighbours share their stripes, and no blocks.
                let own = move |n: u64| (n / 2 * 4 + task) % (6 * stripe_blocks);
                reactor::spawn_in(&node, async move {
                    let mut versions = std::collections::BTreeMap::new();
                    for version in 2.. {
                        let block = own(reactor::random_u64() % 1000);
                        let at = block * BLOCK as u64;
                        if reactor::random_u64().is_multiple_of(2) {
                            let data = pattern(at, BLOCK, version).into_vec();
                            array.write(at, data, Durability::Fua).await.expect("written");
                            versions.insert(block, version);
                        } else {
                            let version = versions.get(&block).copied().unwrap_or(1);
                            let held = read(&array, at, BLOCK).await.expect("read");
                            assert!(
                                held == pattern(at, BLOCK, version)[..],
                                "seed {seed}: {block}"
                            );
                            reads.set(reads.get() + 1);
                        }
                    }
                });
            }
            bench.rig.drives.iter().for_each(|drive| drive.delay_us.set(30));
            for _ in 0..200 {
                let member = reactor::random_u64() as usize % bench.rig.drives.len();
                let is_slow = !reactor::random_u64().is_multiple_of(3);
                bench.array.take_for_slow(member, is_slow);
                reactor::sleep(Duration::from_micros(500)).await;
            }
            node.kill();
            assert!(reads.get() > 500, "seed {seed}: {} reads", reads.get());
        });
    }
}

/// A block, straight into memory that is lent where that can be.
async fn straight(array: &RaidArray, at: u64) -> Vec<u8> {
    match read_lent(array, at, &[BLOCK]).await {
        Some(held) => held,
        None => read(array, at, BLOCK).await.expect("read"),
    }
}

/// Reads straight into memory that is lent raise suspicion, and leave it to others to find out and to do without somebody.
#[test]
fn a_slow_member_is_noticed_by_whatever_reads() {
    Reactor::simulated(5).block_on(async {
        let mut bench = Bench::new(Level::Raid6, 8).await;
        assert!(read_lent(&bench.array, 0, &[BLOCK]).await.is_some());
        bench.slow_down(SLOW_US);
        bench.work_by(5000, straight).await;
        assert_eq!(bench.slow(), ["drive-2"]);
        for _ in 0..100 {
            let held = read_lent(&bench.array, 0, &[BLOCK]).await;
            assert_eq!(held, None, "nor in the turn of a probe");
        }
        bench.slow_down(0);
        bench.work_by(60_000, straight).await;
        assert!(bench.slow().is_empty());
        assert!(read_lent(&bench.array, 0, &[BLOCK]).await.is_some());
        assert_eq!(bench.told().len(), 2, "slow, and no more");
    });
}

/// The slower it is, the fewer its answers; and others are read far more often.
#[test]
fn a_slow_member_that_answers_a_few_reads_is_noticed() {
    Reactor::simulated(7).block_on(async {
        let bench = Bench::new(Level::Raid6, 8).await;
        bench.slow_down(400_000);
        let blocks = bench.stripes() * bench.array.geometry().stripe_bytes / BLOCK as u64;
        let is_of_slow = |at: &u64| bench.array.members_of(*at, BLOCK as u64).contains(SLOW);
        let all = (0..blocks).map(|block| block * BLOCK as u64);
        let (slow, others): (Vec<u64>, Vec<u64>) = all.partition(is_of_slow);
        let (slow, others) = (Rc::new(slow), Rc::new(others));
        let group = reactor::current_group().child();
        for worker in 0..10 {
            let (array, blocks) = (bench.array.clone(), if worker < 2 { &slow } else { &others });
            let blocks = Rc::clone(blocks);
            reactor::spawn_in(&group, async move {
                loop {
                    straight(&array, blocks[reactor::random_u64() as usize % blocks.len()]).await;
                }
            });
        }
        reactor::sleep(Duration::from_secs(15)).await;
        group.kill();
        assert_eq!(bench.slow(), ["drive-2"]);
    });
}

/// Where reads cannot do without it, they go on straight, but for some that tell when it has recovered.
#[test]
fn reads_of_a_slow_member_that_nobody_can_do_without_go_straight() {
    Reactor::simulated(8).block_on(async {
        let bench = Bench::new(Level::Raid0, 8).await;
        bench.slow_down(SLOW_US);
        bench.work_by(5000, straight).await;
        assert_eq!(bench.slow(), ["drive-2"]);
        let mut refused = 0;
        for _ in 0..610 {
            refused += u32::from(read_lent(&bench.array, 0, &[BLOCK]).await.is_none());
        }
        assert_eq!(refused, 10);
        bench.slow_down(0);
        bench.work_by(120_000, straight).await;
        assert!(bench.slow().is_empty());
    });
}

/// Whoever lends it could have any drive called slow.
#[test]
fn nobody_is_slow_for_the_memory_of_others() {
    Reactor::simulated(6).block_on(async {
        let mut bench = Bench::new(Level::Raid6, 8).await;
        bench.rig.drives[SLOW].lent_us.set(SLOW_US);
        let (mut yes, mut no) = (0, 0);
        for tenths in 0..300 {
            bench.work_by(100, straight).await;
            let (slow, told) = (bench.slow(), bench.told());
            assert!(slow.is_empty() && told.is_empty(), "after {tenths}/10 s: {slow:?}, {told:?}");
            match read_lent(&bench.array, 0, &[BLOCK]).await {
                Some(_) => yes += 1,
                None => no += 1,
            }
        }
        assert!(no > 0, "there were suspicions");
        assert!(yes > 2 * no, "most of the time there are none: {no} of {}", yes + no);
    });
}

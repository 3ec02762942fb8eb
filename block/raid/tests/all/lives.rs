//! Lives of arrays with a journal: overwrites, fresh stripes and discards side by side with scrubs, rebuilds and losses, ended
//! by power cuts, after which lost members come back stale or others are away.

use crate::common::{BLOCK, Rig, pattern, read, read_lent};
use levada_base::reactor::{self, Group, Reactor};
use levada_device::{BlockError, Device, Durability};
use levada_raid::{Array, IoClass, Level, Limits, MemberState, MemberStatus, RaidArray};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

const CHUNK: u64 = 8 << 10;
const STRIPES: u64 = 24;
const WRITERS: u64 = 4;

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

/// Stands for a block that cannot be read until it is written: its stripe was being overwritten whole when the power went, and
/// a member was away afterwards.
const LOST: u64 = u64::MAX;

/// What a block may hold; version 0 is zeroes.
#[derive(Clone)]
enum Promise {
    OneOf(Vec<u64>),
    /// The last of these, which is not flushed: any of them after a power cut.
    Volatile(Vec<u64>),
    /// Anything, but always the same once seen.
    Anything(Option<Vec<u8>>),
}

type Promises = Rc<RefCell<BTreeMap<u64, Promise>>>;

fn holds(held: &[u8], block: u64, version: u64) -> bool {
    match version {
        0 => held.iter().all(|byte| *byte == 0),
        LOST => false,
        version => held == &pattern(block * BLOCK as u64, BLOCK, version)[..],
    }
}

struct Owner {
    array: RaidArray,
    promises: Promises,
    stripes: Range<u64>,
    stripe_blocks: u64,
    seed: u64,
}

impl Owner {
    fn issue(&self, blocks: Range<u64>, version: u64) {
        for block in blocks.clone() {
            let mut promises = self.promises.borrow_mut();
            let promise = promises.entry(block).or_insert(Promise::OneOf(vec![0]));
            let first = block / self.stripe_blocks * self.stripe_blocks;
            let is_whole = blocks.start <= first && first + self.stripe_blocks <= blocks.end;
            match promise {
                Promise::OneOf(versions) | Promise::Volatile(versions) => {
                    // Only who overwrites a whole stripe may lose it.
                    versions.extend(is_whole.then_some(LOST));
                    versions.push(version);
                }
                Promise::Anything(seen) => *seen = None,
            }
        }
    }

    /// What was issued for these blocks is answered, and not flushed.
    fn is_volatile(&self, blocks: Range<u64>) {
        for block in blocks {
            if let Some(promise) = self.promises.borrow_mut().get_mut(&block)
                && let Promise::OneOf(versions) = promise
            {
                *promise = Promise::Volatile(std::mem::take(versions));
            }
        }
    }

    /// What its stripes held when this began is durable, but for these.
    async fn flush(&self, given_up: &BTreeSet<u64>) {
        self.array.flush().await.expect("borne");
        let all = self.stripes.start * self.stripe_blocks..self.stripes.end * self.stripe_blocks;
        for (block, promise) in self.promises.borrow_mut().range_mut(all) {
            if let Promise::Volatile(versions) = promise
                && !given_up.contains(&(block / self.stripe_blocks))
            {
                *promise = Promise::OneOf(versions.split_off(versions.len() - 1));
            }
        }
    }

    /// Overwrites some stripes, from this one on, whole. False when its caller gave up.
    async fn overwrite_whole(&self, stripes: Range<u64>, version: u64, patience: Duration) -> bool {
        let blocks = stripes.start * self.stripe_blocks..stripes.end * self.stripe_blocks;
        let is_known =
            |block: u64| !matches!(self.promises.borrow().get(&block), Some(Promise::Anything(_)));
        let durability = match blocks.clone().all(is_known) && random(4) > 0 {
            true => Durability::Volatile,
            false => Durability::Fua,
        };
        self.issue(blocks.clone(), version);
        let (at, bytes) =
            (blocks.start * BLOCK as u64, (blocks.end - blocks.start) as usize * BLOCK);
        let written = self.array.write(at, pattern(at, bytes, version).into_vec(), durability);
        let Ok(written) = reactor::timeout(patience, written).await else { return false };
        written.expect("borne");
        match durability {
            Durability::Volatile => self.is_volatile(blocks),
            Durability::Fua => self.set(blocks, &Promise::OneOf(vec![version])),
        }
        true
    }

    fn set(&self, blocks: Range<u64>, promise: &Promise) {
        for block in blocks {
            self.promises.borrow_mut().insert(block, promise.clone());
        }
    }

    async fn work(self, mut version: u64) {
        let mut given_up = BTreeSet::new();
        loop {
            version += 1;
            let stripe = self.stripes.start + random(self.stripes.end - self.stripes.start);
            let all = stripe * self.stripe_blocks..(stripe + 1) * self.stripe_blocks;
            if given_up.contains(&stripe) {
                reactor::sleep(Duration::from_micros(50)).await;
                continue;
            }
            // Now and then somebody does not wait for the answer; what he asked for goes on, or not.
            let patience = match random(12) {
                0 => Duration::from_micros(random(150)),
                _ => Duration::from_secs(600),
            };
            match random(18) {
                0 => {
                    self.issue(all.clone(), 0);
                    let discarded = self.array.discard_stripes(stripe, 1);
                    match reactor::timeout(patience, discarded).await {
                        Ok(discarded) => {
                            discarded.expect("borne");
                            self.set(all, &Promise::OneOf(vec![0]));
                        }
                        Err(_) => _ = given_up.insert(stripe),
                    }
                }
                1 => {
                    self.set(all.clone(), &Promise::Anything(None));
                    self.array.declare_fresh(stripe, 1).await.expect("borne");
                    let at = all.start * BLOCK as u64;
                    let bytes = self.stripe_blocks as usize * BLOCK;
                    let data = pattern(at, bytes, version).into_vec();
                    self.array.write_fresh(stripe, data, IoClass::Foreground).await.expect("borne");
                    if random(2) == 0 {
                        self.array.flush().await.expect("borne");
                        self.set(all, &Promise::OneOf(vec![version]));
                    } else {
                        // An update makes it durable, too: it flushes what was written whole.
                        let at = all.start;
                        let data = pattern(at * BLOCK as u64, BLOCK, version + 1).into_vec();
                        let at = at * BLOCK as u64;
                        self.array.write(at, data, Durability::Fua).await.expect("borne");
                        self.set(all.clone(), &Promise::OneOf(vec![version]));
                        self.set(all.start..all.start + 1, &Promise::OneOf(vec![version + 1]));
                        version += 1;
                    }
                }
                2 => self.flush(&given_up).await,
                3 | 4 => self.check(all).await,
                5..8 => {
                    let next = given_up.range(stripe..).next().copied();
                    let end = next.unwrap_or(self.stripes.end).min(stripe + 1 + random(3));
                    if !self.overwrite_whole(stripe..end, version, patience).await {
                        given_up.extend(stripe..end);
                    }
                }
                _ => {
                    let first = all.start + random(self.stripe_blocks);
                    let next = given_up.range(stripe..).next().copied();
                    let end = next.unwrap_or(self.stripes.end);
                    let most = end * self.stripe_blocks - first;
                    let count = (1 + random(4) * random(4)).min(most);
                    let blocks = first..first + count;
                    self.issue(blocks.clone(), version);
                    let at = first * BLOCK as u64;
                    let data = pattern(at, count as usize * BLOCK, version).into_vec();
                    let written = self.array.write(at, data, Durability::Fua);
                    match reactor::timeout(patience, written).await {
                        Ok(written) => {
                            written.expect("borne");
                            self.set(blocks, &Promise::OneOf(vec![version]));
                        }
                        Err(_) => {
                            let last = (blocks.end - 1) / self.stripe_blocks;
                            given_up.extend(stripe..=last);
                        }
                    }
                }
            }
        }
    }

    async fn check(&self, blocks: Range<u64>) {
        let bytes = (blocks.end - blocks.start) as usize * BLOCK;
        if blocks.start.is_multiple_of(2)
            && let Some(held) = read_lent(&self.array, blocks.start * BLOCK as u64, &[bytes]).await
        {
            return self.compare(blocks, &held);
        }
        let held = match read(&self.array, blocks.start * BLOCK as u64, bytes).await {
            Err(BlockError::Medium { .. }) if self.array.status().lost_blocks > 0 => {
                for block in blocks {
                    self.check_block(block).await;
                }
                return;
            }
            held => held.expect("borne"),
        };
        self.compare(blocks, &held);
    }

    async fn check_block(&self, block: u64) {
        match read(&self.array, block * BLOCK as u64, BLOCK).await {
            Err(BlockError::Medium { .. }) => {
                let mut promises = self.promises.borrow_mut();
                let promise = promises.entry(block).or_insert(Promise::OneOf(vec![0]));
                let may_be_lost = match promise {
                    Promise::OneOf(versions) => versions.contains(&LOST),
                    Promise::Volatile(_) => false,
                    Promise::Anything(seen) => seen.is_none(),
                };
                assert!(may_be_lost, "seed {}: block {block} is lost", self.seed);
                *promise = Promise::OneOf(vec![LOST]);
            }
            held => self.compare(block..block + 1, &held.expect("borne")),
        }
    }

    fn compare(&self, blocks: Range<u64>, held: &[u8]) {
        for (block, held) in blocks.zip(held.chunks(BLOCK)) {
            let mut promises = self.promises.borrow_mut();
            let promise = promises.entry(block).or_insert(Promise::OneOf(vec![0]));
            match promise {
                Promise::Volatile(versions) => {
                    let current = *versions.last().expect("never empty");
                    let seed = self.seed;
                    assert!(
                        holds(held, block, current),
                        "seed {seed}: block {block} is not {current}"
                    );
                }
                Promise::OneOf(versions) => {
                    let seen = versions.iter().copied().find(|v| holds(held, block, *v));
                    let Some(seen) = seen else {
                        let stripe = block / self.stripe_blocks;
                        panic!(
                            "seed {}: block {block} of stripe {stripe} is none of {versions:?}",
                            self.seed
                        )
                    };
                    *versions = vec![seen];
                }
                Promise::Anything(Some(seen)) => {
                    assert!(held == &seen[..], "seed {}: block {block} changed", self.seed);
                }
                Promise::Anything(seen) => *seen = Some(held.to_vec()),
            }
        }
    }
}

/// What a seed is about.
fn shape(seed: u64) -> Rig {
    let (level, members, spares) = [
        (Level::Raid6, 6, 1),
        (Level::Raid5, 4, 0),
        (Level::Raid50 { groups: 2 }, 7, 1),
        (Level::NPlusM { parity: 3 }, 7, 0),
        (Level::Raid6, 8, 0),
        (Level::NPlusM { parity: 4 }, 6, 0),
        (Level::Raid6, 3, 0),
        (Level::NPlusM { parity: 3 }, 5, 1),
    ][(seed % 8) as usize];
    Rig::new(level, members, spares, CHUNK, STRIPES + 16)
}

struct Life {
    seed: u64,
    rig: Rc<Rig>,
    node: Group,
    array: RaidArray,
    promises: Promises,
    tolerates: usize,
}

impl Life {
    fn owner(&self, stripes: Range<u64>) -> Owner {
        Owner {
            array: self.array.clone(),
            promises: Rc::clone(&self.promises),
            stripes,
            stripe_blocks: self.array.geometry().stripe_bytes / BLOCK as u64,
            seed: self.seed,
        }
    }

    async fn check(&self) {
        let owner = self.owner(0..STRIPES);
        owner.check(0..STRIPES * owner.stripe_blocks).await;
    }

    /// Members whose data is not elsewhere.
    fn vital(&self) -> Vec<usize> {
        let members = self.array.status().members;
        let vital = |m: &&MemberStatus| m.role.is_some() && m.state == MemberState::InSync;
        members.iter().filter(vital).map(|m| m.index).collect()
    }

    /// Drives that the array bears to lose, besides those that it has lost.
    fn bears(&self) -> usize {
        let members = self.array.status().members;
        let out = |m: &&MemberStatus| m.role.is_some() && m.state != MemberState::InSync;
        self.tolerates.saturating_sub(members.iter().filter(out).count())
    }

    fn state(&self, at: usize) -> MemberState {
        self.array.status().members[at].state
    }

    /// Writers, each with its stripes, a scrub after the other, a rebuild after the other.
    fn spawn(&self, round: u64) {
        for task in 0..WRITERS {
            let share = STRIPES / WRITERS;
            let owner = self.owner(task * share..(task + 1) * share);
            reactor::spawn_in(&self.node, owner.work(round * 1_000_000 + task * 200_000));
        }
        let (seed, scrubbed, rebuilt) = (self.seed, self.array.clone(), self.array.clone());
        reactor::spawn_in(&self.node, async move {
            loop {
                reactor::sleep(Duration::from_micros(random(2000))).await;
                scrub(&scrubbed, seed).await;
            }
        });
        reactor::spawn_in(&self.node, async move {
            loop {
                reactor::sleep(Duration::from_micros(random(2000))).await;
                // Whoever it is: reads do without him, or not.
                let anybody = random(rebuilt.status().members.len() as u64) as usize;
                rebuilt.take_for_slow(anybody, random(2) == 0);
                rebuilt.rebuild(Limits::NONE).await.expect("borne");
            }
        });
    }

    /// Some blocks of these drives cannot be read for a while.
    fn spoil(&self) -> Vec<usize> {
        let mut soft: Vec<usize> = Vec::new();
        let most = if random(2) == 0 { self.bears() } else { 0 };
        for _ in 0..random(most as u64 + 1) {
            let at = random(self.rig.drives.len() as u64) as usize;
            if self.state(at) == MemberState::Faulty || soft.contains(&at) {
                continue;
            }
            soft.push(at);
            for _ in 0..random(12) {
                let block = random((STRIPES + 8) * CHUNK / BLOCK as u64);
                let drive = &self.rig.drives[at];
                drive.make_unreadable(drive.data_at() + block * BLOCK as u64, BLOCK as u64);
            }
        }
        soft
    }

    /// Losses and replacements while it works.
    async fn faults(&self, soft: &[usize]) {
        for _ in 0..random(6) {
            reactor::sleep(Duration::from_micros(random(4000))).await;
            let unheard = |at: &usize| self.rig.drives[*at].is_gone();
            let is_known = !self.vital().iter().any(unheard);
            let faulty =
                (0..self.rig.drives.len()).find(|at| self.state(*at) == MemberState::Faulty);
            if self.bears() > soft.len() && is_known && random(2) == 0 {
                let at = random(self.rig.drives.len() as u64) as usize;
                if self.state(at) == MemberState::Faulty || soft.contains(&at) {
                    continue;
                }
                self.rig.drives[at].pull_after_writes(random(30));
                // Noticed, as a rule, before the next one may go.
                for _ in 0..100 {
                    if self.state(at) == MemberState::Faulty {
                        break;
                    }
                    reactor::sleep(Duration::from_micros(100)).await;
                }
            } else if let Some(at) = faulty {
                self.replace(at).await;
            }
        }
    }

    async fn replace(&self, at: usize) {
        self.rig.drives[at].plug_in();
        let with = if random(2) == 0 { self.rig.member(at) } else { self.rig.newcomer(at) };
        self.array.replace(at, with).await.expect("borne");
    }

    /// Which are away at the next start: no more than the array bears, nor than leaves a majority. Those that were not vital
    /// a moment ago may not be on record as such.
    /// And how many more the array would bear.
    fn away(&self, before: &[usize]) -> (Vec<usize>, usize) {
        let members = self.array.status().members;
        let roles = members.iter().filter(|member| member.role.is_some()).count();
        let mut vital = self.vital();
        vital.retain(|at| before.contains(at));
        let unheard = vital.iter().filter(|at| self.rig.drives[**at].is_gone()).count();
        let may = self.tolerates.saturating_sub(roles - vital.len() + unheard);
        let mut away = Vec::new();
        for _ in 0..random(may as u64 + 1) {
            away.push(vital.swap_remove(random(vital.len() as u64) as usize));
        }
        let live = members.iter().filter(|m| m.state != MemberState::Faulty).count();
        away.truncate((live - 1) / 2);
        let left = may - away.len();
        (away, left)
    }

    fn cut_power(&mut self) {
        self.node.kill();
        self.node = Group::new();
        self.rig.cut_power();
        for promise in self.promises.borrow_mut().values_mut() {
            if let Promise::Volatile(versions) = promise {
                *promise = Promise::OneOf(std::mem::take(versions));
            }
        }
    }

    /// Starts again; now and then the power fails meanwhile.
    async fn open(&mut self, away: &[usize]) {
        loop {
            let (rig, away) = (Rc::clone(&self.rig), away.to_vec());
            let opening =
                reactor::spawn_in(&self.node, async move { rig.open_without(&away).await });
            let limit = if random(3) == 0 { random(3000) } else { u64::MAX / 1_000_000 };
            match reactor::timeout(Duration::from_micros(limit), opening).await {
                Ok(opened) => {
                    self.array = opened.expect("not killed").expect("opened");
                    return;
                }
                Err(_) => self.cut_power(),
            }
        }
    }
}

async fn scrub(array: &RaidArray, seed: u64) {
    let report = array.scrub_anew(Limits::NONE).await.expect("borne");
    let wrong = report.mismatched + report.wrong_repaired + report.lost;
    assert_eq!(wrong, 0, "seed {seed}: {report:?}");
}

async fn life(seed: u64) {
    let (rig, node) = (Rc::new(shape(seed)), Group::new());
    let made = Rc::clone(&rig);
    let created = reactor::spawn_in(&node, async move { made.create().await });
    let array = created.await.expect("not killed");
    let tolerates = array.geometry().tolerates;
    let mut life = Life { seed, rig, node, array, promises: Promises::default(), tolerates };
    for round in 1..=4 {
        life.spawn(round);
        let soft = life.spoil();
        life.faults(&soft).await;
        reactor::sleep(Duration::from_micros(random(8000))).await;
        let vital = life.vital();
        reactor::sleep(Duration::from_micros(500)).await;
        let (away, left) = life.away(&vital);
        // What cannot be read at a start is as if it were away.
        let is_readable = soft.len() > left || random(2) == 0;
        if is_readable {
            life.rig.drives.iter().for_each(|drive| drive.make_readable());
        }
        let lost_before = life.array.status().lost_blocks;
        life.cut_power();
        if random(2) == 0 {
            // Those that were lost are back, with what they held.
            life.rig.drives.iter().for_each(|drive| drive.plug_in());
        }
        life.open(&away).await;
        let status = life.array.status();
        assert!(
            !is_readable || status.degraded > 0 || status.lost_blocks <= lost_before,
            "seed {seed}: blocks are lost, and nobody is away"
        );
        life.check().await;
        life.rig.drives.iter().for_each(|drive| drive.make_readable());
        if random(2) == 0 {
            for at in 0..life.rig.drives.len() {
                if life.state(at) == MemberState::Faulty {
                    life.replace(at).await;
                }
            }
            life.array.rebuild(Limits::NONE).await.expect("rebuilt");
            life.check().await;
            scrub(&life.array, seed).await;
        }
    }
    life.node.kill();
}

fn run(seed: u64) {
    Reactor::simulated(seed).block_on(life(seed));
}

#[test]
fn overwrites_survive_power_cuts_and_losses() {
    let (from, to) = match std::env::var("LIVES") {
        Ok(range) => {
            let (from, to) = range.split_once("..").expect("FROM..TO");
            (from.parse().expect("a number"), to.parse().expect("a number"))
        }
        Err(_) => (0, 24),
    };
    let mut failed = 0;
    for seed in from..to {
        if std::panic::catch_unwind(|| run(seed)).is_err() {
            eprintln!("FAILED {seed}");
            failed += 1;
        }
    }
    assert_eq!(failed, 0);
}

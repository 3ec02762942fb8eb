//! A full target that restarts takes back what it acknowledged: on the real object log.

use crate::world::{ROOT, ROOT_DIR, World, below, data, flat, random_bytes};
use levada_base::Epoch;
use levada_base::ids::{Seq, TargetId, Uuid};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::{KIB, MIB};
use levada_client::{Client, Error, File};
use levada_device::{Device, RamDevice, VolatileDevice};
use levada_kv::Store;
use levada_log::{Config, ObjectLog};
use levada_object::ObjectService;
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use levada_wire::meta::OpenMode;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const KV: levada_kv::Config = levada_kv::Config { log_bytes: MIB, cache_bytes: MIB as usize };
const ARRAY: Uuid = Uuid::from_u128(7);
const BIG: u64 = 4 * MIB;

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// Everything is made durable and closed in order; the client hears nothing of it.
    Orderly,
    /// The process dies after everything was made durable.
    Killed,
    /// The power fails at any moment.
    PowerCut,
}

/// The drives of a target, and the service on them.
struct Target {
    members: Vec<Rc<VolatileDevice>>,
    index: Rc<VolatileDevice>,
    epoch: Cell<u64>,
    life: RefCell<Option<Life>>,
}

#[derive(Clone)]
struct Life {
    group: Group,
    array: Rc<RaidArray>,
    store: Store,
    log: ObjectLog,
}

fn drive(name: &str, bytes: u64) -> Rc<VolatileDevice> {
    Rc::new(VolatileDevice::new(Rc::new(RamDevice::new(name, bytes))))
}

impl Target {
    fn new() -> Self {
        Self {
            members: (0..6).map(|n| drive(&format!("drive-{n}"), 16 * MIB)).collect(),
            index: drive("index", 16 * MIB),
            epoch: Cell::new(0),
            life: RefCell::default(),
        }
    }

    async fn start(&self, world: &World) {
        let is_new = self.epoch.get() == 0;
        self.epoch.set(self.epoch.get() + 1);
        let (epoch, group) = (Epoch(self.epoch.get()), Group::new());
        let (members, index) = (self.members.clone(), Rc::clone(&self.index) as Rc<dyn Device>);
        let config = Config::new(1, TargetId(1));
        let opening = reactor::spawn_in(&group, async move {
            let found = members.iter().map(|device| Rc::clone(device) as Rc<dyn Device>);
            if is_new {
                let member = |(n, device)| MemberSpec {
                    device,
                    uuid: Uuid::from_u128(100 + n as u128),
                    name: format!("drive-{n}"),
                    enclosure: n as u16,
                };
                let spec = ArraySpec {
                    uuid: ARRAY,
                    name: "data".to_owned(),
                    level: Level::Raid6,
                    chunk_bytes: 16 * KIB,
                    block_bytes: None,
                    journal_bytes: Some(0),
                    members: found.enumerate().map(member).collect(),
                    spares: 0,
                };
                let array = Rc::new(RaidArray::create(spec, epoch).await.expect("an array"));
                let store = Store::create(index, epoch, KV).await.expect("a store");
                let log = ObjectLog::create(Rc::clone(&array) as _, store.clone(), config, epoch);
                (array, store, log.await.expect("a log"))
            } else {
                let array = RaidArray::open(ARRAY, found.collect(), epoch, false).await;
                let array = Rc::new(array.expect("an array").0);
                let store = Store::open(index, epoch, KV).await.expect("a store");
                let log = ObjectLog::open(Rc::clone(&array) as _, store.clone(), config, epoch);
                (array, store, log.await.expect("a log"))
            }
        });
        let (array, store, log) = opening.await.expect("not killed");
        let service = ObjectService::new(Rc::new(log.clone()));
        world.listen(&group, "object-0", TargetId(1), service as _);
        *self.life.borrow_mut() = Some(Life { group, array, store, log });
    }

    async fn end(&self, end: End) {
        let Life { group, array, store, log } = self.life.take().expect("runs");
        match end {
            End::Orderly => {
                log.settle().await.expect("settled");
                store.close().await.expect("closes");
                array.close().await.expect("closes");
                group.kill();
            }
            End::Killed => {
                log.commit(Seq(u64::MAX)).await.expect("durable");
                group.kill();
            }
            End::PowerCut => {
                group.kill();
                for device in self.members.iter().chain([&self.index]) {
                    device.power_cut(reactor::random_u64()).await.expect("a cut");
                    device.power_on();
                }
            }
        }
    }
}

async fn create(client: &Client, name: &str) -> File {
    let mode = OpenMode { write: true, truncate: false };
    let made = client.create_file(ROOT, ROOT_DIR, name.as_bytes(), 0o644, mode, true).await;
    made.expect("created").0
}

/// A file and what it holds.
struct Model {
    file: File,
    bytes: Vec<u8>,
}

impl Model {
    /// False when the target is full; nothing was written then.
    async fn write(&mut self, offset: u64, len: u64) -> bool {
        let bytes = random_bytes(len as usize);
        match self.file.write(offset, data(&bytes)).await {
            Ok(()) => {}
            Err(Error::Full) => return false,
            Err(error) => panic!("{error}"),
        }
        let (start, end) = (offset as usize, offset as usize + bytes.len());
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[start..end].copy_from_slice(&bytes);
        true
    }

    async fn check(&self, what: &str) {
        let mut at = 0;
        for expected in self.bytes.chunks(MIB as usize) {
            let found = flat(&self.file.read(at, MIB).await.expect("reads"));
            let size = found.len().min(expected.len());
            assert!(found[..size] == *expected, "{what}: other bytes from {at} on");
            at += MIB;
        }
    }
}

fn restarts_when_full(seed: u64, end: End) {
    Reactor::simulated(seed).block_on(async {
        let what = format!("seed {seed}, {end:?}");
        let world = World::new(1).await;
        world.kill_server(0);
        let target = Target::new();
        target.start(&world).await;
        let client = world.client("client").await;
        let mut old = Model { file: create(&client, "old").await, bytes: Vec::new() };
        let mut fill = Model { file: create(&client, "fill").await, bytes: Vec::new() };
        for at in (0..BIG).step_by(MIB as usize) {
            assert!(old.write(at, MIB).await);
        }
        let free = || target.life.borrow().as_ref().expect("runs").log.space().free_bytes;
        while free() > 8 * MIB {
            assert!(fill.write(fill.bytes.len() as u64, MIB).await);
        }
        client.sync().await.expect("synced");
        for round in 0..3 {
            // A small one, and a newer one that covers it, and a small one in that.
            let at = below(3) * MIB;
            if round == 0 {
                assert!(old.write(at + below(256) * 4 * KIB, 4 * KIB).await);
                assert!(old.write(at, MIB).await);
            }
            for _ in 0..10 {
                old.write(at + below(256) * 4 * KIB, 4 * KIB).await;
            }
            // What replaces as much as it takes fits a full target, too.
            assert!(old.write(BIG - 4 * KIB, 4 * KIB).await, "{what}");
            for len in [MIB, 64 * KIB, 4 * KIB] {
                let mut end = fill.bytes.len() as u64;
                while (len < MIB || free() > 2 * MIB) && fill.write(end, len).await {
                    end += len;
                }
            }
            for _ in 0..10 {
                old.write(below(BIG / (4 * KIB)) * 4 * KIB, 4 * KIB).await;
            }
            assert!(client.unstable_bytes() > 0, "{what}");
            target.end(end).await;
            target.start(&world).await;
            let begun = reactor::now();
            old.check(&what).await;
            fill.check(&what).await;
            old.file.fsync().await.unwrap_or_else(|error| panic!("{what}: {error}"));
            fill.file.fsync().await.unwrap_or_else(|error| panic!("{what}: {error}"));
            let took = reactor::now().since(begun);
            assert!(took < Duration::from_secs(5), "{what}: took {took:?}");
        }
        old.check(&what).await;
    });
}

#[test]
fn a_full_target_that_is_shut_down_takes_back_what_it_has() {
    (0..4).for_each(|seed| restarts_when_full(seed, End::Orderly));
}

#[test]
fn a_full_target_that_is_killed_takes_back_what_it_has() {
    (0..4).for_each(|seed| restarts_when_full(seed, End::Killed));
}

#[test]
fn a_full_target_that_loses_power_takes_back_what_it_lost() {
    (0..8).for_each(|seed| restarts_when_full(seed, End::PowerCut));
}

/// A write that was refused half-way leaves a file that can be synced, closed and read.
#[test]
fn a_write_that_fits_in_part_spoils_no_sync() {
    for seed in 0..8 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            world.kill_server(0);
            let target = Target::new();
            target.start(&world).await;
            let client = world.client("client").await;
            let mut fill = Model { file: create(&client, "fill").await, bytes: Vec::new() };
            let free = || target.life.borrow().as_ref().expect("runs").log.space().free_bytes;
            while free() > MIB / 2 {
                assert!(fill.write(fill.bytes.len() as u64, 256 * KIB).await);
            }
            let half = create(&client, "half").await;
            // In a component that has been written before, or in none.
            let begin = if seed % 2 == 0 { 0 } else { 4 * KIB };
            half.write(0, data(&random_bytes(begin as usize))).await.expect("there is room");
            half.fsync().await.expect("nothing is refused yet");
            let refused = half.write(begin, data(&random_bytes(MIB as usize))).await;
            assert_eq!(refused, Err(Error::Full), "seed {seed}");
            half.fsync().await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let size = half.attr().await.expect("there").size;
            assert!(size > begin && size < MIB, "seed {seed}: {size} bytes are there");
            let before = flat(&half.read(0, MIB).await.expect("reads"));
            target.end(End::PowerCut).await;
            target.start(&world).await;
            let after = flat(&half.read(0, MIB).await.expect("reads"));
            assert!(before == after, "seed {seed}: fsync promised what was read before it");
            fill.check("after a write that fitted in part").await;
        });
    }
}

/// Appends until it is refused; the bytes that were written, and how long the refusal took.
async fn append(file: File, size: u64) -> (u64, Duration) {
    let mut end = 0;
    loop {
        let begun = reactor::now();
        match file.write(end, data(&random_bytes(size as usize))).await {
            Ok(()) => end += size,
            Err(error) => {
                assert_eq!(error, Error::Full);
                let took = begun.elapsed();
                file.close().await;
                return (end, took);
            }
        }
    }
}

/// Over and over, while what was deleted is taken apart.
#[test]
fn what_is_shown_is_written_and_the_rest_is_refused_at_once() {
    for (writers, size) in [(1, 4 * KIB), (4, 4 * KIB), (1, MIB), (4, MIB)] {
        Reactor::simulated(1).block_on(async {
            let world = World::new(1).await;
            world.kill_server(0);
            let target = Target::new();
            target.start(&world).await;
            let client = world.client("client").await;
            let free = async || client.space().await.expect("told").free_bytes;
            let house = levada_client::housekeeper::start(world.client("housekeeper").await);
            for round in 0..4 {
                let shown = free().await;
                let mut tasks = Vec::new();
                for writer in 0..writers {
                    let file = create(&client, &format!("{writer}")).await;
                    tasks.push(reactor::spawn(append(file, size)));
                }
                let (mut written, mut slowest) = (0, Duration::ZERO);
                for task in tasks {
                    let (bytes, took) = task.await.expect("not killed");
                    (written, slowest) = (written + bytes, slowest.max(took));
                }
                let what = format!("{writers} of {size}, round {round}: {written} of {shown}");
                println!("{what}, refused after {slowest:?}");
                // Headers, and for each a write of which only the first part fitted.
                assert!(written <= shown, "{what}");
                assert!(written + writers * size > shown / 1000 * 970, "{what}");
                assert!(slowest < Duration::from_secs(1), "{what}: {slowest:?}");
                for writer in 0..writers {
                    let name = format!("{writer}");
                    client.unlink(ROOT, ROOT_DIR, name.as_bytes()).await.expect("there");
                }
                assert!(free().await > shown / 1000 * 970, "{what}: {} after that", free().await);
            }
            drop(house);
        });
    }
}

/// The bytes would fit, and their header does not.
#[test]
fn what_lacks_room_for_its_header_is_refused_at_once() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        world.kill_server(0);
        let target = Target::new();
        target.start(&world).await;
        let client = world.client("client").await;
        let space = || target.life.borrow().as_ref().expect("runs").log.space();
        let mut file = Model { file: create(&client, "full").await, bytes: Vec::new() };
        while space().free_bytes > 64 * KIB {
            assert!(file.write(file.bytes.len() as u64, 32 * KIB).await);
        }
        // The header of a block takes 104 bytes.
        let left = 4 * KIB + 40;
        for headers in [KIB, 104] {
            let bytes = (space().free_bytes - left - headers) / 8 * 8;
            assert!(file.write(file.bytes.len() as u64, bytes).await);
        }
        assert!((4 * KIB..4 * KIB + 104).contains(&space().free_bytes), "{:?}", space());
        let begun = reactor::now();
        assert!(!file.write(file.bytes.len() as u64, 4 * KIB).await);
        assert!(begun.elapsed() < Duration::from_secs(1), "after {:?}", begun.elapsed());
    });
}

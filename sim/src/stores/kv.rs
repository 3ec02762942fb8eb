//! The key-value store on a mirror of three copies: what is left after every crash is a prefix of
//! what was applied, with everything durable in it.

use super::rows::{Model, check, random, work};
use super::{end_round, open};
use crate::arrays::rounds;
use crate::arrays::{Kind, Rack};
use crate::{Outcome, Rng, Shape, World};
use levada_base::reactor::{self, Reactor};
use levada_base::units::{KIB, MIB};
use levada_base::{Epoch, IoVec, IoVecMut, probe};
use levada_device::{BlockError, Device, DeviceInfo, Durability, Health, IoFuture};
use levada_kv::{Config, KvError, Store};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Small, so that the log wraps and the cache forgets.
const CONFIG: Config = Config { log_bytes: 64 * KIB, cache_bytes: 64 * KIB as usize };

/// One seed of the key-value store.
pub fn kv(seed: u64) -> Outcome {
    let reactor = Reactor::simulated(seed);
    let coverage = reactor.block_on(async {
        let world = Rc::new(World::new(seed, Shape::of_12(MIB)));
        let rack = Rack::create(Rc::clone(&world), Kind::Mirror).await;
        rack.may_rot.set(true);
        let model = Rc::new(Model::default());
        rounds_of(&rack, &model).await;
        world.coverage.borrow_mut().count("batches", model.changes.get());
        world.end()
    });
    Outcome { trace_hash: reactor.trace_hash(), coverage }
}

async fn rounds_of(rack: &Rc<Rack>, model: &Rc<Model>) {
    let seed = rack.world.seed;
    let (area, epoch) = (Rc::new(rack.array()), rack.epoch());
    let made = reactor::spawn_in(&rack.world.node(), Store::create(area, epoch, CONFIG));
    let mut store = made.await.expect("alive").unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    let rounds = rack.world.rng(|rng| rng.between(3, 5));
    for _ in 0..rounds {
        // Callers may fail only once the store was closed.
        let closing = Rc::new(Cell::new(false));
        for _ in 0..1 + random(6) {
            let work = work(store.clone(), Rc::clone(model));
            let closing = Rc::clone(&closing);
            reactor::spawn_in(&rack.world.node(), async move {
                let ended = work.await;
                assert!(
                    closing.get() && ended == Err(KvError::Stopped),
                    "seed {seed}: the store ends with {ended:?} although the mirror bears it"
                );
            });
        }
        let length = rack.world.rng(|rng| rng.between(5_000, 100_000));
        rounds::faults_for(rack, Duration::from_micros(length)).await;
        let closed = store.clone();
        let end = end_round(rack, || async move {
            closing.set(true);
            closed.close().await.unwrap_or_else(|error| panic!("seed {seed}: close: {error}"));
        });
        if end.await == rounds::End::Closed {
            model.durable.set(model.batches.borrow().len() as u64);
        }
        drop(store);
        store = reopen(rack).await;
        model.cut_to(store.last_seq().0);
        assert_eq!(store.durable_seq(), store.last_seq(), "seed {seed}");
        if random(3) == 0 {
            // A cut right behind recovery takes nothing of what it showed.
            rack.end_rot();
            rack.world.power_cut().await;
            store = reopen(rack).await;
            assert_eq!(store.last_seq().0, model.durable.get(), "seed {seed}");
        }
        refuse_an_earlier_owner(rack).await;
        check(&store, model).await;
        rack.world.coverage.borrow_mut().count("full checks", 1);
    }
    rack.finish().await;
    check(&store, model).await;
}

async fn reopen(rack: &Rc<Rack>) -> Store {
    open(rack, |rack| async move {
        let array = rack.open().await;
        // Nothing is being written, so also what is replayed may be wrong on one drive.
        let mut rng = rack.world.rng(Rng::fork);
        if rng.one_in(3) {
            rack.rot(&mut rng);
        }
        let _busy = probe::busy("recovering");
        let store = Store::open(Rc::new(array), rack.epoch(), CONFIG).await;
        store.unwrap_or_else(|error| {
            panic!("seed {}: the store does not open: {error}", rack.world.seed)
        })
    })
    .await
}

/// An owner that was given up and comes late is told so by the store itself, should the drives
/// have forgotten whose they are.
async fn refuse_an_earlier_owner(rack: &Rc<Rack>) {
    let area = Rc::new(Unfenced(rack.array()));
    let late = Epoch(rack.epoch().0 - 1);
    let opened = reactor::spawn_in(&rack.world.node(), async move {
        Store::open(area, late, CONFIG).await.map(|_| ())
    });
    let refused = opened.await.expect("alive");
    assert!(
        matches!(refused, Err(KvError::Block(BlockError::Fenced { .. }))),
        "seed {}: an owner of an earlier epoch opens the store: {refused:?}",
        rack.world.seed
    );
}

/// A device that lets everybody pass.
struct Unfenced<D>(D);

impl<D: Device> Device for Unfenced<D> {
    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        self.0.read(at, into)
    }

    fn read_agreed(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        self.0.read_agreed(at, into)
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        self.0.write(at, from, durability)
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.0.flush()
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.0.discard(at, bytes)
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.0.write_zeroes(at, bytes)
    }

    fn fence(&self, _: Epoch) -> IoFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn health(&self) -> Health {
        self.0.health()
    }
}

//! The target's process, with its drives, behind one port or two.
//!
//! Reservations are kept beside the drives, or nowhere: then a restart forgets them; or there are none.

use crate::{Rng, SimDrive, World};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, Group};
use levada_base::stream::MemoryNetwork;
use levada_base::{BufMut, IoVec};
use levada_device::{Device, Durability};
use levada_export_nvmet::{
    AnaState, Claims, Hosts, Keep, KeepError, Nqn, Open, Opened, Passage, Path, Subsystem, Target,
};
use levada_volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// What becomes of reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reservations {
    Kept,
    /// They go with the process.
    Forgotten,
    /// The drives have none.
    Lacking,
}

/// What a shelf is.
pub struct Build {
    /// Among the shelves of its network.
    pub number: u8,
    /// Those of the world that are in it; they become namespaces 1, 2, and so on.
    pub drives: Range<usize>,
    pub ports: u8,
    pub reservations: Reservations,
}

/// See the module.
pub struct Shelf {
    world: Rc<World>,
    pub net: MemoryNetwork,
    pub subsystem: Nqn,
    pub addresses: Vec<SocketAddr>,
    drives: Range<usize>,
    /// The tasks of its process.
    process: RefCell<Group>,
    /// How much longer requests of its drives take that begin now, at most.
    slow: Rc<Cell<Duration>>,
    reservations: Reservations,
    /// Of each drive.
    kept: Vec<Rc<Kept>>,
    running: RefCell<Option<Running>>,
}

struct Running {
    target: Target,
    paths: Vec<Path>,
}

impl Shelf {
    pub fn new(world: &Rc<World>, net: MemoryNetwork, build: &Build) -> Self {
        let Build { number, ref drives, ports, reservations } = *build;
        let subsystem = Nqn::new(format!("nqn.2026-11.io.levada:shelf{number}"));
        let address = |port| ([192, 0, 2, 1 + 16 * number + port], 4420).into();
        Self {
            world: Rc::clone(world),
            net,
            subsystem: subsystem.expect("a name"),
            addresses: (0..ports).map(address).collect(),
            drives: drives.clone(),
            process: RefCell::new(Group::new()),
            slow: Rc::default(),
            reservations,
            kept: drives.clone().map(|_| Rc::default()).collect(),
            running: RefCell::default(),
        }
    }

    pub fn keeps_reservations(&self) -> bool {
        self.reservations == Reservations::Kept
    }

    /// A restart loses them.
    pub fn forgets_reservations(&self) -> bool {
        self.reservations == Reservations::Forgotten
    }

    fn drives(&self) -> Vec<Rc<SimDrive>> {
        self.drives.clone().map(|at| self.world.drive(at)).collect()
    }

    /// Starts the process.
    pub async fn start(self: &Rc<Self>) {
        let shelf = Rc::clone(self);
        let starting = async move {
            let target = Target::new();
            let subsystem = Subsystem::new(shelf.subsystem.clone(), "1", Hosts::Any);
            for (at, drive) in shelf.drives().into_iter().enumerate() {
                let claims = match shelf.reservations {
                    Reservations::Kept => Claims::kept(Rc::clone(&shelf.kept[at]) as Rc<dyn Keep>),
                    Reservations::Forgotten => Claims::default(),
                    Reservations::Lacking => Claims::lacking(),
                };
                let volume = DriveVolume { device: drive.device(), slow: Rc::clone(&shelf.slow) };
                let guid = [7 + (shelf.drives.start + at) as u8; 16];
                subsystem.add_claimed(at as u32 + 1, open(Rc::new(volume), guid), claims);
            }
            target.add(subsystem);
            let paths = shelf.addresses.iter().map(|&address| {
                let path = target.port(address);
                let port = path.clone();
                shelf.net.listen(address, move |stream| port.serve(stream));
                path
            });
            let paths = paths.collect();
            target.begin();
            *shelf.running.borrow_mut() = Some(Running { target, paths });
        };
        let process = self.process.borrow().clone();
        reactor::spawn_in(&process, starting).await.expect("nobody kills it meanwhile");
    }

    /// The process is no more: `has_power` tells whether its drives keep what they had cached. Hosts are told by the system, unless it is gone
    /// too.
    pub async fn crash(&self, has_power: bool, hosts_are_told: bool) {
        for &address in &self.addresses {
            match hosts_are_told {
                true => self.net.stop_listening(address),
                false => self.net.swallow(address),
            }
        }
        // Its tasks go first, as its parts would end them in order.
        self.process.replace(Group::new()).kill();
        for drive in self.drives() {
            if has_power {
                drive.disconnect();
            } else {
                let mut rng = self.world.rng(Rng::fork);
                drive.power_cycle(&mut rng).await;
            }
        }
        self.running.take();
    }

    /// For good, at the end of a seed: what its tasks still do is dropped.
    pub fn end(&self) {
        self.process.replace(Group::new()).kill();
        self.running.take();
    }

    pub fn slow(&self, most: Duration) {
        self.slow.set(most);
    }

    pub fn set_state(&self, port: usize, state: AnaState) {
        if let Some(running) = &*self.running.borrow() {
            running.paths[port].set_state(state);
        }
    }

    pub fn set_passage(&self, port: usize, passage: Passage) {
        if let Some(running) = &*self.running.borrow() {
            running.paths[port].set_passage(passage);
        }
    }

    /// Controllers that hosts have.
    pub fn controllers(&self) -> usize {
        self.running.borrow().as_ref().map_or(0, |running| running.target.controllers())
    }
}

fn open(volume: Rc<dyn Volume>, guid: [u8; 16]) -> Open {
    Rc::new(move || {
        let volume = Rc::clone(&volume);
        Box::pin(async move {
            reactor::sleep(Duration::from_micros(reactor::random_u64() % 2000)).await;
            Some(Opened { volume, guid })
        })
    })
}

/// A drive as a volume, which may be slow.
struct DriveVolume {
    device: Rc<dyn Device>,
    slow: Rc<Cell<Duration>>,
}

impl DriveVolume {
    /// A part of what a request takes longer: before anything happens, and before the answer.
    async fn dawdle(&self, most: Duration) {
        if !most.is_zero() {
            let max_us = most.as_micros() as u64 / 2;
            reactor::sleep(Duration::from_micros(reactor::random_u64() % max_us.max(1))).await;
        }
    }

    async fn slowly<T>(&self, work: impl Future<Output = T>) -> T {
        let most = self.slow.get();
        self.dawdle(most).await;
        let done = work.await;
        self.dawdle(most).await;
        done
    }
}

impl Volume for DriveVolume {
    fn size_bytes(&self) -> u64 {
        self.device.info().capacity_bytes
    }

    fn shape(&self) -> Shape {
        let info = self.device.info();
        Shape {
            block_bytes: info.block_bytes,
            io_bytes_best: info.io_bytes_best,
            discard_bytes: info.block_bytes,
            is_read_only: false,
        }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            let into = BufMut::for_overwrite(bytes as usize).into_vec();
            let read = self.slowly(self.device.read(at, into)).await?;
            Ok(read.into_iter().map(BufMut::freeze).collect())
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move { Ok(self.slowly(self.device.write(at, from, durability)).await?) })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async { Ok(self.slowly(self.device.flush()).await?) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move { Ok(self.slowly(self.device.discard(at, bytes)).await?) })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move { Ok(self.slowly(self.device.write_zeroes(at, bytes)).await?) })
    }

    fn extents(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move { Ok(vec![Extent { bytes, is_allocated: true }]) })
    }
}

/// Reservations, beside the drive: they outlive process and power.
#[derive(Default)]
struct Kept {
    bytes: RefCell<Option<Vec<u8>>>,
    saves: Cell<u64>,
}

impl Keep for Kept {
    fn load(&self) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KeepError>> {
        Box::pin(async {
            pause().await;
            Ok(self.bytes.borrow().clone())
        })
    }

    fn save(&self, bytes: Option<Vec<u8>>) -> LocalBoxFuture<'_, Result<(), KeepError>> {
        Box::pin(async {
            pause().await;
            *self.bytes.borrow_mut() = bytes;
            self.saves.set(self.saves.get() + 1);
            pause().await;
            Ok(())
        })
    }
}

async fn pause() {
    reactor::sleep(Duration::from_micros(Rng::new(reactor::random_u64()).below(3000))).await;
}

/// Of a shelf whose drives have them.
pub fn reservations(world: &World) -> Reservations {
    match world.rng(|rng| rng.one_in(3)) {
        true => Reservations::Forgotten,
        false => Reservations::Kept,
    }
}

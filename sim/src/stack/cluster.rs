//! A cluster of one node in a world: started, killed, looked into.
//!
//! The node's parts are held by the node's tasks alone, so killing them is the end of all of it.

use super::full;
use crate::World;
use futures_util::future::LocalBoxFuture;
use levada_base::ids::TargetId;
use levada_base::reactor;
use levada_base::sync::Notify;
use levada_base::units::{KIB, MIB};
use levada_client::{Client, ClientConfig, housekeeper};
use levada_device::Device;
use levada_node::arrays;
use levada_node::assembly::{self, Cluster, Service, StartOptions, Tuning};
use levada_node::drives::{DriveSource, MayOverwrite, NoDevice};
use levada_raid::Limits;
use levada_spec::{Bytes, ClusterFile, DriveSpec, Level, ParityKind, SliceSize};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::rpc::{ServiceConfig, accept_all};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Bytes of a drive. Every third seed has so few, in so large segments, that its object logs are
/// cleaned again and again.
const DRIVE_BYTES: u64 = 44 * MIB;
const SMALL_DRIVE_BYTES: u64 = 34 * MIB;
const SEGMENT_STRIPES: u32 = 4;
const LARGE_SEGMENT_STRIPES: u32 = 6;
/// Of those, the slice of the mirror.
pub(super) const META_BYTES: u64 = 30 * MIB;
const STRIPE_UNIT: u64 = 64 * KIB;
const STRIPE_COUNT: u32 = 2;
/// A file of this many bytes lies on all targets that a file is given.
pub(super) const ROW_BYTES: usize = STRIPE_UNIT as usize * STRIPE_COUNT as usize;
/// In one of so many seeds new files do not go to all targets all the time.
const PLACED_SEEDS: u64 = 5;
/// Where the node listens.
pub(super) const NODE: &str = "node";
/// What its clients are called.
pub(super) const CLIENT: &str = "client";

/// Bytes of a drive of this seed.
pub(super) fn drive_bytes(seed: u64) -> u64 {
    if seed % 3 == 1 { SMALL_DRIVE_BYTES } else { DRIVE_BYTES }
}

/// See the module.
pub struct Stack {
    pub world: Rc<World>,
    pub network: Network,
    pub file: ClusterFile,
    cluster: RefCell<Weak<Cluster>>,
    changed: RefCell<Rc<Notify>>,
    meta_target: Cell<TargetId>,
    pub(super) faults: super::mischief::State,
}

pub(super) struct SimDrives(pub Rc<World>);

impl DriveSource for SimDrives {
    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        Box::pin(async move {
            let drives = self.0.drives.borrow();
            let found = drives.iter().find(|known| known.name == drive.name);
            Ok(found.expect("the cluster file names the world's drives").device())
        })
    }

    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        self.open(drive)
    }
}

/// The box of the default cluster, small: two object targets, units of 64 KiB.
fn cluster_file(drive_bytes: u64) -> ClusterFile {
    let mut file =
        ClusterFile::box_default(Path::new("/sim"), 1 << 50).expect("there is room for a box");
    for (at, drive) in file.drives.iter_mut().enumerate() {
        drive.name = format!("d{at:02}");
        drive.size = Some(Bytes(drive_bytes));
    }
    file.arrays[0].slice = SliceSize::Bytes(Bytes(META_BYTES));
    file.arrays[1].level =
        Level::Parity { kind: ParityKind::Raid6, data: 8, chunk: Bytes(16 * KIB) };
    let names: Vec<String> = file.drives.iter().map(|drive| drive.name.clone()).collect();
    for array in &mut file.arrays {
        array.drives.clone_from(&names);
    }
    let fs = &mut file.filesystems[0];
    fs.object_targets = 2;
    fs.stripe_unit = Bytes(STRIPE_UNIT);
    fs.stripe_count = STRIPE_COUNT;
    file.mounts.clear();
    file
}

/// As if targets were full or silent by turns: new files go now to one of them, now to all.
async fn move_new_files(cluster: Rc<Cluster>) {
    let targets: Vec<TargetId> = cluster
        .targets
        .iter()
        .filter(|target| matches!(target.service, Service::Objects { .. }))
        .map(|target| target.entry.id)
        .collect();
    loop {
        let draw = reactor::random_u64();
        let avoided = targets.get(draw as usize % (targets.len() + 1)).copied();
        for target in &cluster.targets {
            if let Service::Metadata { service, .. } = &target.service {
                service.avoid(&avoided.into_iter().collect());
            }
        }
        reactor::sleep(Duration::from_millis(draw >> 32 & 0x1ff)).await;
    }
}

impl Stack {
    /// A cluster that has not been started yet.
    #[must_use]
    pub fn new(world: Rc<World>) -> Rc<Self> {
        let file = cluster_file(world.shape.drive_bytes);
        Rc::new(Self {
            world,
            network: Network::new(LinkConfig::default()),
            file,
            cluster: RefCell::default(),
            changed: RefCell::default(),
            meta_target: Cell::new(TargetId(0)),
            faults: super::mischief::State::default(),
        })
    }

    /// The node's parts, while it serves.
    #[must_use]
    pub fn cluster(&self) -> Option<Rc<Cluster>> {
        self.cluster.borrow().upgrade()
    }

    /// Wakes whoever looks after the arrays.
    pub(super) fn changed(&self) {
        self.changed.borrow().notify_all();
    }

    /// Starts the node; the result is ready when it serves.
    pub fn start(self: &Rc<Self>) -> reactor::JoinHandle<()> {
        let (stack, node) = (Rc::clone(self), self.world.node());
        reactor::spawn_in(&node, async move { stack.serve().await })
    }

    async fn serve(self: Rc<Self>) {
        let listener = self.network.listen(NODE);
        let source = SimDrives(Rc::clone(&self.world));
        let segment_stripes = match self.world.shape.drive_bytes {
            SMALL_DRIVE_BYTES => LARGE_SEGMENT_STRIPES,
            _ => SEGMENT_STRIPES,
        };
        let tuning =
            Tuning { log_bytes_max: MIB, cache_bytes: 256 * KIB as usize, segment_stripes };
        let options = StartOptions {
            may_overwrite: MayOverwrite::Nothing,
            without_majority: false,
            tuning,
            address: NODE.to_owned(),
            progress: &|_| {},
        };
        let recovering = levada_base::probe::busy("recovering");
        let started = assembly::start(self.file.clone(), &source, options).await;
        drop(recovering);
        let cluster = match started {
            Ok(cluster) => Rc::new(cluster),
            Err(error) => panic!(
                "seed {}: the node does not start, with {:?} lost: {error}",
                self.world.seed,
                self.faults.lost()
            ),
        };
        for target in &cluster.targets {
            if let Service::Stopped { why } = &target.service {
                let name = target.entry.name();
                panic!("seed {}: target {name} does not open: {why}", self.world.seed);
            }
        }
        let changed = Rc::new(Notify::default());
        let config = ServiceConfig {
            cluster: *cluster.drives.cluster.as_bytes(),
            ..ServiceConfig::default()
        };
        let router = Rc::clone(&cluster.router) as Rc<_>;
        reactor::spawn(accept_all(Rc::new(listener), router, config));
        for target in &cluster.targets {
            if let Service::Metadata { service, .. } = &target.service {
                let service = Rc::clone(service);
                reactor::spawn(async move { service.run().await });
            }
        }
        arrays::look_after(cluster.metadata_first(), Rc::clone(&changed), Limits::NONE);
        let target = cluster.metadata_target().expect("it has one");
        self.meta_target.set(target);
        let house = self.client_config("house", *cluster.table.fs.as_bytes());
        reactor::spawn(async move {
            if let Ok(client) = Client::connect(house).await {
                housekeeper::keep_house(client).await;
            }
        });
        if self.world.seed % PLACED_SEEDS == 2 && !full::is_filled(self.world.seed) {
            reactor::spawn(move_new_files(Rc::clone(&cluster)));
        }
        *self.cluster.borrow_mut() = Rc::downgrade(&cluster);
        *self.changed.borrow_mut() = changed;
        reactor::spawn(async move {
            let _held = cluster;
            std::future::pending::<()>().await;
        });
    }

    /// Tells a client where the node is.
    #[must_use]
    pub fn client_config(&self, from: &str, uuid: [u8; 16]) -> ClientConfig {
        let transport = self.network.transport(from);
        let mut config = ClientConfig::new(transport, NODE, self.meta_target.get(), uuid);
        config.unstable_bytes_max = 16 * MIB;
        config
    }
}

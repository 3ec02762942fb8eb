//! Tests of the whole service, on the key-value store on a device that loses power.

mod burial;
mod locks;
mod model;
mod quotas;
mod random;
mod reclaim;
mod repeats;
mod semantics;
mod unnamed;
mod xattrs;

use crate::check::check;
use crate::config::{CallHeader, FsConfig, ServeConfig};
use crate::service::MetaService;
use levada_base::ids::{Ino, TargetId};
use levada_base::reactor::{self, Group};
use levada_base::units::{KIB, MIB};
use levada_base::{Epoch, reactor::Reactor};
use levada_device::{DriveModel, ModelDevice, RamDevice, VolatileDevice};
use levada_kv::{Config, Store};
use levada_wire::attr::Attr;
use levada_wire::meta::{Caller, MetaFault, MetaReply, MetaRequest, NewInode, OpenMode, SetXattr};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

pub const ROOT: Caller = Caller { uid: 0, gid: 0 };
pub const LEASE: Duration = Duration::from_secs(60);
pub const RECOVERY: Duration = Duration::from_secs(5);

/// Small, so that the log wraps and rows are forgotten.
const STORE: Config = Config { log_bytes: 256 * KIB, cache_bytes: 16 << 10 };

pub fn fs_config() -> FsConfig {
    FsConfig {
        uuid: [7; 16],
        name: "test".to_owned(),
        target: 0,
        stripe_count: 2,
        stripe_unit: MIB,
        inodes_max: 1_000_000,
        root_mode: 0o755,
        root_uid: 0,
        root_gid: 0,
    }
}

pub fn serve_config() -> ServeConfig {
    ServeConfig {
        objects: (0..3).map(|n| (TargetId(n), format!("node:{n}"))).collect(),
        lease: LEASE,
        slots: 8,
        recovery: RECOVERY,
        cache_bytes: 4 << 10,
    }
}

/// A metadata target in a node that can lose power.
pub struct World {
    device: Rc<VolatileDevice>,
    epoch: Cell<u64>,
    node: RefCell<Group>,
    service: RefCell<Option<Rc<MetaService>>>,
    config: ServeConfig,
    store: Config,
}

impl World {
    pub async fn new(fs: FsConfig, config: ServeConfig, bytes: u64) -> Rc<Self> {
        Self::with_store(fs, config, bytes, STORE).await
    }

    pub async fn with_store(
        fs: FsConfig,
        config: ServeConfig,
        bytes: u64,
        store: Config,
    ) -> Rc<Self> {
        let ram = Rc::new(RamDevice::new("meta", bytes));
        let drive = Rc::new(ModelDevice::new(ram, DriveModel::nvme_flush_100us()));
        let device = Rc::new(VolatileDevice::new(drive));
        let node = Group::new();
        let area = Rc::clone(&device);
        let serve = config.clone();
        let made = reactor::spawn_in(&node, async move {
            let store = Store::create(area, Epoch(1), store).await.expect("made");
            MetaService::create(store, fs, serve).await.expect("made")
        });
        let service = made.await.expect("alive");
        Rc::new(Self {
            device,
            epoch: Cell::new(1),
            node: RefCell::new(node),
            service: RefCell::new(Some(Rc::new(service))),
            config,
            store,
        })
    }

    pub async fn small() -> Rc<Self> {
        Self::new(fs_config(), serve_config(), 16 * MIB).await
    }

    pub fn service(&self) -> Rc<MetaService> {
        Rc::clone(self.service.borrow().as_ref().expect("up"))
    }

    pub fn node(&self) -> Group {
        self.node.borrow().clone()
    }

    /// The power goes and comes back.
    pub async fn power_cut(&self) {
        self.node().kill();
        *self.service.borrow_mut() = None;
        self.device.power_cut(reactor::random_u64()).await.expect("lands");
        self.device.power_on();
        self.epoch.set(self.epoch.get() + 1);
        let node = Group::new();
        let (area, epoch) = (Rc::clone(&self.device), Epoch(self.epoch.get()));
        let (config, store) = (self.config.clone(), self.store);
        let opened = reactor::spawn_in(&node, async move {
            let store = Store::open(area, epoch, store).await.expect("opens");
            MetaService::open(store, config).await.expect("opens")
        });
        let service = opened.await.expect("alive");
        *self.node.borrow_mut() = node;
        *self.service.borrow_mut() = Some(Rc::new(service));
    }

    pub async fn assert_sound(&self) {
        let problems = check(self.service().store()).await.expect("reads");
        assert!(problems.is_empty(), "{problems:#?}");
    }

    /// Drops everything that runs.
    pub fn stop(&self) {
        *self.service.borrow_mut() = None;
        self.node().kill();
    }
}

/// One client with one slot in use, in sequence.
pub struct Tester {
    world: Rc<World>,
    pub client: Cell<u64>,
    pub uuid: [u8; 16],
    sequence: Cell<u64>,
}

impl Tester {
    pub async fn new(world: &Rc<World>, number: u8) -> Self {
        let tester = Self {
            world: Rc::clone(world),
            client: Cell::new(0),
            uuid: [number; 16],
            sequence: Cell::new(0),
        };
        tester.register().await;
        tester
    }

    pub async fn register(&self) {
        let request = MetaRequest::Register { uuid: self.uuid };
        match self.world.service().handle(CallHeader::reading(0), request).await {
            MetaReply::Registered { client, .. } => self.client.set(client),
            reply => panic!("{reply:?}"),
        }
    }

    pub fn last_call(&self) -> CallHeader {
        CallHeader::changing(self.client.get(), 0, self.sequence.get())
    }

    pub async fn change(&self, request: MetaRequest) -> MetaReply {
        self.sequence.set(self.sequence.get() + 1);
        self.world.service().handle(self.last_call(), request).await
    }

    pub async fn read(&self, request: MetaRequest) -> MetaReply {
        self.world.service().handle(CallHeader::reading(self.client.get()), request).await
    }

    pub async fn make(&self, parent: Ino, name: &str, new: NewInode) -> Result<Attr, MetaFault> {
        let request = create(parent, name, new);
        attr_of(self.change(request).await)
    }

    pub async fn file(&self, name: &str) -> Attr {
        let new = NewInode::File { open: None };
        self.make(Ino::ROOT, name, new).await.expect("made")
    }

    pub async fn dir(&self, parent: Ino, name: &str) -> Ino {
        self.make(parent, name, NewInode::Directory).await.expect("made").ino
    }

    pub async fn attr(&self, ino: Ino) -> Result<Attr, MetaFault> {
        attr_of(self.read(MetaRequest::GetAttr { ino }).await)
    }

    pub async fn lookup(&self, parent: Ino, name: &str) -> Result<Attr, MetaFault> {
        attr_of(self.read(MetaRequest::Lookup { parent, name: name.into() }).await)
    }

    pub async fn unlink(&self, name: &str) -> MetaReply {
        let (caller, parent) = (ROOT, Ino::ROOT);
        self.change(MetaRequest::Unlink { caller, parent, name: name.into() }).await
    }

    pub async fn rename(&self, from: (Ino, &str), to: (Ino, &str), flags: u32) -> MetaReply {
        let request = MetaRequest::Rename {
            caller: ROOT,
            from: from.0,
            from_name: from.1.into(),
            to: to.0,
            to_name: to.1.into(),
            flags,
        };
        self.change(request).await
    }

    pub async fn open(&self, ino: Ino, write: bool, truncate: bool) -> Result<Attr, MetaFault> {
        let mode = OpenMode { write, truncate };
        attr_of(self.change(MetaRequest::Open { ino, mode }).await)
    }

    pub async fn chores(&self) -> (Vec<Ino>, Vec<Ino>) {
        let (destroy, settle, upto) = self.some_chores(100, Ino(0)).await;
        assert_eq!(upto, None, "all of them");
        (destroy, settle)
    }

    pub async fn some_chores(&self, limit: u32, after: Ino) -> (Vec<Ino>, Vec<Ino>, Option<Ino>) {
        let service = self.world.service();
        let request = MetaRequest::Chores { limit, after };
        match service.handle(MetaService::housekeeper(), request).await {
            MetaReply::Chores { destroy, settle, upto } => {
                let inos = |attrs: Vec<Attr>| attrs.iter().map(|attr| attr.ino).collect();
                (inos(destroy), inos(settle), upto)
            }
            reply => panic!("{reply:?}"),
        }
    }
}

pub fn create(parent: Ino, name: &str, new: NewInode) -> MetaRequest {
    let (caller, name) = (ROOT, name.as_bytes().to_vec());
    let mode = 0o644.into();
    MetaRequest::Create { caller, parent, name, mode, new, exclusive: true }
}

/// The value of an access control list: permissions of owner, group and others, or of owner, user 1000, group, mask
/// and others.
pub fn acl(permissions: &[u8]) -> Vec<u8> {
    let nobody = u32::MAX;
    let entries: &[(u8, u32)] = match permissions.len() {
        3 => &[(1, nobody), (4, nobody), (32, nobody)],
        _ => &[(1, nobody), (2, 1000), (4, nobody), (16, nobody), (32, nobody)],
    };
    let mut value = vec![2, 0, 0, 0];
    for ((tag, id), permissions) in entries.iter().zip(permissions) {
        value.extend([*tag, 0, *permissions, 0]);
        value.extend(id.to_le_bytes());
    }
    value
}

pub fn set_xattr(ino: Ino, name: &[u8], value: &[u8]) -> MetaRequest {
    let (name, value) = (name.to_vec(), value.to_vec());
    MetaRequest::SetXattr { caller: ROOT, ino, name, value, how: SetXattr::default() }
}

/// All of it in one part.
pub fn reclaim(opens: Vec<(Ino, u32)>) -> MetaRequest {
    MetaRequest::Reclaim { opens, locks: Vec::new(), last: true }
}

pub fn attr_of(reply: MetaReply) -> Result<Attr, MetaFault> {
    match reply {
        MetaReply::Attr(attr) | MetaReply::Entry(attr, _) => Ok(*attr),
        MetaReply::Failed(fault) => Err(fault),
        reply => panic!("{reply:?}"),
    }
}

/// Runs a test on virtual time.
pub fn simulated<F: Future>(seed: u64, test: F) -> F::Output {
    Reactor::simulated(seed).block_on(test)
}

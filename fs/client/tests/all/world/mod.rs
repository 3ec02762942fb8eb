//! A small cluster in one process: one metadata target, several object targets, a network.
//! Services can be killed and started again; object targets lose unstable data then.
#![allow(dead_code)] // Each test uses a part of it.

pub mod contest;
pub mod crash;
pub mod leases;

use levada_base::ids::{Ino, TargetId};
use levada_base::reactor::{self, Group};
use levada_base::{Buf, Epoch, IoVec};
use levada_client::{Client, ClientConfig, File};
use levada_device::{Device, RamDevice};
use levada_kv::Store;
use levada_meta::{FsConfig, MetaService, ServeConfig};
use levada_object::{MemoryObjects, ObjectService};
use levada_wire::channel::Listener;
use levada_wire::local::{LinkConfig, Network};
use levada_wire::meta::{AttrChange, Caller, OpenMode};
use levada_wire::rpc::{Handler, Router, ServiceConfig, accept_all};
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

pub const META: TargetId = TargetId(0);
pub const ROOT: Caller = Caller { uid: 0, gid: 0 };
pub const UNIT: u64 = 64 << 10;
const KV: levada_kv::Config = levada_kv::Config { log_bytes: 4 << 20, cache_bytes: 4 << 20 };

struct Server {
    group: Group,
    objects: Rc<MemoryObjects>,
    service: Rc<ObjectService>,
}

pub struct World {
    pub network: Network,
    pub targets: u32,
    /// Targets that each file lies on.
    pub stripe_count: u32,
    pub lease: Duration,
    device: RefCell<Rc<dyn Device>>,
    /// The cluster that services started from now on say they belong to.
    pub cluster: Cell<[u8; 16]>,
    /// Clients made from now on do not say which cluster they want.
    pub asks_for_any: Cell<bool>,
    meta: RefCell<Option<Group>>,
    /// It goes with its group.
    meta_service: RefCell<Weak<MetaService>>,
    servers: RefCell<Vec<Server>>,
    clients: Cell<u8>,
}

impl World {
    pub async fn new(targets: u32) -> Rc<Self> {
        Self::with_capacity(targets, 1 << 40).await
    }

    pub async fn with_capacity(targets: u32, target_bytes: u64) -> Rc<Self> {
        Self::with_stripes(targets, targets, target_bytes).await
    }

    pub async fn with_stripes(targets: u32, stripe_count: u32, target_bytes: u64) -> Rc<Self> {
        let network = Network::new(LinkConfig { codec: false, ..LinkConfig::default() });
        let world = Rc::new(Self {
            network,
            targets,
            stripe_count,
            lease: Duration::from_secs(30),
            device: RefCell::new(disk()),
            cluster: Cell::default(),
            asks_for_any: Cell::default(),
            meta: RefCell::default(),
            meta_service: RefCell::default(),
            servers: RefCell::default(),
            clients: Cell::new(0),
        });
        world.format([7; 16]).await;
        for number in 0..targets {
            let objects = Rc::new(MemoryObjects::new(target_bytes));
            let server = world.serve(number, objects);
            world.servers.borrow_mut().push(server);
        }
        world.start_meta().await;
        world
    }

    /// Makes a file system, in the place of the one that is there.
    pub async fn format(&self, uuid: [u8; 16]) {
        *self.device.borrow_mut() = disk();
        let device = Rc::clone(&self.device.borrow());
        let store = Store::create(device, Epoch(1), KV).await.expect("fits");
        let fs = FsConfig {
            uuid,
            name: "test".to_owned(),
            target: 0,
            stripe_count: self.stripe_count,
            stripe_unit: UNIT,
            inodes_max: 1 << 20,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
        };
        MetaService::create(store, fs, self.serve_config()).await.expect("made");
    }

    fn serve_config(&self) -> ServeConfig {
        let objects = (0..self.targets).map(|n| (TargetId(n + 1), format!("object-{n}")));
        ServeConfig { objects: objects.collect(), lease: self.lease, ..ServeConfig::default() }
    }

    pub fn listen(&self, group: &Group, address: &str, target: TargetId, handler: Rc<dyn Handler>) {
        let router = Rc::new(Router::default());
        router.insert(target, handler);
        let listener: Rc<dyn Listener> = Rc::new(self.network.listen(address));
        let config = ServiceConfig { cluster: self.cluster.get(), ..ServiceConfig::default() };
        reactor::spawn_in(group, accept_all(listener, router, config));
    }

    pub fn kill_meta(&self) {
        let group = self.meta.borrow_mut().take();
        if let Some(group) = group {
            group.kill();
        }
    }

    pub async fn start_meta(&self) {
        let group = Group::new();
        let device = Rc::clone(&self.device.borrow());
        let config = self.serve_config();
        let opening = reactor::spawn_in(&group, async move {
            let store = Store::open(device, Epoch(1), KV).await.expect("a store");
            Rc::new(MetaService::open(store, config).await.expect("a file system"))
        });
        let service = opening.await.expect("not killed");
        *self.meta_service.borrow_mut() = Rc::downgrade(&service);
        self.listen(&group, "meta", META, Rc::clone(&service) as _);
        reactor::spawn_in(&group, async move { service.run().await });
        *self.meta.borrow_mut() = Some(group);
    }

    pub fn meta_service(&self) -> Rc<MetaService> {
        self.meta_service.borrow().upgrade().expect("runs")
    }

    pub fn has_meta(&self) -> bool {
        self.meta.borrow().is_some()
    }

    /// Files that the metadata service counts as open, for each client that has it open.
    pub fn open_files(&self) -> u64 {
        let service = self.meta_service.borrow().upgrade().expect("up");
        service.clients().iter().map(|client| client.open_files).sum()
    }

    pub async fn restart_meta(&self) {
        self.kill_meta();
        reactor::sleep(Duration::from_millis(reactor::random_u64() % 100)).await;
        self.start_meta().await;
    }

    fn serve(&self, number: u32, objects: Rc<MemoryObjects>) -> Server {
        let group = Group::new();
        let service = ObjectService::new(Rc::clone(&objects) as _);
        let address = format!("object-{number}");
        self.listen(&group, &address, TargetId(number + 1), Rc::clone(&service) as _);
        Server { group, objects, service }
    }

    pub fn objects(&self, number: u32) -> Rc<MemoryObjects> {
        Rc::clone(&self.servers.borrow()[number as usize].objects)
    }

    pub fn kill_server(&self, number: u32) {
        self.servers.borrow()[number as usize].group.kill();
    }

    /// The node is there, and does not serve the target: it could not be opened, say.
    pub fn stop_target(&self, number: u32) {
        self.kill_server(number);
        let server = &mut self.servers.borrow_mut()[number as usize];
        server.group = Group::new();
        let listener: Rc<dyn Listener> = Rc::new(self.network.listen(&format!("object-{number}")));
        let nothing = Rc::new(Router::default());
        reactor::spawn_in(&server.group, accept_all(listener, nothing, ServiceConfig::default()));
    }

    /// Ends a server's connections with all that is under way on them and in it; it loses nothing else.
    pub fn drop_requests(&self, number: u32) {
        self.kill_server(number);
        let server = self.serve(number, self.objects(number));
        self.servers.borrow_mut()[number as usize] = server;
    }

    /// Starts a server anew: a random part of what was unstable is lost.
    pub fn restart_server(&self, number: u32) {
        self.restart_and_refuse(number, 0);
    }

    /// The same, and so many writes that are sent again are refused.
    pub fn restart_and_refuse(&self, number: u32, repeats: u32) {
        self.kill_server(number);
        let objects = Rc::new(self.objects(number).restarted());
        objects.repeats_to_fail.set(repeats);
        let server = self.serve(number, objects);
        self.servers.borrow_mut()[number as usize] = server;
    }

    pub fn config(&self, name: &str) -> ClientConfig {
        let number = self.clients.get() + 1;
        self.clients.set(number);
        let transport = self.network.transport(name);
        let config = ClientConfig::new(transport, "meta", META, [number; 16]);
        let cluster = if self.asks_for_any.get() { [0; 16] } else { self.cluster.get() };
        ClientConfig { cluster, ..config }
    }

    /// A client that is given leases.
    pub async fn leasing(&self, name: &str) -> Client {
        let config = ClientConfig { leases: true, ..self.config(name) };
        Client::connect(config).await.expect("connects")
    }

    pub async fn client(&self, name: &str) -> Client {
        Client::connect(self.config(name)).await.expect("connects")
    }
}

fn disk() -> Rc<dyn Device> {
    Rc::new(RamDevice::new("meta", 64 << 20))
}

pub fn data(bytes: &[u8]) -> IoVec {
    Buf::copy_of(bytes).into_vec()
}

pub fn flat(parts: &IoVec) -> Vec<u8> {
    levada_base::buf::joined(parts)
}

pub fn random_bytes(len: usize) -> Vec<u8> {
    let seed = reactor::random_u64() | 1;
    (0..len as u64).map(|n| (seed.wrapping_mul(n * 2 + 1) >> 56) as u8).collect()
}

pub fn below(n: u64) -> u64 {
    reactor::random_u64() % n
}

pub const ROOT_DIR: Ino = Ino::ROOT;
pub const WRITE: OpenMode = OpenMode { write: true, truncate: false };

/// A new file in the root, open for writing.
pub async fn create(client: &Client, name: &str) -> File {
    let made = client.create_file(ROOT, ROOT_DIR, name.as_bytes(), 0o644, WRITE, true).await;
    let (file, attr, made) = made.expect("a fresh name");
    assert!(made && attr.size == 0);
    file
}

pub async fn cut(client: &Client, file: &File, size: u64) {
    let change = AttrChange { size: Some(size), ..AttrChange::default() };
    let attr = client.set_attr(ROOT, file.ino(), change).await.expect("cut");
    assert_eq!(attr.size, size);
}

//! A node and its mounts in one thread: the metadata service on a store in RAM, object services
//! in memory, Unix sockets between them and one client per mount. A test runs beside it on a
//! thread of its own, under a limit of time; whatever happens, nothing stays mounted.

use levada_base::Epoch;
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::{GIB, MIB};
use levada_client::{Client, ClientConfig, housekeeper};
use levada_device::RamDevice;
use levada_kv::{Config, Store};
use levada_meta::{MetaService, ServeConfig};
use levada_mount::files::Files;
use levada_mount::session::Session;
use levada_mount::transport::dev_fuse::{FuseMount, MountOptions, unmount};
use levada_object::{MemoryObjects, ObjectService};
use levada_wire::channel::Listener;
use levada_wire::frame::Class;
use levada_wire::rpc::{Router, ServiceConfig, accept_all};
use levada_wire::tcp::{TcpListener, TcpTransport};
use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// No test needs a quarter of it on an idle machine.
const LIMIT: Duration = Duration::from_secs(240);
const META: TargetId = TargetId(0);
const OBJECT_TARGETS: u32 = 4;
const STRIPE_UNIT: u64 = 256 << 10;

/// Whether this machine can mount; says so when not.
#[allow(dead_code)] // Not every test asks.
pub fn there_is_fuse() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        eprintln!("skipped: there is no /dev/fuse");
    }
    there
}

/// What a test holds: its mounts, and the power switch of the node.
pub struct World {
    pub dirs: Vec<PathBuf>,
    told: Arc<Told>,
    ready: mpsc::Receiver<()>,
}

#[derive(Default)]
struct Told {
    node_down: AtomicBool,
    node_is_down: AtomicBool,
    ended: AtomicBool,
    /// As the clients say; looked at every 2 ms.
    unstable_bytes: AtomicU64,
}

impl World {
    /// The first mount's directory.
    pub fn dir(&self) -> &Path {
        &self.dirs[0]
    }

    /// Unmounts everything and mounts it again, with clients that know nothing. Nothing on a
    /// mount may be open, as it would live on.
    pub fn remount(&self) {
        self.unmount();
        self.ready.recv_timeout(LIMIT).expect("mounted again");
    }

    fn unmount(&self) {
        self.dirs.iter().for_each(|dir| unmount(dir, true).expect("unmounts"));
    }

    /// Written bytes that the clients keep as they may not be durable.
    pub fn unstable_bytes(&self) -> u64 {
        thread::sleep(Duration::from_millis(20));
        self.told.unstable_bytes.load(Ordering::Relaxed)
    }

    /// The node loses power: what was not durable is gone.
    pub fn node_down(&self) {
        self.told.node_down.store(true, Ordering::Relaxed);
        while !self.told.node_is_down.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn node_up(&self) {
        self.told.node_down.store(false, Ordering::Relaxed);
        while self.told.node_is_down.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Cuts mounts off when a test ends without having unmounted them.
struct CutOff(Vec<PathBuf>);

impl Drop for CutOff {
    fn drop(&mut self) {
        for dir in &self.0 {
            let path = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()).unwrap();
            // SAFETY: a NUL-terminated path. An error says that nothing is mounted.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) };
        }
    }
}

/// Runs `test` on `mounts` mounts of one new file system.
pub fn with_world(mounts: usize, test: impl FnOnce(&World) + Send + 'static) {
    let place = TempDir::new().unwrap();
    let dirs: Vec<_> = (0..mounts).map(|n| place.path().join(format!("mount-{n}"))).collect();
    dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let _cut_off = CutOff(dirs.clone());
    let told = Arc::new(Told::default());
    let (mounted, ready) = mpsc::channel();
    let server = {
        let (dirs, told) = (dirs.clone(), Arc::clone(&told));
        let address = format!("unix:{}", place.path().join("node").display());
        thread::spawn(move || {
            let reactor = Reactor::new().expect("io_uring");
            reactor.block_on(run(&dirs, &told, &mounted, &address));
        })
    };
    let ended = Arc::clone(&told);
    let (done, result) = mpsc::channel::<Result<(), Box<dyn Any + Send>>>();
    thread::spawn(move || {
        ready.recv_timeout(LIMIT).expect("mounted");
        let world = World { dirs, told, ready };
        let result = catch_unwind(AssertUnwindSafe(|| {
            test(&world);
            world.told.ended.store(true, Ordering::Relaxed);
            world.unmount();
        }));
        let _ = done.send(result);
    });
    let result = result.recv_timeout(LIMIT);
    // What is cut off is not to be mounted again.
    ended.ended.store(true, Ordering::Relaxed);
    match result {
        Ok(Ok(())) => server.join().expect("the server panicked"),
        Ok(Err(panic)) => resume_unwind(panic),
        Err(_) => panic!("the test hangs"),
    }
}

async fn run(dirs: &[PathBuf], told: &Arc<Told>, mounted: &mpsc::Sender<()>, address: &str) {
    let node = Rc::new(Node::new(address).await);
    node.start().await;
    reactor::spawn(Rc::clone(&node).obey(Arc::clone(told)));
    while !told.ended.load(Ordering::Relaxed) {
        let mut serving = Vec::new();
        for dir in dirs {
            let client = client(address, Class::Foreground).await;
            let (mount, channel) = FuseMount::new(dir, &MountOptions::default()).expect("mounts");
            let files = Files::new(client.clone()).mounted_at(dir.clone());
            let session = Rc::new(Session::new(files, Files::limits()));
            let serve = levada_mount::transport::reactor::serve(channel, Rc::clone(&session));
            serving.push((client, mount, reactor::spawn(serve)));
            while session.terms().is_none() {
                reactor::sleep(Duration::from_millis(1)).await;
            }
        }
        for (_, mount, _) in &serving {
            mount.set_read_ahead(4 << 20).expect("sysfs");
        }
        let clients: Vec<_> = serving.iter().map(|(client, _, _)| client.clone()).collect();
        let looking = Arc::clone(told);
        let looking = reactor::spawn(async move {
            loop {
                let unstable_bytes = clients.iter().map(Client::unstable_bytes).sum();
                looking.unstable_bytes.store(unstable_bytes, Ordering::Relaxed);
                reactor::sleep(Duration::from_millis(2)).await;
            }
        });
        mounted.send(()).expect("the test waits");
        for (client, _mount, served) in serving {
            served.await.expect("not killed").expect("the device works");
            client.shutdown().await.expect("everything is durable");
        }
        looking.abort();
    }
    node.group.borrow().kill();
}

async fn client(address: &str, class: Class) -> Client {
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&reactor::random_u64().to_le_bytes());
    let config = ClientConfig::new(Rc::new(TcpTransport), address, META, uuid);
    let leases = class == Class::Foreground;
    let config = ClientConfig { class, leases, ..config };
    Client::connect(config).await.expect("the services are there")
}

/// The services.
struct Node {
    address: String,
    area: Rc<RamDevice>,
    epoch: RefCell<u64>,
    objects: RefCell<Vec<Rc<MemoryObjects>>>,
    group: RefCell<Group>,
}

const STORE: Config = Config { log_bytes: 8 * MIB, cache_bytes: 16 * MIB as usize };

impl Node {
    async fn new(address: &str) -> Self {
        let area = Rc::new(RamDevice::new("meta", 256 * MIB));
        let fs = crate::file_system(OBJECT_TARGETS, STRIPE_UNIT);
        let objects = |_| {
            let objects = MemoryObjects::new(4 * GIB);
            objects.delay_max.set(Duration::ZERO);
            Rc::new(objects)
        };
        let node = Self {
            address: address.to_owned(),
            area: Rc::clone(&area),
            epoch: RefCell::new(1),
            objects: RefCell::new((0..OBJECT_TARGETS).map(objects).collect()),
            group: RefCell::default(),
        };
        let store = Store::create(area, Epoch(1), STORE).await.expect("made");
        let service = MetaService::create(store, fs, node.config()).await.expect("made");
        service.store().close().await.expect("closes");
        node
    }

    fn config(&self) -> ServeConfig {
        let targets = 1..=OBJECT_TARGETS;
        let objects = targets.map(|n| (TargetId(n), self.address.clone())).collect();
        ServeConfig { objects, ..ServeConfig::default() }
    }

    async fn start(&self) {
        let group = Group::new();
        self.epoch.replace_with(|epoch| *epoch + 1);
        let (area, epoch) = (Rc::clone(&self.area), Epoch(*self.epoch.borrow()));
        let config = self.config();
        let opened = reactor::spawn_in(&group, async move {
            let store = Store::open(area, epoch, STORE).await.expect("opens");
            Rc::new(MetaService::open(store, config).await.expect("opens"))
        });
        let router = Rc::new(Router::default());
        router.insert(META, opened.await.expect("alive"));
        for (n, objects) in (1..).zip(&*self.objects.borrow()) {
            router.insert(TargetId(n), ObjectService::new(Rc::clone(objects) as _));
        }
        let listener: Rc<dyn Listener> = Rc::new(TcpListener::bind(&self.address).expect("binds"));
        let config = ServiceConfig::default();
        reactor::spawn_in(&group, accept_all(listener, router, config));
        let address = self.address.clone();
        reactor::spawn_in(&group, async move {
            // Told early it would be waited for when it has died with the node.
            housekeeper::keep_house(client(&address, Class::Background).await).await;
        });
        *self.group.borrow_mut() = group;
    }

    fn stop(&self) {
        self.group.borrow().kill();
        for objects in &mut *self.objects.borrow_mut() {
            *objects = Rc::new(objects.restarted());
        }
    }

    /// Does what the test tells.
    async fn obey(self: Rc<Self>, told: Arc<Told>) {
        loop {
            let wanted = told.node_down.load(Ordering::Relaxed);
            if wanted != told.node_is_down.load(Ordering::Relaxed) {
                if wanted {
                    self.stop()
                } else {
                    self.start().await
                }
                told.node_is_down.store(wanted, Ordering::Relaxed);
            }
            reactor::sleep(Duration::from_millis(2)).await;
        }
    }
}

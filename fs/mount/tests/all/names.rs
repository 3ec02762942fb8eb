//! Names as the kernel asks for them, without a kernel between: mounts of one file system whose directories
//! come and go, over a network that breaks and a metadata service that restarts. What a mount answers by itself
//! (`files/names.rs`) must be what the service would have said.

use levada_base::ids::TargetId;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::{Buf, Epoch};
use levada_client::{Client, ClientConfig};
use levada_device::RamDevice;
use levada_kv::Store;
use levada_meta::{MetaService, ServeConfig};
use levada_mount::codec::{Caller, Entry, ReadArgs, SetAttr};
use levada_mount::files::{Files, VALID};
use levada_mount::{Errno, Handler, Operation, Reply, Request};
use levada_wire::channel::Listener;
use levada_wire::local::{LinkConfig, Network};
use levada_wire::rpc::{Router, ServiceConfig, accept_all};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const META: TargetId = TargetId(0);
const ROOT: u64 = 1;
const STORE: levada_kv::Config = levada_kv::Config { log_bytes: 4 << 20, cache_bytes: 4 << 20 };

/// The metadata service and a network. No test here needs objects.
struct World {
    network: Network,
    device: Rc<RamDevice>,
    service: RefCell<Group>,
}

fn config() -> ServeConfig {
    let objects = vec![(TargetId(1), "objects".to_owned())];
    ServeConfig { objects, ..ServeConfig::default() }
}

impl World {
    async fn new() -> Rc<Self> {
        let network = Network::new(LinkConfig { codec: false, ..LinkConfig::default() });
        let device = Rc::new(RamDevice::new("meta", 64 << 20));
        let fs = crate::file_system(1, 64 << 10);
        let store = Store::create(Rc::clone(&device) as _, Epoch(1), STORE).await.expect("fits");
        MetaService::create(store, fs, config()).await.expect("made");
        let world = Rc::new(World { network, device, service: RefCell::default() });
        world.start().await;
        world
    }

    async fn start(&self) {
        let group = Group::new();
        let device = Rc::clone(&self.device);
        let opening = reactor::spawn_in(&group, async move {
            let store = Store::open(device, Epoch(1), STORE).await.expect("a store");
            Rc::new(MetaService::open(store, config()).await.expect("a file system"))
        });
        let service = opening.await.expect("not killed");
        let router = Rc::new(Router::default());
        router.insert(META, Rc::clone(&service) as _);
        let listener: Rc<dyn Listener> = Rc::new(self.network.listen("meta"));
        reactor::spawn_in(&group, accept_all(listener, router, ServiceConfig::default()));
        reactor::spawn_in(&group, async move { service.run().await });
        *self.service.borrow_mut() = group;
    }

    fn kill(&self) {
        self.service.borrow().kill();
    }

    async fn mount(&self, name: &'static str) -> Rc<Mount> {
        let mut uuid = [0; 16];
        uuid[..name.len()].copy_from_slice(name.as_bytes());
        let config = ClientConfig::new(self.network.transport(name), "meta", META, uuid);
        let config = ClientConfig { leases: true, ..config };
        let client = Client::connect(config).await.expect("connects");
        Rc::new(Mount { name, files: Files::new(client) })
    }
}

struct Mount {
    name: &'static str,
    files: Files,
}

impl Mount {
    async fn ask(&self, inode: u64, operation: Operation<'_>) -> Result<Reply, Errno> {
        let request = Request { unique: 1, inode, caller: Caller::default(), operation };
        match self.files.handle(request, &Buf::copy_of(b"")).await {
            Reply::Error(errno) => Err(errno),
            reply => Ok(reply),
        }
    }

    async fn entry(&self, inode: u64, operation: Operation<'_>) -> Result<Entry, Errno> {
        match self.ask(inode, operation).await? {
            Reply::Entry(entry) => Ok(entry),
            reply => panic!("{reply:?}"),
        }
    }

    async fn make_dir(&self, parent: u64, name: &str) -> Entry {
        let name = name.as_bytes();
        self.entry(parent, Operation::MkDir { name, mode: 0o755, umask: 0 }).await.expect("made")
    }

    async fn make(&self, parent: u64, name: &str) -> Entry {
        let name = name.as_bytes();
        let mode = libc::S_IFIFO | 0o644;
        self.entry(parent, Operation::MkNod { name, mode, rdev: 0, umask: 0 }).await.expect("made")
    }

    async fn is_there(&self, parent: u64, name: &str) -> bool {
        match self.entry(parent, Operation::Lookup { name: name.as_bytes() }).await {
            Ok(_) => true,
            Err(Errno::NOENT) => false,
            Err(errno) => panic!("{errno:?}"),
        }
    }

    /// As the kernel does after each file that it makes.
    async fn attributes(&self, inode: u64) {
        self.ask(inode, Operation::GetAttr { fh: None }).await.expect("there");
    }

    /// The names of a small directory.
    async fn list(&self, inode: u64) -> Vec<String> {
        let args = ReadArgs { size: 1 << 16, ..ReadArgs::default() };
        let Ok(Reply::Bytes(bytes)) = self.ask(inode, Operation::ReadDir(args)).await else {
            panic!("not listed")
        };
        let mut names = Vec::new();
        let mut at = 0;
        // struct fuse_dirent: ino, offset, length of the name, type, name, padding.
        while at < bytes.len() {
            let length = u32::from_ne_bytes(bytes[at + 16..at + 20].try_into().unwrap()) as usize;
            names.push(String::from_utf8(bytes[at + 24..at + 24 + length].to_vec()).unwrap());
            at += (24 + length).next_multiple_of(8);
        }
        names
    }
}

fn below(n: u64) -> u64 {
    reactor::random_u64() % n
}

/// After the answer to a listing a program expects to find what it showed.
#[test]
fn a_name_that_was_listed_is_found() {
    Reactor::simulated(1).block_on(async {
        let world = World::new().await;
        let (here, there) = (world.mount("here").await, world.mount("there").await);
        let dir = here.make_dir(ROOT, "dir").await.inode;
        assert!(!here.is_there(dir, "theirs").await);
        there.make(dir, "theirs").await;
        assert!(here.list(dir).await.contains(&"theirs".to_owned()));
        assert!(here.is_there(dir, "theirs").await);
    });
}

/// A directory on the way to a file is looked up again each second, and then its attributes are not asked for.
#[test]
fn looking_up_a_directory_tells_of_its_names() {
    Reactor::simulated(1).block_on(async {
        let world = World::new().await;
        let here = world.mount("here").await;
        let dir = here.make_dir(ROOT, "dir").await.inode;
        here.make(dir, "own").await;
        reactor::sleep(VALID).await;
        assert!(here.is_there(ROOT, "dir").await);
        // The service is away: whoever asks it waits.
        world.kill();
        let absent = reactor::timeout(Duration::from_millis(10), here.is_there(dir, "absent"));
        assert_eq!(absent.await.ok(), Some(false));
    });
}

/// Whoever sets the attributes of a directory that it has made still knows its names.
#[test]
fn attributes_of_a_directory_are_set_and_its_names_are_known() {
    Reactor::simulated(1).block_on(async {
        let world = World::new().await;
        let here = world.mount("here").await;
        let dir = here.make_dir(ROOT, "dir").await.inode;
        let mode = SetAttr { mode: Some(0o700), ..SetAttr::default() };
        for set in [mode, SetAttr::default()] {
            here.ask(dir, Operation::SetAttr(set)).await.expect("set");
            here.make(dir, &format!("own{:?}", set.mode)).await;
            reactor::sleep(2 * VALID).await;
            here.attributes(dir).await;
        }
        world.kill();
        let absent = reactor::timeout(Duration::from_millis(10), here.is_there(dir, "absent"));
        assert_eq!(absent.await.ok(), Some(false));
    });
}

/// The service went on without what a mount was told, and another mount made as many changes as were lost.
#[test]
fn a_counter_that_went_back_hides_nothing() {
    Reactor::simulated(1).block_on(async {
        let world = World::new().await;
        let (here, there) = (world.mount("here").await, world.mount("there").await);
        let dir = here.make_dir(ROOT, "dir").await.inode;
        here.make(dir, "kept").await;
        reactor::sleep(Duration::from_millis(100)).await;
        here.make(dir, "lost").await;
        world.network.partition("here", "meta");
        world.network.disconnect("here", "meta");
        world.kill();
        world.start().await;
        assert!(!there.is_there(dir, "lost").await, "else this tests nothing");
        there.make(dir, "theirs").await;
        world.network.heal("here", "meta");
        here.attributes(dir).await;
        assert!(here.is_there(dir, "theirs").await);
        assert!(!here.is_there(dir, "lost").await);
        here.make(dir, "more").await;
        here.attributes(dir).await;
        assert!(here.is_there(dir, "theirs").await);
    });
}

/// What there is of a name. Only one task changes it.
#[derive(Clone, Copy)]
struct Known {
    /// Counts its changes, at their beginning and at their end.
    version: u64,
    is_there: bool,
}

#[derive(Default)]
struct Model {
    /// The directories in use, and the names of the mounts that made them.
    dirs: RefCell<Vec<(u64, &'static str)>>,
    names: RefCell<BTreeMap<(u64, String), Known>>,
    /// Names that were looked for.
    looked: Cell<u64>,
}

impl Model {
    fn known(&self, dir: u64, name: &str) -> Known {
        let known = self.names.borrow().get(&(dir, name.to_owned())).copied();
        known.unwrap_or(Known { version: 0, is_there: false })
    }

    fn set(&self, dir: u64, name: &str, is_there: bool) {
        let known = self.known(dir, name);
        let known = Known { version: known.version + 1, is_there };
        self.names.borrow_mut().insert((dir, name.to_owned()), known);
    }
}

/// One program of a mount. Its own names begin with its mount's name and its number.
struct Program {
    mount: Rc<Mount>,
    own: String,
    model: Rc<Model>,
    /// Programs of all mounts.
    all: Rc<Vec<String>>,
}

const NAMES: u64 = 3;

impl Program {
    fn any_name(&self) -> String {
        let of = &self.all[below(self.all.len() as u64) as usize];
        format!("{of}-{}", below(NAMES))
    }

    fn own_name(&self) -> String {
        format!("{}-{}", self.own, below(NAMES))
    }

    /// Mostly one that its mount has made: one that others change is soon known to nobody.
    fn dir(&self) -> u64 {
        let dirs = self.model.dirs.borrow();
        let any = || dirs[below(dirs.len() as u64) as usize];
        let (mut dir, mut of) = any();
        for _ in 0..3 {
            if of != self.mount.name {
                (dir, of) = any();
            }
        }
        dir
    }

    async fn make_dir(&self) {
        let name = format!("{}-{}", self.own, reactor::random_u64());
        let dir = self.mount.make_dir(ROOT, &name).await.inode;
        let mut dirs = self.model.dirs.borrow_mut();
        let count = dirs.len() as u64;
        dirs[below(count) as usize] = (dir, self.mount.name);
    }

    async fn run(self, steps: usize) {
        for _ in 0..steps {
            match below(13) {
                0..3 => self.look().await,
                3..6 => self.make_or_remove().await,
                6..8 => self.rename().await,
                8 => self.list().await,
                9 => {
                    let mode = (below(2) == 0).then_some(0o700);
                    let set = Operation::SetAttr(SetAttr { mode, ..SetAttr::default() });
                    self.mount.ask(self.dir(), set).await.expect("there");
                }
                10 => reactor::sleep(Duration::from_millis(below(1500))).await,
                11 => self.make_dir().await,
                _ => reactor::sleep(Duration::from_micros(below(1000))).await,
            }
            if below(2) == 0 {
                self.mount.attributes(self.dir()).await;
            }
        }
    }

    async fn look(&self) {
        let (dir, name) = (self.dir(), self.any_name());
        let known = self.model.known(dir, &name);
        let found = self.mount.is_there(dir, &name).await;
        if known.version % 2 == 1 || self.model.known(dir, &name).version != known.version {
            return;
        }
        self.model.looked.set(self.model.looked.get() + 1);
        assert_eq!(found, known.is_there, "{}: {name}", self.own);
    }

    async fn list(&self) {
        let dir = self.dir();
        let before: BTreeMap<_, _> = self.model.names.borrow().clone();
        let listed = self.mount.list(dir).await;
        for name in listed.iter().filter(|name| !name.starts_with('.')) {
            let (known, is_there) =
                (self.model.known(dir, name), self.mount.is_there(dir, name).await);
            let was = before.get(&(dir, name.clone())).map_or(0, |known| known.version);
            if known.version % 2 == 0 && known.version == was {
                let still = self.model.known(dir, name).version == was;
                assert!(is_there || !still, "{}: {name} was listed", self.own);
            }
        }
    }

    async fn make_or_remove(&self) {
        let (dir, name) = (self.dir(), self.own_name());
        let known = self.model.known(dir, &name);
        self.model.set(dir, &name, known.is_there);
        match (known.is_there, below(3)) {
            (true, _) => {
                let gone = Operation::Unlink { name: name.as_bytes() };
                self.mount.ask(dir, gone).await.expect("there");
            }
            (false, 0) => {
                let target = b"nowhere";
                let link = Operation::Symlink { name: name.as_bytes(), target };
                self.mount.entry(dir, link).await.expect("fresh");
            }
            (false, _) => {
                self.mount.make(dir, &name).await;
            }
        }
        self.model.set(dir, &name, !known.is_there);
    }

    /// Gives an own name another name, or a second one; over what may be there.
    async fn rename(&self) {
        let (from, to) = ((self.dir(), self.own_name()), (self.dir(), self.own_name()));
        let (source, target) = (self.model.known(from.0, &from.1), self.model.known(to.0, &to.1));
        if from == to || !source.is_there {
            return;
        }
        self.model.set(from.0, &from.1, true);
        self.model.set(to.0, &to.1, target.is_there);
        if below(2) == 0 {
            let name = Operation::Lookup { name: from.1.as_bytes() };
            let inode = self.mount.entry(from.0, name).await.expect("there").inode;
            let link = Operation::Link { inode, new_name: to.1.as_bytes() };
            match self.mount.entry(to.0, link).await {
                Ok(_) => assert!(!target.is_there),
                Err(errno) => assert!(errno == Errno::EXIST && target.is_there),
            }
            self.model.set(from.0, &from.1, true);
        } else {
            let (name, new_name) = (from.1.as_bytes(), to.1.as_bytes());
            let flags = if target.is_there && below(2) == 0 { libc::RENAME_EXCHANGE } else { 0 };
            let rename = Operation::Rename { name, new_parent: to.0, new_name, flags };
            self.mount.ask(from.0, rename).await.expect("there");
            // Over another name of the same inode it does nothing.
            let is_left = self.mount.is_there(from.0, &from.1).await;
            assert!(is_left || flags == 0);
            assert!(!is_left || target.is_there);
            self.model.set(from.0, &from.1, is_left);
        }
        self.model.set(to.0, &to.1, true);
    }
}

/// Two programs on each of two mounts, in directories of both. How many names were looked for.
fn programs_agree(seed: u64, breaks: u64, restarts: bool) -> u64 {
    Reactor::simulated(seed).block_on(async move {
        let world = World::new().await;
        let mounts = [world.mount("a").await, world.mount("b").await];
        let model = Rc::<Model>::default();
        for mount in mounts.iter().cycle().take(6) {
            let number = model.dirs.borrow().len();
            let dir = mount.make_dir(ROOT, &number.to_string()).await.inode;
            model.dirs.borrow_mut().push((dir, mount.name));
        }
        world.network.break_one_in(breaks);
        let all = Rc::new(["a0", "a1", "b0", "b1"].map(str::to_owned).to_vec());
        let programs = mounts.iter().flat_map(|mount| {
            let program = |number| Program {
                mount: Rc::clone(mount),
                own: format!("{}{number}", mount.name),
                model: Rc::clone(&model),
                all: Rc::clone(&all),
            };
            [0, 1].map(program)
        });
        let running: Vec<_> = programs.map(|program| reactor::spawn(program.run(200))).collect();
        let node = Rc::clone(&world);
        let chaos = reactor::spawn(async move {
            if !restarts {
                return;
            }
            loop {
                reactor::sleep(Duration::from_millis(below(3000))).await;
                node.kill();
                reactor::sleep(Duration::from_millis(below(100))).await;
                node.start().await;
            }
        });
        for program in running {
            program.await.expect("ends");
        }
        chaos.abort();
        model.looked.get()
    })
}

#[test]
fn names_are_there_for_all_mounts_at_once() {
    let mut looked = 0;
    for seed in 0..40 {
        let (breaks, restarts) = (if seed % 4 == 1 { 50 } else { 0 }, seed % 4 == 2);
        looked += programs_agree(seed, breaks, restarts);
    }
    // Else nothing was tested.
    assert!(looked > 1000, "{looked}");
}

//! Requests that no kernel sends, as a guest may (virtio-fs): any operation with any numbers. They end, with whatever answer; a mount
//! beside it finds its file as it was.

use levada_base::ids::{BootVerifier, ObjectId, Seq, TargetId};
use levada_base::reactor::{self, Reactor};
use levada_base::units::GIB;
use levada_base::{Buf, Epoch, IoVec};
use levada_client::{Client, ClientConfig};
use levada_device::RamDevice;
use levada_kv::Store;
use levada_meta::{MetaService, ServeConfig};
use levada_mount::files::{Files, GuestCache};
use levada_mount::{Answer, Handler, Session};
use levada_object::{Ack, MemoryObjects, ObjectFuture, ObjectService, Objects, Space};
use levada_wire::channel::Listener;
use levada_wire::local::{LinkConfig, Network};
use levada_wire::object::{DataRanges, Hole, ObjectFault, ObjectStat, Stability};
use levada_wire::rpc::{Router, ServiceConfig, accept_all};
use std::rc::Rc;
use std::time::Duration;

const META: TargetId = TargetId(0);
const OBJECTS: TargetId = TargetId(1);
const STORE: levada_kv::Config = levada_kv::Config { log_bytes: 4 << 20, cache_bytes: 4 << 20 };
const REQUESTS: u64 = 10_000;
const SEEDS: u64 = 5;
/// In the time of the simulation. Only who waits for a lock may take longer.
const LIMIT: Duration = Duration::from_secs(300);

const CREATE: u32 = 35;
const INIT: u32 = 26;
const DESTROY: u32 = 38;
const SETLKW: u32 = 33;

/// Objects in memory, which has no room for one of that size, however few of its bytes are data.
struct Small(MemoryObjects);

const OBJECT_BYTES_MAX: u64 = 32 << 20;

impl Small {
    fn full_beyond(&self, bytes: u64) -> Option<ObjectFuture<'_, Ack>> {
        let full = || Box::pin(std::future::ready(Err(ObjectFault::Full))) as _;
        (bytes > OBJECT_BYTES_MAX).then(full)
    }
}

impl Objects for Small {
    fn verifier(&self) -> BootVerifier {
        self.0.verifier()
    }

    fn survived(&self, life: BootVerifier) -> Option<Seq> {
        self.0.survived(life)
    }

    fn write(
        &self,
        object: ObjectId,
        offset: u64,
        data: IoVec,
        stability: Stability,
    ) -> ObjectFuture<'_, Ack> {
        let full = self.full_beyond(offset);
        full.unwrap_or_else(|| self.0.write(object, offset, data, stability))
    }

    fn read(&self, object: ObjectId, offset: u64, bytes: u64) -> ObjectFuture<'_, IoVec> {
        self.0.read(object, offset, bytes)
    }

    fn commit(&self, upto: Seq) -> ObjectFuture<'_, Seq> {
        self.0.commit(upto)
    }

    fn truncate(&self, object: ObjectId, size: u64) -> ObjectFuture<'_, Ack> {
        self.full_beyond(size).unwrap_or_else(|| self.0.truncate(object, size))
    }

    fn punch(&self, object: ObjectId, hole: Hole, stability: Stability) -> ObjectFuture<'_, Ack> {
        let full = if hole.grows { self.full_beyond(hole.offset + hole.bytes) } else { None };
        full.unwrap_or_else(|| self.0.punch(object, hole, stability))
    }

    fn data_ranges(
        &self,
        object: ObjectId,
        offset: u64,
        ranges_max: u32,
    ) -> ObjectFuture<'_, DataRanges> {
        self.0.data_ranges(object, offset, ranges_max)
    }

    fn delete(&self, object: ObjectId) -> ObjectFuture<'_, Ack> {
        self.0.delete(object)
    }

    fn stat(&self, object: ObjectId) -> ObjectFuture<'_, Option<ObjectStat>> {
        self.0.stat(object)
    }

    fn space(&self) -> ObjectFuture<'_, Space> {
        self.0.space()
    }
}

pub(crate) async fn serve(network: &Network) {
    let fs = crate::file_system(1, 64 << 10);
    let device = Rc::new(RamDevice::new("meta", 64 << 20));
    let store = Store::create(device as _, Epoch(1), STORE).await.expect("fits");
    let config =
        ServeConfig { objects: vec![(OBJECTS, "node".to_owned())], ..ServeConfig::default() };
    let service = Rc::new(MetaService::create(store, fs, config).await.expect("made"));
    let router = Rc::new(Router::default());
    router.insert(META, Rc::clone(&service) as _);
    router.insert(OBJECTS, ObjectService::new(Rc::new(Small(MemoryObjects::new(GIB))) as _));
    let listener: Rc<dyn Listener> = Rc::new(network.listen("node"));
    reactor::spawn(accept_all(listener, router, ServiceConfig::default()));
    reactor::spawn(async move { service.run().await });
}

pub(crate) async fn mount(network: &Network, name: &'static str) -> Rc<Session<Files>> {
    mount_through(network, name, |files| files).await
}

/// The same, of what is shown of all files.
pub(crate) async fn mount_through<H: Handler>(
    network: &Network,
    name: &'static str,
    shown: impl FnOnce(Files) -> H,
) -> Rc<Session<H>> {
    let mut uuid = [0; 16];
    uuid[..name.len()].copy_from_slice(name.as_bytes());
    let config = ClientConfig::new(network.transport(name), "node", META, uuid);
    let config = ClientConfig { leases: true, ..config };
    let client = Client::connect(config).await.expect("connects");
    let files = Files::new(client).for_guest(GuestCache::None);
    let session = Rc::new(Session::new(shown(files), Files::limits()));
    let init = [7, 40, 1 << 20, u32::MAX, u32::MAX].map(u32::to_ne_bytes).concat();
    let answer = session.serve(&message(INIT, 1, 0, &init)).await.expect("an answer");
    assert_eq!(error_of(&answer), 0);
    session
}

pub(crate) fn message(opcode: u32, unique: u64, node: u64, arguments: &[u8]) -> Buf {
    let length = 40 + arguments.len() as u32;
    let head = [length.to_ne_bytes(), opcode.to_ne_bytes()].concat();
    let numbers = [unique.to_ne_bytes(), node.to_ne_bytes()].concat();
    Buf::copy_of(&[&head[..], &numbers, &[0; 16], arguments].concat())
}

pub(crate) fn body_of(answer: &Answer) -> Vec<u8> {
    answer.slices().iter().flat_map(|slice| slice.to_vec()).collect()
}

pub(crate) fn error_of(answer: &Answer) -> i32 {
    i32::from_ne_bytes(body_of(answer)[4..8].try_into().expect("four bytes"))
}

pub(crate) fn below(n: u64) -> u64 {
    reactor::random_u64() % n
}

/// Numbers that mean something, and those at the edges of what there is.
pub(crate) fn number() -> u64 {
    const EDGES: [u64; 12] = [
        u64::MAX,
        u64::MAX - 1,
        u64::MAX - 4096,
        i64::MAX as u64,
        i64::MAX as u64 - 1,
        i64::MAX as u64 + 1,
        u32::MAX as u64,
        1 << 20,
        1 << 40,
        1 << 62,
        65_536,
        4096,
    ];
    match below(3) {
        0 => EDGES[below(EDGES.len() as u64) as usize],
        1 => below(4),
        _ => below(100),
    }
}

/// Arguments of an operation on an open file, with the numbers where they belong: `fh` in the letter f, 64 bits in n, 32 in w, few
/// of them in s, and the node of a file in i.
pub(crate) fn shaped(opcode: u32, fh: u64) -> Option<Vec<u8>> {
    let shape = match opcode {
        4 => "wwfnnnnnwwwwwww",
        15 => "fnwwnww",
        16 => "fnswnss",
        28 | 44 => "fnwwnww",
        31..=33 => "fsnnsss",
        43 => "fnnss",
        46 => "fnss",
        47 | 53 => "fnifnnn",
        _ => return None,
    };
    let one = |letter| match letter {
        'f' => fh.to_ne_bytes().to_vec(),
        'n' => number().to_ne_bytes().to_vec(),
        'i' => (3 + fh).to_ne_bytes().to_vec(),
        's' => (below(4) as u32).to_ne_bytes().to_vec(),
        _ => (number() as u32).to_ne_bytes().to_vec(),
    };
    Some(shape.chars().flat_map(one).chain([9; 8]).collect())
}

/// Arguments of any operation: numbers of either size, and names.
pub(crate) fn arguments() -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..below(9) {
        match below(4) {
            0 => bytes.extend((number() as u32).to_ne_bytes()),
            _ => bytes.extend(number().to_ne_bytes()),
        }
    }
    for _ in 0..below(3) {
        bytes.extend([&b"a"[..], b"bb", b".", b"..", b"user.x", b"mine"][below(6) as usize]);
        bytes.push(0);
    }
    bytes.resize(bytes.len() + below(200) as usize, 7);
    bytes
}

async fn ask_anything() {
    let network = Network::new(LinkConfig { codec: true, ..LinkConfig::default() });
    serve(&network).await;
    let (guest, beside) = (mount(&network, "guest").await, mount(&network, "beside").await);
    let create = [libc::O_RDWR as u32, libc::S_IFREG | 0o600, 0, 0].map(u32::to_ne_bytes);
    let made = |name: &[u8]| message(CREATE, 2, 1, &[&create.concat(), name].concat());
    let own = beside.serve(&made(b"beside\0")).await.expect("an answer");
    assert_eq!(error_of(&own), 0);
    // Handles to begin with.
    for name in [&b"a\0"[..], b"bb\0", b"c\0"] {
        guest.serve(&made(name)).await.expect("an answer");
    }
    for unique in 10..10 + REQUESTS {
        let opcode = below(54) as u32;
        if opcode == INIT || opcode == DESTROY {
            continue;
        }
        // Not the file beside it, which it may change as well.
        let file = below(3);
        let shaped = shaped(opcode, file).filter(|_| below(4) > 0);
        let (node, arguments) = match shaped {
            Some(shaped) => (3 + file, shaped),
            None => ([1, 3, 4, 5, number().max(3)][below(5) as usize], arguments()),
        };
        let asked = message(opcode, unique, node, &arguments);
        let answering = guest.serve(&asked);
        let answered = reactor::timeout(LIMIT, answering).await;
        assert!(answered.is_ok() || opcode == SETLKW, "request {opcode} of {node}: {asked:?}");
    }
    let found = beside.serve(&message(1, 3, 1, b"beside\0")).await.expect("an answer");
    assert_eq!(error_of(&found), 0);
}

#[test]
fn requests_that_no_kernel_sends_end() {
    for seed in 0..SEEDS {
        Reactor::simulated(seed).block_on(ask_anything());
    }
}

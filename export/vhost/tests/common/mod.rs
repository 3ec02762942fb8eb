//! What the tests share: a volume that is served on a thread of its own, and memory to be shown to it.
#![allow(dead_code)] // Each test uses a part.

pub mod front_end;
pub mod fs_guest;
pub mod plain;

use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{Reactor, mailbox};
use levada_base::units::MIB;
use levada_device::{Device, RamDevice};
use levada_export_vhost::{Options, RingCores, Server};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use levada_volume::{ArrayVolume, Volume};
use std::cell::Cell;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// An array on members in memory.
pub async fn array(level: Level, width: usize, member_bytes: u64) -> RaidArray {
    let member = |number: usize| MemberSpec {
        device: Rc::new(RamDevice::new(&format!("m{number}"), member_bytes)) as Rc<dyn Device>,
        uuid: Uuid::from_u128(number as u128 + 1),
        name: format!("m{number}"),
        enclosure: 0,
    };
    let spec = ArraySpec {
        uuid: Uuid::from_u128(99),
        name: "served".into(),
        level,
        chunk_bytes: 64 << 10,
        block_bytes: None,
        journal_bytes: None,
        members: (0..width).map(member).collect(),
        spares: 0,
    };
    RaidArray::create(spec, Epoch(1)).await.expect("it can be")
}

/// A RAID 6 of 128 MiB.
pub async fn volume() -> Rc<ArrayVolume<RaidArray>> {
    Rc::new(ArrayVolume::new(array(Level::Raid6, 4, 80 * MIB).await))
}

thread_local!(static RING_CORES: Cell<usize> = const { Cell::new(0) });

/// Runs `test`, with so many cores for rings of all that it serves.
pub fn on_cores(count: usize, test: fn()) {
    RING_CORES.set(count);
    test();
}

/// Runs these tests once more, with rings on other cores than their volumes.
#[macro_export]
macro_rules! elsewhere {
    ($($test:ident),* $(,)?) => {
        mod elsewhere {
            $(
                #[test]
                fn $test() {
                    $crate::common::on_cores(2, super::$test);
                }
            )*
        }
    };
}

/// A server on a thread of its own; ends when dropped.
pub struct Served {
    pub socket: PathBuf,
    /// Another volume's, served by the same thread.
    pub neighbour: PathBuf,
    tell: Option<mailbox::Sender<Told>>,
    thread: Option<JoinHandle<()>>,
    /// Holds the socket.
    _dir: Option<tempfile::TempDir>,
}

pub enum Told {
    /// End in order.
    End,
    /// Drop everything where it stands, as a crash would.
    Crash,
    /// Call [`Server::resized`].
    Resized,
}

impl Served {
    /// Serves what `make` makes, at a socket of its own.
    pub fn begin<V, F>(make: impl FnOnce() -> F + Send + 'static) -> Self
    where
        V: Volume + 'static,
        F: Future<Output = Rc<V>>,
    {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("disk.sock");
        let mut served = Self::begin_at(&socket, make);
        served._dir = Some(dir);
        served
    }

    pub fn begin_at<V, F>(socket: &Path, make: impl FnOnce() -> F + Send + 'static) -> Self
    where
        V: Volume + 'static,
        F: Future<Output = Rc<V>>,
    {
        let (ready, is_ready) = mpsc::channel();
        let at = socket.to_owned();
        let neighbour = socket.with_extension("neighbour");
        let beside = neighbour.clone();
        let cores = RING_CORES.get();
        let serve = move || {
            Reactor::new().expect("an io_uring").block_on(async {
                let (tell, mut told) = mailbox::channel().expect("a mailbox");
                let cores = RingCores::start(cores).expect("cores for rings");
                let serial = "a serial number".into();
                let options = Options { serial, cores, ..Options::default() };
                let server =
                    Server::listen(&at, make().await, options.clone()).await.expect("it listens");
                let _neighbour =
                    Server::listen(&beside, volume().await, options).await.expect("it listens");
                ready.send(tell).expect("somebody waits");
                loop {
                    match told.recv().await {
                        Some(Told::Resized) => server.resized(),
                        Some(Told::End) | None => return server.end().await,
                        Some(Told::Crash) => return,
                    }
                }
            });
        };
        let thread = std::thread::spawn(serve);
        let tell = is_ready.recv().expect("the server begins");
        let socket = socket.to_owned();
        Self { socket, neighbour, tell: Some(tell), thread: Some(thread), _dir: None }
    }

    /// Runs `serve` for a socket and its neighbour, on a thread of its own; it ends when what it sends is told something or dropped.
    pub fn begin_with(
        serve: impl FnOnce(PathBuf, PathBuf, mpsc::Sender<mailbox::Sender<Told>>) + Send + 'static,
    ) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("files.sock");
        let neighbour = socket.with_extension("neighbour");
        let (ready, is_ready) = mpsc::channel();
        let (at, beside) = (socket.clone(), neighbour.clone());
        let thread = std::thread::spawn(move || serve(at, beside, ready));
        let tell = is_ready.recv().expect("the server begins");
        Self { socket, neighbour, tell: Some(tell), thread: Some(thread), _dir: Some(dir) }
    }

    pub fn tell(&self, what: Told) {
        drop(self.tell.as_ref().expect("it runs").send(what));
    }

    /// Ends the server as a crash of its process would.
    pub fn crash(mut self) {
        self.tell(Told::Crash);
        self.thread.take().expect("it runs").join().expect("no panic");
    }

    /// Ends the server; panics when that did.
    pub fn end(mut self) {
        self.tell = None;
        self.thread.take().expect("it runs").join().expect("no panic");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.tell = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

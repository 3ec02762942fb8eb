//! Volumes served over NBD, NVMe/TCP and vhost-user-blk by a reactor on a thread of its own, and fio as their client.

use anyhow::{Context, Result, anyhow, ensure};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, Reactor, mailbox};
use levada_export_nbd::{Address, Exports, Server};
use levada_export_nvmet::{Hosts, Keyring, NQN_PREFIX, Nqn, Opened, Subsystem, Target, serial_of};
use levada_export_vhost as vhost;
use levada_nvme::keyring::HostKeys;
use levada_nvme::tls::{Suite, TlsKey};
use levada_volume::Volume;
use std::collections::BTreeMap;
use std::future::ready;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a server polls for the next request before it sleeps, as `levada array serve` does.
const SPIN: Duration = Duration::from_micros(100);

/// Volumes by the names under which they are exported.
pub(crate) type Volumes = BTreeMap<String, Rc<dyn Volume>>;

struct Named(Volumes);

impl Exports for Named {
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>> {
        Box::pin(async { self.0.keys().cloned().collect() })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        Box::pin(async move { self.0.get(name).cloned() })
    }
}

/// Serves until dropped.
pub(crate) struct Served {
    dir: PathBuf,
    /// Where NVMe hosts find a subsystem for each.
    nvme: SocketAddr,
    /// The thread, as the system knows it.
    tid: i32,
    stop: Option<mailbox::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// How volumes are served.
#[derive(Clone, Copy)]
pub(crate) struct Serving {
    pub spin: Duration,
    pub network_cores: usize,
    pub ring_cores: usize,
}

/// As `levada array serve` does unless told otherwise.
impl Default for Serving {
    fn default() -> Self {
        Self { spin: SPIN, network_cores: 0, ring_cores: 0 }
    }
}

impl Served {
    /// Serves what `make` makes, on its thread, at sockets in `dir`.
    ///
    /// # Errors
    ///
    /// What `make` says, and a socket that cannot be had.
    pub(crate) fn start(
        dir: &Path,
        serving: Serving,
        make: impl AsyncFnOnce() -> Result<Volumes> + Send + 'static,
    ) -> Result<Self> {
        let (started, starting) = mpsc::channel();
        let at = dir.to_owned();
        let thread = std::thread::Builder::new().name("served".into()).spawn(move || {
            let reactor = Reactor::new()?;
            reactor.set_spin(serving.spin);
            reactor.block_on(async {
                reactor::carry_sockets(serving.network_cores)?;
                let rings = vhost::RingCores::start(serving.ring_cores)?;
                let volumes = make().await?;
                let mut disks = Vec::new();
                for (name, volume) in &volumes {
                    let cores = rings.clone();
                    let options = vhost::Options { cores, ..vhost::Options::default() };
                    let (at, volume) = (vhost_socket(&at, name), Rc::clone(volume));
                    disks.push(vhost::Server::listen(&at, volume, options).await?);
                }
                let target = nvme_target(&volumes)?;
                let nvme = target.listen(([127, 0, 0, 1], 0).into())?.address();
                let address = Address::Unix(nbd_socket(&at));
                let server = Server::listen(&address, Rc::new(Named(volumes)), None)?;
                let (stop, mut stopped) = mailbox::channel()?;
                // Nobody waits only when the starter has panicked.
                let tid = rustix::thread::gettid().as_raw_nonzero().get();
                let _ = started.send((stop, nvme, tid));
                stopped.recv().await;
                server.end().await;
                target.end().await;
                for disk in disks {
                    disk.end().await;
                }
                Ok(())
            })
        })?;
        if let Ok((stop, nvme, tid)) = starting.recv() {
            let dir = dir.to_owned();
            return Ok(Self { dir, nvme, tid, stop: Some(stop), thread: Some(thread) });
        }
        let ended = thread.join().map_err(|_| anyhow!("the server panicked"))?;
        ended.and(Err(anyhow!("the server ended"))).context("serving volumes")
    }

    pub(crate) fn uri(&self, name: &str) -> String {
        uri(&nbd_socket(&self.dir), name)
    }

    /// Where NVMe hosts find a volume.
    pub(crate) fn nvme(&self, name: &str) -> Result<(SocketAddr, Nqn)> {
        Ok((self.nvme, subsystem(name)?))
    }

    /// How long its thread has run so far.
    pub(crate) fn worked(&self) -> Result<Duration> {
        let path = format!("/proc/self/task/{}/schedstat", self.tid);
        let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let ns = stat.split(' ').next().context("empty")?;
        Ok(Duration::from_nanos(ns.parse().context(path)?))
    }

    /// Where virtual machines find a volume.
    pub(crate) fn vhost(&self, name: &str) -> PathBuf {
        vhost_socket(&self.dir, name)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("serving volumes failed: {error:#}");
        }
    }
}

fn subsystem(name: &str) -> Result<Nqn> {
    Ok(Nqn::new(format!("{NQN_PREFIX}:{name}"))?)
}

/// Hosts of the target: one in the clear, and one that comes within TLS.
pub(crate) const HOST: &str = "nqn.2014-08.org.example:bench";
pub(crate) const TLS_HOST: &str = "nqn.2014-08.org.example:bench-tls";

/// The key of the latter. It protects nothing.
pub(crate) fn tls_key() -> TlsKey {
    TlsKey::random(Suite::Aes128GcmSha256, &mut |key| key.fill(7))
}

fn hosts() -> Result<Hosts> {
    let host = Nqn::new(TLS_HOST)?;
    let keys = HostKeys { secrets: None, tls: Some(tls_key().retained(&host)) };
    Ok(Hosts::only([Nqn::new(HOST)?], Keyring::from([(host, keys)])))
}

fn nvme_target(volumes: &Volumes) -> Result<Target> {
    let target = Target::new();
    for (number, (name, volume)) in (1_u8..).zip(volumes) {
        let nqn = subsystem(name)?;
        let shown = Subsystem::new(nqn.clone(), serial_of(&nqn), hosts()?);
        let opened = Opened { volume: Rc::clone(volume), guid: [number; 16] };
        let open = move || -> LocalBoxFuture<'static, Option<Opened>> {
            Box::pin(ready(Some(opened.clone())))
        };
        shown.add(1, Rc::new(open));
        target.add(shown);
    }
    target.begin();
    Ok(target)
}

fn nbd_socket(dir: &Path) -> PathBuf {
    dir.join("levada.sock")
}

fn vhost_socket(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("disk-{name}.sock"))
}

/// What clients call the export of that name at a Unix socket.
pub(crate) fn uri(socket: &Path, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", socket.display())
}

/// A client that has opened the export `name` and asks nothing (NetworkBlockDevice, doc/proto.md, fixed newstyle negotiation).
///
/// # Errors
///
/// The server refuses.
pub(crate) fn idle_client(socket: &Path, name: &str) -> Result<UnixStream> {
    const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
    const FIXED_NEWSTYLE_NO_ZEROES: u32 = 3;
    const GO: u32 = 7;
    const ACKNOWLEDGED: u32 = 1;
    let mut stream = UnixStream::connect(socket)?;
    // Two magic numbers and the flags.
    stream.read_exact(&mut [0; 18])?;
    let length = name.len() as u32;
    let mut said = FIXED_NEWSTYLE_NO_ZEROES.to_be_bytes().to_vec();
    said.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    for word in [GO, 4 + length + 2, length] {
        said.extend_from_slice(&word.to_be_bytes());
    }
    said.extend_from_slice(name.as_bytes());
    // It wants to know nothing more of it.
    said.extend_from_slice(&0_u16.to_be_bytes());
    stream.write_all(&said)?;
    loop {
        // Magic, option, kind of the reply, bytes that follow.
        let mut head = [0; 20];
        stream.read_exact(&mut head)?;
        let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
        let (kind, bytes) = (word(12), word(16));
        stream.read_exact(&mut vec![0; bytes as usize])?;
        ensure!(kind >> 31 == 0, "the server refuses {name}: {kind:#x}");
        if kind == ACKNOWLEDGED {
            return Ok(stream);
        }
    }
}

/// fio with its own NBD client, which is one thread; it ends with this.
pub(crate) struct Fio(Option<Child>);

impl Fio {
    /// Starts a load on what is at `uri`; files that fio makes come into `dir`.
    ///
    /// # Errors
    ///
    /// There is no fio.
    pub(crate) fn start(dir: &Path, uri: &str, load: &[String]) -> Result<Self> {
        let process = Command::new("fio")
            .args(["--name=bench", "--ioengine=nbd", "--output-format=json"])
            .args(load)
            .arg(format!("--uri={uri}"))
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("fio, which Debian has under that name")?;
        Ok(Self(Some(process)))
    }

    /// What it says of its one job, once it has ended.
    ///
    /// # Errors
    ///
    /// The load failed.
    pub(crate) fn end(mut self) -> Result<serde_json::Value> {
        let process = self.0.take().context("it ran")?;
        let output = process.wait_with_output().context("fio")?;
        ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr).trim());
        // Notes of the program stand before it.
        let from = output.stdout.iter().position(|byte| *byte == b'{');
        let from = from.context("fio says nothing")?;
        let mut said: serde_json::Value = serde_json::from_slice(&output.stdout[from..])?;
        Ok(said["jobs"][0].take())
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

//! A mount: a process of its own that joins the client library to a FUSE mount.
//!
//! It lives on while the node is away: requests wait until the node is back. After a crash of
//! this process programs see ENOTCONN until the directory is mounted again; what they had
//! synced is safe, and the node settles the rest when the client's lease has run out.
//!
//! What always holds: programs never get to another cluster through it, whoever has its address: their
//! calls fail with ESTALE. And one process at a time serves a directory, also after its mount has left the
//! tree, and holds the directory's record locked meanwhile.

use anyhow::{Context, Result, bail};
use futures_util::future::{Either, select};
use levada_base::ids::{TargetId, Uuid};
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, ClientConfig};
use levada_mount::files::Files;
use levada_mount::session::Session;
use levada_mount::transport::dev_fuse::{FuseMount, MountOptions, Unmounted};
use levada_wire::same_host::HostTransport;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A killed process holds its lock until the kernel has ended its I/O.
const LET_GO_LIMIT: Duration = Duration::from_secs(5);
/// Time for a node that is up to answer a new mount: after a crash it first waits 30 s for mounts that held what was
/// not durable (docs/design/0010-metadata-tail.md).
const CONNECT_LIMIT: Duration = Duration::from_secs(50);
/// What the kernel reads ahead of a sequential reader.
const READ_AHEAD_BYTES: u32 = 8 << 20;
/// The one metadata target of this release.
const METADATA_TARGET: TargetId = TargetId(0);
/// How long the process polls for the next request before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// Where to mount what.
pub struct MountPlan {
    /// `host:port` of the metadata service.
    pub address: String,
    pub cluster: String,
    /// The only one that is mounted: another that answers at the address later is refused.
    pub cluster_uuid: Uuid,
    pub target: PathBuf,
    /// Held locked while the mount serves, removed when everything is durable.
    pub record: PathBuf,
}

/// Mounts, serves until unmounted or told to stop, and makes everything durable. `ready` is
/// called once programs can use the mount.
///
/// # Errors
///
/// When the service refuses, or the directory cannot be mounted on.
pub fn run(plan: &MountPlan, ready: impl FnOnce()) -> Result<()> {
    crate::log_to_stderr();
    let record = take(plan)?;
    let signals = Signals::new().context("cannot receive signals")?;
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.set_spin(SPIN);
    let result = reactor.block_on(serve(plan, &record, &signals, ready));
    // The note is only removed when nothing is left to be made durable.
    if result.is_ok() {
        std::fs::remove_file(&plan.record).context("cannot remove the note of the mount")?;
    }
    result
}

/// Makes the record of a mount and locks it. It tells nothing until the mount is made: what an earlier
/// process noted of itself is true no longer.
fn take(plan: &MountPlan) -> Result<File> {
    let record = &plan.record;
    let begun = Instant::now();
    loop {
        let note = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(record)
            .with_context(|| format!("cannot note the mount in {}", record.display()))?;
        match note.try_lock() {
            // The process that held it may have removed it meanwhile: then another may have made
            // and locked its own.
            Ok(()) if is_at(&note, record) => {
                note.set_len(0).context("cannot clear the note of an earlier mount")?;
                return Ok(note);
            }
            Ok(()) => {}
            Err(TryLockError::WouldBlock) if begun.elapsed() > LET_GO_LIMIT => {
                bail!("another process serves {} still", plan.target.display())
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
            Err(TryLockError::Error(error)) => {
                return Err(error).context("cannot lock the note of the mount");
            }
        }
    }
}

/// True when `file` is what `path` leads to.
#[must_use]
pub fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(open), Ok(there)) => (open.dev(), open.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// What a record tells: the process that serves, the device number of the mount's files, and the
/// cluster that they are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The process.
    pub pid: u32,
    /// Major and minor.
    pub device: (u32, u32),
    /// `None` in a record of an earlier release.
    pub cluster: Option<Uuid>,
}

impl Served {
    fn to_text(self) -> String {
        let (major, minor) = self.device;
        let cluster = self.cluster.map_or(String::new(), |cluster| format!(" {cluster}"));
        format!("{} {major}:{minor}{cluster}\n", self.pid)
    }

    /// Reads the text of a record; `None` for one of a mount that is not made yet.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let (pid, device) = (words.next()?, words.next()?);
        let (major, minor) = device.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let cluster = words.next().and_then(|word| word.parse().ok());
        Some(Self { pid: pid.parse().ok()?, device, cluster })
    }
}

/// Connects, unless told to stop. The client's own retries would wait for a node for ever, and be
/// deaf meanwhile.
async fn connect(config: ClientConfig, signals: &Signals, address: &str) -> Result<Client> {
    let (told, limit) = (pin!(signals.recv()), pin!(reactor::sleep(CONNECT_LIMIT)));
    match select(pin!(Client::connect(config)), select(told, limit)).await {
        Either::Left((client, _)) => client.context("cannot reach the cluster"),
        Either::Right((Either::Left(_), _)) => bail!("stopped before the cluster answered"),
        Either::Right((Either::Right(_), _)) => {
            bail!("the cluster does not answer at {address}; is it up?")
        }
    }
}

async fn serve(
    plan: &MountPlan,
    record: &File,
    signals: &Signals,
    ready: impl FnOnce(),
) -> Result<()> {
    let uuid = [reactor::random_u64().to_le_bytes(), reactor::random_u64().to_le_bytes()];
    let mut client_uuid = [0; 16];
    client_uuid.copy_from_slice(&uuid.concat());
    let transport = Rc::new(HostTransport::new());
    let config = ClientConfig {
        cluster: *plan.cluster_uuid.as_bytes(),
        leases: true,
        ..ClientConfig::new(transport, &plan.address, METADATA_TARGET, client_uuid)
    };
    let client = connect(config, signals, &plan.address).await?;
    let options = MountOptions {
        source: plan.cluster.clone(),
        // Whoever reaches the services says who a caller is (note 0006): that must not make them root here.
        no_set_id: true,
        no_devices: true,
        ..MountOptions::default()
    };
    let (mount, channel) = FuseMount::new(&plan.target, &options)?;
    if let Some(device) = mount.device() {
        let cluster = Some(plan.cluster_uuid);
        let served = Served { pid: std::process::id(), device, cluster }.to_text();
        record
            .set_len(0)
            .and_then(|()| { record }.write_all(served.as_bytes()))
            .context("cannot write the note of the mount")?;
    }
    let session = Rc::new(Session::new(Files::new(client.clone()), Files::limits()));
    let serving = levada_mount::transport::reactor::serve(channel, Rc::clone(&session));
    let serving = reactor::spawn(serving);
    // The kernel answers this once INIT is done, which the task above sees to.
    while session.terms().is_none() && !serving.is_finished() {
        reactor::sleep(Duration::from_millis(1)).await;
    }
    if let Err(error) = mount.set_read_ahead(READ_AHEAD_BYTES) {
        tracing::warn!(%error, "read-ahead stays at the kernel's default");
    }
    tracing::info!(target = %plan.target.display(), "mounted");
    ready();
    let mut mount = Some(mount);
    let mut serving = serving;
    loop {
        let told = pin!(signals.recv());
        match select(&mut serving, told).await {
            Either::Left((served, _)) => {
                served.transpose().context("the mount broke")?;
                break;
            }
            Either::Right((Ok(Signal::Hangup), _)) => {}
            Either::Right((told, _)) => {
                told.context("cannot receive signals")?;
                // One that was out of the tree before, or is told twice, has users that do not
                // end: they get ENOTCONN. What they have handed over becomes durable.
                let out = match mount.take() {
                    Some(mount) => mount.unmount()?,
                    None => Unmounted::Already,
                };
                if out == Unmounted::Already {
                    tracing::warn!(target = %plan.target.display(), "ends with files open");
                    break;
                }
            }
        }
    }
    client.shutdown().await.context("not everything could be made durable")?;
    tracing::info!(target = %plan.target.display(), "unmounted");
    Ok(())
}

/// The type that the mount table shows.
pub use levada_mount::transport::dev_fuse::FS_TYPE;

/// The directory `dir` as the mount table writes it, also when its server is gone.
///
/// # Errors
///
/// When the way there does not exist.
pub fn place(dir: &Path) -> Result<PathBuf> {
    Ok(levada_mount::transport::dev_fuse::place(dir)?)
}

/// The type of the file system that is mounted on `dir`, if one is. Asks no file system.
///
/// # Errors
///
/// When the system does not tell.
pub fn mounted_at(dir: &Path) -> Result<Option<String>> {
    levada_mount::transport::dev_fuse::mounted_at(dir).context("cannot read the mount table")
}

/// Unmounts whatever is on `dir`; when it is in use, with `lazy` as soon as it is not.
///
/// # Errors
///
/// When it is in use and not `lazy`, and when the system refuses.
pub fn unmount(dir: &Path, lazy: bool) -> Result<()> {
    levada_mount::transport::dev_fuse::unmount(dir, lazy)
        .with_context(|| format!("cannot unmount {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_says_nothing_of_an_earlier_process() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let plan = MountPlan {
            address: String::new(),
            cluster: String::new(),
            cluster_uuid: Uuid::from_u128(7),
            target: dir.path().join("mnt"),
            record: dir.path().join("record"),
        };
        let served = Served { pid: 4711, device: (0, 52), cluster: None };
        std::fs::write(&plan.record, served.to_text()).expect("written");
        let note = take(&plan).expect("nobody holds it");
        assert_eq!(std::fs::read(&plan.record).expect("read"), b"");
        (&note).write_all(b"4712").expect("written");
        assert_eq!(std::fs::read(&plan.record).expect("read"), b"4712");
    }

    #[test]
    fn a_record_reads_as_written() {
        for cluster in [None, Some(Uuid::from_u128(7))] {
            let served = Served { pid: 4711, device: (0, 52), cluster };
            assert_eq!(Served::parse(&served.to_text()), Some(served));
        }
        for text in ["", "4711", "4711 0", "x 0:52", "4711 0:"] {
            assert_eq!(Served::parse(text), None, "{text:?}");
        }
    }
}

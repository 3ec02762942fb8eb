//! A mount: a process of its own that joins the client library to a FUSE mount.
//!
//! It lives on while the node is away: requests wait until the node is back. After a crash of
//! this process programs see ENOTCONN until the directory is mounted again; what they had
//! synced is safe. Whoever mounts there again, or unmounts what is left, tells the metadata service that the client
//! is dead; where nobody does, the node settles the rest when the client's lease has run out.
//!
//! What always holds: programs never get to another cluster through it, whoever has its address: their
//! calls fail with ESTALE. And one process at a time serves a directory, also after its mount has left the
//! tree, and holds the directory's record locked meanwhile.

mod desk;
mod guard;
mod guest;
mod leave;
mod note;
mod shown;

use desk::{Clerk, Desk, Now};
use guard::Guard;

pub use guard::guard;
pub use guest::{GuestPlan, serve_guest};

pub use note::{Life, Served, dead_in, is_at};
pub use shown::{Part, View};

use crate::meters::CacheMeters;
use anyhow::{Context, Result, bail};
use futures_util::future::{Either, join_all, select, try_join};
use levada_base::ids::{TargetId, Uuid};
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, ClientConfig};
use levada_mount::files::Files;
use levada_mount::session::Session;
use levada_mount::transport::dev_fuse::{FuseMount, MountOptions, Unmounted};
use levada_mount::transport::reactor::unmount as unmount_mount;
use levada_wire::same_host::HostTransport;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Time for a node that is up to answer a new mount: after a crash it first waits 30 s for mounts that held what was
/// not durable (docs/design/0010-metadata-tail.md).
const CONNECT_LIMIT: Duration = Duration::from_secs(50);
/// Time for the metadata service to bury dead clients. What takes longer their leases may see to.
const BURY_LIMIT: Duration = Duration::from_secs(10);
/// What the kernel reads ahead of a sequential reader.
const READ_AHEAD_BYTES: u32 = 8 << 20;
/// The one metadata target of this release.
const METADATA_TARGET: TargetId = TargetId(0);
/// How long the process polls for the next request before it sleeps.
pub const SPIN: Duration = Duration::from_micros(100);

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
    /// Where it tells what it does: [`crate::state::StateDir::mount_socket`].
    pub socket: PathBuf,
    /// The command of this program that calls [`guard()`], with the number of the process as its argument.
    pub guard: &'static str,
}

/// Mounts, serves until unmounted or told to stop, and makes everything durable. `ready` is
/// called once programs can use the mount.
///
/// # Errors
///
/// When the service refuses, or the directory cannot be mounted on.
pub fn run(plan: &MountPlan, ready: impl FnOnce()) -> Result<()> {
    crate::log_to_stderr();
    let (record, dead) = note::take(&plan.record, &plan.target, "")?;
    let signals = Signals::new().context("cannot receive signals")?;
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.set_spin(SPIN);
    let result = reactor.block_on(serve(plan, (&record, &dead), &signals, ready));
    // The note is only removed when nothing is left to be made durable.
    if result.is_ok() {
        std::fs::remove_file(&plan.record).context("cannot remove the note of the mount")?;
    }
    result
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

/// Names a client that there was never before.
fn draw_uuid() -> Uuid {
    Uuid::from_u64_pair(reactor::random_u64(), reactor::random_u64())
}

fn client_config(address: &str, cluster: Uuid, uuid: Uuid) -> ClientConfig {
    let transport = Rc::new(HostTransport::new());
    ClientConfig {
        cluster: *cluster.as_bytes(),
        ..ClientConfig::new(transport, address, METADATA_TARGET, *uuid.as_bytes())
    }
}

/// Where `config` says; no client is needed for it, so that it works while a service awaits the dead.
async fn bury_at(config: &ClientConfig, dead: &[Uuid]) -> Result<()> {
    let buried = join_all(dead.iter().map(|dead| levada_client::bury(config, *dead.as_bytes())));
    let buried = reactor::timeout(BURY_LIMIT, buried).await;
    let buried = buried.context("the metadata service does not answer")?;
    Ok(buried.into_iter().collect::<Result<(), _>>()?)
}

/// Tells the metadata service at `address` that the clients of mounts whose processes are gone are dead, so that nobody
/// meets their locks any more.
///
/// # Errors
///
/// When it does not answer, or leaves them to their leases.
pub fn bury(address: &str, cluster: Uuid, dead: &[Uuid]) -> Result<()> {
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.block_on(async { bury_at(&client_config(address, cluster, draw_uuid()), dead).await })
}

async fn serve(
    plan: &MountPlan,
    (record, dead): (&File, &[Uuid]),
    signals: &Signals,
    ready: impl FnOnce(),
) -> Result<()> {
    let client_uuid = draw_uuid();
    let config = client_config(&plan.address, plan.cluster_uuid, client_uuid);
    let config = ClientConfig { leases: true, ..config };
    let undertaker = client_config(&plan.address, plan.cluster_uuid, draw_uuid());
    // At the same time: a service that awaits the dead one lets nobody else connect.
    let burying = async { Ok(bury_at(&undertaker, dead).await) };
    let (client, buried) = try_join(connect(config, signals, &plan.address), burying).await?;
    // Before any program can meet their locks.
    if let Err(error) = buried {
        tracing::warn!(%error, "locks of the mount before stay until its lease ends");
    }
    let options = MountOptions {
        source: plan.cluster.clone(),
        // Whoever reaches the services says who a caller is (note 0006): that must not make them root here.
        no_set_id: true,
        no_devices: true,
        ..MountOptions::default()
    };
    let guard = Guard::start(plan.guard);
    let (mount, channel) = FuseMount::new(&plan.target, &options)?;
    if let Some(device) = mount.device() {
        if let Err(error) = guard.and_then(|guard| guard.guards(device.1)) {
            tracing::warn!(%error, "programs may hang when the process of this mount is killed");
        }
        let cluster = Some(plan.cluster_uuid);
        let life = Life::own(client_uuid);
        let served = Served { pid: std::process::id(), device, cluster, life };
        note::write(record, &served.to_text()).context("cannot write the note of the mount")?;
    }
    let session = Rc::new(Session::new(
        Files::new(client.clone()).mounted_at(plan.target.clone()),
        Files::limits(),
    ));
    let serving = levada_mount::transport::reactor::serve(channel, Rc::clone(&session));
    let serving = reactor::spawn(serving);
    // The kernel answers this once INIT is done, which the task above sees to.
    while session.terms().is_none() && !serving.is_finished() {
        reactor::sleep(Duration::from_millis(1)).await;
    }
    if let Err(error) = mount.set_read_ahead(READ_AHEAD_BYTES) {
        tracing::warn!(%error, "read-ahead stays at the kernel's default");
    }
    let clerk = Clerk {
        meters: Rc::clone(session.meters()),
        now: Box::new({
            let client = client.clone();
            move || Now { cache: CacheMeters::of(client.asked()), has_guest: false }
        }),
        dir: plan.target.clone(),
    };
    let _desk = Desk::open(&plan.socket, clerk)
        .inspect_err(|error| tracing::warn!(%error, "`levada top` does not see this mount"));
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
                    Some(mount) => unmount_mount(mount).await?,
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

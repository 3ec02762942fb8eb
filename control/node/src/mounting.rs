//! A mount: a process of its own that joins the client library to a FUSE mount.
//!
//! It lives on while the node is away: requests wait until the node is back. After a crash of
//! this process programs see ENOTCONN until the directory is mounted again; what they had
//! synced is safe, and the node settles the rest when the client's lease has run out.

use anyhow::{Context, Result};
use levada_base::ids::TargetId;
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, ClientConfig};
use levada_mount::files::Files;
use levada_mount::session::Session;
use levada_mount::transport::dev_fuse::{FuseMount, MountOptions};
use levada_wire::same_host::HostTransport;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

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
    let record = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&plan.record)
        .with_context(|| format!("cannot note the mount in {}", plan.record.display()))?;
    record.lock().context("cannot lock the note of the mount")?;
    let signals = Signals::new().context("cannot receive signals")?;
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.set_spin(SPIN);
    let result = reactor.block_on(serve(plan, &signals, ready));
    // The note is only removed when nothing is left to be made durable.
    if result.is_ok() {
        std::fs::remove_file(&plan.record).context("cannot remove the note of the mount")?;
    }
    result
}

async fn serve(plan: &MountPlan, signals: &Signals, ready: impl FnOnce()) -> Result<()> {
    let uuid = [reactor::random_u64().to_le_bytes(), reactor::random_u64().to_le_bytes()];
    let mut client_uuid = [0; 16];
    client_uuid.copy_from_slice(&uuid.concat());
    let config = ClientConfig::new(
        Rc::new(HostTransport::new()),
        &plan.address,
        METADATA_TARGET,
        client_uuid,
    );
    let client = Client::connect(config).await.context("cannot reach the cluster")?;
    let options = MountOptions { source: plan.cluster.clone(), ..MountOptions::default() };
    let (mount, channel) = FuseMount::new(&plan.target, &options)?;
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
        let told = std::pin::pin!(signals.recv());
        match futures_util::future::select(&mut serving, told).await {
            futures_util::future::Either::Left((served, _)) => {
                served.transpose().context("the mount broke")?;
                break;
            }
            futures_util::future::Either::Right((Ok(Signal::Hangup), _)) => {}
            futures_util::future::Either::Right((told, _)) => {
                told.context("cannot receive signals")?;
                // Once: a second signal while unmounting changes nothing.
                if let Some(mount) = mount.take() {
                    mount.unmount()?;
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

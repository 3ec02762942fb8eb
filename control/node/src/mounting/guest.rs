//! A mount at a socket: the same process as of a mount on a directory, whose kernel is that of a virtual machine (virtio-fs).
//!
//! A guest is shown all of the file system, or one directory of it, which is looked up each time that a guest mounts it.
//!
//! Each time that a guest mounts it, it has a client of its own at the services, and with that its own open files and locks; when
//! it unmounts, starts anew or is gone, that client makes everything durable and takes leave.
//!
//! After a crash of this process requests of the guest are not answered any more: its machine has to be started anew. Who
//! serves the socket next tells the metadata service that the client is dead.

use super::desk::{Clerk, Desk, Now};
use super::leave::Leaves;
use super::shown::{Shown, View};
use super::{CONNECT_LIMIT, Life, SPIN, Served, bury_at, client_config, connect, draw_uuid, note};
use crate::meters::CacheMeters;
use anyhow::{Context, Result};
use futures_util::future::try_join;
use levada_base::ids::Uuid;
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{self, Instant, Reactor};
use levada_client::{Client, ClientConfig};
use levada_export_vhost::{FileSystem, FsOptions, FsServer};
use levada_mount::meters::Meters;
use levada_mount::session::Session;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// In the note of a mount: it is in no tree.
const NO_DEVICE: (u32, u32) = (0, 0);
/// Between two lines in the log about guests that come and go.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Where virtual machines find what.
#[derive(Clone)]
pub struct GuestPlan {
    /// `host:port` of the metadata service.
    pub address: String,
    /// The only one that is served: another that answers at the address later is refused.
    pub cluster_uuid: Uuid,
    /// The socket.
    pub at: PathBuf,
    pub view: View,
    /// As [`super::MountPlan::record`].
    pub record: PathBuf,
    /// As [`super::MountPlan::socket`].
    pub desk: PathBuf,
}

/// Serves the file system at a socket until told to stop, and makes everything durable. `ready` is called once a machine
/// monitor can connect.
///
/// # Errors
///
/// When the service refuses, or the socket cannot be had.
pub fn serve_guest(plan: &GuestPlan, ready: impl FnOnce()) -> Result<()> {
    crate::log_to_stderr();
    let (record, dead) = note::take(&plan.record, &plan.at, &plan.view.to_lines())?;
    let signals = Signals::new().context("cannot receive signals")?;
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.set_spin(SPIN);
    let remove =
        || std::fs::remove_file(&plan.record).context("cannot remove the note of the mount");
    reactor.block_on(async {
        let mounts = match begin(plan, (record, &dead), &signals).await {
            Ok(mounts) => mounts,
            Err(error) => {
                // Nothing has been served, and nobody is left to be buried.
                return dead.is_empty().then(remove).unwrap_or(Ok(())).and(Err(error));
            }
        };
        serve(plan, mounts, &signals, ready).await?;
        remove()
    })
}

/// Connects, and looks whether there is what is to be shown.
async fn begin(
    plan: &GuestPlan,
    (record, dead): (File, &[Uuid]),
    signals: &Signals,
) -> Result<Rc<Mounts>> {
    let undertaker = client_config(&plan.address, plan.cluster_uuid, draw_uuid());
    let uuid = draw_uuid();
    // At the same time: a service that awaits the dead one lets nobody else connect.
    let burying = async { Ok(bury_at(&undertaker, dead).await) };
    let connecting = connect(guest_config(plan, uuid), signals, &plan.address);
    // The first guest's: so it is told now when the cluster cannot be reached.
    let (client, buried) = try_join(connecting, burying).await?;
    if let Err(error) = buried {
        tracing::warn!(%error, "locks of the mount before stay until its lease ends");
    }
    let leaves = Leaves::new(&plan.address, plan.cluster_uuid);
    if let Err(error) = Shown::of(&plan.view, &client, &leaves).await {
        client.shutdown().await?;
        return Err(error);
    }
    let mounts = Rc::new(Mounts {
        plan: plan.clone(),
        record,
        leaves,
        spare: RefCell::new(Some(client)),
        mounted: RefCell::default(),
        meters: Rc::default(),
        asked_before: Cell::default(),
        told_at: Cell::default(),
        failed: Cell::default(),
    });
    mounts.note(uuid).context("cannot write the note of the mount")?;
    Ok(mounts)
}

async fn serve(
    plan: &GuestPlan,
    mounts: Rc<Mounts>,
    signals: &Signals,
    ready: impl FnOnce(),
) -> Result<()> {
    let options = FsOptions::new(plan.view.tag);
    let server = FsServer::listen(&plan.at, Rc::clone(&mounts), options).await?;
    let told = Rc::clone(&mounts);
    let clerk = Clerk {
        meters: Rc::clone(&mounts.meters),
        now: Box::new(move || told.now()),
        dir: plan.at.clone(),
    };
    let _desk = Desk::open(&plan.desk, clerk)
        .inspect_err(|error| tracing::warn!(%error, "`levada top` does not see this mount"));
    tracing::info!(at = %plan.at.display(), "serves virtual machines");
    ready();
    while signals.recv().await.context("cannot receive signals")? == Signal::Hangup {}
    mounts.leaves.end();
    server.end().await;
    let spare = mounts.spare.take();
    if let Some(client) = spare {
        mounts.leave(&client).await;
    }
    tracing::info!(at = %plan.at.display(), "ended");
    match mounts.failed.take() {
        Some(error) => Err(error).context("not everything could be made durable"),
        None => Ok(()),
    }
}

fn guest_config(plan: &GuestPlan, uuid: Uuid) -> ClientConfig {
    let config = client_config(&plan.address, plan.cluster_uuid, uuid);
    ClientConfig { leases: true, ..config }
}

/// The sessions of the guests of one socket.
struct Mounts {
    plan: GuestPlan,
    record: File,
    leaves: Leaves,
    /// One that is connected, for who mounts next.
    spare: RefCell<Option<Client>>,
    mounted: RefCell<Option<Client>>,
    meters: Rc<Meters>,
    /// Of the caches of clients that are gone.
    asked_before: Cell<CacheMeters>,
    /// When something was told of guests that come and go.
    told_at: Cell<Option<Instant>>,
    /// Why something that guests wrote may be lost.
    failed: Cell<Option<levada_client::Error>>,
}

impl Mounts {
    /// Should this process be killed, that client is dead.
    fn note(&self, client: Uuid) -> std::io::Result<()> {
        let cluster = Some(self.plan.cluster_uuid);
        let (pid, device) = (std::process::id(), NO_DEVICE);
        let served = Served { pid, device, cluster, life: Life::own(client) };
        note::write(&self.record, &(served.to_text() + &self.plan.view.to_lines()))
    }

    async fn connect(&self) -> Option<Client> {
        let uuid = draw_uuid();
        let connecting = Client::connect(guest_config(&self.plan, uuid));
        let client = match reactor::timeout(CONNECT_LIMIT, connecting).await {
            Ok(Ok(client)) => client,
            Ok(Err(error)) => {
                self.cannot_mount(&error.to_string());
                return None;
            }
            Err(_) => {
                self.cannot_mount("the cluster does not answer");
                return None;
            }
        };
        if let Err(error) = self.note(uuid) {
            tracing::warn!(%error, "should this process be killed, its locks stay until its lease ends");
        }
        Some(client)
    }

    /// What a client shows; `None`: it is not there.
    async fn shown(&self, client: &Client) -> Option<Shown> {
        let shown = Shown::of(&self.plan.view, client, &self.leaves);
        match reactor::timeout(CONNECT_LIMIT, shown).await {
            Ok(Ok(shown)) => Some(shown),
            Ok(Err(error)) => {
                self.cannot_mount(&format!("{error:#}"));
                None
            }
            Err(_) => {
                self.cannot_mount("the cluster does not answer");
                None
            }
        }
    }

    fn cannot_mount(&self, why: &str) {
        if self.may_tell() {
            tracing::error!(why, "a guest cannot mount");
        }
    }

    /// A guest may mount again and again, and its lines go to the log of all mounts.
    fn may_tell(&self) -> bool {
        let now = reactor::now();
        let is_early = self.told_at.get().is_some_and(|told| now - told < TELL_EVERY);
        if !is_early {
            self.told_at.set(Some(now));
        }
        !is_early
    }

    async fn leave(&self, client: &Client) {
        if let Err(error) = client.shutdown().await {
            tracing::error!(%error, "not all that a guest wrote could be made durable");
            self.failed.set(Some(error));
        }
    }

    fn now(&self) -> Now {
        let mounted = self.mounted.borrow();
        let before = self.asked_before.get();
        let now = mounted.as_ref().map(|client| CacheMeters::of(client.asked()));
        let cache = now.unwrap_or_default().and(before);
        Now { cache, has_guest: mounted.is_some() }
    }
}

impl FileSystem for Mounts {
    type Handler = Shown;

    async fn begin(&self) -> Option<Rc<Session<Shown>>> {
        let spare = self.spare.take();
        let client = match spare {
            Some(client) => client,
            None => self.connect().await?,
        };
        let Some(shown) = self.shown(&client).await else {
            // For the next attempt.
            *self.spare.borrow_mut() = Some(client);
            return None;
        };
        *self.mounted.borrow_mut() = Some(client);
        let limits = shown.limits();
        let session = Session::new(shown, limits).counting_in(Rc::clone(&self.meters));
        if self.may_tell() {
            tracing::info!("a guest mounts");
        }
        Some(Rc::new(session))
    }

    fn hurry(&self, is_gone: bool) {
        self.leaves.hurry(is_gone);
    }

    async fn end(&self, _: Rc<Session<Shown>>) {
        // There is one session at a time.
        let Some(client) = self.mounted.take() else { return };
        self.asked_before.set(CacheMeters::of(client.asked()).and(self.asked_before.get()));
        self.leaves.refuse();
        self.leave(&client).await;
        if self.may_tell() {
            tracing::info!("what a guest had mounted has ended");
        }
    }
}

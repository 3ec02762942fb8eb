//! The node's process: lock, drives, arrays, targets, services, until told to stop.

use crate::arrays::{self, ClusterArray};
use crate::assembly::{self, Cluster, Service, StartOptions, Tuning};
use crate::control::{ControlReply, ControlRequest};
use crate::damage;
use crate::drives::MayOverwrite;
use crate::exports::Exporter;
use crate::file_drives::FileDrives;
use crate::operator::Operator;
use crate::state::{Phase, StateDir};
use crate::turns::{TURNS, TenantTurns};
use crate::volumes::Volumes;
use anyhow::{Context, Result, bail};
use futures_util::future::{Either, LocalBoxFuture, join, select};
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::sync::Notify;
use levada_client::{Client, ClientConfig, housekeeper, placement};
use levada_desk::{self as desk, Clerk};
use levada_device::BlockError;
use levada_export_nvmet::Loss;
use levada_export_vhost::RingCores;
use levada_spec::Loaded;
use levada_wire::channel::ChannelError;
use levada_wire::frame::Class;
use levada_wire::rpc::{ServiceConfig, accept_all};
use levada_wire::same_host::{HostListener, HostTransport};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// Where the services of a cluster without hosts listen.
const LOOPBACK: &str = "127.0.0.1:0";
/// How long a busy node polls before it sleeps; an idle one does not poll. A program that makes one request
/// after another is back within this: then neither side pays for a wake-up.
const SPIN: Duration = Duration::from_micros(100);
/// The kernel ends the I/O of a killed process, and only then closes what it had open.
const LET_GO_LIMIT: Duration = Duration::from_secs(5);
const LISTEN_AGAIN_AFTER: Duration = Duration::from_millis(10);
const EADDRINUSE: i32 = 98;
/// Chores that the metadata service does not tell of: sessions of clients that fell silent.
const LOOK_FOR_CHORES_EVERY: Duration = Duration::from_secs(5);
/// Deletes that come one after the other are done together.
const GATHER_CHORES: Duration = Duration::from_millis(5);
/// Time that requests under way are given at the end.
const DRAIN: Duration = Duration::from_millis(200);

/// What a node is told by the one who starts it.
pub struct NodeOptions {
    pub loaded: Loaded,
    /// The cluster file, read again when drives are replaced or added.
    pub file: PathBuf,
    pub state: StateDir,
    pub may_overwrite: MayOverwrite,
    /// As [`StartOptions::without_majority`].
    pub without_majority: bool,
    /// Targets with damage that the node in whose place this one starts could not repair.
    pub beyond_repair: Vec<String>,
}

/// How often the control socket is looked for.
const LOOK_FOR_DESK_EVERY: Duration = Duration::from_secs(1);

/// How a node ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was told to.
    Stopped,
    /// The store of a target met bytes that are wrong. All copies were compared, and a new start
    /// serves again; clients wait for it. It is to be told of the targets that could not be
    /// repaired.
    Damaged { beyond_repair: Vec<String> },
}

/// Says what the process does on standard error, which is the node's log.
pub fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LEVADA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // A second call in one process (tests) keeps the first.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        // A line that finds no room in the log is lost; to complain of that would end the process.
        .log_internal_errors(false)
        .try_init();
}

/// Runs a node until it is told to stop by signal or by [`ControlRequest::Down`], or must be started
/// anew.
///
/// # Errors
///
/// Why it could not start. A cluster that was up ends without error.
pub fn run(options: NodeOptions, progress: &dyn Fn(&str), ready: impl FnOnce()) -> Result<Ended> {
    log_to_stderr();
    let _lock = options.state.lock()?;
    options.state.set_phase(Phase::Starting)?;
    let signals = Signals::new().context("cannot receive signals")?;
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.set_spin(SPIN);
    reactor.block_on(serve(options, &signals, progress, ready))
}

/// Binds the services' address: the one of the cluster file, or the one used last time. A node
/// that was killed a moment ago may still hold it.
async fn listen(loaded: &Loaded, state: &StateDir) -> Result<(HostListener, String)> {
    let wanted = loaded.cluster.hosts.first().and_then(|host| host.addresses.first().cloned());
    let kept = state.address().filter(|_| wanted.is_none());
    let hint = match &kept {
        Some(_) => format!(
            ", where mounts of this cluster expect it; without mounts, remove {} to let it choose another",
            state.address_file().display()
        ),
        None => String::new(),
    };
    let address = wanted.or(kept).unwrap_or_else(|| LOOPBACK.to_owned());
    let patient_until = reactor::now() + LET_GO_LIMIT;
    let listener = loop {
        match HostListener::bind(&address) {
            Err(ChannelError::Io { errno: EADDRINUSE }) if reactor::now() < patient_until => {
                reactor::sleep(LISTEN_AGAIN_AFTER).await;
            }
            bound => break bound.with_context(|| format!("cannot listen at {address}{hint}"))?,
        }
    };
    let bound = listener.local_addr().to_string();
    Ok((listener, bound))
}

async fn serve(
    options: NodeOptions,
    signals: &Signals,
    progress: &dyn Fn(&str),
    ready: impl FnOnce(),
) -> Result<Ended> {
    let NodeOptions { loaded, file, state, may_overwrite, without_majority, beyond_repair } =
        options;
    reactor::carry_sockets(loaded.cluster.network_cores)
        .context("cannot start the threads of `network_cores` in [cluster]")?;
    let rings = RingCores::start(loaded.cluster.ring_cores)
        .context("cannot start the threads of `ring_cores` in [cluster]")?;
    let source = Rc::new(FileDrives::new(loaded.clone(), state.clone()));
    let starting = async {
        let (listener, address) = listen(&loaded, &state).await?;
        let start = StartOptions {
            may_overwrite,
            without_majority,
            tuning: Tuning::default(),
            address: address.clone(),
            progress,
        };
        let cluster = assembly::start(loaded.cluster.clone(), &*source, start).await?;
        anyhow::Ok((listener, address, cluster))
    };
    // It may wait for drives that are away, and take them from another server afterwards.
    let mut told = std::pin::pin!(told_by_signal(signals));
    let (listener, address, cluster) = match select(std::pin::pin!(starting), told.as_mut()).await {
        Either::Left((started, _)) => started?,
        Either::Right((told, _)) => {
            told?;
            bail!("told to stop while it was starting");
        }
    };
    cluster.beyond_repair.told(beyond_repair);
    let cluster = Rc::new(cluster);
    state.set_address(&address)?;
    state.set_cluster(cluster.drives.cluster)?;
    state.set_left_open(&[
        "the node ended before it had closed everything; the next start puts that right".into(),
    ])?;
    // Before anything changes: what a rebuild of an index that did not come to its end had kept is not true any more
    // once its log goes on.
    for target in &cluster.targets {
        if let Service::Objects { .. } = &target.service {
            state.forget_staged(&target.entry.name())?;
        }
    }
    tracing::info!(cluster = cluster.file.name, address, epoch = %cluster.drives.epoch, "serving");

    // What ends with the services, before the floors below are closed.
    let services = Group::new();
    let changed = Rc::new(Notify::default());
    let config =
        ServiceConfig { cluster: *cluster.drives.cluster.as_bytes(), ..ServiceConfig::default() };
    let router = Rc::clone(&cluster.router) as Rc<_>;
    let clients = Group::new();
    reactor::spawn_in(&clients, accept_all(Rc::new(listener), router, config));
    let keeper = keep_house(Rc::clone(&cluster), address.clone());
    reactor::spawn_in(&services, keeper);
    for target in &cluster.targets {
        if let Service::Metadata { service, .. } = &target.service {
            let service = Rc::clone(service);
            reactor::spawn_in(&services, async move { service.run().await });
        }
    }
    let looked_after = cluster.metadata_first();
    let events = Rc::clone(&changed);
    let pace = arrays::pace_of(&cluster.file.rebuild);
    reactor::spawn_in(&services, async move { arrays::look_after(looked_after, events, pace) });

    let stop = Rc::new(Notify::default());
    let volumes = Volumes::new(Rc::clone(&cluster), &address, Some(state.clone()));
    cluster.router.insert(TURNS, TenantTurns::new(&volumes));
    reactor::spawn_in(&services, Rc::clone(&volumes).bury_last());
    let exports = Exporter::new(&loaded, Rc::clone(&volumes), rings);
    reactor::spawn_in(&services, Rc::clone(&exports).run());
    let shut_out = when_shut_out(Rc::clone(&cluster), Rc::clone(&changed));
    let taken = when_taken(Rc::clone(&cluster), Rc::clone(&changed));
    let (hung_up, lost) = (clients.clone(), Rc::clone(&exports));
    reactor::spawn_in(&services, async move {
        let stopped = shut_out.await;
        hung_up.kill();
        lost.lose(stopped);
        if stopped == Loss::Stopped {
            taken.await;
            lost.lose(Loss::Elsewhere);
        }
    });
    let operator =
        Operator::new(Rc::clone(&cluster), source, file, address, changed, Rc::clone(&volumes));
    operator.show_exports(Rc::clone(&exports));
    let resumed = Rc::clone(&operator);
    // Of this group, which ends before the arrays are closed.
    reactor::spawn_in(&services, async move { resumed.resume_scrub().await });
    reactor::spawn_in(&services, Rc::clone(&operator).measure());
    reactor::spawn_in(&services, Rc::clone(&operator).keep_spares());
    reactor::spawn_in(&services, Rc::clone(&operator).watch_health());
    reactor::spawn_in(&services, Rc::clone(&operator).heed_owners());
    let front = Rc::new(FrontDesk { operator, stop: Rc::clone(&stop), stopping: Cell::new(false) });
    open_desk(&state.control_socket(), Rc::clone(&front), &services)?;
    let keeper = keep_desk(state.control_socket(), Rc::clone(&front), services.clone());
    reactor::spawn_in(&services, keeper);
    if let Err(error) = state.set_phase(Phase::Serving) {
        tracing::warn!(%error, "that the node serves cannot be noted");
    }
    ready();

    // Also while copies are compared, which takes its time.
    let told = std::pin::pin!(told_to_stop(told, &front));
    let worth_a_start = std::pin::pin!(damage::worth_a_start(&cluster));
    let ended = match select(told, worth_a_start).await {
        Either::Left((told, _)) => {
            told?;
            Ended::Stopped
        }
        Either::Right(((), _)) => Ended::Damaged { beyond_repair: cluster.beyond_repair.targets() },
    };
    tracing::info!(?ended, "stopping");
    let phase = match ended {
        Ended::Stopped => Phase::Ending,
        // Told to stop meanwhile, it hears of that when it starts.
        Ended::Damaged { .. } => Phase::Starting,
    };
    if let Err(error) = state.set_phase(phase) {
        tracing::warn!(%error, "that the node ends cannot be noted");
    }
    // Who is shut out has nobody to wait for: nothing that is under way can end.
    if ended == Ended::Stopped && !exports.is_lost() {
        exports.end().await;
        volumes.close().await;
        reactor::sleep(DRAIN).await;
    }
    clients.kill();
    services.kill();
    let left_open = cluster.stop().await;
    tracing::info!("stopped");
    // Before whoever waits for the end of this process.
    if let Err(error) = state.set_left_open(&left_open) {
        tracing::warn!(%error, "how the node ended cannot be noted");
    }
    // The program that asked may look for the socket again.
    let _ = std::fs::remove_file(state.control_socket());
    Ok(ended)
}

/// Returns when another server has taken an array, or may have. What needs no drive, as locks and what is in memory, would be answered all the
/// same, beside that server.
async fn when_shut_out(cluster: Rc<Cluster>, changed: Rc<Notify>) -> Loss {
    let is_shut_out = || {
        if is_taken(&cluster) {
            tracing::error!("another server has the drives: clients are answered no more");
            return Some(Loss::Elsewhere);
        }
        let shared = cluster.arrays.iter().filter(|it| it.array.is_shared());
        let stopped =
            |it: &Rc<ClusterArray>| Some((it.spec.name.clone(), it.array.status().stopped?));
        // Who cannot reach its drives does not hear who has them.
        let (array, error) = shared.filter_map(stopped).next()?;
        tracing::error!(
            array, %error,
            "an array has stopped, and another server may have its drives: clients are answered no more"
        );
        Some(Loss::Stopped)
    };
    changed.until(is_shut_out).await
}

/// Returns when another server has taken an array.
async fn when_taken(cluster: Rc<Cluster>, changed: Rc<Notify>) {
    changed.until(|| is_taken(&cluster).then_some(())).await;
}

fn is_taken(cluster: &Cluster) -> bool {
    let is_fenced =
        |stopped: Option<BlockError>| matches!(stopped, Some(BlockError::Fenced { .. }));
    cluster.arrays.iter().any(|array| is_fenced(array.array.status().stopped))
}

/// Returns when the node is told to stop.
async fn told_to_stop(
    told: impl Future<Output = Result<()>> + Unpin,
    front: &FrontDesk,
) -> Result<()> {
    let stopped = std::pin::pin!(front.stop.until(|| front.stopping.get().then_some(())));
    match select(told, stopped).await {
        Either::Left((told, _)) => told,
        Either::Right(((), _)) => Ok(()),
    }
}

/// Returns when the process is told to stop.
async fn told_by_signal(signals: &Signals) -> Result<()> {
    while signals.recv().await.context("cannot receive signals")? == Signal::Hangup {}
    Ok(())
}

fn open_desk(socket: &Path, clerk: Rc<FrontDesk>, services: &Group) -> Result<()> {
    desk::open(socket, clerk, services)
        .with_context(|| format!("cannot open the control socket {}", socket.display()))
}

/// Opens the desk anew when its socket was removed: nobody would find this node any more.
async fn keep_desk(socket: PathBuf, front: Rc<FrontDesk>, services: Group) {
    loop {
        reactor::sleep(LOOK_FOR_DESK_EVERY).await;
        // Without its directory there is no place for it.
        let is_gone = !socket.exists() && socket.parent().is_some_and(Path::exists);
        if is_gone && let Err(error) = open_desk(&socket, Rc::clone(&front), &services) {
            tracing::warn!(%error, "the control socket was removed");
        }
    }
}

/// Does what the services leave to a client: destroys the objects of deleted files, settles
/// the sessions of clients that are gone, says where new files should go.
async fn keep_house(cluster: Rc<Cluster>, address: String) {
    let Some(target) = cluster.metadata_target() else { return };
    let service = cluster.targets.iter().find_map(|target| match &target.service {
        Service::Metadata { service, .. } => Some(service),
        Service::Objects { .. } | Service::Stopped { .. } => None,
    });
    let Some(service) = service else { return };
    let uuid = *cluster.table.fs.as_bytes();
    let mut config = ClientConfig::new(Rc::new(HostTransport::new()), &address, target, uuid);
    config.class = Class::Background;
    config.cluster = *cluster.drives.cluster.as_bytes();
    match Client::connect(config).await {
        Ok(client) => {
            let sweeping = sweep(&client, service.chores_changed());
            let placing = placement::watch(&client, |avoided| service.avoid(avoided));
            join(sweeping, placing).await;
        }
        Err(error) => tracing::error!(%error, "no housekeeping"),
    }
}

async fn sweep(client: &Client, chores: Rc<Notify>) {
    loop {
        let told = std::pin::pin!(chores.changed());
        let begun = reactor::now();
        let swept = housekeeper::do_chores(client).await;
        let took = begun.elapsed();
        if let Err(error) = &swept {
            tracing::warn!(%error, "chores failed");
        }
        select(told, std::pin::pin!(reactor::sleep(LOOK_FOR_CHORES_EVERY))).await;
        // Very many may be left until a target is back; going through them at each delete is no use.
        let is_left = swept.is_ok_and(|swept| swept.left > 0);
        reactor::sleep(if is_left { GATHER_CHORES.max(took) } else { GATHER_CHORES }).await;
    }
}

/// Answers at the desk; keeps the order to stop for the main loop.
struct FrontDesk {
    operator: Rc<Operator>,
    stop: Rc<Notify>,
    stopping: Cell<bool>,
}

impl Clerk for FrontDesk {
    type Request = ControlRequest;
    type Reply = ControlReply;

    fn refuse(&self, why: String) -> ControlReply {
        ControlReply::Failed { why }
    }

    fn answer(&self, request: ControlRequest) -> LocalBoxFuture<'_, ControlReply> {
        Box::pin(async move {
            match request {
                ControlRequest::Down => {
                    self.stopping.set(true);
                    self.stop.notify_all();
                    ControlReply::Done
                }
                other => self.operator.answer(other).await,
            }
        })
    }
}

//! One controller: an admin queue and I/O queues of a subsystem, at one address.
//!
//! What always holds:
//! - The queues of a controller end together. When one does, for whatever reason, nothing more is sent on the others, so that the target
//!   hears no sign of life any more. But for a shutdown in order: by the admin queue the target says when it is done.
//! - What a controller says of itself is checked before anything is sent that depends on it.

use super::exchange::COMMANDS_MAX;
use super::host::HostId;
use super::notices::{Notices, listen};
use super::options::{Network, Options};
use super::queue::{Queue, QueueError, Request, Terms, Unanswered};
use futures_util::future::{join_all, select_all};
use levada_base::reactor;
use levada_base::stream::ByteStream;
use levada_base::{Buf, BufMut, IoVec, IoVecMut};
use levada_nvme::authentication::{Names, NotAuthenticated};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, Capabilities, Configuration, Connect, ConnectData, ControllerState, Property,
    PropertyAccess, SUBSYSTEM_AT, Shutdown,
};
use levada_nvme::identify::{ControllerIdentity, Events, IDENTIFY_BYTES, Identify};
use levada_nvme::log::{ADMIN_QUEUE_ENTRIES, GetLogPage};
use levada_nvme::{
    AdminOpcode, Command, Completion, DISCOVERY_NQN, Feature, Nqn, NqnError, Status,
};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// A target that looks after its hosts less often holds changes back for minutes, once a path is lost. The largest unit that is known is SPDK's, 10 s.
const KEEP_ALIVE_UNIT_MAX: Duration = Duration::from_secs(60);
/// A look at whether the controller is ready, or has shut down.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long a shutdown in order may take before the connections are closed all the same.
const SHUTDOWN: Duration = Duration::from_secs(1);
/// I/O queues that are asked for because of cores, at most: each is a connection, of every drive over every path, and those of different
/// drives are spread over the cores anyway.
const QUEUES_FOR_CORES_MAX: usize = 8;

/// Why there is no controller.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("cannot connect: {0}")]
    Io(#[from] io::Error),
    /// A name has no address, or the resolver is out of reach.
    #[error("cannot look up its address: {0}")]
    NoAddress(io::Error),
    #[error("no answer within {} ms", limit.as_millis())]
    Silent { limit: Duration },
    /// Each answer came in time, and there is no end of them.
    #[error("it takes longer than {} s {stage}", limit.as_secs())]
    Endless { stage: Stage, limit: Duration },
    /// What it was lost with may still be carried out for twice as long.
    #[error(
        "the target looks after its hosts every {} s only, and may take that long to notice that one is gone; at most {} s are supported",
        unit.as_secs(), KEEP_ALIVE_UNIT_MAX.as_secs()
    )]
    KeepAliveUnit { unit: Duration },
    /// The connection ended while it was set up.
    #[error("the connection ended: {why}")]
    Ended { why: String },
    /// A command that every controller has failed.
    #[error("the target refuses {command}: {status}")]
    Refused { command: &'static str, status: Status },
    #[error(
        "there is no subsystem {subsystem} at this address; `levada enclosure find` lists those that there are"
    )]
    NoSubsystem { subsystem: Nqn },
    /// It does not know the host, or not this way: without TLS, with another key of it.
    #[error(
        "the target does not let host {host} in ({status}): it may know others (host=NQN), or want TLS (keys=FILE)"
    )]
    NotAdmitted { host: Nqn, status: Status },
    #[error(
        "the target wants hosts to prove who they are: it takes a name and its secret (host=NQN, keys=FILE)"
    )]
    AuthenticationRequired,
    /// Not the TLS that comes before everything else, whose key both sides have been given.
    #[error(
        "the target wants to agree on a key of TLS by authentication, which is not possible here"
    )]
    SecureChannelRequired,
    #[error(transparent)]
    NotAuthenticated(#[from] NotAuthenticated),
    /// Linux's target ends the connection of a host that it does not believe, at times before its answer has left.
    #[error(
        "the target hangs up on the proof of who the host is ({why}): it may know another secret of it (host=NQN, keys=FILE)"
    )]
    HungUpOnProof { why: String },
    #[error("the controller has failed, or does not become ready")]
    NotReady,
    #[error("the target answers for subsystem {found}")]
    OtherSubsystem { found: Nqn },
    #[error("it is a discovery controller, which has no namespaces")]
    Discovery,
    #[error("namespace {namespace} is not there")]
    Absent { namespace: u32 },
    #[error("the subsystem has no name: {0}")]
    Nameless(#[from] NqnError),
    /// What it says of itself cannot be.
    #[error("the controller contradicts itself: {what}")]
    Contradiction { what: &'static str },
    /// It is not what it was, or not the same as on other paths.
    #[error("{what}")]
    Different { what: String },
    /// It has to wait.
    #[error("{what}")]
    Unproven { what: &'static str },
}

impl ConnectError {
    /// The target speaks TLS, and has another key or none for this host.
    pub(super) fn is_of_keys(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Before it has said anything.
    pub(super) fn is_hang_up(&self) -> bool {
        use io::ErrorKind::{ConnectionReset, UnexpectedEof};
        matches!(self, Self::Io(error) if matches!(error.kind(), ConnectionReset | UnexpectedEof))
    }
}

/// What takes many answers, each of which may come in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Connecting,
    /// At a namespace, and the ways to it.
    Looking,
    ListingSubsystems,
    /// Into a subsystem that is listed.
    LookingInside,
    LookingIntoAll,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connecting => "to connect",
            Self::Looking => "to look at the namespace",
            Self::ListingSubsystems => "to list its subsystems",
            Self::LookingInside => "to look into it",
            Self::LookingIntoAll => "to look into all that is listed",
        })
    }
}

/// See the module.
pub(crate) struct Controller<S> {
    pub identity: ControllerIdentity,
    /// As whom it is connected.
    pub host_id: HostId,
    admin: Rc<Queue<S>>,
    queues: Vec<Rc<Queue<S>>>,
    /// Of an admin command.
    limit: Duration,
    /// The target is told that the host goes, and ends I/O queues by itself.
    is_shutting_down: Rc<Cell<bool>>,
    pub notices: Rc<Notices>,
}

/// Queues while they are made: closed again when that fails.
struct Making<S: ByteStream + 'static>(RefCell<Vec<Rc<Queue<S>>>>);

/// The admin queue, by which everything else is asked.
pub(super) struct Admin<'a, S> {
    queue: &'a Rc<Queue<S>>,
    limit: Duration,
}

impl<S: ByteStream + 'static> Admin<'_, S> {
    pub async fn ask(
        &self,
        what: &'static str,
        command: Command,
        from: IoVec,
        into: IoVecMut,
    ) -> Result<(Completion, IoVecMut), ConnectError> {
        match self.answered(command, from, into).await? {
            (completion, into) if completion.status.is_success() => Ok((completion, into)),
            (Completion { status, .. }, _) => Err(ConnectError::Refused { command: what, status }),
        }
    }

    /// The completion, whatever its status.
    async fn answered(
        &self,
        command: Command,
        from: IoVec,
        into: IoVecMut,
    ) -> Result<(Completion, IoVecMut), ConnectError> {
        let request = Request { from, into, ..Request::new(command, self.limit) };
        let answered = self.queue.run(request).await;
        match answered.outcome {
            Ok(completion) => Ok((completion, answered.into)),
            Err(Unanswered::Damaged) => {
                Err(ConnectError::Ended { why: Unanswered::Damaged.to_string() })
            }
            Err(Unanswered::Lost) => Err(ended(self.queue)),
        }
    }

    async fn tell(&self, what: &'static str, command: Command) -> Result<u64, ConnectError> {
        let asked = self.ask(what, command, IoVec::new(), IoVecMut::new()).await;
        asked.map(|(completion, _)| completion.result)
    }

    async fn fetch(
        &self,
        what: &'static str,
        command: Command,
        bytes: usize,
    ) -> Result<Buf, ConnectError> {
        let into = BufMut::for_overwrite(bytes).into_vec();
        let (_, mut into) = self.ask(what, command, IoVec::new(), into).await?;
        Ok(into.remove(0).freeze())
    }

    async fn get(&self, property: Property) -> Result<u64, ConnectError> {
        self.tell("Property Get", PropertyAccess::get(property, 0)).await
    }

    async fn set(&self, property: Property, value: u64) -> Result<(), ConnectError> {
        self.tell("Property Set", PropertyAccess::set(property, value, 0)).await.map(drop)
    }

    /// Enables the controller, and waits until it is ready.
    async fn enable(&self) -> Result<Capabilities, ConnectError> {
        let capabilities = Capabilities::parse(self.get(Property::Capabilities).await?);
        let enabled = u64::from(Configuration::ENABLED.0);
        self.set(Property::Configuration, enabled).await?;
        // In units of 500 ms; 0 is none that can be kept.
        let limit = Duration::from_millis(500) * u32::from(capabilities.timeout.max(1));
        let begun = reactor::now();
        loop {
            let state = ControllerState::parse(self.get(Property::Status).await? as u32);
            if state.has_failed {
                return Err(ConnectError::NotReady);
            }
            if state.is_ready {
                return Ok(capabilities);
            }
            if begun.elapsed() > limit {
                return Err(ConnectError::NotReady);
            }
            reactor::sleep(LOOK_EVERY).await;
        }
    }
}

/// Why the queue is no longer there.
fn ended<S: ByteStream + 'static>(queue: &Queue<S>) -> ConnectError {
    match queue.end().as_deref() {
        Some(QueueError::Silent { limit }) => ConnectError::Silent { limit: *limit },
        Some(reason) => ConnectError::Ended { why: reason.to_string() },
        None => ConnectError::Ended { why: Unanswered::Lost.to_string() },
    }
}

/// What Connect was answered with; why the target does not want the host `names`, or not there.
fn connected(answered: Completion, names: &Names) -> Result<u64, ConnectError> {
    let Completion { status, result, .. } = answered;
    let Names { host, subsystem } = names.clone();
    match status {
        status if status.is_success() => Ok(result),
        status
            if status.is(Status::CONNECT_INVALID_PARAMETERS)
                && u64::from(result as u32) == Connect::wrong_at(SUBSYSTEM_AT, true) =>
        {
            Err(ConnectError::NoSubsystem { subsystem })
        }
        status if status.is(Status::CONNECT_INVALID_HOST) => {
            Err(ConnectError::NotAdmitted { host, status })
        }
        status => Err(ConnectError::Refused { command: "Connect", status }),
    }
}

impl<S: ByteStream + 'static> Making<S> {
    async fn queue<N: Network<Stream = S>>(
        &self,
        network: &N,
        address: SocketAddr,
        terms: Terms,
        limit: Duration,
    ) -> Result<Rc<Queue<S>>, ConnectError> {
        let opening = async {
            let stream = network.connect(address).await?;
            Queue::open(stream, terms).await.map_err(|error| match error {
                QueueError::Io(error) => ConnectError::Io(error),
                error => ConnectError::Ended { why: error.to_string() },
            })
        };
        let opened = reactor::timeout(limit, opening).await;
        let queue = opened.unwrap_or(Err(ConnectError::Silent { limit }))?;
        self.0.borrow_mut().push(Rc::clone(&queue));
        Ok(queue)
    }
}

impl<S: ByteStream + 'static> Drop for Making<S> {
    fn drop(&mut self) {
        for queue in self.0.take() {
            reactor::spawn(async move { queue.close(QueueError::Closed).await });
        }
    }
}

impl<S: ByteStream + 'static> Controller<S> {
    /// Connects a new controller of `subsystem`, with I/O queues unless that is the one of discovery, as `host_id`.
    pub async fn connect<N: Network<Stream = S>>(
        network: &N,
        address: SocketAddr,
        subsystem: &Nqn,
        options: &Options,
        host_id: HostId,
    ) -> Result<Rc<Self>, ConnectError> {
        let limit = options.timing.connect;
        let making = Making(RefCell::default());
        let terms = Terms {
            digests: options.digests,
            commands: usize::from(ADMIN_QUEUE_ENTRIES) - 1,
            in_capsule_bytes: 0,
            // Nothing on this queue changes blocks.
            settle: Duration::ZERO,
            host_id,
        };
        let data = |controller| ConnectData {
            host_id,
            controller,
            subsystem: subsystem.clone(),
            host: options.host.nqn.clone(),
        };
        let names = Names { host: options.host.nqn.clone(), subsystem: subsystem.clone() };
        // Discovery is for everybody.
        let is_discovery = subsystem.as_str() == DISCOVERY_NQN;
        let secrets = options.host.secrets.as_ref().filter(|_| !is_discovery);
        let connect = async |queue: &Rc<Queue<S>>, connect: Connect, data: ConnectData| {
            let admin = Admin { queue, limit };
            let from = Buf::copy_of(&data.to_bytes()).into_vec();
            let (completion, _) = admin.answered(connect.command(0), from, IoVecMut::new()).await?;
            let connected = connected(completion, &names)?;
            admin.prove(&names, secrets, connected).await?;
            Ok::<_, ConnectError>(connected as u16)
        };
        let queue = making.queue(network, address, terms, limit).await?;
        let keep_alive_ms = options.timing.keep_alive.as_millis() as u32;
        let first = Connect {
            format: 0,
            queue: 0,
            queue_entries_less_one: ADMIN_QUEUE_ENTRIES - 1,
            is_without_flow_control: false,
            keep_alive_ms,
        };
        let id = connect(&queue, first, data(ANY_CONTROLLER)).await?;
        let admin = Admin { queue: &queue, limit };
        let capabilities = admin.enable().await?;
        let command = Command::new(AdminOpcode::Identify as u8, 0, 0)
            .with_dword(10, Identify::Controller as u32);
        let page = admin.fetch("Identify", command, IDENTIFY_BYTES).await?;
        let page = page.first_chunk().expect("as many were fetched");
        let identity = ControllerIdentity::parse(page)?;
        let unit = Duration::from_millis(identity.keep_alive_unit_ms.into());
        if unit > KEEP_ALIVE_UNIT_MAX {
            return Err(ConnectError::KeepAliveUnit { unit });
        }
        // Older ones do not say what they are: it goes by the name that was asked for.
        if identity.is_discovery && !is_discovery {
            return Err(ConnectError::Discovery);
        }
        if identity.subsystem != *subsystem && !is_discovery {
            return Err(ConnectError::OtherSubsystem { found: identity.subsystem });
        }
        let mut queues = Vec::new();
        if !is_discovery {
            let wanted = options.queues.max(network.cores().min(QUEUES_FOR_CORES_MAX) as u16);
            let granted = Self::ask_for_queues(&admin, wanted.max(1)).await?;
            let entries_max = match identity.queue_entries_max {
                0 => u16::MAX,
                entries => entries,
            };
            let entries = options
                .queue_entries
                .min(capabilities.queue_entries_max_less_one.saturating_add(1))
                .min(entries_max)
                .clamp(2, COMMANDS_MAX as u16 + 1);
            for number in 1..=granted {
                let commands = usize::from(entries) - 1;
                let in_capsule_bytes = identity.in_capsule_bytes;
                let settle = options.timing.settle(identity.keep_alive_unit_ms);
                let terms = Terms { commands, in_capsule_bytes, settle, ..terms };
                let queue = match making.queue(network, address, terms, limit).await {
                    // As when this process may have no more connections: fewer do as well.
                    Err(error) if !queues.is_empty() => {
                        tracing::warn!(%address, %error, queues = queues.len(), "no more queues");
                        break;
                    }
                    queue => queue?,
                };
                let next = Connect {
                    format: 0,
                    queue: number,
                    queue_entries_less_one: entries - 1,
                    is_without_flow_control: true,
                    keep_alive_ms: 0,
                };
                connect(&queue, next, data(id)).await?;
                queues.push(queue);
            }
        }
        let wanted = Events::NAMESPACES | Events::ANA | Events::DISCOVERY;
        let events = identity.events & wanted;
        let warnings = if is_discovery { Events::empty() } else { Events::WARNINGS };
        let has_events = Self::ask_for_events(&admin, events, warnings).await?;
        making.0.take();
        let controller = Rc::new(Self {
            identity,
            host_id,
            admin: queue,
            queues,
            limit: options.timing.command,
            is_shutting_down: Rc::default(),
            notices: Rc::default(),
        });
        controller.attend(options, has_events);
        Ok(controller)
    }

    /// How many I/O queues there are, of those that are wanted.
    async fn ask_for_queues(admin: &Admin<'_, S>, wanted: u16) -> Result<u16, ConnectError> {
        let asked = u32::from(wanted - 1);
        let command = set_feature(Feature::NumberOfQueues, asked | asked << 16);
        let granted = admin.tell("Set Features (queues)", command).await?;
        let (submission, completion) = (granted as u16, (granted >> 16) as u16);
        Ok(submission.min(completion).saturating_add(1).min(wanted))
    }

    /// Asks to be told of `events`, and of `warnings` where the target has them: Linux's refuses to be asked for those. True: something is told.
    async fn ask_for_events(
        admin: &Admin<'_, S>,
        events: Events,
        warnings: Events,
    ) -> Result<bool, ConnectError> {
        let ask = async |events: Events| {
            let command = set_feature(Feature::AsynchronousEvents, events.bits());
            admin.tell("Set Features (events)", command).await.map(|_| true)
        };
        if !warnings.is_empty() {
            match ask(events | warnings).await {
                Err(ConnectError::Refused { .. }) => {}
                asked => return asked,
            }
        }
        if events.is_empty() { Ok(false) } else { ask(events).await }
    }

    /// Starts what goes on for as long as the controller is there.
    fn attend(self: &Rc<Self>, options: &Options, has_events: bool) {
        let all: Vec<_> = self.all().cloned().collect();
        let (admin, is_shutting_down) = (Rc::clone(&self.admin), Rc::clone(&self.is_shutting_down));
        reactor::spawn(async move {
            let over: Vec<_> = all.iter().map(|queue| Box::pin(queue.over())).collect();
            select_all(over).await;
            if is_shutting_down.get() {
                // By it the target says when everything is durable.
                admin.over().await;
            }
            join_all(all.iter().map(|queue| queue.close(QueueError::Closed))).await;
        });
        let (admin, subsystem) = (Rc::clone(&self.admin), self.identity.subsystem.clone());
        let timing = options.timing;
        if !timing.keep_alive.is_zero() {
            reactor::spawn(async move {
                while admin.end().is_none() {
                    let command = Command::new(AdminOpcode::KeepAlive as u8, 0, 0);
                    let answered = admin.run(Request::new(command, timing.keep_alive_limit)).await;
                    if let Ok(answer) = answered.outcome
                        && !answer.status.is_success()
                    {
                        let status = answer.status;
                        tracing::warn!(%subsystem, %status, "a target refuses to be kept alive, and is left");
                        admin.close(QueueError::Closed).await;
                    }
                    reactor::sleep(timing.keep_alive_every).await;
                }
            });
        }
        if has_events {
            let (admin, notices) = (Rc::clone(&self.admin), Rc::clone(&self.notices));
            let limit = timing.keep_alive_limit;
            reactor::spawn(listen(admin, Rc::downgrade(self), notices, limit));
        }
    }

    fn all(&self) -> impl Iterator<Item = &Rc<Queue<S>>> {
        std::iter::once(&self.admin).chain(&self.queues)
    }

    fn admin(&self) -> Admin<'_, S> {
        Admin { queue: &self.admin, limit: self.limit }
    }

    /// All I/O queues.
    pub fn queues(&self) -> &[Rc<Queue<S>>] {
        &self.queues
    }

    /// The I/O queue with the fewest commands.
    pub fn queue(&self) -> Option<&Rc<Queue<S>>> {
        self.queues.iter().min_by_key(|queue| queue.busy())
    }

    /// False once one of the queues has ended.
    pub fn is_open(&self) -> bool {
        self.all().all(|queue| queue.end().is_none())
    }

    /// Waits until all queues are over: the first reason.
    pub async fn over(&self) -> String {
        let first = select_all(self.all().map(|queue| Box::pin(queue.over()))).await.0;
        join_all(self.all().map(|queue| queue.over())).await;
        first.to_string()
    }

    pub async fn identify(
        &self,
        what: Identify,
        namespace: u32,
    ) -> Result<Box<[u8; IDENTIFY_BYTES]>, ConnectError> {
        let command =
            Command::new(AdminOpcode::Identify as u8, 0, namespace).with_dword(10, what as u32);
        let page = self.admin().fetch("Identify", command, IDENTIFY_BYTES).await?;
        Ok(Box::new(*page.first_chunk().expect("as many were fetched")))
    }

    /// `bytes` of a log page, whole doublewords.
    pub async fn log_page(
        &self,
        page: u8,
        namespace: u32,
        at: u64,
        bytes: usize,
    ) -> Result<Buf, ConnectError> {
        let get = GetLogPage { page, specific: 0, keeps_event: false, at, bytes: bytes as u64 };
        self.admin().fetch("Get Log Page", get.command(0, namespace), bytes).await
    }

    /// Ends the controller at once.
    pub async fn close(&self) {
        join_all(self.all().map(|queue| queue.close(QueueError::Closed))).await;
    }

    /// Ends the controller in order: what it has under way is finished, and it knows that the host is gone.
    pub async fn shut_down(&self) {
        let admin = self.admin();
        self.is_shutting_down.set(true);
        let shutting_down = async {
            let configuration = u64::from(Configuration::ENABLED.shut_down().0);
            admin.set(Property::Configuration, configuration).await?;
            let state = async || {
                let status = admin.get(Property::Status).await? as u32;
                Ok::<_, ConnectError>(ControllerState::parse(status))
            };
            while state().await?.shutdown != Shutdown::Complete {
                reactor::sleep(LOOK_EVERY).await;
            }
            Ok::<_, ConnectError>(())
        };
        // One that does not answer is closed all the same.
        let _ = reactor::timeout(SHUTDOWN, shutting_down).await;
        self.close().await;
    }
}

fn set_feature(feature: Feature, value: u32) -> Command {
    Command::new(AdminOpcode::SetFeatures as u8, 0, 0)
        .with_dword(10, feature as u32)
        .with_dword(11, value)
}

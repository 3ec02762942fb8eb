//! A controller: what one host has of one subsystem, over however many queues.
//!
//! What always holds:
//! - It lives as long as its admin queue, and its other queues end with it.
//! - A host that says nothing for its keep alive timeout is given up, and its queues end.

use crate::claims::Claims;
use crate::errors::Errors;
use crate::namespace::{Namespace, Opened};
use crate::notices::Notices;
use crate::port::Port;
use crate::recall::Recalls;
use crate::reservations::HostId;
use crate::subsystem::{Loss, Subsystem};
use futures_util::future::{join_all, select};
use levada_base::reactor;
use levada_base::sync::{Notify, Once, Permit, Semaphore};
use levada_nvme::fabrics::{Configuration, ControllerState, Shutdown};
use levada_nvme::identify::{ABORTS_MAX, Events, WARNING_KELVIN};
use levada_nvme::log::{AnaState, Event, Health, Warnings};
use levada_nvme::{Nqn, Status};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// I/O queues of a controller.
pub(crate) const IO_QUEUES_MAX: u16 = 64;
/// Between looks whether a host is silent.
const KEEP_ALIVE_TICK: Duration = Duration::from_millis(500);
/// A host that only discovers, and asked for no limit (Fabrics, 4.4: two minutes).
const DISCOVERY_LIMIT: Duration = Duration::from_secs(120);
/// One that asked for a longer limit than this gets this one.
const DISCOVERY_SILENCE_MAX: Duration = Duration::from_secs(600);
/// Of temperature, until the host says otherwise.
const THRESHOLDS: [u16; 2] = [WARNING_KELVIN, 0];

/// See the module.
pub(crate) struct Controller {
    id: u16,
    /// `None`: of discovery.
    subsystem: Option<Subsystem>,
    host: Nqn,
    host_id: HostId,
    /// The host has proved who it is, if it has to.
    is_known: Cell<bool>,
    port: Rc<Port>,
    configuration: Cell<Configuration>,
    state: Cell<ControllerState>,
    gone: Once,
    /// It has to give way to others.
    evicted: Once,
    /// I/O queues end: their controller was reset.
    reset: RefCell<Rc<Once>>,
    /// Also the admin queue, which is 0.
    queues: RefCell<BTreeMap<u16, Rc<Recalls>>>,
    /// I/O queues that are there, or have ended and have something under way still.
    io_queues_busy: Cell<usize>,
    io_queue_done: Notify,
    /// Those that are under way.
    aborts: Rc<Semaphore>,
    keep_alive_ms: Cell<u32>,
    /// Something came since the timer looked.
    is_heard: Cell<bool>,
    pub notices: Notices,
    pub errors: Errors,
    /// What Set Features left here, for Get Features.
    pub features: RefCell<BTreeMap<u8, u32>>,
    /// Kelvin from which on the host wants to be warned of a drive, upwards and downwards.
    thresholds: Cell<[u16; 2]>,
    /// Namespaces whose drives were beyond them when the host was told last.
    beyond: RefCell<BTreeSet<u32>>,
    /// Volumes stay open while the host is there.
    attached: RefCell<BTreeMap<u32, Rc<Attached>>>,
    /// Of namespaces that were attached before a reset: what queues that it ends have under way may go on.
    detached: RefCell<Vec<Claims>>,
    /// What the host was granted last (Set Features, Number of Queues).
    queues_granted: Cell<Option<u32>>,
    /// How commands were answered because something failed, each once.
    failures: RefCell<Vec<Status>>,
}

/// A namespace and its volume, as long as a host has it.
pub(crate) struct Attached {
    pub namespace: Rc<Namespace>,
    pub opened: Rc<Opened>,
    pub block_bytes: u64,
}

/// A queue of a controller, for as long as it is connected, and something that came by it is carried out.
pub(crate) struct Queue {
    pub controller: Rc<Controller>,
    /// 0: the admin queue.
    pub id: u16,
    /// Ends the queue.
    pub reset: Rc<Once>,
    /// Its commands that can be told to end. Also tells it from a later one with its number.
    pub recalls: Rc<Recalls>,
    /// Changes may come by it: it is an I/O queue whose host is known.
    is_counted: Cell<bool>,
}

/// Another queue has its number.
#[derive(Debug)]
pub(crate) struct Taken;

impl Queue {
    /// Nothing is received any more: the admin queue takes its controller with it, the number of another can be used again.
    pub fn end(&self) {
        if self.id == 0 {
            self.controller.end("its admin queue is gone");
        } else {
            let mut queues = self.controller.queues.borrow_mut();
            // One that has proved nothing has no number, and has changed nothing.
            if !queues.get(&self.id).is_some_and(|own| Rc::ptr_eq(own, &self.recalls)) {
                return;
            }
            queues.remove(&self.id);
        }
        self.controller.connection_ended();
    }

    /// Its host is known: it has its number from now on, unless another one does.
    pub fn becomes_known(&self) -> Result<(), Taken> {
        let mut queues = self.controller.queues.borrow_mut();
        let own = queues.entry(self.id).or_insert_with(|| Rc::clone(&self.recalls));
        if !Rc::ptr_eq(own, &self.recalls) {
            return Err(Taken);
        }
        if self.id > 0 && !self.is_counted.replace(true) {
            let busy = &self.controller.io_queues_busy;
            busy.set(busy.get() + 1);
        }
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.end();
        if self.is_counted.get() {
            let busy = &self.controller.io_queues_busy;
            busy.set(busy.get() - 1);
            self.controller.io_queue_done.notify_all();
        }
    }
}

impl Controller {
    pub fn new(
        id: u16,
        subsystem: Option<Subsystem>,
        (host, host_id): (Nqn, HostId),
        is_known: bool,
        port: &Rc<Port>,
        keep_alive_ms: u32,
    ) -> Self {
        Self {
            id,
            subsystem,
            host,
            host_id,
            is_known: Cell::new(is_known),
            port: Rc::clone(port),
            configuration: Cell::new(Configuration(0)),
            state: Cell::default(),
            gone: Once::default(),
            evicted: Once::default(),
            reset: RefCell::default(),
            queues: RefCell::default(),
            io_queues_busy: Cell::default(),
            io_queue_done: Notify::default(),
            aborts: Semaphore::new(ABORTS_MAX),
            keep_alive_ms: Cell::new(keep_alive_ms),
            is_heard: Cell::new(true),
            notices: Notices::default(),
            errors: Errors::default(),
            features: RefCell::default(),
            thresholds: Cell::new(THRESHOLDS),
            beyond: RefCell::default(),
            attached: RefCell::default(),
            detached: RefCell::default(),
            failures: RefCell::default(),
            queues_granted: Cell::default(),
        }
    }

    pub fn id(&self) -> u16 {
        self.id
    }

    pub fn subsystem(&self) -> Option<&Subsystem> {
        self.subsystem.as_ref()
    }

    pub fn host(&self) -> &Nqn {
        &self.host
    }

    pub fn host_id(&self) -> &HostId {
        &self.host_id
    }

    pub fn is_known(&self) -> bool {
        self.is_known.get()
    }

    /// The host has proved who it is. It goes if another one has come with its identifier meanwhile, and was known first.
    pub fn becomes_known(&self) {
        let is_taken = |subsystem: &Subsystem| subsystem.is_taken(&self.host_id, &self.host);
        if self.is_known.get() {
            return;
        }
        match self.subsystem.as_ref().is_some_and(is_taken) {
            true => self.end("another host has its identifier"),
            false => self.is_known.set(true),
        }
    }

    pub fn port(&self) -> &Rc<Port> {
        &self.port
    }

    pub fn keep_alive_ms(&self) -> u32 {
        self.keep_alive_ms.get()
    }

    pub fn set_keep_alive_ms(&self, limit: u32) {
        self.keep_alive_ms.set(limit);
    }

    pub fn configuration(&self) -> Configuration {
        self.configuration.get()
    }

    pub fn state(&self) -> ControllerState {
        self.state.get()
    }

    /// Carries out what the host writes to the property (Base, 3.1.5).
    pub fn configure(self: &Rc<Self>, new: Configuration) -> Result<(), Status> {
        if !new.is_possible() {
            return Err(Status::INVALID_FIELD);
        }
        let old = self.configuration.replace(new);
        let mut state = self.state.get();
        if old.is_enabled() && !new.is_enabled() {
            // A reset: as if the other queues were deleted.
            self.reset.replace(Rc::default()).happen();
            self.connection_ended();
            if self.has_io_queues() {
                let attached = self.attached.borrow();
                let claims = attached.values().map(|it| it.namespace.claims().clone());
                self.detached.borrow_mut().extend(claims);
            }
            self.attached.borrow_mut().clear();
            self.queues_granted.set(None);
            self.notices.reset();
            self.errors.clear();
            // What was set is as it was at first (Base, 5.21); how long a host may be silent it has said with Connect.
            self.features.borrow_mut().clear();
            self.thresholds.set(THRESHOLDS);
            self.beyond.take();
            state = ControllerState::default();
        }
        state.is_ready = new.is_enabled();
        let had_begun = state.shutdown != Shutdown::None;
        state.shutdown = match new.is_shutting_down() {
            false => Shutdown::None,
            true if had_begun => state.shutdown,
            true => Shutdown::UnderWay,
        };
        self.state.set(state);
        if new.is_shutting_down() && !had_begun {
            self.reset.replace(Rc::default()).happen();
            let controller = Rc::clone(self);
            reactor::run_or_spawn(async move {
                select(pin!(controller.shut_down()), pin!(controller.gone.happened())).await;
            });
        }
        Ok(())
    }

    /// Its host goes, and may take the power away once this is complete (Base, 3.6.1): what was answered is durable by then.
    async fn shut_down(&self) {
        let begun = Rc::clone(&self.reset.borrow());
        // What they have under way is answered.
        self.io_queue_done.until(|| (self.io_queues_busy.get() == 0).then_some(())).await;
        let attached: Vec<_> = self.attached.borrow().values().cloned().collect();
        let flushed = join_all(attached.iter().map(|it| it.opened.volume.flush())).await;
        let mut is_durable = true;
        for error in flushed.into_iter().filter_map(Result::err) {
            // The host waits for as long as it has patience.
            let subsystem = self.subsystem.as_ref().map(|subsystem| subsystem.nqn().as_str());
            tracing::error!(host = %self.host, subsystem, %error, "a host goes, and what it has written is not durable");
            is_durable = false;
        }
        // It may have been taken back, and begun anew, meanwhile.
        let state = self.state.get();
        let is_meant =
            state.shutdown == Shutdown::UnderWay && Rc::ptr_eq(&begun, &self.reset.borrow());
        if is_durable && is_meant {
            self.state.set(ControllerState { shutdown: Shutdown::Complete, ..state });
        }
    }

    /// The admin queue, once.
    pub fn admin_queue(self: &Rc<Self>) -> Queue {
        let recalls = Rc::default();
        self.queues.borrow_mut().insert(0, Rc::clone(&recalls));
        // It is not ended by a reset.
        Queue {
            controller: Rc::clone(self),
            id: 0,
            reset: Rc::default(),
            recalls,
            is_counted: Cell::default(),
        }
    }

    /// An I/O queue. Until its host is known it leaves its number to others.
    pub fn io_queue(self: &Rc<Self>, id: u16, is_known: bool) -> Result<Queue, Status> {
        if !self.state.get().is_ready || self.gone.has_happened() {
            return Err(Status::SEQUENCE_ERROR);
        }
        if id > IO_QUEUES_MAX {
            return Err(Status::CONNECT_INVALID_PARAMETERS);
        }
        // The old connection may be broken, and nobody has told us yet.
        if self.queues.borrow().contains_key(&id) {
            return Err(Status::SEQUENCE_ERROR);
        }
        let (controller, reset) = (Rc::clone(self), Rc::clone(&self.reset.borrow()));
        let (recalls, is_counted) = Default::default();
        let queue = Queue { controller, id, reset, recalls, is_counted };
        if is_known {
            queue.becomes_known().map_err(|Taken| Status::SEQUENCE_ERROR)?;
        }
        Ok(queue)
    }

    pub fn has_io_queues(&self) -> bool {
        self.queues.borrow().keys().any(|&id| id > 0)
    }

    /// Room for one more Abort, until its answer leaves.
    pub fn begin_abort(&self) -> Result<Permit, Status> {
        self.aborts.try_acquire(1).ok_or(Status::ABORT_LIMIT)
    }

    /// Ends a command of a queue, if it can be ended. True: it is, and the host has been told so.
    pub async fn recall(&self, queue: u16, command: u16) -> bool {
        let recalls = self.queues.borrow().get(&queue).cloned();
        match recalls {
            Some(recalls) => recalls.recall(command).await,
            None => false,
        }
    }

    /// The host has said something.
    pub fn heard(&self) {
        self.is_heard.set(true);
    }

    /// Returns when the host was silent for too long.
    pub async fn falls_silent(&self) {
        let mut silent = Duration::ZERO;
        loop {
            reactor::sleep(KEEP_ALIVE_TICK).await;
            silent = if self.is_heard.replace(false) {
                Duration::ZERO
            } else {
                silent + KEEP_ALIVE_TICK
            };
            let limit = match (self.keep_alive_ms.get(), &self.subsystem) {
                // Who only looks around has no reason to stay for ever.
                (0, None) => DISCOVERY_LIMIT,
                (0, Some(_)) => continue,
                (ms, subsystem) => {
                    let asked = Duration::from_millis(u64::from(ms));
                    // Anybody may look around, and would stay for weeks.
                    if subsystem.is_none() { asked.min(DISCOVERY_SILENCE_MAX) } else { asked }
                }
            };
            if silent >= limit {
                return;
            }
        }
    }

    /// A namespace with its volume, if the host has used it before.
    pub fn attached(&self, id: u32) -> Option<Rc<Attached>> {
        self.attached.borrow().get(&id).cloned()
    }

    /// A namespace with its volume, opened if this host is the first to have it.
    pub async fn attach(&self, id: u32) -> Result<Rc<Attached>, Status> {
        if let Some(attached) = self.attached(id) {
            return Ok(attached);
        }
        let none = Status::INVALID_NAMESPACE.and_do_not_retry();
        // It may not even open any more.
        if let Some(loss) = self.subsystem().and_then(Subsystem::loss) {
            return Err(loss.status());
        }
        let namespace =
            self.subsystem().and_then(|subsystem| subsystem.namespace(id)).ok_or(none)?;
        let opened = namespace.opened().await.ok_or(Status::NOT_READY)?;
        if let Err(error) = namespace.claims().load().await {
            let subsystem = self.subsystem().map(|subsystem| subsystem.nqn().as_str());
            tracing::error!(subsystem, namespace = id, %error, "nobody may use it until its reservations are known");
            return Err(Status::NOT_READY);
        }
        let block_bytes = opened.block_bytes();
        let attached = Rc::new(Attached { namespace, opened, block_bytes });
        // It may have been taken away while it was opened.
        let is_there = self.subsystem().and_then(|subsystem| subsystem.namespace(id));
        if is_there.is_some_and(|there| Rc::ptr_eq(&there, &attached.namespace)) {
            self.attached.borrow_mut().insert(id, Rc::clone(&attached));
        }
        Ok(attached)
    }

    /// Nothing that its host has asked for is begun any more.
    pub fn gone(&self) -> &Once {
        &self.gone
    }

    /// Ends it, and its queues.
    pub fn end(&self, why: &str) {
        if !self.gone.has_happened() {
            let nqn = self.subsystem.as_ref().map(|subsystem| subsystem.nqn().as_str());
            tracing::info!(host = %self.host, subsystem = nqn, id = self.id, why, "a controller ends");
            self.gone.happen();
        }
    }

    /// Ends it for others, who need what it takes: also if it has ended and its host takes its answers slowly.
    pub fn evict(&self, why: &str) {
        self.end(why);
        self.evicted.happen();
    }

    /// See [`Self::evict`].
    pub fn evicted(&self) -> &Once {
        &self.evicted
    }

    /// A namespace is not what it was: a host that held on to its volume would keep that open.
    pub fn detach(&self, id: u32) {
        let Some(attached) = self.attached.borrow_mut().remove(&id) else { return };
        // What is under way there may outlast its connection, whether or not the host comes back to it.
        self.detached.borrow_mut().push(attached.namespace.claims().clone());
    }

    /// No command was answered so before because something failed.
    pub fn is_first(&self, failure: Status) -> bool {
        let mut failures = self.failures.borrow_mut();
        let is_first = !failures.contains(&failure);
        if is_first {
            failures.push(failure);
        }
        is_first
    }

    /// One of its connections has ended, and what came by it may not have.
    pub fn connection_ended(&self) {
        for attached in self.attached.borrow().values() {
            attached.namespace.claims().connection_ended();
        }
        self.detached.borrow().iter().for_each(Claims::connection_ended);
        if !self.has_io_queues() {
            self.detached.take();
        }
    }

    pub fn queues_granted(&self) -> &Cell<Option<u32>> {
        &self.queues_granted
    }

    /// How good the way to the namespaces is.
    pub fn ana_state(&self) -> AnaState {
        let loss = self.subsystem.as_ref().and_then(Subsystem::loss);
        loss.map_or(self.port.state(), Loss::state)
    }

    pub fn happened(&self, event: Event) {
        self.notices.happened(event);
    }

    pub fn thresholds(&self) -> [u16; 2] {
        self.thresholds.get()
    }

    /// Carries out what the host says of temperatures, which drives may be beyond at once.
    pub fn set_thresholds(&self, thresholds: [u16; 2]) {
        self.thresholds.set(thresholds);
        self.feel_temperatures();
    }

    /// What a drive tells of itself, as this host wants to be warned of its temperature (Base, 5.21.1.4). A drive that does not tell how hot it is
    /// knows itself whether that is too much.
    pub fn judged(&self, mut health: Health) -> Health {
        if health.kelvin > 0 {
            let [above, below] = self.thresholds.get();
            let is_beyond = health.kelvin >= above || health.kelvin <= below;
            health.warnings.set(Warnings::TEMPERATURE, is_beyond);
        }
        health
    }

    /// Tells the host if it wants to know and a drive has come to be beyond a threshold, or was before it wanted to know.
    pub fn feel_temperatures(&self) {
        let Some(subsystem) = &self.subsystem else { return };
        if !self.notices.wanted().contains(Events::TEMPERATURE) {
            self.beyond.take();
            return;
        }
        let is_beyond = |id: &u32| {
            let health = subsystem.namespace(*id).map(|namespace| self.judged(namespace.health()));
            health.is_some_and(|health| health.warnings.contains(Warnings::TEMPERATURE))
        };
        let beyond: BTreeSet<u32> = subsystem.namespaces().into_iter().filter(is_beyond).collect();
        let is_new = !beyond.is_subset(&self.beyond.borrow());
        self.beyond.replace(beyond);
        if is_new {
            self.happened(Event::Temperature);
        }
    }
}

//! A controller: what one host has of one subsystem, over however many queues.
//!
//! What always holds:
//! - It lives as long as its admin queue, and its other queues end with it.
//! - A host that says nothing for its keep alive timeout is given up, and its queues end.

use crate::namespace::{Namespace, Opened};
use crate::notices::Notices;
use crate::port::Port;
use crate::reservations::HostId;
use crate::subsystem::Subsystem;
use levada_base::reactor;
use levada_base::sync::Once;
use levada_nvme::fabrics::{Configuration, ControllerState};
use levada_nvme::log::Event;
use levada_nvme::{Nqn, Status};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// I/O queues of a controller.
pub(crate) const IO_QUEUES_MAX: u16 = 64;

/// See the module.
pub(crate) struct Controller {
    id: u16,
    /// `None`: of discovery.
    subsystem: Option<Subsystem>,
    host: Nqn,
    host_id: HostId,
    port: Rc<Port>,
    configuration: Cell<Configuration>,
    state: Cell<ControllerState>,
    gone: Once,
    /// I/O queues end: their controller was reset.
    reset: RefCell<Rc<Once>>,
    queues: RefCell<BTreeSet<u16>>,
    keep_alive_ms: Cell<u32>,
    /// Something came since the timer looked.
    is_heard: Cell<bool>,
    pub notices: Notices,
    /// What Set Features left here, for Get Features.
    pub features: RefCell<BTreeMap<u8, u32>>,
    /// Volumes stay open while the host is there.
    attached: RefCell<BTreeMap<u32, Rc<Attached>>>,
}

/// A namespace and its volume, as long as a host has it.
pub(crate) struct Attached {
    pub namespace: Rc<Namespace>,
    pub opened: Rc<Opened>,
}

/// A queue of a controller, for as long as it is connected.
pub(crate) struct Queue {
    pub controller: Rc<Controller>,
    /// 0: the admin queue.
    pub id: u16,
    /// Ends the queue.
    pub reset: Rc<Once>,
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.id == 0 {
            self.controller.end("its admin queue is gone");
        } else {
            self.controller.queues.borrow_mut().remove(&self.id);
        }
    }
}

impl Controller {
    pub fn new(
        id: u16,
        subsystem: Option<Subsystem>,
        (host, host_id): (Nqn, HostId),
        port: &Rc<Port>,
        keep_alive_ms: u32,
    ) -> Self {
        Self {
            id,
            subsystem,
            host,
            host_id,
            port: Rc::clone(port),
            configuration: Cell::new(Configuration(0)),
            state: Cell::default(),
            gone: Once::default(),
            reset: RefCell::default(),
            queues: RefCell::default(),
            keep_alive_ms: Cell::new(keep_alive_ms),
            is_heard: Cell::new(true),
            notices: Notices::default(),
            features: RefCell::default(),
            attached: RefCell::default(),
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
    pub fn configure(&self, new: Configuration) -> Result<(), Status> {
        if !new.is_possible() {
            return Err(Status::INVALID_FIELD);
        }
        let old = self.configuration.replace(new);
        let mut state = self.state.get();
        if old.is_enabled() && !new.is_enabled() {
            // A reset: as if the other queues were deleted.
            self.reset.replace(Rc::default()).happen();
            self.attached.borrow_mut().clear();
            state = ControllerState::default();
        }
        state.is_ready = new.is_enabled();
        if new.is_shutting_down() {
            state.is_shut_down = true;
            self.reset.replace(Rc::default()).happen();
        } else {
            state.is_shut_down = false;
        }
        self.state.set(state);
        Ok(())
    }

    /// The admin queue, once.
    pub fn admin_queue(self: &Rc<Self>) -> Queue {
        // It is not ended by a reset.
        Queue { controller: Rc::clone(self), id: 0, reset: Rc::default() }
    }

    /// An I/O queue.
    pub fn io_queue(self: &Rc<Self>, id: u16) -> Result<Queue, Status> {
        if !self.state.get().is_ready || self.gone.has_happened() {
            return Err(Status::SEQUENCE_ERROR);
        }
        if id > IO_QUEUES_MAX {
            return Err(Status::CONNECT_INVALID_PARAMETERS);
        }
        if !self.queues.borrow_mut().insert(id) {
            // The old connection may be broken, and nobody has told us yet.
            return Err(Status::SEQUENCE_ERROR);
        }
        let reset = Rc::clone(&self.reset.borrow());
        Ok(Queue { controller: Rc::clone(self), id, reset })
    }

    /// The host has said something.
    pub fn heard(&self) {
        self.is_heard.set(true);
    }

    /// Returns when the host was silent for too long.
    pub async fn falls_silent(&self) {
        loop {
            let limit = self.keep_alive_ms.get();
            if limit == 0 {
                // It may ask for one later.
                reactor::sleep(Duration::from_secs(1)).await;
                continue;
            }
            self.is_heard.set(false);
            reactor::sleep(Duration::from_millis(u64::from(limit))).await;
            if !self.is_heard.get() {
                return;
            }
        }
    }

    /// A namespace with its volume, opened if this host is the first to have it.
    pub async fn attached(&self, id: u32) -> Result<Rc<Attached>, Status> {
        if let Some(attached) = self.attached.borrow().get(&id) {
            return Ok(Rc::clone(attached));
        }
        let none = Status::INVALID_NAMESPACE.and_do_not_retry();
        let namespace =
            self.subsystem().and_then(|subsystem| subsystem.namespace(id)).ok_or(none)?;
        let opened = namespace.opened().await.ok_or(Status::NOT_READY)?;
        let attached = Rc::new(Attached { namespace, opened });
        // It may have been taken away while it was opened.
        let is_there = self.subsystem().and_then(|subsystem| subsystem.namespace(id));
        if is_there.is_some_and(|there| Rc::ptr_eq(&there, &attached.namespace)) {
            self.attached.borrow_mut().insert(id, Rc::clone(&attached));
        }
        Ok(attached)
    }

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

    pub fn namespace_changed(&self, id: u32) {
        // A host that holds on to a volume which is not this namespace's any more would keep it open.
        self.attached.borrow_mut().remove(&id);
        self.notices.namespace_changed(id);
    }

    pub fn happened(&self, event: Event) {
        self.notices.happened(event);
    }
}

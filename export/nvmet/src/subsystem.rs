//! A subsystem: namespaces, and the hosts that may reach them.
//!
//! What always holds: a host that is not allowed gets no controller, and learns of none by discovery.

use crate::claims::Claims;
use crate::controller::Controller;
use crate::namespace::{Namespace, Open, TellHealth};
use crate::port::Port;
use crate::reservations::HostId;
use levada_device::nvme::{KeysError, read_keys};
use levada_nvme::keyring::{HostKeys, Keyring};
use levada_nvme::log::{AnaState, Event, Warnings};
use levada_nvme::{Nqn, ReservationNotice, Status};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::{Rc, Weak};

/// The largest identifier of a namespace.
pub const NAMESPACES_MAX: u32 = 1024;
/// Controllers of a subsystem at once.
const CONTROLLERS_MAX: usize = 1024;

/// Who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    Any,
    /// These, by their names; one with secrets has to prove who it is, on every queue, and one with a key of TLS has to come by that.
    Only(BTreeMap<Nqn, HostKeys>),
}

impl Hosts {
    /// Those of `names` without secrets and keys, and those of `keyring` with.
    #[must_use]
    pub fn only(names: impl IntoIterator<Item = Nqn>, keyring: Keyring) -> Self {
        let mut hosts: BTreeMap<Nqn, HostKeys> =
            names.into_iter().map(|name| (name, HostKeys::default())).collect();
        hosts.extend(keyring);
        Self::Only(hosts)
    }

    /// As users say it: those of `names` and those of the file `keys`, or all when there is neither. `is_tls_only`: nobody is let in
    /// without TLS.
    ///
    /// # Errors
    ///
    /// [`KeysError`]: the file cannot be used, or nobody could be let in.
    pub fn chosen(
        names: impl IntoIterator<Item = Nqn>,
        keys: Option<&Path>,
        is_tls_only: bool,
    ) -> Result<Self, KeysError> {
        let mut names = names.into_iter().peekable();
        let Some(path) = keys else {
            return Ok(match names.peek() {
                None => Self::Any,
                Some(_) => Self::only(names, Keyring::default()),
            });
        };
        let keyring = read_keys(path)?;
        if keyring.is_empty() && names.peek().is_none() {
            return Err(KeysError::Empty { path: path.to_owned() });
        }
        if is_tls_only && keyring.values().all(|keys| keys.tls.is_none()) {
            return Err(KeysError::WithoutTls { path: path.to_owned() });
        }
        Ok(Self::only(names, keyring))
    }

    /// What a host has to know to be let in; `None`: it is not, at all.
    fn admission(&self, host: &Nqn) -> Option<HostKeys> {
        match self {
            Self::Any => Some(HostKeys::default()),
            Self::Only(hosts) => hosts.get(host).cloned(),
        }
    }
}

/// Why a server answers for its volumes no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loss {
    /// They have stopped here, and may come back: hosts wait for them.
    Stopped,
    /// Another server has them: hosts are to go there, for good.
    Elsewhere,
}

impl Loss {
    /// What hosts are told of every path to here.
    #[must_use]
    pub fn state(self) -> AnaState {
        match self {
            Self::Stopped => AnaState::Inaccessible,
            Self::Elsewhere => AnaState::PersistentLoss,
        }
    }

    /// What is asked of blocks ends with this.
    pub(crate) fn status(self) -> Status {
        match self {
            Self::Stopped => Status::ANA_INACCESSIBLE,
            Self::Elsewhere => Status::ANA_PERSISTENT_LOSS,
        }
    }
}

/// Of a controller; those behind it are reserved (Fabrics, 4.2).
const ID_MAX: u16 = 0xffef;

/// See the module. Clones are the same one.
#[derive(Clone)]
pub struct Subsystem(Rc<Inner>);

struct Inner {
    nqn: Nqn,
    serial: String,
    hosts: RefCell<Hosts>,
    namespaces: RefCell<BTreeMap<u32, Rc<Namespace>>>,
    controllers: RefCell<BTreeMap<u16, Weak<Controller>>>,
    /// Changes may be lost with the power until a flush.
    has_volatile_cache: Cell<bool>,
    /// The identifier that is tried first for the next controller.
    next_id: Cell<u16>,
    /// Nobody is answered any more.
    loss: Cell<Option<Loss>>,
    /// It is removed: no controller is made any more.
    is_gone: Cell<bool>,
}

impl Subsystem {
    /// One without namespaces. `serial` has at most 20 characters, and is this subsystem's alone.
    #[must_use]
    pub fn new(nqn: Nqn, serial: impl Into<String>, hosts: Hosts) -> Self {
        Self(Rc::new(Inner {
            nqn,
            serial: serial.into(),
            hosts: RefCell::new(hosts),
            namespaces: RefCell::default(),
            controllers: RefCell::default(),
            has_volatile_cache: Cell::new(true),
            next_id: Cell::new(1),
            loss: Cell::default(),
            is_gone: Cell::new(false),
        }))
    }

    /// One without a volatile cache: changes of its namespaces are durable when they are answered, and hosts need not flush.
    #[must_use]
    pub fn written_through(self) -> Self {
        self.0.has_volatile_cache.set(false);
        self
    }

    pub(crate) fn has_volatile_cache(&self) -> bool {
        self.0.has_volatile_cache.get()
    }

    /// Has its controllers numbered otherwise than those of the owners before and after the one of `epoch`: whoever serves the same subsystem
    /// next has controllers of the same hosts, which refuse a second one of the same identifier (Base, 3.1.1), as Linux does.
    #[must_use]
    pub fn of_owner(self, epoch: u64) -> Self {
        // Multiples of the golden ratio keep their distance: of 64 owners in a row each has 400 identifiers of its own, of two 25,000.
        const STEP: u64 = 40_493;
        let first = epoch % u64::from(ID_MAX) * STEP % u64::from(ID_MAX) + 1;
        self.0.next_id.set(first as u16);
        self
    }

    #[must_use]
    pub fn nqn(&self) -> &Nqn {
        &self.0.nqn
    }

    /// See [`Subsystem::new`].
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.0.serial
    }

    /// Hosts that are connected now.
    #[must_use]
    pub fn controllers(&self) -> usize {
        self.live().count()
    }

    fn live(&self) -> impl Iterator<Item = Rc<Controller>> + use<> {
        let controllers: Vec<_> = self.0.controllers.borrow().values().cloned().collect();
        controllers.into_iter().filter_map(|controller| controller.upgrade())
    }

    pub(crate) fn admission(&self, host: &Nqn) -> Option<HostKeys> {
        (!self.0.is_gone.get()).then(|| self.0.hosts.borrow().admission(host)).flatten()
    }

    /// Admits others from now on; controllers of hosts that are not among them, or have to prove something else, end.
    pub fn set_hosts(&self, hosts: Hosts) {
        for controller in self.live() {
            let (is, was) = (hosts.admission(controller.host()), self.admission(controller.host()));
            if is.is_none() || is != was {
                controller.end("its host is not admitted any more");
            }
        }
        *self.0.hosts.borrow_mut() = hosts;
    }

    /// Adds a namespace, or puts another in the place of one; hosts are told. `open` is called when the first of them connects.
    ///
    /// # Panics
    ///
    /// When `id` is not 1 to [`NAMESPACES_MAX`].
    pub fn add(&self, id: u32, open: Open) {
        self.add_claimed(id, open, Claims::default());
    }

    /// As [`Self::add`], of a drive, which can tell how it is doing, and whose reservations stay when it is taken away and added again.
    ///
    /// # Panics
    ///
    /// As [`Self::add`].
    pub fn add_drive(&self, id: u32, open: Open, tell_health: TellHealth, claims: Claims) {
        self.insert(id, Namespace::new(open, claims, Some(tell_health)));
    }

    /// As [`Self::add`], of a volume that was shown before and may be reserved.
    ///
    /// # Panics
    ///
    /// As [`Self::add`].
    pub fn add_claimed(&self, id: u32, open: Open, claims: Claims) {
        self.insert(id, Namespace::new(open, claims, None));
    }

    fn insert(&self, id: u32, namespace: Namespace) {
        assert!((1..=NAMESPACES_MAX).contains(&id), "no namespace can be {id}");
        self.0.namespaces.borrow_mut().insert(id, Rc::new(namespace));
        self.replaced(id);
    }

    /// Takes a namespace away; hosts are told. What they have asked of it is carried out.
    pub fn remove(&self, id: u32) {
        if self.0.namespaces.borrow_mut().remove(&id).is_some() {
            self.replaced(id);
        }
    }

    /// Tells hosts that a namespace has another size.
    pub fn resized(&self, id: u32) {
        for controller in self.live() {
            controller.notices.namespace_changed(id);
        }
    }

    /// Tells hosts that the health of a drive is another, and that it warns of `new` now. Of its temperature they hear by the thresholds that they have
    /// set themselves.
    pub fn health_changed(&self, new: Warnings) {
        for controller in self.live() {
            let told = Event::of_warnings(new.difference(Warnings::TEMPERATURE));
            told.for_each(|event| controller.happened(event));
            controller.feel_temperatures();
        }
    }

    fn replaced(&self, id: u32) {
        for controller in self.live() {
            controller.detach(id);
            controller.notices.namespace_changed(id);
            controller.feel_temperatures();
        }
    }

    /// What is behind the namespaces answers no more: hosts are told, and refused from now on.
    pub(crate) fn lose(&self, loss: Loss) {
        if self.0.loss.get() < Some(loss) {
            self.0.loss.set(Some(loss));
            for controller in self.live() {
                controller.happened(Event::AnaChanged);
            }
        }
    }

    /// The same where volumes may not even answer what is under way: its hosts are sent away, and told when they come back.
    pub(crate) fn lose_at_once(&self, loss: Loss) {
        self.lose(loss);
        for controller in self.live() {
            controller.end("its namespaces are not served here any more");
        }
    }

    /// Why nobody is answered any more.
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.0.loss.get()
    }

    pub(crate) fn namespace(&self, id: u32) -> Option<Rc<Namespace>> {
        self.0.namespaces.borrow().get(&id).cloned()
    }

    /// Identifiers, ascending.
    pub(crate) fn namespaces(&self) -> Vec<u32> {
        self.0.namespaces.borrow().keys().copied().collect()
    }

    /// A host of another name is here with this identifier. One that has yet to prove who it is does not count: anybody could keep others out so.
    pub(crate) fn is_taken(&self, id: &HostId, host: &Nqn) -> bool {
        let is_other = |there: &Controller| there.host_id() == id && there.host() != host;
        let is_here = |there: &Controller| there.is_known() && !there.gone().has_happened();
        let is_taken = self.live().any(|there| is_other(&there) && is_here(&there));
        if is_taken {
            tracing::warn!(%host, "an NVMe host comes with the identifier of another");
        }
        is_taken
    }

    /// A controller for a host; `is_known`: it has nothing to prove any more.
    pub(crate) fn connect(
        &self,
        host: (Nqn, HostId),
        is_known: bool,
        port: &Rc<Port>,
        keep_alive_ms: u32,
    ) -> Result<Rc<Controller>, Status> {
        // Reservations go by identifiers: whoever took that of another host would have its right to write. The other one may be gone in a moment.
        if self.is_taken(&host.1, &host.0) {
            return Err(Status::CONNECT_INVALID_HOST);
        }
        self.make_room()?;
        let mut controllers = self.0.controllers.borrow_mut();
        controllers.retain(|_, controller| controller.strong_count() > 0);
        let mut id = self.0.next_id.get();
        while controllers.contains_key(&id) {
            id = if id >= ID_MAX { 1 } else { id + 1 };
        }
        self.0.next_id.set(if id >= ID_MAX { 1 } else { id + 1 });
        let controller =
            Controller::new(id, Some(self.clone()), host, is_known, port, keep_alive_ms);
        let controller = Rc::new(controller);
        controllers.insert(id, Rc::downgrade(&controller));
        Ok(controller)
    }

    /// Sees to it that there is room for one more controller. Who has proved nothing for the longest gives way: those who never will could keep
    /// all others out so.
    fn make_room(&self) -> Result<(), Status> {
        let here = self.live().filter(|there| !there.gone().has_happened());
        let here: Vec<Rc<Controller>> = here.collect();
        if here.len() < CONTROLLERS_MAX {
            return Ok(());
        }
        // Identifiers are given in turn.
        let next = self.0.next_id.get();
        let unknown = here.iter().filter(|there| !there.is_known());
        let oldest = unknown.min_by_key(|there| there.id().wrapping_sub(next));
        oldest.ok_or(Status::CONTROLLER_BUSY)?.end("it has proved nothing, and others come");
        Ok(())
    }

    /// The controller that is told to have this identifier.
    pub(crate) fn controller(&self, id: u16) -> Option<Rc<Controller>> {
        self.0.controllers.borrow().get(&id).and_then(Weak::upgrade)
    }

    /// Identifiers of all controllers, ascending.
    pub(crate) fn controller_ids(&self) -> Vec<u16> {
        self.live().map(|controller| controller.id()).collect()
    }

    /// A controller of the host, if it has one.
    pub(crate) fn controller_of(&self, host: &HostId) -> Option<u16> {
        self.live().find(|controller| controller.host_id() == host).map(|found| found.id())
    }

    /// Tells hosts what has become of their reservations of a namespace, through all their controllers.
    pub(crate) fn tell_of_reservations(
        &self,
        namespace: u32,
        told: &[(HostId, ReservationNotice)],
    ) {
        for controller in self.live() {
            let notices = told.iter().filter(|(host, _)| host == controller.host_id());
            for (_, notice) in notices {
                controller.notices.reservation(namespace, *notice);
            }
        }
    }

    /// Tells the hosts that came through `port` that their paths are better or worse now.
    pub(crate) fn path_changed(&self, port: &Rc<Port>) {
        for controller in self.live().filter(|controller| Rc::ptr_eq(controller.port(), port)) {
            controller.happened(Event::AnaChanged);
        }
    }

    /// Ends all controllers; none is made any more.
    pub(crate) fn end(&self) {
        self.0.is_gone.set(true);
        for controller in self.live() {
            controller.end("its subsystem is gone");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_in_a_row_number_controllers_apart() {
        let nqn = Nqn::new("nqn.2026-11.io.levada:test").expect("a name");
        let port = Rc::new(Port::new(1, ([127, 0, 0, 1], 4420).into()));
        let mut given = std::collections::BTreeSet::new();
        for epoch in 1000..1064 {
            let subsystem = Subsystem::new(nqn.clone(), "1", Hosts::Any).of_owner(epoch);
            for _ in 0..400 {
                let controller = subsystem.connect((nqn.clone(), [1; 16]), true, &port, 0);
                let id = controller.expect("room").id();
                assert!((1..=ID_MAX).contains(&id) && given.insert(id), "{id} of {epoch}");
            }
        }
    }

    #[test]
    fn who_proves_nothing_keeps_nobody_out() {
        let nqn = Nqn::new("nqn.2026-11.io.levada:test").expect("a name");
        let subsystem = Subsystem::new(nqn.clone(), "1", Hosts::Any);
        let port = Rc::new(Port::new(1, ([127, 0, 0, 1], 4420).into()));
        let connect = |is_known| subsystem.connect((nqn.clone(), [1; 16]), is_known, &port, 0);
        let unknown = CONTROLLERS_MAX / 2;
        let all = (0..CONTROLLERS_MAX).map(|at| connect(at >= unknown).expect("room"));
        let all: Vec<Rc<Controller>> = all.collect();
        let mut others = Vec::new();
        for oldest in &all[..unknown] {
            assert!(!oldest.gone().has_happened());
            others.push(connect(true).expect("in its place"));
            assert!(oldest.gone().has_happened());
        }
        assert!(all[unknown..].iter().chain(&others).all(|known| !known.gone().has_happened()));
        // All of them are known.
        assert_eq!(connect(false).err(), Some(Status::CONTROLLER_BUSY));
    }
}

//! A namespace: a volume, open while a host has it, and who has reserved it.

use crate::reservations::{Access, HostId, Reservations};
use futures_util::future::LocalBoxFuture;
use levada_base::sync::{Notify, Once, Semaphore};
use levada_nvme::Status;
use levada_nvme::identify::NamespaceIdentity;
use levada_nvme::log::Health;
use levada_nvme::reservation::ReservationRequest;
use levada_volume::Volume;
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

/// A volume that was opened for hosts.
#[derive(Clone)]
pub struct Opened {
    pub volume: Rc<dyn Volume>,
    /// Of this volume alone, for ever: hosts take two namespaces with the same one for two paths to one.
    pub guid: [u8; 16],
}

/// Opens the volume of a namespace; `None`: it cannot be opened now, which whoever opens has said in the log.
pub type Open = Rc<dyn Fn() -> LocalBoxFuture<'static, Option<Opened>>>;

/// What is behind a namespace, of its own health.
pub type TellHealth = Rc<dyn Fn() -> Health>;

/// The group that all namespaces are in.
pub(crate) const ANA_GROUP: u32 = 1;
/// Blocks of volumes of whole ones of this size; others have [`SMALL_BLOCK_BYTES`].
const BLOCK_BYTES: u64 = 4096;
const SMALL_BLOCK_BYTES: u64 = 512;

pub(crate) struct Namespace {
    open: Open,
    opened: RefCell<Weak<Opened>>,
    /// Opened by one at a time.
    opening: Rc<Semaphore>,
    claims: Claims,
    /// `None`: what is behind it cannot tell of itself.
    tell_health: Option<TellHealth>,
    pub moved: Moved,
}

/// Who has reserved a volume, and what hosts change now. It goes with the volume, whatever that is called: clones are the same.
#[derive(Clone, Default)]
pub struct Claims(Rc<Claimed>);

#[derive(Default)]
struct Claimed {
    reservations: RefCell<Reservations>,
    changing: RefCell<Slab<Changing>>,
    /// Changes that have begun so far.
    begun: Cell<u64>,
    ended: Notify,
    /// Connections have ended whose changes may not have: those that began before this number.
    orphans_before: Cell<u64>,
}

/// A change under way.
struct Changing {
    host: HostId,
    number: u64,
    /// Of the connection that it came by.
    connection_ended: Rc<Once>,
}

/// What hosts have read and written since it is there.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    pub reads: Cell<u64>,
    pub writes: Cell<u64>,
    pub read_bytes: Cell<u64>,
    pub written_bytes: Cell<u64>,
    pub media_errors: Cell<u64>,
}

/// A change that a host has asked for, until it is carried out or has failed.
pub(crate) struct Change {
    claims: Claims,
    key: usize,
}

impl Claims {
    /// Whether the host may do this now.
    pub(crate) fn check(&self, host: &HostId, access: Access) -> Result<(), Status> {
        self.0.reservations.borrow().check(host, access)
    }

    /// Begins a change, if the host may, once what it had under way over connections that are gone has ended: it may have sent
    /// that again, and an old write must not overtake a newer one. Who takes the right to change away waits for it to end.
    pub(crate) async fn change(
        &self,
        host: &HostId,
        connection_ended: &Rc<Once>,
    ) -> Result<Change, Status> {
        if self.0.orphans_before.get() > 0 {
            self.0.ended.until(|| (!self.has_orphans_of(host)).then_some(())).await;
        }
        self.check(host, Access::Write)?;
        let number = self.0.begun.get();
        self.0.begun.set(number + 1);
        let connection_ended = Rc::clone(connection_ended);
        let changing = Changing { host: *host, number, connection_ended };
        let key = self.0.changing.borrow_mut().insert(changing);
        Ok(Change { claims: self.clone(), key })
    }

    /// Whether a host has changes under way over connections that are gone.
    fn has_orphans_of(&self, host: &HostId) -> bool {
        let changing = self.0.changing.borrow();
        let before = self.0.orphans_before.get();
        let old = changing.iter().map(|(_, change)| change);
        let mut old = old.filter(|one| one.number < before).peekable();
        if old.peek().is_none() {
            self.0.orphans_before.set(0);
        }
        old.any(|change| change.host == *host && change.connection_ended.has_happened())
    }

    /// A connection has ended, or is about to; changes that came by it may not have.
    pub(crate) fn connection_ended(&self) {
        self.0.orphans_before.set(self.0.begun.get());
    }

    /// Carries out what a host asks for. What hosts had under way that may change nothing any more has ended when this returns: their
    /// old writes do not overtake the new owner's.
    pub(crate) async fn reserve(
        &self,
        host: &HostId,
        request: ReservationRequest,
    ) -> Result<(), Status> {
        let changed = self.0.reservations.borrow_mut().carry_out(host, request)?;
        let before = self.0.begun.get();
        // Of now: whom others let in again later has to wait for as well.
        let excluded: Vec<usize> = {
            let (changing, reservations) = (self.0.changing.borrow(), self.0.reservations.borrow());
            let is_out = |host: &HostId| {
                changed.preempted.contains(host) || reservations.check(host, Access::Write).is_err()
            };
            changing.iter().filter(|(_, one)| is_out(&one.host)).map(|(key, _)| key).collect()
        };
        let is_old = |key: &usize| {
            let changing = self.0.changing.borrow();
            changing.get(*key).is_some_and(|change| change.number < before)
        };
        self.0.ended.until(|| (!excluded.iter().any(is_old)).then_some(())).await;
        Ok(())
    }

    pub(crate) fn reservations(&self) -> &RefCell<Reservations> {
        &self.0.reservations
    }
}

impl Namespace {
    pub fn new(open: Open, claims: Claims, tell_health: Option<TellHealth>) -> Self {
        Self {
            open,
            opened: RefCell::default(),
            opening: Semaphore::new(1),
            claims,
            tell_health,
            moved: Moved::default(),
        }
    }

    /// The volume, opened unless somebody has it; it is open for as long as anybody holds on to what is returned.
    pub async fn opened(&self) -> Option<Rc<Opened>> {
        if let Some(opened) = self.opened_already() {
            return Some(opened);
        }
        let _turn = self.opening.acquire(1).await;
        if let Some(opened) = self.opened_already() {
            return Some(opened);
        }
        let opened = Rc::new((self.open)().await?);
        *self.opened.borrow_mut() = Rc::downgrade(&opened);
        Some(opened)
    }

    fn opened_already(&self) -> Option<Rc<Opened>> {
        self.opened.borrow().upgrade()
    }

    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Of what is behind a volume a host cannot know drive by drive; then here is what hosts have read and written themselves.
    pub fn health(&self) -> Health {
        match &self.tell_health {
            Some(tell) => tell(),
            None => self.moved.health(),
        }
    }
}

impl Moved {
    fn health(&self) -> Health {
        let Self { reads, writes, read_bytes, written_bytes, media_errors } = self;
        let units = |bytes: &Cell<u64>| u128::from(bytes.get()).div_ceil(Health::UNIT_BYTES);
        Health {
            spare_percent: 100,
            reads: reads.get().into(),
            writes: writes.get().into(),
            read_units: units(read_bytes),
            written_units: units(written_bytes),
            media_errors: media_errors.get().into(),
            ..Health::default()
        }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.claims.0.changing.borrow_mut().remove(self.key);
        self.claims.0.ended.notify_all();
    }
}

impl Opened {
    /// The size of its blocks, which hosts must not see change while they have it.
    pub(crate) fn block_bytes(&self) -> u64 {
        match self.volume.size_bytes().is_multiple_of(BLOCK_BYTES) {
            true => BLOCK_BYTES,
            false => SMALL_BLOCK_BYTES,
        }
    }

    pub(crate) fn identity(&self, block_bytes: u64) -> NamespaceIdentity {
        let shape = self.volume.shape();
        NamespaceIdentity {
            blocks: self.volume.size_bytes() / block_bytes,
            block_bytes,
            write_blocks_best: shape.io_bytes_best / block_bytes,
            discard_blocks: shape.discard_bytes / block_bytes,
            has_reservations: true,
            keeps_reservations: false,
            is_read_only: shape.is_read_only,
            ana_group: ANA_GROUP,
            guid: self.guid,
        }
    }
}

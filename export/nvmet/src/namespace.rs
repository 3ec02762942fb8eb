//! A namespace: a volume, open while a host has it, and who has reserved it.

use crate::reservations::{Access, Changed, HostId, Reservations};
use futures_util::future::LocalBoxFuture;
use levada_base::sync::{Notify, Semaphore};
use levada_nvme::Status;
use levada_nvme::identify::NamespaceIdentity;
use levada_nvme::reservation::ReservationRequest;
use levada_volume::Volume;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
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
    reservations: RefCell<Reservations>,
    /// Changes under way, by host.
    changing: RefCell<BTreeMap<HostId, u64>>,
    changed: Notify,
    pub moved: Moved,
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
    namespace: Rc<Namespace>,
    host: HostId,
}

impl Namespace {
    pub fn new(open: Open) -> Self {
        Self {
            open,
            opened: RefCell::default(),
            opening: Semaphore::new(1),
            reservations: RefCell::default(),
            changing: RefCell::default(),
            changed: Notify::default(),
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

    pub fn opened_already(&self) -> Option<Rc<Opened>> {
        self.opened.borrow().upgrade()
    }

    /// Whether the host may do this now.
    pub fn check(&self, host: &HostId, access: Access) -> Result<(), Status> {
        self.reservations.borrow().check(host, access)
    }

    /// Begins a change, if the host may. Who preempts it waits for it to end.
    pub fn change(self: &Rc<Self>, host: &HostId) -> Result<Change, Status> {
        self.check(host, Access::Write)?;
        *self.changing.borrow_mut().entry(*host).or_default() += 1;
        Ok(Change { namespace: Rc::clone(self), host: *host })
    }

    /// Carries out what a host asks for. What hosts that are preempted had under way has ended when this returns: their old writes do
    /// not overtake the new owner's.
    pub async fn reserve(&self, host: &HostId, request: ReservationRequest) -> Result<(), Status> {
        let Changed { preempted } = self.reservations.borrow_mut().carry_out(host, request)?;
        let have_ended = || {
            let changing = self.changing.borrow();
            (!preempted.iter().any(|host| changing.contains_key(host))).then_some(())
        };
        self.changed.until(have_ended).await;
        Ok(())
    }

    pub fn reservations(&self) -> &RefCell<Reservations> {
        &self.reservations
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        let mut changing = self.namespace.changing.borrow_mut();
        if let Some(count) = changing.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                changing.remove(&self.host);
                drop(changing);
                self.namespace.changed.notify_all();
            }
        }
    }
}

impl Opened {
    pub(crate) fn block_bytes(&self) -> u64 {
        match self.volume.size_bytes().is_multiple_of(BLOCK_BYTES) {
            true => BLOCK_BYTES,
            false => SMALL_BLOCK_BYTES,
        }
    }

    pub(crate) fn identity(&self) -> NamespaceIdentity {
        let (shape, block_bytes) = (self.volume.shape(), self.block_bytes());
        NamespaceIdentity {
            blocks: self.volume.size_bytes() / block_bytes,
            block_bytes,
            write_blocks_best: shape.io_bytes_best / block_bytes,
            discard_blocks: shape.discard_bytes / block_bytes,
            has_reservations: true,
            is_read_only: shape.is_read_only,
            ana_group: ANA_GROUP,
            guid: self.guid,
        }
    }
}

//! A namespace: a volume, open while a host has it, and who has reserved it.

use crate::claims::Claims;
use futures_util::future::LocalBoxFuture;
use levada_base::sync::Semaphore;
use levada_nvme::identify::NamespaceIdentity;
use levada_nvme::log::Health;
use levada_volume::Volume;
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

/// What hosts have read and written since it is there.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    pub reads: Cell<u64>,
    pub writes: Cell<u64>,
    pub read_bytes: Cell<u64>,
    pub written_bytes: Cell<u64>,
    pub media_errors: Cell<u64>,
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

impl Opened {
    /// The size of its blocks, which hosts must not see change while they have it.
    pub(crate) fn block_bytes(&self) -> u64 {
        match self.volume.size_bytes().is_multiple_of(BLOCK_BYTES) {
            true => BLOCK_BYTES,
            false => SMALL_BLOCK_BYTES,
        }
    }

    pub(crate) fn identity(&self, block_bytes: u64, claims: &Claims) -> NamespaceIdentity {
        let shape = self.volume.shape();
        NamespaceIdentity {
            blocks: self.volume.size_bytes() / block_bytes,
            block_bytes,
            write_blocks_best: shape.io_bytes_best / block_bytes,
            discard_blocks: shape.discard_bytes / block_bytes,
            has_reservations: claims.are_offered(),
            keeps_reservations: claims.can_be_kept(),
            is_read_only: shape.is_read_only,
            ana_group: ANA_GROUP,
            guid: self.guid,
        }
    }
}

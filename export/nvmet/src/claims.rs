//! Who has reserved a volume, what hosts change now, and where the reservations are kept.
//!
//! What always holds:
//! - Once an order for a reservation is answered, nothing that it excludes is under way any more, and nothing old overtakes the new owner.
//! - Where reservations are kept, an order is in force once it is durable, and answered afterwards. So whoever was told of it finds it in
//!   force after a crash, from the first command on: nothing is asked of a namespace before what was kept is known.
//!
//! After a crash in the midst of an order the old state holds or the new one, and the host was told of neither. What was kept and cannot be
//! read refuses the namespace: it may be another's.

use crate::reservations::{Access, Changed, HostId, Reservations};
use futures_util::future::LocalBoxFuture;
use levada_base::planted;
use levada_base::sync::{Notify, Once, Semaphore};
use levada_nvme::reservation::ReservationRequest;
use levada_nvme::{KeptFault, KeptReservations, NoticeMask, Status};
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Why reservations are not known, or not kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error("what was kept of reservations is damaged: {0}")]
    Damaged(#[from] KeptFault),
    /// Where they are kept.
    #[error(transparent)]
    Store(Box<dyn std::error::Error + Send + Sync>),
}

impl KeepError {
    /// What the store says.
    pub fn store(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Store(Box::new(error))
    }
}

/// Where the reservations of a volume are kept. They go with the volume, wherever it is served.
pub trait Keep {
    /// What was saved last; `None`: nothing, or that there is nothing.
    fn load(&self) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KeepError>>;

    /// Keeps this, or nothing, in the place of what was kept: durable when it returns, and never half of either.
    fn save(&self, bytes: Option<Vec<u8>>) -> LocalBoxFuture<'_, Result<(), KeepError>>;
}

/// See the module. It goes with the volume, whatever that is called: clones are the same.
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
    kept: Option<Kept>,
    /// What nobody wants to be told of.
    masked: Cell<NoticeMask>,
    /// Nobody can reserve it.
    are_lacking: bool,
}

/// Where they are kept, and what is known of it.
struct Kept {
    keep: Rc<dyn Keep>,
    is_loaded: Cell<bool>,
    /// Something else may be kept than what is in force: saving failed.
    is_unsettled: Cell<bool>,
    /// One order after the other, each saved before the next one looks.
    turn: Rc<Semaphore>,
}

/// A change under way.
struct Changing {
    host: HostId,
    number: u64,
    /// Of the connection that it came by.
    connection_ended: Rc<Once>,
}

/// A change that a host has asked for, until it is carried out or has failed.
pub(crate) struct Change {
    claims: Claims,
    key: usize,
}

/// An order that is in force, and durable where that was asked for.
pub(crate) struct Reserved {
    pub changed: Changed,
    /// Changes of hosts that may change nothing any more.
    excluded: Vec<usize>,
    /// Only those that had begun by then.
    before: u64,
}

impl Claims {
    /// Of a volume whose reservations `keep` keeps.
    #[must_use]
    pub fn kept(keep: Rc<dyn Keep>) -> Self {
        let (is_loaded, is_unsettled, turn) = (Cell::default(), Cell::default(), Semaphore::new(1));
        let kept = Some(Kept { keep, is_loaded, is_unsettled, turn });
        Self(Rc::new(Claimed { kept, ..Claimed::default() }))
    }

    /// Of a volume without reservations, as many drives are.
    #[must_use]
    pub fn lacking() -> Self {
        Self(Rc::new(Claimed { are_lacking: true, ..Claimed::default() }))
    }

    /// Hosts may reserve it.
    pub(crate) fn are_offered(&self) -> bool {
        !self.0.are_lacking
    }

    /// Hosts may ask for reservations that outlive the target.
    pub(crate) fn can_be_kept(&self) -> bool {
        self.0.kept.is_some()
    }

    /// Puts in force what was kept, unless that has been done.
    ///
    /// # Errors
    ///
    /// [`KeepError`]; nobody may use the volume then.
    pub async fn load(&self) -> Result<(), KeepError> {
        let Some(kept) = self.0.kept.as_ref().filter(|kept| !kept.is_loaded.get()) else {
            return Ok(());
        };
        let _turn = kept.turn.acquire(1).await;
        if kept.is_loaded.get() {
            return Ok(());
        }
        if let Some(bytes) = kept.keep.load().await? {
            *self.0.reservations.borrow_mut() = KeptReservations::parse(&bytes)?.into();
        }
        kept.is_loaded.set(true);
        Ok(())
    }

    /// Whether the host may do this now.
    pub(crate) fn check(&self, host: &HostId, access: Access) -> Result<(), Status> {
        self.0.reservations.borrow().check(host, access)
    }

    /// Changes may be under way that came over connections which are gone.
    pub(crate) fn may_have_orphans(&self) -> bool {
        self.0.orphans_before.get() > 0
    }

    /// Returns once what the host had under way over connections that are gone has ended: it may have sent that again, and an old write must
    /// not overtake a newer one.
    pub(crate) async fn without_orphans_of(&self, host: &HostId) {
        self.0.ended.until(|| (!self.has_orphans_of(host)).then_some(())).await;
    }

    /// Begins a change, if the host may, which has no [orphans](Self::without_orphans_of). Who takes the right to change away waits for it to end.
    ///
    /// # Errors
    ///
    /// [`Status::RESERVATION_CONFLICT`], and [`Status::PATH_ERROR`] of a connection that is gone itself: its host has sent this again as
    /// well, and what it sends next would not wait for one that begins only now.
    pub(crate) fn change(
        &self,
        host: &HostId,
        connection_ended: &Rc<Once>,
    ) -> Result<Change, Status> {
        if connection_ended.has_happened() {
            return Err(Status::PATH_ERROR);
        }
        if !planted!("nvmet-reservation-not-checked") {
            self.check(host, Access::Write).map_err(Status::and_do_not_retry)?;
        }
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

    /// Puts what a host asks for in force, and says what else is `kept` of it from now on; it is answered once it has [settled](Self::settled).
    pub(crate) async fn reserve(
        &self,
        host: &HostId,
        request: ReservationRequest,
        is_kept: Option<bool>,
    ) -> Result<Reserved, Status> {
        let _turn = self.turn().await;
        let mut next = self.0.reservations.borrow().clone();
        let changed = next.carry_out(host, request)?;
        next.is_kept = is_kept.filter(|_| self.can_be_kept()).unwrap_or(next.is_kept);
        self.save(&next).await?;
        *self.0.reservations.borrow_mut() = next;
        // Of now: whom others let in again later has to wait for as well.
        let (changing, reservations) = (self.0.changing.borrow(), self.0.reservations.borrow());
        let is_out = |host: &HostId| {
            changed.preempted.contains(host) || reservations.check(host, Access::Write).is_err()
        };
        let excluded = match request {
            // Who comes to be registered takes nothing from anybody, and would wait for what others have preempted: a host that comes back over
            // another connection, for as long as the volume takes for what it had under way over the first.
            ReservationRequest::Register { .. } => Vec::new(),
            _ => changing.iter().filter(|(_, one)| is_out(&one.host)).map(|(key, _)| key).collect(),
        };
        Ok(Reserved { changed, excluded, before: self.0.begun.get() })
    }

    /// Returns once what hosts had under way that may change nothing any more has ended: their old writes do not overtake the new owner's.
    pub(crate) async fn settled(&self, reserved: Reserved) {
        let Reserved { excluded, before, .. } = reserved;
        if planted!("nvmet-preemption-does-not-wait") {
            return;
        }
        let is_old = |key: &usize| {
            let changing = self.0.changing.borrow();
            changing.get(*key).is_some_and(|change| change.number < before)
        };
        self.0.ended.until(|| (!excluded.iter().any(is_old)).then_some(())).await;
    }

    /// Says whether reservations outlive the target, by themselves and not with an order.
    pub(crate) async fn set_kept(&self, is_kept: bool) -> Result<(), Status> {
        let _turn = self.turn().await;
        let mut next = self.0.reservations.borrow().clone();
        next.is_kept = is_kept;
        self.save(&next).await?;
        *self.0.reservations.borrow_mut() = next;
        Ok(())
    }

    /// Nothing is to be waited for where nothing is kept.
    async fn turn(&self) -> Option<levada_base::sync::Permit> {
        match &self.0.kept {
            Some(kept) => Some(kept.turn.acquire(1).await),
            None => None,
        }
    }

    /// Keeps what is to be in force next, if that is another than what is kept.
    async fn save(&self, next: &Reservations) -> Result<(), Status> {
        let Some(kept) = &self.0.kept else { return Ok(()) };
        let new = next.kept();
        if new == self.0.reservations.borrow().kept() && !kept.is_unsettled.get() {
            return Ok(());
        }
        kept.is_unsettled.set(true);
        if let Err(error) = kept.keep.save(new.map(|new| new.to_bytes())).await {
            tracing::error!(%error, "a reservation cannot be kept, and is refused");
            return Err(Status::INTERNAL_ERROR);
        }
        kept.is_unsettled.set(false);
        Ok(())
    }

    /// What is not kept is forgotten, as by a drive that loses its power.
    pub fn lose_power(&self) {
        let mut reservations = self.0.reservations.borrow_mut();
        if !reservations.is_kept {
            *reservations = Reservations::default();
        }
    }

    /// Notices that nobody wants.
    pub(crate) fn masked(&self) -> &Cell<NoticeMask> {
        &self.0.masked
    }

    pub(crate) fn reservations(&self) -> &RefCell<Reservations> {
        &self.0.reservations
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.claims.0.changing.borrow_mut().remove(self.key);
        self.claims.0.ended.notify_all();
    }
}

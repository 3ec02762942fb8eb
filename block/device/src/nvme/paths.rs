//! The paths to a namespace: each an address with its controller, kept connected; commands go where they are answered.
//!
//! A path that ends, for whatever reason, gives its commands back, and they are sent on another one. Without any they wait, while every
//! path tries to connect again, until `gone_after` is over.
//!
//! What always holds:
//! - A path is used only while it leads to the namespace that was opened: the same names, the same blocks, at least as many.
//! - A change is sent again elsewhere at once, but no other change of its blocks before the lost one can no longer happen: `unsettled`.
//! - A path that was away, or from which the namespace was, is used only when another one has reached it all along, or everything is
//!   written again that was confirmed and not flushed: `unflushed`. If that cannot be, the device is gone for good.
//! - Before that, whoever owns the namespace has seen that it still does: `fence`.
//! - Of the paths that can be used, one that the target calls optimized is taken, and of those the one with the fewest commands.
//! - A command waits, or is tried again, no longer than `gone_after` from its first failure, and what its last try takes; then the caller
//!   is told. How long it was held back does not count.
//!
//! [`life`]: how a path is kept, and looked at. [`carry`]: where a command goes.

mod carry;
mod life;

use super::controller::{ConnectError, Controller};
use super::fence::Ownership;
use super::host::{HostId, Opening};
use super::options::{Network, Options};
use super::queue::Unanswered;
use super::resolve::Place;
use super::sight::Known;
use super::unflushed::Unflushed;
use super::unsettled::{Change, Unsettled};
use crate::{BlockError, HealthPage};
use levada_base::Epoch;
use levada_base::reactor::{self, Group, Instant};
use levada_base::sync::{Notify, Semaphore};
use levada_nvme::Nqn;
use levada_nvme::identify::EVERY_NAMESPACE;
use levada_nvme::log::{HEALTH_BYTES, LogPage};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Between tries of a command that a path refuses.
pub(super) const AGAIN_FIRST: Duration = Duration::from_millis(10);
pub(super) const AGAIN_MAX: Duration = Duration::from_secs(1);
/// A path over which data have come damaged is told of for so long.
const DAMAGE_TOLD_FOR: Duration = Duration::from_secs(3600);

/// How good a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Not connected.
    Down,
    /// Connected, and not used beside another: in its place, if need be, or once it is proven to lead to the same drive.
    Reserve,
    /// Connected, and the namespace is not reached.
    Unusable,
    NonOptimized,
    Optimized,
}

/// A path, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathStatus {
    /// As it was written, as long as that is a name that could not be looked up.
    pub address: String,
    pub standing: Standing,
    /// Why it is not connected, or not used; of one that is used what is the matter with it.
    pub why: Option<String>,
}

pub(super) struct Path<S> {
    place: Place,
    pub(super) controller: RefCell<Option<Rc<Controller<S>>>>,
    standing: Cell<Standing>,
    /// Nothing was lost while it was away, or it was made good.
    is_whole: Cell<bool>,
    /// It was found to lead to another drive than those that are used.
    pub(super) is_stray: Cell<bool>,
    /// Since it was connected.
    has_told_of_damage: Cell<bool>,
    /// When data came by it damaged, the last time.
    damaged_at: Cell<Option<Instant>>,
    /// Whoever looks after the machines has been told that it is away: once, however often and for whatever reasons it is tried in vain.
    has_told_of_loss: Cell<bool>,
    /// How good it was when that was told last, or found first.
    was_told: Cell<Option<Standing>>,
    /// Since when it is connected and the namespace is not there.
    absent_since: Cell<Option<Instant>>,
    why: RefCell<Option<String>>,
    /// It leads there, as far as names tell, and waits for its turn to be made whole.
    pub(super) awaits_turn: Cell<bool>,
    /// It has been tried.
    was_tried: Cell<bool>,
    look: Notify,
}

/// See the module.
pub(crate) struct Paths<N: Network> {
    network: N,
    pub options: Options,
    pub(super) opening: Opening,
    pub subsystem: Nqn,
    /// 0: the only one that there is.
    pub(super) namespace: u32,
    pub(super) known: RefCell<Option<Rc<Known>>>,
    pub(super) paths: Vec<Path<N::Stream>>,
    changed: Notify,
    /// No path could be used since then.
    unusable_since: Cell<Option<Instant>>,
    pub unsettled: RefCell<Rc<Unsettled>>,
    pub unflushed: RefCell<Unflushed>,
    /// One path at a time is made whole.
    pub(super) making_whole: Rc<Semaphore>,
    /// Counts how often the target may have lost what it had confirmed.
    pub(super) era: Cell<u64>,
    /// The largest unit of the keep alive timeout of its controllers, those that are gone included.
    unit_ms: Cell<u32>,
    /// When a path was given up for its silence.
    silent_at: Cell<Option<Instant>>,
    /// Counts how often the namespace was seen to be away from a controller.
    absences: Cell<u64>,
    /// The number of the last connection.
    pub(super) last_connection: Cell<u32>,
    /// What was confirmed may be lost, and cannot be written again.
    pub(super) has_lost: Cell<bool>,
    given_up_for: Cell<&'static str>,
    /// Nobody uses it any more.
    is_ending: Cell<bool>,
    /// What goes on for as long as there are paths, whoever asked for it.
    pub(super) group: Group,
    pub owner: Ownership,
    /// A target says that a drive warns.
    pub warned: Notify,
    /// Commands that were given back by a path and sent again.
    pub resent: Cell<u64>,
    /// Times that a change waited for one that was lost.
    pub held_back: Cell<u64>,
}

pub(super) fn lost() -> ConnectError {
    ConnectError::Ended { why: Unanswered::Lost.to_string() }
}

impl<N: Network> Paths<N> {
    pub fn new(
        network: N,
        places: Vec<Place>,
        subsystem: Nqn,
        namespace: u32,
        options: Options,
    ) -> Rc<Self> {
        let path = |place: Place| Path {
            place,
            controller: RefCell::default(),
            standing: Cell::new(Standing::Down),
            is_whole: Cell::new(false),
            is_stray: Cell::new(false),
            has_told_of_damage: Cell::new(false),
            damaged_at: Cell::default(),
            has_told_of_loss: Cell::new(false),
            was_told: Cell::default(),
            absent_since: Cell::default(),
            why: RefCell::default(),
            awaits_turn: Cell::default(),
            was_tried: Cell::default(),
            look: Notify::default(),
        };
        let paths = Rc::new(Self {
            network,
            opening: Opening::new(&options.host),
            options,
            subsystem,
            namespace,
            known: RefCell::default(),
            paths: places.into_iter().map(path).collect(),
            changed: Notify::default(),
            unusable_since: Cell::new(Some(reactor::now())),
            unsettled: RefCell::default(),
            unflushed: RefCell::default(),
            making_whole: Semaphore::new(1),
            era: Cell::default(),
            unit_ms: Cell::default(),
            silent_at: Cell::default(),
            absences: Cell::default(),
            last_connection: Cell::default(),
            has_lost: Cell::default(),
            given_up_for: Cell::default(),
            is_ending: Cell::default(),
            group: reactor::current_group(),
            owner: Ownership::default(),
            warned: Notify::default(),
            resent: Cell::default(),
            held_back: Cell::default(),
        });
        for at in 0..paths.paths.len() {
            let paths = Rc::clone(&paths);
            reactor::spawn(async move { paths.keep_up(at).await });
        }
        paths
    }

    /// Waits until one path can be used: what is there.
    ///
    /// # Errors
    ///
    /// What every path says, when none can.
    pub async fn first(&self) -> Result<Rc<Known>, Vec<PathStatus>> {
        let is_decided = || {
            let is_usable = self.paths.iter().any(|path| path.is_usable());
            if is_usable && let Some(known) = self.known.borrow().clone() {
                return Some(Ok(known));
            }
            let all_tried = self.paths.iter().all(|path| path.was_tried.get());
            all_tried.then(|| Err(self.status()))
        };
        self.changed.until(is_decided).await
    }

    /// A change of blocks that is about to be asked for.
    pub fn change(&self, at: u64, bytes: u64) -> Change {
        self.unsettled.borrow().change(at, bytes)
    }

    pub fn status(&self) -> Vec<PathStatus> {
        let status = |path: &Path<N::Stream>| PathStatus {
            address: path.place.to_string(),
            standing: path.standing.get(),
            why: path.why.borrow().clone().or_else(|| path.damage()),
        };
        self.paths.iter().map(status).collect()
    }

    /// True while requests are carried out rather than waited for, but for a moment.
    pub fn is_reached(&self) -> bool {
        !self.has_lost.get() && self.paths.iter().any(|path| path.is_reached())
    }

    pub fn is_given_up(&self) -> bool {
        self.has_lost.get() || self.owner.lost().is_some()
    }

    /// Completes when there is a later owner.
    pub async fn lost(&self) -> Epoch {
        let later = || match self.owner.lost_to_later() {
            Some(BlockError::Fenced { seen, .. }) => Some(seen),
            _ => None,
        };
        self.changed.until(later).await
    }

    /// Lets go of the target, in order.
    pub fn end(&self) {
        self.is_ending.set(true);
        self.changed.notify_all();
    }

    /// Waits until every path is down, after [`Paths::end`].
    pub async fn ended(&self) {
        let is_down = |path: &Path<N::Stream>| path.standing.get() == Standing::Down;
        self.changed.until(|| self.paths.iter().all(is_down).then_some(())).await;
    }

    async fn ending(&self) {
        self.changed.until(|| self.is_ending.get().then_some(())).await;
    }

    /// Of the namespace; 0 before it is known which one that is.
    fn number(&self) -> u32 {
        self.known.borrow().as_ref().map_or(self.namespace, |known| known.namespace)
    }

    pub(super) fn has_changed(&self) {
        let is_reached = self.paths.iter().any(|path| path.is_reached());
        match (is_reached, self.unusable_since.get()) {
            (true, _) => self.unusable_since.set(None),
            (false, None) => self.unusable_since.set(Some(reactor::now())),
            (false, Some(_)) => {}
        }
        self.changed.notify_all();
    }

    /// Nothing that was confirmed can be relied upon any more: the device is gone for good.
    pub(super) fn give_up(&self, why: &'static str) {
        if !self.has_lost.replace(true) {
            tracing::error!(subsystem = %self.subsystem, why, "the device is given up");
            self.given_up_for.set(why);
        }
        self.unflushed.borrow_mut().clear();
        self.end();
    }

    /// The namespace was away from a controller that is still there. What it comes back with is not known, over whatever path.
    fn was_absent(&self) {
        self.absences.set(self.absences.get() + 1);
        self.none_is_whole();
    }

    /// Every path has to be looked at before it is used again.
    pub(super) fn none_is_whole(&self) {
        for path in &self.paths {
            path.is_whole.set(false);
            path.look.notify_all();
        }
        self.has_changed();
    }

    /// One that was used is not any more: others may have waited for that.
    pub(super) fn look_at_unused(&self) {
        for path in self.paths.iter().filter(|path| !path.is_usable()) {
            path.look.notify_all();
        }
    }

    pub(super) fn known(&self) -> Rc<Known> {
        self.known.borrow().clone().expect("it was looked at")
    }

    /// Controllers over which nothing is missing.
    pub(super) fn whole(&self) -> Vec<Rc<Controller<N::Stream>>> {
        let whole = self.paths.iter().filter(|path| path.is_whole.get());
        whole.filter_map(|path| path.controller.borrow().clone()).collect()
    }

    /// A connection has to be looked at before it is used again.
    pub(super) fn is_not_whole(&self, host_id: &HostId) {
        for path in &self.paths {
            if path.has_connection(host_id) {
                path.is_whole.set(false);
                path.look.notify_all();
            }
        }
        self.has_changed();
    }

    /// The connection is there.
    pub(super) fn has_connection(&self, host_id: &HostId) -> bool {
        self.paths.iter().any(|path| path.has_connection(host_id))
    }

    /// Whether a connection whose queue is silent may be given up for that: there is a path that can be used besides, or could but for the
    /// turn that this one has, on which nobody waits in vain, and that is not where one went that was given up so. Then it may be the drive, or what was asked of it.
    fn gives_up_silent(&self, host_id: &HostId) -> bool {
        let again = self.options.timing.long_command;
        if self.silent_at.get().is_some_and(|last| last.elapsed() < again) {
            return false;
        }
        let leads_elsewhere = self.paths.iter().any(|path| {
            let controller = path.controller.borrow().clone();
            let waits = path.standing.get() == Standing::Reserve || path.awaits_turn.get();
            (path.is_usable() || waits)
                && !path.is_stray.get()
                && controller.is_some_and(|it| {
                    it.host_id != *host_id && !it.queues().iter().any(|queue| queue.is_silent())
                })
        });
        if leads_elsewhere {
            self.silent_at.set(Some(reactor::now()));
        }
        leads_elsewhere
    }

    /// How long what a host has sent may still be carried out once that is gone; see `unsettled`.
    pub fn settle(&self) -> Duration {
        self.options.timing.settle(self.unit_ms.get())
    }

    /// The page of health, of the namespace where each has its own, from any path.
    pub async fn health_page(&self, namespace: u32) -> Option<HealthPage> {
        let (_, controller) = self.best(None)?;
        let of = match controller.identity.has_namespace_health {
            true => namespace,
            false => EVERY_NAMESPACE,
        };
        let page = controller.log_page(LogPage::Health as u8, of, 0, HEALTH_BYTES).await.ok()?;
        Some(HealthPage::parse(page.first_chunk()?))
    }
}

impl<S: levada_base::stream::ByteStream + 'static> Path<S> {
    /// It leads there, and nothing is missing over it, as far as somebody has looked.
    pub(super) fn is_reached(&self) -> bool {
        self.standing.get() > Standing::Unusable && self.is_whole.get()
    }

    /// And since then nothing was told that could be another look's matter.
    pub(super) fn is_usable(&self) -> bool {
        let controller = self.controller.borrow();
        let is_untouched = || controller.as_ref().is_some_and(|it| it.notices.tell_of_no_change());
        self.is_reached() && is_untouched()
    }

    /// What is the matter with data that come by it.
    fn damage(&self) -> Option<String> {
        let is_lately = self.damaged_at.get()?.elapsed() < DAMAGE_TOLD_FOR;
        let is_told = is_lately && self.is_usable();
        is_told.then(|| {
            "data arrive damaged over it, and are asked for again: look at its network".into()
        })
    }

    pub(super) fn has_connection(&self, host_id: &HostId) -> bool {
        self.controller.borrow().as_ref().is_some_and(|it| it.host_id == *host_id)
    }
}

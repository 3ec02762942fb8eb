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

use super::controller::{ConnectError, Controller, Stage};
use super::fence::Ownership;
use super::host::{HostId, Opening, number_of};
use super::options::{Network, Options};
use super::order::{Order, OrderError};
use super::pulse;
use super::queue::{Answered, Request, Unanswered, while_open};
use super::resolve::Place;
use super::sight::Known;
use super::unflushed::Unflushed;
use super::unsettled::{Change, Unsettled};
use super::verdict::Verdict;
use crate::{BlockError, HealthPage};
use futures_util::future::{Either, select};
use levada_base::reactor::{self, Group, Instant};
use levada_base::sync::{Notify, Semaphore};
use levada_base::{Epoch, IoVec, IoVecMut};
use levada_nvme::identify::EVERY_NAMESPACE;
use levada_nvme::log::{HEALTH_BYTES, LogPage};
use levada_nvme::{Command, Completion, IoOpcode, Nqn, Status};
use std::cell::{Cell, RefCell};
use std::future::pending;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// A path that does not reach the namespace is looked at again so often.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The same of one that waits for what its owner is about to leave at the drive.
const LOOK_SOON: Duration = Duration::from_millis(100);
/// Between tries of a command that a path refuses.
pub(super) const AGAIN_FIRST: Duration = Duration::from_millis(10);
pub(super) const AGAIN_MAX: Duration = Duration::from_secs(1);
/// Data of a read that arrive damaged are asked for so often.
const DAMAGED_MAX: u32 = 8;
/// A path over which data have come damaged is told of for so long.
const DAMAGE_TOLD_FOR: Duration = Duration::from_secs(3600);
/// A controller that lasted so long was a good one: the next try comes soon.
const LASTED: Duration = Duration::from_secs(5);
/// Connecting, or a look, may take so many times as long as a step of it,
const STEPS_MAX: u32 = 10;
/// and a controller says that it takes no longer than that to become ready (CAP.TO).
const READY_MAX: Duration = Duration::from_millis(500 * 255);

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

    /// Keeps a path connected.
    async fn keep_up(self: Rc<Self>, at: usize) {
        let path = &self.paths[at];
        let timing = self.options.timing;
        let mut pause = timing.again_first;
        while !self.is_ending.get() {
            let (network, options) = (&self.network, &self.options);
            let id = self.next_id();
            let connecting = async {
                let address = path.place.find(&options.resolver).await;
                let address = address.map_err(ConnectError::NoAddress)?;
                Controller::connect(network, address, &self.subsystem, options, id).await
            };
            let limit = timing.connect * STEPS_MAX + READY_MAX;
            let connecting = reactor::timeout(limit, connecting);
            let connected = match select(pin!(connecting), pin!(self.ending())).await {
                Either::Left((Ok(connected), _)) => connected,
                Either::Left((Err(_), _)) => {
                    Err(ConnectError::Endless { stage: Stage::Connecting, limit })
                }
                Either::Right(_) => return,
            };
            match connected {
                Ok(controller) => {
                    let begun = reactor::now();
                    let why = self.attend(path, &controller).await;
                    if self.may_have_changed(path) {
                        // Nobody looks at that any more, and other paths may not have been told.
                        self.was_absent();
                    }
                    if !self.is_ending.get() {
                        self.tell_of_loss(path, &why);
                    }
                    if begun.elapsed() >= LASTED {
                        pause = timing.again_first;
                    }
                    self.is_down(path, why);
                }
                Err(error) => {
                    // A path that has been there needs no advice how to find it.
                    let why = match path.was_told.get().is_some() && error.is_hang_up() {
                        true => "the target hangs up at once".into(),
                        false => error.to_string(),
                    };
                    path.place.doubt();
                    self.tell_of_loss(path, &why);
                    self.is_down(path, why);
                }
            }
            // Hosts that have lost the same target do not all come back at once.
            let jitter = reactor::random_u64() % 256;
            let pausing = reactor::sleep(pause + pause * jitter as u32 / 1024);
            select(pin!(pausing), pin!(self.ending())).await;
            pause = (pause * 2).min(timing.again_max);
        }
    }

    /// The identifier of a new connection, whose number none has that is there: one may have stayed while others came and went.
    fn next_id(&self) -> HostId {
        loop {
            let connection = self.last_connection.get() + 1;
            self.last_connection.set(connection);
            let id = self.opening.id(connection);
            let controllers = self.paths.iter().filter_map(|path| path.controller.borrow().clone());
            if controllers.map(|there| number_of(&there.host_id)).all(|used| used != number_of(&id))
            {
                return id;
            }
        }
    }

    fn tell_of_loss(&self, path: &Path<N::Stream>, why: &str) {
        let (subsystem, namespace, address) = (&self.subsystem, self.number(), &path.place);
        if !path.has_told_of_loss.replace(true) {
            tracing::warn!(%subsystem, namespace, %address, why, "a path to a namespace is away");
        }
    }

    fn tell_of_return(&self, path: &Path<N::Stream>) {
        let (subsystem, namespace, address) = (&self.subsystem, self.number(), &path.place);
        if path.has_told_of_loss.replace(false) {
            tracing::info!(%subsystem, namespace, %address, "a path to a namespace is back");
        }
    }

    /// What its target says of a path that is connected: that it leads nowhere, or not as well as others.
    fn tell_of_standing(&self, path: &Path<N::Stream>, why: Option<&str>) {
        let (subsystem, namespace, address) = (&self.subsystem, self.number(), &path.place);
        let standing = path.standing.get();
        if standing == Standing::Unusable {
            return self.tell_of_loss(path, why.unwrap_or("it is not reached"));
        }
        let before = path.was_told.replace(Some(standing));
        if before.is_some_and(|before| before != standing) {
            let is = if standing == Standing::Optimized { "optimized" } else { "non-optimized" };
            tracing::info!(%subsystem, namespace, %address, is, "a path to a namespace is another now (ANA)");
        }
    }

    /// Of the namespace; 0 before it is known which one that is.
    fn number(&self) -> u32 {
        self.known.borrow().as_ref().map_or(self.namespace, |known| known.namespace)
    }

    fn is_down(self: &Rc<Self>, path: &Path<N::Stream>, why: String) {
        *path.controller.borrow_mut() = None;
        *path.why.borrow_mut() = Some(why);
        path.is_whole.set(false);
        path.is_stray.set(false);
        path.has_told_of_damage.set(false);
        path.absent_since.set(None);
        path.awaits_turn.set(false);
        path.was_tried.set(true);
        path.standing.set(Standing::Down);
        self.has_changed();
        self.look_at_unused();
        self.clear_away();
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

    /// Looks after a path that is connected, until it is not: why.
    async fn attend(
        self: &Rc<Self>,
        path: &Path<N::Stream>,
        controller: &Rc<Controller<N::Stream>>,
    ) -> String {
        *path.controller.borrow_mut() = Some(Rc::clone(controller));
        path.standing.set(Standing::Unusable);
        self.unit_ms.set(self.unit_ms.get().max(controller.identity.keep_alive_unit_ms));
        for queue in controller.queues() {
            let (paths, host_id) = (Rc::clone(self), controller.host_id);
            let may_end = move || paths.gives_up_silent(&host_id);
            let pulse = pulse::watch(Rc::clone(queue), self.options.timing, may_end);
            reactor::spawn_in(&self.group, pulse);
        }
        let mut over = pin!(controller.over());
        let mut look_again = Some(Duration::ZERO);
        loop {
            let due = async {
                let looked_for = pin!(path.look.changed());
                let later = async {
                    match look_again {
                        Some(Duration::ZERO) => {}
                        Some(after) => reactor::sleep(after).await,
                        None => pending().await,
                    }
                };
                select(pin!(later), select(looked_for, pin!(controller.notices.come()))).await;
                // Before that it is not used; made whole it would only have the others made whole again.
                controller.notices.are_known().await;
            };
            match select(select(pin!(due), &mut over), pin!(self.ending())).await {
                Either::Left((Either::Left(_), _)) => {}
                Either::Left((Either::Right((why, _)), _)) => return why,
                Either::Right(_) => return self.let_go(controller, over).await,
            }
            let told = controller.notices.take();
            if told.warnings {
                self.warned.notify_all();
            }
            if told.namespaces
                && let Some(known) = self.known.borrow().clone()
                && controller.notices.has_changed(known.namespace)
            {
                self.was_absent();
            }
            if told.namespaces {
                // Who waits for it to be untouched need not wait for the look.
                self.has_changed();
            }
            let absences = self.absences.get();
            let was_whole = path.is_whole.get();
            let was_usable = path.is_reached();
            let looking = async {
                let limit = self.options.timing.connect * STEPS_MAX;
                let looked = reactor::timeout(limit, self.look_at(controller)).await;
                let endless = ConnectError::Endless { stage: Stage::Looking, limit };
                let (standing, why) = looked.unwrap_or(Err(endless))?;
                if standing > Standing::Unusable && !path.is_whole.get() {
                    self.make_whole(controller).await?;
                    path.is_whole.set(absences == self.absences.get());
                } else if told.owner {
                    self.check_owner(controller).await?;
                }
                Ok::<_, ConnectError>((standing, why))
            };
            let looked = match select(select(pin!(looking), &mut over), pin!(self.ending())).await {
                Either::Left((Either::Left((looked, _)), _)) => looked,
                Either::Left((Either::Right((why, _)), _)) => return why,
                Either::Right(_) => return self.let_go(controller, over).await,
            };
            path.awaits_turn.set(false);
            let is_absent = matches!(looked, Err(ConnectError::Absent { .. }));
            let since = path.absent_since.get().unwrap_or_else(reactor::now);
            path.absent_since.set(is_absent.then_some(since));
            match looked {
                Ok((standing, why)) => {
                    path.standing.set(standing);
                    // Another one may be used in its place, which then is not compared with it.
                    if !path.is_reached() && !self.is_compared_by_reservations() {
                        path.is_whole.set(false);
                    }
                    *path.why.borrow_mut() = why.map(str::to_owned);
                    self.tell_of_standing(path, why);
                }
                Err(
                    error @ (ConnectError::Ended { .. }
                    | ConnectError::Silent { .. }
                    | ConnectError::Endless { .. }),
                ) => {
                    controller.close().await;
                    over.await;
                    return error.to_string();
                }
                // It may become what it was.
                Err(error) => {
                    let why = error.to_string();
                    if matches!(error, ConnectError::Unproven { .. }) {
                        path.standing.set(Standing::Reserve);
                    } else {
                        self.tell_of_loss(path, &why);
                        path.standing.set(Standing::Unusable);
                    }
                    *path.why.borrow_mut() = Some(why);
                    // It may have been another one, and be what it was again.
                    if path.is_whole.get() {
                        self.was_absent();
                    }
                }
            }
            path.was_tried.set(true);
            self.has_changed();
            match path.is_usable() {
                true => self.tell_of_return(path),
                false if was_usable && !path.is_reached() => self.look_at_unused(),
                false => {}
            }
            if path.is_whole.get() && !was_whole {
                self.clear_away();
            }
            look_again = match path.is_usable() {
                true => None,
                false if path.standing.get() == Standing::Reserve && self.owner.has_mark() => {
                    Some(LOOK_SOON)
                }
                false => Some(LOOK_EVERY),
            };
        }
    }

    async fn let_go(
        &self,
        controller: &Controller<N::Stream>,
        over: impl Future<Output = String>,
    ) -> String {
        controller.shut_down().await;
        over.await;
        match self.has_lost.get() {
            true => format!("given up: {}", self.given_up_for.get()),
            false => "no longer needed".into(),
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

    /// Asks one controller, rather than any.
    pub(super) async fn ask(
        &self,
        controller: &Controller<N::Stream>,
        command: Command,
        from: IoVec,
        into: IoVecMut,
    ) -> Result<(Completion, IoVecMut), ConnectError> {
        let limit = self.options.timing.limit_of(command.opcode());
        let request = Request { from, into, ..Request::new(command, limit) };
        let queue = controller.queue().ok_or_else(lost)?;
        let answered = queue.run(request).await;
        let ended = |why: Unanswered| ConnectError::Ended { why: why.to_string() };
        answered.outcome.map(|completion| (completion, answered.into)).map_err(ended)
    }

    /// The best path there is now, rather not the one at `avoided`.
    fn best(&self, avoided: Option<usize>) -> Option<(usize, Rc<Controller<N::Stream>>)> {
        let usable = self.paths.iter().enumerate().filter(|(_, path)| path.is_usable());
        let open = usable.filter_map(|(at, path)| {
            let controller = path.controller.borrow().clone()?;
            let busy =
                controller.is_open().then(|| controller.queue().map(|queue| queue.busy()))??;
            let rank = (Some(at) == avoided, std::cmp::Reverse(path.standing.get()), busy);
            Some((rank, at, controller))
        });
        open.min_by_key(|(rank, at, _)| (*rank, *at)).map(|(_, at, controller)| (at, controller))
    }

    /// It will not be carried out over any path.
    fn is_over_for(&self, order: &Order) -> bool {
        self.has_lost.get()
            || self.is_ending.get()
            || order.is_for_owners() && self.owner.lost().is_some()
    }

    /// Whatever path there is, as soon as there is one.
    pub(super) async fn any_path(&self) -> Result<Rc<Controller<N::Stream>>, BlockError> {
        self.path(None, None).await.map(|(_, controller)| controller)
    }

    /// Why an order must not be carried out any more: only the owner changes anything, and what a later one has written since is not
    /// read beside what this one has in memory.
    fn lost_for(&self, order: &Order) -> Option<BlockError> {
        match IoOpcode::of(order.command.opcode()) {
            _ if order.is_for_owners() => self.owner.lost(),
            Some(IoOpcode::Read | IoOpcode::Compare) => self.owner.lost_to_later(),
            _ => None,
        }
    }

    /// A path for an order, as soon as there is one, rather not the one at `avoided`.
    async fn path(
        &self,
        order: Option<&Order>,
        avoided: Option<usize>,
    ) -> Result<(usize, Rc<Controller<N::Stream>>), BlockError> {
        let begun = reactor::now();
        let timing = self.options.timing;
        loop {
            let changed = self.changed.changed();
            if self.has_lost.get() || self.is_ending.get() {
                return Err(BlockError::Gone);
            }
            if let Some(lost) = order.and_then(|order| self.lost_for(order)) {
                return Err(lost);
            }
            if let Some(found) = self.best(avoided) {
                return Ok(found);
            }
            let gone_at = self.unusable_since.get().unwrap_or(begun) + timing.gone_after;
            // All say so: that is sooner believed than silence.
            let absent = self.paths.iter().map(|path| path.absent_since.get());
            let absent = absent.collect::<Option<Vec<Instant>>>();
            let absent = absent.and_then(|all| all.into_iter().max());
            let absent_at = absent.map_or(gone_at, |since| since + timing.absent_after);
            let left = gone_at.min(absent_at).since(reactor::now());
            if left.is_zero() {
                return Err(BlockError::Gone);
            }
            let _ = reactor::timeout(left, changed).await;
        }
    }

    /// Has a command carried out: on one path after the other, until one answers.
    pub async fn carry_out(
        &self,
        order: &Order,
        mut into: IoVecMut,
    ) -> Result<(Completion, IoVecMut), OrderError> {
        self.owner.quiet().await;
        let timing = self.options.timing;
        // When it failed first, and what it was held back since.
        let mut failing_since: Option<Instant> = None;
        let mut avoided = None;
        let mut damaged = 0;
        let mut pause = AGAIN_FIRST;
        loop {
            let path = self.path(Some(order), avoided).await;
            let (at, controller) = path.map_err(OrderError::Block)?;
            let Some(queue) = controller.queue() else { continue };
            let Some(place) = while_open(queue, queue.place()).await else { continue };
            // It may have waited.
            if !self.paths[at].is_usable() || !controller.is_open() {
                continue;
            }
            if let Some(change) = &order.change
                && let Some(blocked) = change.blocked()
            {
                drop(place);
                self.held_back.set(self.held_back.get() + 1);
                let begun = reactor::now();
                let is_over = || self.is_over_for(order).then_some(());
                select(pin!(change.wait(blocked)), pin!(self.changed.until(is_over))).await;
                failing_since = failing_since.map(|since| since + begun.elapsed());
                continue;
            }
            let losses = self.losses();
            let request = Request {
                command: order.command,
                from: order.from.clone(),
                into,
                change: order.change.clone(),
                limit: Some(timing.limit_of(order.command.opcode())),
            };
            let answered = queue.submit(place, request).await;
            let Answered { into: back, outcome } = answered.expect("every command is answered");
            into = back;
            let is_flushed = outcome.as_ref().is_ok_and(|it| it.status.is_success())
                && order.command.opcode() == IoOpcode::Flush as u8;
            if is_flushed {
                // After it nothing is kept; what this path does not tell of others may.
                self.hear_out(order).await;
            }
            let last_error = match outcome {
                Ok(completion) => match self.verdict(completion.status, order, &controller).await {
                    // The target may have lost what it had confirmed before anybody looked at this; so what was read may be older as well.
                    // And what failed may have failed for that.
                    Verdict::Done | Verdict::Failed(_)
                        if losses != self.losses()
                            || !controller.notices.tell_of_no_change()
                            || is_flushed
                                && self.paths.iter().any(|it| self.may_have_changed(it)) =>
                    {
                        BlockError::Gone
                    }
                    Verdict::Done => return Ok((completion, into)),
                    // Over this path the owner may not have been registered any more, or not yet again, when the target looked at it.
                    Verdict::Conflict
                        if losses != self.losses()
                            || !controller.notices.tell_of_no_change()
                            || !self.paths[at].is_whole.get() =>
                    {
                        BlockError::Gone
                    }
                    Verdict::Conflict => {
                        if order.is_for_owners() {
                            self.was_refused();
                        }
                        return Err(OrderError::Conflict);
                    }
                    Verdict::Failed(error) => return Err(OrderError::Block(error)),
                    Verdict::NotHere => {
                        self.paths[at].standing.set(Standing::Unusable);
                        if !completion.status.is_of_path() {
                            self.was_absent();
                        }
                        self.has_changed();
                        self.paths[at].look.notify_all();
                        // It says so again and again, and otherwise when it is asked.
                        if avoided == Some(at) {
                            reactor::sleep(pause).await;
                            pause = (pause * 2).min(AGAIN_MAX);
                        }
                        avoided = Some(at);
                        BlockError::Gone
                    }
                    Verdict::Again => {
                        if completion.status.is(Status::TRANSIENT_TRANSPORT) {
                            self.tell_of_damage(at);
                        }
                        avoided = Some(at);
                        reactor::sleep(pause).await;
                        pause = (pause * 2).min(AGAIN_MAX);
                        let is_out_of_reach = completion.status.is(Status::NOT_READY)
                            || completion.status.is(Status::TRANSIENT_TRANSPORT);
                        // Otherwise it may be these blocks.
                        match is_out_of_reach {
                            true => BlockError::Gone,
                            false => BlockError::Io { errno: libc::EIO },
                        }
                    }
                },
                Err(Unanswered::Lost) => BlockError::Gone,
                Err(Unanswered::Damaged) => {
                    avoided = Some(at);
                    damaged += 1;
                    self.tell_of_damage(at);
                    // The drive is as good as before: it is out of reach.
                    if damaged == DAMAGED_MAX {
                        return Err(OrderError::Block(BlockError::Gone));
                    }
                    reactor::sleep(pause).await;
                    pause = (pause * 2).min(AGAIN_MAX);
                    BlockError::Gone
                }
            };
            self.resent.set(self.resent.get() + 1);
            let since = *failing_since.get_or_insert_with(reactor::now);
            if since.elapsed() > timing.gone_after {
                return Err(OrderError::Block(last_error));
            }
        }
    }

    /// What comes after a status. A namespace that is there, and not at this controller, may be told of as a field that is wrong (Base, 3.2.1.4).
    async fn verdict(
        &self,
        status: Status,
        order: &Order,
        controller: &Controller<N::Stream>,
    ) -> Verdict {
        let verdict = Verdict::of(status, order.asked);
        let may_be_absent =
            matches!(verdict, Verdict::Failed(_)) && status.is(Status::INVALID_FIELD);
        let is_absent = may_be_absent
            && matches!(self.look_at(controller).await, Err(ConnectError::Absent { .. }));
        if is_absent { Verdict::NotHere } else { verdict }
    }

    fn tell_of_damage(&self, at: usize) {
        let path = &self.paths[at];
        path.damaged_at.set(Some(reactor::now()));
        if !path.has_told_of_damage.replace(true) {
            let (subsystem, address) = (&self.subsystem, &path.place);
            let what = "data arrive damaged over a path, and are sent again: look at its network (told once)";
            tracing::warn!(%subsystem, %address, "{what}");
        }
    }

    /// Over a path the target may have told that the namespace has changed, and nobody has looked at that.
    fn may_have_changed(&self, path: &Path<N::Stream>) -> bool {
        let tells = |it: &Rc<Controller<_>>| it.notices.may_name(self.number());
        !path.is_stray.get() && path.controller.borrow().as_ref().is_some_and(tells)
    }

    /// Waits until it is known over every path which namespaces have changed, of which it was told, and heeds that: whoever looks after the
    /// path may be busy with it.
    async fn hear_out(&self, order: &Order) {
        loop {
            let changed = self.changed.changed();
            let telling = self.paths.iter().find(|path| self.may_have_changed(path));
            let telling = telling.and_then(|path| path.controller.borrow().clone());
            let Some(controller) = telling.filter(|_| !self.is_over_for(order)) else { return };
            select(pin!(controller.notices.are_known()), pin!(changed)).await;
            if controller.notices.names_once(self.number()) {
                self.was_absent();
            }
        }
    }

    /// Counts how often something that was confirmed may have been lost, as far as is known.
    fn losses(&self) -> (u64, u64) {
        (self.era.get(), self.absences.get())
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

//! The life of a path: it is connected, looked at and told of, until it is not, and then again.

use super::super::controller::{ConnectError, Controller, Stage};
use super::super::host::{HostId, number_of};
use super::super::options::Network;
use super::super::pulse;
use super::{Path, Paths, Standing};
use futures_util::future::{Either, select};
use levada_base::reactor;
use std::future::pending;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// A path that does not reach the namespace is looked at again so often.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The same of one that waits for what its owner is about to leave at the drive.
const LOOK_SOON: Duration = Duration::from_millis(100);
/// A controller that lasted so long was a good one: the next try comes soon.
const LASTED: Duration = Duration::from_secs(5);
/// Connecting, or a look, may take so many times as long as a step of it,
const STEPS_MAX: u32 = 10;
/// and a controller says that it takes no longer than that to become ready (CAP.TO).
const READY_MAX: Duration = Duration::from_millis(500 * 255);

impl<N: Network> Paths<N> {
    /// Keeps a path connected.
    pub(super) async fn keep_up(self: Rc<Self>, at: usize) {
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
                // That is another drive.
                && !path.is_stray.get()
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
}

//! What a host is told without having asked at that moment: asynchronous events (Base, 5.2).
//!
//! What always holds: an event that the host wants to know is told once a request for it is there; the same one again only after the
//! host has read the page that it is about. A request that was aborted takes no event along.

use crate::reservation_log::ReservationLog;
use levada_base::sync::oneshot;
use levada_nvme::identify::{EVENT_REQUESTS_MAX, Events};
use levada_nvme::log::Event;
use levada_nvme::{ReservationNotice, ReservationNotification, Status};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};

/// Namespaces that a host is told to have changed one by one: one more than the page has room for.
const CHANGED_MAX: usize = 1025;

/// The events of a controller that its host waits for.
#[derive(Default)]
pub(crate) struct Notices {
    /// What it wants to know.
    wanted: Cell<Events>,
    requests: RefCell<VecDeque<oneshot::Sender<Event>>>,
    waiting: RefCell<BTreeSet<Event>>,
    /// Told, and its page was not read since: the same is not told again.
    masked: RefCell<BTreeSet<Event>>,
    changed: RefCell<BTreeSet<u32>>,
    reservations: RefCell<ReservationLog>,
}

impl Notices {
    /// Of what waits to be told, the host is spared what it does not want any more.
    pub fn set_wanted(&self, wanted: Events) {
        self.wanted.set(wanted);
        self.waiting.borrow_mut().retain(|event| self.wants(*event));
    }

    pub fn wanted(&self) -> Events {
        self.wanted.get()
    }

    /// A host's request, which is answered by the next event.
    pub fn request(&self) -> Result<oneshot::Receiver<Event>, Status> {
        let (sender, receiver) = oneshot::channel();
        let mut requests = self.requests.borrow_mut();
        requests.retain(oneshot::Sender::is_awaited);
        if requests.len() >= EVENT_REQUESTS_MAX {
            return Err(Status::EVENT_REQUEST_LIMIT);
        }
        requests.push_back(sender);
        drop(requests);
        self.tell();
        Ok(receiver)
    }

    pub fn namespace_changed(&self, id: u32) {
        let mut changed = self.changed.borrow_mut();
        if changed.len() < CHANGED_MAX {
            changed.insert(id);
        }
        drop(changed);
        self.happened(Event::NamespacesChanged);
    }

    fn wants(&self, event: Event) -> bool {
        let wanted = self.wanted.get();
        match event {
            Event::NamespacesChanged => wanted.contains(Events::NAMESPACES),
            Event::AnaChanged => wanted.contains(Events::ANA),
            Event::DiscoveryChanged => wanted.contains(Events::DISCOVERY),
            // Of these a host is spared by a mask of the namespace.
            Event::ReservationNotice => true,
            Event::Unreliable | Event::Temperature | Event::LowSpare => {
                wanted.intersects(Events::from_bits_retain(event.warnings().bits().into()))
            }
        }
    }

    pub fn happened(&self, event: Event) {
        if self.wants(event) && !self.masked.borrow().contains(&event) {
            self.waiting.borrow_mut().insert(event);
            self.tell();
        }
    }

    fn tell(&self) {
        let (mut waiting, mut requests) = (self.waiting.borrow_mut(), self.requests.borrow_mut());
        requests.retain(oneshot::Sender::is_awaited);
        while !waiting.is_empty()
            && let Some(request) = requests.pop_front()
            && let Some(event) = waiting.pop_first()
        {
            self.masked.borrow_mut().insert(event);
            request.send(event);
        }
    }

    /// The host has read the page of an event, and is told of the next.
    pub fn read(&self, event: Event) {
        self.masked.borrow_mut().remove(&event);
    }

    /// Something has become of the host's reservation of a namespace.
    pub fn reservation(&self, namespace: u32, notice: ReservationNotice) {
        self.reservations.borrow_mut().add(namespace, notice);
        self.happened(Event::ReservationNotice);
    }

    /// The next page of what has become of reservations. Read for good, the host is told of the one behind it.
    pub fn read_reservation(&self, keeps: bool) -> Option<ReservationNotification> {
        let page = self.reservations.borrow_mut().read(keeps);
        if !keeps {
            self.read(Event::ReservationNotice);
            if !self.reservations.borrow().is_empty() {
                self.happened(Event::ReservationNotice);
            }
        }
        page
    }

    /// The controller is reset: whoever uses it next has been told nothing yet. Requests go with the admin queue, which stays.
    pub fn reset(&self) {
        self.wanted.take();
        self.waiting.take();
        self.masked.take();
        self.changed.take();
        self.reservations.take();
    }

    /// Namespaces that have changed since this was asked; forgotten then, unless `keeps`.
    pub fn changed(&self, keeps: bool) -> Vec<u32> {
        let mut changed = self.changed.borrow_mut();
        let all = changed.iter().copied().collect();
        if !keeps {
            changed.clear();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use levada_nvme::log::Warnings;

    #[test]
    fn an_event_is_told_once_until_its_page_is_read() {
        Reactor::simulated(0).block_on(async {
            let notices = Notices::default();
            notices.namespace_changed(1);
            let first = notices.request().expect("room");
            notices.set_wanted(Events::NAMESPACES);
            notices.namespace_changed(2);
            assert_eq!(first.await.ok(), Some(Event::NamespacesChanged));
            let second = notices.request().expect("room");
            notices.namespace_changed(3);
            assert_eq!(notices.changed(true), [1, 2, 3]);
            assert_eq!(notices.changed(false), [1, 2, 3]);
            assert!(notices.changed(false).is_empty());
            notices.read(Event::NamespacesChanged);
            notices.namespace_changed(4);
            assert_eq!(second.await.ok(), Some(Event::NamespacesChanged));
            let requests: Vec<_> = (0..EVENT_REQUESTS_MAX).map(|_| notices.request()).collect();
            assert!(requests.iter().all(Result::is_ok) && notices.request().is_err());
            // Aborted, they leave room, and the next event to others.
            drop(requests);
            let third = notices.request().expect("room");
            notices.read(Event::NamespacesChanged);
            notices.namespace_changed(5);
            assert_eq!(third.await.ok(), Some(Event::NamespacesChanged));
            // Of warnings those that it asked for.
            notices.set_wanted(Events::BACKUP);
            for event in Event::of_warnings(Warnings::SPARE | Warnings::READ_ONLY) {
                notices.happened(event);
            }
            let fourth = notices.request().expect("room");
            assert_eq!(fourth.await.ok(), Some(Event::Unreliable));
        });
    }

    /// What is told next is that discovery has changed, or nothing was told before that.
    async fn hears_of_discovery_alone(notices: &Notices) {
        notices.set_wanted(Events::DISCOVERY);
        let request = notices.request().expect("room");
        notices.happened(Event::DiscoveryChanged);
        assert_eq!(request.await.ok(), Some(Event::DiscoveryChanged));
        notices.read(Event::DiscoveryChanged);
    }

    #[test]
    fn what_is_not_wanted_any_more_is_not_told() {
        Reactor::simulated(0).block_on(async {
            let notices = Notices::default();
            notices.set_wanted(Events::NAMESPACES | Events::DISCOVERY | Events::TEMPERATURE);
            notices.namespace_changed(1);
            notices.happened(Event::Temperature);
            hears_of_discovery_alone(&notices).await;
            // Wanted again, it is told when it happens again.
            notices.set_wanted(Events::NAMESPACES);
            let request = notices.request().expect("room");
            notices.namespace_changed(2);
            assert_eq!(request.await.ok(), Some(Event::NamespacesChanged));
            assert_eq!(notices.changed(true), [1, 2]);
        });
    }

    #[test]
    fn after_a_reset_nothing_was_told_and_nothing_waits() {
        Reactor::simulated(0).block_on(async {
            let notices = Notices::default();
            // One event was told and its page not read, others wait.
            let request = notices.request().expect("room");
            notices.set_wanted(Events::TEMPERATURE | Events::NAMESPACES);
            notices.happened(Event::Temperature);
            assert_eq!(request.await.ok(), Some(Event::Temperature));
            notices.namespace_changed(1);
            notices.reservation(1, ReservationNotice::RegistrationPreempted);
            notices.reset();
            assert!(notices.wanted().is_empty() && notices.changed(true).is_empty());
            assert!(notices.read_reservation(true).is_none());
            hears_of_discovery_alone(&notices).await;
            notices.set_wanted(Events::TEMPERATURE);
            let request = notices.request().expect("room");
            notices.happened(Event::Temperature);
            assert_eq!(request.await.ok(), Some(Event::Temperature));
        });
    }
}

//! What a controller tells of by itself, with asynchronous events (NVMe Base 2.0, 5.2).
//!
//! What always holds: the target can tell of more as soon as it has told of something, for as long as the controller is there. What an
//! event is about is in a log page, which may be late or refused: meanwhile others are heard of.

use super::controller::{ConnectError, Controller};
use super::queue::{Queue, QueueError, Request};
use futures_util::future::select;
use levada_base::reactor::{self, Instant};
use levada_base::stream::ByteStream;
use levada_base::sync::Notify;
use levada_nvme::identify::listed_namespaces;
use levada_nvme::log::{Event, LogPage};
use levada_nvme::{AdminOpcode, Command};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::BitOr;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Data of the page that an event tells of: enough for the target to tell of the next.
const PAGE_BYTES: usize = 512;
/// Of the page of changed namespaces: Linux's target gives all of it or nothing.
const CHANGED_BYTES: usize = 4096;
/// In place of identifiers, when there were too many.
const TOO_MANY_CHANGED: u32 = u32::MAX;
/// Before events are asked for again, if they were refused.
const LISTEN_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// What an event is about is asked for so often.
const PAGE_TRIES: u32 = 3;

/// What the target told of, and nobody has looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub ana: bool,
    pub namespaces: bool,
    /// A drive warns, maybe another one.
    pub warnings: bool,
    /// Another host has changed who may write.
    pub owner: bool,
}

impl Told {
    fn of(event: Option<Event>) -> Self {
        let mut told = Self::default();
        match event {
            Some(Event::AnaChanged) => told.ana = true,
            Some(Event::NamespacesChanged) => told.namespaces = true,
            Some(Event::Unreliable | Event::Temperature | Event::LowSpare) => told.warnings = true,
            Some(Event::ReservationNotice) => told.owner = true,
            Some(Event::DiscoveryChanged) | None => {}
        }
        told
    }
}

impl BitOr for Told {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self {
            ana: self.ana | other.ana,
            namespaces: self.namespaces | other.namespaces,
            warnings: self.warnings | other.warnings,
            owner: self.owner | other.owner,
        }
    }
}

/// An event, and the page that says more.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Notice {
    /// `None`: of a kind that is not known here.
    event: Option<Event>,
    page: u8,
}

impl Notice {
    /// Of what an asynchronous event request was answered with: the page is in bits 23:16.
    fn of(result: u64) -> Self {
        Self { event: Event::of(result), page: (result >> 16) as u8 }
    }

    fn names_namespaces(self) -> bool {
        self.event == Some(Event::NamespacesChanged)
    }
}

fn names(changed: &[u32], namespace: u32) -> bool {
    changed.iter().any(|id| [namespace, TOO_MANY_CHANGED].contains(id))
}

/// See the module.
#[derive(Default)]
pub(crate) struct Notices {
    told: Cell<Told>,
    /// Whose pages are to be read: until then the target tells of nothing more of their kind.
    unread: RefCell<VecDeque<Notice>>,
    /// The target is being asked which namespaces have changed.
    is_asking: Cell<bool>,
    /// That was known the last time, since when it is not.
    unknown_since: Cell<Option<Instant>>,
    /// Namespaces that were changed, as the target told, since somebody looked; `None`: it was not asked yet, or does not say.
    changed: RefCell<Option<Vec<u32>>>,
    event: Notify,
}

impl Notices {
    /// What was told since the last call.
    pub fn take(&self) -> Told {
        self.told.take()
    }

    /// Nobody was told that a namespace may have changed.
    pub fn tell_of_no_change(&self) -> bool {
        !self.told.get().namespaces && self.is_known()
    }

    /// Whether `namespace` is among those that were changed since the last call. One that does not say which they were has changed any.
    pub fn has_changed(&self, namespace: u32) -> bool {
        self.changed.take().is_none_or(|all| names(&all, namespace))
    }

    /// Whether `namespace` may be among those of which it was told, and nobody has looked since.
    pub fn may_name(&self, namespace: u32) -> bool {
        let named = || self.changed.borrow().as_ref().is_none_or(|all| names(all, namespace));
        !self.is_known() || self.told.get().namespaces && named()
    }

    /// Whether the target has said that `namespace` is among them. It is not any more then, also to who has not looked yet.
    pub fn names_once(&self, namespace: u32) -> bool {
        let is_named = self.changed.borrow().as_ref().is_some_and(|all| names(all, namespace));
        if is_named {
            self.changed.replace(Some(Vec::new()));
        }
        is_named
    }

    /// How many it has taken note of.
    #[cfg(test)]
    pub fn changed(&self) -> usize {
        self.changed.borrow().as_ref().map_or(0, Vec::len)
    }

    /// Waits until something is told.
    pub async fn come(&self) {
        self.event.until(|| (self.told.get() != Told::default()).then_some(())).await;
    }

    /// Waits until it is known which namespaces have changed, of which it was told.
    pub async fn are_known(&self) {
        self.event.until(|| self.is_known().then_some(())).await;
    }

    fn is_known(&self) -> bool {
        !self.is_asking.get()
            && !self.unread.borrow().iter().any(|notice| notice.names_namespaces())
    }

    fn hear(&self, notice: Notice) {
        // At once: from now on a namespace cannot be called untouched.
        self.told.set(self.told.get() | Told::of(notice.event));
        let mut unread = self.unread.borrow_mut();
        if !unread.contains(&notice) {
            unread.push_back(notice);
        }
        if notice.names_namespaces() {
            let since = self.unknown_since.get().unwrap_or_else(reactor::now);
            self.unknown_since.set(Some(since));
        }
        self.event.notify_all();
    }

    /// The next that names namespaces, or that does not.
    async fn next_unread(&self, of_namespaces: bool) -> Notice {
        let next = || {
            let mut unread = self.unread.borrow_mut();
            let at = unread.iter().position(|notice| notice.names_namespaces() == of_namespaces)?;
            unread.remove(at)
        };
        let notice = self.event.until(next).await;
        if of_namespaces {
            self.is_asking.set(true);
        }
        notice
    }

    /// The page of `notice` was read, or nothing like it came.
    fn have_read(&self, notice: Notice, page: Option<&[u8; CHANGED_BYTES]>) {
        if notice.names_namespaces() {
            let all = page.map_or(vec![TOO_MANY_CHANGED], |page| listed_namespaces(page).collect());
            self.have_changed(all);
            self.is_asking.set(false);
            if self.is_known() {
                self.unknown_since.set(None);
            }
        }
        // Who has looked since it was told of may have seen how it was before.
        self.told.set(self.told.get() | Told::of(notice.event));
        self.event.notify_all();
    }

    /// Takes note of namespaces that were changed. So many at most as one page tells of, whoever tells of more and more.
    fn have_changed(&self, namespaces: Vec<u32>) {
        let mut changed = self.changed.borrow_mut();
        let all = changed.get_or_insert_default();
        all.extend(namespaces);
        if all.len() > CHANGED_BYTES / size_of::<u32>() {
            *all = vec![TOO_MANY_CHANGED];
        }
    }
}

/// Takes note of events, until there are none any more. A target that does not say within `limit` which namespaces have changed is left:
/// over other paths a flush waits for that.
pub(super) async fn listen<S: ByteStream + 'static>(
    admin: Rc<Queue<S>>,
    controller: Weak<Controller<S>>,
    notices: Rc<Notices>,
    limit: Duration,
) {
    // One that is late or refused holds up nothing else: until it is known which namespaces have changed none of them is used.
    let read = |limit| read(&admin, &controller, &notices, limit);
    let (of_namespaces, of_others) = (pin!(read(Some(limit))), pin!(read(None)));
    let hearing = pin!(hear(&admin, &controller, &notices));
    select(hearing, select(of_namespaces, of_others)).await;
}

async fn hear<S: ByteStream + 'static>(
    admin: &Rc<Queue<S>>,
    controller: &Weak<Controller<S>>,
    notices: &Notices,
) {
    loop {
        let command = Command::new(AdminOpcode::AsynchronousEventRequest as u8, 0, 0);
        let forever = Request { limit: None, ..Request::new(command, Duration::ZERO) };
        let Ok(completion) = admin.run(forever).await.outcome else { return };
        if completion.status.is_success() {
            notices.hear(Notice::of(completion.result));
            continue;
        }
        // What changes is noticed all the same, when a command is refused.
        let status = completion.status;
        if let Some(controller) = controller.upgrade() {
            let subsystem = &controller.identity.subsystem;
            tracing::warn!(%subsystem, %status, "a target refuses to tell of changes");
        }
        if status.do_not_retry {
            // What was told before is still asked about.
            admin.over().await;
            return;
        }
        reactor::sleep(LISTEN_AGAIN_AFTER).await;
    }
}

/// Reads the pages that are told of, so that the target tells of the next: those that name namespaces, within `limit`, or without one the
/// others.
async fn read<S: ByteStream + 'static>(
    admin: &Rc<Queue<S>>,
    controller: &Weak<Controller<S>>,
    notices: &Notices,
    limit: Option<Duration>,
) {
    loop {
        let notice = notices.next_unread(limit.is_some()).await;
        let Some(controller) = controller.upgrade() else { return };
        let Notice { event, page } = notice;
        let bytes = match page {
            page if page == LogPage::ChangedNamespaces as u8 => CHANGED_BYTES,
            _ => PAGE_BYTES,
        };
        let reading = async {
            for _ in 1..PAGE_TRIES {
                match controller.log_page(page, u32::MAX, 0, bytes).await {
                    Err(ConnectError::Refused { status, .. }) if !status.do_not_retry => {}
                    read => return read,
                }
                reactor::sleep(LISTEN_AGAIN_AFTER).await;
            }
            controller.log_page(page, u32::MAX, 0, bytes).await
        };
        let read = match limit {
            Some(limit) => {
                let since = notices.unknown_since.get().unwrap_or_else(reactor::now);
                reactor::timeout((since + limit).since(reactor::now()), reading).await
            }
            None => Ok(reading.await),
        };
        if admin.end().is_some() {
            return;
        }
        // A drive's health it may keep to itself.
        let is_needed = event.is_some() && !Told::of(event).warnings;
        if is_needed && matches!(read, Err(_) | Ok(Err(ConnectError::Refused { .. }))) {
            // Until it is read nothing of its kind is told any more. The next controller is told everything.
            let subsystem = &controller.identity.subsystem;
            tracing::warn!(%subsystem, page, "a target does not say what has changed, and is left");
            return admin.close(QueueError::Closed).await;
        }
        let page = read.as_ref().ok().and_then(|read| read.as_ref().ok()?.first_chunk());
        notices.have_read(notice, page);
    }
}

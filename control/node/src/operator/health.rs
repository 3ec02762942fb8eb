//! Drives are asked for their health once a minute, and before a status is told.
//!
//! What always holds: one look at a time, and no drive that does not answer holds up a status for long.

use super::Operator;
use crate::health::Record;
use futures_util::future::{join_all, select};
use levada_base::reactor::{self, Instant};
use levada_base::sync::Notify;
use levada_device::Drive;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Between looks that nobody asks for.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// How long a drive may take to tell.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// What was told so lately is not asked again.
const FRESH: Duration = Duration::from_millis(500);
/// How long a status waits for a look.
const STATUS_WAITS: Duration = Duration::from_millis(500);

/// What is known of the health of the drives.
#[derive(Default)]
pub(super) struct Health {
    /// By drive; without those that do not tell.
    records: RefCell<BTreeMap<String, Record>>,
    /// When a look ended last. `None`: nobody looks, or not yet.
    looked: Cell<Option<Instant>>,
    has_looked: Notify,
    wanted: Notify,
}

impl Health {
    pub fn with<T>(&self, drive: &str, what: impl FnOnce(&Record) -> T) -> Option<T> {
        self.records.borrow().get(drive).map(what)
    }
}

impl Operator {
    /// Looks after the health of the drives for as long as the caller's group lives.
    pub async fn watch_health(self: Rc<Self>) {
        loop {
            let wanted = self.health.wanted.changed();
            self.look_at_health().await;
            self.health.looked.set(Some(reactor::now()));
            self.health.has_looked.notify_all();
            select(pin!(wanted), pin!(reactor::sleep(LOOK_EVERY))).await;
        }
    }

    /// Has drives looked at, unless that was done just now.
    pub(super) async fn refresh_health(&self) {
        let Some(last) = self.health.looked.get().filter(|last| last.elapsed() > FRESH) else {
            return;
        };
        self.health.wanted.notify_all();
        let is_done = || (self.health.looked.get() > Some(last)).then_some(());
        // What was told before is good enough where a drive does not answer.
        let _ = reactor::timeout(STATUS_WAITS, self.health.has_looked.until(is_done)).await;
    }

    async fn look_at_health(&self) {
        let in_use: BTreeMap<String, Rc<Drive>> = {
            let drives = self.drives.borrow();
            let open = drives.iter().filter_map(|(name, (_, found))| {
                Some((
                    name.clone(),
                    found.as_ref().ok().filter(|drive| !drive.is_failed())?.clone(),
                ))
            });
            open.collect()
        };
        // Another drive in the place of one that is not used any more begins anew.
        self.health.records.borrow_mut().retain(|name, _| in_use.contains_key(name));
        join_all(in_use.iter().map(|(name, drive)| self.look_at(name, drive))).await;
    }

    async fn look_at(&self, name: &str, drive: &Drive) {
        let device = &drive.device().info().name;
        let look = reactor::timeout(ANSWER_LIMIT, self.source.look_at_health(device));
        let Ok(Some(page)) = look.await else { return };
        let mut records = self.health.records.borrow_mut();
        let before = records.get(name);
        let worn_percent = self.cluster.file.health.used_percent;
        let record = Record::after(before, page, reactor::now(), worn_percent);
        record.log(before, name);
        records.insert(name.to_owned(), record);
    }
}

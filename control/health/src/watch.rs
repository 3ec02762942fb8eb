//! Drives are asked for their health once a minute, before a status is told, and when one of them says by itself that it has something to warn of.
//!
//! What always holds: one look at a time, and no drive that does not answer holds up a status for long.

use crate::record::Record;
use futures_util::future::{join_all, poll_immediate, select, select_all};
use levada_base::reactor::{self, Instant};
use levada_base::sync::Notify;
use levada_device::HealthPage;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::pending;
use std::pin::pin;
use std::time::Duration;

/// Between looks that nobody asks for.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// How long a drive may take to tell.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// What was told so lately is not asked again.
const FRESH: Duration = Duration::from_millis(500);
/// How long a status waits for a look.
const STATUS_WAITS: Duration = Duration::from_millis(500);

/// What is known of the health of somebody's drives.
#[derive(Default)]
pub struct Watch {
    /// By drive; without those that do not tell.
    records: RefCell<BTreeMap<String, Record>>,
    /// When a look ended last. `None`: nobody looks, or not yet.
    looked: Cell<Option<Instant>>,
    has_looked: Notify,
    wanted: Notify,
}

impl Watch {
    /// What is known of a drive, if it tells.
    pub fn with<T>(&self, drive: &str, what: impl FnOnce(&Record) -> T) -> Option<T> {
        self.records.borrow().get(drive).map(what)
    }

    /// Looks after the health of the drives for as long as this is polled: those `in_use` by their names, each of which `ask` has tell, and
    /// whose future of `warns` completes when it warns by itself. One of which `worn_percent` is used is worn.
    pub async fn run<D>(
        &self,
        in_use: impl Fn() -> BTreeMap<String, D>,
        ask: impl AsyncFn(&D) -> Option<HealthPage>,
        warns: impl AsyncFn(&D),
        worn_percent: u8,
    ) {
        loop {
            let wanted = self.wanted.changed();
            let drives = in_use();
            let mut warned = pin!(async {
                let warnings: Vec<_> =
                    drives.values().map(|drive| Box::pin(warns(drive))).collect();
                match warnings.is_empty() {
                    true => pending().await,
                    false => _ = select_all(warnings).await,
                }
                // Drives of one enclosure warn together, and one that never stops is not asked without end.
                reactor::sleep(FRESH).await;
            });
            // It listens before drives are asked, so that nothing they say meanwhile is missed.
            let _not_yet = poll_immediate(warned.as_mut()).await;
            // Another drive in the place of one that is not used any more begins anew.
            self.records.borrow_mut().retain(|name, _| drives.contains_key(name));
            let looks = drives.iter().map(async |(name, drive)| {
                if let Ok(Some(page)) = reactor::timeout(ANSWER_LIMIT, ask(drive)).await {
                    self.note(name, page, worn_percent);
                }
            });
            join_all(looks).await;
            self.looked.set(Some(reactor::now()));
            self.has_looked.notify_all();
            let (wanted, due) = (pin!(wanted), pin!(reactor::sleep(LOOK_EVERY)));
            select(select(wanted, due), warned).await;
        }
    }

    fn note(&self, name: &str, page: HealthPage, worn_percent: u8) {
        let mut records = self.records.borrow_mut();
        let before = records.get(name);
        let record = Record::after(before, page, reactor::now(), worn_percent);
        record.log(before, name);
        records.insert(name.to_owned(), record);
    }

    /// Has drives looked at, unless that was done just now.
    pub async fn refresh(&self) {
        let Some(last) = self.looked.get().filter(|last| last.elapsed() > FRESH) else {
            return;
        };
        self.wanted.notify_all();
        let is_done = || (self.looked.get() > Some(last)).then_some(());
        // What was told before is good enough where a drive does not answer.
        let _ = reactor::timeout(STATUS_WAITS, self.has_looked.until(is_done)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use std::rc::Rc;

    #[test]
    fn drives_are_asked_once_a_minute_and_when_somebody_wants_to_know() {
        Reactor::simulated(5).block_on(async {
            let (watch, asked) = (Rc::new(Watch::default()), Rc::new(Cell::new(0)));
            let (looking, count) = (Rc::clone(&watch), Rc::clone(&asked));
            let alarm = Rc::new(Notify::default());
            let rings = Rc::clone(&alarm);
            reactor::spawn(async move {
                let in_use = || BTreeMap::from([("well".to_owned(), 3), ("mute".to_owned(), 0)]);
                let ask = async |drive: &u8| {
                    if *drive == 0 {
                        std::future::pending::<()>().await;
                    }
                    count.set(count.get() + 1);
                    Some(HealthPage { used_percent: *drive, ..HealthPage::default() })
                };
                looking.run(in_use, ask, async |_: &u8| rings.changed().await, 90).await;
            });
            reactor::sleep(ANSWER_LIMIT + FRESH * 2).await;
            assert_eq!(asked.get(), 1);
            assert_eq!(watch.with("well", |record| record.shown().used_percent), Some(3));
            assert_eq!(watch.with("mute", |_| ()), None);
            let begun = reactor::now();
            watch.refresh().await;
            assert_eq!(
                (asked.get(), begun.elapsed()),
                (2, STATUS_WAITS),
                "the mute one is not waited for"
            );
            reactor::sleep(ANSWER_LIMIT + LOOK_EVERY).await;
            assert_eq!(asked.get(), 3);
            reactor::sleep(ANSWER_LIMIT).await;
            for _ in 0..100 {
                alarm.notify_all();
                reactor::sleep(FRESH / 100).await;
            }
            reactor::sleep(FRESH).await;
            assert_eq!(asked.get(), 4, "asked at once, and not for each warning");
        });
    }
}

//! Observers: somebody who is told of changes of rows, old value and new, in the step that makes them.
//!
//! What always holds: while there is an observer, no transaction changes a row that concerns it without knowing its old
//! value; a row that was to be written unread is fetched first. Rows that go past the transactions (`C`, `R` and `M`, and what
//! a recovery writes) are not told.

use crate::cache::Cache;
use crate::service::MetaService;
use levada_base::planted;
use levada_kv::Bytes;
use std::rc::Rc;

/// See the module.
pub(crate) trait Observer {
    /// Whether it must be told of a change of this row.
    fn is_concerned(&self, key: &[u8]) -> bool;
    /// A row that concerns it has changed. Called in the step that changes it: no waiting here.
    fn changed(&self, key: &[u8], old: Option<&[u8]>, new: Option<&[u8]>);
}

/// Observing, as long as this lives.
pub(crate) struct Observing<'a>(&'a MetaService);

impl Drop for Observing<'_> {
    fn drop(&mut self) {
        self.0.observer.take();
    }
}

type Writes = [(Bytes, Option<Bytes>)];

impl MetaService {
    /// Tells an observer of changes from now on; nothing when there is one already.
    pub(crate) fn observe(&self, observer: Rc<dyn Observer>) -> Option<Observing<'_>> {
        let mut held = self.observer.borrow_mut();
        if held.is_some() {
            return None;
        }
        *held = Some(observer);
        Some(Observing(self))
    }

    /// Of the rows that a transaction writes, those whose old value the observer must get and nobody has read.
    pub(crate) fn unread(&self, cache: &mut Cache, writes: &Writes) -> Vec<Bytes> {
        let observer = self.observer.borrow();
        let Some(observer) = &*observer else { return Vec::new() };
        let keys = writes.iter().map(|(key, _)| key);
        let unread = keys.filter(|key| observer.is_concerned(key) && cache.get(key).is_none());
        unread.cloned().collect()
    }

    /// Tells the observer what a batch changes, before the cache knows.
    pub(crate) fn tell(&self, cache: &mut Cache, writes: &Writes) {
        let observer = self.observer.borrow();
        let Some(observer) = &*observer else { return };
        for (key, new) in writes.iter().filter(|(key, _)| observer.is_concerned(key)) {
            let old = cache.get(key).and_then(|cached| cached.value.clone());
            if planted!("meta-removals-not-told") && new.is_none() {
                continue;
            }
            observer.changed(key, old.as_deref(), new.as_deref());
        }
    }
}

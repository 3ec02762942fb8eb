//! The objects of a log that goes on, in the order of their names: what the index has, laid over by what is on its way
//! there.
//!
//! What always holds: a page is of the moment in which it was read, so a listing of several pages is of no one moment; an
//! object that is there all the time is met. Memory is a page.

use crate::LogError;
use crate::fsck::{IndexedObject, object_of};
use crate::log::{Inner, ObjectLog};
use crate::object::Change;
use crate::rows::{OBJECTS, ObjectRow};
use levada_base::ids::ObjectId;
use levada_base::planted;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

const PAGE_ROWS: usize = 1024;

/// See the module.
pub struct ListedObjects {
    log: ObjectLog,
    /// Behind this key; `None`: all were read.
    from: Option<Vec<u8>>,
    page: VecDeque<IndexedObject>,
}

impl ObjectLog {
    /// All objects, as they are when each page of them is read.
    #[must_use]
    pub fn list(&self) -> ListedObjects {
        ListedObjects { log: self.clone(), from: Some(vec![OBJECTS]), page: VecDeque::new() }
    }
}

impl ListedObjects {
    /// The next one.
    ///
    /// # Errors
    ///
    /// When the log stopped.
    pub async fn next(&mut self) -> Result<Option<IndexedObject>, LogError> {
        while self.page.is_empty()
            && let Some(from) = self.from.take()
        {
            let to = [OBJECTS + 1];
            let bounds = (Bound::Excluded(&from[..]), Bound::Excluded(&to[..]));
            let log = &self.log.0;
            log.check()?;
            let page = log.store.scan_page(bounds.0, bounds.1, PAGE_ROWS).await?;
            // From here on in the step in which the store shows the page.
            let mut objects = BTreeMap::new();
            for (key, value) in &page.rows {
                let Some(id) = object_of(key) else { continue };
                let size = ObjectRow::decode(value).ok().map(|row| row.size);
                objects.insert(id.to_key(), size);
            }
            log.lay_over(&mut objects, &from, page.upto.as_deref());
            self.page = objects
                .into_iter()
                .map(|(key, size)| IndexedObject { id: ObjectId::from_key(key), size })
                .collect();
            self.from = page.upto.map(|upto| upto.to_vec());
        }
        Ok(self.page.pop_front())
    }
}

type Sizes = BTreeMap<[u8; ObjectId::KEY_BYTES], Option<u64>>;

impl Inner {
    /// Brings objects whose rows lie behind `from`, and up to `upto`, to what is true now.
    fn lay_over(&self, objects: &mut Sizes, from: &[u8], upto: Option<&[u8]>) {
        if planted!("log-list-of-index-alone") {
            return;
        }
        let state = self.state.borrow();
        let closed = state.closed.iter().flat_map(|stripe| &stripe.pending);
        let open = state.open.iter().flatten().flat_map(|stripe| &stripe.pending);
        for pending in closed.chain(open) {
            match pending.change {
                Change::Write(_)
                | Change::Truncate { .. }
                | Change::Punch { .. }
                | Change::Delete => {}
                // Copies change nothing here, and what they know of an object may be nothing at all.
                Change::Relocate { .. } | Change::Keep { .. } => continue,
            }
            let key = ObjectRow::key(pending.object.id);
            if &key[..] <= from || upto.is_some_and(|upto| &key[..] > upto) {
                continue;
            }
            let now = pending.object.now.borrow();
            let key = pending.object.id.to_key();
            if now.exists {
                objects.insert(key, Some(now.size));
            } else {
                objects.remove(&key);
            }
        }
    }
}

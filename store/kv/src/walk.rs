//! A walk over the rows of a range while they change, page by page, for sums over all of them.
//!
//! A walk holds no snapshot: the engine could free no page meanwhile, and its space is bounded. Instead
//! whoever applies a batch tells the walker of each change of a key that the walk [has passed](Walk::has_passed),
//! old value and new, in the step in which it applies it. A change of a key that lies ahead is not told: the
//! walk will meet it.
//!
//! What always holds: what the walker added up, told changes included, is the state at this very moment of
//! the rows up to where the walk stands; so at its end that of all rows of the range then. For that the rows
//! of a page are taken in, and the walk moves, in the one step in which the store shows the page.

use crate::store::{Bytes, KvError, Store};
use levada_base::{planted, reactor};
use std::cell::RefCell;
use std::ops::Bound;

/// Rows of a page.
const PAGE_ROWS: usize = 1024;

/// See the module.
#[derive(Debug)]
pub struct Walk {
    from: Vec<u8>,
    to: Option<Vec<u8>>,
    upto: RefCell<Upto>,
}

#[derive(Clone, Debug)]
enum Upto {
    /// Nothing was passed.
    Start,
    /// This key and all before it.
    Key(Bytes),
    /// The whole range.
    End,
}

impl Walk {
    /// A walk from `from` on, and up to `to` without it, or to the end of the store.
    #[must_use]
    pub fn new(from: &[u8], to: Option<&[u8]>) -> Self {
        let to = to.map(<[u8]>::to_vec);
        Self { from: from.to_vec(), to, upto: RefCell::new(Upto::Start) }
    }

    /// Goes on by a page: `take` gets its rows, of which there may be none, in the step in which the walk
    /// passes them.
    ///
    /// # Errors
    ///
    /// When the store stopped or its area fails.
    pub async fn page(
        &self,
        store: &Store,
        take: impl FnOnce(&[(Bytes, Bytes)]),
    ) -> Result<(), KvError> {
        let upto = self.upto.borrow().clone();
        let from = match &upto {
            Upto::Start => Bound::Included(&self.from[..]),
            Upto::Key(key) => Bound::Excluded(&key[..]),
            Upto::End => return Ok(()),
        };
        let to = self.to.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let page = store.scan_page(from, to, PAGE_ROWS).await?;
        take(&page.rows);
        if planted!("kv-walk-passes-late") {
            reactor::yield_now().await;
        }
        *self.upto.borrow_mut() = page.upto.map_or(Upto::End, Upto::Key);
        Ok(())
    }

    /// Whether a change of this key must be told.
    #[must_use]
    pub fn has_passed(&self, key: &[u8]) -> bool {
        let is_in_range = key >= &self.from[..] && self.to.as_deref().is_none_or(|to| key < to);
        is_in_range
            && match &*self.upto.borrow() {
                Upto::Start => false,
                Upto::Key(upto) => *key <= **upto,
                Upto::End => true,
            }
    }

    /// The key up to which everything was passed; `None` at the start and at the end.
    #[must_use]
    pub fn upto(&self) -> Option<Bytes> {
        match &*self.upto.borrow() {
            Upto::Start | Upto::End => None,
            Upto::Key(key) => Some(Bytes::clone(key)),
        }
    }

    /// Whether the whole range was passed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(*self.upto.borrow(), Upto::End)
    }
}

//! An observer: somebody who is told of the changes of the index, in the step that applies them.
//!
//! What always holds: extents and marks are told as the rows had them before, and as they have them from this step on.
//! There is one observer at a time, and without one nothing is told and nothing costs.

use crate::extents::Extent;
use crate::log::{Inner, ObjectLog};
use crate::rows::Mark;
use levada_base::ids::ObjectId;
use std::rc::Rc;

/// See the module. No waiting in any of these.
pub(crate) trait IndexObserver {
    /// The row of an extent has gone.
    fn removed(&self, object: ObjectId, offset: u64, extent: &Extent);
    /// And that of one has come.
    fn added(&self, object: ObjectId, offset: u64, extent: &Extent);
    /// Another record carries the size of an object now.
    fn mark_moved(&self, object: ObjectId, from: Mark, to: Mark);
    /// Something of an object has changed: it was there before or not, and is there now or not.
    fn changed(&self, object: ObjectId, was_there: bool, is_there: bool);
}

/// Observing, as long as this lives.
pub(crate) struct Observing<'a>(&'a Inner);

impl Drop for Observing<'_> {
    fn drop(&mut self) {
        self.0.observer.take();
    }
}

impl ObjectLog {
    /// Tells an observer of changes from now on; nothing when there is one already.
    pub(crate) fn observe(&self, observer: Rc<dyn IndexObserver>) -> Option<Observing<'_>> {
        let mut held = self.0.observer.borrow_mut();
        if held.is_some() {
            return None;
        }
        *held = Some(observer);
        Some(Observing(&self.0))
    }
}

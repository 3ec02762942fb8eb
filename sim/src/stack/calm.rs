//! Times in which the node does not crash: some workers ask for one, and crashes wait for their end.

use levada_base::sync::Notify;
use std::cell::Cell;
use std::rc::Rc;

/// See the module.
#[derive(Default)]
pub(super) struct Calm {
    wanted: Cell<u32>,
    crashing: Cell<bool>,
    over: Notify,
}

/// Somebody needs the node.
pub(super) struct Needed(Rc<Calm>);

impl Drop for Needed {
    fn drop(&mut self) {
        self.0.wanted.set(self.0.wanted.get() - 1);
        self.0.over.notify_all();
    }
}

impl Calm {
    /// The node stays until the answer is dropped; `None` while it is dead or starts.
    pub fn begin(self: &Rc<Self>) -> Option<Needed> {
        (!self.crashing.get()).then(|| {
            self.wanted.set(self.wanted.get() + 1);
            Needed(Rc::clone(self))
        })
    }

    /// Waits until nobody needs the node; from then on nobody does.
    pub async fn ends(&self) {
        self.crashing.set(true);
        loop {
            let over = self.over.changed();
            if self.wanted.get() == 0 {
                return;
            }
            over.await;
        }
    }

    /// The node serves again.
    pub fn returns(&self) {
        self.crashing.set(false);
    }
}

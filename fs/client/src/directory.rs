//! What a change told of the directory that it was made in.
//!
//! A kernel that makes a file asks for the directory's attributes right afterwards, for it no longer trusts
//! those that it keeps. The service has just had them in hand, so they come with the answer.
//!
//! What always holds: what is handed out here is no older than anything that this client was answered
//! about names or attributes of the directory. It is handed out once, with its age: other clients change
//! directories too.

use levada_base::ids::Ino;
use levada_base::reactor::{self, Instant};
use levada_wire::attr::Attr;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// See the module.
#[derive(Default)]
pub(crate) struct JustTold {
    directory: RefCell<Option<(Attr, Instant)>>,
    under_way: Cell<u32>,
    /// Changes begun, and answers seen.
    begun: Cell<u64>,
}

/// A change under way; what was told before it no longer counts, whatever becomes of it.
pub(crate) struct Changing {
    of: Rc<JustTold>,
    /// How many had begun with this one, if no other was under way.
    alone: Option<u64>,
}

impl JustTold {
    /// A change of names or attributes begins.
    pub(crate) fn begin(self: &Rc<Self>) -> Changing {
        self.forget();
        self.begun.set(self.begun.get() + 1);
        let alone = (self.under_way.get() == 0).then_some(self.begun.get());
        self.under_way.set(self.under_way.get() + 1);
        Changing { of: Rc::clone(self), alone }
    }

    pub(crate) fn forget(&self) {
        self.directory.take();
    }

    /// Something was answered about `directory`: what was told of it before may be older, and so may
    /// what a change under way is told.
    pub(crate) fn seen(&self, directory: Ino) {
        self.directory.borrow_mut().take_if(|(attr, _)| attr.ino == directory);
        self.begun.set(self.begun.get() + 1);
    }

    /// The attributes of `ino`, if they were just told, and how long ago.
    pub(crate) fn take(&self, ino: Ino) -> Option<(Attr, Duration)> {
        let (attr, at) = self.directory.borrow_mut().take_if(|(attr, _)| attr.ino == ino)?;
        Some((attr, at.elapsed()))
    }
}

impl Changing {
    /// It was answered, with the directory as it was then. Of changes that were under way together it is
    /// not known which came first.
    pub(crate) fn told(self, directory: Attr) {
        let JustTold { directory: told, begun, .. } = &*Rc::clone(&self.of);
        let was_alone = self.alone == Some(begun.get());
        drop(self);
        if was_alone {
            *told.borrow_mut() = Some((directory, reactor::now()));
        }
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        self.of.under_way.set(self.of.under_way.get() - 1);
        self.of.forget();
    }
}

//! Files that another mount writes while they are open here.
//!
//! The client says so before that mount's first write. What is opened from then on is opened uncached. What was opened before
//! stays cached for the kernel, so its pages are dropped at once, and after each READ and WRITE through it again.
//!
//! What always holds: the notice is acknowledged when the pages of before are gone, or after [`DROP_WAIT`]. The kernel waits for
//! pages that are under READ or WRITE, and such a WRITE may itself wait for the other mount to acknowledge, when both begin at
//! once.

use super::locks::Kernel;
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_client::Client;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// For so long a page is there for whoever waits for it: one that went before they have seen it would be asked for
/// again, and so on. And for so long what others write meanwhile does not show.
const SEEN: Duration = Duration::from_millis(1);

/// A drop takes some 100 us, unless pages are in use.
const DROP_WAIT: Duration = Duration::from_millis(100);

/// Drops the kernel's pages of files that become shared.
pub(super) fn listen(client: &Client, kernel: &Kernel) {
    let kernel = kernel.clone();
    client.on_shared(Rc::new(move |ino| {
        let kernel = kernel.clone();
        // Whatever is open: a mapping keeps pages beyond the close of its file.
        let dropping = reactor::spawn(async move { kernel.drop_pages(ino).await });
        Some(Box::pin(async move {
            // It goes on.
            let _ = reactor::timeout(DROP_WAIT, dropping).await;
        }))
    }));
}

/// What has just been read or written through a cached file is answered now, and dropped right after; no bytes: all of it.
pub(super) fn drop_soon(kernel: &Kernel, ino: Ino, offset: u64, bytes: u64) {
    let kernel = kernel.clone();
    let due = kernel.due.begin(ino);
    reactor::spawn(async move {
        reactor::sleep(SEEN).await;
        if kernel.due.end(ino, due) {
            kernel.drop_range(ino, offset, bytes).await;
        }
    });
}

/// The drops that are put off, by inode; each of them knows whether it has become needless.
#[derive(Default)]
pub(super) struct Due(RefCell<HashMap<Ino, Rc<Cell<bool>>>>);

impl Due {
    fn begin(&self, ino: Ino) -> Rc<Cell<bool>> {
        Rc::clone(self.0.borrow_mut().entry(ino).or_default())
    }

    /// Whether the drop is needed still.
    fn end(&self, ino: Ino, needless: Rc<Cell<bool>>) -> bool {
        let is_needed = !needless.get();
        drop(needless);
        let mut all = self.0.borrow_mut();
        if all.get(&ino).is_some_and(|those| Rc::strong_count(those) == 1) {
            all.remove(&ino);
        }
        is_needed
    }

    /// All pages are dropped now: those that are put off are needless.
    pub(super) fn all_dropped(&self, ino: Ino) {
        if let Some(needless) = self.0.borrow_mut().remove(&ino) {
            needless.set(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drop_of_all_makes_those_before_it_needless() {
        let due = Due::default();
        let (first, second) = (due.begin(Ino(7)), due.begin(Ino(7)));
        assert!(due.end(Ino(7), first));
        due.all_dropped(Ino(7));
        let (third, other) = (due.begin(Ino(7)), due.begin(Ino(8)));
        assert!(!due.end(Ino(7), second));
        due.all_dropped(Ino(9));
        assert!(due.end(Ino(7), third));
        assert!(due.end(Ino(8), other));
        assert!(due.0.borrow().is_empty());
    }
}

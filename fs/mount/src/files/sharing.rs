//! Files that another mount writes while they are open here.
//!
//! The client says so before that mount's first write. What is opened from then on is opened uncached. What was opened before
//! stays cached for the kernel, so its pages are dropped at once, and after each READ and WRITE through it again.
//!
//! What always holds: the notice is acknowledged when the pages of before are gone. The kernel waits for pages that are under
//! READ, and those are answered meanwhile.

use super::locks::Kernel;
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_client::Client;
use std::rc::Rc;
use std::time::Duration;

/// For so long a page is there for whoever waits for it: one that went before they have seen it would be asked for
/// again, and so on. And for so long what others write meanwhile does not show.
const SEEN: Duration = Duration::from_millis(1);

/// Drops the kernel's pages of files that become shared.
pub(super) fn listen(client: &Client, kernel: &Kernel) {
    let kernel = kernel.clone();
    client.on_shared(Rc::new(move |ino| {
        let kernel = kernel.clone();
        // Whatever is open: a mapping keeps pages beyond the close of its file.
        Some(Box::pin(async move { kernel.drop_pages(ino).await }))
    }));
}

/// What has just been read or written through a cached file is answered now, and dropped right after; no bytes: all of it.
pub(super) fn drop_soon(kernel: &Kernel, ino: Ino, offset: u64, bytes: u64) {
    let kernel = kernel.clone();
    reactor::spawn(async move {
        reactor::sleep(SEEN).await;
        kernel.drop_range(ino, offset, bytes).await;
    });
}

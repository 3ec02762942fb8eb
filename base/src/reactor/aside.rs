//! Work that blocks, beside a reactor.

use super::mailbox;
use std::io;

/// Has a thread of its own do what would let the reactor stand still. Who stops waiting leaves the thread to end by itself.
///
/// # Errors
///
/// When the system gives no thread or no eventfd, or the work panics.
pub async fn aside<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, mut done) = mailbox::channel()?;
    let thread = std::thread::Builder::new().name(name.into());
    // Nobody may wait any more.
    thread.spawn(move || drop(sender.send(work())))?;
    done.recv().await.ok_or_else(|| io::Error::other("the thread has panicked"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::{self, Reactor};
    use std::time::Duration;

    #[test]
    fn a_thread_blocks_and_its_reactor_goes_on() {
        Reactor::new().expect("io_uring").block_on(async {
            let slow = reactor::spawn(aside("slow", || {
                std::thread::sleep(Duration::from_millis(300));
                7
            }));
            let begun = reactor::now();
            reactor::sleep(Duration::from_millis(1)).await;
            assert!(begun.elapsed() < Duration::from_millis(200));
            assert_eq!(slow.await.expect("it goes on").expect("it ends well"), 7);
            assert!(aside("fails", || assert_eq!(1, 2)).await.is_err());
        });
    }
}

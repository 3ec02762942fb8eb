//! One thread, one request at a time, over `/dev/fuse`: for tests and tools.
//!
//! The data path does not use it: there, a core's reactor keeps several reads
//! of the device in flight and lets the handler's futures run side by side.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use super::dev_fuse::{Channel, Received};
use super::message_buffer;
use crate::handler::Handler;
use crate::session::Session;

/// Answers requests until the mount is gone.
///
/// # Errors
///
/// When the device fails in a way that no request can explain.
pub fn serve<H: Handler>(channel: &Channel, session: &Session<H>) -> io::Result<()> {
    loop {
        let mut message = message_buffer(session.limits());
        match channel.receive(&mut message)? {
            Received::Message { bytes } => message.truncate(bytes),
            Received::Again => {
                channel.wait_readable(None)?;
                continue;
            }
            Received::Retry => continue,
            Received::Unmounted => return Ok(()),
        }
        let message = message.freeze();
        if let Some(answer) = block_on(session.serve(&message)) {
            // The kernel has failed the request when it refuses the reply; the
            // mount goes on.
            if let Err(error) = channel.send(&answer.slices()) {
                tracing::error!(%error, "the kernel refuses a reply");
            }
        }
    }
}

/// Runs one future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

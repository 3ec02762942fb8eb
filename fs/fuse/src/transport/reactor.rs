//! `/dev/fuse` on a core's reactor: one task takes requests, each request is
//! answered by a task of its own.
//!
//! The ring waits for the device; requests are then taken by plain non-blocking
//! reads, many at a time, and replies leave by writev as soon as they are
//! known. Reading by the ring would cost as many copies and, with several reads
//! in flight, wake all of them for every request.
//!
//! What always holds:
//! - The requests being answered hold at most `DATA_BYTES_MAX` of WRITE data;
//!   beyond that the kernel keeps what comes next. Requests without data are
//!   not counted: any number may wait for a lock, and the one that frees it is
//!   still received.
//! - A small request does not occupy a large buffer while it is answered.

use std::io;
use std::rc::Rc;
use std::thread;

use levada_base::reactor::{self, Fd, mailbox};
use levada_base::sync::Semaphore;
use levada_base::{Buf, BufMut};

use super::dev_fuse::{Channel, FuseMount, MountError, Received, Unmounted};
use super::{Notifier, message_buffer};
use crate::handler::Handler;
use crate::session::Session;

/// WRITE data in memory, received and not yet answered, in bytes.
const DATA_BYTES_MAX: u64 = 64 << 20;

/// Messages up to this size are copied out of their large buffer.
const SMALL_BYTES: usize = 4096;

/// Requests taken before the tasks that answer them get their turn.
const BURST: usize = 16;

/// Answers requests until the mount is gone. Requests still being answered
/// then are finished by their own tasks.
///
/// # Errors
///
/// When the device fails in a way that no request can explain; the mount is
/// dead then, as the channel is closed.
pub async fn serve<H>(channel: Channel, session: Rc<Session<H>>) -> io::Result<()>
where
    H: Handler + 'static,
{
    let notifier = Notifier::start(&channel)?;
    session.handler().reaches(Rc::downgrade(&notifier));
    let device = Fd::new(channel.duplicate()?)?;
    let channel = Rc::new(channel);
    let data_bytes = Semaphore::new(DATA_BYTES_MAX);
    let mut room: Option<BufMut> = None;
    let mut taken = 0;
    loop {
        let mut buffer = room.take().unwrap_or_else(|| message_buffer(session.limits()));
        let bytes = match channel.receive(&mut buffer)? {
            Received::Message { bytes } => bytes,
            Received::Retry => {
                room = Some(buffer);
                continue;
            }
            Received::Again => {
                room = Some(buffer);
                taken = 0;
                device.readable().await?;
                continue;
            }
            Received::Unmounted => return Ok(()),
        };
        let (message, held) = if bytes <= SMALL_BYTES {
            let message = Buf::copy_of(&buffer[..bytes]);
            room = Some(buffer);
            (message, None)
        } else {
            buffer.truncate(bytes);
            (buffer.freeze(), Some(data_bytes.acquire(bytes as u64).await))
        };
        reactor::spawn({
            let (channel, session) = (Rc::clone(&channel), Rc::clone(&session));
            async move {
                let _held = held;
                let metered = session.meters().begin(&message);
                let answer = session.serve(&message).await;
                if let Some(answer) = &answer
                    && let Err(error) = channel.send(&answer.slices())
                {
                    // The kernel has failed the request; the mount goes on.
                    tracing::error!(%error, "the kernel refuses a reply");
                }
                if let Some(metered) = metered {
                    metered.end(answer.as_ref());
                }
            }
        });
        taken += 1;
        if taken == BURST {
            taken = 0;
            reactor::yield_now().await;
        }
    }
}

/// Unmounts by a thread of its own: the kernel may wait for what is still to be answered here.
///
/// # Errors
///
/// As [`FuseMount::unmount`].
pub async fn unmount(mount: FuseMount) -> Result<Unmounted, MountError> {
    let target = mount.target().to_owned();
    let failed = |source| MountError::Unmount { target, source };
    let (done, mut outcome) = match mailbox::channel() {
        Ok(channel) => channel,
        Err(error) => return Err(failed(error)),
    };
    let unmounting = move || drop(done.send(mount.unmount()));
    match thread::Builder::new().name("unmount".into()).spawn(unmounting) {
        Ok(_) => outcome.recv().await.unwrap_or(Ok(Unmounted::Already)),
        Err(error) => Err(failed(error)),
    }
}

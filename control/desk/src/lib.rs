//! How a running process gets on with other programs: a desk, and orders.
//!
//! A desk is where it answers what other programs ask, a line of JSON each way over a
//! Unix socket. Whose questions they are, a node's or an array's, is for its clerk to say.
//!
//! Nothing here touches the data path; a slow or rude program costs a task and 64 KiB. After a crash
//! the socket stays and answers nobody; whoever knows that its process is gone opens the desk anew.
//!
//! An order goes the other way: a command of the operator's that the process has to have carried out ([`power_fence()`]).

mod ask;
mod order;
mod place;
mod power_fence;

pub use ask::{AskError, ask};
pub use place::{directory, make_directory};
pub use power_fence::{PowerFenceError, Taking, power_fence};

use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, Group, net};
use levada_base::{Buf, BufMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

const LINE_BYTES_MAX: usize = 64 << 10;
/// After an error that passes, programs are taken again after this.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Who answers.
pub trait Clerk {
    /// What may be asked.
    type Request: DeserializeOwned;
    /// What is answered.
    type Reply: Serialize;

    /// Carries a request out.
    fn answer(&self, request: Self::Request) -> LocalBoxFuture<'_, Self::Reply>;

    /// Answers what is no request.
    fn refuse(&self, why: String) -> Self::Reply;
}

/// Opens the desk at `socket`; requests are answered by tasks of `group`.
///
/// # Errors
///
/// When the socket cannot be made.
pub fn open<C: Clerk + 'static>(socket: &Path, clerk: Rc<C>, group: &Group) -> io::Result<()> {
    // Left behind by a process that was killed; a lock of the caller's says that it is gone.
    if socket.exists() {
        std::fs::remove_file(socket)?;
    }
    let listener = net::Listener::bind_unix(socket)?;
    reactor::spawn_in(group, async move {
        loop {
            match next(async || listener.accept().await).await {
                Ok(stream) => {
                    let clerk = Rc::clone(&clerk);
                    reactor::spawn(async move {
                        if let Err(error) = serve(&stream, &*clerk).await {
                            tracing::debug!(%error, "a program went away");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the control socket takes no more programs");
                    break;
                }
            }
        }
    });
    Ok(())
}

/// The next program. What passes, such as too many open files, is waited out: with the desk closed
/// nobody could ask this node what it is short of, or tell it to stop.
async fn next<T>(accept: impl AsyncFn() -> io::Result<T>) -> io::Result<T> {
    let mut is_told = false;
    loop {
        match accept().await {
            Err(error) if net::accept_error_passes(&error) => {
                if !is_told {
                    tracing::warn!(%error, "cannot take programs at the control socket now");
                    is_told = true;
                }
                reactor::sleep(ACCEPT_AGAIN_AFTER).await;
            }
            taken => return taken,
        }
    }
}

async fn serve(stream: &net::Stream, clerk: &impl Clerk) -> io::Result<()> {
    let mut pending = Vec::new();
    loop {
        let (chunk, got) = stream.read(BufMut::for_overwrite(4096)).await?;
        if got == 0 {
            return Ok(());
        }
        pending.extend_from_slice(&chunk[..got]);
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            let reply = match serde_json::from_slice(&line) {
                Ok(request) => clerk.answer(request).await,
                Err(error) => clerk.refuse(format!("not a request: {error}")),
            };
            let mut answer = serde_json::to_vec(&reply)?;
            answer.push(b'\n');
            stream.write_all(Buf::copy_of(&answer).into_vec()).await?;
        }
        if pending.len() > LINE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use std::cell::Cell;

    const EBADF: i32 = 9;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;

    #[test]
    fn the_desk_outlives_a_shortage_of_descriptors() {
        Reactor::simulated(1).block_on(async {
            let tries = Cell::new(0);
            let accept = async || {
                tries.set(tries.get() + 1);
                match tries.get() {
                    1 => Err(io::Error::from_raw_os_error(EMFILE)),
                    2 => Err(io::Error::from_raw_os_error(ENFILE)),
                    3 => Ok("a program"),
                    _ => Err(io::Error::from_raw_os_error(EBADF)),
                }
            };
            let begun = reactor::now();
            assert_eq!(next(&accept).await.expect("waited out"), "a program");
            assert!(reactor::now() - begun >= 2 * ACCEPT_AGAIN_AFTER, "it does not spin");
            let error = next(&accept).await.expect_err("there is no such socket");
            assert_eq!(error.raw_os_error(), Some(EBADF));
        });
    }
}

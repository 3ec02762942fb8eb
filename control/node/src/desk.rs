//! The desk: where a running node answers [`ControlRequest`]s.
//!
//! Nothing here touches the data path; a slow or rude program costs a task and 64 KiB.

use crate::control::{ControlReply, ControlRequest};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, Group, net};
use levada_base::{Buf, BufMut};
use std::io;
use std::path::Path;
use std::rc::Rc;

const LINE_BYTES_MAX: usize = 64 << 10;

/// Who answers.
pub trait Clerk {
    /// Carries a request out.
    fn answer(&self, request: ControlRequest) -> LocalBoxFuture<'_, ControlReply>;
}

/// Opens the desk at `socket`; requests are answered by tasks of `group`.
///
/// # Errors
///
/// When the socket cannot be made.
pub fn open(socket: &Path, clerk: Rc<dyn Clerk>, group: &Group) -> io::Result<()> {
    // Left behind by a node that was killed; the state lock says that it is gone.
    if socket.exists() {
        std::fs::remove_file(socket)?;
    }
    let listener = net::Listener::bind_unix(socket)?;
    reactor::spawn_in(group, async move {
        loop {
            match listener.accept().await {
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

async fn serve(stream: &net::Stream, clerk: &dyn Clerk) -> io::Result<()> {
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
                Err(error) => ControlReply::Failed { why: format!("not a request: {error}") },
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

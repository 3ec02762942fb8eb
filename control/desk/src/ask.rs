//! The other side of a desk: a program that asks. Blocks; for programs, not for reactors.

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Why there is no answer. Who asked knows whose desk it was and says so in its own words.
#[derive(Debug)]
pub enum AskError {
    /// Nobody listens there.
    NobodyThere,
    /// Somebody may listen there, for its own user only.
    Denied,
    /// The connection broke, or the time is over.
    Broken(std::io::Error),
    /// The answer was not understood.
    NotUnderstood(serde_json::Error),
}

/// Asks at the desk `socket` and waits for the answer, between two bytes of it no longer than `limit`.
///
/// # Errors
///
/// [`AskError`].
pub fn ask<Q: Serialize, A: DeserializeOwned>(
    socket: &Path,
    request: &Q,
    limit: Option<Duration>,
) -> Result<A, AskError> {
    let stream = connect(socket).map_err(|error| unreached(&error))?;
    stream.set_read_timeout(limit).map_err(AskError::Broken)?;
    let mut line = serde_json::to_string(request).map_err(AskError::NotUnderstood)?;
    line.push('\n');
    (&stream).write_all(line.as_bytes()).map_err(AskError::Broken)?;
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).map_err(AskError::Broken)?;
    if answer.is_empty() {
        return Err(AskError::Broken(ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_str(&answer).map_err(AskError::NotUnderstood)
}

/// Why nobody could be asked.
fn unreached(error: &std::io::Error) -> AskError {
    match error.kind() {
        ErrorKind::PermissionDenied => AskError::Denied,
        // It is there, and takes nobody.
        ErrorKind::WouldBlock => AskError::Broken(ErrorKind::TimedOut.into()),
        _ => AskError::NobodyThere,
    }
}

/// Does not wait for one that takes nobody: its process is stopped.
fn connect(socket: &Path) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(socket)?)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_belongs_to_another_user_is_not_called_absent() {
        let of = |errno| unreached(&std::io::Error::from_raw_os_error(errno));
        assert!(matches!(of(13), AskError::Denied));
        for errno in [2, 111] {
            assert!(matches!(of(errno), AskError::NobodyThere));
        }
        assert!(matches!(of(11), AskError::Broken(_)));
    }
}

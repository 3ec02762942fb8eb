//! A file system at a socket, where one guest at a time mounts it. Guests of several sockets see each other's files, as mounts do.
//!
//! After a crash a guest's requests are not answered any more: the kernel of a guest cannot tell who serves next what it had
//! open.

use crate::fs::{FileSystem, Guest, TAG_BYTES};
use crate::socket::{ListenError, Opened, Socket};
use std::path::Path;
use std::rc::Rc;

/// What guests mount a file system by. Front ends that have a tag of their own (QEMU) do not ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag([u8; TAG_BYTES]);

/// Why a text is no tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TagError {
    #[error("a tag has at least one byte")]
    Empty,
    #[error("a tag has {TAG_BYTES} bytes at most, and this has {0}")]
    TooLong(usize),
    #[error("a tag has no control characters")]
    Control,
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // It was a text without zeroes.
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(TAG_BYTES);
        f.write_str(&String::from_utf8_lossy(&self.0[..end]))
    }
}

impl std::str::FromStr for Tag {
    type Err = TagError;

    fn from_str(text: &str) -> Result<Self, TagError> {
        let bytes = text.as_bytes();
        if bytes.is_empty() {
            return Err(TagError::Empty);
        }
        if bytes.len() > TAG_BYTES {
            return Err(TagError::TooLong(bytes.len()));
        }
        if text.contains(char::is_control) {
            return Err(TagError::Control);
        }
        let mut tag = [0; TAG_BYTES];
        tag[..bytes.len()].copy_from_slice(bytes);
        Ok(Self(tag))
    }
}

/// How a file system is shown.
#[derive(Clone, Debug)]
pub struct FsOptions {
    pub tag: Tag,
    /// Queues for requests that a guest may use, at most 255; one more is for FORGET and INTERRUPT.
    pub request_queues: u16,
    /// Data of the guest that is on its way at once, at least some 2 MiB.
    pub bytes_in_flight_max: u64,
}

impl FsOptions {
    /// What suits most.
    #[must_use]
    pub fn new(tag: Tag) -> Self {
        Self { tag, request_queues: 8, bytes_in_flight_max: 64 << 20 }
    }
}

/// A file system at a socket. Dropped, it leaves its guest where it stands, as a crash would.
pub struct FsServer<F: FileSystem>(Socket<Guest<F>>);

impl<F: FileSystem> FsServer<F> {
    /// Shows `system` at the Unix socket `at`.
    ///
    /// # Errors
    ///
    /// [`ListenError`].
    pub async fn listen(at: &Path, system: Rc<F>, options: FsOptions) -> Result<Self, ListenError> {
        let FsOptions { tag: Tag(tag), request_queues, bytes_in_flight_max } = options;
        let queues = request_queues.max(1).saturating_add(1);
        let open = move || -> Opened<Guest<F>> {
            let guest = Guest::new(Rc::clone(&system), tag, bytes_in_flight_max);
            Box::pin(std::future::ready(Some(Rc::new(guest))))
        };
        Ok(Self(Socket::listen(at, queues, open).await?))
    }

    /// Where it listens.
    #[must_use]
    pub fn at(&self) -> &Path {
        self.0.at()
    }

    /// Whether a machine monitor is connected, whatever its guest has mounted.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// Ends it: requests that were taken are answered, what was written is durable, and the guest is left.
    pub async fn end(self) {
        self.0.end().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_padded_with_zeroes_and_no_longer_than_fits() {
        let Tag(tag) = "levada".parse().expect("a tag");
        assert_eq!((&tag[..6], &tag[6..]), (&b"levada"[..], &[0; 30][..]));
        assert!("ä".repeat(18).parse::<Tag>().is_ok());
        assert_eq!("a".repeat(37).parse::<Tag>(), Err(TagError::TooLong(37)));
        assert_eq!("".parse::<Tag>(), Err(TagError::Empty));
        assert_eq!("a\0b".parse::<Tag>(), Err(TagError::Control));
    }
}

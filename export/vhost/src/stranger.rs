//! Descriptors that a client sent, before anything is known of them.
//!
//! A client chooses what it sends. Looking at a file of a FUSE file system asks its owner, who need not answer; so does closing
//! it, and a TCP socket may linger. So what a descriptor is, is found out by calls that the kernel answers by itself.
//!
//! What always holds: a descriptor that is none of those that the protocol knows is neither used nor closed on this thread.

use levada_base::reactor;
use rustix::fs::{fcntl_get_seals, readlink};
use rustix::net::{AddressFamily, sockopt::socket_domain};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// What a descriptor stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Event,
    /// A pipe without a name.
    Pipe,
    /// A file of tmpfs, memfd_create or hugetlbfs.
    Memory,
    UnixSocket,
    /// Anything else.
    Unknown,
}

/// Where the kernel shows what a descriptor is.
pub(crate) fn path_of(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

impl Kind {
    fn of(fd: BorrowedFd<'_>) -> Self {
        // Only files in memory can be sealed, and only they answer.
        if fcntl_get_seals(fd).is_ok() {
            return Self::Memory;
        }
        // The path of a file begins with a slash, whatever its name.
        let shown = readlink(path_of(fd), Vec::new());
        match shown.as_ref().map_or(&b""[..], |shown| shown.as_bytes()) {
            b"anon_inode:[eventfd]" => Self::Event,
            name if name.starts_with(b"pipe:[") => Self::Pipe,
            name if name.starts_with(b"socket:[")
                && socket_domain(fd) == Ok(AddressFamily::UNIX) =>
            {
                Self::UnixSocket
            }
            _ => Self::Unknown,
        }
    }
}

/// A descriptor of a client's. Dropped, it is closed where that keeps nobody waiting.
pub(crate) struct Stranger {
    pub kind: Kind,
    /// Until it is taken.
    fd: Option<OwnedFd>,
}

impl Stranger {
    /// The descriptor, if it is what `kind` says.
    pub(crate) fn take(mut self, kind: Kind) -> Option<OwnedFd> {
        if self.kind == kind { self.fd.take() } else { None }
    }
}

impl From<OwnedFd> for Stranger {
    fn from(fd: OwnedFd) -> Self {
        Self { kind: Kind::of(fd.as_fd()), fd: Some(fd) }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take()
            && self.kind == Kind::Unknown
        {
            reactor::close_aside(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;

    #[test]
    fn kinds_are_told_apart() {
        levada_base::reactor::Reactor::new().expect("an io_uring").block_on(async {
            let kind = |fd: OwnedFd| Stranger::from(fd).kind;
            let event = crate::signal::tests::eventfd();
            assert_eq!(kind(event), Kind::Event);
            assert_eq!(kind(std::io::pipe().expect("a pipe").1.into()), Kind::Pipe);
            let named = memfd_create(c"anon_inode:[eventfd]", MemfdFlags::CLOEXEC);
            assert_eq!(kind(named.expect("memory")), Kind::Memory);
            assert_eq!(kind(UnixStream::pair().expect("a pair").0.into()), Kind::UnixSocket);
            let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
            assert_eq!(kind(tcp.into()), Kind::Unknown);
            let file = std::fs::File::open("/proc/self/exe").expect("this program");
            assert_eq!(kind(file.into()), Kind::Unknown);
        });
    }

    #[test]
    fn what_is_of_another_kind_is_not_handed_out() {
        levada_base::reactor::Reactor::new().expect("an io_uring").block_on(async {
            let pair = UnixStream::pair().expect("a pair");
            assert!(Stranger::from(OwnedFd::from(pair.0)).take(Kind::Event).is_none());
            assert!(Stranger::from(OwnedFd::from(pair.1)).take(Kind::UnixSocket).is_some());
        });
    }
}

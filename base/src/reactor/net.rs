//! Stream sockets: TCP and Unix.
//!
//! A [`Stream`] is a shared handle: one task may read while another writes. Two tasks that read,
//! or two that write, must take turns themselves. Dropping a future of a read or write leaves
//! unknown how much was moved; such a stream can only be closed.
#![allow(unsafe_code)] // Operations that point to buffers and addresses which the ring owns.

use super::Core;
use super::fd::{RawParts, raw_parts};
use super::ring::Accepting;
use crate::buf::bytes_in;
use crate::{BufMut, IoVec};
use io_uring::{opcode, types};
use std::io;
use std::mem::{offset_of, size_of, zeroed};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

/// A socket that takes connections.
#[derive(Debug)]
pub struct Listener {
    fd: Rc<OwnedFd>,
}

impl Listener {
    /// Listens on a TCP address; port 0 lets the system choose.
    ///
    /// # Errors
    ///
    /// What `bind(2)` says.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        Ok(Self { fd: Rc::new(std::net::TcpListener::bind(addr)?.into()) })
    }

    /// Listens on a Unix socket, replacing one that a dead process left at `path`. Whether its
    /// owner is dead is for the caller to know.
    ///
    /// # Errors
    ///
    /// What `bind(2)` says.
    pub fn bind_unix(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Self { fd: Rc::new(std::os::unix::net::UnixListener::bind(path)?.into()) })
    }

    /// The address that TCP clients connect to.
    ///
    /// # Errors
    ///
    /// When this is a Unix socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        std::net::TcpListener::from(self.fd.try_clone()?).local_addr()
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    ///
    /// What `accept4(2)` says.
    pub async fn accept(&self) -> io::Result<Stream> {
        let ring = Core::current_ring();
        loop {
            // SAFETY: the descriptor is kept; no address is asked for.
            let op = unsafe {
                ring.submit(Accepting(Rc::clone(&self.fd)), |Accepting(fd)| {
                    let fd = types::Fd(fd.as_raw_fd());
                    let (addr, len) = (std::ptr::null_mut(), std::ptr::null_mut());
                    opcode::Accept::new(fd, addr, len).flags(libc::SOCK_CLOEXEC).build()
                })
            };
            match op.await.0 {
                Ok(fd) => {
                    // SAFETY: the kernel just made this descriptor for us.
                    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
                    return Ok(Stream::new(fd));
                }
                // The client went away while it queued.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Stream {
    fd: Rc<OwnedFd>,
}

impl Stream {
    fn new(fd: OwnedFd) -> Self {
        let on: libc::c_int = 1;
        // Small replies must not wait for earlier acknowledgements. A Unix socket refuses the
        // option and needs none.
        // SAFETY: the value is an int that lives through the call.
        unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_NODELAY,
                (&raw const on).cast(),
                size_of::<libc::c_int>() as u32,
            );
        }
        Self { fd: Rc::new(fd) }
    }

    /// Connects to a TCP address. Wrap it in [`super::timeout`] for a limit.
    ///
    /// # Errors
    ///
    /// What `connect(2)` says.
    pub async fn connect(addr: SocketAddr) -> io::Result<Self> {
        match addr {
            SocketAddr::V4(v4) => {
                // SAFETY: all zeroes is a value of this plain structure.
                let mut raw: libc::sockaddr_in = unsafe { zeroed() };
                raw.sin_family = libc::AF_INET as u16;
                raw.sin_port = v4.port().to_be();
                raw.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
                Self::connect_raw(libc::AF_INET, raw, size_of::<libc::sockaddr_in>()).await
            }
            SocketAddr::V6(v6) => {
                // SAFETY: all zeroes is a value of this plain structure.
                let mut raw: libc::sockaddr_in6 = unsafe { zeroed() };
                raw.sin6_family = libc::AF_INET6 as u16;
                raw.sin6_port = v6.port().to_be();
                raw.sin6_flowinfo = v6.flowinfo();
                raw.sin6_addr.s6_addr = v6.ip().octets();
                raw.sin6_scope_id = v6.scope_id();
                Self::connect_raw(libc::AF_INET6, raw, size_of::<libc::sockaddr_in6>()).await
            }
        }
    }

    /// Connects to a Unix socket.
    ///
    /// # Errors
    ///
    /// What `connect(2)` says; [`io::ErrorKind::InvalidInput`] when the path is too long.
    pub async fn connect_unix(path: &Path) -> io::Result<Self> {
        // SAFETY: all zeroes is a value of this plain structure.
        let mut raw: libc::sockaddr_un = unsafe { zeroed() };
        raw.sun_family = libc::AF_UNIX as u16;
        let bytes = path.as_os_str().as_bytes();
        if bytes.len() >= raw.sun_path.len() || bytes.contains(&0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in raw.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        let len = offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
        Self::connect_raw(libc::AF_UNIX, raw, len).await
    }

    async fn connect_raw<A: 'static>(family: i32, addr: A, len: usize) -> io::Result<Self> {
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor for us.
        let stream = Self::new(unsafe { OwnedFd::from_raw_fd(fd) });
        let ring = Core::current_ring();
        // SAFETY: descriptor and address are kept; `len` is at most the size of `A`.
        let op = unsafe {
            ring.submit((Rc::clone(&stream.fd), addr), |(fd, addr)| {
                let fd = types::Fd(fd.as_raw_fd());
                opcode::Connect::new(fd, (&raw const *addr).cast(), len as u32).build()
            })
        };
        op.await.0?;
        Ok(stream)
    }

    /// Reads what there is, at least one byte: the buffer and how much of it was filled, 0 at
    /// the end of the stream (or for an empty buffer).
    ///
    /// # Errors
    ///
    /// What `recv(2)` says.
    pub async fn read(&self, into: BufMut) -> io::Result<(BufMut, usize)> {
        self.receive(into, 0, 0).await
    }

    /// Fills the whole buffer.
    ///
    /// # Errors
    ///
    /// What `recv(2)` says; [`io::ErrorKind::UnexpectedEof`] when the stream ends first.
    pub async fn read_exact(&self, mut into: BufMut) -> io::Result<BufMut> {
        let mut done = 0;
        while done < into.len() {
            let read;
            (into, read) = self.receive(into, done, libc::MSG_WAITALL).await?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            done += read;
        }
        Ok(into)
    }

    async fn receive(
        &self,
        mut into: BufMut,
        skip: usize,
        flags: i32,
    ) -> io::Result<(BufMut, usize)> {
        let ring = Core::current_ring();
        loop {
            // SAFETY: descriptor and buffer are kept.
            let op = unsafe {
                ring.submit((Rc::clone(&self.fd), into), |(fd, into)| {
                    let fd = types::Fd(fd.as_raw_fd());
                    let rest = &mut into[skip..];
                    let len = u32::try_from(rest.len()).unwrap_or(1 << 30);
                    opcode::Recv::new(fd, rest.as_mut_ptr(), len).flags(flags).build()
                })
            };
            let (read, kept) = op.await;
            into = kept.1;
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(read) => return Ok((into, read)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes all bytes of all parts, in order.
    ///
    /// # Errors
    ///
    /// What `sendmsg(2)` says. A part may have been written.
    pub async fn write_all(&self, mut from: IoVec) -> io::Result<()> {
        let ring = Core::current_ring();
        let total = bytes_in(&from) as usize;
        let mut done = 0;
        while done < total {
            let raw = raw_parts(from.iter().map(|part| &part[..]), done);
            // SAFETY: all zeroes is a value of this plain structure.
            let message: libc::msghdr = unsafe { zeroed() };
            let kept: (Rc<OwnedFd>, IoVec, RawParts, libc::msghdr) =
                (Rc::clone(&self.fd), from, raw, message);
            // SAFETY: descriptor, message, list and buffers are kept.
            let op = unsafe {
                ring.submit(kept, |(fd, _, raw, message)| {
                    message.msg_iov = raw.as_mut_ptr();
                    message.msg_iovlen = raw.len();
                    let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
                    let fd = types::Fd(fd.as_raw_fd());
                    opcode::SendMsg::new(fd, &raw const *message).flags(flags).build()
                })
            };
            let (written, kept) = op.await;
            from = kept.1;
            match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends one or both directions; a reader here or there sees the end of the stream.
    ///
    /// # Errors
    ///
    /// What `shutdown(2)` says.
    pub fn shutdown(&self, how: std::net::Shutdown) -> io::Result<()> {
        let how = match how {
            std::net::Shutdown::Read => libc::SHUT_RD,
            std::net::Shutdown::Write => libc::SHUT_WR,
            std::net::Shutdown::Both => libc::SHUT_RDWR,
        };
        // SAFETY: the descriptor is open; no memory is involved.
        if unsafe { libc::shutdown(self.fd.as_raw_fd(), how) } == 0 {
            return Ok(());
        }
        Err(io::Error::last_os_error())
    }

    /// The address of the other end.
    ///
    /// # Errors
    ///
    /// When this is a Unix socket, or not connected any more.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        std::net::TcpStream::from(self.fd.try_clone()?).peer_addr()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

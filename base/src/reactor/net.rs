//! Stream sockets: TCP and Unix.
//!
//! A [`Stream`] is a shared handle: one task may read while another writes. Two tasks that read,
//! or two that write, must take turns themselves. Dropping a future of a read or write leaves
//! unknown how much was moved; such a stream can only be closed.
//!
//! Unix sockets may also have an abstract name, which goes with the last process that holds the
//! socket, and can carry descriptors to another process.
#![allow(unsafe_code)] // Operations that point to buffers and addresses which the ring owns.

use super::Core;
use super::carrier::Carrier;
use super::fd::{RawParts, poll_fd, raw_parts};
use super::operations::{Accepting, Op};
use crate::buf::bytes_in;
use crate::{BufMut, IoVec};
use io_uring::{opcode, squeue, types};
use std::fmt;
use std::io;
use std::mem::{ManuallyDrop, offset_of, size_of, zeroed};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

/// So much is sent by a call of its own, and the other side has something to do at once. Less waits for the end of the thread's turn:
/// what many tasks send then goes together, and finds the other side awake.
const SENT_AT_ONCE_BYTES: usize = 64 << 10;

/// Asks the standard library about a socket, without a descriptor of its own: the connection that took the last one there was could not be
/// told who it is from.
fn lent_to_std<S: FromRawFd, T>(fd: BorrowedFd<'_>, ask: impl FnOnce(&S) -> T) -> T {
    // SAFETY: it is open for as long as it is borrowed, and not closed here.
    let socket = ManuallyDrop::new(unsafe { S::from_raw_fd(fd.as_raw_fd()) });
    ask(&socket)
}

/// Of the descriptors that the process may have connections leave so many at most: who is let in has files opened, and threads that work
/// for him.
const SPARE_DESCRIPTORS_MAX: u64 = 16;
/// Fewer, where there are not many.
const SPARE_DESCRIPTORS_SHARE: u64 = 8;

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

    /// Listens on a Unix socket by an abstract name.
    ///
    /// # Errors
    ///
    /// What `bind(2)` says: the name may be taken.
    pub fn bind_abstract(name: &[u8]) -> io::Result<Self> {
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
        Ok(Self { fd: Rc::new(std::os::unix::net::UnixListener::bind_addr(&address)?.into()) })
    }

    /// The address that TCP clients connect to.
    ///
    /// # Errors
    ///
    /// When this is a Unix socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        lent_to_std(self.fd.as_fd(), std::net::TcpListener::local_addr)
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

/// True for errors of [`Listener::accept`] by which the system is short of what each connection has.
#[must_use]
pub fn accept_error_is_of_room(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    matches!(errno, Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// True for errors of [`Listener::accept`] that say nothing about the listener: what was to be
/// connected broke, or the system is short of something.
#[must_use]
pub fn accept_error_passes(error: &io::Error) -> bool {
    let is_of_peer = matches!(
        error.raw_os_error(),
        Some(
            // Errors of the network that wait on the new socket: accept(2).
            libc::ENETDOWN
                | libc::EPROTO
                | libc::ENOPROTOOPT
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::ETIMEDOUT
                // Rules of a firewall.
                | libc::EPERM
        )
    );
    is_of_peer || accept_error_is_of_room(error)
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Descriptors that are sent at once.
const DESCRIPTORS_MAX: usize = 8;
/// `SCM_MAX_FD`: as many as a stranger can send at once.
const DESCRIPTORS_RECEIVED_MAX: usize = 253;

/// Room for a control message with [`DESCRIPTORS_RECEIVED_MAX`] descriptors, aligned as its header. For what finds no room the
/// kernel would close the descriptor itself, on this thread: see [`super::close_aside`].
struct ControlRoom([u64; CONTROL_WORDS]);

const CONTROL_WORDS: usize = 2 + DESCRIPTORS_RECEIVED_MAX.div_ceil(2);

impl Default for ControlRoom {
    fn default() -> Self {
        Self([0; CONTROL_WORDS])
    }
}

/// A Unix socket's address, with the name at `at` in its path, and its length.
fn unix_address(at: usize, name: &[u8]) -> io::Result<(libc::sockaddr_un, usize)> {
    // SAFETY: all zeroes is a value of this plain structure.
    let mut raw: libc::sockaddr_un = unsafe { zeroed() };
    raw.sun_family = libc::AF_UNIX as u16;
    if at + name.len() >= raw.sun_path.len() || name.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in raw.sun_path[at..].iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    Ok((raw, offset_of!(libc::sockaddr_un, sun_path) + at + name.len()))
}

/// What every TCP connection has: level, option, value.
const TCP_OPTIONS: [(libc::c_int, libc::c_int, libc::c_int); 6] = [
    // Small replies must not wait for earlier acknowledgements.
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
    // A host that vanishes says nothing, and who only waits for its requests would do so for ever:
    // after 60 s of silence the kernel asks, three times.
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 60),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 10),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
    // It does not ask while a reply waits to be acknowledged, which is sent again for a quarter of an
    // hour: the same limit for that, in ms.
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 90_000),
];

/// A connection. Clones share it.
#[derive(Clone)]
pub struct Stream {
    fd: Rc<OwnedFd>,
    /// Who reads and writes for this reactor.
    carrier: Option<Rc<Carrier>>,
}

impl Stream {
    /// Takes a connected socket that came from elsewhere. What is no socket fails at its first use.
    #[must_use]
    pub fn adopt(fd: OwnedFd) -> Self {
        Self::new(fd)
    }

    /// Has it read and written by one of the threads that carry sockets for this reactor, if there are any
    /// ([`super::carry_sockets`]). To be said before anything is read or written.
    #[must_use]
    pub fn carried(self) -> Self {
        Self { carrier: Core::current().next_carrier(), ..self }
    }

    /// True where the process has hardly more descriptors than this one takes: they are given out from below.
    #[must_use]
    pub fn takes_a_last_descriptor(&self) -> bool {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: fills one structure.
        let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
        let spare = SPARE_DESCRIPTORS_MAX.min(limit.rlim_cur / SPARE_DESCRIPTORS_SHARE);
        got == 0 && self.fd.as_raw_fd() as u64 >= limit.rlim_cur.saturating_sub(spare)
    }

    /// The same with a lower descriptor, if one is free. To be said before anything is read or written.
    #[must_use]
    pub fn moved_down(self) -> Self {
        match self.fd.try_clone() {
            Ok(fd) if fd.as_raw_fd() < self.fd.as_raw_fd() => Self { fd: Rc::new(fd), ..self },
            _ => self,
        }
    }

    /// Submits a read or a write.
    ///
    /// # Safety
    ///
    /// As of [`super::ring::Ring::submit`].
    unsafe fn submit<T: 'static>(
        &self,
        kept: T,
        entry: impl FnOnce(&mut T) -> squeue::Entry,
    ) -> Op<T> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.carrier {
                Some(carrier) => carrier.submit(kept, entry),
                None => Core::current_ring().submit(kept, entry),
            }
        }
    }

    fn new(fd: OwnedFd) -> Self {
        // A Unix socket refuses what is TCP's and needs none of it.
        for (level, option, value) in TCP_OPTIONS {
            // SAFETY: the value is an int that lives through the call.
            unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    level,
                    option,
                    (&raw const value).cast(),
                    size_of::<libc::c_int>() as u32,
                );
            }
        }
        Self { fd: Rc::new(fd), carrier: None }
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
        let bytes = path.as_os_str().as_bytes();
        let (raw, len) = unix_address(0, bytes)?;
        // The name ends in NUL.
        Self::connect_raw(libc::AF_UNIX, raw, len + 1).await
    }

    /// Connects to a Unix socket by its abstract name.
    ///
    /// # Errors
    ///
    /// What `connect(2)` says; [`io::ErrorKind::InvalidInput`] when the name is too long.
    pub async fn connect_abstract(name: &[u8]) -> io::Result<Self> {
        let (raw, len) = unix_address(1, name)?;
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
        let (into, read) = self.receive(into, 0, 0).await;
        Ok((into, read?))
    }

    /// Fills the whole buffer.
    ///
    /// # Errors
    ///
    /// What `recv(2)` says; [`io::ErrorKind::UnexpectedEof`] when the stream ends first.
    pub async fn read_exact(&self, into: BufMut) -> io::Result<BufMut> {
        let (into, landed) = self.land(into).await;
        landed.map(|()| into)
    }

    /// Fills the whole buffer as [`Stream::read_exact`], and hands it back also when that fails.
    pub async fn land(&self, mut into: BufMut) -> (BufMut, io::Result<()>) {
        let mut done = 0;
        while done < into.len() {
            let read;
            (into, read) = self.receive(into, done, libc::MSG_WAITALL).await;
            match read {
                Ok(0) => return (into, Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => done += read,
                Err(error) => return (into, Err(error)),
            }
        }
        (into, Ok(()))
    }

    async fn receive(
        &self,
        mut into: BufMut,
        skip: usize,
        flags: i32,
    ) -> (BufMut, io::Result<usize>) {
        loop {
            // SAFETY: descriptor and buffer are kept.
            let op = unsafe {
                self.submit((Rc::clone(&self.fd), into), |(fd, into)| {
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
                read => return (into, read),
            }
        }
    }

    /// Writes all bytes of all parts, in order.
    ///
    /// # Errors
    ///
    /// What `sendmsg(2)` says. A part may have been written.
    pub async fn write_all(&self, mut from: IoVec) -> io::Result<()> {
        let total = bytes_in(&from) as usize;
        let is_large = total >= SENT_AT_ONCE_BYTES && self.carrier.is_none();
        let mut done = 0;
        if is_large {
            done = self.send_at_once(&from)?;
            super::give_way().await;
        }
        while done < total {
            let raw = raw_parts(from.iter().map(|part| &part[..]), done);
            // SAFETY: all zeroes is a value of this plain structure.
            let message: libc::msghdr = unsafe { zeroed() };
            let kept: (Rc<OwnedFd>, IoVec, RawParts, libc::msghdr) =
                (Rc::clone(&self.fd), from, raw, message);
            // SAFETY: descriptor, message, list and buffers are kept.
            let op = unsafe {
                self.submit(kept, |(fd, _, raw, message)| {
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

    /// Sends what there is room for: how many bytes.
    fn send_at_once(&self, from: &IoVec) -> io::Result<usize> {
        let mut raw = raw_parts(from.iter().map(|part| &part[..]), 0);
        // SAFETY: all zeroes is a value of this plain structure; list and buffers live through the call, which only reads them.
        let sent = unsafe {
            let mut message: libc::msghdr = zeroed();
            message.msg_iov = raw.as_mut_ptr();
            message.msg_iovlen = raw.len();
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            libc::sendmsg(self.fd.as_raw_fd(), &raw const message, flags)
        };
        usize::try_from(sent).or_else(|_| match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(0),
            error => Err(error),
        })
    }

    /// True when the same user runs the other end of this Unix socket.
    #[must_use]
    pub fn is_between_own(&self) -> bool {
        // SAFETY: all zeroes is a value of this plain structure.
        let mut peer: libc::ucred = unsafe { zeroed() };
        let mut len = size_of::<libc::ucred>() as u32;
        // SAFETY: room for the answer, and its length.
        unsafe {
            let status = libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut len,
            );
            status == 0 && peer.uid == libc::geteuid()
        }
    }

    /// Sends a few bytes and descriptors with them, over a Unix socket that has room: not to be
    /// used behind much that the other side has not read.
    ///
    /// # Errors
    ///
    /// What `sendmsg(2)` says; [`io::ErrorKind::WriteZero`] when not all bytes found room.
    pub fn send_descriptors(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        assert!(fds.len() <= DESCRIPTORS_MAX, "a few");
        let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let fds_bytes = size_of_val(&fds[..]);
        let mut part =
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut room = ControlRoom::default();
        // SAFETY: all zeroes is a value of this plain structure; the list of one part and the
        // control message, which has room for `fds`, live through the call.
        let sent = unsafe {
            let mut message: libc::msghdr = zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            if !fds.is_empty() {
                message.msg_control = room.0.as_mut_ptr().cast();
                message.msg_controllen = libc::CMSG_SPACE(fds_bytes as u32) as usize;
                let control = libc::CMSG_FIRSTHDR(&raw const message);
                (*control).cmsg_level = libc::SOL_SOCKET;
                (*control).cmsg_type = libc::SCM_RIGHTS;
                (*control).cmsg_len = libc::CMSG_LEN(fds_bytes as u32) as usize;
                let data = libc::CMSG_DATA(control);
                std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), data, fds_bytes);
            }
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            libc::sendmsg(self.fd.as_raw_fd(), &raw const message, flags)
        };
        match usize::try_from(sent) {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) => Err(io::ErrorKind::WriteZero.into()),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }

    /// Waits for what [`Stream::send_descriptors`] sent at the other end.
    ///
    /// # Errors
    ///
    /// What `recvmsg(2)` says; [`io::ErrorKind::UnexpectedEof`] when fewer bytes came.
    pub async fn receive_descriptors(&self, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
        let mut fds = Vec::new();
        match self.receive_some(bytes, &mut fds).await? {
            received if received == bytes.len() => Ok(fds),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Waits for bytes: how many came, 0 at the end of the stream. Descriptors that came with them are added to `fds`.
    ///
    /// # Errors
    ///
    /// What `recvmsg(2)` says.
    pub async fn receive_some(
        &self,
        bytes: &mut [u8],
        fds: &mut Vec<OwnedFd>,
    ) -> io::Result<usize> {
        loop {
            match self.try_receive(bytes, fds) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll_fd(&self.fd, libc::POLLIN).await.0?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => return received,
            }
        }
    }

    fn try_receive(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut room = ControlRoom::default();
        // SAFETY: all zeroes is a value of this plain structure; list, buffer and control buffer
        // live through the call. The kernel fills the control buffer with whole headers, and each
        // descriptor in it was just made for us.
        let received = unsafe {
            let mut message: libc::msghdr = zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = room.0.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&room.0);
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            let received = libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, flags);
            let mut control = libc::CMSG_FIRSTHDR(&raw const message);
            while received >= 0 && !control.is_null() {
                if (*control).cmsg_level == libc::SOL_SOCKET
                    && (*control).cmsg_type == libc::SCM_RIGHTS
                {
                    let data = libc::CMSG_DATA(control).cast::<RawFd>();
                    let count =
                        ((*control).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                    for at in 0..count {
                        fds.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
                    }
                }
                control = libc::CMSG_NXTHDR(&raw const message, control);
            }
            received
        };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
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

    /// The address of this end.
    ///
    /// # Errors
    ///
    /// When this is a Unix socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        lent_to_std(self.fd.as_fd(), std::net::TcpStream::local_addr)
    }

    /// The address of the other end.
    ///
    /// # Errors
    ///
    /// When this is a Unix socket, or not connected any more.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        lent_to_std(self.fd.as_fd(), std::net::TcpStream::peer_addr)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_carried = self.carrier.is_some();
        f.debug_struct("Stream").field("fd", &self.fd).field("is_carried", &is_carried).finish()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::Reactor;

    fn option(stream: &Stream, level: libc::c_int, option: libc::c_int) -> libc::c_int {
        let mut value: libc::c_int = -1;
        let mut len = size_of::<libc::c_int>() as u32;
        // SAFETY: room for the answer, and its length.
        let status = unsafe {
            let fd = stream.fd.as_raw_fd();
            libc::getsockopt(fd, level, option, (&raw mut value).cast(), &raw mut len)
        };
        assert_eq!(status, 0, "{}", io::Error::last_os_error());
        value
    }

    #[test]
    fn both_ends_ask_after_a_silent_other_end() {
        Reactor::new().expect("an io_uring").block_on(async {
            let listener = Listener::bind(([127, 0, 0, 1], 0).into()).expect("bound");
            let made = Stream::connect(listener.local_addr().expect("TCP")).await.expect("made");
            let taken = listener.accept().await.expect("taken");
            for (level, what, value) in TCP_OPTIONS {
                for stream in [&made, &taken] {
                    // What is only on or off is told as a bit.
                    let found = option(stream, level, what);
                    assert_eq!(if value == 1 { found.min(1) } else { found }, value, "{what}");
                }
            }
        });
    }

    #[test]
    fn memory_comes_back_from_a_stream_that_ends() {
        Reactor::new().expect("an io_uring").block_on(async {
            let listener = Listener::bind(([127, 0, 0, 1], 0).into()).expect("bound");
            let made = Stream::connect(listener.local_addr().expect("TCP")).await.expect("made");
            let taken = listener.accept().await.expect("taken");
            made.write_all(BufMut::copy_of(b"some").freeze().into_vec()).await.expect("sent");
            made.shutdown(std::net::Shutdown::Both).expect("ended");
            let mut whole = BufMut::zeroed(100);
            let head = whole.split_to(50);
            let (mut head, landed) = taken.land(head).await;
            assert_eq!(landed.expect_err("cut off").kind(), io::ErrorKind::UnexpectedEof);
            // The same memory.
            head.unsplit(whole);
            assert_eq!((head.len(), &head[..4]), (100, &b"some"[..]));
        });
    }
}

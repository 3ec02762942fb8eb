//! The events that rings come with: kicks from the client, calls and errors to it.
//!
//! A client shares the flags of what it sends, and may hold the other end of it. Whoever writes to an eventfd whose counter is
//! full waits, unless its flags say otherwise at that very moment. So the kernel is made to raise it, which it does for its own
//! purposes without ever waiting.
//!
//! What always holds: telling a client, and taking its kicks, keeps nobody waiting.
#![allow(unsafe_code)] // System calls that have no safe form: preadv2(2), and those of aio(7).

use crate::stranger::{Kind, Stranger, path_of};
use levada_base::reactor::{self, Fd};
use rustix::fs::{Mode, OFlags, open};
use rustix::net::{SendFlags, send};
use std::cell::{Cell, OnceCell};
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::rc::Rc;

/// What a client kicks.
pub(crate) struct Kick(Fd);

impl Kick {
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidInput`] when it is no eventfd.
    pub(crate) fn new(fd: Stranger) -> io::Result<Self> {
        fd.take(Kind::Event).map(Self::of).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// An eventfd that was looked at.
    pub(crate) fn of(eventfd: OwnedFd) -> Self {
        Self(Fd::of_others(eventfd))
    }

    /// The same eventfd, for another reactor.
    pub(crate) fn another(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }

    /// Whether both are one, or none.
    pub(crate) fn is_same(a: Option<&Rc<Self>>, b: Option<&Rc<Self>>) -> bool {
        match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => Rc::ptr_eq(a, b),
            (None, Some(_)) | (Some(_), None) => false,
        }
    }

    /// Returns when it was kicked, or cannot be any more.
    pub(crate) async fn kicked(&self) {
        // It fails only when it is cancelled with its reactor.
        let _ = self.0.readable().await;
        let mut count = 0u64;
        let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
        // SAFETY: reads 8 bytes into a live value; never blocks, whatever the client set. An eventfd has no offset.
        unsafe {
            libc::preadv2(self.0.as_fd().as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT)
        };
    }
}

/// What a client is told by.
pub(crate) enum Signal {
    Event(OwnedFd),
    Pipe(OwnedFd),
    /// User-mode Linux sends one end of a pair, whatever it calls a pipe.
    Socket(Socket),
}

/// A Unix socket. What its other end has sent over it may be descriptors whose close waits.
pub(crate) struct Socket(Option<OwnedFd>);

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            reactor::close_aside(fd);
        }
    }
}

impl Signal {
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidInput`] when it is neither an eventfd, nor a pipe, nor a Unix socket.
    pub(crate) fn new(fd: Stranger) -> io::Result<Self> {
        if fd.kind == Kind::Pipe {
            let fd = fd.take(Kind::Pipe).ok_or(io::ErrorKind::InvalidInput)?;
            // Opened anew, its flags are our own, and it does not block.
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            return Ok(Self::Pipe(open(path_of(fd.as_fd()), flags, Mode::empty())?));
        }
        if fd.kind == Kind::UnixSocket {
            return Ok(Self::Socket(Socket(fd.take(Kind::UnixSocket))));
        }
        let fd = fd.take(Kind::Event).ok_or(io::ErrorKind::InvalidInput)?;
        // Now, where it can fail.
        Raiser::here(|_| ())?;
        Ok(Self::Event(fd))
    }

    /// A counter or a pipe that is full tells all there is to tell already.
    pub(crate) fn tell(&self) {
        match self {
            Self::Event(fd) => {
                // On the thread of `new` there is one.
                if let Err(error) = Raiser::here(|raiser| raiser.raise(fd)) {
                    tracing::error!(%error, "a vhost client is not told of an answer");
                }
            }
            Self::Pipe(fd) => {
                let one = 1u64;
                // SAFETY: writes 8 bytes from a live value. A process whose pipe broke ignores that signal, as Rust's do.
                unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), 8) };
            }
            Self::Socket(Socket(fd)) => {
                let (one, flags) = (1u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
                // It fails when it is full, or nobody is there.
                let _ = fd.as_ref().map(|fd| send(fd, &one, flags));
            }
        }
    }
}

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;
/// How often the kernel is asked that says that it has no memory now.
const SUBMIT_TRIES: u32 = 1000;
/// Operations whose results are not taken yet.
const RESULTS_MAX: usize = 32;

/// Makes the kernel raise eventfds: it does so when an asynchronous operation completes, and reading nothing from nowhere
/// completes at once.
struct Raiser {
    context: libc::c_ulong,
    nowhere: OwnedFd,
    results: Cell<usize>,
}

impl Raiser {
    fn new() -> io::Result<Self> {
        let nowhere = open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: writes into a live value.
        if unsafe { libc::syscall(libc::SYS_io_setup, RESULTS_MAX * 2, &raw mut context) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context, nowhere, results: Cell::new(0) })
    }

    /// With that of this thread.
    fn here<T>(with: impl FnOnce(&Self) -> T) -> io::Result<T> {
        thread_local!(static HERE: OnceCell<Raiser> = const { OnceCell::new() });
        HERE.with(|here| {
            if let Some(raiser) = here.get() {
                return Ok(with(raiser));
            }
            let raiser = Self::new()?;
            Ok(with(here.get_or_init(|| raiser)))
        })
    }

    fn raise(&self, eventfd: &OwnedFd) {
        if self.results.get() == RESULTS_MAX {
            self.take_results();
        }
        // SAFETY: all zeroes is a value of this plain structure, of which the call keeps nothing; it reads no bytes.
        let submit = || unsafe {
            let mut operation: libc::iocb = zeroed();
            operation.aio_lio_opcode = IOCB_CMD_PREAD;
            operation.aio_fildes = self.nowhere.as_raw_fd() as u32;
            operation.aio_flags = IOCB_FLAG_RESFD;
            operation.aio_resfd = eventfd.as_raw_fd() as u32;
            let mut list = [&raw mut operation];
            libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr())
        };
        // Every result is taken before there are too many, and the eventfd is one: only memory may be short.
        if (0..SUBMIT_TRIES).any(|_| submit() == 1) {
            self.results.set(self.results.get() + 1);
        } else {
            let error = io::Error::last_os_error();
            tracing::error!(%error, "a vhost client is not told of an answer");
        }
    }

    fn take_results(&self) {
        // SAFETY: room for as many events as are asked for; the kernel waits for none.
        let taken = unsafe {
            let mut events: [libc::c_ulong; 4 * RESULTS_MAX] = zeroed();
            let (to, limit) = (events.as_mut_ptr(), ptr::null_mut::<libc::timespec>());
            libc::syscall(libc::SYS_io_getevents, self.context, 0, RESULTS_MAX, to, limit)
        };
        assert_eq!(taken, RESULTS_MAX as libc::c_long, "what was submitted has completed");
        self.results.set(0);
    }
}

impl Drop for Raiser {
    fn drop(&mut self) {
        // SAFETY: nothing of it is in use any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use levada_base::reactor::{self, Reactor};
    use std::io::{Read, Write, pipe};
    use std::os::fd::FromRawFd;
    use std::time::Duration;

    /// One that blocks.
    pub(crate) fn eventfd() -> OwnedFd {
        // SAFETY: no memory is involved; the kernel just made this descriptor.
        unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) }
    }

    fn shared(fd: &OwnedFd) -> Stranger {
        fd.try_clone().expect("a descriptor").into()
    }

    fn file(fd: &OwnedFd) -> std::fs::File {
        fd.try_clone().expect("a descriptor").into()
    }

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        file(fd).read_exact(&mut bytes).expect("it was raised");
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn every_call_is_counted() {
        let fd = eventfd();
        let signal = Signal::new(shared(&fd)).expect("an eventfd");
        for _ in 0..1000 {
            signal.tell();
        }
        assert_eq!(count(&fd), 1000);
    }

    /// Written to, it would block for ever.
    #[test]
    fn a_full_counter_keeps_nobody_waiting() {
        let fd = eventfd();
        file(&fd).write_all(&(u64::MAX - 1).to_ne_bytes()).expect("room");
        let signal = Signal::new(shared(&fd)).expect("an eventfd");
        for _ in 0..3 {
            signal.tell();
        }
        assert_eq!(count(&fd), u64::MAX);
    }

    #[test]
    fn a_full_pipe_keeps_nobody_waiting() {
        let (mut reader, writer) = pipe().expect("a pipe");
        let signal = Signal::new(OwnedFd::from(writer).into()).expect("a pipe");
        for _ in 0..100_000 {
            signal.tell();
        }
        let mut bytes = [0; 8];
        reader.read_exact(&mut bytes).expect("it was written");
        assert_eq!(u64::from_ne_bytes(bytes), 1);
        drop(reader);
        signal.tell();
    }

    #[test]
    fn a_full_socket_keeps_nobody_waiting() {
        Reactor::new().expect("an io_uring").block_on(async {
            let (mut reader, writer) = std::os::unix::net::UnixStream::pair().expect("a pair");
            let signal = Signal::new(OwnedFd::from(writer).into()).expect("a socket");
            for _ in 0..100_000 {
                signal.tell();
            }
            let mut bytes = [0; 8];
            reader.read_exact(&mut bytes).expect("it was written");
            assert_eq!(u64::from_ne_bytes(bytes), 1);
            drop(reader);
            signal.tell();
        });
    }

    #[test]
    fn kicks_wake_once_each() {
        Reactor::new().expect("an io_uring").block_on(async {
            let fd = eventfd();
            let kick = Kick::new(shared(&fd)).expect("an eventfd");
            file(&fd).write_all(&5u64.to_ne_bytes()).expect("room");
            kick.kicked().await;
            let again = reactor::timeout(Duration::from_millis(20), kick.kicked()).await;
            assert!(again.is_err(), "kicked though nobody did");
        });
    }

    #[test]
    fn what_is_no_event_is_refused() {
        Reactor::new().expect("an io_uring").block_on(async {
            let file = || OwnedFd::from(std::fs::File::open("/dev/zero").expect("a file"));
            assert!(Kick::new(file().into()).is_err() && Signal::new(file().into()).is_err());
            let (reader, _writer) = pipe().expect("a pipe");
            assert!(Kick::new(OwnedFd::from(reader).into()).is_err());
        });
    }
}

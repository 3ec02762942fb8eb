//! A connection's bytes, in the clear or within TLS.
//!
//! - [`Channel`]: either; TLS has no I/O of its own here.
//! - [`Session`]: what TLS is to it, whichever library does it. [`Wire`]: the sealed bytes that a library takes and gives.
//!
//! One task reads and one writes at a time. Within TLS both may have records to send: the reader's (alerts, keys) go with its own next
//! step, or with the writer's data, but neither waits for the other's socket.
//!
//! What always holds:
//! - Records leave in the order in which they were sealed.
//! - A stream that ends without a farewell has been cut: that is an error.
//! - Bytes are copied twice on their way in (to the library's record, and from there to where they stay), and once on their way out, or twice where they do not fill a record.

use super::ByteStream;
use crate::buf::bytes_in;
use crate::reactor;
use crate::reactor::net::Stream;
use crate::sync::Semaphore;
use crate::{BufMut, IoVec};
use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::rc::Rc;
use std::time::Duration;

/// Plain bytes in one record, at most (RFC 8446, 5.1).
const RECORD_BYTES: usize = 16 << 10;
/// Sealed bytes that are received at once.
const RECEIVED_BYTES: usize = 64 << 10;
/// Sealed bytes in one piece of memory.
const SEALED_BYTES: usize = 64 << 10;
/// Sealed bytes that wait before some are sent: more would only take more memory.
const SEALED_AT_ONCE: u64 = 256 << 10;
/// What the reader may have to send while the writer's data wait for the socket. The other side can make it say more, but not listen.
const UNASKED_BYTES: u64 = 64 << 10;
/// How long a farewell may take.
const FAREWELL: Duration = Duration::from_millis(200);

/// TLS of one connection, for one side of it, without I/O: what was received is in its [`Wire`], and so is what is to be sent.
pub trait Session: 'static {
    fn wire(&mut self) -> &mut Wire;

    /// Goes on shaking hands; [`io::ErrorKind::WouldBlock`]: more has to be received.
    fn shake_hands(&mut self) -> io::Result<()>;

    /// Opens at least one byte; 0: the other side has said farewell. [`io::ErrorKind::WouldBlock`]: more has to be received.
    fn open(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Seals all of `plain`.
    fn seal(&mut self, plain: &[u8]) -> io::Result<()>;

    /// Says farewell.
    fn end(&mut self);
}

/// Sealed bytes, both ways, as libraries know sockets: [`io::ErrorKind::WouldBlock`] when nothing was received, and always room.
#[derive(Default)]
pub struct Wire {
    /// Absent before the first is received, and while the socket fills it.
    received: Option<BufMut>,
    start: usize,
    end: usize,
    /// Whole pieces, and one that is being filled, up to `filled`.
    sealed: IoVec,
    filling: Option<BufMut>,
    filled: usize,
}

impl Wire {
    /// One that has received `bytes` already.
    #[must_use]
    pub fn after(bytes: &[u8]) -> Self {
        let mut received = BufMut::for_overwrite(RECEIVED_BYTES.max(bytes.len()));
        received[..bytes.len()].copy_from_slice(bytes);
        Self { received: Some(received), end: bytes.len(), ..Self::default() }
    }

    fn sealed_bytes(&self) -> u64 {
        bytes_in(&self.sealed) + self.filled as u64
    }

    /// What is to be sent.
    fn take_sealed(&mut self) -> IoVec {
        let mut sealed = std::mem::take(&mut self.sealed);
        let filled = std::mem::take(&mut self.filled);
        if let Some(mut filling) = self.filling.take()
            && filled > 0
        {
            sealed.push(filling.split_to(filled).freeze());
        }
        sealed
    }
}

impl Read for Wire {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = into.len().min(self.end - self.start);
        match &self.received {
            Some(received) if bytes > 0 => {
                into[..bytes].copy_from_slice(&received[self.start..self.start + bytes]);
                self.start += bytes;
                Ok(bytes)
            }
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let filled = self.filled;
        let filling = self.filling.get_or_insert_with(|| BufMut::for_overwrite(SEALED_BYTES));
        let bytes = from.len().min(filling.len() - filled);
        filling[filled..filled + bytes].copy_from_slice(&from[..bytes]);
        self.filled += bytes;
        if self.filled == filling.len() {
            self.sealed.extend(self.filling.take().map(BufMut::freeze));
            self.filled = 0;
        }
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// See the module; cheap to clone, all clones are the same.
pub struct Channel<T> {
    stream: Stream,
    secure: Option<Rc<Secure<T>>>,
}

struct Secure<T> {
    session: RefCell<T>,
    /// Who sends.
    turn: Rc<Semaphore>,
    /// The beginning of a record: small pieces are sealed together.
    begun: RefCell<Vec<u8>>,
}

impl<T> Clone for Channel<T> {
    fn clone(&self) -> Self {
        Self { stream: self.stream.clone(), secure: self.secure.clone() }
    }
}

impl<T> From<Stream> for Channel<T> {
    /// In the clear.
    fn from(stream: Stream) -> Self {
        Self { stream, secure: None }
    }
}

impl<T: Session> Channel<T> {
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.secure.is_some()
    }

    /// The socket.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Asks TLS, if there is any.
    pub fn of_session<R>(&self, ask: impl FnOnce(&T) -> R) -> Option<R> {
        self.secure.as_ref().map(|secure| ask(&secure.session.borrow()))
    }

    /// Goes on within TLS, once both sides have shaken hands. The caller limits how long that may take.
    ///
    /// # Errors
    ///
    /// What the socket says, or TLS; the other side has been told.
    pub async fn secured(self, session: T) -> io::Result<Self> {
        let secure = Rc::new(Secure {
            session: RefCell::new(session),
            turn: Semaphore::new(1),
            begun: RefCell::default(),
        });
        loop {
            let shaken = secure.session.borrow_mut().shake_hands();
            let sent = self.send_sealed(&secure).await;
            match shaken {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sent?,
                Err(error) => return Err(error),
                Ok(()) => {
                    sent?;
                    return Ok(Self { stream: self.stream, secure: Some(secure) });
                }
            }
            self.receive(&secure).await?;
        }
    }

    /// Receives some; what was received before has been taken.
    async fn receive(&self, secure: &Secure<T>) -> io::Result<()> {
        let buffer = {
            let mut session = secure.session.borrow_mut();
            let wire = session.wire();
            // The first time, and after an interrupted call, which has taken it along.
            wire.received.take().unwrap_or_else(|| BufMut::for_overwrite(RECEIVED_BYTES))
        };
        let (buffer, bytes) = self.stream.read(buffer).await?;
        let mut session = secure.session.borrow_mut();
        let wire = session.wire();
        (wire.received, wire.start, wire.end) = (Some(buffer), 0, bytes);
        if bytes == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    /// Sends what is sealed. Who has the turn calls it.
    async fn send_sealed(&self, secure: &Secure<T>) -> io::Result<()> {
        loop {
            let sealed = secure.session.borrow_mut().wire().take_sealed();
            if sealed.is_empty() {
                return Ok(());
            }
            self.stream.write_all(sealed).await?;
        }
    }

    /// Sends what the reader has to say; while the writer sends, that goes with the rest of it.
    async fn send_unasked(&self, secure: &Secure<T>) -> io::Result<()> {
        let bytes = secure.session.borrow_mut().wire().sealed_bytes();
        let turn = match bytes {
            0 => return Ok(()),
            bytes if bytes > UNASKED_BYTES => Some(secure.turn.acquire(1).await),
            _ => secure.turn.try_acquire(1),
        };
        match turn {
            Some(_turn) => self.send_sealed(secure).await,
            None => Ok(()),
        }
    }

    /// Opens at least one byte into `into`, unless the other side has ended.
    async fn open(&self, secure: &Secure<T>, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let opened = secure.session.borrow_mut().open(into);
            match opened {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.send_unasked(secure).await?;
                    self.receive(secure).await?;
                }
                Err(error) => {
                    // The alert that says why.
                    let _ = self.send_unasked(secure).await;
                    return Err(error);
                }
                Ok(bytes) => return Ok(bytes),
            }
        }
    }

    async fn open_exactly(&self, secure: &Secure<T>, into: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < into.len() {
            match self.open(secure, &mut into[at..]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => at += bytes,
            }
        }
        Ok(())
    }

    /// Seals what is left of the beginning of a record.
    fn seal_begun(secure: &Secure<T>) -> io::Result<()> {
        let mut begun = secure.begun.borrow_mut();
        if !begun.is_empty() {
            secure.session.borrow_mut().seal(&begun)?;
            begun.clear();
        }
        Ok(())
    }

    async fn seal_all(&self, secure: &Secure<T>, from: IoVec) -> io::Result<()> {
        for part in &from {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let begun_bytes = secure.begun.borrow().len();
                let taken = rest.len().min(RECORD_BYTES - begun_bytes);
                if taken == RECORD_BYTES {
                    secure.session.borrow_mut().seal(&rest[..taken])?;
                } else {
                    secure.begun.borrow_mut().extend_from_slice(&rest[..taken]);
                    if begun_bytes + taken == RECORD_BYTES {
                        Self::seal_begun(secure)?;
                    }
                }
                rest = &rest[taken..];
                if secure.session.borrow_mut().wire().sealed_bytes() >= SEALED_AT_ONCE {
                    self.send_sealed(secure).await?;
                }
            }
        }
        Self::seal_begun(secure)?;
        self.send_sealed(secure).await
    }
}

impl<T: Session> ByteStream for Channel<T> {
    async fn read(&self, mut into: BufMut) -> io::Result<(BufMut, usize)> {
        match &self.secure {
            None => self.stream.read(into).await,
            Some(secure) => {
                let bytes = self.open(secure, &mut into).await?;
                Ok((into, bytes))
            }
        }
    }

    async fn read_exact(&self, mut into: BufMut) -> io::Result<BufMut> {
        match &self.secure {
            None => self.stream.read_exact(into).await,
            Some(secure) => {
                self.open_exactly(secure, &mut into).await?;
                Ok(into)
            }
        }
    }

    async fn land(&self, mut into: BufMut) -> (BufMut, io::Result<()>) {
        match &self.secure {
            None => self.stream.land(into).await,
            Some(secure) => {
                let landed = self.open_exactly(secure, &mut into).await;
                (into, landed)
            }
        }
    }

    async fn write_all(&self, from: IoVec) -> io::Result<()> {
        match &self.secure {
            None => self.stream.write_all(from).await,
            Some(secure) => {
                let _turn = secure.turn.acquire(1).await;
                self.seal_all(secure, from).await
            }
        }
    }

    /// Says farewell first, where nobody waits for the socket.
    async fn close(&self) {
        if let Some(secure) = &self.secure
            && let Some(_turn) = secure.turn.try_acquire(1)
        {
            secure.session.borrow_mut().end();
            let _ = reactor::timeout(FAREWELL, self.send_sealed(secure)).await;
        }
        self.stream.close().await;
    }
}

//! The bytes of a connection: a socket, in the clear or within TLS.
//!
//! One task reads and one writes at a time. Within TLS both may have records to send: the reader's (alerts, keys) go with its
//! own next step, so they never wait for the writer's data.

use crate::tls::Tls;
use levada_base::reactor::net::Stream;
use levada_base::stream::ByteStream;
use levada_base::sync::Semaphore;
use levada_base::{Buf, BufMut, IoVec};
use rustls::ServerConnection;
use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::rc::Rc;

/// Plain bytes that are sealed at once: more would only grow the buffer of sealed ones.
const SEALED_AT_ONCE: usize = 256 << 10;
/// Sealed bytes that are read at once.
const SEALED_BYTES: usize = 64 << 10;

/// A connection's bytes; cheap to clone, all clones are the same.
#[derive(Clone)]
pub(crate) struct Channel {
    stream: Stream,
    session: Option<Rc<Session>>,
}

/// The state of TLS.
struct Session {
    tls: RefCell<ServerConnection>,
    received: RefCell<Sealed>,
    /// Records leave in the order in which they were sealed.
    sending: Rc<Semaphore>,
}

/// Sealed bytes that were received and not opened: TLS takes no more than it has room for what it opens.
struct Sealed {
    /// Absent while the socket fills it.
    buffer: Option<BufMut>,
    start: usize,
    end: usize,
}

impl Session {
    /// Opens some of what was received; false: there is none.
    fn open_some(&self) -> io::Result<bool> {
        let mut received = self.received.borrow_mut();
        let Sealed { buffer: Some(buffer), start, end } = &mut *received else { return Ok(false) };
        if start == end {
            return Ok(false);
        }
        let mut rest = &buffer[*start..*end];
        let mut tls = self.tls.borrow_mut();
        tls.read_tls(&mut rest)?;
        *start = *end - rest.len();
        match tls.process_new_packets() {
            Ok(_) => Ok(true),
            Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }
}

impl Channel {
    pub(crate) fn new(stream: Stream) -> Self {
        Self { stream, session: None }
    }

    pub(crate) fn is_secure(&self) -> bool {
        self.session.is_some()
    }

    /// Goes on within TLS, once the client has shaken hands.
    pub(crate) async fn secured(self, tls: &Tls) -> io::Result<Self> {
        let mut connection = ServerConnection::new(tls.config.clone()).map_err(io::Error::other)?;
        connection.set_buffer_limit(None);
        let buffer = Some(BufMut::for_overwrite(SEALED_BYTES));
        let session = Rc::new(Session {
            tls: RefCell::new(connection),
            received: RefCell::new(Sealed { buffer, start: 0, end: 0 }),
            sending: Semaphore::new(1),
        });
        let secured = Self { stream: self.stream, session: Some(Rc::clone(&session)) };
        loop {
            secured.send_sealed(&session).await?;
            if !session.tls.borrow().is_handshaking() {
                return Ok(secured);
            }
            secured.receive_sealed(&session).await?;
        }
    }

    /// Opens what was received, or receives more; the end of the stream without a farewell is an error, as anybody could have
    /// cut it.
    async fn receive_sealed(&self, session: &Session) -> io::Result<()> {
        match session.open_some() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => {
                // The alert that says why.
                let _ = self.send_sealed(session).await;
                return Err(error);
            }
        }
        let buffer = session.received.borrow_mut().buffer.take();
        // An interrupted call has taken it along.
        let buffer = buffer.ok_or(io::ErrorKind::Interrupted)?;
        let (buffer, bytes) = self.stream.read(buffer).await?;
        *session.received.borrow_mut() = Sealed { buffer: Some(buffer), start: 0, end: bytes };
        match bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Sends what TLS has ready.
    async fn send_sealed(&self, session: &Session) -> io::Result<()> {
        let _turn = session.sending.acquire(1).await;
        self.send_sealed_in_turn(session).await
    }

    async fn send_sealed_in_turn(&self, session: &Session) -> io::Result<()> {
        let mut sealed = Vec::new();
        {
            let mut tls = session.tls.borrow_mut();
            while tls.wants_write() {
                tls.write_tls(&mut sealed)?;
            }
        }
        match sealed.is_empty() {
            true => Ok(()),
            false => self.stream.write_all(Buf::copy_of(&sealed).into_vec()).await,
        }
    }
}

impl ByteStream for Channel {
    async fn read(&self, mut into: BufMut) -> io::Result<(BufMut, usize)> {
        let Some(session) = &self.session else { return self.stream.read(into).await };
        loop {
            let plain = session.tls.borrow_mut().reader().read(&mut into);
            match plain {
                Ok(bytes) => return Ok((into, bytes)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            self.receive_sealed(session).await?;
            self.send_sealed(session).await?;
        }
    }

    async fn read_exact(&self, mut into: BufMut) -> io::Result<BufMut> {
        if self.session.is_none() {
            return self.stream.read_exact(into).await;
        }
        let mut whole = into.split_to(0);
        while !into.is_empty() {
            let bytes;
            (into, bytes) = self.read(into).await?;
            if bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            whole.unsplit(into.split_to(bytes));
        }
        Ok(whole)
    }

    async fn write_all(&self, from: IoVec) -> io::Result<()> {
        let Some(session) = &self.session else { return self.stream.write_all(from).await };
        let _turn = session.sending.acquire(1).await;
        for part in &from {
            for piece in part.chunks(SEALED_AT_ONCE) {
                session.tls.borrow_mut().writer().write_all(piece)?;
                self.send_sealed_in_turn(session).await?;
            }
        }
        Ok(())
    }

    /// Says goodbye first.
    async fn close(&self) {
        if let Some(session) = &self.session {
            session.tls.borrow_mut().send_close_notify();
            let _ = self.send_sealed(session).await;
        }
        self.stream.close().await;
    }
}

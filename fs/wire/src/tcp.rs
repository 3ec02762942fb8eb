//! Connections over stream sockets: TCP (`host:port`) and Unix (`unix:/path`).
//!
//! Sending: one task per connection writes what is queued, several frames per system call,
//! payloads from where they lie. Receiving: small frames are read many at a time through a
//! small buffer; a payload's bytes beyond it are received straight into a page-aligned buffer
//! of their own. Where both sides share memory ([`crate::sharing`]), it is not received at all, and the rest comes
//! through a pipe in memory.

use crate::channel::{ChannelError, Connection, FrameSink, FrameSource, Listener, Transport};
use crate::frame::{Announced, Frame, HEADER_BYTES};
use crate::sharing::{Following, Outgoing, PREFIX_BYTES, Queued, Sharing};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::pipe::{Reader, Writer};
use levada_base::reactor::{self, net};
use levada_base::sync::queue;
use levada_base::{BufMut, IoVec};
use std::any::Any;
use std::cell::RefCell;
use std::io;
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A receiver that takes nothing for this long is gone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// What is read ahead; also the most that is copied of a payload.
const READ_AHEAD_BYTES: usize = 16 << 10;
/// One write takes at most this many buffers (the system's limit is 1024) and bytes.
const PARTS_MAX: usize = 256;
const WRITE_BYTES_BEST: usize = 4 << 20;
/// After an error that passes, connections are taken again after this.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Connects by TCP or Unix sockets.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpTransport;

fn resolve(address: &str) -> Result<SocketAddr, ChannelError> {
    // Blocks only for names; addresses in a cluster file are numbers as a rule.
    address.to_socket_addrs()?.next().ok_or(ChannelError::Disconnected)
}

impl Transport for TcpTransport {
    fn connect<'a>(
        &'a self,
        address: &'a str,
    ) -> LocalBoxFuture<'a, Result<Connection, ChannelError>> {
        Box::pin(async move {
            let connecting = async {
                match address.strip_prefix("unix:") {
                    Some(path) => Ok(net::Stream::connect_unix(Path::new(path)).await?),
                    None => Ok(net::Stream::connect(resolve(address)?).await?.carried()),
                }
            };
            let stream = reactor::timeout(CONNECT_TIMEOUT, connecting).await;
            stream.unwrap_or(Err(ChannelError::Disconnected)).map(plain)
        })
    }
}

/// Takes connections on a TCP or Unix socket.
pub struct TcpListener {
    listener: net::Listener,
}

impl TcpListener {
    /// Listens at `address`: `host:port` (port 0: any), or `unix:/path`, where a socket left
    /// by a dead process is replaced.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn bind(address: &str) -> Result<Self, ChannelError> {
        Ok(Self { listener: listen(address)? })
    }

    /// The address that clients connect to (TCP only).
    ///
    /// # Errors
    ///
    /// For a Unix socket.
    pub fn local_addr(&self) -> Result<SocketAddr, ChannelError> {
        Ok(self.listener.local_addr()?)
    }
}

impl Listener for TcpListener {
    fn accept(&self) -> LocalBoxFuture<'_, Result<Connection, ChannelError>> {
        Box::pin(async move { Ok(plain(accept(&self.listener).await?.carried())) })
    }
}

/// The next connection. What passes, such as too many open files, is waited out: a service that took
/// no more connections for the rest of its life would let every client wait for ever.
pub(crate) async fn accept(listener: &net::Listener) -> io::Result<net::Stream> {
    let mut is_told = false;
    loop {
        match listener.accept().await {
            Err(error) if net::accept_error_passes(&error) => {
                if !is_told {
                    tracing::warn!(%error, "cannot take connections now");
                    is_told = true;
                }
                reactor::sleep(ACCEPT_AGAIN_AFTER).await;
            }
            taken => return taken,
        }
    }
}

/// See [`TcpListener::bind`].
pub(crate) fn listen(address: &str) -> Result<net::Listener, ChannelError> {
    Ok(match address.strip_prefix("unix:") {
        Some(path) => net::Listener::bind_unix(Path::new(path))?,
        None => net::Listener::bind(resolve(address)?)?,
    })
}

/// The two ends of a writer's queue.
pub(crate) fn outgoing() -> (Rc<Outgoing>, queue::Receiver<Queued>) {
    let (sender, queued) = queue::channel();
    (Rc::new(RefCell::new(Some(sender))), queued)
}

/// A connection on which every payload is copied.
pub(crate) fn plain(stream: net::Stream) -> Connection {
    let (outgoing, queued) = outgoing();
    connection(stream, outgoing, queued, None)
}

pub(crate) fn connection(
    stream: net::Stream,
    outgoing: Rc<Outgoing>,
    queued: queue::Receiver<Queued>,
    near: Option<(Rc<Sharing>, Writer)>,
) -> Connection {
    reactor::spawn(write(stream.clone(), queued, near.clone()));
    let sharing = near.map(|(sharing, writer)| Neighbour { sharing, writer, pipe: None });
    Connection {
        sink: Rc::new(TcpSink { outgoing }),
        source: Box::new(TcpSource { stream, buffer: None, start: 0, end: 0, sharing }),
    }
}

struct TcpSink {
    /// `None` once closed.
    outgoing: Rc<Outgoing>,
}

impl TcpSink {
    fn queue(&self, queued: Queued) -> Result<(), ChannelError> {
        queued.frame.check()?;
        let outgoing = self.outgoing.borrow();
        let queue = outgoing.as_ref().ok_or(ChannelError::Disconnected)?;
        queue.send(queued).map_err(|_| ChannelError::Disconnected)
    }
}

impl FrameSink for TcpSink {
    fn send(&self, frame: Frame) -> Result<(), ChannelError> {
        self.queue(frame.into())
    }

    fn send_keeping(&self, frame: Frame, kept: Box<dyn Any>) -> Result<(), ChannelError> {
        self.queue(Queued { frame, kept: Some(kept) })
    }

    fn close(&self) {
        // The writer ends, and with it the connection, when it has written what it has.
        let queue = self.outgoing.borrow_mut().take();
        drop(queue);
    }
}

/// Puts a frame into `parts` as it goes over the socket; returns its bytes.
fn encode(frame: Frame, sharing: Option<&Sharing>, parts: &mut IoVec) -> usize {
    if let Some(sharing) = sharing {
        return sharing.encode(frame, parts);
    }
    let bytes = frame.body.len() + frame.payload_bytes();
    parts.push(frame.encode_head());
    parts.extend(frame.payload);
    bytes
}

async fn write(
    stream: net::Stream,
    mut queued: queue::Receiver<Queued>,
    near: Option<(Rc<Sharing>, Writer)>,
) {
    let (sharing, pipe) = near.unzip();
    while let Some(first) = queued.recv().await {
        let mut parts = IoVec::new();
        let mut next = Some(first);
        let mut bytes = 0;
        while let Some(Queued { frame, kept }) = next {
            // Before the other side can know of it.
            drop(kept);
            bytes += encode(frame, sharing.as_deref(), &mut parts);
            let full = parts.len() >= PARTS_MAX || bytes >= WRITE_BYTES_BEST;
            next = if full { None } else { queued.try_recv() };
        }
        let writing = async {
            match &pipe {
                Some(pipe) => pipe.write_all(&parts).await,
                None => write_parts(&stream, parts).await,
            }
        };
        match reactor::timeout(WRITE_TIMEOUT, writing).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(%error, "cannot send");
                break;
            }
            Err(_) => {
                tracing::warn!("the other side takes nothing");
                break;
            }
        }
    }
    // Fails only when the connection is gone already.
    let _ = stream.shutdown(Shutdown::Both);
}

/// Keeps to the system's limit of buffers per call, also for a payload of very many parts.
async fn write_parts(stream: &net::Stream, parts: IoVec) -> io::Result<()> {
    if parts.len() <= 2 * PARTS_MAX {
        return stream.write_all(parts).await;
    }
    for some in parts.chunks(PARTS_MAX) {
        stream.write_all(some.iter().cloned().collect()).await?;
    }
    Ok(())
}

struct TcpSource {
    stream: net::Stream,
    /// `start..end` of it was received and not used yet. `None` while idle.
    buffer: Option<BufMut>,
    start: usize,
    end: usize,
    sharing: Option<Neighbour>,
}

/// The other side of a connection with shared memory.
struct Neighbour {
    sharing: Rc<Sharing>,
    /// Must know the other side to wake it.
    writer: Writer,
    /// What it sends comes out of this; `None` until its offer was taken.
    pipe: Option<Reader>,
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.sharing.end();
    }
}

impl TcpSource {
    fn pipe(&self) -> Option<&Reader> {
        self.sharing.as_ref()?.pipe.as_ref()
    }

    /// Receives until at least `bytes` (at most [`READ_AHEAD_BYTES`]) are in the buffer.
    async fn fill(&mut self, bytes: usize) -> Result<(), ChannelError> {
        while self.end - self.start < bytes {
            let mut head =
                self.buffer.take().unwrap_or_else(|| BufMut::for_overwrite(READ_AHEAD_BYTES));
            head.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let mut tail = head;
            head = tail.split_to(self.end);
            let (tail, received) = match self.pipe() {
                Some(pipe) => pipe.read(tail).await?,
                None => self.stream.read(tail).await?,
            };
            head.unsplit(tail);
            self.buffer = Some(head);
            self.end += received;
            if received == 0 {
                return Err(ChannelError::Disconnected);
            }
        }
        Ok(())
    }

    /// Moves the next bytes to `into`: first from the buffer, the rest from the socket.
    async fn read_into(&mut self, mut into: BufMut) -> Result<BufMut, ChannelError> {
        let held = (self.end - self.start).min(into.len());
        let mut head = into.split_to(held);
        if let Some(buffer) = &self.buffer {
            head.copy_from_slice(&buffer[self.start..self.start + held]);
        }
        self.start += held;
        if !into.is_empty() {
            into = match self.pipe() {
                Some(pipe) => pipe.read_exact(into).await?,
                None => self.stream.read_exact(into).await?,
            };
        }
        head.unsplit(into);
        Ok(head)
    }

    /// The next `bytes` bytes (at most [`READ_AHEAD_BYTES`]).
    async fn take(&mut self, bytes: usize) -> Result<&[u8], ChannelError> {
        self.fill(bytes).await?;
        let at = self.start;
        self.start += bytes;
        // There is no buffer before the first byte.
        Ok(self.buffer.as_ref().map_or(&[], |buffer| &buffer[at..at + bytes]))
    }

    /// What shared memory adds in front of a frame; returns what it puts in a payload's place.
    async fn prefix(&mut self) -> Result<usize, ChannelError> {
        let Some(neighbour) = &mut self.sharing else { return Ok(0) };
        let sharing = Rc::clone(&neighbour.sharing);
        if neighbour.pipe.is_none() {
            neighbour.pipe = Some(sharing.accept_offer(&self.stream, &neighbour.writer).await?);
        }
        let prefix: [u8; PREFIX_BYTES] =
            self.take(PREFIX_BYTES).await?.try_into().expect("as asked");
        let Following { return_bytes, table_bytes } = sharing.decode_prefix(&prefix)?;
        sharing.returned(self.take(return_bytes).await?);
        Ok(table_bytes)
    }

    async fn next(&mut self) -> Result<Frame, ChannelError> {
        let table_bytes = self.prefix().await?;
        let fixed = self.take(HEADER_BYTES).await?;
        let announced = Announced::decode(fixed.first_chunk().expect("as asked"))?;
        let body = if announced.body_bytes <= READ_AHEAD_BYTES {
            self.take(announced.body_bytes).await?.to_vec()
        } else {
            self.read_into(BufMut::for_overwrite(announced.body_bytes)).await?.to_vec()
        };
        if let Some(neighbour) = self.sharing.as_ref().filter(|_| table_bytes > 0) {
            let sharing = Rc::clone(&neighbour.sharing);
            let table = self.take(table_bytes).await?;
            let payload = sharing.payload(table, announced.payload_bytes)?;
            return Ok(announced.complete_in_place(body, payload)?);
        }
        let payload = match announced.payload_bytes {
            0 => None,
            bytes => Some(self.read_into(BufMut::for_overwrite(bytes)).await?.freeze()),
        };
        Ok(announced.complete(body, payload)?)
    }
}

impl FrameSource for TcpSource {
    fn recv(&mut self) -> LocalBoxFuture<'_, Result<Frame, ChannelError>> {
        Box::pin(self.next())
    }
}

//! Connections over stream sockets: TCP (`host:port`) and Unix (`unix:/path`).
//!
//! Sending: one task per connection writes what is queued, several frames per system call,
//! payloads from where they lie. Receiving: small frames are read many at a time through a
//! small buffer; a payload's bytes beyond it are received straight into a page-aligned buffer
//! of their own.

use crate::channel::{ChannelError, Connection, FrameSink, FrameSource, Listener, Transport};
use crate::frame::{Announced, Frame, HEADER_BYTES};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, net};
use levada_base::sync::queue;
use levada_base::{Buf, BufMut, IoVec};
use std::cell::RefCell;
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
                    None => Ok(net::Stream::connect(resolve(address)?).await?),
                }
            };
            let stream = reactor::timeout(CONNECT_TIMEOUT, connecting).await;
            stream.unwrap_or(Err(ChannelError::Disconnected)).map(connection)
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
        let listener = match address.strip_prefix("unix:") {
            Some(path) => net::Listener::bind_unix(Path::new(path))?,
            None => net::Listener::bind(resolve(address)?)?,
        };
        Ok(Self { listener })
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
        Box::pin(async move { Ok(connection(self.listener.accept().await?)) })
    }
}

fn connection(stream: net::Stream) -> Connection {
    let (queue, queued) = queue::channel();
    reactor::spawn(write(stream.clone(), queued));
    Connection {
        sink: Rc::new(TcpSink { queue: RefCell::new(Some(queue)) }),
        source: Box::new(TcpSource { stream, buffer: None, start: 0, end: 0 }),
    }
}

struct TcpSink {
    /// `None` once closed.
    queue: RefCell<Option<queue::Sender<Frame>>>,
}

impl FrameSink for TcpSink {
    fn send(&self, frame: Frame) -> Result<(), ChannelError> {
        frame.check()?;
        let queue = self.queue.borrow();
        let queue = queue.as_ref().ok_or(ChannelError::Disconnected)?;
        queue.send(frame).map_err(|_| ChannelError::Disconnected)
    }

    fn close(&self) {
        // The writer ends, and with it the connection, when it has written what it has.
        let queue = self.queue.borrow_mut().take();
        drop(queue);
    }
}

async fn write(stream: net::Stream, mut queued: queue::Receiver<Frame>) {
    while let Some(first) = queued.recv().await {
        let mut parts = IoVec::new();
        let mut next = Some(first);
        let mut bytes = 0;
        while let Some(frame) = next {
            bytes += frame.body.len() + frame.payload_bytes();
            parts.push(frame.encode_head());
            parts.extend(frame.payload);
            let full = parts.len() >= PARTS_MAX || bytes >= WRITE_BYTES_BEST;
            next = if full { None } else { queued.try_recv() };
        }
        match reactor::timeout(WRITE_TIMEOUT, write_parts(&stream, parts)).await {
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
async fn write_parts(stream: &net::Stream, parts: IoVec) -> std::io::Result<()> {
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
}

impl TcpSource {
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
            let (tail, received) = self.stream.read(tail).await?;
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
            into = self.stream.read_exact(into).await?;
        }
        head.unsplit(into);
        Ok(head)
    }

    async fn next(&mut self) -> Result<Frame, ChannelError> {
        self.fill(HEADER_BYTES).await?;
        let buffer = self.buffer.as_ref().expect("filled");
        let fixed = buffer[self.start..].first_chunk().expect("filled");
        let announced = Announced::decode(fixed)?;
        self.start += HEADER_BYTES;
        let body = if announced.body_bytes <= READ_AHEAD_BYTES {
            self.fill(announced.body_bytes).await?;
            let at = self.start;
            self.start += announced.body_bytes;
            self.buffer
                .as_ref()
                .map_or(Vec::new(), |buffer| buffer[at..at + announced.body_bytes].to_vec())
        } else {
            self.read_into(BufMut::for_overwrite(announced.body_bytes)).await?.to_vec()
        };
        let payload: Option<Buf> = match announced.payload_bytes {
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

//! A client that is connected: its messages, and its queues.
//!
//! What always holds:
//! - When a session is over nothing of it is under way: who comes next finds a volume to which nobody else's earlier writes
//!   are still on their way.
//! - A client that stops in the middle of a message, or does not take its answers, costs nobody else anything.

use crate::cores::Begin;
use crate::device::{Device, Refusal, Step};
use crate::message::{Answer, BadMessage, HEADER_BYTES, Header, Request, config_change};
use crate::placed::Placed;
use crate::queue::{Queue, Signals};
use crate::ring::{Broken, Ring};
use crate::served::{Served, Source};
use crate::stranger::Stranger;
use futures_util::future::join_all;
use levada_base::reactor;
use levada_base::reactor::net::Stream;
use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

/// Descriptors that come with a message; a memory table has the most.
const DESCRIPTORS_MAX: usize = 8;

/// Why a session ended before its client wanted.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("the connection")]
    Io(#[from] io::Error),
    #[error("a message")]
    Message(#[from] BadMessage),
    #[error("message {request} was refused, and its sender does not ask whether")]
    Refused { request: u32, source: Refusal },
}

pub(crate) struct Session<S> {
    stream: Stream,
    served: Rc<S>,
    device: RefCell<Device>,
    queues: RefCell<Vec<Option<Placed<S>>>>,
    /// Where messages of the back end go.
    channel: RefCell<Option<Stream>>,
    messages: Cell<u64>,
}

impl<S: Served> Session<S> {
    pub(crate) fn new(stream: Stream, served: Rc<S>, queues: u16) -> Rc<Self> {
        let device = RefCell::new(Device::new(served.offered(), S::PROTOCOL, queues));
        let queues = RefCell::new((0..queues).map(|_| None).collect());
        let (channel, messages) = (RefCell::default(), Cell::new(0));
        Rc::new(Self { stream, served, device, queues, channel, messages })
    }

    /// Serves the client until it goes, breaks the protocol, or [`Session::hang_up`] is called.
    pub(crate) async fn serve(self: Rc<Self>) {
        let ended = self.exchange().await;
        self.hang_up();
        self.served.gone();
        self.drain_strangers().await;
        // None takes anything more while others end.
        self.queues.borrow().iter().flatten().for_each(|queue| queue.set_enabled(false));
        let count = self.queues.borrow().len();
        for number in 0..count {
            let queue = self.queues.borrow_mut()[number].take();
            if let Some(queue) = queue {
                queue.end().await;
            }
        }
        self.served.left().await;
        if let Err(error) = ended {
            let (error, messages) = (whole(&error), self.messages.get());
            tracing::info!(%error, messages, "a vhost client is left");
        }
    }

    /// Takes descriptors that were sent and not received: with the socket they would be closed on this thread.
    async fn drain_strangers(&self) {
        let (mut bytes, mut fds) = ([0; 1024], Vec::new());
        while matches!(self.receive_some(&mut bytes, &mut fds).await, Ok(1..)) {
            fds.clear();
            reactor::yield_now().await;
        }
    }

    async fn receive_some(&self, into: &mut [u8], fds: &mut Vec<Stranger>) -> io::Result<usize> {
        let mut sent = Vec::new();
        let received = self.stream.receive_some(into, &mut sent).await;
        fds.extend(sent.into_iter().map(Stranger::from));
        received
    }

    /// Makes [`Session::serve`] come to its end.
    pub(crate) fn hang_up(&self) {
        // It fails when the client has gone already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Tells the client that the configuration has changed, if it wants to hear of that.
    pub(crate) fn tell_config_change(&self) {
        self.served.changed();
        let channel = self.channel.borrow();
        if let Some(channel) = &*channel
            && let Err(error) = channel.send_descriptors(&config_change(), &[])
        {
            tracing::warn!(%error, "a vhost client cannot be told of the new size");
        }
    }

    async fn exchange(&self) -> Result<(), SessionError> {
        let mut payload = Vec::new();
        let mut fds = Vec::new();
        loop {
            let mut header = [0; HEADER_BYTES];
            if !self.receive(&mut header, &mut fds).await? {
                return Ok(());
            }
            let header = Header::parse(&header)?;
            payload.resize(header.payload_bytes, 0);
            if !self.receive(&mut payload, &mut fds).await? {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            self.messages.set(self.messages.get() + 1);
            let request = Request::parse(header.request, &payload)?;
            let (fewest, most) = request.descriptors();
            if fds.len() < fewest || fds.len() > most {
                let (request, descriptors) = (header.request, fds.len());
                return Err(BadMessage::Descriptors { request, descriptors }.into());
            }
            self.handle(header, request, std::mem::take(&mut fds)).await?;
            // A client may send faster than it is read; others have their turn all the same.
            reactor::yield_now().await;
        }
    }

    /// Fills `into`; false when the client went before the first byte.
    async fn receive(&self, into: &mut [u8], fds: &mut Vec<Stranger>) -> io::Result<bool> {
        let mut done = 0;
        while done < into.len() {
            let received = self.receive_some(&mut into[done..], fds).await?;
            if fds.len() > DESCRIPTORS_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            match received {
                0 if done == 0 => return Ok(false),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => done += bytes,
            }
        }
        Ok(true)
    }

    async fn handle(
        &self,
        header: Header,
        request: Request,
        fds: Vec<Stranger>,
    ) -> Result<(), SessionError> {
        let needs_ack = |this: &Self| header.needs_reply && this.device.borrow().has_acks();
        let send = |answer: Answer, fd: Option<OwnedFd>| {
            let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
            self.stream.send_descriptors(&answer.message(header.request), &fds)
        };
        match self.step(request, fds).await {
            Ok(Some((answer, fd))) => send(answer, fd)?,
            Ok(None) if needs_ack(self) => send(Answer::Number(0), None)?,
            Ok(None) => {}
            Err(refusal) if needs_ack(self) => {
                tracing::info!(error = %whole(&refusal), "a vhost client is refused");
                send(Answer::Number(1), None)?;
            }
            Err(source) => {
                return Err(SessionError::Refused { request: header.request, source });
            }
        }
        Ok(())
    }

    async fn step(
        &self,
        request: Request,
        fds: Vec<Stranger>,
    ) -> Result<Option<(Answer, Option<OwnedFd>)>, Refusal> {
        let step = match request {
            Request::GetConfig { offset, bytes, flags } => {
                return Ok(Some((self.configuration(offset, bytes, flags), None)));
            }
            request => self.device.borrow_mut().handle(request, fds)?,
        };
        match step {
            Step::Done => {
                self.served.agreed(self.device.borrow().features);
            }
            Step::Answer(answer, fd) => return Ok(Some((answer, fd))),
            Step::Ring(number) => {
                self.look_at(number)?;
                self.settled(number..number + 1).await;
            }
            Step::Rings => {
                let rings = 0..self.device.borrow().rings.len();
                rings.clone().try_for_each(|number| self.look_at(number))?;
                self.settled(rings).await;
            }
            Step::Drain(number) => {
                let base = self.drain(number).await;
                return Ok(Some((Answer::VringBase { ring: number as u32, base }, None)));
            }
            Step::Channel(fd) => *self.channel.borrow_mut() = Some(Stream::adopt(fd)),
        }
        Ok(None)
    }

    fn configuration(&self, offset: u32, bytes: u32, flags: u32) -> Answer {
        let queues = self.device.borrow().rings.len() as u16;
        let mut data = self.served.configuration(queues);
        // Drivers may know more fields than there are.
        let end = offset as usize + bytes as usize;
        data.resize(data.len().max(end.min(256)), 0);
        let data = data.get(offset as usize..end).unwrap_or_default().to_vec();
        Answer::Config { offset, flags, data }
    }

    /// Brings a queue to what the device says of its ring.
    fn look_at(&self, number: usize) -> Result<(), Broken> {
        let mut device = self.device.borrow_mut();
        let mut queues = self.queues.borrow_mut();
        let Some(shape) = device.shape(number)? else { return Ok(()) };
        if let Some(queue) = &queues[number] {
            queue.set_memory(&device.memory, &shape);
        } else {
            let inflight = device.inflight(number)?;
            let base = device.rings[number].base;
            match Ring::new(&device.memory, &shape, base, inflight) {
                Ok(ring) => {
                    let source = Source { queue: number, size: shape.size };
                    let memory = Arc::clone(&device.memory);
                    queues[number] = Some(match self.served.elsewhere() {
                        Some((core, client)) => {
                            Placed::There(core.begin(Begin { client, source, ring, memory }))
                        }
                        None => {
                            let served = Rc::clone(&self.served);
                            Placed::Here(Queue::run(served, source, ring, memory))
                        }
                    });
                }
                Err(broken) => {
                    // Not again with every message; the next kick starts it anew.
                    let ring = &mut device.rings[number];
                    ring.is_started = false;
                    if let Some(err) = &ring.err {
                        err.tell();
                    }
                    return Err(broken);
                }
            }
        }
        let (ring, is_enabled) = (&device.rings[number], device.is_enabled(number));
        if let Some(queue) = &queues[number] {
            queue.set_signals(Signals { call: ring.call.clone(), err: ring.err.clone() });
            queue.set_kick(ring.kick.clone());
            queue.set_enabled(is_enabled);
        }
        Ok(())
    }

    /// Waits until these queues serve as they were told to.
    async fn settled(&self, rings: Range<usize>) {
        let settling: Vec<_> = {
            let queues = self.queues.borrow();
            queues[rings].iter().flatten().filter_map(Placed::settled).collect()
        };
        join_all(settling).await;
    }

    /// Stops a ring; where it stands when all that came from it is answered.
    async fn drain(&self, number: usize) -> u32 {
        let queue = self.queues.borrow_mut()[number].take();
        let base = match queue {
            Some(queue) => Some(queue.end().await),
            None => None,
        };
        let mut device = self.device.borrow_mut();
        let ring = &mut device.rings[number];
        ring.is_started = false;
        if let Some(base) = base {
            ring.base = base;
        }
        (ring.kick, ring.call, ring.err) = (None, None, None);
        ring.base
    }
}

impl<S> Drop for Session<S> {
    fn drop(&mut self) {
        self.queues.get_mut().iter_mut().flatten().for_each(Placed::leave);
    }
}

/// An error with what caused it, on one line.
fn whole(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        line.push_str(": ");
        line.push_str(&error.to_string());
        source = error.source();
    }
    line
}

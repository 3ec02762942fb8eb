//! One client that uses an export: its requests side by side, within bounds.

use crate::negotiation::Agreed;
use crate::option::ALLOCATION_ID;
use crate::reply::{self, Error, Form};
use crate::request::{
    Command, CommandFlags, EXTENDED_REQUEST_BYTES, NotARequest, REQUEST_BYTES, Request,
};
use crate::tls::Channel;
use futures_util::future::{Either, select};
use levada_base::reactor;
use levada_base::stream::{ByteStream, Head, Inbox, Outbox, Outgoing};
use levada_base::sync::{Once, Semaphore};
use levada_base::{Buf, IoVec};
use levada_device::Durability;
use levada_volume::{Extent, Volume, VolumeError, Zeroing};
use std::io;
use std::pin::pin;
use std::rc::Rc;

/// Data of one request, in either direction (what clients take for granted: proto.md, "Block size constraints").
pub(crate) const DATA_BYTES_MAX: u64 = 32 << 20;
/// Requests of a connection under way.
const REQUESTS_MAX: u64 = 1024;
/// Data of a connection under way, in both directions.
const BYTES_MAX: u64 = 64 << 20;
/// Extents in one answer.
const EXTENTS_MAX: usize = 4096;

/// Why a connection ends before the client says so.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Request(#[from] NotARequest),
    /// It is not received: who sends it has not read what a request may have.
    #[error("a request has {bytes} bytes of data, and may have {DATA_BYTES_MAX}")]
    TooLong { bytes: u64 },
}

/// What a connection's requests share.
struct Connection {
    volume: Rc<dyn Volume>,
    form: Form,
    has_allocation: bool,
    is_read_only: bool,
    outbox: Outbox,
    requests: Rc<Semaphore>,
    bytes: Rc<Semaphore>,
}

/// Serves a client until it is done, or the server is. All its requests have been carried out when this returns.
pub(crate) async fn serve(agreed: Agreed, stopping: &Once) -> Result<(), Broken> {
    let Agreed { channel, mut inbox, volume, form, has_allocation } = agreed;
    let connection = Rc::new(Connection {
        is_read_only: volume.shape().is_read_only,
        volume,
        form,
        has_allocation,
        outbox: Outbox::default(),
        requests: Semaphore::new(REQUESTS_MAX),
        bytes: Semaphore::new(BYTES_MAX),
    });
    let writer = {
        let (connection, channel) = (Rc::clone(&connection), channel.clone());
        reactor::spawn(async move {
            let sent = connection.outbox.run(&channel).await;
            if sent.is_err() {
                // So that the reader hears of it as well.
                channel.close().await;
            }
        })
    };
    let received = connection.receive(&mut inbox, stopping).await;
    // Those under way are answered, or their client is gone.
    drop(connection.requests.acquire(REQUESTS_MAX).await);
    connection.outbox.close();
    // A task that was killed has nothing more to send.
    let _ = writer.await;
    channel.close().await;
    received
}

impl Connection {
    /// Takes requests, each of which is carried out by a task of its own.
    async fn receive(
        self: &Rc<Self>,
        inbox: &mut Inbox<Channel>,
        stopping: &Once,
    ) -> Result<(), Broken> {
        let is_extended = self.form == Form::Extended;
        let head_bytes = if is_extended { EXTENDED_REQUEST_BYTES } else { REQUEST_BYTES };
        loop {
            let request = {
                let head = pin!(inbox.head(head_bytes));
                let head = match select(head, pin!(stopping.happened())).await {
                    Either::Left((head, _)) => head?,
                    Either::Right(((), _)) => return Ok(()),
                };
                let Some(head) = head else { return Ok(()) };
                Request::parse(head, is_extended)?
            };
            if request.command == Command::Disconnect {
                return Ok(());
            }
            let payload_bytes = request.payload_bytes(is_extended);
            if payload_bytes > DATA_BYTES_MAX {
                return Err(Broken::TooLong { bytes: payload_bytes });
            }
            let slot = self.requests.acquire(1).await;
            let data_bytes = match request.command {
                Command::Read => request.bytes.min(DATA_BYTES_MAX),
                _ => payload_bytes,
            };
            let room = match data_bytes {
                0 => None,
                bytes => Some(self.bytes.acquire(bytes).await),
            };
            let payload = match (request.command, payload_bytes) {
                (Command::Write, bytes) => Some(inbox.payload(bytes as usize).await?),
                (_, bytes) => {
                    inbox.skip(bytes).await?;
                    None
                }
            };
            let connection = Rc::clone(self);
            reactor::run_or_spawn(async move {
                let (head, data) = connection.answer(request, payload).await;
                let held = [Some(slot), room];
                connection.outbox.push(Outgoing { head: &head, data, tail: &[], held });
            });
        }
    }

    async fn answer(&self, request: Request, payload: Option<Buf>) -> (Head, IoVec) {
        let Request { cookie, at, .. } = request;
        match self.carried_out(request, payload).await {
            Ok(answer) => answer,
            Err(error) => (reply::failed(self.form, cookie, at, error), IoVec::new()),
        }
    }

    async fn carried_out(
        &self,
        request: Request,
        payload: Option<Buf>,
    ) -> Result<(Head, IoVec), Error> {
        let Request { command, flags, cookie, at, bytes } = request;
        if !request.has_sound_flags() {
            return Err(Error::Invalid);
        }
        match command {
            Command::Read => {
                let data = self.read(at, bytes).await?;
                return Ok((reply::data(self.form, cookie, at, bytes), data));
            }
            Command::BlockStatus => {
                let is_one = flags.contains(CommandFlags::REQ_ONE);
                let extents = self.extents(at, bytes, is_one).await?;
                let head = reply::extents(self.form, cookie, at, ALLOCATION_ID, &extents);
                return Ok((head, IoVec::new()));
            }
            Command::Flush => self.flush().await?,
            // Everything is as near as it gets; but not what is outside.
            Command::Cache => self.check(at, bytes)?,
            Command::Write | Command::Trim | Command::WriteZeroes => {
                self.change(request, payload).await?;
            }
            Command::Disconnect | Command::Unknown(_) => return Err(Error::Invalid),
        }
        Ok((reply::done(self.form, cookie, at), IoVec::new()))
    }

    fn check(&self, at: u64, bytes: u64) -> Result<(), Error> {
        let is_inside = at.checked_add(bytes).is_some_and(|end| end <= self.volume.size_bytes());
        if is_inside && bytes > 0 { Ok(()) } else { Err(Error::Invalid) }
    }

    async fn read(&self, at: u64, bytes: u64) -> Result<IoVec, Error> {
        match bytes {
            0 => return Err(Error::Invalid),
            // Extended headers could ask for more.
            bytes if bytes > DATA_BYTES_MAX => return Err(Error::Overflow),
            _ => {}
        }
        self.volume.read(at, bytes).await.map_err(|error| self.told(&error, false))
    }

    async fn extents(&self, at: u64, bytes: u64, is_one: bool) -> Result<Vec<Extent>, Error> {
        self.check(at, bytes)?;
        if !self.has_allocation {
            return Err(Error::Invalid);
        }
        let extents = self.volume.extents(at, bytes).await;
        let mut extents = extents.map_err(|error| self.told(&error, false))?;
        extents.truncate(if is_one { 1 } else { EXTENTS_MAX });
        Ok(extents)
    }

    async fn flush(&self) -> Result<(), Error> {
        self.volume.flush().await.map_err(|error| self.told(&error, false))
    }

    async fn change(&self, request: Request, payload: Option<Buf>) -> Result<(), Error> {
        let Request { command, flags, at, bytes, .. } = request;
        if self.is_read_only {
            return Err(Error::NotPermitted);
        }
        if bytes == 0 {
            return Err(Error::Invalid);
        }
        let is_durable = flags.contains(CommandFlags::FUA);
        let changed = match (command, payload) {
            (Command::Write, Some(data)) => {
                let durability = if is_durable { Durability::Fua } else { Durability::Volatile };
                let written = self.volume.write(at, data.into_vec(), durability).await;
                return written.map_err(|error| self.told(&error, true));
            }
            (Command::Trim, _) => self.volume.discard(at, bytes).await,
            _ if flags.contains(CommandFlags::NO_HOLE) => {
                if flags.contains(CommandFlags::FAST_ZERO) {
                    // As slow as writing them.
                    return Err(Error::NotSupported);
                }
                self.volume.write_zeroes(at, bytes, Zeroing::Keep).await
            }
            _ => self.volume.write_zeroes(at, bytes, Zeroing::Free).await,
        };
        changed.map_err(|error| self.told(&error, true))?;
        if is_durable { self.flush().await } else { Ok(()) }
    }

    fn told(&self, error: &VolumeError, is_change: bool) -> Error {
        if !matches!(error, VolumeError::OutOfRange { .. }) {
            tracing::warn!(%error, "a request of an NBD client failed");
        }
        Error::of(error, is_change)
    }
}

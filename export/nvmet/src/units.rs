//! What a host sends, unit by unit, and how it begins: what both agree on, and the command that connects its queue.

use crate::connect::{Comer, Connected, connect};
use crate::io::DATA_BYTES_MAX;
use crate::port::Port;
use crate::target::Shared;
use futures_util::future::{Either, select};
use levada_base::checksum::crc32c;
use levada_base::reactor;
use levada_base::stream::{ByteStream, Head, Inbox};
use levada_base::{Buf, BufMut};
use levada_nvme::fabrics::MUST_AUTHENTICATE;
use levada_nvme::pdu::{
    COMMON_BYTES, Common, DIGEST_BYTES, Digests, Fatal, Framing, Initialize, Kind, Pdu, Terminated,
};
use levada_nvme::{COMMAND_BYTES, Command, Completion, Status};
use std::io as system;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// How long answers may take to leave when a connection ends.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(5);
/// Data within a command of an admin queue, at most (TCP, 3.3.2).
pub(crate) const ADMIN_IN_CAPSULE_BYTES: usize = 8192;
/// Data of one unit from the host.
const UNIT_BYTES_MAX: u32 = DATA_BYTES_MAX as u32;

/// Why a connection ends before the host says so.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error(transparent)]
    Io(#[from] system::Error),
    #[error(transparent)]
    Fatal(#[from] Fatal),
    #[error(transparent)]
    Terminated(#[from] Terminated),
    #[error("the queue was not connected: {0}")]
    Refused(Status),
    #[error("the host did not connect a queue in time")]
    Late,
    #[error("others came while the host had not said who it is")]
    Displaced,
    #[error("no TLS: {0}")]
    Tls(system::Error),
}

/// The host has ended within something.
pub(crate) fn cut_off() -> Broken {
    system::Error::from(system::ErrorKind::UnexpectedEof).into()
}

/// What a host sends, unit by unit.
pub(crate) struct Reader<S> {
    inbox: Inbox<S>,
    pub framing: Framing,
    last: Last,
}

/// The header of the last unit, without its digest.
enum Last {
    /// It was taken of the inbox, so many bytes ago, has so many, and is still there.
    Taken { ago: usize, bytes: usize },
    /// What there is of it. What follows it may be received over where it was.
    Kept(Head),
}

/// Data of a unit; `None`: they arrived otherwise than they were sent.
pub(crate) type Data = Option<Buf>;

/// A unit whose header was received, and how much follows it: padding and data.
pub(crate) struct Unit {
    pub common: Common,
    pub pdu: Pdu,
    padding: usize,
    pub data_bytes: usize,
}

/// The first unit of what was received, if all of its header is there, and how many bytes that has with its digest.
#[inline]
fn first_unit(received: &[u8], digests: Digests) -> Result<Option<(Unit, usize)>, Fatal> {
    let Some((bare, rest)) = received.split_first_chunk() else { return Ok(None) };
    let common = Common::parse(bare)?;
    let rest_bytes = common.rest_bytes(digests);
    let Some(rest) = rest.get(..rest_bytes) else { return Ok(None) };
    let pdu = common.pdu(rest, digests)?;
    let (padding, data_bytes) = common.data_bytes(digests)?;
    Ok(Some((Unit { common, pdu, padding, data_bytes }, COMMON_BYTES + rest_bytes)))
}

impl<S: ByteStream + 'static> Reader<S> {
    pub fn new(inbox: Inbox<S>) -> Self {
        Self { inbox, framing: Framing::FIRST, last: Last::Kept(Head::new()) }
    }

    fn digests(&self) -> Digests {
        self.framing.digests
    }

    /// The next unit's header. `None`: the host is gone.
    pub async fn unit(&mut self) -> Result<Option<Unit>, Broken> {
        loop {
            if let Some(unit) = self.unit_at_hand()? {
                return Ok(Some(unit));
            }
            if !self.receive().await? {
                return Ok(None);
            }
        }
    }

    /// Receives more. False: the host is gone.
    pub async fn receive(&mut self) -> Result<bool, Broken> {
        let more = self.inbox.rest().len() + 1;
        Ok(self.inbox.fill(more).await?)
    }

    /// The next unit's header, if all of it was received.
    #[inline]
    pub fn unit_at_hand(&mut self) -> Result<Option<Unit>, Fatal> {
        let received = self.inbox.rest();
        match first_unit(received, self.framing.digests) {
            Ok(None) => Ok(None),
            Ok(Some((unit, bytes))) => {
                let header = COMMON_BYTES + unit.common.rest_bytes(Digests::default());
                self.last = match unit.data_bytes {
                    // Copied, it would be a good part of what a small command costs.
                    0 => Last::Taken { ago: bytes, bytes: header },
                    _ => Last::Kept(Head::from_slice(&received[..header])),
                };
                self.inbox.take(bytes);
                Ok(Some(unit))
            }
            Err(fatal) => Err(self.wrong(fatal)),
        }
    }

    /// The unit that comes next is wrong.
    #[cold]
    fn wrong(&mut self, fatal: Fatal) -> Fatal {
        let received = self.inbox.rest();
        let whole = received.first_chunk().and_then(|bare| Common::parse(bare).ok());
        let rest = whole.map_or(0, |common| common.rest_bytes(Digests::default()));
        let there = received.len().min(COMMON_BYTES + rest);
        self.last = Last::Kept(Head::from_slice(&received[..there]));
        fatal
    }

    /// The next unit, if it is a command without data and was received. Others are left to [`Reader::unit_at_hand`].
    #[inline]
    pub fn command_at_hand(&mut self) -> Result<Option<Command>, Fatal> {
        let (received, digests) = (self.inbox.rest(), self.framing.digests);
        let common = received.first_chunk().and_then(|bare| Common::parse(bare).ok());
        let is_alone = |common: &Common| common.data_bytes(digests) == Ok((0, 0));
        if !common.is_some_and(|common| common.kind == Kind::Command && is_alone(&common)) {
            return Ok(None);
        }
        match first_unit(received, digests) {
            Ok(Some((Unit { pdu: Pdu::Command(command), data_bytes: 0, .. }, bytes))) => {
                self.last = Last::Taken { ago: bytes, bytes: COMMON_BYTES + COMMAND_BYTES };
                self.inbox.take(bytes);
                Ok(Some(command))
            }
            Ok(_) => Ok(None),
            Err(fatal) => Err(self.wrong(fatal)),
        }
    }

    /// What there is of the last unit's header, for the host to know which one was wrong.
    pub fn head(&self) -> &[u8] {
        match &self.last {
            Last::Taken { ago, bytes } => {
                self.inbox.taken(*ago).map_or(&[], |head| &head[..*bytes])
            }
            Last::Kept(head) => head,
        }
    }

    /// The data of a unit, of which there are some.
    pub async fn data(&mut self, unit: &Unit) -> Result<Data, Broken> {
        let (data, is_sound) = self.data_into(unit, BufMut::for_overwrite(unit.data_bytes)).await?;
        Ok(is_sound.then(|| data.freeze()))
    }

    /// Takes the data of a unit, and forgets them.
    pub async fn skip_data(&mut self, unit: &Unit) -> Result<(), Broken> {
        let digest = match unit.common.has_data_digest(self.digests()) {
            true => DIGEST_BYTES,
            false => 0,
        };
        Ok(self.inbox.skip((unit.padding + unit.data_bytes + digest) as u64).await?)
    }

    /// The data of a unit, into memory for exactly as many; false: they arrived otherwise than they were sent.
    pub async fn data_into(&mut self, unit: &Unit, into: BufMut) -> Result<(BufMut, bool), Broken> {
        self.inbox.skip(unit.padding as u64).await?;
        let data = self.inbox.fill_exactly(into).await?;
        if !unit.common.has_data_digest(self.digests()) {
            return Ok((data, true));
        }
        let digest = self.inbox.head(DIGEST_BYTES).await?;
        let digest = digest.ok_or_else(cut_off)?;
        let is_sound = crc32c(&data).to_le_bytes() == digest;
        Ok((data, is_sound))
    }

    /// Returns when an answer may leave. A host that has none yet sends nothing more: what comes meanwhile is its end.
    async fn passes(&mut self, port: &Port) -> Result<(), Broken> {
        let mut passes = pin!(port.passes());
        let stirred = match select(passes.as_mut(), pin!(self.inbox.stirs())).await {
            Either::Left(_) => return Ok(()),
            Either::Right((stirred, _)) => stirred?,
        };
        if !stirred {
            return Err(cut_off());
        }
        passes.await;
        Ok(())
    }

    /// Agrees on how units are built.
    pub async fn initialize(&mut self, channel: &S, port: &Port) -> Result<(), Broken> {
        let unit = self.unit().await?.ok_or_else(cut_off)?;
        let Pdu::InitializeRequest(request) = unit.pdu else { return Err(Fatal::Sequence.into()) };
        let response = Initialize {
            alignment_bytes: Framing::FIRST.alignment_bytes,
            digests: request.digests,
            limit: UNIT_BYTES_MAX,
        };
        let head = Framing::FIRST.head(&Pdu::InitializeResponse(response), 0);
        self.passes(port).await?;
        channel.write_all(Buf::copy_of(&head).into_vec()).await?;
        self.framing =
            Framing { digests: request.digests, alignment_bytes: request.alignment_bytes };
        Ok(())
    }

    /// Connects the queue that the host asks for, with its first command.
    pub async fn connect(
        &mut self,
        channel: &S,
        shared: &Rc<Shared>,
        port: &Rc<Port>,
        comer: Comer<'_>,
    ) -> Result<Connected, Broken> {
        let unit = self.unit().await?.ok_or_else(cut_off)?;
        let Pdu::Command(command) = unit.pdu else { return Err(Fatal::Sequence.into()) };
        if unit.data_bytes > ADMIN_IN_CAPSULE_BYTES {
            return Err(Fatal::LimitExceeded.into());
        }
        let data = match unit.data_bytes {
            0 => Some(Buf::copy_of(&[])),
            _ => self.data(&unit).await?,
        };
        // A host that gives up on a path that hangs leaves no controller there.
        self.passes(port).await?;
        let asked = match data {
            Some(data) => connect(shared, port, &command, &data, comer),
            None => Err((Status::TRANSIENT_TRANSPORT, 0)),
        };
        let (result, status, connected) = match asked {
            Ok(connected) => {
                let proof = connected.verifier.as_ref().map_or(0, |_| MUST_AUTHENTICATE);
                let result = u64::from(connected.queue.controller.id()) | proof;
                (result, Status::SUCCESS, Ok(connected))
            }
            Err((status, result)) => (result, status, Err(Broken::Refused(status))),
        };
        // Without flow control it says that there is none (Fabrics, 3.3).
        let is_without_flow_control =
            connected.as_ref().is_ok_and(|connected| connected.connect.is_without_flow_control);
        let queue_head = if is_without_flow_control { 0xffff } else { 1 };
        let completion =
            Completion { result, queue_head, id: command.id(), status, has_more: false };
        let head = self.framing.head(&Pdu::Response(completion), 0);
        channel.write_all(Buf::copy_of(&head).into_vec()).await?;
        if connected.is_err() {
            // Closed at once, the answer might be lost with what the host has sent meanwhile.
            let _ = reactor::timeout(END_LIMIT, self.inbox.head(1)).await;
        }
        connected
    }
}

//! What a client has set up, message by message: features, memory, rings. No I/O.
//!
//! What always holds: a message changes all that it says, or nothing and is refused.

use crate::inflight::{Inflight, region_bytes};
use crate::memory::{MapError, Mapping, Memory, Outside, REGIONS_MAX, sealed};
use crate::message::{Answer, BadMessage, InflightPlace, Request};
use crate::ring::{Addresses, Broken, DESCRIPTORS_MAX, Shape};
use crate::served::{Features, PROTOCOL_FEATURES, protocol};
use crate::signal::{Kick, Signal};
use crate::stranger::{Kind, Stranger};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

/// Why a message is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("memory")]
    Memory(#[from] MapError),
    #[error("ring {0}, which there is not")]
    NoSuchRing(u32),
    #[error("features {0:#x}, which were not offered")]
    Features(u64),
    #[error("a ring")]
    Ring(#[from] Broken),
    #[error("a descriptor that is no event")]
    Event(#[source] io::Error),
    #[error("a channel that is no Unix socket")]
    Channel,
    #[error("memory for requests in flight of {queues} queues of {queue_size}")]
    Inflight { queues: u16, queue_size: u16 },
    #[error("a field of the configuration that cannot be written")]
    Config,
    #[error("the system")]
    System(#[source] io::Error),
}

/// One ring, as far as it is set up.
#[derive(Default)]
pub(crate) struct Vring {
    size: u32,
    addresses: Option<Addresses>,
    pub base: u32,
    /// The front end has said how it kicks, which starts a ring.
    pub is_started: bool,
    is_enabled: bool,
    pub kick: Option<Rc<Kick>>,
    pub call: Option<Arc<Signal>>,
    pub err: Option<Arc<Signal>>,
}

/// What the shell is to do after a message.
#[derive(Debug)]
pub(crate) enum Step {
    /// Nothing else than to say that it is done.
    Done,
    Answer(Answer, Option<OwnedFd>),
    /// Look at this ring again.
    Ring(usize),
    /// Look at all rings again.
    Rings,
    /// Stop this ring, wait for what is out, and answer with where it stands.
    Drain(usize),
    /// This is where messages of the back end go.
    Channel(OwnedFd),
}

pub(crate) struct Device {
    offered: Features,
    protocol_offered: u64,
    pub features: Features,
    pub protocol: u64,
    pub memory: Arc<Memory>,
    pub rings: Vec<Vring>,
    inflight: Option<(Arc<Mapping>, InflightPlace)>,
}

impl Device {
    pub(crate) fn new(offered: Features, protocol_offered: u64, queues: u16) -> Self {
        Self {
            offered,
            protocol_offered,
            features: Features::default(),
            protocol: 0,
            memory: Arc::default(),
            rings: (0..queues).map(|_| Vring::default()).collect(),
            inflight: None,
        }
    }

    fn ring(&mut self, number: u32) -> Result<&mut Vring, Refusal> {
        self.rings.get_mut(number as usize).ok_or(Refusal::NoSuchRing(number))
    }

    /// Takes a message, with as many descriptors as it says.
    pub(crate) fn handle(
        &mut self,
        request: Request,
        mut fds: Vec<Stranger>,
    ) -> Result<Step, Refusal> {
        let answer = |number| Ok(Step::Answer(Answer::Number(number), None));
        match request {
            Request::GetFeatures => answer(self.offered.0),
            Request::SetFeatures(bits) => {
                if bits & !self.offered.0 != 0 {
                    return Err(Refusal::Features(bits));
                }
                self.features = Features(bits);
                Ok(Step::Done)
            }
            Request::GetProtocolFeatures => answer(self.protocol_offered),
            Request::SetProtocolFeatures(bits) => {
                if bits & !self.protocol_offered != 0 {
                    return Err(Refusal::Features(bits));
                }
                self.protocol = bits;
                Ok(Step::Done)
            }
            // Front ends send the first when they begin, and some the second when they end: of no consequence.
            Request::SetOwner | Request::ResetOwner => Ok(Step::Done),
            Request::GetQueueNum => answer(self.rings.len() as u64),
            Request::GetMaxMemSlots => answer(REGIONS_MAX as u64),
            Request::SetMemTable(places) => {
                let mut memory = Memory::default();
                for (place, fd) in places.into_iter().zip(fds) {
                    memory = memory.with(place, fd)?;
                }
                self.memory = Arc::new(memory);
                Ok(Step::Rings)
            }
            Request::AddMemReg(place) => {
                let fd = fds.pop().expect("one was asked for");
                self.memory = Arc::new(self.memory.with(place, fd)?);
                Ok(Step::Rings)
            }
            Request::RemMemReg(place) => {
                self.memory = Arc::new(self.memory.without(&place)?);
                Ok(Step::Rings)
            }
            Request::SetVringNum { ring, size } => {
                self.ring(ring)?.size = size;
                Ok(Step::Done)
            }
            Request::SetVringAddr { ring, addresses } => {
                self.ring(ring)?.addresses = Some(addresses);
                Ok(Step::Ring(ring as usize))
            }
            Request::SetVringBase { ring, base } => {
                self.ring(ring)?.base = base;
                Ok(Step::Done)
            }
            Request::GetVringBase { ring } => {
                self.ring(ring)?;
                Ok(Step::Drain(ring as usize))
            }
            Request::SetVringKick { ring, .. } => {
                let kick = fds.pop().map(Kick::new).transpose().map_err(Refusal::Event)?;
                let ring_now = self.ring(ring)?;
                ring_now.kick = kick.map(Rc::new);
                ring_now.is_started = true;
                Ok(Step::Ring(ring as usize))
            }
            Request::SetVringCall { ring, .. } => {
                let call = fds.pop().map(Signal::new).transpose().map_err(Refusal::Event)?;
                self.ring(ring)?.call = call.map(Arc::new);
                Ok(Step::Ring(ring as usize))
            }
            Request::SetVringErr { ring, .. } => {
                let err = fds.pop().map(Signal::new).transpose().map_err(Refusal::Event)?;
                self.ring(ring)?.err = err.map(Arc::new);
                Ok(Step::Ring(ring as usize))
            }
            Request::SetVringEnable { ring, is_enabled } => {
                self.ring(ring)?.is_enabled = is_enabled;
                Ok(Step::Ring(ring as usize))
            }
            Request::SetBackendReqFd => {
                let fd = fds.pop().expect("one was asked for");
                fd.take(Kind::UnixSocket).map(Step::Channel).ok_or(Refusal::Channel)
            }
            Request::GetInflightFd(place) => {
                let (place, file, mapping) = self.inflight_memory(place)?;
                self.inflight = Some((mapping, place));
                Ok(Step::Answer(Answer::Inflight(place), Some(file)))
            }
            Request::SetInflightFd(place) => {
                let needed = self.check_inflight(&place)?;
                let fd = fds.pop().expect("one was asked for");
                if place.bytes < needed {
                    return Err(MapError::PastEnd.into());
                }
                // No more than that, whatever else the file holds.
                let mapping = Mapping::new(fd, place.offset, needed)?;
                self.inflight = Some((mapping, place));
                Ok(Step::Done)
            }
            // The shell has answered these.
            Request::GetConfig { .. } | Request::SetConfig { .. } => Err(Refusal::Config),
        }
    }

    fn check_inflight(&self, place: &InflightPlace) -> Result<u64, Refusal> {
        let InflightPlace { queues, queue_size, .. } = *place;
        let is_good = (1..=self.rings.len()).contains(&queues.into())
            && (1..=DESCRIPTORS_MAX).contains(&queue_size);
        let bytes = region_bytes(queue_size, self.features.is_packed()) * u64::from(queues);
        match is_good {
            true => Ok(bytes),
            false => Err(Refusal::Inflight { queues, queue_size }),
        }
    }

    /// New memory for requests in flight.
    fn inflight_memory(
        &self,
        wanted: InflightPlace,
    ) -> Result<(InflightPlace, OwnedFd, Arc<Mapping>), Refusal> {
        let bytes = self.check_inflight(&wanted)?;
        let file = sealed(bytes).map_err(Refusal::System)?;
        let mapping = Mapping::of(file.as_fd(), 0, bytes)?;
        Ok((InflightPlace { bytes, offset: 0, ..wanted }, file, mapping))
    }

    /// The shape of a ring that can be served; `None` as long as it is not set up.
    pub(crate) fn shape(&self, number: usize) -> Result<Option<Shape>, Broken> {
        let ring = &self.rings[number];
        let (Some(addresses), true) = (ring.addresses, ring.is_started && ring.size > 0) else {
            return Ok(None);
        };
        let size = u16::try_from(ring.size).map_err(|_| Broken::Size(ring.size))?;
        let (is_packed, has_event_index) =
            (self.features.is_packed(), self.features.has_event_index());
        Ok(Some(Shape { size, addresses, is_packed, has_event_index }))
    }

    /// Where chains of a ring are noted, if the front end keeps such memory.
    pub(crate) fn inflight(&self, number: usize) -> Result<Option<Inflight>, Broken> {
        let Some((mapping, place)) = &self.inflight else { return Ok(None) };
        let bytes = region_bytes(place.queue_size, self.features.is_packed()) as usize;
        if number >= usize::from(place.queues) {
            return Err(Broken::Inflight);
        }
        let region = mapping.window().part(number * bytes, bytes).ok_or(Outside);
        Ok(Some(Inflight(region.map_err(|_| Broken::Inflight)?)))
    }

    /// A ring is served when it is enabled, which a front end that knows nothing of that need not say.
    pub(crate) fn is_enabled(&self, number: usize) -> bool {
        self.rings[number].is_enabled || self.features.0 & PROTOCOL_FEATURES == 0
    }

    /// Whether the back end says how a message went.
    pub(crate) fn has_acks(&self) -> bool {
        self.protocol & protocol::REPLY_ACK != 0
    }
}

impl From<BadMessage> for io::Error {
    fn from(bad: BadMessage) -> Self {
        Self::new(io::ErrorKind::InvalidData, bad)
    }
}

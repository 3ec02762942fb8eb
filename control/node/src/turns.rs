//! What a tenant may use per second, for its files: the processes of its guests ask here before a request reads or writes, and wait at the
//! same caps as its volumes do, so that all of it together stays within.
//!
//! Who asks has taken nothing yet that others wait for (note 0017 says why that matters).
//!
//! What always holds: an answer comes within [`ANSWER_WITHIN`] and what looking a tenant up may take, and says how many of the requests may
//! go on; nobody goes on because an answer was late.

use crate::volumes::{VolumeRefusal, Volumes};
use futures_util::future::LocalBoxFuture;
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Instant};
use levada_base::sync::Semaphore;
use levada_base::units::MIB;
use levada_volume::OrderError;
use levada_volume::qos::{Cost, Limits, Share};
use levada_wire::frame::{Frame, decode_body, encode_body, flags};
use levada_wire::rpc::{Handler, Pusher, Reply};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Where it is asked for: no target of names or objects has this number.
pub(crate) const TURNS: TargetId = TargetId(u32::MAX);
/// Requests that are asked for at once.
pub(crate) const WANTED_MAX: usize = 64;
/// Bytes of one of them.
pub(crate) const WANTED_BYTES_MAX: u64 = 4 * MIB;
/// How long requests wait here; those that are left are to be asked for again.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// How long a tenant without caps need not ask. A cap that it gets holds after that.
const FREE: Duration = Duration::from_millis(100);
/// The same, where nobody knows of limits; then they are looked for again.
const UNKNOWN: Duration = Duration::from_secs(5);
/// Between two lines in the log about what keeps limits from being found.
const TELL_EVERY: Duration = Duration::from_secs(30);
/// Numbers of tenants, and others, of which it is kept in mind where they wait.
const PLACES_MAX: usize = 4096;
/// How long looking for them may take.
const LOOKING_MAX: Duration = Duration::from_secs(1);

/// What reads or writes so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wanted {
    Read { bytes: u64 },
    Write { bytes: u64 },
}

impl Wanted {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Read { bytes } | Self::Write { bytes } => bytes,
        }
    }

    fn cost(self) -> Cost {
        match self {
            Self::Read { bytes } => Cost::read(bytes),
            Self::Write { bytes } => Cost::write(bytes),
        }
    }
}

/// The question of a guest's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ask {
    /// By its number.
    pub tenant: u32,
    /// In the order in which they are to go.
    pub wanted: Vec<Wanted>,
}

impl Ask {
    fn makes_sense(&self) -> bool {
        self.wanted.len() <= WANTED_MAX
            && self.wanted.iter().all(|wanted| wanted.bytes() <= WANTED_BYTES_MAX)
    }
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Granted {
    /// So many of them may go on, the first ones.
    pub passed: u32,
    /// For so many milliseconds nobody need ask, neither for the others.
    pub free_ms: u32,
}

/// Where requests for the files of a tenant wait.
#[derive(Clone)]
enum Place {
    At(Share),
    /// Nowhere: none was known then.
    Unknown(Instant),
    /// It cannot be said now.
    NotYet,
}

impl Place {
    fn is_good(&self) -> bool {
        match self {
            // Its tenant may have been deleted, and the number given to another.
            Self::At(share) => !share.is_removed(),
            Self::Unknown(since) => since.elapsed() < UNKNOWN,
            Self::NotYet => false,
        }
    }
}

/// Answers for all tenants. Lives on the node's reactor.
pub(crate) struct TenantTurns {
    volumes: Weak<Volumes>,
    /// By number.
    places: RefCell<HashMap<u32, Place>>,
    /// One looks for all.
    looking: Rc<Semaphore>,
    told_at: Cell<Option<Instant>>,
}

impl TenantTurns {
    /// As `volumes` knows tenants and their limits.
    pub(crate) fn new(volumes: &Rc<Volumes>) -> Rc<Self> {
        let (places, told_at) = Default::default();
        let looking = Semaphore::new(1);
        Rc::new(Self { volumes: Rc::downgrade(volumes), places, looking, told_at })
    }

    fn known(&self, tenant: u32) -> Option<Place> {
        self.places.borrow().get(&tenant).filter(|place| place.is_good()).cloned()
    }

    async fn place(&self, tenant: u32) -> Place {
        if let Some(known) = self.known(tenant) {
            return known;
        }
        let _looking = self.looking.acquire(1).await;
        if let Some(known) = self.known(tenant) {
            return known;
        }
        let place = self.look(tenant).await;
        let mut places = self.places.borrow_mut();
        if places.len() >= PLACES_MAX {
            places.retain(|_, place| matches!(place, Place::At(_)) && place.is_good());
        }
        places.insert(tenant, place.clone());
        place
    }

    async fn look(&self, tenant: u32) -> Place {
        let Some(volumes) = self.volumes.upgrade() else { return Place::NotYet };
        match volumes.share_of_files(tenant).await {
            Ok(Some(share)) => Place::At(share),
            Ok(None) => Place::Unknown(reactor::now()),
            Err(error @ VolumeRefusal::Order(OrderError::LimitsUnknown { .. })) => {
                self.tell(tenant, &error, "limits of a tenant do not hold for its files");
                Place::Unknown(reactor::now())
            }
            Err(error) => {
                self.tell(tenant, &error, "what limits a tenant has is not known: its guests wait");
                Place::NotYet
            }
        }
    }

    fn tell(&self, tenant: u32, error: &VolumeRefusal, what: &str) {
        let now = reactor::now();
        if self.told_at.get().is_none_or(|told| now.since(told) >= TELL_EVERY) {
            self.told_at.set(Some(now));
            tracing::warn!(tenant, %error, "{what}");
        }
    }

    async fn granted(&self, ask: &Ask) -> Granted {
        let free = |time: Duration| {
            let all = ask.wanted.len() as u32;
            Granted { passed: all, free_ms: time.as_millis() as u32 }
        };
        let share = match reactor::timeout(LOOKING_MAX, self.place(ask.tenant)).await {
            Ok(Place::At(share)) => share,
            Ok(Place::Unknown(_)) => return free(UNKNOWN),
            Ok(Place::NotYet) | Err(_) => return Granted { passed: 0, free_ms: 0 },
        };
        if share.tenant().limits().cap == Limits::NONE.cap {
            return free(FREE);
        }
        let until = reactor::now() + ANSWER_WITHIN;
        let mut passed = 0;
        for wanted in &ask.wanted {
            let left = until.since(reactor::now());
            match reactor::timeout(left, share.admit(wanted.cost())).await {
                Ok(_admitted) => passed += 1,
                Err(_) => break,
            }
        }
        Granted { passed, free_ms: 0 }
    }
}

impl Handler for TenantTurns {
    fn handle(&self, request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            match decode_body::<Ask>(&request.body) {
                Ok(ask) if ask.makes_sense() => Reply::new(encode_body(&self.granted(&ask).await)),
                _ => Reply::flagged(flags::MALFORMED),
            }
        })
    }
}

//! What a tenant may use per second, for its files: its guests ask here before they read or write, and wait at the same limits as its
//! volumes do, so that all of it together stays within.
//!
//! Who asks has taken nothing yet that others wait for (note 0017 says why that matters), and goes on once it is told. Only caps hold so:
//! where a tenant has none, it is told for how long it need not ask.
//!
//! What always holds: nothing waits here for what needs an object target, so it ends.

use crate::volumes::Volumes;
use futures_util::future::LocalBoxFuture;
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Instant};
use levada_base::sync::Semaphore;
use levada_volume::qos::{Cost, Limits, Share};
use levada_wire::frame::{Frame, decode_body, encode_body, flags};
use levada_wire::rpc::{Handler, Pusher, Reply};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Where it is asked for: no target of names or objects has this number.
pub(crate) const TURNS: TargetId = TargetId(u32::MAX);
/// Requests that are asked for at once.
pub(crate) const WANTED_MAX: usize = 64;
/// How long a tenant without caps need not ask. A cap that it gets holds after that.
const FREE: Duration = Duration::from_millis(100);
/// The same, of one that is not known; then it is looked up again.
const UNKNOWN: Duration = Duration::from_secs(1);
/// How long looking up may take.
const LOOKING_MAX: Duration = Duration::from_secs(1);

/// What reads or writes so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wanted {
    Read { bytes: u64 },
    Write { bytes: u64 },
}

/// The question of a guest's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ask {
    /// By its number.
    pub tenant: u32,
    pub wanted: Vec<Wanted>,
}

/// The answer, once all of it may be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Granted {
    /// For so many milliseconds nobody need ask.
    pub free_ms: u32,
}

/// Where the files of a tenant wait.
#[derive(Clone)]
enum Place {
    At(Share),
    /// Nowhere: it was not known then.
    Unknown(Instant),
}

/// Answers for all tenants. Lives on the node's reactor.
pub(crate) struct TenantTurns {
    volumes: Weak<Volumes>,
    /// By number. The life of a number tells a tenant from one that had it before.
    places: RefCell<HashMap<u32, Place>>,
    /// One looks a tenant up for all.
    looking: Rc<Semaphore>,
}

impl TenantTurns {
    /// As `volumes` knows tenants and their limits.
    pub(crate) fn new(volumes: &Rc<Volumes>) -> Rc<Self> {
        let places = RefCell::default();
        Rc::new(Self { volumes: Rc::downgrade(volumes), places, looking: Semaphore::new(1) })
    }

    fn known(&self, tenant: u32) -> Option<Place> {
        let is_good = |place: &Place| match place {
            // Its tenant may have been deleted, and the number given to another.
            Place::At(share) => !share.is_removed(),
            Place::Unknown(since) => since.elapsed() < UNKNOWN,
        };
        self.places.borrow().get(&tenant).filter(|place| is_good(place)).cloned()
    }

    async fn place(&self, tenant: u32) -> Place {
        if let Some(known) = self.known(tenant) {
            return known;
        }
        let _looking = self.looking.acquire(1).await;
        if let Some(known) = self.known(tenant) {
            return known;
        }
        let volumes = self.volumes.upgrade();
        let share = match volumes {
            Some(volumes) => reactor::timeout(LOOKING_MAX, volumes.share_of_files(tenant)).await,
            None => Ok(Ok(None)),
        };
        let place = match share {
            Ok(Ok(Some(share))) => Place::At(share),
            Ok(Ok(None)) | Err(_) => Place::Unknown(reactor::now()),
            Ok(Err(error)) => {
                tracing::warn!(tenant, %error, "limits of a tenant do not hold for its files yet");
                Place::Unknown(reactor::now())
            }
        };
        self.places.borrow_mut().insert(tenant, place.clone());
        place
    }

    async fn granted(&self, ask: Ask) -> Granted {
        let free = |time: Duration| Granted { free_ms: time.as_millis() as u32 };
        let Place::At(share) = self.place(ask.tenant).await else { return free(UNKNOWN) };
        if share.tenant().limits().cap == Limits::NONE.cap {
            return free(FREE);
        }
        for wanted in ask.wanted {
            let cost = match wanted {
                Wanted::Read { bytes } => Cost::read(bytes),
                Wanted::Write { bytes } => Cost::write(bytes),
            };
            // When it is back nobody tells.
            drop(share.admit(cost).await);
        }
        free(Duration::ZERO)
    }
}

impl Handler for TenantTurns {
    fn handle(&self, request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            match decode_body::<Ask>(&request.body) {
                Ok(ask) if ask.wanted.len() <= WANTED_MAX => {
                    Reply::new(encode_body(&self.granted(ask).await))
                }
                _ => Reply::flagged(flags::MALFORMED),
            }
        })
    }
}

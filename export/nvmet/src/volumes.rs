//! Volumes that come and go, each as a subsystem of its own with one namespace.
//!
//! What there is is compared with what is shown every [`LOOK_EVERY`]. What always holds:
//! - A subsystem's name is that of the volume: renamed, it is another subsystem, and hosts of the old one lose it.
//! - A volume is open only while a host is connected, as with every other export.

use crate::claims::{Claims, Keep, KeepError};
use crate::namespace::{Open, Opened};
use crate::subsystem::{Hosts, Subsystem};
use crate::target::Target;
use futures_util::future::LocalBoxFuture;
use levada_base::reactor;
use levada_nvme::{Nqn, NqnError};
use siphasher::sip::SipHasher13;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hash::Hasher;
use std::rc::Rc;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The namespace of a volume.
const NAMESPACE: u32 = 1;

/// A volume that there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeShown {
    /// Printable characters without spaces.
    pub name: String,
    pub size_bytes: u64,
    /// As [`Opened::guid`]: another of the same name is another volume.
    pub guid: [u8; 16],
}

/// Volumes to be shown.
pub trait Volumes {
    /// What there is; `None`: that cannot be told now.
    fn list(&self) -> LocalBoxFuture<'_, Option<Vec<VolumeShown>>>;

    /// Opens one; `None`: it is not there, or cannot be opened now, which is said in the log.
    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Opened>>;

    /// Whether what is written to them is durable when it is answered.
    fn are_written_through(&self) -> bool {
        false
    }

    /// What is kept of reservations with a volume, which is known by its GUID; empty: nothing.
    fn reservations(&self, guid: [u8; 16]) -> LocalBoxFuture<'_, Result<Vec<u8>, KeepError>>;

    /// Keeps this with the volume in the place of it, as long as there is the volume; durable when it returns.
    fn keep_reservations(
        &self,
        guid: [u8; 16],
        bytes: Vec<u8>,
    ) -> LocalBoxFuture<'_, Result<(), KeepError>>;
}

/// A volume keeps its own reservations: wherever it is served next, they are there.
struct WithVolume {
    volumes: Rc<dyn Volumes>,
    guid: [u8; 16],
}

impl Keep for WithVolume {
    fn load(&self) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KeepError>> {
        Box::pin(async {
            let bytes = self.volumes.reservations(self.guid).await?;
            Ok(Some(bytes).filter(|bytes| !bytes.is_empty()))
        })
    }

    fn save(&self, bytes: Option<Vec<u8>>) -> LocalBoxFuture<'_, Result<(), KeepError>> {
        self.volumes.keep_reservations(self.guid, bytes.unwrap_or_default())
    }
}

/// The serial number of a subsystem: the same for the same name, and 16 characters.
#[must_use]
pub fn serial_of(nqn: &Nqn) -> String {
    let mut hasher = SipHasher13::new();
    hasher.write(nqn.as_str().as_bytes());
    format!("{:016x}", hasher.finish())
}

struct Showing {
    subsystem: Subsystem,
    size_bytes: Cell<u64>,
    guid: [u8; 16],
}

/// Keeps the subsystems of a target in step with volumes.
pub struct Follower {
    target: Rc<Target>,
    volumes: Rc<dyn Volumes>,
    /// Before the name of each.
    prefix: String,
    hosts: Hosts,
    /// Of who has the volumes.
    epoch: u64,
    showing: RefCell<BTreeMap<String, Showing>>,
    /// Who has reserved what, by GUID: a volume that is renamed stays reserved.
    claims: RefCell<BTreeMap<[u8; 16], Claims>>,
}

impl Follower {
    /// Shows `volumes` as `PREFIX:NAME` at `target` to `hosts`, for the owner of `epoch`.
    ///
    /// # Errors
    ///
    /// When nothing that begins with `prefix` is a name of a subsystem.
    pub fn new(
        target: Rc<Target>,
        volumes: Rc<dyn Volumes>,
        prefix: &str,
        hosts: Hosts,
        epoch: u64,
    ) -> Result<Self, NqnError> {
        Nqn::new(prefix)?;
        let (showing, claims) = (RefCell::default(), RefCell::default());
        Ok(Self { target, volumes, prefix: prefix.into(), hosts, epoch, showing, claims })
    }

    /// Goes on until it is dropped. Hosts are let in once what there is is shown: told that a subsystem is not there, they would give it
    /// up for good.
    pub async fn run(&self) {
        loop {
            if self.look().await {
                self.target.begin();
            }
            reactor::sleep(LOOK_EVERY).await;
        }
    }

    /// Looks once; false: nothing was to be seen.
    async fn look(&self) -> bool {
        let Some(there) = self.volumes.list().await else { return false };
        let there: BTreeMap<String, VolumeShown> =
            there.into_iter().map(|volume| (volume.name.clone(), volume)).collect();
        self.showing.borrow_mut().retain(|name, showing| {
            let stays = there.get(name).is_some_and(|volume| volume.guid == showing.guid);
            if !stays {
                self.target.remove(showing.subsystem.nqn());
            }
            stays
        });
        for (name, volume) in there {
            let is_new = match self.showing.borrow().get(&name) {
                Some(showing) => {
                    if showing.size_bytes.replace(volume.size_bytes) != volume.size_bytes {
                        showing.subsystem.resized(NAMESPACE);
                    }
                    false
                }
                None => true,
            };
            if is_new {
                self.show(volume);
            }
        }
        let showing = self.showing.borrow();
        let is_shown = |guid: &[u8; 16]| showing.values().any(|showing| showing.guid == *guid);
        self.claims.borrow_mut().retain(|guid, _| is_shown(guid));
        true
    }

    fn show(&self, volume: VolumeShown) {
        let nqn = match Nqn::new(format!("{}:{}", self.prefix, volume.name)) {
            Ok(nqn) => nqn,
            Err(error) => {
                tracing::warn!(volume = volume.name, %error, "a volume is not shown over NVMe/TCP");
                return;
            }
        };
        let subsystem = Subsystem::new(nqn.clone(), serial_of(&nqn), self.hosts.clone());
        let mut subsystem = subsystem.of_owner(self.epoch);
        if self.volumes.are_written_through() {
            subsystem = subsystem.written_through();
        }
        let (volumes, opened, guid) = (Rc::clone(&self.volumes), volume.name.clone(), volume.guid);
        let open: Open = Rc::new(move || {
            let (volumes, name) = (Rc::clone(&volumes), opened.clone());
            // Another volume may have the name by now.
            Box::pin(async move { volumes.open(&name).await.filter(|opened| opened.guid == guid) })
        });
        let kept = || Claims::kept(Rc::new(WithVolume { volumes: Rc::clone(&self.volumes), guid }));
        let claims = self.claims.borrow_mut().entry(guid).or_insert_with(kept).clone();
        subsystem.add_claimed(NAMESPACE, open, claims);
        self.target.add(subsystem.clone());
        let size_bytes = Cell::new(volume.size_bytes);
        self.showing.borrow_mut().insert(volume.name, Showing { subsystem, size_bytes, guid });
    }
}

//! Drives that vanished: each is looked for until it is there again, and taken back as what it was.
//!
//! What always holds:
//! - What is at a drive's place is not even fenced unless its label says that it is that drive.
//! - A look that takes long, as it waits for a target, holds up neither other drives nor orders for them.
//! - Why a drive that can be reached is not taken back is told, in the status and once in the log.

use super::Operator;
use crate::arrays::ClusterArray;
use crate::drives::{self, NoDevice};
use futures_util::future::{join_all, select};
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Instant};
use levada_base::sync::Notify;
use levada_device::{Drive, read_label};
use levada_spec::DriveSpec;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Between two looks whether a drive is there again.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Between two tries to give it to arrays that do not take it, at most.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A look that takes longer is not waited for.
const LOOK_LIMIT: Duration = Duration::from_secs(3);
/// One that vanishes more often than this within an hour is better replaced.
const RETURNS_MAX: usize = 8;
const RETURNS_WITHIN: Duration = Duration::from_secs(60 * 60);

/// What is known of drives that vanished.
#[derive(Default)]
pub(super) struct Returns {
    of: RefCell<BTreeMap<String, Return>>,
    /// Those that somebody looks for, or takes back, just now.
    looked_for: RefCell<BTreeSet<String>>,
    looked: Notify,
}

#[derive(Default)]
struct Return {
    /// When it was taken back, within an hour.
    at: Vec<Instant>,
    why_not: Option<NotBack>,
    /// What the log was told last.
    told: Option<String>,
    /// It was there, and no array took it: the next try comes later, as each takes its time.
    pause: Option<Pause>,
}

#[derive(Clone, Copy)]
struct Pause {
    until: Instant,
    length: Duration,
}

/// Why a drive is not back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotBack {
    /// It is not reached.
    Away { why: String },
    /// Something is there.
    Refused { why: String },
}

/// A drive that is there again.
struct There {
    spec: DriveSpec,
    drive: Rc<Drive>,
    /// The one that it was when somebody began to look.
    before: Option<Uuid>,
}

impl Returns {
    /// Why a drive is not back, as far as somebody has looked.
    pub(super) fn why_not(&self, name: &str) -> Option<NotBack> {
        self.of.borrow().get(name)?.why_not.clone()
    }

    /// Returns once nobody looks for the drive, or takes it back.
    pub(super) async fn nobody_looks_for(&self, name: &str) {
        self.looked.until(|| (!self.looked_for.borrow().contains(name)).then_some(())).await;
    }

    /// Another drive has its place, or an order has brought it back.
    pub(super) fn forget(&self, name: &str) {
        self.of.borrow_mut().remove(name);
    }

    /// Counts one that was taken back.
    fn count(&self, name: &str) {
        let mut all = self.of.borrow_mut();
        let known = all.entry(name.to_owned()).or_default();
        known.at.push(reactor::now());
        known.pause = None;
    }

    /// No array took it.
    fn pause(&self, name: &str) {
        let mut all = self.of.borrow_mut();
        let pause = &mut all.entry(name.to_owned()).or_default().pause;
        let length = pause.map_or(LOOK_AGAIN_AFTER, |last| (last.length * 2).min(PAUSE_MAX));
        *pause = Some(Pause { until: reactor::now() + length, length });
    }

    fn note(&self, name: &str, why_not: Option<NotBack>) {
        let mut all = self.of.borrow_mut();
        let known = all.entry(name.to_owned()).or_default();
        if let Some(NotBack::Refused { why }) = &why_not
            && known.told.as_ref() != Some(why)
        {
            tracing::warn!(drive = name, why, "a drive that vanished is not taken back");
            known.told = Some(why.clone());
        }
        if why_not.is_none() {
            known.told = None;
        }
        known.why_not = why_not;
    }

    /// It may come back now; that it has too often is told.
    fn may_return(&self, name: &str) -> bool {
        let often = {
            let mut all = self.of.borrow_mut();
            let Some(known) = all.get_mut(name) else { return true };
            if known.pause.is_some_and(|pause| reactor::now() < pause.until) {
                return false;
            }
            known.at.retain(|at| at.elapsed() < RETURNS_WITHIN);
            known.at.len() >= RETURNS_MAX
        };
        if often {
            let why =
                format!("it has come back {RETURNS_MAX} times within an hour, and gone again");
            self.note(name, Some(NotBack::Refused { why }));
        }
        !often
    }
}

/// Somebody looks for a drive, or carries out an order for it, until this is dropped.
pub(super) struct Looking {
    returns: Rc<Returns>,
    drive: String,
}

impl Looking {
    /// `None`: somebody does already.
    pub(super) fn begin(returns: &Rc<Returns>, drive: &str) -> Option<Self> {
        let drive = drive.to_owned();
        let is_first = returns.looked_for.borrow_mut().insert(drive.clone());
        is_first.then(|| Self { returns: Rc::clone(returns), drive })
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.returns.looked_for.borrow_mut().remove(&self.drive);
        self.returns.looked.notify_all();
    }
}

impl Operator {
    /// Looks after the arrays of the cluster for as long as the caller's group lives.
    pub async fn keep_spares(self: Rc<Self>) {
        loop {
            let change = self.changed.changed();
            self.take_back().await;
            self.use_spares().await;
            // A member that is out counts as vanished a moment later, of which nobody tells.
            if self.lost(|member| member.vanished || member.role.is_some()).is_empty() {
                change.await;
            } else {
                select(pin!(change), pin!(reactor::sleep(LOOK_AGAIN_AFTER))).await;
            }
        }
    }

    /// Takes drives back that vanished and are there again, as what they were. What takes longer goes on beside whatever comes next.
    pub async fn take_back(self: &Rc<Self>) {
        let vanished: Vec<String> = self.vanished().into_keys().collect();
        for name in &vanished {
            if let Some(looking) = self.look_for(name) {
                let operator = Rc::clone(self);
                // Of the caller's group as well.
                reactor::spawn(async move { operator.take_back_one(looking).await });
            }
        }
        // Before a spare takes the place of one that is there.
        let looks = join_all(vanished.iter().map(|name| self.returns.nobody_looks_for(name)));
        let _ = reactor::timeout(LOOK_LIMIT, looks).await;
    }

    /// Drives that vanished, with the arrays that lack them. Not only while spares wait for them: where there is none, or all
    /// redundancy is used up, their return is all that helps.
    pub(super) fn vanished(&self) -> BTreeMap<String, Vec<Rc<ClusterArray>>> {
        self.lost(|member| member.vanished)
    }

    /// `None`: it may not come back, or somebody looks for it already.
    fn look_for(&self, name: &str) -> Option<Looking> {
        if self.returns.may_return(name) { Looking::begin(&self.returns, name) } else { None }
    }

    /// Looks for a drive once.
    async fn take_back_one(&self, looking: Looking) {
        let name = &*looking.drive;
        let there = match self.there_again(name).await {
            Ok(there) => there,
            Err(why) => {
                self.returns.note(name, Some(why));
                return;
            }
        };
        let _turn = self.admitting.acquire(1).await;
        // Somebody else may have been there, and have taken it back or another in its place.
        let Some(arrays) = self.vanished().remove(name) else { return };
        if self.drive_uuid(name) != there.before {
            return;
        }
        let There { spec, drive, .. } = there;
        let known = (spec, Ok(Rc::clone(&drive)));
        self.drives.borrow_mut().insert(name.to_owned(), known);
        let mut why_not = None;
        let mut is_back = false;
        let file = self.latest.borrow().clone();
        for array in arrays {
            let array_name = &array.spec.name;
            match array.admit(&file, name, &drive).await {
                Ok(()) => {
                    is_back = true;
                    tracing::warn!(
                        drive = name,
                        array = array_name,
                        "a drive that vanished is there again"
                    );
                }
                Err(error) => {
                    let why = format!("array {array_name} does not take it: {error}");
                    why_not = Some(NotBack::Refused { why });
                }
            }
        }
        self.returns.note(name, why_not);
        if is_back {
            self.returns.count(name);
            self.changed.notify_all();
        } else {
            self.returns.pause(name);
        }
    }

    /// The drive that is known by that name, as its label says.
    fn drive_uuid(&self, name: &str) -> Option<Uuid> {
        let drives = self.drives.borrow();
        drives.get(name)?.1.as_ref().ok().map(|drive| drive.label().drive_uuid)
    }

    /// A drive that vanished: opened anew, or by what it was open as, which keeps others from opening it. Of an enclosure on the
    /// network that was away when the node started, too.
    async fn there_again(&self, name: &str) -> Result<There, NotBack> {
        let refused = |why: String| NotBack::Refused { why };
        let (spec, old) = self
            .drives
            .borrow()
            .get(name)
            .cloned()
            .ok_or_else(|| NotBack::Away { why: "no drive of that name is known".into() })?;
        let old = match old {
            Ok(old) => Some(old),
            Err(_) if spec.is_remote() => None,
            Err(why) => return Err(NotBack::Away { why }),
        };
        let device = match (self.source.open(&spec).await, &old) {
            (Ok(device), _) => device,
            (Err(NoDevice::Away { why }), _) if spec.is_remote() => {
                return Err(NotBack::Away { why });
            }
            (Err(none), _) if spec.is_remote() && !matches!(none, NoDevice::Open { .. }) => {
                return Err(refused(none.to_string()));
            }
            (Err(_), Some(old)) => Rc::clone(old.device()),
            (Err(none), None) => return Err(refused(none.to_string())),
        };
        // Another's drive may be at that path by now: it must not even be fenced.
        let new = match read_label(&*device).await {
            Ok(label) => label,
            // One of this machine that still fails is there as it was.
            Err(error) if spec.is_remote() => return Err(refused(error.to_string())),
            Err(error) => return Err(NotBack::Away { why: error.to_string() }),
        };
        let is_same = match &old {
            Some(old) => old.label().drive_uuid == new.drive_uuid,
            None => self.is_member(name, new.drive_uuid),
        };
        if !is_same || new.cluster_uuid != self.cluster.drives.cluster {
            let (drive, cluster) = (new.drive_name, new.cluster_name);
            let place = spec.path.display();
            return Err(refused(format!(
                "what is at {place} is another drive, {drive} of cluster {cluster} by its label"
            )));
        }
        let before = old.map(|old| old.label().drive_uuid);
        // Another server has taken the cluster over, and this drive says so first.
        if new.last_epoch() > self.cluster.drives.epoch {
            self.lose_to(new.last_epoch());
        }
        let taken = drives::take_one(&spec, device, self.cluster.drives.epoch).await;
        let drive = taken.map_err(|error| refused(error.to_string()))?;
        Ok(There { spec, drive, before })
    }

    /// True for a drive that an array has as its member of that name.
    fn is_member(&self, name: &str, drive: Uuid) -> bool {
        self.cluster.arrays.iter().any(|array| {
            let members = array.array.status().members;
            members.iter().any(|member| member.name == name && member.uuid == drive)
        })
    }
}

//! Drives on the network: namespaces of the subsystems that a cluster file names, reserved where drives of this machine are locked.
//!
//! What always holds:
//! - A drive that could not be reserved is not opened: nothing would keep two servers apart.
//! - A namespace is open once, whatever numbers and subsystems it is reached by. It is opened anew only when what it was open as has lost
//!   every path; each opening is another host to the target, so that what the earlier one left under way is shut out when the
//!   new one is fenced.
//! - What keeps a namespace connected is of no group that ends before the arrays are closed, whoever had it opened.
//!
//! After a crash the target still knows the dead host, whose reservation the next owner preempts.

use crate::control::PathStatus;
use crate::drives::NoDevice;
use levada_base::Epoch;
use levada_base::reactor::{self, Group, Instant};
use levada_device::Device;
use levada_device::nvme::{Host, NamespaceError, NvmeNamespace, NvmeUrl, Options, Standing};
use levada_spec::DriveSpec;
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// An enclosure may be on its way up together with this machine: without it an array would go on with less than it has.
const AWAY_LIMIT: Duration = Duration::from_secs(10);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// See the module.
pub(crate) struct RemoteDrives {
    /// Until then, an enclosure that does not answer is asked again.
    patient_until: Instant,
    /// What keeps them connected; it ends with this, which outlives the arrays.
    tasks: Group,
    /// What was opened, as long as somebody uses it; the latest comes last.
    opened: RefCell<Vec<Opened>>,
}

struct Opened {
    drive: String,
    url: NvmeUrl,
    namespace: Weak<NvmeNamespace>,
}

impl Opened {
    /// True when `url` leads there, over whatever addresses.
    fn is_at(&self, url: &NvmeUrl) -> bool {
        self.url.subsystem == url.subsystem && self.url.namespace == url.namespace
    }
}

fn unusable(why: impl std::fmt::Display) -> NoDevice {
    NoDevice::Unusable { why: why.to_string() }
}

fn url_of(drive: &DriveSpec) -> Result<NvmeUrl, NoDevice> {
    let text = drive.path.to_string_lossy();
    text.parse().map_err(|error| unusable(format!("{text}: {error}")))
}

async fn connect(url: NvmeUrl, patient_until: Instant) -> Result<NvmeNamespace, NoDevice> {
    loop {
        let host = Host::anonymous().map_err(unusable)?;
        match NvmeNamespace::open(&url, Options::new(host)).await {
            Err(NamespaceError::NoPath { .. }) if reactor::now() < patient_until => {
                reactor::sleep(LOOK_AGAIN_AFTER).await;
            }
            opened => return opened.map_err(unusable),
        }
    }
}

impl RemoteDrives {
    pub fn new() -> Self {
        let patient_until = reactor::now() + AWAY_LIMIT;
        Self { patient_until, tasks: Group::new(), opened: RefCell::default() }
    }

    /// Opens the namespace of a drive.
    ///
    /// # Errors
    ///
    /// [`NoDevice::Open`] while it is open and can be reached, [`NoDevice::Unusable`].
    pub async fn open(&self, drive: &DriveSpec) -> Result<Rc<dyn Device>, NoDevice> {
        let url = url_of(drive)?;
        if self.at(&url).is_some_and(|namespace| namespace.is_reached()) {
            return Err(NoDevice::Open { path: url.to_string() });
        }
        let connecting = connect(url.clone(), self.patient_until);
        let connected = reactor::spawn_in(&self.tasks, connecting).await;
        let namespace = connected.unwrap_or_else(|| Err(unusable("the node ends")))?;
        if !namespace.has_reservations() {
            namespace.close().await;
            let lack = "has no reservations, and nothing would keep two servers from writing to it";
            return Err(unusable(format!("{url} {lack}")));
        }
        if let Some(twin) = self.twin(&url, &namespace) {
            namespace.close().await;
            return Err(unusable(format!("{url} is one and the same drive as {twin}")));
        }
        let namespace = Rc::new(namespace);
        let mut opened = self.opened.borrow_mut();
        opened.retain(|opened| opened.namespace.strong_count() > 0);
        let (drive, weak) = (drive.name.clone(), Rc::downgrade(&namespace));
        opened.push(Opened { drive, url, namespace: weak });
        Ok(namespace)
    }

    /// What is open at `url`, the latest of it.
    fn at(&self, url: &NvmeUrl) -> Option<Rc<NvmeNamespace>> {
        let opened = self.opened.borrow();
        let there = opened.iter().rev().filter(|opened| opened.is_at(url));
        there.filter_map(|opened| opened.namespace.upgrade()).next()
    }

    /// The drive that the same namespace is open as, by another URL.
    fn twin(&self, url: &NvmeUrl, namespace: &NvmeNamespace) -> Option<String> {
        let opened = self.opened.borrow();
        let is_same = |opened: &&Opened| {
            let other = opened.namespace.upgrade();
            !opened.is_at(url) && other.is_some_and(|other| other.is_same_as(namespace))
        };
        opened.iter().find(is_same).map(|twin| format!("{} ({})", twin.drive, twin.url))
    }

    /// The latest owner of a drive, other than this process, as its target knows.
    pub async fn owner(&self, drive: &DriveSpec) -> Epoch {
        match url_of(drive).ok().and_then(|url| self.at(&url)) {
            // Whom it does not tell of now, fencing meets.
            Some(namespace) => namespace.owner().await.unwrap_or_default(),
            None => Epoch::default(),
        }
    }

    /// The paths to a drive, none of which need lead there.
    pub fn paths(&self, drive: &DriveSpec) -> Vec<PathStatus> {
        let namespace = url_of(drive).ok().and_then(|url| self.at(&url));
        let paths = namespace.map_or_else(Vec::new, |namespace| namespace.paths());
        let shown = paths.into_iter().map(|path| PathStatus {
            address: path.address.to_string(),
            state: match path.standing {
                Standing::Optimized => "optimized",
                Standing::NonOptimized => "non-optimized",
                Standing::Unusable => "unusable",
                Standing::Down => "down",
            }
            .into(),
            why: path.why,
        });
        shown.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_spec::EnclosureUrl;

    /// The cluster file is checked by a crate that knows no devices.
    #[test]
    fn what_a_cluster_file_may_say_can_be_opened() {
        for text in [
            "nvme+tcp://192.0.2.1/nqn.2014-08.org.example:x",
            "nvme+tcp://a-b.example:1,[2001:db8::1]:4421/nqn.x?hdgst=1&ddgst=1",
            "nvme+tcp://host,192.0.2.2:9/nqn.x?ddgst=1&hdgst=0",
        ] {
            let enclosure: EnclosureUrl = text.parse().expect(text);
            let url: NvmeUrl = enclosure.namespace(3).parse().expect(text);
            assert_eq!(url.to_string(), enclosure.namespace(3));
            assert_eq!(url.addresses, enclosure.addresses);
            assert_eq!(url.subsystem.to_string(), enclosure.subsystem);
            assert_eq!(url.namespace, 3);
            let digests = (url.digests.header, url.digests.data);
            assert_eq!(digests, (enclosure.header_digest, enclosure.data_digest));
        }
    }
}

//! Drives on the network: namespaces of the subsystems that a cluster file names, reserved where drives of this machine are locked.
//!
//! What always holds:
//! - A drive that cannot be reserved is opened only where a power fence keeps two servers apart.
//! - A namespace is open once, whatever numbers and subsystems it is reached by. It is opened anew only when what it was open as has lost
//!   every path, and that is over then, whoever holds it; each opening is another host to the target, so that what the earlier one left under way is shut out when the
//!   new one is fenced. Without reservations nothing is shut out: then the new one changes nothing that the earlier one may still change.
//! - What keeps a namespace connected is of no group that ends before the arrays are closed, whoever had it opened.
//!
//! After a crash the target still knows the dead host, whose reservation the next owner preempts.

use crate::drives::{DriveSource, NoDevice};
use futures_util::future::{LocalBoxFuture, join_all, pending};
use levada_base::Epoch;
use levada_base::reactor::{self, Group, Instant};
use levada_device::nvme::{
    Changes, Host, NamespaceError, Network, NvmeNamespace, NvmeUrl, Options, Resolver, Tcp,
};
use levada_device::{Device, HealthPage};
use levada_health::PathStatus;
use levada_spec::{ClusterFile, DriveSpec};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// An enclosure may be on its way up together with this machine: without it an array would go on with less than it has.
const AWAY_LIMIT: Duration = Duration::from_secs(10);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Opens what a URL leads to, as another host than all before.
type Opener<N> =
    Rc<dyn Fn(NvmeUrl) -> LocalBoxFuture<'static, Result<NvmeNamespace<N>, NamespaceError>>>;

/// See the module.
pub struct RemoteDrives<N: Network = Tcp> {
    opener: Opener<N>,
    /// Until then, an enclosure that does not answer is asked again.
    patient_until: Instant,
    has_power_fence: bool,
    /// When other servers had no power any more, at the latest.
    shut_out_at: Cell<Option<Instant>>,
    /// What keeps them connected; it ends with this, which outlives the arrays.
    tasks: Group,
    /// What was opened, as long as somebody uses it, or what it has changed may still happen; the latest comes last.
    opened: RefCell<Vec<Opened<N>>>,
}

struct Opened<N: Network> {
    drive: String,
    url: NvmeUrl,
    namespace: Weak<NvmeNamespace<N>>,
    /// What it was asked to change, which may still be carried out when it is gone.
    changes: Changes,
}

impl<N: Network> Opened<N> {
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

async fn connect<N: Network>(
    url: NvmeUrl,
    opener: Opener<N>,
    patient_until: Instant,
) -> Result<NvmeNamespace<N>, NoDevice> {
    loop {
        match opener(url.clone()).await {
            Err(NamespaceError::NoPath { .. }) if reactor::now() < patient_until => {
                reactor::sleep(LOOK_AGAIN_AFTER).await;
            }
            Err(error @ NamespaceError::NoPath { .. }) => {
                return Err(NoDevice::Away { why: error.to_string() });
            }
            opened => return opened.map_err(unusable),
        }
    }
}

/// A path of an enclosure that does not lead to its drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadPath {
    pub enclosure: String,
    pub address: String,
    pub why: String,
}

/// The paths of a cluster file's enclosures that lead to none of its drives, or to others than most of its paths: one is enough to open
/// these, so that a mistake in an address would be found when it is needed.
pub async fn dead_paths(cluster: &ClusterFile) -> Vec<DeadPath> {
    let mut drives: BTreeMap<&str, Vec<NvmeUrl>> = BTreeMap::new();
    for drive in cluster.drives.iter().filter(|drive| drive.is_remote()) {
        if let Ok(url) = url_of(drive) {
            drives.entry(&drive.enclosure).or_default().push(url);
        }
    }
    let paths = drives.iter().flat_map(|(enclosure, drives)| {
        let addresses = drives.first().into_iter().flat_map(|url| &url.addresses);
        addresses.map(move |address| (*enclosure, drives, address))
    });
    let looks = paths.map(async |(enclosure, drives, address)| {
        let by = |url: &NvmeUrl| NvmeUrl { addresses: vec![address.clone()], ..url.clone() };
        let led = async {
            let (first, others) = drives.split_first().ok_or("it has no drives")?;
            // One that leads to the first is no dead path; one drive may have been pulled.
            let why = match named(by(first)).await {
                Ok(names) => return Ok((0, names)),
                Err(why) => why,
            };
            let others = join_all(others.iter().map(|url| named(by(url)))).await;
            let found =
                others.into_iter().enumerate().find_map(|(at, led)| Some((at + 1, led.ok()?)));
            found.ok_or(why)
        };
        (enclosure, NvmeUrl::show_address(address), led.await)
    });
    let all = join_all(looks).await;
    let dead = all.iter().filter_map(|(enclosure, address, led)| {
        let why = match led {
            Ok((drive, names)) => {
                // Paths of the same enclosure to the same drive, and where they lead.
                let alike = all.iter().filter_map(|(its, address, led)| {
                    let (of, names) = led.as_ref().ok()?;
                    (its == enclosure && of == drive).then_some((address, names))
                });
                let agreeing =
                    |names: &Vec<u8>| alike.clone().filter(|(_, it)| *it == names).count();
                // Of as many each way the first is taken to be right.
                let (right, most) = alike.clone().rev().max_by_key(|(_, names)| agreeing(names))?;
                if most == names {
                    return None;
                }
                format!("it leads to others than {right}")
            }
            Err(why) => why.clone(),
        };
        let (enclosure, address) = ((*enclosure).to_owned(), address.clone());
        Some(DeadPath { enclosure, address, why })
    });
    dead.collect()
}

/// The names of a drive that is reached over the only path of its URL.
async fn named(url: NvmeUrl) -> Result<Vec<u8>, String> {
    let host = Host::anonymous().map_err(|error| error.to_string())?;
    let namespace = NvmeNamespace::open(&url, Options::new(host)).await.map_err(why)?;
    let names = namespace.names();
    namespace.close().await;
    Ok(names)
}

/// Of the only path that was tried.
fn why(error: NamespaceError) -> String {
    match error {
        NamespaceError::NoPath { mut paths, .. } => {
            let why = paths.pop().and_then(|path| path.why);
            why.unwrap_or_else(|| "not reached".into())
        }
        error => error.to_string(),
    }
}

impl RemoteDrives {
    /// Over the network of this machine. `has_power_fence`: something else keeps other servers away from drives without reservations.
    #[must_use]
    pub fn new(has_power_fence: bool) -> Self {
        let resolver = Resolver::default();
        let opener = move |url| {
            let host = Host::anonymous().expect("that is a name");
            let options = Options { resolver: resolver.clone(), ..Options::new(host) };
            let opening = async move { NvmeNamespace::open(&url, options).await };
            Box::pin(opening) as LocalBoxFuture<'static, _>
        };
        Self::over(has_power_fence, opener)
    }
}

impl<N: Network> RemoteDrives<N> {
    /// Drives that `opener` opens, each time as another host than all before.
    pub fn over<F>(has_power_fence: bool, opener: F) -> Self
    where
        F: Fn(NvmeUrl) -> LocalBoxFuture<'static, Result<NvmeNamespace<N>, NamespaceError>>
            + 'static,
    {
        Self {
            opener: Rc::new(opener),
            patient_until: reactor::now() + AWAY_LIMIT,
            has_power_fence,
            shut_out_at: Cell::default(),
            tasks: Group::new(),
            opened: RefCell::default(),
        }
    }

    /// Other servers have no power any more.
    pub fn were_shut_out(&self) {
        self.shut_out_at.set(Some(reactor::now()));
    }

    /// How long after another server is gone something of it may still reach a drive that is open.
    #[must_use]
    pub fn settle(&self) -> Duration {
        let opened = self.opened.borrow();
        let there = opened.iter().filter_map(|opened| opened.namespace.upgrade());
        let unguarded = there.filter(|namespace| !namespace.has_reservations());
        unguarded.map(|namespace| namespace.settle()).max().unwrap_or_default()
    }

    /// Opens the namespace of a drive: [`NoDevice::Open`] while it is open and can be reached, or [`NoDevice::Unusable`].
    async fn open_namespace(&self, drive: &DriveSpec) -> Result<Rc<NvmeNamespace<N>>, NoDevice> {
        let url = url_of(drive)?;
        if self.at(&url).is_some_and(|namespace| namespace.is_reached()) {
            return Err(NoDevice::Open { path: url.to_string() });
        }
        let connecting = connect(url.clone(), Rc::clone(&self.opener), self.patient_until);
        let connected = reactor::spawn_in(&self.tasks, connecting).await;
        let namespace = connected.unwrap_or_else(|| Err(unusable("the node ends")))?;
        if !namespace.has_reservations() && !self.has_power_fence {
            namespace.close().await;
            let lack = "has no reservations, and nothing would keep two servers from writing to it; where a command can take \
                        the power of every other server, give it as `power_fence` in [cluster]";
            return Err(unusable(format!("{url} {lack}")));
        }
        // What another server has sent may still be carried out, though that has no power any more.
        if let Some(at) = self.shut_out_at.get().filter(|_| !namespace.has_reservations()) {
            reactor::sleep((at + namespace.settle()).since(reactor::now())).await;
        }
        if let Some(twin) = self.twin(&url, &namespace) {
            namespace.close().await;
            return Err(unusable(format!("{url} is one and the same drive as {twin}")));
        }
        // It may have come back meanwhile, and would be shut out by this one.
        if self.at(&url).is_some_and(|open| open.is_reached()) {
            namespace.close().await;
            return Err(NoDevice::Open { path: url.to_string() });
        }
        let mut opened = self.opened.borrow_mut();
        let earlier = opened.iter().rev().find(|opened| opened.is_at(&url));
        if let Some(earlier) = earlier.filter(|_| !namespace.has_reservations()) {
            namespace.comes_after(earlier.changes.clone());
        }
        // Somebody may still hold an earlier one, which would connect again, and write again what it had not flushed.
        for earlier in opened.iter().filter(|opened| opened.is_at(&url)) {
            if let Some(earlier) = earlier.namespace.upgrade() {
                earlier.abandon();
            }
        }
        opened.retain(|it| it.namespace.strong_count() > 0 || !it.changes.are_settled());
        let (drive, changes) = (drive.name.clone(), namespace.changes());
        let namespace = Rc::new(namespace);
        opened.push(Opened { drive, url, namespace: Rc::downgrade(&namespace), changes });
        Ok(namespace)
    }

    /// What is open at `url`, the latest of it.
    fn at(&self, url: &NvmeUrl) -> Option<Rc<NvmeNamespace<N>>> {
        let opened = self.opened.borrow();
        let there = opened.iter().rev().filter(|opened| opened.is_at(url));
        there.filter_map(|opened| opened.namespace.upgrade()).next()
    }

    /// What a drive is open as.
    fn of(&self, drive: &DriveSpec) -> Option<Rc<NvmeNamespace<N>>> {
        self.at(&url_of(drive).ok()?)
    }

    /// What a device is, by its name.
    fn named(&self, device: &str) -> Option<Rc<NvmeNamespace<N>>> {
        self.at(&device.parse().ok()?)
    }

    /// The drive that the same namespace is open as, by another URL.
    fn twin(&self, url: &NvmeUrl, namespace: &NvmeNamespace<N>) -> Option<String> {
        let opened = self.opened.borrow();
        let is_same = |opened: &&Opened<N>| {
            let other = opened.namespace.upgrade();
            !opened.is_at(url) && other.is_some_and(|other| other.is_same_as(namespace))
        };
        opened.iter().find(is_same).map(|twin| format!("{} ({})", twin.drive, twin.url))
    }
}

impl<N: Network> DriveSource for RemoteDrives<N> {
    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        Box::pin(async { Ok(self.open_namespace(drive).await? as Rc<dyn Device>) })
    }

    /// There is none to be made.
    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        self.open(drive)
    }

    fn owner<'a>(&'a self, drive: &'a DriveSpec) -> LocalBoxFuture<'a, Epoch> {
        Box::pin(async {
            match self.of(drive) {
                // Whom it does not tell of now, fencing meets.
                Some(namespace) => namespace.owner().await.unwrap_or_default(),
                None => Epoch::default(),
            }
        })
    }

    fn needs_power_fence(&self, drive: &DriveSpec) -> bool {
        self.of(drive).is_some_and(|namespace| !namespace.has_reservations())
    }

    fn look_at_health<'a>(&'a self, device: &'a str) -> LocalBoxFuture<'a, Option<HealthPage>> {
        Box::pin(async { self.named(device)?.look_at_health().await })
    }

    fn warned(&self, device: &str) -> LocalBoxFuture<'_, ()> {
        match self.named(device) {
            Some(namespace) => Box::pin(async move { namespace.warned().await }),
            None => Box::pin(pending()),
        }
    }

    fn lost(&self, device: &str) -> LocalBoxFuture<'_, Epoch> {
        match self.named(device) {
            Some(namespace) => Box::pin(async move { namespace.lost().await }),
            None => Box::pin(pending()),
        }
    }

    /// Requests to a device of this machine are always carried out, rather than waited for.
    fn is_reached(&self, device: &str) -> bool {
        let Ok(url) = device.parse() else { return true };
        self.at(&url).is_some_and(|namespace| namespace.is_reached())
    }

    /// None of which need lead there.
    fn paths(&self, drive: &DriveSpec) -> Vec<PathStatus> {
        let paths = self.of(drive).map_or_else(Vec::new, |namespace| namespace.paths());
        paths.into_iter().map(PathStatus::from).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::{LocalBoxFuture, ready};
    use levada_base::reactor::Reactor;
    use levada_base::units::{BLOCK_BYTES, MIB};
    use levada_base::{BufMut, IoVec};
    use levada_device::{BlockError, Durability};
    use levada_export_nvmet::{Hosts, Nqn, Open, Opened, Subsystem, Target};
    use levada_volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
    use std::net::SocketAddr;

    /// Zeroes, whatever is written.
    struct Blank;

    impl Volume for Blank {
        fn size_bytes(&self) -> u64 {
            64 * MIB
        }

        fn shape(&self) -> Shape {
            let (io_bytes_best, discard_bytes) = (MIB, BLOCK_BYTES);
            Shape { block_bytes: BLOCK_BYTES, io_bytes_best, discard_bytes, is_read_only: false }
        }

        fn read(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
            Box::pin(ready(Ok(BufMut::zeroed(bytes as usize).freeze().into_vec())))
        }

        fn write(&self, _at: u64, _from: IoVec, _: Durability) -> VolumeFuture<'_, ()> {
            Box::pin(ready(Ok(())))
        }

        fn flush(&self) -> VolumeFuture<'_, ()> {
            Box::pin(ready(Ok(())))
        }

        fn discard(&self, _at: u64, _bytes: u64) -> VolumeFuture<'_, ()> {
            Box::pin(ready(Ok(())))
        }

        fn write_zeroes(&self, _at: u64, _bytes: u64, _: Zeroing) -> VolumeFuture<'_, ()> {
            Box::pin(ready(Ok(())))
        }

        fn extents(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
            Box::pin(ready(Ok(vec![Extent { bytes, is_allocated: true }])))
        }
    }

    fn shown_as(guid: u8) -> Open {
        let opened = Opened { volume: Rc::new(Blank), guid: [guid; 16] };
        Rc::new(move || -> LocalBoxFuture<'static, Option<Opened>> {
            Box::pin(ready(Some(opened.clone())))
        })
    }

    fn drive(name: &str, path: String) -> DriveSpec {
        DriveSpec { name: name.into(), path: path.into(), enclosure: "e".into(), size: None }
    }

    /// A target, and where it is: subsystem `nqn.x:a` with two namespaces, the second of which is `nqn.x:b`'s as well.
    fn served() -> (Target, SocketAddr) {
        let target = Target::new();
        for (nqn, namespaces) in [("nqn.x:a", &[(1, 1), (2, 2)][..]), ("nqn.x:b", &[(7, 2)])] {
            let nqn = Nqn::new(nqn).expect("a name");
            let subsystem = Subsystem::new(nqn, "1", Hosts::Any);
            for (number, guid) in namespaces {
                subsystem.add(*number, shown_as(*guid));
            }
            target.add(subsystem);
        }
        let path = target.listen(([127, 0, 0, 1], 0).into()).expect("listens");
        target.begin();
        let at = path.address();
        (target, at)
    }

    #[test]
    fn a_name_that_cannot_be_looked_up_costs_its_path_alone() {
        Reactor::new().expect("io_uring").block_on(async {
            let (_target, at) = served();
            let drives = RemoteDrives::new(false);
            let url = format!("nvme+tcp://nowhere.invalid:4420,{at}/nqn.x:a?ns=1");
            let first = drive("e1-1", url);
            let device = drives.open(&first).await.expect("over the other path");
            // Asking for the name may take as long as the resolver is waited for.
            let begun = reactor::now();
            let (address, why) = loop {
                let [named, other] = &drives.paths(&first)[..] else { panic!("two paths") };
                assert_eq!((&*other.address, &*other.state), (&*at.to_string(), "optimized"));
                if let Some(why) = &named.why {
                    break (named.address.clone(), why.clone());
                }
                assert!(begun.elapsed() < Duration::from_secs(10), "nothing is said");
                reactor::sleep(Duration::from_millis(20)).await;
            };
            assert_eq!(address, "nowhere.invalid:4420");
            assert!(why.contains("cannot look up its address"), "{why}");
            drop(device);
        });
    }

    #[test]
    fn a_namespace_is_open_once_by_whatever_name() {
        Reactor::new().expect("io_uring").block_on(async {
            let (_target, at) = served();
            let drives = RemoteDrives::new(false);
            let first = drive("e1-1", format!("nvme+tcp://{at}/nqn.x:a?ns=1"));
            let second = drive("e1-2", format!("nvme+tcp://{at}/nqn.x:a?ns=2"));
            let twin = drive("e2-7", format!("nvme+tcp://{at}/nqn.x:b?ns=7"));
            let devices = [
                drives.open(&first).await.expect("opens"),
                drives.open(&second).await.expect("another one"),
            ];
            let again = drives.open(&first).await.err().expect("it is open");
            assert!(matches!(again, NoDevice::Open { .. }), "{again}");
            let same = drives.open(&twin).await.err().expect("it is open").to_string();
            assert!(same.contains("one and the same drive as e1-2 (nvme+tcp://"), "{same}");
            assert_eq!(drives.paths(&second)[0].state, "optimized");
            // Owners before are those that the target knows of.
            assert_eq!(drives.owner(&first).await, Epoch::default());
            let mut devices = devices.into_iter();
            devices.next().expect("the first").fence(Epoch(5)).await.expect("nobody's");
            let anew = drives.open(&first).await.expect("nobody has it open");
            assert_eq!(drives.owner(&first).await, Epoch(5), "of the one before");
            anew.fence(Epoch(6)).await.expect("later");
            // Opened once more under the same epoch, as one that vanished is: what the earlier one still sends is refused.
            let others = RemoteDrives::new(false);
            let once_more = others.open(&first).await.expect("elsewhere");
            once_more.fence(Epoch(6)).await.expect("not earlier");
            let block = || BufMut::zeroed(BLOCK_BYTES as usize).freeze().into_vec();
            once_more.write(0, block(), Durability::Volatile).await.expect("it has the drive");
            let late = anew.write(0, block(), Durability::Volatile).await;
            assert!(matches!(late, Err(BlockError::Fenced { .. })), "{late:?}");
            // Away.
            drop((anew, devices));
            assert!(drives.paths(&second).is_empty());
            assert!(drives.open(&twin).await.is_ok(), "nobody has it open");
        });
    }
}

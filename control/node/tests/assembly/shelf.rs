//! Drives in memory, and a cluster assembled on them.

use futures_util::future::LocalBoxFuture;
use levada_base::Epoch;
use levada_base::ids::{Ino, Uuid};
use levada_base::reactor::{self, Group, random_u64};
use levada_base::sync::Notify;
use levada_base::units::MIB;
use levada_base::{Buf, IoVec};
use levada_client::{Client, ClientConfig, housekeeper};
use levada_desk::PowerFenceError;
use levada_device::{Device, FaultDevice, Faults, RamDevice, VolatileDevice};
use levada_node::assembly::{self, AssemblyError, Cluster, Service, StartOptions, Tuning};
use levada_node::control::{ControlReply, ControlRequest};
use levada_node::drives::{DriveSource, DrivesError, MayOverwrite, NoDevice};
use levada_node::operator::Operator;
use levada_node::volumes::Volumes;
use levada_spec::{ClusterFile, DriveSpec};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::meta::{Caller, OpenMode};
use levada_wire::rpc::{ServiceConfig, accept_all};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

pub const ADDRESS: &str = "node";

pub const CALLER: Caller = Caller { uid: 0, gid: 0 };

/// Drives in memory, by name; one that was pulled is absent.
#[derive(Default)]
pub struct Shelf {
    pub drives: RefCell<BTreeMap<String, Rc<RamDevice>>>,
    pub pulled: RefCell<Vec<String>>,
    /// Drives at whose place there is something else, which cannot be used.
    pub hidden: RefCell<Vec<String>>,
    /// Drives that are open, and out of reach.
    pub unreached: RefCell<Vec<String>>,
    /// The cluster that was up with them last, as a state directory notes it.
    pub noted: Cell<Option<Uuid>>,
    /// Drives whose files a node left empty, which was killed while it made them.
    pub empty: RefCell<Vec<String>>,
    /// What befalls drives, by name.
    pub faults: RefCell<BTreeMap<String, Faults>>,
    /// Where drives lose what was not flushed when the power goes: those that were opened.
    pub volatile: Option<RefCell<Vec<Rc<VolatileDevice>>>>,
    /// What another server does while this one asks drives for their owners, once.
    pub meanwhile: RefCell<Option<LocalBoxFuture<'static, ()>>>,
    /// Shuts others out, and says whether that went well.
    pub power_fence: RefCell<Option<PowerFence>>,
}

type PowerFence = Box<dyn Fn(Epoch) -> LocalBoxFuture<'static, bool>>;

impl Shelf {
    /// Of drives that lose what was not flushed when the power goes.
    pub fn volatile() -> Self {
        Self { volatile: Some(RefCell::default()), ..Self::default() }
    }

    /// Cuts the power of all drives.
    pub async fn cut_power(&self, seed: u64) {
        let drives = self.volatile.iter().flat_map(RefCell::take);
        for drive in drives {
            drive.power_cut(seed).await.expect("the power goes");
        }
    }

    fn cached(&self, drive: Rc<dyn Device>) -> Rc<dyn Device> {
        let Some(volatile) = &self.volatile else { return drive };
        let drive = Rc::new(VolatileDevice::new(drive));
        volatile.borrow_mut().push(Rc::clone(&drive));
        drive
    }
}

impl DriveSource for Shelf {
    fn cluster(&self) -> Option<Uuid> {
        self.noted.get()
    }

    fn forget_cluster(&self) -> std::io::Result<()> {
        self.noted.take();
        Ok(())
    }

    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        let found = self.drives.borrow().get(&drive.name).cloned();
        let found = found.filter(|_| !self.pulled.borrow().contains(&drive.name));
        let path = drive.path.display().to_string();
        let none = if self.hidden.borrow().contains(&drive.name) {
            NoDevice::Unusable { why: "it is a directory".into() }
        } else if self.empty.borrow().contains(&drive.name) {
            NoDevice::Empty { path }
        } else {
            NoDevice::Absent { path }
        };
        let found = found.filter(|_| matches!(none, NoDevice::Absent { .. }));
        let found = found.map(|found| match self.faults.borrow().get(&drive.name) {
            Some(faults) => Rc::new(FaultDevice::new(found, faults.clone())) as Rc<dyn Device>,
            None => found,
        });
        let found = found.map(|found| self.cached(found));
        Box::pin(async move { found.ok_or(none) })
    }

    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        let bytes = drive.size.expect("a file-backed drive").0;
        let made = Rc::new(RamDevice::new(&drive.name, bytes));
        self.empty.borrow_mut().retain(|empty| *empty != drive.name);
        self.drives.borrow_mut().insert(drive.name.clone(), Rc::clone(&made));
        let made = self.cached(made);
        Box::pin(async move { Ok(made) })
    }

    fn owner<'a>(&'a self, _drive: &'a DriveSpec) -> LocalBoxFuture<'a, Epoch> {
        let meanwhile = self.meanwhile.take();
        Box::pin(async move {
            if let Some(meanwhile) = meanwhile {
                meanwhile.await;
            }
            Epoch::default()
        })
    }

    fn shut_out<'a>(
        &'a self,
        _cluster: Option<Uuid>,
        last: Epoch,
    ) -> LocalBoxFuture<'a, Result<bool, PowerFenceError>> {
        let fencing = self.power_fence.borrow().as_ref().map(|fence| fence(last));
        Box::pin(async move {
            let Some(fencing) = fencing else { return Ok(false) };
            let [command, name, why] = ["off", "box", "no answer"].map(String::from);
            fencing.await.then_some(true).ok_or(PowerFenceError { command, name, why })
        })
    }

    fn needs_power_fence(&self, _drive: &DriveSpec) -> bool {
        self.power_fence.borrow().is_some()
    }

    fn is_reached(&self, device: &str) -> bool {
        !self.unreached.borrow().iter().any(|unreached| unreached == device)
    }

    fn in_place(&self, drive: &DriveSpec) -> bool {
        !self.hidden.borrow().contains(&drive.name)
    }
}

pub fn cluster_file() -> ClusterFile {
    ClusterFile::box_default(Path::new("box"), 40 << 30).expect("room enough")
}

pub async fn start(file: ClusterFile, shelf: &Shelf) -> Result<Cluster, AssemblyError> {
    start_over(file, shelf, MayOverwrite::Nothing).await
}

pub async fn start_over(
    file: ClusterFile,
    shelf: &Shelf,
    may_overwrite: MayOverwrite,
) -> Result<Cluster, AssemblyError> {
    start_as(file, shelf, may_overwrite, false).await
}

/// What is there of a cluster, by half of its members or fewer.
pub async fn start_without_majority(
    file: ClusterFile,
    shelf: &Shelf,
) -> Result<Cluster, AssemblyError> {
    start_as(file, shelf, MayOverwrite::Nothing, true).await
}

async fn start_as(
    file: ClusterFile,
    shelf: &Shelf,
    may_overwrite: MayOverwrite,
    without_majority: bool,
) -> Result<Cluster, AssemblyError> {
    let options = StartOptions {
        may_overwrite,
        without_majority,
        tuning: Tuning::default(),
        address: ADDRESS.to_owned(),
        progress: &|_| {},
    };
    assembly::start(file, shelf, options).await
}

/// Runs `work` with a client of a served cluster, then stops both.
pub async fn served<F: Future<Output = ()>>(shelf: &Shelf, work: impl FnOnce(Client) -> F) {
    served_as(cluster_file(), shelf, work).await;
}

/// As [`served`], of the cluster of this file.
pub async fn served_as<F: Future<Output = ()>>(
    file: ClusterFile,
    shelf: &Shelf,
    work: impl FnOnce(Client) -> F,
) {
    let (cluster, services, client) = begin(file, shelf).await;
    work(client.clone()).await;
    client.shutdown().await.expect("all durable");
    services.kill();
    cluster.stop().await;
}

/// As [`served`], until `work` is done or so much time has passed: then the power of all drives goes. It must be the last thing
/// that a reactor does.
pub async fn served_until_cut<F: Future<Output = ()>>(
    shelf: &Shelf,
    after: Duration,
    seed: u64,
    work: impl FnOnce(Client) -> F,
) {
    let (_cluster, services, client) = begin(cluster_file(), shelf).await;
    let _ended = reactor::timeout(after, work(client)).await;
    services.kill();
    shelf.cut_power(seed).await;
}

async fn begin(file: ClusterFile, shelf: &Shelf) -> (Cluster, Group, Client) {
    let cluster = start(file, shelf).await.expect("starts");
    let services = Group::new();
    let net = Network::new(LinkConfig::default());
    let listener = net.listen(ADDRESS);
    let router = Rc::clone(&cluster.router) as Rc<_>;
    reactor::spawn_in(&services, accept_all(Rc::new(listener), router, ServiceConfig::default()));
    let target = cluster.metadata_target().expect("a metadata target");
    let connect = async |host| {
        // A name of its own in each life, as the node's client has.
        let name = u128::from(random_u64()) << 64 | u128::from(random_u64());
        let config = ClientConfig::new(net.transport(host), ADDRESS, target, name.to_le_bytes());
        Client::connect(config).await.expect("connects")
    };
    if shelf.volatile.is_some() {
        // There may be something to be done for clients of the life before, once their leases are over.
        for target in &cluster.targets {
            if let Service::Metadata { service, .. } = &target.service {
                let service = Rc::clone(service);
                reactor::spawn_in(&services, async move { service.run().await });
            }
        }
        let keeper = connect("housekeeper").await;
        reactor::spawn_in(&services, housekeeper::keep_house(keeper));
    }
    let client = connect("client").await;
    (cluster, services, client)
}

pub fn pattern(bytes: usize) -> IoVec {
    let bytes: Vec<u8> = (0..bytes).map(|at| (at / 7 % 251) as u8).collect();
    Buf::copy_of(&bytes).into_vec()
}

pub fn joined(parts: &IoVec) -> Vec<u8> {
    levada_base::buf::joined(parts)
}

pub async fn write_file(client: Client) {
    let mode = OpenMode { write: true, truncate: false };
    let (file, ..) =
        client.create_file(CALLER, Ino::ROOT, b"data", 0o644, mode, true).await.expect("created");
    for at in 0..5 {
        file.write(at * 1_000_003, pattern(1_000_003)).await.expect("written");
    }
    file.fsync().await.expect("durable");
    file.close().await;
}

pub async fn read_file(client: Client) {
    let attr = client.lookup(Ino::ROOT, b"data").await.expect("there");
    assert_eq!(attr.size, 5 * 1_000_003);
    let mode = OpenMode { write: false, truncate: false };
    let (file, _) = client.open(attr.ino, mode).await.expect("opens");
    let whole = file.read(0, attr.size).await.expect("reads");
    let expected = joined(&pattern(1_000_003)).repeat(5);
    assert!(joined(&whole) == expected, "what was written reads back");
    file.close().await;
}

/// The first and the last MiB of a drive, where its labels are.
pub async fn head_and_tail(drive: &RamDevice) -> Vec<u8> {
    let mut both = Vec::new();
    for at in [0, drive.info().capacity_bytes - MIB] {
        let into = levada_base::BufMut::zeroed(MIB as usize).into_vec();
        let read = drive.read(at, into).await.expect("reads");
        both.extend(levada_base::buf::joined(&read));
    }
    both
}

/// Every label and superblock of a shelf, and the drives that are there.
pub async fn heads(shelf: &Shelf) -> Vec<(String, Vec<u8>)> {
    let mut heads = Vec::new();
    let drives = shelf.drives.borrow().clone();
    for (name, drive) in drives {
        heads.push((name, head_and_tail(&drive).await));
    }
    heads
}

/// An operator of a running cluster.
pub async fn operator(shelf: &Rc<Shelf>) -> (Rc<Cluster>, Rc<Operator>) {
    operator_with(shelf, std::path::PathBuf::from("box/levada.toml")).await
}

/// An operator that reads `file` again when drives change.
pub async fn operator_with(
    shelf: &Rc<Shelf>,
    file: std::path::PathBuf,
) -> (Rc<Cluster>, Rc<Operator>) {
    operator_of(cluster_file(), shelf, file).await
}

/// An operator of a cluster that was started with `text`, and that reads `file` afterwards.
pub async fn operator_of(
    text: ClusterFile,
    shelf: &Rc<Shelf>,
    file: std::path::PathBuf,
) -> (Rc<Cluster>, Rc<Operator>) {
    operator_told_by(text, shelf, file, Rc::default()).await
}

/// The same, told of what happens to arrays by `changed`.
pub async fn operator_told_by(
    text: ClusterFile,
    shelf: &Rc<Shelf>,
    file: std::path::PathBuf,
    changed: Rc<Notify>,
) -> (Rc<Cluster>, Rc<Operator>) {
    let cluster = Rc::new(start(text, shelf).await.expect("starts"));
    let source = Rc::clone(shelf) as Rc<dyn DriveSource>;
    let volumes = Volumes::new(Rc::clone(&cluster), ADDRESS, None);
    let address = ADDRESS.to_owned();
    let operator = Operator::new(Rc::clone(&cluster), source, file, address, changed, volumes);
    (cluster, operator)
}

pub async fn status(operator: &Rc<Operator>) -> levada_node::control::Status {
    match operator.answer(ControlRequest::Status).await {
        ControlReply::Status(status) => *status,
        other => panic!("{other:?}"),
    }
}

pub async fn fail(operator: &Rc<Operator>, drive: &str, force: bool) -> Result<(), String> {
    match operator.answer(ControlRequest::DriveFail { drive: drive.into(), force }).await {
        ControlReply::Done => Ok(()),
        ControlReply::Failed { why } => Err(why),
        other => panic!("{other:?}"),
    }
}

/// The text of a refusal for a file that says otherwise than the drives.
pub async fn changed(file: ClusterFile, shelf: &Shelf) -> String {
    let error = start(file, shelf).await.err().expect("refused");
    let is_changed = matches!(error, AssemblyError::Drives(DrivesError::Changed { .. }));
    assert!(is_changed, "{error}");
    error.to_string()
}

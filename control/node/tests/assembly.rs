//! A cluster in a box on memory drives, from format to files and back, on virtual time.

use futures_util::future::LocalBoxFuture;
use levada_base::ids::Ino;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::MIB;
use levada_base::{Buf, IoVec};
use levada_client::{Client, ClientConfig};
use levada_device::{Device, RamDevice};
use levada_node::assembly::{self, AssemblyError, Cluster, StartOptions, Tuning};
use levada_node::drives::{DriveSource, DrivesError, NoDevice};
use levada_spec::{ClusterFile, DriveSpec};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::meta::{Caller, OpenMode};
use levada_wire::rpc::{ServiceConfig, accept_all};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

const ADDRESS: &str = "node";
const CALLER: Caller = Caller { uid: 0, gid: 0 };

/// Drives in memory, by name; one that was pulled is absent.
#[derive(Default)]
struct Shelf {
    drives: RefCell<BTreeMap<String, Rc<RamDevice>>>,
    pulled: RefCell<Vec<String>>,
}

impl DriveSource for Shelf {
    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        let found = self.drives.borrow().get(&drive.name).cloned();
        let found = found.filter(|_| !self.pulled.borrow().contains(&drive.name));
        let absent = NoDevice::Absent { path: drive.path.display().to_string() };
        Box::pin(async move { found.map(|drive| drive as Rc<dyn Device>).ok_or(absent) })
    }

    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        let bytes = drive.size.expect("a file-backed drive").0;
        let made = Rc::new(RamDevice::new(&drive.name, bytes));
        self.drives.borrow_mut().insert(drive.name.clone(), Rc::clone(&made));
        Box::pin(async move { Ok(made as Rc<dyn Device>) })
    }
}

fn cluster_file() -> ClusterFile {
    ClusterFile::box_default(Path::new("box"), 40 << 30).expect("room enough")
}

async fn start(file: ClusterFile, shelf: &Shelf) -> Result<Cluster, AssemblyError> {
    let options = StartOptions {
        force_format: false,
        tuning: Tuning::default(),
        address: ADDRESS.to_owned(),
        progress: &|_| {},
    };
    assembly::start(file, shelf, options).await
}

/// Runs `work` with a client of a served cluster, then stops both.
async fn served<F: Future<Output = ()>>(shelf: &Shelf, work: impl FnOnce(Client) -> F) {
    let cluster = start(cluster_file(), shelf).await.expect("starts");
    let services = Group::new();
    let net = Network::new(LinkConfig::default());
    let listener = net.listen(ADDRESS);
    let router = Rc::clone(&cluster.router) as Rc<_>;
    reactor::spawn_in(&services, accept_all(Rc::new(listener), router, ServiceConfig::default()));
    let target = cluster.metadata_target().expect("a metadata target");
    let config = ClientConfig::new(net.transport("client"), ADDRESS, target, [7; 16]);
    let client = Client::connect(config).await.expect("connects");
    work(client.clone()).await;
    client.shutdown().await.expect("all durable");
    services.kill();
    cluster.stop().await;
}

fn pattern(bytes: usize) -> IoVec {
    let bytes: Vec<u8> = (0..bytes).map(|at| (at / 7 % 251) as u8).collect();
    Buf::copy_of(&bytes).into_vec()
}

fn joined(parts: &IoVec) -> Vec<u8> {
    parts.iter().flat_map(|part| part.iter().copied()).collect()
}

async fn write_file(client: Client) {
    let mode = OpenMode { write: true, truncate: false };
    let (file, ..) =
        client.create_file(CALLER, Ino::ROOT, b"data", 0o644, mode, true).await.expect("created");
    for at in 0..5 {
        file.write(at * 1_000_003, pattern(1_000_003)).await.expect("written");
    }
    file.fsync().await.expect("durable");
    file.close().await;
}

async fn read_file(client: Client) {
    let attr = client.lookup(Ino::ROOT, b"data").await.expect("there");
    assert_eq!(attr.size, 5 * 1_000_003);
    let mode = OpenMode { write: false, truncate: false };
    let (file, _) = client.open(attr.ino, mode).await.expect("opens");
    let whole = file.read(0, attr.size).await.expect("reads");
    let expected = joined(&pattern(1_000_003)).repeat(5);
    assert!(joined(&whole) == expected, "what was written reads back");
    file.close().await;
}

#[test]
fn files_survive_a_restart_and_the_loss_of_any_enclosure() {
    Reactor::simulated(11).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        served(&shelf, read_file).await;
        // Both drives of the first enclosure.
        let file = cluster_file();
        let first = &file.enclosures[0].name;
        let pulled = file.drives.iter().filter(|drive| drive.enclosure == *first);
        shelf.pulled.borrow_mut().extend(pulled.map(|drive| drive.name.clone()));
        served(&shelf, read_file).await;
    });
}

#[test]
fn too_many_lost_drives_stop_the_cluster_until_they_are_back() {
    Reactor::simulated(12).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        shelf.pulled.borrow_mut().extend(["d00", "d02", "d04"].map(String::from));
        let error = start(cluster_file(), &shelf).await.err().expect("three are too many");
        let text = error.to_string();
        for drive in ["d00", "d02", "d04"] {
            assert!(text.contains(drive), "{text}");
        }
        shelf.pulled.borrow_mut().clear();
        served(&shelf, read_file).await;
    });
}

#[test]
fn another_clusters_drives_are_refused() {
    Reactor::simulated(13).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let mut other = cluster_file();
        other.name = "other".into();
        let error = start(other, &shelf).await.err().expect("not ours");
        assert!(
            matches!(error, AssemblyError::Drives(DrivesError::OtherCluster { .. })),
            "{error}"
        );
        // One drive listed twice.
        let mut twice = cluster_file();
        twice.drives[1].name = "d00-again".into();
        let drive = shelf.drives.borrow()["d00"].clone();
        shelf.drives.borrow_mut().insert("d00-again".into(), drive);
        let error = start(twice, &shelf).await.err().expect("one drive is two");
        assert!(matches!(error, AssemblyError::Drives(DrivesError::SameDrive { .. })), "{error}");
        served(&shelf, read_file).await;
    });
}

#[test]
fn sizes_are_what_the_box_says() {
    Reactor::simulated(14).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, |client| async move {
            let space = client.space().await.expect("answers");
            assert!(space.total_bytes > 1000 * MIB, "{space:?}");
            assert!(space.free_bytes <= space.total_bytes);
        })
        .await;
    });
}

//! A cluster in a box on memory drives, from format to files and back, on virtual time.

use futures_util::future::LocalBoxFuture;
use levada_base::ids::{Ino, Uuid};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::MIB;
use levada_base::{Buf, IoVec};
use levada_client::{Client, ClientConfig};
use levada_device::{Device, Durability, FaultDevice, Faults, RamDevice};
use levada_kv::Batch;
use levada_node::assembly::{self, AssemblyError, Cluster, StartOptions, Tuning};
use levada_node::control::{ControlReply, ControlRequest};
use levada_node::drives::{DriveSource, DrivesError, Intake, MayOverwrite, NoDevice, format_one};
use levada_node::fsck::{self, FsckOptions, Sum, TargetReport};
use levada_node::operator::Operator;
use levada_spec::{Bytes, ClusterFile, DriveSpec, Level, SliceSize, Spread};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::meta::{Caller, OpenMode};
use levada_wire::rpc::{ServiceConfig, accept_all};
use std::cell::{Cell, RefCell};
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
    /// Drives at whose place there is something else, which cannot be used.
    hidden: RefCell<Vec<String>>,
    /// The cluster that was up with them last, as a state directory notes it.
    noted: Cell<Option<Uuid>>,
    /// Drives whose files a node left empty, which was killed while it made them.
    empty: RefCell<Vec<String>>,
    /// What befalls drives, by name.
    faults: RefCell<BTreeMap<String, Faults>>,
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
        Box::pin(async move { Ok(made as Rc<dyn Device>) })
    }

    fn in_place(&self, drive: &DriveSpec) -> bool {
        !self.hidden.borrow().contains(&drive.name)
    }
}

fn cluster_file() -> ClusterFile {
    ClusterFile::box_default(Path::new("box"), 40 << 30).expect("room enough")
}

async fn start(file: ClusterFile, shelf: &Shelf) -> Result<Cluster, AssemblyError> {
    start_over(file, shelf, MayOverwrite::Nothing).await
}

async fn start_over(
    file: ClusterFile,
    shelf: &Shelf,
    may_overwrite: MayOverwrite,
) -> Result<Cluster, AssemblyError> {
    let options = StartOptions {
        may_overwrite,
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

/// The first and the last MiB of a drive, where its labels are.
async fn head_and_tail(drive: &RamDevice) -> Vec<u8> {
    let mut both = Vec::new();
    for at in [0, drive.info().capacity_bytes - MIB] {
        let into = levada_base::BufMut::zeroed(MIB as usize).into_vec();
        let read = drive.read(at, into).await.expect("reads");
        both.extend(read.iter().flat_map(|part| part.iter().copied()));
    }
    both
}

#[test]
fn giving_a_cluster_up_spares_another_one_of_the_same_name() {
    Reactor::simulated(25).block_on(async {
        let (shelf, others) = (Shelf::default(), Shelf::default());
        served(&shelf, write_file).await;
        served(&others, write_file).await;
        let theirs = Rc::clone(&others.drives.borrow()["d03"]);
        let ours = shelf.drives.borrow_mut().insert("d03".into(), Rc::clone(&theirs));
        let before = head_and_tail(&theirs).await;
        let over = start_over(cluster_file(), &shelf, MayOverwrite::Cluster).await;
        let text = over.err().expect("refused").to_string();
        for part in ["drive d03", "another cluster", "--destroy box --force-format"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(before == head_and_tail(&theirs).await, "not a byte was written");
        shelf.drives.borrow_mut().insert("d03".into(), ours.expect("there was one"));
        served(&shelf, read_file).await;
        let over = start_over(cluster_file(), &shelf, MayOverwrite::Cluster).await;
        over.expect("made anew").stop().await;
    });
}

/// The new labels were another cluster's to the old note, and the old ones to the new majority.
#[test]
fn a_cluster_given_up_half_way_is_given_up_by_the_same_order() {
    Reactor::simulated(37).block_on(async {
        let shelf = Shelf::default();
        let over = || start_over(cluster_file(), &shelf, MayOverwrite::Cluster);
        let mut made = start(cluster_file(), &shelf).await.expect("starts");
        // In its middle, one drive goes while labels are erased, or new ones written.
        for (requests, drive) in [(2, "d00"), (4, "d03"), (5, "d03"), (6, "d06"), (9, "d09")] {
            let given_up = made.drives.cluster;
            shelf.noted.set(Some(given_up));
            made.stop().await;
            let faults = Faults::none();
            shelf.faults.borrow_mut().insert(drive.into(), faults.clone());
            faults.fail_after(requests);
            let text = over().await.err().expect("a drive is gone").to_string();
            assert!(text.contains(drive), "{text}");
            assert_eq!(shelf.noted.get(), None, "it is given up");
            shelf.faults.take();
            made = over().await.expect("made anew");
            assert_ne!(made.drives.cluster, given_up);
        }
        made.stop().await;
    });
}

#[test]
fn another_cluster_with_the_name_of_the_noted_one_is_neither_opened_nor_given_up() {
    Reactor::simulated(35).block_on(async {
        let (shelf, others) = (Shelf::default(), Shelf::default());
        let made = start(cluster_file(), &shelf).await.expect("starts");
        let noted = made.drives.cluster;
        made.stop().await;
        let made = start(cluster_file(), &others).await.expect("starts");
        let other = made.drives.cluster;
        made.stop().await;
        // Paths that lead to the wrong disk; then all but one drive of it.
        others.noted.set(Some(noted));
        for place in ["drives/d00.img", "drives/d01.img"] {
            if place == "drives/d01.img" {
                let ours = Rc::clone(&shelf.drives.borrow()["d00"]);
                others.drives.borrow_mut().insert("d00".into(), ours);
            }
            let before = heads(&others).await;
            for over in [MayOverwrite::Nothing, MayOverwrite::Others, MayOverwrite::Cluster] {
                let text = start_over(cluster_file(), &others, over).await.err().expect("refused");
                let (text, noted, other) = (text.to_string(), noted.to_string(), other.to_string());
                for part in [
                    &*noted,
                    &*other,
                    "d01",
                    place,
                    "`cluster` in the state",
                    "both: `levada up --destroy box --force",
                ] {
                    assert!(text.contains(part), "{over:?}: {part}: {text}");
                }
            }
            assert!(before == heads(&others).await, "not a byte was written");
        }
        // Without the note it is the cluster that most drives are of.
        others.noted.set(None);
        let made = start(cluster_file(), &others).await.expect("bears the loss of d00");
        assert_eq!(made.drives.cluster, other);
        made.stop().await;
        // Of two with as many drives it is the noted one, and too much of it is absent.
        for drive in ["d01", "d02", "d03", "d04", "d05"] {
            let ours = Rc::clone(&shelf.drives.borrow()[drive]);
            others.drives.borrow_mut().insert(drive.into(), ours);
        }
        for (cluster, absent) in [(noted, "d06"), (other, "d01")] {
            others.noted.set(Some(cluster));
            let text = start(cluster_file(), &others).await.err().expect("too few").to_string();
            assert!(text.contains("array") && text.contains(absent), "{text}");
        }
    });
}

#[test]
fn another_clusters_drive_among_ours_counts_as_absent_and_is_not_touched() {
    Reactor::simulated(18).block_on(async {
        let (shelf, others) = (Rc::new(Shelf::default()), Shelf::default());
        served(&shelf, write_file).await;
        let mut other = cluster_file();
        other.name = "other".into();
        start(other, &others).await.expect("starts").stop().await;
        let theirs = Rc::clone(&others.drives.borrow()["d07"]);
        let ours = shelf.drives.borrow_mut().insert("d03".into(), Rc::clone(&theirs));
        let before = head_and_tail(&theirs).await;
        served(&shelf, read_file).await;
        let (cluster, operator) = operator(&shelf).await;
        let told = status(&operator).await.problems.join("\n");
        for part in [
            "drive d03",
            "drives/d03.img",
            "\"other\"",
            "\"d07\"",
            "not touched",
            "replace d03 --force",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert!(before == head_and_tail(&theirs).await, "not a byte was written");
        cluster.stop().await;
        // More than the arrays bear, they say as of missing drives.
        for drive in ["d00", "d02"] {
            shelf
                .drives
                .borrow_mut()
                .insert(drive.into(), Rc::clone(&others.drives.borrow()[drive]));
        }
        let error = start(cluster_file(), &shelf).await.err().expect("three are too many");
        assert!(error.to_string().contains("d02"), "{error}");
        assert!(before == head_and_tail(&theirs).await, "not a byte was written");
        drop(ours);
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

/// Where the part of an array lies on a drive: the slice's superblock says where its data begins.
async fn metadata_at(drive: &RamDevice) -> u64 {
    let mut found = 0;
    for block in 0..2 {
        let into = levada_base::BufMut::zeroed(4096).into_vec();
        let read = drive.read(MIB + block * 4096, into).await.expect("reads");
        found = found.max(u64::from_le_bytes(read[0][96..104].try_into().expect("8 bytes")));
    }
    MIB + found
}

/// Overwrites the metadata of the drive that is asked first.
async fn spoil_metadata(shelf: &Shelf, first_byte: u64, bytes: u64) {
    let drive = Rc::clone(&shelf.drives.borrow()["d00"]);
    let at = metadata_at(&drive).await + first_byte;
    let noise: Vec<u8> = (0..bytes / 8).flat_map(|_| reactor::random_u64().to_le_bytes()).collect();
    let noise = Buf::copy_of(&noise).into_vec();
    drive.write(at, noise, Durability::Fua).await.expect("spoilt");
}

#[test]
fn one_wrong_copy_of_metadata_is_outvoted() {
    // The target table alone, and all of the key-value stores that the drive holds.
    for (first_byte, bytes) in [(0, 4096), (0, 24 * MIB)] {
        Reactor::simulated(15).block_on(async {
            let shelf = Shelf::default();
            served(&shelf, write_file).await;
            spoil_metadata(&shelf, first_byte, bytes).await;
            let cluster = start(cluster_file(), &shelf).await.expect("starts");
            let stopped = |target: &&levada_node::assembly::Target| {
                matches!(target.service, levada_node::assembly::Service::Stopped { .. })
            };
            assert_eq!(cluster.targets.iter().filter(stopped).count(), 0);
            let members = cluster.arrays[0].array.status().members;
            let repairs: u64 = members.iter().map(|member| member.repairs).sum();
            assert!(repairs > 0, "{first_byte} {bytes}");
            cluster.stop().await;
            served(&shelf, read_file).await;
        });
    }
}

#[test]
fn a_drive_too_small_is_told_before_anything_is_written() {
    Reactor::simulated(16).block_on(async {
        let shelf = Shelf::default();
        for bytes in [0, 4096, 20 * MIB] {
            let small = Rc::new(RamDevice::new("d05", bytes));
            shelf.drives.borrow_mut().insert("d05".into(), small);
            let error = start(cluster_file(), &shelf).await.err().expect("too small");
            let text = error.to_string();
            let size = [Bytes(bytes).to_string(), format!("{bytes} bytes")];
            assert!(text.contains("d05") && size.iter().any(|size| text.contains(size)), "{text}");
            assert!(text.contains("too small") && !text.contains("--force-format"), "{text}");
            assert_eq!(shelf.drives.borrow().len(), 1, "no other drive was made");
        }
    });
}

/// Every label and superblock of a shelf, and the drives that are there.
async fn heads(shelf: &Shelf) -> Vec<(String, Vec<u8>)> {
    let mut heads = Vec::new();
    let drives = shelf.drives.borrow().clone();
    for (name, drive) in drives {
        heads.push((name, head_and_tail(&drive).await));
    }
    heads
}

#[test]
fn a_change_of_what_is_fixed_is_refused_before_a_byte_is_written() {
    Reactor::simulated(19).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        // A drive that is missing while the file is wrong must find its place afterwards.
        shelf.pulled.borrow_mut().push("d11".into());
        let before = heads(&shelf).await;
        type Change = fn(&mut ClusterFile);
        let changes: [(Change, &[&str]); 13] = [
            (
                |file| file.drives.iter_mut().for_each(|drive| drive.size = Some(Bytes::gib(3))),
                &[
                    "size of drives (d00, d01, d02, d03 and 7 more)",
                    "3GiB in the file",
                    "1088MiB on the drives",
                ],
            ),
            (
                |file| file.drives[2].enclosure = "e5".into(),
                &["[[enclosure]]", "(d02)", "e5 in", "e1 on"],
            ),
            (
                |file| file.arrays[0].slice = SliceSize::Percent(20),
                &["[[array]] meta: slice", "[[array]] data: slice", "217MiB in the file"],
            ),
            (
                |file| file.arrays[0].level = Level::Raid1 { copies: 4, spread: Spread::Drive },
                &["[[array]] meta: copies: 4 in the file, 3 on"],
            ),
            (
                |file| file.arrays[1].level = Level::Raid6 { data: 9, chunk: Bytes::kib(128) },
                &["[[array]] data: data: 9 in the file, 8 on"],
            ),
            (
                |file| file.arrays[1].level = Level::Raid6 { data: 8, chunk: Bytes::kib(64) },
                &["[[array]] data: chunk: 64KiB in the file, 128KiB on"],
            ),
            (
                |file| file.arrays[1].level = Level::Raid0 { chunk: Bytes::kib(128) },
                &["[[array]] data: level: raid0 in the file, raid6 on"],
            ),
            (|file| file.arrays[1].spares = 1, &["[[array]] data: spares: 1 in the file, 2 on"]),
            (|file| file.arrays[0].spares = 1, &["[[array]] meta: spares: 1 in the file, 0 on"]),
            (
                |file| {
                    file.arrays[1].drives.pop();
                },
                &["[[array]] data: drives (d11)"],
            ),
            (|file| file.arrays[1].name = "bulk".into(), &["[[array]] bulk", "[[array]] data"]),
            (
                |file| file.filesystems[0].object_targets = 6,
                &["[[filesystem]] fs: object_targets: 6 in the file, 4 on"],
            ),
            (
                |file| file.filesystems[0].name = "other".into(),
                &["[[filesystem]] name: other in the file, fs on"],
            ),
        ];
        for (change, parts) in changes {
            let mut file = cluster_file();
            change(&mut file);
            let error = start(file, &shelf).await.err().expect("refused");
            let is_changed = matches!(error, AssemblyError::Drives(DrivesError::Changed { .. }));
            assert!(is_changed, "{parts:?}: {error}");
            let text = error.to_string();
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert!(before == heads(&shelf).await, "{parts:?}: something was written");
        }
        shelf.pulled.borrow_mut().clear();
        served(&shelf, read_file).await;
        let cluster = start(cluster_file(), &shelf).await.expect("starts");
        assert!(cluster.arrays.iter().all(|array| array.out().is_empty()), "d11 is in its place");
        cluster.stop().await;
    });
}

/// The text of a refusal for a file that says otherwise than the drives.
async fn changed(file: ClusterFile, shelf: &Shelf) -> String {
    let error = start(file, shelf).await.err().expect("refused");
    let is_changed = matches!(error, AssemblyError::Drives(DrivesError::Changed { .. }));
    assert!(is_changed, "{error}");
    error.to_string()
}

#[test]
fn another_name_of_the_cluster_is_no_other_cluster() {
    Reactor::simulated(26).block_on(async {
        let shelf = Shelf::default();
        let cluster = start(cluster_file(), &shelf).await.expect("starts");
        shelf.noted.set(Some(cluster.drives.cluster));
        cluster.stop().await;
        let before = heads(&shelf).await;
        let mut file = cluster_file();
        file.name = "crate".into();
        let told = changed(file.clone(), &shelf).await;
        assert!(told.contains("[cluster] name: crate in the file, box on the drives"), "{told}");
        let others = start_over(file, &shelf, MayOverwrite::Others).await;
        let told = others.err().expect("refused").to_string();
        assert!(told.contains("[cluster] name: crate in the file, box on the drives"), "{told}");
        assert!(before == heads(&shelf).await, "something was written");
        start(cluster_file(), &shelf).await.expect("starts").stop().await;
    });
}

#[test]
fn an_array_whose_drives_are_all_away_says_so_itself() {
    Reactor::simulated(27).block_on(async {
        let shelf = Shelf::default();
        let split = || {
            let mut file = cluster_file();
            let data = file.arrays[0].drives.split_off(6);
            file.arrays[1].drives = data;
            file.arrays[0].slice = SliceSize::Bytes(Bytes::mib(256));
            file.arrays[1].level = Level::Raid6 { data: 4, chunk: Bytes::kib(128) };
            file.arrays[1].spares = 0;
            file
        };
        start(split(), &shelf).await.expect("starts").stop().await;
        for (array, drives) in [("data", 6..12), ("meta", 0..6)] {
            let away: Vec<String> = drives.map(|drive| format!("d{drive:02}")).collect();
            shelf.pulled.replace(away.clone());
            let error = start(split(), &shelf).await.err().expect("refused");
            assert!(matches!(error, AssemblyError::Array(_)), "{error}");
            let told = error.to_string();
            assert!(told.contains(&format!("array {array}")), "{told}");
            assert!(told.contains("bring them back"), "{told}");
            assert!(away.iter().all(|drive| told.contains(drive)), "{told}");
            assert!(!told.contains("--destroy"), "{told}");
        }
        shelf.pulled.take();
        start(split(), &shelf).await.expect("starts").stop().await;
    });
}

#[test]
fn a_drive_that_is_out_gets_another_size_and_enclosure() {
    Reactor::simulated(28).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        let (cluster, first) = operator_with(&shelf, path.clone()).await;
        for drive in ["d03", "d08"] {
            fail(&first, drive, false).await.expect("bears it");
        }
        let mut file = cluster_file();
        for drive in [3, 8] {
            file.drives[drive].size = Some(Bytes::gib(2));
            file.drives[drive].enclosure = "e5".into();
        }
        std::fs::write(&path, file.to_toml()).expect("written");
        let replace = async |operator: &Rc<Operator>, drive: &str| {
            shelf.drives.borrow_mut().remove(drive);
            let request = ControlRequest::DriveReplace { drive: drive.into(), force: false };
            assert_eq!(operator.answer(request).await, ControlReply::Done);
        };
        // One while the other is as it was, and a start in between.
        replace(&first, "d03").await;
        cluster.stop().await;
        let (cluster, second) = operator_of(file.clone(), &shelf, path).await;
        replace(&second, "d08").await;
        for array in &cluster.arrays {
            while array.array.needs_rebuild() {
                array.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
            }
            assert!(array.out().is_empty(), "{:?}", array.out());
        }
        cluster.stop().await;
        // One that is in is compared.
        file.drives[3].enclosure = "e1".into();
        let told = changed(file, &shelf).await;
        assert!(told.contains("[[enclosure]] of drives (d03): e1 in"), "{told}");
    });
}

/// The first was out of the mirror alone when the second looked whether the other array bears it: that
/// one lost both.
#[test]
fn drives_that_are_failed_at_once_stop_no_array() {
    Reactor::simulated(30).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut file = cluster_file();
        file.arrays[0].drives.truncate(6);
        let (cluster, operator) = operator_of(file, &shelf, dir.path().join("levada.toml")).await;
        fail(&operator, "d06", false).await.expect("bears it");
        let orders = ["d00", "d07", "d08"].map(|drive| fail(&operator, drive, false));
        let answers = futures_util::future::join_all(orders).await;
        assert_eq!(answers[0], Ok(()));
        for refused in &answers[1..] {
            let why = refused.as_ref().expect_err("two are out");
            assert!(why.contains("would stop it"), "{why}");
        }
        assert_eq!(status(&operator).await.stopped(), Vec::<String>::new());
        cluster.stop().await;
    });
}

/// The second formatted the drive when the first had given it to an array already.
#[test]
fn a_drive_that_is_replaced_twice_at_once_comes_in_once() {
    Reactor::simulated(31).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(&path, cluster_file().to_toml()).expect("written");
        let (cluster, operator) = operator_with(&shelf, path).await;
        fail(&operator, "d04", false).await.expect("bears it");
        let replace = || {
            let request = ControlRequest::DriveReplace { drive: "d04".into(), force: false };
            operator.answer(request)
        };
        let (first, second) = futures_util::future::join(replace(), replace()).await;
        assert_eq!(first, ControlReply::Done);
        let ControlReply::Failed { why } = second else { panic!("{second:?}") };
        assert!(why.contains("d04 is in use"), "{why}");
        for array in &cluster.arrays {
            while array.array.needs_rebuild() {
                array.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
            }
            assert!(array.out().is_empty(), "{:?}", array.out());
        }
        cluster.stop().await;
        served(&shelf, read_file).await;
    });
}

#[test]
fn a_drive_that_was_replaced_and_comes_back_under_another_path_counts_as_absent() {
    Reactor::simulated(36).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(&path, cluster_file().to_toml()).expect("written");
        let (cluster, asked) = operator_with(&shelf, path).await;
        fail(&asked, "d04", false).await.expect("bears it");
        let earlier = Rc::clone(&shelf.drives.borrow()["d04"]);
        let later = Rc::new(RamDevice::new("d04", earlier.info().capacity_bytes));
        shelf.drives.borrow_mut().insert("d04".into(), Rc::clone(&later));
        let replace = ControlRequest::DriveReplace { drive: "d04".into(), force: false };
        assert_eq!(asked.answer(replace).await, ControlReply::Done);
        for array in &cluster.arrays {
            while array.array.needs_rebuild() {
                array.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
            }
        }
        cluster.stop().await;
        let d05 = Rc::clone(&shelf.drives.borrow()["d05"]);
        let before = head_and_tail(&earlier).await;
        // Behind the later one, and before it.
        for (at_d04, at_d05) in [(&later, &earlier), (&earlier, &later)] {
            shelf.drives.borrow_mut().insert("d04".into(), Rc::clone(at_d04));
            shelf.drives.borrow_mut().insert("d05".into(), Rc::clone(at_d05));
            let (cluster, asked) = operator(&shelf).await;
            let found = |name: &str| {
                let drive = cluster.drives.drives.iter().find(|drive| drive.spec.name == name);
                drive.expect("in the file").found.as_ref().map(|_| ()).map_err(String::clone)
            };
            assert_eq!(found("d04"), Ok(()));
            let told = found("d05").expect_err("its path leads to a d04");
            if Rc::ptr_eq(at_d05, &earlier) {
                for part in ["drives/d05.img", "an earlier d04", "replace d05 --force"] {
                    assert!(told.contains(part), "{part}: {told}");
                }
            }
            assert!(status(&asked).await.problems.join("\n").contains(&told), "{told}");
            cluster.stop().await;
            assert!(before == head_and_tail(&earlier).await, "not a byte was written");
        }
        shelf.drives.borrow_mut().insert("d04".into(), later);
        shelf.drives.borrow_mut().insert("d05".into(), d05);
        served(&shelf, read_file).await;
    });
}

#[test]
fn a_dead_drive_leaves_the_file_when_a_spare_has_replaced_it() {
    Reactor::simulated(29).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        let (cluster, operator) = operator_with(&shelf, path.clone()).await;
        fail(&operator, "d11", false).await.expect("bears it");
        cluster.stop().await;
        let without_dead = |mut file: ClusterFile| {
            for array in &mut file.arrays {
                array.drives.retain(|drive| drive != "d11");
            }
            file.arrays[1].spares -= 1;
            file
        };
        let told = changed(without_dead(cluster_file()), &shelf).await;
        assert!(told.contains("[[array]] meta: drives (d11): not members in"), "{told}");
        assert!(!told.contains("less"), "{told}");
        // Another one takes its role.
        let mut file = cluster_file();
        let mut added = file.drives[0].clone();
        (added.name, added.path) = ("d12".into(), "drives/d12.img".into());
        file.drives.push(added);
        for array in &mut file.arrays {
            array.drives.push("d12".into());
            array.spares += 1;
        }
        std::fs::write(&path, file.to_toml()).expect("written");
        let (cluster, operator) = operator_with(&shelf, path).await;
        let add = ControlRequest::DriveAdd { drive: "d12".into(), force: false };
        assert_eq!(operator.answer(add).await, ControlReply::Done);
        let mirror = &cluster.arrays[0].array;
        mirror.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
        cluster.stop().await;
        let mut file = without_dead(file);
        let told = changed(file.clone(), &shelf).await;
        assert!(told.contains("[[array]] meta: spares: 1 in the file, 0 on the drives"), "{told}");
        file.arrays[0].spares = 0;
        start(file, &shelf).await.expect("starts").stop().await;
    });
}

#[test]
fn what_may_change_may() {
    Reactor::simulated(20).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let mut file = cluster_file();
        file.mounts.clear();
        file.state_dir = "elsewhere".into();
        file.arrays.reverse();
        file.drives[0].path = "elsewhere/d00.img".into();
        file.filesystems[0].stripe_unit = Bytes::mib(2);
        // A drive to be added, and what the arrays will be.
        let mut added = file.drives[0].clone();
        added.name = "d12".into();
        file.drives.push(added);
        for array in &mut file.arrays {
            array.drives.push("d12".into());
            array.spares += 1;
        }
        let cluster = start(file, &shelf).await.expect("starts");
        assert_eq!(cluster.remarks.len(), 1, "{:?}", cluster.remarks);
        for part in ["stripe_unit", "2MiB", "stays 1MiB"] {
            assert!(cluster.remarks[0].contains(part), "{:?}", cluster.remarks);
        }
        cluster.stop().await;
        served(&shelf, read_file).await;
    });
}

#[test]
fn a_file_of_another_size_is_not_taken_for_a_drive() {
    Reactor::simulated(21).block_on(async {
        let shelf = Shelf::default();
        let large = Rc::new(RamDevice::new("d05", 5 << 30));
        shelf.drives.borrow_mut().insert("d05".into(), large);
        let text = start(cluster_file(), &shelf).await.err().expect("refused").to_string();
        for part in ["d05", "5GiB", "1088MiB"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(shelf.drives.borrow().len(), 1, "no other drive was made");
    });
}

#[test]
fn a_drive_is_added_when_the_file_says_what_there_will_be() {
    Reactor::simulated(22).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        let (cluster, operator) = operator_with(&shelf, path.clone()).await;
        let mut file = cluster_file();
        let mut added = file.drives[11].clone();
        (added.name, added.path) = ("d12".into(), "drives/d12.img".into());
        file.drives.push(added);
        file.arrays.iter_mut().for_each(|array| array.drives.push("d12".into()));
        let add = || ControlRequest::DriveAdd { drive: "d12".into(), force: false };
        file.arrays[0].spares = 1;
        std::fs::write(&path, file.to_toml()).expect("written");
        let ControlReply::Failed { why } = operator.answer(add()).await else {
            panic!("two spares are not three");
        };
        assert!(why.contains("[[array]] data: spares: 2 in the file, 3 on"), "{why}");
        file.arrays[1].spares = 3;
        std::fs::write(&path, file.to_toml()).expect("written");
        // What is not blank is refused, and the refusal names the command that was given.
        let foreign = Rc::new(RamDevice::new("d12", file.drives[12].size.expect("a file").0));
        let put_foreign = async || {
            let bytes = Buf::copy_of(&[7; 4096]).into_vec();
            foreign.write(0, bytes, Durability::Fua).await.expect("written");
            shelf.drives.borrow_mut().insert("d12".into(), Rc::clone(&foreign));
        };
        put_foreign().await;
        let ControlReply::Failed { why } = operator.answer(add()).await else { panic!("in use") };
        assert!(why.contains("`levada drive add d12 --force`"), "{why}");
        // Of an order that was killed while it made the file.
        shelf.empty.borrow_mut().push("d12".into());
        assert_eq!(operator.answer(add()).await, ControlReply::Done);
        fail(&operator, "d12", false).await.expect("a spare");
        put_foreign().await;
        let replace =
            |force| operator.answer(ControlRequest::DriveReplace { drive: "d12".into(), force });
        let ControlReply::Failed { why } = replace(false).await else { panic!("in use") };
        assert!(why.contains("`levada drive replace d12 --force`"), "{why}");
        assert_eq!(replace(true).await, ControlReply::Done);
        fail(&operator, "d12", false).await.expect("a spare");
        shelf.empty.borrow_mut().push("d12".into());
        assert_eq!(replace(false).await, ControlReply::Done);
        cluster.stop().await;
        start(file, &shelf).await.expect("starts with the same file").stop().await;
    });
}

/// A cluster file with one drive more, a spare of both arrays.
fn with_d12() -> ClusterFile {
    let mut file = cluster_file();
    let mut added = file.drives[11].clone();
    (added.name, added.path) = ("d12".into(), "drives/d12.img".into());
    file.drives.push(added);
    for array in &mut file.arrays {
        array.drives.push("d12".into());
        array.spares += 1;
    }
    file
}

/// Neither `add` nor `replace` would have it again, and nobody was told that arrays are without it.
#[test]
fn a_drive_that_was_not_taken_to_the_end_is_told_and_completed() {
    for (seed, taken_by) in [(33, 0), (34, 1)] {
        for order in ["add", "replace"] {
            Reactor::simulated(seed).block_on(async {
                let shelf = Rc::new(Shelf::default());
                served(&shelf, write_file).await;
                let dir = tempfile::tempdir().expect("a temporary directory");
                let path = dir.path().join("levada.toml");
                let file = with_d12();
                std::fs::write(&path, file.to_toml()).expect("written");
                let cluster = start(cluster_file(), &shelf).await.expect("starts");
                // What an order does before it is killed.
                let spec = &file.drives[12];
                let device = shelf.create(spec).await.expect("made");
                let drive =
                    format_one(&file, spec, device, &cluster.drives, Intake::Add, false).await;
                let drive = drive.expect("blank");
                for array in &cluster.arrays[..taken_by] {
                    array.admit(&file, "d12", &drive).await.expect("room enough");
                }
                cluster.stop().await;
                let (cluster, operator) = operator_of(file.clone(), &shelf, path).await;
                let told = status(&operator).await.problems.join("\n");
                for part in ["drive d12", "data", "`levada drive add d12`"] {
                    assert!(told.contains(part), "{part}: {told}");
                }
                let (drive, force) = ("d12".to_owned(), false);
                let request = match order {
                    "add" => ControlRequest::DriveAdd { drive, force },
                    _ => ControlRequest::DriveReplace { drive, force },
                };
                assert_eq!(operator.answer(request.clone()).await, ControlReply::Done);
                assert!(cluster.arrays.iter().all(|array| array.member_on("d12").is_some()));
                assert_eq!(status(&operator).await.problems, Vec::<String>::new());
                let again = operator.answer(request).await;
                assert!(matches!(again, ControlReply::Failed { .. }), "{again:?}");
                cluster.stop().await;
                start(file, &shelf).await.expect("starts").stop().await;
            });
        }
    }
}

/// It was called in use, because the file that the node started with had it.
#[test]
fn a_drive_that_was_written_into_the_file_before_a_start_is_added() {
    Reactor::simulated(36).block_on(async {
        let shelf = Rc::new(Shelf::default());
        start(cluster_file(), &shelf).await.expect("starts").stop().await;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(&path, with_d12().to_toml()).expect("written");
        let (cluster, operator) = operator_of(with_d12(), &shelf, path).await;
        let add = |drive: &str| {
            operator.answer(ControlRequest::DriveAdd { drive: drive.into(), force: false })
        };
        let ControlReply::Failed { why } = add("d03").await else { panic!("it serves") };
        assert!(why.contains("d03 is in use"), "{why}");
        assert_eq!(add("d12").await, ControlReply::Done);
        assert!(cluster.arrays.iter().all(|array| array.member_on("d12").is_some()));
        cluster.stop().await;
    });
}

/// It came into one array, was too small for the next, and was then in its own way.
#[test]
fn a_drive_too_small_for_one_array_comes_into_none() {
    Reactor::simulated(35).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        let (cluster, operator) = operator_with(&shelf, path.clone()).await;
        let add = async |file: &ClusterFile| {
            std::fs::write(&path, file.to_toml()).expect("written");
            operator.answer(ControlRequest::DriveAdd { drive: "d12".into(), force: false }).await
        };
        let members = || cluster.arrays.iter().map(|array| array.array.status().members.len());
        let before: Vec<_> = members().collect();
        let size = cluster_file().drives[0].size.expect("files");
        let mut file = with_d12();
        // The mirror's slice has a fixed size, and the other array gets the rest.
        for bytes in [Bytes(size.0 / 2), Bytes(size.0 - MIB)] {
            file.drives[12].size = Some(bytes);
            let ControlReply::Failed { why } = add(&file).await else { panic!("{bytes} will do") };
            for part in ["drive d12", "array", "needed", "nothing was changed"] {
                assert!(why.contains(part), "{part}: {why}");
            }
            assert!(!shelf.drives.borrow().contains_key("d12"), "nothing was made");
            assert!(members().eq(before.iter().copied()), "no array took it");
        }
        file.drives[12].size = Some(size);
        assert_eq!(add(&file).await, ControlReply::Done);
        cluster.stop().await;
        start(file, &shelf).await.expect("starts").stop().await;
    });
}

/// An operator of a running cluster.
async fn operator(shelf: &Rc<Shelf>) -> (Rc<Cluster>, Rc<Operator>) {
    operator_with(shelf, std::path::PathBuf::from("box/levada.toml")).await
}

/// An operator that reads `file` again when drives change.
async fn operator_with(shelf: &Rc<Shelf>, file: std::path::PathBuf) -> (Rc<Cluster>, Rc<Operator>) {
    operator_of(cluster_file(), shelf, file).await
}

/// An operator of a cluster that was started with `text`, and that reads `file` afterwards.
async fn operator_of(
    text: ClusterFile,
    shelf: &Rc<Shelf>,
    file: std::path::PathBuf,
) -> (Rc<Cluster>, Rc<Operator>) {
    let cluster = Rc::new(start(text, shelf).await.expect("starts"));
    let source = Rc::clone(shelf) as Rc<dyn DriveSource>;
    let changed = Rc::default();
    (Rc::clone(&cluster), Operator::new(cluster, source, file, ADDRESS.to_owned(), changed))
}

async fn status(operator: &Rc<Operator>) -> levada_node::control::Status {
    match operator.answer(ControlRequest::Status).await {
        ControlReply::Status(status) => *status,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_target_that_stops_is_not_called_healthy() {
    Reactor::simulated(17).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let (cluster, operator) = operator(&shelf).await;
        assert_eq!(status(&operator).await.stopped_metadata(), None);
        let store = cluster.targets[0].store.clone().expect("it serves");
        store.close().await.expect("closed");
        let told = status(&operator).await;
        assert_eq!(told.targets[0].state, "stopped");
        let problem = told.stopped_metadata().expect("a problem");
        assert!(problem.contains("mdt0 has stopped"), "{problem}");
    });
}

async fn fail(operator: &Rc<Operator>, drive: &str, force: bool) -> Result<(), String> {
    match operator.answer(ControlRequest::DriveFail { drive: drive.into(), force }).await {
        ControlReply::Done => Ok(()),
        ControlReply::Failed { why } => Err(why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_third_drive_is_failed_only_by_force_and_status_says_what_helps() {
    Reactor::simulated(17).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let (cluster, operator) = operator(&shelf).await;
        assert_eq!(status(&operator).await.problems, Vec::<String>::new());
        let why = fail(&operator, "d99", false).await.expect_err("no such drive");
        assert!(why.contains("d99") && why.contains("d11"), "{why}");
        fail(&operator, "d00", false).await.expect("bears one");
        fail(&operator, "d02", false).await.expect("bears two");
        let why = fail(&operator, "d04", false).await.expect_err("a third is refused");
        for part in ["meta", "d00", "d02", "d04", "--force"] {
            assert!(why.contains(part), "{why}");
        }
        let now = status(&operator).await;
        assert!(now.stopped().is_empty(), "{:?}", now.problems);
        assert!(now.survives.iter().any(|line| line.contains("no further loss")), "{now:?}");
        let why = fail(&operator, "d04", true).await.expect_err("no array goes on without it");
        for part in ["d04 takes no more I/O", "array meta (its data is not elsewhere)", "levada up"]
        {
            assert!(why.contains(part), "{why}");
        }
        let mirror = &cluster.arrays[0].array;
        // Whoever asks for what only they hold finds the array stopped.
        for at in (0..64).map(|extent| extent * MIB) {
            let into = levada_base::BufMut::zeroed(4096).into_vec();
            if mirror.read(at, into).await.is_err() {
                break;
            }
        }
        let stopped = status(&operator).await.stopped();
        assert!(!stopped.is_empty());
        for drive in ["d00", "d02", "d04", "levada up"] {
            assert!(stopped.iter().any(|line| line.contains(drive)), "{stopped:?}");
        }
    });
}

#[test]
fn a_drive_out_of_one_array_goes_back_by_the_command_that_status_names() {
    Reactor::simulated(23).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(&path, cluster_file().to_toml()).expect("written");
        let (cluster, operator) = operator_with(&shelf, path).await;
        let (mirror, data) = (&cluster.arrays[0], &cluster.arrays[1]);
        let replace = || ControlRequest::DriveReplace { drive: "d04".into(), force: false };
        let refused = operator.answer(replace()).await;
        assert!(matches!(refused, ControlReply::Failed { .. }), "it serves both: {refused:?}");
        mirror.array.fail(mirror.member_on("d04").expect("a member")).await.expect("out");
        let told = status(&operator).await.problems.join("\n");
        assert!(told.contains("`levada drive replace d04`"), "{told}");
        let uuid = |array: &levada_node::arrays::ClusterArray| {
            array.array.status().members[array.member_on("d04").expect("a member")].uuid
        };
        let before = uuid(data);
        assert_eq!(operator.answer(replace()).await, ControlReply::Done);
        assert!(mirror.array.needs_rebuild());
        mirror.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
        assert!(mirror.out().is_empty() && data.out().is_empty());
        assert_eq!(uuid(data), before, "the other array kept it");
        assert_eq!(status(&operator).await.problems, Vec::<String>::new());
        cluster.stop().await;
        served(&shelf, read_file).await;
    });
}

/// It was rebuilt onto the file that was removed, and blank at the next start.
#[test]
fn nothing_is_rebuilt_onto_a_drive_that_is_not_in_its_place() {
    Reactor::simulated(32).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(&path, cluster_file().to_toml()).expect("written");
        let (cluster, operator) = operator_with(&shelf, path).await;
        let mirror = &cluster.arrays[0];
        mirror.array.fail(mirror.member_on("d04").expect("a member")).await.expect("out");
        shelf.hidden.borrow_mut().push("d04".into());
        let now = status(&operator).await;
        let gone = now.gone_next_time();
        assert!(gone.len() == 1 && gone[0].contains("`levada drive fail d04`"), "{gone:?}");
        let replace = async || {
            let request = ControlRequest::DriveReplace { drive: "d04".into(), force: false };
            operator.answer(request).await
        };
        let ControlReply::Failed { why } = replace().await else { panic!("it is not there") };
        assert!(why.contains("drives/d04.img") && why.contains("`levada drive fail d04`"), "{why}");
        fail(&operator, "d04", false).await.expect("bears it");
        let ControlReply::Failed { why } = replace().await else { panic!("nothing is there") };
        assert!(why.contains("it is a directory"), "{why}");
        assert!(cluster.arrays.iter().all(|array| array.is_without("d04")));
        // Another one is put there.
        shelf.hidden.take();
        let old = shelf.drives.borrow_mut().remove("d04").expect("there was one");
        let before = head_and_tail(&old).await;
        assert_eq!(replace().await, ControlReply::Done);
        assert!(before == head_and_tail(&old).await, "the old one is left alone");
        for array in &cluster.arrays {
            while array.array.needs_rebuild() {
                array.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
            }
        }
        assert_eq!(status(&operator).await.problems, Vec::<String>::new());
        cluster.stop().await;
        served(&shelf, read_file).await;
    });
}

#[test]
fn a_drive_whose_place_a_spare_took_is_not_forgotten_over_a_restart() {
    Reactor::simulated(26).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let cluster = start(cluster_file(), &shelf).await.expect("starts");
        let data = &cluster.arrays[1];
        data.array.fail(data.member_on("d04").expect("a member")).await.expect("out");
        data.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
        cluster.stop().await;
        let (cluster, operator) = operator(&shelf).await;
        let told = status(&operator).await.problems.join("\n");
        for part in ["drive d04", "out of data", "`levada drive replace d04`"] {
            assert!(told.contains(part), "{part}: {told}");
        }
        cluster.stop().await;
    });
}

#[test]
fn too_small_a_geometry_is_told_before_the_first_drive_is_made() {
    Reactor::simulated(24).block_on(async {
        let shelf = Shelf::default();
        let with = |change: &dyn Fn(&mut ClusterFile)| {
            let mut file = cluster_file();
            change(&mut file);
            file
        };
        let refused = async |file: ClusterFile, parts: &[&str]| {
            let text = start(file, &shelf).await.err().expect("too small").to_string();
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert!(shelf.drives.borrow().is_empty(), "no drive was made");
            text
        };
        // One MiB more is enough, by what the message says.
        let meta = |mib| {
            move |file: &mut ClusterFile| file.arrays[0].slice = SliceSize::Bytes(Bytes::mib(mib))
        };
        let text = refused(with(&meta(40)), &["array meta", "40MiB", "5 targets"]).await;
        let needed = text.split("at least ").nth(1).and_then(|rest| rest.split("MiB").next());
        let needed: u64 = needed.and_then(|mib| mib.parse().ok()).expect("whole MiB");
        assert_eq!(needed, 52, "as docs/cluster-file.md shows it");
        refused(with(&meta(needed - 1)), &["array meta"]).await;
        refused(
            with(&|file| {
                file.arrays[0].slice = SliceSize::Rest;
                file.arrays[1].slice = SliceSize::Bytes(Bytes::mib(100));
            }),
            &["array data", "100MiB", "4 object targets"],
        )
        .await;
        refused(
            with(&|file| file.arrays[1].slice = SliceSize::Bytes(Bytes::mib(1))),
            &["array data", "1MiB", "at least 3MiB", "the array itself"],
        )
        .await;
        refused(with(&|file| file.filesystems[0].object_targets = 200), &["fs", "201", "99"]).await;
        start(with(&meta(needed)), &shelf).await.expect("room enough").stop().await;
    });
}

#[test]
fn a_scrub_says_what_it_did_not_check() {
    Reactor::simulated(24).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        let (cluster, operator) = operator(&shelf).await;
        let scrubbed = async || {
            assert_eq!(operator.answer(ControlRequest::Scrub).await, ControlReply::Done);
            loop {
                reactor::sleep(std::time::Duration::from_millis(100)).await;
                let arrays = status(&operator).await.arrays;
                if arrays.iter().all(|array| array.last_scrub.is_some()) {
                    break arrays.into_iter().filter_map(|array| array.last_scrub);
                }
            }
        };
        assert!(scrubbed().await.all(|result| result.not_checked.is_empty()));
        let target = cluster.targets.iter().find(|target| target.entry.name() == "ost2");
        let store = target.and_then(|target| target.store.clone()).expect("it serves");
        store.close().await.expect("closed");
        let told: Vec<_> = scrubbed().await.flat_map(|result| result.not_checked).collect();
        // What holds objects that nobody looked at is left alone: it might take rot for the truth.
        assert!(told.len() == 2 && told[0].contains("ost2"), "{told:?}");
        assert!(told[1].starts_with("array data"), "{told:?}");
        // More members lost than the mirror bears.
        for drive in ["d00", "d02", "d04", "d06"] {
            let _ = fail(&operator, drive, true).await;
        }
        let told: Vec<_> = scrubbed().await.flat_map(|result| result.not_checked).collect();
        assert!(told.iter().any(|line| line.starts_with("array ")), "{told:?}");
    });
}

/// Takes a directory's name away: its row and the entry of the listing.
async fn lose_a_name(shelf: &Shelf) {
    let cluster = start(cluster_file(), shelf).await.expect("starts");
    let store = cluster.targets[0].store.clone().expect("it serves");
    let key = [&b"N"[..], &1u64.to_be_bytes(), b"data"].concat();
    assert!(store.get(&key).await.expect("reads").is_some());
    let mut batch = Batch::default();
    batch.delete(&key);
    store.durable(store.apply(batch).expect("room")).await.expect("durable");
    cluster.stop().await;
}

const CHECK: FsckOptions<'_> = FsckOptions {
    memory_bytes: MIB,
    repair: false,
    reattach: false,
    deep: true,
    data: false,
    says: &|_| {},
    progress: &|_, _| {},
};

async fn checked(shelf: &Shelf) -> Result<Vec<TargetReport>, AssemblyError> {
    fsck::offline(&cluster_file(), shelf, &CHECK).await
}

/// What a check with --repair says.
async fn repaired(shelf: &Shelf) -> Vec<TargetReport> {
    let options = FsckOptions { repair: true, ..CHECK };
    fsck::offline(&cluster_file(), shelf, &options).await.expect("checked")
}

/// The sorts of what was found, and what became of each.
fn found(reports: &[TargetReport]) -> Vec<(String, String)> {
    let items = reports.iter().flat_map(|report| &report.items);
    items.map(|item| (item.find.clone(), item.done.clone())).collect()
}

/// Changes rows of a target's store; `change` gets a key and may change the value, or take it away.
async fn change_rows(
    shelf: &Shelf,
    target: &str,
    change: impl Fn(&[u8], Vec<u8>) -> Option<Vec<u8>>,
) {
    let cluster = start(cluster_file(), shelf).await.expect("starts");
    let target = cluster.targets.iter().find(|found| found.entry.name() == target);
    let store = target.and_then(|target| target.store.clone()).expect("it serves");
    let rows = store.scan(std::ops::Bound::Unbounded, std::ops::Bound::Unbounded, 9999).await;
    let mut batch = Batch::default();
    for (key, value) in rows.expect("reads") {
        match change(&key, value.to_vec()) {
            Some(changed) if changed != value[..] => batch.put(&key, &changed),
            Some(_) => {}
            None => batch.delete(&key),
        }
    }
    assert!(!batch.changes.is_empty(), "that changes nothing");
    store.durable(store.apply(batch).expect("room")).await.expect("durable");
    cluster.stop().await;
}

/// The object target that holds the file's object; a file of a few bytes has one.
async fn target_of_the_object(shelf: &Shelf) -> String {
    let reports = checked(shelf).await.expect("checked");
    reports.iter().find(|report| report.objects > 0).expect("one has").target.clone()
}

#[test]
fn objects_are_held_against_files_and_repaired() {
    Reactor::simulated(28).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let is_inode = |key: &[u8]| key[0] == b'I' && key[8] == 2;
        let clean = async || {
            assert_eq!(found(&repaired(&shelf).await), [], "a second run finds nothing");
            assert_eq!(Sum::of(&checked(&shelf).await.expect("checked")).exit_code(), 0);
        };

        // The file does not know of its object: components, at 96 of its row.
        change_rows(&shelf, "mdt0", |key, mut row| {
            if is_inode(key) {
                row[96..104].fill(0);
            }
            Some(row)
        })
        .await;
        let told = checked(&shelf).await.expect("checked");
        assert!(found(&told).iter().all(|item| *item == ("unlisted-object".into(), "left".into())));
        assert_eq!(Sum::of(&told).exit_code(), 4, "{told:?}");
        let reports = repaired(&shelf).await;
        assert_eq!(Sum::of(&reports).exit_code(), 1, "{reports:?}");
        let items = reports.iter().flat_map(|report| &report.items);
        assert!(items.into_iter().all(|item| item.path.as_deref() == Some("/data")), "{reports:?}");
        clean().await;
    });
}

#[test]
fn sums_of_an_index_are_repaired_before_a_log_decides_by_them() {
    Reactor::simulated(29).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let ost = target_of_the_object(&shelf).await;
        change_rows(&shelf, &ost, |key, mut row| {
            if key == b"M" {
                row[72] ^= 0x40;
            }
            Some(row)
        })
        .await;
        let told = checked(&shelf).await.expect("checked");
        assert_eq!(found(&told), [("index-sum".to_owned(), "left".to_owned())], "{told:?}");
        let reports = repaired(&shelf).await;
        assert_eq!(found(&reports), [("index-sum".to_owned(), "repaired".to_owned())]);
        assert_eq!(Sum::of(&reports).exit_code(), 1);
        assert_eq!(found(&repaired(&shelf).await), []);
        served(&shelf, read_file).await;
    });
}

#[test]
fn an_object_of_no_file_is_deleted_only_when_all_metadata_is_sound() {
    Reactor::simulated(30).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        // The inode is lost, with its names: as if it had never been.
        change_rows(&shelf, "mdt0", |key, row| {
            let is_name = key.ends_with(b"data") && key[0] == b'N' || key[0] == b'D';
            (!(is_name || key[0] == b'I' && key[8] == 2)).then_some(row)
        })
        .await;
        let told = checked(&shelf).await.expect("checked");
        let strays = |reports: &[TargetReport], done: &str| {
            found(reports)
                .iter()
                .filter(|item| **item == ("stray-object".into(), done.into()))
                .count()
        };
        let count = strays(&told, "left");
        assert!(count > 0 && Sum::of(&told).exit_code() == 4, "{told:?}");
        let reports = repaired(&shelf).await;
        assert_eq!(strays(&reports, "repaired"), count, "{reports:?}");
        assert_eq!(Sum::of(&reports).exit_code(), 1, "{reports:?}");
        assert_eq!(found(&repaired(&shelf).await), []);
        let reports = checked(&shelf).await.expect("checked");
        assert_eq!(reports.iter().map(|report| report.objects).sum::<u64>(), 0);
    });
}

#[test]
fn nothing_is_repaired_where_the_metadata_is_older_than_the_objects() {
    Reactor::simulated(31).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        // As of before the file was made, but for a count that is wrong too.
        change_rows(&shelf, "mdt0", |key, mut row| {
            let is_name = key.ends_with(b"data") && key[0] == b'N' || key[0] == b'D';
            if key == b"M\x01" {
                row[1..9].copy_from_slice(&2_u64.to_le_bytes());
            }
            (!(is_name || key[0] == b'I' && key[8] == 2)).then_some(row)
        })
        .await;
        let reports = repaired(&shelf).await;
        let told = found(&reports);
        assert!(told.contains(&("newer-object".into(), "left".into())), "{reports:?}");
        assert!(told.iter().all(|(_, done)| done == "left"), "{reports:?}");
        assert!(reports[0].refused[0].contains("older"), "{reports:?}");
        assert_eq!(Sum::of(&reports).exit_code(), 4);
    });
}

#[test]
fn what_is_lost_of_a_file_is_told_with_its_path() {
    Reactor::simulated(32).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let ost = target_of_the_object(&shelf).await;
        change_rows(&shelf, &ost, |key, row| (key[0] != b'O').then_some(row)).await;
        let reports = repaired(&shelf).await;
        let missing = reports.iter().flat_map(|report| &report.items);
        let missing = missing.into_iter().find(|item| item.find == "missing-object");
        let missing = missing.unwrap_or_else(|| panic!("{reports:?}"));
        assert_eq!((missing.path.as_deref(), &*missing.target), (Some("/data"), &*ost));
        assert_eq!(Sum::of(&reports).exit_code() & 4, 4);
    });
}

#[test]
fn a_check_of_a_cluster_that_is_down_finds_what_is_wrong_and_leaves_it() {
    Reactor::simulated(25).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let reports = checked(&shelf).await.expect("checked");
        let clean = &reports[0];
        assert_eq!((clean.target.as_str(), clean.inodes, clean.names), ("mdt0", 2, 1));
        assert_eq!((Sum::of(&reports).found, Sum::of(&reports).exit_code()), (0, 0), "{reports:?}");
        assert!(reports.len() > 1 && Sum::of(&reports).objects > 0, "{reports:?}");
        lose_a_name(&shelf).await;
        for _ in 0..2 {
            let reports = checked(&shelf).await.expect("checked");
            let [item] = &reports[0].items[..] else { panic!("{reports:?}") };
            assert_eq!((item.find.as_str(), item.path.as_deref()), ("entry", Some("/data")));
            assert_eq!(Sum::of(&reports).exit_code(), 4);
        }
        // With an enclosure away it finds the same; with all of them there is nothing to check.
        for drive in ["d00", "d01"] {
            shelf.pulled.borrow_mut().push(drive.into());
        }
        assert_eq!(checked(&shelf).await.expect("checked")[0].found, 1);
        for n in 2..12 {
            shelf.pulled.borrow_mut().push(format!("d{n:02}"));
        }
        let error = checked(&shelf).await.expect_err("no drive is there").to_string();
        assert!(error.contains("levada up"), "{error}");
    });
}

#[test]
fn a_check_makes_no_cluster() {
    Reactor::simulated(26).block_on(async {
        let shelf = Shelf::default();
        let error = checked(&shelf).await.expect_err("there is none").to_string();
        assert!(error.contains("nothing was changed") && error.contains("levada up"), "{error}");
        assert!(shelf.drives.borrow().is_empty(), "no drive was made");
        let source: &dyn DriveSource = &shelf;
        for spec in &cluster_file().drives {
            source.create(spec).await.expect("made");
        }
        let before = heads(&shelf).await;
        checked(&shelf).await.expect_err("blank drives are no cluster");
        assert!(heads(&shelf).await == before, "nothing was written");
    });
}

#[test]
fn a_running_node_is_checked_and_metered() {
    Reactor::simulated(27).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        lose_a_name(&shelf).await;
        let (cluster, operator) = operator(&shelf).await;
        let state = async |from| match operator.answer(ControlRequest::FsckState { from }).await {
            ControlReply::Fsck(state) => *state,
            other => panic!("{other:?}"),
        };
        let refused = operator.answer(ControlRequest::FsckStop).await;
        assert!(matches!(refused, ControlReply::Failed { .. }), "none runs");
        let order = ControlRequest::Fsck { memory_bytes: MIB, fast: false };
        assert_eq!(operator.answer(order.clone()).await, ControlReply::FsckStarted { number: 1 });
        let again = operator.answer(order.clone()).await;
        assert!(
            matches!(&again, ControlReply::Failed { why } if why.contains("--stop")),
            "{again:?}"
        );
        while !state(0).await.ended {
            reactor::sleep(std::time::Duration::from_millis(10)).await;
        }
        let told = state(0).await;
        let [item] = &told.items[..] else { panic!("{told:?}") };
        assert_eq!((item.find.as_str(), item.path.as_deref()), ("entry", Some("/data")));
        assert_eq!((told.reports.len(), told.reports[0].found), (1, 1));
        assert_eq!(state(1).await.items, []);
        assert_eq!(operator.answer(order).await, ControlReply::FsckStarted { number: 2 });
        assert_eq!(operator.answer(ControlRequest::FsckStop).await, ControlReply::Done);
        let stopped = state(0).await;
        assert!(stopped.ended, "{stopped:?}");

        let meters = match operator.answer(ControlRequest::Meters).await {
            ControlReply::Meters(meters) => *meters,
            other => panic!("{other:?}"),
        };
        assert_eq!(meters.targets.len(), cluster.targets.len());
        assert_eq!(meters.targets[0].status.name, "mdt0");
        assert!(
            meters.drives.iter().any(|drive| drive.bytes_read > 0 && !drive.latency.is_empty())
        );
        let text = serde_json::to_string(&meters).expect("plain data");
        let back: levada_node::meters::Meters = serde_json::from_str(&text).expect("own text");
        assert_eq!(back, meters);
        cluster.stop().await;
    });
}

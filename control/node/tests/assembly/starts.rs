//! Starts, restarts, and what stands in their way.

use crate::shelf::{Shelf, cluster_file, read_file, served, start, write_file};
use levada_base::Buf;
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_device::{Device, Durability, RamDevice};
use levada_node::assembly::AssemblyError;
use levada_spec::{Bytes, ClusterFile, Level, ParityKind, SliceSize};
use std::rc::Rc;

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

#[test]
fn an_array_whose_drives_are_all_away_says_so_itself() {
    Reactor::simulated(27).block_on(async {
        let shelf = Shelf::default();
        let split = || {
            let mut file = cluster_file();
            let data = file.arrays[0].drives.split_off(6);
            file.arrays[1].drives = data;
            file.arrays[0].slice = SliceSize::Bytes(Bytes::mib(256));
            file.arrays[1].level =
                Level::Parity { kind: ParityKind::Raid6, data: 4, chunk: Bytes::kib(128) };
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

//! Whose drives these are, and what the cluster file may say otherwise.

use crate::shelf::{
    Shelf, changed, cluster_file, head_and_tail, heads, operator, read_file, served, served_as,
    start, start_over, status, write_file,
};
use futures_util::future::{join_all, ready};
use levada_base::ids::Uuid;
use levada_base::reactor::Reactor;
use levada_base::{Buf, Epoch};
use levada_device::{
    Device, Drive, DriveIdentity, Durability, Faults, Overwrite, RamDevice, read_label,
};
use levada_node::assembly::AssemblyError;
use levada_node::drives::{DrivesError, Intake, MayOverwrite, format_one};
use levada_spec::{Bytes, ClusterFile, DriveSpec, Level, ParityKind, SliceSize, Spread};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

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
                |file| {
                    file.arrays[1].level =
                        Level::Parity { kind: ParityKind::Raid6, data: 9, chunk: Bytes::kib(128) }
                },
                &["[[array]] data: data: 9 in the file, 8 on"],
            ),
            (
                |file| {
                    file.arrays[1].level =
                        Level::Parity { kind: ParityKind::Raid6, data: 8, chunk: Bytes::kib(64) }
                },
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

/// Nothing on the drives says to whom they belong, and somebody may be writing there.
#[test]
fn what_others_have_is_overwritten_only_once_they_are_shut_out() {
    Reactor::simulated(33).block_on(async {
        let shelf = Shelf::default();
        let theirs = |drive: &DriveSpec| {
            let made = RamDevice::new(&drive.name, drive.size.expect("a file").0);
            (drive.name.clone(), Rc::new(made))
        };
        shelf.drives.replace(cluster_file().drives.iter().map(theirs).collect());
        let first = Rc::clone(&shelf.drives.borrow()["d00"]);
        let written = first.write(0, Buf::copy_of(&[7; 4096]).into_vec(), Durability::Fua).await;
        written.expect("theirs");
        let (asked, goes_well) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        let (count, ends) = (Rc::clone(&asked), Rc::clone(&goes_well));
        *shelf.power_fence.borrow_mut() = Some(Box::new(move |last| {
            assert_eq!(last, Epoch::default(), "nobody who is known");
            count.set(count.get() + 1);
            Box::pin(ready(ends.get()))
        }));
        let before = head_and_tail(&first).await;
        // Whom it would refuse anyway it leaves their power.
        let error = start(cluster_file(), &shelf).await.err().expect("it is in use");
        assert!(matches!(error, AssemblyError::Drives(DrivesError::InUse { .. })), "{error}");
        assert_eq!(asked.get(), 0);
        let over = async || start_over(cluster_file(), &shelf, MayOverwrite::Others).await;
        let error = over().await.err().expect("others may write");
        assert!(matches!(error, AssemblyError::Drives(DrivesError::PowerFence(_))), "{error}");
        assert!(
            asked.get() == 1 && before == head_and_tail(&first).await,
            "not a byte was written"
        );
        goes_well.set(true);
        over().await.expect("nobody writes").stop().await;
        assert_eq!(asked.get(), 2);

        // Until its power goes, another server makes a cluster there.
        let theirs = shelf.drives.take().into_keys().map(|name| {
            let size = cluster_file().drives[0].size.expect("a file").0;
            let drive = Rc::new(RamDevice::new(&name, size));
            (name, drive)
        });
        shelf.drives.replace(theirs.collect());
        let first = Rc::clone(&shelf.drives.borrow()["d00"]);
        let written = first.write(0, Buf::copy_of(&[7; 4096]).into_vec(), Durability::Fua).await;
        written.expect("theirs");
        let other = Rc::new(Shelf { drives: shelf.drives.clone(), ..Shelf::default() });
        *shelf.power_fence.borrow_mut() = Some(Box::new(move |_| {
            let other = Rc::clone(&other);
            Box::pin(async move {
                let mut file = cluster_file();
                file.name = "quicker".into();
                let cluster = start_over(file, &other, MayOverwrite::Others).await;
                cluster.expect("made").stop().await;
                true
            })
        }));
        let error = over().await.err().expect("it is another's").to_string();
        assert!(error.contains("made, or took over, cluster quicker on these drives"), "{error}");
        let label = read_label(&*first).await.expect("theirs");
        assert_eq!(label.cluster_name, "quicker");
    });
}

/// Two `up` of one new cluster, of which one waits for a drive that is slow to answer.
#[test]
fn what_another_server_has_made_while_drives_were_looked_at_is_not_overwritten() {
    Reactor::simulated(35).block_on(async {
        let blank = || {
            let new = cluster_file().drives.into_iter().map(|spec| {
                let drive = RamDevice::new(&spec.name, spec.size.expect("a file").0);
                (spec.name, Rc::new(drive))
            });
            Shelf { drives: RefCell::new(new.collect()), ..Shelf::default() }
        };
        for (quick, may_overwrite) in
            [("box", MayOverwrite::Nothing), ("quicker", MayOverwrite::Others)]
        {
            let shelf = blank();
            let other = Shelf { drives: shelf.drives.clone(), ..Shelf::default() };
            *shelf.meanwhile.borrow_mut() = Some(Box::pin(async move {
                let file = ClusterFile { name: quick.into(), ..cluster_file() };
                served_as(file, &other, write_file).await;
            }));
            let error = start_over(cluster_file(), &shelf, may_overwrite).await.err();
            let error = error.expect("it was made by then");
            let is_later =
                matches!(error, AssemblyError::Drives(DrivesError::MadeMeanwhile { .. }));
            assert!(is_later, "{error}");
            let file = ClusterFile { name: quick.into(), ..cluster_file() };
            served_as(file, &shelf, read_file).await;
        }
    });
}

/// An order for one drive, which keeps nobody out by itself.
#[test]
fn a_drive_is_overwritten_by_force_only_once_others_are_shut_out() {
    Reactor::simulated(34).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let cluster = start(cluster_file(), &shelf).await.expect("starts");
        let (asked, goes_well) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        let (count, ends) = (Rc::clone(&asked), Rc::clone(&goes_well));
        *shelf.power_fence.borrow_mut() = Some(Box::new(move |_| {
            count.set(count.get() + 1);
            Box::pin(ready(ends.get()))
        }));
        let file = cluster_file();
        let spec = DriveSpec { name: "d12".into(), ..file.drives[0].clone() };
        let format = async |device: Rc<RamDevice>, force| {
            let (drives, intake) = (&cluster.drives, Intake::Replace);
            format_one(&shelf, &file, &spec, device, drives, intake, force).await
        };
        let new = || Rc::new(RamDevice::new("d12", spec.size.expect("a file").0));
        // Nothing is there, so nobody.
        let own = new();
        format(Rc::clone(&own), true).await.expect("blank");
        format(own, true).await.expect("ours");
        assert_eq!(asked.get(), 0);
        let theirs = new();
        let written = theirs.write(0, Buf::copy_of(&[7; 4096]).into_vec(), Durability::Fua).await;
        written.expect("theirs");
        let before = head_and_tail(&theirs).await;
        let error = format(Rc::clone(&theirs), false).await.err().expect("it is in use");
        assert!(matches!(error, DrivesError::InUse { .. }) && asked.get() == 0, "{error}");
        let error = format(Rc::clone(&theirs), true).await.err().expect("others may write");
        assert!(matches!(error, DrivesError::PowerFence(_)) && asked.get() == 1, "{error}");
        assert!(before == head_and_tail(&theirs).await, "not a byte was written");
        goes_well.set(true);
        format(Rc::clone(&theirs), true).await.expect("nobody writes");

        // Until its power goes, another server makes it part of a cluster.
        let stranger = new();
        let written = stranger.write(0, Buf::copy_of(&[7; 4096]).into_vec(), Durability::Fua).await;
        written.expect("theirs");
        let taken = Rc::clone(&stranger);
        let label = read_label(&*theirs).await.expect("ours");
        *shelf.power_fence.borrow_mut() = Some(Box::new(move |_| {
            let (device, label) = (Rc::clone(&taken), label.clone());
            Box::pin(async move {
                let identity = DriveIdentity {
                    cluster_uuid: Uuid::from_u64_pair(4, 2),
                    cluster_name: "quicker".into(),
                    drive_uuid: Uuid::from_u64_pair(2, 4),
                    drive_name: "d12".into(),
                    drive_index: 0,
                    enclosure_name: label.enclosure_name,
                };
                let made = Drive::format(device, identity, label.slices, Overwrite::Anything).await;
                made.is_ok()
            })
        }));
        let error = format(Rc::clone(&stranger), true).await.err().expect("it is another's");
        assert!(matches!(error, DrivesError::MadeMeanwhile { .. }), "{error}");
        assert_eq!(read_label(&*stranger).await.expect("theirs").cluster_name, "quicker");
        cluster.stop().await;
    });
}

#[test]
fn drives_are_believed_only_once_others_are_shut_out() {
    Reactor::simulated(31).block_on(async {
        let shelf = Shelf::default();
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        *shelf.power_fence.borrow_mut() = Some(Box::new(move |last| {
            assert_eq!(last, Epoch(1), "the latest owner by the labels");
            count.set(count.get() + 1);
            Box::pin(ready(false))
        }));
        // Nobody can have new drives.
        served(&shelf, write_file).await;
        assert_eq!(asked.get(), 0);
        let drives: Vec<_> = shelf.drives.borrow().values().cloned().collect();
        let before = join_all(drives.iter().map(|drive| head_and_tail(drive))).await;
        let error = start(cluster_file(), &shelf).await.err().expect("others may write");
        assert!(matches!(error, AssemblyError::Drives(DrivesError::PowerFence(_))), "{error}");
        assert_eq!(asked.get(), 1);
        let after = join_all(drives.iter().map(|drive| head_and_tail(drive))).await;
        assert!(before == after, "not a byte was written");

        // Until its power goes, another server takes the cluster.
        let other = Rc::new(Shelf { drives: shelf.drives.clone(), ..Shelf::default() });
        *shelf.power_fence.borrow_mut() = Some(Box::new(move |_| {
            let other = Rc::clone(&other);
            Box::pin(async move {
                served(&other, read_file).await;
                true
            })
        }));
        served(&shelf, read_file).await;
        let label = read_label(&*drives[0]).await.expect("a label");
        assert_eq!(label.owner_epoch, Epoch(3), "after that server's");
    });
}

/// A server that reaches too few of the drives leaves those alone that another one may be serving from.
#[test]
fn who_cannot_serve_shuts_nobody_out() {
    Reactor::simulated(32).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        *shelf.power_fence.borrow_mut() = Some(Box::new(move |_| {
            count.set(count.get() + 1);
            Box::pin(ready(true))
        }));
        let drives = shelf.drives.borrow().clone();
        let before = join_all(drives.values().map(|drive| head_and_tail(drive))).await;
        let far = drives.keys().skip(2).cloned();
        shelf.pulled.borrow_mut().extend(far);
        let error = start(cluster_file(), &shelf).await.err().expect("too few");
        assert!(matches!(error, AssemblyError::Array(_)), "{error}");
        assert_eq!(asked.get(), 0, "nobody lost its power");
        let after = join_all(drives.values().map(|drive| head_and_tail(drive))).await;
        assert!(before == after, "nor a drive");
        shelf.pulled.take();
        served(&shelf, read_file).await;
        assert_eq!(asked.get(), 1);
    });
}

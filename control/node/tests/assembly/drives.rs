//! Drives that fail, leave, are replaced and are added; scrubs.

use crate::shelf::{
    Shelf, changed, cluster_file, fail, head_and_tail, operator, operator_of, operator_with,
    read_file, served, start, status, write_file,
};
use levada_base::Buf;
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_device::{Device, Durability, RamDevice};
use levada_node::control::{ControlReply, ControlRequest};
use levada_node::drives::{DriveSource, Intake, format_one};
use levada_node::operator::Operator;
use levada_spec::{Bytes, ClusterFile};
use std::rc::Rc;

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
                let (drives, intake) = (&cluster.drives, Intake::Add);
                let drive = format_one(&*shelf, &file, spec, device, drives, intake, false).await;
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

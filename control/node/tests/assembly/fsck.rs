//! Checks and repairs, of a cluster that is down and of one that is up.

use crate::shelf::{Shelf, cluster_file, heads, operator, read_file, served, start, write_file};
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_kv::Batch;
use levada_node::assembly::AssemblyError;
use levada_node::control::{ControlReply, ControlRequest};
use levada_node::drives::DriveSource;
use levada_node::fsck::{self, FsckOptions, Sum, TargetReport};
use std::rc::Rc;

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
pub async fn change_rows(
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
pub async fn target_of_the_object(shelf: &Shelf) -> String {
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
        assert_eq!((told.reports.len(), told.reports[0].found), (cluster.targets.len(), 1));
        assert_eq!(state(1).await.items, []);
        assert_eq!(operator.answer(order).await, ControlReply::FsckStarted { number: 2 });
        assert_eq!(operator.answer(ControlRequest::FsckStop).await, ControlReply::Done);
        let stopped = state(0).await;
        assert!(stopped.ended, "{stopped:?}");
        assert_eq!(Sum::of(&stopped.reports).exit_code(), 8, "nothing was checked: {stopped:?}");

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

//! File data on every level with parity: written, short of as many drives as the level bears, read.

use crate::shelf::{
    Shelf, changed, cluster_file, fail, operator_of, read_file, served_as, start,
    start_without_majority, status, write_file,
};
use levada_base::reactor::Reactor;
use levada_spec::{Bytes, ClusterFile, Level, ParityKind, SliceSize, Spread};
use std::rc::Rc;

/// The box with its data on this level, over all drives; metadata bear one more.
fn box_on(kind: ParityKind) -> ClusterFile {
    let mut file = cluster_file();
    let data = 12 / kind.groups() - kind.parity();
    file.arrays[1].level = Level::Parity { kind, data, chunk: Bytes::kib(64) };
    file.arrays[1].spares = 0;
    let copies = (kind.parity() + 2).max(3);
    file.arrays[0].level = Level::Raid1 { copies, spread: Spread::Enclosure };
    file
}

const KINDS: [(ParityKind, u64); 5] = [
    (ParityKind::Raid5, 41),
    (ParityKind::Raid50 { groups: 3 }, 42),
    (ParityKind::Raid60 { groups: 2 }, 43),
    (ParityKind::NPlusM { parity: 1 }, 44),
    (ParityKind::NPlusM { parity: 3 }, 45),
];

fn drives(count: u32) -> Vec<String> {
    (0..count).map(|drive| format!("d{drive:02}")).collect()
}

#[test]
fn files_survive_as_many_drives_as_the_level_bears() {
    for (kind, seed) in KINDS {
        Reactor::simulated(seed).block_on(async {
            let shelf = Shelf::default();
            served_as(box_on(kind), &shelf, write_file).await;
            shelf.pulled.replace(drives(kind.parity()));
            served_as(box_on(kind), &shelf, read_file).await;
            shelf.pulled.take();
            served_as(box_on(kind), &shelf, read_file).await;
        });
    }
}

/// Failed while the cluster is up, and one more is refused; replaced and rebuilt, as many others may go.
#[test]
fn drives_are_failed_and_replaced_on_every_level() {
    for (kind, seed) in KINDS {
        Reactor::simulated(seed + 10).block_on(async {
            let shelf = Rc::new(Shelf::default());
            let dir = tempfile::tempdir().expect("a temporary directory");
            let path = dir.path().join("levada.toml");
            std::fs::write(&path, box_on(kind).to_toml()).expect("written");
            served_as(box_on(kind), &shelf, write_file).await;
            let (cluster, operator) = operator_of(box_on(kind), &shelf, path).await;
            // Those of one group: every so many drives.
            let of_group: Vec<String> = (0..)
                .step_by(kind.groups() as usize)
                .take(kind.parity() as usize + 1)
                .map(|drive: u32| format!("d{drive:02}"))
                .collect();
            let (last, first) = of_group.split_last().expect("one at least");
            for drive in first {
                fail(&operator, drive, false).await.expect("bears it");
            }
            let why = fail(&operator, last, false).await.expect_err("one too many");
            assert!(why.contains("array data") && why.contains("would stop it"), "{kind:?}: {why}");
            let shown = status(&operator).await;
            let survives = shown.survives.join("; ");
            assert!(survives.contains("data survives no further loss"), "{survives}");
            for drive in first {
                shelf.drives.borrow_mut().remove(drive);
                let replace = levada_node::control::ControlRequest::DriveReplace {
                    drive: drive.clone(),
                    force: false,
                };
                assert_eq!(
                    operator.answer(replace).await,
                    levada_node::control::ControlReply::Done
                );
            }
            for array in &cluster.arrays {
                while array.array.needs_rebuild() {
                    array.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
                }
            }
            cluster.stop().await;
            let others = (12 - kind.parity()..12).map(|drive| format!("d{drive:02}"));
            shelf.pulled.replace(others.collect());
            served_as(box_on(kind), &shelf, read_file).await;
        });
    }
}

/// A loss in one group leaves what the others bear.
#[test]
fn groups_bear_their_losses_each_for_itself() {
    Reactor::simulated(61).block_on(async {
        let kind = ParityKind::Raid50 { groups: 2 };
        let mut file = box_on(kind);
        // Metadata on drives that stay.
        file.arrays[0].drives.drain(..4);
        let shelf = Rc::new(Shelf::default());
        let (cluster, operator) = operator_of(file, &shelf, "box/levada.toml".into()).await;
        let level = &status(&operator).await.arrays[1].level;
        assert_eq!(level, "RAID 50 of 2 groups over 12, 64 KiB chunks");
        fail(&operator, "d00", false).await.expect("bears it");
        let why = fail(&operator, "d02", false).await.expect_err("of the same group");
        assert!(why.contains("would stop it"), "{why}");
        fail(&operator, "d01", false).await.expect("of the other group");
        assert_eq!(status(&operator).await.stopped(), Vec::<String>::new());
        cluster.stop().await;
    });
}

#[test]
fn another_parity_or_grouping_in_the_file_is_refused() {
    Reactor::simulated(62).block_on(async {
        for (made, written, says) in [
            (
                ParityKind::NPlusM { parity: 3 },
                ParityKind::NPlusM { parity: 2 },
                "data: parity: 2 in the file, 3 on",
            ),
            (
                ParityKind::Raid50 { groups: 2 },
                ParityKind::Raid50 { groups: 3 },
                "data: groups: 3 in the file, 2 on",
            ),
            (
                ParityKind::Raid5,
                ParityKind::NPlusM { parity: 1 },
                "data: level: n+m in the file, raid5 on",
            ),
        ] {
            let shelf = Shelf::default();
            start(box_on(made), &shelf).await.expect("starts").stop().await;
            let mut file = box_on(made);
            file.arrays[1].level = box_on(written).arrays[1].level;
            let told = changed(file, &shelf).await;
            assert!(told.contains(says), "{told}");
        }
    });
}

/// Half of the drives are gone for good: what is left holds all data, and is not believed unless somebody says that nobody has the others.
#[test]
fn half_of_the_drives_are_enough_where_that_is_ordered() {
    Reactor::simulated(71).block_on(async {
        let kind = ParityKind::NPlusM { parity: 3 };
        let file = || {
            let mut file = box_on(kind);
            file.drives.truncate(6);
            for array in &mut file.arrays {
                array.drives.truncate(6);
            }
            file.arrays[1].level = Level::Parity { kind, data: 3, chunk: Bytes::kib(64) };
            file.arrays[0].slice = SliceSize::Bytes(Bytes::mib(256));
            file.arrays[0].level = Level::Raid1 { copies: 4, spread: Spread::Enclosure };
            file
        };
        let shelf = Shelf::default();
        served_as(file(), &shelf, write_file).await;
        shelf.pulled.replace(drives(3));
        let error = start(file(), &shelf).await.err().expect("others may have the rest");
        assert!(error.to_string().contains("levada up --without-majority"), "{error}");
        let opened = start_without_majority(file(), &shelf).await;
        opened.expect("all data are there").stop().await;
        // From now on they are all there is.
        served_as(file(), &shelf, read_file).await;
    });
}

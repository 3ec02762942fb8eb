//! Spares of the cluster: which one comes in, for whom, and over restarts.

use crate::shelf::{
    Shelf, changed, cluster_file, fail, operator_of, read_file, served_as, status, write_file,
};
use levada_base::reactor::Reactor;
use levada_node::arrays::ClusterArray;
use levada_node::assembly::Cluster;
use levada_node::control::{ControlReply, ControlRequest};
use levada_node::drives::give_slices;
use levada_node::operator::Operator;
use levada_raid::MemberState;
use levada_spec::{Bytes, ClusterFile, Level, ParityKind, Spread};
use std::rc::Rc;

/// The box, where d10 and d11 are spares of the cluster, and no array has any of its own.
pub fn with_spares() -> ClusterFile {
    let mut file = cluster_file();
    file.spares = vec!["d10".into(), "d11".into()];
    for array in &mut file.arrays {
        array.drives.truncate(10);
        array.spares = 0;
    }
    file
}

pub async fn rebuild(cluster: &Cluster) {
    for array in &cluster.arrays {
        while array.array.needs_rebuild() {
            array.array.rebuild(levada_raid::Limits::NONE).await.expect("rebuilt");
        }
    }
}

/// The live members of each array beside those that it was made with, by name.
pub fn came_in(cluster: &Cluster) -> Vec<Vec<String>> {
    let of = |array: &Rc<ClusterArray>| {
        let members = array.array.status().members.into_iter();
        let live = members.filter(|member| member.state != MemberState::Faulty);
        live.map(|member| member.name).filter(|name| !array.spec.drives.contains(name)).collect()
    };
    cluster.arrays.iter().map(of).collect()
}

async fn spares_shown(operator: &Rc<Operator>) -> Vec<(String, String)> {
    let drives = status(operator).await.drives.into_iter();
    drives.filter_map(|drive| Some((drive.name, drive.spare?))).collect()
}

fn shown(states: [(&str, &str); 2]) -> Vec<(String, String)> {
    states.map(|(drive, state)| (drive.to_owned(), state.to_owned())).into()
}

#[test]
fn a_spare_takes_the_place_of_a_lost_drive_in_every_array_and_keeps_it() {
    Reactor::simulated(71).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(&path, with_spares().to_toml()).expect("written");
        served_as(with_spares(), &shelf, write_file).await;
        let (cluster, operator) = operator_of(with_spares(), &shelf, path.clone()).await;
        operator.use_spares().await;
        assert_eq!(came_in(&cluster), [[""; 0], [""; 0]]);
        assert_eq!(spares_shown(&operator).await, shown([("d10", "spare"), ("d11", "spare")]));

        fail(&operator, "d03", false).await.expect("bears it");
        operator.use_spares().await;
        assert_eq!(came_in(&cluster), [["d10"], ["d10"]]);
        assert_eq!(spares_shown(&operator).await, shown([("d10", "in use"), ("d11", "spare")]));
        rebuild(&cluster).await;
        assert!(cluster.arrays.iter().all(|array| array.out().is_empty()));
        cluster.stop().await;

        // It is on record, and bears as much as before.
        served_as(with_spares(), &shelf, read_file).await;
        shelf.pulled.replace(["d03", "d00", "d08"].map(String::from).into());
        served_as(with_spares(), &shelf, read_file).await;

        // Two are still away, and there is one spare left for the first.
        let (cluster, operator) = operator_of(with_spares(), &shelf, path.clone()).await;
        operator.use_spares().await;
        assert_eq!(came_in(&cluster), [["d10", "d11"], ["d10", "d11"]]);
        rebuild(&cluster).await;
        // A spare that fails, too, leaves a place.
        fail(&operator, "d10", false).await.expect("bears it");
        operator.use_spares().await;
        assert_eq!(came_in(&cluster), [["d11"], ["d11"]]);
        // Replaced, it is a spare again, and comes in at once.
        shelf.drives.borrow_mut().remove("d10");
        let replace = ControlRequest::DriveReplace { drive: "d10".into(), force: false };
        assert_eq!(operator.answer(replace).await, ControlReply::Done);
        assert_eq!(spares_shown(&operator).await, shown([("d10", "spare"), ("d11", "in use")]));
        operator.use_spares().await;
        assert_eq!(spares_shown(&operator).await, shown([("d10", "in use"), ("d11", "in use")]));
        rebuild(&cluster).await;
        cluster.stop().await;
        served_as(with_spares(), &shelf, read_file).await;
    });
}

/// One whose enclosure is away would be tried for ever, and no other.
#[test]
fn a_spare_that_is_out_of_reach_is_passed_over() {
    Reactor::simulated(77).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let path = "box/levada.toml".into();
        let (cluster, operator) = operator_of(with_spares(), &shelf, path).await;
        shelf.unreached.replace(vec!["d10".into()]);
        fail(&operator, "d03", false).await.expect("bears it");
        operator.use_spares().await;
        assert_eq!(came_in(&cluster), [["d11"], ["d11"]]);
        cluster.stop().await;
    });
}

/// The dead drive leaves the file, and the spare that has its place becomes an ordinary one.
#[test]
fn a_spare_in_use_may_become_a_drive_of_the_arrays() {
    Reactor::simulated(72).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served_as(with_spares(), &shelf, write_file).await;
        shelf.pulled.replace(vec!["d03".into()]);
        let path = "box/levada.toml".into();
        let (cluster, operator) = operator_of(with_spares(), &shelf, path).await;
        operator.use_spares().await;
        rebuild(&cluster).await;
        cluster.stop().await;
        // Neither a spare nor of the arrays: then whose?
        let mut file = with_spares();
        file.spares = vec!["d11".into()];
        let told = changed(file.clone(), &shelf).await;
        assert!(told.contains("[[array]] data: drives (d10): not members in the file"), "{told}");
        file.drives.retain(|drive| drive.name != "d03");
        for array in &mut file.arrays {
            array.drives.retain(|drive| drive != "d03");
            array.drives.push("d10".into());
        }
        served_as(file, &shelf, read_file).await;
    });
}

/// Cut short after the label was written, and before an array knew of it.
#[test]
fn a_spare_that_was_about_to_help_is_free_or_completed() {
    for one_array_has_it in [false, true] {
        Reactor::simulated(73).block_on(async {
            let shelf = Rc::new(Shelf::default());
            served_as(with_spares(), &shelf, write_file).await;
            let path: std::path::PathBuf = "box/levada.toml".into();
            let (cluster, operator) = operator_of(with_spares(), &shelf, path.clone()).await;
            fail(&operator, "d03", false).await.expect("bears it");
            let named = |drive: &&levada_node::drives::ClusterDrive| drive.spec.name == "d10";
            let drive = cluster.drives.drives.iter().find(named).expect("there");
            let drive = drive.found.as_ref().expect("open");
            let part = |index: usize| {
                let array = &cluster.arrays[index];
                (&array.spec, array.array.status().uuid, [128u64 << 20, 958 << 20][index])
            };
            let given = give_slices(drive, cluster.drives.epoch, &[part(0), part(1)]).await;
            if one_array_has_it {
                let file = with_spares();
                let given = given.expect("labelled");
                cluster.arrays[0].admit(&file, "d10", &given).await.expect("taken");
            }
            cluster.stop().await;
            let (cluster, operator) = operator_of(with_spares(), &shelf, path).await;
            operator.use_spares().await;
            assert!(came_in(&cluster).iter().all(|drives| drives.len() == 1));
            assert_eq!(came_in(&cluster)[0], came_in(&cluster)[1]);
            rebuild(&cluster).await;
            assert!(cluster.arrays.iter().all(|array| array.out().is_empty()));
            cluster.stop().await;
            served_as(with_spares(), &shelf, read_file).await;
        });
    }
}

/// Of two, the one that leaves every enclosure survivable; else the smallest that has room.
#[test]
fn the_spare_that_suits_best_comes_in() {
    let takes = |seed, change: &dyn Fn(&mut ClusterFile)| -> Vec<Vec<String>> {
        Reactor::simulated(seed).block_on(async {
            let mut file = with_spares();
            change(&mut file);
            let shelf = Rc::new(Shelf::default());
            let (cluster, operator) = operator_of(file, &shelf, "box/levada.toml".into()).await;
            fail(&operator, "d03", false).await.expect("bears it");
            operator.use_spares().await;
            let taken = came_in(&cluster);
            rebuild(&cluster).await;
            cluster.stop().await;
            taken
        })
    };
    let size = |file: &mut ClusterFile, drive: usize, mib| {
        file.drives[drive].size = Some(Bytes::mib(mib));
    };
    // d10 sits beside two members of a level that bears two.
    let crowded = |file: &mut ClusterFile| file.drives[10].enclosure = "e0".into();
    assert_eq!(takes(80, &crowded), [["d11"], ["d11"]]);
    // Of two that suit, the smaller.
    assert_eq!(takes(81, &|file| size(file, 10, 2048)), [["d11"], ["d11"]]);
    assert_eq!(takes(82, &|file| size(file, 11, 2048)), [["d10"], ["d10"]]);
    // Too small for the data, and large enough for metadata: the other one is large enough for both.
    assert_eq!(takes(83, &|file| size(file, 10, 256)), [["d11"], ["d11"]]);
    // None has room for both: metadata come first, and nothing is promised that does not fit.
    let both = |file: &mut ClusterFile, mib| {
        for drive in [10, 11] {
            size(file, drive, mib);
        }
    };
    assert_eq!(takes(84, &|file| both(file, 256)), [vec!["d10".to_owned()], vec![]]);
    // Too small for anything.
    assert_eq!(takes(85, &|file| both(file, 18)), [vec![""; 0], vec![]]);
}

/// Status says what is the matter with each spare, as long as none takes the place.
#[test]
fn who_has_no_spare_is_told_why() {
    Reactor::simulated(86).block_on(async {
        let mut file = with_spares();
        file.drives[10].size = Some(Bytes::mib(256));
        file.drives[11].size = Some(Bytes::mib(18));
        let shelf = Rc::new(Shelf::default());
        let (cluster, operator) = operator_of(file, &shelf, "box/levada.toml".into()).await;
        let told = async || {
            operator.use_spares().await;
            let problems = status(&operator).await.problems.into_iter();
            problems.filter(|problem| problem.starts_with("no spare")).collect::<Vec<_>>()
        };
        assert_eq!(told().await, [""; 0]);
        fail(&operator, "d03", false).await.expect("bears it");
        let [data] = &told().await[..] else { panic!("metadata has d10") };
        assert!(data.starts_with("no spare takes the place of drive d03 in array data: d10 is in use, d11 is too small: 16MiB, and "), "{data}");
        rebuild(&cluster).await;
        fail(&operator, "d04", false).await.expect("bears it");
        assert_eq!(told().await.len(), 3, "data lacks two, metadata one");
        cluster.stop().await;
    });
}

/// One spare, and drives of both groups of a RAID 60 are lost: it goes where one more would cost most. A mirror, to which all matter
/// alike, gives it the place of the first.
#[test]
fn a_spare_goes_where_one_more_loss_would_cost_most() {
    Reactor::simulated(91).block_on(async {
        let mut file = with_spares();
        file.spares.truncate(1);
        file.arrays[0].level = Level::Raid1 { copies: 2, spread: Spread::Enclosure };
        let kind = ParityKind::Raid60 { groups: 2 };
        file.arrays[1].level = Level::Parity { kind, data: 3, chunk: Bytes::kib(128) };
        let shelf = Rc::new(Shelf::default());
        let (cluster, operator) = operator_of(file, &shelf, "box/levada.toml".into()).await;
        let members = cluster.arrays[1].array.status().members;
        let role_of = |drive| members.iter().find(|member| member.name == drive)?.role;
        // One of the first group and two of the second, which have no copies of the same metadata.
        assert_eq!(["d02", "d05", "d09"].map(role_of), [Some(1), Some(7), Some(9)]);
        for drive in ["d02", "d05", "d09"] {
            fail(&operator, drive, false).await.expect("bears it");
        }
        operator.use_spares().await;
        for (array, role) in cluster.arrays.iter().zip([1, 7]) {
            let members = array.array.status().members;
            let spare = members.iter().find(|member| member.name == "d10").expect("taken");
            assert_eq!(spare.role, Some(role), "{}", array.spec.name);
        }
        rebuild(&cluster).await;
        cluster.stop().await;
    });
}

/// Two arrays on drives of their own have lost one each, and there is one spare: it goes to the one that bears less by now.
#[test]
fn the_array_that_bears_least_is_helped_first() {
    Reactor::simulated(92).block_on(async {
        let mut file = with_spares();
        file.spares.truncate(1);
        file.arrays[0].drives.truncate(5);
        file.arrays[1].drives.drain(..5);
        file.arrays[1].level =
            Level::Parity { kind: ParityKind::Raid5, data: 4, chunk: Bytes::kib(128) };
        let shelf = Rc::new(Shelf::default());
        let (cluster, operator) = operator_of(file, &shelf, "box/levada.toml".into()).await;
        for array in 0..2 {
            let lost = cluster.arrays[array].spec.drives[0].clone();
            fail(&operator, &lost, false).await.expect("bears it");
        }
        let bears: Vec<_> =
            cluster.arrays.iter().map(|array| array.array.bears_without(&[])).collect();
        assert_eq!(bears, [1, 0]);
        operator.use_spares().await;
        assert_eq!(came_in(&cluster), [vec![], vec!["d10".to_owned()]]);
        rebuild(&cluster).await;
        cluster.stop().await;
    });
}

/// An array's own spare goes first.
#[test]
fn a_spare_of_the_array_goes_first() {
    Reactor::simulated(90).block_on(async {
        let mut file = with_spares();
        file.arrays[1].level =
            Level::Parity { kind: ParityKind::Raid5, data: 8, chunk: Bytes::kib(128) };
        file.arrays[1].spares = 1;
        file.arrays[0].level = Level::Raid1 { copies: 2, spread: Spread::Enclosure };
        let shelf = Rc::new(Shelf::default());
        let (cluster, operator) = operator_of(file, &shelf, "box/levada.toml".into()).await;
        fail(&operator, "d03", false).await.expect("bears it");
        operator.use_spares().await;
        assert_eq!(came_in(&cluster), [vec!["d10".to_owned()], vec![]]);
        rebuild(&cluster).await;
        assert!(cluster.arrays.iter().all(|array| array.out().is_empty()));
        cluster.stop().await;
    });
}

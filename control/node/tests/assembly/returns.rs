//! Drives that vanish, and come back.

use crate::shelf::{Shelf, operator_of, operator_told_by, served, served_as, status, write_file};
use crate::spares::{came_in, rebuild, with_spares};
use levada_base::reactor::{self, Reactor};
use levada_device::Faults;
use levada_node::arrays::look_after;
use levada_node::assembly::Cluster;
use levada_raid::MemberState;
use std::rc::Rc;
use std::time::Duration;

const VANISHING: &str = "d03";

/// A cluster whose drive [`VANISHING`] can vanish.
fn with_faults(shelf: &Shelf) -> Faults {
    let faults = Faults::none();
    shelf.faults.borrow_mut().insert(VANISHING.into(), faults.clone());
    faults
}

/// The drive is gone, and that is noticed.
async fn vanishes(cluster: &Cluster, faults: &Faults) {
    faults.fail();
    let meta = &cluster.arrays[0];
    meta.array.scrub(levada_raid::Limits::NONE).await.expect("it bears one");
    assert_eq!(meta.out(), [VANISHING], "noticed");
}

/// A drive vanishes: it is waited for, taken back when it is there again, and catches up; else a spare comes in.
#[test]
fn a_drive_that_vanishes_is_waited_for() {
    for comes_back in [true, false] {
        Reactor::simulated(87).block_on(async {
            let shelf = Rc::new(Shelf::default());
            served_as(with_spares(), &shelf, write_file).await;
            let faults = with_faults(&shelf);
            let (cluster, operator) =
                operator_of(with_spares(), &shelf, "box/levada.toml".into()).await;
            vanishes(&cluster, &faults).await;
            let meta = &cluster.arrays[0];
            operator.take_back().await;
            operator.use_spares().await;
            assert_eq!((meta.out(), came_in(&cluster)[0].len()), (vec!["d03".to_owned()], 0));
            let problems = status(&operator).await.problems.join("\n");
            let waits = "drive d03 has vanished from array meta; a spare takes its place in ";
            assert!(problems.contains(waits), "{problems}");
            reactor::sleep(Duration::from_secs(30)).await;
            if comes_back {
                faults.restore();
                operator.take_back().await;
                let members = meta.array.status().members;
                let back = members.iter().find(|member| member.name == "d03").expect("known");
                let is_rebuilt = matches!(back.state, MemberState::Rebuilding { .. });
                assert!(is_rebuilt && back.catches_up, "{back:?}");
            }
            reactor::sleep(Duration::from_secs(31)).await;
            operator.use_spares().await;
            let members = meta.array.status().members;
            let members: Vec<_> = members.into_iter().map(|m| (m.name, m.state)).collect();
            assert_eq!(came_in(&cluster)[0].len(), usize::from(!comes_back), "{members:?}");
            rebuild(&cluster).await;
            assert_eq!(meta.out(), [""; 0]);
            cluster.stop().await;
        });
    }
}

/// Nobody is told of a spare that comes in where there is none.
#[test]
fn of_a_drive_that_vanishes_it_is_said_that_there_is_no_spare() {
    Reactor::simulated(88).block_on(async {
        let mut file = with_spares();
        file.spares.clear();
        let shelf = Rc::new(Shelf::default());
        served_as(file.clone(), &shelf, write_file).await;
        let faults = with_faults(&shelf);
        let (cluster, operator) = operator_of(file, &shelf, "box/levada.toml".into()).await;
        vanishes(&cluster, &faults).await;
        operator.take_back().await;
        let problems = status(&operator).await.problems.join("\n");
        let told = "drive d03 has vanished from array meta; there is no spare for it";
        assert!(problems.contains(told), "{problems}");
        cluster.stop().await;
    });
}

/// A drive vanishes and is soon there again, where nothing happens between the loss and the return: nobody is told of
/// the moment from which a member that is out may come back.
#[test]
fn a_drive_that_is_soon_there_again_is_soon_taken_back() {
    for seed in 90..100 {
        Reactor::simulated(seed).block_on(async {
            let shelf = Rc::new(Shelf::default());
            served_as(with_spares(), &shelf, write_file).await;
            let faults = with_faults(&shelf);
            let (file, changed) = ("box/levada.toml".into(), Rc::default());
            let (cluster, operator) =
                operator_told_by(with_spares(), &shelf, file, Rc::clone(&changed)).await;
            look_after(cluster.arrays.clone(), changed, levada_raid::Limits::NONE);
            let keeping = reactor::spawn(Rc::clone(&operator).keep_spares());
            reactor::sleep(Duration::from_secs(1)).await;
            vanishes(&cluster, &faults).await;
            let meta = &cluster.arrays[0];
            reactor::sleep(Duration::from_secs(2)).await;
            faults.restore();
            reactor::sleep(Duration::from_secs(3)).await;
            let members = meta.array.status().members;
            let back = members.iter().find(|member| member.name == "d03").expect("known");
            assert!(back.state.is_live(), "{back:?}");
            keeping.abort();
            cluster.stop().await;
        });
    }
}

/// One that loses its contact again and again is better replaced; one that does so now and then is not.
#[test]
fn a_drive_comes_back_eight_times_within_an_hour() {
    Reactor::simulated(88).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served_as(with_spares(), &shelf, write_file).await;
        let faults = with_faults(&shelf);
        let file = "box/levada.toml".into();
        let (cluster, operator) = operator_of(with_spares(), &shelf, file).await;
        let often = "drive d03 is not taken back: it has come back 8 times within an hour";
        for time in 1..=9 {
            vanishes(&cluster, &faults).await;
            reactor::sleep(Duration::from_secs(1)).await;
            faults.restore();
            operator.take_back().await;
            let is_told = status(&operator).await.problems.join("\n").contains(often);
            rebuild(&cluster).await;
            assert_eq!((cluster.arrays[0].out().is_empty(), is_told), (time <= 8, time > 8));
        }
        reactor::sleep(Duration::from_secs(60 * 60)).await;
        operator.take_back().await;
        rebuild(&cluster).await;
        let problems = status(&operator).await.problems.join("\n");
        assert!(cluster.arrays[0].out().is_empty() && !problems.contains(often), "{problems}");
        cluster.stop().await;
    });
}

/// Somebody has put another drive in its place: nothing happens to that, and it is said.
#[test]
fn who_is_not_taken_back_is_told_why() {
    Reactor::simulated(89).block_on(async {
        let (shelf, others) = (Rc::new(Shelf::default()), Shelf::default());
        served(&others, write_file).await;
        served_as(with_spares(), &shelf, write_file).await;
        let faults = with_faults(&shelf);
        let file = "box/levada.toml".into();
        let (cluster, operator) = operator_of(with_spares(), &shelf, file).await;
        vanishes(&cluster, &faults).await;
        reactor::sleep(Duration::from_secs(1)).await;
        let theirs = Rc::clone(&others.drives.borrow()[VANISHING]);
        let ours = shelf.drives.borrow_mut().insert(VANISHING.into(), theirs);
        faults.restore();
        let told = "drive d03 is not taken back: what is at ";
        operator.take_back().await;
        let problems = status(&operator).await.problems.join("\n");
        assert!(
            problems.contains(told) && problems.contains("another drive, d03 of"),
            "{problems}"
        );
        assert_eq!(cluster.arrays[0].out(), [VANISHING]);
        shelf.drives.borrow_mut().insert(VANISHING.into(), ours.expect("there was one"));
        operator.take_back().await;
        rebuild(&cluster).await;
        let problems = status(&operator).await.problems.join("\n");
        assert!(cluster.arrays[0].out().is_empty() && !problems.contains(told), "{problems}");
        cluster.stop().await;
    });
}

//! Targets that would hold up their host, take its memory, or change behind its back.

use super::namespace::{Namespace, open, pattern, read, run, two_paths, write};
use super::options;
use crate::nvme::NamespaceError;
use crate::nvme::target::{NQN, Target};
use crate::{BlockError, Device};
use futures_util::future::{join, select};
use levada_base::reactor;
use levada_nvme::Nqn;
use levada_nvme::identify::OptionalCommands;
use levada_nvme::log::Event;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// What a namespace without reservations was asked to change is not overtaken by who opens it anew.
#[test]
fn an_opening_changes_nothing_that_an_earlier_one_may_still_change() {
    for (is_told, seed) in [(true, 24), (false, 25)] {
        run(seed, async {
            let mut target = Target::new();
            target.optional.remove(OptionalCommands::RESERVATIONS);
            let (net, target, paths) = two_paths(target);
            let device = open(&net, &paths).await;
            assert!(!device.has_reservations());
            reactor::sleep(Duration::from_millis(10)).await;
            target.late.set(Duration::from_secs(8));
            let (first, second) = (pattern(1, 4096), pattern(2, 4096));
            let writing = write(&device, 8192, &first);
            let cut = async {
                reactor::sleep(Duration::from_millis(100)).await;
                target.late.set(Duration::ZERO);
                for path in paths {
                    net.swallow(path);
                }
                // Whoever asked for it has lost patience with this opening.
                reactor::sleep(Duration::from_secs(4)).await;
            };
            select(pin!(writing), pin!(cut)).await;
            let changes = device.changes();
            assert!(!changes.are_settled());
            drop(device);
            for path in paths {
                target.listen(&net, path);
            }
            let anew = open(&net, &paths).await;
            if is_told {
                anew.comes_after(changes.clone());
            }
            let begun = reactor::now();
            write(&anew, 0, &second).await.expect("nobody else changes that");
            assert!(begun.elapsed() < Duration::from_secs(1));
            write(&anew, 8192, &second).await.expect("in the end");
            reactor::sleep(Duration::from_secs(30)).await;
            let is_kept = read(&anew, 8192, 4096).await.expect("read") == second[..];
            assert_eq!(is_kept, is_told, "the late write comes all the same");
            assert!(changes.are_settled());
        });
    }
}

/// One that would be waited for for hours, once a path is lost, is not used.
#[test]
fn a_target_that_looks_after_its_hosts_too_rarely_is_refused() {
    run(26, async {
        let mut target = Target::new();
        target.keep_alive_unit_ms = 6_553_500;
        let (net, _, paths) = two_paths(target);
        let nqn = Nqn::new(NQN).expect("a name");
        let opened = Namespace::open_on(net, &paths, nqn, 0, options(), "box".into()).await;
        let Err(NamespaceError::NoPath { paths, .. }) = opened else { panic!("opened") };
        let why = paths[0].why.as_ref().expect("why");
        assert!(why.contains("every 6553 s only"), "{why}");
    });
}

/// A change that is held back by a lost one ends when the device does.
#[test]
fn what_is_held_back_ends_with_the_device() {
    run(27, async {
        let mut target = Target::new();
        target.keep_alive_unit_ms = 60_000;
        let (net, target, paths) = two_paths(target);
        let device = Rc::new(open(&net, &paths).await);
        reactor::sleep(Duration::from_millis(10)).await;
        target.late.set(Duration::from_secs(8));
        let cut = async {
            reactor::sleep(Duration::from_millis(100)).await;
            target.late.set(Duration::ZERO);
            net.swallow(paths[0]);
        };
        let (written, ()) = join(write(&device, 0, &pattern(1, 4096)), cut).await;
        written.expect("on the other path");
        let begun = reactor::now();
        let ended = async {
            reactor::sleep(Duration::from_secs(1)).await;
            device.shared().end();
        };
        let (written, ()) = join(write(&device, 0, &pattern(2, 4096)), ended).await;
        assert_eq!((written, device.held_back()), (Err(BlockError::Gone), 1));
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    });
}

/// Answers that each come in time, and without end, are no path.
#[test]
fn a_look_that_does_not_end_is_given_up() {
    run(28, async {
        let mut target = Target::new();
        target.data_bytes_max = 8192;
        target.ana_groups = 1 << 15;
        target.admin_late.set(Duration::from_millis(900));
        let (net, _, paths) = two_paths(target);
        let begun = reactor::now();
        let nqn = Nqn::new(NQN).expect("a name");
        let opened = Namespace::open_on(net, &paths, nqn, 0, options(), "box".into()).await;
        let Err(NamespaceError::NoPath { paths, .. }) = opened else { panic!("opened") };
        let why = paths[0].why.as_ref().expect("why");
        assert!(why.contains("longer than 30 s to look at the namespace"), "{why}");
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    });
}

/// Another drive is put in its place and it is put back, before anybody is told; a look in between was enough.
#[test]
fn a_namespace_that_was_another_one_meanwhile_is_not_what_it_was() {
    run(29, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        let data = pattern(1, 4096);
        write(&device, 4096, &data).await.expect("written");
        target.guid.set([7; 16]);
        target.lose_cache();
        // Which has them look, and is no word of namespaces.
        target.tell(Event::AnaChanged);
        reactor::sleep(Duration::from_millis(200)).await;
        assert!(!device.is_reached());
        target.guid.set([9; 16]);
        device.flush().await.expect("flushed");
        assert_eq!(target.durable.borrow()[4096..8192], data[..]);
    });
}

/// A target tells of more and more namespaces, and nobody looks.
#[test]
fn changes_that_are_told_of_without_end_take_no_more_room() {
    run(30, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        let controllers = device.shared().whole();
        assert_eq!(controllers.len(), 2);
        target.changed_namespaces.replace((2..=600).collect());
        target.hides.set(true);
        // The first look is the last one that ends.
        for round in 0..50 {
            target.tell(Event::NamespacesChanged);
            reactor::sleep(Duration::from_millis(20)).await;
            let most = controllers.iter().map(|controller| controller.notices.changed()).max();
            assert!(most <= Some(1024) && (most >= Some(1) || round == 0), "{most:?}");
        }
        // Which of them it was is not known any more.
        assert!(controllers.iter().any(|controller| controller.notices.has_changed(1)));
    });
}

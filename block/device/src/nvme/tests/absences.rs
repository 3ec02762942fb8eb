//! Namespaces that were not there for a moment, and what their drives have lost by then.

use super::namespace::{Namespace, open, open_as, pattern, read, run, two_paths, write};
use super::options;
use super::owners::{mark, witness};
use crate::nvme::target::{BLOCK_BYTES, BLOCKS, Target};
use crate::nvme::{Options, Standing};
use crate::{BlockError, Device, Witness};
use futures_util::future::join;
use levada_base::stream::MemoryNetwork;
use levada_base::{Buf, Epoch, reactor};
use levada_nvme::IoOpcode;
use levada_nvme::identify::OptionalCommands;
use levada_nvme::log::Event;
use levada_nvme::pdu::Digests;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// A namespace that is open over two paths.
async fn opened(options: Options) -> (MemoryNetwork, Rc<Target>, Namespace) {
    let (net, target, paths) = two_paths(Target::new());
    let device = open_as(&net, &paths, options).await;
    reactor::sleep(Duration::from_millis(10)).await;
    (net, target, device)
}

/// A drive that is pulled and put back has lost its cache, while the controllers that show it stay.
#[test]
fn a_namespace_that_comes_back_is_not_what_it_was() {
    for (seed, away_ms, is_looked_at, as_a_field) in [
        (13, 2000, true, false),
        (14, 50, false, false),
        (15, 0, false, false),
        (16, 2000, true, true),
    ] {
        run(seed, async {
            let (net, target, device) = opened(options()).await;
            target.tells_absence_as_a_field.set(as_a_field);
            // More than once: each time the target is asked which ones have changed, or it would not tell again.
            for round in 0..3 {
                let data = pattern(round, 4096);
                write(&device, 4096, &data).await.expect("written");
                let looking = async {
                    reactor::sleep(Duration::from_millis(100)).await;
                    if is_looked_at {
                        read(&device, 0, 512).await.expect("read");
                    }
                };
                join(target.reinsert(Duration::from_millis(away_ms)), looking).await;
                reactor::sleep(Duration::from_millis(10)).await;
                device.flush().await.expect("flushed");
                assert_eq!(target.durable.borrow()[4096..8192], data[..]);
            }
            assert_eq!(net.tried(), 4);
            // One that stays away is gone.
            target.is_absent.set(true);
            let begun = reactor::now();
            assert_eq!(read(&device, 0, 512).await, Err(BlockError::Gone));
            assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
            target.is_absent.set(false);
            reactor::sleep(Duration::from_secs(2)).await;
            read(&device, 0, 512).await.expect("read");
        });
    }
}

/// A drive loses what it was the first to have for a while, before anybody hears that it had it.
#[test]
fn what_is_confirmed_late_may_be_lost_already() {
    run(22, async {
        let (_net, target, device) = opened(options()).await;
        let data = pattern(1, 4096);
        target.answers_late.set(Duration::from_secs(1));
        let reinserted = async {
            reactor::sleep(Duration::from_millis(200)).await;
            target.reinsert(Duration::from_millis(100)).await;
        };
        let (written, ()) = join(write(&device, 0, &data), reinserted).await;
        written.expect("written");
        device.flush().await.expect("flushed");
        assert_eq!(target.durable.borrow()[..4096], data[..]);
    });
}

/// The target has told that something has changed, and has not said yet what: nothing that is answered meanwhile is relied upon.
#[test]
fn nothing_is_durable_while_it_is_not_known_which_namespace_was_away() {
    run(24, async {
        let (_net, target, device) = opened(options()).await;
        let data = pattern(1, 4096);
        write(&device, 0, &data).await.expect("written");
        target.admin_late.set(Duration::from_millis(200));
        let used = async {
            // It is there again.
            reactor::sleep(Duration::from_millis(60)).await;
            let (flushed, read) = join(device.flush(), read(&device, 0, 4096)).await;
            assert!(read.expect("read") == data[..], "what was confirmed is there");
            flushed.expect("flushed");
        };
        join(target.reinsert(Duration::from_millis(50)), used).await;
        assert_eq!(target.durable.borrow()[..4096], data[..]);
    });
}

/// What a target tells of is asked about, which takes its time: meanwhile it is heard of other things.
#[test]
fn a_drive_that_was_away_is_heard_of_while_a_page_is_read() {
    for (seed, event) in (1..).zip([Event::Temperature, Event::AnaChanged]) {
        run(seed, async {
            let (_net, target, device) = opened(options()).await;
            let data = pattern(1, 4096);
            write(&device, 0, &data).await.expect("written");
            target.admin_late.set(Duration::from_secs(1));
            target.tell(event);
            reactor::sleep(Duration::from_millis(100)).await;
            target.reinsert(Duration::from_millis(100)).await;
            reactor::sleep(Duration::from_millis(100)).await;
            device.flush().await.expect("flushed");
            assert_eq!(target.durable.borrow()[..4096], data[..], "{event:?}");
        });
    }
}

/// Something was written, and not flushed, by way of two paths, of which the second hears no events.
async fn written_and_told_over_one_path()
-> (MemoryNetwork, Rc<Target>, [SocketAddr; 2], Namespace, Buf) {
    let (net, target, paths) = two_paths(Target::new());
    target.refuses_events_at.set(Some(paths[1]));
    let device = open(&net, &paths).await;
    reactor::sleep(Duration::from_millis(10)).await;
    let data = pattern(1, 4096);
    write(&device, 0, &data).await.expect("written");
    (net, target, paths, device, data)
}

/// One path is told that a drive was away, and the other one answers the flush.
#[test]
fn what_one_path_is_told_holds_for_all() {
    for (seed, is_cut_off) in [(1, false), (2, true)] {
        run(seed, async {
            let (net, target, paths, device, data) = written_and_told_over_one_path().await;
            target.admin_late.set(Duration::from_secs(1));
            target.reinsert(Duration::ZERO).await;
            reactor::sleep(Duration::from_millis(100)).await;
            let cut_off = async {
                if is_cut_off {
                    net.down(paths[0]);
                    reactor::sleep(Duration::from_millis(100)).await;
                    target.listen(&net, paths[0]);
                }
            };
            let begun = reactor::now();
            join(cut_off, async { device.flush().await.expect("flushed") }).await;
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
            assert_eq!(target.durable.borrow()[..4096], data[..], "cut off: {is_cut_off}");
        });
    }
}

/// One path waits for what its target does not say: it is left, and what it was told holds for the other one.
#[test]
fn a_flush_does_not_wait_for_ever_for_what_another_path_is_told() {
    run(1, async {
        let (_net, target, _, device, data) = written_and_told_over_one_path().await;
        target.changes_late.set(Duration::from_secs(20));
        target.reinsert(Duration::ZERO).await;
        reactor::sleep(Duration::from_millis(100)).await;
        let begun = reactor::now();
        device.flush().await.expect("flushed");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert_eq!(target.durable.borrow()[..4096], data[..]);
    });
}

/// At every moment it is unknown over one of two paths which drive has changed.
#[test]
fn a_flush_waits_only_for_what_was_told_before_it() {
    run(1, async {
        let (_net, target, device) = opened(options()).await;
        write(&device, 0, &pattern(1, 4096)).await.expect("written");
        target.changed_namespaces.replace(vec![2]);
        target.changes_late.set(Duration::from_secs(2));
        let told = async {
            for round in 0..20 {
                target.tell_over(round % 2, Event::NamespacesChanged);
                reactor::sleep(Duration::from_millis(1500)).await;
            }
        };
        let flushed = async {
            reactor::sleep(Duration::from_secs(1)).await;
            let begun = reactor::now();
            device.flush().await.expect("flushed");
            assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
        };
        join(told, flushed).await;
    });
}

/// What was read or failed over a path that is told of nothing is asked for again, as what was written may be away.
#[test]
fn what_is_read_waits_for_what_another_path_is_told() {
    run(1, async {
        let (_net, target, _, device, data) = written_and_told_over_one_path().await;
        target.admin_late.set(Duration::from_secs(1));
        target.reinsert(Duration::ZERO).await;
        reactor::sleep(Duration::from_millis(100)).await;
        assert!(read(&device, 0, 4096).await.expect("read") == data[..]);
    });
}

/// Who forgets its owner may have forgotten more, and need not have told of it: over a path that hears nothing, while another one was away, or over the only
/// one, which hears of the owner and of nothing else.
#[test]
fn a_target_that_forgets_its_owner_has_lost_what_it_had() {
    for (seed, hears) in [(1, false), (2, true)] {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            if !hears {
                target.refuses_events_at.set(Some(paths[0]));
            }
            let used = if hears { &paths[..1] } else { &paths[..] };
            let device = open(&net, used).await;
            device.recognise_by(Some(witness()));
            device.fence(Epoch(4)).await.expect("nobody's");
            write(&device, 0, &mark(4)).await.expect("ours");
            device.flush().await.expect("flushed");
            let data = pattern(1, 4096);
            write(&device, 8192, &data).await.expect("ours");
            if !hears {
                net.down(paths[1]);
                while device.paths()[1].standing != Standing::Down {
                    reactor::sleep(Duration::from_millis(1)).await;
                }
            }
            target.lose_cache();
            target.forget_owners();
            match hears {
                true => target.tell(Event::ReservationNotice),
                false => target.listen(&net, paths[1]),
            }
            // From when it is registered again, so that it knows.
            let begun = reactor::now();
            while target.keys.borrow().is_empty() {
                assert!(begun.elapsed() < Duration::from_secs(5), "hears: {hears}");
                reactor::sleep(Duration::from_micros(10)).await;
            }
            let are_back = || device.paths().iter().all(|path| path.standing > Standing::Unusable);
            let written = async {
                let begun = reactor::now();
                while !are_back() || begun.elapsed() < Duration::from_secs(1) {
                    write(&device, 4096, &pattern(2, 4096)).await.expect("still ours");
                    assert!(begun.elapsed() < Duration::from_secs(5));
                    reactor::sleep(Duration::from_micros(100)).await;
                }
            };
            let flushed = async {
                let begun = reactor::now();
                device.flush().await.expect("flushed");
                assert_eq!(target.durable.borrow()[8192..12288], data[..], "hears: {hears}");
                assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
            };
            join(written, flushed).await;
        });
    }
}

/// A path that comes back is looked at for a while, in which it is told that another drive has changed.
#[test]
fn a_flush_does_not_wait_for_a_look_over_another_path() {
    run(1, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        net.down(paths[0]);
        let is_down = || device.paths()[0].standing == Standing::Down;
        while !is_down() {
            reactor::sleep(Duration::from_millis(1)).await;
        }
        write(&device, 0, &pattern(1, 4096)).await.expect("written");
        target.admin_late.set(Duration::from_millis(20));
        target.listen(&net, paths[0]);
        // From its first look on.
        while is_down() {
            reactor::sleep(Duration::from_millis(1)).await;
        }
        target.hides.set(true);
        target.changed_namespaces.replace(vec![2]);
        target.tell(Event::NamespacesChanged);
        reactor::sleep(Duration::from_millis(100)).await;
        let begun = reactor::now();
        device.flush().await.expect("flushed");
        assert_eq!(device.paths()[0].standing, Standing::Unusable, "it is being looked at");
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    });
}

/// Another drive was away, and more is told before anybody has looked: this one was there all along.
#[test]
fn a_drive_is_not_made_whole_for_another() {
    let (ana, other) = (Event::AnaChanged, Event::NamespacesChanged);
    let orders =
        [[ana, other, ana, other, other, ana, ana], [other, ana, ana, other, ana, ana, other]];
    let rounds = orders.into_iter().flat_map(|events| {
        [0, 1, 10, 25, 60, 90, 110, 140, 160].map(|apart_ms| (events, apart_ms))
    });
    for (seed, (events, apart_ms)) in (1..).zip(rounds) {
        run(seed, async {
            let (_net, target, device) = opened(options()).await;
            write(&device, 0, &pattern(1, 4096)).await.expect("written");
            target.changed_namespaces.replace(vec![2]);
            target.admin_late.set(Duration::from_millis(50));
            for event in events {
                target.tell(event);
                reactor::sleep(Duration::from_millis(apart_ms)).await;
            }
            reactor::sleep(Duration::from_secs(5)).await;
            device.flush().await.expect("flushed");
            let writes = target.came(IoOpcode::Write).len();
            assert_eq!(writes, 1, "{events:?}, {apart_ms} ms apart: written again");
        });
    }
}

/// Which namespaces have changed arrives damaged: then any of them has.
#[test]
fn a_page_that_arrives_damaged_leaves_its_path_usable() {
    run(25, async {
        let digests = Digests { header: false, data: true };
        let (_net, target, device) = opened(Options { digests, ..options() }).await;
        let data = pattern(1, 4096);
        write(&device, 0, &data).await.expect("written");
        // Of either path.
        target.damages_pages.set(2);
        target.reinsert(Duration::from_millis(50)).await;
        let begun = reactor::now();
        assert!(read(&device, 0, 4096).await.expect("read") == data[..]);
        device.flush().await.expect("flushed");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert_eq!((target.damages_pages.get(), &target.durable.borrow()[..4096]), (0, &data[..]));
    });
}

/// Until what has changed was read a target tells of nothing more.
#[test]
fn what_a_target_refuses_to_tell_is_asked_for_again() {
    for (seed, refusals) in [(1, 2), (2, 9)] {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            for round in 1..=2 {
                let data = pattern(round, 4096);
                write(&device, 0, &data).await.expect("written");
                target.refuses_changes.set(if round == 1 { refusals } else { 0 });
                target.reinsert(Duration::from_millis(50)).await;
                // Nothing is asked for meanwhile, by which it would be noticed as well.
                reactor::sleep(Duration::from_secs(20)).await;
                assert!(read(&device, 0, 4096).await.expect("read") == data[..]);
                device.flush().await.expect("flushed");
                assert_eq!(&target.durable.borrow()[..4096], &data[..]);
            }
        });
    }
}

/// A target that restarts shows another drive in the same place: names and sizes are those of the place.
#[test]
fn another_drive_under_the_same_name_is_not_taken_for_the_same() {
    // An older copy of the drive is as good as another one.
    for (seed, has_reservations, keeps_reservations, found) in [
        (1, true, true, 9),
        (2, true, false, 9),
        (3, false, false, 9),
        (4, true, true, 6),
        (5, true, false, 6),
        (6, false, false, 6),
    ] {
        run(seed, async {
            let mut target = Target::new();
            target.keeps_reservations = keeps_reservations;
            target.optional.set(OptionalCommands::RESERVATIONS, has_reservations);
            let (net, target, paths) = two_paths(target);
            let device = open(&net, &paths).await;
            device.fence(Epoch(3)).await.expect("nobody's");
            write(&device, 0, &Buf::copy_of(&[7; 4096])).await.expect("ours");
            device.flush().await.expect("flushed");
            let owner = |head: &[u8]| match head[0] {
                7 => Some(Epoch(3)),
                6 => Some(Epoch(2)),
                _ => None,
            };
            let (blocks, owner) = (vec![0], Rc::new(owner));
            device.recognise_by(Some(Witness { blocks, owner, is_there: true }));
            write(&device, 8192, &pattern(1, 4096)).await.expect("ours");
            for path in paths {
                net.down(path);
            }
            target.restart();
            target.cached.replace(vec![found; (BLOCKS * BLOCK_BYTES) as usize]);
            for path in paths {
                target.listen(&net, path);
            }
            assert_eq!(read(&device, 0, 4096).await, Err(BlockError::Gone));
            assert!(target.cached.borrow().iter().all(|byte| *byte == found), "nothing is written");
        });
    }
}

/// Without reservations only the drive itself tells of a later owner, to one that was cut off meanwhile.
#[test]
fn a_later_owner_is_recognised_where_there_are_no_reservations() {
    run(4, async {
        let mut target = Target::new();
        target.optional.remove(OptionalCommands::RESERVATIONS);
        let (net, target, paths) = two_paths(target);
        let owner = |head: &[u8]| Some(Epoch(u64::from(head[0])));
        let witness = || Some(Witness { blocks: vec![0], owner: Rc::new(owner), is_there: false });
        let first = open(&net, &paths[..1]).await;
        first.fence(Epoch(1)).await.expect("nobody's");
        first.recognise_by(witness());
        write(&first, 0, &Buf::copy_of(&[1; 4096])).await.expect("ours");
        first.flush().await.expect("flushed");
        write(&first, 8192, &pattern(1, 4096)).await.expect("ours, and not flushed");
        net.down(paths[0]);
        let second = open(&net, &paths[1..]).await;
        second.fence(Epoch(2)).await.expect("later");
        write(&second, 0, &Buf::copy_of(&[2; 4096])).await.expect("ours");
        write(&second, 8192, &pattern(2, 4096)).await.expect("ours");
        target.listen(&net, paths[0]);
        let fenced = BlockError::Fenced { ours: Epoch(1), seen: Epoch(2) };
        assert_eq!(write(&first, 4096, &pattern(3, 4096)).await, Err(fenced));
        reactor::sleep(Duration::from_secs(5)).await;
        assert_eq!(read(&second, 8192, 4096).await.expect("read"), pattern(2, 4096)[..]);
    });
}

/// A device that is opened anew while somebody still holds it as it was.
#[test]
fn what_is_abandoned_writes_nothing_again() {
    run(5, async {
        let mut target = Target::new();
        target.optional.remove(OptionalCommands::RESERVATIONS);
        let (net, target, paths) = two_paths(target);
        let earlier = open(&net, &paths).await;
        write(&earlier, 8192, &pattern(1, 4096)).await.expect("not flushed");
        for path in paths {
            net.down(path);
        }
        reactor::sleep(Duration::from_secs(31)).await;
        assert_eq!(read(&earlier, 0, 4096).await, Err(BlockError::Gone));
        for path in paths {
            target.listen(&net, path);
        }
        let anew = open(&net, &paths).await;
        anew.comes_after(earlier.changes());
        earlier.abandon();
        write(&anew, 8192, &pattern(2, 4096)).await.expect("ours");
        reactor::sleep(Duration::from_secs(10)).await;
        assert_eq!(read(&anew, 8192, 4096).await.expect("read"), pattern(2, 4096)[..]);
        assert_eq!(write(&earlier, 0, &pattern(3, 4096)).await, Err(BlockError::Gone));
    });
}

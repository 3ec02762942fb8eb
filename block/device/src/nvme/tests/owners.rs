//! Owners that come and go, and targets that forget them.

use super::namespace::{Namespace, open, open_as, pattern, read, run, two_paths, write};
use super::{address, options};
use crate::nvme::claim::Claimant;
use crate::nvme::host::Opening;
use crate::nvme::target::Target;
use crate::{BlockError, Device, Witness};
use futures_util::future::join;
use levada_base::Epoch;
use levada_base::reactor;
use levada_base::stream::MemoryNetwork;
use levada_nvme::log::{AnaState, Event};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Where owners leave their epoch, as superblocks do.
const MARK_BYTES: usize = 4096;

pub(super) fn witness() -> Witness {
    let owner = |bytes: &[u8]| Some(Epoch(u64::from(bytes[0]))).filter(|epoch| epoch.0 < 100);
    Witness { blocks: vec![0], owner: Rc::new(owner), is_there: false }
}

pub(super) fn mark(epoch: u8) -> levada_base::Buf {
    levada_base::Buf::copy_of(&[epoch; MARK_BYTES])
}

/// An owner was cut off with changes that it had not flushed, another one has taken over, and the target then restarts, so that it knows
/// neither. The first is the sooner to be back.
#[test]
fn a_former_owner_writes_nothing_again() {
    for (seed, has_witness, keeps_reservations) in
        [(1, true, false), (2, false, false), (3, false, true)]
    {
        run(seed, async {
            let mut target = Target::new();
            target.keeps_reservations = keeps_reservations;
            let (net, target, paths) = two_paths(target);
            let first = open(&net, &paths[..1]).await;
            let second = open(&net, &paths[1..]).await;
            if has_witness {
                first.recognise_by(Some(witness()));
            }
            second.recognise_by(Some(witness()));
            first.fence(Epoch(4)).await.expect("nobody's");
            write(&first, 0, &mark(4)).await.expect("ours");
            first.flush().await.expect("flushed");
            write(&first, 8192, &pattern(1, 4096)).await.expect("ours");
            net.down(paths[0]);
            second.fence(Epoch(5)).await.expect("later");
            write(&second, 0, &mark(5)).await.expect("ours");
            write(&second, 8192, &pattern(2, 4096)).await.expect("ours");
            second.flush().await.expect("flushed");
            net.down(paths[1]);
            target.restart();
            target.listen(&net, paths[0]);
            reactor::sleep(Duration::from_secs(5)).await;
            let fenced = BlockError::Fenced { ours: Epoch(4), seen: Epoch(5) };
            let is_known = has_witness || keeps_reservations;
            let expected = if is_known { fenced } else { BlockError::Gone };
            assert_eq!(write(&first, 8192, &pattern(3, 4096)).await, Err(expected.clone()));
            assert_eq!(first.flush().await, Err(expected));
            target.listen(&net, paths[1]);
            assert_eq!(read(&second, 8192, 4096).await.expect("read"), pattern(2, 4096)[..]);
            write(&second, 8192, &pattern(4, 4096)).await.expect("ours");
            assert_eq!(target.keys.borrow().len(), 1);
        });
    }
}

/// One that only reads meets no conflict: the target says so by itself.
#[test]
fn an_owner_that_only_reads_is_told_of_the_next() {
    run(9, async {
        let (net, target, paths) = two_paths(Target::new());
        let (first, second) = (open(&net, &paths).await, open(&net, &paths).await);
        first.fence(Epoch(4)).await.expect("nobody's");
        write(&first, 0, &pattern(1, 4096)).await.expect("ours");
        second.fence(Epoch(5)).await.expect("later");
        read(&first, 0, 4096).await.expect("nobody has told it");
        target.tell(Event::ReservationNotice);
        reactor::sleep(Duration::from_millis(100)).await;
        let fenced = BlockError::Fenced { ours: Epoch(4), seen: Epoch(5) };
        assert_eq!(read(&first, 0, 4096).await.err(), Some(fenced));
        read(&second, 0, 4096).await.expect("ours");
        write(&second, 0, &pattern(2, 4096)).await.expect("ours");
    });
}

/// The only owner there is goes on when its target has forgotten it, if the drive says so.
#[test]
fn an_owner_outlives_a_target_that_forgets_it() {
    for (seed, marked, expected) in [
        (4, Some(7), Ok(())),
        (5, Some(6), Err(BlockError::Gone)),
        (6, Some(8), Err(BlockError::Fenced { ours: Epoch(7), seen: Epoch(8) })),
        (7, None, Err(BlockError::Gone)),
    ] {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            device.recognise_by(Some(witness()));
            device.fence(Epoch(7)).await.expect("nobody's");
            if let Some(marked) = marked {
                write(&device, 0, &mark(marked)).await.expect("ours");
            }
            device.flush().await.expect("flushed");
            write(&device, 8192, &pattern(1, 4096)).await.expect("ours");
            for path in paths {
                net.down(path);
            }
            target.restart();
            for path in paths {
                target.listen(&net, path);
            }
            assert_eq!(device.flush().await, expected);
            let is_there = target.durable.borrow()[8192..12_288] == pattern(1, 4096)[..];
            assert_eq!(is_there, expected.is_ok());
            assert_eq!(target.holder.get().is_some(), expected.is_ok());
            if expected.is_ok() {
                // Another one is kept out as before.
                let other = open(&net, &paths).await;
                let conflict = write(&other, 0, &mark(1)).await;
                assert_eq!(conflict, Err(BlockError::Fenced { ours: Epoch(0), seen: Epoch(7) }));
            }
        });
    }
}

/// Once fenced, always fenced: also when nobody has the reservation any more.
#[test]
fn who_has_met_a_later_owner_stays_out() {
    run(8, async {
        let (net, target, paths) = two_paths(Target::new());
        let first = open(&net, &paths[..1]).await;
        let second = open(&net, &paths[1..]).await;
        first.recognise_by(Some(witness()));
        first.fence(Epoch(4)).await.expect("nobody's");
        write(&first, 0, &mark(4)).await.expect("ours");
        second.fence(Epoch(5)).await.expect("later");
        let fenced = Err(BlockError::Fenced { ours: Epoch(4), seen: Epoch(5) });
        assert_eq!(write(&first, 8192, &pattern(1, 4096)).await, fenced);
        target.keys.borrow_mut().clear();
        target.holder.set(None);
        assert_eq!(write(&first, 8192, &pattern(1, 4096)).await, fenced);
        assert_eq!(first.fence(Epoch(9)).await, fenced);
        // What it had not flushed is not written again.
        target.lose_cache();
        net.reset(paths[0]);
        reactor::sleep(Duration::from_secs(2)).await;
        assert_eq!(read(&second, 0, 512).await, Ok(vec![0; 512]));
    });
}

/// Opened by another process.
async fn open_elsewhere(net: &MemoryNetwork, paths: &[SocketAddr]) -> Namespace {
    let mut options = options();
    options.host.process = reactor::random_u64().to_le_bytes();
    open_as(net, paths, options).await
}

/// What a process had opened before gives way to what it opens now, and does not come back.
#[test]
fn a_namespace_can_be_opened_anew() {
    run(9, async {
        let (net, target, paths) = two_paths(Target::new());
        let first = open(&net, &paths).await;
        first.recognise_by(Some(witness()));
        first.fence(Epoch(4)).await.expect("nobody's");
        write(&first, 0, &mark(4)).await.expect("ours");
        let again = open(&net, &paths).await;
        again.fence(Epoch(4)).await.expect("ours all the same");
        write(&again, 8192, &pattern(1, 4096)).await.expect("ours");
        assert!(!first.is_given_up());
        for path in paths {
            net.reset(path);
        }
        reactor::sleep(Duration::from_secs(2)).await;
        assert!(first.is_given_up() && !again.is_given_up());
        write(&again, 8192, &pattern(2, 4096)).await.expect("ours");
        assert_eq!(target.keys.borrow().len(), 2);
    });
}

/// Two that choose the same epoch: one of them has it.
#[test]
fn an_epoch_has_one_owner() {
    for seed in 20..40 {
        run(seed, async {
            let (net, _target, paths) = two_paths(Target::new());
            let old = open(&net, &paths).await;
            old.fence(Epoch(5)).await.expect("nobody's");
            let (one, other) = (open_elsewhere(&net, &paths).await, open(&net, &paths).await);
            let fencing = async |device: &Namespace| {
                reactor::sleep(Duration::from_micros(reactor::random_u64() % 500)).await;
                device.fence(Epoch(6)).await
            };
            let (first, second) = join(fencing(&one), fencing(&other)).await;
            let fenced = Err(BlockError::Fenced { ours: Epoch(6), seen: Epoch(6) });
            match first.is_ok() {
                true => assert_eq!(second, fenced),
                false => assert_eq!((first, second), (fenced, Ok(()))),
            }
            // Nor is it to be had afterwards, but the next one is.
            let third = open_elsewhere(&net, &paths).await;
            assert!(third.fence(Epoch(6)).await.is_err());
            third.fence(Epoch(7)).await.expect("later");
        });
    }
}

/// A path is lost with a change under way, which the target carries out later. The owner overwrites it as soon as the target has ended
/// that, and nothing is undone.
#[test]
fn what_was_lost_is_over_when_its_connection_is_preempted() {
    for (seed, late_ms, is_only_path) in (0..20).flat_map(|at| [(at, 500, false), (at, 1500, true)])
    {
        run(seed, async {
            let (net, target, all) = two_paths(Target::new());
            let paths = if is_only_path { &all[..1] } else { &all[..] };
            let device = open(&net, paths).await;
            device.recognise_by(Some(witness()));
            reactor::sleep(Duration::from_millis(10)).await;
            device.fence(Epoch(4)).await.expect("nobody's");
            write(&device, 0, &mark(4)).await.expect("ours");
            target.states.borrow_mut().insert(all[1], AnaState::NonOptimized);
            target.tell(Event::AnaChanged);
            reactor::sleep(Duration::from_millis(10)).await;
            target.late.set(Duration::from_secs(4) + Duration::from_millis(late_ms));
            let (first, second) = (pattern(1, 4096), pattern(2, 4096));
            let begun = reactor::now();
            let cut = async {
                reactor::sleep(Duration::from_millis(100)).await;
                target.late.set(Duration::ZERO);
                net.swallow(all[0]);
                if is_only_path {
                    reactor::sleep(Duration::from_secs(1)).await;
                    target.listen(&net, all[0]);
                }
            };
            let (written, ()) = join(write(&device, 8192, &first), cut).await;
            written.expect("again, elsewhere");
            write(&device, 8192, &second).await.expect("written");
            let took = begun.elapsed();
            // Not before the late one has landed, and not much later.
            let landed = Duration::from_secs(4) + Duration::from_millis(late_ms);
            assert!(took >= landed && took < landed + Duration::from_secs(1), "{took:?}");
            reactor::sleep(Duration::from_secs(30)).await;
            assert_eq!(read(&device, 8192, 4096).await.expect("read"), second[..]);
            assert_eq!(target.keys.borrow().len(), 1, "the other path is away");
        });
    }
}

/// What becomes of reservations while nobody is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nothing,
    /// Nothing, and somebody else registers when they are taken again.
    NothingAndOthers,
    /// Who is registered: those may write.
    Registrants,
}

/// A change is under way when the target loses its power, and with it its reservations: nobody can be preempted. Ours answers who acquires
/// the reservation again once the change has ended, unless others came in between; of other targets nothing is known. Nor is anything of a
/// connection that is still registered: it may write, and is preempted.
#[test]
fn what_was_lost_is_over_when_the_reservation_is_acquired_again() {
    let (landed, settled) = (Duration::from_secs(6), options().timing.settle(1000));
    for (at, (is_own, left, over)) in [
        (true, Left::Nothing, landed),
        (false, Left::Nothing, settled),
        (true, Left::NothingAndOthers, settled),
        (true, Left::Registrants, landed),
        (false, Left::Registrants, landed),
    ]
    .into_iter()
    .enumerate()
    {
        run(at as u64, async {
            let mut target = Target::new();
            target.is_own = is_own;
            target.is_busy.set(left == Left::NothingAndOthers);
            let (net, target, all) = two_paths(target);
            let paths = if left == Left::Registrants { &all[..1] } else { &all[..] };
            let device = open(&net, paths).await;
            device.recognise_by(Some(witness()));
            device.fence(Epoch(4)).await.expect("nobody's");
            write(&device, 0, &mark(4)).await.expect("ours");
            device.flush().await.expect("flushed");
            target.late.set(landed);
            let (first, second) = (pattern(1, 4096), pattern(2, 4096));
            let begun = reactor::now();
            let cut = async {
                reactor::sleep(Duration::from_millis(100)).await;
                target.late.set(Duration::ZERO);
                for path in paths {
                    net.down(*path);
                }
                match left {
                    Left::Registrants => target.holder.set(None),
                    Left::Nothing | Left::NothingAndOthers => target.restart(),
                }
                reactor::sleep(Duration::from_secs(1)).await;
                for path in paths {
                    target.listen(&net, *path);
                }
            };
            let (written, ()) = join(write(&device, 8192, &first), cut).await;
            written.expect("again");
            write(&device, 8192, &second).await.expect("written");
            let took = begun.elapsed();
            let is_in_time = took >= over && took < over + Duration::from_secs(1);
            assert!(is_in_time, "{is_own} {left:?}: {took:?}");
            reactor::sleep(Duration::from_secs(30)).await;
            assert_eq!(read(&device, 8192, 4096).await.expect("read"), second[..]);
        });
    }
}

/// A drive loses its power and with it its reservations, while its controllers stay. A connection with a change under way asks to be registered
/// again, and is lost before that is answered: the target may come to it later, and then lets through what came behind it. That another
/// connection acquires the reservation does not end what was lost, even with our own target; had it been answered, its preemption would.
#[test]
fn a_registration_without_an_answer_settles_nothing() {
    let (landed, settled) = (Duration::from_secs(6), options().timing.settle(1000));
    for (is_answered, over) in [(false, settled), (true, landed)] {
        run(60, async {
            let mut target = Target::new();
            target.is_own = true;
            let (net, target, paths) = two_paths(target);
            let device = open(&net, &paths).await;
            device.recognise_by(Some(witness()));
            reactor::sleep(Duration::from_millis(10)).await;
            device.fence(Epoch(4)).await.expect("nobody's");
            write(&device, 0, &mark(4)).await.expect("ours");
            device.flush().await.expect("flushed");
            // The first asks before the other.
            target.set_state(paths[1], AnaState::Inaccessible);
            reactor::sleep(Duration::from_millis(10)).await;
            target.late.set(landed);
            let (first, second) = (pattern(1, 4096), pattern(2, 4096));
            let begun = reactor::now();
            let cut = async {
                reactor::sleep(Duration::from_millis(100)).await;
                target.late.set(Duration::ZERO);
                target.registers_nobody_at.set((!is_answered).then_some(paths[0]));
                target.forget_owners();
                target.reinsert(Duration::from_millis(50)).await;
                reactor::sleep(Duration::from_millis(50)).await;
                assert_eq!(target.keys.borrow().len(), usize::from(is_answered));
                net.down(paths[0]);
                target.set_state(paths[1], AnaState::Optimized);
            };
            let (written, ()) = join(write(&device, 8192, &first), cut).await;
            written.expect("again, elsewhere");
            write(&device, 8192, &second).await.expect("written");
            let took = begun.elapsed();
            let is_in_time = took >= over && took < over + Duration::from_secs(1);
            assert!(is_in_time, "{is_answered}: {took:?}");
            assert_eq!(target.keys.borrow().len(), 1, "the other path is away");
            reactor::sleep(Duration::from_secs(30)).await;
            assert_eq!(read(&device, 8192, 4096).await.expect("read"), second[..]);
        });
    }
}

/// The answer to a preemption is lost: that the connection is no longer registered does not mean that it has ended.
#[test]
fn a_preemption_without_an_answer_proves_nothing() {
    run(50, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        device.fence(Epoch(4)).await.expect("nobody's");
        target.states.borrow_mut().insert(paths[1], AnaState::NonOptimized);
        target.tell(Event::AnaChanged);
        reactor::sleep(Duration::from_millis(10)).await;
        target.late.set(Duration::from_secs(12));
        let (first, second) = (pattern(1, 4096), pattern(2, 4096));
        let cut = async {
            reactor::sleep(Duration::from_millis(100)).await;
            target.late.set(Duration::ZERO);
            net.reset(paths[0]);
            // It is preempted over the other path, where no answer comes.
            reactor::sleep(Duration::from_millis(50)).await;
            net.reset(paths[1]);
        };
        let begun = reactor::now();
        let (written, ()) = join(write(&device, 8192, &first), cut).await;
        written.expect("again");
        write(&device, 8192, &second).await.expect("written");
        assert!(begun.elapsed() > Duration::from_secs(12), "{:?}", begun.elapsed());
        reactor::sleep(Duration::from_secs(30)).await;
        assert_eq!(read(&device, 8192, 4096).await.expect("read"), second[..]);
    });
}

/// Paths come and go; each connection is registered, and none that is gone.
#[test]
fn connections_that_are_gone_are_registered_no_more() {
    for seed in 60..80 {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            device.fence(Epoch(4)).await.expect("nobody's");
            for round in 0..20_u64 {
                let path = paths[(reactor::random_u64() % 2) as usize];
                match reactor::random_u64() % 3 {
                    0 => net.reset(path),
                    1 => {
                        net.swallow(path);
                        reactor::sleep(Duration::from_secs(1)).await;
                        target.listen(&net, path);
                    }
                    _ => device.fence(Epoch(4 + round)).await.expect("ours"),
                }
                let data = pattern(round, 4096);
                write(&device, round % 3 * 4096, &data).await.expect("ours");
                reactor::sleep(Duration::from_millis(reactor::random_u64() % 700)).await;
            }
            reactor::sleep(Duration::from_secs(8)).await;
            write(&device, 0, &pattern(1, 4096)).await.expect("ours");
            assert_eq!(target.keys.borrow().len(), 2);
            assert_eq!(device.held_back(), 0, "one at a time");
            // A later owner takes it from both.
            let later = open(&net, &paths).await;
            later.fence(Epoch(100)).await.expect("later");
            let written = write(&device, 0, &pattern(1, 4096)).await;
            assert!(matches!(written, Err(BlockError::Fenced { seen: Epoch(100), .. })));
            reactor::sleep(Duration::from_millis(10)).await;
            assert_eq!(target.keys.borrow().len(), 2);
        });
    }
}

/// The former owner writes on and connects again all the time, while another takes over: nothing of it comes after.
#[test]
fn a_former_owner_that_reconnects_writes_nothing_either() {
    for seed in 100..180 {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let first = open(&net, &paths).await;
            first.fence(Epoch(4)).await.expect("nobody's");
            let second = open_elsewhere(&net, &paths).await;
            let at_once = |limit: u64| Duration::from_micros(reactor::random_u64() % limit);
            let writing = async {
                for round in 0.. {
                    let written = write(&first, 0, &pattern(round, 4096)).await;
                    reactor::sleep(at_once(1000)).await;
                    written?;
                }
                Ok(())
            };
            let flapping = async {
                for _ in 0..30 {
                    net.reset(paths[(reactor::random_u64() % 2) as usize]);
                    reactor::sleep(at_once(60_000)).await;
                }
            };
            let taking = async {
                reactor::sleep(at_once(1_000_000)).await;
                target.late.set(at_once(5000));
                second.fence(Epoch(5)).await.expect("later");
                target.late.set(Duration::ZERO);
                for round in 0..100 {
                    let data = pattern(1000 + round, 4096);
                    write(&second, 0, &data).await.expect("ours");
                    reactor::sleep(at_once(2000)).await;
                    assert_eq!(read(&second, 0, 4096).await.expect("read"), data[..]);
                }
            };
            let (written, ((), ())) = join(writing, join(flapping, taking)).await;
            let fenced = BlockError::Fenced { ours: Epoch(4), seen: Epoch(5) };
            assert_eq!(written, Err(fenced));
            reactor::sleep(Duration::from_secs(5)).await;
            assert_eq!(target.keys.borrow().len(), 2);
        });
    }
}

/// A target that waits for those whom an order preempts, as the specification has it, and one that waits for all who may not write any more.
fn both_kinds() -> [Target; 2] {
    [false, true].map(|is_own| {
        let mut target = Target::new();
        target.is_own = is_own;
        target
    })
}

/// The former owner writes, which ends late. Meanwhile `take` lets another one take over, over a network that fails as it has it, and that one
/// writes there: its data are there in the end, whatever target it is.
fn whoever_takes_over_writes_last(
    seeds: Range<u64>,
    take: impl AsyncFn(&MemoryNetwork, SocketAddr, &Namespace),
    of_the_former: impl Fn(Result<(), BlockError>),
) {
    for (seed, target) in seeds.flat_map(|seed| both_kinds().map(|target| (seed, target))) {
        run(seed, async {
            let (net, target, paths) = two_paths(target);
            let former = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            former.fence(Epoch(4)).await.expect("nobody's");
            let owner = open_elsewhere(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            let (old, new) = (pattern(1, 4096), pattern(2, 4096));
            target.late.set(Duration::from_secs(8));
            let taking = async {
                reactor::sleep(Duration::from_millis(20)).await;
                target.late.set(Duration::ZERO);
                take(&net, paths[0], &owner).await;
                write(&owner, 8192, &new).await.expect("ours");
            };
            let (written, ()) = join(write(&former, 8192, &old), taking).await;
            of_the_former(written);
            reactor::sleep(Duration::from_secs(30)).await;
            assert!(read(&owner, 8192, 4096).await.expect("read") == new[..]);
        });
    }
}

/// The answer to the preemption of the former owner is lost, and over another path it is not registered any more: the new owner may not begin
/// before its change has ended all the same.
#[test]
fn a_takeover_without_an_answer_waits_for_what_the_former_owner_has_under_way() {
    let take = async |net: &MemoryNetwork, path, owner: &Namespace| {
        let cut = async {
            reactor::sleep(Duration::from_millis(20)).await;
            net.reset(path);
        };
        join(owner.fence(Epoch(5)), cut).await.0.expect("later");
    };
    whoever_takes_over_writes_last(200..210, take, drop);
}

/// The former owner has lost a connection with a change under way, and is having it preempted. Who takes over now finds that connection
/// registered no more, and waits for the change all the same.
#[test]
fn a_takeover_waits_for_what_the_former_owner_is_having_preempted() {
    let take = async |net: &MemoryNetwork, path, owner: &Namespace| {
        net.reset(path);
        reactor::sleep(Duration::from_millis(20)).await;
        owner.fence(Epoch(5)).await.expect("later");
    };
    whoever_takes_over_writes_last(210..220, take, |written| {
        written.expect("again, over the other path");
    });
}

/// Another server chose the same epoch, gave way, and left a registration behind. When that is taken away, no connection of the owner is.
#[test]
fn what_a_rival_left_behind_is_taken_away_alone() {
    for seed in 210..220 {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            device.fence(Epoch(4)).await.expect("nobody's");
            // It has had as many connections as the owner.
            let opening = Opening::at([7; 12]);
            for connection in [1, 2] {
                let rival = Claimant { opening, host: opening.id(connection), epoch: Epoch(4) };
                target.keys.borrow_mut().insert(rival.host, rival.key());
            }
            net.reset(paths[0]);
            reactor::sleep(Duration::from_secs(2)).await;
            assert_eq!(target.keys.borrow().len(), 2, "the owner's");
            net.down(paths[0]);
            write(&device, 8192, &pattern(1, 4096)).await.expect("ours");
        });
    }
}

/// A path was away for so long that numbers begin anew: the next connection's key is none that is in use.
#[test]
fn keys_are_used_again_only_when_nobody_has_them() {
    for seed in 220..230 {
        run(seed, async {
            let (net, target, first) = two_paths(Target::new());
            let third = address(3);
            target.listen(&net, third);
            let paths = [first[0], first[1], third];
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            device.fence(Epoch(4)).await.expect("nobody's");
            for number in 0..3 {
                device.shared().last_connection.set((1 << 16) + number);
                net.reset(paths[0]);
                reactor::sleep(Duration::from_secs(2)).await;
                let keys: BTreeSet<u64> = target.keys.borrow().values().copied().collect();
                assert_eq!(keys.len(), 3);
                net.down(paths[0]);
                reactor::sleep(Duration::from_secs(2)).await;
                for path in [paths[1], paths[2]] {
                    target.set_state(path, AnaState::NonOptimized);
                    reactor::sleep(Duration::from_millis(10)).await;
                    write(&device, 8192, &pattern(1, 4096)).await.expect("ours");
                    target.set_state(path, AnaState::Optimized);
                }
                target.listen(&net, paths[0]);
                reactor::sleep(Duration::from_secs(10)).await;
            }
        });
    }
}

/// All paths are lost, at once or one after the other, with a change under way that the target takes long for. What has nothing to do with
/// that goes on.
#[test]
fn a_change_that_takes_long_keeps_nobody_else_waiting() {
    for (seed, target) in (230..240).flat_map(|seed| both_kinds().map(|target| (seed, target))) {
        run(seed, async {
            let (net, target, paths) = two_paths(target);
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            device.fence(Epoch(4)).await.expect("nobody's");
            let (first, second) = (pattern(1, 4096), pattern(2, 4096));
            write(&device, 0, &first).await.expect("not flushed");
            target.late.set(Duration::from_secs(40));
            let going_on = async {
                reactor::sleep(Duration::from_millis(100)).await;
                target.late.set(Duration::ZERO);
                for path in paths {
                    net.reset(path);
                    reactor::sleep(Duration::from_secs(seed % 2)).await;
                }
                let begun = reactor::now();
                assert!(read(&device, 0, 4096).await.expect("read") == first[..]);
                write(&device, 4096, &first).await.expect("written");
                assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
            };
            let (written, ()) = join(write(&device, 8192, &second), going_on).await;
            written.expect("again");
        });
    }
}

//! What a namespace promises as a device, with paths that come and go.

use super::{address, options};
use crate::nvme::discovery::discover;
use crate::nvme::target::{BLOCK_BYTES, BLOCKS, NQN, Target};
use crate::nvme::{Host, NamespaceError, NvmeNamespace, Options, Standing};
use crate::{BlockError, Device, Durability, Warnings};
use futures_util::future::join;
use levada_base::reactor::{self, Reactor};
use levada_base::stream::MemoryNetwork;
use levada_base::{Buf, BufMut, Epoch, IoVec, IoVecMut};
use levada_nvme::identify::{CommandLimits, Events, OptionalCommands};
use levada_nvme::log::{AnaState, DiscoveryEntry, Event};
use levada_nvme::pdu::Digests;
use levada_nvme::{IoOpcode, Nqn, Status};
use proptest::prelude::*;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

pub(super) type Namespace = NvmeNamespace<MemoryNetwork>;

pub(super) async fn open_as(
    net: &MemoryNetwork,
    paths: &[SocketAddr],
    options: Options,
) -> Namespace {
    let nqn = Nqn::new(NQN).expect("a name");
    let opened = Namespace::open_on(net.clone(), paths, nqn, 0, options, "box".into()).await;
    opened.unwrap_or_else(|error| panic!("{error}"))
}

pub(super) async fn open(net: &MemoryNetwork, paths: &[SocketAddr]) -> Namespace {
    open_as(net, paths, options()).await
}

/// A target at two addresses.
pub(super) fn two_paths(target: Target) -> (MemoryNetwork, Rc<Target>, [SocketAddr; 2]) {
    let (net, target) = (MemoryNetwork::default(), Rc::new(target));
    let paths = [address(1), address(2)];
    for path in paths {
        target.listen(&net, path);
    }
    (net, target, paths)
}

pub(super) fn pattern(seed: u64, bytes: usize) -> Buf {
    let mut buf = BufMut::for_overwrite(bytes);
    for (at, byte) in buf.iter_mut().enumerate() {
        let at = at as u64;
        *byte = seed.wrapping_mul(31).wrapping_add(at * 7 + at / 251) as u8;
    }
    buf.freeze()
}

pub(super) async fn write(device: &Namespace, at: u64, data: &Buf) -> Result<(), BlockError> {
    device.write(at, data.clone().into_vec(), Durability::Volatile).await
}

pub(super) async fn read(device: &Namespace, at: u64, bytes: usize) -> Result<Vec<u8>, BlockError> {
    // Old bytes, which must all be replaced.
    let mut into = BufMut::for_overwrite(bytes);
    into.fill(0xee);
    Ok(device.read(at, into.into_vec()).await?.iter().flat_map(|part| part.to_vec()).collect())
}

pub(super) fn run<T>(seed: u64, test: impl Future<Output = T>) -> T {
    Reactor::simulated(seed).block_on(test)
}

#[test]
fn everything_a_device_does() {
    for seed in 0..8 {
        run(seed, async {
            let mut target = Target::new();
            target.has_success_flag = seed & 1 != 0;
            let (net, target, paths) = two_paths(target);
            let digests = Digests { header: seed & 2 != 0, data: seed & 4 != 0 };
            let device = open_as(&net, &paths, Options { digests, queues: 3, ..options() }).await;
            assert_eq!(device.info().capacity_bytes, BLOCKS * BLOCK_BYTES);
            assert_eq!(device.info().io_bytes_best, 64 << 10);
            // Within a command, on request, and cut.
            for bytes in [512, 4096, 8192, 65_536, 200_704] {
                let data = pattern(bytes, bytes as usize);
                write(&device, 1024, &data).await.expect("written");
                assert_eq!(read(&device, 1024, bytes as usize).await.expect("read"), data[..]);
            }
            device.flush().await.expect("flushed");
            assert_eq!(*target.cached.borrow(), *target.durable.borrow());
            device.discard(1024, 4096).await.expect("discarded");
            device.write_zeroes(8192, 65_536).await.expect("zeroed");
            assert_eq!(read(&device, 8192, 65_536).await.expect("read"), [0; 65_536]);
            let data = pattern(5, 4096);
            let fua = device.write(0, data.clone().into_vec(), Durability::Fua).await;
            fua.expect("written");
            assert_eq!(target.durable.borrow()[..4096], data[..]);
            assert_eq!(
                read(&device, BLOCKS * BLOCK_BYTES, 512).await,
                Err(BlockError::OutOfRange {
                    at: BLOCKS * BLOCK_BYTES,
                    bytes: 512,
                    capacity_bytes: BLOCKS * BLOCK_BYTES
                })
            );
            assert!(!device.health().failing, "nobody has looked");
            let page = device.look_at_health().await.expect("told");
            assert_eq!(page.warnings, Warnings::RELIABILITY);
            assert!(device.health().failing);
            device.close().await;
        });
    }
}

/// Which ends the I/O queues first, and flushes then.
#[test]
fn who_closes_a_drive_hears_that_its_target_is_done() {
    run(2, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths[..1]).await;
        target.ends_queues.set(true);
        target.flush_takes.set(Duration::from_millis(300));
        device.close().await;
        assert_eq!(target.told_shut_down.get(), 1);
    });
}

/// What a target does not tell of a drive's health is no reason to leave it.
#[test]
fn a_drive_that_warns_and_says_no_more_stays() {
    run(3, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        let controllers = target.controllers();
        target.hides_health.set(true);
        target.tell(Event::Unreliable);
        reactor::sleep(Duration::from_secs(10)).await;
        read(&device, 0, 512).await.expect("read");
        assert_eq!(target.controllers(), controllers, "nothing was connected anew");
    });
}

#[test]
fn a_drive_that_begins_to_warn_is_noticed_at_once() {
    for refuses_warnings in [false, true] {
        run(1, async {
            let mut target = Target::new();
            target.refuses_warnings = refuses_warnings;
            let (net, target, paths) = two_paths(target);
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            let others = Events::ANA | Events::NAMESPACES;
            let wanted = if refuses_warnings { others } else { others | Events::WARNINGS };
            assert_eq!(target.wanted.get(), wanted);
            for event in [Event::LowSpare, Event::Temperature, Event::Unreliable] {
                let warned = device.warned();
                target.tell(event);
                let noticed = reactor::timeout(Duration::from_secs(1), warned).await;
                noticed.expect("at once");
                // Until all paths are listening again.
                reactor::sleep(Duration::from_millis(10)).await;
            }
            // Other events say nothing of health.
            let warned = device.warned();
            target.tell(Event::AnaChanged);
            assert!(reactor::timeout(Duration::from_secs(1), warned).await.is_err());
            device.close().await;
        });
    }
}

#[test]
fn what_a_target_lacks_is_done_without() {
    run(1, async {
        let mut target = Target::new();
        target.optional = OptionalCommands::empty();
        let (net, _, paths) = two_paths(target);
        let device = open(&net, &paths).await;
        let data = pattern(1, 131_072);
        write(&device, 0, &data).await.expect("written");
        device.discard(0, 4096).await.expect("nothing to do");
        device.write_zeroes(4096, 100 * 512).await.expect("written");
        let found = read(&device, 0, 131_072).await.expect("read");
        assert_eq!(found[..4096], data[..4096]);
        assert!(found[4096..4096 + 51_200].iter().all(|byte| *byte == 0));
        assert_eq!(found[4096 + 51_200..], data[4096 + 51_200..]);
        device.fence(Epoch(3)).await.expect("on this side");
        let older = device.fence(Epoch(2)).await;
        assert_eq!(older, Err(BlockError::Fenced { ours: Epoch(2), seen: Epoch(3) }));
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Changes of the same few blocks, many at once, while the target restarts: whatever was there after they were confirmed is there after
    /// the last flush.
    #[test]
    fn restarts_change_nothing(
        seed in any::<u64>(),
        rounds in prop::collection::vec(
            prop::collection::vec((0_u64..6, 1_u64..4, 0_u8..4, any::<u8>()), 1..6), 1..8
        ),
        restarts in prop::collection::vec(any::<bool>(), 8),
    ) {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            for (round, restarts) in rounds.iter().zip(restarts) {
                let all = round.iter().map(|&(block, blocks, kind, byte)| {
                    let (at, bytes) = (block * 512, blocks * 512);
                    let data = Buf::copy_of(&vec![byte; bytes as usize]).into_vec();
                    match kind {
                        0 => device.write_zeroes(at, bytes),
                        1 => device.write(at, data, Durability::Fua),
                        _ => device.write(at, data, Durability::Volatile),
                    }
                });
                futures_util::future::try_join_all(all).await.expect("changed");
                let before = read(&device, 0, 5120).await.expect("read");
                if restarts {
                    for path in paths {
                        net.down(path);
                    }
                    target.restart();
                    for path in paths {
                        target.listen(&net, path);
                    }
                }
                assert_eq!(read(&device, 0, 5120).await.expect("read"), before);
            }
            device.flush().await.expect("flushed");
            let after = read(&device, 0, 5120).await.expect("read");
            assert_eq!(target.durable.borrow()[..5120], after[..]);
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Buffers of any shape come back as they were, filled, and without a piece of anything else.
    #[test]
    fn buffers_of_any_shape(
        seed in any::<u64>(),
        parts in prop::collection::vec(1_usize..90, 1..6),
        unit_bytes in 1_usize..30_000,
        has_digest in any::<bool>(),
    ) {
        run(seed, async {
            let mut target = Target::new();
            target.unit_bytes = unit_bytes.max(300);
            let (net, _, paths) = two_paths(target);
            let digests = Digests { header: has_digest, data: has_digest };
            let device = open_as(&net, &paths[..1], Options { digests, ..options() }).await;
            let bytes: usize = parts.iter().sum::<usize>() * 512;
            let data = pattern(seed, bytes);
            let mut from = IoVec::new();
            let mut into = IoVecMut::new();
            let mut at = 0;
            for blocks in &parts {
                from.push(data.slice(at, blocks * 512));
                into.push(BufMut::for_overwrite(blocks * 512));
                at += blocks * 512;
            }
            let places: Vec<_> = into.iter().map(|part| (part.as_ptr(), part.len())).collect();
            device.write(512, from, Durability::Volatile).await.expect("written");
            let found = device.read(512, into).await.expect("read");
            let back: Vec<_> = found.iter().map(|part| (part.as_ptr(), part.len())).collect();
            assert_eq!(places, back);
            let found: Vec<u8> = found.iter().flat_map(|part| part.to_vec()).collect();
            assert_eq!(found, data[..]);
        });
    }
}

/// A write that was lost with its path is carried out by the target much later: after it was sent again on another path, and after
/// later writes of the same blocks were asked for.
#[test]
fn a_late_write_undoes_nothing() {
    for seed in 0..20 {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            target.states.borrow_mut().insert(paths[1], AnaState::NonOptimized);
            target.tell(Event::AnaChanged);
            reactor::sleep(Duration::from_millis(10)).await;
            target.late.set(Duration::from_secs(8));
            let (first, second) = (pattern(1, 4096), pattern(2, 4096));
            let begun = reactor::now();
            let cut = async {
                reactor::sleep(Duration::from_millis(100)).await;
                target.late.set(Duration::ZERO);
                net.swallow(paths[0]);
            };
            let (written, ()) = join(write(&device, 8192, &first), cut).await;
            written.expect("on the other path");
            assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
            assert_eq!(read(&device, 8192, 4096).await.expect("read"), first[..]);
            // Elsewhere at once; there only when nothing can happen any more.
            let begun = reactor::now();
            write(&device, 4096, &second).await.expect("written");
            assert!(begun.elapsed() < Duration::from_secs(1));
            write(&device, 8192, &second).await.expect("written");
            assert!(begun.elapsed() > Duration::from_secs(10));
            reactor::sleep(Duration::from_secs(30)).await;
            assert_eq!(
                target.came(IoOpcode::Write).iter().filter(|path| **path == paths[0]).count(),
                1
            );
            assert_eq!(read(&device, 8192, 4096).await.expect("read"), second[..]);
        });
    }
}

/// A target restarts, and has lost what it had not made durable: nothing that it confirmed is missing afterwards.
#[test]
fn what_was_not_flushed_is_written_again() {
    for seed in 0..20 {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            let (first, second, third) = (pattern(1, 8192), pattern(2, 8192), pattern(3, 4096));
            write(&device, 0, &first).await.expect("written");
            device.flush().await.expect("flushed");
            write(&device, 4096, &second).await.expect("written");
            write(&device, 8192, &third).await.expect("written");
            device.write_zeroes(10_240, 512).await.expect("zeroed");
            // Durable at once, over something that is not, which must not come back.
            let last = first.slice(0, 512).into_vec();
            device.write(11_264, last, Durability::Fua).await.expect("written");
            // Both paths at once, or one after the other has come back to what was restarted.
            for path in paths {
                net.down(path);
            }
            target.restart();
            reactor::sleep(Duration::from_secs(1)).await;
            for path in paths {
                target.listen(&net, path);
            }
            device.flush().await.expect("flushed");
            let mut expected = third.to_vec();
            expected[2048..2560].fill(0);
            expected[3072..3584].copy_from_slice(&first[..512]);
            let expected = [&first[..4096], &second[..4096], &expected[..]].concat();
            assert_eq!(target.durable.borrow()[..12_288], expected[..]);
            // A path that comes back beside one that was there all along has missed nothing.
            reactor::sleep(Duration::from_secs(3)).await;
            let writes = target.came(IoOpcode::Write).len();
            write(&device, 0, &third).await.expect("written");
            net.reset(paths[0]);
            reactor::sleep(Duration::from_secs(3)).await;
            assert_eq!(device.paths()[0].standing, Standing::Optimized);
            assert_eq!(target.came(IoOpcode::Write).len(), writes + 1);
        });
    }
}

/// While everything is written again over one path, another one that was connected all along is accessible again: what is written over
/// that is not written over.
#[test]
fn nothing_is_written_beside_what_is_written_again() {
    run(24, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        write(&device, 0, &pattern(1, 4096)).await.expect("written");
        write(&device, 8192, &pattern(1, 4096)).await.expect("written");
        target.set_state(paths[1], AnaState::Inaccessible);
        reactor::sleep(Duration::from_millis(10)).await;
        target.late.set(Duration::from_secs(1));
        net.reset(paths[0]);
        // The first one is being written again.
        reactor::sleep(Duration::from_millis(500)).await;
        target.set_state(paths[1], AnaState::Optimized);
        reactor::sleep(Duration::from_millis(10)).await;
        write(&device, 8192, &pattern(2, 4096)).await.expect("written");
        reactor::sleep(Duration::from_secs(5)).await;
        assert_eq!(read(&device, 8192, 4096).await.expect("read"), pattern(2, 4096)[..]);
    });
}

/// More than is kept is flushed in time, and where it cannot be the device says that it is gone, rather than nothing.
#[test]
fn what_cannot_be_written_again_is_not_passed_over() {
    run(6, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths[..1]).await;
        let data = pattern(1, 1 << 20);
        for at in 0..30 {
            write(&device, at << 20, &data).await.expect("written");
        }
        let flushes = target.came(IoOpcode::Flush).len();
        assert!((1..=3).contains(&flushes), "{flushes} flushes");
        reactor::sleep(Duration::from_millis(10)).await;
        // More than there is room for at once, all of which is there after a restart.
        let (device, data) = (&device, &data);
        let rounds: Vec<Buf> = (2..5).map(|round| pattern(round, 1 << 20)).collect();
        let all = (0..96_usize).map(|at| write(device, (at as u64 % 32) << 20, &rounds[at / 32]));
        futures_util::future::try_join_all(all).await.expect("written");
        net.down(paths[0]);
        target.restart();
        target.listen(&net, paths[0]);
        device.flush().await.expect("flushed");
        for place in target.durable.borrow()[..32 << 20].chunks(1 << 20) {
            assert!(place == &rounds[2][..], "an older round, or none");
        }
        // What the target does not take again is lost.
        write(device, 0, data).await.expect("written");
        net.down(paths[0]);
        target.statuses.borrow_mut().push(Status::WRITE_FAULT.and_do_not_retry());
        target.listen(&net, paths[0]);
        assert_eq!(device.flush().await, Err(BlockError::Gone));
        assert_eq!(read(device, 0, 512).await, Err(BlockError::Gone));
    });
}

#[test]
fn statuses_of_the_target() {
    run(7, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        let told = |status: Status| target.statuses.borrow_mut().push(status);
        told(Status::UNRECOVERED_READ_ERROR);
        let medium = BlockError::Medium { at: 512, bytes: 512 };
        assert_eq!(read(&device, 512, 512).await, Err(medium));
        // Tried again until it goes well.
        for status in [Status::ABORTED, Status::NOT_READY, Status::PATH_ERROR] {
            told(status);
        }
        assert_eq!(read(&device, 512, 512).await, Ok(vec![0; 512]));
        told(Status::WRITE_FAULT.and_do_not_retry());
        let failed = write(&device, 0, &pattern(1, 512)).await;
        assert_eq!(failed, Err(BlockError::Io { errno: libc::EIO }));
    });
}

#[test]
fn damaged_data_are_asked_for_again() {
    run(8, async {
        let (net, target, paths) = two_paths(Target::new());
        let digests = Digests { header: true, data: true };
        let device = open_as(&net, &paths, Options { digests, ..options() }).await;
        let data = pattern(1, 40_960);
        write(&device, 0, &data).await.expect("written");
        target.damages.set(3);
        assert_eq!(read(&device, 0, 40_960).await.expect("read"), data[..]);
        assert_eq!(target.damages.get(), 0);
        // Whoever looks is told, though all paths are used.
        let told: Vec<_> = device.paths().into_iter().filter_map(|path| path.why).collect();
        assert!(
            !told.is_empty() && told.iter().all(|why| why.contains("look at its network")),
            "{told:?}"
        );
        assert!(device.paths().iter().all(|path| path.standing == Standing::Optimized));
        // For an hour.
        reactor::sleep(Duration::from_secs(3600)).await;
        assert!(device.paths().iter().all(|path| path.why.is_none()), "{:?}", device.paths());
        // Not for ever.
        target.damages.set(1000);
        let damaged = read(&device, 0, 512).await;
        assert_eq!(damaged, Err(BlockError::Gone));
    });
}

#[test]
fn digests_that_are_not_granted_are_not_done_without() {
    run(9, async {
        let mut target = Target::new();
        target.digests = Digests::default();
        let (net, _, paths) = two_paths(target);
        let digests = Digests { header: true, data: false };
        let nqn = Nqn::new(NQN).expect("a name");
        let options = Options { digests, ..options() };
        let opened = Namespace::open_on(net, &paths, nqn, 0, options, "box".into()).await;
        let Err(NamespaceError::NoPath { paths, .. }) = opened else { panic!("opened") };
        assert!(paths[0].why.as_ref().expect("why").contains("digests"), "{paths:?}");
    });
}

#[test]
fn another_namespace_or_a_smaller_one_is_not_used() {
    run(10, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        write(&device, 0, &pattern(1, 512)).await.expect("written");
        device.flush().await.expect("flushed");
        target.guid.set([7; 16]);
        for path in paths {
            net.reset(path);
        }
        reactor::sleep(Duration::from_secs(5)).await;
        assert!(device.paths().iter().all(|path| path.standing == Standing::Unusable));
        target.guid.set([9; 16]);
        target.blocks.set(BLOCKS - 1);
        reactor::sleep(Duration::from_secs(5)).await;
        let why = device.paths()[0].why.clone().expect("why");
        assert!(why.contains("shrunk"), "{why}");
        assert!(!device.is_reached());
        // A larger one is what it was.
        target.blocks.set(BLOCKS + 1);
        read(&device, 0, 512).await.expect("it is there again");
        assert!(device.is_reached());
        let again = open(&net, &paths).await;
        assert!(device.is_same_as(&again));
        let (net, other, paths) = two_paths(Target::new());
        other.guid.set([7; 16]);
        assert!(!device.is_same_as(&open(&net, &paths).await));
    });
}

#[test]
fn a_namespace_that_shrinks_while_connections_stay_is_not_used() {
    run(13, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        write(&device, 0, &pattern(1, 512)).await.expect("written");
        device.flush().await.expect("flushed");
        let controllers = target.controllers();
        target.blocks.set(BLOCKS - 1);
        target.tell(Event::NamespacesChanged);
        reactor::sleep(Duration::from_secs(1)).await;
        let shown = device.paths();
        assert!(shown.iter().all(|path| path.standing == Standing::Unusable), "{shown:?}");
        assert!(shown[0].why.as_ref().is_some_and(|why| why.contains("shrunk")), "{shown:?}");
        assert!(!device.is_reached());
        target.blocks.set(BLOCKS);
        target.tell(Event::NamespacesChanged);
        let there = read(&device, 0, 512).await.expect("as it was");
        assert_eq!(there[..], pattern(1, 512)[..]);
        assert_eq!(target.controllers(), controllers, "nothing was connected anew");
    });
}

#[test]
fn a_later_owner_shuts_out_an_earlier_one() {
    run(11, async {
        let (net, target, paths) = two_paths(Target::new());
        let first = open(&net, &paths).await;
        let second = open(&net, &paths).await;
        let data = pattern(1, 512);
        first.fence(Epoch(4)).await.expect("nobody's");
        first.fence(Epoch(4)).await.expect("ours");
        write(&first, 0, &data).await.expect("ours");
        let conflict = write(&second, 0, &data).await;
        assert_eq!(conflict, Err(BlockError::Fenced { ours: Epoch(0), seen: Epoch(4) }));
        let older = second.fence(Epoch(3)).await;
        assert_eq!(older, Err(BlockError::Fenced { ours: Epoch(3), seen: Epoch(4) }));
        second.fence(Epoch(5)).await.expect("later");
        write(&second, 0, &data).await.expect("ours");
        let conflict = write(&first, 512, &data).await;
        assert_eq!(conflict, Err(BlockError::Fenced { ours: Epoch(4), seen: Epoch(5) }));
        // It would be read beside what the first has in memory.
        let conflict = read(&first, 0, 512).await.expect_err("another's");
        assert_eq!(conflict, BlockError::Fenced { ours: Epoch(4), seen: Epoch(5) });
        let again = first.fence(Epoch(4)).await;
        assert_eq!(again, Err(BlockError::Fenced { ours: Epoch(4), seen: Epoch(5) }));
        assert_eq!(target.keys.borrow().len(), 2, "one for each path");
        // Paths that come back are the same owner's.
        net.reset(paths[0]);
        net.reset(paths[1]);
        write(&second, 0, &data).await.expect("still ours");
    });
}

#[test]
fn discovery_lists_what_there_is() {
    run(12, async {
        let (net, target, paths) = two_paths(Target::new());
        let entry = |number: u16| DiscoveryEntry {
            subsystem: Nqn::new(format!("nqn.2014-08.org.example:{number}")).expect("a name"),
            is_discovery: false,
            address: paths[0],
            port: number,
            needs_tls: false,
        };
        let all: Vec<_> = (0..37).map(entry).collect();
        *target.discovered.borrow_mut() = all.clone();
        let found = discover(&net, paths[0], &options()).await.expect("found");
        assert_eq!(found, all);
    });
}

#[test]
fn a_flush_may_take_long() {
    run(16, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        write(&device, 0, &pattern(1, 4096)).await.expect("written");
        target.flush_takes.set(Duration::from_secs(40));
        device.flush().await.expect("flushed");
        assert_eq!((net.tried(), device.resent()), (4, 0));
    });
}

/// Whoever asked for a change has given up waiting for it, and asks for another one of the same blocks.
#[test]
fn a_change_that_nobody_waits_for_is_not_overtaken() {
    run(17, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        target.late.set(Duration::from_secs(5));
        let data = pattern(1, 4096);
        let given_up = write(&device, 0, &data);
        assert!(reactor::timeout(Duration::from_secs(1), given_up).await.is_err());
        target.late.set(Duration::ZERO);
        write(&device, 8192, &pattern(2, 4096)).await.expect("elsewhere");
        write(&device, 2048, &pattern(2, 4096)).await.expect("written");
        reactor::sleep(Duration::from_secs(10)).await;
        assert_eq!(read(&device, 2048, 4096).await.expect("read"), pattern(2, 4096)[..]);
    });
}

/// One part of a request fails: the request ends when the others have ended as well.
#[test]
fn nothing_of_a_request_is_under_way_after_it() {
    run(18, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths[..1]).await;
        target.statuses.borrow_mut().push(Status::WRITE_FAULT.and_do_not_retry());
        let data = pattern(1, 262_144);
        write(&device, 0, &data).await.expect_err("one part fails");
        let done = target.came(IoOpcode::Write).len();
        reactor::sleep(Duration::from_secs(1)).await;
        assert_eq!((done, target.came(IoOpcode::Write).len()), (3, 3));
    });
}

/// What was not flushed is written again at once, although a later change of the same blocks was lost.
#[test]
fn writing_again_does_not_wait_for_what_comes_later() {
    run(19, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        write(&device, 0, &pattern(1, 4096)).await.expect("written");
        let cut = async {
            target.mute_at.borrow_mut().extend(paths);
            reactor::sleep(Duration::from_millis(100)).await;
            for path in paths {
                net.down(path);
            }
            target.restart();
            target.mute_at.borrow_mut().clear();
            for path in paths {
                target.listen(&net, path);
            }
        };
        let begun = reactor::now();
        let data = pattern(2, 4096);
        let (_, written) = join(cut, write(&device, 0, &data)).await;
        written.expect("written");
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        assert_eq!(read(&device, 0, 4096).await.expect("read"), data[..]);
    });
}

#[test]
fn a_device_can_be_closed_at_any_time() {
    run(20, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        const WRITES: usize = 150;
        for at in 0..WRITES as u64 {
            write(&device, at * 4096, &pattern(at, 4096)).await.expect("written");
        }
        target.late.set(Duration::from_secs(2));
        for path in paths {
            net.down(path);
            target.listen(&net, path);
        }
        // They are being written again, as many at once as the queue has room for.
        reactor::sleep(Duration::from_secs(3)).await;
        let closed = reactor::timeout(Duration::from_secs(3), device.close()).await;
        closed.expect("closed");
        reactor::sleep(Duration::from_secs(20)).await;
        let written = target.came(IoOpcode::Write).len();
        assert!((WRITES + 62..2 * WRITES - 20).contains(&written), "{written} writes");
        // Nor does anybody connect for a device that was not opened after all.
        let net = MemoryNetwork::default();
        let opening = open(&net, &paths);
        assert!(reactor::timeout(Duration::from_micros(20), opening).await.is_err());
        let tried = net.tried();
        reactor::sleep(Duration::from_secs(10)).await;
        assert_eq!(net.tried(), tried);
    });
}

#[test]
fn limits_of_a_target_are_kept_to() {
    run(21, async {
        let mut target = Target::new();
        target.limits = CommandLimits { zeroes_bytes_max: 32 << 10, discard_blocks_max: 7 };
        let host = Nqn::new("nqn.2014-08.org.example:known").expect("a name");
        target.admitted = Some(host.clone());
        let (net, target, paths) = two_paths(target);
        let known = Options { host: Host::new(host), ..options() };
        let device = open_as(&net, &paths, known).await;
        device.write_zeroes(512, 100_864).await.expect("zeroed");
        device.discard(0, 51_200).await.expect("discarded");
        assert_eq!(target.came(IoOpcode::WriteZeroes).len(), 4);
        assert_eq!(target.came(IoOpcode::DatasetManagement).len(), 15);
        let nqn = Nqn::new(NQN).expect("a name");
        let opened = Namespace::open_on(net, &paths, nqn, 0, options(), "box".into()).await;
        let Err(NamespaceError::NoPath { paths, .. }) = opened else { panic!("opened") };
        assert!(paths[0].why.as_ref().expect("why").contains("invalid host"), "{paths:?}");
    });
}

/// A change is held back for longer than a request may take, and then refused once.
#[test]
fn time_in_which_a_request_was_held_back_does_not_count() {
    run(23, async {
        let mut target = Target::new();
        target.keep_alive_unit_ms = 10_000;
        let (net, target, paths) = two_paths(target);
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        target.late.set(Duration::from_secs(5));
        let cut = async {
            reactor::sleep(Duration::from_millis(100)).await;
            target.late.set(Duration::ZERO);
            net.swallow(paths[0]);
        };
        let (first, second) = (pattern(1, 4096), pattern(2, 4096));
        let (written, ()) = join(write(&device, 0, &first), cut).await;
        written.expect("on the other path");
        let begun = reactor::now();
        let refused = async {
            reactor::sleep(Duration::from_secs(28)).await;
            target.statuses.borrow_mut().push(Status::ABORTED);
        };
        let (written, ()) = join(write(&device, 0, &second), refused).await;
        written.expect("in the end");
        assert!(begun.elapsed() > Duration::from_secs(30), "{:?}", begun.elapsed());
        assert_eq!((device.held_back(), target.statuses.borrow().len()), (1, 0));
    });
}

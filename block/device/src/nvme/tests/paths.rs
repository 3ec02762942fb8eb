//! Paths that are lost, hang or are preferred, and what callers notice of it.

use super::namespace::{open, pattern, read, run, two_paths, write};
use crate::nvme::target::Target;
use crate::nvme::{PathStatus, Standing};
use crate::{BlockError, Device};
use futures_util::future::join;
use levada_base::{Epoch, reactor};
use levada_nvme::IoOpcode;
use levada_nvme::identify::OptionalCommands;
use levada_nvme::log::AnaState;
use std::time::Duration;

#[test]
fn a_lost_path_costs_no_error() {
    for seed in 0..30 {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            let load = async {
                for round in 0..300_u64 {
                    let at = round % 40 * 8192;
                    let begun = reactor::now();
                    let data = pattern(round, 8192);
                    write(&device, at, &data).await.expect("one path lives");
                    assert_eq!(read(&device, at, 8192).await.expect("one path lives"), data[..]);
                    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
                    reactor::sleep(Duration::from_millis(50)).await;
                }
            };
            let faults = async {
                for round in 0..6_u64 {
                    reactor::sleep(Duration::from_millis(1900 + seed * 7)).await;
                    let path = paths[(round % 2) as usize];
                    if round % 3 == 0 {
                        net.swallow(path);
                        reactor::sleep(Duration::from_secs(4)).await;
                        target.listen(&net, path);
                    } else {
                        net.reset(path);
                    }
                }
            };
            let _ =
                join(load, async { reactor::timeout(Duration::from_secs(15), faults).await }).await;
        });
    }
}

#[test]
fn the_path_that_the_target_prefers_is_taken() {
    run(3, async {
        let (net, target, paths) = two_paths(Target::new());
        target.states.borrow_mut().insert(paths[0], AnaState::NonOptimized);
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(50)).await;
        let data = pattern(1, 512);
        for _ in 0..4 {
            write(&device, 0, &data).await.expect("written");
        }
        assert!(target.came(IoOpcode::Write).iter().all(|path| *path == paths[1]));
        target.seen.borrow_mut().clear();
        // The host is told, or finds out.
        target.set_state(paths[0], AnaState::Optimized);
        target.states.borrow_mut().insert(paths[1], AnaState::Inaccessible);
        for _ in 0..4 {
            write(&device, 0, &data).await.expect("written");
        }
        assert!(target.came(IoOpcode::Write).iter().all(|path| *path == paths[0]));
        reactor::sleep(Duration::from_millis(50)).await;
        assert_eq!(device.paths()[1].standing, Standing::Unusable);
    });
}

#[test]
fn without_a_path_commands_wait_and_then_the_device_is_gone() {
    run(4, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths[..1]).await;
        let data = pattern(1, 512);
        net.down(paths[0]);
        let begun = reactor::now();
        let back = async {
            reactor::sleep(Duration::from_secs(20)).await;
            target.listen(&net, paths[0]);
        };
        let (written, ()) = join(write(&device, 0, &data), back).await;
        written.expect("the path came back");
        assert!(begun.elapsed() >= Duration::from_secs(20));
        assert!(begun.elapsed() < Duration::from_secs(24), "{:?}", begun.elapsed());
        let tried = net.tried();
        net.down(paths[0]);
        let begun = reactor::now();
        assert_eq!(read(&device, 0, 512).await, Err(BlockError::Gone));
        let waited = begun.elapsed();
        assert!((29..33).contains(&waited.as_secs()), "{waited:?}");
        // With pauses.
        assert!(net.tried() - tried < 40, "{}", net.tried() - tried);
        // At once.
        let begun = reactor::now();
        assert_eq!(device.flush().await, Err(BlockError::Gone));
        assert!(begun.elapsed() < Duration::from_millis(1));
    });
}

/// Its I/O queues say nothing, and its admin queue goes on answering.
#[test]
fn a_path_that_answers_no_commands_on_blocks_is_lost_within_five_seconds() {
    for seed in 0..10 {
        run(seed, async {
            let mut target = Target::new();
            let has_reservations = seed % 2 == 0;
            target.optional.set(OptionalCommands::RESERVATIONS, has_reservations);
            let (net, target, paths) = two_paths(target);
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_millis(10)).await;
            // Without reservations and an owner one alone is used.
            let is_used = |path: &PathStatus| path.standing > Standing::Unusable;
            let used = device.paths().iter().position(is_used).expect("a path");
            target.mute_at.borrow_mut().push(paths[used]);
            let begun = reactor::now();
            for at in 0..4 {
                // One of two comes to the one that is mute.
                let zeroes = device.write_zeroes(at << 20, 4096);
                let (found, zeroed) = join(read(&device, 4096, 4096), zeroes).await;
                assert_eq!((found.expect("read"), zeroed), (vec![0; 4096], Ok(())));
                device.flush().await.expect("flush");
            }
            let took = begun.elapsed();
            assert!(took > Duration::from_secs(3) && took < Duration::from_secs(5), "{took:?}");
        });
    }
}

/// Both come back at once, and one of them hangs as soon as it is to be used: it keeps the other one from nothing.
#[test]
fn a_path_that_hangs_while_it_is_made_whole_gives_way() {
    for seed in 0..10 {
        run(seed, async {
            let mut target = Target::new();
            target.keeps_reservations = true;
            let (net, target, paths) = two_paths(target);
            let device = open(&net, &paths).await;
            device.fence(Epoch(1)).await.expect("nobody's");
            reactor::sleep(Duration::from_millis(10)).await;
            for path in paths {
                net.down(path);
            }
            target.restart();
            target.mute_at.borrow_mut().push(paths[0]);
            for path in paths {
                target.listen(&net, path);
            }
            let begun = reactor::now();
            assert!(read(&device, 0, 4096).await.expect("read") == [0; 4096]);
            assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
        });
    }
}

/// A drive that takes long is not better reached over the other path.
#[test]
fn a_drive_that_hangs_costs_no_path_before_a_command_has_had_its_time() {
    run(5, async {
        let (net, target, paths) = two_paths(Target::new());
        let device = open(&net, &paths).await;
        reactor::sleep(Duration::from_millis(10)).await;
        target.hangs.set(true);
        let begun = reactor::now();
        let moves = async {
            reactor::sleep(Duration::from_secs(9)).await;
            assert!(device.paths().iter().all(|path| path.standing == Standing::Optimized));
            reactor::sleep(Duration::from_secs(3)).await;
            target.hangs.set(false);
        };
        let (found, ()) = join(read(&device, 0, 4096), moves).await;
        assert_eq!(found.expect("read"), [0; 4096]);
        assert!(begun.elapsed() >= Duration::from_secs(10));
    });
}

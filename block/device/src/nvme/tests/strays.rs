//! Two drives with the same names, as copies of one configuration have them, and paths to both: one is used, and the other is neither written
//! nor reserved, nor does it cost the first anything.

use super::address;
use super::namespace::{Namespace, open, pattern, read, run, write};
use super::owners::{mark, witness};
use crate::nvme::paths::Standing;
use crate::nvme::target::Target;
use crate::{BlockError, Device};
use futures_util::future::join;
use levada_base::Epoch;
use levada_base::reactor;
use levada_base::stream::MemoryNetwork;
use levada_nvme::identify::OptionalCommands;
use levada_nvme::log::AnaState;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

fn drive(has_reservations: bool) -> Rc<Target> {
    let mut target = Target::new();
    target.optional.set(OptionalCommands::RESERVATIONS, has_reservations);
    Rc::new(target)
}

/// A namespace that the owner of epoch 4 has, its mark included.
async fn owned(net: &MemoryNetwork, paths: &[SocketAddr]) -> Namespace {
    let device = open(net, paths).await;
    reactor::sleep(Duration::from_millis(10)).await;
    device.fence(Epoch(4)).await.expect("nobody's");
    write(&device, 0, &mark(4)).await.expect("ours");
    device.flush().await.expect("flushed");
    device.recognise_by(Some(witness()));
    device
}

async fn check_used(device: &Namespace, stray: &Target) {
    let before = stray.cached.borrow().clone();
    for at in 1..20 {
        let data = pattern(at, 4096);
        write(device, at * 8192, &data).await.expect("written");
        assert_eq!(read(device, at * 8192, 4096).await.expect("read"), data[..]);
    }
    assert!(*stray.cached.borrow() == before, "it is written to");
    assert_eq!((stray.keys.borrow().len(), stray.holder.get()), (0, None));
}

fn told(device: &Namespace) -> Vec<String> {
    device.paths().into_iter().filter_map(|path| path.why).collect()
}

fn check_told(device: &Namespace) {
    let told = told(device);
    assert!(matches!(&told[..], [why] if why.contains("another drive")), "{told:?}");
}

#[test]
fn a_path_that_comes_later_is_not_used() {
    for (seed, has_reservations) in [(70, true), (71, false)] {
        run(seed, async {
            let net = MemoryNetwork::default();
            let (one, other) = (drive(has_reservations), drive(has_reservations));
            let paths = [address(1), address(2)];
            one.listen(&net, paths[0]);
            let device = owned(&net, &paths).await;
            other.listen(&net, paths[1]);
            reactor::sleep(Duration::from_secs(10)).await;
            check_used(&device, &other).await;
            check_told(&device);
            // It goes and comes back: only the one that leads to the drive counts.
            net.down(paths[0]);
            let begun = reactor::now();
            let back = async {
                reactor::sleep(Duration::from_secs(3)).await;
                one.listen(&net, paths[0]);
            };
            let (written, ()) = join(write(&device, 0, &mark(4)), back).await;
            written.expect("ours");
            assert!(begun.elapsed() >= Duration::from_secs(3), "{:?}", begun.elapsed());
            check_used(&device, &other).await;
            check_told(&device);
            // Without it there is no drive.
            net.down(paths[0]);
            assert_eq!(write(&device, 0, &mark(4)).await, Err(BlockError::Gone));
            assert!(other.cached.borrow().iter().all(|byte| *byte == 0));
        });
    }
}

/// Which of them has the drive, the first or the second, is chance where it is nobody's.
#[test]
fn of_two_that_are_there_from_the_beginning_one_is_used() {
    for seed in 0..20 {
        run(seed, async {
            let net = MemoryNetwork::default();
            let (one, other) = (drive(true), drive(true));
            let paths = [address(1), address(2)];
            one.listen(&net, paths[0]);
            other.listen(&net, paths[1]);
            let device = owned(&net, &paths).await;
            reactor::sleep(Duration::from_secs(5)).await;
            let is_first = one.cached.borrow()[0] == 4;
            check_used(&device, if is_first { &other } else { &one }).await;
            check_told(&device);
        });
    }
}

/// Without reservations a drive is told by the mark of its owner: before that is there one path is used, whichever it is.
#[test]
fn of_two_that_are_there_from_the_beginning_the_one_with_the_mark_is_used() {
    let mut found = [0, 0];
    for (seed, stray) in (0..20).flat_map(|seed| [(seed, 0), (seed, 1)]) {
        run(seed, async {
            let net = MemoryNetwork::default();
            let drives = [drive(false), drive(false)];
            let paths = [address(1), address(2)];
            for (drive, path) in drives.iter().zip(paths) {
                drive.listen(&net, path);
            }
            owned(&net, &[paths[1 - stray]]).await.close().await;
            let device = open(&net, &paths).await;
            // Its owner reads the mark, and leaves his own, over one path.
            for pause_ms in [0, 10, 1500] {
                reactor::sleep(Duration::from_millis(pause_ms)).await;
                let is_stray = read(&device, 0, 512).await.expect("read")[0] == 0;
                if is_stray {
                    // Then it is not the drive.
                    assert_eq!(pause_ms, 0, "over one, and then over another");
                    found[1] += 1;
                    return;
                }
            }
            found[0] += 1;
            device.fence(Epoch(5)).await.expect("later");
            write(&device, 0, &mark(5)).await.expect("ours");
            device.flush().await.expect("flushed");
            device.recognise_by(Some(witness()));
            check_used(&device, &drives[stray]).await;
            reactor::sleep(Duration::from_secs(2)).await;
            check_used(&device, &drives[stray]).await;
            check_told(&device);
        });
    }
    assert!(found.iter().all(|times| *times > 5), "{found:?}");
}

/// Two paths to one drive without reservations: the second is used as soon as the mark of the owner is there, and in the place of the first before.
#[test]
fn without_reservations_a_second_path_is_used_once_the_drive_has_an_owner() {
    for seed in 0..10 {
        run(seed, async {
            let (net, drive) = (MemoryNetwork::default(), drive(false));
            let paths = [address(1), address(2)];
            for path in paths {
                drive.listen(&net, path);
            }
            let device = open(&net, &paths).await;
            reactor::sleep(Duration::from_secs(2)).await;
            let used = |device: &Namespace| {
                let paths = device.paths().into_iter();
                paths.filter(|path| path.standing > Standing::Unusable).count()
            };
            assert_eq!(used(&device), 1, "{:?}", device.paths());
            let first = device.paths()[0].standing > Standing::Unusable;
            net.down(paths[usize::from(!first)]);
            let begun = reactor::now();
            read(&device, 0, 512).await.expect("over the other");
            assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
            drive.listen(&net, paths[usize::from(!first)]);
            device.fence(Epoch(4)).await.expect("nobody's");
            write(&device, 0, &mark(4)).await.expect("ours");
            device.recognise_by(Some(witness()));
            reactor::sleep(Duration::from_secs(3)).await;
            assert_eq!(used(&device), 2, "{:?}", device.paths());
        });
    }
}

/// The one that is used goes and comes back, and another drive is used in its place meanwhile: they are not used side by side.
#[test]
fn of_two_without_an_owner_one_is_used_at_a_time() {
    for seed in 0..10 {
        run(seed, async {
            let net = MemoryNetwork::default();
            let drives = [drive(false), drive(false)];
            let paths = [address(1), address(2)];
            for (at, (drive, path)) in drives.iter().zip(paths).enumerate() {
                drive.cached.borrow_mut()[0] = at as u8 + 1;
                drive.listen(&net, path);
            }
            let device = open(&net, &paths).await;
            let first = async || read(&device, 0, 512).await.expect("read")[0];
            let used = usize::from(first().await - 1);
            drives[used].set_state(paths[used], AnaState::Inaccessible);
            reactor::sleep(Duration::from_secs(2)).await;
            assert_eq!(usize::from(first().await - 1), 1 - used);
            drives[used].set_state(paths[used], AnaState::Optimized);
            reactor::sleep(Duration::from_secs(3)).await;
            for _ in 0..20 {
                assert_eq!(usize::from(first().await - 1), 1 - used);
            }
            let standings: Vec<_> = device.paths().into_iter().map(|path| path.standing).collect();
            assert_eq!(
                (standings[used], standings[1 - used]),
                (Standing::Reserve, Standing::Optimized)
            );
        });
    }
}

/// A path that cannot be used now, or does not answer, is none to compare with: a third one is.
#[test]
fn any_path_that_is_used_tells() {
    for (seed, has_reservations) in (0..10).flat_map(|seed| [(seed, true), (seed, false)]) {
        run(seed, async {
            let net = MemoryNetwork::default();
            let (one, other) = (drive(has_reservations), drive(has_reservations));
            let paths = [address(1), address(2), address(3)];
            one.listen(&net, paths[0]);
            one.listen(&net, paths[1]);
            let device = owned(&net, &paths).await;
            one.set_state(paths[0], AnaState::Inaccessible);
            other.listen(&net, paths[2]);
            reactor::sleep(Duration::from_secs(10)).await;
            check_used(&device, &other).await;
            one.set_state(paths[0], AnaState::Optimized);
            reactor::sleep(Duration::from_secs(2)).await;
            check_told(&device);
            // Neither is one that has fallen silent.
            net.down(paths[2]);
            reactor::sleep(Duration::from_secs(5)).await;
            one.mute_at.borrow_mut().push(paths[0]);
            other.listen(&net, paths[2]);
            check_used(&device, &other).await;
            reactor::sleep(Duration::from_secs(20)).await;
            check_used(&device, &other).await;
        });
    }
}

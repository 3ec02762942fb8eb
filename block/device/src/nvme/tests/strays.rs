//! Two drives with the same names, as copies of one configuration have them, and paths to both: one is used, and the other is neither written
//! nor reserved, nor does it cost the first anything.

use super::address;
use super::namespace::{Namespace, open, pattern, read, run, write};
use super::owners::{mark, witness};
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

/// Without reservations a drive is told by the mark that its last owner left, however many paths are whole before anybody can know that.
#[test]
fn of_two_that_are_there_from_the_beginning_the_one_with_the_mark_is_used() {
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
            reactor::sleep(Duration::from_millis(10)).await;
            device.fence(Epoch(5)).await.expect("later");
            device.recognise_by(Some(witness()));
            reactor::sleep(Duration::from_secs(2)).await;
            check_used(&device, &drives[stray]).await;
            check_told(&device);
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

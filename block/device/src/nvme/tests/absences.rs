//! Namespaces that were not there for a moment, and what their drives have lost by then.

use super::namespace::{Namespace, open_as, pattern, read, run, two_paths, write};
use super::options;
use crate::nvme::Options;
use crate::nvme::target::Target;
use crate::{BlockError, Device};
use futures_util::future::join;
use levada_base::reactor;
use levada_base::stream::MemoryNetwork;
use levada_nvme::pdu::Digests;
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

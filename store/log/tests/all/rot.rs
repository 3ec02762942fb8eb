//! Bytes that change behind the log's back: found by checksums, repaired through parity.

use crate::support::model::{below, flat, object, payload};
use crate::support::{World, bytes, seeds};
use levada_base::ids::Seq;
use levada_base::reactor::Reactor;
use levada_log::{LogError, Stability};

#[test]
fn rot_is_repaired_wherever_it_is() {
    for seed in seeds(20) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            let log = world.next_life().open(true).await;
            let mut expected = Vec::new();
            for n in 0..20 {
                let (data, bytes) = payload(1 + below(90_000));
                log.write(object(n), below(3) * 4096, data, Stability::Unstable)
                    .await
                    .expect("room");
                expected.push(bytes);
            }
            log.settle().await.expect("settled");
            // One or two blocks of a row of a stripe at most: what parity can tell.
            let blocks = world.array.filled_blocks();
            for _ in 0..blocks.len() / 10 {
                world.array.rot_within(blocks[below(blocks.len() as u64) as usize], 2);
            }
            for (n, bytes) in expected.iter().enumerate() {
                let id = object(n as u64);
                let size = log.stat(id).await.expect("there").size;
                let read = flat(
                    &log.read(id, size - bytes.len() as u64, bytes.len() as u64)
                        .await
                        .expect("repaired"),
                );
                assert!(read == *bytes, "seed {seed}: object {n}");
            }
            let repaired = log.counters().repaired_blocks;
            assert!(repaired > 0 && world.array.repairs.get() > 0);
            // What was repaired stays so.
            let report = log.scrub().await.expect("scrubbed");
            assert_eq!((report.repaired_blocks, report.damaged.len()), (0, 0));
            assert_eq!(log.counters().damaged_blocks, 0);
        });
    }
}

#[test]
fn scrub_finds_and_repairs() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        for n in 0..20 {
            let data = bytes(n as u8, 50_000);
            log.write(object(n), 0, data, Stability::Unstable).await.expect("room");
        }
        log.settle().await.expect("settled");
        for block in world.array.filled_blocks().into_iter().step_by(23) {
            world.array.rot_within(block, 1);
        }
        let report = log.scrub().await.expect("scrubbed");
        assert_eq!((report.objects, report.damaged.len()), (20, 0));
        assert!(report.repaired_blocks > 0 && report.bytes == 20 * 50_000);
        assert_eq!(log.scrub().await.expect("scrubbed").repaired_blocks, 0);
    });
}

#[test]
fn what_cannot_be_rebuilt_is_named_and_nothing_else_is_lost() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        let id = object(1);
        let data = bytes(7, 48 << 10);
        log.write(id, 0, data, Stability::Unstable).await.expect("room");
        log.commit(Seq(u64::MAX)).await.expect("committed");
        log.settle().await.expect("settled");
        // The first row of every member of the first stripe.
        for member in 0..8 {
            world.array.rot(member * 8192);
        }
        for block in 0..12u64 {
            let offset = block * 4096 + 10;
            match log.read(id, offset, 100).await {
                Ok(read) => {
                    assert_eq!(block % 2, 1);
                    assert_eq!(flat(&read), vec![7; 100]);
                }
                Err(error) => {
                    assert_eq!(block % 2, 0);
                    assert_eq!(error, LogError::Damaged { offset, bytes: 100 });
                }
            }
        }
        let report = log.scrub().await.expect("scrubbed");
        assert_eq!(report.damaged, [(id, 0, 11 * 4096)]);
        // Written over, it is good again.
        let data = bytes(8, 48 << 10);
        log.write(id, 0, data, Stability::Durable).await.expect("room");
        log.settle().await.expect("settled");
        assert_eq!(flat(&log.read(id, 0, 48 << 10).await.expect("read")), vec![8; 48 << 10]);
    });
}

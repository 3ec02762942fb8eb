//! Making and opening a store: the superblocks, then the checkpoint, then the intent log.
//!
//! What always holds:
//! - Nothing else is written before both superblocks carry the new owner's epoch.
//! - Both superblocks are written at every change, one after the other, so that either of them
//!   alone is enough, and neither is stale by more than the step in which a crash fell.
//! - Nothing is served before what was replayed is durable: it may lie in a drive's volatile cache.

use crate::checkpoint::Checkpoint;
use crate::format::{AREA_BYTES_MIN, Layout, LogPoint, Superblock};
use crate::intent::{Log, Replay, log_bytes_of, segment_bytes};
use crate::overlay::Overlay;
use crate::service::Service;
use crate::store::{Config, KvError};
use levada_base::ids::Uuid;
use levada_base::reactor;
use levada_base::units::BLOCK_BYTES;
use levada_base::{BufMut, Epoch, planted, probe};
use levada_device::{BlockError, Device, Durability};
use std::rc::Rc;

/// Memory that the engine may use for its pages.
fn engine_cache_bytes(config: &Config) -> usize {
    (config.cache_bytes / 2).clamp(1 << 20, 32 << 20)
}

/// Makes an empty store.
pub(crate) async fn create(
    area: Rc<dyn Device>,
    epoch: Epoch,
    config: Config,
) -> Result<Rc<Service>, KvError> {
    fence(&area, epoch).await?;
    let area_bytes = area.info().capacity_bytes;
    let layout = Layout::cut(area_bytes, config.log_bytes)
        .ok_or(KvError::TooSmall { bytes: area_bytes, bytes_min: AREA_BYTES_MIN })?;
    // Whoever opens the area from here on finds no store until this one is whole.
    for at in [0, BLOCK_BYTES] {
        let zeroes = BufMut::zeroed(BLOCK_BYTES as usize).freeze();
        area.write(at, zeroes.into_vec(), Durability::Fua).await?;
    }
    let cache_bytes = engine_cache_bytes(&config);
    let (checkpoint, state) =
        Checkpoint::open(Rc::clone(&area), epoch, layout, cache_bytes, true).await?;
    let superblock = Superblock {
        uuid: Uuid::from_u64_pair(reactor::random_u64(), reactor::random_u64()),
        epoch: epoch.0,
        opened: 1,
        generation: 1,
        layout,
        tail: LogPoint::default(),
    };
    write_superblocks(&area, &superblock).await?;
    let log = Log::new(Rc::clone(&area), superblock, superblock.tail);
    Ok(Service::start(area, config, superblock, log, Overlay::new(), checkpoint, state))
}

/// Opens the store that is there.
pub(crate) async fn open(
    area: Rc<dyn Device>,
    epoch: Epoch,
    config: Config,
) -> Result<Rc<Service>, KvError> {
    fence(&area, epoch).await?;
    let mut superblock = read_superblock(&area).await?;
    if superblock.epoch > epoch.0 && !planted!("kv-epoch-ignored") {
        return Err(BlockError::Fenced { ours: epoch, seen: Epoch(superblock.epoch) }.into());
    }
    superblock.epoch = epoch.0;
    superblock.opened += 1;
    superblock.generation += 1;
    write_superblocks(&area, &superblock).await?;

    let layout = superblock.layout;
    let cache_bytes = engine_cache_bytes(&config);
    let (checkpoint, state) =
        Checkpoint::open(Rc::clone(&area), epoch, layout, cache_bytes, false).await?;
    // Superblocks of before a later owner, and the checkpoint of after: the drives disagree.
    if state.epoch > epoch.0 && !planted!("kv-epoch-ignored") {
        return Err(BlockError::Fenced { ours: epoch, seen: Epoch(state.epoch) }.into());
    }
    if state.applied < superblock.tail.seq {
        let at = layout.space_at;
        return Err(KvError::Damaged { what: "checkpoint older than the log's tail", at });
    }

    let _busy = probe::busy("kv replay");
    let overlay = Overlay::new();
    let mut replay = Replay::new(&area, superblock);
    let mut checkpointed = superblock.tail;
    while let Some(batches) = replay.next().await? {
        let point = replay.point;
        let first = point.seq + 1 - batches.len() as u64;
        let mut touched = None;
        for (seq, changes) in (first..).zip(&batches) {
            if seq > state.applied && !planted!("kv-replay-skipped") {
                let segment = overlay.insert(seq, changes);
                segment.log_bytes.set(segment.log_bytes.get() + log_bytes_of(changes));
                touched = Some(segment);
            }
        }
        if point.seq <= state.applied {
            checkpointed = point;
        }
        // As when they were applied: segments hold whole records, and little of the log.
        if let Some(segment) = touched {
            segment.end.set(point);
            if segment.log_bytes.get() >= segment_bytes(layout.log_bytes) {
                overlay.rotate();
            }
        }
    }
    let head = replay.point;
    if head.seq < state.applied {
        let at = layout.log_at + head.position % layout.log_bytes;
        return Err(KvError::Damaged { what: "intent log ends before the checkpoint", at });
    }
    area.flush().await?;
    if checkpointed.position > superblock.tail.position {
        // The crash came between the checkpoint and the tail. Only the checkpoint of a segment moves the tail, and
        // nothing of these records is in one: several such crashes would fill the log for good.
        superblock.tail = checkpointed;
        superblock.generation += 1;
        write_superblocks(&area, &superblock).await?;
    }
    let log = Log::new(Rc::clone(&area), superblock, head);
    Ok(Service::start(area, config, superblock, log, overlay, checkpoint, state))
}

/// Takes the area, where the device below knows epochs; the superblocks know them in any case.
async fn fence(area: &Rc<dyn Device>, epoch: Epoch) -> Result<(), KvError> {
    match area.fence(epoch).await {
        Ok(()) | Err(BlockError::Unsupported { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The newer of the intact superblocks.
async fn read_superblock(area: &Rc<dyn Device>) -> Result<Superblock, KvError> {
    let area_bytes = area.info().capacity_bytes;
    let mut newest: Option<Superblock> = None;
    let mut wrong = None;
    for at in [0, BLOCK_BYTES] {
        let read =
            area.read_agreed(at, BufMut::for_overwrite(BLOCK_BYTES as usize).into_vec()).await;
        let decoded = match read {
            Ok(block) => Superblock::decode(&block[0], area_bytes),
            Err(BlockError::Medium { .. }) => Err("superblock (medium error)"),
            Err(error) => return Err(error.into()),
        };
        match decoded {
            Ok(found) if newest.is_none_or(|newest| newest.generation < found.generation) => {
                newest = Some(found);
            }
            Ok(_) => {}
            Err(what) => wrong = wrong.or(Some((what, at))),
        }
    }
    match (newest, wrong) {
        (Some(found), None) => Ok(found),
        (Some(found), Some((what, at))) => {
            tracing::warn!(what, at, "one superblock is damaged, the other is written over it");
            Ok(found)
        }
        (None, wrong) => {
            let (what, at) = wrong.unwrap_or(("superblock", 0));
            Err(KvError::Damaged { what, at })
        }
    }
}

/// Writes both superblocks, durably, one after the other.
pub(crate) async fn write_superblocks(
    area: &Rc<dyn Device>,
    superblock: &Superblock,
) -> Result<(), BlockError> {
    let mut block = BufMut::for_overwrite(BLOCK_BYTES as usize);
    superblock.encode(&mut block);
    let block = block.freeze();
    for at in [0, BLOCK_BYTES] {
        area.write(at, block.clone().into_vec(), Durability::Fua).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Store;
    use crate::store::Batch;
    use levada_base::reactor::Reactor;
    use levada_base::units::MIB;
    use levada_device::RamDevice;
    use std::time::Duration;

    const AREA_BYTES: u64 = 3 * MIB;
    const CONFIG: Config = Config { log_bytes: 64 << 10, cache_bytes: 64 << 10 };

    /// Puts a row, and brings it into the checkpoint.
    async fn put_and_close(store: &Store, key: &[u8]) {
        let mut batch = Batch::default();
        batch.put(key, b"value");
        store.apply(batch).expect("room");
        store.close().await.expect("closes");
    }

    /// The same bytes with superblocks of an earlier owner, on a device that has seen none.
    async fn with_older_superblocks(area: &Rc<dyn Device>, epoch: u64) -> Rc<dyn Device> {
        let copy: Rc<dyn Device> = Rc::new(RamDevice::new("copy", AREA_BYTES));
        let into = BufMut::for_overwrite(AREA_BYTES as usize).into_vec();
        let bytes = area.read(0, into).await.expect("reads");
        let bytes = bytes.into_iter().map(BufMut::freeze).collect();
        copy.write(0, bytes, Durability::Fua).await.expect("writes");
        let mut superblock = read_superblock(&copy).await.expect("intact");
        superblock.epoch = epoch;
        write_superblocks(&copy, &superblock).await.expect("writes");
        copy
    }

    /// Where the superblocks are those of an earlier owner, the checkpoint tells of the later one; and
    /// those who are refused do not change that.
    #[test]
    fn the_checkpoint_of_a_later_owner_is_refused() {
        Reactor::simulated(1).block_on(async {
            let area: Rc<dyn Device> = Rc::new(RamDevice::new("ram", AREA_BYTES));
            let store = Store::create(Rc::clone(&area), Epoch(5), CONFIG).await.expect("made");
            put_and_close(&store, b"a").await;
            for seen in [5, 7] {
                let copy = with_older_superblocks(&area, 1).await;
                for ours in [1, 2, seen - 1] {
                    let opened = Store::open(Rc::clone(&copy), Epoch(ours), CONFIG).await;
                    let (ours, seen) = (Epoch(ours), Epoch(seen));
                    let expected = KvError::Block(BlockError::Fenced { ours, seen });
                    assert_eq!(opened.err(), Some(expected));
                }
                let opened = Store::open(copy, Epoch(seen), CONFIG).await.expect("opens");
                assert!(opened.get(b"a").await.expect("reads").is_some());
                // The next owner's first checkpoint is told apart too.
                let later = Store::open(Rc::clone(&area), Epoch(7), CONFIG).await.expect("opens");
                put_and_close(&later, b"b").await;
            }
        });
    }

    /// Every crash comes when the checkpoint is durable and the tail has not moved yet.
    #[test]
    fn a_tail_that_every_crash_leaves_behind_does_not_fill_the_log() {
        Reactor::simulated(2).block_on(async {
            let area: Rc<dyn Device> = Rc::new(RamDevice::new("ram", AREA_BYTES));
            let mut store = Store::create(Rc::clone(&area), Epoch(1), CONFIG).await.expect("made");
            let first = read_superblock(&area).await.expect("intact");
            for round in 0..40u64 {
                let tail = read_superblock(&area).await.expect("intact").tail;
                for part in 0..2 {
                    let mut batch = Batch::default();
                    batch.put(&[round as u8, part], &[part; 8000][..]);
                    store.room().await.expect("room");
                    let seq = store.apply(batch).expect("runs");
                    let durable =
                        reactor::timeout(Duration::from_secs(5), store.durable(seq)).await;
                    durable.expect("the log takes no more").expect("durable");
                }
                let limit = Duration::from_secs(5);
                let done = async {
                    while read_superblock(&area).await.expect("intact").tail == tail {
                        reactor::sleep(Duration::from_millis(1)).await;
                    }
                };
                reactor::timeout(limit, done).await.expect("a quarter of the log is a segment");
                drop(store);
                reactor::sleep(Duration::from_millis(10)).await;
                let mut superblock = read_superblock(&area).await.expect("intact");
                assert!(superblock.generation > first.generation);
                superblock.tail = tail;
                write_superblocks(&area, &superblock).await.expect("writes");
                store = Store::open(Rc::clone(&area), Epoch(1), CONFIG).await.expect("opens");
                for part in 0..2 {
                    let value = store.get(&[round as u8, part]).await.expect("reads");
                    assert_eq!(value.as_deref(), Some(&[part; 8000][..]));
                }
            }
        });
    }
}

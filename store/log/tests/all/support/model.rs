//! A model of objects as bytes, and tasks that make random changes to both. Also the workload of
//! the simulator's scenario: `sim/src/stores`.

use levada_base::ids::{BootVerifier, Ino, ObjectId, Seq, TargetId};
use levada_base::reactor::random_u64;
use levada_base::{Buf, IoVec};
use levada_log::{Config, LogError, ObjectLog, Stability};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

pub const TASKS: u64 = 4;
pub const OBJECTS_PER_TASK: u64 = 3;
pub const OBJECT_BYTES_MAX: u64 = 60_000;

pub fn below(n: u64) -> u64 {
    random_u64() % n
}

/// What the record of so many bytes takes (docs/design/0005-object-log.md).
pub fn footprint(bytes: u64) -> u64 {
    bytes.next_multiple_of(8) + (96 + 4 * bytes.div_ceil(4096)).next_multiple_of(8)
}

pub fn object(n: u64) -> ObjectId {
    ObjectId { fs: 1, ino: Ino(n), component: 0, version: 0 }
}

pub fn config() -> Config {
    Config {
        segment_stripes: 4,
        stripes_in_flight: 3,
        stage_bytes_max: 9000,
        // Objects are of several pages, and not all of them stay in memory.
        cached_bytes_max: 32 << 10,
        page_bytes: 8 << 10,
        ..Config::new(7, TargetId(3))
    }
}

pub type Contents = Option<Vec<u8>>;

/// What one object may be.
pub struct ObjectModel {
    pub now: Contents,
    /// Contents after each change that may not be durable, oldest first; the first is durable.
    pub history: Vec<(u64, Contents)>,
    /// Contents after the change that is being made.
    pub next: Option<Contents>,
}

#[derive(Default)]
pub struct Model {
    pub objects: BTreeMap<ObjectId, ObjectModel>,
    /// The life of the log that acknowledged the changes that may not be durable.
    pub life: BootVerifier,
    /// Changes that were done, and those refused because the log was full.
    pub changes: u64,
    pub refused: u64,
}

impl Model {
    pub fn of(&mut self, id: ObjectId) -> &mut ObjectModel {
        self.objects.entry(id).or_insert_with(|| ObjectModel {
            now: None,
            history: vec![(0, None)],
            next: None,
        })
    }

    pub fn done(&mut self, id: ObjectId, seq: u64) {
        let object = self.of(id);
        if let Some(next) = object.next.take() {
            object.now = next;
            object.history.push((seq, object.now.clone()));
        }
    }

    pub fn durable(&mut self, upto: u64) {
        for object in self.objects.values_mut() {
            let keep = object.history.iter().rposition(|(seq, _)| *seq <= upto).unwrap_or(0);
            object.history.drain(..keep);
        }
    }
}

pub async fn contents(log: &ObjectLog, id: ObjectId) -> Result<Contents, LogError> {
    let size = match log.stat(id).await {
        Ok(stat) => stat.size,
        Err(LogError::NoSuchObject) => return Ok(None),
        Err(error) => return Err(error),
    };
    let bytes = flat(&log.read(id, 0, size).await?);
    check_ranges(log, id, &bytes).await?;
    Ok(Some(bytes))
}

/// What lies outside of an object's ranges of data is zeroes; few of them are asked for at a time.
async fn check_ranges(log: &ObjectLog, id: ObjectId, bytes: &[u8]) -> Result<(), LogError> {
    let (mut at, mut zeroes_from) = (0, 0);
    while at != u64::MAX {
        let found = log.data_ranges(id, at, 1 + below(3) as usize).await?;
        for range in found.ranges {
            assert!(range.start >= at.max(zeroes_from) && !range.is_empty(), "in order");
            let gap = &bytes[zeroes_from as usize..range.start as usize];
            assert!(gap.iter().all(|byte| *byte == 0), "{id:?}: data in {zeroes_from}..");
            zeroes_from = range.end;
        }
        assert!(found.upto > at && found.upto >= zeroes_from);
        at = found.upto;
    }
    assert!(bytes[zeroes_from as usize..].iter().all(|byte| *byte == 0), "{id:?}: data at the end");
    Ok(())
}

pub fn flat(parts: &IoVec) -> Vec<u8> {
    levada_base::buf::joined(parts)
}

/// Some bytes in several buffers.
pub fn payload(bytes: u64) -> (IoVec, Vec<u8>) {
    let mut all = Vec::with_capacity(bytes as usize);
    while (all.len() as u64) < bytes {
        all.extend_from_slice(&random_u64().to_le_bytes());
    }
    all.truncate(bytes as usize);
    let cut = below(bytes + 1) as usize;
    let parts = [&all[..cut], &all[cut..]];
    (parts.iter().map(|part| Buf::copy_of(part)).collect(), all)
}

pub fn put(contents: &Contents, offset: u64, data: &[u8]) -> Contents {
    let mut bytes = contents.clone().unwrap_or_default();
    let end = offset as usize + data.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset as usize..end].copy_from_slice(data);
    Some(bytes)
}

/// Makes random changes to the objects of one task until it is killed.
pub async fn work(log: ObjectLog, model: Rc<RefCell<Model>>, task: u64, ops: u64) {
    for _ in 0..ops {
        let id = object(task * OBJECTS_PER_TASK + below(OBJECTS_PER_TASK));
        let now = model.borrow_mut().of(id).now.clone();
        let mut asked_bytes = 0;
        let stability = if below(8) == 0 { Stability::Durable } else { Stability::Unstable };
        let ack = match below(20) {
            0..=10 => {
                let aligned = below(3) == 0;
                let mut offset = below(OBJECT_BYTES_MAX);
                let mut bytes = 1 + if below(2) == 0 { below(600) } else { below(20_000) };
                if aligned {
                    offset = offset / 4096 * 4096;
                    bytes = bytes.next_multiple_of(4096);
                }
                let (data, flat) = payload(bytes);
                model.borrow_mut().of(id).next = Some(put(&now, offset, &flat));
                asked_bytes = bytes;
                log.write(id, offset, data, stability).await
            }
            11 => {
                let size = below(OBJECT_BYTES_MAX);
                let mut next = now.unwrap_or_default();
                next.resize(size as usize, 0);
                model.borrow_mut().of(id).next = Some(Some(next));
                log.truncate(id, size, stability).await
            }
            12 => {
                let (offset, bytes) = (below(OBJECT_BYTES_MAX), below(20_000));
                let grows = below(2) == 0;
                if now.is_none() && !grows {
                    let result = log.punch(id, offset, bytes, grows, stability).await;
                    assert_eq!(result, Err(LogError::NoSuchObject));
                    continue;
                }
                let mut next = now.unwrap_or_default();
                if grows {
                    next.resize(next.len().max((offset + bytes) as usize), 0);
                }
                let end = (offset + bytes).min(next.len() as u64) as usize;
                let from = (offset as usize).min(end);
                next[from..end].fill(0);
                model.borrow_mut().of(id).next = Some(Some(next));
                asked_bytes = bytes;
                log.punch(id, offset, bytes, grows, stability).await
            }
            13 => {
                model.borrow_mut().of(id).next = Some(None);
                log.delete(id).await
            }
            14 | 15 => {
                let seq = log.seq();
                let durable = log.commit(seq).await.expect("commit");
                assert!(durable >= seq);
                model.borrow_mut().durable(durable.0);
                continue;
            }
            _ => {
                let (offset, bytes) = (below(OBJECT_BYTES_MAX), below(40_000));
                let read = log.read(id, offset, bytes).await;
                match now {
                    None => assert!(matches!(read, Err(LogError::NoSuchObject))),
                    Some(now) => {
                        let mut expected = vec![0; bytes as usize];
                        let from = (offset as usize).min(now.len());
                        let to = ((offset + bytes) as usize).min(now.len());
                        expected[..to - from].copy_from_slice(&now[from..to]);
                        assert!(flat(&read.expect("read")) == expected, "{id:?} {offset}+{bytes}");
                    }
                }
                continue;
            }
        };
        let mut model = model.borrow_mut();
        let deleted = model.of(id).next == Some(None);
        let ack = match ack {
            // None of these changes is large enough to happen in part.
            Err(LogError::Full) if !deleted => {
                let (space, asked) = (log.space(), footprint(asked_bytes));
                assert!(space.free_bytes < asked, "{asked} bytes were refused: {space:?}");
                model.of(id).next = None;
                model.refused += 1;
                continue;
            }
            ack => ack.expect("change"),
        };
        model.changes += 1;
        model.done(id, ack.seq.0);
        model.durable(ack.durable.0);
    }
}

/// Where two contents differ, for the message.
pub fn difference(found: &Contents, expected: &Contents) -> String {
    let (Some(found), Some(expected)) = (found, expected) else {
        return format!("exists {}, expected {}", found.is_some(), expected.is_some());
    };
    let differs = |at: &usize| found.get(*at) != expected.get(*at);
    let all = 0..found.len().max(expected.len());
    let (first, last) = (all.clone().find(differs), all.rev().find(differs));
    format!("{} bytes, expected {}; differ in {first:?}..={last:?}", found.len(), expected.len())
}

/// Every object is as the changes left it that survived, by what the log tells of its lives, or as one left it
/// that was not acknowledged.
pub async fn check_all(log: &ObjectLog, model: &RefCell<Model>, seed: u64) {
    let ids: Vec<_> = model.borrow().objects.keys().copied().collect();
    let survived = log.survived(model.borrow().life);
    for id in ids {
        let found = contents(log, id).await.expect("readable");
        let mut model = model.borrow_mut();
        let object = model.of(id);
        if let Some(Seq(upto)) = survived {
            object.history.retain(|(seq, _)| *seq <= upto);
            let last = object.history.len().checked_sub(1);
            object.history.drain(..last.unwrap_or_else(|| panic!("seed {seed}: {id:?}: lost")));
        }
        let known = object.history.iter().map(|(_, contents)| contents);
        let mut allowed = known.chain(object.next.as_ref());
        if !allowed.any(|contents| *contents == found) {
            let newest = object.next.as_ref().unwrap_or(&object.now);
            panic!("seed {seed}: {id:?} is neither old nor new: {}", difference(&found, newest));
        }
        object.now = found.clone();
        object.history = vec![(0, found)];
        object.next = None;
    }
    model.borrow_mut().life = log.verifier();
}

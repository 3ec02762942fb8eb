//! Objects in memory: the model that the service and the client are tested against.
//!
//! Keeps the promises of the object log and no more: unstable changes are lost by
//! [`MemoryObjects::restarted`], but for a random prefix.

use crate::objects::{Ack, ObjectFuture, Objects, Space};
use levada_base::ids::{BootVerifier, ObjectId, Seq};
use levada_base::{Buf, BufMut, IoVec, reactor};
use levada_wire::object::{DataRanges, Hole, ObjectFault, ObjectStat, Stability};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

type Files = BTreeMap<ObjectId, Content>;

/// An object's bytes, and which of them are data.
#[derive(Clone, Default)]
struct Content {
    bytes: Vec<u8>,
    is_data: Vec<bool>,
    /// Of which so many are.
    stored: usize,
}

impl Content {
    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn resize(&mut self, len: usize) {
        self.stored -= self.data_in(len, usize::MAX);
        self.bytes.resize(len, 0);
        self.is_data.resize(len, false);
    }

    fn grow(&mut self, len: usize) {
        self.resize(self.len().max(len));
    }

    fn data_in(&self, start: usize, end: usize) -> usize {
        let end = end.min(self.len());
        self.is_data[start.min(end)..end].iter().filter(|is_data| **is_data).count()
    }

    /// Says of bytes that are there whether they are data.
    fn mark(&mut self, start: usize, end: usize, is_data: bool) {
        self.stored -= self.data_in(start, end);
        self.is_data[start..end].fill(is_data);
        self.stored += if is_data { end - start } else { 0 };
    }

    /// The next byte from `at` on that is data, or is not; the end if there is none.
    fn next(&self, at: usize, data: bool) -> usize {
        let rest = self.is_data.iter().skip(at).position(|is_data| *is_data == data);
        rest.map_or(self.len(), |skip| at + skip)
    }
}

#[derive(Clone, Debug)]
enum Change {
    Write { object: ObjectId, offset: u64, data: Vec<u8> },
    Truncate { object: ObjectId, size: u64 },
    Punch { object: ObjectId, hole: Hole },
    Delete { object: ObjectId },
}

impl Change {
    fn apply(&self, files: &mut Files) {
        match self {
            Self::Write { object, offset, data } => {
                let file = files.entry(*object).or_default();
                let (start, end) = (*offset as usize, *offset as usize + data.len());
                file.grow(end);
                file.bytes[start..end].copy_from_slice(data);
                file.mark(start, end, true);
            }
            Self::Truncate { object, size } => {
                files.entry(*object).or_default().resize(*size as usize);
            }
            Self::Punch { object, hole } => {
                let file = files.entry(*object).or_default();
                let (start, end) = (hole.offset as usize, (hole.offset + hole.bytes) as usize);
                if hole.grows {
                    file.grow(end);
                }
                let end = end.min(file.len());
                let start = start.min(end);
                file.bytes[start..end].fill(0);
                file.mark(start, end, false);
            }
            Self::Delete { object } => {
                files.remove(object);
            }
        }
    }
}

/// A target's objects in memory.
pub struct MemoryObjects {
    verifier: BootVerifier,
    /// The lives before, and up to where the changes of each survived.
    before: HashMap<BootVerifier, Seq>,
    capacity_bytes: u64,
    /// Every operation takes a random time below this.
    pub delay_max: Cell<Duration>,
    visible: RefCell<Files>,
    durable: RefCell<Files>,
    unstable: RefCell<VecDeque<(Seq, Change)>>,
    seq: Cell<Seq>,
    durable_seq: Cell<Seq>,
    /// Writes carried out, for tests that count.
    pub writes: Cell<u64>,
    /// So many truncations fail from now on.
    pub truncations_to_fail: Cell<u32>,
    /// So many writes that clients send again are refused from now on, which no target should do.
    pub repeats_to_fail: Cell<u32>,
}

impl MemoryObjects {
    /// No objects, room for `capacity_bytes`.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            verifier: BootVerifier(reactor::random_u64() | 1),
            before: HashMap::new(),
            capacity_bytes,
            delay_max: Cell::new(Duration::from_micros(200)),
            visible: RefCell::default(),
            durable: RefCell::default(),
            unstable: RefCell::default(),
            seq: Cell::default(),
            durable_seq: Cell::default(),
            writes: Cell::default(),
            truncations_to_fail: Cell::default(),
            repeats_to_fail: Cell::default(),
        }
    }

    /// What a restart after a power cut finds: the durable objects and a random prefix of the
    /// unstable changes.
    #[must_use]
    pub fn restarted(&self) -> Self {
        let unstable = self.unstable.borrow();
        let kept = reactor::random_u64() as usize % (unstable.len() + 1);
        let mut files = self.durable.borrow().clone();
        unstable.iter().take(kept).for_each(|(_, change)| change.apply(&mut files));
        let last = unstable.iter().take(kept).next_back();
        let survived = last.map_or(self.durable_seq.get(), |(seq, _)| *seq);
        let mut before = self.before.clone();
        before.insert(self.verifier, survived);
        Self {
            before,
            visible: RefCell::new(files.clone()),
            durable: RefCell::new(files),
            seq: self.seq.clone(),
            durable_seq: self.seq.clone(),
            delay_max: self.delay_max.clone(),
            writes: self.writes.clone(),
            ..Self::new(self.capacity_bytes)
        }
    }

    /// Objects that exist now.
    #[must_use]
    pub fn names(&self) -> Vec<ObjectId> {
        self.visible.borrow().keys().copied().collect()
    }

    async fn delay(&self) {
        let max_ns = self.delay_max.get().as_nanos() as u64;
        reactor::sleep(Duration::from_nanos(reactor::random_u64() % (max_ns + 1))).await;
    }

    fn change(&self, change: Change) -> Seq {
        let seq = Seq(self.seq.get().0 + 1);
        self.seq.set(seq);
        change.apply(&mut self.visible.borrow_mut());
        self.unstable.borrow_mut().push_back((seq, change));
        seq
    }

    fn make_durable(&self, upto: Seq) {
        let mut unstable = self.unstable.borrow_mut();
        let mut durable = self.durable.borrow_mut();
        while let Some((seq, _)) = unstable.front()
            && *seq <= upto
        {
            let (seq, change) = unstable.pop_front().expect("seen");
            change.apply(&mut durable);
            self.durable_seq.set(seq);
        }
    }

    fn ack(&self, seq: Seq) -> Ack {
        Ack { seq, durable: self.durable_seq.get() }
    }

    fn stored_bytes(&self) -> u64 {
        self.visible.borrow().values().map(|file| file.stored as u64).sum()
    }
}

impl Objects for MemoryObjects {
    fn verifier(&self) -> BootVerifier {
        self.verifier
    }

    fn survived(&self, life: BootVerifier) -> Option<Seq> {
        self.before.get(&life).copied()
    }

    fn write(
        &self,
        object: ObjectId,
        offset: u64,
        data: IoVec,
        stability: Stability,
    ) -> ObjectFuture<'_, Ack> {
        Box::pin(async move {
            self.delay().await;
            let mut data = levada_base::buf::joined(&data);
            if stability == Stability::Again
                && let Some(left) = self.repeats_to_fail.get().checked_sub(1)
            {
                self.repeats_to_fail.set(left);
                return Err(ObjectFault::Damaged { offset, bytes: data.len() as u64 });
            }
            let (start, end) = (offset as usize, offset as usize + data.len());
            let replaced = self.visible.borrow().get(&object).map_or(0, |f| f.data_in(start, end));
            let room = self.capacity_bytes.saturating_sub(self.stored_bytes());
            if (data.len() - replaced) as u64 > room && stability != Stability::Again {
                // As the log writes run by run, a part of it may have happened.
                data.truncate((reactor::random_u64() % (room + 1)) as usize);
                if !data.is_empty() {
                    self.change(Change::Write { object, offset, data });
                }
                return Err(ObjectFault::Full);
            }
            self.writes.set(self.writes.get() + 1);
            let seq = self.change(Change::Write { object, offset, data });
            self.delay().await;
            if stability == Stability::Durable {
                self.make_durable(seq);
            }
            Ok(self.ack(seq))
        })
    }

    fn read(&self, object: ObjectId, offset: u64, bytes: u64) -> ObjectFuture<'_, IoVec> {
        Box::pin(async move {
            self.delay().await;
            let visible = self.visible.borrow();
            let file = visible.get(&object).ok_or(ObjectFault::NoSuchObject)?;
            if bytes == 0 {
                return Ok(IoVec::new());
            }
            let mut data = BufMut::zeroed(bytes as usize);
            let start = (offset as usize).min(file.len());
            let end = (start + bytes as usize).min(file.len());
            data[..end - start].copy_from_slice(&file.bytes[start..end]);
            Ok(Buf::into_vec(data.freeze()))
        })
    }

    fn commit(&self, upto: Seq) -> ObjectFuture<'_, Seq> {
        Box::pin(async move {
            self.delay().await;
            self.make_durable(upto);
            Ok(self.durable_seq.get())
        })
    }

    fn truncate(&self, object: ObjectId, size: u64) -> ObjectFuture<'_, Ack> {
        Box::pin(async move {
            self.delay().await;
            if let Some(left) = self.truncations_to_fail.get().checked_sub(1) {
                self.truncations_to_fail.set(left);
                return Err(ObjectFault::Damaged { offset: size, bytes: 1 });
            }
            Ok(self.ack(self.change(Change::Truncate { object, size })))
        })
    }

    fn punch(&self, object: ObjectId, hole: Hole, stability: Stability) -> ObjectFuture<'_, Ack> {
        Box::pin(async move {
            self.delay().await;
            if !hole.grows && !self.visible.borrow().contains_key(&object) {
                return Err(ObjectFault::NoSuchObject);
            }
            let seq = self.change(Change::Punch { object, hole });
            if stability == Stability::Durable {
                self.make_durable(seq);
            }
            Ok(self.ack(seq))
        })
    }

    fn data_ranges(
        &self,
        object: ObjectId,
        offset: u64,
        ranges_max: u32,
    ) -> ObjectFuture<'_, DataRanges> {
        Box::pin(async move {
            self.delay().await;
            let visible = self.visible.borrow();
            let file = visible.get(&object).ok_or(ObjectFault::NoSuchObject)?;
            let mut found = DataRanges { ranges: Vec::new(), upto: u64::MAX };
            let mut start = file.next(offset as usize, true);
            while start < file.len() {
                if found.ranges.len() == ranges_max as usize {
                    found.upto = start as u64;
                    break;
                }
                let end = file.next(start, false);
                found.ranges.push(start as u64..end as u64);
                start = file.next(end, true);
            }
            Ok(found)
        })
    }

    fn delete(&self, object: ObjectId) -> ObjectFuture<'_, Ack> {
        Box::pin(async move {
            self.delay().await;
            let seq = self.change(Change::Delete { object });
            self.make_durable(seq);
            Ok(self.ack(seq))
        })
    }

    fn stat(&self, object: ObjectId) -> ObjectFuture<'_, Option<ObjectStat>> {
        Box::pin(async move {
            self.delay().await;
            let visible = self.visible.borrow();
            let file = visible.get(&object);
            Ok(file.map(|file| ObjectStat {
                size: file.len() as u64,
                stored_bytes: file.stored as u64,
            }))
        })
    }

    fn space(&self) -> ObjectFuture<'_, Space> {
        Box::pin(async move {
            let free_bytes = self.capacity_bytes.saturating_sub(self.stored_bytes());
            Ok(Space { total_bytes: self.capacity_bytes, free_bytes, coming_bytes: 0 })
        })
    }
}

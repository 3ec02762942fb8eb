//! Changes that a target has acknowledged but not yet made durable: kept, to be sent again
//! should it restart.
//!
//! What always holds: a change is kept from its acknowledgement until the target said, with
//! the verifier under which it acknowledged, that a sequence at or above its own is durable.

use levada_base::IoVec;
use levada_base::buf::bytes_in;
use levada_base::ids::{ObjectId, Seq};
use levada_base::sync::Permit;
use levada_wire::object::Hole;
use std::collections::BTreeMap;

/// What was asked of an object.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { offset: u64, data: IoVec },
    Truncate { size: u64 },
    Punch(Hole),
}

/// A change that may have to be sent again.
pub(crate) struct Kept {
    pub(crate) object: ObjectId,
    pub(crate) change: Change,
    /// Its share of the bound on unstable bytes.
    pub(crate) _permit: Option<Permit>,
}

impl Kept {
    fn bytes(&self) -> u64 {
        match &self.change {
            Change::Write { data, .. } => bytes_in(data),
            Change::Truncate { .. } | Change::Punch(_) => 0,
        }
    }

    /// True when the order of the two matters.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        let range = |kept: &Self| match &kept.change {
            Change::Write { offset, data } => (*offset, offset + bytes_in(data)),
            Change::Truncate { .. } => (0, u64::MAX),
            Change::Punch(hole) => (hole.offset, hole.offset + hole.bytes),
        };
        let ((a, a_end), (b, b_end)) = (range(self), range(other));
        self.object == other.object && a < b_end && b < a_end
    }
}

/// The kept changes of one life of one target, in its order.
#[derive(Default)]
pub(crate) struct Unstable {
    kept: BTreeMap<Seq, Kept>,
    per_object: BTreeMap<ObjectId, usize>,
    bytes: u64,
    /// The target said so.
    durable: Seq,
}

impl Unstable {
    /// Keeps a change that was acknowledged as `seq`, unless it is durable already.
    pub(crate) fn keep(&mut self, seq: Seq, kept: Kept) {
        if seq > self.durable {
            self.bytes += kept.bytes();
            *self.per_object.entry(kept.object).or_default() += 1;
            self.kept.insert(seq, kept);
        }
    }

    /// Forgets what is durable.
    pub(crate) fn durable(&mut self, upto: Seq) {
        self.durable = self.durable.max(upto);
        while let Some(first) = self.kept.first_entry()
            && *first.key() <= upto
        {
            let kept = first.remove();
            self.bytes -= kept.bytes();
            let left = self.per_object.get_mut(&kept.object).expect("counted");
            *left -= 1;
            if *left == 0 {
                self.per_object.remove(&kept.object);
            }
        }
    }

    pub(crate) fn last(&self) -> Option<Seq> {
        self.kept.last_key_value().map(|(seq, _)| *seq)
    }

    pub(crate) fn holds(&self, object: ObjectId) -> bool {
        self.per_object.contains_key(&object)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Everything kept, in order; for a new life of the target, which gives out other sequences.
    pub(crate) fn take(&mut self) -> Vec<(Seq, Kept)> {
        std::mem::take(self).kept.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::Buf;
    use levada_base::ids::Ino;

    fn write(ino: u64, offset: u64) -> Kept {
        let object = ObjectId { fs: 1, ino: Ino(ino), component: 0, version: 1 };
        let change = Change::Write { offset, data: Buf::copy_of(&[0; 10]).into_vec() };
        Kept { object, change, _permit: None }
    }

    #[test]
    fn acknowledgements_may_arrive_in_any_order() {
        let mut unstable = Unstable::default();
        unstable.keep(Seq(3), write(1, 0));
        unstable.keep(Seq(2), write(2, 0));
        unstable.durable(Seq(2));
        unstable.keep(Seq(1), write(3, 0));
        assert_eq!((unstable.bytes(), unstable.last()), (10, Some(Seq(3))));
        assert!(unstable.holds(write(1, 0).object) && !unstable.holds(write(3, 0).object));
        unstable.durable(Seq(9));
        assert_eq!((unstable.bytes(), unstable.last()), (0, None));
        assert!(!unstable.holds(write(1, 0).object));
    }

    #[test]
    fn order_matters_within_overlapping_ranges_of_one_object() {
        assert!(write(1, 0).conflicts_with(&write(1, 9)));
        assert!(!write(1, 0).conflicts_with(&write(1, 10)));
        assert!(!write(1, 0).conflicts_with(&write(2, 0)));
        let cut = Kept { change: Change::Truncate { size: 5 }, ..write(1, 0) };
        assert!(cut.conflicts_with(&write(1, 100)));
        let punch = |offset, bytes| {
            let change = Change::Punch(Hole { offset, bytes, grows: true });
            Kept { change, ..write(1, 0) }
        };
        assert!(punch(9, 1).conflicts_with(&write(1, 0)) && cut.conflicts_with(&punch(9, 0)));
        assert!(!punch(10, 9).conflicts_with(&write(1, 0)), "elsewhere");
        assert!(!punch(5, 0).conflicts_with(&punch(4, 0)), "both grow");
    }
}

//! Records without data (truncations, holes, deletions): which of them a segment that is emptied leaves behind.
//!
//! They exist so that older data cannot come back when the index is rebuilt. One is dropped when a later one covers
//! it, or when no segment holds anything dead that is older and no object's size hangs on it; else it is copied.

use crate::LogError;
use crate::format::{RecordHeader, RecordKind};
use crate::log::Inner;
use crate::object::{Change, Object};
use crate::write::Need;
use levada_base::planted;
use std::rc::Rc;

impl Inner {
    /// Copies what is needed of a segment's records without data, whose data was copied before. False when a row of an
    /// object is damaged.
    pub(super) async fn keep_marks(
        self: &Rc<Self>,
        victim: u32,
        mut marks: Vec<RecordHeader>,
    ) -> Result<bool, LogError> {
        // The oldest first: whether one is needed hangs on what is kept that is older, and copies
        // made before do not lie in the order of their versions.
        marks.sort_unstable_by_key(|header| header.version);
        // Passes that were cut off by crashes left copies.
        marks.dedup_by_key(|header| header.version);
        // What is outdated and older than a record here has been so since that was indexed, and only
        // the cleaner moves it: so one look at the other segments is enough.
        let mut elsewhere = Elsewhere(self.state.borrow().outdated_min_but(Some(victim)));
        for header in marks {
            if !self.keep_mark(victim, &header, &mut elsewhere).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Copies a record without data, unless nothing needs it. Whatever is older in its segment and
    /// stays has been copied before. False when a row of its object is damaged.
    async fn keep_mark(
        self: &Rc<Self>,
        victim: u32,
        header: &RecordHeader,
        elsewhere: &mut Elsewhere,
    ) -> Result<bool, LogError> {
        let hides_something = elsewhere.is_hidden_by(header.version);
        let object = match header.kind {
            // There are many, and what the index knows of their objects does not matter.
            RecordKind::Delete => Object::unknown(header.object),
            RecordKind::Data | RecordKind::Truncate | RecordKind::Punch => {
                let Some(object) = self.readable(header.object).await? else { return Ok(false) };
                object
            }
        };
        // A pass that a crash cut off has copied it.
        let mark = object.indexed.borrow().mark;
        let is_copied =
            mark.version == header.version && mark.segment.is_some_and(|segment| segment != victim);
        let carries_size = [&object.now, &object.indexed].iter().any(|view| {
            let view = view.borrow();
            view.exists && view.mark.version == header.version
        });
        let needed = carries_size || hides_something && !is_superseded(&object, header);
        let needed = needed && !is_copied;
        if needed && !planted!("log-tombstone-dropped") {
            self.room(Need::Copy).await?;
            let header = RecordHeader { data_at: 0, ..header.clone() };
            let carries_size = object.now.borrow().mark.version == header.version;
            let mut state = self.state.borrow_mut();
            if self.put_mark_record(&mut state, &object, &header, Change::Keep { carries_size }) {
                elsewhere.kept(header.version);
            }
        }
        Ok(true)
    }
}

/// The age of the oldest outdated record outside of a victim: one look at all segments, kept up to date with
/// what the cleaner keeps, instead of a look for each record.
struct Elsewhere(u64);

impl Elsewhere {
    /// True when a record without data of that version may hide something.
    fn is_hidden_by(&self, version: u64) -> bool {
        self.0 < version
    }

    /// An outdated record of that version was copied.
    fn kept(&mut self, version: u64) {
        self.0 = self.0.min(version);
    }
}

/// True when a later record, indexed and so never lost, hides all that this one hides.
fn is_superseded(object: &Object, header: &RecordHeader) -> bool {
    let indexed = object.indexed.borrow();
    // What was deleted left a record that hides everything.
    let deleted = !indexed.exists && !object.now.borrow().exists;
    match header.kind {
        RecordKind::Truncate => deleted || indexed.cuts.supersede(header.version, header.size),
        RecordKind::Punch => deleted || indexed.cuts.supersede(header.version, header.offset),
        RecordKind::Delete | RecordKind::Data => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Against a look at all segments for each record: the copies go to the first of them.
        #[test]
        fn one_look_at_the_other_segments_is_enough(
            mut segments in prop::collection::vec(prop_oneof![0..60u64, Just(u64::MAX)], 1..8),
            mut marks in prop::collection::vec((0..60u64, any::<bool>(), any::<bool>()), 0..30),
        ) {
            marks.sort_unstable();
            let mut elsewhere = Elsewhere(segments.iter().copied().min().unwrap_or(u64::MAX));
            for (version, is_superseded, is_delete) in marks {
                let hides = segments.iter().any(|outdated_min| *outdated_min < version);
                prop_assert_eq!(elsewhere.is_hidden_by(version), hides);
                if hides && !is_superseded && !is_delete {
                    segments[0] = segments[0].min(version);
                    elsewhere.kept(version);
                }
            }
        }
    }
}

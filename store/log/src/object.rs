//! Objects in memory: what is true now, and what the index knows.
//!
//! A change is applied to the first view at once and to the second when the stripe that holds
//! it is indexed. The views take the same changes in the same order, so the second is always a
//! past of the first, and the rows of the index are the second view's. The cleaner's copies alone may
//! come to the second view earlier or later than others: they take over what still points at their originals, so
//! both views come to the same.
//!
//! Of an object that is in memory its head is: all but its extents. Those come by [pages](crate::pages), when somebody
//! needs them ([`crate::load`]).

use crate::cuts::{Cut, Cuts};
use crate::extents::{ExtentMap, Place, Record, Watch};
use crate::pages::{Cache, Page, Search};
use crate::rows::{Mark, ObjectRow};
use levada_base::ids::ObjectId;
use levada_base::sync::Notify;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

/// One change of one object.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// Bytes written.
    Write(Rc<Record>),
    /// A copy made by the cleaner takes over from the records at these places.
    Relocate {
        from: Rc<[Place]>,
        to: Rc<Record>,
    },
    /// The size is set.
    Truncate {
        size: u64,
    },
    /// A hole is made; the size stays.
    Punch {
        from: u64,
        to: u64,
        size: u64,
    },
    Delete,
    /// A copy of a record without data, which lies elsewhere now.
    Keep {
        /// It carried its object's size when it was copied.
        carries_size: bool,
    },
}

impl Change {
    /// True when its record has no data.
    pub fn is_mark(&self) -> bool {
        match self {
            Self::Truncate { .. } | Self::Punch { .. } | Self::Delete | Self::Keep { .. } => true,
            Self::Write(_) | Self::Relocate { .. } => false,
        }
    }

    /// True when something died by it, other than by being copied: what it `removed`, or a record without data.
    pub fn kills(&self, removed: bool) -> bool {
        match self {
            Self::Relocate { .. } | Self::Keep { .. } => false,
            Self::Write(_) => removed,
            // Their own records may be what is dead.
            Self::Truncate { .. } | Self::Punch { .. } | Self::Delete => true,
        }
    }
}

/// One view of an object.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    pub exists: bool,
    pub size: u64,
    /// See [`ObjectRow::mark`].
    pub mark: Mark,
    pub cuts: Cuts,
    /// Its row is from before those told how much is stored.
    pub is_row_old: bool,
    pub extents: ExtentMap,
}

impl View {
    /// Applies a change whose record is in `segment`.
    pub fn apply(&mut self, version: u64, change: &Change, segment: u32, watch: &mut impl Watch) {
        let mark = Mark { version, segment: Some(segment) };
        // Whatever is written anew tells it.
        self.is_row_old &= !self.is_row_changed_by(version, change, mark);
        match change {
            Change::Write(record) => {
                let len = u64::from(record.stored);
                self.exists = true;
                self.size = self.size.max(record.offset + len);
                self.extents.write(record, len, watch);
            }
            Change::Relocate { from, to } => self.extents.relocate(from, to, watch),
            Change::Truncate { size } => {
                self.extents.remove(*size, u64::MAX, watch);
                self.exists = true;
                self.size = *size;
                self.set_mark(mark, watch);
                self.cuts.push(Cut { version, size: *size });
            }
            Change::Punch { from, to, size } => {
                self.extents.remove(*from, *to, watch);
                self.exists = true;
                self.size = *size;
                self.set_mark(mark, watch);
            }
            Change::Delete => {
                self.extents.remove(0, u64::MAX, watch);
                self.set_mark(Mark::default(), watch);
                *self = Self::default();
            }
            Change::Keep { .. } if self.mark.version == version => self.set_mark(mark, watch),
            Change::Keep { .. } => {}
        }
    }

    /// True when the object's row is another one after a change.
    fn is_row_changed_by(&self, version: u64, change: &Change, mark: Mark) -> bool {
        match change {
            Change::Write(_) | Change::Truncate { .. } | Change::Punch { .. } | Change::Delete => {
                true
            }
            Change::Keep { .. } => self.mark.version == version && self.mark != mark,
            Change::Relocate { .. } => false,
        }
    }

    fn set_mark(&mut self, mark: Mark, watch: &mut impl Watch) {
        let before = std::mem::replace(&mut self.mark, mark);
        if before != mark {
            watch.mark_moved(before, mark);
        }
    }

    pub fn row(&self) -> ObjectRow {
        let stored_bytes = (!self.is_row_old).then(|| self.extents.stored_bytes());
        ObjectRow { size: self.size, mark: self.mark, cuts: self.cuts.clone(), stored_bytes }
    }
}

/// An object, whether it exists or not.
pub(crate) struct Object {
    pub id: ObjectId,
    pub now: RefCell<View>,
    pub indexed: RefCell<View>,
    /// Its head is in memory, or somebody reads it just now.
    pub is_loaded: Cell<bool>,
    pub is_loading: Cell<bool>,
    /// Its head or a page has come, or could not be read.
    pub loaded: Notify,
    /// All of it is in memory, and stays there: it is in no cache.
    pub is_whole: bool,
    pub cache: Rc<Cache>,
    /// By their numbers.
    pub pages: RefCell<BTreeMap<u64, Rc<Page>>>,
    /// What touches this offset or a later one is in memory.
    pub tail: Cell<u64>,
    pub searches: RefCell<Vec<Weak<Search>>>,
}

impl Object {
    /// An object of which nothing is known, outside of any cache.
    pub fn unknown(id: ObjectId) -> Rc<Self> {
        Rc::new(Self::new(id, Rc::new(Cache::new(u64::MAX, 1)), true))
    }

    pub fn new(id: ObjectId, cache: Rc<Cache>, is_whole: bool) -> Self {
        Self {
            id,
            now: RefCell::default(),
            indexed: RefCell::default(),
            is_loaded: Cell::new(false),
            is_loading: Cell::new(false),
            loaded: Notify::default(),
            is_whole,
            cache,
            pages: RefCell::default(),
            tail: Cell::new(0),
            searches: RefCell::default(),
        }
    }
}

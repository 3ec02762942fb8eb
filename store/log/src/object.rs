//! Objects in memory: what is true now, and what the index knows.
//!
//! A change is applied to the first view at once and to the second when the stripe that holds
//! it is indexed. The views take the same changes in the same order, so the second is always a
//! past of the first, and the rows of the index are the second view's.
//!
//! Objects nobody uses, whose changes are all indexed, are forgotten when the cache is over its
//! bound, the least recently used first. One with changes on their way is held by them.

use crate::LogError;
use crate::cuts::{Cut, Cuts};
use crate::extents::{ExtentMap, Place, Record, Watch};
use crate::rows::{self, LOG_KEY, LogRow, Mark, ObjectRow};
use levada_base::ids::ObjectId;
use levada_base::meter::HitMeter;
use levada_base::sync::Notify;
use levada_kv::Store;
use lru::LruCache;
use std::cell::{Cell, RefCell};
use std::ops::Bound;
use std::rc::Rc;

/// Rows asked of the store at once.
const ROWS_PER_SCAN: usize = 1024;

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
    pub extents: ExtentMap,
}

impl View {
    /// Applies a change whose record is in `segment`.
    pub fn apply(&mut self, version: u64, change: &Change, segment: u32, watch: &mut impl Watch) {
        let mark = Mark { version, segment: Some(segment) };
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

    fn set_mark(&mut self, mark: Mark, watch: &mut impl Watch) {
        let before = std::mem::replace(&mut self.mark, mark);
        if before != mark {
            watch.mark_moved(before, mark);
        }
    }

    pub fn row(&self) -> ObjectRow {
        ObjectRow { size: self.size, mark: self.mark, cuts: self.cuts.clone() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Load {
    Unknown,
    Loading,
    Loaded,
}

/// An object, whether it exists or not.
pub(crate) struct Object {
    pub id: ObjectId,
    pub now: RefCell<View>,
    pub indexed: RefCell<View>,
    load: Cell<Load>,
    loaded: Notify,
}

impl Object {
    /// An object of which nothing is known, outside of any cache.
    pub fn unknown(id: ObjectId) -> Rc<Self> {
        Rc::new(Self {
            id,
            now: RefCell::default(),
            indexed: RefCell::default(),
            load: Cell::new(Load::Unknown),
            loaded: Notify::default(),
        })
    }
}

/// Objects by name, loaded from the index on first touch.
pub(crate) struct Objects {
    store: Store,
    cache: RefCell<LruCache<ObjectId, Rc<Object>>>,
    extents_max: usize,
    /// Extents that the cached objects have now, and one for each object.
    extents: Cell<usize>,
    /// The log's own row when it was last looked at: its geometry.
    log: Cell<Option<LogRow>>,
    /// Objects that were asked for: in memory, or to be read from the index.
    pub asked: HitMeter,
}

impl Objects {
    pub fn new(store: Store, extents_max: usize) -> Self {
        let cache = RefCell::new(LruCache::unbounded());
        let (extents, log, asked) = (Cell::new(0), Cell::new(None), HitMeter::default());
        Self { store, cache, extents_max, extents, log, asked }
    }

    /// The object by that name, with its whole map. [`LogError::Index`] when a row of it makes no
    /// sense, and then no other object is concerned.
    pub async fn get(&self, id: ObjectId) -> Result<Rc<Object>, LogError> {
        let object = {
            let mut cache = self.cache.borrow_mut();
            let object = cache.get_or_insert(id, || Object::unknown(id));
            Rc::clone(object)
        };
        self.asked.count(object.load.get() == Load::Loaded);
        loop {
            let loaded = object.loaded.changed();
            match object.load.get() {
                Load::Loaded => break,
                Load::Loading => loaded.await,
                Load::Unknown => {
                    let mut loading = Loading { object: &object, outcome: Load::Unknown };
                    object.load.set(Load::Loading);
                    let view = self.read(id).await.inspect_err(|error| {
                        if let LogError::Index { row } = error {
                            tracing::error!(object = ?id, row, "a row makes no sense: only \
                                making the index anew brings this object back");
                        }
                    })?;
                    self.extents.set(self.extents.get() + view.extents.len() + 1);
                    *object.now.borrow_mut() = view.clone();
                    *object.indexed.borrow_mut() = view;
                    loading.outcome = Load::Loaded;
                    drop(loading);
                    self.shrink();
                }
            }
        }
        Ok(object)
    }

    async fn read(&self, id: ObjectId) -> Result<View, LogError> {
        let Some(row) = self.store.get(&ObjectRow::key(id)).await? else {
            return Ok(View::default());
        };
        let ObjectRow { size, mark, cuts } = ObjectRow::decode(&row)?;
        if let Some(segment) = mark.segment
            && !self.log_fits(|log| log.has_segment(segment)).await?
        {
            return Err(LogError::Index { row: "object" });
        }
        let mut view = View { exists: true, size, mark, cuts, extents: ExtentMap::default() };
        let end = rows::extent_key(id, u64::MAX);
        let mut from = Bound::Included(rows::extent_key(id, 0));
        loop {
            let bound = from.as_ref().map(Vec::as_slice);
            let found = self.store.scan(bound, Bound::Included(&end), ROWS_PER_SCAN).await?;
            for (key, value) in &found {
                let (offset, extent) = rows::decode_extent(key, value)?;
                let (place, stored) = (extent.record.place, extent.record.stored);
                if !self.log_fits(|log| place.is_in(log, stored)).await?
                    || !view.extents.load(offset, extent)
                {
                    return Err(LogError::Index { row: "extent" });
                }
            }
            match found.last() {
                Some((key, _)) if found.len() == ROWS_PER_SCAN => {
                    from = Bound::Excluded(key.to_vec());
                }
                _ => return Ok(view),
            }
        }
    }

    /// Whether the log is as a row has it. Its own row comes with every batch, so it is never behind
    /// the others; one that was read earlier may be, if the array has grown since.
    async fn log_fits(&self, fits: impl Fn(&LogRow) -> bool) -> Result<bool, LogError> {
        if self.log.get().as_ref().is_some_and(&fits) {
            return Ok(true);
        }
        let row = self.store.get(LOG_KEY).await?.ok_or(LogError::Index { row: "log" })?;
        let row = LogRow::decode(&row)?;
        self.log.set(Some(row));
        Ok(fits(&row))
    }

    /// A cached object has `after` extents where it had `before`.
    pub fn resized(&self, before: usize, after: usize) {
        self.extents.set((self.extents.get() + after).saturating_sub(before));
    }

    /// Forgets objects until the cache is inside its bound, or a run of objects is in use.
    pub fn shrink(&self) {
        const IN_USE_MAX: usize = 8;
        let mut cache = self.cache.borrow_mut();
        let mut in_use = 0;
        while self.extents.get() > self.extents_max && in_use < IN_USE_MAX {
            let Some((id, object)) = cache.pop_lru() else { break };
            if Rc::strong_count(&object) > 1 {
                cache.put(id, object);
                in_use += 1;
                continue;
            }
            let extents = object.now.borrow().extents.len() + 1;
            self.extents.set(self.extents.get().saturating_sub(extents));
        }
        if cache.is_empty() {
            self.extents.set(0);
        }
    }
}

/// Lets the next one try when loading fails or is given up.
struct Loading<'a> {
    object: &'a Object,
    outcome: Load,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.object.load.set(self.outcome);
        self.object.loaded.notify_all();
    }
}

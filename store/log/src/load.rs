//! Objects by name, and their maps page by page: read from the index when somebody needs them.
//!
//! Reading a page takes one wait: for its rows, and beside that for the one before them, which may reach into the page.
//!
//! What always holds: the pages that are being read do not change meanwhile, as changes are made only in loaded ones.

use crate::LogError;
use crate::extents::{Extent, ExtentMap};
use crate::log::Config;
use crate::object::{Object, View};
use crate::pages::{Cache, Held, Missing, Search, memory_bytes};
use crate::rows::{self, LOG_KEY, LogRow, ObjectRow};
use futures_util::future::try_join;
use levada_base::ids::ObjectId;
use levada_base::meter::HitMeter;
use levada_base::planted;
use levada_kv::{Bytes, Store};
use lru::LruCache;
use std::cell::{Cell, RefCell};
use std::ops::{Bound, Range};
use std::rc::Rc;

/// Rows asked of the store at once.
const ROWS_PER_SCAN: usize = 1024;
/// The same along an object, where all pages that they touch are read then.
const ROWS_PER_SEARCH: usize = 256;
/// Memory that an object takes without its pages.
const HEAD_BYTES: u64 = 512;
/// Heads may take this part of the cache beside pages.
const HEADS_SHARE: u64 = 4;
/// Objects that are passed over, because somebody uses them, before the rest is left for later.
const IN_USE_MAX: usize = 8;

/// See the module.
pub(crate) struct Objects {
    store: Store,
    heads: RefCell<LruCache<ObjectId, Rc<Object>>>,
    cache: Rc<Cache>,
    /// No extent is longer.
    stripe_bytes: u64,
    /// The log's own row when it was last looked at: its geometry.
    log: Cell<Option<LogRow>>,
    /// Objects that were asked for: in memory, or to be read from the index.
    pub asked: HitMeter,
}

/// Where a search begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Up,
    Down,
}

impl Objects {
    pub fn new(store: Store, config: &Config, stripe_bytes: u64) -> Self {
        let heads = RefCell::new(LruCache::unbounded());
        let cache = Rc::new(Cache::new(config.cached_bytes_max, config.page_bytes));
        let (log, asked) = (Cell::new(None), HitMeter::default());
        Self { store, heads, cache, stripe_bytes, log, asked }
    }

    /// Memory that objects take.
    pub fn bytes(&self) -> u64 {
        self.cache.bytes.get()
    }

    /// The object by that name, without its extents. [`LogError::Index`] when its row makes no sense, and then no
    /// other object is concerned.
    pub async fn get(&self, id: ObjectId) -> Result<Rc<Object>, LogError> {
        let object = {
            let mut heads = self.heads.borrow_mut();
            let new = || Rc::new(Object::new(id, Rc::clone(&self.cache), false));
            Rc::clone(heads.get_or_insert(id, new))
        };
        self.asked.count(object.is_loaded.get());
        while !object.is_loaded.get() {
            let loaded = object.loaded.changed();
            if object.is_loading.get() {
                loaded.await;
                continue;
            }
            let _loading = LoadingHead(&object);
            object.is_loading.set(true);
            let view = self.read(id).await.inspect_err(|error| tell(id, error))?;
            object.tail.set(view.size);
            *object.now.borrow_mut() = view.clone();
            *object.indexed.borrow_mut() = view;
            object.is_loaded.set(true);
            self.cache.changed(HEAD_BYTES as i64);
            self.shrink();
        }
        Ok(object)
    }

    async fn read(&self, id: ObjectId) -> Result<View, LogError> {
        let Some(row) = self.store.get(&ObjectRow::key(id)).await? else {
            return Ok(View::default());
        };
        let ObjectRow { size, mark, cuts, stored_bytes } = ObjectRow::decode(&row)?;
        if let Some(segment) = mark.segment
            && !self.log_fits(|log| log.has_segment(segment)).await?
        {
            return Err(LogError::Index { row: "object" });
        }
        let is_row_old = stored_bytes.is_none();
        let stored_bytes = match stored_bytes {
            Some(stored_bytes) => stored_bytes,
            None => self.count_stored(id).await?,
        };
        let extents = ExtentMap::unread(stored_bytes);
        Ok(View { exists: true, size, mark, cuts, is_row_old, extents })
    }

    /// Bytes that the extents of an object hold whose row does not tell.
    async fn count_stored(&self, id: ObjectId) -> Result<u64, LogError> {
        let end = rows::extent_key(id, u64::MAX);
        let mut from = Bound::Included(rows::extent_key(id, 0));
        let mut stored_bytes = 0;
        loop {
            let bound = from.as_ref().map(Vec::as_slice);
            let found = self.store.scan_page(bound, Bound::Included(&end), ROWS_PER_SCAN).await?;
            for (key, value) in &found.rows {
                stored_bytes += rows::decode_extent(key, value)?.1.len;
            }
            match found.upto {
                Some(upto) => from = Bound::Excluded(upto.to_vec()),
                None => return Ok(stored_bytes),
            }
        }
    }

    /// Brings everything that touches `from..to` into memory, and keeps it there.
    pub async fn load(&self, object: &Rc<Object>, from: u64, to: u64) -> Result<Held, LogError> {
        let mut held = Held::default();
        if object.is_whole || from >= to {
            return Ok(held);
        }
        if object.knows(from, to) {
            object.hold_loaded(&(from..to), &mut held);
            return Ok(held);
        }
        let wanted = object.pages_of(&(from..to));
        loop {
            let loaded = object.loaded.changed();
            match object.missing(wanted.clone()) {
                Missing::None => {
                    object.hold_loaded(&(from..to), &mut held);
                    return Ok(held);
                }
                Missing::Loading => loaded.await,
                Missing::Pages(pages) => {
                    // What is there before them must be when they are.
                    let before = object.offsets_of(&(wanted.start..pages.start));
                    object.hold_loaded(&before, &mut held);
                    let read = self.read_pages(object, pages).await;
                    held.join(read.inspect_err(|error| tell(object.id, error))?);
                }
            }
        }
    }

    /// As [`Objects::load`], for those who look through an object piece by piece; behind its end there is nothing to load.
    pub async fn load_to_look(
        &self,
        object: &Rc<Object>,
        from: u64,
        to: u64,
    ) -> Result<Held, LogError> {
        let size = object.now.borrow().size;
        self.load(object, from, to.min(size)).await
    }

    /// As [`Objects::load`], and the extents that touch the range are in all of their pages: they may be cut.
    pub async fn load_to_change(
        &self,
        object: &Rc<Object>,
        from: u64,
        to: u64,
    ) -> Result<Held, LogError> {
        let mut held = self.load(object, from, to).await?;
        while let Some(edge) = object.unknown_edge(from, to) {
            held.join(self.load(object, edge.start, edge.end).await?);
        }
        Ok(held)
    }

    /// Reads neighbouring pages, none of which is there.
    async fn read_pages(&self, object: &Rc<Object>, pages: Range<u64>) -> Result<Held, LogError> {
        let offsets = object.offsets_of(&pages);
        let loading = object.begin(pages.clone());
        // Behind the tail there is nothing.
        let end = offsets.end.min(object.tail.get());
        let mut found = Vec::new();
        if offsets.start < end {
            let before = self.reaching_into(object, offsets.start);
            let (before, rows) =
                try_join(before, self.extents(object.id, offsets.start, end)).await?;
            found.extend(before);
            found.extend(rows);
        }
        take_in(object, found)?;
        let held = loading.done();
        self.cache.shrink();
        Ok(held)
    }

    /// The extent that begins before `offset` and reaches over it.
    async fn reaching_into(
        &self,
        object: &Object,
        offset: u64,
    ) -> Result<Option<(u64, Extent)>, LogError> {
        // Where the page before is in memory, this one is.
        if offset == 0 || object.knows(offset - 1, offset) || planted!("log-page-begins-empty") {
            return Ok(None);
        }
        let from = rows::extent_key(object.id, offset.saturating_sub(self.stripe_bytes));
        let to = rows::extent_key(object.id, offset);
        let mut to = Bound::Excluded(&to[..]);
        let mut upto;
        loop {
            let page = self.store.scan_page_back(Bound::Included(&from), to, 1).await?;
            if let Some((key, value)) = page.rows.first() {
                let (at, extent) = self.checked(key, value).await?;
                return Ok(Some((at, extent)).filter(|(at, extent)| at + extent.len > offset));
            }
            let Some(looked) = page.upto else { return Ok(None) };
            upto = looked;
            to = Bound::Excluded(&upto[..]);
        }
    }

    /// The extents that begin in `from..to`.
    async fn extents(
        &self,
        id: ObjectId,
        from: u64,
        to: u64,
    ) -> Result<Vec<(u64, Extent)>, LogError> {
        let end = rows::extent_key(id, to);
        let mut from = Bound::Included(rows::extent_key(id, from));
        let mut extents = Vec::new();
        loop {
            let bound = from.as_ref().map(Vec::as_slice);
            let found = self.store.scan_page(bound, Bound::Excluded(&end), ROWS_PER_SCAN).await?;
            for (key, value) in &found.rows {
                extents.push(self.checked(key, value).await?);
            }
            match found.upto {
                Some(upto) => from = Bound::Excluded(upto.to_vec()),
                None => return Ok(extents),
            }
        }
    }

    async fn checked(&self, key: &Bytes, value: &Bytes) -> Result<(u64, Extent), LogError> {
        let (offset, extent) = rows::decode_extent(key, value)?;
        let (place, stored) = (extent.record.place, extent.record.stored);
        if !self.log_fits(|log| place.is_in(log, stored)).await? {
            return Err(LogError::Index { row: "extent" });
        }
        Ok((offset, extent))
    }

    /// Looks along `from..to`, up from its beginning or down from its end, and brings into memory what touches it, until
    /// that is more than `extents_max` extents. Holes cost nothing.
    pub async fn search(
        &self,
        object: &Rc<Object>,
        from: u64,
        to: u64,
        way: Way,
        extents_max: usize,
    ) -> Result<Rc<Search>, LogError> {
        // What is behind the tail is in memory.
        let end = to.min(object.tail.get()).max(from);
        if object.knows(from, end) {
            let search = Search::new(object, from);
            search.pass(from..to);
            self.load_edges(&search).await?;
            return Ok(search);
        }
        let search = Search::new(object, from);
        match way {
            Way::Up => {
                let first = self.load(object, from, from + 1).await?;
                search.held.borrow_mut().join(first);
            }
            Way::Down => search.pass(end..to),
        }
        // An extent that reaches into the range begins before it.
        let least = if way == Way::Up { from } else { from.saturating_sub(self.stripe_bytes) };
        let mut low = Bound::Included(rows::extent_key(object.id, least));
        // On the way up what is behind the tail may be left to the index before the search comes there.
        let highest = if way == Way::Up { to } else { end };
        let mut high = Bound::Excluded(rows::extent_key(object.id, highest));
        let mut seen = 0;
        loop {
            let (after, before) =
                (low.as_ref().map(Vec::as_slice), high.as_ref().map(Vec::as_slice));
            let page = match way {
                Way::Up => self.store.scan_page(after, before, ROWS_PER_SEARCH).await?,
                Way::Down => self.store.scan_page_back(after, before, ROWS_PER_SEARCH).await?,
            };
            // From here on in the step in which the store shows the rows.
            let mut touched = Vec::new();
            let mut passed = search.passed.borrow().clone();
            for (key, value) in &page.rows {
                let read = rows::decode_extent(key, value);
                let (offset, extent) = read.inspect_err(|error| tell(object.id, error))?;
                let end = offset + extent.len;
                match way {
                    Way::Up => passed.end = passed.end.max(end.min(to)),
                    Way::Down => passed.start = passed.start.min(offset.max(from)),
                }
                if end > from {
                    touched.push(object.pages_of(&(offset..end)));
                }
            }
            let is_over = page.upto.is_none();
            if is_over {
                passed = from..to;
            }
            search.pages.borrow_mut().extend(touched.iter().cloned().flatten());
            search.pass(passed);
            seen += page.rows.len();
            touched.sort_unstable_by_key(|pages| pages.start);
            for pages in runs(touched) {
                let offsets = object.offsets_of(&pages);
                let held = self.load(object, offsets.start, offsets.end).await?;
                search.held.borrow_mut().join(held);
            }
            if is_over || seen > extents_max {
                self.load_edges(&search).await?;
                return Ok(search);
            }
            let upto = page.upto.map(|upto| upto.to_vec()).unwrap_or_default();
            match way {
                Way::Up => low = Bound::Excluded(upto),
                Way::Down => high = Bound::Excluded(upto),
            }
        }
    }

    async fn load_edges(&self, search: &Search) -> Result<(), LogError> {
        let Range { start, end } = search.passed.borrow().clone();
        while let Some(edge) = search.object.unknown_edge(start, end) {
            let held = self.load(&search.object, edge.start, edge.end).await?;
            search.held.borrow_mut().join(held);
        }
        Ok(())
    }

    /// No extent begins at `offset` or later and before what this gives; `None`: none begins there at all.
    pub async fn next_start(&self, object: &Object, offset: u64) -> Result<Option<u64>, LogError> {
        let mut stored = None;
        if offset < object.tail.get() {
            let from = rows::extent_key(object.id, offset);
            let to = rows::extent_key(object.id, u64::MAX);
            let rows = self.store.scan(Bound::Included(&from), Bound::Included(&to), 1).await?;
            let key = rows.first().and_then(|(key, _)| key.last_chunk());
            stored = key.map(|offset| u64::from_be_bytes(*offset));
        }
        let known = object.now.borrow().extents.starts(offset).next();
        Ok([stored, known].into_iter().flatten().min())
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

    /// True when all that could be forgotten is, and what is held is still too much.
    pub fn is_overdue(&self) -> bool {
        self.cache.is_over() && self.cache.is_empty()
    }

    /// The log ends.
    pub fn stop(&self) {
        self.cache.is_stopped.set(true);
    }

    /// What cached objects take has changed.
    pub fn changed(&self, bytes: i64) {
        self.cache.changed(bytes);
    }

    /// Forgets heads and pages until the cache is inside its bound, or what is left is in use.
    pub fn shrink(&self) {
        if !self.cache.is_over() {
            return;
        }
        self.shrink_heads((self.cache.bytes_max / HEADS_SHARE / HEAD_BYTES) as usize);
        self.cache.shrink();
        if self.cache.is_empty() {
            self.shrink_heads(0);
        }
    }

    fn shrink_heads(&self, heads_max: usize) {
        let mut heads = self.heads.borrow_mut();
        let mut in_use = 0;
        while self.cache.is_over() && heads.len() > heads_max && in_use < IN_USE_MAX {
            let Some((id, object)) = heads.pop_lru() else { return };
            if Rc::strong_count(&object) > 1 || object.is_held() {
                heads.put(id, object);
                in_use += 1;
            } else if object.is_loaded.get() {
                // Its pages count until the clock comes by: else their number alone would never make it.
                self.cache.changed(-((HEAD_BYTES + object.extents_bytes()) as i64));
            }
        }
    }
}

/// What was read of pages that are being loaded. A neighbour that is there may have brought some of it.
fn take_in(object: &Object, found: Vec<(u64, Extent)>) -> Result<(), LogError> {
    let (mut now, mut indexed) = (object.now.borrow_mut(), object.indexed.borrow_mut());
    let mut new = ExtentMap::default();
    for (offset, extent) in found {
        let mut there = indexed.extents.overlapping(offset, offset + extent.len);
        let fits = match there.next() {
            None => new.load(offset, extent),
            Some((at, known)) => (at, known.len) == (offset, extent.len) && there.next().is_none(),
        };
        if !fits {
            return Err(LogError::Index { row: "extent" });
        }
    }
    for (offset, extent) in new.iter() {
        let bytes = memory_bytes(offset, extent);
        let is_new = indexed.extents.load(offset, extent.clone());
        // Nothing changes what touches a page that is not loaded.
        assert!(is_new && now.extents.load(offset, extent.clone()), "the views are alike here");
        object.cache.changed(bytes as i64);
    }
    Ok(())
}

/// Ranges of pages, in order, with neighbours as one.
fn runs(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match runs.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => runs.push(range),
        }
    }
    runs
}

fn tell(id: ObjectId, error: &LogError) {
    if let LogError::Index { row } = error {
        tracing::error!(object = ?id, row, "a row makes no sense: only making the index anew brings \
            back what it is about");
    }
}

/// Lets the next one try when loading fails or is given up.
struct LoadingHead<'a>(&'a Object);

impl Drop for LoadingHead<'_> {
    fn drop(&mut self) {
        self.0.is_loading.set(false);
        self.0.loaded.notify_all();
    }
}

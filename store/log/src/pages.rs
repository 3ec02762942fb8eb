//! Pages: which parts of an object's map are in memory, and what is forgotten when they take too much.
//!
//! A page is a range of offsets of one object. While it is loaded, every extent that touches the range is in memory,
//! whole, in both views. An extent that touches several pages is in memory as long as one of them is loaded.
//!
//! What always holds:
//! - A change is made only where all pages that its extents touch are loaded, and holds those until it is indexed. So the
//!   rows of a page that nobody holds are what both views say of it, and those of one that is not loaded do not change.
//! - What is not held takes no more than [`Cache::bytes_max`]. A clock chooses what is forgotten: its hand passes over a page that
//!   was used since it came by last. Pages that are held are not in the clock.

use crate::extents::Extent;
use crate::object::Object;
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::{Rc, Weak};

/// Memory that an extent takes in both views, with its record and without the checksums, by the sizes of what it is
/// made of: note 0005.
pub(crate) const EXTENT_BYTES: u64 = 192;
/// Memory that a page takes besides.
const PAGE_BYTES: u64 = 128;

/// Memory that an extent at `offset` takes.
pub(crate) fn memory_bytes(offset: u64, extent: &Extent) -> u64 {
    let (first, last) = extent.blocks(offset);
    EXTENT_BYTES + 4 * (last - first)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Page {
    number: u64,
    object: Weak<Object>,
    /// Guards and changes on their way.
    held: Cell<u32>,
    is_loaded: Cell<bool>,
    /// Since the clock's hand came by last.
    is_used: Cell<bool>,
    is_in_clock: Cell<bool>,
}

impl Page {
    pub fn new(object: &Rc<Object>, number: u64) -> Rc<Self> {
        Rc::new(Self {
            number,
            object: Rc::downgrade(object),
            held: Cell::new(0),
            is_loaded: Cell::new(false),
            is_used: Cell::new(false),
            is_in_clock: Cell::new(false),
        })
    }
}

/// Pages that stay in memory while this lives.
#[derive(Debug, Default)]
pub(crate) struct Held(SmallVec<[Rc<Page>; 1]>);

impl Held {
    pub fn add(&mut self, page: &Rc<Page>) {
        page.held.set(page.held.get() + 1);
        self.0.push(Rc::clone(page));
    }

    pub fn join(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for page in self.0.drain(..) {
            page.held.set(page.held.get() - 1);
            if page.held.get() == 0
                && let Some(object) = page.object.upgrade()
            {
                object.cache.put(page);
                object.cache.shrink();
            }
        }
    }
}

/// What the objects of a log share.
#[derive(Debug)]
pub(crate) struct Cache {
    /// The next to be looked at is the first.
    clock: RefCell<VecDeque<Rc<Page>>>,
    /// Of what is in memory, those of objects without their pages included.
    pub bytes: Cell<u64>,
    pub bytes_max: u64,
    /// A page has two to this power bytes.
    page_shift: u32,
    /// Nothing is forgotten any more: changes that never reached the index let go of their pages.
    pub is_stopped: Cell<bool>,
}

impl Cache {
    pub fn new(bytes_max: u64, page_bytes: u64) -> Self {
        let page_shift = page_bytes.next_power_of_two().trailing_zeros();
        let (clock, bytes) = (RefCell::default(), Cell::new(0));
        Self { clock, bytes, bytes_max, page_shift, is_stopped: Cell::new(false) }
    }

    pub fn is_over(&self) -> bool {
        self.bytes.get() > self.bytes_max && !self.is_stopped.get()
    }

    /// True when there is no page to be forgotten.
    pub fn is_empty(&self) -> bool {
        self.clock.borrow().is_empty()
    }

    pub fn changed(&self, bytes: i64) {
        self.bytes.set(self.bytes.get().saturating_add_signed(bytes));
    }

    /// The pages that `from..to`, which is not empty, touches.
    fn touched(&self, from: u64, to: u64) -> Range<u64> {
        from >> self.page_shift..((to - 1) >> self.page_shift) + 1
    }

    /// The offsets of pages.
    fn offsets(&self, pages: &Range<u64>) -> Range<u64> {
        pages.start << self.page_shift..pages.end << self.page_shift
    }

    fn put(&self, page: Rc<Page>) {
        if !page.is_in_clock.replace(true) {
            self.clock.borrow_mut().push_back(page);
        }
    }

    /// Forgets pages until what is in memory is inside the bound, or the rest is held.
    pub fn shrink(&self) {
        let mut in_use = 0;
        // A view that somebody looks at is left alone: there are few.
        while self.is_over() && in_use < 4 {
            let Some(page) = self.clock.borrow_mut().pop_front() else { return };
            page.is_in_clock.set(false);
            if page.held.get() > 0 {
                // It comes back when it is let go.
                continue;
            }
            if page.is_used.take() {
                self.put(page);
                continue;
            }
            let Some(object) = page.object.upgrade() else {
                if page.is_loaded.get() {
                    self.changed(-(PAGE_BYTES as i64));
                }
                continue;
            };
            if !object.forget(&page) {
                in_use += 1;
                self.put(page);
            }
        }
    }
}

/// A search along an object, from one end of a range: what it has passed is in memory.
pub(crate) struct Search {
    pub object: Rc<Object>,
    /// Everything that touches this is in memory, as long as the search [is sound](Search::is_sound).
    pub passed: RefCell<Range<u64>>,
    /// Pages that rows of what was passed touch: held, or about to be.
    pub pages: RefCell<BTreeSet<u64>>,
    pub held: RefCell<Held>,
    /// Something in what was passed came and has been left to the index again.
    is_broken: Cell<bool>,
}

impl Search {
    pub fn new(object: &Rc<Object>, at: u64) -> Rc<Self> {
        let search = Rc::new(Self {
            object: Rc::clone(object),
            passed: RefCell::new(at..at),
            pages: RefCell::default(),
            held: RefCell::default(),
            is_broken: Cell::new(false),
        });
        let mut searches = object.searches.borrow_mut();
        searches.retain(|search| search.strong_count() > 0);
        searches.push(Rc::downgrade(&search));
        drop(searches);
        search
    }

    /// It has come this far, in the step in which that is known.
    pub fn pass(&self, passed: Range<u64>) {
        self.object.hold_loaded(&passed, &mut self.held.borrow_mut());
        *self.passed.borrow_mut() = passed;
    }

    /// True when a change of what was passed may be made now, in this step.
    pub fn is_sound(&self) -> bool {
        let passed = self.passed.borrow();
        !self.is_broken.get() && self.object.unknown_edge(passed.start, passed.end).is_none()
    }
}

impl Object {
    /// True when everything that touches `from..to` is in memory.
    pub fn knows(&self, from: u64, to: u64) -> bool {
        if self.is_whole || from >= to {
            return true;
        }
        let touched = self.cache.touched(from, to);
        let wanted = touched.end - touched.start;
        let pages = self.pages.borrow();
        let mut known = 0;
        for (_, page) in pages.range(touched).filter(|(_, page)| page.is_loaded.get()) {
            page.is_used.set(true);
            known += 1;
        }
        known == wanted
    }

    /// The first or the last extent that touches `from..to`, if it reaches over pages that are not in memory: they must
    /// be before it is cut.
    pub fn unknown_edge(&self, from: u64, to: u64) -> Option<Range<u64>> {
        let now = self.now.borrow();
        let mut touching = now.extents.overlapping(from, to);
        let (first, last) = (touching.next(), touching.next_back());
        let edges = [first, last].into_iter().flatten();
        let mut edges = edges.map(|(offset, extent)| offset..offset + extent.len);
        edges.find(|edge| !self.knows(edge.start, edge.end))
    }

    /// Holds the pages in `from..to` that are loaded.
    pub fn hold_loaded(&self, range: &Range<u64>, held: &mut Held) {
        if self.is_whole || range.is_empty() {
            return;
        }
        let touched = self.cache.touched(range.start, range.end);
        let pages = self.pages.borrow();
        pages
            .range(touched)
            .filter(|(_, page)| page.is_loaded.get())
            .for_each(|(_, page)| held.add(page));
    }

    /// The first of these pages that is not loaded, and those behind it that nobody loads either.
    pub fn missing(&self, pages: Range<u64>) -> Missing {
        let there = self.pages.borrow();
        let mut next = pages.start;
        for (number, page) in there.range(pages.clone()) {
            match page.is_loaded.get() {
                _ if *number > next => return Missing::Pages(next..*number),
                true => next += 1,
                false => return Missing::Loading,
            }
        }
        if next < pages.end { Missing::Pages(next..pages.end) } else { Missing::None }
    }

    pub fn pages_of(&self, range: &Range<u64>) -> Range<u64> {
        self.cache.touched(range.start, range.end)
    }

    pub fn offsets_of(&self, pages: &Range<u64>) -> Range<u64> {
        self.cache.offsets(pages)
    }

    /// Pages that are being loaded: nobody else does, and nothing in them changes.
    pub fn begin(self: &Rc<Self>, numbers: Range<u64>) -> Loading {
        let mut loading = Loading { pages: Held::default(), object: Rc::clone(self) };
        let mut pages = self.pages.borrow_mut();
        for number in numbers {
            let page = Page::new(self, number);
            loading.pages.add(&page);
            pages.insert(number, page);
        }
        drop(pages);
        loading
    }

    /// Leaves a page to the index. False when somebody looks at a view just now.
    fn forget(&self, page: &Rc<Page>) -> bool {
        let views = (self.now.try_borrow_mut(), self.indexed.try_borrow_mut());
        let ((Ok(mut now), Ok(mut indexed)), Ok(mut pages)) = (views, self.pages.try_borrow_mut())
        else {
            return false;
        };
        if !pages.get(&page.number).is_some_and(|there| Rc::ptr_eq(there, page)) {
            return true;
        }
        pages.remove(&page.number);
        let range = self.cache.offsets(&(page.number..page.number + 1));
        // Also by a page that is being loaded, which may not have looked for it.
        let is_needed =
            |from: u64, to: u64| pages.range(self.cache.touched(from, to)).next().is_some();
        let touching: SmallVec<[(u64, u64); 64]> = now
            .extents
            .overlapping(range.start, range.end)
            .map(|(offset, extent)| (offset, offset + extent.len))
            .collect();
        let mut bytes = PAGE_BYTES;
        for (offset, _) in touching.iter().filter(|(from, to)| !is_needed(*from, *to)) {
            let extent = now.extents.forget(*offset).expect("found above");
            bytes += memory_bytes(*offset, &extent);
            let was = indexed.extents.forget(*offset);
            debug_assert_eq!(was, Some(extent), "nobody holds it, so the views are alike");
        }
        self.cache.changed(-(bytes as i64));
        if !touching.is_empty() {
            self.tail.set(self.tail.get().max(range.end));
            let searches = self.searches.borrow();
            for search in searches.iter().filter_map(Weak::upgrade) {
                let passed = search.passed.borrow();
                if passed.start < range.end
                    && range.start < passed.end
                    && !search.pages.borrow().contains(&page.number)
                {
                    search.is_broken.set(true);
                }
            }
        }
        true
    }

    /// Memory that its extents take.
    pub fn extents_bytes(&self) -> u64 {
        let now = self.now.borrow();
        now.extents.iter().map(|(offset, extent)| memory_bytes(offset, extent)).sum()
    }

    /// True when a page of it is held.
    pub fn is_held(&self) -> bool {
        self.pages.borrow().values().any(|page| page.held.get() > 0)
    }
}

/// See [`Object::missing`].
pub(crate) enum Missing {
    None,
    /// The first one is being loaded.
    Loading,
    Pages(Range<u64>),
}

/// Pages that are being loaded; given up when this goes before they are.
pub(crate) struct Loading {
    object: Rc<Object>,
    pages: Held,
}

impl Loading {
    /// They are there now, and held by who asked for them.
    pub fn done(mut self) -> Held {
        for page in &self.pages.0 {
            page.is_loaded.set(true);
        }
        let bytes = PAGE_BYTES * self.pages.0.len() as u64;
        self.object.cache.changed(bytes as i64);
        std::mem::take(&mut self.pages)
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        let mut pages = self.object.pages.borrow_mut();
        for page in &self.pages.0 {
            pages.remove(&page.number);
        }
        drop(pages);
        self.object.loaded.notify_all();
    }
}

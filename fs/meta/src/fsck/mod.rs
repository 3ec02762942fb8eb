//! Fsck: reads every row of a metadata target and says what does not fit together. A check writes nothing; of a store
//! at rest [`repair()`] puts right what it found, as far as that follows from other rows.
//!
//! A first walk takes all rows in, those of one inode at about the same time; where sums differ it looks at
//! rows one by one. A second walk counts names exactly, for those inodes only whose sums did not come out even.
//! From the outside in: [`Fsck`] walks, `tally` adds up, `slot`, `links` and `tree` are what it adds up, `compare`
//! looks at rows one by one; `finding` is what comes of it, `path` says where that is.
//!
//! What always holds: memory is bounded, whatever the number of rows, and what was not checked is told.
//!
//! docs/design/0013-fsck-space-quotas.md.

mod beside;
mod compare;
mod files;
mod finding;
mod hash;
mod links;
mod now;
mod path;
mod reattach;
mod repair;
mod slot;
mod source;
mod tally;
#[cfg(test)]
mod tests;
mod tree;

pub use files::{FileRow, FileUse, Files, Numbers, note_components};
pub use finding::{EntryFault, Finding, Known, List};
pub use now::FileNow;
pub use path::Paths;
pub use repair::{RepairOptions, repair};

use crate::key;
use crate::observe::Observer;
use crate::service::MetaService;
use beside::Beside;
use levada_base::reactor;
use levada_kv::{Bytes, KvError, Store, Walk};
use links::{Exact, Sign, WALKS_MAX};
use slot::Suspect;
use source::Source;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use tally::Tally;

/// Findings that are told; more are counted.
const FINDINGS_KEPT: usize = 100_000;
/// The tags of rows that belong to inodes, in the order in which their walks take turns.
const INODE_TAGS: [u8; 7] =
    [key::INODE, key::ENTRY, key::NAME, key::ORPHAN, key::DESTROY, key::SESSION, key::XATTR];

/// What a check is told.
#[derive(Clone, Copy, Debug)]
pub struct FsckConfig {
    /// Bytes for what grows with the number of directories.
    pub memory_bytes: u64,
    /// After each page others get as much time as it took.
    pub yields: bool,
}

impl Default for FsckConfig {
    fn default() -> Self {
        Self { memory_bytes: 1 << 30, yields: false }
    }
}

/// How far a check is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsckProgress {
    /// In words; empty before it begins.
    pub phase: &'static str,
    pub done_rows: u64,
    /// About.
    pub total_rows: u64,
}

/// What a check came to.
#[derive(Clone, Debug, Default)]
pub struct FsckReport {
    pub inodes: u64,
    pub names: u64,
    pub rows: u64,
    /// The highest inode number.
    pub last_ino: u64,
    /// Of these at most 100,000 are kept.
    pub findings: Vec<Finding>,
    /// All findings, by their sort.
    pub counts: BTreeMap<&'static str, u64>,
    /// What was not checked, in words.
    pub not_checked: Vec<String>,
    /// The most memory that it took, about.
    pub memory_bytes: u64,
}

impl FsckReport {
    /// That of a check that could not begin.
    fn nothing(why: &str) -> Self {
        Self { not_checked: vec![format!("everything: {why}")], ..Self::default() }
    }

    /// Findings, told or not.
    #[must_use]
    pub fn found(&self) -> u64 {
        self.counts.values().sum()
    }

    fn add(&mut self, finding: Finding) {
        *self.counts.entry(finding.sort()).or_default() += 1;
        if self.findings.len() < FINDINGS_KEPT {
            self.findings.push(finding);
        }
    }
}

/// See the module.
pub struct Fsck {
    source: Source,
    config: FsckConfig,
    /// The first walk: over the rows with each tag.
    first: [(u8, Walk); INODE_TAGS.len()],
    /// The second one: over inodes and names.
    second: RefCell<Vec<(u8, Rc<Walk>)>>,
    tally: RefCell<Tally>,
    beside: RefCell<Beside>,
    report: RefCell<FsckReport>,
    progress: Cell<FsckProgress>,
}

impl Fsck {
    /// A check of a store that nothing changes.
    #[must_use]
    pub fn of_store(store: Store, config: FsckConfig) -> Rc<Self> {
        Self::new(Source::Still(store), config)
    }

    /// A check of a service that goes on. What it finds held at the moment in which it was found; a change that is
    /// half made is no finding.
    #[must_use]
    pub fn of_service(service: Rc<MetaService>, config: FsckConfig) -> Rc<Self> {
        Self::new(Source::Serving(service), config)
    }

    fn new(source: Source, config: FsckConfig) -> Rc<Self> {
        Rc::new(Self {
            source,
            config,
            first: INODE_TAGS.map(|tag| (tag, Walk::new(&[tag], Some(&[tag + 1])))),
            second: RefCell::default(),
            tally: RefCell::new(Tally::new(config.memory_bytes)),
            beside: RefCell::default(),
            report: RefCell::default(),
            progress: Cell::default(),
        })
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> FsckProgress {
        self.progress.get()
    }

    /// The store that is checked.
    #[must_use]
    pub fn store(&self) -> &Store {
        self.source.store()
    }

    /// Checks everything, once. Of a service, one check at a time, and none before its tail is handed back.
    ///
    /// # Errors
    ///
    /// When the store cannot be read; then nothing can be said.
    pub async fn run(self: &Rc<Self>) -> Result<FsckReport, KvError> {
        let source = self.source.clone();
        let _observing = match &source {
            Source::Still(_) => None,
            Source::Serving(service) => {
                // Until then rows change past the transactions, and afterwards never again.
                if service.is_recovering() {
                    return Ok(FsckReport::nothing("the target waits for a client"));
                }
                let observing = service.observe(Rc::clone(self) as Rc<_>);
                if observing.is_none() {
                    return Ok(FsckReport::nothing("another check is running"));
                }
                observing
            }
        };
        self.begin("checking rows", self.store().usage().rows);
        self.walk_inodes().await?;
        self.walk_beside().await?;
        self.sum_up().await?;
        self.count_links().await?;
        let mut report = self.report.take();
        let tally = self.tally.borrow();
        (report.inodes, report.names, report.last_ino) =
            (tally.counted.inodes, tally.names, tally.last_ino);
        Ok(report)
    }

    /// Goes on by a page, and leaves as much time to others as that took.
    async fn page(&self, walk: &Walk, take: impl FnOnce(&[(Bytes, Bytes)])) -> Result<(), KvError> {
        let begun = reactor::now();
        walk.page(self.store(), |rows| {
            take(rows);
            self.advance(rows.len());
        })
        .await?;
        if self.config.yields {
            reactor::sleep(begun.elapsed()).await;
        }
        Ok(())
    }

    fn begin(&self, phase: &'static str, total_rows: u64) {
        self.progress.set(FsckProgress { phase, done_rows: 0, total_rows });
    }

    /// Notes a page of rows.
    fn advance(&self, rows: usize) {
        let mut progress = self.progress.get();
        progress.done_rows += rows as u64;
        progress.total_rows = progress.total_rows.max(progress.done_rows);
        self.progress.set(progress);
        let mut report = self.report.borrow_mut();
        report.memory_bytes = report.memory_bytes.max(self.tally.borrow().bytes() as u64);
    }

    fn add(&self, findings: impl IntoIterator<Item = Finding>) {
        let mut report = self.report.borrow_mut();
        findings.into_iter().for_each(|finding| report.add(finding));
    }

    /// The rows of inodes, all sorts of them side by side: the walk that is behind goes on.
    async fn walk_inodes(&self) -> Result<(), KvError> {
        let walks = &self.first;
        while let Some((_, walk)) = walks
            .iter()
            .filter(|(_, walk)| !walk.is_over())
            .min_by_key(|(tag, walk)| passed_below(*tag, walk))
        {
            self.page(walk, |rows| {
                let mut tally = self.tally.borrow_mut();
                self.add(rows.iter().filter_map(|(k, v)| tally.row(Sign::Plus, k, v).err()));
                drop(tally);
                self.add(rows.iter().filter_map(|(key, value)| self.source.known(key, value)));
                self.report.borrow_mut().rows += rows.len() as u64;
            })
            .await?;
            let end = walks.iter().map(|(tag, walk)| passed_below(*tag, walk)).min();
            let (findings, suspects) = self.tally.borrow_mut().settle(end.unwrap_or(u128::MAX));
            self.add(findings);
            for suspect in suspects {
                self.compare(suspect).await?;
            }
        }
        Ok(())
    }

    async fn compare(&self, suspect: Suspect) -> Result<(), KvError> {
        match suspect {
            Suspect::Xattrs(ino) => self.add(compare::xattrs(&self.source, ino).await?),
            Suspect::Entries { ino, said, named, last_cookie } => {
                let compared = compare::entries(&self.source, ino).await?;
                self.add(compared.findings);
                // As it would be with all names there.
                let has = named + compared.unnamed;
                self.add(said.into_iter().flat_map(|said| said.against(has, last_cookie)));
                if compared.more > 0 {
                    let what = format!("{} more entries of directory {:#x}", compared.more, ino.0);
                    self.report.borrow_mut().not_checked.push(what);
                }
                self.tally.borrow_mut().only_listed(compared.names);
            }
        }
        Ok(())
    }

    /// All other rows.
    async fn walk_beside(&self) -> Result<(), KvError> {
        let mut tags = INODE_TAGS;
        tags.sort_unstable();
        let starts = [vec![]].into_iter().chain(tags.map(|tag| vec![tag + 1]));
        let ends = tags.into_iter().map(Some).chain([None]);
        for (from, end) in starts.zip(ends) {
            let walk = Walk::new(&from, end.as_ref().map(std::slice::from_ref));
            while !walk.is_over() {
                self.page(&walk, |rows| {
                    let mut beside = self.beside.borrow_mut();
                    self.add(rows.iter().filter_map(|(key, value)| beside.row(key, value).err()));
                    self.add(rows.iter().filter_map(|(key, value)| self.source.known(key, value)));
                    self.report.borrow_mut().rows += rows.len() as u64;
                })
                .await?;
            }
        }
        Ok(())
    }

    /// What is known when all rows were met.
    async fn sum_up(&self) -> Result<(), KvError> {
        let counters = match &self.source {
            Source::Still(store) => store.get(key::COUNTERS).await?,
            // Those in memory are what the next batch writes.
            Source::Serving(service) => {
                Some((&service.table.borrow().counters.encode()[..]).into())
            }
        };
        let tally = self.tally.borrow();
        let beside = self.beside.borrow();
        self.add(beside.findings(counters.as_deref(), tally.counted, tally.last_ino));
        match &self.source {
            _ if tally.unreadable > 0 => {
                let what = format!("who uses what: {} inodes cannot be read", tally.unreadable);
                self.report.borrow_mut().not_checked.push(what);
            }
            Source::Still(_) => self.add(beside.misjudged(None, &tally.usage)),
            Source::Serving(service) => {
                let now = &service.table.borrow().accounts.usage;
                self.add(beside.misjudged(Some(now), &tally.usage));
            }
        }
        self.add(tally.tree.cycles().into_iter().map(Finding::Cycle));
        let left_out = tally.tree.left_out();
        if left_out > 0 {
            let what = format!("whether {left_out} directories lead to the root (--memory)");
            self.report.borrow_mut().not_checked.push(what);
        }
        Ok(())
    }

    /// Names and links, exactly, of the inodes whose sums differ.
    async fn count_links(&self) -> Result<(), KvError> {
        let mut left = self.tally.borrow().sums.faulty();
        let rows = self.tally.borrow().counted.inodes + self.tally.borrow().names;
        for _ in 0..WALKS_MAX {
            if left.is_empty() {
                break;
            }
            self.begin("counting links", rows);
            self.tally.borrow_mut().count_exactly(Exact::of_next(&mut left));
            let walk = |tag| (tag, Rc::new(Walk::new(&[tag], Some(&[tag + 1]))));
            let walks = vec![walk(key::INODE), walk(key::NAME)];
            self.second.replace(walks.clone());
            for (_, walk) in walks {
                while !walk.is_over() {
                    self.page(&walk, |rows| {
                        let mut tally = self.tally.borrow_mut();
                        rows.iter().for_each(|(key, value)| tally.count(Sign::Plus, key, value));
                    })
                    .await?;
                }
            }
            let exact = self.tally.borrow_mut().exact.take();
            let (findings, names) = exact.map(|exact| exact.findings()).unwrap_or_default();
            self.add(findings);
            for bad in names {
                let finding = compare::bad_name(self.store(), bad).await?;
                self.add(finding);
            }
        }
        if !left.is_empty() {
            let share = left.len() * 100 / (1 << hash::BUCKET_BITS);
            let what = format!("the links of about {share} % of the inodes: too many are wrong");
            self.report.borrow_mut().not_checked.push(what);
        }
        Ok(())
    }
}

impl Observer for Fsck {
    fn is_concerned(&self, key: &[u8]) -> bool {
        self.first.iter().any(|(_, walk)| walk.has_passed(key))
    }

    fn changed(&self, key: &[u8], old: Option<&[u8]>, new: Option<&[u8]>) {
        let mut tally = self.tally.borrow_mut();
        let is_counted = self.second.borrow().iter().any(|(_, walk)| walk.has_passed(key));
        for (sign, value) in [(Sign::Minus, old), (Sign::Plus, new)] {
            let Some(value) = value else { continue };
            // What is wrong with a row was told when it was met; the service writes no such rows.
            let _ = tally.row(sign, key, value);
            if is_counted {
                tally.count(sign, key, value);
            }
        }
    }
}

/// A walk over rows with this tag has passed all of inodes below.
fn passed_below(tag: u8, walk: &Walk) -> u128 {
    if walk.is_over() {
        return u128::MAX;
    }
    let Some(key) = walk.upto() else { return 0 };
    let mut number = [0; 8];
    let found = &key[1..key.len().min(9)];
    number[..found.len()].copy_from_slice(found);
    let ino = u128::from(u64::from_be_bytes(number));
    // Of these there is one for each inode.
    let is_only_one = matches!(tag, key::INODE | key::ORPHAN | key::DESTROY);
    if is_only_one && key.len() == 9 { ino + 1 } else { ino }
}

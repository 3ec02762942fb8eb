//! Two programs on one file at once, on one client, each on a half of its own: what one does to its
//! half must not touch the other's. The upper one also says how long the file is.
//!
//! Between rounds both wait for each other, and all of the file is compared with the model. Syncs
//! within a round promise nothing to the model: what a half holds then is not the file of any moment.

use super::model::Change;
use super::spans::FILE_BYTES_MAX;
use super::worker::{CALLER, Shown, WRITE, Worker};
use crate::Rng;
use futures_util::future::join;
use levada_base::reactor;
use levada_client::File;
use levada_wire::attr::Time;
use levada_wire::meta::{AttrChange, OpenMode, SetTime};
use std::ops::Range;
use std::time::Duration;

/// Where the halves meet: within a stripe unit, at the end of one, at the end of a block.
const MEETING_PLACES: [usize; 3] = [100_001, 131_072, 28_672];
const ROUNDS_MAX: u64 = 3;
const OPERATIONS_MAX: u64 = 4;
const WRITE_BYTES_MAX: u64 = 40_000;

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Lower,
    Upper,
}

impl Worker {
    pub(super) async fn two_at_once(&mut self) {
        let Some(id) = self.file() else { return };
        let place = *self.rng.pick(&MEETING_PLACES);
        for _ in 0..self.rng.between(1, ROUNDS_MAX) {
            let size = self.size_of(id);
            if size < place {
                self.cut(id, place).await;
            }
            let (mut one, mut other) = (self.rng.fork(), self.rng.fork());
            let halves = [(Half::Lower, 0..place), (Half::Upper, place..FILE_BYTES_MAX)];
            let [lower, upper] = halves;
            let files = {
                let this = &*self;
                join(this.work_on(id, lower, &mut one), this.work_on(id, upper, &mut other)).await
            };
            self.meet(id, files).await;
        }
    }

    /// The end of a round: one closes while the other one may empty the file with its next open.
    async fn meet(&mut self, id: u64, (lower, upper): (File, File)) {
        let attr = self.done(lower.attr()).await;
        let attr = self.expect(attr, None).expect("success was expected");
        self.same_attr(id, &attr);
        self.read_from(id, &upper, 0, usize::MAX).await;
        if self.rng.one_in(2) {
            self.sync_file(id, &lower).await;
        }
        if self.rng.one_in(3) {
            let this = &*self;
            let (file, ()) =
                join(this.open_here(id, true), async { this.close_here(id, lower).await }).await;
            self.same_size(id, 0);
            self.close_here(id, file).await;
        } else {
            self.close_here(id, lower).await;
        }
        self.handles.push((id, upper));
        self.trim().await;
    }

    /// What one of them does in a round; gives back what it has open.
    async fn work_on(&self, id: u64, (half, bytes): (Half, Range<usize>), rng: &mut Rng) -> File {
        let mut file = self.open_here(id, false).await;
        for _ in 0..rng.between(1, OPERATIONS_MAX) {
            match rng.below(8) {
                0..3 => self.write_within(id, &file, &bytes, rng).await,
                3 => {
                    self.note(format!("fsync node {id} by the {half:?}"));
                    let synced = self.done(file.fsync()).await;
                    self.expect(synced, None);
                }
                4 => {
                    self.close_here(id, file).await;
                    if rng.one_in(2) {
                        reactor::sleep(Duration::from_micros(rng.below(8000))).await;
                    }
                    file = self.open_here(id, false).await;
                }
                5 if half == Half::Upper => {
                    let size = bytes.start + rng.below(60_000) as usize;
                    self.cut(id, size.min(bytes.end)).await;
                }
                6 => {
                    self.note(format!("utimens node {id} by the {half:?}"));
                    let time = SetTime::To(Time(rng.below(1 << 60) as i64));
                    let change = AttrChange { mtime: Some(time), ..AttrChange::default() };
                    let set = self.client.set_attr(CALLER, self.ino(id), change);
                    self.state.borrow_mut().tree.file(id).mtime = None;
                    let set = self.done(set).await;
                    self.expect(set, None);
                }
                _ => {
                    let from = bytes.start + rng.below(50_000) as usize;
                    let len = (bytes.end - from.min(bytes.end)).min(50_000);
                    self.read_from(id, &file, from, len).await;
                }
            }
        }
        file
    }

    async fn write_within(&self, id: u64, file: &File, bytes: &Range<usize>, rng: &mut Rng) {
        // Close to where they meet, often.
        let near = match rng.below(3) {
            0 if bytes.start > 0 => bytes.start,
            0 => bytes.end - rng.between(1, WRITE_BYTES_MAX.min(bytes.end as u64)) as usize,
            _ => bytes.start + rng.below((bytes.end - bytes.start) as u64 / 2) as usize,
        };
        let len = (rng.between(1, WRITE_BYTES_MAX) as usize).min(bytes.end - near);
        let data = rng.bytes(len);
        self.note(format!("write node {id}: {len} bytes at {near}, within {bytes:?}"));
        self.put(id, file, near, data).await;
    }

    /// Truncates by number, as truncate(2) does by name.
    async fn cut(&self, id: u64, size: usize) {
        self.note(format!("truncate node {id} to {size}"));
        self.state.borrow_mut().tree.file(id).will(Change::Truncate { size });
        let change = AttrChange { size: Some(size as u64), ..AttrChange::default() };
        let attr = self.done(self.client.set_attr(CALLER, self.ino(id), change)).await;
        self.expect(attr, None);
        self.state.borrow_mut().tree.file(id).data.resize(size, 0);
    }

    async fn open_here(&self, id: u64, truncate: bool) -> File {
        self.note(format!("open node {id}{}", if truncate { ", empty" } else { "" }));
        if truncate {
            self.state.borrow_mut().tree.file(id).will(Change::Truncate { size: 0 });
        }
        let opened = self.client.open(self.ino(id), OpenMode { truncate, ..WRITE });
        let opened = self.done(opened).await.map(|(file, _)| Shown(file));
        let file = self.expect(opened, None).expect("success was expected");
        if truncate {
            self.state.borrow_mut().tree.file(id).data.clear();
        }
        file.0
    }

    async fn close_here(&self, id: u64, file: File) {
        self.note(format!("close node {id}"));
        self.done(file.close()).await;
    }
}

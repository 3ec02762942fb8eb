//! Lost blocks: those whose contents nothing tells any more, and that must never read as something else.
//!
//! A power cut in the middle of an overwrite of whole stripes, of which only the list is recorded, leaves chunks of which some
//! are old and some new. When one of them is absent afterwards, what the others imply of it is neither. At the next open such
//! blocks are given a content on which redundancy agrees (zeroes), and are listed here: they read as medium errors until they
//! are written. Format: docs/design/0015-parity-journal.md.
//!
//! So are blocks that a rebuild could not make, as too much of their stripe was unreadable: they are *absent* from their
//! member, and nothing is made of what it holds there instead. That may be said of a block which was put right since; then it
//! is recomputed, until a flush covers what put it right and takes it from the list.
//!
//! What always holds:
//! - A block is listed, durably, before it is given its content.
//! - A block is taken from the list only when what was written there is recorded or flushed; whoever acknowledges that waits
//!   for the list.
//! - The list never outgrows its room: as many stripes may be overwritten whole between two flushes as it could take, beside
//!   what a rebuild leaves out ([`Engine::list_absent`]). Where bad places at a start make it too many all the same, the array
//!   does not open; where a rebuild meets too many, it is blocked.

use crate::engine::Engine;
use crate::map::Bit;
use futures_util::future::join_all;
use levada_base::checksum::crc32c;
use levada_base::ids::Uuid;
use levada_base::sync::Semaphore;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{BufMut, Epoch, planted};
use levada_device::{BlockError, Durability};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

const MAGIC: &[u8; 8] = b"LVDLOSTB";
const CRC_AT: usize = 44;
const ENTRIES_AT: usize = 64;
const ENTRY_BYTES: usize = 48;
const ROWS_AT: usize = 16;
/// Most blocks of a chunk: an entry has a bit for each.
const ROWS: u64 = 256;
/// Members that are smaller than this have room for fewer.
const SMALL_MEMBER_BYTES: u64 = 64 * MIB;

/// Blocks of a chunk, a bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rows([u64; (ROWS / 64) as usize]);

impl Rows {
    pub fn of(blocks: Range<u64>) -> Self {
        let mut rows = Self::default();
        rows.set(blocks, true);
        rows
    }

    pub fn set(&mut self, blocks: Range<u64>, to: bool) {
        for block in blocks {
            let (word, bit) = (&mut self.0[(block / 64) as usize], 1 << (block % 64));
            if to { *word |= bit } else { *word &= !bit }
        }
    }

    fn without(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] & !other.0[word]))
    }

    fn has_any(self, blocks: Range<u64>) -> bool {
        blocks.into_iter().any(|block| self.0[(block / 64) as usize] >> (block % 64) & 1 == 1)
    }

    pub fn count(self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The blocks, run by run.
    pub fn runs(self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for block in (0..ROWS).filter(|block| self.has_any(*block..block + 1)) {
            match runs.last_mut() {
                Some(run) if run.end == block => run.end = block + 1,
                Some(_) | None => runs.push(block..block + 1),
            }
        }
        runs
    }
}

/// What is the matter with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// Its place holds zeroes on which redundancy agrees.
    Untold,
    /// Its place holds anything.
    Absent,
}

/// By stripe and chunk.
type Entries = BTreeMap<(u64, usize, Why), Rows>;

/// See the module.
pub(crate) struct Lost {
    /// Room for one image of the list, of which each member has two; 0: there is none.
    image_bytes: u64,
    entries: RefCell<Entries>,
    /// Room for so many entries is not for stripes that are overwritten whole.
    kept: Cell<usize>,
    /// Of the last image.
    sequence: Cell<u64>,
    /// Changes made, and those that are durable.
    wanted: Cell<u64>,
    durable: Cell<u64>,
    turn: Rc<Semaphore>,
    /// A stripe of which blocks are lost and not listed, as there was no room; its record must stay, and the array closed.
    pub unlisted: Cell<Option<u64>>,
}

impl Lost {
    /// Without entries, in `bytes` of each member.
    pub fn new(bytes: u64) -> Self {
        Self {
            image_bytes: bytes / 2,
            entries: RefCell::default(),
            kept: Cell::new(0),
            sequence: Cell::new(0),
            wanted: Cell::new(0),
            durable: Cell::new(0),
            turn: Semaphore::new(1),
            unlisted: Cell::new(None),
        }
    }

    /// What members of this size have room for, in bytes; none where a chunk has more blocks than an entry has bits.
    pub fn bytes_for(member_bytes: u64, chunk_bytes: u64) -> u64 {
        match (chunk_bytes <= ROWS * BLOCK_BYTES, member_bytes < SMALL_MEMBER_BYTES) {
            (false, _) => 0,
            (true, true) => 2 * BLOCK_BYTES,
            (true, false) => 16 * BLOCK_BYTES,
        }
    }

    /// How many more chunks may have lost blocks.
    pub fn room(&self) -> usize {
        let entries = (self.image_bytes as usize).saturating_sub(ENTRIES_AT) / ENTRY_BYTES;
        entries.saturating_sub(self.entries.borrow().len() + self.kept.get())
    }

    pub fn is_empty(&self) -> bool {
        self.entries.borrow().is_empty()
    }

    /// Blocks that nothing tells any more. Those that are absent from a member may be recomputed one day, and are its own.
    pub fn blocks(&self) -> u64 {
        let entries = self.entries.borrow();
        let untold = entries.iter().filter(|((.., why), _)| *why == Why::Untold);
        untold.map(|(_, rows)| rows.count()).sum()
    }

    pub fn is_in(&self, stripe: u64) -> bool {
        let range = (stripe, 0, Why::Untold)..(stripe + 1, 0, Why::Untold);
        self.entries.borrow().range(range).next().is_some()
    }

    /// Whether some of this data chunk is lost.
    pub fn has_entry(&self, stripe: u64, chunk: usize) -> bool {
        self.entries.borrow().contains_key(&(stripe, chunk, Why::Untold))
    }

    /// Whether any byte of this range of a data chunk is lost.
    fn has(&self, stripe: u64, chunk: usize, within: &Range<u64>) -> bool {
        let entries = self.entries.borrow();
        let blocks = within.start / BLOCK_BYTES..within.end.div_ceil(BLOCK_BYTES);
        let untold = entries.get(&(stripe, chunk, Why::Untold));
        untold.is_some_and(|rows| rows.has_any(blocks))
    }

    /// Somebody lacks it.
    pub fn is_to_be_persisted(&self) {
        if self.sequence.get() > 0 {
            self.changed();
        }
    }

    fn changed(&self) {
        self.wanted.set(self.wanted.get() + 1);
    }

    /// False when there is no room.
    pub fn add(&self, (stripe, chunk): (u64, usize), why: Why, lost: Rows) -> bool {
        let is_new = !self.entries.borrow().contains_key(&(stripe, chunk, why));
        if is_new && self.room() == 0 {
            return false;
        }
        let mut entries = self.entries.borrow_mut();
        let rows = entries.entry((stripe, chunk, why)).or_default();
        let before = *rows;
        rows.0.iter_mut().zip(lost.0).for_each(|(word, more)| *word |= more);
        if *rows != before {
            self.changed();
        }
        true
    }

    /// These bytes of a chunk, whole blocks, have a content again.
    pub fn remove(&self, stripe: u64, chunk: usize, within: Range<u64>) {
        let mut entries = self.entries.borrow_mut();
        for key in [(stripe, chunk, Why::Untold), (stripe, chunk, Why::Absent)] {
            let Some(rows) = entries.get_mut(&key) else { continue };
            let before = *rows;
            rows.set(within.start / BLOCK_BYTES..within.end / BLOCK_BYTES, false);
            if *rows == before {
                continue;
            }
            if *rows == Rows::default() {
                entries.remove(&key);
            }
            self.changed();
        }
    }

    /// These blocks are absent no more.
    fn are_there(&self, stripe: u64, chunk: usize, there: Rows) {
        let mut entries = self.entries.borrow_mut();
        let key = (stripe, chunk, Why::Absent);
        let Some(rows) = entries.get_mut(&key) else { return };
        let left = rows.without(there);
        if left == *rows {
            return;
        }
        *rows = left;
        if left == Rows::default() {
            entries.remove(&key);
        }
        self.changed();
    }

    /// These stripes have other contents, or none.
    pub fn remove_stripes(&self, stripes: &Range<u64>) {
        let mut entries = self.entries.borrow_mut();
        let before = entries.len();
        entries.retain(|(stripe, ..), _| !stripes.contains(stripe));
        if entries.len() != before {
            self.changed();
        }
    }

    fn encode(&self, uuid: Uuid, epoch: Epoch) -> BufMut {
        let mut image = BufMut::zeroed(self.image_bytes as usize);
        let mut put = |at: usize, value: &[u8]| image[at..at + value.len()].copy_from_slice(value);
        let entries = self.entries.borrow();
        put(0, MAGIC);
        put(8, uuid.as_bytes());
        put(24, &epoch.0.to_le_bytes());
        put(32, &self.sequence.get().to_le_bytes());
        put(40, &(entries.len() as u32).to_le_bytes());
        for (i, ((stripe, chunk, why), rows)) in entries.iter().enumerate() {
            let at = ENTRIES_AT + i * ENTRY_BYTES;
            put(at, &stripe.to_le_bytes());
            put(at + 8, &(*chunk as u16).to_le_bytes());
            put(at + 10, &[u8::from(*why == Why::Absent)]);
            for (word, at) in rows.0.iter().zip((at + ROWS_AT..).step_by(8)) {
                put(at, &word.to_le_bytes());
            }
        }
        let crc = crc32c(&image).to_le_bytes();
        image[CRC_AT..CRC_AT + 4].copy_from_slice(&crc);
        image
    }
}

/// A list as found on a member.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub epoch: Epoch,
    sequence: u64,
    entries: Entries,
}

impl Image {
    /// Of several images the one with the highest counts.
    fn order(&self) -> (Epoch, u64) {
        (self.epoch, self.sequence)
    }

    /// Reads a list of array `uuid`; `None` when these bytes are not that.
    pub fn decode(bytes: &[u8], uuid: Uuid) -> Option<Self> {
        let whole = bytes.len() >= ENTRIES_AT && &bytes[..8] == MAGIC;
        if !whole || bytes[8..24] != uuid.as_bytes()[..] {
            return None;
        }
        let mut blank = bytes.to_vec();
        blank[CRC_AT..CRC_AT + 4].fill(0);
        if crc32c(&blank).to_le_bytes() != bytes[CRC_AT..CRC_AT + 4] {
            return None;
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let count = u32::from_le_bytes(bytes[40..44].try_into().expect("4 bytes")) as usize;
        if count > (bytes.len() - ENTRIES_AT) / ENTRY_BYTES {
            return None;
        }
        let entry = |i: usize| {
            let at = ENTRIES_AT + i * ENTRY_BYTES;
            let chunk = u16::from_le_bytes([bytes[at + 8], bytes[at + 9]]);
            let rows = std::array::from_fn(|i| word(at + ROWS_AT + 8 * i));
            let why = if bytes[at + 10] == 0 { Why::Untold } else { Why::Absent };
            ((word(at), usize::from(chunk), why), Rows(rows))
        };
        let entries = (0..count).map(entry).collect();
        Some(Self { epoch: Epoch(word(24)), sequence: word(32), entries })
    }

    /// Makes magic, identity and checksum right, so that a fuzzer gets past them.
    pub fn seal(bytes: &mut [u8], uuid: Uuid) {
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..24].copy_from_slice(uuid.as_bytes());
        bytes[CRC_AT..CRC_AT + 4].fill(0);
        let crc = crc32c(bytes).to_le_bytes();
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc);
    }
}

impl Engine {
    /// Fails where a read would give bytes that nothing tells.
    pub fn check_not_lost(&self, at: u64, bytes: u64) -> Result<(), BlockError> {
        if self.lost.is_empty() {
            return Ok(());
        }
        let mut lost = None;
        let mut piece_at = at;
        self.pieces(at, bytes, |stripe, chunk, within, run| {
            if self.lost.has(stripe, chunk, &(within..within + run)) {
                lost.get_or_insert(piece_at);
            }
            piece_at += run;
        });
        match lost {
            Some(at) => Err(BlockError::Medium { at, bytes }),
            None => Ok(()),
        }
    }

    /// Lists blocks of these chunks that a rebuild could not make. When this returns, that is on the members; false when there
    /// is no room.
    pub async fn list_absent(
        self: &Rc<Self>,
        stripe: u64,
        chunks: impl ExactSizeIterator<Item = usize>,
        rows: Rows,
    ) -> Result<bool, BlockError> {
        // Stripes that are overwritten whole may count on all the room there is. From here on they count on less; those that
        // count on more must not be found listed any more.
        let kept = chunks.len();
        self.lost.kept.set(self.lost.kept.get() + kept);
        let made = match self.lost.room() < self.may_become_lost() {
            true => self.void_all_records().await,
            false => Ok(()),
        };
        self.lost.kept.set(self.lost.kept.get() - kept);
        made?;
        let mut chunks = chunks;
        if !chunks.all(|chunk| self.lost.add((stripe, chunk), Why::Absent, rows)) {
            return Ok(false);
        }
        self.persist_lost().await?;
        Ok(true)
    }

    /// Blocks that are listed as absent and were put right since, by chunk: whoever plays their role does not lack them.
    /// (Who took the role since gets them from his rebuild.)
    pub fn put_right(&self) -> Vec<(u64, usize, Rows)> {
        if self.lost.is_empty() {
            return Vec::new();
        }
        let entries = self.lost.entries.borrow();
        let absent = entries.iter().filter(|((.., why), _)| *why == Why::Absent);
        let right = absent.filter_map(|((stripe, chunk, _), rows)| {
            let place = self.layout.place(*stripe, *chunk);
            // One that is away may come back as it was.
            let player = self.player(place.role)?;
            let mut right = *rows;
            for block in rows.runs().into_iter().flatten() {
                let at = self.member_offset(place.slot, block * BLOCK_BYTES);
                if player.lacks(&(at..at + BLOCK_BYTES)) {
                    right.set(block..block + 1, false);
                }
            }
            (right != Rows::default()).then_some((*stripe, *chunk, right))
        });
        right.collect()
    }

    /// Takes blocks from the list that were put right before a flush, which has ended.
    pub async fn forget_put_right(
        self: &Rc<Self>,
        right: Vec<(u64, usize, Rows)>,
    ) -> Result<(), BlockError> {
        if right.is_empty() {
            return Ok(());
        }
        // A rebuild may have left some of them out again meanwhile.
        for (stripe, chunk, now) in self.put_right() {
            for (.., then) in right.iter().filter(|(s, c, _)| (*s, *c) == (stripe, chunk)) {
                self.lost.are_there(stripe, chunk, now.without(now.without(*then)));
            }
        }
        self.persist_lost().await
    }

    /// Waits until every change of the list so far is on all live members.
    pub async fn persist_lost(self: &Rc<Self>) -> Result<(), BlockError> {
        if self.lost.durable.get() >= self.lost.wanted.get() || planted!("raid-lost-not-persisted")
        {
            return Ok(());
        }
        let engine = Rc::clone(self);
        self.detached(async move { engine.write_lost().await }).await
    }

    async fn write_lost(self: &Rc<Self>) -> Result<(), BlockError> {
        let _turn = self.lost.turn.acquire(1).await;
        while self.lost.durable.get() < self.lost.wanted.get() {
            self.check_running()?;
            let version = self.lost.wanted.get();
            self.lost.sequence.set(self.lost.sequence.get() + 1);
            let image = self.lost.encode(self.uuid, self.epoch).freeze();
            // Over the older of the two.
            let at = self.areas.lost_at + self.lost.sequence.get() % 2 * self.lost.image_bytes;
            let live = self.live_members();
            let writes = live.iter().map(|member| {
                self.member_write(member, at, image.clone().into_vec(), Durability::Fua)
            });
            join_all(writes).await;
            // Those that missed it are out, and on record as such.
            self.settle().await?;
            self.lost.durable.set(version);
        }
        Ok(())
    }

    /// Takes over the newest list on any live member, and gives it to those that have another.
    pub async fn load_lost(self: &Rc<Self>) -> Result<(), BlockError> {
        let image_bytes = self.lost.image_bytes;
        if image_bytes == 0 {
            return Ok(());
        }
        let live = self.live_members();
        let reads = live.iter().map(async |member| {
            let mut newest: Option<Image> = None;
            for at in [self.areas.lost_at, self.areas.lost_at + image_bytes] {
                let into = BufMut::for_overwrite(image_bytes as usize).into_vec();
                let Ok(bytes) = self.member_read(member, at, into).await else { continue };
                let Some(image) = Image::decode(&bytes[0], self.uuid) else { continue };
                let is_newer = newest.as_ref().is_none_or(|old| old.order() < image.order());
                if image.epoch <= self.epoch && is_newer {
                    newest = Some(image);
                }
            }
            newest
        });
        let found = join_all(reads).await;
        let order = |image: &Option<Image>| image.as_ref().map(Image::order);
        let newest = found.iter().map(order).max().flatten();
        let differs = !found.iter().all(|image| order(image) == newest);
        let Some(image) = found.into_iter().flatten().find(|i| Some(i.order()) == newest) else {
            return Ok(());
        };
        self.lost.sequence.set(image.sequence);
        let mut is_shorter = false;
        for ((stripe, chunk, why), rows) in image.entries {
            let is_sound = stripe < self.layout.stripes && chunk < self.layout.chunks();
            // A discard makes its stripes hold nothing before it shortens the list.
            if !is_sound || !self.map.has(Bit::Written, stripe) {
                is_shorter = true;
                continue;
            }
            self.lost.add((stripe, chunk), why, rows);
        }
        (0..self.layout.width).for_each(|role| self.tell_left_out(role));
        // As it is on the members already, unless they differ, or tell of stripes that hold nothing: those may be written, and
        // no entry of before must come back then.
        self.lost.durable.set(self.lost.wanted.get());
        if differs || is_shorter {
            self.lost.changed();
        }
        self.persist_lost().await
    }

    /// Tells whoever plays a role which blocks are absent there.
    pub fn tell_left_out(&self, role: usize) {
        let Some(member) = self.player(role) else { return };
        for ((stripe, chunk, why), rows) in self.lost.entries.borrow().iter() {
            let place = self.layout.place(*stripe, *chunk);
            if (*why, place.role) == (Why::Absent, role) {
                let blocks = rows.runs().into_iter().flatten();
                let blocks =
                    blocks.map(|block| self.member_offset(place.slot, block * BLOCK_BYTES));
                blocks.for_each(|at| member.leave_out(at));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_reads_back_and_a_torn_one_does_not() {
        let (uuid, lost) = (Uuid::from_u128(7), Lost::new(2 * BLOCK_BYTES));
        assert!(lost.add((9, 3), Why::Untold, Rows::of(0..16)));
        assert!(lost.add((1 << 40, 0), Why::Absent, Rows::of(255..256)));
        lost.remove(9, 3, 4 * BLOCK_BYTES..6 * BLOCK_BYTES);
        assert!(lost.has(9, 3, &(0..100)) && !lost.has(9, 3, &(16384..24576)));
        assert!(!lost.has(1 << 40, 0, &(0..1 << 20)), "its member knows");
        assert_eq!(lost.blocks(), 14);
        let mut bytes = lost.encode(uuid, Epoch(2));
        let image = Image::decode(&bytes, uuid).expect("just written");
        assert_eq!(image.entries, *lost.entries.borrow());
        assert_eq!(Image::decode(&bytes, Uuid::from_u128(8)), None);
        bytes[70] ^= 1;
        assert_eq!(Image::decode(&bytes, uuid), None);
    }

    #[test]
    fn it_takes_no_more_than_its_room() {
        let lost = Lost::new(2 * BLOCK_BYTES);
        let room = lost.room() as u64;
        let add = |stripe, blocks| lost.add((stripe, 0), Why::Untold, Rows::of(blocks));
        assert!((0..room).all(|stripe| add(stripe, 0..1)));
        assert!(!add(room, 0..1) && add(0, 1..2));
        lost.remove(0, 0, 0..8192);
        assert!(add(room, 0..1));
        let _ = lost.encode(Uuid::from_u128(7), Epoch(1));
    }

    #[test]
    fn rows_come_in_runs() {
        let mut rows = Rows::of(3..70);
        rows.set(10..12, false);
        assert_eq!(rows.runs(), [3..10, 12..70]);
    }
}

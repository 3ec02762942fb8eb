//! Stripe map: which stripes hold data (written), and which may disagree with their redundancy
//! (dirty). Pages drawn in docs/design/0003-array-format.md; this module does no I/O.
//!
//! What always holds:
//! - Both bits of a stripe are in one page, so one atomic write carries both.
//! - A page's sequence grows with every image taken of it, and images are written one at a time
//!   ([`StripeMap::begin_write`]), so an older image never lands on a newer one.
//!
//! Three bits live in memory only. Fresh: declared, not written yet; after a restart such a stripe must be declared again.
//! Patched: it was overwritten in place since its redundancy was last known to be right; the superblock says whether there
//! may be any. Suspect: a scrub found that its chunks disagree.

use levada_base::Epoch;
use levada_base::checksum::crc32c;
use levada_base::ids::Uuid;
use levada_base::sync::Notify;
use levada_base::units::BLOCK_BYTES;
use std::cell::{Cell, RefCell};
use std::ops::Range;

const MAGIC: &[u8; 8] = b"LVDSTMAP";
const WORDS: usize = 252;
/// Stripes that one page describes.
pub(crate) const STRIPES_PER_PAGE: u64 = WORDS as u64 * 64;
const WRITTEN_AT: usize = 64;
const DIRTY_AT: usize = WRITTEN_AT + WORDS * 8;
const CRC_AT: usize = 48;

/// Pages that describe `stripes` stripes.
pub(crate) fn pages_for(stripes: u64) -> u64 {
    stripes.div_ceil(STRIPES_PER_PAGE)
}

type Bits = [u64; WORDS];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bit {
    Written,
    Dirty,
    Fresh,
    Patched,
    Suspect,
}

impl Bit {
    /// Those that say something of a stripe's contents.
    pub const OF_CONTENTS: [Self; 2] = [Self::Patched, Self::Suspect];
}

/// One page in memory.
struct Page {
    sequence: u64,
    written: Bits,
    dirty: Bits,
    fresh: Bits,
    patched: Bits,
    suspect: Bits,
    /// Counts the changes that somebody waits for.
    wanted: u64,
    /// Of those, the ones on disk.
    durable: u64,
    writing: bool,
}

impl Page {
    fn bits(&mut self, bit: Bit) -> &mut Bits {
        match bit {
            Bit::Written => &mut self.written,
            Bit::Dirty => &mut self.dirty,
            Bit::Fresh => &mut self.fresh,
            Bit::Patched => &mut self.patched,
            Bit::Suspect => &mut self.suspect,
        }
    }
}

/// A page as read from a member.
#[derive(Clone)]
pub(crate) struct PageImage {
    pub epoch: Epoch,
    pub sequence: u64,
    written: Bits,
    dirty: Bits,
}

impl PageImage {
    /// Makes everything of page `number` right but its contents, so that a fuzzer gets past it.
    pub fn seal(bytes: &mut [u8], uuid: Uuid, number: u64) {
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..24].copy_from_slice(uuid.as_bytes());
        bytes[40..48].copy_from_slice(&number.to_le_bytes());
        bytes[CRC_AT..CRC_AT + 4].fill(0);
        let crc = crc32c(bytes);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads page `number` of array `uuid`; `None` when these bytes are not that.
    pub fn decode(bytes: &[u8], uuid: Uuid, number: u64) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if bytes.len() as u64 != BLOCK_BYTES || &bytes[..8] != MAGIC {
            return None;
        }
        if bytes[8..24] != uuid.as_bytes()[..] || word(40) != number {
            return None;
        }
        let mut copy = bytes.to_vec();
        copy[CRC_AT..CRC_AT + 4].fill(0);
        if crc32c(&copy).to_le_bytes() != bytes[CRC_AT..CRC_AT + 4] {
            return None;
        }
        let bits = |at: usize| std::array::from_fn(|i| word(at + 8 * i));
        Some(Self {
            epoch: Epoch(word(24)),
            sequence: word(32),
            written: bits(WRITTEN_AT),
            dirty: bits(DIRTY_AT),
        })
    }
}

/// The map of one array.
pub(crate) struct StripeMap {
    uuid: Uuid,
    stripes: u64,
    pages: RefCell<Vec<Page>>,
    /// Some page write ended.
    pub written: Notify,
    written_stripes: Cell<u64>,
}

impl StripeMap {
    /// A map on which nothing is written.
    pub fn empty(uuid: Uuid, stripes: u64) -> Self {
        let page = || Page {
            sequence: 0,
            written: [0; WORDS],
            dirty: [0; WORDS],
            fresh: [0; WORDS],
            patched: [0; WORDS],
            suspect: [0; WORDS],
            wanted: 0,
            durable: 0,
            writing: false,
        };
        Self {
            uuid,
            stripes,
            pages: RefCell::new((0..pages_for(stripes)).map(|_| page()).collect()),
            written: Notify::default(),
            written_stripes: Cell::new(0),
        }
    }

    pub fn pages(&self) -> u64 {
        pages_for(self.stripes)
    }

    /// Takes over a page found on disk.
    pub fn load(&self, number: u64, image: &PageImage) {
        let page = &mut self.pages.borrow_mut()[number as usize];
        page.sequence = image.sequence;
        page.written = image.written;
        page.dirty = image.dirty;
        // Bits past the last stripe would be resynced and rebuilt: refuse to believe them.
        let first = number * STRIPES_PER_PAGE;
        for word in 0..WORDS {
            let left = self.stripes.saturating_sub(first + word as u64 * 64).min(64);
            let mask = if left == 64 { u64::MAX } else { (1 << left) - 1 };
            page.written[word] &= mask;
            page.dirty[word] &= mask;
        }
        let count: u32 = page.written.iter().map(|word| word.count_ones()).sum();
        self.written_stripes.set(self.written_stripes.get() + u64::from(count));
    }

    /// Of no stripe that holds something is known that its redundancy is right.
    pub fn patch_all(&self) {
        for page in self.pages.borrow_mut().iter_mut() {
            page.patched = page.written;
        }
    }

    /// These stripes get other contents, or none: nothing is known against them.
    pub fn begin_anew(&self, range: Range<u64>) {
        Bit::OF_CONTENTS.into_iter().for_each(|bit| self.set(bit, range.clone(), false));
    }

    /// Stripes that hold data.
    pub fn written_stripes(&self) -> u64 {
        self.written_stripes.get()
    }

    pub fn has(&self, bit: Bit, stripe: u64) -> bool {
        let (page, word, shift) = split(stripe);
        self.pages.borrow_mut()[page].bits(bit)[word] >> shift & 1 == 1
    }

    /// Changes a bit of the stripes `range`, in memory.
    pub fn set(&self, bit: Bit, range: Range<u64>, to: bool) {
        let mut pages = self.pages.borrow_mut();
        let mut stripe = range.start;
        while stripe < range.end {
            let (page, word, shift) = split(stripe);
            let count = (64 - shift).min(range.end - stripe);
            let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << shift };
            let bits = &mut pages[page].bits(bit)[word];
            let before = *bits;
            *bits = if to { before | mask } else { before & !mask };
            if bit == Bit::Written {
                let after = u64::from(bits.count_ones());
                let count = self.written_stripes.get() + after - u64::from(before.count_ones());
                self.written_stripes.set(count);
            }
            stripe += count;
        }
    }

    /// The first stripe from `from` on whose bit is set.
    pub fn next_set(&self, bit: Bit, from: u64) -> Option<u64> {
        let mut pages = self.pages.borrow_mut();
        let mut stripe = from;
        while stripe < self.stripes {
            let (page, word, shift) = split(stripe);
            let bits = pages[page].bits(bit)[word] >> shift;
            if bits != 0 {
                return Some(stripe + u64::from(bits.trailing_zeros()));
            }
            stripe += 64 - shift;
        }
        None
    }

    /// The pages that describe `range`.
    pub fn pages_of(range: &Range<u64>) -> Range<u64> {
        range.start / STRIPES_PER_PAGE..range.end.div_ceil(STRIPES_PER_PAGE)
    }

    /// Says that the present state of `page` must reach the disk; the version to wait for.
    pub fn want(&self, page: u64) -> u64 {
        let page = &mut self.pages.borrow_mut()[page as usize];
        page.wanted += 1;
        page.wanted
    }

    /// Pages of which somebody waits for a version that is not durable, and that version.
    pub fn wanted_pages(&self) -> Vec<(u64, u64)> {
        let pages = self.pages.borrow();
        let wanted = pages.iter().zip(0..).filter(|(page, _)| page.durable < page.wanted);
        wanted.map(|(page, number)| (number, page.wanted)).collect()
    }

    pub fn is_durable(&self, page: u64, version: u64) -> bool {
        self.pages.borrow()[page as usize].durable >= version
    }

    /// Takes the right to write `page` and its present image; `None` while somebody else
    /// writes it. Ended by [`Self::end_write`].
    pub fn begin_write(&self, number: u64, epoch: Epoch, image: &mut [u8]) -> Option<u64> {
        let page = &mut self.pages.borrow_mut()[number as usize];
        if page.writing {
            return None;
        }
        page.writing = true;
        page.sequence += 1;
        image.fill(0);
        let mut put = |at: usize, value: &[u8]| image[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(8, self.uuid.as_bytes());
        put(24, &epoch.0.to_le_bytes());
        put(32, &page.sequence.to_le_bytes());
        put(40, &number.to_le_bytes());
        for word in 0..WORDS {
            put(WRITTEN_AT + 8 * word, &page.written[word].to_le_bytes());
            put(DIRTY_AT + 8 * word, &page.dirty[word].to_le_bytes());
        }
        let crc = crc32c(image).to_le_bytes();
        image[CRC_AT..CRC_AT + 4].copy_from_slice(&crc);
        Some(page.wanted)
    }

    /// The write of the image with this version ended; `durable` says how.
    pub fn end_write(&self, number: u64, version: u64, durable: bool) {
        {
            let page = &mut self.pages.borrow_mut()[number as usize];
            page.writing = false;
            if durable {
                page.durable = page.durable.max(version);
            }
        }
        self.written.notify_all();
    }
}

/// Page, word in the page, bit in the word.
fn split(stripe: u64) -> (usize, usize, u64) {
    let in_page = stripe % STRIPES_PER_PAGE;
    ((stripe / STRIPES_PER_PAGE) as usize, (in_page / 64) as usize, in_page % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The map against a plain list of booleans, through its pages and back.
        #[test]
        fn ranges_of_bits_survive_their_pages(
            changes in prop::collection::vec((0..40_000u64, 0..20_000u64, any::<bool>()), 1..8),
        ) {
            let (uuid, stripes) = (Uuid::from_u128(7), 40_000);
            let map = StripeMap::empty(uuid, stripes);
            let mut model = vec![false; stripes as usize];
            for (start, count, to) in changes {
                let range = start..(start + count).min(stripes);
                map.set(Bit::Written, range.clone(), to);
                model[range.start as usize..range.end as usize].fill(to);
            }
            let again = StripeMap::empty(uuid, stripes);
            let mut bytes = vec![0; 4096];
            for page in 0..map.pages() {
                prop_assert!(map.begin_write(page, Epoch(1), &mut bytes).is_some());
                let image = PageImage::decode(&bytes, uuid, page).expect("just written");
                prop_assert!(PageImage::decode(&bytes, uuid, page + 1).is_none());
                again.load(page, &image);
            }
            let listed: Vec<u64> = std::iter::successors(again.next_set(Bit::Written, 0), |s| {
                again.next_set(Bit::Written, s + 1)
            })
            .collect();
            let expected: Vec<u64> = (0..stripes).filter(|s| model[*s as usize]).collect();
            prop_assert_eq!(again.written_stripes(), expected.len() as u64);
            prop_assert_eq!(listed, expected);
        }
    }

    #[test]
    fn a_torn_page_is_refused() {
        let map = StripeMap::empty(Uuid::from_u128(7), 100);
        let mut bytes = vec![0; 4096];
        map.begin_write(0, Epoch(1), &mut bytes);
        bytes[3000] ^= 1;
        assert!(PageImage::decode(&bytes, Uuid::from_u128(7), 0).is_none());
    }
}

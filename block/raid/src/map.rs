//! Stripe map: which stripes hold data (written), which may disagree with their redundancy
//! (dirty), and which changed while a member was away (missed). Pages drawn in docs/design/0003-array-format.md; this module
//! does no I/O.
//!
//! What always holds:
//! - All bits of a stripe are in one page, so one write carries all.
//! - A page's sequence grows with every image taken of it, and images are written one at a time
//!   ([`StripeMap::begin_write`]), so an older image never lands on a newer one.
//! - While the map is short ([`StripeMap::set_short`]), whatever becomes dirty or written is missed as well.
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
/// Most words of a bitmap.
const WORDS_MAX: usize = 252;
const BITMAPS_AT: usize = 64;
const CRC_AT: usize = 48;
const FORMAT_AT: usize = 52;

/// How pages lie on members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapFormat {
    /// Of superblock versions 1 and 2. A page has two bitmaps and one place, which it takes an atomic write to change.
    Single,
    /// A page has three bitmaps and two places, of which the older image is written over: a torn write costs nothing.
    Paired,
}

impl MapFormat {
    /// Bitmaps of a page: written, dirty, missed.
    fn bitmaps(self) -> usize {
        match self {
            Self::Single => 2,
            Self::Paired => 3,
        }
    }

    /// Words of a bitmap.
    fn words(self) -> usize {
        match self {
            Self::Single => WORDS_MAX,
            Self::Paired => 168,
        }
    }

    /// Stripes that one page describes.
    pub fn stripes_per_page(self) -> u64 {
        self.words() as u64 * 64
    }

    /// Pages that describe `stripes` stripes.
    pub fn pages_for(self, stripes: u64) -> u64 {
        stripes.div_ceil(self.stripes_per_page())
    }

    /// Images of a page on each member.
    pub fn images(self) -> u64 {
        match self {
            Self::Single => 1,
            Self::Paired => 2,
        }
    }

    /// Bytes of the map of `stripes` stripes.
    pub fn bytes_for(self, stripes: u64) -> u64 {
        self.pages_for(stripes) * self.images() * BLOCK_BYTES
    }

    /// What a page carries, so that one of another format does not pass for it.
    fn marker(self) -> u8 {
        match self {
            Self::Single => 0,
            Self::Paired => self.bitmaps() as u8,
        }
    }

    /// Offset in the map of the image of a page with this sequence.
    pub fn offset(self, page: u64, sequence: u64) -> u64 {
        (page * self.images() + sequence % self.images()) * BLOCK_BYTES
    }

    /// Page, word in the page, bit in the word.
    fn split(self, stripe: u64) -> (usize, usize, u64) {
        let in_page = stripe % self.stripes_per_page();
        ((stripe / self.stripes_per_page()) as usize, (in_page / 64) as usize, in_page % 64)
    }
}

type Bits = [u64; WORDS_MAX];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bit {
    Written,
    Dirty,
    /// Changed, or may have, since the first of the members that are away now left.
    Missed,
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
    missed: Bits,
    fresh: Bits,
    patched: Bits,
    suspect: Bits,
    /// Counts the changes that somebody waits for.
    wanted: u64,
    /// Of those, the ones on disk.
    durable: u64,
    /// The last of them that made a stripe missed.
    missed_at: u64,
    writing: bool,
}

impl Page {
    fn bits(&mut self, bit: Bit) -> &mut Bits {
        match bit {
            Bit::Written => &mut self.written,
            Bit::Dirty => &mut self.dirty,
            Bit::Missed => &mut self.missed,
            Bit::Fresh => &mut self.fresh,
            Bit::Patched => &mut self.patched,
            Bit::Suspect => &mut self.suspect,
        }
    }

    /// Makes stripes of a word missed.
    fn miss(&mut self, word: usize, stripes: u64) {
        if self.missed[word] | stripes != self.missed[word] {
            self.missed[word] |= stripes;
            self.wanted += 1;
            self.missed_at = self.wanted;
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
    missed: Bits,
}

impl PageImage {
    /// Makes everything of page `number` right but its contents, so that a fuzzer gets past it.
    pub fn seal(bytes: &mut [u8], format: MapFormat, uuid: Uuid, number: u64) {
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..24].copy_from_slice(uuid.as_bytes());
        bytes[40..48].copy_from_slice(&number.to_le_bytes());
        bytes[FORMAT_AT] = format.marker();
        bytes[CRC_AT..CRC_AT + 4].fill(0);
        let crc = crc32c(bytes);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads page `number` of array `uuid`; `None` when these bytes are not that.
    pub fn decode(bytes: &[u8], format: MapFormat, uuid: Uuid, number: u64) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if bytes.len() as u64 != BLOCK_BYTES || &bytes[..8] != MAGIC {
            return None;
        }
        let is_this = bytes[8..24] == uuid.as_bytes()[..] && word(40) == number;
        if !is_this || bytes[FORMAT_AT] != format.marker() {
            return None;
        }
        let mut copy = bytes.to_vec();
        copy[CRC_AT..CRC_AT + 4].fill(0);
        if crc32c(&copy).to_le_bytes() != bytes[CRC_AT..CRC_AT + 4] {
            return None;
        }
        let words = format.words();
        let bits = |bitmap: usize| {
            let at = BITMAPS_AT + bitmap * words * 8;
            let is_there = bitmap < format.bitmaps();
            std::array::from_fn(|i| if is_there && i < words { word(at + 8 * i) } else { 0 })
        };
        Some(Self {
            epoch: Epoch(word(24)),
            sequence: word(32),
            written: bits(0),
            dirty: bits(1),
            missed: bits(2),
        })
    }
}

/// The map of one array.
pub(crate) struct StripeMap {
    uuid: Uuid,
    pub format: MapFormat,
    stripes: u64,
    pages: RefCell<Vec<Page>>,
    /// Some page write ended.
    pub written: Notify,
    written_stripes: Cell<u64>,
    /// Some member is away, or has not caught up.
    short: Cell<bool>,
}

impl StripeMap {
    /// A map on which nothing is written.
    pub fn empty(uuid: Uuid, stripes: u64, format: MapFormat) -> Self {
        let page = || Page {
            sequence: 0,
            written: [0; WORDS_MAX],
            dirty: [0; WORDS_MAX],
            missed: [0; WORDS_MAX],
            fresh: [0; WORDS_MAX],
            patched: [0; WORDS_MAX],
            suspect: [0; WORDS_MAX],
            wanted: 0,
            durable: 0,
            missed_at: 0,
            writing: false,
        };
        Self {
            uuid,
            format,
            stripes,
            pages: RefCell::new((0..format.pages_for(stripes)).map(|_| page()).collect()),
            written: Notify::default(),
            written_stripes: Cell::new(0),
            short: Cell::new(false),
        }
    }

    pub fn pages(&self) -> u64 {
        self.format.pages_for(self.stripes)
    }

    /// Says whether members are away. When the last one is back nothing is missed any more; when one goes, what is dirty is: nobody
    /// knows how much of it reached that member.
    pub fn set_short(&self, short: bool) {
        if self.format == MapFormat::Single {
            return;
        }
        self.short.set(short);
        for page in self.pages.borrow_mut().iter_mut() {
            match short {
                true => (0..self.format.words()).for_each(|word| page.miss(word, page.dirty[word])),
                false => page.missed = [0; WORDS_MAX],
            }
        }
    }

    pub fn is_short(&self) -> bool {
        self.short.get()
    }

    /// Makes a stripe missed, and its neighbours, so that the map is seldom written for them; the page, and its version to
    /// wait for.
    pub fn miss(&self, stripe: u64) -> (u64, u64) {
        let (number, word, _) = self.format.split(stripe);
        let page = &mut self.pages.borrow_mut()[number];
        if self.format == MapFormat::Paired {
            page.miss(word, mask(self.stripes - stripe / 64 * 64));
        }
        (number as u64, page.missed_at)
    }

    /// Takes over a page found on disk.
    pub fn load(&self, number: u64, image: &PageImage) {
        let page = &mut self.pages.borrow_mut()[number as usize];
        page.sequence = image.sequence;
        page.written = image.written;
        page.dirty = image.dirty;
        page.missed = image.missed;
        // Bits past the last stripe would be resynced and rebuilt: refuse to believe them.
        let first = number * self.format.stripes_per_page();
        for word in 0..self.format.words() {
            let mask = mask(self.stripes.saturating_sub(first + word as u64 * 64));
            page.written[word] &= mask;
            page.dirty[word] &= mask;
            page.missed[word] &= mask;
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

    /// Stripes that hold data and are missed.
    pub fn missed_stripes(&self) -> u64 {
        let pages = self.pages.borrow();
        let words = pages.iter().flat_map(|page| page.written.iter().zip(&page.missed));
        words.map(|(written, missed)| u64::from((written & missed).count_ones())).sum()
    }

    /// Stripes that hold data.
    pub fn written_stripes(&self) -> u64 {
        self.written_stripes.get()
    }

    pub fn has(&self, bit: Bit, stripe: u64) -> bool {
        let (page, word, shift) = self.format.split(stripe);
        self.pages.borrow_mut()[page].bits(bit)[word] >> shift & 1 == 1
    }

    /// Changes a bit of the stripes `range`, in memory.
    pub fn set(&self, bit: Bit, range: Range<u64>, to: bool) {
        let mut pages = self.pages.borrow_mut();
        let mut stripe = range.start;
        while stripe < range.end {
            let (page, word, shift) = self.format.split(stripe);
            let count = (64 - shift).min(range.end - stripe);
            let mask = mask(count) << shift;
            let bits = &mut pages[page].bits(bit)[word];
            let before = *bits;
            *bits = if to { before | mask } else { before & !mask };
            if bit == Bit::Written {
                let after = u64::from(bits.count_ones());
                let count = self.written_stripes.get() + after - u64::from(before.count_ones());
                self.written_stripes.set(count);
            }
            if to && self.short.get() && matches!(bit, Bit::Written | Bit::Dirty) {
                pages[page].miss(word, mask);
            }
            stripe += count;
        }
    }

    /// The first stripe from `from` on whose bit is set.
    pub fn next_set(&self, bit: Bit, from: u64) -> Option<u64> {
        let mut pages = self.pages.borrow_mut();
        let mut stripe = from;
        while stripe < self.stripes {
            let (page, word, shift) = self.format.split(stripe);
            let bits = pages[page].bits(bit)[word] >> shift;
            if bits != 0 {
                return Some(stripe + u64::from(bits.trailing_zeros()));
            }
            stripe += 64 - shift;
        }
        None
    }

    /// The pages that describe `range`.
    pub fn pages_of(&self, range: &Range<u64>) -> Range<u64> {
        let per_page = self.format.stripes_per_page();
        range.start / per_page..range.end.div_ceil(per_page)
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
    /// writes it. Ended by [`Self::end_write`]. Gives the version, and where in the map it goes.
    pub fn begin_write(&self, number: u64, epoch: Epoch, image: &mut [u8]) -> Option<(u64, u64)> {
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
        put(FORMAT_AT, &[self.format.marker()]);
        let words = self.format.words();
        let bitmaps = [&page.written, &page.dirty, &page.missed].into_iter();
        for (bitmap, number) in bitmaps.take(self.format.bitmaps()).zip(0..) {
            let at = BITMAPS_AT + number * words * 8;
            let words = bitmap[..words].iter().zip((at..).step_by(8));
            words.for_each(|(word, at)| put(at, &word.to_le_bytes()));
        }
        let crc = crc32c(image).to_le_bytes();
        image[CRC_AT..CRC_AT + 4].copy_from_slice(&crc);
        Some((page.wanted, self.format.offset(number, page.sequence)))
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

/// The lowest so many bits.
fn mask(bits: u64) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
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
            is_paired in any::<bool>(),
        ) {
            let (format, other) = match is_paired {
                true => (MapFormat::Paired, MapFormat::Single),
                false => (MapFormat::Single, MapFormat::Paired),
            };
            let (uuid, stripes) = (Uuid::from_u128(7), 40_000);
            let map = StripeMap::empty(uuid, stripes, format);
            let mut model = vec![false; stripes as usize];
            for (start, count, to) in changes {
                let range = start..(start + count).min(stripes);
                map.set(Bit::Written, range.clone(), to);
                model[range.start as usize..range.end as usize].fill(to);
            }
            let again = StripeMap::empty(uuid, stripes, format);
            let mut bytes = vec![0; 4096];
            for page in 0..map.pages() {
                prop_assert!(map.begin_write(page, Epoch(1), &mut bytes).is_some());
                let image = PageImage::decode(&bytes, format, uuid, page).expect("just written");
                prop_assert!(PageImage::decode(&bytes, format, uuid, page + 1).is_none());
                prop_assert!(PageImage::decode(&bytes, other, uuid, page).is_none());
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
    fn a_torn_page_is_refused_and_does_not_lie_on_the_one_before() {
        let (uuid, format) = (Uuid::from_u128(7), MapFormat::Paired);
        let map = StripeMap::empty(uuid, 100, format);
        let mut bytes = vec![0; 4096];
        let (version, at) = map.begin_write(0, Epoch(1), &mut bytes).expect("nobody writes it");
        map.end_write(0, version, true);
        bytes[3000] ^= 1;
        assert!(PageImage::decode(&bytes, format, uuid, 0).is_none());
        let (_, next_at) = map.begin_write(0, Epoch(1), &mut bytes).expect("nobody writes it");
        assert!(at != next_at && at.max(next_at) < format.bytes_for(100));
    }

    #[test]
    fn what_changes_while_the_map_is_short_is_missed() {
        let map = StripeMap::empty(Uuid::from_u128(7), 1000, MapFormat::Paired);
        map.set(Bit::Written, 0..900, true);
        map.set(Bit::Dirty, 3..4, true);
        assert_eq!(map.missed_stripes(), 0);
        map.set_short(true);
        map.set(Bit::Dirty, 700..702, true);
        let (page, version) = map.miss(130);
        assert!(!map.is_durable(page, version));
        assert_eq!(map.missed_stripes(), 1 + 2 + 64);
        assert!([3, 700, 128, 191].iter().all(|stripe| map.has(Bit::Missed, *stripe)));
        map.set(Bit::Written, 950..951, true);
        assert!(map.has(Bit::Missed, 950));
        assert_eq!(map.miss(999).0, 0);
        map.set_short(false);
        assert_eq!(map.missed_stripes(), 0);
    }
}

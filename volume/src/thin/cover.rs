//! Of which granules a layer holds the bytes itself, and what lies below it that it hides.
//!
//! Two bits for each granule of 4 KiB, in regions that come as they are needed: 1 KiB of memory for 16 MiB at most, and none for
//! what is not used. Arithmetic only.

use levada_base::units::BLOCK_BYTES;
use std::collections::BTreeMap;
use std::ops::Range;

/// A layer holds all bytes of a granule, or none.
pub(super) const GRANULE_BYTES: u64 = BLOCK_BYTES;
const REGION_GRANULES: u64 = 4096;
/// Bytes of a layer that are looked up together.
pub(super) const REGION_BYTES: u64 = REGION_GRANULES * GRANULE_BYTES;
/// Bytes in which the hidden granules of a region are kept.
pub(super) const HIDDEN_BYTES: u64 = REGION_GRANULES / 8;

/// Where the bytes of a granule are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    /// In the layer itself.
    Own,
    /// Nowhere: they are zeroes, whatever lies below.
    Zeroes,
    /// In the layers below.
    Below,
}

/// A bit for each granule of a region; none where all are zero.
#[derive(Clone, Debug, Default)]
struct Bits(Option<Box<[u64; (REGION_GRANULES / 64) as usize]>>);

impl Bits {
    fn get(&self, granule: u64) -> bool {
        self.0.as_ref().is_some_and(|words| words[granule as usize / 64] >> (granule % 64) & 1 == 1)
    }

    fn set(&mut self, granules: Range<u64>, to: bool) {
        if !to && self.0.is_none() {
            return;
        }
        let words = self.0.get_or_insert_with(|| Box::new([0; (REGION_GRANULES / 64) as usize]));
        for (word, mask) in masks(granules) {
            let word = &mut words[word];
            *word = if to { *word | mask } else { *word & !mask };
        }
    }

    /// True when one of them is so.
    fn any(&self, mut granules: Range<u64>, is: bool) -> bool {
        match &self.0 {
            None => !is && granules.next().is_some(),
            Some(words) => masks(granules).any(|(word, mask)| {
                let set = words[word] & mask;
                if is { set != 0 } else { set != mask }
            }),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match &self.0 {
            Some(words) => words.iter().flat_map(|word| word.to_le_bytes()).collect(),
            None => vec![0; HIDDEN_BYTES as usize],
        }
    }

    fn of(bytes: &[u8]) -> Self {
        let mut bits = Self::default();
        for (at, byte) in bytes.iter().enumerate().take(HIDDEN_BYTES as usize) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let granule = at as u64 * 8 + bit;
                bits.set(granule..granule + 1, true);
            }
        }
        bits
    }
}

/// The words in which the bits of `granules` are, and which bits of those.
fn masks(granules: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let words = granules.start / 64..granules.end.div_ceil(64);
    words.map(move |word| {
        let (first, end) = (granules.start.max(word * 64), granules.end.min(word * 64 + 64));
        let mask = u64::MAX >> (64 - (end - first)) << (first % 64);
        (word as usize, mask)
    })
}

#[derive(Clone, Debug, Default)]
struct Region {
    own: Bits,
    hidden: Bits,
}

/// What is known of a layer's granules. Ranges are of bytes, in whole granules where something is changed.
#[derive(Clone, Debug, Default)]
pub(super) struct Cover {
    regions: BTreeMap<u64, Region>,
    /// Where a request failed, so that nobody knows what the file holds.
    unsure: Vec<Range<u64>>,
    /// Counts changes of what was not known: what was read of the file meanwhile may be from before.
    surprises: u64,
}

/// The regions that `bytes` touch.
fn regions_of(bytes: &Range<u64>) -> Range<u64> {
    let first = bytes.start / REGION_BYTES;
    first..bytes.end.div_ceil(REGION_BYTES).max(first)
}

/// The parts of `bytes` by region, in granules from its beginning.
fn by_region(bytes: &Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
    let granules = bytes.start / GRANULE_BYTES..bytes.end.div_ceil(GRANULE_BYTES);
    let regions = granules.start / REGION_GRANULES..granules.end.div_ceil(REGION_GRANULES);
    regions.map(move |region| {
        let base = region * REGION_GRANULES;
        let first = granules.start.max(base) - base;
        (region, first..granules.end.min(base + REGION_GRANULES) - base)
    })
}

impl Cover {
    /// The regions of `bytes` of which nothing is known.
    pub fn unknown(&self, bytes: &Range<u64>) -> Vec<u64> {
        let regions = by_region(bytes).map(|(region, _)| region);
        regions.filter(|region| !self.regions.contains_key(region)).collect()
    }

    /// The parts of `bytes` of which one must look anew what the file holds.
    pub fn unsure(&self, bytes: &Range<u64>) -> Option<Range<u64>> {
        let is_touched =
            |unsure: &&Range<u64>| unsure.start < bytes.end && bytes.start < unsure.end;
        self.unsure.iter().find(is_touched).cloned()
    }

    /// To be told when what was read afterwards is known: [`Self::learn`], [`Self::relearn`].
    pub fn surprises(&self) -> u64 {
        self.surprises
    }

    /// Takes in a region: where the file has data, and the bytes in which its hidden granules are kept. Nothing if it is known
    /// by now, or a change has come meanwhile.
    pub fn learn(&mut self, region: u64, own: &[Range<u64>], hidden: &[u8], surprises: u64) {
        if self.surprises != surprises || self.regions.contains_key(&region) {
            return;
        }
        let learnt = Region { own: Bits::default(), hidden: Bits::of(hidden) };
        self.regions.insert(region, learnt);
        for part in own {
            self.set(part, |region, granules| region.own.set(granules, true));
        }
    }

    /// Takes in what the file holds of a range that [`Self::unsure`] told, unless a change has come meanwhile.
    pub fn relearn(&mut self, range: &Range<u64>, own: &[Range<u64>], surprises: u64) {
        // Who was faster has let others change it since.
        if self.surprises != surprises || !self.unsure.contains(range) {
            return;
        }
        self.set(range, |region, granules| region.own.set(granules, false));
        for part in own {
            self.set(part, |region, granules| region.own.set(granules, true));
        }
        self.unsure.retain(|unsure| unsure != range);
    }

    /// Nobody knows any more what the file holds of `bytes`.
    pub fn doubt(&mut self, bytes: Range<u64>) {
        self.surprises += 1;
        if !self.unsure.contains(&bytes) {
            self.unsure.push(bytes);
        }
    }

    /// Of what is known alone, however much more `bytes` are.
    fn set(&mut self, bytes: &Range<u64>, with: impl Fn(&mut Region, Range<u64>)) {
        for (at, region) in self.regions.range_mut(regions_of(bytes)) {
            let base = at * REGION_BYTES;
            let part = bytes.start.max(base)..bytes.end.min(base + REGION_BYTES);
            let first = (part.start - base) / GRANULE_BYTES;
            with(region, first..(part.end - base).div_ceil(GRANULE_BYTES));
        }
    }

    fn changed(&mut self, bytes: &Range<u64>) {
        let regions = regions_of(bytes);
        let known = self.regions.range(regions.clone()).count() as u64;
        if known < regions.end - regions.start || self.unsure(bytes).is_some() {
            self.surprises += 1;
        }
    }

    /// The file holds `bytes`.
    pub fn own(&mut self, bytes: &Range<u64>) {
        self.changed(bytes);
        self.set(bytes, |region, granules| region.own.set(granules, true));
    }

    /// The file holds nothing of `bytes`.
    pub fn disown(&mut self, bytes: &Range<u64>) {
        self.changed(bytes);
        self.set(bytes, |region, granules| region.own.set(granules, false));
    }

    /// What lies below `bytes` is not seen any more.
    pub fn hide(&mut self, bytes: &Range<u64>) {
        self.set(bytes, |region, granules| region.hidden.set(granules, true));
    }

    /// True when the file holds any of `bytes`.
    pub fn owns_any(&self, bytes: &Range<u64>) -> bool {
        self.any(bytes, |region, granules| region.own.any(granules, true))
    }

    /// True when something that lies below `bytes` could be seen if the file held nothing.
    pub fn shows_any(&self, bytes: &Range<u64>) -> bool {
        self.any(bytes, |region, granules| region.hidden.any(granules, false))
    }

    fn any(&self, bytes: &Range<u64>, is_it: impl Fn(&Region, Range<u64>) -> bool) -> bool {
        by_region(bytes).any(|(region, granules)| {
            self.regions.get(&region).is_some_and(|region| is_it(region, granules))
        })
    }

    /// The regions of `bytes`, each with the bytes in which its hidden granules are kept.
    pub fn hidden(&self, bytes: &Range<u64>) -> Vec<(u64, Vec<u8>)> {
        let regions = by_region(bytes).map(|(region, _)| region);
        regions.filter_map(|at| Some((at, self.regions.get(&at)?.hidden.bytes()))).collect()
    }

    /// Takes back what [`Self::hidden`] told.
    pub fn set_hidden(&mut self, regions: Vec<(u64, Vec<u8>)>) {
        for (at, bytes) in regions {
            if let Some(region) = self.regions.get_mut(&at) {
                region.hidden = Bits::of(&bytes);
            }
        }
    }

    /// Where `bytes` are, in order: lengths, neighbours of different kind.
    pub fn runs(&self, bytes: &Range<u64>) -> Vec<(u64, Holds)> {
        let mut runs: Vec<(u64, Holds)> = Vec::with_capacity(1);
        for (at, granules) in by_region(bytes) {
            let region = self.regions.get(&at);
            for granule in granules {
                let holds = match region {
                    Some(region) if region.own.get(granule) => Holds::Own,
                    Some(region) if region.hidden.get(granule) => Holds::Zeroes,
                    _ => Holds::Below,
                };
                let start = at * REGION_BYTES + granule * GRANULE_BYTES;
                let (from, to) = (start.max(bytes.start), (start + GRANULE_BYTES).min(bytes.end));
                match runs.last_mut() {
                    Some((length, last)) if *last == holds => *length += to - from,
                    _ => runs.push((to - from, holds)),
                }
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::slice::from_ref;

    const G: u64 = GRANULE_BYTES;

    fn known(regions: u64) -> Cover {
        let mut cover = Cover::default();
        for region in 0..regions {
            cover.learn(region, &[], &[], 0);
        }
        cover
    }

    #[test]
    fn runs_follow_what_is_own_and_hidden() {
        let mut cover = known(2);
        let edge = REGION_BYTES;
        cover.own(&(edge - G..edge + 2 * G));
        cover.hide(&(edge + G..edge + 4 * G));
        let runs = cover.runs(&(edge - 2 * G + 10..edge + 5 * G - 1));
        let expected = [
            (G - 10, Holds::Below),
            (3 * G, Holds::Own),
            (2 * G, Holds::Zeroes),
            (G - 1, Holds::Below),
        ];
        assert_eq!(runs, expected);
        cover.disown(&(edge..edge + 2 * G));
        let runs = cover.runs(&(edge..edge + 3 * G));
        assert_eq!(runs, [(G, Holds::Below), (2 * G, Holds::Zeroes)]);
        assert!(cover.owns_any(&(0..edge)) && !cover.owns_any(&(edge..2 * edge)));
        assert!(cover.shows_any(&(edge..edge + 2 * G)));
        assert!(!cover.shows_any(&(edge + G..edge + 4 * G)));
    }

    /// A volume may be larger than anything that is stored.
    #[test]
    fn a_change_costs_what_is_known() {
        let mut cover = known(1);
        cover.own(&(0..2 * G));
        cover.disown(&(G..1 << 62));
        assert_eq!(cover.runs(&(0..2 * G)), [(G, Holds::Own), (G, Holds::Below)]);
        assert_eq!(cover.surprises(), 1, "of most nothing is known");
    }

    #[test]
    fn hidden_granules_are_kept_in_bytes() {
        let mut cover = known(2);
        cover.hide(&(REGION_BYTES + 3 * G..REGION_BYTES + 9 * G));
        let kept = cover.hidden(&(REGION_BYTES..REGION_BYTES + G));
        assert_eq!(kept.len(), 1);
        assert_eq!((kept[0].0, &kept[0].1[..3]), (1, &[0b1111_1000, 1, 0][..]));
        let mut read = Cover::default();
        read.learn(1, from_ref(&(REGION_BYTES..REGION_BYTES + G)), &kept[0].1, 0);
        let runs = read.runs(&(REGION_BYTES..REGION_BYTES + 10 * G));
        let expected =
            [(G, Holds::Own), (2 * G, Holds::Below), (6 * G, Holds::Zeroes), (G, Holds::Below)];
        assert_eq!(runs, expected);
        assert_eq!(read.unknown(&(0..3 * REGION_BYTES)), [0, 2]);
    }

    #[test]
    fn what_was_read_before_a_change_is_not_taken_in() {
        let mut cover = Cover::default();
        let before = cover.surprises();
        cover.own(&(0..G));
        cover.learn(0, &[], &[], before);
        assert_eq!(cover.unknown(&(0..G)), [0], "to be read again");
        cover.learn(0, from_ref(&(0..G)), &[], cover.surprises());
        assert_eq!(cover.runs(&(0..G)), [(G, Holds::Own)]);

        cover.doubt(0..2 * G);
        let before = cover.surprises();
        assert_eq!(cover.unsure(&(G..3 * G)), Some(0..2 * G));
        cover.own(&(G..2 * G));
        cover.relearn(&(0..2 * G), &[], before);
        assert_eq!(cover.unsure(&(0..G)), Some(0..2 * G), "to be looked at again");
        let before = cover.surprises();
        cover.relearn(&(0..2 * G), from_ref(&(G..2 * G)), before);
        assert_eq!(cover.unsure(&(0..G)), None);
        // Another that looked at the same time is late: what it saw may be from before a change that nobody wondered at.
        cover.own(&(0..G));
        cover.relearn(&(0..2 * G), &[], before);
        assert_eq!(cover.runs(&(0..G)), [(G, Holds::Own)]);
        cover.disown(&(0..G));
        assert_eq!(cover.runs(&(0..2 * G)), [(G, Holds::Below), (G, Holds::Own)]);
    }
}

//! What a block device must answer: too simple to be wrong.
//!
//! Contents are versions: every write has a number, and a block of that write is filled with a
//! pattern that names it. Block by block the model knows which versions a power cut may leave.

use levada_base::units::BLOCK_BYTES;
use std::collections::{BTreeMap, BTreeSet};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Fills one block with version `version` of block `block`; version 0 is zeroes.
pub fn fill(into: &mut [u8], version: u64, block: u64) {
    if version == 0 {
        into.fill(0);
        return;
    }
    let stamp = version << 24 ^ block;
    for (at, word) in into.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(
            &(stamp.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64).to_le_bytes(),
        );
    }
}

/// The one of `versions` that these bytes are.
#[must_use]
pub fn recognise(bytes: &[u8], block: u64, versions: &[u64]) -> Option<u64> {
    let mut expected = [0; BLOCK];
    versions.iter().copied().filter(|version| *version != LOST).find(|version| {
        fill(&mut expected, *version, block);
        bytes == expected
    })
}

/// Blocks in order as runs, each with its first and how many it has: `most` at most.
#[must_use]
pub fn runs_of(blocks: &[u64], most: usize) -> Vec<(u64, u64)> {
    let runs = blocks.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(most));
    runs.map(|run| (run[0], run.len() as u64)).collect()
}

#[derive(Clone, Debug)]
struct Block {
    /// Versions that a power cut may leave, from old to new, with the tick at which each was
    /// complete.
    maybe: Vec<(u64, u64)>,
    /// False after a crash, until a read has told which one it is.
    known: bool,
    /// Its whole stripe was on its way at a crash: a medium error is an answer.
    may_be_lost: bool,
    in_flight: Option<u64>,
}

/// Stands among the versions for a block that is lost: it cannot be read until it is written.
const LOST: u64 = u64::MAX;

/// A flush that has begun.
#[derive(Clone, Copy, Debug)]
pub struct FlushBegun(u64);

/// A device whose completed writes read back, whose flushed writes survive, and whose blocks in
/// flight at a crash read old or new and stay so.
#[derive(Debug)]
pub struct BlockModel {
    blocks: BTreeMap<u64, Block>,
    /// Blocks with more than one possible version.
    open: BTreeSet<u64>,
    tick: u64,
    versions: u64,
}

impl Default for BlockModel {
    fn default() -> Self {
        Self { blocks: BTreeMap::new(), open: BTreeSet::new(), tick: 1, versions: 0 }
    }
}

impl BlockModel {
    fn block(&mut self, block: u64) -> &mut Block {
        self.blocks.entry(block).or_insert(Block {
            maybe: vec![(0, 0)],
            known: true,
            may_be_lost: false,
            in_flight: None,
        })
    }

    /// A write of `count` blocks begins; its version.
    pub fn write_begins(&mut self, first: u64, count: u64) -> u64 {
        self.versions += 1;
        self.begins(first, count, self.versions)
    }

    /// A write of zeroes begins.
    pub fn zeroes_begin(&mut self, first: u64, count: u64) -> u64 {
        self.begins(first, count, 0)
    }

    fn begins(&mut self, first: u64, count: u64, version: u64) -> u64 {
        for block in first..first + count {
            let state = self.block(block);
            assert!(state.in_flight.is_none(), "the workload overlaps its own writes");
            state.in_flight = Some(version);
        }
        version
    }

    /// It is complete, and durable if `durable`.
    pub fn write_done(&mut self, first: u64, count: u64, durable: bool) {
        self.tick += 1;
        let tick = self.tick;
        for block in first..first + count {
            let state = self.block(block);
            let version = state.in_flight.take().expect("it was begun");
            state.known = true;
            state.may_be_lost = false;
            if durable {
                state.maybe.clear();
            }
            state.maybe.push((version, tick));
            self.note(block);
        }
    }

    fn note(&mut self, block: u64) {
        if self.blocks[&block].maybe.len() > 1 {
            self.open.insert(block);
        } else {
            self.open.remove(&block);
        }
    }

    /// A flush begins.
    #[must_use]
    pub fn flush_begins(&self) -> FlushBegun {
        FlushBegun(self.tick)
    }

    /// It is complete: what was complete when it began survives.
    pub fn flush_done(&mut self, begun: FlushBegun) {
        for block in self.open.clone() {
            let state = self.block(block);
            if !state.known {
                // Whichever it is, is durable now; a read will tell.
                continue;
            }
            let covered = state.maybe.iter().rposition(|(_, tick)| *tick <= begun.0);
            state.maybe.drain(..covered.unwrap_or(0));
            self.note(block);
        }
    }

    /// Nobody waits for a change any more, or it need not happen: it has, or does at any time before the next one of these blocks, or never.
    pub fn gives_up(&mut self, first: u64, count: u64) {
        for block in first..first + count {
            let state = self.block(block);
            let version = state.in_flight.take().expect("it was begun");
            // No flush makes it certain.
            state.maybe.push((version, u64::MAX));
            state.known = false;
            self.open.insert(block);
        }
    }

    /// The power was cut.
    pub fn power_cut(&mut self) {
        for (block, state) in &mut self.blocks {
            if let Some(version) = state.in_flight.take() {
                state.maybe.push((version, self.tick));
                self.open.insert(*block);
            }
            state.known = state.maybe.len() == 1;
        }
    }

    /// The node died and the drives live on: completed writes stay, those in flight are open.
    pub fn killed(&mut self) {
        for (block, state) in &mut self.blocks {
            if let Some(version) = state.in_flight.take() {
                state.maybe.push((version, self.tick));
                self.open.insert(*block);
                state.known = false;
            }
        }
    }

    /// At a crash, before the model is told of it: stripes of which every block is on its way, or written and not flushed, may
    /// have been overwritten whole, and the blocks of absent members may be lost.
    pub fn stripes_may_be_lost(&mut self, stripe_blocks: u64) {
        let is_open = |state: &Block| state.in_flight.is_some() || state.maybe.len() > 1;
        let mut open: BTreeMap<u64, u64> = BTreeMap::new();
        for (block, _) in self.blocks.iter().filter(|(_, state)| is_open(state)) {
            *open.entry(block / stripe_blocks).or_default() += 1;
        }
        for (stripe, _) in open.into_iter().filter(|(_, count)| *count == stripe_blocks) {
            for block in stripe * stripe_blocks..(stripe + 1) * stripe_blocks {
                self.block(block).may_be_lost = true;
            }
        }
    }

    /// Block `block` could not be read: nothing is there that says what it should be.
    ///
    /// # Errors
    ///
    /// When it should have been readable.
    pub fn check_lost(&mut self, block: u64) -> Result<(), String> {
        let state = self.block(block);
        let was_lost = state.maybe.iter().any(|(version, _)| *version == LOST);
        if state.in_flight.is_some() {
            return Ok(());
        }
        if !was_lost && !state.may_be_lost {
            return Err(format!("block {block} cannot be read, expected {:?}", state.maybe));
        }
        *state = Block { maybe: vec![(LOST, 0)], known: true, may_be_lost: false, in_flight: None };
        self.note(block);
        Ok(())
    }

    /// Every block that was ever written.
    #[must_use]
    pub fn written(&self) -> Vec<u64> {
        self.blocks.keys().copied().collect()
    }

    /// Checks what was read from block `first` on. `durable`: a block whose version was open is
    /// settled now, for later crashes too.
    ///
    /// # Errors
    ///
    /// What was expected instead.
    pub fn check_read(&mut self, first: u64, bytes: &[u8]) -> Result<(), String> {
        for (at, part) in bytes.chunks_exact(BLOCK).enumerate() {
            let block = first + at as u64;
            let state = self.block(block);
            if state.in_flight.is_some() {
                continue;
            }
            let current = state.maybe.last().expect("never empty").0;
            let possible: Vec<u64> = if state.known {
                vec![current]
            } else {
                state.maybe.iter().map(|(version, _)| *version).collect()
            };
            let Some(seen) = recognise(part, block, &possible) else {
                let all: Vec<u64> = (0..=self.versions).collect();
                let found = recognise(part, block, &all);
                return Err(format!(
                    "block {block} reads {}, expected version {possible:?}",
                    found.map_or("something never written".into(), |v| format!("version {v}")),
                ));
            };
            let state = self.block(block);
            state.may_be_lost = false;
            if !state.known {
                state.known = true;
                state.maybe = vec![(seen, 0)];
                self.note(block);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(version: u64, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        fill(&mut bytes, version, block);
        bytes
    }

    #[test]
    fn an_unflushed_block_is_old_or_new_and_stays_so() {
        let mut model = BlockModel::default();
        let v1 = model.write_begins(5, 1);
        model.write_done(5, 1, false);
        let flush = model.flush_begins();
        model.flush_done(flush);
        let v2 = model.write_begins(5, 1);
        model.write_done(5, 1, false);
        assert!(model.check_read(5, &read(v1, 5)).is_err());
        model.power_cut();
        assert!(model.check_read(5, &read(0, 5)).is_err());
        model.check_read(5, &read(v1, 5)).expect("old is allowed");
        assert!(model.check_read(5, &read(v2, 5)).is_err(), "and now it stays old");
    }

    #[test]
    fn a_durable_write_survives_and_one_in_flight_may() {
        let mut model = BlockModel::default();
        let v1 = model.write_begins(0, 2);
        model.write_done(0, 2, true);
        let v2 = model.write_begins(1, 1);
        model.power_cut();
        model.check_read(0, &read(v1, 0)).expect("durable");
        model.check_read(1, &read(v2, 1)).expect("may have landed");
    }
}

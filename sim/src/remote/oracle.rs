//! What may be read, whoever owns a drive, or an array over some.
//!
//! The model knows nothing of owners and targets. What is told to it, and when:
//! - While an owner lives, a target that loses power changes nothing: that is the initiator's promise.
//! - What an owner has not flushed it takes with it when it dies or is preempted: from then on a loss of power may cost it, until the next
//!   owner has flushed. So may one before, unless the owner has made it good, as an answer to something that it asked for later tells.
//! - From the moment at which the next owner has the drive nothing of the last one happens any more.

use crate::BlockModel;
use std::collections::BTreeSet;

/// See the module.
#[derive(Default)]
pub struct Oracle {
    pub model: BlockModel,
    /// Of an array with parity: what was about to overwrite a stripe while members were away may take it along.
    stripe_blocks: Option<u64>,
    /// Blocks that somebody works on.
    taken: BTreeSet<u64>,
    /// Who has the drive.
    owner: u64,
    /// The latest who has tried to take it.
    tried: u64,
    /// The latest whose mark is known to be on the drive.
    marked: u64,
    /// Whoever has the drive has not flushed since.
    is_inherited: bool,
    /// Losses of power, and whether the owner is known to have made the last one good.
    losses: u64,
    is_unhealed: bool,
}

/// What an owner asks for.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    by: u64,
    is_owner: bool,
    losses: u64,
}

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Counts,
    /// The drive is another's, and was its own when it asked.
    Late,
    /// It was not.
    OfFormerOwner,
}

impl Oracle {
    /// Of an array with parity.
    pub fn of_stripes(blocks: u64) -> Self {
        Self { stripe_blocks: Some(blocks), ..Self::default() }
    }

    /// An owner is about to take the drive.
    pub fn tries(&mut self, epoch: u64) {
        self.tried = self.tried.max(epoch);
    }

    /// An owner may be told that there is a later one.
    pub fn may_be_fenced(&self, epoch: u64) -> bool {
        self.tried > epoch
    }

    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// The drive is this one's.
    pub fn is_of(&self, epoch: u64) -> bool {
        self.owner == epoch
    }

    /// An owner has the drive from now on, unless a later one has it already, and it has only not heard of that yet.
    pub fn takes(&mut self, epoch: u64) {
        if self.owner > epoch {
            return;
        }
        self.owner = epoch;
        self.is_inherited = true;
        self.taken.clear();
        self.crashes(self.is_unhealed);
    }

    fn crashes(&mut self, power: bool) {
        if let Some(blocks) = self.stripe_blocks {
            self.model.stripes_may_be_lost(blocks);
        }
        match power {
            true => self.model.power_cut(),
            false => self.model.killed(),
        }
    }

    /// The target has lost power.
    pub fn loses_power(&mut self) {
        self.losses += 1;
        self.is_unhealed = true;
        if self.is_inherited {
            self.crashes(true);
        }
    }

    pub fn asks(&self, epoch: u64) -> Asked {
        Asked { by: epoch, is_owner: self.owner == epoch, losses: self.losses }
    }

    /// An answer has come; `heals`: it tells that all losses of before are made good.
    pub fn answered(&mut self, asked: Asked, heals: bool) -> Answer {
        if !asked.is_owner {
            return Answer::OfFormerOwner;
        }
        if self.owner != asked.by {
            return Answer::Late;
        }
        if heals && self.losses == asked.losses {
            self.is_unhealed = false;
        }
        Answer::Counts
    }

    pub fn marked(&self) -> u64 {
        self.marked
    }

    /// An owner's mark is on the drive.
    pub fn marks(&mut self, epoch: u64) {
        self.marked = self.marked.max(epoch);
    }

    /// The owner has flushed.
    pub fn inheritance_is_flushed(&mut self) {
        self.is_inherited = false;
    }

    pub fn take(&mut self, first: u64, count: u64) -> bool {
        let is_free = self.taken.range(first..first + count).next().is_none();
        if is_free {
            self.taken.extend(first..first + count);
        }
        is_free
    }

    pub fn give_back(&mut self, first: u64, count: u64) {
        (first..first + count).for_each(|block| _ = self.taken.remove(&block));
    }
}

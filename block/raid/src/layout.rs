//! Layout: which role holds which chunk. Arithmetic only, one file per level behind it.
//!
//! A *role* is a member's place in the array; a *slot* is the n-th chunk-sized piece of its data
//! area. A stripe is `data_chunks` chunks of data, then its redundancy.
//!
//! What always holds: every (role, slot) belongs to at most one (stripe, chunk), and
//! [`Layout::place`] and [`Layout::chunk_in`] are each other's inverse.

use crate::{raid0, raid1, raid6};

/// How the array protects its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Striped, nothing protected.
    Raid0,
    /// Spread mirror: every extent on `copies` members.
    Raid1 { copies: usize },
    /// Two parities.
    Raid6,
}

impl Level {
    /// Chunks of one stripe that may be lost.
    #[must_use]
    pub fn tolerates(self) -> usize {
        match self {
            Self::Raid0 => 0,
            Self::Raid1 { copies } => copies - 1,
            Self::Raid6 => 2,
        }
    }
}

/// A place on a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub role: usize,
    pub slot: u64,
}

/// A level on so many roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub level: Level,
    /// Roles.
    pub width: usize,
    pub chunk_bytes: u64,
    pub stripes: u64,
}

impl Layout {
    /// Chunks of data in a stripe.
    pub fn data_chunks(&self) -> usize {
        match self.level {
            Level::Raid0 => self.width,
            Level::Raid1 { .. } => 1,
            Level::Raid6 => self.width - 2,
        }
    }

    /// Chunks in a stripe, with redundancy.
    pub fn chunks(&self) -> usize {
        self.data_chunks() + self.level.tolerates()
    }

    pub fn stripe_bytes(&self) -> u64 {
        self.data_chunks() as u64 * self.chunk_bytes
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.stripes * self.stripe_bytes()
    }

    /// Slots that the stripes use on each member.
    pub fn slots(&self) -> u64 {
        match self.level {
            Level::Raid0 | Level::Raid6 => self.stripes,
            Level::Raid1 { copies } => raid1::slots(self.stripes, self.width, copies),
        }
    }

    /// Stripes that fit into `slots` slots of every member.
    pub fn stripes_in(level: Level, width: usize, slots: u64) -> u64 {
        match level {
            Level::Raid0 | Level::Raid6 => slots,
            Level::Raid1 { copies } => raid1::stripes(slots, width, copies),
        }
    }

    /// Where chunk `chunk` of `stripe` lies.
    pub fn place(&self, stripe: u64, chunk: usize) -> Place {
        match self.level {
            Level::Raid0 => raid0::place(stripe, chunk),
            Level::Raid1 { copies } => raid1::place(self.width, copies, stripe, chunk),
            Level::Raid6 => raid6::place(self.width, stripe, chunk),
        }
    }

    /// Which stripe and chunk a slot holds.
    pub fn chunk_in(&self, place: Place) -> (u64, usize) {
        match self.level {
            Level::Raid0 => raid0::chunk_in(place),
            Level::Raid1 { copies } => raid1::chunk_in(self.width, copies, place),
            Level::Raid6 => raid6::chunk_in(self.width, place),
        }
    }

    /// True when data can still be had everywhere with these roles out (a bit per role).
    pub fn survives(&self, out: u64) -> bool {
        match self.level {
            Level::Raid0 => out == 0,
            Level::Raid1 { copies } => raid1::survives(self.width, copies, out),
            Level::Raid6 => out.count_ones() <= 2,
        }
    }

    /// True when a caller may overwrite blocks in place: only parity needs a journal for that.
    pub fn overwrites(&self) -> bool {
        match self.level {
            Level::Raid0 | Level::Raid1 { .. } => true,
            Level::Raid6 => false,
        }
    }

    /// True when a stripe has the same slot on every role.
    pub fn slot_is_stripe(&self) -> bool {
        match self.level {
            Level::Raid0 | Level::Raid6 => true,
            Level::Raid1 { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn layouts() -> impl Strategy<Value = Layout> {
        let level = prop_oneof![
            (1..6usize).prop_map(|width| (Level::Raid0, width)),
            (2..4usize, 0..8usize)
                .prop_map(|(copies, more)| (Level::Raid1 { copies }, copies + more)),
            (3..13usize).prop_map(|width| (Level::Raid6, width)),
        ];
        (level, 1..60u64).prop_map(|((level, width), slots)| Layout {
            level,
            width,
            chunk_bytes: 4096,
            stripes: Layout::stripes_in(level, width, slots),
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// Every chunk has a place of its own, within the slots, on a role of its own.
        #[test]
        fn every_chunk_has_its_own_place(layout in layouts()) {
            let mut taken = HashSet::new();
            for stripe in 0..layout.stripes {
                let mut roles = HashSet::new();
                for chunk in 0..layout.chunks() {
                    let place = layout.place(stripe, chunk);
                    prop_assert!(place.role < layout.width && place.slot < layout.slots());
                    prop_assert!(roles.insert(place.role));
                    prop_assert!(taken.insert((place.role, place.slot)));
                    prop_assert_eq!(layout.chunk_in(place), (stripe, chunk));
                }
            }
        }

        /// A loss is survived exactly when no stripe loses more chunks than it bears.
        #[test]
        fn survival_is_that_of_the_worst_stripe(layout in layouts(), out in any::<u64>()) {
            let out = out & ((1 << layout.width) - 1) & (out >> 20);
            // One round of the rotation meets every kind of stripe.
            let layout = Layout { stripes: layout.width as u64, ..layout };
            let worst = (0..layout.stripes)
                .map(|stripe| {
                    let lost = |chunk: &usize| out >> layout.place(stripe, *chunk).role & 1 == 1;
                    (0..layout.chunks()).filter(lost).count()
                })
                .max();
            prop_assert_eq!(layout.survives(out), worst.unwrap_or(0) <= layout.level.tolerates());
        }
    }
}

//! Layout: which role holds which chunk. Arithmetic only, one file per level behind it.
//!
//! A *role* is a member's place in the array; a *slot* is the n-th chunk-sized piece of its data
//! area. A stripe is `data_chunks` chunks of data, then its redundancy.
//!
//! What always holds: every (role, slot) belongs to at most one (stripe, chunk), and
//! [`Layout::place`] and [`Layout::chunk_in`] are each other's inverse.

use crate::{nplusm, raid0, raid1, raid5, raid6, rotation::Groups};
use std::fmt;

/// How the array protects its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Striped, nothing protected.
    Raid0,
    /// Spread mirror: every extent on `copies` members. With more members than copies it is striped as well, which others
    /// call RAID 10.
    Raid1 { copies: usize },
    /// One parity.
    Raid5,
    /// Two parities.
    Raid6,
    /// Stripes dealt to `groups` equal RAID 5.
    Raid50 { groups: usize },
    /// Stripes dealt to `groups` equal RAID 6.
    Raid60 { groups: usize },
    /// `parity` chunks of parity beside the data of each stripe, by a Cauchy matrix.
    NPlusM { parity: usize },
}

impl Level {
    /// Chunks of one stripe that may be lost.
    #[must_use]
    pub fn tolerates(self) -> usize {
        match self {
            Self::Raid0 => 0,
            Self::Raid1 { copies } => copies - 1,
            Self::Raid5 | Self::Raid50 { .. } => raid5::PARITY,
            Self::Raid6 | Self::Raid60 { .. } => raid6::PARITY,
            Self::NPlusM { parity } => parity,
        }
    }

    /// As the cluster file names it.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Raid0 => "raid0",
            Self::Raid1 { .. } => "raid1",
            Self::Raid5 => "raid5",
            Self::Raid6 => "raid6",
            Self::Raid50 { .. } => "raid50",
            Self::Raid60 { .. } => "raid60",
            Self::NPlusM { .. } => "n+m",
        }
    }

    /// True when redundancy is computed, rather than copied or absent.
    #[must_use]
    pub fn has_parity(self) -> bool {
        !matches!(self, Self::Raid0 | Self::Raid1 { .. })
    }

    /// The groups over which `width` roles of a level with parity are dealt.
    pub(crate) fn groups(self, width: usize) -> Option<Groups> {
        let groups = match self {
            Self::Raid0 | Self::Raid1 { .. } => return None,
            Self::Raid5 | Self::Raid6 | Self::NPlusM { .. } => 1,
            Self::Raid50 { groups } | Self::Raid60 { groups } => groups,
        };
        Some(Groups { groups, width: width / groups.max(1), parity: self.tolerates() })
    }

    /// Why an array of this level cannot have `width` roles.
    pub(crate) fn check(self, width: usize) -> Result<(), &'static str> {
        if let Self::Raid50 { groups } | Self::Raid60 { groups } = self
            && (groups < 2 || !width.is_multiple_of(groups))
        {
            return Err(
                "RAID 50 and 60 need two or more groups of as many members each, spares apart",
            );
        }
        let of_group = self.groups(width).map_or(width, |groups| groups.width);
        match self {
            Self::Raid0 if width == 0 => Err("RAID 0 needs a member that is no spare"),
            Self::Raid1 { copies } if copies == 0 || width < copies => {
                Err("RAID 1 needs as many members, spares apart, as copies")
            }
            Self::Raid0 | Self::Raid1 { .. } => Ok(()),
            Self::Raid5 | Self::Raid50 { .. } => raid5::check(of_group),
            Self::Raid6 | Self::Raid60 { .. } => raid6::check(of_group),
            Self::NPlusM { parity } => nplusm::check(of_group, parity),
        }
    }
}

/// As people write it, without the number of members.
impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raid0 => f.write_str("RAID 0"),
            Self::Raid1 { copies } => write!(f, "mirror of {copies} copies"),
            Self::Raid5 => f.write_str("RAID 5"),
            Self::Raid6 => f.write_str("RAID 6"),
            Self::Raid50 { groups } => write!(f, "RAID 50 of {groups} groups"),
            Self::Raid60 { groups } => write!(f, "RAID 60 of {groups} groups"),
            Self::NPlusM { parity } => write!(f, "N+{parity}"),
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
    /// Those of a level with parity.
    pub fn groups(&self) -> Option<Groups> {
        self.level.groups(self.width)
    }

    /// Chunks of data in a stripe.
    pub fn data_chunks(&self) -> usize {
        match (self.level, self.groups()) {
            (_, Some(groups)) => groups.data_chunks(),
            (Level::Raid1 { .. }, None) => 1,
            (_, None) => self.width,
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
        match (self.level, self.groups()) {
            (_, Some(groups)) => self.stripes.div_ceil(groups.groups as u64),
            (Level::Raid1 { copies }, None) => raid1::slots(self.stripes, self.width, copies),
            (_, None) => self.stripes,
        }
    }

    /// Stripes that fit into `slots` slots of every member.
    pub fn stripes_in(level: Level, width: usize, slots: u64) -> u64 {
        match (level, level.groups(width)) {
            (_, Some(groups)) => slots * groups.groups as u64,
            (Level::Raid1 { copies }, None) => raid1::stripes(slots, width, copies),
            (_, None) => slots,
        }
    }

    /// Where chunk `chunk` of `stripe` lies.
    pub fn place(&self, stripe: u64, chunk: usize) -> Place {
        match (self.level, self.groups()) {
            (_, Some(groups)) => groups.place(stripe, chunk),
            (Level::Raid1 { copies }, None) => raid1::place(self.width, copies, stripe, chunk),
            (_, None) => raid0::place(stripe, chunk),
        }
    }

    /// Which stripe and chunk a slot holds.
    pub fn chunk_in(&self, place: Place) -> (u64, usize) {
        match (self.level, self.groups()) {
            (_, Some(groups)) => groups.chunk_in(place),
            (Level::Raid1 { copies }, None) => raid1::chunk_in(self.width, copies, place),
            (_, None) => raid0::chunk_in(place),
        }
    }

    /// True when data can still be had everywhere with these roles out (a bit per role).
    pub fn survives(&self, out: u64) -> bool {
        match (self.level, self.groups()) {
            (_, Some(groups)) => groups.survives(out),
            (Level::Raid1 { copies }, None) => raid1::survives(self.width, copies, out),
            (_, None) => out == 0,
        }
    }

    /// How many more roles may go, whichever, with these out (a bit per role).
    pub fn bears(&self, out: u64) -> usize {
        match (self.level, self.groups()) {
            (_, Some(groups)) => groups.bears(out),
            (Level::Raid1 { copies }, None) => raid1::bears(self.width, copies, out),
            (_, None) => 0,
        }
    }

    /// Whether some stripe has chunks on both roles: there a loss of both counts twice.
    pub fn share_stripes(&self, one: usize, other: usize) -> bool {
        match (self.level, self.groups()) {
            (_, Some(groups)) => one / groups.width == other / groups.width,
            (Level::Raid1 { copies }, None) => raid1::share(self.width, copies, one, other),
            (_, None) => true,
        }
    }

    /// True when a stripe has the same slot on every role.
    pub fn slot_is_stripe(&self) -> bool {
        match (self.level, self.groups()) {
            (_, Some(groups)) => groups.groups == 1,
            (Level::Raid1 { .. }, None) => false,
            (_, None) => true,
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
            (2..13usize).prop_map(|width| (Level::Raid5, width)),
            (3..13usize).prop_map(|width| (Level::Raid6, width)),
            (2..5usize, 2..6usize)
                .prop_map(|(groups, each)| (Level::Raid50 { groups }, groups * each)),
            (2..4usize, 3..6usize)
                .prop_map(|(groups, each)| (Level::Raid60 { groups }, groups * each)),
            (1..5usize, 1..9usize)
                .prop_map(|(parity, data)| (Level::NPlusM { parity }, data + parity)),
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

        /// Roles share stripes exactly when one of these has chunks on both.
        #[test]
        fn roles_share_what_a_stripe_has_on_both(layout in layouts()) {
            let layout = Layout { stripes: layout.width as u64, ..layout };
            let pairs = |count: usize| {
                (0..count).flat_map(move |one| (0..count).map(move |other| (one, other)))
            };
            let mut shared = HashSet::new();
            for stripe in 0..layout.stripes {
                let role = |chunk| layout.place(stripe, chunk).role;
                let of_chunks = pairs(layout.chunks());
                shared.extend(of_chunks.map(|(one, other)| (role(one), role(other))));
            }
            for (one, other) in pairs(layout.width) {
                prop_assert_eq!(layout.share_stripes(one, other), shared.contains(&(one, other)));
            }
        }

        /// A loss is survived exactly when no stripe loses more chunks than it bears.
        #[test]
        fn survival_is_that_of_the_worst_stripe(layout in layouts(), out in any::<u64>()) {
            let out = out & ((1 << layout.width) - 1) & (out >> 20) & (out >> 40);
            // One round of the rotation meets every kind of stripe.
            let layout = Layout { stripes: layout.width as u64, ..layout };
            let worst = (0..layout.stripes)
                .map(|stripe| {
                    let lost = |chunk: &usize| out >> layout.place(stripe, *chunk).role & 1 == 1;
                    (0..layout.chunks()).filter(lost).count()
                })
                .max();
            prop_assert_eq!(layout.survives(out), worst.unwrap_or(0) <= layout.level.tolerates());
            let left = layout.level.tolerates().saturating_sub(worst.unwrap_or(0));
            prop_assert_eq!(layout.bears(out), left);
        }
    }
}

//! Rotating parity: what RAID 5, RAID 6 and N+M share, in one group of roles or in several.
//!
//! Stripes are dealt to the groups in turn. Within a group parity rotates from the last role backwards and data follows
//! it, so that reading a run of stripes uses every role (what md calls left-symmetric).

use crate::layout::Place;

/// Equal groups of roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub groups: usize,
    /// Roles of each.
    pub width: usize,
    /// Chunks of parity in a stripe.
    pub parity: usize,
}

impl Groups {
    pub fn data_chunks(self) -> usize {
        self.width - self.parity
    }

    pub fn place(self, stripe: u64, chunk: usize) -> Place {
        let (slot, group) = (stripe / self.groups as u64, (stripe % self.groups as u64) as usize);
        let data_chunks = self.data_chunks();
        // Counted from P on: the parity, then the data.
        let from_p = if chunk < data_chunks { chunk + self.parity } else { chunk - data_chunks };
        let in_group = (self.p_role(slot) + from_p) % self.width;
        Place { role: group * self.width + in_group, slot }
    }

    pub fn chunk_in(self, place: Place) -> (u64, usize) {
        let (group, in_group) = (place.role / self.width, place.role % self.width);
        let from_p = (in_group + self.width - self.p_role(place.slot)) % self.width;
        let chunk = match from_p.checked_sub(self.parity) {
            Some(data) => data,
            None => self.data_chunks() + from_p,
        };
        (place.slot * self.groups as u64 + group as u64, chunk)
    }

    /// Each group bears the loss of as many roles as it has parity.
    pub fn survives(self, out: u64) -> bool {
        self.most_out(out) <= self.parity
    }

    /// How many more of any may go: of the group that has lost most.
    pub fn bears(self, out: u64) -> usize {
        self.parity.saturating_sub(self.most_out(out))
    }

    fn most_out(self, out: u64) -> usize {
        let of_group = |group| out >> (group * self.width) & ((1 << self.width) - 1);
        let counts = (0..self.groups).map(|group| of_group(group).count_ones() as usize);
        counts.max().unwrap_or(0)
    }

    fn p_role(self, slot: u64) -> usize {
        self.width - 1 - (slot % self.width as u64) as usize
    }
}

//! RAID 0: chunks dealt in turn, nothing protected. One lost member loses the array.

use crate::layout::Place;

pub(crate) fn place(stripe: u64, chunk: usize) -> Place {
    Place { role: chunk, slot: stripe }
}

pub(crate) fn chunk_in(place: Place) -> (u64, usize) {
    (place.slot, place.role)
}

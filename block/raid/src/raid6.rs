//! RAID 6: parity rotates from the last role backwards, data follows it, so that reading a run
//! of stripes uses every role (what md calls left-symmetric).

use crate::layout::Place;

pub(crate) fn place(width: usize, stripe: u64, chunk: usize) -> Place {
    let data_chunks = width - 2;
    // Counted from P on: P, Q, then the data.
    let from_p = if chunk < data_chunks { chunk + 2 } else { chunk - data_chunks };
    Place { role: (p_role(width, stripe) + from_p) % width, slot: stripe }
}

pub(crate) fn chunk_in(width: usize, place: Place) -> (u64, usize) {
    let data_chunks = width - 2;
    let from_p = (place.role + width - p_role(width, place.slot)) % width;
    let chunk = if from_p < 2 { data_chunks + from_p } else { from_p - 2 };
    (place.slot, chunk)
}

fn p_role(width: usize, stripe: u64) -> usize {
    width - 1 - (stripe % width as u64) as usize
}

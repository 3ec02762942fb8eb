//! RAID 1, spread: extents are dealt to neighbouring roles in rotation.
//!
//! A row of `width` extents fills `copies` slots of every role. Extent i of a row has its copies
//! on roles i, i + 1, ...: few sets of members hold all copies of anything, so few triple
//! failures lose anything. With `width == copies` this is a plain mirror.

use crate::layout::Place;

pub(crate) fn slots(stripes: u64, width: usize, copies: usize) -> u64 {
    stripes.div_ceil(width as u64) * copies as u64
}

pub(crate) fn stripes(slots: u64, width: usize, copies: usize) -> u64 {
    slots / copies as u64 * width as u64
}

pub(crate) fn place(width: usize, copies: usize, stripe: u64, copy: usize) -> Place {
    let (row, in_row) = (stripe / width as u64, (stripe % width as u64) as usize);
    Place { role: (in_row + copy) % width, slot: row * copies as u64 + copy as u64 }
}

pub(crate) fn chunk_in(width: usize, copies: usize, place: Place) -> (u64, usize) {
    let (row, copy) = (place.slot / copies as u64, (place.slot % copies as u64) as usize);
    let in_row = (place.role + width - copy) % width;
    (row * width as u64 + in_row as u64, copy)
}

/// Lost is what has all its copies on roles that are out.
pub(crate) fn survives(width: usize, copies: usize, out: u64) -> bool {
    (0..width).all(|first| (0..copies).any(|copy| out >> ((first + copy) % width) & 1 == 0))
}

/// The order of roles that puts neighbours into different enclosures: always the next member of
/// the enclosure that has most left, other than those of the last `copies - 1`. `enclosures[i]`
/// is that of member i; the result lists members in order of role.
pub(crate) fn deal(enclosures: &[u16], copies: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..enclosures.len()).collect();
    let mut order: Vec<usize> = Vec::with_capacity(left.len());
    while !left.is_empty() {
        let recent = &order[order.len().saturating_sub(copies - 1)..];
        let weight = |member: usize| {
            let enclosure = enclosures[member];
            let waiting = left.iter().filter(|m| enclosures[**m] == enclosure).count();
            let near = recent.iter().any(|m| enclosures[*m] == enclosure);
            // Among equals the enclosure used longest ago, which keeps the cycle's seam apart.
            let last_used = order.iter().rposition(|m| enclosures[*m] == enclosure);
            (!near, waiting, std::cmp::Reverse(last_used), std::cmp::Reverse(member))
        };
        let at = (0..left.len()).max_by_key(|at| weight(left[*at])).expect("some are left");
        order.push(left.remove(at));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survives_every_enclosure(enclosures: &[u16], copies: usize) -> bool {
        let order = deal(enclosures, copies);
        let lost = |gone: u16| {
            let bits = order.iter().enumerate().filter(|(_, m)| enclosures[**m] == gone);
            bits.fold(0, |out, (role, _)| out | 1 << role)
        };
        enclosures.iter().all(|gone| survives(order.len(), copies, lost(*gone)))
    }

    #[test]
    fn neighbours_are_in_different_enclosures() {
        let box_of_12: Vec<u16> = (0..12).map(|drive| drive / 2).collect();
        let order = deal(&box_of_12, 3);
        for first in 0..12 {
            let of = |copy: usize| box_of_12[order[(first + copy) % 12]];
            assert!(of(0) != of(1) && of(1) != of(2) && of(0) != of(2), "{order:?}");
        }
        assert!(survives_every_enclosure(&box_of_12, 3));
        assert!(survives_every_enclosure(&[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], 3));
        assert!(survives_every_enclosure(&[0, 1, 2], 3));
    }
}

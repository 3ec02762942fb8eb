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

/// Whether both roles have copies of something.
pub(crate) fn share(width: usize, copies: usize, one: usize, other: usize) -> bool {
    let apart = one.abs_diff(other);
    apart.min(width - apart) < copies
}

/// How many more may go, whichever: all but one of the copies that are left of what has the fewest.
pub(crate) fn bears(width: usize, copies: usize, out: u64) -> usize {
    let left = |first| (0..copies).filter(|copy| out >> ((first + copy) % width) & 1 == 0).count();
    (0..width).map(left).min().unwrap_or(0).saturating_sub(1)
}

/// The order of roles that puts members of one enclosure as far from each other as can be: at least
/// `copies` roles apart, round the ring of roles, wherever none has more than one member in `copies`. Then every
/// chunk has its copies in different enclosures. `enclosures[i]` is that of member i; the result lists members in order
/// of role.
///
/// The ring is as many arcs as the fullest enclosure has members, and members are dealt to them in turn, enclosure by
/// enclosure, the fullest first. No arc is shorter than members / fullest. An enclosure as full as the fullest has one
/// member in each arc, all at the same place in it. Any other one stays that far apart too: where it goes on in the
/// first arc after the last it moves one place on there, and ends an arc or more before the one it began in.
pub(crate) fn deal(enclosures: &[u16]) -> Vec<usize> {
    let held = |member: &usize| {
        enclosures.iter().filter(|enclosure| **enclosure == enclosures[*member]).count()
    };
    let mut members: Vec<usize> = (0..enclosures.len()).collect();
    members.sort_by_key(|member| (std::cmp::Reverse(held(member)), enclosures[*member]));
    let arcs = members.first().map_or(1, held);
    (0..arcs).flat_map(|arc| members.iter().skip(arc).step_by(arcs)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True when losing any `lost` enclosures loses nothing.
    fn survives_losing(enclosures: &[u16], copies: usize, lost: u32) -> bool {
        let order = deal(enclosures);
        let most = *enclosures.iter().max().expect("a member");
        (0_u64..1 << (most + 1)).filter(|gone| gone.count_ones() == lost).all(|gone| {
            let is_gone = |(_, member): &(usize, &usize)| gone >> enclosures[**member] & 1 == 1;
            let out = order.iter().enumerate().filter(is_gone);
            survives(order.len(), copies, out.fold(0, |out, (role, _)| out | 1 << role))
        })
    }

    /// Every way to have `members` in enclosures of at most `most` each, the fullest first.
    fn splits(members: usize, most: usize) -> Vec<Vec<usize>> {
        if members == 0 {
            return vec![vec![]];
        }
        let with = |first: usize| {
            splits(members - first, first).into_iter().map(move |rest| [vec![first], rest].concat())
        };
        (1..=most.min(members)).flat_map(with).collect()
    }

    fn members_of(split: &[usize]) -> Vec<u16> {
        let of = |(enclosure, held): (usize, &usize)| vec![enclosure as u16; *held];
        split.iter().enumerate().flat_map(of).collect()
    }

    #[test]
    fn copies_are_in_different_enclosures_wherever_that_is_possible() {
        for copies in 2..=4 {
            for members in copies..=16 {
                for split in splits(members, members / copies) {
                    let enclosures = members_of(&split);
                    for lost in 1..copies as u32 {
                        assert!(
                            survives_losing(&enclosures, copies, lost),
                            "{copies} copies over {split:?}: {:?}",
                            deal(&enclosures)
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn where_it_is_not_they_are_as_far_apart_as_can_be() {
        let order = |enclosures: &[u16]| -> Vec<u16> {
            deal(enclosures).into_iter().map(|member| enclosures[member]).collect()
        };
        // Three copies in two boxes: one of them may go.
        assert_eq!(order(&[0, 0, 0, 0, 1, 1, 1, 1]), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(order(&[7; 3]), [7; 3]);
        assert_eq!(order(&[]), []);
    }

    #[test]
    fn every_member_gets_one_role() {
        for split in splits(12, 12) {
            let mut order = deal(&members_of(&split));
            order.sort_unstable();
            assert!(order.into_iter().eq(0..12), "{split:?}");
        }
    }
}

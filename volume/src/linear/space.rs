//! Which stripes of a pool are free, and which of them a volume gets. Arithmetic without I/O.
//!
//! What always holds: what is given is free, and given once. A volume gets a single run where there is one for it, so
//! that few pieces are made of the array as volumes come and go.

use std::ops::Range;

/// A run of stripes, by number.
pub(super) type Run = Range<u64>;

/// How many stripes these are.
pub(super) fn stripes_in(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// What of `all` none of `used` has, in order. `used` may be in any order, and does not overlap.
pub(super) fn free(all: Run, used: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut used: Vec<Run> = used.collect();
    used.sort_unstable_by_key(|run| run.start);
    let mut free = Vec::new();
    let mut at = all.start;
    for run in used {
        if at < run.start {
            free.push(at..run.start);
        }
        at = run.end;
    }
    if at < all.end {
        free.push(at..all.end);
    }
    free
}

/// `stripes` of the runs that are free, for a volume that so far ends before stripe `behind`: what follows there first, then the
/// smallest run that has room for all the rest, else the largest ones. `None`: there are not so many.
pub(super) fn allocate(mut free: Vec<Run>, stripes: u64, behind: Option<u64>) -> Option<Vec<Run>> {
    if stripes_in(&free) < stripes {
        return None;
    }
    let (mut given, mut left) = (Vec::new(), stripes);
    let mut give = |run: &mut Run, left: &mut u64| {
        let end = run.end.min(run.start + *left);
        *left -= end - run.start;
        given.push(run.start..end);
        run.start = end;
    };
    if let Some(next) = free.iter_mut().find(|run| Some(run.start) == behind) {
        give(next, &mut left);
    }
    while left > 0 {
        let fitting = free.iter_mut().filter(|run| run.end - run.start >= left);
        match fitting.min_by_key(|run| run.end - run.start) {
            Some(run) => give(run, &mut left),
            None => give(free.iter_mut().max_by_key(|run| run.end - run.start)?, &mut left),
        }
    }
    Some(given)
}

/// Puts `more` behind `runs`; a run that goes on where the last one ends is part of it.
pub(super) fn append(runs: &mut Vec<Run>, more: Vec<Run>) {
    for run in more {
        match runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => runs.push(run),
        }
    }
}

/// Leaves the first `stripes` of `runs`, and gives what is cut off.
pub(super) fn cut(runs: &mut Vec<Run>, stripes: u64) -> Vec<Run> {
    let mut left = stripes;
    let mut cut = Vec::new();
    for run in std::mem::take(runs) {
        let middle = run.end.min(run.start + left);
        left -= middle - run.start;
        if run.start < middle {
            runs.push(run.start..middle);
        }
        if middle < run.end {
            cut.push(middle..run.end);
        }
    }
    cut
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, reason = "runs are ranges of stripes")]

    use super::*;
    use proptest::prelude::*;

    const STRIPES: u64 = 64;

    fn is_used(used: &[Option<usize>], run: &Run) -> bool {
        run.clone().any(|stripe| used[stripe as usize].is_some())
    }

    proptest! {
        /// One owner for each stripe is the model.
        #[test]
        fn volumes_come_grow_and_go_and_never_share_a_stripe(
            orders in prop::collection::vec((0..4usize, 0..6usize, 1..40u64), 1..60),
        ) {
            let mut owners = vec![None; STRIPES as usize];
            let mut volumes: Vec<Vec<Run>> = vec![Vec::new(); 6];
            for (order, volume, stripes) in orders {
                let gaps = free(0..STRIPES, volumes.iter().flatten().cloned());
                let is_free = |stripe: &u64| owners[*stripe as usize].is_none();
                let of_model: Vec<u64> = (0..STRIPES).filter(is_free).collect();
                prop_assert_eq!(gaps.iter().cloned().flatten().collect::<Vec<_>>(), of_model.clone());
                let has = stripes_in(&volumes[volume]);
                match order {
                    0 | 1 => {
                        let behind = volumes[volume].last().map(|last| last.end);
                        let given = allocate(gaps.clone(), stripes, behind);
                        prop_assert_eq!(given.is_some(), of_model.len() as u64 >= stripes);
                        let Some(given) = given else { continue };
                        prop_assert_eq!(stripes_in(&given), stripes);
                        let longest = gaps.iter().map(|run| run.end - run.start).max();
                        prop_assert!(behind.is_some() || longest < Some(stripes) || given.len() == 1);
                        for run in &given {
                            prop_assert!(run.start < run.end && !is_used(&owners, run));
                            owners[run.start as usize..run.end as usize].fill(Some(volume));
                        }
                        append(&mut volumes[volume], given);
                    }
                    2 if has > 0 => {
                        let before: Vec<u64> = volumes[volume].iter().cloned().flatten().collect();
                        let left = stripes.min(has);
                        let gone = cut(&mut volumes[volume], left);
                        let both = volumes[volume].iter().chain(&gone).cloned().flatten();
                        prop_assert_eq!(both.collect::<Vec<_>>(), before);
                        prop_assert_eq!(stripes_in(&volumes[volume]), left);
                        gone.into_iter().flatten().for_each(|stripe| owners[stripe as usize] = None);
                    }
                    _ => {
                        for stripe in std::mem::take(&mut volumes[volume]).into_iter().flatten() {
                            owners[stripe as usize] = None;
                        }
                    }
                }
                let neighbours = volumes.iter().flat_map(|runs| runs.windows(2));
                prop_assert!(neighbours.into_iter().all(|two| two[0].end != two[1].start));
            }
        }
    }

    #[test]
    fn a_volume_grows_where_it_is_then_where_it_fits_best() {
        let gaps = || vec![10..12, 20..30, 40..45];
        assert_eq!(allocate(gaps(), 5, None), Some(vec![40..45]));
        assert_eq!(allocate(gaps(), 4, Some(10)), Some(vec![10..12, 40..42]));
        assert_eq!(allocate(gaps(), 14, Some(7)), Some(vec![20..30, 40..44]));
        assert_eq!(allocate(gaps(), 18, None), None);
        assert_eq!(allocate(vec![], 0, None), Some(vec![]));
    }
}

//! How the roles of an array are spread over enclosures, and what of that may be lost.

use crate::layout::{Layout, Level};

/// Where each role is played; `None`: nobody plays it.
type Roles<'a> = &'a [Option<u16>];

impl Level {
    /// How many more drives may be lost, whichever, of an array of `width` roles of which those of `out` (a bit per role) are.
    #[must_use]
    pub fn drives_borne(self, width: usize, out: u64) -> usize {
        // How much lies there does not matter.
        Layout { level: self, width, chunk_bytes: 0, stripes: 0 }.bears(out)
    }

    /// How many enclosures may be lost, whichever, before something cannot be read any more. `roles` says of each role in which one
    /// it is played; one that nobody plays is lost already.
    #[must_use]
    pub fn enclosures_borne(self, roles: Roles<'_>) -> usize {
        let enclosures = distinct(roles);
        let most = self.tolerates().min(enclosures.len());
        let borne = |count: &usize| {
            let mut all = true;
            each_choice(&enclosures, *count, &mut |gone| all &= self.bears(roles, gone));
            all
        };
        (1..=most).take_while(borne).last().unwrap_or(0)
    }

    /// The enclosures of which not one may be lost, in order.
    #[must_use]
    pub fn enclosures_needed(self, roles: Roles<'_>) -> Vec<u16> {
        let mut needed = distinct(roles);
        needed.retain(|enclosure| !self.bears(roles, &[*enclosure]));
        needed
    }

    fn bears(self, roles: Roles<'_>, gone: &[u16]) -> bool {
        let is_out =
            |played: &Option<u16>| played.is_none_or(|enclosure| gone.contains(&enclosure));
        let out = roles.iter().enumerate().filter(|(_, played)| is_out(played));
        let out = out.fold(0, |out, (role, _)| out | 1 << role);
        // Where nothing lies does not matter to what is left.
        Layout { level: self, width: roles.len(), chunk_bytes: 0, stripes: 0 }.survives(out)
    }
}

fn distinct(roles: Roles<'_>) -> Vec<u16> {
    let mut enclosures: Vec<u16> = roles.iter().flatten().copied().collect();
    enclosures.sort_unstable();
    enclosures.dedup();
    enclosures
}

/// Calls `visit` with every choice of `count` of them.
fn each_choice(of: &[u16], count: usize, visit: &mut dyn FnMut(&[u16])) {
    fn choose(of: &[u16], count: usize, chosen: &mut Vec<u16>, visit: &mut dyn FnMut(&[u16])) {
        if count == 0 {
            return visit(chosen);
        }
        for (at, one) in of.iter().enumerate() {
            chosen.push(*one);
            choose(&of[at + 1..], count - 1, chosen, visit);
            chosen.pop();
        }
    }
    choose(of, count, &mut Vec::with_capacity(count), visit);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn borne(level: Level, roles: &[u16]) -> (usize, Vec<u16>) {
        let roles: Vec<Option<u16>> = roles.iter().copied().map(Some).collect();
        (level.enclosures_borne(&roles), level.enclosures_needed(&roles))
    }

    #[test]
    fn parity_bears_as_many_roles_as_it_has() {
        assert_eq!(borne(Level::Raid6, &[0, 1, 2, 3, 0, 1, 2, 3]), (1, vec![]));
        assert_eq!(borne(Level::Raid6, &[0, 1, 2, 3, 4, 5]), (2, vec![]));
        assert_eq!(borne(Level::Raid6, &[0, 0, 0, 1, 2, 3]), (0, vec![0]));
        assert_eq!(borne(Level::Raid5, &[0, 1, 1, 2]), (0, vec![1]));
        assert_eq!(borne(Level::Raid0, &[0, 1]), (0, vec![0, 1]));
        let three = Level::NPlusM { parity: 3 };
        assert_eq!(borne(three, &[0, 0, 1, 1, 2, 2, 3, 4]), (1, vec![]));
        // Each of the two groups bears two: as many of either may be in one enclosure.
        let groups = Level::Raid60 { groups: 2 };
        assert_eq!(borne(groups, &[0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]), (1, vec![]));
        assert_eq!(borne(groups, &[0, 0, 0, 1, 1, 2, 0, 0, 1, 1, 2, 2]), (0, vec![0]));
    }

    #[test]
    fn mirrors_bear_what_leaves_a_copy() {
        let two = Level::Raid1 { copies: 2 };
        assert_eq!(borne(two, &[0, 1, 0, 2]), (1, vec![]));
        // A ring: the last role and the first have copies of one extent.
        assert_eq!(borne(two, &[0, 1, 2, 0]), (0, vec![0]));
        assert_eq!(borne(Level::Raid1 { copies: 3 }, &[0, 1, 2, 0, 1, 2]), (2, vec![]));
        assert_eq!(borne(Level::Raid1 { copies: 3 }, &[0, 1, 0, 1, 0, 1]), (1, vec![]));
    }

    #[test]
    fn who_is_out_counts_as_lost() {
        let roles = [None, Some(1), Some(2), Some(3), Some(0), Some(1), Some(2), Some(3)];
        assert_eq!(Level::Raid6.enclosures_borne(&roles), 0);
        assert_eq!(Level::Raid6.enclosures_needed(&roles), [1, 2, 3]);
        let spread = [None, Some(1), Some(2), Some(3), Some(4), Some(5)];
        assert_eq!(Level::Raid6.enclosures_borne(&spread), 1);
        assert_eq!(Level::Raid6.enclosures_borne(&[]), 0);
    }
}

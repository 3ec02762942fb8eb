//! Which drives of an array are lost together: those of one NVMe subsystem, as enclosures are. Drives of this machine are in none.

use crate::store::url_of;
use levada_raid::{ArrayStatus, Level, MemberState};
use std::path::Path;

/// What is not in an enclosure.
const NONE: u16 = 0;

/// Drives by the number of their enclosure; the same for those of one subsystem, however they are reached.
#[derive(Default)]
pub(crate) struct Enclosures {
    /// The subsystems that have numbers.
    known: Vec<(String, u16)>,
}

impl Enclosures {
    /// Those of an array that has drives at these places already, in enclosures of these numbers.
    pub fn of<'a>(drives: impl Iterator<Item = (&'a Path, u16)>) -> Self {
        let known = drives.filter_map(|(path, number)| Some((subsystem_of(path)?, number)));
        Self { known: known.collect() }
    }

    /// The number of a drive's enclosure, a new one if no other is in it.
    pub fn number(&mut self, path: &Path) -> u16 {
        let Some(subsystem) = subsystem_of(path) else { return NONE };
        if let Some((_, number)) = self.known.iter().find(|(known, _)| *known == subsystem) {
            return *number;
        }
        let number = self.known.iter().map(|(_, number)| number + 1).max().unwrap_or(NONE + 1);
        self.known.push((subsystem, number));
        number
    }

    /// The enclosures that an array cannot lose, though there are others, each with its members of that array.
    pub fn needed_by(&self, array: &ArrayStatus) -> Vec<String> {
        let live = |member: &&levada_raid::MemberStatus| member.state != MemberState::Faulty;
        let players = array.members.iter().filter(live);
        let mut roles: Vec<(usize, u16)> =
            players.clone().filter_map(|member| Some((member.role?, member.enclosure))).collect();
        roles.sort_unstable();
        let roles: Vec<Option<u16>> = roles.into_iter().map(|(_, number)| Some(number)).collect();
        let is_one = roles.iter().all(|number| number == &roles[0]);
        if is_one || array.level == Level::Raid0 {
            return Vec::new();
        }
        let needed = array.level.enclosures_needed(&roles).into_iter();
        needed
            .filter_map(|number| {
                let (subsystem, _) = self.known.iter().find(|(_, known)| *known == number)?;
                let there = players.clone().filter(|m| m.role.is_some() && m.enclosure == number);
                let there: Vec<&str> = there.map(|member| &*member.name).collect();
                Some(format!("{subsystem} ({})", there.join(", ")))
            })
            .collect()
    }
}

fn subsystem_of(path: &Path) -> Option<String> {
    Some(url_of(path)?.ok()?.subsystem.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_of_one_subsystem_are_in_one_enclosure() {
        let mut enclosures = Enclosures::default();
        let mut of = |path: &str| enclosures.number(Path::new(path));
        assert_eq!(of("nvme+tcp://10.0.0.1/nqn.x:e1?ns=1"), 1);
        assert_eq!(of("nvme+tcp://10.0.0.2/nqn.x:e2?ns=1"), 2);
        assert_eq!(of("nvme+tcp://10.0.1.1,10.0.0.1/nqn.x:e1?ns=2"), 1);
        assert_eq!(of("/dev/nvme0n1"), 0);
        let there = [("nvme+tcp://a/nqn.x:e2?ns=1", 4), ("/dev/sda", 0)];
        let mut later =
            Enclosures::of(there.iter().map(|(path, number)| (Path::new(path), *number)));
        let mut of = |path: &str| later.number(Path::new(path));
        assert_eq!((of("nvme+tcp://b/nqn.x:e2?ns=9"), of("nvme+tcp://a/nqn.x:e1?ns=1")), (4, 5));
    }
}

//! What an array survives, found by looking at where its members sit.
//!
//! The answer holds for the worst choice: "any 1 enclosure" means whichever one is lost.

use std::collections::HashMap;
use std::fmt;

use crate::{ArraySpec, ClusterFile, Level, Spread};

/// Losses that an array or file system bears, whichever drives or enclosures they hit.
/// Each number stands alone: so many drives, or so many enclosures, or so many hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survival {
    /// Any so many drives.
    pub drives: usize,
    /// Any so many enclosures.
    pub enclosures: usize,
    /// Any so many hosts; 0 when the file names fewer than two.
    pub hosts: usize,
}

/// Which drives of an array serve and which wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Drive names in member order, dealt over the enclosures in turn.
    pub members: Vec<String>,
    /// Drive names held ready, from the fullest enclosures and from different ones.
    pub spares: Vec<String>,
}

impl fmt::Display for Survival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        for (count, one, many) in [
            (self.drives, "drive", "drives"),
            (self.enclosures, "enclosure", "enclosures"),
            (self.hosts, "host", "hosts"),
        ] {
            if count > 0 {
                parts.push(format!("any {count} {}", if count == 1 { one } else { many }));
            }
        }
        if parts.is_empty() {
            write!(f, "no loss at all")
        } else {
            write!(f, "{}", parts.join(", "))
        }
    }
}

impl Survival {
    /// What is left of both: a file system survives what all its arrays survive.
    #[must_use]
    pub fn both(self, other: Survival) -> Survival {
        Survival {
            drives: self.drives.min(other.drives),
            enclosures: self.enclosures.min(other.enclosures),
            hosts: self.hosts.min(other.hosts),
        }
    }
}

impl ArraySpec {
    /// Deals the array's drives to members and spares. The same file always gives the same
    /// answer. Drives that neither serve nor wait (more than the level needs) are left out.
    #[must_use]
    pub fn placement(&self, cluster: &ClusterFile) -> Placement {
        let mut boxes: Vec<(&str, Vec<&str>)> = Vec::new();
        for drive in cluster.drives.iter().filter(|drive| self.drives.contains(&drive.name)) {
            match boxes.iter_mut().find(|(name, _)| *name == drive.enclosure) {
                Some((_, drives)) => drives.push(&drive.name),
                None => boxes.push((&drive.enclosure, vec![&drive.name])),
            }
        }
        // Spares come from the fullest enclosure each time, the last one of several, so that
        // no enclosure holds more members than it must.
        let mut spares = Vec::new();
        for _ in 0..self.spares {
            let fullest = boxes.iter_mut().max_by_key(|(_, drives)| drives.len());
            spares.extend(fullest.and_then(|(_, drives)| drives.pop()).map(String::from));
        }
        let wanted = match self.level {
            Level::Raid6 { data, .. } => data as usize + 2,
            Level::Raid0 { .. } | Level::Raid1 { .. } => usize::MAX,
        };
        let rounds = boxes.iter().map(|(_, drives)| drives.len()).max().unwrap_or(0);
        let members = (0..rounds)
            .flat_map(|round| boxes.iter().filter_map(move |(_, drives)| drives.get(round)))
            .take(wanted)
            .map(|name| (*name).to_string())
            .collect();
        Placement { members, spares }
    }

    /// What the array survives, with its members placed as [`ArraySpec::placement`] says.
    #[must_use]
    pub fn survives(&self, cluster: &ClusterFile) -> Survival {
        let borne = self.level.drives_borne() as usize;
        let placement = self.placement(cluster);
        let mut per_enclosure: HashMap<&str, usize> = HashMap::new();
        for name in &placement.members {
            if let Some(drive) = cluster.drive(name) {
                *per_enclosure.entry(&drive.enclosure).or_default() += 1;
            }
        }
        // Copies in different enclosures: an enclosure counts once, however full it is.
        if matches!(self.level, Level::Raid1 { spread: Spread::Enclosure, .. }) {
            per_enclosure.values_mut().for_each(|count| *count = 1);
        }
        let mut per_host: HashMap<&str, usize> = HashMap::new();
        for (enclosure, count) in &per_enclosure {
            let host = cluster.enclosure(enclosure).and_then(|enclosure| enclosure.host.as_deref());
            *per_host.entry(host.unwrap_or("")).or_default() += count;
        }
        Survival {
            drives: borne,
            enclosures: worst_groups(per_enclosure.into_values(), borne),
            hosts: if cluster.hosts.len() < 2 {
                0
            } else {
                worst_groups(per_host.into_values(), borne)
            },
        }
    }
}

impl ClusterFile {
    /// What every file system of the cluster survives, data and metadata together.
    #[must_use]
    pub fn survives(&self) -> Survival {
        let arrays = self.filesystems.iter().flat_map(|fs| [&fs.data, &fs.metadata]);
        arrays
            .filter_map(|name| self.array(name))
            .map(|array| array.survives(self))
            .reduce(Survival::both)
            .unwrap_or(Survival { drives: 0, enclosures: 0, hosts: 0 })
    }
}

/// How many groups may go, whichever, before more than `borne` of their members are gone:
/// the fullest go first.
fn worst_groups(counts: impl Iterator<Item = usize>, borne: usize) -> usize {
    let mut counts: Vec<usize> = counts.collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let mut lost = 0;
    counts
        .iter()
        .take_while(|count| {
            lost += **count;
            lost <= borne
        })
        .count()
}

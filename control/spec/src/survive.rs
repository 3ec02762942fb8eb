//! What an array survives, found by looking at where its members sit.
//!
//! The answer holds for the worst choice: "any 1 enclosure" means whichever one is lost.

use std::collections::HashMap;
use std::fmt;

use crate::{ArraySpec, ClusterFile, DriveSpec, FileSystemSpec, Level, Spread};

/// Losses that an array or file system bears, whichever drives or enclosures they hit.
/// Each number stands alone: so many drives, or so many enclosures, or so many hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survival {
    /// Any so many drives.
    pub drives: usize,
    /// Any so many enclosures.
    pub enclosures: usize,
    /// Any so many paths to each enclosure, without the loss of a drive; `None` when none is on the network.
    pub paths: Option<usize>,
    /// Any so many hosts; 0 when the file names fewer than two.
    pub hosts: usize,
    /// Any server: another takes over, as no drive is in the one that has them.
    pub servers: bool,
}

/// What somebody asks an array or a file system to survive; each number as in [`Survival`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Required {
    /// So many drives.
    pub drives: Option<u32>,
    /// So many enclosures.
    pub enclosures: Option<u32>,
    /// So many paths to each enclosure on the network.
    pub paths: Option<u32>,
    /// So many hosts.
    pub hosts: Option<u32>,
    /// So many servers that have the drives, one after the other.
    pub servers: Option<u32>,
}

/// One thing of which more is asked for than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// In the singular: `drive`.
    pub what: &'static str,
    /// How many of them may go.
    pub borne: usize,
    /// How many are to.
    pub asked: u32,
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
            (self.paths.unwrap_or(0), "path to each enclosure", "paths to each enclosure"),
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
            paths: self.paths.into_iter().chain(other.paths).min(),
            hosts: self.hosts.min(other.hosts),
            servers: self.servers && other.servers,
        }
    }
}

impl fmt::Display for Required {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = [
            ("drives", self.drives),
            ("enclosures", self.enclosures),
            ("paths", self.paths),
            ("hosts", self.hosts),
            ("servers", self.servers),
        ];
        let parts: Vec<String> = keys
            .into_iter()
            .filter_map(|(key, count)| Some(format!("{key} = {}", count?)))
            .collect();
        write!(f, "{{ {} }}", parts.join(", "))
    }
}

impl Required {
    /// Whether anything is asked for.
    #[must_use]
    pub fn is_any(&self) -> bool {
        *self != Self::default()
    }

    /// Where `survival` is less than this. Paths that are not there cannot be lost.
    #[must_use]
    pub fn beyond(&self, survival: &Survival) -> Vec<Shortfall> {
        let all = [
            ("drive", self.drives, survival.drives),
            ("enclosure", self.enclosures, survival.enclosures),
            ("path", self.paths, survival.paths.unwrap_or(usize::MAX)),
            ("host", self.hosts, survival.hosts),
            ("server", self.servers, if survival.servers { usize::MAX } else { 0 }),
        ];
        let short = |(what, asked, borne): (&'static str, Option<u32>, usize)| {
            let asked = asked.filter(|asked| borne < *asked as usize)?;
            Some(Shortfall { what, borne, asked })
        };
        all.into_iter().filter_map(short).collect()
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
        let wanted = self.level.roles().unwrap_or(usize::MAX);
        let rounds = boxes.iter().map(|(_, drives)| drives.len()).max().unwrap_or(0);
        let in_turn: Vec<&str> = (0..rounds)
            .flat_map(|round| boxes.iter().filter_map(move |(_, drives)| drives.get(round)))
            .take(wanted)
            .copied()
            .collect();
        let groups = self.level.groups() as usize;
        if groups < 2 {
            let members = in_turn.into_iter().map(String::from).collect();
            return Placement { members, spares };
        }
        // Neighbouring members are a group. Dealt enclosure by enclosure, each gets its even share of every one.
        let by_enclosure = boxes.iter().flat_map(|(_, drives)| drives);
        let chosen: Vec<&&str> = by_enclosure.filter(|name| in_turn.contains(name)).collect();
        let group = |first: usize| chosen.iter().skip(first).step_by(groups);
        let members = (0..groups).flat_map(group).map(|name| (**name).to_string()).collect();
        Placement { members, spares }
    }

    /// How many members sit in each enclosure, group by group: a level bears its losses in each.
    #[must_use]
    pub fn members_by_enclosure<'c>(&self, cluster: &'c ClusterFile) -> Vec<Vec<(&'c str, usize)>> {
        let members = self.placement(cluster).members;
        let groups = self.level.groups() as usize;
        let of_group = self.level.roles().map_or(members.len(), |roles| roles / groups.max(1));
        let count = |group: &[String]| {
            let mut counts: Vec<(&str, usize)> = Vec::new();
            for drive in group.iter().filter_map(|name| cluster.drive(name)) {
                match counts.iter_mut().find(|(enclosure, _)| *enclosure == drive.enclosure) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((&drive.enclosure, 1)),
                }
            }
            counts
        };
        members.chunks(of_group.max(1)).map(count).collect()
    }

    /// What the array survives, with its members placed as [`ArraySpec::placement`] says.
    #[must_use]
    pub fn survives(&self, cluster: &ClusterFile) -> Survival {
        let borne = self.level.drives_borne() as usize;
        let none = Survival { drives: borne, ..Survival::default() };
        let groups = self.members_by_enclosure(cluster);
        // The worst choice hits the group that bears least.
        let of_group = |group| self.group_survives(cluster, group);
        let survival = groups.into_iter().map(of_group).reduce(Survival::both).unwrap_or(none);
        let enclosures = survival.enclosures.min(self.enclosures_left_behind(cluster));
        // Whoever takes over needs all arrays, and any spare may come into this one.
        let servers = cluster.drives.iter().all(DriveSpec::is_remote);
        Survival { enclosures, servers, ..survival }
    }

    /// How many enclosures may go at once, whichever, so that who is left with the others goes on: by more than half of the members another
    /// server may open the array, where it reaches them. No limit where all drives are this machine's own.
    fn enclosures_left_behind(&self, cluster: &ClusterFile) -> usize {
        let Placement { members, spares } = self.placement(cluster);
        let all = members.len() + spares.len();
        let mut remote: HashMap<&str, usize> = HashMap::new();
        for drive in members.iter().chain(&spares).filter_map(|name| cluster.drive(name)) {
            if cluster.enclosure(&drive.enclosure).is_some_and(|it| it.url.is_some()) {
                *remote.entry(&drive.enclosure).or_default() += 1;
            }
        }
        match remote.values().sum::<usize>() * 2 <= all {
            true => usize::MAX,
            false => worst_groups(remote.into_values(), all / 2),
        }
    }

    /// What is borne by members of which so many sit in each enclosure.
    fn group_survives(
        &self,
        cluster: &ClusterFile,
        mut per_enclosure: Vec<(&str, usize)>,
    ) -> Survival {
        let borne = self.level.drives_borne() as usize;
        // Copies in different enclosures: an enclosure counts once, however full it is.
        if matches!(self.level, Level::Raid1 { spread: Spread::Enclosure, .. }) {
            per_enclosure.iter_mut().for_each(|(_, count)| *count = 1);
        }
        let mut per_host: HashMap<&str, usize> = HashMap::new();
        let mut paths: Option<usize> = None;
        for (name, count) in &per_enclosure {
            let Some(enclosure) = cluster.enclosure(name) else { continue };
            match &enclosure.url {
                Some(url) => {
                    let spare = url.addresses().len() - 1;
                    paths = Some(paths.map_or(spare, |least| least.min(spare)));
                }
                None => {
                    let host = enclosure.host.as_deref().unwrap_or("");
                    *per_host.entry(host).or_default() += count;
                }
            }
        }
        // One that holds no member takes none along.
        let others = cluster.hosts.len().saturating_sub(per_host.len());
        let hosts = worst_groups(per_host.into_values().chain(vec![0; others]), borne);
        Survival {
            drives: borne,
            enclosures: worst_groups(per_enclosure.into_iter().map(|(_, count)| count), borne),
            paths,
            // Somebody must be left to serve.
            hosts: hosts.min(cluster.hosts.len().saturating_sub(1)),
            // Of all its drives, not of a group.
            servers: false,
        }
    }
}

impl ClusterFile {
    /// What every file system of the cluster survives, data and metadata together.
    #[must_use]
    pub fn survives(&self) -> Survival {
        let all = self.filesystems.iter().map(|fs| fs.survives(self));
        all.reduce(Survival::both).unwrap_or_default()
    }
}

impl FileSystemSpec {
    /// What it survives: what both its arrays do.
    #[must_use]
    pub fn survives(&self, cluster: &ClusterFile) -> Survival {
        let arrays =
            [&self.data, &self.metadata].into_iter().filter_map(|name| cluster.array(name));
        arrays.map(|array| array.survives(cluster)).reduce(Survival::both).unwrap_or_default()
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

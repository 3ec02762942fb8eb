//! Where the members of an array have come to sit: drives that take over from others may be in enclosures that hold too many
//! already, and then the array bears less than its cluster file says.

use levada_raid::{ArrayStatus, Level, MemberState};
use levada_spec::{ArraySpec, ClusterFile};
use std::fmt;

/// A role's drive and its enclosure, as a place in the cluster file; `None`: nobody plays the role, or the file does not name the drive.
pub(crate) type Roles = Vec<Option<(String, u16)>>;

/// An array that bears the loss of fewer enclosures than the file would make it bear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub array: String,
    /// Enclosures that may be lost, whichever.
    pub borne: usize,
    /// By the file, with its drives as it deals them.
    pub by_file: usize,
    /// Enclosures of which none may be lost, each with the array's drives in it.
    pub needed: Vec<(String, Vec<String>)>,
}

/// The place of a drive's enclosure in the file.
pub(crate) fn enclosure_of(cluster: &ClusterFile, drive: &str) -> Option<u16> {
    let enclosure = &cluster.drive(drive)?.enclosure;
    let at = cluster.enclosures.iter().position(|known| known.name == *enclosure)?;
    Some(at as u16)
}

/// Who plays the roles of an array that is open.
pub(crate) fn played(cluster: &ClusterFile, status: &ArrayStatus) -> Roles {
    let roles = status.members.iter().filter_map(|member| member.role);
    let width = roles.max().map_or(0, |last| last + 1);
    let plays = |role: usize| {
        let mut live = status.members.iter().filter(|member| member.state != MemberState::Faulty);
        let member = live.find(|member| member.role == Some(role))?;
        // One that joined later is not in the file that the node was started with.
        let enclosure = enclosure_of(cluster, &member.name).unwrap_or(member.enclosure);
        Some((member.name.clone(), enclosure))
    };
    (0..width).map(plays).collect()
}

/// The array, if its members sit worse than the file deals them. Where a role is not played it is degraded, which says
/// more than this.
pub(crate) fn displaced(
    cluster: &ClusterFile,
    array: &ArraySpec,
    level: Level,
    roles: &Roles,
) -> Option<Placed> {
    let played: Vec<Option<u16>> =
        roles.iter().map(|role| role.as_ref().map(|(_, enclosure)| *enclosure)).collect();
    let by_file = array.survives(cluster).enclosures;
    if played.contains(&None) {
        return None;
    }
    let borne = level.enclosures_borne(&played);
    if borne >= by_file {
        return None;
    }
    let drives_in = |enclosure: u16| {
        let there = roles.iter().flatten().filter(|(_, at)| *at == enclosure);
        let mut there: Vec<String> = there.map(|(drive, _)| drive.clone()).collect();
        there.sort_unstable();
        there
    };
    let needed = level.enclosures_needed(&played).into_iter().filter_map(|enclosure| {
        let name = &cluster.enclosures.get(usize::from(enclosure))?.name;
        Some((name.clone(), drives_in(enclosure)))
    });
    Some(Placed { array: array.name.clone(), borne, by_file, needed: needed.collect() })
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { array, borne, by_file, needed } = self;
        let count = |number: usize| match number {
            0 => "of no enclosure".to_owned(),
            1 => "of any 1 enclosure".to_owned(),
            _ => format!("of any {number} enclosures"),
        };
        write!(
            f,
            "array {array} survives the loss {}, and would {} with its drives as the cluster file deals them",
            count(*borne),
            count(*by_file)
        )?;
        for (enclosure, drives) in needed {
            write!(f, "; it needs {enclosure} ({})", drives.join(", "))?;
        }
        f.write_str(
            ": with a spare in another enclosure, `levada drive fail` of one of too many moves it there",
        )
    }
}

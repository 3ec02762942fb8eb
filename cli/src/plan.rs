//! `plan`: what a cluster file makes of its drives, what that survives, and what `up` would meet. Changes nothing.

use crate::discover::discover;
use crate::out::say;
use crate::{place, up};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use levada_base::reactor::Reactor;
use levada_node::assembly::{AssemblyError, Tuning};
use levada_node::outlook::{Outlook, Reduced, outlook};
use levada_node::state::{Phase, RunningNode};
use levada_node::{Absent, DeadPath, FileDrives, Placed, absent, dead_paths, survives_now};
use levada_spec::{ArraySpec, ClusterFile, EnclosureSpec, Level, Loaded, Required};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct PlanArgs {
    /// The cluster file, as with -f
    #[arg(value_name = "CLUSTER_FILE")]
    path: Option<PathBuf>,
}

/// Prints the plan; fails where `up` would refuse the file.
pub fn plan(file: Option<&Path>, args: &PlanArgs) -> Result<()> {
    if args.path.is_some() && file.is_some() {
        bail!("the cluster file is named twice");
    }
    let path = place::find_or_say(args.path.as_deref().or(file))?;
    let loaded = match discover(&path)? {
        Some(found) => {
            found.tell(&format!("`levada up` writes them into {}", path.display()));
            place::warn(&found.loaded);
            found.loaded
        }
        None => place::load_at(&path)?,
    };
    up::check_fit(&path, &loaded)?;
    let cluster = &loaded.cluster;
    let (drives, enclosures) = (cluster.drives.len(), cluster.enclosures.len());
    say!("{}: {}, {}", cluster.name, count(drives, "drive"), count(enclosures, "enclosure"));
    for enclosure in &cluster.enclosures {
        say!("  enclosure {}", enclosure_text(cluster, enclosure));
    }
    for array in &cluster.arrays {
        say!("  array {}: {}", array.name, array_text(cluster, array));
        say!("    survives {}{}", array.survives(cluster), asked(array.required));
    }
    for fs in &cluster.filesystems {
        say!("  filesystem {}: data on {}, metadata on {}", fs.name, fs.data, fs.metadata);
        say!("    survives {}{}", fs.survives(cluster), asked(fs.required));
    }
    say!("  servers: {}", servers_text(cluster));
    compare(&loaded)
}

/// Which servers can have it.
fn servers_text(cluster: &ClusterFile) -> String {
    let here: Vec<_> = cluster.drives.iter().filter(|drive| !drive.is_remote()).collect();
    match here.first() {
        None => "survives the loss of any; one that reaches the enclosures takes over with this file and `levada up`, \
                 and shuts out whoever has them"
            .into(),
        Some(first) => {
            let more = match here.len() {
                1 => String::new(),
                all => format!(" and {} more", all - 1),
            };
            format!("this one alone, which has drive {}{more} in it", first.name)
        }
    }
}

fn count(number: usize, of: &str) -> String {
    if number == 1 { format!("1 {of}") } else { format!("{number} {of}s") }
}

fn asked(required: Required) -> String {
    if required.is_any() { format!("; at least {required} is asked for") } else { String::new() }
}

fn enclosure_text(cluster: &ClusterFile, enclosure: &EnclosureSpec) -> String {
    let drives = cluster.drives.iter().filter(|drive| drive.enclosure == enclosure.name).count();
    let place = match (&enclosure.url, &enclosure.host) {
        (Some(url), _) => {
            let paths = count(url.addresses().len(), "path");
            format!(", on the network by {paths} to {}", url.subsystem())
        }
        (None, Some(host)) => format!(", on host {host}"),
        (None, None) => String::new(),
    };
    format!("{}: {}{place}", enclosure.name, count(drives, "drive"))
}

fn array_text(cluster: &ClusterFile, array: &ArraySpec) -> String {
    let placement = array.placement(cluster);
    let level = match array.level {
        Level::Raid0 { .. } => "raid0".into(),
        Level::Raid1 { copies, .. } => format!("{} of {copies} copies", array.level.name()),
        Level::Parity { kind, data, .. } => {
            format!("{}, {data}+{}", array.level.name(), kind.parity())
        }
    };
    let mut held: Vec<(&str, usize)> = Vec::new();
    for (enclosure, members) in array.members_by_enclosure(cluster).into_iter().flatten() {
        match held.iter_mut().find(|(known, _)| *known == enclosure) {
            Some((_, sum)) => *sum += members,
            None => held.push((enclosure, members)),
        }
    }
    let held: Vec<String> =
        held.iter().map(|(name, number)| format!("{number} in {name}")).collect();
    let spares = match placement.spares.len() {
        0 => String::new(),
        spares => format!(", {}", count(spares, "spare")),
    };
    let members = count(placement.members.len(), "drive");
    format!("{level} over {members} ({}){spares}", held.join(", "))
}

/// What is asked for has to be so where members sit by now, not only where the file would deal them.
fn refuse_less_than_asked(cluster: &ClusterFile, displaced: &[Placed]) -> Result<()> {
    for placed in displaced {
        let asked = required_of(cluster, &placed.array, |required| required.enclosures);
        if (placed.borne as u64) < asked {
            bail!(
                "array {} survives the loss of {} of its enclosures where its drives sit now; at least {asked} is asked for",
                placed.array,
                placed.borne
            );
        }
    }
    Ok(())
}

/// Looks at the drives as `up` does, and at what else there is to see.
fn look<T>(
    loaded: &Loaded,
    more: impl AsyncFnOnce() -> T,
) -> Result<(Result<Outlook, AssemblyError>, T)> {
    let reactor = Reactor::new().context("cannot use io_uring")?;
    Ok(reactor.block_on(async {
        let source = FileDrives::new(loaded.clone(), place::state(loaded));
        let outlook = outlook(&source, &loaded.cluster, Tuning::default().segment_stripes).await;
        (outlook, more().await)
    }))
}

/// Fails where `up` would refuse the drives of a cluster file, without taking them.
pub fn foresee(loaded: &Loaded) -> Result<()> {
    let (outlook, ()) = look(loaded, async || ())?;
    match outlook? {
        Outlook::New { missing } if !missing.is_empty() => {
            let why =
                missing.iter().map(|(drive, why)| format!("drive {drive} is not there: {why}"));
            bail!("{}", why.collect::<Vec<_>>().join("; "))
        }
        Outlook::Refused { missing, why } => {
            say_missing(&loaded.cluster, &missing);
            bail!("{why}")
        }
        Outlook::New { .. } | Outlook::Exists { .. } => Ok(()),
    }
}

fn say_missing(cluster: &ClusterFile, missing: &[(String, String)]) {
    let missing = missing.iter().map(|(drive, why)| (drive.as_str(), why.as_str()));
    for Absent { drives, count, why } in absent(cluster, missing) {
        say!("  {drives} {} not there: {why}", if count == 1 { "is" } else { "are" });
    }
}

/// What arrays bear now that some of their drives are not there, and of what more is asked for.
fn say_reduced(cluster: &ClusterFile, reduced: &[Reduced]) {
    for Reduced { array, drives } in reduced {
        let asked = required_of(cluster, array, |required| required.drives);
        let less = match asked > *drives as u64 {
            true => format!("; at least {asked} is asked for"),
            false => String::new(),
        };
        say!("  ! array {array} {}{less}", survives_now(*drives));
    }
}

/// Enclosures with fewer paths now than are asked for.
fn say_cut_off(cluster: &ClusterFile, dead: &[DeadPath]) {
    for enclosure in &cluster.enclosures {
        let Some(url) = &enclosure.url else { continue };
        let lost = dead.iter().filter(|path| path.enclosure == enclosure.name).count();
        // Of one that nothing leads to its drives tell.
        let Some(borne) = url.addresses().len().checked_sub(lost + 1) else { continue };
        let of_arrays = cluster.arrays.iter().filter(|array| {
            array.drives.iter().any(|drive| {
                cluster.drive(drive).is_some_and(|drive| drive.enclosure == enclosure.name)
            })
        });
        let asked = of_arrays
            .map(|array| required_of(cluster, &array.name, |required| required.paths))
            .max()
            .unwrap_or(0);
        if lost > 0 && asked > borne as u64 {
            say!(
                "  ! enclosure {} survives the loss of {borne} of its paths now; at least {asked} is asked for",
                enclosure.name
            );
        }
    }
}

/// The most of something that the array and its file systems are to survive.
fn required_of(cluster: &ClusterFile, array: &str, of: impl Fn(&Required) -> Option<u32>) -> u64 {
    let of_array = cluster.array(array).and_then(|array| of(&array.required));
    let over_it =
        cluster.filesystems.iter().filter(|fs| [&*fs.data, &*fs.metadata].contains(&array));
    let of_systems = over_it.filter_map(|fs| of(&fs.required));
    of_array.into_iter().chain(of_systems).max().unwrap_or(0).into()
}

/// What the drives carry, beside what the file says.
fn compare(loaded: &Loaded) -> Result<()> {
    let (name, state) = (&loaded.cluster.name, place::state(loaded));
    let node = state.node().context("the file was not compared with its drives")?;
    if let Some(RunningNode { pid, phase }) = node {
        let is = if phase == Phase::Starting { "being brought up" } else { "up" };
        say!(
            "it is {is} (node process {pid}); the file was not compared with its drives, which the node has"
        );
        return Ok(());
    }
    let (outlook, dead) = look(loaded, async || dead_paths(&loaded.cluster).await)?;
    for DeadPath { enclosure, address, why } in &dead {
        say!("  path {address} of enclosure {enclosure} does not lead to its drives: {why}");
    }
    say_cut_off(&loaded.cluster, &dead);
    let would_refuse = |why: String| anyhow!("`levada up` would refuse this: {why}");
    let (missing, displaced) = match outlook.map_err(|error| would_refuse(error.to_string()))? {
        Outlook::New { missing } => {
            say_missing(&loaded.cluster, &missing);
            (missing, None)
        }
        Outlook::Exists { missing, reduced, displaced } => {
            say_missing(&loaded.cluster, &missing);
            say_reduced(&loaded.cluster, &reduced);
            (missing, Some(displaced))
        }
        Outlook::Refused { missing, why } => {
            say_missing(&loaded.cluster, &missing);
            return Err(would_refuse(why));
        }
    };
    for placed in displaced.iter().flatten() {
        say!("  ! {placed}");
    }
    refuse_less_than_asked(&loaded.cluster, displaced.as_deref().unwrap_or_default())?;
    match (displaced.is_none(), missing.len()) {
        (true, 0) => say!("{name} is new: `levada up` formats these drives"),
        (true, missing) => {
            bail!(
                "{name} is new, and {} {} not there: `levada up` would refuse this",
                count(missing, "drive"),
                if missing == 1 { "is" } else { "are" }
            )
        }
        (false, 0) => say!("{name} exists, as the file says: `levada up` opens it"),
        (false, missing) => {
            say!(
                "{name} exists, as far as the file can be compared: `levada up` opens it without {}",
                count(missing, "drive")
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_sit_worse_than_is_asked_for_are_refused() {
        let mut cluster =
            ClusterFile::box_default(Path::new("box"), 40 << 30).expect("room enough");
        let placed = Placed { array: "data".into(), borne: 0, by_file: 1, needed: Vec::new() };
        let refuse = |cluster: &ClusterFile| {
            let displaced = std::slice::from_ref(&placed);
            refuse_less_than_asked(cluster, displaced).map_err(|error| error.to_string())
        };
        assert_eq!(refuse(&cluster), Ok(()), "nothing is asked for");
        let says = Err("array data survives the loss of 0 of its enclosures where its drives sit now; at least 1 is asked for".to_owned());
        cluster.filesystems[0].required.enclosures = Some(1);
        assert_eq!(refuse(&cluster), says);
        cluster.filesystems[0].required.enclosures = None;
        cluster.arrays[1].required.enclosures = Some(1);
        assert_eq!(refuse(&cluster), says);
        cluster.arrays[1].required.enclosures = Some(0);
        assert_eq!(refuse(&cluster), Ok(()));
    }
}

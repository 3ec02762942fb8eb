//! `volume`: make, list, resize, rename and delete, in a cluster or on an array; `snapshot`: as they were. `tenant`: whose they are.

mod limits;
mod snapshot;
mod tenant;

use crate::array;
use crate::out::{print, say};
use crate::place;
use crate::status::bytes;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use levada_array::{Keeping, Opening, Pace, PoolStatus, Request};
use levada_node::control::{self, ControlReply, ControlRequest};
use levada_spec::Bytes;
use levada_volume::qos::LimitsChange;
use levada_volume::{NewSize, SnapshotName, Tenant, VolumeName, VolumeOrder, VolumeStatus};
use limits::LimitArgs;
use snapshot::SnapshotCommand;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

pub use tenant::{TenantCommand, tenant};

const NAME: &str = "its name, or TENANT/NAME for another tenant's than `default`";
const SNAPSHOT: &str = "a snapshot: VOLUME@NAME";
const HERE: &str = "volumes are those of the cluster, or with --on those of an array on its own";

/// Where volumes are.
#[derive(Args)]
pub struct PlaceArgs {
    /// On an array on its own, a pool: its drives, of which one is enough while it is served
    #[arg(long, value_name = "DRIVE", num_args = 1..)]
    on: Vec<PathBuf>,
    /// Go on without live members of the array whose drives are not given: they are out until they are given again
    #[arg(long, requires = "on")]
    degraded: bool,
}

const NOTHING_TO_SET: &str = "nothing to set: --help says what there is";

#[derive(Subcommand)]
#[command(after_help = HERE)]
pub enum VolumeCommand {
    /// Make a volume, which reads as zeroes: in a cluster thin, it takes room as it is written; on an array linear, it has all its
    /// room from the beginning
    Create {
        #[arg(help = NAME)]
        name: VolumeName,
        /// How large it is to a client, as in 20GiB
        #[arg(long, allow_hyphen_values = true)]
        size: Bytes,
        /// Also when it is larger than the whole store
        #[arg(long, conflicts_with = "on")]
        overcommit: bool,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// List the volumes
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Make a volume larger; clients that can see it grow do
    Grow {
        #[arg(help = NAME)]
        name: VolumeName,
        /// To this size, as in 40GiB, or by so much, as in +20GiB
        #[arg(value_parser = growth, value_name = "SIZE|+SIZE")]
        size: NewSize,
        /// Also when it becomes larger than the whole store
        #[arg(long, conflicts_with = "on")]
        overcommit: bool,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// Make a volume smaller; refused while there is data beyond the new end
    Shrink {
        #[arg(help = NAME)]
        name: VolumeName,
        /// To this size
        size: Bytes,
        /// Also when that loses data
        #[arg(long)]
        discard_data: bool,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// Change what a volume may use, also while it is used; what is not named stays, and 0 is no limit
    Set(SetArgs),
    /// Give a volume another name; whoever uses it goes on
    Rename {
        #[arg(help = NAME)]
        name: VolumeName,
        /// The new name, of the same tenant
        to: VolumeName,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// Delete a volume, and with it what it holds
    #[command(visible_alias = "rm")]
    Delete {
        #[arg(help = NAME)]
        name: VolumeName,
        /// Also while clients use it: their requests fail from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// Keep volumes of the cluster as they are now, list what is kept, delete it
    #[command(subcommand, visible_alias = "snap")]
    Snapshot(SnapshotCommand),
    /// Make a volume that begins as a snapshot, and shares with it what neither changes
    Clone {
        #[arg(help = SNAPSHOT)]
        from: SnapshotName,
        /// Its name, of the same tenant
        to: VolumeName,
    },
    /// Make a volume what it was when a snapshot was taken; what was written since is lost
    Rollback {
        #[arg(help = SNAPSHOT)]
        to: SnapshotName,
        /// Also while clients use it, who see other bytes from then on
        #[arg(long)]
        force: bool,
    },
    /// Make an array a pool of volumes, which has no other use then; refused if it holds anything
    Pool {
        /// Also if the array holds something, which is lost
        #[arg(long)]
        force: bool,
        /// Go on without live members of the array whose drives are not given
        #[arg(long)]
        degraded: bool,
        /// Its drives
        #[arg(required = true, value_name = "DRIVE")]
        drives: Vec<PathBuf>,
    },
}

#[derive(Args)]
pub struct SetArgs {
    #[arg(help = NAME)]
    name: VolumeName,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Args)]
pub struct ListArgs {
    /// Only those of this tenant
    #[arg(long)]
    tenant: Option<Tenant>,
    /// A line of JSON for each
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

/// `40GiB`, or `+20GiB`.
fn growth(text: &str) -> Result<NewSize, String> {
    let bytes =
        |text| Bytes::from_str(text).map(|bytes| bytes.0).map_err(|error| error.to_string());
    match text.strip_prefix('+') {
        Some(more) => Ok(NewSize::GrowBy { bytes: bytes(more)? }),
        None => Ok(NewSize::GrowTo { bytes: bytes(text)? }),
    }
}

/// Carries out a volume command.
pub fn volume(file: Option<&Path>, command: &VolumeCommand) -> Result<()> {
    match command {
        VolumeCommand::List(args) => list(file, args),
        VolumeCommand::Pool { force, degraded, drives } => {
            make_pool(&keeping(drives, *degraded), *force)
        }
        VolumeCommand::Create { name, size, overcommit, place } => {
            let (name, size_bytes, is_meant) = (name.clone(), size.0, *overcommit);
            let done = format!("volume {name} of {size} is there");
            carry_out(file, place, VolumeOrder::Create { name, size_bytes, is_meant }, &done)
        }
        VolumeCommand::Grow { name, size, overcommit, place } => {
            let done = format!("volume {name} has grown");
            let (name, size, is_meant) = (name.clone(), *size, *overcommit);
            carry_out(file, place, VolumeOrder::Resize { name, size, is_meant }, &done)
        }
        VolumeCommand::Shrink { name, size, discard_data, place } => {
            let done = format!("volume {name} has {size} now");
            let (name, size, is_meant) =
                (name.clone(), NewSize::ShrinkTo { bytes: size.0 }, *discard_data);
            carry_out(file, place, VolumeOrder::Resize { name, size, is_meant }, &done)
        }
        VolumeCommand::Set(args) => set(file, args),
        VolumeCommand::Rename { name, to, place } => {
            let done = format!("volume {name} is {to} now");
            let order = VolumeOrder::Rename { from: name.clone(), to: to.clone() };
            carry_out(file, place, order, &done)
        }
        VolumeCommand::Snapshot(command) => snapshot::snapshot(file, command),
        VolumeCommand::Clone { from, to } => {
            let done = format!("volume {to} is there, as {from} was");
            let order = VolumeOrder::Clone { from: from.clone(), to: to.clone() };
            of_cluster(file, order, &done)
        }
        VolumeCommand::Rollback { to, force } => {
            let done = format!("volume {} is what {to} was", to.volume);
            of_cluster(file, VolumeOrder::RollBack { to: to.clone(), is_meant: *force }, &done)
        }
        VolumeCommand::Delete { name, force, place } => {
            let done = format!("volume {name} is deleted");
            let order = VolumeOrder::Delete { name: name.clone(), is_meant: *force };
            carry_out(file, place, order, &done)
        }
    }
}

fn set(file: Option<&Path>, args: &SetArgs) -> Result<()> {
    let change = args.limits.change();
    if change == LimitsChange::default() {
        bail!(NOTHING_TO_SET);
    }
    let name = args.name.clone();
    let done = format!("volume {name} has other limits now");
    carry_out(file, &args.place, VolumeOrder::Set { name, change }, &done)
}

/// An array for an order alone.
fn keeping(drives: &[PathBuf], degraded: bool) -> Keeping {
    Keeping {
        drives: drives.to_vec(),
        opening: Opening { degraded, force: false },
        pace: Pace::default(),
        read_slow: false,
        power_fence: None,
    }
}

impl PlaceArgs {
    /// The array that is meant; `None`: the cluster.
    fn array(&self) -> Option<Keeping> {
        (!self.on.is_empty()).then(|| keeping(&self.on, self.degraded))
    }
}

/// Has an order carried out where the volume is, and says so.
fn carry_out(file: Option<&Path>, place: &PlaceArgs, order: VolumeOrder, done: &str) -> Result<()> {
    match place.array() {
        Some(array) => drop(array::ask_or_open(&array, Request::Volume { order })?),
        None => return of_cluster(file, order, done),
    }
    say!("{done}");
    Ok(())
}

/// Has an order carried out in the cluster, and says so.
fn of_cluster(file: Option<&Path>, order: VolumeOrder, done: &str) -> Result<()> {
    ask(file, &ControlRequest::Volume { order })?;
    say!("{done}");
    Ok(())
}

fn ask(file: Option<&Path>, request: &ControlRequest) -> Result<ControlReply> {
    Ok(control::ask(&place::state(&place::load(file)?).control_socket(), request)?)
}

fn make_pool(array: &Keeping, force: bool) -> Result<()> {
    let status = array::status_of(array::ask_or_open(array, Request::MakePool { force })?)?;
    let free = bytes(status.pool.map_or(0, |pool| pool.free_bytes));
    let name = status.name;
    say!("{name} is a pool of volumes with room for {free}; `levada volume create ... --on`");
    Ok(())
}

/// The pool that an array is.
fn pool_of(array: &Keeping) -> Result<PoolStatus> {
    let status = array::status_of(array::ask_or_open(array, Request::Show)?)?;
    match status.pool {
        Some(PoolStatus { problem: Some(problem), .. }) => bail!(problem),
        Some(pool) => Ok(pool),
        None => bail!("{} is no pool of volumes: `levada volume pool` makes it one", status.name),
    }
}

fn list(file: Option<&Path>, args: &ListArgs) -> Result<()> {
    let is_wanted =
        |volume: &VolumeStatus| args.tenant.as_ref().is_none_or(|t| *t == volume.name.tenant);
    let (volumes, free) = match args.place.array() {
        Some(array) => {
            let mut pool = pool_of(&array)?;
            pool.volumes.retain(is_wanted);
            (pool.volumes, Some(bytes(pool.free_bytes)))
        }
        None => (of_node(file, args.tenant.clone())?, None),
    };
    if args.json {
        for volume in &volumes {
            say!("{}", serde_json::to_string(volume)?);
        }
        return Ok(());
    }
    print(&table(&volumes)?);
    if let Some(free) = free {
        say!("{free} free");
    }
    Ok(())
}

fn of_node(file: Option<&Path>, tenant: Option<Tenant>) -> Result<Vec<VolumeStatus>> {
    match ask(file, &ControlRequest::Volumes { tenant })? {
        ControlReply::Volumes { volumes } => Ok(volumes),
        _ => bail!("the node answered something else; program and node differ in version"),
    }
}

fn table(volumes: &[VolumeStatus]) -> Result<String> {
    if volumes.is_empty() {
        return Ok("no volumes; `levada volume create NAME --size SIZE` makes one\n".into());
    }
    let names = volumes.iter().map(|volume| volume.name.to_string());
    let width = names.map(|name| name.len()).max().unwrap_or(0).max("VOLUME".len());
    let mut text = String::new();
    write!(text, "{:width$}  {:6}  {:>10}  {:>5}", "VOLUME", "KIND", "SIZE", "USERS")?;
    writeln!(text, "  {:>9}  LIMITS", "SNAPSHOTS")?;
    for volume in volumes {
        let (name, size) = (volume.name.to_string(), Bytes(volume.size_bytes).to_string());
        write!(text, "{name:width$}  {:6}  {size:>10}  {:>5}", volume.kind, volume.users)?;
        write!(text, "  {:>9}", volume.snapshots)?;
        writeln!(text, "  {}", limits::text(&volume.limits))?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_to_or_by() {
        assert_eq!(growth("1GiB"), Ok(NewSize::GrowTo { bytes: 1 << 30 }));
        assert_eq!(growth("+1MiB"), Ok(NewSize::GrowBy { bytes: 1 << 20 }));
        assert!(growth("+").is_err() && growth("-1GiB").is_err() && growth("1G").is_err());
    }
}

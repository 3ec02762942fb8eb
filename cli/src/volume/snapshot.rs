//! `volume snapshot`: keep volumes as they are, list what is kept, delete it.

use super::{ask, of_cluster};
use crate::out::{print, say};
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use levada_node::control::{ControlReply, ControlRequest};
use levada_spec::Bytes;
use levada_volume::{SnapshotName, SnapshotRow, VolumeName, VolumeOrder};
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

const WHAT_THEY_ARE: &str = "A snapshot is read-only: NBD shows it as the export VOLUME@NAME. It takes the room of what is \
     written over afterwards.";

#[derive(Subcommand)]
#[command(after_help = WHAT_THEY_ARE)]
pub enum SnapshotCommand {
    /// Keep a volume as it is now, also while it is used: as after a power cut, unless whoever uses it flushes first
    Create {
        #[arg(help = super::SNAPSHOT)]
        name: SnapshotName,
    },
    /// List snapshots, the oldest first
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Delete a snapshot; what was cloned from it stays
    #[command(visible_alias = "rm")]
    Delete {
        #[arg(help = super::SNAPSHOT)]
        name: SnapshotName,
    },
}

#[derive(Args)]
pub struct ListArgs {
    /// Only those of this volume
    volume: Option<VolumeName>,
    /// A line of JSON for each
    #[arg(long)]
    json: bool,
}

/// Carries out a command for snapshots.
pub fn snapshot(file: Option<&Path>, command: &SnapshotCommand) -> Result<()> {
    match command {
        SnapshotCommand::Create { name } => {
            let done = format!("snapshot {name} is there");
            of_cluster(file, VolumeOrder::Snapshot { name: name.clone() }, &done)
        }
        SnapshotCommand::Delete { name } => {
            let done = format!("snapshot {name} is deleted");
            of_cluster(file, VolumeOrder::DeleteSnapshot { name: name.clone() }, &done)
        }
        SnapshotCommand::List(args) => list(file, args),
    }
}

fn list(file: Option<&Path>, args: &ListArgs) -> Result<()> {
    let request = ControlRequest::Snapshots { of: args.volume.clone() };
    let ControlReply::Snapshots { snapshots } = ask(file, &request)? else {
        bail!("the node answered something else; program and node differ in version");
    };
    if args.json {
        for snapshot in &snapshots {
            say!("{}", serde_json::to_string(snapshot)?);
        }
        return Ok(());
    }
    print(&table(&snapshots)?);
    Ok(())
}

fn table(snapshots: &[SnapshotRow]) -> Result<String> {
    if snapshots.is_empty() {
        return Ok("no snapshots; `levada volume snapshot create VOLUME@NAME` takes one\n".into());
    }
    let names = snapshots.iter().map(|snapshot| snapshot.name.to_string().len());
    let width = names.max().unwrap_or(0).max("SNAPSHOT".len());
    let mut text = String::new();
    writeln!(text, "{:width$}  {:>10}  TAKEN", "SNAPSHOT", "SIZE")?;
    for SnapshotRow { name, size_bytes, taken_ns } in snapshots {
        let (name, size) = (name.to_string(), Bytes(*size_bytes).to_string());
        writeln!(text, "{name:width$}  {size:>10}  {} ago", age(*taken_ns))?;
    }
    Ok(text)
}

/// How long ago that was: nanoseconds since 1970.
fn age(ns: i64) -> String {
    let taken = SystemTime::UNIX_EPOCH + Duration::from_nanos(u64::try_from(ns).unwrap_or(0));
    // Not yet, where a clock was set.
    rough(taken.elapsed().unwrap_or_default().as_secs())
}

fn rough(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_one_unit() {
        let ages = [5, 119, 120, 7199, 7200, 172_799, 172_800].map(rough);
        assert_eq!(ages, ["5 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 days"]);
    }
}

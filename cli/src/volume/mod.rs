//! `volume`: make, list, resize, rename and delete. `tenant`: whose they are.

mod limits;
mod tenant;

use crate::out::{print, say};
use crate::place;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use levada_node::control::{self, ControlReply, ControlRequest, NewSize, VolumeStatus};
use levada_spec::Bytes;
use levada_volume::qos::LimitsChange;
use levada_volume::{Tenant, VolumeName};
use limits::LimitArgs;
use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;

pub use tenant::{TenantCommand, tenant};

const NAME: &str = "its name, or TENANT/NAME for another tenant's than `default`";

const NOTHING_TO_SET: &str = "nothing to set: --help says what there is";

#[derive(Subcommand)]
pub enum VolumeCommand {
    /// Make a thin volume: it reads as zeroes, and takes room as it is written
    Create {
        #[arg(help = NAME)]
        name: VolumeName,
        /// How large it is to a client, as in 20GiB
        #[arg(long)]
        size: Bytes,
        /// Also when it is larger than the whole store
        #[arg(long)]
        overcommit: bool,
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
        #[arg(long)]
        overcommit: bool,
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
    },
    /// Change what a volume may use, also while it is used; what is not named stays, and 0 is no limit
    Set(SetArgs),
    /// Give a volume another name; whoever uses it goes on
    Rename {
        #[arg(help = NAME)]
        name: VolumeName,
        /// The new name, of the same tenant
        to: VolumeName,
    },
    /// Delete a volume, and with it what it holds
    #[command(visible_alias = "rm")]
    Delete {
        #[arg(help = NAME)]
        name: VolumeName,
        /// Also while clients use it: their requests fail from then on
        #[arg(long)]
        force: bool,
    },
}

#[derive(Args)]
pub struct SetArgs {
    #[arg(help = NAME)]
    name: VolumeName,
    #[command(flatten)]
    limits: LimitArgs,
}

#[derive(Args)]
pub struct ListArgs {
    /// Only those of this tenant
    #[arg(long)]
    tenant: Option<Tenant>,
    /// A line of JSON for each
    #[arg(long)]
    json: bool,
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
    let (request, done) = match command {
        VolumeCommand::List(args) => return list(file, args),
        VolumeCommand::Create { name, size, overcommit } => {
            let (name, size_bytes, is_meant) = (name.clone(), size.0, *overcommit);
            let done = format!("volume {name} of {size} is there");
            (ControlRequest::VolumeCreate { name, size_bytes, is_meant }, done)
        }
        VolumeCommand::Grow { name, size, overcommit } => {
            let done = format!("volume {name} has grown");
            let (name, size, is_meant) = (name.clone(), *size, *overcommit);
            (ControlRequest::VolumeResize { name, size, is_meant }, done)
        }
        VolumeCommand::Shrink { name, size, discard_data } => {
            let done = format!("volume {name} has {size} now");
            let (name, size, is_meant) =
                (name.clone(), NewSize::ShrinkTo { bytes: size.0 }, *discard_data);
            (ControlRequest::VolumeResize { name, size, is_meant }, done)
        }
        VolumeCommand::Set(args) => {
            let change = args.limits.change();
            if change == LimitsChange::default() {
                bail!(NOTHING_TO_SET);
            }
            let name = args.name.clone();
            let done = format!("volume {name} has other limits now");
            (ControlRequest::VolumeSet { name, change }, done)
        }
        VolumeCommand::Rename { name, to } => {
            let done = format!("volume {name} is {to} now");
            (ControlRequest::VolumeRename { from: name.clone(), to: to.clone() }, done)
        }
        VolumeCommand::Delete { name, force } => {
            let done = format!("volume {name} is deleted");
            (ControlRequest::VolumeDelete { name: name.clone(), is_meant: *force }, done)
        }
    };
    ask(file, &request)?;
    say!("{done}");
    Ok(())
}

fn ask(file: Option<&Path>, request: &ControlRequest) -> Result<ControlReply> {
    Ok(control::ask(&place::state(&place::load(file)?).control_socket(), request)?)
}

fn list(file: Option<&Path>, args: &ListArgs) -> Result<()> {
    let reply = ask(file, &ControlRequest::Volumes { tenant: args.tenant.clone() })?;
    let ControlReply::Volumes { volumes } = reply else {
        bail!("the node answered something else; program and node differ in version");
    };
    if args.json {
        for volume in &volumes {
            say!("{}", serde_json::to_string(volume)?);
        }
        return Ok(());
    }
    print(&table(&volumes)?);
    Ok(())
}

fn table(volumes: &[VolumeStatus]) -> Result<String> {
    if volumes.is_empty() {
        return Ok("no volumes; `levada volume create NAME --size SIZE` makes one\n".into());
    }
    let names = volumes.iter().map(|volume| volume.name.to_string());
    let width = names.map(|name| name.len()).max().unwrap_or(0).max("VOLUME".len());
    let mut text = String::new();
    writeln!(text, "{:width$}  {:5}  {:>10}  {:>5}  LIMITS", "VOLUME", "KIND", "SIZE", "USERS")?;
    for volume in volumes {
        let (name, size) = (volume.name.to_string(), Bytes(volume.size_bytes).to_string());
        write!(text, "{name:width$}  {:5}  {size:>10}  {:>5}", volume.kind, volume.users)?;
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

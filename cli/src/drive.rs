//! `drive`: what drives say of themselves; fail, replace and add.

use crate::status::{self, bytes};
use crate::{out::say, place};
use anyhow::{Result, bail};
use clap::Subcommand;
use levada_health::DriveHealth;
use levada_node::control::{self, ControlRequest, DriveStatus};
use levada_spec::Loaded;
use std::path::Path;

#[derive(Subcommand)]
pub enum DriveCommand {
    /// How drives are, and what they say of their health (SMART): wear, spare room, errors, temperature, hours
    Show {
        /// Names in the cluster file; all of them unless given
        drives: Vec<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop using a drive at once, as if it had been pulled
    Fail {
        /// Its name in the cluster file
        drive: String,
        /// Also when its data is nowhere else: the array stops
        #[arg(long)]
        force: bool,
    },
    /// Put a drive in the place of a failed one (same name in the cluster file) and rebuild it; a drive that is out of
    /// one array only goes back there
    Replace {
        /// Its name in the cluster file; change its path there first if it has another
        drive: String,
        /// Overwrite what is on it
        #[arg(long)]
        force: bool,
    },
    /// Take a drive that is new in the cluster file as a hot spare
    Add {
        /// Its name in the cluster file
        drive: String,
        /// Overwrite what is on it
        #[arg(long)]
        force: bool,
    },
}

/// Carries out a drive command.
pub fn drive(file: Option<&Path>, command: &DriveCommand) -> Result<()> {
    let loaded = place::load(file)?;
    let (request, done) = match command {
        DriveCommand::Show { drives, json } => return show(&loaded, drives, *json),
        DriveCommand::Fail { drive, force } => (
            ControlRequest::DriveFail { drive: drive.clone(), force: *force },
            format!("{drive} has failed; `levada rebuild --watch` shows what takes its place"),
        ),
        DriveCommand::Replace { drive, force } => (
            ControlRequest::DriveReplace { drive: drive.clone(), force: *force },
            format!("{drive} is in again; `levada rebuild --watch` shows its rebuild"),
        ),
        DriveCommand::Add { drive, force } => (
            ControlRequest::DriveAdd { drive: drive.clone(), force: *force },
            format!("{drive} is added"),
        ),
    };
    control::ask(&place::state(&loaded).control_socket(), &request)?;
    say!("{done}");
    Ok(())
}

fn show(loaded: &Loaded, names: &[String], json: bool) -> Result<()> {
    let status = status::ask(&place::state(loaded))?;
    if let Some(unknown) =
        names.iter().find(|name| status.drives.iter().all(|it| it.name != **name))
    {
        bail!("there is no drive {unknown}; `levada drive show` names all");
    }
    let is_meant = |drive: &&DriveStatus| names.is_empty() || names.contains(&drive.name);
    let drives: Vec<&DriveStatus> = status.drives.iter().filter(is_meant).collect();
    if json {
        say!("{}", serde_json::to_string(&drives)?);
        return Ok(());
    }
    for drive in drives {
        let DriveStatus { name, enclosure, state, .. } = drive;
        let (size, read, written) =
            (bytes(drive.capacity_bytes), bytes(drive.bytes_read), bytes(drive.bytes_written));
        say!(
            "{name:<8} {state:<8} {size}, in enclosure {enclosure}; since the start {read} read, {written} written, {} errors",
            drive.errors
        );
        match &drive.health {
            Some(health) => health_lines(health).iter().for_each(|line| say!("         {line}")),
            None if state == "ok" => say!("         it does not tell of its health"),
            None => {}
        }
    }
    Ok(())
}

fn health_lines(health: &DriveHealth) -> Vec<String> {
    let celsius = health.celsius.map_or_else(String::new, |celsius| format!(", {celsius} °C"));
    let mut lines = vec![
        format!(
            "{} % of its endurance used, spare {} % (at least {} %), {} media errors{celsius}",
            health.used_percent,
            health.spare_percent,
            health.spare_least_percent,
            health.media_errors
        ),
        format!(
            "in its life {} read, {} written; on for {} h, {} power cycles, {} unsafe shutdowns; {} min too warm, {} min too hot",
            bytes(health.read_bytes),
            bytes(health.written_bytes),
            health.power_on_hours,
            health.power_cycles,
            health.unsafe_shutdowns,
            health.warm_minutes,
            health.hot_minutes
        ),
    ];
    if !health.complaints.is_empty() {
        lines.push(format!("! {}", health.complaints.join(", ")));
    }
    lines
}

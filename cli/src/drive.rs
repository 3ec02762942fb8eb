//! `drive`: fail, replace and add.

use crate::{out::say, place};
use anyhow::Result;
use clap::Subcommand;
use levada_node::control::{self, ControlRequest};
use std::path::Path;

#[derive(Subcommand)]
pub enum DriveCommand {
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

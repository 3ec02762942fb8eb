//! `rebuild` and `scrub`: start, watch, and tell how it ended.

use crate::{out::say, place, status, status::bytes};
use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use levada_node::control::{self, ArrayStatus, ControlRequest, Progress, Status};
use levada_node::state::StateDir;
use std::path::Path;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Args)]
pub struct WatchArgs {
    /// Stay until it is done, with a progress bar
    #[arg(long, short)]
    watch: bool,
}

/// Shows what is being rebuilt.
pub fn rebuild(file: Option<&Path>, args: &WatchArgs) -> Result<()> {
    let loaded = place::load(file)?;
    let state = place::state(&loaded);
    let status = if args.watch {
        watch(&state, "rebuild", |array| array.rebuild)?
    } else {
        status::ask(&state)?
    };
    for array in &status.arrays {
        match &array.rebuild {
            Some(progress) => say!("{}: {}", array.name, progress_text(progress)),
            None => say!("{}: {}", array.name, array.state),
        }
    }
    Ok(())
}

/// Starts a scrub; with `--watch`, waits for its end and fails when something stays wrong.
pub fn scrub(file: Option<&Path>, args: &WatchArgs) -> Result<()> {
    let loaded = place::load(file)?;
    let state = place::state(&loaded);
    control::ask(&state.control_socket(), &ControlRequest::Scrub)?;
    if !args.watch {
        say!("scrub started; `levada status` shows its progress");
        return Ok(());
    }
    let status = watch(&state, "scrub", |array| array.scrub)?;
    let mut unrepairable = 0;
    for array in &status.arrays {
        if let Some(result) = array.last_scrub {
            unrepairable += result.unrepairable;
            say!(
                "{}: {} checked, {} repaired, {} beyond repair",
                array.name,
                bytes(result.checked_bytes),
                result.repaired,
                result.unrepairable
            );
        }
    }
    if unrepairable > 0 {
        bail!("scrub found {unrepairable} places beyond repair; the node's log names them");
    }
    Ok(())
}

fn progress_text(progress: &Progress) -> String {
    let left = progress.total_bytes.saturating_sub(progress.done_bytes);
    let seconds = left.checked_div(progress.bytes_per_s).map_or("?".into(), |s| s.to_string());
    format!(
        "{} of {} at {}/s, {seconds} s left",
        bytes(progress.done_bytes),
        bytes(progress.total_bytes),
        bytes(progress.bytes_per_s)
    )
}

/// Draws a bar until no array is at this work any more; returns the last status.
fn watch(
    state: &StateDir,
    what: &'static str,
    progress_of: impl Fn(&ArrayStatus) -> Option<Progress>,
) -> Result<Status> {
    let style = ProgressStyle::with_template("{prefix} {bar:40} {percent:>3} %  {msg}  {elapsed}")?;
    let mut bar: Option<(String, ProgressBar)> = None;
    loop {
        let status = status::ask(state)?;
        let now = status.arrays.iter().find_map(|array| Some((&array.name, progress_of(array)?)));
        let Some((name, progress)) = now else {
            if let Some((_, bar)) = bar {
                bar.finish_and_clear();
            }
            return Ok(status);
        };
        if bar.as_ref().is_none_or(|(shown, _)| shown != name) {
            let fresh = ProgressBar::new(progress.total_bytes).with_style(style.clone());
            fresh.set_prefix(format!("{what} of {name}"));
            bar = Some((name.clone(), fresh));
        }
        if let Some((_, bar)) = &bar {
            bar.set_length(progress.total_bytes);
            bar.set_position(progress.done_bytes);
            bar.set_message(progress_text(&progress));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

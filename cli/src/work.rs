//! `rebuild` and `scrub`: start, watch, and tell how it ended.

use crate::{out::say, place, status, status::bytes};
use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use levada_node::control::{self, ArrayStatus, ControlRequest, Progress, ScrubResult, Status};
use levada_node::state::StateDir;
use std::path::Path;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The state of an array that waits for its drives.
const STOPPED: &str = "stopped";

#[derive(Args)]
pub struct WatchArgs {
    /// Stay until it is done, with a progress bar
    #[arg(long, short)]
    watch: bool,
}

/// Shows what is being rebuilt; with `--watch`, waits for its end and fails when an array has stopped.
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
    if args.watch && status.arrays.iter().any(|array| array.state == STOPPED) {
        bail!("an array has stopped; `levada status` says what helps");
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
    for array in &status.arrays {
        if let Some(result) = &array.last_scrub {
            say!("{}: {}", array.name, result_text(result));
        }
    }
    judge(&status.arrays)
}

/// What a scrub found, for people.
pub fn result_text(result: &ScrubResult) -> String {
    let mut text = format!(
        "{} checked, {} repaired, {} beyond repair",
        bytes(result.checked_bytes),
        result.repaired,
        result.unrepairable
    );
    if result.skipped_bytes > 0 {
        text += &format!(
            ", {} skipped (being written, or with too few members to tell)",
            bytes(result.skipped_bytes)
        );
    }
    for what in &result.not_checked {
        text += &format!("\n  not checked: {what}");
    }
    text
}

/// Whether everything was checked and is right.
fn judge(arrays: &[ArrayStatus]) -> Result<()> {
    let results = || arrays.iter().filter_map(|array| array.last_scrub.as_ref());
    let unrepairable: u64 = results().map(|result| result.unrepairable).sum();
    if unrepairable > 0 {
        bail!("scrub found {unrepairable} places beyond repair; the node's log names them");
    }
    let not_checked: usize = results().map(|result| result.not_checked.len()).sum();
    if not_checked > 0 {
        bail!("scrub did not check everything; `levada status` says what helps");
    }
    // A node that was started anew meanwhile knows of no scrub.
    if let Some(array) = arrays.iter().find(|array| array.last_scrub.is_none()) {
        bail!("the scrub of {} was cut off; start it again", array.name);
    }
    Ok(())
}

/// How far some work is, for people.
pub fn progress_text(progress: &Progress) -> String {
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
        // One that has stopped waits for its drives, not for work.
        let working = status.arrays.iter().filter(|array| array.state != STOPPED);
        let now = working.filter_map(|array| Some((&array.name, progress_of(array)?))).next();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_scrub_of_everything_that_found_nothing_succeeds() {
        let array = |result: Option<ScrubResult>| ArrayStatus {
            name: "data".into(),
            last_scrub: result,
            ..ArrayStatus::default()
        };
        let clean = ScrubResult { checked_bytes: 1 << 20, repaired: 3, ..ScrubResult::default() };
        let wrong = ScrubResult { unrepairable: 2, ..clean.clone() };
        let cut_off =
            ScrubResult { not_checked: vec!["target ost1: it stopped".into()], ..clean.clone() };
        judge(&[array(Some(clean.clone()))]).expect("all is well");
        for (result, part) in
            [(Some(wrong), "2 places"), (Some(cut_off), "not check"), (None, "cut off")]
        {
            let arrays = [array(Some(clean.clone())), array(result)];
            let said = judge(&arrays).expect_err("not all is well").to_string();
            assert!(said.contains(part), "{said}");
        }
        let skipped = ScrubResult { skipped_bytes: 1 << 20, ..clean };
        assert!(result_text(&skipped).contains("1.0 MiB skipped"));
    }
}

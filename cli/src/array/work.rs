//! Commands that change an array or work on it: asked of the process that has it open, or of ourselves.

use super::{OnArray, ask, show};
use crate::out::say;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use levada_array::{MemberStatus, OpenBy, Pace, Progress, Reply, Request, ScrubResult, Status};
use levada_export_nvmet::AnaState;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Between two looks at how far work is: for a bar, and for lines of JSON.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const TELL_EVERY: Duration = Duration::from_secs(1);

pub fn status_of(reply: Reply) -> Result<Status> {
    match reply {
        Reply::Status(status) => Ok(*status),
        Reply::Scrubbed(_) | Reply::Failed { .. } => {
            bail!("the array's process gave another answer than its status")
        }
    }
}

/// Says how good a path over NVMe/TCP is.
pub fn set_path(on: &OnArray, path: usize, state: AnaState) -> Result<()> {
    let status = status_of(ask(on, Request::Path { path, state })?)?;
    match on.json {
        true => show::print_status(&status, true),
        false => {
            say!("path {path} of {} is {state}", status.name);
            Ok(())
        }
    }
}

/// Shows how far a piece of work is until `done` hears of its end.
struct Watching {
    what: &'static str,
    json: bool,
    bar: Option<ProgressBar>,
}

impl Watching {
    fn look_every(&self) -> Duration {
        if self.json { TELL_EVERY } else { LOOK_EVERY }
    }

    fn tell(&mut self, name: &str, progress: &Progress) -> Result<()> {
        if self.json {
            let line = serde_json::json!({ "work": self.what, "progress": progress });
            eprintln!("{line}");
        } else if std::io::stderr().is_terminal() {
            let bar = match &self.bar {
                Some(bar) => bar,
                None => {
                    let template = "{prefix} {bar:40} {msg}  {elapsed}";
                    let bar =
                        ProgressBar::new(0).with_style(ProgressStyle::with_template(template)?);
                    bar.set_prefix(format!("{} of {name}", self.what));
                    self.bar.insert(bar)
                }
            };
            bar.set_length(progress.stripes_total);
            bar.set_position(progress.stripes_done);
            bar.set_message(show::progress_text(progress));
        }
        Ok(())
    }
}

/// Asks for work that takes its time and shows how far it is.
fn watch(
    on: &OnArray,
    request: Request,
    what: &'static str,
    progress_of: fn(&Status) -> Option<Progress>,
) -> Result<Reply> {
    let mut watching = Watching { what, json: on.json, bar: None };
    let reply = levada_array::ask_or_open(&on.keeping(), move |socket: &Path| {
        let (done, ended) = channel();
        let asked = socket.to_owned();
        std::thread::spawn(move || done.send(levada_array::ask(&asked, &request)));
        let reply = loop {
            match ended.recv_timeout(watching.look_every()) {
                Ok(reply) => break reply.map_err(anyhow::Error::from),
                Err(RecvTimeoutError::Disconnected) => bail!("the {what} was cut short"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(Reply::Status(status)) = levada_array::ask(socket, &Request::Show)?
                && let Some(progress) = progress_of(&status)
            {
                watching.tell(&status.name, &progress)?;
            }
        };
        if let Some(bar) = watching.bar {
            bar.finish_and_clear();
        }
        reply
    })??;
    reply.context("the array was closed meanwhile: try again")
}

/// What a scrub found, for people.
pub fn result_text(result: &ScrubResult) -> String {
    let repaired = result.unreadable_repaired + result.wrong_repaired;
    let wrong = match repaired + result.mismatched + result.lost {
        0 => "nothing was wrong".into(),
        _ => format!(
            "{} unreadable and {} wrong chunks repaired, {} stripes disagree and nothing tells which chunk is wrong, {} stripes \
             are beyond repair",
            result.unreadable_repaired, result.wrong_repaired, result.mismatched, result.lost
        ),
    };
    format!("{} stripes checked, {} skipped; {wrong}", result.stripes, result.skipped)
}

/// Scrubs, and fails when something stays wrong.
pub fn scrub(on: &OnArray, pace: Pace, restart: bool) -> Result<()> {
    let reply = watch(on, Request::Scrub { pace, restart }, "scrub", |status| status.scrub)?;
    let Reply::Scrubbed(result) = reply else { bail!("the scrub gave no report") };
    match on.json {
        true => say!("{}", serde_json::to_string(&result)?),
        false => say!("{}: {}", result.name, result_text(&result)),
    }
    if result.mismatched + result.lost > 0 {
        bail!("scrub found {} stripes beyond repair", result.mismatched + result.lost);
    }
    Ok(())
}

/// Rebuilds what waits for it.
pub fn rebuild(on: &OnArray, pace: Pace) -> Result<()> {
    let reply = watch(on, Request::Rebuild { pace }, "rebuild", |status| status.rebuild)?;
    let status = status_of(reply)?;
    if on.json {
        return show::print_status(&status, true);
    }
    match status.lost {
        0 => say!("{}: every member is in sync", status.name),
        lost => say!(
            "{}: nothing waits for a rebuild; {lost} places are vacant: `levada array replace` puts drives there",
            status.name
        ),
    }
    Ok(())
}

/// Takes a member out.
pub fn fail(on: &OnArray, member: &str) -> Result<()> {
    let status = status_of(ask(on, Request::Fail { member: member.to_owned() })?)?;
    if on.json {
        return show::print_status(&status, true);
    }
    say!("{member} is out; {}: {}", show::headline(&status), next_step(&status));
    Ok(())
}

/// Puts a drive into the array, as `request` says.
pub fn admit(on: &OnArray, request: Request, how: &str) -> Result<()> {
    let new = match &request {
        Request::Replace { new, .. } | Request::AddSpare { new, .. } => new.display().to_string(),
        Request::Show
        | Request::Scrub { .. }
        | Request::Rebuild { .. }
        | Request::Fail { .. }
        | Request::Path { .. }
        | Request::MakePool { .. }
        | Request::Volume { .. } => String::new(),
    };
    let status = status_of(ask(on, request)?)?;
    if on.json {
        return show::print_status(&status, true);
    }
    let is_back = |member: &MemberStatus| {
        member.catches_up && member.path.as_deref() == Some(Path::new(&new))
    };
    let how = match status.members.iter().any(is_back) {
        true => format!("{how} again, and needs only what changed meanwhile"),
        false => how.to_owned(),
    };
    say!("{new} is {how}; {}: {}", show::headline(&status), next_step(&status));
    Ok(())
}

/// What happens now, or should.
fn next_step(status: &Status) -> &'static str {
    let is = |state: &str| status.members.iter().any(|member| member.state == state);
    let served = status.open_by.as_ref().is_some_and(OpenBy::serves);
    match (is("rebuilding"), served) {
        (true, true) => "its rebuild has begun",
        (true, false) => "`levada array rebuild` is next",
        (false, _) if status.lost > 0 => "`levada array replace` puts a drive there",
        (false, _) => "nothing waits for a rebuild",
    }
}

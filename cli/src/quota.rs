//! `quota` and `project`: who uses what, and how much he may.

use crate::out::{print, say};
use crate::place;
use crate::status::bytes;
use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use levada_node::control::{self, ControlReply, ControlRequest};
use levada_node::quota::{Quota, QuotaChange, SoftHard, Used, Who, WhoKind};
use levada_spec::Bytes;
use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

const WHO: &str =
    "user:NAME|ID|default, group:NAME|ID|default, project:ID|default or tenant:ID|default";

#[derive(Subcommand)]
pub enum QuotaCommand {
    /// Set what somebody may use; what is not named stays as it is
    Set(SetArgs),
    /// Show what somebody uses and may use
    Show {
        #[arg(help = WHO)]
        who: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what all use and may use
    Report {
        /// Only those who use more than their soft limit
        #[arg(long)]
        over: bool,
        /// A line of JSON for each
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
pub struct SetArgs {
    #[arg(help = WHO)]
    who: String,
    /// Inodes: files, directories, links
    #[arg(long, value_name = "SOFT:HARD")]
    inodes: Option<String>,
    /// Bytes that are stored, as in 9GiB:10GiB; 0 is no limit
    #[arg(long, value_name = "SOFT:HARD")]
    bytes: Option<String>,
    /// How long there may be more than the soft limit, as in 7d, 12h, 30m
    #[arg(long, value_name = "TIME")]
    grace: Option<String>,
}

#[derive(Subcommand)]
pub enum ProjectCommand {
    /// Give a directory to a project: what is made in it from then on belongs to that
    Set {
        /// The directory, as a path within the file system
        dir: String,
        /// The project; 0: none
        id: u32,
        /// Also all that is below it
        #[arg(long)]
        recursive: bool,
    },
}

pub fn quota(file: Option<&Path>, command: &QuotaCommand) -> Result<()> {
    let ask = |request| -> Result<ControlReply> {
        Ok(control::ask(&place::state(&place::load(file)?).control_socket(), &request)?)
    };
    match command {
        QuotaCommand::Set(args) => {
            let number = |text: &str| text.parse().context("a number of inodes");
            let size = |text: &str| Ok(if text == "0" { 0 } else { Bytes::from_str(text)?.0 });
            let change = QuotaChange {
                bytes: args.bytes.as_deref().map(|text| pair(text, size)).transpose()?,
                inodes: args.inodes.as_deref().map(|text| pair(text, number)).transpose()?,
                grace_s: args.grace.as_deref().map(seconds).transpose()?,
            };
            if change == QuotaChange::default() {
                bail!("nothing to set: --bytes, --inodes, --grace");
            }
            ask(ControlRequest::QuotaSet { who: who(&args.who)?, change })?;
            Ok(())
        }
        QuotaCommand::Show { who: name, json } => {
            let quotas = quotas(ask(ControlRequest::Quotas { who: Some(who(name)?) })?)?;
            show(&quotas, *json)
        }
        QuotaCommand::Report { over, json } => {
            let mut quotas = quotas(ask(ControlRequest::Quotas { who: None })?)?;
            quotas.retain(|quota| !over || quota.is_over());
            show(&quotas, *json)
        }
    }
}

pub fn project(file: Option<&Path>, command: &ProjectCommand) -> Result<()> {
    let ProjectCommand::Set { dir, id, recursive } = command;
    let (path, project, recursive) = (dir.clone(), *id, *recursive);
    let request = ControlRequest::ProjectSet { path, project, recursive };
    control::ask(&place::state(&place::load(file)?).control_socket(), &request)?;
    Ok(())
}

fn quotas(reply: ControlReply) -> Result<Vec<Quota>> {
    match reply {
        ControlReply::Quotas { quotas } => Ok(quotas),
        _ => bail!("the node gave another answer than what is used"),
    }
}

fn who(text: &str) -> Result<Who> {
    let (kind, name) = text.split_once(':').ok_or_else(|| anyhow!("{text:?} is not {WHO}"))?;
    let kind = match kind {
        "user" => WhoKind::User,
        "group" => WhoKind::Group,
        "project" => WhoKind::Project,
        "tenant" => WhoKind::Tenant,
        _ => bail!("{text:?} is not {WHO}"),
    };
    if name == "default" {
        return Ok(Who { kind, id: None });
    }
    let id = name.parse().ok().filter(|id| *id != u32::MAX);
    let id =
        id.or_else(|| id_of(kind, name)).ok_or_else(|| anyhow!("{name:?} is not known here"))?;
    Ok(Who { kind, id: Some(id) })
}

/// Lines of names and ids of this machine.
fn names(kind: WhoKind) -> String {
    let file = match kind {
        WhoKind::User => "/etc/passwd",
        WhoKind::Group => "/etc/group",
        WhoKind::Project | WhoKind::Tenant => return String::new(),
    };
    std::fs::read_to_string(file).unwrap_or_default()
}

fn id_of(kind: WhoKind, name: &str) -> Option<u32> {
    let names = names(kind);
    let mut found = names.lines().map(|line| line.split(':').collect::<Vec<_>>());
    found.find(|fields| fields.first() == Some(&name))?.get(2)?.parse().ok()
}

fn name_of(who: Who) -> String {
    let kind = match who.kind {
        WhoKind::User => "user",
        WhoKind::Group => "group",
        WhoKind::Project => "project",
        WhoKind::Tenant => "tenant",
    };
    let Some(id) = who.id else { return format!("{kind}:default") };
    let names = names(who.kind);
    let mut lines = names.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let text = id.to_string();
    let found = lines.find(|fields| fields.get(2) == Some(&&*text));
    format!("{kind}:{}", found.map_or(&*text, |fields| fields[0]))
}

fn pair(text: &str, number: impl Fn(&str) -> Result<u64>) -> Result<SoftHard> {
    let (soft, hard) = text.split_once(':').ok_or_else(|| anyhow!("{text:?} is not SOFT:HARD"))?;
    let number = |part: &str| if part.is_empty() { Ok(0) } else { number(part) };
    Ok(SoftHard { soft: number(soft)?, hard: number(hard)? })
}

fn seconds(text: &str) -> Result<u32> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "s" | "" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => bail!("{text:?} is not a time as in 7d, 12h, 30m, 90s"),
    };
    let number: u32 = digits.parse().with_context(|| format!("{text:?} is not a time"))?;
    number.checked_mul(unit).ok_or_else(|| anyhow!("{text:?} is too long"))
}

fn show(quotas: &[Quota], json: bool) -> Result<()> {
    if json {
        for quota in quotas {
            say!("{}", serde_json::to_string(quota)?);
        }
    } else {
        print(&render(quotas, now()));
    }
    Ok(())
}

fn now() -> i64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX)
}

fn render(quotas: &[Quota], now: i64) -> String {
    let mut out = format!(
        "{:<20} {:>11} {:>11} {:>11} {:>8} {:>10} {:>10} {:>10} {:>8}\n",
        "WHO", "BYTES", "SOFT", "HARD", "GRACE", "INODES", "SOFT", "HARD", "GRACE"
    );
    let limit = |n: u64, text: &dyn Fn(u64) -> String| if n == 0 { "-".into() } else { text(n) };
    let number = |n: u64| n.to_string();
    for Quota { who, bytes: b, inodes: i } in quotas {
        let _ = writeln!(
            out,
            "{:<20} {:>11} {:>11} {:>11} {:>8} {:>10} {:>10} {:>10} {:>8}",
            name_of(*who),
            bytes(b.used),
            limit(b.soft, &bytes),
            limit(b.hard, &bytes),
            grace(*b, now),
            i.used,
            limit(i.soft, &number),
            limit(i.hard, &number),
            grace(*i, now),
        );
    }
    out
}

fn grace(used: Used, now: i64) -> String {
    let Some(left) = used.grace_ends.map(|ends| ends - now) else { return "-".into() };
    match left {
        ..=0 => "over".into(),
        1..7200 => format!("{}m", left / 60),
        7200..172_800 => format!("{}h", left / 3600),
        _ => format!("{}d", left / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_times_are_read() {
        let number = |text: &str| text.parse().context("a number");
        assert_eq!(pair("3:4", number).expect("sound"), SoftHard { soft: 3, hard: 4 });
        assert_eq!(pair(":4", number).expect("sound"), SoftHard { soft: 0, hard: 4 });
        assert!(pair("4", number).is_err() && pair("a:b", number).is_err());
        assert_eq!((seconds("7d").expect("sound"), seconds("90").expect("sound")), (604_800, 90));
        assert!(seconds("7w").is_err() && seconds("").is_err() && seconds("99999d").is_err());
        assert_eq!(who("user:root").expect("known"), Who { kind: WhoKind::User, id: Some(0) });
        assert_eq!(who("project:12").expect("sound").id, Some(12));
        assert_eq!(who("group:default").expect("sound").id, None);
        for bad in ["ann", "users:1", "project:x", "user:4294967295"] {
            assert!(who(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_used_is_shown() {
        let who = Who { kind: WhoKind::Project, id: Some(12) };
        let used = Used { used: 2048, soft: 1024, hard: 0, grace_ends: Some(100_000) };
        let inodes = Used { used: 3, soft: 0, hard: 5, grace_ends: None };
        let shown = render(&[Quota { who, bytes: used, inodes }], 0);
        let line: Vec<&str> = shown.lines().nth(1).expect("a line").split_whitespace().collect();
        let expected = ["project:12", "2.0", "KiB", "1.0", "KiB", "-", "27h", "3", "-", "5", "-"];
        assert_eq!(line, expected);
    }
}

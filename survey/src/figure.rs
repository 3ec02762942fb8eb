//! A figure: one measured number with everything needed to judge it, as JSON. One that could not
//! be taken stays in the file, with the reason, so that its absence is not mistaken for a pass.

use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::path::Path;
use std::process::Command;

/// The commit outside a repository, and what is added to one from which files differ.
const UNKNOWN: &str = "unknown";
const DIRTY: &str = "-dirty";

/// What a figure's value must be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    AtLeast(f64),
    Below(f64),
    AtMost(f64),
    /// Only reported.
    None,
}

impl Bar {
    #[must_use]
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bar) => value >= bar,
            Self::Below(bar) => value < bar,
            Self::AtMost(bar) => value <= bar,
            Self::None => true,
        }
    }
}

impl std::fmt::Display for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(bar) => write!(f, ">= {bar}"),
            Self::Below(bar) => write!(f, "< {bar}"),
            Self::AtMost(bar) => write!(f, "<= {bar}"),
            Self::None => Ok(()),
        }
    }
}

/// What CPU time is counted per.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Per {
    Byte,
    Op,
}

impl std::fmt::Display for Per {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Byte => "byte",
            Self::Op => "op",
        })
    }
}

/// CPU time spent per unit of work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    pub per: Per,
    /// Nanoseconds over all cores, kernel threads and interrupts included; on a machine that
    /// does something else besides, its work counts too.
    pub all_cores_ns: f64,
    /// Nanoseconds of this process and its children alone, their time in the kernel included.
    pub process_ns: f64,
}

/// One side of a ratio, or the figure itself when it is none, in absolute units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Operand {
    pub name: Cow<'static, str>,
    /// Median over the runs.
    pub value: f64,
    pub unit: Cow<'static, str>,
    pub cpu: Option<Cpu>,
}

impl Operand {
    /// One whose CPU time is not told.
    #[must_use]
    pub fn new(name: &'static str, value: f64, unit: &'static str) -> Self {
        Self { name: name.into(), value, unit: unit.into(), cpu: None }
    }
}

/// The range of a value over the runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub lowest: f64,
    pub highest: f64,
}

/// What a measurement gives back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Taken {
    /// Median over the runs.
    pub value: f64,
    pub unit: Cow<'static, str>,
    pub operands: Vec<Operand>,
    /// Of the side that the figure is about.
    pub cpu: Option<Cpu>,
    pub runs: usize,
    /// Pairs that were thrown away because the members were not the limit.
    pub retaken: usize,
    pub spread: Spread,
}

/// A figure, complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    #[serde(flatten)]
    pub taken: Taken,
    pub bar: Bar,
    pub bar_met: bool,
    /// How long all of its runs took, with what prepares them.
    pub seconds: f64,
    pub commit: String,
    pub machine: String,
}

/// A figure that could not be taken. Not met, whatever its bar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NotTaken {
    pub name: String,
    pub bar: Bar,
    /// Why.
    pub not_taken: String,
    pub commit: String,
    pub machine: String,
}

/// What became of one figure of the suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Outcome {
    Taken(Figure),
    NotTaken(NotTaken),
}

/// The commit of the working directory; `-dirty` when files differ from it, `unknown` outside a
/// repository.
#[must_use]
pub fn commit() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(head) = git(&["rev-parse", "--short=12", "HEAD"]) else { return UNKNOWN.into() };
    let is_clean = git(&["status", "--porcelain"]).is_some_and(|changes| changes.is_empty());
    if is_clean { head } else { head + DIRTY }
}

/// Processor, cores, memory and kernel of this machine.
#[must_use]
pub fn machine() -> String {
    let field = |path: &str, key: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory_kib = field("/proc/meminfo", "MemTotal")
        .and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0);
    let memory_gib = memory_kib.div_ceil(1 << 20);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{cpu}, {cores} cores, {memory_gib} GiB, Linux {}", kernel.trim())
}

/// Whether a [`commit`] says which sources were built: all of them, and no other ones.
#[must_use]
pub fn names_a_state(commit: &str) -> bool {
    commit != UNKNOWN && !commit.ends_with(DIRTY)
}

impl Outcome {
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Taken(figure) => &figure.name,
            Self::NotTaken(figure) => &figure.name,
        }
    }
}

/// The outcomes that [`write_json`] wrote; none where there is no file. Those of another release, which say other things, are left out.
///
/// # Errors
///
/// When the file cannot be read, or holds something else.
pub fn read_json(path: &Path) -> anyhow::Result<Vec<Outcome>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| path.display().to_string())?,
    };
    let values: Vec<serde_json::Value> = serde_json::from_str(&text)
        .with_context(|| format!("{} holds no figures", path.display()))?;
    Ok(values.into_iter().filter_map(|value| serde_json::from_value(value).ok()).collect())
}

/// Writes all outcomes as one JSON array.
///
/// # Errors
///
/// When the file or its directory cannot be written.
pub fn write_json(path: &Path, outcomes: &[Outcome]) -> anyhow::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    // Whole at any time: a run may end in the middle of this.
    let new = path.with_extension("json.new");
    std::fs::write(&new, serde_json::to_string_pretty(outcomes)? + "\n")?;
    std::fs::rename(new, path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_met_or_missed() {
        assert!(Bar::AtLeast(0.95).is_met_by(0.95) && !Bar::AtLeast(0.95).is_met_by(0.949));
        assert!(Bar::Below(1.0).is_met_by(0.5) && !Bar::Below(1.0).is_met_by(1.0));
        assert!(Bar::AtMost(0.03).is_met_by(0.03) && !Bar::AtMost(0.03).is_met_by(0.031));
        // A failed measurement must not count as met.
        assert!(!Bar::AtLeast(0.9).is_met_by(f64::NAN) && !Bar::Below(1.0).is_met_by(f64::NAN));
    }

    #[test]
    fn json_has_the_promised_fields() {
        let figure = Figure {
            name: "array.null.x".into(),
            taken: Taken {
                value: 0.5,
                unit: "ratio".into(),
                operands: vec![],
                cpu: Some(Cpu { per: Per::Byte, all_cores_ns: 0.25, process_ns: 0.2 }),
                runs: 5,
                retaken: 0,
                spread: Spread { lowest: 0.4, highest: 0.6 },
            },
            bar: Bar::AtLeast(0.4),
            bar_met: true,
            seconds: 12.5,
            commit: commit(),
            machine: machine(),
        };
        let json = serde_json::to_value(&figure).expect("plain data");
        for field in
            ["name", "value", "unit", "operands", "cpu", "runs", "spread", "commit", "machine"]
        {
            assert!(json.get(field).is_some(), "{field} is missing");
        }
    }
}

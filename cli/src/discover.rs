//! Drives that a cluster file leaves to be found: its enclosures are asked, and what they say comes to stand in the file.

use crate::out::say;
use anyhow::{Context, Result, bail};
use levada_enclosure::{Found, FoundDrive};
use levada_node::state;
use levada_spec::{ClusterFile, FoundEnclosure, Loaded, SoughtEnclosure, of_numbers};
use std::path::Path;

/// A cluster file with drives that were found.
pub struct Discovered {
    text: String,
    /// Of each enclosure, for people.
    told: Vec<String>,
    pub loaded: Loaded,
}

/// Asks the enclosures whose drives the cluster file at `path` does not name; `None`: it names all.
pub fn discover(path: &Path) -> Result<Option<Discovered>> {
    let text = ClusterFile::read(path)?;
    let sought = levada_spec::sought(&text);
    if sought.is_empty() {
        return Ok(None);
    }
    let mut told = Vec::new();
    let mut all = Vec::new();
    for enclosure in sought {
        let found = ask(&enclosure, &mut told)
            .with_context(|| format!("{}: enclosure {:?}", path.display(), enclosure.name))?;
        all.push((enclosure, found));
    }
    let text = levada_spec::with_found(&text, &all);
    let loaded = ClusterFile::load_as(path, &text)
        .with_context(|| format!("with the drives that were found, {}", told.join("; ")))?;
    Ok(Some(Discovered { text, told, loaded }))
}

fn ask(enclosure: &SoughtEnclosure, told: &mut Vec<String>) -> Result<FoundEnclosure> {
    let found = levada_enclosure::find_at(&enclosure.url)?;
    let found = match &found[..] {
        [] => bail!(
            "there is nothing at {} that this host may see; for targets that admit only some, `url` has host=NQN",
            enclosure.url
        ),
        [one] => one,
        several => {
            let urls: Vec<_> = several.iter().map(|one| one.url.as_str()).collect();
            bail!("there are {} subsystems; its `url` is one of {}", several.len(), urls.join(", "))
        }
    };
    let Found { url, problem: None, drives, .. } = found else {
        bail!("{}", found.problem.as_deref().unwrap_or_default());
    };
    let is_usable = |drive: &&FoundDrive| {
        drive.bytes > 0 && (drive.has_reservations || enclosure.has_power_fence)
    };
    let (usable, others): (Vec<_>, Vec<_>) = drives.iter().partition(is_usable);
    let numbers = |drives: Vec<&FoundDrive>| -> Vec<u32> {
        drives.into_iter().map(|drive| drive.namespace).collect()
    };
    let (namespaces, left_out) = (numbers(usable), numbers(others));
    let why = "without reservations, or of blocks that cannot be used";
    if namespaces.is_empty() {
        bail!("no drive of {url} can be used: {} are {why}", left_out.len());
    }
    let left_out = match left_out.len() {
        0 => String::new(),
        _ => format!("; left out, as {why}: {}", of_numbers(&left_out).join(", ")),
    };
    let (name, drives) = (&enclosure.name, of_numbers(&namespaces).join(", "));
    told.push(format!(
        "enclosure {name}: {} drives found at {url}, namespaces {drives}{left_out}",
        namespaces.len()
    ));
    Ok(FoundEnclosure { url: url.clone(), namespaces })
}

impl Discovered {
    /// Says what was found, and what becomes of it.
    pub fn tell(&self, becomes: &str) {
        for line in &self.told {
            say!("{line}");
        }
        say!("{becomes}");
    }

    /// Writes the file at `path` anew; its other contents stay.
    pub fn save(&self, path: &Path) -> Result<()> {
        let cannot = || format!("cannot write the drives that were found into {}", path.display());
        // Not in the place of a link to it.
        let place = path.canonicalize().with_context(cannot)?;
        let permissions = place.metadata().with_context(cannot)?.permissions();
        state::replace(&place, &self.text).with_context(cannot)?;
        std::fs::set_permissions(&place, permissions).with_context(cannot)
    }
}

//! Drives that a cluster file leaves to be found: its enclosures are asked, and what they say comes to stand in the file.

use crate::out::say;
use anyhow::{Context, Result, bail};
use levada_enclosure::{Found, FoundDrive};
use levada_spec::{ClusterFile, FoundEnclosure, Loaded, NvmeUrl, SoughtEnclosure, of_numbers};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

/// A cluster file with drives that were found.
pub struct Discovered {
    /// As the file was, and as it is to be.
    before: String,
    text: String,
    /// Of each enclosure, for people.
    told: Vec<String>,
    pub loaded: Loaded,
}

/// Asks the enclosures whose drives the cluster file at `path` does not name; `None`: it names all.
pub fn discover(path: &Path) -> Result<Option<Discovered>> {
    let before = ClusterFile::read(path)?;
    let sought = levada_spec::sought(&before);
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
    let text = levada_spec::with_found(&before, &all);
    let name = format!("{}, with the drives that were found", path.display());
    let loaded = ClusterFile::load_as(path, &name, &text)?;
    Ok(Some(Discovered { before, text, told, loaded }))
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
    let (url, unheard_of) = as_written(&enclosure.url, url.parse()?);
    let is_usable = |drive: &&FoundDrive| drive.is_usable(enclosure.has_power_fence);
    let (usable, others): (Vec<_>, Vec<_>) = drives.iter().partition(is_usable);
    let numbers = |drives: &[&FoundDrive]| -> Vec<u32> {
        drives.iter().map(|drive| drive.namespace).collect()
    };
    let namespaces = numbers(&usable);
    if namespaces.is_empty() {
        bail!("{url} has no drive that can be used{}", left_out(&others));
    }
    let (name, drives) = (&enclosure.name, of_numbers(&namespaces).join(", "));
    let mut line = format!(
        "enclosure {name}: {} drives found at {url}, namespaces {drives}",
        namespaces.len()
    );
    line += &left_out(&others);
    if !unheard_of.is_empty() {
        line += &format!("; its target does not tell of {}", unheard_of.join(", "));
    }
    told.push(line);
    Ok(FoundEnclosure { url: url.to_string(), namespaces })
}

/// Namespaces that cannot be drives, each kind with what is the matter; nothing where there are none.
fn left_out(drives: &[&FoundDrive]) -> String {
    let kinds = [
        ("blocks that cannot be used", ""),
        ("read-only", ""),
        (
            "no reservations",
            "; where a command can take the power of every other server, `power_fence` in [cluster] makes up for that",
        ),
    ];
    let kind_of = |drive: &FoundDrive| match drive {
        FoundDrive { bytes: 0, .. } => 0,
        FoundDrive { is_read_only: true, .. } => 1,
        FoundDrive { .. } => 2,
    };
    let told = kinds.iter().enumerate().filter_map(|(kind, (what, helps))| {
        let numbers: Vec<u32> = drives
            .iter()
            .filter(|drive| kind_of(drive) == kind)
            .map(|drive| drive.namespace)
            .collect();
        let names = of_numbers(&numbers).join(", ");
        (!numbers.is_empty()).then(|| format!("; left out: namespaces {names} ({what}){helps}"))
    });
    told.collect()
}

/// The URL that was found, with its addresses as `written` has them; and those written there of which nobody has told.
fn as_written(written: &NvmeUrl, mut found: NvmeUrl) -> (NvmeUrl, Vec<String>) {
    // A path is the first address of its name.
    let resolve = |(host, port): &(String, u16)| -> Option<SocketAddr> {
        (host.as_str(), *port).to_socket_addrs().ok()?.next()
    };
    let mut unheard_of = Vec::new();
    for address in &written.addresses {
        let meant = resolve(address);
        let told = found
            .addresses
            .iter_mut()
            .find(|told| *told == address || meant.is_some() && resolve(told) == meant);
        match told {
            Some(told) => *told = address.clone(),
            None => unheard_of.push(NvmeUrl::show_address(address)),
        }
    }
    (found, unheard_of)
}

impl Discovered {
    /// Says what was found, and what becomes of it.
    pub fn tell(&self, becomes: &str) {
        for line in &self.told {
            say!("{line}");
        }
        say!("{becomes}");
    }

    /// Writes the file at `path` anew, unless it has been changed since it was read. All else about it stays.
    pub fn save(&self, path: &Path) -> Result<()> {
        if ClusterFile::read(path)? != self.before {
            bail!("{} has been changed meanwhile: try again", path.display());
        }
        self.replace(path).with_context(|| {
            format!(
                "cannot write the drives that were found into {}, which `levada plan` shows",
                path.display()
            )
        })
    }

    fn replace(&self, path: &Path) -> std::io::Result<()> {
        // Not in the place of a link to it.
        let place = path.canonicalize()?;
        let old = place.metadata()?;
        let mut fresh = place.clone().into_os_string();
        fresh.push(".new");
        // Of one that was interrupted.
        let _ = fs::remove_file(&fresh);
        let written = || {
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
            let made = file.metadata()?;
            if (made.uid(), made.gid()) != (old.uid(), old.gid()) {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
            }
            file.set_permissions(old.permissions())?;
            file.write_all(self.text.as_bytes())?;
            // Before its name: a file system may keep the rename and lose what was written.
            file.sync_all()?;
            fs::rename(&fresh, &place)
        };
        written().inspect_err(|_| drop(fs::remove_file(&fresh)))?;
        File::open(place.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_stay_as_they_were_written() {
        let url = |text: &str| text.parse::<NvmeUrl>().expect("a URL");
        let written = url(
            "nvme+tcp://127.1:4420,192.0.2.7:8009/nqn.2014-08.org.nvmexpress.discovery?ddgst=1",
        );
        let found = url("nvme+tcp://192.0.2.9:4420,127.0.0.1:4420/nqn.x?ddgst=1");
        let (url, unheard_of) = as_written(&written, found);
        assert_eq!(url.to_string(), "nvme+tcp://192.0.2.9:4420,127.1:4420/nqn.x?ddgst=1");
        assert_eq!(unheard_of, ["192.0.2.7:8009"]);
    }

    #[test]
    fn what_cannot_be_used_is_told_kind_by_kind() {
        let drive = |namespace, bytes, is_read_only| FoundDrive {
            namespace,
            bytes,
            block_bytes: 4096,
            has_reservations: false,
            is_read_only,
        };
        let drives =
            [drive(1, 1, false), drive(2, 1, false), drive(3, 0, false), drive(4, 1, true)];
        let told = left_out(&drives.iter().collect::<Vec<_>>());
        let (blocks, read_only) = ("namespaces 3 (blocks", "namespaces 4 (read-only)");
        assert!(told.contains(blocks) && told.contains(read_only), "{told}");
        assert!(told.contains("namespaces {1..2} (no reservations)"), "{told}");
        assert!(told.contains("`power_fence`"), "{told}");
        assert_eq!(left_out(&[]), "");
    }

    #[test]
    fn a_file_that_is_changed_meanwhile_is_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let (at, link) = (dir.path().join("levada.toml"), dir.path().join("link.toml"));
        std::os::unix::fs::symlink(&at, &link).expect("made");
        let cluster = ClusterFile::box_default(Path::new("box"), 40 << 30).expect("room enough");
        fs::write(&at, cluster.to_toml()).expect("written");
        let loaded = ClusterFile::load(&at).expect("a cluster file");
        let found = Discovered {
            before: cluster.to_toml(),
            text: "found".into(),
            told: Vec::new(),
            loaded,
        };
        let mode = |bits| {
            fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(bits))
                .expect("set");
        };
        mode(0o640);
        fs::write(&at, "changed").expect("written");
        let why = found.save(&link).expect_err("changed").to_string();
        assert!(why.contains("has been changed meanwhile"), "{why}");
        fs::write(&at, &found.before).expect("written");
        found.save(&link).expect("saved");
        assert_eq!(fs::read_to_string(&at).expect("read"), "found");
        assert_eq!(at.metadata().expect("there").mode() & 0o777, 0o640);
        assert!(link.symlink_metadata().expect("there").is_symlink());
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 2);
    }
}

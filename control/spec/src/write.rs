//! Values back to text, with a comment wherever a reader would ask.
//!
//! What always holds: the text of a checked value parses back to the same value.

use std::fmt::Write as _;
use std::path::Path;

use crate::file::{
    ClusterFile, DriveSpec, ExportWay, GuestCacheSpec, Level, ModelSpec, ParityKind, SliceSize,
    Spread, TestingSpec, Wrapper,
};
use crate::survive::Required;
use crate::{Bytes, Survival};

/// A text as TOML writes it. Paths that are not UTF-8 cannot come from a cluster file.
fn quoted(text: &str) -> String {
    toml_edit::Value::from(text).to_string()
}

fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

fn size(bytes: Bytes) -> String {
    quoted(&bytes.to_string())
}

impl ClusterFile {
    /// The file's text, commented. Defaults are written out, so that they can be seen.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let survival: Survival = self.survives();
        writeln!(
            out,
            "# The cluster file of Levada: what should exist. Every key: docs/cluster-file.md."
        )?;
        writeln!(
            out,
            "# Relative paths start at this file. Its file systems survive the loss of {survival}."
        )?;
        writeln!(out, "\n[cluster]\nname = {}", quoted(&self.name))?;
        writeln!(out, "# Sockets, process id and log of the node.")?;
        writeln!(out, "state_dir = {}", quoted_path(&self.state_dir))?;
        if let Some(command) = &self.power_fence {
            writeln!(out, "power_fence = {}", quoted(command))?;
        }
        if self.network_cores > 0 {
            writeln!(out, "network_cores = {}", self.network_cores)?;
        }
        if self.ring_cores > 0 {
            writeln!(out, "ring_cores = {}", self.ring_cores)?;
        }
        for host in &self.hosts {
            let addresses: Vec<String> =
                host.addresses.iter().map(|address| quoted(address)).collect();
            writeln!(
                out,
                "\n[[host]]\nname = {}\naddresses = [{}]",
                quoted(&host.name),
                addresses.join(", ")
            )?;
        }
        let common = self.common_file_size();
        if let Some(common) = common {
            writeln!(
                out,
                "\n[drives]\n# Of each drive that is a file; block devices (paths under /dev) have their own."
            )?;
            writeln!(out, "size = {}", size(common))?;
        }
        writeln!(
            out,
            "\n# Drives in one enclosure may fail together. A drive is named after its path."
        )?;
        for enclosure in &self.enclosures {
            writeln!(out, "[[enclosure]]\nname = {}", quoted(&enclosure.name))?;
            if let Some(host) = &enclosure.host {
                writeln!(out, "host = {}", quoted(host))?;
            }
            if let Some(url) = &enclosure.url {
                writeln!(out, "# Its drives are namespaces.\nurl = {}", quoted(&url.to_string()))?;
            }
            let drives = self.drives.iter().filter(|drive| drive.enclosure == enclosure.name);
            let drives: Vec<String> = drives.map(|drive| drive_entry(drive, common)).collect();
            if drives.len() <= 2 {
                writeln!(out, "drives = [{}]\n", drives.join(", "))?;
            } else {
                writeln!(out, "drives = [\n    {},\n]\n", drives.join(",\n    "))?;
            }
        }
        if !self.spares.is_empty() {
            let spares: Vec<String> = self.spares.iter().map(|name| quoted(name)).collect();
            writeln!(out, "# Drives of no array, for whichever loses one.\n[spares]")?;
            writeln!(out, "drives = [{}]\n", spares.join(", "))?;
        }
        writeln!(
            out,
            "[rebuild]\n# Bytes per second of a rebuild beside other work, on all drives of the array together."
        )?;
        writeln!(out, "floor = {}", size(self.rebuild.floor))?;
        if let Some(ceiling) = self.rebuild.ceiling {
            writeln!(out, "ceiling = {}", size(ceiling))?;
        }
        writeln!(
            out,
            "# Seconds that a drive which vanished is waited for before a spare takes its place.\ngrace_s = {}",
            self.rebuild.grace_s
        )?;
        writeln!(
            out,
            "\n[scrub]\n# Bytes per second of a scrub beside other work, on all drives of an array together."
        )?;
        writeln!(out, "floor = {}", size(self.scrub.floor))?;
        if let Some(ceiling) = self.scrub.ceiling {
            writeln!(out, "ceiling = {}", size(ceiling))?;
        }
        writeln!(
            out,
            "\n[health]\n# A drive that has used so much of its endurance is worn.\nused_percent = {}",
            self.health.used_percent
        )?;
        writeln!(out)?;
        self.write_arrays(out)?;
        self.write_filesystems(out)?;
        self.testing.as_ref().map_or(Ok(()), |testing| write_testing(out, testing))
    }

    /// The size that most file-backed drives have.
    fn common_file_size(&self) -> Option<Bytes> {
        let sizes = || self.drives.iter().filter_map(|drive| drive.size);
        let mut distinct: Vec<Bytes> = sizes().collect();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.into_iter().max_by_key(|size| sizes().filter(|other| other == size).count())
    }

    fn write_arrays(&self, out: &mut String) -> std::fmt::Result {
        for array in &self.arrays {
            writeln!(out, "# Survives {}.", array.survives(self))?;
            writeln!(
                out,
                "[[array]]\nname = {}\nlevel = {}",
                quoted(&array.name),
                quoted(array.level.name())
            )?;
            match array.level {
                Level::Raid0 { chunk } => writeln!(out, "chunk = {}", size(chunk))?,
                Level::Raid1 { copies, spread } => {
                    let spread = match spread {
                        Spread::Enclosure => "enclosure",
                        Spread::Drive => "drive",
                    };
                    writeln!(
                        out,
                        "copies = {copies}\n# No two copies of an extent share one of these."
                    )?;
                    writeln!(out, "spread = {}", quoted(spread))?;
                }
                Level::Parity { kind, data, chunk } => {
                    match kind {
                        ParityKind::Raid5 | ParityKind::Raid6 => {}
                        ParityKind::Raid50 { groups } | ParityKind::Raid60 { groups } => {
                            writeln!(out, "# Each of so many drives.\ngroups = {groups}")?;
                        }
                        ParityKind::NPlusM { parity } => writeln!(out, "parity = {parity}")?,
                    }
                    let joined = match kind.parity() {
                        1 => "one parity chunk joins",
                        2 => "two parity chunks join",
                        _ => "the parity chunks join",
                    };
                    writeln!(out, "# Data chunks per stripe; {joined} them.\ndata = {data}")?;
                    writeln!(out, "chunk = {}", size(chunk))?;
                }
            }
            writeln!(
                out,
                "# Drives that wait to replace a lost member.\nspares = {}",
                array.spares
            )?;
            writeln!(out, "# Of each drive: a size, a share (\"12%\") or the \"rest\".")?;
            match array.slice {
                SliceSize::Bytes(bytes) => writeln!(out, "slice = {}", size(bytes))?,
                SliceSize::Percent(percent) => writeln!(out, "slice = \"{percent}%\"")?,
                SliceSize::Rest => writeln!(out, "slice = \"rest\"")?,
            }
            let all = self.drives.iter().map(|drive| &drive.name);
            if !array.drives.iter().eq(all.filter(|name| !self.spares.contains(name))) {
                let drives: Vec<String> = array.drives.iter().map(|name| quoted(name)).collect();
                writeln!(out, "drives = [{}]", drives.join(", "))?;
            }
            write_required(out, array.required)?;
            writeln!(out)?;
        }
        Ok(())
    }

    fn write_filesystems(&self, out: &mut String) -> std::fmt::Result {
        for filesystem in &self.filesystems {
            writeln!(out, "[[filesystem]]\nname = {}", quoted(&filesystem.name))?;
            writeln!(out, "# Arrays for file data, and for names, indexes and intent logs.")?;
            writeln!(
                out,
                "data = {}\nmetadata = {}",
                quoted(&filesystem.data),
                quoted(&filesystem.metadata)
            )?;
            writeln!(out, "object_targets = {}", filesystem.object_targets)?;
            writeln!(out, "metadata_targets = {}", filesystem.metadata_targets)?;
            writeln!(
                out,
                "# New files: so many bytes in one object, then the next; so many objects."
            )?;
            writeln!(out, "stripe_unit = {}", size(filesystem.stripe_unit))?;
            writeln!(out, "stripe_count = {}", filesystem.stripe_count)?;
            write_required(out, filesystem.required)?;
            writeln!(out)?;
        }
        for mount in &self.mounts {
            writeln!(out, "[[mount]]\npath = {}", quoted_path(&mount.path))?;
            writeln!(out, "filesystem = {}", quoted(&mount.filesystem))?;
            if let Some(host) = &mount.host {
                writeln!(out, "host = {}", quoted(host))?;
            }
            writeln!(out)?;
        }
        for export in &self.exports {
            writeln!(out, "[[export]]\ntenant = {}", quoted(&export.tenant))?;
            match &export.way {
                ExportWay::Nbd { address, tls, verify_clients } => {
                    writeln!(out, "nbd = {}", quoted(address))?;
                    if let Some(tls) = tls {
                        writeln!(out, "tls = {}", quoted_path(tls))?;
                        writeln!(out, "verify_clients = {verify_clients}")?;
                    }
                }
                ExportWay::Vhost { directory } => {
                    writeln!(out, "vhost = {}", quoted_path(directory))?;
                }
                ExportWay::Virtiofs { socket, subtree, tag, cache } => {
                    writeln!(out, "virtiofs = {}", quoted_path(socket))?;
                    writeln!(out, "subtree = {}", quoted(&subtree.to_string()))?;
                    if let Some(tag) = tag {
                        writeln!(out, "tag = {}", quoted(tag))?;
                    }
                    if *cache == GuestCacheSpec::Open {
                        writeln!(out, "cache = {}", quoted(&cache.to_string()))?;
                    }
                }
                ExportWay::Nvme { addresses, hosts, keys, tls_only } => {
                    let list = |texts: &[String]| {
                        texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", ")
                    };
                    writeln!(out, "nvme = [{}]", list(addresses))?;
                    if !hosts.is_empty() {
                        writeln!(out, "hosts = [{}]", list(hosts))?;
                    }
                    if let Some(keys) = keys {
                        writeln!(out, "keys = {}", quoted_path(keys))?;
                    }
                    if *tls_only {
                        writeln!(out, "tls_only = true")?;
                    }
                }
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

fn write_required(out: &mut String, required: Required) -> std::fmt::Result {
    match required.is_any() {
        true => writeln!(out, "# At least; refused otherwise.\nsurvives = {required}"),
        false => Ok(()),
    }
}

/// One entry of `drives`: the bare path or number where it says everything.
fn drive_entry(drive: &DriveSpec, common: Option<Bytes>) -> String {
    if let Some(namespace) = drive.namespace() {
        let written =
            drive.name.strip_prefix(&drive.enclosure).and_then(|name| name.strip_prefix('-'));
        return match written.filter(|written| written.parse() == Ok(namespace)) {
            Some(number) => quoted(number),
            None => format!("{{ name = {}, namespace = {namespace} }}", quoted(&drive.name)),
        };
    }
    let last = drive.path.file_name().map(|last| last.to_string_lossy()).unwrap_or_default();
    let named_after_path = last.strip_suffix(".img").unwrap_or(&last) == drive.name;
    let own_size = drive.size.filter(|size| Some(*size) != common);
    match (named_after_path, own_size) {
        (true, None) => quoted_path(&drive.path),
        (_, own_size) => {
            let size = own_size.map(|own| format!(", size = {}", size(own))).unwrap_or_default();
            format!(
                "{{ name = {}, path = {}{size} }}",
                quoted(&drive.name),
                quoted_path(&drive.path)
            )
        }
    }
}

fn write_testing(out: &mut String, testing: &TestingSpec) -> std::fmt::Result {
    writeln!(
        out,
        "# For tests and measurements only: never with data that anyone wants to keep.\n[testing]"
    )?;
    let wrapper = match testing.wrapper {
        Wrapper::None => "none",
        Wrapper::Volatile => "volatile",
    };
    writeln!(out, "wrapper = {}\nseed = {}", quoted(wrapper), testing.seed)?;
    let Some(model) = &testing.model else {
        return Ok(());
    };
    writeln!(out, "model = {}", quoted(&model.name))?;
    if ModelSpec::named(&model.name).as_ref() != Some(model) {
        writeln!(
            out,
            "\n[[testing.models]]\nname = {}\nrate = {}",
            quoted(&model.name),
            size(model.rate)
        )?;
        writeln!(
            out,
            "iops = {}\nlatency_us = {}\nflush_us = {}",
            model.iops, model.latency_us, model.flush_us
        )?;
    }
    Ok(())
}

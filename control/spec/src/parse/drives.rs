//! `[[enclosure]]`: where drives are, on a host or on the network.

use super::is_device_path;
use crate::file::{ClusterFile, DriveSpec, EnclosureSpec};
use crate::reader::{Node, Reader, Table, is_name};
use crate::remote::{EnclosureUrl, NAMESPACE_MOST, UrlError, is_url};
use crate::{Bytes, ProblemKind, pattern};
use levada_nvme::UrlError as NvmeUrlError;
use std::ops::Range;
use std::path::Path;
use toml_edit::{Item, Value};

/// More drives than this is a slip of a pattern, not a cluster.
const DRIVES_MAX: usize = 4096;
/// The longest name of a drive, in bytes: superblocks keep it whole.
const DRIVE_NAME_MOST: usize = 28;
/// Keys of an enclosure on a host.
const LOCAL_KEYS: &[&str] = &["host", "size"];
const DRIVE_KEYS: &[&str] = &["name", "path", "size"];
const NAMESPACE_KEYS: &[&str] = &["name", "namespace"];

impl Reader<'_> {
    pub(super) fn enclosure(
        &mut self,
        table: Table<'_>,
        all_files_size: Option<Bytes>,
        only_host: Option<&str>,
        cluster: &mut ClusterFile,
    ) {
        let name = self.name(table).unwrap_or_default();
        if table.keys.contains_key("url") {
            return self.remote_enclosure(table, name, cluster);
        }
        let host = self.text_of(table, "host").or_else(|| only_host.map(String::from));
        let own_size = self.size_or_stand_in(table);
        if !table.keys.contains_key("drives") {
            let example = "drives = [\"/dev/nvme{0..11}n1\"]";
            self.problem_at(
                ProblemKind::MissingKey { key: "drives", table: table.title, example },
                table.node,
                "",
            );
        }
        for (value, span) in self.list(table, "drives") {
            self.drive_entry(&value, span, (own_size, all_files_size), &name, cluster);
        }
        cluster.enclosures.push(EnclosureSpec { name, host, url: None });
    }

    /// One whose drives are namespaces that are reached over the network.
    fn remote_enclosure(&mut self, table: Table<'_>, name: String, cluster: &mut ClusterFile) {
        for key in LOCAL_KEYS {
            if table.keys.contains_key(key) {
                self.problem_at(ProblemKind::KeyNotForUrl { key }, table.node, key);
            }
        }
        let is_sought = !table.keys.contains_key("drives");
        if is_sought {
            self.problem_at(
                ProblemKind::DrivesNotFound { enclosure: name.clone() },
                table.node,
                "",
            );
        }
        let url = self.text_of(table, "url").and_then(|text| match text.parse() {
            Ok(url) => Some(url),
            // It is where to ask.
            Err(UrlError::Discovery | UrlError::Url(NvmeUrlError::NoSubsystem)) if is_sought => {
                None
            }
            Err(reason) => {
                self.problem_at(ProblemKind::BadUrl { text, reason }, table.node, "url");
                None
            }
        });
        if let Some(url) = &url {
            for (value, span) in self.list(table, "drives") {
                self.namespace_entry(&value, span, url, &name, cluster);
            }
        }
        cluster.enclosures.push(EnclosureSpec { name, host: None, url });
    }

    /// One entry of `drives` on the network: numbers of namespaces, or { name, namespace }, perhaps patterns.
    fn namespace_entry(
        &mut self,
        value: &Value,
        span: Option<Range<usize>>,
        url: &EnclosureUrl,
        enclosure: &str,
        cluster: &mut ClusterFile,
    ) {
        let first = Node::Drive(cluster.drives.len());
        self.place(first, "", span.clone());
        let number_of = |value: &Value| match value {
            Value::String(pattern) => Some(pattern.value().clone()),
            Value::Integer(number) => Some(number.value().to_string()),
            _ => None,
        };
        let expected = "the number of a namespace, or { name = \"...\", namespace = ... }";
        let (name_pattern, numbers) = match value {
            Value::InlineTable(keys) => {
                let table = self.enter(first, "a drive", keys, span.clone(), NAMESPACE_KEYS);
                self.needs(table, "namespace", "namespace = 1");
                let Some(namespace) = keys.get("namespace") else { return };
                (self.text_of(table, "name"), number_of(namespace))
            }
            other => (None, number_of(other)),
        };
        let Some(numbers) = numbers else {
            return self.wrong_type("drives", &Item::Value(value.clone()), expected, span);
        };
        let Some(numbers) = self.expand(&numbers, span.clone()) else { return };
        let names = match &name_pattern {
            None => numbers.iter().map(|number| format!("{enclosure}-{number}")).collect(),
            Some(pattern) => match self.expand(pattern, span.clone()) {
                Some(names) if names.len() == numbers.len() => names,
                Some(names) => {
                    let (names, paths) = (names.len(), numbers.len());
                    let reason = pattern::PatternError::UnequalCounts { names, paths };
                    let text = pattern.clone();
                    return self.problem(ProblemKind::BadPattern { text, reason }, span);
                }
                None => return,
            },
        };
        if cluster.drives.len() + numbers.len() > DRIVES_MAX {
            return self.problem(ProblemKind::TooManyDrives { most: DRIVES_MAX }, span);
        }
        for (number, name) in numbers.into_iter().zip(names) {
            let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
            let known = number.parse().ok().filter(|known| (1..=NAMESPACE_MOST).contains(known));
            let Some(known) = known.filter(|_| is_number) else {
                // One word about a pattern is enough.
                return self.problem(ProblemKind::NoNamespace { text: number }, span);
            };
            self.place(Node::Drive(cluster.drives.len()), "", span.clone());
            if !is_name(&name, DRIVE_NAME_MOST) {
                let kind = ProblemKind::BadName { name: name.clone(), most: DRIVE_NAME_MOST };
                self.problem(kind, span.clone());
            }
            let path = url.namespace(known).into();
            cluster.drives.push(DriveSpec { name, path, enclosure: enclosure.into(), size: None });
        }
    }

    /// One entry of an enclosure's `drives`: a path or { name, path, size }, perhaps a pattern.
    fn drive_entry(
        &mut self,
        value: &Value,
        span: Option<Range<usize>>,
        (enclosure_size, all_files_size): (Option<Bytes>, Option<Bytes>),
        enclosure: &str,
        cluster: &mut ClusterFile,
    ) {
        // All drives of one entry share the place of the entry.
        let first = Node::Drive(cluster.drives.len());
        self.place(first, "", span.clone());
        let (name_pattern, path_pattern, own_size) = match value {
            Value::String(path) => (None, path.value().clone(), None),
            Value::InlineTable(keys) => {
                let table = self.enter(first, "a drive", keys, span.clone(), DRIVE_KEYS);
                let name = self.text_of(table, "name");
                let size = self.size_or_stand_in(table);
                match self.needed_text(table, "path", "path = \"/dev/nvme0n1\"") {
                    Some(path) => (name, path, size),
                    None => return,
                }
            }
            other => {
                let expected = "a path, or { name = \"...\", path = \"...\" }";
                return self.wrong_type("drives", &Item::Value(other.clone()), expected, span);
            }
        };
        if is_url(&path_pattern) {
            return self.problem(ProblemKind::PathIsUrl { text: path_pattern }, span);
        }
        let Some(paths) = self.expand(&path_pattern, span.clone()) else {
            return;
        };
        let names = match &name_pattern {
            None => None,
            Some(pattern) => match self.expand(pattern, span.clone()) {
                Some(names) if names.len() == paths.len() => Some(names),
                Some(names) => {
                    let reason = pattern::PatternError::UnequalCounts {
                        names: names.len(),
                        paths: paths.len(),
                    };
                    return self
                        .problem(ProblemKind::BadPattern { text: pattern.clone(), reason }, span);
                }
                None => return,
            },
        };
        if cluster.drives.len() + paths.len() > DRIVES_MAX {
            return self.problem(ProblemKind::TooManyDrives { most: DRIVES_MAX }, span);
        }
        for (index, path) in paths.into_iter().enumerate() {
            let node = Node::Drive(cluster.drives.len());
            self.place(node, "", span.clone());
            let name = match &names {
                Some(names) => names[index].clone(),
                None => {
                    let last =
                        Path::new(&path).file_name().and_then(|last| last.to_str()).unwrap_or("");
                    last.strip_suffix(".img").unwrap_or(last).to_string()
                }
            };
            if !is_name(&name, DRIVE_NAME_MOST) {
                let kind = match &names {
                    Some(_) => ProblemKind::BadName { name: name.clone(), most: DRIVE_NAME_MOST },
                    None if name.len() > DRIVE_NAME_MOST => {
                        ProblemKind::BadName { name: name.clone(), most: DRIVE_NAME_MOST }
                    }
                    None => ProblemKind::NamelessDrive { path: path.clone() },
                };
                self.problem(kind, span.clone());
            }
            let size = match (is_device_path(&path), own_size) {
                (true, None) => None,
                (true, Some(_)) => {
                    self.problem(ProblemKind::SizeOfDevice { drive: name.clone() }, span.clone());
                    None
                }
                // A program's missing size is found by `check`; here one word per entry is enough.
                (false, own) => match own.or(enclosure_size).or(all_files_size) {
                    None if index == 0 => {
                        self.problem(
                            ProblemKind::FileNeedsSize { drive: name.clone() },
                            span.clone(),
                        );
                        None
                    }
                    size => size,
                },
            };
            let enclosure_node = Node::Enclosure(cluster.enclosures.len());
            match (own_size, enclosure_size) {
                (Some(_), _) => self.place_as(node, "size", first),
                (None, Some(_)) => self.place_as(node, "size", enclosure_node),
                (None, None) => self.place_as(node, "size", Node::Drives),
            }
            cluster.drives.push(DriveSpec {
                name,
                path: path.into(),
                enclosure: enclosure.into(),
                size,
            });
        }
    }
}

//! `[[array]]`: its level, its drives, and what it has to survive.

use crate::error::nearest;
use crate::file::{
    ArraySpec, ClusterFile, Level, ParityKind, STRIPE_CHUNKS_MAX, SliceSize, Spread,
};
use crate::reader::{Node, Reader, Table};
use crate::survive::Required;
use crate::{Bytes, ProblemKind};
use std::collections::HashSet;
use toml_edit::{Item, Value};

/// Groups of one chunk of data and one of parity each fill an array.
const GROUPS_MOST: u64 = 27;
const SURVIVES_KEYS: &[&str] = &["drives", "enclosures", "paths", "hosts", "servers"];
const RAID0_KEYS: &[&str] = &["chunk"];
const RAID1_KEYS: &[&str] = &["copies", "spread"];
const PARITY_KEYS: &[&str] = &["data", "chunk"];
const GROUPED_KEYS: &[&str] = &["groups", "data", "chunk"];
const N_PLUS_M_KEYS: &[&str] = &["parity", "data", "chunk"];
/// Keys that belong to some levels.
const LEVEL_KEYS: &[&str] = &["copies", "spread", "groups", "parity", "data", "chunk"];
const LEVELS: &[(&str, &[&str])] = &[
    ("raid0", RAID0_KEYS),
    ("raid1", RAID1_KEYS),
    ("raid10", RAID1_KEYS),
    ("raid5", PARITY_KEYS),
    ("raid6", PARITY_KEYS),
    ("raid50", GROUPED_KEYS),
    ("raid60", GROUPED_KEYS),
    ("n+m", N_PLUS_M_KEYS),
];
const CHUNK_DEFAULT: Bytes = Bytes::kib(128);

impl Reader<'_> {
    pub(super) fn array(&mut self, table: Table<'_>, cluster: &ClusterFile) -> ArraySpec {
        let name = self.name(table).unwrap_or_default();
        let spares = self.number(table, "spares", 0, 1000).unwrap_or(0) as u32;
        let drives = match table.keys.contains_key("drives") {
            false => {
                let names = cluster.drives.iter().map(|drive| drive.name.clone());
                names.filter(|name| !cluster.spares.contains(name)).collect()
            }
            true => self.listed_drives(table, cluster),
        };
        let level = self.level(table, drives.len(), spares);
        let slice = self.slice(table);
        let required = self.required(table);
        ArraySpec { name, level, slice, spares, drives, required }
    }

    /// What `survives` asks for.
    pub(super) fn required(&mut self, table: Table<'_>) -> Required {
        let Some(item) = table.keys.get("survives") else {
            return Required::default();
        };
        let Some(keys) = item.as_table_like() else {
            let expected = "a table such as { drives = 2, enclosures = 1, paths = 1 }";
            self.wrong_type("survives", item, expected, item.span());
            return Required::default();
        };
        let inner = Table { keys, title: "`survives`", ..table };
        for (key, item) in keys.iter() {
            if !SURVIVES_KEYS.contains(&key) {
                let nearest = nearest(key, SURVIVES_KEYS.iter().copied());
                let span = keys.key(key).and_then(toml_edit::Key::span).or_else(|| item.span());
                let (key, table, allowed) = (key.into(), inner.title, SURVIVES_KEYS);
                self.problem(ProblemKind::UnknownKey { key, table, nearest, allowed }, span);
            }
        }
        let mut count = |key| self.number(inner, key, 0, 4096).map(|count| count as u32);
        Required {
            drives: count("drives"),
            enclosures: count("enclosures"),
            paths: count("paths"),
            hosts: count("hosts"),
            servers: count("servers"),
        }
    }

    /// The drives that `drives` names, in cluster order.
    pub(super) fn listed_drives(&mut self, table: Table<'_>, cluster: &ClusterFile) -> Vec<String> {
        let mut wanted = HashSet::new();
        for (value, span) in self.list(table, "drives") {
            let Some(text) = value.as_str() else {
                self.wrong_type("drives", &Item::Value(value), "a list of drive names", span);
                continue;
            };
            for drive in self.expand(text, span.clone()).unwrap_or_default() {
                if cluster.drive(&drive).is_none() {
                    if self.places.in_doubt(&[Node::File, Node::Drives]) {
                        continue;
                    }
                    let known: Vec<String> =
                        cluster.drives.iter().map(|drive| drive.name.clone()).collect();
                    let near = nearest(&drive, known.iter().map(String::as_str)).map(String::from);
                    let kind = ProblemKind::UnknownName {
                        what: "drive",
                        name: drive,
                        nearest: near,
                        known,
                    };
                    self.problem(kind, span.clone());
                    // One word about a pattern is enough.
                    break;
                }
                if !wanted.insert(drive.clone()) {
                    let what = if table.node == Node::Spares { "spare" } else { "member" };
                    let kind = ProblemKind::DuplicateName { what, name: drive, first_line: None };
                    self.problem(kind, span.clone());
                    break;
                }
            }
        }
        let all = cluster.drives.iter().map(|drive| drive.name.clone());
        all.filter(|name| wanted.contains(name)).collect()
    }

    fn level(&mut self, table: Table<'_>, drives: usize, spares: u32) -> Level {
        let unknown = Level::Raid0 { chunk: CHUNK_DEFAULT };
        let Some(word) = self.needed_text(table, "level", "level = \"raid6\"") else {
            return unknown;
        };
        let Some(&(level, allowed)) = LEVELS.iter().find(|(level, _)| *level == word) else {
            let levels = LEVELS.iter().map(|(level, _)| (*level).to_string()).collect();
            self.bad_choice(table, "level", word, levels);
            return unknown;
        };
        for key in LEVEL_KEYS {
            if table.keys.contains_key(key) && !allowed.contains(key) {
                // The marker belongs under the key here: its value may be fine.
                let span = table.keys.get_key_value(key).and_then(|(key, _)| key.span());
                self.problem(ProblemKind::KeyNotForLevel { key, level, allowed }, span);
            }
        }
        let kind = match level {
            "raid0" => {
                return Level::Raid0 { chunk: self.size(table, "chunk").unwrap_or(CHUNK_DEFAULT) };
            }
            "raid1" | "raid10" => return self.mirror(table, level, drives, spares),
            "raid5" => ParityKind::Raid5,
            "raid6" => ParityKind::Raid6,
            "raid50" | "raid60" => {
                let groups = self.number(table, "groups", 2, GROUPS_MOST).unwrap_or(2) as u32;
                match level {
                    "raid50" => ParityKind::Raid50 { groups },
                    _ => ParityKind::Raid60 { groups },
                }
            }
            _ => {
                let parity = self.needed_number(table, "parity", 1, 4, "parity = 3") as u32;
                ParityKind::NPlusM { parity }
            }
        };
        let chunk = self.size(table, "chunk").unwrap_or(CHUNK_DEFAULT);
        // Every drive that is neither parity nor spare holds data.
        let roles = drives.saturating_sub(spares as usize) as u64;
        let others = (roles / u64::from(kind.groups())).saturating_sub(u64::from(kind.parity()));
        let least = if kind == ParityKind::Raid6 { 2 } else { 1 };
        let most = u64::from(STRIPE_CHUNKS_MAX - kind.parity());
        let data = self.number(table, "data", least, most).unwrap_or(others).max(least) as u32;
        Level::Parity { kind, data, chunk }
    }

    fn mirror(
        &mut self,
        table: Table<'_>,
        level: &'static str,
        drives: usize,
        spares: u32,
    ) -> Level {
        let copies_default = if level == "raid10" { 2 } else { 3 };
        let copies = self.number(table, "copies", 2, 8).unwrap_or(copies_default) as u32;
        let spread = match self.text_of(table, "spread").as_deref() {
            None | Some("enclosure") => Spread::Enclosure,
            Some("drive") => Spread::Drive,
            Some(other) => {
                let allowed = vec!["enclosure".into(), "drive".into()];
                self.bad_choice(table, "spread", other.into(), allowed);
                Spread::Drive
            }
        };
        // With as many drives as copies it would be a plain mirror; with fewer none, which is said of both.
        if level == "raid10" && drives == (copies + spares) as usize {
            let mut parts = vec![(u64::from(copies), "copies"), (1, "more to stripe over")];
            parts.extend((spares > 0).then_some((u64::from(spares), "spares")));
            let array = self.text_of(table, "name").unwrap_or_default();
            let needed = parts.iter().map(|(count, _)| count).sum();
            let kind = ProblemKind::TooFewDrives { array, level, parts, needed, drives };
            self.problem_at(kind, table.node, "level");
        }
        Level::Raid1 { copies, spread }
    }

    fn slice(&mut self, table: Table<'_>) -> SliceSize {
        let Some(item) = table.keys.get("slice") else {
            return SliceSize::Rest;
        };
        let text = match item {
            Item::Value(Value::String(text)) => text.value().trim().to_string(),
            Item::Value(Value::Integer(_)) => {
                return self.size(table, "slice").map_or(SliceSize::Rest, SliceSize::Bytes);
            }
            other => {
                self.wrong_type(
                    "slice",
                    other,
                    "a text such as \"256MiB\", \"12%\" or \"rest\"",
                    other.span(),
                );
                return SliceSize::Rest;
            }
        };
        if text == "rest" {
            return SliceSize::Rest;
        }
        if let Some(percent) = text.strip_suffix('%') {
            if let Ok(percent @ 1..=99) = percent.trim().parse::<u8>() {
                return SliceSize::Percent(percent);
            }
        } else if let Ok(bytes) = text.parse() {
            return SliceSize::Bytes(bytes);
        }
        self.problem(ProblemKind::BadSlice { text }, item.span());
        SliceSize::Rest
    }
}

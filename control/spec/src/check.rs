//! Looks at the whole file: names that must exist or differ, drives listed twice,
//! geometries that cannot be, and layouts that lose more than their owner may think.
//!
//! What always holds: a file without errors here can be turned into arrays by arithmetic
//! alone, once the sizes of its block devices are known.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::error::nearest;
use crate::file::{
    ARRAY_DRIVES_MAX, ArraySpec, ClusterFile, DRIVE_RESERVED_BYTES, ExportWay, FileSystemSpec,
    Level, SLICE_ALIGN_BYTES, STRIPE_CHUNKS_MAX, SliceSize, Spread,
};
use crate::parse::{
    CHUNK_LEAST, CHUNK_MOST, STRIPE_UNIT_MOST, STRIPE_UNIT_STEP, UNIX_ADDRESS, is_device_path,
    plain_path,
};
use crate::reader::{Node, Places};
use crate::survive::Shortfall;
use crate::{Bytes, Problem, ProblemKind, Severity, SubtreePath};

/// The least slice that can hold a superblock, its areas and some data.
const SLICE_LEAST: Bytes = Bytes::mib(16);

/// Gives the one path of a file that has several; the written path when nothing is known.
pub(crate) type SameFile<'a> = &'a dyn Fn(&Path) -> PathBuf;

/// Everything wrong or doubtful in a file whose parts were read.
pub(crate) fn check(cluster: &ClusterFile, places: &Places, same_file: SameFile) -> Vec<Problem> {
    let mut checker = Checker { cluster, places, problems: Vec::new() };
    checker.names();
    checker.hosts();
    checker.paths(same_file);
    // What arrays take of drives means nothing while a name may mean two of them.
    let drives_differ = checker.problems.iter().all(|problem| {
        !matches!(
            problem.kind,
            ProblemKind::DriveTwice { .. }
                | ProblemKind::DuplicateName { what: "drive" | "enclosure", .. }
        )
    });
    checker.drive_sizes();
    let drives_known = drives_differ && !places.in_doubt(&[Node::File, Node::Drives]);
    for (index, array) in cluster.arrays.iter().enumerate() {
        if drives_known && !places.in_doubt(&[Node::Array(index)]) {
            checker.array(index, array);
        }
    }
    let arrays_in_doubt =
        (0..cluster.arrays.len()).any(|index| places.in_doubt(&[Node::Array(index)]));
    if drives_known && !arrays_in_doubt {
        checker.slices();
    }
    checker.filesystems();
    checker.exports();
    checker.subtrees();
    let is_sound = |problem: &Problem| problem.kind.severity() == Severity::Warning;
    if drives_known && !arrays_in_doubt && checker.problems.iter().all(is_sound) {
        checker.survival();
    }
    if cluster.testing.is_some() {
        checker.problem(ProblemKind::TestingOn, Node::Testing, "");
    }
    checker.problems
}

/// Where an export is found: what only one can have.
#[derive(PartialEq, Eq)]
enum Listens {
    Tcp(String),
    Socket(PathBuf),
    Directory(PathBuf),
}

impl Listens {
    fn of(way: &ExportWay, address: &str) -> Self {
        let path = |path: &str| plain_path(Path::new(path));
        match (way, address.strip_prefix(UNIX_ADDRESS)) {
            (ExportWay::Nbd { .. }, Some(socket)) => Self::Socket(path(socket)),
            (ExportWay::Nbd { .. } | ExportWay::Nvme { .. }, _) => Self::Tcp(address.to_owned()),
            (ExportWay::Virtiofs { .. }, _) => Self::Socket(path(address)),
            (ExportWay::Vhost { .. }, _) => Self::Directory(path(address)),
        }
    }

    /// Whether who listens at one leaves no room at the other: also all addresses of a machine and one of them.
    fn excludes(&self, other: &Self) -> bool {
        let (Self::Tcp(one), Self::Tcp(two)) = (self, other) else { return self == other };
        let (Ok(one), Ok(two)) = (one.parse::<SocketAddr>(), two.parse::<SocketAddr>()) else {
            return one == two;
        };
        let is_all = |one: SocketAddr, two: SocketAddr| {
            one.ip().is_unspecified() && one.is_ipv6() >= two.is_ipv6()
        };
        one.port() == two.port() && (one.ip() == two.ip() || is_all(one, two) || is_all(two, one))
    }
}

struct Checker<'c> {
    cluster: &'c ClusterFile,
    places: &'c Places,
    problems: Vec<Problem>,
}

impl<'c> Checker<'c> {
    fn problem(&mut self, kind: ProblemKind, node: Node, key: &'static str) {
        self.problems.push(Problem { kind, place: self.places.of(node, key) });
    }

    /// For what many drives have from one place.
    fn problem_once(&mut self, kind: ProblemKind, node: Node, key: &'static str) {
        let problem = Problem { kind, place: self.places.of(node, key) };
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn names(&mut self) {
        let cluster = self.cluster;
        self.unique("host", cluster.hosts.iter().map(|host| host.name.as_str()), Node::Host);
        self.unique(
            "enclosure",
            cluster.enclosures.iter().map(|it| it.name.as_str()),
            Node::Enclosure,
        );
        self.unique("array", cluster.arrays.iter().map(|array| array.name.as_str()), Node::Array);
        self.unique(
            "filesystem",
            cluster.filesystems.iter().map(|it| it.name.as_str()),
            Node::FileSystem,
        );
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (index, enclosure) in cluster.enclosures.iter().enumerate() {
            let Some(url) = &enclosure.url else { continue };
            let first = *seen.entry(url.subsystem()).or_insert(index);
            if first != index {
                let first_line = self.places.of(Node::Enclosure(first), "url").map(|at| at.line);
                let first = cluster.enclosures[first].name.clone();
                let subsystem = url.subsystem().to_owned();
                let kind = ProblemKind::SameSubsystem { subsystem, first, first_line };
                self.problem(kind, Node::Enclosure(index), "url");
            }
        }
    }

    fn unique(
        &mut self,
        what: &'static str,
        names: impl Iterator<Item = &'c str>,
        node: fn(usize) -> Node,
    ) {
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (index, name) in names.enumerate() {
            if let Some(first) = seen.get(name).copied()
                && !name.is_empty()
            {
                let first_line = self.places.of(node(first), "name").map(|place| place.line);
                let kind = ProblemKind::DuplicateName { what, name: name.into(), first_line };
                self.problem(kind, node(index), "name");
            } else {
                seen.insert(name, index);
            }
        }
    }

    /// With several hosts, everything that sits on one says on which.
    fn hosts(&mut self) {
        let cluster = self.cluster;
        let enclosures = cluster.enclosures.iter().enumerate();
        let enclosures = enclosures.map(|(i, it)| (Node::Enclosure(i), "[[enclosure]]", &it.host));
        let mounts = cluster
            .mounts
            .iter()
            .enumerate()
            .map(|(i, it)| (Node::Mount(i), "[[mount]]", &it.host));
        let known: Vec<String> = cluster.hosts.iter().map(|host| host.name.clone()).collect();
        let on_network: Vec<Node> = (0..cluster.enclosures.len())
            .filter(|index| {
                cluster.enclosures[*index].url.is_some()
                    || self.places.in_doubt(&[Node::Enclosure(*index)])
            })
            .map(Node::Enclosure)
            .collect();
        for (node, table, host) in enclosures.chain(mounts) {
            match host {
                Some(name) if known.contains(name) => {}
                Some(name) => self.unknown("host", name, &known, node, "host"),
                None if known.len() > 1 && !on_network.contains(&node) => {
                    self.problem(ProblemKind::HostNeeded { table, known: known.clone() }, node, "");
                }
                None => {}
            }
        }
    }

    fn unknown(
        &mut self,
        what: &'static str,
        name: &str,
        known: &[String],
        node: Node,
        key: &'static str,
    ) {
        // It may stand in a table that could not be read.
        if self.places.in_doubt(&[Node::File]) {
            return;
        }
        let near = nearest(name, known.iter().map(String::as_str)).map(String::from);
        let kind = ProblemKind::UnknownName {
            what,
            name: name.into(),
            nearest: near,
            known: known.to_vec(),
        };
        self.problem(kind, node, key);
    }

    /// No drive twice, no two mounts in one place, no drive under a mount.
    fn paths(&mut self, same_file: SameFile) {
        let cluster = self.cluster;
        let mut drives: HashMap<(Option<&str>, PathBuf), usize> = HashMap::new();
        let mut names: HashMap<&str, usize> = HashMap::new();
        let mut plain_drives = Vec::new();
        for (index, drive) in cluster.drives.iter().enumerate() {
            let host =
                cluster.enclosure(&drive.enclosure).and_then(|enclosure| enclosure.host.as_deref());
            // With several hosts, this machine's links say nothing about another's.
            let path = match cluster.hosts.len() {
                // Two URLs of a namespace are alike: its subsystem is in one enclosure.
                _ if drive.is_remote() => drive.path.clone(),
                0 | 1 => plain_path(&same_file(&drive.path)),
                _ => plain_path(&drive.path),
            };
            plain_drives.push((host, path.clone()));
            let line =
                |first: usize| self.places.of(Node::Drive(first), "").map(|place| place.line);
            // Of a subsystem that is in two enclosures that is said, once.
            let is_said = |first: &usize| {
                drive.is_remote() && cluster.drives[*first].enclosure != drive.enclosure
            };
            let twice = drives.get(&(host, path.clone())).copied();
            if let Some(first) = twice.filter(|first| !is_said(first)) {
                let kind = ProblemKind::DriveTwice {
                    path: drive.path.display().to_string(),
                    first: cluster.drives[first].name.clone(),
                    first_line: line(first),
                };
                self.problem(kind, Node::Drive(index), "");
            } else if let Some(first) = names.get(drive.name.as_str()).copied() {
                let (name, first_line) = (drive.name.clone(), line(first));
                let kind = ProblemKind::DuplicateName { what: "drive", name, first_line };
                self.problem(kind, Node::Drive(index), "");
            }
            drives.entry((host, path)).or_insert(index);
            names.entry(&drive.name).or_insert(index);
        }
        let mut mounts: HashMap<(Option<&str>, PathBuf), usize> = HashMap::new();
        for (index, mount) in cluster.mounts.iter().enumerate() {
            let host = mount.host.as_deref();
            let path = match cluster.hosts.len() {
                0 | 1 => plain_path(&same_file(&mount.path)),
                _ => plain_path(&mount.path),
            };
            if self.places.in_doubt(&[Node::Mount(index)]) {
                continue;
            }
            let shown = mount.path.display().to_string();
            if let Some(first) = mounts.get(&(host, path.clone())).copied() {
                let first_line = self.places.of(Node::Mount(first), "path").map(|place| place.line);
                let kind = ProblemKind::MountTwice { path: shown.clone(), first_line };
                self.problem(kind, Node::Mount(index), "path");
            }
            let under = |(drive_host, drive): &(Option<&str>, PathBuf)| {
                *drive_host == host && drive.starts_with(&path)
            };
            if let Some(drive) = plain_drives.iter().position(under) {
                let drive = cluster.drives[drive].name.clone();
                self.problem(
                    ProblemKind::DriveUnderMount { drive, mount: shown },
                    Node::Mount(index),
                    "path",
                );
            }
            mounts.entry((host, path)).or_insert(index);
            let known: Vec<String> = cluster.filesystems.iter().map(|fs| fs.name.clone()).collect();
            if !known.is_empty() && !known.contains(&mount.filesystem) {
                self.unknown(
                    "filesystem",
                    &mount.filesystem,
                    &known,
                    Node::Mount(index),
                    "filesystem",
                );
            }
        }
    }

    fn drive_sizes(&mut self) {
        for (index, drive) in self.cluster.drives.iter().enumerate() {
            let Some(size) = drive.size else {
                // Reading a text has said this already; a program may make such a file too.
                if !self.places.in_doubt(&[Node::Drives])
                    && !is_device_path(&drive.path.to_string_lossy())
                    && !drive.is_remote()
                {
                    self.problem(
                        ProblemKind::FileNeedsSize { drive: drive.name.clone() },
                        Node::Drive(index),
                        "",
                    );
                }
                continue;
            };
            let least = Bytes(DRIVE_RESERVED_BYTES + SLICE_LEAST.0);
            if size < least {
                let kind = ProblemKind::SizeOutOfRange {
                    key: "size",
                    value: size,
                    least,
                    most: Bytes(1 << 50),
                };
                self.problem_once(kind, Node::Drive(index), "size");
            } else if !size.0.is_multiple_of(SLICE_ALIGN_BYTES) {
                let kind = ProblemKind::NotAMultiple {
                    key: "size",
                    value: size,
                    of: Bytes(SLICE_ALIGN_BYTES),
                };
                self.problem_once(kind, Node::Drive(index), "size");
            }
        }
    }

    fn array(&mut self, index: usize, array: &ArraySpec) {
        let node = Node::Array(index);
        if let Some(chunk) = array.level.chunk()
            && (!chunk.0.is_power_of_two() || chunk < CHUNK_LEAST || chunk > CHUNK_MOST)
        {
            let (key, least, most) = ("chunk", CHUNK_LEAST, CHUNK_MOST);
            let kind = match chunk.0.is_power_of_two() {
                true => ProblemKind::SizeOutOfRange { key, value: chunk, least, most },
                false => ProblemKind::NotAPowerOfTwo { key, value: chunk, least, most },
            };
            self.problem(kind, node, "chunk");
        }
        if let Some(drive) = array.drives.iter().find(|drive| self.cluster.spares.contains(drive)) {
            let (drive, array) = (drive.clone(), array.name.clone());
            return self.problem(ProblemKind::SpareInArray { drive, array }, node, "drives");
        }
        if !self.drive_count(node, array) {
            return;
        }
        if let Level::Parity { kind, data, .. } = array.level
            && data.saturating_add(kind.parity()) > STRIPE_CHUNKS_MAX
        {
            let (array, parity, most) = (array.name.clone(), kind.parity(), STRIPE_CHUNKS_MAX);
            self.problem(ProblemKind::StripeTooWide { array, data, parity, most }, node, "data");
        } else {
            self.standing(node, array);
        }
    }

    /// Whether there are drives enough, in enclosures enough.
    fn drive_count(&mut self, node: Node, array: &ArraySpec) -> bool {
        let spares = u64::from(array.spares);
        let (key, mut parts) = match array.level {
            Level::Raid0 { .. } => ("level", vec![(1, "data")]),
            Level::Raid1 { copies, .. } => ("copies", vec![(u64::from(copies), "copies")]),
            Level::Parity { kind, data, .. } => {
                let (groups, data) = (u64::from(kind.groups()), u64::from(data));
                let parity = u64::from(kind.parity());
                ("data", vec![(groups * data, "data"), (groups * parity, "parity")])
            }
        };
        if spares > 0 {
            parts.push((spares, "spares"));
        }
        let needed: u64 = parts.iter().map(|(count, _)| count).sum();
        // The largest part is the one to look at.
        let key = if parts.iter().all(|(count, _)| *count <= spares) { "spares" } else { key };
        if needed > array.drives.len() as u64 {
            let (array, level, drives) =
                (array.name.clone(), array.level.name(), array.drives.len());
            self.problem(
                ProblemKind::TooFewDrives { array, level, parts, needed, drives },
                node,
                key,
            );
            return false;
        }
        if array.drives.len() > ARRAY_DRIVES_MAX {
            let (array, drives) = (array.name.clone(), array.drives.len());
            let most = ARRAY_DRIVES_MAX;
            self.problem(ProblemKind::TooManyMembers { array, drives, most }, node, "drives");
            return false;
        }
        if let Level::Raid1 { copies, spread: Spread::Enclosure } = array.level {
            let counts = array.members_by_enclosure(self.cluster).pop().unwrap_or_default();
            let members: usize = counts.iter().map(|(_, count)| count).sum();
            let Some(&(enclosure, held)) = counts.iter().max_by_key(|(_, count)| count) else {
                return false;
            };
            let (array, enclosure) = (array.name.clone(), enclosure.to_string());
            if counts.len() < copies as usize {
                let enclosures = counts.len();
                let kind = ProblemKind::TooFewEnclosures { array, copies, enclosures };
                self.problem(kind, node, "copies");
                return false;
            }
            // Copies lie on neighbours in a ring of the members: those of one enclosure must be
            // `copies` apart.
            if held > members / copies as usize {
                let kind = ProblemKind::MirrorCrowded { array, copies, enclosure, held, members };
                self.problem(kind, node, "drives");
                return false;
            }
        }
        true
    }

    /// Says what the array would not survive.
    fn standing(&mut self, node: Node, array: &ArraySpec) {
        let name = array.name.clone();
        let borne = array.level.drives_borne();
        if borne == 0 {
            self.problem(
                ProblemKind::SurvivesNothing { array: name, level: array.level.name() },
                node,
                "level",
            );
            return;
        }
        let groups = array.members_by_enclosure(self.cluster);
        let single = groups.len() < 2;
        let spread = matches!(array.level, Level::Raid1 { spread: Spread::Enclosure, .. });
        // With a single enclosure nothing else was to be expected.
        if !spread
            && let Some((enclosure, members)) = groups
                .iter()
                .filter(|counts| counts.len() > 1)
                .flatten()
                .max_by_key(|(_, count)| *count)
                .copied()
            && members > borne as usize
        {
            let (array, enclosure) = (name.clone(), enclosure.into());
            let of = if single { "its members" } else { "the members of one group" };
            self.problem(
                ProblemKind::EnclosureTooFull { array, enclosure, members, of, borne },
                node,
                "drives",
            );
        }
        let placement = array.placement(self.cluster);
        let placed: std::collections::HashSet<&String> =
            placement.members.iter().chain(&placement.spares).collect();
        let unused: Vec<String> =
            array.drives.iter().filter(|drive| !placed.contains(drive)).cloned().collect();
        if !unused.is_empty() {
            self.problem(ProblemKind::UnusedDrives { array: name, drives: unused }, node, "data");
        }
    }

    /// Arrays and file systems survive what they are to.
    fn survival(&mut self) {
        let cluster = self.cluster;
        let arrays = cluster.arrays.iter().enumerate().map(|(index, array)| {
            let short = array.required.beyond(&array.survives(cluster));
            (Node::Array(index), "array", &array.name, short)
        });
        let filesystems = cluster.filesystems.iter().enumerate().map(|(index, filesystem)| {
            let short = filesystem.required.beyond(&filesystem.survives(cluster));
            (Node::FileSystem(index), "filesystem", &filesystem.name, short)
        });
        for (node, what, name, short) in arrays.chain(filesystems) {
            for Shortfall { what: thing, borne, asked } in short {
                let name = name.clone();
                let kind = ProblemKind::SurvivesLess { what, name, thing, borne, asked };
                self.problem(kind, node, "survives");
            }
        }
    }

    /// An address, a directory or a socket shows what one tenant has, and so does a part of the file system.
    fn exports(&mut self) {
        let mut taken: Vec<(Listens, usize)> = Vec::new();
        for (index, export) in self.cluster.exports.iter().enumerate() {
            let key = export.way.place().0;
            for address in export.way.places() {
                let listens = Listens::of(&export.way, &address);
                // Also within one list.
                let first = taken.iter().find(|(other, _)| other.excludes(&listens));
                if let Some((_, first)) = first
                    && !self.places.in_doubt(&[Node::Export(index)])
                {
                    let first_key = self.cluster.exports[*first].way.place().0;
                    let at = self.places.of(Node::Export(*first), first_key);
                    let first_line = at.map(|at| at.line);
                    let address = address.clone();
                    let kind = ProblemKind::ExportTwice { address, first_line };
                    self.problem(kind, Node::Export(index), key);
                }
                self.export_elsewhere(index, &listens, &address);
                taken.push((listens, index));
            }
        }
        let mut first: HashMap<&str, usize> = HashMap::new();
        for (index, export) in self.cluster.exports.iter().enumerate() {
            let ExportWay::Nvme { .. } = &export.way else { continue };
            let first = *first.entry(&export.tenant).or_insert(index);
            if first != index && !self.places.in_doubt(&[Node::Export(index)]) {
                let first_line = self.places.of(Node::Export(first), "nvme").map(|at| at.line);
                let kind = ProblemKind::NvmeTwice { tenant: export.tenant.clone(), first_line };
                self.problem(kind, Node::Export(index), "nvme");
            }
        }
    }

    /// Nothing else of the cluster is where an export listens.
    fn export_elsewhere(&mut self, index: usize, listens: &Listens, address: &str) {
        let Listens::Tcp(_) = listens else { return };
        let key = self.cluster.exports[index].way.place().0;
        for enclosure in &self.cluster.enclosures {
            let mut paths = enclosure.url.iter().flat_map(|url| url.paths());
            if paths.any(|path| path == address) {
                let (address, enclosure) = (address.to_owned(), enclosure.name.clone());
                let kind = ProblemKind::ExportIsEnclosure { address, enclosure };
                self.problem(kind, Node::Export(index), key);
            }
        }
        for (at, host) in self.cluster.hosts.iter().enumerate() {
            if host.addresses.iter().any(|other| Listens::Tcp(other.clone()).excludes(listens)) {
                let line = self.places.of(Node::Host(at), "addresses").map(|at| at.line);
                let (address, host) = (address.to_owned(), host.name.clone());
                let kind = ProblemKind::ExportIsHost { address, host, line };
                self.problem(kind, Node::Export(index), key);
            }
        }
    }

    /// Guests of two tenants do not meet in a directory.
    fn subtrees(&mut self) {
        let exports = self.cluster.exports.iter().enumerate();
        let shown: Vec<_> = exports
            .filter_map(|(index, export)| match &export.way {
                ExportWay::Virtiofs { subtree, .. } => Some((index, &export.tenant, subtree)),
                _ => None,
            })
            .filter(|(index, ..)| !self.places.in_doubt(&[Node::Export(*index)]))
            .collect();
        for (at, (index, tenant, subtree)) in shown.iter().enumerate() {
            let meets = |(_, other, its): &&(usize, &String, &SubtreePath)| {
                other != tenant && its.overlaps(subtree)
            };
            if let Some((first, ..)) = shown[..at].iter().find(meets) {
                let first_line = self.places.of(Node::Export(*first), "subtree").map(|at| at.line);
                let kind = ProblemKind::SubtreeTwice { subtree: subtree.to_string(), first_line };
                self.problem(kind, Node::Export(*index), "subtree");
            }
        }
    }

    /// Slices fit their drives; at most one array takes the rest of each.
    fn slices(&mut self) {
        let cluster = self.cluster;
        let mut by_drive: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, array) in cluster.arrays.iter().enumerate() {
            for drive in &array.drives {
                by_drive.entry(drive).or_default().push(index);
            }
        }
        // Many drives are cut alike: each complaint is made once per set of arrays.
        let mut told: Vec<&[usize]> = Vec::new();
        let mut sizes: Vec<Vec<Bytes>> = vec![Vec::new(); cluster.arrays.len()];
        for drive in &cluster.drives {
            let Some(arrays) = by_drive.get(drive.name.as_str()) else {
                continue;
            };
            if told.contains(&arrays.as_slice()) {
                continue;
            }
            let rests: Vec<usize> = arrays
                .iter()
                .copied()
                .filter(|&index| cluster.arrays[index].slice == SliceSize::Rest)
                .collect();
            if let [first, second, ..] = rests[..] {
                let name = |index: usize| cluster.arrays[index].name.clone();
                let kind = ProblemKind::TwoRests {
                    drive: drive.name.clone(),
                    first: name(first),
                    second: name(second),
                };
                self.problem(kind, Node::Array(second), "slice");
                told.push(arrays);
                continue;
            }
            // A block device says its size only when it is opened.
            let Some(drive_size) = drive.size else {
                continue;
            };
            if drive_size.0 < DRIVE_RESERVED_BYTES + SLICE_LEAST.0 {
                continue;
            }
            let usable = Bytes(drive_size.0 - DRIVE_RESERVED_BYTES).floor_to(SLICE_ALIGN_BYTES);
            let mut needed = 0u64;
            for &index in arrays {
                let bytes = match cluster.arrays[index].slice {
                    SliceSize::Bytes(bytes) => bytes.0,
                    SliceSize::Percent(percent) => {
                        (u128::from(drive_size.0) * u128::from(percent) / 100) as u64
                    }
                    SliceSize::Rest => SLICE_LEAST.0,
                };
                needed = needed.saturating_add(bytes / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES);
            }
            if needed > usable.0 {
                let kind = ProblemKind::SlicesTooLarge {
                    drive: drive.name.clone(),
                    drive_size,
                    usable,
                    needed: Bytes(needed),
                    arrays: arrays
                        .iter()
                        .map(|&index| cluster.arrays[index].name.clone())
                        .collect(),
                };
                let sized = arrays
                    .iter()
                    .rev()
                    .find(|&&index| cluster.arrays[index].slice != SliceSize::Rest);
                self.problem(kind, Node::Array(*sized.unwrap_or(&arrays[0])), "slice");
                told.push(arrays);
                continue;
            }
            for &index in arrays {
                let array = &cluster.arrays[index];
                let slice = cluster.slice_bytes(array, &drive.name, drive_size).unwrap_or_default();
                if slice < SLICE_LEAST {
                    let (array, drive) = (array.name.clone(), drive.name.clone());
                    let kind =
                        ProblemKind::SliceTooSmall { array, drive, slice, least: SLICE_LEAST };
                    self.problem(kind, Node::Array(index), "slice");
                    told.push(arrays);
                }
                sizes[index].push(slice);
            }
        }
        for (index, sizes) in sizes.iter().enumerate() {
            if let (Some(&smallest), Some(&largest)) = (sizes.iter().min(), sizes.iter().max())
                && smallest < largest
            {
                let array = cluster.arrays[index].name.clone();
                self.problem(
                    ProblemKind::UnequalMembers { array, smallest, largest },
                    Node::Array(index),
                    "slice",
                );
            }
        }
    }

    fn filesystems(&mut self) {
        let cluster = self.cluster;
        match cluster.filesystems.len() {
            0 if self.places.in_doubt(&[Node::File]) => {}
            1 => {}
            0 => {
                let example = "[[filesystem]] name = \"fs\", data = \"data\", metadata = \"meta\"";
                self.problem(
                    ProblemKind::MissingTable { table: "[[filesystem]]", example },
                    Node::File,
                    "filesystem",
                );
            }
            found => self.problem(ProblemKind::OneFileSystem { found }, Node::FileSystem(1), ""),
        }
        for (index, filesystem) in cluster.filesystems.iter().enumerate() {
            if !self.places.in_doubt(&[Node::FileSystem(index)]) {
                self.filesystem(Node::FileSystem(index), filesystem);
            }
        }
        if self.places.in_doubt(&[Node::File]) {
            return;
        }
        for (index, array) in cluster.arrays.iter().enumerate() {
            let used = |fs: &FileSystemSpec| fs.data == array.name || fs.metadata == array.name;
            if !cluster.filesystems.is_empty() && !cluster.filesystems.iter().any(used) {
                self.problem(
                    ProblemKind::UnusedArray { array: array.name.clone() },
                    Node::Array(index),
                    "name",
                );
            }
        }
    }

    fn filesystem(&mut self, node: Node, filesystem: &FileSystemSpec) {
        let cluster = self.cluster;
        let known: Vec<String> = cluster.arrays.iter().map(|array| array.name.clone()).collect();
        for (key, name) in [("data", &filesystem.data), ("metadata", &filesystem.metadata)] {
            if !known.contains(name) {
                self.unknown("array", name, &known, node, key);
            }
        }
        if filesystem.data == filesystem.metadata {
            self.problem(
                ProblemKind::SameArray { array: filesystem.data.clone() },
                node,
                "metadata",
            );
        } else {
            self.metadata_array(node, filesystem);
        }
        let unit = filesystem.stripe_unit;
        if unit.0 == 0 || unit > STRIPE_UNIT_MOST {
            let (least, most) = (STRIPE_UNIT_STEP, STRIPE_UNIT_MOST);
            self.problem(
                ProblemKind::SizeOutOfRange { key: "stripe_unit", value: unit, least, most },
                node,
                "stripe_unit",
            );
        } else if !unit.0.is_multiple_of(STRIPE_UNIT_STEP.0) {
            let kind =
                ProblemKind::NotAMultiple { key: "stripe_unit", value: unit, of: STRIPE_UNIT_STEP };
            self.problem(kind, node, "stripe_unit");
        }
        let (stripe_count, object_targets) = (filesystem.stripe_count, filesystem.object_targets);
        if stripe_count > object_targets {
            let kind = ProblemKind::StripeWiderThanTargets { stripe_count, object_targets };
            self.problem(kind, node, "stripe_count");
        }
    }

    /// Names and intent logs must outlive the data they lead to.
    fn metadata_array(&mut self, node: Node, filesystem: &FileSystemSpec) {
        let find = |name: &str| {
            let index = self.cluster.arrays.iter().position(|array| array.name == name)?;
            (!self.places.in_doubt(&[Node::Array(index)]))
                .then(|| (index, &self.cluster.arrays[index]))
        };
        let Some((index, metadata)) = find(&filesystem.metadata) else {
            return;
        };
        if !matches!(metadata.level, Level::Raid1 { .. }) {
            let (array, level) = (metadata.name.clone(), metadata.level.name());
            self.problem(ProblemKind::MetadataNotMirrored { array, level }, node, "metadata");
            return;
        }
        let Some((_, data)) = find(&filesystem.data) else {
            return;
        };
        let (metadata_bears, data_bears) =
            (metadata.level.drives_borne(), data.level.drives_borne());
        if metadata_bears < data_bears {
            let kind = ProblemKind::MetadataWeaker {
                metadata: metadata.name.clone(),
                metadata_bears,
                data: data.name.clone(),
                data_bears,
            };
            self.problem(kind, Node::Array(index), "copies");
        }
    }
}

//! Text to values: types, units, names and defaults; `check` then looks at the whole.
//!
//! Reading goes on after a problem with a stand-in value, so that one run reports everything.
//! What always holds: a stand-in never reaches a caller, because any error refuses the file.

use std::collections::HashSet;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml_edit::{Document, Item, Value};

use crate::check::{self, SameFile};
use crate::error::nearest;
use crate::file::{
    ArraySpec, ClusterFile, DriveSpec, EnclosureSpec, ExportSpec, ExportWay, FileSystemSpec,
    HealthSpec, HostSpec, Level, Loaded, ModelSpec, MountSpec, ParityKind, RebuildSpec,
    STRIPE_CHUNKS_MAX, ScrubSpec, SliceSize, Spread, TestingSpec, Wrapper,
};
use crate::reader::{Node, Places, Reader, Table, is_name};
use crate::remote::{EnclosureUrl, NAMESPACE_MOST, is_url};
use crate::survive::Required;
use crate::{Bytes, Problem, ProblemKind, Report, SpecError, pattern};

/// No cluster file comes near it.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// More drives than this is a slip of a pattern, not a cluster.
const DRIVES_MAX: usize = 4096;

/// Groups of one chunk of data and one of parity each fill an array.
const GROUPS_MOST: u64 = 27;

/// A drive that is away for longer than a day is lost.
const GRACE_S_MOST: u64 = 86_400;
/// With less a rebuild waits for days for one stripe.
const PACE_LEAST: Bytes = Bytes(1_000_000);
const PACE_MOST: Bytes = Bytes(1_000_000_000_000);

/// The longest name of a drive, in bytes: superblocks keep it whole.
const DRIVE_NAME_MOST: usize = 28;

/// Whose volumes are shown where no tenant is named.
const TENANT_DEFAULT: &str = "default";
const TENANT_NAME_MOST: usize = 63;
/// What an address that is a path begins with.
const UNIX_ADDRESS: &str = "unix:";

const FILE_KEYS: &[&str] = &[
    "cluster",
    "host",
    "drives",
    "enclosure",
    "spares",
    "rebuild",
    "scrub",
    "health",
    "array",
    "filesystem",
    "mount",
    "export",
    "testing",
];
/// Bytes of the name of an NVMe host.
const NQN_MOST: usize = 223;
const CLUSTER_KEYS: &[&str] = &["name", "state_dir", "power_fence"];
const HOST_KEYS: &[&str] = &["name", "addresses"];
const DRIVES_KEYS: &[&str] = &["size"];
const SPARES_KEYS: &[&str] = &["drives"];
const REBUILD_KEYS: &[&str] = &["floor", "ceiling", "grace_s"];
const SCRUB_KEYS: &[&str] = &["floor", "ceiling"];
const HEALTH_KEYS: &[&str] = &["used_percent"];
const ENCLOSURE_KEYS: &[&str] = &["name", "host", "size", "drives", "url"];
/// Keys of an enclosure on a host.
const LOCAL_KEYS: &[&str] = &["host", "size"];
const DRIVE_KEYS: &[&str] = &["name", "path", "size"];
const NAMESPACE_KEYS: &[&str] = &["name", "namespace"];
const SURVIVES_KEYS: &[&str] = &["drives", "enclosures", "paths", "hosts"];
const ARRAY_KEYS: &[&str] = &[
    "name", "level", "copies", "spread", "groups", "parity", "data", "chunk", "slice", "spares",
    "drives", "survives",
];
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
const FILESYSTEM_KEYS: &[&str] = &[
    "name",
    "data",
    "metadata",
    "object_targets",
    "metadata_targets",
    "stripe_unit",
    "stripe_count",
    "survives",
];
const MOUNT_KEYS: &[&str] = &["path", "filesystem", "host"];
const EXPORT_KEYS: &[&str] =
    &["tenant", "nbd", "tls", "verify_clients", "vhost", "nvme", "hosts", "keys", "tls_only"];
/// Keys of exports over NBD, and of those over NVMe/TCP.
const NBD_KEYS: &[&str] = &["nbd", "tls", "verify_clients"];
const NVME_KEYS: &[&str] = &["nvme", "hosts", "keys", "tls_only"];
const TESTING_KEYS: &[&str] = &["wrapper", "seed", "model", "models"];
const MODEL_KEYS: &[&str] = &["name", "rate", "iops", "latency_us", "flush_us"];

pub(crate) const CHUNK_LEAST: Bytes = Bytes::kib(4);
pub(crate) const CHUNK_MOST: Bytes = Bytes::mib(1);
const CHUNK_DEFAULT: Bytes = Bytes::kib(128);
pub(crate) const STRIPE_UNIT_STEP: Bytes = Bytes::kib(4);
pub(crate) const STRIPE_UNIT_MOST: Bytes = Bytes::gib(1);
const STRIPE_UNIT_DEFAULT: Bytes = Bytes::mib(1);

impl ClusterFile {
    /// Reads a cluster file from text. `name` is how messages call the file. Paths are
    /// compared as written, without looking at any disk.
    ///
    /// # Errors
    ///
    /// All errors in the text, together with its warnings. Without errors, the value
    /// and the warnings alone.
    pub fn parse(name: &str, text: &str) -> Result<(ClusterFile, Report), Report> {
        Self::parse_with(name, text, &|path| path.to_path_buf())
    }

    fn parse_with(
        name: &str,
        text: &str,
        same_file: SameFile,
    ) -> Result<(ClusterFile, Report), Report> {
        let mut reader = Reader { text, problems: Vec::new(), places: Places::default() };
        let cluster = reader.file();
        if let Some(cluster) = &cluster {
            let found = check::check(cluster, &reader.places, same_file);
            reader.problems.extend(found);
        }
        let mut problems = reader.problems;
        problems.sort_by_key(|problem| {
            problem.place.map_or((0, 0), |place| (place.line, place.column))
        });
        let report = Report { file: name.into(), text: text.into(), problems };
        match cluster {
            Some(cluster) if !report.has_errors() => Ok((cluster, report)),
            _ => Err(report),
        }
    }

    /// Reads and checks the cluster file at `path`. Two paths that lead to one existing file
    /// (by symbolic links, say) count as one drive.
    ///
    /// # Errors
    ///
    /// [`SpecError::Read`] when the file cannot be read, [`SpecError::Invalid`] with every
    /// problem in it.
    pub fn load(path: &Path) -> Result<Loaded, SpecError> {
        let read = |source| SpecError::Read { path: path.into(), source };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(read)?;
        file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(read)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            let why = format!("it is larger than {}, and no cluster file", Bytes(FILE_BYTES_MAX));
            return Err(read(std::io::Error::new(std::io::ErrorKind::FileTooLarge, why)));
        }
        let absolute = std::path::absolute(path).map_err(read)?;
        let directory = absolute.parent().unwrap_or(Path::new("/")).to_path_buf();
        let same_file = |written: &Path| {
            let path = directory.join(written);
            path.canonicalize().unwrap_or(path)
        };
        let (cluster, warnings) = Self::parse_with(&path.display().to_string(), &text, &same_file)
            .map_err(SpecError::Invalid)?;
        Ok(Loaded { cluster, directory, warnings })
    }

    /// Checks a cluster file that a program made; the same checks as for a text.
    #[must_use]
    pub fn check(&self) -> Vec<Problem> {
        check::check(self, &Places::default(), &|path| path.to_path_buf())
    }
}

/// Block devices are told from files by where they are: nothing else about a path is
/// known before the drive is there. /dev/shm holds files.
pub(crate) fn is_device_path(path: &str) -> bool {
    path.starts_with("/dev/") && !path.starts_with("/dev/shm/")
}

impl Reader<'_> {
    /// The whole file; `None` only when it is not TOML.
    fn file(&mut self) -> Option<ClusterFile> {
        let document = match Document::parse(self.text) {
            Ok(document) => document,
            Err(error) => {
                let message = error.message().trim().replace('\n', ", ");
                self.problem(ProblemKind::Syntax { message }, error.span().or(Some(0..0)));
                return None;
            }
        };
        let root = self.enter(Node::File, "the file", document.as_table(), Some(0..0), FILE_KEYS);

        let mut cluster = ClusterFile {
            name: "levada".into(),
            state_dir: "state".into(),
            power_fence: None,
            hosts: Vec::new(),
            enclosures: Vec::new(),
            drives: Vec::new(),
            spares: Vec::new(),
            rebuild: RebuildSpec::default(),
            scrub: ScrubSpec::default(),
            health: HealthSpec::default(),
            arrays: Vec::new(),
            filesystems: Vec::new(),
            mounts: Vec::new(),
            exports: Vec::new(),
            testing: None,
        };
        if let Some(table) = self.table(root, "cluster", Node::Cluster, "[cluster]", CLUSTER_KEYS) {
            cluster.name = self.name(table).unwrap_or_default();
            cluster.state_dir = self.text_of(table, "state_dir").unwrap_or("state".into()).into();
            cluster.power_fence = self.text_of(table, "power_fence");
        } else if !root.keys.contains_key("cluster") {
            let missing = ProblemKind::MissingTable {
                table: "[cluster]",
                example: "[cluster] name = \"lab\"",
            };
            self.problem_at(missing, Node::File, "");
        }
        for table in self.tables(root, "host", Node::Host, "[[host]]", HOST_KEYS) {
            let host = self.doubting(table.node, |reader| reader.host(table));
            cluster.hosts.push(host);
        }
        let drives = self.table(root, "drives", Node::Drives, "[drives]", DRIVES_KEYS);
        let all_files_size = drives
            .and_then(|table| self.doubting(Node::Drives, |reader| reader.size_or_stand_in(table)))
            // A table that could not be read may have held it.
            .or_else(|| self.places.in_doubt(&[Node::File]).then_some(Bytes::gib(1)));
        let only_host = (cluster.hosts.len() == 1).then(|| cluster.hosts[0].name.clone());
        for table in
            self.tables(root, "enclosure", Node::Enclosure, "[[enclosure]]", ENCLOSURE_KEYS)
        {
            self.doubting(table.node, |reader| {
                reader.enclosure(table, all_files_size, only_host.as_deref(), &mut cluster);
            });
        }
        // An array's drives follow from all enclosures.
        if (0..cluster.enclosures.len())
            .any(|index| self.places.in_doubt(&[Node::Enclosure(index)]))
        {
            self.places.doubtful.insert(Node::Drives);
        }
        if let Some(table) = self.table(root, "spares", Node::Spares, "[spares]", SPARES_KEYS) {
            self.needs(table, "drives", "drives = [\"d12\"]");
            cluster.spares =
                self.doubting(Node::Spares, |reader| reader.listed_drives(table, &cluster));
        }
        if let Some(table) = self.table(root, "rebuild", Node::Rebuild, "[rebuild]", REBUILD_KEYS) {
            cluster.rebuild = self.rebuild(table);
        }
        if let Some(table) = self.table(root, "scrub", Node::Scrub, "[scrub]", SCRUB_KEYS) {
            let (floor, ceiling) = self.paces(table, ScrubSpec::default().floor);
            cluster.scrub = ScrubSpec { floor, ceiling };
        }
        if let Some(table) = self.table(root, "health", Node::Health, "[health]", HEALTH_KEYS)
            && let Some(percent) = self.number(table, "used_percent", 1, 100)
        {
            cluster.health = HealthSpec { used_percent: percent as u8 };
        }
        for table in self.tables(root, "array", Node::Array, "[[array]]", ARRAY_KEYS) {
            let array = self.doubting(table.node, |reader| reader.array(table, &cluster));
            cluster.arrays.push(array);
        }
        for table in
            self.tables(root, "filesystem", Node::FileSystem, "[[filesystem]]", FILESYSTEM_KEYS)
        {
            let filesystem = self.doubting(table.node, |reader| reader.filesystem(table));
            cluster.filesystems.push(filesystem);
        }
        for table in self.tables(root, "mount", Node::Mount, "[[mount]]", MOUNT_KEYS) {
            let mount = self
                .doubting(table.node, |reader| reader.mount(table, &cluster, only_host.as_deref()));
            cluster.mounts.push(mount);
        }
        for table in self.tables(root, "export", Node::Export, "[[export]]", EXPORT_KEYS) {
            let export = self.doubting(table.node, |reader| reader.export(table));
            cluster.exports.push(export);
        }
        if let Some(table) = self.table(root, "testing", Node::Testing, "[testing]", TESTING_KEYS) {
            cluster.testing = Some(self.testing(table));
        }
        Some(cluster)
    }

    fn rebuild(&mut self, table: Table<'_>) -> RebuildSpec {
        let default = RebuildSpec::default();
        let (floor, ceiling) = self.paces(table, default.floor);
        let grace_s = self.number(table, "grace_s", 0, GRACE_S_MOST);
        let grace_s = grace_s.map_or(default.grace_s, |seconds| seconds as u32);
        RebuildSpec { floor, ceiling, grace_s }
    }

    /// Floor and ceiling.
    fn paces(&mut self, table: Table<'_>, default_floor: Bytes) -> (Bytes, Option<Bytes>) {
        let ceiling = self.pace(table, "ceiling");
        // Whoever says how much is too much means less than that.
        let floor_most = ceiling.unwrap_or(PACE_MOST);
        let floor = self.pace(table, "floor").unwrap_or(default_floor.min(floor_most));
        if floor > floor_most {
            let (key, least, most) = ("floor", PACE_LEAST, floor_most);
            let kind = ProblemKind::SizeOutOfRange { key, value: floor, least, most };
            self.problem_at(kind, table.node, key);
        }
        (floor, ceiling)
    }

    /// Bytes per second of a rebuild or a scrub, of which some must be left.
    fn pace(&mut self, table: Table<'_>, key: &'static str) -> Option<Bytes> {
        let value = self.size(table, key)?;
        if !(PACE_LEAST..=PACE_MOST).contains(&value) {
            let (least, most) = (PACE_LEAST, PACE_MOST);
            let kind = ProblemKind::SizeOutOfRange { key, value, least, most };
            self.problem_at(kind, table.node, key);
        }
        Some(value.clamp(PACE_LEAST, PACE_MOST))
    }

    fn host(&mut self, table: Table<'_>) -> HostSpec {
        let name = self.name(table).unwrap_or_default();
        let mut addresses = Vec::new();
        for (text, span) in self.texts(table, "addresses") {
            match is_address(&text) {
                true => addresses.push(text),
                false => self.problem(ProblemKind::BadAddress { text }, span),
            }
        }
        HostSpec { name, addresses }
    }

    fn enclosure(
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
        self.needs(table, "drives", "drives = [\"{1..8}\"]");
        let url = self.text_of(table, "url").and_then(|text| {
            let url = text.parse();
            url.map_err(|reason| {
                self.problem_at(ProblemKind::BadUrl { text, reason }, table.node, "url");
            })
            .ok()
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

    fn array(&mut self, table: Table<'_>, cluster: &ClusterFile) -> ArraySpec {
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
    fn required(&mut self, table: Table<'_>) -> Required {
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
        }
    }

    /// The drives that `drives` names, in cluster order.
    fn listed_drives(&mut self, table: Table<'_>, cluster: &ClusterFile) -> Vec<String> {
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

    fn filesystem(&mut self, table: Table<'_>) -> FileSystemSpec {
        let object_targets = self.number(table, "object_targets", 1, 256).unwrap_or(4) as u32;
        FileSystemSpec {
            name: self.name(table).unwrap_or_default(),
            data: self.needed_text(table, "data", "data = \"data\"").unwrap_or_default(),
            metadata: self
                .needed_text(table, "metadata", "metadata = \"meta\"")
                .unwrap_or_default(),
            object_targets,
            metadata_targets: self.number(table, "metadata_targets", 1, 1).unwrap_or(1) as u32,
            stripe_unit: self.size(table, "stripe_unit").unwrap_or(STRIPE_UNIT_DEFAULT),
            stripe_count: self
                .number(table, "stripe_count", 1, 256)
                .map_or(object_targets.min(4), |count| count as u32),
            required: self.required(table),
        }
    }

    fn mount(
        &mut self,
        table: Table<'_>,
        cluster: &ClusterFile,
        only_host: Option<&str>,
    ) -> MountSpec {
        let filesystem = self.text_of(table, "filesystem").unwrap_or_else(|| {
            if cluster.filesystems.len() > 1 {
                self.problem_at(
                    ProblemKind::FileSystemNeeded { table: table.title },
                    table.node,
                    "",
                );
            }
            cluster.filesystems.first().map(|fs| fs.name.clone()).unwrap_or_default()
        });
        MountSpec {
            path: self.needed_text(table, "path", "path = \"mnt\"").unwrap_or_default().into(),
            filesystem,
            host: self.text_of(table, "host").or_else(|| only_host.map(String::from)),
        }
    }

    fn export(&mut self, table: Table<'_>) -> ExportSpec {
        let tenant = self.text_of(table, "tenant").unwrap_or_else(|| TENANT_DEFAULT.into());
        if !is_name(&tenant, TENANT_NAME_MOST) {
            let kind = ProblemKind::BadName { name: tenant.clone(), most: TENANT_NAME_MOST };
            self.problem_at(kind, table.node, "tenant");
        }
        let way = if table.keys.contains_key("vhost") {
            self.only_way(table, &[NBD_KEYS, NVME_KEYS]);
            let directory = self.text_of(table, "vhost").unwrap_or_default().into();
            ExportWay::Vhost { directory }
        } else if table.keys.contains_key("nvme") {
            self.only_way(table, &[NBD_KEYS]);
            self.nvme_export(table)
        } else {
            self.only_way(table, &[NVME_KEYS]);
            self.nbd_export(table)
        };
        ExportSpec { tenant, way }
    }

    /// That none of the keys of other ways is there.
    fn only_way(&mut self, table: Table<'_>, others: &[&[&'static str]]) {
        for key in others.iter().copied().flatten() {
            if table.keys.contains_key(key) {
                self.problem_at(ProblemKind::ExportWays { key }, table.node, key);
            }
        }
    }

    fn nvme_export(&mut self, table: Table<'_>) -> ExportWay {
        let mut addresses = Vec::new();
        for (text, span) in self.texts(table, "nvme") {
            if is_address(&text) {
                addresses.push(text);
            } else {
                self.problem(ProblemKind::BadExportAddress { text }, span);
            }
        }
        let mut hosts = Vec::new();
        for (text, span) in self.texts(table, "hosts") {
            let is_name =
                text.starts_with("nqn.") && text.bytes().all(|byte| byte.is_ascii_graphic());
            if is_name && text.len() <= NQN_MOST {
                hosts.push(text);
            } else {
                self.problem(ProblemKind::BadNqn { text }, span);
            }
        }
        if table.keys.get("nvme").and_then(Item::as_array).is_some_and(toml_edit::Array::is_empty) {
            let example = "nvme = [\"10.0.0.1:4420\"]";
            let kind = ProblemKind::MissingKey { key: "nvme", table: table.title, example };
            self.problem_at(kind, table.node, "nvme");
        }
        let keys = self.text_of(table, "keys").map(PathBuf::from);
        let tls_only = self.truth(table, "tls_only").unwrap_or(false);
        if tls_only && keys.is_none() {
            let example = "keys = \"keys\"";
            let kind = ProblemKind::MissingKey { key: "keys", table: table.title, example };
            self.problem_at(kind, table.node, "tls_only");
        }
        ExportWay::Nvme { addresses, hosts, keys, tls_only }
    }

    /// The texts of a list, each with its place.
    fn texts(
        &mut self,
        table: Table<'_>,
        key: &'static str,
    ) -> Vec<(String, Option<Range<usize>>)> {
        let mut texts = Vec::new();
        for (value, span) in self.list(table, key) {
            match value.as_str() {
                Some(text) => texts.push((text.to_owned(), span)),
                None => self.wrong_type(key, &Item::Value(value), "a list of texts", span),
            }
        }
        texts
    }

    fn nbd_export(&mut self, table: Table<'_>) -> ExportWay {
        let example = "nbd = \"127.0.0.1:10809\"";
        let address = self.needed_text(table, "nbd", example);
        if let Some(text) = &address
            && !text.strip_prefix(UNIX_ADDRESS).map_or(is_address(text), |path| !path.is_empty())
        {
            let kind = ProblemKind::BadExportAddress { text: text.clone() };
            self.problem_at(kind, table.node, "nbd");
        }
        let address = address.unwrap_or_default();
        let tls = self.text_of(table, "tls").map(PathBuf::from);
        let verify_clients = self.truth(table, "verify_clients").unwrap_or(false);
        if verify_clients && tls.is_none() {
            let example = "tls = \"certificates\"";
            let kind = ProblemKind::MissingKey { key: "tls", table: table.title, example };
            self.problem_at(kind, table.node, "verify_clients");
        }
        ExportWay::Nbd { address, tls, verify_clients }
    }

    fn testing(&mut self, table: Table<'_>) -> TestingSpec {
        let wrapper = match self.text_of(table, "wrapper").as_deref() {
            None | Some("none") => Wrapper::None,
            Some("volatile") => Wrapper::Volatile,
            Some(other) => {
                self.bad_choice(
                    table,
                    "wrapper",
                    other.into(),
                    vec!["none".into(), "volatile".into()],
                );
                Wrapper::None
            }
        };
        let seed = self.number(table, "seed", 0, i64::MAX as u64).unwrap_or(0);
        let mut models: Vec<ModelSpec> = Vec::new();
        for model in self.tables(table, "models", Node::Model, "[[testing.models]]", MODEL_KEYS) {
            let name = self.name(model).unwrap_or_default();
            if models.iter().any(|known| known.name == name) || ModelSpec::named(&name).is_some() {
                let kind = ProblemKind::DuplicateName {
                    what: "model",
                    name: name.clone(),
                    first_line: None,
                };
                self.problem_at(kind, model.node, "name");
            }
            models.push(ModelSpec {
                name,
                rate: self.needed_size(model, "rate", "rate = \"400MB\""),
                iops: self.needed_number(model, "iops", 1, 1_000_000_000, "iops = 20000"),
                latency_us: self.number(model, "latency_us", 0, 60_000_000).unwrap_or(0),
                flush_us: self.number(model, "flush_us", 0, 60_000_000).unwrap_or(0),
            });
        }
        let model = self.text_of(table, "model").and_then(|name| {
            let own = models.iter().find(|model| model.name == name).cloned();
            let model = own.or_else(|| ModelSpec::named(&name));
            if model.is_none() {
                let mut allowed: Vec<String> = vec!["nvme".into(), "slow".into()];
                allowed.extend(models.iter().map(|model| model.name.clone()));
                self.bad_choice(table, "model", name, allowed);
            }
            model
        });
        TestingSpec { wrapper, seed, model }
    }
}

/// `host:port`, `1.2.3.4:port` or `[v6]:port`.
fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let port_is_good = port.parse::<u16>().is_ok_and(|port| port > 0);
    let host_is_good = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => is_name(host, 253),
    };
    port_is_good && host_is_good
}

/// A path without `.`, `..` and doubled slashes, so that spellings of one path are equal.
pub(crate) fn plain_path(path: &Path) -> PathBuf {
    use std::path::Component;
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            // `..` above the start of a relative path stays; above the root it is the root.
            Component::ParentDir => match plain.components().next_back() {
                Some(Component::Normal(_)) => {
                    plain.pop();
                }
                Some(Component::RootDir) => {}
                _ => plain.push(".."),
            },
            other => plain.push(other),
        }
    }
    plain
}

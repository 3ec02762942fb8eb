//! Text to values: types, units, names and defaults; `check` then looks at the whole. Drives, arrays and exports have files of
//! their own.
//!
//! Reading goes on after a problem with a stand-in value, so that one run reports everything.
//! What always holds: a stand-in never reaches a caller, because any error refuses the file.

mod arrays;
mod drives;
mod exports;

use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml_edit::{Document, Item};

pub(crate) use exports::UNIX_ADDRESS;

use crate::check::{self, SameFile};
use crate::file::{
    ClusterFile, FileSystemSpec, HealthSpec, HostSpec, Loaded, ModelSpec, MountSpec,
    NETWORK_CORES_MAX, RING_CORES_MAX, RebuildSpec, ScrubSpec, TestingSpec, Wrapper,
};
use crate::reader::{Node, Places, Reader, Table, is_name};
use crate::{Bytes, Problem, ProblemKind, Report, SpecError};

/// No cluster file comes near it.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A drive that is away for longer than a day is lost.
const GRACE_S_MOST: u64 = 86_400;
/// With less a rebuild waits for days for one stripe.
const PACE_LEAST: Bytes = Bytes(1_000_000);
const PACE_MOST: Bytes = Bytes(1_000_000_000_000);

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
const CLUSTER_KEYS: &[&str] = &["name", "state_dir", "power_fence", "network_cores", "ring_cores"];
const HOST_KEYS: &[&str] = &["name", "addresses"];
const DRIVES_KEYS: &[&str] = &["size"];
const SPARES_KEYS: &[&str] = &["drives"];
const REBUILD_KEYS: &[&str] = &["floor", "ceiling", "grace_s"];
const SCRUB_KEYS: &[&str] = &["floor", "ceiling"];
const HEALTH_KEYS: &[&str] = &["used_percent"];
const ENCLOSURE_KEYS: &[&str] = &["name", "host", "size", "drives", "url"];
const ARRAY_KEYS: &[&str] = &[
    "name", "level", "copies", "spread", "groups", "parity", "data", "chunk", "slice", "spares",
    "drives", "survives",
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
const EXPORT_KEYS: &[&str] = &[
    "tenant",
    "nbd",
    "tls",
    "verify_clients",
    "vhost",
    "nvme",
    "hosts",
    "keys",
    "tls_only",
    "virtiofs",
    "subtree",
    "tag",
    "cache",
];
const TESTING_KEYS: &[&str] = &["wrapper", "seed", "model", "models"];
const MODEL_KEYS: &[&str] = &["name", "rate", "iops", "latency_us", "flush_us"];

pub(crate) const CHUNK_LEAST: Bytes = Bytes::kib(4);
pub(crate) const CHUNK_MOST: Bytes = Bytes::mib(1);
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
        Self::load_as(path, &path.display().to_string(), &Self::read(path)?)
    }

    /// The text of the file at `path`.
    ///
    /// # Errors
    ///
    /// [`SpecError::Read`].
    pub fn read(path: &Path) -> Result<String, SpecError> {
        let read = |source| SpecError::Read { path: path.into(), source };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(read)?;
        file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(read)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            let why = format!("it is larger than {}, and no cluster file", Bytes(FILE_BYTES_MAX));
            return Err(read(std::io::Error::new(std::io::ErrorKind::FileTooLarge, why)));
        }
        Ok(text)
    }

    /// As [`ClusterFile::load`], if the file had this text. `name` is how messages call it.
    ///
    /// # Errors
    ///
    /// [`SpecError::Invalid`] with every problem in it, [`SpecError::Read`] when there is no directory from which its paths could start.
    pub fn load_as(path: &Path, name: &str, text: &str) -> Result<Loaded, SpecError> {
        let read = |source| SpecError::Read { path: path.into(), source };
        let absolute = std::path::absolute(path).map_err(read)?;
        let directory = absolute.parent().unwrap_or(Path::new("/")).to_path_buf();
        let same_file = |written: &Path| {
            let path = directory.join(written);
            path.canonicalize().unwrap_or(path)
        };
        let (cluster, warnings) =
            Self::parse_with(name, text, &same_file).map_err(SpecError::Invalid)?;
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
            network_cores: 0,
            ring_cores: 0,
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
            let cores = self.number(table, "network_cores", 0, NETWORK_CORES_MAX as u64);
            cluster.network_cores = cores.unwrap_or(0) as usize;
            let cores = self.number(table, "ring_cores", 0, RING_CORES_MAX as u64);
            cluster.ring_cores = cores.unwrap_or(0) as usize;
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

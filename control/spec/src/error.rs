//! What is wrong with a cluster file: each problem with its place, all of them at once,
//! printed as a compiler prints them.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use crate::{Bytes, PatternError, SizeError, SubtreeError, UrlError};

/// Why there is no usable cluster file.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It was read, and holds at least one error.
    #[error("{0}")]
    Invalid(Report),
}

/// Problems of one file, in the order of their lines, with the text they point into.
/// Printing it gives every problem with its line and a marker under the place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The file's name as the user wrote it.
    pub file: String,
    /// Its text.
    pub text: String,
    /// What was found.
    pub problems: Vec<Problem>,
}

/// One thing that is wrong, or probably not meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What it is.
    pub kind: ProblemKind,
    /// Where; `None` for a cluster file that was made by a program and has no text.
    pub place: Option<Place>,
}

/// A place in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    /// Characters to mark, at least 1; never past the end of the line.
    pub length: usize,
}

/// Whether a cluster can be made from the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// It cannot.
    Error,
    /// It can, but perhaps not as meant.
    Warning,
}

/// What is wrong. The text of each says what was found; [`ProblemKind::help`] what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are explained by the message that prints them")]
pub enum ProblemKind {
    #[error("this is not TOML: {message}")]
    Syntax { message: String },
    #[error("unknown {} `{key}`{}", if *table == "the file" { "table" } else { "key" }, in_table(table))]
    UnknownKey {
        key: String,
        table: &'static str,
        nearest: Option<&'static str>,
        allowed: &'static [&'static str],
    },
    #[error("{table} has no `{key}`")]
    MissingKey { key: &'static str, table: &'static str, example: &'static str },
    #[error("the drives of enclosure \"{enclosure}\" are not named")]
    DrivesNotFound { enclosure: String },
    #[error("the file has no {table}")]
    MissingTable { table: &'static str, example: &'static str },
    #[error("`{key}` is {found}")]
    WrongType { key: String, found: &'static str, expected: &'static str },
    #[error("`{key}` is not a size: {reason}")]
    BadSize { key: &'static str, text: String, reason: SizeError },
    #[error("`{key}` is {value}")]
    OutOfRange { key: &'static str, value: i64, least: u64, most: u64 },
    #[error("`{key}` is {value}")]
    SizeOutOfRange { key: &'static str, value: Bytes, least: Bytes, most: Bytes },
    #[error("`{key}` is {value}, which is not a multiple of {of}")]
    NotAMultiple { key: &'static str, value: Bytes, of: Bytes },
    #[error("`{key}` is {value}, which is not a power of two")]
    NotAPowerOfTwo { key: &'static str, value: Bytes, least: Bytes, most: Bytes },
    #[error("`{key}` is \"{value}\"")]
    BadChoice { key: &'static str, value: String, nearest: Option<String>, allowed: Vec<String> },
    #[error("\"{text}\" is neither a size nor a share of a drive")]
    BadSlice { text: String },
    #[error("\"{name}\" cannot be a name")]
    BadName { name: String, most: usize },
    #[error("\"{text}\" is not an address")]
    BadAddress { text: String },
    #[error("\"{text}\" is no address of an export")]
    BadExportAddress { text: String },
    #[error("\"{text}\" is no name of an NVMe host")]
    BadNqn { text: String },
    #[error("volumes of {tenant} are shown over NVMe/TCP by two exports{}", first_on(*first_line))]
    NvmeTwice { tenant: String, first_line: Option<usize> },
    #[error("an export shows what there is in one way, `{key}` or another")]
    ExportWays { key: &'static str },
    #[error("\"{text}\" is no directory to show by itself: {reason}")]
    BadSubtree { text: String, reason: SubtreeError },
    #[error("the tag \"{tag}\" is longer than {most} bytes")]
    LongTag { tag: String, most: usize },
    #[error("{subtree} is shown to guests of two tenants, or in what is{}", first_on(*first_line))]
    SubtreeTwice { subtree: String, first_line: Option<usize> },
    #[error("{address} is used by two exports, or twice by one{}", first_on(*first_line))]
    ExportTwice { address: String, first_line: Option<usize> },
    #[error("{address} is where enclosure \"{enclosure}\" is reached")]
    ExportIsEnclosure { address: String, enclosure: String },
    #[error(
        "{address} is where host \"{host}\" listens for clients{}",
        first_on(*line)
    )]
    ExportIsHost { address: String, host: String, line: Option<usize> },
    #[error("\"{text}\" cannot be expanded: {reason}")]
    BadPattern { text: String, reason: PatternError },
    #[error("{path:?} ends in nothing that could name the drive")]
    NamelessDrive { path: String },
    #[error("the file names more than {most} drives")]
    TooManyDrives { most: usize },
    #[error("there are two {what}s named \"{name}\"{}", first_on(*first_line))]
    DuplicateName { what: &'static str, name: String, first_line: Option<usize> },
    #[error("{path} is listed twice: it is drive \"{first}\" already{}", first_on(*first_line))]
    DriveTwice { path: String, first: String, first_line: Option<usize> },
    #[error("{path} is mounted twice{}", first_on(*first_line))]
    MountTwice { path: String, first_line: Option<usize> },
    #[error("there is no {what} named \"{name}\"")]
    UnknownName { what: &'static str, name: String, nearest: Option<String>, known: Vec<String> },
    #[error("{table} does not say on which host it is")]
    HostNeeded { table: &'static str, known: Vec<String> },
    #[error("{table} must say which file system it means, because there are several")]
    FileSystemNeeded { table: &'static str },
    #[error("the file has {found} of [[filesystem]]")]
    OneFileSystem { found: usize },
    #[error("`{key}` has no meaning for {level}")]
    KeyNotForLevel { key: &'static str, level: &'static str, allowed: &'static [&'static str] },
    #[error("drive \"{drive}\" is a spare of the cluster and a drive of array \"{array}\"")]
    SpareInArray { drive: String, array: String },
    #[error("drive \"{drive}\" is a file and has no size")]
    FileNeedsSize { drive: String },
    #[error("drive \"{drive}\" is a block device, which has a size of its own")]
    SizeOfDevice { drive: String },
    #[error("\"{text}\" is no URL of an enclosure: {reason}")]
    BadUrl { text: String, reason: UrlError },
    #[error("\"{text}\" is no number of a namespace")]
    NoNamespace { text: String },
    #[error("\"{text}\" is a URL, and `drives` of an enclosure without `url` are paths")]
    PathIsUrl { text: String },
    #[error("`{key}` has no meaning for an enclosure on the network")]
    KeyNotForUrl { key: &'static str },
    #[error("enclosure \"{first}\" is the subsystem {subsystem} already{}", first_on(*first_line))]
    SameSubsystem { subsystem: String, first: String, first_line: Option<usize> },
    #[error(
        "{what} \"{name}\" is to survive the loss of {asked} {thing}{}, and survives that of {}",
        if *asked == 1 { "" } else { "s" },
        if *borne == 0 { "none".into() } else { borne.to_string() }
    )]
    SurvivesLess {
        /// `array` or `filesystem`.
        what: &'static str,
        name: String,
        thing: &'static str,
        borne: usize,
        asked: u32,
    },
    #[error(
        "{level} array \"{array}\" needs {needed} drives ({}), but has {drives}",
        parts.iter().map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(" + ")
    )]
    TooFewDrives {
        array: String,
        level: &'static str,
        /// The sum, part by part: (8, "data"), (2, "parity"), (2, "spares").
        parts: Vec<(u64, &'static str)>,
        needed: u64,
        drives: usize,
    },
    #[error(
        "array \"{array}\" keeps {copies} copies in different enclosures, but its drives sit in {enclosures}"
    )]
    TooFewEnclosures { array: String, copies: u32, enclosures: usize },
    #[error(
        "a stripe of array \"{array}\" has {} chunks, {data} of data and {parity} of parity",
        data + parity
    )]
    StripeTooWide { array: String, data: u32, parity: u32, most: u32 },
    #[error("array \"{array}\" has {drives} drives")]
    TooManyMembers { array: String, drives: usize, most: usize },
    #[error(
        "array \"{array}\" cannot keep its {copies} copies in different enclosures: \
         enclosure \"{enclosure}\" holds {held} of its {members} members"
    )]
    MirrorCrowded { array: String, copies: u32, enclosure: String, held: usize, members: usize },
    #[error(
        "the slices of drive \"{drive}\" need {needed}, but {usable} of its {drive_size} can be used (arrays {})",
        arrays.join(", ")
    )]
    SlicesTooLarge {
        drive: String,
        drive_size: Bytes,
        usable: Bytes,
        needed: Bytes,
        arrays: Vec<String>,
    },
    #[error("array \"{array}\" would get {slice} of drive \"{drive}\"")]
    SliceTooSmall { array: String, drive: String, slice: Bytes, least: Bytes },
    #[error("arrays \"{first}\" and \"{second}\" both take the rest of drive \"{drive}\"")]
    TwoRests { drive: String, first: String, second: String },
    #[error("the metadata array \"{array}\" is {level}")]
    MetadataNotMirrored { array: String, level: &'static str },
    #[error("data and metadata are the same array \"{array}\"")]
    SameArray { array: String },
    #[error(
        "the metadata array \"{metadata}\" bears the loss of {metadata_bears}, \
         the data array \"{data}\" of {data_bears}"
    )]
    MetadataWeaker { metadata: String, metadata_bears: u32, data: String, data_bears: u32 },
    #[error("`stripe_count` is {stripe_count}, but there are {object_targets} object targets")]
    StripeWiderThanTargets { stripe_count: u32, object_targets: u32 },
    #[error(
        "drive \"{drive}\" lies under the mount {mount}: the file system would hold its own drive"
    )]
    DriveUnderMount { drive: String, mount: String },

    // Warnings: the file can be used as it is.
    #[error("array \"{array}\" survives no loss at all")]
    SurvivesNothing { array: String, level: &'static str },
    #[error(
        "array \"{array}\" does not survive the loss of enclosure \"{enclosure}\", which holds {members} of {of}"
    )]
    EnclosureTooFull {
        array: String,
        enclosure: String,
        members: usize,
        of: &'static str,
        borne: u32,
    },
    #[error("{} of the drives of array \"{array}\" would neither serve nor wait: {}", drives.len(), drives.join(", "))]
    UnusedDrives { array: String, drives: Vec<String> },
    #[error(
        "array \"{array}\" has members of unequal size, {smallest} to {largest}; each counts as the smallest"
    )]
    UnequalMembers { array: String, smallest: Bytes, largest: Bytes },
    #[error("array \"{array}\" is used by no file system")]
    UnusedArray { array: String },
    #[error("[testing] is on: not for data that anyone wants to keep")]
    TestingOn,
}

fn in_table(table: &str) -> String {
    if table == "the file" { String::new() } else { format!(" in {table}") }
}

fn first_on(line: Option<usize>) -> String {
    line.map(|line| format!(" (line {line})")).unwrap_or_default()
}

fn quoted<T: AsRef<str>>(words: &[T]) -> String {
    words.iter().map(|word| format!("`{}`", word.as_ref())).collect::<Vec<_>>().join(", ")
}

fn did_you_mean(nearest: Option<&str>, allowed: String) -> String {
    match nearest {
        Some(nearest) => format!("did you mean `{nearest}`? {allowed}"),
        None => allowed,
    }
}

impl ProblemKind {
    /// Whether it stops a cluster from being made.
    #[must_use]
    pub fn severity(&self) -> Severity {
        use ProblemKind::*;
        match self {
            SurvivesNothing { .. }
            | EnclosureTooFull { .. }
            | UnusedDrives { .. }
            | UnequalMembers { .. }
            | UnusedArray { .. }
            | TestingOn => Severity::Warning,
            _ => Severity::Error,
        }
    }

    /// What is allowed instead, or what to do.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        use ProblemKind::*;
        Some(match self {
            Syntax { .. } | SameArray { .. } => return None,
            UnknownKey { nearest, allowed, .. } => {
                did_you_mean(*nearest, format!("allowed here: {}", quoted(allowed)))
            }
            DrivesNotFound { .. } => {
                "`levada plan` asks it, and `levada up` writes them here; or write for example `drives = [\"{1..8}\"]`".into()
            }
            MissingKey { example, .. } | MissingTable { example, .. } => format!("write for example `{example}`"),
            WrongType { expected, .. } => format!("it must be {expected}"),
            BadSize { .. } => {
                "write a whole number of bytes, or a number with KiB, MiB, GiB, TiB, PiB (powers of 1024) \
                 or kB, MB, GB, TB, PB (powers of 1000), such as \"2GiB\""
                    .into()
            }
            OutOfRange { least, most, .. } => format!("allowed: {least} to {most}"),
            SizeOutOfRange { least, most, .. } => format!("allowed: {least} to {most}"),
            NotAMultiple { of, .. } => format!("allowed: multiples of {of}"),
            NotAPowerOfTwo { least, most, .. } => format!("allowed: powers of two from {least} to {most}"),
            BadChoice { nearest, allowed, .. } => {
                did_you_mean(nearest.as_deref(), format!("allowed: {}", quoted(allowed)))
            }
            BadSlice { .. } => "write a size (\"256MiB\"), whole percent of each drive (\"12%\") or \"rest\"".into(),
            BadName { most, .. } => format!(
                "names here are 1 to {most} letters, digits, `-`, `_` and `.`, and start with a letter or digit"
            ),
            BadAddress { .. } => "write host:port, such as \"10.0.0.1:7400\" or \"[fd00::1]:7400\"".into(),
            BadExportAddress { .. } => {
                "write host:port, such as \"127.0.0.1:10809\", or \"unix:\" and a path".into()
            }
            BadNqn { .. } => {
                "it begins with `nqn.`; on Linux it is in /etc/nvme/hostnqn".into()
            }
            NvmeTwice { .. } => {
                "write all addresses into one: hosts must find the same reservations everywhere".into()
            }
            ExportWays { .. } => "write an [[export]] for each".into(),
            BadSubtree { .. } => {
                "write the path of a directory within the file system, such as \"/guests/vm1\"; `levada mount --vhost` shows all of it".into()
            }
            LongTag { .. } => "a guest mounts by it; none is needed: then it is the cluster's name".into(),
            SubtreeTwice { .. } => "give each tenant a directory that no other has".into(),
            ExportIsEnclosure { .. } | ExportIsHost { .. } => "an export listens at addresses of this machine that nothing else has".into(),
            ExportTwice { .. } => "one address, directory or socket shows what one tenant has, and is named once".into(),
            BadPattern { .. } => "write one range of numbers, such as \"/dev/nvme{0..23}n1\"".into(),
            NamelessDrive { .. } => "write { name = \"d0\", path = \"...\" }".into(),
            TooManyDrives { most } => format!("at most {most} drives are allowed"),
            DuplicateName { what: "drive", .. } => {
                "a drive is named after the last part of its path; to name it yourself write \
                 { name = \"a{0..11}\", path = \"/dev/nvme{0..11}n1\" }"
                    .into()
            }
            DuplicateName { what, .. } => format!("every {what} needs a name of its own"),
            DriveTwice { .. } => "every drive may stand in one place only; spellings of one path are one drive".into(),
            MountTwice { .. } => "one directory holds one mount".into(),
            UnknownName { what, nearest, known, .. } => {
                let known = match known.len() {
                    0 => format!("the file has no {what}"),
                    1..=16 => format!("known: {}", quoted(known)),
                    more => format!("known: {} and {} more", quoted(&known[..12]), more - 12),
                };
                did_you_mean(nearest.as_deref(), known)
            }
            HostNeeded { known, .. } => format!("write host = one of {}", quoted(known)),
            FileSystemNeeded { .. } => "write filesystem = \"NAME\"".into(),
            OneFileSystem { .. } => "this release serves exactly one file system".into(),
            KeyNotForLevel { level, allowed, .. } => format!("{level} takes {}", quoted(allowed)),
            SpareInArray { .. } => {
                "a drive of [spares] belongs to no array; a spare of one array alone is listed in its `drives` and counted in its `spares`".into()
            }
            FileNeedsSize { .. } => {
                "write `size = \"2GiB\"` in [drives] for all files, in the [[enclosure]] for its own, or in the drive; \
                 block devices are paths under /dev"
                    .into()
            }
            SizeOfDevice { .. } => "leave `size` out; to use less of it, set `slice` in the arrays".into(),
            BadUrl { reason: UrlError::Namespace, .. } => {
                "leave `ns` out: namespaces are written in `drives`, as in drives = [\"{1..8}\"]".into()
            }
            BadUrl { reason: UrlError::Discovery, .. } => {
                "`levada enclosure find ADDRESS` lists the subsystems there, each as an [[enclosure]]".into()
            }
            BadUrl { .. } => {
                "write addresses and a subsystem, such as \"nvme+tcp://10.0.0.1:4420,10.0.1.1:4420/nqn.2014-08.org.example:e1\"".into()
            }
            NoNamespace { .. } => "namespaces have numbers from 1 on; write 3, or \"{1..8}\" for several".into(),
            PathIsUrl { .. } => {
                "write an [[enclosure]] with url = \"nvme+tcp://ADDRESSES/SUBSYSTEM\" and the numbers of its namespaces in `drives`".into()
            }
            KeyNotForUrl { key } => match *key {
                "size" => "leave it out: a namespace has a size of its own".into(),
                _ => "leave it out: any server reaches it".into(),
            },
            SameSubsystem { .. } => "write all its addresses into one `url`, and all its drives there".into(),
            SurvivesLess { thing, .. } => match *thing {
                "drive" => "take a level with more parity, or more `copies`; or ask for less".into(),
                "enclosure" => {
                    "spread the drives over more enclosures, evenly, or take more parity or `copies`; or ask for less".into()
                }
                "path" => "write further addresses into the `url` of enclosures; or ask for less".into(),
                "server" => {
                    "put all its drives into enclosures with a `url`, which other servers reach; or ask for less".into()
                }
                _ => "spread the enclosures over more hosts; or ask for less".into(),
            },
            TooFewDrives { .. } => "add drives, or ask for fewer".into(),
            TooFewEnclosures { .. } => {
                "add enclosures, lower `copies`, or write spread = \"drive\" to let copies share an enclosure".into()
            }
            StripeTooWide { most, .. } => {
                format!("at most {most} together: lower `data`, raise `groups` of a raid50 or raid60, or make several arrays")
            }
            TooManyMembers { most, .. } => {
                format!("an array has at most {most}, spares included; name fewer in `drives` and make several arrays")
            }
            MirrorCrowded { copies, members, .. } => format!(
                "at most {} of {members} may be in one enclosure: name fewer of them in `drives`, \
                 or write spread = \"drive\" to let copies share an enclosure",
                members / *copies as usize
            ),
            SlicesTooLarge { .. } => "make a slice smaller or the drive larger; 2MiB of each drive hold labels".into(),
            SliceTooSmall { least, .. } => format!("a slice is at least {least}"),
            TwoRests { .. } => "give one of them a size or a share".into(),
            MetadataNotMirrored { .. } => "metadata and intent logs live on a mirror: level = \"raid1\"".into(),
            MetadataWeaker { data_bears, .. } => {
                format!("metadata must outlive data: write copies = {} or more in the metadata array", data_bears + 1)
            }
            StripeWiderThanTargets { object_targets, .. } => {
                format!("allowed: 1 to {object_targets}, or raise `object_targets`")
            }
            DriveUnderMount { .. } => "keep drives and mounts apart".into(),
            SurvivesNothing { level, .. } => match *level {
                "raid0" => "raid1 keeps copies, raid5 survives any 1 drive, raid6 any 2".into(),
                _ => "raise `copies`".into(),
            },
            EnclosureTooFull { borne, .. } => {
                format!("at most {borne} members in one enclosure would survive it")
            }
            UnusedDrives { .. } => "raise `data` or `spares`, or name fewer in `drives`".into(),
            UnequalMembers { .. } => "use drives of one size, or a `slice` that all of them hold".into(),
            UnusedArray { .. } => "name it in [[filesystem]] as `data` or `metadata`".into(),
            TestingOn => "remove the [testing] table for real use".into(),
        })
    }
}

impl Place {
    /// The place of a byte range of `text`.
    pub(crate) fn of(text: &str, span: Range<usize>) -> Place {
        let mut start = span.start.min(text.len());
        while !text.is_char_boundary(start) {
            start -= 1;
        }
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let mut end = span.end.clamp(start, line_end);
        while !text.is_char_boundary(end) {
            end += 1;
        }
        Place {
            line: text[..start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            length: text[start..end].chars().count().max(1),
        }
    }
}

impl Report {
    /// Whether any problem is an error.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        self.problems.iter().any(|problem| problem.kind.severity() == Severity::Error)
    }

    /// Writes one problem as a compiler does.
    fn write_one(&self, f: &mut fmt::Formatter<'_>, problem: &Problem) -> fmt::Result {
        let severity = match problem.kind.severity() {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        writeln!(f, "{severity}: {}", problem.kind)?;
        let mut margin = 2; // one digit of a line number and a space
        if let Some(place) = problem.place {
            let number = place.line.to_string();
            margin = number.len() + 1;
            // Tabs and control characters would move the marker away from its place.
            let line: String = self
                .text
                .lines()
                .nth(place.line - 1)
                .unwrap_or("")
                .chars()
                .map(printable)
                .collect();
            writeln!(
                f,
                "{:digits$}--> {}:{}:{}",
                "",
                self.file,
                place.line,
                place.column,
                digits = margin - 1
            )?;
            writeln!(f, "{:margin$}|", "")?;
            writeln!(f, "{number} | {line}")?;
            writeln!(
                f,
                "{:margin$}| {}{}",
                "",
                " ".repeat(place.column - 1),
                "^".repeat(place.length),
            )?;
        } else {
            writeln!(f, " --> {}", self.file)?;
        }
        match problem.kind.help() {
            Some(help) => writeln!(f, "{:margin$}= help: {help}", ""),
            None => Ok(()),
        }
    }
}

fn printable(c: char) -> char {
    if c.is_control() { ' ' } else { c }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            self.write_one(f, problem)?;
        }
        Ok(())
    }
}

/// The word of `known` that `word` most likely meant, if any is near enough.
pub(crate) fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    // A long word is no typo of a short key, and its table of distances would be large.
    if word.len() > 64 {
        return None;
    }
    let allowed = word.chars().count().max(3) / 3;
    known
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Letters to insert, delete, change or swap with their neighbour to turn one word into the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) =
        (a.to_lowercase().chars().collect(), b.to_lowercase().chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut best = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    best = best.min(rows[i - 2][j - 2] + 1);
                }
                best
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typos_find_their_key() {
        let keys = ["stripe_unit", "stripe_count", "name", "data"];
        assert_eq!(nearest("strip_unit", keys), Some("stripe_unit"));
        assert_eq!(nearest("nmae", keys), Some("name"));
        assert_eq!(nearest("DATA", keys), Some("data"));
        assert_eq!(nearest("replicas", keys), None);
    }

    #[test]
    fn places_count_characters_and_stay_on_their_line() {
        let text = "a = 1\n\u{e9}\u{e9} = \"xyz\nnext";
        assert_eq!(Place::of(text, 6..10), Place { line: 2, column: 1, length: 2 });
        assert_eq!(Place::of(text, 13..40), Place { line: 2, column: 6, length: 4 });
        assert_eq!(Place::of(text, 99..100), Place { line: 3, column: 5, length: 1 });
    }
}

//! Cluster files as people write them: good ones are read as meant, and each mistake is
//! named with its exact line.

mod exports;
mod remote;

use std::path::Path;

use levada_spec::{
    Bytes, ClusterFile, ExportWay, GuestCacheSpec, Level, ParityKind, Problem, Severity, SliceSize,
    SpecError, Spread, Survival, Wrapper,
};
use proptest::prelude::*;

/// A small good file; the tests below break one line each.
const GOOD: &str = r#"[cluster]
name = "lab"

[drives]
size = "1GiB"

[[enclosure]]
name = "e0"
drives = ["drives/d{00..03}.img"]
[[enclosure]]
name = "e1"
drives = ["drives/d{04..07}.img"]
[[enclosure]]
name = "e2"
drives = ["drives/d{08..11}.img"]

[[array]]
name = "meta"
level = "raid1"
copies = 3
slice = "128MiB"

[[array]]
name = "data"
level = "raid6"
data = 8
spares = 2
chunk = "128KiB"

[[filesystem]]
name = "fs"
data = "data"
metadata = "meta"
object_targets = 4
stripe_unit = "1MiB"
stripe_count = 4

[[mount]]
path = "mnt"
"#;

fn line_of(problem: &Problem) -> usize {
    problem.place.map_or(0, |place| place.line)
}

/// Line and text of each error.
fn errors(text: &str) -> Vec<(usize, String)> {
    match ClusterFile::parse("levada.toml", text) {
        Ok(_) => Vec::new(),
        Err(report) => report
            .problems
            .iter()
            .filter(|problem| problem.kind.severity() == Severity::Error)
            .map(|problem| (line_of(problem), problem.kind.to_string()))
            .collect(),
    }
}

/// Replaces `from` in the good file, and expects exactly one error: on the line of the
/// replacement's first line plus `down`, saying `says`, with `help` in its help.
#[track_caller]
fn breaks(from: &str, to: &str, down: usize, says: &str, help: &str) {
    let at = GOOD.find(from).expect("the good file holds what the test replaces");
    let line = GOOD[..at].matches('\n').count() + 1 + down;
    let text = GOOD.replacen(from, to, 1);
    let report = ClusterFile::parse("levada.toml", &text).expect_err("this file is wrong");
    let found: Vec<&Problem> = report
        .problems
        .iter()
        .filter(|problem| problem.kind.severity() == Severity::Error)
        .collect();
    assert_eq!(found.len(), 1, "{report}");
    assert!(found[0].kind.to_string().contains(says), "{report}");
    assert!(found[0].kind.help().unwrap_or_default().contains(help), "{report}");
    assert_eq!(line_of(found[0]), line, "{report}");
}

#[test]
fn a_good_file_is_read_as_meant() {
    let (cluster, warnings) =
        ClusterFile::parse("levada.toml", GOOD).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(cluster.name, "lab");
    assert_eq!(cluster.drives.len(), 12);
    assert_eq!(cluster.drives[5].name, "d05");
    assert_eq!(cluster.drives[5].enclosure, "e1");
    assert_eq!(cluster.drives[5].size, Some(Bytes::gib(1)));
    assert_eq!(cluster.drives[5].path, Path::new("drives/d05.img"));
    assert_eq!(cluster.arrays[0].level, Level::Raid1 { copies: 3, spread: Spread::Enclosure });
    assert_eq!(cluster.arrays[0].slice, SliceSize::Bytes(Bytes::mib(128)));
    assert_eq!(
        cluster.arrays[1].level,
        Level::Parity { kind: ParityKind::Raid6, data: 8, chunk: Bytes::kib(128) }
    );
    assert_eq!(cluster.arrays[1].slice, SliceSize::Rest);
    assert_eq!(cluster.arrays[1].drives.len(), 12);
    assert_eq!(cluster.filesystems[0].metadata_targets, 1);
    assert_eq!(cluster.mounts[0].filesystem, "fs");
    assert!(cluster.testing.is_none());
    // Four members in one enclosure are more than two parities bear.
    assert_eq!(warnings.problems.len(), 1, "{warnings}");
    assert!(warnings.to_string().contains("does not survive the loss of enclosure"), "{warnings}");
}

#[test]
fn several_hosts_need_no_other_shape() {
    let hosts = "[[host]]\nname = \"h0\"\naddresses = [\"10.0.0.1:7400\", \"[fd00::1]:7400\"]\n\
                 [[host]]\nname = \"h1\"\naddresses = [\"h1.lab:7400\"]\n";
    let mut text = GOOD.replace("[drives]", &format!("{hosts}\n[drives]"));
    for (enclosure, host) in [("e0", "h0"), ("e1", "h1"), ("e2", "h1")] {
        let name = format!("name = \"{enclosure}\"");
        text = text.replace(&name, &format!("{name}\nhost = \"{host}\""));
    }
    text = text.replace("path = \"mnt\"", "path = \"mnt\"\nhost = \"h0\"");
    let (cluster, _) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(cluster.hosts.len(), 2);
    assert_eq!(cluster.enclosures[2].host.as_deref(), Some("h1"));

    // Two hosts may have drives of the same path, under names of their own.
    let text = text.replace(
        "drives = [\"drives/d{04..07}.img\"]",
        "drives = [{ name = \"x{0..3}\", path = \"drives/d{00..03}.img\" }]",
    );
    let (cluster, _) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(
        cluster.drive("x2").map(|drive| drive.path.as_path()),
        Some(Path::new("drives/d02.img"))
    );

    let text = text.replace("host = \"h1\"\n", "");
    let found = errors(&text);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found.iter().all(|(_, text)| text == "[[enclosure]] does not say on which host it is"),
        "{found:?}"
    );
}

#[test]
fn five_hundred_drives_take_few_lines() {
    let mut text = GOOD[..GOOD.find("[[enclosure]]").unwrap()].to_string();
    for shelf in 0..20 {
        text += &format!(
            "[[enclosure]]\nname = \"s{shelf}\"\ndrives = [{{ name = \"s{shelf}-{{00..24}}\", path = \"/dev/s{shelf}n{{00..24}}\" }}]\n"
        );
    }
    text += "[[array]]\nname = \"meta\"\nlevel = \"raid1\"\nslice = \"1%\"\n\
             drives = [\"s0-{00..11}\", \"s1-{00..11}\", \"s2-{00..11}\"]\n";
    for (array, shelves) in ["a", "b", "c", "d"].into_iter().zip([0, 5, 10, 15]) {
        let drives: Vec<String> =
            (shelves..shelves + 5).map(|shelf| format!("\"s{shelf}-{{00..05}}\"")).collect();
        text += &format!(
            "[[array]]\nname = \"{array}\"\nlevel = \"raid6\"\nspares = 2\ndrives = [{}]\n",
            drives.join(", ")
        );
    }
    text +=
        &GOOD[GOOD.find("[[filesystem]]").unwrap()..].replace("data = \"data\"", "data = \"a\"");
    let (cluster, _) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(cluster.drives.len(), 500);
    assert!(cluster.drives.iter().all(|drive| drive.is_block_device()));
}

#[test]
fn testing_is_marked() {
    let text = format!(
        "{GOOD}\n[testing]\nwrapper = \"volatile\"\nmodel = \"nvme\"\nseed = 7\n[[testing.models]]\nname = \"mine\"\nrate = \"1GB\"\niops = 5\n"
    );
    let (cluster, warnings) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    let testing = cluster.testing.unwrap();
    assert_eq!((testing.wrapper, testing.seed), (Wrapper::Volatile, 7));
    assert_eq!(testing.model.unwrap().rate, Bytes(400_000_000));
    assert!(warnings.to_string().contains("not for data that anyone wants to keep"));
    let text = text.replace("\"nvme\"", "\"nvem\"");
    assert_eq!(errors(&text), [(43, "`model` is \"nvem\"".into())]);
}

#[test]
fn mistakes_in_single_keys() {
    breaks(
        "name = \"lab\"",
        "nmae = 1\nname = \"lab\"",
        0,
        "unknown key `nmae` in [cluster]",
        "did you mean `name`?",
    );
    breaks("[drives]", "[dirves]\n[drives]", 0, "unknown table `dirves`", "did you mean `drives`?");
    breaks(
        "stripe_unit =",
        "stripe_units =",
        0,
        "unknown key `stripe_units`",
        "did you mean `stripe_unit`?",
    );
    breaks("[cluster]\nname = \"lab\"", "[cluster]", 0, "[cluster] has no `name`", "name = ");
    breaks("name = \"lab\"", "name = 7", 0, "`name` is a whole number", "a text in quotes");
    breaks("name = \"lab\"", "name = \"a b\"", 0, "cannot be a name", "letters, digits");
    breaks("\"1GiB\"", "\"1G\"", 0, "`size` is not a size: `G` is not a unit", "GiB");
    breaks("\"1GiB\"", "true", 0, "`size` is true or false", "a size such as");
    breaks(
        "level = \"raid6\"",
        "level = \"raid7\"",
        0,
        "`level` is \"raid7\"",
        "`raid0`, `raid1`, `raid10`, `raid5`, `raid6`, `raid50`, `raid60`, `n+m`",
    );
    breaks(
        "level = \"raid6\"",
        "copies = 2\nlevel = \"raid6\"",
        0,
        "no meaning for raid6",
        "`data`, `chunk`",
    );
    breaks("copies = 3", "copies = 1", 0, "`copies` is 1", "allowed: 2 to 8");
    // Once, at the line that all drives have it from.
    breaks("size = \"1GiB\"", "size = \"7MiB\"", 0, "`size` is 7MiB", "allowed: 18MiB");
    breaks("size = \"1GiB\"", "size = 1073741825", 0, "not a multiple", "1MiB");
    let slow = "ceiling = \"10MB\"\nfloor = \"20MB\"";
    let rebuild = format!("[rebuild]\n{slow}\n[[array]]\nname = \"meta\"");
    breaks("[[array]]\nname = \"meta\"", &rebuild, 2, "`floor` is 20", "allowed: 1");
    let none = "[rebuild]\nfloor = 0\n[[array]]\nname = \"meta\"";
    breaks("[[array]]\nname = \"meta\"", none, 1, "`floor` is 0", "allowed: 1");
    let scrub = format!("[scrub]\n{slow}\n[[array]]\nname = \"meta\"");
    breaks("[[array]]\nname = \"meta\"", &scrub, 2, "`floor` is 20", "allowed: 1");
    let unknown = "[scrub]\ngrace_s = 1\n[[array]]\nname = \"meta\"";
    breaks("[[array]]\nname = \"meta\"", unknown, 1, "grace_s", "");
    let worn = "[health]\nused_percent = 101\n[[array]]\nname = \"meta\"";
    breaks("[[array]]\nname = \"meta\"", worn, 1, "`used_percent` is 101", "allowed: 1 to 100");
    breaks("spares = 2", "spares = 1000", 0, "needs 1010 drives", "add drives");
    breaks("spares = 2", "spares = -1", 0, "`spares` is -1", "allowed: 0 to 1000");
    breaks(
        "slice = \"128MiB\"",
        "slice = -5",
        0,
        "not a size: it is less than nothing",
        "a number",
    );
    breaks("slice = \"128MiB\"", "slice = \"0%\"", 0, "neither a size nor a share", "percent");
    breaks("slice = \"128MiB\"", "slice = false", 0, "`slice` is true or false", "rest");
    breaks(
        "metadata = \"meta\"",
        "metadata = \"mata\"",
        0,
        "no array named \"mata\"",
        "did you mean `meta`?",
    );
    breaks(
        "path = \"mnt\"",
        "path = \"mnt\"\nfilesystem = \"gs\"",
        1,
        "no filesystem named",
        "did you mean `fs`?",
    );
    breaks(
        "path = \"mnt\"",
        "path = \"mnt\"\nhost = \"h\"",
        1,
        "no host named \"h\"",
        "the file has no host",
    );
    breaks("[[mount]]\npath = \"mnt\"", "[[mount]]", 0, "[[mount]] has no `path`", "path = ");
    breaks("d{04..07}", "d{07..04}", 0, "the range ends before it starts (7..4)", "one range");
    breaks("[[mount]]", "[mount]", 0, "`mount` is a table", "double brackets");
    breaks("[drives]", "[[drives]]", 0, "`drives` is a list of tables", "one pair of brackets");
}

#[test]
fn mistakes_in_the_whole() {
    let lines: Vec<usize> =
        errors(&GOOD.replace("size = \"1GiB\"", "")).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [9, 12, 15], "one word for each entry of files without size");
    let found = errors(&GOOD.replace("[cluster]\nname = \"lab\"\n", ""));
    assert_eq!(found, [(1, "the file has no [cluster]".into())]);
}

#[test]
fn mistakes_about_drives() {
    breaks(
        "\"drives/d{08..11}.img\"",
        "\"drives/d{08..11}.img\", \"./drives/../drives/d03.img\"",
        0,
        "listed twice: it is drive \"d03\" already (line 9)",
        "one place only",
    );
    breaks(
        "\"drives/d{08..11}.img\"",
        "\"drives/d{08..11}.img\", \"other/d03.img\"",
        0,
        "two drives named \"d03\" (line 9)",
        "name = ",
    );
    breaks(
        "\"drives/d{08..11}.img\"",
        "\"drives/d{08..11}.img\", { path = \"/dev/sda\", size = \"1GiB\" }",
        0,
        "block device",
        "leave `size` out",
    );
    breaks(
        "\"drives/d{08..11}.img\"",
        "\"drives/d{08..11}.img\", { name = \"x{0..2}\", path = \"d{0..1}\" }",
        0,
        "stands for 3 drives and the path for 2",
        "one range",
    );
    breaks(
        "\"drives/d{08..11}.img\"",
        "\"drives/d{08..11}.img\", { path = \"/\" }",
        0,
        "nothing that could name",
        "name = ",
    );
    breaks(
        "\"drives/d{08..11}.img\"",
        "\"drives/d{08..11}.img\", 7",
        0,
        "`drives` is a whole number",
        "a path",
    );
    breaks(
        "\"drives/d{08..11}.img\"",
        "\"drives/d{08..11}.img\", { paht = \"x\", path = \"x\" }",
        0,
        "unknown key `paht`",
        "did you mean `path`?",
    );
    breaks(
        "name = \"e1\"",
        "name = \"e0\"",
        0,
        "two enclosures named \"e0\" (line 8)",
        "name of its own",
    );
    breaks("path = \"mnt\"", "path = \"drives/\"", 0, "lies under the mount", "apart");
    breaks(
        "path = \"mnt\"",
        "path = \"mnt\"\n[[mount]]\npath = \"./mnt\"",
        2,
        "mounted twice (line 39)",
        "one mount",
    );
}

#[test]
fn mistakes_in_geometry() {
    breaks(
        "data = 8",
        "data = 9",
        0,
        "needs 13 drives (9 data + 2 parity + 2 spares), but has 12",
        "add drives",
    );
    breaks(
        "copies = 3",
        "copies = 4",
        0,
        "4 copies in different enclosures, but its drives sit in 3",
        "spread = \"drive\"",
    );
    breaks(
        "copies = 3",
        "copies = 2",
        0,
        "bears the loss of 1, the data array \"data\" of 2",
        "copies = 3",
    );
    breaks(
        "chunk = \"128KiB\"",
        "chunk = \"100KiB\"",
        0,
        "not a power of two",
        "from 4KiB to 1MiB",
    );
    breaks("chunk = \"128KiB\"", "chunk = \"2MiB\"", 0, "`chunk` is 2MiB", "4KiB to 1MiB");
    breaks("chunk = \"128KiB\"", "chunk = 2048", 0, "`chunk` is 2KiB", "4KiB to 1MiB");
    breaks(
        "stripe_unit = \"1MiB\"",
        "stripe_unit = \"1MB\"",
        0,
        "not a multiple of 4KiB",
        "multiples of 4KiB",
    );
    breaks("stripe_unit = \"1MiB\"", "stripe_unit = 0", 0, "`stripe_unit` is 0", "4KiB to 1GiB");
    breaks("stripe_count = 4", "stripe_count = 5", 0, "there are 4 object targets", "1 to 4");
    breaks(
        "slice = \"128MiB\"",
        "slice = \"1GiB\"",
        0,
        "the slices of drive \"d00\" need 1040MiB, but 1022MiB of its 1GiB",
        "labels",
    );
    breaks("slice = \"128MiB\"", "slice = \"1%\"", 0, "would get 10MiB", "at least 16MiB");
    breaks(
        "data = 8",
        "data = 8\nslice = \"rest\"\ndrives = [\"d{00..12}\"]",
        2,
        "no drive named \"d12\"",
        "did you mean",
    );
    breaks(
        "slice = \"128MiB\"\n\n[[array]]",
        "\n[[array]]",
        1,
        "both take the rest of drive \"d00\"",
        "size or a share",
    );
}

/// The data array of the good file with these lines in place of its own.
fn with_data(lines: &str) -> String {
    GOOD.replace("level = \"raid6\"\ndata = 8\nspares = 2\nchunk = \"128KiB\"", lines)
}

/// What the good file says with this data array, its metadata as strong.
#[track_caller]
fn data_array(lines: &str) -> (ClusterFile, String) {
    let text = with_data(lines).replace("copies = 3", "copies = 4\nspread = \"drive\"");
    let (cluster, warnings) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    reads_back(&cluster);
    (cluster, warnings.to_string())
}

#[test]
fn every_level_is_read_placed_and_judged() {
    let survival = |drives, enclosures| Survival { drives, enclosures, ..Survival::default() };
    let chunk = Bytes::kib(128);
    let parity = |kind, data| Level::Parity { kind, data, chunk };
    let (raid50, raid60) = (ParityKind::Raid50 { groups: 4 }, ParityKind::Raid60 { groups: 2 });
    let three = ParityKind::NPlusM { parity: 3 };
    let mirror = |copies, spread| Level::Raid1 { copies, spread };
    // Twelve drives in three enclosures of four.
    let cases = [
        ("level = \"raid5\"", parity(ParityKind::Raid5, 11), survival(1, 0)),
        ("level = \"raid5\"\nspares = 9", parity(ParityKind::Raid5, 2), survival(1, 1)),
        ("level = \"raid6\"\nspares = 6", parity(ParityKind::Raid6, 4), survival(2, 1)),
        // A drive of each enclosure in each group.
        ("level = \"raid50\"\ngroups = 4", parity(raid50, 2), survival(1, 1)),
        ("level = \"raid60\"", parity(raid60, 4), survival(2, 1)),
        ("level = \"n+m\"\nparity = 3", parity(three, 9), survival(3, 0)),
        ("level = \"n+m\"\nparity = 3\ndata = 6\nspares = 3", parity(three, 6), survival(3, 1)),
        ("level = \"raid10\"", mirror(2, Spread::Enclosure), survival(1, 1)),
        ("level = \"raid1\"\ncopies = 2", mirror(2, Spread::Enclosure), survival(1, 1)),
        ("level = \"raid0\"", Level::Raid0 { chunk }, survival(0, 0)),
    ];
    for (lines, level, survives) in cases {
        let (cluster, warnings) = data_array(lines);
        let array = &cluster.arrays[1];
        assert_eq!((array.level, array.survives(&cluster)), (level, survives), "{lines}");
        let placement = array.placement(&cluster);
        assert_eq!(placement.members.len() + placement.spares.len(), 12, "{lines}");
        let warned = survives.enclosures == 0 && survives.drives > 0;
        assert_eq!(
            warnings.contains("array \"data\" does not survive the loss of enclosure"),
            warned,
            "{lines}"
        );
    }
}

#[test]
fn groups_share_every_enclosure() {
    // Enclosures of six, four and two drives: no group has more than half of any.
    let uneven = GOOD.replace("d{00..03}", "d{00..05}").replace("d{04..07}", "d{06..09}");
    let uneven = uneven
        .replace("d{08..11}", "d{10..11}")
        .replace("copies = 3", "copies = 3\nspread = \"drive\"");
    let lines = "level = \"raid60\"\ngroups = 2";
    let text = uneven.replace("level = \"raid6\"\ndata = 8\nspares = 2\nchunk = \"128KiB\"", lines);
    let (cluster, warnings) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    let groups = cluster.arrays[1].members_by_enclosure(&cluster);
    assert_eq!(groups, [[("e0", 3), ("e1", 2), ("e2", 1)], [("e0", 3), ("e1", 2), ("e2", 1)]]);
    assert!(
        warnings.to_string().contains("\"e0\", which holds 3 of the members of one group"),
        "{warnings}"
    );
}

#[test]
fn mistakes_in_levels() {
    let cases = [
        ("level = \"n+m\"", 23, "[[array]] has no `parity`"),
        ("level = \"n+m\"\nparity = 5", 26, "`parity` is 5"),
        ("level = \"n+m\"\nparity = 0", 26, "`parity` is 0"),
        ("level = \"n+m\"\nparity = 3\ndata = 30", 27, "`data` is 30"),
        ("level = \"n+m\"\nparity = 2\ngroups = 2", 27, "`groups` has no meaning for n+m"),
        ("level = \"raid5\"\nparity = 1", 26, "`parity` has no meaning for raid5"),
        ("level = \"raid50\"\ngroups = 1", 26, "`groups` is 1"),
        (
            "level = \"raid60\"\ngroups = 3\ndata = 3",
            27,
            "raid60 array \"data\" needs 15 drives (9 data + 6 parity), but has 12",
        ),
        (
            "level = \"raid10\"\ncopies = 3\nspares = 9",
            25,
            "raid10 array \"data\" needs 13 drives (3 copies + 1 more to stripe over + 9 spares), but has 12",
        ),
        ("level = \"raid6\"\ndata = 31", 26, "`data` is 31"),
    ];
    for (lines, line, says) in cases {
        let found = errors(&with_data(lines));
        assert_eq!(found, [(line, says.to_owned())], "{lines}");
    }
    // Metadata outlive data, and stay on a mirror.
    let found = errors(&with_data("level = \"n+m\"\nparity = 3"));
    assert!(found[0].1.contains("bears the loss of 2, the data array \"data\" of 3"), "{found:?}");
    // All drives of a pool at once make a stripe too wide, unless it is divided.
    let many = |lines| {
        with_data(lines)
            .replace("d{08..11}", "d{08..39}")
            .replace("copies = 3", "copies = 3\nspread = \"drive\"")
    };
    let found = errors(&many("level = \"raid6\""));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].1.contains("has 40 chunks, 38 of data and 2 of parity"), "{found:?}");
    assert_eq!(errors(&many("level = \"raid60\"\ngroups = 2")), []);
}

#[test]
fn spares_of_the_cluster_belong_to_no_array() {
    let spares = "[spares]\ndrives = [\"d03\", \"d07\", \"d11\"]\n\n[[array]]\nname = \"meta\"";
    let text = GOOD
        .replace("[[array]]\nname = \"meta\"", spares)
        .replace("spares = 2", "spares = 0")
        .replace("data = 8", "data = 7");
    let (cluster, _) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(cluster.spares, ["d03", "d07", "d11"]);
    assert_eq!(cluster.arrays[1].drives.len(), 9);
    reads_back(&cluster);
    let alone = |lines: &str| {
        errors(&text.replace("[spares]\ndrives = [\"d03\", \"d07\", \"d11\"]", lines))
    };
    assert_eq!(alone("[spares]"), [(17, "[spares] has no `drives`".into())]);
    let unknown = alone("[spares]\ndrives = [\"d12\"]");
    assert_eq!(unknown[0], (18, "there is no drive named \"d12\"".into()));
    let twice = alone("[spares]\ndrives = [\"d03\", \"d03\"]");
    assert_eq!(twice[0], (18, "there are two spares named \"d03\"".into()));
    let both = errors(&text.replace("data = 7", "data = 7\ndrives = [\"d{00..08}\"]"));
    let says = "drive \"d03\" is a spare of the cluster and a drive of array \"data\"";
    assert_eq!(both, [(30, says.into())]);
}

#[test]
fn arrays_that_formats_cannot_hold() {
    let text = GOOD.replace("d{08..11}", "d{08..63}").replace("data = 8\n", "");
    let found = errors(&text);
    assert_eq!(
        found,
        [(17, "array \"meta\" has 64 drives".into()), (23, "array \"data\" has 64 drives".into())]
    );
    let text = GOOD.replace("d{08..11}", "d{08..20}");
    let found = errors(&text);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, 17);
    assert!(found[0].1.contains("enclosure \"e2\" holds 13 of its 21 members"), "{found:?}");
    assert_eq!(errors(&text.replace("copies = 3", "copies = 3\nspread = \"drive\"")), []);
    let text = GOOD.replace("drives/d{08..11}", "drives/a-drive-with-a-very-long-name{08..11}");
    assert!(errors(&text)[0].1.contains("cannot be a name"));
}

#[test]
fn mistakes_about_file_systems() {
    breaks("metadata = \"meta\"", "metadata = \"data\"", 0, "same array", "");
    breaks(
        "data = \"data\"\nmetadata = \"meta\"",
        "data = \"meta\"\nmetadata = \"data\"",
        1,
        "the metadata array \"data\" is raid6",
        "raid1",
    );
    breaks(
        "object_targets = 4",
        "object_targets = 4\nmetadata_targets = 2",
        1,
        "`metadata_targets` is 2",
        "1 to 1",
    );
    let second = "[[filesystem]]\nname = \"gs\"\ndata = \"data\"\nmetadata = \"meta\"\n[[mount]]\nfilesystem = \"fs\"";
    breaks("[[mount]]", second, 0, "the file has 2 of [[filesystem]]", "exactly one");
}

#[test]
fn all_errors_are_reported_in_order() {
    let text = GOOD
        .replace("\"lab\"", "\"l b\"")
        .replace("copies = 3", "copies = 33")
        .replace("chunk = \"128KiB\"", "chnuk = \"128KiB\"")
        .replace("object_targets", "objet_targets")
        .replace("stripe_count = 4", "stripe_count = 900");
    let lines: Vec<usize> = errors(&text).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [2, 20, 28, 34, 36]);
}

#[test]
fn bad_toml_has_its_line() {
    let found = errors(&GOOD.replace("copies = 3", "copies = "));
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].0, 20, "{found:?}");
    let found = errors(&GOOD.replace("copies = 3", "copies = 3\ncopies = 3"));
    assert_eq!(found[0].0, 21, "{found:?}");
    let found = errors("");
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 1], "{found:?}");
}

#[test]
fn a_report_reads_like_a_compilers() {
    let report =
        ClusterFile::parse("levada.toml", &GOOD.replace("stripe_unit", "strip_unit")).unwrap_err();
    let expected = "\
error: unknown key `strip_unit` in [[filesystem]]
  --> levada.toml:35:1
   |
35 | strip_unit = \"1MiB\"
   | ^^^^^^^^^^
   = help: did you mean `stripe_unit`? allowed here: `name`, `data`, `metadata`, `object_targets`, `metadata_targets`, `stripe_unit`, `stripe_count`, `survives`
";
    assert!(report.to_string().ends_with(expected), "{report}");
}

#[test]
fn a_mistake_far_to_the_right_is_shown_and_a_huge_file_is_refused() {
    let text = format!("{}x = {{ y = \"{}\" }} z", "[cluster]\n", "a".repeat(70_000));
    let report = ClusterFile::parse("levada.toml", &text).expect_err("not TOML");
    assert!(report.to_string().contains("^"), "it points at the place");
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("levada.toml");
    std::fs::write(&path, vec![b'#'; 5 << 20]).expect("written");
    let error = ClusterFile::load(&path).expect_err("too large").to_string();
    assert!(error.contains("larger than 4MiB"), "{error}");
}

#[test]
fn survival_looks_at_enclosures() {
    let (cluster, _) = ClusterFile::parse("levada.toml", GOOD).unwrap();
    assert_eq!(
        cluster.arrays[0].survives(&cluster),
        Survival { drives: 2, enclosures: 2, ..Survival::default() }
    );
    assert_eq!(cluster.arrays[1].survives(&cluster), Survival { drives: 2, ..Survival::default() });
    assert_eq!(cluster.survives().to_string(), "any 2 drives");
    // Copies on different drives of one enclosure go with it.
    let (cluster, _) = ClusterFile::parse(
        "levada.toml",
        &GOOD.replace("copies = 3", "copies = 3\nspread = \"drive\""),
    )
    .unwrap();
    assert_eq!(cluster.arrays[0].survives(&cluster), Survival { drives: 2, ..Survival::default() });
}

#[test]
fn the_box_survives_two_drives_and_one_enclosure() {
    let cluster = ClusterFile::box_default(Path::new("/x"), 100 << 30).unwrap();
    assert_eq!(cluster.check(), []);
    assert_eq!(cluster.survives().to_string(), "any 2 drives, any 1 enclosure");
    assert_eq!(cluster.arrays[0].survives(&cluster).to_string(), "any 2 drives, any 2 enclosures");
    let placement = cluster.arrays[1].placement(&cluster);
    assert_eq!(
        placement.members,
        ["d00", "d02", "d04", "d06", "d08", "d10", "d01", "d03", "d05", "d07"]
    );
    assert_eq!(placement.spares, ["d11", "d09"]);
}

#[test]
fn the_box_fits_its_space() {
    let of = |free: u64| ClusterFile::box_default(Path::new("/x"), free);
    assert_eq!(of(1 << 40).unwrap().drives[0].size, Some(Bytes::gib(4)));
    assert_eq!(of(36 << 30).unwrap().drives[0].size, Some(Bytes::gib(1)));
    assert_eq!(of(18 << 30).unwrap().drives[0].size, Some(Bytes::mib(512)));
    let error = of((18 << 30) - 1).unwrap_err().to_string();
    assert_eq!(
        error,
        "/x has 18431MiB free; a box needs 18GiB: 12 drives of at least 512MiB, in at most a third of the free space"
    );
    let cluster = of(18 << 30).unwrap();
    let slice = |array: usize| cluster.slice_bytes(&cluster.arrays[array], "d00", Bytes::mib(512));
    assert_eq!((slice(0), slice(1)), (Some(Bytes::mib(128)), Some(Bytes::mib(382))));
}

#[test]
fn links_to_one_file_are_one_drive() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("drives")).unwrap();
    std::fs::write(directory.path().join("drives/d03.img"), b"").unwrap();
    std::os::unix::fs::symlink("d03.img", directory.path().join("drives/d08.img")).unwrap();
    let file = directory.path().join("levada.toml");
    std::fs::write(&file, GOOD).unwrap();
    let error = ClusterFile::load(&file).unwrap_err();
    let SpecError::Invalid(report) = &error else { panic!("{error}") };
    assert!(
        report
            .to_string()
            .contains("drives/d08.img is listed twice: it is drive \"d03\" already (line 9)"),
        "{report}"
    );
    assert!(report.to_string().contains("levada.toml:15:"), "{report}");

    std::fs::remove_file(directory.path().join("drives/d08.img")).unwrap();
    let loaded = ClusterFile::load(&file).unwrap();
    assert_eq!(
        loaded.path(&loaded.cluster.drives[0].path),
        directory.path().join("drives/d00.img")
    );
    assert!(matches!(
        ClusterFile::load(&directory.path().join("none")),
        Err(SpecError::Read { .. })
    ));
}

#[track_caller]
fn reads_back(cluster: &ClusterFile) {
    let text = cluster.to_toml();
    let (again, _) = ClusterFile::parse("levada.toml", &text)
        .unwrap_or_else(|report| panic!("{report}\n{text}"));
    assert_eq!(&again, cluster, "{text}");
}

#[test]
fn written_files_read_back() {
    for free in [18u64 << 30, 25 << 30, 1 << 40] {
        reads_back(&ClusterFile::box_default(Path::new("/x"), free).unwrap());
    }
    let odd = GOOD
        .replace("[[array]]\nname = \"meta\"", "[rebuild]\nceiling = \"100MB\"\ngrace_s = 0\n[scrub]\nceiling = \"50MB\"\n[health]\nused_percent = 75\n[[array]]\nname = \"meta\"")
        .replace("\"drives/d{08..11}.img\"", "{ name = \"x{8..9}\", path = \"a \\\"b\\\" {8..9}\", size = \"2GiB\" }, \"/dev/n{1..2}\"")
        .replace("chunk = \"128KiB\"", "slice = \"40%\"\ndrives = [\"d{00..07}\", \"x{8..9}\", \"n{1..2}\"]")
        .replace("[cluster]\n", "[cluster]\nnetwork_cores = 4\nring_cores = 3\npower_fence = \"off 'other \\\"server\\\"'\"\n")
        .replace("copies = 3", "copies = 3\nspread = \"drive\"\ndrives = [\"d{00..07}\"]")
        + "[[export]]\nnbd = \"unix:run/nbd\"\n[[export]]\ntenant = \"blue\"\nnbd = \"[::1]:10809\"\ntls = \"certs\"\nverify_clients = true\n[[export]]\nvhost = \"run/vm\"\n"
        + "[[export]]\nnvme = [\"10.0.0.1:4420\", \"[fd00::1]:4420\"]\nhosts = [\"nqn.2014-08.org.example:a\"]\nkeys = \"nvme.keys\"\ntls_only = true\n"
        + "[[export]]\nvirtiofs = \"run/vm1.fs\"\nsubtree = \"/guests/vm1/\"\ntag = \"shared\"\ncache = \"open\"\n"
        + "[testing]\nmodel = \"own\"\n[[testing.models]]\nname = \"own\"\nrate = \"1GB\"\niops = 5\nflush_us = 100\n";
    let (cluster, _) =
        ClusterFile::parse("levada.toml", &odd).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(cluster.rebuild.floor, Bytes(100_000_000), "no more than the ceiling");
    assert_eq!(cluster.rebuild.grace_s, 0);
    assert_eq!(cluster.power_fence.as_deref(), Some("off 'other \"server\"'"));
    assert_eq!((cluster.network_cores, cluster.ring_cores), (4, 3));
    let fifty = Bytes(50_000_000);
    assert_eq!((cluster.scrub.floor, cluster.scrub.ceiling), (fifty, Some(fifty)));
    let [first, second, third, fourth, fifth] = &cluster.exports[..] else {
        panic!("{:?}", cluster.exports)
    };
    assert_eq!(first.tenant, "default");
    assert_eq!(first.way.place(), ("nbd", "unix:run/nbd".into()));
    assert_eq!(second.tenant, "blue");
    assert!(matches!(second.way, ExportWay::Nbd { verify_clients: true, .. }));
    assert_eq!(third.way, ExportWay::Vhost { directory: "run/vm".into() });
    assert_eq!(fourth.way.place(), ("nvme", "10.0.0.1:4420, [fd00::1]:4420".into()));
    assert_eq!(fifth.way.place(), ("virtiofs", "run/vm1.fs".into()));
    let virtiofs = ExportWay::Virtiofs {
        socket: "run/vm1.fs".into(),
        subtree: "/guests/vm1".parse().unwrap(),
        tag: Some("shared".into()),
        cache: GuestCacheSpec::Open,
    };
    assert_eq!(fifth.way, virtiofs);
    reads_back(&cluster);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Cuts, swaps and splices of a good file are answered and can be printed.
    #[test]
    fn mangled_text_never_panics(edits in prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, "[ -~\n\\[\\]{}=\"\u{e9}]{0,6}"), 1..8)) {
        let mut text = GOOD.to_string();
        for (at, cut, put) in edits {
            let mut chars: Vec<char> = text.chars().collect();
            let at = at.index(chars.len() + 1);
            let end = (at + cut).min(chars.len());
            chars.splice(at..end, put.chars());
            text = chars.into_iter().collect();
        }
        match ClusterFile::parse("levada.toml", &text) {
            Ok((cluster, warnings)) => {
                let _ = warnings.to_string();
                let again = ClusterFile::parse("levada.toml", &cluster.to_toml());
                prop_assert_eq!(again.map(|(cluster, _)| cluster), Ok(cluster));
            }
            Err(report) => prop_assert!(!report.to_string().is_empty()),
        }
    }

    /// Values of any type under known keys are answered too.
    #[test]
    fn mistyped_values_never_panic(line in 0usize..40, value in prop_oneof![
        Just("-9223372036854775808"), Just("9223372036854775807"), Just("[]"), Just("[[]]"), Just("{}"), Just("1.5"),
        Just("true"), Just("\"\""), Just("\"99%\""), Just("\"15PiB\""), Just("18446744073709551615"), Just("[{}]"), Just("1979-05-27"),
        Just("\"x{0..4095}\""), Just("[\"x{0..4095}\"]"), Just("\"\\u0000\""), Just("\"rest\""), Just("0"),
    ]) {
        let text: Vec<String> = GOOD.lines().enumerate().map(|(index, text)| match text.split_once(" = ") {
            Some((key, _)) if index == line => format!("{key} = {value}"),
            _ => text.to_string(),
        }).collect();
        if let Err(report) = ClusterFile::parse("levada.toml", &text.join("\n")) {
            prop_assert!(!report.to_string().is_empty());
        }
    }

    #[test]
    fn noise_never_panics(text in "\\PC{0,200}") {
        let _ = ClusterFile::parse("levada.toml", &text).map_err(|report| report.to_string());
    }
}

#[test]
fn the_documented_example_is_good() {
    let page = include_str!("../../../../docs/cluster-file.md");
    let example = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next());
    let (cluster, _) =
        ClusterFile::parse("cluster-file.md", example.expect("the page opens with an example"))
            .unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(cluster.drives.len(), 18);
    reads_back(&cluster);
}

//! Enclosures on the network, and layouts that survive what was asked of them.

use super::{GOOD, errors, line_of, reads_back};
use levada_spec::{ClusterFile, Survival};
use std::path::Path;

/// Three enclosures on the network, of two drives and two paths each; the tests below break one line each.
const REMOTE: &str = r#"[cluster]
name = "lab"
[[enclosure]]
name = "e1"
url = "nvme+tcp://10.0.0.1,10.0.1.1/nqn.2014-08.org.example:e1?hdgst=1&ddgst=1"
drives = ["{1..2}"]
[[enclosure]]
name = "e2"
url = "nvme+tcp://10.0.0.2:4420,10.0.1.2:4421/nqn.2014-08.org.example:e2"
drives = [1, { name = "b{2..2}", namespace = "{2..2}" }]
[[enclosure]]
name = "e3"
url = "nvme+tcp://[fd00::3]:4420,h3.example/nqn.2014-08.org.example:e3"
drives = ["{01..02}"]
[[array]]
name = "meta"
level = "raid1"
slice = "128MiB"
[[array]]
name = "data"
level = "raid6"
survives = { drives = 2, enclosures = 1, paths = 1, servers = 1 }
[[filesystem]]
name = "fs"
data = "data"
metadata = "meta"
survives = { enclosures = 1 }
"#;

#[test]
fn enclosures_on_the_network_are_read_as_meant() {
    let (cluster, warnings) =
        ClusterFile::parse("levada.toml", REMOTE).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(warnings.problems, []);
    let names: Vec<&str> = cluster.drives.iter().map(|drive| &*drive.name).collect();
    assert_eq!(names, ["e1-1", "e1-2", "e2-1", "b2", "e3-01", "e3-02"]);
    assert_eq!(
        cluster.drives[1].path,
        Path::new(
            "nvme+tcp://10.0.0.1:4420,10.0.1.1:4420/nqn.2014-08.org.example:e1?ns=2&hdgst=1&ddgst=1"
        )
    );
    let namespaces: Vec<_> = cluster.drives.iter().map(|drive| drive.namespace()).collect();
    assert_eq!(namespaces, [1, 2, 1, 2, 1, 2].map(Some));
    assert!(cluster.drives.iter().all(|drive| drive.is_remote() && !drive.is_block_device()));
    let survival = Survival { drives: 2, enclosures: 1, paths: Some(1), hosts: 0, servers: true };
    assert_eq!(cluster.array("data").expect("it is there").survives(&cluster), survival);
    assert_eq!(
        cluster.survives().to_string(),
        "any 2 drives, any 1 enclosure, any 1 path to each enclosure"
    );
    reads_back(&cluster);
    // Hosts may go as long as one is left: any of them reaches the drives.
    let hosts = "[[host]]\nname = \"a\"\n[[host]]\nname = \"b\"\n[[enclosure]]\nname = \"e1\"";
    let text = REMOTE.replacen("[[enclosure]]\nname = \"e1\"", hosts, 1);
    let (cluster, _) =
        ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(cluster.survives().hosts, 1);
    reads_back(&cluster);
}

/// Two of three copies that go at once are a majority, which another server may open; where nobody else reaches the drives one copy is enough.
#[test]
fn a_majority_of_copies_on_the_network_must_not_go_at_once() {
    let local = |line: &str| match line {
        line if line.starts_with("url") => String::new(),
        line if line.starts_with("survives") => line.replace(", servers = 1", ""),
        line if line.starts_with("drives = [") => {
            format!("drives = [\"/dev/disk{}-{{1..2}}\"]", line.len())
        }
        line => line.to_owned(),
    };
    let local: Vec<String> = REMOTE.lines().map(local).collect();
    for (text, enclosures) in [(REMOTE.to_owned(), 1), (local.join("\n"), 2)] {
        let (cluster, _) =
            ClusterFile::parse("levada.toml", &text).unwrap_or_else(|report| panic!("{report}"));
        let survival = cluster.array("meta").expect("it is there").survives(&cluster);
        assert_eq!((survival.drives, survival.enclosures), (2, enclosures));
    }
}

#[test]
fn a_url_is_no_place_below_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("levada.toml");
    std::fs::write(&path, REMOTE).expect("written");
    let loaded = ClusterFile::load(&path).unwrap_or_else(|error| panic!("{error}"));
    let drive = &loaded.cluster.drives[0];
    assert_eq!(loaded.path(&drive.path).as_os_str(), drive.path.as_os_str());
}

#[test]
fn mistakes_about_enclosures_on_the_network() {
    let url_of_e2 = "nvme+tcp://10.0.0.2:4420,10.0.1.2:4421/nqn.2014-08.org.example:e2";
    let with_host = "host = \"a\"\nurl = \"nvme+tcp://10.0.0.2:4420,10.0.1.2:4421";
    for (from, to, line, says, help) in [
        ("10.0.1.1/nqn", "10.0.0.1:4420/nqn", 5, "the address 10.0.0.1:4420 is there twice", ""),
        (url_of_e2, "nvme+tcp://10.0.0.2", 9, "it names no subsystem", "write addresses and a"),
        ("example:e2", "example:e2?ns=1", 9, "it names a namespace", "leave `ns` out"),
        (
            "nqn.2014-08.org.example:e2",
            "nqn.2014-08.org.nvmexpress.discovery",
            9,
            "tells of subsystems",
            "levada enclosure find",
        ),
        ("example:e2", "example:e1", 9, "e1\" is the subsystem nqn.2014-08", "one `url`"),
        ("drives = [1, {", "drives = [1, 1, {", 10, "drive \"e2-1\" already (line 10)", ""),
        ("{1..2}", "{0..2}", 6, "\"0\" is no number of a namespace", "from 1 on"),
        ("{1..2}", "/dev/sda", 6, "\"/dev/sda\" is no number of a namespace", "\"{1..8}\""),
        ("[1, {", "[1.5, {", 10, "`drives` is a number with a fraction", ""),
        ("namespace = \"{2..2}\"", "path = \"x\"", 10, "unknown key `path` in a drive", ""),
        ("drives = [\"{1..2}\"]", "drives = [\"{1..2}\"]\nsize = \"1GiB\"", 7, "`size` has no", ""),
        ("url = \"nvme+tcp://10.0.0.2:4420,10.0.1.2:4421", with_host, 9, "`host` has no", ""),
        ("b{2..2}", "b{2..3}", 10, "stands for 2 drives", ""),
    ] {
        assert!(REMOTE.contains(from), "{from}");
        let text = REMOTE.replacen(from, to, 1);
        let report = ClusterFile::parse("levada.toml", &text).expect_err("this file is wrong");
        let found: Vec<_> = report
            .problems
            .iter()
            .map(|problem| (line_of(problem), problem.kind.to_string(), problem.kind.help()))
            .collect();
        let is_said = |(at, said, told): &(usize, String, Option<String>)| {
            *at == line && said.contains(says) && told.clone().unwrap_or_default().contains(help)
        };
        assert!(found.iter().any(is_said), "{to}: {report}");
    }
    let shown = format!("{REMOTE}[[export]]\nnvme = [\"10.0.9.9:4420\", \"10.0.0.1:4420\"]\n");
    let report = ClusterFile::parse("levada.toml", &shown).expect_err("it is an enclosure's");
    assert!(report.to_string().contains("10.0.0.1:4420 is where enclosure \"e1\" is reached"));
    let local = GOOD.replace("drives/d{00..03}.img", "nvme+tcp://a/nqn.x?ns=1");
    let [(9, said)] = &errors(&local)[..] else { panic!("{:?}", errors(&local)) };
    assert!(said.contains("is a URL"), "{said}");
}

#[test]
fn a_layout_that_survives_less_than_asked_is_refused() {
    let asked = "survives = { drives = 2, enclosures = 1, paths = 1, servers = 1 }";
    let remote = "url = \"nvme+tcp://10.0.0.1,10.0.1.1/nqn.2014-08.org.example:e1?hdgst=1&ddgst=1\"\ndrives = [\"{1..2}\"]";
    for (from, to, line, says) in [
        (asked, "survives = { drives = 3 }", 22, "loss of 3 drives, and survives that of 2"),
        (asked, "survives = { enclosures = 2 }", 22, "2 enclosures, and survives that of 1"),
        (asked, "survives = { paths = 2 }", 22, "2 paths, and survives that of 1"),
        (remote, "drives = [\"/dev/a\", \"/dev/b\"]", 21, "1 server, and survives that of none"),
        (
            "[[array]]",
            "[[enclosure]]\nname = \"e4\"\ndrives = [\"/dev/x\"]\n[spares]\ndrives = [\"e4-1\"]\n[[array]]",
            27,
            "1 server, and survives that of none",
        ),
        (asked, "survives = { hosts = 1 }", 22, "1 host, and survives that of none"),
        ("survives = { enclosures = 1 }", "survives = { enclosures = 2 }", 27, "filesystem \"fs\""),
        ("10.0.0.1,10.0.1.1", "10.0.0.1", 22, "1 path, and survives that of none"),
        ("\"raid6\"", "\"raid5\"", 22, "1 enclosure, and survives that of none"),
        (asked, "survives = { drive = 1 }", 22, "unknown key `drive` in `survives`"),
        (asked, "survives = 2", 22, "`survives` is a whole number"),
        (asked, "survives = { drives = -1 }", 22, "`drives` is -1"),
    ] {
        assert!(REMOTE.contains(from), "{from}");
        let text = REMOTE.replacen(from, to, 1);
        let found = errors(&text);
        let is_said = |(at, said): &(usize, String)| *at == line && said.contains(says);
        assert!(found.iter().any(is_said), "{to}: {found:?}");
    }
    // Where nothing is on the network no path can be lost.
    let local = GOOD.replace("data = 8", "data = 8\nsurvives = { paths = 1 }");
    assert_eq!(errors(&local), []);
}

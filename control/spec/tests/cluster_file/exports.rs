//! Where volumes and directories are shown, and to whom.

use super::{GOOD, errors};

/// A table of these keys, before what follows in the good file.
fn export(keys: &str) -> String {
    format!("[[export]]\n{keys}\n[[mount]]")
}

/// An export of these keys is refused, `down` lines below its beginning.
fn breaks(keys: &str, down: usize, says: &str, help: &str) {
    super::breaks("[[mount]]", &export(keys), down, says, help);
}

#[test]
fn mistakes_about_exports() {
    breaks("", 0, "[[export]] has no `nbd`", "nbd = ");
    for text in ["10809", "unix:", "127.0.0.1:0", "127.0.0.1:99999", "[fd00::1]"] {
        let says = format!("\"{text}\" is no address of an export");
        breaks(&format!("nbd = \"{text}\""), 1, &says, "unix:");
    }
    breaks("tenant = \"a/b\"\nnbd = \"unix:a\"", 1, "\"a/b\" cannot be a name", "letters");
    breaks("nbd = \"unix:a\"\nverify_clients = true", 2, "has no `tls`", "tls = ");
    breaks("nbd = \"unix:a\"\nverify_clients = 1", 2, "`verify_clients` is", "true or false");
    let twice = "nbd = \"unix:a\"\n[[export]]\ntenant = \"blue\"\nnbd = \"unix:a\"";
    breaks(twice, 4, "unix:a is used by two exports, or twice by one (line ", "one tenant");
    let twice = "vhost = \"run\"\n[[export]]\ntenant = \"blue\"\nvhost = \"run\"";
    breaks(twice, 4, "run is used by two exports, or twice by one (line ", "one tenant");
    let twice = "nvme = [\"10.0.0.1:1\", \"10.0.0.2:1\", \"10.0.0.1:1\"]";
    breaks(twice, 1, "10.0.0.1:1 is used by two exports, or twice by one (line ", "one tenant");
    for (one, two, address) in [
        ("nbd = \"127.0.0.1:1\"", "nvme = [\"127.0.0.1:1\"]", "127.0.0.1:1"),
        ("nvme = [\"[::1]:1\"]", "nbd = \"[::1]:1\"", "[::1]:1"),
        ("nbd = \"0.0.0.0:1\"", "nvme = [\"10.0.0.1:2\", \"10.0.0.1:1\"]", "10.0.0.1:1"),
        ("nbd = \"10.0.0.1:1\"", "nbd = \"[::]:1\"", "[::]:1"),
        ("nbd = \"unix:a\"", "nbd = \"unix:./a\"", "unix:./a"),
        ("nbd = \"unix:a\"", "virtiofs = \"a\"\nsubtree = \"/g\"", "a"),
    ] {
        let says = format!("{address} is used by two exports, or twice by one (line ");
        breaks(&format!("{one}\n[[export]]\n{two}"), 3, &says, "one tenant");
    }
    for (one, two) in [
        ("nbd = \"127.0.0.1:1\"", "nvme = [\"127.0.0.1:2\"]"),
        ("nbd = \"0.0.0.0:1\"", "nbd = \"[::1]:1\""),
        ("nbd = \"a:1\"", "nbd = \"b:1\""),
    ] {
        let both = export(&format!("{one}\n[[export]]\n{two}"));
        assert!(errors(&GOOD.replace("[[mount]]", &both)).is_empty(), "{both}");
    }
    for (keys, address) in
        [("nbd = \"10.0.0.1:1\"", "10.0.0.1:1"), ("nvme = [\"0.0.0.0:1\"]", "0.0.0.0:1")]
    {
        let host =
            format!("[[host]]\nname = \"h\"\naddresses = [\"10.0.0.1:1\"]\n{}", export(keys));
        let says = format!("{address} is where host \"h\" listens for clients (line ");
        super::breaks("[[mount]]", &host, 4, &says, "nothing else has");
    }
    breaks("vhost = \"run\"\nnbd = \"unix:a\"", 2, "in one way, `nbd`", "for each");
    breaks("vhost = \"run\"\ntls = \"certs\"", 2, "in one way, `tls`", "for each");
    breaks("nvme = [\"a\"]", 1, "\"a\" is no address of an export", "host:port");
    breaks("nvme = \"10.0.0.1:4420\"", 1, "`nvme` is", "a list");
    breaks("nvme = []", 1, "has no `nvme`", "nvme = [");
    let host = "nvme = [\"10.0.0.1:4420\"]\nhosts = [\"box\"]";
    breaks(host, 2, "\"box\" is no name of an NVMe host", "hostnqn");
    let twice = "nvme = [\"a:1\"]\n[[export]]\nnvme = [\"a:2\"]";
    breaks(twice, 3, "by two exports (line ", "into one");
    breaks("nvme = [\"a:1\"]\nnbd = \"unix:a\"", 2, "in one way, `nbd`", "for each");
    breaks("nbd = \"unix:a\"\nhosts = []", 2, "in one way, `hosts`", "for each");
    breaks("vhost = \"run\"\nkeys = \"k\"", 2, "in one way, `keys`", "for each");
    breaks("nvme = [\"10.0.0.1:4420\"]\ntls_only = true", 2, "keys", "keys = \"keys\"");
}

#[test]
fn mistakes_about_directories_for_guests() {
    breaks("virtiofs = \"a\"", 0, "[[export]] has no `subtree`", "/guests/vm1");
    for (text, reason) in [
        ("/", "it is the whole file system"),
        ("guests", "it does not begin with /"),
        ("/.levada/volumes", "/.levada is the cluster's own"),
        ("/guests/../x", "\"..\" in it is no name"),
    ] {
        let says = format!("\"{text}\" is no directory to show by itself: {reason}");
        breaks(&format!("virtiofs = \"a\"\nsubtree = \"{text}\""), 2, &says, "/guests/vm1");
    }
    let one = "virtiofs = \"a\"\nsubtree = \"/g/one\"";
    let long = format!("{one}\ntag = \"{}\"", "t".repeat(37));
    breaks(&long, 3, "is longer than 36 bytes", "the cluster's name");
    breaks(&format!("{one}\ncache = \"opne\""), 3, "`cache` is \"opne\"", "`open`");
    breaks(&format!("{one}\nvhost = \"run\""), 3, "in one way, `vhost`", "for each");
    breaks(&format!("{one}\nnbd = \"unix:b\""), 3, "in one way, `nbd`", "for each");
    breaks("nbd = \"unix:b\"\nsubtree = \"/g\"", 2, "in one way, `subtree`", "for each");
    breaks("vhost = \"run\"\ntag = \"t\"", 2, "in one way, `tag`", "for each");
    let again = format!("{one}\n[[export]]\n{one}");
    breaks(&again, 4, "a is used by two exports", "named once");
    let same = format!("{one}\n[[export]]\nvirtiofs = \"./x/../a\"\nsubtree = \"/g/two\"");
    breaks(&same, 4, "./x/../a is used by two exports", "named once");
    for other in ["/g/one", "/g", "/g/one/deep"] {
        let keys = format!(
            "{one}\n[[export]]\ntenant = \"blue\"\nvirtiofs = \"b\"\nsubtree = \"{other}\""
        );
        let says = format!("{other} is shown to guests of two tenants, or in what is (line ");
        breaks(&keys, 6, &says, "that no other has");
    }
    // Two guests of one tenant may share a directory.
    let shared = format!("{one}\n[[export]]\nvirtiofs = \"b\"\nsubtree = \"/g\"");
    assert!(errors(&GOOD.replace("[[mount]]", &export(&shared))).is_empty());
}

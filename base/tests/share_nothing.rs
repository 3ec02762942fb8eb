//! The I/O path takes no locks and shares no atomics (design, "one reactor per core"): counted in the
//! sources, since a lock that nobody waits for on two cores costs nothing that could be measured there.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The crates that a read or a write goes through.
const IO_PATH: [&str; 14] = [
    "base",
    "block/parity",
    "block/tls",
    "block/device",
    "block/raid",
    "store/kv",
    "store/log",
    "fs/wire",
    "fs/object",
    "fs/meta",
    "fs/client",
    "export/file",
    "fs/mount",
    "fs/fuse",
];

/// Files where two threads meet, and what passes there.
const MEETING_PLACES: [&str; 18] = [
    // A message to another core: its queue, and the bell that wakes a core that sleeps.
    "base/src/reactor/bell.rs",
    "base/src/reactor/mailbox.rs",
    "base/src/reactor/worker.rs",
    // Starting a reactor on another thread.
    "base/src/reactor/beside.rs",
    // A thread that carries sockets for a reactor: orders to it, results from it, and who of both sleeps.
    "base/src/reactor/carrier.rs",
    // What goes from a reactor to another one: memory to be filled, and what was filled.
    "base/src/lent.rs",
    "base/src/handed.rs",
    // A number for each ring, when it is made.
    "base/src/reactor/ring.rs",
    // Two processes of one machine: the counts of a pipe in memory that both have mapped.
    "base/src/reactor/pipe.rs",
    // The kernels for this processor: chosen once, only read after that.
    "block/parity/src/kernel/mod.rs",
    "base/src/checksum/mod.rs",
    // The thread of the key-value store, which writes checkpoints beside the reactor.
    "store/kv/src/checkpoint/engine.rs",
    "store/kv/src/checkpoint/space.rs",
    // Serving a mount from a plain thread, for tests and tools.
    "fs/fuse/src/transport/blocking.rs",
    // The thread that looks directories up, for which the kernel may let it wait, too.
    "fs/mount/src/files/places.rs",
    // The thread that writes notifications, for which the kernel may let it wait.
    "fs/fuse/src/transport/notifier.rs",
    // The thread that asks a drive of this machine for its health, for which it waits.
    "block/device/src/local_nvme.rs",
    // What tells the hosts of this process from others: chosen once, only read after that.
    "block/device/src/nvme/host.rs",
];

const SHARED: [&str; 8] =
    ["Mutex", "RwLock", "Condvar", "Atomic", "Arc", "OnceLock", "LazyLock", "mpsc"];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// True when a line of code, comments apart, names a type that threads share.
fn shares(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.into_iter().any(|word| {
        SHARED.iter().any(|shared| match *shared {
            "Atomic" => word.starts_with("Atomic"),
            exact => word == exact,
        })
    })
}

#[test]
fn the_io_path_has_no_locks_and_shares_no_atomics() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut files = Vec::new();
    for part in IO_PATH {
        sources(&root.join(part).join("src"), &mut files);
    }
    assert!(files.len() > 100, "only {} files were looked at", files.len());
    for file in files {
        let text = fs::read_to_string(&file).expect("UTF-8");
        // Tests at the end of a file are not on the path.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let count = code.lines().filter(|line| shares(line)).count();
        if count > 0 {
            let name = file.strip_prefix(root).expect("in the workspace").display().to_string();
            counts.insert(name, count);
        }
    }
    for place in MEETING_PLACES {
        assert!(counts.remove(place).is_some(), "{place} shares nothing any more: strike it off");
    }
    assert!(counts.is_empty(), "locks or shared atomics on the I/O path: {counts:?}");
}

#[test]
fn what_is_counted() {
    assert!(shares("    port: Mutex<Port<Up, Down>>,"));
    assert!(shares("use std::sync::atomic::{AtomicBool, Ordering};"));
    assert!(!shares("    // No Mutex here."));
    assert!(!shares("let architecture = Rc::new(1);"));
}

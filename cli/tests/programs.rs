//! Programs that people run, on a mount: they find what they would find on a local file system, also when the node
//! or the mount is killed under them.
//!
//! `make test` installs them (`scripts/suites`). Needs root, io_uring and /dev/fuse.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use support::{Cluster, TINY, can_run, said, signal, wait_until};

/// `None`, and says so, where the programs are not known to be installed.
fn mounted(name: &str) -> Option<Cluster> {
    if !can_run() || std::env::var_os("LEVADA_TOOLS").is_none() {
        eprintln!("skipped: not run by scripts/test, which installs the programs");
        return None;
    }
    let cluster = Cluster::new(name, &TINY.replace("72MiB", "256MiB"));
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    Some(cluster)
}

/// Runs a line in a shell, in `dir`; it must succeed. What it printed.
fn shell(dir: &Path, line: &str) -> String {
    let output = Command::new("bash")
        .args(["-euo", "pipefail", "-c", line])
        .current_dir(dir)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_AUTHOR_NAME", "a")
        .env("GIT_AUTHOR_EMAIL", "a@example.org")
        .env("GIT_COMMITTER_NAME", "a")
        .env("GIT_COMMITTER_EMAIL", "a@example.org")
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let said = said(&output);
    assert!(output.status.success(), "{line}: {said}");
    said
}

/// A tree with what trees have: folders in folders, empty, small and larger files, programs, links of both sorts.
fn make_tree(dir: &Path) {
    for folder in 0..20 {
        let folder = dir.join(format!("folder {folder}/deeper/and deeper"));
        fs::create_dir_all(&folder).expect("made");
        for file in 0..30_usize {
            let bytes: Vec<u8> = (0..file * file * 37).map(|at| (at * file) as u8).collect();
            fs::write(folder.join(format!("file-{file}")), bytes).expect("written");
        }
        let program = folder.join("program");
        fs::write(&program, "#!/bin/sh\n").expect("written");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o750)).expect("set");
        symlink("../../missing", folder.join("nowhere")).expect("linked");
        fs::hard_link(&program, folder.join("same")).expect("linked");
    }
}

#[test]
fn git_keeps_a_repository() {
    let Some(cluster) = mounted("git") else { return };
    let (origin, mnt) = (cluster.path("origin"), cluster.mnt());
    make_tree(&origin);
    shell(&origin, "git init -q -b main && git add -A && git commit -qm first");
    shell(
        &origin,
        "rm -r 'folder 3' && echo more >> 'folder 4/more' && git add -A && git commit -qm second",
    );
    let clone = format!("git clone -q file://{} clone", origin.display());
    shell(&mnt, &clone);
    let work = mnt.join("clone");
    for _ in 0..2 {
        shell(&work, "git checkout -q main~1 && test -e 'folder 3' && git checkout -q main");
        assert_eq!(shell(&work, "git status --porcelain"), "");
        shell(&work, "git gc -q --prune=now && git fsck --full --strict");
    }
    shell(&work, "git checkout -qb branch && git mv 'folder 4' moved && git commit -qam moved");
    shell(&work, "git stash list && git rebase -q main && git worktree add -q ../second main");
    shell(&mnt, &format!("diff -r --no-dereference -x .git second {}", origin.display()));
}

#[test]
fn archives_and_copies_are_exact() {
    let Some(cluster) = mounted("copies") else { return };
    let (tree, mnt) = (cluster.path("tree"), cluster.mnt());
    make_tree(&tree);
    let tree = tree.display();
    shell(
        &mnt,
        &format!("tar -C {tree} -cf all.tar . && mkdir untarred && tar -C untarred -xpf all.tar"),
    );
    shell(&mnt, "tar -C untarred -df all.tar");
    shell(&mnt, "cp -a --reflink=auto untarred copied && mv copied moved");
    let rsync = "rsync -aHAXi --delete --checksum";
    shell(
        &mnt,
        &format!(
            "{rsync} {tree}/ synced/ > /dev/null && rm -r 'synced/folder 1' && touch synced/odd"
        ),
    );
    shell(&mnt, &format!("{rsync} {tree}/ synced/ | grep 'deleting .*odd' > /dev/null"));
    for copy in ["untarred", "moved", "synced"] {
        // Nothing is left to do, by content, kind, mode, owner, time and links.
        assert_eq!(shell(&mnt, &format!("{rsync} -n {tree}/ {copy}/")), "", "{copy}");
    }
}

#[test]
fn cargo_builds() {
    let Some(cluster) = mounted("cargo") else { return };
    let mnt = cluster.mnt();
    let cargo = env!("CARGO");
    shell(
        &mnt,
        &format!(
            "{cargo} new -q --vcs none hello && cd hello && {cargo} build -q --offline --target-dir target"
        ),
    );
    assert_eq!(shell(&mnt, "hello/target/debug/hello"), "Hello, world!\n");
    let again =
        shell(&mnt, &format!("cd hello && {cargo} build -v --offline --target-dir target 2>&1"));
    assert!(again.contains("Fresh hello"), "{again}");
}

/// Rows go in one transaction each; node and mount are killed. What was said to be committed is there.
fn database(name: &str, journal: &str) {
    let Some(cluster) = mounted(name) else { return };
    let file = cluster.mnt().join("db");
    let open = |file: &Path| {
        // Line by line: what it says is waited for.
        let mut sqlite = Command::new("stdbuf");
        sqlite
            .args(["-oL", "sqlite3", "-batch", "-bail"])
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        sqlite.stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let ask = |question: &str| {
        let mut sqlite = open(&file);
        let mut input = sqlite.stdin.take().expect("piped");
        writeln!(input, ".timeout 10000\n{question}").expect("asked");
        drop(input);
        said(&sqlite.wait_with_output().expect("its output"))
    };
    let made = ask(&format!(
        "PRAGMA journal_mode={journal}; CREATE TABLE t(n INTEGER PRIMARY KEY, x BLOB);"
    ));
    assert_eq!(made.trim(), journal);
    let mut committed = 0;
    for round in 0..3 {
        let mut sqlite = open(&file);
        let (input, output) = (sqlite.stdin.take(), sqlite.stdout.take().expect("piped"));
        let mut input = input.expect("piped");
        writeln!(input, ".timeout 10000\nPRAGMA synchronous=FULL;").expect("asked");
        let mut rows = BufReader::new(output).lines();
        for row in 0..60 {
            let n = committed + 1;
            let insert = format!("INSERT INTO t VALUES({n}, randomblob(3000)); SELECT {n};");
            if writeln!(input, "{insert}").is_err() {
                break;
            }
            match rows.next() {
                Some(Ok(told)) if told == n.to_string() => committed = n,
                _ => break,
            }
            if row == 20 {
                signal("-KILL", cluster.node().expect("it runs"));
                cluster.ok(&["up"]);
            }
            if row == 40 && round < 2 {
                signal("-KILL", cluster.mount_process().expect("it runs"));
            }
        }
        drop(input);
        let _ = sqlite.wait();
        if round < 2 {
            wait_until("the mount is dead", || fs::read_dir(cluster.mnt()).is_err());
            cluster.ok(&["mount", "mnt"]);
        }
        assert_eq!(ask("PRAGMA integrity_check;").trim(), "ok");
        let there = ask("SELECT count(*) FROM t;").trim().parse::<u64>().expect("a number");
        // The one under way may be there, too.
        assert!((committed..=committed + 1).contains(&there), "{there} rows of {committed}");
        committed = there;
    }
    assert!(committed > 100, "{committed}");
}

#[test]
fn sqlite_with_a_rollback_journal_keeps_what_it_committed() {
    database("sqlite-rollback", "delete");
}

#[test]
fn sqlite_with_a_write_ahead_log_keeps_what_it_committed() {
    database("sqlite-wal", "wal");
}

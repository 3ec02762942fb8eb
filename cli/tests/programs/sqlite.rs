//! A database of one file, while node and mount are killed.

use crate::mounted;
use crate::support::{said, signal, wait_until};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

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

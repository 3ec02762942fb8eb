//! A database server, while it, the node and the mount are killed.

use crate::mounted;
use crate::support::{Cluster, LIMIT, said, signal, wait_until};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// It refuses to run as root. Its first database has the same name.
const USER: &str = "postgres";
const INSERTS: u64 = 60;

struct Server {
    /// Of the programs of the newest version that is installed.
    bin: PathBuf,
    /// On the mount: the data, and the socket beside it.
    dir: PathBuf,
    user: u32,
    group: u32,
    postmaster: Option<Child>,
}

impl Server {
    fn new(cluster: &Cluster) -> Self {
        let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed");
        let bin = versions.flatten().map(|version| version.path().join("bin")).max();
        let id = |what: &str| -> u32 {
            let output = Command::new("id").args([what, USER]).output().expect("id");
            said(&output).trim().parse().expect("PostgreSQL's user")
        };
        let (user, group) = (id("-u"), id("-g"));
        // The user must come to the mount.
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(cluster.dir.path(), open).expect("set");
        let dir = cluster.mnt().join("pg");
        fs::create_dir(&dir).expect("made");
        chown(&dir, Some(user), Some(group)).expect("given away");
        let server = Self { bin: bin.expect("a version"), dir, user, group, postmaster: None };
        let data = server.dir.join("data");
        let data = data.to_str().expect("plain text");
        server.run("initdb", &["--data-checksums", "--auth=trust", "--no-locale", "-D", data]);
        server
    }

    fn program(&self, name: &str) -> Command {
        self.as_user(&self.bin.join(name))
    }

    fn as_user(&self, program: &Path) -> Command {
        let mut program = Command::new(program);
        program.uid(self.user).gid(self.group).current_dir("/");
        program.env("PGHOST", &self.dir).env("PGDATABASE", USER);
        program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        program
    }

    /// What it printed; it must succeed.
    fn run(&self, name: &str, arguments: &[&str]) -> String {
        let output = self.program(name).args(arguments).output().expect("it starts");
        let said = said(&output);
        assert!(output.status.success(), "{name} {arguments:?}: {said}");
        said
    }

    fn ask(&self, question: &str) -> String {
        self.run("psql", &["-qAt", "-v", "ON_ERROR_STOP=1", "-c", question]).trim().to_owned()
    }

    /// Starts it, and waits until it has recovered and answers.
    fn start(&mut self) {
        let begun = Instant::now();
        let mut postmaster = None;
        loop {
            // It refuses while processes of the one before are still ending.
            let running = postmaster.get_or_insert_with(|| {
                let mut program = self.program("postgres");
                program.arg("-D").arg(self.dir.join("data")).arg("-k").arg(&self.dir);
                program.args(["-c", "listen_addresses="]).stderr(Stdio::null());
                program.stdout(Stdio::null()).spawn().expect("it starts")
            });
            if running.try_wait().expect("a child").is_some() {
                postmaster = None;
            } else if self.program("pg_isready").output().expect("it starts").status.success() {
                break;
            }
            assert!(begun.elapsed() < LIMIT, "PostgreSQL does not start");
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        self.postmaster = postmaster;
    }

    fn end(&mut self, how: &str) {
        let mut postmaster = self.postmaster.take().expect("it runs");
        signal(how, postmaster.id());
        postmaster.wait().expect("a child");
    }

    fn transfers(&self) -> Child {
        let mut pgbench = self.program("pgbench");
        pgbench.args(["-n", "-c", "3", "-T", "1000"]).stdout(Stdio::null()).stderr(Stdio::null());
        pgbench.spawn().expect("it starts")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGQUIT: at once, but it gives back its shared memory.
        if self.postmaster.is_some() {
            self.end("-QUIT");
        }
    }
}

/// Inserts rows one transaction each, `meanwhile` with the number of each; how many were said to be committed.
fn insert(server: &Server, from: u64, mut meanwhile: impl FnMut(u64)) -> u64 {
    // Line by line: what it says is waited for.
    let mut psql = server.as_user("stdbuf".as_ref());
    psql.arg("-oL").arg(server.bin.join("psql")).args(["-qAt", "-v", "ON_ERROR_STOP=1"]);
    let mut psql = psql.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut input = psql.stdin.take().expect("piped");
    let mut told = BufReader::new(psql.stdout.take().expect("piped")).lines();
    let mut committed = from;
    for row in 0..INSERTS {
        let n = committed + 1;
        if writeln!(input, "INSERT INTO acknowledged VALUES ({n}) RETURNING n;").is_err() {
            break;
        }
        match told.next() {
            Some(Ok(line)) if line == n.to_string() => committed = n,
            _ => break,
        }
        meanwhile(row);
    }
    drop(input);
    let _ = psql.wait();
    committed
}

#[test]
fn postgresql_keeps_what_it_committed() {
    let Some(cluster) = mounted("postgresql") else { return };
    let mut server = Server::new(&cluster);
    server.start();
    server.run("pgbench", &["-q", "-i", "-s", "1"]);
    server.ask("CREATE TABLE acknowledged(n INTEGER PRIMARY KEY)");
    let mut committed = 0;
    for round in 0..3 {
        let mut transfers = server.transfers();
        committed = insert(&server, committed, |row| match (round, row) {
            (_, 10) => {
                // No program notices.
                signal("-KILL", cluster.node().expect("it runs"));
                cluster.ok(&["up"]);
            }
            (1, 30) => {
                signal("-KILL", cluster.mount_process().expect("it runs"));
            }
            (2, 30) => {
                signal("-KILL", cluster.mount_process().expect("it runs"));
                signal("-KILL", cluster.node().expect("it runs"));
            }
            _ => {}
        });
        server.end("-KILL");
        transfers.wait().expect("a child");
        if round > 0 {
            wait_until("the mount is dead", || fs::read_dir(cluster.mnt()).is_err());
            cluster.ok(&["up"]);
            cluster.ok(&["mount", "mnt"]);
        }
        server.start();
        let there = server.ask("SELECT count(*), max(n) FROM acknowledged");
        let there: Vec<u64> = there.split('|').map(|n| n.parse().expect("a number")).collect();
        // The one under way may be there, too.
        assert!((committed..=committed + 1).contains(&there[0]), "{there:?} of {committed}");
        assert_eq!(there[0], there[1]);
        committed = there[0];
        // A transfer adds the same to four tables: all of it or nothing.
        let sums = server.ask(
            "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), \
             (SELECT sum(bbalance) FROM pgbench_branches), (SELECT sum(delta) FROM pgbench_history)",
        );
        let sums: Vec<&str> = sums.split('|').collect();
        assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
        server.run("pg_amcheck", &["--install-missing", "--heapallindexed", "--all"]);
    }
    assert!(committed > INSERTS, "{committed}");
    server.end("-INT");
    let data = server.dir.join("data");
    server.run("pg_checksums", &["--check", "-D", data.to_str().expect("plain text")]);
}

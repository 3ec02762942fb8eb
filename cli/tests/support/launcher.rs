//! Starts commands from a process that has nothing open in the mount.
//!
//! The programs of such a test live in its process. A child of its own would begin with copies of what they have open,
//! and close them, and whoever closes a file waits until its pages are written: the command that is to
//! start the node again would wait for that node.
#![allow(dead_code)] // Each test uses a part of it.

use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

pub struct Launcher {
    shell: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
    /// Where the outputs of commands go, a pair of files each.
    dir: PathBuf,
    started: u32,
}

/// A command that runs, or has ended.
pub struct Started {
    pub pid: u32,
    pub output: PathBuf,
    pub errors: PathBuf,
}

pub struct Told {
    pub success: bool,
    pub output: String,
    pub errors: String,
}

impl Started {
    /// False also when nobody has waited for its end yet.
    pub fn is_alive(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
    }
}

impl Launcher {
    /// To be made before anything is open in the mount.
    pub fn new(dir: &Path) -> Result<Self> {
        let mut shell = Command::new("sh")
            .arg("-c")
            .arg("while IFS= read -r line; do eval \"$line\"; done")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("no shell")?;
        let lines = BufReader::new(shell.stdout.take().context("no output")?).lines();
        let (answer, answers) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if answer.send(line).is_err() {
                    break;
                }
            }
        });
        let orders = shell.stdin.take();
        Ok(Self { shell, orders, answers, dir: dir.to_owned(), started: 0 })
    }

    pub fn start(&mut self, words: &[&str]) -> Result<Started> {
        self.started += 1;
        let file = |kind| self.dir.join(format!("command-{}.{kind}", self.started));
        let (output, errors) = (file("out"), file("err"));
        let mut line = String::new();
        for word in words {
            line += &quoted(word)?;
            line.push(' ');
        }
        let (out, err) = (quoted(&output.to_string_lossy())?, quoted(&errors.to_string_lossy())?);
        let line = format!("{line}</dev/null >{out} 2>{err} & echo $!");
        let pid = self.order(&line, Duration::from_secs(10))?;
        Ok(Started { pid: pid.parse().context("no process id")?, output, errors })
    }

    /// Waits until it ends, but not for longer than `limit`; then it still runs.
    pub fn finish(&mut self, started: &Started, limit: Duration) -> Result<Told> {
        let status = self.order(&format!("wait {}; echo $?", started.pid), limit)?;
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let told = Told {
            success: status == "0",
            output: read(&started.output),
            errors: read(&started.errors),
        };
        for path in [&started.output, &started.errors] {
            let _ = fs::remove_file(path);
        }
        Ok(told)
    }

    fn order(&mut self, line: &str, limit: Duration) -> Result<String> {
        let orders = self.orders.as_mut().context("it has ended")?;
        writeln!(orders, "{line}").context("the shell ended")?;
        match self.answers.recv_timeout(limit) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => bail!("no end after {limit:?}: {line}"),
            Err(RecvTimeoutError::Disconnected) => bail!("the shell ended: {line}"),
        }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // It ends where its orders do, unless it waits for a command that hangs.
        drop(self.orders.take());
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

fn quoted(word: &str) -> Result<String> {
    ensure!(!word.contains(['\'', '\n']), "an odd word: {word}");
    Ok(format!("'{word}'"))
}

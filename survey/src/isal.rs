//! ISA-L as a peer of the parity kernels: a program beside this one that encodes on command.
//!
//! It is no part of the workspace, as nothing of Levada needs ISA-L: `scripts/peers` builds it from
//! `survey/peers/isal.c` where Debian's `libisal-dev` is. Without it a figure is not taken, and says so.

use crate::harness::{Meter, Run};
use anyhow::{Context, Result};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Which of ISA-L's functions, the fastest that it has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    /// `pq_gen`: P and Q.
    Pq,
    /// `ec_encode_data`: any parity.
    Rs,
}

/// The stripes that the peer goes round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stripes {
    pub data_chunks: usize,
    pub parity_chunks: usize,
    pub chunk_bytes: u64,
    pub count: usize,
}

/// The peer, running; it ends with this.
pub(crate) struct Isal {
    stripes: Stripes,
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Isal {
    pub fn start(function: Function, stripes: Stripes) -> Result<Self> {
        let program = program()?;
        let function = match function {
            Function::Pq => "pq",
            Function::Rs => "rs",
        };
        let Stripes { data_chunks, parity_chunks, chunk_bytes, count } = stripes;
        let numbers = [data_chunks, parity_chunks, chunk_bytes as usize, count];
        let mut process = Command::new(&program)
            .arg(function)
            .args(numbers.map(|number| number.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| program.display().to_string())?;
        let commands = process.stdin.take().context("piped above")?;
        let answers = BufReader::new(process.stdout.take().context("piped above")?);
        Ok(Self { stripes, process, commands, answers })
    }

    /// Encodes so many stripes.
    pub fn encode(&mut self, stripes: u64) -> Result<Run> {
        let meter = Meter::start()?;
        writeln!(self.commands, "{stripes}").context("ISA-L takes no commands any more")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let bytes = stripes * self.stripes.data_chunks as u64 * self.stripes.chunk_bytes;
        let run = meter.stop(bytes, stripes)?;
        let seconds: Vec<f64> = answer.split_whitespace().map_while(|s| s.parse().ok()).collect();
        let [elapsed, used] = seconds[..] else { anyhow::bail!("ISA-L answered {answer:?}") };
        // Its own clock: the pipes are not what is measured.
        Ok(Run {
            elapsed: Duration::from_secs_f64(elapsed),
            cpu_process: Duration::from_secs_f64(used),
            ..run
        })
    }
}

impl Drop for Isal {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// `peers/isal` beside the directory of this program: `target/peers/isal`.
fn program() -> Result<PathBuf> {
    let ours = std::env::current_exe()?;
    let mut places = ours.ancestors().skip(2).take(2).map(|dir| dir.join("peers/isal"));
    places
        .find(|place| place.is_file())
        .context("no ISA-L here: scripts/peers builds the program that calls it (Debian package libisal-dev)")
}

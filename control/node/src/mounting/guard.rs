//! A second process that ends a mount's connection when the mount's own was killed.
//!
//! The kernel ends it by itself with the last descriptor of the device. But a thread of the mount that writes a notification may be
//! waiting in the kernel for a page that only the mount could bring, and then it has that descriptor, whatever has been
//! killed: neither it nor any program on the mount would ever go on. The kernel tells the guard when the thread that started it has ended.

use super::note::process;
use anyhow::{Context, Result};
use levada_base::reactor::Reactor;
use levada_base::reactor::signal::Signals;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// It stands guard as long as this lives.
pub(super) struct Guard(Child);

impl Guard {
    /// Started by the thread that ends last when the process is killed. `abort` is the file that ends the connection.
    ///
    /// # Errors
    ///
    /// When the system gives no process.
    pub(super) fn start(command: &str, abort: File) -> io::Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .arg(command)
            .arg(std::process::id().to_string())
            .stdin(Stdio::from(abort))
            .stdout(Stdio::null())
            // What is sent to all that a terminal runs is not for it.
            .process_group(0)
            .spawn()?;
        Ok(Self(child))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // One that has ended by itself is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the guard does, until it is killed: when the mount's process, of number `mount`, is killed it writes to its
/// standard input, which ends the connection.
///
/// # Errors
///
/// When the kernel does not tell, or the connection cannot be ended.
pub fn guard(mount: u32) -> Result<()> {
    let signals = Signals::new().context("cannot receive signals")?;
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot watch the mount")?;
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.block_on(async {
        // Signals of others are no reason.
        while !is_killed(mount) {
            signals.recv().await.context("cannot receive signals")?;
        }
        anyhow::Ok(())
    })?;
    let mut abort = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    abort.write_all(b"1").context("cannot end the connection")
}

/// Its first thread has ended, whatever others still do.
fn is_killed(mount: u32) -> bool {
    let is_mine = getppid().is_some_and(|parent| parent.as_raw_pid().cast_unsigned() == mount);
    // What cannot be read says nothing.
    let state = process(mount).map(|found| found.map(|(_, state)| state));
    !is_mine || matches!(state, Ok(None | Some('Z' | 'X')))
}

//! A second process that ends a mount's connection when the mount's own has ended, or was killed.
//!
//! The kernel ends it by itself with the last descriptor of the device. But a thread of the mount that writes a notification may be
//! waiting in the kernel for a page that only the mount could bring, and then it has that descriptor, whatever has been
//! killed: neither it nor any program on the mount would ever go on. The kernel tells the guard when the thread that started it has ended.

use super::note::is_ended;
use anyhow::{Context, Result, bail};
use levada_base::reactor::signal::Signals;
use levada_base::reactor::{self, Reactor};
use levada_mount::transport::abort_file;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The kernel tells a moment before the thread shows as ended.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The guard of a mount that is to be made.
pub(super) struct Guard(Child);

impl Guard {
    /// Started by the thread that ends last, and before the mount is there, which might hide what a new process needs.
    ///
    /// # Errors
    ///
    /// When the system gives no process.
    pub(super) fn start(command: &str) -> io::Result<Self> {
        let child = Command::new("/proc/self/exe")
            .arg0("levada")
            .arg(command)
            .arg(std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // What is sent to all that a terminal runs is not for it.
            .process_group(0)
            .spawn()?;
        Ok(Self(child))
    }

    /// It guards the mount with this device number from now on, until this process has ended.
    ///
    /// # Errors
    ///
    /// When it does not listen.
    pub(super) fn guards(mut self, device_minor: u32) -> io::Result<()> {
        let mut told = self.0.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(told, "{device_minor}")
    }
}

/// What the guard does: when the mount's process, of number `mount`, has ended, it ends the connection, of which its
/// standard input tells the device number.
///
/// # Errors
///
/// When the kernel does not tell, or the connection cannot be ended.
pub fn guard(mount: u32) -> Result<()> {
    let signals = Signals::new().context("cannot receive signals")?;
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot watch the mount")?;
    let mut told = String::new();
    io::stdin().read_line(&mut told).context("cannot hear of the mount")?;
    if told.is_empty() {
        // Nothing was mounted.
        return Ok(());
    }
    let Ok(device_minor) = told.trim().parse() else { bail!("{told:?} is no device number") };
    // Now, as the number may be another mount's later.
    let mut abort = abort_file(device_minor).context("cannot reach the connection")?;
    let reactor = Reactor::new().context("cannot use io_uring")?;
    reactor.block_on(async {
        while !is_over(mount) {
            // Signals of others are no reason.
            let _ = reactor::timeout(LOOK_EVERY, signals.recv()).await;
        }
    });
    // Where it has ended already this does nothing.
    abort.write_all(b"1").context("cannot end the connection")
}

/// Its first thread has ended, whatever others still do.
fn is_over(mount: u32) -> bool {
    let is_mine = getppid().is_some_and(|parent| parent.as_raw_pid().cast_unsigned() == mount);
    !is_mine || is_ended(mount)
}

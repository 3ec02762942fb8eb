//! A command of the operator's that a process has to carry out, such as one that takes a server's power.

use levada_base::reactor::mailbox;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked whether a command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Why a command has not done what it should.
#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    #[error("cannot run it: {0}")]
    Io(#[from] io::Error),
    /// What it said is where this process's own errors go.
    #[error("it ended with {0}")]
    Failed(ExitStatus),
    #[error("it has not ended within {} s", limit.as_secs())]
    Late { limit: Duration },
    /// The thread that waited for it is gone.
    #[error("nobody knows how it ended")]
    Lost,
}

/// Has `/bin/sh` carry `command` out, with `environment` besides this process's own, and waits for its end; everything else goes on
/// meanwhile. What it says goes to the standard error stream. One that takes longer than `limit` is killed, and all that it has
/// started, unless that has left its process group.
///
/// # Errors
///
/// [`OrderError`]; whatever it is, the command may have had its effect.
pub async fn order(
    command: &str,
    environment: &[(&str, String)],
    limit: Duration,
) -> Result<(), OrderError> {
    let mut process = Command::new("/bin/sh");
    process.arg("-c").arg(command).stdin(Stdio::null()).stdout(io::stderr()).process_group(0);
    for (name, value) in environment {
        process.env(name, value);
    }
    let (ended, mut ends) = mailbox::channel()?;
    thread::Builder::new().name("order".into()).spawn(move || {
        // Nobody waits any more where that fails.
        let _ = ended.send(carry_out(process, limit));
    })?;
    ends.recv().await.unwrap_or(Err(OrderError::Lost))
}

fn carry_out(mut command: Command, limit: Duration) -> Result<(), OrderError> {
    let begun = Instant::now();
    let mut child = command.spawn()?;
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(OrderError::Failed(status)),
            None if begun.elapsed() >= limit => {
                let group = rustix::process::Pid::from_child(&child);
                // It may have ended just now.
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                child.wait()?;
                return Err(OrderError::Late { limit });
            }
            None => thread::sleep(LOOK_EVERY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::{self, Reactor};

    const LIMIT: Duration = Duration::from_secs(20);

    fn ordered(command: &str, limit: Duration) -> Result<(), OrderError> {
        let environment = [("LEVADA_WHAT", "it is there".to_owned())];
        Reactor::new().expect("an io_uring").block_on(order(command, &environment, limit))
    }

    #[test]
    fn a_command_is_told_what_it_is_about_and_asked_how_it_went() {
        ordered("test \"$LEVADA_WHAT\" = 'it is there'", LIMIT).expect("it is");
        let failed = ordered("exit 3", LIMIT).expect_err("it says that it failed");
        assert_eq!(failed.to_string(), "it ended with exit status: 3");
        ordered("no-such-command-anywhere", LIMIT).expect_err("the shell finds none");
    }

    #[test]
    fn one_that_hangs_is_killed_with_what_it_has_started() {
        let dir = tempfile::tempdir().expect("a directory");
        let witness = dir.path().join("witness");
        let command = format!("(sleep 2; touch {}) & sleep 60", witness.display());
        let begun = Instant::now();
        let late = ordered(&command, Duration::from_millis(300)).expect_err("it sleeps");
        assert!(matches!(late, OrderError::Late { .. }), "{late}");
        assert!(begun.elapsed() < Duration::from_secs(10));
        thread::sleep(Duration::from_millis(2300));
        assert!(!witness.exists(), "what it had started went on");
    }

    #[test]
    fn the_reactor_goes_on_meanwhile() {
        Reactor::new().expect("an io_uring").block_on(async {
            let waiting = reactor::spawn(async { order("sleep 0.3", &[], LIMIT).await });
            let begun = reactor::now();
            reactor::sleep(Duration::from_millis(10)).await;
            assert!(begun.elapsed() < Duration::from_millis(200));
            waiting.await.expect("a task").expect("it ends well");
        });
    }
}

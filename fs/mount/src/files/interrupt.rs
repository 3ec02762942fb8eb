//! Requests whose caller was killed.
//!
//! The kernel sends INTERRUPT for any signal, also for one that its program handles; such a
//! program must not see EINTR from a call that never gives it elsewhere. But a killed process
//! cannot go before its request is answered. So a request that is interrupted looks, until it
//! is done, whether its caller has SIGKILL pending (as it has after any signal that ends it), and only
//! then answers EINTR.
//!
//! Only requests that change nothing are given up, and those for locks (`locks`).

use crate::codec::Errno;
use futures_util::future::{Either, select};
use levada_base::reactor;
use levada_base::sync::oneshot;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

/// How often an interrupted request looks at its caller: the kernel says only once that there
/// was a signal.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct Interrupts {
    /// Requests that wait, by their number.
    waiting: RefCell<BTreeMap<u64, oneshot::Sender<()>>>,
}

/// Takes a request out of the list when it is done.
struct Waiting<'a> {
    interrupts: &'a Interrupts,
    unique: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.interrupts.waiting.borrow_mut().remove(&self.unique);
    }
}

impl Interrupts {
    /// INTERRUPT for request `unique`.
    pub(super) fn interrupt(&self, unique: u64) {
        let waiting = self.waiting.borrow_mut().remove(&unique);
        if let Some(waiting) = waiting {
            waiting.send(());
        }
    }

    /// Answers `work`, or EINTR when the thread `pid` that asked is being killed.
    pub(super) async fn unless_killed<T>(
        &self,
        unique: u64,
        pid: u32,
        work: impl Future<Output = Result<T, Errno>>,
    ) -> Result<T, Errno> {
        // Requests of the kernel itself (read-ahead) are not interrupted.
        if pid == 0 {
            return work.await;
        }
        match select(pin!(work), pin!(self.killed(unique, pid))).await {
            Either::Left((answer, _)) => answer,
            Either::Right(((), _)) => Err(Errno::INTR),
        }
    }

    async fn killed(&self, unique: u64, pid: u32) {
        self.interrupted(unique).await;
        being_killed(pid).await;
    }

    /// Waits for INTERRUPT of this request. It is known from the first poll on, so it must be polled before the next
    /// message is taken.
    pub(super) async fn interrupted(&self, unique: u64) {
        let (sender, interrupted) = oneshot::channel();
        self.waiting.borrow_mut().insert(unique, sender);
        let _waiting = Waiting { interrupts: self, unique };
        if interrupted.await.is_err() {
            // A request of the same number took its place, which no kernel sends.
            std::future::pending::<()>().await;
        }
    }
}

/// Waits until the thread `pid` is being killed.
pub(super) async fn being_killed(pid: u32) {
    while !is_being_killed(pid) {
        reactor::sleep(LOOK_EVERY).await;
    }
}

/// Whether SIGKILL is pending for a thread (proc(5), `/proc/PID/status`).
fn is_being_killed(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| has_kill_pending(&status))
}

fn has_kill_pending(status: &str) -> bool {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    status.lines().any(|line| {
        let pending = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        let pending = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        pending.is_some_and(|mask| mask & KILL != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sigkill_counts() {
        let status = |own: &str| format!("Name:\tx\nSigPnd:\t{own}\nShdPnd:\t0000000000000000\n");
        assert!(has_kill_pending(&status("0000000000000100")));
        assert!(!has_kill_pending(&status("0000000000010000"))); // SIGCHLD
        assert!(!has_kill_pending("Name:\tx\nSigPnd:\n"));
        assert!(!is_being_killed(std::process::id()));
    }
}

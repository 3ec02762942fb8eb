//! On which cores threads of a measurement run.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Keeps this thread, and what it starts from here on, on the core where it is: for sides that are two processes.
///
/// # Errors
///
/// When the kernel does not let it.
pub(crate) fn stay_on_this_core() -> Result<()> {
    stay_on(&only(sched_getcpu()))
}

fn stay_on(cores: &CpuSet) -> Result<()> {
    sched_setaffinity(None, cores).context("sched_setaffinity")
}

fn only(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}

/// A core for each of two sides, as long as it is there: threads that wake each other in turns are otherwise moved to one core now and
/// then, and who is measured is the scheduler. Where there is one core only, they share it.
pub(crate) struct TwoCores {
    before: CpuSet,
    ours: CpuSet,
    theirs: CpuSet,
}

impl TwoCores {
    /// This thread is one side from here on.
    ///
    /// # Errors
    ///
    /// When the kernel does not let it.
    pub fn take() -> Result<Self> {
        let before = sched_getaffinity(None).context("sched_getaffinity")?;
        let mut cores = (0..CpuSet::MAX_CPU).filter(|&core| before.is_set(core));
        let ours = cores.next().context("a process without a core")?;
        let theirs = cores.next().unwrap_or(ours);
        let taken = Self { before, ours: only(ours), theirs: only(theirs) };
        stay_on(&taken.ours)?;
        Ok(taken)
    }

    /// Threads that `start` starts are the other side.
    ///
    /// # Errors
    ///
    /// What `start` says, and when the kernel does not let it.
    pub fn of_other_side<T>(&self, start: impl FnOnce() -> Result<T>) -> Result<T> {
        stay_on(&self.theirs)?;
        let started = start();
        stay_on(&self.ours)?;
        started
    }
}

impl Drop for TwoCores {
    fn drop(&mut self) {
        // What it was before it is allowed to be.
        let _ = stay_on(&self.before);
    }
}

//! How often which fault met which state of the engine: the proof that a run was worth its time.

use levada_base::probe;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Counts, by kind of fault and state of the engine.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    met: BTreeMap<(&'static str, &'static str), u64>,
    /// Other things worth counting: operations, seeds, checks.
    counts: BTreeMap<&'static str, u64>,
}

impl Coverage {
    /// A fault happens now: counts it once for every state that the engine is in.
    pub fn fault(&mut self, fault: &'static str) {
        let states = probe::states();
        if states.is_empty() {
            self.fault_in(fault, "idle");
        }
        for state in states {
            self.fault_in(fault, state);
        }
    }

    /// Counts a fault in a state that the caller knows of.
    pub fn fault_in(&mut self, fault: &'static str, state: &'static str) {
        *self.met.entry((fault, state)).or_default() += 1;
    }

    /// Counts something else.
    pub fn count(&mut self, what: &'static str, times: u64) {
        *self.counts.entry(what).or_default() += times;
    }

    /// What was counted.
    #[must_use]
    pub fn counted(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// How often a fault happened in a state.
    #[must_use]
    pub fn met(&self, fault: &'static str, state: &'static str) -> u64 {
        self.met.get(&(fault, state)).copied().unwrap_or(0)
    }

    /// Adds what another run met.
    pub fn add(&mut self, other: &Self) {
        for (key, times) in &other.met {
            *self.met.entry(*key).or_default() += times;
        }
        for (what, times) in &other.counts {
            *self.counts.entry(what).or_default() += times;
        }
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let states: BTreeSet<_> = self.met.keys().map(|(_, state)| *state).collect();
        let faults: BTreeSet<_> = self.met.keys().map(|(fault, _)| *fault).collect();
        if !faults.is_empty() {
            write!(f, "{:24}", "fault \\ state")?;
            for state in &states {
                write!(f, " {state:>11}")?;
            }
            writeln!(f)?;
        }
        for fault in faults {
            write!(f, "{fault:24}")?;
            for state in &states {
                write!(f, " {:>11}", self.met(fault, state))?;
            }
            writeln!(f)?;
        }
        for (what, times) in &self.counts {
            writeln!(f, "{what:36} {times:>11}")?;
        }
        Ok(())
    }
}

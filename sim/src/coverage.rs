//! How often which fault met which state of the engine: the proof that a run was worth its time.

use levada_base::probe;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

type Word = Cow<'static, str>;

/// Counts, by kind of fault and state of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    met: BTreeMap<(Word, Word), u64>,
    /// Other things worth counting: operations, seeds, checks.
    counts: BTreeMap<Word, u64>,
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
        *self.met.entry((fault.into(), state.into())).or_default() += 1;
    }

    /// Counts something else.
    pub fn count(&mut self, what: &'static str, times: u64) {
        *self.counts.entry(what.into()).or_default() += times;
    }

    /// What was counted.
    #[must_use]
    pub fn counted(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// How often a fault happened in a state.
    #[must_use]
    pub fn met(&self, fault: &'static str, state: &'static str) -> u64 {
        self.met.get(&(fault.into(), state.into())).copied().unwrap_or(0)
    }

    /// Adds what another run met.
    pub fn add(&mut self, other: &Self) {
        for (key, times) in &other.met {
            *self.met.entry(key.clone()).or_default() += times;
        }
        for (what, times) in &other.counts {
            *self.counts.entry(what.clone()).or_default() += times;
        }
    }

    /// Everything, line by line with tabs, for [`Coverage::add_line`].
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let met = self.met.iter().map(|((fault, state), n)| format!("met\t{fault}\t{state}\t{n}"));
        let counts = self.counts.iter().map(|(what, n)| format!("count\t{what}\t{n}"));
        met.chain(counts).collect()
    }

    /// Adds one of [`Coverage::lines`]; `None` when it is something else.
    pub fn add_line(&mut self, line: &str) -> Option<()> {
        let words: Vec<&str> = line.split('\t').collect();
        let own = |word: &str| Word::from(word.to_owned());
        match words[..] {
            ["met", fault, state, n] => {
                *self.met.entry((own(fault), own(state))).or_default() += n.parse::<u64>().ok()?;
            }
            ["count", what, n] => {
                *self.counts.entry(own(what)).or_default() += n.parse::<u64>().ok()?;
            }
            _ => return None,
        }
        Some(())
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let states: BTreeSet<_> = self.met.keys().map(|(_, state)| state).collect();
        let faults: BTreeSet<_> = self.met.keys().map(|(fault, _)| fault).collect();
        if !faults.is_empty() {
            write!(f, "{:24}", "fault \\ state")?;
            for state in &states {
                write!(f, " {state:>13}")?;
            }
            writeln!(f)?;
        }
        for fault in faults {
            write!(f, "{fault:24}")?;
            for state in &states {
                let key = (fault.clone(), (*state).clone());
                write!(f, " {:>13}", self.met.get(&key).copied().unwrap_or(0))?;
            }
            writeln!(f)?;
        }
        for (what, times) in &self.counts {
            writeln!(f, "{what:36} {times:>13}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_carry_everything() {
        let mut coverage = Coverage::default();
        coverage.fault_in("power cut", "kv log write");
        coverage.fault_in("power cut", "kv log write");
        coverage.count("client operations", 7);
        let mut other = Coverage::default();
        for line in coverage.lines() {
            other.add_line(&line).expect("its own line");
        }
        assert_eq!(other, coverage);
        assert_eq!(other.met("power cut", "kv log write"), 2);
        assert!(other.add_line("failed\t3").is_none());
    }
}

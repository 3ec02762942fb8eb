//! The suite: every figure by name, and how one is taken.

use crate::figure::{Bar, Figure, NotTaken, Outcome, Taken, commit, machine};
use crate::harness::Effort;
use crate::{
    array, client, degraded, disk, engine, log, meta, mount, nbd, node, nvmet, nvmet_cores,
    nvmet_tls, object, overwrites, parity, qos, remote, vhost, wire,
};
use anyhow::Result;
use std::time::Instant;

/// One figure of the suite.
#[derive(Clone, Copy)]
pub struct Spec {
    /// `layer.members.what`: the member model is part of the name.
    pub name: &'static str,
    /// What is measured, for `--list`.
    pub what: &'static str,
    pub bar: Bar,
    pub take: fn(Effort) -> Result<Taken>,
}

/// Every figure, from the bottom layer up.
#[must_use]
pub fn specs() -> Vec<Spec> {
    [
        parity::specs(),
        engine::specs(),
        array::specs(),
        overwrites::specs(),
        degraded::specs(),
        qos::specs(),
        remote::specs(),
        log::specs(),
        object::specs(),
        wire::specs(),
        client::specs(),
        meta::specs(),
        mount::specs(),
        disk::specs(),
        nbd::specs(),
        nvmet::specs(),
        nvmet_cores::specs(),
        nvmet_tls::specs(),
        vhost::specs(),
        node::specs(),
    ]
    .concat()
}

impl Spec {
    /// Measures, on a thread of its own: buffers are pooled by thread, and a figure that met the
    /// full pool of the one before would measure the allocator. A quick figure is marked in its
    /// commit, so that nobody quotes it.
    #[must_use]
    pub fn measure(&self, effort: Effort) -> Outcome {
        let take = self.take;
        let started = Instant::now();
        let taken = std::thread::scope(|scope| scope.spawn(move || take(effort)).join());
        let taken = taken.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked")));
        let quick = if effort.is_quick { " (quick)" } else { "" };
        let (name, bar) = (self.name.to_owned(), self.bar);
        let (commit, machine) = (commit() + quick, machine());
        match taken {
            Ok(taken) => {
                let bar_met = bar.is_met_by(taken.value);
                let seconds = started.elapsed().as_secs_f64();
                Outcome::Taken(Figure { name, taken, bar, bar_met, seconds, commit, machine })
            }
            Err(error) => {
                let not_taken = format!("{error:#}");
                Outcome::NotTaken(NotTaken { name, bar, not_taken, commit, machine })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_or_panics_is_not_taken() {
        let spec = |take| Spec { name: "x", what: "", bar: Bar::None, take };
        let effort = Effort { runs: 1, is_quick: true };
        let fails = spec(|_| Err(anyhow::anyhow!("no ext4 here").context("taking x")));
        let Outcome::NotTaken(not_taken) = fails.measure(effort) else { panic!("it failed") };
        assert_eq!(not_taken.not_taken, "taking x: no ext4 here");
        let panics = spec(|_| panic!("on purpose"));
        assert!(matches!(panics.measure(effort), Outcome::NotTaken(_)));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = specs().iter().map(|spec| spec.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), specs().len());
    }
}

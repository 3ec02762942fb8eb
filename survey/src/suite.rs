//! The suite: every figure by name, and how one is taken.

use crate::figure::{Bar, Figure, Taken, commit, machine};
use crate::harness::Effort;
use crate::{array, client, log, mount, node, parity, wire};
use anyhow::Result;

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
        array::specs(),
        log::specs(),
        wire::specs(),
        client::specs(),
        mount::specs(),
        node::specs(),
    ]
    .concat()
}

impl Spec {
    /// Measures. A quick figure is marked in its commit, so that nobody quotes it.
    ///
    /// # Errors
    ///
    /// When the layer failed or something that the measurement needs is not there.
    pub fn measure(&self, effort: Effort) -> Result<Figure> {
        let taken = (self.take)(effort)?;
        let quick = if effort.is_quick { " (quick)" } else { "" };
        Ok(Figure {
            name: self.name.to_owned(),
            bar: self.bar,
            bar_met: self.bar.is_met_by(taken.value),
            taken,
            commit: commit() + quick,
            machine: machine(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = specs().iter().map(|spec| spec.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), specs().len());
    }
}

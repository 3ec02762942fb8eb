//! A shelf among others, as `remote` deals with it.

use super::scenario::Scene;
use crate::Rng;
use crate::remote::mischief::Around;
use crate::remote::shelf::Shelf;
use std::rc::Rc;
use std::time::Duration;

/// A drive is waited for no longer than half a minute: long enough to be lost.
const OUTAGE_S: (u64, u64) = (35, 120);

/// See the module.
pub struct Place {
    pub scene: Rc<Scene>,
    pub number: usize,
}

impl Around for Place {
    fn shelf(&self) -> &Rc<Shelf> {
        &self.scene.shelves[self.number]
    }

    fn rng<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        self.scene.world.rng(draw)
    }

    fn note(&self, what: &'static str) {
        self.scene.world.tell(|| format!("shelf {}:", self.number));
        self.scene.note(what);
    }

    fn operations(&self) -> u64 {
        self.scene.operations()
    }

    fn is_over(&self) -> bool {
        self.scene.is_over.get()
    }

    fn loses_power(&self) {
        self.scene.loses_power();
    }

    fn crashes(&self) {
        if self.shelf().forgets_reservations() {
            self.scene.may_lack(self.number);
        }
    }

    fn outage_begins(&self) -> Option<Duration> {
        if !self.rng(|rng| rng.one_in(4)) || !self.scene.bears_an_outage() {
            return None;
        }
        self.scene.away.borrow_mut().insert(self.number);
        self.note("outage");
        let (least, most) = OUTAGE_S;
        Some(Duration::from_secs(self.rng(|rng| rng.between(least, most))))
    }

    fn outage_ends(&self) {
        self.scene.away.borrow_mut().remove(&self.number);
        self.note("outage over");
    }
}

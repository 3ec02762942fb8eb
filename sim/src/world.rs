//! A world: drives in enclosures, one source of power, and what befalls them.
//!
//! What always holds: the set of drives that are lost, stale or silently wrong never exceeds
//! what the arrays are said to bear, so that every failure of a check is a bug.

use crate::{Coverage, Rng, SimDrive};
use levada_base::reactor::Group;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

/// Drives that may be lost together.
pub const LOSSES_MAX: usize = 2;

/// How large a world is.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub drives: usize,
    pub enclosures: usize,
    pub drive_bytes: u64,
}

impl Shape {
    /// The box of the default cluster, with small drives.
    #[must_use]
    pub fn of_12(drive_bytes: u64) -> Self {
        Self { drives: 12, enclosures: 6, drive_bytes }
    }
}

/// See the module.
pub struct World {
    pub seed: u64,
    pub shape: Shape,
    pub drives: RefCell<Vec<std::rc::Rc<SimDrive>>>,
    pub coverage: RefCell<Coverage>,
    /// Drives that are not whole: counted against [`LOSSES_MAX`].
    suspects: RefCell<BTreeSet<usize>>,
    node: RefCell<Group>,
    rng: RefCell<Rng>,
    drives_made: Cell<u32>,
    power_cuts: Cell<u64>,
    traced: bool,
}

impl World {
    /// A world with healthy, empty drives. Inside a reactor only.
    #[must_use]
    pub fn new(seed: u64, shape: Shape) -> Self {
        let world = Self {
            seed,
            shape,
            drives: RefCell::default(),
            coverage: RefCell::default(),
            suspects: RefCell::default(),
            node: RefCell::new(Group::new()),
            rng: RefCell::new(Rng::new(seed)),
            drives_made: Cell::new(0),
            power_cuts: Cell::new(0),
            traced: std::env::var_os("SIM_TRACE").is_some(),
        };
        for at in 0..shape.drives {
            let drive = world.new_drive(at);
            world.drives.borrow_mut().push(drive);
        }
        world
    }

    fn new_drive(&self, at: usize) -> std::rc::Rc<SimDrive> {
        let made = self.drives_made.get() + 1;
        self.drives_made.set(made);
        let per_enclosure = self.shape.drives.div_ceil(self.shape.enclosures);
        let enclosure = (at / per_enclosure) as u16;
        let name = format!("d{at:02}");
        std::rc::Rc::new(SimDrive::new(&name, enclosure, self.shape.drive_bytes))
    }

    /// An empty drive in the place of another.
    pub fn replace_drive(&self, at: usize) -> std::rc::Rc<SimDrive> {
        let drive = self.new_drive(at);
        self.drives.borrow_mut()[at] = std::rc::Rc::clone(&drive);
        drive
    }

    #[must_use]
    pub fn drive(&self, at: usize) -> std::rc::Rc<SimDrive> {
        std::rc::Rc::clone(&self.drives.borrow()[at])
    }

    /// The world's own chance: not the reactor's.
    pub fn rng<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.rng.borrow_mut())
    }

    /// The tasks of the node that runs now.
    #[must_use]
    pub fn node(&self) -> Group {
        self.node.borrow().clone()
    }

    /// The power fails: the node is gone where it stands, and the drives lose a random part of
    /// what was not flushed. Then the power is back.
    pub async fn power_cut(&self) {
        self.tell(|| "power cut".into());
        self.coverage.borrow_mut().fault("power cut");
        self.power_cuts.set(self.power_cuts.get() + 1);
        self.end_node();
        let drives = self.drives.borrow().clone();
        for drive in drives {
            let mut rng = self.rng.borrow_mut().fork();
            drive.power_cycle(&mut rng).await;
        }
    }

    /// How often the power failed.
    #[must_use]
    pub fn power_cuts(&self) -> u64 {
        self.power_cuts.get()
    }

    /// The node's process is killed; the drives keep what they were given.
    pub fn kill(&self) {
        self.tell(|| "node killed".into());
        self.coverage.borrow_mut().fault("node killed");
        self.end_node();
        for drive in &*self.drives.borrow() {
            drive.disconnect();
        }
    }

    /// The end of the world: what its node and its drives still do is dropped, and its coverage is
    /// given away. A node's tasks and parts hold each other, so they would outlive the seed.
    pub fn end(&self) -> Coverage {
        self.end_node();
        for drive in self.drives.borrow().iter() {
            drive.disconnect();
        }
        self.drives.borrow_mut().clear();
        self.coverage.take()
    }

    fn end_node(&self) {
        let node = self.node.replace(Group::new());
        node.kill();
    }

    /// Drives that are not whole now.
    #[must_use]
    pub fn suspects(&self) -> BTreeSet<usize> {
        self.suspects.borrow().clone()
    }

    /// Counts a drive as not whole, if the arrays bear that.
    pub fn suspect(&self, at: usize) -> bool {
        let mut suspects = self.suspects.borrow_mut();
        if !suspects.contains(&at) && suspects.len() >= LOSSES_MAX {
            return false;
        }
        suspects.insert(at);
        true
    }

    /// A drive is whole again.
    pub fn clear(&self, at: usize) {
        self.suspects.borrow_mut().remove(&at);
    }

    /// With `SIM_TRACE` set, says what happens, with the virtual time.
    pub fn tell(&self, what: impl FnOnce() -> String) {
        if self.traced {
            let us = levada_base::reactor::now().0 / 1000;
            eprintln!("[seed {} at {us} us] {}", self.seed, what());
        }
    }

    /// Counts a fault for the table of coverage.
    pub fn note(&self, fault: &'static str) {
        self.coverage.borrow_mut().fault(fault);
    }
}

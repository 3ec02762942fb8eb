//! An address of a target: one of the paths to its subsystems.

use levada_base::reactor;
use levada_base::sync::{Notify, Once};
use levada_nvme::log::AnaState;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// What becomes of what comes over a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Passage {
    /// It is answered.
    #[default]
    Open,
    /// Answers leave so much later.
    Slow(Duration),
    /// Nothing is answered, and connections stay: as if the network in between had gone.
    Hung,
    /// Connections are closed, and whoever connects is closed at once.
    Closed,
}

/// A port. How good it is holds for all namespaces of all subsystems: they are one ANA group each.
pub(crate) struct Port {
    pub id: u16,
    pub address: SocketAddr,
    state: Cell<AnaState>,
    /// Counts changes of `state`.
    changes: Cell<u64>,
    passage: Cell<Passage>,
    passage_changed: Notify,
    /// Ends the connections that there are.
    cut: RefCell<Rc<Once>>,
}

impl Port {
    pub fn new(id: u16, address: SocketAddr) -> Self {
        let (state, changes) = (Cell::default(), Cell::default());
        Self {
            id,
            address,
            state,
            changes,
            passage: Cell::default(),
            passage_changed: Notify::default(),
            cut: RefCell::default(),
        }
    }

    pub fn state(&self) -> AnaState {
        self.state.get()
    }

    pub fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// True: it was another.
    pub fn set_state(&self, state: AnaState) -> bool {
        let is_new = self.state.replace(state) != state;
        if is_new {
            self.changes.set(self.changes.get() + 1);
        }
        is_new
    }

    pub fn is_closed(&self) -> bool {
        self.passage.get() == Passage::Closed
    }

    /// Happens when connections of now have to end.
    pub fn cut(&self) -> Rc<Once> {
        Rc::clone(&self.cut.borrow())
    }

    pub fn set_passage(&self, passage: Passage) {
        self.passage.set(passage);
        if passage == Passage::Closed {
            self.cut.replace(Rc::default()).happen();
        }
        self.passage_changed.notify_all();
    }

    /// Answers leave at once.
    pub fn is_open(&self) -> bool {
        self.passage.get() == Passage::Open
    }

    pub fn is_hung(&self) -> bool {
        self.passage.get() == Passage::Hung
    }

    /// Returns when an answer may leave.
    pub async fn passes(&self) {
        loop {
            match self.passage.get() {
                Passage::Open | Passage::Closed => return,
                Passage::Slow(delay) => return reactor::sleep(delay).await,
                Passage::Hung => {
                    let is_over = || (self.passage.get() != Passage::Hung).then_some(());
                    self.passage_changed.until(is_over).await;
                }
            }
        }
    }
}

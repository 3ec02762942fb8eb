//! Memory for data of commands under way: what a connection has by itself, and what all connections of a target share.
//!
//! What always holds:
//! - A connection's own part is enough for one command of any size, and nobody can take it: each gets on, if slowly, whatever others do.
//! - More than that it borrows, without waiting for it, from what all share, and gives it back once it has nothing under way.

use levada_base::reactor;
use levada_base::sync::{Permit, Semaphore};
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// What all connections of a target share.
pub(crate) const SHARED_BYTES: u64 = 1 << 30;
/// It is lent in pieces.
const PIECE_BYTES: u64 = 1 << 20;
/// How often it is looked whether what was lent is still needed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// See the module.
pub(crate) struct Memory {
    own: Rc<Semaphore>,
    shared: Rc<Semaphore>,
    /// Pieces that were lent.
    lent: RefCell<Vec<Permit>>,
    pieces_max: Cell<usize>,
}

impl Memory {
    /// `own_bytes` of its own; nothing of `shared` until it may borrow.
    pub fn new(own_bytes: u64, shared: &Rc<Semaphore>) -> Rc<Self> {
        Rc::new(Self {
            own: Semaphore::new(own_bytes),
            shared: Rc::clone(shared),
            lent: RefCell::default(),
            pieces_max: Cell::new(0),
        })
    }

    /// From now on it is lent up to so many bytes.
    pub fn may_borrow(&self, bytes: u64) {
        self.pieces_max.set((bytes / PIECE_BYTES) as usize);
    }

    /// Room for so many bytes, if there is some at once.
    pub fn room_at_once(&self, bytes: u64) -> Option<Permit> {
        self.own.try_acquire(bytes)
    }

    /// Room for so many bytes, at most its own ones. Comes in turn.
    pub async fn room(self: &Rc<Self>, bytes: u64) -> Permit {
        if let Some(room) = self.room_at_once(bytes) {
            return room;
        }
        for _ in 0..bytes.div_ceil(PIECE_BYTES) {
            self.borrow();
        }
        self.own.acquire(bytes).await
    }

    /// Borrows a piece, if there is one.
    fn borrow(self: &Rc<Self>) {
        let mut lent = self.lent.borrow_mut();
        if lent.len() >= self.pieces_max.get() {
            return;
        }
        let Some(piece) = self.shared.try_acquire(PIECE_BYTES) else { return };
        lent.push(piece);
        self.own.grow(PIECE_BYTES);
        if lent.len() == 1 {
            let memory = Rc::downgrade(self);
            reactor::spawn(async move { Self::give_back(memory).await });
        }
    }

    /// Gives pieces back that are not needed any more, until there are none.
    async fn give_back(memory: Weak<Self>) {
        loop {
            reactor::sleep(LOOK_EVERY).await;
            let Some(memory) = memory.upgrade() else { return };
            let mut lent = memory.lent.borrow_mut();
            while let Some(piece) = lent.pop() {
                match memory.own.try_acquire(PIECE_BYTES) {
                    Some(unused) => unused.forget(),
                    None => {
                        lent.push(piece);
                        break;
                    }
                }
            }
            if lent.is_empty() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;

    const MIB: u64 = 1 << 20;

    #[test]
    fn who_has_much_leaves_others_what_they_need() {
        Reactor::simulated(1).block_on(async {
            let shared = Semaphore::new(5 * MIB);
            let [greedy, modest] = [0; 2].map(|_| Memory::new(MIB, &shared));
            let own = greedy.room(MIB).await;
            let more = reactor::timeout(LOOK_EVERY * 3, greedy.room(MIB)).await;
            assert!(more.is_err() && shared.available() == 5 * MIB, "nobody knows it yet");
            drop(own);
            greedy.may_borrow(8 * MIB);
            modest.may_borrow(8 * MIB);
            let mut taken = Vec::new();
            for _ in 0..6 {
                taken.push(greedy.room(MIB).await);
            }
            assert_eq!(shared.available(), 0);
            let more = reactor::timeout(LOOK_EVERY * 3, greedy.room(MIB)).await;
            assert!(more.is_err(), "there is no more");
            let own = modest.room(MIB).await;
            assert!(reactor::timeout(LOOK_EVERY * 3, modest.room(1)).await.is_err());
            drop(own);
            drop(modest.room(MIB).await);
            // What is not needed goes back, and others get it.
            taken.truncate(2);
            reactor::sleep(LOOK_EVERY * 2).await;
            assert!(shared.available() >= 3 * MIB, "{}", shared.available());
            let all = [modest.room(MIB).await, modest.room(MIB).await, modest.room(MIB).await];
            drop((all, taken));
            reactor::sleep(LOOK_EVERY * 2).await;
            assert_eq!(shared.available(), 5 * MIB);
            assert_eq!(greedy.own.available(), MIB);
        });
    }

    #[test]
    fn who_needs_several_pieces_borrows_them() {
        Reactor::simulated(3).block_on(async {
            let shared = Semaphore::new(8 * MIB);
            let memory = Memory::new(2 * MIB, &shared);
            memory.may_borrow(8 * MIB);
            let own = memory.room(2 * MIB).await;
            let more = reactor::timeout(LOOK_EVERY, memory.room(2 * MIB)).await;
            assert!(more.is_ok() && shared.available() == 6 * MIB);
            drop(own);
        });
    }

    #[test]
    fn nobody_has_more_than_he_may() {
        Reactor::simulated(2).block_on(async {
            let shared = Semaphore::new(64 * MIB);
            let memory = Memory::new(MIB, &shared);
            memory.may_borrow(3 * MIB);
            let mut taken = Vec::new();
            while let Ok(room) = reactor::timeout(LOOK_EVERY, memory.room(MIB / 2)).await {
                taken.push(room);
            }
            assert_eq!(taken.len(), 8);
            drop(memory);
            drop(taken);
            assert_eq!(shared.available(), 64 * MIB, "also of a connection that is gone");
        });
    }
}

//! Names that are absent: a mount that made a directory knows all of its names while nobody else changes it.
//!
//! Before each file that it makes the kernel asks whether the name is there. Unpacking, cloning and building make
//! their files in directories that they have just made, so the mount answers that itself.
//!
//! What always holds:
//! - A name is called absent only if it was absent less than [`VALID`] ago, which is what names and attributes
//!   may be old anyway.
//! - Every change that this mount asks for counts before it is sent, so programs of this mount see their own.
//! - That nobody else changed a directory is concluded from its change counter alone: it moved by as many as this mount
//!   was told that it had made. Anything else, and what was known is forgotten.
//!
//! Of a name only a hash is kept. Two names with one hash, and names that are gone again, cost a question to the service.

use super::VALID;
use levada_base::ids::Ino;
use levada_base::reactor::{self, Instant};
use lru::LruCache;
use std::cell::RefCell;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// What is kept in all, in names: some 4 MiB.
const ROOM: usize = 1 << 18;
/// What a directory takes besides its names.
const DIRECTORY_ROOM: usize = 8;

/// The directories all of whose names are known.
pub(super) struct Names {
    table: RefCell<Table>,
    hasher: RandomState,
}

struct Table {
    directories: LruCache<Ino, Directory>,
    /// What they take, and may take.
    taken: usize,
    room: usize,
}

struct Directory {
    /// The hashes of all names that it may have.
    names: HashSet<u64>,
    /// Its change counter, if nobody else has changed it.
    change: u64,
    /// Changes of this mount that have begun, and those of them that are under way.
    begun: u64,
    under_way: u64,
    /// When it was known last that nobody else had changed it.
    heard: Instant,
}

/// A change of a directory's names under way. Dropped without [`Changing::done`] it may or may not have happened.
#[must_use]
pub(super) struct Changing<'a> {
    names: &'a Names,
    directory: Ino,
    /// The directory was known when it began.
    is_counted: bool,
    is_done: bool,
}

/// A question about a directory's attributes.
#[derive(Clone, Copy)]
pub(super) struct Asking {
    begun: u64,
    at: Instant,
}

impl Asking {
    /// The answer is this old already.
    pub(super) fn before(self, age: Duration) -> Self {
        Asking { at: Instant(self.at.0.saturating_sub(age.as_nanos() as u64)), ..self }
    }
}

impl Default for Names {
    fn default() -> Self {
        Self::with_room(ROOM)
    }
}

impl Table {
    fn forget(&mut self, directory: Ino) {
        if let Some(known) = self.directories.pop(&directory) {
            self.taken -= known.names.len() + DIRECTORY_ROOM;
        }
    }

    /// Forgets the directories that were not used for longest, until the others have room.
    fn shrink(&mut self) {
        while self.taken > self.room
            && let Some((_, known)) = self.directories.pop_lru()
        {
            self.taken -= known.names.len() + DIRECTORY_ROOM;
        }
    }
}

impl Names {
    fn with_room(room: usize) -> Self {
        let table = Table { directories: LruCache::unbounded(), taken: 0, room };
        Names { table: RefCell::new(table), hasher: RandomState::new() }
    }

    /// This mount has just made `directory`, asked for at `at`; this is its change counter.
    pub(super) fn made(&self, directory: Ino, change: u64, at: Instant) {
        let mut table = self.table.borrow_mut();
        table.forget(directory);
        let names = HashSet::new();
        let known = Directory { names, change, begun: 0, under_way: 0, heard: at };
        table.directories.put(directory, known);
        table.taken += DIRECTORY_ROOM;
        table.shrink();
    }

    /// True when the directory had no such name [`VALID`] ago or later.
    pub(super) fn is_absent(&self, directory: Ino, name: &[u8]) -> bool {
        let mut table = self.table.borrow_mut();
        table.directories.get(&directory).is_some_and(|known| {
            known.heard.elapsed() < VALID && !known.names.contains(&self.hasher.hash_one(name))
        })
    }

    /// A change begins that may leave `name` behind in `directory`: it moves the directory's change counter by
    /// one, or fails.
    pub(super) fn change(&self, directory: Ino, name: &[u8]) -> Changing<'_> {
        let mut table = self.table.borrow_mut();
        let mut is_counted = false;
        if let Some(known) = table.directories.get_mut(&directory) {
            is_counted = true;
            known.begun += 1;
            known.under_way += 1;
            if known.names.insert(self.hasher.hash_one(name)) {
                table.taken += 1;
                table.shrink();
            }
        }
        Changing { names: self, directory, is_counted, is_done: false }
    }

    /// What is known of `directory` no longer counts.
    pub(super) fn forget(&self, directory: Ino) {
        self.table.borrow_mut().forget(directory);
    }

    /// The attributes of an inode are about to be asked for; none when that teaches nothing.
    pub(super) fn ask(&self, ino: Ino) -> Option<Asking> {
        let table = self.table.borrow();
        let known = table.directories.peek(&ino).filter(|known| known.under_way == 0)?;
        Some(Asking { begun: known.begun, at: reactor::now() })
    }

    /// The answer: the change counter of `directory`.
    pub(super) fn told(&self, directory: Ino, asking: Option<Asking>, change: u64) {
        let Some(Asking { begun, at }) = asking else { return };
        let mut table = self.table.borrow_mut();
        let Some(known) = table.directories.get_mut(&directory) else { return };
        // With a change of this mount in between, nothing follows from the counter.
        if known.begun != begun {
            return;
        }
        if known.change == change {
            known.heard = known.heard.max(at);
        } else {
            table.forget(directory);
        }
    }
}

impl Changing<'_> {
    /// It has happened.
    pub(super) fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if !self.is_counted {
            return;
        }
        let mut table = self.names.table.borrow_mut();
        if let Some(known) = table.directories.get_mut(&self.directory) {
            known.under_way -= 1;
            known.change += u64::from(self.is_done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use proptest::prelude::{Just, Strategy, prop, prop_oneof, proptest};
    use std::collections::BTreeSet;

    const DIRECTORY: Ino = Ino(7);

    fn absent(names: &Names, name: &str) -> bool {
        names.is_absent(DIRECTORY, name.as_bytes())
    }

    #[test]
    fn what_was_just_made_is_known_for_as_long_as_attributes_are() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            assert!(!absent(&names, "a"), "never heard of");
            names.made(DIRECTORY, 1, reactor::now());
            assert!(absent(&names, "a"));
            let changing = names.change(DIRECTORY, b"a");
            assert!(!absent(&names, "a") && absent(&names, "b"), "while it is under way");
            changing.done();
            reactor::sleep(VALID).await;
            assert!(!absent(&names, "b"), "somebody else may have made it");
            names.told(DIRECTORY, names.ask(DIRECTORY), 2);
            assert!(absent(&names, "b") && !absent(&names, "a"));
            names.forget(DIRECTORY);
            assert!(!absent(&names, "b"));
        });
    }

    #[test]
    fn a_counter_that_others_moved_ends_it() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            // Somebody else's change; one of this mount that failed, or of which nobody knows; both.
            for (ours_done, counter) in [(true, 3), (false, 2), (false, 3)] {
                names.made(DIRECTORY, 1, reactor::now());
                let changing = names.change(DIRECTORY, b"a");
                if ours_done {
                    changing.done();
                } else {
                    drop(changing);
                }
                names.told(DIRECTORY, names.ask(DIRECTORY), counter);
                assert!(!absent(&names, "b"), "{ours_done} {counter}");
            }
        });
    }

    #[test]
    fn an_answer_that_a_change_overtook_teaches_nothing() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            names.made(DIRECTORY, 1, reactor::now());
            let asked = names.ask(DIRECTORY);
            names.change(DIRECTORY, b"a").done();
            reactor::sleep(VALID).await;
            // Somebody else's change, not ours.
            names.told(DIRECTORY, asked, 2);
            assert!(!absent(&names, "b"));
            let changing = names.change(DIRECTORY, b"c");
            assert!(names.ask(DIRECTORY).is_none(), "which of the two it counts is not known");
            changing.done();
        });
    }

    /// By a handle a directory is reached before the answer to its making is here.
    #[test]
    fn a_change_that_began_before_the_directory_was_known_counts_nowhere() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            let early = names.change(DIRECTORY, b"a");
            names.made(DIRECTORY, 1, reactor::now());
            early.done();
            assert!(names.ask(DIRECTORY).is_some(), "nothing is under way");
            names.told(DIRECTORY, names.ask(DIRECTORY), 2);
            assert!(!absent(&names, "b"), "the counter tells of it");
        });
    }

    #[test]
    fn room_is_bounded_and_the_oldest_goes_first() {
        Reactor::simulated(1).block_on(async {
            let names = Names::with_room(2 * DIRECTORY_ROOM + 3);
            let other = Ino(8);
            names.made(other, 1, reactor::now());
            names.made(DIRECTORY, 1, reactor::now());
            for name in ["a", "b", "c", "c"] {
                names.change(DIRECTORY, name.as_bytes()).done();
            }
            assert!(names.is_absent(other, b"x"));
            assert!(absent(&names, "x"));
            names.change(DIRECTORY, b"d").done();
            assert!(!names.is_absent(other, b"x"));
            assert!(absent(&names, "x"));
            for number in 0..2 * DIRECTORY_ROOM as u32 {
                names.change(DIRECTORY, &number.to_le_bytes()).done();
            }
            assert!(!absent(&names, "x"), "one directory may be too large");
            assert_eq!(names.table.borrow().taken, 0);
        });
    }

    #[derive(Clone, Debug)]
    enum Step {
        Ours { name: u8, works: bool, is_told: bool },
        Theirs { name: u8 },
        Ask,
        Pass { millis: u16 },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..6u8, prop::bool::weighted(0.8), prop::bool::weighted(0.9))
                .prop_map(|(name, works, is_told)| Step::Ours { name, works, is_told }),
            1 => (0..6u8).prop_map(|name| Step::Theirs { name }),
            3 => Just(Step::Ask),
            3 => (0..900u16).prop_map(|millis| Step::Pass { millis }),
        ]
    }

    proptest! {
        /// Whatever this mount and others do: what is called absent was absent within the last second.
        #[test]
        fn nothing_that_is_there_is_called_absent(steps in prop::collection::vec(step(), 1..60)) {
            Reactor::simulated(1).block_on(async {
                let names = Names::default();
                let mut change = 1;
                names.made(DIRECTORY, change, reactor::now());
                // Names of others, with the moment when they came; ours.
                let mut theirs: Vec<(u8, Instant)> = Vec::new();
                let mut ours = BTreeSet::new();
                for step in steps {
                    match step {
                        Step::Ours { name, works, is_told } => {
                            let changing = names.change(DIRECTORY, &[name]);
                            if works {
                                change += 1;
                                ours.insert(name);
                            }
                            if works && is_told {
                                changing.done();
                            }
                        }
                        Step::Theirs { name } => {
                            change += 1;
                            theirs.push((name, reactor::now()));
                        }
                        Step::Ask => names.told(DIRECTORY, names.ask(DIRECTORY), change),
                        Step::Pass { millis } => {
                            reactor::sleep(Duration::from_millis(millis.into())).await;
                        }
                    }
                    for name in ours.iter().chain(
                        theirs.iter().filter(|(_, at)| at.elapsed() >= VALID).map(|(name, _)| name),
                    ) {
                        assert!(!names.is_absent(DIRECTORY, &[*name]), "{name}");
                    }
                }
            });
        }
    }
}

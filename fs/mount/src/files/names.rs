//! Names that are absent: a mount that made a directory knows all of its names while nobody else changes it.
//!
//! Before each file that it makes the kernel asks whether the name is there. Unpacking, cloning and building make
//! their files in directories that they have just made, so the mount answers that itself.
//!
//! What always holds:
//! - A name is called absent only while this mount has a lease on the directory's names, and has had it since it was known
//!   that nobody else had changed them (docs/design/0012-locks-and-leases.md); and not after a listing has shown it.
//! - Every change that this mount asks for counts before it is sent, so programs of this mount see their own. One in a
//!   directory of which nothing is known keeps that directory from becoming known: by a handle it is reached before
//!   the answer to its making is here.
//! - That nobody else changed a directory is concluded from its change counter alone: it moved by as many as this mount
//!   was told that it had made. Anything else, and what was known is forgotten. So it is when a counter may have
//!   gone back: [`HEARD_WITHIN`].
//!
//! Of a name only a hash is kept. Two names with one hash, and names that are gone again, cost a question to the service.

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
/// A directory of which nothing was heard for longer is forgotten, whatever its counter says. A restarted service that
/// goes on without the changes that this mount was told of counts on from before them, and others may make as many
/// as were lost. But it has waited 30 s for this mount before (note 0010).
const HEARD_WITHIN: Duration = Duration::from_secs(20);

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
    /// Counts the beginnings and ends of this mount's changes.
    turns: u64,
    /// The largest number of a directory that this mount changed without knowing it. As numbers count up, one that is
    /// made after that has a larger one.
    strange: Ino,
}

struct Directory {
    /// The hashes of all names that it may have.
    names: HashSet<u64>,
    /// Its change counter, if nobody else has changed it.
    change: u64,
    /// Changes of this mount that are under way.
    under_way: u64,
    /// The last turn of one of them.
    turn: u64,
    /// When it was known last that nobody else had changed it.
    heard: Instant,
}

/// A change of a directory under way. Dropped without [`Changing::done`] it may or may not have happened.
#[must_use]
pub(super) struct Changing<'a> {
    names: &'a Names,
    directory: Ino,
    /// The directory was known when it began.
    is_counted: bool,
    is_done: bool,
}

/// A question whose answer may tell a directory's change counter.
#[derive(Clone, Copy)]
pub(super) struct Asking {
    turn: u64,
    at: Instant,
}

impl Default for Names {
    fn default() -> Self {
        Self::with_room(ROOM)
    }
}

impl Table {
    /// A change of this mount begins; whether the directory is known.
    fn begin(&mut self, directory: Ino) -> bool {
        self.turns += 1;
        let known = self.directories.get_mut(&directory);
        let is_known = known.is_some();
        if let Some(known) = known {
            known.under_way += 1;
            known.turn = self.turns;
        }
        is_known
    }

    fn end(&mut self, directory: Ino, is_done: bool) {
        self.turns += 1;
        if let Some(known) = self.directories.get_mut(&directory) {
            known.under_way -= 1;
            known.turn = self.turns;
            known.change += u64::from(is_done);
        }
    }

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
        let directories = LruCache::unbounded();
        let table = Table { directories, taken: 0, room, turns: 0, strange: Ino(0) };
        Names { table: RefCell::new(table), hasher: RandomState::new() }
    }

    /// This mount has just made `directory`, at `at` or before; this is its change counter.
    pub(super) fn made(&self, directory: Ino, change: u64, at: Instant) {
        let mut table = self.table.borrow_mut();
        if directory <= table.strange {
            return;
        }
        table.forget(directory);
        let (names, turn) = (HashSet::new(), table.turns);
        let known = Directory { names, change, under_way: 0, turn, heard: at };
        table.directories.put(directory, known);
        table.taken += DIRECTORY_ROOM;
        table.shrink();
    }

    /// True when the directory has no such name. Nobody else has changed it between `unchanged_since` and now.
    pub(super) fn is_absent(
        &self,
        directory: Ino,
        name: &[u8],
        unchanged_since: Option<Instant>,
    ) -> bool {
        let mut table = self.table.borrow_mut();
        table.directories.get(&directory).is_some_and(|known| {
            let is_certain = unchanged_since.is_some_and(|since| since <= known.heard);
            is_certain && !known.names.contains(&self.hasher.hash_one(name))
        })
    }

    /// A change begins that may leave `name` behind in `directory`: it moves the directory's change counter by
    /// one, or fails.
    pub(super) fn change(&self, directory: Ino, name: &[u8]) -> Changing<'_> {
        let mut table = self.table.borrow_mut();
        let is_counted = table.begin(directory);
        if !is_counted {
            table.strange = table.strange.max(directory);
        } else if let Some(known) = table.directories.peek_mut(&directory)
            && known.names.insert(self.hasher.hash_one(name))
        {
            table.taken += 1;
            table.shrink();
        }
        Changing { names: self, directory, is_counted, is_done: false }
    }

    /// A change of the attributes of `ino` begins: it moves the change counter by one, or fails.
    pub(super) fn change_attributes(&self, ino: Ino) -> Changing<'_> {
        let is_counted = self.table.borrow_mut().begin(ino);
        Changing { names: self, directory: ino, is_counted, is_done: false }
    }

    /// A change of `directory` begins after which nothing is known of it.
    pub(super) fn forget(&self, directory: Ino) {
        let mut table = self.table.borrow_mut();
        table.forget(directory);
        table.strange = table.strange.max(directory);
    }

    /// Something is about to be asked whose answer may bring a directory's attributes.
    pub(super) fn ask(&self) -> Asking {
        Asking { turn: self.table.borrow().turns, at: reactor::now() }
    }

    /// The answer: the change counter of `directory`.
    pub(super) fn told(&self, directory: Ino, change: u64, asking: Asking) {
        let mut table = self.table.borrow_mut();
        let Some(known) = table.directories.get_mut(&directory) else { return };
        // With a change of this mount in between, nothing follows from the counter.
        if known.under_way > 0 || known.turn > asking.turn {
            return;
        }
        if known.change == change && known.heard.elapsed() < HEARD_WITHIN {
            known.heard = known.heard.max(asking.at);
        } else {
            table.forget(directory);
        }
    }

    /// A listing of `directory` showed these names. One that is not known is somebody else's.
    pub(super) fn listed<'a>(&self, directory: Ino, mut names: impl Iterator<Item = &'a [u8]>) {
        let mut table = self.table.borrow_mut();
        let known = table.directories.peek(&directory);
        let is_changed = known.is_some_and(|known| {
            names.any(|name| !known.names.contains(&self.hasher.hash_one(name)))
        });
        if is_changed {
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
        if self.is_counted {
            self.names.table.borrow_mut().end(self.directory, self.is_done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use proptest::prelude::{Just, Strategy, prop, prop_oneof, proptest};
    use std::collections::{BTreeSet, VecDeque};

    const DIRECTORY: Ino = Ino(7);
    const PAUSE: Duration = Duration::from_secs(1);

    fn absent_since(names: &Names, name: &str, since: Option<Instant>) -> bool {
        names.is_absent(DIRECTORY, name.as_bytes(), since)
    }

    /// With a lease that has been there all the time.
    fn absent(names: &Names, name: &str) -> bool {
        absent_since(names, name, Some(Instant::default()))
    }

    /// With one that was regained just now.
    fn absent_now(names: &Names, name: &str) -> bool {
        absent_since(names, name, Some(reactor::now()))
    }

    fn told(names: &Names, change: u64) {
        names.told(DIRECTORY, change, names.ask());
    }

    #[test]
    fn what_was_just_made_is_known_for_as_long_as_the_lease_lasts() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            assert!(!absent(&names, "a"), "never heard of");
            names.made(DIRECTORY, 1, reactor::now());
            assert!(absent(&names, "a") && !absent_since(&names, "a", None));
            let changing = names.change(DIRECTORY, b"a");
            assert!(!absent(&names, "a") && absent(&names, "b"), "while it is under way");
            changing.done();
            names.change_attributes(DIRECTORY).done();
            reactor::sleep(PAUSE).await;
            assert!(!absent_now(&names, "b"), "somebody else may have made it");
            told(&names, 3);
            assert!(absent_now(&names, "b") && !absent_now(&names, "a"));
            names.forget(DIRECTORY);
            assert!(!absent(&names, "b"));
        });
    }

    #[test]
    fn a_counter_that_others_moved_ends_it() {
        Reactor::simulated(1).block_on(async {
            // Somebody else's change; one of this mount that failed, or of which nobody knows; both.
            for (ours_done, counter) in [(true, 3), (false, 2), (false, 3)] {
                let names = Names::default();
                names.made(DIRECTORY, 1, reactor::now());
                let changing = names.change(DIRECTORY, b"a");
                if ours_done {
                    changing.done();
                } else {
                    drop(changing);
                }
                told(&names, counter);
                assert!(!absent(&names, "b"), "{ours_done} {counter}");
            }
        });
    }

    #[test]
    fn an_answer_that_a_change_overtook_teaches_nothing() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            names.made(DIRECTORY, 1, reactor::now());
            let asking = names.ask();
            names.change(DIRECTORY, b"a").done();
            reactor::sleep(PAUSE).await;
            // Somebody else's change, not ours.
            names.told(DIRECTORY, 2, asking);
            assert!(!absent_now(&names, "b"));
            let changing = names.change(DIRECTORY, b"c");
            told(&names, 2);
            let asking = names.ask();
            changing.done();
            names.told(DIRECTORY, 3, asking);
            assert!(!absent_now(&names, "b"), "which of the two they count is not known");
            told(&names, 3);
            assert!(absent_now(&names, "b"));
        });
    }

    /// By a handle a directory is reached before the answer to its making is here.
    #[test]
    fn a_directory_that_was_changed_before_it_was_known_is_never_known() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            let early = names.change(DIRECTORY, b"a");
            names.made(DIRECTORY, 1, reactor::now());
            assert!(!absent(&names, "a"), "while it is under way");
            early.done();
            assert!(!absent(&names, "a"));
            let later = Ino(DIRECTORY.0 + 1);
            names.forget(later);
            names.made(later, 1, reactor::now());
            assert!(!names.is_absent(later, b"a", Some(Instant::default())), "renamed to");
            let last = Ino(DIRECTORY.0 + 2);
            names.made(last, 1, reactor::now());
            assert!(names.is_absent(last, b"a", Some(Instant::default())));
        });
    }

    /// Node and connection were away, the service went on without this mount's last change, and then somebody
    /// else made one.
    #[test]
    fn a_counter_that_may_have_gone_back_says_nothing() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            names.made(DIRECTORY, 1, reactor::now());
            names.change(DIRECTORY, b"lost").done();
            let asking = names.ask();
            reactor::sleep(Duration::from_secs(30)).await;
            names.told(DIRECTORY, 2, asking);
            told(&names, 2);
            assert!(!absent(&names, "b"));
        });
    }

    #[test]
    fn a_name_that_was_listed_is_not_called_absent() {
        Reactor::simulated(1).block_on(async {
            let names = Names::default();
            names.made(DIRECTORY, 1, reactor::now());
            names.change(DIRECTORY, b"a").done();
            names.listed(DIRECTORY, [&b"a"[..]].into_iter());
            assert!(absent(&names, "theirs"), "nothing new");
            names.listed(DIRECTORY, [&b"a"[..], &b"theirs"[..]].into_iter());
            assert!(!absent(&names, "theirs"));
            names.listed(DIRECTORY, [&b"a"[..]].into_iter());
            assert_eq!(names.table.borrow().taken, 0);
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
            assert!(names.is_absent(other, b"x", Some(Instant::default())));
            assert!(absent(&names, "x"));
            names.change(DIRECTORY, b"d").done();
            assert!(!names.is_absent(other, b"x", Some(Instant::default())));
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
        /// A change of this mount is sent, carried out, answered (or its caller gives up).
        Send {
            name: u8,
        },
        CarryOut,
        Answer {
            is_told: bool,
        },
        /// The counter is asked for, looked at, and told.
        Ask,
        Look,
        Tell,
        Theirs {
            name: u8,
        },
        List,
        Pass {
            millis: u16,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..6u8).prop_map(|name| Step::Send { name }),
            4 => Just(Step::CarryOut),
            4 => prop::bool::weighted(0.9).prop_map(|is_told| Step::Answer { is_told }),
            4 => Just(Step::Ask),
            4 => Just(Step::Look),
            4 => Just(Step::Tell),
            1 => (0..6u8).prop_map(|name| Step::Theirs { name }),
            1 => Just(Step::List),
            4 => (0..900u16).prop_map(|millis| Step::Pass { millis }),
        ]
    }

    proptest! {
        /// Whatever this mount and others do at once: what is called absent is not there, and was not
        /// listed.
        #[test]
        fn nothing_that_is_there_is_called_absent(steps in prop::collection::vec(step(), 1..80)) {
            Reactor::simulated(1).block_on(async {
                let names = Names::default();
                let mut change = 1;
                names.made(DIRECTORY, change, reactor::now());
                // Changes that are not carried out yet, and those not answered, by their numbers.
                let mut sent: VecDeque<(usize, u8)> = VecDeque::new();
                let mut unanswered = VecDeque::new();
                let mut carried_out = BTreeSet::new();
                let mut asked = VecDeque::new();
                let mut looked = VecDeque::new();
                // Since when the lease is there; who makes a name takes it away first, and voids what is under way.
                let mut since = Some(reactor::now());
                // Names of others; ours; what was listed.
                let mut theirs: Vec<u8> = Vec::new();
                let mut ours = BTreeSet::new();
                let mut listed = BTreeSet::new();
                for (number, step) in steps.into_iter().enumerate() {
                    match step {
                        Step::Send { name } => {
                            unanswered.push_back((number, names.change(DIRECTORY, &[name])));
                            sent.push_back((number, name));
                        }
                        Step::CarryOut => {
                            if let Some((number, name)) = sent.pop_front() {
                                change += 1;
                                ours.insert(name);
                                carried_out.insert(number);
                            }
                        }
                        Step::Answer { is_told } => {
                            if let Some((number, changing)) = unanswered.pop_front()
                                && is_told
                                && carried_out.contains(&number)
                            {
                                changing.done();
                            }
                        }
                        Step::Ask => asked.push_back(names.ask()),
                        Step::Look => looked.extend(asked.pop_front().map(|asking| (asking, change, theirs.len()))),
                        Step::Tell => {
                            if let Some((asking, change, seen)) = looked.pop_front() {
                                if seen == theirs.len() {
                                    let later = || reactor::now() + Duration::from_nanos(1);
                                    since.get_or_insert_with(later);
                                }
                                names.told(DIRECTORY, change, asking);
                            }
                        }
                        Step::Theirs { name } => {
                            change += 1;
                            theirs.push(name);
                            since = None;
                        }
                        Step::List => {
                            listed.extend(&ours);
                            listed.extend(&theirs);
                            let listed: Vec<[u8; 1]> = listed.iter().map(|name| [*name]).collect();
                            names.listed(DIRECTORY, listed.iter().map(|name| &name[..]));
                        }
                        Step::Pass { millis } => {
                            reactor::sleep(Duration::from_millis(millis.into())).await;
                            // It is over by itself.
                            since = since.filter(|_| millis < 800);
                        }
                    }
                    for name in ours.iter().chain(&listed).chain(&theirs) {
                        assert!(!names.is_absent(DIRECTORY, &[*name], since), "{name}");
                    }
                }
            });
        }
    }
}

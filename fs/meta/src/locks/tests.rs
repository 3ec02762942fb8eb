//! Locks against a model with one entry per byte, and the bounds.

use super::*;
use proptest::prelude::*;

const FILES: u64 = 2;
const BYTES: usize = 24;

/// Who: two clients with two owners of each sort.
fn owner(n: u8) -> Owner {
    let sort = if n & 4 == 0 { LockSort::Posix } else { LockSort::Flock };
    Owner { client: 1 + u64::from(n & 1), owner: LockOwner { sort, id: u64::from(n >> 1 & 1) } }
}

#[derive(Clone, Debug)]
enum Step {
    Lock {
        file: u64,
        owner: u8,
        range: (u64, u64),
        exclusive: bool,
        waits: bool,
    },
    Unlock {
        file: u64,
        owner: u8,
        range: (u64, u64),
    },
    /// Of the waits there are.
    Cancel(prop::sample::Index),
    Close {
        file: u64,
        client: u64,
    },
    Forget(u64),
    /// What was told is acknowledged.
    Ack,
}

fn any_step() -> impl Strategy<Value = Step> {
    let file = || 0..FILES;
    let range = || {
        let last = BYTES as u64;
        (0..last, 0..last).prop_map(|(a, b)| (a.min(b), a.max(b)))
    };
    prop_oneof![
        12 => (file(), 0..8u8, range(), any::<bool>(), 0..4u8).prop_map(
            |(file, owner, range, exclusive, waits)| {
                Step::Lock { file, owner, range, exclusive, waits: waits > 0 }
            }
        ),
        6 => (file(), 0..8u8, range()).prop_map(|(file, owner, range)| {
            Step::Unlock { file, owner, range }
        }),
        2 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        1 => (file(), 1..3u64).prop_map(|(file, client)| Step::Close { file, client }),
        1 => (1..3u64).prop_map(Step::Forget),
        2 => Just(Step::Ack),
    ]
}

#[derive(Clone, Copy, Debug)]
struct ModelWait {
    file: u64,
    owner: Owner,
    ticket: u64,
    lock: Lock,
}

/// Whether and how each byte is locked by each owner.
#[derive(Default)]
struct Model {
    held: BTreeMap<(u64, Owner), [Option<bool>; BYTES]>,
    waits: Vec<ModelWait>,
    locks: Locks,
    next_ticket: u64,
    numbers: Vec<(u64, u64)>,
}

fn bytes_of(range: LockRange) -> std::ops::RangeInclusive<usize> {
    range.start as usize..=range.end as usize
}

impl Model {
    fn set(&mut self, file: u64, owner: Owner, range: LockRange, how: Option<bool>) {
        self.held.entry((file, owner)).or_insert([None; BYTES])[bytes_of(range)].fill(how);
    }

    /// The owners in the way.
    fn in_the_way(&self, file: u64, owner: Owner, lock: &Lock) -> BTreeSet<Owner> {
        let others = self.held.iter().filter(|((of, other), _)| {
            *of == file && *other != owner && other.owner.sort == owner.owner.sort
        });
        let in_way = others.filter(|(_, bytes)| {
            bytes[bytes_of(lock.range)].iter().flatten().any(|held| *held || lock.exclusive)
        });
        in_way.map(|((_, other), _)| *other).collect()
    }

    /// Whether this owner waits, however indirectly, for itself when it waits for these.
    fn is_cycle(&self, owner: Owner, for_whom: BTreeSet<Owner>) -> bool {
        let mut seen = for_whom;
        loop {
            let before = seen.len();
            for wait in self.waits.iter().filter(|wait| wait.owner.owner.sort == LockSort::Posix) {
                if seen.contains(&wait.owner) {
                    seen.extend(self.in_the_way(wait.file, wait.owner, &wait.lock));
                }
            }
            if seen.contains(&owner) || seen.len() == before {
                return seen.contains(&owner);
            }
        }
    }

    fn is_stuck(&self, wait: &ModelWait) -> bool {
        let posix = wait.owner.owner.sort == LockSort::Posix;
        posix && self.is_cycle(wait.owner, self.in_the_way(wait.file, wait.owner, &wait.lock))
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Lock { file, owner: n, range: (start, end), exclusive, waits } => {
                let owner = owner(n);
                let range = LockRange { start, end };
                let lock = Lock { owner: owner.owner, range, exclusive, pid: n.into() };
                let ticket = waits.then_some(self.next_ticket);
                self.next_ticket += 1;
                let in_the_way = self.in_the_way(file, owner, &lock);
                let posix = owner.owner.sort == LockSort::Posix;
                let expected = if in_the_way.is_empty() {
                    Ok(Verdict::Locked)
                } else if !waits {
                    Err(MetaFault::LockHeld)
                } else if posix && self.is_cycle(owner, in_the_way) {
                    Err(MetaFault::Deadlock)
                } else {
                    Ok(Verdict::Waiting)
                };
                assert_eq!(self.locks.judge(owner.client, Ino(file), &lock, ticket), expected);
                let tested = self.locks.in_the_way(owner.client, Ino(file), &lock);
                assert_eq!(tested.is_none(), expected == Ok(Verdict::Locked));
                self.locks.lock(owner.client, Ino(file), &lock, ticket);
                match expected {
                    Ok(Verdict::Locked) => self.set(file, owner, range, Some(exclusive)),
                    Ok(Verdict::Waiting) => {
                        let ticket = ticket.expect("it waits");
                        self.waits.push(ModelWait { file, owner, ticket, lock });
                        // Asked again it is the same wait.
                        self.locks.lock(owner.client, Ino(file), &lock, Some(ticket));
                        let again = self.locks.judge(owner.client, Ino(file), &lock, Some(ticket));
                        assert_eq!(again, expected);
                    }
                    Err(_) => {}
                }
            }
            Step::Unlock { file, owner: n, range: (start, end) } => {
                let range = LockRange { start, end };
                self.set(file, owner(n), range, None);
                self.locks.unlock(owner(n), Ino(file), range);
            }
            Step::Cancel(at) => {
                if !self.waits.is_empty() {
                    let wait = self.waits.remove(at.index(self.waits.len()));
                    assert!(!self.locks.was_granted(wait.owner.client, wait.ticket));
                    self.locks.cancel(wait.owner.client, wait.ticket);
                }
            }
            Step::Close { file, client } => {
                self.drop_of(client, Some(file));
                self.locks.close(client, Ino(file));
            }
            Step::Forget(client) => {
                self.drop_of(client, None);
                self.numbers.retain(|(of, _)| *of != client);
                self.locks.forget(client);
                assert!(!self.locks.has_any(client));
            }
            Step::Ack => {
                for (client, number) in std::mem::take(&mut self.numbers) {
                    self.locks.acknowledged(client, number);
                    self.locks.acknowledged(client, number);
                }
                assert!([1, 2].iter().all(|client| self.locks.notices(*client).is_empty()));
            }
        }
        self.hear();
        self.check();
    }

    fn drop_of(&mut self, client: u64, file: Option<u64>) {
        let is_gone =
            |of: u64, owner: Owner| owner.client == client && file.is_none_or(|file| file == of);
        self.held.retain(|(of, owner), _| !is_gone(*of, *owner));
        self.waits.retain(|wait| !is_gone(wait.file, wait.owner));
    }

    /// What was granted must have been free by then, what was refused stuck.
    fn hear(&mut self) {
        let mut due: Vec<(u64, u64, Notice)> = Vec::new();
        let order = std::mem::take(&mut self.locks.fresh);
        for (client, number) in order {
            if let Some((_, notice)) = self.locks.clients[&client].notices.get(&number) {
                due.push((client, number, notice.clone()));
            }
        }
        for (client, number, notice) in due {
            self.numbers.push((client, number));
            let (Notice::Granted { ticket } | Notice::Refused { ticket }) = notice else {
                panic!("{notice:?} is not about locks")
            };
            let at = self.waits.iter().position(|wait| wait.ticket == ticket).expect("a wait");
            let wait = self.waits[at];
            assert_eq!(wait.owner.client, client);
            if let Notice::Granted { .. } = notice {
                assert!(self.in_the_way(wait.file, wait.owner, &wait.lock).is_empty());
                self.set(wait.file, wait.owner, wait.lock.range, Some(wait.lock.exclusive));
                assert!(self.locks.was_granted(client, ticket));
            } else {
                assert!(self.is_stuck(&wait));
            }
            self.waits.remove(at);
        }
    }

    fn check(&self) {
        for wait in &self.waits {
            assert!(
                !self.in_the_way(wait.file, wait.owner, &wait.lock).is_empty(),
                "fits: {wait:?}"
            );
            assert!(!self.is_stuck(wait), "waits for ever: {wait:?}");
        }
        let mut held: BTreeMap<(u64, Owner), [Option<bool>; BYTES]> = BTreeMap::new();
        for (ino, file) in &self.locks.files {
            assert!(!file.held.is_empty() || !file.waits.is_empty());
            for (owner, spans) in &file.held {
                let bytes = held.entry((ino.0, *owner)).or_insert([None; BYTES]);
                spans
                    .iter()
                    .for_each(|span| bytes[bytes_of(span.range)].fill(Some(span.exclusive)));
            }
        }
        let known = self.held.iter().filter(|(_, bytes)| bytes.iter().any(Option::is_some));
        assert_eq!(held, known.map(|(key, bytes)| (*key, *bytes)).collect());
        for (client, known) in &self.locks.clients {
            let ranges = self.locks.files.values().flat_map(|file| &file.held);
            let ranges = ranges.filter(|(owner, _)| owner.client == *client);
            assert_eq!(known.ranges, ranges.map(|(_, held)| held.len()).sum::<usize>());
            let all: usize = known.files.values().sum();
            assert_eq!(all, known.ranges + known.waits.len() + known.notices.len());
            let granted =
                known.notices.values().filter(|(_, n)| matches!(n, Notice::Granted { .. }));
            assert_eq!(granted.count(), known.granted.len());
        }
        let waits: usize = self.locks.files.values().map(|file| file.waits.len()).sum();
        assert_eq!(waits, self.waits.len());
        let posix = |wait: &&ModelWait| wait.owner.owner.sort == LockSort::Posix;
        let waiting: usize = self.locks.waiting.values().map(BTreeMap::len).sum();
        assert_eq!(waiting, self.waits.iter().filter(posix).count());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn locks_agree_with_bytes(steps in proptest::collection::vec(any_step(), 1..60)) {
        let mut model = Model::default();
        steps.into_iter().for_each(|step| model.step(step));
    }
}

fn posix(id: u64, start: u64, end: u64, exclusive: bool) -> Lock {
    let owner = LockOwner { sort: LockSort::Posix, id };
    Lock { owner, range: LockRange { start, end }, exclusive, pid: 1 }
}

#[test]
fn a_client_cannot_have_any_number() {
    let mut locks = Locks::default();
    let file = Ino(7);
    locks.lock(1, file, &posix(1, 0, 0, true), None);
    for ticket in 0..100_000 {
        let lock = posix(2 + ticket, 0, 0, true);
        let verdict = locks.judge(2, file, &lock, Some(ticket));
        let is_full = ticket >= LOCKS_MAX as u64;
        let expected = if is_full { Err(MetaFault::TooManyLocks) } else { Ok(Verdict::Waiting) };
        assert_eq!(verdict, expected);
        locks.lock(2, file, &lock, Some(ticket));
    }
    // Nor by releasing what lies between.
    assert_eq!(locks.judge(1, file, &posix(9, 5, 9, true), None), Ok(Verdict::Locked));
    locks.close(2, file);
    for at in 1..LOCKS_MAX as u64 {
        locks.lock(1, file, &posix(1, 4 * at, 4 * at + 2, true), None);
    }
    let owner = Owner { client: 1, owner: posix(1, 0, 0, true).owner };
    assert!(locks.splits_too_much(owner, file, LockRange { start: 5, end: 5 }));
    assert!(!locks.splits_too_much(owner, file, LockRange { start: 4, end: 9 }));
    locks.unlock(owner, file, LockRange::WHOLE);
    assert!(!locks.has_any(1) && locks.files.is_empty());
}

#[test]
fn what_was_reclaimed_is_held_and_nothing_of_what_is_in_the_way() {
    let mut locks = Locks::default();
    let (file, other) = (Ino(7), Ino(8));
    let mine = [(file, posix(1, 0, 9, true)), (file, posix(2, 10, 19, false))];
    assert!(locks.reclaim(1, &mine));
    locks.lock(2, file, &posix(1, 0, 0, true), Some(5));
    // Said again, as the answer was lost: who waits goes on waiting.
    assert!(locks.reclaim(1, &mine));
    assert!(locks.take_fresh().is_empty());
    assert!(!locks.reclaim(3, &[(other, posix(1, 0, 0, true)), (file, posix(1, 19, 30, true))]));
    assert!(!locks.has_any(3));
    assert!(locks.reclaim(1, &mine[1..]));
    assert_eq!(locks.take_fresh()[&2], [(1, Notice::Granted { ticket: 5 })]);
}

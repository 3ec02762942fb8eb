//! File locks: who holds which, who waits, and what waiting clients are to be told.
//!
//! Volatile, without I/O and without a clock; `Table` owns it. What is told travels as notices, which stay
//! here until they are acknowledged.
//!
//! What always holds:
//! - No two locks of one sort and of different owners overlap, unless both are shared.
//! - A wait is queued exactly while a held lock is in its way. Waits are not in each other's way (as in
//!   Linux: readers may starve a writer); what fits is granted in the order of the queue.
//! - There is no cycle of POSIX waits, as far as [`STEPS_MAX`] reaches.
//! - A client has locks and waits only on files that it has open (`Table` sees to that), and so many of
//!   both and of notices as [`LOCKS_MAX`] says, but that a grant may split a range in three.
//!
//! After a crash clients say again what they held (`Reclaim`), and ask again for what they waited for.

use levada_base::ids::Ino;
use levada_base::planted;
use levada_wire::lock::{Held, Lock, LockOwner, LockRange, LockSort, Span};
use levada_wire::meta::{LOCKS_MAX, MetaFault, Notice};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What a client may say that it held: grants may have split what it had.
pub const RECLAIMED_MAX: usize = 4 * LOCKS_MAX;
/// A search for a deadlock that has looked at so many owners gives up, and the wait begins: some 5 ms.
const STEPS_MAX: usize = 100_000;

/// An owner, among all clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    pub client: u64,
    pub owner: LockOwner,
}

/// A lock that waits for its turn.
#[derive(Clone, Copy, Debug)]
struct Wait {
    client: u64,
    ticket: u64,
    lock: Lock,
}

impl Wait {
    fn owner(&self) -> Owner {
        Owner { client: self.client, owner: self.lock.owner }
    }
}

/// What comes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Locked,
    Waiting,
}

#[derive(Default)]
struct File {
    held: BTreeMap<Owner, Held>,
    waits: VecDeque<Wait>,
}

impl File {
    /// The owners in the way of this lock, each with a range of it that is.
    fn in_the_way(&self, client: u64, lock: &Lock) -> impl Iterator<Item = (Owner, Span)> + '_ {
        let (own, range, exclusive) =
            (Owner { client, owner: lock.owner }, lock.range, lock.exclusive);
        let others = move |owner: &Owner| *owner != own && owner.owner.sort == own.owner.sort;
        self.held.iter().filter(move |(owner, _)| others(owner)).filter_map(move |(owner, held)| {
            held.in_the_way(range, exclusive).map(|span| (*owner, *span))
        })
    }

    fn is_free(&self, client: u64, lock: &Lock) -> bool {
        self.in_the_way(client, lock).next().is_none()
    }
}

/// What one client has here.
#[derive(Default)]
struct Client {
    /// Ranges held, in all files.
    ranges: usize,
    /// Ranges, waits and notices in each file, so that its end need not look at all of them.
    files: BTreeMap<Ino, usize>,
    /// Waits by their ticket.
    waits: BTreeMap<u64, Ino>,
    last_notice: u64,
    /// Not acknowledged yet.
    notices: BTreeMap<u64, (Ino, Notice)>,
    /// Tickets of grants among them.
    granted: BTreeMap<u64, u64>,
}

impl Client {
    fn count(&mut self, ino: Ino, more: usize, less: usize) {
        let count = self.files.entry(ino).or_default();
        *count = *count + more - less;
        if *count == 0 {
            self.files.remove(&ino);
        }
    }

    fn is_full(&self) -> bool {
        self.ranges + self.waits.len() + self.notices.len() >= LOCKS_MAX
    }
}

/// See the module.
#[derive(Default)]
pub struct Locks {
    files: BTreeMap<Ino, File>,
    clients: BTreeMap<u64, Client>,
    /// POSIX waits of each owner: where a search for a deadlock goes on.
    waiting: BTreeMap<Owner, BTreeMap<(Ino, u64), Lock>>,
    /// Notices that have not been sent yet, and to whom.
    fresh: Vec<(u64, u64)>,
}

impl Locks {
    /// What comes of asking for a lock, with a ticket by somebody who waits.
    pub fn judge(
        &self,
        client: u64,
        ino: Ino,
        lock: &Lock,
        ticket: Option<u64>,
    ) -> Result<Verdict, MetaFault> {
        if !lock.range.is_sound() {
            return Err(MetaFault::Invalid);
        }
        if let Some(verdict) = self.known(client, ticket) {
            return Ok(verdict);
        }
        if self.clients.get(&client).is_some_and(Client::is_full) {
            return Err(MetaFault::TooManyLocks);
        }
        let Some(file) = self.files.get(&ino) else { return Ok(Verdict::Locked) };
        if file.is_free(client, lock) {
            return Ok(Verdict::Locked);
        }
        if ticket.is_none() {
            return Err(MetaFault::LockHeld);
        }
        if lock.owner.sort == LockSort::Posix {
            let waiter = Owner { client, owner: lock.owner };
            let in_the_way = file.in_the_way(client, lock).map(|(owner, _)| owner);
            if self.reachable(in_the_way).contains(&waiter) {
                return Err(MetaFault::Deadlock);
            }
        }
        Ok(Verdict::Waiting)
    }

    /// What came of a ticket that was here before.
    fn known(&self, client: u64, ticket: Option<u64>) -> Option<Verdict> {
        let (ticket, known) = (ticket?, self.clients.get(&client)?);
        let waits = known.waits.contains_key(&ticket).then_some(Verdict::Waiting);
        waits.or(known.granted.contains_key(&ticket).then_some(Verdict::Locked))
    }

    /// Does what [`Locks::judge`] says.
    pub fn lock(&mut self, client: u64, ino: Ino, lock: &Lock, ticket: Option<u64>) {
        if self.known(client, ticket).is_some() {
            return;
        }
        match self.judge(client, ino, lock, ticket) {
            Ok(Verdict::Locked) => {
                self.take(client, ino, lock);
                self.settle(ino);
            }
            Ok(Verdict::Waiting) => {
                let ticket = ticket.expect("nobody else waits");
                let wait = Wait { client, ticket, lock: *lock };
                self.files.entry(ino).or_default().waits.push_back(wait);
                let known = self.clients.entry(client).or_default();
                known.count(ino, 1, 0);
                known.waits.insert(ticket, ino);
                if lock.owner.sort == LockSort::Posix {
                    self.waiting.entry(wait.owner()).or_default().insert((ino, ticket), *lock);
                }
            }
            Err(_) => {}
        }
    }

    /// Whether a release would leave more ranges than the client may have.
    pub fn splits_too_much(&self, owner: Owner, ino: Ino, range: LockRange) -> bool {
        let held = self.files.get(&ino).and_then(|file| file.held.get(&owner));
        let splits = held.is_some_and(|held| held.len_without(range) > held.len());
        splits && self.clients.get(&owner.client).is_some_and(Client::is_full)
    }

    /// Releases what the owner holds of a range.
    pub fn unlock(&mut self, owner: Owner, ino: Ino, range: LockRange) {
        if self.change(owner, ino, |held| held.release(range)) {
            self.settle(ino);
        }
    }

    /// Whether the wait has ended with the lock, of which the client may not have heard yet.
    pub fn was_granted(&self, client: u64, ticket: u64) -> bool {
        self.clients.get(&client).is_some_and(|known| known.granted.contains_key(&ticket))
    }

    /// Ends a wait, if it is one.
    pub fn cancel(&mut self, client: u64, ticket: u64) {
        let ino = self.clients.get(&client).and_then(|known| known.waits.get(&ticket).copied());
        if let Some(ino) = ino {
            self.leave_queue(client, ino, ticket);
            self.tidy(ino);
        }
    }

    /// A lock in the way of this one, its pid 0 where it is another client's.
    pub fn in_the_way(&self, client: u64, ino: Ino, lock: &Lock) -> Option<Lock> {
        let (owner, span) = self.files.get(&ino)?.in_the_way(client, lock).next()?;
        let pid = if owner.client == client { span.pid } else { 0 };
        Some(Lock { owner: owner.owner, range: span.range, exclusive: span.exclusive, pid })
    }

    /// The client does not have the file open any more.
    pub fn close(&mut self, client: u64, ino: Ino) {
        if planted!("meta-lock-kept-after-close") {
            return;
        }
        self.drop_file(client, ino);
        self.settle(ino);
    }

    /// The client is gone.
    pub fn forget(&mut self, client: u64) {
        let files = self.drop_all(client);
        self.clients.remove(&client);
        files.into_iter().for_each(|ino| self.settle(ino));
    }

    /// After a restart: what a client says that it holds takes the place of what was known of it. False: some of it is
    /// in the way of others, which a bug alone brings about; then it has none.
    pub fn reclaim(&mut self, client: u64, locks: &[(Ino, Lock)]) -> bool {
        // Nothing is granted before all is taken: it may have been said before, with its answer lost.
        let mut files: BTreeSet<Ino> = self.drop_all(client).into_iter().collect();
        let mut is_sound = locks.len() <= RECLAIMED_MAX;
        for (ino, lock) in locks {
            let file = self.files.get(ino);
            is_sound &= lock.range.is_sound() && file.is_none_or(|file| file.is_free(client, lock));
            if !is_sound {
                files.extend(self.drop_all(client));
                break;
            }
            self.take(client, *ino, lock);
        }
        files.into_iter().for_each(|ino| self.settle(ino));
        is_sound
    }

    /// Everything of a client goes; the files where something did. Nothing is granted yet.
    fn drop_all(&mut self, client: u64) -> Vec<Ino> {
        let files = self.clients.get(&client).map(|known| known.files.keys().copied().collect());
        let files: Vec<Ino> = files.unwrap_or_default();
        for ino in &files {
            self.drop_file(client, *ino);
        }
        files
    }

    pub fn has_any(&self, client: u64) -> bool {
        self.clients.get(&client).is_some_and(|known| known.ranges + known.waits.len() > 0)
    }

    /// Notices to send now, with their clients.
    pub fn take_fresh(&mut self) -> BTreeMap<u64, Vec<(u64, Notice)>> {
        let mut due: BTreeMap<u64, Vec<(u64, Notice)>> = BTreeMap::new();
        for (client, number) in std::mem::take(&mut self.fresh) {
            let notice = self.clients.get(&client).and_then(|known| known.notices.get(&number));
            due.entry(client)
                .or_default()
                .extend(notice.map(|(_, notice)| (number, notice.clone())));
        }
        due
    }

    /// Every notice that a client has not acknowledged.
    pub fn notices(&self, client: u64) -> Vec<(u64, Notice)> {
        let notices = self.clients.get(&client).map(|known| known.notices.iter());
        notices
            .into_iter()
            .flatten()
            .map(|(number, (_, notice))| (*number, notice.clone()))
            .collect()
    }

    pub fn acknowledged(&mut self, client: u64, number: u64) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        if let Some((ino, Notice::Granted { ticket } | Notice::Refused { ticket })) =
            known.notices.remove(&number)
        {
            known.granted.remove(&ticket);
            known.count(ino, 0, 1);
        }
    }

    /// Changes what an owner holds; says whether it held or holds anything.
    fn change(&mut self, owner: Owner, ino: Ino, change: impl FnOnce(&mut Held)) -> bool {
        let file = self.files.entry(ino).or_default();
        let held = file.held.entry(owner).or_default();
        let before = held.len();
        change(held);
        let after = held.len();
        if after == 0 {
            file.held.remove(&owner);
        }
        let known = self.clients.entry(owner.client).or_default();
        known.ranges = known.ranges + after - before;
        known.count(ino, after, before);
        self.tidy(ino);
        before + after > 0
    }

    fn take(&mut self, client: u64, ino: Ino, lock: &Lock) {
        let owner = Owner { client, owner: lock.owner };
        self.change(owner, ino, |held| held.take(lock));
        if lock.owner.sort == LockSort::Posix {
            self.break_cycles(ino, owner);
        }
    }

    /// `owner` holds more of `ino`: whoever waits for that now, and is itself waited for, however indirectly, by
    /// the owner, would wait for ever.
    fn break_cycles(&mut self, ino: Ino, owner: Owner) {
        while self.waiting.contains_key(&owner) {
            let behind = self.reachable(std::iter::once(owner));
            let Some(file) = self.files.get(&ino) else { return };
            let stuck = file.waits.iter().find(|wait| {
                wait.lock.owner.sort == LockSort::Posix
                    && behind.contains(&wait.owner())
                    && file.in_the_way(wait.client, &wait.lock).any(|(holder, _)| holder == owner)
            });
            let Some(Wait { client, ticket, .. }) = stuck.copied() else { return };
            self.leave_queue(client, ino, ticket);
            self.notify(client, ino, Notice::Refused { ticket });
        }
    }

    /// Grants what fits.
    fn settle(&mut self, ino: Ino) {
        loop {
            let mut granted = false;
            let mut at = 0;
            while let Some(file) = self.files.get(&ino)
                && let Some(wait) = file.waits.get(at).copied()
            {
                if !file.is_free(wait.client, &wait.lock) {
                    at += 1;
                    continue;
                }
                granted = true;
                self.leave_queue(wait.client, ino, wait.ticket);
                self.notify(wait.client, ino, Notice::Granted { ticket: wait.ticket });
                self.take(wait.client, ino, &wait.lock);
            }
            // A grant that turned an exclusive lock into a shared one lets in who waits before it, and one that
            // made others wait for ever moved the queue.
            if !granted {
                return;
            }
        }
    }

    fn leave_queue(&mut self, client: u64, ino: Ino, ticket: u64) {
        let Some(file) = self.files.get_mut(&ino) else { return };
        let at = file.waits.iter().position(|wait| (wait.client, wait.ticket) == (client, ticket));
        let wait = at.and_then(|at| file.waits.remove(at)).expect("listed with its client");
        if let Some(known) = self.clients.get_mut(&client) {
            known.waits.remove(&ticket);
            known.count(ino, 0, 1);
        }
        if let Some(waits) = self.waiting.get_mut(&wait.owner()) {
            waits.remove(&(ino, ticket));
            if waits.is_empty() {
                self.waiting.remove(&wait.owner());
            }
        }
    }

    fn notify(&mut self, client: u64, ino: Ino, notice: Notice) {
        let known = self.clients.entry(client).or_default();
        known.last_notice += 1;
        let number = known.last_notice;
        if let Notice::Granted { ticket } = notice {
            known.granted.insert(ticket, number);
        }
        known.notices.insert(number, (ino, notice));
        known.count(ino, 1, 0);
        self.fresh.push((client, number));
    }

    /// Everything of a client on one file goes; nothing is granted yet.
    fn drop_file(&mut self, client: u64, ino: Ino) {
        let known = self.clients.get_mut(&client).filter(|known| known.files.contains_key(&ino));
        let Some(known) = known else { return };
        let waits: Vec<u64> =
            known.waits.iter().filter(|(_, of)| **of == ino).map(|(ticket, _)| *ticket).collect();
        let ended: Vec<u64> = known
            .notices
            .iter()
            .filter(|(_, (of, _))| *of == ino)
            .map(|(number, _)| *number)
            .collect();
        for number in ended {
            self.acknowledged(client, number);
        }
        for ticket in waits {
            self.leave_queue(client, ino, ticket);
        }
        if let Some(file) = self.files.get_mut(&ino) {
            let of_client = Owner { client, owner: LockOwner::FIRST }..=Owner {
                client,
                owner: LockOwner::LAST,
            };
            let owners: Vec<Owner> = file.held.range(of_client).map(|(owner, _)| *owner).collect();
            for owner in owners {
                let ranges = file.held.remove(&owner).map_or(0, |held| held.len());
                if let Some(known) = self.clients.get_mut(&client) {
                    known.ranges -= ranges;
                    known.count(ino, 0, ranges);
                }
            }
        }
        self.tidy(ino);
    }

    /// Keeps no entry of a file without locks and waits.
    fn tidy(&mut self, ino: Ino) {
        if self.files.get(&ino).is_some_and(|file| file.held.is_empty() && file.waits.is_empty()) {
            self.files.remove(&ino);
        }
    }

    /// The owners for whom these owners wait, and those for whom they wait, and so on, and these themselves.
    fn reachable(&self, from: impl Iterator<Item = Owner>) -> BTreeSet<Owner> {
        let mut seen: BTreeSet<Owner> = from.collect();
        let mut next: Vec<Owner> = seen.iter().copied().collect();
        let mut steps = 0;
        while let Some(owner) = next.pop() {
            for ((ino, _), lock) in self.waiting.get(&owner).into_iter().flatten() {
                let Some(file) = self.files.get(ino) else { continue };
                steps += file.held.len();
                if steps > STEPS_MAX {
                    return BTreeSet::new();
                }
                for (holder, _) in file.in_the_way(owner.client, lock) {
                    if seen.insert(holder) {
                        next.push(holder);
                    }
                }
            }
        }
        seen
    }
}

#[cfg(test)]
mod tests;

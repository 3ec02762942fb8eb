//! Leases: what clients may trust of names and attributes without asking, each for a while.
//!
//! Volatile, without I/O, and told the time. An item is the names of a directory, or the attributes of an inode. Who changes
//! it takes a [`Round`](crate::rounds::Round): the items are closing, and every other holder has acknowledged a
//! notice, or its term is over, before the change is applied. docs/design/0012-locks-and-leases.md.
//!
//! What always holds:
//! - Nothing is granted on an item that is closing.
//! - A lease ends by itself, [`TERM`] after it was granted, which is later than its holder believes. So memory is bounded by
//!   [`CLIENT_MAX`] and [`ALL_MAX`] without asking anybody: a full table grants no more, and runs empty.

use crate::key;
use levada_base::ids::Ino;
use levada_base::planted;
use levada_base::reactor::Instant;
use levada_wire::meta::{Ack, LEASE_TERM, Notice};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

/// From when a lease is granted; its holder counts from before that, and by another clock.
pub const TERM: Duration = LEASE_TERM.saturating_add(Duration::from_secs(1));
/// Leases of one client, and of all: some 20 MiB, and 80 MiB.
const CLIENT_MAX: usize = 1 << 18;
const ALL_MAX: usize = 1 << 20;
/// Leases that are looked at for each that is granted, whether they are over.
const SWEEP: usize = 4;
/// The numbers of these notices; those of locks are below.
pub const NUMBERS: u64 = 1 << 63;

/// What a lease is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Item {
    /// Which names a directory has, and what they mean.
    Names(Ino),
    /// The attributes of an inode.
    Node(Ino),
    /// What is in a file: no lease, but what a client that has it open takes for granted until it is told that others
    /// write.
    Data(Ino),
}

impl Item {
    /// What a change of this row disturbs.
    pub fn of_row(key: &[u8]) -> Option<Self> {
        let ino = || key::first_number(key).map(Ino);
        match *key.first()? {
            key::INODE => ino().map(Item::Node),
            key::NAME => ino().map(Item::Names),
            // What is told of the others changes the inode's row too.
            _ => None,
        }
    }
}

/// What is said to the holders of leases on what this row tells.
pub fn notice_of_row(row: &[u8]) -> Option<Notice> {
    Some(match Item::of_row(row)? {
        Item::Names(dir) => Notice::Names { dir, name: row.get(key::NAME_AT..)?.to_vec() },
        Item::Node(ino) => Notice::Node { ino },
        // Not by its row.
        Item::Data(_) => return None,
    })
}

#[derive(Clone, Copy, Debug)]
struct Held {
    client: u64,
    until: Instant,
    /// Its place among the ends.
    listed: Instant,
}

/// A notice that is not acknowledged.
struct Pending {
    notice: Notice,
    item: Item,
    /// Nobody waits for it any more.
    is_given_up: bool,
}

/// See the module.
#[derive(Default)]
pub struct Leases {
    held: HashMap<Item, SmallVec<[Held; 1]>>,
    counts: HashMap<u64, usize>,
    all: usize,
    /// When each ends, unless it was renewed since.
    ends: VecDeque<(Instant, Item, u64)>,
    /// With the number of changes that wait.
    closing: HashMap<Item, u32>,
    /// By client and number.
    pending: BTreeMap<(u64, u64), Pending>,
    last: u64,
    /// The clients that have a file open and know that it is shared.
    sharing: HashMap<Ino, SmallVec<[u64; 2]>>,
}

impl Leases {
    /// Gives `client` a lease, or renews it. False: it has none that goes on.
    pub fn grant(&mut self, item: Item, client: u64, now: Instant) -> bool {
        self.sweep(now);
        if self.closing.contains_key(&item) && !planted!("meta-lease-while-closing") {
            return false;
        }
        let until = now + TERM;
        if let Some(held) = self.held.get_mut(&item)
            && let Some(held) = held.iter_mut().find(|held| held.client == client)
        {
            held.until = until;
            return true;
        }
        let count = self.counts.entry(client).or_default();
        if *count >= CLIENT_MAX || self.all >= ALL_MAX {
            return false;
        }
        *count += 1;
        self.all += 1;
        self.held.entry(item).or_default().push(Held { client, until, listed: until });
        self.ends.push_back((until, item, client));
        true
    }

    /// Forgets some of those that are over.
    fn sweep(&mut self, now: Instant) {
        for _ in 0..SWEEP {
            let due = self.ends.front().copied().filter(|(end, ..)| *end <= now);
            let Some((end, item, client)) = due else { return };
            self.ends.pop_front();
            let held = self.held.get_mut(&item).into_iter().flatten();
            let mut held = held.filter(|held| (held.client, held.listed) == (client, end));
            // Else it was given back since, and perhaps granted anew.
            let Some(held) = held.next() else { continue };
            if held.until > now {
                held.listed = held.until;
                self.ends.push_back((held.until, item, client));
            } else {
                self.release(item, client);
            }
        }
    }

    fn release(&mut self, item: Item, client: u64) {
        let Some(held) = self.held.get_mut(&item) else { return };
        let before = held.len();
        held.retain(|held| held.client != client);
        if held.len() == before {
            return;
        }
        if held.is_empty() {
            self.held.remove(&item);
        }
        self.all -= 1;
        if let Some(count) = self.counts.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&client);
            }
        }
    }

    /// The other clients that hold an item, and until when.
    pub fn others(
        &self,
        item: Item,
        client: u64,
        now: Instant,
    ) -> impl Iterator<Item = (u64, Instant)> + '_ {
        let held = self.held.get(&item).into_iter().flatten();
        let others = held.filter(move |held| held.client != client && held.until > now);
        others.map(|held| (held.client, held.until))
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// A change waits for the holders of `item`.
    pub fn close(&mut self, item: Item) {
        *self.closing.entry(item).or_default() += 1;
    }

    /// It is over.
    pub fn reopen(&mut self, item: Item) {
        if let Some(count) = self.closing.get_mut(&item) {
            *count -= 1;
            if *count == 0 {
                self.closing.remove(&item);
            }
        }
    }

    /// A notice to `client`, under this number.
    pub fn notify(&mut self, client: u64, item: Item, notice: Notice) -> u64 {
        self.last += 1;
        let number = NUMBERS + self.last;
        self.pending.insert((client, number), Pending { notice, item, is_given_up: false });
        number
    }

    /// Every notice that a client has not acknowledged.
    pub fn notices(&self, client: u64) -> Vec<(u64, Notice)> {
        let pending = self.pending.range((client, 0)..=(client, u64::MAX));
        pending.map(|((_, number), pending)| (*number, pending.notice.clone())).collect()
    }

    pub fn is_pending(&self, client: u64, number: u64) -> bool {
        self.pending.contains_key(&(client, number))
    }

    /// What the notice was about has ended. One that was given up stays: a client that was out of reach, and takes something
    /// for granted still, hears of it when it comes back.
    pub fn withdraw(&mut self, client: u64, number: u64) {
        if self.pending.get(&(client, number)).is_some_and(|pending| !pending.is_given_up) {
            self.pending.remove(&(client, number));
        }
    }

    /// Gives the file of which the client knows now that others write it, if it was told of one.
    pub fn acknowledged(&mut self, client: u64, ack: Ack) -> Option<Ino> {
        let pending = self.pending.remove(&(client, ack.number))?;
        if let Item::Data(ino) = pending.item {
            self.share(ino, client);
            return Some(ino);
        }
        if !ack.keeps || !matches!(pending.item, Item::Names(_)) {
            self.release(pending.item, client);
        }
        None
    }

    fn share(&mut self, ino: Ino, client: u64) {
        let sharing = self.sharing.entry(ino).or_default();
        if !sharing.contains(&client) {
            sharing.push(client);
        }
    }

    /// A client has not said for too long that it heard of a file that others write. It counts as one that has, so that nobody
    /// waits for it again while it has the file open.
    pub fn give_up(&mut self, client: u64, number: u64) {
        if let Some(pending) = self.pending.get_mut(&(client, number))
            && let Item::Data(ino) = pending.item
        {
            pending.is_given_up = true;
            self.share(ino, client);
        }
    }

    /// Whether a client that has this file open knows that others write it.
    pub fn shares(&self, ino: Ino, client: u64) -> bool {
        self.sharing.get(&ino).is_some_and(|sharing| sharing.contains(&client))
    }

    pub fn is_any_shared(&self) -> bool {
        !self.sharing.is_empty()
    }

    /// The client has a file open no more: there is nothing that it would have to hear of it.
    pub fn closed(&mut self, ino: Ino, client: u64) {
        self.unshare(ino, client);
        let of_client = self.pending.range((client, 0)..=(client, u64::MAX));
        let of_file = of_client.filter(|(_, pending)| pending.item == Item::Data(ino));
        let needless: Vec<_> = of_file.map(|(at, _)| *at).collect();
        needless.iter().for_each(|at| drop(self.pending.remove(at)));
    }

    /// The client has a file open no more, or anew while nobody else writes it.
    pub fn unshare(&mut self, ino: Ino, client: u64) {
        let Some(sharing) = self.sharing.get_mut(&ino) else { return };
        sharing.retain(|known| *known != client);
        if sharing.is_empty() {
            self.sharing.remove(&ino);
        }
    }

    /// A client has gone and trusts nothing any more.
    pub fn leave(&mut self, client: u64) {
        let holds = |held: &SmallVec<[Held; 1]>| held.iter().any(|held| held.client == client);
        let items: Vec<Item> =
            self.held.iter().filter(|(_, held)| holds(held)).map(|(item, _)| *item).collect();
        items.into_iter().for_each(|item| self.release(item, client));
        self.pending.retain(|(of, _), _| *of != client);
        self.sharing.retain(|_, sharing| {
            sharing.retain(|known| *known != client);
            !sharing.is_empty()
        });
    }
}

#[cfg(test)]
mod tests;

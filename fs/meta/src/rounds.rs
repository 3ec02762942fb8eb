//! Rounds: before a change is applied, everybody else who trusts what it changes has been told.
//!
//! It goes by the rows that an operation is about to write, whoever asked for it: no operation lists what it disturbs, so
//! a new one cannot forget to.
//!
//! What always holds:
//! - When a change is applied, no other client holds a lease on what it changes: each has acknowledged a notice, or its term is
//!   over. From its notice to the change nothing is granted there.
//! - A change waits for [`TERM`] at most, for those who do not answer. To acknowledge takes no slot, no credit and no other
//!   change, so this waiting is no part of a cycle.
//!
//! Leases are not there after a restart, but who held one trusts it until it hears of the new life. So changes wait for the
//! clients that may hold any ([`Former`]).

use crate::key;
use crate::leases::{Item, TERM, notice_of_row};
use crate::service::MetaService;
use crate::table::{Client, Effect, Table};
use crate::tx::Writes;
use levada_base::ids::Ino;
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_wire::meta::Notice;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A client that has heard of the new life trusts nothing of the last one any more, but its kernel may for this long.
const KERNEL_TRUST: Duration = Duration::from_millis(1500);

/// A change that waits until others have been told.
pub struct Round<'a> {
    service: &'a MetaService,
    closed: BTreeSet<Item>,
    /// Rows about which a client was told.
    told: BTreeSet<(u64, Vec<u8>)>,
    /// Notices sent.
    sent: Vec<(u64, u64)>,
}

/// A lease in the way.
struct InTheWay {
    item: Item,
    row: Vec<u8>,
    client: u64,
    until: Instant,
}

impl<'a> Round<'a> {
    fn new(service: &'a MetaService) -> Self {
        Self { service, closed: BTreeSet::new(), told: BTreeSet::new(), sent: Vec::new() }
    }

    /// Tells the holders, and waits for them.
    async fn tell(&mut self, in_the_way: Vec<InTheWay>) {
        let mut end = reactor::now();
        let mut due: BTreeMap<u64, Vec<(u64, Notice)>> = BTreeMap::new();
        {
            let mut leases = self.service.leases.borrow_mut();
            for InTheWay { item, row, client, until } in in_the_way {
                if self.closed.insert(item) {
                    leases.close(item);
                }
                let notice = match item {
                    Item::Data(ino) => Some(Notice::Shared { ino }),
                    Item::Names(_) | Item::Node(_) => notice_of_row(&row),
                };
                let Some(notice) = notice else { continue };
                let number = leases.notify(client, item, notice.clone());
                due.entry(client).or_default().push((number, notice));
                self.sent.push((client, number));
                self.told.insert((client, row));
                end = end.max(until);
            }
        }
        for (client, notices) in due {
            self.service.push_to(client, &notices);
        }
        let all_heard = self.service.leases_changed.until(|| {
            let leases = self.service.leases.borrow();
            let is_heard = |(client, number): &(u64, u64)| !leases.is_pending(*client, *number);
            self.sent.iter().all(is_heard).then_some(())
        });
        if reactor::timeout(end.since(reactor::now()), all_heard).await.is_err() {
            let mut leases = self.service.leases.borrow_mut();
            self.sent.iter().for_each(|(client, number)| leases.give_up(*client, *number));
        }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut leases = self.service.leases.borrow_mut();
        self.closed.iter().for_each(|item| leases.reopen(*item));
        for (client, number) in &self.sent {
            leases.withdraw(*client, *number);
        }
    }
}

/// Clients that may hold leases of the last life of the target.
#[derive(Default)]
pub struct Former {
    /// With the moment when they came back.
    clients: BTreeMap<u64, Option<Instant>>,
    /// By then their terms are over.
    end: Instant,
}

impl Former {
    pub fn of(table: &Table) -> Self {
        let may_lease = table.clients.iter().filter(|(_, client)| client.may_lease.is_some());
        let clients = may_lease.map(|(client, _)| (*client, None)).collect();
        Self { clients, end: reactor::now() + TERM }
    }

    pub fn came_back(&mut self, client: u64) {
        if let Some(came) = self.clients.get_mut(&client) {
            came.get_or_insert_with(reactor::now);
        }
    }

    pub fn left(&mut self, client: u64) {
        self.clients.remove(&client);
    }

    /// Until when a change of `client` must wait for the others, if no more of them come back.
    fn in_the_way_of(&mut self, client: u64, now: Instant) -> Option<Instant> {
        if self.clients.is_empty() {
            return None;
        }
        let over = |came: &Option<Instant>| came.is_some_and(|came| came + KERNEL_TRUST <= now);
        if now >= self.end || self.clients.values().all(over) {
            self.clients.clear();
            return None;
        }
        let others = self.clients.iter().filter(|(other, came)| **other != client && !over(came));
        let ends = others.map(|(_, came)| came.map_or(self.end, |came| came + KERNEL_TRUST));
        ends.max().map(|end| end.min(self.end))
    }
}

impl MetaService {
    /// Waits until what `writes` changes is trusted by nobody else; false: nobody did, and nothing was waited for.
    pub(crate) async fn told_others<'a>(
        &'a self,
        client: u64,
        (writes, begins): (&Writes, Option<Ino>),
        round: &mut Option<Round<'a>>,
    ) -> bool {
        let disturbs = || writes.iter().any(|(row, _)| Item::of_row(row).is_some());
        // The housekeeper's own are about inodes that nobody has: no lease is granted on those.
        if client != 0 && !self.former.borrow().clients.is_empty() && disturbs() {
            let end = self.former.borrow_mut().in_the_way_of(client, reactor::now());
            if let Some(end) = end {
                let changed = self.leases_changed.changed();
                let _ = reactor::timeout(end.since(reactor::now()), changed).await;
                return true;
            }
        }
        let mut in_the_way = self.in_the_way(client, writes, round.as_ref());
        if let Some(ino) = begins {
            in_the_way.extend(self.unaware(client, ino));
        }
        if in_the_way.is_empty() || planted!("meta-notice-not-sent") {
            return false;
        }
        round.get_or_insert_with(|| Round::new(self)).tell(in_the_way).await;
        true
    }

    /// The other clients that have a file open and do not know yet that somebody else writes it. One that opens it anew
    /// while it is being told is told again.
    fn unaware(&self, client: u64, ino: Ino) -> Vec<InTheWay> {
        let table = self.table.borrow();
        if table.opens(ino) == u64::from(table.opens_of(client, ino)) {
            return Vec::new();
        }
        let leases = self.leases.borrow();
        let now = reactor::now();
        let row = key::session(ino, client).to_vec();
        let others = table.clients.iter().filter(|(other, known)| {
            **other != client
                && known.may_lease.is_some()
                && known.opens.contains_key(&ino)
                && !leases.shares(ino, **other)
        });
        let in_the_way = |(other, known): (&u64, &Client)| {
            // One that is out of reach asks before it takes that for granted again, when it has heard nothing for a term.
            let since = if self.is_connected(*other) { now } else { known.seen };
            let (item, until) = (Item::Data(ino), (since + TERM).max(now));
            InTheWay { item, row: row.clone(), client: *other, until }
        };
        others.map(in_the_way).collect()
    }

    /// What has become of who has which file open.
    pub(crate) fn opens_changed(&self, client: u64, effects: &[Effect]) {
        let mut leases = self.leases.borrow_mut();
        if !leases.is_any_shared() {
            return;
        }
        let table = self.table.borrow();
        for effect in effects {
            match effect {
                Effect::Opened(ino) if table.sessions(*ino).all(|(other, _)| other == client) => {
                    leases.unshare(*ino, client);
                }
                Effect::Closed(ino) if table.opens_of(client, *ino) == 0 => {
                    leases.closed(*ino, client);
                }
                _ => {}
            }
        }
    }

    fn in_the_way(&self, client: u64, writes: &Writes, round: Option<&Round<'_>>) -> Vec<InTheWay> {
        let leases = self.leases.borrow();
        let mut found = Vec::new();
        if leases.is_empty() {
            return found;
        }
        let now = reactor::now();
        for (row, _) in writes {
            let Some(item) = Item::of_row(row) else { continue };
            for (client, until) in leases.others(item, client, now) {
                let key = (client, row.to_vec());
                if !round.is_some_and(|round| round.told.contains(&key)) {
                    found.push(InTheWay { item, row: key.1, client, until });
                }
            }
        }
        found
    }

    /// Gives `client` leases on what it is about to be told; says whether it has all of them.
    pub(crate) fn lease(&self, client: u64, mut items: impl Iterator<Item = Item>) -> bool {
        let now = reactor::now();
        let durable = self.store.durable_seq();
        let table = self.table.borrow();
        let may_lease = table.clients.get(&client).and_then(|client| client.may_lease);
        may_lease.is_some_and(|noted| noted <= durable) && {
            let mut leases = self.leases.borrow_mut();
            items.all(|item| leases.grant(item, client, now))
        }
    }
}

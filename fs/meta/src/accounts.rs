//! Accounts: how many inodes and bytes count for each user, group, project and tenant, and how many may.
//!
//! What always holds:
//! - The usage of a subject is the sum over the inodes with stored bytes that are its own (`Charge`), in every
//!   prefix of batches: it changes where an inode's row does, in the same batch.
//! - All rows of accounts are in memory, as they will be when the last batch is durable.
//!
//! docs/design/0013-fsck-space-quotas.md.

use crate::key;
use crate::row::{Damaged, Limit, QuotaRow, Subject, SubjectKind, Usage};
use crate::service::{MetaService, Room};
use levada_base::ids::Ino;
use levada_kv::Batch;
use levada_wire::attr::Time;
use levada_wire::meta::{Allowance, MetaFault, MetaReply};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Whose limits are those of all of its kind that have none of their own.
pub const DEFAULT_ID: u32 = u32::MAX;
/// How long there may be more than the soft limit, where nothing else is said.
const GRACE_S: u32 = 7 * 24 * 3600;

/// What a subject may use, as people set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub bytes: Limit,
    pub inodes: Limit,
    /// Seconds; 0: as of the default, or a week.
    pub bytes_grace_s: u32,
    pub inodes_grace_s: u32,
}

/// A subject, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    pub subject: Subject,
    pub usage: Usage,
    /// Those that hold: its own, or the default ones.
    pub limits: Limits,
    /// Until when it may have more than the soft limit; none when it does not.
    pub bytes_grace_ends: Option<Time>,
    pub inodes_grace_ends: Option<Time>,
}

/// A row of an account.
#[derive(Clone, Copy, Debug)]
pub enum Row {
    Used(Usage),
    Quota(QuotaRow),
}

impl Row {
    /// A row that says nothing goes.
    pub fn put(self, subject: Subject, batch: &mut Batch) {
        match self {
            Self::Used(usage) if usage == Usage::default() => batch.delete(&key::usage(subject)),
            Self::Used(usage) => batch.put(&key::usage(subject), &usage.encode()),
            Self::Quota(NO_QUOTA) => batch.delete(&key::quota(subject)),
            Self::Quota(row) => batch.put(&key::quota(subject), &row.encode()),
        }
    }
}

/// See the module.
#[derive(Default)]
pub struct Accounts {
    pub usage: BTreeMap<Subject, Usage>,
    quotas: BTreeMap<Subject, QuotaRow>,
    pub grants: Grants,
}

/// A file, and the client that writes it.
type SessionOf = (Ino, u64);
/// Those who pay for a file.
type Payers = SmallVec<[Subject; 4]>;

/// Bytes that sessions may add and have not told of yet: what their rows say, summed by who pays.
#[derive(Default)]
pub struct Grants {
    granted: BTreeMap<SessionOf, (Payers, u64)>,
    reserved: BTreeMap<Subject, u64>,
}

impl Grants {
    /// In the place of what the session of a client had.
    pub fn set(&mut self, session: SessionOf, subjects: Payers, bytes: u64) {
        if let Some((subjects, bytes)) = self.granted.remove(&session) {
            for subject in subjects {
                let reserved = self.reserved.get_mut(&subject).expect("the sum");
                *reserved -= bytes;
                if *reserved == 0 {
                    self.reserved.remove(&subject);
                }
            }
        }
        if bytes > 0 {
            subjects
                .iter()
                .for_each(|subject| *self.reserved.entry(*subject).or_default() += bytes);
            self.granted.insert(session, (subjects, bytes));
        }
    }

    /// So much of it is left; the payers are those of before.
    pub fn keep(&mut self, session: SessionOf, bytes: u64) {
        if let Some((subjects, granted)) = self.granted.get(&session).cloned()
            && granted != bytes
        {
            self.set(session, subjects, bytes);
        }
    }

    pub fn reserved_by_others(&self, subject: Subject, session: SessionOf) -> u64 {
        let own = self.granted.get(&session).filter(|(subjects, _)| subjects.contains(&subject));
        let own = own.map_or(0, |(_, bytes)| *bytes);
        self.reserved.get(&subject).map_or(0, |reserved| reserved - own)
    }
}

const NO_QUOTA: QuotaRow = QuotaRow {
    bytes: Limit { soft: 0, hard: 0 },
    inodes: Limit { soft: 0, hard: 0 },
    bytes_over_since: Time(0),
    inodes_over_since: Time(0),
    bytes_grace_s: 0,
    inodes_grace_s: 0,
};

impl Accounts {
    /// Takes in a row as it is read.
    pub fn load(&mut self, key: &[u8], row: &[u8]) -> Result<(), Damaged> {
        match key::subject_of(key).ok_or(Damaged { what: "usage" })? {
            (subject, key::USED) => {
                self.usage.insert(subject, Usage::decode(row)?);
            }
            (subject, _) => {
                self.quotas.insert(subject, QuotaRow::decode(row)?);
            }
        }
        Ok(())
    }

    pub fn usage_of(&self, subject: Subject) -> Usage {
        self.usage.get(&subject).copied().unwrap_or_default()
    }

    /// What rows follow from so much being used now.
    pub fn changes(&self, used: &[(Subject, Usage)], now: Time) -> Vec<(Subject, Row)> {
        let mut changes = Vec::with_capacity(used.len());
        for (subject, usage) in used {
            changes.push((*subject, Row::Used(*usage)));
            changes
                .extend(self.excess(*subject, *usage, now).map(|row| (*subject, Row::Quota(row))));
        }
        changes
    }

    /// The row with these limits; all zeroes: it has none of its own.
    pub fn with_limits(&self, subject: Subject, limits: Limits) -> (Subject, Row) {
        let Limits { bytes, inodes, bytes_grace_s, inodes_grace_s } = limits;
        let known = self.quota_of(subject);
        let row = QuotaRow { bytes, inodes, bytes_grace_s, inodes_grace_s, ..known };
        (subject, Row::Quota(row))
    }

    /// The batch with these rows is on its way.
    pub fn take(&mut self, changes: &[(Subject, Row)]) {
        for (subject, row) in changes.iter().copied() {
            match row {
                Row::Used(usage) if usage == Usage::default() => {
                    self.usage.remove(&subject);
                }
                Row::Used(usage) => {
                    self.usage.insert(subject, usage);
                }
                Row::Quota(NO_QUOTA) => {
                    self.quotas.remove(&subject);
                }
                Row::Quota(row) => {
                    self.quotas.insert(subject, row);
                }
            }
        }
    }

    /// What those use whose limits are this one's.
    pub fn under(&self, subject: Subject) -> Vec<(Subject, Usage)> {
        let is_under = |other: &Subject| match subject.id {
            DEFAULT_ID => other.kind == subject.kind,
            _ => *other == subject,
        };
        self.usage.iter().filter(|(other, _)| is_under(other)).map(|(s, u)| (*s, *u)).collect()
    }

    fn quota_of(&self, subject: Subject) -> QuotaRow {
        self.quotas.get(&subject).copied().unwrap_or(NO_QUOTA)
    }

    /// Since when there is more than the soft limits, where that changes.
    fn excess(&self, subject: Subject, usage: Usage, now: Time) -> Option<QuotaRow> {
        let (limits, known) = (self.limits(subject), self.quota_of(subject));
        let since = |used, limit: Limit, since: Time| match used > limit.soft && limit.soft > 0 {
            true if since == Time(0) => now,
            true => since,
            false => Time(0),
        };
        let row = QuotaRow {
            bytes_over_since: since(usage.bytes, limits.bytes, known.bytes_over_since),
            inodes_over_since: since(usage.inodes, limits.inodes, known.inodes_over_since),
            ..known
        };
        (row != known).then_some(row)
    }

    /// Those that hold for a subject. The superuser has none, nor do default ones hold for his group.
    pub fn limits(&self, subject: Subject) -> Limits {
        let Subject { kind, id } = subject;
        let of = |id| self.quota_of(Subject { kind, id });
        let (own, default) = (of(id), of(DEFAULT_ID));
        let has_own = own.bytes != Limit::default() || own.inodes != Limit::default();
        let row = match (kind, id) {
            (SubjectKind::User, 0) => NO_QUOTA,
            _ if has_own || id == 0 => own,
            _ => default,
        };
        let grace =
            |own, default| [own, default, GRACE_S].into_iter().find(|s| *s > 0).unwrap_or(0);
        Limits {
            bytes: row.bytes,
            inodes: row.inodes,
            bytes_grace_s: grace(own.bytes_grace_s, default.bytes_grace_s),
            inodes_grace_s: grace(own.inodes_grace_s, default.inodes_grace_s),
        }
    }

    /// True when a subject that uses so much may use an inode more.
    pub fn has_inode_for(&self, subject: Subject, used: Usage, now: Time) -> bool {
        let limits = self.limits(subject);
        let since = self.quota_of(subject).inodes_over_since;
        let Limit { soft, hard } = limits.inodes;
        let in_grace =
            soft == 0 || used.inodes < soft || !is_over(since, limits.inodes_grace_s, now);
        (hard == 0 || used.inodes < hard) && in_grace
    }

    /// Bytes that a subject may still add; none: any number.
    pub fn bytes_left(&self, subject: Subject, now: Time) -> Option<u64> {
        let limits = self.limits(subject);
        let (Limit { soft, hard }, used) = (limits.bytes, self.usage_of(subject).bytes);
        let since = self.quota_of(subject).bytes_over_since;
        let left = |limit: u64| (limit > 0).then(|| limit.saturating_sub(used));
        match is_over(since, limits.bytes_grace_s, now) {
            true if soft > 0 => left(soft),
            _ => left(hard),
        }
    }

    /// How many bytes a subject may have, and add; none: any number.
    pub fn allowed_bytes(&self, subject: Subject, now: Time) -> Option<Allowance> {
        let used = self.usage_of(subject).bytes;
        allowance(self.limits(subject).bytes, used, self.bytes_left(subject, now))
    }

    /// The same of inodes.
    pub fn allowed_inodes(&self, subject: Subject, now: Time) -> Option<Allowance> {
        let used = self.usage_of(subject);
        let left = if self.has_inode_for(subject, used, now) { None } else { Some(0) };
        allowance(self.limits(subject).inodes, used.inodes, left)
    }

    /// True when bytes are limited for anybody.
    pub fn limits_bytes(&self) -> bool {
        self.quotas.values().any(|row| row.bytes != Limit::default())
    }

    /// All that something is known of, in order; the default limits with nothing used.
    pub fn all(&self) -> Vec<Account> {
        let mut subjects: Vec<Subject> =
            self.usage.keys().chain(self.quotas.keys()).copied().collect();
        subjects.sort_unstable();
        subjects.dedup();
        subjects.into_iter().map(|subject| self.account(subject)).collect()
    }

    pub fn account(&self, subject: Subject) -> Account {
        let limits = self.limits(subject);
        let known = self.quota_of(subject);
        let ends = |since: Time, grace_s| (since != Time(0)).then(|| end_of(since, grace_s));
        Account {
            subject,
            usage: self.usage_of(subject),
            limits,
            bytes_grace_ends: ends(known.bytes_over_since, limits.bytes_grace_s),
            inodes_grace_ends: ends(known.inodes_over_since, limits.inodes_grace_s),
        }
    }
}

/// What there is under a limit: up to the hard one, as long as the soft one lets him.
fn allowance(limit: Limit, used: u64, left: Option<u64>) -> Option<Allowance> {
    let most = [limit.hard, limit.soft].into_iter().find(|most| *most > 0)?;
    let left = most.saturating_sub(used).min(left.unwrap_or(u64::MAX));
    Some(Allowance { most, left })
}

fn end_of(since: Time, grace_s: u32) -> Time {
    Time(since.0.saturating_add(i64::from(grace_s) * 1_000_000_000))
}

/// True when it has been too much for longer than the grace.
fn is_over(since: Time, grace_s: u32, now: Time) -> bool {
    since != Time(0) && now > end_of(since, grace_s)
}

impl MetaService {
    /// What is used and what may be, of all of whom something is known.
    #[must_use]
    pub fn accounts(&self) -> Vec<Account> {
        self.table.borrow().accounts.all()
    }

    /// The same of one subject.
    #[must_use]
    pub fn account(&self, subject: Subject) -> Account {
        self.table.borrow().accounts.account(subject)
    }

    /// The limits that a subject was given itself.
    #[must_use]
    pub fn own_limits(&self, subject: Subject) -> Limits {
        let QuotaRow { bytes, inodes, bytes_grace_s, inodes_grace_s, .. } =
            self.table.borrow().accounts.quota_of(subject);
        Limits { bytes, inodes, bytes_grace_s, inodes_grace_s }
    }

    /// Sets what a subject may use; durable when it returns. All zeroes: as the default says.
    ///
    /// # Errors
    ///
    /// When the store does not take it, or the target still waits for a client.
    pub async fn set_limits(&self, subject: Subject, limits: Limits) -> Result<(), MetaFault> {
        self.wait_for_room(Room { frees: true }).await?;
        if self.is_recovering() {
            return Err(MetaFault::Unavailable);
        }
        let limited = vec![self.table.borrow().accounts.with_limits(subject, limits)];
        self.put_accounts(&limited)?;
        let excess = {
            let accounts = &self.table.borrow().accounts;
            accounts.changes(&accounts.under(subject), self.time())
        };
        for part in excess.chunks(64) {
            self.wait_for_room(Room { frees: true }).await?;
            let quotas = part.iter().filter(|(_, row)| matches!(row, Row::Quota(_))).copied();
            self.put_accounts(&quotas.collect::<Vec<_>>())?;
        }
        self.durable(self.store.last_seq()).await
    }

    /// Gives an inode to a project, a tenant or both; what is made below a directory belongs to them. Durable when it
    /// returns.
    ///
    /// # Errors
    ///
    /// `Stale` when it is gone, and when the store does not take it.
    pub async fn set_owner(
        &self,
        ino: Ino,
        project: Option<u32>,
        tenant: Option<u32>,
    ) -> Result<(), MetaFault> {
        if self.is_recovering() {
            return Err(MetaFault::Unavailable);
        }
        let room = Some(Room { frees: true });
        let reply = self.transact(Self::housekeeper(), None, room, |tx| {
            let mut inode = tx.live(ino)?;
            let project = project.unwrap_or(inode.project);
            let tenant = tenant.unwrap_or(inode.tenant);
            if (inode.project, inode.tenant) != (project, tenant) {
                (inode.project, inode.tenant) = (project, tenant);
                inode.ctime = tx.now;
                inode.change += 1;
                tx.put_inode(ino, &inode);
            }
            Ok(MetaReply::Done)
        });
        match reply.await? {
            MetaReply::Failed(fault) => Err(fault),
            _ => Ok(()),
        }
    }

    fn put_accounts(&self, changes: &[(Subject, Row)]) -> Result<(), MetaFault> {
        if changes.is_empty() {
            return Ok(());
        }
        let mut batch = Batch::default();
        changes.iter().for_each(|(subject, row)| row.put(*subject, &mut batch));
        self.apply_own(batch)?;
        self.table.borrow_mut().accounts.take(changes);
        Ok(())
    }
}

//! The rows that belong to no inode: what file system this is, counters, clients and their replies,
//! and what should not be there at all.

use super::finding::Finding;
use super::tally::Counted;
use crate::key;
use crate::row::{
    ClientRow, Counters, Damaged, QuotaRow, ReplyRow, Subject, Superblock, TailRow, Usage,
};
use crate::service::SLOTS_MAX;
use levada_wire::meta::MetaReply;
use std::collections::{BTreeMap, BTreeSet};

/// What was met of such rows.
#[derive(Default)]
pub struct Beside {
    has_superblock: bool,
    /// Whom rows say to use what; those that cannot be decoded say nothing.
    usage: BTreeMap<Subject, Option<Usage>>,
    clients: BTreeSet<u64>,
}

impl Beside {
    /// Takes in a row; clients come before replies, as they do in the order of keys.
    pub fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), Finding> {
        let unknown = || Finding::UnknownRow(key.to_vec());
        let damaged = |damaged: Damaged| Finding::Damaged { key: key.to_vec(), damaged };
        match key {
            key::SUPERBLOCK => {
                self.has_superblock = true;
                return Superblock::decode(value).map(drop).map_err(damaged);
            }
            key::COUNTERS => {
                return Counters::decode(value).map(drop).map_err(damaged);
            }
            key::TAIL => return TailRow::decode(value).map(drop).map_err(damaged),
            _ => {}
        }
        if let Some((subject, part)) = key::subject_of(key) {
            if part != key::USED {
                return QuotaRow::decode(value).map(drop).map_err(damaged);
            }
            let usage = Usage::decode(value);
            self.usage.insert(subject, usage.as_ref().ok().copied());
            return usage.map(drop).map_err(damaged);
        }
        let client = key::first_number(key).ok_or_else(unknown)?;
        match key[0] {
            key::CLIENT if key.len() == 9 => {
                // It is known, whatever its row says.
                self.clients.insert(client);
                ClientRow::decode(value).map(drop).map_err(damaged)
            }
            key::REPLY if key.len() == 13 => {
                let slot = key::second_u32(key).ok_or_else(unknown)?;
                let row = ReplyRow::decode(value).map_err(damaged)?;
                let is_sound =
                    slot < SLOTS_MAX && postcard::from_bytes::<MetaReply>(&row.reply).is_ok();
                if is_sound && self.clients.contains(&client) {
                    return Ok(());
                }
                Err(Finding::Reply { client, slot, is_sound })
            }
            _ => Err(unknown()),
        }
    }

    /// Whoever is said to use something else than was counted. `now` is what rows say by now, where they have changed.
    pub fn misjudged(
        &self,
        now: Option<&BTreeMap<Subject, Usage>>,
        counted: &BTreeMap<Subject, Usage>,
    ) -> Vec<Finding> {
        let subjects = counted
            .keys()
            .chain(self.usage.keys())
            .chain(now.into_iter().flatten().map(|(s, _)| s));
        let subjects: BTreeSet<Subject> = subjects.copied().collect();
        let mut findings = Vec::new();
        for subject in subjects {
            let said = match now {
                Some(now) => Some(now.get(&subject).copied().unwrap_or_default()),
                None => self.usage.get(&subject).copied().unwrap_or(Some(Usage::default())),
            };
            let Some(says) = said else { continue };
            let has = counted.get(&subject).copied().unwrap_or_default();
            for (what, says, has) in
                [("inodes", says.inodes, has.inodes), ("bytes", says.bytes, has.bytes)]
            {
                if says != has {
                    findings.push(Finding::Usage { subject, what, says, has });
                }
            }
        }
        findings
    }

    /// What is missing, and the counters as they are now against what was counted.
    pub fn findings(
        &self,
        counters: Option<&[u8]>,
        counted: Counted,
        last_ino: u64,
    ) -> Vec<Finding> {
        let mut findings = Vec::new();
        if !self.has_superblock {
            findings.push(Finding::Missing("superblock"));
        }
        if counters.is_none() {
            findings.push(Finding::Missing("counters"));
        }
        // One that cannot be decoded has been told.
        let has_doomed = counters.is_some_and(Counters::has_doomed);
        let Some(counters) = counters.and_then(|row| Counters::decode(row).ok()) else {
            return findings;
        };
        let last_client = self.clients.last().copied().unwrap_or(0);
        let mut at_least = |what, says, has| {
            if says < has {
                findings.push(Finding::Counter { what, says, has });
            }
        };
        at_least("inode numbers", counters.next_ino, last_ino.saturating_add(1));
        at_least("client numbers", counters.next_client, last_client.saturating_add(1));
        let Counted { inodes, doomed_inodes, doomed_bytes } = counted;
        for (what, says, has, is_counted) in [
            ("inodes", counters.inodes, inodes, true),
            ("deleted inodes", counters.doomed_inodes, doomed_inodes, has_doomed),
            ("bytes of deleted files", counters.doomed_bytes, doomed_bytes, has_doomed),
        ] {
            if is_counted && says != has {
                findings.push(Finding::Counter { what, says, has });
            }
        }
        findings
    }
}

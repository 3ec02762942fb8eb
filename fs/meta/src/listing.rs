//! ReadDir: entries in the order of their cookies.
//!
//! A cookie is given once and never again, so a listing that goes on after a cookie meets every
//! entry that was there all the time exactly once, whatever comes and goes meanwhile.

use crate::config::CallHeader;
use crate::key;
use crate::leases::Item;
use crate::row::EntryRow;
use crate::service::{Grants, MetaService, Room, fault_of};
use levada_base::ids::Ino;
use levada_wire::attr::{Attr, Kind};
use levada_wire::frame::flags;
use levada_wire::meta::{DirEntry, MetaFault, MetaReply};
use std::cell::RefCell;
use std::ops::Bound;

/// The most entries of one answer; they fit a message with their attributes.
const ENTRIES_MAX: u32 = 1024;

impl MetaService {
    pub(crate) async fn read_dir(
        &self,
        call: CallHeader,
        ino: Ino,
        (cookie, entries_max): (u64, u32),
        with_attrs: bool,
        grants: &Grants,
    ) -> Result<MetaReply, MetaFault> {
        let limit = entries_max.clamp(1, ENTRIES_MAX) as usize;
        // Before it is listed: who changes a name meanwhile finds the lease.
        let names = grants.wanted && self.lease(call.client, [Item::Names(ino)].into_iter());
        let (from, to) = (key::entry(ino, cookie), key::entry(ino, u64::MAX));
        let rows = self
            .store
            .scan(Bound::Excluded(&from), Bound::Included(&to), limit)
            .await
            .map_err(fault_of)?;
        let end = rows.len() < limit;
        let mut entries = Vec::with_capacity(rows.len());
        for (key, value) in rows {
            let row = EntryRow::decode(&value).map_err(|damaged| {
                tracing::error!(%damaged, ino = ino.0, "a directory cannot be listed");
                MetaFault::Damaged
            })?;
            let cookie = key::second_number(&key).ok_or(MetaFault::Damaged)?;
            let EntryRow { ino, kind, name } = row;
            entries.push(DirEntry { cookie, name, ino, kind, attr: None });
        }
        // Looked at after the listing: every change of an entry writes the directory's row, so
        // waiting for that row is waiting for whatever the listing saw.
        let attrs: RefCell<Vec<Option<Box<Attr>>>> = RefCell::default();
        self.transact_leasing(call, None, None::<Room>, grants, |tx| {
            let inode = tx.live(ino)?;
            if inode.kind() != Kind::Directory {
                return Err(MetaFault::NotDirectory.into());
            }
            if with_attrs {
                let keys: Vec<_> = entries.iter().map(|entry| key::inode(entry.ino)).collect();
                tx.load(&keys)?;
                let mut found = Vec::with_capacity(entries.len());
                for entry in &entries {
                    let inode = tx.inode(entry.ino)?;
                    let attr = inode.as_ref().map(|inode| tx.attr(entry.ino, inode));
                    // Of the others is certain only what they are.
                    if let (Some(inode), Some(attr)) = (&inode, &attr)
                        && !attr.writers
                        && !attr.cut
                    {
                        tx.tell_node(entry.ino, inode);
                    }
                    found.push(attr);
                }
                attrs.replace(found);
            }
            Ok(MetaReply::Done)
        })
        .await
        .and_then(|reply| match reply {
            MetaReply::Failed(fault) => Err(fault),
            _ => Ok(()),
        })?;
        if names {
            grants.give(flags::NAMES);
        }
        for (entry, attr) in entries.iter_mut().zip(attrs.take()) {
            entry.attr = attr;
        }
        Ok(MetaReply::Entries { entries, end })
    }
}

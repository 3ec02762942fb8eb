//! Where a check reads rows: of a store that nothing changes, or of a service that goes on.

use super::finding::{Finding, Known};
use crate::key::{self, Key};
use crate::row::{ClientRow, OrphanRow, ReplyRow, Session, Usage};
use crate::service::MetaService;
use levada_base::ids::Ino;
use levada_kv::{Bytes, KvError, Store};
use std::rc::Rc;

/// See the module.
#[derive(Clone)]
pub enum Source {
    Still(Store),
    Serving(Rc<MetaService>),
}

impl Source {
    pub fn store(&self) -> &Store {
        match self {
            Self::Still(store) => store,
            Self::Serving(service) => service.store(),
        }
    }

    /// Rows as they are together at one moment.
    pub async fn together(&self, keys: &[Key]) -> Result<Vec<Option<Bytes>>, KvError> {
        let service = match self {
            Self::Still(store) => {
                let mut rows = Vec::with_capacity(keys.len());
                for key in keys {
                    rows.push(store.get(key).await?);
                }
                return Ok(rows);
            }
            Self::Serving(service) => service,
        };
        let look = service.look(|tx| {
            tx.load(keys)?;
            keys.iter().map(|key| tx.row(key)).collect()
        });
        look.await
    }

    /// What the service has in memory of a row, where that is another than the row. Asked in the step in which the
    /// row was read.
    pub fn known(&self, key: &[u8], value: &[u8]) -> Option<Finding> {
        let Self::Serving(service) = self else { return None };
        let table = service.table.borrow();
        let first = key::first_number(key).unwrap_or_default();
        // Rows that cannot be decoded are told as such.
        let (what, is_same) = match key[0] {
            key::CLIENT => {
                let row = ClientRow::decode(value).ok()?;
                let client = table.clients.get(&first);
                let is_same = |client: &crate::table::Client| {
                    (client.uuid, client.settled) == (row.uuid, row.settled)
                };
                (Known::Client, client.is_some_and(is_same))
            }
            key::REPLY => {
                let row = ReplyRow::decode(value).ok()?;
                let slot = key::second_u32(key)? as usize;
                let slot = table.clients.get(&first).and_then(|client| client.slots.get(slot));
                // A later answer that changed nothing has no row.
                let is_same = slot.is_some_and(|slot| {
                    slot.sequence > row.sequence
                        || slot.sequence == row.sequence
                            && slot.reply.as_deref().is_none_or(|reply| *reply == *row.reply)
                });
                (Known::Reply, is_same)
            }
            key::SESSION => {
                let row = Session::decode(value).ok()?;
                let session = table.sessions.get(&(Ino(first), key::second_number(key)?));
                (Known::Session, session == Some(&row))
            }
            key::ORPHAN => {
                let row = OrphanRow::decode(value).ok()?;
                (Known::Orphan, table.orphans.get(&Ino(first)) == Some(&row))
            }
            key::USAGE => match key::subject_of(key)? {
                (subject, key::USED) => {
                    let usage = Usage::decode(value).ok()?;
                    (Known::Usage, table.accounts.usage_of(subject) == usage)
                }
                _ => return None,
            },
            _ => return None,
        };
        (!is_same).then(|| Finding::Known { what, key: key.to_vec() })
    }
}

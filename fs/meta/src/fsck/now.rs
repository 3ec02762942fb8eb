//! What a service that goes on says of an inode's objects, at one moment; for whoever holds it against the objects.

use super::files::{FileRow, FileUse};
use crate::key;
use crate::row::Inode;
use crate::service::MetaService;
use crate::tx::{Stop, Tx};
use levada_base::ids::Ino;
use levada_kv::KvError;
use levada_wire::meta::MetaReply;
use std::cell::RefCell;
use std::time::Duration;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileNow {
    /// `None`: there is no such inode.
    pub row: Option<FileRow>,
    /// Counts up with every change of the row, and when a write session begins; 0 where it cannot be read.
    pub change: u64,
    pub held: FileUse,
}

impl MetaService {
    /// What an inode says of objects, and whether they may be other than it says: all of one moment between the call
    /// and its return.
    ///
    /// # Errors
    ///
    /// When the store has stopped.
    pub async fn file_now(&self, ino: Ino) -> Result<FileNow, KvError> {
        let (inode, destroy) = (key::inode(ino), key::destroy(ino));
        self.look(|tx| {
            tx.load(&[inode.clone(), destroy.clone()])?;
            let row = tx.row(&inode)?;
            let is_doomed = tx.row(&destroy)?.is_some();
            let is_written = !tx.sessions(ino).is_empty();
            let change = row.as_ref().and_then(|row| Inode::decode(row).ok());
            Ok(FileNow {
                row: row.map(|row| FileRow::of(&row)),
                change: change.map_or(0, |inode| inode.change),
                held: FileUse { is_written, is_doomed },
            })
        })
        .await
    }

    /// No inode was given this number or a higher one.
    #[must_use]
    pub fn next_ino(&self) -> u64 {
        self.table.borrow().counters.next_ino
    }

    /// A client that is silent for so long loses its opens and sessions.
    #[must_use]
    pub fn client_lease(&self) -> Duration {
        self.config.lease
    }

    /// Looks at rows, together.
    pub(super) async fn look<T>(
        &self,
        look: impl Fn(&mut Tx<'_>) -> Result<T, Stop>,
    ) -> Result<T, KvError> {
        let seen = RefCell::new(None);
        let read = self.transact(Self::housekeeper(), None, None, |tx| {
            seen.replace(Some(look(tx)?));
            Ok(MetaReply::Done)
        });
        // A read is refused only when the store has stopped.
        let stopped = || self.store.failure().unwrap_or(KvError::Stopped);
        read.await.map_err(|_| stopped())?;
        seen.take().ok_or_else(stopped)
    }
}

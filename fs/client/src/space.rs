//! How much there is, and how much of it is left: of the file system, and of a directory whose project or tenant has limits.

use crate::client::Client;
use crate::error::Error;
use crate::room::MetaSpace;
use futures_util::future::join_all;
use levada_base::ids::Ino;
use levada_wire::meta::{Allowance, MetaFault, MetaReply, MetaRequest};
use std::time::Duration;

/// Who asks for space waits so long for what was closed before.
const CLOSES_WAIT: Duration = Duration::from_secs(2);
/// Attempts to ask while nothing is deleted.
const SPACE_LOOKS: usize = 4;

/// Space of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

impl Space {
    /// What of it is within limits.
    fn within(self, bytes: Option<Allowance>, inodes: Option<Allowance>) -> Self {
        let all = |most, left, allowed: Option<Allowance>| {
            let all = Allowance { most, left };
            allowed.map_or(all, |allowed| all.tighter(allowed))
        };
        let bytes = all(self.total_bytes, self.free_bytes, bytes);
        let inodes = all(self.inodes, self.inodes_free, inodes);
        Self {
            total_bytes: bytes.most,
            free_bytes: bytes.left,
            inodes: inodes.most,
            inodes_free: inodes.left,
        }
    }
}

impl Client {
    /// Space of the metadata target, and of all object targets that answer: one that is silent is left out, so
    /// that it does not hold up those who ask for the rest.
    ///
    /// # Errors
    ///
    /// What the services say; [`Error::Deadline`] when all object targets are silent.
    pub async fn space(&self) -> Result<Space, Error> {
        let asked = async {
            let is_silent = |answer: &Result<_, Error>| *answer == Err(Error::Deadline);
            // What was closed and then deleted here counts once the service knows how large it was.
            self.0.closes.passed(CLOSES_WAIT, None).await;
            // Metadata first: while the whole node is away no target is silent, and everybody waits.
            let mut meta = self.0.space_now().await?;
            let mut looks = 0;
            loop {
                looks += 1;
                let objects = self.0.targets().map(|target| target.unless_silent(target.space()));
                let mut answers = join_all(objects).await;
                if answers.iter().all(is_silent) {
                    // Perhaps the node went between the two, and they have been waited for while it was away.
                    meta = self.0.space_now().await?;
                    let objects = self.0.targets().map(|target| target.in_time(target.space()));
                    answers = join_all(objects).await;
                }
                if !answers.iter().all(is_silent) {
                    answers.retain(|answer| !is_silent(answer));
                }
                let (mut total_bytes, mut free_bytes) = (0, 0);
                for answer in answers {
                    let space = answer?;
                    total_bytes += space.total_bytes;
                    free_bytes += space.free_bytes;
                }
                let then = meta;
                if then.doomed_bytes + then.deleting_bytes > 0 {
                    meta = self.0.space_now().await?;
                }
                // What was deleted between the looks may be in both sums; in the later one it is not any more.
                if meta.deletions != then.deletions && looks < SPACE_LOOKS {
                    continue;
                }
                let doomed_bytes = meta.doomed_bytes.min(then.doomed_bytes);
                let free_bytes = (free_bytes + doomed_bytes).min(total_bytes);
                let MetaSpace { inodes, inodes_free, .. } = meta;
                return Ok(Space { total_bytes, free_bytes, inodes, inodes_free });
            }
        };
        self.0.in_time(asked).await
    }

    /// The same of what is in the directory, or behind the file, `ino`: no more than its project and its tenant may have, and have left.
    /// What other owners may have says nothing here: one directory has files of many.
    ///
    /// # Errors
    ///
    /// As [`Client::space`].
    pub async fn space_of(&self, ino: Ino) -> Result<Space, Error> {
        // Afterwards: what was closed here counts by then.
        let space = self.space().await?;
        match self.read(MetaRequest::Allowance { ino }).await {
            Ok(MetaReply::Allowance { bytes, inodes }) => Ok(space.within(bytes, inodes)),
            Ok(_) => Err(Error::Dialect),
            // The last name may be gone, and its file open.
            Err(Error::Meta(MetaFault::Stale)) => Ok(space),
            Err(error) => Err(error),
        }
    }
}

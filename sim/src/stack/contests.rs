//! Two clients want the locks of one file, while the node crashes and connections break.
//!
//! Nobody but the holder is inside, whatever restarts meanwhile; every wait comes to an end. Some give up waiting, some
//! close the file instead of unlocking it.

use super::worker::{WRITE, Worker};
use crate::Rng;
use futures_util::future::join_all;
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_client::{Cancel, Client, Error, File};
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use std::cell::Cell;
use std::time::Duration;

/// Every lock has this byte.
const WANTED: u64 = 100;
const ROUNDS_MAX: u64 = 6;

/// One of those who want a lock.
struct Contender {
    client: Client,
    ino: Ino,
    owner: LockOwner,
    rng: Rng,
}

impl Worker {
    /// Lets both clients contend for locks of a file that neither has open: the last close releases.
    pub(super) async fn contend(&mut self, guest: &Client, id: u64) {
        self.note(format!("contend for locks of node {id}"));
        let ino = self.ino(id);
        let sort = *self.rng.pick(&[LockSort::Posix, LockSort::Flock]);
        let owner = LockOwner { sort, id: 1 };
        let mut contenders = Vec::new();
        for client in [&self.client, guest] {
            let (client, rng) = (client.clone(), self.rng.fork());
            contenders.push(Contender { client, ino, owner, rng });
        }
        let inside = Cell::new(false);
        let contests = contenders.iter_mut().map(|contender| contender.contend(&inside));
        for outcome in self.done(join_all(contests)).await {
            match outcome {
                Ok(true) => {}
                Ok(false) => self.fail("two held a lock at once"),
                Err(error) => self.fail(&format!("a lock, or what belongs to it, gave {error}")),
            }
        }
    }
}

impl Contender {
    /// False: somebody else held the lock too.
    async fn contend(&mut self, inside: &Cell<bool>) -> Result<bool, Error> {
        let mut file = self.open().await?;
        for _ in 0..self.rng.between(1, ROUNDS_MAX) {
            let range = match self.owner.sort {
                LockSort::Flock | LockSort::Turn => LockRange::WHOLE,
                LockSort::Posix => {
                    let start = WANTED - self.rng.below(WANTED);
                    LockRange { start, end: WANTED + self.rng.below(WANTED) }
                }
            };
            let lock = Lock { owner: self.owner, range, exclusive: true, pid: 1 };
            let cancel = Cancel::default();
            if self.rng.one_in(4) {
                let (cancel, after) = (cancel.clone(), self.rng.below(20_000));
                reactor::spawn(async move {
                    reactor::sleep(Duration::from_micros(after)).await;
                    cancel.cancel();
                });
            }
            match file.lock(lock, Some(cancel)).await {
                Ok(_) => {}
                Err(Error::Interrupted) => continue,
                Err(error) => return Err(error),
            }
            if inside.replace(true) {
                return Ok(false);
            }
            let longest = if self.rng.one_in(4) { 100_000 } else { 2_000 };
            reactor::sleep(Duration::from_micros(self.rng.below(longest))).await;
            inside.set(false);
            if self.rng.one_in(4) {
                file.close().await;
                file = self.open().await?;
            } else {
                file.unlock(self.owner, LockRange::WHOLE).await?;
            }
        }
        file.close().await;
        Ok(true)
    }

    async fn open(&self) -> Result<File, Error> {
        let (file, _) = self.client.open(self.ino, WRITE).await?;
        Ok(file)
    }
}

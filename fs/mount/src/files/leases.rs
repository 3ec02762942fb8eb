//! What the kernel trusts of names and attributes, and how that ends when others change them.
//!
//! What always holds:
//! - The kernel trusts nothing for longer than [`VALID`], nor than the client's lease lasts; without one it asks each time.
//! - A notice is acknowledged when the kernel cannot trust any more what it is about: it has been told so, or the time
//!   for which it was told has passed. It is told so by another thread: that waits for locks which a call may hold that
//!   itself waits for another mount, which waits for this one. The time cuts such a cycle.
//! - In a directory whose names others change the kernel is told no name for longer than the answer, so that this waiting
//!   happens once, and not for each name.

use super::locks::Kernel;
use super::xattrs::Bare;
use super::{VALID, attr_of};
use crate::codec::Entry;
use futures_util::future::{Either, LocalBoxFuture, select};
use levada_base::ids::Ino;
use levada_base::reactor::{self, Instant};
use levada_client::Client;
use levada_wire::attr::Attr;
use levada_wire::meta::Notice;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// For so long after a change of another mount a directory counts as shared.
const SHARED: Duration = Duration::from_secs(10);
/// Beyond so many directories those are forgotten that no longer count.
const SHARED_MANY: usize = 1 << 12;

/// What the kernel has been told.
#[derive(Default)]
pub(super) struct Trust {
    /// It is told nothing for longer than the answer.
    is_none: Cell<bool>,
    told: RefCell<Told>,
    shared: RefCell<HashMap<Ino, Instant>>,
    /// Names that are being renamed, or renamed to: how many renames do.
    moving: RefCell<HashMap<u64, u32>>,
    hasher: RandomState,
}

/// By so much the kernel may be late to count from.
const LATE: Duration = Duration::from_millis(100);

/// A rename under way: nobody is told these names meanwhile for longer than the answer.
pub(super) struct Moving {
    trust: Rc<Trust>,
    keys: [u64; 2],
}

impl Drop for Moving {
    fn drop(&mut self) {
        let mut moving = self.trust.moving.borrow_mut();
        for key in self.keys {
            if let Some(count) = moving.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    moving.remove(&key);
                }
            }
        }
    }
}

/// When the kernel's trust in what it was told ends, for all that it was told within the last [`VALID`], and
/// [`LATE`].
#[derive(Default)]
struct Told {
    now: HashMap<u64, Instant>,
    before: HashMap<u64, Instant>,
    turned: Instant,
}

impl Told {
    fn put(&mut self, key: u64, until: Instant) {
        let now = reactor::now();
        if now.since(self.turned) >= VALID + LATE {
            self.before = std::mem::take(&mut self.now);
            self.turned = now;
        }
        self.now.insert(key, until);
    }

    fn until(&self, key: u64) -> Option<Instant> {
        let until = self.now.get(&key).max(self.before.get(&key)).copied();
        until.filter(|until| *until > reactor::now())
    }

    fn end(&mut self, key: u64) {
        self.now.remove(&key);
        self.before.remove(&key);
    }
}

impl Trust {
    fn node_key(&self, ino: Ino) -> u64 {
        self.hasher.hash_one((0_u8, ino.0))
    }

    fn name_key(&self, dir: Ino, name: &[u8]) -> u64 {
        self.hasher.hash_one((1_u8, dir.0, name))
    }

    fn is_shared(&self, dir: Ino) -> bool {
        let shared = self.shared.borrow();
        !shared.is_empty() && shared.get(&dir).is_some_and(|since| since.elapsed() < SHARED)
    }

    fn share(&self, dir: Ino) {
        let mut shared = self.shared.borrow_mut();
        if shared.len() >= SHARED_MANY {
            shared.retain(|_, since| since.elapsed() < SHARED);
        }
        shared.insert(dir, reactor::now());
    }

    /// From now on the kernel asks each time, as it cannot be told when that is over.
    pub(super) fn trust_nothing(&self) {
        self.is_none.set(true);
    }

    /// For how long at most.
    fn limit(&self) -> Duration {
        if self.is_none.get() { Duration::ZERO } else { VALID }
    }

    /// These attributes are about to be told: for how long they may be trusted.
    pub(super) fn attr(&self, client: &Client, attr: &Attr) -> Duration {
        let valid = client.attr_valid(attr).min(self.limit());
        if !valid.is_zero() {
            let until = reactor::now() + valid + LATE;
            self.told.borrow_mut().put(self.node_key(attr.ino), until);
        }
        valid
    }

    /// What a name means is about to be told.
    pub(super) fn entry(&self, client: &Client, dir: Ino, name: &[u8], attr: &Attr) -> Entry {
        let mut entry_valid = client.name_valid(dir, name, attr.ino).min(self.limit());
        let key = self.name_key(dir, name);
        if self.is_shared(dir) || self.moving.borrow().contains_key(&key) {
            entry_valid = Duration::ZERO;
        }
        if !entry_valid.is_zero() {
            self.told.borrow_mut().put(key, reactor::now() + entry_valid + LATE);
        }
        Entry {
            inode: attr.ino.0,
            generation: attr.generation,
            entry_valid,
            attr_valid: self.attr(client, attr),
            attr: attr_of(attr),
        }
    }

    /// The kernel has carried out the removal of a name.
    pub(super) fn removed(&self, dir: Ino, name: &[u8]) {
        self.told.borrow_mut().end(self.name_key(dir, name));
    }

    /// The kernel is carrying out a rename: then it trusts the new name for as long as it did the old one, or the other way
    /// round. It counts from now on: another mount may change the new name before the kernel has the answer, and it is told of
    /// that after, as it holds the directories' locks until then.
    pub(super) fn rename(self: &Rc<Self>, from: (Ino, &[u8]), to: (Ino, &[u8])) -> Moving {
        let keys = [self.name_key(from.0, from.1), self.name_key(to.0, to.1)];
        let mut moving = self.moving.borrow_mut();
        keys.iter().for_each(|key| *moving.entry(*key).or_default() += 1);
        let mut told = self.told.borrow_mut();
        if let Some(until) = keys.iter().filter_map(|key| told.until(*key)).max() {
            keys.into_iter().for_each(|key| told.put(key, until));
        }
        Moving { trust: Rc::clone(self), keys }
    }

    /// Another mount is about to change something: the end of the kernel's trust in it, if there is any.
    fn end(
        self: &Rc<Self>,
        kernel: &Kernel,
        notice: &Notice,
    ) -> Option<LocalBoxFuture<'static, ()>> {
        let key = match notice {
            Notice::Names { dir, name } => {
                self.share(*dir);
                self.name_key(*dir, name)
            }
            Notice::Node { ino } => self.node_key(*ino),
            // See `sharing`, and the client's locks.
            Notice::Shared { .. } | Notice::Granted { .. } | Notice::Refused { .. } => return None,
        };
        let until = self.told.borrow().until(key)?;
        let (trust, kernel, notice) = (Rc::clone(self), kernel.clone(), notice.clone());
        Some(Box::pin(async move {
            let told = async {
                match &notice {
                    Notice::Names { dir, name } => kernel.drop_name(*dir, name).await,
                    Notice::Node { ino } => kernel.drop_attributes(*ino).await,
                    Notice::Shared { .. } | Notice::Granted { .. } | Notice::Refused { .. } => true,
                }
            };
            match select(pin!(told), pin!(reactor::sleep_until(until))).await {
                Either::Left((true, _)) => trust.told.borrow_mut().end(key),
                // There is no way to tell it.
                Either::Left((false, time)) => time.await,
                Either::Right(_) => {}
            }
        }))
    }
}

/// Lets the kernel know what others are about to change.
pub(super) fn listen(client: &Client, trust: &Rc<Trust>, bare: &Rc<Bare>, kernel: &Kernel) {
    let (trust, bare, kernel) = (Rc::clone(trust), Rc::clone(bare), kernel.clone());
    client.on_notice(Rc::new(move |notice| {
        if let Notice::Node { ino } = notice {
            bare.forget(*ino);
        }
        trust.end(&kernel, notice)
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;

    const DIR: Ino = Ino(5);

    #[test]
    fn trust_ends_with_its_time() {
        Reactor::simulated(1).block_on(async {
            let trust = Rc::new(Trust::default());
            let key = trust.name_key(DIR, b"a");
            let notice = Notice::Names { dir: DIR, name: b"a".to_vec() };
            let kernel = Kernel::default();
            assert!(trust.end(&kernel, &notice).is_none(), "never told");
            assert!(trust.is_shared(DIR));
            for pause in [0, 300, 900, 1700] {
                reactor::sleep(Duration::from_millis(pause)).await;
                let told = reactor::now();
                trust.told.borrow_mut().put(key, told + VALID);
                // Others come and go.
                reactor::sleep(Duration::from_millis(700)).await;
                trust.told.borrow_mut().put(1, reactor::now() + VALID);
                trust.end(&kernel, &notice).expect("still trusted").await;
                assert_eq!(told.elapsed(), VALID, "nobody can tell the kernel");
                assert!(trust.end(&kernel, &notice).is_none());
            }
            let told = || trust.told.borrow_mut().put(key, reactor::now() + VALID);
            told();
            let moving = trust.rename((DIR, b"a"), (DIR, b"b"));
            let other = trust.rename((DIR, b"b"), (DIR, b"c"));
            for name in [&b"b"[..], b"c"] {
                assert!(trust.told.borrow().until(trust.name_key(DIR, name)).is_some());
            }
            drop(moving);
            assert!(trust.moving.borrow().contains_key(&trust.name_key(DIR, b"b")));
            drop(other);
            assert!(trust.moving.borrow().is_empty());
            trust.removed(DIR, b"a");
            assert!(trust.end(&kernel, &notice).is_none());
            reactor::sleep(SHARED).await;
            assert!(!trust.is_shared(DIR));
        });
    }
}

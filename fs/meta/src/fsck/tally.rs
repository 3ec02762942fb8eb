//! What a check has added up so far, row by row.
//!
//! A row that comes has the sign plus, one that goes the sign minus; a change is the old row going and
//! the new one coming. So it does not matter in which order rows are met, nor whether they change behind the walk.

use super::finding::{Finding, List};
use super::hash::FactHash;
use super::links::{Exact, Said, Sign, Sums};
use super::slot::{Slot, Suspect};
use super::tree::Tree;
use crate::key;
use crate::row::{
    Charge, Damaged, DoomedRow, EntryRow, Inode, NameRow, OrphanRow, Session, Subject, Usage,
    XattrRow,
};
use levada_base::ids::Ino;
use levada_wire::attr::Kind;
use std::collections::BTreeMap;

/// See the module.
pub struct Tally {
    hash: FactHash,
    /// Inodes of which not all rows were passed yet.
    slots: BTreeMap<u64, Slot>,
    /// All rows of inodes below were passed.
    settled_below: u128,
    pub sums: Sums,
    /// In the second walk.
    pub exact: Option<Exact>,
    /// Names that only the listing of their directory has; they count.
    only_listed: Vec<(Ino, NameRow)>,
    pub tree: Tree,
    pub counted: Counted,
    /// What those use to whom inodes belong.
    pub usage: BTreeMap<Subject, Usage>,
    /// Inodes that nobody can say to whom they belong.
    pub unreadable: u64,
    pub names: u64,
    pub last_ino: u64,
}

/// What there are counters of.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    pub inodes: u64,
    pub doomed_inodes: u64,
    pub doomed_bytes: u64,
}

impl Tally {
    /// One whose tree of directories takes at most so many bytes.
    pub fn new(tree_bytes_max: u64) -> Self {
        Self {
            hash: FactHash::new(),
            slots: BTreeMap::new(),
            settled_below: 0,
            sums: Sums::new(),
            exact: None,
            only_listed: Vec::new(),
            tree: Tree::new(tree_bytes_max),
            counted: Counted::default(),
            usage: BTreeMap::new(),
            unreadable: 0,
            names: 0,
            last_ino: 0,
        }
    }

    /// Bytes of memory, about.
    pub fn bytes(&self) -> usize {
        let exact = self.exact.as_ref().map_or(0, Exact::bytes);
        self.sums.bytes()
            + self.tree.bytes()
            + exact
            + self.slots.len() * size_of::<Slot>()
            + self.usage.len() * size_of::<(Subject, Usage)>()
    }

    /// Takes in a row of an inode, of one of the tags that belong to inodes.
    pub fn row(&mut self, sign: Sign, key: &[u8], value: &[u8]) -> Result<(), Finding> {
        let unknown = || Finding::UnknownRow(key.to_vec());
        let damaged = |damaged: Damaged| Finding::Damaged { key: key.to_vec(), damaged };
        let ino = key::ino_of(key).ok_or_else(unknown)?;
        let second = || key::second_number(key).filter(|_| key.len() == 17).ok_or_else(unknown);
        match key[0] {
            key::INODE if key.len() == 9 => {
                let inode = Inode::decode(value);
                self.inode(sign, ino, inode.as_ref().ok());
                inode.map(drop).map_err(damaged)
            }
            key::ENTRY => {
                let cookie = second()?;
                let row = EntryRow::decode(value);
                if let Some((slot, hash)) = self.slot(ino) {
                    slot.entry(hash, sign, (ino, cookie), row.as_ref().ok());
                }
                row.map(drop).map_err(damaged)
            }
            key::NAME if key.len() > 9 => {
                let row = NameRow::decode(value);
                sign.count(&mut self.names);
                if let Some((slot, hash)) = self.slot(ino) {
                    slot.name(hash, sign, (ino, &key[9..]), row.as_ref().ok());
                }
                self.sums.name(&self.hash, sign, ino, &row.map_err(damaged)?);
                Ok(())
            }
            key::ORPHAN if key.len() == 9 => {
                if let Some((slot, _)) = self.slot(ino) {
                    slot.list(sign, List::Orphans);
                }
                OrphanRow::decode(value).map(drop).map_err(damaged)
            }
            key::DESTROY if key.len() == 9 => {
                if let Some((slot, _)) = self.slot(ino) {
                    slot.list(sign, List::Destroy);
                }
                let row = DoomedRow::decode(value);
                sign.count(&mut self.counted.doomed_inodes);
                let bytes = row.as_ref().map_or(0, |row| row.bytes);
                sign.count_by(&mut self.counted.doomed_bytes, bytes);
                row.map(drop).map_err(damaged)
            }
            key::SESSION => {
                let client = second()?;
                let session = Session::decode(value).map_err(damaged)?;
                if let Some((slot, _)) = self.slot(ino) {
                    slot.session(sign, client, session);
                }
                Ok(())
            }
            key::XATTR if key.len() > 9 => {
                if let Some((slot, hash)) = self.slot(ino) {
                    slot.xattr(hash, sign, ino, &key[9..]);
                }
                XattrRow::decode(value).map(drop).map_err(damaged)
            }
            _ => Err(unknown()),
        }
    }

    /// Counts names that only the listing of their directory has.
    pub fn only_listed(&mut self, names: Vec<(Ino, NameRow)>) {
        for (parent, row) in &names {
            self.sums.name(&self.hash, Sign::Plus, *parent, row);
        }
        self.only_listed.extend(names);
    }

    /// Begins a second walk.
    pub fn count_exactly(&mut self, mut exact: Exact) {
        for (parent, row) in &self.only_listed {
            exact.name(&self.hash, Sign::Plus, *parent, row);
        }
        self.exact = Some(exact);
    }

    /// A row of a name, or of an inode, in the second walk.
    pub fn count(&mut self, sign: Sign, key: &[u8], value: &[u8]) {
        let (Some(ino), Some(exact)) = (key::ino_of(key), &mut self.exact) else { return };
        match key[0] {
            key::NAME if key.len() > 9 => {
                // Those that cannot be decoded were told in the first walk.
                if let Ok(row) = NameRow::decode(value) {
                    exact.name(&self.hash, sign, ino, &row);
                }
            }
            key::INODE if key.len() == 9 => {
                let said = Inode::decode(value).ok().map(|inode| Said::of(&inode));
                exact.inode(&self.hash, sign, ino, said);
            }
            _ => {}
        }
    }

    fn inode(&mut self, sign: Sign, ino: Ino, inode: Option<&Inode>) {
        sign.count(&mut self.counted.inodes);
        self.last_ino = self.last_ino.max(ino.0);
        if let Some((slot, hash)) = self.slot(ino) {
            slot.inode(hash, sign, ino, inode);
        }
        let Some(inode) = inode else { return sign.count(&mut self.unreadable) };
        if let Some(charge) = Charge::of(inode) {
            for subject in charge.subjects() {
                let used = self.usage.entry(subject).or_default();
                *used = match sign {
                    Sign::Plus => used.plus(charge.usage()),
                    Sign::Minus => used.minus(charge.usage()),
                };
            }
        }
        self.sums.inode(&self.hash, sign, ino, Said::of(inode));
        if inode.kind() == Kind::Directory && inode.nlink > 0 {
            self.tree.set(ino, (sign == Sign::Plus).then_some(inode.parent));
        }
    }

    /// The slot of an inode; none once that is settled.
    fn slot(&mut self, ino: Ino) -> Option<(&mut Slot, &FactHash)> {
        let is_pending = u128::from(ino.0) >= self.settled_below;
        is_pending.then(|| (self.slots.entry(ino.0).or_default(), &self.hash))
    }

    /// All rows of inodes below `end` were passed: says what does not fit, and what is to be looked at row by row.
    pub fn settle(&mut self, end: u128) -> (Vec<Finding>, Vec<Suspect>) {
        let (mut findings, mut suspects) = (Vec::new(), Vec::new());
        self.settled_below = self.settled_below.max(end);
        while let Some(first) =
            self.slots.first_entry().filter(|slot| u128::from(*slot.key()) < end)
        {
            let (ino, slot) = first.remove_entry();
            slot.settle(Ino(ino), &mut findings, &mut suspects);
        }
        (findings, suspects)
    }
}

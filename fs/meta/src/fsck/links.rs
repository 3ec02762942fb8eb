//! Names against links: each inode has the names that it says, of its kind, and a directory lies
//! in the one that it says.
//!
//! The first walk adds up what names say and takes off what inodes say, in a sum for each bucket of inodes.
//! A bucket whose sum is not zero holds a fault; a second walk counts exactly for the inodes of
//! those. So memory does not grow with the number of inodes. The sums are linear: order does not matter, and a
//! change is the old row taken off and the new one added.

use super::finding::Finding;
use super::hash::{BUCKET_BITS, Fact, FactHash};
use crate::row::{Inode, NameRow};
use levada_base::ids::Ino;
use levada_wire::attr::Kind;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Faulty buckets whose inodes are counted in one walk: of 100 million inodes, 0.8 million.
const BUCKETS_AT_ONCE: usize = 2048;
/// Walks that count; what then is left is not checked.
pub const WALKS_MAX: usize = 32;
/// Names kept of one inode.
const NAMES_KEPT: usize = 8;

/// What a row says of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    pub kind: Kind,
    pub nlink: u32,
    pub parent: Ino,
}

impl Said {
    pub fn of(inode: &Inode) -> Self {
        Self { kind: inode.kind(), nlink: inode.nlink, parent: inode.parent }
    }
}

/// Whether a row came or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    Plus,
    Minus,
}

impl Sign {
    pub fn apply(self, to: &mut u128, what: u128) {
        *to = match self {
            Self::Plus => to.wrapping_add(what),
            Self::Minus => to.wrapping_sub(what),
        };
    }

    pub fn count(self, to: &mut u64) {
        self.count_by(to, 1);
    }

    pub fn count_by(self, to: &mut u64, by: u64) {
        *to = match self {
            Self::Plus => to.wrapping_add(by),
            Self::Minus => to.wrapping_sub(by),
        };
    }

    pub fn opposite(self) -> Self {
        match self {
            Self::Plus => Self::Minus,
            Self::Minus => Self::Plus,
        }
    }
}

/// The sums of the first walk.
pub struct Sums(Vec<u128>);

impl Sums {
    pub fn new() -> Self {
        Self(vec![0; 1 << BUCKET_BITS])
    }

    pub fn bytes(&self) -> usize {
        self.0.len() * size_of::<u128>()
    }

    pub fn name(&mut self, hash: &FactHash, sign: Sign, parent: Ino, row: &NameRow) {
        let ino = row.ino.0;
        let mut sum = hash.of(Fact::Name, &[ino, row.kind as u64], b"");
        if row.kind == Kind::Directory {
            sum = sum.wrapping_add(hash.of(Fact::Within, &[ino, parent.0], b""));
            let holds = hash.of(Fact::Holds, &[parent.0], b"");
            sign.apply(&mut self.0[hash.bucket(parent.0)], holds);
        }
        sign.apply(&mut self.0[hash.bucket(ino)], sum);
    }

    pub fn inode(&mut self, hash: &FactHash, sign: Sign, ino: Ino, said: Said) {
        let Said { kind, nlink, parent } = said;
        let mut sum = 0u128;
        let name = hash.of(Fact::Name, &[ino.0, kind as u64], b"");
        match kind {
            Kind::Directory if nlink == 0 => {}
            Kind::Directory => {
                if ino != Ino::ROOT {
                    sum = name.wrapping_add(hash.of(Fact::Within, &[ino.0, parent.0], b""));
                }
                let holds = hash.of(Fact::Holds, &[ino.0], b"");
                let held = u128::from(nlink).wrapping_sub(2);
                sum = sum.wrapping_add(holds.wrapping_mul(held));
            }
            Kind::File | Kind::Symlink | Kind::Special => {
                sum = name.wrapping_mul(nlink.into());
            }
        }
        sign.opposite().apply(&mut self.0[hash.bucket(ino.0)], sum);
    }

    /// The buckets that hold a fault.
    pub fn faulty(&self) -> BTreeSet<usize> {
        let faulty = self.0.iter().enumerate().filter(|(_, sum)| **sum != 0);
        faulty.map(|(bucket, _)| bucket).collect()
    }
}

/// A name of an inode, by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NameOf {
    parent: Ino,
    cookie: u64,
    kind: Kind,
}

/// What was counted of one inode.
#[derive(Default)]
struct Counted {
    said: Option<Said>,
    /// The row is there and cannot be decoded: what it says is unknown.
    is_damaged: bool,
    names: SmallVec<[NameOf; 1]>,
    name_count: u64,
    subdirectories: u64,
}

/// Exact counts for the inodes of some buckets.
pub struct Exact {
    buckets: BTreeSet<usize>,
    inodes: BTreeMap<u64, Counted>,
}

/// A name that does not fit the inode that it names.
pub struct BadName {
    pub parent: Ino,
    pub cookie: u64,
    pub ino: Ino,
    /// Then it is of another kind.
    pub is_there: bool,
}

impl Exact {
    /// Takes the buckets that are counted next out of those that are left.
    pub fn of_next(left: &mut BTreeSet<usize>) -> Self {
        let mut buckets = BTreeSet::new();
        while buckets.len() < BUCKETS_AT_ONCE
            && let Some(bucket) = left.pop_first()
        {
            buckets.insert(bucket);
        }
        Self { buckets, inodes: BTreeMap::new() }
    }

    pub fn bytes(&self) -> usize {
        self.inodes.len() * (size_of::<Counted>() + 32)
    }

    fn counted(&mut self, hash: &FactHash, ino: Ino) -> Option<&mut Counted> {
        let is_counted = self.buckets.contains(&hash.bucket(ino.0));
        is_counted.then(|| self.inodes.entry(ino.0).or_default())
    }

    pub fn name(&mut self, hash: &FactHash, sign: Sign, parent: Ino, row: &NameRow) {
        let name = NameOf { parent, cookie: row.cookie, kind: row.kind };
        if let Some(counted) = self.counted(hash, row.ino) {
            sign.count(&mut counted.name_count);
            match sign {
                Sign::Plus if counted.names.len() < NAMES_KEPT => counted.names.push(name),
                Sign::Plus => {}
                Sign::Minus => counted.names.retain(|kept| *kept != name),
            }
        }
        if row.kind == Kind::Directory
            && let Some(counted) = self.counted(hash, parent)
        {
            sign.count(&mut counted.subdirectories);
        }
    }

    /// `said` is none where the row cannot be decoded.
    pub fn inode(&mut self, hash: &FactHash, sign: Sign, ino: Ino, said: Option<Said>) {
        if let Some(counted) = self.counted(hash, ino) {
            counted.said = said.filter(|_| sign == Sign::Plus);
            counted.is_damaged = said.is_none() && sign == Sign::Plus;
        }
    }

    /// What does not fit, in the order of inodes.
    pub fn findings(&self) -> (Vec<Finding>, Vec<BadName>) {
        let (mut findings, mut names) = (Vec::new(), Vec::new());
        for (&ino, counted) in self.inodes.iter().filter(|(_, counted)| !counted.is_damaged) {
            let ino = Ino(ino);
            let is_bad = |name: &NameOf| counted.said.is_none_or(|said| said.kind != name.kind);
            let is_there = counted.said.is_some();
            let bad = counted.names.iter().filter(|name| is_bad(name));
            names.extend(bad.map(|NameOf { parent, cookie, .. }| BadName {
                parent: *parent,
                cookie: *cookie,
                ino,
                is_there,
            }));
            let Some(said) = counted.said else { continue };
            let has = counted.links(ino, said.kind);
            if u64::from(said.nlink) != has {
                findings.push(Finding::LinkCount { ino, says: said.nlink, has });
            }
            if said.kind == Kind::Directory && said.nlink > 0 {
                let named_in: Vec<Ino> = counted.names.iter().map(|name| name.parent).collect();
                let expected = if ino == Ino::ROOT { vec![] } else { vec![said.parent] };
                if named_in != expected {
                    findings.push(Finding::Parent { ino, says: said.parent, named_in });
                }
            }
        }
        (findings, names)
    }
}

impl Counted {
    fn links(&self, ino: Ino, kind: Kind) -> u64 {
        match kind {
            Kind::Directory if ino == Ino::ROOT || self.name_count > 0 => 2 + self.subdirectories,
            Kind::Directory => 0,
            Kind::File | Kind::Symlink | Kind::Special => self.name_count,
        }
    }
}

//! The inode: 104 fixed bytes, then sections.
//!
//! A section is a tag, a length and bytes; the ones that this version does not know are kept as
//! they are. So access control lists and extended attributes needed no new version.

use super::entry::{kind_number, kind_of};
use super::{Damaged, Fields, VERSION};
use crate::acl::{Acl, Malformed};
use levada_base::ids::{Ino, TargetId};
use levada_wire::attr::{Attr, Kind, Layout, Time};
use std::collections::BTreeSet;

const SECTION_LAYOUT: u8 = 1;
const SECTION_DIRECTORY: u8 = 2;
const SECTION_SYMLINK: u8 = 3;
const SECTION_XATTRS: u8 = 4;
const SECTION_ACCESS_ACL: u8 = 5;
const SECTION_DEFAULT_ACL: u8 = 6;
pub(super) const SECTION_STORED: u8 = 16;

/// What only one kind of inode has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    File(Layout),
    Directory {
        /// Never given out before.
        next_cookie: u64,
        /// Names in it.
        entries: u64,
    },
    Symlink(Vec<u8>),
    Special,
}

/// The value of `I|ino`. The fields mean what they mean in [`Attr`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    pub generation: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u32,
    pub size: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub btime: Time,
    pub change: u64,
    pub parent: Ino,
    pub project: u32,
    pub tenant: u32,
    pub components: u64,
    pub body: Body,
    /// The names of its extended attributes, each of which has a row of its own.
    pub xattrs: BTreeSet<Vec<u8>>,
    /// Says more than `mode`, and the same where both speak.
    pub access_acl: Option<Acl>,
    /// Directories only.
    pub default_acl: Option<Acl>,
    /// Bytes that its objects hold, by component. Who has this counts as used; none: of a file system from before that
    /// was noted, or to be destroyed.
    pub stored: Option<StoredBytes>,
    /// Sections that this version does not know, encoded.
    pub other: Vec<u8>,
}

/// Bytes by component; those behind the last have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredBytes(Vec<u64>);

impl StoredBytes {
    pub fn by_component(&self) -> &[u64] {
        &self.0
    }

    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Takes over what is told of these components; with `at_least` only what is more than was known.
    pub fn take(&mut self, told: &[(u32, u64)], at_least: bool) {
        for (component, bytes) in told {
            let at = *component as usize;
            if self.0.len() <= at {
                self.0.resize(at + 1, 0);
            }
            self.0[at] = if at_least { self.0[at].max(*bytes) } else { *bytes };
        }
        let used = self.0.iter().rposition(|bytes| *bytes > 0).map_or(0, |last| last + 1);
        self.0.truncate(used);
    }

    fn encode(&self) -> Vec<u8> {
        self.0.iter().flat_map(|bytes| bytes.to_le_bytes()).collect()
    }

    fn decode(content: &[u8]) -> Result<Self, Damaged> {
        let (words, rest) = content.as_chunks::<8>();
        // More than there can be components, or a zero that is left off.
        let last_is_zero = words.last().is_some_and(|word| *word == [0; 8]);
        if !rest.is_empty() || words.len() > 64 || last_is_zero {
            return Err(Damaged { what: "stored bytes" });
        }
        Ok(Self(words.iter().map(|word| u64::from_le_bytes(*word)).collect()))
    }
}

impl Inode {
    /// An inode as of `now`: root's, of no size, in no project.
    pub fn new(generation: u64, mode: u32, nlink: u32, now: Time, parent: Ino, body: Body) -> Self {
        Self {
            generation,
            mode,
            uid: 0,
            gid: 0,
            nlink,
            rdev: 0,
            size: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            change: 1,
            parent,
            project: 0,
            tenant: 0,
            components: 0,
            body,
            xattrs: BTreeSet::new(),
            access_acl: None,
            default_acl: None,
            stored: Some(StoredBytes::default()),
            other: Vec::new(),
        }
    }

    pub fn kind(&self) -> Kind {
        match self.body {
            Body::File(_) => Kind::File,
            Body::Directory { .. } => Kind::Directory,
            Body::Symlink(_) => Kind::Symlink,
            Body::Special => Kind::Special,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut row = Vec::with_capacity(160);
        row.extend_from_slice(&[VERSION, kind_number(self.kind()), 0, 0]);
        row.extend_from_slice(&self.mode.to_le_bytes());
        row.extend_from_slice(&self.generation.to_le_bytes());
        for field in [self.uid, self.gid, self.nlink, self.rdev] {
            row.extend_from_slice(&field.to_le_bytes());
        }
        row.extend_from_slice(&self.size.to_le_bytes());
        for time in [self.atime, self.mtime, self.ctime, self.btime] {
            row.extend_from_slice(&time.0.to_le_bytes());
        }
        row.extend_from_slice(&self.change.to_le_bytes());
        row.extend_from_slice(&self.parent.0.to_le_bytes());
        row.extend_from_slice(&self.project.to_le_bytes());
        row.extend_from_slice(&self.tenant.to_le_bytes());
        row.extend_from_slice(&self.components.to_le_bytes());
        debug_assert_eq!(row.len(), 104);
        match &self.body {
            Body::File(layout) => {
                section(&mut row, SECTION_LAYOUT, 12 + 4 * layout.targets.len());
                row.extend_from_slice(&layout.version.to_le_bytes());
                row.extend_from_slice(&layout.stripe_unit.to_le_bytes());
                for target in &layout.targets {
                    row.extend_from_slice(&target.0.to_le_bytes());
                }
            }
            Body::Directory { next_cookie, entries } => {
                section(&mut row, SECTION_DIRECTORY, 16);
                row.extend_from_slice(&next_cookie.to_le_bytes());
                row.extend_from_slice(&entries.to_le_bytes());
            }
            Body::Symlink(target) => {
                section(&mut row, SECTION_SYMLINK, target.len());
                row.extend_from_slice(target);
            }
            Body::Special => {}
        }
        if !self.xattrs.is_empty() {
            let names = self.xattr_list();
            section(&mut row, SECTION_XATTRS, names.len());
            row.extend_from_slice(&names);
        }
        for (tag, acl) in
            [(SECTION_ACCESS_ACL, &self.access_acl), (SECTION_DEFAULT_ACL, &self.default_acl)]
        {
            let Some(entries) = acl.as_ref().map(Acl::encode) else { continue };
            section(&mut row, tag, entries.len());
            row.extend_from_slice(&entries);
        }
        if let Some(bytes) = self.stored.as_ref().map(StoredBytes::encode) {
            section(&mut row, SECTION_STORED, bytes.len());
            row.extend_from_slice(&bytes);
        }
        row.extend_from_slice(&self.other);
        row
    }

    /// The names of the extended attributes, each with a NUL behind it.
    pub fn xattr_list(&self) -> Vec<u8> {
        self.xattrs.iter().flat_map(|name| name.iter().copied().chain([0])).collect()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("inode", bytes)?;
        let kind = kind_of(fields.u8()?).ok_or(fields.damaged())?;
        if fields.u16()? != 0 {
            return Err(fields.damaged());
        }
        let mut inode = Self {
            mode: fields.u32()?,
            generation: fields.u64()?,
            uid: fields.u32()?,
            gid: fields.u32()?,
            nlink: fields.u32()?,
            rdev: fields.u32()?,
            size: fields.u64()?,
            atime: Time(fields.i64()?),
            mtime: Time(fields.i64()?),
            ctime: Time(fields.i64()?),
            btime: Time(fields.i64()?),
            change: fields.u64()?,
            parent: Ino(fields.u64()?),
            project: fields.u32()?,
            tenant: fields.u32()?,
            components: fields.u64()?,
            body: Body::Special,
            xattrs: BTreeSet::new(),
            access_acl: None,
            default_acl: None,
            stored: None,
            other: Vec::new(),
        };
        let decode_acl = |content| match Acl::decode(content) {
            Ok(acl) => Ok(Some(acl)),
            Err(Malformed) => Err(Damaged { what: "access control list" }),
        };
        while !fields.rest.is_empty() {
            let start = fields.rest;
            let tag = fields.u8()?;
            fields.u8()?;
            let bytes = fields.u16()?;
            let content = fields.bytes(usize::from(bytes))?;
            match tag {
                SECTION_LAYOUT => inode.body = Body::File(decode_layout(content)?),
                SECTION_DIRECTORY => inode.body = decode_directory(content)?,
                SECTION_SYMLINK => inode.body = Body::Symlink(content.to_vec()),
                SECTION_XATTRS => inode.xattrs = decode_xattrs(content)?,
                SECTION_ACCESS_ACL => inode.access_acl = decode_acl(content)?,
                SECTION_DEFAULT_ACL => inode.default_acl = decode_acl(content)?,
                SECTION_STORED => inode.stored = Some(StoredBytes::decode(content)?),
                _ => inode.other.extend_from_slice(&start[..start.len() - fields.rest.len()]),
            }
        }
        if inode.kind() != kind {
            return Err(fields.damaged());
        }
        Ok(inode)
    }

    /// What a client gets to see while nobody writes.
    pub fn attr(&self, ino: Ino) -> Attr {
        let layout = match &self.body {
            Body::File(layout) => Some(layout.clone()),
            _ => None,
        };
        let has_acl = self.access_acl.is_some() || self.default_acl.is_some();
        Attr {
            ino,
            generation: self.generation,
            kind: self.kind(),
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            size: self.size,
            writers: false,
            others: false,
            cut: false,
            rdev: self.rdev,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            change: self.change,
            parent: self.parent,
            project: self.project,
            tenant: self.tenant,
            extended: has_acl || !self.xattrs.is_empty(),
            layout,
            components: self.components,
        }
    }
}

fn section(row: &mut Vec<u8>, tag: u8, bytes: usize) {
    let bytes = u16::try_from(bytes).expect("sections are short");
    row.extend_from_slice(&[tag, 0]);
    row.extend_from_slice(&bytes.to_le_bytes());
}

fn decode_layout(content: &[u8]) -> Result<Layout, Damaged> {
    let mut fields = Fields { rest: content, what: "inode layout" };
    let (version, stripe_unit) = (fields.u32()?, fields.u64()?);
    let mut targets = Vec::with_capacity(fields.rest.len() / 4);
    while !fields.rest.is_empty() {
        targets.push(TargetId(fields.u32()?));
    }
    if stripe_unit == 0 || targets.is_empty() {
        return Err(fields.damaged());
    }
    Ok(Layout { version, stripe_unit, targets })
}

fn decode_directory(content: &[u8]) -> Result<Body, Damaged> {
    let mut fields = Fields { rest: content, what: "inode directory" };
    let body = Body::Directory { next_cookie: fields.u64()?, entries: fields.u64()? };
    fields.end()?;
    Ok(body)
}

fn decode_xattrs(content: &[u8]) -> Result<BTreeSet<Vec<u8>>, Damaged> {
    let damaged = Damaged { what: "list of attributes" };
    let names = content.strip_suffix(&[0]).ok_or(damaged)?;
    let names = names.split(|byte| *byte == 0);
    names.map(|name| if name.is_empty() { Err(damaged) } else { Ok(name.to_vec()) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Charge;
    use proptest::prelude::*;

    fn body() -> impl Strategy<Value = Body> {
        prop_oneof![
            (any::<u32>(), 1..=u64::MAX, prop::collection::vec(any::<u32>(), 1..65)).prop_map(
                |(version, stripe_unit, targets)| Body::File(Layout {
                    version,
                    stripe_unit,
                    targets: targets.into_iter().map(TargetId).collect(),
                })
            ),
            any::<(u64, u64)>()
                .prop_map(|(next_cookie, entries)| Body::Directory { next_cookie, entries }),
            prop::collection::vec(any::<u8>(), 0..4096).prop_map(Body::Symlink),
            Just(Body::Special),
        ]
    }

    fn acl() -> Acl {
        let entries = [[1, 6], [4, 4], [32, 0]];
        let bytes = entries.map(|[tag, bits]| [tag, 0, bits, 0, 255, 255, 255, 255]);
        Acl::decode(bytes.as_flattened()).expect("valid")
    }

    #[test]
    fn attributes_are_sections_behind_the_body() {
        let mut inode = Inode::new(1, 0o010_640, 1, Time(0), Ino(1), Body::Special);
        inode.stored = None;
        let bare = inode.encode();
        assert_eq!((bare.len(), inode.attr(Ino(2)).extended), (104, false));
        inode.xattrs = [b"user.b".to_vec(), b"user.a".to_vec()].into();
        inode.access_acl = Some(acl());
        let names = [&[4, 0, 14, 0][..], b"user.a\0user.b\0"].concat();
        let list = [&[5, 0, 24, 0][..], &acl().encode()].concat();
        assert_eq!(inode.encode()[104..], [&names[..], &list].concat());
        assert!(inode.attr(Ino(2)).extended);
        let bad: [&[u8]; 4] = [&[4, 0, 0, 0], &[4, 0, 1, 0, 7], &[4, 0, 1, 0, 0], &list[..12]];
        for bad in bad {
            assert!(Inode::decode(&[&bare[..], bad].concat()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn stored_bytes_are_a_section_without_trailing_zeroes() {
        let mut inode = Inode::new(1, 0o010_640, 1, Time(0), Ino(1), Body::Special);
        assert_eq!(inode.encode()[104..], [16, 0, 0, 0]);
        let mut stored = StoredBytes::default();
        stored.take(&[(1, 5), (2, 9)], false);
        stored.take(&[(1, 4), (2, 0)], false);
        inode.stored = Some(stored.clone());
        let section = [&[16, 0, 16, 0][..], &[0; 8], &[4, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert_eq!(inode.encode()[104..], section);
        stored.take(&[(0, 7), (1, 3)], true);
        assert_eq!((stored.total(), stored.0), (11, vec![7, 4]));
        let bare = inode.encode()[..104].to_vec();
        for bad in [&[16, 0, 1, 0, 1][..], &[16, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
            assert!(Inode::decode(&[&bare[..], bad].concat()).is_err(), "{bad:?}");
        }
        // As it was before there were any.
        assert_eq!(Inode::decode(&bare).expect("sound").stored, None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn an_inode_reads_back(body in body(), numbers in any::<[u64; 6]>(), times in any::<[i64; 4]>(),
                               small in any::<[u32; 7]>(), acls in any::<(bool, bool)>(),
                               xattrs in prop::collection::btree_set(prop::collection::vec(1..=255u8, 1..9), 0..4),
                               stored in prop::option::of(prop::collection::vec((0..64u32, any::<u64>()), 0..9)),
                               other in prop::option::of(any::<[u8; 3]>())) {
            let inode = Inode {
                generation: numbers[0], size: numbers[1], change: numbers[2],
                parent: Ino(numbers[3]), components: numbers[4],
                mode: small[0], uid: small[1], gid: small[2], nlink: small[3], rdev: small[4],
                project: small[5], tenant: small[6],
                atime: Time(times[0]), mtime: Time(times[1]), ctime: Time(times[2]), btime: Time(times[3]),
                body,
                xattrs,
                access_acl: acls.0.then(acl),
                default_acl: acls.1.then(acl),
                stored: stored.map(|told| {
                    let mut stored = StoredBytes::default();
                    stored.take(&told, false);
                    stored
                }),
                other: other.map_or(Vec::new(), |bytes| [&[200, 0, 3, 0], &bytes[..]].concat()),
            };
            prop_assert_eq!(Charge::of_row(&inode.encode()), Charge::of(&inode));
            prop_assert_eq!(Inode::decode(&inode.encode()), Ok(inode));
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), sound in any::<bool>()) {
            if sound && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&[VERSION, 2, 0, 0]);
            }
            let _ = Inode::decode(&bytes);
        }
    }
}

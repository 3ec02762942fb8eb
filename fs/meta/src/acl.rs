//! POSIX access control lists: bytes, permission bits and what follows from one for the other.
//!
//! What always holds: a list has one entry for owner, owning group and others, an entry for a user or group at most
//! once each, and a mask if there is any of those; entries are in the order of their tags and numbers.
//!
//! The bytes are those of `linux/posix_acl_xattr.h`, version 2; an inode's section holds them without the version:
//!
//! ```text
//! | version:4 | entries: tag:2  permissions:2  uid or gid:4 ...
//! ```

/// The most entries, so that a value fits the page in which the kernel passes it.
const ENTRIES_MAX: usize = 511;
const ENTRY_BYTES: usize = 8;
const VERSION: [u8; 4] = 2u32.to_le_bytes();

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
/// In the place of a number where the tag needs none (ACL_UNDEFINED_ID).
const NOBODY: u32 = u32::MAX;

/// The permission bits of owner, group and others.
pub const PERMISSIONS: u32 = 0o777;

/// Bytes that are no valid list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    tag: u16,
    id: u32,
    permissions: u16,
}

impl Acl {
    /// The list in an attribute's value; none when that has no entries.
    pub fn from_value(value: &[u8]) -> Result<Option<Self>, Malformed> {
        match value.strip_prefix(&VERSION) {
            Some([]) => Ok(None),
            Some(entries) => Self::decode(entries).map(Some),
            None => Err(Malformed),
        }
    }

    /// The attribute's value.
    pub fn value(&self) -> Vec<u8> {
        let mut value = VERSION.to_vec();
        value.extend(self.encode());
        value
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (entries, rest) = bytes.as_chunks::<ENTRY_BYTES>();
        if !rest.is_empty() || entries.len() > ENTRIES_MAX {
            return Err(Malformed);
        }
        let mut entries: Vec<Entry> = entries.iter().map(|bytes| Entry::decode(*bytes)).collect();
        // As Linux has it: sorts of entries in order, those of one sort in any.
        if !entries.is_sorted_by_key(|entry| entry.tag) {
            return Err(Malformed);
        }
        entries.sort_unstable();
        let acl = Self { entries };
        let sound = acl.entries.iter().all(Entry::is_sound);
        let twice = |pair: &[Entry]| (pair[0].tag, pair[0].id) == (pair[1].tag, pair[1].id);
        let complete = [USER_OBJ, GROUP_OBJ, OTHER].into_iter().all(|tag| acl.has(tag));
        let masked = acl.has(MASK) || !acl.has(USER) && !acl.has(GROUP);
        if sound && !acl.entries.windows(2).any(twice) && complete && masked {
            Ok(acl)
        } else {
            Err(Malformed)
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        self.entries.iter().flat_map(Entry::encode).collect()
    }

    /// True when permission bits say all that the list says.
    pub fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    /// The permission bits of an inode with this access list: the group's are the mask, where there is one.
    pub fn mode(&self) -> u32 {
        let bits = |(tag, shift)| {
            let entry = self.entries.iter().find(|entry| entry.tag == tag);
            entry.map_or(0, |entry| u32::from(entry.permissions) << shift)
        };
        self.classes().into_iter().map(bits).sum()
    }

    /// The permission bits change, and what they stand for here with them.
    pub fn set_mode(&mut self, mode: u32) {
        for (tag, shift) in self.classes() {
            let of_class = self.entries.iter_mut().filter(|entry| entry.tag == tag);
            of_class.for_each(|entry| entry.permissions = (mode >> shift & 7) as u16);
        }
    }

    /// Which entry three bits of the mode are, and how far left they stand.
    fn classes(&self) -> [(u16, u32); 3] {
        let group = if self.has(MASK) { MASK } else { GROUP_OBJ };
        [(USER_OBJ, 6), (group, 3), (OTHER, 0)]
    }

    fn has(&self, tag: u16) -> bool {
        self.entries.iter().any(|entry| entry.tag == tag)
    }
}

impl Entry {
    fn decode([t0, t1, p0, p1, id @ ..]: [u8; ENTRY_BYTES]) -> Self {
        let tag = u16::from_le_bytes([t0, t1]);
        // Linux looks at no other number.
        let id = if is_named(tag) { u32::from_le_bytes(id) } else { NOBODY };
        Self { tag, id, permissions: u16::from_le_bytes([p0, p1]) }
    }

    fn encode(&self) -> [u8; ENTRY_BYTES] {
        let ([t0, t1], [p0, p1]) = (self.tag.to_le_bytes(), self.permissions.to_le_bytes());
        let [a, b, c, d] = self.id.to_le_bytes();
        [t0, t1, p0, p1, a, b, c, d]
    }

    fn is_sound(&self) -> bool {
        let tag = match self.tag {
            USER_OBJ | GROUP_OBJ | MASK | OTHER => true,
            tag => is_named(tag) && self.id != NOBODY,
        };
        tag && self.permissions <= 7
    }
}

/// Whether entries with this tag are of a user or group that they name.
fn is_named(tag: u16) -> bool {
    matches!(tag, USER | GROUP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let entries = entries
            .iter()
            .flat_map(|&(tag, permissions, id)| Entry { tag, id, permissions }.encode());
        VERSION.into_iter().chain(entries).collect()
    }

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        Acl::from_value(&value(entries)).expect("valid").expect("with entries")
    }

    const OWNER: (u16, u16, u32) = (USER_OBJ, 7, NOBODY);
    const OWNING_GROUP: (u16, u16, u32) = (GROUP_OBJ, 5, NOBODY);
    const OTHERS: (u16, u16, u32) = (OTHER, 1, NOBODY);

    #[test]
    fn only_lists_that_make_sense_are_taken() {
        assert_eq!(Acl::from_value(&VERSION), Ok(None));
        let minimal = acl(&[OWNER, OWNING_GROUP, OTHERS]);
        assert!(minimal.is_minimal());
        assert_eq!(minimal.mode(), 0o751);
        let (user, group, mask) = ((USER, 6, 1000), (GROUP, 4, 1000), (MASK, 4, NOBODY));
        let full = acl(&[OWNER, (USER, 6, 2000), user, OWNING_GROUP, group, mask, (OTHER, 1, 7)]);
        let sorted = [OWNER, user, (USER, 6, 2000), OWNING_GROUP, group, mask, OTHERS];
        assert_eq!(full.value(), value(&sorted));
        assert_eq!((full.mode(), full.is_minimal()), (0o741, false));
        let bad: [&[_]; 10] = [
            &[OWNER, OWNING_GROUP],
            &[OWNER, OTHERS, OWNING_GROUP],
            &[OWNER, OWNER, OWNING_GROUP, OTHERS],
            &[OWNER, user, OWNING_GROUP, OTHERS],
            &[OWNER, OWNING_GROUP, group, OTHERS],
            &[OWNER, user, (USER, 7, 1000), OWNING_GROUP, mask, OTHERS],
            &[OWNER, (USER, 7, NOBODY), OWNING_GROUP, mask, OTHERS],
            &[OWNER, OWNING_GROUP, mask, mask, OTHERS],
            &[OWNER, OWNING_GROUP, (OTHER, 8, NOBODY)],
            &[OWNER, OWNING_GROUP, OTHERS, (0x40, 7, NOBODY)],
        ];
        for bad in bad {
            assert_eq!(Acl::from_value(&value(bad)), Err(Malformed), "{bad:?}");
        }
        let good = value(&sorted);
        for bad in [&good[..good.len() - 1], &good[1..], &[], &[1, 0, 0, 0]] {
            assert_eq!(Acl::from_value(bad), Err(Malformed), "{bad:?}");
        }
        let users = |count| {
            let users = (0..count).map(|id| (USER, 7, id));
            let all = [OWNER].into_iter().chain(users).chain([OWNING_GROUP, mask, OTHERS]);
            Acl::from_value(&value(&all.collect::<Vec<_>>())).is_ok()
        };
        assert!(users(507) && !users(508));
    }

    #[test]
    fn the_mask_stands_for_the_groups_bits() {
        let mut acl = acl(&[OWNER, (USER, 7, 1), OWNING_GROUP, (MASK, 7, NOBODY), OTHERS]);
        acl.set_mode(0o640);
        assert_eq!(acl.mode(), 0o640);
        let expected = [
            (USER_OBJ, 6, NOBODY),
            (USER, 7, 1),
            OWNING_GROUP,
            (MASK, 4, NOBODY),
            (OTHER, 0, NOBODY),
        ];
        assert_eq!(acl.value(), value(&expected));
        let mut minimal = super::tests::acl(&[OWNER, OWNING_GROUP, OTHERS]);
        minimal.set_mode(0o123);
        assert_eq!(
            minimal.value(),
            value(&[(USER_OBJ, 1, NOBODY), (GROUP_OBJ, 2, NOBODY), (OTHER, 3, NOBODY)])
        );
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_again(bytes in prop::collection::vec(0..3u8, 0..64)) {
            if let Ok(acl) = Acl::decode(&bytes) {
                prop_assert_eq!(Acl::decode(&acl.encode()), Ok(acl));
            }
        }
    }
}

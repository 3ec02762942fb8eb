//! Who has used what, and how much he may.

use super::inode::SECTION_STORED;
use super::{Damaged, Fields, Inode, VERSION};
use levada_wire::attr::Time;
use smallvec::SmallVec;

/// What a subject is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SubjectKind {
    User,
    Group,
    /// Of a tree of directories.
    Project,
    Tenant,
}

/// Somebody, or something, for whom inodes and bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    pub kind: SubjectKind,
    pub id: u32,
}

/// The value of `U|kind|id|0`: what there is of a subject.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub inodes: u64,
    /// That extents of its files' objects hold.
    pub bytes: u64,
}

/// How much there may be; 0: any number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// For as long as one likes.
    pub soft: u64,
    /// At any time.
    pub hard: u64,
}

/// The value of `U|kind|id|1`: what a subject may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaRow {
    pub bytes: Limit,
    pub inodes: Limit,
    /// Since when there is more than `soft`; `Time(0)`: there is not.
    pub bytes_over_since: Time,
    pub inodes_over_since: Time,
    /// How long there may be, in seconds; 0: as of the default, or a week.
    pub bytes_grace_s: u32,
    pub inodes_grace_s: u32,
}

impl SubjectKind {
    pub const ALL: [Self; 4] = [Self::User, Self::Group, Self::Project, Self::Tenant];

    pub(crate) fn tag(self) -> u8 {
        match self {
            Self::User => b'u',
            Self::Group => b'g',
            Self::Project => b'p',
            Self::Tenant => b't',
        }
    }

    pub(crate) fn of_tag(tag: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.tag() == tag)
    }
}

impl Usage {
    pub(crate) fn encode(&self) -> [u8; 20] {
        let mut row = [0; 20];
        row[0] = VERSION;
        row[4..12].copy_from_slice(&self.inodes.to_le_bytes());
        row[12..].copy_from_slice(&self.bytes.to_le_bytes());
        row
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("usage", bytes)?;
        if fields.bytes(3)? != [0; 3] {
            return Err(fields.damaged());
        }
        let row = Self { inodes: fields.u64()?, bytes: fields.u64()? };
        fields.end()?;
        Ok(row)
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            inodes: self.inodes.wrapping_add(other.inodes),
            bytes: self.bytes.wrapping_add(other.bytes),
        }
    }

    pub(crate) fn minus(self, other: Self) -> Self {
        Self {
            inodes: self.inodes.wrapping_sub(other.inodes),
            bytes: self.bytes.wrapping_sub(other.bytes),
        }
    }
}

impl QuotaRow {
    pub(crate) fn encode(&self) -> [u8; 60] {
        let mut row = [0; 60];
        row[0] = VERSION;
        let fields = [
            self.bytes.soft,
            self.bytes.hard,
            self.inodes.soft,
            self.inodes.hard,
            self.bytes_over_since.0 as u64,
            self.inodes_over_since.0 as u64,
        ];
        for (place, field) in row[4..52].as_chunks_mut::<8>().0.iter_mut().zip(fields) {
            *place = field.to_le_bytes();
        }
        row[52..56].copy_from_slice(&self.bytes_grace_s.to_le_bytes());
        row[56..].copy_from_slice(&self.inodes_grace_s.to_le_bytes());
        row
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("quota", bytes)?;
        if fields.bytes(3)? != [0; 3] {
            return Err(fields.damaged());
        }
        let row = Self {
            bytes: Limit { soft: fields.u64()?, hard: fields.u64()? },
            inodes: Limit { soft: fields.u64()?, hard: fields.u64()? },
            bytes_over_since: Time(fields.i64()?),
            inodes_over_since: Time(fields.i64()?),
            bytes_grace_s: fields.u32()?,
            inodes_grace_s: fields.u32()?,
        };
        fields.end()?;
        Ok(row)
    }
}

/// For whom an inode counts, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    owners: [u32; 4],
    bytes: u64,
}

impl Charge {
    /// None where it counts for nobody.
    pub fn of(inode: &Inode) -> Option<Self> {
        let bytes = inode.stored.as_ref()?.total();
        Some(Self { owners: [inode.uid, inode.gid, inode.project, inode.tenant], bytes })
    }

    /// The same of a row, without taking all of it apart: this is asked at every change of an inode.
    pub fn of_row(row: &[u8]) -> Option<Self> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(row.get(at..at + 4)?.try_into().ok()?));
        let owners = [u32_at(16)?, u32_at(20)?, u32_at(88)?, u32_at(92)?];
        let mut rest = row.get(104..)?;
        while let [tag, _, low, high, behind @ ..] = rest {
            let length = usize::from(u16::from_le_bytes([*low, *high]));
            let (content, next) = behind.split_at_checked(length)?;
            if *tag == SECTION_STORED {
                let words = content.as_chunks::<8>().0.iter();
                let bytes =
                    words.fold(0, |sum: u64, word| sum.saturating_add(u64::from_le_bytes(*word)));
                return Some(Self { owners, bytes });
            }
            rest = next;
        }
        None
    }

    /// Project and tenant 0 are none.
    pub fn subjects(&self) -> SmallVec<[Subject; 4]> {
        let all = SubjectKind::ALL.into_iter().zip(self.owners);
        let all = all.map(|(kind, id)| Subject { kind, id });
        all.filter(|subject| {
            subject.id != 0 || matches!(subject.kind, SubjectKind::User | SubjectKind::Group)
        })
        .collect()
    }

    pub fn usage(&self) -> Usage {
        Usage { inodes: 1, bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_and_limits_read_back_and_odd_rows_do_not() {
        let usage = Usage { inodes: 3, bytes: u64::MAX };
        assert_eq!(Usage::decode(&usage.encode()), Ok(usage));
        let row = QuotaRow {
            bytes: Limit { soft: 1, hard: 2 },
            inodes: Limit { soft: 3, hard: 4 },
            bytes_over_since: Time(-5),
            inodes_over_since: Time(6),
            bytes_grace_s: 7,
            inodes_grace_s: 8,
        };
        assert_eq!(QuotaRow::decode(&row.encode()), Ok(row));
        for length in 0..60 {
            assert!(QuotaRow::decode(&row.encode()[..length]).is_err());
            assert!(
                length == 20
                    || Usage::decode(&[&[1, 0, 0, 0], &[9; 56][..]].concat()[..length]).is_err()
            );
        }
        assert!(Usage::decode(&[1; 20]).is_err() && QuotaRow::decode(&[1; 60]).is_err());
        assert!(SubjectKind::ALL.into_iter().all(|k| SubjectKind::of_tag(k.tag()) == Some(k)));
    }
}

//! Rows beside the tree: what file system this is, counters, clients, replies, sessions.

use super::{Damaged, Fields, VERSION};
use levada_base::ids::{BootVerifier, Ino};
use smallvec::SmallVec;

/// The value of `M|0`: fixed when the file system is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    pub uuid: [u8; 16],
    /// Number of this metadata target within the file system: the upper 16 bits of every inode
    /// number that it gives out.
    pub target: u16,
    /// What new inodes get as generation; raised by whoever restores the target from a copy, so
    /// that numbers given out twice still differ.
    pub generation: u64,
    pub stripe_count: u32,
    pub stripe_unit: u64,
    pub inodes_max: u64,
    pub name: String,
}

/// The value of `M|1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// The next inode's number.
    pub next_ino: u64,
    /// The next client's number.
    pub next_client: u64,
    /// Inodes that exist, those still to be destroyed included.
    pub inodes: u64,
    /// Those to be destroyed, and what their objects hold, as far as that was told.
    pub doomed_inodes: u64,
    pub doomed_bytes: u64,
}

/// The value of `M|2`: a client may have been told what is not durable (`tail`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailRow {
    /// The holder.
    pub client: u64,
    /// The life of the target in which it became the holder.
    pub life: BootVerifier,
    /// Inode numbers from here on were told to nobody.
    pub numbers: u64,
}

/// The value of `C|client`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientRow {
    pub uuid: [u8; 16],
    /// The last life of the target in which the client held the tail and of which nothing is
    /// missing; 0: none.
    pub settled: BootVerifier,
    /// It may hold locks: after a restart nobody is given one before it has come back, or fallen silent.
    pub may_lock: bool,
    /// It may hold leases.
    pub may_lease: bool,
}

/// The value of `R|client|slot`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyRow {
    pub sequence: u64,
    /// The message as it was encoded (postcard).
    pub reply: Vec<u8>,
}

/// The value of `S|ino|client`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Session {
    /// The client may have changed the objects.
    pub writing: bool,
    /// Another client has cut the file since: the writer does not know the size by itself.
    pub shared: bool,
    /// And no commit of this client has been answered since: one under way may bring a size from before.
    pub overtaken: bool,
    /// Others had sessions at the same time: what each says of stored bytes may be from before what the other wrote, so
    /// the objects are asked in the end. Of client 0: they are to be asked.
    pub crowd: bool,
    /// The objects are still to be cut to this size.
    pub cut: Option<u64>,
    /// Bytes that the client may add and has not told of yet.
    pub grant: u64,
}

/// The value of `X|ino`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoomedRow {
    /// What the objects held when the inode was released.
    pub bytes: u64,
}

impl Superblock {
    pub fn encode(&self) -> Vec<u8> {
        let mut row = vec![VERSION, 0];
        row.extend_from_slice(&self.target.to_le_bytes());
        row.extend_from_slice(&self.stripe_count.to_le_bytes());
        row.extend_from_slice(&self.uuid);
        row.extend_from_slice(&self.generation.to_le_bytes());
        row.extend_from_slice(&self.stripe_unit.to_le_bytes());
        row.extend_from_slice(&self.inodes_max.to_le_bytes());
        row.extend_from_slice(self.name.as_bytes());
        row
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("superblock", bytes)?;
        fields.u8()?;
        Ok(Self {
            target: fields.u16()?,
            stripe_count: fields.u32()?,
            uuid: fields.bytes(16)?.try_into().expect("16 bytes"),
            generation: fields.u64()?,
            stripe_unit: fields.u64()?,
            inodes_max: fields.u64()?,
            name: String::from_utf8(fields.rest.to_vec()).map_err(|_| fields.damaged())?,
        })
    }

    /// The file system's number in object names.
    pub fn fs(&self) -> u64 {
        u64::from_be_bytes(self.uuid[..8].try_into().expect("8 bytes"))
    }
}

impl Counters {
    pub fn encode(&self) -> [u8; 41] {
        let Self { next_ino, next_client, inodes, doomed_inodes, doomed_bytes } = *self;
        let mut row = [VERSION; 41];
        let fields = [next_ino, next_client, inodes, doomed_inodes, doomed_bytes];
        for (place, field) in row[1..].as_chunks_mut::<8>().0.iter_mut().zip(fields) {
            *place = field.to_le_bytes();
        }
        row
    }

    /// False of a row from before deleted inodes were counted.
    pub fn has_doomed(row: &[u8]) -> bool {
        row.len() > 25
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("counters", bytes)?;
        let (next_ino, next_client, inodes) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (doomed_inodes, doomed_bytes) =
            if Self::has_doomed(bytes) { (fields.u64()?, fields.u64()?) } else { (0, 0) };
        fields.end()?;
        Ok(Self { next_ino, next_client, inodes, doomed_inodes, doomed_bytes })
    }
}

impl TailRow {
    pub fn encode(&self) -> [u8; 25] {
        let mut row = [VERSION; 25];
        row[1..9].copy_from_slice(&self.client.to_le_bytes());
        row[9..17].copy_from_slice(&self.life.0.to_le_bytes());
        row[17..].copy_from_slice(&self.numbers.to_le_bytes());
        row
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("tail", bytes)?;
        let (client, life, numbers) = (fields.u64()?, fields.u64()?, fields.u64()?);
        fields.end()?;
        Ok(Self { client, life: BootVerifier(life), numbers })
    }
}

/// Version 1 had no flags.
const CLIENT_VERSION: u8 = 2;
const MAY_LOCK: u8 = 1;
const MAY_LEASE: u8 = 2;

impl ClientRow {
    pub fn encode(&self) -> [u8; 26] {
        let mut row = [CLIENT_VERSION; 26];
        row[1..17].copy_from_slice(&self.uuid);
        row[17..25].copy_from_slice(&self.settled.0.to_le_bytes());
        row[25] = u8::from(self.may_lock) * MAY_LOCK + u8::from(self.may_lease) * MAY_LEASE;
        row
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let (mut fields, version) = Fields::upto("client", CLIENT_VERSION, bytes)?;
        let uuid = fields.bytes(16)?.try_into().expect("16 bytes");
        let settled = BootVerifier(fields.u64()?);
        let flags = if version == 1 { 0 } else { fields.u8()? };
        fields.end()?;
        if flags & !(MAY_LOCK | MAY_LEASE) != 0 {
            return Err(fields.damaged());
        }
        let (may_lock, may_lease) = (flags & MAY_LOCK != 0, flags & MAY_LEASE != 0);
        Ok(Self { uuid, settled, may_lock, may_lease })
    }
}

impl ReplyRow {
    pub fn encode(sequence: u64, reply: &[u8]) -> Vec<u8> {
        let mut row = Vec::with_capacity(9 + reply.len());
        row.push(VERSION);
        row.extend_from_slice(&sequence.to_le_bytes());
        row.extend_from_slice(reply);
        row
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("reply", bytes)?;
        Ok(Self { sequence: fields.u64()?, reply: fields.rest.to_vec() })
    }
}

const WRITING: u8 = 1;
const CUT: u8 = 2;
const SHARED: u8 = 4;
const OVERTAKEN: u8 = 8;
const GRANT: u8 = 16;
const CROWD: u8 = 32;

impl Session {
    pub fn encode(&self) -> SmallVec<[u8; 18]> {
        let flags = u8::from(self.writing) * WRITING
            + u8::from(self.cut.is_some()) * CUT
            + u8::from(self.shared) * SHARED
            + u8::from(self.overtaken) * OVERTAKEN
            + u8::from(self.grant > 0) * GRANT
            + u8::from(self.crowd) * CROWD;
        let mut row = SmallVec::from_slice(&[VERSION, flags]);
        row.extend_from_slice(&self.cut.unwrap_or(0).to_le_bytes());
        if self.grant > 0 {
            row.extend_from_slice(&self.grant.to_le_bytes());
        }
        row
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("write session", bytes)?;
        let flags = fields.u8()?;
        let cut = fields.u64()?;
        let grant = if flags & GRANT != 0 { fields.u64()? } else { 0 };
        fields.end()?;
        if flags & !(WRITING | CUT | SHARED | OVERTAKEN | GRANT | CROWD) != 0 {
            return Err(fields.damaged());
        }
        Ok(Self {
            writing: flags & WRITING != 0,
            shared: flags & SHARED != 0,
            overtaken: flags & OVERTAKEN != 0,
            crowd: flags & CROWD != 0,
            cut: (flags & CUT != 0).then_some(cut),
            grant,
        })
    }
}

/// The value of `O|ino`: an inode without a name stays, because it is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OrphanRow {
    /// It never had a name, and may be given one.
    pub may_get_name: bool,
}

const MAY_GET_NAME: u8 = 1;

impl OrphanRow {
    pub fn encode(self) -> &'static [u8] {
        if self.may_get_name { &[VERSION, MAY_GET_NAME] } else { &[VERSION] }
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let fields = Fields::new("orphan", bytes)?;
        match fields.rest {
            [] => Ok(Self { may_get_name: false }),
            [MAY_GET_NAME] => Ok(Self { may_get_name: true }),
            _ => Err(fields.damaged()),
        }
    }
}

const DOOMED_VERSION: u8 = 2;

impl DoomedRow {
    pub fn encode(&self) -> [u8; 9] {
        let mut row = [DOOMED_VERSION; 9];
        row[1..].copy_from_slice(&self.bytes.to_le_bytes());
        row
    }

    /// Version 1 is a [`MARK`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let (mut fields, version) = Fields::upto("destroy", DOOMED_VERSION, bytes)?;
        let bytes = if version == 1 { 0 } else { fields.u64()? };
        fields.end()?;
        Ok(Self { bytes })
    }
}

/// The value of `X|ino` of inodes that nobody knows: nothing but the version.
pub const MARK: &[u8] = &[VERSION];

/// The first inode number of a metadata target, after the root.
pub fn first_ino(target: u16) -> u64 {
    (u64::from(target) << 48) | (Ino::ROOT.0 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orphans_row_is_as_long_as_what_it_says() {
        for (may_get_name, bytes) in [(false, &[1][..]), (true, &[1, 1])] {
            let row = OrphanRow { may_get_name };
            assert_eq!((row.encode(), OrphanRow::decode(bytes)), (bytes, Ok(row)));
        }
        for bad in [&[][..], &[2], &[1, 0], &[1, 2], &[1, 1, 1]] {
            assert!(OrphanRow::decode(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn counters_and_doomed_inodes_of_before_hold_no_bytes() {
        let old: Vec<u8> = [&[1][..], &[7_u64, 8, 9].map(u64::to_le_bytes).concat()].concat();
        let (doomed_inodes, doomed_bytes) = (0, 0);
        let row = Counters { next_ino: 7, next_client: 8, inodes: 9, doomed_inodes, doomed_bytes };
        assert_eq!(Counters::decode(&old), Ok(row));
        let row = Counters { doomed_inodes: 3, doomed_bytes: 4, ..row };
        assert_eq!((row.encode().len(), Counters::decode(&row.encode())), (41, Ok(row)));
        assert!(Counters::decode(&row.encode()[..33]).is_err());
        assert_eq!(DoomedRow::decode(MARK), Ok(DoomedRow { bytes: 0 }));
        let row = DoomedRow { bytes: u64::MAX };
        assert_eq!(DoomedRow::decode(&row.encode()), Ok(row));
        assert!(DoomedRow::decode(&row.encode()[..8]).is_err());
        assert!(DoomedRow::decode(&[3]).is_err());
    }

    #[test]
    fn a_clients_row_of_version_1_reads_as_one_without_flags() {
        let mut old = vec![1];
        old.extend([7; 16]);
        old.extend(9_u64.to_le_bytes());
        let row = ClientRow {
            uuid: [7; 16],
            settled: BootVerifier(9),
            may_lock: false,
            may_lease: false,
        };
        assert_eq!(ClientRow::decode(&old), Ok(row));
        for flags in 0..4 {
            let row = ClientRow { may_lock: flags & 1 != 0, may_lease: flags & 2 != 0, ..row };
            assert_eq!(ClientRow::decode(&row.encode()), Ok(row));
        }
        let mut unknown = row.encode();
        unknown[25] = 4;
        assert!(ClientRow::decode(&unknown).is_err());
        assert!(ClientRow::decode(&row.encode()[..25]).is_err());
        old.push(0);
        assert!(ClientRow::decode(&old).is_err());
    }
}

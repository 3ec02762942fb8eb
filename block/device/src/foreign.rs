//! Tells a drive that nobody uses from one that holds somebody's data, so that formatting does not
//! destroy it.
//!
//! What always holds: a drive is nobody's only when both its ends read as one that was never
//! written or was discarded. Signatures give what is there a name; without one it is kept as well.

use crate::{BlockError, Device, label};
use levada_base::BufMut;
use levada_base::units::{BLOCK_BYTES, MIB, round_down};
use std::fmt;

/// Bytes looked at from either end: whatever is put on a drive leaves something there, and what
/// formatting overwrites at once lies there.
const END_BYTES: u64 = MIB;

/// The magic of an md superblock, little-endian.
const MD_MAGIC: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();

/// A good label never gets here: who asks has read it.
const BAD_LABEL: &str = "a label of Levada, damaged or of another version";
/// The first bytes of the magic of DRBD's metadata, big-endian; the last one is its version.
const DRBD_MAGIC: [u8; 3] = [0x83, 0x74, 0x02];

/// Name, offset from the start of the drive, and the bytes found there.
const AT_START: &[(&str, usize, &[u8])] = &[
    ("an XFS file system", 0, b"XFSB"),
    ("a btrfs file system", 65_600, b"_BHRfS_M"),
    ("an F2FS file system", 1024, &0xf2f5_2010_u32.to_le_bytes()),
    ("a ReFS file system", 0, b"\0\0\0ReFS\0"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("a FAT file system", 54, b"FAT"),
    ("a FAT file system", 82, b"FAT32"),
    ("a squashfs file system", 0, b"hsqs"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("Linux swap space", 4086, b"SWAPSPACE2"),
    ("Linux swap space", 4086, b"SWAP-SPACE"),
    ("an LVM physical volume", 0, b"LABELONE"),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("an LVM physical volume", 1024, b"LABELONE"),
    ("an LVM physical volume", 1536, b"LABELONE"),
    ("a Stratis pool member", 516, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("a VDO volume", 0, b"dmvdo001"),
    ("an md RAID member (1.1)", 0, &MD_MAGIC),
    ("an md RAID member (1.2)", 4096, &MD_MAGIC),
    ("a bcache device", 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("a Ceph OSD", 0, b"bluestore block device"),
    (
        "a bcachefs file system",
        4120,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
    ),
    ("an HFS+ file system", 1024, b"H+"),
    ("an HFS+ file system", 1024, b"HX"),
    ("an APFS container", 32, b"NXSB"),
    ("a JFS file system", 32_768, b"JFS1"),
    ("a ReiserFS file system", 65_588, b"ReIsEr"),
    ("an ISO 9660 file system", 32_769, b"CD001"),
    // Without an ISO bridge the volume recognition sequence begins so (ECMA-167 2/9.2).
    ("a UDF file system", 32_769, b"BEA01"),
    ("a GFS2 file system", 65_536, &0x0116_1970_u32.to_be_bytes()),
    ("an OCFS2 file system", 1024, b"OCFSV2"),
    ("an OCFS2 file system", 2048, b"OCFSV2"),
    ("an OCFS2 file system", 4096, b"OCFSV2"),
    ("an OCFS2 file system", 8192, b"OCFSV2"),
    ("an EROFS file system", 1024, &0xe0f5_e1e2_u32.to_le_bytes()),
    ("a UFS1 file system", 9564, &0x0001_1954_u32.to_le_bytes()),
    ("a UFS2 file system", 66_908, &0x1954_0119_u32.to_le_bytes()),
    ("an Oracle ASM disk", 32, b"ORCLDISK"),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    (BAD_LABEL, 0, &label::MAGIC),
    // Of an array of its own, made over whole drives (docs/array.md). Either superblock may be the torn one.
    ("a member of an array of Levada", 0, b"LVDARRAY"),
    ("a member of an array of Levada", 4096, b"LVDARRAY"),
    ("a NILFS2 file system", 1030, &[0x34, 0x34]),
    // Last: the longer names above say more, and several of them also end a boot sector so.
    ("an ext2, ext3 or ext4 file system", 1080, &[0x53, 0xef]),
];

/// What formatting a drive would destroy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// Named by its signature.
    Known(&'static str),
    /// Nobody knows whose; `at` is where the first byte of it lies.
    Unknown { at: u64 },
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Foreign::Known(name) => f.write_str(name),
            Foreign::Unknown { at } => write!(f, "data of an unknown kind, from byte {at} on"),
        }
    }
}

/// Says what a drive carries, or `None` when both its ends are blank.
///
/// # Errors
///
/// When the drive cannot be read.
pub async fn find_foreign(device: &dyn Device) -> Result<Option<Foreign>, BlockError> {
    let capacity = round_down(device.info().capacity_bytes, BLOCK_BYTES);
    let end_bytes = capacity.min(END_BYTES);
    let tail_at = capacity - end_bytes;
    let head = device.read(0, BufMut::zeroed(end_bytes as usize).into_vec()).await?;
    let tail = device.read(tail_at, BufMut::zeroed(end_bytes as usize).into_vec()).await?;
    if let Some(name) = recognise(&head[0], &tail[0], device.info().capacity_bytes - tail_at) {
        return Ok(Some(Foreign::Known(name)));
    }
    let in_head = first_written(&head[0]);
    let in_tail = || Some(tail_at + first_written(&tail[0])?);
    Ok(in_head.or_else(in_tail).map(|at| Foreign::Unknown { at }))
}

/// The first byte that somebody has written. What was never written, or was discarded, reads as
/// zeroes; on some flash drives and after an erase as ones throughout.
fn first_written(bytes: &[u8]) -> Option<u64> {
    if bytes.iter().all(|byte| *byte == 0xff) {
        return None;
    }
    bytes.iter().position(|byte| *byte != 0).map(|at| at as u64)
}

/// Names what has a signature. `tail` starts `to_end` bytes before the end of the drive.
fn recognise(head: &[u8], tail: &[u8], to_end: u64) -> Option<&'static str> {
    let holds = |bytes: &[u8], at: usize, magic: &[u8]| {
        bytes.get(at..).is_some_and(|rest| rest.starts_with(magic))
    };
    let known = AT_START.iter().find(|(_, at, magic)| holds(head, *at, magic));
    if let Some((name, _, _)) = known {
        return Some(name);
    }
    // ZFS: an array of uberblocks, each in a slot of at least 1 KiB, in either byte order.
    let zfs = 0x00ba_b10c_u64;
    let uberblocks = head.get(128 << 10..).unwrap_or(&[]);
    let is_zfs =
        |slot: &[u8]| slot.starts_with(&zfs.to_le_bytes()) || slot.starts_with(&zfs.to_be_bytes());
    if uberblocks.chunks(1024).any(is_zfs) {
        return Some("a ZFS pool member");
    }
    // Counted from the end. md 1.0: 8 KiB before it, on a multiple of 4 KiB; md 0.90: on the
    // last multiple of 64 KiB that leaves 64 KiB. GPT keeps a copy in the last sector.
    let before_end = |bytes: u64| to_end.checked_sub(bytes).map(|at| at as usize);
    if before_end(8 << 10).is_some_and(|at| holds(tail, at & !4095, &MD_MAGIC)) {
        return Some("an md RAID member (1.0)");
    }
    if (0..tail.len()).step_by(4096).any(|at| holds(tail, at, &MD_MAGIC)) {
        return Some("an md RAID member (0.90)");
    }
    let backup = [512, 4096].into_iter().filter_map(before_end);
    if backup.into_iter().any(|at| holds(tail, at, b"EFI PART")) {
        return Some("a GPT partition table");
    }
    // DRBD's internal metadata: its last block, after sizes, generations and flags.
    if before_end(4096).is_some_and(|at| holds(tail, at + 60, &DRBD_MAGIC)) {
        return Some("a DRBD device");
    }
    if before_end(4096).is_some_and(|at| holds(tail, at, &label::MAGIC)) {
        return Some(BAD_LABEL);
    }
    // A master boot record: the signature, and at least one partition of a type.
    if holds(head, 510, &[0x55, 0xaa]) {
        let partition_types = [450, 466, 482, 498];
        let partitioned = partition_types.iter().any(|at| head.get(*at).is_some_and(|t| *t != 0));
        return Some(if partitioned { "an MBR partition table" } else { "a boot sector" });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(at: usize, bytes: &[u8]) -> Option<&'static str> {
        let mut head = vec![0; END_BYTES as usize];
        head[at..at + bytes.len()].copy_from_slice(bytes);
        recognise(&head, &vec![0; END_BYTES as usize], END_BYTES)
    }

    #[test]
    fn an_empty_drive_is_nobodys() {
        assert_eq!(with(0, &[]), None);
        assert_eq!(recognise(&[], &[], 0), None);
    }

    #[test]
    fn a_discarded_end_is_blank_and_a_single_byte_is_not() {
        let mut end = vec![0xff; 4096];
        assert_eq!(first_written(&end), None);
        end[4095] = 0xfe;
        assert_eq!(first_written(&end), Some(0));
        end.fill(0);
        assert_eq!(first_written(&end), None);
        end[4095] = 1;
        assert_eq!(first_written(&end), Some(4095));
        assert_eq!(first_written(&[]), None);
    }

    #[test]
    fn known_signatures_are_named() {
        for (name, at, magic) in AT_START {
            assert_eq!(with(*at, magic), Some(*name));
        }
        assert_eq!(with(131 << 10, &0x00ba_b10c_u64.to_le_bytes()), Some("a ZFS pool member"));
        assert_eq!(with(510, &[0x55, 0xaa]), Some("a boot sector"));
        let mut record = [0; 62];
        record[0] = 0x83;
        record[60..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(with(450, &record), Some("an MBR partition table"));
    }

    #[test]
    fn superblocks_at_the_end_are_found() {
        let head = vec![0; END_BYTES as usize];
        for (before_end, name) in
            [(8 << 10, "an md RAID member (1.0)"), (64 << 10, "an md RAID member (0.90)")]
        {
            let mut tail = vec![0; END_BYTES as usize];
            let at = tail.len() - before_end;
            tail[at..at + 4].copy_from_slice(&MD_MAGIC);
            assert_eq!(recognise(&head, &tail, END_BYTES), Some(name));
        }
        for (before_end, magic, name) in [
            (512, &b"EFI PART"[..], "a GPT partition table"),
            (4096 - 60, &DRBD_MAGIC, "a DRBD device"),
            (4096, &label::MAGIC, BAD_LABEL),
        ] {
            let mut tail = vec![0; END_BYTES as usize];
            let at = tail.len() - before_end;
            tail[at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(recognise(&head, &tail, END_BYTES), Some(name));
        }
    }
}

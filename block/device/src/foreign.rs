//! Recognises what others have written on a drive, so that formatting does not destroy it.

use crate::{BlockError, Device};
use levada_base::BufMut;
use levada_base::units::{BLOCK_BYTES, KIB, round_down};

/// Bytes looked at from the start of a drive: up to the ZFS uberblocks.
const HEAD_BYTES: u64 = 256 * KIB;
/// Bytes looked at before its end: up to the md superblock of version 0.90.
const TAIL_BYTES: u64 = 128 * KIB;

/// The magic of an md superblock, little-endian.
const MD_MAGIC: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();

/// Name, offset from the start of the drive, and the bytes found there.
const AT_START: &[(&str, usize, &[u8])] = &[
    ("an XFS file system", 0, b"XFSB"),
    ("a btrfs file system", 65_600, b"_BHRfS_M"),
    ("an F2FS file system", 1024, &0xf2f5_2010_u32.to_le_bytes()),
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
    ("an Oracle ASM disk", 32, b"ORCLDISK"),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    // Last: the longer names above say more, and several of them also end a boot sector so.
    ("an ext2, ext3 or ext4 file system", 1080, &[0x53, 0xef]),
];

/// Names what a drive carries, or `None` when nothing known is there.
///
/// # Errors
///
/// When the drive cannot be read.
pub async fn find_foreign(device: &dyn Device) -> Result<Option<&'static str>, BlockError> {
    let capacity = round_down(device.info().capacity_bytes, BLOCK_BYTES);
    let head_bytes = capacity.min(HEAD_BYTES);
    let head = device.read(0, BufMut::zeroed(head_bytes as usize).into_vec()).await?;
    let tail_bytes = capacity.min(TAIL_BYTES);
    let tail_at = capacity - tail_bytes;
    let tail = device.read(tail_at, BufMut::zeroed(tail_bytes as usize).into_vec()).await?;
    Ok(recognise(&head[0], &tail[0], device.info().capacity_bytes - tail_at))
}

/// `tail` starts `to_end` bytes before the end of the drive.
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
        let mut head = vec![0; HEAD_BYTES as usize];
        head[at..at + bytes.len()].copy_from_slice(bytes);
        recognise(&head, &vec![0; TAIL_BYTES as usize], TAIL_BYTES)
    }

    #[test]
    fn an_empty_drive_is_nobodys() {
        assert_eq!(with(0, &[]), None);
        assert_eq!(recognise(&[], &[], 0), None);
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
        let head = vec![0; HEAD_BYTES as usize];
        for (before_end, name) in
            [(8 << 10, "an md RAID member (1.0)"), (64 << 10, "an md RAID member (0.90)")]
        {
            let mut tail = vec![0; TAIL_BYTES as usize];
            let at = tail.len() - before_end;
            tail[at..at + 4].copy_from_slice(&MD_MAGIC);
            assert_eq!(recognise(&head, &tail, TAIL_BYTES), Some(name));
        }
        let mut tail = vec![0; TAIL_BYTES as usize];
        let at = tail.len() - 512;
        tail[at..at + 8].copy_from_slice(b"EFI PART");
        assert_eq!(recognise(&head, &tail, TAIL_BYTES), Some("a GPT partition table"));
    }
}

//! Files as large as a file can be: 8 EiB less a byte, of which next to nothing is stored.

use crate::{errno, mounted, remount};
use rustix::fs::{FallocateFlags, SeekFrom, copy_file_range, fallocate, fstat, seek};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// No byte lies at it or beyond.
const END: u64 = i64::MAX as u64;
/// `O_DIRECT` wants whole blocks of memory and of the file.
const BLOCK: usize = 4096;

fn block() -> Vec<u8> {
    (0..BLOCK).map(|at| (at % 251) as u8 | 1).collect()
}

/// The last block, which has a byte less than others.
fn last(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK - 1];
    file.read_exact_at(&mut bytes, END - (BLOCK as u64 - 1)).expect("read");
    bytes
}

#[test]
fn a_file_reaches_to_8_eib() {
    let Some(cluster) = mounted("far") else { return };
    let path = cluster.mnt().join("file");
    let open = || OpenOptions::new().read(true).write(true).open(&path).expect("there");
    fs::write(&path, "at the beginning").expect("made");
    let file = open();
    file.set_len(END).expect("as large as can be");
    let size = |file: &File| file.metadata().expect("there").len();
    assert_eq!(size(&file), END);
    assert_eq!(last(&file), vec![0; BLOCK - 1], "a hole");

    // Up to the last byte, and not a byte further: what reaches beyond is no offset to the kernel.
    let bytes = block();
    file.write_all_at(&bytes[..100], END - 100).expect("up to the end");
    assert_eq!(errno(file.write_at(&bytes[..11], END - 10)), Errno::INVAL);
    assert_eq!(errno(file.read_at(&mut [0; 11], END - 10)), Errno::INVAL);
    let mut appended = OpenOptions::new().append(true).open(&path).expect("opened");
    assert_eq!(errno(appended.write(b"more")), Errno::FBIG);
    drop(appended);
    let mut expected = vec![0; BLOCK - 1 - 100];
    expected.extend_from_slice(&bytes[..100]);
    assert_eq!(last(&file), expected);
    file.sync_all().expect("durable");
    drop(file);
    remount(&cluster);
    let file = open();
    assert_eq!((size(&file), last(&file)), (END, expected.clone()));

    // Beside the cache.
    let mut direct = OpenOptions::new();
    let direct = direct.read(true).write(true).custom_flags(libc::O_DIRECT).open(&path);
    let direct = direct.expect("opened");
    let far = END - (BLOCK as u64 - 1) - 8 * BLOCK as u64;
    let mut room = vec![0; 3 * BLOCK];
    let start = room.as_ptr().align_offset(BLOCK);
    let aligned = &mut room[start..start + BLOCK];
    aligned.copy_from_slice(&bytes);
    assert_eq!(direct.write_at(aligned, far).expect("written"), BLOCK);
    aligned.fill(0);
    assert_eq!(direct.read_at(aligned, far).expect("read"), BLOCK);
    assert!(*aligned == bytes);
    let mut found = vec![0; BLOCK];
    file.read_exact_at(&mut found, far).expect("cached after direct");
    assert!(found == bytes);

    // What is stored, and what is not.
    let at = |from| seek(&file, from);
    assert_eq!(at(SeekFrom::Hole(0)), Ok(16));
    assert_eq!(at(SeekFrom::Data(16)), Ok(far));
    assert_eq!(at(SeekFrom::Hole(far)), Ok(far + BLOCK as u64));
    assert_eq!(at(SeekFrom::Data(far + BLOCK as u64)), Ok(END - 100));
    assert_eq!(at(SeekFrom::Hole(END - 100)), Ok(END));
    assert_eq!(at(SeekFrom::Data(END)), Err(Errno::NXIO));
    assert_eq!(at(SeekFrom::End(0)), Ok(END));
    assert_eq!(at(SeekFrom::End(-1)), Ok(END - 1));
    let stat = fstat(&file).expect("there");
    assert_eq!(stat.st_blocks as u64, END.div_ceil(512));

    // Ranges at the end.
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, END - 50, 50).expect("a hole");
    fallocate(&file, FallocateFlags::ZERO_RANGE, END - 60, 60).expect("zeroes");
    expected[BLOCK - 1 - 60..].fill(0);
    assert_eq!(last(&file), expected);
    assert_eq!(at(SeekFrom::Hole(END - 100)), Ok(END - 60));
    let beyond = fallocate(&file, FallocateFlags::ZERO_RANGE, END - 60, 61);
    assert_eq!(beyond, Err(Errno::FBIG));
    for mode in [FallocateFlags::empty(), FallocateFlags::KEEP_SIZE] {
        // It is there already, so it needs no room.
        fallocate(&file, mode, 0, END).expect("nothing is reserved");
    }
    let (mut from, mut to) = (END - 100, END - 40);
    let copied = copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 40);
    assert_eq!(copied, Ok(40));
    expected.copy_within(BLOCK - 1 - 100..BLOCK - 1 - 60, BLOCK - 1 - 40);
    assert_eq!(last(&file), expected);
    let (mut from, mut to) = (0, END - 5);
    let beyond = copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 16);
    assert_eq!(beyond, Ok(5), "up to the end");
    expected[BLOCK - 6..].copy_from_slice(b"at th");
    drop((file, direct));
    remount(&cluster);
    let file = open();
    assert_eq!((size(&file), last(&file)), (END, expected));
    cluster.ok(&["fsck"]);

    // Made short in the middle of nothing, then of something; what was cut does not come back.
    file.set_len(END / 2).expect("shorter");
    file.set_len(far + 10).expect("longer");
    file.set_len(END).expect("longer");
    assert_eq!(seek(&file, SeekFrom::Data(16)), Err(Errno::NXIO));
    assert_eq!(last(&file), vec![0; BLOCK - 1]);
    file.set_len(9).expect("short");
    drop(file);
    assert_eq!(fs::read(&path).expect("read"), b"at the be");
    fs::remove_file(&path).expect("removed");
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
}

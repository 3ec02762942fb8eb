//! The codec against messages put together by hand from the ABI's structures.

use std::time::Duration;

use levada_base::Buf;
use levada_fuse::codec::operation::{CopyArgs, LockArgs, OpenArgs, ReleaseArgs};
use levada_fuse::codec::{
    Attr, Caller, Entry, Errno, FileLock, InitFlags, InitRequest, Opcode, OpenReply,
    OpenReplyFlags, Operation, ParseError, ReadArgs, Reply, Request, SetAttr, SetTime, StatFs,
    Statx, Time, WRITE_DATA_OFFSET, WriteArgs,
};
use proptest::prelude::*;

/// A message, field by field.
#[derive(Default)]
struct Wire(Vec<u8>);

impl Wire {
    fn u16(mut self, field: u16) -> Self {
        self.0.extend(field.to_ne_bytes());
        self
    }

    fn u32(mut self, field: u32) -> Self {
        self.0.extend(field.to_ne_bytes());
        self
    }

    fn u64(mut self, field: u64) -> Self {
        self.0.extend(field.to_ne_bytes());
        self
    }

    fn bytes(mut self, field: &[u8]) -> Self {
        self.0.extend(field);
        self
    }

    fn text(self, field: &[u8]) -> Self {
        self.bytes(field).bytes(b"\0")
    }
}

fn message(opcode: u32, arguments: &[u8]) -> Vec<u8> {
    let len = 40 + arguments.len() as u32;
    let header = Wire::default().u32(len).u32(opcode).u64(77).u64(5);
    header.u32(1000).u32(100).u32(4242).u16(0).u16(0).bytes(arguments).0
}

/// Random values to fill the fields of any operation with.
#[derive(Clone, Debug)]
struct Values {
    long: [u64; 7],
    int: [u32; 4],
    yes: [bool; 10],
    name: Vec<u8>,
    other: Vec<u8>,
    data: Vec<u8>,
}

fn values() -> impl Strategy<Value = Values> {
    let name =
        || prop::collection::vec(any::<u8>().prop_filter("", |b| !b"\0/".contains(b)), 1..40);
    let data = prop::collection::vec(any::<u8>(), 0..300);
    (any::<([u64; 7], [u32; 4], [bool; 10])>(), name(), name(), data).prop_map(
        |((long, int, yes), name, other, data)| Values { long, int, yes, name, other, data },
    )
}

fn operation(opcode: Opcode, v: &Values) -> Operation<'_> {
    let (name, other) = (&v.name[..], &v.other[..]);
    let [fh, offset, length, owner, ..] = v.long;
    let [mode, umask, size, flags] = v.int;
    let open = OpenArgs { flags, kill_set_id: v.yes[0] };
    let lock_owner = v.yes[1].then_some(owner);
    let read = ReadArgs { fh, offset, size, lock_owner, flags };
    let release =
        ReleaseArgs { fh, flags, flush: v.yes[0], unlock_flock: v.yes[1], lock_owner: owner };
    let lock = FileLock { start: offset, end: length, kind: mode, pid: size };
    let lock = LockArgs { fh, owner, lock, flock: v.yes[0] };
    let time = |secs: u64, nanos| Time { secs: secs as i64, nanos: nanos % 1_000_000_000 };
    let set_time = |some: usize, now: bool, at: Time| {
        let set = if now { SetTime::Now } else { SetTime::At(at) };
        v.yes[some].then_some(set)
    };
    let copy = CopyArgs {
        fh_in: fh,
        offset_in: offset,
        inode_out: v.long[4],
        fh_out: v.long[5],
        offset_out: v.long[6],
        length,
        flags: owner,
    };
    match opcode {
        Opcode::Lookup => Operation::Lookup { name },
        Opcode::Forget => Operation::Forget { lookups: fh },
        Opcode::GetAttr => Operation::GetAttr { fh: v.yes[0].then_some(fh) },
        Opcode::SetAttr => Operation::SetAttr(SetAttr {
            mode: v.yes[0].then_some(mode),
            uid: v.yes[1].then_some(umask),
            gid: v.yes[2].then_some(size),
            size: v.yes[3].then_some(length),
            atime: set_time(4, v.yes[0], time(v.long[4], flags)),
            mtime: set_time(5, v.yes[1], time(v.long[5], mode)),
            ctime: v.yes[6].then_some(time(v.long[6], umask)),
            fh: v.yes[7].then_some(fh),
            lock_owner: v.yes[8].then_some(owner),
            kill_set_id: v.yes[9],
        }),
        Opcode::ReadLink => Operation::ReadLink,
        Opcode::Symlink => Operation::Symlink { name, target: other },
        Opcode::MkNod => Operation::MkNod { name, mode, rdev: size, umask },
        Opcode::MkDir => Operation::MkDir { name, mode, umask },
        Opcode::Unlink => Operation::Unlink { name },
        Opcode::RmDir => Operation::RmDir { name },
        Opcode::Rename => Operation::Rename { name, new_parent: fh, new_name: other, flags: 0 },
        Opcode::Rename2 => Operation::Rename { name, new_parent: fh, new_name: other, flags },
        Opcode::Link => Operation::Link { inode: fh, new_name: name },
        Opcode::Open => Operation::Open(open),
        Opcode::Read => Operation::Read(read),
        Opcode::Write => Operation::Write(WriteArgs {
            fh,
            offset,
            data: &v.data,
            from_cache: v.yes[0],
            kill_set_id: v.yes[2],
            lock_owner,
            flags,
        }),
        Opcode::StatFs => Operation::StatFs,
        Opcode::Release => Operation::Release(release),
        Opcode::Fsync => Operation::Fsync { fh, data_only: v.yes[0] },
        Opcode::SetXattr => Operation::SetXattr { name, value: &v.data, flags, extra_flags: mode },
        Opcode::GetXattr => Operation::GetXattr { name, size },
        Opcode::ListXattr => Operation::ListXattr { size },
        Opcode::RemoveXattr => Operation::RemoveXattr { name },
        Opcode::Flush => Operation::Flush { fh, lock_owner: owner },
        Opcode::Init => Operation::Init(InitRequest {
            major: 7,
            minor: mode,
            max_readahead_bytes: size,
            flags: InitFlags::from_bits_retain(owner) | InitFlags::INIT_EXT,
        }),
        Opcode::OpenDir => Operation::OpenDir(open),
        Opcode::ReadDir => Operation::ReadDir(read),
        Opcode::ReadDirPlus => Operation::ReadDirPlus(read),
        Opcode::ReleaseDir => Operation::ReleaseDir(release),
        Opcode::FsyncDir => Operation::FsyncDir { fh, data_only: v.yes[0] },
        Opcode::GetLk => Operation::GetLk(lock),
        Opcode::SetLk => Operation::SetLk(lock),
        Opcode::SetLkW => Operation::SetLkW(lock),
        Opcode::Access => Operation::Access { mask: mode },
        Opcode::Create => Operation::Create { name, mode, umask, open },
        Opcode::Interrupt => Operation::Interrupt { unique: fh },
        Opcode::Destroy => Operation::Destroy,
        // The kernel's list cannot be made by hand: tested below.
        Opcode::BatchForget => Operation::Destroy,
        Opcode::Fallocate => Operation::Fallocate { fh, offset, length, mode },
        Opcode::LSeek => Operation::LSeek { fh, offset, whence: mode },
        Opcode::CopyFileRange => Operation::CopyFileRange(copy),
        Opcode::CopyFileRange64 => Operation::CopyFileRange64(copy),
        Opcode::SyncFs => Operation::SyncFs,
        Opcode::Statx => Operation::Statx { fh: v.yes[0].then_some(fh), flags, mask: mode },
        Opcode::TmpFile => Operation::TmpFile { mode, umask, open },
    }
}

fn bit(yes: bool, bit: u32) -> u32 {
    u32::from(yes) << bit
}

/// The opcode and arguments of an operation, as the kernel lays them out.
fn encode(operation: &Operation<'_>) -> (Opcode, Vec<u8>) {
    let w = Wire::default();
    let open = |w: Wire, open: &OpenArgs| w.u32(open.flags).u32(bit(open.kill_set_id, 0));
    let create = |w: Wire, mode: u32, umask: u32, open: &OpenArgs| {
        w.u32(open.flags).u32(mode).u32(umask).u32(bit(open.kill_set_id, 0))
    };
    let read = |w: Wire, r: &ReadArgs| {
        let w = w.u64(r.fh).u64(r.offset).u32(r.size).u32(bit(r.lock_owner.is_some(), 1));
        w.u64(r.lock_owner.unwrap_or(9)).u32(r.flags).u32(0)
    };
    let release = |w: Wire, r: &ReleaseArgs| {
        let flags = bit(r.flush, 0) | bit(r.unlock_flock, 1);
        w.u64(r.fh).u32(r.flags).u32(flags).u64(r.lock_owner)
    };
    let lock = |w: Wire, l: &LockArgs| {
        let w = w.u64(l.fh).u64(l.owner).u64(l.lock.start).u64(l.lock.end);
        w.u32(l.lock.kind).u32(l.lock.pid).u32(bit(l.flock, 0)).u32(0)
    };
    let copy = |w: Wire, c: &CopyArgs| {
        let w = w.u64(c.fh_in).u64(c.offset_in).u64(c.inode_out).u64(c.fh_out);
        w.u64(c.offset_out).u64(c.length).u64(c.flags)
    };
    let (opcode, w) = match operation {
        Operation::Lookup { name } => (Opcode::Lookup, w.text(name)),
        Operation::Forget { lookups } => (Opcode::Forget, w.u64(*lookups)),
        Operation::GetAttr { fh } => {
            (Opcode::GetAttr, w.u32(bit(fh.is_some(), 0)).u32(0).u64(fh.unwrap_or(9)))
        }
        Operation::SetAttr(set) => (Opcode::SetAttr, encode_setattr(w, set)),
        Operation::ReadLink => (Opcode::ReadLink, w),
        Operation::Symlink { name, target } => (Opcode::Symlink, w.text(name).text(target)),
        Operation::MkNod { name, mode, rdev, umask } => {
            (Opcode::MkNod, w.u32(*mode).u32(*rdev).u32(*umask).u32(0).text(name))
        }
        Operation::MkDir { name, mode, umask } => {
            (Opcode::MkDir, w.u32(*mode).u32(*umask).text(name))
        }
        Operation::Unlink { name } => (Opcode::Unlink, w.text(name)),
        Operation::RmDir { name } => (Opcode::RmDir, w.text(name)),
        Operation::Rename { name, new_parent, new_name, flags: 0 } => {
            (Opcode::Rename, w.u64(*new_parent).text(name).text(new_name))
        }
        Operation::Rename { name, new_parent, new_name, flags } => {
            let w = w.u64(*new_parent).u32(*flags).u32(0);
            (Opcode::Rename2, w.text(name).text(new_name))
        }
        Operation::Link { inode, new_name } => (Opcode::Link, w.u64(*inode).text(new_name)),
        Operation::Open(args) => (Opcode::Open, open(w, args)),
        Operation::Read(args) => (Opcode::Read, read(w, args)),
        Operation::Write(a) => {
            let flags =
                bit(a.from_cache, 0) | bit(a.lock_owner.is_some(), 1) | bit(a.kill_set_id, 2);
            let w = w.u64(a.fh).u64(a.offset).u32(a.data.len() as u32).u32(flags);
            (Opcode::Write, w.u64(a.lock_owner.unwrap_or(9)).u32(a.flags).u32(0).bytes(a.data))
        }
        Operation::StatFs => (Opcode::StatFs, w),
        Operation::Release(args) => (Opcode::Release, release(w, args)),
        Operation::Fsync { fh, data_only } => {
            (Opcode::Fsync, w.u64(*fh).u32(bit(*data_only, 0)).u32(0))
        }
        Operation::SetXattr { name, value, flags, extra_flags } => {
            let w = w.u32(value.len() as u32).u32(*flags).u32(*extra_flags).u32(0);
            (Opcode::SetXattr, w.text(name).bytes(value))
        }
        Operation::GetXattr { name, size } => (Opcode::GetXattr, w.u32(*size).u32(0).text(name)),
        Operation::ListXattr { size } => (Opcode::ListXattr, w.u32(*size).u32(0)),
        Operation::RemoveXattr { name } => (Opcode::RemoveXattr, w.text(name)),
        Operation::Flush { fh, lock_owner } => {
            (Opcode::Flush, w.u64(*fh).u32(0).u32(0).u64(*lock_owner))
        }
        Operation::Init(init) => {
            let bits = init.flags.bits();
            let w = w.u32(init.major).u32(init.minor).u32(init.max_readahead_bytes);
            (Opcode::Init, w.u32(bits as u32).u32((bits >> 32) as u32).bytes(&[0; 44]))
        }
        Operation::OpenDir(args) => (Opcode::OpenDir, open(w, args)),
        Operation::ReadDir(args) => (Opcode::ReadDir, read(w, args)),
        Operation::ReadDirPlus(args) => (Opcode::ReadDirPlus, read(w, args)),
        Operation::ReleaseDir(args) => (Opcode::ReleaseDir, release(w, args)),
        Operation::FsyncDir { fh, data_only } => {
            (Opcode::FsyncDir, w.u64(*fh).u32(bit(*data_only, 0)).u32(0))
        }
        Operation::GetLk(args) => (Opcode::GetLk, lock(w, args)),
        Operation::SetLk(args) => (Opcode::SetLk, lock(w, args)),
        Operation::SetLkW(args) => (Opcode::SetLkW, lock(w, args)),
        Operation::Access { mask } => (Opcode::Access, w.u32(*mask).u32(0)),
        Operation::Create { name, mode, umask, open } => {
            (Opcode::Create, create(w, *mode, *umask, open).text(name))
        }
        Operation::Interrupt { unique } => (Opcode::Interrupt, w.u64(*unique)),
        Operation::Destroy => (Opcode::Destroy, w),
        Operation::Fallocate { fh, offset, length, mode } => {
            (Opcode::Fallocate, w.u64(*fh).u64(*offset).u64(*length).u32(*mode).u32(0))
        }
        Operation::LSeek { fh, offset, whence } => {
            (Opcode::LSeek, w.u64(*fh).u64(*offset).u32(*whence).u32(0))
        }
        Operation::CopyFileRange(args) => (Opcode::CopyFileRange, copy(w, args)),
        Operation::CopyFileRange64(args) => (Opcode::CopyFileRange64, copy(w, args)),
        Operation::SyncFs => (Opcode::SyncFs, w.u64(0)),
        Operation::Statx { fh, flags, mask } => {
            let w = w.u32(bit(fh.is_some(), 0)).u32(0).u64(fh.unwrap_or(9));
            (Opcode::Statx, w.u32(*flags).u32(*mask))
        }
        Operation::TmpFile { mode, umask, open } => {
            (Opcode::TmpFile, create(w, *mode, *umask, open).text(b"/"))
        }
        Operation::BatchForget(_) | Operation::Unknown { .. } => unreachable!("not generated"),
    };
    (opcode, w.0)
}

fn encode_setattr(w: Wire, set: &SetAttr) -> Wire {
    let now = |time: Option<SetTime>| time == Some(SetTime::Now);
    let at = |time: Option<SetTime>| match time {
        Some(SetTime::At(time)) => time,
        Some(SetTime::Now) | None => Time::default(),
    };
    let valid = [
        set.mode.is_some(),
        set.uid.is_some(),
        set.gid.is_some(),
        set.size.is_some(),
        set.atime.is_some(),
        set.mtime.is_some(),
        set.fh.is_some(),
        now(set.atime),
        now(set.mtime),
        set.lock_owner.is_some(),
        set.ctime.is_some(),
        set.kill_set_id,
    ];
    let valid = valid.iter().zip(0..).map(|(&yes, at)| bit(yes, at)).sum::<u32>();
    let (atime, mtime, ctime) = (at(set.atime), at(set.mtime), set.ctime.unwrap_or_default());
    let w = w.u32(valid).u32(0).u64(set.fh.unwrap_or(9)).u64(set.size.unwrap_or(9));
    let w = w.u64(set.lock_owner.unwrap_or(9));
    let w = w.u64(atime.secs as u64).u64(mtime.secs as u64).u64(ctime.secs as u64);
    let w = w.u32(atime.nanos).u32(mtime.nanos).u32(ctime.nanos);
    let w = w.u32(set.mode.unwrap_or(9)).u32(0);
    w.u32(set.uid.unwrap_or(9)).u32(set.gid.unwrap_or(9)).u32(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Every operation comes out as it was put in.
    #[test]
    fn operations_survive_the_wire(values in values()) {
        for &opcode in Opcode::ALL.iter().filter(|&&opcode| opcode != Opcode::BatchForget) {
            let operation = operation(opcode, &values);
            let (raw_opcode, arguments) = encode(&operation);
            let bytes = message(raw_opcode as u32, &arguments);
            let caller = Caller { uid: 1000, gid: 100, pid: 4242 };
            let expected = Request { unique: 77, inode: 5, caller, operation };
            prop_assert_eq!(Request::parse(&bytes), Ok(expected));
        }
    }

    /// A message cut anywhere is an error or, where only padding or an unused
    /// tail is lost, still a request; it never panics.
    #[test]
    fn cut_messages_do_not_panic(values in values(), keep in 0.0..1.0f64) {
        for &opcode in Opcode::ALL {
            let (raw_opcode, arguments) = encode(&operation(opcode, &values));
            let keep_bytes = (arguments.len() as f64 * keep) as usize;
            let whole = message(raw_opcode as u32, &arguments);
            let cut = message(raw_opcode as u32, &arguments[..keep_bytes]);
            let _ = Request::parse(&cut);
            let short = Request::parse(&whole[..40 + keep_bytes]);
            if keep_bytes < arguments.len() {
                let declared_bytes = whole.len() as u32;
                let have_bytes = 40 + keep_bytes;
                prop_assert_eq!(
                    short,
                    Err(ParseError::Length { unique: 77, declared_bytes, have_bytes })
                );
            }
        }
    }

    /// Whatever arrives, parsing ends without a panic.
    #[test]
    fn any_bytes_are_safe(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Request::parse(&bytes);
    }

    /// The same behind a good header, so that every opcode sees garbage.
    #[test]
    fn any_arguments_are_safe(
        opcode in 0..60u32,
        extension in 0..8u16,
        arguments in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut bytes = message(opcode, &arguments);
        bytes[36..38].copy_from_slice(&extension.to_ne_bytes());
        if let Ok(request) = Request::parse(&bytes)
            && let Operation::BatchForget(list) = request.operation
        {
            prop_assert!(list.iter().count() * 16 <= arguments.len());
        }
    }
}

#[test]
fn forgotten_inodes_are_listed() {
    let arguments = Wire::default().u32(2).u32(0).u64(10).u64(1).u64(11).u64(3).0;
    let bytes = message(42, &arguments);
    let Operation::BatchForget(list) = Request::parse(&bytes).unwrap().operation else {
        panic!("another operation");
    };
    assert_eq!(list.iter().collect::<Vec<_>>(), [(10, 1), (11, 3)]);

    let lies = Wire::default().u32(u32::MAX).u32(0).u64(10).u64(1).0;
    let opcode = Opcode::BatchForget;
    assert_eq!(
        Request::parse(&message(42, &lies)),
        Err(ParseError::Truncated { unique: 77, opcode })
    );
}

#[test]
fn bad_names_are_errors() {
    for name in [&b"a/b\0"[..], b"\0", b"unterminated", b""] {
        let error = ParseError::Name { unique: 77, opcode: Opcode::Lookup };
        assert_eq!(Request::parse(&message(1, name)), Err(error));
    }
}

#[test]
fn an_unknown_opcode_is_a_value() {
    let bytes = message(4095, b"whatever");
    let request = Request::parse(&bytes).unwrap();
    assert_eq!(request.operation, Operation::Unknown { opcode: 4095 });
}

#[test]
fn extensions_are_not_arguments() {
    let mut bytes = message(1, b"name\0-8 bytes-");
    bytes[36..38].copy_from_slice(&1u16.to_ne_bytes());
    let request = Request::parse(&bytes).unwrap();
    assert_eq!(request.operation, Operation::Lookup { name: b"name" });
    bytes[36..38].copy_from_slice(&2u16.to_ne_bytes());
    let error = ParseError::Extensions { unique: 77, extension_bytes: 16 };
    assert_eq!(Request::parse(&bytes), Err(error));
}

#[test]
fn write_data_lies_where_transports_align_it() {
    let data = b"0123456789";
    let write = WriteArgs {
        fh: 1,
        offset: 2,
        data,
        from_cache: false,
        kill_set_id: false,
        lock_owner: None,
        flags: 0,
    };
    let (opcode, arguments) = encode(&Operation::Write(write));
    assert_eq!(&message(opcode as u32, &arguments)[WRITE_DATA_OFFSET..], data);
}

/// The whole reply, as the kernel would see it.
fn reply_bytes(reply: &Reply) -> Vec<u8> {
    let mut bytes = reply.head(99).unwrap().as_ref().to_vec();
    reply.payload().for_each(|slice| bytes.extend_from_slice(slice));
    bytes
}

fn out_header(body_bytes: usize) -> Wire {
    Wire::default().u32(16 + body_bytes as u32).u32(0).u64(99)
}

fn some_attr() -> (Attr, Vec<u8>) {
    let time = |secs, nanos| Time { secs, nanos };
    let attr = Attr {
        inode: 1 << 40,
        size_bytes: 5,
        blocks_512: 8,
        atime: time(-1, 2),
        mtime: time(3, 4),
        ctime: time(5, 6),
        mode: libc::S_IFREG | 0o644,
        links: 2,
        uid: 1000,
        gid: 100,
        rdev: 7,
        io_bytes: 65536,
    };
    let w = Wire::default().u64(1 << 40).u64(5).u64(8).u64(u64::MAX).u64(3).u64(5);
    let w = w.u32(2).u32(4).u32(6).u32(0o100_644).u32(2).u32(1000).u32(100).u32(7);
    (attr, w.u32(65536).u32(0).0)
}

#[test]
fn replies_are_laid_out_as_the_abi_says() {
    let (attr, attr_bytes) = some_attr();
    let valid = Duration::new(3, 4);
    let entry = Entry {
        inode: 9,
        generation: 1,
        entry_valid: Duration::new(1, 2),
        attr_valid: valid,
        attr,
    };
    let entry_bytes = Wire::default().u64(9).u64(1).u64(1).u64(3).u32(2).u32(4);
    let entry_bytes = entry_bytes.bytes(&attr_bytes).0;
    let open = OpenReply { fh: 6, flags: OpenReplyFlags::KEEP_CACHE };
    let open_bytes = Wire::default().u64(6).u32(2).u32(0).0;
    let lock = FileLock { start: 1, end: 2, kind: 3, pid: 4 };
    let statfs = StatFs {
        blocks: 1,
        blocks_free: 2,
        blocks_available: 3,
        files: 4,
        files_free: 5,
        io_bytes: 6,
        name_bytes_max: 7,
        fragment_bytes: 8,
    };

    let expected = [
        (Reply::Done, out_header(0)),
        (Reply::Entry(entry), out_header(128).bytes(&entry_bytes)),
        (Reply::Attr { attr, valid }, out_header(104).u64(3).u32(4).u32(0).bytes(&attr_bytes)),
        (Reply::Open(open), out_header(16).bytes(&open_bytes)),
        (Reply::Create { entry, open }, out_header(144).bytes(&entry_bytes).bytes(&open_bytes)),
        (Reply::Bytes(b"target".into()), out_header(6).bytes(b"target")),
        (
            Reply::Data([Buf::copy_of(b"one"), Buf::copy_of(b"two")].into_iter().collect()),
            out_header(6).bytes(b"onetwo"),
        ),
        (Reply::Written(4096), out_header(8).u32(4096).u32(0)),
        (Reply::Copied(1 << 33), out_header(8).u64(1 << 33)),
        (Reply::XattrSize(12), out_header(8).u32(12).u32(0)),
        (Reply::Offset(1 << 34), out_header(8).u64(1 << 34)),
        (Reply::Lock(lock), out_header(24).u64(1).u64(2).u32(3).u32(4)),
        (
            Reply::StatFs(statfs),
            out_header(80).u64(1).u64(2).u64(3).u64(4).u64(5).u32(6).u32(7).u32(8).bytes(&[0; 28]),
        ),
    ];
    for (reply, bytes) in expected {
        assert_eq!(reply_bytes(&reply), bytes.0, "{reply:?}");
    }

    let error = Wire::default().u32(16).u32((-libc::ENOENT) as u32).u64(99).0;
    assert_eq!(reply_bytes(&Errno::NOENT.into()), error);
    assert!(Reply::Silent.head(99).is_none());
}

#[test]
fn statx_is_laid_out_as_the_abi_says() {
    let (attr, _) = some_attr();
    let attr = Attr { rdev: (259 << 8) | 3, ..attr };
    let statx = Statx {
        attr,
        mask: 0xfff,
        btime: Time { secs: 7, nanos: 8 },
        attributes: 10,
        attributes_mask: 11,
    };
    let w = out_header(288).u64(3).u32(4).u32(0).bytes(&[0; 16]);
    let w = w.u32(0xfff).u32(65536).u64(10).u32(2).u32(1000).u32(100).u16(0o100_644).u16(0);
    let w = w.u64(1 << 40).u64(5).u64(8).u64(11);
    let w = w.u64(u64::MAX).u32(2).u32(0).u64(7).u32(8).u32(0);
    let w = w.u64(5).u32(6).u32(0).u64(3).u32(4).u32(0);
    let w = w.u32(259).u32(3).u32(0).u32(0).bytes(&[0; 112]);
    let reply = Reply::Statx { statx, valid: Duration::new(3, 4) };
    assert_eq!(reply_bytes(&reply), w.0);
}

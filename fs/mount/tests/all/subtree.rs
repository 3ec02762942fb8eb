//! A directory shown to a guest in place of the whole: its kernel names inodes that it was never told of, in every field, and another
//! mount finds what is beside the directory as it was.

use crate::hostile::{
    arguments, below, body_of, error_of, message, mount, mount_through, serve, shaped,
};
use levada_base::ids::Ino;
use levada_base::reactor::{self, Reactor};
use levada_mount::files::Files;
use levada_mount::subtree::Subtree;
use levada_mount::{Answer, Handler, Session};
use levada_wire::local::{LinkConfig, Network};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SYMLINK: u32 = 6;
const MKNOD: u32 = 8;
const MKDIR: u32 = 9;
const UNLINK: u32 = 10;
const RMDIR: u32 = 11;
const RENAME: u32 = 12;
const LINK: u32 = 13;
const SETXATTR: u32 = 21;
const GETXATTR: u32 = 22;
const REMOVEXATTR: u32 = 24;
const INIT: u32 = 26;
const READDIR: u32 = 28;
const CREATE: u32 = 35;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const BATCH_FORGET: u32 = 42;
const READDIRPLUS: u32 = 44;
const RENAME2: u32 = 45;
const COPY: u32 = 47;
const TMPFILE: u32 = 51;
const COPY_64: u32 = 53;
/// All that name an inode.
const OPCODES: [u32; 40] = [
    1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24, 25, 27, 28, 29,
    30, 31, 32, 33, 34, 35, 43, 44, 45, 46, 47, 50, 51, 52, 53,
];
const ROOT: u64 = 1;
/// Longer than any listing here.
const LISTING: u32 = 1 << 16;

/// A kernel that asks one thing after the other.
struct Kernel<H> {
    session: Rc<Session<H>>,
    last: Cell<u64>,
}

impl<H: Handler> Kernel<H> {
    fn new(session: Rc<Session<H>>) -> Self {
        Self { session, last: Cell::new(1) }
    }

    async fn ask(&self, opcode: u32, node: u64, arguments: &[u8]) -> Option<Answer> {
        self.last.set(self.last.get() + 1);
        self.session.serve(&message(opcode, self.last.get(), node, arguments)).await
    }

    /// The body of the answer, or the error.
    async fn told(&self, opcode: u32, node: u64, arguments: &[u8]) -> Result<Vec<u8>, i32> {
        let answer = self.ask(opcode, node, arguments).await.expect("an answer");
        match error_of(&answer) {
            0 => Ok(body_of(&answer)[16..].to_vec()),
            error => Err(-error),
        }
    }

    /// The inode of the entry that an answer tells.
    async fn entry(&self, opcode: u32, node: u64, arguments: &[u8]) -> Result<u64, i32> {
        Ok(long(&self.told(opcode, node, arguments).await?, 0))
    }

    async fn lookup(&self, node: u64, name: &str) -> Result<u64, i32> {
        self.entry(LOOKUP, node, &named(&[], &[name])).await
    }

    async fn mkdir(&self, node: u64, name: &str) -> Result<u64, i32> {
        self.entry(MKDIR, node, &named(&words(&[0o755, 0]), &[name])).await
    }

    async fn create(&self, node: u64, name: &str) -> Result<u64, i32> {
        self.entry(CREATE, node, &named(&created(), &[name])).await
    }

    /// What `stat` says of it, in bytes; its number is not changed by anybody who looks.
    async fn attributes(&self, node: u64) -> Result<Vec<u8>, i32> {
        Ok(self.told(GETATTR, node, &[0; 16]).await?[16..].to_vec())
    }

    async fn forget(&self, node: u64, lookups: u64) {
        assert!(self.ask(FORGET, node, &lookups.to_ne_bytes()).await.is_none());
    }

    /// Names with the inodes that a listing says they have, and those that it tells with attributes.
    async fn list(&self, opcode: u32, node: u64) -> Vec<(String, u64, u64)> {
        let asked = [&[0; 16][..], &words(&[LISTING, 0, 0, 0, 0, 0])].concat();
        let body = self.told(opcode, node, &asked).await.expect("a listing");
        let entry_bytes = if opcode == READDIRPLUS { 128 } else { 0 };
        let mut names = Vec::new();
        let mut left = &body[..];
        while !left.is_empty() {
            let (entry, dirent) = left.split_at(entry_bytes);
            let length = u32::from_ne_bytes(dirent[16..20].try_into().unwrap()) as usize;
            let name = String::from_utf8(dirent[24..24 + length].to_vec()).unwrap();
            let looked_up = if entry.is_empty() { 0 } else { long(entry, 0) };
            names.push((name, long(dirent, 0), looked_up));
            left = &dirent[(24 + length).next_multiple_of(8)..];
        }
        names
    }
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn named(arguments: &[u8], names: &[&str]) -> Vec<u8> {
    let names = names.iter().flat_map(|name| [name.as_bytes(), &[0]].concat());
    arguments.iter().copied().chain(names).collect()
}

/// Arguments of CREATE and TMPFILE.
fn created() -> Vec<u8> {
    words(&[libc::O_RDWR as u32, libc::S_IFREG | 0o600, 0, 0])
}

/// Arguments that can be read, whatever they mean.
fn sound(opcode: u32) -> Vec<u8> {
    let names: &[&str] = match opcode {
        SYMLINK | RENAME | RENAME2 => &["x", "y"],
        _ => &["user.x"],
    };
    let fixed = match opcode {
        LOOKUP | SYMLINK | UNLINK | RMDIR | REMOVEXATTR => 0,
        MKDIR | RENAME | LINK | GETXATTR => 8,
        MKNOD | CREATE | RENAME2 | SETXATTR => 16,
        _ => return vec![0; 128],
    };
    let mut fixed = vec![0; fixed];
    // Of the other inode that it names.
    if matches!(opcode, RENAME | LINK | RENAME2) {
        fixed[..8].copy_from_slice(&ROOT.to_ne_bytes());
    }
    named(&fixed, names)
}

/// What there is: `/mine` with `own`, a directory, and `file` in it, and beside it `/theirs` with `secret` and `deep/secret`.
struct World {
    beside: Kernel<Files>,
    mine: u64,
    file: u64,
    theirs: Vec<u64>,
}

async fn world(network: &Network) -> World {
    serve(network).await;
    let beside = Kernel::new(mount(network, "beside").await);
    let mine = beside.mkdir(ROOT, "mine").await.expect("made");
    let own = beside.mkdir(mine, "own").await.expect("made");
    let file = beside.create(own, "file").await.expect("made");
    let theirs = beside.mkdir(ROOT, "theirs").await.expect("made");
    let secret = beside.create(theirs, "secret").await.expect("made");
    let deep = beside.mkdir(theirs, "deep").await.expect("made");
    let deepest = beside.create(deep, "secret").await.expect("made");
    World { beside, mine, file, theirs: vec![theirs, secret, deep, deepest] }
}

async fn guest(network: &Network, world: &World, most: usize) -> Kernel<Subtree<Files>> {
    let root = Ino(world.mine);
    let shown = |files| Subtree::knowing_at_most(files, root, most);
    Kernel::new(mount_through(network, "guest", shown).await)
}

fn in_simulation(seed: u64, test: impl AsyncFnOnce(&Network, World)) {
    Reactor::simulated(seed).block_on(async {
        let network = Network::new(LinkConfig { codec: true, ..LinkConfig::default() });
        let world = world(&network).await;
        test(&network, world).await;
    });
}

#[test]
fn a_guest_starts_in_its_directory_and_finds_no_way_out() {
    in_simulation(1, async |network, world| {
        let guest = guest(network, &world, 100).await;
        assert_eq!(guest.attributes(ROOT).await, world.beside.attributes(world.mine).await);
        assert_eq!(guest.lookup(ROOT, "theirs").await, Err(libc::ENOENT));
        assert_eq!(guest.lookup(ROOT, "mine").await, Err(libc::ENOENT));
        assert_eq!(guest.lookup(ROOT, ".").await, Ok(ROOT));
        let own = guest.lookup(ROOT, "own").await.expect("its own");
        assert_eq!(guest.lookup(own, "file").await, Ok(world.file));
        assert_eq!(guest.lookup(own, ".").await, Ok(own));
        for node in [ROOT, own] {
            assert_eq!(guest.lookup(node, "..").await, Err(libc::ESTALE));
        }
        for opcode in [READDIR, READDIRPLUS] {
            let listed = guest.list(opcode, ROOT).await;
            let of =
                |name: &str| listed.iter().find(|(listed, ..)| listed == name).expect("there").1;
            assert_eq!((of("."), of("..")), (world.mine, world.mine));
            assert_eq!((listed.len(), of("own")), (3, own));
        }
    });
}

#[test]
fn an_inode_that_it_was_not_told_of_is_stale_in_every_field() {
    in_simulation(2, async |network, world| {
        let guest = guest(network, &world, 100).await;
        let own = guest.lookup(ROOT, "own").await.expect("its own");
        let mut before = Vec::new();
        for theirs in &world.theirs {
            before.push(world.beside.attributes(*theirs).await);
        }
        // Not looked up yet: that it is in the directory is not enough.
        let outside = world.theirs.iter().chain([&world.mine, &world.file, &999, &0, &u64::MAX]);
        for node in outside {
            for opcode in OPCODES {
                let asked = sound(opcode);
                let told = guest.told(opcode, *node, &asked).await;
                assert_eq!(told, Err(libc::ESTALE), "{opcode} of {node}");
            }
            let number = node.to_ne_bytes();
            let copy = [&[0; 16][..], &number, &[0; 32]].concat();
            for (opcode, asked) in [
                (LINK, named(&number, &["x"])),
                (RENAME, named(&number, &["own", "x"])),
                (RENAME2, named(&[&number[..], &[0; 8]].concat(), &["own", "x"])),
                (COPY, copy.clone()),
                (COPY_64, copy),
            ] {
                for dir in [ROOT, own] {
                    let told = guest.told(opcode, dir, &asked).await;
                    assert_eq!(told, Err(libc::ESTALE), "{opcode} to {node}");
                }
            }
        }
        for (theirs, before) in world.theirs.iter().zip(before) {
            assert_eq!(world.beside.attributes(*theirs).await, before);
        }
        assert_eq!(guest.lookup(own, "file").await, Ok(world.file));
        assert!(guest.attributes(world.file).await.is_ok(), "known by now");
    });
}

#[test]
fn what_it_was_told_of_in_any_way_is_known_until_it_has_forgotten_it() {
    in_simulation(3, async |network, world| {
        let guest = guest(network, &world, 100).await;
        let made = [
            guest.mkdir(ROOT, "dir").await,
            guest.create(ROOT, "file").await,
            guest.entry(SYMLINK, ROOT, &named(&[], &["link", "own"])).await,
            guest
                .entry(MKNOD, ROOT, &named(&words(&[libc::S_IFIFO | 0o600, 0, 0, 0]), &["fifo"]))
                .await,
            guest.entry(TMPFILE, ROOT, &named(&created(), &["/"])).await,
            guest.lookup(ROOT, "own").await,
        ];
        for inode in made {
            let inode = inode.expect("made");
            assert!(guest.attributes(inode).await.is_ok());
            guest.forget(inode, 1).await;
            assert_eq!(guest.attributes(inode).await, Err(libc::ESTALE));
        }
        // Each of the two times counts.
        let own = guest.lookup(ROOT, "own").await.expect("there");
        let listed = guest.list(READDIRPLUS, ROOT).await;
        assert!(listed.contains(&("own".into(), own, own)), "{listed:?}");
        guest.forget(own, 1).await;
        assert!(guest.attributes(own).await.is_ok());
        // A listing without attributes tells nothing.
        guest.list(READDIR, ROOT).await;
        let one = [&words(&[1, 0])[..], &own.to_ne_bytes(), &1u64.to_ne_bytes()].concat();
        assert!(guest.ask(BATCH_FORGET, 0, &one).await.is_none());
        assert_eq!(guest.attributes(own).await, Err(libc::ESTALE));
        // A second name is an answer, too.
        let file = guest.lookup(ROOT, "file").await.expect("there");
        let linked = guest.entry(LINK, ROOT, &named(&file.to_ne_bytes(), &["second"])).await;
        assert_eq!(linked, Ok(file));
        guest.forget(file, 1).await;
        assert!(guest.attributes(file).await.is_ok());
        guest.forget(file, 7).await;
        assert_eq!(guest.attributes(file).await, Err(libc::ESTALE));
        // What is not there is no inode.
        assert_eq!(guest.lookup(ROOT, "absent").await, Err(libc::ENOENT));
        assert_eq!(guest.attributes(0).await, Err(libc::ESTALE));
    });
}

#[test]
fn what_it_may_know_is_bounded() {
    in_simulation(4, async |network, world| {
        let guest = guest(network, &world, 2).await;
        let own = guest.lookup(ROOT, "own").await.expect("there");
        let second = guest.mkdir(ROOT, "second").await.expect("made");
        world.beside.create(world.mine, "third").await.expect("made");
        assert_eq!(guest.lookup(ROOT, "third").await, Err(libc::ENFILE));
        assert_eq!(guest.lookup(ROOT, "own").await, Ok(own), "it is known");
        for (opcode, asked) in [
            (MKDIR, named(&words(&[0o755, 0]), &["more"])),
            (CREATE, named(&created(), &["more"])),
            (SYMLINK, named(&[], &["more", "own"])),
            (MKNOD, named(&words(&[libc::S_IFIFO | 0o600, 0, 0, 0]), &["more"])),
            (TMPFILE, named(&created(), &["/"])),
        ] {
            assert_eq!(guest.told(opcode, ROOT, &asked).await, Err(libc::ENFILE), "{opcode}");
        }
        assert_eq!(world.beside.lookup(world.mine, "more").await, Err(libc::ENOENT));
        // A listing is whole, and tells of those alone that there is room for.
        let listed = guest.list(READDIRPLUS, ROOT).await;
        let of = |name: &str| listed.iter().find(|(listed, ..)| listed == name).expect("there").2;
        assert_eq!((of("own"), of("second"), of("third")), (own, second, 0));
        guest.forget(second, 2).await;
        assert!(guest.lookup(ROOT, "third").await.is_ok());
    });
}

async fn ask_anything(network: &Network, world: World) {
    let guest = guest(network, &world, 1000).await;
    let own = guest.lookup(ROOT, "own").await.expect("there");
    let files = [guest.create(ROOT, "a").await, guest.create(own, "bb").await];
    let files = files.map(|file| file.expect("made"));
    let mut before = Vec::new();
    for theirs in &world.theirs {
        before.push(world.beside.attributes(*theirs).await.expect("there"));
    }
    let top = world.beside.list(READDIR, ROOT).await;
    for _ in 0..5000 {
        let opcode = below(54) as u32;
        if matches!(opcode, INIT | DESTROY | FORGET | BATCH_FORGET | INTERRUPT) {
            continue;
        }
        let nodes = [ROOT, own, files[0], files[1], below(20)];
        let node = nodes[below(nodes.len() as u64) as usize];
        let asked = shaped(opcode, below(3)).filter(|_| below(4) > 0).unwrap_or_else(arguments);
        // Who waits for a lock may take longer.
        let _ = reactor::timeout(Duration::from_secs(300), guest.ask(opcode, node, &asked)).await;
    }
    for (theirs, before) in world.theirs.iter().zip(before) {
        assert_eq!(world.beside.attributes(*theirs).await, Ok(before));
    }
    assert_eq!(world.beside.list(READDIR, ROOT).await, top);
}

#[test]
fn whatever_it_asks_what_is_beside_stays_as_it_was() {
    for seed in 10..14 {
        in_simulation(seed, ask_anything);
    }
}

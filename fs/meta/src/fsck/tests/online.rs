//! A check of a service that goes on finds what is wrong, and nothing else.

use super::super::{Finding, Fsck, FsckConfig};
use super::{Planter, create_unnamed};
use crate::fsck::FsckReport;
use crate::key;
use crate::row::OrphanRow;
use crate::tests::{ROOT, Tester, World, create, set_xattr, simulated};
use levada_base::ids::Ino;
use levada_base::planted;
use levada_base::reactor;
use levada_wire::meta::{MetaReply, MetaRequest, NewInode, OpenMode};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

async fn checked(world: &World) -> FsckReport {
    let config = FsckConfig { yields: random(2) == 0, ..FsckConfig::default() };
    let fsck = Fsck::of_service(world.service(), config);
    fsck.run().await.expect("reads")
}

/// What the clients know of the tree; some of it is gone.
struct Shared {
    world: Rc<World>,
    directories: RefCell<Vec<Ino>>,
    files: RefCell<Vec<Ino>>,
    is_over: Cell<bool>,
}

impl Shared {
    fn any(of: &RefCell<Vec<Ino>>) -> Ino {
        let of = of.borrow();
        of[random(of.len() as u64) as usize]
    }

    fn name() -> String {
        format!("n{}", random(40))
    }

    fn request(&self) -> MetaRequest {
        let (parent, name) = (Self::any(&self.directories), Self::name().into_bytes());
        let ino = Self::any(&self.files);
        let caller = ROOT;
        match random(13) {
            0..3 => {
                let open = (random(3) == 0).then_some(OpenMode { write: true, truncate: false });
                create(parent, &Self::name(), NewInode::File { open })
            }
            3 => create(parent, &Self::name(), NewInode::Directory),
            4 | 5 => MetaRequest::Unlink { caller, parent, name },
            6 => MetaRequest::RemoveDir { caller, parent, name },
            7 => MetaRequest::Link { caller, ino, parent, name },
            8 => MetaRequest::Rename {
                caller,
                from: parent,
                from_name: name,
                to: Self::any(&self.directories),
                to_name: Self::name().into_bytes(),
                flags: 0,
            },
            9 => set_xattr(ino, format!("user.{}", random(3)).as_bytes(), b"value"),
            10 => MetaRequest::RemoveXattr {
                caller,
                ino,
                name: format!("user.{}", random(3)).into_bytes(),
            },
            11 => create_unnamed(parent),
            _ => MetaRequest::BeginWrite { ino },
        }
    }

    async fn work(self: Rc<Self>, number: u8) {
        let tester = Tester::new(&self.world, number).await;
        while !self.is_over.get() {
            let request = self.request();
            let is_directory =
                matches!(&request, MetaRequest::Create { new: NewInode::Directory, .. });
            if let MetaReply::Entry(attr, _) = tester.change(request).await {
                let known = if is_directory { &self.directories } else { &self.files };
                known.borrow_mut().push(attr.ino);
            }
            if random(4) == 0 {
                reactor::sleep(Duration::from_micros(random(2000))).await;
            }
        }
    }
}

/// Checks again and again while three clients change a tree; what was found.
fn busy(seed: u64) -> Vec<Finding> {
    simulated(seed, async {
        let world = World::small().await;
        let tester = Tester::new(&world, 9).await;
        let mut directories = vec![Ino::ROOT];
        for n in 0..6 {
            directories.push(tester.dir(directories[n / 2], &format!("d{n}")).await);
        }
        let mut files = Vec::new();
        // More than a page, and most of it in the checkpoint, so that the walk has to wait.
        for n in 0..1200 {
            let parent = directories[n % directories.len()];
            let name = format!("f{n:0100}");
            let file = tester.make(parent, &name, NewInode::File { open: None }).await;
            files.push(file.expect("made").ino);
        }
        let shared = Rc::new(Shared {
            world: Rc::clone(&world),
            directories: RefCell::new(directories),
            files: RefCell::new(files),
            is_over: Cell::new(false),
        });
        let workers: Vec<_> =
            (1..4).map(|n| reactor::spawn_in(&world.node(), Rc::clone(&shared).work(n))).collect();
        let mut findings = Vec::new();
        for _ in 0..4 {
            reactor::sleep(Duration::from_micros(random(20_000))).await;
            let report = checked(&world).await;
            assert_eq!(report.not_checked, Vec::<String>::new());
            assert!(report.inodes > 1000 && report.rows > 3000, "{report:?}");
            findings.extend(report.findings);
        }
        shared.is_over.set(true);
        for worker in workers {
            worker.await.expect("ends");
        }
        world.assert_sound().await;
        world.stop();
        findings
    })
}

#[test]
fn what_goes_on_is_no_finding() {
    for seed in 0..8 {
        assert_eq!(busy(seed), [], "seed {seed}");
    }
}

#[test]
fn changes_that_are_not_told_are_found() {
    let is_found = (0..10).any(|seed| {
        planted::choose(Some("meta-removals-not-told"));
        let found = busy(seed);
        planted::choose(None);
        !found.is_empty()
    });
    assert!(is_found);
}

#[test]
fn what_is_wrong_is_found_while_the_service_goes_on() {
    let found = simulated(3, async {
        let planter = Planter::new().await;
        planter.inode(planter.x, |inode| inode.nlink = 5).await;
        planter.set(&key::name(planter.home, b"link"), None);
        // What the service has in memory is right; after a restart it has what the rows say.
        let store = planter.store();
        store.durable(store.last_seq()).await.expect("durable");
        drop(store);
        planter.world.power_cut().await;
        let report = checked(&planter.world).await;
        let x = planter.x;
        planter.stop();
        (x, report.findings)
    });
    let (x, findings) = found;
    let [Finding::Entry { name, .. }, links] = &findings[..] else { panic!("{findings:?}") };
    assert_eq!(name, b"link");
    assert_eq!(*links, Finding::LinkCount { ino: x, says: 5, has: 2 });
}

#[test]
fn a_row_that_the_service_knows_otherwise_is_found() {
    let findings = simulated(4, async {
        let planter = Planter::new().await;
        assert_eq!(checked(&planter.world).await.findings, []);
        planter.set(&key::orphan(planter.orphan), None);
        planter.set(&key::orphan(planter.unnamed), Some(OrphanRow::default().encode()));
        planter.set(&key::client(planter.client), Some(&[1; 25]));
        let findings = checked(&planter.world).await.findings;
        planter.stop();
        findings
    });
    let sorts: Vec<_> = findings.iter().map(Finding::sort).collect();
    assert_eq!(sorts, ["memory", "unlisted", "memory"], "{findings:?}");
}

#[test]
fn one_check_at_a_time() {
    simulated(5, async {
        let planter = Planter::new().await;
        let fsck = || Fsck::of_service(planter.world.service(), FsckConfig::default());
        let service = planter.world.service();
        let first = service.observe(fsck() as Rc<_>).expect("nobody observes");
        let second = fsck().run().await.expect("nothing is read");
        assert_eq!(second.not_checked, ["everything: another check is running"]);
        drop(first);
        assert_eq!(checked(&planter.world).await.not_checked, Vec::<String>::new());
        planter.stop();
    });
}

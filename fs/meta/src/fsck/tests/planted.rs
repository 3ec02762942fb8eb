//! One damage of every sort.

use super::super::{EntryFault, Finding, List, Paths};
use super::{Planter, checked, found};
use crate::key;
use crate::row::{Counters, MARK, NameRow, ReplyRow, Session, Subject, SubjectKind, Usage};
use levada_base::ids::Ino;
use levada_wire::attr::Kind;
use std::ops::Bound;

#[test]
fn a_sound_tree_is_clean_and_counted() {
    crate::tests::simulated(1, async {
        let planter = Planter::new().await;
        let report = checked(&planter.store()).await;
        // Root, home, ann, deep, er, x, link, note, and three without a name.
        assert_eq!((report.inodes, report.names, report.found()), (11, 8, 0), "{report:?}");
        assert!(report.rows > 30 && report.memory_bytes >= 4 << 20, "{report:?}");
        planter.stop();
    });
}

#[test]
fn a_row_that_cannot_be_decoded_is_told_once() {
    for tag in [
        key::INODE,
        key::ENTRY,
        key::NAME,
        key::ORPHAN,
        key::SESSION,
        key::XATTR,
        key::CLIENT,
        key::REPLY,
    ] {
        let (_, findings) = found(async |p: &Planter| {
            let (from, to) = ([tag], [tag + 1]);
            let (from, to) = (Bound::Included(&from[..]), Bound::Excluded(&to[..]));
            let rows = p.store().scan(from, to, 100).await.expect("reads");
            let (key, value) = rows.last().expect("one at least");
            let mut value = value.to_vec();
            value[0] = 77;
            p.set(key, Some(&value));
        });
        let sorts: Vec<_> = findings.iter().map(Finding::sort).collect();
        assert_eq!(sorts, ["row"], "{}: {findings:?}", char::from(tag));
    }
}

#[test]
fn a_directory_whose_row_is_damaged_is_told_once() {
    let (_, findings) = found(async |p: &Planter| p.set(&key::inode(p.ann), Some(b"\x4d")));
    assert!(matches!(&findings[..], [Finding::Damaged { .. }]), "{findings:?}");
}

#[test]
fn rows_of_no_known_sort_and_rows_that_must_be_there() {
    let (_, findings) = found(async |p: &Planter| {
        for key in [&b""[..], b"I\0", b"Q", b"\xff", b"D\0\0\0\0\0\0\0\x01x"] {
            p.set(if key.is_empty() { b"!" } else { key }, Some(b"\x01"));
        }
    });
    assert!(findings.iter().all(|finding| finding.sort() == "unknown-row"), "{findings:?}");
    assert_eq!(findings.len(), 5);
    let (_, findings) = found(async |p: &Planter| {
        p.set(key::SUPERBLOCK, None);
        p.set(key::COUNTERS, None);
    });
    assert_eq!(findings, [Finding::Missing("superblock"), Finding::Missing("counters")]);
}

#[test]
fn one_row_of_an_entry_is_lost() {
    let (p, findings) = found(async |p: &Planter| p.set(&key::name(p.ann, b"x"), None));
    let [Finding::Entry { parent, name, fault: EntryFault::NoName { .. } }] = &findings[..] else {
        panic!("{findings:?}");
    };
    assert_eq!((*parent, &name[..]), (p.ann, &b"x"[..]));
    let (p, findings) = found(async |p: &Planter| {
        let cookie = p.name(p.home, "ann").await.cookie;
        p.set(&key::entry(p.home, cookie), None);
    });
    let [Finding::Entry { parent, fault: EntryFault::NoEntry { .. }, .. }] = &findings[..] else {
        panic!("{findings:?}");
    };
    assert_eq!(*parent, p.home);
}

#[test]
fn the_rows_of_an_entry_differ() {
    let (_, findings) = found(async |p: &Planter| {
        let row = p.name(p.ann, "x").await;
        p.set(&key::name(p.ann, b"x"), Some(&NameRow { cookie: row.cookie + 50, ..row }.encode()));
    });
    let [Finding::Entry { fault: EntryFault::Differ { .. }, .. }] = &findings[..] else {
        panic!("{findings:?}");
    };
}

#[test]
fn a_directory_that_counts_wrong() {
    let (p, findings) = found(async |p: &Planter| {
        p.inode(p.home, |inode| inode.size += 3).await;
        p.inode(p.ann, |inode| {
            let crate::row::Body::Directory { next_cookie, .. } = &mut inode.body else { panic!() };
            *next_cookie = 4;
        })
        .await;
    });
    let expected = [
        Finding::EntryCount { ino: p.home, says: 7, has: 4 },
        Finding::CookieReuse { ino: p.ann, next: 4, last: 4 },
    ];
    assert_eq!(findings, expected);
}

#[test]
fn names_and_what_they_name() {
    let (p, findings) = found(async |p: &Planter| {
        p.set_entry(p.home, "note", NameRow { ino: Ino(999), ..p.name(p.home, "note").await });
        p.inode(p.note, |inode| inode.nlink = 0).await;
        p.set(&key::orphan(p.note), Some(MARK));
    });
    let dangling = Finding::Dangling { parent: p.home, name: b"note".to_vec(), ino: Ino(999) };
    assert_eq!(findings, [dangling]);
    let (p, findings) = found(async |p: &Planter| {
        p.set_entry(
            p.home,
            "note",
            NameRow { kind: Kind::Special, ..p.name(p.home, "note").await },
        );
    });
    let kind = Finding::KindMismatch { parent: p.home, name: b"note".to_vec(), ino: p.note };
    assert_eq!(findings, [kind]);
    let (p, findings) = found(async |p: &Planter| {
        p.inode(p.x, |inode| inode.nlink = 7).await;
        p.inode(p.ann, |inode| inode.nlink = 9).await;
    });
    let links = |ino, says, has| Finding::LinkCount { ino, says, has };
    assert_eq!(findings, [links(p.ann, 9, 3), links(p.x, 7, 2)]);
}

#[test]
fn directories_in_the_wrong_place() {
    let (p, findings) = found(async |p: &Planter| {
        p.inode(p.deep, |inode| inode.parent = p.home).await;
    });
    let parent = Finding::Parent { ino: p.deep, says: p.home, named_in: vec![p.ann] };
    assert_eq!(findings, [parent]);
    // ann is moved into deep, which is in ann, with everything else as such a rename would leave it.
    let (p, findings) = found(async |p: &Planter| {
        let row = p.name(p.home, "ann").await;
        p.remove_entry(p.home, "ann").await;
        p.set_entry(p.deep, "ann", NameRow { cookie: 70, ..row });
        p.inode(p.ann, |inode| inode.parent = p.deep).await;
        for (ino, by) in [(p.home, -1i64), (p.deep, 1)] {
            p.inode(ino, |inode| {
                inode.nlink = inode.nlink.wrapping_add_signed(by as i32);
                inode.size = inode.size.wrapping_add_signed(by);
                let crate::row::Body::Directory { entries, next_cookie } = &mut inode.body else {
                    panic!()
                };
                *entries = inode.size;
                *next_cookie = 80;
            })
            .await;
        }
    });
    assert_eq!(findings, [Finding::Cycle(p.ann)]);
    let (p, findings) = found(async |p: &Planter| {
        p.set(&key::inode(p.deep), None);
        let row = p.get(key::COUNTERS).await.expect("there");
        let mut counters = Counters::decode(&row).expect("sound");
        counters.inodes -= 1;
        p.set(key::COUNTERS, Some(&counters.encode()));
        for kind in [SubjectKind::User, SubjectKind::Group] {
            let key = key::usage(Subject { kind, id: 0 });
            let used = Usage::decode(&p.get(&key).await.expect("there")).expect("sound");
            p.set(&key, Some(&Usage { inodes: used.inodes - 1, ..used }.encode()));
        }
    });
    let dangling = Finding::Dangling { parent: p.ann, name: b"deep".to_vec(), ino: p.deep };
    assert_eq!(findings, [Finding::NoDirectory(p.deep), dangling]);
}

#[test]
fn lists_of_inodes_without_a_name() {
    let (p, findings) = found(async |p: &Planter| {
        p.set(&key::orphan(p.orphan), None);
        p.set(&key::orphan(p.doomed), Some(MARK));
        p.set(&key::destroy(p.note), Some(MARK));
        p.set(&key::orphan(Ino(999)), Some(MARK));
    });
    let listed = |ino, list, is_there| Finding::Listed { ino, list, is_there };
    let expected = [
        listed(p.note, List::Destroy, true),
        Finding::Unlisted(p.orphan),
        Finding::ListedTwice(p.doomed),
        listed(Ino(999), List::Orphans, false),
        Finding::Counter { what: "deleted inodes", says: 1, has: 2 },
    ];
    assert_eq!(findings, expected);
}

#[test]
fn attributes_and_access_lists() {
    let (p, findings) = found(async |p: &Planter| {
        p.set(&key::xattr(p.note, b"user.a"), None);
        p.set(&key::xattr(p.x, b"user.z"), Some(b"\x01value"));
        p.inode(p.note, |inode| inode.mode ^= 0o070).await;
    });
    let xattr =
        |ino, name: &[u8], is_listed| Finding::Xattr { ino, name: name.to_vec(), is_listed };
    assert_eq!(findings.len(), 3, "{findings:?}");
    for expected in
        [xattr(p.x, b"user.z", false), xattr(p.note, b"user.a", true), Finding::Acl(p.note)]
    {
        assert!(findings.contains(&expected), "{expected:?} not in {findings:?}");
    }
}

#[test]
fn sessions_that_make_no_sense() {
    let writing = Session { writing: true, ..Session::default() };
    let cutting = |size| Session { cut: Some(size), ..writing };
    let (p, findings) = found(async |p: &Planter| {
        for (ino, client, session) in [
            (p.home, 5, writing),
            (Ino(999), 5, writing),
            (p.note, 5, Session::default()),
            (p.note, 6, cutting(77)),
            (p.x, 8, cutting(0)),
            (p.x, 9, cutting(0)),
        ] {
            p.set(&key::session(ino, client), Some(&session.encode()));
        }
    });
    let session = |ino, client| Finding::Session { ino, client };
    let expected = [
        session(p.home, 5),
        session(p.x, 8),
        session(p.note, 5),
        session(p.note, 6),
        session(Ino(999), 5),
    ];
    assert_eq!(findings, expected);
}

#[test]
fn counters_and_replies() {
    let (p, findings) = found(async |p: &Planter| {
        let counters = Counters {
            next_ino: 3,
            next_client: 1,
            inodes: 99,
            doomed_inodes: 0,
            doomed_bytes: 98,
        };
        p.set(key::COUNTERS, Some(&counters.encode()));
        let reply = p.get(&key::reply(p.client, 0)).await.expect("there");
        p.set(&key::reply(77, 3), Some(&reply));
        p.set(&key::reply(p.client, 9), Some(&ReplyRow::encode(5, b"\xff\xff\xff")));
    });
    let sorts: Vec<_> = findings.iter().map(Finding::sort).collect();
    assert_eq!(sorts, ["reply", "reply", "counter", "counter", "counter", "counter", "counter"]);
    assert_eq!(findings[1], Finding::Reply { client: 77, slot: 3, is_sound: true });
    assert_eq!(findings[2].says_has(), Some((3, p.doomed.0 + 1)));
}

#[test]
fn who_uses_what() {
    let user = |id| Subject { kind: SubjectKind::User, id };
    let (_, findings) = found(async |p: &Planter| {
        p.set(&key::usage(user(5)), Some(&Usage { inodes: 0, bytes: 9 }.encode()));
        p.set(&key::usage(Subject { kind: SubjectKind::Group, id: 0 }), None);
        p.set(&key::quota(user(6)), Some(&[1, 2]));
        p.set(b"Ux\0\0\0\x05\0", Some(&Usage::default().encode()));
        p.inode(p.note, |inode| inode.uid = 77).await;
    });
    let sorts: Vec<_> = findings.iter().map(Finding::sort).collect();
    assert_eq!(sorts, ["row", "unknown-row", "usage", "usage", "usage", "usage"], "{findings:?}");
    let said = |at: usize| findings[at].says_has();
    assert_eq!((said(3), said(4), said(5)), (Some((9, 0)), Some((0, 1)), Some((0, 10))));
}

#[test]
fn findings_have_paths() {
    crate::tests::simulated(1, async {
        let p = Planter::new().await;
        let store = p.store();
        let mut paths = Paths::new(&store);
        let links = |ino| Finding::LinkCount { ino, says: 0, has: 0 };
        let dangling = Finding::Dangling { parent: p.ann, name: b"gone".to_vec(), ino: Ino(999) };
        for (finding, path) in [
            (links(p.deep), Some(&b"/home/ann/deep"[..])),
            (links(p.x), Some(b"/home/ann/x")),
            (links(Ino::ROOT), Some(b"/")),
            (dangling, Some(b"/home/ann/gone")),
            (links(Ino(999)), None),
            (links(p.orphan), None),
            (Finding::Missing("counters"), None),
        ] {
            let found = paths.of(&finding).await.expect("reads");
            assert_eq!(found.as_deref(), path, "{finding:?}");
        }
        // Around in a circle, and no end of it.
        p.inode(p.home, |inode| inode.parent = p.deep).await;
        assert_eq!(Paths::new(&store).of(&links(p.deep)).await.expect("reads"), None);
        p.stop();
    });
}

//! What follows from other rows is put right, and nothing else: after it a check finds nothing, or what it found is left
//! as it was.

use super::super::{EntryFault, Finding, Numbers, RepairOptions, note_components, repair};
use super::random::{all_rows, damage, random};
use super::{Planter, checked};
use crate::key;
use crate::row::{
    Body, ClientRow, Counters, Inode, MARK, NameRow, OrphanRow, ReplyRow, Session, Subject,
    SubjectKind, TailRow, Usage,
};
use crate::tests::simulated;
use levada_base::ids::{BootVerifier, Ino};
use levada_base::reactor;
use levada_kv::{Bytes, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

const OPTIONS: RepairOptions = RepairOptions { reattach: false, last_object_ino: 0 };
const REATTACH: RepairOptions = RepairOptions { reattach: true, ..OPTIONS };
/// A repair may lead to the next, but not for ever.
const PASSES_MAX: usize = 8;

/// Repairs until nothing is repaired; what is left.
async fn repaired(store: &Store, options: RepairOptions) -> Vec<Finding> {
    for _ in 0..PASSES_MAX {
        let report = checked(store).await;
        if repair(store, &report, options).await.expect("room") == 0 {
            return report.findings;
        }
    }
    panic!("it goes on and on: {:?}", checked(store).await.findings);
}

type Rows = BTreeMap<Bytes, Bytes>;

async fn rows(store: &Store) -> Rows {
    all_rows(store).await.into_iter().collect()
}

/// The rows without the change counters, which repairs raise.
fn without_changes(rows: &Rows) -> BTreeMap<Bytes, Vec<u8>> {
    let plain = |(key, value): (&Bytes, &Bytes)| match Inode::decode(value) {
        Ok(inode) if key[0] == key::INODE => {
            (Bytes::clone(key), Inode { change: 0, ..inode }.encode())
        }
        _ => (Bytes::clone(key), value.to_vec()),
    };
    rows.iter().map(plain).collect()
}

/// After a damage and a repair nothing is found, and every row is as it was before the damage.
fn comes_back(damage: impl AsyncFnOnce(&Planter)) {
    simulated(1, async {
        let planter = Planter::new().await;
        let before = rows(&planter.store()).await;
        damage(&planter).await;
        assert_ne!(planter.findings().await, [], "that was no damage");
        assert_eq!(repaired(&planter.store(), OPTIONS).await, []);
        assert_eq!(without_changes(&rows(&planter.store()).await), without_changes(&before));
        planter.stop();
    });
}

/// After a damage and a repair nothing is found; `look` says what has come of it.
fn is_repaired(
    options: RepairOptions,
    damage: impl AsyncFnOnce(&Planter),
    look: impl AsyncFnOnce(&Planter),
) {
    simulated(1, async {
        let planter = Planter::new().await;
        damage(&planter).await;
        assert_ne!(planter.findings().await, [], "that was no damage");
        assert_eq!(repaired(&planter.store(), options).await, []);
        look(&planter).await;
        planter.stop();
    });
}

/// What is found is left, and no byte is changed.
fn is_left(options: RepairOptions, damage: impl AsyncFnOnce(&Planter)) {
    simulated(1, async {
        let planter = Planter::new().await;
        damage(&planter).await;
        let (found, before) = (planter.findings().await, rows(&planter.store()).await);
        assert_ne!(found, [], "that was no damage");
        assert_eq!(repaired(&planter.store(), options).await, found);
        assert!(rows(&planter.store()).await == before, "it was changed: {found:?}");
        planter.stop();
    });
}

async fn last_row(p: &Planter, tag: u8) -> (Bytes, Bytes) {
    let (from, to) = ([tag], [tag + 1]);
    let (from, to) = (Bound::Included(&from[..]), Bound::Excluded(&to[..]));
    let rows = p.store().scan(from, to, 100).await.expect("reads");
    rows.last().expect("one at least").clone()
}

async fn counters(p: &Planter) -> Counters {
    Counters::decode(&p.get(key::COUNTERS).await.expect("there")).expect("sound")
}

#[test]
fn either_row_of_an_entry_is_made_from_the_other() {
    comes_back(async |p| p.set(&key::name(p.ann, b"x"), None));
    comes_back(async |p| {
        let cookie = p.name(p.home, "ann").await.cookie;
        p.set(&key::entry(p.home, cookie), None);
    });
    for tag in [key::NAME, key::ENTRY] {
        comes_back(async |p| {
            let (key, _) = last_row(p, tag).await;
            p.set(&key, Some(b"nonsense"));
        });
    }
    // Several at once, and counts that are wrong beside them.
    comes_back(async |p| {
        p.set(&key::name(p.ann, b"x"), None);
        p.set(&key::name(p.home, b"ann"), Some(b"nonsense"));
        p.inode(p.ann, |inode| inode.size = 9).await;
        p.inode(p.x, |inode| inode.nlink = 1).await;
    });
}

#[test]
fn rows_of_an_entry_that_differ_are_left() {
    is_left(OPTIONS, async |p| {
        let row = p.name(p.ann, "x").await;
        p.set(&key::name(p.ann, b"x"), Some(&NameRow { cookie: row.cookie + 50, ..row }.encode()));
    });
    // One of them under another name: none is made from either.
    is_left(OPTIONS, async |p| {
        let row = p.name(p.ann, "x").await;
        p.set(&key::name(p.ann, b"x"), None);
        p.set(&key::name(p.ann, b"z"), Some(&row.encode()));
        let findings = p.findings().await;
        let no_name = |finding: &Finding| {
            matches!(finding, Finding::Entry { fault: EntryFault::NoName { .. }, .. })
        };
        assert!(findings.iter().any(no_name), "{findings:?}");
    });
}

#[test]
fn what_is_counted_is_recounted() {
    comes_back(async |p| p.inode(p.home, |inode| inode.size += 3).await);
    comes_back(async |p| {
        p.inode(p.home, |inode| {
            let Body::Directory { entries, .. } = &mut inode.body else { panic!() };
            *entries = 0;
        })
        .await;
    });
    comes_back(async |p| {
        p.inode(p.ann, |inode| {
            let Body::Directory { next_cookie, .. } = &mut inode.body else { panic!() };
            *next_cookie = 4;
        })
        .await;
    });
    for nlink in [0, 1, 7] {
        comes_back(async |p| p.inode(p.x, |inode| inode.nlink = nlink).await);
        comes_back(async |p| p.inode(p.ann, |inode| inode.nlink = nlink).await);
    }
    comes_back(async |p| p.inode(p.deep, |inode| inode.parent = p.home).await);
    comes_back(async |p| {
        let counters = Counters { inodes: 99, ..counters(p).await };
        p.set(key::COUNTERS, Some(&counters.encode()));
    });
}

#[test]
fn accounts_and_what_deleted_files_take_are_recounted() {
    let group = Subject { kind: SubjectKind::Group, id: 0 };
    let nobody = Subject { kind: SubjectKind::User, id: 5 };
    comes_back(async |p| p.set(&key::usage(nobody), Some(&Usage { inodes: 2, bytes: 9 }.encode())));
    comes_back(async |p| p.set(&key::usage(group), None));
    comes_back(async |p| p.set(&key::usage(group), Some(b"nonsense")));
    comes_back(async |p| {
        let row = p.get(key::COUNTERS).await.expect("there");
        let mut counters = Counters::decode(&row).expect("sound");
        (counters.doomed_inodes, counters.doomed_bytes) = (7, 8);
        p.set(key::COUNTERS, Some(&counters.encode()));
    });
}

#[test]
fn nothing_is_counted_where_a_row_is_damaged() {
    is_left(OPTIONS, async |p| {
        p.set(&key::inode(p.ann), Some(b"nonsense"));
        p.inode(p.x, |inode| inode.nlink = 7).await;
    });
    is_left(OPTIONS, async |p| {
        // A directory by its name, which its inode is not: it counts as a subdirectory.
        let row =
            NameRow { kind: levada_wire::attr::Kind::Directory, ..p.name(p.home, "note").await };
        p.set_entry(p.home, "note", row);
    });
}

#[test]
fn next_numbers_are_raised() {
    is_repaired(
        OPTIONS,
        async |p| {
            let low = Counters { next_ino: 3, next_client: 1, ..counters(p).await };
            p.set(key::COUNTERS, Some(&low.encode()));
        },
        async |p| {
            let now = counters(p).await;
            assert_eq!(now.next_ino, checked(&p.store()).await.last_ino + 1);
            assert!(now.next_client > p.client);
        },
    );
    // An inode with a number that was never given out is no reason to skip all between.
    is_left(OPTIONS, async |p| {
        p.set(&key::session(p.x, 3), Some(&Session::default().encode()));
        let row = p.get(&key::inode(p.orphan)).await.expect("there");
        p.set(&key::inode(Ino(1 << 60)), Some(&row));
        p.set(&key::orphan(Ino(1 << 60)), Some(MARK));
        let counters = Counters { inodes: 12, ..counters(p).await };
        p.set(key::COUNTERS, Some(&counters.encode()));
        for kind in [SubjectKind::User, SubjectKind::Group] {
            let key = key::usage(Subject { kind, id: 0 });
            let usage = p.get(&key).await.map(|row| Usage::decode(&row).expect("sound"));
            let usage = usage.expect("there").plus(Usage { inodes: 1, bytes: 0 });
            p.set(&key, Some(&usage.encode()));
        }
    });
}

#[test]
fn lost_counters_are_made_anew_above_all_that_is_seen() {
    for row in [None, Some(&b"nonsense"[..])] {
        let options = RepairOptions { last_object_ino: 5000, ..OPTIONS };
        is_repaired(
            options,
            async |p| p.set(key::COUNTERS, row),
            async |p| {
                let now = counters(p).await;
                assert_eq!(now.inodes, 11);
                assert!(now.next_ino > 5000 + (1 << 31) && now.next_client > p.client + (1 << 31));
                let numbers = Numbers::of(&p.store()).await.expect("reads");
                assert_eq!(numbers, Numbers { next_ino: now.next_ino, awaited_ino: None });
            },
        );
    }
}

#[test]
fn lists_say_what_links_say() {
    comes_back(async |p| p.set(&key::orphan(p.orphan), None));
    comes_back(async |p| p.set(&key::orphan(p.orphan), Some(b"nonsense")));
    comes_back(async |p| p.inode(p.orphan, |inode| inode.nlink = 1).await);
    for list in [key::orphan, key::destroy] {
        comes_back(async |p| p.set(&list(p.note), Some(MARK)));
        comes_back(async |p| p.set(&list(Ino(999)), Some(MARK)));
    }
    // Both: it is not destroyed before it was an orphan.
    is_repaired(
        OPTIONS,
        async |p| p.set(&key::orphan(p.doomed), Some(MARK)),
        async |p| assert_eq!(p.get(&key::destroy(p.doomed)).await, None),
    );
    // A name, and links that say there is none: it must not be reaped.
    is_repaired(
        OPTIONS,
        async |p| {
            p.inode(p.note, |inode| inode.nlink = 0).await;
            p.set(&key::orphan(p.note), Some(OrphanRow::default().encode()));
        },
        async |p| {
            assert_eq!(p.get(&key::orphan(p.note)).await, None);
            p.inode(p.note, |inode| assert_eq!(inode.nlink, 1)).await;
        },
    );
}

#[test]
fn what_may_have_a_name_in_a_damaged_row_is_not_reaped() {
    is_left(OPTIONS, async |p| {
        p.set(&key::name(p.ann, b"x"), Some(b"nonsense"));
        let cookie = p.name(p.home, "y").await.cookie;
        p.set(&key::entry(p.home, cookie), Some(b"nonsense"));
        p.set(&key::name(p.home, b"y"), Some(b"nonsense"));
        let (from, to) = (key::entry(p.ann, 0), key::behind(key::ENTRY, p.ann));
        let entries = p.store().scan(Bound::Included(&from), Bound::Excluded(&to), 9).await;
        for (key, _) in entries.expect("reads") {
            p.set(&key, Some(b"nonsense"));
        }
        p.inode(p.x, |inode| inode.nlink = 0).await;
    });
}

#[test]
fn clients_that_keep_the_service_from_opening_are_forgotten() {
    type Damage = fn(&Planter, &[u8], &[u8]);
    let damages: [Damage; 4] = [
        |p, _, reply| p.set(&key::reply(p.client, 0), Some(&reply[..3])),
        |p, _, _| p.set(&key::reply(p.client, 9), Some(&ReplyRow::encode(5, b"\xff\xff"))),
        |p, _, reply| p.set(&key::reply(p.client, 1 << 20), Some(reply)),
        |p, client, _| p.set(&key::client(p.client), Some(&client[..5])),
    ];
    for damage in damages {
        is_repaired(
            OPTIONS,
            async |p| {
                let client = p.get(&key::client(p.client)).await.expect("there");
                assert!(ClientRow::decode(&client).is_ok());
                let reply = p.get(&key::reply(p.client, 0)).await.expect("there");
                damage(p, &client, &reply);
            },
            async |p| {
                assert_eq!(p.get(&key::client(p.client)).await, None);
                assert_eq!(p.get(&key::reply(p.client, 0)).await, None);
                // What it had open for writing stays, as a chore.
                assert!(p.get(&key::session(p.x, p.client)).await.is_some());
            },
        );
    }
    // Replies of nobody.
    comes_back(async |p| {
        let reply = p.get(&key::reply(p.client, 0)).await.expect("there");
        p.set(&key::reply(77, 3), Some(&reply));
    });
}

#[test]
fn sessions_of_what_is_no_file_go() {
    let writing = Session { writing: true, ..Session::default() };
    comes_back(async |p| {
        for ino in [p.home, Ino(999)] {
            p.set(&key::session(ino, 5), Some(&writing.encode()));
        }
    });
    is_left(OPTIONS, async |p| {
        p.set(&key::session(p.note, 6), Some(&Session { cut: Some(77), ..writing }.encode()));
    });
}

#[test]
fn what_would_be_a_guess_is_left() {
    type Damage = fn(&Planter);
    let damages: [Damage; 7] = [
        |p| p.set(&key::inode(p.deep), None),
        |p| p.set(&key::inode(p.deep), Some(b"nonsense")),
        |p| p.set(b"Q", Some(b"what")),
        |p| p.set(key::SUPERBLOCK, None),
        |p| p.set(&key::xattr(p.note, b"user.a"), None),
        |p| p.set(&key::xattr(p.x, b"user.z"), Some(b"\x01value")),
        |p| p.set(&key::session(p.x, p.client), Some(b"nonsense")),
    ];
    for damage in damages {
        simulated(1, async {
            let p = Planter::new().await;
            damage(&p);
            let left = repaired(&p.store(), REATTACH).await;
            assert_ne!(left, [], "that was a guess");
            p.stop();
        });
    }
    is_left(OPTIONS, async |p| p.inode(p.note, |inode| inode.mode ^= 0o070).await);
    // The last name is lost; only --reattach gives it another.
    is_left(OPTIONS, async |p| {
        p.remove_entry(p.home, "note").await;
        p.inode(p.home, |inode| {
            inode.size -= 1;
            let Body::Directory { entries, .. } = &mut inode.body else { panic!() };
            *entries -= 1;
        })
        .await;
    });
}

#[test]
fn what_lost_its_name_is_given_one() {
    is_repaired(
        REATTACH,
        async |p| {
            p.remove_entry(p.home, "note").await;
            p.remove_entry(p.ann, "deep").await;
        },
        async |p| {
            let found = p.name(Ino::ROOT, "lost+found").await.ino;
            for (ino, nlink) in [(p.note, 1), (p.deep, 3)] {
                let row = p.name(found, &format!("ino-{}", ino.0)).await;
                assert_eq!(row.ino, ino);
                p.inode(ino, |inode| assert_eq!((inode.nlink, inode.parent), (nlink, found))).await;
            }
            let report = checked(&p.store()).await;
            assert_eq!((report.inodes, report.names), (12, 9));
            // Once more, into the directory that is there.
            p.remove_entry(p.home, "link").await;
            assert_eq!(repaired(&p.store(), REATTACH).await, []);
            assert_eq!(checked(&p.store()).await.names, 9);
        },
    );
    // Where something else has that name, nothing is done.
    is_left(REATTACH, async |p| {
        let row = NameRow { cookie: 900, ..p.name(p.home, "link").await };
        p.remove_entry(p.home, "link").await;
        p.set_entry(Ino::ROOT, "lost+found", row);
        p.inode(row.ino, |inode| inode.parent = Ino::ROOT).await;
        p.remove_entry(p.home, "note").await;
        for (ino, by) in [(Ino::ROOT, 1), (p.home, -2)] {
            p.inode(ino, |inode| {
                inode.size = inode.size.wrapping_add_signed(by);
                let Body::Directory { next_cookie, entries } = &mut inode.body else { panic!() };
                (*next_cookie, *entries) = (*next_cookie + 1000, inode.size);
            })
            .await;
        }
    });
}

#[test]
fn nothing_is_repaired_while_a_client_is_awaited() {
    is_left(OPTIONS, async |p| {
        let tail = TailRow { client: p.client, life: BootVerifier(7), numbers: 400 };
        p.set(key::TAIL, Some(&tail.encode()));
        p.inode(p.home, |inode| inode.size += 3).await;
        let numbers = Numbers::of(&p.store()).await.expect("reads");
        assert_eq!(numbers.awaited_ino, Some(400));
    });
}

#[test]
fn components_are_noted_in_files_only() {
    simulated(1, async {
        let p = Planter::new().await;
        assert!(note_components(&p.store(), p.x, 5).await.expect("room"));
        p.inode(p.x, |inode| assert_eq!(inode.components & 5, 5)).await;
        for ino in [p.home, Ino(999)] {
            assert!(!note_components(&p.store(), ino, 1).await.expect("reads"));
        }
        assert_eq!(p.findings().await, []);
        p.stop();
    });
}

/// Of random damage: it comes to an end, nothing that says something is dropped, and nothing is left that is repaired
/// where it is alone.
fn one(seed: u64) -> (usize, usize) {
    simulated(seed, async {
        let planter = Planter::new().await;
        for _ in 0..1 + random(3) {
            damage(&planter).await;
        }
        let store = planter.store();
        let before = rows(&store).await;
        let found = checked(&store).await.findings;
        let options = if random(2) == 0 { OPTIONS } else { REATTACH };
        let left = repaired(&store, options).await;
        let after = rows(&store).await;
        let told: BTreeSet<_> = [key::INODE, key::ENTRY, key::NAME, key::XATTR].into();
        for key in before.keys().filter(|key| told.contains(&key[0])) {
            assert!(after.contains_key(key), "seed {seed}: {key:?} is gone");
        }
        for (key, value) in before.iter().filter(|(key, _)| key[0] == key::XATTR) {
            assert_eq!(after.get(key), Some(value), "seed {seed}");
        }
        if left.is_empty() {
            let problems = crate::check::check(&store).await.expect("reads");
            assert_eq!(problems, [], "seed {seed}: the plain check finds more");
        }
        planter.stop();
        (found.len(), left.len())
    })
}

#[test]
fn random_damage_is_repaired_until_nothing_is() {
    let all: Vec<_> = (0..300).map(one).collect();
    let clean = all.iter().filter(|(found, left)| *found > 0 && *left == 0).count();
    let part = all.iter().filter(|(_, left)| *left > 0).count();
    assert!(clean > 30 && part > 30, "{clean} repaired, {part} in part");
}

/// A power cut between two repairs leaves a prefix of them: the next run does the rest.
#[test]
fn repairs_that_are_cut_off_are_gone_on_with() {
    simulated(3, async {
        let p = Planter::new().await;
        let before = rows(&p.store()).await;
        p.inode(p.home, |inode| inode.size += 3).await;
        p.inode(p.x, |inode| inode.nlink = 0).await;
        p.set(&key::name(p.home, b"link"), None);
        p.set(&key::orphan(Ino(999)), Some(MARK));
        p.store().durable(p.store().last_seq()).await.expect("durable");
        let report = checked(&p.store()).await;
        let store = p.store();
        let node = reactor::Group::new();
        let cut_off = reactor::spawn_in(&node, async move {
            repair(&store, &report, OPTIONS).await.expect("room");
        });
        reactor::yield_now().await;
        node.kill();
        drop(cut_off);
        p.world.power_cut().await;
        assert_eq!(repaired(&p.store(), OPTIONS).await, []);
        assert_eq!(without_changes(&rows(&p.store()).await), without_changes(&before));
        p.stop();
    });
}

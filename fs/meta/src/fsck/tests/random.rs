//! Random damage: what is found is what the plain check of all rows in memory finds.

use super::super::Finding;
use super::{Planter, checked};
use crate::check::{Problem, check};
use crate::row::Subject;
use crate::tests::simulated;
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_kv::{Bytes, Store};
use std::collections::BTreeSet;
use std::ops::Bound;

pub fn random(below: usize) -> usize {
    (reactor::random_u64() % below as u64) as usize
}

/// What of a finding the plain check tells as well.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    Row(&'static str),
    UnknownRow(Vec<u8>),
    Missing(&'static str),
    Entry(Ino, Vec<u8>),
    Name(&'static str, Ino, Vec<u8>),
    Inode(&'static str, Ino),
    Xattr(Ino, Vec<u8>),
    Session(Ino, u64),
    Counter(u64, u64),
    Usage(Subject),
    Reply(u64, u32),
}

fn of_finding(finding: &Finding) -> Told {
    match finding.clone() {
        Finding::Damaged { damaged, .. } => Told::Row(damaged.what),
        Finding::Missing(what) => Told::Missing(what),
        Finding::UnknownRow(key) => Told::UnknownRow(key),
        Finding::Entry { parent, name, .. } => Told::Entry(parent, name),
        Finding::Dangling { parent, name, .. } => Told::Name("dangling", parent, name),
        Finding::KindMismatch { parent, name, .. } => Told::Name("kind", parent, name),
        Finding::Listed { ino, .. } => Told::Inode("listed", ino),
        Finding::Unlisted(ino) | Finding::ListedTwice(ino) => Told::Inode("unlisted", ino),
        Finding::EntryCount { ino, .. } => Told::Inode("entries", ino),
        Finding::CookieReuse { ino, .. } => Told::Inode("cookie", ino),
        Finding::NoDirectory(ino) => Told::Inode("no-directory", ino),
        Finding::LinkCount { ino, .. } => Told::Inode("links", ino),
        Finding::Parent { ino, .. } => Told::Inode("parent", ino),
        Finding::Cycle(ino) => Told::Inode("cycle", ino),
        Finding::Acl(ino) => Told::Inode("acl", ino),
        Finding::Xattr { ino, name, .. } => Told::Xattr(ino, name),
        Finding::Session { ino, client } => Told::Session(ino, client),
        Finding::Counter { says, has, .. } => Told::Counter(says, has),
        Finding::Usage { subject, .. } => Told::Usage(subject),
        Finding::Reply { client, slot, .. } => Told::Reply(client, slot),
        Finding::Known { .. } => unreachable!("there is no service"),
    }
}

fn of_problem(problem: Problem) -> Told {
    match problem {
        Problem::Damaged(damaged) => Told::Row(damaged.what),
        Problem::Missing(what) => Told::Missing(what),
        Problem::UnknownRow(key) => Told::UnknownRow(key),
        Problem::EntryMismatch { parent, name } => Told::Entry(parent, name),
        Problem::Dangling { parent, name, .. } => Told::Name("dangling", parent, name),
        Problem::KindMismatch { parent, name, .. } => Told::Name("kind", parent, name),
        Problem::FalselyListed(ino) => Told::Inode("listed", ino),
        Problem::Leaked(ino) => Told::Inode("unlisted", ino),
        Problem::EntryCount { ino, .. } => Told::Inode("entries", ino),
        Problem::CookieReuse { ino, .. } => Told::Inode("cookie", ino),
        Problem::NoDirectory(ino) => Told::Inode("no-directory", ino),
        Problem::LinkCount { ino, .. } => Told::Inode("links", ino),
        Problem::Parent { ino, .. } => Told::Inode("parent", ino),
        Problem::Unreachable(ino) => Told::Inode("cycle", ino),
        Problem::Acl(ino) => Told::Inode("acl", ino),
        Problem::Xattr { ino, name } => Told::Xattr(ino, name),
        Problem::Session { ino, client } => Told::Session(ino, client),
        Problem::Counter { says, has, .. } => Told::Counter(says, has),
        Problem::Usage { subject, .. } => Told::Usage(subject),
        Problem::Reply { client, slot } => Told::Reply(client, slot),
    }
}

pub async fn all_rows(store: &Store) -> Vec<(Bytes, Bytes)> {
    store.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX).await.expect("reads")
}

/// Damages a row as a fault of a program or of memory might.
pub async fn damage(planter: &Planter) {
    let rows = all_rows(&planter.store()).await;
    let (key, value) = &rows[random(rows.len())];
    let (mut other_key, mut changed) = (key.to_vec(), value.to_vec());
    match random(8) {
        0 | 1 => planter.set(key, None),
        2..5 => {
            let at = random(changed.len());
            changed[at] ^= 1 << random(8);
            planter.set(key, Some(&changed));
        }
        5 => {
            let like: Vec<_> = rows.iter().filter(|(other, _)| other[0] == key[0]).collect();
            planter.set(key, Some(&like[random(like.len())].1));
        }
        6 => {
            let at = random(other_key.len());
            other_key[at] ^= 1 << random(8);
            planter.set(&other_key, Some(value));
        }
        _ => {
            changed.truncate(random(changed.len()));
            planter.set(key, Some(&changed));
        }
    }
}

fn one(seed: u64) -> usize {
    simulated(seed, async {
        let planter = Planter::new().await;
        for _ in 0..1 + random(3) {
            damage(&planter).await;
        }
        let store = planter.store();
        let before = all_rows(&store).await;
        let findings = checked(&store).await.findings;
        assert_eq!(all_rows(&store).await, before, "nothing is written");
        let problems = check(&store).await.expect("reads");
        planter.stop();
        compare(seed, &findings, problems);
        findings.len()
    })
}

/// Both find the same, but for what follows from something else that is found.
fn compare(seed: u64, findings: &[Finding], problems: Vec<Problem>) {
    let said = format!("seed {seed}\nfound {findings:#?}\nplain check {problems:#?}");
    let ours: BTreeSet<Told> = findings.iter().map(of_finding).collect();
    let plain: BTreeSet<Told> = problems.into_iter().map(of_problem).collect();
    // A slot that no client has keeps the service from opening; the plain check does not know of it.
    let is_slot = |finding: &Finding| matches!(finding, Finding::Reply { is_sound: false, .. });
    if findings.iter().any(is_slot) {
        return;
    }
    assert_eq!(ours.is_empty(), plain.is_empty(), "{said}");
    // What a row says that cannot be decoded, or on which two rows disagree, each counts in its own way.
    let is_open =
        |told: &Told| matches!(told, Told::Row(_) | Told::Entry(..) | Told::UnknownRow(_));
    if ours.iter().any(is_open) {
        let open = |all: &BTreeSet<Told>| -> BTreeSet<Told> {
            all.iter().filter(|told| is_open(told)).cloned().collect()
        };
        let missed: Vec<Told> = open(&plain)
            .difference(&open(&ours))
            .filter(|told| !matches!(told, Told::Entry(..)))
            .cloned()
            .collect();
        assert!(missed.is_empty(), "{missed:?} {said}");
        return;
    }
    // Everything below what is cut off is cut off; the plain check tells it all.
    let is_below = |told: &Told| matches!(told, Told::Inode("cycle" | "no-directory", _));
    let differ: Vec<_> = ours.symmetric_difference(&plain).filter(|told| !is_below(told)).collect();
    assert!(differ.is_empty(), "{differ:?} {said}");
}

#[test]
fn what_is_found_is_what_the_plain_check_finds() {
    let damaged = (0..300).filter(|seed| one(*seed) > 0).count();
    assert!(damaged > 100, "{damaged} damages mattered");
}

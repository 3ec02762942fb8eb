//! What developers run: git and cargo.

use crate::trees::make_tree;
use crate::{mounted, shell};

#[test]
fn git_keeps_a_repository() {
    let Some(cluster) = mounted("git") else { return };
    let (origin, mnt) = (cluster.path("origin"), cluster.mnt());
    make_tree(&origin);
    shell(&origin, "git init -q -b main && git add -A && git commit -qm first");
    shell(
        &origin,
        "rm -r 'folder 3' && echo more >> 'folder 4/more' && git add -A && git commit -qm second",
    );
    let clone = format!("git clone -q file://{} clone", origin.display());
    shell(&mnt, &clone);
    let work = mnt.join("clone");
    for _ in 0..2 {
        shell(&work, "git checkout -q main~1 && test -e 'folder 3' && git checkout -q main");
        assert_eq!(shell(&work, "git status --porcelain"), "");
        shell(&work, "git gc -q --prune=now && git fsck --full --strict");
    }
    shell(&work, "git checkout -qb branch && git mv 'folder 4' moved && git commit -qam moved");
    shell(&work, "git stash list && git rebase -q main && git worktree add -q ../second main");
    shell(&mnt, &format!("diff -r --no-dereference -x .git second {}", origin.display()));
}

#[test]
fn cargo_builds() {
    let Some(cluster) = mounted("cargo") else { return };
    let mnt = cluster.mnt();
    let cargo = env!("CARGO");
    shell(
        &mnt,
        &format!(
            "{cargo} new -q --vcs none hello && cd hello && {cargo} build -q --offline --target-dir target"
        ),
    );
    assert_eq!(shell(&mnt, "hello/target/debug/hello"), "Hello, world!\n");
    let again =
        shell(&mnt, &format!("cd hello && {cargo} build -v --offline --target-dir target 2>&1"));
    assert!(again.contains("Fresh hello"), "{again}");
}

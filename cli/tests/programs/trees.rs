//! Trees copied, packed, walked.

use crate::support::TINY;
use crate::{mounted, mounted_on, shell};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

/// A tree with what trees have: folders in folders, empty, small and larger files, programs, links of both sorts.
pub fn make_tree(dir: &Path) {
    for folder in 0..20 {
        let folder = dir.join(format!("folder {folder}/deeper/and deeper"));
        fs::create_dir_all(&folder).expect("made");
        for file in 0..30_usize {
            let bytes: Vec<u8> = (0..file * file * 37).map(|at| (at * file) as u8).collect();
            fs::write(folder.join(format!("file-{file}")), bytes).expect("written");
        }
        let program = folder.join("program");
        fs::write(&program, "#!/bin/sh\n").expect("written");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o750)).expect("set");
        symlink("../../missing", folder.join("nowhere")).expect("linked");
        fs::hard_link(&program, folder.join("same")).expect("linked");
    }
}

#[test]
fn archives_and_copies_are_exact() {
    let Some(cluster) = mounted("copies") else { return };
    let (tree, mnt) = (cluster.path("tree"), cluster.mnt());
    make_tree(&tree);
    let tree = tree.display();
    shell(
        &mnt,
        &format!("tar -C {tree} -cf all.tar . && mkdir untarred && tar -C untarred -xpf all.tar"),
    );
    shell(&mnt, "tar -C untarred -df all.tar");
    shell(&mnt, "cp -a --reflink=auto untarred copied && mv copied moved");
    let rsync = "rsync -aHAXi --delete --checksum";
    shell(
        &mnt,
        &format!(
            "{rsync} {tree}/ synced/ > /dev/null && rm -r 'synced/folder 1' && touch synced/odd"
        ),
    );
    shell(&mnt, &format!("{rsync} {tree}/ synced/ | grep 'deleting .*odd' > /dev/null"));
    for copy in ["untarred", "moved", "synced"] {
        // Nothing is left to do, by content, kind, mode, owner, time and links.
        assert_eq!(shell(&mnt, &format!("{rsync} -n {tree}/ {copy}/")), "", "{copy}");
    }
}

const FILES_EACH: usize = 1000;

/// `LEVADA_TREE_FOLDERS=n` folders of them, 30 unless told; `make soak` makes 200.
#[test]
fn very_many_files_are_found_and_counted() {
    let folders = std::env::var("LEVADA_TREE_FOLDERS")
        .map_or(30, |text| text.parse::<usize>().expect("a whole number of folders"));
    // Rows of the files need more room than a tiny cluster has.
    let roomy = TINY.replace("72MiB", "512MiB").replace("25MiB", "200MiB");
    let Some(cluster) = mounted_on("many", &roomy) else { return };
    let mnt = cluster.mnt();
    let inodes_used = || {
        let used = shell(&mnt, "df --output=iused . | tail -n 1");
        used.trim().parse::<usize>().expect("a number")
    };
    let before = inodes_used();
    for folder in 0..folders {
        let folder = mnt.join(format!("many/{folder}"));
        fs::create_dir_all(&folder).expect("made");
        for file in 0..FILES_EACH {
            // One in a hundred has contents.
            let contents = if file % 100 == 7 { "seven" } else { "" };
            fs::write(folder.join(format!("file-{file}")), contents).expect("written");
        }
    }
    let files = folders * FILES_EACH;
    let count = |line: &str| shell(&mnt, line).trim().parse::<usize>().expect("a number");
    assert_eq!(inodes_used(), before + files + folders + 1);
    assert_eq!(count("find many -type f | wc -l"), files);
    assert_eq!(count("find many -type f | sort -u | wc -l"), files);
    assert_eq!(count("find many -size -6c -size +0 -name 'file-*7' | wc -l"), files / 100);
    assert_eq!(count("du --inodes -s many | cut -f1"), files + folders + 1);
    let bytes =
        shell(&mnt, "find many -type f -printf '%s\\n' | awk '{ sum += $1 } END { print sum }'");
    assert_eq!(bytes.trim(), (files / 100 * 5).to_string());
    shell(&mnt, "rm -r many");
    assert_eq!(inodes_used(), before);
}

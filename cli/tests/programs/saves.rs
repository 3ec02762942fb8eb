//! Files that are saved anew: by an editor, by tools that edit in place, as an archive of archives.

use crate::support::{TINY, signal};
use crate::{mounted, mounted_on, shell};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

const SAVES: u64 = 30;
const KILL_AT: [u64; 2] = [10, 20];

#[test]
fn an_editor_saves_by_renaming() {
    let Some(cluster) = mounted("editor") else { return };
    let mnt = cluster.mnt();
    let text = mnt.join("text");
    fs::write(&text, "count 0\n").expect("written");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o640)).expect("set");
    let mut inode = fs::metadata(&text).expect("there").ino();
    for save in 1..=SAVES {
        if KILL_AT.contains(&save) {
            signal("-KILL", cluster.node().expect("it runs"));
            cluster.ok(&["up"]);
        }
        // `backupcopy=no`: the old file gets another name, and a new one is written in its place.
        shell(
            &mnt,
            &format!(
                "vim.tiny -es -u NONE -c 'set backup backupcopy=no backupskip= fsync' -c '%s/[0-9]*$/{save}/' -c wq text"
            ),
        );
        assert_eq!(fs::read_to_string(&text).expect("read"), format!("count {save}\n"));
        let backup = fs::read_to_string(mnt.join("text~")).expect("read");
        assert_eq!(backup, format!("count {}\n", save - 1));
        let meta = fs::metadata(&text).expect("there");
        assert_ne!(meta.ino(), inode, "the file was written in place");
        assert_eq!(meta.mode() & 0o7777, 0o640);
        inode = meta.ino();
    }
    let left: Vec<_> =
        fs::read_dir(&mnt).expect("listed").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 2, "swap files are gone: {left:?}");
}

#[test]
fn tools_edit_in_place() {
    let Some(cluster) = mounted("in-place") else { return };
    let mnt = cluster.mnt();
    shell(&mnt, "seq 100000 > numbers && sed -i 's/7/seven/g' numbers");
    let expected = shell(&mnt, "seq 100000 | sed 's/7/seven/g' | sha256sum");
    assert_eq!(shell(&mnt, "sha256sum < numbers"), expected);
    shell(&mnt, "perl -pi.old -e 's/seven/7/g' numbers && seq 100000 | cmp - numbers");
    assert_eq!(shell(&mnt, "sha256sum < numbers.old"), expected);
    shell(&mnt, "sort -rn -o numbers numbers && seq 100000 -1 1 | cmp - numbers");
}

/// What `docker save` writes and `docker load` reads: layers, each a tar named by its checksum, in one tar.
#[test]
fn an_image_is_saved_and_loaded() {
    // What is written while the node is away needs room for its rows.
    let roomy = TINY.replace("72MiB", "384MiB").replace("25MiB", "80MiB");
    let Some(cluster) = mounted_on("image", &roomy) else { return };
    let mnt = cluster.mnt();
    let save = "
        mkdir -p image/blobs
        tar -C / -cf layer --files-from <(find /usr/bin /usr/lib -xdev -type f -size -512k -print 2>/dev/null | head -n 500 | sed 's|^/||' || true)
        for layer in files random; do
            [ $layer = files ] || { head -c 48M /dev/urandom > random; tar -cf layer random; rm random; }
            mv layer image/blobs/$(sha256sum < layer | cut -d' ' -f1)
        done
        (cd image && ls blobs > manifest && tar -cf ../image.tar manifest blobs)
        sha256sum image.tar > image.sum";
    std::thread::scope(|scope| {
        let saved = scope.spawn(|| shell(&mnt, save));
        std::thread::sleep(std::time::Duration::from_secs(1));
        signal("-KILL", cluster.node().expect("it runs"));
        cluster.ok(&["up"]);
        saved.join().expect("it is saved");
    });
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["mount", "mnt"]);
    let load = "
        sha256sum -c image.sum
        mkdir loaded && tar -C loaded -xf image.tar
        cd loaded
        for layer in $(cat manifest); do
            [ \"$(sha256sum < blobs/$layer)\" = \"$layer  -\" ]
            mkdir root-$layer && tar -C root-$layer -xf blobs/$layer
        done
        tar -C root-$layer -df blobs/$layer";
    shell(&mnt, load);
}

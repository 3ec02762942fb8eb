//! Drives: what is on them, whose they are, and taking them.
//!
//! What always holds:
//! - To look at a drive neither opens it as a device nor locks it, so an array that is open elsewhere can be looked for.
//! - A drive that is not blank is overwritten only when told so, and then at both its ends: what is left of a label or
//!   a partition table must not come back to life in the midst of an array.

use crate::error::ArrayError;
use crate::store::{Glimpse, Store, glimpse, url_of};
use levada_base::ids::Uuid;
use levada_base::reactor;
use levada_base::units::{BLOCK_BYTES, MIB, round_down};
use levada_base::{BufMut, Epoch};
use levada_device::nvme::NvmeUrl;
use levada_device::{Device, Durability, find_foreign, read_label};
use levada_raid::{AssemblyReport, Finding, MEMBER_NAME_BYTES, Recorded};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Wiped at either end of a drive that held something else.
const END_BYTES: u64 = MIB;

/// Tells a drive from every other.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Identity {
    BlockDevice { number: u64 },
    File { file_system: u64, inode: u64 },
    Namespace { names: Vec<u8> },
}

/// A drive, looked at.
#[derive(Clone, Debug)]
pub(crate) struct Sighted {
    pub path: PathBuf,
    /// Whatever its path.
    identity: Identity,
    pub bytes: u64,
    /// What its newest superblock says, and which member it is.
    pub member: Option<(Recorded, usize)>,
    /// The other one, when it is of another array.
    other: Option<Recorded>,
}

impl Sighted {
    /// The UUID of the member that it is.
    pub fn member_uuid(&self) -> Option<Uuid> {
        self.member.as_ref().map(|(recorded, index)| recorded.members[*index].uuid)
    }
}

/// Looks at a drive.
pub(crate) fn sight(path: &Path) -> Result<Sighted, ArrayError> {
    let failed = |source| ArrayError::Read { path: path.into(), source };
    if let Some(url) = url_of(path) {
        let Glimpse { names, bytes, head } = glimpse(&url?, 2 * Recorded::BYTES)?;
        let found = head.chunks(Recorded::BYTES as usize).filter_map(Recorded::identify);
        return Ok(sighted(path, Identity::Namespace { names }, bytes, found.collect()));
    }
    let metadata = std::fs::metadata(path).map_err(failed)?;
    let identity = match metadata.file_type().is_block_device() {
        true => Identity::BlockDevice { number: metadata.rdev() },
        false => Identity::File { file_system: metadata.dev(), inode: metadata.ino() },
    };
    let mut file = File::open(path).map_err(failed)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
    let mut found: Vec<(Recorded, usize)> = Vec::new();
    for at in [0, Recorded::BYTES] {
        let mut block = vec![0; Recorded::BYTES as usize];
        // One that cannot be read does not hide the other.
        let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut block));
        if read.is_ok() {
            found.extend(Recorded::identify(&block));
        }
    }
    Ok(sighted(path, identity, bytes, found))
}

/// The same within a reactor that has other work, and must not stand still until a remote drive answers.
pub(crate) async fn sight_aside(path: &Path) -> Result<Sighted, ArrayError> {
    if url_of(path).is_none() {
        return sight(path);
    }
    let path = path.to_owned();
    let looked = reactor::aside("sight", move || sight(&path)).await;
    looked.map_err(ArrayError::system("look at a drive"))?
}

fn sighted(
    path: &Path,
    identity: Identity,
    bytes: u64,
    mut found: Vec<(Recorded, usize)>,
) -> Sighted {
    found.sort_by_key(|(recorded, _)| recorded.order);
    let member = found.pop();
    let other = found.pop().map(|(recorded, _)| recorded);
    let other = other.filter(|other| member.as_ref().is_some_and(|(it, _)| it.uuid != other.uuid));
    Sighted { path: path.into(), identity, bytes, member, other }
}

/// Looks at drives, none of which may be given twice.
pub(crate) fn sight_all(paths: &[PathBuf]) -> Result<Vec<Sighted>, ArrayError> {
    let mut all: Vec<Sighted> = Vec::new();
    for path in paths {
        let sighted = sight(path)?;
        if let Some(first) = all.iter().find(|other| other.identity == sighted.identity) {
            return Err(ArrayError::Twice { first: first.path.clone(), second: path.clone() });
        }
        all.push(sighted);
    }
    Ok(all)
}

/// The array that these drives are members of: what the newest superblock among them says.
///
/// # Errors
///
/// [`ArrayError::TwoArrays`], [`ArrayError::NoMember`], [`ArrayError::SeveralArrays`].
pub(crate) fn array_of(drives: &[Sighted]) -> Result<Recorded, ArrayError> {
    for drive in drives {
        if let (Some((newer, _)), Some(older)) = (&drive.member, &drive.other) {
            let name = |array: &Recorded| format!("{} ({})", array.name, array.uuid);
            let (path, first, second) = (drive.path.clone(), name(newer), name(older));
            return Err(ArrayError::TwoArrays { path, first, second });
        }
    }
    let found = drives.iter().filter_map(|drive| Some((drive, &drive.member.as_ref()?.0)));
    let arrays: BTreeSet<Uuid> = found.clone().map(|(_, recorded)| recorded.uuid).collect();
    if arrays.len() > 1 {
        let drives = found
            .map(|(drive, array)| (drive.path.clone(), array.name.clone(), array.uuid))
            .collect();
        return Err(ArrayError::SeveralArrays { drives });
    }
    if let Some(drive) = drives.iter().find(|drive| drive.member.is_none()) {
        let holds = "no superblock of one".into();
        return Err(ArrayError::NoMember { path: drive.path.clone(), holds });
    }
    let newest = found.map(|(_, recorded)| recorded).max_by_key(|recorded| recorded.order);
    // The command line asks for at least one drive.
    newest
        .cloned()
        .ok_or_else(|| ArrayError::NoMember { path: PathBuf::new(), holds: "nothing".into() })
}

/// Whether the drives fit together as members of `array`.
///
/// # Errors
///
/// [`ArrayError::Claimed`], [`ArrayError::CutShort`].
pub(crate) fn check_members(array: &Recorded, drives: &[Sighted]) -> Result<(), ArrayError> {
    let needed_bytes = array.data_at + array.data_bytes;
    for (i, drive) in drives.iter().enumerate() {
        let Some(uuid) = drive.member_uuid() else { continue };
        let Some(member) = array.members.iter().find(|member| member.uuid == uuid) else {
            continue;
        };
        let other = drives[..i].iter().find(|other| other.member_uuid() == Some(uuid));
        if let Some(other) = other {
            return Err(ArrayError::Claimed {
                first: other.path.clone(),
                second: drive.path.clone(),
                member: member.name.clone(),
            });
        }
        if member.state.is_live() && drive.bytes < needed_bytes {
            let (path, bytes) = (drive.path.clone(), drive.bytes);
            return Err(ArrayError::CutShort { path, bytes, needed_bytes });
        }
    }
    Ok(())
}

/// Whether any of the drives holds an older copy of a live member, by what assembly made of them in this order.
///
/// # Errors
///
/// [`ArrayError::Older`].
pub(crate) fn check_age<'a>(
    array: &Recorded,
    paths: impl Iterator<Item = &'a Path>,
    report: &AssemblyReport,
) -> Result<(), ArrayError> {
    let older = paths.zip(&report.devices).filter_map(|(path, (_, finding))| {
        let Finding::Stale { member, generation } = finding else { return None };
        let member = array.members.get(*member).filter(|member| member.state.is_live())?;
        Some((path.to_owned(), member.name.clone(), *generation))
    });
    let drives: Vec<_> = older.collect();
    match drives.is_empty() {
        true => Ok(()),
        false => Err(ArrayError::Older { drives, newest: report.generation }),
    }
}

/// What a drive holds that is somebody's; `None` when it is blank, or was a member of `array` and no longer is.
pub(crate) async fn holds(
    device: &dyn Device,
    sighted: &Sighted,
    array: Option<Uuid>,
) -> Result<Option<String>, ArrayError> {
    if let Some((recorded, index)) = &sighted.member {
        let name = &recorded.members[*index].name;
        return Ok(match array == Some(recorded.uuid) && sighted.other.is_none() {
            true => None,
            false => Some(format!("member {name} of array {} ({})", recorded.name, recorded.uuid)),
        });
    }
    if let Ok(label) = read_label(device).await {
        return Ok(Some(format!("drive {} of cluster {}", label.drive_name, label.cluster_name)));
    }
    Ok(find_foreign(device).await?.map(|found| found.to_string()))
}

/// Removes whatever somebody would take a drive for, at both of its ends.
pub(crate) async fn wipe(device: &dyn Device) -> Result<(), ArrayError> {
    let capacity = round_down(device.info().capacity_bytes, BLOCK_BYTES);
    let bytes = END_BYTES.min(capacity);
    for at in [0, capacity - bytes] {
        let zeroes = BufMut::zeroed(bytes as usize).freeze().into_vec();
        device.write(at, zeroes, Durability::Volatile).await?;
    }
    Ok(device.flush().await?)
}

/// Opens a drive that is to become a member of `array`, whose owner is of `epoch`, and sees to it that it is nobody's. `has_power_fence`: as for [`Store::open`].
/// `earlier`: what was open at the same place, and is given up.
pub(crate) async fn take(
    path: &Path,
    array: Uuid,
    epoch: Epoch,
    force: bool,
    has_power_fence: bool,
    earlier: Option<Store>,
) -> Result<Store, ArrayError> {
    let sighted = sight_aside(path).await?;
    let store = Store::open(path, has_power_fence).await?;
    if let Some(earlier) = earlier {
        store.comes_after(&earlier);
    }
    let device = store.device();
    let held = holds(&*device, &sighted, Some(array)).await?;
    if force {
        // Also a blank one: of its owner its target may not have heard that he is gone.
        store.seize(epoch).await?;
    }
    match held {
        Some(_) if force => wipe(&*device).await?,
        Some(holds) => {
            let drives = vec![(path.into(), holds)];
            return Err(ArrayError::Holds { drives, option: "--overwrite" });
        }
        None => {}
    }
    reserve(path)?;
    Ok(store)
}

/// Gives a regular file all its space, so that a write cannot fail for want of it.
pub(crate) fn reserve(path: &Path) -> Result<(), ArrayError> {
    let failed = |source| ArrayError::Read { path: path.into(), source };
    if url_of(path).is_some() {
        return Ok(());
    }
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(());
    }
    let file = File::options().write(true).open(path).map_err(failed)?;
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(&file, flags, 0, metadata.len()) {
        // A file system that cannot promise it.
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        result => result.map_err(|error| failed(error.into())),
    }
}

/// The name of the member on a drive: its file name, or the end of it, where serial numbers are; of a namespace the last part of its
/// subsystem's name and its number. `taken` are those of others.
pub(crate) fn name_of(path: &Path, taken: &BTreeSet<String>) -> String {
    let file_name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    // A namespace is called after its subsystem, whoever asks for it and however.
    let file_name = match url_of(path) {
        Some(Ok(NvmeUrl { subsystem, namespace, .. })) => {
            let last = subsystem.as_str().rsplit(':').next().unwrap_or_default().to_owned();
            if namespace == 0 { last } else { format!("{last}?ns={namespace}") }
        }
        _ => file_name.into_owned(),
    };
    let mut start = file_name.len().saturating_sub(MEMBER_NAME_BYTES);
    while !file_name.is_char_boundary(start) {
        start += 1;
    }
    let name = file_name[start..].to_owned();
    if !taken.contains(&name) {
        return name;
    }
    (2..)
        .map(|n: u32| {
            let number = format!("~{n}");
            let kept = name.char_indices().map(|(at, c)| at + c.len_utf8());
            let end = kept.take_while(|end| *end + number.len() <= MEMBER_NAME_BYTES).last();
            format!("{}{number}", &name[..end.unwrap_or(0)])
        })
        .find(|name| !taken.contains(name))
        .unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_namespaces_are_called_after_them() {
        let url = Path::new("nvme+tcp://10.0.0.1:4420/nqn.2026-11.io.levada:enclosure:e1?ns=7");
        assert_eq!(name_of(url, &BTreeSet::new()), "e1?ns=7");
        let known = Path::new("nvme+tcp://a/nqn.x:e1?ns=7&hdgst=1&host=nqn.x:me&keys=/etc/keys");
        assert_eq!(name_of(known, &BTreeSet::new()), "e1?ns=7");
        assert_eq!(name_of(Path::new("a:b/c:d"), &BTreeSet::new()), "c:d");
    }

    #[test]
    fn members_are_named_apart() {
        let mut taken = BTreeSet::new();
        for (path, name) in [
            ("/dev/sda", "sda"),
            ("a/d0.img", "d0.img"),
            ("b/d0.img", "d0.img~2"),
            ("c/d0.img", "d0.img~3"),
            (
                "/dev/disk/by-id/nvme-A_Maker_Of_Drives_S4EWNX0R123456",
                "er_Of_Drives_S4EWNX0R123456",
            ),
            ("/x/nvme-A_Maker_Of_Drives_S4EWNX0R123456", "er_Of_Drives_S4EWNX0R1234~2"),
            ("ä-very-long-name-of-a-drivé", "ä-very-long-name-of-a-drivé"),
        ] {
            let found = name_of(Path::new(path), &taken);
            assert!(found.len() <= MEMBER_NAME_BYTES && !taken.contains(&found), "{found}");
            if name.len() < 27 {
                assert_eq!(found, name);
            }
            taken.insert(found);
        }
    }
}

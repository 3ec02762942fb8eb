//! A new array.
//!
//! What always holds: nothing on any drive changes before all of them were looked at and the array is
//! known to be possible. Files that were made for it go again when it is not.

use crate::drives::{Sighted, holds, name_of, reserve, sight_all, wipe};
use crate::enclosures::Enclosures;
use crate::error::ArrayError;
use crate::level::LevelWords;
use crate::status::Status;
use crate::store::{Store, shut_out, url_of};
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::Reactor;
use levada_base::units::{BLOCK_BYTES, KIB, MIB};
use levada_device::{FileDevice, FileDeviceError, Prepare};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The epoch of who makes an array, on drives that do not remember a later owner; each later owner takes the next.
const FIRST_EPOCH: Epoch = Epoch(1);
/// Chunk of levels that stripe, and extent of mirrors.
const CHUNK_BYTES: u64 = 64 * KIB;
const EXTENT_BYTES: u64 = MIB;

/// What to make.
#[derive(Clone, Debug)]
pub struct Creation {
    pub name: String,
    pub level: LevelWords,
    pub chunk_bytes: Option<u64>,
    pub journal_bytes: Option<u64>,
    /// Of a block of the array: 512 or 4096; `None` for the larger that all drives write atomically.
    pub block_bytes: Option<u64>,
    pub spares: usize,
    /// Drives that are not there are made as files of this size.
    pub size_bytes: Option<u64>,
    /// Overwrites what the drives hold.
    pub force: bool,
    /// What shuts other servers out before anything is written, if drives cannot.
    pub power_fence: Option<String>,
    pub drives: Vec<PathBuf>,
}

/// What was made.
pub struct Created {
    pub status: Status,
    /// One line per thing that its maker may not have meant.
    pub remarks: Vec<String>,
}

/// Files that were made, removed unless all went well.
#[derive(Default)]
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn check_size(what: &'static str, bytes: Option<u64>) -> Result<(), ArrayError> {
    match bytes {
        Some(bytes) if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) => {
            Err(ArrayError::Unaligned { what, bytes })
        }
        _ => Ok(()),
    }
}

/// Makes an array, and closes it.
///
/// # Errors
///
/// [`ArrayError`]. Unless a drive fails meanwhile, nothing was changed then.
pub fn create(plan: &Creation) -> Result<Created, ArrayError> {
    let reactor = Reactor::new().map_err(ArrayError::system("use io_uring"))?;
    reactor.block_on(create_on(plan))
}

async fn create_on(plan: &Creation) -> Result<Created, ArrayError> {
    check_size("a chunk", plan.chunk_bytes)?;
    check_size("the journal", plan.journal_bytes)?;
    check_size("a drive", plan.size_bytes)?;
    let level = plan.level.level(plan.drives.len().saturating_sub(plan.spares))?;
    let mut made = Made::default();
    let mut files = Vec::new();
    for path in &plan.drives {
        files.push(make_file(path, plan.size_bytes, &mut made).await?);
    }
    let sighted = sight_all(&plan.drives)?;
    let mut devices = Vec::new();
    for (drive, file) in sighted.iter().zip(files) {
        // Not opened again: the kernel may hold the lock of one that was closed a moment ago.
        devices.push(match file {
            Some(file) => Store::File(Rc::new(file)),
            None => Store::open(&drive.path, plan.power_fence.is_some()).await?,
        });
    }
    let mut enclosures = Enclosures::default();
    let spec = spec_of(plan, level, &devices, &mut enclosures);
    spec.check()?;
    if let Some(bytes) = plan.journal_bytes {
        let needed_bytes = spec.journal_bytes_min()?;
        if bytes < needed_bytes {
            return Err(ArrayError::JournalTooSmall { bytes, needed_bytes });
        }
    }
    if let Some(command) = &plan.power_fence {
        shut_out(command, &spec.name, spec.uuid, Epoch::default(), &plan.drives, &devices).await?;
    }
    let mut remarks = remarks(&sighted, &devices);
    let held = held(plan, &sighted, &devices).await?;
    let mut epoch = FIRST_EPOCH;
    for device in devices.iter().filter(|_| plan.force) {
        epoch = epoch.max(device.owner().await.next());
    }
    // All of them before any is changed: those that somebody has had may be in use, and refuse changes by others.
    for device in devices.iter().filter(|_| plan.force) {
        device.reserve(epoch).await?;
    }
    for device in held {
        wipe(&*device.device()).await?;
    }
    for drive in &sighted {
        reserve(&drive.path)?;
    }
    let array = RaidArray::create(spec, epoch).await?;
    remarks.extend(enclosures.needed_by(&array.status()).into_iter().map(|enclosure| {
        format!(
            "the array would not survive the loss of enclosure {enclosure}: use fewer drives of it, or, in levels of groups, \
             list the drives so that each group has as many of every enclosure"
        )
    }));
    array.close().await?;
    drop(array);
    for device in devices {
        device.close().await;
    }
    made.0.clear();
    let mut status = crate::look::recorded(&sight_all(&plan.drives)?)?;
    status.judge();
    Ok(Created { status, remarks })
}

/// Makes a drive that does not exist.
async fn make_file(
    path: &Path,
    size: Option<u64>,
    made: &mut Made,
) -> Result<Option<FileDevice>, ArrayError> {
    if url_of(path).is_some() {
        return Ok(None);
    }
    // Somebody who may not look there must not make anything either.
    if !matches!(std::fs::symlink_metadata(path), Err(error) if error.kind() == std::io::ErrorKind::NotFound)
    {
        return Ok(None);
    }
    let Some(bytes) = size else { return Err(ArrayError::NotThere { path: path.into() }) };
    match FileDevice::create(path, bytes, Prepare::Reserve).await {
        Ok(file) => {
            made.0.push(path.into());
            Ok(Some(file))
        }
        // The same name twice is told as such below.
        Err(FileDeviceError::Exists { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn spec_of(
    plan: &Creation,
    level: Level,
    devices: &[Store],
    enclosures: &mut Enclosures,
) -> ArraySpec {
    let mut names = BTreeSet::new();
    let member = |(path, device): (&PathBuf, &Store)| {
        let name = name_of(path, &names);
        names.insert(name.clone());
        let enclosure = enclosures.number(path);
        MemberSpec { device: device.device(), uuid: Uuid::new_v4(), name, enclosure }
    };
    let members = plan.drives.iter().zip(devices).map(member).collect();
    let default_chunk =
        if matches!(level, Level::Raid1 { .. }) { EXTENT_BYTES } else { CHUNK_BYTES };
    ArraySpec {
        uuid: Uuid::new_v4(),
        name: plan.name.clone(),
        level,
        chunk_bytes: plan.chunk_bytes.unwrap_or(default_chunk),
        block_bytes: plan.block_bytes,
        journal_bytes: plan.journal_bytes,
        members,
        spares: plan.spares,
    }
}

/// Those of the drives that hold something, which may be overwritten.
async fn held<'a>(
    plan: &Creation,
    sighted: &[Sighted],
    devices: &'a [Store],
) -> Result<Vec<&'a Store>, ArrayError> {
    let mut held = Vec::new();
    for (drive, device) in sighted.iter().zip(devices) {
        if let Some(holds) = holds(&*device.device(), drive, None).await? {
            held.push((drive, device, holds));
        }
    }
    if !held.is_empty() && !plan.force {
        let drives = held.into_iter().map(|(drive, _, holds)| (drive.path.clone(), holds));
        return Err(ArrayError::Holds { drives: drives.collect(), option: "--force" });
    }
    Ok(held.into_iter().map(|(_, device, _)| device).collect())
}

fn remarks(sighted: &[Sighted], devices: &[Store]) -> Vec<String> {
    let mut remarks = Vec::new();
    let smallest = sighted.iter().min_by_key(|drive| drive.bytes);
    let unused: u64 =
        smallest.map_or(0, |least| sighted.iter().map(|drive| drive.bytes - least.bytes).sum());
    if let Some(least) = smallest
        && unused > 0
    {
        remarks.push(format!(
            "the smallest drive rules: {} has {} bytes; {unused} bytes of the others are not used",
            least.path.display(),
            least.bytes
        ));
    }
    let cached: Vec<String> = sighted
        .iter()
        .zip(devices)
        .filter(|(_, device)| !device.is_direct())
        .map(|(drive, _)| drive.path.display().to_string())
        .collect();
    if !cached.is_empty() {
        remarks.push(format!(
            "without direct I/O, which their file system has not: {}",
            cached.join(", ")
        ));
    }
    remarks
}

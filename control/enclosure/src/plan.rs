//! What an enclosure is made of, and how it is made.

use crate::bay::Bay;
use crate::enclosure::Enclosure;
use crate::kept_file::KeptFile;
use levada_base::reactor;
use levada_base::units::{BLOCK_BYTES, KIB, MIB};
use levada_device::{
    Device, DriveModel, FileDevice, FileDeviceError, NullDevice, Prepare, RamDevice,
};
use levada_export_nvmet::{
    Claims, Hosts, Keep, KeepError, KeysError, ListenError, NAMESPACES_MAX, NQN_PREFIX, Nqn,
    NqnError, Subsystem, Target, serial_of,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Of a drive.
const SIZE_BYTES_MIN: u64 = MIB;
/// Memory is taken as drives are written, so they may be larger than it altogether; but not as by a slip.
const MEMORY_TIMES_MAX: u64 = 16;

/// What its drives are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Media {
    /// Files of this directory, `bay1.img` and on; made with their full size where they are missing.
    Files(PathBuf),
    /// Memory: empty at every start.
    Ram,
    /// Answers at once, keeps nothing, and has no cache that could lose it: for measurements of what is above.
    Null,
}

/// An enclosure to be served.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Letters, digits, `-` and `_`: part of its subsystem's name.
    pub name: String,
    /// Where its target listens: a path each.
    pub paths: Vec<SocketAddr>,
    pub bays: u32,
    pub media: Media,
    /// Of each drive. Files that are there keep theirs.
    pub size_bytes: u64,
    /// How fast each drive is; as its media without one.
    pub model: Option<DriveModel>,
    /// Bytes by which each drive is used up, from new at every start; without it writing wears nothing.
    pub endurance_bytes: Option<u64>,
    /// Nobody can reserve its drives.
    pub lacks_reservations: bool,
    /// Who may connect; everybody where nobody is named, here or in `keys`.
    pub hosts: Vec<Nqn>,
    /// Secrets and keys of TLS of further hosts, a file ([`Hosts::chosen`]).
    pub keys: Option<PathBuf>,
    /// Nobody is let in without TLS, discovery included.
    pub tls_only: bool,
    /// Where its status is told over HTTP.
    pub status: Option<SocketAddr>,
    /// Cores beside the enclosure's own that carry connections, once it is served.
    pub network_cores: usize,
}

const NAME_BYTES_MAX: usize = 63;

/// Why an enclosure is not served.
#[derive(Debug, thiserror::Error)]
pub enum EnclosureError {
    #[error("an enclosure has 1 to {NAMESPACES_MAX} bays, and not {bays}")]
    Bays { bays: u32 },
    #[error(
        "a drive has whole blocks of {BLOCK_BYTES} bytes, at least {SIZE_BYTES_MIN} bytes, and not {bytes}"
    )]
    Size { bytes: u64 },
    #[error(
        "drives of {wanted_bytes} bytes altogether are more than {MEMORY_TIMES_MAX} times this machine's memory of {memory_bytes}"
    )]
    Memory { wanted_bytes: u64, memory_bytes: u64 },
    #[error(
        "{name:?} is no name of an enclosure: 1 to {NAME_BYTES_MAX} letters, digits, `-` and `_`"
    )]
    Name { name: String },
    #[error("an enclosure {name} is served already")]
    Served { name: String },
    #[error(transparent)]
    Nqn(#[from] NqnError),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot tell the status at {address}")]
    Status { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Media(#[from] FileDeviceError),
    #[error("cannot keep the GUID of a drive in {}: {source}", path.display())]
    Guid { path: PathBuf, source: std::io::Error },
    #[error("{} holds no GUID, 32 hexadecimal digits; once it is removed, the drive gets another", path.display())]
    NoGuid { path: PathBuf },
    /// A drive that forgot who has it could be written by two.
    #[error("{}: {source}; if nobody has the drive, remove the file", path.display())]
    Reservations { path: PathBuf, source: KeepError },
    #[error("cannot {what}")]
    System { what: &'static str, source: std::io::Error },
}

pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> EnclosureError {
    move |source| EnclosureError::System { what, source }
}

impl Plan {
    pub(crate) fn check(&self) -> Result<(), EnclosureError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if !(1..=NAME_BYTES_MAX).contains(&self.name.len()) || !self.name.bytes().all(is_plain) {
            return Err(EnclosureError::Name { name: self.name.clone() });
        }
        if !(1..=NAMESPACES_MAX).contains(&self.bays) {
            return Err(EnclosureError::Bays { bays: self.bays });
        }
        if self.size_bytes < SIZE_BYTES_MIN || !self.size_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(EnclosureError::Size { bytes: self.size_bytes });
        }
        let wanted_bytes = self.size_bytes.saturating_mul(self.bays.into());
        match memory_bytes() {
            Some(memory_bytes)
                if self.media == Media::Ram
                    && wanted_bytes > memory_bytes.saturating_mul(MEMORY_TIMES_MAX) =>
            {
                Err(EnclosureError::Memory { wanted_bytes, memory_bytes })
            }
            Some(_) | None => Ok(()),
        }
    }

    async fn drives(&self) -> Result<Vec<Bay>, EnclosureError> {
        if let Media::Files(dir) = &self.media {
            std::fs::create_dir_all(dir).map_err(system("make the directory of the drives"))?;
        }
        let mut bays = Vec::new();
        for number in 1..=self.bays {
            let mut claims = match self.lacks_reservations {
                true => Claims::lacking(),
                false => Claims::default(),
            };
            let mut guid = random_guid();
            let media: Rc<dyn Device> = match &self.media {
                Media::Ram => Rc::new(RamDevice::new(&format!("bay{number}"), self.size_bytes)),
                Media::Null => Rc::new(NullDevice::new(&format!("bay{number}"), self.size_bytes)),
                Media::Files(dir) => {
                    let path = dir.join(format!("bay{number}.img"));
                    // Also a link that leads nowhere: what it should lead to is missing.
                    let is_there = path.symlink_metadata().is_ok();
                    // First: a drive that a crash left without its own would have that of the one before.
                    guid = guid_of(&path, !is_there)?;
                    if !is_there {
                        forget_reservations(&path)?;
                    }
                    let file = match is_there {
                        true => FileDevice::open(&path)?,
                        false => {
                            FileDevice::create(&path, self.size_bytes, Prepare::Reserve).await?
                        }
                    };
                    // Now that nobody else serves it, and could let somebody have it.
                    if !self.lacks_reservations {
                        claims = reservations(&path).await?;
                    }
                    Rc::new(file)
                }
            };
            let has_cache = self.media != Media::Null;
            let (model, endurance) = (self.model.as_ref(), self.endurance_bytes);
            let identity = (number, guid);
            bays.push(Bay::new(identity, media, has_cache, model, endurance, claims));
        }
        Ok(bays)
    }

    /// Makes the enclosure, and lets its target listen.
    ///
    /// # Errors
    ///
    /// [`EnclosureError`].
    pub async fn open(&self) -> Result<Enclosure, EnclosureError> {
        self.check()?;
        let nqn = Nqn::new(format!("{NQN_PREFIX}:enclosure:{}", self.name))?;
        let (names, keys) = (self.hosts.iter().cloned(), self.keys.as_deref());
        let hosts = Hosts::chosen(names, keys, self.tls_only)?;
        let subsystem = Subsystem::new(nqn.clone(), serial_of(&nqn), hosts);
        let target = Target::new();
        if self.tls_only {
            target.require_tls();
        }
        let bays = self.drives().await?;
        Ok(Enclosure::new(self.name.clone(), target, subsystem, &self.paths, bays)?)
    }
}

/// Of this machine (proc(5)).
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.strip_suffix("kB"))?;
    Some(kib.trim().parse::<u64>().ok()? * KIB)
}

fn random_guid() -> u128 {
    let mut guid = [0; 16];
    reactor::fill_random(&mut guid);
    u128::from_be_bytes(guid)
}

/// By which hosts know the drive that `image` is again: a new one has another than whatever was in its bay before.
fn guid_of(image: &Path, is_new: bool) -> Result<u128, EnclosureError> {
    let file = KeptFile::guid(image);
    let at = || file.path().to_owned();
    let failed = |source| EnclosureError::Guid { path: at(), source };
    let known = if is_new { None } else { file.read().map_err(failed)? };
    match known {
        Some(text) => str::from_utf8(&text)
            .ok()
            .filter(|digits| digits.len() == 32 && digits.bytes().all(|it| it.is_ascii_hexdigit()))
            .and_then(|digits| u128::from_str_radix(digits, 16).ok())
            .ok_or_else(|| EnclosureError::NoGuid { path: at() }),
        None => {
            let guid = random_guid();
            file.replace(Some(format!("{guid:032x}").as_bytes())).map_err(failed)?;
            Ok(guid)
        }
    }
}

/// Nobody has reserved the drive that `image` is to become, whatever another drive in its bay has left behind.
fn forget_reservations(image: &Path) -> Result<(), EnclosureError> {
    let file = KeptFile::reservations(image);
    let path = || file.path().to_owned();
    let failed =
        |error| EnclosureError::Reservations { path: path(), source: KeepError::store(error) };
    file.replace(None).map_err(failed)
}

/// Who has reserved the drive that `image` is.
async fn reservations(image: &Path) -> Result<Claims, EnclosureError> {
    let file = Rc::new(KeptFile::reservations(image));
    let claims = Claims::kept(Rc::clone(&file) as Rc<dyn Keep>);
    match claims.load().await {
        Ok(()) => Ok(claims),
        Err(source) => Err(EnclosureError::Reservations { path: file.path().to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use std::time::Duration;

    fn plan(bays: u32, media: Media, size_bytes: u64) -> Plan {
        Plan {
            name: "e1".into(),
            paths: Vec::new(),
            bays,
            media,
            size_bytes,
            model: None,
            endurance_bytes: None,
            lacks_reservations: false,
            hosts: Vec::new(),
            keys: None,
            tls_only: false,
            status: None,
            network_cores: 0,
        }
    }

    #[test]
    fn a_new_drive_has_no_reservations_of_the_old_one() {
        Reactor::new().expect("an io_uring").block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let plan = plan(1, Media::Files(dir.path().to_owned()), MIB);
            let kept = dir.path().join("bay1.reservations");
            std::fs::write(&kept, b"damaged").expect("written");
            drop(plan.drives().await.expect("another drive"));
            assert!(!kept.exists());
            std::fs::write(&kept, b"damaged").expect("written");
            // What writes its cache back keeps a drive open for a while.
            let opening = async {
                loop {
                    match plan.drives().await {
                        Err(EnclosureError::Media(_)) => {
                            reactor::sleep(Duration::from_millis(50)).await;
                        }
                        opened => return opened,
                    }
                }
            };
            let opened = reactor::timeout(Duration::from_secs(20), opening).await;
            let opened = opened.expect("it is let go of");
            assert!(matches!(opened, Err(EnclosureError::Reservations { .. })));
        });
    }

    #[test]
    fn a_guid_goes_with_the_drive() {
        Reactor::new().expect("an io_uring").block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let image = dir.path().join("bay1.img");
            let guid = |is_new| guid_of(&image, is_new);
            let first = guid(true).expect("made");
            assert_eq!(guid(false).expect("kept"), first);
            let second = guid(true).expect("made");
            assert_ne!(second, first, "another drive in its bay");
            let file = dir.path().join("bay1.guid");
            for damaged in ["", "12", "+2345678901234567890123456789012", "\u{fffd}\u{fffd}"] {
                std::fs::write(&file, damaged).expect("written");
                let told = guid(false).expect_err("damaged").to_string();
                assert!(told.starts_with(&file.display().to_string()), "{told}");
            }
            std::fs::remove_file(&file).expect("removed");
            assert_ne!(guid(false).expect("made"), second);
        });
    }

    #[test]
    fn drives_are_of_a_size_that_there_can_be() {
        Reactor::new().expect("an io_uring").block_on(async {
            let plan = |size_bytes| plan(24, Media::Ram, size_bytes);
            for bytes in [0, 1000, MIB + 1] {
                assert!(matches!(plan(bytes).check(), Err(EnclosureError::Size { .. })), "{bytes}");
            }
            assert!(plan(MIB).check().is_ok());
            for bytes in [10 << 50, !4095] {
                assert!(matches!(plan(bytes).check(), Err(EnclosureError::Memory { .. })));
            }
        });
    }
}

//! The health of an NVMe drive of this machine, by the admin commands that the kernel passes on for whoever is root.
//!
//! What always holds:
//! - The log is read through a descriptor that is open already, and nothing else is asked of the drive.
//! - It blocks until the drive answers, so a thread waits for it. How long is the kernel's to say: with a limit of ours it would
//!   reset a drive that is merely busy.
#![allow(unsafe_code)] // ioctl(2) has no safe interface in std.

use levada_base::reactor::mailbox;
use levada_nvme::identify::EVERY_NAMESPACE;
use levada_nvme::log::{GetLogPage, HEALTH_BYTES, Health, LogPage};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of the namespace behind a descriptor: `_IO('N', 0x40)`, which other drivers do not have.
const NVME_IOCTL_ID: u32 = 0x4e40;
/// `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
const NVME_IOCTL_ADMIN_CMD: u32 = 0xc048_4e41;

/// `struct nvme_passthru_cmd` of `linux/nvme_ioctl.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Passthrough {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    dwords_2_and_3: [u32; 2],
    metadata: u64,
    /// An address in this process.
    data: u64,
    metadata_bytes: u32,
    data_bytes: u32,
    dwords_10_to_15: [u32; 6],
    /// 0: the kernel's own.
    timeout_ms: u32,
    result: u32,
}

impl Passthrough {
    /// Get Log Page, of the health of the whole drive, without a place for its data.
    fn get_health() -> Self {
        let bytes = HEALTH_BYTES as u64;
        let page = LogPage::Health as u8;
        let get = GetLogPage { page, specific: 0, keeps_event: true, at: 0, bytes };
        let command = get.command(0, EVERY_NAMESPACE);
        Self {
            opcode: command.opcode(),
            namespace: command.namespace(),
            data_bytes: HEALTH_BYTES as u32,
            dwords_10_to_15: std::array::from_fn(|index| command.dword(10 + index)),
            ..Self::default()
        }
    }
}

/// Whether a descriptor is that of an NVMe namespace.
fn is_nvme(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: this request has no argument and touches no memory of ours.
    let namespace = unsafe { libc::ioctl(fd.as_raw_fd(), NVME_IOCTL_ID as libc::Ioctl) };
    namespace > 0
}

/// `None`: it is no NVMe drive, or does not tell, or not to this user.
fn read_health(fd: BorrowedFd<'_>) -> Option<Health> {
    if !is_nvme(fd) {
        return None;
    }
    let mut page = [0_u8; HEALTH_BYTES];
    let mut command = Passthrough { data: page.as_mut_ptr() as u64, ..Passthrough::get_health() };
    // SAFETY: the kernel reads and writes `command`, which has the layout of the request's argument, and writes `data_bytes` at
    // `data`, which is all of `page`. Both live until it returns, and it keeps neither.
    let status = unsafe {
        libc::ioctl(fd.as_raw_fd(), NVME_IOCTL_ADMIN_CMD as libc::Ioctl, &raw mut command)
    };
    // Above 0 it is the drive's own status.
    (status == 0).then(|| Health::parse(&page))
}

/// Looks at drives one at a time, each time by a thread that ends with the answer.
#[derive(Debug, Default)]
pub(crate) struct Looking {
    /// Until the drive has answered, whether or not somebody still waits.
    is_asked: Arc<AtomicBool>,
}

impl Looking {
    /// The health of the drive behind a descriptor, unless an earlier question is not answered yet.
    pub async fn look(&self, fd: OwnedFd) -> Option<Health> {
        if self.is_asked.swap(true, Ordering::AcqRel) {
            return None;
        }
        let is_asked = Arc::clone(&self.is_asked);
        let asked = mailbox::channel().and_then(|(sender, mailbox)| {
            let ask = move || {
                let health = read_health(std::os::fd::AsFd::as_fd(&fd));
                is_asked.store(false, Ordering::Release);
                // Nobody may wait any more.
                let _ = sender.send(health);
            };
            std::thread::Builder::new().name("health".into()).spawn(ask)?;
            Ok(mailbox)
        });
        match asked {
            Ok(mut mailbox) => mailbox.recv().await.flatten(),
            Err(_) => {
                self.is_asked.store(false, Ordering::Release);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;
    use std::os::fd::AsFd;

    /// There is no such drive where tests run: this holds the command against the kernel's header instead.
    #[test]
    fn the_command_is_laid_out_as_the_kernel_has_it() {
        let size = size_of::<Passthrough>();
        // Direction, size, type and number.
        assert_eq!(
            NVME_IOCTL_ADMIN_CMD,
            3 << 30 | (size as u32) << 16 | u32::from(b'N') << 8 | 0x41
        );
        assert_eq!(
            [
                offset_of!(Passthrough, namespace),
                offset_of!(Passthrough, dwords_2_and_3),
                offset_of!(Passthrough, metadata),
                offset_of!(Passthrough, data),
                offset_of!(Passthrough, metadata_bytes),
                offset_of!(Passthrough, data_bytes),
                offset_of!(Passthrough, dwords_10_to_15),
                offset_of!(Passthrough, timeout_ms),
                offset_of!(Passthrough, result),
                size,
            ],
            [4, 8, 16, 24, 32, 36, 40, 64, 68, 72]
        );
        let command = Passthrough::get_health();
        assert_eq!((command.opcode, command.flags, command.namespace), (0x02, 0, 0xffff_ffff));
        // 128 doublewords of page 2, from its beginning; events of it stay for whoever waits for them.
        assert_eq!(command.dwords_10_to_15, [127 << 16 | 1 << 15 | 0x02, 0, 0, 0, 0, 0]);
        assert_eq!((command.data_bytes, command.timeout_ms), (512, 0));
    }

    #[test]
    fn what_is_no_nvme_drive_is_not_asked() {
        for path in ["/dev/null", "/proc/self/exe"] {
            let file = std::fs::File::open(path).expect("it is there");
            assert!(!is_nvme(file.as_fd()), "{path}");
            assert_eq!(read_health(file.as_fd()), None);
        }
    }
}

//! A client of vhost-user-blk: the driver of libblkio on a thread that polls, with memory of its own as a guest has it.
#![allow(unsafe_code)] // mmap(2), and buffers in memory that the server writes to.

use crate::harness::{Meter, Run};
use crate::load::Load;
use anyhow::{Context, Result, anyhow, ensure};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf,
    VirtioBlkTransport, VirtioFeatureFlags,
};

/// Descriptors of the ring; a read takes three of them: header, data, status.
const RING_SLOTS: u16 = 512;

/// Memory that the server sees, too.
struct Shared {
    file: OwnedFd,
    start: *mut u8,
    bytes: usize,
}

impl Shared {
    fn new(bytes: usize) -> Result<Self> {
        let file = memfd_create(c"guest", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes as u64)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping, away from every other.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
        ensure!(start != libc::MAP_FAILED, std::io::Error::last_os_error());
        Ok(Self { file, start: start.cast(), bytes })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping made above, which nobody looks at any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Reads what `load` says, of the disk at `socket`, and measures it. Blocks.
///
/// # Errors
///
/// Nobody serves there, or a read failed.
pub(crate) fn read(socket: &Path, load: &Load) -> Result<Run> {
    let features = VirtioFeatureFlags::VERSION_1
        | VirtioFeatureFlags::RING_EVENT_IDX
        | VirtioFeatureFlags::RING_INDIRECT_DESC;
    let wanted = features.bits() | VirtioBlkFeatureFlags::all().bits();
    let path = socket.to_str().context("a plain path")?;
    let transport = VhostUser::<VirtioBlkConfig, VirtioBlkReqBuf>::new(path, wanted);
    let mut transport: Box<VirtioBlkTransport> =
        Box::new(transport.map_err(|error| anyhow!("connecting: {error}"))?);
    let mut queues = VirtioBlkQueue::<usize>::setup_queues(&mut *transport, 1, RING_SLOTS)?;
    let queue = queues.first_mut().context("a queue")?;
    let piece = usize::try_from(load.piece_bytes)?;
    let memory = Shared::new(load.depth * piece)?;
    transport.map_mem_region(memory.start as usize, memory.bytes, memory.file.as_raw_fd(), 0)?;
    let kick = transport.get_submission_notifier(0);

    let mut idle: Vec<usize> = (0..load.depth).collect();
    let mut pass = |offsets: &[u64]| -> Result<()> {
        let (mut next, mut done) = (offsets.iter(), 0);
        while done < offsets.len() {
            let mut has_asked = false;
            while let Some(slot) = idle.pop() {
                let Some(at) = next.next() else {
                    idle.push(slot);
                    break;
                };
                // SAFETY: each slot is a piece of the mapping of its own, and asked for once at a time.
                unsafe { queue.read_raw(*at, memory.start.add(slot * piece), piece, slot)? };
                has_asked = true;
            }
            if has_asked && queue.avail_notif_needed() {
                kick.notify()?;
            }
            for answer in queue.completions() {
                ensure!(answer.ret == 0, "a read failed: {}", answer.ret);
                idle.push(answer.context);
                done += 1;
            }
            std::hint::spin_loop();
        }
        Ok(())
    };
    let offsets = load.offsets();
    // A guest has used its memory before: here every page of it is.
    pass(&offsets[..load.depth.min(offsets.len())])?;
    let (meter, total) = (Meter::start()?, offsets.len() as u64);
    pass(&offsets)?;
    meter.stop(total * load.piece_bytes, total)
}

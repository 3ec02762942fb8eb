//! The cluster in a box: the cluster that `levada up` makes when there is no file.

use std::path::Path;

use crate::file::{
    ArraySpec, ClusterFile, DRIVE_RESERVED_BYTES, DriveSpec, EnclosureSpec, FileSystemSpec,
    HealthSpec, Level, MountSpec, ParityKind, RebuildSpec, SLICE_ALIGN_BYTES, ScrubSpec, SliceSize,
    Spread,
};
use crate::{Bytes, Required};

/// Drives of a box.
pub const BOX_DRIVES: usize = 12;
/// Enclosures of a box; its drives are dealt over them evenly.
pub const BOX_ENCLOSURES: usize = 6;

/// The smallest useful drive of a box.
const DRIVE_LEAST: Bytes = Bytes::mib(512);
/// The largest: a box is for trying things out.
const DRIVE_MOST: Bytes = Bytes::gib(4);
/// A box leaves at least two thirds of the free space alone.
const FREE_SHARE: u64 = 3;
/// The mirrored slice is one part in so many of a drive, and at least `META_LEAST`.
const META_SHARE: u64 = 8;
const META_LEAST: Bytes = Bytes::mib(128);

/// Why there cannot be a box here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BoxError {
    /// Too little free space for the smallest box.
    #[error(
        "{} has {free} free; a box needs {needed}: {BOX_DRIVES} drives of at least {drive_least}, \
         in at most a third of the free space",
        directory.display()
    )]
    TooLittleSpace {
        /// Where the box was to be.
        directory: std::path::PathBuf,
        /// Free there.
        free: Bytes,
        /// Free space that would do.
        needed: Bytes,
        /// The smallest drive.
        drive_least: Bytes,
    },
}

impl ClusterFile {
    /// The default cluster: 12 preallocated files in 6 enclosures of 2, a three-copy mirror
    /// for metadata, RAID 6 of 8 + 2 with 2 spares for data, one file system, one mount.
    ///
    /// Paths in it are relative: its text belongs in `directory` as `levada.toml`.
    /// `free_bytes` is what the file system of `directory` has to give; the drives take at
    /// most a third of it together, and 4 GiB each.
    ///
    /// # Errors
    ///
    /// [`BoxError::TooLittleSpace`] when drives of 512 MiB would take more than that third.
    pub fn box_default(directory: &Path, free_bytes: u64) -> Result<Self, BoxError> {
        let drives = BOX_DRIVES as u64;
        let size =
            Bytes(free_bytes / FREE_SHARE / drives).floor_to(SLICE_ALIGN_BYTES).min(DRIVE_MOST);
        if size < DRIVE_LEAST {
            return Err(BoxError::TooLittleSpace {
                directory: directory.into(),
                free: Bytes(free_bytes).floor_to(SLICE_ALIGN_BYTES),
                needed: Bytes(DRIVE_LEAST.0 * drives * FREE_SHARE),
                drive_least: DRIVE_LEAST,
            });
        }
        // Round sizes are easier on the eye in a file that people edit.
        let size = size.floor_to(64 * Bytes::MIB);
        let meta = Bytes((size.0 - DRIVE_RESERVED_BYTES) / META_SHARE)
            .floor_to(16 * Bytes::MIB)
            .max(META_LEAST);

        let per_enclosure = BOX_DRIVES / BOX_ENCLOSURES;
        let drives: Vec<DriveSpec> = (0..BOX_DRIVES)
            .map(|index| DriveSpec {
                name: format!("d{index:02}"),
                path: format!("drives/d{index:02}.img").into(),
                enclosure: format!("e{}", index / per_enclosure),
                size: Some(size),
            })
            .collect();
        let names: Vec<String> = drives.iter().map(|drive| drive.name.clone()).collect();
        Ok(ClusterFile {
            name: "box".into(),
            state_dir: "state".into(),
            power_fence: None,
            network_cores: 0,
            ring_cores: 0,
            hosts: Vec::new(),
            enclosures: (0..BOX_ENCLOSURES)
                .map(|i| EnclosureSpec { name: format!("e{i}"), host: None, url: None })
                .collect(),
            drives,
            spares: Vec::new(),
            rebuild: RebuildSpec::default(),
            scrub: ScrubSpec::default(),
            health: HealthSpec::default(),
            arrays: vec![
                ArraySpec {
                    name: "meta".into(),
                    level: Level::Raid1 { copies: 3, spread: Spread::Enclosure },
                    slice: SliceSize::Bytes(meta),
                    spares: 0,
                    drives: names.clone(),
                    required: Required::default(),
                },
                ArraySpec {
                    name: "data".into(),
                    level: Level::Parity {
                        kind: ParityKind::Raid6,
                        data: 8,
                        chunk: Bytes::kib(128),
                    },
                    slice: SliceSize::Rest,
                    spares: 2,
                    drives: names,
                    required: Required::default(),
                },
            ],
            filesystems: vec![FileSystemSpec {
                name: "fs".into(),
                data: "data".into(),
                metadata: "meta".into(),
                object_targets: 4,
                metadata_targets: 1,
                stripe_unit: Bytes::mib(1),
                stripe_count: 4,
                required: Required::default(),
            }],
            mounts: vec![MountSpec { path: "mnt".into(), filesystem: "fs".into(), host: None }],
            exports: Vec::new(),
            testing: None,
        })
    }
}

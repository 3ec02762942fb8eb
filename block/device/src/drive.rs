//! A labelled drive: identity, slices, fencing, and the fate its slices share.
//!
//! What always holds:
//! - At least one of the two labels is whole; the one with the higher generation counts.
//! - [`Drive::fence`] returns only when the epoch is durable at both ends.
//! - Once failed, a drive stays failed until it is opened anew, with all its slices.
//!
//! After a crash in a change of the label, `open` finds one end a generation ahead and writes it
//! to the other. Bytes and reasons: `docs/design/0002-drive-label.md`.

use crate::foreign::{Foreign, find_foreign};
use crate::label::{LABEL_BYTES, Label, LabelError, RESERVED_BYTES, SliceEntry};
use crate::slice::Slice;
use crate::{BlockError, Device, Durability, Witness};
use levada_base::ids::Uuid;
use levada_base::sync::Semaphore;
use levada_base::units::{BLOCK_BYTES, round_down};
use levada_base::{Buf, BufMut, Epoch, planted};
use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;

/// Why a drive cannot be formatted or opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriveError {
    /// The device itself failed.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// Neither end holds a good label; this is what is wrong with the head.
    #[error("not a drive of Levada: {0}")]
    Unlabelled(LabelError),
    /// What shall be written breaks a rule.
    #[error(transparent)]
    Invalid(LabelError),
    /// The drive carries somebody else's data.
    #[error("the drive carries {found}; nothing was changed")]
    Foreign { found: Foreign },
    /// The drive has been formatted by Levada before.
    #[error("the drive is {drive_name:?} of cluster {cluster_name:?} already; nothing was changed")]
    Labelled { cluster_uuid: Uuid, cluster_name: String, drive_uuid: Uuid, drive_name: String },
    /// The two ends belong to different drives.
    #[error("the two ends of the drive are labelled as different drives: {head} and {tail}")]
    TwoDrives { head: Uuid, tail: Uuid },
    /// The device became smaller than its label says.
    #[error(
        "the drive had {labelled_bytes} bytes when it was formatted, now {capacity_bytes}: one of at least as many has to come in its place"
    )]
    Shrunk { capacity_bytes: u64, labelled_bytes: u64 },
}

/// Who a drive is; given when it is formatted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveIdentity {
    pub cluster_uuid: Uuid,
    pub cluster_name: String,
    pub drive_uuid: Uuid,
    pub drive_name: String,
    pub drive_index: u32,
    pub enclosure_name: String,
}

/// What formatting may overwrite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overwrite {
    /// Only a drive that is blank.
    #[default]
    Nothing,
    /// Whatever is there.
    Anything,
}

/// A labelled drive, open.
pub struct Drive {
    device: Rc<dyn Device>,
    label: RefCell<Label>,
    failed: Cell<bool>,
    /// One change of the label at a time.
    changing: Rc<Semaphore>,
}

/// Both ends of a drive as read.
struct Ends {
    head: Result<Label, LabelError>,
    tail: Result<Label, LabelError>,
}

impl Ends {
    async fn read(device: &dyn Device) -> Result<Self, DriveError> {
        let capacity_bytes = round_down(device.info().capacity_bytes, BLOCK_BYTES);
        if capacity_bytes < 2 * RESERVED_BYTES {
            return Err(DriveError::Invalid(LabelError::Capacity { bytes: capacity_bytes }));
        }
        let head = read_label_at(device, 0).await?;
        let tail_at = match &head {
            Ok(head) if head.capacity_bytes > capacity_bytes => {
                let labelled_bytes = head.capacity_bytes;
                return Err(DriveError::Shrunk { capacity_bytes, labelled_bytes });
            }
            Ok(head) => head.tail_at(),
            Err(_) => capacity_bytes - BLOCK_BYTES,
        };
        let tail = read_label_at(device, tail_at).await?;
        // A block that says it is the tail of a drive of another size is not this drive's tail.
        let tail = tail.and_then(|tail| {
            if tail.tail_at() == tail_at { Ok(tail) } else { Err(LabelError::NoMagic) }
        });
        Ok(Self { head, tail })
    }

    /// The label that counts, and whether the other end must be written anew.
    fn choose(self) -> Result<(Label, bool), DriveError> {
        match (self.head, self.tail) {
            (Ok(head), Ok(tail)) if head.drive_uuid != tail.drive_uuid => {
                Err(DriveError::TwoDrives { head: head.drive_uuid, tail: tail.drive_uuid })
            }
            (Ok(head), Ok(tail)) => {
                let differ = head != tail;
                Ok((if tail.generation > head.generation { tail } else { head }, differ))
            }
            (Ok(label), Err(_)) | (Err(_), Ok(label)) => Ok((label, true)),
            (Err(head), Err(_)) => Err(DriveError::Unlabelled(head)),
        }
    }
}

/// The label at `at`; a block that cannot be read counts as no label.
async fn read_label_at(
    device: &dyn Device,
    at: u64,
) -> Result<Result<Label, LabelError>, BlockError> {
    match device.read(at, BufMut::zeroed(LABEL_BYTES).into_vec()).await {
        Ok(read) => Ok(Label::decode(&read[0])),
        Err(BlockError::Medium { .. }) => Ok(Err(LabelError::Checksum)),
        Err(error) => Err(error),
    }
}

/// Reads the label that counts and changes nothing: for looking at a drive.
///
/// # Errors
///
/// A [`DriveError`] that says why this is not a drive of Levada.
pub async fn read_label(device: &dyn Device) -> Result<Label, DriveError> {
    Ok(Ends::read(device).await?.choose()?.0)
}

impl Drive {
    /// Labels a device and opens it. What slices hold is not touched, except by what a label of
    /// another size of drive would leave behind.
    ///
    /// # Errors
    ///
    /// [`DriveError::Foreign`] or [`DriveError::Labelled`] when the drive is in use and
    /// `overwrite` forbids it, [`DriveError::Invalid`] when the slices do not fit.
    pub async fn format(
        device: Rc<dyn Device>,
        identity: DriveIdentity,
        slices: Vec<SliceEntry>,
        overwrite: Overwrite,
    ) -> Result<Rc<Self>, DriveError> {
        let label = Label {
            generation: 1,
            owner_epoch: Epoch::default(),
            cluster_uuid: identity.cluster_uuid,
            cluster_name: identity.cluster_name,
            drive_uuid: identity.drive_uuid,
            drive_name: identity.drive_name,
            drive_index: identity.drive_index,
            enclosure_name: identity.enclosure_name,
            capacity_bytes: round_down(device.info().capacity_bytes, BLOCK_BYTES),
            slices,
        };
        label.check().map_err(DriveError::Invalid)?;
        if overwrite == Overwrite::Nothing {
            Self::refuse_used(&*device).await?;
        }
        device.recognise_by(None);
        device.write_zeroes(0, RESERVED_BYTES).await?;
        device.write_zeroes(label.capacity_bytes - RESERVED_BYTES, RESERVED_BYTES).await?;
        device.flush().await?;
        store(&*device, &label).await?;
        Ok(Self::with(device, label))
    }

    /// Looks whether a device carries anything that formatting would lose; changes nothing.
    ///
    /// # Errors
    ///
    /// [`DriveError::Foreign`] or [`DriveError::Labelled`] when it does.
    pub async fn refuse_used(device: &dyn Device) -> Result<(), DriveError> {
        let ends = Ends::read(device).await;
        let label = match ends {
            Ok(ends) => ends.head.or(ends.tail).ok(),
            Err(DriveError::Shrunk { .. }) => read_label_at(device, 0).await?.ok(),
            // Nobody can format it, by force or not: who tries is told so, not that it is in use.
            Err(DriveError::Invalid(LabelError::Capacity { .. })) => return Ok(()),
            Err(error) => return Err(error),
        };
        if let Some(label) = label {
            return Err(DriveError::Labelled {
                cluster_uuid: label.cluster_uuid,
                cluster_name: label.cluster_name,
                drive_uuid: label.drive_uuid,
                drive_name: label.drive_name,
            });
        }
        match find_foreign(device).await? {
            Some(found) => Err(DriveError::Foreign { found }),
            None => Ok(()),
        }
    }

    /// Opens a labelled device; repairs a label that is missing, bad or old at one end.
    ///
    /// # Errors
    ///
    /// A [`DriveError`] that says why this is not a usable drive of Levada.
    pub async fn open(device: Rc<dyn Device>) -> Result<Rc<Self>, DriveError> {
        let (label, differ) = Ends::read(&*device).await?.choose()?;
        if differ {
            tracing::warn!(device = device.info().name, "the drive's two labels differ: repairing");
            store(&*device, &label).await?;
        }
        Ok(Self::with(device, label))
    }

    fn with(device: Rc<dyn Device>, label: Label) -> Rc<Self> {
        Rc::new(Self {
            device,
            label: RefCell::new(label),
            failed: Cell::new(false),
            changing: Semaphore::new(1),
        })
    }

    /// The label as last read or written.
    #[must_use]
    pub fn label(&self) -> Ref<'_, Label> {
        self.label.borrow()
    }

    /// The device below.
    #[must_use]
    pub fn device(&self) -> &Rc<dyn Device> {
        &self.device
    }

    /// Takes the whole drive for the owner of `epoch`; see the design note.
    ///
    /// # Errors
    ///
    /// [`DriveError::Block`] with `Fenced` when the drive or one of its slices has seen a later
    /// owner.
    pub async fn fence(&self, epoch: Epoch) -> Result<(), DriveError> {
        self.raise(epoch, |label| {
            let (seen, changed) = (label.last_epoch(), label.owner_epoch != epoch);
            label.owner_epoch = epoch;
            (seen, changed)
        })
        .await?;
        let (cluster, drive) = (self.label().cluster_uuid, self.label().drive_uuid);
        let owner = move |block: &[u8]| {
            let label = Label::decode(block).ok()?;
            let is_it = (label.cluster_uuid, label.drive_uuid) == (cluster, drive);
            is_it.then(|| label.last_epoch())
        };
        let blocks = vec![0, self.label().tail_at()];
        if !planted!("drive-label-not-heard") {
            let witness = Witness { blocks, owner: Rc::new(owner), is_there: true };
            self.device.recognise_by(Some(witness));
        }
        Ok(())
    }

    /// Takes one slice for the owner of `epoch`.
    pub(crate) async fn fence_slice(&self, slice: usize, epoch: Epoch) -> Result<(), DriveError> {
        self.raise(epoch, |label| {
            let of_drive = label.owner_epoch;
            let Some(entry) = label.slices.get_mut(slice) else { return (of_drive, false) };
            let seen = of_drive.max(entry.owner_epoch);
            let changed = seen != epoch;
            entry.owner_epoch = epoch;
            (seen, changed)
        })
        .await
    }

    /// Reads the label again, lets `change` say which epoch counts and whether it changes, and
    /// makes the new one durable.
    async fn raise(
        &self,
        epoch: Epoch,
        change: impl FnOnce(&mut Label) -> (Epoch, bool),
    ) -> Result<(), DriveError> {
        let _turn = self.changing.acquire(1).await;
        let (mut label, _) = Ends::read(&*self.device).await?.choose()?;
        let ours = self.label.borrow().drive_uuid;
        if label.drive_uuid != ours {
            return Err(DriveError::TwoDrives { head: label.drive_uuid, tail: ours });
        }
        let as_read = label.clone();
        let (seen, changed) = change(&mut label);
        if epoch < seen {
            // What another owner wrote counts here from now on, too.
            *self.label.borrow_mut() = as_read;
            return Err(BlockError::Fenced { ours: epoch, seen }.into());
        }
        if changed {
            label.generation += 1;
            store(&*self.device, &label).await?;
        }
        *self.label.borrow_mut() = label;
        Ok(())
    }

    /// The epoch that counts for a slice.
    pub(crate) fn slice_epoch(&self, slice: usize) -> Epoch {
        let label = self.label.borrow();
        let of_slice = label.slices.get(slice).map(|slice| slice.owner_epoch);
        label.owner_epoch.max(of_slice.unwrap_or_default())
    }

    /// Fails the drive, by order of the operator: all its slices answer `Gone`.
    pub fn fail(&self) {
        self.failed.set(true);
    }

    /// True once failed.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        self.failed.get()
    }

    /// A device on the slice with this place in the slice table.
    #[must_use]
    pub fn slice(self: &Rc<Self>, index: usize) -> Option<Slice> {
        let entry = self.label.borrow().slices.get(index)?.clone();
        Some(Slice::new(Rc::clone(self), index, entry))
    }

    /// The first slice of an array.
    #[must_use]
    pub fn slice_of(self: &Rc<Self>, array_uuid: Uuid) -> Option<Slice> {
        let of_array = |slice: &SliceEntry| slice.array_uuid == array_uuid;
        let index = self.label.borrow().slices.iter().position(of_array)?;
        self.slice(index)
    }
}

/// Writes a label to both ends, one after the other, durably.
async fn store(device: &dyn Device, label: &Label) -> Result<(), DriveError> {
    let bytes: Buf = label.encode().map_err(DriveError::Invalid)?;
    device.write(0, bytes.clone().into_vec(), Durability::Fua).await?;
    device.write(label.tail_at(), bytes.into_vec(), Durability::Fua).await?;
    Ok(())
}

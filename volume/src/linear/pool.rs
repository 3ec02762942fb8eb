//! A pool: an array whose stripes are given to linear volumes, and the orders that give and take them.
//!
//! What always holds:
//! - What an order acknowledged is durable. A table is written to one copy and flushed, then to the other: so a power cut
//!   leaves the old table or the new one, and later the loss of either copy loses nothing.
//! - Stripes are made to read as zeroes before the table gives them to a volume, and go to another only once the table that
//!   takes them away is durable and no request to them is under way.
//! - The table is never written over anything that is not a pool, unless that is asked for explicitly.
//!
//! After a crash the newer table that can be read holds, and is put in the place of the other.

use super::LinearVolume;
use super::space::{self, Run};
use super::table::{Bounds, COPIES, Entry, TABLE_BYTES_MAX, Table, TableFault};
use crate::name::{Tenant, VolumeName};
use crate::order::{self, Anyway, OrderError, VolumeRow};
use crate::qos::Limits;
use levada_base::BufMut;
use levada_base::ids::Uuid;
use levada_base::reactor::random_u64;
use levada_base::sync::{Permit, Semaphore};
use levada_base::units::{BLOCK_BYTES, round_up};
use levada_device::{BlockError, Durability};
use levada_raid::{Array, StripeRange};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A blank array may have so many stripes that hold zeroes: where the making of a pool was cut short, an array has marked the
/// stripes of both copies, and a few behind each that it zeroed with them.
const ZEROED_STRIPES_MAX: usize = 16;

/// Why an array is no pool, or cannot become one. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    #[error("array {array} is a pool of volumes already")]
    Already { array: String },
    /// What it holds is no pool.
    #[error(
        "array {array} holds something: a pool of volumes would overwrite it, which --force does"
    )]
    Holds { array: String },
    #[error(
        "array {array} is too small for a pool of volumes, whose table has {table_bytes} bytes"
    )]
    TooSmall { array: String, table_bytes: u64 },
    #[error("array {array} was made a pool of volumes by a newer program: {fault}")]
    Newer { array: String, fault: TableFault },
    /// It was a pool; which stripes are whose is not known.
    #[error("both tables of volumes of array {array} are damaged: of one, {}; of the other, {}", copies[0], copies[1])]
    Damaged { array: String, copies: Box<[TableFault; COPIES as usize]> },
    #[error(transparent)]
    Block(#[from] BlockError),
}

/// The linear volumes of an array. Lives on one core, and nobody else writes to the array.
pub struct Pool {
    array: Rc<dyn Array>,
    name: String,
    bounds: Bounds,
    table: RefCell<Table>,
    open: RefCell<BTreeMap<VolumeName, Rc<LinearVolume>>>,
    /// Orders are carried out one after the other.
    turn: Rc<Semaphore>,
    /// A table is being written, or could not be: which one holds is not known.
    is_unsettled: Cell<bool>,
}

/// What the two copies say.
enum Found {
    /// No pool.
    Nothing,
    /// The table that holds, and whether each copy has it.
    Table(Table, [bool; COPIES as usize]),
}

impl Pool {
    /// The pool that `array`, called `name`, is; `None` when it is none. Puts a copy of the table right that is not.
    ///
    /// # Errors
    ///
    /// [`PoolError::Newer`], [`PoolError::Damaged`], and what the array says.
    pub async fn open(array: Rc<dyn Array>, name: &str) -> Result<Option<Self>, PoolError> {
        let Found::Table(table, has_it) = look(&*array, name).await? else { return Ok(None) };
        let pool = Self::of(array, name, table);
        let bytes = pool.table.borrow().encode(&pool.bounds);
        for (copy, _) in (0..).zip(has_it).filter(|(_, has_it)| !has_it) {
            match pool.write_copy(copy, &bytes).await {
                // The other copy holds.
                Err(error @ BlockError::Medium { .. }) => {
                    tracing::warn!(array = name, %error, "a copy of the table of volumes cannot be written");
                }
                written => written?,
            }
        }
        Ok(Some(pool))
    }

    /// Makes `array`, called `name`, a pool without volumes. Where it is meant, what the array holds is lost, unless that is
    /// a pool.
    ///
    /// # Errors
    ///
    /// [`PoolError`].
    pub async fn make(array: Rc<dyn Array>, name: &str, anyway: Anyway) -> Result<Self, PoolError> {
        let bounds = Bounds::of(array.geometry());
        if bounds.room().is_empty() {
            let table_bytes = COPIES * TABLE_BYTES_MAX;
            return Err(PoolError::TooSmall { array: name.into(), table_bytes });
        }
        match look(&*array, name).await {
            Ok(Found::Table(..)) => return Err(PoolError::Already { array: name.into() }),
            Err(PoolError::Damaged { .. }) if anyway.is_meant => {}
            Err(error) => return Err(error),
            Ok(Found::Nothing) if anyway.is_meant || is_blank(&*array).await? => {}
            Ok(Found::Nothing) => return Err(PoolError::Holds { array: name.into() }),
        }
        array.discard_stripes(0, bounds.stripes).await?;
        let pool = Self::of(array, name, Table { sequence: 1, ..Table::default() });
        // Within one block, so that a power cut leaves a pool, or an array that is still blank.
        let bytes = pool.table.borrow().encode(&bounds);
        for copy in 0..COPIES {
            pool.write_copy(copy, &bytes).await?;
        }
        Ok(pool)
    }

    fn of(array: Rc<dyn Array>, name: &str, table: Table) -> Self {
        Self {
            bounds: Bounds::of(array.geometry()),
            array,
            name: name.to_owned(),
            table: RefCell::new(table),
            open: RefCell::default(),
            turn: Semaphore::new(1),
            is_unsettled: Cell::new(false),
        }
    }

    async fn write_copy(&self, copy: u64, table: &[u8]) -> Result<(), BlockError> {
        let mut bytes = BufMut::zeroed(round_up(table.len() as u64, BLOCK_BYTES) as usize);
        bytes[..table.len()].copy_from_slice(table);
        let (at, bytes) = (self.bounds.copy_at(copy), bytes.freeze());
        let write = || self.array.write(at, bytes.clone().into_vec(), Durability::Volatile);
        if let Err(BlockError::Medium { .. }) = write().await {
            // What is there and cannot be read is needed for the parity beside it, unless it holds nothing any more: it is the
            // copy's alone.
            let stripes = self.bounds.copy(copy);
            self.array.discard_stripes(stripes.start, stripes.end - stripes.start).await?;
            write().await?;
        }
        self.array.flush().await
    }

    /// Waits for its turn to change the table, of which it gives a copy to be changed.
    async fn begin(&self) -> Result<(Permit, Table), OrderError> {
        let turn = self.turn.acquire(1).await;
        match self.is_unsettled.get() {
            true => Err(OrderError::PoolUnsettled { array: self.name.clone() }),
            false => Ok((turn, self.table.borrow().clone())),
        }
    }

    /// That there is room for a table.
    fn check_fits(&self, next: &Table) -> Result<(), OrderError> {
        match next.encode(&self.bounds).len() as u64 <= TABLE_BYTES_MAX {
            true => Ok(()),
            false => Err(OrderError::TableFull { array: self.name.clone() }),
        }
    }

    /// Puts `next`, which fits, in the place of the table. Where that fails, either may be the table: orders are refused from
    /// then on, and no stripe changes hands, until the array is opened anew.
    async fn settle(&self, mut next: Table) -> Result<(), OrderError> {
        next.sequence += 1;
        // Stopping beats two volumes in one stripe.
        assert_eq!(next.check(&self.bounds), Ok(()), "a table of our own");
        let bytes = next.encode(&self.bounds);
        self.is_unsettled.set(true);
        for copy in 0..COPIES {
            self.write_copy(copy, &bytes).await?;
        }
        self.is_unsettled.set(false);
        *self.table.borrow_mut() = next;
        Ok(())
    }

    /// Stripes that are free, for a volume that so far ends before stripe `behind`.
    fn room_for(
        &self,
        table: &Table,
        stripes: u64,
        behind: Option<u64>,
    ) -> Result<Vec<Run>, OrderError> {
        let free = table.free(&self.bounds);
        let free_stripes = space::stripes_in(&free);
        space::allocate(free, stripes, behind).ok_or_else(|| OrderError::NoRoom {
            array: self.name.clone(),
            bytes: stripes.saturating_mul(self.bounds.stripe_bytes),
            free_bytes: free_stripes * self.bounds.stripe_bytes,
        })
    }

    /// Makes stripes read as zeroes, durably. All of them, also those that the array thinks hold nothing: a write that was given up
    /// half way may still be on its way to them, and the array has this wait for it.
    async fn clear(&self, runs: &[Run]) -> Result<(), BlockError> {
        for run in runs {
            self.array.discard_stripes(run.start, run.end - run.start).await?;
        }
        Ok(())
    }

    /// Lets rebuild and scrub skip stripes that nobody has any more. What fails here is made up for when they are given to
    /// somebody.
    async fn give_back(&self, runs: &[Run]) {
        let _ = self.clear(runs).await;
    }

    /// Bytes that new volumes can have, together.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        space::stripes_in(&self.table.borrow().free(&self.bounds)) * self.bounds.stripe_bytes
    }

    /// Makes a volume, which reads as zeroes and has all of its room from then on.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn create(&self, name: &VolumeName, size_bytes: u64) -> Result<(), OrderError> {
        let (_turn, mut next) = self.begin().await?;
        order::check_size(size_bytes)?;
        if next.volumes.contains_key(name) {
            return Err(OrderError::Exists { name: name.clone() });
        }
        let runs = self.room_for(&next, self.bounds.stripes_for(size_bytes), None)?;
        let uuid = Uuid::from_u64_pair(random_u64(), random_u64());
        let (limits, reservations) = (Vec::new(), Vec::new());
        let entry = Entry { uuid, size_bytes, runs: runs.clone(), limits, reservations };
        next.volumes.insert(name.clone(), entry);
        self.check_fits(&next)?;
        self.clear(&runs).await?;
        self.settle(next).await
    }

    /// All volumes, those of `tenant` if one is named, by name.
    #[must_use]
    pub fn list(&self, tenant: Option<&Tenant>) -> Vec<VolumeRow> {
        let table = self.table.borrow();
        let wanted =
            table.volumes.iter().filter(|(name, _)| tenant.is_none_or(|t| *t == name.tenant));
        wanted
            .map(|(name, entry)| VolumeRow {
                name: name.clone(),
                id: entry.uuid,
                size_bytes: entry.size_bytes,
                users: self.users(name),
            })
            .collect()
    }

    /// How large a volume is.
    ///
    /// # Errors
    ///
    /// [`OrderError::Missing`].
    pub fn size_bytes(&self, name: &VolumeName) -> Result<u64, OrderError> {
        Ok(self.entry(name)?.size_bytes)
    }

    /// The volume, for an export.
    ///
    /// # Errors
    ///
    /// [`OrderError::Missing`], and what the array says.
    pub async fn volume(&self, name: &VolumeName) -> Result<Rc<LinearVolume>, OrderError> {
        // Not while an order changes its stripes.
        let _turn = self.turn.acquire(1).await;
        if let Some(open) = self.open.borrow().get(name) {
            return Ok(Rc::clone(open));
        }
        if self.is_unsettled.get() {
            // It may be gone, or smaller.
            return Err(OrderError::PoolUnsettled { array: self.name.clone() });
        }
        let entry = self.entry(name)?;
        let volume = LinearVolume::new(Rc::clone(&self.array), entry.size_bytes);
        self.extend(&volume, name, &entry.runs)?;
        let volume = Rc::new(volume);
        self.open.borrow_mut().insert(name.clone(), Rc::clone(&volume));
        Ok(volume)
    }

    fn entry(&self, name: &VolumeName) -> Result<Entry, OrderError> {
        let table = self.table.borrow();
        table.volumes.get(name).cloned().ok_or_else(|| OrderError::Missing { name: name.clone() })
    }

    /// Puts stripes behind those that an open volume has.
    fn extend(
        &self,
        volume: &LinearVolume,
        name: &VolumeName,
        runs: &[Run],
    ) -> Result<(), BlockError> {
        for run in runs {
            let array = Rc::clone(&self.array);
            let stripes = run.end - run.start;
            volume.extend(StripeRange::new(&name.to_string(), array, run.start, stripes)?);
        }
        Ok(())
    }

    /// Gives a volume another size; exports learn of it.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn resize(
        &self,
        name: &VolumeName,
        size_bytes: u64,
        anyway: Anyway,
    ) -> Result<(), OrderError> {
        let (_turn, next) = self.begin().await?;
        order::check_size(size_bytes)?;
        match size_bytes < self.entry(name)?.size_bytes {
            true => self.shrink(next, name, size_bytes, anyway).await,
            false => self.grow(next, name, size_bytes).await,
        }
    }

    async fn grow(
        &self,
        mut next: Table,
        name: &VolumeName,
        size_bytes: u64,
    ) -> Result<(), OrderError> {
        let mut entry = self.entry(name)?;
        let behind = entry.runs.last().map(|last| last.end);
        let (old_bytes, old_stripes) = (entry.size_bytes, space::stripes_in(&entry.runs));
        let stripes = self.bounds.stripes_for(size_bytes) - old_stripes;
        let more = self.room_for(&next, stripes, behind)?;
        entry.size_bytes = size_bytes;
        space::append(&mut entry.runs, more.clone());
        next.volumes.insert(name.clone(), entry);
        self.check_fits(&next)?;
        self.clear(&more).await?;
        let tail_bytes = old_stripes * self.bounds.stripe_bytes - old_bytes;
        if let Some(behind) = behind
            && tail_bytes > 0
        {
            // The rest of its last stripe may hold what it had there before it shrank.
            let end = behind * self.bounds.stripe_bytes;
            self.array.write_zeroes(end - tail_bytes, tail_bytes).await?;
            // Not later than the table that shows it.
            self.array.flush().await?;
        }
        self.settle(next).await?;
        let open = self.open.borrow().get(name).cloned();
        if let Some(open) = open {
            self.extend(&open, name, &more)?;
            open.gate().set_size_bytes(size_bytes);
        }
        Ok(())
    }

    async fn shrink(
        &self,
        mut next: Table,
        name: &VolumeName,
        size_bytes: u64,
        anyway: Anyway,
    ) -> Result<(), OrderError> {
        let open = self.open.borrow().get(name).cloned();
        let closed = match &open {
            Some(open) => Some(open.gate().closed().await),
            None => None,
        };
        let mut entry = self.entry(name)?;
        if let Some(data_at) = self.data_from(&entry, size_bytes)
            && !anyway.is_meant
        {
            return Err(OrderError::WouldCut { name: name.clone(), bytes: size_bytes, data_at });
        }
        let stripes = self.bounds.stripes_for(size_bytes);
        entry.size_bytes = size_bytes;
        let gone = space::cut(&mut entry.runs, stripes);
        next.volumes.insert(name.clone(), entry);
        if let Some(open) = &open {
            // Before the table is: should that fail, nobody writes what may be somebody else's after a restart.
            open.gate().set_size_bytes(size_bytes);
            open.cut(stripes * self.bounds.stripe_bytes);
        }
        self.settle(next).await?;
        drop(closed);
        self.give_back(&gone).await;
        Ok(())
    }

    /// The first byte of a volume from `from` on that may hold something, as far as the array knows: by stripes.
    fn data_from(&self, entry: &Entry, from: u64) -> Option<u64> {
        let stripe_bytes = self.bounds.stripe_bytes;
        let stripes = (0..).zip(entry.runs.iter().cloned().flatten());
        let behind = stripes.skip((from / stripe_bytes) as usize);
        let written = behind.into_iter().find(|(_, stripe)| self.array.is_written(*stripe));
        written.map(|(index, _): (u64, u64)| from.max(index * stripe_bytes))
    }

    /// Gives a volume another name; who uses it goes on.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn rename(&self, from: &VolumeName, to: &VolumeName) -> Result<(), OrderError> {
        let (_turn, mut next) = self.begin().await?;
        order::check_rename(from, to)?;
        let missing = || OrderError::Missing { name: from.clone() };
        let entry = next.volumes.remove(from).ok_or_else(missing)?;
        if next.volumes.contains_key(to) || from == to {
            return Err(OrderError::Exists { name: to.clone() });
        }
        next.volumes.insert(to.clone(), entry);
        self.check_fits(&next)?;
        self.settle(next).await?;
        let open = self.open.borrow_mut().remove(from);
        if let Some(open) = open {
            self.open.borrow_mut().insert(to.clone(), open);
        }
        Ok(())
    }

    /// Deletes a volume; its room is free at once.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn delete(&self, name: &VolumeName, anyway: Anyway) -> Result<(), OrderError> {
        let (_turn, mut next) = self.begin().await?;
        let missing = || OrderError::Missing { name: name.clone() };
        let entry = next.volumes.remove(name).ok_or_else(missing)?;
        let users = self.users(name);
        if users > 0 && !anyway.is_meant {
            return Err(OrderError::InUse { name: name.clone(), users });
        }
        let open = self.open.borrow_mut().remove(name);
        if let Some(open) = open {
            // Requests under way end; those that wait, and all later ones, hear that it is gone: also when the table cannot be
            // written, as then it may be.
            let _closed = open.gate().closed().await;
            open.gate().set_gone();
        }
        self.settle(next).await?;
        self.give_back(&entry.runs).await;
        Ok(())
    }

    /// What a volume may use; [`Limits::NONE`] where nothing was ever set.
    ///
    /// # Errors
    ///
    /// [`OrderError::Missing`], [`OrderError::LimitsUnknown`].
    pub fn limits(&self, name: &VolumeName) -> Result<Limits, OrderError> {
        match self.entry(name)?.limits {
            text if text.is_empty() => Ok(Limits::NONE),
            text => serde_json::from_slice(&text)
                .map_err(|_| OrderError::LimitsUnknown { whose: format!("volume {name}") }),
        }
    }

    /// Keeps what a volume may use; whoever governs it is told by who asks for this.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn set_limits(&self, name: &VolumeName, limits: &Limits) -> Result<(), OrderError> {
        let (_turn, mut next) = self.begin().await?;
        let missing = || OrderError::Missing { name: name.clone() };
        let entry = next.volumes.get_mut(name).ok_or_else(missing)?;
        // Plain numbers.
        entry.limits = serde_json::to_vec(limits).unwrap_or_default();
        self.check_fits(&next)?;
        self.settle(next).await
    }

    /// What is kept of a volume's reservations; empty: nothing, or there is no such volume.
    #[must_use]
    pub fn reservations(&self, id: Uuid) -> Vec<u8> {
        let table = self.table.borrow();
        let entry = table.volumes.values().find(|entry| entry.uuid == id);
        entry.map_or(Vec::new(), |entry| entry.reservations.clone())
    }

    /// Keeps this in the place of it, whatever the volume is called by then. One that is gone needs none.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn keep_reservations(&self, id: Uuid, bytes: Vec<u8>) -> Result<(), OrderError> {
        let (_turn, mut next) = self.begin().await?;
        let entry = next.volumes.values_mut().find(|entry| entry.uuid == id);
        let Some(entry) = entry else { return Ok(()) };
        entry.reservations = bytes;
        self.check_fits(&next)?;
        self.settle(next).await
    }

    /// Those who hold it besides the pool.
    fn users(&self, name: &VolumeName) -> usize {
        self.open.borrow().get(name).map_or(0, |open| Rc::strong_count(open) - 1)
    }

    /// Which stripes each volume has.
    #[cfg(test)]
    pub(super) fn runs(&self) -> Vec<Vec<Run>> {
        self.table.borrow().volumes.values().map(|entry| entry.runs.clone()).collect()
    }
}

/// Looks for tables.
async fn look(array: &dyn Array, name: &str) -> Result<Found, PoolError> {
    let bounds = Bounds::of(array.geometry());
    if bounds.room().is_empty() {
        return Ok(Found::Nothing);
    }
    let first = read_copy(array, &bounds, 0).await?;
    let second = read_copy(array, &bounds, 1).await?;
    for copy in [&first, &second] {
        if let Err(fault @ TableFault::Version { .. }) = copy {
            return Err(PoolError::Newer { array: name.into(), fault: fault.clone() });
        }
    }
    Ok(match (first, second) {
        (Ok(first), Ok(second)) if first == second => Found::Table(first, [true, true]),
        (Ok(first), Ok(second)) if first.sequence < second.sequence => {
            Found::Table(second, [false, true])
        }
        (Ok(first), _) => Found::Table(first, [true, false]),
        (_, Ok(second)) => Found::Table(second, [false, true]),
        // One that is unreadable alone says nothing: any array may have such a block.
        (Err(TableFault::None), Err(TableFault::None | TableFault::Unreadable))
        | (Err(TableFault::Unreadable), Err(TableFault::None)) => Found::Nothing,
        (Err(first), Err(second)) => {
            let copies = Box::new([first, second]);
            return Err(PoolError::Damaged { array: name.into(), copies });
        }
    })
}

/// Reads a copy of the table. Only that it cannot be read *here* is a fault of the copy; of an array that cannot go on nothing
/// is known.
async fn read_copy(
    array: &dyn Array,
    bounds: &Bounds,
    copy: u64,
) -> Result<Result<Table, TableFault>, BlockError> {
    let at = bounds.copy_at(copy);
    let read = async |bytes| match read(array, at, bytes).await {
        Ok(bytes) => Ok(Ok(bytes)),
        Err(BlockError::Medium { .. }) => Ok(Err(TableFault::Unreadable)),
        Err(error) => Err(error),
    };
    let head = match read(BLOCK_BYTES).await? {
        Ok(head) => head,
        Err(fault) => return Ok(Err(fault)),
    };
    let len = match Table::length(&head) {
        Ok(len) => len as u64,
        Err(fault) => return Ok(Err(fault)),
    };
    let all = read(round_up(len, BLOCK_BYTES)).await?;
    Ok(all.and_then(|all| Table::decode(&all, bounds)))
}

async fn read(array: &dyn Array, at: u64, bytes: u64) -> Result<Vec<u8>, BlockError> {
    let into = BufMut::for_overwrite(bytes as usize).into_vec();
    let read = array.read(at, into).await?;
    Ok(levada_base::buf::joined(&read))
}

/// Whether an array holds nothing but zeroes.
async fn is_blank(array: &dyn Array) -> Result<bool, BlockError> {
    let geometry = array.geometry();
    let written = (0..geometry.stripes).filter(|stripe| array.is_written(*stripe));
    let written: Vec<u64> = written.take(ZEROED_STRIPES_MAX + 1).collect();
    if written.len() > ZEROED_STRIPES_MAX {
        return Ok(false);
    }
    for stripe in written {
        match read(array, stripe * geometry.stripe_bytes, geometry.stripe_bytes).await {
            Ok(bytes) if bytes.iter().all(|byte| *byte == 0) => {}
            Ok(_) | Err(BlockError::Medium { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

//! Commands of an I/O queue, carried out on a namespace's volume.

use crate::claims::Change;
use crate::controller::{Attached, Controller};
use crate::recall::Stage;
use crate::reservations::Access;
use crate::subsystem::Loss;
use futures_util::FutureExt;
use levada_base::buf::bytes_in;
use levada_base::sync::Once;
use levada_base::{Buf, HasErrno, IoVec, Rooted, planted};
use levada_device::{BlockError, Durability};
use levada_nvme::log::AnaState;
use levada_nvme::reservation::{PERSISTS_AT, Persist, ReservationRequest};
use levada_nvme::{Command, IoOpcode, ReservationNotice, Status, ranges};
use levada_volume::{Volume, VolumeError, Zeroing};
use std::cell::Cell;
use std::rc::Rc;

/// Data of a command.
pub(crate) const DATA_BYTES_MAX: u64 = 1 << 20;

/// Adds to what a namespace counts.
fn count(counter: &Cell<u64>, more: u64) {
    counter.set(counter.get().wrapping_add(more));
}

/// Doubleword 11 of Dataset Management: the blocks are not needed any more. What else it may say is advice.
const DEALLOCATE: u32 = 1 << 2;
/// Doubleword 11 of Reservation Report.
const EXTENDED: u32 = 1;

/// Carries out a command; `data` are the host's, which a write takes. What is returned are data for it.
pub(crate) async fn carry_out(
    controller: &Controller,
    connection_ended: &Rc<Once>,
    stage: &Cell<Stage>,
    command: &Command,
    data: &mut IoVec,
) -> Result<IoVec, Status> {
    let opcode = IoOpcode::of(command.opcode());
    let opcode = opcode.ok_or(Status::INVALID_OPCODE.and_do_not_retry())?;
    match controller.ana_state() {
        AnaState::Optimized | AnaState::NonOptimized => {}
        AnaState::Inaccessible => return Err(Status::ANA_INACCESSIBLE),
        AnaState::PersistentLoss => return Err(Status::ANA_PERSISTENT_LOSS),
        AnaState::Change => return Err(Status::ANA_TRANSITION),
    }
    let attached = match controller.attached(command.namespace()) {
        Some(attached) => attached,
        None => {
            let before = stage.replace(Stage::Begun);
            let attached = Box::pin(controller.attach(command.namespace())).await?;
            stage.set(before);
            attached
        }
    };
    let io = Io { controller, connection_ended, stage, attached: &attached, command };
    match opcode {
        IoOpcode::Read => io.read().await,
        IoOpcode::Write => io.write(data).await,
        // Apart, so that reads and writes do not carry room for what these need.
        _ => Box::pin(io.carry_out_rare(opcode, data)).await,
    }
}

/// A read that is in the volume.
pub(crate) struct Reading(Rooted<Attached, Result<IoVec, VolumeError>>);

impl Reading {
    /// Begins a read, if there is nothing to wait for before, and nothing wrong with it: [`carry_out`] knows what to do then.
    #[inline]
    pub fn begin(controller: &Controller, command: &Command) -> Option<Self> {
        if !matches!(controller.ana_state(), AnaState::Optimized | AnaState::NonOptimized)
            || command.is_fua()
        {
            return None;
        }
        let attached = controller.attached(command.namespace())?;
        let (at, bytes) = attached.range_of_data(command).ok()?;
        attached.check(controller, Access::Read).ok()?;
        Some(Self(Rooted::new(attached, |attached| attached.opened.volume.read(at, bytes))))
    }

    /// The data, if the volume has them without waiting.
    #[inline]
    pub fn at_once(&mut self, controller: &Controller) -> Option<Result<IoVec, Status>> {
        let read = (&mut self.0).now_or_never()?;
        Some(self.0.root().has_read(controller, read))
    }

    /// The data, once the volume has read them.
    pub async fn data(&mut self, controller: &Controller) -> Result<IoVec, Status> {
        let read = (&mut self.0).await;
        self.0.root().has_read(controller, read)
    }
}

impl Attached {
    /// The bytes that a command is about: where, and how many.
    fn range(&self, first_block: u64, blocks: u64) -> Result<(u64, u64), Status> {
        const OUTSIDE: Status = Status::OUT_OF_RANGE.and_do_not_retry();
        let at = first_block.checked_mul(self.block_bytes).ok_or(OUTSIDE)?;
        let bytes = blocks.checked_mul(self.block_bytes).ok_or(OUTSIDE)?;
        let end = at.checked_add(bytes).ok_or(OUTSIDE)?;
        if end > self.opened.volume.size_bytes() { Err(OUTSIDE) } else { Ok((at, bytes)) }
    }

    /// The same, of a command with as many data.
    fn range_of_data(&self, command: &Command) -> Result<(u64, u64), Status> {
        let (at, bytes) = self.range(command.first_block(), command.blocks())?;
        if bytes > DATA_BYTES_MAX {
            return Err(Status::INVALID_FIELD.and_do_not_retry());
        }
        if u64::from(command.data().bytes()) != bytes {
            return Err(Status::DATA_LENGTH_INVALID.and_do_not_retry());
        }
        Ok((at, bytes))
    }

    /// Whether a reservation lets the host do this.
    fn check(&self, controller: &Controller, access: Access) -> Result<(), Status> {
        let claims = self.namespace.claims();
        claims.check(controller.host_id(), access).map_err(Status::and_do_not_retry)
    }

    /// What the host is told of a read that has ended.
    #[inline]
    fn has_read(
        &self,
        controller: &Controller,
        read: Result<IoVec, VolumeError>,
    ) -> Result<IoVec, Status> {
        let data = read.map_err(|error| self.told(controller, &error, false))?;
        let moved = &self.namespace.moved;
        count(&moved.reads, 1);
        count(&moved.read_bytes, bytes_in(&data));
        Ok(data)
    }

    /// What the host is told of an error (Base, 4.6.1.2).
    fn told(&self, controller: &Controller, error: &VolumeError, is_change: bool) -> Status {
        let status = match error {
            VolumeError::OutOfRange { .. } => Status::OUT_OF_RANGE,
            VolumeError::NoSpace => Status::CAPACITY_EXCEEDED,
            VolumeError::ReadOnly => Status::WRITE_PROTECTED,
            VolumeError::Deleted => Status::INVALID_NAMESPACE,
            // Another server has it.
            VolumeError::Block(BlockError::Fenced { .. }) => {
                if let Some(subsystem) = controller.subsystem() {
                    subsystem.lose(Loss::Elsewhere);
                }
                Status::ANA_PERSISTENT_LOSS
            }
            VolumeError::Block(_) if matches!(error.errno(), libc::ENOSPC | libc::EDQUOT) => {
                Status::CAPACITY_EXCEEDED
            }
            // Pulled while it was at it, or an array that has stopped: nothing is the matter with these blocks.
            VolumeError::Block(BlockError::Gone | BlockError::TooManyLost { .. }) => {
                Status::NOT_READY
            }
            VolumeError::Block(_) => {
                let errors = &self.namespace.moved.media_errors;
                count(errors, 1);
                if is_change { Status::WRITE_FAULT } else { Status::UNRECOVERED_READ_ERROR }
            }
        };
        if !matches!(error, VolumeError::OutOfRange { .. }) && controller.is_first(status) {
            tracing::warn!(host = %controller.host(), %error, "a command of an NVMe host failed (told once of each kind)");
        }
        // What else can be tried again was.
        let may_become_good = status.is_of_path() || status.is(Status::NOT_READY);
        if may_become_good { status } else { status.and_do_not_retry() }
    }
}

struct Io<'a> {
    controller: &'a Controller,
    connection_ended: &'a Rc<Once>,
    stage: &'a Cell<Stage>,
    attached: &'a Rc<Attached>,
    command: &'a Command,
}

impl Io<'_> {
    fn volume(&self) -> &dyn Volume {
        &*self.attached.opened.volume
    }

    /// What the host is told of an error.
    fn told(&self, error: &VolumeError, is_change: bool) -> Status {
        self.attached.told(self.controller, error, is_change)
    }

    async fn change(&self) -> Result<Change, Status> {
        let claims = self.attached.namespace.claims();
        let host = self.controller.host_id();
        if claims.may_have_orphans() {
            Box::pin(claims.without_orphans_of(host)).await;
        }
        let change = claims.change(host, self.connection_ended);
        self.stage.set(Stage::Begun);
        change
    }

    async fn carry_out_rare(&self, opcode: IoOpcode, data: &IoVec) -> Result<IoVec, Status> {
        match opcode {
            IoOpcode::Flush => self.flush().await,
            IoOpcode::Compare => self.compare(data).await,
            IoOpcode::WriteZeroes => self.write_zeroes().await,
            IoOpcode::DatasetManagement => self.dataset_management(data).await,
            IoOpcode::ReservationRegister
            | IoOpcode::ReservationAcquire
            | IoOpcode::ReservationRelease
            | IoOpcode::ReservationReport
                if !self.attached.namespace.claims().are_offered() =>
            {
                Err(Status::INVALID_OPCODE.and_do_not_retry())
            }
            IoOpcode::ReservationRegister
            | IoOpcode::ReservationAcquire
            | IoOpcode::ReservationRelease => self.reserve(opcode, data).await,
            IoOpcode::ReservationReport => self.report(),
            // Told apart before.
            IoOpcode::Read | IoOpcode::Write | IoOpcode::Fabrics => {
                Err(Status::INVALID_OPCODE.and_do_not_retry())
            }
        }
    }

    async fn read(&self) -> Result<IoVec, Status> {
        let (at, bytes) = self.attached.range_of_data(self.command)?;
        self.attached.check(self.controller, Access::Read)?;
        self.stage.set(Stage::Reading);
        let read = self.volume().read(at, bytes).await;
        let data = self.attached.has_read(self.controller, read)?;
        // What the host sees so may not be lost any more (NVM Command Set, Read: Force Unit Access).
        if self.command.is_fua() {
            self.volume().flush().await.map_err(|error| self.told(&error, false))?;
        }
        Ok(data)
    }

    async fn write(&self, data: &mut IoVec) -> Result<IoVec, Status> {
        let (at, bytes) = self.attached.range_of_data(self.command)?;
        debug_assert_eq!(bytes, bytes_in(data));
        let namespace = &self.attached.namespace;
        let _change = self.change().await?;
        let is_durable = self.command.is_fua() && !planted!("nvmet-fua-ignored");
        let durability = if is_durable { Durability::Fua } else { Durability::Volatile };
        let written = self.volume().write(at, std::mem::take(data), durability).await;
        written.map_err(|error| self.told(&error, true))?;
        count(&namespace.moved.writes, 1);
        count(&namespace.moved.written_bytes, bytes);
        Ok(IoVec::new())
    }

    async fn flush(&self) -> Result<IoVec, Status> {
        // A host that may not write any more learns so here at the latest (Base, figure 385: a command of the write group).
        self.attached.check(self.controller, Access::Write)?;
        // After a write of zeroes it is part of that.
        if self.stage.get() != Stage::Begun {
            self.stage.set(Stage::Reading);
        }
        if planted!("nvmet-flush-dropped") {
            return Ok(IoVec::new());
        }
        self.volume().flush().await.map_err(|error| self.told(&error, true))?;
        Ok(IoVec::new())
    }

    async fn compare(&self, data: &IoVec) -> Result<IoVec, Status> {
        let there = self.read().await?;
        match is_same(&there, data) {
            true => Ok(IoVec::new()),
            false => Err(Status::COMPARE_FAILURE.and_do_not_retry()),
        }
    }

    async fn write_zeroes(&self) -> Result<IoVec, Status> {
        let (at, bytes) = self.attached.range(self.command.first_block(), self.command.blocks())?;
        let _change = self.change().await?;
        let zeroing = match self.command.is_deallocating() {
            true => Zeroing::Free,
            false => Zeroing::Keep,
        };
        let zeroed = self.volume().write_zeroes(at, bytes, zeroing).await;
        zeroed.map_err(|error| self.told(&error, true))?;
        if self.command.is_fua() { self.flush().await } else { Ok(IoVec::new()) }
    }

    async fn dataset_management(&self, data: &IoVec) -> Result<IoVec, Status> {
        let count = (self.command.dword(10) & 0xff) as usize + 1;
        let data = whole(data);
        if data.len() < count * levada_nvme::Range::BYTES {
            return Err(Status::DATA_LENGTH_INVALID.and_do_not_retry());
        }
        let _change = self.change().await?;
        // None of them, unless all are right.
        let wanted: Result<Vec<_>, _> = ranges(&data)
            .take(count)
            .map(|range| self.attached.range(range.first_block, u64::from(range.blocks)))
            .collect();
        let wanted = wanted?;
        // All else is advice on how they will be used.
        if self.command.dword(11) & DEALLOCATE == 0 {
            return Ok(IoVec::new());
        }
        for (at, bytes) in wanted {
            let discarded = self.volume().discard(at, bytes).await;
            discarded.map_err(|error| self.told(&error, true))?;
        }
        Ok(IoVec::new())
    }

    async fn reserve(&self, opcode: IoOpcode, data: &IoVec) -> Result<IoVec, Status> {
        let data = whole(data);
        let short = Status::DATA_LENGTH_INVALID.and_do_not_retry();
        let persist = match opcode {
            // Linux asks for it always, also where it is not offered (RESCAP), and so it is no error there.
            IoOpcode::ReservationRegister => Persist::of(self.command),
            _ => Some(Persist::Unchanged),
        };
        let request = match opcode {
            IoOpcode::ReservationRegister => {
                let keys = data.first_chunk().ok_or(short)?;
                ReservationRequest::register(self.command, keys)
            }
            IoOpcode::ReservationAcquire => {
                let keys = data.first_chunk().ok_or(short)?;
                ReservationRequest::acquire(self.command, keys)
            }
            _ => ReservationRequest::release(self.command, data.first_chunk().ok_or(short)?),
        };
        let wrong = Status::INVALID_FIELD.and_do_not_retry();
        let (request, persist) = (request.ok_or(wrong)?, persist.ok_or(wrong)?);
        let is_kept = match persist {
            Persist::Unchanged => None,
            Persist::No => Some(false),
            Persist::Yes => Some(true),
        };
        self.stage.set(Stage::Begun);
        let claims = self.attached.namespace.claims();
        let reserved = claims.reserve(self.controller.host_id(), request, is_kept).await;
        let reserved = reserved.map_err(Status::and_do_not_retry)?;
        if let Some(subsystem) = self.controller.subsystem() {
            let is_wanted =
                |notice: ReservationNotice| !claims.masked().get().contains(notice.mask());
            let mut told = reserved.changed.told.clone();
            told.retain(|(_, notice)| is_wanted(*notice));
            subsystem.tell_of_reservations(self.command.namespace(), &told);
        }
        claims.settled(reserved).await;
        Ok(IoVec::new())
    }

    fn report(&self) -> Result<IoVec, Status> {
        let asked = (u64::from(self.command.dword(10)) + 1) * 4;
        let asked = asked.min(u64::from(self.command.data().bytes())).min(DATA_BYTES_MAX);
        if self.command.dword(11) & EXTENDED == 0 {
            // Hosts are known by 16 bytes here.
            return Err(Status::HOST_ID_INCONSISTENT.and_do_not_retry());
        }
        let subsystem = self.controller.subsystem();
        let controller_of = |host: &_| subsystem.and_then(|all| all.controller_of(host));
        let reservations = self.attached.namespace.claims().reservations().borrow();
        let mut bytes = reservations.report(controller_of).to_bytes();
        bytes[PERSISTS_AT] = u8::from(reservations.is_kept);
        bytes.resize(asked as usize, 0);
        Ok(Buf::copy_of(&bytes).into_vec())
    }
}

/// All of it in one piece.
pub(crate) fn whole(data: &IoVec) -> std::borrow::Cow<'_, [u8]> {
    match &data[..] {
        [] => (&[]).into(),
        [one] => (&one[..]).into(),
        parts => parts.iter().flat_map(|part| part.iter().copied()).collect::<Vec<u8>>().into(),
    }
}

/// Bytes that lie in different pieces.
fn is_same(one: &IoVec, other: &IoVec) -> bool {
    let (mut one, mut other) = (Pieces::of(one), Pieces::of(other));
    loop {
        let (a, b) = (one.rest(), other.rest());
        let bytes = a.len().min(b.len());
        if bytes == 0 {
            return a.is_empty() && b.is_empty();
        }
        if a[..bytes] != b[..bytes] {
            return false;
        }
        one.take(bytes);
        other.take(bytes);
    }
}

struct Pieces<'a> {
    parts: std::slice::Iter<'a, Buf>,
    rest: &'a [u8],
}

impl<'a> Pieces<'a> {
    fn of(parts: &'a IoVec) -> Self {
        Self { parts: parts.iter(), rest: &[] }
    }

    /// What is left of the piece that it has come to; empty at the end.
    fn rest(&mut self) -> &'a [u8] {
        while self.rest.is_empty()
            && let Some(next) = self.parts.next()
        {
            self.rest = next;
        }
        self.rest
    }

    fn take(&mut self, bytes: usize) {
        self.rest = &self.rest[bytes..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(parts: &[&[u8]]) -> IoVec {
        parts.iter().map(|part| Buf::copy_of(part)).collect()
    }

    #[test]
    fn bytes_are_compared_however_they_lie() {
        let whole = pieces(&[b"abcdef"]);
        assert!(is_same(&whole, &pieces(&[b"ab", b"", b"cde", b"f"])));
        assert!(!is_same(&whole, &pieces(&[b"ab", b"cdx", b"f"])));
        assert!(!is_same(&whole, &pieces(&[b"abc"])) && !is_same(&pieces(&[b"abc"]), &whole));
    }
}

//! One request of the block device: header, data, status (virtio 1.2, 5.2.6) -> calls of the volume.
//!
//! What always holds:
//! - What is written to the volume was copied out of the client's memory first, and that copy is what parity and checksums are
//!   made of: a client that changes its memory meanwhile spoils its own data and no other.
//! - Data in flight of one client is bounded, however long its requests are: long ones are carried out in pieces.
//! - A request that names anything outside the volume changes nothing.

use crate::cores::{Core, RingCores};
use crate::cursor::{Cursor, long, total, word};
use crate::disk::{self, RANGE_SECTORS_MAX, RANGES_MAX, REQUEST_BYTES_MAX, SECTOR_BYTES};
use crate::memory::{Memory, Outside};
use crate::ring::{Broken, Chain, Span, Token, Used};
use crate::served::{Features, Served, Source};
use levada_base::reactor;
use levada_base::sync::Semaphore;
use levada_device::{BlockError, Durability};
use levada_volume::{FarVolume, KnownSize, Volume, VolumeError, Way, Zeroing};
use std::collections::HashMap;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use virtio_bindings::virtio_blk as blk;

/// Data of one request that is on its way at once.
const PIECE_BYTES: u64 = 4 << 20;
const HEADER_BYTES: u64 = 16;
const RANGE_BYTES: u64 = 16;
/// Of a serial number, padded with zeroes.
pub(crate) const SERIAL_BYTES: usize = blk::VIRTIO_BLK_ID_BYTES as usize;

/// What requests of a client share, those of all queues or of one that is elsewhere. Whoever holds its room holds this.
pub(crate) struct Client<V: ?Sized> {
    pub volume: Rc<V>,
    pub serial: [u8; SERIAL_BYTES],
    pub features: Agreed,
    /// Bytes that may still be taken for data in flight, where this is.
    pub room: Rc<Semaphore>,
    pub elsewhere: Option<Elsewhere>,
}

/// What a client has agreed to, for all who serve its queues.
#[derive(Clone, Default)]
pub(crate) struct Agreed(Arc<AtomicU64>);

impl Agreed {
    pub(crate) fn set(&self, features: Features) {
        self.0.store(features.0, Ordering::Release);
    }

    fn get(&self) -> Features {
        Features(self.0.load(Ordering::Acquire))
    }
}

/// Where queues of a client go, when they are not served where its volume is.
pub(crate) struct Elsewhere {
    cores: Rc<RingCores>,
    size: KnownSize,
    /// Data in flight for each of the cores that they can be on.
    room_bytes: u64,
    /// All that is not taken by who serves the volume to one.
    ways: Rc<Semaphore>,
}

/// More ways than there are queues.
const WAYS_MAX: u64 = 1 << 32;

impl Elsewhere {
    pub(crate) fn new(
        cores: Rc<RingCores>,
        volume: &(impl Volume + ?Sized),
        queues: u16,
        bytes_in_flight_max: u64,
    ) -> Self {
        let share = cores.count().min(queues.into()).max(1) as u64;
        let room_bytes = (bytes_in_flight_max / share).max(PIECE_BYTES);
        Self { cores, size: KnownSize::of(volume), room_bytes, ways: Semaphore::new(WAYS_MAX) }
    }
}

/// A client on its way to the core that serves one of its queues.
pub(crate) struct FarClient {
    way: Way,
    serial: [u8; SERIAL_BYTES],
    features: Agreed,
    room_bytes: u64,
}

impl FarClient {
    /// Its room there.
    pub(crate) fn room(&self, rooms: &mut Rooms) -> Rc<Semaphore> {
        rooms.of(&self.features, self.room_bytes)
    }

    /// The client there.
    pub(crate) fn here(self, room: Rc<Semaphore>) -> Client<FarVolume> {
        let Self { way, serial, features, .. } = self;
        let volume = Rc::new(FarVolume::new(way));
        Client { volume, serial, features, room, elsewhere: None }
    }
}

/// The room of each client that has queues on a core: they share it. By what the client has agreed to, which is its own as long as it has one.
#[derive(Default)]
pub(crate) struct Rooms(HashMap<*const AtomicU64, Weak<Semaphore>>);

impl Rooms {
    fn of(&mut self, client: &Agreed, bytes: u64) -> Rc<Semaphore> {
        self.0.retain(|_, room| room.strong_count() > 0);
        let client = Arc::as_ptr(&client.0);
        self.0.get(&client).and_then(Weak::upgrade).unwrap_or_else(|| {
            let room = Semaphore::new(bytes);
            self.0.insert(client, Rc::downgrade(&room));
            room
        })
    }
}

impl<V: Volume + ?Sized + 'static> Client<V> {
    fn to_elsewhere(&self, elsewhere: &Elsewhere) -> io::Result<(Rc<Core>, FarClient)> {
        let Elsewhere { cores, size, room_bytes, ways } = elsewhere;
        let (way, serving) = Way::to(Rc::clone(&self.volume), size.clone())?;
        let taken = ways.try_acquire(1);
        reactor::spawn(async move {
            serving.await;
            drop(taken);
        });
        let (serial, features, room_bytes) = (self.serial, self.features.clone(), *room_bytes);
        Ok((cores.idlest(), FarClient { way, serial, features, room_bytes }))
    }
}

impl<V: Volume + ?Sized + 'static> Served for Client<V> {
    const PROTOCOL: u64 = disk::PROTOCOL;

    fn offered(&self) -> Features {
        disk::offered(&*self.volume)
    }

    fn agreed(&self, features: Features) {
        self.features.set(features);
    }

    fn configuration(&self, queues: u16) -> Vec<u8> {
        // What a guest reads there holds for its requests.
        self.changed();
        disk::configuration(&*self.volume, queues)
    }

    fn serve(
        self: Rc<Self>,
        _source: Source,
        memory: Arc<Memory>,
        chain: Chain,
    ) -> impl Future<Output = Result<Used, Broken>> + 'static {
        serve(self, memory, chain)
    }

    fn elsewhere(&self) -> Option<(Rc<Core>, FarClient)> {
        match self.to_elsewhere(self.elsewhere.as_ref()?) {
            Ok(there) => Some(there),
            Err(error) => {
                tracing::warn!(%error, "a ring is served where its volume is");
                None
            }
        }
    }

    fn changed(&self) {
        if let Some(elsewhere) = &self.elsewhere {
            elsewhere.size.look_at(&*self.volume);
        }
    }

    async fn left(&self) {
        if let Some(elsewhere) = &self.elsewhere {
            drop(elsewhere.ways.acquire(WAYS_MAX).await);
        }
    }
}

/// How a request ends, and in its last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Ok = blk::VIRTIO_BLK_S_OK as u8,
    Failed = blk::VIRTIO_BLK_S_IOERR as u8,
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as u8,
}

impl From<Outside> for Status {
    fn from(_: Outside) -> Self {
        Self::Failed
    }
}

impl From<VolumeError> for Status {
    fn from(error: VolumeError) -> Self {
        match error {
            VolumeError::OutOfRange { .. }
            | VolumeError::NoSpace
            | VolumeError::ReadOnly
            | VolumeError::Deleted => Self::Failed,
            VolumeError::Block(BlockError::Unsupported { .. }) => Self::Unsupported,
            VolumeError::Block(error) => {
                tracing::warn!(%error, "a request of a vhost client failed");
                Self::Failed
            }
        }
    }
}

/// Carries a request out, and writes its status.
///
/// # Errors
///
/// [`Broken`] when the client cannot be told: no room for a status, or its memory is gone.
async fn serve<V: Volume + ?Sized>(
    client: Rc<Client<V>>,
    memory: Arc<Memory>,
    chain: Chain,
) -> Result<Used, Broken> {
    let (status_at, room) = status_place(&chain).ok_or(Broken::NoStatus)?;
    let (status, bytes) = match carry_out(&client, &memory, &chain, room).await {
        Ok(bytes) => (Status::Ok, bytes),
        Err(status) => (status, blank(&memory, &chain.writable, room)),
    };
    memory.write(status_at, &[status as u8]).map_err(|_| Broken::NoStatus)?;
    // What was read may have been zeroes in the place of lost pages.
    if memory.is_lost() { Err(Broken::Lost) } else { Ok(used(chain.token, bytes)) }
}

/// The status comes last, and a driver may count on all that lies before it to be written as well: zeroes, then.
fn blank(memory: &Memory, spans: &[Span], room: u64) -> u64 {
    // More is no request of a driver in its senses.
    let zeroes = vec![0; room.min(PIECE_BYTES) as usize];
    match Cursor::new(memory, spans).write(&zeroes) {
        Ok(()) => zeroes.len() as u64,
        Err(Outside) => 0,
    }
}

/// What the driver is told: data that was written to its memory, and the status.
fn used(token: Token, data_bytes: u64) -> Used {
    Used { token, bytes: u32::try_from(data_bytes + 1).unwrap_or(u32::MAX) }
}

/// Where the status goes, which is the last byte, and how many lie before it.
fn status_place(chain: &Chain) -> Option<(u64, u64)> {
    let last = chain.writable.iter().rev().find(|span| span.bytes > 0)?;
    Some((last.at.checked_add(u64::from(last.bytes) - 1)?, total(&chain.writable) - 1))
}

/// The bytes that were written to the client's memory. `room` is how many may be.
async fn carry_out<V: Volume + ?Sized>(
    client: &Client<V>,
    memory: &Memory,
    chain: &Chain,
    room: u64,
) -> Result<u64, Status> {
    let mut readable = Cursor::new(memory, &chain.readable);
    let mut header = [0; HEADER_BYTES as usize];
    readable.read(&mut header)?;
    let (kind, sector) = (word(&header, 0), long(&header, 8));
    let sent = total(&chain.readable) - HEADER_BYTES;
    // More than was offered: it would keep a queue from ending for as long as it takes.
    if room.max(sent) > REQUEST_BYTES_MAX {
        return Err(Status::Failed);
    }
    match kind {
        blk::VIRTIO_BLK_T_IN => {
            let at = place(client, sector, room)?;
            read(client, memory, at, room, &chain.writable).await?;
            return Ok(room);
        }
        blk::VIRTIO_BLK_T_OUT => {
            let at = place(client, sector, sent)?;
            write(client, at, sent, readable).await?;
        }
        blk::VIRTIO_BLK_T_FLUSH => client.volume.flush().await?,
        blk::VIRTIO_BLK_T_GET_ID => {
            let bytes = (room as usize).min(SERIAL_BYTES);
            Cursor::new(memory, &chain.writable).write(&client.serial[..bytes])?;
            return Ok(bytes as u64);
        }
        blk::VIRTIO_BLK_T_DISCARD => {
            for range in ranges(client, sent, readable, 0)? {
                client.volume.discard(range.at, range.bytes).await?;
            }
        }
        blk::VIRTIO_BLK_T_WRITE_ZEROES => {
            for range in ranges(client, sent, readable, blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP)? {
                let zeroing = if range.flags == 0 { Zeroing::Keep } else { Zeroing::Free };
                client.volume.write_zeroes(range.at, range.bytes, zeroing).await?;
            }
            if durability(client) == Durability::Fua {
                client.volume.flush().await?;
            }
        }
        _ => return Err(Status::Unsupported),
    }
    Ok(0)
}

/// Where on the volume a request of `bytes` lies, which must be within it.
fn place<V: Volume + ?Sized>(client: &Client<V>, sector: u64, bytes: u64) -> Result<u64, Status> {
    let at = sector.checked_mul(SECTOR_BYTES).ok_or(Status::Failed)?;
    let end = at.checked_add(bytes).ok_or(Status::Failed)?;
    let is_good = bytes.is_multiple_of(SECTOR_BYTES) && end <= client.volume.size_bytes();
    if is_good { Ok(at) } else { Err(Status::Failed) }
}

fn durability<V: ?Sized>(client: &Client<V>) -> Durability {
    match disk::has_flush(client.features.get()) {
        true => Durability::Volatile,
        false => Durability::Fua,
    }
}

async fn read<V: Volume + ?Sized>(
    client: &Client<V>,
    memory: &Memory,
    mut at: u64,
    mut rest: u64,
    into: &[Span],
) -> Result<(), Status> {
    let mut into = Cursor::new(memory, into);
    while rest > 0 {
        let bytes = rest.min(PIECE_BYTES);
        let room_taken = client.room.acquire(bytes).await;
        client.volume.read_into(at, into.lend(bytes)?).await?;
        drop(room_taken);
        (at, rest) = (at + bytes, rest - bytes);
        pause(rest).await;
    }
    Ok(())
}

async fn write<V: Volume + ?Sized>(
    client: &Client<V>,
    mut at: u64,
    mut rest: u64,
    mut from: Cursor<'_>,
) -> Result<(), Status> {
    while rest > 0 {
        let bytes = rest.min(PIECE_BYTES);
        let room_taken = client.room.acquire(bytes).await;
        let mut data = client.volume.buffer(bytes as usize);
        from.read(&mut data)?;
        if from.memory.is_lost() {
            return Err(Status::Failed);
        }
        client.volume.write(at, data.freeze().into_vec(), durability(client)).await?;
        drop(room_taken);
        (at, rest) = (at + bytes, rest - bytes);
        pause(rest).await;
    }
    Ok(())
}

/// Between pieces others have their turn, also where the volume never waits.
async fn pause(rest: u64) {
    if rest > 0 {
        reactor::yield_now().await;
    }
}

/// A range to be discarded or made zero.
struct Range {
    at: u64,
    bytes: u64,
    flags: u32,
}

/// The ranges that a request sends, each of which must be right before one is carried out.
fn ranges<V: Volume + ?Sized>(
    client: &Client<V>,
    sent: u64,
    mut from: Cursor<'_>,
    flags_known: u32,
) -> Result<Vec<Range>, Status> {
    let count = sent / RANGE_BYTES;
    if !sent.is_multiple_of(RANGE_BYTES) || count == 0 || count > RANGES_MAX.into() {
        return Err(Status::Failed);
    }
    let mut ranges = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let mut bytes = [0; RANGE_BYTES as usize];
        from.read(&mut bytes)?;
        let (sector, sectors, flags) = (long(&bytes, 0), word(&bytes, 8), word(&bytes, 12));
        if flags & !flags_known != 0 {
            return Err(Status::Unsupported);
        }
        if sectors > RANGE_SECTORS_MAX {
            return Err(Status::Failed);
        }
        let bytes = u64::from(sectors) * SECTOR_BYTES;
        ranges.push(Range { at: place(client, sector, bytes)?, bytes, flags });
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_a_client_share_its_room_and_no_other_does() {
        let (mut rooms, [one, other]) = (Rooms::default(), [Agreed::default(), Agreed::default()]);
        let of_one = rooms.of(&one, 10);
        let _taken = of_one.try_acquire(10).expect("free");
        assert!(rooms.of(&one, 10).try_acquire(1).is_none());
        assert!(rooms.of(&other, 10).try_acquire(10).is_some());
        let _again = rooms.of(&one, 10);
        assert_eq!(rooms.0.len(), 1, "nothing is left of who has gone, once somebody comes");
    }
}

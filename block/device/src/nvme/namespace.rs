//! A namespace of a remote subsystem, as a device.
//!
//! Requests are cut by what a command may have, and their parts are under way at once; each finds its own path (`paths`).
//!
//! What always holds:
//! - A write without FUA, and zeroes, are kept until a flush covers them, as `unflushed` says. A flush comes by itself when that is much,
//!   and is waited for where there is no room.
//! - A flush covers what was confirmed before it, on whatever path.
//! - Once another owner has taken the namespace, every change fails with [`BlockError::Fenced`].
//! - A request ends when nothing of it is under way any more, unless whoever asked gives up waiting.
//!
//! After a crash of this process the target may still carry out what it was sent. Where the namespace has reservations the next owner
//! shuts that out ([`Device::fence`]): it is another host to the target, as each process has an identifier of its own.

use super::controller::ConnectError;
use super::fence;
use super::keys::{KeysError, read_keys};
use super::landing::{cut, window};
use super::options::{Network, Options, Tcp};
use super::order::{Order, OrderError};
use super::paths::{PathStatus, Paths};
use super::resolve::Place;
use super::sight::Known;
use super::unflushed::Kept;
use super::unsettled::Changes;
use super::verdict::Asked;
use crate::{
    BlockError, Device, DeviceInfo, Durability, Health, HealthPage, IoFuture, Witness, check_range,
};
use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use levada_base::buf::bytes_in;
use levada_base::planted;
use levada_base::reactor;
use levada_base::sync::{Notify, Semaphore};
use levada_base::units::MIB;
use levada_base::{Buf, BufMut, Epoch, IoVec, IoVecMut, RangeGuard, RangeLocks};
use levada_nvme::identify::OptionalCommands;
use levada_nvme::keyring::HostKeys;
use levada_nvme::tls::{PskIdentity, RetainedKey};
use levada_nvme::{Command, IoOpcode, Nqn, NvmeUrl, Range};
use levada_tls::{Connector, Unusable};
use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// A command has no more data than this, also where it could.
const COMMAND_BYTES_MAX: u64 = MIB;
const BLOCKS_MAX: u64 = 1 << 16;
/// What a target is asked to zero or to discard at once: more could take longer than a command may.
const ZEROES_BYTES_MAX: u64 = 8 * MIB;
const DISCARD_BYTES_MAX: u64 = 128 * MIB;
/// Commands of one request that are under way where each of them may be much work.
const LARGE_AT_ONCE: usize = 4;
/// Dataset Management discards.
const DEALLOCATE: u32 = 1 << 2;

/// Why a namespace cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// None of the addresses leads to it; each says why.
    #[error("{url}: {}", told(paths))]
    NoPath { url: String, paths: Vec<PathStatus> },
    /// Its blocks are larger than those that arrays have.
    #[error(
        "{url} has blocks of {bytes} bytes; at most {} are supported",
        levada_base::units::BLOCK_BYTES
    )]
    BlocksTooLarge { url: String, bytes: u64 },
    #[error("{url} is read-only")]
    ReadOnly { url: String },
    #[error("{url}: {source}")]
    Connect { url: String, source: ConnectError },
    #[error("{url}: {source}")]
    Keys { url: String, source: KeysError },
    #[error("{url}: the file has no secret of {host}")]
    NoKey { url: String, host: Nqn },
    #[error("{url}: the file has no key of TLS (NVMeTLSkey-1:...) of {host}")]
    NoTlsKey { url: String, host: Nqn },
    /// Together they name the key, for which there is not more room (TCP, 3.6.1.3).
    #[error("{url}: with TLS, the names of host and subsystem have 244 bytes at most")]
    LongNames { url: String },
    #[error("{url}: {source}")]
    Tls { url: String, source: Unusable },
}

fn told(paths: &[PathStatus]) -> String {
    let told = paths.iter().map(|path| {
        let why = path.why.as_deref().unwrap_or("not reached");
        format!("{}: {why}", path.address)
    });
    told.collect::<Vec<_>>().join("; ")
}

/// TLS of all connections to the subsystem.
fn connector(url: &NvmeUrl, host: Nqn, key: &RetainedKey) -> Result<Connector, NamespaceError> {
    let identity = PskIdentity::new(key.suite(), host, url.subsystem.clone());
    let shared = key.shared(&identity);
    let shared = shared.ok_or_else(|| NamespaceError::LongNames { url: url.to_string() })?;
    Connector::new(&identity, shared)
        .map_err(|source| NamespaceError::Tls { url: url.to_string(), source })
}

/// How the subsystem of a URL is reached, and as whom.
pub(super) fn approach(url: &NvmeUrl, options: Options) -> Result<(Tcp, Options), NamespaceError> {
    let mut options = Options { digests: url.digests, ..options };
    if let Some(nqn) = url.host.clone() {
        options.host.nqn = nqn;
    }
    let mut network = Tcp::default();
    if let Some(keys) = &url.keys {
        let host = options.host.nqn.clone();
        let mut keyring = read_keys(keys)
            .map_err(|source| NamespaceError::Keys { url: url.to_string(), source })?;
        let Some(HostKeys { secrets, tls }) = keyring.remove(&host) else {
            return Err(NamespaceError::NoKey { url: url.to_string(), host });
        };
        options.host.secrets = secrets;
        match (url.tls, tls) {
            (Some(true), None) => {
                return Err(NamespaceError::NoTlsKey { url: url.to_string(), host });
            }
            (Some(true) | None, Some(key)) => network = connector(url, host, &key)?.into(),
            (Some(false), _) | (None, None) => {}
        }
    }
    Ok((network, options))
}

/// See the module.
pub struct NvmeNamespace<N: Network = Tcp> {
    info: DeviceInfo,
    known: Rc<Known>,
    paths: Rc<Paths<N>>,
    health: Cell<Health>,
    /// Blocks that are being changed.
    changing: RangeLocks,
    /// One flush by itself at a time.
    flushing: Rc<Semaphore>,
    /// Room was given back.
    released: Notify,
}

impl NvmeNamespace<Tcp> {
    /// Opens the namespace that a URL names, over the network.
    ///
    /// # Errors
    ///
    /// A [`NamespaceError`].
    pub async fn open(url: &NvmeUrl, options: Options) -> Result<Self, NamespaceError> {
        let (network, options) = approach(url, options)?;
        let (subsystem, namespace) = (url.subsystem.clone(), url.namespace);
        let places = url.addresses.iter().map(Place::new).collect();
        let paths = Paths::new(network, places, subsystem, namespace, options);
        Self::open_by(paths, url.to_string()).await
    }
}

impl<N: Network> NvmeNamespace<N> {
    /// Opens `namespace` of `subsystem`, or the only one if that is 0, over any of the addresses.
    ///
    /// # Errors
    ///
    /// A [`NamespaceError`] with the reasons of all paths.
    pub async fn open_on(
        network: N,
        addresses: &[SocketAddr],
        subsystem: Nqn,
        namespace: u32,
        options: Options,
        name: String,
    ) -> Result<Self, NamespaceError> {
        let places = addresses.iter().map(|address| Place::from(*address)).collect();
        let paths = Paths::new(network, places, subsystem, namespace, options);
        Self::open_by(paths, name).await
    }

    async fn open_by(paths: Rc<Paths<N>>, name: String) -> Result<Self, NamespaceError> {
        let opening = Opening(Some(Rc::clone(&paths)));
        let known = match paths.first().await {
            Ok(known) => known,
            Err(why) => return Err(NamespaceError::NoPath { url: name, paths: why }),
        };
        let identity = known.identity;
        let unusable = match () {
            () if identity.block_bytes > levada_base::units::BLOCK_BYTES => {
                let bytes = identity.block_bytes;
                Some(NamespaceError::BlocksTooLarge { url: name.clone(), bytes })
            }
            () if identity.is_read_only => Some(NamespaceError::ReadOnly { url: name.clone() }),
            () => None,
        };
        if let Some(error) = unusable {
            return Err(error);
        }
        let limit = if known.data_bytes_max == 0 { u64::MAX } else { known.data_bytes_max };
        let io_bytes_best = limit.min(COMMAND_BYTES_MAX).min(BLOCKS_MAX * identity.block_bytes);
        let info = DeviceInfo {
            name,
            capacity_bytes: known.capacity_bytes(),
            block_bytes: identity.block_bytes,
            atomic_write_bytes: identity.block_bytes,
            io_bytes_best,
        };
        opening.went_well();
        Ok(Self {
            info,
            known,
            paths,
            health: Cell::default(),
            changing: RangeLocks::default(),
            flushing: Semaphore::new(1),
            released: Notify::default(),
        })
    }

    /// Completes when a later owner turns out to have the namespace: which.
    pub async fn lost(&self) -> Epoch {
        self.paths.lost().await
    }

    /// Ends it, though somebody may still hold it: requests fail, and nothing that it was asked to write is written any more, but for what its
    /// target has already; see [`NvmeNamespace::changes`].
    pub fn abandon(&self) {
        self.paths.give_up("it was opened anew");
    }

    /// How the paths are doing.
    #[must_use]
    pub fn paths(&self) -> Vec<PathStatus> {
        self.paths.status()
    }

    /// It can be used no more, and has to be opened anew: what the target had confirmed is lost, or another owner has it.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.paths.is_given_up()
    }

    /// Commands that were sent again because a path had failed them, or lost them.
    #[must_use]
    pub fn resent(&self) -> u64 {
        self.paths.resent.get()
    }

    /// Times that a change of blocks had to wait until a lost one of the same blocks can no longer happen.
    #[must_use]
    pub fn held_back(&self) -> u64 {
        self.paths.held_back.get()
    }

    /// What the target says of the health of the drive, now; `None` when no path gives an answer.
    pub async fn look_at_health(&self) -> Option<HealthPage> {
        let page = self.paths.health_page(self.known.namespace).await?;
        self.count(|health| health.failing = page.warnings.ask_for_replacement());
        Some(page)
    }

    /// Completes when the target says, after this call, that one of its drives has begun to warn: a look at its health will tell.
    pub fn warned(&self) -> impl Future<Output = ()> + '_ {
        self.paths.warned.changed()
    }

    /// Names the namespace: what no other one has, as far as the target says.
    #[must_use]
    pub fn names(&self) -> Vec<u8> {
        self.known.names()
    }

    /// True when both are one and the same namespace, whatever numbers and subsystems it is reached by.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.known.is_same(&other.known)
    }

    /// False while requests wait for a path, and once the device is gone for good.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.paths.is_reached()
    }

    /// What was changed, and may still be.
    #[must_use]
    pub fn changes(&self) -> Changes {
        Changes(Rc::clone(&self.paths.unsettled.borrow()))
    }

    /// This one was opened after another one, which has left changes behind that are not fenced off. Said before anything is written.
    pub fn comes_after(&self, earlier: Changes) {
        self.paths.unsettled.replace(earlier.0);
    }

    /// Its number within the subsystem.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.known.namespace
    }

    /// Owners can be told apart by the target.
    #[must_use]
    pub fn has_reservations(&self) -> bool {
        self.known.has_reservations()
    }

    /// How long changes that another host has sent may still be carried out once that is gone, without reservations that would shut
    /// them out.
    #[must_use]
    pub fn settle(&self) -> Duration {
        self.paths.settle()
    }

    /// The latest owner of which the target knows, but for this process.
    ///
    /// # Errors
    ///
    /// Those of a read.
    pub async fn owner(&self) -> Result<Epoch, BlockError> {
        match self.has_reservations() {
            true => fence::owner(self).await,
            false => Ok(Epoch::default()),
        }
    }

    /// Stops being the owner that [`Device::fence`] has made this process, so that even an earlier one can be next.
    ///
    /// # Errors
    ///
    /// [`BlockError::Fenced`] when another one has it, and those of a write; then it may be the owner still.
    pub async fn relinquish(&self) -> Result<(), BlockError> {
        fence::relinquish(self).await
    }

    /// Lets go of the target in order. Requests that are under way fail.
    pub async fn close(self) {
        self.paths.end();
        self.paths.ended().await;
    }

    fn command(&self, opcode: IoOpcode) -> Command {
        Command::new(opcode as u8, 0, self.known.namespace)
    }

    fn on_blocks(&self, opcode: IoOpcode, at: u64, bytes: u64) -> Command {
        let block_bytes = self.info.block_bytes;
        self.command(opcode).with_blocks(at / block_bytes, bytes / block_bytes)
    }

    fn has(&self, optional: OptionalCommands) -> bool {
        self.known.optional.contains(optional)
    }

    fn order(&self, command: Command, operation: &'static str, at: u64, bytes: u64) -> Order {
        let capacity_bytes = self.info.capacity_bytes;
        let asked = Asked { operation, at, bytes, capacity_bytes, is_read: false };
        Order { command, from: IoVec::new(), change: None, asked }
    }

    fn count(&self, change: impl FnOnce(&mut Health)) {
        let mut health = self.health.get();
        change(&mut health);
        self.health.set(health);
    }

    /// Has an order carried out, and says what became of it as devices do.
    pub(super) async fn carry_out(
        &self,
        order: &Order,
        into: IoVecMut,
    ) -> Result<IoVecMut, BlockError> {
        match self.paths.carry_out(order, into).await {
            Ok((_, into)) => Ok(into),
            Err(OrderError::Block(error)) => Err(error),
            Err(OrderError::Conflict) => Err(fence::conflict(self).await),
        }
    }

    pub(super) fn shared(&self) -> &Rc<Paths<N>> {
        &self.paths
    }

    pub(super) fn known(&self) -> &Known {
        &self.known
    }

    async fn read_run(&self, at: u64, into: IoVecMut) -> Result<IoVecMut, BlockError> {
        let bytes = bytes_in(&into);
        let mut order = self.order(self.on_blocks(IoOpcode::Read, at, bytes), "read", at, bytes);
        order.asked.is_read = true;
        self.carry_out(&order, into).await
    }

    async fn write_run(
        &self,
        at: u64,
        from: IoVec,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let bytes = bytes_in(&from);
        let mut command = self.on_blocks(IoOpcode::Write, at, bytes);
        if durability == Durability::Fua {
            command = command.with_fua();
        }
        let mut order = self.order(command, "write", at, bytes);
        order.change = Some(self.paths.change(at, bytes));
        order.from = from;
        let _turn = self.turn(at, bytes).await;
        let is_kept = match durability {
            Durability::Volatile => self.known.has_volatile_cache,
            Durability::Fua => self.paths.unflushed.borrow().keeps_any(),
        };
        let room = if is_kept { Some(self.room(bytes).await?) } else { None };
        // A copy is made, where one must be, while the memory is still the caller's.
        let kept = room.as_ref().map(|_| Kept::write(at, &order.from));
        self.carry_out(&order, IoVecMut::new()).await?;
        if let Some(kept) = kept {
            self.keep(&order, kept);
        }
        Ok(())
    }

    async fn zero_run(&self, at: u64, bytes: u64) -> Result<(), BlockError> {
        let command = self.on_blocks(IoOpcode::WriteZeroes, at, bytes).with_deallocate();
        let mut order = self.order(command, "write zeroes", at, bytes);
        order.change = Some(self.paths.change(at, bytes));
        let _turn = self.turn(at, bytes).await;
        let _room = match self.known.has_volatile_cache {
            true => Some(self.room(0).await?),
            false => None,
        };
        self.carry_out(&order, IoVecMut::new()).await?;
        if self.known.has_volatile_cache {
            self.keep(&order, Kept::Zeroes { at, bytes });
        }
        Ok(())
    }

    async fn discard_run(&self, at: u64, bytes: u64) -> Result<(), BlockError> {
        let block_bytes = self.info.block_bytes;
        let range = Range { first_block: at / block_bytes, blocks: (bytes / block_bytes) as u32 };
        let command = self.command(IoOpcode::DatasetManagement).with_dword(11, DEALLOCATE);
        let mut order = self.order(command, "discard", at, bytes);
        order.change = Some(self.paths.change(at, bytes));
        order.from = Buf::copy_of(&range.to_bytes()).into_vec();
        let _turn = self.turn(at, bytes).await;
        self.carry_out(&order, IoVecMut::new()).await.map(drop)
    }

    /// Changes of the same blocks take turns where they may have to be made again in their order.
    async fn turn(&self, at: u64, bytes: u64) -> Option<RangeGuard<'_>> {
        match self.known.has_volatile_cache {
            true => Some(self.changing.lock(at, at + bytes).await),
            false => None,
        }
    }

    /// Room for a change to be kept: as soon as there is some, after a flush if need be.
    async fn room(&self, bytes: u64) -> Result<Room<'_, N>, BlockError> {
        loop {
            let released = self.released.changed();
            if self.paths.unflushed.borrow_mut().reserve(bytes) {
                return Ok(Room { of: self, bytes });
            }
            let turn = self.flushing.acquire(1).await;
            // Another one has flushed meanwhile.
            if self.paths.unflushed.borrow_mut().reserve(bytes) {
                return Ok(Room { of: self, bytes });
            }
            if self.paths.unflushed.borrow().is_much() {
                self.flush_all().await?;
                continue;
            }
            // Whoever has the room either keeps something or gives it back.
            drop(turn);
            released.await;
        }
    }

    async fn flush_all(&self) -> Result<(), BlockError> {
        let order = self.order(self.command(IoOpcode::Flush), "flush", 0, 0);
        match flush(&self.paths, &order).await {
            Ok(()) => Ok(()),
            Err(OrderError::Block(error)) => Err(error),
            Err(OrderError::Conflict) => Err(fence::conflict(self).await),
        }
    }

    /// Keeps a change that was confirmed, and has it flushed in time.
    fn keep(&self, order: &Order, kept: Kept) {
        let change = order.change.clone().expect("a change");
        let mut unflushed = self.paths.unflushed.borrow_mut();
        unflushed.keep(change, kept);
        if unflushed.is_much()
            && let Some(turn) = self.flushing.try_acquire(1)
        {
            drop(unflushed);
            let paths = Rc::clone(&self.paths);
            let order = self.order(self.command(IoOpcode::Flush), "flush", 0, 0);
            reactor::spawn(async move {
                // Who asks for a flush is told if there cannot be one.
                let _ = flush(&paths, &order).await;
                drop(turn);
            });
        }
    }

    /// Cuts a range into runs of at most `bytes_max`.
    fn runs(at: u64, bytes: u64, bytes_max: u64) -> impl Iterator<Item = (u64, u64)> {
        let end = at + bytes;
        std::iter::successors(Some(at), move |at| Some(at + bytes_max))
            .take_while(move |at| *at < end)
            .map(move |at| (at, bytes_max.min(end - at)))
    }
}

async fn flush<N: Network>(paths: &Paths<N>, order: &Order) -> Result<(), OrderError> {
    let mark = paths.unflushed.borrow().mark();
    paths.carry_out(order, IoVecMut::new()).await?;
    let mark = match planted!("nvme-flush-covers-what-came-later") {
        true => paths.unflushed.borrow().mark(),
        false => mark,
    };
    paths.unflushed.borrow_mut().flushed(mark);
    Ok(())
}

/// Paths that end, unless the namespace was opened over them.
struct Opening<N: Network>(Option<Rc<Paths<N>>>);

impl<N: Network> Opening<N> {
    fn went_well(mut self) {
        self.0 = None;
    }
}

impl<N: Network> Drop for Opening<N> {
    fn drop(&mut self) {
        if let Some(paths) = &self.0 {
            paths.end();
        }
    }
}

/// Room for a change that may be kept.
struct Room<'a, N: Network> {
    of: &'a NvmeNamespace<N>,
    bytes: u64,
}

impl<N: Network> Drop for Room<'_, N> {
    fn drop(&mut self) {
        self.of.paths.unflushed.borrow_mut().release(self.bytes);
        self.of.released.notify_all();
    }
}

/// The first error of several parts, when all are over.
fn first_error<T>(all: Vec<Result<T, BlockError>>) -> Result<Vec<T>, BlockError> {
    all.into_iter().collect()
}

/// Has the parts of a request carried out, some at once, also when one fails: the first error, when all are over.
async fn run_all<F: Future<Output = Result<(), BlockError>>>(
    runs: impl Iterator<Item = (u64, u64)>,
    run: impl FnMut((u64, u64)) -> F,
) -> Result<(), BlockError> {
    let all = stream::iter(runs).map(run).buffer_unordered(LARGE_AT_ONCE);
    first_error(all.collect().await).map(drop)
}

impl<N: Network> Drop for NvmeNamespace<N> {
    fn drop(&mut self) {
        self.paths.end();
    }
}

impl<N: Network> Device for NvmeNamespace<N> {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn is_shared(&self) -> bool {
        true
    }

    /// Without a witness, a namespace that was fenced and whose target has lost its reservations is given up.
    fn recognise_by(&self, witness: Option<Witness>) {
        self.paths.owner.recognise_by(witness);
        // Those that wait for that.
        self.paths.look_at_unused();
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            let bytes = bytes_in(&into);
            check_range(&self.info, at, bytes)?;
            if bytes == 0 {
                return Ok(into);
            }
            let read = if bytes <= self.info.io_bytes_best {
                self.read_run(at, into).await
            } else {
                let (runs, shape) = cut(into, self.info.io_bytes_best);
                let starts = (at..).step_by(self.info.io_bytes_best as usize);
                let runs = starts.zip(runs).map(|(at, run)| self.read_run(at, run));
                first_error(join_all(runs).await).map(|runs| shape.join(runs))
            };
            self.count(|health| match read {
                Ok(_) => health.bytes_read += bytes,
                Err(_) => health.read_errors += 1,
            });
            read
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_in(&from);
            check_range(&self.info, at, bytes)?;
            let limit = self.info.io_bytes_best;
            let written = match bytes {
                0 => return Ok(()),
                bytes if bytes <= limit => self.write_run(at, from, durability).await,
                bytes => {
                    let runs = Self::runs(at, bytes, limit).map(|(start, bytes)| {
                        let part = window(&from, (start - at) as usize, bytes as usize);
                        self.write_run(start, part, durability)
                    });
                    first_error(join_all(runs).await).map(drop)
                }
            };
            self.count(|health| match written {
                Ok(()) => health.bytes_written += bytes,
                Err(_) => health.write_errors += 1,
            });
            written
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.flush_all())
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_range(&self.info, at, bytes)?;
            // What cannot be discarded keeps the old bytes, which is allowed.
            if !self.has(OptionalCommands::DATASET_MANAGEMENT) {
                return Ok(());
            }
            let discard = |(at, bytes)| self.discard_run(at, bytes);
            let limit = match self.known.limits.discard_blocks_max {
                0 => DISCARD_BYTES_MAX,
                blocks => DISCARD_BYTES_MAX.min(blocks.saturating_mul(self.info.block_bytes)),
            };
            run_all(Self::runs(at, bytes, limit), discard).await
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_range(&self.info, at, bytes)?;
            if self.has(OptionalCommands::WRITE_ZEROES) {
                let limit = match self.known.limits.zeroes_bytes_max {
                    0 => ZEROES_BYTES_MAX,
                    limit => limit.min(ZEROES_BYTES_MAX),
                };
                let limit = limit.min(BLOCKS_MAX * self.info.block_bytes);
                let zero = |(at, bytes)| self.zero_run(at, bytes);
                return run_all(Self::runs(at, bytes, limit), zero).await;
            }
            let limit = self.info.io_bytes_best;
            let zeroes = BufMut::zeroed(bytes.min(limit) as usize).freeze();
            let write = |(at, bytes): (u64, u64)| {
                let from = zeroes.slice(0, bytes as usize).into_vec();
                self.write_run(at, from, Durability::Volatile)
            };
            run_all(Self::runs(at, bytes, limit), write).await
        })
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        Box::pin(fence::fence(self, epoch))
    }

    fn health(&self) -> Health {
        self.health.get()
    }
}

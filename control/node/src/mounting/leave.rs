//! Leave to read and write: a guest whose tenant has caps waits for it before its requests take anything.
//!
//! The node has the caps ([`crate::turns`]). What waits is asked for together, in the order in which it came, one question at a time.
//!
//! A queue of a guest that is to end waits for its requests, and its machine monitor, with all of the machine, for the queue. So after a moment
//! some of them go on without leave and are owed: they are asked for before all others, afterwards.
//!
//! What always holds:
//! - Nothing goes on because the node is silent, slow, or not there.
//! - What is owed at once is bounded, and is owed for a bounded time: that is all that anybody can have beyond his caps, however often
//!   queues end and begin.
//! - Who is not there any more has nothing carried out that waits.

use crate::turns::{Ask, Granted, TURNS, WANTED_BYTES_MAX, WANTED_MAX, Wanted};
use futures_util::future::LocalBoxFuture;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Instant};
use levada_base::sync::oneshot;
use levada_base::units::MIB;
use levada_mount::codec::Operation;
use levada_wire::frame::{decode_body, encode_body, flags};
use levada_wire::rpc::{Call, Peer, PeerConfig};
use levada_wire::same_host::HostTransport;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// No request reads more at once.
const READ_BYTES_MAX: u32 = 1 << 20;
/// Bytes that are asked for at once, unless one request is more.
const BYTES_ASKED: u64 = MIB;
/// A question that is not answered within this is asked again.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(5);
/// Before that, and when nothing of what was asked for may go on.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
/// Who looks after the machines is told once that a node has answered nothing for so long.
const SILENT_MAX: Duration = Duration::from_secs(30);
/// A node that says for so long that it does not know such questions is of an earlier release, which has no caps for files.
const NOT_HERE_MAX: Duration = Duration::from_secs(10);
/// Then, nobody asks again for so long.
const NOT_ASKED: Duration = Duration::from_secs(30);
/// How long a queue that is to end waits for leave.
const PATIENCE: Duration = Duration::from_secs(2);
/// Who ends several queues does so one after the other: that is one end, unless so much lies between them.
const ENDS_APART: Duration = Duration::from_millis(500);
/// What may be owed at once, and for how long.
const OWED_MAX: usize = 1024;
const OWED_BYTES_MAX: u64 = 64 * MIB;
const OWED_FOR: Duration = Duration::from_secs(60);

/// What a request reads or writes; `None`: it may go on at once.
pub(super) fn wanted(operation: &Operation<'_>) -> Option<Wanted> {
    match operation {
        Operation::Read(args) => Some(Wanted::Read { bytes: args.size.min(READ_BYTES_MAX).into() }),
        Operation::Write(args) => Some(Wanted::Write { bytes: args.data.len() as u64 }),
        Operation::Fallocate { .. } => Some(Wanted::Write { bytes: 0 }),
        Operation::SetAttr(set) => set.size.map(|_| Wanted::Write { bytes: 0 }),
        Operation::CopyFileRange(args) | Operation::CopyFileRange64(args) => {
            Some(Wanted::Write { bytes: args.length })
        }
        // Spelt out, so that a new one does not pass unseen.
        Operation::Lookup { .. }
        | Operation::Forget { .. }
        | Operation::BatchForget(_)
        | Operation::GetAttr { .. }
        | Operation::Statx { .. }
        | Operation::ReadLink
        | Operation::Symlink { .. }
        | Operation::MkNod { .. }
        | Operation::MkDir { .. }
        | Operation::Unlink { .. }
        | Operation::RmDir { .. }
        | Operation::Rename { .. }
        | Operation::Link { .. }
        | Operation::Open(_)
        | Operation::StatFs
        | Operation::Release(_)
        | Operation::Fsync { .. }
        | Operation::SetXattr { .. }
        | Operation::GetXattr { .. }
        | Operation::ListXattr { .. }
        | Operation::RemoveXattr { .. }
        | Operation::Flush { .. }
        | Operation::Init(_)
        | Operation::OpenDir(_)
        | Operation::ReadDir(_)
        | Operation::ReadDirPlus(_)
        | Operation::ReleaseDir(_)
        | Operation::FsyncDir { .. }
        | Operation::GetLk(_)
        | Operation::SetLk(_)
        | Operation::SetLkW(_)
        | Operation::Access { .. }
        | Operation::Create { .. }
        | Operation::Interrupt { .. }
        | Operation::Destroy
        | Operation::LSeek { .. }
        | Operation::SyncFs
        | Operation::TmpFile { .. }
        | Operation::Unknown { .. } => None,
    }
}

/// The same request, which does no more at once than may be asked for.
pub(super) fn shortened(mut operation: Operation<'_>) -> Operation<'_> {
    if let Operation::CopyFileRange(args) | Operation::CopyFileRange64(args) = &mut operation {
        // Who copies asks again for the rest.
        args.length = args.length.min(WANTED_BYTES_MAX);
    }
    operation
}

/// What came of a question.
enum Told {
    Granted(Granted),
    /// The node does not know such questions, or not yet.
    NotHere,
    Nothing,
}

/// Who is asked.
trait Node {
    fn ask(&self, ask: Ask) -> LocalBoxFuture<'_, Told>;
}

impl Node for Peer {
    fn ask(&self, ask: Ask) -> LocalBoxFuture<'_, Told> {
        Box::pin(async move {
            let call = Call { kind: "Turns", ..Call::new(TURNS, encode_body(&ask)) };
            match reactor::timeout(GIVEN_UP_AFTER, self.call_once(&call)).await {
                Ok(Ok(reply)) if reply.header.flags & flags::NOT_HERE != 0 => Told::NotHere,
                Ok(Ok(reply)) => decode_body(&reply.body).map_or(Told::Nothing, Told::Granted),
                Ok(Err(_)) | Err(_) => Told::Nothing,
            }
        })
    }
}

/// The guest is gone, or is taken for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused;

/// A request in line.
struct Entry {
    /// Rises along the line.
    number: u64,
    wanted: Wanted,
    state: State,
}

enum State {
    Waits(oneshot::Sender<()>),
    /// It went on without leave.
    Owed {
        since: Instant,
    },
}

/// No answer, in the one way or the other.
#[derive(Clone, Copy)]
struct Trouble {
    is_not_here: bool,
    since: Instant,
    was_told: bool,
}

impl Trouble {
    fn is_earlier_release(self) -> bool {
        self.is_not_here && self.since.elapsed() >= NOT_HERE_MAX
    }
}

/// A time in which queues end.
#[derive(Clone, Copy)]
struct Ending {
    since: Instant,
    last: Instant,
}

/// See the module. Of one process, whatever guests it has had.
pub(super) struct Leave {
    node: Rc<dyn Node>,
    tenant: u32,
    /// Until then nobody need ask.
    free_until: Cell<Instant>,
    /// First what is owed, then who waits.
    line: RefCell<VecDeque<Entry>>,
    /// The number of the last one that came.
    last: Cell<u64>,
    /// A task asks for those in line.
    is_asking: Cell<bool>,
    /// What keeps the node from answering.
    trouble: Cell<Option<Trouble>>,
    ending: Cell<Option<Ending>>,
    /// The process is.
    is_over: Cell<bool>,
}

impl Leave {
    fn new(node: Rc<dyn Node>, tenant: u32) -> Rc<Self> {
        let (free_until, line, last, is_asking) = Default::default();
        let (trouble, ending, is_over) = Default::default();
        Rc::new(Self { node, tenant, free_until, line, last, is_asking, trouble, ending, is_over })
    }

    /// Waits until it may be done.
    ///
    /// # Errors
    ///
    /// [`Refused`]: nobody waits for its answer any more.
    pub(super) async fn take(self: &Rc<Self>, wanted: Wanted) -> Result<(), Refused> {
        if reactor::now() < self.free_until.get() {
            return Ok(());
        }
        let (sender, told) = oneshot::channel();
        let number = self.last.get() + 1;
        self.last.set(number);
        let state = State::Waits(sender);
        self.line.borrow_mut().push_back(Entry { number, wanted, state });
        if !self.is_asking.replace(true) {
            reactor::spawn(Rc::clone(self).ask_for_all());
        }
        told.await.map_err(|_| Refused)
    }

    async fn ask_for_all(self: Rc<Self>) {
        loop {
            let next = self.next();
            if next.is_empty() {
                self.is_asking.set(false);
                return;
            }
            let (numbers, wanted): (Vec<u64>, Vec<Wanted>) = next.into_iter().unzip();
            let told = self.node.ask(Ask { tenant: self.tenant, wanted }).await;
            self.heed(&told);
            let (passed, free) = match told {
                Told::Granted(Granted { passed, free_ms }) => {
                    (passed as usize, Duration::from_millis(free_ms.into()))
                }
                Told::NotHere if self.is_earlier_release() => (0, NOT_ASKED),
                Told::NotHere | Told::Nothing => (0, Duration::ZERO),
            };
            if !free.is_zero() {
                self.free_until.set(reactor::now() + free);
                self.pass_to(self.last.get());
            } else if let Some(last) = numbers.get(..passed).unwrap_or(&numbers).last() {
                self.pass_to(*last);
            } else {
                reactor::sleep(AGAIN_AFTER).await;
            }
        }
    }

    fn is_earlier_release(&self) -> bool {
        self.trouble.get().is_some_and(Trouble::is_earlier_release)
    }

    /// Whoever looks after the machines should know why requests wait, or why they do not.
    fn heed(&self, told: &Told) {
        let is_not_here = matches!(told, Told::NotHere);
        let before = self.trouble.get().filter(|before| before.is_not_here == is_not_here);
        let begun = || Trouble { is_not_here, since: reactor::now(), was_told: false };
        let trouble = match told {
            Told::Granted(_) => None,
            Told::NotHere | Told::Nothing => Some(before.unwrap_or_else(begun)),
        };
        self.trouble.set(trouble);
        let Some(trouble) = trouble.filter(|trouble| !trouble.was_told) else { return };
        if trouble.is_earlier_release() {
            tracing::warn!(
                tenant = self.tenant,
                "the node is of an earlier release, so limits of this tenant do not hold for its files: start the node anew"
            );
        } else if trouble.since.elapsed() >= SILENT_MAX {
            tracing::warn!(
                tenant = self.tenant,
                "reads and writes of a guest wait for the node, which does not answer whether its tenant may: look at `levada status`"
            );
        } else {
            return;
        }
        self.trouble.set(Some(Trouble { was_told: true, ..trouble }));
    }

    /// The first ones in line, as many as are asked for at once, with their numbers.
    fn next(&self) -> Vec<(u64, Wanted)> {
        let mut line = self.line.borrow_mut();
        let is_forgiven = |entry: &Entry| matches!(entry.state, State::Owed { since } if since.elapsed() >= OWED_FOR);
        while line.front().is_some_and(is_forgiven) {
            line.pop_front();
        }
        let mut bytes = 0;
        let fits = |(_, wanted): &(u64, Wanted)| {
            let is_first = bytes == 0;
            bytes += wanted.bytes().max(1);
            is_first || bytes <= BYTES_ASKED
        };
        let all = line.iter().map(|entry| (entry.number, entry.wanted));
        all.take(WANTED_MAX).take_while(fits).collect()
    }

    /// Those up to the one of that number go on, or are paid for.
    fn pass_to(&self, number: u64) {
        let mut line = self.line.borrow_mut();
        let count = line.iter().take_while(|entry| entry.number <= number).count();
        for entry in line.drain(..count) {
            if let State::Waits(sender) = entry.state {
                sender.send(());
            }
        }
    }

    /// Nothing is carried out any more of what waits; what is owed stays so.
    fn refuse(&self) {
        // A sender that is dropped refuses.
        self.line.borrow_mut().retain(|entry| matches!(entry.state, State::Owed { .. }));
    }

    fn hurry(&self, is_gone: bool) {
        if is_gone && !self.is_over.get() {
            return self.refuse();
        }
        let now = reactor::now();
        let before = self.ending.get().filter(|ending| now.since(ending.last) < ENDS_APART);
        let since = before.map_or(now, |ending| ending.since);
        self.ending.set(Some(Ending { since, last: now }));
        if now.since(since) >= PATIENCE {
            self.let_go();
        }
    }

    /// Who waits goes on without leave, as far as may be owed.
    fn let_go(&self) {
        let (mut owed, mut bytes) = (0, 0);
        for entry in self.line.borrow_mut().iter_mut() {
            owed += 1;
            bytes += entry.wanted.bytes();
            // A process that ends owes nobody anything.
            let may_be_owed = owed <= OWED_MAX && bytes <= OWED_BYTES_MAX || self.is_over.get();
            if !may_be_owed {
                return;
            }
            if matches!(entry.state, State::Waits(_)) {
                let owed = State::Owed { since: reactor::now() };
                if let State::Waits(sender) = std::mem::replace(&mut entry.state, owed) {
                    sender.send(());
                }
            }
        }
    }
}

/// Where the guests of a process take leave to read and write.
pub(super) struct Leaves {
    node: Rc<dyn Node>,
    /// Of the tenant whose directory was shown last.
    last: RefCell<Option<Rc<Leave>>>,
}

impl Leaves {
    /// Of the node at `address`.
    pub(super) fn new(address: &str, cluster: Uuid) -> Self {
        let config = PeerConfig { cluster: *cluster.as_bytes(), ..PeerConfig::default() };
        let node = Peer::new(Rc::new(HostTransport::new()), address, config);
        Self { node, last: RefCell::default() }
    }

    /// For the files of the tenant of that number; `None`: they are nobody's.
    pub(super) fn of(&self, tenant: u32) -> Option<Rc<Leave>> {
        if tenant == 0 {
            return None;
        }
        let mut last = self.last.borrow_mut();
        let is_same = |leave: &&Rc<Leave>| leave.tenant == tenant;
        if let Some(leave) = last.as_ref().filter(is_same) {
            return Some(Rc::clone(leave));
        }
        let leave = Leave::new(Rc::clone(&self.node), tenant);
        *last = Some(Rc::clone(&leave));
        Some(leave)
    }

    /// See [`levada_export_vhost::FileSystem::hurry`].
    pub(super) fn hurry(&self, is_gone: bool) {
        if let Some(leave) = &*self.last.borrow() {
            leave.hurry(is_gone);
        }
    }

    /// What a guest had mounted ends: nothing of it that waits is carried out any more.
    pub(super) fn refuse(&self) {
        if let Some(leave) = &*self.last.borrow() {
            leave.refuse();
        }
    }

    /// The process ends: nobody waits for long any more.
    pub(super) fn end(&self) {
        if let Some(leave) = &*self.last.borrow() {
            leave.is_over.set(true);
        }
    }
}

#[cfg(test)]
mod tests;

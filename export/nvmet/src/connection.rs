//! One connection, which is one queue: its commands side by side, within bounds.

use crate::admin::{Admin, Answer, IN_CAPSULE_BYTES, QUEUE_ENTRIES_MAX};
use crate::connect::{Comer, Connected};
use crate::controller::{Queue, Taken};
use crate::gate::{Gate, Passage, Step};
use crate::io::{self, DATA_BYTES_MAX, Reading};
use crate::memory::Memory;
use crate::port::Port;
use crate::recall::Stage;
use crate::subsystem::Subsystem;
use crate::target::Shared;
use crate::transfers::{Landing, Mangled, Transfers};
use crate::units::{ADMIN_IN_CAPSULE_BYTES, Broken, END_LIMIT, Reader};
use futures_util::future::{Either, LocalBoxFuture, select};
use levada_base::buf::bytes_in;
use levada_base::checksum::crc32c_parts;
use levada_base::reactor::net::Stream;
use levada_base::reactor::{self, Elapsed};
use levada_base::stream::{ByteStream, Inbox, Outbox, Outgoing, Present};
use levada_base::sync::{Once, Permit, Semaphore, oneshot};
use levada_base::{Buf, IoVec};
use levada_nvme::pdu::{
    DIGEST_BYTES, Fatal, Framing, HEAD_BYTES_MAX, Pdu, RESPONSE_BYTES_MAX, Transfer,
};
use levada_nvme::tls::PskIdentity;
use levada_nvme::{AdminOpcode, Command, Completion, DataPointer, IoOpcode, Status};
use levada_tls::{Channel, FIRST_BYTE, Session};
use std::cell::{Cell, RefCell};
use std::future::{Future, pending};
use std::io as system;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Units of a connection that are taken before others have their turn, and answers leave: fewer wake the host more often (note 0022, Small reads).
const UNITS_AT_A_TIME: usize = 128;
/// How long a host may take to connect a queue.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// How long shaking hands may take, of that.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Data of commands of a connection under way, in both directions, but for those within commands: what it has itself, enough for one
/// command, also a Compare, and what it may borrow.
const BYTES: u64 = 2 * DATA_BYTES_MAX;
const BYTES_LENT: u64 = 30 << 20;
/// The same for data within commands.
const IN_CAPSULE_BYTES_AT_ONCE: u64 = 256 << 10;
const IN_CAPSULE_BYTES_LENT: u64 = 16 << 20;

/// Serves a host that has come by a socket, within TLS if that is how it begins, until it is done, or the target is. All that it asked
/// for has been carried out when this returns.
pub(crate) async fn serve_socket(
    shared: Rc<Shared>,
    port: Rc<Port>,
    stream: Stream,
    present: &Present,
) {
    let peer = stream.peer_addr().map_or_else(|_| "?".into(), |peer| peer.to_string());
    let served = async {
        let came_to = stream.local_addr()?;
        let greeting = Rc::clone(&shared);
        served(shared, port, (came_to, &peer, present), async move {
            let (channel, reader) = greet(&greeting, stream.into()).await?;
            let shown = channel.of_session(Session::host).flatten();
            Ok((channel, reader, shown))
        })
        .await
    };
    tell(&peer, served.await);
}

/// The same for a host that has come some other way, in the clear.
pub(crate) async fn serve<S: ByteStream + 'static>(
    shared: Rc<Shared>,
    port: Rc<Port>,
    stream: S,
    came_to: SocketAddr,
    (peer, present): (&str, &Present),
) {
    let greeted = async move {
        let reader = Reader::new(Inbox::new(stream.clone()));
        Ok((stream, reader, None))
    };
    tell(peer, served(shared, port, (came_to, peer, present), greeted).await);
}

fn tell(peer: &str, served: Result<(), Broken>) {
    match served {
        Ok(()) => {}
        // It may be that somebody has forgotten a key, or that somebody tries some.
        Err(error @ Broken::Tls(_)) => {
            tracing::warn!(peer, %error, "an NVMe host is turned away");
        }
        Err(error) => tracing::info!(peer, %error, "the connection of an NVMe host broke"),
    }
}

/// What is there once a host has said how it begins: the connection, what comes by it, and by which key of TLS it has come.
type Greeted<S> = (S, Reader<S>, Option<PskIdentity>);

async fn served<S: ByteStream + 'static>(
    shared: Rc<Shared>,
    port: Rc<Port>,
    (came_to, peer, present): (SocketAddr, &str, &Present),
    greeted: impl Future<Output = Result<Greeted<S>, Broken>>,
) -> Result<(), Broken> {
    let cut = port.cut();
    let connecting = async {
        let (channel, mut reader, shown) = greeted.await?;
        let connected = async {
            reader.initialize(&channel, &port).await?;
            let comer = Comer { peer, shown: shown.as_ref() };
            reader.connect(&channel, &shared, &port, comer).await
        };
        match connected.await {
            Ok(connected) => Ok((channel, reader, connected)),
            Err(broken) => {
                if let Broken::Fatal(fatal) = &broken {
                    let head = Framing::terminate(false, *fatal, reader.head());
                    let _ = channel.write_all(Buf::copy_of(&head).into_vec()).await;
                }
                Err(broken)
            }
        }
    };
    let connecting = reactor::timeout(CONNECT_LIMIT, connecting);
    let connected: Result<_, Elapsed> = {
        let stopping = pin!(shared.stopping.happened());
        let cut = pin!(cut.happened());
        let displaced = pin!(present.displaced());
        // Before anything is made of what has waited for its path.
        match select(select(stopping, cut), select(pin!(connecting), displaced)).await {
            Either::Left(_) => return Ok(()),
            Either::Right((Either::Left((connected, _)), _)) => connected,
            Either::Right((Either::Right(_), _)) => return Err(Broken::Displaced),
        }
    };
    let (channel, mut reader, connected) = connected.map_err(|_| Broken::Late)??;
    let Connected { queue, connect, verifier } = connected;
    let entries = connect.queue_entries_less_one + 1;
    // A host may have been given an answer whose slot is not free here yet.
    let slots = u64::from(entries) * 2;
    let memory = Rc::clone(&shared.memory);
    let gate = Gate::new(verifier, &shared.proofs, peer);
    let connection = Rc::new(Connection {
        shared,
        queue,
        came_to,
        port,
        cut,
        framing: reader.framing,
        is_without_flow_control: connect.is_without_flow_control,
        entries,
        // Connect was the first.
        head: Cell::new(1 % entries),
        transfers: RefCell::default(),
        outbox: Outbox::default(),
        slots: Semaphore::new(slots),
        bytes: Memory::new(BYTES, &memory),
        capsules: Memory::new(IN_CAPSULE_BYTES_AT_ONCE, &memory),
        ended: Rc::default(),
        is_known: Once::default(),
        gate,
        has_told_of_damage: Cell::new(false),
    });
    if connection.is_let_in() {
        connection.becomes_known();
    }
    let writer = {
        let (connection, channel) = (Rc::clone(&connection), channel.clone());
        reactor::spawn(async move {
            if connection.outbox.run(&channel).await.is_err() {
                // So that the reader hears of it as well.
                channel.close().await;
            }
        })
    };
    let silent = (connection.queue.id == 0).then(|| {
        let controller = Rc::clone(&connection.queue.controller);
        reactor::spawn(async move {
            controller.falls_silent().await;
            controller.end("its host was silent for too long");
        })
    });
    let received = {
        let over = pin!(connection.is_over(present));
        match select(pin!(connection.receive(&mut reader)), over).await {
            Either::Left((received, _)) => received,
            Either::Right(((), _)) => Ok(()),
        }
    };
    if let Err(Broken::Fatal(fatal)) = &received {
        let head = Framing::terminate(false, *fatal, reader.head());
        connection.push(&head);
    }
    let controller = &connection.queue.controller;
    let is_lost = || controller.subsystem().and_then(Subsystem::loss).is_some();
    // Who was sent away while looking around is not waited for.
    let is_left = controller.subsystem().is_none() && controller.gone().has_happened();
    if connection.cut.has_happened() || is_lost() || is_left {
        channel.close().await;
    }
    connection.ended.happen();
    connection.queue.end();
    connection.transfers.borrow_mut().clear();
    // Those under way are answered, or their host is gone.
    let answered = async {
        drop(connection.slots.acquire(slots).await);
        connection.outbox.close();
        // A task that was killed has nothing more to send.
        let _ = writer.await;
    };
    let hurried = async {
        connection.gives_way(present).await;
        channel.close().await;
        pending::<()>().await;
    };
    let ended = async {
        select(pin!(answered), pin!(hurried)).await;
    };
    let is_late = reactor::timeout(END_LIMIT, ended).await.is_err();
    channel.close().await;
    if is_late && is_lost() {
        // What was asked of volumes that are lost never ends.
        connection.outbox.close();
    } else if is_late {
        // What was asked of volumes is carried out; its answers go nowhere. Who would send them learns that there are no more: of commands that were
        // aborted there is none by which it would notice.
        drop(connection.slots.acquire(slots).await);
        connection.outbox.close();
    }
    if let Some(silent) = silent {
        silent.abort();
    }
    received
}

/// Goes on within TLS, if that is how the host begins.
async fn greet(
    shared: &Rc<Shared>,
    channel: Channel,
) -> Result<(Channel, Reader<Channel>), Broken> {
    let mut inbox = Inbox::new(channel.clone());
    if inbox.peek().await? != Some(FIRST_BYTE) {
        return Ok((channel, Reader::new(inbox)));
    }
    let session = shared.tls_session(inbox.rest()).map_err(Broken::Tls)?;
    // Who never ends shaking hands keeps no more than that takes.
    drop(inbox);
    let secured = channel.secured(session);
    let secured = reactor::timeout(HANDSHAKE_LIMIT, secured).await;
    let secured = secured.unwrap_or_else(|_| Err(system::ErrorKind::TimedOut.into()));
    let channel = secured.map_err(Broken::Tls)?;
    let inbox = Inbox::new(channel.clone());
    Ok((channel, Reader::new(inbox)))
}

/// What a queue's commands share.
struct Connection {
    shared: Rc<Shared>,
    queue: Queue,
    came_to: SocketAddr,
    port: Rc<Port>,
    /// Ends it without another word.
    cut: Rc<Once>,
    framing: Framing,
    is_without_flow_control: bool,
    entries: u16,
    /// How far we have come with the submission queue.
    head: Cell<u16>,
    transfers: RefCell<Transfers>,
    outbox: Outbox,
    slots: Rc<Semaphore>,
    bytes: Rc<Memory>,
    capsules: Rc<Memory>,
    /// Nothing is received any more.
    ended: Rc<Once>,
    /// Its host has proved who it is, where it has to.
    is_known: Once,
    gate: Gate,
    has_told_of_damage: Cell<bool>,
}

/// What came with a command.
enum Input {
    /// All its data, or none where it has none.
    Here(IoVec),
    /// So many are to be asked for.
    AskFor(u32),
    /// None, of a read that the volume is at.
    Reading(Reading),
    /// It cannot be carried out.
    Wrong(Status),
}

/// A command that has begun, and what it holds. It stays in one place while others carry it out: it would be copied with the future of each
/// of them, and a small read costs little else.
struct Work {
    command: Command,
    input: Input,
    /// Bounds of the connection that it has used: data that came within it, and those that were asked for or are answered.
    capsule: Option<Permit>,
    room: Option<Permit>,
    slot: Option<Permit>,
}

impl Connection {
    /// Sends what is no answer.
    fn push(&self, head: &[u8]) {
        self.outbox.push(Outgoing { head, ..Outgoing::default() });
    }

    /// Data came otherwise than their digest says. The host sends them again, so nobody else hears that a path is bad.
    fn tell_of_damage(&self) {
        if !self.has_told_of_damage.replace(true) {
            let (host, queue, path) = (self.queue.controller.host(), self.queue.id, self.came_to);
            let what = "data of a connection arrive damaged, and are sent again: look at its network (told once)";
            tracing::warn!(%host, queue, %path, "{what}");
        }
    }

    /// Returns when the queue has to end.
    async fn is_over(&self, present: &Present) {
        let controller = pin!(self.queue.controller.gone().happened());
        let reset = pin!(self.queue.reset.happened());
        let stopping = pin!(self.shared.stopping.happened());
        let cut = pin!(self.cut.happened());
        let turned_away = pin!(self.gate.turns_away(CONNECT_LIMIT));
        let displaced = pin!(self.is_displaced(present));
        let of_host = select(turned_away, displaced);
        select(select(select(controller, reset), select(stopping, cut)), of_host).await;
    }

    /// Returns when it has to make room for others before its host was known.
    async fn is_displaced(&self, present: &Present) {
        let (known, displaced) = (pin!(self.is_known.happened()), pin!(present.displaced()));
        if let Either::Left(_) = select(known, displaced).await {
            present.settle();
            pending::<()>().await;
        }
    }

    /// Returns when others need what it takes, also while it ends.
    async fn gives_way(&self, present: &Present) {
        let displaced = pin!(self.is_displaced(present));
        let evicted = pin!(self.queue.controller.evicted().happened());
        select(displaced, evicted).await;
    }

    /// Its host has proved who it is, or need not. Who only looks around, as anybody may, takes nothing of what others need, and makes
    /// room for them.
    fn is_let_in(&self) -> bool {
        self.gate.is_open() && self.queue.controller.subsystem().is_some()
    }

    /// Its host is let in.
    fn becomes_known(&self) {
        self.bytes.may_borrow(BYTES_LENT);
        self.capsules.may_borrow(IN_CAPSULE_BYTES_LENT);
        self.is_known.happen();
    }

    /// Something has come. Who has proved nothing keeps no controller of somebody else alive.
    #[inline]
    fn heard(&self) {
        if self.queue.id == 0 || self.gate.is_open() {
            self.queue.controller.heard();
        }
    }

    /// Takes commands, each of which is carried out by a task of its own, and the data for them.
    async fn receive<S: ByteStream + 'static>(
        self: &Rc<Self>,
        reader: &mut Reader<S>,
    ) -> Result<(), Broken> {
        let mut at_hand: usize = 0;
        loop {
            // Most are here with the one before. Others have their turn all the same.
            let answers_max = self.outbox.batches().max(1);
            at_hand += self.begin_at_hand(reader, UNITS_AT_A_TIME - at_hand, answers_max)?;
            if at_hand == UNITS_AT_A_TIME || self.outbox.batches() > answers_max {
                at_hand = 0;
                reactor::yield_now().await;
                continue;
            }
            let Some(unit) = reader.unit_at_hand()? else {
                if !reader.receive().await? {
                    return Ok(());
                }
                at_hand = 0;
                continue;
            };
            at_hand += 1;
            self.heard();
            match unit.pdu {
                Pdu::Command(command) => {
                    let limit = match self.queue.id {
                        0 => ADMIN_IN_CAPSULE_BYTES,
                        _ => IN_CAPSULE_BYTES,
                    };
                    if unit.data_bytes > limit {
                        return Err(Fatal::LimitExceeded.into());
                    }
                    // Who has it has all its data, waits for no other memory, and lets go of it whatever comes next.
                    let capsule = match unit.data_bytes as u64 {
                        0 => None,
                        bytes => Some(self.capsules.room(room_for(&command, bytes)).await),
                    };
                    let input = match unit.data_bytes {
                        0 => self.input(&command, None),
                        _ => match reader.data(&unit).await? {
                            Some(data) => self.input(&command, Some(data)),
                            None => {
                                self.tell_of_damage();
                                Input::Wrong(Status::TRANSIENT_TRANSPORT)
                            }
                        },
                    };
                    self.begin(command, input, capsule)?;
                }
                Pdu::HostData { transfer, is_last: _ } => {
                    let landing = self.transfers.borrow_mut().lend(&transfer, unit.data_bytes)?;
                    match landing {
                        Landing::Memory(memory) => {
                            let (filled, is_sound) = reader.data_into(&unit, memory).await?;
                            self.transfers.borrow_mut().take(&transfer, filled, is_sound);
                        }
                        Landing::Nowhere => reader.skip_data(&unit).await?,
                    }
                }
                Pdu::Terminates(terminated) if unit.common.kind.is_of_host() => {
                    return Err(terminated.into());
                }
                Pdu::InitializeRequest(_) => return Err(Fatal::Sequence.into()),
                // A controller's.
                Pdu::InitializeResponse(_)
                | Pdu::Terminates(_)
                | Pdu::Response(_)
                | Pdu::ControllerData { .. }
                | Pdu::ReadyToTransfer(_) => return Err(Fatal::Field { at: 0 }.into()),
            }
        }
    }

    /// Begins commands without data that are here, as many as `most`, or until more than `answers_max` batches of answers wait: how many there were.
    /// Not in a future, as each would be moved about in it.
    fn begin_at_hand<S: ByteStream + 'static>(
        self: &Rc<Self>,
        reader: &mut Reader<S>,
        most: usize,
        answers_max: usize,
    ) -> Result<usize, Fatal> {
        let mut begun = 0;
        while begun < most
            && self.outbox.batches() <= answers_max
            && let Some(command) = reader.command_at_hand()?
        {
            self.heard();
            match self.reading(&command) {
                Some((reading, room)) => self.read(&command, reading, room)?,
                None => self.begin(command, self.input(&command, None), None)?,
            }
            begun += 1;
        }
        Ok(begun)
    }

    /// Where a command's data are, and whether they are where it says.
    fn input(&self, command: &Command, data: Option<Buf>) -> Input {
        let wrong = |status: Status| Input::Wrong(status.and_do_not_retry());
        if command.is_fused() || !command.has_sgl() {
            return wrong(Status::INVALID_FIELD);
        }
        if direction(command) == 0 && data.is_none() {
            // Whatever it says of data that it does not have.
            return Input::Here(IoVec::new());
        }
        match (command.data(), data) {
            (DataPointer::InCapsule { offset, bytes }, data) => {
                if offset != 0 {
                    return wrong(Status::OFFSET_INVALID);
                }
                if data.as_ref().map_or(0, |data| data.len()) != bytes as usize
                    || !is_to_controller(command)
                {
                    return wrong(Status::DATA_LENGTH_INVALID);
                }
                Input::Here(data.map(Buf::into_vec).unwrap_or_default())
            }
            (DataPointer::Transport { .. }, Some(_)) => wrong(Status::DATA_LENGTH_INVALID),
            (DataPointer::Transport { bytes }, None) if is_to_controller(command) => match bytes {
                0 => Input::Here(IoVec::new()),
                bytes if u64::from(bytes) > DATA_BYTES_MAX => wrong(Status::DATA_LENGTH_INVALID),
                bytes => Input::AskFor(bytes),
            },
            (DataPointer::Transport { .. }, None) => Input::Here(IoVec::new()),
            (DataPointer::Other { .. }, _) => wrong(Status::DESCRIPTOR_TYPE_INVALID),
        }
    }

    /// Begins a command. A host that sends more of them than its queue has entries is ended: waiting for a slot here, nothing of what
    /// may free one would be received.
    fn begin(
        self: &Rc<Self>,
        command: Command,
        input: Input,
        capsule: Option<Permit>,
    ) -> Result<(), Fatal> {
        let slot = Some(self.next_slot()?);
        self.go_on(Work { command, input, capsule, room: None, slot });
        Ok(())
    }

    /// Goes on in the submission queue, to what the next command has of the connection's bounds.
    fn next_slot(&self) -> Result<Permit, Fatal> {
        let next = self.head.get() + 1;
        self.head.set(if next == self.entries { 0 } else { next });
        self.slots.try_acquire(1).ok_or(Fatal::LimitExceeded)
    }

    fn go_on(self: &Rc<Self>, mut work: Work) {
        let connection = Rc::clone(self);
        reactor::run_or_spawn(async move { connection.execute(&mut work).await });
    }

    /// A command that is a read which can begin now, and room for its data. `None`: it is something else, or there is something to wait for,
    /// or to find wrong.
    #[inline]
    fn reading(&self, command: &Command) -> Option<(Reading, Permit)> {
        let is_read = self.queue.id > 0 && command.opcode() == IoOpcode::Read as u8;
        let is_plain = !command.is_fused()
            && command.has_sgl()
            && matches!(command.data(), DataPointer::Transport { .. });
        if !(is_read && is_plain && self.gate.is_open() && self.port.is_open()) || self.is_revoked()
        {
            return None;
        }
        let room = self.bytes.room_at_once(bytes_of(command))?;
        let reading = Reading::begin(&self.queue.controller, command)?;
        Some((reading, room))
    }

    /// Carries out a read. What the volume has not at once goes on as any other command; but making a task, and moving its future there, is a
    /// good part of what a small read costs.
    #[inline]
    fn read(
        self: &Rc<Self>,
        command: &Command,
        mut reading: Reading,
        room: Permit,
    ) -> Result<(), Fatal> {
        let slot = self.next_slot()?;
        match reading.at_once(&self.queue.controller) {
            Some(outcome) => {
                let held = [Some(slot), Some(room)];
                self.answer(command, outcome.map(Answer::from), held);
            }
            None => {
                let (room, slot) = (Some(room), Some(slot));
                let (command, input) = (*command, Input::Reading(reading));
                self.go_on(Work { command, input, capsule: None, room, slot });
            }
        }
        Ok(())
    }

    /// Carries a command out and answers it, unless the connection is gone by then, and nobody waits for an answer.
    async fn execute(&self, work: &mut Work) {
        let (id, stage) = (work.command.id(), Cell::new(Stage::Waiting));
        let (outcome, recalled) = {
            let mut done = pin!(self.carried_out(work, &stage));
            let mut slot_of_answer = None;
            let may = || match stage.get() {
                Stage::Waiting => true,
                Stage::AwaitingData { tag } => self.transfers.borrow_mut().give_up(tag),
                // Its own is in use until it ends: so both are bounded, what goes on and what the host does not read.
                Stage::Reading => {
                    slot_of_answer = self.slots.try_acquire(1);
                    slot_of_answer.is_some()
                }
                Stage::Begun => false,
            };
            match self.queue.recalls.unless_recalled(id, done.as_mut(), may).await {
                Ok(outcome) => (outcome, None),
                Err(recalled) => match slot_of_answer {
                    None => (Some(Err(Status::ABORTED)), Some(recalled)),
                    Some(slot) => {
                        self.aborted_in_time(id, slot).await;
                        recalled.obeyed();
                        done.await;
                        return;
                    }
                },
            }
        };
        // Data that came are done with, however long the answer has to wait.
        (work.input, work.capsule) = (Input::Here(IoVec::new()), None);
        if let Some(outcome) = outcome {
            let held = [work.slot.take(), work.room.take()];
            match self.port.is_open() {
                true => self.answer(&work.command, outcome, held),
                false => self.answer_in_time(&work.command, outcome, held).await,
            }
        }
        if let Some(recalled) = recalled {
            recalled.obeyed();
        }
    }

    /// Returns when an answer may leave. False: the path hangs, and the connection has ended: nobody waits for one.
    async fn passes(&self) -> bool {
        let mut passes = pin!(self.port.passes());
        let ended = pin!(self.ended.happened());
        let has_ended = matches!(select(passes.as_mut(), ended).await, Either::Right(_));
        if has_ended && self.port.is_hung() {
            return false;
        }
        if has_ended {
            // It is slow, and answers leave also when a target ends.
            passes.await;
        }
        true
    }

    /// Answers a command when the path lets answers through.
    fn answer_in_time<'a>(
        &'a self,
        command: &'a Command,
        outcome: Result<Answer, Status>,
        held: [Option<Permit>; 2],
    ) -> LocalBoxFuture<'a, ()> {
        Box::pin(async move {
            if self.passes().await {
                self.answer(command, outcome, held);
            }
        })
    }

    /// The same of one that was aborted and still goes on.
    fn aborted_in_time(&self, id: u16, slot: Permit) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            if self.passes().await {
                let completion = self.completion(id, Status::ABORTED);
                self.complete(completion, IoVec::new(), [Some(slot), None]);
            }
        })
    }

    /// Nothing is begun any more: the host may not be admitted any more, or has begun anew.
    fn is_revoked(&self) -> bool {
        let controller = &self.queue.controller;
        controller.gone().has_happened()
            || self.queue.reset.has_happened()
            || self.cut.has_happened()
    }

    async fn carried_out(
        &self,
        work: &mut Work,
        stage: &Cell<Stage>,
    ) -> Option<Result<Answer, Status>> {
        let controller = &self.queue.controller;
        match &mut work.input {
            Input::Here(_) => {}
            Input::Wrong(status) => return Some(Err(*status)),
            Input::Reading(reading) => {
                stage.set(Stage::Reading);
                return Some(reading.data(controller).await.map(Answer::from));
            }
            &mut Input::AskFor(bytes) => {
                // For nothing else there is memory.
                if let Passage::Shut(status) = self.gate.look_at(&work.command) {
                    return Some(Err(status));
                }
                let room = room_for(&work.command, u64::from(bytes));
                work.room = Some(self.bytes.room(room).await);
                if self.ended.has_happened() {
                    return None;
                }
                match self.ask_for(&work.command, bytes, stage).await {
                    Ok(Ok(data)) => {
                        stage.set(Stage::Waiting);
                        work.input = Input::Here(data.into_vec());
                    }
                    Ok(Err(Mangled)) => {
                        self.tell_of_damage();
                        return Some(Err(Status::TRANSIENT_TRANSPORT));
                    }
                    Err(oneshot::Dropped) => return None,
                }
            }
        }
        let Work { command, input: Input::Here(data), room, .. } = work else {
            unreachable!("all of it is here")
        };
        let passage = self.gate.look_at(command);
        if let Passage::Shut(status) = passage {
            return Some(Err(status));
        }
        if is_from_controller(command) {
            *room = Some(self.bytes.room(bytes_of(command)).await);
        }
        if self.is_revoked() {
            return None;
        }
        if let Passage::Proof(step) = passage {
            return Box::pin(self.prove(step, data)).await;
        }
        if self.queue.id == 0 {
            return Box::pin(self.administer(command, room, stage)).await;
        }
        let done = io::carry_out(controller, &self.ended, stage, command, data).await;
        Some(done.map(Answer::from))
    }

    /// Carries out a step of a proof, for as long as the host is there.
    async fn prove(&self, step: Step, data: &IoVec) -> Option<Result<Answer, Status>> {
        let proving = pin!(self.gate.prove(step, data));
        let answered = match select(proving, pin!(self.ended.happened())).await {
            Either::Left((answered, _)) => answered,
            Either::Right(((), _)) => return None,
        };
        if self.is_let_in() && !self.is_known.has_happened() {
            match self.queue.becomes_known() {
                Ok(()) => {
                    self.queue.controller.becomes_known();
                    self.becomes_known();
                }
                Err(Taken) => self.gate.shut(),
            }
        }
        Some(answered)
    }

    /// Carries out a command of the admin queue.
    async fn administer(
        &self,
        command: &Command,
        room: &mut Option<Permit>,
        stage: &Cell<Stage>,
    ) -> Option<Result<Answer, Status>> {
        let controller = &self.queue.controller;
        if command.opcode() == AdminOpcode::AsynchronousEventRequest as u8 {
            let event = match controller.notices.request() {
                Ok(event) => event,
                Err(status) => return Some(Err(status)),
            };
            return match select(event, pin!(self.ended.happened())).await {
                Either::Left((event, _)) => {
                    let event = event.ok()?;
                    Some(Ok(Answer { result: event.result(), data: IoVec::new() }))
                }
                Either::Right(((), _)) => None,
            };
        }
        stage.set(Stage::Begun);
        if command.opcode() == AdminOpcode::Abort as u8 {
            *room = match controller.begin_abort() {
                Ok(room) => Some(room),
                Err(status) => return Some(Err(status)),
            };
        }
        let admin = Admin { shared: &self.shared, controller, came_to: self.came_to };
        Some(admin.carry_out(command).await)
    }

    fn ask_for(
        &self,
        command: &Command,
        bytes: u32,
        stage: &Cell<Stage>,
    ) -> oneshot::Receiver<crate::transfers::Arrived> {
        let (transfer, whole) = self.transfers.borrow_mut().begin(command.id(), bytes);
        stage.set(Stage::AwaitingData { tag: transfer.tag });
        let head = self.framing.head(&Pdu::ReadyToTransfer(transfer), 0);
        self.push(&head);
        whole
    }

    /// Answers a command; one that failed is entered in the log of errors, if its host is known: others could bury what is there.
    fn answer(
        &self,
        command: &Command,
        outcome: Result<Answer, Status>,
        held: [Option<Permit>; 2],
    ) {
        let status = match outcome {
            // Memory is taken for as much as is asked for, and the host has as much room.
            Ok(Answer { result, data }) if bytes_in(&data) as u64 <= bytes_of(command) => {
                let completion = self.completion(command.id(), Status::SUCCESS);
                return self.complete(Completion { result, ..completion }, data, held);
            }
            Ok(_) => Status::DATA_LENGTH_INVALID.and_do_not_retry(),
            Err(status) => status,
        };
        let errors = &self.queue.controller.errors;
        let has_more = self.gate.is_open() && errors.add(self.queue.id, command, status);
        let completion = self.completion(command.id(), status);
        self.complete(Completion { has_more, ..completion }, IoVec::new(), held);
    }

    /// Of the command of this identifier, when there is nothing else to say of it.
    fn completion(&self, id: u16, status: Status) -> Completion {
        let queue_head = if self.is_without_flow_control { 0 } else { self.head.get() };
        Completion { result: 0, queue_head, id, status, has_more: false }
    }

    /// Sends data, if there are any, and the completion, unless data can say that all went well.
    fn complete(&self, completion: Completion, data: IoVec, held: [Option<Permit>; 2]) {
        let Completion { id, result, .. } = completion;
        let bytes = bytes_in(&data) as u32;
        // The digest of data, and the completion.
        let mut tail = [0; DIGEST_BYTES + RESPONSE_BYTES_MAX];
        let (digest, response) = tail.split_at_mut(DIGEST_BYTES);
        if bytes == 0 {
            let head = self.framing.head_in(response, &Pdu::Response(completion), 0);
            return self.outbox.push(Outgoing { head, held, ..Outgoing::default() });
        }
        // TCP, 3.6.2.6: only without flow control, as it says nothing of the queue's head.
        let is_success = self.is_without_flow_control && result == 0;
        let pdu = Pdu::ControllerData {
            transfer: Transfer { command: id, tag: 0, at: 0, bytes },
            is_last: true,
            is_success,
        };
        let response_bytes = match is_success {
            true => 0,
            false => self.framing.head_in(response, &Pdu::Response(completion), 0).len(),
        };
        let has_digest = self.framing.digests.data;
        if has_digest {
            let of_data = crc32c_parts(data.iter().map(|part| &part[..]));
            digest.copy_from_slice(&of_data.to_le_bytes());
        }
        let begins_at = if has_digest { 0 } else { DIGEST_BYTES };
        let tail = &tail[begins_at..DIGEST_BYTES + response_bytes];
        let mut head = [0; HEAD_BYTES_MAX];
        let head = self.framing.head_in(&mut head, &pdu, bytes as usize);
        self.outbox.push(Outgoing { head, data, tail, held });
    }
}

/// The direction of a command's data is in its opcode, or type (Base, figure 138).
fn direction(command: &Command) -> u8 {
    match command.opcode() {
        code if code == AdminOpcode::Fabrics as u8 => command.fabrics_type() & 0b11,
        code => code & 0b11,
    }
}

fn is_to_controller(command: &Command) -> bool {
    direction(command) == 0b01
}

/// Memory for the data of a command, which are refused if they are more.
fn bytes_of(command: &Command) -> u64 {
    u64::from(command.data().bytes()).min(DATA_BYTES_MAX)
}

/// Memory that a command takes whose host sends so many data. What a Compare finds there is read, which is as much again.
fn room_for(command: &Command, bytes: u64) -> u64 {
    if command.opcode() == IoOpcode::Compare as u8 { 2 * bytes } else { bytes }
}

fn is_from_controller(command: &Command) -> bool {
    direction(command) == 0b10
}

/// Entries of a queue that a host may ask for.
pub(crate) fn is_possible_size(entries_less_one: u16) -> bool {
    (1..QUEUE_ENTRIES_MAX).contains(&entries_less_one)
}

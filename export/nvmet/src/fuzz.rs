//! An entry point for the fuzzer: a target under hosts that say anything, over several connections at once.
//!
//! Bytes are steps, so that random ones get past what every connection begins with: each opens a connection, sends a command that is sound
//! but for a field or two, data that were asked for or not, a proof of who the host is, or bytes; or changes what is shown. Checked is, on virtual time:
//!
//! - Nothing panics. Of what was sent soundly everything is answered, once, as its kind is, in units that are sound themselves.
//! - A host beside them, of another subsystem, goes on reading what it wrote.
//! - Once they are gone nothing is left of them: connections, controllers, memory, open volumes.
//! - Nothing is written where a secret is needed until somebody has begun a proof with the right one. (Who writes after that is not told apart
//!   here; `tests/all/authentication.rs` has queues that prove nothing beside one that did. Nor is why a connection ends.)

use crate::subsystem::{Hosts, Subsystem};
use crate::target::{Path, Target};
use crate::{AnaState, Claims, Health, Open, Opened, Passage, Warnings};
use levada_base::buf::bytes_in;
use levada_base::checksum::crc32c;
use levada_base::reactor::{self, Reactor};
use levada_base::stream::{ByteStream, MemoryStream};
use levada_base::{Buf, BufMut, IoVec};
use levada_device::{BlockError, Durability};
use levada_nvme::authentication::{
    Group, Hash, Names, Prover, SECURITY_PROTOCOL, SECURITY_SPECIFIC, Secret, Secrets,
};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, AuthenticationTransfer, Configuration, Connect, ConnectData, Property,
    PropertyAccess,
};
use levada_nvme::keyring::Keyring;
use levada_nvme::pdu::{
    COMMON_BYTES, Common, DIGEST_BYTES, Digests, Framing, Initialize, Pdu, Transfer,
};
use levada_nvme::{
    AdminOpcode, Command, Completion, DISCOVERY_NQN, DataPointer, IoOpcode, Nqn, Status,
};
use levada_volume::{Extent, Shape, Volume, VolumeError, VolumeFuture, Zeroing};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const STEPS_MAX: usize = 96;
const LINES_MAX: usize = 6;
/// Of the queues that are connected as they should be.
const ENTRIES: u16 = 32;
/// Data that may be within a command of any queue.
const IN_CAPSULE_BYTES_LEAST: usize = 8192;
const BLOCK_BYTES: u64 = 4096;
const BLOCKS: u64 = 64;
/// Longer than anything takes that waits for no host: 20 s of a slow block, 30 s for a first command.
const LONG: Duration = Duration::from_secs(300);
/// For an answer that nothing holds up.
const SOON: Duration = Duration::from_secs(5);

/// See the module.
///
/// # Panics
///
/// When the target does what it must not.
pub fn connections(bytes: &[u8]) {
    Reactor::simulated(1).block_on(async {
        let run = reactor::timeout(LONG * 40, run(Input(bytes)));
        run.await.expect("it comes to an end");
    });
}

/// What is left of the fuzzer's bytes; zeroes behind their end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn number(&mut self) -> u64 {
        u64::from_le_bytes([0; 8].map(|_| self.byte()))
    }

    /// Of those that fields are wrong by, or any.
    fn value(&mut self) -> u32 {
        match self.below(8) {
            0 | 1 => 0,
            2 => 1,
            3 => u32::from(self.byte()),
            4 => u32::MAX,
            5 => u32::MAX - 1,
            6 => 1 << (self.byte() % 32),
            _ => self.number() as u32,
        }
    }

    /// One in so many.
    fn rarely(&mut self, one_in: u8) -> bool {
        self.byte() % one_in == one_in - 1
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }
}

/// A volume in memory of which some blocks are slow, and some cannot be used.
struct Odd {
    bytes: RefCell<Vec<u8>>,
    writes: Cell<u64>,
}

impl Odd {
    fn new() -> Rc<Self> {
        let bytes = RefCell::new(vec![0; (BLOCKS * BLOCK_BYTES) as usize]);
        Rc::new(Self { bytes, writes: Cell::new(0) })
    }

    async fn reach(&self, at: u64, bytes: u64) -> Result<std::ops::Range<usize>, VolumeError> {
        let size_bytes = self.size_bytes();
        let end = at.checked_add(bytes).filter(|end| *end <= size_bytes);
        let end = end.ok_or(VolumeError::OutOfRange { at, bytes, size_bytes })?;
        match at / BLOCK_BYTES % 16 {
            9 => reactor::sleep(Duration::from_millis(3)).await,
            10 => reactor::sleep(Duration::from_secs(20)).await,
            11 => return Err(VolumeError::Block(BlockError::Medium { at, bytes })),
            12 => return Err(VolumeError::NoSpace),
            _ => {}
        }
        Ok(at as usize..end as usize)
    }
}

impl Volume for Odd {
    fn size_bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }

    fn shape(&self) -> Shape {
        Shape { block_bytes: 4096, io_bytes_best: 65536, discard_bytes: 4096, is_read_only: false }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            let range = self.reach(at, bytes).await?;
            Ok(Buf::copy_of(&self.bytes.borrow()[range]).into_vec())
        })
    }

    fn write(&self, at: u64, from: IoVec, _: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let range = self.reach(at, bytes_in(&from)).await?;
            let data: Vec<u8> = from.iter().flat_map(|part| part.to_vec()).collect();
            self.bytes.borrow_mut()[range].copy_from_slice(&data);
            self.writes.set(self.writes.get() + 1);
            Ok(())
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move { self.reach(at, bytes).await.map(|_| ()) })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let range = self.reach(at, bytes).await?;
            self.bytes.borrow_mut()[range].fill(0);
            Ok(())
        })
    }

    fn extents(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move { Ok(vec![Extent { bytes, is_allocated: true }]) })
    }
}

fn opens(volume: &Rc<Odd>, guid: u8) -> Open {
    let volume = Rc::clone(volume);
    Rc::new(move || {
        let volume = Rc::clone(&volume) as Rc<dyn Volume>;
        Box::pin(async move { Some(Opened { volume, guid: [guid; 16] }) })
    })
}

/// Data that the target has asked for, and how many of them were sent.
struct Asked {
    transfer: Transfer,
    sent: u32,
}

/// A command that was sent and not answered.
struct Sent {
    is_event_request: bool,
    /// Data of it that were received.
    received: Vec<u8>,
}

/// What a connection was connected as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Role {
    #[default]
    Nothing,
    Admin,
    Io,
    /// Either of them, of a subsystem that wants a proof.
    Guarded,
}

/// A connection, as its host sees it.
struct Line {
    stream: MemoryStream,
    framing: Cell<Framing>,
    /// Nothing was sent but sound units, with identifiers that are in use once, so that it is known what must be answered.
    is_sound: Cell<bool>,
    is_over: Cell<bool>,
    next_id: Cell<u16>,
    sent: RefCell<BTreeMap<u16, Sent>>,
    asked: RefCell<Vec<Asked>>,
    /// Of the last unit, which comes with the next one.
    rest: RefCell<Vec<u8>>,
    /// The last answers, with their data.
    answers: RefCell<BTreeMap<u16, (Completion, Vec<u8>)>>,
    role: Cell<Role>,
    queue: Cell<u16>,
    /// How far it has come with a proof, and the last command of that which asked for data.
    stage: Cell<usize>,
    proving: Cell<u16>,
    prover: RefCell<Option<Prover>>,
    /// The controller that Connect has told.
    connecting: Cell<Option<u16>>,
}

impl Line {
    /// A new connection, which is heard; nothing was sent yet.
    fn open(path: &Path) -> Rc<Self> {
        let (stream, end) = MemoryStream::pair();
        path.serve(end);
        let line = Rc::new(Self {
            stream,
            framing: Cell::new(Framing::FIRST),
            is_sound: Cell::new(true),
            is_over: Cell::new(false),
            next_id: Cell::new(1),
            sent: RefCell::default(),
            asked: RefCell::default(),
            rest: RefCell::default(),
            answers: RefCell::default(),
            role: Cell::default(),
            queue: Cell::default(),
            stage: Cell::new(0),
            proving: Cell::new(0),
            prover: RefCell::default(),
            connecting: Cell::default(),
        });
        let hearing = Rc::clone(&line);
        reactor::spawn(async move {
            while hearing.hear().await.is_some() {}
            hearing.is_over.set(true);
        });
        line
    }

    async fn receive(&self, bytes: usize) -> Option<Vec<u8>> {
        Some(self.stream.read_exact(BufMut::for_overwrite(bytes)).await.ok()?.to_vec())
    }

    /// Takes what the target says next, which is sound whatever was sent. `None`: it says no more.
    async fn hear(&self) -> Option<()> {
        let common = self.receive(COMMON_BYTES).await?;
        let common = Common::parse(common[..].try_into().expect("so many")).expect("a header");
        let digests = self.framing.get().digests;
        let rest = self.receive(common.rest_bytes(digests)).await?;
        let pdu = common.pdu(&rest, digests).expect("a sound unit");
        let (padding, bytes) = common.data_bytes(digests).expect("sound lengths");
        self.receive(padding).await?;
        let data = self.receive(bytes).await?;
        if bytes > 0 && common.has_data_digest(digests) {
            let digest = self.receive(DIGEST_BYTES).await?;
            assert_eq!(digest, crc32c(&data).to_le_bytes(), "the digest of data");
        }
        match pdu {
            Pdu::InitializeResponse(answer) => {
                let alignment_bytes = answer.alignment_bytes;
                self.framing.set(Framing { digests: answer.digests, alignment_bytes });
            }
            Pdu::ReadyToTransfer(transfer) => {
                assert!(transfer.bytes > 0 && transfer.at == 0);
                self.asked.borrow_mut().push(Asked { transfer, sent: 0 });
            }
            Pdu::ControllerData { transfer, is_success, .. } => {
                if let Some(sent) = self.sent.borrow_mut().get_mut(&transfer.command) {
                    let so_far = sent.received.len();
                    assert!(!self.is_sound.get() || transfer.at as usize == so_far);
                    sent.received.extend(&data);
                }
                assert_eq!(transfer.bytes as usize, data.len());
                if is_success {
                    let (result, id, status) = (0, transfer.command, Status::SUCCESS);
                    let has_more = false;
                    self.answered(Completion { result, queue_head: 0, id, status, has_more });
                }
            }
            Pdu::Response(completion) => self.answered(completion),
            // The last that it says.
            Pdu::Terminates(why) => {
                let is_deserved = !self.is_sound.get() || self.role.get() == Role::Nothing;
                assert!(is_deserved, "ended for nothing: {why}");
            }
            Pdu::InitializeRequest(_) | Pdu::Command(_) | Pdu::HostData { .. } => {
                panic!("a host's: {pdu:?}")
            }
        }
        Some(())
    }

    fn answered(&self, completion: Completion) {
        let id = completion.id;
        assert!(!completion.has_more || !completion.status.is_success());
        let sent = self.sent.borrow_mut().remove(&id);
        assert!(sent.is_some() || !self.is_sound.get(), "nobody has asked: {completion:?}");
        self.asked.borrow_mut().retain(|asked| asked.transfer.command != id);
        if self.connecting.get() == Some(id) {
            self.connecting.set(completion.status.is_success().then_some(completion.result as u16));
        }
        let received = sent.map(|sent| sent.received).unwrap_or_default();
        self.answers.borrow_mut().insert(id, (completion, received));
    }

    async fn send_bytes(&self, bytes: &[u8]) {
        // One that is not read from any more is sent nothing more, rather than waited for.
        let sent = self.stream.write_all(Buf::copy_of(bytes).into_vec());
        if reactor::timeout(SOON, sent).await.is_err() {
            self.close().await;
        }
    }

    async fn close(&self) {
        self.stream.close().await;
    }

    fn unit(&self, pdu: &Pdu, data: &[u8]) -> Vec<u8> {
        let framing = self.framing.get();
        let mut bytes = framing.head(pdu, data.len()).to_vec();
        bytes.extend(data);
        if framing.digests.data && !data.is_empty() {
            bytes.extend(crc32c(data).to_le_bytes());
        }
        bytes
    }

    fn new_id(&self) -> u16 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }

    /// Notes that a command is sent, as a unit that is sound.
    fn note(&self, command: &Command) {
        let is_event_request = command.opcode() == AdminOpcode::AsynchronousEventRequest as u8;
        let sent = Sent { is_event_request, received: Vec::new() };
        if self.sent.borrow_mut().insert(command.id(), sent).is_some() {
            self.is_sound.set(false);
        }
    }

    /// Sends a unit, as it is or as the fuzzer spoils it.
    async fn send(&self, input: &mut Input<'_>, pdu: &Pdu, data: &[u8]) {
        let mut unit = self.unit(pdu, data);
        let is_data_wrong = input.rarely(16) && !data.is_empty();
        if is_data_wrong {
            let at = unit.len() - 1 - input.below(data.len());
            unit[at] ^= 1 << (input.byte() % 8);
        }
        if input.rarely(24) {
            let at = input.below(unit.len());
            unit[at] ^= input.byte() | 1;
            self.is_sound.set(false);
        }
        if let Pdu::Command(command) = pdu {
            // What is not agreed ends a connection: so much within a command, or so many of them.
            let is_agreed = data.len() <= IN_CAPSULE_BYTES_LEAST
                && self.sent.borrow().len() < usize::from(ENTRIES);
            self.is_sound.set(self.is_sound.get() && is_agreed);
            self.note(command);
        }
        let whole = [self.rest.take(), unit].concat();
        let is_cut = input.rarely(8) && self.role.get() != Role::Nothing;
        let cut_at =
            if is_cut { usize::from(input.number() as u16) % whole.len() } else { whole.len() };
        let (now, later) = whole.split_at(cut_at);
        self.rest.replace(later.to_vec());
        self.send_bytes(now).await;
    }

    /// Sends what was cut off.
    async fn send_rest(&self) {
        let rest = self.rest.take();
        self.send_bytes(&rest).await;
    }

    async fn greet(&self, digests: Digests) {
        let request = Initialize { alignment_bytes: 4, digests, limit: 0 };
        self.send_bytes(&self.unit(&Pdu::InitializeRequest(request), &[])).await;
        self.settle().await;
    }

    /// Gives the target a moment.
    async fn settle(&self) {
        reactor::sleep(Duration::from_millis(1)).await;
    }

    /// Sends a command soundly, with its data in it, and takes its answer, which is to come soon.
    async fn ask(&self, command: Command, data: &[u8]) -> Option<(Completion, Vec<u8>)> {
        let bytes = data.len() as u32;
        let command = match bytes {
            0 => command,
            _ => command.with_data(DataPointer::InCapsule { offset: 0, bytes }),
        };
        self.note(&command);
        self.answers.borrow_mut().remove(&command.id());
        self.send_rest().await;
        self.send_bytes(&self.unit(&Pdu::Command(command), data)).await;
        let begun = reactor::now();
        while begun.elapsed() < SOON && !self.is_over.get() {
            if let Some(answer) = self.answers.borrow_mut().remove(&command.id()) {
                return Some(answer);
            }
            self.settle().await;
        }
        None
    }

    /// What has to be answered by now, and was not.
    fn unanswered(&self) -> usize {
        if !self.is_sound.get() || self.is_over.get() || !self.asked.borrow().is_empty() {
            return 0;
        }
        self.sent.borrow().values().filter(|sent| !sent.is_event_request).count()
    }
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(format!("nqn.2026-11.io.levada:{name}")).expect("a name")
}

/// A queue that is connected as it should be.
async fn connect(line: &Line, data: ConnectData, queue: u16, keep_alive_ms: u32) -> Option<u16> {
    let connect = Connect {
        format: 0,
        queue,
        queue_entries_less_one: ENTRIES - 1,
        is_without_flow_control: queue % 2 == 1,
        keep_alive_ms,
    };
    let command = connect.command(line.new_id());
    let (completion, _) = line.ask(command, &data.to_bytes()).await?;
    completion.status.is_success().then_some(completion.result as u16)
}

async fn enable(line: &Line) -> Option<()> {
    let enabled = u64::from(Configuration::ENABLED.0);
    let enable = PropertyAccess::set(Property::Configuration, enabled, line.new_id());
    line.ask(enable, &[]).await.map(|_| ())
}

/// A host that does nothing wrong, in a subsystem of its own.
struct Beside {
    admin: Rc<Line>,
    io: Rc<Line>,
    round: u8,
}

impl Beside {
    async fn new(path: &Path) -> Self {
        let data = ConnectData {
            host_id: [99; 16],
            controller: ANY_CONTROLLER,
            subsystem: nqn("beside"),
            host: nqn("host-beside"),
        };
        let (admin, io) = (Line::open(path), Line::open(path));
        admin.greet(Digests::default()).await;
        io.greet(Digests { header: true, data: true }).await;
        let controller = connect(&admin, data.clone(), 0, 0).await.expect("admitted");
        enable(&admin).await.expect("enabled");
        connect(&io, ConnectData { controller, ..data }, 1, 0).await.expect("admitted");
        Self { admin, io, round: 0 }
    }

    async fn goes_on(&mut self) {
        self.round = self.round.wrapping_add(1);
        let block = u64::from(self.round % 8);
        let written = [self.round; BLOCK_BYTES as usize];
        let command = |line: &Line, opcode: IoOpcode| {
            Command::new(opcode as u8, line.new_id(), 1)
                .with_blocks(block, 1)
                .with_data(DataPointer::Transport { bytes: BLOCK_BYTES as u32 })
        };
        let write = self.io.ask(command(&self.io, IoOpcode::Write), &written).await;
        assert_eq!(write.expect("answered").0.status, Status::SUCCESS);
        let read = self.io.ask(command(&self.io, IoOpcode::Read), &[]).await;
        assert!(read.expect("answered").1 == written);
        let alive = Command::new(AdminOpcode::KeepAlive as u8, self.admin.new_id(), 0);
        assert!(self.admin.ask(alive, &[]).await.expect("answered").0.status.is_success());
    }
}

struct World {
    target: Target,
    path: Path,
    open: Subsystem,
    volume: Rc<Odd>,
    guarded: Rc<Odd>,
    kelvin: Rc<Cell<u16>>,
    secrets: Secrets,
    lines: Vec<Option<Rc<Line>>>,
    /// The admin queue's line is the first of these; then its controller.
    controllers: Vec<(usize, u16, Nqn, u8)>,
    /// Somebody may have proved that he knows the secret.
    is_let_in: bool,
}

impl World {
    fn new() -> Self {
        let target = Target::new();
        let path = target.port(([10, 0, 0, 1], 4420).into());
        let (volume, guarded) = (Odd::new(), Odd::new());
        let open = Subsystem::new(nqn("open"), "1", Hosts::Any);
        open.add(1, opens(&volume, 1));
        let secret = |seed| Secret::random(None, &mut move |key: &mut [u8]| key.fill(seed));
        let secrets = Secrets { host: secret(1), controller: Some(secret(2)) };
        let keyring = Keyring::from([(nqn("host-0"), secrets.clone().into())]);
        let shut = Subsystem::new(nqn("guarded"), "2", Hosts::only([], keyring));
        shut.add(1, opens(&guarded, 3));
        target.add(open.clone());
        target.add(shut);
        target.begin();
        let world = Self {
            target,
            path,
            open,
            volume,
            guarded,
            kelvin: Rc::new(Cell::new(300)),
            secrets,
            lines: vec![None; LINES_MAX],
            controllers: Vec::new(),
            is_let_in: false,
        };
        world.add_drive();
        world
    }

    fn add_drive(&self) {
        let kelvin = Rc::clone(&self.kelvin);
        let health = Rc::new(move || Health { kelvin: kelvin.get(), ..Health::default() });
        self.open.add_drive(2, opens(&self.volume, 2), health, Claims::default());
    }

    /// A connection, rather one of this role.
    fn line(&self, input: &mut Input<'_>, role: Role) -> Option<Rc<Line>> {
        let mut open: Vec<_> = self.lines.iter().flatten().cloned().collect();
        open.retain(|line| !line.is_over.get());
        if !input.rarely(12) && open.iter().any(|line| line.role.get() == role) {
            open.retain(|line| line.role.get() == role);
        }
        (!open.is_empty()).then(|| open.swap_remove(input.below(open.len())))
    }

    /// A connection in a place that is free, or in that of another, which is closed.
    async fn open(&mut self, input: &mut Input<'_>) -> (usize, Rc<Line>) {
        let is_free = |line: &Option<Rc<Line>>| line.as_ref().is_none_or(|one| one.is_over.get());
        let free = self.lines.iter().position(is_free);
        let place = free.unwrap_or_else(|| input.below(LINES_MAX));
        self.controllers.retain(|(of, ..)| *of != place);
        if let Some(old) = self.lines[place].take() {
            old.close().await;
        }
        let line = Line::open(&self.path);
        self.lines[place] = Some(Rc::clone(&line));
        (place, line)
    }

    async fn step(&mut self, input: &mut Input<'_>) {
        match input.below(20) {
            0..=2 => self.arrive(input).await,
            3 => self.begin_wrongly(input).await,
            4..=7 => self.administer(input).await,
            8..=11 => self.exchange(input).await,
            12..=13 => self.send_data(input).await,
            14..=15 => self.prove(input).await,
            16 => self.send_anything(input).await,
            17 => {
                let ms = 1 << (input.byte() % 16);
                reactor::sleep(Duration::from_millis(ms)).await;
            }
            18 => {
                if let Some(line) = self.line(input, Role::Nothing) {
                    line.close().await;
                }
            }
            _ => self.change(input),
        }
    }

    /// A queue is connected as it should be: the admin queue of a subsystem or of discovery, or one of a controller that is there.
    async fn arrive(&mut self, input: &mut Input<'_>) {
        let (place, line) = self.open(input).await;
        let flags = input.byte();
        line.greet(Digests { header: flags & 1 != 0, data: flags & 2 != 0 }).await;
        let number = flags >> 2 & 1;
        let role_in = |subsystem: &Nqn, role: Role| {
            if *subsystem == nqn("guarded") { Role::Guarded } else { role }
        };
        let lines = &self.lines;
        let is_there =
            |of: usize| lines[of].as_ref().is_some_and(|line: &Rc<Line>| !line.is_over.get());
        self.controllers.retain(|(of, ..)| is_there(*of));
        if flags & 8 != 0 && !self.controllers.is_empty() {
            let (_, controller, subsystem, number) =
                self.controllers[input.below(self.controllers.len())].clone();
            let host = nqn(&format!("host-{number}"));
            line.role.set(role_in(&subsystem, Role::Io));
            let data = ConnectData { host_id: [number; 16], controller, subsystem, host };
            line.queue.set(1 + u16::from(flags >> 6));
            connect(&line, data, line.queue.get(), 0).await;
            return;
        }
        let (subsystem, number) = match input.below(8) {
            0 => (Nqn::new(DISCOVERY_NQN).expect("a name"), number),
            1 | 2 => (nqn("guarded"), 0),
            _ => (nqn("open"), number),
        };
        line.role.set(role_in(&subsystem, Role::Admin));
        let data = ConnectData {
            host_id: [number; 16],
            controller: ANY_CONTROLLER,
            subsystem: subsystem.clone(),
            host: nqn(&format!("host-{number}")),
        };
        let keep_alive_ms = if flags & 48 == 48 { 4000 } else { 0 };
        if let Some(controller) = connect(&line, data, 0, keep_alive_ms).await {
            self.controllers.push((place, controller, subsystem, number));
            if flags & 192 != 192 {
                enable(&line).await;
            }
        }
    }

    /// The first units are wrong somewhere, or come out of turn.
    async fn begin_wrongly(&mut self, input: &mut Input<'_>) {
        let (_, line) = self.open(input).await;
        if input.rarely(4) {
            let alignment_bytes = 4 * (1 + input.below(32));
            let flags = input.byte();
            let digests = Digests { header: flags & 1 != 0, data: flags & 2 != 0 };
            let request = Initialize { alignment_bytes, digests, limit: input.value() };
            line.send(input, &Pdu::InitializeRequest(request), &[]).await;
        } else {
            line.greet(Digests::default()).await;
        }
        let connect = Connect {
            format: if input.rarely(8) { input.value() as u16 } else { 0 },
            queue: input.one_of(&[0, 0, 1, 64, 65, u16::MAX]),
            queue_entries_less_one: input.one_of(&[31, 31, 1, 0, 1023, 1024, u16::MAX]),
            is_without_flow_control: input.rarely(2),
            keep_alive_ms: input.value(),
        };
        let data = ConnectData {
            host_id: [input.byte() % 3; 16],
            controller: input.one_of(&[ANY_CONTROLLER, ANY_CONTROLLER, 0, 1, 0xfffe]),
            subsystem: nqn(input.one_of(&["open", "open", "guarded", "none"])),
            host: nqn(input.one_of(&["host-0", "host-1", "host-9"])),
        };
        let mut bytes = data.to_bytes().to_vec();
        if input.rarely(4) {
            let at = usize::from(input.number() as u16) % bytes.len();
            bytes[at] = input.byte();
        }
        if input.rarely(4) {
            bytes.resize(input.one_of(&[0, 1, 1023, 1025, 8192, 8193]), 0);
        }
        let pointer = self.pointer(input, bytes.len());
        let command = connect.command(line.new_id()).with_data(pointer);
        line.connecting.set(Some(command.id()));
        line.send(input, &Pdu::Command(command), &bytes).await;
        line.settle().await;
    }

    /// Where a command says that its data are, of which there are so many in it.
    fn pointer(&self, input: &mut Input<'_>, bytes: usize) -> DataPointer {
        let said = if input.rarely(6) { input.value() } else { bytes as u32 };
        match input.below(12) {
            0 => DataPointer::Other { kind: input.byte() },
            1 => DataPointer::InCapsule { offset: input.value().into(), bytes: said },
            2 => DataPointer::Transport { bytes: said },
            _ if bytes > 0 => DataPointer::InCapsule { offset: 0, bytes: said },
            _ => DataPointer::Transport { bytes: said },
        }
    }

    /// Sends a command whose other fields are chosen already.
    async fn command(&self, input: &mut Input<'_>, line: &Line, command: Command) {
        let mut command = command;
        for number in 10..16 {
            if input.rarely(10) {
                command = command.with_dword(number, input.value());
            }
        }
        if input.rarely(40) {
            let mut bytes = *command.as_bytes();
            bytes[input.below(64)] = input.byte();
            command = Command::parse(&bytes);
        }
        if input.rarely(20) {
            // One that is in use, perhaps.
            command = command.with_id(u16::from(input.byte() % 8));
        }
        let data = match command.data() {
            DataPointer::InCapsule { bytes, .. } if bytes <= 20_000 => vec![7; bytes as usize],
            _ => Vec::new(),
        };
        line.send(input, &Pdu::Command(command), &data).await;
        if !input.rarely(4) {
            line.settle().await;
        }
    }

    /// Commands that are not answered, by their queues.
    fn waiting(&self) -> Vec<(u16, u16)> {
        let mut waiting = Vec::new();
        for line in self.lines.iter().flatten().filter(|line| !line.is_over.get()) {
            waiting.extend(line.sent.borrow().keys().map(|id| (line.queue.get(), *id)));
        }
        waiting
    }

    async fn administer(&self, input: &mut Input<'_>) {
        let role = if input.rarely(4) { Role::Guarded } else { Role::Admin };
        let Some(line) = self.line(input, role) else { return };
        let id = line.new_id();
        let namespace = input.one_of(&[0, 1, 1, 2, 3, 1024, 1025, u32::MAX, u32::MAX - 1]);
        let room = |bytes: u32| DataPointer::Transport { bytes };
        let opcode = match input.rarely(20) {
            true => input.byte(),
            false => input.one_of(AdminOpcode::ALL) as u8,
        };
        let command = Command::new(opcode, id, namespace);
        let command = match AdminOpcode::of(opcode) {
            Some(AdminOpcode::Identify) => {
                let what = input.one_of(&[0, 1, 2, 3, 5, 6, 7, 0x10, 0x11, 0x12, 0x13, 0x1c]);
                command.with_dword(10, what).with_data(room(input.one_of(&[4096, 4096, 4095, 0])))
            }
            Some(AdminOpcode::GetLogPage) => {
                let page = input.one_of(&[1, 1, 2, 2, 3, 4, 5, 0x0c, 0x70, 0x80, 0xc0]);
                let dwords = input.one_of(&[0, 127, 1023, 1024, 0xffff]);
                let at = input.one_of(&[0, 0, 4, 64, 4092, 4096, 4100, u32::MAX]);
                let flags = u32::from(input.byte()) << 8;
                command
                    .with_dword(10, page | flags | dwords << 16)
                    .with_dword(12, at)
                    .with_data(room(if input.rarely(5) { input.value() } else { (dwords + 1) * 4 }))
            }
            Some(AdminOpcode::Abort) => {
                let waiting = self.waiting();
                let (queue, aborted) = match waiting.is_empty() || input.rarely(6) {
                    true => (input.byte().into(), input.byte().into()),
                    false => waiting[input.below(waiting.len())],
                };
                let (queue, aborted) = (u32::from(queue), u32::from(aborted));
                command.with_dword(10, queue | aborted << 16)
            }
            Some(AdminOpcode::SetFeatures | AdminOpcode::GetFeatures) => {
                let features =
                    [1, 2, 4, 4, 5, 6, 7, 0x0a, 0x0b, 0x0b, 0x0f, 0x81, 0x82, 0x83, 0x0c];
                let value = match input.rarely(3) {
                    true => input.value(),
                    false => input.one_of(&[0, 300, 0x10_0000 | 300, 0x8000_0902, 0x0001_0001]),
                };
                let bytes = input.one_of(&[0, 16, 4096]);
                let command = command.with_dword(10, input.one_of(&features)).with_dword(11, value);
                command.with_data(room(bytes))
            }
            Some(AdminOpcode::Fabrics) => self.fabrics(input, id),
            Some(AdminOpcode::AsynchronousEventRequest | AdminOpcode::KeepAlive) => command,
            None => {
                let bytes = input.one_of(&[0, 4, 4096, 8192]);
                let pointer = self.pointer(input, bytes);
                command.with_data(pointer)
            }
        };
        self.command(input, &line, command).await;
    }

    fn fabrics(&self, input: &mut Input<'_>, id: u16) -> Command {
        let properties = [
            Property::Capabilities,
            Property::Version,
            Property::Configuration,
            Property::Status,
            Property::SubsystemReset,
        ];
        let property = input.one_of(&properties);
        match input.below(4) {
            0 => PropertyAccess::get(property, id),
            1 => {
                let enabled = u64::from(Configuration::ENABLED.0);
                let value = input.one_of(&[enabled, enabled, 0, enabled | 1 << 14, u64::MAX]);
                PropertyAccess::set(property, value, id)
            }
            2 => Command::new(AdminOpcode::Fabrics as u8, id, input.byte().into()),
            _ => {
                let connect = Connect {
                    format: 0,
                    queue: 1,
                    queue_entries_less_one: 31,
                    is_without_flow_control: false,
                    keep_alive_ms: 0,
                };
                connect.command(id)
            }
        }
    }

    async fn exchange(&self, input: &mut Input<'_>) {
        let role = if input.rarely(4) { Role::Guarded } else { Role::Io };
        let Some(line) = self.line(input, role) else { return };
        let opcode = match input.rarely(20) {
            true => input.byte(),
            false => input.one_of(IoOpcode::ALL) as u8,
        };
        let namespace = input.one_of(&[1, 1, 1, 2, 2, 3, 0, u32::MAX]);
        let first = if input.rarely(10) { input.number() } else { u64::from(input.byte() % 68) };
        let blocks = input.one_of(&[1, 1, 1, 2, 4, 5, 32, 64, 256, 257, 65536]);
        let (bytes, command) = match IoOpcode::of(opcode) {
            Some(IoOpcode::Read | IoOpcode::Write | IoOpcode::Compare | IoOpcode::WriteZeroes) => {
                let command = Command::new(opcode, line.new_id(), namespace);
                (blocks * BLOCK_BYTES, command.with_blocks(first, blocks))
            }
            Some(IoOpcode::DatasetManagement) => {
                let ranges = input.byte() % 8;
                let command = Command::new(opcode, line.new_id(), namespace)
                    .with_dword(10, ranges.into())
                    .with_dword(11, 4);
                ((u64::from(ranges) + 1) * 16, command)
            }
            Some(
                IoOpcode::ReservationRegister
                | IoOpcode::ReservationAcquire
                | IoOpcode::ReservationRelease,
            ) => {
                let dword = u32::from(input.byte() & 0xf) | u32::from(input.byte() % 8) << 8;
                let command = Command::new(opcode, line.new_id(), namespace);
                (input.one_of(&[16, 16, 8, 0]), command.with_dword(10, dword))
            }
            Some(IoOpcode::ReservationReport) => {
                let command = Command::new(opcode, line.new_id(), namespace);
                (4096, command.with_dword(10, 1023).with_dword(11, 1))
            }
            Some(IoOpcode::Flush | IoOpcode::Fabrics) | None => {
                (0, Command::new(opcode, line.new_id(), namespace))
            }
        };
        let is_from_host = opcode & 3 == 1;
        let command = match is_from_host && bytes <= 16 << 10 && !input.rarely(3) {
            true => {
                let pointer = self.pointer(input, bytes as usize);
                command.with_data(pointer)
            }
            false if input.rarely(12) => {
                let pointer = self.pointer(input, 0);
                command.with_data(pointer)
            }
            false => command.with_data(DataPointer::Transport { bytes: bytes as u32 }),
        };
        self.command(input, &line, command).await;
    }

    /// Data that were asked for, as they should come, or otherwise.
    async fn send_data(&self, input: &mut Input<'_>) {
        let Some(line) = self.line(input, Role::Io) else { return };
        let part = {
            let mut asked = line.asked.borrow_mut();
            let count = asked.len();
            match count {
                0 => None,
                _ => {
                    let place = input.below(count);
                    let Asked { transfer, sent } = &mut asked[place];
                    let left = transfer.bytes - *sent;
                    let bytes = match input.below(4) {
                        0 => left.min(1 + u32::from(input.byte())),
                        1 => left.min(8192),
                        _ => left,
                    };
                    let part = Transfer { at: *sent, bytes, ..*transfer };
                    *sent += bytes;
                    let is_whole = *sent == transfer.bytes;
                    if is_whole {
                        asked.remove(place);
                    }
                    Some((part, is_whole))
                }
            }
        };
        if part.is_none() && !input.rarely(12) {
            return;
        }
        let any = Transfer {
            command: input.value() as u16,
            tag: input.value() as u16,
            at: input.value(),
            bytes: input.byte().into(),
        };
        let (mut transfer, is_whole) = part.unwrap_or((any, true));
        let data = vec![input.byte(); transfer.bytes as usize];
        let is_sound = line.is_sound.get() && !data.is_empty();
        if part.is_none() || input.rarely(16) {
            // From here on it may be that what is awaited never comes.
            line.is_sound.set(false);
            match input.below(5) {
                0 => transfer.at = transfer.at.wrapping_add(input.value()),
                1 => transfer.bytes = input.value(),
                2 => transfer.tag ^= input.value() as u16,
                3 => transfer.command ^= input.value() as u16,
                _ => {}
            }
        }
        let is_last = is_whole != input.rarely(16);
        let is_refused = is_sound && Some(transfer) != part.map(|(part, _)| part);
        if is_refused {
            let unit = line.unit(&Pdu::HostData { transfer, is_last }, &data);
            line.send_rest().await;
            line.send_bytes(&unit).await;
            let begun = reactor::now();
            while !line.is_over.get() && begun.elapsed() < LONG {
                line.settle().await;
            }
            assert!(
                line.is_over.get(),
                "taken, and not asked for: {transfer:?} instead of {part:?}"
            );
        } else {
            line.send(input, &Pdu::HostData { transfer, is_last }, &data).await;
            line.settle().await;
        }
    }

    /// A message of DH-HMAC-CHAP, or what should be one; of a host that knows the secret, or does not.
    async fn prove(&mut self, input: &mut Input<'_>) {
        let Some(line) = self.line(input, Role::Guarded) else { return };
        let transfer = |bytes: usize| AuthenticationTransfer {
            protocol: SECURITY_PROTOCOL,
            specific: SECURITY_SPECIFIC,
            bytes: bytes as u32,
        };
        // Mostly what comes next, with what the target says in between.
        const IN_ORDER: [usize; 5] = [0, 1, 2, 1, 3];
        let kind = match input.rarely(4) {
            true => input.below(6),
            false => IN_ORDER[line.stage.replace(line.stage.get() + 1) % IN_ORDER.len()],
        };
        if kind == 1 {
            let room = input.one_of(&[4096, 4096, 1024, 16, 0]);
            let command = transfer(room).command(false, line.new_id());
            line.proving.set(command.id());
            let pointer = DataPointer::Transport { bytes: room as u32 };
            self.command(input, &line, command.with_data(pointer)).await;
            return;
        }
        let heard = line.answers.borrow().get(&line.proving.get()).map(|(_, data)| data.clone());
        let heard = heard.unwrap_or_default();
        let mut random = |into: &mut [u8]| into.fill(3);
        let message = match kind {
            0 => {
                let mut secrets = self.secrets.clone();
                if input.rarely(2) {
                    self.is_let_in = true;
                } else {
                    secrets.host = Secret::random(None, &mut |key: &mut [u8]| key.fill(9));
                }
                let names = Names { host: nqn("host-0"), subsystem: nqn("guarded") };
                let groups = [[Group::None], [Group::None], [Group::Ffdhe2048]];
                let prover = Prover::new(names, secrets, input.byte().into());
                let prover = prover.offering(Hash::ALL, &input.one_of(&groups));
                let message = prover.negotiate();
                line.prover.replace(Some(prover));
                message
            }
            2 => {
                let mut prover = line.prover.borrow_mut();
                let reply = prover.as_mut().and_then(|own| own.reply(&heard, &mut random).ok());
                reply.unwrap_or_default()
            }
            3 => {
                let mut prover = line.prover.borrow_mut();
                let last = prover.as_mut().and_then(|own| own.confirm(&heard).ok()).flatten();
                last.unwrap_or_default()
            }
            4 => line.prover.borrow().as_ref().map(Prover::failure).unwrap_or_default(),
            _ => {
                let count = input.below(40);
                input.bytes(count)
            }
        };
        let mut message = message;
        if input.rarely(8) && !message.is_empty() {
            let at = input.below(message.len());
            message[at] ^= input.byte();
        }
        let bytes = message.len() as u32;
        let command = transfer(message.len()).command(true, line.new_id());
        let command = command.with_data(DataPointer::InCapsule { offset: 0, bytes });
        line.send(input, &Pdu::Command(command), &message).await;
        line.settle().await;
    }

    async fn send_anything(&self, input: &mut Input<'_>) {
        let Some(line) = self.line(input, Role::Io).filter(|_| input.rarely(3)) else { return };
        line.is_sound.set(false);
        let count = input.below(150);
        let bytes = input.bytes(count);
        line.send_bytes(&bytes).await;
        line.settle().await;
    }

    /// Something becomes of what is shown.
    fn change(&self, input: &mut Input<'_>) {
        match input.below(8) {
            0 => self.open.resized(1),
            1 => {
                self.kelvin.set(input.one_of(&[0, 300, 350, 400]));
                self.open.health_changed(Warnings::empty());
            }
            2 => self.open.remove(2),
            3 => self.add_drive(),
            4 => {
                let states = [AnaState::Optimized, AnaState::Inaccessible, AnaState::Change];
                self.path.set_state(input.one_of(&states));
            }
            5 => {
                let slow = Passage::Slow(Duration::from_millis(input.byte().into()));
                self.path.set_passage(input.one_of(&[Passage::Open, slow, Passage::Hung]));
            }
            6 => self.open.set_hosts(Hosts::Any),
            _ => self.target.add(Subsystem::new(nqn("other"), "3", Hosts::Any)),
        }
    }

    /// Everything is as it was at first.
    fn mend(&self) {
        self.path.set_passage(Passage::Open);
        self.path.set_state(AnaState::Optimized);
    }
}

async fn run(mut input: Input<'_>) {
    let mut world = World::new();
    let beside = world.target.port(([10, 0, 0, 2], 4420).into());
    let subsystem = Subsystem::new(nqn("beside"), "9", Hosts::Any);
    subsystem.add(1, opens(&Odd::new(), 9));
    world.target.add(subsystem);
    let mut other = Beside::new(&beside).await;
    let alone = world.target.held();
    for step in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        world.step(&mut input).await;
        if step % 16 == 7 {
            other.goes_on().await;
        }
    }
    world.mend();
    for line in world.lines.iter().flatten() {
        line.send_rest().await;
    }
    // What the target is at ends.
    let begun = reactor::now();
    let unanswered = || world.lines.iter().flatten().map(|line| line.unanswered()).sum::<usize>();
    while unanswered() > 0 && begun.elapsed() < LONG {
        reactor::sleep(Duration::from_secs(1)).await;
    }
    for line in world.lines.iter().flatten() {
        assert_eq!(line.unanswered(), 0, "of {:?}", line.sent.borrow().keys());
    }
    other.goes_on().await;
    for line in world.lines.drain(..).flatten() {
        line.close().await;
    }
    let (volume, guarded) = (Rc::clone(&world.volume), Rc::clone(&world.guarded));
    // Opened by the namespaces that there are, and held here.
    let namespaces = 1 + usize::from(world.open.namespace(2).is_some());
    let is_left = || {
        world.target.held() != alone
            || world.open.controllers() > 0
            || Rc::strong_count(&volume) != namespaces + 2
            || Rc::strong_count(&guarded) != 1 + 2
    };
    let begun = reactor::now();
    while is_left() && begun.elapsed() < LONG {
        reactor::sleep(Duration::from_secs(1)).await;
    }
    let held = (Rc::strong_count(&volume) - 2, Rc::strong_count(&guarded) - 2);
    let controllers = world.open.controllers();
    assert!(
        !is_left(),
        "left: {:?} of {alone:?}, {controllers} controllers, {held:?} opened",
        world.target.held()
    );
    assert!(world.is_let_in || guarded.writes.get() == 0, "written without a proof");
    other.goes_on().await;
    let ending = reactor::timeout(LONG, world.target.end()).await;
    assert!(ending.is_ok(), "the target does not end");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        /// Whatever hosts say.
        #[test]
        fn hosts_that_say_anything_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..1500)) {
            connections(&bytes);
        }
    }
}

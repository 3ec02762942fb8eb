//! A connection as its host sees it: what was sent, what was asked for, and what must be answered.

use super::proof::Attempt;
use super::{ENTRIES, IN_CAPSULE_BYTES_LEAST, SOON};
use crate::target::Path;
use levada_base::checksum::crc32c;
use levada_base::choices::Choices;
use levada_base::reactor;
use levada_base::stream::{ByteStream, MemoryStream};
use levada_base::{Buf, BufMut};
use levada_nvme::fabrics::{
    Configuration, Connect, ConnectData, FabricsType, Property, PropertyAccess,
};
use levada_nvme::pdu::{
    COMMON_BYTES, Common, DIGEST_BYTES, Digests, Framing, Initialize, Pdu, Transfer,
};
use levada_nvme::{AdminOpcode, Command, Completion, DataPointer, Feature, Nqn, Status};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// Data that the target has asked for, and how many of them were sent.
pub(super) struct Asked {
    pub transfer: Transfer,
    pub sent: u32,
}

/// A command that was sent and not answered.
pub(super) struct Sent {
    pub is_event_request: bool,
    pub is_fabrics: bool,
    /// Data of it that were received.
    pub received: Vec<u8>,
}

/// What a connection was connected as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Role {
    #[default]
    Nothing,
    Admin,
    Io,
    /// Either of them, of a subsystem that wants a proof.
    Guarded,
}

/// A connection, as its host sees it.
pub(super) struct Line {
    pub stream: MemoryStream,
    pub framing: Cell<Framing>,
    /// The target has agreed to that.
    pub is_greeted: Cell<bool>,
    /// Nothing was sent but sound units, with identifiers that are in use once, so that it is known what must be answered.
    pub is_sound: Cell<bool>,
    pub is_over: Cell<bool>,
    pub next_id: Cell<u16>,
    pub sent: RefCell<BTreeMap<u16, Sent>>,
    pub asked: RefCell<Vec<Asked>>,
    /// Commands with their tags that were answered before all their data came, of which some may be on their way.
    pub given_up: RefCell<BTreeSet<(u16, u16)>>,
    /// Of the last unit, which comes with the next one.
    pub rest: RefCell<Vec<u8>>,
    /// The last answers, with their data.
    pub answers: RefCell<BTreeMap<u16, (Completion, Vec<u8>)>>,
    pub role: Cell<Role>,
    pub queue: Cell<u16>,
    /// How far it has come with a proof, and the last command of that which asked for data.
    pub stage: Cell<usize>,
    pub proving: Cell<u16>,
    pub attempt: RefCell<Option<Attempt>>,
    /// The controller that Connect has told.
    pub connecting: Cell<Option<u16>>,
    /// What all the data that it writes are, so that a volume knows who has written.
    pub tag: u8,
    /// Of a subsystem that wants a proof; and a right one may have been given.
    pub is_guarded: Cell<bool>,
    pub is_let_in: Cell<bool>,
    /// It may end though it was sound: its host has closed it, has let it fall silent, or a proof failed.
    pub may_end: Cell<bool>,
    /// Its controller may have been reset or shut down.
    pub is_reset: Cell<bool>,
    /// That of its controller, for an I/O queue.
    pub admin: RefCell<Option<Rc<Self>>>,
}

impl Line {
    /// A new connection, which is heard; nothing was sent yet.
    pub fn open(path: &Path, tag: u8) -> Rc<Self> {
        let (stream, end) = MemoryStream::pair();
        path.serve(end);
        let line = Rc::new(Self {
            stream,
            framing: Cell::new(Framing::FIRST),
            is_greeted: Cell::new(false),
            is_sound: Cell::new(true),
            is_over: Cell::new(false),
            next_id: Cell::new(1),
            sent: RefCell::default(),
            asked: RefCell::default(),
            given_up: RefCell::default(),
            rest: RefCell::default(),
            answers: RefCell::default(),
            role: Cell::default(),
            queue: Cell::default(),
            stage: Cell::new(0),
            proving: Cell::new(0),
            attempt: RefCell::default(),
            connecting: Cell::default(),
            tag,
            is_guarded: Cell::new(false),
            is_let_in: Cell::new(false),
            // Until it is connected.
            may_end: Cell::new(true),
            is_reset: Cell::new(false),
            admin: RefCell::default(),
        });
        let hearing = Rc::clone(&line);
        reactor::spawn(async move {
            while hearing.hear().await.is_some() {}
            assert!(hearing.has_reason_to_end(), "ended without a word: {:?}", hearing.role.get());
            hearing.is_over.set(true);
        });
        line
    }

    pub async fn receive(&self, bytes: usize) -> Option<Vec<u8>> {
        Some(self.stream.read_exact(BufMut::for_overwrite(bytes)).await.ok()?.to_vec())
    }

    /// Takes what the target says next, which is sound whatever was sent. `None`: it says no more.
    pub async fn hear(&self) -> Option<()> {
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
                self.is_greeted.set(true);
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

    pub fn answered(&self, completion: Completion) {
        let id = completion.id;
        assert!(!completion.has_more || !completion.status.is_success());
        let sent = self.sent.borrow_mut().remove(&id);
        assert!(sent.is_some() || !self.is_sound.get(), "nobody has asked: {completion:?}");
        let is_fabrics = sent.as_ref().is_none_or(|sent| sent.is_fabrics);
        let is_taken = completion.status.is_success() && !is_fabrics;
        let may_take = !self.is_guarded.get() || self.is_let_in.get() || !self.is_sound.get();
        assert!(!is_taken || may_take, "taken without a proof: {completion:?}");
        let is_of = |asked: &mut Asked| asked.transfer.command == id;
        let given_up = self.asked.borrow_mut().extract_if(.., is_of).collect::<Vec<_>>();
        let tags = given_up.iter().map(|asked| (id, asked.transfer.tag));
        self.given_up.borrow_mut().extend(tags);
        if self.connecting.get() == Some(id) {
            self.connecting.set(completion.status.is_success().then_some(completion.result as u16));
        }
        let received = sent.map(|sent| sent.received).unwrap_or_default();
        self.answers.borrow_mut().insert(id, (completion, received));
    }

    pub async fn send_bytes(&self, bytes: &[u8]) {
        // One that is not read from any more is sent nothing more, rather than waited for.
        let sent = self.stream.write_all(Buf::copy_of(bytes).into_vec());
        if reactor::timeout(SOON, sent).await.is_err() {
            self.close().await;
        }
    }

    pub async fn close(&self) {
        self.may_end.set(true);
        self.stream.close().await;
    }

    /// Nothing that the target does by itself ends a connection.
    fn has_reason_to_end(&self) -> bool {
        let may = |line: &Self| line.may_end.get() || !line.is_sound.get();
        let admin = self.admin.borrow();
        may(self) || admin.as_ref().is_some_and(|admin| may(admin) || admin.is_reset.get())
    }

    pub fn unit(&self, pdu: &Pdu, data: &[u8]) -> Vec<u8> {
        let framing = self.framing.get();
        let mut bytes = framing.head(pdu, data.len()).to_vec();
        bytes.extend(data);
        if framing.digests.data && !data.is_empty() {
            bytes.extend(crc32c(data).to_le_bytes());
        }
        bytes
    }

    pub fn new_id(&self) -> u16 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }

    /// Notes that a command is sent, as a unit that is sound.
    pub fn note(&self, command: &Command) {
        let is = |opcode: AdminOpcode| command.opcode() == opcode as u8;
        let is_event_request = is(AdminOpcode::AsynchronousEventRequest);
        let is_fabrics = is(AdminOpcode::Fabrics);
        match is_fabrics.then(|| FabricsType::of(command.fabrics_type())).flatten() {
            Some(FabricsType::PropertySet) => self.is_reset.set(true),
            Some(FabricsType::AuthenticationSend | FabricsType::AuthenticationReceive)
                if self.is_guarded.get() =>
            {
                self.may_end.set(true);
            }
            _ => {}
        }
        if is(AdminOpcode::SetFeatures) && command.dword(10) as u8 == Feature::KeepAliveTimer as u8
        {
            self.may_end.set(true);
        }
        let sent = Sent { is_event_request, is_fabrics, received: Vec::new() };
        if self.sent.borrow_mut().insert(command.id(), sent).is_some() {
            self.is_sound.set(false);
        }
    }

    /// Sends a unit, as it is or as the fuzzer spoils it.
    pub async fn send(&self, input: &mut Choices<'_>, pdu: &Pdu, data: &[u8]) {
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
    pub async fn send_rest(&self) {
        let rest = self.rest.take();
        self.send_bytes(&rest).await;
    }

    /// Agrees on how units are built, or gives up on a path that hangs.
    pub async fn greet(&self, digests: Digests) {
        let request = Initialize { alignment_bytes: 4, digests, limit: 0 };
        self.send_bytes(&self.unit(&Pdu::InitializeRequest(request), &[])).await;
        let begun = reactor::now();
        while !self.is_greeted.get() && !self.is_over.get() {
            if begun.elapsed() > SOON {
                // How to go on it does not know.
                return self.close().await;
            }
            self.settle().await;
        }
    }

    /// Gives the target a moment.
    pub async fn settle(&self) {
        reactor::sleep(Duration::from_millis(1)).await;
    }

    /// Sends a command soundly, with its data in it, and takes its answer, which is to come soon.
    pub async fn ask(&self, command: Command, data: &[u8]) -> Option<(Completion, Vec<u8>)> {
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

    /// What has to be answered by now, and was not: all but events, and what the host still owes data for.
    pub fn unanswered(&self) -> usize {
        if !self.is_sound.get() || self.is_over.get() {
            return 0;
        }
        let asked = self.asked.borrow();
        let owes = |id: u16| asked.iter().any(|asked| asked.transfer.command == id);
        let sent = self.sent.borrow();
        sent.iter().filter(|(id, sent)| !sent.is_event_request && !owes(**id)).count()
    }
}

pub(super) fn nqn(name: &str) -> Nqn {
    Nqn::new(format!("nqn.2026-11.io.levada:{name}")).expect("a name")
}

/// A queue that is connected as it should be.
pub(super) async fn connect(
    line: &Line,
    data: ConnectData,
    queue: u16,
    keep_alive_ms: u32,
) -> Option<u16> {
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

pub(super) async fn enable(line: &Line) -> Option<()> {
    let enabled = u64::from(Configuration::ENABLED.0);
    let enable = PropertyAccess::set(Property::Configuration, enabled, line.new_id());
    line.ask(enable, &[]).await.map(|_| ())
}

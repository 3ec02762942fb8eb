//! A host that says what it is told to, one command at a time or several.

use levada_base::checksum::crc32c;
use levada_base::reactor::net::Stream;
use levada_base::stream::ByteStream;
use levada_base::{Buf, BufMut};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, Configuration, Connect, ConnectData, Property, PropertyAccess,
};
use levada_nvme::identify::{EVERY_NAMESPACE, IDENTIFY_BYTES, Identify};
use levada_nvme::log::GetLogPage;
use levada_nvme::pdu::{
    COMMON_BYTES, Common, DIGEST_BYTES, Digests, Framing, Initialize, Pdu, Terminated, Transfer,
};
use levada_nvme::reservation::ReservationRequest;
use levada_nvme::{
    AdminOpcode, Command, Completion, DataPointer, Feature, IoOpcode, Nqn, Range, Status,
};
use levada_tls::Channel;
use std::io;
use std::net::SocketAddr;

pub fn nqn(name: &str) -> Nqn {
    Nqn::new(name).expect("a name")
}

/// Bytes of an I/O queue's commands that may be within them.
const IN_CAPSULE_BYTES: usize = 16 << 10;
const ENTRIES: u16 = 32;

/// A connection, as its host sees it.
pub struct Queue {
    pub stream: Channel,
    pub framing: Framing,
    next_id: u16,
    pub is_without_flow_control: bool,
    pub in_capsule_bytes: usize,
}

/// What the target says next.
pub struct Said {
    pub pdu: Pdu,
    pub data: Vec<u8>,
}

/// How a command went.
pub type Outcome = Result<(Completion, Vec<u8>), Ended>;

/// The connection is over.
#[derive(Debug)]
pub enum Ended {
    Gone,
    /// Why, and the header that was wrong.
    Told(Terminated, Vec<u8>),
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

impl Queue {
    pub async fn open(address: SocketAddr, digests: Digests) -> Self {
        let stream = Stream::connect(address).await.expect("the target listens");
        Self::open_on(stream.into(), digests).await
    }

    pub async fn open_on(stream: Channel, digests: Digests) -> Self {
        let request = Initialize { alignment_bytes: 4, digests, limit: 0 };
        let mut queue = Self {
            stream,
            framing: Framing::FIRST,
            next_id: 1,
            is_without_flow_control: false,
            in_capsule_bytes: 8192,
        };
        queue.send(&Pdu::InitializeRequest(request), None).await;
        let Ok(Said { pdu: Pdu::InitializeResponse(answer), .. }) = queue.hear().await else {
            panic!("no answer to the first unit");
        };
        assert_eq!(answer.digests, digests);
        queue.framing = Framing { digests, alignment_bytes: answer.alignment_bytes };
        queue
    }

    pub async fn send_bytes(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(Buf::copy_of(bytes).into_vec()).await
    }

    /// A unit as bytes.
    pub fn unit(&self, pdu: &Pdu, data: Option<&[u8]>) -> Vec<u8> {
        let mut bytes = self.framing.head(pdu, data.map_or(0, <[u8]>::len)).to_vec();
        if let Some(data) = data {
            bytes.extend(data);
            if self.framing.digests.data {
                bytes.extend(crc32c(data).to_le_bytes());
            }
        }
        bytes
    }

    pub async fn send(&self, pdu: &Pdu, data: Option<&[u8]>) {
        // Whoever hears nothing afterwards learns that it was in vain.
        let _ = self.send_bytes(&self.unit(pdu, data)).await;
    }

    async fn receive(&self, bytes: usize) -> Result<Vec<u8>, Ended> {
        Ok(self.stream.read_exact(BufMut::for_overwrite(bytes)).await?.to_vec())
    }

    pub async fn hear(&self) -> Result<Said, Ended> {
        let common = self.receive(COMMON_BYTES).await?;
        let common = Common::parse(common[..].try_into().expect("so many")).expect("a header");
        let digests = self.framing.digests;
        let rest = self.receive(common.rest_bytes(digests)).await?;
        let pdu = common.pdu(&rest, digests).expect("a unit");
        let (padding, bytes) = common.data_bytes(digests).expect("sound");
        self.receive(padding).await?;
        let data = self.receive(bytes).await?;
        if bytes > 0 && common.has_data_digest(digests) {
            let digest = self.receive(DIGEST_BYTES).await?;
            assert_eq!(digest, crc32c(&data).to_le_bytes(), "the digest of data");
        }
        match pdu {
            Pdu::Terminates(told) => Err(Ended::Told(told, data)),
            pdu => Ok(Said { pdu, data }),
        }
    }

    pub fn new_id(&mut self) -> u16 {
        self.next_id += 1;
        self.next_id
    }

    /// Sends a command; its data within it where they fit.
    pub async fn begin(&mut self, command: Command, data: Option<&[u8]>) {
        match data {
            Some(data) if data.len() <= self.in_capsule_bytes => {
                let bytes = data.len() as u32;
                let command = command.with_data(DataPointer::InCapsule { offset: 0, bytes });
                self.send(&Pdu::Command(command), Some(data)).await;
            }
            Some(data) => {
                let pointer = DataPointer::Transport { bytes: data.len() as u32 };
                self.send(&Pdu::Command(command.with_data(pointer)), None).await;
            }
            None => self.send(&Pdu::Command(command), None).await,
        }
    }

    /// Sends data that were asked for, in units of `unit_bytes`.
    pub async fn send_data(&self, asked: Transfer, data: &[u8], unit_bytes: usize) {
        let wanted = &data[asked.at as usize..(asked.at + asked.bytes) as usize];
        let units = wanted.len().div_ceil(unit_bytes);
        for (index, part) in wanted.chunks(unit_bytes).enumerate() {
            let at = asked.at + (index * unit_bytes) as u32;
            let transfer = Transfer { at, bytes: part.len() as u32, ..asked };
            self.send(&Pdu::HostData { transfer, is_last: index + 1 == units }, Some(part)).await;
        }
    }

    /// Sends a command and takes its answer, which is the next.
    pub async fn ask(&mut self, command: Command, data: Option<&[u8]>) -> Outcome {
        self.begin(command, data).await;
        self.answer(command.id(), data).await
    }

    /// The answer to a command that was begun.
    pub async fn answer(&mut self, id: u16, data: Option<&[u8]>) -> Outcome {
        let mut received = Vec::new();
        loop {
            let said = self.hear().await?;
            match said.pdu {
                Pdu::ReadyToTransfer(asked) => {
                    assert_eq!(asked.command, id);
                    self.send_data(asked, data.expect("data to send"), 100_000).await;
                }
                Pdu::ControllerData { transfer, is_success, .. } => {
                    assert_eq!((transfer.command, transfer.at as usize), (id, received.len()));
                    received.extend(said.data);
                    assert!(!is_success || self.is_without_flow_control);
                    if is_success {
                        let completion = Completion {
                            result: 0,
                            queue_head: 0,
                            id,
                            status: Status::SUCCESS,
                            has_more: false,
                        };
                        return Ok((completion, received));
                    }
                }
                Pdu::Response(completion) => {
                    assert_eq!(completion.id, id);
                    return Ok((completion, received));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// How a host connects.
#[derive(Clone)]
pub struct Connecting {
    pub host: Nqn,
    pub host_id: [u8; 16],
    pub digests: Digests,
    pub keep_alive_ms: u32,
    pub is_without_flow_control: bool,
}

impl Connecting {
    pub fn new(number: u8) -> Self {
        Self {
            host: nqn(&format!("nqn.2014-08.org.example:host{number}")),
            host_id: [number; 16],
            digests: Digests::default(),
            keep_alive_ms: 0,
            is_without_flow_control: false,
        }
    }

    /// The answer to Connect: the controller.
    pub async fn queue(
        &self,
        queue: &mut Queue,
        subsystem: &Nqn,
        (controller, id): (u16, u16),
    ) -> Result<u16, Completion> {
        let connect = Connect {
            format: 0,
            queue: id,
            queue_entries_less_one: ENTRIES - 1,
            is_without_flow_control: self.is_without_flow_control,
            keep_alive_ms: self.keep_alive_ms,
        };
        let data = ConnectData {
            host_id: self.host_id,
            controller,
            subsystem: subsystem.clone(),
            host: self.host.clone(),
        };
        let command = connect.command(queue.new_id());
        let outcome = queue.ask(command, Some(&data.to_bytes())).await;
        let (completion, _) = outcome.expect("an answer to Connect");
        queue.is_without_flow_control = self.is_without_flow_control;
        match completion.status.is_success() {
            true => Ok(completion.result as u16),
            false => Err(completion),
        }
    }

    pub async fn to(&self, address: SocketAddr, subsystem: &Nqn) -> Result<Host, Completion> {
        let mut admin = Queue::open(address, self.digests).await;
        let controller = self.queue(&mut admin, subsystem, (ANY_CONTROLLER, 0)).await?;
        let id = admin.new_id();
        let enable = u64::from(Configuration::ENABLED.0);
        let enabled = admin.ask(PropertyAccess::set(Property::Configuration, enable, id), None);
        assert!(enabled.await.expect("an answer").0.status.is_success());
        let mut io = Queue::open(address, self.digests).await;
        self.queue(&mut io, subsystem, (controller, 1)).await?;
        io.in_capsule_bytes = IN_CAPSULE_BYTES;
        Ok(Host { admin, io, controller })
    }
}

/// A host with an admin queue and one for I/O.
pub struct Host {
    pub admin: Queue,
    pub io: Queue,
    pub controller: u16,
}

impl Host {
    pub async fn connect(
        address: SocketAddr,
        subsystem: &Nqn,
        number: u8,
    ) -> Result<Self, Completion> {
        Connecting::new(number).to(address, subsystem).await
    }

    fn blocks(&mut self, opcode: IoOpcode, first: u64, blocks: u64) -> Command {
        let bytes = (blocks * 4096) as u32;
        Command::new(opcode as u8, self.io.new_id(), 1)
            .with_blocks(first, blocks)
            .with_data(DataPointer::Transport { bytes })
    }

    pub async fn status(&mut self, command: Command, data: Option<&[u8]>) -> Status {
        self.io.ask(command, data).await.expect("an answer").0.status
    }

    pub fn read_command(&mut self, first: u64, blocks: u64) -> Command {
        self.blocks(IoOpcode::Read, first, blocks)
    }

    pub async fn read(&mut self, first: u64, blocks: u64) -> Result<Vec<u8>, Status> {
        let command = self.read_command(first, blocks);
        let (completion, data) = self.io.ask(command, None).await.expect("an answer");
        match completion.status.is_success() {
            true => Ok(data),
            false => Err(completion.status),
        }
    }

    pub fn write_command(&mut self, first: u64, data: &[u8]) -> Command {
        self.blocks(IoOpcode::Write, first, data.len() as u64 / 4096)
    }

    pub async fn write(&mut self, first: u64, data: &[u8]) -> Status {
        let command = self.write_command(first, data);
        self.status(command, Some(data)).await
    }

    pub fn compare_command(&mut self, first: u64, data: &[u8]) -> Command {
        self.blocks(IoOpcode::Compare, first, data.len() as u64 / 4096)
    }

    pub async fn compare(&mut self, first: u64, data: &[u8]) -> Status {
        let command = self.compare_command(first, data);
        self.status(command, Some(data)).await
    }

    pub async fn write_zeroes(&mut self, first: u64, blocks: u64, may_free: bool) -> Status {
        let command = Command::new(IoOpcode::WriteZeroes as u8, self.io.new_id(), 1);
        let command = command.with_blocks(first, blocks);
        let command = if may_free { command.with_deallocate() } else { command };
        self.status(command, None).await
    }

    pub async fn flush(&mut self) -> Status {
        let command = Command::new(IoOpcode::Flush as u8, self.io.new_id(), 1);
        self.status(command, None).await
    }

    pub async fn discard(&mut self, ranges: &[Range]) -> Status {
        self.manage(ranges, 1 << 2).await
    }

    /// Dataset Management, with these attributes.
    pub async fn manage(&mut self, ranges: &[Range], attributes: u32) -> Status {
        let data: Vec<u8> = ranges.iter().flat_map(|range| range.to_bytes()).collect();
        let command = Command::new(IoOpcode::DatasetManagement as u8, self.io.new_id(), 1)
            .with_dword(10, ranges.len() as u32 - 1)
            .with_dword(11, attributes);
        self.status(command, Some(&data)).await
    }

    pub async fn reserve(&mut self, request: ReservationRequest) -> Status {
        self.reserve_with(request, 0).await
    }

    /// The same, with more in doubleword 10.
    pub async fn reserve_with(&mut self, request: ReservationRequest, more: u32) -> Status {
        let (opcode, dword, data) = request.to_command();
        let command = Command::new(opcode as u8, self.io.new_id(), 1).with_dword(10, dword | more);
        self.status(command, Some(&data)).await
    }

    pub fn abort_command(&mut self, queue: u16, id: u16) -> Command {
        let dword = u32::from(queue) | u32::from(id) << 16;
        Command::new(AdminOpcode::Abort as u8, self.admin.new_id(), 0).with_dword(10, dword)
    }

    /// Whether a command was aborted by this.
    pub async fn abort(&mut self, queue: u16, id: u16) -> bool {
        let command = self.abort_command(queue, id);
        let (completion, _) = self.admin.ask(command, None).await.expect("an answer");
        assert_eq!(completion.status, Status::SUCCESS);
        completion.result & 1 == 0
    }

    pub async fn identify(&mut self, what: Identify, namespace: u32) -> Result<Vec<u8>, Status> {
        let command = Command::new(AdminOpcode::Identify as u8, self.admin.new_id(), namespace)
            .with_dword(10, what as u32)
            .with_data(DataPointer::Transport { bytes: IDENTIFY_BYTES as u32 });
        let (completion, data) = self.admin.ask(command, None).await.expect("an answer");
        match completion.status.is_success() {
            true => Ok(data),
            false => Err(completion.status),
        }
    }

    pub async fn feature_of(
        &mut self,
        opcode: AdminOpcode,
        namespace: u32,
        feature: Feature,
        value: u32,
    ) -> Completion {
        let command = Command::new(opcode as u8, self.admin.new_id(), namespace)
            .with_dword(10, feature as u32)
            .with_dword(11, value);
        self.admin.ask(command, None).await.expect("an answer").0
    }

    pub async fn features(&mut self, opcode: AdminOpcode, dwords: [u32; 2]) -> Completion {
        let command = Command::new(opcode as u8, self.admin.new_id(), 0)
            .with_dword(10, dwords[0])
            .with_dword(11, dwords[1]);
        self.admin.ask(command, None).await.expect("an answer").0
    }
}

/// Reads a page of a log.
pub async fn log_page(admin: &mut Queue, page: u8, bytes: u64) -> Result<Vec<u8>, Status> {
    log_page_of(admin, EVERY_NAMESPACE, page, bytes).await
}

/// Reads a page of the log of a namespace.
pub async fn log_page_of(
    admin: &mut Queue,
    namespace: u32,
    page: u8,
    bytes: u64,
) -> Result<Vec<u8>, Status> {
    let asked = GetLogPage { page, specific: 0, keeps_event: false, at: 0, bytes };
    let command = asked
        .command(admin.new_id(), namespace)
        .with_data(DataPointer::Transport { bytes: bytes as u32 });
    let (completion, data) = admin.ask(command, None).await.expect("an answer");
    match completion.status.is_success() {
        true => Ok(data),
        false => Err(completion.status),
    }
}

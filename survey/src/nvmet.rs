//! NVMe/TCP: a host on one core, the target on the other, against a bare TCP exchange of messages of the same sizes.
//!
//! Host and bare client are threads that block, and take and send as much at once as there is. The volume answers at once and keeps
//! nothing.

use crate::cores::TwoCores;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, pairs};
use crate::load::Load;
use crate::null_volume::NullVolume;
use crate::served::{HOST, Served, Serving, Volumes};
use crate::suite::Spec;
use anyhow::{Context, Result, bail, ensure};
use levada_base::checksum::crc32c;
use levada_base::reactor::Reactor;
use levada_base::units::{GIB, KIB};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, Configuration, Connect, ConnectData, Property, PropertyAccess,
};
use levada_nvme::pdu::{COMMON_BYTES, Common, Digests, Framing, Initialize, Pdu, Transfer};
use levada_nvme::{Command, DataPointer, IoOpcode, Nqn};
use levada_volume::Volume;
use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::thread::JoinHandle;

const VOLUME: &str = "null";
const VOLUME_BYTES: u64 = 64 * GIB;
pub(crate) const DEPTH: usize = 128;
pub(crate) const SEQUENTIAL_DEPTH: usize = 16;
pub(crate) const SEQUENTIAL_BYTES: u64 = 128 * KIB;
pub(crate) const BLOCK_BYTES: u64 = 4 * KIB;
/// What is read of a socket at once.
const READ_BYTES: usize = 256 << 10;
/// What a host moves to where its buffer begins before it reads more.
const MOVED_BYTES: usize = 8 << 10;
/// What the bare sides send at once, as much as the target. Twice that made no difference that could be told from the noise.
const SENT_AT_ONCE: usize = 512 << 10;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "nvmet.null.randread4k_of_tcp_pingpong",
            what: "4 KiB reads over NVMe/TCP, 128 in flight, against a bare exchange of the same bytes",
            bar: Bar::AtLeast(0.7),
            take: |effort| taken(effort, Rate::Kiops, IoOpcode::Read, false),
        },
        Spec {
            name: "nvmet.null.seqread_of_tcp",
            what: "128 KiB reads over NVMe/TCP, 16 in flight, against a bare exchange of the same bytes",
            bar: Bar::AtLeast(0.8),
            take: |effort| taken(effort, Rate::GbPerS, IoOpcode::Read, false),
        },
        Spec {
            name: "nvmet.null.seqwrite_of_tcp",
            what: "128 KiB writes over NVMe/TCP, 16 in flight, against a bare exchange of the same bytes",
            bar: Bar::AtLeast(0.8),
            take: |effort| taken(effort, Rate::GbPerS, IoOpcode::Write, false),
        },
        Spec {
            name: "nvmet.null.seqread_digest_of_tcp",
            what: "as nvmet.null.seqread_of_tcp, with digests of data",
            bar: Bar::AtLeast(0.6),
            take: |effort| taken(effort, Rate::GbPerS, IoOpcode::Read, true),
        },
        Spec {
            name: "nvmet.null.seqwrite_digest_of_tcp",
            what: "as nvmet.null.seqwrite_of_tcp, with digests of data",
            bar: Bar::AtLeast(0.6),
            take: |effort| taken(effort, Rate::GbPerS, IoOpcode::Write, true),
        },
    ]
}

fn taken(effort: Effort, rate: Rate, opcode: IoOpcode, data_digest: bool) -> Result<Taken> {
    let dir = tempfile::Builder::new().prefix("bench-nvmet-").tempdir()?;
    let cores = TwoCores::take()?;
    let served = cores.of_other_side(|| {
        Served::start(dir.path(), Serving::default(), async || {
            let volume: Rc<dyn Volume> = Rc::new(NullVolume::new(VOLUME_BYTES));
            Ok(Volumes::from([(VOLUME.to_owned(), volume)]))
        })
    })?;
    let load = match rate {
        Rate::Kiops => Load::random(0..VOLUME_BYTES, BLOCK_BYTES, DEPTH, effort.amount(1 << 20), 7),
        _ => Load::sequential(0..effort.amount(16 * GIB), SEQUENTIAL_BYTES, SEQUENTIAL_DEPTH),
    };
    let at = served.nvme(VOLUME)?;
    let sizes = Sizes::of(opcode, load.piece_bytes as usize);
    let bare = cores.of_other_side(|| Bare::start(sizes))?;
    let digests = Digests { header: false, data: data_digest };
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |_| Host::connect(&at, digests)?.run(&load, opcode),
        async |_| exchange(bare.address, sizes, &load),
    ))?;
    Ok(pairs.ratio(rate, ("nvme", "tcp"), 1.0))
}

/// Bytes that an operation sends to the server and takes from it, but for a request for data and its answer's place.
#[derive(Clone, Copy)]
struct Sizes {
    request: usize,
    reply: usize,
}

impl Sizes {
    fn of(opcode: IoOpcode, piece: usize) -> Self {
        const COMMAND: usize = 72;
        const DATA: usize = 24;
        const RESPONSE: usize = 24;
        match opcode {
            IoOpcode::Write => Self { request: COMMAND + DATA + piece, reply: RESPONSE },
            _ => Self { request: COMMAND, reply: DATA + piece + RESPONSE },
        }
    }
}

/// A server that knows nothing but how many bytes a request and a reply have. Serves one client after the other.
struct Bare {
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Bare {
    fn start(sizes: Sizes) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let thread = std::thread::Builder::new().name("bare".into()).spawn(move || {
            // As the target does.
            let at_once = (SENT_AT_ONCE / sizes.reply).clamp(1, DEPTH);
            let replies = vec![0; sizes.reply * at_once];
            let mut buffer = vec![0; READ_BYTES];
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let _ = stream.set_nodelay(true);
                let mut pending = 0;
                let mut has_asked = false;
                // Until the client goes.
                while let Ok(read @ 1..) = stream.read(&mut buffer) {
                    has_asked = true;
                    pending += read;
                    let mut whole = pending / sizes.request;
                    pending -= whole * sizes.request;
                    while whole > 0 {
                        let now = whole.min(at_once);
                        if stream.write_all(&replies[..now * sizes.reply]).is_err() {
                            break;
                        }
                        whole -= now;
                    }
                }
                // Nothing was asked: the end.
                if !has_asked {
                    return;
                }
            }
        })?;
        Ok(Self { address, thread: Some(thread) })
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // One that asks nothing ends it.
        if TcpStream::connect(self.address).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Asks a bare server as often as `load` says.
fn exchange(address: SocketAddr, sizes: Sizes, load: &Load) -> Result<Run> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let at_once = (SENT_AT_ONCE / sizes.request).clamp(1, load.depth) as u64;
    let requests = vec![1; sizes.request * at_once as usize];
    let mut buffer = vec![0; READ_BYTES];
    let (mut asked, mut answered, mut pending) = (0, 0, 0);
    let meter = Meter::start()?;
    while answered < load.ops {
        let mut room = (load.depth as u64 - (asked - answered)).min(load.ops - asked);
        while room > 0 {
            let now = room.min(at_once);
            stream.write_all(&requests[..now as usize * sizes.request])?;
            asked += now;
            room -= now;
        }
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "the bare server ended");
        pending += read;
        answered += (pending / sizes.reply) as u64;
        pending %= sizes.reply;
    }
    meter.stop(load.ops * load.piece_bytes, load.ops)
}

/// A connection of a host.
struct Queue {
    stream: TcpStream,
    framing: Framing,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Queue {
    fn open(address: SocketAddr, digests: Digests) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let buffer = vec![0; READ_BYTES + 256 * KIB as usize];
        let mut queue = Self { stream, framing: Framing::FIRST, buffer, start: 0, end: 0 };
        let alignment_bytes = Framing::FIRST.alignment_bytes;
        let request = Initialize { alignment_bytes, digests, limit: 0 };
        queue.send(&queue.framing.head(&Pdu::InitializeRequest(request), 0))?;
        let (Pdu::InitializeResponse(answer), _) = queue.unit()? else { bail!("no target") };
        queue.framing = Framing { digests: answer.digests, alignment_bytes };
        Ok(queue)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(bytes)?)
    }

    /// `bytes` that are there, or come.
    fn take(&mut self, bytes: usize) -> Result<&[u8]> {
        while self.end - self.start < bytes {
            let there = self.end - self.start;
            // A little is moved, so that what is read of the socket lies where the last did, in a cache.
            if self.start + bytes > self.buffer.len() || there <= MOVED_BYTES {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, there);
            }
            let room = self.buffer.len().min(self.end + READ_BYTES);
            let read = self.stream.read(&mut self.buffer[self.end..room])?;
            ensure!(read > 0, "the target ended the connection");
            self.end += read;
        }
        self.start += bytes;
        Ok(&self.buffer[self.start - bytes..self.start])
    }

    /// Whether all of the next unit is there.
    fn has_unit(&self) -> Result<bool> {
        let Some(common) = self.buffer[self.start..self.end].first_chunk() else {
            return Ok(false);
        };
        let common = Common::parse(common)?;
        let digests = self.framing.digests;
        let (padding, bytes) = common.data_bytes(digests)?;
        let digest_bytes = if common.has_data_digest(digests) { 4 } else { 0 };
        let whole = COMMON_BYTES + common.rest_bytes(digests) + padding + bytes + digest_bytes;
        Ok(self.end - self.start >= whole)
    }

    /// The next unit, and how many data it had. Their digests are checked.
    fn unit(&mut self) -> Result<(Pdu, usize)> {
        let digests = self.framing.digests;
        let common = Common::parse(self.take(COMMON_BYTES)?.try_into()?)?;
        let pdu = common.pdu(self.take(common.rest_bytes(digests))?, digests)?;
        let (padding, bytes) = common.data_bytes(digests)?;
        if bytes > 0 {
            let has_digest = common.has_data_digest(digests);
            let digest_bytes = if has_digest { 4 } else { 0 };
            let data = &self.take(padding + bytes + digest_bytes)?[padding..];
            ensure!(
                !has_digest || crc32c(&data[..bytes]).to_le_bytes() == data[bytes..],
                "data were mangled"
            );
        }
        Ok((pdu, bytes))
    }

    fn ask(&mut self, command: Command, data: Option<&[u8]>) -> Result<u64> {
        let mut bytes =
            self.framing.head(&Pdu::Command(command), data.map_or(0, <[u8]>::len)).to_vec();
        if let Some(data) = data {
            bytes.extend(data);
            if self.framing.digests.data {
                bytes.extend(crc32c(data).to_le_bytes());
            }
        }
        self.send(&bytes)?;
        let (Pdu::Response(completion), _) = self.unit()? else { bail!("no completion") };
        ensure!(completion.status.is_success(), "{}", completion.status);
        Ok(completion.result)
    }

    fn connect(&mut self, subsystem: &Nqn, controller: u16, id: u16) -> Result<u16> {
        let connect = Connect {
            format: 0,
            queue: id,
            queue_entries_less_one: DEPTH as u16,
            is_without_flow_control: false,
            keep_alive_ms: 0,
        };
        let host = Nqn::new(HOST)?;
        let data = ConnectData { host_id: [1; 16], controller, subsystem: subsystem.clone(), host };
        let data = data.to_bytes();
        let pointer = DataPointer::InCapsule { offset: 0, bytes: data.len() as u32 };
        Ok(self.ask(connect.command(0).with_data(pointer), Some(&data))? as u16)
    }
}

/// A host with one I/O queue.
pub(crate) struct Host {
    /// As long as it is there the controller is.
    _admin: Queue,
    io: Queue,
}

impl Host {
    pub(crate) fn connect(
        (address, subsystem): &(SocketAddr, Nqn),
        digests: Digests,
    ) -> Result<Self> {
        let mut admin = Queue::open(*address, digests)?;
        let controller = admin.connect(subsystem, ANY_CONTROLLER, 0)?;
        let enabled = u64::from(Configuration::ENABLED.0);
        admin.ask(PropertyAccess::set(Property::Configuration, enabled, 1), None)?;
        let mut io = Queue::open(*address, digests)?;
        io.connect(subsystem, controller, 1).context("an I/O queue")?;
        Ok(Self { _admin: admin, io })
    }

    /// Reads or writes what `load` says, and measures it. The data that are written stay the same, but their digest is made each time.
    pub(crate) fn run(&mut self, load: &Load, opcode: IoOpcode) -> Result<Run> {
        let piece = load.piece_bytes as usize;
        let data = vec![7; piece];
        let mut offsets = load.offsets().into_iter();
        let mut idle: Vec<u16> = (0..load.depth as u16).collect();
        let mut commands = Vec::with_capacity(load.depth * 72);
        let (mut answered, mut received) = (0, 0);
        let meter = Meter::start()?;
        while answered < load.ops {
            commands.clear();
            while let Some(id) = idle.pop() {
                let Some(at) = offsets.next() else { break };
                let command = Command::new(opcode as u8, id, 1)
                    .with_blocks(at / BLOCK_BYTES, load.piece_bytes / BLOCK_BYTES)
                    .with_data(DataPointer::Transport { bytes: piece as u32 });
                commands.extend_from_slice(&self.io.framing.head(&Pdu::Command(command), 0));
            }
            self.io.send(&commands)?;
            // All that is there, and one at least. What is there in part is no reason to keep the target waiting for commands.
            loop {
                match self.io.unit()? {
                    (Pdu::ControllerData { .. }, bytes) => received += bytes as u64,
                    (Pdu::ReadyToTransfer(asked), _) => self.send_data(asked, &data)?,
                    (Pdu::Response(completion), _) => {
                        ensure!(completion.status.is_success(), "{}", completion.status);
                        idle.push(completion.id);
                        answered += 1;
                    }
                    (other, _) => bail!("{other:?}"),
                }
                if !self.io.has_unit()? {
                    break;
                }
            }
        }
        let bytes = load.ops * load.piece_bytes;
        ensure!(opcode == IoOpcode::Write || received == bytes, "{received} bytes were read");
        meter.stop(bytes, load.ops)
    }

    fn send_data(&mut self, asked: Transfer, data: &[u8]) -> Result<()> {
        let framing = self.io.framing;
        let head = framing.head(&Pdu::HostData { transfer: asked, is_last: true }, data.len());
        let digest = if framing.digests.data { crc32c(data).to_le_bytes() } else { [0; 4] };
        let digest = if framing.digests.data { &digest[..] } else { &[] };
        let mut parts = [IoSlice::new(&head), IoSlice::new(data), IoSlice::new(digest)];
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let sent = self.io.stream.write_vectored(parts)?;
            ensure!(sent > 0, "the target ended the connection");
            IoSlice::advance_slices(&mut parts, sent);
        }
        Ok(())
    }
}

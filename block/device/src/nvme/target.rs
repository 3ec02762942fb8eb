//! A small target, whose behaviour tests choose: a namespace in memory, with a cache that a restart loses.
#![cfg_attr(
    not(test),
    allow(dead_code, reason = "tests choose more of its behaviour than the fuzzer does")
)]

mod listener;
mod reservations;

use futures_util::future::{Either, select};
use levada_base::Buf;
use levada_base::checksum::crc32c;
use levada_base::reactor::{self, Instant};
use levada_base::stream::{ByteStream, Inbox, MemoryNetwork, MemoryStream, Outbox, Outgoing};
use levada_base::sync::{Notify, Once};
use levada_nvme::authentication::{Names, Secrets, Verifier};
use levada_nvme::fabrics::{
    AuthenticationTransfer, CONNECT_BYTES, Capabilities, Configuration, Connect, ConnectData,
    ControllerState, FabricsType, MUST_AUTHENTICATE, Property, PropertyAccess, Shutdown,
};
use levada_nvme::identify::{
    CommandLimits, ControllerIdentity, Events, IDENTIFY_BYTES, Identify, NamespaceIdentity,
    OWN_MODEL, OptionalCommands, namespace_descriptors, namespace_list,
};
use levada_nvme::log::{self, AnaGroup, AnaState, DiscoveryEntry, Event, GetLogPage, LogPage};
use levada_nvme::pdu::{COMMON_BYTES, Common, Digests, Framing, Initialize, Pdu, Transfer};
use levada_nvme::{
    AdminOpcode, Command, Completion, DataPointer, Feature, IoOpcode, Nqn, Status, ranges,
};
use listener::Listener;
use reservations::Changing;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::pending;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

pub const BLOCK_BYTES: u64 = 512;
pub const BLOCKS: u64 = 64 << 10;
pub const NQN: &str = "nqn.2014-08.org.example:box";

/// What a test says in place of a page.
pub type Tells<T> = Rc<dyn Fn(&T) -> Vec<u8>>;

/// See the module. What is not a `Cell` is chosen before anybody connects.
pub struct Target {
    /// What is read, and what is left after a restart.
    pub cached: RefCell<Vec<u8>>,
    pub durable: RefCell<Vec<u8>>,
    pub guid: Cell<[u8; 16]>,
    pub blocks: Cell<u64>,
    pub data_bytes_max: u64,
    pub in_capsule_bytes: usize,
    /// Data of one unit from it, and to it; what it asks for at once.
    pub unit_bytes: usize,
    pub host_unit_bytes: u32,
    pub transfer_bytes: u32,
    pub has_success_flag: bool,
    pub digests: Digests,
    pub keeps_reservations: bool,
    /// It is as our own one: who takes the reservation waits for the changes of all who may not write any more, and not only of those that
    /// are preempted by that.
    pub is_own: bool,
    pub keep_alive_unit_ms: u32,
    pub optional: OptionalCommands,
    pub limits: CommandLimits,
    /// Who may connect; `None`: everybody.
    pub admitted: Option<Nqn>,
    /// What hosts have to prove.
    pub secrets: Option<Secrets>,
    /// Whom it does not believe it does not tell, but ends the connection.
    pub hangs_up_on_the_unproven: Cell<bool>,
    /// On others it proves who it is, if it is asked.
    pub asks_on_the_admin_queue_only: bool,
    /// By which it proves itself on the others, if they are not the same.
    pub other_secrets: Option<Secrets>,
    /// Queues on which a host has proved who it is.
    pub proven: Cell<u32>,
    pub states: RefCell<BTreeMap<SocketAddr, AnaState>>,
    /// So many data units from now on are damaged.
    pub damages: Cell<u32>,
    /// The same of pages of logs and of identity.
    pub damages_pages: Cell<u32>,
    /// The next commands on blocks are answered so.
    pub statuses: RefCell<Vec<Status>>,
    /// Writes take so long, whatever happens to their connection.
    pub late: Cell<Duration>,
    /// So do answers to writes that were carried out.
    pub answers_late: Cell<Duration>,
    /// Flushes do.
    pub flush_takes: Cell<Duration>,
    /// Commands on blocks that come to these addresses are not answered.
    pub mute_at: RefCell<Vec<SocketAddr>>,
    /// Registrations that come to this address are not.
    pub registers_nobody_at: Cell<Option<SocketAddr>>,
    /// Its drive hangs: reads and writes are not answered.
    pub hangs: Cell<bool>,
    /// The namespace is not there.
    pub is_absent: Cell<bool>,
    pub tells_absence_as_a_field: Cell<bool>,
    /// It has no events of warnings, and refuses to be asked for them, as Linux's does.
    pub refuses_warnings: bool,
    /// Nor any at this address.
    pub refuses_events_at: Cell<Option<SocketAddr>>,
    /// What was asked for last.
    pub wanted: Cell<Events>,
    /// The page of changed namespaces is refused so often.
    pub refuses_changes: Cell<u32>,
    /// Which ones have changed it says so late, besides.
    pub changes_late: Cell<Duration>,
    /// Host, key; and who holds the reservation, which lets all write who are registered.
    pub keys: RefCell<BTreeMap<[u8; 16], u64>>,
    pub holder: Cell<Option<[u8; 16]>>,
    generation: Cell<u32>,
    /// As soon as somebody acquires the reservation somebody else comes to be registered, and goes again.
    pub is_busy: Cell<bool>,
    /// Hosts whose changes are under way.
    changing: RefCell<Vec<[u8; 16]>>,
    changed: Notify,
    /// Both outlive a restart.
    pub persists: Cell<bool>,
    pub discovered: RefCell<Vec<DiscoveryEntry>>,
    /// What it says instead of its page of discovery, from where it is asked for, and of its list of namespaces, after a number.
    pub tells_page: RefCell<Option<Tells<GetLogPage>>>,
    pub tells_namespaces: RefCell<Option<Tells<u32>>>,
    /// Answers to administration take so long; those to Identify do not come.
    pub admin_late: Cell<Duration>,
    pub hides: Cell<bool>,
    /// What it says has changed.
    pub changed_namespaces: RefCell<Vec<u32>>,
    pub ana_groups: u32,
    /// Opcodes of commands on blocks that were carried out, and at which address they came.
    pub seen: RefCell<Vec<(u8, SocketAddr)>>,
    listeners: RefCell<Vec<Rc<Listener>>>,
    controllers: Cell<u16>,
    /// As soon as a host begins to go, its I/O queues end,
    pub ends_queues: Cell<bool>,
    /// which they do from then on.
    leaves: Once,
    /// Hosts that have heard that their shutdown is complete.
    pub told_shut_down: Cell<u32>,
    /// It has no page of health.
    pub hides_health: Cell<bool>,
    /// Hosts may have been told other limits than its own: what exceeds them ends the connection, and is nobody's mistake.
    pub is_misquoted: Rc<Cell<bool>>,
}

/// A connection, as commands see it.
#[derive(Clone)]
struct From {
    address: SocketAddr,
    wire: MemoryStream,
    outbox: Rc<Outbox>,
    framing: Framing,
    host: Rc<Cell<[u8; 16]>>,
    is_discovery: Rc<Cell<bool>>,
    is_admin: Rc<Cell<bool>>,
    configuration: Rc<Cell<u32>>,
    shut_down_since: Rc<Cell<Option<Instant>>>,
    verifier: Rc<RefCell<Option<Verifier>>>,
    listener: Rc<Listener>,
}

impl Target {
    pub fn new() -> Self {
        let bytes = (BLOCKS * BLOCK_BYTES) as usize;
        Self {
            cached: RefCell::new(vec![0; bytes]),
            durable: RefCell::new(vec![0; bytes]),
            guid: Cell::new([9; 16]),
            blocks: Cell::new(BLOCKS),
            data_bytes_max: 64 << 10,
            in_capsule_bytes: 4096,
            unit_bytes: 20_000,
            host_unit_bytes: 10_000,
            transfer_bytes: 24_000,
            has_success_flag: true,
            digests: Digests { header: true, data: true },
            keeps_reservations: false,
            is_own: false,
            keep_alive_unit_ms: 1000,
            optional: OptionalCommands::DATASET_MANAGEMENT
                | OptionalCommands::WRITE_ZEROES
                | OptionalCommands::RESERVATIONS,
            limits: CommandLimits::default(),
            admitted: None,
            secrets: None,
            hangs_up_on_the_unproven: Cell::default(),
            asks_on_the_admin_queue_only: false,
            other_secrets: None,
            proven: Cell::new(0),
            states: RefCell::default(),
            damages: Cell::default(),
            damages_pages: Cell::default(),
            statuses: RefCell::default(),
            late: Cell::default(),
            answers_late: Cell::default(),
            flush_takes: Cell::default(),
            mute_at: RefCell::default(),
            registers_nobody_at: Cell::default(),
            hangs: Cell::default(),
            is_absent: Cell::default(),
            tells_absence_as_a_field: Cell::default(),
            refuses_warnings: false,
            refuses_events_at: Cell::default(),
            wanted: Cell::default(),
            refuses_changes: Cell::default(),
            changes_late: Cell::default(),
            persists: Cell::default(),
            keys: RefCell::default(),
            holder: Cell::default(),
            generation: Cell::default(),
            is_busy: Cell::default(),
            changing: RefCell::default(),
            changed: Notify::default(),
            discovered: RefCell::default(),
            tells_page: RefCell::default(),
            tells_namespaces: RefCell::default(),
            admin_late: Cell::default(),
            hides: Cell::default(),
            changed_namespaces: RefCell::new(vec![1]),
            ana_groups: 1,
            seen: RefCell::default(),
            listeners: RefCell::default(),
            controllers: Cell::default(),
            ends_queues: Cell::default(),
            leaves: Once::default(),
            told_shut_down: Cell::default(),
            hides_health: Cell::default(),
            is_misquoted: Rc::default(),
        }
    }

    /// What was not flushed is lost, and who the owner is, unless that was to be kept.
    pub fn restart(&self) {
        self.lose_cache();
        self.listeners.borrow_mut().clear();
        if !self.persists.get() {
            self.forget_owners();
        }
    }

    /// Nobody is registered any more.
    pub fn forget_owners(&self) {
        self.keys.borrow_mut().clear();
        self.holder.set(None);
        self.generation.set(0);
    }

    /// What was not flushed is lost.
    pub fn lose_cache(&self) {
        let durable = self.durable.borrow().clone();
        *self.cached.borrow_mut() = durable;
    }

    /// The namespace goes and comes back as after a loss of power, while its controllers stay.
    pub async fn reinsert(&self, away: Duration) {
        self.is_absent.set(true);
        self.tell(Event::NamespacesChanged);
        reactor::sleep(away).await;
        self.lose_cache();
        self.is_absent.set(false);
        self.tell(Event::NamespacesChanged);
    }

    /// How many were connected, ever.
    pub fn controllers(&self) -> u16 {
        self.controllers.get()
    }

    /// Another state of a path, which hosts are told of.
    pub fn set_state(&self, address: SocketAddr, state: AnaState) {
        self.states.borrow_mut().insert(address, state);
        self.tell(Event::AnaChanged);
    }

    /// Over one path: they are in the order in which they were connected.
    pub fn tell_over(&self, path: usize, event: Event) {
        self.listeners.borrow()[path].tell(event);
    }

    pub fn tell(&self, event: Event) {
        self.listeners.borrow().iter().for_each(|listener| listener.tell(event));
    }

    /// Addresses at which commands with this opcode came.
    pub fn came(&self, opcode: IoOpcode) -> Vec<SocketAddr> {
        let seen = self.seen.borrow();
        seen.iter().filter(|(code, _)| *code == opcode as u8).map(|(_, at)| *at).collect()
    }

    /// Serves whoever connects to `address`.
    pub fn listen(self: &Rc<Self>, net: &MemoryNetwork, address: SocketAddr) {
        let target = Rc::clone(self);
        net.listen(address, move |stream| {
            let target = Rc::clone(&target);
            reactor::spawn(async move { target.serve(stream, address).await });
        });
    }

    /// Serves a connection that came to `address`.
    pub async fn serve(self: Rc<Self>, wire: MemoryStream, address: SocketAddr) {
        let outbox = Rc::new(Outbox::default());
        let (sending, to) = (Rc::clone(&outbox), wire.clone());
        reactor::spawn(async move {
            let _ = sending.run(&to).await;
        });
        let mut inbox = Inbox::new(wire.clone());
        let _ = self.converse(&mut inbox, &wire, &outbox, address).await;
        outbox.close();
        self.listeners.borrow_mut().retain(|listener| !Rc::ptr_eq(&listener.outbox, &outbox));
        wire.close().await;
    }

    async fn converse(
        self: &Rc<Self>,
        inbox: &mut Inbox<MemoryStream>,
        wire: &MemoryStream,
        outbox: &Rc<Outbox>,
        address: SocketAddr,
    ) -> Option<()> {
        let (pdu, _) = self.unit(inbox, Digests::default()).await?;
        let Pdu::InitializeRequest(theirs) = pdu else { return None };
        let digests = theirs.digests.and(self.digests);
        let ours = Initialize { alignment_bytes: 64, digests, limit: self.host_unit_bytes };
        let head = Framing::FIRST.head(&Pdu::InitializeResponse(ours), 0);
        outbox.push(Outgoing { head: &head, ..Outgoing::default() });
        let framing = Framing { digests, alignment_bytes: theirs.alignment_bytes };
        let listener = Listener::new(outbox, framing);
        let from = From {
            address,
            wire: wire.clone(),
            outbox: Rc::clone(outbox),
            framing,
            listener,
            host: Rc::default(),
            is_discovery: Rc::default(),
            is_admin: Rc::default(),
            configuration: Rc::default(),
            shut_down_since: Rc::default(),
            verifier: Rc::default(),
        };
        let mut open: BTreeMap<u16, (Command, Vec<u8>, u32)> = BTreeMap::new();
        let leaves = async {
            self.leaves.happened().await;
            if from.is_admin.get() {
                pending::<()>().await;
            }
        };
        let mut leaves = pin!(leaves);
        loop {
            let unit = match select(pin!(self.unit(inbox, digests)), &mut leaves).await {
                Either::Left((unit, _)) => unit,
                Either::Right(_) => None,
            };
            let (pdu, data) = unit?;
            match pdu {
                Pdu::Command(command) => {
                    let is_to_us = command.opcode() & 0b11 == 1;
                    match command.data() {
                        DataPointer::Transport { bytes } if is_to_us && bytes > 0 => {
                            open.insert(command.id(), (command, Vec::new(), bytes));
                            // As many requests at once as the host takes.
                            let mut at = 0;
                            for tag in 0..=theirs.limit {
                                at += self.ask(&from, command.id(), tag as u16, at, bytes);
                            }
                        }
                        _ => self.begin(&from, command, data),
                    }
                }
                Pdu::HostData { transfer, is_last } => {
                    let (_, so_far, bytes) = open.get_mut(&transfer.command)?;
                    assert_eq!(transfer.at as usize, so_far.len(), "in order");
                    let is_taken = data.len() <= self.host_unit_bytes as usize;
                    so_far.extend(data);
                    let (now, bytes) = (so_far.len() as u32, *bytes);
                    let ends = now.is_multiple_of(self.transfer_bytes) || now == bytes;
                    if !(is_taken && is_last == ends) {
                        assert!(self.is_misquoted.get(), "{transfer:?}, last: {is_last}");
                        return None;
                    }
                    if now == bytes {
                        let (command, data, _) = open.remove(&transfer.command)?;
                        self.begin(&from, command, data);
                    } else if is_last {
                        let asked = now + theirs.limit * self.transfer_bytes;
                        if asked < bytes {
                            self.ask(&from, transfer.command, transfer.tag, asked, bytes);
                        }
                    }
                }
                _ => return None,
            }
        }
    }

    /// Asks for the data of a command from `at` on, if there are any.
    fn ask(&self, from: &From, command: u16, tag: u16, at: u32, bytes: u32) -> u32 {
        let bytes = self.transfer_bytes.min(bytes.saturating_sub(at));
        if bytes > 0 {
            let pdu = Pdu::ReadyToTransfer(Transfer { command, tag, at, bytes });
            let head = from.framing.head(&pdu, 0);
            from.outbox.push(Outgoing { head: &head, ..Outgoing::default() });
        }
        bytes
    }

    async fn unit(
        &self,
        inbox: &mut Inbox<MemoryStream>,
        digests: Digests,
    ) -> Option<(Pdu, Vec<u8>)> {
        let common = inbox.head(COMMON_BYTES).await.ok()??;
        let common = Common::parse(common.try_into().expect("as many")).ok()?;
        let rest = inbox.head(common.rest_bytes(digests)).await.ok()??;
        let pdu = common.pdu(rest, digests).ok()?;
        let (padding, bytes) = common.data_bytes(digests).ok()?;
        inbox.skip(padding as u64).await.ok()?;
        let data = inbox.payload(bytes).await.ok()?.to_vec();
        if bytes > 0 && common.has_data_digest(digests) {
            let told = inbox.head(4).await.ok()??;
            assert_eq!(told, crc32c(&data).to_le_bytes());
        }
        Some((pdu, data))
    }

    fn begin(self: &Rc<Self>, from: &From, command: Command, data: Vec<u8>) {
        let (target, from) = (Rc::clone(self), from.clone());
        let is_fabrics = command.opcode() == AdminOpcode::Fabrics as u8;
        if let Some(verifier) = &*from.verifier.borrow() {
            let may_do_without = self.asks_on_the_admin_queue_only && !from.is_admin.get();
            let is_proven = verifier.is_authenticated() || may_do_without;
            assert!(is_fabrics || is_proven, "nothing comes before the proof");
        }
        reactor::spawn(async move {
            let is_admin = from.is_admin.get() || command.opcode() == AdminOpcode::Fabrics as u8;
            let done = match is_admin {
                true => target.administer(&from, &command, &data),
                false => target.carry_out(&from, &command, &data).await,
            };
            if is_admin && !target.admin_late.get().is_zero() {
                reactor::sleep(target.admin_late.get()).await;
            }
            let asks_for_changes = is_admin
                && command.opcode() == AdminOpcode::GetLogPage as u8
                && GetLogPage::of(&command).page == LogPage::ChangedNamespaces as u8;
            if asks_for_changes && !target.changes_late.get().is_zero() {
                reactor::sleep(target.changes_late.get()).await;
            }
            let is_write = !is_admin && command.opcode() == IoOpcode::Write as u8;
            if is_write && !target.answers_late.get().is_zero() {
                reactor::sleep(target.answers_late.get()).await;
            }
            if let Some((status, result, data)) = done {
                target.answer(&from, &command, status, result, &data);
            }
        });
    }

    fn answer(&self, from: &From, command: &Command, status: Status, result: u64, data: &[u8]) {
        let bytes = command.data().bytes() as usize;
        let id = command.id();
        let mut at = 0;
        let mut is_told = false;
        while status.is_success() && at < data.len().min(bytes) {
            let part = &data[at..data.len().min(bytes).min(at + self.unit_bytes)];
            let is_last = at + part.len() == bytes;
            let is_success = is_last && self.has_success_flag && !from.is_admin.get();
            let transfer =
                Transfer { command: id, tag: 0, at: at as u32, bytes: part.len() as u32 };
            let pdu = Pdu::ControllerData { transfer, is_last, is_success };
            let mut sent = part.to_vec();
            if from.framing.digests.data {
                sent.extend(crc32c(part).to_le_bytes());
                let left = match from.is_admin.get() {
                    true => &self.damages_pages,
                    false => &self.damages,
                };
                if left.get() > 0 {
                    left.set(left.get() - 1);
                    sent[0] ^= 1;
                }
            }
            let head = from.framing.head(&pdu, part.len());
            let data = Buf::copy_of(&sent).into_vec();
            from.outbox.push(Outgoing { head: &head, data, ..Outgoing::default() });
            at += part.len();
            is_told = is_success;
        }
        if !is_told {
            let completion = Completion { result, queue_head: 0, id, status, has_more: false };
            let head = from.framing.head(&Pdu::Response(completion), 0);
            from.outbox.push(Outgoing { head: &head, ..Outgoing::default() });
        }
    }

    fn administer(
        &self,
        from: &From,
        command: &Command,
        data: &[u8],
    ) -> Option<(Status, u64, Vec<u8>)> {
        let well = |result| Some((Status::SUCCESS, result, Vec::new()));
        let shows = |page: Vec<u8>| Some((Status::SUCCESS, 0, page));
        match AdminOpcode::of(command.opcode()) {
            Some(AdminOpcode::Fabrics) => match FabricsType::of(command.fabrics_type())? {
                FabricsType::Connect => {
                    let connect = Connect::of(command);
                    let data: &[u8; CONNECT_BYTES] = data.try_into().expect("as many");
                    let data = ConnectData::parse(data).expect("sound");
                    if self.admitted.as_ref().is_some_and(|host| *host != data.host) {
                        return Some((Status::CONNECT_INVALID_HOST, 0, Vec::new()));
                    }
                    from.host.set(data.host_id);
                    from.is_admin.set(connect.queue == 0);
                    if from.is_admin.get() {
                        self.listeners.borrow_mut().push(Rc::clone(&from.listener));
                    }
                    from.is_discovery.set(data.subsystem.as_str() == levada_nvme::DISCOVERY_NQN);
                    self.controllers.set(self.controllers.get() + 1);
                    let asks = self.secrets.is_some()
                        && (from.is_admin.get() || !self.asks_on_the_admin_queue_only);
                    let proof = if asks { MUST_AUTHENTICATE } else { 0 };
                    let names = Names { host: data.host, subsystem: data.subsystem };
                    let others = self.other_secrets.clone().filter(|_| !from.is_admin.get());
                    let verifier = others.or_else(|| self.secrets.clone());
                    let verifier = verifier.map(|secrets| Verifier::new(names, secrets));
                    from.verifier.replace(verifier);
                    well(u64::from(self.controllers.get()) | proof)
                }
                FabricsType::AuthenticationSend => {
                    let mut verifier = from.verifier.borrow_mut();
                    let Some(verifier) = verifier.as_mut() else {
                        return Some((Status::INVALID_OPCODE, 0, Vec::new()));
                    };
                    let was = verifier.is_authenticated();
                    verifier.receive(data);
                    if !was && verifier.is_authenticated() {
                        self.proven.set(self.proven.get() + 1);
                    }
                    well(0)
                }
                FabricsType::AuthenticationReceive => {
                    let mut verifier = from.verifier.borrow_mut();
                    let mut message = verifier.as_mut()?.send(&mut reactor::fill_random);
                    // AUTH_Failure1 (NVM Express Base Specification, authentication message identifiers).
                    if self.hangs_up_on_the_unproven.get() && message.get(1) == Some(&0xf1) {
                        let wire = from.wire.clone();
                        reactor::spawn(async move { wire.close().await });
                        return None;
                    }
                    message.resize(AuthenticationTransfer::of(command).bytes as usize, 0);
                    shows(message)
                }
                FabricsType::PropertyGet => {
                    let access = PropertyAccess::of(command);
                    let configuration = Configuration(from.configuration.get());
                    match Property::of(access.offset)? {
                        Property::Capabilities => {
                            let timeout = 1;
                            well(Capabilities { queue_entries_max_less_one: 63, timeout }.value())
                        }
                        _ => well(u64::from(
                            ControllerState {
                                is_ready: configuration.is_enabled(),
                                has_failed: false,
                                shutdown: match from.shut_down_since.get() {
                                    Some(since) if since.elapsed() >= self.flush_takes.get() => {
                                        self.told_shut_down.set(self.told_shut_down.get() + 1);
                                        Shutdown::Complete
                                    }
                                    Some(_) => Shutdown::UnderWay,
                                    None => Shutdown::None,
                                },
                            }
                            .value(),
                        )),
                    }
                }
                FabricsType::PropertySet => {
                    let configuration = PropertyAccess::of(command).value as u32;
                    from.configuration.set(configuration);
                    if Configuration(configuration).is_shutting_down() {
                        from.shut_down_since.set(Some(reactor::now()));
                        if self.ends_queues.get() {
                            self.leaves.happen();
                        }
                    }
                    well(0)
                }
                _ => None,
            },
            Some(AdminOpcode::Identify) if self.hides.get() => None,
            Some(AdminOpcode::Identify) => {
                let guid = self.guid.get();
                match Identify::of(command.dword(10) as u8)? {
                    Identify::Controller => shows(self.controller(from).to_bytes()),
                    Identify::Namespace => {
                        let identity = NamespaceIdentity {
                            blocks: self.blocks.get(),
                            block_bytes: BLOCK_BYTES,
                            write_blocks_best: 0,
                            discard_blocks: 0,
                            has_reservations: true,
                            keeps_reservations: self.keeps_reservations,
                            is_read_only: false,
                            ana_group: 1,
                            guid,
                        };
                        match self.is_absent.get() {
                            true => shows(vec![0; IDENTIFY_BYTES]),
                            false => shows(identity.to_bytes()),
                        }
                    }
                    Identify::CommandSetController => shows(self.limits.to_bytes()),
                    Identify::ActiveNamespaces => match &*self.tells_namespaces.borrow() {
                        Some(tells) => shows(tells(&command.namespace())),
                        None => shows(namespace_list([1].into_iter(), command.namespace())),
                    },
                    Identify::NamespaceDescriptors => shows(namespace_descriptors(guid)),
                    _ => shows(vec![0; IDENTIFY_BYTES]),
                }
            }
            Some(AdminOpcode::SetFeatures)
                if command.dword(10) == Feature::AsynchronousEvents as u32 =>
            {
                let wanted = Events::from_bits_retain(command.dword(11));
                if self.refuses_warnings && wanted.intersects(Events::WARNINGS) {
                    let refused = Status::INVALID_FIELD.and_do_not_retry();
                    return Some((refused, 0, Vec::new()));
                }
                self.wanted.set(wanted);
                well(0)
            }
            Some(AdminOpcode::SetFeatures) => well(u64::from(command.dword(11))),
            Some(AdminOpcode::GetLogPage) => {
                let get = GetLogPage::of(command);
                if let Some(tells) = &*self.tells_page.borrow()
                    && get.page == LogPage::Discovery as u8
                {
                    return shows(tells(&get));
                }
                let state = self.states.borrow().get(&from.address).copied().unwrap_or_default();
                let group = AnaGroup { id: 1, state, changes: 0, namespaces: vec![1] };
                let mut page = match LogPage::of(get.page)? {
                    LogPage::ChangedNamespaces if get.bytes != 4096 => {
                        return Some((Status::INTERNAL_ERROR, 0, Vec::new()));
                    }
                    LogPage::ChangedNamespaces if self.refuses_changes.get() > 0 => {
                        self.refuses_changes.set(self.refuses_changes.get() - 1);
                        return Some((Status::INTERNAL_ERROR, 0, Vec::new()));
                    }
                    LogPage::ChangedNamespaces => {
                        log::changed_namespaces(&self.changed_namespaces.borrow())
                    }
                    LogPage::Health if self.hides_health.get() => {
                        return Some((Status::INVALID_FIELD.and_do_not_retry(), 0, Vec::new()));
                    }
                    LogPage::Ana => log::ana(0, &[group], false),
                    LogPage::Discovery => log::discovery(4, &self.discovered.borrow()),
                    LogPage::Health => log::Health {
                        warnings: log::Warnings::RELIABILITY,
                        ..log::Health::default()
                    }
                    .to_bytes(),
                    _ => Vec::new(),
                };
                from.listener.has_read(get.page);
                page.resize((get.at + get.bytes) as usize, 0);
                shows(page[get.at as usize..].to_vec())
            }
            Some(AdminOpcode::AsynchronousEventRequest)
                if self.refuses_events_at.get() == Some(from.address) =>
            {
                Some((Status::INVALID_OPCODE.and_do_not_retry(), 0, Vec::new()))
            }
            Some(AdminOpcode::AsynchronousEventRequest) => {
                from.listener.asks(command.id());
                None
            }
            Some(AdminOpcode::KeepAlive) => well(0),
            _ => Some((Status::INVALID_OPCODE, 0, Vec::new())),
        }
    }

    fn controller(&self, from: &From) -> ControllerIdentity {
        ControllerIdentity {
            serial: "1".into(),
            model: if self.is_own { OWN_MODEL } else { "box" }.into(),
            firmware: "1".into(),
            id: 1,
            is_discovery: from.is_discovery.get(),
            data_bytes_max: self.data_bytes_max,
            in_capsule_bytes: self.in_capsule_bytes,
            events: Events::ANA | Events::NAMESPACES,
            optional: self.optional,
            has_namespace_health: false,
            has_volatile_cache: true,
            namespaces_max: 1,
            namespaces_at_once_max: 1,
            keep_alive_unit_ms: self.keep_alive_unit_ms,
            has_ana: true,
            ana_groups: self.ana_groups,
            queue_entries_max: 64,
            subsystem: Nqn::new(NQN).expect("a name"),
        }
    }

    async fn carry_out(
        &self,
        from: &From,
        command: &Command,
        data: &[u8],
    ) -> Option<(Status, u64, Vec<u8>)> {
        let opcode = IoOpcode::of(command.opcode())?;
        let host = from.host.get();
        let changes =
            matches!(opcode, IoOpcode::Write | IoOpcode::WriteZeroes | IoOpcode::DatasetManagement);
        // Whoever may when it comes may also when it is carried out.
        if changes && self.holder.get().is_some() && !self.keys.borrow().contains_key(&host) {
            return Some((Status::RESERVATION_CONFLICT.and_do_not_retry(), 0, Vec::new()));
        }
        let _changing = changes.then(|| Changing::of(self, host));
        if opcode == IoOpcode::Write && !self.late.get().is_zero() {
            reactor::sleep(self.late.get()).await;
        }
        if opcode == IoOpcode::Flush && !self.flush_takes.get().is_zero() {
            reactor::sleep(self.flush_takes.get()).await;
        }
        let needs_the_drive = matches!(opcode, IoOpcode::Read | IoOpcode::Write);
        if self.mute_at.borrow().contains(&from.address) || self.hangs.get() && needs_the_drive {
            return None;
        }
        if opcode == IoOpcode::ReservationRegister
            && self.registers_nobody_at.get() == Some(from.address)
        {
            return None;
        }
        if self.is_absent.get() {
            // An inactive one, to some.
            let status = match self.tells_absence_as_a_field.get() {
                true => Status::INVALID_FIELD,
                false => Status::INVALID_NAMESPACE,
            };
            return Some((status.and_do_not_retry(), 0, Vec::new()));
        }
        let state = self.states.borrow().get(&from.address).copied().unwrap_or_default();
        if !state.is_usable() {
            return Some((Status::ANA_INACCESSIBLE, 0, Vec::new()));
        }
        if let Some(status) = self.statuses.borrow_mut().pop() {
            return Some((status, 0, Vec::new()));
        }
        self.seen.borrow_mut().push((command.opcode(), from.address));
        if matches!(opcode, IoOpcode::ReservationRegister | IoOpcode::ReservationAcquire) {
            let status = self.reserve(host, opcode, command, data.try_into().ok()?).await;
            return Some((status, 0, Vec::new()));
        }
        let start = (command.first_block() * BLOCK_BYTES) as usize;
        let end = start + (command.blocks() * BLOCK_BYTES) as usize;
        let mut cached = self.cached.borrow_mut();
        let mut well = (Status::SUCCESS, 0, Vec::new());
        match opcode {
            IoOpcode::Read => well.2 = cached.get(start..end)?.to_vec(),
            IoOpcode::Write => {
                cached.get_mut(start..end)?.copy_from_slice(data);
                if command.is_fua() {
                    self.durable.borrow_mut()[start..end].copy_from_slice(data);
                }
            }
            IoOpcode::WriteZeroes => {
                let limit = self.limits.zeroes_bytes_max;
                if limit > 0 && (end - start) as u64 > limit {
                    return Some((Status::INVALID_FIELD.and_do_not_retry(), 0, Vec::new()));
                }
                cached.get_mut(start..end)?.fill(0);
            }
            IoOpcode::Flush => self.durable.borrow_mut().copy_from_slice(&cached),
            IoOpcode::DatasetManagement => {
                for range in ranges(data) {
                    let limit = self.limits.discard_blocks_max;
                    if limit > 0 && u64::from(range.blocks) > limit {
                        return Some((Status::INVALID_FIELD.and_do_not_retry(), 0, Vec::new()));
                    }
                    let start = (range.first_block * BLOCK_BYTES) as usize;
                    let bytes = (u64::from(range.blocks) * BLOCK_BYTES) as usize;
                    cached.get_mut(start..start + bytes)?.fill(0);
                }
            }
            IoOpcode::ReservationReport => well.2 = self.report().to_bytes(),
            _ => return Some((Status::INVALID_OPCODE, 0, Vec::new())),
        }
        if command.opcode() & 0b11 == 0b10 {
            well.2.resize(command.data().bytes() as usize, 0);
        }
        Some(well)
    }
}

//! Commands of an admin queue, and those of Fabrics after the queue is connected.

use crate::controller::{Attached, Controller, IO_QUEUES_MAX};
use crate::io::DATA_BYTES_MAX;
use crate::namespace::ANA_GROUP;
use crate::subsystem::{NAMESPACES_MAX, Subsystem};
use crate::target::Shared;
use levada_base::{Buf, IoVec};
use levada_nvme::fabrics::{Capabilities, Configuration, FabricsType, Property, PropertyAccess};
use levada_nvme::identify::{
    self, ControllerIdentity, EVERY_NAMESPACE, Events, IDENTIFY_BYTES, Identify, OWN_MODEL,
    OptionalCommands,
};
use levada_nvme::log::{self, AnaGroup, Event, GetLogPage, Health, LogPage};
use levada_nvme::{
    AdminOpcode, Command, Feature, IoOpcode, NOTIFICATION_BYTES, NoticeMask, Nqn, Status,
};
use std::net::SocketAddr;
use std::rc::Rc;

/// Entries of a queue, at most.
pub(crate) const QUEUE_ENTRIES_MAX: u16 = 1024;
/// Data within a command of an I/O queue, at most: a write of so many needs no round trip more.
pub(crate) const IN_CAPSULE_BYTES: usize = 16 << 10;
/// How long a controller may take to become ready, in units of 500 ms.
const READY_WITHIN: u8 = 10;
/// Of every controller (Identify Controller).
pub const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// How a command went well.
pub(crate) struct Answer {
    pub result: u64,
    pub data: IoVec,
}

impl Answer {
    pub(crate) fn result(result: u64) -> Self {
        Self { result, data: IoVec::new() }
    }

    pub(crate) fn data(bytes: &[u8]) -> Self {
        Self { result: 0, data: Buf::copy_of(bytes).into_vec() }
    }
}

/// Of a command that has data, or none, and nothing to say.
impl From<IoVec> for Answer {
    fn from(data: IoVec) -> Self {
        Self { result: 0, data }
    }
}

/// A controller, as seen through its admin queue.
pub(crate) struct Admin<'a> {
    pub shared: &'a Shared,
    pub controller: &'a Rc<Controller>,
    /// The address that the host came to.
    pub came_to: SocketAddr,
}

/// It would fail again.
const fn never(status: Status) -> Status {
    status.and_do_not_retry()
}

impl Admin<'_> {
    /// Carries out a command, but for Asynchronous Event Request.
    pub async fn carry_out(&self, command: &Command) -> Result<Answer, Status> {
        let opcode = AdminOpcode::of(command.opcode()).ok_or(never(Status::INVALID_OPCODE))?;
        if opcode != AdminOpcode::Fabrics && !self.controller.state().is_ready {
            return Err(never(Status::SEQUENCE_ERROR));
        }
        match opcode {
            AdminOpcode::Identify => self.identify(command).await,
            AdminOpcode::GetLogPage => self.log_page(command).await,
            AdminOpcode::Abort => Ok(self.abort(command).await),
            AdminOpcode::SetFeatures => self.set_features(command).await,
            AdminOpcode::GetFeatures => self.get_features(command).await,
            AdminOpcode::KeepAlive => Ok(Answer::result(0)),
            AdminOpcode::Fabrics => self.fabrics(command),
            AdminOpcode::AsynchronousEventRequest => Err(never(Status::INVALID_OPCODE)),
        }
    }

    /// Ends another command, if that is possible and it is there (Base, 5.1). What may be ended is said in `recall`.
    async fn abort(&self, command: &Command) -> Answer {
        const NOT_ABORTED: u64 = 1;
        let dword = command.dword(10);
        let (queue, id) = (dword as u16, (dword >> 16) as u16);
        let is_aborted = self.controller.recall(queue, id).await;
        Answer::result(if is_aborted { 0 } else { NOT_ABORTED })
    }

    fn controller_identity(&self) -> ControllerIdentity {
        let of_io = self.controller.subsystem();
        let serial = of_io.map_or(DISCOVERY_SERIAL, Subsystem::serial);
        ControllerIdentity {
            serial: serial.into(),
            model: OWN_MODEL.into(),
            firmware: FIRMWARE.into(),
            id: self.controller.id(),
            is_discovery: of_io.is_none(),
            data_bytes_max: DATA_BYTES_MAX,
            in_capsule_bytes: if of_io.is_some() { IN_CAPSULE_BYTES } else { 0 },
            events: match of_io {
                Some(_) => Events::NAMESPACES | Events::ANA,
                None => Events::DISCOVERY,
            },
            optional: match of_io {
                Some(_) => {
                    OptionalCommands::COMPARE
                        | OptionalCommands::DATASET_MANAGEMENT
                        | OptionalCommands::WRITE_ZEROES
                        | OptionalCommands::RESERVATIONS
                }
                None => OptionalCommands::empty(),
            },
            has_namespace_health: of_io.is_some(),
            has_volatile_cache: self.has_volatile_cache(),
            namespaces_max: if of_io.is_some() { NAMESPACES_MAX } else { 0 },
            namespaces_at_once_max: if of_io.is_some() { NAMESPACES_MAX } else { 0 },
            keep_alive_unit_ms: 1000,
            has_ana: of_io.is_some(),
            ana_groups: if of_io.is_some() { ANA_GROUP } else { 0 },
            queue_entries_max: QUEUE_ENTRIES_MAX,
            subsystem: match of_io {
                Some(subsystem) => subsystem.nqn().clone(),
                None => Nqn::discovery(),
            },
        }
    }

    async fn identify(&self, command: &Command) -> Result<Answer, Status> {
        /// Command sets are told apart by doubleword 11; NVM is 0.
        const COMMAND_SET: u32 = 0xff << 24;
        let dword = command.dword(10);
        let what = Identify::of(dword as u8).ok_or(never(Status::INVALID_FIELD))?;
        if u64::from(command.data().bytes()) < IDENTIFY_BYTES as u64 {
            return Err(never(Status::DATA_LENGTH_INVALID));
        }
        let first_controller = (dword >> 16) as u16;
        let Some(subsystem) = self.controller.subsystem() else {
            return match what {
                Identify::Controller => Ok(Answer::data(&self.controller_identity().to_bytes())),
                _ => Err(never(Status::INVALID_FIELD)),
            };
        };
        let all = || subsystem.namespaces().into_iter();
        let bytes = match what {
            Identify::Controller => self.controller_identity().to_bytes(),
            Identify::Namespace | Identify::AllocatedNamespace => {
                self.namespace_identity(command.namespace()).await?
            }
            Identify::NamespaceDescriptors => {
                let attached = self.attached(command.namespace()).await?;
                identify::namespace_descriptors(attached.opened.guid)
            }
            Identify::CommandSetNamespace
            | Identify::CommandSetController
            | Identify::CommandSetActiveNamespaces
                if command.dword(11) & COMMAND_SET != 0 =>
            {
                return Err(never(Status::INVALID_FIELD));
            }
            Identify::ActiveNamespaces
            | Identify::AllocatedNamespaces
            | Identify::CommandSetActiveNamespaces => {
                let after = command.namespace();
                // Reserved (Base, 5.15.2.5).
                if after >= u32::MAX - 1 {
                    return Err(never(Status::INVALID_NAMESPACE));
                }
                identify::namespace_list(all(), after)
            }
            // Nothing in them that is not told elsewhere: no protection information, no limits.
            Identify::CommandSetNamespace => {
                self.known(command.namespace())?;
                vec![0; IDENTIFY_BYTES]
            }
            Identify::CommandSetController => vec![0; IDENTIFY_BYTES],
            // It is about one namespace (Base, 5.15.2.9).
            Identify::NamespaceControllers if command.namespace() == EVERY_NAMESPACE => {
                return Err(never(Status::INVALID_FIELD));
            }
            Identify::NamespaceControllers => {
                self.known(command.namespace())?;
                // Each has all that there are.
                let is_there = subsystem.namespace(command.namespace()).is_some();
                let ids = if is_there { subsystem.controller_ids() } else { Vec::new() };
                identify::controller_list(ids.into_iter(), first_controller)
            }
            Identify::Controllers => {
                identify::controller_list(subsystem.controller_ids().into_iter(), first_controller)
            }
        };
        Ok(Answer::data(&bytes))
    }

    /// An identifier that a namespace may have.
    fn known(&self, id: u32) -> Result<(), Status> {
        match id {
            1..=NAMESPACES_MAX => Ok(()),
            _ => Err(never(Status::INVALID_NAMESPACE)),
        }
    }

    async fn attached(&self, id: u32) -> Result<Rc<Attached>, Status> {
        self.controller.attach(id).await
    }

    /// The namespace of a feature of reservations, or all that there are.
    async fn reservable_of(&self, namespace: u32) -> Result<Vec<Rc<Attached>>, Status> {
        let all = match (namespace, self.controller.subsystem()) {
            (EVERY_NAMESPACE, Some(subsystem)) => subsystem.namespaces(),
            (id, _) => vec![id],
        };
        let mut attached = Vec::new();
        for id in all {
            attached.push(self.reservable(id).await?);
        }
        Ok(attached)
    }

    /// A namespace that hosts may reserve.
    async fn reservable(&self, id: u32) -> Result<Rc<Attached>, Status> {
        let attached = self.attached(id).await?;
        let are_offered = attached.namespace.claims().are_offered();
        if are_offered { Ok(attached) } else { Err(never(Status::INVALID_FIELD)) }
    }

    async fn namespace_identity(&self, id: u32) -> Result<Vec<u8>, Status> {
        // Of all of them at once tells who can make some (Base, 5.15.2.1).
        self.known(id)?;
        match self.attached(id).await {
            Ok(attached) => {
                let claims = attached.namespace.claims();
                Ok(attached.opened.identity(attached.block_bytes, claims).to_bytes())
            }
            // One that is not there is all zeroes (Base, 5.15.2.1).
            Err(status) if status.is(Status::INVALID_NAMESPACE) => Ok(vec![0; IDENTIFY_BYTES]),
            Err(status) => Err(status),
        }
    }

    async fn log_page(&self, command: &Command) -> Result<Answer, Status> {
        let asked = GetLogPage::of(command);
        let page = LogPage::of(asked.page).ok_or(never(Status::INVALID_LOG_PAGE))?;
        let bytes = asked.bytes.min(u64::from(command.data().bytes()));
        if asked.bytes > bytes || bytes > DATA_BYTES_MAX || !asked.at.is_multiple_of(4) {
            return Err(never(Status::INVALID_FIELD));
        }
        let content = match (page, self.controller.subsystem()) {
            (LogPage::Discovery, None) => {
                let (generation, entries) = self.shared.discovery(self.controller, self.came_to);
                log::discovery(generation, &entries)
            }
            (LogPage::Errors, _) => self.controller.errors.page(),
            (LogPage::Firmware, _) => log::firmware_slots(FIRMWARE),
            (LogPage::Health, _) => self.health(command.namespace())?.to_bytes(),
            // A controller of discovery has no I/O queues.
            (LogPage::Effects, Some(_)) => log::effects(IoOpcode::ALL),
            (LogPage::Effects, None) => log::effects(&[]),
            (LogPage::ChangedNamespaces, Some(_)) => {
                log::changed_namespaces(&self.controller.notices.changed(asked.keeps_event))
            }
            (LogPage::Ana, Some(subsystem)) => {
                // That a volume has stopped is a change as well, and that it is another server's.
                let losses = subsystem.loss().map_or(0, |loss| loss as u64 + 1);
                let changes = self.controller.port().changes() + losses;
                let group = AnaGroup {
                    id: ANA_GROUP,
                    state: self.controller.ana_state(),
                    changes,
                    namespaces: subsystem.namespaces(),
                };
                log::ana(changes, &[group], asked.specific & 1 != 0)
            }
            (LogPage::Reservations, Some(_)) => {
                let page = self.controller.notices.read_reservation(asked.keeps_event);
                page.map_or(vec![0; NOTIFICATION_BYTES], |page| page.to_bytes())
            }
            (
                LogPage::Discovery
                | LogPage::Reservations
                | LogPage::ChangedNamespaces
                | LogPage::Ana,
                _,
            ) => {
                return Err(never(Status::INVALID_LOG_PAGE));
            }
        };
        if asked.at > content.len() as u64 {
            return Err(never(Status::INVALID_FIELD));
        }
        if !asked.keeps_event {
            // The log of reservations knows itself when it has been read.
            for event in Event::ALL.into_iter().filter(|event| *event != Event::ReservationNotice) {
                if event.page() == page {
                    self.controller.notices.read(event);
                }
            }
        }
        let mut content = content[asked.at as usize..].to_vec();
        content.resize(bytes as usize, 0);
        Ok(Answer::data(&content))
    }

    /// Of one namespace, or of all that there are: then numbers are summed up, and the worst of the rest is told.
    fn health(&self, namespace: u32) -> Result<Health, Status> {
        let power_on_hours = u128::from(self.shared.started.elapsed().as_secs() / 3600);
        // The log that it counts is the controller's, whatever the page is about.
        let error_entries = self.controller.errors.count().into();
        let blank =
            Health { spare_percent: 100, power_on_hours, error_entries, ..Health::default() };
        let Some(subsystem) = self.controller.subsystem() else { return Ok(blank) };
        if !matches!(namespace, 0 | EVERY_NAMESPACE) {
            let namespace = subsystem.namespace(namespace);
            let health = namespace.ok_or(never(Status::INVALID_NAMESPACE))?.health();
            let health = self.controller.judged(health);
            return Ok(Health { power_on_hours, error_entries, ..health });
        }
        let ids = subsystem.namespaces().into_iter();
        let all = ids.filter_map(|id| Some(subsystem.namespace(id)?.health()));
        let all = all.map(|health| self.controller.judged(health));
        Ok(all.fold(blank, |whole, one| Health {
            warnings: whole.warnings | one.warnings,
            kelvin: whole.kelvin.max(one.kelvin),
            spare_percent: whole.spare_percent.min(one.spare_percent),
            spare_threshold_percent: whole.spare_threshold_percent.max(one.spare_threshold_percent),
            used_percent: whole.used_percent.max(one.used_percent),
            read_units: whole.read_units + one.read_units,
            written_units: whole.written_units + one.written_units,
            reads: whole.reads + one.reads,
            writes: whole.writes + one.writes,
            busy_minutes: whole.busy_minutes.max(one.busy_minutes),
            power_cycles: whole.power_cycles.max(one.power_cycles),
            power_on_hours,
            unsafe_shutdowns: whole.unsafe_shutdowns.max(one.unsafe_shutdowns),
            media_errors: whole.media_errors + one.media_errors,
            error_entries,
            warm_minutes: whole.warm_minutes.max(one.warm_minutes),
            hot_minutes: whole.hot_minutes.max(one.hot_minutes),
        }))
    }

    async fn set_features(&self, command: &Command) -> Result<Answer, Status> {
        const SAVE: u32 = 1 << 31;
        let (dword10, value) = (command.dword(10), command.dword(11));
        let feature = Feature::of(dword10 as u8).ok_or(never(Status::INVALID_FIELD))?;
        if dword10 & SAVE != 0 {
            return Err(never(Status::FEATURE_NOT_SAVEABLE));
        }
        match feature {
            Feature::NumberOfQueues if self.controller.has_io_queues() => {
                Err(never(Status::SEQUENCE_ERROR))
            }
            Feature::NumberOfQueues => {
                let granted = queues(value)?;
                self.controller.queues_granted().set(Some(granted));
                Ok(Answer::result(granted.into()))
            }
            Feature::KeepAliveTimer => {
                self.controller.set_keep_alive_ms(value);
                Ok(Answer::result(0))
            }
            Feature::AsynchronousEvents => {
                self.controller.notices.set_wanted(Events::from_bits_retain(value));
                self.controller.feel_temperatures();
                Ok(Answer::result(0))
            }
            // What is not there has no state (Base, 5.21.1.6).
            Feature::VolatileWriteCache if !self.has_volatile_cache() => {
                Err(never(Status::INVALID_FIELD))
            }
            // Where there is one it is on, as flushes always mean something.
            Feature::VolatileWriteCache if value & 1 == 1 => Ok(Answer::result(0)),
            Feature::VolatileWriteCache => Err(never(Status::FEATURE_NOT_CHANGEABLE)),
            Feature::ReservationPersistence => {
                let is_kept = value & 1 != 0;
                let all = self.reservable_of(command.namespace()).await?;
                let (keeping, others): (Vec<_>, Vec<_>) =
                    all.iter().partition(|attached| attached.namespace.claims().can_be_kept());
                // None of them, unless all can.
                if is_kept && !others.is_empty() {
                    return Err(never(Status::FEATURE_NOT_CHANGEABLE));
                }
                for attached in keeping {
                    attached.namespace.claims().set_kept(is_kept).await.map_err(never)?;
                }
                Ok(Answer::result(0))
            }
            Feature::ReservationNotificationMask => {
                let masked = NoticeMask::from_bits_truncate(value);
                for attached in self.reservable_of(command.namespace()).await? {
                    attached.namespace.claims().masked().set(masked);
                }
                Ok(Answer::result(0))
            }
            // It came with Connect.
            Feature::HostIdentifier => Err(never(Status::SEQUENCE_ERROR)),
            Feature::TemperatureThreshold => {
                let at = threshold(value, true)?;
                let mut thresholds = self.controller.thresholds();
                thresholds[at] = value as u16;
                self.controller.set_thresholds(thresholds);
                Ok(Answer::result(0))
            }
            // There is one state.
            Feature::PowerManagement if value & 0x1f != 0 => Err(never(Status::INVALID_FIELD)),
            Feature::Arbitration
            | Feature::PowerManagement
            | Feature::ErrorRecovery
            | Feature::WriteAtomicity => {
                self.controller.features.borrow_mut().insert(feature as u8, value);
                Ok(Answer::result(0))
            }
        }
    }

    fn has_volatile_cache(&self) -> bool {
        self.controller.subsystem().is_some_and(Subsystem::has_volatile_cache)
    }

    async fn get_features(&self, command: &Command) -> Result<Answer, Status> {
        let (dword10, value) = (command.dword(10), command.dword(11));
        let feature = Feature::of(dword10 as u8).ok_or(never(Status::INVALID_FIELD))?;
        let result = match feature {
            Feature::NumberOfQueues => {
                let all = u32::from(IO_QUEUES_MAX - 1) * 0x1_0001;
                self.controller.queues_granted().get().unwrap_or(all)
            }
            Feature::KeepAliveTimer => self.controller.keep_alive_ms(),
            Feature::AsynchronousEvents => self.controller.notices.wanted().bits(),
            Feature::VolatileWriteCache if !self.has_volatile_cache() => {
                return Err(never(Status::INVALID_FIELD));
            }
            Feature::VolatileWriteCache => 1,
            Feature::ReservationPersistence => {
                let attached = self.reservable(command.namespace()).await?;
                u32::from(attached.namespace.claims().reservations().borrow().is_kept)
            }
            Feature::ReservationNotificationMask => {
                let attached = self.reservable(command.namespace()).await?;
                attached.namespace.claims().masked().get().bits()
            }
            Feature::HostIdentifier => {
                /// Only the long form is offered over fabrics.
                const LONG: u32 = 1;
                if value & LONG == 0 {
                    return Err(never(Status::HOST_ID_INCONSISTENT));
                }
                return Ok(Answer::data(self.controller.host_id()));
            }
            Feature::TemperatureThreshold => {
                u32::from(self.controller.thresholds()[threshold(value, false)?])
            }
            Feature::Arbitration
            | Feature::PowerManagement
            | Feature::ErrorRecovery
            | Feature::WriteAtomicity => {
                self.controller.features.borrow().get(&(feature as u8)).copied().unwrap_or(0)
            }
        };
        Ok(Answer::result(u64::from(result)))
    }
}

/// Which of a controller's thresholds is meant (Base, 5.21.1.4). There is no sensor but that of the whole.
fn threshold(value: u32, is_set: bool) -> Result<usize, Status> {
    const ALL_SENSORS: u32 = 0xf;
    let (sensor, which) = (value >> 16 & 0xf, value >> 20 & 0b11);
    let is_whole = sensor == 0 || is_set && sensor == ALL_SENSORS;
    if is_whole && which <= 1 { Ok(which as usize) } else { Err(never(Status::INVALID_FIELD)) }
}

/// How many queues a host gets that asks for so many, both less one (Base, 5.21.1.7).
fn queues(asked: u32) -> Result<u32, Status> {
    let (submission, completion) = (asked & 0xffff, asked >> 16);
    if submission == 0xffff || completion == 0xffff {
        return Err(never(Status::INVALID_FIELD));
    }
    let given = submission.min(completion).min(u32::from(IO_QUEUES_MAX) - 1);
    Ok(given * 0x1_0001)
}

const DISCOVERY_SERIAL: &str = "discovery";

impl Admin<'_> {
    /// Commands of Fabrics on a queue that is connected (Fabrics, 3.4 to 3.6).
    fn fabrics(&self, command: &Command) -> Result<Answer, Status> {
        let controller = self.controller;
        let kind = FabricsType::of(command.fabrics_type()).ok_or(never(Status::INVALID_OPCODE))?;
        let access = PropertyAccess::of(command);
        let property = Property::of(access.offset)
            .filter(|property| property.has_eight_bytes() == access.has_eight_bytes);
        match kind {
            FabricsType::PropertyGet => {
                let value = match property.ok_or(never(Status::INVALID_FIELD))? {
                    Property::Capabilities => {
                        let entries = QUEUE_ENTRIES_MAX - 1;
                        let capabilities = Capabilities {
                            queue_entries_max_less_one: entries,
                            timeout: READY_WITHIN,
                        };
                        capabilities.value()
                    }
                    Property::Version => u64::from(identify::VERSION),
                    Property::Configuration => u64::from(controller.configuration().0),
                    Property::Status => u64::from(controller.state().value()),
                    Property::SubsystemReset => return Err(never(Status::INVALID_FIELD)),
                };
                Ok(Answer::result(value))
            }
            FabricsType::PropertySet => match property {
                Some(Property::Configuration) => {
                    controller.configure(Configuration(access.value as u32)).map_err(never)?;
                    Ok(Answer::result(0))
                }
                _ => Err(never(Status::INVALID_FIELD)),
            },
            // Once, and before anything else.
            FabricsType::Connect => Err(never(Status::SEQUENCE_ERROR)),
            // Deleting single queues is not offered (Fabrics, 4.5.1).
            FabricsType::Disconnect
            | FabricsType::AuthenticationSend
            | FabricsType::AuthenticationReceive => Err(never(Status::INVALID_OPCODE)),
        }
    }
}

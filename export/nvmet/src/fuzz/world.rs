//! The target, its connections, and the steps that bytes stand for.

use super::line::{Asked, Line, Role, connect, enable, nqn};
use super::odd::{Odd, opens};
use super::{BLOCK_BYTES, LINES_MAX, LONG};
use crate::subsystem::{Hosts, Subsystem};
use crate::target::{Path, Target};
use crate::{AnaState, Claims, Health, Passage, Warnings};
use levada_base::choices::Choices;
use levada_base::reactor;
use levada_nvme::authentication::{Secret, Secrets};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, Configuration, Connect, ConnectData, Property, PropertyAccess,
};
use levada_nvme::keyring::Keyring;
use levada_nvme::pdu::{Digests, Initialize, Pdu, Transfer};
use levada_nvme::{AdminOpcode, Command, DISCOVERY_NQN, DataPointer, IoOpcode, Nqn};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

pub(super) struct World {
    pub target: Target,
    pub path: Path,
    pub open: Subsystem,
    pub volume: Rc<Odd>,
    pub guarded: Rc<Odd>,
    pub kelvin: Rc<Cell<u16>>,
    pub secrets: Secrets,
    pub lines: Vec<Option<Rc<Line>>>,
    /// The admin queue's line is the first of these; then its controller.
    pub controllers: Vec<(usize, u16, Nqn, u8)>,
    /// How many connections there have been.
    pub opened: u8,
}

impl World {
    pub fn new() -> Self {
        let target = Target::new();
        let path = target.port(([10, 0, 0, 1], 4420).into());
        let (volume, guarded) = (Odd::new(), Odd::guarded());
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
            opened: 0,
        };
        world.add_drive();
        world
    }

    pub fn add_drive(&self) {
        let kelvin = Rc::clone(&self.kelvin);
        let health = Rc::new(move || Health { kelvin: kelvin.get(), ..Health::default() });
        self.open.add_drive(2, opens(&self.volume, 2), health, Claims::default());
    }

    /// A connection, rather one of this role.
    pub fn line(&self, input: &mut Choices<'_>, role: Role) -> Option<Rc<Line>> {
        let mut open: Vec<_> = self.lines.iter().flatten().cloned().collect();
        open.retain(|line| !line.is_over.get());
        if !input.rarely(12) && open.iter().any(|line| line.role.get() == role) {
            open.retain(|line| line.role.get() == role);
        }
        (!open.is_empty()).then(|| open.swap_remove(input.below(open.len())))
    }

    /// A connection in a place that is free, or in that of another, which is closed.
    pub async fn open(&mut self, input: &mut Choices<'_>) -> (usize, Rc<Line>) {
        let is_free = |line: &Option<Rc<Line>>| line.as_ref().is_none_or(|one| one.is_over.get());
        let free = self.lines.iter().position(is_free);
        let place = free.unwrap_or_else(|| input.below(LINES_MAX));
        self.controllers.retain(|(of, ..)| *of != place);
        if let Some(old) = self.lines[place].take() {
            old.close().await;
        }
        self.opened += 1;
        let line = Line::open(&self.path, self.opened);
        self.lines[place] = Some(Rc::clone(&line));
        (place, line)
    }

    pub async fn step(&mut self, input: &mut Choices<'_>) {
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
    pub async fn arrive(&mut self, input: &mut Choices<'_>) {
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
            let (of, controller, subsystem, number) =
                self.controllers[input.below(self.controllers.len())].clone();
            let host = nqn(&format!("host-{number}"));
            line.role.set(role_in(&subsystem, Role::Io));
            line.is_guarded.set(line.role.get() == Role::Guarded);
            line.admin.replace(lines[of].clone());
            let data = ConnectData { host_id: [number; 16], controller, subsystem, host };
            line.queue.set(1 + u16::from(flags >> 6));
            if connect(&line, data, line.queue.get(), 0).await.is_some() {
                self.connected(&line, flags & 4 != 0).await;
            }
            return;
        }
        let (subsystem, number) = match input.below(8) {
            0 => (Nqn::discovery(), number),
            1 | 2 => (nqn("guarded"), 0),
            _ => (nqn("open"), number),
        };
        line.role.set(role_in(&subsystem, Role::Admin));
        line.is_guarded.set(line.role.get() == Role::Guarded);
        let data = ConnectData {
            host_id: [number; 16],
            controller: ANY_CONTROLLER,
            subsystem: subsystem.clone(),
            host: nqn(&format!("host-{number}")),
        };
        let keep_alive_ms = if flags & 48 == 48 { 4000 } else { 0 };
        if let Some(controller) = connect(&line, data, 0, keep_alive_ms).await {
            self.connected(&line, flags & 4 != 0).await;
            // Who looks around only is sent away after a while as well.
            let falls_silent = keep_alive_ms > 0 || subsystem.as_str() == DISCOVERY_NQN;
            line.may_end.set(line.may_end.get() || falls_silent);
            self.controllers.push((place, controller, subsystem, number));
            if flags & 192 != 192 {
                enable(&line).await;
                line.is_reset.set(false);
            }
        }
    }

    /// From here on it ends for a reason only; where a proof is wanted, once it has given one.
    async fn connected(&self, line: &Line, is_to_prove: bool) {
        let is_let_in = match line.is_guarded.get() {
            true => is_to_prove && self.prove_soundly(line).await.is_some(),
            false => true,
        };
        line.may_end.set(!is_let_in);
    }

    /// The first units are wrong somewhere, or come out of turn.
    pub async fn begin_wrongly(&mut self, input: &mut Choices<'_>) {
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
        line.is_guarded.set(data.subsystem == nqn("guarded"));
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
    pub fn pointer(&self, input: &mut Choices<'_>, bytes: usize) -> DataPointer {
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
    pub async fn command(&self, input: &mut Choices<'_>, line: &Line, command: Command) {
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
            DataPointer::InCapsule { bytes, .. } if bytes <= 20_000 => {
                vec![line.tag; bytes as usize]
            }
            _ => Vec::new(),
        };
        line.send(input, &Pdu::Command(command), &data).await;
        if !input.rarely(4) {
            line.settle().await;
        }
    }

    /// Commands that are not answered, by their queues.
    pub fn waiting(&self) -> Vec<(u16, u16)> {
        let mut waiting = Vec::new();
        for line in self.lines.iter().flatten().filter(|line| !line.is_over.get()) {
            waiting.extend(line.sent.borrow().keys().map(|id| (line.queue.get(), *id)));
        }
        waiting
    }

    pub async fn administer(&self, input: &mut Choices<'_>) {
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

    pub fn fabrics(&self, input: &mut Choices<'_>, id: u16) -> Command {
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

    pub async fn exchange(&self, input: &mut Choices<'_>) {
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
    pub async fn send_data(&self, input: &mut Choices<'_>) {
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
        let data = vec![line.tag; transfer.bytes as usize];
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
        let is_given_up = line.given_up.borrow().contains(&(transfer.command, transfer.tag));
        let is_refused = is_sound && !is_given_up && Some(transfer) != part.map(|(part, _)| part);
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

    pub async fn send_anything(&self, input: &mut Choices<'_>) {
        let Some(line) = self.line(input, Role::Io).filter(|_| input.rarely(3)) else { return };
        line.is_sound.set(false);
        let count = input.below(150);
        let bytes = input.bytes(count);
        line.send_bytes(&bytes).await;
        line.settle().await;
    }

    /// Something becomes of what is shown.
    pub fn change(&self, input: &mut Choices<'_>) {
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
    pub fn mend(&self) {
        self.path.set_passage(Passage::Open);
        self.path.set_state(AnaState::Optimized);
    }
}

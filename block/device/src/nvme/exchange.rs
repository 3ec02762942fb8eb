//! What a host knows of one queue, without I/O: which commands are open, and how much of their data was moved.
//!
//! Units of the other side go in, and out comes what is to be done about them: where data land, which data are sent, which command is
//! done. Only the sums are kept here; buffers are with `queue`.
//!
//! What always holds, whatever the other side sends:
//! - Data land in their order, each byte once, and none outside of what the command asked for.
//! - A command is done well only when all its data have landed, or all of them were asked for: memory that nobody filled is never
//!   handed out as data, and a write whose data nobody wanted is no write.
//! - An answer to a command that is not open ends the connection. Identifiers come back only after a while, so a late answer is not
//!   taken for that of another command.

use levada_nvme::pdu::{Fatal, Pdu, Terminated, Transfer};
use levada_nvme::{Completion, Status};

/// Commands open at once, at most: so many bits of an identifier say which.
pub(crate) const COMMANDS_MAX: usize = (1 << INDEX_BITS) - 1;
const INDEX_BITS: u16 = 10;
/// The rest of the bits count how often the place was used.
const GENERATIONS: u16 = 1 << (16 - INDEX_BITS);

/// The place of a command's identifier.
pub(crate) fn index_of(id: u16) -> usize {
    usize::from(id & ((1 << INDEX_BITS) - 1))
}

/// Why nothing more can be said to the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error(transparent)]
    Fatal(#[from] Fatal),
    #[error(transparent)]
    Terminated(#[from] Terminated),
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The next `bytes` of the command's data follow; then [`Exchange::landed`].
    Land { id: u16, at: u32, bytes: u32 },
    /// These data of the command are to be sent.
    Send(Transfer),
    /// The command is no longer open.
    Done { id: u16, completion: Completion },
}

struct Open {
    /// Data to be received, and how much of them was.
    into: u32,
    landed: u32,
    /// The last of them was there, or is: none follow.
    has_last: bool,
    /// Data to be asked for, and how much of them was.
    from: u32,
    asked: u32,
    /// What lands now, and whether the command is done with it.
    landing: Option<(u32, bool)>,
}

#[derive(Default)]
struct Place {
    generation: u16,
    open: Option<Open>,
}

/// See the module.
pub(crate) struct Exchange {
    places: Vec<Place>,
    /// The longest unused is taken first.
    free: std::collections::VecDeque<u16>,
}

/// The unit's field that names a command, and the one that says where its data are, as errors tell them.
const ID_AT: Fatal = Fatal::Field { at: 8 };
const BYTES_AT: Fatal = Fatal::Field { at: 16 };
const FLAGS_AT: Fatal = Fatal::Field { at: 1 };

impl Exchange {
    /// For `commands` at once, at most [`COMMANDS_MAX`].
    pub fn new(commands: usize) -> Self {
        assert!((1..=COMMANDS_MAX).contains(&commands), "{commands} commands at once");
        let mut places = Vec::new();
        places.resize_with(commands, Place::default);
        Self { places, free: (0..commands as u16).collect() }
    }

    /// Opens a command and names it: `into` bytes are to land, `from` bytes are to be asked for. The caller sees to it that there is
    /// room.
    pub fn open(&mut self, into: u32, from: u32) -> u16 {
        let index = self.free.pop_front().expect("room for another command");
        let place = &mut self.places[usize::from(index)];
        assert!(place.open.is_none(), "a free place is free");
        place.generation = (place.generation + 1) % GENERATIONS;
        let open = Open { into, landed: 0, has_last: false, from, asked: 0, landing: None };
        place.open = Some(open);
        place.generation << INDEX_BITS | index
    }

    /// Something of the command may have been carried out: the other side had everything, or at least some of its data.
    pub fn may_have_begun(&self, id: u16) -> bool {
        let open = self.places[index_of(id)].open.as_ref();
        open.is_some_and(|open| open.from == 0 || open.asked > 0)
    }

    /// What a unit of the other side, with `data_bytes` behind it, means.
    ///
    /// # Errors
    ///
    /// [`Broken`]: the connection must end.
    pub fn take(&mut self, pdu: &Pdu, data_bytes: usize) -> Result<Step, Broken> {
        match *pdu {
            Pdu::ControllerData { transfer, is_last, is_success } => {
                if transfer.bytes as usize != data_bytes || data_bytes == 0 {
                    return Err(BYTES_AT.into());
                }
                if is_success && !is_last {
                    return Err(FLAGS_AT.into());
                }
                let open = self.find(transfer.command)?;
                if open.has_last {
                    return Err(Fatal::Sequence.into());
                }
                let end = transfer.at.checked_add(transfer.bytes);
                if transfer.at != open.landed || end.is_none_or(|end| end > open.into) {
                    return Err(Fatal::OutOfRange.into());
                }
                open.has_last = is_last;
                open.landing = Some((transfer.bytes, is_success));
                Ok(Step::Land { id: transfer.command, at: transfer.at, bytes: transfer.bytes })
            }
            Pdu::ReadyToTransfer(transfer) => {
                let open = self.find(transfer.command)?;
                if transfer.bytes == 0 {
                    return Err(BYTES_AT.into());
                }
                let end = transfer.at.checked_add(transfer.bytes);
                if transfer.at != open.asked || end.is_none_or(|end| end > open.from) {
                    return Err(Fatal::OutOfRange.into());
                }
                open.asked += transfer.bytes;
                Ok(Step::Send(transfer))
            }
            Pdu::Response(completion) => self.done(completion.id, completion),
            Pdu::Terminates(terminated) => Err(terminated.into()),
            Pdu::InitializeRequest(_)
            | Pdu::InitializeResponse(_)
            | Pdu::Command(_)
            | Pdu::HostData { .. } => Err(Fatal::Sequence.into()),
        }
    }

    /// The data of [`Step::Land`] are where they belong. `Some`: the command is done with them.
    ///
    /// # Errors
    ///
    /// [`Broken`]: it would be, but data are missing.
    pub fn landed(&mut self, id: u16) -> Result<Option<Step>, Broken> {
        let open = self.find(id)?;
        let (bytes, is_success) = open.landing.take().expect("data were to land");
        open.landed += bytes;
        if !is_success {
            return Ok(None);
        }
        let completion =
            Completion { result: 0, queue_head: 0, id, status: Status::SUCCESS, has_more: false };
        self.done(id, completion).map(Some)
    }

    fn done(&mut self, id: u16, completion: Completion) -> Result<Step, Broken> {
        let open = self.find(id)?;
        let is_whole = open.landed == open.into && open.asked == open.from;
        if completion.status.is_success() && !is_whole {
            return Err(Fatal::Sequence.into());
        }
        self.places[index_of(id)].open = None;
        self.free.push_back(index_of(id) as u16);
        Ok(Step::Done { id, completion })
    }

    fn find(&mut self, id: u16) -> Result<&mut Open, Fatal> {
        let place = self.places.get_mut(index_of(id)).ok_or(ID_AT)?;
        if place.generation != id >> INDEX_BITS {
            return Err(ID_AT);
        }
        place.open.as_mut().ok_or(ID_AT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn data(command: u16, at: u32, bytes: u32, is_last: bool, is_success: bool) -> Pdu {
        let transfer = Transfer { command, tag: 0, at, bytes };
        Pdu::ControllerData { transfer, is_last, is_success }
    }

    fn answer(id: u16, status: Status) -> Pdu {
        Pdu::Response(Completion { result: 0, queue_head: 0, id, status, has_more: false })
    }

    fn asks(command: u16, at: u32, bytes: u32) -> Pdu {
        Pdu::ReadyToTransfer(Transfer { command, tag: 9, at, bytes })
    }

    #[test]
    fn data_land_in_any_number_of_units() {
        let mut exchange = Exchange::new(2);
        let id = exchange.open(10, 0);
        let step = exchange.take(&data(id, 0, 4, false, false), 4);
        assert_eq!(step, Ok(Step::Land { id, at: 0, bytes: 4 }));
        assert_eq!(exchange.landed(id), Ok(None));
        let step = exchange.take(&data(id, 4, 6, true, false), 6);
        assert_eq!(step, Ok(Step::Land { id, at: 4, bytes: 6 }));
        assert_eq!(exchange.landed(id), Ok(None));
        assert!(matches!(
            exchange.take(&answer(id, Status::SUCCESS), 0),
            Ok(Step::Done { id: done, .. }) if done == id
        ));
        // Once.
        assert_eq!(exchange.take(&answer(id, Status::SUCCESS), 0), Err(ID_AT.into()));
        let id = exchange.open(3, 0);
        exchange.take(&data(id, 0, 3, true, true), 3).expect("lands");
        assert!(matches!(exchange.landed(id), Ok(Some(Step::Done { .. }))));
    }

    #[test]
    fn data_that_nobody_asked_for_land_nowhere() {
        let outside: Result<Step, Broken> = Err(Fatal::OutOfRange.into());
        for (pdu, bytes, told) in [
            (data(0, 1, 4, false, false), 4, outside),
            (data(0, 0, 11, false, false), 11, outside),
            (data(0, u32::MAX, 4, false, false), 4, outside),
            (data(0, 0, 4, false, false), 5, Err(BYTES_AT.into())),
            (data(0, 0, 0, false, false), 0, Err(BYTES_AT.into())),
            (data(0, 0, 4, false, true), 4, Err(FLAGS_AT.into())),
        ] {
            let mut exchange = Exchange::new(2);
            let id = exchange.open(10, 0);
            let Pdu::ControllerData { mut transfer, is_last, is_success } = pdu else { panic!() };
            transfer.command = id;
            let pdu = Pdu::ControllerData { transfer, is_last, is_success };
            assert_eq!(exchange.take(&pdu, bytes), told, "{pdu:?}");
        }
        // Of a write, of none, of another generation, behind the last, the same again.
        let mut exchange = Exchange::new(2);
        let write = exchange.open(0, 10);
        assert_eq!(exchange.take(&data(write, 0, 4, false, false), 4), outside);
        let read = exchange.open(10, 0);
        for wrong in [read ^ 1 << INDEX_BITS, 5, 0xffff] {
            assert_eq!(exchange.take(&data(wrong, 0, 4, false, false), 4), Err(ID_AT.into()));
        }
        exchange.take(&data(read, 0, 4, false, false), 4).expect("lands");
        exchange.landed(read).expect("landed");
        assert_eq!(exchange.take(&data(read, 0, 4, false, false), 4), outside);
        exchange.take(&data(read, 4, 4, true, false), 4).expect("lands");
        exchange.landed(read).expect("landed");
        let behind = exchange.take(&data(read, 8, 2, true, false), 2);
        assert_eq!(behind, Err(Fatal::Sequence.into()));
    }

    #[test]
    fn nothing_is_done_well_without_all_of_its_data() {
        let mut exchange = Exchange::new(4);
        let missing: Result<Step, Broken> = Err(Fatal::Sequence.into());
        let read = exchange.open(10, 0);
        assert_eq!(exchange.take(&answer(read, Status::SUCCESS), 0), missing);
        exchange.take(&data(read, 0, 4, true, true), 4).expect("lands");
        assert_eq!(exchange.landed(read), Err(Fatal::Sequence.into()));
        let write = exchange.open(0, 10);
        assert_eq!(exchange.take(&answer(write, Status::SUCCESS), 0), missing);
        assert!(!exchange.may_have_begun(write));
        exchange.take(&asks(write, 0, 6), 0).expect("sent");
        assert!(exchange.may_have_begun(write));
        assert_eq!(exchange.take(&asks(write, 0, 6), 0), Err(Fatal::OutOfRange.into()));
        assert_eq!(exchange.take(&asks(write, 6, 5), 0), Err(Fatal::OutOfRange.into()));
        assert_eq!(exchange.take(&answer(write, Status::SUCCESS), 0), missing);
        // What failed needs none.
        let failed = exchange.take(&answer(write, Status::WRITE_FAULT), 0);
        assert!(matches!(failed, Ok(Step::Done { .. })));
    }

    #[test]
    fn an_identifier_comes_back_late() {
        let mut exchange = Exchange::new(COMMANDS_MAX);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..COMMANDS_MAX * usize::from(GENERATIONS) {
            let id = exchange.open(0, 0);
            assert!(id != 0xffff && seen.insert(id), "{id} again");
            exchange.take(&answer(id, Status::SUCCESS), 0).expect("done");
        }
    }

    proptest! {
        /// Random units, near to sensible ones, against a model: bytes of each command, each filled once.
        #[test]
        fn random_units_keep_the_promises(
            units in prop::collection::vec(
                (0_u8..4, 0_u16..6, 0_u32..12, 0_u32..12, any::<bool>(), any::<bool>()), 0..200
            )
        ) {
            let mut exchange = Exchange::new(4);
            let mut open: Vec<(u16, u32, u32, u32, u32)> = Vec::new();
            for (kind, which, at, bytes, is_last, is_success) in units {
                if open.len() < 4 && kind == 3 {
                    let (into, from) = if is_last { (at, 0) } else { (0, at) };
                    open.push((exchange.open(into, from), into, from, 0, 0));
                    continue;
                }
                let id = open.get(usize::from(which)).map_or(which, |open| open.0);
                let status = if is_success { Status::SUCCESS } else { Status::WRITE_FAULT };
                let pdu = match kind {
                    0 => data(id, at, bytes, is_last, is_success),
                    1 => asks(id, at, bytes),
                    _ => answer(id, status),
                };
                let mut step = exchange.take(&pdu, bytes as usize);
                if let Ok(Step::Land { id, at, bytes }) = step {
                    let it = open.iter_mut().find(|open| open.0 == id).expect("open");
                    prop_assert_eq!(at, it.3);
                    it.3 += bytes;
                    prop_assert!(it.3 <= it.1);
                    match exchange.landed(id) {
                        Ok(Some(done)) => step = Ok(done),
                        Ok(None) => continue,
                        Err(_) => return Ok(()),
                    }
                }
                match step {
                    Ok(Step::Send(transfer)) => {
                        let it = open.iter_mut().find(|open| open.0 == id).expect("open");
                        prop_assert_eq!(transfer.at, it.4);
                        it.4 += transfer.bytes;
                        prop_assert!(it.4 <= it.2);
                    }
                    Ok(Step::Done { id, completion }) => {
                        let at = open.iter().position(|open| open.0 == id).expect("open");
                        let it = open.remove(at);
                        let is_whole = it.1 == it.3 && it.2 == it.4;
                        prop_assert!(is_whole || !completion.status.is_success());
                    }
                    Ok(Step::Land { .. }) => unreachable!("handled"),
                    // The connection ends here.
                    Err(_) => return Ok(()),
                }
            }
        }
    }
}

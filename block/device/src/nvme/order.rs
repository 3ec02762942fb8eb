//! What is asked of whatever path there is, and why it was not carried out.

use super::unsettled::Change;
use super::verdict::Asked;
use crate::BlockError;
use levada_base::IoVec;
use levada_nvme::{Command, IoOpcode};

/// A command on blocks, as often as it takes.
#[derive(Clone)]
pub(crate) struct Order {
    pub command: Command,
    pub from: IoVec,
    pub change: Option<Change>,
    pub asked: Asked,
}

impl Order {
    /// It changes something, or says what of it is durable.
    pub fn is_for_owners(&self) -> bool {
        match IoOpcode::of(self.command.opcode()) {
            Some(
                IoOpcode::Flush
                | IoOpcode::Write
                | IoOpcode::WriteZeroes
                | IoOpcode::DatasetManagement,
            ) => true,
            Some(
                IoOpcode::Read
                | IoOpcode::Compare
                | IoOpcode::ReservationRegister
                | IoOpcode::ReservationReport
                | IoOpcode::ReservationAcquire
                | IoOpcode::ReservationRelease
                | IoOpcode::Fabrics,
            )
            | None => false,
        }
    }
}

/// Why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OrderError {
    /// Another host has the reservation.
    Conflict,
    Block(BlockError),
}

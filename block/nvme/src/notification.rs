//! Notifications of reservations: a page of the log for each (Base, 5.14.1.9.1), and which of them a host is spared (Base, 5.21.1.23).

use crate::field::{put, u32_at, u64_at};

pub const NOTIFICATION_BYTES: usize = 64;

/// What has become of a reservation, or of a registration (Base, 8.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReservationNotice {
    /// Another host has taken the registration of this one.
    RegistrationPreempted = 1,
    /// What all who are registered had is held no more, or as another type.
    ReservationReleased = 2,
    /// Another host has cleared all registrations.
    ReservationPreempted = 3,
}

impl ReservationNotice {
    fn of(code: u8) -> Option<Self> {
        [Self::RegistrationPreempted, Self::ReservationReleased, Self::ReservationPreempted]
            .into_iter()
            .find(|notice| *notice as u8 == code)
    }

    /// The bit that spares hosts of it.
    #[must_use]
    pub fn mask(self) -> NoticeMask {
        match self {
            Self::RegistrationPreempted => NoticeMask::REGISTRATION_PREEMPTED,
            Self::ReservationReleased => NoticeMask::RESERVATION_RELEASED,
            Self::ReservationPreempted => NoticeMask::RESERVATION_PREEMPTED,
        }
    }
}

bitflags::bitflags! {
    /// Notices that nobody wants of a namespace.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct NoticeMask: u32 {
        const REGISTRATION_PREEMPTED = 1 << 1;
        const RESERVATION_RELEASED = 1 << 2;
        const RESERVATION_PREEMPTED = 1 << 3;
    }
}

/// A page of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationNotification {
    /// Counts notifications of the controller, also those that nobody had room for; never 0.
    pub count: u64,
    pub notice: ReservationNotice,
    /// How many more there are.
    pub more: u8,
    pub namespace: u32,
}

impl ReservationNotification {
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; NOTIFICATION_BYTES];
        put(&mut bytes, 0, &self.count.to_le_bytes());
        (bytes[8], bytes[9]) = (self.notice as u8, self.more);
        put(&mut bytes, 12, &self.namespace.to_le_bytes());
        bytes
    }

    /// `None`: there is none, or of no kind that is known here.
    #[must_use]
    pub fn parse(bytes: &[u8; NOTIFICATION_BYTES]) -> Option<Self> {
        Some(Self {
            count: u64_at(bytes, 0),
            notice: ReservationNotice::of(bytes[8])?,
            more: bytes[9],
            namespace: u32_at(bytes, 12),
        })
    }
}

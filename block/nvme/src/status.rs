//! How a command went (Base, 4.6.1; Fabrics, 3.3.1).

use std::fmt;

/// The status field of a completion, without its phase tag.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Type in bits 10:8, code in bits 7:0.
    code: u16,
    /// The same command would fail again.
    pub do_not_retry: bool,
}

macro_rules! statuses {
    ($($(#[$meta:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$meta])* pub const $name: Self = Self::of($code);)*
        }

        /// What the specification calls it.
        fn name(code: u16) -> Option<&'static str> {
            match code {
                $($code => Some($text),)*
                _ => None,
            }
        }
    };
}

statuses! {
    SUCCESS = 0x000, "success";
    INVALID_OPCODE = 0x001, "invalid opcode";
    INVALID_FIELD = 0x002, "invalid field in command";
    ID_CONFLICT = 0x003, "command identifier conflict";
    /// Data did not arrive as they were sent, or not at all.
    DATA_TRANSFER_ERROR = 0x004, "data transfer error";
    INTERNAL_ERROR = 0x006, "internal error";
    ABORTED = 0x007, "command abort requested";
    INVALID_NAMESPACE = 0x00b, "invalid namespace or format";
    SEQUENCE_ERROR = 0x00c, "command sequence error";
    DATA_LENGTH_INVALID = 0x00f, "data SGL length invalid";
    DESCRIPTOR_TYPE_INVALID = 0x011, "SGL descriptor type invalid";
    OFFSET_INVALID = 0x016, "SGL offset invalid";
    HOST_ID_INCONSISTENT = 0x018, "host identifier inconsistent format";
    KEEP_ALIVE_INVALID = 0x01a, "keep alive timeout invalid";
    ABORTED_BY_PREEMPTION = 0x01b, "command aborted due to preempt and abort";
    WRITE_PROTECTED = 0x020, "namespace is write protected";
    TRANSIENT_TRANSPORT = 0x022, "transient transport error";
    OUT_OF_RANGE = 0x080, "LBA out of range";
    CAPACITY_EXCEEDED = 0x081, "capacity exceeded";
    NOT_READY = 0x082, "namespace not ready";
    RESERVATION_CONFLICT = 0x083, "reservation conflict";
    INVALID_QUEUE_ID = 0x101, "invalid queue identifier";
    ABORT_LIMIT = 0x103, "abort command limit exceeded";
    EVENT_REQUEST_LIMIT = 0x105, "asynchronous event request limit exceeded";
    INVALID_LOG_PAGE = 0x109, "invalid log page";
    FEATURE_NOT_SAVEABLE = 0x10d, "feature identifier not saveable";
    FEATURE_NOT_CHANGEABLE = 0x10e, "feature not changeable";
    INCOMPATIBLE_FORMAT = 0x180, "incompatible format";
    CONTROLLER_BUSY = 0x181, "controller busy";
    CONNECT_INVALID_PARAMETERS = 0x182, "connect invalid parameters";
    CONNECT_INVALID_HOST = 0x184, "connect invalid host";
    AUTHENTICATION_REQUIRED = 0x191, "authentication required";
    WRITE_FAULT = 0x280, "write fault";
    UNRECOVERED_READ_ERROR = 0x281, "unrecovered read error";
    COMPARE_FAILURE = 0x285, "compare failure";
    ACCESS_DENIED = 0x286, "access denied";
    PATH_ERROR = 0x300, "internal path error";
    ANA_PERSISTENT_LOSS = 0x301, "asymmetric access persistent loss";
    ANA_INACCESSIBLE = 0x302, "asymmetric access inaccessible";
    ANA_TRANSITION = 0x303, "asymmetric access transition";
    HOST_PATH_ERROR = 0x370, "host pathing error";
    HOST_ABORTED = 0x371, "command aborted by host";
}

impl Status {
    const fn of(code: u16) -> Self {
        Self { code, do_not_retry: false }
    }

    /// The same, and the host need not try again.
    #[must_use]
    pub const fn and_do_not_retry(self) -> Self {
        Self { code: self.code, do_not_retry: true }
    }

    #[must_use]
    pub const fn is_success(self) -> bool {
        self.code == 0
    }

    /// The same type and code, whether or not to be tried again.
    #[must_use]
    pub const fn is(self, other: Self) -> bool {
        self.code == other.code
    }

    /// It says something of the path to the controller, and another may do better (Base, 4.6.1.2.4).
    #[must_use]
    pub const fn is_of_path(self) -> bool {
        self.code >> 8 == 3
    }

    /// The medium holds something else than what was written: checks of protection information, or blocks that were never written
    /// (Base, 4.6.1.2.3: 82h to 84h and 87h).
    #[must_use]
    pub const fn is_of_integrity(self) -> bool {
        matches!(self.code, 0x282..=0x284 | 0x287)
    }

    pub(crate) fn from_field(field: u16) -> Self {
        Self { code: field >> 1 & 0x7ff, do_not_retry: field >> 15 == 1 }
    }

    pub(crate) fn field(self) -> u16 {
        self.code << 1 | u16::from(self.do_not_retry) << 15
    }
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match name(self.code) {
            Some(name) => out.write_str(name),
            None => write!(out, "status {:#05x}", self.code),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}{}", if self.do_not_retry { ", not to be tried again" } else { "" })
    }
}

impl std::error::Error for Status {}

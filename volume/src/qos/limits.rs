//! What may be asked for. Everything that could never work is refused here, before it is in force.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// What a request costs besides its bytes, in bytes: what drives do in the time of one I/O.
const REQUEST_COST_BYTES: u64 = 16 << 10;
/// A guarantee of I/Os means I/Os of up to this; larger ones count as several.
const GUARANTEED_IO_BYTES: u64 = 64 << 10;
/// Longest burst.
const BURST_MAX: Duration = Duration::from_secs(3600);

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    /// Also discards and zeroes, which move no bytes.
    Write,
}

/// What one request uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub kind: Kind,
    pub bytes: u64,
}

impl Cost {
    #[must_use]
    pub fn read(bytes: u64) -> Self {
        Self { kind: Kind::Read, bytes }
    }

    #[must_use]
    pub fn write(bytes: u64) -> Self {
        Self { kind: Kind::Write, bytes }
    }

    /// I/Os and bytes in one number, by which shares are compared.
    pub(super) fn weighed(self) -> f64 {
        (REQUEST_COST_BYTES + self.bytes) as f64
    }

    /// I/Os and bytes as a cap counts them.
    pub(super) fn capped(self) -> [f64; 2] {
        [1.0, self.bytes as f64]
    }

    /// I/Os and bytes as a guarantee counts them.
    pub(super) fn guaranteed(self) -> [f64; 2] {
        [self.bytes.div_ceil(GUARANTEED_IO_BYTES).max(1) as f64, self.bytes as f64]
    }
}

/// I/Os and bytes per second; `None`: not limited, or not guaranteed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rates {
    pub iops: Option<u64>,
    pub bytes_per_s: Option<u64>,
}

impl Rates {
    pub const NONE: Self = Self { iops: None, bytes_per_s: None };

    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    pub(super) fn both(self) -> [Option<u64>; 2] {
        [self.iops, self.bytes_per_s]
    }

    fn named(self) -> [(Rate, Option<u64>); 2] {
        [(Rate::Iops, self.iops), (Rate::BytesPerS, self.bytes_per_s)]
    }
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    Iops,
    BytesPerS,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Iops => "iops",
            Self::BytesPerS => "bytes_per_s",
        })
    }
}

/// Cap or guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    Cap,
    Guarantee,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cap => "cap",
            Self::Guarantee => "guarantee",
        })
    }
}

/// What a volume or a tenant may use, and what it gets whatever others do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Never more than this.
    pub cap: Rates,
    /// Up to this, it goes before others, and others leave it room.
    pub guarantee: Rates,
    /// So much of the cap that was not used is saved up and may be used at once.
    pub burst: Duration,
    /// Share of what is left beside guarantees, relative to others'.
    pub weight: u32,
}

impl Limits {
    /// Nothing is capped or guaranteed.
    pub const NONE: Self = Self {
        cap: Rates::NONE,
        guarantee: Rates::NONE,
        // Late timers must not cost anything of the rate; over one second this is 1 %.
        burst: Duration::from_millis(10),
        weight: 100,
    };

    /// Looks at these limits by themselves.
    ///
    /// # Errors
    ///
    /// Every variant of [`QosError`] but those that name others.
    pub fn check(&self, request_bytes_max: u64) -> Result<(), QosError> {
        for (setting, rates) in [(Setting::Cap, self.cap), (Setting::Guarantee, self.guarantee)] {
            for (rate, value) in rates.named() {
                if value == Some(0) {
                    return Err(QosError::Zero { setting, rate });
                }
            }
        }
        if let Some(bytes_per_s) = self.cap.bytes_per_s
            && bytes_per_s < request_bytes_max
        {
            return Err(QosError::CapBelowRequest { bytes_per_s, request_bytes_max });
        }
        below_cap(self.guarantee, self.cap)?;
        if self.burst > BURST_MAX || self.burst.is_zero() {
            return Err(QosError::Burst { burst: self.burst, longest: BURST_MAX });
        }
        if self.weight == 0 {
            return Err(QosError::WeightZero);
        }
        Ok(())
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::NONE
    }
}

/// What is to be changed of limits; what is absent stays, and a rate of 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsChange {
    pub cap_iops: Option<u64>,
    pub cap_bytes_per_s: Option<u64>,
    pub guaranteed_iops: Option<u64>,
    pub guaranteed_bytes_per_s: Option<u64>,
    pub burst_ms: Option<u64>,
    pub weight: Option<u32>,
}

impl LimitsChange {
    /// `old` with the changes.
    #[must_use]
    pub fn of(&self, old: Limits) -> Limits {
        let rate = |new: Option<u64>, old| match new {
            Some(0) => None,
            Some(rate) => Some(rate),
            None => old,
        };
        Limits {
            cap: Rates {
                iops: rate(self.cap_iops, old.cap.iops),
                bytes_per_s: rate(self.cap_bytes_per_s, old.cap.bytes_per_s),
            },
            guarantee: Rates {
                iops: rate(self.guaranteed_iops, old.guarantee.iops),
                bytes_per_s: rate(self.guaranteed_bytes_per_s, old.guarantee.bytes_per_s),
            },
            burst: self.burst_ms.map_or(old.burst, Duration::from_millis),
            weight: self.weight.unwrap_or(old.weight),
        }
    }
}

fn below_cap(guarantee: Rates, cap: Rates) -> Result<(), QosError> {
    for ((rate, guarantee), cap) in guarantee.named().into_iter().zip(cap.both()) {
        if let (Some(guarantee), Some(cap)) = (guarantee, cap)
            && guarantee > cap
        {
            return Err(QosError::GuaranteeAboveCap { rate, guarantee, cap });
        }
    }
    Ok(())
}

/// What all guarantees together are held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Largest request that clients send.
    pub request_bytes_max: u64,
    /// What may be guaranteed to all together, where that is known.
    pub capacity: Rates,
}

impl Terms {
    /// Looks at the guarantees of a tenant and of its volumes together.
    pub(super) fn check_tenant(tenant: &Limits, volumes: &[Limits]) -> Result<(), QosError> {
        for (index, (rate, cap)) in tenant.cap.named().into_iter().enumerate() {
            let guaranteed = total(volumes.iter().map(|limits| limits.guarantee.both()[index]));
            if let (Some(guaranteed), Some(cap)) = (guaranteed, cap)
                && guaranteed > cap
            {
                return Err(QosError::AboveTenantCap { rate, guaranteed, cap });
            }
        }
        Ok(())
    }

    /// Looks at the guarantees of all: of each tenant his own, or his volumes' together.
    pub(super) fn check_all(
        &self,
        tenants: impl Iterator<Item = (Limits, Vec<Limits>)>,
    ) -> Result<(), QosError> {
        let tenants: Vec<_> = tenants.collect();
        for (index, (rate, capacity)) in self.capacity.named().into_iter().enumerate() {
            let of_tenant = |(own, volumes): &(Limits, Vec<Limits>)| {
                let volumes = total(volumes.iter().map(|limits| limits.guarantee.both()[index]));
                own.guarantee.both()[index].max(volumes)
            };
            let guaranteed = total(tenants.iter().map(of_tenant));
            if let (Some(guaranteed), Some(capacity)) = (guaranteed, capacity)
                && guaranteed > capacity
            {
                return Err(QosError::AboveCapacity { rate, guaranteed, capacity });
            }
        }
        Ok(())
    }
}

fn total(rates: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    rates.flatten().fold(None, |sum: Option<u64>, rate| Some(sum.unwrap_or(0).saturating_add(rate)))
}

/// Why limits are refused. What was in force before stays.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QosError {
    #[error("a {setting} of 0 {rate} would let nothing through; leave it out for none")]
    Zero { setting: Setting, rate: Rate },
    #[error(
        "a cap of {bytes_per_s} bytes_per_s is below what one request needs: requests have up to {request_bytes_max} \
         bytes, and one must pass within a second; the least cap is {request_bytes_max}"
    )]
    CapBelowRequest { bytes_per_s: u64, request_bytes_max: u64 },
    #[error(
        "a guarantee of {guarantee} {rate} is above the cap of {cap} of the same volume or tenant"
    )]
    GuaranteeAboveCap { rate: Rate, guarantee: u64, cap: u64 },
    #[error(
        "the volumes of this tenant are guaranteed {guaranteed} {rate} together, its cap is {cap}"
    )]
    AboveTenantCap { rate: Rate, guaranteed: u64, cap: u64 },
    #[error("all guarantees together are {guaranteed} {rate}, {capacity} can be guaranteed")]
    AboveCapacity { rate: Rate, guaranteed: u64, capacity: u64 },
    #[error("a burst of {burst:?} is not above zero and up to {longest:?}")]
    Burst { burst: Duration, longest: Duration },
    #[error("a weight of 0 would starve it; the least is 1")]
    WeightZero,
}

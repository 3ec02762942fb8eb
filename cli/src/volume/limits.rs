//! Limits, as they are said and shown.

use clap::Args;
use levada_spec::Bytes;
use levada_volume::qos::{Limits, LimitsChange, Rates};
use std::str::FromStr;

#[derive(Args)]
pub struct LimitArgs {
    /// At most so many requests a second
    #[arg(long, value_name = "N")]
    iops: Option<u64>,
    /// At most so many bytes a second, as in 100MB; 1MiB or more, as much as one request may need
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = size_or_zero)]
    bandwidth: Option<u64>,
    /// So many requests a second (of up to 64 KiB) go before those of others
    #[arg(long, value_name = "N")]
    guarantee_iops: Option<u64>,
    /// So many bytes a second go before those of others
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = size_or_zero)]
    guarantee_bandwidth: Option<u64>,
    /// What was not used of the limits for so long may be used at once [default: 10]
    #[arg(long, value_name = "MS")]
    burst_ms: Option<u64>,
    /// The share of what is left beside guarantees, relative to others' [default: 100]
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
}

impl LimitArgs {
    /// What is to be changed.
    pub(super) fn change(&self) -> LimitsChange {
        LimitsChange {
            cap_iops: self.iops,
            cap_bytes_per_s: self.bandwidth,
            guaranteed_iops: self.guarantee_iops,
            guaranteed_bytes_per_s: self.guarantee_bandwidth,
            burst_ms: self.burst_ms,
            weight: self.weight,
        }
    }
}

/// A size or 0, as in `100MB`.
pub(super) fn size_or_zero(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => Bytes::from_str(text).map(|bytes| bytes.0).map_err(|error| error.to_string()),
    }
}

/// `500 IOPS, guaranteed 100 IOPS`, or `-`.
pub(super) fn text(limits: &Limits) -> String {
    let rates = |what: &str, rates: Rates| {
        let iops = rates.iops.map(|iops| format!("{what}{iops} IOPS"));
        let bytes = rates.bytes_per_s.map(|bytes| format!("{what}{}/s", Bytes(bytes)));
        iops.into_iter().chain(bytes)
    };
    let all: Vec<_> = rates("", limits.cap).chain(rates("guaranteed ", limits.guarantee)).collect();
    if all.is_empty() { "-".into() } else { all.join(", ") }
}

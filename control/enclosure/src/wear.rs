//! How a drive wears: by what is written to it, and by what a test says of it.
//!
//! What always holds: what a page says of itself and the warnings in it agree, as a drive's own would.

use crate::drive_volume::Moved;
use levada_export_nvmet::{Health, WARNING_KELVIN, Warnings};
use serde::{Deserialize, Serialize};

/// Kelvin at 0 degrees Celsius, in the whole degrees that drives tell.
const ZERO_CELSIUS: i32 = 273;
const CELSIUS: i16 = 35;
const SPARE_THRESHOLD_PERCENT: u8 = 10;

/// What a drive is to tell of itself from now on; `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WearChange {
    /// Of its endurance; what is written later comes on top.
    pub used_percent: Option<u8>,
    pub spare_percent: Option<u8>,
    pub celsius: Option<i16>,
    pub media_errors: Option<u64>,
}

/// How worn a drive is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wear {
    /// Bytes by which a new drive is used up; without it writing wears nothing.
    endurance_bytes: Option<u64>,
    used_percent: u8,
    /// What had been written when `used_percent` was said.
    written_bytes: u64,
    spare_percent: u8,
    celsius: i16,
    media_errors: u64,
    power_cycles: u64,
    power_cuts: u64,
}

impl Wear {
    /// That of a new drive.
    pub fn none(endurance_bytes: Option<u64>) -> Self {
        Self {
            endurance_bytes,
            used_percent: 0,
            written_bytes: 0,
            spare_percent: 100,
            celsius: CELSIUS,
            media_errors: 0,
            power_cycles: 1,
            power_cuts: 0,
        }
    }

    #[must_use]
    pub fn after(self, change: WearChange, written_bytes: u64) -> Self {
        let WearChange { used_percent, spare_percent, celsius, media_errors } = change;
        Self {
            written_bytes: used_percent.map_or(self.written_bytes, |_| written_bytes),
            used_percent: used_percent.unwrap_or(self.used_percent),
            spare_percent: spare_percent.unwrap_or(self.spare_percent),
            celsius: celsius.unwrap_or(self.celsius),
            media_errors: media_errors.unwrap_or(self.media_errors),
            ..self
        }
    }

    #[must_use]
    pub fn after_power_cut(self) -> Self {
        Self { power_cuts: self.power_cuts + 1, ..self }
    }

    #[must_use]
    pub fn after_power_on(self) -> Self {
        Self { power_cycles: self.power_cycles + 1, ..self }
    }

    /// The page of a drive that is so worn and has moved so much.
    pub fn health(&self, moved: Moved) -> Health {
        let written_since = u128::from(moved.written_bytes.saturating_sub(self.written_bytes));
        let endurance_bytes = self.endurance_bytes.map(|bytes| u128::from(bytes.max(1)));
        let worn_percent = endurance_bytes.map_or(0, |bytes| written_since * 100 / bytes);
        // 255 stands for that and more (Base, figure 196).
        let used_percent = (u128::from(self.used_percent) + worn_percent).min(255) as u8;
        // 0 would be no temperature.
        let kelvin = (i32::from(self.celsius) + ZERO_CELSIUS).max(1) as u16;
        let mut warnings = Warnings::empty();
        warnings.set(Warnings::SPARE, self.spare_percent < SPARE_THRESHOLD_PERCENT);
        warnings.set(Warnings::TEMPERATURE, kelvin >= WARNING_KELVIN);
        let units = |bytes: u64| u128::from(bytes).div_ceil(Health::UNIT_BYTES);
        Health {
            warnings,
            kelvin,
            spare_percent: self.spare_percent,
            spare_threshold_percent: SPARE_THRESHOLD_PERCENT,
            used_percent,
            read_units: units(moved.read_bytes),
            written_units: units(moved.written_bytes),
            reads: moved.reads.into(),
            writes: moved.writes.into(),
            power_cycles: self.power_cycles.into(),
            unsafe_shutdowns: self.power_cuts.into(),
            media_errors: self.media_errors.into(),
            ..Health::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(written_bytes: u64) -> Moved {
        Moved { writes: 1, written_bytes, ..Moved::default() }
    }

    #[test]
    fn writing_wears_by_what_a_drive_bears() {
        let wear = Wear::none(Some(1_000_000));
        let health = wear.health(written(513_000));
        // Units of 512,000 bytes, rounded up.
        assert_eq!((health.used_percent, health.written_units), (51, 2));
        assert_eq!((health.warnings, health.celsius()), (Warnings::empty(), Some(35)));
        assert_eq!(wear.health(written(5_000_000)).used_percent, 255);
        assert_eq!(Wear::none(None).health(written(u64::MAX)).used_percent, 0);
        assert_eq!(Wear::none(Some(0)).health(written(3)).used_percent, 255);
        // What is said holds from then on, and writing goes on wearing.
        let change = WearChange { used_percent: Some(95), ..WearChange::default() };
        let wear = wear.after(change, 513_000);
        assert_eq!(wear.health(written(513_000)).used_percent, 95);
        assert_eq!(wear.health(written(533_000)).used_percent, 97);
    }

    #[test]
    fn a_page_warns_of_what_it_says() {
        let wear = Wear::none(None);
        let says = |change| {
            wear.after(change, 0).after_power_cut().after_power_on().health(Moved::default())
        };
        let spare = says(WearChange { spare_percent: Some(9), ..WearChange::default() });
        assert_eq!((spare.warnings, spare.unsafe_shutdowns), (Warnings::SPARE, 1));
        assert_eq!(spare.power_cycles, 2);
        let enough = says(WearChange { spare_percent: Some(10), ..WearChange::default() });
        assert_eq!(enough.warnings, Warnings::empty());
        let hot = says(WearChange { celsius: Some(70), ..WearChange::default() });
        assert_eq!((hot.warnings, hot.kelvin), (Warnings::TEMPERATURE, 343));
        let cold = says(WearChange { celsius: Some(-5), ..WearChange::default() });
        assert_eq!((cold.warnings, cold.celsius()), (Warnings::empty(), Some(-5)));
        let bad = says(WearChange { media_errors: Some(3), ..WearChange::default() });
        assert_eq!(bad.media_errors, 3);
    }
}

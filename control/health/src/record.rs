//! What is the matter with a drive by its own account, and what has become of that since the last look.
//!
//! A drive that does not tell of itself has no record, and one that cannot be asked now keeps what it told last.

use levada_base::reactor::Instant;
use levada_device::{HealthPage, Warnings};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

/// A drive whose errors have not risen for so long has come to rest.
const ERRORS_REST: Duration = Duration::from_secs(24 * 3600);
/// A drive that has used up its endurance.
const USED_UP_PERCENT: u8 = 100;

/// What a drive says of itself: the page of health of an NVMe drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveHealth {
    /// What is the matter: `read-only`, `unreliable`, `backup`, `low-spare`, `used-up`, `worn`, `media-errors`, `temperature`.
    pub complaints: Vec<String>,
    /// What it warns of, in the bits of its page (Base, 5.14.1.2).
    #[serde(default)]
    pub critical_warning: u8,
    pub celsius: Option<i32>,
    pub spare_percent: u8,
    /// Less is too little, as the drive says.
    pub spare_least_percent: u8,
    /// Of its endurance; 255: that and more.
    pub used_percent: u8,
    pub read_bytes: u64,
    pub written_bytes: u64,
    #[serde(default)]
    pub reads: u64,
    #[serde(default)]
    pub writes: u64,
    #[serde(default)]
    pub busy_minutes: u64,
    #[serde(default)]
    pub power_cycles: u64,
    pub power_on_hours: u64,
    pub unsafe_shutdowns: u64,
    pub media_errors: u64,
    pub error_entries: u64,
    /// Above the temperature at which it warns,
    #[serde(default)]
    pub warm_minutes: u32,
    /// and above that at which it may fail.
    #[serde(default)]
    pub hot_minutes: u32,
}

/// What is the matter with a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Complaint {
    ReadOnly,
    Unreliable,
    /// What keeps its cache without power has failed.
    Backup,
    LowSpare,
    UsedUp,
    Worn,
    /// They were fewer not long ago.
    MediaErrors,
    Temperature,
}

impl Complaint {
    /// For programs, and for the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "read-only",
            Self::Unreliable => "unreliable",
            Self::Backup => "backup",
            Self::LowSpare => "low-spare",
            Self::UsedUp => "used-up",
            Self::Worn => "worn",
            Self::MediaErrors => "media-errors",
            Self::Temperature => "temperature",
        }
    }

    /// For people, with the figures of the page that gave rise to it.
    fn text(self, page: &HealthPage) -> String {
        match self {
            Self::ReadOnly => "it has become read-only".into(),
            Self::Unreliable => "its errors have made it unreliable".into(),
            Self::Backup => "its cache does not outlast a loss of power any more".into(),
            Self::LowSpare => {
                let (left, least) = (page.spare_percent, page.spare_threshold_percent);
                format!("{left} % of its spare room is left, and {least} % is the least")
            }
            Self::UsedUp | Self::Worn => {
                format!("{} % of its endurance is used", page.used_percent)
            }
            Self::MediaErrors => format!("its media errors have risen to {}", page.media_errors),
            Self::Temperature => match page.celsius() {
                Some(celsius) => format!("{celsius} °C is more than it should have, or less"),
                None => "it is hotter than it should be, or colder".into(),
            },
        }
    }

    /// Only another drive helps.
    fn wants_another(self) -> bool {
        match self {
            Self::ReadOnly
            | Self::Unreliable
            | Self::Backup
            | Self::LowSpare
            | Self::UsedUp
            | Self::Worn
            | Self::MediaErrors => true,
            Self::Temperature => false,
        }
    }
}

/// What a drive told last, and what that means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    page: HealthPage,
    errors_rose: Option<Instant>,
    complaints: BTreeSet<Complaint>,
}

impl Record {
    /// What a page means that a drive tells `now`, after it told `before`; worn is a drive of which so much is used.
    pub fn after(before: Option<&Self>, page: HealthPage, now: Instant, worn_percent: u8) -> Self {
        let errors_rose = match before {
            Some(before) if page.media_errors > before.page.media_errors => Some(now),
            // With fewer it is another drive.
            Some(before) if page.media_errors == before.page.media_errors => before.errors_rose,
            Some(_) | None => None,
        };
        let rose_lately = errors_rose.is_some_and(|rose| now.since(rose) < ERRORS_REST);
        let (spare, least) = (page.spare_percent, page.spare_threshold_percent);
        let is_low = page.warnings.contains(Warnings::SPARE) || (least > 0 && spare <= least);
        let is_used_up = page.used_percent >= USED_UP_PERCENT;
        let of = |warning| page.warnings.contains(warning);
        let complaints = [
            (of(Warnings::READ_ONLY), Complaint::ReadOnly),
            (of(Warnings::RELIABILITY), Complaint::Unreliable),
            (of(Warnings::BACKUP), Complaint::Backup),
            (is_low, Complaint::LowSpare),
            (is_used_up, Complaint::UsedUp),
            (!is_used_up && page.used_percent >= worn_percent, Complaint::Worn),
            (rose_lately, Complaint::MediaErrors),
            (of(Warnings::TEMPERATURE), Complaint::Temperature),
        ];
        let complaints =
            complaints.into_iter().filter_map(|(is, complaint)| is.then_some(complaint));
        Self { page, errors_rose, complaints: complaints.collect() }
    }

    /// Says in the log what has begun and what has ended.
    pub fn log(&self, before: Option<&Self>, drive: &str) {
        let none = BTreeSet::new();
        let had = before.map_or(&none, |before| &before.complaints);
        for begun in self.complaints.difference(had) {
            let (what, why) = (begun.name(), begun.text(&self.page));
            tracing::warn!(drive, what, why, "a drive is not well");
        }
        for ended in had.difference(&self.complaints) {
            tracing::info!(drive, what = ended.name(), "a drive is well again");
        }
    }

    /// What is the matter and what helps, if anything is. `another`: how the drive is replaced.
    pub fn problem(&self, another: &str) -> Option<String> {
        let texts: Vec<_> = self.complaints.iter().map(|one| one.text(&self.page)).collect();
        let helps = match self.complaints.iter().any(|one| one.wants_another()) {
            true => another,
            false => "see to its cooling",
        };
        (!texts.is_empty()).then(|| format!("{}; {helps}", texts.join(", ")))
    }

    /// For people and programs.
    #[must_use]
    pub fn shown(&self) -> DriveHealth {
        let page = &self.page;
        let plain = |count: u128| u64::try_from(count).unwrap_or(u64::MAX);
        let bytes = |units: u128| plain(units.saturating_mul(HealthPage::UNIT_BYTES));
        DriveHealth {
            complaints: self.complaints.iter().map(|one| one.name().into()).collect(),
            critical_warning: page.warnings.bits(),
            celsius: page.celsius(),
            spare_percent: page.spare_percent,
            spare_least_percent: page.spare_threshold_percent,
            used_percent: page.used_percent,
            read_bytes: bytes(page.read_units),
            written_bytes: bytes(page.written_units),
            reads: plain(page.reads),
            writes: plain(page.writes),
            busy_minutes: plain(page.busy_minutes),
            power_cycles: plain(page.power_cycles),
            power_on_hours: plain(page.power_on_hours),
            unsafe_shutdowns: plain(page.unsafe_shutdowns),
            media_errors: plain(page.media_errors),
            error_entries: plain(page.error_entries),
            warm_minutes: page.warm_minutes,
            hot_minutes: page.hot_minutes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::{self, Reactor};

    fn well() -> HealthPage {
        HealthPage {
            kelvin: 308,
            spare_percent: 100,
            spare_threshold_percent: 10,
            ..HealthPage::default()
        }
    }

    fn now() -> Instant {
        Reactor::new().expect("io_uring").block_on(async { reactor::now() })
    }

    fn complaints(page: HealthPage) -> Vec<Complaint> {
        Record::after(None, page, now(), 90).complaints.into_iter().collect()
    }

    #[test]
    fn a_drive_complains_from_its_thresholds_on() {
        assert_eq!(complaints(well()), []);
        for (used_percent, complaint) in [
            (89, None),
            (90, Some(Complaint::Worn)),
            (99, Some(Complaint::Worn)),
            (100, Some(Complaint::UsedUp)),
            (255, Some(Complaint::UsedUp)),
        ] {
            let told = complaints(HealthPage { used_percent, ..well() });
            assert_eq!(told, complaint.into_iter().collect::<Vec<_>>(), "{used_percent}");
        }
        for (spare_percent, is_low) in [(11, false), (10, true), (0, true)] {
            let told = complaints(HealthPage { spare_percent, ..well() });
            assert_eq!(!told.is_empty(), is_low, "{spare_percent}");
        }
        // One that has no threshold does not tell of its room either.
        assert_eq!(complaints(HealthPage::default()), []);
        let all = [
            (Warnings::SPARE, Complaint::LowSpare),
            (Warnings::TEMPERATURE, Complaint::Temperature),
            (Warnings::RELIABILITY, Complaint::Unreliable),
            (Warnings::READ_ONLY, Complaint::ReadOnly),
            (Warnings::BACKUP, Complaint::Backup),
        ];
        for (warnings, complaint) in all {
            assert_eq!(complaints(HealthPage { warnings, ..well() }), [complaint]);
        }
    }

    #[test]
    fn media_errors_are_a_complaint_for_a_day_after_they_rose() {
        let with = |media_errors| HealthPage { media_errors, ..well() };
        let is_told = |record: &Record| record.complaints.contains(&Complaint::MediaErrors);
        let begun = now();
        // It had them before anybody looked.
        let first = Record::after(None, with(7), begun, 90);
        assert!(!is_told(&first));
        let rose = Record::after(Some(&first), with(8), begun + Duration::from_secs(60), 90);
        assert!(is_told(&rose));
        let later = begun + ERRORS_REST;
        let still = Record::after(Some(&rose), with(8), later, 90);
        assert!(is_told(&still));
        let rested = Record::after(Some(&still), with(8), later + Duration::from_secs(60), 90);
        assert!(!is_told(&rested));
        let another = Record::after(Some(&still), with(0), later, 90);
        assert!(!is_told(&another));
    }

    #[test]
    fn a_problem_says_what_helps() {
        let said = |page| Record::after(None, page, now(), 90).problem("replace it");
        assert_eq!(said(well()), None);
        let worn = HealthPage { used_percent: 95, spare_percent: 8, ..well() };
        let worn = HealthPage { warnings: Warnings::SPARE, ..worn };
        assert_eq!(
            said(worn).as_deref(),
            Some(
                "8 % of its spare room is left, and 10 % is the least, 95 % of its endurance is used; replace it"
            )
        );
        let hot = HealthPage { kelvin: 354, warnings: Warnings::TEMPERATURE, ..well() };
        let hot = said(hot).expect("it is hot");
        assert!(hot.contains("81 °C") && hot.ends_with("; see to its cooling"), "{hot}");
    }
}

//! Rates as lines of text.

use super::rates::{KindRates, Pace, Rates};
use crate::status::bytes;
use std::fmt::Write;

/// What is shown, and how.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub sort: Sort,
    pub targets: bool,
    pub kinds: bool,
    pub drives: bool,
    pub mounts: bool,
}

impl Default for View {
    fn default() -> Self {
        Self { sort: Sort::Name, targets: true, kinds: true, drives: true, mounts: true }
    }
}

/// The order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    Name,
    /// The most requests first.
    Rate,
    /// The longest 99th percentile first.
    Latency,
}

impl Sort {
    pub fn next(self) -> Self {
        match self {
            Self::Name => Self::Rate,
            Self::Rate => Self::Latency,
            Self::Latency => Self::Name,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Rate => "rate",
            Self::Latency => "p99",
        }
    }

    fn order<T>(self, rows: &mut [T], of: impl Fn(&T) -> (f64, u64)) {
        match self {
            Self::Name => {}
            Self::Rate => rows.sort_by(|a, b| of(b).0.total_cmp(&of(a).0)),
            Self::Latency => rows.sort_by_key(|row| std::cmp::Reverse(of(row).1)),
        }
    }
}

/// The screen, line by line.
pub fn render(rates: &Rates, view: View) -> String {
    let mut out = String::new();
    // Writing into a String cannot fail.
    let _ = draw(rates, view, &mut out);
    out
}

fn draw(rates: &Rates, view: View, out: &mut String) -> std::fmt::Result {
    let health = match rates.problems {
        0 => "healthy".to_owned(),
        1 => "1 problem (levada status)".to_owned(),
        many => format!("{many} problems (levada status)"),
    };
    let is_metadata = |name: &str| name.starts_with("mdt");
    let metadata = rates.sum(|t| if is_metadata(&t.status.name) { t.now.per_s } else { 0.0 });
    writeln!(
        out,
        "{}: {health}   read {}/s  write {}/s  {} meta/s   df {} of {} free   clients {}   ({:.1} s, by {})",
        rates.cluster,
        bytes(rates.sum(|target| target.read_bytes_per_s) as u64),
        bytes(rates.sum(|target| target.written_bytes_per_s) as u64),
        count(metadata),
        bytes(rates.free_bytes),
        bytes(rates.total_bytes),
        rates.clients,
        rates.seconds,
        view.sort.label(),
    )?;
    if view.targets {
        draw_targets(rates, view.sort, out)?;
    }
    if view.kinds {
        draw_kinds("KIND", &rates.kinds, view.sort, out)?;
    }
    if view.mounts && !rates.mounts.is_empty() {
        draw_mounts(rates, view.sort, out)?;
        if view.kinds {
            draw_kinds("CALL", &rates.calls, view.sort, out)?;
        }
    }
    if view.drives {
        draw_drives(rates, view.sort, out)?;
    }
    Ok(())
}

fn draw_targets(rates: &Rates, sort: Sort, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "\n{:<8}{:<11}{:>8}{:>8}{:>11}{:>11}{:>8}{:>8}{:>8}{:>9}{:>7}{:>6}  SEGMENTS",
        "TARGET",
        "STATE",
        "REQ/s",
        "FLIGHT",
        "READ/s",
        "WRITE/s",
        "P50",
        "P99",
        "MAX",
        "FAILED/s",
        "CACHE",
        "LOG"
    )?;
    let mut targets: Vec<_> = rates.targets.iter().collect();
    sort.order(&mut targets, |target| (target.now.per_s, target.now.p99_us));
    for target in targets {
        let (status, now) = (&target.status, &target.now);
        let segments = status.segments.map_or(String::new(), |segments| {
            format!("{} free of {}", segments.free, segments.total)
        });
        let line = format!(
            "{:<8}{:<11}{:>8}{:>8}{:>11}{:>11}{:>8}{:>8}{:>8}{:>9}{:>7}{:>5}%  {segments}",
            status.name,
            status.state,
            count(now.per_s),
            status.in_flight,
            bytes(target.read_bytes_per_s as u64),
            bytes(target.written_bytes_per_s as u64),
            time(now.p50_us),
            time(now.p99_us),
            time(now.max_us),
            count(now.failed_per_s),
            percent(target.cache_percent),
            status.log_percent,
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

fn draw_mounts(rates: &Rates, sort: Sort, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "\n{:>8}{:>8}{:>11}{:>11}{:>8}{:>8}{:>8}{:>9}{:>7}  MOUNT",
        "CALLS/s", "FLIGHT", "READ/s", "WRITE/s", "P50", "P99", "MAX", "FAILED/s", "CACHE"
    )?;
    let mut mounts: Vec<_> = rates.mounts.iter().collect();
    sort.order(&mut mounts, |mount| (mount.now.per_s, mount.now.p99_us));
    for mount in mounts {
        let now = &mount.now;
        writeln!(
            out,
            "{:>8}{:>8}{:>11}{:>11}{:>8}{:>8}{:>8}{:>9}{:>7}  {}",
            count(now.per_s),
            mount.in_flight,
            bytes(mount.read_bytes_per_s as u64),
            bytes(mount.written_bytes_per_s as u64),
            time(now.p50_us),
            time(now.p99_us),
            time(now.max_us),
            count(now.failed_per_s),
            percent(mount.cache_percent),
            mount.dir,
        )?;
    }
    Ok(())
}

fn draw_kinds(title: &str, kinds: &[KindRates], sort: Sort, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "\n{:<14}{:<12}{:>9}{:>11}{:>8}{:>8}{:>8}{:>9}",
        title, "SIZE", "/s", "BYTES/s", "P50", "P99", "MAX", "FAILED/s"
    )?;
    let mut kinds: Vec<&KindRates> = kinds.iter().filter(|k| k.now.per_s > 0.0).collect();
    sort.order(&mut kinds, |kind| (kind.now.per_s, kind.now.p99_us));
    if kinds.is_empty() {
        writeln!(out, "nothing was asked for")?;
    }
    for KindRates { kind, size, now } in kinds {
        let Pace { per_s, bytes_per_s, failed_per_s, p50_us, p99_us, max_us } = *now;
        let moved = if bytes_per_s > 0.0 { bytes(bytes_per_s as u64) } else { String::new() };
        writeln!(
            out,
            "{kind:<14}{size:<12}{:>9}{moved:>11}{:>8}{:>8}{:>8}{:>9}",
            count(per_s),
            time(p50_us),
            time(p99_us),
            time(max_us),
            count(failed_per_s),
        )?;
    }
    Ok(())
}

fn draw_drives(rates: &Rates, sort: Sort, out: &mut String) -> std::fmt::Result {
    writeln!(out, "\n{:<10}{:>11}{:>11}{:>8}{:>8}", "DRIVE", "READ/s", "WRITE/s", "P50", "P99")?;
    let mut drives: Vec<_> = rates.drives.iter().collect();
    sort.order(&mut drives, |d| (d.read_bytes_per_s + d.written_bytes_per_s, d.p99_us));
    for drive in drives {
        writeln!(
            out,
            "{:<10}{:>11}{:>11}{:>8}{:>8}",
            drive.drive,
            bytes(drive.read_bytes_per_s as u64),
            bytes(drive.written_bytes_per_s as u64),
            time(drive.p50_us),
            time(drive.p99_us),
        )?;
    }
    Ok(())
}

fn percent(of: Option<u64>) -> String {
    of.map_or_else(|| "-".to_owned(), |percent| format!("{percent}%"))
}

/// A rate for people: `6.1k`.
fn count(per_s: f64) -> String {
    match per_s {
        0.0..9.95 => format!("{per_s:.1}"),
        9.95..9_995.0 => format!("{per_s:.0}"),
        9_995.0..9_995_000.0 => format!("{:.1}k", per_s / 1e3),
        _ => format!("{:.1}M", per_s / 1e6),
    }
}

/// A latency for people: `310u`, `2.2m`, `1.5s`; nothing when nothing was measured.
fn time(us: u64) -> String {
    match us {
        0 => "-".to_owned(),
        1..1_000 => format!("{us}u"),
        1_000..1_000_000 => format!("{:.1}m", us as f64 / 1e3),
        _ => format!("{:.1}s", us as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::{DriveRates, MountRates, TargetRates};
    use super::*;
    use levada_node::control::{Segments, TargetStatus};

    fn rates() -> Rates {
        let target = |name: &str, per_s, p99_us, segments| TargetRates {
            status: TargetStatus {
                name: name.into(),
                state: "serving".into(),
                in_flight: 22,
                log_percent: 4,
                segments,
                ..TargetStatus::default()
            },
            now: Pace { per_s, p50_us: 310, p99_us, max_us: 9_000, ..Pace::default() },
            read_bytes_per_s: 790.0 * f64::from(1 << 20),
            written_bytes_per_s: 0.0,
            cache_percent: Some(97),
        };
        let segments = Segments { free: 812, total: 1000, cleaned_bytes: 0 };
        let kind = |kind: &str, per_s| KindRates {
            kind: kind.into(),
            size: String::new(),
            now: Pace { per_s, ..Pace::default() },
        };
        Rates {
            cluster: "lab".into(),
            seconds: 1.0,
            clients: 12,
            targets: vec![
                target("mdt0", 18_200.0, 600, None),
                target("ost0", 6_100.0, 2_200, Some(segments)),
            ],
            kinds: vec![kind("Create", 4_100.0), kind("Leave", 0.0)],
            mounts: vec![MountRates { dir: "/home".into(), in_flight: 3, ..MountRates::default() }],
            calls: vec![kind("GetAttr", 700.0)],
            drives: vec![DriveRates {
                drive: "d07".into(),
                p99_us: 9_000,
                ..DriveRates::default()
            }],
            ..Rates::default()
        }
    }

    #[test]
    fn a_screen_tells_who_does_what_and_how_fast() {
        let text = render(&rates(), View::default());
        for part in ["lab: healthy", "18.2k meta/s", "clients 12", "6100", "310u", "2.2m", "9.0m"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(text.contains("790.0 MiB") && text.contains("812 free of 1000"), "{text}");
        assert!(text.contains("Create") && !text.contains("Leave"), "what was asked for\n{text}");
        assert!(
            text.contains("/home") && text.contains("GetAttr") && text.contains("97%"),
            "{text}"
        );
        assert!(text.lines().all(|line| line.len() < 160), "{text}");
    }

    #[test]
    fn rows_are_sorted_and_sections_left_out() {
        let first = |sort, what: &str| {
            let text = render(&rates(), View { sort, ..View::default() });
            let at = text.find(what).expect("a row");
            text[..at].matches("ost0").count() == 0
        };
        assert!(first(Sort::Name, "mdt0") && first(Sort::Rate, "mdt0"));
        assert!(!first(Sort::Latency, "mdt0"), "ost0 is slower");
        let none =
            View { targets: false, kinds: false, drives: false, mounts: false, ..View::default() };
        assert_eq!(render(&rates(), none).lines().count(), 1);
        assert_eq!(Sort::Name.next().next().next(), Sort::Name);
    }
}

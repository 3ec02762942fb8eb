//! What happened between two looks at a node's meters.

use levada_base::meter::quantile;
use levada_node::control::TargetStatus;
use levada_node::meters::{CacheMeters, DriveMeters, Meters, MountMeters, OpMeters, TargetMeters};
use serde::Serialize;
use std::collections::BTreeMap;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    pub cluster: String,
    pub seconds: f64,
    pub problems: u64,
    pub clients: u64,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub targets: Vec<TargetRates>,
    pub kinds: Vec<KindRates>,
    pub drives: Vec<DriveRates>,
    pub mounts: Vec<MountRates>,
    /// What the kernel asked of all mounts, by kind.
    pub calls: Vec<KindRates>,
}

/// Of some operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pace {
    pub per_s: f64,
    pub bytes_per_s: f64,
    pub failed_per_s: f64,
    pub p50_us: u64,
    pub p99_us: u64,
    pub max_us: u64,
}

/// Of a target.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TargetRates {
    /// As of the second look.
    #[serde(flatten)]
    pub status: TargetStatus,
    pub now: Pace,
    pub read_bytes_per_s: f64,
    pub written_bytes_per_s: f64,
    /// Rows, or objects, that were in memory when they were asked for; none when nobody wanted any.
    pub cache_percent: Option<u64>,
}

/// Of a mount on this machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MountRates {
    pub dir: String,
    /// As of the second look.
    pub in_flight: u64,
    pub now: Pace,
    pub read_bytes_per_s: f64,
    pub written_bytes_per_s: f64,
    /// Names and attributes that were known without asking; none when nobody wanted any.
    pub cache_percent: Option<u64>,
}

/// Of a kind of request, on all targets.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KindRates {
    pub kind: String,
    pub size: String,
    pub now: Pace,
}

/// Of a drive, in all arrays.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DriveRates {
    pub drive: String,
    pub read_bytes_per_s: f64,
    pub written_bytes_per_s: f64,
    pub p50_us: u64,
    pub p99_us: u64,
}

/// What rose, summed up.
#[derive(Clone, Debug, Default)]
struct Sum {
    count: u64,
    bytes: u64,
    failed: u64,
    latency: BTreeMap<u16, u64>,
}

impl Sum {
    fn add(&mut self, before: Option<&OpMeters>, now: &OpMeters) {
        let rose = |of: fn(&OpMeters) -> u64| of(now).saturating_sub(before.map_or(0, of));
        self.count += rose(|op| op.count);
        self.bytes += rose(|op| op.bytes);
        self.failed += rose(|op| op.failed);
        self.add_latency(before.map_or(&[], |op| &op.latency), &now.latency);
    }

    fn add_latency(&mut self, before: &[(u16, u64)], now: &[(u16, u64)]) {
        let before: BTreeMap<u16, u64> = before.iter().copied().collect();
        for (bucket, count) in now {
            let rose = count.saturating_sub(before.get(bucket).copied().unwrap_or(0));
            if rose > 0 {
                *self.latency.entry(*bucket).or_default() += rose;
            }
        }
    }

    fn quantile_us(&self, fraction: f64) -> u64 {
        let buckets: Vec<(u16, u64)> = self.latency.iter().map(|(b, c)| (*b, *c)).collect();
        quantile(&buckets, fraction).as_micros() as u64
    }

    fn pace(&self, seconds: f64) -> Pace {
        Pace {
            per_s: self.count as f64 / seconds,
            bytes_per_s: self.bytes as f64 / seconds,
            failed_per_s: self.failed as f64 / seconds,
            p50_us: self.quantile_us(0.5),
            p99_us: self.quantile_us(0.99),
            max_us: self.quantile_us(1.0),
        }
    }
}

impl Rates {
    /// What happened between two looks; `None` when the node was started anew in between, or no time passed.
    pub fn between(before: &Meters, now: &Meters) -> Option<Self> {
        let seconds = now.at_us.checked_sub(before.at_us)? as f64 / 1e6;
        if before.life != now.life || seconds <= 0.0 {
            return None;
        }
        let mut kinds = Kinds::default();
        let targets = now.targets.iter().map(|target| {
            let name = &target.status.name;
            let before = before.targets.iter().find(|known| known.status.name == *name);
            target_rates(before, target, seconds, &mut kinds)
        });
        let targets: Vec<_> = targets.collect();
        let mut calls = Kinds::default();
        let mounts = now.mounts.iter().map(|mount| {
            // One that was not seen before may have been there for long; one that was made anew counts from its beginning.
            let known = before.mounts.iter().find(|known| known.dir == mount.dir);
            let before =
                known.map_or(Some(mount), |known| Some(known).filter(|k| k.pid == mount.pid));
            mount_rates(before, mount, seconds, &mut calls)
        });
        let mounts: Vec<_> = mounts.collect();
        // Space is that of objects; a metadata target's is of names.
        let objects = || targets.iter().filter(|target| target.status.segments.is_some());
        Some(Self {
            cluster: now.cluster.clone(),
            seconds,
            problems: now.problems,
            clients: now.clients,
            total_bytes: objects().map(|target| target.status.total_bytes).sum(),
            free_bytes: objects().map(|target| target.status.free_bytes).sum(),
            kinds: kinds.rates(seconds),
            mounts,
            calls: calls.rates(seconds),
            drives: drives(&before.drives, &now.drives, seconds),
            targets,
        })
    }

    /// Of all targets together, by what they sum.
    pub fn sum(&self, of: impl Fn(&TargetRates) -> f64) -> f64 {
        self.targets.iter().map(of).sum()
    }
}

/// What rose, by kind and size, in the order in which they were met.
#[derive(Default)]
struct Kinds(Vec<(String, String, Sum)>);

impl Kinds {
    fn of(&mut self, op: &OpMeters) -> &mut Sum {
        let at = self.0.iter().position(|(kind, size, _)| *kind == op.kind && *size == op.size);
        let at = at.unwrap_or_else(|| {
            self.0.push((op.kind.clone(), op.size.clone(), Sum::default()));
            self.0.len() - 1
        });
        &mut self.0[at].2
    }

    fn rates(self, seconds: f64) -> Vec<KindRates> {
        let rates =
            |(kind, size, sum): (_, _, Sum)| KindRates { kind, size, now: sum.pace(seconds) };
        self.0.into_iter().map(rates).collect()
    }
}

/// What rose of a target, or a mount: all of it, bytes read, and written.
fn sums(before: Option<&[OpMeters]>, now: &[OpMeters], kinds: &mut Kinds) -> (Sum, u64, u64) {
    let (mut all, mut read, mut written) = (Sum::default(), 0, 0);
    for op in now {
        let is_same = |known: &&OpMeters| known.kind == op.kind && known.size == op.size;
        let before = before.and_then(|before| before.iter().find(is_same));
        let mut own = Sum::default();
        own.add(before, op);
        match op.kind.as_str() {
            "Read" => read += own.bytes,
            "Write" => written += own.bytes,
            _ => {}
        }
        all.add(before, op);
        kinds.of(op).add(before, op);
    }
    (all, read, written)
}

fn cache_percent(before: Option<CacheMeters>, now: CacheMeters) -> Option<u64> {
    let before = before.unwrap_or_default();
    let rose = CacheMeters {
        hits: now.hits.saturating_sub(before.hits),
        misses: now.misses.saturating_sub(before.misses),
    };
    rose.percent()
}

fn target_rates(
    before: Option<&TargetMeters>,
    now: &TargetMeters,
    seconds: f64,
    kinds: &mut Kinds,
) -> TargetRates {
    let (all, read, written) = sums(before.map(|before| &*before.ops), &now.ops, kinds);
    TargetRates {
        status: now.status.clone(),
        now: all.pace(seconds),
        read_bytes_per_s: read as f64 / seconds,
        written_bytes_per_s: written as f64 / seconds,
        cache_percent: cache_percent(before.map(|before| before.status.cache), now.status.cache),
    }
}

fn mount_rates(
    before: Option<&MountMeters>,
    now: &MountMeters,
    seconds: f64,
    calls: &mut Kinds,
) -> MountRates {
    let (all, read, written) = sums(before.map(|before| &*before.ops), &now.ops, calls);
    MountRates {
        dir: now.dir.clone(),
        in_flight: now.in_flight,
        now: all.pace(seconds),
        read_bytes_per_s: read as f64 / seconds,
        written_bytes_per_s: written as f64 / seconds,
        cache_percent: cache_percent(before.map(|before| before.cache), now.cache),
    }
}

fn drives(before: &[DriveMeters], now: &[DriveMeters], seconds: f64) -> Vec<DriveRates> {
    let mut sums: BTreeMap<&str, (u64, u64, Sum)> = BTreeMap::new();
    for part in now {
        let is_same = |known: &&DriveMeters| known.drive == part.drive && known.array == part.array;
        let before = before.iter().find(is_same);
        let rose = |of: fn(&DriveMeters) -> u64| of(part).saturating_sub(before.map_or(0, of));
        let (read, written, latency) = sums.entry(&part.drive).or_default();
        *read += rose(|part| part.bytes_read);
        *written += rose(|part| part.bytes_written);
        latency.add_latency(before.map_or(&[], |part| &part.latency), &part.latency);
    }
    let rates = sums.into_iter().map(|(drive, (read, written, latency))| DriveRates {
        drive: drive.to_owned(),
        read_bytes_per_s: read as f64 / seconds,
        written_bytes_per_s: written as f64 / seconds,
        p50_us: latency.quantile_us(0.5),
        p99_us: latency.quantile_us(0.99),
    });
    rates.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_node::control::Segments;

    fn op(kind: &str, count: u64, bytes: u64, latency: &[(u16, u64)]) -> OpMeters {
        let (kind, latency) = (kind.to_owned(), latency.to_vec());
        OpMeters { kind, count, bytes, latency, ..OpMeters::default() }
    }

    fn look(at_us: u64, life: u64, ops: Vec<OpMeters>) -> Meters {
        let segments = Some(Segments::default());
        let status = TargetStatus {
            name: "ost0".into(),
            total_bytes: 100,
            free_bytes: 40,
            segments,
            ..TargetStatus::default()
        };
        let targets = vec![TargetMeters { status, ops }];
        let drives = ["meta", "data"].map(|array| DriveMeters {
            drive: "d01".into(),
            array: array.into(),
            bytes_read: at_us / 1000,
            latency: vec![(80, at_us / 1000)],
            ..DriveMeters::default()
        });
        Meters { at_us, life, targets, drives: drives.into(), ..Meters::default() }
    }

    #[test]
    fn rates_are_of_what_rose() {
        let before = look(1_000_000, 7, vec![op("Read", 100, 5000, &[(40, 100)])]);
        let after =
            vec![op("Read", 300, 9000, &[(40, 110), (60, 190)]), op("Commit", 10, 0, &[(80, 10)])];
        let rates = Rates::between(&before, &look(3_000_000, 7, after)).expect("one life");
        let [target] = &rates.targets[..] else { panic!("{rates:?}") };
        assert_eq!((target.now.per_s, target.read_bytes_per_s), (105.0, 2000.0));
        // 10 of bucket 40, 190 of bucket 60, 10 of bucket 80.
        let ends = |bucket| quantile(&[(bucket, 1)], 1.0).as_micros() as u64;
        let told = (target.now.p50_us, target.now.p99_us, target.now.max_us);
        assert_eq!(told, (ends(60), ends(80), ends(80)));
        let kinds: Vec<_> = rates.kinds.iter().map(|k| (k.kind.as_str(), k.now.per_s)).collect();
        assert_eq!(kinds, [("Read", 100.0), ("Commit", 5.0)]);
        assert_eq!((rates.total_bytes, rates.free_bytes), (100, 40));
        let [drive] = &rates.drives[..] else { panic!("{rates:?}") };
        assert_eq!((drive.read_bytes_per_s, drive.p99_us), (2000.0, ends(80)));
    }

    #[test]
    fn a_mount_that_was_made_anew_counts_from_its_beginning() {
        let mount = |pid, count, hits| MountMeters {
            dir: "/mnt".into(),
            pid,
            ops: vec![op("Lookup", count, 0, &[(40, count)])],
            cache: CacheMeters { hits, misses: 10 },
            ..MountMeters::default()
        };
        let at = |at_us, mount| Meters { mounts: vec![mount], ..look(at_us, 7, vec![]) };
        let rates = |before, now| {
            let rates =
                Rates::between(&at(1_000_000, before), &at(2_000_000, now)).expect("one life");
            let [mount] = &rates.mounts[..] else { panic!("{rates:?}") };
            assert_eq!(rates.calls[0].now, mount.now);
            (mount.now.per_s, mount.cache_percent)
        };
        assert_eq!(rates(mount(5, 100, 10), mount(5, 130, 40)), (30.0, Some(100)));
        assert_eq!(rates(mount(5, 100, 10), mount(5, 100, 10)), (0.0, None));
        assert_eq!(rates(mount(5, 100, 10), mount(6, 130, 30)), (130.0, Some(75)));
        let unseen = MountMeters { dir: "/elsewhere".into(), ..mount(5, 100, 10) };
        assert_eq!(rates(unseen, mount(5, 130, 30)), (0.0, None));
    }

    #[test]
    fn another_start_of_the_node_begins_anew() {
        let (before, now) = (look(9_000_000, 7, vec![]), look(1_000_000, 8, vec![]));
        assert_eq!(Rates::between(&before, &now), None);
        assert_eq!(Rates::between(&look(1, 7, vec![]), &look(2_000_000, 8, vec![])), None);
        assert_eq!(Rates::between(&now, &now), None, "no time passed");
    }
}

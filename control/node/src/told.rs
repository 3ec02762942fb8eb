//! Drives in sentences for people: those of an enclosure of which the same is to be said are told of together.

use levada_spec::ClusterFile;
use std::collections::BTreeMap;

/// Drives that a message names; more are counted.
const DRIVES_NAMED: usize = 4;

/// The first few, and how many there are besides.
pub(crate) fn some_of<T: AsRef<str>>(drives: &[T]) -> String {
    let more = drives.len().saturating_sub(DRIVES_NAMED);
    let named: Vec<&str> = drives[..drives.len() - more].iter().map(AsRef::as_ref).collect();
    match more {
        0 => named.join(", "),
        _ => format!("{} and {more} more", named.join(", ")),
    }
}

/// What an array survives that bears the loss of so many more drives, whichever.
#[must_use]
pub fn survives_now(drives: usize) -> String {
    match drives {
        0 => "survives no further loss now".into(),
        1 => "survives the loss of any 1 drive now".into(),
        _ => format!("survives the loss of any {drives} drives now"),
    }
}

/// Drives of an enclosure, as the subject of a sentence.
pub(crate) fn named_in(enclosure: &str, drives: &[&str]) -> String {
    match drives {
        [one] => format!("drive {one}"),
        several => format!("drives {} of enclosure {enclosure}", some_of(several)),
    }
}

/// Drives of an enclosure that are not there for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// As in `drive d03`, or `drives e1-1, e1-2 of enclosure e1`.
    pub drives: String,
    pub count: usize,
    pub why: String,
}

/// Of each drive that is not there why it is not, with those together for which it is the same.
#[must_use]
pub fn absent<'a>(
    cluster: &ClusterFile,
    missing: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Vec<Absent> {
    let mut alike: BTreeMap<(&str, &str), Vec<(&str, &str)>> = BTreeMap::new();
    for (drive, why) in missing {
        let enclosure = cluster.drive(drive).map_or("", |spec| &spec.enclosure);
        alike.entry((enclosure, without_url(why))).or_default().push((drive, why));
    }
    let told = alike.into_iter().map(|((enclosure, short), drives)| {
        let names: Vec<&str> = drives.iter().map(|(name, _)| *name).collect();
        let why = if let [(_, why)] = drives[..] { why } else { short };
        Absent { drives: named_in(enclosure, &names), count: names.len(), why: why.into() }
    });
    told.collect()
}

/// The reason alone, where it begins with the URL of its drive.
fn without_url(why: &str) -> &str {
    let told = why.strip_prefix("nvme+tcp://").and_then(|rest| rest.split_once(": "));
    told.map_or(why, |(_, reason)| reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_is_alike_is_said_once() {
        let mut cluster =
            ClusterFile::box_default(Path::new("box"), 40 << 30).expect("room enough");
        for drive in &mut cluster.drives {
            drive.enclosure = "e1".into();
        }
        let missing = [
            ("d01", "nvme+tcp://10.0.0.1/nqn.x?ns=1: no answer"),
            ("d02", "nvme+tcp://10.0.0.1/nqn.x?ns=2: no answer"),
            ("d03", "nvme+tcp://10.0.0.1/nqn.x?ns=3: another drive"),
            ("other", "no answer"),
        ];
        let told = absent(&cluster, missing);
        let told: Vec<_> = told.iter().map(|it| (&*it.drives, it.count, &*it.why)).collect();
        let expected = [
            ("drive other", 1, "no answer"),
            ("drive d03", 1, "nvme+tcp://10.0.0.1/nqn.x?ns=3: another drive"),
            ("drives d01, d02 of enclosure e1", 2, "no answer"),
        ];
        assert_eq!(told, expected);
        assert_eq!(some_of(&["a", "b", "c", "d", "e", "f"]), "a, b, c, d and 2 more");
    }
}

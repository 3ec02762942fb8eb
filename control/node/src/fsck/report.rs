//! What a check found, as programs get it: `docs/fsck.md` names the fields.

use levada_kv::{KvError, Store};
use levada_meta::{Finding, FsckReport, Paths};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Findings of a target that are told.
const ITEMS_KEPT: usize = 100_000;

/// Something that does not fit together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundItem {
    pub target: String,
    /// The sort.
    pub find: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ino: Option<u64>,
    /// Where that is in the tree, as far as it can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// In the place of `path` when that is no UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub says: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub has: Option<u64>,
    /// In words.
    pub text: String,
    /// What became of it: `left` or `repaired`.
    #[serde(rename = "did")]
    pub done: String,
}

/// What was checked of one target, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TargetReport {
    pub target: String,
    pub inodes: u64,
    pub names: u64,
    /// Of an object target.
    #[serde(default)]
    pub objects: u64,
    /// Of its segments, where those were looked at.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stripes: u64,
    pub rows: u64,
    pub seconds: f64,
    pub memory_bytes: u64,
    /// Those that are told.
    pub items: Vec<FoundItem>,
    /// All that were found.
    pub found: u64,
    /// Of these, those that are no more.
    #[serde(default)]
    pub repaired: u64,
    /// In words.
    pub not_checked: Vec<String>,
    /// Why something was not repaired that could be, in words.
    #[serde(default)]
    pub refused: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde asks for it")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What becomes of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Left,
    Repaired,
}

impl Done {
    fn text(self) -> String {
        match self {
            Self::Left => "left".to_owned(),
            Self::Repaired => "repaired".to_owned(),
        }
    }
}

impl FoundItem {
    /// A finding in a target's metadata, with its place in the tree.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub(super) async fn of(
        target: &str,
        finding: &Finding,
        paths: &mut Paths<'_>,
    ) -> Result<Self, KvError> {
        let (says, has) = finding.says_has().unzip();
        let item = Self {
            target: target.to_owned(),
            find: finding.sort().to_owned(),
            ino: finding.ino().map(|ino| ino.0),
            says,
            has,
            text: finding.to_string(),
            done: Done::Left.text(),
            ..Self::default()
        };
        Ok(item.at(paths.of(finding).await?))
    }

    /// With its place in the tree.
    pub(super) fn at(mut self, path: Option<Vec<u8>>) -> Self {
        (self.path, self.path_b64) = match path.map(String::from_utf8) {
            Some(Ok(path)) => (Some(path), None),
            Some(Err(bytes)) => (None, Some(base64(bytes.as_bytes()))),
            None => (None, None),
        };
        self
    }
}

impl TargetReport {
    /// A target of which nothing could be checked.
    #[must_use]
    pub fn unread(target: &str, why: String) -> Self {
        let target = target.to_owned();
        Self { target, not_checked: vec![format!("everything: {why}")], ..Self::default() }
    }

    /// A report with the findings' places in the tree.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn of(
        target: &str,
        store: &Store,
        report: FsckReport,
        took: Duration,
    ) -> Result<Self, KvError> {
        let mut paths = Paths::new(store);
        let mut items = Vec::with_capacity(report.findings.len());
        for finding in &report.findings {
            items.push(FoundItem::of(target, finding, &mut paths).await?);
        }
        Ok(Self {
            target: target.to_owned(),
            inodes: report.inodes,
            names: report.names,
            rows: report.rows,
            seconds: took.as_secs_f64(),
            memory_bytes: report.memory_bytes,
            items,
            found: report.found(),
            not_checked: report.not_checked,
            ..Self::default()
        })
    }

    /// A target of which nothing was looked at yet.
    pub(super) fn empty(target: &str) -> Self {
        Self { target: target.to_owned(), ..Self::default() }
    }

    /// Takes over what a check counted.
    pub(super) fn take_sums(&mut self, report: &FsckReport) {
        (self.inodes, self.names, self.rows) = (report.inodes, report.names, report.rows);
        self.memory_bytes = report.memory_bytes;
        self.not_checked.extend(report.not_checked.iter().cloned());
    }

    /// Takes in what became of findings.
    pub(super) fn add(&mut self, items: impl IntoIterator<Item = FoundItem>, done: Done) {
        for item in items {
            self.found += 1;
            self.repaired += u64::from(done == Done::Repaired);
            if self.items.len() < ITEMS_KEPT {
                self.items.push(FoundItem { done: done.text(), ..item });
            }
        }
    }
}

/// The last line for programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sum {
    pub inodes: u64,
    pub names: u64,
    #[serde(default)]
    pub objects: u64,
    pub rows: u64,
    pub found: u64,
    #[serde(default)]
    pub repaired: u64,
    pub left: u64,
    pub not_checked: Vec<String>,
    pub seconds: f64,
    pub memory_bytes: u64,
}

impl Sum {
    /// What all targets come to together.
    #[must_use]
    pub fn of(targets: &[TargetReport]) -> Self {
        let sum = |of: fn(&TargetReport) -> u64| targets.iter().map(of).sum();
        let not_checked = targets.iter().flat_map(|report| {
            report.not_checked.iter().map(|what| format!("{}: {what}", report.target))
        });
        Self {
            inodes: sum(|report| report.inodes),
            names: sum(|report| report.names),
            objects: sum(|report| report.objects),
            rows: sum(|report| report.rows),
            found: sum(|report| report.found),
            repaired: sum(|report| report.repaired),
            left: sum(|report| report.found.saturating_sub(report.repaired)),
            not_checked: not_checked.collect(),
            seconds: targets.iter().map(|report| report.seconds).sum(),
            memory_bytes: targets.iter().map(|report| report.memory_bytes).max().unwrap_or(0),
        }
    }

    /// The program's exit code: bits that are added.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        const REPAIRED: u8 = 1;
        const LEFT: u8 = 4;
        const NOT_CHECKED: u8 = 8;
        u8::from(self.repaired > 0) * REPAIRED
            + u8::from(self.left > 0) * LEFT
            + u8::from(!self.not_checked.is_empty()) * NOT_CHECKED
    }
}

/// RFC 4648, with padding: JSON has no bytes.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let mut bits = [0; 4];
        bits[1..=group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes(bits);
        for digit in 0..4 {
            let value = bits >> (18 - 6 * digit) & 63;
            text.push(if digit <= group.len() { DIGITS[value as usize].into() } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_the_text_of_rfc_4648() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }

    #[test]
    fn the_exit_code_tells_what_is_left_and_what_was_not_checked() {
        let clean = TargetReport { target: "mdt0".into(), rows: 9, ..TargetReport::default() };
        assert_eq!(Sum::of(std::slice::from_ref(&clean)).exit_code(), 0);
        let found = TargetReport { found: 2, ..clean.clone() };
        assert_eq!(Sum::of(&[clean.clone(), found.clone()]).exit_code(), 4);
        let repaired = TargetReport { repaired: 1, ..found.clone() };
        assert_eq!(Sum::of(&[clean.clone(), repaired]).exit_code(), 5);
        let all = TargetReport { repaired: 2, ..found.clone() };
        assert_eq!(Sum::of(&[all]).exit_code(), 1);
        let unread = TargetReport::unread("mdt1", "its store is damaged".into());
        assert_eq!(Sum::of(&[clean, unread.clone()]).exit_code(), 8);
        let sum = Sum::of(&[found, unread]);
        assert_eq!((sum.exit_code(), sum.rows), (12, 9));
        assert_eq!(sum.not_checked, ["mdt1: everything: its store is damaged"]);
    }
}

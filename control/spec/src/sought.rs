//! Drives that a cluster file leaves to be found: an enclosure on the network has a `url` and no `drives`.
//!
//! Which drives a cluster has stands in its file all the same, before anything is made of it: whoever has asked the enclosures writes
//! what they have said into the text, and from then on it is a cluster file like others.

use crate::pattern;
use levada_nvme::{DISCOVERY_NQN, NvmeUrl};
use toml_edit::{Array, Decor, DocumentMut, Item, TableLike, Value};

/// An enclosure whose drives are to be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoughtEnclosure {
    /// As the file calls it; empty where it has forgotten to.
    pub name: String,
    /// Where to ask: the subsystem, or that of discovery where the file does not say which.
    pub url: NvmeUrl,
    /// The file has a power fence, so that drives do without reservations.
    pub has_power_fence: bool,
    /// Which of the `[[enclosure]]` it is, from 0.
    at: usize,
}

/// What one was found to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundEnclosure {
    /// With its subsystem, and the paths to it.
    pub url: String,
    /// Of the namespaces that are its drives, in order.
    pub namespaces: Vec<u32>,
}

/// The enclosures of a cluster file that leave their drives to be found. What is wrong with the text, or with a URL in it, is for
/// [`ClusterFile::parse`](crate::ClusterFile::parse) to say.
#[must_use]
pub fn sought(text: &str) -> Vec<SoughtEnclosure> {
    let Ok(document) = text.parse::<DocumentMut>() else { return Vec::new() };
    let enclosures: Vec<&dyn TableLike> = match document.get("enclosure") {
        Some(Item::ArrayOfTables(tables)) => {
            tables.iter().map(|table| table as &dyn TableLike).collect()
        }
        Some(Item::Value(Value::Array(tables))) => {
            let tables = tables.iter().map(Value::as_inline_table);
            tables.map_while(|table| table.map(|table| table as &dyn TableLike)).collect()
        }
        _ => return Vec::new(),
    };
    let has_power_fence =
        document.get("cluster").is_some_and(|cluster| cluster.get("power_fence").is_some());
    let all = enclosures.iter().enumerate().filter(|(_, table)| !table.contains_key("drives"));
    all.filter_map(|(at, table)| {
        let url = parse_url(table.get("url")?.as_str()?)?;
        let name = table.get("name").and_then(Item::as_str).unwrap_or_default().to_owned();
        Some(SoughtEnclosure { name, url, has_power_fence, at })
    })
    .collect()
}

/// A URL that may lack its subsystem.
fn parse_url(text: &str) -> Option<NvmeUrl> {
    let (place, options) = match text.split_once('?') {
        Some((place, options)) => (place, format!("?{options}")),
        None => (text, String::new()),
    };
    let addresses = place.split_once("://").map_or(place, |(_, addresses)| addresses);
    let whole = match addresses.trim_end_matches('/').contains('/') {
        true => text.to_owned(),
        false => format!("{}/{DISCOVERY_NQN}{options}", place.trim_end_matches('/')),
    };
    let url: NvmeUrl = whole.parse().ok()?;
    (url.namespace == 0).then_some(url)
}

/// The text of the same cluster file, in which these enclosures are what they were found to be. Everything else in it stays as it is.
///
/// # Panics
///
/// When `found` is not of this text.
#[must_use]
pub fn with_found(text: &str, found: &[(SoughtEnclosure, FoundEnclosure)]) -> String {
    let mut document: DocumentMut = text.parse().expect("it was searched");
    let enclosures = document.get_mut("enclosure").expect("it was searched");
    let is_inline = enclosures.is_array();
    for (sought, found) in found {
        let table = match &mut *enclosures {
            Item::ArrayOfTables(tables) => {
                tables.get_mut(sought.at).map(|table| table as &mut dyn TableLike)
            }
            other => {
                let tables = other.as_array_mut().and_then(|tables| tables.get_mut(sought.at));
                let table = tables.and_then(Value::as_inline_table_mut);
                table.map(|table| table as &mut dyn TableLike)
            }
        };
        let table = table.expect("it was searched");
        let old = table.get_mut("url").and_then(Item::as_value_mut).expect("it was searched");
        // With what stands behind it in its line.
        let mut decor = old.decor().clone();
        let patterns: Array = pattern::of_numbers(&found.namespaces).into_iter().collect();
        let mut patterns = Value::from(patterns);
        // In a table of one line that is before its end, where the drives go.
        if is_inline && let Some(suffix) = decor.suffix().cloned() {
            *patterns.decor_mut() = Decor::new(" ", suffix);
            decor.set_suffix("");
        }
        *old = Value::from(found.url.as_str());
        *old.decor_mut() = decor;
        table.insert("drives", Item::Value(patterns));
    }
    let whole = document.to_string();
    // As it was; lines of TOML end either way.
    let has_all = !text.is_empty() && text.matches('\n').count() == text.matches("\r\n").count();
    if has_all { whole.replace('\n', "\r\n") } else { whole }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ClusterFile;

    const FILE: &str = r#"# ours
[cluster]
name = "lab"

[[enclosure]]
name = "e1"
url = "nvme+tcp://192.0.2.1"   # the first

[[enclosure]]
url = "nvme+tcp://192.0.2.2:4420/nqn.2014-08.org.example:e2?ddgst=1"
name = "e2"

# as always
[[enclosure]]
name = "e3"
url = "nvme+tcp://192.0.2.3/nqn.2014-08.org.example:e3"
drives = ["{1..2}"]

[[array]]
name = "meta"
level = "raid1"
copies = 3
slice = "32MiB"
[[array]]
name = "data"
level = "raid6"
[[filesystem]]
name = "fs"
data = "data"
metadata = "meta"
object_targets = 1
"#;

    #[test]
    fn what_is_found_stands_in_the_file() {
        let all = sought(FILE);
        let named: Vec<_> =
            all.iter().map(|one| (one.name.as_str(), one.url.to_string())).collect();
        let discovery = format!("nvme+tcp://192.0.2.1:4420/{DISCOVERY_NQN}");
        let second = "nvme+tcp://192.0.2.2:4420/nqn.2014-08.org.example:e2?ddgst=1".to_owned();
        assert_eq!(named, [("e1", discovery), ("e2", second.clone())]);
        assert!(ClusterFile::parse("levada.toml", FILE).is_err());
        let first =
            "nvme+tcp://192.0.2.1:4420,192.0.2.9:4420/nqn.2014-08.org.example:e1".to_owned();
        let found = [
            FoundEnclosure { url: first, namespaces: vec![1, 3] },
            FoundEnclosure { url: second, namespaces: vec![7, 8] },
        ];
        let text = with_found(FILE, &all.into_iter().zip(found).collect::<Vec<_>>());
        let as_written = FILE
            .replace(
                "\"nvme+tcp://192.0.2.1\"   # the first\n",
                "\"nvme+tcp://192.0.2.1:4420,192.0.2.9:4420/nqn.2014-08.org.example:e1\"   # the first\n\
                 drives = [\"1\", \"3\"]\n",
            )
            .replace("name = \"e2\"\n", "name = \"e2\"\ndrives = [\"{7..8}\"]\n");
        assert_eq!(text, as_written);
        let (cluster, _) = ClusterFile::parse("levada.toml", &text).expect("a cluster file");
        let drives: Vec<_> = cluster.drives.iter().map(|drive| drive.name.as_str()).collect();
        assert_eq!(drives, ["e1-1", "e1-3", "e2-7", "e2-8", "e3-1", "e3-2"]);
        assert_eq!(sought(&text), []);
    }

    #[test]
    fn a_file_stays_in_the_form_that_it_has() {
        let found = |name: &str| FoundEnclosure {
            url: format!("nvme+tcp://192.0.2.1:4420/nqn.x:{name}"),
            namespaces: vec![1, 2],
        };
        for (text, written) in [
            (
                "enclosure = [{ name = \"a\", url = \"nvme+tcp://a\" }]\n",
                "enclosure = [{ name = \"a\", url = \"nvme+tcp://192.0.2.1:4420/nqn.x:a\", drives = [\"{1..2}\"] }]\n",
            ),
            (
                "# ours\r\n[[enclosure]]\r\nname = \"b\"\r\nurl = \"nvme+tcp://b\"\r\n",
                "# ours\r\n[[enclosure]]\r\nname = \"b\"\r\nurl = \"nvme+tcp://192.0.2.1:4420/nqn.x:b\"\r\ndrives = [\"{1..2}\"]\r\n",
            ),
        ] {
            let all = sought(text);
            let [one] = &all[..] else { panic!("{all:?}") };
            assert_eq!(with_found(text, &[(one.clone(), found(&one.name))]), written);
        }
    }

    #[test]
    fn where_the_subsystem_is_not_said_whoever_tells_of_them_is_asked() {
        for (url, read) in [
            ("nvme+tcp://a", Some("nvme+tcp://a:4420/DISCOVERY")),
            ("nvme+tcp://a:1,b/", Some("nvme+tcp://a:1,b:4420/DISCOVERY")),
            (
                "nvme+tcp://[::1]?host=nqn.x:h&keys=/k",
                Some("nvme+tcp://[::1]:4420/DISCOVERY?host=nqn.x:h&keys=/k"),
            ),
            ("nvme+tcp://a/nqn.x?ddgst=1", Some("nvme+tcp://a:4420/nqn.x?ddgst=1")),
            ("nvme+tcp://a/nqn.x?ns=2", None),
            ("nvme+tcp://", None),
            ("http://a", None),
            ("", None),
        ] {
            let text = format!("[[enclosure]]\nurl = {url:?}\n");
            let all = sought(&text);
            let is = all.first().map(|one| one.url.to_string());
            assert_eq!(is, read.map(|url| url.replace("DISCOVERY", DISCOVERY_NQN)), "{url}");
        }
        for text in [
            "",
            "[",
            "enclosure = 1",
            "[enclosure]\nurl = \"nvme+tcp://a\"",
            "[[enclosure]]\nurl = 1",
        ] {
            assert_eq!(sought(text), [], "{text}");
        }
    }
}

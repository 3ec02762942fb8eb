//! What a guest is shown at a socket: all of the file system, or one directory, to a kernel that is not trusted with the rest.

use super::leave::{Leave, Leaves, shortened, wanted};
use anyhow::{Context, Result, bail};
use levada_base::Buf;
use levada_base::ids::Ino;
use levada_client::Client;
use levada_export_vhost::Tag;
use levada_mount::codec::{Limits, Negotiated};
use levada_mount::files::{Files, GuestCache};
use levada_mount::subtree::Subtree;
use levada_mount::{Errno, Handler, Reply, Request};
use levada_spec::{GuestCacheSpec, SubtreePath};
use levada_wire::attr::Kind;
use std::fmt;
use std::rc::Rc;

/// What a guest finds at a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// What it mounts by.
    pub tag: Tag,
    pub cache: GuestCacheSpec,
    /// All that is shown of the file system; `None`: the whole.
    pub part: Option<Part>,
}

/// A directory of the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub path: SubtreePath,
    /// Whose it has to be, by its number; `None`: whosever it is.
    pub tenant: Option<u32>,
}

impl View {
    /// As lines of the note of a mount: what is shown stands there from the beginning to the end of the process, and after it.
    pub(super) fn to_lines(&self) -> String {
        let mut lines = format!("tag {}\ncache {}\n", self.tag, self.cache);
        if let Some(Part { path, tenant }) = &self.part {
            lines += &format!("subtree {path}\n");
            if let Some(tenant) = tenant {
                lines += &format!("tenant {tenant}\n");
            }
        }
        lines
    }

    /// What the process shows of which this is the text of the note; `None`: it is that of a mount on a directory.
    #[must_use]
    pub fn noted(text: &str) -> Option<Self> {
        let line = |word: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(word)?.strip_prefix(' '))
                .map(String::from)
        };
        let tenant = line("tenant").and_then(|number| number.parse().ok());
        // A directory that cannot be read is not the whole.
        let part = match line("subtree") {
            Some(path) => Some(Part { path: path.parse().ok()?, tenant }),
            None => None,
        };
        Some(Self { tag: line("tag")?.parse().ok()?, cache: line("cache")?.parse().ok()?, part })
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.part {
            Some(part) => write!(f, "{}", part.path)?,
            None => f.write_str("all of the file system")?,
        }
        write!(f, " by the tag {}, with --cache {}", self.tag, self.cache)
    }
}

/// The directory of a part, and whose it is. Links are not followed: they may lead anywhere.
async fn root_of(client: &Client, part: &Part) -> Result<(Ino, u32)> {
    let (mut ino, mut tenant) = (Ino::ROOT, 0);
    let mut at = String::new();
    for name in part.path.names() {
        at = format!("{at}/{name}");
        let attr = client.lookup(ino, name.as_bytes()).await.with_context(|| at.clone())?;
        if attr.kind != Kind::Directory {
            bail!("{at} is no directory");
        }
        (ino, tenant) = (attr.ino, attr.tenant);
    }
    // The path may lead to another directory by now, which somebody else was given.
    if part.tenant.is_some_and(|owner| owner != tenant) {
        bail!("{at} belongs to another tenant");
    }
    Ok((ino, tenant))
}

/// Answers what a guest's kernel asks.
pub(super) enum Shown {
    /// By all of the file system, for a guest that is trusted with it.
    Whole(Files),
    /// With what it needs to read and write, where that is a tenant's.
    Part(Subtree<Files>, Option<Rc<Leave>>),
}

impl Shown {
    /// What `client` has of the view.
    ///
    /// # Errors
    ///
    /// When that part is not there, or is somebody else's.
    pub(super) async fn of(view: &View, client: &Client, leaves: &Leaves) -> Result<Self> {
        let cache = match view.cache {
            GuestCacheSpec::None => GuestCache::None,
            GuestCacheSpec::Open => GuestCache::Open,
        };
        let files = Files::new(client.clone()).for_guest(cache);
        let Some(part) = &view.part else { return Ok(Self::Whole(files)) };
        let (root, tenant) = root_of(client, part).await?;
        Ok(Self::Part(Subtree::new(files, root), leaves.of(tenant)))
    }

    pub(super) fn limits(&self) -> Limits {
        match self {
            Self::Whole(_) => Files::limits(),
            Self::Part(..) => Subtree::<Files>::limits(Files::limits()),
        }
    }
}

impl Handler for Shown {
    async fn handle(&self, request: Request<'_>, message: &Buf) -> Reply {
        match self {
            Self::Whole(files) => files.handle(request, message).await,
            Self::Part(subtree, None) => subtree.handle(request, message).await,
            Self::Part(subtree, Some(leave)) => {
                let request = Request { operation: shortened(request.operation), ..request };
                if let Some(wanted) = wanted(&request.operation)
                    && leave.take(wanted).await.is_err()
                {
                    return Reply::Error(Errno::IO);
                }
                subtree.handle(request, message).await
            }
        }
    }

    fn mounted(&self, terms: &Negotiated) {
        match self {
            Self::Whole(files) => files.mounted(terms),
            Self::Part(subtree, _) => subtree.mounted(terms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_volume::Catalogue;

    #[test]
    fn a_view_reads_as_noted() {
        let part = |tenant| Part { path: "/guests/vm 1".parse().expect("a path"), tenant };
        for part in [None, Some(part(None)), Some(part(Some(7)))] {
            for (tag, cache) in [("t", GuestCacheSpec::None), ("a tag: 1", GuestCacheSpec::Open)] {
                let view = View { tag: tag.parse().expect("a tag"), cache, part: part.clone() };
                assert_eq!(View::noted(&view.to_lines()), Some(view.clone()));
                let whole = format!("4711 0:0\n{}", view.to_lines());
                assert_eq!(View::noted(&whole), Some(view));
            }
        }
        assert_eq!(View::noted("4711 0:52\n"), None);
        assert_eq!(View::noted("tag t\ncache none\nsubtree nonsense\n"), None, "not the whole");
    }

    /// What the cluster file refuses is told by crates that do not know each other.
    #[test]
    fn where_volumes_are_kept_and_long_tags_are_refused() {
        assert!(Catalogue::HOME.parse::<SubtreePath>().is_err());
        let tag = |bytes: usize| "t".repeat(bytes).parse::<Tag>();
        assert!(tag(levada_spec::TAG_BYTES_MOST).is_ok());
        assert!(tag(levada_spec::TAG_BYTES_MOST + 1).is_err());
    }
}

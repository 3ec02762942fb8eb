//! Listings.
//!
//! What always holds: the kernel's offset is the service's cookie. The service begins at 3, as
//! 1 is the place after `.` and 2 the place after `..`; so a listing can go on anywhere, in any
//! process, whatever was made or removed meanwhile.

use super::Files;
use crate::codec::{DirBuilder, Entry, Errno, ReadArgs, Reply};
use futures_util::future::{join, join_all};
use levada_base::ids::Ino;
use levada_wire::attr::{Attr, Kind};
use levada_wire::meta::DirEntry;

const AFTER_DOT: u64 = 1;
const AFTER_DOT_DOT: u64 = 2;
/// Entries of one reply, at most.
const ENTRIES_MAX: u32 = 1024;
/// Bytes of the body of a reply, at most.
const BODY_BYTES_MAX: u32 = 1 << 20;
/// What an entry with a short name takes in a reply, without and with attributes.
const ENTRY_BYTES: u32 = 40;
const ENTRY_PLUS_BYTES: u32 = 168;

impl Files {
    /// As many entries after the cookie `args.offset` as fit; with attributes when `plus`.
    pub(super) async fn read_dir(
        &self,
        ino: Ino,
        args: ReadArgs,
        plus: bool,
    ) -> Result<Reply, Errno> {
        let (dir, size) = (ino, args.size.min(BODY_BYTES_MAX));
        let entry_bytes = if plus { ENTRY_PLUS_BYTES } else { ENTRY_BYTES };
        let entries_max = (size / entry_bytes).clamp(1, ENTRIES_MAX);
        let asking = self.ask();
        let listed = self.client.read_dir(ino, args.offset.max(AFTER_DOT_DOT), entries_max, plus);
        let dots = async {
            Ok::<_, Errno>(if args.offset < AFTER_DOT_DOT {
                Some(self.client.attr(ino).await?.parent)
            } else {
                None
            })
        };
        let (listed, parent) = join(listed, dots).await;
        let (entries, _) = listed?;
        self.names.listed(ino, entries.iter().map(|entry| &entry.name[..]));
        for attr in entries.iter().filter_map(|entry| entry.attr.as_deref()) {
            self.told(attr, asking);
        }
        let mut body = DirBuilder::new(size);
        if let Some(parent) = parent? {
            let dots = [(ino, AFTER_DOT, &b"."[..]), (parent, AFTER_DOT_DOT, b"..")];
            for (ino, cookie, name) in dots.into_iter().filter(|dot| dot.1 > args.offset) {
                if !put(&mut body, ino, None, plus, cookie, libc::S_IFDIR, name) {
                    return Ok(Reply::Bytes(body.finish()));
                }
            }
        }
        let exact = if plus { self.exact_attrs(&entries).await } else { Vec::new() };
        for (at, entry) in entries.iter().enumerate() {
            let DirEntry { cookie, name, ino, .. } = entry;
            let known = exact.get(at).and_then(Option::as_ref);
            // One that the kernel has elsewhere it looks up by itself.
            let is_elsewhere = |attr: &Attr| {
                attr.kind == Kind::Directory && !self.places.agrees(attr.ino, dir, name)
            };
            let known = known.filter(|attr| !is_elsewhere(attr));
            // Nothing comes between this and the answer.
            let known = known.map(|attr| self.entry_of(dir, name, attr));
            if !put(&mut body, *ino, known.as_ref(), plus, *cookie, mode_of(entry), name) {
                break;
            }
        }
        Ok(Reply::Bytes(body.finish()))
    }

    /// The attributes of listed entries: those of files that are being written are asked for again, as a listing does not
    /// know their sizes.
    async fn exact_attrs(&self, entries: &[DirEntry]) -> Vec<Option<Attr>> {
        let exact = entries.iter().map(|entry| async move {
            let attr = entry.attr.as_deref()?;
            if !attr.writers {
                return Some(attr.clone());
            }
            let asking = self.ask();
            // One that is gone meanwhile is listed without.
            let attr = self.client.attr(attr.ino).await.ok()?;
            self.told(&attr, asking);
            Some(attr)
        });
        join_all(exact).await
    }
}

/// The type bits; none where a listing does not tell.
fn mode_of(entry: &DirEntry) -> u32 {
    match entry.kind {
        Kind::File => libc::S_IFREG,
        Kind::Directory => libc::S_IFDIR,
        Kind::Symlink => libc::S_IFLNK,
        Kind::Special => entry.attr.as_ref().map_or(0, |attr| attr.mode & libc::S_IFMT),
    }
}

fn put(
    body: &mut DirBuilder,
    ino: Ino,
    known: Option<&Entry>,
    plus: bool,
    cookie: u64,
    mode: u32,
    name: &[u8],
) -> bool {
    if plus {
        let entry = known.copied().unwrap_or_default();
        body.entry_plus(ino.0, &entry, cookie, mode, name)
    } else {
        body.entry(ino.0, cookie, mode, name)
    }
}

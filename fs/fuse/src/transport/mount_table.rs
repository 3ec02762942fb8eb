//! `/proc/self/mountinfo`: what is mounted where (proc(5)).
//!
//! ```text
//! 36 35 98:0 /root /mount/point options [optional fields...] - type source super-options
//! ```
//!
//! Reading it asks no file system anything, so it cannot hang on a dead one.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    pub id: u64,
    pub device_major: u32,
    pub device_minor: u32,
    pub point: PathBuf,
    pub fs_type: String,
}

/// The mount seen at `point`: the last one there covers those before it.
pub(super) fn top_mount_at(point: &Path) -> io::Result<Option<Mounted>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mut mounts = table.split(|&byte| byte == b'\n').filter_map(parse_line);
    Ok(mounts.rfind(|mounted| mounted.point == point))
}

fn parse_line(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = text(fields.next()?)?.parse().ok()?;
    let (major, minor) = text(fields.nth(1)?)?.split_once(':')?;
    let point = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    let fs_type = text(fields.skip_while(|field| *field != b"-").nth(1)?)?.to_owned();
    Some(Mounted {
        id,
        device_major: major.parse().ok()?,
        device_minor: minor.parse().ok()?,
        point,
        fs_type,
    })
}

fn text(field: &[u8]) -> Option<&str> {
    std::str::from_utf8(field).ok()
}

/// Space, tab, newline and backslash are written as `\` and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..3).and_then(text).filter(|_| byte == b'\\');
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => {
                plain.push(escaped);
                rest = &after[3..];
            }
            None => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_line() {
        let line =
            br"83 28 0:44 / /mnt/a\040b\134 rw,relatime shared:5 master:1 - fuse.levada levada rw";
        let expected = Mounted {
            id: 83,
            device_major: 0,
            device_minor: 44,
            point: PathBuf::from(r"/mnt/a b\"),
            fs_type: "fuse.levada".into(),
        };
        assert_eq!(parse_line(line), Some(expected));
        assert_eq!(parse_line(b""), None);
        assert_eq!(parse_line(b"83 28 0:44 / /mnt rw"), None);
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(top_mount_at(Path::new("/")).unwrap().is_some());
    }
}

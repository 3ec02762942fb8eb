//! Extended attributes: which names there are, and their limits.

use crate::meta::MetaFault;

/// The longest name, in bytes (XATTR_NAME_MAX).
pub const NAME_BYTES_MAX: usize = 255;
/// The longest value, in bytes (XATTR_SIZE_MAX).
pub const VALUE_BYTES_MAX: usize = 64 << 10;
/// All names of one inode together, each with its NUL, the access control lists not counted: they are written
/// with every change of the inode, also with 64 at once. A block of ext4 holds no more.
pub const NAMES_BYTES_MAX: usize = 4 << 10;

/// The list that decides, in step with the permission bits, who may do what.
pub const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
/// The list of a directory that what is made in it starts with.
pub const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";
/// What a program may do beyond its user's rights. As the set-id bits it does not survive a change of the file.
pub const CAPABILITY: &[u8] = b"security.capability";

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// Bytes that mean nothing here.
    Plain,
    AccessAcl,
    DefaultAcl,
}

impl Sort {
    /// What `name` stands for.
    ///
    /// # Errors
    ///
    /// [`MetaFault::NotSupported`] for a name outside the namespaces (xattr(7)), [`MetaFault::Invalid`] for one that
    /// is nothing but a namespace, or no name.
    pub fn of(name: &[u8]) -> Result<Self, MetaFault> {
        match name {
            ACCESS_ACL => return Ok(Self::AccessAcl),
            DEFAULT_ACL => return Ok(Self::DefaultAcl),
            _ => {}
        }
        let namespaces: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
        let rest = namespaces.iter().find_map(|namespace| name.strip_prefix(*namespace));
        let rest = rest.ok_or(MetaFault::NotSupported)?;
        if rest.is_empty() || rest.contains(&0) || name.len() > NAME_BYTES_MAX {
            return Err(MetaFault::Invalid);
        }
        Ok(Self::Plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_belong_to_namespaces() {
        assert_eq!(Sort::of(b"user.a"), Ok(Sort::Plain));
        assert_eq!(Sort::of(CAPABILITY), Ok(Sort::Plain));
        assert_eq!(Sort::of(ACCESS_ACL), Ok(Sort::AccessAcl));
        assert_eq!(Sort::of(DEFAULT_ACL), Ok(Sort::DefaultAcl));
        for other in [&b"system.nfs4_acl"[..], b"os2.a", b"user", b""] {
            assert_eq!(Sort::of(other), Err(MetaFault::NotSupported));
        }
        let longest = [&b"user."[..], &[b'x'; 250]].concat();
        assert_eq!(Sort::of(&longest), Ok(Sort::Plain));
        for bad in [&b"user."[..], b"user.a\0b", &[&longest[..], b"x"].concat()] {
            assert_eq!(Sort::of(bad), Err(MetaFault::Invalid));
        }
    }
}

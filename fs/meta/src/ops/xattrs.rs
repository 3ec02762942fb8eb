//! Extended attributes, and access control lists, which look like some of them (xattr(7), acl(5)).
//!
//! What always holds: an inode's permission bits are those of its access list, if it has one. A list that says no
//! more than the bits is not kept.

use super::{Answer, S_ISGID, touch_inode};
use crate::acl::{Acl, Malformed, PERMISSIONS};
use crate::key;
use crate::row::{Inode, XattrRow};
use crate::tx::{Stop, Tx};
use levada_base::ids::Ino;
use levada_wire::attr::Kind;
use levada_wire::meta::{Caller, MetaFault, MetaReply, SetXattr};
use levada_wire::xattr::{
    ACCESS_ACL, CAPABILITY, DEFAULT_ACL, NAMES_BYTES_MAX, Sort, VALUE_BYTES_MAX,
};

/// XATTR_CREATE of setxattr(2).
const CREATE: u32 = 1;
/// XATTR_REPLACE of setxattr(2).
const REPLACE: u32 = 2;

pub fn get(tx: &mut Tx<'_>, ino: Ino, name: &[u8]) -> Answer {
    let inode = tx.live(ino)?;
    let value = match Sort::of(name)? {
        Sort::AccessAcl => inode.access_acl.as_ref().map(Acl::value),
        Sort::DefaultAcl => inode.default_acl.as_ref().map(Acl::value),
        Sort::Plain if inode.xattrs.contains(name) => Some(value_of(tx, ino, name)?),
        Sort::Plain => None,
    };
    Ok(MetaReply::Xattr(value.ok_or(MetaFault::NoAttribute)?))
}

fn value_of(tx: &mut Tx<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Stop> {
    let row = tx.row(&key::xattr(ino, name))?.ok_or(MetaFault::Damaged)?;
    Ok(XattrRow::decode(&row)?.value)
}

pub fn list(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    let inode = tx.live(ino)?;
    let mut names = inode.xattr_list();
    for (acl, name) in [(&inode.access_acl, ACCESS_ACL), (&inode.default_acl, DEFAULT_ACL)] {
        if acl.is_some() {
            names.extend_from_slice(name);
            names.push(0);
        }
    }
    Ok(MetaReply::Xattr(names))
}

pub fn set(
    tx: &mut Tx<'_>,
    caller: Caller,
    ino: Ino,
    (name, value): (&[u8], &[u8]),
    how: SetXattr,
) -> Answer {
    let mut inode = tx.live(ino)?;
    let sort = Sort::of(name)?;
    check_owner(caller, &inode, sort)?;
    let is_there = has(&inode, sort, name);
    if is_there && how.flags & CREATE != 0 {
        return Err(MetaFault::Exists.into());
    }
    if !is_there && how.flags & REPLACE != 0 {
        return Err(MetaFault::NoAttribute.into());
    }
    match sort {
        Sort::Plain => {
            if value.len() > VALUE_BYTES_MAX {
                return Err(MetaFault::TooLarge.into());
            }
            if !is_there {
                if inode.xattr_list().len() + name.len() + 1 > NAMES_BYTES_MAX {
                    return Err(MetaFault::Full.into());
                }
                inode.xattrs.insert(name.to_vec());
            }
            tx.put(&key::xattr(ino, name), &XattrRow::encode(value));
        }
        Sort::AccessAcl | Sort::DefaultAcl => {
            let acl = Acl::from_value(value).map_err(|Malformed| MetaFault::Invalid)?;
            match (inode.kind(), sort, acl) {
                (Kind::Symlink, ..) => return Err(MetaFault::NotSupported.into()),
                (_, Sort::AccessAcl, Some(acl)) => {
                    set_access_acl(&mut inode, acl);
                    if how.clear_set_gid {
                        inode.mode &= !S_ISGID;
                    }
                }
                (_, Sort::AccessAcl, None) => inode.access_acl = None,
                (Kind::Directory, _, acl) => inode.default_acl = acl,
                (_, _, None) => {}
                (_, _, Some(_)) => return Err(MetaFault::Invalid.into()),
            }
        }
    }
    touch_inode(tx, &mut inode);
    tx.put_inode(ino, &inode);
    Ok(MetaReply::Done)
}

pub fn remove(tx: &mut Tx<'_>, caller: Caller, ino: Ino, name: &[u8]) -> Answer {
    let mut inode = tx.live(ino)?;
    let sort = Sort::of(name)?;
    check_owner(caller, &inode, sort)?;
    if !has(&inode, sort, name) {
        return Err(MetaFault::NoAttribute.into());
    }
    match sort {
        Sort::Plain => take(tx, ino, &mut inode, name),
        Sort::AccessAcl => inode.access_acl = None,
        Sort::DefaultAcl => inode.default_acl = None,
    }
    touch_inode(tx, &mut inode);
    tx.put_inode(ino, &inode);
    Ok(MetaReply::Done)
}

fn has(inode: &Inode, sort: Sort, name: &[u8]) -> bool {
    match sort {
        Sort::Plain => inode.xattrs.contains(name),
        Sort::AccessAcl => inode.access_acl.is_some(),
        Sort::DefaultAcl => inode.default_acl.is_some(),
    }
}

/// A list is changed by whom the permission bits are changed by; the rest is the kernel's to check.
fn check_owner(caller: Caller, inode: &Inode, sort: Sort) -> Result<(), MetaFault> {
    let owner = [0, inode.uid].contains(&caller.uid);
    if sort != Sort::Plain && !owner { Err(MetaFault::NotPermitted) } else { Ok(()) }
}

fn set_access_acl(inode: &mut Inode, acl: Acl) {
    inode.mode = inode.mode & !PERMISSIONS | acl.mode();
    inode.access_acl = (!acl.is_minimal()).then_some(acl);
}

/// What is new takes its lists from the directory's default one, or else minds the umask.
pub(super) fn inherit(inode: &mut Inode, directory: &Inode, umask: u32) {
    match (&directory.default_acl, inode.kind()) {
        (_, Kind::Symlink) => {}
        (None, _) => inode.mode &= !(umask & PERMISSIONS),
        (Some(default), kind) => {
            let mut access = default.clone();
            access.set_mode(access.mode() & inode.mode);
            set_access_acl(inode, access);
            inode.default_acl = (kind == Kind::Directory).then(|| default.clone());
        }
    }
}

/// A file's bytes or owner change: what it may do beyond its user's rights goes (capabilities(7)). The caller writes the
/// inode.
pub(super) fn drop_capability(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode) {
    if inode.xattrs.contains(CAPABILITY) {
        take(tx, ino, inode, CAPABILITY);
    }
}

fn take(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode, name: &[u8]) {
    inode.xattrs.remove(name);
    tx.delete(&key::xattr(ino, name));
}

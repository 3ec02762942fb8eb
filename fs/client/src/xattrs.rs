//! Extended attributes.

use crate::client::Client;
use crate::error::Error;
use levada_base::ids::Ino;
use levada_wire::meta::{Caller, MetaReply, MetaRequest, SetXattr};

impl Client {
    /// The value of an attribute.
    ///
    /// # Errors
    ///
    /// `NoAttribute`, and what else the metadata service says.
    pub async fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Error> {
        bytes(self.read(MetaRequest::GetXattr { ino, name: name.to_vec() }).await?)
    }

    /// The names of all attributes, each with a NUL behind it.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn xattrs(&self, ino: Ino) -> Result<Vec<u8>, Error> {
        bytes(self.read(MetaRequest::ListXattrs { ino }).await?)
    }

    /// Sets an attribute.
    ///
    /// # Errors
    ///
    /// `NotSupported` for a name outside the namespaces, `Exists` and `NoAttribute` as the flags ask, `TooLarge`, `Full`
    /// when the inode's names take too much, `Invalid` for a list that makes no sense.
    pub async fn set_xattr(
        &self,
        caller: Caller,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        how: SetXattr,
    ) -> Result<(), Error> {
        let (name, value) = (name.to_vec(), value.to_vec());
        done(self.change(MetaRequest::SetXattr { caller, ino, name, value, how }).await?)
    }

    /// Removes an attribute.
    ///
    /// # Errors
    ///
    /// `NoAttribute`, and what else the metadata service says.
    pub async fn remove_xattr(&self, caller: Caller, ino: Ino, name: &[u8]) -> Result<(), Error> {
        done(self.change(MetaRequest::RemoveXattr { caller, ino, name: name.to_vec() }).await?)
    }
}

fn bytes(reply: MetaReply) -> Result<Vec<u8>, Error> {
    match reply {
        MetaReply::Xattr(bytes) => Ok(bytes),
        _ => Err(Error::Dialect),
    }
}

fn done(reply: MetaReply) -> Result<(), Error> {
    match reply {
        MetaReply::Done => Ok(()),
        _ => Err(Error::Dialect),
    }
}

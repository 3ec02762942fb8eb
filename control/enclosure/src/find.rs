//! What there is at a network address, for whoever writes a cluster file: each subsystem as the `[[enclosure]]` that it could be.

use levada_base::reactor::Reactor;
use levada_device::nvme::{
    Host, NamespaceError, NvmeUrl, Options, UrlError, find as find_subsystems,
    look_into as look_into_subsystem,
};
use levada_export_nvmet::Nqn;
use serde::Serialize;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// Why nothing can be found.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error("cannot use io_uring: {0}")]
    Reactor(io::Error),
    #[error("cannot make a name for this host: {0}")]
    Host(io::Error),
    #[error(transparent)]
    Address(#[from] UrlError),
    #[error("{keys:?} cannot stand in the URL of a subsystem: a name without `&`, in UTF-8, can")]
    KeysName { keys: PathBuf },
    #[error("cannot tell where {} is: {source}", keys.display())]
    KeysPlace { keys: PathBuf, source: io::Error },
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
}

/// A subsystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// What a cluster file, or with `ns=` an array, calls it.
    pub url: String,
    pub subsystem: String,
    /// Why its drives cannot be told.
    pub problem: Option<String>,
    pub drives: Vec<FoundDrive>,
}

/// A namespace of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundDrive {
    pub namespace: u32,
    /// 0: it cannot be used.
    pub bytes: u64,
    pub block_bytes: u64,
    /// Servers can be kept apart by it.
    pub has_reservations: bool,
    pub is_read_only: bool,
}

impl FoundDrive {
    /// Whether it can be a drive of a cluster, of one with a power fence or without.
    #[must_use]
    pub fn is_usable(&self, has_power_fence: bool) -> bool {
        self.bytes > 0 && !self.is_read_only && (self.has_reservations || has_power_fence)
    }
}

/// Asks at `address` (`HOST[:PORT]`, port 4420 unless given, also as a URL of that), as `host`, with the secrets and keys of the file `keys`.
///
/// # Errors
///
/// [`FindError`]. A subsystem that cannot be looked into is none.
pub fn find(
    address: &str,
    host: Option<&Nqn>,
    keys: Option<&Path>,
) -> Result<Vec<Found>, FindError> {
    // What is found is shown with it, to be copied into a file that stands elsewhere.
    let from_the_root = |keys: &Path| {
        let failed = |source| FindError::KeysPlace { keys: keys.to_owned(), source };
        std::path::absolute(keys).map_err(failed)
    };
    let keys = keys.map(from_the_root).transpose()?;
    if let Some(keys) =
        keys.as_ref().filter(|keys| keys.to_str().is_none_or(|name| name.contains('&')))
    {
        return Err(FindError::KeysName { keys: keys.to_owned() });
    }
    let address = address.strip_prefix("nvme+tcp://").unwrap_or(address).trim_end_matches('/');
    find_at(&NvmeUrl { host: host.cloned(), keys, ..NvmeUrl::discovery(address)? })
}

/// Looks into the subsystem of a URL; if that is the one of discovery, into all of which it tells.
///
/// # Errors
///
/// [`FindError`]. A subsystem that cannot be looked into is none.
pub fn find_at(url: &NvmeUrl) -> Result<Vec<Found>, FindError> {
    let reactor = Reactor::new().map_err(FindError::Reactor)?;
    reactor.block_on(async {
        let host = Host::anonymous().map_err(|error| FindError::Host(io::Error::other(error)))?;
        let options = Options::new(host);
        let found = match url.subsystem == Nqn::discovery() {
            true => find_subsystems(url, options).await?,
            false => vec![look_into_subsystem(url, options).await],
        };
        Ok(found.into_iter().map(Found::from).collect())
    })
}

/// An error with what is behind it.
fn whole(error: &dyn Error) -> String {
    let mut said = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if !said.contains(&text) {
            said.push_str(": ");
            said.push_str(&text);
        }
        source = cause.source();
    }
    said
}

impl From<levada_device::nvme::FoundSubsystem> for Found {
    fn from(found: levada_device::nvme::FoundSubsystem) -> Self {
        let problem = found.namespaces.as_ref().err().map(|error| whole(error));
        let drives = found.namespaces.unwrap_or_default().into_iter().map(|namespace| FoundDrive {
            namespace: namespace.number,
            bytes: namespace.bytes,
            block_bytes: namespace.block_bytes,
            has_reservations: namespace.has_reservations,
            is_read_only: namespace.is_read_only,
        });
        let (url, subsystem) = (found.url.to_string(), found.url.subsystem.to_string());
        Self { url, subsystem, problem, drives: drives.collect() }
    }
}

impl Found {
    /// As a cluster file has it: of drives that can be used, and that servers can be kept apart by. `None`: there is none.
    #[must_use]
    pub fn as_enclosure(&self) -> Option<String> {
        let usable = self.drives.iter().filter(|drive| drive.is_usable(false));
        let numbers: Vec<u32> = usable.map(|drive| drive.namespace).collect();
        let runs = levada_spec::of_numbers(&numbers);
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        let name = self.subsystem.rsplit([':', '.']).find(|part| !part.is_empty()).unwrap_or("");
        let name: String = name.chars().filter(|c| is_plain(*c)).take(20).collect();
        let name =
            if name.starts_with(|c: char| c.is_ascii_alphanumeric()) { name } else { "e1".into() };
        (!runs.is_empty()).then(|| {
            let (url, drives) = (&self.url, runs.join("\", \""));
            format!("[[enclosure]]\nname = \"{name}\"\nurl = \"{url}\"\ndrives = [\"{drives}\"]\n")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(namespace: u32, bytes: u64, has_reservations: bool) -> FoundDrive {
        FoundDrive { namespace, bytes, block_bytes: 512, has_reservations, is_read_only: false }
    }

    #[test]
    fn what_is_found_is_an_enclosure_of_a_cluster_file() {
        let url =
            "nvme+tcp://10.0.0.1:4420,10.0.1.1:4420/nqn.2014-08.org.example:shelf-7".to_owned();
        let subsystem = "nqn.2014-08.org.example:shelf-7".to_owned();
        let drives = [1, 2, 3, 5, 8, 9].map(|number| drive(number, 1 << 30, true));
        let read_only = FoundDrive { is_read_only: true, ..drive(12, 1 << 30, true) };
        let unusable = [drive(10, 0, true), drive(11, 1 << 30, false), read_only];
        let drives = drives.into_iter().chain(unusable).collect();
        let found = Found { url, subsystem, problem: None, drives };
        let text = found.as_enclosure().expect("there are drives");
        assert_eq!(
            text,
            "[[enclosure]]\nname = \"shelf-7\"\n\
             url = \"nvme+tcp://10.0.0.1:4420,10.0.1.1:4420/nqn.2014-08.org.example:shelf-7\"\n\
             drives = [\"{1..3}\", \"5\", \"{8..9}\"]\n"
        );
        let none = Found { drives: vec![drive(1, 0, true)], ..found };
        assert_eq!(none.as_enclosure(), None);
    }
}

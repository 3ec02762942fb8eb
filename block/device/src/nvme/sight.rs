//! What a controller leads to: the namespace, and how good the way to it is; compared with what it was, and with what other paths show.

use super::controller::{ConnectError, Controller};
use super::options::Network;
use super::paths::{Paths, Standing};
use levada_nvme::Status;
use levada_nvme::identify::{
    CommandLimits, IDENTIFY_BYTES, Identify, NGUID, NamespaceIdentity, OptionalCommands, UUID,
    listed_namespaces, parse_namespace_descriptors,
};
use levada_nvme::log::{AnaState, LogPage, parse_ana};
use std::rc::Rc;

/// Room for what a controller says of paths, at most.
const ANA_BYTES_MAX: u64 = 1 << 20;

/// What a namespace is, on every path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub namespace: u32,
    pub identity: NamespaceIdentity,
    /// By type; the serial number of the subsystem where the namespace has none.
    names: Vec<(u8, Vec<u8>)>,
    pub data_bytes_max: u64,
    pub optional: OptionalCommands,
    pub limits: CommandLimits,
    pub has_volatile_cache: bool,
}

impl<N: Network> Paths<N> {
    /// What a controller leads to, compared with what is known; and why it cannot be used.
    pub(super) async fn look_at(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<(Standing, Option<&'static str>), ConnectError> {
        let seen = self.sight(controller).await?;
        let known = self.known.borrow().clone();
        match known {
            None => *self.known.borrow_mut() = Some(Rc::new(seen.clone())),
            Some(known) => known.compare(&seen).map_err(|what| ConnectError::Different { what })?,
        }
        if !controller.identity.has_ana {
            return Ok((Standing::Optimized, None));
        }
        let log = Self::ana_page(controller).await?;
        let groups = parse_ana(&log)
            .ok_or(ConnectError::Contradiction { what: "its page of paths is cut off" })?;
        let is_ours = |namespaces: &[u32]| namespaces.contains(&seen.namespace);
        let ours = groups
            .iter()
            .find(|group| group.id == seen.identity.ana_group || is_ours(&group.namespaces));
        let unusable = |why| (Standing::Unusable, Some(why));
        Ok(match ours.map(|group| group.state) {
            Some(AnaState::Optimized) => (Standing::Optimized, None),
            Some(AnaState::NonOptimized) => (Standing::NonOptimized, None),
            Some(AnaState::Inaccessible) => unusable("its target says: inaccessible (ANA)"),
            Some(AnaState::PersistentLoss) => unusable("its target says: persistent loss (ANA)"),
            Some(AnaState::Change) => unusable("its target says: state in change (ANA)"),
            None => unusable("its target has the namespace in no group of paths (ANA)"),
        })
    }

    /// What a controller says of paths, in as many pieces as it takes.
    async fn ana_page(controller: &Controller<N::Stream>) -> Result<Vec<u8>, ConnectError> {
        let of = &controller.identity;
        let bytes = 16 + 32 * u64::from(of.ana_groups) + 4 * u64::from(of.namespaces_at_once_max);
        let bytes = bytes.clamp(4096, ANA_BYTES_MAX).next_multiple_of(4);
        let limit = if of.data_bytes_max == 0 { ANA_BYTES_MAX } else { of.data_bytes_max };
        let page = LogPage::Ana as u8;
        let mut log: Vec<u8> = Vec::new();
        for at in (0..bytes).step_by(limit as usize) {
            let piece = limit.min(bytes - at) as usize;
            log.extend_from_slice(&controller.log_page(page, u32::MAX, at, piece).await?);
        }
        if bytes <= limit {
            return Ok(log);
        }
        // Its count of changes comes first. One that has changed meanwhile is told of, and read again.
        let again = controller.log_page(page, u32::MAX, 0, 8).await?;
        match again[..] == log[..8] {
            true => Ok(log),
            false => {
                let what = "its page of paths does not hold still".into();
                Err(ConnectError::Different { what })
            }
        }
    }

    pub(super) async fn sight(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<Known, ConnectError> {
        let wanted = match (self.namespace, &*self.known.borrow()) {
            (0, Some(known)) => known.namespace,
            (wanted, _) => wanted,
        };
        let namespace = match wanted {
            0 => {
                let page = controller.identify(Identify::ActiveNamespaces, 0).await?;
                let all: Vec<u32> = listed_namespaces(&page).collect();
                match all[..] {
                    [only] => only,
                    _ => {
                        let what = format!(
                            "the subsystem has namespaces {all:?}: say which one, with ns=..."
                        );
                        return Err(ConnectError::Different { what });
                    }
                }
            }
            wanted => wanted,
        };
        let page = Self::namespace_page(controller, namespace).await?;
        let identity = NamespaceIdentity::parse(&page).ok_or(ConnectError::Contradiction {
            what: "blocks of the namespace carry metadata, or are of no size that there is",
        })?;
        if identity.blocks == 0 {
            return Err(ConnectError::Contradiction { what: "the namespace has no blocks" });
        }
        if identity.blocks.checked_mul(identity.block_bytes).is_none() {
            let what = "the namespace is larger than anything";
            return Err(ConnectError::Contradiction { what });
        }
        let page = controller.identify(Identify::NamespaceDescriptors, namespace).await?;
        let mut names: Vec<(u8, Vec<u8>)> = parse_namespace_descriptors(&page)
            .filter(|(_, name)| name.iter().any(|byte| *byte != 0))
            .filter(|(kind, _)| (1..=UUID).contains(kind))
            .map(|(kind, name)| (kind, name.to_vec()))
            .collect();
        if identity.guid != [0; 16] && names.iter().all(|(kind, _)| *kind != NGUID) {
            names.push((NGUID, identity.guid.to_vec()));
        }
        if names.is_empty() {
            names.push((0, controller.identity.serial.clone().into_bytes()));
        }
        names.sort();
        // Older ones know no such page.
        let limits = match controller.identify(Identify::CommandSetController, 0).await {
            Ok(page) => CommandLimits::parse(&page),
            Err(ConnectError::Refused { .. }) => CommandLimits::default(),
            Err(error) => return Err(error),
        };
        let of = &controller.identity;
        let smallest = identity.block_bytes.max(4096);
        if of.data_bytes_max != 0 && of.data_bytes_max < smallest {
            return Err(ConnectError::Contradiction { what: "a command takes less than a block" });
        }
        Ok(Known {
            namespace,
            identity,
            names,
            data_bytes_max: of.data_bytes_max,
            optional: of.optional,
            limits,
            has_volatile_cache: of.has_volatile_cache,
        })
    }

    /// What is known of a namespace by its number.
    pub(super) async fn namespace_page(
        controller: &Controller<N::Stream>,
        namespace: u32,
    ) -> Result<Box<[u8; IDENTIFY_BYTES]>, ConnectError> {
        match controller.identify(Identify::Namespace, namespace).await {
            // One that is not active is all zeroes.
            Ok(page) if page.iter().any(|byte| *byte != 0) => Ok(page),
            Err(ConnectError::Refused { status, .. }) if !status.is(Status::INVALID_NAMESPACE) => {
                Err(ConnectError::Refused { command: "Identify", status })
            }
            Ok(_) | Err(ConnectError::Refused { .. }) => Err(ConnectError::Absent { namespace }),
            Err(error) => Err(error),
        }
    }
}

impl Known {
    /// What tells the namespace from every other.
    pub fn names(&self) -> Vec<u8> {
        let names = self.names.iter().flat_map(|(kind, name)| [&[*kind][..], name].concat());
        names.chain(self.namespace.to_le_bytes()).collect()
    }

    /// One and the same namespace, also when it has several numbers, as far as names tell.
    pub fn is_same(&self, other: &Self) -> bool {
        let is_named = self.names.iter().all(|(kind, _)| *kind != 0);
        self.names == other.names && (is_named || self.namespace == other.namespace)
    }

    /// Owners can be told apart by the target.
    pub fn has_reservations(&self) -> bool {
        self.identity.has_reservations && self.optional.contains(OptionalCommands::RESERVATIONS)
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.identity.blocks * self.identity.block_bytes
    }

    /// Whether what another path shows, or this one shows now, is the same.
    pub(super) fn compare(&self, seen: &Self) -> Result<(), String> {
        if seen.names != self.names || seen.namespace != self.namespace {
            return Err("it leads to another namespace than the one that was opened".into());
        }
        if seen.identity.block_bytes != self.identity.block_bytes {
            let (was, is) = (self.identity.block_bytes, seen.identity.block_bytes);
            return Err(format!("blocks of the namespace have {is} bytes, and had {was}"));
        }
        if seen.identity.blocks < self.identity.blocks {
            let (was, is) = (self.identity.blocks, seen.identity.blocks);
            return Err(format!("the namespace has shrunk from {was} blocks to {is}"));
        }
        let limit = |bytes: u64| if bytes == 0 { u64::MAX } else { bytes };
        if limit(seen.data_bytes_max) < limit(self.data_bytes_max) {
            let (was, is) = (self.data_bytes_max, seen.data_bytes_max);
            return Err(format!("a command may have {is} bytes of data, and {was} elsewhere"));
        }
        let (of, all) = (seen.limits, self.limits);
        if limit(of.zeroes_bytes_max) < limit(all.zeroes_bytes_max)
            || limit(of.discard_blocks_max) < limit(all.discard_blocks_max)
        {
            return Err("less may be zeroed or discarded at once than elsewhere".into());
        }
        if !seen.optional.contains(self.optional) {
            return Err("commands are missing that there are elsewhere".into());
        }
        if seen.has_volatile_cache && !self.has_volatile_cache {
            return Err("it has a volatile cache, and has none elsewhere".into());
        }
        Ok(())
    }
}

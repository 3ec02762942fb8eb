//! What volumes and tenants may use: kept as an attribute of the file and of the directory, in force at a governor. And who has reserved a
//! volume, which is kept in the same way, and is in force elsewhere.
//!
//! What always holds: what is in force is what is kept, except while a change is under way.

use super::directories::ROOT;
use crate::name::{Tenant, VolumeName};
use crate::order::OrderError;
use crate::qos::{self, Governor, Limits, LimitsChange, QosError, Share};
use levada_base::ids::Ino;
use levada_client::{Client, Error};
use levada_wire::meta::{MetaFault, SetXattr};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// The attribute that says what may be used, as JSON.
const LIMITS: &[u8] = b"trusted.levada.limits";

/// Who has reserved a volume over NVMe, as whoever shows it there keeps that.
const RESERVATIONS: &[u8] = b"trusted.levada.reservations";

/// Those whom the governor knows: who was used since the start.
pub(super) struct KeptLimits {
    client: Client,
    governor: Governor,
    tenants: RefCell<BTreeMap<Tenant, qos::Tenant>>,
    shares: RefCell<BTreeMap<VolumeName, Share>>,
    /// Of the files of tenants.
    files: RefCell<BTreeMap<Tenant, Share>>,
    /// Tenants that were deleted.
    removals: Cell<u64>,
}

impl KeptLimits {
    pub(super) fn new(client: Client, governor: Governor) -> Self {
        let (tenants, shares, files, removals) = Default::default();
        Self { client, governor, tenants, shares, files, removals }
    }

    /// What is kept; [`Limits::NONE`] where nothing was ever set. `whose`: as an operator calls it.
    async fn kept(&self, ino: Ino, whose: impl FnOnce() -> String) -> Result<Limits, OrderError> {
        match self.client.xattr(ino, LIMITS).await {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|_| OrderError::LimitsUnknown { whose: whose() }),
            Err(Error::Meta(MetaFault::NoAttribute)) => Ok(Limits::NONE),
            Err(error) => Err(error.into()),
        }
    }

    async fn keep(&self, ino: Ino, limits: &Limits) -> Result<(), OrderError> {
        // Plain numbers.
        let text = serde_json::to_vec(limits).unwrap_or_default();
        self.client.set_xattr(ROOT, ino, LIMITS, &text, SetXattr::default()).await?;
        Ok(self.client.sync_meta().await?)
    }

    /// What a tenant may use, whose directory is `ino`.
    pub(super) async fn tenant_limits(
        &self,
        tenant: &Tenant,
        ino: Ino,
    ) -> Result<Limits, OrderError> {
        let known = self.tenants.borrow().get(tenant).map(qos::Tenant::limits);
        match known {
            Some(limits) => Ok(limits),
            None => self.kept(ino, || format!("tenant {tenant}")).await,
        }
    }

    /// What a volume may use, whose file is `ino`.
    pub(super) async fn volume_limits(
        &self,
        name: &VolumeName,
        ino: Ino,
    ) -> Result<Limits, OrderError> {
        let known = self.shares.borrow().get(name).map(Share::limits);
        match known {
            Some(limits) => Ok(limits),
            None => self.kept(ino, || format!("volume {name}")).await,
        }
    }

    async fn tenant(&self, name: &Tenant, ino: Ino) -> Result<qos::Tenant, OrderError> {
        if let Some(tenant) = self.tenants.borrow().get(name) {
            return Ok(tenant.clone());
        }
        loop {
            let removals = self.removals.get();
            let limits = self.tenant_limits(name, ino).await?;
            // Who asked at the same time may have been faster.
            if let Some(tenant) = self.tenants.borrow().get(name) {
                return Ok(tenant.clone());
            }
            // It may have been deleted meanwhile; that is found out.
            if removals == self.removals.get() {
                let tenant = self.governor.tenant(name.clone(), limits)?;
                self.tenants.borrow_mut().insert(name.clone(), tenant.clone());
                return Ok(tenant);
            }
        }
    }

    /// What a volume's requests wait at; `tenant` is its tenant's directory, `ino` its file.
    pub(super) async fn share(
        &self,
        name: &VolumeName,
        (tenant, ino): (Ino, Ino),
    ) -> Result<Share, OrderError> {
        let tenant = self.tenant(&name.tenant, tenant).await?;
        self.share_of(&tenant, name, ino).await
    }

    /// What requests for a tenant's files wait at, whose directory is `ino`; over with the tenant.
    pub(super) async fn share_of_files(
        &self,
        name: &Tenant,
        ino: Ino,
    ) -> Result<Share, OrderError> {
        let tenant = self.tenant(name, ino).await?;
        let mut files = self.files.borrow_mut();
        Ok(files.entry(name.clone()).or_insert_with(|| tenant.share_of_caps()).clone())
    }

    async fn share_of(
        &self,
        tenant: &qos::Tenant,
        name: &VolumeName,
        ino: Ino,
    ) -> Result<Share, OrderError> {
        if let Some(share) = self.shares.borrow().get(name) {
            return Ok(share.clone());
        }
        let share = tenant.share(self.volume_limits(name, ino).await?)?;
        self.shares.borrow_mut().insert(name.clone(), share.clone());
        Ok(share)
    }

    /// Changes what a volume may use, also for requests that wait, and keeps it.
    pub(super) async fn set_volume(
        &self,
        name: &VolumeName,
        (tenant, ino): (Ino, Ino),
        change: LimitsChange,
    ) -> Result<(), OrderError> {
        let tenant = self.tenant(&name.tenant, tenant).await?;
        let share = match self.share_of(&tenant, name, ino).await {
            Err(OrderError::LimitsUnknown { .. }) => {
                let new = change.of(Limits::NONE);
                let share = tenant.share(new)?;
                self.keep(ino, &new).await?;
                self.shares.borrow_mut().insert(name.clone(), share);
                return Ok(());
            }
            share => share?,
        };
        self.change(ino, share.limits(), change, |limits| share.set(limits)).await
    }

    /// Changes what all volumes of a tenant may use together, and keeps it.
    pub(super) async fn set_tenant(
        &self,
        name: &Tenant,
        ino: Ino,
        change: LimitsChange,
    ) -> Result<(), OrderError> {
        let tenant = match self.tenant(name, ino).await {
            Err(OrderError::LimitsUnknown { .. }) => {
                let new = change.of(Limits::NONE);
                let tenant = self.governor.tenant(name.clone(), new)?;
                self.keep(ino, &new).await?;
                self.tenants.borrow_mut().insert(name.clone(), tenant);
                return Ok(());
            }
            tenant => tenant?,
        };
        self.change(ino, tenant.limits(), change, |limits| tenant.set(limits)).await
    }

    /// Puts changed limits in force with `set`, and keeps them; where that fails, `old` is in force again.
    async fn change(
        &self,
        ino: Ino,
        old: Limits,
        change: LimitsChange,
        set: impl Fn(Limits) -> Result<(), QosError>,
    ) -> Result<(), OrderError> {
        let new = change.of(old);
        set(new)?;
        let kept = self.keep(ino, &new).await;
        if kept.is_err() {
            // They were in force before.
            let _ = set(old);
        }
        kept
    }

    /// Lets another file keep what one does: that of the same volume from now on. Durable with what makes it so.
    pub(super) async fn copy(&self, from: Ino, to: Ino) -> Result<(), Error> {
        for attribute in [LIMITS, RESERVATIONS] {
            match self.client.xattr(from, attribute).await {
                Ok(text) => {
                    let how = SetXattr::default();
                    self.client.set_xattr(ROOT, to, attribute, &text, how).await?;
                }
                // It may have been another volume's.
                Err(Error::Meta(MetaFault::NoAttribute)) => self.remove(to, attribute).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn remove(&self, ino: Ino, attribute: &[u8]) -> Result<(), Error> {
        match self.client.remove_xattr(ROOT, ino, attribute).await {
            Err(Error::Meta(MetaFault::NoAttribute)) => Ok(()),
            removed => removed,
        }
    }

    /// What is kept of the reservations of a volume, whose file is `ino`; empty: nothing.
    pub(super) async fn reservations(&self, ino: Ino) -> Result<Vec<u8>, Error> {
        match self.client.xattr(ino, RESERVATIONS).await {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(Error::Meta(MetaFault::NoAttribute)) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn keep_reservations(&self, ino: Ino, bytes: &[u8]) -> Result<(), Error> {
        match bytes {
            [] => self.remove(ino, RESERVATIONS).await?,
            bytes => {
                let how = SetXattr::default();
                self.client.set_xattr(ROOT, ino, RESERVATIONS, bytes, how).await?;
            }
        }
        self.client.sync_meta().await
    }

    pub(super) fn renamed(&self, from: &VolumeName, to: &VolumeName) {
        let share = self.shares.borrow_mut().remove(from);
        if let Some(share) = share {
            self.shares.borrow_mut().insert(to.clone(), share);
        }
    }

    /// The volume is gone: whoever waits learns so from it.
    pub(super) fn removed(&self, name: &VolumeName) {
        let share = self.shares.borrow_mut().remove(name);
        if let Some(share) = share {
            share.remove();
        }
    }

    pub(super) fn tenant_removed(&self, name: &Tenant) {
        self.removals.set(self.removals.get() + 1);
        self.tenants.borrow_mut().remove(name);
        if let Some(share) = self.files.borrow_mut().remove(name) {
            share.remove();
        }
    }
}

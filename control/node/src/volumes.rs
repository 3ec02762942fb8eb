//! The volumes of a cluster: orders, and what exports show.
//!
//! Thin volumes are files, so this is a client of the node's own services, as a mount is. It connects when
//! somebody wants a volume, so a cluster without any has no client for them.
//!
//! What always holds: exports have let go of every volume before the client takes leave, and it before the targets are closed.

use crate::assembly::Cluster;
use crate::control::TenantStatus;
use crate::quota::{self, QuotaChange, QuotaError, SoftHard, Who, WhoKind};
use crate::state::{StateDir, StateError};
use futures_util::future::join_all;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, JoinHandle};
use levada_base::sync::{Notify, Permit, Semaphore};
use levada_base::units::MIB;
use levada_client::{Client, ClientConfig, Error};
use levada_spec::{Bytes, SubtreePath};
use levada_volume::qos::{Governor, LimitsChange, Rates, Share, Terms};
use levada_volume::{
    Anyway, Catalogue, NewSize, OrderError, Settled, SnapshotName, SnapshotRow, Tenant, TenantRow,
    Volume, VolumeName, VolumeOrder, VolumeRow, VolumeStatus,
};
use levada_wire::same_host::HostTransport;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// Guests send requests of up to so much; a larger one passes all the same, and is paid for afterwards. What all can be
/// guaranteed together is not known.
const TERMS: Terms = Terms { request_bytes_max: MIB, capacity: Rates::NONE };
/// How long an order waits for the file system to serve.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// Before what failed is tried again.
const SETTLE_AGAIN_AFTER: Duration = Duration::from_secs(30);
/// Lives of the cluster before this one whose clients are buried.
const LIVES_BURIED: u64 = 16;
/// How long the last bytes may take, when the node stops.
const LEAVE_WITHIN: Duration = Duration::from_secs(10);

/// Why an order for a volume is not carried out.
#[derive(Debug, thiserror::Error)]
pub enum VolumeRefusal {
    #[error(
        "the file system, in which thin volumes are kept, does not serve yet; `levada status` says why"
    )]
    NotReady,
    #[error("volume {name} has {size} already")]
    NotLarger { name: VolumeName, size: Bytes },
    #[error("volume {name} has only {size}")]
    NotSmaller { name: VolumeName, size: Bytes },
    #[error(transparent)]
    Order(#[from] OrderError),
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error(transparent)]
    State(#[from] StateError),
}

impl From<Error> for VolumeRefusal {
    fn from(error: Error) -> Self {
        Self::Order(error.into())
    }
}

fn tenant_of(number: u32) -> Who {
    Who { kind: WhoKind::Tenant, id: Some(number) }
}

/// Frees the room of deleted snapshots, now and whenever `may_settle` says that there may be more.
async fn settle(catalogue: Rc<Catalogue>, may_settle: Rc<Notify>) {
    loop {
        let told = may_settle.changed();
        let Settled { merged, left, error } = catalogue.settle().await;
        if merged > 0 {
            tracing::info!(merged, "what deleted snapshots held is free");
        }
        if let Some(error) = &error {
            tracing::warn!(%error, "what deleted snapshots held is not free yet");
        }
        match left > 0 || error.is_some() {
            true => drop(reactor::timeout(SETTLE_AGAIN_AFTER, told).await),
            false => told.await,
        }
    }
}

/// The volumes of a cluster. Lives on the node's reactor.
pub struct Volumes {
    cluster: Rc<Cluster>,
    address: String,
    /// Where the client is noted, so that the next life need not wait for it.
    state: Option<StateDir>,
    /// As the catalogue has it.
    client: OnceCell<Client>,
    catalogue: OnceCell<Rc<Catalogue>>,
    /// The task that frees the room of deleted snapshots, and what it waits for.
    settling: OnceCell<JoinHandle<()>>,
    may_settle: Rc<Notify>,
    /// Whoever is first connects.
    connecting: Rc<Semaphore>,
    /// Orders that look first and act then: no two tenants get one number, and no growth cuts what another has grown.
    turn: Rc<Semaphore>,
}

impl Volumes {
    /// Of `cluster`, whose services listen at `address`.
    #[must_use]
    pub fn new(cluster: Rc<Cluster>, address: &str, state: Option<StateDir>) -> Rc<Self> {
        Rc::new(Self {
            cluster,
            address: address.to_owned(),
            state,
            client: OnceCell::new(),
            catalogue: OnceCell::new(),
            settling: OnceCell::new(),
            may_settle: Rc::default(),
            connecting: Semaphore::new(1),
            turn: Semaphore::new(1),
        })
    }

    /// Of this life of the cluster, whichever server has it.
    pub(crate) fn epoch(&self) -> Epoch {
        self.cluster.drives.epoch
    }

    /// Tells the metadata service that the clients of earlier lives are dead, of which those that ended without taking leave would be
    /// waited for. Of the last life here, and of other servers, which are shut out.
    pub(crate) async fn bury_last(self: Rc<Self>) {
        let _turn = self.connecting.acquire(1).await;
        let here = self.state.as_ref().and_then(StateDir::volumes_client);
        let epochs = self.epoch().0.saturating_sub(LIVES_BURIED)..self.epoch().0;
        let elsewhere = epochs.map(|epoch| self.client_name(Epoch(epoch)));
        // The last life may have been here.
        let dead: BTreeSet<Uuid> = elsewhere.chain(here).collect();
        let Some(config) = self.config(Uuid::nil()) else { return };
        let burials = dead.into_iter().map(async |dead| {
            let buried = levada_client::bury(&config, *dead.as_bytes());
            match reactor::timeout(READY_WITHIN, buried).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(%error, "an earlier client of volumes is left to its lease");
                }
                Err(_) => tracing::warn!("the metadata service does not answer"),
            }
        });
        join_all(burials).await;
    }

    /// What the client is called in the life of `epoch`: whoever has the cluster next has to know. In each life otherwise: under an old
    /// name it would end what the last life had not synced.
    fn client_name(&self, epoch: Epoch) -> Uuid {
        let (half, _) = self.cluster.drives.cluster.as_u64_pair();
        Uuid::from_u64_pair(half ^ u64::from_le_bytes(*b"volumes "), epoch.0)
    }

    /// Of a client of that name; `None`: there is no metadata target.
    fn config(&self, name: Uuid) -> Option<ClientConfig> {
        let target = self.cluster.metadata_target()?;
        let transport = Rc::new(HostTransport::new());
        Some(ClientConfig {
            cluster: *self.cluster.drives.cluster.as_bytes(),
            ..ClientConfig::new(transport, &self.address, target, *name.as_bytes())
        })
    }

    async fn catalogue(&self) -> Result<&Rc<Catalogue>, VolumeRefusal> {
        if let Some(catalogue) = self.catalogue.get() {
            return Ok(catalogue);
        }
        let connected = reactor::timeout(READY_WITHIN, async {
            let _turn = self.connecting.acquire(1).await;
            if self.catalogue.get().is_none() {
                let client = self.connect().await?;
                let _first = self.client.set(client.clone());
                let catalogue = Rc::new(Catalogue::new(client, Governor::new(TERMS)));
                let settling = settle(Rc::clone(&catalogue), Rc::clone(&self.may_settle));
                let _first = self.catalogue.set(catalogue);
                let _first = self.settling.set(reactor::spawn(settling));
            }
            Ok::<(), VolumeRefusal>(())
        });
        connected.await.map_err(|_| VolumeRefusal::NotReady)??;
        self.catalogue.get().ok_or(VolumeRefusal::NotReady)
    }

    async fn connect(&self) -> Result<Client, VolumeRefusal> {
        let name = self.client_name(self.epoch());
        let config = self.config(name).ok_or(VolumeRefusal::NotReady)?;
        if let Some(state) = &self.state {
            state.set_volumes_client(Some(name))?;
        }
        Ok(Client::connect(config).await?)
    }

    /// The volume, for an export.
    ///
    /// # Errors
    ///
    /// [`VolumeRefusal`].
    pub async fn volume(&self, name: &VolumeName) -> Result<Rc<dyn Volume>, VolumeRefusal> {
        Ok(Rc::new(self.catalogue().await?.volume(name).await?))
    }

    /// A snapshot, for an export.
    ///
    /// # Errors
    ///
    /// [`VolumeRefusal`].
    pub async fn snapshot(&self, name: &SnapshotName) -> Result<Rc<dyn Volume>, VolumeRefusal> {
        Ok(Rc::new(self.catalogue().await?.snapshot_volume(name).await?))
    }

    /// The snapshots of all volumes, or of one.
    ///
    /// # Errors
    ///
    /// [`VolumeRefusal`].
    pub async fn snapshots(
        &self,
        of: Option<&VolumeName>,
    ) -> Result<Vec<SnapshotRow>, VolumeRefusal> {
        let catalogue = self.catalogue().await?;
        if let Some(of) = of {
            return Ok(catalogue.snapshots(of).await?);
        }
        let mut rows = Vec::new();
        for volume in catalogue.list(None).await? {
            match catalogue.snapshots(&volume.name).await {
                Ok(snapshots) => rows.extend(snapshots),
                // It was deleted meanwhile.
                Err(OrderError::Missing { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        rows.sort_by_key(|row| row.taken_ns);
        Ok(rows)
    }

    /// What is kept of the reservations of a tenant's volume, by its identity; empty: nothing.
    pub(crate) async fn reservations(
        &self,
        tenant: &Tenant,
        id: Uuid,
    ) -> Result<Vec<u8>, VolumeRefusal> {
        Ok(self.catalogue().await?.reservations(tenant, id).await?)
    }

    /// Keeps this in the place of it, durably.
    pub(crate) async fn keep_reservations(
        &self,
        tenant: &Tenant,
        id: Uuid,
        bytes: &[u8],
    ) -> Result<(), VolumeRefusal> {
        Ok(self.catalogue().await?.keep_reservations(tenant, id, bytes).await?)
    }

    /// What a tenant has, by name.
    ///
    /// # Errors
    ///
    /// [`VolumeRefusal`].
    pub async fn rows(&self, tenant: &Tenant) -> Result<Vec<VolumeRow>, VolumeRefusal> {
        Ok(self.catalogue().await?.list(Some(tenant)).await?)
    }

    /// The volumes, those of `tenant` if one is named.
    ///
    /// # Errors
    ///
    /// [`VolumeRefusal`].
    pub async fn list(&self, tenant: Option<&Tenant>) -> Result<Vec<VolumeStatus>, VolumeRefusal> {
        let catalogue = self.catalogue().await?;
        let mut volumes = Vec::new();
        for VolumeRow { name, size_bytes, users, id: _ } in catalogue.list(tenant).await? {
            // It may have been deleted meanwhile.
            let limits = catalogue.limits(&name).await.unwrap_or_default();
            let snapshots = catalogue.snapshots(&name).await.unwrap_or_default().len();
            let layers = catalogue.layers(&name).await.unwrap_or_default();
            let kind = "thin".to_owned();
            volumes.push(VolumeStatus { name, kind, size_bytes, users, limits, snapshots, layers });
        }
        Ok(volumes)
    }

    pub(crate) async fn tenants(&self) -> Result<Vec<TenantStatus>, VolumeRefusal> {
        let rows = self.catalogue().await?.tenants().await?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let numbers = quota::tenant_numbers(&self.cluster, Catalogue::HOME).await?;
        let status = |row: TenantRow| {
            let number = numbers.get(row.tenant.as_str()).copied().filter(|number| *number > 0);
            let quota = match number {
                Some(number) => quota::show(&self.cluster, Some(tenant_of(number)))?.pop(),
                None => None,
            };
            Ok(TenantStatus {
                tenant: row.tenant,
                number: number.unwrap_or(0),
                volumes: row.volumes,
                size_bytes: row.size_bytes,
                stored_bytes: quota.map_or(0, |quota| quota.bytes.used),
                capacity_bytes: quota.map(|quota| quota.bytes.hard).filter(|hard| *hard > 0),
                limits: row.limits,
            })
        };
        rows.into_iter().map(status).collect()
    }

    /// The number under which quotas count what a tenant stores; one without gets it, also for what it has already.
    async fn number(&self, tenant: &Tenant) -> Result<u32, VolumeRefusal> {
        let turn = self.turn.acquire(1).await;
        self.number_in(&turn, tenant).await
    }

    /// The same, by who has the turn.
    async fn number_in(&self, _turn: &Permit, tenant: &Tenant) -> Result<u32, VolumeRefusal> {
        let catalogue = self.catalogue().await?;
        catalogue.create_tenant(tenant).await?;
        let numbers = quota::tenant_numbers(&self.cluster, Catalogue::HOME).await?;
        if let Some(number) = numbers.get(tenant.as_str()).filter(|number| **number > 0) {
            return Ok(*number);
        }
        // Of a tenant that was forgotten something may count still.
        let counted = quota::counted_tenants(&self.cluster)?;
        let number = numbers.values().chain(&counted).max().map_or(1, |last| last + 1);
        // Somebody who is forgotten may have had it.
        quota::set(&self.cluster, tenant_of(number), QuotaChange::NONE).await?;
        self.give_number(tenant, number).await?;
        Ok(number)
    }

    async fn give_number(&self, tenant: &Tenant, number: u32) -> Result<(), VolumeRefusal> {
        let path = format!("{}/{tenant}", Catalogue::HOME);
        Ok(quota::number_tenant(&self.cluster, &path, number).await?)
    }

    /// What requests for the files of the tenant of a number wait at; `None`: there is no such tenant.
    pub(crate) async fn share_of_files(&self, number: u32) -> Result<Option<Share>, VolumeRefusal> {
        let catalogue = self.catalogue().await?;
        let numbers = quota::tenant_numbers(&self.cluster, Catalogue::HOME).await?;
        let named = numbers.iter().find(|(_, known)| **known == number);
        let Some(Ok(tenant)) = named.map(|(name, _)| name.parse()) else { return Ok(None) };
        Ok(catalogue.share_of_files(&tenant).await?)
    }

    /// Makes a directory within the file system, if it is not there, and gives it to a tenant: its number.
    pub(crate) async fn give_subtree(
        &self,
        path: &SubtreePath,
        to: &Tenant,
    ) -> Result<u32, VolumeRefusal> {
        // The tenant is not deleted in between, nor its number given to another one.
        let turn = self.turn.acquire(1).await;
        let number = self.number_in(&turn, to).await?;
        let client = self.client.get().ok_or(VolumeRefusal::NotReady)?;
        let numbers = quota::tenant_numbers(&self.cluster, Catalogue::HOME).await?;
        let known: Vec<u32> = numbers.into_values().filter(|number| *number > 0).collect();
        quota::give_subtree(&self.cluster, client, path, number, &known).await?;
        Ok(number)
    }

    /// Changes what all volumes of a tenant may use and store together. A capacity of 0 is none.
    pub(crate) async fn set_tenant(
        &self,
        of: &Tenant,
        change: LimitsChange,
        capacity_bytes: Option<u64>,
    ) -> Result<(), VolumeRefusal> {
        let number = self.number(of).await?;
        if change != LimitsChange::default() {
            self.catalogue().await?.set_tenant_limits(of, change).await?;
        }
        if let Some(hard) = capacity_bytes {
            // Once more: what made the number may have ended half-way.
            self.give_number(of, number).await?;
            let bytes = Some(SoftHard { soft: 0, hard });
            let change = QuotaChange { bytes, ..QuotaChange::default() };
            quota::set(&self.cluster, tenant_of(number), change).await?;
            self.catalogue().await?.close_unused(of).await;
        }
        Ok(())
    }

    pub(crate) async fn delete_tenant(&self, of: &Tenant) -> Result<(), VolumeRefusal> {
        let catalogue = self.catalogue().await?;
        let _turn = self.turn.acquire(1).await;
        let rows = catalogue.tenants().await?;
        let numbers = match rows.is_empty() {
            true => BTreeMap::new(),
            false => quota::tenant_numbers(&self.cluster, Catalogue::HOME).await?,
        };
        catalogue.delete_tenant(of).await?;
        if let Some(number) = numbers.get(of.as_str()).filter(|number| **number > 0) {
            quota::set(&self.cluster, tenant_of(*number), QuotaChange::NONE).await?;
        }
        Ok(())
    }

    /// Carries out what is asked for a volume.
    pub(crate) async fn carry_out(&self, order: VolumeOrder) -> Result<(), VolumeRefusal> {
        let catalogue = self.catalogue().await?;
        match order {
            VolumeOrder::Create { name, size_bytes, is_meant } => {
                let anyway = Anyway { is_meant };
                catalogue.check_new(size_bytes, anyway).await?;
                self.number(&name.tenant).await?;
                catalogue.create(&name, size_bytes, anyway).await?;
            }
            VolumeOrder::Resize { name, size, is_meant } => {
                self.resize(&name, size, is_meant).await?;
            }
            VolumeOrder::Set { name, change } => catalogue.set_limits(&name, change).await?,
            VolumeOrder::Rename { from, to } => catalogue.rename(&from, &to).await?,
            VolumeOrder::Delete { name, is_meant } => {
                catalogue.delete(&name, Anyway { is_meant }).await?;
                self.may_settle.notify_all();
            }
            VolumeOrder::Snapshot { name } => catalogue.snapshot(&name).await?,
            VolumeOrder::Clone { from, to } => catalogue.clone_of(&from, &to).await?,
            VolumeOrder::RollBack { to, is_meant } => {
                catalogue.roll_back(&to, Anyway { is_meant }).await?;
                self.may_settle.notify_all();
            }
            VolumeOrder::DeleteSnapshot { name } => {
                catalogue.delete_snapshot(&name).await?;
                self.may_settle.notify_all();
            }
        }
        Ok(())
    }

    async fn resize(
        &self,
        name: &VolumeName,
        size: NewSize,
        is_meant: bool,
    ) -> Result<(), VolumeRefusal> {
        let _turn = self.turn.acquire(1).await;
        let catalogue = self.catalogue().await?;
        let old = catalogue.volume(name).await?.size_bytes();
        let refused = || {
            let (name, had) = (name.clone(), Bytes(old));
            match size {
                NewSize::GrowTo { .. } | NewSize::GrowBy { .. } => {
                    VolumeRefusal::NotLarger { name, size: had }
                }
                NewSize::ShrinkTo { .. } => VolumeRefusal::NotSmaller { name, size: had },
            }
        };
        let bytes = size.of(old).ok_or_else(refused)?;
        Ok(catalogue.resize(name, bytes, Anyway { is_meant }).await?)
    }

    /// Makes everything durable. Exports have ended.
    pub(crate) async fn close(&self) {
        let Some(catalogue) = self.catalogue.get() else { return };
        if let Some(settling) = self.settling.get() {
            settling.abort();
        }
        match reactor::timeout(LEAVE_WITHIN, catalogue.close()).await {
            Ok(Ok(())) => {
                let forgotten = self.state.as_ref().map(|state| state.set_volumes_client(None));
                if let Some(Err(error)) = forgotten {
                    tracing::warn!(%error, "the note of the client of volumes stays");
                }
            }
            Ok(Err(error)) => tracing::error!(%error, "what volumes had not flushed may be lost"),
            Err(_) => {
                tracing::error!("a target does not answer; what volumes had not flushed is lost")
            }
        }
    }
}

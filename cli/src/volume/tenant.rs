//! `tenant`: whose volumes are, and what they may use together.

use super::limits::{self, LimitArgs};
use super::{NOTHING_TO_SET, ask};
use crate::out::{print, say};
use crate::status::bytes;
use anyhow::{Result, bail};
use clap::Subcommand;
use levada_export_nvmet::AnaState;
use levada_node::control::{ControlReply, ControlRequest, TenantStatus};
use levada_spec::Bytes;
use levada_volume::Tenant;
use levada_volume::qos::LimitsChange;
use std::fmt::Write;
use std::path::Path;

#[derive(Subcommand)]
pub enum TenantCommand {
    /// List the tenants that have volumes or limits
    #[command(visible_alias = "ls")]
    List {
        /// A line of JSON for each
        #[arg(long)]
        json: bool,
    },
    /// Change what all volumes of a tenant may use and store together, also while they are used; what is not named stays,
    /// and 0 is no limit
    Set {
        /// Its name; it need not have volumes yet
        tenant: Tenant,
        /// At most so many bytes stored, as in 2TiB, whatever its volumes' sizes are
        #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = limits::size_or_zero)]
        capacity: Option<u64>,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Say how good a path is over which hosts reach the tenant's volumes by NVMe/TCP; they are told, and take others where there are
    /// better ones. Until the node starts anew
    Path {
        /// Its name
        tenant: Tenant,
        /// From 1 on, in the order of `nvme` in its [[export]]
        path: usize,
        /// optimized, non-optimized, inaccessible, persistent-loss or change: the last three refuse what comes over it
        state: AnaState,
    },
    /// Forget a tenant that has no volumes, and its limits
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name
        tenant: Tenant,
    },
}

/// Carries out a tenant command.
pub fn tenant(file: Option<&Path>, command: &TenantCommand) -> Result<()> {
    match command {
        TenantCommand::List { json } => return list(file, *json),
        TenantCommand::Set { tenant, capacity, limits } => {
            let (tenant, change, capacity_bytes) = (tenant.clone(), limits.change(), *capacity);
            if change == LimitsChange::default() && capacity_bytes.is_none() {
                bail!(NOTHING_TO_SET);
            }
            let done = format!("tenant {tenant} has other limits now");
            ask(file, &ControlRequest::TenantSet { tenant, change, capacity_bytes })?;
            say!("{done}");
        }
        TenantCommand::Path { tenant, path, state } => {
            let (tenant, path, state) = (tenant.clone(), *path, *state);
            let done = format!("path {path} of tenant {tenant} is {state}");
            ask(file, &ControlRequest::TenantPath { tenant, path, state })?;
            say!("{done}");
        }
        TenantCommand::Delete { tenant } => {
            ask(file, &ControlRequest::TenantDelete { tenant: tenant.clone() })?;
            say!("tenant {tenant} is forgotten");
        }
    }
    Ok(())
}

fn list(file: Option<&Path>, json: bool) -> Result<()> {
    let ControlReply::Tenants { tenants } = ask(file, &ControlRequest::Tenants)? else {
        bail!("the node answered something else; program and node differ in version");
    };
    if json {
        for tenant in &tenants {
            say!("{}", serde_json::to_string(tenant)?);
        }
        return Ok(());
    }
    print(&table(&tenants)?);
    Ok(())
}

fn table(tenants: &[TenantStatus]) -> Result<String> {
    if tenants.is_empty() {
        return Ok("no tenants; `levada volume create TENANT/NAME --size SIZE` makes one\n".into());
    }
    let width = tenants.iter().map(|row| row.tenant.as_str().len()).max().unwrap_or(0);
    let width = width.max("TENANT".len());
    let mut text = String::new();
    writeln!(
        text,
        "{:width$}  {:>7}  {:>10}  {:>10}  {:>10}  LIMITS",
        "TENANT", "VOLUMES", "SIZE", "STORED", "CAPACITY"
    )?;
    for row in tenants {
        let size = |bytes| Bytes(bytes).to_string();
        write!(text, "{:width$}  {:>7}", row.tenant.as_str(), row.volumes)?;
        write!(text, "  {:>10}  {:>10}", size(row.size_bytes), bytes(row.stored_bytes))?;
        let capacity = row.capacity_bytes.map_or("-".into(), size);
        writeln!(text, "  {capacity:>10}  {}", limits::text(&row.limits))?;
    }
    Ok(text)
}

//! `[[export]]`: where volumes and directories are shown, and to whom.

use super::is_address;
use crate::ProblemKind;
use crate::SubtreePath;
use crate::file::{ExportSpec, ExportWay, GuestCacheSpec, TAG_BYTES_MOST};
use crate::reader::{Reader, Table, is_name};
use std::path::PathBuf;
use toml_edit::Item;

/// Whose volumes are shown where no tenant is named.
const TENANT_DEFAULT: &str = "default";
const TENANT_NAME_MOST: usize = 63;
/// What an address that is a path begins with.
pub(crate) const UNIX_ADDRESS: &str = "unix:";
/// Bytes of the name of an NVMe host.
const NQN_MOST: usize = 223;
/// Keys of each way.
const NBD_KEYS: &[&str] = &["nbd", "tls", "verify_clients"];
const NVME_KEYS: &[&str] = &["nvme", "hosts", "keys", "tls_only"];
const VIRTIOFS_KEYS: &[&str] = &["virtiofs", "subtree", "tag", "cache"];
const VHOST_KEYS: &[&str] = &["vhost"];

impl Reader<'_> {
    pub(super) fn export(&mut self, table: Table<'_>) -> ExportSpec {
        let tenant = self.text_of(table, "tenant").unwrap_or_else(|| TENANT_DEFAULT.into());
        if !is_name(&tenant, TENANT_NAME_MOST) {
            let kind = ProblemKind::BadName { name: tenant.clone(), most: TENANT_NAME_MOST };
            self.problem_at(kind, table.node, "tenant");
        }
        let way = if table.keys.contains_key("virtiofs") {
            self.only_way(table, &[NBD_KEYS, NVME_KEYS, VHOST_KEYS]);
            self.virtiofs_export(table)
        } else if table.keys.contains_key("vhost") {
            self.only_way(table, &[NBD_KEYS, NVME_KEYS, VIRTIOFS_KEYS]);
            let directory = self.text_of(table, "vhost").unwrap_or_default().into();
            ExportWay::Vhost { directory }
        } else if table.keys.contains_key("nvme") {
            self.only_way(table, &[NBD_KEYS, VIRTIOFS_KEYS]);
            self.nvme_export(table)
        } else {
            self.only_way(table, &[NVME_KEYS, VIRTIOFS_KEYS]);
            self.nbd_export(table)
        };
        ExportSpec { tenant, way }
    }

    /// That none of the keys of other ways is there.
    fn only_way(&mut self, table: Table<'_>, others: &[&[&'static str]]) {
        for key in others.iter().copied().flatten() {
            if table.keys.contains_key(key) {
                self.problem_at(ProblemKind::ExportWays { key }, table.node, key);
            }
        }
    }

    fn nvme_export(&mut self, table: Table<'_>) -> ExportWay {
        let mut addresses = Vec::new();
        for (text, span) in self.texts(table, "nvme") {
            if is_address(&text) {
                addresses.push(text);
            } else {
                self.problem(ProblemKind::BadExportAddress { text }, span);
            }
        }
        let mut hosts = Vec::new();
        for (text, span) in self.texts(table, "hosts") {
            let is_name =
                text.starts_with("nqn.") && text.bytes().all(|byte| byte.is_ascii_graphic());
            if is_name && text.len() <= NQN_MOST {
                hosts.push(text);
            } else {
                self.problem(ProblemKind::BadNqn { text }, span);
            }
        }
        if table.keys.get("nvme").and_then(Item::as_array).is_some_and(toml_edit::Array::is_empty) {
            let example = "nvme = [\"10.0.0.1:4420\"]";
            let kind = ProblemKind::MissingKey { key: "nvme", table: table.title, example };
            self.problem_at(kind, table.node, "nvme");
        }
        let keys = self.text_of(table, "keys").map(PathBuf::from);
        let tls_only = self.truth(table, "tls_only").unwrap_or(false);
        if tls_only && keys.is_none() {
            let example = "keys = \"keys\"";
            let kind = ProblemKind::MissingKey { key: "keys", table: table.title, example };
            self.problem_at(kind, table.node, "tls_only");
        }
        ExportWay::Nvme { addresses, hosts, keys, tls_only }
    }

    fn virtiofs_export(&mut self, table: Table<'_>) -> ExportWay {
        let socket = self.text_of(table, "virtiofs").unwrap_or_default().into();
        let path = self.needed_text(table, "subtree", "subtree = \"/guests/vm1\"");
        let subtree = path.and_then(|text| match text.parse() {
            Ok(subtree) => Some(subtree),
            Err(reason) => {
                self.problem_at(ProblemKind::BadSubtree { text, reason }, table.node, "subtree");
                None
            }
        });
        let tag = self.text_of(table, "tag");
        if let Some(tag) = tag.as_ref().filter(|tag| tag.len() > TAG_BYTES_MOST) {
            let kind = ProblemKind::LongTag { tag: tag.clone(), most: TAG_BYTES_MOST };
            self.problem_at(kind, table.node, "tag");
        }
        let word = self.text_of(table, "cache");
        let cache = word.as_deref().map_or(Ok(GuestCacheSpec::None), str::parse);
        if cache.is_err() {
            let allowed = GuestCacheSpec::WORDS.map(String::from).to_vec();
            self.bad_choice(table, "cache", word.unwrap_or_default(), allowed);
        }
        let cache = cache.unwrap_or_default();
        let subtree = subtree.unwrap_or_else(SubtreePath::stand_in);
        ExportWay::Virtiofs { socket, subtree, tag, cache }
    }

    fn nbd_export(&mut self, table: Table<'_>) -> ExportWay {
        let example = "nbd = \"127.0.0.1:10809\"";
        let address = self.needed_text(table, "nbd", example);
        if let Some(text) = &address
            && !text.strip_prefix(UNIX_ADDRESS).map_or(is_address(text), |path| !path.is_empty())
        {
            let kind = ProblemKind::BadExportAddress { text: text.clone() };
            self.problem_at(kind, table.node, "nbd");
        }
        let address = address.unwrap_or_default();
        let tls = self.text_of(table, "tls").map(PathBuf::from);
        let verify_clients = self.truth(table, "verify_clients").unwrap_or(false);
        if verify_clients && tls.is_none() {
            let example = "tls = \"certificates\"";
            let kind = ProblemKind::MissingKey { key: "tls", table: table.title, example };
            self.problem_at(kind, table.node, "verify_clients");
        }
        ExportWay::Nbd { address, tls, verify_clients }
    }
}

//! Which cluster a command means.

use anyhow::{Context, Result, bail};
use levada_base::ids::Uuid;
use levada_node::state::StateDir;
use levada_spec::{ClusterFile, Loaded};
use std::path::{Path, PathBuf};

/// The cluster file looked for when none is named.
pub const CLUSTER_FILE: &str = "levada.toml";
/// Where a cluster in a box lives.
pub const BOX_DIR: &str = "levada-data";

/// The cluster file that `-f` names or that lies here; `None` when there is none.
pub fn find(file: Option<&Path>) -> Option<PathBuf> {
    if let Some(file) = file {
        return Some(file.to_owned());
    }
    [PathBuf::from(CLUSTER_FILE), Path::new(BOX_DIR).join(CLUSTER_FILE)]
        .into_iter()
        .find(|path| path.exists())
}

/// As [`find`], or an error that says what to do.
pub fn find_or_say(file: Option<&Path>) -> Result<PathBuf> {
    let Some(path) = find(file) else {
        bail!(
            "no cluster here: neither {CLUSTER_FILE} nor {BOX_DIR}/{CLUSTER_FILE}; `levada up` makes one, -f names one"
        );
    };
    Ok(path)
}

/// Reads the cluster file; prints what it warns of.
pub fn load(file: Option<&Path>) -> Result<Loaded> {
    load_at(&find_or_say(file)?)
}

/// Reads the cluster file at `path`; prints what it warns of.
pub fn load_at(path: &Path) -> Result<Loaded> {
    let loaded = ClusterFile::load(path)?;
    warn(&loaded);
    Ok(loaded)
}

/// Prints what a cluster file warns of.
pub fn warn(loaded: &Loaded) {
    if !loaded.warnings().is_empty() {
        eprint!("{}", loaded.warnings);
    }
}

/// The node's state directory.
pub fn state(loaded: &Loaded) -> StateDir {
    StateDir(loaded.path(&loaded.cluster.state_dir))
}

/// The cluster that its node made or opened last.
pub fn cluster(loaded: &Loaded) -> Result<Uuid> {
    let state = state(loaded);
    let node = state.node()?;
    state.cluster().with_context(|| match node {
        Some(_) => "the node of an earlier release is up: `levada down` and `levada up` first",
        None => "it is not noted which cluster this is: start it with `levada up`",
    })
}

/// The address of the cluster's services, as its node left it.
pub fn address(loaded: &Loaded) -> Result<String> {
    let state = state(loaded);
    // Whose directory cannot be read is not without one.
    state.node()?;
    state.address().context("this cluster was never up: start it with `levada up`")
}

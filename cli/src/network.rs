//! What every process that serves over the network is told of it.

use clap::Args;

#[derive(Args)]
pub struct NetworkArgs {
    /// Cores beside its own that carry network connections: worth it where the one core that serves is busy, and others are not
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = parse_cores)]
    pub network_cores: usize,
}

/// A count of threads that take work off the one that serves.
pub fn parse_cores(text: &str) -> Result<usize, String> {
    let cores = text.parse().ok().filter(|cores| *cores <= levada_spec::NETWORK_CORES_MAX);
    cores.ok_or_else(|| format!("0 to {}", levada_spec::NETWORK_CORES_MAX))
}

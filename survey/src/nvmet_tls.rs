//! What TLS costs over NVMe/TCP: our own host on one core, the target on the other, within TLS and in the clear.

use crate::cores::TwoCores;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Rate, Run, pairs};
use crate::load::Load;
use crate::null_volume::NullVolume;
use crate::served::{HOST, Served, Serving, TLS_HOST, Volumes, tls_key};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::reactor::Reactor;
use levada_base::units::{GIB, KIB};
use levada_base::{Buf, BufMut};
use levada_device::nvme::{Host, NvmeNamespace, Options};
use levada_device::{Device, Durability};
use levada_volume::Volume;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::rc::Rc;

const VOLUME: &str = "null";
const VOLUME_BYTES: u64 = 64 * GIB;
const DEPTH: usize = 16;
const PIECE_BYTES: u64 = 128 * KIB;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "nvmet.null.seqread_tls_of_clear",
            what: "128 KiB reads over NVMe/TCP within TLS (AES-128-GCM), 16 in flight, against the same in the clear",
            bar: Bar::None,
            take: |effort| taken(effort, Kind::Read),
        },
        Spec {
            name: "nvmet.null.seqwrite_tls_of_clear",
            what: "128 KiB writes over NVMe/TCP within TLS (AES-128-GCM), 16 in flight, against the same in the clear",
            bar: Bar::None,
            take: |effort| taken(effort, Kind::Write),
        },
    ]
}

fn taken(effort: Effort, kind: Kind) -> Result<Taken> {
    let dir = tempfile::Builder::new().prefix("bench-nvmet-").tempdir()?;
    let cores = TwoCores::take()?;
    let served = cores.of_other_side(|| {
        Served::start(dir.path(), Serving::default(), async || {
            let volume: Rc<dyn Volume> = Rc::new(NullVolume::new(VOLUME_BYTES));
            Ok(Volumes::from([(VOLUME.to_owned(), volume)]))
        })
    })?;
    let keys = dir.path().join("keys");
    fs::write(&keys, format!("{TLS_HOST} {}\n", tls_key().reveal()))?;
    fs::set_permissions(&keys, PermissionsExt::from_mode(0o600))?;
    let (address, subsystem) = served.nvme(VOLUME)?;
    let url = format!("nvme+tcp://{address}/{subsystem}");
    let within = format!("{url}?host={TLS_HOST}&keys={}&tls=1", keys.display());
    let clear = format!("{url}?host={HOST}");
    let load = Load::sequential(0..effort.amount(8 * GIB), PIECE_BYTES, DEPTH);
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |_| through(&within, &load, kind).await,
        async |_| through(&clear, &load, kind).await,
    ))?;
    Ok(pairs.ratio(Rate::GbPerS, ("tls", "clear"), 1.0))
}

async fn through(url: &str, load: &Load, kind: Kind) -> Result<Run> {
    let device = NvmeNamespace::open(&url.parse()?, Options::new(Host::anonymous()?)).await?;
    let device = Rc::new(device);
    let data = Buf::copy_of(&[7; PIECE_BYTES as usize]);
    load.run(move |at| {
        let (device, data) = (Rc::clone(&device), data.clone());
        async move {
            match kind {
                Kind::Read => {
                    let into = BufMut::for_overwrite(PIECE_BYTES as usize).into_vec();
                    device.read(at, into).await?;
                }
                Kind::Write => device.write(at, data.into_vec(), Durability::Fua).await?,
            }
            Ok(())
        }
    })
    .await
}

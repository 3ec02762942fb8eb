//! An enclosure: bays and paths, and what may be ordered of them.

use crate::bay::Bay;
use crate::request::{Order, PathOrder, Refusal};
use futures_util::future::join_all;
use levada_base::reactor;
use levada_base::sync::Semaphore;
use levada_export_nvmet::{
    AnaState, FIRMWARE, Health, ListenError, MODEL, Passage, Path, Subsystem, Target,
};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// How an enclosure is doing, as programs are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnclosureStatus {
    pub name: String,
    /// The name of its subsystem.
    pub subsystem: String,
    /// As its hosts are told (Identify Controller).
    pub serial: String,
    pub model: String,
    pub firmware: String,
    pub has_power: bool,
    /// Of hosts that are connected: one for each path by which a host has come.
    pub controllers: usize,
    pub paths: Vec<PathStatus>,
    pub bays: Vec<BayStatus>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathStatus {
    /// From 1 on.
    pub number: usize,
    pub address: SocketAddr,
    /// `up`, `down`, `hung`, or `slow by MILLISECONDS ms`.
    pub state: String,
    /// How good it says it is.
    #[serde(default)]
    pub ana: AnaState,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BayStatus {
    /// Also the number of its namespace.
    pub bay: u32,
    pub state: BayState,
    /// `None`: the bay is empty.
    pub drive: Option<DriveStatus>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BayState {
    Empty,
    /// Without power.
    Off,
    Ok,
    /// Its drive warns.
    Warning,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveStatus {
    /// Of its namespace (NGUID), in hexadecimal digits: it goes with the drive.
    pub guid: String,
    pub size_bytes: u64,
    /// Every request takes so much longer, by order.
    pub slow_by_ms: u64,
    pub health: DriveHealth,
}

/// What a drive says of itself to hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveHealth {
    /// What it warns of: `spare`, `temperature`.
    pub warnings: Vec<String>,
    pub celsius: i32,
    /// Of its endurance; 255: that and more.
    pub used_percent: u8,
    pub spare_percent: u8,
    /// Less is too little.
    pub spare_least_percent: u8,
    pub media_errors: u64,
    /// In whole units of 512,000 bytes, as is what was written.
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub reads: u64,
    pub writes: u64,
    pub power_cycles: u64,
    pub unsafe_shutdowns: u64,
}

struct Way {
    path: Path,
    order: Cell<PathOrder>,
}

/// An enclosure on this reactor.
pub struct Enclosure {
    name: String,
    target: Target,
    subsystem: Subsystem,
    ways: Vec<Way>,
    bays: Vec<Bay>,
    has_power: Cell<bool>,
    /// Cutting the power takes a moment.
    turn: Rc<Semaphore>,
}

impl Enclosure {
    pub(crate) fn new(
        name: String,
        target: Target,
        subsystem: Subsystem,
        addresses: &[SocketAddr],
        bays: Vec<Bay>,
    ) -> Result<Self, ListenError> {
        for bay in &bays {
            subsystem.add_drive(bay.number, bay.open(), bay.tell_health(), bay.claims.clone());
        }
        target.add(subsystem.clone());
        let ways: Result<Vec<Way>, ListenError> = addresses
            .iter()
            .map(|address| {
                let path = target.listen(*address)?;
                Ok(Way { path, order: Cell::new(PathOrder::Up) })
            })
            .collect();
        let (ways, has_power) = (ways?, Cell::new(true));
        target.begin();
        Ok(Self { name, target, subsystem, ways, bays, has_power, turn: Semaphore::new(1) })
    }

    /// How it is.
    pub fn status(&self) -> EnclosureStatus {
        let paths = self.ways.iter().enumerate().map(|(index, way)| PathStatus {
            number: index + 1,
            address: way.path.address(),
            state: match way.order.get() {
                PathOrder::Up => "up".into(),
                PathOrder::Down => "down".into(),
                PathOrder::Hung => "hung".into(),
                PathOrder::Slow { ms } => format!("slow by {ms} ms"),
            },
            ana: way.path.state(),
        });
        let bays = self.bays.iter().map(|bay| self.bay_status(bay));
        EnclosureStatus {
            name: self.name.clone(),
            subsystem: self.subsystem.nqn().to_string(),
            serial: self.subsystem.serial().into(),
            model: MODEL.into(),
            firmware: FIRMWARE.into(),
            has_power: self.has_power.get(),
            controllers: self.subsystem.controllers(),
            paths: paths.collect(),
            bays: bays.collect(),
        }
    }

    fn bay_status(&self, bay: &Bay) -> BayStatus {
        let has_drive = bay.is_in.get();
        let health = bay.health();
        let state = match (has_drive, self.has_power.get()) {
            (false, _) => BayState::Empty,
            (true, false) => BayState::Off,
            (true, true) if health.warnings.is_empty() => BayState::Ok,
            (true, true) => BayState::Warning,
        };
        let drive = has_drive.then(|| DriveStatus {
            guid: format!("{:032x}", bay.guid),
            size_bytes: bay.size_bytes(),
            slow_by_ms: bay.slowness().as_millis() as u64,
            health: DriveHealth::of(&health),
        });
        BayStatus { bay: bay.number, state, drive }
    }

    /// Carries an order out.
    ///
    /// # Errors
    ///
    /// A [`Refusal`], and nothing was done.
    pub async fn carry_out(&self, order: Order) -> Result<(), Refusal> {
        match order {
            Order::Show => Ok(()),
            Order::Pull { bay } => {
                let bay = self.bay(bay)?;
                if !bay.is_in.get() {
                    return Err(Refusal::Empty { bay: bay.number });
                }
                // Held while the drive writes down what happens to survive.
                let _turn = self.turn.acquire(1).await;
                self.subsystem.remove(bay.number);
                let pulled = bay.pull(reactor::random_u64(), self.has_power.get()).await;
                pulled.map_err(|error| Refusal::Media { why: error.to_string() })
            }
            Order::Insert { bay } => {
                let bay = self.bay(bay)?;
                if bay.is_in.get() {
                    return Err(Refusal::Taken { bay: bay.number });
                }
                let _turn = self.turn.acquire(1).await;
                bay.insert(self.has_power.get());
                self.subsystem.add_drive(
                    bay.number,
                    bay.open(),
                    bay.tell_health(),
                    bay.claims.clone(),
                );
                Ok(())
            }
            Order::Wear { bay, change } => {
                let bay = self.bay(bay)?;
                let new = bay.wear(change);
                if bay.is_in.get() {
                    self.subsystem.health_changed(new);
                }
                Ok(())
            }
            Order::SlowDrive { bay, ms } => {
                self.bay(bay)?.slow(Duration::from_millis(ms));
                Ok(())
            }
            Order::Path { path, order } => {
                let way = self.way(path)?;
                way.order.set(order);
                way.path.set_state(order.state());
                if self.has_power.get() {
                    way.path.set_passage(order.passage());
                }
                Ok(())
            }
            Order::PathState { path, state } => {
                self.way(path)?.path.set_state(state);
                Ok(())
            }
            Order::Power { is_on } => self.power(is_on).await,
        }
    }

    fn way(&self, path: usize) -> Result<&Way, Refusal> {
        let way = path.checked_sub(1).and_then(|index| self.ways.get(index));
        way.ok_or(Refusal::NoPath { path, count: self.ways.len() })
    }

    fn bay(&self, bay: u32) -> Result<&Bay, Refusal> {
        let count = self.bays.len();
        self.bays.iter().find(|one| one.number == bay).ok_or(Refusal::NoBay { bay, count })
    }

    async fn power(&self, is_on: bool) -> Result<(), Refusal> {
        // Held while drives write down what happens to survive.
        let _turn = self.turn.try_acquire(1).ok_or(Refusal::Busy)?;
        if self.has_power.get() == is_on {
            return Err(if is_on { Refusal::IsOn } else { Refusal::IsOff });
        }
        if is_on {
            for bay in &self.bays {
                bay.power_on();
            }
            self.has_power.set(true);
            for way in &self.ways {
                // How good it is its port remembers.
                way.path.set_passage(way.order.get().passage());
            }
            return Ok(());
        }
        // Nothing is answered any more, before anything is lost.
        for way in &self.ways {
            way.path.set_passage(Passage::Closed);
        }
        self.has_power.set(false);
        let seed = reactor::random_u64();
        for cut in join_all(self.bays.iter().map(|bay| bay.power_off(seed))).await {
            cut.map_err(|error| Refusal::Media { why: error.to_string() })?;
        }
        Ok(())
    }

    /// Ends it: what was asked for is answered, and what drives have cached is flushed by who holds them.
    pub async fn end(&self) {
        self.target.end().await;
        for bay in &self.bays {
            if self.has_power.get() && bay.is_in.get() {
                // An orderly end is no power cut.
                let _ = bay.flush().await;
            }
        }
    }
}

impl DriveHealth {
    fn of(health: &Health) -> Self {
        let plain = |count: u128| u64::try_from(count).unwrap_or(u64::MAX);
        Self {
            warnings: health.warnings.iter_names().map(|(name, _)| name.to_lowercase()).collect(),
            celsius: health.celsius().unwrap_or_default(),
            used_percent: health.used_percent,
            spare_percent: health.spare_percent,
            spare_least_percent: health.spare_threshold_percent,
            media_errors: plain(health.media_errors),
            read_bytes: plain(health.read_units.saturating_mul(Health::UNIT_BYTES)),
            written_bytes: plain(health.written_units.saturating_mul(Health::UNIT_BYTES)),
            reads: plain(health.reads),
            writes: plain(health.writes),
            power_cycles: plain(health.power_cycles),
            unsafe_shutdowns: plain(health.unsafe_shutdowns),
        }
    }
}

impl PathOrder {
    fn passage(self) -> Passage {
        match self {
            Self::Up => Passage::Open,
            Self::Down => Passage::Closed,
            Self::Hung => Passage::Hung,
            Self::Slow { ms } => Passage::Slow(Duration::from_millis(ms)),
        }
    }

    /// How good such a path says it is, until told otherwise.
    fn state(self) -> AnaState {
        match self {
            Self::Slow { .. } => AnaState::NonOptimized,
            Self::Up | Self::Down | Self::Hung => AnaState::Optimized,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use levada_export_nvmet::{Hosts, Nqn, serial_of};

    #[test]
    fn paths_are_as_ordered_once_the_power_is_back() {
        Reactor::new().expect("an io_uring").block_on(async {
            let nqn = Nqn::new("nqn.2026-11.io.levada:test").expect("a name");
            let subsystem = Subsystem::new(nqn.clone(), serial_of(&nqn), Hosts::Any);
            let addresses = [([127, 0, 0, 1], 0).into(); 2];
            let name = "e1".to_owned();
            let enclosure = Enclosure::new(name, Target::new(), subsystem, &addresses, Vec::new());
            let enclosure = enclosure.expect("ports");
            let order = async |order| enclosure.carry_out(order).await.expect("carried out");
            let paths = || enclosure.status().paths.into_iter().map(|path| (path.state, path.ana));
            let slow = PathOrder::Slow { ms: 5 };
            order(Order::Path { path: 1, order: slow }).await;
            order(Order::PathState { path: 2, state: AnaState::Inaccessible }).await;
            let ordered = [
                ("slow by 5 ms".to_owned(), AnaState::NonOptimized),
                ("up".to_owned(), AnaState::Inaccessible),
            ];
            order(Order::Power { is_on: false }).await;
            assert!(paths().eq(ordered.clone()));
            order(Order::Power { is_on: true }).await;
            assert!(paths().eq(ordered));
            // Also what is ordered while it is off.
            order(Order::Power { is_on: false }).await;
            order(Order::Path { path: 2, order: slow }).await;
            order(Order::PathState { path: 1, state: AnaState::Change }).await;
            order(Order::Power { is_on: true }).await;
            let ana: Vec<AnaState> = paths().map(|(_, ana)| ana).collect();
            assert_eq!(ana, [AnaState::Change, AnaState::NonOptimized]);
        });
    }
}

//! Thresholds of temperature: a host is warned of a drive by what it has set itself.

use crate::host::{Host, log_page_of};
use crate::memory::Memory;
use crate::{BLOCK_BYTES, Served, opens, run};
use levada_base::reactor;
use levada_export_nvmet::{Claims, Health, Warnings};
use levada_nvme::fabrics::{Configuration, Property, PropertyAccess};
use levada_nvme::identify::Events;
use levada_nvme::log::{Event, LogPage};
use levada_nvme::{AdminOpcode, Command, Feature};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const DRIVE: u32 = 2;
const BELOW: u32 = 1 << 20;

/// A drive whose temperature can be set, as namespace [`DRIVE`].
struct Drive {
    served: Served,
    kelvin: Rc<Cell<u16>>,
}

impl Drive {
    fn new() -> Self {
        let served = Served::new(64);
        let drive = Self { served, kelvin: Rc::new(Cell::new(300)) };
        drive.insert();
        drive
    }

    fn insert(&self) {
        let kelvin = Rc::clone(&self.kelvin);
        // It has thresholds of its own, which are not the hosts'.
        let own = Warnings::TEMPERATURE | Warnings::READ_ONLY;
        let health = move || Health { kelvin: kelvin.get(), warnings: own, ..Health::default() };
        let memory = Rc::new(Memory::new(64 * BLOCK_BYTES));
        self.served.subsystem.add_drive(
            DRIVE,
            opens(&memory, 2),
            Rc::new(health),
            Claims::default(),
        );
    }

    fn becomes(&self, kelvin: u16) {
        self.kelvin.set(kelvin);
        self.served.subsystem.health_changed(Warnings::empty());
    }
}

async fn set(host: &mut Host, feature: Feature, value: u32) {
    let completion = host.features(AdminOpcode::SetFeatures, [feature as u32, value]).await;
    assert!(completion.status.is_success());
}

/// Disables the controller, and enables it.
async fn reset(host: &mut Host) {
    for value in [0, u64::from(Configuration::ENABLED.0)] {
        let id = host.admin.new_id();
        let property = PropertyAccess::set(Property::Configuration, value, id);
        assert!(host.admin.ask(property, None).await.expect("answered").0.status.is_success());
    }
}

/// Warnings of the drive, and of the subsystem.
async fn warnings(host: &mut Host) -> [Warnings; 2] {
    let mut told = [Warnings::empty(); 2];
    for (namespace, told) in [DRIVE, u32::MAX].into_iter().zip(&mut told) {
        let page = log_page_of(&mut host.admin, namespace, LogPage::Health as u8, 512).await;
        let page = page.expect("told");
        *told = Health::parse(page[..].try_into().expect("whole")).warnings;
    }
    told
}

#[test]
fn a_page_warns_by_the_thresholds_of_the_host() {
    run(async {
        let drive = Drive::new();
        let (mut host, mut other) = (drive.served.host().await, drive.served.host().await);
        let is_beyond = async |host: &mut Host| {
            let [one, all] = warnings(host).await;
            assert_eq!(one, all);
            assert!(one.contains(Warnings::READ_ONLY), "what else it warns of is its own to say");
            one.contains(Warnings::TEMPERATURE)
        };
        // At first: from 343 K on.
        for (kelvin, is_hot) in [(300, false), (342, false), (343, true), (400, true)] {
            drive.kelvin.set(kelvin);
            assert_eq!(is_beyond(&mut host).await, is_hot, "{kelvin}");
        }
        set(&mut host, Feature::TemperatureThreshold, 320).await;
        set(&mut host, Feature::TemperatureThreshold, BELOW | 290).await;
        for (kelvin, is) in [(290, true), (291, false), (319, false), (320, true)] {
            drive.kelvin.set(kelvin);
            assert_eq!(is_beyond(&mut host).await, is, "{kelvin}");
            assert!(!is_beyond(&mut other).await, "each host has its own");
        }
        // One that does not tell knows itself.
        drive.kelvin.set(0);
        assert!(is_beyond(&mut host).await && is_beyond(&mut other).await);
        // After a reset they are what they were.
        drive.kelvin.set(330);
        assert!(is_beyond(&mut host).await);
        reset(&mut host).await;
        assert!(!is_beyond(&mut host).await);
    });
}

#[test]
fn a_host_is_told_when_a_drive_comes_to_be_beyond() {
    run(async {
        let drive = Drive::new();
        let mut host = drive.served.host().await;
        let request = |id| Command::new(AdminOpcode::AsynchronousEventRequest as u8, id, 0);
        set(&mut host, Feature::AsynchronousEvents, Events::TEMPERATURE.bits()).await;
        let hears = async |host: &mut Host| {
            let told = request(host.admin.new_id());
            let (event, _) = host.admin.ask(told, None).await.expect("told");
            assert_eq!(Event::of(event.result), Some(Event::Temperature));
            // As the specification has it: of health, the threshold of temperature, page 2.
            assert_eq!(event.result, 0x02_01_01);
            warnings(host).await;
        };
        drive.becomes(343);
        hears(&mut host).await;
        // Still so, it is not told again; nor is one that has cooled down. What is told next is the next time.
        let told = request(host.admin.new_id());
        host.admin.begin(told, None).await;
        drive.becomes(350);
        drive.becomes(300);
        let silent = reactor::timeout(Duration::from_millis(50), host.admin.hear()).await;
        assert!(silent.is_err());
        drive.becomes(345);
        let (event, _) = host.admin.answer(told.id(), None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::Temperature));
        drive.becomes(300);
        warnings(&mut host).await;
        // A threshold that it is beyond already, either way.
        set(&mut host, Feature::TemperatureThreshold, 300).await;
        hears(&mut host).await;
        set(&mut host, Feature::TemperatureThreshold, 400).await;
        set(&mut host, Feature::TemperatureThreshold, BELOW | 300).await;
        hears(&mut host).await;
        set(&mut host, Feature::TemperatureThreshold, BELOW | 10).await;
        // One that was hot before the host asked, or that is put in hot.
        set(&mut host, Feature::AsynchronousEvents, 0).await;
        drive.becomes(401);
        set(&mut host, Feature::AsynchronousEvents, Events::TEMPERATURE.bits()).await;
        hears(&mut host).await;
        drive.served.subsystem.remove(DRIVE);
        drive.insert();
        hears(&mut host).await;
    });
}

#[test]
fn a_reset_puts_events_back() {
    run(async {
        let drive = Drive::new();
        let mut host = drive.served.host().await;
        let request = |id| Command::new(AdminOpcode::AsynchronousEventRequest as u8, id, 0);
        let hears = async |host: &mut Host| {
            set(host, Feature::AsynchronousEvents, Events::TEMPERATURE.bits()).await;
            let told = request(host.admin.new_id());
            let (event, _) = host.admin.ask(told, None).await.expect("told");
            assert_eq!(Event::of(event.result), Some(Event::Temperature));
        };
        // It was told, and has not read the page: whoever enables the controller again knows nothing of that.
        drive.becomes(343);
        hears(&mut host).await;
        reset(&mut host).await;
        hears(&mut host).await;
        warnings(&mut host).await;
        // It is not told what happened before, of which it has not said since that it wants to know.
        drive.becomes(300);
        drive.becomes(350);
        reset(&mut host).await;
        let told = request(host.admin.new_id());
        host.admin.begin(told, None).await;
        let silent = reactor::timeout(Duration::from_millis(50), host.admin.hear()).await;
        assert!(silent.is_err());
        // That request is good for what it wants to know now.
        set(&mut host, Feature::AsynchronousEvents, Events::TEMPERATURE.bits()).await;
        let (event, _) = host.admin.answer(told.id(), None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::Temperature));
    });
}

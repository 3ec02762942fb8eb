//! Discovery, of targets that lie: looking around ends in its time, takes no more memory than a page may have, and says what was wrong.

use super::namespace::{run, two_paths};
use super::{address, options};
use crate::nvme::discovery::discover;
use crate::nvme::find::find_by;
use crate::nvme::target::{NQN, Target, Tells};
use crate::nvme::{ConnectError, FoundSubsystem, NamespaceError, NvmeUrl};
use levada_base::reactor;
use levada_base::stream::MemoryNetwork;
use levada_nvme::identify::namespace_list;
use levada_nvme::log::{self, DISCOVERY_ENTRY_BYTES, DISCOVERY_HEADER_BYTES, DiscoveryEntry};
use levada_nvme::{DISCOVERY_NQN, Nqn};
use proptest::prelude::*;
use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).expect("a name")
}

fn entry(subsystem: &str, address: SocketAddr) -> DiscoveryEntry {
    let (subsystem, is_discovery) = (nqn(subsystem), false);
    DiscoveryEntry { subsystem, is_discovery, address, port: 1, needs_tls: false }
}

/// Discovery as it is asked for by users, over a network in memory.
async fn find(net: &MemoryNetwork, at: SocketAddr) -> Result<Vec<FoundSubsystem>, NamespaceError> {
    let url: NvmeUrl = format!("nvme+tcp://{at}/{DISCOVERY_NQN}").parse().expect("a URL");
    find_by(&url, at, &options(), |_, options| Ok((net.clone(), options)), net).await
}

/// Says this page, in whatever pieces it is asked for; behind it are zeroes.
fn tells(target: &Target, page: Vec<u8>) {
    target.tells_page.replace(Some(Rc::new(move |get| {
        let rest = page.get(get.at as usize..).unwrap_or_default();
        let mut told = rest[..rest.len().min(get.bytes as usize)].to_vec();
        told.resize(get.bytes as usize, 0);
        told
    })));
}

#[test]
fn a_page_that_never_holds_still_is_given_up() {
    run(1, async {
        let (net, target, paths) = two_paths(Target::new());
        let reads = Rc::new(Cell::new(0));
        let read = Rc::clone(&reads);
        target.tells_page.replace(Some(Rc::new(move |get| {
            read.set(read.get() + 1);
            let all = vec![entry(NQN, address(1)); 40];
            let page = log::discovery(read.get(), &all);
            page[get.at as usize..][..get.bytes as usize].to_vec()
        })));
        let outcome = discover(&net, paths[0], &options()).await;
        let Err(ConnectError::Contradiction { what }) = outcome else { panic!("{outcome:?}") };
        assert!(what.contains("does not hold still"));
        // Eight times: the header, three pieces, and the header again.
        assert_eq!(reads.get(), 8 * 5);
    });
}

#[test]
fn a_page_of_more_entries_than_there_can_be_is_not_read() {
    run(2, async {
        for count in [4097, 1 << 40, u64::MAX] {
            let (net, target, paths) = two_paths(Target::new());
            let mut page = log::discovery(1, &[]);
            page[8..16].copy_from_slice(&u64::to_le_bytes(count));
            let largest = Rc::new(Cell::new(0));
            let seen = Rc::clone(&largest);
            target.tells_page.replace(Some(Rc::new(move |get| {
                seen.set(seen.get().max(get.at + get.bytes));
                page.clone()
            })));
            let outcome = discover(&net, paths[0], &options()).await;
            assert!(matches!(outcome, Err(ConnectError::Contradiction { .. })), "{outcome:?}");
            assert_eq!(largest.get(), DISCOVERY_HEADER_BYTES as u64);
        }
    });
}

#[test]
fn a_target_that_always_answers_just_in_time_is_given_up() {
    run(3, async {
        let (net, target, paths) = two_paths(Target::new());
        tells(&target, log::discovery(1, &vec![entry(NQN, address(1)); 4096]));
        target.admin_late.set(Duration::from_millis(2900));
        let begun = reactor::now();
        let outcome = discover(&net, paths[0], &options()).await;
        assert!(matches!(outcome, Err(ConnectError::Endless { .. })), "{outcome:?}");
        assert!(begun.elapsed() <= Duration::from_secs(31));
        assert_eq!(
            outcome.expect_err("given up").to_string(),
            "it takes longer than 30 s to list its subsystems"
        );
    });
}

#[test]
fn entries_that_name_nothing_are_left_out() {
    run(4, async {
        let (net, target, paths) = two_paths(Target::new());
        let good = entry(NQN, paths[0]);
        let mut page = log::discovery(7, &vec![good.clone(); 20]);
        let of = |index: usize| DISCOVERY_HEADER_BYTES + index * DISCOVERY_ENTRY_BYTES;
        let mut put = |index: usize, at: usize, bytes: &[u8]| {
            page[of(index) + at..][..bytes.len()].copy_from_slice(bytes);
        };
        const TRANSPORT: usize = 0;
        const FAMILY: usize = 1;
        const SERVICE: usize = 32;
        const NAME: usize = 256;
        const ADDRESS: usize = 512;
        // RDMA, Fibre Channel, and what nobody knows.
        for (index, transport) in [(0, 1), (1, 2), (2, 77)] {
            put(index, TRANSPORT, &[transport]);
        }
        put(3, FAMILY, &[2]);
        put(4, FAMILY, &[0]);
        for (index, text) in [
            (5, "0.0.0.0  "),
            (6, "239.1.2.3"),
            (7, "192.0.2.300"),
            (8, "example.com"),
            (9, "         "),
            (10, "192.0.2.1/8"),
        ] {
            put(index, ADDRESS, text.as_bytes());
        }
        for (index, text) in [(11, "0    "), (12, "65536"), (13, "-1   "), (14, "http ")] {
            put(index, SERVICE, text.as_bytes());
        }
        put(15, NAME, b"nqx.");
        put(16, NAME, &[b'n'; 256]);
        put(17, NAME, &[0; 256]);
        put(18, NAME, b"nqn.\x1b[2J");
        tells(&target, page);
        let found = discover(&net, paths[0], &options()).await.expect("the rest");
        assert_eq!(found, [good]);
    });
}

#[test]
fn a_subsystem_that_is_named_often_is_looked_into_once() {
    run(5, async {
        let (net, target, paths) = two_paths(Target::new());
        let mut all = vec![entry(NQN, paths[0]), entry(NQN, paths[1]), entry(NQN, paths[0])];
        all.extend((10..200).map(|last| entry(NQN, address(last))));
        *target.discovered.borrow_mut() = all;
        let found = find(&net, paths[0]).await.expect("found");
        let [FoundSubsystem { url, namespaces }] = &found[..] else { panic!("{found:?}") };
        assert_eq!(url.addresses[..2], paths.map(|at| (at.ip().to_string(), at.port())));
        // As many as anybody has, and not as many as a page has room for.
        assert_eq!(url.addresses.len(), 16);
        let numbers: Vec<u32> =
            namespaces.as_ref().expect("seen").iter().map(|one| one.number).collect();
        assert_eq!(numbers, [1]);
        // What it shows another time is what is found then.
        target.is_absent.set(true);
        let found = find(&net, paths[0]).await.expect("found");
        assert!(found[0].namespaces.as_ref().expect("seen").is_empty());
        target.discovered.borrow_mut().clear();
        assert!(find(&net, paths[0]).await.expect("found").is_empty());
    });
}

#[test]
fn who_refers_to_others_is_not_followed() {
    run(6, async {
        let (net, target, paths) = two_paths(Target::new());
        let there = DiscoveryEntry { is_discovery: true, ..entry(DISCOVERY_NQN, paths[1]) };
        let disguised = entry(DISCOVERY_NQN, paths[1]);
        let named = DiscoveryEntry { is_discovery: true, ..entry(NQN, paths[0]) };
        *target.discovered.borrow_mut() = vec![there, disguised, named];
        let other = Rc::new(Target::new());
        other.listen(&net, paths[1]);
        let comes = Rc::new(Cell::new(false));
        let came = Rc::clone(&comes);
        other.tells_page.replace(Some(Rc::new(move |get| {
            came.set(true);
            vec![0; get.bytes as usize]
        })));
        assert!(find(&net, paths[0]).await.expect("found").is_empty());
        assert!(!comes.get());
    });
}

#[test]
fn names_that_would_be_something_else_in_a_url_are_left_out() {
    run(7, async {
        let (net, target, paths) = two_paths(Target::new());
        let names = [
            "nqn.x?keys=/etc/passwd&host=nqn.y",
            "nqn.x\"]",
            "nqn.x\\",
            "nqn.x'",
            "nqn.x;id",
            "nqn.x$(id)",
            "nqn.x`id`",
            NQN,
        ];
        *target.discovered.borrow_mut() = names.map(|name| entry(name, paths[0])).to_vec();
        let found = find(&net, paths[0]).await.expect("found");
        let found: Vec<_> = found.iter().map(|one| one.url.subsystem.as_str()).collect();
        assert_eq!(found, [NQN]);
    });
}

#[test]
fn subsystems_that_nobody_reaches_cost_no_more_than_a_minute() {
    run(8, async {
        let (net, target, paths) = two_paths(Target::new());
        // The first of them all is there.
        let mut all = vec![entry("nqn.2014-08.org.example:a", paths[0])];
        for number in 0..100 {
            for last in 10..20 {
                net.set_silent(address(last), true);
                all.push(entry(&format!("nqn.2014-08.org.example:silent{number}"), address(last)));
            }
        }
        *target.discovered.borrow_mut() = all;
        let begun = reactor::now();
        let found = find(&net, paths[0]).await.expect("found");
        assert!(begun.elapsed() <= Duration::from_secs(65), "{:?}", begun.elapsed());
        assert_eq!(found.len(), 101, "all are told, and why they were not looked into");
        let why = |index: usize| match &found[index].namespaces {
            Err(NamespaceError::Connect { source, .. }) => source.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(why(0).contains("answers for subsystem"), "{}", why(0));
        assert_eq!(why(100), "it takes longer than 60 s to look into all that is listed");
    });
}

#[test]
fn lists_of_namespaces_without_order_or_end_are_noticed() {
    run(9, async {
        let (net, target, paths) = two_paths(Target::new());
        *target.discovered.borrow_mut() = vec![entry(NQN, paths[0])];
        let backwards = |_: &u32| namespace_list([3].into_iter(), 0);
        let endless = |after: &u32| namespace_list(after + 1..=after + 1024, *after);
        let mut twice = namespace_list([5].into_iter(), 0);
        twice[4] = 5;
        let lies: [Tells<u32>; 3] =
            [Rc::new(backwards), Rc::new(endless), Rc::new(move |_| twice.clone())];
        for lie in lies {
            target.tells_namespaces.replace(Some(lie));
            let found = find(&net, paths[0]).await.expect("found");
            let Err(NamespaceError::Connect { source, .. }) = &found[0].namespaces else {
                panic!("{found:?}")
            };
            assert!(source.to_string().contains("no order, or no end"), "{source}");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// Pages of anything: they are read or refused, in their time.
    #[test]
    fn random_pages(
        generations in prop::collection::vec(0_u64..3, 1..4),
        count in prop_oneof![0_u64..40, any::<u64>()],
        changed in prop::collection::vec((0_usize..20 * 1024, any::<u8>()), 0..200),
        seed in any::<u64>(),
    ) {
        run(seed, async {
            let (net, target, paths) = two_paths(Target::new());
            let names = [NQN, "nqn.2014-08.org.example:other", DISCOVERY_NQN];
            let all: Vec<_> =
                (0..19).map(|at| entry(names[at % 3], address((at % 4) as u8 + 1))).collect();
            let mut page = log::discovery(0, &all);
            for (at, value) in changed {
                page[at] = value;
            }
            page[8..16].copy_from_slice(&count.to_le_bytes());
            let reads = Cell::new(0);
            target.tells_page.replace(Some(Rc::new(move |get| {
                let mut page = page.clone();
                let generation = generations[reads.get() % generations.len()];
                reads.set(reads.get() + 1);
                page[..8].copy_from_slice(&generation.to_le_bytes());
                page.resize((get.at + get.bytes) as usize, 0);
                page[get.at as usize..].to_vec()
            })));
            let begun = reactor::now();
            let _ = find(&net, paths[0]).await;
            assert!(begun.elapsed() < Duration::from_secs(100), "{:?}", begun.elapsed());
        });
    }
}

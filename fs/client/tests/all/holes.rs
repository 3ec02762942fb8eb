//! Holes: they are zeroes, nothing is stored for them, and they are found again; copies.

use crate::world::{UNIT, WRITE, World, below, create, cut, data, flat, random_bytes};
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, Error, File, Seek};
use std::time::Duration;

const SIZE_MAX: u64 = 6 * UNIT;

/// A byte of a file, or a hole.
type Model = Vec<Option<u8>>;

fn found(model: &Model, offset: u64, what: Seek) -> Option<u64> {
    let offset = usize::try_from(offset).ok().filter(|offset| *offset < model.len())?;
    let is_found = |byte: &Option<u8>| byte.is_some() == (what == Seek::Data);
    match (model[offset..].iter().position(is_found), what) {
        (Some(skip), _) => Some((offset + skip) as u64),
        (None, Seek::Data) => None,
        (None, Seek::Hole) => Some(model.len() as u64),
    }
}

fn put(model: &mut Model, offset: u64, bytes: impl IntoIterator<Item = Option<u8>>) {
    for (at, byte) in (offset as usize..).zip(bytes) {
        model.resize(model.len().max(at + 1), None);
        model[at] = byte;
    }
}

/// One random change of the file and the model.
async fn change(client: &Client, file: &File, model: &mut Model) {
    let (offset, bytes) = (below(SIZE_MAX), 1 + below(2 * UNIT));
    let holes = (0..bytes).map(|_| None);
    match below(6) {
        0 | 1 => {
            let bytes = random_bytes(bytes as usize);
            file.write(offset, data(&bytes)).await.expect("written");
            put(model, offset, bytes.into_iter().map(Some));
        }
        2 => {
            file.punch(offset, bytes).await.expect("punched");
            let inside = (model.len() as u64).saturating_sub(offset) as usize;
            put(model, offset, holes.take(inside));
        }
        3 => {
            file.zero(offset, bytes).await.expect("zeroed");
            put(model, offset, holes);
        }
        4 => {
            file.grow(offset).await.expect("grown");
            model.resize(model.len().max(offset as usize), None);
        }
        _ => {
            cut(client, file, offset).await;
            model.resize(offset as usize, None);
        }
    }
}

async fn check(file: &File, model: &Model, what: &str) {
    for _ in 0..3 {
        let offset = below(model.len() as u64 + 10);
        for (sought, name) in [(Seek::Data, "data"), (Seek::Hole, "a hole")] {
            let seen = file.seek(offset, sought).await.expect("sought");
            assert_eq!(seen, found(model, offset, sought), "{what}: {name} from {offset} on");
        }
    }
    let bytes: Vec<u8> = model.iter().map(|byte| byte.unwrap_or(0)).collect();
    assert!(flat(&file.read(0, 2 * SIZE_MAX).await.expect("read")) == bytes, "{what}");
}

#[test]
fn holes_stay_holes_and_data_stays_data_over_restarts() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(3).await;
            world.network.break_one_in(300);
            let client = world.client("client").await;
            let (file, mut model) = (create(&client, "a").await, Model::new());
            for step in 0..40 {
                change(&client, &file, &mut model).await;
                match below(8) {
                    0..3 => world.restart_server(below(3) as u32),
                    3 => file.fsync().await.expect("synced"),
                    _ => {}
                }
                check(&file, &model, &format!("seed {seed}, step {step}")).await;
                let size = file.attr().await.expect("there").size;
                assert_eq!(size, model.len() as u64, "seed {seed}, step {step}");
            }
            let ino = file.ino();
            file.close().await;
            client.shutdown().await.expect("settled");
            (0..3).for_each(|number| world.restart_server(number));
            let (file, attr) = world.client("other").await.open(ino, WRITE).await.expect("there");
            assert_eq!((attr.size, attr.writers), (model.len() as u64, false));
            check(&file, &model, &format!("seed {seed}, at the end")).await;
        });
    }
}

#[test]
fn a_hole_makes_no_object_and_growth_makes_one() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(4).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        let objects = || (0..4).map(|n| world.objects(n).names().len()).sum::<usize>();
        file.punch(0, SIZE_MAX).await.expect("punched");
        assert_eq!((file.attr().await.expect("there").size, objects()), (0, 0));
        file.grow(2 * UNIT).await.expect("grown");
        assert_eq!((file.attr().await.expect("there").size, objects()), (2 * UNIT, 1));
        file.zero(UNIT, 2 * UNIT + 1).await.expect("zeroed");
        assert_eq!((file.attr().await.expect("there").size, objects()), (3 * UNIT + 1, 2));
        assert_eq!(file.seek(0, Seek::Data).await, Ok(None));
        assert_eq!(file.seek(0, Seek::Hole).await, Ok(Some(0)));
        assert_eq!(file.seek(u64::MAX, Seek::Hole).await, Ok(None));
        assert_eq!(file.grow(u64::MAX).await, Err(Error::Invalid));
        assert_eq!(file.punch(1, u64::MAX).await, Err(Error::Invalid));

        // The time of modification moves, the size does not.
        file.fsync().await.expect("synced");
        let before = file.attr().await.expect("there");
        assert_eq!(before.components, 0b1010);
        reactor::sleep(Duration::from_millis(5)).await;
        file.punch(0, 10).await.expect("punched");
        file.fsync().await.expect("synced");
        let after = file.attr().await.expect("there");
        assert!(after.mtime > before.mtime && after.ctime > before.ctime);
        assert_eq!((after.size, after.components), (before.size, before.components));
    });
}

#[test]
fn a_long_run_of_data_is_one() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        // More units of each object than one answer names.
        file.write(100, data(&vec![1; 300 * UNIT as usize])).await.expect("written");
        assert_eq!(file.seek(0, Seek::Data).await, Ok(Some(100)));
        assert_eq!(file.seek(100, Seek::Hole).await, Ok(Some(100 + 300 * UNIT)));
        file.punch(200 * UNIT, 1).await.expect("punched");
        assert_eq!(file.seek(100, Seek::Hole).await, Ok(Some(200 * UNIT)));
    });
}

/// What one client has not synced another one punches; neither a restart nor a sync makes more of that than there is.
#[test]
fn a_hole_in_what_another_client_wrote() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let (first, second) = (world.client("first").await, world.client("second").await);
            let ours = create(&first, "a").await;
            ours.write(0, data(&[1; 100])).await.expect("written");
            let (theirs, _) = second.open(ours.ino(), WRITE).await.expect("there");
            theirs.punch(10, 10).await.expect("punched");
            if seed % 2 == 0 {
                (0..2).for_each(|number| world.restart_server(number));
            }
            theirs.fsync().await.expect("synced");
            ours.fsync().await.expect("synced");
            let read = flat(&theirs.read(0, 100).await.expect("no object is missed"));
            assert_eq!(read.len(), 100, "seed {seed}");
            assert!(read.iter().enumerate().all(|(at, byte)| *byte == 1 || (10..20).contains(&at)));
        });
    }
}

#[test]
fn a_missing_object_is_an_error() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        file.write(0, data(&[1; 100])).await.expect("written");
        file.fsync().await.expect("synced");
        let objects = world.objects(0);
        levada_object::Objects::delete(&*objects, objects.names()[0]).await.expect("deleted");
        let missing = Error::Missing { component: 0 };
        assert_eq!(file.punch(0, 10).await, Err(missing));
        assert_eq!(file.seek(0, Seek::Data).await, Err(missing));
    });
}

#[test]
fn a_copy_is_what_was_there() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(3).await;
        let client = world.client("client").await;
        let (from, to) = (create(&client, "from").await, create(&client, "to").await);
        let bytes = random_bytes(3_500_001);
        from.write(0, data(&bytes)).await.expect("written");
        assert_eq!(from.copy(500_000, &to, 77, 2_000_000).await, Ok(2_000_000));
        let read = flat(&to.read(0, 3_000_000).await.expect("read"));
        assert!(read[77..] == bytes[500_000..2_500_000] && read[..77] == [0; 77]);
        assert_eq!(from.copy(3_000_000, &to, 0, u64::MAX).await, Ok(500_001), "to the end");
        assert_eq!(from.copy(4_000_000, &to, 0, 10).await, Ok(0));
        assert_eq!(from.copy(u64::MAX, &to, 0, 10).await, Ok(0));
        assert_eq!(to.copy(0, &to, 2_000_077, 1000).await, Ok(1000), "within one file");
        let read = flat(&to.read(2_000_077, 5000).await.expect("read"));
        assert!(read == bytes[3_000_000..3_001_000]);
        // Holes, also where there was data, up to their ends.
        from.punch(1_000_000, 1_000_000).await.expect("punched");
        from.grow(4_000_000).await.expect("grown");
        assert_eq!(from.copy(900_000, &to, 900_000, u64::MAX).await, Ok(100_000));
        assert_eq!(from.copy(1_000_000, &to, 1_000_000, u64::MAX).await, Ok(1_000_000));
        assert_eq!(to.seek(1_000_000, Seek::Data).await, Ok(Some(2_000_000)));
        assert_eq!(from.copy(3_600_000, &to, 3_600_000, u64::MAX).await, Ok(400_000));
        assert_eq!(to.attr().await.expect("there").size, 4_000_000);
        assert_eq!(from.copy(0, &to, i64::MAX as u64, 10).await, Err(Error::Invalid));
    });
}

//! Errors of what goes on in the background, after `write` has returned: they are told once.

use crate::world::{ROOT_DIR, WRITE, World, create, data, flat};
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, Error, File};
use levada_object::Objects;
use std::rc::Rc;
use std::time::Duration;

const KEPT: usize = 100_000;
const LONG: Duration = Duration::from_secs(20);
/// What the target says of what it lost.
const TOLD: Error = Error::Damaged { offset: KEPT as u64, bytes: KEPT as u64 };

async fn synced(file: &File) -> Result<(), Error> {
    reactor::timeout(LONG, file.fsync()).await.expect("in time")
}

/// A file with some durable bytes, and as many behind that were acknowledged, and that the target has lost and does not
/// take again: it does what it must not. `None`: it happened to keep them.
async fn spoilt(world: &World, client: &Client) -> Option<File> {
    let file = create(client, "file").await;
    file.write(0, data(&[1; KEPT])).await.expect("written");
    synced(&file).await.expect("durable");
    file.write(KEPT as u64, data(&[2; KEPT])).await.expect("acknowledged");
    world.restart_and_refuse(0, 1);
    let objects = world.objects(0);
    let stat = objects.stat(objects.names()[0]).await.expect("told").expect("there");
    (stat.size == KEPT as u64).then_some(file)
}

fn with_spoilt<F: Future<Output = ()>>(test: impl Fn(Rc<World>, Client, File) -> F) {
    let mut spoilt_files = 0;
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let client = world.client("client").await;
            if let Some(file) = spoilt(&world, &client).await {
                spoilt_files += 1;
                test(Rc::clone(&world), client, file).await;
            }
        });
    }
    // Else nothing was tested.
    assert!(spoilt_files > 2, "{spoilt_files}");
}

#[test]
fn what_was_lost_is_told_once_to_who_syncs() {
    with_spoilt(|_, client, file| async move {
        let (again, _) = client.open(file.ino(), WRITE).await.expect("there");
        assert_eq!(synced(&file).await, Err(TOLD));
        assert_eq!(synced(&file).await, Ok(()));
        assert_eq!(
            synced(&again).await,
            Ok(()),
            "one file has one error, however often it is open"
        );
        // What is there, is there, and the next error is another one.
        assert!(flat(&file.read(0, KEPT as u64).await.expect("read")) == [1; KEPT]);
        file.write(0, data(&[3; 1000])).await.expect("takes the place of other bytes");
        assert_eq!(synced(&file).await, Ok(()));
    });
}

#[test]
fn what_was_lost_is_told_to_who_syncs_after_a_durable_write() {
    with_spoilt(|_, _, file| async move {
        file.write_durably(0, data(&[3; 1000]))
            .await
            .expect("of itself it can tell that it is there");
        reactor::sleep(LONG).await;
        assert_eq!(synced(&file).await, Err(TOLD));
        assert_eq!(synced(&file).await, Ok(()));
    });
}

#[test]
fn others_hear_of_durable_writes_before_long() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (client, other) = (world.client("client").await, world.client("other").await);
        let file = create(&client, "file").await;
        file.write(0, data(&[1; KEPT])).await.expect("written");
        synced(&file).await.expect("durable");
        let seen = async || other.lookup(ROOT_DIR, b"file").await.expect("there").mtime;
        // Also when it was closed before they did, and is open again.
        let mut file = file;
        for _ in 0..3 {
            let before = seen().await;
            reactor::sleep(Duration::from_millis(10)).await;
            file.write_durably(0, data(&[2; 1000])).await.expect("durable");
            reactor::sleep(Duration::from_secs(3)).await;
            assert!(seen().await > before);
            file.write_durably(0, data(&[3; 1000])).await.expect("durable");
            let ino = file.ino();
            file.close().await;
            reactor::sleep(Duration::from_millis(999)).await;
            file = client.open(ino, WRITE).await.expect("there").0;
            reactor::sleep(Duration::from_secs(3)).await;
        }
    });
}

#[test]
fn what_was_lost_after_a_close_is_told_to_who_opens_and_syncs() {
    with_spoilt(|_, client, file| async move {
        let ino = file.ino();
        file.close().await;
        reactor::sleep(LONG).await;
        let (file, _) = client.open(ino, WRITE).await.expect("there");
        assert_eq!(synced(&file).await, Err(TOLD));
        assert_eq!(synced(&file).await, Ok(()));
        let (other, _) = client.open(ino, WRITE).await.expect("there");
        assert_eq!(synced(&other).await, Ok(()));
    });
}

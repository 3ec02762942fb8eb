//! New files go where there is room and somebody who answers.

use crate::world::{ROOT, ROOT_DIR, World, create, data};
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Group, Reactor};
use levada_client::{Client, Error, File, housekeeper, placement};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// By then whoever looks after placement has seen what there is to see.
const SEEN: Duration = Duration::from_secs(5);

/// Looks after where files go, as the node does.
async fn look_after(world: &Rc<World>) {
    let client = world.client("placement").await;
    let world = Rc::clone(world);
    reactor::spawn(async move {
        placement::watch(&client, |avoided| world.meta_service().avoid(avoided)).await;
    });
}

async fn targets_of(client: &Client, file: &File) -> Vec<u32> {
    let attr = client.attr(file.ino()).await.expect("there");
    attr.layout.expect("a file").targets.iter().map(|target| target.0).collect()
}

/// Where files made now lie.
async fn used(client: &Client, name: &str, files: usize) -> BTreeSet<u32> {
    let mut used = BTreeSet::new();
    for number in 0..files {
        let file = create(client, &format!("{name}-{number}")).await;
        used.extend(targets_of(client, &file).await);
        file.close().await;
    }
    used
}

#[test]
fn a_target_that_does_not_answer_gets_no_new_files() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_stripes(3, 2, 1 << 40).await;
        look_after(&world).await;
        let client = world.client("client").await;
        assert_eq!(used(&client, "before", 6).await, BTreeSet::from([1, 2, 3]));
        world.stop_target(1);
        reactor::sleep(SEEN).await;
        // Programs that make files do not notice.
        for number in 0..6 {
            let file = create(&client, &format!("meanwhile-{number}")).await;
            assert_eq!(targets_of(&client, &file).await.len(), 2);
            let written = async {
                file.write(0, data(&[7; 300_000])).await?;
                file.fsync().await
            };
            let written = reactor::timeout(Duration::from_secs(1), written).await;
            written.expect("nothing waits").expect("written");
            file.close().await;
        }
        world.drop_requests(1);
        reactor::sleep(SEEN).await;
        assert_eq!(used(&client, "after", 6).await, BTreeSet::from([1, 2, 3]));
        // What the metadata service was told ends with it.
        world.stop_target(1);
        reactor::sleep(SEEN).await;
        world.restart_meta().await;
        reactor::sleep(SEEN).await;
        assert_eq!(used(&client, "again", 6).await, BTreeSet::from([1, 3]));
        // With nobody left they go where they went.
        [0, 2].into_iter().for_each(|number| world.stop_target(number));
        reactor::sleep(SEEN).await;
        assert_eq!(used(&client, "none", 6).await, BTreeSet::from([1, 2, 3]));
    });
}

#[test]
fn a_target_that_is_fuller_than_the_others_gets_no_new_files() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_stripes(3, 1, 16 * MIB).await;
        look_after(&world).await;
        let client = world.client("client").await;
        let big = create(&client, "big").await;
        let full = targets_of(&client, &big).await[0];
        big.write(0, data(&vec![1; 15 * MIB as usize])).await.expect("fits");
        reactor::sleep(SEEN).await;
        // Twice as much as there is left where the big one is; all of it can be written.
        for number in 0..6 {
            let file = create(&client, &format!("{number}")).await;
            assert_ne!(targets_of(&client, &file).await, [full]);
            file.write(0, data(&vec![2; MIB as usize / 2])).await.expect("there is room elsewhere");
            file.close().await;
        }
        let more = big.write(15 * MIB, data(&vec![1; 2 * MIB as usize])).await;
        assert_eq!(more, Err(Error::Full), "what lies there stays there");
        big.close().await;
        client.unlink(ROOT, ROOT_DIR, b"big").await.expect("there");
        let keeper = world.client("housekeeper").await;
        reactor::sleep(Duration::from_secs(1)).await;
        housekeeper::do_chores(&keeper).await.expect("done");
        reactor::sleep(SEEN).await;
        assert!(used(&client, "after", 6).await.contains(&full));
    });
}

/// Where the lost files lay depends on what was avoided when they were made, which nobody knows any more.
#[test]
fn objects_of_files_that_were_lost_with_their_client_go_wherever_they_lie() {
    let mut lost = 0;
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::with_stripes(4, 2, 1 << 40).await;
            world.meta_service().avoid(&BTreeSet::from([TargetId(seed as u32 % 4 + 1)]));
            let machine = Group::new();
            let made = {
                let world = Rc::clone(&world);
                reactor::spawn_in(&machine, async move {
                    let client = world.client("client").await;
                    for number in 0..6 {
                        let file = create(&client, &number.to_string()).await;
                        file.write(0, data(&[7; 200_000])).await.expect("written");
                    }
                    world.kill_meta();
                    std::future::pending::<()>().await;
                })
            };
            while world.has_meta() {
                reactor::sleep(Duration::from_micros(50)).await;
            }
            machine.kill();
            drop(made);
            let objects = || (0..4).map(|n| world.objects(n).names().len()).sum::<usize>();
            assert_eq!(objects(), 12);
            world.start_meta().await;
            // Longer than the holder of what was lost is waited for, and than a lease.
            reactor::sleep(Duration::from_secs(120)).await;
            let keeper = world.client("housekeeper").await;
            for _ in 0..3 {
                housekeeper::do_chores(&keeper).await.expect("done");
            }
            let (entries, _) = keeper.read_dir(ROOT_DIR, 0, 100, false).await.expect("listed");
            assert_eq!(objects(), 2 * entries.len(), "seed {seed}: {entries:?}");
            lost += 6 - entries.len();
        });
    }
    // Else nothing was tested.
    assert!(lost > 20, "{lost} files were lost");
}

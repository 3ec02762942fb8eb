//! Requests that come again within one life of the service.

use super::{Tester, World, simulated};
use levada_wire::meta::{MetaReply, MetaRequest};

/// Nothing of it is written down, so what is remembered of it is no batch's.
#[test]
fn a_close_that_comes_again_closes_once() {
    simulated(1, async {
        let world = World::small().await;
        let one = Tester::new(&world, 1).await;
        let ino = one.file("file").await.ino;
        for _ in 0..2 {
            one.open(ino, false, false).await.expect("opens");
        }
        let close = MetaRequest::Several { requests: vec![MetaRequest::Close { ino }] };
        let done = MetaReply::Several(vec![MetaReply::Done]);
        assert_eq!(one.change(close.clone()).await, done);
        for _ in 0..2 {
            assert_eq!(world.service().handle(one.last_call(), close.clone()).await, done);
        }
        assert_eq!(world.service().clients()[0].open_files, 1);
        world.stop();
    });
}

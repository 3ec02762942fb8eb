//! Targets that want to know who asks, and hosts that want to know whom they ask.

use super::namespace::{Namespace, open_as, pattern, read, run, two_paths, write};
use super::{address, options};
use crate::nvme::Options;
use crate::nvme::target::{NQN, Target};
use levada_base::reactor;
use levada_base::stream::MemoryNetwork;
use levada_nvme::Nqn;
use levada_nvme::authentication::{Secret, Secrets};
use std::rc::Rc;
use std::time::Duration;

fn secret(seed: u8) -> Secret {
    Secret::random(None, &mut |key| key.fill(seed))
}

fn knowing(host: u8, controller: Option<u8>) -> Options {
    let mut options = options();
    options.host.secrets = Some(Secrets { host: secret(host), controller: controller.map(secret) });
    options
}

fn asking(secrets: Option<Secrets>) -> (MemoryNetwork, Rc<Target>) {
    asking_on(false, secrets)
}

fn asking_on(the_admin_queue_only: bool, secrets: Option<Secrets>) -> (MemoryNetwork, Rc<Target>) {
    let mut target = Target::new();
    target.secrets = secrets;
    target.asks_on_the_admin_queue_only = the_admin_queue_only;
    let (net, target, _) = two_paths(target);
    (net, target)
}

/// Why nothing is opened.
async fn refused(net: &MemoryNetwork, options: Options) -> String {
    let nqn = Nqn::new(NQN).expect("a name");
    let paths = [address(1)];
    let opened = Namespace::open_on(net.clone(), &paths, nqn, 0, options, "box".into()).await;
    opened.err().expect("it is not opened").to_string()
}

#[test]
fn every_queue_of_every_path_proves_who_the_host_is() {
    for controller in [None, Some(2)] {
        run(1, async {
            let secrets = Secrets { host: secret(1), controller: Some(secret(2)) };
            let (net, target) = asking(Some(secrets));
            let paths = [address(1), address(2)];
            let options = Options { queues: 2, ..knowing(1, controller) };
            let device = open_as(&net, &paths, options).await;
            write(&device, 8192, &pattern(1, 8192)).await.expect("it was let in");
            // Connected anew, it proves it again.
            net.down(paths[0]);
            reactor::sleep(Duration::from_secs(1)).await;
            target.listen(&net, paths[0]);
            reactor::sleep(Duration::from_secs(5)).await;
            net.down(paths[1]);
            let there = read(&device, 8192, 8192).await.expect("over the other path");
            assert!(there[..] == pattern(1, 8192)[..]);
        });
    }
}

#[test]
fn who_is_not_believed_says_why_on_either_side() {
    run(2, async {
        let secrets = Secrets { host: secret(1), controller: Some(secret(2)) };
        let (net, target) = asking(Some(secrets));
        let why = refused(&net, options()).await;
        assert!(why.contains("host=NQN, keys=FILE"), "{why}");
        let why = refused(&net, knowing(7, None)).await;
        assert!(why.contains("it does not know the secret"), "{why}");
        let why = refused(&net, knowing(1, Some(7))).await;
        assert!(why.contains("does not prove that it knows its secret"), "{why}");
        target.hangs_up_on_the_unproven.set(true);
        let why = refused(&net, knowing(7, None)).await;
        assert!(why.contains("hangs up on the proof") && why.contains("keys=FILE"), "{why}");
        // A target that asks nothing may be anybody.
        let (net, _target) = asking(None);
        let why = refused(&net, knowing(1, Some(2))).await;
        assert!(why.contains("does not prove that it knows its secret"), "{why}");
        let device = open_as(&net, &[address(1)], knowing(1, None)).await;
        write(&device, 0, &pattern(1, 4096)).await.expect("nobody was asked");
    });
}

#[test]
fn a_target_that_asks_on_the_admin_queue_only_is_asked_on_all() {
    run(3, async {
        let secrets = Some(Secrets { host: secret(1), controller: Some(secret(2)) });
        let (net, target) = asking_on(true, secrets);
        let device = open_as(&net, &[address(1)], knowing(1, Some(2))).await;
        write(&device, 0, &pattern(1, 4096)).await.expect("both are who they say");
        assert_eq!(target.proven.get(), 2, "the admin queue, and that for reads and writes");
        // Who does not want to know does not ask.
        let device = open_as(&net, &[address(1)], knowing(1, None)).await;
        write(&device, 0, &pattern(2, 4096)).await.expect("let in");
        assert_eq!(target.proven.get(), 3, "the admin queue");
    });
}

#[test]
fn a_queue_that_does_not_prove_itself_is_not_used_though_the_admin_queue_did() {
    run(4, async {
        let known =
            |controller| Some(Secrets { host: secret(1), controller: Some(secret(controller)) });
        let mut target = Target::new();
        target.secrets = known(2);
        target.other_secrets = known(7);
        target.asks_on_the_admin_queue_only = true;
        let (net, _target, _) = two_paths(target);
        let why = refused(&net, knowing(1, Some(2))).await;
        assert!(why.contains("does not prove that it knows its secret"), "{why}");
    });
}

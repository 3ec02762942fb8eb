//! Linux's own client, over two connections.

use crate::user_mode::Disk;

#[test]
fn linux_keeps_a_file_system_on_it() {
    let disk = Disk {
        programs: &["nbd-client"],
        network: "ip tuntap add tap0 mode tap
ip address add 10.99.0.1/24 dev tap0
ip link set tap0 up",
        serve: "--nbd 10.99.0.1:10809",
        hardware: "vec0:transport=tap,ifname=tap0,depth=128,gro=1",
        module: "nbd",
        attach: "ip link set lo up
ip address add 10.99.0.2/24 dev vec0
ip link set vec0 up
nbd-client 10.99.0.1 10809 /dev/nbd0 -N vol -b 4096 -C 2",
        detach: "nbd-client -d /dev/nbd0",
        device: "/dev/nbd0",
    };
    disk.check();
}

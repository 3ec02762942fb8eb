//! Linux's own driver (virtio-blk), which shows its memory in another way than our front end does, and keeps no list of
//! requests in flight.

use crate::user_mode::Disk;

#[test]
fn linux_keeps_a_file_system_on_it() {
    let disk = Disk {
        programs: &[],
        network: "",
        serve: "--vhost \"$PWD/vm.sock\"",
        hardware: "\"virtio_uml.device=$PWD/vm.sock:2\"",
        module: "virtio_blk",
        attach: "for ((i = 0; i < 500; i++)); do [[ -b /dev/vda ]] && break; sleep 0.02; done",
        detach: "",
        device: "/dev/vda",
    };
    disk.check();
}

//! NBD within TLS, with certificates that openssl made.

use crate::fixture::{Box, run, sh};
use crate::support::{Cluster, LIMIT, TINY, can_run, wait_until};
use crate::{SOCKET, served_with};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Makes an authority in the new directory `dir`, and certificates of it for a server called `localhost` and for a client.
fn certificates(dir: &Path) {
    let at = |name: &str| dir.join(name).display().to_string();
    fs::create_dir(dir).expect("made");
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    let authority = ["-x509", "-days", "2", "-subj", "/CN=authority"];
    let (ca, ca_key) = (at("ca-cert.pem"), at("ca-key.pem"));
    let made = ["openssl", "req", "-keyout", &ca_key, "-out", &ca];
    sh(&[&made[..], &key, &authority].concat());
    for (who, name) in [("server", "localhost"), ("client", "somebody")] {
        let (file, key_file) = (at(&format!("{who}-cert.pem")), at(&format!("{who}-key.pem")));
        let (request, extra) = (at("request.pem"), at("extra"));
        let subject = format!("/CN={name}");
        let made = ["openssl", "req", "-keyout", &key_file, "-out", &request, "-subj", &subject];
        sh(&[&made[..], &key].concat());
        fs::write(&extra, format!("subjectAltName=DNS:{name}\n")).expect("written");
        let signed = ["openssl", "x509", "-req", "-in", &request, "-CA", &ca, "-CAkey", &ca_key];
        let rest = ["-CAcreateserial", "-days", "2", "-extfile", &extra, "-out", &file];
        sh(&[&signed[..], &rest].concat());
    }
}

/// An array that is served within TLS.
fn served(options: &[&str]) -> Box {
    let certs = Box::new();
    certificates(&certs.path("certs"));
    let dir = certs.path("certs").display().to_string();
    let array = served_with(32 << 20, &[&["--tls", &dir], options].concat());
    // They outlast the start of the server, which has read them.
    fs::rename(certs.path("certs"), array.path("certs")).expect("moved");
    array
}

/// The export `vol` of the server in `dir`.
fn uri(dir: &Path, certificates: &str) -> String {
    let (socket, certificates) = (dir.join(SOCKET), dir.join(certificates));
    format!(
        "nbds+unix:///vol?socket={}&tls-certificates={}",
        socket.display(),
        certificates.display()
    )
}

fn copies(from: &Path, to: &str) -> bool {
    let mut copy = Command::new("nbdcopy");
    run(copy.arg(from).arg(to), LIMIT).status.success()
}

#[test]
fn nothing_is_told_without_tls_and_all_is_done_within() {
    let array = served(&[]);
    fs::write(array.path("image"), vec![0x3c; 20 << 20]).expect("written");
    let within = uri(array.dir.path(), "certs");
    assert!(copies(&array.path("image"), &within), "{}", array.log());
    let read = array.path("read").display().to_string();
    sh(&["nbdcopy", "--connections=4", &within, &read]);
    let read = fs::read(array.path("read")).expect("read");
    assert!(read[..20 << 20].iter().all(|byte| *byte == 0x3c));
    let clear = crate::uri(&array.path(SOCKET), "vol");
    assert!(!copies(&array.path("image"), &clear), "in the clear");
    let listed = run(Command::new("nbdinfo").args(["--list", &clear]), LIMIT);
    assert!(!listed.status.success(), "not even names");
}

/// One that knows the server in `dir`, but whom the server does not know; and one that shows nothing.
fn is_only_for_those_it_knows(dir: &Path) {
    let image = dir.join("image");
    certificates(&dir.join("others"));
    fs::copy(dir.join("certs/ca-cert.pem"), dir.join("others/ca-cert.pem")).expect("copied");
    assert!(!copies(&image, &uri(dir, "others")), "a client of another authority");
    for file in ["client-cert.pem", "client-key.pem"] {
        fs::remove_file(dir.join("others").join(file)).expect("removed");
    }
    assert!(!copies(&image, &uri(dir, "others")), "one without any");
    assert!(copies(&image, &uri(dir, "certs")), "who may is served after all that");
}

#[test]
fn clients_are_verified_where_that_is_wanted() {
    let array = served(&["--verify-clients"]);
    fs::write(array.path("image"), vec![0x3c; 1 << 20]).expect("written");
    is_only_for_those_it_knows(array.dir.path());
}

#[test]
fn volumes_of_a_cluster_are_exported_within_tls() {
    if !can_run() {
        return;
    }
    let export =
        format!("[[export]]\nnbd = \"unix:{SOCKET}\"\ntls = \"certs\"\nverify_clients = true\n");
    let cluster = Cluster::new("vol-tls", &format!("{TINY}{export}"));
    let dir = cluster.dir.path();
    // Without the files it says so, and serves as soon as they are there.
    cluster.ok(&["up"]);
    assert!(cluster.ok(&["status"]).contains("needs attention"), "{}", cluster.ok(&["status"]));
    certificates(&dir.join("certs"));
    wait_until("it serves", || dir.join(SOCKET).exists());
    cluster.ok(&["volume", "create", "vol", "--size", "8MiB"]);
    fs::write(dir.join("image"), vec![0x3c; 8 << 20]).expect("written");
    is_only_for_those_it_knows(dir);
    let read = dir.join("read");
    sh(&["nbdcopy", &uri(dir, "certs"), read.to_str().expect("plain")]);
    assert!(fs::read(read).expect("read") == vec![0x3c; 8 << 20]);
    let clear = crate::uri(&dir.join(SOCKET), "vol");
    assert!(!copies(&dir.join("image"), &clear), "in the clear");
    cluster.ok(&["down"]);
}

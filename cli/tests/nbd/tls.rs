//! NBD within TLS, with certificates that openssl made.

use crate::fixture::{Box, run, sh};
use crate::support::LIMIT;
use crate::{SOCKET, served_with};
use std::fs;
use std::process::Command;

/// Makes an authority in `dir`, and certificates of it for a server called `localhost` and for a client.
fn certificates(array: &Box, dir: &str) {
    let at = |name: &str| array.path(dir).join(name).display().to_string();
    fs::create_dir(array.path(dir)).expect("made");
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
    certificates(&certs, "certs");
    let dir = certs.path("certs").display().to_string();
    let array = served_with(32 << 20, &[&["--tls", &dir], options].concat());
    // They outlast the start of the server, which has read them.
    fs::rename(certs.path("certs"), array.path("certs")).expect("moved");
    array
}

fn uri(array: &Box, certificates: &str) -> String {
    let (socket, dir) = (array.path(SOCKET), array.path(certificates));
    format!("nbds+unix:///vol?socket={}&tls-certificates={}", socket.display(), dir.display())
}

fn copies(array: &Box, uri: &str) -> bool {
    let image = array.path("image");
    let mut copy = Command::new("nbdcopy");
    run(copy.args([image.to_str().expect("plain"), uri]), LIMIT).status.success()
}

#[test]
fn nothing_is_told_without_tls_and_all_is_done_within() {
    let array = served(&[]);
    fs::write(array.path("image"), vec![0x3c; 20 << 20]).expect("written");
    let within = uri(&array, "certs");
    assert!(copies(&array, &within), "{}", array.log());
    let read = array.path("read").display().to_string();
    sh(&["nbdcopy", "--connections=4", &within, &read]);
    let read = fs::read(array.path("read")).expect("read");
    assert!(read[..20 << 20].iter().all(|byte| *byte == 0x3c));
    let clear = crate::uri(&array.path(SOCKET), "vol");
    assert!(!copies(&array, &clear), "in the clear");
    let listed = run(Command::new("nbdinfo").args(["--list", &clear]), LIMIT);
    assert!(!listed.status.success(), "not even names");
}

#[test]
fn clients_are_verified_where_that_is_wanted() {
    let array = served(&["--verify-clients"]);
    fs::write(array.path("image"), vec![0x3c; 1 << 20]).expect("written");
    assert!(copies(&array, &uri(&array, "certs")), "{}", array.log());
    certificates(&array, "others");
    // One that knows the server, but whom the server does not know.
    fs::copy(array.path("certs/ca-cert.pem"), array.path("others/ca-cert.pem")).expect("copied");
    assert!(!copies(&array, &uri(&array, "others")), "{}", array.log());
    for file in ["client-cert.pem", "client-key.pem"] {
        fs::remove_file(array.path("others").join(file)).expect("removed");
    }
    assert!(!copies(&array, &uri(&array, "others")), "one without any");
}

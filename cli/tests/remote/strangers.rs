//! Hosts that come to an enclosure and do no more than they must to be kept.

use levada_nvme::fabrics::{ANY_CONTROLLER, Connect, ConnectData};
use levada_nvme::pdu::{Digests, Framing, Initialize, Pdu};
use levada_nvme::{DISCOVERY_NQN, Nqn};
use std::io::{Read, Write};
use std::net::TcpStream;

/// Of an answer to the first unit.
const INITIALIZE_BYTES: usize = 128;

/// Says nothing.
pub fn silent(address: &str) -> TcpStream {
    TcpStream::connect(address).expect("the system takes them")
}

/// Asks what there is, but for the question.
pub fn looking_around(address: &str) -> TcpStream {
    let mut stream = silent(address);
    let framing = Framing::FIRST;
    let first = Initialize { alignment_bytes: 4, digests: Digests::default(), limit: 0 };
    let connect = Connect {
        format: 0,
        queue: 0,
        queue_entries_less_one: 31,
        is_without_flow_control: false,
        keep_alive_ms: 0,
    };
    let name = |name: &str| Nqn::new(name).expect("a name");
    let data = ConnectData {
        host_id: [1; 16],
        controller: ANY_CONTROLLER,
        subsystem: name(DISCOVERY_NQN),
        host: name("nqn.2014-08.org.example:stranger"),
    };
    let data = data.to_bytes();
    // Who was displaced already is told nothing.
    let talk = |stream: &mut TcpStream| {
        stream.write_all(&framing.head(&Pdu::InitializeRequest(first), 0))?;
        stream.read_exact(&mut [0; INITIALIZE_BYTES])?;
        stream.write_all(&framing.head(&Pdu::Command(connect.command(1)), data.len()))?;
        stream.write_all(&data)
    };
    let _ = talk(&mut stream);
    stream
}

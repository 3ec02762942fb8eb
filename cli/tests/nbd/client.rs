//! A client by hand.

use crate::SOCKET;
use crate::fixture::Box;
use crate::support::LIMIT;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

const GO: u32 = 7;
/// `NBD_REP_ACK`
pub const ACK: u32 = 1;
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;

/// A client, byte by byte.
pub struct Client(pub UnixStream);

impl Client {
    pub fn greeted(array: &Box) -> Self {
        let stream = UnixStream::connect(array.path(SOCKET)).expect("somebody listens");
        stream.set_read_timeout(Some(LIMIT)).expect("set");
        let mut client = Self(stream);
        let greeting = client.take(18);
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        client.put(&3u32.to_be_bytes());
        client
    }

    pub fn using(array: &Box) -> Self {
        let mut client = Self::greeted(array);
        client.go();
        client
    }

    /// The default export, and nothing to be told of it.
    pub fn go(&mut self) {
        self.option(GO, &[0; 6]);
        while self.option_reply().0 != ACK {}
    }

    /// The kind of a reply to an option, and what it says.
    pub fn option_reply(&mut self) -> (u32, Vec<u8>) {
        let head = self.take(20);
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4"));
        (word(12), self.take(word(16) as usize))
    }

    pub fn put(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("sent");
    }

    pub fn take(&mut self, bytes: usize) -> Vec<u8> {
        let mut taken = vec![0; bytes];
        self.0.read_exact(&mut taken).expect("received");
        taken
    }

    pub fn option(&mut self, kind: u32, data: &[u8]) {
        self.put(b"IHAVEOPT");
        self.put(&kind.to_be_bytes());
        self.put(&(data.len() as u32).to_be_bytes());
        self.put(data);
    }

    pub fn request(&mut self, command: u16, at: u64, bytes: u32) {
        self.put(&0x2560_9513u32.to_be_bytes());
        self.put(&0u16.to_be_bytes());
        self.put(&command.to_be_bytes());
        self.put(&7u64.to_be_bytes());
        self.put(&at.to_be_bytes());
        self.put(&bytes.to_be_bytes());
    }

    /// The error of a reply without data.
    pub fn error(&mut self) -> u32 {
        let reply = self.take(16);
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        u32::from_be_bytes(reply[4..8].try_into().expect("4 bytes"))
    }

    pub fn ends_hung_up_on(mut self) -> bool {
        let mut rest = Vec::new();
        // A reset is a hang-up, too.
        let _ = self.0.read_to_end(&mut rest);
        rest.len() < 4096
    }
}

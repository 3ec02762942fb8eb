//! A host beside those that say anything, which must not notice.

use super::BLOCK_BYTES;
use super::line::{Line, connect, enable, nqn};
use crate::target::Path;
use levada_nvme::fabrics::{ANY_CONTROLLER, ConnectData};
use levada_nvme::pdu::Digests;
use levada_nvme::{AdminOpcode, Command, DataPointer, IoOpcode, Status};
use std::rc::Rc;

/// A host that does nothing wrong, in a subsystem of its own.
pub(super) struct Beside {
    pub admin: Rc<Line>,
    pub io: Rc<Line>,
    pub round: u8,
}

impl Beside {
    pub async fn new(path: &Path) -> Self {
        let data = ConnectData {
            host_id: [99; 16],
            controller: ANY_CONTROLLER,
            subsystem: nqn("beside"),
            host: nqn("host-beside"),
        };
        let (admin, io) = (Line::open(path, 0), Line::open(path, 0));
        admin.greet(Digests::default()).await;
        io.greet(Digests { header: true, data: true }).await;
        let controller = connect(&admin, data.clone(), 0, 0).await.expect("admitted");
        enable(&admin).await.expect("enabled");
        connect(&io, ConnectData { controller, ..data }, 1, 0).await.expect("admitted");
        Self { admin, io, round: 0 }
    }

    pub async fn goes_on(&mut self) {
        self.round = self.round.wrapping_add(1);
        let block = u64::from(self.round % 8);
        let written = [self.round; BLOCK_BYTES as usize];
        let command = |line: &Line, opcode: IoOpcode| {
            Command::new(opcode as u8, line.new_id(), 1)
                .with_blocks(block, 1)
                .with_data(DataPointer::Transport { bytes: BLOCK_BYTES as u32 })
        };
        let write = self.io.ask(command(&self.io, IoOpcode::Write), &written).await;
        assert_eq!(write.expect("answered").0.status, Status::SUCCESS);
        let read = self.io.ask(command(&self.io, IoOpcode::Read), &[]).await;
        assert!(read.expect("answered").1 == written);
        let alive = Command::new(AdminOpcode::KeepAlive as u8, self.admin.new_id(), 0);
        assert!(self.admin.ask(alive, &[]).await.expect("answered").0.status.is_success());
    }
}

//! Looking at an array without opening it.

use crate::drives::{Sighted, array_of, check_age, check_members, sight_all};
use crate::error::ArrayError;
use crate::place;
use crate::request::{Reply, Request, ask};
use crate::status::Status;
use crate::store::Store;
use levada_base::reactor::Reactor;
use levada_device::{Device, FileDeviceError};
use levada_raid::RaidArray;
use std::path::PathBuf;
use std::rc::Rc;

/// What the superblocks on these drives tell of their array.
pub(crate) fn recorded(drives: &[Sighted]) -> Result<Status, ArrayError> {
    let mut status = Status::recorded(&array_of(drives)?);
    for member in &mut status.members {
        let drive = drives.iter().find(|drive| drive.member_uuid() == Some(member.uuid));
        member.path = drive.map(|drive| drive.path.clone());
        if drive.is_none() && member.state != "faulty" {
            member.state = "missing".into();
        }
    }
    let whole =
        |member: &&crate::status::MemberStatus| member.role.is_some() && member.state == "in-sync";
    status.lost = status.width - status.members.iter().filter(whole).count().min(status.width);
    Ok(status)
}

/// An array and its members: as its process tells, else as its superblocks do, and whether these drives would do to open
/// it. Changes nothing.
///
/// # Errors
///
/// When the drives are not those of one array.
pub fn show(drives: &[PathBuf]) -> Result<Status, ArrayError> {
    let sighted = sight_all(drives)?;
    let array = array_of(&sighted)?;
    if let Some(Reply::Status(status)) = ask(&place::socket_of(array.uuid), &Request::Show)? {
        return Ok(*status);
    }
    let mut status = recorded(&sighted)?;
    let examined = check_members(&array, &sighted).and_then(|()| {
        let reactor = Reactor::new().map_err(ArrayError::system("use io_uring"))?;
        let report = reactor.block_on(async {
            let mut stores = Vec::new();
            for drive in &sighted {
                // Nothing is written.
                stores.push(Store::open(&drive.path, true).await?);
            }
            let devices: Vec<Rc<dyn Device>> = stores.iter().map(Store::device).collect();
            let report = RaidArray::examine(array.uuid, &devices, false).await;
            drop(devices);
            for store in stores {
                store.close().await;
            }
            Ok::<_, ArrayError>(report?)
        })?;
        check_age(&array, sighted.iter().map(|drive| &*drive.path), &report)
    });
    match examined {
        Ok(()) => {}
        Err(error @ ArrayError::Drive(FileDeviceError::InUse { .. })) => {
            status.problem =
                Some(format!("{error}, by a process that does not answer for the array"));
        }
        Err(error) => status.problem = Some(error.to_string()),
    }
    status.judge();
    Ok(status)
}

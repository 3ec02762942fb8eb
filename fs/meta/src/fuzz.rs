//! The rows of this crate, and the one value of a program that is looked into, for `fuzz/`.

use crate::acl::Acl;
use crate::key;
use crate::row::{
    Charge, ClientRow, Counters, DoomedRow, EntryRow, Inode, NameRow, OrphanRow, QuotaRow,
    ReplyRow, Session, Superblock, Usage, XattrRow,
};

/// Every row, and the numbers in every key. What is read and written again is read the same.
pub fn rows(bytes: &[u8]) {
    let _ = (key::first_number(bytes), key::second_number(bytes), key::second_u32(bytes));
    if let Ok(inode) = Inode::decode(bytes) {
        let again = Inode::decode(&inode.encode());
        assert_eq!(again.map(|inode| inode.encode()), Ok(inode.encode()));
    }
    if let Ok(Some(acl)) = Acl::from_value(bytes) {
        assert_eq!(Acl::from_value(&acl.value()), Ok(Some(acl)));
    }
    if let Ok(row) = NameRow::decode(bytes) {
        assert_eq!(row.encode(), bytes);
    }
    if let Ok(row) = EntryRow::decode(bytes) {
        assert_eq!(EntryRow::encode(row.ino, row.kind, &row.name), bytes);
    }
    if let Ok(row) = Counters::decode(bytes) {
        assert_eq!(Counters::decode(&row.encode()), Ok(row));
    }
    if let Ok(row) = DoomedRow::decode(bytes) {
        assert_eq!(DoomedRow::decode(&row.encode()), Ok(row));
    }
    if let Ok(row) = OrphanRow::decode(bytes) {
        assert_eq!(row.encode(), bytes);
    }
    if let Ok(row) = ClientRow::decode(bytes) {
        assert_eq!(ClientRow::decode(&row.encode()), Ok(row));
    }
    if let Ok(row) = ReplyRow::decode(bytes) {
        assert_eq!(ReplyRow::encode(row.sequence, &row.reply), bytes);
    }
    if let Ok(row) = XattrRow::decode(bytes) {
        assert_eq!(XattrRow::encode(&row.value), bytes);
    }
    if let Ok(row) = Usage::decode(bytes) {
        assert_eq!(row.encode(), bytes);
    }
    if let Ok(row) = QuotaRow::decode(bytes) {
        assert_eq!(row.encode(), bytes);
    }
    let _ = (key::subject_of(bytes), Charge::of_row(bytes));
    let _ = Session::decode(bytes);
    if let Ok(row) = Superblock::decode(bytes) {
        assert_eq!(Superblock::decode(&row.encode()), Ok(row));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn odd_bytes_do_no_harm() {
        for input in [&[][..], &[0; 5000], &[255; 4096], &[1; 25], &[1; 17], &[1; 10], &[1; 2]] {
            super::rows(input);
        }
    }
}

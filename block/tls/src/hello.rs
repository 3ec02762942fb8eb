//! The keys that a host names in its first message.

/// The extension `pre_shared_key` (RFC 8446, 4.2.11).
pub(crate) const PRE_SHARED_KEY: u32 = 41;
/// Of the age behind each identity, which says nothing of a key from outside TLS.
const AGE_BYTES: usize = 4;

/// Splits off what stands behind its length of two bytes.
fn counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))
}

/// Identities in the data of the extension, from the one that the host would rather use; none behind what is wrong.
pub(crate) fn identities(extension: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut left = counted(extension).map_or(&[][..], |(identities, _binders)| identities);
    std::iter::from_fn(move || {
        let (identity, rest) = counted(left)?;
        left = rest.get(AGE_BYTES..)?;
        Some(identity)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn identities_are_where_the_standard_has_them() {
        let list = [&[0, 3][..], b"one", &[0; 4], &[0, 5], b"three", &[9; 4]].concat();
        let extension = [&[0, list.len() as u8][..], &list, b"binders"].concat();
        let found: Vec<_> = identities(&extension).collect();
        assert_eq!(found, [&b"one"[..], b"three"]);
        assert_eq!(identities(&extension[..9]).count(), 0, "the list is cut");
        assert_eq!(identities(b"").count(), 0);
    }

    proptest! {
        #[test]
        fn random_bytes_are_no_danger(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            crate::fuzz::identities(&bytes);
        }
    }
}

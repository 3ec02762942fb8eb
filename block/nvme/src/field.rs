//! Numbers at their place in a structure, least significant byte first (Base, 1.8).
//!
//! Places are the specification's; one outside the structure is a mistake of ours, and a panic.

/// The bytes from `at` on.
#[inline]
pub(crate) fn array<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    from[at..at + N].try_into().expect("as many")
}

#[inline]
pub(crate) fn u16_at(from: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(from, at))
}

#[inline]
pub(crate) fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(from, at))
}

#[inline]
pub(crate) fn u64_at(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(from, at))
}

/// Puts the bytes of a number, or others, at their place.
#[inline]
pub(crate) fn put(into: &mut [u8], at: usize, bytes: &[u8]) {
    into[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Puts text that is padded with `pad`; what is too long is cut.
pub(crate) fn put_text(into: &mut [u8], at: usize, bytes: usize, text: &str, pad: u8) {
    let field = &mut into[at..at + bytes];
    field.fill(pad);
    let taken = text.len().min(bytes);
    field[..taken].copy_from_slice(&text.as_bytes()[..taken]);
}

/// Text that ends with a zero byte or is padded with spaces; what is not ASCII becomes `?`.
pub(crate) fn text_at(from: &[u8], at: usize, bytes: usize) -> String {
    let field = &from[at..at + bytes];
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(bytes);
    let printable = |&byte: &u8| if (0x20..0x7f).contains(&byte) { char::from(byte) } else { '?' };
    let text: String = field[..end].iter().map(printable).collect();
    text.trim_end().to_owned()
}

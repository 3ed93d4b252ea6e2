//! The byte-level alphabet of GPT-2's BPE: one printable character for each byte, so that a vocabulary can be written as text.
//!
//! Bytes that Latin-1 prints ('!' to '~', '¡' to '¬', '®' to 'ÿ') stand for themselves; the other 68, ascending, are the
//! characters from U+0100 on.

const fn prints(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The bytes that do not print, ascending: the n-th is U+0100 + n.
const HIDDEN: [u8; 68] = {
    let mut hidden = [0; 68];
    let (mut byte, mut n) = (0, 0);
    while byte < 256 {
        if !prints(byte as u8) {
            hidden[n] = byte as u8;
            n += 1;
        }
        byte += 1;
    }
    hidden
};

/// The byte that a character stands for; `None` when it is not in the alphabet.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match u8::try_from(code) {
        Ok(byte) => prints(byte).then_some(byte),
        Err(_) => HIDDEN.get((code - 256) as usize).copied(),
    }
}

/// The bytes that a token's characters stand for; `None` when one is not in the alphabet.
pub(super) fn bytes_of(token: &str) -> Option<Vec<u8>> {
    token.chars().map(byte_of).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_alphabet_has_one_character_for_every_byte() {
        let bytes: HashSet<u8> = (0..0x200).filter_map(|code| byte_of(char::from_u32(code)?)).collect();
        assert_eq!(bytes.len(), 256);
        assert_eq!((0..0x11_0000).filter_map(char::from_u32).filter_map(byte_of).count(), 256);
    }

    #[test]
    fn space_and_newline_have_their_well_known_characters() {
        assert_eq!(bytes_of("Ġa"), Some(b" a".to_vec()));
        assert_eq!(bytes_of("Ċ"), Some(b"\n".to_vec()));
        assert_eq!(bytes_of("Ń"), Some(vec![0xad]));
        assert_eq!(bytes_of(" a"), None);
    }
}

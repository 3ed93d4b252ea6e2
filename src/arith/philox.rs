//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): a counter in, four words out.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds over one counter block.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let (p0, p1) = (u64::from(MULTIPLIERS[0]) * u64::from(c[0]), u64::from(MULTIPLIERS[1]) * u64::from(c[2]));
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// U of a token draw: word0·2^32 + word1, key = (low, high) of the seed, counter = (token index, choice, purpose 0, 0).
pub fn token_draw(seed: u64, token_index: u32, choice: u32) -> u64 {
    let words = philox4x32_10([token_index, choice, 0, 0], [seed as u32, (seed >> 32) as u32]);
    (u64::from(words[0]) << 32) | u64::from(words[1])
}

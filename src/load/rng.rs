//! SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): prompts and arrivals from one seed, on
//! every machine the same. It decides what is asked, never what a model answers.

/// A seeded stream of 64-bit numbers.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A stream from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream that belongs to a name and a list of numbers under one seed; other names and numbers give unrelated streams.
    pub fn keyed(seed: u64, name: &str, numbers: &[u64]) -> Self {
        let mut state = Self(seed);
        for word in name.bytes().map(u64::from).chain(numbers.iter().copied()) {
            state = Self(state.next_u64() ^ word.wrapping_mul(0xd6e8_feb8_6659_fd93));
        }
        Self(state.next_u64())
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, bound) by multiplication; the bias is below 2⁻³² for the bounds used here. `bound` must be above 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform in (0, 1], with 53 bits.
    pub fn unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Exponentially distributed with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -libm::log(self.unit())
    }

    /// Fisher–Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_the_published_one() {
        let mut r = SplitMix64::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| r.next_u64()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn keyed_streams_differ_by_name_and_by_number() {
        let draw = |name: &str, numbers: &[u64]| SplitMix64::keyed(1, name, numbers).next_u64();
        assert_eq!(draw("short-16", &[0, 1]), draw("short-16", &[0, 1]));
        assert_ne!(draw("short-16", &[0, 1]), draw("short-16", &[1, 0]));
        assert_ne!(draw("short-16", &[0, 1]), draw("short-8", &[0, 1]));
    }

    #[test]
    fn a_shuffle_loses_nothing_and_moves_something() {
        let mut items: Vec<u32> = (0..50).collect();
        SplitMix64::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}

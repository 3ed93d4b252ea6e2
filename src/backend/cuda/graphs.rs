//! Which shapes are replayed from a graph. The keys are shapes; requests, pages, positions, tokens and seeds are data.
//!
//! Three classes: decode (every row one token, all wanted) has a graph per batch size, made at start; a single prefill row has at most
//! `singleton` graphs with least-recently-used eviction; any other shape at most `packed`, 0 by default because real traffic rarely
//! repeats a packed shape. Prefill shapes are recorded when they come a second time. A failed recording is remembered: that shape runs
//! eagerly from then on.

use std::collections::HashMap;

use super::driver::Graph;
use super::pass::PassShape;

/// Bounds of the three classes; 0 turns a class off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphLimits {
    /// Largest decode batch with a graph.
    pub decode: usize,
    /// Graphs of single prefill rows.
    pub singleton: usize,
    /// Graphs of packed shapes.
    pub packed: usize,
}

impl Default for GraphLimits {
    fn default() -> Self {
        Self { decode: 64, singleton: 64, packed: 0 }
    }
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCounts {
    /// Steps replayed.
    pub replays: u64,
    /// Steps launched kernel by kernel.
    pub eager: u64,
    /// Graphs recorded.
    pub captures: u64,
    /// Recordings that failed.
    pub failures: u64,
    /// Graphs dropped for room.
    pub evictions: u64,
    /// Time spent recording, µs.
    pub capture_us: u64,
}

/// A class of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// One token a row, every row wanted.
    Decode,
    /// One row of several tokens.
    Singleton,
    /// Anything else.
    Packed,
}

impl Class {
    /// The class of a shape.
    pub fn of(shape: &PassShape) -> Self {
        if shape.is_decode() && shape.wanted == shape.tokens {
            Class::Decode
        } else if shape.rows == 1 {
            Class::Singleton
        } else {
            Class::Packed
        }
    }
}

/// What to do with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A graph is there.
    Replay,
    /// Record one, then replay it.
    Record,
    /// Launch kernel by kernel.
    Eager,
}

#[derive(Debug)]
enum Entry<G> {
    Seen,
    Ready(G),
    Failed,
}

/// The cache; generic over the graph so that its rules are tested without a device.
#[derive(Debug)]
pub struct GraphCache<G = Graph> {
    limits: GraphLimits,
    entries: HashMap<PassShape, (u64, Entry<G>)>,
    clock: u64,
    counts: GraphCounts,
}

/// Shapes that are remembered without a graph, a class: bounds the memory of traffic that never repeats.
const SEEN_MAX: usize = 1024;

impl<G> GraphCache<G> {
    /// An empty cache.
    pub fn new(limits: GraphLimits) -> Self {
        Self { limits, entries: HashMap::new(), clock: 0, counts: GraphCounts::default() }
    }

    /// Counts since the start.
    pub fn counts(&self) -> GraphCounts {
        self.counts
    }

    fn limit(&self, shape: &PassShape) -> usize {
        match Class::of(shape) {
            Class::Decode if shape.rows <= self.limits.decode => usize::MAX,
            Class::Decode => 0,
            Class::Singleton => self.limits.singleton,
            Class::Packed => self.limits.packed,
        }
    }

    /// Decides how to run a step of this shape, and counts it.
    pub fn decide(&mut self, shape: &PassShape) -> Decision {
        self.clock += 1;
        let limit = self.limit(shape);
        let class = Class::of(shape);
        let clock = self.clock;
        let decision = match self.entries.get_mut(shape) {
            _ if limit == 0 => Decision::Eager,
            Some((used, Entry::Ready(_))) => {
                *used = clock;
                Decision::Replay
            }
            Some((_, Entry::Failed)) => Decision::Eager,
            Some((_, Entry::Seen)) => Decision::Record,
            None if class == Class::Decode => Decision::Record,
            None => {
                self.forget_oldest_seen();
                self.entries.insert(*shape, (clock, Entry::Seen));
                Decision::Eager
            }
        };
        match decision {
            Decision::Eager => self.counts.eager += 1,
            Decision::Replay | Decision::Record => self.counts.replays += 1,
        }
        decision
    }

    fn forget_oldest_seen(&mut self) {
        let seen = |entry: &Entry<G>| matches!(entry, Entry::Seen);
        if self.entries.values().filter(|(_, e)| seen(e)).count() < SEEN_MAX {
            return;
        }
        let oldest = self.entries.iter().filter(|(_, (_, e))| seen(e)).min_by_key(|(_, (used, _))| *used);
        if let Some(shape) = oldest.map(|(shape, _)| *shape) {
            self.entries.remove(&shape);
        }
    }

    /// Keeps a recorded graph, making room in its class.
    pub fn keep(&mut self, shape: &PassShape, graph: G, capture_us: u64) {
        self.counts.captures += 1;
        self.counts.capture_us += capture_us;
        let (class, limit) = (Class::of(shape), self.limit(shape));
        let ready = |s: &PassShape, e: &Entry<G>| Class::of(s) == class && matches!(e, Entry::Ready(_));
        while self.entries.iter().filter(|(s, (_, e))| ready(s, e)).count() >= limit {
            let oldest = self.entries.iter().filter(|(s, (_, e))| ready(s, e)).min_by_key(|(_, (used, _))| *used);
            let Some(shape) = oldest.map(|(s, _)| *s) else { break };
            self.entries.remove(&shape);
            self.counts.evictions += 1;
        }
        self.entries.insert(*shape, (self.clock, Entry::Ready(graph)));
    }

    /// Remembers that this shape cannot be recorded.
    pub fn remember_failure(&mut self, shape: &PassShape) {
        self.counts.failures += 1;
        self.entries.insert(*shape, (self.clock, Entry::Failed));
    }

    /// The graph of a shape.
    pub fn get(&self, shape: &PassShape) -> Option<&G> {
        match self.entries.get(shape) {
            Some((_, Entry::Ready(graph))) => Some(graph),
            _ => None,
        }
    }

    /// Forgets every graph: memory or kernels that they name have changed.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill(len: usize) -> PassShape {
        PassShape { rows: 1, tokens: len, wanted: 1, singles: 0, tiles: len.div_ceil(8), capacity: 256 }
    }

    fn decode(batch: usize) -> PassShape {
        PassShape { rows: batch, tokens: batch, wanted: batch, singles: batch, tiles: 0, capacity: 0 }
    }

    fn cache() -> GraphCache<u32> {
        GraphCache::new(GraphLimits { decode: 16, singleton: 64, packed: 0 })
    }

    #[test]
    fn a_decode_shape_is_recorded_at_once_and_a_prefill_shape_when_it_comes_again() {
        let mut cache = cache();
        assert_eq!(cache.decide(&decode(3)), Decision::Record);
        assert_eq!(cache.decide(&decode(17)), Decision::Eager);
        assert_eq!(cache.decide(&prefill(40)), Decision::Eager);
        assert_eq!(cache.decide(&prefill(40)), Decision::Record);
        cache.keep(&prefill(40), 1, 5);
        assert_eq!(cache.decide(&prefill(40)), Decision::Replay);
        assert_eq!(
            cache.counts(),
            GraphCounts { replays: 3, eager: 2, captures: 1, capture_us: 5, ..Default::default() }
        );
    }

    #[test]
    fn the_sixty_fifth_singleton_evicts_the_one_used_longest_ago() {
        let mut cache = cache();
        for len in 2..66 {
            cache.decide(&prefill(len));
            cache.decide(&prefill(len));
            cache.keep(&prefill(len), len as u32, 0);
        }
        assert_eq!(cache.decide(&prefill(2)), Decision::Replay);
        cache.decide(&prefill(100));
        cache.decide(&prefill(100));
        cache.keep(&prefill(100), 100, 0);
        assert_eq!(cache.counts().evictions, 1);
        assert_eq!(cache.get(&prefill(2)), Some(&2));
        assert_eq!(cache.get(&prefill(3)), None);
        assert_eq!(cache.get(&prefill(100)), Some(&100));
    }

    #[test]
    fn a_failed_recording_is_remembered() {
        let mut cache = cache();
        cache.decide(&prefill(9));
        assert_eq!(cache.decide(&prefill(9)), Decision::Record);
        cache.remember_failure(&prefill(9));
        for _ in 0..3 {
            assert_eq!(cache.decide(&prefill(9)), Decision::Eager);
        }
        assert_eq!(cache.counts().failures, 1);
    }

    #[test]
    fn packed_shapes_stay_eager_until_the_option_gives_them_room() {
        let shape = PassShape { rows: 2, tokens: 40, wanted: 2, singles: 0, tiles: 6, capacity: 256 };
        let mut off = cache();
        assert_eq!([off.decide(&shape), off.decide(&shape)], [Decision::Eager; 2]);
        let mut on: GraphCache<u32> = GraphCache::new(GraphLimits { packed: 1, ..GraphLimits::default() });
        assert_eq!([on.decide(&shape), on.decide(&shape)], [Decision::Eager, Decision::Record]);
    }
}

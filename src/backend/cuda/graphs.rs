//! Which shapes are replayed from a graph. The keys are shapes; requests, pages, positions, tokens and seeds are data.
//!
//! Three classes: decode (every row one token, all wanted) has a graph per batch size, made at start and never evicted, because every
//! size comes and the slots bound them; a single prefill row has at most `singleton` graphs with least-recently-used eviction; any other
//! shape at most `packed`, 0 by default because packed steps came no sooner from graphs, though most of their shapes repeat
//! (docs/results.md). Prefill shapes are recorded when they come a second time. A failed recording is remembered: that shape runs eagerly
//! for as long as it keeps coming. Shapes without a graph, seen once or failed, are forgotten past `REMEMBERED_MAX`, the one used longest
//! ago first.

use std::collections::HashMap;

use super::driver::Graph;
use super::pass::PassShape;
use crate::backend::counts::{DeviceCounts, GraphClass, GraphCounts};

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

/// The class of a shape.
pub fn class_of(shape: &PassShape) -> GraphClass {
    if shape.is_decode() && shape.wanted == shape.tokens {
        GraphClass::Decode
    } else if shape.rows == 1 {
        GraphClass::Prefill
    } else {
        GraphClass::Packed
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
    counts: [GraphCounts; 3],
    /// Entries without a graph.
    remembered: usize,
}

/// Shapes that are remembered without a graph, in all classes together: bounds the memory of traffic that never repeats and of a driver
/// that refuses every recording.
const REMEMBERED_MAX: usize = 1024;

impl<G> Entry<G> {
    /// Whether it holds a graph, and does not only remember a shape.
    fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }
}

impl<G> GraphCache<G> {
    /// An empty cache.
    pub fn new(limits: GraphLimits) -> Self {
        Self { limits, entries: HashMap::new(), clock: 0, counts: Default::default(), remembered: 0 }
    }

    /// Counts since the start, by class.
    pub fn counts(&self) -> [GraphCounts; 3] {
        self.counts
    }

    /// Counts of all classes together.
    pub fn all_counts(&self) -> GraphCounts {
        DeviceCounts { graphs: self.counts, allocations: 0 }.all_graphs()
    }

    fn count(&mut self, shape: &PassShape) -> &mut GraphCounts {
        &mut self.counts[class_of(shape) as usize]
    }

    fn limit(&self, shape: &PassShape) -> usize {
        match class_of(shape) {
            GraphClass::Decode if shape.rows <= self.limits.decode => usize::MAX,
            GraphClass::Decode => 0,
            GraphClass::Prefill => self.limits.singleton,
            GraphClass::Packed => self.limits.packed,
        }
    }

    /// Decides how to run a step of this shape, and counts it; after `Record` comes `recorded`.
    pub fn decide(&mut self, shape: &PassShape) -> Decision {
        self.clock += 1;
        let limit = self.limit(shape);
        let class = class_of(shape);
        let clock = self.clock;
        let decision = match self.entries.get_mut(shape) {
            _ if limit == 0 => Decision::Eager,
            Some((used, Entry::Ready(_))) => {
                *used = clock;
                Decision::Replay
            }
            Some((used, Entry::Failed)) => {
                *used = clock;
                Decision::Eager
            }
            Some((_, Entry::Seen)) => Decision::Record,
            None if class == GraphClass::Decode => Decision::Record,
            None => {
                self.put(shape, Entry::Seen);
                Decision::Eager
            }
        };
        match decision {
            Decision::Eager => self.count(shape).eager += 1,
            Decision::Replay => self.count(shape).replays += 1,
            // How the step runs is known after the recording: `recorded`.
            Decision::Record => {}
        }
        decision
    }

    /// The graph of a step that was to be recorded first, if that worked; counts the step.
    pub fn recorded(&mut self, shape: &PassShape) -> Option<&G> {
        let works = matches!(self.entries.get(shape), Some((_, Entry::Ready(_))));
        let count = self.count(shape);
        *(if works { &mut count.replays } else { &mut count.eager }) += 1;
        self.get(shape)
    }

    fn forget_oldest_remembered(&mut self) {
        let remembered = self.entries.iter().filter(|(_, (_, entry))| !entry.is_ready());
        if let Some(shape) = remembered.min_by_key(|(_, (used, _))| *used).map(|(shape, _)| *shape) {
            self.take(&shape);
        }
    }

    /// Removes an entry, whatever it was.
    fn take(&mut self, shape: &PassShape) {
        if let Some((_, entry)) = self.entries.remove(shape) {
            self.remembered -= usize::from(!entry.is_ready());
        }
    }

    /// Replaces an entry, whatever it was; what only remembers a shape makes room among its like.
    fn put(&mut self, shape: &PassShape, entry: Entry<G>) {
        self.take(shape);
        if !entry.is_ready() {
            if self.remembered >= REMEMBERED_MAX {
                self.forget_oldest_remembered();
            }
            self.remembered += 1;
        }
        self.entries.insert(*shape, (self.clock, entry));
    }

    /// Keeps a recorded graph, making room in its class.
    pub fn keep(&mut self, shape: &PassShape, graph: G, capture_us: u64) {
        let (class, limit) = (class_of(shape), self.limit(shape));
        let count = self.count(shape);
        count.captures += 1;
        count.capture_us += capture_us;
        let ready = |s: &PassShape, e: &Entry<G>| class_of(s) == class && e.is_ready();
        while self.entries.iter().filter(|(s, (_, e))| ready(s, e)).count() >= limit {
            let oldest = self.entries.iter().filter(|(s, (_, e))| ready(s, e)).min_by_key(|(_, (used, _))| *used);
            let Some(oldest) = oldest.map(|(s, _)| *s) else { break };
            self.take(&oldest);
            self.count(&oldest).evictions += 1;
        }
        self.put(shape, Entry::Ready(graph));
    }

    /// Remembers that this shape cannot be recorded, until `REMEMBERED_MAX` others have come since it last did.
    pub fn remember_failure(&mut self, shape: &PassShape, capture_us: u64) {
        let count = self.count(shape);
        count.failures += 1;
        count.capture_us += capture_us;
        self.put(shape, Entry::Failed);
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
        self.remembered = 0;
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
        assert_eq!(cache.recorded(&prefill(40)), Some(&1));
        assert_eq!(cache.decide(&prefill(40)), Decision::Replay);
        assert_eq!(
            cache.all_counts(),
            GraphCounts { replays: 2, eager: 2, captures: 1, capture_us: 5, ..Default::default() }
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
        assert_eq!(cache.all_counts().evictions, 1);
        assert_eq!(cache.get(&prefill(2)), Some(&2));
        assert_eq!(cache.get(&prefill(3)), None);
        assert_eq!(cache.get(&prefill(100)), Some(&100));
    }

    #[test]
    fn a_failed_recording_is_remembered() {
        let mut cache = cache();
        cache.decide(&prefill(9));
        assert_eq!(cache.decide(&prefill(9)), Decision::Record);
        cache.remember_failure(&prefill(9), 7);
        assert_eq!(cache.recorded(&prefill(9)), None);
        for _ in 0..3 {
            assert_eq!(cache.decide(&prefill(9)), Decision::Eager);
        }
        let all = cache.all_counts();
        assert_eq!((all.failures, all.capture_us, all.replays, all.eager), (1, 7, 0, 5));
    }

    /// A driver that refuses to record each of these lengths when it comes again.
    fn refuse(cache: &mut GraphCache<u32>, lens: std::ops::Range<usize>) {
        for len in lens {
            while cache.decide(&prefill(len)) != Decision::Record {}
            cache.remember_failure(&prefill(len), 0);
        }
    }

    #[test]
    fn failures_and_shapes_seen_once_are_bounded_together() {
        let mut cache = cache();
        cache.keep(&decode(3), 3, 0);
        for len in 1..=REMEMBERED_MAX {
            cache.decide(&prefill(len));
        }
        refuse(&mut cache, 10_000..10_000 + 2 * REMEMBERED_MAX);
        assert_eq!((cache.entries.len(), cache.remembered), (1 + REMEMBERED_MAX, REMEMBERED_MAX));
        for len in 20_000..20_000 + 2 * REMEMBERED_MAX {
            cache.decide(&prefill(len));
        }
        assert_eq!((cache.entries.len(), cache.remembered), (1 + REMEMBERED_MAX, REMEMBERED_MAX));
        assert_eq!(cache.get(&decode(3)), Some(&3), "what is remembered never takes the place of a graph");
        cache.clear();
        assert_eq!((cache.entries.len(), cache.remembered), (0, 0));
    }

    #[test]
    fn a_failure_holds_for_a_shape_that_keeps_coming_and_is_forgotten_of_one_that_does_not() {
        let mut cache = cache();
        refuse(&mut cache, 1..3);
        for len in 10_000..10_000 + REMEMBERED_MAX {
            cache.decide(&prefill(len));
            assert_eq!(cache.decide(&prefill(1)), Decision::Eager, "after {len}");
        }
        assert_eq!([cache.decide(&prefill(2)), cache.decide(&prefill(2))], [Decision::Eager, Decision::Record]);
    }

    #[test]
    fn each_class_has_its_own_counts_and_its_own_bound() {
        let packed = |n: usize| PassShape { rows: 2, tokens: n, wanted: 2, singles: 0, tiles: 6, capacity: 256 };
        let mut cache: GraphCache<u32> = GraphCache::new(GraphLimits { decode: 4, singleton: 1, packed: 2 });
        for n in [40, 41, 42] {
            for shape in [packed(n), prefill(n)] {
                cache.decide(&shape);
                cache.decide(&shape);
                cache.keep(&shape, 0, 10);
                cache.recorded(&shape);
            }
        }
        let [decode, prefill, packed] = cache.counts();
        assert_eq!(decode, GraphCounts::default());
        let counts = GraphCounts { replays: 3, eager: 3, captures: 3, capture_us: 30, ..GraphCounts::default() };
        assert_eq!(prefill, GraphCounts { evictions: 2, ..counts });
        assert_eq!(packed, GraphCounts { evictions: 1, ..counts });
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

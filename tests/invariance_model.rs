//! I1 and I8 on the real model, on the bits of every logit: solo against packed, chunk caps and budgets, shuffled pages, batches of
//! up to sixteen, arrival orders, neighbours cancelled at every boundary with their pages reused at once, one thread or two.

mod common;

use crucible::admission::RequestId;
use crucible::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crucible::backend::driver::Driver;
use crucible::backend::{HostLogits, Input, Row, Rule, SamplingRow, SlotBinding, Start, Want};
use crucible::model::{LoadedModel, ModelSource, Profile, SpecialTokens, load};

const PAGES: u32 = 128;
const TEXT: &str = "Dans la forêt, 8 foxes jumped over fn main() { println!(\"{}\", 3 + 4); } 今天天气很好。Then they slept until the \
                    morning came, and nobody in the village had noticed that the bridge was gone.";

/// One model, one text, and the next unused request id.
struct Bench {
    driver: Driver,
    text: Vec<u32>,
    requests: u64,
}

/// A sequence in a slot, with its pages and how much of its tokens the backend has seen.
struct Sequence {
    slot: u32,
    request: RequestId,
    pages: Vec<u32>,
    tokens: Vec<u32>,
    seen: usize,
}

impl Bench {
    fn new(threads: usize) -> Self {
        let LoadedModel { weights, tokenizer, .. } =
            load(&ModelSource::Gguf(common::default_model()), Profile::Q8).unwrap();
        let text = tokenizer.encode(TEXT, SpecialTokens::AsText).unwrap();
        let config = CpuConfig {
            threads,
            isa: Isa::Auto,
            pages: PAGES as usize,
            page_tokens: 16,
            slots: 16,
            max_step_tokens: 1040,
        };
        let backend = CpuBackend::new(weights, Profile::Q8, config).unwrap();
        Self { driver: Driver::new(Box::new(backend)), text, requests: 0 }
    }

    fn sequence(&mut self, slot: u32, pages: Vec<u32>, tokens: Vec<u32>) -> Sequence {
        self.requests += 1;
        Sequence { slot, request: RequestId(self.requests), pages, tokens, seen: 0 }
    }

    /// One step with the next `len` tokens of each sequence; a hash of every wanted logit's bits for each.
    fn step(&mut self, parts: &mut [(&mut Sequence, usize)]) -> Vec<Vec<u64>> {
        let (mut bindings, mut rows, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for (s, len) in parts.iter_mut() {
            let end = (s.seen + *len).min(s.tokens.len());
            if s.seen == 0 {
                bindings.push(SlotBinding { slot: s.slot, request: s.request, pages: s.pages.clone(), adjust: None });
            }
            tokens.extend(&s.tokens[s.seen..end]);
            rows.push(Row {
                request: s.request,
                slot: s.slot,
                start: Start::Host(s.seen as u32),
                len: (end - s.seen) as u32,
                input: Input::Tokens,
                want: Want::All,
                sampling: SamplingRow { rule: Rule::Greedy, seed: 0, token_index: 0, choice: 0 },
                logprobs: None,
                host_logits: HostLogits::Yes,
            });
            s.seen = end;
        }
        let output = self.driver.run(bindings, rows, tokens).unwrap();
        output.rows.iter().map(|r| r.logits.iter().map(|l| fingerprint(l)).collect()).collect()
    }

    /// The text alone in slot 0, in slices of `cap`.
    fn alone(&mut self, pages: Vec<u32>, cap: usize) -> Vec<u64> {
        let text = self.text.clone();
        let mut s = self.sequence(0, pages, text);
        let mut bits = Vec::new();
        while s.seen < s.tokens.len() {
            bits.extend(self.step(&mut [(&mut s, cap)]).remove(0));
        }
        bits
    }

    fn pages_for_text(&self, first: u32) -> Vec<u32> {
        (first..first + self.text.len().div_ceil(16) as u32).collect()
    }
}

/// FNV-1a over the bits: one changed bit of one logit changes it.
fn fingerprint(logits: &[f32]) -> u64 {
    let mix = |h: u64, l: &f32| (h ^ u64::from(l.to_bits())).wrapping_mul(0x0100_0000_01b3);
    logits.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

#[test]
fn one_changed_bit_changes_the_fingerprint() {
    let mut logits = vec![1.5f32; 1000];
    let before = fingerprint(&logits);
    logits[777] = f32::from_bits(logits[777].to_bits() ^ 1);
    assert_ne!(before, fingerprint(&logits));
}

#[test]
fn slices_pages_and_threads_move_no_bit_of_the_real_model() {
    let mut bench = Bench::new(2);
    let pages = bench.pages_for_text(0);
    let expected = bench.alone(pages.clone(), usize::MAX);
    assert_eq!(expected.len(), bench.text.len());
    for cap in [1, 7, 16, 37, 64, 256] {
        assert!(expected == bench.alone(pages.clone(), cap), "slices of {cap}");
    }
    let mut shuffled: Vec<u32> = pages.iter().map(|p| (p * 37 + 11) % PAGES).collect();
    shuffled.reverse();
    assert!(expected == bench.alone(shuffled, 37), "shuffled pages");
    assert!(expected == Bench::new(1).alone(pages, 64), "one thread");
}

#[test]
fn neighbours_in_any_number_and_order_move_no_bit_of_the_real_model() {
    let mut bench = Bench::new(2);
    let pages = bench.pages_for_text(0);
    let expected = bench.alone(pages.clone(), usize::MAX);
    for (batch, lengths) in [(2, vec![1]), (4, vec![3, 15, 17]), (16, (1..16).map(|i| i * 5 % 23 + 1).collect())] {
        for reverse in [false, true] {
            let text = bench.text.clone();
            let mut own = bench.sequence(3, pages.clone(), text);
            let mut others: Vec<Sequence> = Vec::new();
            for (i, n) in lengths.iter().enumerate() {
                let slot = if i < 3 { i as u32 } else { i as u32 + 1 };
                let tokens = (0..*n as u32).map(|t| (t * 7919 + slot * 31 + 5) % 49_152).collect();
                others.push(bench.sequence(slot, vec![64 + 2 * i as u32, 65 + 2 * i as u32], tokens));
            }
            let mut parts: Vec<(&mut Sequence, usize)> = others.iter_mut().map(|s| (s, usize::MAX / 2)).collect();
            parts.push((&mut own, 1000));
            if reverse {
                parts.reverse();
            }
            let at = if reverse { 0 } else { parts.len() - 1 };
            let bits = bench.step(&mut parts).swap_remove(at);
            assert!(expected == bits, "{batch} in the step, reversed: {reverse}");
        }
    }
}

#[test]
fn neighbours_cancelled_at_every_boundary_and_their_reused_pages_move_no_bit_of_the_real_model() {
    let mut bench = Bench::new(2);
    let pages = bench.pages_for_text(0);
    let expected = bench.alone(pages.clone(), usize::MAX);
    for boundary in [0, 1, 3, 6] {
        let text = bench.text.clone();
        let mut own = bench.sequence(0, pages.clone(), text.clone());
        let mut gone = bench.sequence(1, vec![90, 91, 92, 93, 94, 95, 96], text);
        let mut bits = Vec::new();
        for step in 0.. {
            if own.seen == own.tokens.len() {
                break;
            }
            if step == boundary {
                // Cancelled: its slot and its pages go to somebody else at once.
                gone = bench.sequence(1, vec![96, 95, 94, 93], (100..140).collect());
            }
            let mut parts = vec![(&mut own, 11)];
            if gone.seen < gone.tokens.len() {
                parts.push((&mut gone, 9));
            }
            bits.extend(bench.step(&mut parts).remove(0));
        }
        assert!(expected == bits, "cancelled at {boundary}");
    }
}

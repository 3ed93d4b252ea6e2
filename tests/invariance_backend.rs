//! I1 and I8 at the backend, on logit bits: a row is one function of its own tokens, whatever shares the step, however the prompt
//! is cut, wherever its pages lie, whatever instruction set and number of threads compute it.

use std::collections::HashMap;

use crucible::admission::RequestId;
use crucible::arith::attention::attend;
use crucible::arith::quant::{dequantise_row, weight_blocks};
use crucible::arith::{self, RopeTable, linear_f32, linear_int8, linear_q8, quantise_int8_row, rotate_head, swiglu};
use crucible::backend::cpu::kernels::ROW_TILE;
use crucible::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crucible::backend::*;
use crucible::model::{Geometry, Matrix, MatrixFormat, ModelWeights, Profile, RopePairing, synthetic};

const PAGES: usize = 128;
const SLOTS: usize = 20;
const ROWS: usize = 640;

fn geometry(heads: usize, kv_heads: usize, head_dim: usize, rope_pairing: RopePairing) -> Geometry {
    Geometry {
        layers: 2,
        hidden: 96,
        heads,
        kv_heads,
        head_dim,
        ffn: 160,
        vocab: 270,
        context: 400,
        rope_base: 10_000.0,
        rms_eps: 1e-5,
        rope_pairing,
    }
}

fn small() -> Geometry {
    geometry(3, 1, 64, RopePairing::Halves)
}

fn weights(g: &Geometry, profile: Profile, block: MatrixFormat) -> ModelWeights {
    synthetic::weights(g, profile, block, 7)
}

fn tokens(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| arith::philox4x32_10([i, 0, 0, 3], [seed, 0])[0] % 270).collect()
}

/// Runs steps through the validator, as the engine does.
struct Runner {
    backend: CpuBackend,
    validator: StepValidator,
    next_step: u64,
    next_request: u64,
    free: Vec<u32>,
}

/// One sequence inside the backend.
#[derive(Clone)]
struct Sequence {
    slot: u32,
    request: RequestId,
    pages: Vec<u32>,
    position: usize,
}

impl Runner {
    fn with(weights: ModelWeights, profile: Profile, isa: Isa, threads: usize) -> Self {
        let config = CpuConfig { threads, isa, pages: PAGES, page_tokens: 16, slots: SLOTS, max_step_tokens: ROWS };
        let backend = CpuBackend::new(weights, profile, config).unwrap();
        let validator = StepValidator::new(backend.facts().step_limits());
        Self { backend, validator, next_step: 1, next_request: 1, free: (0..PAGES as u32).collect() }
    }

    fn q8(isa: Isa, threads: usize) -> Self {
        Self::with(weights(&small(), Profile::Q8, MatrixFormat::Q4_1), Profile::Q8, isa, threads)
    }

    fn sequence(&mut self, slot: u32, positions: usize) -> Sequence {
        let pages = self.free.split_off(self.free.len() - positions.div_ceil(16));
        let request = RequestId(self.next_request);
        self.next_request += 1;
        Sequence { slot, request, pages, position: 0 }
    }

    fn end(&mut self, s: Sequence) {
        self.free.extend(s.pages);
    }

    /// One step; `parts` are (sequence, tokens or none for the last selected one, want). Returns outputs by request.
    fn step(&mut self, parts: &mut [(&mut Sequence, Option<&[u32]>, Want)]) -> HashMap<RequestId, RowOutput> {
        let mut step = Step { id: self.next_step, ..Step::default() };
        self.next_step += 1;
        for (s, input, want) in parts.iter_mut() {
            if s.position == 0 {
                step.bindings.push(SlotBinding {
                    slot: s.slot,
                    request: s.request,
                    pages: s.pages.clone(),
                    adjust: None,
                });
            }
            let len = input.map_or(1, <[u32]>::len);
            step.tokens.extend(input.unwrap_or(&[]));
            step.rows.push(Row {
                request: s.request,
                slot: s.slot,
                start: if s.position == 0 { Start::Host(0) } else { Start::Device },
                len: len as u32,
                input: if input.is_some() { Input::Tokens } else { Input::DeviceLast },
                want: *want,
                sampling: SamplingRow { rule: Rule::Greedy, seed: 1, token_index: 0, choice: 0 },
                logprobs: None,
                host_logits: HostLogits::Yes,
            });
            s.position += len;
        }
        self.backend.submit(self.validator.check(step).unwrap()).unwrap();
        loop {
            if let Some(output) = self.backend.poll().unwrap() {
                return output.rows.into_iter().map(|r| (r.request, r)).collect();
            }
            std::thread::yield_now();
        }
    }

    /// Logit bits at every position of `prompt`, alone, in slices of at most `cap`.
    fn score(&mut self, prompt: &[u32], cap: usize) -> Vec<Vec<u32>> {
        let mut s = self.sequence(0, prompt.len());
        let mut out = Vec::new();
        for slice in prompt.chunks(cap) {
            let request = s.request;
            out.extend(bits(&self.step(&mut [(&mut s, Some(slice), Want::All)])[&request]));
        }
        self.end(s);
        out
    }
}

fn bits(output: &RowOutput) -> Vec<Vec<u32>> {
    assert!(output.finite);
    output.logits.iter().map(|l| l.iter().map(|l| l.to_bits()).collect()).collect()
}

/// The forward pass of one sequence from the scalar definitions alone: logits `[positions][vocab]`.
fn defined(w: &ModelWeights, profile: Profile, prompt: &[u32]) -> Vec<Vec<f32>> {
    let g = &w.geometry;
    let linear = |m: &Matrix, x: &[f32]| -> Vec<f32> {
        let row = |r: usize| {
            let mut row = vec![0.0; m.cols];
            dequantise_row(m, r, &mut row);
            row
        };
        let acts = if m.format.is_block() { arith::quantise_activations(x) } else { vec![] };
        (0..m.rows)
            .map(|r| match profile {
                Profile::Q8 if m.format.is_block() => linear_q8(&weight_blocks(m, r), &acts),
                Profile::Int8 => linear_int8(&quantise_int8_row(&row(r)), x),
                Profile::F32 | Profile::Q8 => linear_f32(&row(r), x),
            })
            .collect()
    };
    let norm = |x: &[f32], w: &[f32]| {
        let mut out = vec![0.0; x.len()];
        arith::rms_norm(x, w, g.rms_eps, &mut out);
        out
    };
    let mut cache = vec![(Vec::<Vec<f32>>::new(), Vec::<Vec<f32>>::new()); g.layers];
    let mut logits = Vec::new();
    for (p, &token) in prompt.iter().enumerate() {
        let table = RopeTable::at(p, g.head_dim, g.rope_base);
        let rotated = |mut x: Vec<f32>| {
            x.chunks_exact_mut(g.head_dim).for_each(|h| rotate_head(h, &table, g.rope_pairing));
            x
        };
        let mut x = vec![0.0; g.hidden];
        dequantise_row(&w.embedding, token as usize, &mut x);
        if profile == Profile::Int8 {
            let q = quantise_int8_row(&x);
            x = q.q.iter().map(|&v| f32::from(v) * q.s).collect();
        }
        for (layer, (keys, values)) in w.layers.iter().zip(&mut cache) {
            let h = norm(&x, &layer.attn_norm);
            let q = rotated(linear(&layer.wq, &h));
            keys.push(rotated(linear(&layer.wk, &h)));
            values.push(linear(&layer.wv, &h));
            let mut a = Vec::new();
            for head in 0..g.heads {
                let at = head / g.group() * g.head_dim;
                let of = |cache: &'_ [Vec<f32>]| -> Vec<Vec<f32>> {
                    cache.iter().map(|k| k[at..at + g.head_dim].to_vec()).collect()
                };
                let (k, v) = (of(keys), of(values));
                let (k, v): (Vec<&[f32]>, Vec<&[f32]>) =
                    (k.iter().map(|k| &k[..]).collect(), v.iter().map(|v| &v[..]).collect());
                a.extend(attend(&q[head * g.head_dim..][..g.head_dim], &k, &v, p, 0, profile.attention_segment()));
            }
            x.iter_mut().zip(linear(&layer.wo, &a)).for_each(|(x, o)| *x += o);
            let h = norm(&x, &layer.ffn_norm);
            let (gate, up) = (linear(&layer.w_gate, &h), linear(&layer.w_up, &h));
            let h: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| swiglu(*g, *u)).collect();
            x.iter_mut().zip(linear(&layer.w_down, &h)).for_each(|(x, o)| *x += o);
        }
        logits.push(linear(w.head.as_ref().unwrap_or(&w.embedding), &norm(&x, &w.final_norm)));
    }
    logits
}

fn isas() -> Vec<Isa> {
    let has = |isa: &Isa| crucible::backend::cpu::kernels::Kernels::new(*isa).is_ok();
    let (found, missing): (Vec<_>, Vec<_>) = [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().partition(has);
    missing.iter().for_each(|isa| eprintln!("skipped 1 path: this machine has no {isa:?}"));
    found
}

#[test]
fn the_backend_gives_the_bits_of_the_definitions_on_every_path_for_every_geometry_and_profile() {
    use MatrixFormat::*;
    use RopePairing::*;
    let cases = [
        (geometry(3, 1, 64, Halves), Profile::Q8, Q4_1, 300),
        (geometry(4, 1, 32, Adjacent), Profile::Q8, Q8_0, 40),
        (geometry(2, 2, 64, Adjacent), Profile::Q8, Q4_0, 40),
        (geometry(8, 1, 32, Halves), Profile::F32, F32, 40),
        (geometry(4, 2, 128, Halves), Profile::F32, F32, 20),
        (geometry(5, 1, 96, Halves), Profile::Int8, F32, 40),
        (geometry(3, 1, 64, Adjacent), Profile::Q8, Bf16, 20),
    ];
    for (g, profile, block, n) in cases {
        let (w, prompt) = (weights(&g, profile, block), tokens(1, n));
        let expected: Vec<Vec<u32>> =
            defined(&w, profile, &prompt).iter().map(|l| l.iter().map(|l| l.to_bits()).collect()).collect();
        for isa in isas() {
            let mut runner = Runner::with(w.clone(), profile, isa, 2);
            assert!(expected == runner.score(&prompt, 64), "{isa:?} {profile:?} {block:?} {g:?}");
        }
    }
}

#[test]
fn chunk_caps_threads_and_the_decode_path_move_no_bit() {
    let prompt = tokens(2, 300);
    let expected = Runner::q8(Isa::Auto, 1).score(&prompt, ROWS);
    for threads in [1, 2, 3] {
        let mut runner = Runner::q8(Isa::Auto, threads);
        for cap in [1, 7, 16, 37, 64, 256, ROWS] {
            assert!(expected == runner.score(&prompt, cap), "{threads} threads, slices of {cap}");
        }
    }
}

#[test]
fn a_neighbour_crossing_a_tile_edge_moves_no_bit() {
    let mut runner = Runner::q8(Isa::Auto, 2);
    let prompt = tokens(3, 21);
    let expected = runner.score(&prompt, ROWS);
    let edges = [1, ROW_TILE, 2 * ROW_TILE, 16, 32, 64, 128, 256];
    let lengths: Vec<usize> = edges.iter().flat_map(|&e| [e.max(2) - 1, e, e + 1]).collect();
    for first in [true, false] {
        for &n in &lengths {
            let (mut s, mut other) = (runner.sequence(3, 21), runner.sequence(5, n));
            let (neighbour, request) = (tokens(n as u32, n), s.request);
            let mut parts = [(&mut s, Some(&prompt[..]), Want::All), (&mut other, Some(&neighbour[..]), Want::Last)];
            if !first {
                parts.reverse();
            }
            assert!(expected == bits(&runner.step(&mut parts)[&request]), "a neighbour of {n}, first: {first}");
            runner.end(s);
            runner.end(other);
        }
    }
}

#[test]
fn batches_of_one_to_sixteen_and_shuffled_reused_pages_move_no_bit() {
    let mut runner = Runner::q8(Isa::Auto, 2);
    let prompts: Vec<Vec<u32>> = (0..16).map(|i| tokens(50 + i, 3 + 4 * i as usize)).collect();
    let greedy = |runner: &mut Runner, indices: &[usize]| -> Vec<Vec<Vec<u32>>> {
        let mut all: Vec<Sequence> =
            indices.iter().map(|&i| runner.sequence(i as u32 + 1, prompts[i].len() + 6)).collect();
        let mut seen = vec![Vec::new(); indices.len()];
        for round in 0..6 {
            let mut parts: Vec<_> = all
                .iter_mut()
                .zip(indices)
                .map(|(s, &i)| (s, (round == 0).then_some(&prompts[i][..]), Want::Last))
                .collect();
            let outputs = runner.step(&mut parts);
            for (s, seen) in all.iter().zip(&mut seen) {
                seen.extend(bits(&outputs[&s.request]));
            }
        }
        for s in all {
            runner.end(s);
            let turn = runner.next_request as usize % runner.free.len();
            runner.free.rotate_left(turn);
            runner.free.reverse();
        }
        seen
    };
    let solo: Vec<_> = (0..16).map(|i| greedy(&mut runner, &[i]).remove(0)).collect();
    for size in 1..=16 {
        let indices: Vec<usize> = (0..size).map(|i| (i * 7 + size) % 16).collect();
        for (i, seen) in indices.iter().zip(greedy(&mut runner, &indices)) {
            assert!(solo[*i] == seen, "sequence {i} in a batch of {size}");
        }
    }
}

#[test]
fn decode_and_prefill_rows_of_one_step_do_not_touch_each_other() {
    let mut runner = Runner::q8(Isa::Auto, 2);
    let (short, long) = (tokens(8, 9), tokens(9, 200));
    let alone = runner.score(&long, ROWS);
    let mut decoding = runner.sequence(1, 60);
    runner.step(&mut [(&mut decoding, Some(&short), Want::Last)]);
    let mut prefilling = runner.sequence(2, 200);
    let request = prefilling.request;
    let mut seen = Vec::new();
    for slice in long.chunks(33) {
        let mut parts = [(&mut decoding, None, Want::Last), (&mut prefilling, Some(slice), Want::All)];
        seen.extend(bits(&runner.step(&mut parts)[&request]));
    }
    assert!(alone == seen);
}

#[test]
fn two_steps_may_be_in_flight_and_a_third_is_refused() {
    let mut runner = Runner::q8(Isa::Auto, 2);
    let (sender, receiver) = std::sync::mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    runner.backend.on_completion(std::sync::Arc::new(move || sender.lock().unwrap().send(()).unwrap()));
    let s = runner.sequence(0, 40);
    let row = |start, input, len| Row {
        request: s.request,
        slot: 0,
        start,
        len,
        input,
        want: Want::Last,
        sampling: SamplingRow { rule: Rule::Greedy, seed: 1, token_index: 0, choice: 0 },
        logprobs: Some(3),
        host_logits: HostLogits::No,
    };
    let binding = SlotBinding { slot: 0, request: s.request, pages: s.pages.clone(), adjust: None };
    let first = Step {
        id: 1,
        bindings: vec![binding],
        rows: vec![row(Start::Host(0), Input::Tokens, 9)],
        tokens: tokens(1, 9),
    };
    let later =
        |id| Step { id, bindings: vec![], rows: vec![row(Start::Device, Input::DeviceLast, 1)], tokens: vec![] };
    let valid: Vec<ValidStep> =
        [first, later(2), later(3)].into_iter().map(|s| runner.validator.check(s).unwrap()).collect();
    let mut valid = valid.into_iter();
    runner.backend.submit(valid.next().unwrap()).unwrap();
    runner.backend.submit(valid.next().unwrap()).unwrap();
    assert!(matches!(runner.backend.submit(valid.next().unwrap()), Err(BackendError::Overrun)));
    for id in 1..=2 {
        receiver.recv().unwrap();
        let output = runner.backend.poll().unwrap().unwrap();
        assert_eq!((output.step, output.rows[0].tokens.len(), output.rows[0].logprobs[0].top.len()), (id, 1, 3));
        assert_eq!(output.rows[0].logprobs[0].chosen, output.rows[0].logprobs[0].top[0].1);
    }
    assert!(runner.backend.poll().unwrap().is_none());
}

#[test]
fn a_forced_instruction_set_that_is_missing_or_a_wrong_shape_is_an_error_at_construction() {
    let config = CpuConfig { threads: 1, isa: Isa::Auto, pages: 4, page_tokens: 32, slots: 1, max_step_tokens: 8 };
    let w = weights(&small(), Profile::F32, MatrixFormat::F32);
    assert!(matches!(CpuBackend::new(w.clone(), Profile::F32, config), Err(BackendError::Unavailable { .. })));
    let mut wrong = w;
    wrong.layers[1].w_up.rows -= 1;
    let config = CpuConfig { page_tokens: 16, ..config };
    let error = CpuBackend::new(wrong, Profile::F32, config).err().unwrap().to_string();
    assert!(error.contains("w_up is 159×96, it must be 160×96"), "{error}");
}

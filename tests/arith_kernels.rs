//! Every kernel of every instruction set gives the bits of its scalar definition.

use crucible::arith::quant::{dequantise_row, weight_blocks};
use crucible::arith::{self, exp_c, linear_f32, linear_int8, linear_q8, philox4x32_10, quantise_int8_row, swiglu};
use crucible::backend::cpu::Isa;
use crucible::backend::cpu::kernels::Kernels;
use crucible::backend::{Rule, SamplingRow};
use crucible::model::{Matrix, MatrixFormat, Profile, TensorBytes};
use std::num::NonZeroU32;
use std::sync::Arc;

/// The paths that this machine has; a missing one is said aloud.
fn paths() -> Vec<(Isa, Kernels)> {
    let mut found = Vec::new();
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
        match Kernels::new(isa) {
            Ok(kernels) => found.push((isa, kernels)),
            Err(e) => eprintln!("skipped 1 path: {e}"),
        }
    }
    found
}

struct Random(u32, u32);

impl Random {
    fn word(&mut self) -> u32 {
        self.1 += 1;
        philox4x32_10([self.1, 0, 0, 5], [self.0, 2])[0]
    }

    /// Ordinary values with zeros of both signs, subnormals and a wide range of exponents among them.
    fn float(&mut self) -> f32 {
        let (w, unit) = (self.word(), (self.word() >> 8) as f32 / 16_777_216.0 - 0.5);
        match w % 40 {
            0 => 0.0,
            1 => -0.0,
            2 => unit * 1e-40,
            3 => unit * 1e6,
            4 => unit * 1e-9,
            _ => unit * 4.0,
        }
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn matrix(random: &mut Random, format: MatrixFormat, rows: usize, cols: usize) -> Matrix {
    let (weights, size) = format.block();
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / weights {
        let value = random.float();
        match format {
            MatrixFormat::F32 => bytes.extend(value.to_le_bytes()),
            MatrixFormat::F16 => bytes.extend(half::f16::from_f32(value.clamp(-9.0, 9.0)).to_le_bytes()),
            MatrixFormat::Bf16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
            _ => {
                let mut block: Vec<u8> = (0..size).map(|_| random.word() as u8).collect();
                let headers = if format == MatrixFormat::Q4_1 { 2 } else { 1 };
                for h in 0..headers {
                    let half = half::f16::from_f32((random.float() / 50.0).clamp(-9.0, 9.0));
                    block[2 * h..2 * h + 2].copy_from_slice(&half.to_le_bytes());
                }
                if random.word().is_multiple_of(5) {
                    block[2 * headers..].fill(if random.word().is_multiple_of(2) { 0x80 } else { 0xff });
                }
                bytes.extend(block);
            }
        }
    }
    Matrix { format, rows, cols, bytes: TensorBytes::Owned(Arc::new(bytes)) }
}

/// One output by the scalar definition.
fn defined(m: &Matrix, profile: Profile, r: usize, x: &[f32]) -> f32 {
    let mut w = vec![0.0; m.cols];
    dequantise_row(m, r, &mut w);
    match profile {
        Profile::Q8 if m.format.is_block() => linear_q8(&weight_blocks(m, r), &arith::quantise_activations(x)),
        Profile::Int8 => linear_int8(&quantise_int8_row(&w), x),
        Profile::F32 | Profile::Q8 => linear_f32(&w, x),
    }
}

#[test]
fn every_linear_kernel_gives_the_scalar_bits_for_every_format_shape_and_row_count() {
    use MatrixFormat::*;
    let cases = [
        (Profile::F32, F32, 32),
        (Profile::F32, Q4_1, 32),
        (Profile::F32, Q8_0, 32),
        (Profile::Int8, F32, 1),
        (Profile::Int8, Q4_0, 32),
        (Profile::Q8, F32, 1),
        (Profile::Q8, F16, 1),
        (Profile::Q8, Bf16, 1),
        (Profile::Q8, Q8_0, 32),
        (Profile::Q8, Q4_0, 32),
        (Profile::Q8, Q4_1, 32),
    ];
    let mut random = Random(1, 0);
    for (profile, format, unit) in cases {
        for (rows, units, tokens) in
            [(1, 1, 1), (16, 2, 2), (17, 9, 3), (33, 18, 5), (48, 24, 9), (15, 65, 15), (7, 130, 4)]
        {
            let cols = units * unit;
            let m = matrix(&mut random, format, rows, cols);
            let x = random.floats(tokens * cols);
            let expected: Vec<f32> = x
                .chunks_exact(cols)
                .flat_map(|x| (0..rows).map(|r| defined(&m, profile, r, x)).collect::<Vec<_>>())
                .collect();
            for (isa, kernels) in paths() {
                let got = kernels.linear(&m, profile, &x, tokens).unwrap();
                assert_eq!(bits(&expected), bits(&got), "{isa:?} {profile:?} {format:?} {rows}×{cols}, {tokens} rows");
            }
        }
    }
}

#[test]
fn an_embedding_row_comes_out_of_its_tile_as_it_went_in() {
    let mut random = Random(2, 0);
    for format in [
        MatrixFormat::F32,
        MatrixFormat::F16,
        MatrixFormat::Bf16,
        MatrixFormat::Q8_0,
        MatrixFormat::Q4_0,
        MatrixFormat::Q4_1,
    ] {
        let m = matrix(&mut random, format, 37, 96);
        for r in [0, 15, 16, 36] {
            let mut row = vec![0.0; 96];
            dequantise_row(&m, r, &mut row);
            let int8 = quantise_int8_row(&row);
            let int8: Vec<f32> = int8.q.iter().map(|&q| f32::from(q) * int8.s).collect();
            for (_, kernels) in paths() {
                assert_eq!(bits(&row), bits(&kernels.embedding_row(&m, Profile::F32, r).unwrap()));
                assert_eq!(bits(&row), bits(&kernels.embedding_row(&m, Profile::Q8, r).unwrap()), "{format:?} row {r}");
                assert_eq!(bits(&int8), bits(&kernels.embedding_row(&m, Profile::Int8, r).unwrap()));
            }
        }
    }
}

#[test]
fn row_kernels_give_the_scalar_bits_for_odd_lengths_subnormals_and_zeros() {
    let mut random = Random(3, 0);
    for n in [1, 31, 32, 255, 256, 272, 576, 577, 2048] {
        let (x, w) = (random.floats(n), random.floats(n));
        let mut expected = vec![0.0; n];
        arith::rms_norm(&x, &w, 1e-5, &mut expected);
        let whole = n / 32 * 32;
        let silu: Vec<f32> = x[..whole].iter().zip(&w).map(|(g, u)| swiglu(*g, *u)).collect();
        for (isa, kernels) in paths() {
            assert_eq!(bits(&expected), bits(&kernels.rms_norm(&x, &w, 1e-5)), "{isa:?} norm of {n}");
            assert_eq!(bits(&silu), bits(&kernels.swiglu(&x[..whole], &w[..whole])), "{isa:?} swiglu of {n}");
            assert_eq!(
                arith::quantise_activations(&x[..whole]),
                kernels.quantise(&x[..whole]),
                "{isa:?} blocks of {n}"
            );
        }
    }
    let mut tiny = vec![f32::from_bits((27 << 23) - 1); 32];
    tiny.extend([f32::from_bits(27 << 23); 32]);
    for (_, kernels) in paths() {
        assert_eq!(arith::quantise_activations(&tiny), kernels.quantise(&tiny));
    }
}

#[test]
fn exp_c_is_within_one_ulp_on_a_sample_and_equal_on_every_path() {
    exp_c_against_f64(if cfg!(debug_assertions) { 4_093 } else { 61 });
}

/// Every f32 in [-87, 88]: 2.2 thousand million arguments. `cargo test --release --test arith_kernels -- --ignored`
#[test]
#[ignore = "exhaustive: about a minute of two cores"]
fn exp_c_is_within_one_ulp_everywhere_and_equal_on_every_path() {
    exp_c_against_f64(1);
}

/// The paths agree on bits, and stay within one ulp of the f64 exponential, on every `step`-th f32 of [-87, 88].
fn exp_c_against_f64(step: usize) {
    let paths = paths();
    let bounds = [(0u32, 0x42b0_0000u32), (0x8000_0000, 0xc2ae_0000)];
    // Below 2^-25 both the result and the nearest float are 1: those binades are checked for that alone.
    let small = 0x3300_0000u32;
    let ranges: Vec<(u32, u32)> = bounds
        .iter()
        .flat_map(|&(a, b)| (a..=b).step_by(1 << 22).map(move |s| (s, b.min(s + (1 << 22) - 1))))
        .collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let worker = || {
        let mut worst = 0.0f64;
        while let Some(&(first, last)) = ranges.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            let x: Vec<f32> = (first..=last).step_by(step).map(f32::from_bits).collect();
            let outs: Vec<Vec<f32>> = paths
                .iter()
                .map(|(_, kernels)| {
                    let mut y = x.clone();
                    kernels.exp(&mut y);
                    y
                })
                .collect();
            let same = |w: &[Vec<f32>]| w[0].iter().zip(&w[1]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(outs.windows(2).all(same), "paths differ from {first:#x}");
            if last & 0x7fff_ffff < small {
                assert!(outs[0].iter().all(|&y| y == 1.0));
                continue;
            }
            for (x, y) in x.iter().zip(&outs[0]) {
                let truth = f64::from(*x).exp();
                let rounded = truth as f32;
                let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
                worst = worst.max((f64::from(*y) - truth).abs() / ulp);
            }
            for (x, y) in x.iter().zip(&outs[0]).step_by(997) {
                assert_eq!(exp_c(*x).to_bits(), y.to_bits(), "the scalar definition at {x:e}");
            }
        }
        worst
    };
    let worst = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).fold(0.0, f64::max)
    });
    println!("worst error {worst:.4} ulp");
    assert!(worst > 0.4 && worst <= 1.0, "worst error {worst} ulp");
}

#[test]
fn selection_without_a_sort_equals_the_definition_under_every_filter() {
    let mut random = Random(4, 0);
    for case in 0..400 {
        let vocab = [1, 2, 15, 16, 17, 257, 1000][case % 7];
        let mut logits = random.floats(vocab);
        if case % 3 == 0 {
            logits.iter_mut().for_each(|l| *l = (*l * 2.0).round() / 2.0); // many ties
        }
        logits.iter_mut().for_each(|l| *l = l.clamp(-30.0, 30.0));
        let inv_temperature = [0.25, 1.0, 3.0, 40.0][random.word() as usize % 4];
        let top_k = NonZeroU32::new([0, 1, 2, 5, 40, 500, 5000][random.word() as usize % 7]);
        let top_p = [1u64, 1 << 20, 1 << 31, 4_080_218_931, (1 << 32) - 1, 1 << 32][random.word() as usize % 6];
        let min_p = [0.0, 0.05, 0.5, 1.0][random.word() as usize % 4];
        let rules = [Rule::Greedy, Rule::Sampled { inv_temperature, top_k, top_p, min_p }];
        for rule in rules {
            for offset in 0..3 {
                let seed = u64::from(random.word()) << 32 | u64::from(random.word());
                let sampling = SamplingRow { rule, seed, token_index: random.word() % 1000, choice: random.word() % 3 };
                let expected = arith::select(&logits, &sampling, offset);
                for (isa, kernels) in paths() {
                    let got = kernels.select(&logits, &sampling, offset);
                    assert_eq!(Some(expected.token), got, "{isa:?} case {case} {rule:?} of {vocab}");
                }
            }
        }
        let chosen = random.word() % vocab as u32;
        for (isa, kernels) in paths() {
            let got = kernels.logprobs(&logits, chosen, 7).unwrap();
            assert_eq!(arith::select::token_logprobs(&logits, chosen, 7), got, "{isa:?} case {case}");
        }
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 15, 16, 20] {
            let mut logits = vec![0.5; 21];
            logits[at] = bad;
            for (_, kernels) in paths() {
                let sampling = SamplingRow { rule: Rule::Greedy, seed: 0, token_index: 0, choice: 0 };
                assert_eq!(kernels.select(&logits, &sampling, 0), None);
            }
        }
    }
}

//! The scalar definitions of the canonical arithmetic: known answers, bounds and the written orders.

use crucible::arith::quant::{dequantise_row, quantise_block, weight_blocks};
use crucible::arith::reduce::{combine_groups, tree32};
use crucible::arith::rule::top_p_fixed;
use crucible::arith::select::{fixed_weight, order_key, token_logprobs, top_p_target};
use crucible::arith::*;
use crucible::backend::{Rule, SamplingRow};
use crucible::model::{Matrix, MatrixFormat, TensorBytes};
use crucible::protocol::sampling::Sampling;
use std::num::NonZeroU32;
use std::sync::Arc;

/// The rule at temperature 1.
fn rule_of(top_k: Option<NonZeroU32>, top_p: f64, min_p: f64) -> Rule {
    Sampling { temperature: 1.0, top_k, top_p, min_p }.rule()
}

fn words(seed: u32) -> impl FnMut() -> u32 {
    let mut n = 0;
    move || {
        n += 1;
        philox4x32_10([n, 0, 0, 7], [seed, 1])[0]
    }
}

fn floats(seed: u32, n: usize) -> Vec<f32> {
    let mut next = words(seed);
    (0..n).map(|_| (next() as f32 / 4_294_967_296.0 - 0.5) * 4.0).collect()
}

/// Distance from the true exponential in units in the last place of the correctly rounded result.
fn ulps(x: f32) -> f64 {
    let truth = libm::exp(f64::from(x));
    let rounded = truth as f32;
    let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
    (f64::from(exp_c(x)) - truth).abs() / ulp
}

#[test]
fn exp_c_is_within_one_ulp_on_a_fine_sample_of_every_binade() {
    let step = if cfg!(debug_assertions) { 9_973 } else { 499 };
    let worst = (0..=0x42b0_0000u32)
        .step_by(step)
        .flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)])
        .filter(|x| *x >= -87.0)
        .map(ulps)
        .fold(0.0, f64::max);
    assert!(worst <= 1.0, "worst error {worst} ulp");
    assert!(worst > 0.4, "the measure sees no rounding error at all: {worst}");
}

#[test]
fn exp_c_is_exactly_one_at_both_zeros_and_clamps() {
    assert_eq!(exp_c(0.0).to_bits(), 1.0f32.to_bits());
    assert_eq!(exp_c(-0.0).to_bits(), 1.0f32.to_bits());
    assert_eq!(exp_c(-1e30), exp_c(-87.0));
    assert_eq!(exp_c(89.0), exp_c(88.0));
    assert!(exp_c(-87.0).is_normal() && exp_c(88.0).is_finite());
}

#[test]
fn philox_gives_the_published_vectors() {
    assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
    assert_eq!(philox4x32_10([!0; 4], [!0; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
    let pi = philox4x32_10([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]);
    assert_eq!(pi, [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
}

#[test]
fn the_tree_adds_halves_and_the_groups_add_neighbours() {
    let mut big = [0.0f32; 32];
    (big[0], big[1], big[16], big[17]) = (1e8, 1.0, -1e8, 1.0);
    assert_eq!(tree32(&big), 2.0, "0 meets 16 first, 1 meets 17 first");
    assert_eq!(combine_groups(&[1e8, -1e8, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]), 2.0);
    assert_eq!(combine_groups(&[1e8, 1.0, -1e8, 1.0, 0.0, 0.0, 0.0, 0.0]), 0.0);
}

#[test]
fn a_linear_row_is_near_the_f64_dot_for_every_odd_length() {
    for n in [1, 63, 64, 65, 576, 577, 1536, 2049] {
        let (w, x) = (floats(1, n), floats(2, n));
        let truth: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        assert!((f64::from(linear_f32(&w, &x)) - truth).abs() < 1e-3, "n = {n}");
        let q = quantise_int8_row(&w);
        assert!((f64::from(linear_int8(&q, &x)) - truth).abs() < 0.05 * (n as f64).sqrt(), "n = {n}");
    }
}

#[test]
fn an_empty_group_adds_plus_zero_and_a_segment_starts_at_plus_zero() {
    assert_eq!(linear_f32(&[-0.0], &[1.0]).to_bits(), 0.0f32.to_bits());
}

#[test]
fn activation_blocks_round_to_even_and_drop_tiny_blocks() {
    let mut x = [0.0f32; 32];
    (x[0], x[1], x[2], x[3]) = (127.0, 0.5, 1.5, -2.5);
    let block = quantise_block(&x);
    assert_eq!((&block.q[..4], block.d, block.sum), (&[127i8, 0, 2, -2][..], 1.0, 127));
    let tiny = quantise_block(&[f32::from_bits((27 << 23) - 1); 32]);
    assert_eq!((tiny.q, tiny.d.to_bits(), tiny.sum), ([0; 32], 0, 0));
    assert_eq!(quantise_block(&[f32::from_bits(27 << 23); 32]).q, [127; 32]);
}

fn block_matrix(format: MatrixFormat, cols: usize) -> Matrix {
    let mut next = words(9);
    let (weights, size) = format.block();
    let mut bytes = Vec::new();
    for _ in 0..cols / weights {
        let mut block: Vec<u8> = (0..size).map(|_| next() as u8).collect();
        block[..2].copy_from_slice(&half::f16::from_f32(0.013).to_le_bytes());
        if format == MatrixFormat::Q4_1 {
            block[2..4].copy_from_slice(&half::f16::from_f32(-0.11).to_le_bytes());
        }
        bytes.extend(block);
    }
    Matrix { format, rows: 1, cols, bytes: TensorBytes::Owned(Arc::new(bytes)) }
}

#[test]
fn a_q8_row_is_near_the_dot_of_the_dequantised_weights() {
    for format in [MatrixFormat::Q8_0, MatrixFormat::Q4_0, MatrixFormat::Q4_1] {
        for cols in [32, 256, 288, 576, 1536] {
            let (matrix, x) = (block_matrix(format, cols), floats(4, cols));
            let mut w = vec![0.0; cols];
            dequantise_row(&matrix, 0, &mut w);
            let truth: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            let got = linear_q8(&weight_blocks(&matrix, 0), &quantise_activations(&x));
            let bound = 0.02 * w.iter().fold(0.0f32, |m, v| m.max(v.abs())) * (cols as f32).sqrt();
            assert!((f64::from(got) - truth).abs() < f64::from(bound), "{format:?} {cols}: {got} against {truth}");
        }
    }
}

#[test]
fn rms_norm_and_swiglu_are_near_their_formulas() {
    for n in [1, 255, 257, 576, 2048] {
        let (x, w) = (floats(5, n), floats(6, n));
        let mut out = vec![0.0; n];
        rms_norm(&x, &w, 1e-5, &mut out);
        let mean: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / n as f64;
        for i in 0..n {
            let truth = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(w[i]);
            assert!((f64::from(out[i]) - truth).abs() < 1e-5, "n = {n}, i = {i}");
        }
    }
    assert!((swiglu(1.5, 2.0) - 2.0 * 1.5 / (1.0 + (-1.5f32).exp())).abs() < 1e-6);
}

#[test]
fn rotation_keeps_the_norm_and_position_zero_is_the_identity() {
    for pairing in [crucible::model::RopePairing::Adjacent, crucible::model::RopePairing::Halves] {
        let x = floats(7, 64);
        let mut y = x.clone();
        rotate_head(&mut y, &RopeTable::at(0, 64, 1e5), pairing);
        assert_eq!(x, y);
        rotate_head(&mut y, &RopeTable::at(777, 64, 1e5), pairing);
        let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>();
        assert!(x != y && (norm(&x) - norm(&y)).abs() < 1e-3);
    }
}

#[test]
fn attention_is_near_softmax_over_every_segment_count() {
    let d = 64;
    for (p, w0, s) in [(0, 0, 256), (255, 0, 256), (256, 0, 256), (700, 0, 256), (700, 300, 256), (700, 0, 1024)] {
        let keys: Vec<Vec<f32>> = (0..=p).map(|j| floats(100 + j as u32, d)).collect();
        let values: Vec<Vec<f32>> = (0..=p).map(|j| floats(5000 + j as u32, d)).collect();
        let q = floats(3, d);
        let (k, v): (Vec<&[f32]>, Vec<&[f32]>) =
            (keys.iter().map(|k| &k[..]).collect(), values.iter().map(|v| &v[..]).collect());
        let got = attend(&q, &k, &v, p, w0, s);
        let dot = |k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / 8.0;
        let e: Vec<f64> = (w0..=p).map(|j| dot(k[j]).exp()).collect();
        let total: f64 = e.iter().sum();
        for c in 0..d {
            let truth: f64 = (w0..=p).map(|j| e[j - w0] / total * f64::from(v[j][c])).sum();
            assert!((f64::from(got[c]) - truth).abs() < 1e-4, "p {p} w0 {w0} s {s} component {c}");
        }
    }
}

fn row(rule: Rule) -> SamplingRow {
    SamplingRow { rule, seed: 11, token_index: 0, choice: 0 }
}

#[test]
fn greedy_takes_the_lower_id_of_a_tie_and_minus_zero_ties_with_plus_zero() {
    assert_eq!(select(&[1.0, 3.0, 3.0], &row(Rule::Greedy), 0).token, 1);
    assert_eq!(select(&[-1.0, -0.0, 0.0], &row(Rule::Greedy), 0).token, 1);
    assert!(!select(&[1.0, f32::NAN], &row(Rule::Greedy), 0).finite);
    assert!(order_key(-0.0) == order_key(0.0) && order_key(-1.0) < order_key(-0.5) && order_key(1.0) > order_key(0.5));
}

#[test]
fn draws_follow_the_weights_and_filters_remove_tokens() {
    let logits = [0.0f32, 1.0, 2.0, -1.0];
    let count = |rule: Rule| {
        let mut seen = [0u32; 4];
        for i in 0..4000 {
            seen[select(&logits, &SamplingRow { token_index: i, ..row(rule) }, 0).token as usize] += 1;
        }
        seen
    };
    let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    let all = count(rule_of(None, 1.0, 0.0));
    for (seen, l) in all.iter().zip(logits) {
        assert!((f64::from(*seen) / 4000.0 - f64::from(l).exp() / total).abs() < 0.03, "{all:?}");
    }
    let k = count(rule_of(NonZeroU32::new(2), 1.0, 0.0));
    assert!(k[0] == 0 && k[3] == 0 && k[1] > 0 && k[2] > 0);
    let p = count(rule_of(None, 0.5, 0.0));
    assert_eq!(p, [0, 0, 4000, 0], "0.64 of the weight is on token 2");
    let m = count(rule_of(None, 1.0, 0.2));
    assert!(m[0] == 0 && m[1] > 0 && m[3] == 0);
}

#[test]
fn rules_round_as_written() {
    assert_eq!(top_p_fixed(1.0), 1 << 32);
    assert_eq!(top_p_fixed(1e-300), 1);
    assert_eq!(top_p_target(1 << 32, 77), 77);
    assert_eq!(top_p_target(1, 77), 1);
    assert_eq!(fixed_weight(1.0), 1 << 40);
}

#[test]
fn log_probabilities_sum_to_one_and_are_ordered() {
    let logits = floats(8, 50);
    let all = token_logprobs(&logits, 3, 50);
    let sum: f64 = all.top.iter().map(|(_, l)| l.exp()).sum();
    assert!((sum - 1.0).abs() < 1e-5);
    assert!(all.top.windows(2).all(|w| w[0].1 >= w[1].1));
    assert_eq!(all.chosen, all.top.iter().find(|(i, _)| *i == 3).unwrap().1);
}

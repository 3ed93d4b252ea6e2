//! The kernels that work on token rows: binding, preparing, embedding, norms, rotation with the KV store, SwiGLU.

use super::linear::{matrix, stored};
use super::{Bench, Failure, Options};
use crate::arith::{RopeTable, quantise_activations, rms_norm, rotate_head, swiglu};
use crate::backend::cuda::args::{EmbedArgs, FROM_DEVICE, RopeArgs, Rows, StepRow};
use crate::backend::cuda::program::Kind;
use crate::backend::cuda::weights;
use crate::check::{Dice, Tally};
use crate::model::{RopePairing, dequant};

pub(super) fn run(bench: &Bench, options: &Options) -> Result<Vec<Tally>, Failure> {
    let mut parts = vec![prepare(bench, options)?, norms(bench, options)?, quantised(bench, options)?];
    for kind in Kind::ALL {
        parts.push(embed(bench, options, kind)?);
    }
    parts.push(rope(bench, options)?);
    parts.push(gated(bench, options)?);
    Ok(parts)
}

fn equal<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], want: &[T]) -> Result<(), String> {
    match got.iter().zip(want).position(|(g, w)| g != w) {
        _ if got.len() != want.len() => Err(format!("{what}: {} entries, wanted {}", got.len(), want.len())),
        None => Ok(()),
        Some(i) => Err(format!("{what}: entry {i} is {:?}, wanted {:?}", got[i], want[i])),
    }
}

/// Binding of some slots, then a step over others: token rows, positions and slot positions.
fn prepare(bench: &Bench, options: &Options) -> Result<Tally, Failure> {
    let mut tally = Tally::new("bind and prepare", options.seed);
    let mut dice = Dice::new(options.seed ^ 0x11);
    for _ in 0..options.shapes {
        let (slots, stride) = (dice.between(1, 20), dice.between(1, 40));
        let mut tables: Vec<u32> = (0..slots * stride).map(|_| dice.bits() as u32).collect();
        let mut position: Vec<u32> = (0..slots).map(|_| dice.below(500) as u32).collect();
        let last: Vec<u32> = (0..slots).map(|_| dice.bits() as u32).collect();
        let (device_tables, device_position) = (bench.upload(&tables)?, bench.upload(&position)?);
        let mut order: Vec<usize> = (0..slots).collect();
        dice.shuffle(&mut order);
        let bound = &order[..dice.between(1, slots)];
        let mut words = vec![bound.len() as u32];
        let mut pages = Vec::new();
        for &slot in bound {
            let count = dice.between(1, stride);
            words.extend([slot as u32, count as u32, (1 + 3 * bound.len() + pages.len()) as u32]);
            for p in 0..count {
                let page = dice.bits() as u32;
                tables[slot * stride + p] = page;
                pages.push(page);
            }
            position[slot] = 0;
        }
        words.extend(pages);
        let words = bench.upload(&words)?;
        bench.kernels.bind(bound.len(), words.address(), device_tables.address(), device_position.address(), stride)?;

        dice.shuffle(&mut order);
        let (mut rows, mut tokens, mut want) = (Vec::new(), Vec::new(), [vec![], vec![], vec![]]);
        for &slot in &order[..dice.between(1, slots)] {
            let fresh = dice.coin();
            let len = if fresh { dice.between(1, 300) } else { 1 };
            let start = if dice.coin() { position[slot] } else { dice.below(1000) as u32 };
            let from_device = start == position[slot] && dice.coin();
            let row = StepRow {
                slot: slot as u32,
                len: len as u32,
                token: want[0].len() as u32,
                start: if from_device { FROM_DEVICE } else { start },
                input: if fresh { tokens.len() as u32 } else { FROM_DEVICE },
                ..StepRow::default()
            };
            for i in 0..len {
                let token = if fresh { dice.bits() as u32 } else { last[slot] };
                if fresh {
                    tokens.push(token);
                }
                want[0].push(slot as u32);
                want[1].push(start + i as u32);
                want[2].push(token);
            }
            position[slot] = start + len as u32;
            rows.push(row);
        }
        tokens.push(0);
        let (device_rows, device_tokens, device_last) =
            (bench.upload(&rows)?, bench.upload(&tokens)?, bench.upload(&last)?);
        let out = [0; 3].map(|_| bench.poisoned::<u32>(want[0].len()));
        let [slot, pos, id] = out;
        let (slot, pos, id) = (slot?, pos?, id?);
        bench.kernels.prepare(
            rows.len(),
            device_rows.address(),
            device_tokens.address(),
            [device_position.address(), device_last.address()],
            [slot.address(), pos.address(), id.address()],
        )?;
        let outcome = equal("slots", &bench.read(&slot)?, &want[0])
            .and(equal("positions", &bench.read(&pos)?, &want[1]))
            .and(equal("tokens", &bench.read(&id)?, &want[2]))
            .and(equal("slot positions", &bench.read(&device_position)?, &position))
            .and(equal("tables", &bench.read(&device_tables)?, &tables));
        tally.case(outcome);
    }
    Ok(tally)
}

struct NormCase {
    rows: usize,
    n: usize,
    x: Vec<f32>,
    w: Option<Vec<f32>>,
    gather: Option<Vec<u32>>,
}

impl NormCase {
    fn new(dice: &mut Dice) -> Self {
        let (rows, n) = (dice.between(1, 40), 32 * dice.between(1, 70));
        let gather = dice.coin().then(|| (0..rows).map(|_| dice.below(rows) as u32).collect());
        Self { rows, n, x: dice.values(rows * n), w: dice.coin().then(|| dice.values(n)), gather }
    }

    /// The normalised rows.
    fn want(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.n];
        for (r, out) in out.chunks_exact_mut(self.n).enumerate() {
            let source = self.gather.as_ref().map_or(r, |g| g[r] as usize);
            let x = &self.x[source * self.n..(source + 1) * self.n];
            match &self.w {
                Some(w) => rms_norm(x, w, 1e-5, out),
                None => out.copy_from_slice(x),
            }
        }
        out
    }
}

fn norms(bench: &Bench, options: &Options) -> Result<Tally, Failure> {
    let mut tally = Tally::new("norm_f32", options.seed);
    let mut dice = Dice::new(options.seed ^ 0x22);
    for _ in 0..options.shapes {
        let mut case = NormCase::new(&mut dice);
        let w = case.w.get_or_insert_with(|| dice.values(case.n)).clone();
        let (x, w, out) = (bench.upload(&case.x)?, bench.upload(&w)?, bench.poisoned::<f32>(case.rows * case.n)?);
        let gather = case.gather.as_ref().map(|g| bench.upload(g)).transpose()?;
        let gather_at = gather.as_ref().map_or(0, |g| g.address());
        let source = Rows { x: x.address(), gather: gather_at, rows: case.rows, width: case.n };
        bench.kernels.norm_f32(source, w.address(), 1e-5, out.address())?;
        tally.bits(|| format!("{} rows of {}", case.rows, case.n), &bench.read(&out)?, &case.want());
    }
    Ok(tally)
}

fn quantised(bench: &Bench, options: &Options) -> Result<Tally, Failure> {
    let mut tally = Tally::new("norm_q8", options.seed);
    let mut dice = Dice::new(options.seed ^ 0x33);
    for _ in 0..options.shapes {
        let mut case = NormCase::new(&mut dice);
        if dice.coin() {
            case.x[..32].fill(if dice.coin() { 1e-38 } else { -0.0 });
        }
        let x = bench.upload(&case.x)?;
        let w = case.w.as_ref().map(|w| bench.upload(w)).transpose()?;
        let gather = case.gather.as_ref().map(|g| bench.upload(g)).transpose()?;
        let values = case.rows * case.n;
        let (q, da, sa) =
            (bench.poisoned::<i8>(values)?, bench.poisoned::<f32>(values / 32)?, bench.poisoned::<f32>(values / 32)?);
        let gather_at = gather.as_ref().map_or(0, |g| g.address());
        let source = Rows { x: x.address(), gather: gather_at, rows: case.rows, width: case.n };
        let w_at = w.as_ref().map_or(0, |w| w.address());
        bench.kernels.norm_q8(source, w_at, 1e-5, [q.address(), da.address(), sa.address()])?;
        let blocks: Vec<_> = case.want().chunks_exact(case.n).flat_map(quantise_activations).collect();
        let want_q: Vec<i8> = blocks.iter().flat_map(|b| b.q).collect();
        let want_d: Vec<f32> = blocks.iter().map(|b| b.d).collect();
        let want_s: Vec<f32> = blocks.iter().map(|b| b.d * b.sum as f32).collect();
        let (got_q, got_d, got_s) = (bench.read(&q)?, bench.read(&da)?, bench.read(&sa)?);
        tally.values += values as u64;
        let outcome = equal("q", &got_q, &want_q)
            .and(crate::check::same_bits(&got_d, &want_d))
            .and(crate::check::same_bits(&got_s, &want_s));
        tally.case(outcome.map_err(|e| format!("{} rows of {}: {e}", case.rows, case.n)));
    }
    Ok(tally)
}

/// A step of single tokens for the kernels that embed and prepare at once: some rows know their token or position, others look them up.
struct Singles {
    rows: Vec<StepRow>,
    tokens: Vec<u32>,
    last: Vec<u32>,
    position: Vec<u32>,
    start: Vec<u32>,
}

impl Singles {
    fn new(dice: &mut Dice, ids: &[u32]) -> Self {
        let mut order: Vec<usize> = (0..ids.len()).collect();
        dice.shuffle(&mut order);
        let position: Vec<u32> = ids.iter().map(|_| dice.below(500) as u32).collect();
        let (mut last, mut tokens) = (vec![u32::MAX; ids.len()], vec![0]);
        let (mut rows, mut start) = (Vec::new(), Vec::new());
        for (i, (&slot, &id)) in order.iter().zip(ids).enumerate() {
            let (looks_up, known) = (dice.coin(), dice.coin());
            start.push(if known { dice.below(1000) as u32 } else { position[slot] });
            if looks_up {
                last[slot] = id;
            } else {
                tokens.push(id);
            }
            rows.push(StepRow {
                slot: slot as u32,
                len: 1,
                token: i as u32,
                start: if known { start[i] } else { FROM_DEVICE },
                input: if looks_up { FROM_DEVICE } else { tokens.len() as u32 - 1 },
                ..StepRow::default()
            });
        }
        Self { rows, tokens, last, position, start }
    }

    /// Launches; the outcome is what the kernel left of slots and positions.
    fn run(&self, bench: &Bench, kind: Kind, args: EmbedArgs) -> Result<Result<(), String>, Failure> {
        let (rows, tokens) = (bench.upload(&self.rows)?, bench.upload(&self.tokens)?);
        let (last, position) = (bench.upload(&self.last)?, bench.upload(&self.position)?);
        let (slot, pos) = (bench.poisoned::<u32>(self.rows.len())?, bench.poisoned::<u32>(self.rows.len())?);
        let args = EmbedArgs {
            rows: rows.address(),
            tokens: tokens.address(),
            position: position.address(),
            last_token: last.address(),
            tok_slot: slot.address(),
            tok_pos: pos.address(),
            ..args
        };
        bench.kernels.embed(kind, self.rows.len(), args)?;
        let slots: Vec<u32> = self.rows.iter().map(|r| r.slot).collect();
        let mut after = self.position.clone();
        for (row, start) in self.rows.iter().zip(&self.start) {
            after[row.slot as usize] = start + 1;
        }
        Ok(equal("slots", &bench.read(&slot)?, &slots)
            .and(equal("positions", &bench.read(&pos)?, &self.start))
            .and(equal("slot positions", &bench.read(&position)?, &after)))
    }
}

fn embed(bench: &Bench, options: &Options, kind: Kind) -> Result<Tally, Failure> {
    let mut tally = Tally::new(format!("embed {kind:?}"), options.seed);
    let mut dice = Dice::new(options.seed ^ 0x44 ^ ((kind as u64) << 8));
    for _ in 0..options.shapes {
        let (vocab, n, rows) = (dice.between(1, 60), 32 * dice.between(1, 20), dice.between(1, 30));
        let (profile, format) = stored(&mut dice, kind);
        let table = matrix(&mut dice, format, vocab, n);
        let ids: Vec<u32> = (0..rows).map(|_| dice.below(vocab) as u32).collect();
        let device_table = weights::matrix(&bench.device, "a check", profile, &table)?;
        let (device_ids, out) = (bench.upload(&ids)?, bench.poisoned::<f32>(rows * n)?);
        let [w, scale, minimum] = device_table.parts();
        let (x, n_i32) = (out.address(), n as i32);
        let args = EmbedArgs { w, scale, minimum, x, n: n_i32, ..EmbedArgs::default() };
        if dice.coin() {
            let singles = Singles::new(&mut dice, &ids);
            tally.case(singles.run(bench, kind, args)?);
        } else {
            bench.kernels.embed(kind, rows, EmbedArgs { tok_id: device_ids.address(), ..args })?;
        }
        let mut want = vec![0.0; rows * n];
        for (&id, out) in ids.iter().zip(want.chunks_exact_mut(n)) {
            dequant::row(&table, id as usize, out);
            if kind == Kind::Int8 {
                let row = crate::arith::quantise_int8_row(out);
                out.iter_mut().zip(&row.q).for_each(|(o, &q)| *o = f32::from(q) * row.s);
            }
        }
        tally.bits(|| format!("{rows} rows of {n}"), &bench.read(&out)?, &want);
    }
    Ok(tally)
}

fn rope(bench: &Bench, options: &Options) -> Result<Tally, Failure> {
    let mut tally = Tally::new("rope_kv", options.seed);
    let mut dice = Dice::new(options.seed ^ 0x55);
    let d = bench.head_dim;
    for _ in 0..options.shapes {
        let kv_heads = dice.between(1, 4);
        let heads = kv_heads * dice.pick(&[1, 2, 3, 4, 8]);
        let (layers, rows, pages) = (dice.between(1, 3), dice.between(1, 20), dice.between(8, 16));
        let layer = dice.below(layers);
        let pairing = dice.pick(&[RopePairing::Adjacent, RopePairing::Halves]);
        let (q_dim, kv_dim) = (heads * d, kv_heads * d);
        let width = q_dim + 2 * kv_dim;
        // One slot a row, each with one page of its own somewhere in its table.
        let mut page_of: Vec<u32> = (0..(pages.max(rows)) as u32).collect();
        dice.shuffle(&mut page_of);
        let pages = page_of.len();
        let stride = 8;
        let pos: Vec<u32> = (0..rows).map(|_| dice.below(16 * stride) as u32).collect();
        let mut tables = vec![0u32; rows * stride];
        for r in 0..rows {
            tables[r * stride + (pos[r] >> 4) as usize] = page_of[r];
        }
        let slots: Vec<u32> = (0..rows as u32).collect();
        let angles: Vec<RopeTable> = (0..16 * stride).map(|p| RopeTable::at(p, d, 10_000.0)).collect();
        let flat: Vec<[f32; 2]> = angles.iter().flat_map(|t| t.cos.iter().zip(&t.sin).map(|(&c, &s)| [c, s])).collect();
        let values = dice.values(rows * width);
        let qkv = bench.upload(&values)?;
        let pool = pages * layers * 16 * kv_dim;
        let before = dice.values(pool);
        let (k_pool, v_pool) = (bench.upload(&before)?, bench.upload(&before)?);
        let (flat, slots, device_pos, device_tables) =
            (bench.upload(&flat)?, bench.upload(&slots)?, bench.upload(&pos)?, bench.upload(&tables)?);
        let args = RopeArgs {
            qkv: qkv.address(),
            angles: flat.address(),
            tok_slot: slots.address(),
            tok_pos: device_pos.address(),
            tables: device_tables.address(),
            k_pool: k_pool.address(),
            v_pool: v_pool.address(),
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            head_dim: d as i32,
            layers: layers as i32,
            layer: layer as i32,
            table_stride: stride as i32,
            adjacent: i32::from(pairing == RopePairing::Adjacent),
        };
        bench.kernels.rope_kv(rows, args)?;
        let (mut want, mut want_k, mut want_v) = (values.clone(), before.clone(), before);
        for r in 0..rows {
            let row = &mut want[r * width..(r + 1) * width];
            let p = pos[r] as usize;
            row[..q_dim].chunks_exact_mut(d).for_each(|head| rotate_head(head, &angles[p], pairing));
            let at = ((page_of[r] as usize * layers + layer) * 16 + (p & 15)) * kv_dim;
            let mut k = row[q_dim..q_dim + kv_dim].to_vec();
            k.chunks_exact_mut(d).for_each(|head| rotate_head(head, &angles[p], pairing));
            want_k[at..at + kv_dim].copy_from_slice(&k);
            want_v[at..at + kv_dim].copy_from_slice(&row[q_dim + kv_dim..]);
        }
        let what = || format!("{rows} rows, {heads}/{kv_heads} heads of {d}, {pairing:?}");
        tally.bits(what, &bench.read(&qkv)?, &want);
        tally.bits(what, &bench.read(&k_pool)?, &want_k);
        tally.bits(what, &bench.read(&v_pool)?, &want_v);
    }
    Ok(tally)
}

fn gated(bench: &Bench, options: &Options) -> Result<Tally, Failure> {
    let mut tally = Tally::new("swiglu_rows", options.seed);
    let mut dice = Dice::new(options.seed ^ 0x66);
    for _ in 0..options.shapes {
        let n = dice.between(1, 5000);
        let (gate, up) = (dice.values(n), dice.values(n));
        let (device_gate, device_up, out) = (bench.upload(&gate)?, bench.upload(&up)?, bench.poisoned::<f32>(n)?);
        bench.kernels.swiglu(device_gate.address(), device_up.address(), out.address(), n)?;
        let want: Vec<f32> = gate.iter().zip(&up).map(|(&g, &u)| swiglu(g, u)).collect();
        tally.bits(|| format!("{n} values"), &bench.read(&out)?, &want);
    }
    Ok(tally)
}

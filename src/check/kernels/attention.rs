//! The attention kernels over paged K and V: single positions (plain and fused with rotation and store) and tiles.

use super::linear::quantised_rows;
use super::{Bench, Failure, Options};
use crate::arith::attention::score_scale;
use crate::arith::{RopeTable, attend, rotate_head};
use crate::backend::cuda::args::AttendArgs;
use crate::backend::cuda::attention::Fusion;
use crate::backend::cuda::kernels::Kernels;
use crate::backend::cuda::memory::DeviceBuffer;
use crate::check::{Dice, Tally};
use crate::model::RopePairing;

/// Sequences with histories in shuffled pages, and the rows that query them.
struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    layers: usize,
    layer: usize,
    segment: usize,
    context: usize,
    stride: usize,
    pairing: RopePairing,
    /// (slot, position) of each token row.
    rows: Vec<(usize, usize)>,
    qkv: Vec<f32>,
    k_pool: Vec<f32>,
    v_pool: Vec<f32>,
    tables: Vec<u32>,
}

impl Case {
    /// `runs` are (slot, first position, rows); every slot has the pages up to the last of them.
    fn new(dice: &mut Dice, d: usize, segment: usize, runs: &[(usize, usize, usize)]) -> Self {
        let kv_heads = dice.between(1, 3);
        let heads = kv_heads * dice.pick(&[1, 2, 3, 4, 8]);
        let layers = dice.between(1, 2);
        let layer = dice.below(layers);
        let kv_dim = kv_heads * d;
        let context = 1300;
        let stride = context / 16 + 1;
        let slots = runs.iter().map(|r| r.0 + 1).max().unwrap_or(1);
        let needed: Vec<usize> = (0..slots)
            .map(|s| runs.iter().filter(|r| r.0 == s).map(|r| (r.1 + r.2).div_ceil(16)).max().unwrap_or(0))
            .collect();
        let mut pages: Vec<u32> = (0..needed.iter().sum::<usize>() as u32 + 3).collect();
        dice.shuffle(&mut pages);
        let mut tables = vec![0u32; slots * stride];
        let mut next = pages.iter();
        for (slot, &count) in needed.iter().enumerate() {
            for p in 0..count {
                tables[slot * stride + p] = next.next().copied().unwrap_or(0);
            }
        }
        let rows: Vec<(usize, usize)> =
            runs.iter().flat_map(|&(s, first, n)| (first..first + n).map(move |p| (s, p))).collect();
        let width = heads * d + 2 * kv_dim;
        let pool = pages.len() * layers * 16 * kv_dim;
        // Unwritten positions hold NaN: reading one shows.
        let (mut k_pool, mut v_pool) = (vec![f32::NAN; pool], vec![f32::NAN; pool]);
        for slot in 0..slots {
            let end = runs.iter().filter(|r| r.0 == slot).map(|r| r.1 + r.2).max().unwrap_or(0);
            for p in 0..end {
                let at = ((tables[slot * stride + p / 16] as usize * layers + layer) * 16 + p % 16) * kv_dim;
                for i in at..at + kv_dim {
                    (k_pool[i], v_pool[i]) = (dice.unit() * 3.0, dice.unit());
                }
            }
        }
        let qkv = (0..rows.len() * width).map(|_| dice.unit() * 2.0).collect();
        let pairing = dice.pick(&[RopePairing::Adjacent, RopePairing::Halves]);
        Self { heads, kv_heads, d, layers, layer, segment, context, stride, pairing, rows, qkv, k_pool, v_pool, tables }
    }

    fn kv_dim(&self) -> usize {
        self.kv_heads * self.d
    }

    fn width(&self) -> usize {
        self.heads * self.d + 2 * self.kv_dim()
    }

    fn at(&self, slot: usize, p: usize) -> usize {
        let page = self.tables[slot * self.stride + p / 16] as usize;
        ((page * self.layers + self.layer) * 16 + p % 16) * self.kv_dim()
    }

    /// Rotates queries and keys of every row into place, as the fused kernel does.
    fn rotate(&mut self) {
        let (q_dim, kv_dim, width, d) = (self.heads * self.d, self.kv_dim(), self.width(), self.d);
        for (r, &(slot, p)) in self.rows.clone().iter().enumerate() {
            let table = RopeTable::at(p, d, 10_000.0);
            let at = self.at(slot, p);
            let row = &mut self.qkv[r * width..(r + 1) * width];
            row[..q_dim].chunks_exact_mut(d).for_each(|head| rotate_head(head, &table, self.pairing));
            let mut k = row[q_dim..q_dim + kv_dim].to_vec();
            k.chunks_exact_mut(d).for_each(|head| rotate_head(head, &table, self.pairing));
            self.k_pool[at..at + kv_dim].copy_from_slice(&k);
            self.v_pool[at..at + kv_dim].copy_from_slice(&self.qkv[r * width + q_dim + kv_dim..(r + 1) * width]);
        }
    }

    fn want(&self) -> Vec<f32> {
        let (width, group) = (self.width(), self.heads / self.kv_heads);
        let mut out = Vec::with_capacity(self.rows.len() * self.heads * self.d);
        for (r, &(slot, p)) in self.rows.iter().enumerate() {
            for head in 0..self.heads {
                let q = &self.qkv[r * width + head * self.d..][..self.d];
                let kv = head / group * self.d;
                let part = |pool: &'_ [f32]| -> Vec<usize> {
                    let _ = pool;
                    (0..=p).map(|j| self.at(slot, j) + kv).collect()
                };
                let offsets = part(&self.k_pool);
                let keys: Vec<&[f32]> = offsets.iter().map(|&o| &self.k_pool[o..o + self.d]).collect();
                let values: Vec<&[f32]> = offsets.iter().map(|&o| &self.v_pool[o..o + self.d]).collect();
                out.extend(attend(q, &keys, &values, p, 0, self.segment));
            }
        }
        out
    }

    /// Uploads everything; the buffers live as long as the result.
    fn upload(&self, bench: &Bench) -> Result<Uploaded, Failure> {
        let slots: Vec<u32> = self.rows.iter().map(|r| r.0 as u32).collect();
        let pos: Vec<u32> = self.rows.iter().map(|r| r.1 as u32).collect();
        let angles: Vec<[f32; 2]> = (0..self.context)
            .flat_map(|p| {
                let t = RopeTable::at(p, self.d, 10_000.0);
                t.cos.into_iter().zip(t.sin).map(|(c, s)| [c, s]).collect::<Vec<_>>()
            })
            .collect();
        let segments = self.context.div_ceil(self.segment);
        Ok(Uploaded {
            slots: bench.upload(&slots)?,
            pos: bench.upload(&pos)?,
            tables: bench.upload(&self.tables)?,
            qkv: bench.upload(&self.qkv)?,
            k_pool: bench.upload(&self.k_pool)?,
            v_pool: bench.upload(&self.v_pool)?,
            angles: bench.upload(&angles)?,
            out: bench.poisoned(self.rows.len() * self.heads * self.d)?,
            partial: bench.poisoned(self.rows.len() * self.heads * segments * (self.d + 2))?,
            counters: DeviceBuffer::zeroed(&bench.device, "a check", self.rows.len() * self.heads)?,
        })
    }

    fn args(&self, on: &Uploaded, capacity: usize) -> AttendArgs {
        AttendArgs {
            qkv: on.qkv.address(),
            out: on.out.address(),
            oq: 0,
            oda: 0,
            osa: 0,
            tok_slot: on.slots.address(),
            tok_pos: on.pos.address(),
            tables: on.tables.address(),
            k_pool: on.k_pool.address(),
            v_pool: on.v_pool.address(),
            angles: on.angles.address(),
            partial: on.partial.address(),
            counters: on.counters.address(),
            entries: 0,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
            layers: self.layers as i32,
            layer: self.layer as i32,
            table_stride: self.stride as i32,
            segment: self.segment as i32,
            max_segments: self.context.div_ceil(self.segment) as i32,
            adjacent: i32::from(self.pairing == RopePairing::Adjacent),
            capacity: capacity as i32,
            block_heads: 1,
            room: 132,
            scale: score_scale(self.d),
        }
    }
}

struct Uploaded {
    slots: DeviceBuffer<u32>,
    pos: DeviceBuffer<u32>,
    tables: DeviceBuffer<u32>,
    qkv: DeviceBuffer<f32>,
    k_pool: DeviceBuffer<f32>,
    v_pool: DeviceBuffer<f32>,
    angles: DeviceBuffer<[f32; 2]>,
    out: DeviceBuffer<f32>,
    partial: DeviceBuffer<f32>,
    counters: DeviceBuffer<u32>,
}

fn position(dice: &mut Dice) -> usize {
    match dice.below(8) {
        0 => dice.pick(&[0, 1, 15, 16, 255, 256, 257, 511, 512, 1023, 1024, 1025]),
        1 | 2 => dice.below(1250),
        _ => dice.below(300),
    }
}

pub(super) fn run(bench: &Bench, options: &Options) -> Result<Vec<Tally>, Failure> {
    Ok(vec![decode(bench, options, Fusion::Apart)?, decode(bench, options, Fusion::Fused)?, prefill(bench, options)?])
}

fn decode(bench: &Bench, options: &Options, fusion: Fusion) -> Result<Tally, Failure> {
    let fused = fusion == Fusion::Fused;
    let name = if fused { "attend_decode fused" } else { "attend_decode" };
    let mut tally = Tally::new(format!("{name} D={}", bench.head_dim), options.seed);
    let mut dice = Dice::new(options.seed ^ 0x77 ^ u64::from(fused));
    for _ in 0..options.shapes {
        let segment = dice.pick(&[256, 1024]);
        let runs: Vec<_> = (0..dice.between(1, 5)).map(|slot| (slot, position(&mut dice), 1)).collect();
        let mut case = Case::new(&mut dice, bench.head_dim, segment, &runs);
        let on = case.upload(bench)?;
        let splits = dice.between(1, case.context.div_ceil(segment));
        let entries: Vec<u32> = (0..runs.len() as u32).rev().collect();
        let device_entries = bench.upload(&entries)?;
        let args = AttendArgs { entries: if fused { 0 } else { device_entries.address() }, ..case.args(&on, segment) };
        if fused {
            case.rotate();
        }
        let values = case.rows.len() * case.heads * case.d;
        let quantised = (dice.coin(), bench.poisoned::<i8>(values)?, bench.poisoned::<f32>(values / 16)?);
        let args = match &quantised {
            (true, q, d) => AttendArgs { oq: q.address(), oda: d.address(), osa: d.at(values / 32), ..args },
            _ => args,
        };
        let (most, room) = (bench.kernels.decode_heads(), dice.pick(&[1, 20, 132]));
        let args = AttendArgs { block_heads: dice.between(1, most) as i32, room, ..args };
        bench.kernels.attend_decode(fusion, runs.len(), splits, args)?;
        let what = || {
            format!(
                "{}/{} heads, segment {segment}, rows {:?}, {splits} splits, {} heads a block",
                case.heads, case.kv_heads, case.rows, args.block_heads
            )
        };
        if let (true, q, d) = &quantised {
            let mut got: Vec<f32> = bench.read(q)?.into_iter().map(f32::from).collect();
            got.extend(bench.read(d)?);
            tally.bits(what, &got, &quantised_rows(&case.want(), case.heads * case.d));
        } else {
            tally.bits(what, &bench.read(&on.out)?, &case.want());
        }
        let counters = bench.read(&on.counters)?;
        tally.case(if counters.iter().all(|&c| c == 0) { Ok(()) } else { Err("a counter was left behind".into()) });
        if fused {
            tally.bits(what, &finite(&bench.read(&on.k_pool)?), &finite(&case.k_pool));
            tally.bits(what, &finite(&bench.read(&on.v_pool)?), &finite(&case.v_pool));
        }
    }
    Ok(tally)
}

/// NaN payloads may differ between host and device; positions of NaN may not.
fn finite(values: &[f32]) -> Vec<f32> {
    values.iter().map(|v| if v.is_nan() { f32::INFINITY } else { *v }).collect()
}

fn prefill(bench: &Bench, options: &Options) -> Result<Tally, Failure> {
    let mut tally = Tally::new(format!("attend_prefill D={}", bench.head_dim), options.seed);
    let mut dice = Dice::new(options.seed ^ 0x88);
    for _ in 0..options.shapes {
        let segment = dice.pick(&[256, 1024]);
        let runs: Vec<_> = (0..dice.between(1, 3))
            .map(|slot| {
                let first = position(&mut dice);
                (slot, first, dice.between(1, 21).min(1280 - first))
            })
            .collect();
        let case = Case::new(&mut dice, bench.head_dim, segment, &runs);
        let on = case.upload(bench)?;
        let longest = runs.iter().map(|r| r.1 + r.2).max().unwrap_or(1);
        let capacity = longest.next_multiple_of(256).min(segment);
        let height = Kernels::prefill_rows(case.heads / case.kv_heads, capacity);
        let mut entries: Vec<[u32; 2]> = Vec::new();
        let mut token = 0;
        for &(_, _, n) in &runs {
            entries.extend((0..n).step_by(height).map(|t| [(token + t) as u32, height.min(n - t) as u32]));
            token += n;
        }
        dice.shuffle(&mut entries);
        let device_entries = bench.upload(&entries)?;
        let args = AttendArgs { entries: device_entries.address(), ..case.args(&on, capacity) };
        bench.kernels.attend_prefill(entries.len(), args)?;
        let what = || format!("{}/{} heads, segment {segment}, runs {runs:?}", case.heads, case.kv_heads);
        tally.bits(what, &bench.read(&on.out)?, &case.want());
    }
    Ok(tally)
}

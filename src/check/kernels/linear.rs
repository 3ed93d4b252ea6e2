//! The linear kernels: every weight kind, few rows and many, every epilogue.

use std::sync::Arc;

use super::{Bench, Failure, Options};
use crate::arith::quant::weight_blocks;
use crate::arith::{linear_f32, linear_int8, linear_q8, quantise_activations, quantise_int8_row, rms_norm, swiglu};
use crate::backend::cuda::args::{Epilogue, LinearArgs, NormArgs, NormedArgs, Rows};
use crate::backend::cuda::kernels::LaunchError;
use crate::backend::cuda::program::Kind;
use crate::backend::cuda::weights;
use crate::check::{Dice, Tally};
use crate::model::{Matrix, MatrixFormat, Profile, TensorBytes, dequant};

/// A matrix of random weights in a format.
pub(super) fn matrix(dice: &mut Dice, format: MatrixFormat, rows: usize, cols: usize) -> Matrix {
    let (weights, unit) = format.block();
    let mut bytes = Vec::with_capacity(rows * cols / weights * unit);
    if format == MatrixFormat::F32 {
        bytes.extend(dice.values(rows * cols).iter().flat_map(|v| v.to_le_bytes()));
    } else {
        for _ in 0..rows * cols / weights {
            let heads = if format == MatrixFormat::Q4_1 { 2 } else { 1 };
            for _ in 0..heads {
                bytes.extend(half::f16::from_f32(dice.unit() * 0.05).to_le_bytes());
            }
            bytes.extend((0..unit - 2 * heads).map(|_| dice.bits() as u8));
        }
    }
    Matrix { format, rows, cols, bytes: TensorBytes::Owned(Arc::new(bytes)) }
}

/// The profile and a stored format that give a kind.
pub(super) fn stored(dice: &mut Dice, kind: Kind) -> (Profile, MatrixFormat) {
    match kind {
        Kind::F32 => (Profile::F32, MatrixFormat::F32),
        Kind::Int8 => (Profile::Int8, MatrixFormat::F32),
        Kind::Block => (Profile::Q8, dice.pick(&[MatrixFormat::Q8_0, MatrixFormat::Q4_0])),
        Kind::BlockMin => (Profile::Q8, MatrixFormat::Q4_1),
    }
}

/// Every output of one row, by the definition.
pub fn oracle_row(kind: Kind, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let dense = |r: usize| {
        let mut row = vec![0.0; matrix.cols];
        dequant::row(matrix, r, &mut row);
        row
    };
    match kind {
        Kind::F32 => (0..matrix.rows).map(|r| linear_f32(&dense(r), x)).collect(),
        Kind::Int8 => (0..matrix.rows).map(|r| linear_int8(&quantise_int8_row(&dense(r)), x)).collect(),
        Kind::Block | Kind::BlockMin => {
            let x = quantise_activations(x);
            (0..matrix.rows).map(|r| linear_q8(&weight_blocks(matrix, r), &x)).collect()
        }
    }
}

/// Rows of `width` quantised by the definition: every q, then every scale, then every scaled sum, as floats.
pub(super) fn quantised_rows(values: &[f32], width: usize) -> Vec<f32> {
    let blocks: Vec<_> = values.chunks_exact(width).flat_map(quantise_activations).collect();
    let mut all: Vec<f32> = blocks.iter().flat_map(|b| b.q.map(f32::from)).collect();
    all.extend(blocks.iter().map(|b| b.d));
    all.extend(blocks.iter().map(|b| b.d * b.sum as f32));
    all
}

/// One linear layer with everything around it.
struct Case {
    rows: usize,
    n: usize,
    k: usize,
    norm: Option<Vec<f32>>,
    gather: Option<Vec<u32>>,
    epilogue: Epilogue,
    x: Vec<f32>,
    before: Vec<f32>,
    matrix: Matrix,
    profile: Profile,
    norm_kernel: NormKernel,
}

/// Which kernel normalises.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NormKernel {
    /// One of its own.
    Apart,
    /// The linear kernel, where it can.
    Inside,
}

const EPS: f32 = 1e-5;

impl Case {
    fn new(dice: &mut Dice, kind: Kind, rows: usize) -> Self {
        let k = 32 * dice.pick(&[1, 2, 3, 5, 8, 9, 15, 18, 24, 33, 48, 64]);
        let epilogue = dice.pick(&[Epilogue::Store, Epilogue::Add, Epilogue::Swiglu]);
        let most = (1_500_000 / (k * rows)).clamp(2, 200);
        let n = if epilogue == Epilogue::Swiglu { 2 * dice.between(1, most / 2) } else { dice.between(1, most) };
        let sources = rows + dice.below(5);
        let gather = dice.coin().then(|| (0..rows).map(|_| dice.below(sources) as u32).collect());
        let norm = dice.coin().then(|| dice.values(k));
        let (profile, format) = stored(dice, kind);
        let matrix = matrix(dice, format, n, k);
        Self {
            rows,
            n,
            k,
            norm,
            gather,
            epilogue,
            x: dice.values(sources * k),
            before: dice.values(rows * n),
            matrix,
            profile,
            norm_kernel: dice.pick(&[NormKernel::Apart, NormKernel::Inside]),
        }
    }

    /// Makes the case wide enough for the widest blocks, gate and up as whole activation blocks.
    fn widen(&mut self, dice: &mut Dice, kind: Kind, n: usize, k: usize) {
        (self.epilogue, self.n) = (Epilogue::Swiglu, n);
        (self.k, self.gather) = (k, None);
        self.norm = self.norm.as_ref().map(|_| dice.values(self.k));
        self.x = dice.values(self.rows * self.k);
        let (profile, format) = stored(dice, kind);
        (self.profile, self.matrix) = (profile, matrix(dice, format, self.n, self.k));
    }

    /// Whether the kernel for few rows gives this case's SwiGLU quantised.
    fn quantised(&self, bench: &Bench, kind: Kind) -> bool {
        self.epilogue == Epilogue::Swiglu && bench.kernels.quantises_swiglu(kind, self.rows, self.n, self.k)
    }

    /// q, scales and sums of the quantised result, one after the other as floats (all exact).
    fn got_quantised(
        &self,
        bench: &Bench,
        args: LinearArgs,
        launch: impl Fn(LinearArgs) -> Result<(), LaunchError>,
    ) -> Result<Vec<f32>, Failure> {
        let values = self.rows * self.width();
        let q = bench.poisoned::<i8>(values)?;
        let (scales, sums) = (bench.poisoned::<f32>(values / 32)?, bench.poisoned::<f32>(values / 32)?);
        let args = LinearArgs { oq: q.address(), oda: scales.address(), osa: sums.address(), ..args };
        launch(args)?;
        let mut got: Vec<f32> = bench.read(&q)?.into_iter().map(f32::from).collect();
        got.extend(bench.read(&scales)?);
        got.extend(bench.read(&sums)?);
        Ok(got)
    }

    fn want_quantised(&self, kind: Kind) -> Vec<f32> {
        quantised_rows(&self.want(kind), self.width())
    }

    fn width(&self) -> usize {
        if self.epilogue == Epilogue::Swiglu { self.n / 2 } else { self.n }
    }

    fn want(&self, kind: Kind) -> Vec<f32> {
        let mut want = Vec::with_capacity(self.rows * self.width());
        for r in 0..self.rows {
            let source = self.gather.as_ref().map_or(r, |g| g[r] as usize);
            let mut x = self.x[source * self.k..(source + 1) * self.k].to_vec();
            if let Some(norm) = &self.norm {
                let raw = x.clone();
                rms_norm(&raw, norm, EPS, &mut x);
            }
            let y = oracle_row(kind, &self.matrix, &x);
            match self.epilogue {
                Epilogue::Store => want.extend(y),
                Epilogue::Add => want.extend(y.iter().zip(&self.before[r * self.n..]).map(|(y, b)| b + y)),
                Epilogue::Swiglu => want.extend(y.chunks_exact(2).map(|p| swiglu(p[0], p[1]))),
            }
        }
        want
    }

    /// Launches the norm, then the kernel for few rows or the tile kernel.
    fn got(&self, bench: &Bench, kind: Kind, few: bool) -> Result<Vec<f32>, Failure> {
        let device_matrix = weights::matrix(&bench.device, "a check", self.profile, &self.matrix)?;
        let [w, scale, minimum] = device_matrix.parts();
        let x = bench.upload(&self.x)?;
        let norm = self.norm.as_ref().map(|n| bench.upload(n)).transpose()?;
        let gather = self.gather.as_ref().map(|g| bench.upload(g)).transpose()?;
        let out = if self.epilogue == Epilogue::Add {
            bench.upload(&self.before)?
        } else {
            bench.poisoned(self.rows * self.width())?
        };
        let address = |b: Option<u64>| b.unwrap_or(0);
        let mut args = LinearArgs {
            x: x.address(),
            w,
            scale,
            minimum,
            out: out.address(),
            rows: self.rows as i32,
            n: self.n as i32,
            k: self.k as i32,
            x_stride: self.k as i32,
            out_stride: self.width() as i32,
            epilogue: self.epilogue as i32,
            ..LinearArgs::default()
        };
        let (norm, gather) =
            (address(norm.as_ref().map(|b| b.address())), address(gather.as_ref().map(|b| b.address())));
        let source = Rows { x: x.address(), gather, rows: self.rows, width: self.k };
        let values = self.rows * self.k;
        let (q, da, sa) =
            (bench.poisoned::<u8>(values)?, bench.poisoned::<f32>(values / 32)?, bench.poisoned::<f32>(values / 32)?);
        let normed = bench.poisoned::<f32>(values)?;
        let inside = few && norm != 0 && self.norm_kernel == NormKernel::Inside;
        let inside = inside && bench.kernels.normalises(kind, self.rows, self.n, self.k);
        if inside {
            let norm = NormArgs { weights: norm, gather, eps: EPS };
            let launch = |linear| bench.kernels.linear_rows_normed(kind, NormedArgs { linear, norm });
            if self.quantised(bench, kind) {
                return self.got_quantised(bench, args, launch);
            }
            launch(args)?;
            return bench.read(&out);
        } else if kind.is_block() {
            bench.kernels.norm_q8(source, norm, EPS, [q.address(), da.address(), sa.address()])?;
            (args.xq, args.da, args.sa) = (q.address(), da.address(), sa.address());
        } else if norm != 0 {
            bench.kernels.norm_f32(source, norm, EPS, normed.address())?;
            args.x = normed.address();
        }
        if few && self.quantised(bench, kind) {
            return self.got_quantised(bench, args, |args| bench.kernels.linear_rows(kind, args));
        }
        if few {
            bench.kernels.linear_rows(kind, args)?;
        } else {
            bench.kernels.linear_tile(kind, args)?;
        }
        bench.read(&out)
    }
}

pub(super) fn run(bench: &Bench, options: &Options) -> Result<Vec<Tally>, Failure> {
    let mut parts = Vec::new();
    for kind in Kind::ALL {
        for few in [true, false] {
            let name = if few { "linear_rows" } else { "linear_tile" };
            let mut tally = Tally::new(format!("{name} {kind:?}"), options.seed);
            let mut dice = Dice::new(options.seed ^ ((kind as u64) << 8) ^ u64::from(few));
            for shape in 0..options.shapes {
                let rows = match (few, shape % 6, shape % 16) {
                    // Every height of the kernels for few rows, and the taller tile, at widths that choose the widest blocks.
                    (true, 0, _) => [3, 7, 16, 1][shape / 6 % 4],
                    // Heights that several blocks share, to the most that they do, and those that a block normalises itself.
                    (true, 1, _) => [dice.between(17, 64), dice.between(65, 512)][usize::from(shape / 6 % 4 == 3)],
                    (true, 2, _) => {
                        if shape / 6 % 2 == 0 {
                            1
                        } else {
                            dice.between(2, 4)
                        }
                    }
                    (true, ..) => dice.between(1, 16),
                    (false, _, 0) => 129,
                    (false, ..) => dice.pick(&[1, 7, 17, 33, 64, 65, 100, 129, 200]),
                };
                let mut case = Case::new(&mut dice, kind, rows);
                if rows == 1 {
                    case.norm_kernel = NormKernel::Inside;
                }
                if !kind.is_block() && case.norm.is_none() {
                    case.gather = None;
                }
                if few && shape % 6 == 0 {
                    // A single row is normalised inside, by the widest blocks and by those of one tile.
                    let many = if rows == 1 { shape / 24 % 2 == 0 } else { dice.below(3) == 0 };
                    if rows == 1 {
                        case.norm = Some(vec![]);
                    }
                    let n = if many { 64 * dice.between(270, 280) + 6 } else { 64 * dice.between(60, 70) };
                    let k = 32 * dice.pick(&[1, 3, 9]);
                    case.widen(&mut dice, kind, n, k);
                } else if !few && shape % 16 == 0 {
                    let n = 64 * dice.between(67, 70);
                    case.widen(&mut dice, kind, n, 64);
                }
                if few && shape % 6 == 1 && shape / 6 % 2 == 0 {
                    // Wide blocks too, gate and up as whole activation blocks.
                    let (n, k) = (64 * dice.between(40, 60), 32 * dice.pick(&[1, 3, 9]));
                    case.widen(&mut dice, kind, n, k);
                }
                if few && !bench.kernels.takes_rows(kind, rows, case.n, case.k) {
                    // Fewer multiprocessors than an H200's: so many rows go to tiles.
                    continue;
                }
                let got = case.got(bench, kind, few)?;
                let want = if few && case.quantised(bench, kind) { case.want_quantised(kind) } else { case.want(kind) };
                let what = || format!("{rows} rows, {} outputs of {}, {:?}", case.n, case.k, case.epilogue);
                tally.bits(what, &got, &want);
            }
            parts.push(tally);
        }
    }
    Ok(parts)
}

//! Clocks and power as plots. Pure.

use super::plots::seconds as labels;
use super::svg::{Series, lines};
use crate::load::compare::{Comparison, VariantRun};
use crate::load::devices::{DeviceSample, GpuSample};
use crate::load::watch::Observed;

/// Lines of one plot: as many as there are colours.
pub(super) const LINES_MAX: usize = 6;

/// One figure of the devices over time; moments without it are left out.
fn series(name: &str, observed: &Observed, figure: impl Fn(&DeviceSample) -> Option<f64>) -> Series {
    let points = observed.devices.iter().filter_map(|d| Some((d.t_s, figure(d)?))).collect();
    Series::line(name, points)
}

/// One figure of the GPU that is compared.
fn of_gpu(name: &str, observed: &Observed, figure: fn(&GpuSample) -> Option<f64>) -> Series {
    series(name, observed, |d| figure(d.gpu(observed.gpu)?))
}

/// The plots of one process; those without a sample are left out.
pub(super) fn plots(observed: &Observed) -> String {
    let mhz = |clock: Option<u32>| clock.map(f64::from);
    let clocks = [
        series("cores", observed, |d| d.cpu_mhz),
        of_gpu("SM", observed, |g| g.sm_mhz.map(f64::from)),
        of_gpu("GPU memory", observed, |g| g.memory_mhz.map(f64::from)),
    ];
    let clocks: Vec<Series> = clocks.into_iter().filter(|s| !s.points.is_empty()).collect();
    [
        lines(labels("clocks, MHz"), &clocks),
        lines(labels("GPU power, W"), &[of_gpu("power", observed, |g| g.power_w)]),
        lines(
            labels("GPU utilisation, %"),
            &[series("busy", observed, |d| mhz(d.gpu(observed.gpu)?.utilisation_percent))],
        ),
        lines(labels("GPU temperature, degrees Celsius"), &[of_gpu("degrees", observed, |g| g.celsius.map(f64::from))]),
    ]
    .concat()
}

/// The judged clock and the power of every process, pair by pair.
pub(super) fn plots_of_pairs(c: &Comparison) -> String {
    let pairs = c.runs.iter().map(|r| r.pair + 1).max().unwrap_or(0);
    let mut out = String::new();
    for pair in 0..pairs {
        let runs: Vec<&VariantRun> = c.runs.iter().filter(|r| r.pair == pair).collect();
        for few in runs.chunks(LINES_MAX) {
            let all = |of: fn(&VariantRun) -> Series| -> Vec<Series> {
                few.iter().map(|r| of(r)).filter(|s| !s.points.is_empty()).collect()
            };
            let sm = all(|r| of_gpu(&r.variant, &r.observed, |g| g.sm_mhz.map(f64::from)));
            let cores = all(|r| series(&r.variant, &r.observed, |d| d.cpu_mhz));
            let power = all(|r| of_gpu(&r.variant, &r.observed, |g| g.power_w));
            for (what, figure) in [("SM clock, MHz", sm), ("clock of the cores, MHz", cores), ("GPU power, W", power)] {
                out.push_str(&lines(labels(&format!("pair {}: {what}", pair + 1)), &figure));
            }
        }
    }
    out
}

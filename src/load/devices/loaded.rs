//! Medians under load, by which processes are judged comparable. Pure.

use serde::Serialize;

use super::{DeviceSample, GpuSample};
use crate::load::stats::{percent_change, quantile};

/// Figures that differ by a greater share make a pair doubtful.
const DIFFERENCE_MAX: f64 = 0.01;

/// Medians of one process over the samples taken while its server had work.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Loaded {
    /// Samples under load.
    pub samples: usize,
    /// CPU clock.
    pub cpu_mhz: Option<f64>,
    /// SM clock of the GPU that is compared.
    pub sm_mhz: Option<f64>,
    /// Its memory clock.
    pub memory_mhz: Option<f64>,
    /// Its power.
    pub power_w: Option<f64>,
    /// Its utilisation.
    pub utilisation_percent: Option<f64>,
}

/// One figure of two processes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadedFigure {
    /// A name of `Loaded`.
    pub figure: &'static str,
    /// The control's.
    pub control: Option<f64>,
    /// The variant's.
    pub variant: Option<f64>,
    /// The change in percent.
    pub percent: Option<f64>,
    /// The two differ by more than 1 %; absent when one is not known.
    pub differs: Option<bool>,
}

/// The two processes of a pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadedPair {
    /// Which pair.
    pub pair: usize,
    /// The variant that is compared with the control.
    pub variant: String,
    /// A clock that the work depends on differs by more than 1 %; absent when it is not known.
    pub clocks_differ: Option<bool>,
    /// Every figure.
    pub figures: Vec<LoadedFigure>,
}

type FigureOf = fn(&Loaded) -> Option<f64>;

/// The figures that are compared.
const FIGURES: [(&str, FigureOf); 4] = [
    ("cpu_mhz", |l| l.cpu_mhz),
    ("sm_mhz", |l| l.sm_mhz),
    ("memory_mhz", |l| l.memory_mhz),
    ("power_w", |l| l.power_w),
];

fn differ(a: Option<f64>, b: Option<f64>) -> Option<bool> {
    let (a, b) = (a?, b?);
    Some((a - b).abs() > DIFFERENCE_MAX * a.max(b))
}

impl Loaded {
    /// Medians over the samples for whose time `busy` says that the server had work.
    pub fn of(devices: &[DeviceSample], gpu: u32, busy: impl Fn(f64) -> bool) -> Self {
        let under_load: Vec<&DeviceSample> = devices.iter().filter(|d| busy(d.t_s)).collect();
        let median = |figure: &dyn Fn(&DeviceSample) -> Option<f64>| {
            let mut values: Vec<f64> = under_load.iter().filter_map(|d| figure(d)).collect();
            values.sort_by(f64::total_cmp);
            quantile(&values, 0.5)
        };
        let of_gpu = |figure: fn(&GpuSample) -> Option<f64>| median(&|d| figure(d.gpu(gpu)?));
        Self {
            samples: under_load.len(),
            cpu_mhz: median(&|d| d.cpu_mhz),
            sm_mhz: of_gpu(|g| g.sm_mhz.map(f64::from)),
            memory_mhz: of_gpu(|g| g.memory_mhz.map(f64::from)),
            power_w: of_gpu(|g| g.power_w),
            utilisation_percent: of_gpu(|g| g.utilisation_percent.map(f64::from)),
        }
    }

    /// The work was the GPU's, as far as its utilisation tells.
    fn on_gpu(&self) -> bool {
        self.sm_mhz.is_some() && self.utilisation_percent != Some(0.0)
    }

    /// The clocks that the work depends on differ by more than 1 %: the GPU's two where one of the processes used it, the CPU's
    /// otherwise. Absent when they are not known.
    pub fn clocks_differ(&self, other: &Self) -> Option<bool> {
        if !(self.on_gpu() || other.on_gpu()) {
            return differ(self.cpu_mhz, other.cpu_mhz);
        }
        let (sm, memory) = (differ(self.sm_mhz, other.sm_mhz), differ(self.memory_mhz, other.memory_mhz));
        if memory == Some(true) { memory } else { sm }
    }

    /// Compares the two processes of a pair; `self` is the control's.
    pub fn pair(&self, pair: usize, variant: &str, other: &Self) -> LoadedPair {
        let figures = FIGURES.map(|(figure, of)| {
            let (control, variant) = (of(self), of(other));
            let percent = control.zip(variant).and_then(|(a, b)| percent_change(a, b));
            LoadedFigure { figure, control, variant, percent, differs: differ(control, variant) }
        });
        let clocks_differ = self.clocks_differ(other);
        LoadedPair { pair, variant: variant.to_owned(), clocks_differ, figures: figures.into() }
    }

    /// One line for the terminal; absent figures are dashes.
    pub fn line(&self) -> String {
        let shown = crate::load::report::table::figure;
        format!(
            "CPU {} MHz, SM {} MHz, memory {} MHz, {} W",
            shown(self.cpu_mhz),
            shown(self.sm_mhz),
            shown(self.memory_mhz),
            shown(self.power_w)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(t_s: f64, cpu_mhz: Option<f64>, sm_mhz: Option<u32>) -> DeviceSample {
        let gpu = |index, sm_mhz| GpuSample { index, sm_mhz, utilisation_percent: Some(90), ..GpuSample::default() };
        DeviceSample { t_s, cpu_mhz, load_average: None, gpus: vec![gpu(0, sm_mhz), gpu(1, Some(210))] }
    }

    #[test]
    fn loaded_medians_leave_idle_seconds_out_and_keep_to_one_gpu() {
        let devices = [
            sample(0.0, Some(800.0), Some(345)),
            sample(1.0, Some(3_000.0), Some(1_980)),
            sample(2.0, Some(3_100.0), Some(1_970)),
            sample(3.0, Some(800.0), Some(345)),
        ];
        let busy = |t_s: f64| (0.5..2.5).contains(&t_s);
        let loaded = Loaded::of(&devices, 0, busy);
        assert_eq!((loaded.samples, loaded.cpu_mhz, loaded.sm_mhz), (2, Some(3_050.0), Some(1_975.0)));
        assert_eq!(Loaded::of(&devices, 1, busy).sm_mhz, Some(210.0));
        assert_eq!(Loaded::of(&devices, 2, busy).sm_mhz, None, "there is no such GPU");
    }

    #[test]
    fn a_figure_that_no_sample_has_is_absent_and_not_0() {
        let loaded = Loaded::of(&[sample(0.0, None, None), sample(1.0, None, None)], 0, |_| true);
        assert_eq!((loaded.samples, loaded.cpu_mhz, loaded.sm_mhz, loaded.power_w), (2, None, None, None));
        let json = serde_json::to_value(Loaded::of(&[], 0, |_| true)).expect("JSON");
        assert!(json["sm_mhz"].is_null() && json["power_w"].is_null() && json["cpu_mhz"].is_null());
        assert_eq!(loaded.line(), "CPU - MHz, SM - MHz, memory - MHz, - W");
    }

    #[test]
    fn pairs_differ_from_one_percent_on_and_unknown_is_neither() {
        let cpu = |mhz| Loaded { cpu_mhz: mhz, ..Loaded::default() };
        assert_eq!(cpu(Some(3_000.0)).clocks_differ(&cpu(Some(2_971.0))), Some(false));
        assert_eq!(cpu(Some(3_000.0)).clocks_differ(&cpu(Some(2_969.0))), Some(true));
        assert_eq!(cpu(Some(3_000.0)).clocks_differ(&cpu(None)), None);
        let pair = cpu(Some(3_000.0)).pair(2, "b", &cpu(Some(2_900.0)));
        assert_eq!((pair.pair, pair.clocks_differ, pair.figures.len()), (2, Some(true), 4));
        let marks: Vec<_> = pair.figures.iter().map(|f| (f.figure, f.differs)).collect();
        assert_eq!(marks, [("cpu_mhz", Some(true)), ("sm_mhz", None), ("memory_mhz", None), ("power_w", None)]);
    }

    #[test]
    fn the_clock_is_the_gpus_where_it_worked_and_the_cpus_where_it_idled() {
        let of = |cpu, sm, memory, utilisation| Loaded {
            cpu_mhz: Some(cpu),
            sm_mhz: Some(sm),
            memory_mhz: Some(memory),
            utilisation_percent: Some(utilisation),
            ..Loaded::default()
        };
        let (a, b) = (of(3_000.0, 1_980.0, 3_201.0, 90.0), of(2_000.0, 1_980.0, 3_201.0, 90.0));
        assert_eq!(a.clocks_differ(&b), Some(false), "the CPU's clock is not what a GPU's work depends on");
        assert_eq!(a.clocks_differ(&of(3_000.0, 1_900.0, 3_201.0, 90.0)), Some(true));
        assert_eq!(a.clocks_differ(&of(3_000.0, 1_980.0, 2_619.0, 90.0)), Some(true), "its memory's counts too");
        let (a, b) = (of(3_000.0, 345.0, 3_201.0, 0.0), of(2_000.0, 345.0, 3_201.0, 0.0));
        assert_eq!(a.clocks_differ(&b), Some(true), "an idle GPU says nothing");
    }
}

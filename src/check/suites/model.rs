//! GPU against CPU at every position: six synthetic geometries in every format, or the model of a file.

use super::{Extent, Failure, Options, SOLO, Stage, Suite};
use crate::backend::Rule;
use crate::check::Dice;
use crate::check::models::{Setup, Shape, Source, Which};
use crate::check::play::{Observe, Pages, Sequence, Style};
use crate::model::{MatrixFormat, Profile};

const FORMATS: [(Profile, MatrixFormat); 5] = [
    (Profile::F32, MatrixFormat::F32),
    (Profile::Int8, MatrixFormat::F32),
    (Profile::Q8, MatrixFormat::Q8_0),
    (Profile::Q8, MatrixFormat::Q4_0),
    (Profile::Q8, MatrixFormat::Q4_1),
];

/// Runs over every geometry, or over the file of the options; returns the failures.
pub(super) fn run(options: &Options) -> Result<u64, Failure> {
    let chosen = |p: &Profile| options.profiles.contains(p);
    let mut failures = 0;
    if matches!(options.source, Source::File(_)) {
        for &profile in &options.profiles {
            failures += compare(options, profile, MatrixFormat::Q8_0, &[1, 2, 16, 17, 64, 129, 257, 300, 530])?;
        }
        return Ok(failures);
    }
    let shapes = Shape::ALL.into_iter().filter(|&s| s != Shape::Seed || options.extent == Extent::Full);
    for shape in shapes {
        for (profile, format) in FORMATS.into_iter().filter(|(p, _)| chosen(p)) {
            let lens: &[usize] =
                if shape == Shape::Seed { &[1, 37, 290] } else { &[1, 7, 16, 33, 64, 130, 257, 300, 520, 1100] };
            let on = Options { source: Source::Shape(shape), ..options.clone() };
            failures += compare(&on, profile, format, lens)?;
        }
    }
    Ok(failures)
}

/// Prompts of these lengths, greedy at every position, then sampled: alone, then packed, against the CPU.
fn compare(on: &Options, profile: Profile, format: MatrixFormat, lens: &[usize]) -> Result<u64, Failure> {
    let name = format!("Model {} {format:?} {} Cuda = Cpu", profile.name(), on.source.name());
    let dice = Dice::new(on.seed ^ ((Suite::Model as u64) << 32));
    let mut stage = Stage::over(on.source.weights(profile, format)?, name, dice, profile, on);
    let file = matches!(on.source, Source::File(_));
    let (pages, generate) = if file { (512, 16) } else { (2048, 4) };
    let setup = |which| Setup { which, pages, logit_rows: 1280, ..stage.setup() };
    let (cpu, cuda) = (setup(Which::Cpu), setup(Which::Cuda));
    let (mut cpu, mut gpu) = (stage.open(&cpu)?, stage.open(&cuda)?);

    let greedy: Vec<Sequence> =
        lens.iter().map(|&n| Sequence { rule: Rule::Greedy, ..stage.sequence(n, generate) }).collect();
    let sampled: Vec<Sequence> = lens.iter().map(|&n| stage.sequence(n, generate)).collect();
    let mut positions = 0;
    for (sequences, observe) in [(&greedy, Observe::Everything), (&sampled, SOLO)] {
        let alone = Style::solo(observe);
        let crowded =
            Style { resident: 8, budget: 512, chunk: 100, ahead: 2, shuffle: 9, pages: Pages::Shuffled, ..alone };
        let want = stage.play(&mut cpu, sequences, &alone)?;
        let solo = stage.play(&mut gpu, sequences, &alone)?;
        stage.expect("solo", sequences, &solo, &want);
        let together = stage.play(&mut gpu, sequences, &crowded)?;
        stage.expect("crowded", sequences, &together, &want);
        positions += want.iter().map(|t| t.logits.len()).sum::<usize>();
    }
    let prompts: usize = greedy.iter().map(|s| s.prompt.len()).sum();
    say!("  logits of {positions} positions, {prompts} of them of prompts, each alone and packed");
    stage.reached("every position of every prompt", positions >= prompts);
    stage.print();
    Ok(stage.tally.failures())
}

//! What clients ask for, and what each gets when it is alone: one sequence at a time through a backend of its own with the
//! reference attention, a whole prompt in one pass.

use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};

use crucible::actors::session::messages::GeneratedToken;
use crucible::admission::RequestId;
use crucible::arith::adjust::adjust;
use crucible::arith::select::token_logprobs;
use crucible::backend::cpu::{CpuBackend, CpuConfig, Isa};
use crucible::backend::driver::Driver;
use crucible::backend::{
    Adjust, AttentionVariant, HostLogits, Input, LogprobsWanted, Row, RowOutput, Rule, SamplingRow, SlotBinding, Start,
    TokenLogprobs, Want,
};
use crucible::model::load::{self, LoadedModel, ModelSource};
use crucible::model::tokenizer::Tokenizer;
use crucible::model::{Geometry, MatrixFormat, ModelWeights, Profile, RopePairing};

use super::seeded::Seeded;

/// Positions per page.
pub const PAGE: usize = 16;
/// Longest sequence of the model.
pub const CONTEXT: usize = 128;
/// Vocabulary of the model.
const VOCAB: usize = 320;
/// Choices of which every kind knows the solo run.
pub const CHOICES: usize = 3;
/// Most tokens that a kind generates.
const LONGEST_ANSWER: usize = 20;
const LONGEST_PROMPT: usize = 70;
/// Kinds in a profile's catalogue.
const KINDS: usize = 48;

/// A request, but for its length, its ends and its client.
pub struct Kind {
    pub prompt: Arc<[u32]>,
    pub max_new_tokens: usize,
    pub rule: Rule,
    /// Penalties and bias, of which at least one has an effect.
    pub adjust: Option<Arc<Adjust>>,
    pub seed: u64,
    pub logprobs: LogprobsWanted,
    /// Where its prompt is scored: the scores of its tokens but the first.
    pub scores: Option<Vec<TokenLogprobs>>,
    /// `[choice]`: the tokens that it gets alone.
    pub alone: Vec<Vec<GeneratedToken>>,
}

/// A profile's model and what can be asked of it.
pub struct Catalogue {
    pub profile: Profile,
    pub weights: ModelWeights,
    pub tokenizer: Tokenizer,
    pub kinds: Vec<Kind>,
}

/// The catalogue of one of the three profiles.
pub fn of(profile: usize) -> &'static Catalogue {
    static ALL: [OnceLock<Catalogue>; 3] = [const { OnceLock::new() }; 3];
    ALL[profile].get_or_init(|| catalogue([Profile::Q8, Profile::F32, Profile::Int8][profile]))
}

impl Catalogue {
    /// A fresh backend over the model.
    pub fn backend(
        &self,
        attention: AttentionVariant,
        pages: usize,
        slots: usize,
        max_step_tokens: usize,
    ) -> CpuBackend {
        let config = CpuConfig { threads: 1, isa: Isa::Auto, pages, page_tokens: PAGE, slots, max_step_tokens };
        CpuBackend::with_attention(attention, self.weights.clone(), self.profile, config).expect("a small backend")
    }
}

fn catalogue(profile: Profile) -> Catalogue {
    let geometry = Geometry {
        layers: 1,
        hidden: 64,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        ffn: 64,
        vocab: VOCAB,
        context: CONTEXT,
        rope_base: 10_000.0,
        rms_eps: 1e-5,
        rope_pairing: RopePairing::Halves,
    };
    let source = ModelSource::Synthetic { geometry, block: MatrixFormat::Q8_0, seed: 11 };
    let LoadedModel { weights, tokenizer, .. } = load::load(&source, profile).expect("a synthetic model");
    let mut catalogue = Catalogue { profile, weights, tokenizer, kinds: Vec::new() };
    let pages = CONTEXT / PAGE;
    let backend = catalogue.backend(AttentionVariant::Reference, pages, 1, LONGEST_PROMPT);
    let mut alone = Alone { driver: Driver::new(Box::new(backend)), runs: 0 };
    let mut random = Seeded::new(5);
    catalogue.kinds = (0..KINDS).map(|_| kind(&mut random, &mut alone)).collect();
    let moved =
        |kind: &&Kind| kind.adjust.is_some() && alone.run(&Kind { adjust: None, ..kind.bare() }, 0) != kind.alone[0];
    let moved = catalogue.kinds.iter().filter(moved).count();
    assert!(moved >= KINDS / 8, "penalties and bias move only {moved} answers");
    catalogue
}

impl Kind {
    /// What is asked for, without the answer.
    fn bare(&self) -> Kind {
        Kind { prompt: Arc::clone(&self.prompt), adjust: self.adjust.clone(), scores: None, alone: Vec::new(), ..*self }
    }
}

/// Penalties, a bias, or both, in half of the kinds.
fn drawn_adjust(random: &mut Seeded, vocab: usize) -> Option<Arc<Adjust>> {
    let presence = [0.0, 0.0, 1.25, -0.5][random.below(4)];
    let frequency = [0.0, 0.0, 0.75, -1.5][random.below(4)];
    let biased = if random.below(3) == 0 { 1 + random.below(20) } else { 0 };
    let first = random.below(vocab);
    let bias = (0..biased).map(|n| (((first + n * 13) % vocab) as u32, [6.0, -6.0, 0.3][n % 3]));
    adjust(presence, frequency, bias).map(Arc::new)
}

fn kind(random: &mut Seeded, alone: &mut Alone) -> Kind {
    let rule = match random.below(3) {
        0 => Rule::Greedy,
        _ => Rule::Sampled {
            inv_temperature: [1.0, 0.5, 1.25][random.below(3)],
            top_k: [None, NonZeroU32::new(40)][random.below(2)],
            top_p: [1 << 32, 0xe666_6666][random.below(2)],
            min_p: 0.0,
        },
    };
    let mut kind = Kind {
        prompt: (0..1 + random.below(LONGEST_PROMPT)).map(|_| random.below(256) as u32).collect(),
        max_new_tokens: 1 + random.below(LONGEST_ANSWER),
        rule,
        adjust: drawn_adjust(random, VOCAB),
        seed: random.bits(),
        logprobs: [None, Some(0), Some(3)][random.below(3)],
        scores: None,
        alone: Vec::new(),
    };
    if kind.logprobs.is_some() && kind.prompt.len() > 1 && random.below(3) > 0 {
        kind.scores = Some(alone.scores(&kind));
    }
    kind.alone = (0..CHOICES as u32).map(|choice| alone.run(&kind, choice)).collect();
    kind
}

/// A backend in which one sequence at a time lives.
struct Alone {
    driver: Driver,
    runs: u64,
}

impl Alone {
    /// A fresh sequence in the only slot.
    fn binding(&mut self, kind: &Kind) -> SlotBinding {
        self.runs += 1;
        let pages = (0..(CONTEXT / PAGE) as u32).collect();
        SlotBinding { slot: 0, request: RequestId(self.runs), pages, adjust: kind.adjust.clone() }
    }

    fn step(&mut self, bindings: Vec<SlotBinding>, row: Row, tokens: Vec<u32>) -> RowOutput {
        let output = self.driver.run(bindings, vec![row], tokens).expect("a step alone");
        output.rows.into_iter().next().expect("a row")
    }

    /// The row of a whole prompt.
    fn row(&self, kind: &Kind, choice: u32) -> Row {
        Row {
            request: RequestId(self.runs),
            slot: 0,
            start: Start::Host(0),
            len: kind.prompt.len() as u32,
            input: Input::Tokens,
            want: Want::Last,
            sampling: SamplingRow { rule: kind.rule, seed: kind.seed, token_index: 0, choice },
            logprobs: kind.logprobs,
            host_logits: HostLogits::No,
        }
    }

    fn run(&mut self, kind: &Kind, choice: u32) -> Vec<GeneratedToken> {
        let (mut bindings, mut prompt) = (vec![self.binding(kind)], kind.prompt.to_vec());
        let mut row = self.row(kind, choice);
        let token = |index: u32| {
            row.sampling.token_index = index;
            let selected = self.step(std::mem::take(&mut bindings), row.clone(), std::mem::take(&mut prompt));
            (row.start, row.len, row.input) = (Start::Device, 1, Input::DeviceLast);
            GeneratedToken { id: selected.tokens[0], index, logprobs: selected.logprobs.into_iter().next() }
        };
        (0..kind.max_new_tokens as u32).map(token).collect()
    }

    /// What the prompt's tokens but the first score, from the logits of the whole prompt in one pass.
    fn scores(&mut self, kind: &Kind) -> Vec<TokenLogprobs> {
        let bindings = vec![self.binding(kind)];
        let row = Row { want: Want::All, logprobs: None, host_logits: HostLogits::Yes, ..self.row(kind, 0) };
        let logits = self.step(bindings, row, kind.prompt.to_vec()).logits;
        let top = kind.logprobs.unwrap_or(0).into();
        logits.iter().zip(&kind.prompt[1..]).map(|(logits, &id)| token_logprobs(logits, id, top)).collect()
    }
}

//! The last check before a device (I9): a step becomes a `ValidStep` only when every shape, page, position and token is in bounds.
//!
//! The validator follows every slot from step to step: its request, its pages, its position, whether it has a selected token. A
//! step is checked completely before anything is remembered, so that a refused step leaves no trace. Nobody tells the validator
//! that a sequence has ended: a binding that takes pages of an older binding revokes that older slot, and a later row of a revoked
//! slot is refused. Two sequences therefore never write one page.

use super::step::{Adjust, HostLogits, Input, Row, Rule, SlotBinding, Start, Step, Want};
use crate::admission::RequestId;
use crate::arith::MAX_BIAS;

/// Bounds a step is checked against.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Physical pages.
    pub pages: usize,
    /// Positions per page.
    pub page_tokens: usize,
    /// Slots.
    pub slots: usize,
    /// Most token rows.
    pub max_step_tokens: usize,
    /// Most positions whose logits the host reads.
    pub host_logit_rows: usize,
    /// Longest sequence.
    pub context: usize,
    /// Vocabulary size.
    pub vocab: usize,
}

/// What is wrong with a step. Rows and bindings are named by slot.
#[allow(missing_docs)] // the messages say what each field is
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum PlanError {
    #[error("step id {id} does not follow {last}, ids must ascend from 1")]
    StepOrder { id: u64, last: u64 },
    #[error("the step has no rows")]
    EmptyStep,
    #[error("the step has {rows} token rows, the limit is {limit}")]
    TooManyTokenRows { rows: usize, limit: usize },
    #[error("the step wants logits of {rows} positions on the host, the limit is {limit}")]
    TooManyHostLogits { rows: usize, limit: usize },
    #[error("the step carries {given} tokens, its rows need {needed}")]
    TokenCount { given: usize, needed: usize },
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { id: u32, vocab: usize },
    #[error("binding of slot {slot}: there are {slots} slots")]
    BindingSlotOutOfRange { slot: u32, slots: usize },
    #[error("slot {slot} is bound twice in one step")]
    BoundTwice { slot: u32 },
    #[error("request {request} is bound to slot {slot} while slot {other} is its own")]
    RequestBoundElsewhere { request: RequestId, slot: u32, other: u32 },
    #[error("binding of slot {slot}: the page table is empty")]
    EmptyTable { slot: u32 },
    #[error("binding of slot {slot}: {pages} pages exceed the context, which needs {limit}")]
    TableTooLong { slot: u32, pages: usize, limit: usize },
    #[error("binding of slot {slot}: page {page} is outside the pool of {pages}")]
    PageOutOfRange { slot: u32, page: u32, pages: usize },
    #[error("binding of slot {slot}: page {page} stands twice in its table")]
    PageRepeated { slot: u32, page: u32 },
    #[error("binding of slot {slot}: page {page} belongs to slot {owner} in the same step")]
    PageOwned { slot: u32, page: u32, owner: u32 },
    #[error("binding of slot {slot}: a penalty or bias is {value}, it must lie in -{limit}..={limit}")]
    AdjustOutOfRange { slot: u32, value: f32, limit: f32 },
    #[error("binding of slot {slot}: {entries} biases exceed the limit of {MAX_BIAS}")]
    TooManyBiases { slot: u32, entries: usize },
    #[error(
        "binding of slot {slot}: the bias of token id {id} is outside the vocabulary of {vocab} or not in ascending order"
    )]
    BiasId { slot: u32, id: u32, vocab: usize },
    #[error("row of slot {slot}: there are {slots} slots")]
    SlotOutOfRange { slot: u32, slots: usize },
    #[error("slot {slot} has two rows in one step")]
    SlotRepeated { slot: u32 },
    #[error("row of slot {slot}: its length is 0")]
    EmptyRow { slot: u32 },
    #[error("row of slot {slot}: the slot was never bound")]
    Unbound { slot: u32 },
    #[error("row of slot {slot}: the slot lost its pages or its request to slot {to}, bind it again")]
    Revoked { slot: u32, to: u32 },
    #[error("row of slot {slot}: it names {given}, the slot holds {bound}")]
    RequestMismatch { slot: u32, given: RequestId, bound: RequestId },
    #[error("row of slot {slot}: it starts at {start}, the slot stands at {position}")]
    StartGap { slot: u32, start: u32, position: u32 },
    #[error("row of slot {slot}: it starts at the device's position, but nothing was computed for this slot yet")]
    DeviceStartFresh { slot: u32 },
    #[error("row of slot {slot}: {end} positions exceed its table of {table}")]
    PastTable { slot: u32, end: u64, table: u64 },
    #[error("row of slot {slot}: {end} positions exceed the context of {context}")]
    PastContext { slot: u32, end: u64, context: usize },
    #[error("row of slot {slot}: a row that reads the last selected token has length 1, not {len}")]
    DeviceLastLength { slot: u32, len: u32 },
    #[error("row of slot {slot}: its last row selected no token to read")]
    NoLastToken { slot: u32 },
    #[error("row of slot {slot}: inv_temperature is {value}, it must be finite and above 0")]
    InvTemperature { slot: u32, value: f32 },
    #[error("row of slot {slot}: top_p is {value}, it must lie in 1..=2^32")]
    TopP { slot: u32, value: u64 },
    #[error("row of slot {slot}: min_p is {value}, it must lie between 0 and 1")]
    MinP { slot: u32, value: f32 },
    #[error("row of slot {slot}: {wanted} log-probabilities are wanted of a vocabulary of {vocab}")]
    TooManyLogprobs { slot: u32, wanted: u8, vocab: usize },
    #[error("row of slot {slot}: its token indices pass the end of 32 bits")]
    TokenIndexOverflow { slot: u32 },
}

/// A step that passed every check; only `StepValidator` makes one.
#[derive(Clone, Debug)]
pub struct ValidStep(Step);

impl ValidStep {
    /// The checked step.
    pub fn step(&self) -> &Step {
        &self.0
    }

    /// Gives the step up.
    pub fn into_step(self) -> Step {
        self.0
    }
}

/// What is known of a slot after the last accepted step.
#[derive(Clone, Debug, PartialEq)]
enum SlotState {
    Unbound,
    Revoked { to: u32 },
    Bound(Bound),
}

#[derive(Clone, Debug, PartialEq)]
struct Bound {
    request: RequestId,
    pages: Vec<u32>,
    position: u32,
    has_last: bool,
}

/// What a row of this step sees of its slot: the binding of the same step, or the state before it.
struct View {
    request: RequestId,
    pages: usize,
    position: u32,
    has_last: bool,
}

/// Marks that are only valid within one step: an entry counts when it holds the current stamp.
#[derive(Debug, Default)]
struct Marks {
    stamp: u64,
    binding_of_slot: Vec<(u64, u32)>,
    row_of_slot: Vec<u64>,
    slot_of_page: Vec<(u64, u32)>,
}

/// Positions of a row whose logits the host reads.
fn host_logit_rows(row: &Row) -> usize {
    if row.logprobs.is_none() && row.host_logits == HostLogits::No {
        return 0;
    }
    match row.want {
        Want::None => 0,
        Want::Last => 1,
        Want::All => row.len as usize,
    }
}

/// Follows the slots from step to step and checks each step against them.
#[derive(Debug)]
pub struct StepValidator {
    limits: StepLimits,
    last_id: u64,
    slots: Vec<SlotState>,
    owner: Vec<Option<u32>>,
    marks: Marks,
}

impl StepValidator {
    /// A validator with no slot bound.
    pub fn new(limits: StepLimits) -> Self {
        let marks = Marks {
            stamp: 0,
            binding_of_slot: vec![(0, 0); limits.slots],
            row_of_slot: vec![0; limits.slots],
            slot_of_page: vec![(0, 0); limits.pages],
        };
        let slots = vec![SlotState::Unbound; limits.slots];
        Self { limits, last_id: 0, slots, owner: vec![None; limits.pages], marks }
    }

    /// Checks one step, in the order of submission.
    ///
    /// # Errors
    /// The first fault found; the validator is unchanged then.
    pub fn check(&mut self, step: Step) -> Result<ValidStep, PlanError> {
        self.marks.stamp += 1;
        if step.id <= self.last_id {
            return Err(PlanError::StepOrder { id: step.id, last: self.last_id });
        }
        if step.rows.is_empty() {
            return Err(PlanError::EmptyStep);
        }
        for (index, binding) in step.bindings.iter().enumerate() {
            self.check_binding(binding, index as u32)?;
        }
        for row in &step.rows {
            self.check_row(row, &step.bindings)?;
        }
        for (index, binding) in step.bindings.iter().enumerate() {
            self.check_request_is_free(binding, &step.bindings[..index])?;
        }
        self.check_totals(&step)?;
        self.check_taken_pages(&step.bindings)?;
        self.commit(&step);
        Ok(ValidStep(step))
    }

    fn check_binding(&mut self, binding: &SlotBinding, index: u32) -> Result<(), PlanError> {
        let (limits, slot) = (self.limits, binding.slot);
        if slot as usize >= limits.slots {
            return Err(PlanError::BindingSlotOutOfRange { slot, slots: limits.slots });
        }
        let mark = &mut self.marks.binding_of_slot[slot as usize];
        if mark.0 == self.marks.stamp {
            return Err(PlanError::BoundTwice { slot });
        }
        *mark = (self.marks.stamp, index);
        if binding.pages.is_empty() {
            return Err(PlanError::EmptyTable { slot });
        }
        let limit = limits.context.div_ceil(limits.page_tokens);
        if binding.pages.len() > limit {
            return Err(PlanError::TableTooLong { slot, pages: binding.pages.len(), limit });
        }
        for &page in &binding.pages {
            if page as usize >= limits.pages {
                return Err(PlanError::PageOutOfRange { slot, page, pages: limits.pages });
            }
            let mark = &mut self.marks.slot_of_page[page as usize];
            if mark.0 == self.marks.stamp {
                return Err(match mark.1 {
                    owner if owner == slot => PlanError::PageRepeated { slot, page },
                    owner => PlanError::PageOwned { slot, page, owner },
                });
            }
            *mark = (self.marks.stamp, slot);
        }
        binding.adjust.as_ref().map_or(Ok(()), |adjust| check_adjust(slot, adjust, limits.vocab))
    }

    /// A request has rows in one slot only. Binding it to another slot (preempted and resumed) revokes the older one.
    fn check_request_is_free(&self, binding: &SlotBinding, earlier: &[SlotBinding]) -> Result<(), PlanError> {
        let (request, slot) = (binding.request, binding.slot);
        let elsewhere = |other: u32| PlanError::RequestBoundElsewhere { request, slot, other };
        if let Some(b) = earlier.iter().find(|b| b.request == request) {
            return Err(elsewhere(b.slot));
        }
        for (other, state) in self.slots.iter().enumerate() {
            let rebound = self.marks.binding_of_slot[other].0 == self.marks.stamp;
            let has_row = self.marks.row_of_slot[other] == self.marks.stamp;
            if !rebound && has_row && matches!(state, SlotState::Bound(b) if b.request == request) {
                return Err(elsewhere(other as u32));
            }
        }
        Ok(())
    }

    fn view(&self, slot: u32, bindings: &[SlotBinding]) -> Result<View, PlanError> {
        let (stamp, index) = self.marks.binding_of_slot[slot as usize];
        if stamp == self.marks.stamp {
            let b = &bindings[index as usize];
            return Ok(View { request: b.request, pages: b.pages.len(), position: 0, has_last: false });
        }
        match &self.slots[slot as usize] {
            SlotState::Unbound => Err(PlanError::Unbound { slot }),
            SlotState::Revoked { to } => Err(PlanError::Revoked { slot, to: *to }),
            SlotState::Bound(b) => {
                Ok(View { request: b.request, pages: b.pages.len(), position: b.position, has_last: b.has_last })
            }
        }
    }

    fn check_row(&mut self, row: &Row, bindings: &[SlotBinding]) -> Result<(), PlanError> {
        let (limits, slot) = (self.limits, row.slot);
        if slot as usize >= limits.slots {
            return Err(PlanError::SlotOutOfRange { slot, slots: limits.slots });
        }
        if std::mem::replace(&mut self.marks.row_of_slot[slot as usize], self.marks.stamp) == self.marks.stamp {
            return Err(PlanError::SlotRepeated { slot });
        }
        if row.len == 0 {
            return Err(PlanError::EmptyRow { slot });
        }
        let view = self.view(slot, bindings)?;
        if row.request != view.request {
            return Err(PlanError::RequestMismatch { slot, given: row.request, bound: view.request });
        }
        match row.start {
            Start::Host(start) if start != view.position => {
                return Err(PlanError::StartGap { slot, start, position: view.position });
            }
            Start::Device if view.position == 0 => return Err(PlanError::DeviceStartFresh { slot }),
            Start::Host(_) | Start::Device => {}
        }
        let end = u64::from(view.position) + u64::from(row.len);
        let table = (view.pages * limits.page_tokens) as u64;
        if end > limits.context as u64 {
            return Err(PlanError::PastContext { slot, end, context: limits.context });
        }
        if end > table {
            return Err(PlanError::PastTable { slot, end, table });
        }
        if row.input == Input::DeviceLast && row.len != 1 {
            return Err(PlanError::DeviceLastLength { slot, len: row.len });
        }
        if row.input == Input::DeviceLast && !view.has_last {
            return Err(PlanError::NoLastToken { slot });
        }
        if row.want == Want::None { Ok(()) } else { self.check_selection(row) }
    }

    fn check_selection(&self, row: &Row) -> Result<(), PlanError> {
        let (slot, vocab) = (row.slot, self.limits.vocab);
        if let Rule::Sampled { inv_temperature, top_k: _, top_p, min_p } = row.sampling.rule {
            if !(inv_temperature.is_finite() && inv_temperature > 0.0) {
                return Err(PlanError::InvTemperature { slot, value: inv_temperature });
            }
            if top_p == 0 || top_p > 1 << 32 {
                return Err(PlanError::TopP { slot, value: top_p });
            }
            if !(0.0..=1.0).contains(&min_p) {
                return Err(PlanError::MinP { slot, value: min_p });
            }
        }
        if let Some(wanted) = row.logprobs.filter(|&n| usize::from(n) > vocab) {
            return Err(PlanError::TooManyLogprobs { slot, wanted, vocab });
        }
        let wanted = if row.want == Want::All { row.len } else { 1 };
        if row.sampling.token_index.checked_add(wanted - 1).is_none() {
            return Err(PlanError::TokenIndexOverflow { slot });
        }
        Ok(())
    }

    fn check_totals(&self, step: &Step) -> Result<(), PlanError> {
        let (rows, limit) = (step.token_rows(), self.limits.max_step_tokens);
        if rows > limit {
            return Err(PlanError::TooManyTokenRows { rows, limit });
        }
        let (rows, limit) = (step.rows.iter().map(host_logit_rows).sum(), self.limits.host_logit_rows);
        if rows > limit {
            return Err(PlanError::TooManyHostLogits { rows, limit });
        }
        let needed = step.rows.iter().filter(|r| r.input == Input::Tokens).map(|r| r.len as usize).sum();
        if step.tokens.len() != needed {
            return Err(PlanError::TokenCount { given: step.tokens.len(), needed });
        }
        let vocab = self.limits.vocab;
        match step.tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(&id) => Err(PlanError::TokenOutOfRange { id, vocab }),
            None => Ok(()),
        }
    }

    /// Refuses a binding that takes a page of a slot that has a row in this very step.
    fn check_taken_pages(&self, bindings: &[SlotBinding]) -> Result<(), PlanError> {
        for (slot, page) in bindings.iter().flat_map(|b| b.pages.iter().map(|&p| (b.slot, p))) {
            let Some(owner) = self.owner[page as usize] else { continue };
            let rebound = self.marks.binding_of_slot[owner as usize].0 == self.marks.stamp;
            let has_row = self.marks.row_of_slot[owner as usize] == self.marks.stamp;
            if !rebound && has_row {
                return Err(PlanError::PageOwned { slot, page, owner });
            }
        }
        Ok(())
    }

    fn commit(&mut self, step: &Step) {
        self.last_id = step.id;
        for binding in &step.bindings {
            self.release(binding.slot, SlotState::Unbound);
        }
        for binding in &step.bindings {
            let older = |s: &SlotState| matches!(s, SlotState::Bound(b) if b.request == binding.request);
            if let Some(older) = self.slots.iter().position(older) {
                self.release(older as u32, SlotState::Revoked { to: binding.slot });
            }
            for &page in &binding.pages {
                if let Some(owner) = self.owner[page as usize] {
                    self.release(owner, SlotState::Revoked { to: binding.slot });
                }
                self.owner[page as usize] = Some(binding.slot);
            }
            let pages = binding.pages.clone();
            let bound = Bound { request: binding.request, pages, position: 0, has_last: false };
            self.slots[binding.slot as usize] = SlotState::Bound(bound);
        }
        for row in &step.rows {
            if let SlotState::Bound(b) = &mut self.slots[row.slot as usize] {
                b.position += row.len;
                b.has_last = row.want != Want::None;
            }
        }
    }

    fn release(&mut self, slot: u32, to: SlotState) {
        if let SlotState::Bound(b) = std::mem::replace(&mut self.slots[slot as usize], to) {
            for page in b.pages {
                self.owner[page as usize] = None;
            }
        }
    }
}

fn check_adjust(slot: u32, adjust: &Adjust, vocab: usize) -> Result<(), PlanError> {
    let entries = adjust.bias.len();
    if entries > MAX_BIAS {
        return Err(PlanError::TooManyBiases { slot, entries });
    }
    let penalties = [adjust.presence, adjust.frequency].map(|value| (value, 2.0));
    let biases = adjust.bias.iter().map(|&(_, value)| (value, 100.0));
    if let Some((value, limit)) = penalties.into_iter().chain(biases).find(|&(v, limit)| v.is_nan() || v.abs() > limit)
    {
        return Err(PlanError::AdjustOutOfRange { slot, value, limit });
    }
    let mut least = 0;
    for &(id, _) in &adjust.bias {
        if (id as usize) < least || id as usize >= vocab {
            return Err(PlanError::BiasId { slot, id, vocab });
        }
        least = id as usize + 1;
    }
    Ok(())
}

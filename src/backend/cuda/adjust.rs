//! Penalties and bias on the device: what a slot was given when it was bound, how often it has selected each token, and room for its
//! adjusted logits. Allocated once; a slot without them reads and writes none of it. The host only remembers which slots have them.

use std::rc::Rc;

use crate::arith::MAX_BIAS;
use crate::backend::Step;

use super::driver::{Device, DeviceError};
use super::memory::DeviceBuffer;

/// `Adjustment` of kernels/select.cu: a slot's penalties and the number of its biases.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Adjustment {
    pub presence: f32,
    pub frequency: f32,
    pub biases: u32,
    pub reserved: u32,
}

/// `AdjustArgs` of kernels/select.cu: addresses of what `AdjustMemory` holds.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct AdjustArgs {
    pub slots: u64,
    pub biases: u64,
    pub counts: u64,
    pub adjusted: u64,
}

/// Memory of every slot.
#[derive(Debug)]
pub struct AdjustMemory {
    slots: DeviceBuffer<Adjustment>,
    /// `[slots][MAX_BIAS]` of (id, bits of the bias).
    biases: DeviceBuffer<[u32; 2]>,
    /// `[slots][vocab]`.
    counts: DeviceBuffer<u32>,
    /// `[slots][vocab]`.
    adjusted: DeviceBuffer<f32>,
}

impl AdjustMemory {
    /// Bytes for so many slots.
    pub const fn bytes(slots: usize, vocab: usize) -> usize {
        slots * (size_of::<Adjustment>() + 8 * MAX_BIAS + 8 * vocab)
    }

    /// Allocates.
    ///
    /// # Errors
    /// Out of memory, naming what was wanted.
    pub fn new(device: &Rc<Device>, slots: usize, vocab: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            slots: DeviceBuffer::zeroed(device, "penalties", slots)?,
            biases: DeviceBuffer::zeroed(device, "biases", slots * MAX_BIAS)?,
            counts: DeviceBuffer::zeroed(device, "token counts", slots * vocab)?,
            adjusted: DeviceBuffer::zeroed(device, "adjusted logits", slots * vocab)?,
        })
    }

    /// Addresses for the kernels.
    pub fn args(&self) -> AdjustArgs {
        AdjustArgs {
            slots: self.slots.address(),
            biases: self.biases.address(),
            counts: self.counts.address(),
            adjusted: self.adjusted.address(),
        }
    }
}

/// Which slots have penalties or a bias, as of the step submitted last.
#[derive(Clone, Debug)]
pub struct AdjustedSlots(Vec<bool>);

impl AdjustedSlots {
    /// None of them.
    pub fn new(slots: usize) -> Self {
        Self(vec![false; slots])
    }

    /// Follows the bindings of a step.
    pub fn follow(&mut self, step: &Step) {
        for binding in &step.bindings {
            self.0[binding.slot as usize] = binding.adjust.is_some();
        }
    }

    /// Whether this slot has them.
    pub fn has(&self, slot: u32) -> bool {
        self.0[slot as usize]
    }
}

/// Words that the bindings of a step need at most, for so many slots.
pub const fn words_max(slots: usize) -> usize {
    slots * (5 + 2 * MAX_BIAS)
}

/// The words that `bind_adjust` reads: (slot, offset in words) a binding with penalties or a bias, then at each offset the bits of
/// presence and frequency, the number of biases, and (id, bits) of each. Also how many such bindings there are.
pub fn words(step: &Step) -> (Vec<u32>, usize) {
    let given: Vec<_> = step.bindings.iter().filter_map(|b| Some((b.slot, b.adjust.as_ref()?))).collect();
    let mut words = vec![0; 2 * given.len()];
    for (index, (slot, adjust)) in given.iter().enumerate() {
        let at = words.len() as u32;
        words[2 * index..2 * index + 2].copy_from_slice(&[*slot, at]);
        words.extend([adjust.presence.to_bits(), adjust.frequency.to_bits(), adjust.bias.len() as u32]);
        words.extend(adjust.bias.iter().flat_map(|&(id, bias)| [id, bias.to_bits()]));
    }
    (words, given.len())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::admission::RequestId;
    use crate::backend::{Adjust, SlotBinding};

    fn binding(slot: u32, adjust: Option<Adjust>) -> SlotBinding {
        SlotBinding { slot, request: RequestId(1), pages: vec![0], adjust: adjust.map(Arc::new) }
    }

    #[test]
    fn a_step_uploads_only_what_its_bindings_ask_for_and_a_rebound_slot_is_plain_again() {
        let adjust = Adjust { presence: 1.0, frequency: -0.5, bias: vec![(3, 7.0), (9, -100.0)] };
        let mut step = Step { bindings: vec![binding(4, None), binding(2, Some(adjust))], ..Step::default() };
        let bits = [1.0f32, -0.5, 7.0, -100.0].map(f32::to_bits);
        let expected = vec![2, 2, bits[0], bits[1], 2, 3, bits[2], 9, bits[3]];
        assert_eq!(words(&step), (expected, 1));
        let mut slots = AdjustedSlots::new(5);
        slots.follow(&step);
        assert!(slots.has(2) && !slots.has(4));
        step.bindings = vec![binding(2, None)];
        slots.follow(&step);
        assert!(!slots.has(2));
        assert_eq!(words(&step), (vec![], 0));
    }
}

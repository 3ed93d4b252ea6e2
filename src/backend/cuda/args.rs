//! Arguments of the kernels, field by field as kernels/ declares them. Addresses come from buffers that outlive the step.

use super::adjust::AdjustArgs;
use crate::backend::STEPS_IN_FLIGHT;

/// Rows that one block of the linear kernels of decode takes at most.
pub const FEW_ROWS: usize = 16;

/// What a linear kernel does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// out = y.
    Store = 0,
    /// out = out + y.
    Add = 1,
    /// Outputs 2i and 2i+1 are gate and up: out[i] = swiglu(gate, up).
    Swiglu = 2,
}

/// `LinearArgs` of kernels/linear.cuh.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearArgs {
    pub x: u64,
    pub w: u64,
    pub scale: u64,
    pub minimum: u64,
    pub out: u64,
    pub xq: u64,
    pub da: u64,
    pub sa: u64,
    pub oq: u64,
    pub oda: u64,
    pub osa: u64,
    pub rows: i32,
    pub n: i32,
    pub k: i32,
    pub x_stride: i32,
    pub out_stride: i32,
    pub epilogue: i32,
}

/// `NormArgs` of kernels/linear_rows_q8.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct NormArgs {
    pub weights: u64,
    pub gather: u64,
    pub eps: f32,
}

/// `NormedArgs` of kernels/linear_rows_q8.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct NormedArgs {
    pub linear: LinearArgs,
    pub norm: NormArgs,
}

/// `AttendArgs` of kernels/attention.cuh.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttendArgs {
    pub qkv: u64,
    pub out: u64,
    pub oq: u64,
    pub oda: u64,
    pub osa: u64,
    pub tok_slot: u64,
    pub tok_pos: u64,
    pub tables: u64,
    pub k_pool: u64,
    pub v_pool: u64,
    pub angles: u64,
    pub partial: u64,
    pub counters: u64,
    pub entries: u64,
    pub heads: i32,
    pub kv_heads: i32,
    pub layers: i32,
    pub layer: i32,
    pub table_stride: i32,
    pub segment: i32,
    pub max_segments: i32,
    pub adjacent: i32,
    pub capacity: i32,
    pub block_heads: i32,
    pub room: i32,
    pub scale: f32,
}

/// `RopeArgs` of kernels/rows.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RopeArgs {
    pub qkv: u64,
    pub angles: u64,
    pub tok_slot: u64,
    pub tok_pos: u64,
    pub tables: u64,
    pub k_pool: u64,
    pub v_pool: u64,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub layers: i32,
    pub layer: i32,
    pub table_stride: i32,
    pub adjacent: i32,
}

/// `EmbedArgs` of kernels/rows.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct EmbedArgs {
    pub tok_id: u64,
    pub rows: u64,
    pub tokens: u64,
    pub position: u64,
    pub last_token: u64,
    pub tok_slot: u64,
    pub tok_pos: u64,
    pub w: u64,
    pub scale: u64,
    pub minimum: u64,
    pub x: u64,
    pub n: i32,
}

/// `StepRow` of kernels/rows.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct StepRow {
    pub slot: u32,
    pub len: u32,
    pub token: u32,
    pub start: u32,
    pub input: u32,
    pub reserved: [u32; 3],
}

/// `StepRow::start` of a row that starts at the slot's position, and `StepRow::input` of one that reads the slot's last token.
pub const FROM_DEVICE: u32 = u32::MAX;

/// `SelectRow` of kernels/select.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SelectRow {
    pub seed: u64,
    pub top_p: u64,
    pub token_index: u32,
    pub choice: u32,
    pub top_k: u32,
    pub inv_temperature: f32,
    pub min_p: f32,
    pub greedy: u32,
    pub slot: u32,
    pub is_last: u32,
    pub adjusted: u32,
    pub lane: u32,
}

/// `SelectOut` of kernels/select.cu.
#[allow(missing_docs)] // named and explained there
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SelectOut {
    pub token: u32,
    pub finite: u32,
}

/// Addresses that `select_token` reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct SelectBuffers {
    /// `[rows][vocab]`, raw; only read.
    pub logits: u64,
    /// `SelectRow` a row.
    pub sampling: u64,
    /// Where results go, `SelectOut` a row: for each step in flight (`SelectRow::lane`) a buffer, page-locked memory of the host.
    pub lanes: [u64; STEPS_IN_FLIGHT],
    /// Last token of each slot.
    pub last_token: u64,
    /// Penalties, biases and counts; only touched for rows that are adjusted.
    pub adjust: AdjustArgs,
}

/// Rows of f32 to read: `x[gather[r]]` (or `x[r]` when `gather` is 0), `width` values each.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Address of the first row.
    pub x: u64,
    /// Address of the row numbers, or 0.
    pub gather: u64,
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
}

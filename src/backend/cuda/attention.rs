//! Launchers of the attention kernels, and which instantiation takes which shape.

use super::args::AttendArgs;
use super::driver::{LaunchShape, Overlap};
use super::kernels::{Kernels, LaunchError, params, require};

/// Whether the decode kernel does what `rope_kv` does, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// `rope_kv` has run.
    Apart = 0,
    /// The kernel rotates and stores.
    Fused = 1,
}

impl Fusion {
    /// What `launches` calls it.
    pub(super) const fn kernel_name(self) -> &'static str {
        match self {
            Self::Apart => "attend_decode",
            Self::Fused => "attend_decode fused",
        }
    }
}

/// (query rows, heads) of the prefill attention tiles.
pub(super) const PREFILL_TILES: [(usize, usize); 3] = [(8, 4), (4, 4), (16, 1)];

impl Kernels {
    fn check_attend(&self, kernel: &'static str, args: &AttendArgs) -> Result<(), LaunchError> {
        let AttendArgs { heads, kv_heads, segment, capacity, .. } = *args;
        let grouped = heads > 0 && kv_heads > 0 && heads % kv_heads == 0;
        require(kernel, grouped, || format!("{heads} heads over {kv_heads} KV heads"))?;
        let fits = segment > 0
            && segment % 256 == 0
            && segment <= 1024
            && capacity > 0
            && capacity <= segment
            && capacity % 64 == 0;
        require(kernel, fits, || format!("segment {segment}, capacity {capacity}"))
    }

    /// Query heads that one block of the decode kernel takes at most: HEADS of attention_decode.cu.
    pub fn decode_heads(&self) -> usize {
        if self.head_dim <= 64 { 4 } else { 2 }
    }

    /// Stages of keys and of values that a block of the decode kernel holds: DEPTH of attention_decode.cu.
    fn decode_depth(&self) -> usize {
        let few = if self.head_dim <= 64 { 2 } else { 1 };
        if self.device.shared_bytes < 160 << 10 { few } else { 2 * few }
    }

    /// Blocks in x of the decode kernel, counters an entry: at most `heads`.
    pub const fn decode_columns(heads: usize, kv_heads: usize, block_heads: usize) -> usize {
        kv_heads * (heads / kv_heads).div_ceil(block_heads)
    }

    /// Query heads of a block at least, for `entries` positions: as few as keep the blocks of short histories on the device at once. The
    /// kernel takes more where histories are long.
    pub fn block_heads(&self, heads: usize, kv_heads: usize, entries: usize) -> usize {
        let (room, most) = (self.device.multiprocessors as usize, self.decode_heads());
        let fits = |b: &usize| Self::decode_columns(heads, kv_heads, *b) * entries <= room;
        [1, 2, 4].into_iter().filter(|b| *b <= most).find(fits).unwrap_or(most)
    }

    /// Attention of `entries` single positions, a history spread over `splits` blocks.
    ///
    /// # Errors
    /// Shapes that do not fit each other, or the driver's.
    pub fn attend_decode(
        &self,
        fusion: Fusion,
        entries: usize,
        splits: usize,
        args: AttendArgs,
    ) -> Result<(), LaunchError> {
        const NAME: &str = "attend_decode";
        self.check_attend(NAME, &args)?;
        require(NAME, entries > 0 && splits > 0 && splits <= args.max_segments as usize, || {
            format!("{entries} entries, {splits} splits of {} segments", args.max_segments)
        })?;
        let (heads, d) = (self.decode_heads(), self.head_dim);
        let block_heads = args.block_heads as usize;
        require(NAME, (1..=heads).contains(&block_heads) && args.room > 0, || {
            format!("{block_heads} heads a block, room for {} blocks", args.room)
        })?;
        let shared = 4 * (heads * d + d + heads * args.capacity as usize + self.decode_depth() * 64 * (2 * d + 4));
        let columns = Self::decode_columns(args.heads as usize, args.kv_heads as usize, block_heads);
        let kernel = &self.decode[fusion as usize];
        require(NAME, shared <= kernel.shared as usize, || format!("{shared} bytes of shared memory"))?;
        let shape =
            LaunchShape { grid: (columns as u32, entries as u32, splits as u32), threads: 256, shared: shared as u32 };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, shape, Overlap::Early, params![args]) }?)
    }

    /// Query rows of a prefill attention tile for this group and score capacity.
    pub fn prefill_rows(group: usize, capacity: usize) -> usize {
        Self::prefill_tile(group, capacity).0
    }

    fn prefill_tile(group: usize, capacity: usize) -> (usize, usize) {
        match (group, capacity) {
            (1, _) => (16, 1),
            (_, ..=512) => (8, 4),
            _ => (4, 4),
        }
    }

    /// Attention of `tiles` tiles of adjacent positions.
    ///
    /// # Errors
    /// Shapes that do not fit each other, or the driver's.
    pub fn attend_prefill(&self, tiles: usize, args: AttendArgs) -> Result<(), LaunchError> {
        const NAME: &str = "attend_prefill";
        self.check_attend(NAME, &args)?;
        require(NAME, tiles > 0, || "no tiles".into())?;
        let (heads, kv_heads, capacity) = (args.heads as usize, args.kv_heads as usize, args.capacity as usize);
        let (rows, width) = Self::prefill_tile(heads / kv_heads, capacity);
        let shared = 4 * rows * width * (self.head_dim + capacity);
        let Some(kernel) = self.prefill.get(&(rows, width)) else {
            return Err(LaunchError::Shape { kernel: NAME, reason: format!("no tile of {rows} by {width}") });
        };
        require(NAME, shared <= kernel.shared as usize, || format!("{shared} bytes of shared memory"))?;
        let columns = kv_heads * (heads / kv_heads).div_ceil(width);
        let shape = LaunchShape { grid: (columns as u32, tiles as u32, 1), threads: 128, shared: shared as u32 };
        // SAFETY: one argument of the kernel's type; shapes are checked above.
        Ok(unsafe { self.device.launch(kernel, shape, Overlap::Early, params![args]) }?)
    }
}

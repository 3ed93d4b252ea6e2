//! Memory for kernels: zeroed, aligned to cache lines, mapped on huge pages where it is large; and buffers that threads share by
//! phases.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;

const LINE: usize = 64;
const HUGE: usize = 2 << 20;

/// Zeroed bytes, aligned to 64; from 4 MiB on mapped, aligned to 2 MiB, on huge pages if the system has them, and taking memory
/// only as they are written.
pub struct AlignedBytes {
    data: NonNull<u8>,
    source: Source,
    len: usize,
}

/// Where the bytes came from, to give them back.
enum Source {
    Heap(Layout),
    Map { base: NonNull<u8>, len: usize },
}

// SAFETY: the memory is owned and has no interior state; access follows the usual borrows.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `None` when the system has no such memory.
    pub fn zeroed(len: usize) -> Option<Self> {
        if len >= 2 * HUGE { Self::mapped(len) } else { Self::allocated(len) }
    }

    fn allocated(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1).checked_next_multiple_of(LINE)?, LINE).ok()?;
        // SAFETY: the layout has a size above zero.
        let data = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { data, source: Source::Heap(layout), len })
    }

    /// Maps one huge page more than needed, so that an aligned start is inside.
    fn mapped(len: usize) -> Option<Self> {
        let mapped = len.checked_next_multiple_of(HUGE)?.checked_add(HUGE)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping touches no existing memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = NonNull::new(base.cast::<u8>())?;
        let shift = base.as_ptr().align_offset(HUGE);
        // SAFETY: shift < HUGE, so the start and `len` bytes after it lie inside the mapping.
        let data = unsafe { base.add(shift) };
        #[cfg(target_os = "linux")]
        // SAFETY: the range is ours; the advice changes no contents. A refusal only costs speed.
        unsafe {
            libc::madvise(data.as_ptr().cast(), mapped - HUGE, libc::MADV_HUGEPAGE)
        };
        Some(Self { data, source: Source::Map { base, len: mapped }, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// First byte, for threads that write disjoint parts.
    pub fn as_ptr(&self) -> *mut u8 {
        self.data.as_ptr()
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        match self.source {
            // SAFETY: allocated with this layout.
            Source::Heap(layout) => unsafe { dealloc(self.data.as_ptr(), layout) },
            Source::Map { base, len } => {
                // SAFETY: mapped with this base and length, and not unmapped before.
                unsafe { libc::munmap(base.as_ptr().cast(), len) };
            }
        }
    }
}

/// One allocation that holds many matrices, so that all of them lie on huge pages.
pub struct Arena {
    bytes: Arc<AlignedBytes>,
    used: usize,
}

/// A part of an arena, owned: no other part overlaps it.
pub struct Region {
    arena: Arc<AlignedBytes>,
    at: usize,
    len: usize,
}

impl Arena {
    /// Room for `len` bytes in all; `None` when there is no memory.
    pub fn new(len: usize) -> Option<Self> {
        Some(Self { bytes: Arc::new(AlignedBytes::zeroed(len)?), used: 0 })
    }

    /// The next `len` bytes, zeroed and aligned to 64; `None` when they do not fit.
    pub fn take(&mut self, len: usize) -> Option<Region> {
        let at = self.used;
        let end = at.checked_add(len.next_multiple_of(LINE))?;
        if end > self.bytes.len() {
            return None;
        }
        self.used = end;
        Some(Region { arena: Arc::clone(&self.bytes), at, len })
    }
}

impl Region {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: inside the arena by construction, written only through `&mut self`, which no other region overlaps.
        unsafe { std::slice::from_raw_parts(self.arena.as_ptr().add(self.at), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.arena.as_ptr().add(self.at), self.len) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

/// A buffer that the compute threads fill and read in phases: between two barriers an element is either written by one thread or
/// read by any. Every access names its range and is checked against the length; disjointness is the phase's promise.
pub struct Shared<T> {
    bytes: AlignedBytes,
    len: usize,
    _cell: std::marker::PhantomData<UnsafeCell<T>>,
}

// SAFETY: elements are plain numbers; see the phases above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T: bytemuck::Zeroable + bytemuck::NoUninit> Shared<T> {
    /// `len` zeros; `None` when there is no memory.
    pub fn zeroed(len: usize) -> Option<Self> {
        let bytes = AlignedBytes::zeroed(len.checked_mul(size_of::<T>())?)?;
        Some(Self { bytes, len, _cell: std::marker::PhantomData })
    }

    /// Pointer to element `at`, of which `count` elements lie inside.
    pub fn ptr(&self, at: usize, count: usize) -> *mut T {
        assert!(at <= self.len && count <= self.len - at, "{at}+{count} lies outside a buffer of {}", self.len);
        self.bytes.as_ptr().cast::<T>().wrapping_add(at)
    }

    /// Reads `count` elements.
    ///
    /// # Safety
    /// No thread writes them in this phase.
    pub unsafe fn read(&self, at: usize, count: usize) -> &[T] {
        // SAFETY: in bounds by `ptr`, initialised, unwritten by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr(at, count), count) }
    }

    /// Writes `count` elements.
    ///
    /// # Safety
    /// No other thread touches them in this phase.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn write(&self, at: usize, count: usize) -> &mut [T] {
        // SAFETY: in bounds by `ptr`, initialised, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(at, count), count) }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }
}

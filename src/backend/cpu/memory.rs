//! Memory for kernels: zeroed, aligned to cache lines, on huge pages where it is large; and buffers that threads share by phases.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::UnsafeCell;
use std::ptr::NonNull;

const LINE: usize = 64;
const HUGE: usize = 2 << 20;

/// Zeroed bytes, aligned to 64, or to 2 MiB (and on huge pages, if the system has them) from 4 MiB on.
pub struct AlignedBytes {
    data: NonNull<u8>,
    layout: Layout,
    len: usize,
}

// SAFETY: the memory is owned and has no interior state; access follows the usual borrows.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `None` when the system has no such memory.
    pub fn zeroed(len: usize) -> Option<Self> {
        let align = if len >= 2 * HUGE { HUGE } else { LINE };
        let layout = Layout::from_size_align(len.max(1).checked_next_multiple_of(align)?, align).ok()?;
        // SAFETY: the layout has a size above zero.
        let data = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        #[cfg(target_os = "linux")]
        if align == HUGE {
            // SAFETY: the range is ours; the advice changes no contents. A refusal only costs speed.
            unsafe { libc::madvise(data.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        Some(Self { data, layout, len })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that this value owns.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes that this value owns, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
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
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.data.as_ptr(), self.layout) }
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
}

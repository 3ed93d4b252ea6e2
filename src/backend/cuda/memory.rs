//! Device memory and page-locked host memory. Every allocation of the process is counted, so that "nothing is allocated inside a step"
//! can be shown.

use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{result, sys};

use super::driver::{Device, DeviceError, failed};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Allocations of device and page-locked memory since the process began.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// `len` values of `T` on the device.
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    address: sys::CUdeviceptr,
    len: usize,
    device: Rc<Device>,
    _type: PhantomData<T>,
}

impl<T: bytemuck::Pod> DeviceBuffer<T> {
    /// Allocates; the content is whatever was there.
    ///
    /// # Errors
    /// Out of memory, naming `what` and its size.
    pub fn new(device: &Rc<Device>, what: &str, len: usize) -> Result<Self, DeviceError> {
        let bytes = (len * size_of::<T>()).max(256);
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the memory is owned by this buffer and freed once.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|error| {
            let free = device.memory().map_or(0, |m| m.0);
            let call = format!("allocating {} MiB for {what} with {} MiB free", bytes >> 20, free >> 20);
            failed(&call)(error)
        })?;
        Ok(Self { address, len, device: Rc::clone(device), _type: PhantomData })
    }

    /// Allocates and fills with zero bytes.
    ///
    /// # Errors
    /// As `new`.
    pub fn zeroed(device: &Rc<Device>, what: &str, len: usize) -> Result<Self, DeviceError> {
        let buffer = Self::new(device, what, len)?;
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// Allocates and copies.
    ///
    /// # Errors
    /// As `new`.
    pub fn from_slice(device: &Rc<Device>, what: &str, values: &[T]) -> Result<Self, DeviceError> {
        let buffer = Self::new(device, what, values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Address of value `index`.
    pub fn at(&self, index: usize) -> u64 {
        debug_assert!(index <= self.len);
        self.address + (index * size_of::<T>()) as u64
    }

    /// Sets every byte, in stream order.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill_bytes(&self, byte: u8) -> Result<(), DeviceError> {
        let bytes = self.len * size_of::<T>();
        // SAFETY: the buffer's own range.
        unsafe { result::memset_d8_async(self.address, byte, bytes, self.device.stream()) }
            .map_err(failed("cuMemsetD8Async"))
    }

    /// Sets every byte of `len` values from `offset`, in stream order.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill_range(&self, byte: u8, offset: usize, len: usize) -> Result<(), DeviceError> {
        assert!(offset + len <= self.len, "a fill must lie inside the buffer");
        // SAFETY: the range lies inside the buffer.
        unsafe { result::memset_d8_async(self.at(offset), byte, len * size_of::<T>(), self.device.stream()) }
            .map_err(failed("cuMemsetD8Async"))
    }

    /// Copies from page-locked memory in stream order.
    ///
    /// # Errors
    /// The driver's.
    pub fn upload_from(&self, source: &PinnedBuffer<T>, len: usize) -> Result<(), DeviceError> {
        assert!(len <= self.len && len <= source.block.len, "an upload of {len} values must fit both sides");
        // SAFETY: both ranges hold `len` values; the owner of `source` rewrites it only after the step's event.
        unsafe { result::memcpy_htod_async(self.address, &source.slice()[..len], self.device.stream()) }
            .map_err(failed("cuMemcpyHtoDAsync"))
    }

    /// Writes `values` from the start and waits. The copy is in stream order: one outside of the stream may return while its last part is
    /// still on its way, and a kernel of the stream would not wait for it.
    ///
    /// # Errors
    /// The driver's.
    pub fn write(&self, values: &[T]) -> Result<(), DeviceError> {
        assert!(values.len() <= self.len, "a write must fit the buffer");
        // SAFETY: the range holds the values, and they outlive the copy: the stream is empty when this returns, or the device is lost.
        unsafe { result::memcpy_htod_async(self.address, values, self.device.stream()) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        self.device.synchronise()
    }

    /// Reads `len` values from `offset` and waits for them.
    ///
    /// # Errors
    /// What a kernel left behind.
    pub fn read(&self, offset: usize, len: usize) -> Result<Vec<T>, DeviceError> {
        assert!(offset + len <= self.len, "a read must lie inside the buffer");
        self.device.synchronise()?;
        let mut values = vec![T::zeroed(); len];
        // SAFETY: the range lies inside the buffer; the copy is synchronous.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.at(offset)) }.map_err(failed("cuMemcpyDtoH"))?;
        Ok(values)
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        unsafe {
            let _ = result::free_sync(self.address);
        }
    }
}

/// Page-locked host memory; freed with its last owner.
#[derive(Debug)]
struct PinnedBlock<T> {
    address: *mut T,
    len: usize,
}

// SAFETY: plain memory that this block alone owns; who writes and who reads it when is the contract of `PinnedBuffer`.
unsafe impl<T: bytemuck::Pod + Send> Send for PinnedBlock<T> {}
// SAFETY: as above.
unsafe impl<T: bytemuck::Pod + Sync> Sync for PinnedBlock<T> {}

impl<T> Drop for PinnedBlock<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `PinnedBuffer::new`, freed once.
        unsafe {
            let _ = result::free_host(self.address.cast());
        }
    }
}

/// `len` values of `T` in page-locked host memory, cached (not write-combined) so that the host may read it.
///
/// It is written by the host while no copy from it is under way, by the device (a queued copy, a kernel that has its address) until the
/// event after that, and read at all other times: the backend's steps in flight keep these apart.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    block: Arc<PinnedBlock<T>>,
    device: Rc<Device>,
}

/// The content of a `PinnedBuffer` for another thread, to read after the copy into it has passed and before the next is queued.
#[derive(Debug)]
pub struct PinnedReader<T>(Arc<PinnedBlock<T>>);

impl<T: bytemuck::Pod> AsRef<[T]> for PinnedReader<T> {
    fn as_ref(&self) -> &[T] {
        // SAFETY: `len` initialised values; T is plain data.
        unsafe { std::slice::from_raw_parts(self.0.address, self.0.len) }
    }
}

impl<T: bytemuck::Pod> PinnedBuffer<T> {
    /// Allocates zeros.
    ///
    /// # Errors
    /// Out of page-locked memory, naming `what`.
    pub fn new(device: &Rc<Device>, what: &str, len: usize) -> Result<Self, DeviceError> {
        let bytes = (len * size_of::<T>()).max(64);
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        let call = format!("allocating {} KiB of page-locked memory for {what}", bytes >> 10);
        // SAFETY: owned by this buffer and freed once; zeroed before it is read.
        let address = unsafe {
            let address = result::malloc_host(bytes, 0).map_err(failed(&call))?;
            std::ptr::write_bytes(address.cast::<u8>(), 0, bytes);
            address.cast::<T>()
        };
        Ok(Self { block: Arc::new(PinnedBlock { address, len }), device: Rc::clone(device) })
    }

    /// Its address on the device, which shares the host's address space.
    pub fn address(&self) -> u64 {
        self.block.address as u64
    }

    /// The content; only after what writes into it has passed.
    pub fn slice(&self) -> &[T] {
        // SAFETY: `len` initialised values; T is plain data.
        unsafe { std::slice::from_raw_parts(self.block.address, self.block.len) }
    }

    /// The content, to write; only when no copy from it is under way and no reader looks.
    pub fn slice_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` initialised values, borrowed alone but for readers, which the contract keeps away.
        unsafe { std::slice::from_raw_parts_mut(self.block.address, self.block.len) }
    }

    /// The content for another thread.
    pub fn reader(&self) -> PinnedReader<T> {
        PinnedReader(Arc::clone(&self.block))
    }

    /// Copies `len` values from the device in stream order.
    ///
    /// # Errors
    /// The driver's.
    pub fn download(&mut self, offset: usize, source: u64, len: usize) -> Result<(), DeviceError> {
        assert!(offset + len <= self.block.len, "a download must fit the buffer");
        let stream = self.device.stream();
        // SAFETY: the range lies in the buffer; the caller reads it after the step's event; `source` holds `len` values.
        unsafe { result::memcpy_dtoh_async(&mut self.slice_mut()[offset..offset + len], source, stream) }
            .map_err(failed("cuMemcpyDtoHAsync"))
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: the device's own stream; afterwards no copy touches the block any more.
        unsafe {
            let _ = result::stream::synchronize(self.device.stream());
        }
    }
}

//! The device as this backend uses it: one context, one stream, kernels, events and graphs. All raw handles live here and in `memory`.
//!
//! Everything is made, used and dropped on the thread that opened the device. Handles are destroyed when their owner goes; errors of
//! destruction are ignored, the process is ending or the device is lost.

use std::cell::Cell;
use std::ffi::{CString, c_void};
use std::rc::Rc;

use cudarc::driver::{DriverError, result, sys};

use super::library;

/// A failed call of the driver.
#[derive(Debug, thiserror::Error)]
#[error("{call} failed: {reason}")]
pub struct DeviceError {
    /// What was tried.
    pub call: String,
    /// The driver's words.
    pub reason: String,
}

pub(super) fn failed(call: &str) -> impl Fn(DriverError) -> DeviceError + '_ {
    move |error| {
        let words = error.error_string().map(|s| s.to_string_lossy().into_owned());
        DeviceError { call: call.to_string(), reason: words.unwrap_or_else(|_| format!("{error:?}")) }
    }
}

/// An open device: its primary context and one stream.
#[derive(Debug)]
pub struct Device {
    device: sys::CUdevice,
    stream: sys::CUstream,
    /// The device's name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl Device {
    /// Opens device `ordinal` and makes its context current on this thread.
    ///
    /// # Errors
    /// No driver, no such device, or a driver that is too old.
    pub fn open(ordinal: usize) -> Result<Rc<Self>, DeviceError> {
        library::driver().map_err(|e| DeviceError { call: "opening the driver".into(), reason: e.to_string() })?;
        result::init().map_err(failed("cuInit"))?;
        let device = result::device::get(ordinal as i32).map_err(failed("cuDeviceGet"))?;
        let name = result::device::get_name(device).map_err(failed("cuDeviceGetName"))?;
        use sys::CUdevice_attribute_enum as A;
        let attribute = |a| {
            // SAFETY: a device that the driver gave.
            unsafe { result::device::get_attribute(device, a) }.map_err(failed("cuDeviceGetAttribute"))
        };
        let capability = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared_bytes = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32;
        // SAFETY: a device that the driver gave; the context is released in drop.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        // SAFETY: the context just retained.
        unsafe { result::ctx::set_current(context) }.map_err(failed("cuCtxSetCurrent"))?;
        let stream =
            result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed("cuStreamCreate"))?;
        Ok(Rc::new(Self { device, stream, name, capability, multiprocessors, shared_bytes }))
    }

    /// The architecture that kernels are compiled for.
    pub fn architecture(&self) -> String {
        match self.capability {
            (9, 0) => "sm_90a".to_string(),
            (10, 0) => "sm_100a".to_string(),
            (major, minor) => format!("sm_{major}{minor}"),
        }
    }

    /// Whether a kernel may be launched before its predecessor has ended (programmatic serialisation).
    pub fn overlaps_launches(&self) -> bool {
        self.capability.0 >= 9
    }

    /// The stream that everything runs on.
    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Free and total memory in bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        result::mem_get_info().map_err(failed("cuMemGetInfo"))
    }

    /// Waits until the stream is empty.
    ///
    /// # Errors
    /// What a kernel left behind.
    pub fn synchronise(&self) -> Result<(), DeviceError> {
        // SAFETY: the device's own stream.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("cuStreamSynchronize"))
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// `params` point at arguments of exactly the kernel's types, and every address in them is valid for the accesses that the kernel
    /// makes at this grid: the typed launchers check both. `Overlap::Early` only for kernels that keep the rule of `grid_wait` (linear.cuh).
    ///
    /// # Errors
    /// The driver's.
    pub(super) unsafe fn launch(
        &self,
        kernel: &Kernel,
        shape: LaunchShape,
        overlap: Overlap,
        params: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let early = overlap == Overlap::Early && self.overlaps_launches();
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid.0,
            gridDimY: shape.grid.1,
            gridDimZ: shape.grid.2,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared,
            hStream: self.stream,
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        kernel.launches.set(kernel.launches.get() + 1);
        // SAFETY: the caller's grant; the configuration and its attribute live through the call.
        unsafe { sys::cuLaunchKernelEx(&config, kernel.function, params.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(failed(&kernel.name))
    }

    /// Records the launches that `record` makes into a graph.
    ///
    /// # Errors
    /// `record`'s, or the driver's: then the stream is out of capture again, and nothing of the recording is left.
    pub fn capture<E: From<DeviceError>>(self: &Rc<Self>, record: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the device's own stream, not in capture.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(failed("cuStreamBeginCapture"))?;
        let recorded = record();
        // SAFETY: the stream is in capture; what it recorded belongs to this function, whatever came of `record`.
        let ended = unsafe { result::stream::end_capture(self.stream) }.map(Recording);
        recorded?;
        let recording = ended.map_err(failed("cuStreamEndCapture"))?;
        let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // SAFETY: the graph just recorded.
        let executable =
            unsafe { result::graph::instantiate(recording.0, flags) }.map_err(failed("cuGraphInstantiate"))?;
        let graph = Graph { executable, device: Rc::clone(self) };
        // SAFETY: a live executable graph and the device's stream.
        unsafe { result::graph::upload(graph.executable, self.stream) }.map_err(failed("cuGraphUpload"))?;
        Ok(graph)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the stream and the context reference belong to this device alone.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Grid, threads of a block, dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug)]
pub struct LaunchShape {
    /// Blocks in x, y, z.
    pub grid: (u32, u32, u32),
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared: u32,
}

/// When a kernel may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// After its predecessor.
    No,
    /// Its blocks may become resident while the predecessor ends; the kernel itself waits before it reads what a kernel of this pass wrote
    /// (linear.cuh has the rule, attention_decode.cu what it reads ahead).
    Early,
}

/// A loaded program.
#[derive(Debug)]
pub struct Module {
    module: sys::CUmodule,
    device: Rc<Device>,
}

impl Module {
    /// Loads a cubin.
    ///
    /// # Errors
    /// The driver's, when the code is not for this device.
    pub fn load(device: &Rc<Device>, cubin: &[u8]) -> Result<Rc<Self>, DeviceError> {
        // SAFETY: a whole cubin; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }.map_err(failed("cuModuleLoadData"))?;
        Ok(Rc::new(Self { module, device: Rc::clone(device) }))
    }

    /// A kernel by name, allowed all the dynamic shared memory that it can have.
    ///
    /// # Errors
    /// No such kernel.
    pub fn kernel(self: &Rc<Self>, name: &str) -> Result<Kernel, DeviceError> {
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: a live module.
        let function =
            unsafe { result::module::get_function(self.module, text) }.map_err(failed("cuModuleGetFunction"))?;
        use sys::CUfunction_attribute_enum as A;
        // SAFETY: a live function.
        unsafe {
            let fixed = result::function::get_function_attribute(function, A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
                .map_err(failed(name))?;
            let shared = self.device.shared_bytes.saturating_sub(fixed as u32);
            result::function::set_function_attribute(
                function,
                A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared as i32,
            )
            .map_err(failed(name))?;
            // One division of shared memory and L1 for all: a multiprocessor drains before it changes it, between any two kernels.
            result::function::set_function_attribute(
                function,
                A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                100,
            )
            .map_err(failed(name))?;
            let (name, launches) = (name.to_string(), Cell::new(0));
            Ok(Kernel { function, name, shared, launches, _module: Rc::clone(self) })
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: no kernel of it is left: each holds the module.
        unsafe {
            let _ = result::module::unload(self.module);
        }
    }
}

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    function: sys::CUfunction,
    name: String,
    /// Most dynamic shared memory of a block, in bytes.
    pub shared: u32,
    /// Launches since it was loaded.
    pub launches: Cell<u64>,
    _module: Rc<Module>,
}

/// A recorded graph, which an instantiated one does not need any longer.
struct Recording(sys::CUgraph);

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: this recording alone owns the graph.
        unsafe {
            let _ = result::graph::destroy(self.0);
        }
    }
}

/// An instantiated graph.
#[derive(Debug)]
pub struct Graph {
    executable: sys::CUgraphExec,
    device: Rc<Device>,
}

impl Graph {
    /// Replays it on the device's stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn replay(&self) -> Result<(), DeviceError> {
        // SAFETY: a live graph and stream of one device.
        unsafe { result::graph::launch(self.executable, self.device.stream) }.map_err(failed("cuGraphLaunch"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: this graph alone owns the executable; the driver defers destruction past running replays.
        unsafe {
            let _ = result::graph::exec_destroy(self.executable);
        }
    }
}

/// A point in the stream.
#[derive(Debug)]
pub struct Event(sys::CUevent);

impl Event {
    /// An event that can be asked and timed.
    ///
    /// # Errors
    /// The driver's.
    pub fn new() -> Result<Self, DeviceError> {
        let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
        Ok(Self(result::event::create(flags).map_err(failed("cuEventCreate"))?))
    }

    /// Marks the end of what the stream holds now.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self, device: &Device) -> Result<(), DeviceError> {
        // SAFETY: live handles.
        unsafe { result::event::record(self.0, device.stream) }.map_err(failed("cuEventRecord"))
    }

    /// Whether the stream has passed the mark.
    ///
    /// # Errors
    /// What a kernel left behind.
    pub fn passed(&self) -> Result<bool, DeviceError> {
        // SAFETY: a live event.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::cudaError_enum::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("cuEventQuery")(error)),
        }
    }

    /// Microseconds from `start` to this event; both passed.
    ///
    /// # Errors
    /// The driver's.
    pub fn since_us(&self, start: &Event) -> Result<f64, DeviceError> {
        // SAFETY: live events.
        let ms = unsafe { result::event::elapsed(start.0, self.0) }.map_err(failed("cuEventElapsedTime"))?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this event alone owns the handle.
        unsafe {
            let _ = result::event::destroy(self.0);
        }
    }
}

//! Breaks a device on purpose, as a faulty kernel or a lost device would: for `crucible check failure`, never on the way of a request.

use std::rc::Rc;

use super::driver::{Device, DeviceError, Kernel, LaunchShape, Module, Overlap};

/// A kernel that raises an exception, as text that the driver itself assembles for its device.
const TRAP: &[u8] =
    b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry crucible_trap()\n{\n    trap;\n    ret;\n}\n\0";

/// A loaded trap.
#[derive(Debug)]
pub struct Trap {
    device: Rc<Device>,
    kernel: Kernel,
}

impl Trap {
    /// Loads the kernel; nothing happens yet.
    ///
    /// # Errors
    /// The driver's.
    pub fn set(device: &Rc<Device>) -> Result<Self, DeviceError> {
        let kernel = Module::load(device, TRAP)?.kernel("crucible_trap")?;
        Ok(Self { device: Rc::clone(device), kernel })
    }

    /// Queues the kernel behind what the stream holds. From then on every call in this context fails, for the life of the process.
    ///
    /// # Errors
    /// The driver's.
    pub fn spring(&self) -> Result<(), DeviceError> {
        let shape = LaunchShape { grid: (1, 1, 1), threads: 1, shared: 0 };
        // SAFETY: the kernel has no parameters and touches no memory.
        unsafe { self.device.launch(&self.kernel, shape, Overlap::No, &mut []) }
    }
}

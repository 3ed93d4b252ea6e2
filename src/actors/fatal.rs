//! The one fatal flag of an engine (rule 6). A panic on a guarded thread, a device error and a step past its deadline all raise
//! it; every session watches it, and the topology closes the actors. Raised once, it stays.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Once};

use tokio::sync::watch;

thread_local! {
    static GUARD: RefCell<Option<FatalFlag>> = const { RefCell::new(None) };
}

static HOOK: Once = Once::new();

/// Shared by everything that can kill the engine or wants to know that it is dead.
#[derive(Clone, Debug)]
pub struct FatalFlag(Arc<watch::Sender<Option<Arc<str>>>>);

impl FatalFlag {
    /// A flag that is down.
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }

    /// Raises the flag. The first reason stays.
    pub fn raise(&self, reason: &str) {
        let first = self.0.send_if_modified(|flag| {
            let first = flag.is_none();
            flag.get_or_insert_with(|| Arc::from(reason));
            first
        });
        if first {
            tracing::error!(reason, "the engine failed");
        }
    }

    /// Why the engine is dead, if it is.
    pub fn reason(&self) -> Option<Arc<str>> {
        self.0.borrow().clone()
    }

    /// Follows the flag.
    pub fn watch(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.0.subscribe()
    }

    /// From now on a panic of this thread raises the flag.
    pub fn guard_this_thread(&self) {
        HOOK.call_once(|| {
            let previous = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                previous(info);
                raise_for(info);
            }));
        });
        GUARD.with(|guard| *guard.borrow_mut() = Some(self.clone()));
    }

    /// The flag that guards this thread. A backend that is made on the engine's thread takes it from here to guard its own.
    pub fn of_this_thread() -> Option<Self> {
        GUARD.try_with(|guard| guard.try_borrow().ok().and_then(|g| g.clone())).ok().flatten()
    }
}

fn raise_for(info: &PanicHookInfo<'_>) {
    let Some(flag) = FatalFlag::of_this_thread() else { return };
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    flag.raise(&format!("panic at {place}: {}", text.unwrap_or("no message")));
}

//! The step trace (`telemetry.step_trace`): one JSON line a step, written by a thread of its own. A full channel drops lines and
//! says so in the next line's `dropped`; tracing never delays a step.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use crate::backend::{Start, StepOutput};
use crate::planner::PlannedStep;

/// Lines that may wait for the disk.
const LINES_WAITING_MAX: usize = 4096;

#[derive(Debug, Serialize)]
struct Slice {
    request: u64,
    dialect: &'static str,
    start: u32,
    length: u32,
}

/// One line of the trace; times in µs.
#[derive(Debug, Default, Serialize)]
pub struct StepRecord {
    step: u64,
    slices: Vec<Slice>,
    decode_rows: usize,
    prepare_us: f64,
    launch_us: f64,
    device_us: f64,
    selection_us: f64,
    upload_bytes: u64,
    download_bytes: u64,
    /// Lines lost since the one before this.
    dropped: u64,
}

impl StepRecord {
    /// What is known at the launch.
    pub fn of(planned: &PlannedStep, prepare: Duration) -> Self {
        let slices = planned.step.rows.iter().zip(&planned.dialects).filter_map(|(row, dialect)| match row.start {
            Start::Host(start) => {
                Some(Slice { request: row.request.0, dialect: dialect.name(), start, length: row.len })
            }
            Start::Device => None,
        });
        let slices: Vec<_> = slices.collect();
        let decode_rows = planned.step.rows.len() - slices.len();
        let prepare_us = prepare.as_secs_f64() * 1e6;
        Self { step: planned.step.id, slices, decode_rows, prepare_us, ..Self::default() }
    }

    /// Adds what the backend measured.
    pub fn completed(mut self, output: &StepOutput) -> Self {
        self.launch_us = output.timing.launch_us;
        self.device_us = output.timing.device_us;
        self.selection_us = output.timing.selection_us;
        self.upload_bytes = output.timing.upload_bytes;
        self.download_bytes = output.timing.download_bytes;
        self
    }
}

/// The engine's end of the trace. Dropping it writes what waits and closes the file.
pub struct StepTrace {
    lines: Option<SyncSender<StepRecord>>,
    writer: Option<JoinHandle<()>>,
    dropped: u64,
}

impl StepTrace {
    /// Creates (or empties) the file and starts its writer.
    ///
    /// # Errors
    /// The file or the thread cannot be made.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        let file = BufWriter::new(File::create(path)?);
        let (lines, incoming) = sync_channel(LINES_WAITING_MAX);
        let thread = std::thread::Builder::new().name("crucible-trace".into());
        let writer = thread.spawn(move || write_lines(file, &incoming))?;
        Ok(Self { lines: Some(lines), writer: Some(writer), dropped: 0 })
    }

    /// Queues one line, or counts it as dropped.
    pub fn write(&mut self, mut record: StepRecord) {
        record.dropped = self.dropped;
        let sent = self.lines.as_ref().is_some_and(|lines| lines.try_send(record).is_ok());
        self.dropped = if sent { 0 } else { self.dropped + 1 };
    }
}

impl Drop for StepTrace {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// Writes lines, and flushes whenever none is waiting. A disk error ends the trace with one warning; lines then count as dropped.
fn write_lines(mut file: BufWriter<File>, incoming: &Receiver<StepRecord>) {
    while let Ok(first) = incoming.recv() {
        let waiting = std::iter::once(first).chain(incoming.try_iter());
        let write = || -> std::io::Result<()> {
            for record in waiting {
                serde_json::to_writer(&mut file, &record)?;
                file.write_all(b"\n")?;
            }
            file.flush()
        };
        if let Err(error) = write() {
            tracing::warn!(%error, "the step trace cannot be written and ends here");
            return;
        }
    }
}

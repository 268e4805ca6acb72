//! Marks between the pieces of work of a profile.

use super::Live;
use crate::Result;
use crate::driver::Handle;
use crate::gpu::{Backend, lock};
use crate::kernel::{Arg, Kernel, Launch};
use crate::library::call;
use crate::profile::Timing;

/// The end of a piece of work, for a profile.
pub(super) struct Mark {
    timing: Timing,
    event: Handle,
}

/// Keeps the device busy for so many nanoseconds.
pub(crate) const HOLD_BACK: Kernel = Kernel {
    name: "hold_back",
    source: "extern \"C\" __global__ void hold_back(u64 nanoseconds) {\n    u64 start, now;\n    \
             asm volatile(\"mov.u64 %0, %%globaltimer;\" : \"=l\"(start));\n    do {\n        \
             asm volatile(\"mov.u64 %0, %%globaltimer;\" : \"=l\"(now));\n    \
             } while (now - start < nanoseconds);\n}\n",
};

impl Live {
    /// Marks the end of a piece of work where a profile is made.
    pub(super) fn mark(
        &self,
        name: &'static str,
        detail: impl FnOnce() -> String,
        flops: f64,
        bytes: f64,
    ) -> Result<()> {
        let mut marks = lock(&self.marks);
        let Some(marks) = marks.as_mut() else { return Ok(()) };
        let mut event = Handle::NULL;
        // SAFETY: the argument points to a handle that lives through the call; the context is current.
        unsafe { call!(self.driver, cuEventCreate(&mut event, 0)) }?;
        let timing = Timing { name, detail: detail(), microseconds: 0.0, flops, bytes };
        marks.push(Mark { timing, event });
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(self.driver, cuEventRecord(event, self.stream())) }
    }

    /// The times between marks, the first of which is the beginning; destroys their events.
    fn timings(&self, marks: Vec<Mark>) -> Result<Vec<Timing>> {
        let mut timings = Vec::with_capacity(marks.len());
        let mut before: Option<Handle> = None;
        for mark in &marks {
            if let Some(before) = before {
                let mut milliseconds = 0f32;
                // SAFETY: both events are done; the argument points to a float that lives through the call.
                unsafe { call!(self.driver, cuEventElapsedTime(&mut milliseconds, before, mark.event)) }?;
                timings.push(Timing { microseconds: f64::from(milliseconds) * 1e3, ..mark.timing.clone() });
            }
            before = Some(mark.event);
        }
        for mark in marks {
            // SAFETY: created by `mark`, destroyed once, done before.
            unsafe { call!(self.driver, cuEventDestroy_v2(mark.event)) }?;
        }
        Ok(timings)
    }

    /// See [`Backend::profile`].
    pub(super) fn time_pieces(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Timing>> {
        /// Longer than the host needs to enqueue what the driver takes before it makes the host wait.
        const HELD_BACK_NS: u64 = 60_000_000;
        let hold = Launch::new(&HOLD_BACK, [1; 3], [1; 3]).arg(Arg::U64(HELD_BACK_NS));
        self.launch(&hold)?;
        *lock(&self.marks) = Some(Vec::new());
        let begun = self.mark("begin", String::new, 0.0, 0.0);
        let done = begun.and_then(|()| work());
        let marks = lock(&self.marks).take().unwrap_or_default();
        self.synchronize()?;
        let timings = self.timings(marks)?;
        done.map(|()| timings)
    }
}

//! Ctrl-C, for the commands that must not end in the middle of something.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rb_data::DataError;

use crate::Failure;

/// Exit code of a command that the user stopped, as shells give it.
pub(crate) const STOPPED: u8 = 130;

/// The first signal sets what is returned and says `what` happens; the second ends the process.
pub(crate) fn on_signal(what: &'static str) -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let handler = move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(STOPPED.into());
        }
        eprintln!("{what}; press again to stop at once");
    };
    ctrlc::set_handler(handler).map_err(|e| Failure::new(1, format!("cannot watch for Ctrl-C: {e}")))?;
    Ok(stop)
}

/// [`DataError::Stopped`] once `stop` is set: what was begun is then taken back.
pub(crate) fn check(stop: &AtomicBool) -> rb_data::Result<()> {
    if stop.load(Ordering::Relaxed) { Err(DataError::Stopped) } else { Ok(()) }
}

/// The failure of an error of `rb-data`, with the exit code of a stop where it is one.
pub(crate) fn failure(error: DataError) -> Failure {
    match error {
        DataError::Stopped => Failure::new(STOPPED, error.to_string()),
        error => Failure::failed(error),
    }
}

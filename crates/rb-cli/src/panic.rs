//! What a user sees of a panic: one line and exit code 1, never a backtrace.

use std::io::Write;
use std::panic::PanicHookInfo;

/// Replaces the standard report. The text of an output that cannot be written arrives as a panic too: `rb .. | head`,
/// or a full disk.
pub(crate) fn explain_in_one_line() {
    std::panic::set_hook(Box::new(|info| {
        // Where standard error is gone too, there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "error: {}", message(info));
        std::process::exit(1);
    }));
}

fn message(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    let output =
        [("stdout", "standard output"), ("stderr", "standard error")].iter().find_map(|(name, place)| {
            Some((place, text.strip_prefix("failed printing to ")?.strip_prefix(name)?.strip_prefix(": ")?))
        });
    match output {
        Some((place, reason)) => format!(
            "cannot write to {place}: {reason}; a training run continues from its last checkpoint with --resume"
        ),
        None => {
            let place = info.location().map_or(String::new(), |l| format!(" ({}:{})", l.file(), l.line()));
            format!("a defect of rb: {text}{place}; please report it with the command that you gave")
        }
    }
}

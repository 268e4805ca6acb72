//! Runs a program with its output in a file, and says now and then that it is still running.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::Error;

const POLL: Duration = Duration::from_millis(50);
/// Between two signs of life on the console.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// Runs `command` with stdout and stderr in `log`; true if it exited with 0.
pub fn run_logged(mut command: Command, log: &Path) -> Result<bool, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let spawn_error = |source| Error::Spawn { program: program.clone(), source };
    let file = File::create(log).map_err(Error::io("create", log))?;
    let twin = file.try_clone().map_err(Error::io("open", log))?;
    let mut child =
        command.stdin(std::process::Stdio::null()).stdout(file).stderr(twin).spawn().map_err(spawn_error)?;
    let start = Instant::now();
    let mut next_beat = HEARTBEAT;
    loop {
        if let Some(status) = child.try_wait().map_err(spawn_error)? {
            return Ok(status.success());
        }
        if start.elapsed() >= next_beat {
            println!("      {:.0} s: {}", start.elapsed().as_secs_f64(), last_line(log));
            next_beat += HEARTBEAT;
        }
        std::thread::sleep(POLL);
    }
}

/// The last line of `log` that is not empty, cut to fit a console.
fn last_line(log: &Path) -> String {
    let text =
        std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no output yet");
    line.chars().take(90).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_status_are_kept() {
        let folder = std::env::temp_dir().join(format!("xtask-process-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let log = folder.join("a.log");
        let mut good = Command::new("cargo");
        good.arg("--version");
        assert!(run_logged(good, &log).unwrap());
        assert!(last_line(&log).starts_with("cargo "));
        let mut bad = Command::new("cargo");
        bad.arg("--no-such-flag");
        assert!(!run_logged(bad, &log).unwrap());
        assert!(run_logged(Command::new("no-such-program-here"), &log).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

//! Runs that are killed, or that the disk stops: nothing whole is lost, and the continued run has the same bits.
#![cfg(unix)]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Place, newest_step, refused};
use rb_tensor::Rng;
use rb_train::checkpoint;

const STEPS: u64 = 60;
const KILLS: usize = 6;

fn file(run: &Path, step: u64, name: &str) -> Vec<u8> {
    std::fs::read(checkpoint::step_dir(&run.join("checkpoints"), step).join(name)).unwrap()
}

fn same_end(a: &Path, b: &Path, step: u64) {
    for name in ["model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"] {
        assert!(file(a, step, name) == file(b, step, name), "{name} of step {step} differs");
    }
}

/// The kills fall where they fall between two saves; what is asserted holds for every moment.
#[test]
fn killed_again_and_again() {
    let place = Place::new();
    place.run("straight", STEPS as usize);
    let run = place.path("run");
    let steps = format!("train.max_steps={STEPS}");
    let mut rng = Rng::new(5);
    let mut words = vec!["train", "tiny.toml", "--out", "run", "--set", steps.as_str()];
    for kill in 0..KILLS {
        let before = newest_step(&run);
        let mut child = place.rb(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while newest_step(&run) < before + 2 && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(rng.below(8000)));
        // SIGKILL: nothing of the program runs after it.
        child.kill().unwrap();
        child.wait().unwrap();
        let found = checkpoint::find_latest(&run.join("checkpoints")).unwrap().unwrap();
        assert!(found.damaged.is_empty(), "kill {kill}: {:?}", found.damaged);
        let latest = run.join("checkpoints/latest");
        let linked = checkpoint::verify(&latest).unwrap_or_else(|e| panic!("kill {kill}: {e}"));
        assert!(linked >= before, "kill {kill}: latest went back from {before} to {linked}");
        words = vec!["train", "--resume", "run"];
    }
    place.good(&words);
    same_end(&place.path("straight"), &run, STEPS);
    let records = rb_train::observe::read(&run.join("metrics.jsonl")).unwrap();
    let steps: Vec<u64> = records
        .iter()
        .filter_map(|r| match r {
            rb_train::observe::Record::Train(t) => Some(t.step),
            _ => None,
        })
        .collect();
    assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "one record a step, none lost or twice");
}

/// A limit on the size of files stands for a disk without room: the write fails half-way in the same manner.
#[test]
fn a_checkpoint_that_does_not_fit() {
    let place = Place::new();
    place.run("straight", 5);
    place.run("run", 3);
    let run = place.path("run");
    let weights = file(&run, 3, "model.safetensors").len() as u64;
    // In blocks of 512 bytes, and less than the weights take. XFSZ is ignored, so that writing fails instead.
    let limited = format!(
        "trap '' XFSZ; ulimit -f {}; exec \"$0\" train --resume run --set train.max_steps=5",
        weights / 1024
    );
    let output = Command::new("sh")
        .args(["-c", &limited, env!("CARGO_BIN_EXE_rb")])
        .current_dir(place.path(""))
        .output()
        .unwrap();
    refused(&output, "under ulimit -f", 1, &["run/checkpoints/.step-4", "ulimit -f", "--resume"]);
    let found = checkpoint::find_latest(&run.join("checkpoints")).unwrap().unwrap();
    assert_eq!((found.step, found.damaged.len()), (3, 0));
    assert_eq!(checkpoint::verify(&run.join("checkpoints/latest")).unwrap(), 3);
    let names: Vec<_> =
        std::fs::read_dir(run.join("checkpoints")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 4, "three steps and the link: {names:?}");
    // With room again the run goes on to the bits it would have had.
    place.good(&["train", "--resume", "run", "--set", "train.max_steps=5"]);
    same_end(&place.path("straight"), &run, 5);
}

#[test]
fn a_run_directory_that_cannot_be_written() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    place.run("run", 2);
    let run = place.path("run");
    let set = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set(&run.join("checkpoints"), 0o555);
    set(&run, 0o555);
    if std::fs::write(run.join("probe"), "").is_ok() {
        println!("skipped: this user (root?) may write into folders without write permission");
        set(&run, 0o755);
        return;
    }
    place.refused(&["train", "--resume", "run", "--set", "train.max_steps=3"], 1, &["run/", "permissions"]);
    place.refused(&["train", "tiny.toml", "--out", "run/inner"], 1, &["run/inner", "permissions"]);
    set(&run, 0o755);
    set(&run.join("checkpoints"), 0o755);
    assert_eq!(checkpoint::find_latest(&run.join("checkpoints")).unwrap().unwrap().step, 2);
}

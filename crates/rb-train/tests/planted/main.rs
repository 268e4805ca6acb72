//! The suite of planted defects: each is switched on alone, and the product's public checks must refuse the result.
//!
//! No check here knows a defect: what runs is what `rb verify --all` runs, on fewer model variants, and with
//! `--device cuda` what `rb verify --device cuda --quick` runs. With no defect on, everything must pass.
//!
//! `cargo xtask verify --only planted-defects` runs it and shows the table. By hand:
//! `cargo test --workspace --features rb-train/planted-defects --test planted -- --only RopeInterleaved`.

mod table;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use rb_cuda::{Gpu, GpuOptions};
use rb_nn::{LlamaConfig, RopeScaling};
use rb_planted::{Defect, plant};
use rb_verify::Report;
use serde_json::{Value, json};
use table::{Entry, TABLE};

/// Name of the run in which nothing is planted.
const NOTHING: &str = "nothing";
const SEED: u64 = 11;

#[derive(Default)]
struct Options {
    only: Vec<String>,
    json: Option<PathBuf>,
    cuda: bool,
    /// This process runs what `only` names and prints one line of JSON for each.
    child: bool,
}

impl Options {
    fn parse() -> Result<Options, String> {
        let mut options = Options::default();
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = |what: &str| words.next().ok_or(format!("{word} needs {what}"));
            match word.as_str() {
                "--only" => options.only.push(value("the name of a defect")?),
                "--json" => options.json = Some(value("a file")?.into()),
                "--device" if value("cuda")? == "cuda" => options.cuda = true,
                "--child" => options.child = true,
                _ => return Err(format!("unknown argument {word}; known: --only, --json, --device cuda")),
            }
        }
        let known = |name: &String| name == NOTHING || TABLE.iter().any(|e| name_of(e) == *name);
        match options.only.iter().find(|name| !known(name)) {
            Some(name) => Err(format!("no defect is called {name}")),
            None => Ok(options),
        }
    }
}

fn name_of(entry: &Entry) -> String {
    format!("{:?}", entry.defect)
}

fn main() -> ExitCode {
    let options = match Options::parse() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::from(2);
        }
    };
    if options.child {
        for name in &options.only {
            println!("{}", examine(name, options.cuda));
        }
        return ExitCode::SUCCESS;
    }
    if let Some(missing) = Defect::ALL.iter().find(|d| TABLE.iter().filter(|e| e.defect == **d).count() != 1)
    {
        eprintln!("error: {missing:?} is not in the table once");
        return ExitCode::FAILURE;
    }
    let started = Instant::now();
    let mut names: Vec<String> =
        std::iter::once(NOTHING.to_string()).chain(TABLE.iter().map(name_of)).collect();
    if options.cuda {
        let in_kernel =
            |name: &String| name == NOTHING || TABLE.iter().any(|e| e.in_kernel && name_of(e) == *name);
        names.retain(in_kernel);
    }
    names.retain(|name| options.only.is_empty() || name == NOTHING || options.only.contains(name));
    let rows = in_children(&names, options.cuda);
    let good = rows.iter().all(|row| row["good"] == true) && rows.len() == names.len();
    print(&rows);
    println!("{} defects, {:.0} s", rows.len().saturating_sub(1), started.elapsed().as_secs_f64());
    if let Some(path) = &options.json {
        let program = std::env::current_exe().unwrap_or_default();
        let report =
            json!({ "program": program, "device": if options.cuda { "cuda" } else { "cpu" }, "rows": rows });
        if let Err(error) = std::fs::write(path, format!("{report:#}\n")) {
            eprintln!("error: {}: {error}", path.display());
            return ExitCode::FAILURE;
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs `names` in one process a core: a defect is on for a whole process. A card is for one process.
fn in_children(names: &[String], cuda: bool) -> Vec<Value> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let processes = if cuda { 1 } else { cores.min(names.len()) };
    let share = |i: usize| names.iter().skip(i).step_by(processes).cloned().collect::<Vec<String>>();
    let mut found = BTreeMap::new();
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..processes)
            .map(|i| {
                // On a card each defect has a process of its own: kernels that were loaded stay loaded.
                let lists =
                    if cuda { share(i).into_iter().map(|n| vec![n]).collect() } else { vec![share(i)] };
                scope.spawn(move || lists.iter().flat_map(|list| child(list, cuda)).collect::<Vec<Value>>())
            })
            .collect();
        for run in runs {
            for row in run.join().unwrap_or_default() {
                found.insert(row["defect"].as_str().unwrap_or_default().to_string(), row);
            }
        }
    });
    names.iter().map(|name| found.remove(name).unwrap_or_else(|| died(name))).collect()
}

/// A process that ended without a word about `name`.
fn died(name: &str) -> Value {
    json!({ "defect": name, "models": "", "good": false, "caught_by": [], "detail": "the process died" })
}

fn child(names: &[String], cuda: bool) -> Vec<Value> {
    let program = std::env::current_exe().unwrap_or_default();
    let mut command = Command::new(program);
    command.arg("--child").args(names.iter().flat_map(|name| ["--only", name.as_str()]));
    if cuda {
        command.args(["--device", "cuda"]);
    } else {
        // The models are small: threads would only meet each other.
        command.env("RAYON_NUM_THREADS", "1");
    }
    let Ok(output) = command.stderr(Stdio::inherit()).output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Plants one defect, runs the checks and says what they found.
fn examine(name: &str, cuda: bool) -> Value {
    let started = Instant::now();
    let entry = TABLE.iter().find(|e| name_of(e) == name);
    let planted = entry.map(|e| plant(e.defect));
    let run = || match entry {
        // Without a card only the change of the source can be tried; see `reached` below.
        Some(e) if e.in_kernel && !cuda => {
            rb_verify::kernel_units((9, 0));
            Ok(Found::default())
        }
        _ if cuda => on_gpu(),
        _ => on_host(),
    };
    let found =
        std::panic::catch_unwind(run).unwrap_or_else(|_| Err("a check panicked".to_string())).unwrap_or_else(
            |error| Found { stage: "a check", failed: vec![format!("could not run: {error}")], checks: 0 },
        );
    let reached = planted.is_none_or(|p| p.reached());
    let on_paper = entry.is_some_and(|e| e.in_kernel) && !cuda;
    let caught = !found.failed.is_empty();
    let good = match entry {
        None => !caught && found.checks > 0,
        Some(_) if on_paper => reached,
        Some(_) => reached && caught,
    };
    let detail = match (entry, reached, caught) {
        (None, _, false) => format!("{} checks passed", found.checks),
        (None, _, true) => "FALSE ALARM".to_string(),
        (_, false, _) => "its seam was not reached".to_string(),
        _ if on_paper => "the kernel's source is changed; a GPU shows the rest".to_string(),
        (_, _, false) => format!("NOT CAUGHT by {} checks", found.checks),
        _ => format!("{} of {} checks of {}", found.failed.len(), found.checks, found.stage),
    };
    json!({
        "defect": name,
        "models": entry.map_or("clean code", |e| e.models),
        "device": if on_paper { "none" } else if cuda { "cuda" } else { "cpu" },
        "good": good,
        "caught_by": found.failed,
        "detail": detail,
        "seconds": started.elapsed().as_secs_f64(),
    })
}

/// The checks of the first stage that refused.
#[derive(Default)]
struct Found {
    stage: &'static str,
    /// Name and detail of each failed check.
    failed: Vec<String>,
    /// Checks that ran, in all stages so far.
    checks: usize,
}

impl Found {
    /// Adds a stage; true where it refused.
    fn add(&mut self, stage: &'static str, report: Report) -> bool {
        self.stage = stage;
        self.checks += report.checks.len();
        self.failed = report
            .checks
            .into_iter()
            .filter(|c| !c.passed)
            .map(|c| format!("{}: {}", c.name, c.detail))
            .collect();
        !self.failed.is_empty()
    }
}

/// What `rb verify --all` runs, on the variants below, until something refuses.
fn on_host() -> Result<Found, String> {
    let mut found = Found::default();
    let loop_checks = rb_train::verify::verify_training(SEED).map_err(|e| e.to_string())?;
    if found.add("the training loop", loop_checks) {
        return Ok(found);
    }
    for config in variants() {
        let report = rb_verify::verify_config(&config, SEED).map_err(|e| e.to_string())?;
        if found.add("the model", report) {
            return Ok(found);
        }
    }
    if found.add("the refusals", rb_verify::loss_gates(SEED).map_err(|e| e.to_string())?) {
        return Ok(found);
    }
    found.add("the operations", rb_verify::verify_operations());
    Ok(found)
}

/// What `rb verify --device cuda --quick` runs.
fn on_gpu() -> Result<Found, String> {
    let options = GpuOptions { poison: true, ..GpuOptions::default() };
    let gpu = Gpu::open(0, &options).map_err(|e| e.to_string())?;
    let report = rb_verify::verify_device(gpu, SEED, rb_verify::Extent::Quick, &mut |_| {})
        .map_err(|e| e.to_string())?;
    let mut found = Found::default();
    found.add("the GPU", report);
    Ok(found)
}

/// Grouped heads, tied and not, an odd feed-forward width, biases, norms of queries and keys.
fn variants() -> [LlamaConfig; 2] {
    let base = LlamaConfig {
        max_position_embeddings: 32,
        initializer_range: 0.1,
        num_key_value_heads: Some(2),
        ..LlamaConfig::new(61, 24, 21, 2, 4)
    };
    let other = LlamaConfig {
        use_qk_norm: true,
        attention_bias: true,
        rope_scaling: Some(RopeScaling::Linear { factor: 2.0 }),
        ..base.clone()
    };
    [LlamaConfig { tie_word_embeddings: true, ..base }, other]
}

fn print(rows: &[Value]) {
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_string();
    let first = |row: &Value| {
        let caught = row["caught_by"].as_array().cloned().unwrap_or_default();
        let name = caught.first().and_then(|c| c.as_str()?.split(": ").next().map(str::to_string));
        name.unwrap_or_else(|| text(row, "detail"))
    };
    let width = |key: &str| rows.iter().map(|row| text(row, key).chars().count()).max().unwrap_or(0);
    let (defect, models) = (width("defect"), width("models"));
    println!("{:6}  {:defect$}  {:models$}  {:6}  caught by", "result", "defect", "models", "device");
    for row in rows {
        let verdict = if row["good"] == true { "ok" } else { "FAILED" };
        println!(
            "{verdict:6}  {:defect$}  {:models$}  {:6}  {}",
            text(row, "defect"),
            text(row, "models"),
            text(row, "device"),
            first(row)
        );
    }
}

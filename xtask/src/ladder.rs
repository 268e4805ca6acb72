//! Which crate may depend on which: `docs/architecture.md` draws the ladder, this file enforces it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::Report;
use crate::error::Error;

/// Every crate of the workspace, bottom up, and the crates of the workspace that it may use.
/// Dependencies for tests and builds obey the same rule.
const LADDER: &[(&str, &[&str])] = &[
    ("rb-planted", &[]),
    ("rb-cuda", &["rb-planted"]),
    ("rb-tensor", &["rb-planted", "rb-cuda"]),
    ("rb-autograd", &["rb-planted", "rb-cuda", "rb-tensor"]),
    ("rb-data", &["rb-planted", "rb-tensor"]),
    ("rb-nn", &["rb-planted", "rb-tensor", "rb-autograd"]),
    ("rb-optim", &["rb-planted", "rb-cuda", "rb-tensor", "rb-autograd"]),
    ("rb-verify", &["rb-planted", "rb-cuda", "rb-tensor", "rb-autograd", "rb-data", "rb-nn", "rb-optim"]),
    (
        "rb-infer",
        &["rb-planted", "rb-cuda", "rb-tensor", "rb-autograd", "rb-data", "rb-nn", "rb-optim", "rb-verify"],
    ),
    (
        "rb-eval",
        &["rb-planted", "rb-cuda", "rb-tensor", "rb-autograd", "rb-data", "rb-nn", "rb-optim", "rb-verify"],
    ),
    (
        "rb-train",
        &["rb-planted", "rb-cuda", "rb-tensor", "rb-autograd", "rb-data", "rb-nn", "rb-optim", "rb-verify"],
    ),
    (
        "rb-bench",
        &[
            "rb-planted",
            "rb-cuda",
            "rb-tensor",
            "rb-autograd",
            "rb-data",
            "rb-nn",
            "rb-optim",
            "rb-verify",
            "rb-train",
        ],
    ),
    (
        "rb-cli",
        &[
            "rb-cuda",
            "rb-tensor",
            "rb-autograd",
            "rb-data",
            "rb-nn",
            "rb-optim",
            "rb-verify",
            "rb-infer",
            "rb-eval",
            "rb-train",
        ],
    ),
    ("xtask", &[]),
];

/// All that xtask may use from outside: it has to build in seconds. `syn` and what belongs to it read the code that
/// `mutate` changes (docs/decisions/0007-mutation-of-backward-code.md), `plotters` draws what `bench-sweep` measured
/// (docs/decisions/0015-sweeps-in-xtask.md).
const XTASK_LIBRARIES: &[&str] = &["clap", "plotters", "proc-macro2", "serde", "serde_json", "syn", "toml"];

/// The workspace: for each crate its dependencies, each with its kind (`""`, `"dev"`, `"build"`).
type Edges = BTreeMap<String, Vec<(String, String)>>;

pub fn run(root: &Path) -> Result<Report, Error> {
    let program = "cargo metadata --format-version 1 --no-deps";
    let mut words = program.split(' ');
    let mut command = Command::new(words.next().unwrap_or("cargo"));
    let spawned = command.args(words).current_dir(root).output();
    let output = spawned.map_err(|source| Error::Spawn { program: program.into(), source })?;
    let unusable = |detail: String| Error::Program { program: program.into(), detail };
    if !output.status.success() {
        return Err(unusable(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| unusable(error.to_string()))?;
    let edges = edges(&metadata).ok_or_else(|| unusable("no list of packages in its output".into()))?;
    let problems = problems(&edges);
    let mut text = String::new();
    for name in LADDER.iter().map(|(name, _)| *name) {
        if let Some(used) = edges.get(name) {
            // INVARIANT: writing to a String does not fail.
            writeln!(text, "{name} -> {}", describe(used)).expect("a String takes all text");
        }
    }
    problems.iter().for_each(|problem| text.extend([problem.as_str(), "\n"]));
    let inner = edges.values().flatten().filter(|(name, _)| edges.contains_key(name)).count();
    let counts = format!("{} crates, {inner} edges", edges.len());
    let ok = problems.is_empty();
    let summary = if ok { counts } else { format!("{} problems ({counts})", problems.len()) };
    Ok(Report { text, summary, ok })
}

fn edges(metadata: &Value) -> Option<Edges> {
    let mut edges = Edges::new();
    for package in metadata.get("packages")?.as_array()? {
        let used = package.get("dependencies")?.as_array()?.iter().filter_map(|dependency| {
            let kind = dependency.get("kind").and_then(Value::as_str).unwrap_or("");
            Some((dependency.get("name")?.as_str()?.to_string(), kind.to_string()))
        });
        edges.insert(package.get("name")?.as_str()?.to_string(), used.collect());
    }
    Some(edges)
}

fn describe(used: &[(String, String)]) -> String {
    let ours = used.iter().filter(|(name, _)| LADDER.iter().any(|(rung, _)| rung == name));
    let label = |(name, kind): &(String, String)| {
        if kind.is_empty() { name.clone() } else { format!("{name} ({kind})") }
    };
    let names: Vec<String> = ours.map(label).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn problems(edges: &Edges) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, used) in edges {
        let Some((_, allowed)) = LADDER.iter().find(|(rung, _)| rung == name) else {
            problems.push(format!("{name}: not on the ladder; add it to LADDER in xtask/src/ladder.rs"));
            continue;
        };
        for (dependency, kind) in used {
            let inner = edges.contains_key(dependency) || dependency.starts_with("rb-");
            let good = match (inner, name.as_str()) {
                (true, _) => allowed.contains(&dependency.as_str()),
                (false, "xtask") => XTASK_LIBRARIES.contains(&dependency.as_str()),
                (false, _) => true,
            };
            if !good {
                let kind = if kind.is_empty() { String::new() } else { format!(" ({kind})") };
                let folder = if name == "xtask" { "" } else { "crates/" };
                problems.push(format!(
                    "{folder}{name}/Cargo.toml: {name} uses {dependency}{kind}, which is not below it; \
                     move the code to where both may use it, or change the ladder with a record in docs/decisions/"
                ));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_of(json: &str) -> Vec<String> {
        problems(&edges(&serde_json::from_str(json).unwrap()).unwrap())
    }

    #[test]
    fn edges_that_go_down_are_good() {
        let json = r#"{"packages": [
            {"name": "rb-tensor", "dependencies": [{"name": "half", "kind": null}]},
            {"name": "rb-autograd", "dependencies": [{"name": "rb-tensor", "kind": null}]},
            {"name": "xtask", "dependencies": [{"name": "clap", "kind": null}]}
        ]}"#;
        assert_eq!(problems_of(json), Vec::<String>::new());
    }

    #[test]
    fn edges_that_go_up_or_across_are_found() {
        let json = r#"{"packages": [
            {"name": "rb-tensor", "dependencies": [{"name": "rb-autograd", "kind": "dev"}]},
            {"name": "rb-optim", "dependencies": [{"name": "rb-nn", "kind": null}]},
            {"name": "rb-new", "dependencies": []},
            {"name": "xtask", "dependencies": [{"name": "rb-tensor", "kind": null}, {"name": "regex", "kind": null}]}
        ]}"#;
        let found = problems_of(json);
        let expected = [
            "rb-new: not on",
            "rb-optim uses rb-nn,",
            "rb-tensor uses rb-autograd (dev)",
            "xtask uses rb-tensor",
            "xtask uses regex",
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (message, part) in found.iter().zip(expected) {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn the_table_itself_goes_down() {
        for (at, (name, allowed)) in LADDER.iter().enumerate() {
            for dependency in *allowed {
                assert!(
                    LADDER[..at].iter().any(|(rung, _)| rung == dependency),
                    "{name} may use {dependency}"
                );
            }
        }
    }
}

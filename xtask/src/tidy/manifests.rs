//! Crate manifests take lints and versions from the workspace.

use super::Finding;
use crate::rust_file::RustFile;
use crate::tree::Tree;

pub fn crate_manifests(tree: &Tree, _: &[RustFile], findings: &mut Vec<Finding>) {
    for (path, text) in tree.texts().filter(|(path, _)| path.ends_with("/Cargo.toml")) {
        if !is_workspace(text) {
            check(path, text, findings);
        }
    }
}

/// A program that is a workspace of its own takes nothing from ours.
fn is_workspace(text: &str) -> bool {
    text.lines().any(|line| line.trim() == "[workspace]")
}

fn check(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut report = |line: usize, problem: String, remedy: &str| {
        findings.push(Finding::new(path, line, "manifest", problem, remedy));
    };
    let mut section = "";
    let mut workspace_lints = false;
    for (offset, line) in text.lines().enumerate() {
        let line = line.split(" #").next().unwrap_or(line).trim();
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').trim();
            continue;
        }
        let Some((key, value)) = line.split_once('=').map(|(key, value)| (key.trim(), value.trim())) else {
            continue;
        };
        if line.starts_with('#') {
            continue;
        }
        workspace_lints |= (section == "lints" && key == "workspace" && value == "true")
            || (section.is_empty() && key == "lints.workspace" && value == "true");
        let quoted = value.starts_with(['"', '\'']);
        let in_list = section.split('.').any(|part| part.ends_with("dependencies"));
        let of_table = in_list && !section.ends_with("dependencies");
        let literal = if of_table {
            key == "version"
        } else {
            in_list
                && ((quoted && !key.contains('.')) || key.ends_with(".version") || has_key(value, "version"))
        };
        if literal {
            let remedy = "write the version in [workspace.dependencies] of the root manifest, and `name.workspace = true` here";
            report(offset + 1, format!("`{key}` has a version of its own"), remedy);
        }
        if section == "package" && key == "version" {
            report(
                offset + 1,
                "the crate has a version of its own".into(),
                "write `version.workspace = true`",
            );
        }
    }
    if !workspace_lints {
        report(
            1,
            "no `[lints] workspace = true`".into(),
            "add it, so that the lints of the workspace hold here",
        );
    }
}

/// Whether the inline table `value` sets `key`.
fn has_key(value: &str, key: &str) -> bool {
    let inside = value.trim_start_matches('{').trim_end_matches('}');
    value.starts_with('{')
        && inside.split(',').any(|pair| pair.split('=').next().is_some_and(|name| name.trim() == key))
}

#[cfg(test)]
mod tests {
    use super::super::testing::messages;
    use super::*;

    #[test]
    fn versions_and_lints() {
        let bad = "[package]\nname = \"x\"\nversion = \"1.0.0\"\n\n[dependencies]\na = \"1\"\nb = { version = \"2\" }\n\
                   c.workspace = true\n[dev-dependencies.d]\nversion = \"3\"\n[target.'cfg(unix)'.dependencies]\ne.version = \"4\"\n";
        let found = messages(crate_manifests, &Tree::from([("crates/x/Cargo.toml", bad)]));
        let lines: Vec<&str> = found.iter().filter_map(|message| message.split(':').nth(1)).collect();
        assert_eq!(lines, ["3", "6", "7", "10", "12", "1"], "{found:#?}");
    }

    #[test]
    fn a_workspace_of_its_own_has_its_own_versions() {
        let text = "[package]\nname = \"x\"\nversion = \"1.0.0\"\n[dependencies]\na = \"1\"\n";
        let alone = format!("{text}\n[workspace]\n");
        let found =
            |text: &str| messages(crate_manifests, &Tree::from([("bench-scripts/x/Cargo.toml", text)]));
        assert_eq!(found(text).len(), 3);
        assert_eq!(found(&alone), Vec::<String>::new());
    }

    #[test]
    fn a_good_manifest() {
        let good = "[package]\nname = \"x\"\nversion.workspace = true\n\n[lints]\nworkspace = true\n\n[dependencies]\n\
                    a.workspace = true\nb = { workspace = true, features = [\"version\"] } # not version = \"1\"\n# c = \"1\"\n\
                    [features]\ndefault = []\n[[bin]]\nname = \"x\"\npath = \"src/main.rs\"\n";
        let root = ("Cargo.toml", "[workspace.dependencies]\na = \"1\"\n");
        assert_eq!(
            messages(crate_manifests, &Tree::from([("crates/x/Cargo.toml", good), root])),
            Vec::<String>::new()
        );
    }
}

//! `new-op`: the skeleton of an operation and its line in the registry.

use std::path::Path;

use crate::Report;
use crate::error::Error;
use crate::rust_file::RustFile;
use crate::tidy::{OPS_FOLDER, REGISTRY, registry};

/// The skeleton: `{name}` and `{Name}` stand for the operation.
const TEMPLATE: &str = include_str!("../templates/op.rs.txt");

/// Words of Rust that no function can be named, and the module beside the operations.
const KEYWORDS: &[&str] = &[
    "as", "box", "const", "dyn", "else", "fn", "for", "if", "impl", "in", "let", "loop", "match", "mod",
    "move", "mut", "pub", "ref", "return", "self", "shared", "static", "super", "trait", "type", "use",
    "where", "while",
];

pub fn run(root: &Path, name: &str) -> Result<Report, Error> {
    check_name(name)?;
    let list_path = root.join(REGISTRY);
    let list = std::fs::read_to_string(&list_path).map_err(Error::io("read", &list_path))?;
    let new_list = with_name(&list, name)?;
    let op = format!("{OPS_FOLDER}/{name}.rs");
    let op_path = root.join(&op);
    if op_path.exists() {
        return Err(Error::usage(format!("{op} exists"), "choose another name or delete the file"));
    }
    std::fs::write(&op_path, skeleton(name)).map_err(Error::io("write", &op_path))?;
    std::fs::write(&list_path, new_list).map_err(Error::io("write", &list_path))?;
    let text = format!(
        "wrote {op}\nadded `{name}` to {REGISTRY}\n\
         Replace what says FILL-IN, then run `cargo test -p rb-autograd {name}` and `cargo xtask tidy`.\n"
    );
    Ok(Report { text, summary: format!("operation `{name}` added"), ok: true })
}

fn check_name(name: &str) -> Result<(), Error> {
    let mut chars = name.chars();
    let starts_well = chars.next().is_some_and(|c| c.is_ascii_lowercase());
    let snake = chars.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if KEYWORDS.contains(&name) {
        return Err(Error::usage(
            format!("`{name}` is a reserved word"),
            format!("call the operation `{name}_select` or the like"),
        ));
    }
    if starts_well && snake && !name.ends_with('_') && !name.contains("__") {
        return Ok(());
    }
    Err(Error::usage(
        format!("`{name}` is no name for an operation"),
        "write it in snake case, such as `layer_norm`",
    ))
}

fn skeleton(name: &str) -> String {
    TEMPLATE.replace("{name}", name).replace("{Name}", &camel_case(name))
}

fn camel_case(name: &str) -> String {
    let capital = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
    name.split('_').map(capital).collect()
}

/// The text of the registry file with `name` in its alphabetical place.
fn with_name(text: &str, name: &str) -> Result<String, Error> {
    let file = RustFile::parse(REGISTRY, text);
    let no_registry =
        || Error::usage(format!("{REGISTRY} has no `registry! {{ .. }}`"), "add it, one name a line");
    let (names, close) = registry(&file).ok_or_else(no_registry)?;
    if names.iter().any(|(known, _)| *known == name) {
        return Err(Error::usage(format!("`{name}` is in {REGISTRY} already"), "choose another name"));
    }
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let next = names.iter().find(|(known, _)| *known > name);
    let line = next.map_or(file.line(close), |(_, line)| *line);
    // The last name may stand without its comma.
    if let (None, Some((last, line))) = (next, names.last()) {
        let last_line = &mut lines[line - 1];
        if last_line.trim() == *last {
            last_line.push(',');
        }
    }
    lines.insert(line - 1, format!("    {name},"));
    Ok(lines.join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["add", "layer_norm", "top2"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "Add", "2top", "a-b", "a__b", "_a", "a_", "where", "shared"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert_eq!(camel_case("rms_norm"), "RmsNorm");
    }

    #[test]
    fn the_name_goes_to_its_place() {
        let text = "//! Doc.\nregistry! {\n    add,\n    mul,\n}\nfn x() {}\n";
        let with = |name| with_name(text, name).unwrap();
        assert_eq!(with("abs"), text.replace("    add", "    abs,\n    add"));
        assert_eq!(with("max"), text.replace("    mul", "    max,\n    mul"));
        assert_eq!(with("sub"), text.replace("    mul,", "    mul,\n    sub,"));
        let no_comma = text.replace("mul,", "mul");
        assert_eq!(with_name(&no_comma, "sub").unwrap(), with("sub"));
        assert!(with_name(text, "add").unwrap_err().to_string().contains("already"));
        assert!(with_name("fn x() {}", "add").unwrap_err().to_string().contains("no `registry!"));
    }

    #[test]
    fn the_skeleton_has_no_place_holder_left() {
        let text = skeleton("rms_norm");
        assert!(!text.contains("{name}") && !text.contains("{Name}"));
    }
}

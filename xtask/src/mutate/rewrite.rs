//! Source code with every mutant in it, each behind the question whether it is the active one.
//!
//! | code | mutants |
//! | --- | --- |
//! | `a + b`, `a * b`, `a % b`, `a & b` | `a - b`, `a / b`, `a / b`, `a \| b`, and the reverse of each |
//! | `a < b`, `a == b` | `a <= b` and `a >= b`, `a != b` |
//! | `a && b`, `!a`, a condition that is a call or a name | `a \|\| b`, `a`, its negation |
//! | `-a` | `a` |
//! | `a += b`, `a *= b` | `a -= b`, and `a = b` |
//! | `a.max(b)`, `a.min(b)` | `a`, `b` |
//! | `a..b`, `a..=b` | an end that is one less |
//! | `0`, `1.0`, `T::ZERO`, `T::ONE` | the other one |
//! | another whole number, another decimal | one less, one percent less |
//! | `true`, `Beta::Overwrite`, `T::NEG_INFINITY` | `false`, `Beta::Accumulate`, `T::ZERO` |
//!
//! Patterns, types, constants and the arguments of macros stay as they are, and so does what runs only with a planted
//! defect.

use std::ops::Range;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr, Lit, UnOp};

use super::select::{Function, Source, line};

/// One change of one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mutant {
    /// Number that activates it, from 1.
    pub number: u32,
    /// Source file, from the folder `src` of the crate.
    pub file: String,
    pub line: usize,
    /// The whole source line, trimmed.
    pub source: String,
    /// What became of what: `a + b -> a - b`.
    pub change: String,
}

/// The text of `source` with the mutants of `functions`, numbered from `first`.
pub fn rewrite(source: &Source, functions: &[&Function], first: u32) -> (String, Vec<Mutant>) {
    let mut rewriter = Rewriter {
        source,
        lines: source.text.lines().collect(),
        next: first,
        mutants: vec![],
        edits: vec![],
    };
    for function in functions {
        rewriter.visit_block(function.block);
    }
    let whole = 0..source.text.len();
    let edits = std::mem::take(&mut rewriter.edits);
    (rewriter.apply(whole, edits), rewriter.mutants)
}

struct Rewriter<'a> {
    source: &'a Source,
    lines: Vec<&'a str>,
    next: u32,
    mutants: Vec<Mutant>,
    /// Replacements in the part that is being visited, in order.
    edits: Vec<(Range<usize>, String)>,
}

impl Rewriter<'_> {
    fn apply(&self, range: Range<usize>, mut edits: Vec<(Range<usize>, String)>) -> String {
        edits.sort_by_key(|(range, _)| range.start);
        let (mut text, mut at) = (String::new(), range.start);
        for (place, replacement) in edits {
            text += &self.source.text[at..place.start];
            text += &replacement;
            at = place.end;
        }
        text + &self.source.text[at..range.end]
    }

    fn original(&self, node: &impl Spanned) -> &str {
        &self.source.text[node.span().byte_range()]
    }

    /// The text of `expr` with the mutants in it.
    fn inner(&mut self, expr: &Expr) -> String {
        let outer = std::mem::take(&mut self.edits);
        self.visit_expr(expr);
        let edits = std::mem::replace(&mut self.edits, outer);
        self.apply(expr.span().byte_range(), edits)
    }

    /// A new mutant of `node`; the condition that it is active.
    fn mutant(&mut self, node: &impl Spanned, from: &str, to: &str) -> String {
        let number = self.next;
        self.next += 1;
        let line = line(node.span());
        let squeeze = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        self.mutants.push(Mutant {
            number,
            file: self.source.path.clone(),
            line,
            source: self.lines.get(line - 1).map_or("", |text| text.trim()).to_string(),
            change: format!("{} -> {}", squeeze(from), squeeze(to)),
        });
        format!("crate::mutant::is({number})")
    }

    fn replace(&mut self, node: &impl Spanned, text: String) {
        self.edits.push((node.span().byte_range(), text));
    }

    fn binary(&mut self, node: &syn::ExprBinary) {
        let (left, right) = (self.original(&node.left).to_string(), self.original(&node.right).to_string());
        let from = format!("{left} {} {right}", operator(&node.op));
        let others = alternatives(&node.op);
        let logical = matches!(node.op, BinOp::And(_) | BinOp::Or(_));
        if others.is_empty() || (logical && has_let(&node.left, &node.right)) {
            return visit::visit_expr_binary(self, node);
        }
        let active: Vec<(String, &str)> = others
            .iter()
            .map(|&other| (self.mutant(node, &from, &format!("{left} {other} {right}")), other))
            .collect();
        let (left, right) = if logical {
            (self.condition(&node.left), self.condition(&node.right))
        } else {
            (self.inner(&node.left), self.inner(&node.right))
        };
        let own = operator(&node.op);
        let text = if logical {
            let (question, other) = &active[0];
            format!("(if {question} {{ ({left}) {other} ({right}) }} else {{ ({left}) {own} ({right}) }})")
        } else {
            // Comparisons take references, so that nothing is moved out of its place.
            let by = if is_comparison(&node.op) { "&" } else { "" };
            let branches: String = active
                .iter()
                .map(|(question, other)| format!("if {question} {{ l {other} r }} else "))
                .collect();
            format!("(match ({by}({left}), {by}({right})) {{ (l, r) => {branches}{{ l {own} r }} }})")
        };
        self.replace(node, text);
    }

    fn assignment(&mut self, node: &syn::ExprBinary) {
        let (place, value) = (self.original(&node.left).to_string(), self.original(&node.right).to_string());
        let own = operator(&node.op);
        let from = format!("{place} {own} {value}");
        let mut branches = String::new();
        for other in alternatives(&node.op) {
            let question = self.mutant(node, &from, &format!("{place} {other} {value}"));
            branches += &format!("if {question} {{ PLACE {other} v; }} else ");
        }
        let (left, right) = (self.inner(&node.left), self.inner(&node.right));
        let text = format!("{{ let v = {right}; {branches}{{ PLACE {own} v; }} }}").replace("PLACE", &left);
        self.replace(node, text);
    }

    /// The text of a condition; a call or a name in it may be negated.
    fn condition(&mut self, expr: &Expr) -> String {
        if !matches!(expr, Expr::MethodCall(_) | Expr::Call(_) | Expr::Path(_) | Expr::Field(_)) {
            return self.inner(expr);
        }
        let from = self.original(expr).to_string();
        let question = self.mutant(expr, &from, &format!("!{from}"));
        format!("(({}) != {question})", self.inner(expr))
    }

    fn literal(&mut self, node: &syn::ExprLit) {
        let from = self.original(node).to_string();
        let to = match &node.lit {
            Lit::Int(int) => match int.base10_parse::<u64>() {
                Ok(0) => format!("1{}", int.suffix()),
                Ok(value) => format!("{}{}", value - 1, int.suffix()),
                Err(_) => return,
            },
            Lit::Float(float) => match float.base10_parse::<f64>() {
                Ok(0.0) => format!("1.0{}", float.suffix()),
                Ok(1.0) => format!("0.0{}", float.suffix()),
                Ok(value) => format!("{:e}{}", value * 0.99, float.suffix()),
                Err(_) => return,
            },
            Lit::Bool(value) => (!value.value).to_string(),
            _ => return,
        };
        self.exchange(node, &from, &to);
    }

    fn exchange(&mut self, node: &impl Spanned, from: &str, to: &str) {
        let question = self.mutant(node, from, to);
        self.replace(node, format!("(if {question} {{ {to} }} else {{ {from} }})"));
    }

    fn path(&mut self, node: &syn::ExprPath) {
        let from = self.original(node).to_string();
        let (owner, name) = from.rsplit_once("::").unwrap_or(("", &from));
        let other = match name {
            "ZERO" => "ONE",
            "ONE" | "NEG_INFINITY" => "ZERO",
            "Overwrite" if owner.ends_with("Beta") => "Accumulate",
            "Accumulate" if owner.ends_with("Beta") => "Overwrite",
            _ => return,
        };
        self.exchange(node, &from, &format!("{owner}::{other}"));
    }

    fn range_end(&mut self, node: &syn::ExprRange) {
        // A literal's type is not known here, and it has mutants of its own.
        let Some(end) = node.end.as_deref().filter(|end| !matches!(end, Expr::Lit(_))) else {
            return visit::visit_expr_range(self, node);
        };
        if let Some(start) = &node.start {
            self.visit_expr(start);
        }
        let from = self.original(end).to_string();
        let number = self.next;
        self.mutant(end, &format!("..{from}"), &format!("..{from} - 1"));
        let text = format!("crate::mutant::less({number}, {})", self.inner(end));
        self.replace(end, text);
    }

    fn choice(&mut self, node: &syn::ExprMethodCall) {
        let (left, right) = (&*node.receiver, &node.args[0]);
        let (from, l, r) = (
            self.original(node).to_string(),
            self.original(left).to_string(),
            self.original(right).to_string(),
        );
        let (first, second) = (self.mutant(node, &from, &l), self.mutant(node, &from, &r));
        let (l, r, name) = (self.inner(left), self.inner(right), node.method.to_string());
        self.replace(
            node,
            format!(
                "(match ({l}, {r}) {{ (l, r) => if {first} {{ l }} else if {second} {{ r }} else {{ l.{name}(r) }} }})"
            ),
        );
    }
}

impl<'a> Visit<'a> for Rewriter<'_> {
    fn visit_expr(&mut self, node: &'a Expr) {
        match node {
            Expr::Binary(binary) if is_assignment(&binary.op) => self.assignment(binary),
            Expr::Binary(binary) => self.binary(binary),
            Expr::Unary(unary) if matches!(unary.op, UnOp::Neg(_) | UnOp::Not(_)) => {
                let (from, to) = (self.original(node).to_string(), self.original(&unary.expr).to_string());
                let question = self.mutant(node, &from, &to);
                let sign = if matches!(unary.op, UnOp::Neg(_)) { "-" } else { "!" };
                let text = self.inner(&unary.expr);
                self.replace(
                    node,
                    format!("(match {text} {{ x => if {question} {{ x }} else {{ {sign}x }} }})"),
                );
            }
            Expr::Lit(literal) => self.literal(literal),
            Expr::Path(path) => self.path(path),
            Expr::Range(range) => self.range_end(range),
            Expr::MethodCall(call)
                if (call.method == "max" || call.method == "min") && call.args.len() == 1 =>
            {
                self.choice(call);
            }
            Expr::If(branch) => {
                if is_planted(&branch.cond) {
                    if let Some((_, otherwise)) = &branch.else_branch {
                        self.visit_expr(otherwise);
                    }
                    return;
                }
                if !matches!(&*branch.cond, Expr::Let(_)) {
                    let text = self.condition(&branch.cond);
                    self.replace(&branch.cond, text);
                } else {
                    self.visit_expr(&branch.cond);
                }
                self.visit_block(&branch.then_branch);
                if let Some((_, otherwise)) = &branch.else_branch {
                    self.visit_expr(otherwise);
                }
            }
            // The length of `[x; n]` is a constant.
            Expr::Repeat(repeat) => self.visit_expr(&repeat.expr),
            Expr::Macro(_) | Expr::Const(_) => {}
            _ => visit::visit_expr(self, node),
        }
    }

    fn visit_arm(&mut self, node: &'a syn::Arm) {
        match &node.guard {
            Some((_, guard)) if is_planted(guard) => {}
            _ => visit::visit_arm(self, node),
        }
    }

    fn visit_pat(&mut self, _: &'a syn::Pat) {}
    fn visit_type(&mut self, _: &'a syn::Type) {}
    fn visit_path(&mut self, _: &'a syn::Path) {}
    fn visit_attribute(&mut self, _: &'a syn::Attribute) {}
    fn visit_item(&mut self, node: &'a syn::Item) {
        if let syn::Item::Fn(function) = node {
            self.visit_block(&function.block);
        }
    }
    fn visit_macro(&mut self, _: &'a syn::Macro) {}
    fn visit_angle_bracketed_generic_arguments(&mut self, _: &'a syn::AngleBracketedGenericArguments) {}
}

/// Whether a condition asks for a planted defect: what depends on it is not compiled into this build.
fn is_planted(condition: &Expr) -> bool {
    let Expr::Call(call) = condition else { return false };
    matches!(&*call.func, Expr::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "active"))
}

fn has_let(left: &Expr, right: &Expr) -> bool {
    [left, right].into_iter().any(|side| match side {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left, &binary.right),
        _ => false,
    })
}

/// Operators with their text and what may stand in their place; for operators on element types, only those
/// that every element type has.
const OPERATORS: &[(&str, &[&str])] = &[
    ("+", &["-"]),
    ("-", &["+"]),
    ("*", &["/"]),
    ("/", &["*"]),
    ("%", &["/"]),
    ("&", &["|"]),
    ("|", &["&"]),
    ("^", &["&"]),
    ("<<", &[">>"]),
    (">>", &["<<"]),
    ("&&", &["||"]),
    ("||", &["&&"]),
    ("==", &["!="]),
    ("!=", &["=="]),
    ("<", &["<=", ">="]),
    ("<=", &["<", ">"]),
    (">", &[">=", "<="]),
    (">=", &[">", "<"]),
    ("+=", &["-=", "="]),
    ("-=", &["+=", "="]),
    ("*=", &["="]),
    ("/=", &["="]),
    ("&=", &["|=", "="]),
    ("|=", &["&=", "="]),
];

fn operator(op: &BinOp) -> &'static str {
    match op {
        BinOp::Add(_) => "+",
        BinOp::Sub(_) => "-",
        BinOp::Mul(_) => "*",
        BinOp::Div(_) => "/",
        BinOp::Rem(_) => "%",
        BinOp::And(_) => "&&",
        BinOp::Or(_) => "||",
        BinOp::BitXor(_) => "^",
        BinOp::BitAnd(_) => "&",
        BinOp::BitOr(_) => "|",
        BinOp::Shl(_) => "<<",
        BinOp::Shr(_) => ">>",
        BinOp::Eq(_) => "==",
        BinOp::Lt(_) => "<",
        BinOp::Le(_) => "<=",
        BinOp::Ne(_) => "!=",
        BinOp::Ge(_) => ">=",
        BinOp::Gt(_) => ">",
        BinOp::AddAssign(_) => "+=",
        BinOp::SubAssign(_) => "-=",
        BinOp::MulAssign(_) => "*=",
        BinOp::DivAssign(_) => "/=",
        BinOp::BitAndAssign(_) => "&=",
        BinOp::BitOrAssign(_) => "|=",
        _ => "",
    }
}

fn alternatives(op: &BinOp) -> &'static [&'static str] {
    OPERATORS.iter().find(|(own, _)| *own == operator(op)).map_or(&[], |(_, others)| others)
}

fn is_assignment(op: &BinOp) -> bool {
    let text = operator(op);
    text.len() == 2 && text.ends_with('=') && !["==", "<=", ">=", "!="].contains(&text)
}

fn is_comparison(op: &BinOp) -> bool {
    ["==", "!=", "<", "<=", ">", ">="].contains(&operator(op))
}

#[cfg(test)]
mod tests {
    use super::super::select::reached;
    use super::*;

    fn mutated(body: &str) -> (String, Vec<Mutant>) {
        let source = Source::parse("ops/a.rs", &format!("fn backward() {{\n{body}\n}}\n")).unwrap();
        let sources = [source];
        let functions = reached(&sources, "backward");
        let (text, mutants) = rewrite(&sources[0], &functions.iter().collect::<Vec<_>>(), 1);
        // What comes out is Rust.
        syn::parse_file(&text).unwrap();
        (text, mutants)
    }

    fn changes(body: &str) -> Vec<String> {
        mutated(body).1.into_iter().map(|mutant| mutant.change).collect()
    }

    #[test]
    fn every_kind_of_code_has_its_mutants() {
        for (body, expected) in [
            ("a + b", &["a + b -> a - b"][..]),
            ("a * b - c", &["a * b - c -> a * b + c", "a * b -> a / b"]),
            ("a < b", &["a < b -> a <= b", "a < b -> a >= b"]),
            ("if f(x) { a }", &["f(x) -> !f(x)"]),
            ("if let Some(x) = a && b == c {}", &["b == c -> b != c"]),
            ("if a && !b {}", &["a && !b -> a || !b", "a -> !a", "!b -> b"]),
            ("if active(Defect::A) { a + b } else { a - b }", &["a - b -> a + b"]),
            ("match x { A if active(Defect::B) => a + b, _ => c }", &[]),
            ("-(x)", &["-(x) -> (x)"]),
            ("*a += b;", &["*a += b -> *a -= b", "*a += b -> *a = b"]),
            ("x.max(y);", &["x.max(y) -> x", "x.max(y) -> y"]),
            ("for i in 0..n {}", &["0 -> 1", "..n -> ..n - 1"]),
            ("[T::ZERO; 4]", &["T::ZERO -> T::ONE"]),
            ("f(0.5, 2, true)", &["0.5 -> 4.95e-1", "2 -> 1", "true -> false"]),
            ("g(Beta::Overwrite)", &["Beta::Overwrite -> Beta::Accumulate"]),
        ] {
            assert_eq!(changes(body), expected, "{body}");
        }
        assert_eq!(changes("let [0, 1] = x else { return }; vec![0; 3]; const N: usize = 2;"), [""; 0]);
    }

    #[test]
    fn operands_are_computed_once_and_nested_mutants_stay() {
        let (text, mutants) = mutated("(a + b) * c");
        assert_eq!(mutants.len(), 2);
        let inner = "(match ((a), (b)) { (l, r) => if crate::mutant::is(2) { l - r } else { l + r } })";
        let outer = format!(
            "(match ((({inner})), (c)) {{ (l, r) => if crate::mutant::is(1) {{ l / r }} else {{ l * r }} }})"
        );
        assert!(text.contains(&outer), "{text}");
        assert_eq!(text.matches("is(2)").count(), 1);
        assert_eq!((mutants[1].line, mutants[1].source.as_str()), (2, "(a + b) * c"));
    }
}

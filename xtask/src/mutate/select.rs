//! Which functions are backward code: every `host_backward`, and what it reaches by calls.
//!
//! Calls are resolved by name, without types: a path by its last two parts and the imports of its file, a method
//! by its name alone. What is taken too much is code that runs in forward only, which is harmless.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::Span;
use syn::visit::{self, Visit};

/// A parsed source file.
pub struct Source {
    /// From the folder `src` of the crate, with `/`.
    pub path: String,
    pub text: String,
    syntax: syn::File,
}

impl Source {
    pub fn parse(path: &str, text: &str) -> syn::Result<Source> {
        Ok(Source { path: path.to_string(), text: text.to_string(), syntax: syn::parse_file(text)? })
    }

    fn stem(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        name.trim_end_matches(".rs")
    }
}

/// A function of the host path with a body, outside tests.
pub struct Function<'a> {
    /// Position of its file in the sources.
    pub file: usize,
    pub name: String,
    /// The type of its `impl`, or the trait; empty for a free function.
    owner: String,
    is_method: bool,
    pub block: &'a syn::Block,
}

/// The functions reached from the roots called `root`, in the order of the sources.
pub fn reached<'a>(sources: &'a [Source], root: &str) -> Vec<Function<'a>> {
    let mut functions = Vec::new();
    let mut imports = Vec::new();
    for (file, source) in sources.iter().enumerate() {
        let mut collector = Collector { file, owner: String::new(), functions: &mut functions };
        collector.visit_file(&source.syntax);
        let mut found = Imports::default();
        found.visit_file(&source.syntax);
        imports.push(found.0);
    }
    let mut wanted: BTreeSet<usize> = (0..functions.len()).filter(|&at| functions[at].name == root).collect();
    let mut pending: Vec<usize> = wanted.iter().copied().collect();
    while let Some(at) = pending.pop() {
        let caller = &functions[at];
        let mut calls = Calls::default();
        calls.visit_block(caller.block);
        for call in &calls.0 {
            for target in resolve(call, caller, &functions, sources, &imports[caller.file]) {
                if wanted.insert(target) {
                    pending.push(target);
                }
            }
        }
    }
    let mut kept = Vec::new();
    for (at, function) in functions.into_iter().enumerate() {
        if wanted.contains(&at) {
            kept.push(function);
        }
    }
    kept
}

/// Functions that `call` may mean.
fn resolve(
    call: &Call,
    caller: &Function,
    functions: &[Function],
    sources: &[Source],
    imports: &BTreeMap<String, (String, String)>,
) -> Vec<usize> {
    let named = |name: &str| -> Vec<usize> {
        (0..functions.len()).filter(|&at| functions[at].name == name).collect()
    };
    let of = |name: &str, owner: &str| -> Vec<usize> {
        let fits = |at: &usize| functions[*at].owner == owner || sources[functions[*at].file].stem() == owner;
        let all: Vec<usize> = named(name).into_iter().filter(fits).collect();
        let near: Vec<usize> = all.iter().copied().filter(|&at| functions[at].file == caller.file).collect();
        if near.is_empty() { all } else { near }
    };
    match call {
        Call::Method(name) => named(name).into_iter().filter(|&at| functions[at].is_method).collect(),
        Call::Path(Some(owner), name) if owner == "Self" => of(name, &caller.owner),
        Call::Path(Some(owner), name) => {
            of(name, imports.get(owner).map_or(owner.as_str(), |(_, real)| real.as_str()))
        }
        Call::Path(None, name) => match imports.get(name) {
            Some((module, real)) => of(real, module),
            None => {
                let near = |at: &usize| functions[*at].file == caller.file && functions[*at].owner.is_empty();
                named(name).into_iter().filter(near).collect()
            }
        },
    }
}

enum Call {
    /// Qualifier and name, called or passed on as a value.
    Path(Option<String>, String),
    Method(String),
}

#[derive(Default)]
struct Calls(Vec<Call>);

impl<'a> Visit<'a> for Calls {
    fn visit_expr_path(&mut self, node: &'a syn::ExprPath) {
        let parts: Vec<String> = node.path.segments.iter().map(|s| s.ident.to_string()).collect();
        if let Some(name) = parts.last() {
            let owner = parts.len().checked_sub(2).map(|at| parts[at].clone());
            // A method of a type parameter is one of the trait that every element type has.
            let owner = owner.map(|owner| if owner == "T" { "Float".to_string() } else { owner });
            self.0.push(Call::Path(owner, name.clone()));
        }
    }

    fn visit_expr_method_call(&mut self, node: &'a syn::ExprMethodCall) {
        self.0.push(Call::Method(node.method.to_string()));
        visit::visit_expr_method_call(self, node);
    }
}

/// Local name to the module it is from and its name there.
#[derive(Default)]
struct Imports(BTreeMap<String, (String, String)>);

impl Imports {
    fn add(&mut self, tree: &syn::UseTree, module: &str) {
        match tree {
            syn::UseTree::Path(path) => self.add(&path.tree, &path.ident.to_string()),
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.add(item, module)),
            syn::UseTree::Name(name) => self.insert(&name.ident, &name.ident, module),
            syn::UseTree::Rename(rename) => self.insert(&rename.rename, &rename.ident, module),
            syn::UseTree::Glob(_) => {}
        }
    }

    fn insert(&mut self, local: &syn::Ident, real: &syn::Ident, module: &str) {
        // `use a::b::{self}` names the module itself.
        let real = if real == "self" { module.to_string() } else { real.to_string() };
        let local = if local == "self" { real.clone() } else { local.to_string() };
        self.0.insert(local, (module.to_string(), real));
    }
}

impl<'a> Visit<'a> for Imports {
    fn visit_item_use(&mut self, node: &'a syn::ItemUse) {
        self.add(&node.tree, "");
    }
}

struct Collector<'f, 'a> {
    file: usize,
    owner: String,
    functions: &'f mut Vec<Function<'a>>,
}

impl<'a> Collector<'_, 'a> {
    fn add(&mut self, signature: &syn::Signature, attrs: &[syn::Attribute], block: &'a syn::Block) {
        let name = signature.ident.to_string();
        // A constant function cannot ask at run time which mutant is active.
        if is_test(attrs) || name.contains("cuda") || signature.constness.is_some() {
            return;
        }
        let (file, owner, is_method) = (self.file, self.owner.clone(), signature.receiver().is_some());
        self.functions.push(Function { file, name, owner, is_method, block });
    }

    fn inside(&mut self, owner: String, visit: impl FnOnce(&mut Self)) {
        let outer = std::mem::replace(&mut self.owner, owner);
        visit(self);
        self.owner = outer;
    }
}

impl<'a> Visit<'a> for Collector<'_, 'a> {
    fn visit_item_mod(&mut self, node: &'a syn::ItemMod) {
        if !is_test(&node.attrs) {
            visit::visit_item_mod(self, node);
        }
    }

    fn visit_item_fn(&mut self, node: &'a syn::ItemFn) {
        self.add(&node.sig, &node.attrs, &node.block);
    }

    fn visit_item_impl(&mut self, node: &'a syn::ItemImpl) {
        let owner = match &*node.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        self.inside(owner.unwrap_or_default(), |this| visit::visit_item_impl(this, node));
    }

    fn visit_impl_item_fn(&mut self, node: &'a syn::ImplItemFn) {
        self.add(&node.sig, &node.attrs, &node.block);
    }

    fn visit_item_trait(&mut self, node: &'a syn::ItemTrait) {
        self.inside(node.ident.to_string(), |this| visit::visit_item_trait(this, node));
    }

    fn visit_trait_item_fn(&mut self, node: &'a syn::TraitItemFn) {
        if let Some(block) = &node.default {
            self.add(&node.sig, &node.attrs, block);
        }
    }
}

/// Whether an item is compiled for tests only.
fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg")
                && attribute.parse_args::<syn::Ident>().is_ok_and(|what| what == "test"))
    })
}

/// Line of a span, from 1.
pub fn line(span: Span) -> usize {
    span.start().line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_reaches_helpers_by_path_method_and_import_but_no_tests_and_no_forward() {
        let op = "use super::shared::engine as machine;\nuse crate::host::{self, store};\n\
            impl Op for Twice {\n fn host_forward(&self) { only_forward(); }\n\
            fn host_backward(&self) { machine::spin(); store(); slope(1.0); self.turn(); list.map(passed); T::flip(); }\n\
            fn turn(&self) {}\n fn cuda_backward(&self) { kernel(); } }\n\
            fn only_forward() {}\n fn slope(x: f64) { host::dot() }\n fn passed() {}\n fn kernel() {}\n\
            const fn fixed() {}\n#[cfg(test)] mod tests { fn slope() {} }\n";
        let engine = "pub fn spin() { inner() }\nfn inner() {}\npub fn other() {}\n";
        let host =
            "pub fn store() {}\npub fn dot() {}\npub fn unused() {}\npub trait Float { fn flip(self) {} }\n";
        let parse = |path: &str, text: &str| Source::parse(path, text).unwrap();
        let sources =
            [parse("ops/twice.rs", op), parse("ops/shared/engine.rs", engine), parse("host.rs", host)];
        let names: Vec<String> =
            reached(&sources, "host_backward").into_iter().map(|function| function.name).collect();
        assert_eq!(
            names,
            ["host_backward", "turn", "slope", "passed", "spin", "inner", "store", "dot", "flip"]
        );
    }
}

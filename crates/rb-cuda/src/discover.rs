//! Looks for the driver, NVRTC, cuBLASLt and NCCL where users have them; nothing is loaded.
//!
//! Places, in order:
//!
//! 1. `RUSTINGBRAIN_CUDA_PATH`, a list of folders: library folders, toolkits or Python environments;
//! 2. `CUDA_HOME` and `CUDA_PATH`;
//! 3. `LD_LIBRARY_PATH`;
//! 4. the wheels of NVIDIA in the environments of `CONDA_PREFIX`, `VIRTUAL_ENV` and the `python3` on `PATH`,
//!    in the layout of CUDA 12 (`nvidia/cuda_nvrtc/lib`) and of CUDA 13 (`nvidia/cu13/lib`);
//! 5. `/usr/local/cuda*`, `/opt/cuda` and the folders of the system.
//!
//! The first file whose major version the driver serves wins: a driver of CUDA 12 does not run NVRTC 13.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::CudaError;

/// A library that the CUDA backend needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Component {
    /// What users call it.
    pub name: &'static str,
    /// Beginning of its file name.
    pub file_stem: &'static str,
    /// How to get it.
    pub remedy: &'static str,
}

pub(crate) const DRIVER: Component = Component {
    name: "driver",
    file_stem: "libcuda.so",
    remedy: "install the NVIDIA driver (in a container, start it with the GPUs: `--gpus all`)",
};
pub(crate) const NVRTC: Component = Component {
    name: "NVRTC",
    file_stem: "libnvrtc.so",
    remedy: "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` (nvidia-cuda-nvrtc-cu12 for a \
             driver of CUDA 12), or name its folder in RUSTINGBRAIN_CUDA_PATH",
};
pub(crate) const CUBLASLT: Component = Component {
    name: "cuBLASLt",
    file_stem: "libcublasLt.so",
    remedy: "install the CUDA toolkit, or `pip install nvidia-cublas` (nvidia-cublas-cu12 for a driver of \
             CUDA 12), or name its folder in RUSTINGBRAIN_CUDA_PATH",
};
pub(crate) const NCCL: Component = Component {
    name: "NCCL",
    file_stem: "libnccl.so",
    remedy: "install NCCL, or `pip install nvidia-nccl-cu13` (only for several GPUs)",
};

/// Everything that is looked for.
pub const COMPONENTS: [Component; 4] = [DRIVER, NVRTC, CUBLASLT, NCCL];

/// What was found of one component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The component.
    pub component: Component,
    /// The file that would be used, if any.
    pub path: Option<PathBuf>,
}

/// Looks for every component; nothing is loaded.
pub fn discover() -> Vec<Found> {
    let search = Search::of_this_machine();
    COMPONENTS
        .iter()
        .map(|component| Found { component: *component, path: search.find(component, None).ok() })
        .collect()
}

/// What was found, what was not, and where it was looked for, in one sentence for errors.
pub fn probe() -> String {
    let search = Search::of_this_machine();
    let mut text = String::new();
    for component in [DRIVER, NVRTC, CUBLASLT] {
        let separator = if text.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = match search.find(&component, None) {
            Ok(path) => write!(text, "{separator}{} found: {}", component.name, path.display()),
            Err(_) => write!(text, "{separator}{} not found ({})", component.name, component.file_stem),
        };
    }
    let _ = write!(text, "; looked in {}", search.places());
    text
}

/// The folder of what is kept between runs: `$RUSTINGBRAIN_CACHE`, else `rustingbrain` in the user's cache
/// folder; nothing without a home.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    cache_folder_of(&|name| env::var_os(name))
}

fn cache_folder_of(var: &Var<'_>) -> Option<PathBuf> {
    let path = |name: &str| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    path("RUSTINGBRAIN_CACHE")
        .or_else(|| path("XDG_CACHE_HOME").map(|p| p.join("rustingbrain")))
        .or_else(|| path("HOME").map(|p| p.join(".cache/rustingbrain")))
}

/// Version of the kernel's part of the driver, for example `580.95.05`, where the system tells.
pub(crate) fn kernel_driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_string())
}

/// An environment: a variable by its name.
type Var<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

/// The folders that are searched, in order.
#[derive(Debug)]
pub(crate) struct Search {
    folders: Vec<PathBuf>,
}

impl Search {
    pub(crate) fn of_this_machine() -> Search {
        Search::of(&|name| env::var_os(name), Path::new("/"))
    }

    /// The folders that exist under `root`, which stands for `/`.
    fn of(var: &Var<'_>, root: &Path) -> Search {
        let mut folders: Vec<PathBuf> = Vec::new();
        for folder in all_folders(var, root) {
            // A toolkit's stubs have the names of the driver and none of its code.
            if folder.is_dir() && !folder.ends_with("stubs") && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        Search { folders }
    }

    /// Folders as one text.
    pub(crate) fn places(&self) -> String {
        if self.folders.is_empty() {
            return "no folder: none of the usual ones exists".into();
        }
        self.folders.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ")
    }

    /// The file to load for `component` under a driver of this CUDA version; every version will do without one.
    pub(crate) fn find(&self, component: &Component, driver_major: Option<u32>) -> crate::Result<PathBuf> {
        let mut refused = Vec::new();
        for folder in &self.folders {
            for (path, major) in libraries(folder, component.file_stem) {
                if serves(component, major, driver_major) {
                    return Ok(path);
                }
                refused.push(path.display().to_string());
            }
        }
        let mut looked_for = format!("{}*", component.file_stem);
        if let Some(major) = driver_major
            && !refused.is_empty()
        {
            // Writing to a string cannot fail.
            let _ = write!(
                looked_for,
                " of CUDA 12 to {major}, which the driver serves; not usable: {}",
                refused.join(", ")
            );
        }
        Err(CudaError::Missing {
            component: component.name,
            looked_for,
            places: self.places(),
            remedy: component.remedy.into(),
        })
    }
}

/// Whether a library of `major` runs under a driver of CUDA `driver_major`.
fn serves(component: &Component, major: Option<u32>, driver_major: Option<u32>) -> bool {
    if *component == DRIVER || *component == NCCL {
        return true;
    }
    // Without a number in the name, trust the name.
    major.is_none_or(|major| major >= 12 && driver_major.is_none_or(|driver| major <= driver))
}

/// Files in `folder` named `stem` with any version, the highest first, each with its major version.
fn libraries(folder: &Path, stem: &str) -> Vec<(PathBuf, Option<u32>)> {
    let mut hits: Vec<(Option<u32>, PathBuf)> = entries(folder)
        .into_iter()
        .filter_map(|path| {
            let name = path.file_name()?.to_string_lossy().into_owned();
            let rest = name.strip_prefix(stem)?;
            let version = |rest: &str| rest.strip_prefix('.')?.split('.').next()?.parse::<u32>().ok();
            if rest.is_empty() {
                // A plain name is a link to a versioned one, or a file of unknown version.
                let real = path.canonicalize().ok()?;
                let name = real.file_name()?.to_string_lossy().into_owned();
                return Some((name.strip_prefix(stem).and_then(version), path));
            }
            version(rest).map(|major| (Some(major), path))
        })
        .collect();
    // The highest version first; of one version the shortest name, which is the one that others load by.
    hits.sort_by_key(|(major, path)| (std::cmp::Reverse(*major), path.as_os_str().len(), path.clone()));
    hits.into_iter().map(|(major, path)| (path, major)).collect()
}

fn all_folders(var: &Var<'_>, root: &Path) -> Vec<PathBuf> {
    let list = |name: &str| -> Vec<PathBuf> {
        let value = var(name).unwrap_or_default();
        // An empty part would be the folder that the program happens to run in.
        env::split_paths(&value).filter(|part| !part.as_os_str().is_empty()).collect()
    };
    let path = |name: &str| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let mut folders = Vec::new();
    for folder in list("RUSTINGBRAIN_CUDA_PATH") {
        folders.push(folder.clone());
        folders.extend(toolkit_folders(&folder));
        folders.extend(environment_folders(&folder));
        // Site-packages itself, or the folder `nvidia` in it.
        folders.extend(below(&folder.join("nvidia"), "lib"));
        folders.extend(below(&folder, "lib"));
    }
    for toolkit in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path) {
        folders.extend(toolkit_folders(&toolkit));
    }
    folders.extend(list("LD_LIBRARY_PATH"));
    for prefix in ["CONDA_PREFIX", "VIRTUAL_ENV"].into_iter().filter_map(path) {
        folders.push(prefix.join("lib"));
        folders.extend(environment_folders(&prefix));
    }
    for prefix in python_prefixes(&list("PATH")) {
        folders.extend(environment_folders(&prefix));
    }
    if let Some(home) = path("HOME") {
        folders.extend(environment_folders(&home.join(".local")));
    }
    folders.extend(system_folders(root));
    folders
}

/// Library folders of a CUDA toolkit.
fn toolkit_folders(toolkit: &Path) -> Vec<PathBuf> {
    let mut folders = vec![toolkit.join("lib64"), toolkit.join("lib")];
    folders.extend(below(&toolkit.join("targets"), "lib"));
    folders
}

/// Library folders of the wheels in a Python environment.
fn environment_folders(prefix: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for lib in ["lib", "lib64", "local/lib"] {
        let pythons = entries(&prefix.join(lib)).into_iter().filter(|p| {
            p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")) && p.is_dir()
        });
        for python in pythons {
            for site in ["site-packages", "dist-packages"] {
                folders.extend(below(&python.join(site).join("nvidia"), "lib"));
            }
        }
    }
    folders
}

/// Prefixes of the environment whose `python3` comes first on `PATH`, and of the one that it is based on.
fn python_prefixes(path: &[PathBuf]) -> Vec<PathBuf> {
    let mut prefixes = Vec::new();
    for name in ["python3", "python"] {
        let Some(program) = path.iter().map(|folder| folder.join(name)).find(|p| p.is_file()) else {
            continue;
        };
        let prefix_of = |program: &Path| Some(program.parent()?.parent()?.to_path_buf());
        let Some(prefix) = prefix_of(&program) else { continue };
        let settings = std::fs::read_to_string(prefix.join("pyvenv.cfg")).ok();
        prefixes.push(prefix);
        match settings {
            Some(text) => {
                let value = |key: &str| {
                    let line = text.lines().find(|l| l.split('=').next().is_some_and(|k| k.trim() == key))?;
                    Some(line.split_once('=')?.1.trim().to_string())
                };
                if value("include-system-site-packages").is_some_and(|v| v.eq_ignore_ascii_case("true"))
                    && let Some(home) = value("home")
                    && let Some(base) = Path::new(&home).parent()
                {
                    prefixes.push(base.to_path_buf());
                }
            }
            // Not a virtual environment: the program may be a link into the installation.
            None => prefixes.extend(program.canonicalize().ok().and_then(|p| prefix_of(&p))),
        }
    }
    prefixes
}

fn system_folders(root: &Path) -> Vec<PathBuf> {
    let mut folders = toolkit_folders(&root.join("usr/local/cuda"));
    let mut versions: Vec<PathBuf> = entries(&root.join("usr/local"))
        .into_iter()
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("cuda-")))
        .collect();
    versions.reverse();
    folders.extend(versions.iter().flat_map(|toolkit| toolkit_folders(toolkit)));
    folders.extend(toolkit_folders(&root.join("opt/cuda")));
    let system = [
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
        "usr/lib64",
        "usr/lib",
        "usr/local/nvidia/lib64",
        "usr/lib/wsl/lib",
        "run/opengl-driver/lib",
    ];
    folders.extend(system.map(|folder| root.join(folder)));
    folders
}

/// `folder/*/name`.
fn below(folder: &Path, name: &str) -> Vec<PathBuf> {
    entries(folder).into_iter().map(|p| p.join(name)).collect()
}

/// Entries in the order of their names; none of a folder that is absent or closed.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut list: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    list.sort();
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A folder that stands for `/`, with empty files in it, and an environment.
    struct Tree {
        dir: tempfile::TempDir,
        vars: BTreeMap<&'static str, OsString>,
    }

    impl Tree {
        fn new(files: &[&str]) -> Tree {
            let dir = tempfile::tempdir().unwrap();
            for file in files {
                let path = dir.path().join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, "").unwrap();
            }
            Tree { dir, vars: BTreeMap::new() }
        }

        fn path(&self, part: &str) -> PathBuf {
            self.dir.path().join(part)
        }

        fn set(mut self, name: &'static str, parts: &[&str]) -> Tree {
            let paths: Vec<PathBuf> = parts.iter().map(|p| self.path(p)).collect();
            self.vars.insert(name, env::join_paths(paths).unwrap());
            self
        }

        fn search(&self) -> Search {
            Search::of(&|name| self.vars.get(name).cloned(), self.dir.path())
        }

        /// The file found, relative to the tree.
        fn finds(&self, component: &Component, driver_major: Option<u32>) -> Option<String> {
            let path = self.search().find(component, driver_major).ok()?;
            Some(path.strip_prefix(self.dir.path()).unwrap().to_string_lossy().into_owned())
        }
    }

    #[test]
    fn versions_are_read_from_names() {
        let tree = Tree::new(&[
            "a/libnvrtc.so.12",
            "a/libnvrtc.so.13",
            "a/libnvrtc.alt.so.13",
            "a/libnvrtc-builtins.so.13.0",
        ]);
        let found = libraries(&tree.path("a"), "libnvrtc.so");
        assert_eq!(
            found,
            [(tree.path("a/libnvrtc.so.13"), Some(13)), (tree.path("a/libnvrtc.so.12"), Some(12))]
        );
        assert_eq!(libraries(&tree.path("a"), "libcublasLt.so"), []);
    }

    #[test]
    fn wheels_of_both_layouts_and_the_driver_decide() {
        let site = "env/lib/python3.12/site-packages/nvidia";
        let twelve = format!("{site}/cuda_nvrtc/lib/libnvrtc.so.12");
        let thirteen = format!("{site}/cu13/lib/libnvrtc.so.13");
        let tree = Tree::new(&[&twelve, &thirteen]).set("VIRTUAL_ENV", &["env"]);
        assert_eq!(tree.finds(&NVRTC, Some(12)), Some(twelve));
        assert_eq!(tree.finds(&NVRTC, Some(13)), Some(thirteen));
        assert_eq!(tree.finds(&CUBLASLT, Some(13)), None);
    }

    #[test]
    fn the_explicit_setting_comes_first_and_takes_every_kind_of_folder() {
        let system = "usr/local/cuda/lib64/libcublasLt.so.13";
        let cases = [
            ("own/libcublasLt.so.13", "own"),
            ("kit/targets/x86_64-linux/lib/libcublasLt.so.13", "kit"),
            ("venv/lib/python3.11/site-packages/nvidia/cublas/lib/libcublasLt.so.12", "venv"),
            ("site/nvidia/cu13/lib/libcublasLt.so.13", "site"),
            ("site/nvidia/cu13/lib/libcublasLt.so.13", "site/nvidia"),
        ];
        for (file, setting) in cases {
            let tree = Tree::new(&[system, file]).set("RUSTINGBRAIN_CUDA_PATH", &["absent", setting]);
            assert_eq!(tree.finds(&CUBLASLT, Some(13)).as_deref(), Some(file), "{setting}");
        }
        assert_eq!(Tree::new(&[system]).finds(&CUBLASLT, None).as_deref(), Some(system));
    }

    #[test]
    fn order_of_places() {
        let files = [
            "home/lib64/libnvrtc.so.12",
            "ld/libnvrtc.so.12",
            "conda/lib/libnvrtc.so.12",
            "usr/local/cuda-13.0/lib64/libnvrtc.so.13",
            "usr/lib64/libnvrtc.so.12",
        ];
        let set = |from: usize| {
            let tree = Tree::new(&files[from..]);
            tree.set("CUDA_HOME", &["home"]).set("LD_LIBRARY_PATH", &["ld"]).set("CONDA_PREFIX", &["conda"])
        };
        for (from, file) in files.iter().enumerate() {
            assert_eq!(set(from).finds(&NVRTC, None).as_deref(), Some(*file));
        }
        assert_eq!(set(3).finds(&NVRTC, Some(12)).as_deref(), Some(files[4]), "the driver is of CUDA 12");
    }

    #[test]
    fn the_python_on_the_path_is_followed() {
        let wheel = "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13";
        let tree = Tree::new(&["empty/x", "venv/bin/python3", "venv/pyvenv.cfg", wheel]);
        let tree = tree.set("PATH", &["empty", "venv/bin"]);
        assert_eq!(tree.finds(&NVRTC, None).as_deref(), Some(wheel));

        let base = "base/lib/python3/dist-packages/nvidia/cu13/lib/libnvrtc.so.13";
        let tree = Tree::new(&["venv/bin/python", "base/bin/python3", base]).set("PATH", &["venv/bin"]);
        let settings = |include: &str| {
            let home = tree.path("base/bin");
            let text = format!("home = {}\ninclude-system-site-packages = {include}\n", home.display());
            std::fs::write(tree.path("venv/pyvenv.cfg"), text).unwrap();
        };
        settings("false");
        assert_eq!(tree.finds(&NVRTC, None), None);
        settings("true");
        assert_eq!(tree.finds(&NVRTC, None).as_deref(), Some(base));
    }

    #[test]
    fn stubs_are_not_the_driver() {
        let files = ["kit/lib64/stubs/libcuda.so", "usr/lib/x86_64-linux-gnu/libcuda.so.1"];
        let tree = Tree::new(&files).set("LD_LIBRARY_PATH", &["kit/lib64/stubs"]);
        assert_eq!(tree.finds(&DRIVER, None).as_deref(), Some(files[1]));
    }

    #[test]
    fn an_error_says_what_was_looked_for_and_where() {
        let tree = Tree::new(&["ld/libnvrtc.so.13"]).set("LD_LIBRARY_PATH", &["ld", "gone"]);
        let message = |component| tree.search().find(component, Some(12)).unwrap_err().to_string();
        let place = tree.path("ld").display().to_string();
        for part in ["NVRTC was not found", "CUDA 12 to 12", "libnvrtc.so.13", &place, "pip install"] {
            assert!(message(&NVRTC).contains(part), "{part}: {}", message(&NVRTC));
        }
        assert!(!message(&NVRTC).contains("gone"));
        assert!(message(&CUBLASLT).contains("libcublasLt.so*"), "{}", message(&CUBLASLT));
        assert!(Tree::new(&[]).search().places().contains("no folder"));
    }

    #[test]
    fn the_sentence_names_every_needed_part() {
        let text = probe();
        assert!(["driver", "NVRTC", "cuBLASLt", "looked in"].iter().all(|n| text.contains(n)), "{text}");
    }

    #[test]
    fn the_cache_folder_follows_the_settings() {
        let with = |pairs: &[(&str, &str)]| {
            cache_folder_of(&|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
        };
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[("HOME", "/h")]), Some("/h/.cache/rustingbrain".into()));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Some("/x/rustingbrain".into()));
        assert_eq!(with(&[("RUSTINGBRAIN_CACHE", "/r"), ("HOME", "/h")]), Some("/r".into()));
    }
}

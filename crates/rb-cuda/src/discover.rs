//! Looks for the driver, NVRTC, cuBLASLt and NCCL where users have them.
//!
//! Places, in order: `CUDA_HOME` and `CUDA_PATH`, `LD_LIBRARY_PATH`, the conda environment, the wheels of
//! `nvidia-*` packages in the Python environments named by `VIRTUAL_ENV` and `CONDA_PREFIX`, system folders.

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

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

/// Everything that is looked for.
pub const COMPONENTS: [Component; 4] = [
    Component { name: "driver", file_stem: "libcuda.so", remedy: "install the NVIDIA driver" },
    Component {
        name: "NVRTC",
        file_stem: "libnvrtc.so",
        remedy: "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`",
    },
    Component {
        name: "cuBLASLt",
        file_stem: "libcublasLt.so",
        remedy: "install the CUDA toolkit, or `pip install nvidia-cublas`",
    },
    Component {
        name: "NCCL",
        file_stem: "libnccl.so",
        remedy: "install NCCL, or `pip install nvidia-nccl-cu13` (only for several GPUs)",
    },
];

/// What was found of one component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The component.
    pub component: Component,
    /// The first file of that name, if any.
    pub path: Option<PathBuf>,
}

/// Looks for every component; nothing is loaded.
pub fn discover() -> Vec<Found> {
    let folders = folders();
    COMPONENTS
        .iter()
        .map(|&component| Found {
            component,
            path: folders.iter().find_map(|f| library(f, component.file_stem)),
        })
        .collect()
}

/// One sentence on what is missing, for errors.
pub fn probe() -> String {
    let mut text = String::new();
    for found in discover().iter().filter(|f| f.component.name != "NCCL") {
        let separator = if text.is_empty() { "" } else { ", " };
        let state = if found.path.is_some() { "found" } else { "not found" };
        // Writing to a string cannot fail.
        let _ = write!(text, "{separator}{} {state}", found.component.name);
    }
    text
}

/// A file in `folder` whose name is `stem` with any version.
fn library(folder: &Path, stem: &str) -> Option<PathBuf> {
    let mut hits: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(stem)))
        .collect();
    hits.sort();
    hits.into_iter().next()
}

fn folders() -> Vec<PathBuf> {
    let var = |name: &str| env::var_os(name).map(PathBuf::from);
    let mut folders = Vec::new();
    for root in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(var) {
        folders.extend([root.join("lib64"), root.join("lib"), root.join("targets/x86_64-linux/lib")]);
    }
    if let Some(list) = env::var_os("LD_LIBRARY_PATH") {
        folders.extend(env::split_paths(&list));
    }
    for prefix in ["CONDA_PREFIX", "VIRTUAL_ENV"].into_iter().filter_map(var) {
        folders.push(prefix.join("lib"));
        folders.extend(wheel_folders(&prefix.join("lib")));
    }
    for root in ["/usr/local/cuda", "/opt/cuda"] {
        folders.extend([
            PathBuf::from(root).join("lib64"),
            PathBuf::from(root).join("targets/x86_64-linux/lib"),
        ]);
    }
    let system = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
    ];
    folders.extend(system.map(PathBuf::from));
    folders
}

/// `lib/python3.*/site-packages/nvidia/*/lib` below a Python environment's `lib`.
fn wheel_folders(lib: &Path) -> Vec<PathBuf> {
    let list =
        |p: &Path| std::fs::read_dir(p).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>();
    let mut folders = Vec::new();
    for python in list(lib)
        .into_iter()
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")))
    {
        for package in list(&python.join("site-packages/nvidia")) {
            folders.push(package.join("lib"));
        }
    }
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_versioned_names_only() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(library(dir.path(), "libnvrtc.so"), None);
        for name in ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcublas.so.13"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(library(dir.path(), "libnvrtc.so"), Some(dir.path().join("libnvrtc.so.13")));
        assert_eq!(library(dir.path(), "libcublasLt.so"), None);
    }

    #[test]
    fn the_sentence_names_every_needed_part() {
        let text = probe();
        assert!(["driver", "NVRTC", "cuBLASLt"].iter().all(|n| text.contains(n)), "{text}");
    }
}

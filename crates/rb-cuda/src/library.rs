//! Shared libraries as tables of functions.
//!
//! The types and constants of CUDA come from `cudarc`; the functions are looked up here, by the path that was
//! found. `cudarc`'s own look-up goes by name, so it may load another version than the one that was chosen,
//! and panics where a name or a function is absent. Status codes stay integers: a library newer than the
//! bindings returns codes that their enums do not know.

use std::path::{Path, PathBuf};

use crate::discover::Component;
use crate::{CudaError, Result};

/// A table of functions that can be filled from a library.
pub(crate) trait Api: Sized {
    /// Looks up every function.
    ///
    /// # Errors
    /// The names that the library lacks.
    ///
    /// # Safety
    /// The library must be the one that the table is written for, and must stay loaded while it is used.
    unsafe fn load(library: &libloading::Library) -> Result<Self, Vec<&'static str>>;
}

/// Declares a table of C functions. Without a return type it is a status, with 0 for success.
macro_rules! api {
    (@ret) => { i32 };
    (@ret $ret:ty) => { $ret };
    ($(#[$meta:meta])* $table:ident { $(fn $name:ident($($arg:ty),* $(,)?) $(-> $ret:ty)?;)* }) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $crate::library::api!(@ret $($ret)?),)*
        }

        impl $crate::library::Api for $table {
            #[allow(non_snake_case)]
            unsafe fn load(library: &libloading::Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the caller vouches for the library, whose headers declare this signature; the
                    // function pointer is copied out and the library stays loaded.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $crate::library::api!(@ret $($ret)?)>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    }
                    .map(|symbol| *symbol)
                    .map_err(|_| missing.push(stringify!($name)));
                )*
                Ok($table { $($name: match $name { Ok(function) => function, Err(()) => return Err(missing) },)* })
            }
        }
    };
}
pub(crate) use api;

/// Calls a function of `$on.api` and turns its status into a [`Result`]; stands in an `unsafe` block.
macro_rules! call {
    ($on:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $on.check(stringify!($name), ($on.api.$name)($($arg),*))
    };
}
pub(crate) use call;

/// Loads a library for the rest of the process and fills its table.
pub(crate) fn open<A: Api>(component: &Component, path: &Path) -> Result<A> {
    let missing = |looked_for: String, remedy: String| CudaError::Missing {
        component: component.name,
        looked_for,
        places: path.display().to_string(),
        remedy,
    };
    let library = load(path).map_err(|reason| {
        missing(format!("a library that loads, but: {reason}"), component.remedy.to_string())
    })?;
    // SAFETY: the name says which library it is, and it is never unloaded (below).
    let api = unsafe { A::load(&library) };
    // Unloading would leave the table's pointers dangling; CUDA libraries do not unload cleanly anyway.
    std::mem::forget(library);
    api.map_err(|names| {
        missing(names.join(", "), format!("this version is too old or damaged; {}", component.remedy))
    })
}

/// Loads what a library will ask for by name, so that it gets the file of the same folder.
pub(crate) fn preload(path: &Path) {
    match load(path) {
        Ok(library) => std::mem::forget(library),
        // The library that needs it may still find another.
        Err(reason) => tracing::debug!("{}: {reason}", path.display()),
    }
}

fn load(path: &Path) -> Result<libloading::Library, String> {
    // SAFETY: the initialisation code of NVIDIA's libraries has no preconditions.
    unsafe { libloading::Library::new(path) }.map_err(|e| {
        let text = e.to_string();
        match std::error::Error::source(&e) {
            Some(source) if !text.contains(&source.to_string()) => format!("{text}: {source}"),
            _ => text,
        }
    })
}

/// A library in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryInfo {
    /// What users call it.
    pub name: &'static str,
    /// The file, or its name where the system's loader found it.
    pub path: PathBuf,
    /// Its version.
    pub version: String,
}

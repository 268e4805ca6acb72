//! Kernels as values, and how they are launched.

use std::fmt::{Display, Write as _};

use crate::Buffer;

/// A kernel source. The file stem is its name and its entry point.
#[derive(Debug, PartialEq, Eq)]
pub struct Kernel {
    /// File stem and entry point.
    pub name: &'static str,
    /// CUDA C; `kernels/prelude.cuh` is put before it.
    pub source: &'static str,
}

/// A [`Kernel`] from `kernels/NAME.cu`, embedded in the binary; `kernel!("NAME", "HEADER")` puts
/// `kernels/HEADER.cuh` before it.
#[macro_export]
macro_rules! kernel {
    ($name:literal, $($header:literal),+) => {
        $crate::Kernel {
            name: $name,
            source: concat!(
                $(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/", $header, ".cuh")),)+
                "\n#line 1 \"", $name, ".cu\"\n",
                include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/", $name, ".cu")),
            ),
        }
    };
    ($name:literal) => {
        $crate::Kernel {
            name: $name,
            source: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/", $name, ".cu")),
        }
    };
}

/// What every kernel may use.
pub(crate) const PRELUDE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/prelude.cuh"));

/// A kernel with its compile-time constants: what is compiled and cached.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Unit {
    /// Name and entry point.
    pub name: &'static str,
    source: &'static str,
    /// `#define` lines.
    pub defines: String,
}

impl Unit {
    /// Whether it waits by itself for the work before it, so that its launch may begin before that ends.
    pub(crate) fn awaits_earlier_work(&self) -> bool {
        ["await_earlier_work();", "end_of_earlier_work();"].iter().any(|call| self.source.contains(call))
    }

    /// The whole translation unit.
    pub fn text(&self) -> String {
        format!("{PRELUDE}\n{}#line 1 \"{}.cu\"\n{}", self.defines, self.name, self.source)
    }
}

/// One argument of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// A pointer into a device buffer, with an offset in bytes.
    Buffer(&'a Buffer, usize),
    /// A null pointer: an optional tensor that is absent.
    Null,
    /// `float`
    F32(f32),
    /// `int`
    I32(i32),
    /// `unsigned int`
    U32(u32),
    /// `long long`
    I64(i64),
    /// `unsigned long long`
    U64(u64),
    /// A struct of sixteen `unsigned long long`.
    Words([u64; 16]),
    /// `const __grid_constant__ TensorMap` of `kernels/hopper.cuh`.
    Tiles(Tiles<'a>),
}

/// Heads of a bf16 tensor that a kernel for sm_90a copies in boxes of some tokens of one head and 64 of its elements,
/// in the 128-byte swizzle; what lies outside reads as zero. A matrix is one batch row of one head.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<'a> {
    /// Memory of the tensor.
    pub buffer: &'a Buffer,
    /// Bytes to the first element, a multiple of 16.
    pub offset_bytes: usize,
    /// `[batch, tokens, heads, size]`, none of them 0, `size` a multiple of 8.
    pub shape: [usize; 4],
    /// Elements from token to token, a multiple of 8; batch rows follow each other.
    pub token_stride: usize,
    /// Tokens of a box, at most 256.
    pub box_tokens: usize,
}

impl Tiles<'_> {
    /// Bytes from the first element to the end of the last.
    pub(crate) fn bytes(&self) -> usize {
        let [batch, tokens, heads, size] = self.shape;
        2 * ((batch * tokens).saturating_sub(1) * self.token_stride + heads * size)
    }
}

/// A launch under construction: kernel, constants, grid, arguments in order.
#[derive(Debug)]
pub struct Launch<'a> {
    pub(crate) unit: Unit,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) args: Vec<Arg<'a>>,
    pub(crate) moved_bytes: f64,
    pub(crate) flops: f64,
    pub(crate) about: String,
}

impl<'a> Launch<'a> {
    /// A launch of `grid` blocks of `block` threads. Numbers above what the hardware takes are refused later.
    pub fn new(kernel: &Kernel, grid: [u32; 3], block: [u32; 3]) -> Launch<'a> {
        let source = rb_planted::kernel_source(kernel.name, kernel.source);
        let unit = Unit { name: kernel.name, source, defines: String::new() };
        Launch {
            unit,
            grid,
            block,
            shared_bytes: 0,
            args: Vec::new(),
            moved_bytes: 0.0,
            flops: 0.0,
            about: String::new(),
        }
    }

    /// `grid` blocks of `threads` threads in one dimension, enough for `items` threads in a grid-stride loop:
    /// at most 2^31 - 1 blocks and at least one.
    pub fn for_items(kernel: &Kernel, items: usize, threads: u32) -> Launch<'a> {
        let blocks = items.div_ceil(threads as usize).clamp(1, i32::MAX as usize) as u32;
        Launch::new(kernel, [blocks, 1, 1], [threads, 1, 1])
    }

    /// What is compiled for this launch.
    pub fn unit(&self) -> &Unit {
        &self.unit
    }

    /// A compile-time constant.
    pub fn define(mut self, name: &str, value: impl Display) -> Self {
        // Writing to a string cannot fail.
        let _ = writeln!(self.unit.defines, "#define {name} {value}");
        self
    }

    /// Dynamic shared memory.
    pub fn shared_bytes(mut self, bytes: usize) -> Self {
        self.shared_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self
    }

    /// Bytes that it must read and write at least, for profiles.
    pub fn moves(mut self, bytes: usize) -> Self {
        self.moved_bytes = bytes as f64;
        self
    }

    /// Floating-point operations of its matrix products, for profiles.
    pub fn computes(mut self, flops: f64) -> Self {
        self.flops = flops;
        self
    }

    /// What it computes, for profiles, which count launches of one kernel apart by it.
    pub fn about(mut self, about: String) -> Self {
        self.about = about;
        self
    }

    /// The next argument.
    pub fn arg(mut self, arg: Arg<'a>) -> Self {
        self.args.push(arg);
        self
    }
}

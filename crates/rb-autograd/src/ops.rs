//! The operations, one file each. Adding one: write its file, add its line.

/// Declares the modules, exports each module's function of the same name, and lists the cases that gradient
/// checks and device comparisons run.
macro_rules! registry {
    ($($name:ident),* $(,)?) => {
        $(pub mod $name; pub use $name::$name;)*

        /// Every operation, in alphabetical order.
        pub const REGISTRY: &[OpEntry] =
            &[$(OpEntry { name: stringify!($name), cases: $name::cases }),*];
    };
}

/// An operation of the registry.
#[derive(Clone, Copy)]
pub struct OpEntry {
    /// File stem, function name and [`crate::Op::NAME`].
    pub name: &'static str,
    /// Inputs to check it on.
    pub cases: fn() -> Vec<crate::testing::Case>,
}

mod shared;

registry! {
    add,
    add_rms_norm,
    attention,
    attention_packed,
    cast,
    concat,
    cross_entropy,
    div,
    dropout,
    embedding,
    exp,
    gelu_erf,
    gelu_tanh,
    layer_norm,
    linear,
    log,
    log_softmax,
    matmul,
    max,
    mean,
    mul,
    permute,
    relu,
    reshape,
    rms_norm,
    rope,
    scale,
    sigmoid,
    silu,
    slice,
    softmax,
    sqrt,
    sub,
    sum,
    swiglu,
    tanh,
}

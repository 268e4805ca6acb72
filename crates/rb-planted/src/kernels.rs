//! Changes of kernel sources: a piece of text for another, before the source is compiled.
//!
//! The files in `kernels/` hold no defect and no switch for one.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::{Defect, active};

/// One defect of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelChange {
    /// The defect.
    pub defect: Defect,
    /// File stem of the kernel.
    pub kernel: &'static str,
    /// Text of the source, which must be there once.
    from: &'static str,
    /// What is compiled in its place.
    to: &'static str,
}

impl KernelChange {
    /// Every change.
    pub const ALL: &[KernelChange] = &[
        change(
            Defect::KernelTailUnwritten,
            "swiglu_fwd",
            "put_packed(y + i * VEC, out);",
            "if (i < packs - PER_ROW) put_packed(y + i * VEC, out);",
        ),
        change(
            Defect::KernelNormDetached,
            "rms_norm_bwd",
            "const float mean = sum * r / C;",
            "const float mean = 0.0f * sum;",
        ),
        change(Defect::KernelRopeBackwardForward, "rope", " * (float)(DIRECTION);", ";"),
        change(
            Defect::KernelLossWithoutLabel,
            "cross_entropy_fwd",
            "log_s - (f(x[label]) - top)",
            "log_s - (0.0f - top)",
        ),
        change(
            Defect::KernelBiasCorrectionMissing,
            "optimizer_control",
            "sqrt(1.0 - pow(beta2, t))",
            "sqrt(1.0)",
        ),
        change(Defect::KernelWorkingCopyStale, "adamw_step", "store4(w + i * 4, p4);", "(void)w;"),
        change(
            Defect::KernelTokensLost,
            "embedding_bwd",
            "if (k + a < count) acc[j] += v[a][j];",
            "if (k + a < count && found[k + a] < 32) acc[j] += v[a][j];",
        ),
        change(
            Defect::KernelNormHalved,
            "sum_of_squares",
            "(v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])",
            "v[0] * v[0] + v[2] * v[2]",
        ),
    ];
}

const fn change(defect: Defect, kernel: &'static str, from: &'static str, to: &'static str) -> KernelChange {
    KernelChange { defect, kernel, from, to }
}

/// Changed sources, made once each.
static CHANGED: Mutex<BTreeMap<&'static str, &'static str>> = Mutex::new(BTreeMap::new());

/// The source of a kernel, changed where a defect of it is on. A source that has not the text once is left as it is,
/// and its defect does not count as reached.
pub fn kernel_source(kernel: &'static str, source: &'static str) -> &'static str {
    for change in KernelChange::ALL {
        if change.kernel == kernel && source.matches(change.from).count() == 1 && active(change.defect) {
            let mut changed = CHANGED.lock().unwrap_or_else(PoisonError::into_inner);
            return changed
                .entry(kernel)
                .or_insert_with(|| Box::leak(source.replace(change.from, change.to).into_boxed_str()));
        }
    }
    source
}

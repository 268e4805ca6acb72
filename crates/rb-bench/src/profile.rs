//! Where the time of a step goes: by kernel and by class, each beside its own ceiling.

use std::collections::BTreeMap;

use rb_cuda::{Gpu, Timing};
use rb_train::Result;
use serde::Serialize;

/// One step, piece by piece.
#[derive(Debug, Serialize)]
pub struct Profile {
    /// All pieces together, milliseconds.
    pub total_ms: f64,
    /// Microseconds of a piece that does nothing: what each time holds of launching and of its event.
    pub empty_us: f64,
    /// What the ceilings are.
    pub ceilings: Option<&'static str>,
    /// By class, longest first.
    pub classes: Vec<Row>,
    /// By kernel and product, longest first.
    pub kernels: Vec<Row>,
}

/// Pieces that are counted together.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// Products, attention, head, elementwise, optimizer.
    pub class: &'static str,
    /// Kernel or product; empty in the list of classes.
    pub name: String,
    /// Pieces.
    pub count: usize,
    /// Microseconds of all of them.
    pub us: f64,
    /// Microseconds at the ceiling of arithmetic or of memory, whichever is longer; 0 where neither is known.
    pub ceiling_us: f64,
}

/// Work whose pieces do nothing.
pub fn nothing(gpu: Gpu) -> Result<()> {
    let buffer = gpu.alloc(512)?;
    for _ in 0..64 {
        gpu.fill(&buffer, 0, 1, 0)?;
    }
    Ok(())
}

/// Operations and bytes a second that large products and copies reach on this card.
///
/// **Source** measured: a bf16 product of 8192 cubed, a copy of 4 GiB.
fn ceilings(card: &str) -> Option<(f64, f64, &'static str)> {
    card.split_whitespace().any(|word| word == "H200").then_some((790e12, 4.3e12, "790 TFLOP/s and 4.3 TB/s"))
}

impl Profile {
    /// Counts together what is alike. Products with the vocabulary in their shape belong to the head.
    pub fn new(timings: Vec<Timing>, empty: &[Timing], card: &str, vocabulary: usize) -> Profile {
        let known = ceilings(card);
        let (mut kernels, mut classes) = (BTreeMap::new(), BTreeMap::new());
        for timing in &timings {
            let class = class(timing, vocabulary);
            let ceiling_us =
                known.map_or(0.0, |(flops, bytes, _)| (timing.flops / flops).max(timing.bytes / bytes) * 1e6);
            let name = if timing.detail.is_empty() { timing.name } else { timing.detail.as_str() };
            let kernel = kernels.entry((class, name)).or_insert_with(|| Row {
                class,
                name: name.to_string(),
                ..Row::default()
            });
            let all = classes.entry(class).or_insert_with(|| Row { class, ..Row::default() });
            for row in [kernel, all] {
                row.count += 1;
                row.us += timing.microseconds;
                row.ceiling_us += ceiling_us;
            }
        }
        let sorted = |rows: Vec<Row>| {
            let mut rows = rows;
            rows.sort_by(|a, b| b.us.total_cmp(&a.us));
            rows
        };
        let empty: Vec<f64> = empty.iter().map(|timing| timing.microseconds).collect();
        Profile {
            total_ms: timings.iter().map(|t| t.microseconds).sum::<f64>() / 1e3,
            empty_us: crate::report::median(&empty),
            ceilings: known.map(|(.., words)| words),
            classes: sorted(classes.into_values().collect()),
            kernels: sorted(kernels.into_values().collect()),
        }
    }

    /// A table for people.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "profile: {:.3} ms in {} pieces launched one by one, {:.2} us for an empty one; ceilings: {}",
            self.total_ms,
            self.classes.iter().map(|row| row.count).sum::<usize>(),
            self.empty_us,
            self.ceilings.unwrap_or("not known for this card")
        )];
        let table = self.classes.iter().chain(&self.kernels);
        lines.extend(table.map(|row| {
            let part = match row.ceiling_us {
                0.0 => "     -".to_string(),
                ceiling => format!("{:5.1} %", 100.0 * ceiling / row.us.max(f64::MIN_POSITIVE)),
            };
            let share = row.us / (10.0 * self.total_ms.max(f64::MIN_POSITIVE));
            format!(
                "  {:9.1} us {share:5.1} % {:4}x {part} of its ceiling  {:12} {}",
                row.us, row.count, row.class, row.name
            )
        }));
        lines
    }
}

fn class(timing: &Timing, vocabulary: usize) -> &'static str {
    let of_head = timing.detail.contains(&format!("[{vocabulary}, "))
        || timing.detail.contains(&format!(", {vocabulary}]"))
        || timing.detail.contains(&format!("k {vocabulary},"));
    match timing.name {
        "matmul" | "product_wgmma" if of_head => "head",
        "matmul" | "product_wgmma" => "products",
        name if name.starts_with("attention") => "attention",
        name if name.starts_with("cross_entropy") => "head",
        "adamw_step" | "sgd_step" | "optimizer_control" | "sum_of_squares" => "optimizer",
        _ => "elementwise",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(name: &'static str, detail: &str, microseconds: f64, flops: f64, bytes: f64) -> Timing {
        Timing { name, detail: detail.into(), microseconds, flops, bytes }
    }

    #[test]
    fn what_is_alike_is_counted_together_and_the_head_apart() {
        let timings = vec![
            timing("matmul", "[64, 32064] = A B^T, k 768, bf16", 20.0, 790e6, 1.0),
            timing("matmul", "[64, 768] = A B, k 32064, bf16", 5.0, 0.0, 0.0),
            timing("matmul", "[64, 768] = A B, k 1408, bf16", 2.0, 790e6, 4.3e6),
            timing("swiglu_fwd", "", 3.0, 0.0, 4.3e6),
            timing("swiglu_fwd", "", 5.0, 0.0, 4.3e6),
        ];
        let empty = [timing("fill", "", 1.5, 0.0, 0.0)];
        let profile = Profile::new(timings.clone(), &empty, "NVIDIA H200", 32064);
        let classes: Vec<(&str, usize, f64)> =
            profile.classes.iter().map(|row| (row.class, row.count, row.us)).collect();
        assert_eq!(classes, [("head", 2, 25.0), ("elementwise", 2, 8.0), ("products", 1, 2.0)]);
        let swiglu = profile.kernels.iter().find(|row| row.name == "swiglu_fwd").unwrap();
        assert!((swiglu.ceiling_us - 2.0).abs() < 1e-9, "{swiglu:?}");
        assert!((profile.total_ms - 0.035).abs() < 1e-12 && profile.empty_us == 1.5);
        assert!(profile.lines()[1].contains("head"), "{:?}", profile.lines());
        let unknown = Profile::new(timings, &empty, "NVIDIA L4", 32064);
        assert!(unknown.lines()[0].contains("not known"));
    }
}

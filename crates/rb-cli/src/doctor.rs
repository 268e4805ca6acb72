//! `rb doctor`

use crate::Failure;

pub(crate) fn run() -> Result<(), Failure> {
    println!("rb {}", env!("CARGO_PKG_VERSION"));
    println!("system     {} {}", std::env::consts::OS, std::env::consts::ARCH);
    println!("threads    {}", rayon::current_num_threads());
    let memory = std::fs::read_to_string("/proc/meminfo").ok();
    let line = |key: &str| {
        let text = memory.as_deref()?;
        let kib: u64 = text.lines().find(|l| l.starts_with(key))?.split_whitespace().nth(1)?.parse().ok()?;
        Some(format!("{:.1} GiB", kib as f64 / (1 << 20) as f64))
    };
    let unknown = || "unknown".to_string();
    println!(
        "memory     {} in all, {} free",
        line("MemTotal:").unwrap_or_else(unknown),
        line("MemAvailable:").unwrap_or_else(unknown)
    );
    #[cfg(target_arch = "x86_64")]
    println!(
        "processor  AVX2 {}, FMA {}, AVX-512 {}",
        yes(is_x86_feature_detected!("avx2")),
        yes(is_x86_feature_detected!("fma")),
        yes(is_x86_feature_detected!("avx512f"))
    );
    println!("CUDA       this version trains on the CPU; what a GPU would need:");
    for found in rb_cuda::discover() {
        match found.path {
            Some(path) => println!("  {:9}found: {}", found.component.name, path.display()),
            None => println!(
                "  {:9}not found ({}); {}",
                found.component.name, found.component.file_stem, found.component.remedy
            ),
        }
    }
    let check = rb_verify::verify_operations();
    let failed = check.checks.iter().filter(|c| !c.passed).count();
    println!("operations {} checked, {failed} failed", check.checks.len());
    match check.refusal() {
        None => Ok(()),
        Some(reason) => Err(Failure::new(3, reason)),
    }
}

#[cfg(target_arch = "x86_64")]
fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

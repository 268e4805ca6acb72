//! `rb doctor`

use rb_cuda::{Component, CudaError, Found, Gpu, GpuOptions};

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
    let gpu = cuda();
    let check = rb_verify::verify_operations();
    let failed = check.checks.iter().filter(|c| !c.passed).count();
    println!("operations {} checked, {failed} failed", check.checks.len());
    match check.refusal() {
        None => gpu,
        Some(reason) => Err(Failure::new(3, reason)),
    }
}

/// Every card with its libraries and a check of its results; without one, what is missing. Only a card that
/// is there and does not work is a failure.
fn cuda() -> Result<(), Failure> {
    let count = match Gpu::count_devices() {
        Ok(count) if count > 0 => count,
        Ok(_) => {
            absent("the driver shows no GPU");
            return Ok(());
        }
        Err(error) => {
            absent(&error.to_string());
            return Ok(());
        }
    };
    let mut result = Ok(());
    for ordinal in 0..count {
        match Gpu::open(ordinal, &GpuOptions::default()) {
            Ok(gpu) => {
                if let Err(error) = card(&gpu) {
                    println!("  failed   {error}");
                    result = Err(Failure::new(1, format!("{gpu}: {error}")));
                }
            }
            Err(error @ (CudaError::Missing { .. } | CudaError::NoGpu { .. })) => absent(&error.to_string()),
            Err(error) => {
                println!("CUDA       cuda:{ordinal} does not open: {error}");
                result = Err(Failure::new(1, format!("cuda:{ordinal}: {error}")));
            }
        }
    }
    result
}

fn card(gpu: &Gpu) -> Result<(), CudaError> {
    let info = gpu.info();
    println!(
        "CUDA       {gpu}: {}, compute capability {}.{} ({}), {} multiprocessors",
        info.name,
        info.capability.0,
        info.capability.1,
        info.arch(),
        info.multiprocessors
    );
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    let (free, total) = gpu.memory_info()?;
    println!("  {:9}{:.1} GiB in all, {:.1} GiB free", "memory", gib(total), gib(free));
    for library in gpu.libraries() {
        println!("  {:9}{} ({})", library.name, library.version, library.path.display());
    }
    for found in rb_cuda::discover().iter().filter(|f| f.component.name == "NCCL") {
        println!("  {}", describe(found));
    }
    let check = gpu.self_check()?;
    let source = if check.kernel_cached { "from the cache" } else { "compiled" };
    println!("  {:9}right, {source} in {:.0} ms", "kernel", check.kernel_ready_ms);
    println!("  {:9}right, {:.0} TFLOP/s in bf16", "product", check.product_flops / 1e12);
    Ok(())
}

fn absent(reason: &str) {
    println!("CUDA       not usable, training runs on the CPU: {reason}");
    for found in rb_cuda::discover() {
        println!("  {}", describe(&found));
    }
}

fn describe(found: &Found) -> String {
    let Component { name, file_stem, remedy } = found.component;
    match &found.path {
        Some(path) => format!("{name:9}found: {}", path.display()),
        None => format!("{name:9}not found ({file_stem}); {remedy}"),
    }
}

#[cfg(target_arch = "x86_64")]
fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

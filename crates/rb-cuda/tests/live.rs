//! A real card: memory, launches, products, tuning. Without one every test says why it is skipped.

use std::collections::BTreeMap;

use rb_cuda::{Arg, CudaError, Gpu, GpuOptions, Kernel, Launch, Matmul, MatrixType, Place};

/// The first card, or the reason why there is none.
fn gpu(options: &GpuOptions) -> Option<Gpu> {
    match Gpu::open(0, options) {
        Ok(gpu) => Some(gpu),
        Err(error @ (CudaError::Missing { .. } | CudaError::NoGpu { .. })) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn small() -> GpuOptions {
    GpuOptions { budget_bytes: Some(1 << 30), poison: false }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn to_bf16(values: &[f32]) -> Vec<u8> {
    // The values of these tests are small integers over 16: exact in bf16.
    values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

fn from_bf16(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
}

const AXPY: Kernel = Kernel {
    name: "axpy",
    source: "extern \"C\" __global__ void axpy(float* y, const float* x, float a, int add, i64 n, const float* none) {\n\
             \x20   GRID_STRIDE(i, n) y[i] += a * x[i] + (float)add + (none == nullptr ? 0.0f : 1000.0f) + OFFSET;\n}\n",
};

const REVERSE: Kernel = Kernel {
    name: "reverse",
    source: "extern \"C\" __global__ void reverse(float* y, u32 n) {\n\
             \x20   extern __shared__ float s[];\n\
             \x20   for (u32 i = threadIdx.x; i < n; i += blockDim.x) s[i] = y[i];\n\
             \x20   __syncthreads();\n\
             \x20   for (u32 i = threadIdx.x; i < n; i += blockDim.x) y[i] = s[n - 1 - i];\n}\n",
};

#[test]
fn memory_goes_there_and_back() {
    let Some(gpu) = gpu(&small()) else { return };
    let buffer = gpu.alloc(4000).unwrap();
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let mut source = bytes(&values);
    gpu.upload(&buffer, 0, &source).unwrap();
    source.fill(0xee);
    let other = gpu.alloc(4000).unwrap();
    gpu.memset(&other, 0, 4000, 0).unwrap();
    gpu.copy(&other, 400, &buffer, 0, 2000).unwrap();
    let mut back = vec![0u8; 4000];
    gpu.download(&other, 0, &mut back).unwrap();
    let back = floats(&back);
    assert!(back[..100].iter().chain(&back[600..]).all(|x| *x == 0.0));
    assert_eq!(back[100..600], values[..500]);
    assert!(gpu.download(&other, 3000, &mut vec![0; 1001]).is_err(), "past the end");
    let (free, total) = gpu.memory_info().unwrap();
    assert!(free <= total && total > 1 << 30);
}

#[test]
fn the_budget_holds() {
    let options = GpuOptions { budget_bytes: Some(64 << 20), poison: false };
    let Some(gpu) = gpu(&options) else { return };
    let message = gpu.alloc_for(65 << 20, "test").unwrap_err().to_string();
    assert!(message.contains("of 64.0 MiB"), "{message}");
    assert!(gpu.alloc(63 << 20).is_ok());
}

#[test]
fn poison_shows_what_is_left_unwritten() {
    let Some(gpu) = gpu(&GpuOptions { poison: true, ..small() }) else { return };
    let buffer = gpu.alloc(100).unwrap();
    let mut back = [0u8; 100];
    gpu.download(&buffer, 0, &mut back).unwrap();
    assert!(floats(&back).iter().all(|x| x.is_nan()));
}

#[test]
fn kernels_take_every_kind_of_argument() {
    let Some(gpu) = gpu(&small()) else { return };
    let n = 1000;
    let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let (y, xs) = (gpu.alloc(4 * n).unwrap(), gpu.alloc(4 * n + 16).unwrap());
    gpu.upload(&xs, 16, &bytes(&x)).unwrap();
    gpu.upload(&y, 0, &bytes(&vec![1.0; n])).unwrap();
    let launch = || {
        Launch::for_items(&AXPY, n, 128)
            .define("OFFSET", "0.25f")
            .arg(Arg::Buffer(&y, 0))
            .arg(Arg::Buffer(&xs, 16))
            .arg(Arg::F32(0.5))
            .arg(Arg::I32(-3))
            .arg(Arg::I64(n as i64))
            .arg(Arg::Null)
    };
    let units = [launch().unit().clone(), launch().unit().clone()];
    let stats = gpu.prepare(&units).unwrap();
    assert_eq!(stats.compiled + stats.cached, 1, "{stats:?}");
    assert_eq!(gpu.prepare(&units).unwrap().loaded, 1);
    gpu.launch(launch()).unwrap();
    let mut back = vec![0u8; 4 * n];
    gpu.download(&y, 0, &mut back).unwrap();
    let expected: Vec<f32> = x.iter().map(|x| 1.0 + 0.5 * x - 3.0 + 0.25).collect();
    assert_eq!(floats(&back), expected);
    assert_eq!(gpu.launches(), BTreeMap::from([("axpy", 1)]));
    // Another thread finds the context too.
    std::thread::scope(|scope| {
        scope.spawn(|| gpu.launch(launch()).unwrap());
    });
    gpu.synchronize().unwrap();
}

#[test]
fn a_kernel_may_have_all_shared_memory_and_no_more() {
    let Some(gpu) = gpu(&small()) else { return };
    let most = gpu.info().shared_bytes_per_block;
    for shared in [1 << 10, 48 << 10, most] {
        let n = shared / 4;
        let y = gpu.alloc(shared).unwrap();
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        gpu.upload(&y, 0, &bytes(&values)).unwrap();
        let launch = Launch::new(&REVERSE, [1; 3], [256, 1, 1]).shared_bytes(shared);
        gpu.launch(launch.arg(Arg::Buffer(&y, 0)).arg(Arg::U32(n as u32))).unwrap();
        let mut back = vec![0u8; shared];
        gpu.download(&y, 0, &mut back).unwrap();
        assert!(floats(&back).into_iter().eq(values.into_iter().rev()), "{shared}");
    }
    let message = gpu.launch(Launch::new(&REVERSE, [1; 3], [256, 1, 1]).shared_bytes(most + 4)).unwrap_err();
    assert!(message.to_string().contains("reverse"), "{message}");
}

#[test]
fn time_passes_on_the_card_only_where_work_is() {
    let Some(gpu) = gpu(&small()) else { return };
    let buffer = gpu.alloc(512 << 20).unwrap();
    let fill = |times: usize| {
        gpu.elapsed_ms(|| (0..times).try_for_each(|_| gpu.memset(&buffer, 0, 512 << 20, 1))).unwrap()
    };
    fill(1);
    let (none, much) = (fill(0), fill(20));
    assert!(none >= 0.0 && much > 10.0 * none && much > 0.5, "{none} {much}");
}

/// A product on the host, in f64.
fn product(spec: &Matmul, a: &[f32], b: &[f32], c: &mut [f32]) {
    for batch in 0..spec.batch {
        let (a, b) = (&a[batch * spec.stride_a..], &b[batch * spec.stride_b..]);
        for i in 0..spec.m {
            for j in 0..spec.n {
                let sum: f64 = (0..spec.k)
                    .map(|l| {
                        let x = if spec.trans_a { a[l * spec.m + i] } else { a[i * spec.k + l] };
                        let y = if spec.trans_b { b[j * spec.k + l] } else { b[l * spec.n + j] };
                        f64::from(x) * f64::from(y)
                    })
                    .sum();
                let out = &mut c[batch * spec.stride_c + i * spec.n + j];
                *out = (f64::from(spec.alpha) * sum + f64::from(spec.beta) * f64::from(*out)) as f32;
            }
        }
    }
}

/// Compares one product with the host; `offset` in elements spoils the alignment.
fn compare(gpu: Gpu, spec: &Matmul, offset: usize) {
    let [a_len, b_len, c_len] = [
        (spec.batch - 1) * spec.stride_a + spec.m * spec.k,
        (spec.batch - 1) * spec.stride_b + spec.k * spec.n,
        (spec.batch - 1) * spec.stride_c + spec.m * spec.n,
    ];
    // Small integers over 16: every product and sum is exact in fp32, so any order gives the same bits.
    let values = |len: usize, step: usize| -> Vec<f32> {
        (0..len).map(|i| ((i * step + i / 7) % 17) as f32 / 16.0 - 0.5).collect()
    };
    let (a, b, mut c) = (values(a_len, 5), values(b_len, 11), values(c_len, 3));
    let put = |of: MatrixType, values: &[f32]| {
        let buffer = gpu.alloc((values.len() + offset) * of.size_bytes()).unwrap();
        let data = if of == MatrixType::F32 { bytes(values) } else { to_bf16(values) };
        gpu.upload(&buffer, offset * of.size_bytes(), &data).unwrap();
        buffer
    };
    let (on_a, on_b, on_c) = (put(spec.ab, &a), put(spec.ab, &b), put(spec.c, &c));
    let (ab, out) = (offset * spec.ab.size_bytes(), offset * spec.c.size_bytes());
    let place = |buffer, offset_bytes| Place { buffer, offset_bytes };
    gpu.matmul(spec, place(&on_a, ab), place(&on_b, ab), place(&on_c, out)).unwrap();
    let mut back = vec![0u8; c_len * spec.c.size_bytes()];
    gpu.download(&on_c, out, &mut back).unwrap();
    product(spec, &a, &b, &mut c);
    let (found, tolerance) = match spec.c {
        MatrixType::F32 => (floats(&back), 1e-6),
        MatrixType::Bf16 => (from_bf16(&back), 1.0 / 256.0),
    };
    for (i, (x, y)) in found.iter().zip(&c).enumerate() {
        assert!(
            (x - y).abs() <= tolerance * y.abs().max(1.0),
            "{spec}, offset {offset}, at {i}: {x}, not {y}"
        );
    }
}

#[test]
fn products_agree_with_the_host() {
    let Some(gpu) = gpu(&small()) else { return };
    let types = [
        (MatrixType::F32, MatrixType::F32),
        (MatrixType::Bf16, MatrixType::Bf16),
        (MatrixType::Bf16, MatrixType::F32),
    ];
    for (m, n, k) in [(1, 1, 1), (3, 5, 7), (64, 48, 32), (33, 127, 65), (128, 256, 64)] {
        for (ab, c) in types {
            for flags in 0..16 {
                let spec = Matmul {
                    m,
                    n,
                    k,
                    trans_a: flags & 1 != 0,
                    trans_b: flags & 2 != 0,
                    batch: 1,
                    stride_a: 0,
                    stride_b: 0,
                    stride_c: 0,
                    ab,
                    c,
                    alpha: if flags & 4 != 0 { 0.5 } else { 1.0 },
                    beta: if flags & 8 != 0 { 1.0 } else { 0.0 },
                };
                for offset in [0, 1, 8] {
                    compare(gpu, &spec, offset);
                }
                let padded =
                    Matmul { batch: 3, stride_a: m * k + 1, stride_b: k * n, stride_c: m * n + 2, ..spec };
                compare(gpu, &padded, 0);
            }
        }
    }
    assert!(gpu.launches()["matmul"] > 100);
}

#[test]
fn tuning_finds_an_algorithm_that_is_right_and_repeats() {
    let Some(gpu) = gpu(&small()) else { return };
    let spec = Matmul {
        m: 96,
        n: 160,
        k: 1024,
        trans_a: false,
        trans_b: true,
        batch: 1,
        stride_a: 0,
        stride_b: 0,
        stride_c: 0,
        ab: MatrixType::Bf16,
        c: MatrixType::F32,
        alpha: 1.0,
        beta: 1.0,
    };
    compare(gpu, &spec, 0);
    let tuned = gpu.tune(&[spec]).unwrap();
    println!("{tuned:?}");
    assert_eq!(tuned.len(), 1);
    assert!(tuned[0].best_us > 0.0 && tuned[0].best_us <= tuned[0].default_us);
    compare(gpu, &spec, 0);
    assert_eq!(gpu.tune(&[spec]).unwrap()[0].candidates, 0, "known by now");
    assert_eq!(gpu.matmuls(), [spec]);
}

#[test]
fn a_card_that_is_not_there_is_an_error() {
    match Gpu::open(4096, &small()) {
        Err(error @ (CudaError::NoGpu { .. } | CudaError::Missing { .. })) => println!("{error}"),
        other => panic!("{other:?}"),
    }
}

//! safetensors files: written whole and synced, read with every size checked.
//!
//! **Source** the safetensors format, <https://github.com/huggingface/safetensors>.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;

use half::bf16;
use safetensors::{Dtype, SafeTensorError, SafeTensors, View};

use crate::{DType, Device, Result, Tensor, TensorError};

/// Writes tensors, from whichever device, to `path` with the metadata `{"format": "pt"}` that Hugging Face readers ask for, then
/// syncs the file to disk. The file is not renamed: callers that replace a file write to a temporary name.
///
/// # Errors
/// [`TensorError::Io`] (a full or read-only disk).
pub fn write_safetensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<()> {
    let host: Vec<(&str, Tensor)> =
        tensors.into_iter().map(|(name, t)| Ok((name, t.to_device(Device::Cpu)?))).collect::<Result<_>>()?;
    let entries: Vec<(&str, Bytes<'_>)> =
        host.iter().map(|(name, t)| Ok((*name, Bytes(t, t.as_bytes()?)))).collect::<Result<_>>()?;
    write_entries(path, entries)
}

fn write_entries<V: View>(path: &Path, entries: Vec<(&str, V)>) -> Result<()> {
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let written =
        safetensors::serialize_to_file(entries, Some(metadata), path).map_err(|error| match error {
            SafeTensorError::IoError(source) => io_error(path, "writing tensors", source),
            other => TensorError::BadFile { path: path.into(), reason: other.to_string() },
        });
    written?;
    File::open(path).and_then(|f| f.sync_all()).map_err(|e| io_error(path, "syncing", e))
}

/// Element types in which floating-point tensors are stored in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatFormat {
    /// IEEE single precision.
    F32,
    /// The upper half of it.
    BF16,
    /// IEEE half precision: 65,504 at most.
    F16,
}

impl FloatFormat {
    /// Bytes of an element.
    pub fn size_bytes(self) -> usize {
        if self == FloatFormat::F32 { 4 } else { 2 }
    }

    /// The name that PyTorch gives it.
    pub fn torch_name(self) -> &'static str {
        match self {
            FloatFormat::F32 => "float32",
            FloatFormat::BF16 => "bfloat16",
            FloatFormat::F16 => "float16",
        }
    }

    /// The bytes of f32 values, each rounded to nearest even once, little-endian.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            FloatFormat::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            FloatFormat::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            FloatFormat::F16 => values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
        }
    }
}

/// As [`write_safetensors`], with every tensor stored in `format`.
///
/// # Errors
/// [`TensorError::Io`] (a full or read-only disk); [`TensorError::DType`] for integers.
pub fn write_safetensors_as<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    format: FloatFormat,
) -> Result<()> {
    let host: Vec<(&str, Tensor)> = tensors
        .into_iter()
        .map(|(name, t)| {
            if t.dtype() == DType::I32 {
                t.expect_dtype("write_safetensors_as", name, DType::F32)?;
            }
            Ok((name, t.to_device(Device::Cpu)?.to_dtype(DType::F32)?))
        })
        .collect::<Result<_>>()?;
    let entries: Vec<(&str, Floats<'_>)> =
        host.iter().map(|(name, t)| Ok((*name, Floats(t, t.as_slice()?, format)))).collect::<Result<_>>()?;
    write_entries(path, entries)
}

/// Reads every tensor of a safetensors file. f16 is not a type of this library and is widened to f32;
/// 64-bit integers that fit become `i32`.
///
/// # Errors
/// [`TensorError::Io`] for a missing file; [`TensorError::BadFile`] for a truncated or malformed one.
pub fn read_safetensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let bytes = std::fs::read(path).map_err(|e| io_error(path, "reading", e))?;
    let bad = |reason: String| TensorError::BadFile { path: path.into(), reason };
    let file = SafeTensors::deserialize(&bytes).map_err(|e| {
        bad(format!(
            "not a whole safetensors file ({e}; {} bytes found): it is truncated or of another format",
            bytes.len()
        ))
    })?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.iter() {
        let shape = view.shape().to_vec();
        let data = view.data();
        let tensor = match view.dtype() {
            Dtype::F32 => Tensor::from_vec(cast(data, f32::from_le_bytes), shape),
            Dtype::F64 => Tensor::from_vec(cast(data, f64::from_le_bytes), shape),
            Dtype::BF16 => Tensor::from_vec(cast(data, bf16::from_le_bytes), shape),
            Dtype::F16 => Tensor::from_vec(cast(data, |b| half::f16::from_le_bytes(b).to_f32()), shape),
            Dtype::I32 => Tensor::from_vec(cast(data, i32::from_le_bytes), shape),
            Dtype::I64 => {
                let wide: Vec<i64> = cast(data, i64::from_le_bytes);
                let narrow: Result<Vec<i32>, _> = wide.iter().map(|&x| i32::try_from(x)).collect();
                let narrow = narrow.map_err(|_| bad(format!("{name}: a 64-bit integer is out of range")))?;
                Tensor::from_vec(narrow, shape)
            }
            other => return Err(bad(format!("{name} has element type {other:?}, which is not supported"))),
        };
        tensors.insert(name.to_string(), tensor?);
    }
    Ok(tensors)
}

fn cast<const N: usize, T>(data: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks::<N>().0.iter().map(|&chunk| f(chunk)).collect()
}

fn io_error(path: &Path, action: &'static str, source: std::io::Error) -> TensorError {
    TensorError::Io { path: path.into(), action, source }
}

/// A tensor as the safetensors writer wants it.
struct Bytes<'a>(&'a Tensor, &'a [u8]);

impl View for Bytes<'_> {
    fn dtype(&self) -> Dtype {
        match self.0.dtype() {
            DType::F32 => Dtype::F32,
            DType::F64 => Dtype::F64,
            DType::BF16 => Dtype::BF16,
            DType::I32 => Dtype::I32,
        }
    }
    fn shape(&self) -> &[usize] {
        self.0.shape().dims()
    }
    fn data(&self) -> Cow<'_, [u8]> {
        self.1.into()
    }
    fn data_len(&self) -> usize {
        self.0.size_bytes()
    }
}

/// f32 values that are converted when they are written.
struct Floats<'a>(&'a Tensor, &'a [f32], FloatFormat);

impl View for Floats<'_> {
    fn dtype(&self) -> Dtype {
        match self.2 {
            FloatFormat::F32 => Dtype::F32,
            FloatFormat::BF16 => Dtype::BF16,
            FloatFormat::F16 => Dtype::F16,
        }
    }
    fn shape(&self) -> &[usize] {
        self.0.shape().dims()
    }
    fn data(&self) -> Cow<'_, [u8]> {
        self.2.encode(self.1).into()
    }
    fn data_len(&self) -> usize {
        self.1.len() * self.2.size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_formats_are_rounded_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let values = vec![1.0f32, 1.0 + 1.0 / 256.0, -1.0 / 3.0, 65_504.0, 1e-8];
        let a = Tensor::from_vec(values.clone(), [5]).unwrap();
        for (format, dtype) in
            [(FloatFormat::F32, DType::F32), (FloatFormat::BF16, DType::BF16), (FloatFormat::F16, DType::F32)]
        {
            write_safetensors_as(&path, [("a", &a)], format).unwrap();
            let back = read_safetensors(&path).unwrap().remove("a").unwrap();
            assert_eq!(back.dtype(), dtype);
            let want: Vec<f32> = values
                .iter()
                .map(|&x| match format {
                    FloatFormat::F32 => x,
                    FloatFormat::BF16 => bf16::from_f32(x).to_f32(),
                    FloatFormat::F16 => half::f16::from_f32(x).to_f32(),
                })
                .collect();
            assert_eq!(back.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap(), want);
        }
        let integers = Tensor::from_vec(vec![1i32], [1]).unwrap();
        assert!(write_safetensors_as(&path, [("a", &integers)], FloatFormat::F32).is_err());
    }

    #[test]
    fn round_trip_and_truncation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let a = Tensor::from_vec(vec![1.0f32, f32::MIN_POSITIVE, -0.0], [3]).unwrap();
        let b = Tensor::from_vec(vec![7i32, -100], [2, 1]).unwrap();
        write_safetensors(&path, [("a", &a), ("b", &b)]).unwrap();
        let back = read_safetensors(&path).unwrap();
        assert_eq!(back["a"].as_bytes().unwrap(), a.as_bytes().unwrap());
        assert_eq!(back["b"].shape().dims(), &[2, 1]);

        let bytes = std::fs::read(&path).unwrap();
        for cut in [0, 4, 20, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let message = read_safetensors(&path).unwrap_err().to_string();
            assert!(message.contains("truncated") && message.contains("a.safetensors"), "{message}");
        }
        let missing = read_safetensors(&dir.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("reading failed"), "{missing}");
    }
}

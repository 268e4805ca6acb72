//! Files read through the decoder that their name asks for.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use crate::error::{DataError, Result};

/// Bytes read from a file at once.
const BUFFER_BYTES: usize = 1 << 18;

/// How the bytes of a file are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Opens a file for reading what is inside, from byte `offset` of the file.
pub(super) fn open(path: &Path, compression: Compression, offset: u64) -> Result<Box<dyn Read + Send>> {
    let mut file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
    if offset > 0 {
        file.seek(SeekFrom::Start(offset)).map_err(|e| DataError::io("read", path, e))?;
    }
    let buffered = BufReader::with_capacity(BUFFER_BYTES, file);
    Ok(match compression {
        Compression::None => Box::new(buffered),
        Compression::Gzip => Box::new(MultiGzDecoder::new(buffered)),
        Compression::Zstd => {
            Box::new(zstd::Decoder::with_buffer(buffered).map_err(|e| read_error(path, compression, e))?)
        }
    })
}

/// What an error while reading means: refusals of the operating system have a number, those of a decoder have none.
pub(super) fn read_error(path: &Path, compression: Compression, source: io::Error) -> DataError {
    let kind = match compression {
        Compression::Gzip => "gzip",
        Compression::Zstd => "zstd",
        Compression::None => return DataError::io("read", path, source),
    };
    if source.raw_os_error().is_some() {
        return DataError::io("read", path, source);
    }
    DataError::Compressed { path: path.into(), kind, source }
}

//! [`KvCache`]: keys and values of the tokens a model has read, so that the next token costs one token.

use std::cell::RefCell;

use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::{Tape, Var};
use rb_tensor::{Arena, DType, Device, ShapeError, Tensor};

use crate::{LlamaConfig, NnError, Result};

/// Keys and values of every layer for the tokens that a model has read so far.
///
/// - **Shapes** for each layer keys and values `[B, capacity, G, D]`, in the element type of activations.
///
/// It belongs to the weights that filled it. Attention reads it through the mask: a query sees the tokens before it and
/// itself, as far as the model's window reaches. Nothing is differentiated through it.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    batch: usize,
    capacity: usize,
    len: usize,
}

impl KvCache {
    /// An empty cache for `batch` sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// More tokens than the model has positions; a GPU without the memory.
    pub(crate) fn new(
        config: &LlamaConfig,
        (batch, capacity): (usize, usize),
        dtype: DType,
        device: Device,
    ) -> Result<KvCache> {
        let limit = config.max_position_embeddings;
        if capacity > limit {
            return Err(NnError::TooLong { len: capacity, limit });
        }
        let shape = [batch, capacity, config.kv_heads(), config.head_dim()];
        let layer = || -> Result<LayerCache> {
            let arena = Arena::zeros("keys and values", 2 * shape.iter().product::<usize>(), dtype, device)?;
            Ok(LayerCache { shape, places: RefCell::new(arena) })
        };
        let layers = (0..config.num_hidden_layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(KvCache { layers, batch, capacity, len: 0 })
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets everything after the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes of all keys and values.
    pub fn size_bytes(&self) -> usize {
        let bytes = |layer: &LayerCache| {
            let arena = layer.places.borrow();
            arena.numel() * arena.dtype().size_bytes()
        };
        self.layers.iter().map(bytes).sum()
    }

    /// The cache of layer `index` for tokens that follow those read so far.
    pub(crate) fn layer(&self, index: usize) -> LayerView<'_> {
        LayerView { cache: &self.layers[index], start: self.len }
    }

    /// Checks that `count` more tokens of `batch` sequences fit.
    pub(crate) fn check(&self, batch: usize, count: usize) -> Result<()> {
        if batch != self.batch {
            let error = ShapeError::new("kv_cache", "input_ids", format!("[{batch}, {count}]"), self.batch);
            return Err(NnError::Tensor(error.into()));
        }
        if self.len + count > self.capacity {
            return Err(NnError::TooLong { len: self.len + count, limit: self.capacity });
        }
        Ok(())
    }

    /// Counts `count` tokens as read: all layers hold them.
    pub(crate) fn advance(&mut self, count: usize) {
        self.len += count;
    }

    /// Positions `[B, count]` of the next tokens.
    pub(crate) fn positions(&self, count: usize) -> Result<Tensor> {
        let row = self.len as i32..(self.len + count) as i32;
        Ok(Tensor::from_vec((0..self.batch).flat_map(|_| row.clone()).collect(), [self.batch, count])?)
    }

    /// What each of the next tokens sees of the capacity: all before it and itself.
    pub(crate) fn mask(&self, count: usize) -> Result<AttentionMask> {
        let row = (self.len..self.len + count).flat_map(|last| [0, last as i32 + 1]);
        let ranges = (0..self.batch).flat_map(|_| row.clone()).collect();
        Ok(AttentionMask::Ranges(Tensor::from_vec(ranges, [self.batch, count, 2])?))
    }
}

/// Keys, then values, of one layer.
#[derive(Debug)]
struct LayerCache {
    /// `[B, capacity, G, D]`.
    shape: [usize; 4],
    places: RefCell<Arena>,
}

/// The cache of one layer during a forward pass.
#[derive(Clone, Copy, Debug)]
pub struct LayerView<'a> {
    cache: &'a LayerCache,
    start: usize,
}

impl LayerView<'_> {
    /// Stores keys and values `[B, T, G, D]` of the next tokens, and gives those of all tokens,
    /// `[B, capacity, G, D]`; what has not been written yet is behind the mask.
    ///
    /// # Errors
    /// A tape that records, as no gradient would reach keys and values that were read earlier; another shape.
    pub(crate) fn extend<'t>(
        &self,
        tape: &'t Tape<'t>,
        keys: &Var<'t>,
        values: &Var<'t>,
    ) -> Result<(Var<'t>, Var<'t>)> {
        if tape.is_recording() {
            return Err(NnError::CacheWhileRecording);
        }
        let [batch, capacity, heads, width] = self.cache.shape;
        let count = keys.shape().dims().get(1).copied().unwrap_or(0);
        let row = heads * width;
        let half = batch * capacity * row;
        let mut places = self.cache.places.borrow_mut();
        for (which, new) in [keys, values].into_iter().enumerate() {
            if new.shape().dims() != [batch, count, heads, width] {
                let expected = format!("[{batch}, T, {heads}, {width}]");
                let error = ShapeError::new("kv_cache", "keys or values", new.shape(), expected);
                return Err(NnError::Tensor(error.into()));
            }
            // Nothing is lost: the tape does not record.
            let new = new.detach();
            for b in 0..batch {
                places.write(which * half + (b * capacity + self.start) * row, &new.narrow(b, 1)?)?;
            }
        }
        let all = |which: usize| places.view(which * half, self.cache.shape);
        Ok((tape.constant(all(0)?), tape.constant(all(1)?)))
    }
}

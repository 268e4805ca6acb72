//! Parameters: names and places in one flat arena.
//!
//! An *entry* is what an operation reads (for example the packed query, key and value matrix); a *part* is
//! what the outside world names (`q_proj.weight`): a range of the entry's rows. Rows of an entry that
//! belong to no part are padding: zero, never exported, never given a gradient.

mod split;

use std::collections::HashMap;
use std::sync::Arc;

use rayon::prelude::*;
use rb_tensor::{Arena, DType, Device, Rng, Shape, ShapeError, Tensor};

pub use split::{Masters, join_weight, split_weight};

use crate::{AutogradError, Result};
use split::Split;

/// Alignment of every entry in the arena, in elements (256 bytes of f32).
pub(crate) const ALIGN: usize = 64;

/// A handle to an entry of a [`ParamStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParamId(pub(crate) u32);

/// How an entry's parts start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
}

/// A named range of an entry's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Hugging Face tensor name.
    pub name: String,
    /// Place of the first element in the arena.
    pub offset: usize,
    /// Shape as exported.
    pub shape: Shape,
}

/// One parameter as operations see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamEntry {
    /// Shape, padding rows included.
    pub shape: Shape,
    /// Place of the first element in the arena.
    pub offset: usize,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Whether it is trained. A frozen entry is a constant to the tape.
    pub trainable: bool,
    /// Named ranges, in row order.
    pub parts: Vec<Part>,
}

impl ParamEntry {
    /// The range of the arena.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.shape.numel()
    }
}

/// The places of all entries: shared by weights, gradients and optimizer state.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    /// Entries in order of declaration.
    pub entries: Vec<ParamEntry>,
    /// Elements of the arena, alignment gaps included.
    pub numel: usize,
}

impl Layout {
    /// All parts, with their entries, in order of declaration.
    pub fn parts(&self) -> impl Iterator<Item = (&ParamEntry, &Part)> {
        self.entries.iter().flat_map(|e| e.parts.iter().map(move |p| (e, p)))
    }

    /// Number of named parameters' elements (what a user calls the model's size).
    pub fn num_parameters(&self) -> usize {
        self.parts().map(|(_, p)| p.shape.numel()).sum()
    }

    /// The part of this name.
    pub fn part(&self, name: &str) -> Result<&Part> {
        let found = self.parts().find(|(_, p)| p.name == name);
        found.map(|(_, p)| p).ok_or_else(|| AutogradError::UnknownParameter { name: name.into() })
    }
}

/// How bf16 mixed precision keeps the fp32 weights of matrices and tables; vectors are whole in each. The weights have
/// the same 32 bits in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum MasterWeights {
    /// Beside their bf16 working copy, which is rounded to nearest even: 6 bytes an element.
    #[default]
    Whole,
    /// As the working copy, rounded half away from zero, and the 16 bits that complete it: 4 bytes an element, and 28
    /// instead of 30 moved by an update of AdamW. See [`split_weight`].
    Split,
}

/// In which element types a step computes. Weights and optimizer state are fp32 in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// Everything in fp32 (f64 for a store of that type).
    #[default]
    Full,
    /// bf16 mixed precision: operations read a bf16 working copy of the weights and give bf16 activations, with
    /// fp32 accumulation and statistics. Only on a GPU.
    Bf16 {
        /// Element type of the residual stream: F32 as PyTorch's autocast, or BF16, which halves its traffic.
        residual: DType,
        /// Element type of the gradients of parameters: F32, or BF16, which halves their memory and the traffic of
        /// each write and of the optimizer, and rounds every sum over micro-batches.
        gradients: DType,
        /// How the fp32 weights are kept.
        master: MasterWeights,
    },
}

impl Precision {
    /// bf16 with an fp32 residual stream and fp32 gradients, as PyTorch's autocast.
    pub const MIXED: Precision =
        Precision::Bf16 { residual: DType::F32, gradients: DType::F32, master: MasterWeights::Whole };

    /// The same mixed precision with a residual stream of this type.
    pub const fn with_residual(mut self, dtype: DType) -> Precision {
        if let Precision::Bf16 { residual, .. } = &mut self {
            *residual = dtype;
        }
        self
    }

    /// The same mixed precision with gradients of this type.
    pub const fn with_gradients(mut self, dtype: DType) -> Precision {
        if let Precision::Bf16 { gradients, .. } = &mut self {
            *gradients = dtype;
        }
        self
    }

    /// The same mixed precision with weights kept like this.
    pub const fn with_master(mut self, weights: MasterWeights) -> Precision {
        if let Precision::Bf16 { master, .. } = &mut self {
            *master = weights;
        }
        self
    }
}

/// The weights of a model: one flat arena, and a bf16 working copy where operations compute in bf16.
#[derive(Debug)]
pub struct ParamStore {
    layout: Arc<Layout>,
    /// In fp32 (f64 for a store of that type); without those that are split.
    weights: Arena,
    working: Option<Arena>,
    /// What completes the working copy of the first elements of the layout, where weights are split.
    split: Option<Split>,
    precision: Precision,
    /// Whether the weights changed and the working copy did not.
    working_is_stale: bool,
}

impl ParamStore {
    /// A store with no parameters, for computations that have none.
    pub fn empty() -> ParamStore {
        ParamBuilder::default().build_zeros(DType::F32, Device::Cpu).unwrap_or_else(|_| {
            // INVARIANT: an arena of zero elements is always representable.
            unreachable!("an empty arena cannot fail")
        })
    }

    /// Places and names.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The flat weights; those that are split are left out.
    pub fn arena(&self) -> &Arena {
        &self.weights
    }

    /// The flat weights, to change. With a working copy, call [`ParamStore::refresh_working`] afterwards. Weights that
    /// are split are left out.
    pub fn arena_mut(&mut self) -> &mut Arena {
        self.working_is_stale = self.working.is_some();
        &mut self.weights
    }

    /// Weights and working copy, for an optimizer on a GPU that writes both.
    ///
    /// # Errors
    /// [`rb_tensor::TensorError::Shared`] while a tensor still looks into one of them; weights in host memory.
    pub fn masters(&mut self) -> Result<Masters> {
        let low =
            self.split.as_mut().map(|split| Ok::<_, AutogradError>((split.low.device_mut()?, split.len)));
        let working = self.working.as_mut().map(Arena::device_mut);
        Ok(Masters {
            weights: self.weights.device_mut()?,
            working: working.transpose()?,
            low: low.transpose()?,
        })
    }

    /// In which element types a step computes.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Chooses in which element types steps compute; makes or drops the working copy.
    ///
    /// # Errors
    /// bf16 on the host, or a residual stream that is neither F32 nor BF16.
    pub fn set_precision(&mut self, precision: Precision) -> Result<()> {
        self.make_whole()?;
        self.precision = Precision::Full;
        self.working = None;
        if let Precision::Bf16 { residual, gradients, master } = precision {
            let device = self.weights.device();
            if device == Device::Cpu || self.weights.dtype() != DType::F32 {
                return Err(AutogradError::Unsupported { op: "bf16 precision", dtype: DType::BF16, device });
            }
            for (argument, dtype) in [("residual", residual), ("gradients", gradients)] {
                if matches!(dtype, DType::F32 | DType::BF16) {
                    continue;
                }
                let (got, expected) = (dtype.to_string(), "f32 or bf16".to_string());
                return Err(AutogradError::Argument { op: "bf16 precision", argument, got, expected });
            }
            self.working = Some(Arena::zeros("working weights", self.layout.numel, DType::BF16, device)?);
            self.precision = precision;
            self.refresh_working()?;
            if master == MasterWeights::Split {
                self.make_split()?;
            }
        }
        Ok(())
    }

    /// Brings the working copy up to date with the weights.
    pub fn refresh_working(&mut self) -> Result<()> {
        match (&mut self.working, &self.split) {
            (None, _) => {}
            (Some(working), None) => working.convert_from(&self.weights)?,
            (Some(working), Some(split)) => {
                working.write(split.len, &self.weights.view(0, [self.weights.numel()])?)?;
            }
        }
        self.working_is_stale = false;
        Ok(())
    }

    /// A copy of the store on another device, in the same precision where that device has it and in full where
    /// not.
    pub fn to_device(&self, device: Device) -> Result<ParamStore> {
        let weights = Arena::zeros("weights", self.layout.numel, self.weights.dtype(), device)?;
        let mut copy = ParamStore::of(self.layout.clone(), weights);
        match &self.split {
            None => copy.weights.convert_from(&self.weights)?,
            Some(_) => copy.copy_parts(self)?,
        }
        if device != Device::Cpu {
            copy.set_precision(self.precision)?;
        }
        Ok(copy)
    }

    fn of(layout: Arc<Layout>, weights: Arena) -> ParamStore {
        let precision = Precision::Full;
        ParamStore { layout, weights, working: None, split: None, precision, working_is_stale: false }
    }

    /// The entry of a handle.
    pub fn entry(&self, id: ParamId) -> &ParamEntry {
        &self.layout.entries[id.0 as usize]
    }

    /// The handle of the entry that holds a named part.
    pub fn id(&self, name: &str) -> Result<ParamId> {
        let found = self.layout.entries.iter().position(|e| e.parts.iter().any(|p| p.name == name));
        let index = found.ok_or_else(|| AutogradError::UnknownParameter { name: name.into() })?;
        Ok(ParamId(index as u32))
    }

    /// The value of an entry as operations read it (padding included): a view into the working copy, or into the
    /// weights where there is none.
    pub fn tensor(&self, id: ParamId) -> Result<Tensor> {
        let entry = self.entry(id);
        if self.working_is_stale {
            return Err(AutogradError::StaleWorkingCopy);
        }
        let arena = self.working.as_ref().unwrap_or(&self.weights);
        Ok(arena.view(entry.offset, &entry.shape)?)
    }

    /// The value of an entry in full precision: for norms, biases and table lookups, which mixed precision leaves in
    /// fp32.
    pub fn full_tensor(&self, id: ParamId) -> Result<Tensor> {
        let entry = self.entry(id);
        self.whole(entry.offset, &entry.shape)
    }

    /// The value of a named part in full precision: a view into the weights, or a copy where they are split.
    pub fn part(&self, name: &str) -> Result<Tensor> {
        let part = self.layout.part(name)?;
        self.whole(part.offset, &part.shape)
    }

    /// Overwrites a named part.
    ///
    /// # Errors
    /// An unknown name, another shape, or a tensor that still looks into the arena.
    pub fn set_part(&mut self, name: &str, value: &Tensor) -> Result<()> {
        let part = self.layout.part(name)?.clone();
        if value.shape() != &part.shape {
            return Err(ShapeError::new("set_part", name, value.shape(), &part.shape).into());
        }
        let start = self.split.as_ref().map_or(0, |split| split.len);
        match (&mut self.split, &mut self.working) {
            (Some(split), Some(working)) if part.offset < start => {
                return split.write(working, part.offset, value);
            }
            (_, Some(working)) => working.write(part.offset, value)?,
            (_, None) => {}
        }
        Ok(self.weights.write(part.offset - start, value)?)
    }

    /// A copy of the store in another element type: the f64 twin of a model, for checks.
    pub fn to_dtype(&self, dtype: DType) -> Result<ParamStore> {
        let weights = Arena::zeros("weights", self.layout.numel, dtype, self.weights.device())?;
        let mut twin = ParamStore::of(self.layout.clone(), weights);
        twin.copy_parts(self)?;
        Ok(twin)
    }

    fn copy_parts(&mut self, from: &ParamStore) -> Result<()> {
        let layout = self.layout.clone();
        layout.parts().try_for_each(|(_, part)| self.set_part(&part.name, &from.part(&part.name)?))
    }

    /// Declares one part frozen or trainable. Call it before gradients or optimizer state are built.
    ///
    /// # Errors
    /// As [`ParamStore::set_all_trainable`].
    pub fn set_trainable(&mut self, name: &str, trainable: bool) -> Result<()> {
        self.set_all_trainable(&[name], trainable)
    }

    /// Declares parts frozen or trainable by name. Call it before gradients or optimizer state are built.
    ///
    /// # Errors
    /// An unknown name. Names that are only some of an entry's parts (a query projection without the keys and values that
    /// are packed with it): an entry is frozen as a whole. Nothing has changed then.
    pub fn set_all_trainable(&mut self, names: &[&str], trainable: bool) -> Result<()> {
        let mut entries = Vec::new();
        for &name in names {
            self.layout.part(name)?;
            let parts = self.layout.entries.iter().enumerate();
            let holds = parts.filter(|(_, e)| e.parts.iter().any(|p| p.name == name));
            for (index, entry) in holds {
                let others = entry.parts.iter().filter(|p| !names.contains(&p.name.as_str()));
                let others: Vec<String> = others.map(|p| p.name.clone()).collect();
                if !others.is_empty() {
                    return Err(AutogradError::PackedTogether { name: name.into(), others });
                }
                entries.push(index);
            }
        }
        let layout = Arc::make_mut(&mut self.layout);
        entries.into_iter().for_each(|index| layout.entries[index].trainable = trainable);
        Ok(())
    }
}

/// Declares parameters; then lays them out and fills them.
#[derive(Debug, Default)]
pub struct ParamBuilder {
    entries: Vec<(ParamEntry, Init)>,
    names: HashMap<String, ()>,
}

impl ParamBuilder {
    /// One parameter with one name. Weight decay applies to matrices (rank 2 and more).
    pub fn param(&mut self, name: impl Into<String>, shape: impl Into<Shape>, init: Init) -> Result<ParamId> {
        let shape = shape.into();
        let rows = shape.first().copied().unwrap_or(1);
        self.packed([(name.into(), rows)], &shape, init)
    }

    /// A parameter whose rows belong to several names, in order; rows left over are padding.
    ///
    /// # Errors
    /// A name that exists already; parts with more rows than the shape has.
    pub fn packed(
        &mut self,
        parts: impl IntoIterator<Item = (String, usize)>,
        shape: &Shape,
        init: Init,
    ) -> Result<ParamId> {
        shape.checked_numel("parameter")?;
        let row_numel: usize = shape.iter().skip(1).product();
        let mut row = 0;
        let mut named = Vec::new();
        for (name, rows) in parts {
            if self.names.insert(name.clone(), ()).is_some() {
                return Err(AutogradError::DuplicateParameter { name });
            }
            let mut dims = shape.to_vec();
            if let Some(first) = dims.first_mut() {
                *first = rows;
            }
            named.push(Part { name, offset: row * row_numel, shape: dims.into() });
            row += rows;
        }
        if row > shape.first().copied().unwrap_or(1) {
            let expected = format!("at least {row} rows for its parts");
            return Err(ShapeError::new("parameter", named[0].name.clone(), shape, expected).into());
        }
        let entry = ParamEntry {
            shape: shape.clone(),
            offset: 0,
            decay: shape.rank() >= 2,
            trainable: true,
            parts: named,
        };
        self.entries.push((entry, init));
        Ok(ParamId((self.entries.len() - 1) as u32))
    }

    /// Lays out the arena (decayed entries first) and fills it. Each part draws from a stream named after
    /// it, so values depend on the seed and the name, not on the order of declaration or on packing.
    pub fn build(self, rng: &Rng, device: Device) -> Result<ParamStore> {
        let inits: Vec<Init> = self.entries.iter().map(|(_, init)| *init).collect();
        let mut store = self.build_zeros(DType::F32, Device::Cpu)?;
        let layout = store.layout.clone();
        let weights = store.weights.as_mut_slice::<f32>()?;
        let mut parts: Vec<(&Part, Init)> = Vec::new();
        for (entry, init) in layout.entries.iter().zip(inits) {
            parts.extend(entry.parts.iter().map(|part| (part, init)));
        }
        parts.sort_by_key(|(part, _)| part.offset);
        let (mut rest, mut place) = (weights, 0);
        let mut tasks = Vec::with_capacity(parts.len());
        for (part, init) in parts {
            let (gap, len) = (part.offset - place, part.shape.numel());
            let (values, tail) = rest[gap..].split_at_mut(len);
            (rest, place) = (tail, part.offset + len);
            tasks.push((part, init, values));
        }
        // Each part has a stream of its own, so the order of the tasks does not matter.
        tasks.into_par_iter().with_max_len(1).for_each(|(part, init, values)| match init {
            Init::Zeros => {}
            Init::Ones => values.fill(1.0),
            Init::Normal(std) => {
                let mut rng = rng.fork(&part.name);
                values.iter_mut().for_each(|v| *v = (rng.normal() * std) as f32);
            }
        });
        if device == Device::Cpu { Ok(store) } else { store.to_device(device) }
    }

    /// Lays out the arena and leaves it zero: for weights that are loaded next, and for plans.
    pub fn build_zeros(self, dtype: DType, device: Device) -> Result<ParamStore> {
        let mut entries: Vec<ParamEntry> = self.entries.into_iter().map(|(e, _)| e).collect();
        let mut numel = 0usize;
        for decay in [true, false] {
            for entry in entries.iter_mut().filter(|e| e.decay == decay) {
                entry.offset = numel;
                for part in &mut entry.parts {
                    part.offset += numel;
                }
                numel = (numel + entry.shape.numel()).next_multiple_of(ALIGN);
            }
        }
        let weights = Arena::zeros("weights", numel, dtype, device)?;
        Ok(ParamStore::of(Arc::new(Layout { entries, numel }), weights))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (ParamStore, ParamId) {
        let mut b = ParamBuilder::default();
        b.param("norm", [3], Init::Ones).unwrap();
        let parts = [("q".to_string(), 2), ("k".to_string(), 1)];
        let id = b.packed(parts, &[5, 3].into(), Init::Normal(1.0)).unwrap();
        (b.build(&Rng::new(1), Device::Cpu).unwrap(), id)
    }

    #[test]
    fn parts_padding_and_order() {
        let (store, id) = store();
        assert_eq!(store.entry(id).offset, 0, "decayed entries come first");
        assert_eq!(store.layout().num_parameters(), 12);
        let all = store.tensor(id).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(store.part("k").unwrap().to_vec::<f32>().unwrap(), all[6..9]);
        assert_eq!(all[9..], [0.0; 6], "padding is zero");
        assert!(store.part("v").unwrap_err().to_string().contains("parameter v does not exist"));
    }

    #[test]
    fn values_depend_on_names_not_on_packing() {
        let (packed, _) = store();
        let mut b = ParamBuilder::default();
        b.param("k", [1, 3], Init::Normal(1.0)).unwrap();
        let alone = b.build(&Rng::new(1), Device::Cpu).unwrap();
        assert_eq!(
            alone.part("k").unwrap().as_bytes().unwrap(),
            packed.part("k").unwrap().as_bytes().unwrap()
        );
    }

    #[test]
    fn a_packed_entry_is_frozen_as_a_whole_or_not_at_all() {
        let (mut store, id) = store();
        let message = store.set_trainable("q", false).unwrap_err().to_string();
        assert!(message.starts_with("q is packed into one matrix with k"), "{message}");
        assert!(store.set_all_trainable(&["norm", "k"], false).is_err());
        assert!(store.layout().entries.iter().all(|e| e.trainable), "an error changes nothing");
        store.set_all_trainable(&["k", "q"], false).unwrap();
        assert!(!store.entry(id).trainable);
        assert_eq!(store.layout().entries.iter().filter(|e| e.trainable).count(), 1);
        store.set_all_trainable(&["q", "k"], true).unwrap();
        assert!(store.set_trainable("v", false).unwrap_err().to_string().contains("does not exist"));
    }

    #[test]
    fn names_are_unique_and_shapes_checked() {
        let mut b = ParamBuilder::default();
        b.param("a", [2], Init::Zeros).unwrap();
        assert!(b.param("a", [2], Init::Zeros).unwrap_err().to_string().contains("declared twice"));
        assert!(b.packed([("b".to_string(), 3)], &[2, 2].into(), Init::Zeros).is_err());
        let (mut store, _) = store();
        let wrong = Tensor::from_vec(vec![0f32; 2], [2]).unwrap();
        assert_eq!(
            store.set_part("norm", &wrong).unwrap_err().to_string(),
            "set_part: norm has shape [2], expected [3]"
        );
    }
}

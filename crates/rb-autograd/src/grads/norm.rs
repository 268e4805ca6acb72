//! Partial sums of squares of the gradients on a GPU, for their global norm.
//!
//! The layout alone cuts the arena into segments and each segment into parts. A segment is summed beside the backward
//! pass as soon as its last gradient is written, while the multiprocessors have memory bandwidth to spare and the
//! gradients may still be in the level-two cache; what is left is summed at the end. When a segment is summed does not
//! change a bit of its sums.

use std::ops::Range;

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{Arena, DType, Device, Tensor};

use crate::params::Layout;
use crate::{Result, cuda};

const SUM_OF_SQUARES: Kernel = kernel!("sum_of_squares");

/// A segment ends with the entry that brings it to so many elements: a layer of a small model.
const SEGMENT_ELEMENTS: usize = 4 << 20;
/// Elements of one part, of at most [`MOST_PARTS`] in a segment: few enough parts to add in one block.
const PART_ELEMENTS: usize = 48 << 10;
const MOST_PARTS: usize = 1024;

#[derive(Debug)]
pub(super) struct Norm {
    gpu: Gpu,
    segments: Vec<Segment>,
    /// The segment of each entry.
    segment_of: Vec<usize>,
    /// Which entries are trained.
    trained: Vec<bool>,
    /// Which entries get nothing more in this step.
    finished: Vec<bool>,
    /// Sums of squares of all parts.
    parts: Tensor,
}

#[derive(Debug, PartialEq, Eq)]
struct Segment {
    elements: Range<usize>,
    parts: Range<usize>,
    summed: bool,
}

impl Norm {
    pub(super) fn new(gpu: Gpu, layout: &Layout) -> Result<Norm> {
        let (segments, segment_of) = segments(layout);
        let parts = segments.last().map_or(0, |s| s.parts.end);
        let _holder = gpu.holding("gradients");
        let parts = Tensor::zeros([parts], DType::F32, Device::Cuda(gpu))?;
        let trained = layout.entries.iter().map(|e| e.trainable).collect();
        Ok(Norm { gpu, segments, finished: vec![false; segment_of.len()], trained, segment_of, parts })
    }

    /// Forgets all sums: any gradient may have changed.
    pub(super) fn reset(&mut self) {
        self.finished.fill(false);
        self.segments.iter_mut().for_each(|s| s.summed = false);
    }

    /// Says that an entry is about to be written.
    pub(super) fn changes(&mut self, entry: usize) {
        self.finished[entry] = false;
        self.segments[self.segment_of[entry]].summed = false;
    }

    /// Says that an entry gets nothing more in this step.
    pub(super) fn finish(&mut self, entry: usize) {
        self.finished[entry] = true;
    }

    /// Sums the segment of an entry beside if all of it is finished and none of it `waits` to be enqueued.
    pub(super) fn sum_if_complete(
        &mut self,
        entry: usize,
        waits: impl Fn(usize) -> bool,
        arena: &Arena,
    ) -> Result<()> {
        let at = self.segment_of[entry];
        let mut others = self.segment_of.iter().enumerate().filter(|(_, s)| **s == at);
        if self.segments[at].summed || !others.all(|(e, _)| !self.trained[e] || self.finished[e] && !waits(e))
        {
            return Ok(());
        }
        self.gpu.beside(0, (), || self.sum(&self.segments[at], arena))?;
        self.segments[at].summed = true;
        Ok(())
    }

    /// The sums of all parts; those that are not taken yet are enqueued now.
    pub(super) fn parts(&self, arena: &Arena) -> Result<Tensor> {
        self.segments.iter().filter(|s| !s.summed).try_for_each(|segment| self.sum(segment, arena))?;
        Ok(self.parts.clone())
    }

    fn sum(&self, segment: &Segment, arena: &Arena) -> Result<()> {
        let x = arena.view(segment.elements.start, [segment.elements.len()])?;
        let out = self.parts.narrow(segment.parts.start, segment.parts.len())?;
        let launch = Launch::new(&SUM_OF_SQUARES, [segment.parts.len() as u32, 1, 1], [256, 1, 1])
            .define("T", x.dtype().cuda_name())
            .moves(x.size_bytes())
            .arg(x.arg()?)
            .arg(out.arg()?)
            .arg(Arg::I64(x.numel() as i64));
        cuda::launch_on(self.gpu, launch)
    }
}

/// Segments in the order of the arena, padding and gaps included, and the segment of each entry. Entries with decay and
/// without share none.
fn segments(layout: &Layout) -> (Vec<Segment>, Vec<usize>) {
    let mut order: Vec<usize> = (0..layout.entries.len()).collect();
    order.sort_by_key(|&e| layout.entries[e].offset);
    let mut segment_of = vec![0; order.len()];
    let (mut segments, mut start, mut part, mut elements) = (Vec::new(), 0, 0, 0);
    for (i, &e) in order.iter().enumerate() {
        segment_of[e] = segments.len();
        let next = order.get(i + 1).map(|&next| &layout.entries[next]);
        elements += layout.entries[e].shape.numel();
        if elements >= SEGMENT_ELEMENTS || next.is_none_or(|n| n.decay != layout.entries[e].decay) {
            let end = next.map_or(layout.numel, |n| n.offset);
            let parts = (end - start).div_ceil(PART_ELEMENTS).clamp(1, MOST_PARTS);
            segments.push(Segment { elements: start..end, parts: part..part + parts, summed: false });
            (start, part, elements) = (end, part + parts, 0);
        }
    }
    (segments, segment_of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GradStore, Init, ParamBuilder, ParamStore};
    use rb_cuda::GpuOptions;

    fn store(device: Device) -> ParamStore {
        let mut b = ParamBuilder::default();
        b.param("norm", [3], Init::Ones).unwrap();
        for (name, rows) in [("table", 5000), ("a", 10), ("b", 4200), ("c", 700)] {
            b.param(name, [rows, 1024], Init::Zeros).unwrap();
        }
        b.build_zeros(DType::F32, device).unwrap()
    }

    #[test]
    fn segments_cover_the_arena_once() {
        let store = store(Device::Cpu);
        let layout = store.layout();
        let (segments, segment_of) = segments(layout);
        assert_eq!(segment_of, [3, 0, 1, 1, 2]);
        let (mut place, mut part) = (0, 0);
        for segment in &segments {
            assert_eq!((segment.elements.start, segment.parts.start), (place, part));
            assert!(segment.elements.start % 4 == 0 && !segment.parts.is_empty());
            (place, part) = (segment.elements.end, segment.parts.end);
        }
        assert_eq!(place, layout.numel);
        for (entry, &s) in layout.entries.iter().zip(&segment_of) {
            let (range, segment) = (entry.range(), &segments[s].elements);
            assert!(segment.start <= range.start && range.end <= segment.end);
        }
    }

    /// Each segment is summed once, when its last entry is finished, and again where something is written later.
    #[test]
    fn a_segment_is_summed_when_it_is_complete() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let params = store(Device::Cuda(gpu));
        let mut grads = GradStore::new(&params).unwrap();
        let sums = || gpu.launches().get("sum_of_squares").copied().unwrap_or(0);
        let id = |name: &str| params.id(name).unwrap();
        let write = |grads: &mut GradStore, name: &str| {
            grads.device_slot(id(name)).unwrap();
            grads.finish(id(name)).unwrap();
        };
        write(&mut grads, "a");
        assert_eq!(sums(), 0, "b is missing");
        write(&mut grads, "b");
        write(&mut grads, "norm");
        assert_eq!(sums(), 2);
        grads.sum_of_squares_parts().unwrap();
        assert_eq!(sums(), 4, "table and c");
        write(&mut grads, "a");
        assert_eq!(sums(), 5, "a changed");
        grads.device_slot(id("b")).unwrap();
        grads.sum_of_squares_parts().unwrap();
        assert_eq!(sums(), 8, "table, c, and the one that b is in");
        grads.arena_mut();
        grads.sum_of_squares_parts().unwrap();
        assert_eq!(sums(), 12);
        grads.mark_stale();
        grads.set_last_pass(false);
        write(&mut grads, "norm");
        assert_eq!(sums(), 12, "more micro-batches follow");
    }
}

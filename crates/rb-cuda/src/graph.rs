//! Work that is captured once and launched many times: a CUDA graph, and what keeps its addresses true.
//!
//! A graph holds addresses. It may be launched while every block that its work used is still that block, and while
//! nobody has a block where its work writes; [`Graph::holds`] asks the allocator. Memory that the work gave back is
//! free for others between two launches: all work is in the order of one stream, and a launch reads nothing that an
//! earlier one left there.

use std::collections::BTreeMap;

use crate::driver::Handle;
use crate::memory::Footprint;
use crate::{CudaError, Gpu, Result};

/// A captured graph of the driver, ready to launch.
#[derive(Clone, Copy)]
pub(crate) struct Exec {
    pub(crate) handle: Handle,
    pub(crate) nodes: usize,
}

/// Captured work. What it made (its outputs) is held by what its closure returned.
pub struct Graph {
    gpu: Gpu,
    exec: Exec,
    footprint: Footprint,
    launches: BTreeMap<&'static str, u64>,
}

impl Gpu {
    /// Runs `work` without executing what it enqueues, and gives it as a graph, with what `work` returned: tensors
    /// in there have values after the first launch. On a dry run `work` is counted and nothing is kept.
    ///
    /// `work` must copy nothing from or to the host and wait for nothing; memory it takes and gives back is free again
    /// afterwards.
    ///
    /// # Errors
    /// Those of `work`; a call in it that cannot be captured; a driver error.
    pub fn capture<T, E: From<CudaError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<(Graph, T), E> {
        let before = self.launches();
        self.start_capture()?;
        let made = work();
        let (exec, footprint) = self.end_capture();
        let launches = self.launches().into_iter().filter_map(|(name, count)| {
            let gained = count - before.get(name).copied().unwrap_or(0);
            (gained > 0).then_some((name, gained))
        });
        // Nothing has run yet, so nothing counts yet.
        let launches = launches.collect();
        self.set_launches(before);
        // The graph is destroyed on drop, also where `work` failed.
        let graph = exec.map(|exec| Graph { gpu: *self, exec, footprint, launches });
        let made = made?;
        Ok((graph?, made))
    }
}

impl Graph {
    /// Whether it may be launched: see the module.
    pub fn holds(&self) -> bool {
        self.gpu.still_holds(&self.footprint)
    }

    /// Enqueues the captured work; counts its launches.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where it does not hold any more; a driver error.
    pub fn launch(&self) -> Result<()> {
        if !self.holds() {
            return Err(CudaError::Unsupported {
                what: "launch of a captured step".into(),
                reason: "memory that it uses has another owner now; capture it again".into(),
            });
        }
        self.gpu.backend().launch_graph(self.exec)?;
        self.gpu.add_launches(&self.launches);
        Ok(())
    }

    /// Nodes of the graph: kernels, copies and fills. 0 on a dry run.
    pub fn nodes(&self) -> usize {
        self.exec.nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.gpu.backend().destroy_graph(self.exec);
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} nodes on {})", self.exec.nodes, self.gpu)
    }
}

/// Whether work is being captured; its error for what cannot be.
pub(crate) fn refuse_in_capture(capturing: bool, what: &str) -> Result<()> {
    if !capturing {
        return Ok(());
    }
    Err(CudaError::Unsupported {
        what: what.into(),
        reason: "work is being captured, which the host can take no part in".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arg, GpuOptions, Kernel, Launch};

    const NOTHING: Kernel = Kernel { name: "nothing", source: "" };

    fn launch<'a>(buffer: &'a crate::Buffer) -> Launch<'a> {
        Launch::new(&NOTHING, [1; 3], [1; 3]).arg(Arg::Buffer(buffer, 0))
    }

    #[test]
    fn launches_count_when_a_graph_runs() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let weights = gpu.alloc(1000).unwrap();
        let (graph, loss) = gpu
            .capture(|| {
                let (scratch, loss) = (gpu.alloc(5000)?, gpu.alloc(4)?);
                gpu.launch(launch(&scratch))?;
                gpu.launch(launch(&weights).arg(Arg::Buffer(&loss, 0)))?;
                Ok::<_, CudaError>(loss)
            })
            .unwrap();
        assert_eq!(gpu.launches().get("nothing"), None, "capturing runs nothing");
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert_eq!(gpu.launches()["nothing"], 4);
        drop(weights);
        assert!(!graph.holds());
        let message = graph.launch().unwrap_err().to_string();
        assert!(message.contains("capture it again"), "{message}");
        drop(loss);
    }

    #[test]
    fn the_host_takes_no_part_in_captured_work() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let buffer = gpu.alloc(8).unwrap();
        let refused = |work: &dyn Fn() -> Result<()>| {
            let error = gpu.capture(work).unwrap_err().to_string();
            assert!(error.contains("captured"), "{error}");
        };
        refused(&|| gpu.upload(&buffer, 0, &[1; 8]));
        refused(&|| gpu.download(&buffer, 0, &mut [0; 8]));
        refused(&|| gpu.synchronize());
        refused(&|| gpu.read_later(&buffer, 0, 8).map(drop));
        refused(&|| gpu.capture(|| Ok::<_, CudaError>(())).map(drop));
        gpu.upload(&buffer, 0, &[1; 8]).unwrap();
    }
}

//! What each defect models: the published failure, or its kin.

use rb_planted::Defect;

/// A row of the table.
pub struct Entry {
    pub defect: Defect,
    /// The failure as it was published, or a kin of it.
    pub models: &'static str,
    /// Whether it sits in a kernel, so that only a GPU shows it.
    pub in_kernel: bool,
}

const fn host(defect: Defect, models: &'static str) -> Entry {
    Entry { defect, models, in_kernel: false }
}

const fn kernel(defect: Defect, models: &'static str) -> Entry {
    Entry { defect, models, in_kernel: true }
}

pub const TABLE: &[Entry] = &[
    host(Defect::BackwardReturnsNothing, "a backward that gives no gradient (candle #2168)"),
    host(Defect::OperationWithoutBackward, "a fused operation that is not differentiated (candle #3568)"),
    host(Defect::WrongBackwardFactor, "a factor in one gradient"),
    host(Defect::DetachedNormStatistic, "a norm whose statistic is a constant (candle #3011)"),
    host(Defect::DetachedBranch, "a branch off the tape while the rest still learns (candle #3823)"),
    host(Defect::SecondReaderReplacesFirst, "one of two readers' gradients lost (Liger-Kernel #1305)"),
    host(Defect::GradientsStayFresh, "last step's gradient taken for this one's"),
    host(Defect::FirstWriteAccumulates, "a stale gradient added to (beta 1 on the first write)"),
    host(Defect::TiedHeadCountedOnce, "a tied table with one of its two gradients"),
    host(Defect::RopeNotApplied, "position code without effect"),
    host(Defect::RopeAppliedTwice, "position code applied twice"),
    host(Defect::RopeInterleaved, "position code on neighbouring pairs"),
    host(Defect::MaskSeesNext, "causal mask off by one: the answer is seen"),
    host(Defect::MaskHidesSelf, "causal mask off by one: the own token is hidden"),
    host(Defect::DocumentMaskIgnored, "packed documents that see each other"),
    host(Defect::EmptyRowIsNan, "0/0 in a fully masked row (burn #4697)"),
    host(Defect::NanInOneRow, "NaN in one row"),
    host(Defect::TailUnwritten, "the tail of an output that is not written"),
    host(Defect::RepeatedTokensLost, "a table's gradient without repeated tokens"),
    host(Defect::PaddedClassesCounted, "padding of the vocabulary with probability"),
    host(Defect::ScoresNotScaled, "attention scores that are not scaled"),
    host(Defect::MeanOverPadding, "a loss averaged over padding"),
    host(Defect::StepMeanOverPadding, "a step's loss averaged over padding"),
    host(Defect::MeanOfMicroBatches, "micro-batches averaged one by one (litgpt #1947)"),
    host(Defect::ClipBeforeAccumulationEnds, "gradients clipped too early (nanochat 061f83c)"),
    host(Defect::EvaluationMeanOfMeans, "held-out loss as a mean of means"),
    host(Defect::OptimizerSkipsParameter, "an optimizer that leaves a parameter out"),
    host(Defect::DecayOnNorms, "weight decay on norms"),
    host(Defect::BiasCorrectionMissing, "Adam without bias correction"),
    host(Defect::UpdateRoundedAway, "small updates lost to bf16 rounding"),
    host(Defect::NonFiniteStepApplied, "a NaN step that changes the weights (torchtitan #3863)"),
    host(Defect::NormAfterClipping, "a logged norm from after clipping"),
    host(Defect::FrozenParameterMoves, "a frozen parameter that decays"),
    host(Defect::FirstRateIsZero, "a learning rate of 0 in the first step (nanoGPT #443)"),
    host(Defect::CosineRestarts, "a cosine that rises after its end (burn #5191)"),
    host(Defect::SamplesRepeated, "samples repeated, others never seen"),
    host(Defect::LastSequenceDropped, "the end of the data never seen"),
    host(Defect::LabelsShiftedTwice, "labels shifted twice"),
    host(Defect::SameOrderEachEpoch, "the same order in each epoch"),
    host(Defect::SeedIgnored, "a seed that changes nothing (litgpt #1425)"),
    host(Defect::PositionsNotRestarted, "positions that run on through documents"),
    host(Defect::TargetsCrossDocuments, "a document predicted from the one before"),
    host(Defect::MomentsNotRestored, "a checkpoint without optimizer state"),
    host(Defect::MasterWeightsNotStored, "a checkpoint without master weights (llm.c #522)"),
    host(Defect::StepCountNotRestored, "bias correction that starts anew on resume"),
    host(Defect::DataPlaceNotRestored, "the data from its start on resume"),
    host(Defect::MemoryRetained, "memory that grows with each step (burn #2743)"),
    host(Defect::MaskRebuiltPerLayer, "a mask made again in each layer"),
    host(Defect::RecomputeNeverRan, "a memory setting without effect"),
    host(Defect::FusedPathNeverRan, "a fused path that never ran"),
    kernel(Defect::KernelTailUnwritten, "a kernel that leaves its last row unwritten"),
    kernel(Defect::KernelNormDetached, "a norm's backward without the mean's term"),
    kernel(Defect::KernelRopeBackwardForward, "a rotation that is not inverted in backward"),
    kernel(Defect::KernelLossWithoutLabel, "a loss without its label"),
    kernel(Defect::KernelBiasCorrectionMissing, "a second moment without correction"),
    kernel(Defect::KernelWorkingCopyStale, "bf16 weights that are never refreshed"),
    kernel(Defect::KernelTokensLost, "most tokens lost to a table"),
    kernel(Defect::KernelNormHalved, "a gradient norm over every second element"),
];

//! The defects, by where they sit.

/// Declares the enum and the list of its variants.
macro_rules! defects {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// A defect that can be planted. What each models, and which check caught it, is in the table of
        /// `cargo xtask verify --only planted-defects`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Defect {
            $($(#[$meta])* $name,)*
        }

        impl Defect {
            /// Every defect.
            pub const ALL: &[Defect] = &[$(Defect::$name,)*];
        }
    };
}

defects! {
    /// The backward of an operation writes no gradient.
    BackwardReturnsNothing,
    /// A fused operation gives a value without a history.
    OperationWithoutBackward,
    /// One gradient of a pair is half of what it should be.
    WrongBackwardFactor,
    /// The statistic of a norm is a constant to its backward.
    DetachedNormStatistic,
    /// A module takes its input off the tape.
    DetachedBranch,
    /// Of two readers of a value only the last gives it a gradient.
    SecondReaderReplacesFirst,
    /// A step leaves its gradients marked as new.
    GradientsStayFresh,
    /// The first writer of a step adds to what the last step left.
    FirstWriteAccumulates,
    /// The second writer of a tied table overwrites the first.
    TiedHeadCountedOnce,
    /// Queries and keys are not rotated.
    RopeNotApplied,
    /// Queries and keys are rotated twice.
    RopeAppliedTwice,
    /// Neighbouring elements are rotated, not half-split pairs.
    RopeInterleaved,
    /// A query sees the key after its own.
    MaskSeesNext,
    /// A query does not see its own key.
    MaskHidesSelf,
    /// Packed documents see each other.
    DocumentMaskIgnored,
    /// A query that sees nothing gives 0/0.
    EmptyRowIsNan,
    /// One row of a norm is NaN.
    NanInOneRow,
    /// The last elements of an output whose length is no multiple of 8 stay zero.
    TailUnwritten,
    /// Of several tokens with one id only the last gives the table a gradient.
    RepeatedTokensLost,
    /// Padding rows of the vocabulary get probability.
    PaddedClassesCounted,
    /// Scores are not divided by the root of the head's width.
    ScoresNotScaled,
    /// The mean of a loss divides by ignored labels too.
    MeanOverPadding,
    /// The loss of a training step divides by padding too.
    StepMeanOverPadding,
    /// Each micro-batch is averaged by itself.
    MeanOfMicroBatches,
    /// Gradients are clipped after each micro-batch.
    ClipBeforeAccumulationEnds,
    /// Held-out loss is the mean of the batches' means.
    EvaluationMeanOfMeans,
    /// The optimizer leaves out the last parameter.
    OptimizerSkipsParameter,
    /// Weight decay acts on norms.
    DecayOnNorms,
    /// Adam's moments are not corrected for their start at zero.
    BiasCorrectionMissing,
    /// Weights are rounded to bf16 after each update.
    UpdateRoundedAway,
    /// A step with an infinite norm changes the weights.
    NonFiniteStepApplied,
    /// The norm that is reported is the one after clipping.
    NormAfterClipping,
    /// A frozen parameter is updated.
    FrozenParameterMoves,
    /// The first step of the warm-up has a rate of zero.
    FirstRateIsZero,
    /// The cosine rises again after its end.
    CosineRestarts,
    /// Every second sample of an epoch is the one before it.
    SamplesRepeated,
    /// The tokens after the last whole sequence are never trained on.
    LastSequenceDropped,
    /// Labels are two tokens ahead.
    LabelsShiftedTwice,
    /// Every epoch has the order of the first.
    SameOrderEachEpoch,
    /// The seed does not change the order.
    SeedIgnored,
    /// Positions do not start anew at a document.
    PositionsNotRestarted,
    /// The first token of a document is predicted from the one before it.
    TargetsCrossDocuments,
    /// Optimizer moments are not restored.
    MomentsNotRestored,
    /// Stored weights are rounded to bf16.
    MasterWeightsNotStored,
    /// The optimizer's count of steps is not restored.
    StepCountNotRestored,
    /// The place in the data is not restored.
    DataPlaceNotRestored,
    /// A tensor of every step is never freed.
    MemoryRetained,
    /// Every layer makes the mask again.
    MaskRebuiltPerLayer,
    /// The setting that recomputes a layer does nothing.
    RecomputeNeverRan,
    /// Attention takes the path of separate heads where the packed one should run.
    FusedPathNeverRan,
    /// On a GPU: the last row of a gated activation is not written.
    KernelTailUnwritten,
    /// On a GPU: the backward of the norm lacks the mean's term.
    KernelNormDetached,
    /// On a GPU: gradients are rotated forward.
    KernelRopeBackwardForward,
    /// On a GPU: the loss of a row forgets its label's score.
    KernelLossWithoutLabel,
    /// On a GPU: the second moment is not corrected.
    KernelBiasCorrectionMissing,
    /// On a GPU: the working copy of the weights is not written.
    KernelWorkingCopyStale,
    /// On a GPU: a table's gradient leaves out all but the first 32 of each 256 tokens.
    KernelTokensLost,
    /// On a GPU: the norm of the gradients reads every second element.
    KernelNormHalved,
}

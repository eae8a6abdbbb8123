# SPDX-License-Identifier: Apache-2.0
"""Weight handles, through which layers compute with weights, and their buckets and all-gathers.

A layer declares a weight and keeps its handle; it computes by `handle.linear(x)`,
`handle.embedding(ids)`, `handle.use()`. The storage of the weight and its gradient is decided after
the model is built, when the store is materialised. Model code does not depend on it.

    handle          WeightHandle: computation with a weight, deferred weight gradients
    bucket          blocks of weights, which are all-gathered, and buckets of blocks, which are
                    reduced
    grouped         grouped linear layers of experts
    store           WeightStore: declaration and layout of weights; the ranges of an optimizer
    module          StoreModule: a store's weights as the parameters of an nn.Module
    plan            when sharded weights are all-gathered and resharded
    gather_format   encodings of shards for the all-gather
    gatherer        Gatherer and BufferPool: all-gathers into pool buffers, just before use
"""

from megatron.core.weight_gather.bucket import (
    GRANULARITIES,
    Bucket,
    BucketBlock,
    Reduction,
    Storage,
    reductions,
)
from megatron.core.weight_gather.gatherer import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    BufferPool,
    Gatherer,
    segment_name,
)
from megatron.core.weight_gather.handle import (
    Deferral,
    RowRuns,
    WeightHandle,
    WgradQueue,
    grouped_linear,
)
from megatron.core.weight_gather.plan import GatherPlan, check_plan, compile_plan
from megatron.core.weight_gather.store import (
    NORM_GROUPS,
    CopyReport,
    OwnedRange,
    StoreModule,
    WeightStore,
    copy_weights,
    empty_range,
    owned_range,
)

__all__ = [
    "BACKWARD",
    "EVALUATION",
    "FORWARD",
    "GRANULARITIES",
    "NORM_GROUPS",
    "Bucket",
    "BucketBlock",
    "BufferPool",
    "CopyReport",
    "Deferral",
    "GatherPlan",
    "Gatherer",
    "OwnedRange",
    "Reduction",
    "RowRuns",
    "Storage",
    "StoreModule",
    "WeightHandle",
    "WeightStore",
    "WgradQueue",
    "check_plan",
    "compile_plan",
    "copy_weights",
    "empty_range",
    "grouped_linear",
    "owned_range",
    "reductions",
    "segment_name",
]

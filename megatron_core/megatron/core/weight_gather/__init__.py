# SPDX-License-Identifier: Apache-2.0
"""Weight handles, the only way a layer sees a weight, and the buckets and gathers under them.

A layer declares a weight and keeps its handle; it computes by `handle.linear(x)`,
`handle.embedding(ids)`, `handle.use()`. Where the weight and its gradient are stored is decided
after the model is built, by the code that materialises the store; model code does not depend on it.

    handle      WeightHandle, deferred weight gradients
    bucket      blocks, which are gathered, in buckets, which are reduced; how weights are stored
    grouped     grouped linear layers: runs of rows, one weight each
    matmul      the matrix products of a linear layer
    store       WeightStore: declaration and layout; what a rank's optimizer owns of a bucket
    module      StoreModule: a store's weights as the parameters of an nn.Module
    plan        when sharded weights are gathered and released
    gatherer    Gatherer and BufferPool: all-gathers into leased buffers, just before use
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
from megatron.core.weight_gather.grouped import RowRuns, grouped_linear
from megatron.core.weight_gather.handle import Deferral, WeightHandle, WgradQueue
from megatron.core.weight_gather.module import StoreModule
from megatron.core.weight_gather.plan import GatherPlan, check_plan, compile_plan
from megatron.core.weight_gather.store import (
    NORM_GROUPS,
    CopyReport,
    OwnedRange,
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

# SPDX-License-Identifier: Apache-2.0
"""Weight handles, the only way a layer sees a weight, and what is behind them.

A layer declares a weight and keeps its handle; it computes by `handle.linear(x)`,
`handle.embedding(ids)`, `handle.use()`. Where the weight and its gradient lie is decided after the
model is built, by whoever materialises the store, and model code never changes for it.

    handle, grouped, queue   what a layer calls; gradients put off
    store, layout, bucket    declaration, and the division into flat buckets
    module                   a store's weights as the parameters of an nn.Module
    owned                    what a rank stores and what its optimizer updates, in logical terms
    plan, arena, gatherer    cut weights made whole just before use: when, where, and by whom
"""

from megatron.core.weight_gather.gatherer import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    Arena,
    Gatherer,
    segment_name,
)
from megatron.core.weight_gather.grouped import RowRuns, grouped_linear
from megatron.core.weight_gather.handle import (
    GRANULARITIES,
    Bucket,
    Deferral,
    Storage,
    WeightHandle,
    WgradQueue,
)
from megatron.core.weight_gather.module import StoreModule
from megatron.core.weight_gather.plan import GatherPlan, check_plan, compile_plan
from megatron.core.weight_gather.store import (
    NORM_GROUPS,
    OwnedRange,
    WeightStore,
    empty_range,
    owned_range,
)

__all__ = [
    "BACKWARD",
    "EVALUATION",
    "FORWARD",
    "GRANULARITIES",
    "NORM_GROUPS",
    "Arena",
    "Bucket",
    "Deferral",
    "GatherPlan",
    "Gatherer",
    "OwnedRange",
    "RowRuns",
    "Storage",
    "StoreModule",
    "WeightHandle",
    "WeightStore",
    "WgradQueue",
    "check_plan",
    "compile_plan",
    "empty_range",
    "grouped_linear",
    "owned_range",
    "segment_name",
]

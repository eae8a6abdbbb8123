# SPDX-License-Identifier: Apache-2.0
"""How a weight, its gradient and its optimizer state lie over the grid, and what follows from it.

A `WeightSharding` is a description, never a tensor. From it and a `RankGrid` alone are derived: the
local shape with its padding, the boxes of the logical tensors that a rank holds (initial values,
checkpoint chunks and Hugging Face slices are loops over these), which ranks hold replicas of them,
who counts them in the gradient norm, the bytes they take, and the gradient plan with its one
factor.

Vocabulary of this package:

- A *logical tensor* is what a checkpoint names: unfused, unpadded, whole. A fused weight (q|k|v,
  gate|up, the projections of a state-space layer) is one weight with several logical tensors, its
  *segments*.
- The *local tensor* is what one rank multiplies with: the `stay` cuts applied, padded so that it
  has one shape on every rank. Its elements in row-major order are the flat space that buckets and
  shards cut further.
- A `gather` cut (generalized tensor parallelism, ZeRO-3) and a placement (ZeRO-1/2) are ranges of
  that flat space; a row-aligned range is the same thing with a larger quantum.
"""

from megatron.core.weight_sharding.boxes import (
    Box,
    check,
    local_boxes,
    local_shape,
    memory_bytes,
    range_boxes,
    replica_ranks,
    shard_range,
)
from megatron.core.weight_sharding.description import (
    DENSE_LANES,
    EXPERT_LANES,
    INNER_LANES,
    OUTER_LANES,
    OUTER_STRATEGIES,
    STRATEGIES,
    Cut,
    GradientKind,
    Placement,
    Segment,
    WeightSharding,
    placement,
)
from megatron.core.weight_sharding.gradient_plan import (
    GradientPlan,
    GradientStep,
    gradient_plan,
    loss_factor,
)

__all__ = [
    "DENSE_LANES",
    "EXPERT_LANES",
    "INNER_LANES",
    "OUTER_LANES",
    "OUTER_STRATEGIES",
    "STRATEGIES",
    "Box",
    "Cut",
    "GradientKind",
    "GradientPlan",
    "GradientStep",
    "Placement",
    "Segment",
    "WeightSharding",
    "check",
    "gradient_plan",
    "local_boxes",
    "local_shape",
    "loss_factor",
    "memory_bytes",
    "placement",
    "range_boxes",
    "replica_ranks",
    "shard_range",
]

# SPDX-License-Identifier: Apache-2.0
"""Weight handles, the only way a layer sees a weight, and the store that lays them out.

A layer declares a weight and keeps its handle; it computes by `handle.linear(x)`,
`handle.embedding(ids)`, `handle.use()`. Where the weight and its gradient lie is decided after the
model is built, by whoever materialises the store, and model code never changes for it.
"""

from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_gather.owned import OwnedRange, PlacedBox, owned_range
from megatron.core.weight_gather.queue import WgradQueue
from megatron.core.weight_gather.store import Bucket, WeightStore

__all__ = [
    "Bucket",
    "OwnedRange",
    "PlacedBox",
    "WeightHandle",
    "WeightStore",
    "WgradQueue",
    "owned_range",
]

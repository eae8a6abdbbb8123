# SPDX-License-Identifier: Apache-2.0
"""Collectives on explicit groups: plain, differentiable in conjugate pairs, and traced."""

from megatron.core.comm.collectives import (
    CollectiveRecord,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    trace,
)
from megatron.core.comm.conjugates import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)

__all__ = [
    "CollectiveRecord",
    "Pending",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to_group",
    "gather_from_group",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_to_group",
    "scatter_to_group",
    "trace",
]

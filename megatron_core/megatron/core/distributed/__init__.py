# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: gradients of many lanes made whole in flat buckets."""

from megatron.core.distributed.data_parallel import DataParallel, DataParallelConfig

__all__ = ["DataParallel", "DataParallelConfig"]

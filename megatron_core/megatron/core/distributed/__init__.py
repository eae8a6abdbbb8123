# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: ZeRO 0 to 3 and hybrid sharding as placements over data axes."""

from megatron.core.distributed.data_parallel import DataParallel, DataParallelConfig, GradientBucket

__all__ = ["DataParallel", "DataParallelConfig", "GradientBucket"]

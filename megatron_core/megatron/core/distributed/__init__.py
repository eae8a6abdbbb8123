# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: ZeRO 0 to 3 and hybrid sharding as placements over data axes."""

from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.gradient_bucket import GradientBucket

__all__ = ["DataParallel", "DataParallelConfig", "GradientBucket"]

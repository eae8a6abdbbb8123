# SPDX-License-Identifier: Apache-2.0
"""Models with GTP-sharded matrices and their optimizer state: saved on one layout, loaded bit for
bit on other layouts and on a single process."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.dist_checkpointing import (
    Coordinator,
    TensorChunk,
    optimizer_chunks,
    weight_chunks,
)
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from tests.parity.rows import row_with
from tests.parity.training import gpt_config
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import (
    check_single_process_loads,
    save_and_load_layouts,
)

#: Gated and biased, tied, a recurrent mixer with fused projections.
MODEL = row_with(tied=True, bias="all", mixer="delta")
#: Grids of four ranks and engine options; the blocks of a gather format pad a shard by 28 rows.
LAYOUTS: tuple[tuple[dict[str, int], dict[str, object]], ...] = (
    ({"gtp": 2}, {"strategy": "optim", "gather_format": "mxfp8"}),
    ({"tp": 2, "gtp": 2}, {"strategy": "no_shard"}),
    ({"gtp": 4}, {"gather_format": "nvfp4", "gather_scale_blocks": "1d"}),
)


def chunks_of(groups: ProcessGroupCollection, parallel: dict[str, object]) -> list[TensorChunk]:
    """Build a bf16 model; return its weights, their fp32 masters and their momentum."""
    config = DataParallelConfig(**parallel)  # type: ignore[arg-type]
    storage = config.storage(bucket_bytes=9000)
    model = GPTModel(gpt_config(MODEL), groups, dtype=torch.bfloat16, storage=storage)
    engine = DataParallel(model.store, groups, config=config)
    sgd = OptimizerConfig(kind="sgd", sgd_momentum=0.5)
    optimizer = Optimizer(engine.owned(), groups, config=sgd)
    assert any(b.gtp for b in model.store.buckets) == (groups["gtp"].size > 1)
    return weight_chunks(model.store) + optimizer_chunks(optimizer)


def expected_values(chunk: TensorChunk) -> torch.Tensor:
    """Return the expected values of a chunk."""
    assert len(chunk.shape) == len(chunk.offsets) == chunk.tensor.dim()
    values = torch.randn(chunk.shape, generator=generator(4, *chunk.name.encode()))
    ranges = zip(chunk.offsets, chunk.tensor.shape, strict=True)
    slices = tuple(slice(begin, begin + size) for begin, size in ranges)
    return values[slices].to(chunk.tensor.dtype)


def save_and_load(rank: int, world: int, root: str) -> None:
    """Save on every layout; load each layout's checkpoint on the next one."""
    torch.set_num_threads(1)
    world_groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    coordinator = Coordinator.from_groups(world_groups, timeout_seconds=20.0)
    layouts = [
        chunks_of(
            ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank),
            parallel,
        )
        for degrees, parallel in LAYOUTS
    ]
    save_and_load_layouts(root, layouts, coordinator, expected_values)


def test_gtp_checkpoint_loads_on_any_layout(tmp_path: Path):
    run_ranks(save_and_load, 4, str(tmp_path))
    single = chunks_of(ProcessGroupCollection.single(), {})
    check_single_process_loads(tmp_path, len(LAYOUTS), single, expected_values)

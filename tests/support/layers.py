# SPDX-License-Identifier: Apache-2.0
"""Single layers of models, with their own weight store."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core import InitSpec, ProcessGroupCollection
from megatron.core.backend import LOCAL
from megatron.core.context_parallel import ContextParallel
from megatron.core.distributed import DataParallelConfig
from megatron.core.ssm import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    Mamba2,
    Mamba2Config,
    ShortConv,
    ShortConvConfig,
)
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import LayerBuild, NormConfig
from megatron.core.weight_gather import WeightStore


def make_layer_build(hidden_size: int, *, seed: int = 0) -> LayerBuild:
    """Return the build context of a single process, with a new weight store."""
    groups = ProcessGroupCollection.single()
    return LayerBuild(
        store=WeightStore(groups, seed=1),
        region=TensorParallelRegion(groups["tp"]),
        backend=LOCAL,
        hidden_size=hidden_size,
        init=InitSpec.normal(0.4),
        output_init=InitSpec.normal(0.3),
        seed=seed,
    )


def make_mixer(
    config: GatedDeltaNetConfig | Mamba2Config | ShortConvConfig,
    hidden_size: int,
    groups: ProcessGroupCollection | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    strategy: str = "no_shard",
    **context: Any,
) -> tuple[RecurrentMixer, WeightStore]:
    """Return a recurrent mixer named "m" and its store."""
    groups = groups or ProcessGroupCollection.single()
    store = WeightStore(groups, seed=2, dtype=dtype)
    build = LayerBuild(
        store=store,
        region=TensorParallelRegion(groups["tp"], False),
        backend=LOCAL,
        hidden_size=hidden_size,
        init=InitSpec.normal(0.5),
        output_init=InitSpec.normal(0.4),
        context=ContextParallel(group=groups["cp"], **context),
    )
    layer: RecurrentMixer
    with store.unit("m"):
        if isinstance(config, ShortConvConfig):
            layer = ShortConv("m", config=config, build=build)
        elif isinstance(config, Mamba2Config):
            layer = Mamba2("m", config=config, norm=NormConfig(), build=build)
        else:
            layer = GatedDeltaNet("m", config=config, norm=NormConfig(), build=build)
    store.materialize(DataParallelConfig(strategy=strategy).storage())
    return layer, store

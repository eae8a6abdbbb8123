# SPDX-License-Identifier: Apache-2.0
"""One MoE layer with its data-parallel engine; logical weights and gradients merged from shards.

Weights are functions of the seed and their names, so layers on any grid start alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from megatron.core import InitSpec, ProcessGroupCollection
from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.moe import MoE, MoEConfig
from megatron.core.moe.router import Share
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import LayerBuild
from megatron.core.weight_gather import WeightHandle, WeightStore
from tests.support.inputs import generator

#: A logical tensor's name and shape, the offsets of this rank's shard, and the shard.
Shard = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def make_layer_build(
    groups: ProcessGroupCollection,
    *,
    hidden_size: int,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    **backend: object,
) -> LayerBuild:
    """Return the build context of a layer, with a new weight store."""
    return LayerBuild(
        store=WeightStore(groups, seed=2, dtype=dtype),
        region=TensorParallelRegion(groups["tp"], sequence_parallel),
        backend=replace(LOCAL, **backend),
        hidden_size=hidden_size,
        init=InitSpec.normal(0.5),
        output_init=InitSpec.normal(0.4),
        seed=3,
    )


class Layer:
    """A mixture of experts named `m` on a grid, with its store and data-parallel engine."""

    def __init__(
        self,
        config: MoEConfig,
        groups: ProcessGroupCollection | None = None,
        *,
        hidden_size: int,
        bias: torch.Tensor | None = None,
        **build: object,
    ) -> None:
        self.groups = groups = groups or ProcessGroupCollection.single()
        build_context = make_layer_build(groups, hidden_size=hidden_size, **build)
        self.store = build_context.store
        self.moe = MoE("m", config=config, build=build_context)
        self.store.materialize()
        self.engine = DataParallel(self.store, groups)
        if bias is not None:
            self.moe.router.expert_bias.copy_(bias)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite all weights with whole logical tensors."""
        whole = merged(self.shards(lambda handle: handle.get()))
        assert {n: w.shape for n, w in whole.items()} == {n: w.shape for n, w in weights.items()}
        for name, _, offsets, shard in self.shards(lambda handle: handle.get()):
            shard.copy_(box_view(weights[name].detach(), offsets, shard.shape))

    def step(
        self,
        hidden: torch.Tensor,
        factors: torch.Tensor,
        layout: SequenceLayout | None = None,
        *,
        aux_factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output for [s, b, h] and the input gradient of sum(output · factors)."""
        x = hidden.clone().requires_grad_(True)
        layout = layout or SequenceLayout.of_rows(len(hidden))
        self.engine.begin_step()
        out = self.moe(x, layout, aux_factor=aux_factor)
        self.engine.backward((out * factors).sum(), last=True)
        self.engine.finish()
        return out.detach(), x.grad

    @torch.no_grad()
    def assert_stable_routes(
        self, hidden: torch.Tensor, layout: SequenceLayout | None = None
    ) -> None:
        """Fail if noise a hundred times as large as rounding errors changes any route."""
        layout = layout or SequenceLayout.of_rows(len(hidden))
        share = Share(hidden, layout, region=self.moe.region)
        noise = torch.randn(hidden.shape, generator=generator(len(hidden)))
        routes = [
            self.moe.router(share.rows(x), share) for x in (hidden, hidden * (1 + 3e-5 * noise))
        ]
        assert torch.equal(*(route.experts for route in routes)), "choose other inputs"
        if routes[0].keep_mask is not None:
            assert torch.equal(*(route.keep_mask for route in routes)), "choose other inputs"

    def shards(self, flat_of: Callable[[WeightHandle], torch.Tensor]) -> list[Shard]:
        """List this rank's shards of logical tensors, as views of `flat_of(handle)`."""
        shards = []
        for handle in self.store.handles.values():
            flat = flat_of(handle).view(-1)
            for box in self.store.boxes(handle):
                shard = flat[box.start : box.start + box.numel].view(box.sizes)
                shards.append((box.name, box.shape, box.offsets, shard))
        return shards

    def gradients(self) -> list[Shard]:
        """List this rank's shards of the step's gradients."""
        return self.shards(lambda handle: handle.main_grad)


def merged(shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """Return the logical tensors merged from all ranks' shards, which must agree on overlaps."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, offsets, shard in shards:
        whole = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=shard.dtype))
        view = box_view(whole, offsets, shard.shape)
        assigned = ~view.isnan()
        assert (view - shard)[assigned].abs().amax() <= 1e-5 if assigned.any() else True, name
        view.copy_(shard.detach())
    assert not any(bool(whole.isnan().any()) for whole in tensors.values()), "shards are missing"
    return tensors


def box_view(whole: torch.Tensor, offsets: tuple[int, ...], sizes: torch.Size) -> torch.Tensor:
    """Return a view of the box at `offsets`."""
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

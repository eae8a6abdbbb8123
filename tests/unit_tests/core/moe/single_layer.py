# SPDX-License-Identifier: Apache-2.0
"""One block's experts with their engine, and whole logical weights and gradients out of its parts.

Weights are functions of the seed and their names, so layers on any grid start alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.initialize import InitSpec
from megatron.core.moe import MoE, MoEConfig
from megatron.core.moe.router import Share
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import LayerBuild
from megatron.core.weight_gather import WeightHandle, WeightStore
from tests.support.inputs import generator

#: A logical tensor's name, its shape, and where this rank's part of it begins.
Piece = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def surroundings(
    groups: ProcessGroupCollection,
    *,
    hidden_size: int,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    **backend: object,
) -> LayerBuild:
    """Return what a layer is built in, with a fresh store."""
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
    """A mixture of experts named `m` on some ranks, and what trains it."""

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
        made = surroundings(groups, hidden_size=hidden_size, **build)
        self.store = made.store
        self.moe = MoE("m", config=config, build=made)
        self.store.materialize()
        self.engine = DataParallel(self.store, groups)
        if bias is not None:
            self.moe.router.expert_bias.copy_(bias)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite all weights with whole logical tensors."""
        whole = merged(self.pieces(lambda handle: handle.get()))
        assert {n: w.shape for n, w in whole.items()} == {n: w.shape for n, w in weights.items()}
        for name, _, offsets, part in self.pieces(lambda handle: handle.get()):
            part.copy_(_box(weights[name].detach(), offsets, part.shape))

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
    def assert_sure(self, hidden: torch.Tensor, layout: SequenceLayout | None = None) -> None:
        """Fail if rounding could turn a route: noise a hundred times as large must not."""
        layout = layout or SequenceLayout.of_rows(len(hidden))
        share = Share(hidden, layout, region=self.moe.region)
        noise = torch.randn(hidden.shape, generator=generator(len(hidden)))
        routes = [
            self.moe.router(share.rows(x), share) for x in (hidden, hidden * (1 + 3e-5 * noise))
        ]
        assert torch.equal(*(route.experts for route in routes)), "take other inputs"
        if routes[0].keep_mask is not None:
            assert torch.equal(*(route.keep_mask for route in routes)), "take other inputs"

    def pieces(self, flat_of: Callable[[WeightHandle], torch.Tensor]) -> list[Piece]:
        """List this rank's parts of logical tensors, views of what `flat_of` gives."""
        found = []
        for handle in self.store.handles.values():
            flat = flat_of(handle).view(-1)
            for box in self.store.boxes(handle):
                part = flat[box.start : box.start + box.numel].view(box.sizes)
                found.append((box.name, box.shape, box.offsets, part))
        return found

    def gradients(self) -> list[Piece]:
        """List this rank's parts of the gradients of the step."""
        return self.pieces(lambda handle: handle.main_grad)


def merged(pieces: Iterable[Piece]) -> dict[str, torch.Tensor]:
    """Return whole logical tensors from the pieces of all ranks, which agree where they overlap."""
    found: dict[str, torch.Tensor] = {}
    for name, shape, offsets, part in pieces:
        whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
        there = _box(whole, offsets, part.shape)
        known = ~there.isnan()
        assert (there - part)[known].abs().amax() <= 1e-5 if known.any() else True, name
        there.copy_(part.detach())
    assert not any(bool(whole.isnan().any()) for whole in found.values()), "parts are missing"
    return found


def _box(whole: torch.Tensor, offsets: tuple[int, ...], sizes: torch.Size) -> torch.Tensor:
    """Return a view of a part."""
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

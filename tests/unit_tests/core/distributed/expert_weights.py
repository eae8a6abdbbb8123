# SPDX-License-Identifier: Apache-2.0
"""Layers with experts whose gradients are sums of integers, known for every token.

Every rank of a stage has different tokens. It accumulates the gradients that real layers would
compute:

    sharded over tp, or "identical" on tp    its shard, over the tokens of its tp group
    "partial" on tp                          the full weight, over its own tokens
    experts                                  its shard, over the tokens of its etp_ep group

The gradient of the step is then exactly the sum over all tokens, on any grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from megatron.core import InitSpec, ProcessGroupCollection, WeightSharding
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.weight_gather import WeightHandle, WeightStore
from megatron.core.weight_sharding import GradientKind, Shard, SubWeight
from tests.support.inputs import generator
from tests.unit_tests.core.distributed.engine_steps import slice_box

TOKENS = 8
EXPERTS, FFN, HIDDEN = 8, 12, 5
#: Logical tensors of a layer, and the embedding table outside the layers.
LAYER = {
    "norm": (HIDDEN,),
    "mixer": (16, HIDDEN),
    "bias": (HIDDEN,),
    "router": (EXPERTS, HIDDEN),
    "gate": (EXPERTS, FFN, HIDDEN),
    "up": (EXPERTS, FFN, HIDDEN),
    "shared": (HIDDEN, 20),
    "down": (EXPERTS, HIDDEN, FFN),
}
TABLE = (13, HIDDEN)
LAYERS = 2
SHAPES = {"table": TABLE} | {f"{i}.{n}": s for i in range(LAYERS) for n, s in LAYER.items()}
TP_ROWS = Shard(axis="tp", dim=0)
EP, ETP = Shard(axis="ep", dim=0), Shard(axis="etp", dim=1)


def layer_shardings(layer: int, *, router: GradientKind = "partial") -> list[WeightSharding]:
    """Return the weights of a layer in the order of use: dense weights lie between expert weights,
    as with a shared expert."""

    def named(name: str, *shards: Shard, **options: object) -> WeightSharding:
        return WeightSharding.of(f"{layer}.{name}", LAYER[name], *shards, **options)

    sub_weights = [
        SubWeight(name=f"{layer}.{name}", shape=LAYER[name], shards=(EP, ETP))
        for name in ("gate", "up")
    ]
    return [
        named("norm", gradient={"tp": "partial"}, weight_decay=False),
        named("mixer", TP_ROWS, gtp=True),
        named("bias", gradient={"tp": "identical"}, weight_decay=False),
        named("router", gradient={"tp": router}),
        WeightSharding(
            name=f"{layer}.gate_up",
            sub_weights=tuple(sub_weights),
            interleave=EXPERTS,
            expert=True,
            gtp=True,
        ),
        named("shared", Shard(axis="tp", dim=1), gtp=True),
        named("down", EP, Shard(axis="etp", dim=2), expert=True, gtp=True),
    ]


def is_expert(name: str) -> bool:
    return name.partition(".")[2] in ("gate", "up", "down")


def stage_filter(groups: ProcessGroupCollection) -> Callable[[str], bool]:
    """Return whether this rank's stage has a weight: experts are on stage pp // 2, others on 0."""
    pp, stage = groups["pp"].size, groups["pp"].rank
    expert_stage = pp // 2
    return lambda name: pp == 1 or stage == (expert_stage if is_expert(name) else 0)


def tokens_of(groups: ProcessGroupCollection, ranks: Sequence[int]) -> list[int]:
    """Return the tokens of some ranks of a stage."""
    stage_ranks = groups.grid.world_size // groups.grid.pp
    tokens_per_rank = TOKENS // stage_ranks
    return [
        t
        for rank in ranks
        for t in range(
            rank % stage_ranks * tokens_per_rank, (rank % stage_ranks + 1) * tokens_per_rank
        )
    ]


def token_gradients(name: str, step: int, microbatch: int) -> torch.Tensor:
    """Return each token's gradient of a logical tensor, whole numbers [TOKENS, *shape]."""
    source = generator(step, microbatch, *name.encode())
    return torch.randint(-3, 4, (TOKENS, *SHAPES[name]), generator=source).float()


def full_gradients(step: int, microbatches: int) -> dict[str, torch.Tensor]:
    """Return the full gradients of a step."""
    return {
        name: sum(token_gradients(name, step, m).sum(0) for m in range(microbatches))
        for name in SHAPES
    }


class ExpertModel:
    """A weight store of some layers with an engine and an optimizer.

    Args:
        has: whether this rank's stage has a logical tensor, by name.
        router: declared kind of the router's gradient on tp.
    """

    def __init__(
        self,
        groups: ProcessGroupCollection,
        *,
        has: Callable[[str], bool] = lambda name: True,
        parallel: Mapping[str, object] | None = None,
        optimizer: OptimizerConfig | None = None,
        router: GradientKind = "partial",
        bucket_bytes: int = 1000,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.groups = groups
        config = DataParallelConfig(**{"debug": True, **(parallel or {})})  # type: ignore[arg-type]
        self.store = WeightStore(groups, seed=6, dtype=dtype)
        table = WeightSharding.of("table", TABLE, TP_ROWS, gtp=True)
        layers = [layer_shardings(layer, router=router) for layer in range(LAYERS)]
        for number, layer in enumerate([[table], *layers]):
            with self.store.unit(f"layer {number}") if number else nullcontext():
                for sharding in layer:
                    if has(sharding.sub_weights[0].name):  # all sub-weights share a stage
                        self.store.declare(sharding, InitSpec.normal(0.8))
        self.store.materialize(config.storage(bucket_bytes=bucket_bytes))
        self.engine = DataParallel(self.store, groups, config=config)
        self.optimizer = Optimizer(
            self.engine.owned(),
            groups,
            config=optimizer or OptimizerConfig(kind="sgd", clip_grad=0.0),
            weights=[table, *(sharding for layer in layers for sharding in layer)],
        )

    def gradients(self, step: int, microbatches: int) -> None:
        """Run a step up to its gradients: forward gets every weight, backward accumulates."""
        self.engine.begin_step(microbatches)
        for m in range(microbatches):
            loss = _Backward.apply(torch.zeros((), requires_grad=True), self, step, m)
            for handle in self.store.handles.values():
                assert handle.get().isfinite().all(), handle
            self.engine.backward(loss, last=m == microbatches - 1)
        self.engine.finish()

    def update(self, lr: float = 2.0**-6, weight_decay: float = 0.125):
        """Run the optimizer step and start the parameter sync."""
        step_result = self.optimizer.step(lr=lr, weight_decay=weight_decay)
        self.engine.start_param_sync()
        return step_result

    def accumulate(self, handle: WeightHandle, step: int, microbatch: int) -> None:
        """Accumulate the gradient that this rank's layer would compute."""
        groups, sharding = self.groups, handle.sharding
        ranks = groups["etp_ep" if sharding.expert else "tp"].ranks
        if sharding.name.partition(".")[2] in ("norm", "router"):
            ranks = (groups.rank,)
        local_tokens = tokens_of(groups, ranks)
        local = torch.zeros(handle.shape).view(-1)
        for box in self.store.boxes(handle):
            full_gradient = token_gradients(box.name, step, microbatch)[local_tokens].sum(0)
            local[box.start : box.start + box.numel] = slice_box(full_gradient, box).flatten()
        handle.accumulate_grad(local.view(handle.shape))

    def shards(self) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Return (name, offsets, values) of the weights that this rank computes with."""
        shards = []
        with self.engine.evaluation():
            for handle in self.store.handles.values():
                flat = handle.get().view(-1)
                for box in self.store.boxes(handle):
                    values = flat[box.start : box.start + box.numel].view(box.sizes).clone()
                    shards.append((box.name, box.offsets, values))
        return shards


class _Backward(torch.autograd.Function):
    """A loss whose backward gets every weight and accumulates its gradient, last weight first."""

    @staticmethod
    def forward(ctx, anchor, model, step, microbatch):
        ctx.arguments = model, step, microbatch
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        model, step, microbatch = ctx.arguments
        for handle in reversed(model.store.handles.values()):
            assert handle.get().isfinite().all(), handle
            model.accumulate(handle, step, microbatch)
        return None, None, None, None


def assemble(
    shards: Sequence[tuple[str, tuple[int, ...], torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return logical tensors from the shards of all ranks; overlapping shards must be bit-equal."""
    dtype = shards[0][2].dtype
    tensors = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in SHAPES.items()}
    for name, offsets, values in shards:
        target = tensors[name][
            tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        ]
        written = ~target.isnan()
        assert torch.equal(target[written], values[written]), name
        target.copy_(values)
    return tensors

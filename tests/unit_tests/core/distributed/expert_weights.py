# SPDX-License-Identifier: Apache-2.0
"""Layers with experts whose gradients are sums of whole numbers, known for every token.

Every rank of a stage has tokens of its own. What it puts is what layers would compute from them:

    cut over tp, or whole and alike on it    the tokens of its tp group, its piece
    whole on tp, each with other tokens      its own tokens
    experts                                  the tokens of its etp_ep group, its experts' piece

and the gradient of the step is the sum over all tokens, exactly, on any grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightHandle, WeightStore
from megatron.core.weight_sharding import GradientKind, Shard, SubWeight, WeightSharding
from tests.support.inputs import generator
from tests.unit_tests.core.distributed.engine_steps import cut

TOKENS = 8
EXPERTS, FFN, HIDDEN = 8, 12, 5
#: Logical tensors of a layer, and of what is in no layer.
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
    """Return the weights of a layer in the order in which it uses them: dense ones between those of
    experts, as a shared expert's are."""

    def named(name: str, *shards: Shard, **more: object) -> WeightSharding:
        return WeightSharding.of(f"{layer}.{name}", LAYER[name], *shards, **more)

    fused = [
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
            sub_weights=tuple(fused),
            interleave=EXPERTS,
            expert=True,
            gtp=True,
        ),
        named("shared", Shard(axis="tp", dim=1), gtp=True),
        named("down", EP, Shard(axis="etp", dim=2), expert=True, gtp=True),
    ]


def is_expert(name: str) -> bool:
    return name.partition(".")[2] in ("gate", "up", "down")


def of_stage(groups: ProcessGroupCollection) -> Callable[[str], bool]:
    """Tell which weights this rank has: experts are on the last but one of four stages."""
    pp, stage = groups["pp"].size, groups["pp"].rank
    experts = pp // 2
    return lambda name: pp == 1 or stage == (experts if is_expert(name) else 0)


def tokens_of(groups: ProcessGroupCollection, ranks: Sequence[int]) -> list[int]:
    """Return the tokens of some ranks of a stage."""
    stage = groups.grid.world_size // groups.grid.pp
    each = TOKENS // stage
    return [t for rank in ranks for t in range(rank % stage * each, (rank % stage + 1) * each)]


def gradients_of(name: str, step: int, microbatch: int) -> torch.Tensor:
    """Return each token's gradient of a logical tensor, whole numbers [TOKENS, *shape]."""
    source = generator(step, microbatch, *name.encode())
    return torch.randint(-3, 4, (TOKENS, *SHAPES[name]), generator=source).float()


def whole_gradients(step: int, microbatches: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step."""
    return {
        name: sum(gradients_of(name, step, m).sum(0) for m in range(microbatches))
        for name in SHAPES
    }


class ExpertModel:
    """A store of some layers, an engine and an optimizer over it.

    Args:
        has: tells which logical tensors this rank's stage has.
        router: what is declared of the router's gradient on tp.
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
        placed = DataParallelConfig(**{"debug": True, **(parallel or {})})  # type: ignore[arg-type]
        self.store = WeightStore(groups, seed=6, dtype=dtype)
        table = WeightSharding.of("table", TABLE, TP_ROWS, gtp=True)
        layers = [layer_shardings(layer, router=router) for layer in range(LAYERS)]
        for number, layer in enumerate([[table], *layers]):
            with self.store.unit(f"layer {number}") if number else nullcontext():
                for sharding in layer:
                    if has(sharding.sub_weights[0].name):  # as its other segments
                        self.store.declare(sharding, InitSpec.normal(0.8))
        self.store.materialize(placed.storage(bucket_bytes=bucket_bytes))
        self.engine = DataParallel(self.store, groups, config=placed)
        self.optimizer = Optimizer(
            self.engine.owned(),
            groups,
            config=optimizer or OptimizerConfig(kind="sgd", clip_grad=0.0),
            weights=[table, *(sharding for layer in layers for sharding in layer)],
        )

    def gradients(self, step: int, microbatches: int) -> None:
        """Run a step up to its gradients: forward asks for every weight, backward puts."""
        self.engine.begin_step(microbatches)
        for m in range(microbatches):
            loss = _Backward.apply(torch.zeros((), requires_grad=True), self, step, m)
            for handle in self.store.handles.values():
                assert handle.get().isfinite().all(), handle
            self.engine.backward(loss, last=m == microbatches - 1)
        self.engine.finish()

    def update(self, lr: float = 2.0**-6, weight_decay: float = 0.125):
        """Let the optimizer step, and what it wrote be gathered."""
        result = self.optimizer.step(lr=lr, weight_decay=weight_decay)
        self.engine.start_param_sync()
        return result

    def put(self, handle: WeightHandle, step: int, microbatch: int) -> None:
        """Put what this rank's layer would."""
        groups, sharding = self.groups, handle.sharding
        ranks = groups["etp_ep" if sharding.expert else "tp"].ranks
        if sharding.name.partition(".")[2] in ("norm", "router"):
            ranks = (groups.rank,)
        mine = tokens_of(groups, ranks)
        local = torch.zeros(handle.shape).view(-1)
        for box in self.store.boxes(handle):
            whole = gradients_of(box.name, step, microbatch)[mine].sum(0)
            local[box.start : box.start + box.numel] = cut(whole, box).flatten()
        handle.accumulate_grad(local.view(handle.shape))

    def pieces(self) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Return (name, offsets, values) of the weights that this rank multiplies with."""
        found = []
        with self.engine.evaluation():
            for handle in self.store.handles.values():
                flat = handle.get().view(-1)
                for box in self.store.boxes(handle):
                    values = flat[box.start : box.start + box.numel].view(box.sizes).clone()
                    found.append((box.name, box.offsets, values))
        return found


class _Backward(torch.autograd.Function):
    """A loss whose backward asks for every weight and puts its gradient, the last one first."""

    @staticmethod
    def forward(ctx, anchor, model, step, microbatch):
        ctx.of = model, step, microbatch
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        model, step, microbatch = ctx.of
        for handle in reversed(model.store.handles.values()):
            assert handle.get().isfinite().all(), handle
            model.put(handle, step, microbatch)
        return None, None, None, None


def whole_of(
    pieces: Sequence[tuple[str, tuple[int, ...], torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return logical tensors from the pieces of all ranks; where several have one, it must be the
    same in every bit."""
    dtype = pieces[0][2].dtype
    found = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in SHAPES.items()}
    for name, offsets, values in pieces:
        there = found[name][
            tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        ]
        known = ~there.isnan()
        assert torch.equal(there[known], values[known]), name
        there.copy_(values)
    return found

# SPDX-License-Identifier: Apache-2.0
"""What a stage keeps between its actions, in bytes, with split backward and with recompute."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterator

import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.core.transformer.recompute import Recompute
from megatron.core.weight_gather import WgradQueue
from megatron.training.step import PipelineForwardBackward
from tests.support.inputs import microbatch
from tests.support.ranks import run_ranks

STAGES, MICROBATCHES, LENGTH, HIDDEN = 4, 8, 16, 24
CONFIG = GPTConfig(
    num_layers=2 * STAGES,
    hidden_size=HIDDEN,
    vocab_size=37,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=40),
)


class SavedTensor:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedActivations:
    """Everything that autograd and queues hold of activations and their gradients.

    Args:
        weights: of the model, which autograd holds views of.

    Attributes:
        by_action: bytes before each action.
        queued: the most that queues held.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self.queues: weakref.WeakSet[WgradQueue] = weakref.WeakSet()
        self.by_action: list[int] = []
        self.queued = 0

    def hold(self, tensor: torch.Tensor) -> SavedTensor:
        held = SavedTensor(tensor)
        if tensor.untyped_storage().data_ptr() not in self.weights:
            self.saved.add(held)
        return held

    def look(self, action: object) -> None:
        """Note how much there is before an action."""
        queued = list(self._in_queues())
        self.queued = max(self.queued, _bytes(queued))
        self.by_action.append(_bytes([*queued, *(held.tensor for held in self.saved)]))

    def _in_queues(self) -> Iterator[torch.Tensor]:
        for queue in self.queues:
            for put in queue._items:
                assert isinstance(put, types.FunctionType)
                for cell in put.__closure__ or ():
                    if isinstance(cell.cell_contents, torch.Tensor):
                        yield cell.cell_contents


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of what these tensors lie in, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


Case = tuple[str, bool, int | None]  # schedule, full recompute, weight delay

CASES: list[Case] = [
    ("1f1b", False, None),
    ("1f1b", True, None),
    ("zb-h1", False, None),
    ("zb-h1", True, None),
    ("zb-h1", True, 0),
]


def all_cases(rank: int, world: int) -> list[tuple[int, int]]:
    """Return what `peak_saved_bytes` does for every case."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    return [peak_saved_bytes(groups, *case) for case in CASES]


def peak_saved_bytes(
    groups: ProcessGroupCollection, schedule: str, again: bool, delay: int | None
) -> tuple[int, int]:
    """Take a step; return the most bytes before an action and the most that lay in queues."""
    config = DataParallelConfig()
    model = GPTModel(CONFIG, groups, seed=3, storage=config.storage())
    if again:
        model.set_recompute(Recompute(granularity="full", method="uniform", num_layers=1))
    engine = DataParallel(model.store, groups, config=config)
    found = SavedActivations(model.store.tensors())
    run = PipelineForwardBackward(
        model,
        engine,
        groups=groups,
        schedule=schedule,
        weight_delay=delay,
        observe=found.look,
    )
    opened = model.store.defer

    @contextlib.contextmanager
    def defer() -> Iterator[WgradQueue]:
        with opened() as queue:
            found.queues.add(queue)
            yield queue

    model.store.defer = defer  # type: ignore[method-assign]
    data = [
        microbatch(seed=5, dp_rank=0, index=index, batch=2, sequence=LENGTH, vocabulary=37)
        for index in range(MICROBATCHES)
    ]
    with torch.autograd.graph.saved_tensors_hooks(found.hold, lambda held: held.tensor):
        run(data, torch.full((MICROBATCHES,), 0.01))
    assert found.by_action[0] == 0
    return max(found.by_action), found.queued


def test_put_off_weight_gradients_cost_what_recompute_saves():
    """Put off, they keep as many recomputed microbatches; at once, one at most."""
    ranks = run_ranks(all_cases, STAGES)
    whole, again, split, put_off, at_once = zip(*ranks, strict=True)
    for stage in range(STAGES):
        assert again[stage][0] < whole[stage][0] / 3, "recompute saves something"
        assert whole[stage][1] == again[stage][1] == 0
        assert split[stage][1] > 0
        assert whole[stage][0] <= split[stage][0] <= whole[0][0]
        one = whole[stage][0] // (STAGES - stage)  # microbatch of its layers, nothing recomputed
        assert 0 < at_once[stage][1] < one
        assert at_once[stage][0] <= again[stage][0] + one
        if stage:
            assert put_off[stage][1] > stage * one * 3 / 4
            assert put_off[stage][0] > again[stage][0] + one
    assert put_off[-1][0] > 3 * whole[-1][0], "more than without recompute"

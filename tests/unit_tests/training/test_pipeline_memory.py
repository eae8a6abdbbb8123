# SPDX-License-Identifier: Apache-2.0
"""Bytes that a stage saves between its actions, with split backward and with recompute."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterator

import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, Recompute
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
    """Activations and their gradients that autograd and weight-gradient queues keep alive.

    Args:
        weights: weights of the model, whose views in autograd do not count.

    Attributes:
        by_action: bytes before each action.
        queued: the most bytes in queues.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self.queues: weakref.WeakSet[WgradQueue] = weakref.WeakSet()
        self.by_action: list[int] = []
        self.queued = 0

    def save(self, tensor: torch.Tensor) -> SavedTensor:
        saved = SavedTensor(tensor)
        if tensor.untyped_storage().data_ptr() not in self.weights:
            self.saved.add(saved)
        return saved

    def record_bytes(self, action: object) -> None:
        """Record the bytes that are alive before an action."""
        queued = list(self._in_queues())
        self.queued = max(self.queued, _bytes(queued))
        self.by_action.append(_bytes([*queued, *(saved.tensor for saved in self.saved)]))

    def _in_queues(self) -> Iterator[torch.Tensor]:
        for queue in self.queues:
            for work in queue._items:
                assert isinstance(work, types.FunctionType)
                for cell in work.__closure__ or ():
                    if isinstance(cell.cell_contents, torch.Tensor):
                        yield cell.cell_contents


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, counting each storage once."""
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


def peak_bytes_of_cases(rank: int, world: int) -> list[tuple[int, int]]:
    """Return `peak_saved_bytes` of every case."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    return [peak_saved_bytes(groups, *case) for case in CASES]


def peak_saved_bytes(
    groups: ProcessGroupCollection, schedule: str, recompute: bool, delay: int | None
) -> tuple[int, int]:
    """Run a step; return the most bytes before an action and the most bytes in queues."""
    config = DataParallelConfig()
    model = GPTModel(CONFIG, groups, seed=3, storage=config.storage())
    if recompute:
        model.set_recompute(Recompute(granularity="full", method="uniform", num_layers=1))
    engine = DataParallel(model.store, groups, config=config)
    activations = SavedActivations(model.store.tensors())
    run = PipelineForwardBackward(
        model,
        engine,
        groups=groups,
        schedule=schedule,
        weight_delay=delay,
        observe=activations.record_bytes,
    )
    original_defer = model.store.defer

    @contextlib.contextmanager
    def defer() -> Iterator[WgradQueue]:
        with original_defer() as queue:
            activations.queues.add(queue)
            yield queue

    model.store.defer = defer  # type: ignore[method-assign]
    microbatches = [
        microbatch(seed=5, dp_rank=0, index=index, batch=2, sequence=LENGTH, vocabulary=37)
        for index in range(MICROBATCHES)
    ]
    with torch.autograd.graph.saved_tensors_hooks(activations.save, lambda saved: saved.tensor):
        run(microbatches, torch.full((MICROBATCHES,), 0.01))
    assert activations.by_action[0] == 0
    return max(activations.by_action), activations.queued


def test_delayed_weight_gradients_undo_recompute_savings():
    """Delayed, they keep recomputed microbatches alive; immediate, one microbatch at most."""
    ranks = run_ranks(peak_bytes_of_cases, STAGES)
    plain, recomputed, split, delayed, immediate = zip(*ranks, strict=True)
    for stage in range(STAGES):
        assert recomputed[stage][0] < plain[stage][0] / 3, "recompute saves something"
        assert plain[stage][1] == recomputed[stage][1] == 0
        assert split[stage][1] > 0
        assert plain[stage][0] <= split[stage][0] <= plain[0][0]
        # Bytes of one microbatch in the layers of a stage, without recompute.
        per_microbatch = plain[stage][0] // (STAGES - stage)
        assert 0 < immediate[stage][1] < per_microbatch
        assert immediate[stage][0] <= recomputed[stage][0] + per_microbatch
        if stage:
            assert delayed[stage][1] > stage * per_microbatch * 3 / 4
            assert delayed[stage][0] > recomputed[stage][0] + per_microbatch
    assert delayed[-1][0] > 3 * plain[-1][0], "more than without recompute"

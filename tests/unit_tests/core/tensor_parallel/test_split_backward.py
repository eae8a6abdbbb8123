# SPDX-License-Identifier: Apache-2.0
"""Backward in halves: the bits of a plain one, nothing kept that waits for nothing."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.tensor_parallel import vocab_parallel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, Recompute
from megatron.core.weight_gather import WgradQueue
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch, one_thread, perturbed
from tests.support.mutants import Mutation, apply, planted
from tests.support.nan_memory import nan_memory
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Late, simulated

LAYERS, BATCH, SEQUENCE, VOCABULARY = 2, 3, 8, 37
CHUNK_TOKENS = 5
PLAIN = GPTConfig(
    num_layers=LAYERS,
    hidden_size=24,
    vocab_size=VOCABULARY,
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=8, qk_norm=True
    ),
    mlp=MLPConfig(ffn_hidden_size=20),
    hidden_dropout=0.2,
    tied=True,
)
BIASED = dataclasses.replace(
    PLAIN,
    attention=dataclasses.replace(PLAIN.attention, qkv_bias=True, output_bias=True),
    mlp=MLPConfig(ffn_hidden_size=20, gated=False, activation="gelu", bias=True),
    norm=NormConfig(kind="LayerNorm"),
    tied=False,
)
RECOMPUTES = {
    "all kept": Recompute(),
    "full": Recompute(granularity="full", method="uniform", num_layers=1),
    "selective": Recompute(granularity="selective"),
}
#: Weight gradients at once, and late by a microbatch.
ORDERS = {"plain": "B0 B1 B2", "late": "I0 I1 W0 I2 W1 W2"}


class Halves:
    """A model and its engine, whose steps are lists of I, W and B."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        config: GPTConfig,
        *,
        recompute: str = "all kept",
        splits: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        **parallel: Any,
    ) -> None:
        placed = DataParallelConfig(**{"debug": True, **parallel})
        self.model = GPTModel(
            config,
            groups,
            sequence_parallel=sequence_parallel,
            seed=5,
            dtype=dtype,
            storage=placed.storage(bucket_bytes=2000),
        )
        if groups["world"].size == 1:
            handles = self.model.store.handles
            moved = perturbed({n: h.get() for n, h in handles.items()}, seed=3)
            for name, handle in handles.items():
                handle.get().copy_(moved[name])
        self.model.set_recompute(RECOMPUTES[recompute])
        self.model.store.splits = splits
        self.engine = DataParallel(self.model.store, groups, config=placed)

    def loss(self, index: int) -> torch.Tensor:
        """Run a microbatch forward."""
        data = microbatch(
            seed=4,
            dp_rank=self.engine.groups["dense_dp"].rank,
            index=index,
            batch=BATCH,
            sequence=SEQUENCE,
            vocabulary=VOCABULARY,
        )
        loss, _ = self.model.loss(data.tokens, data.labels, data.loss_mask, layout=data.layout)
        return loss * 0.75  # the head scales both of its gradients

    def half(self, loss: torch.Tensor) -> WgradQueue:
        """Run the first half of a backward."""
        with self.model.store.defer() as queue:
            self.engine.backward(loss, last=False)
        return queue

    def step(self, order: str) -> list[torch.Tensor]:
        """Carry out a step; return what the optimizer would read."""
        queues: dict[str, WgradQueue] = {}
        words = order.split()
        self.engine.begin_step(3)
        with nan_memory():
            for word in words:
                kind, number = word[0], word[1:]
                if kind == "W":
                    if word == words[-1]:
                        self.engine.begin_last_backward(0)
                    queues.pop(number).drain()
                    self.engine.post_backward(0)
                elif kind == "I":
                    queues[number] = self.half(self.loss(int(number)))
                    assert len(queues[number]) > 8 * LAYERS
                else:
                    self.engine.backward(self.loss(int(number)), last=number == "2")
        self.engine.finish()
        return [owned.gradients.clone() for owned in self.engine.owned()]


def assert_same_bits(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Fail if anything differs in a bit, or everything is zero."""
    assert len(got) == len(wanted)
    assert any(one.any() for one in wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("config", [PLAIN, BIASED], ids=["tied", "biased"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_halves_have_the_bits_of_the_whole(config, recompute, monkeypatch):
    monkeypatch.setattr(vocab_parallel, "tokens_per_chunk", lambda *_: CHUNK_TOKENS)
    single = ProcessGroupCollection.single()
    dtypes = ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2)
    for dtype, grad_dtype in dtypes:
        options = {"recompute": recompute, "dtype": dtype, "grad_dtype": grad_dtype}
        with one_thread():
            wanted = Halves(single, config, **options).step(ORDERS["plain"])
            for order, splits in (("late", True), ("late", False), ("plain", True)):
                got = Halves(single, config, splits=splits, **options).step(ORDERS[order])
                assert_same_bits(got, wanted)


def over_tp(rank: int, world: int, fault: Mutation | None) -> None:
    """Split backward over tp, with and without sequence parallelism."""
    if fault is not None:
        apply(fault)
    vocab_parallel.tokens_per_chunk = lambda *_: CHUNK_TOKENS  # type: ignore[assignment]
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    cases = (
        (PLAIN, True, "all kept"),
        (BIASED, True, "selective"),
        (BIASED, False, "all kept"),
        (PLAIN, False, "full"),
    )
    for config, scattered, recompute in cases:
        options = {"sequence_parallel": scattered, "recompute": recompute}
        with simulated(groups, Late()):
            wanted = Halves(groups, config, **options).step(ORDERS["plain"])
            halves = Halves(groups, config, splits=True, **options)
            assert_same_bits(halves.step(ORDERS["late"]), wanted)
        engine = halves.engine
        engine.begin_step()
        loss = halves.loss(0)
        with trace(groups) as first:
            queue = halves.half(loss)
        with trace(groups) as second:
            queue.drain()
        engine.finish()
        # q|k|v and up of every layer; I gathers gradients behind row layers and the embedding
        gathers = [r for r in second if r.kind == "all_gather" and r.group == "tp"]
        assert len(gathers) == len(second) == (2 * LAYERS if scattered else 0)
        gathers = [r for r in first if r.kind == "all_gather"]
        assert len(gathers) == (2 * LAYERS + 1 if scattered else 0)


def test_split_backward_over_tp_keeps_bits_and_gathers_late():
    run_ranks(over_tp, 2, None, timeout=120.0)


def over_data_parallel(rank: int, world: int) -> None:
    """Split backward under every strategy: the same reductions in the same order, in W."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    cases = [(strategy, torch.float32) for strategy in STRATEGIES]
    for strategy, grad_dtype in [*cases, ("optim", torch.bfloat16)]:
        options = {
            "strategy": strategy,
            "grad_dtype": grad_dtype,
            "overlap_param_gather": strategy != "no_shard",
        }
        found = []
        for order, splits in (("plain", False), ("late", True)):
            halves = Halves(groups, PLAIN, splits=splits, **options)
            with simulated(groups, Late()), trace(groups) as records:
                gradients = []
                for _ in range(2):
                    gradients += halves.step(ORDERS[order])
                    halves.engine.start_param_sync()
            reduced = [
                (r.kind, r.bytes) for r in records if r.kind in ("all_reduce", "reduce_scatter")
            ]
            assert halves.engine.launched_in_backward == len(halves.engine.buckets)
            if gatherer_of(halves.engine) is not None:
                assert gatherer_of(halves.engine).counts.mismatches == 0
            found.append((gradients, reduced))
        assert_same_bits(found[1][0], found[0][0])
        assert found[0][1] == found[1][1]
        assert len(found[0][1]) > 0


def test_split_backward_over_dp_keeps_bits_and_reductions():
    run_ranks(over_data_parallel, 2, timeout=120.0)


# --- what is kept ---------------------------------------------------------------------------------


class _Watched:
    """Something that a weak reference can watch."""


class _Holds(torch.autograd.Function):
    """The identity, whose node keeps an object alive."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def waiting(queue: WgradQueue) -> list[torch.Tensor]:
    """Return every tensor that a queue's puts hold."""
    found: dict[int, torch.Tensor] = {}
    todo: list[Any] = list(queue._items)
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            found[id(one)] = one
        elif isinstance(one, partial):
            todo += [one.func, *one.args, *one.keywords.values()]
        elif callable(one) and hasattr(one, "__closure__"):
            todo += [cell.cell_contents for cell in one.__closure__ or ()]
        elif isinstance(one, list | tuple):
            todo += one
    return list(found.values())


@pytest.mark.parametrize("recompute", ["all kept", "selective"])
def test_each_half_of_split_backward_frees_its_tensors(recompute: str):
    halves = Halves(ProcessGroupCollection.single(), PLAIN, recompute=recompute, splits=True)
    watched = []
    for block in halves.model.decoders[0].blocks:

        def hold(_module, _args, output):
            kept = _Watched()
            watched.append(weakref.ref(kept))
            delta, stream = output
            return _Holds.apply(delta, kept), stream

        block.register_forward_hook(hold)
    halves.engine.begin_step()
    loss = halves.loss(0)
    gc.collect()
    assert all(one() is not None for one in watched)
    assert len(watched) == 2 * LAYERS
    shape = tuple(halves.model.head.weight.shape)
    queue = halves.half(loss)
    del loss
    gc.collect()
    assert all(one() is None for one in watched), "what I needed alone is free"
    tensors = waiting(queue)
    assert len(tensors) > 10
    assert not any(one.requires_grad for one in tensors)
    assert any(one.shape == (BATCH * SEQUENCE, VOCABULARY) for one in tensors), "dlogits wait"
    assert not any(tuple(one.shape) == shape for one in tensors), "the head's product waits"
    alive = [weakref.ref(one) for one in tensors]
    del tensors
    queue.drain()
    gc.collect()
    assert not any(one() is not None for one in alive)
    halves.engine.finish()


def test_without_splits_the_head_has_its_gradient_from_forward():
    halves = Halves(ProcessGroupCollection.single(), PLAIN)
    halves.engine.begin_step()
    tensors = waiting(halves.half(halves.loss(0)))
    shapes = {tuple(one.shape) for one in tensors}
    assert tuple(halves.model.head.weight.shape) in shapes
    assert (BATCH * SEQUENCE, VOCABULARY) not in shapes


def test_one_backward_cannot_defer_into_two_queues():
    store = Halves(ProcessGroupCollection.single(), PLAIN).model.store
    with store.defer() as queue:
        with pytest.raises(ValueError, match="defer inside defer"), store.defer():
            pass
        assert store.queue is queue
    assert store.queue is None


BUGS = {
    "a column layer multiplies with the part of its input that it kept": (
        "megatron.core.weight_gather.handle",
        "WeightHandle.wgrad",
        "x if gather_input is None else gather_input(x)",
        "x if gather_input is None else x.repeat(2, 1, 1)",
    ),
    "the head forgets the incoming factor": (
        "megatron.core.tensor_parallel.vocab_parallel",
        "_product",
        "return d_weight if scale is None else d_weight * scale",
        "return d_weight",
    ),
    "the head's chunks overwrite each other": (
        "megatron.core.tensor_parallel.vocab_parallel",
        "_product",
        "start += len(logits)",
        "start += 0",
    ),
    "inputs are gathered in the first half": (
        "megatron.core.tensor_parallel.linear",
        "_ColumnLinear.backward",
        "if region.scatters and handle.defers:",
        "if False:",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_halves_is_noticed(name: str):
    with pytest.raises(RankFailure, match="AssertionError"):
        run_ranks(over_tp, 2, planted(*BUGS[name]), timeout=30.0)

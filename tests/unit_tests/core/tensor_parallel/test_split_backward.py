# SPDX-License-Identifier: Apache-2.0
"""Split backward: bitwise the plain backward, and tensors are freed when no longer needed."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.tensor_parallel import vocab_parallel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, Recompute
from megatron.core.weight_gather import WgradQueue
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch, one_thread, perturbed
from tests.support.mutants import Mutation, apply, bug_table
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
    "none": Recompute(),
    "full": Recompute(granularity="full", method="uniform", num_layers=1),
    "selective": Recompute(granularity="selective"),
}
#: Schedules: full backward (B), or input (I) and weight (W) gradients, W a microbatch later.
ORDERS = {"plain": "B0 B1 B2", "late": "I0 I1 W0 I2 W1 W2"}


class Trainer:
    """A model and its engine, whose steps follow a schedule of I, W and B."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        config: GPTConfig,
        *,
        recompute: str = "none",
        splits: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        **parallel: Any,
    ) -> None:
        dp_config = DataParallelConfig(**{"debug": True, **parallel})
        self.model = GPTModel(
            config,
            groups,
            sequence_parallel=sequence_parallel,
            seed=5,
            dtype=dtype,
            storage=dp_config.storage(bucket_bytes=2000),
        )
        if groups["world"].size == 1:
            handles = self.model.store.handles
            values = perturbed({n: h.get() for n, h in handles.items()}, seed=3)
            for name, handle in handles.items():
                handle.get().copy_(values[name])
        self.model.set_recompute(RECOMPUTES[recompute])
        self.model.store.splits = splits
        self.engine = DataParallel(self.model.store, groups, config=dp_config)

    def loss(self, index: int) -> torch.Tensor:
        """Run a microbatch forward."""
        batch = microbatch(
            seed=4,
            dp_rank=self.engine.groups["dense_dp"].rank,
            index=index,
            batch=BATCH,
            sequence=SEQUENCE,
            vocabulary=VOCABULARY,
        )
        loss, _ = self.model.loss(batch.tokens, batch.labels, batch.loss_mask, layout=batch.layout)
        return loss * 0.75  # the head scales both of its gradients

    def input_backward(self, loss: torch.Tensor) -> WgradQueue:
        """Run backward for input gradients only; return the queue of weight gradients."""
        with self.model.store.defer() as queue:
            self.engine.backward(loss, last=False)
        return queue

    def step(self, order: str) -> list[torch.Tensor]:
        """Run a step by its schedule; return the gradients that the optimizer would read."""
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
                    queues[number] = self.input_backward(self.loss(int(number)))
                    assert len(queues[number]) > 8 * LAYERS
                else:
                    self.engine.backward(self.loss(int(number)), last=number == "2")
        self.engine.finish()
        return [owned.gradients.clone() for owned in self.engine.owned()]


def assert_same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Fail unless all tensors are bitwise equal and at least one is not zero."""
    assert len(actual) == len(expected)
    assert any(tensor.any() for tensor in expected)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert torch.equal(actual_tensor, expected_tensor)


@pytest.mark.parametrize("config", [PLAIN, BIASED], ids=["tied", "biased"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_split_backward_equals_full_backward_bitwise(config, recompute, monkeypatch):
    monkeypatch.setattr(vocab_parallel, "tokens_per_chunk", lambda *_: CHUNK_TOKENS)
    single = ProcessGroupCollection.single()
    dtypes = ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2)
    for dtype, grad_dtype in dtypes:
        options = {"recompute": recompute, "dtype": dtype, "grad_dtype": grad_dtype}
        with one_thread():
            expected = Trainer(single, config, **options).step(ORDERS["plain"])
            for order, splits in (("late", True), ("late", False), ("plain", True)):
                actual = Trainer(single, config, splits=splits, **options).step(ORDERS[order])
                assert_same_bits(actual, expected)


def check_over_tp(rank: int, world: int, fault: Mutation | None) -> None:
    """Split backward over tp, with and without sequence parallelism."""
    if fault is not None:
        apply(fault)
    vocab_parallel.tokens_per_chunk = lambda *_: CHUNK_TOKENS  # type: ignore[assignment]
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    cases = (
        (PLAIN, True, "none"),
        (BIASED, True, "selective"),
        (BIASED, False, "none"),
        (PLAIN, False, "full"),
    )
    for config, sequence_parallel, recompute in cases:
        options = {"sequence_parallel": sequence_parallel, "recompute": recompute}
        with simulated(groups, Late()):
            expected = Trainer(groups, config, **options).step(ORDERS["plain"])
            trainer = Trainer(groups, config, splits=True, **options)
            assert_same_bits(trainer.step(ORDERS["late"]), expected)
        engine = trainer.engine
        engine.begin_step()
        loss = trainer.loss(0)
        with trace(groups) as i_records:
            queue = trainer.input_backward(loss)
        with trace(groups) as w_records:
            queue.drain()
        engine.finish()
        # W gathers inputs of q|k|v and up in every layer; I gathers output gradients of row layers
        # and of the embedding
        gathers = [r for r in w_records if r.kind == "all_gather" and r.group == "tp"]
        assert len(gathers) == len(w_records) == (2 * LAYERS if sequence_parallel else 0)
        gathers = [r for r in i_records if r.kind == "all_gather"]
        assert len(gathers) == (2 * LAYERS + 1 if sequence_parallel else 0)


def test_split_backward_over_tp_is_bitwise_and_gathers_late():
    run_ranks(check_over_tp, 2, None, timeout=120.0)


def check_over_data_parallel(rank: int, world: int) -> None:
    """Compare reductions and gradients of split and plain backward under every strategy."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    cases = [(strategy, torch.float32) for strategy in STRATEGIES]
    for strategy, grad_dtype in [*cases, ("optim", torch.bfloat16)]:
        options = {
            "strategy": strategy,
            "grad_dtype": grad_dtype,
            "overlap_param_gather": strategy != "no_shard",
        }
        runs = []
        for order, splits in (("plain", False), ("late", True)):
            trainer = Trainer(groups, PLAIN, splits=splits, **options)
            with simulated(groups, Late()), trace(groups) as records:
                gradients = []
                for _ in range(2):
                    gradients += trainer.step(ORDERS[order])
                    trainer.engine.start_param_sync()
            reduced = [
                (r.kind, r.bytes) for r in records if r.kind in ("all_reduce", "reduce_scatter")
            ]
            assert trainer.engine.launched_in_backward == len(trainer.engine.buckets)
            if gatherer_of(trainer.engine) is not None:
                assert gatherer_of(trainer.engine).counts.mismatches == 0
            runs.append((gradients, reduced))
        assert_same_bits(runs[1][0], runs[0][0])
        assert runs[0][1] == runs[1][1]
        assert len(runs[0][1]) > 0


def test_split_backward_over_dp_is_bitwise_with_same_reductions():
    run_ranks(check_over_data_parallel, 2, timeout=120.0)


# --- tensor lifetimes -----------------------------------------------------------------------------


class _Watched:
    """An object that a weak reference can watch."""


class _KeepsAlive(torch.autograd.Function):
    """The identity; its autograd node keeps an object alive."""

    @staticmethod
    def forward(ctx, x, watched):
        ctx.watched = watched
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def queued_tensors(queue: WgradQueue) -> list[torch.Tensor]:
    """Return every tensor that the items of a queue reference."""
    tensors: dict[int, torch.Tensor] = {}
    pending: list[Any] = list(queue._items)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif callable(value) and hasattr(value, "__closure__"):
            pending += [cell.cell_contents for cell in value.__closure__ or ()]
        elif isinstance(value, list | tuple):
            pending += value
    return list(tensors.values())


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_each_half_of_split_backward_frees_its_tensors(recompute: str):
    trainer = Trainer(ProcessGroupCollection.single(), PLAIN, recompute=recompute, splits=True)
    target_refs = []
    for block in trainer.model.decoders[0].blocks:

        def hold(_module, _args, output):
            target = _Watched()
            target_refs.append(weakref.ref(target))
            delta, stream = output
            return _KeepsAlive.apply(delta, target), stream

        block.register_forward_hook(hold)
    trainer.engine.begin_step()
    loss = trainer.loss(0)
    gc.collect()
    assert all(ref() is not None for ref in target_refs)
    assert len(target_refs) == 2 * LAYERS
    head_shape = tuple(trainer.model.head.weight.shape)
    queue = trainer.input_backward(loss)
    del loss
    gc.collect()
    assert all(ref() is None for ref in target_refs), "tensors that only I needed are freed"
    tensors = queued_tensors(queue)
    assert len(tensors) > 10
    assert not any(tensor.requires_grad for tensor in tensors)
    shapes = {tuple(tensor.shape) for tensor in tensors}
    assert (BATCH * SEQUENCE, VOCABULARY) in shapes, "the queue holds the gradient of the logits"
    assert head_shape not in shapes, "the queue holds no weight gradient of the head"
    tensor_refs = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    queue.drain()
    gc.collect()
    assert not any(ref() is not None for ref in tensor_refs)
    trainer.engine.finish()


def test_unsplit_head_computes_its_gradient_in_forward():
    trainer = Trainer(ProcessGroupCollection.single(), PLAIN)
    trainer.engine.begin_step()
    tensors = queued_tensors(trainer.input_backward(trainer.loss(0)))
    shapes = {tuple(tensor.shape) for tensor in tensors}
    assert tuple(trainer.model.head.weight.shape) in shapes
    assert (BATCH * SEQUENCE, VOCABULARY) not in shapes


def test_nested_defer_is_refused():
    store = Trainer(ProcessGroupCollection.single(), PLAIN).model.store
    with store.defer() as queue:
        with pytest.raises(ValueError, match="nested defer"), store.defer():
            pass
        assert store.queue is queue
    assert store.queue is None


BUGS = bug_table(r"""
a column layer uses its local input shard instead of the gathered input []
    weight_gather.handle WeightHandle.wgrad: x if gather_input is None else gather_input(x)
    => x if gather_input is None else x.repeat(2, 1, 1)
the head ignores the scale of the incoming gradient []
    tensor_parallel.vocab_parallel _product: return d_weight if scale is None else d_weight * scale
    => return d_weight
the head's chunks overwrite each other []
    tensor_parallel.vocab_parallel _product: start += len(dlogits) => start += 0
inputs are gathered in the first half []
    tensor_parallel.linear _ColumnLinear.backward: if region.scatters and handle.defers:
    => if False:
""")


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_in_split_backward_is_detected(name: str):
    (fault,) = BUGS[name].mutations()
    with pytest.raises(RankFailure, match="AssertionError"):
        run_ranks(check_over_tp, 2, fault, timeout=30.0)

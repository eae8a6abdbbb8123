# SPDX-License-Identifier: Apache-2.0
"""Bytes under generalized tensor parallelism beside Megatron-LM's formulas: what stays between
steps, and the most of gathered weights at the widths of Llama 3 8B and 70B on the meta device."""

from __future__ import annotations

import gc
import math
from collections import Counter

import pytest
import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.optimizer.range_state import range_states
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.core.weight_gather import WeightStore, compile_plan
from tests.support.inputs import microbatch
from tests.support.live_memory import UNOWNED, live_bytes, live_storages
from tests.support.pretended_groups import IdleCommunicator, groups_over
from tests.support.ranks import run_ranks

META, BF16 = torch.device("meta"), torch.bfloat16
BYTES = ElementBytes(weight=2, gradient=4, optimizer=12)
TOLERANCE = 0.03
#: Layers, hidden size, of the MLP, heads of queries and of keys; 128256 tokens.
LLAMA = {"8B": (32, 4096, 14336, 32, 8), "70B": (80, 8192, 28672, 64, 8)}
VOCABULARY = 128256


def groups_of(grid: RankGrid) -> ProcessGroupCollection:
    """Return the groups of rank 0 without other ranks."""
    return groups_over(lambda ranks: IdleCommunicator(), grid)


def llama(name: str, groups: ProcessGroupCollection, *, layers: int, **settings: object):
    """Return a model of the width of a Llama in bf16 without memory, and its engine."""
    _, hidden, ffn, heads, kv_heads = LLAMA[name]
    config = DataParallelConfig(**settings)  # type: ignore[arg-type]
    model = GPTModel(
        GPTConfig(
            num_layers=layers,
            hidden_size=hidden,
            vocab_size=VOCABULARY,
            attention=AttentionConfig(
                num_attention_heads=heads, num_query_groups=kv_heads, kv_channels=hidden // heads
            ),
            mlp=MLPConfig(ffn_hidden_size=ffn),
        ),
        groups,
        dtype=BF16,
        storage=config.storage(),
        device=META,
    )
    return model, DataParallel(model.store, groups, config=config)


def published(store: WeightStore, grid: RankGrid, strategy: str) -> dict[str, float]:
    """Return Megatron-LM's formula of the bytes that a rank keeps, with P_d elements of dense
    matrices, P_r of what is replicated and P_x of experts:

        weights    2 · (P_d / (t·g) + P_r + P_x / (etp·ep·k))
        gradients  4 · the same, sharded over replicas as well with "optim_grads"
        optimizer  12 · (P_d / (t·g·r) + P_r / (g·r) + P_x / (etp·ep·k·r_x))

    for r and r_x replicas. There P_r / r is kept; here what is replicated is shared by gtp ranks.
    """
    count: Counter[str] = Counter()
    for handle in store.handles.values():
        sharding = handle.sharding
        kind = "P_x" if sharding.expert else "P_d" if sharding.gtp else "P_r"
        count[kind] += sum(math.prod(segment.shape) for segment in sharding.sub_weights)
    dense = count["P_d"] / (grid.tp * grid.gtp)
    experts = count["P_x"] / (grid.etp * grid.ep * grid.egtp)
    replicas = grid.dp * grid.cp
    weights = dense + count["P_r"] + experts
    owned = dense / replicas + count["P_r"] / (grid.gtp * replicas) + experts / grid.edp
    return {
        "weights": 2 * weights,
        "gradients": 4 * (owned if strategy == "optim_grads" else weights),
        "optimizer": 12 * (weights if strategy == "no_shard" else owned),
    }


def bytes_by_role(model: GPTModel, engine: DataParallel) -> dict[str, int]:
    """Return the bytes of the tensors that a rank keeps, by role."""
    states = [state for o in engine.owned() for state in range_states(o, OptimizerConfig())]
    buffers = {
        storage.untyped_storage()._cdata: storage.untyped_storage().nbytes()
        for storage in (
            h.main_grad for h in model.store.handles.values() if h.main_grad is not None
        )
    }
    gradients = {
        e.gradients.untyped_storage()._cdata: e.gradients.untyped_storage().nbytes()
        for e in engine.buckets
    }
    return {
        "weights": sum(bucket.data.nbytes for bucket in model.store.buckets),
        "gradients": sum((buffers | gradients).values()),
        "optimizer": sum(state.state_bytes() for state in states),
    }


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize(
    "degrees",
    [
        {"world_size": 8, "gtp": 8},
        {"world_size": 64, "tp": 2, "gtp": 8, "cp": 2},
        {"world_size": 48, "tp": 4, "gtp": 3},
    ],
    ids=["gtp8", "tp2 gtp8 cp2 dp2", "tp4 gtp3 dp4"],
)
def test_memory_matches_the_formulas(degrees: dict[str, int], strategy: str):
    grid = RankGrid(**degrees)
    model, engine = llama("8B", groups_of(grid), layers=4, strategy=strategy)
    found, wanted = bytes_by_role(model, engine), published(model.store, grid, strategy)
    sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
    ours = bytes_per_rank(sizes, engine.placement, element_bytes=BYTES)
    for role, size in wanted.items():
        assert abs(found[role] / size - 1) <= TOLERANCE, (role, found, wanted)
        assert found[role] == getattr(ours, role), role


#: Layers of the model whose live bytes are counted.
LAYERS = 8
#: Bytes of a table of 4096 integers that stays, whatever the size of the model.
PERMANENT = 8 * 4096


def live(rank: int, world: int, strategy: str) -> dict[str, float]:
    """Train with experts over another number of ranks than dense weights; count what lives."""
    before = live_storages()
    grid = RankGrid(world_size=world, gtp=2, ep=2, egtp=2)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    # Nothing is gathered ahead of the next step.
    config = DataParallelConfig(strategy=strategy, fsdp_all_gather_in_start_param_sync=False)
    model = GPTModel(
        GPTConfig(
            num_layers=LAYERS,
            ffn_pattern="-E" * (LAYERS // 2),
            hidden_size=64,
            vocab_size=128,
            attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=16),
            mlp=MLPConfig(ffn_hidden_size=128),
            moe=MoEConfig(num_experts=4, ffn_hidden_size=64),
        ),
        groups,
        dtype=BF16,
        storage=config.storage(),
    )
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig())
    for index in range(2):
        batch = microbatch(seed=1, dp_rank=rank, index=index, batch=1, sequence=8, vocabulary=128)
        engine.begin_step()
        loss, _ = model.loss(batch.tokens, batch.labels, batch.loss_mask / 16)
        engine.backward(loss, last=True)
        engine.finish()
        optimizer.step(1e-3)
        engine.start_param_sync()
    for pool in (engine.pool, *(gatherer.pool for gatherer in engine.gatherers)):
        assert pool.live_bytes == 0
        pool.trim()
    del loss
    gc.collect()
    found = live_bytes(
        {
            "weights": [bucket.data for bucket in model.store.buckets],
            "gradients": [
                *(entry.gradients for entry in engine.buckets),
                *(h.main_grad for h in model.store.handles.values() if h.main_grad is not None),
            ],
            "optimizer": [t for one in optimizer.ranges for t in one.named_tensors().values()],
        },
        before=before,
    )
    wanted = published(model.store, grid, strategy)
    return {**found, "formula": sum(wanted.values()), **{f"{r}'s": n for r, n in wanted.items()}}


def test_live_bytes_are_those_of_the_formulas():
    for found in run_ranks(live, 4, "optim"):
        total = sum(found[role] for role in ("weights", "gradients", "optimizer"))
        assert abs(total / found["formula"] - 1) <= TOLERANCE, found
        assert found[UNOWNED] <= 0.01 * found["formula"] + PERMANENT, found


@pytest.mark.parametrize(("name", "tp"), [("8B", 1), ("70B", 1), ("70B", 4)])
def test_gathered_weights_use_under_half_of_per_shape_buffers(name: str, tp: int):
    """Megatron-LM keeps a buffer of every shape, two where neighbours share one: embedding and head
    are neighbours, on the chain that they are alone on (its pull request #6207)."""
    groups = groups_of(RankGrid(world_size=8 * tp, tp=tp, gtp=8))
    model, engine = llama(name, groups, layers=3)
    gatherer = engine.gatherers[0]
    ids = torch.zeros(1, 4, dtype=torch.int64, device=META)
    for _ in range(2):
        engine.begin_step(2)
        for last in (False, True):
            loss, _ = model.loss(ids, ids, torch.zeros(1, 4, device=META))
            engine.backward(loss, last=last)
        engine.finish()
    shapes = {
        handle.shape: 2 * math.prod(handle.shape)
        for handle in model.store.handles.values()
        if handle.sharding.gtp
    }
    assert len(shapes) == 5
    vocabulary = max(shapes.values())
    upstream = sum(shapes.values()) + vocabulary
    assert gatherer.counts.mismatches == 0
    assert gatherer.pool.peak_bytes == gatherer.current_plan.peak_bytes <= 0.5 * upstream
    # A model of all layers has the same peak: neighbours are the same.
    embedding, *layer, head = (
        2 * math.prod(h.shape) for h in model.store.handles.values() if h.sharding.gtp
    )
    sizes = [embedding, *layer[: len(layer) // 3] * LLAMA[name][0], head]
    order = tuple(range(len(sizes)))
    whole = compile_plan(
        {"forward": order, "backward": order[::-1]},
        ("forward", "backward") * 2,
        sizes=sizes,
        budget=gatherer.budget,
        prefetch_bytes=0,
    )
    assert whole.peak_bytes <= gatherer.pool.peak_bytes
    uses = 4 * len(sizes) - 3  # the turns need a weight twice in a row
    assert whole.gathers >= 0.95 * uses

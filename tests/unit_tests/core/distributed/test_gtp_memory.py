# SPDX-License-Identifier: Apache-2.0
"""Memory under generalized tensor parallelism against Megatron-LM's formulas: bytes kept between
steps, and peak bytes of gathered weights for Llama 3 8B and 70B widths on the meta device."""

from __future__ import annotations

import gc
import math
from collections import Counter

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.optimizer.range_state import range_states
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.core.weight_gather import WeightStore, compile_plan
from tests.support.inputs import microbatch
from tests.support.live_memory import UNOWNED, live_bytes, live_storages
from tests.support.pretended_groups import IdleCommunicator, groups_over
from tests.support.ranks import run_ranks

META, BF16 = torch.device("meta"), torch.bfloat16
BYTES = ElementBytes(weight=2, gradient=4, optimizer=12)
TOLERANCE = 0.03
#: Number of layers, hidden size, MLP hidden size, query heads, key-value heads.
LLAMA = {"8B": (32, 4096, 14336, 32, 8), "70B": (80, 8192, 28672, 64, 8)}
VOCABULARY = 128256


def groups_of(grid: RankGrid) -> ProcessGroupCollection:
    """Return the groups of rank 0 without other ranks."""
    return groups_over(lambda ranks: IdleCommunicator(), grid)


def llama(name: str, groups: ProcessGroupCollection, *, layers: int, **settings: object):
    """Return a bf16 model of a Llama's width on the meta device, and its engine."""
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


def published_bytes(store: WeightStore, grid: RankGrid, strategy: str) -> dict[str, float]:
    """Return Megatron-LM's formula of the bytes that a rank keeps, for P_d elements of dense
    matrices, P_r elements of replicated weights and P_x elements of experts:

        weights    2 · (P_d / (t·g) + P_r + P_x / (etp·ep·k))
        gradients  4 · the same sum, also sharded over replicas with "optim_grads"
        optimizer  12 · (P_d / (t·g·r) + P_r / (g·r) + P_x / (etp·ep·k·r_x))

    with r and r_x replicas. Megatron-LM keeps P_r / r in the optimizer; this engine also shards
    replicated weights over gtp ranks.
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
    """Return the bytes that a rank keeps, by role."""
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
def test_bytes_by_role_match_the_formulas(degrees: dict[str, int], strategy: str):
    grid = RankGrid(**degrees)
    model, engine = llama("8B", groups_of(grid), layers=4, strategy=strategy)
    actual, expected = bytes_by_role(model, engine), published_bytes(model.store, grid, strategy)
    sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
    formula = bytes_per_rank(sizes, engine.placement, element_bytes=BYTES)
    for role, size in expected.items():
        assert abs(actual[role] / size - 1) <= TOLERANCE, (role, actual, expected)
        assert actual[role] == getattr(formula, role), role


#: Layers of the model whose live bytes are counted.
LAYERS = 8
#: Bytes of a table of 4096 integers that exists for any size of model.
PERMANENT = 8 * 4096


def measure_live_bytes(rank: int, world: int, strategy: str) -> dict[str, float]:
    """Train with different gtp degrees of experts and dense weights; return the live bytes."""
    before = live_storages()
    grid = RankGrid(world_size=world, gtp=2, ep=2, egtp=2)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    # No gather starts before the next step.
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
    live_bytes_by_role = live_bytes(
        {
            "weights": [bucket.data for bucket in model.store.buckets],
            "gradients": [
                *(entry.gradients for entry in engine.buckets),
                *(h.main_grad for h in model.store.handles.values() if h.main_grad is not None),
            ],
            "optimizer": [t for state in optimizer.ranges for t in state.named_tensors().values()],
        },
        before=before,
    )
    expected = published_bytes(model.store, grid, strategy)
    return {
        **live_bytes_by_role,
        "formula": sum(expected.values()),
        **{f"{r}'s": n for r, n in expected.items()},
    }


def test_live_bytes_match_the_formulas():
    for rank_bytes in run_ranks(measure_live_bytes, 4, "optim"):
        total = sum(rank_bytes[role] for role in ("weights", "gradients", "optimizer"))
        assert abs(total / rank_bytes["formula"] - 1) <= TOLERANCE, rank_bytes
        assert rank_bytes[UNOWNED] <= 0.01 * rank_bytes["formula"] + PERMANENT, rank_bytes


@pytest.mark.parametrize(("name", "tp"), [("8B", 1), ("70B", 1), ("70B", 4)])
def test_gathered_weights_use_under_half_of_per_shape_buffers(name: str, tp: int):
    """Megatron-LM keeps one buffer per shape, and two where adjacent weights have equal shapes, as
    embedding and head do on their own chain (its pull request #6207)."""
    groups = groups_of(RankGrid(world_size=8 * tp, tp=tp, gtp=8))
    model, engine = llama(name, groups, layers=3)
    gatherer = engine.gatherers[0]
    ids = torch.zeros(1, 4, dtype=torch.int64, device=META)
    for _ in range(2):
        engine.begin_step(2)
        for is_last in (False, True):
            loss, _ = model.loss(ids, ids, torch.zeros(1, 4, device=META))
            engine.backward(loss, last=is_last)
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
    # A model with all layers has the same peak, because adjacent blocks are the same.
    embedding, *layer, head = (
        2 * math.prod(h.shape) for h in model.store.handles.values() if h.sharding.gtp
    )
    sizes = [embedding, *layer[: len(layer) // 3] * LLAMA[name][0], head]
    order = tuple(range(len(sizes)))
    full_plan = compile_plan(
        {"forward": order, "backward": order[::-1]},
        ("forward", "backward") * 2,
        sizes=sizes,
        budget=gatherer.budget,
        prefetch_bytes=0,
    )
    assert full_plan.peak_bytes <= gatherer.pool.peak_bytes
    uses = 4 * len(sizes) - 3  # each of three turns between passes merges two uses of a weight
    assert full_plan.gathers >= 0.95 * uses

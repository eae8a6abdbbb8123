# SPDX-License-Identifier: Apache-2.0
"""Every gradient of every strategy against torch's DDP and FSDP2 in fp64.

Two ranks, two steps of SGD without clipping, two microbatches per step, different data per rank.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.parity import wrapped_gpt
from tests.parity.pieces import LogicalChunk, assembled, local_chunks, write_weights
from tests.parity.plain_gpt import PlainGPT
from tests.support.closeness import assert_all_close
from tests.support.gatherers import gatherer_of
from tests.support.inputs import Microbatch, microbatch, perturbed
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks

DP_SIZE, STEPS, ACCUMULATION, LEARNING_RATE = 2, 2, 2, 0.3
LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCABULARY = 3, 36, 4, 2, 10, 52, 61
CONFIGS = {
    "no_shard": {},
    "optim": {},
    "optim, gathered when needed": {"overlap_param_gather": True},
    "optim_grads": {"overlap_param_gather": True},
    "optim_grads_params": {},
    "optim_grads_params, prefetch": {"overlap_param_gather": True, "prefetch_bytes": 50_000},
    "optim_grads_params, debug": {"overlap_param_gather": True, "debug": True},
    "optim_grads_params, no overlap": {"overlap_grad_reduce": False},
}
PLAIN = PlainGPT(layers=LAYERS, heads=HEADS, groups=GROUPS, head_dim=HEAD_DIM, qk_norm=True)


def gpt_config() -> GPTConfig:
    """Return the model that both sides train."""
    return GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        attention=AttentionConfig(
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            kv_channels=HEAD_DIM,
            qkv_bias=True,
            qk_norm=True,
        ),
        mlp=MLPConfig(ffn_hidden_size=FFN, bias=True),
    )


def initial_weights() -> dict[str, torch.Tensor]:
    """Return perturbed logical weights."""
    model = GPTModel(gpt_config(), ProcessGroupCollection.single())
    return perturbed(assembled(local_chunks(model.store)), seed=3)


def data_of_rank(dp_rank: int) -> list[list[Microbatch]]:
    """Return the microbatches of a data-parallel rank, by step."""
    shape = {"batch": 3, "sequence": 12, "vocabulary": VOCABULARY}
    return [
        [
            microbatch(seed=5, dp_rank=dp_rank, index=step * ACCUMULATION + i, **shape)
            for i in range(ACCUMULATION)
        ]
        for step in range(STEPS)
    ]


def train_mcore(
    groups: ProcessGroupCollection, initial: dict[str, torch.Tensor], name: str
) -> tuple[list[list[LogicalChunk]], dict[str, int]]:
    """Train with the engine under test; return this rank's gradients by step, and counters."""
    config = DataParallelConfig(strategy=name.partition(",")[0], **CONFIGS[name])
    model = GPTModel(gpt_config(), groups, storage=config.storage(bucket_bytes=20_000))
    write_weights(model.store, initial)
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0))
    gradients = []
    with nan_memory(), trace(groups) as records:
        for batches in data_of_rank(groups["dense_dp"].rank):
            engine.begin_step(ACCUMULATION)
            for i, batch in enumerate(batches):
                share = batch.loss_mask.sum() * ACCUMULATION * groups["dense_dp"].size
                loss, _ = model.loss(batch.tokens, batch.labels, batch.loss_mask / share)
                engine.backward(loss, last=i == ACCUMULATION - 1)
            engine.finish()
            gradients.append(
                [
                    LogicalChunk(p.name, p.shape, p.box.offsets, p.of(o.gradients).clone())
                    for o in engine.owned()
                    for p in o.boxes
                ]
            )
            optimizer.step(LEARNING_RATE)
            engine.start_param_sync()
    sent = Counter(record.kind for record in records if record.group != "world")
    counters = {
        "stored": sum(b.data.numel() for b in model.store.buckets),
        "whole": sum(b.numel for b in model.store.buckets),
        "prefetched": gatherer_of(engine).counts.prefetched if gatherer_of(engine) else 0,
        "early": engine.launched_in_backward,
    }
    return gradients, {**sent, **counters}


def train_all(rank: int, world: int, initial: dict[str, torch.Tensor]):
    """Train with both references and with every strategy, as one rank."""
    references = {}
    for wrap in (wrapped_gpt.ddp, wrapped_gpt.fsdp2):
        wrapped = wrap(wrapped_gpt.WrappedGPT(PLAIN, initial))
        stored = wrapped_gpt.stored_elements(wrapped)
        gradients = wrapped_gpt.train(wrapped, data_of_rank(rank), lr=LEARNING_RATE)
        references[wrap.__name__] = stored, gradients
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    return references, {name: train_mcore(groups, initial, name) for name in CONFIGS}


@functools.cache
def outcome():
    """Return the initial weights and the results of every rank, from one run."""
    initial = initial_weights()
    return initial, run_ranks(train_all, DP_SIZE, initial)


def test_references_agree_and_only_fsdp2_is_sharded():
    initial, ranks = outcome()
    elements = sum(weight.numel() for weight in initial.values())
    for references, _ in ranks:
        assert references["ddp"][0] == elements
        assert references["fsdp2"][0] < 0.6 * elements
        for step in range(STEPS):
            fsdp2_gradients = references["fsdp2"][1][step]
            assert_all_close(fsdp2_gradients, references["ddp"][1][step], bound=1e-12)
            assert fsdp2_gradients.keys() == initial.keys()


@pytest.mark.parametrize("reference", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gradient_matches_torch(name: str, reference: str):
    _, ranks = outcome()
    for step in range(STEPS):
        actual = assembled(chunk for _, mcore in ranks for chunk in mcore[name][0][step])
        assert_all_close(actual, ranks[0][0][reference][1][step])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_strategy_was_active(name: str):
    _, ranks = outcome()
    for _, mcore in ranks:
        counters, strategy = mcore[name][1], name.partition(",")[0]
        if strategy == "no_shard":
            assert counters["all_reduce"] >= STEPS
            assert counters.keys().isdisjoint({"all_gather", "reduce_scatter"})
        else:
            assert counters["all_gather"] >= STEPS
            per_microbatch = ACCUMULATION if "grads" in strategy else 1
            assert counters["reduce_scatter"] % (STEPS * per_microbatch) == 0
            assert counters["reduce_scatter"] >= STEPS * per_microbatch
        cut = 2 if strategy == "optim_grads_params" else 1
        assert counters["stored"] * cut == counters["whole"]
        if CONFIGS[name].get("overlap_param_gather"):
            assert counters["prefetched"] > 0
        if CONFIGS[name].get("overlap_grad_reduce", True):
            assert counters["early"] > 0

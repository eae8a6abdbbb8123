# SPDX-License-Identifier: Apache-2.0
"""Steps through a pipeline: microbatches of any length, packed documents, evaluation, failures."""

import dataclasses

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import MoEConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.pipeline_parallel import ActionKind
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.training.step import Microbatch, PipelineForwardBackward, TrainStep, weight_traffic
from tests.support.closeness import assert_all_close
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch, one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.training.test_uneven_steps import GradientRecorder

LENGTHS = (12, 7, 9)
CONFIG = GPTConfig(
    num_layers=3,
    hidden_size=24,
    vocab_size=37,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=40),
    tied=True,
    hidden_dropout=0.1,
)


def batches(packed: bool) -> list[Microbatch]:
    """Return microbatches of different lengths; packed rows hold two documents each."""
    microbatches = []
    for index, length in enumerate(LENGTHS):
        batch = microbatch(seed=5, dp_rank=0, index=index, batch=2, sequence=length, vocabulary=37)
        if packed:
            columns = torch.arange(length).repeat(2, 1)  # [b, s]
            document_start = torch.tensor([[3 + index], [5]])
            positions = torch.where(columns >= document_start, columns - document_start, columns)
            ids = (columns >= document_start).long()
            batch = dataclasses.replace(batch, document_ids=ids, positions=positions)
        microbatches.append(Microbatch(batch.tokens, batch.labels, batch.loss_mask, batch.layout))
    return microbatches


def train(groups: ProcessGroupCollection, schedule: str, cuts: str, packed: bool, frozen: str):
    """Run two steps and evaluations; return losses and the last step's logical gradients."""
    config = DataParallelConfig()
    stages = groups["pp"].size
    split = StageSplit.from_pattern(cuts, stages) if stages > 1 else None
    model = GPTModel(CONFIG, groups, seed=3, storage=config.storage(), split=split)
    if frozen in model.store.handles:
        model.store.freeze(frozen)
    engine = DataParallel(model.store, groups, config=config)
    settings = OptimizerConfig(kind="sgd", clip_grad=0.0)
    optimizer = GradientRecorder(engine.owned(), groups, config=settings)
    optimizer.owned = engine.owned()
    run = None
    if stages > 1:
        size = len(LENGTHS) if schedule == "interleaved" else None
        run = PipelineForwardBackward(
            model, engine, groups=groups, schedule=schedule, group_size=size
        )
    step = TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)
    microbatches = batches(packed)
    first_evaluation = step.evaluate(microbatches, at_a_time=2)
    losses = [step(microbatches, lr=0.3, weight_decay=0.0).loss for _ in range(2)]
    gradients = {
        placed.name: placed.of(recorded).clone()
        for recorded, owned in zip(optimizer.recorded, optimizer.owned, strict=True)
        for placed in owned.boxes
    }
    return [first_evaluation, *losses, step.evaluate(microbatches)], gradients


def train_stage(rank: int, world: int, *arguments: object):
    """Train as one stage."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    return train(groups, *arguments)


CUTS = {
    "1f1b": "*-*|-*-",
    "zb-h1": "*-*-|*-",
    "interleaved": "*-|*|-*|-",
}


@pytest.mark.parametrize("frozen", ["", "embedding.weight"], ids=["", "frozen"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.covers("matches a single process")
def test_pipeline_with_varying_lengths_matches_single_process(schedule, packed, frozen):
    with one_thread():
        single = ProcessGroupCollection.single()
        losses, gradients = train(single, schedule, "", packed, frozen)
    ranks = run_ranks(train_stage, 2, schedule, CUTS[schedule], packed, frozen)
    for actual, _ in ranks:
        assert actual == pytest.approx(losses, rel=1e-6)
    stage_gradients = {name: value for _, actual in ranks for name, value in actual.items()}
    assert stage_gradients.keys() == gradients.keys()
    assert (frozen in gradients) is False
    assert_all_close(stage_gradients, gradients)


EXPERTS = dataclasses.replace(
    CONFIG,
    num_layers=2,
    tied=False,
    moe=MoEConfig(num_experts=3, ffn_hidden_size=20),
    ffn_pattern="EE",
    hidden_dropout=0.0,
)
#: How often a step gathers and reduces, by strategy.
TRAFFIC = {
    "no_shard": ("none", "once"),
    "optim": ("once", "once"),
    "optim_grads_params": ("each", "each"),
}


def train_experts(groups: ProcessGroupCollection, strategy: str, *, overlap: bool = False):
    """Run two steps; return losses, the last step's gather and reduce actions, the number of
    prefetched gathers, and the engine."""
    config = DataParallelConfig(strategy=strategy, overlap_param_gather=overlap)
    stages = groups["pp"].size
    split = StageSplit.from_pattern("*E|*E", stages, ffn_pattern="EE") if stages > 1 else None
    model = GPTModel(EXPERTS, groups, seed=3, storage=config.storage(), split=split)
    engine = DataParallel(model.store, groups, config=config)
    settings = OptimizerConfig(kind="sgd", clip_grad=0.0)
    optimizer = Optimizer(engine.owned(), groups, config=settings)
    actions, run = [], None
    if stages > 1:
        run = PipelineForwardBackward(model, engine, groups=groups, observe=actions.append)
    step = TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)
    losses = []
    for _ in range(2):
        actions.clear()
        losses.append(step(batches(False), lr=0.3, weight_decay=0.0).loss)
    prefetched = 0 if gatherer_of(engine) is None else gatherer_of(engine).counts.prefetched
    kinds = [action.kind for action in actions]
    return (
        losses,
        kinds.count(ActionKind.GATHER),
        kinds.count(ActionKind.REDUCE),
        prefetched,
        engine,
    )


def train_sharded_experts(rank: int, world: int):
    """Train with every strategy when only experts have data-parallel ranks, then without any."""
    outcomes = {}
    grid = RankGrid(world_size=world, tp=2, pp=2, etp=1)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    assert (groups["dense_dp"].size, groups["expert_dp"].size) == (1, 2)
    for strategy, traffic in TRAFFIC.items():
        overlap = traffic[0] != "none"
        *outcomes[strategy], engine = train_experts(groups, strategy, overlap=overlap)
        assert weight_traffic(engine) == traffic
    unsharded = ProcessGroupCollection.create(
        RankGrid(world_size=world, tp=2, pp=2, etp=2), rank=rank
    )
    *_, gathers, reduces, _, engine = train_experts(unsharded, "optim", overlap=True)
    assert weight_traffic(engine) == ("none", "none")
    assert gathers == reduces == 0
    return outcomes


@pytest.mark.covers("matches a single process")
def test_sharded_experts_gather_and_reduce_during_pipeline():
    with one_thread():
        losses, *_ = train_experts(ProcessGroupCollection.single(), "no_shard")
    steps = len(LENGTHS)
    for outcomes in run_ranks(train_sharded_experts, 4):
        for strategy, (gathered, reduced) in TRAFFIC.items():
            actual, gathers, reduces, prefetched = outcomes[strategy]
            assert actual == pytest.approx(losses, rel=1e-6), strategy
            # Gathers precede every forward and backward; reductions follow every backward.
            assert gathers == {"none": 0, "once": 1, "each": 2 * steps}[gathered], strategy
            assert reduces == {"once": 1, "each": steps}[reduced], strategy
            assert (prefetched > 0) == (gathered != "none"), strategy

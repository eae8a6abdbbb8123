# SPDX-License-Identifier: Apache-2.0
"""Steps through a pipeline: microbatches of any length, packed documents, evaluation, failures."""

import dataclasses

import pytest
import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import MoEConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.pipeline_parallel import ActionKind
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.training.step import Microbatch, PipelineForwardBackward, TrainStep, weight_traffic
from tests.support.closeness import assert_all_close
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch, one_thread
from tests.support.ranks import run_ranks

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
    """Return microbatches of different lengths; packed ones hold two documents a row."""
    found = []
    for index, length in enumerate(LENGTHS):
        made = microbatch(seed=5, dp_rank=0, index=index, batch=2, sequence=length, vocabulary=37)
        if packed:
            at = torch.arange(length).repeat(2, 1)  # [b, s]
            border = torch.tensor([[3 + index], [5]])
            positions = torch.where(at >= border, at - border, at)
            ids = (at >= border).long()
            made = dataclasses.replace(made, document_ids=ids, positions=positions)
        found.append(Microbatch(made.tokens, made.labels, made.loss_mask, made.layout))
    return found


class Seen(Optimizer):
    """An optimizer that keeps the gradients it was given."""

    def step(self, lr: float, weight_decay: float, **more: float | None):
        """Note them and move on."""
        self.seen = [owned.gradients.clone() for owned in self.owned]
        return super().step(lr, weight_decay, **more)


def trained(groups: ProcessGroupCollection, schedule: str, cuts: str, packed: bool, frozen: str):
    """Take two steps and evaluate; return losses and the logical gradients of the last step."""
    config = DataParallelConfig()
    stages = groups["pp"].size
    split = StageSplit.from_pattern(cuts, stages) if stages > 1 else None
    model = GPTModel(CONFIG, groups, seed=3, storage=config.storage(), split=split)
    if frozen in model.store.handles:
        model.store.freeze(frozen)
    engine = DataParallel(model.store, groups, config=config)
    settings = OptimizerConfig(kind="sgd", clip_grad=0.0)
    optimizer = Seen(engine.owned(), groups, config=settings)
    optimizer.owned = engine.owned()
    run = None
    if stages > 1:
        size = len(LENGTHS) if schedule == "interleaved" else None
        run = PipelineForwardBackward(
            model, engine, groups=groups, schedule=schedule, group_size=size
        )
    step = TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)
    data = batches(packed)
    before = step.evaluate(data, at_a_time=2)
    losses = [step(data, lr=0.3, weight_decay=0.0).loss for _ in range(2)]
    gradients = {
        placed.name: placed.of(seen).clone()
        for seen, owned in zip(optimizer.seen, optimizer.owned, strict=True)
        for placed in owned.boxes
    }
    return [before, *losses, step.evaluate(data)], gradients


def on_rank(rank: int, world: int, *how: object):
    """Train as one stage."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    return trained(groups, *how)


CUTS = {
    "1f1b": "*-*|-*-",
    "zb-h1": "*-*-|*-",
    "interleaved": "*-|*|-*|-",
}


@pytest.mark.parametrize("frozen", ["", "embedding.weight"], ids=["", "frozen"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.covers("numbers of one process", runs="ranks")
def test_lengths_and_documents_go_through_the_stages(schedule, packed, frozen):
    with one_thread():
        single = ProcessGroupCollection.single()
        losses, gradients = trained(single, schedule, "", packed, frozen)
    ranks = run_ranks(on_rank, 2, schedule, CUTS[schedule], packed, frozen)
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-6)
    together = {name: value for _, found in ranks for name, value in found.items()}
    assert together.keys() == gradients.keys()
    assert (frozen in gradients) is False
    assert_all_close(together, gradients)


EXPERTS = dataclasses.replace(
    CONFIG,
    num_layers=2,
    tied=False,
    moe=MoEConfig(num_experts=3, ffn_hidden_size=20),
    ffn_pattern="EE",
    hidden_dropout=0.0,
)
#: How often a step gathers and reduces, by strategy.
WORDS = {
    "no_shard": ("none", "once"),
    "optim": ("once", "once"),
    "optim_grads_params": ("each", "each"),
}


def with_experts(groups: ProcessGroupCollection, strategy: str, *, early: bool = False):
    """Take two steps; return losses, the gathers and reductions in the list of the last one,
    gathers that came before they were needed, and the engine."""
    config = DataParallelConfig(strategy=strategy, overlap_param_gather=early)
    stages = groups["pp"].size
    split = StageSplit.from_pattern("*E|*E", stages, ffn_pattern="EE") if stages > 1 else None
    model = GPTModel(EXPERTS, groups, seed=3, storage=config.storage(), split=split)
    engine = DataParallel(model.store, groups, config=config)
    settings = OptimizerConfig(kind="sgd", clip_grad=0.0)
    optimizer = Optimizer(engine.owned(), groups, config=settings)
    ran, run = [], None
    if stages > 1:
        run = PipelineForwardBackward(model, engine, groups=groups, observe=ran.append)
    step = TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)
    losses = []
    for _ in range(2):
        ran.clear()
        losses.append(step(batches(False), lr=0.3, weight_decay=0.0).loss)
    prefetched = 0 if gatherer_of(engine) is None else gatherer_of(engine).counts.prefetched
    kinds = [action.kind for action in ran]
    return (
        losses,
        kinds.count(ActionKind.GATHER),
        kinds.count(ActionKind.REDUCE),
        prefetched,
        engine,
    )


def on_sharded_experts(rank: int, world: int):
    """Train with every strategy where experts alone have lanes; then where nothing has."""
    found = {}
    grid = RankGrid(world_size=world, tp=2, pp=2, etp=1)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    assert (groups["dense_dp"].size, groups["expert_dp"].size) == (1, 2)
    for strategy, words in WORDS.items():
        early = words[0] != "none"
        *found[strategy], engine = with_experts(groups, strategy, early=early)
        assert weight_traffic(engine) == words
    cut = ProcessGroupCollection.create(RankGrid(world_size=world, tp=2, pp=2, etp=2), rank=rank)
    *_, gathers, reduces, _, engine = with_experts(cut, "optim", early=True)
    assert weight_traffic(engine) == ("none", "none")
    assert gathers == reduces == 0
    return found


@pytest.mark.covers("numbers of one process", runs="ranks")
def test_sharded_experts_gather_and_reduce_during_pipeline():
    with one_thread():
        losses, *_ = with_experts(ProcessGroupCollection.single(), "no_shard")
    steps = len(LENGTHS)
    for found in run_ranks(on_sharded_experts, 4):
        for strategy, (gathered, reduced) in WORDS.items():
            seen, gathers, reduces, prefetched = found[strategy]
            assert seen == pytest.approx(losses, rel=1e-6), strategy
            # before every forward and every backward, and behind every backward
            assert gathers == {"none": 0, "once": 1, "each": 2 * steps}[gathered], strategy
            assert reduces == {"once": 1, "each": steps}[reduced], strategy
            assert (prefetched > 0) == (gathered != "none"), strategy

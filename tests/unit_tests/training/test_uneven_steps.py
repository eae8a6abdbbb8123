# SPDX-License-Identifier: Apache-2.0
"""Steps whose samples lanes do not share evenly: losses and every gradient are those of one lane
that computes the blocks of the step one after the other."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.datasets.batch_sizes import BatchSizes, Division
from megatron.core.datasets.samplers import GPTBatches
from megatron.core.datasets.token_rows import SampleRows
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import Balance, MoEConfig, RouterConfig, routers_of
from megatron.core.moe.layer import ExpertMLPs
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.training.layouts import Layouts
from megatron.training.session import take
from megatron.training.step import Microbatch, PipelineForwardBackward, TrainStep
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, one_thread
from tests.support.op_tape import OpTape, TapeRecorder
from tests.support.ranks import run_ranks
from tests.unit_tests.training.graphed_runs import build_step as graphed_step

SEQUENCE, VOCABULARY, MICRO, STEPS = 12, 37, 2, 2
DENSE = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=VOCABULARY,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=40),
    tied=True,
    hidden_dropout=0.1,
)
EXPERTS = dataclasses.replace(
    DENSE,
    tied=False,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=20,
        capacity_factor=1.25,
        router=RouterConfig(
            topk=2,
            balance="aux_loss",
            aux_loss_coeff=0.05,
            z_loss_coeff=0.01,
            expert_bias=True,
            score_function="sigmoid",
        ),
    ),
    ffn_pattern="-E",
)
#: Three experts of a token on two ranks: every row then goes to both of them.
WIDE = dataclasses.replace(
    EXPERTS,
    moe=dataclasses.replace(
        EXPERTS.moe, router=dataclasses.replace(EXPERTS.moe.router, topk=3), capacity_factor=1.0
    ),
)
#: Parts of experts on ranks with different samples: every row goes to all of them.
DROPLESS = dataclasses.replace(
    WIDE, moe=dataclasses.replace(WIDE.moe, ffn_hidden_size=21, capacity_factor=None)
)
MODELS = {"dense": DENSE, "experts": EXPERTS, "wide": WIDE, "dropless": DROPLESS}


class Rows:
    """A data set whose samples and masks are a function of their number."""

    def __len__(self) -> int:
        return 1000

    def read(self, indices: np.ndarray) -> SampleRows:
        """Return tokens, and a mask that counts another number of them in every sample."""
        found, masks = [], []
        for index in indices.tolist():
            source = generator(4, index)
            found.append(torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=source))
            masks.append(torch.rand(SEQUENCE, generator=source) < 0.3 + 0.06 * (index % 11))
        tokens, mask = torch.stack(found).numpy(), torch.stack(masks).float().numpy()
        return SampleRows(tokens=tokens, loss_mask=mask)


class Seen(Optimizer):
    """An optimizer that keeps the gradients it was given."""

    def step(self, *arguments, **more):
        """Note them and move on."""
        self.seen = [owned.gradients.clone() for owned in self.owned]
        return super().step(*arguments, **more)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to divide.

    Args:
        world, cp, pp, ep, etp: the grid; lanes are what is left of the first three.
        samples: of a step.
        strategy: of data parallelism.
        schedule: of stages.
    """

    world: int
    samples: int
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    model: str = "dense"
    per_token: bool = False
    strategy: str = "no_shard"
    schedule: str = "1f1b"


#: Fillers on one lane and on several, a smaller last block, and both; at last two kinds of rank
#: that share a lane.
CASES = (
    Case(3, 10),
    Case(3, 7),
    Case(3, 7, per_token=True),
    Case(3, 8, strategy="optim_grads_params"),
    Case(3, 10, model="experts"),
    Case(3, 10, model="dropless", etp=3),
    Case(4, 13),
    Case(4, 10, per_token=True),
    Case(4, 10, model="experts"),
    Case(4, 10, model="experts", ep=2),
    Case(4, 10, model="wide", ep=2),
    Case(4, 9, cp=2),
    Case(4, 9, pp=2),
    Case(4, 10, pp=2, schedule="zb-h1"),
)


def build_step(groups: ProcessGroupCollection, case: Case) -> TrainStep:
    """Return a step of plain SGD that keeps its gradients."""
    config = DataParallelConfig(strategy=case.strategy)
    split = StageSplit.from_pattern("*-*|-", 2) if case.pp > 1 else None
    model = GPTModel(MODELS[case.model], groups, seed=3, storage=config.storage(), split=split)
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Seen(engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0))
    optimizer.owned = engine.owned()
    run = None
    if case.pp > 1:
        run = PipelineForwardBackward(model, engine, groups=groups, schedule=case.schedule)
    return TrainStep(
        model,
        engine,
        optimizer=optimizer,
        groups=groups,
        forward_backward=run,
        per_token_loss=case.per_token,
    )


def gradients_of(step: TrainStep) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """Return what this rank holds of the last step's gradients."""
    optimizer = step.optimizer
    return {
        placed.name: placed.of(seen).clone()
        for seen, owned in zip(optimizer.seen, optimizer.owned, strict=True)
        for placed in owned.boxes
    }


def balance_of(step: TrainStep, groups: ProcessGroupCollection) -> Balance | None:
    """Return what moves the biases of experts, if there are any."""
    model = step.model
    if model.config.moe is None:
        return None
    names = model.config.router_names
    return Balance(routers_of(model), names, config=model.config.moe, world=groups["world"])


def train_cases(rank: int, world: int, cases: tuple[Case, ...]) -> list[dict]:
    """Train as one rank of each case."""
    return [_divided(rank, case) for case in cases]


def _divided(rank: int, case: Case) -> dict:
    grid = RankGrid(world_size=case.world, cp=case.cp, pp=case.pp, ep=case.ep, etp=case.etp)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    step, lanes = build_step(groups, case), groups["samples"]
    division = Division(samples=case.samples, micro_batch_size=MICRO, data_parallel_size=lanes.size)

    def fresh() -> GPTBatches:
        return GPTBatches(
            Rows(),
            micro_batch_size=MICRO,
            data_parallel_rank=lanes.rank,
            data_parallel_size=lanes.size,
            batch_sizes=BatchSizes.constant(case.samples),
        )

    layouts = Layouts(groups["cp"], torch.device("cpu"))
    batches, balance = fresh(), balance_of(step, groups)
    losses, loads, fillers = [], [], 0
    for _ in range(STEPS):
        made = take(
            batches,
            division.rounds,
            torch.device("cpu"),
            layouts=layouts,
            step_samples=case.samples,
        )
        fillers += sum(batch.share == 0.0 for batch in made)
        report = step(made, lr=0.3, weight_decay=0.0)
        losses.append(report.loss)
        if balance is not None:
            balance.finish(applied=report.applied)
            loads.append(balance.report())
    gradients = gradients_of(step)
    evaluated = take(fresh(), division.rounds, torch.device("cpu"), layouts=layouts)
    losses.append(step.evaluate(evaluated, at_a_time=division.rounds))
    return {
        "losses": losses,
        "gradients": gradients,
        "loads": loads,
        "fillers": fillers,
        "wanted": STEPS
        * sum(not division.sample_range(lanes.rank, i) for i in range(division.rounds)),
    }


def single_process(case: Case) -> dict:
    """Compute the blocks of each step one after the other, cut by hand."""
    groups = ProcessGroupCollection.single()
    step = build_step(groups, dataclasses.replace(case, pp=1, strategy="no_shard"))
    balance, losses, loads = balance_of(step, groups), [], []

    def blocks(first: int) -> list[Microbatch]:
        found = []
        for start in range(first, first + case.samples, MICRO):
            ids = np.arange(start, min(start + MICRO, first + case.samples))
            rows = Rows().read(ids)
            tokens = torch.from_numpy(rows.tokens)
            found.append(
                Microbatch(
                    tokens[:, :-1],
                    tokens[:, 1:],
                    torch.from_numpy(rows.loss_mask),
                    SequenceLayout.of_rows(tokens.shape[1] - 1, sample_ids=torch.from_numpy(ids)),
                    share=len(ids) / case.samples,
                )
            )
        return found

    for i in range(STEPS):
        losses.append(step(blocks(i * case.samples), lr=0.3, weight_decay=0.0).loss)
        if balance is not None:
            balance.finish(applied=True)
            loads.append(balance.report())
    gradients = gradients_of(step)
    losses.append(step.evaluate(blocks(0)))
    return {"losses": losses, "gradients": gradients, "loads": loads}


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.covers("numbers of one process", runs="ranks")
def test_uneven_ranks_match_losses_and_gradients_of_one_rank(world):
    cases = tuple(case for case in CASES if case.world == world)
    ranks = run_ranks(train_cases, world, cases)
    for index, case in enumerate(cases):
        with one_thread():
            wanted = single_process(case)
        found = [rank[index] for rank in ranks]
        assert [one["fillers"] for one in found] == [one["wanted"] for one in found]
        assert case.samples % MICRO or sum(one["fillers"] for one in found) > 0, case
        together: dict[str, torch.Tensor] = {}
        for one in found:
            assert one["losses"] == pytest.approx(wanted["losses"], rel=1e-6), case
            together.update(one["gradients"])
            assert len(one["loads"]) == len(wanted["loads"])
            for loads, expected in zip(one["loads"], wanted["loads"], strict=True):
                for load, other in zip(loads, expected, strict=True):
                    assert load.tokens == other.tokens, case
                    assert load.dropped == other.dropped, case
                    limited = MODELS[case.model].moe.capacity_factor is not None
                    assert (load.dropped > 0) == limited, case
                    for name in ("entropy", "balance_loss", "z_loss"):
                        assert math.isclose(getattr(load, name), getattr(other, name), rel_tol=1e-5)
        if case.strategy == "no_shard" and case.ep == case.etp == 1:
            assert together.keys() == wanted["gradients"].keys()
            assert_all_close(together, wanted["gradients"])


@pytest.mark.parametrize("per_token", [False, True])
def test_a_smaller_block_counts_by_its_samples(per_token):
    """Of equal masks, every sample of a step then counts alike, whatever the blocks are."""
    losses = []
    for samples in (5, 10):
        case = Case(1, samples, per_token=per_token)
        step = build_step(ProcessGroupCollection.single(), case)
        rows = torch.randint(0, VOCABULARY, (5, SEQUENCE + 1), generator=generator(6))
        mask, layout = torch.ones(5, SEQUENCE), SequenceLayout.of_rows(SEQUENCE)
        parts = [slice(0, 2), slice(2, 4), slice(4, 5)] if samples == 5 else [slice(0, 5)]
        made = [
            Microbatch(rows[p, :-1], rows[p, 1:], mask[p], layout, share=len(mask[p]) / 5)
            for p in parts
        ]
        losses.append(step(made, lr=0.1, weight_decay=0.0).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_padding_microbatch_is_not_routed_to_experts(monkeypatch):
    taken, whole = [], ExpertMLPs.forward

    def counted(self, rows, runs):
        taken.append(sum(runs.counts))
        return whole(self, rows, runs)

    monkeypatch.setattr(ExpertMLPs, "forward", counted)
    model = build_step(ProcessGroupCollection.single(), Case(1, 4, model="experts")).model
    tokens = torch.from_numpy(Rows().read(np.arange(2)).tokens)[:, :-1]
    layout = SequenceLayout.of_rows(SEQUENCE)
    filler = layout.with_padding(torch.ones(SEQUENCE, 2, dtype=torch.bool))
    for one in (layout, filler):
        model(tokens, layout=one)
    assert taken[0] > 0 == taken[1]
    counts = routers_of(model)[0].counted.tolist()
    model(tokens, layout=filler)
    assert routers_of(model)[0].counted.tolist() == counts


def losses_of_rank(step: TrainStep, lane: int) -> list[float]:
    """Take steps on the microbatches of one lane of three."""
    division = Division(samples=7, micro_batch_size=MICRO, data_parallel_size=3)
    batches = GPTBatches(
        Rows(),
        micro_batch_size=MICRO,
        data_parallel_rank=lane,
        data_parallel_size=3,
        batch_sizes=BatchSizes.constant(7),
    )
    layouts = Layouts(step.groups["cp"], torch.device("cpu"))
    losses = []
    for _ in range(7):
        made = take(batches, division.rounds, torch.device("cpu"), layouts=layouts, step_samples=7)
        assert [len(batch.tokens) for batch in made] == [2, 1]
        assert made[1].share == (1 / 7 if lane == 0 else 0.0)
        losses.append(step(made, lr=1e-2, weight_decay=0.0).loss)
    return losses


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_graph_replays_smaller_and_padding_microbatches(lane):
    """They have the same form in every step."""
    with one_thread():
        single, config = ProcessGroupCollection.single(), DataParallelConfig()
        eager = losses_of_rank(graphed_step(single, config), lane)
        step = graphed_step(single, config, graph=TapeRecorder(OpTape()))
        assert losses_of_rank(step, lane) == eager
    assert (step.forward_backward.eager_steps, step.forward_backward.replays) == (3, 4)

# SPDX-License-Identifier: Apache-2.0
"""Steps whose samples do not divide evenly over data-parallel ranks.

Losses and gradients match a single rank that computes the microbatches of the step in sequence.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import islice

import numpy as np
import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout
from megatron.core.datasets import BatchSizes, GPTBatches
from megatron.core.datasets.batch_sizes import Division
from megatron.core.datasets.token_rows import SampleRows
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import Balance, MoEConfig, RouterConfig, routers_of
from megatron.core.moe.layer import ExpertMLPs
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.training.layouts import Layouts
from megatron.training.step import Microbatch, PipelineForwardBackward, TrainStep
from megatron.training.train_steps import take
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
#: Three experts per token on two ranks: every row then goes to both ranks.
TOP3 = dataclasses.replace(
    EXPERTS,
    moe=dataclasses.replace(
        EXPERTS.moe, router=dataclasses.replace(EXPERTS.moe.router, topk=3), capacity_factor=1.0
    ),
)
#: Experts sharded over ranks with different samples: every row goes to all ranks.
DROPLESS = dataclasses.replace(
    TOP3, moe=dataclasses.replace(TOP3.moe, ffn_hidden_size=21, capacity_factor=None)
)
MODELS = {"dense": DENSE, "experts": EXPERTS, "top3": TOP3, "dropless": DROPLESS}


class UnevenDataset:
    """A data set whose samples and masks are a function of the sample index."""

    def __len__(self) -> int:
        return 1000

    def read(self, indices: np.ndarray) -> SampleRows:
        """Return tokens, and a loss mask whose density depends on the sample."""
        tokens, masks = [], []
        for index in indices.tolist():
            source = generator(4, index)
            tokens.append(torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=source))
            masks.append(torch.rand(SEQUENCE, generator=source) < 0.3 + 0.06 * (index % 11))
        token_rows, mask = torch.stack(tokens).numpy(), torch.stack(masks).float().numpy()
        return SampleRows(tokens=token_rows, loss_mask=mask)


class GradientRecorder(Optimizer):
    """An optimizer that records the gradients of each step."""

    def step(self, *arguments, **options):
        """Record the gradients, then update the weights."""
        self.recorded = [owned.gradients.clone() for owned in self.owned]
        return super().step(*arguments, **options)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step whose samples are divided over ranks.

    Args:
        world, cp, pp, ep, etp: the grid of ranks; data-parallel ranks are world / (cp * pp).
        samples: number of samples per step.
        strategy: data-parallel sharding strategy.
        schedule: pipeline schedule.
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


#: Padding microbatches on one or several ranks, a smaller last microbatch, and both; the last cases
#: have context-parallel or pipeline ranks that share the samples of a data-parallel rank.
CASES = (
    Case(3, 10), Case(3, 7), Case(3, 7, per_token=True), Case(3, 8, strategy="optim_grads_params"),
    Case(3, 10, model="experts"), Case(3, 10, model="dropless", etp=3), Case(4, 13),
    Case(4, 10, per_token=True), Case(4, 10, model="experts"), Case(4, 10, model="experts", ep=2),
    Case(4, 10, model="top3", ep=2), Case(4, 9, cp=2), Case(4, 9, pp=2),
    Case(4, 10, pp=2, schedule="zb-h1"),
)  # fmt: skip


def build_step(groups: ProcessGroupCollection, case: Case) -> TrainStep:
    """Build a training step of plain SGD that records its gradients."""
    config = DataParallelConfig(strategy=case.strategy)
    split = StageSplit.from_pattern("*-*|-", 2) if case.pp > 1 else None
    model = GPTModel(MODELS[case.model], groups, seed=3, storage=config.storage(), split=split)
    engine = DataParallel(model.store, groups, config=config)
    optimizer = GradientRecorder(
        engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0)
    )
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
    """Return this rank's gradients of the last step."""
    optimizer = step.optimizer
    return {
        placed.name: placed.of(recorded).clone()
        for recorded, owned in zip(optimizer.recorded, optimizer.owned, strict=True)
        for placed in owned.boxes
    }


def balance_of(step: TrainStep, groups: ProcessGroupCollection) -> Balance | None:
    """Return the balancer of expert biases, or None for a dense model."""
    model = step.model
    if model.config.moe is None:
        return None
    names = model.config.router_names
    return Balance(routers_of(model), names, config=model.config.moe, world=groups["world"])


def train_cases(rank: int, world: int, cases: tuple[Case, ...]) -> list[dict]:
    """Train as one rank of each case."""
    return [_train_case(rank, case) for case in cases]


def _train_case(rank: int, case: Case) -> dict:
    grid = RankGrid(world_size=case.world, cp=case.cp, pp=case.pp, ep=case.ep, etp=case.etp)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    step, dp_group = build_step(groups, case), groups["samples"]
    division = Division(
        samples=case.samples, micro_batch_size=MICRO, data_parallel_size=dp_group.size
    )

    def new_batches() -> GPTBatches:
        return GPTBatches(
            UnevenDataset(),
            micro_batch_size=MICRO,
            data_parallel_rank=dp_group.rank,
            data_parallel_size=dp_group.size,
            batch_sizes=BatchSizes.constant(case.samples),
        )

    layouts = Layouts(groups["cp"], torch.device("cpu"))
    batches, balance = new_batches(), balance_of(step, groups)
    losses, loads, num_padding = [], [], 0
    for _ in range(STEPS):
        microbatches = take(
            islice(batches, division.rounds),
            torch.device("cpu"),
            layouts=layouts,
            step_samples=case.samples,
        )
        num_padding += sum(batch.share == 0.0 for batch in microbatches)
        report = step(microbatches, lr=0.3, weight_decay=0.0)
        losses.append(report.loss)
        if balance is not None:
            balance.finish(applied=report.applied)
            loads.append(balance.report())
    gradients = gradients_of(step)
    evaluated = take(islice(new_batches(), division.rounds), torch.device("cpu"), layouts=layouts)
    losses.append(step.evaluate(evaluated, at_a_time=division.rounds))
    return {
        "losses": losses,
        "gradients": gradients,
        "loads": loads,
        "num_padding": num_padding,
        "expected_padding": STEPS
        * sum(not division.sample_range(dp_group.rank, i) for i in range(division.rounds)),
    }


def single_process(case: Case) -> dict:
    """Compute the microbatches of each step in sequence in a single process."""
    groups = ProcessGroupCollection.single()
    step = build_step(groups, dataclasses.replace(case, pp=1, strategy="no_shard"))
    balance, losses, loads = balance_of(step, groups), [], []

    def blocks(start_sample: int) -> list[Microbatch]:
        microbatches = []
        for start in range(start_sample, start_sample + case.samples, MICRO):
            ids = np.arange(start, min(start + MICRO, start_sample + case.samples))
            rows = UnevenDataset().read(ids)
            tokens = torch.from_numpy(rows.tokens)
            microbatches.append(
                Microbatch(
                    tokens[:, :-1],
                    tokens[:, 1:],
                    torch.from_numpy(rows.loss_mask),
                    SequenceLayout.of_rows(tokens.shape[1] - 1, sample_ids=torch.from_numpy(ids)),
                    share=len(ids) / case.samples,
                )
            )
        return microbatches

    for i in range(STEPS):
        losses.append(step(blocks(i * case.samples), lr=0.3, weight_decay=0.0).loss)
        if balance is not None:
            balance.finish(applied=True)
            loads.append(balance.report())
    gradients = gradients_of(step)
    losses.append(step.evaluate(blocks(0)))
    return {"losses": losses, "gradients": gradients, "loads": loads}


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.covers("matches a single process")
def test_uneven_ranks_match_losses_and_gradients_of_one_rank(world):
    cases = tuple(case for case in CASES if case.world == world)
    ranks = run_ranks(train_cases, world, cases)
    for index, case in enumerate(cases):
        with one_thread():
            reference = single_process(case)
        outcomes = [rank[index] for rank in ranks]
        assert [outcome["num_padding"] for outcome in outcomes] == [
            outcome["expected_padding"] for outcome in outcomes
        ]
        assert case.samples % MICRO or sum(outcome["num_padding"] for outcome in outcomes) > 0, case
        gradients: dict[str, torch.Tensor] = {}
        for outcome in outcomes:
            assert outcome["losses"] == pytest.approx(reference["losses"], rel=1e-6), case
            gradients.update(outcome["gradients"])
            assert len(outcome["loads"]) == len(reference["loads"])
            for loads, expected in zip(outcome["loads"], reference["loads"], strict=True):
                for load, expected_load in zip(loads, expected, strict=True):
                    assert load.tokens == expected_load.tokens, case
                    assert load.dropped == expected_load.dropped, case
                    limited = MODELS[case.model].moe.capacity_factor is not None
                    assert (load.dropped > 0) == limited, case
                    for name in ("entropy", "balance_loss", "z_loss"):
                        assert math.isclose(
                            getattr(load, name), getattr(expected_load, name), rel_tol=1e-5
                        )
        if case.strategy == "no_shard" and case.ep == case.etp == 1:
            assert gradients.keys() == reference["gradients"].keys()
            assert_all_close(gradients, reference["gradients"])


@pytest.mark.parametrize("per_token", [False, True])
def test_smaller_microbatch_is_weighted_by_its_samples(per_token):
    """With equal masks, every sample has the same weight, however the step is split."""
    losses = []
    for samples in (5, 10):
        case = Case(1, samples, per_token=per_token)
        step = build_step(ProcessGroupCollection.single(), case)
        rows = torch.randint(0, VOCABULARY, (5, SEQUENCE + 1), generator=generator(6))
        mask, layout = torch.ones(5, SEQUENCE), SequenceLayout.of_rows(SEQUENCE)
        slices = [slice(0, 2), slice(2, 4), slice(4, 5)] if samples == 5 else [slice(0, 5)]
        microbatches = [
            Microbatch(
                rows[rows_slice, :-1],
                rows[rows_slice, 1:],
                mask[rows_slice],
                layout,
                share=len(mask[rows_slice]) / 5,
            )
            for rows_slice in slices
        ]
        losses.append(step(microbatches, lr=0.1, weight_decay=0.0).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_padding_microbatch_is_not_routed_to_experts(monkeypatch):
    routed_rows, original_forward = [], ExpertMLPs.forward

    def count_rows(self, rows, runs):
        routed_rows.append(sum(runs.counts))
        return original_forward(self, rows, runs)

    monkeypatch.setattr(ExpertMLPs, "forward", count_rows)
    model = build_step(ProcessGroupCollection.single(), Case(1, 4, model="experts")).model
    tokens = torch.from_numpy(UnevenDataset().read(np.arange(2)).tokens)[:, :-1]
    layout = SequenceLayout.of_rows(SEQUENCE)
    padding_layout = layout.with_padding(torch.ones(SEQUENCE, 2, dtype=torch.bool))
    for row_layout in (layout, padding_layout):
        model(tokens, layout=row_layout)
    assert routed_rows[0] > 0 == routed_rows[1]
    counts = routers_of(model)[0].counted.tolist()
    model(tokens, layout=padding_layout)
    assert routers_of(model)[0].counted.tolist() == counts


def losses_of_rank(step: TrainStep, dp_rank: int) -> list[float]:
    """Run steps on the microbatches of one of three data-parallel ranks."""
    division = Division(samples=7, micro_batch_size=MICRO, data_parallel_size=3)
    batches = GPTBatches(
        UnevenDataset(),
        micro_batch_size=MICRO,
        data_parallel_rank=dp_rank,
        data_parallel_size=3,
        batch_sizes=BatchSizes.constant(7),
    )
    layouts = Layouts(step.groups["cp"], torch.device("cpu"))
    losses = []
    for _ in range(7):
        microbatches = take(
            islice(batches, division.rounds),
            torch.device("cpu"),
            layouts=layouts,
            step_samples=7,
        )
        assert [len(batch.tokens) for batch in microbatches] == [2, 1]
        assert microbatches[1].share == (1 / 7 if dp_rank == 0 else 0.0)
        losses.append(step(microbatches, lr=1e-2, weight_decay=0.0).loss)
    return losses


@pytest.mark.parametrize("dp_rank", [0, 1])
@pytest.mark.covers("graph replay matches eager")
def test_graph_replays_smaller_and_padding_microbatches(dp_rank):
    """The microbatches have the same form in every step."""
    with one_thread():
        single, config = ProcessGroupCollection.single(), DataParallelConfig()
        eager = losses_of_rank(graphed_step(single, config), dp_rank)
        step = graphed_step(single, config, graph=TapeRecorder(OpTape()))
        assert losses_of_rank(step, dp_rank) == eager
    assert (step.forward_backward.eager_steps, step.forward_backward.replays) == (3, 4)

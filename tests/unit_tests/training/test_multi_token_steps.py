# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction under every kind of model parallelism, against a single process."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.gpt import MTPTargets, take_mean_mtp_losses
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import Recompute
from megatron.training.step import ForwardBackward, Microbatch, PipelineForwardBackward
from tests.support import inputs
from tests.support.closeness import assert_piece_close
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.models.chunk_steps import move
from tests.unit_tests.core.models.depth_cases import CONFIG, LENGTH, ROWS, TIED, rows_of

MICROBATCHES = 3


def local_microbatch(batch: inputs.Microbatch, rank: int, size: int) -> Microbatch:
    """Return a context-parallel rank's shard of a microbatch."""
    rows = {"positions": batch.positions, "document_ids": batch.document_ids}
    layout = SequenceLayout.make(SequenceSharding.of(LENGTH, size), rank, rows=ROWS, **rows)
    fields = (layout.local(x) for x in (batch.tokens, batch.labels, batch.loss_mask))
    target_tensors = (x for x in vars(batch.mtp_targets).values() if x is not None)
    mtp_targets = (layout.local(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in target_tensors)
    layout = layout.with_samples(batch.sample_ids)
    return Microbatch(*fields, layout, mtp_targets=MTPTargets(*mtp_targets))


def test_mtp_loss_is_scaled_by_the_loss_factor():
    rows = rows_of(0, 0, depths=2, packed=False)
    batch = Microbatch(
        rows.tokens, rows.labels, rows.loss_mask, rows.layout, mtp_targets=rows.mtp_targets
    )
    targets = batch.mtp_arguments(torch.tensor(0.5))["mtp_targets"]
    assert batch.mtp_targets.weights.count_nonzero() > 20
    assert torch.equal(targets.weights, 0.5 * batch.mtp_targets.weights)
    assert dataclasses.replace(batch, mtp_targets=None).mtp_arguments(torch.tensor(0.5)) == {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a grid."""

    tied: bool = False
    tp: int = 1
    cp: int = 1
    pp: int = 1
    packed: bool = False
    sequence_parallel: bool = False
    strategy: str = "no_shard"
    schedule: str = "1f1b"
    pattern: str = "*-*|-"
    recompute: str | None = None
    dropout: float = 0.0

    @property
    def config(self) -> GPTConfig:
        return dataclasses.replace(TIED if self.tied else CONFIG, hidden_dropout=self.dropout)


def train_case(case: Case, groups: ProcessGroupCollection, *, dp_ranks: range):
    """Run two steps; return losses, owned gradients, MTP losses and uses of the end weights."""
    config, stages = case.config, groups["pp"].size
    parallel = DataParallelConfig(strategy=case.strategy)
    split = StageSplit.from_pattern(case.pattern, stages) if stages > 1 else None
    model = GPTModel(
        config,
        groups,
        sequence_parallel=case.sequence_parallel,
        seed=5,
        storage=parallel.storage(bucket_bytes=8000),
        split=split,
    )
    if case.recompute is not None:
        full = {"method": "uniform", "num_layers": 1} if case.recompute == "full" else {}
        model.set_recompute(Recompute(granularity=case.recompute, **full))
        for depth in () if model.multi_token is None else model.multi_token.layers:
            assert [recomputed for *_, recomputed in depth.decoder.runs] == [bool(full)]
            assert depth.decoder.blocks[0].recomputes is not bool(full)
    move(model)
    engine = DataParallel(model.store, groups, config=parallel)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0))
    optimizer.after_load(with_state=False)
    run = ForwardBackward(model, engine)
    if stages > 1:
        size = MICROBATCHES if case.schedule == "interleaved" else None
        order = {"schedule": case.schedule, "group_size": size}
        run = PipelineForwardBackward(model, engine, groups=groups, **order)
    batches = [
        rows_of(dp_rank, index, depths=config.mtp_num_layers, packed=case.packed)
        for dp_rank in dp_ranks
        for index in range(MICROBATCHES)
    ]
    if groups["cp"].size > 1:
        batches = [
            local_microbatch(batch, groups["cp"].rank, groups["cp"].size) for batch in batches
        ]
    factors = torch.tensor([0.125, 0.25, 0.0625] * len(dp_ranks))
    owned = engine.owned()
    losses = []
    for _ in range(2):  # the second step follows the gather plan of the first
        losses.append(float(run(batches, factors)))
    gradients = {
        (placed.name, placed.box.offsets): placed.of(shards.gradients).clone()
        for shards in owned
        for placed in shards.boxes
    }
    handles = model.store.handles
    ends = (handles[name] for name in ("embedding.weight", "head.weight") if name in handles)
    uses = {handle.name: handle.uses for handle in ends}
    used = uses.get("embedding.weight", 0), uses.get("head.weight", 0)
    return losses, gradients, take_mean_mtp_losses(model), used


def train_cases(rank: int, world: int, cases: list[Case]) -> list:
    """Train every case on the ranks of its grid."""
    outcomes = []
    for case in cases:
        grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp, pp=case.pp)
        groups = ProcessGroupCollection.create(grid, rank=rank)
        dp_rank = groups["samples"].rank
        outcomes.append(train_case(case, groups, dp_ranks=range(dp_rank, dp_rank + 1)))
    return outcomes


CASES_OF_2_RANKS = {
    "tp": Case(tp=2, packed=True, dropout=0.1),
    "tp, sequence parallel, tied": Case(tp=2, tied=True, sequence_parallel=True, recompute="full"),
    "cp, packed": Case(cp=2, packed=True),
    "pp": Case(pp=2, packed=True, dropout=0.1),
    "pp, tied": Case(pp=2, tied=True),
    "zb-h1": Case(pp=2, schedule="zb-h1", recompute="selective"),
    "zb-h1, tied": Case(pp=2, schedule="zb-h1", tied=True),
    "interleaved": Case(pp=2, schedule="interleaved", pattern="*-|*|-|"),
    "sharded": Case(strategy="optim_grads_params", recompute="full"),
    "sharded, tied": Case(strategy="optim_grads_params", tied=True, packed=True, dropout=0.1),
}
CASES_OF_4_RANKS = {
    "pp, sharded": Case(pp=2, strategy="optim_grads_params"),
    "pp, tp": Case(pp=2, tp=2, sequence_parallel=True, schedule="zb-h1", packed=True),
}


@pytest.mark.parametrize(
    ("world", "cases"), [(2, CASES_OF_2_RANKS), (4, CASES_OF_4_RANKS)], ids=["2", "4"]
)
def test_mtp_gradients_match_a_single_process(world: int, cases: dict[str, Case]):
    rank_outcomes = run_ranks(train_cases, world, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        plain = dataclasses.replace(
            case, recompute=None, sequence_parallel=False, strategy="no_shard"
        )
        num_dp_ranks = world // (case.tp * case.cp * case.pp)
        with one_thread():
            single = ProcessGroupCollection.single()
            losses, expected, means, _ = train_case(plain, single, dp_ranks=range(num_dp_ranks))
        outcomes = [outcomes_of_rank[number] for outcomes_of_rank in rank_outcomes]
        sums = [sum(outcome[0][step] for outcome in outcomes) / case.tp for step in range(2)]
        assert sums == pytest.approx(losses, rel=1e-6), name
        assert all(outcome[2] == pytest.approx(means, rel=1e-5) for outcome in outcomes), name
        assert sorted({outcome[3] for outcome in outcomes}) == expected_uses(case), name
        check_gradients(name, [outcome[1] for outcome in outcomes], expected)


def expected_uses(case: Case) -> list[tuple[int, int]]:
    """Return the uses of embedding and head for each kind of rank."""
    depths, tied = case.config.mtp_num_layers, case.tied
    last_stage = (depths + (1 + depths) * tied, (1 + depths) * (not tied))
    if case.pp > 1:
        return sorted({(1, 0), last_stage})
    return [(1 + last_stage[0], last_stage[1])]


def check_gradients(name: str, ranks: list[dict], expected: dict) -> None:
    """Compare the gradient shards of all ranks, and check that they cover the whole weights."""
    full = {weight: gradient for (weight, _), gradient in expected.items()}
    covered = {weight: torch.zeros_like(gradient) for weight, gradient in full.items()}
    for shards in ranks:
        for (weight, offsets), values in shards.items():
            assert_piece_close(f"{name}: {weight}", values, full[weight], offsets)
            seen = covered[weight]
            for dim, (start, size) in enumerate(zip(offsets, values.shape, strict=True)):
                seen = seen.narrow(dim, start, size)
            seen.fill_(1.0)
    assert all(seen.all() for seen in covered.values()), name

# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction on every way to cut a model: steps against those of one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel, MTPTargets, take_mean_mtp_losses
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import Recompute
from megatron.training.step import ForwardBackward, Microbatch, PipelineForwardBackward
from tests.support import inputs
from tests.support.closeness import assert_piece_close
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.models.chunk_steps import move
from tests.unit_tests.core.models.depth_cases import CONFIG, LENGTH, ROWS, TIED, rows_of

MICROBATCHES = 3


def local_part(batch: inputs.Microbatch, rank: int, size: int) -> Microbatch:
    """Return a context-parallel rank's tokens of a microbatch."""
    rows = {"positions": batch.positions, "document_ids": batch.document_ids}
    layout = SequenceLayout.make(SequenceSharding.of(LENGTH, size), rank, rows=ROWS, **rows)
    parts = (layout.local(x) for x in (batch.tokens, batch.labels, batch.loss_mask))
    whole = (x for x in vars(batch.mtp_targets).values() if x is not None)
    mtp_targets = (layout.local(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in whole)
    layout = layout.with_samples(batch.sample_ids)
    return Microbatch(*parts, layout, mtp_targets=MTPTargets(*mtp_targets))


def test_what_is_predicted_has_the_factor_of_the_loss():
    made = rows_of(0, 0, depths=2, packed=False)
    batch = Microbatch(
        made.tokens, made.labels, made.loss_mask, made.layout, mtp_targets=made.mtp_targets
    )
    found = batch.mtp_arguments(torch.tensor(0.5))["mtp_targets"]
    assert batch.mtp_targets.weights.count_nonzero() > 20
    assert torch.equal(found.weights, 0.5 * batch.mtp_targets.weights)
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


def trained(case: Case, groups: ProcessGroupCollection, *, lanes: range):
    """Train one step; return the loss, all gradients as they are owned, and the depths' losses."""
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
            assert [again for *_, again in depth.decoder.runs] == [bool(full)]
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
    data = [
        rows_of(lane, index, depths=config.mtp_num_layers, packed=case.packed)
        for lane in lanes
        for index in range(MICROBATCHES)
    ]
    if groups["cp"].size > 1:
        data = [local_part(batch, groups["cp"].rank, groups["cp"].size) for batch in data]
    factors = torch.tensor([0.125, 0.25, 0.0625] * len(lanes))
    owned = engine.owned()
    losses = []
    for _ in range(2):  # the second step follows the gather plan of the first
        losses.append(float(run(data, factors)))
    gradients = {
        (placed.name, placed.box.offsets): placed.of(each.gradients).clone()
        for each in owned
        for placed in each.boxes
    }
    handles = model.store.handles
    ends = (handles[name] for name in ("embedding.weight", "head.weight") if name in handles)
    uses = {handle.name: handle.uses for handle in ends}
    used = uses.get("embedding.weight", 0), uses.get("head.weight", 0)
    return losses, gradients, take_mean_mtp_losses(model), used


def on_rank(rank: int, world: int, cases: list[Case]) -> list:
    """Train every case on the ranks of its grid."""
    found = []
    for case in cases:
        grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp, pp=case.pp)
        groups = ProcessGroupCollection.create(grid, rank=rank)
        lane = groups["samples"].rank
        found.append(trained(case, groups, lanes=range(lane, lane + 1)))
    return found


TWO = {
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
FOUR = {
    "pp, sharded": Case(pp=2, strategy="optim_grads_params"),
    "pp, tp": Case(pp=2, tp=2, sequence_parallel=True, schedule="zb-h1", packed=True),
}


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_every_gradient_is_that_of_one_process(world: int, cases: dict[str, Case]):
    results = run_ranks(on_rank, world, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        plain = dataclasses.replace(
            case, recompute=None, sequence_parallel=False, strategy="no_shard"
        )
        lanes = world // (case.tp * case.cp * case.pp)
        with one_thread():
            single = ProcessGroupCollection.single()
            losses, wanted, means, _ = trained(plain, single, lanes=range(lanes))
        found = [result[number] for result in results]
        sums = [sum(one[0][step] for one in found) / case.tp for step in range(2)]
        assert sums == pytest.approx(losses, rel=1e-6), name
        assert all(one[2] == pytest.approx(means, rel=1e-5) for one in found), name
        assert sorted({one[3] for one in found}) == expected_uses(case), name
        check_gradients(name, [one[1] for one in found], wanted)


def expected_uses(case: Case) -> list[tuple[int, int]]:
    """Return how often a rank uses embedding and head, for the different ranks there are."""
    depths, tied = case.config.mtp_num_layers, case.tied
    behind = (depths + (1 + depths) * tied, (1 + depths) * (not tied))
    if case.pp > 1:
        return sorted({(1, 0), behind})
    return [(1 + behind[0], behind[1])]


def check_gradients(name: str, ranks: list[dict], wanted: dict) -> None:
    """Compare every piece that any rank has, and see that the pieces make whole weights."""
    whole = {weight: gradient for (weight, _), gradient in wanted.items()}
    covered = {weight: torch.zeros_like(gradient) for weight, gradient in whole.items()}
    for pieces in ranks:
        for (weight, offsets), values in pieces.items():
            assert_piece_close(f"{name}: {weight}", values, whole[weight], offsets)
            seen = covered[weight]
            for dim, (first, size) in enumerate(zip(offsets, values.shape, strict=True)):
                seen = seen.narrow(dim, first, size)
            seen.fill_(1.0)
    assert all(seen.all() for seen in covered.values()), name

# SPDX-License-Identifier: Apache-2.0
"""The training step against closed forms: mean and per-token loss, accumulation, skipped steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core.distributed import DataParallel
from megatron.core.initialize import InitSpec
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.optimizer.loss_scaler import (
    ConstantLossScaler,
    DynamicLossScaler,
    DynamicLossScalerConfig,
)
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import Storage, WeightStore
from megatron.core.weight_sharding import WeightSharding
from megatron.training.failures.replay import RerunPolicy
from megatron.training.step import Microbatch, TrainStep
from tests.support.closeness import assert_all_close
from tests.support.inputs import microbatch
from tests.support.ranks import run_ranks

VOCABULARY, HIDDEN, BATCH, SEQUENCE = 11, 5, 2, 6
LEARNING_RATE = 0.5


class Bigram:
    """A model of one embedding and one head, which notes the sample numbers that it is given."""

    has_auxiliary_losses = False

    def __init__(self, groups: ProcessGroupCollection) -> None:
        self.store = WeightStore(groups, seed=3)
        shape = (VOCABULARY, HIDDEN)
        for name in ("table", "head"):
            self.store.declare(WeightSharding.of(name, shape), InitSpec.normal(0.7))
        self.store.materialize(Storage(bucket_bytes=1))
        self.samples: list[object] = []

    def loss(self, tokens, labels, token_weights, *, layout):
        """Return (weighted sum, nll [b, s]); a token of -1 stands for overflow."""
        ids = layout.sample_ids
        self.samples.append(None if ids is None else ids.tolist())
        use = self.store.handles
        logits = use["head"].linear(torch.tanh(use["table"].embedding(tokens.clamp(min=0))))
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        nll = nll.view(labels.shape)
        if bool((tokens < 0).any()):
            nll = nll + math.inf  # the gradient stays finite: the loss alone says that it is bad
        return (nll * token_weights).sum(), nll.detach()


def batch_of(lane: int, index: int) -> Microbatch:
    """Return one lane's microbatch with its own number of counted tokens."""
    made = microbatch(
        seed=6, dp_rank=lane, index=index, batch=BATCH, sequence=SEQUENCE, vocabulary=VOCABULARY
    )
    made.loss_mask[1, : 2 * (index % 3) + lane] = 0.0
    return Microbatch(made.tokens, made.labels, made.loss_mask, made.layout)


def trainer(groups: ProcessGroupCollection, **options) -> TrainStep:
    """Return a step of plain SGD, whose update shows the gradient."""
    model = Bigram(groups)
    engine = DataParallel(model.store, groups)
    config = OptimizerConfig(kind="sgd", clip_grad=0.0)
    optimizer = Optimizer(engine.owned(), groups, config=config)
    return TrainStep(model, engine, optimizer=optimizer, groups=groups, **options)


def weights_of(step: TrainStep) -> dict[str, torch.Tensor]:
    """Return copies of the weights."""
    return {name: handle.get().clone() for name, handle in step.model.store.handles.items()}


def plain_step(
    weights: dict[str, torch.Tensor], lanes: list[list[Microbatch]], *, per_token: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and updated weights in fp64 by the definition of the two losses."""
    leaves = {n: w.double().requires_grad_(True) for n, w in weights.items()}
    sums, counts = [], []
    for batch in (b for lane in lanes for b in lane):
        logits = torch.tanh(F.embedding(batch.tokens, leaves["table"])) @ leaves["head"].t()
        nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        sums.append((nll * batch.loss_mask.flatten()).sum())
        counts.append(batch.loss_mask.sum().double())
    if per_token:
        loss = torch.stack(sums).sum() / torch.stack(counts).sum()
    else:
        loss = (torch.stack(sums) / torch.stack(counts).clamp(min=1.0)).mean()
    loss.backward()
    return float(loss.detach()), {n: w.detach() - LEARNING_RATE * w.grad for n, w in leaves.items()}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_loss_and_update_equal_the_definition(microbatches: int, per_token: bool):
    step = trainer(ProcessGroupCollection.single(), per_token_loss=per_token)
    for first in (0, 10):
        data = [batch_of(0, first + i) for i in range(microbatches)]
        counts = {int(b.loss_mask.sum()) for b in data}
        assert microbatches == 1 or len(counts) > 1, "uneven masks tell the two losses apart"
        loss, wanted = plain_step(weights_of(step), [data], per_token=per_token)
        report = step(data, lr=LEARNING_RATE, weight_decay=0.0)
        assert report.applied
        assert report.loss == pytest.approx(loss, rel=1e-6)
        assert_all_close(weights_of(step), wanted, bound=2e-6)
    assert step.model.samples == [
        batch_of(0, first + i).layout.sample_ids.tolist()
        for first in (0, 10)
        for i in range(microbatches)
    ]


def test_the_two_losses_differ_on_uneven_masks():
    losses = []
    for per_token in (False, True):
        step = trainer(ProcessGroupCollection.single(), per_token_loss=per_token)
        data = [batch_of(0, i) for i in range(3)]
        losses.append(step(data, lr=LEARNING_RATE, weight_decay=0.0).loss)
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]


@pytest.mark.parametrize("per_token", [False, True])
def test_a_microbatch_without_tokens_adds_nothing(per_token: bool):
    step = trainer(ProcessGroupCollection.single(), per_token_loss=per_token)
    empty = batch_of(0, 1)
    empty.loss_mask.zero_()
    data = [batch_of(0, 0), empty]
    loss, wanted = plain_step(weights_of(step), [data], per_token=per_token)
    assert step(data, lr=LEARNING_RATE, weight_decay=0.0).loss == pytest.approx(loss, rel=1e-6)
    assert_all_close(weights_of(step), wanted, bound=2e-6)
    report = step([empty], lr=LEARNING_RATE, weight_decay=0.0)
    assert (report.loss, report.grad_norm, report.applied) == (0.0, 0.0, True)


def dp_ranks_and_skips(rank: int, world: int) -> dict:
    """Train on two lanes with both losses; then one lane overflows; then cp shares tokens."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    found = {}
    for per_token in (False, True):
        step = trainer(groups, per_token_loss=per_token)
        report = step([batch_of(rank, i) for i in range(3)], lr=LEARNING_RATE, weight_decay=0.0)
        found[per_token] = (report, weights_of(step))
        for culprit in range(world):
            before = weights_of(step)
            bad = batch_of(rank, 3)
            if rank == culprit:
                bad.tokens[0, 0] = -1
            report = step([batch_of(rank, 4), bad], lr=LEARNING_RATE, weight_decay=0.0)
            assert not report.applied
            assert not math.isfinite(report.loss)
            assert all(torch.equal(before[n], w) for n, w in weights_of(step).items())
        # The next step owes nothing to the skipped ones.
        report = step([batch_of(rank, 5)], lr=LEARNING_RATE, weight_decay=0.0)
        found[per_token, "after"] = (report, weights_of(step))
        found[per_token, "evaluated"] = step.evaluate([batch_of(rank, 6)])
    shared = ProcessGroupCollection.create(RankGrid(world_size=world, cp=2), rank=rank)
    for per_token in (False, True):
        step = trainer(shared, per_token_loss=per_token)
        report = step([own_half(batch_of(0, i), rank) for i in range(3)], lr=0.5, weight_decay=0.0)
        found[per_token, "cp"] = (report, weights_of(step))
    return found


def own_half(batch: Microbatch, rank: int) -> Microbatch:
    """Return one of two context-parallel halves."""
    parts = (batch.tokens, batch.labels, batch.loss_mask)
    return Microbatch(*(part.chunk(2, 1)[rank] for part in parts), batch.layout)


def test_two_ranks_equal_the_definition_and_skip_alike():
    initial = weights_of(trainer(ProcessGroupCollection.single()))
    results = run_ranks(dp_ranks_and_skips, 2)
    for per_token in (False, True):
        lanes = [[batch_of(lane, i) for i in range(3)] for lane in range(2)]
        loss, wanted = plain_step(initial, lanes, per_token=per_token)
        next_lanes = [[batch_of(lane, 5)] for lane in range(2)]
        next_loss, next_wanted = plain_step(wanted, next_lanes, per_token=per_token)
        cp_loss, cp_wanted = plain_step(initial, lanes[:1], per_token=per_token)
        evaluated, _ = plain_step(
            next_wanted, [[batch_of(lane, 6)] for lane in range(2)], per_token=True
        )
        for found in results:
            for key, number, weights in (
                (per_token, loss, wanted),
                ((per_token, "after"), next_loss, next_wanted),
                ((per_token, "cp"), cp_loss, cp_wanted),
            ):
                report, got = found[key]
                assert report.loss == pytest.approx(number, rel=1e-6), key
                assert_all_close(got, weights, bound=2e-6)
            assert found[per_token, "evaluated"] == pytest.approx(evaluated, rel=1e-6)


def test_overflow_lowers_loss_scale_without_changing_updates():
    groups = ProcessGroupCollection.single()
    step, plain = trainer(groups), trainer(groups)
    settings = DynamicLossScalerConfig(initial_scale=2.0**16, hysteresis=1)
    step.optimizer.scaler = DynamicLossScaler(settings)
    bad = batch_of(0, 0)
    bad.tokens[1, 2] = -1
    report = step([bad], lr=LEARNING_RATE, weight_decay=0.0)
    assert (report.applied, report.loss_scale) == (False, 2.0**16)
    assert math.isnan(report.grad_norm)
    report = step([batch_of(0, 1)], lr=LEARNING_RATE, weight_decay=0.0)
    wanted = plain([batch_of(0, 1)], lr=LEARNING_RATE, weight_decay=0.0)
    assert report.loss_scale == 2.0**15
    assert report.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert report.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
    assert_all_close(weights_of(step), weights_of(plain), bound=2e-6)


@pytest.mark.parametrize(
    ("scaler", "kind"),
    [
        (DynamicLossScaler(DynamicLossScalerConfig(initial_scale=4.0, min_scale=2.0)), None),
        (DynamicLossScaler(DynamicLossScalerConfig(initial_scale=2.0, min_scale=2.0)), "inf_norm"),
        (ConstantLossScaler(4.0), "inf_norm"),
    ],
)
def test_overflowing_norm_is_an_anomaly_unless_scaling(scaler, kind, monkeypatch):
    groups, samples = ProcessGroupCollection.single(), [batch_of(0, 0)]
    step = trainer(groups, reruns=RerunPolicy("validate_results"))
    step.optimizer.scaler = scaler
    monkeypatch.setattr(step.optimizer, "grad_norm", lambda: math.inf)
    report = step(samples, lr=LEARNING_RATE, weight_decay=0.0)
    assert (report.applied, report.grad_norm) == (False, math.inf)
    assert len(step.model.samples) == (1 if kind is None else 2)
    assert (report.anomaly.kind if report.anomaly else None) == kind


def test_an_error_in_a_microbatch_leaves_the_next_step_clean():
    groups = ProcessGroupCollection.single()
    step, plain = trainer(groups), trainer(groups)
    broken = batch_of(0, 1)
    broken.labels[0, 0] = VOCABULARY  # out of range
    with pytest.raises(IndexError):
        step([batch_of(0, 0), broken], lr=LEARNING_RATE, weight_decay=0.0)
    for one in (step, plain):
        one([batch_of(0, 2)], lr=LEARNING_RATE, weight_decay=0.0)
    for name, weight in weights_of(plain).items():
        assert torch.equal(weights_of(step)[name], weight)


def test_a_step_needs_data():
    step = trainer(ProcessGroupCollection.single())
    with pytest.raises(ValueError, match="a step needs at least one microbatch"):
        step([], lr=1.0, weight_decay=0.0)


def test_evaluation_averages_tokens_and_keeps_gradients():
    groups = ProcessGroupCollection.single()
    step = trainer(groups)
    data = [batch_of(0, i) for i in range(3)]
    slots = {n: h.main_grad.fill_(7.0) for n, h in step.model.store.handles.items()}
    loss = step.evaluate(data)
    wanted, _ = plain_step(weights_of(step), [data], per_token=True)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert step.model.samples == [None] * 3
    assert all((slot == 7.0).all() for slot in slots.values())
    assert step.evaluate([]) == 0.0

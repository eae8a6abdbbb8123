# SPDX-License-Identifier: Apache-2.0
"""The training step against closed forms: mean and per-token loss, accumulation, skipped steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid, WeightSharding
from megatron.core.distributed import DataParallel
from megatron.core.optimizer import (
    ConstantLossScaler,
    DynamicLossScaler,
    DynamicLossScalerConfig,
    Optimizer,
    OptimizerConfig,
)
from megatron.core.weight_gather import Storage, WeightStore
from megatron.training.fault_tolerance.replay import RerunPolicy
from megatron.training.step import Microbatch, TrainStep
from tests.support.closeness import assert_all_close
from tests.support.inputs import microbatch
from tests.support.ranks import run_ranks

VOCABULARY, HIDDEN, BATCH, SEQUENCE = 11, 5, 2, 6
LEARNING_RATE = 0.5


class Bigram:
    """A model of one embedding and one head, which records the sample ids of its batches."""

    has_auxiliary_losses = False

    def __init__(self, groups: ProcessGroupCollection) -> None:
        self.store = WeightStore(groups, seed=3)
        shape = (VOCABULARY, HIDDEN)
        for name in ("table", "head"):
            self.store.declare(WeightSharding.of(name, shape), InitSpec.normal(0.7))
        self.store.materialize(Storage(bucket_bytes=1))
        self.samples: list[object] = []

    def loss(self, tokens, labels, token_weights, *, layout):
        """Return (weighted sum, nll [b, s]); a token of -1 makes the loss overflow."""
        ids = layout.sample_ids
        self.samples.append(None if ids is None else ids.tolist())
        use = self.store.handles
        logits = use["head"].linear(torch.tanh(use["table"].embedding(tokens.clamp(min=0))))
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        nll = nll.view(labels.shape)
        if bool((tokens < 0).any()):
            nll = nll + math.inf  # the gradient stays finite: only the loss overflows
        return (nll * token_weights).sum(), nll.detach()


def batch_of(dp_rank: int, index: int) -> Microbatch:
    """Return a data-parallel rank's microbatch; the number of unmasked tokens varies."""
    batch = microbatch(
        seed=6, dp_rank=dp_rank, index=index, batch=BATCH, sequence=SEQUENCE, vocabulary=VOCABULARY
    )
    batch.loss_mask[1, : 2 * (index % 3) + dp_rank] = 0.0
    return Microbatch(batch.tokens, batch.labels, batch.loss_mask, batch.layout)


def build_step(groups: ProcessGroupCollection, **options) -> TrainStep:
    """Build a training step of plain SGD, whose update is proportional to the gradient."""
    model = Bigram(groups)
    engine = DataParallel(model.store, groups)
    config = OptimizerConfig(kind="sgd", clip_grad=0.0)
    optimizer = Optimizer(engine.owned(), groups, config=config)
    return TrainStep(model, engine, optimizer=optimizer, groups=groups, **options)


def weights_of(step: TrainStep) -> dict[str, torch.Tensor]:
    """Return copies of the weights."""
    return {name: handle.get().clone() for name, handle in step.model.store.handles.items()}


def reference_step(
    weights: dict[str, torch.Tensor], batches_by_rank: list[list[Microbatch]], *, per_token: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and updated weights in fp64 by the definition of the two losses."""
    leaves = {n: w.double().requires_grad_(True) for n, w in weights.items()}
    sums, counts = [], []
    for batch in (b for rank_batches in batches_by_rank for b in rank_batches):
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
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_loss_and_update_equal_the_definition(num_microbatches: int, per_token: bool):
    step = build_step(ProcessGroupCollection.single(), per_token_loss=per_token)
    for start in (0, 10):
        microbatches = [batch_of(0, start + i) for i in range(num_microbatches)]
        counts = {int(b.loss_mask.sum()) for b in microbatches}
        assert num_microbatches == 1 or len(counts) > 1, "the masks are even, so both losses agree"
        loss, expected = reference_step(weights_of(step), [microbatches], per_token=per_token)
        report = step(microbatches, lr=LEARNING_RATE, weight_decay=0.0)
        assert report.applied
        assert report.loss == pytest.approx(loss, rel=1e-6)
        assert_all_close(weights_of(step), expected, bound=2e-6)
    assert step.model.samples == [
        batch_of(0, start + i).layout.sample_ids.tolist()
        for start in (0, 10)
        for i in range(num_microbatches)
    ]


def test_mean_and_per_token_loss_differ_on_uneven_masks():
    losses = []
    for per_token in (False, True):
        step = build_step(ProcessGroupCollection.single(), per_token_loss=per_token)
        microbatches = [batch_of(0, i) for i in range(3)]
        losses.append(step(microbatches, lr=LEARNING_RATE, weight_decay=0.0).loss)
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]


@pytest.mark.parametrize("per_token", [False, True])
def test_a_microbatch_without_tokens_adds_nothing(per_token: bool):
    step = build_step(ProcessGroupCollection.single(), per_token_loss=per_token)
    empty = batch_of(0, 1)
    empty.loss_mask.zero_()
    microbatches = [batch_of(0, 0), empty]
    loss, expected = reference_step(weights_of(step), [microbatches], per_token=per_token)
    assert step(microbatches, lr=LEARNING_RATE, weight_decay=0.0).loss == pytest.approx(
        loss, rel=1e-6
    )
    assert_all_close(weights_of(step), expected, bound=2e-6)
    report = step([empty], lr=LEARNING_RATE, weight_decay=0.0)
    assert (report.loss, report.grad_norm, report.applied) == (0.0, 0.0, True)


def train_two_ranks(rank: int, world: int) -> dict:
    """Train two data-parallel ranks with both losses, overflow one rank, then train with cp 2."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    outcomes = {}
    for per_token in (False, True):
        step = build_step(groups, per_token_loss=per_token)
        report = step([batch_of(rank, i) for i in range(3)], lr=LEARNING_RATE, weight_decay=0.0)
        outcomes[per_token] = (report, weights_of(step))
        for bad_rank in range(world):
            before = weights_of(step)
            bad = batch_of(rank, 3)
            if rank == bad_rank:
                bad.tokens[0, 0] = -1
            report = step([batch_of(rank, 4), bad], lr=LEARNING_RATE, weight_decay=0.0)
            assert not report.applied
            assert not math.isfinite(report.loss)
            assert all(torch.equal(before[n], w) for n, w in weights_of(step).items())
        # The skipped steps leave nothing behind in the next step.
        report = step([batch_of(rank, 5)], lr=LEARNING_RATE, weight_decay=0.0)
        outcomes[per_token, "after"] = (report, weights_of(step))
        outcomes[per_token, "evaluated"] = step.evaluate([batch_of(rank, 6)])
    shared = ProcessGroupCollection.create(RankGrid(world_size=world, cp=2), rank=rank)
    for per_token in (False, True):
        step = build_step(shared, per_token_loss=per_token)
        report = step(
            [local_half(batch_of(0, i), rank) for i in range(3)], lr=0.5, weight_decay=0.0
        )
        outcomes[per_token, "cp"] = (report, weights_of(step))
    return outcomes


def local_half(batch: Microbatch, rank: int) -> Microbatch:
    """Return a context-parallel rank's half of a microbatch."""
    fields = (batch.tokens, batch.labels, batch.loss_mask)
    return Microbatch(*(x.chunk(2, 1)[rank] for x in fields), batch.layout)


def test_two_ranks_match_the_definition_and_skip_together():
    initial = weights_of(build_step(ProcessGroupCollection.single()))
    rank_outcomes = run_ranks(train_two_ranks, 2)
    for per_token in (False, True):
        batches_by_rank = [[batch_of(dp_rank, i) for i in range(3)] for dp_rank in range(2)]
        loss, expected = reference_step(initial, batches_by_rank, per_token=per_token)
        next_batches = [[batch_of(dp_rank, 5)] for dp_rank in range(2)]
        next_loss, next_expected = reference_step(expected, next_batches, per_token=per_token)
        cp_loss, cp_expected = reference_step(initial, batches_by_rank[:1], per_token=per_token)
        evaluated, _ = reference_step(
            next_expected, [[batch_of(dp_rank, 6)] for dp_rank in range(2)], per_token=True
        )
        for outcomes in rank_outcomes:
            for key, number, weights in (
                (per_token, loss, expected),
                ((per_token, "after"), next_loss, next_expected),
                ((per_token, "cp"), cp_loss, cp_expected),
            ):
                report, actual = outcomes[key]
                assert report.loss == pytest.approx(number, rel=1e-6), key
                assert_all_close(actual, weights, bound=2e-6)
            assert outcomes[per_token, "evaluated"] == pytest.approx(evaluated, rel=1e-6)


def test_overflow_lowers_loss_scale_without_changing_updates():
    groups = ProcessGroupCollection.single()
    step, plain = build_step(groups), build_step(groups)
    settings = DynamicLossScalerConfig(initial_scale=2.0**16, hysteresis=1)
    step.optimizer.scaler = DynamicLossScaler(settings)
    bad = batch_of(0, 0)
    bad.tokens[1, 2] = -1
    report = step([bad], lr=LEARNING_RATE, weight_decay=0.0)
    assert (report.applied, report.loss_scale) == (False, 2.0**16)
    assert math.isnan(report.grad_norm)
    report = step([batch_of(0, 1)], lr=LEARNING_RATE, weight_decay=0.0)
    expected = plain([batch_of(0, 1)], lr=LEARNING_RATE, weight_decay=0.0)
    assert report.loss_scale == 2.0**15
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
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
    step = build_step(groups, reruns=RerunPolicy("validate_results"))
    step.optimizer.scaler = scaler
    monkeypatch.setattr(step.optimizer, "grad_norm", lambda: math.inf)
    report = step(samples, lr=LEARNING_RATE, weight_decay=0.0)
    assert (report.applied, report.grad_norm) == (False, math.inf)
    assert len(step.model.samples) == (1 if kind is None else 2)
    assert (report.anomaly.kind if report.anomaly else None) == kind


def test_step_after_a_microbatch_error_is_clean():
    groups = ProcessGroupCollection.single()
    step, plain = build_step(groups), build_step(groups)
    broken = batch_of(0, 1)
    broken.labels[0, 0] = VOCABULARY  # out of range
    with pytest.raises(IndexError):
        step([batch_of(0, 0), broken], lr=LEARNING_RATE, weight_decay=0.0)
    for train_step in (step, plain):
        train_step([batch_of(0, 2)], lr=LEARNING_RATE, weight_decay=0.0)
    for name, weight in weights_of(plain).items():
        assert torch.equal(weights_of(step)[name], weight)


def test_step_without_microbatches_is_refused():
    step = build_step(ProcessGroupCollection.single())
    with pytest.raises(ValueError, match="a step needs at least one microbatch"):
        step([], lr=1.0, weight_decay=0.0)


def test_evaluation_averages_tokens_and_keeps_gradients():
    groups = ProcessGroupCollection.single()
    step = build_step(groups)
    microbatches = [batch_of(0, i) for i in range(3)]
    main_grads = {n: h.main_grad.fill_(7.0) for n, h in step.model.store.handles.items()}
    loss = step.evaluate(microbatches)
    expected, _ = reference_step(weights_of(step), [microbatches], per_token=True)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert step.model.samples == [None] * 3
    assert all((main_grad == 7.0).all() for main_grad in main_grads.values())
    assert step.evaluate([]) == 0.0

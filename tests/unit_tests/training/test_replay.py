# SPDX-License-Identifier: Apache-2.0
"""Repeated computations of a step: the verdict on the step, and the computation that is used."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.training.fault_tolerance.replay import (
    Digest,
    Evidence,
    Replayer,
    RerunPolicy,
    StepComputation,
    find_anomaly,
)
from megatron.training.hooks import StepAnomaly

NAN, INF = math.nan, math.inf


def computation_of(kind=None, loss=1.0, norm=2.0) -> StepComputation:
    return StepComputation(loss, (), torch.tensor(0.0), kind, norm)


def evidence_of(*losses: float, bits=(), norms=()) -> list[Evidence]:
    checksums = list(bits) or [5] * len(losses)
    grad_norms = list(norms) or [1.0] * len(losses)
    digests = (Digest(*pair) for pair in zip(checksums, grad_norms, strict=True))
    return [Evidence(*row) for row in zip(losses, digests, strict=True)]


NANS, VALID = computation_of("nan", NAN, NAN), computation_of()
VALID_EVIDENCE = evidence_of(1.0, 2.0, 3.0)
SPIKE = computation_of("spike", 9.0, NAN)
BIG = computation_of("inf_norm", 1.0, INF)


@pytest.mark.parametrize(
    ("computations", "evidence", "anomaly"),
    [
        ([NANS], [evidence_of(1.0, NAN, 2.0)], StepAnomaly("nan", "unchecked", (1,), (NAN,))),
        (
            [NANS, VALID],
            [evidence_of(1.0, NAN, INF), VALID_EVIDENCE],
            StepAnomaly("nan", "transient", (1, 2), (NAN, 1.0)),
        ),
        (
            [NANS, NANS],
            [evidence_of(1.0, NAN, 2.0)] * 2,
            StepAnomaly("nan", "reproduced", (1,), (NAN, NAN), same=True),
        ),
        # The second NaN is on another rank: no computation of the step was valid.
        (
            [NANS, NANS],
            [evidence_of(1.0, NAN, 2.0), evidence_of(NAN, 1.0, 2.0)],
            StepAnomaly("nan", "reproduced", (1,), (NAN, NAN)),
        ),
        # The losses are equal, but the gradients of rank 2 differ; every rank's norm shows that.
        (
            [BIG, VALID],
            [evidence_of(1.0, 2.0, 3.0, bits=(5, 5, 6), norms=(1.0, 1.0, INF)), VALID_EVIDENCE],
            StepAnomaly("inf_norm", "transient", (2,), (INF, 1.0)),
        ),
        (
            [BIG, BIG],
            [evidence_of(1.0, 2.0, 3.0, norms=(1.0, NAN, 1.0))] * 2,
            StepAnomaly("inf_norm", "reproduced", (1,), (INF, INF), same=True),
        ),
        # The losses of all ranks are finite: the fault is in a sum over ranks.
        (
            [BIG, VALID],
            [VALID_EVIDENCE] * 2,
            StepAnomaly("inf_norm", "transient", (0, 1, 2), (INF, 1.0), True),
        ),
        (
            [SPIKE, SPIKE],
            [evidence_of(1.0, 7.0, 1.0)] * 2,
            StepAnomaly("spike", "reproduced", (1,), (9.0, 9.0), same=True),
        ),
        (
            [SPIKE, VALID],
            [evidence_of(1.0, 7.0, 1.0), evidence_of(1.0, 1.0, 1.0)],
            StepAnomaly("spike", "transient", (1,), (9.0, 1.0)),
        ),
        # Compared at the interval, although no computation is anomalous.
        ([VALID, VALID], [VALID_EVIDENCE] * 2, None),
        (
            [VALID] * 3,
            [evidence_of(1.0, 2.5, 3.0), VALID_EVIDENCE, VALID_EVIDENCE],
            StepAnomaly("determinism", "transient", (1,), (1.0,) * 3, same=True),
        ),
        (
            [VALID] * 3,
            [VALID_EVIDENCE, evidence_of(1.0, 2.0, 3.5), VALID_EVIDENCE],
            StepAnomaly("determinism", "transient", (2,), (1.0,) * 3),
        ),
        (
            [VALID] * 3,
            [VALID_EVIDENCE, evidence_of(1.0, 2.0, 3.0, bits=(4, 5, 5)), VALID_EVIDENCE],
            StepAnomaly("determinism", "transient", (0,), (1.0,) * 3),
        ),
        (
            [VALID] * 3,
            [VALID_EVIDENCE, evidence_of(1.0, 2.0, 3.5), evidence_of(1.5, 2.0, 3.0)],
            StepAnomaly("determinism", "undecided", (0,), (1.0,) * 3),
        ),
        (
            [NANS, VALID, VALID],
            [evidence_of(NAN, 2.0, 3.0), VALID_EVIDENCE, VALID_EVIDENCE],
            StepAnomaly("nan", "transient", (0,), (NAN, 1.0, 1.0), same=True),
        ),
        # Two of three computations are anomalous, including the last: none is valid.
        (
            [VALID, NANS, NANS],
            [VALID_EVIDENCE, evidence_of(NAN, 2.0, 3.0), evidence_of(NAN, 2.0, 3.0)],
            StepAnomaly("nan", "reproduced", (0,), (1.0, NAN, NAN), same=True),
        ),
    ],
)
def test_anomaly_verdict_follows_from_the_computations(computations, evidence, anomaly):
    # NaN is not equal to itself, so the test compares representations.
    assert repr(find_anomaly(computations, evidence, loss_share=3.0)) == repr(anomaly)


class ObservableEngine:
    """An engine that stores its gradient observer."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(device=torch.device("cpu"))
        self.observer = None

    def observe_gradients(self, observer) -> None:
        self.observer = observer


class Steps:
    """Steps with scripted computations; each computation adds to a counter."""

    def __init__(self, mode: str, interval: int = 1) -> None:
        self.counter = torch.tensor([10.0, 0.0])
        engine = ObservableEngine()
        self.replayer = Replayer(
            RerunPolicy(mode, interval, (self.counter,)),
            engine=engine,
            world=ProcessGroupCollection.single()["world"],
        )
        self.engine = engine

    def run(self, *computations: tuple[str | None, float]) -> tuple[StepAnomaly | None, int, float]:
        """Return the anomaly, the number of computations, and the loss that was used."""
        remaining = list(computations)

        def compute() -> StepComputation:
            kind, loss = remaining.pop(0)
            self.counter += torch.tensor([1.0, loss])
            if self.engine.observer is not None:
                self.engine.observer.begin()
                self.engine.observer.show(torch.full((3,), loss))
            return StepComputation(loss, (), torch.tensor(loss, dtype=torch.float64), kind)

        used, anomaly = self.replayer.run(compute)
        return anomaly, len(computations) - len(remaining), used.loss


LOSS_A, LOSS_B, LOSS_NAN = (None, 2.0), (None, 2.5), ("nan", NAN)


def test_only_anomalous_steps_rerun_and_count_once():
    steps = Steps("validate_results")
    assert steps.run(LOSS_A, LOSS_B) == (None, 1, 2.0)
    anomaly, times, loss = steps.run(LOSS_NAN, LOSS_A)
    assert (anomaly.verdict, times, loss) == ("transient", 2, 2.0)
    assert steps.counter.tolist() == [12.0, 4.0], "the counter is restored after the NaN"
    anomaly, times, _ = steps.run(("spike", 9.0), ("spike", 9.0))
    assert (anomaly.kind, anomaly.verdict, times) == ("spike", "reproduced", 2)
    assert steps.replayer.stats() == ({}, None)


def test_disabled_reruns_observe_and_recompute_nothing():
    steps = Steps("disabled")
    assert steps.engine.observer is None
    anomaly, times, _ = steps.run(LOSS_NAN, LOSS_A)
    assert (anomaly.verdict, times) == ("unchecked", 1)


def test_steps_are_compared_at_interval_and_majority_is_used():
    steps = Steps("report_determinism_stats", 2)
    assert steps.run(LOSS_A, LOSS_B) == (None, 1, 2.0)
    assert steps.run(LOSS_A, LOSS_A, LOSS_B) == (None, 2, 2.0)
    assert steps.run(LOSS_A, LOSS_B) == (None, 1, 2.0)
    anomaly, times, loss = steps.run(LOSS_B, LOSS_A, LOSS_A)
    assert (anomaly.kind, anomaly.verdict, times, loss) == ("determinism", "transient", 3, 2.0)
    anomaly, times, loss = steps.run(LOSS_NAN, LOSS_A)
    assert (anomaly.kind, anomaly.verdict, times, loss) == ("nan", "transient", 2, 2.0)
    assert steps.run(LOSS_NAN, LOSS_NAN, LOSS_A)[:2][0].verdict == "reproduced"
    assert steps.counter[0] == 10.0 + 6.0, "each step counts once"
    numbers, line = steps.replayer.stats()
    assert numbers == {"steps_compared": 3.0, "steps_differed": 1.0}
    assert line == "determinism: 3 steps were computed twice, 1 differed"

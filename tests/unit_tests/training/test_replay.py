# SPDX-License-Identifier: Apache-2.0
"""What the computations of a step say of it, and which of them is used."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core.process_groups import ProcessGroupCollection
from megatron.training.failures.replay import (
    Digest,
    Evidence,
    Replayer,
    RerunPolicy,
    StepAnomaly,
    StepComputation,
    find_anomaly,
)

NAN, INF = math.nan, math.inf


def tried(kind=None, loss=1.0, norm=2.0) -> StepComputation:
    return StepComputation(loss, (), torch.tensor(0.0), kind, norm)


def of_ranks(*losses: float, bits=(), norms=()) -> list[Evidence]:
    found = list(bits) or [5] * len(losses)
    most = list(norms) or [1.0] * len(losses)
    both = (Digest(*pair) for pair in zip(found, most, strict=True))
    return [Evidence(*row) for row in zip(losses, both, strict=True)]


NANS, GOOD = tried("nan", NAN, NAN), tried()
ALL_GOOD = of_ranks(1.0, 2.0, 3.0)
SPIKE = tried("spike", 9.0, NAN)
BIG = tried("inf_norm", 1.0, INF)


@pytest.mark.parametrize(
    ("tries", "seen", "anomaly"),
    [
        ([NANS], [of_ranks(1.0, NAN, 2.0)], StepAnomaly("nan", "unchecked", (1,), (NAN,))),
        (
            [NANS, GOOD],
            [of_ranks(1.0, NAN, INF), ALL_GOOD],
            StepAnomaly("nan", "transient", (1, 2), (NAN, 1.0)),
        ),
        (
            [NANS, NANS],
            [of_ranks(1.0, NAN, 2.0)] * 2,
            StepAnomaly("nan", "reproduced", (1,), (NAN, NAN), same=True),
        ),
        # Elsewhere the second time: no computation of the step has been sound.
        (
            [NANS, NANS],
            [of_ranks(1.0, NAN, 2.0), of_ranks(NAN, 1.0, 2.0)],
            StepAnomaly("nan", "reproduced", (1,), (NAN, NAN)),
        ),
        # The losses are equal; the gradients of rank 2 are not, which every rank's norm shows.
        (
            [BIG, GOOD],
            [of_ranks(1.0, 2.0, 3.0, bits=(5, 5, 6), norms=(1.0, 1.0, INF)), ALL_GOOD],
            StepAnomaly("inf_norm", "transient", (2,), (INF, 1.0)),
        ),
        (
            [BIG, BIG],
            [of_ranks(1.0, 2.0, 3.0, norms=(1.0, NAN, 1.0))] * 2,
            StepAnomaly("inf_norm", "reproduced", (1,), (INF, INF), same=True),
        ),
        # All parts are sound: it is in a sum over ranks.
        (
            [BIG, GOOD],
            [ALL_GOOD] * 2,
            StepAnomaly("inf_norm", "transient", (0, 1, 2), (INF, 1.0), True),
        ),
        (
            [SPIKE, SPIKE],
            [of_ranks(1.0, 7.0, 1.0)] * 2,
            StepAnomaly("spike", "reproduced", (1,), (9.0, 9.0), same=True),
        ),
        (
            [SPIKE, GOOD],
            [of_ranks(1.0, 7.0, 1.0), of_ranks(1.0, 1.0, 1.0)],
            StepAnomaly("spike", "transient", (1,), (9.0, 1.0)),
        ),
        # Compared although nothing is suspicious.
        ([GOOD, GOOD], [ALL_GOOD] * 2, None),
        (
            [GOOD] * 3,
            [of_ranks(1.0, 2.5, 3.0), ALL_GOOD, ALL_GOOD],
            StepAnomaly("determinism", "transient", (1,), (1.0,) * 3, same=True),
        ),
        (
            [GOOD] * 3,
            [ALL_GOOD, of_ranks(1.0, 2.0, 3.5), ALL_GOOD],
            StepAnomaly("determinism", "transient", (2,), (1.0,) * 3),
        ),
        (
            [GOOD] * 3,
            [ALL_GOOD, of_ranks(1.0, 2.0, 3.0, bits=(4, 5, 5)), ALL_GOOD],
            StepAnomaly("determinism", "transient", (0,), (1.0,) * 3),
        ),
        (
            [GOOD] * 3,
            [ALL_GOOD, of_ranks(1.0, 2.0, 3.5), of_ranks(1.5, 2.0, 3.0)],
            StepAnomaly("determinism", "undecided", (0,), (1.0,) * 3),
        ),
        (
            [NANS, GOOD, GOOD],
            [of_ranks(NAN, 2.0, 3.0), ALL_GOOD, ALL_GOOD],
            StepAnomaly("nan", "transient", (0,), (NAN, 1.0, 1.0), same=True),
        ),
        # Two of three are suspicious, and the last: nothing sound to go on with.
        (
            [GOOD, NANS, NANS],
            [ALL_GOOD, of_ranks(NAN, 2.0, 3.0), of_ranks(NAN, 2.0, 3.0)],
            StepAnomaly("nan", "reproduced", (0,), (1.0, NAN, NAN), same=True),
        ),
    ],
)
def test_what_computations_say(tries, seen, anomaly):
    # NaN is not equal to itself, so the words are compared.
    assert repr(find_anomaly(tries, seen, loss_share=3.0)) == repr(anomaly)


class ObservableEngine:
    """An engine that keeps what wants to see gradients."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(device=torch.device("cpu"))
        self.observer = None

    def observe_gradients(self, observer) -> None:
        self.observer = observer


class Steps:
    """Steps whose computations are played, and a counter that each adds to."""

    def __init__(self, mode: str, interval: int = 1) -> None:
        self.counter = torch.tensor([10.0, 0.0])
        engine = ObservableEngine()
        self.replayer = Replayer(
            RerunPolicy(mode, interval, (self.counter,)),
            engine=engine,
            world=ProcessGroupCollection.single()["world"],
        )
        self.engine = engine

    def run(self, *played: tuple[str | None, float]) -> tuple[StepAnomaly | None, int, float]:
        """Return what is said, how many computations there were and which was used."""
        left = list(played)

        def compute() -> StepComputation:
            kind, loss = left.pop(0)
            self.counter += torch.tensor([1.0, loss])
            if self.engine.observer is not None:
                self.engine.observer.begin()
                self.engine.observer.show(torch.full((3,), loss))
            return StepComputation(loss, (), torch.tensor(loss, dtype=torch.float64), kind)

        used, anomaly = self.replayer.run(compute)
        return anomaly, len(played) - len(left), used.loss


SOUND, OTHER, BAD = (None, 2.0), (None, 2.5), ("nan", NAN)


def test_only_suspicious_steps_are_computed_again_and_count_once():
    steps = Steps("validate_results")
    assert steps.run(SOUND, OTHER) == (None, 1, 2.0)
    anomaly, times, loss = steps.run(BAD, SOUND)
    assert (anomaly.verdict, times, loss) == ("transient", 2, 2.0)
    assert steps.counter.tolist() == [12.0, 4.0], "what the NaN left has been put back"
    anomaly, times, _ = steps.run(("spike", 9.0), ("spike", 9.0))
    assert (anomaly.kind, anomaly.verdict, times) == ("spike", "reproduced", 2)
    assert steps.replayer.stats() == ({}, None)


def test_switched_off_nothing_is_looked_at_or_computed_again():
    steps = Steps("disabled")
    assert steps.engine.observer is None
    anomaly, times, _ = steps.run(BAD, SOUND)
    assert (anomaly.verdict, times) == ("unchecked", 1)


def test_steps_are_compared_at_interval_and_majority_is_used():
    steps = Steps("report_determinism_stats", 2)
    assert steps.run(SOUND, OTHER) == (None, 1, 2.0)
    assert steps.run(SOUND, SOUND, OTHER) == (None, 2, 2.0)
    assert steps.run(SOUND, OTHER) == (None, 1, 2.0)
    anomaly, times, loss = steps.run(OTHER, SOUND, SOUND)
    assert (anomaly.kind, anomaly.verdict, times, loss) == ("determinism", "transient", 3, 2.0)
    anomaly, times, loss = steps.run(BAD, SOUND)
    assert (anomaly.kind, anomaly.verdict, times, loss) == ("nan", "transient", 2, 2.0)
    assert steps.run(BAD, BAD, SOUND)[:2][0].verdict == "reproduced"
    assert steps.counter[0] == 10.0 + 6.0, "one for each step"
    numbers, line = steps.replayer.stats()
    assert numbers == {"steps_compared": 3.0, "steps_differed": 1.0}
    assert line == "determinism: 3 steps were computed twice, 1 differed"

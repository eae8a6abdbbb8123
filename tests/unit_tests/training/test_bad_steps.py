# SPDX-License-Identifier: Apache-2.0
"""What is a spike, what a second computation says, and which machine a suspect step blames."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest

from megatron.training.errors import RunStopped
from megatron.training.exit_codes import ExitCode
from megatron.training.failures.bad_steps import Glitch, remember_loss, spike_limit
from megatron.training.failures.faults import Faults
from megatron.training.failures.suspect_step import (
    Suspect,
    forget_suspect,
    judge,
    read_suspect,
    write_suspect,
)
from megatron.training.progress_state import Progress
from tests.unit_tests.training.small_config import small_config


@dataclass(frozen=True)
class Outcome:
    parts: tuple[tuple[float, ...], ...] = ()
    loss: float = 2.0
    applied: bool = True
    grad_norm: float = 1.0
    num_zeros: int | None = None
    votes: tuple[float, ...] = ()
    spiked: bool = False


def test_the_limit_is_a_multiple_of_the_median_once_half_a_window_is_known():
    config = small_config("--loss-spike-factor 3 --loss-spike-window 4")
    losses: list[float] = []
    limits = []
    for loss in (1.0, 2.0, 100.0, 2.0, 4.0, 6.0):
        limits.append(spike_limit(config, losses))
        remember_loss(config, losses, loss)
    assert limits == [math.inf, math.inf, 4.5, 6.0, 6.0, 9.0]
    assert losses == [100.0, 2.0, 4.0, 6.0]


def test_without_a_factor_nothing_is_kept():
    losses: list[float] = []
    remember_loss(small_config(), losses, 1.0)
    assert losses == []
    assert spike_limit(small_config(), [1.0] * 200) == math.inf


NAN = math.nan


@pytest.mark.parametrize(
    ("parts", "glitch"),
    [
        ((), None),
        (((1.0, NAN, 2.0),), Glitch((1,), "unchecked")),
        (((1.0, NAN, math.inf), (1.0, 2.0, 3.0)), Glitch((1, 2), "transient")),
        (((1.0, NAN, 2.0), (1.0, NAN, 2.0)), Glitch((1,), "reproduced")),
        # Elsewhere the second time: no computation of the step has been sound.
        (((1.0, NAN, 2.0), (NAN, 1.0, 2.0)), Glitch((1,), "reproduced")),
    ],
)
def test_what_two_computations_say(parts, glitch):
    assert Glitch.of(Outcome(parts)) == glitch


def test_all_stages_of_a_pipeline_may_have_begun_a_nan():
    pipelines = [[0, 2], [1, 3]]
    found = Glitch.of(Outcome(((0.0, 0.0, 1.0, NAN),)), pipelines)
    assert found == Glitch((1, 3), "unchecked", stages=2)
    assert "NaN or Inf loss of a pipeline of rank 1 on 1, rank 3 on 3; " in found.text(2, str)
    played = Played("--on-reproduced-nan restart")
    faults = dataclasses.replace(played.faults, pipelines=pipelines)
    both = (0.0, 0.0, NAN, 1.0)
    with pytest.raises(RunStopped, match="'0': 'host0', '2': 'host2'"):
        faults.after_step(Progress(), Outcome((both, both)), math.inf)


def test_many_ranks_make_a_short_line():
    text = Glitch(tuple(range(1000)), "unchecked").text(7, lambda rank: f"host{rank}")
    assert text.startswith("iteration 7: NaN or Inf loss of rank 0 on host0, rank 1 on host1, ")
    assert "and 992 more" in text
    assert len(text) < 300


def test_the_note_survives_and_damage_is_no_note(tmp_path):
    assert read_suspect(str(tmp_path)) is None
    write_suspect(str(tmp_path), Suspect(3, {"1": "a"}))
    assert read_suspect(str(tmp_path)) == Suspect(3, {"1": "a"})
    for damage in ("", "[]", "{}", '{"iteration": 3, "hosts": 4}'):
        (tmp_path / "suspect_step.json").write_text(damage)
        assert read_suspect(str(tmp_path)) is None
    forget_suspect(str(tmp_path))
    forget_suspect(str(tmp_path))


@pytest.mark.parametrize(
    ("noted", "now", "code"),
    [
        (None, {"1": "a"}, 16),
        (Suspect(2, {"1": "b"}), {"1": "a"}, 16),  # another step
        (Suspect(3, {"1": "a"}), {"1": "a"}, 16),
        (Suspect(3, {"1": "a"}), {"0": "a"}, 16),  # another rank on the same machine
        (Suspect(3, {"1": "b"}), {"1": "a"}, 17),
    ],
)
def test_who_is_to_blame(noted, now, code):
    assert judge(noted, Suspect(3, now)).code == code


class Played:
    """Decisions about steps, and what came of them."""

    def __init__(self, flags: str = "", back: Progress | None = None) -> None:
        self.said, self.events, self.saves, self.acquitted = [], [], [], []
        self.faults = Faults(
            config=small_config(f"--save s {flags}"),
            say=self.said.append,
            record=lambda kind, iteration, values: self.events.append((kind, iteration, values)),
            host_of=lambda rank: f"host{rank}",
            save=lambda progress: self.saves.append(progress.iteration),
            judge=lambda suspect: RunStopped(ExitCode.RESTART_ELSEWHERE, str(suspect)),
            acquit=self.acquitted.append,
            roll_back=lambda: back,
        )


def test_a_sound_step_acquits_and_says_nothing():
    played = Played()
    played.faults.after_step(Progress(iteration=4), Outcome(), math.inf)
    assert (played.said, played.events, played.acquitted) == ([], [], [5])


@pytest.mark.parametrize(
    ("second", "flags", "stops"),
    [
        (NAN, "--on-reproduced-nan restart", True),
        (NAN, "", False),
        (1.0, "--on-reproduced-nan restart", False),
    ],
)
def test_only_a_reproduced_nan_stops_and_only_if_asked(second, flags, stops):
    played = Played(flags)
    outcome = Outcome(((1.0, NAN), (1.0, second)))
    if stops:
        with pytest.raises(RunStopped, match="host1"):
            played.faults.after_step(Progress(iteration=4), outcome, math.inf)
    else:
        played.faults.after_step(Progress(iteration=4), outcome, math.inf)
    assert played.saves == ([4] if stops else []), "the state before the step"
    verdict = "transient" if second == 1.0 else "reproduced"
    assert played.events == [("fault", 5, {verdict: 1.0, "first_rank": 1.0})]
    assert played.acquitted == []


def test_rolling_back_keeps_the_position_in_the_data():
    back = Progress(iteration=2, consumed_samples=12, update_samples=12, recent_losses=[1.0])
    played = Played("--rollback-after-bad-steps 2", back)
    progress = Progress(iteration=6, consumed_samples=36, update_samples=24)
    for bad in (0, 1, 3):
        progress.consecutive_bad_steps = bad
        played.faults.after_count(progress, Outcome())
    assert progress.rollbacks == 0
    progress.consecutive_bad_steps = 2
    played.faults.after_count(progress, Outcome())
    assert (progress.iteration, progress.consumed_samples) == (6, 36)
    assert (progress.update_samples, progress.rollbacks) == (12, 1)
    assert progress.recent_losses == [1.0]
    assert played.events == [("fault", 6, {"rolled_back_to": 2.0})]

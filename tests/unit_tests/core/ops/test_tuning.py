# SPDX-License-Identifier: Apache-2.0
"""Tuning of launches: correctness before speed, and the default unless a candidate is clearly
faster."""

import os
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.ops import launches as launches_module
from megatron.core.ops.launches import Launches
from tools.bench import trials, tune_kernels
from tools.bench.trials import (
    BACKWARD,
    FORWARD,
    FORWARD_BACKWARD,
    Problem,
    Trial,
    all_launches,
    started_with,
)
from tools.bench.tune_kernels import TRIALS, Tried, Tuner, entry, fastest, tune, updated

DEFAULT, WRONG, BROKEN, QUICK, SLOW = ({"BLOCK": n} for n in (64, 32, 16, 128, 256))
FAKE = Launches("fake", DEFAULT, alternatives=(WRONG, BROKEN, QUICK, SLOW))
SECONDS = {64: 1.0, 32: 0.1, 16: 0.1, 128: 0.9, 256: 1.5}


def tried(*seconds, wrong=None, launch=DEFAULT):
    return Tried(launch=launch, seconds=seconds, wrong=wrong)


def test_candidate_must_be_clearly_faster():
    default = tried(1.0, 1.0, 1.0)
    assert fastest([default]) is None
    assert fastest([default, tried(0.98, 0.98, 0.98)]) is None
    quick, quicker = tried(0.9, 0.9, 0.9), tried(0.8, 0.8, 0.8)
    assert fastest([default, quick, quicker, quick]) is quicker
    assert fastest([default, quick], margin=1.2) is None


def test_runs_are_compared_pairwise():
    """The device slows down tenfold during the runs; the candidate is 10 % faster in every run."""
    quick = tried(0.9, 9.0, 9.0)
    assert fastest([tried(1.0, 10.0, 10.0), quick]) is quick


def test_wrong_candidate_is_never_the_fastest():
    default, wrong = tried(1.0), tried(0.1, wrong="output 0: error 0.5")
    assert fastest([default, wrong]) is None
    with pytest.raises(ValueError, match="is wrong: output 0"):
        fastest([tried(1.0, wrong="output 0: error 0.5"), tried(0.9)])


def fake_build(make, tokens, *, features):
    """Double x by a kernel with one wrong candidate and one that fails to launch."""

    def double(x, *, implementation):
        if implementation == "reference":
            return x * 2
        block = launches_module.FAKE.pick(x, f"h{features}")["BLOCK"]
        if block == BROKEN["BLOCK"]:
            raise RuntimeError("out of resource: shared memory")
        return x * (2.1 if block == WRONG["BLOCK"] and len(x) == 7 else 2.0)

    return Problem(function=double, inputs=(make(tokens, features),))


def fake_race(calls):
    """Return for each call the time of its candidate in SECONDS."""
    seconds = {}
    for index, call in calls.items():
        call()
        seconds[index] = [SECONDS[FAKE.candidates[int(index)]["BLOCK"]]] * 3
    return seconds


@pytest.fixture
def tuner(monkeypatch):
    monkeypatch.setattr(launches_module, "FAKE", FAKE, raising=False)
    return Tuner(torch.device("cpu"), torch.float32, fake_race)


TRIAL = Trial({"fake": FORWARD}, fake_build, ({"features": 5},), {"features": 3}, (3, 7, 9))


def test_wrong_candidates_are_dropped_even_if_fastest(tuner, capsys):
    key, trials_run = tuner.tried(FAKE, TRIAL, {"features": 5})
    assert key == "fake h5"
    assert [candidate.wrong is None for candidate in trials_run] == [True, False, False, True, True]
    assert fastest(trials_run).launch == QUICK
    assert "error" in trials_run[1].wrong
    assert "shared memory" in trials_run[2].wrong
    assert [candidate.seconds == () for candidate in trials_run] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert capsys.readouterr().err.count("DROPPED: fake") == 2
    assert launches_module.FAKE is FAKE, "the launches are restored"


def test_tuned_launches_are_written_to_the_launch_table(tuner, monkeypatch):
    monkeypatch.setattr(tune_kernels, "TRIALS", (TRIAL,))
    monkeypatch.setattr(tune_kernels, "all_launches", lambda: {"fake": FAKE})
    tables = []
    options = {"only": "", "end": time.monotonic() + 60, "write": tables.append}
    old = {"Card": {"fake h5": {"launch": SLOW}, "other": {"launch": {}}}, "Other": {"x": {}}}
    assert tune(tuner, "Card", table=old, **options) == []
    table = tables[-1]
    assert table["Other"] == old["Other"]
    assert table["Card"]["other"] == old["Card"]["other"]
    tuned = table["Card"]["fake h5"]
    assert tuned["launch"] == QUICK
    assert tuned["milliseconds"] < tuned["default_milliseconds"]
    assert tuned["error"] < 1e-6
    assert tuned["versions"].keys() == {"torch", "cuda", "triton"}
    late = options | {"end": time.monotonic() - 1}
    assert "no time left" in tune(tuner, "Card", table=old, **late)[0]


def test_slower_table_entry_is_removed():
    new = entry([tried(1.0), tried(0.5)], tried(0.5))
    table = updated({}, "Card", "a h5", new)
    assert table == {"Card": {"a h5": new}}
    assert updated(table, "Card", "b", None) == table
    assert updated(table, "Card", "a h5", None) == {}


def test_trial_that_does_not_launch_its_kernel_fails(tuner):
    idle = Launches("idle", DEFAULT, alternatives=(QUICK,))
    trial = Trial({"idle": FORWARD}, fake_build, ({"features": 5},), {"features": 3}, (3, 5, 9))
    with pytest.raises(ValueError, match="the trial of idle"):
        tuner.tried(idle, trial, {"features": 5})


def test_tuning_candidate_replaces_launch_at_every_import(monkeypatch):
    monkeypatch.setattr(launches_module, "FAKE", FAKE, raising=False)
    with started_with(FAKE, SLOW) as keys:
        assert launches_module.FAKE.pick(torch.zeros(1), "k") == SLOW
    assert keys == {"k"}
    assert launches_module.FAKE.pick(torch.zeros(1), "k") == DEFAULT


def test_every_kernel_with_candidates_has_a_trial():
    launches = all_launches()
    assert len(launches) > 20
    tried_names = {name for trial in TRIALS for name in trial.launches}
    assert tried_names <= launches.keys()
    assert {name for name, launch in launches.items() if launch.alternatives} <= tried_names
    assert {direction for trial in TRIALS for direction in trial.launches.values()} <= {
        FORWARD,
        BACKWARD,
        FORWARD_BACKWARD,
    }
    assert set(tune_kernels.UNREHEARSED) <= launches.keys()
    assert trials.Forced("a", DEFAULT).candidates == (DEFAULT,)


def rehearse(*arguments):
    """Run the tool as documented, in the interpreter; return its output."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tools.bench.tune_kernels", "--rehearse", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    return run.stdout


def test_rehearsal_tunes_a_kernel_in_the_interpreter():
    lines = rehearse("--only", "write_to_pages").splitlines()
    assert [line.split(":")[0].split(" ")[0] for line in lines] == ["write_to_pages"]


def test_unknown_kernel_is_refused_with_known_names(monkeypatch, capsys):
    monkeypatch.setattr(tune_kernels, "be_interpreted", lambda: None)
    # prologue_backward has candidates, but a rehearsal cannot run them.
    for only, options in (("nosuch", []), ("prologue_backward", ["--rehearse"])):
        monkeypatch.setattr(sys, "argv", ["tune_kernels", "--only", only, *options])
        with pytest.raises(SystemExit) as stopped:
            tune_kernels.main()
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"begins with '{only}'" in line
        assert "write_to_pages" in line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rehearsal_tunes_all_kernels_in_the_interpreter():
    lines = rehearse("--seconds", "900").splitlines()
    rehearsed = {name for name, launch in all_launches().items() if launch.alternatives}
    assert {line.split(":")[0].split(" ")[0] for line in lines} == rehearsed - set(
        tune_kernels.UNREHEARSED
    )

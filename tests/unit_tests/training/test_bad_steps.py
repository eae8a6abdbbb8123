# SPDX-License-Identifier: Apache-2.0
"""Loss spikes, verdicts of a second computation, and faulty hosts found by a suspect step."""

from __future__ import annotations

import json
import math
import socket
from types import SimpleNamespace

import pytest

from megatron.cli.errors import ExitCode, RunStopped
from megatron.core.dist_checkpointing import Solo
from megatron.training.fault_tolerance.faults import (
    FaultLog,
    Faults,
    SuspectStep,
    SuspectStepFile,
    add_faulty_hosts,
    anomaly_text,
    delete_suspect_step,
    judge,
    ranks_text,
    read_faulty_hosts,
    read_suspect_step,
    record_loss,
    refuse_faulty_hosts,
    spike_limit,
    write_suspect_step,
)
from megatron.training.hooks import Progress, StepAnomaly
from tests.unit_tests.training.small_config import small_config
from tests.unit_tests.training.test_loop import Outcome


def test_spike_limit_follows_median_after_half_a_window():
    config = small_config("--loss-spike-factor 3 --loss-spike-window 4")
    losses: list[float] = []
    limits = []
    for loss in (1.0, 2.0, 100.0, 2.0, 4.0, 6.0):
        limits.append(spike_limit(config, losses))
        record_loss(config, losses, loss)
    assert limits == [math.inf, math.inf, 4.5, 6.0, 6.0, 9.0]
    assert losses == [100.0, 2.0, 4.0, 6.0]


def test_losses_are_not_remembered_without_spike_factor():
    losses: list[float] = []
    record_loss(small_config(), losses, 1.0)
    assert losses == []
    assert spike_limit(small_config(), [1.0] * 200) == math.inf


NAN = math.nan
HOSTS = {1: "host1"}


def anomaly(kind="nan", verdict="reproduced", *, ranks=(1,), values=(NAN, NAN), same=True):
    return StepAnomaly(kind, verdict, ranks, values, same=same)


@pytest.mark.parametrize(
    ("step_anomaly", "expected"),
    [
        (anomaly(verdict="transient"), "NaN or Inf loss of rank 1 on host1; the step computed once "
         "more is sound and was used: a transient fault; watch that machine"),
        (anomaly(), "yields it again: reproduced, the step was skipped"),
        (anomaly(same=False), "yields it again, with other bits: reproduced"),
        (anomaly(verdict="unchecked"), "of rank 1 on host1; the step was skipped"),
        (anomaly("inf_norm"), "NaN or Inf gradient norm of rank 1 on host1; "),
        (anomaly("spike", values=(8.0, 8.0)), "loss 8 is above 4, the limit of "
         "--loss-spike-factor, with a large contribution of rank 1 on host1; "),
        (anomaly("determinism", "transient"), "one of three computations of the step differs "
         "bitwise in the result of rank 1 on host1; the other two are equal and were used: "),
        (anomaly("determinism", "undecided"), "all three computations of the step differ in the "
         "result of rank 1"),
    ],
)  # fmt: skip
def test_anomaly_line_states_cause_and_outcome(step_anomaly, expected):
    text = anomaly_text(7, step_anomaly, ranks_text(HOSTS), limit=4.0)
    assert text.startswith("iteration 7: ")
    assert expected in text


def test_long_rank_list_is_abbreviated():
    text = ranks_text({rank: f"host{rank}" for rank in range(1000)})
    assert text.startswith("of rank 0 on host0, rank 1 on host1, ")
    assert "and 992 more" in text
    assert len(text) < 200


def make_suspect(iteration=3, hosts=None, values=(NAN, NAN)):
    return SuspectStep(iteration, hosts or {"1": "a"}, "nan", values)


def test_suspect_step_round_trips_and_damaged_file_is_ignored(tmp_path):
    assert read_suspect_step(str(tmp_path)) is None
    suspect = SuspectStep(3, {"1": "a"}, "spike", (0.1 + 0.2, math.inf))
    write_suspect_step(str(tmp_path), suspect)
    assert read_suspect_step(str(tmp_path)) == suspect
    for damage in ("", "[]", "{}", '{"iteration": 3, "hosts": 4}'):
        (tmp_path / "suspect_step.json").write_text(damage)
        assert read_suspect_step(str(tmp_path)) is None
    delete_suspect_step(str(tmp_path))
    delete_suspect_step(str(tmp_path))


@pytest.mark.parametrize(
    ("recorded", "hosts", "code"),
    [
        (None, {"1": "a"}, 16),
        (make_suspect(2, {"1": "b"}), {"1": "a"}, 16),  # another step
        (make_suspect(), {"1": "a"}, 16),
        (make_suspect(), {"0": "a"}, 16),  # another rank on the same machine
        (make_suspect(3, {"1": "b"}), {"1": "a"}, 17),
    ],
)
def test_same_fault_on_another_host_has_its_own_exit_code(recorded, hosts, code):
    assert judge(recorded, make_suspect(3, hosts)).code == code


@pytest.mark.parametrize(
    ("second", "expected"), [(8.0, "with the same"), (8.5, "without the same")]
)
def test_values_from_two_hosts_are_compared_bit_by_bit(second, expected):
    recorded = SuspectStep(3, {"1": "b"}, "spike", (8.0, 8.0))
    stop = judge(recorded, SuspectStep(3, {"1": "a"}, "spike", (second, second)))
    assert f"before that on b, {expected} bits" in str(stop)


def suspect_file_recorder(tmp_path, monkeypatch, host):
    """Return the suspect-step file of a save folder, with its messages and recorded verdicts."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    messages, verdicts = [], []

    def add(fault):
        verdicts.append((fault.iteration, fault.verdict, fault.hosts, fault.values[-1]))

    log = SimpleNamespace(add=add)
    return (
        SuspectStepFile(str(tmp_path), Solo(), say=messages.append, log=log),
        messages,
        verdicts,
    )


def test_step_valid_elsewhere_lists_faulty_host_and_refuses_it(tmp_path, monkeypatch):
    write_suspect_step(str(tmp_path), make_suspect(3, {"1": "a", "2": "c"}))
    suspect_file, messages, verdicts = suspect_file_recorder(tmp_path, monkeypatch, "c")
    suspect_file.clear(2, 1.5)
    assert verdicts == []
    suspect_file.clear(3, 1.5)
    suspect_file.clear(3, 1.5)
    assert verdicts == [(3, "persistent", {1: "a"}, 1.5)], (
        "host c is still in use, and the step is valid there"
    )
    assert "on a it was not, twice (nan): persistent, listed in" in messages[0]
    assert read_suspect_step(str(tmp_path)) is None
    (entry,) = read_faulty_hosts(str(tmp_path))
    assert (entry["host"], entry["rank"], entry["iteration"]) == ("a", 1, 3)
    assert (entry["values"], entry["sound"], entry["sound_on"]) == (
        ["nan", "nan"], 1.5.hex(), ["c"]
    )  # fmt: skip
    refuse_faulty_hosts(str(tmp_path), Solo())
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    with pytest.raises(
        RunStopped, match=r"rank 0 is on a, which gave .* or remove its ent"
    ) as stop:
        refuse_faulty_hosts(str(tmp_path), Solo())
    assert stop.value.code == ExitCode.RESTART_ELSEWHERE


def test_step_valid_on_the_same_host_lists_no_faulty_host(tmp_path, monkeypatch):
    write_suspect_step(str(tmp_path), make_suspect())
    suspect_file, messages, verdicts = suspect_file_recorder(tmp_path, monkeypatch, "a")
    suspect_file.clear(3, 1.5)
    assert verdicts == [(3, "transient", {1: "a"}, 1.5)]
    assert "on the same machines it was not" in messages[0]
    assert not (tmp_path / "faulty_hosts.json").exists()
    assert not (tmp_path / "suspect_step.json").exists()


def test_faulty_host_list_appends_and_rejects_damaged_file(tmp_path):
    assert read_faulty_hosts(str(tmp_path)) == []
    add_faulty_hosts(str(tmp_path), [{"host": "a"}])
    add_faulty_hosts(str(tmp_path), [{"host": "b"}])
    assert [entry["host"] for entry in read_faulty_hosts(str(tmp_path))] == ["a", "b"]
    (tmp_path / "faulty_hosts.json").write_text("{")
    with pytest.raises(ValueError, match=r"faulty_hosts\.json cannot be read .* fix or remove it"):
        refuse_faulty_hosts(str(tmp_path), Solo())


class FaultsRecorder:
    """Run `Faults` on chosen outcomes; record its messages, events, saves and cleared steps."""

    def __init__(self, flags: str = "", restored: Progress | None = None, save=None) -> None:
        self.messages, self.events, self.saves, self.cleared = [], [], [], []
        self.faults = Faults(
            config=small_config(f"--save s {flags}"),
            say=self.messages.append,
            log=FaultLog(
                save,
                record=lambda kind, iteration, values: self.events.append(
                    (kind, iteration, values)
                ),
                warn=self.messages.append,
            ),
            host_of=lambda rank: f"host{rank}",
            save=lambda progress: self.saves.append(progress.iteration),
            suspect_file=SimpleNamespace(
                judge=lambda suspect: RunStopped(ExitCode.RESTART_ELSEWHERE, str(suspect)),
                clear=lambda iteration, loss: self.cleared.append((iteration, loss)),
            ),
            roll_back=lambda: restored,
        )


def test_valid_step_clears_suspects_silently():
    recorder = FaultsRecorder()
    recorder.faults.on_step_computed(Progress(iteration=4), Outcome(), math.inf)
    assert (recorder.messages, recorder.events, recorder.cleared) == ([], [], [(5, 2.0)])


@pytest.mark.parametrize(
    ("verdict", "flags", "stops"),
    [
        ("reproduced", "--on-reproduced-fault restart", True),
        ("reproduced", "", False),
        ("transient", "--on-reproduced-fault restart", False),
        ("undecided", "--on-reproduced-fault restart", False),
    ],
)
@pytest.mark.parametrize("kind", ["nan", "inf_norm", "spike"])
def test_only_reproduced_fault_stops_the_run_and_only_by_option(kind, verdict, flags, stops):
    recorder = FaultsRecorder(flags)
    outcome = Outcome(anomaly=anomaly(kind, verdict, values=(8.0, 8.0)))
    if stops:
        with pytest.raises(RunStopped, match=f"'1': 'host1'.*kind='{kind}'"):
            recorder.faults.on_step_computed(Progress(iteration=4), outcome, 4.0)
    else:
        recorder.faults.on_step_computed(Progress(iteration=4), outcome, 4.0)
    assert recorder.saves == ([4] if stops else []), "the save has the state before the step"
    assert ("the step was skipped" in recorder.messages[0]) == (
        verdict == "reproduced" and not stops
    )
    spike_values = {"loss": 8.0, "limit": 4.0} if kind == "spike" else {}
    assert recorder.events == [
        ("fault", 5, {kind: 1.0, verdict: 1.0, "first_rank": 1.0, **spike_values})
    ]
    assert recorder.cleared == ([(5, 2.0)] if verdict == "transient" else [])


def test_fault_record_has_host_names_and_exact_values(tmp_path):
    recorder = FaultsRecorder(save=str(tmp_path))
    for values in ((NAN, 0.1), (math.inf,)):
        outcome = Outcome(anomaly=anomaly(verdict="transient", ranks=(0, 1), values=values))
        recorder.faults.on_step_computed(Progress(iteration=4), outcome, math.inf)
    lines = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [line.pop("time")[-6:] for line in lines] == ["+00:00", "+00:00"]
    assert lines[0] == {
        "iteration": 5,
        "kind": "nan",
        "verdict": "transient",
        "ranks": {"0": "host0", "1": "host1"},
        "values": ["nan", 0.1],
        "bits": ["nan", (0.1).hex()],
    }
    assert lines[1]["values"] == lines[1]["bits"] == ["inf"]


def test_unwritable_fault_log_does_not_stop_the_run(tmp_path):
    recorder = FaultsRecorder(save=str(tmp_path / "absent"))
    recorder.faults.on_step_computed(Progress(), Outcome(anomaly=anomaly()), math.inf)
    assert "cannot be recorded in" in recorder.messages[1]
    assert len(recorder.events) == 1


def test_rollback_keeps_the_data_position():
    restored = Progress(iteration=2, consumed_samples=12, update_samples=12, recent_losses=[1.0])
    recorder = FaultsRecorder("--rollback-after-bad-steps 2", restored)
    progress = Progress(iteration=6, consumed_samples=36, update_samples=24)
    for num_bad_steps in (0, 1, 3):
        progress.consecutive_bad_steps = num_bad_steps
        recorder.faults.on_step_end(progress, Outcome())
    assert progress.rollbacks == 0
    progress.consecutive_bad_steps = 2
    recorder.faults.on_step_end(progress, Outcome())
    assert (progress.iteration, progress.consumed_samples) == (6, 36)
    assert (progress.update_samples, progress.rollbacks) == (12, 1)
    assert progress.recent_losses == [1.0]
    assert recorder.events == [("fault", 6, {"rolled_back_to": 2.0})]

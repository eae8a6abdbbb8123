# SPDX-License-Identifier: Apache-2.0
"""Hosts that compute wrongly: transient faults are recomputed, persistent ones exclude the
host."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.training import pretraining
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.planted_faults import run_with
from tests.functional_tests.small_run import (
    digests,
    flags,
    run_in_process,
    run_on,
    running,
    timeless,
)
from tests.support.planting import plant_fault

SIX_STEPS = "--train-iters 6 --eval-interval 0"
COMPARE_STEPS = "--rerun-mode report_determinism_stats"
EXPERTS = "--num-experts 4 --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01"
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def clean(prefix, tmp_path_factory) -> Callable[[int, str], Path]:
    """Return a function that runs without faults, once per options, and returns the save folder."""
    folders: dict[tuple[int, str], Path] = {}

    def save_folder(world: int, options: str) -> Path:
        if (world, options) not in folders:
            folders[world, options] = tmp_path_factory.mktemp("clean")
            run_on(world, flags(prefix, f"{options} --save {folders[world, options]}"))
        return folders[world, options]

    return save_folder


def faults_of(save: Path) -> list[dict]:
    """Return the entries of faults.jsonl without their times."""
    lines = (save / "faults.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def events_without_faults(save: Path) -> list[dict]:
    """Return the metrics events of a run, without faults."""
    return [event for event in timeless(save / "metrics.jsonl") if event["kind"] != "fault"]


@contextlib.contextmanager
def planted(words: str | None) -> Iterator[None]:
    """Plant a fault in the runs of this process, unless `words` is None."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(pretraining, "hooks_of", pretraining.hooks_of)
        if words is not None:
            plant_fault(words, 0)
        yield


def logged(argv: list[str], world: int = 2) -> str:
    """Run on ranks that must all succeed, and return the last rank's log."""
    with running(world, argv) as ranks:
        outcomes = ranks.outcomes(timeout=100)
        logs = [ranks.log(rank) for rank in range(world)]
    assert [outcome.exit_code for outcome in outcomes] == [0] * world, logs
    return logs[-1]


@pytest.mark.parametrize(
    ("layout", "expected_ranks"),
    [
        (f"--use-distributed-optimizer {EXPERTS}", {1}),
        pytest.param(
            f"--data-parallel-sharding-strategy optim_grads_params {EXPERTS}", {1},
            marks=pytest.mark.slow,
        ),
        pytest.param("--bf16", {1}, marks=pytest.mark.slow),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", {0, 1},
                     marks=pytest.mark.slow),
        pytest.param(f"--pipeline-model-parallel-size 2 {EXPERTS}", {1}, marks=pytest.mark.slow),
        pytest.param("--pipeline-model-parallel-size 2 --num-layers 4 "
                     "--num-virtual-stages-per-pipeline-rank 2", {1}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.covers("recomputed bad steps")
def test_transient_bit_flip_is_detected_and_leaves_same_weights(
    prefix, clean, tmp_path, layout, expected_ranks
):
    flipped = tmp_path / "flipped"
    argv = flags(prefix, f"{SIX_STEPS} {layout} {COMPARE_STEPS} --save {flipped}")
    outcomes, logs = run_with(partial(plant_fault, "activation@3:1"), argv, timeout=100)
    assert [outcome.exit_code for outcome in outcomes] == [0] * 2, logs
    text = logs[-1]
    assert "iteration 3: one of three computations of the step differs bitwise in the " in text
    assert "determinism: 6 steps were computed twice, 1 differed" in text
    (fault,) = faults_of(flipped)
    assert (fault["iteration"], fault["kind"], fault["verdict"]) == (3, "determinism", "transient")
    assert set(fault["ranks"]) == {str(rank) for rank in expected_ranks}
    assert set(fault["ranks"].values()) == {HOST}
    assert len(fault["bits"]) == 3
    assert fault["bits"][1] == fault["bits"][2] != fault["bits"][0]
    (event,) = [e for e in read_metrics(flipped / "metrics.jsonl") if e["kind"] == "fault"]
    assert event["first_rank"] == min(expected_ranks)
    uninterrupted = clean(2, f"{SIX_STEPS} {layout}")  # computes every step once
    assert events_without_faults(flipped) == events_without_faults(uninterrupted), (
        "expert loads must be counted once"
    )
    assert digests(flipped / "iter_0000006") == digests(uninterrupted / "iter_0000006")
    assert not (uninterrupted / "faults.jsonl").exists()


@pytest.mark.slow
def test_bit_flip_changes_weights_silently_without_comparison(prefix, tmp_path):
    """Without comparison, the flip reaches the weights."""
    run_digests = []
    for words in (None, "activation@3:0"):
        save = tmp_path / str(len(run_digests))
        with planted(words):
            assert run_in_process(flags(prefix, f"{SIX_STEPS} --save {save}")) == 0
        run_digests.append(digests(save / "iter_0000006"))
        assert not (save / "faults.jsonl").exists()
    assert run_digests[0] != run_digests[1]


@pytest.mark.slow
def test_rerun_interval_detects_only_faults_in_rerun_steps(prefix, tmp_path, capsys):
    base = f"--train-iters 8 --eval-interval 0 {COMPARE_STEPS} --rerun-interval 4"
    for iteration, num_differing in ((3, 0), (4, 1)):
        with planted(f"activation@{iteration}:0"):
            assert run_in_process(flags(prefix, f"{base} --save {tmp_path / str(iteration)}")) == 0
        message = f"determinism: 2 steps were computed twice, {num_differing} differed"
        assert message in capsys.readouterr().out


def plant_inf_gradient_once(rank: int) -> None:
    """Make a gradient of rank 1 Inf in the third computation, before the reduction."""
    from megatron.core.distributed import DataParallel

    finish_gradients, count = DataParallel.finish, [0]

    def finish(self):
        count[0] += 1
        if rank == 1 and count[0] == 3:
            self.buckets[0].blocks[0].trainable[0].main_grad.view(-1)[0] = math.inf
        finish_gradients(self)

    DataParallel.finish = finish


def plant_spike_once(rank: int) -> None:
    """Make the loss of rank 1 huge in the first computation of step 4."""
    from megatron.core.models import GPTModel

    loss_of, count = GPTModel.loss, [0]

    def spiky(self, *args, **kwargs):
        loss, nll = loss_of(self, *args, **kwargs)
        count[0] += 1
        return (loss * 50.0 if rank == 1 and count[0] == 7 else loss), nll

    GPTModel.loss = spiky


@pytest.mark.parametrize(
    ("plant", "iteration", "kind", "layout"),
    [
        (plant_inf_gradient_once, 3, "inf_norm", f"--use-distributed-optimizer {EXPERTS}"),
        pytest.param(plant_spike_once, 4, "spike", EXPERTS, marks=pytest.mark.slow),
    ],
)
@pytest.mark.covers("recomputed bad steps")
def test_transient_inf_gradient_or_loss_spike_is_recomputed(
    prefix, clean, tmp_path, plant, iteration, kind, layout
):
    glitched = tmp_path / "glitched"
    argv = flags(prefix, f"{SIX_STEPS} {layout} --loss-spike-factor 3 --save {glitched}")
    outcomes, logs = run_with(plant, [*argv, "--loss-spike-window", "4"])
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    assert f"of rank 1 on {HOST}; the step computed once more is sound and was used" in logs[1]
    (fault,) = faults_of(glitched)
    assert (fault["iteration"], fault["kind"], fault["verdict"]) == (iteration, kind, "transient")
    assert fault["ranks"] == {"1": HOST}
    uninterrupted = clean(2, f"{SIX_STEPS} {layout}")
    assert events_without_faults(glitched) == events_without_faults(uninterrupted)
    assert digests(glitched / "iter_0000006") == digests(uninterrupted / "iter_0000006")


def always_inf(monkeypatch) -> None:
    """Make every gradient norm from the third on Inf on this host."""
    from megatron.core.optimizer import Optimizer

    grad_norm, count = Optimizer.grad_norm, [0]

    def norm(self):
        count[0] += 1
        return math.inf if count[0] >= 3 else grad_norm(self)

    monkeypatch.setattr(Optimizer, "grad_norm", norm)


def always_high(monkeypatch) -> None:
    """Make every loss from the third step on a spike on this host."""
    from megatron.core.models import GPTModel

    loss_of, count = GPTModel.loss, [0]

    def high(self, *args, **kwargs):
        loss, nll = loss_of(self, *args, **kwargs)
        count[0] += 1
        return (loss * 50.0 if count[0] > 4 else loss), nll

    monkeypatch.setattr(GPTModel, "loss", high)


def always_nan(monkeypatch) -> None:
    """Make an activation NaN in every forward pass from the third step on."""
    monkeypatch.setattr(pretraining, "hooks_of", pretraining.hooks_of)
    plant_fault("nan-always@3:0", 0)


def on_machine(monkeypatch, host: str, argv: list[str], broken=None) -> int:
    """Run on a host named `host`, with the fault `broken` if given."""
    with monkeypatch.context() as context:
        context.setattr(socket, "gethostname", lambda: host)
        if broken is not None:
            broken(context)
        return run_in_process(argv)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("nan", always_nan),
        pytest.param("inf_norm", always_inf, marks=pytest.mark.slow),
        pytest.param("spike", always_high, marks=pytest.mark.slow),
    ],
)
@pytest.mark.covers("recomputed bad steps")
def test_faulty_machine_is_identified_and_excluded_from_restarts(
    prefix, clean, tmp_path, monkeypatch, capsys, kind, broken
):
    save, base = tmp_path / "save", f"--global-batch-size 4 {SIX_STEPS}"
    options = "--loss-spike-factor 3 --loss-spike-window 2 --on-reproduced-fault restart"
    argv = flags(prefix, f"{base} --save {save} --load {save} {options}")
    code = on_machine(monkeypatch, "bad", argv, broken)
    assert code == ExitCode.RESTART_ELSEWHERE == 16
    assert "start again on other machines to tell data from machine" in capsys.readouterr().err
    assert latest_checkpoint(save) == save / "iter_0000002"
    if kind == "nan":  # the other faults count from the start of the process
        assert on_machine(monkeypatch, "bad", argv, broken) == 16
        assert "as before, and again on bad" in capsys.readouterr().err
    assert on_machine(monkeypatch, "good", argv) == 0
    assert f"on bad it was not, twice ({kind}): persistent, listed in" in capsys.readouterr().out
    final_fault = faults_of(save)[-1]
    assert (final_fault["iteration"], final_fault["kind"], final_fault["verdict"]) == (
        3,
        kind,
        "persistent",
    )
    assert final_fault["ranks"] == {"0": "bad"}
    assert len(final_fault["bits"]) == 3
    assert final_fault["bits"][0] == final_fault["bits"][1] != final_fault["bits"][2]
    (entry,) = json.loads((save / "faulty_hosts.json").read_text())["hosts"]
    assert (entry["host"], entry["sound_on"]) == ("bad", ["good"])
    # No result of the bad host is left.
    assert digests(save / "iter_0000006") == digests(clean(1, base) / "iter_0000006")
    capsys.readouterr()
    again = [*argv, "--exit-interval", "1"]
    assert on_machine(monkeypatch, "bad", again) == 16
    printed = capsys.readouterr()
    assert "rank 0 is on bad, which gave a wrong iteration 3" in printed.err
    assert "iteration" not in printed.out, "not a step was taken"
    (save / "faulty_hosts.json").write_text('{"hosts": []}')
    assert on_machine(monkeypatch, "bad", again) == 0


@pytest.mark.slow
def test_all_ranks_end_if_one_is_on_a_faulty_host(prefix, tmp_path):
    (tmp_path / "faulty_hosts.json").write_text(json.dumps({"hosts": [{"host": HOST, "rank": 7}]}))
    with running(2, flags(prefix, f"{SIX_STEPS} --save {tmp_path}")) as ranks:
        outcomes = ranks.outcomes(timeout=100)
        text = "".join(ranks.log(rank) for rank in range(2))
    assert [outcome.exit_code for outcome in outcomes] == [ExitCode.RESTART_ELSEWHERE] * 2
    assert text.count(f"rank 0 is on {HOST}, which gave a wrong iteration") == 1
    assert not list(tmp_path.glob("iter_*"))

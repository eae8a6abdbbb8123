# SPDX-License-Identifier: Apache-2.0
"""Hosts that compute wrongly: transient faults are recomputed, persistent ones exclude the
host."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
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
    write_tokens,
)
from tests.support.planting import plant_fault

SIX_STEPS = "--train-iters 6 --eval-interval 0"
COMPARE_STEPS = "--rerun-mode report_determinism_stats"
EXPERTS = "--num-experts 4 --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01"
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


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


def plant_nan_loss_once(rank: int) -> None:
    """Make the loss of rank 1 NaN in the first computation of step 3."""
    from megatron.core.models import GPTModel

    loss_of, count = GPTModel.loss, [0]

    def glitch(self, *args, **kwargs):
        loss, nll = loss_of(self, *args, **kwargs)
        count[0] += 1
        return (loss * math.nan if rank == 1 and count[0] == 9 else loss), nll

    GPTModel.loss = glitch


@pytest.mark.parametrize(
    ("plant", "kind", "layout"),
    [
        (plant_inf_gradient_once, "inf_norm", f"--use-distributed-optimizer {EXPERTS}"),
        # Both ranks have the same data and must decide alike.
        (plant_nan_loss_once, "nan", "--tensor-model-parallel-size 2"),
    ],
)
@pytest.mark.covers("recomputed bad steps")
def test_transient_bad_step_is_recomputed_bit_exactly(prefix, clean, tmp_path, plant, kind, layout):
    glitched = tmp_path / "glitched"
    argv = flags(prefix, f"{SIX_STEPS} {layout} --save {glitched}")
    outcomes, logs = run_with(plant, argv)
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    assert f"of rank 1 on {HOST}; the step computed once more is sound and was used" in logs[1]
    (fault,) = faults_of(glitched)
    assert (fault["iteration"], fault["kind"], fault["verdict"]) == (3, kind, "transient")
    assert fault["ranks"] == {"1": HOST}
    uninterrupted = clean(2, f"{SIX_STEPS} {layout}")
    assert events_without_faults(glitched) == events_without_faults(uninterrupted)
    assert digests(glitched / "iter_0000006") == digests(uninterrupted / "iter_0000006")


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


@pytest.mark.covers("recomputed bad steps")
def test_faulty_machine_is_identified_and_excluded_from_restarts(
    prefix, clean, tmp_path, monkeypatch, capsys
):
    save, base = tmp_path / "save", f"--global-batch-size 4 {SIX_STEPS}"
    argv = flags(prefix, f"{base} --save {save} --load {save} --on-reproduced-fault restart")
    for _ in range(2):
        assert on_machine(monkeypatch, "bad", argv, always_nan) == ExitCode.RESTART_ELSEWHERE
        assert latest_checkpoint(save) == save / "iter_0000002"
    assert on_machine(monkeypatch, "good", argv) == 0
    fault = faults_of(save)[-1]
    assert (fault["iteration"], fault["kind"], fault["verdict"]) == (3, "nan", "persistent")
    assert fault["ranks"] == {"0": "bad"}
    assert len(fault["bits"]) == 3
    assert fault["bits"][0] == fault["bits"][1] != fault["bits"][2]
    (entry,) = json.loads((save / "faulty_hosts.json").read_text())["hosts"]
    assert (entry["host"], entry["sound_on"]) == ("bad", ["good"])
    # No result of the bad host is left.
    assert digests(save / "iter_0000006") == digests(clean(1, base) / "iter_0000006")
    capsys.readouterr()
    again = [*argv, "--exit-interval", "1"]
    assert on_machine(monkeypatch, "bad", again) == ExitCode.RESTART_ELSEWHERE
    printed = capsys.readouterr()
    assert "rank 0 is on bad, which gave a wrong iteration 3" in printed.err
    assert "iteration" not in printed.out, "not a step was taken"
    (save / "faulty_hosts.json").write_text('{"hosts": []}')
    assert on_machine(monkeypatch, "bad", again) == 0

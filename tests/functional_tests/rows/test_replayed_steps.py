# SPDX-License-Identifier: Apache-2.0
"""Machines that compute wrongly: once, so that nothing is lost, or always, so that they are left
out."""

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
    run_here,
    run_on,
    running,
    timeless,
    write_tokens,
)
from tests.support.planting import plant_fault

SIX = "--train-iters 6 --eval-interval 0"
TWICE = "--rerun-mode report_determinism_stats"
EXPERTS = "--num-experts 4 --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01"
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def clean(prefix, tmp_path_factory) -> Callable[[int, str], Path]:
    """Return what carries out a run without faults, once, and returns its save folder."""
    made: dict[tuple[int, str], Path] = {}

    def of(world: int, options: str) -> Path:
        if (world, options) not in made:
            made[world, options] = tmp_path_factory.mktemp("clean")
            run_on(world, flags(prefix, f"{options} --save {made[world, options]}"))
        return made[world, options]

    return of


def faults_of(save: Path) -> list[dict]:
    """Return the lines of faults.jsonl without their times."""
    lines = (save / "faults.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def sound(save: Path) -> list[dict]:
    """Return what a run learned and counted, without the faults."""
    return [event for event in timeless(save / "metrics.jsonl") if event["kind"] != "fault"]


@contextlib.contextmanager
def planted(words: str | None) -> Iterator[None]:
    """Plant a fault in the runs of this process, if there are words for one."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(pretraining, "hooks_of", pretraining.hooks_of)
        if words is not None:
            plant_fault(words, 0)
        yield


def logged(argv: list[str], world: int = 2) -> str:
    """Run on ranks that all end well, and return what the last one shows."""
    with running(world, argv) as ranks:
        found = ranks.outcomes(timeout=100)
        logs = [ranks.log(rank) for rank in range(world)]
    assert [outcome.exit_code for outcome in found] == [0] * world, logs
    return logs[-1]


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (f"--use-distributed-optimizer {EXPERTS}", {1}),
        pytest.param("--data-parallel-sharding-strategy no_shard", {1}, marks=pytest.mark.slow),
        pytest.param(
            f"--data-parallel-sharding-strategy optim_grads_params {EXPERTS}", {1},
            marks=pytest.mark.slow,
        ),
        pytest.param("--recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1", {1}, marks=pytest.mark.slow),
        pytest.param("--mtp-num-layers 1", {1}, marks=pytest.mark.slow),
        pytest.param("--bf16", {1}, marks=pytest.mark.slow),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", {0, 1},
                     marks=pytest.mark.slow),
        pytest.param(f"--pipeline-model-parallel-size 2 {EXPERTS}", {1}, marks=pytest.mark.slow),
        pytest.param("--pipeline-model-parallel-size 2 --num-layers 4 "
                     "--num-virtual-stages-per-pipeline-rank 2", {1}, marks=pytest.mark.slow),
        pytest.param("--context-parallel-size 2", {0, 1}, marks=pytest.mark.slow),
        pytest.param(f"--expert-model-parallel-size 2 {EXPERTS}", {1}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.covers("bad step computed again")
def test_transient_bit_flip_is_detected_and_leaves_same_weights(
    prefix, clean, tmp_path, layout, named
):
    flipped = tmp_path / "flipped"
    argv = flags(prefix, f"{SIX} {layout} {TWICE} --save {flipped}")
    found, logs = run_with(partial(plant_fault, "activation@3:1"), argv, timeout=100)
    assert [outcome.exit_code for outcome in found] == [0] * 2, logs
    text = logs[-1]
    assert "iteration 3: one of three computations of the step has other bits: that of " in text
    assert "determinism: 6 steps were computed twice, 1 differed" in text
    (fault,) = faults_of(flipped)
    assert (fault["iteration"], fault["kind"], fault["verdict"]) == (3, "determinism", "transient")
    assert set(fault["ranks"]) == {str(rank) for rank in named}
    assert set(fault["ranks"].values()) == {HOST}
    assert len(fault["bits"]) == 3
    assert fault["bits"][1] == fault["bits"][2] != fault["bits"][0]
    (event,) = [e for e in read_metrics(flipped / "metrics.jsonl") if e["kind"] == "fault"]
    assert event["first_rank"] == min(named)
    whole = clean(2, f"{SIX} {layout}")  # which computes every step once
    assert sound(flipped) == sound(whole), "loads of experts are counted once"
    assert digests(flipped / "iter_0000006") == digests(whole / "iter_0000006")
    assert not (whole / "faults.jsonl").exists()


@pytest.mark.slow
def test_bit_flip_changes_weights_silently_without_comparison(prefix, tmp_path):
    """So the flip above does reach the weights."""
    ran = []
    for words in (None, "activation@3:0"):
        save = tmp_path / str(len(ran))
        with planted(words):
            assert run_here(flags(prefix, f"{SIX} --save {save}")) == 0
        ran.append(digests(save / "iter_0000006"))
        assert not (save / "faults.jsonl").exists()
    assert ran[0] != ran[1]


@pytest.mark.slow
def test_comparing_every_few_steps_finds_what_is_in_them(prefix, tmp_path, capsys):
    base = f"--train-iters 8 --eval-interval 0 {TWICE} --rerun-interval 4"
    for iteration, differed in ((3, 0), (4, 1)):
        with planted(f"activation@{iteration}:0"):
            assert run_here(flags(prefix, f"{base} --save {tmp_path / str(iteration)}")) == 0
        said = f"determinism: 2 steps were computed twice, {differed} differed"
        assert said in capsys.readouterr().out


def plant_inf_gradient_once(rank: int) -> None:
    """A gradient of rank 1 is Inf in the third computation, before gradients are summed."""
    from megatron.core.distributed import DataParallel

    whole, count = DataParallel.finish, [0]

    def finish(self):
        count[0] += 1
        if rank == 1 and count[0] == 3:
            self.buckets[0].blocks[0].trainable[0].main_grad.view(-1)[0] = math.inf
        whole(self)

    DataParallel.finish = finish


def plant_spike_once(rank: int) -> None:
    """The loss of rank 1 is huge in the fourth step's first computation."""
    from megatron.core.models.gpt import GPTModel

    whole, count = GPTModel.loss, [0]

    def spiky(self, *arguments, **named):
        loss, nll = whole(self, *arguments, **named)
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
@pytest.mark.covers("bad step computed again")
def test_transient_inf_gradient_or_loss_spike_is_recomputed(
    prefix, clean, tmp_path, plant, iteration, kind, layout
):
    glitched = tmp_path / "glitched"
    argv = flags(prefix, f"{SIX} {layout} --loss-spike-factor 3 --save {glitched}")
    found, logs = run_with(plant, [*argv, "--loss-spike-window", "4"])
    assert [o.exit_code for o in found] == [0, 0], logs
    assert f"of rank 1 on {HOST}; the step computed once more is sound and was used" in logs[1]
    (fault,) = faults_of(glitched)
    assert (fault["iteration"], fault["kind"], fault["verdict"]) == (iteration, kind, "transient")
    assert fault["ranks"] == {"1": HOST}
    whole = clean(2, f"{SIX} {layout}")
    assert sound(glitched) == sound(whole)
    assert digests(glitched / "iter_0000006") == digests(whole / "iter_0000006")


def always_inf(monkeypatch) -> None:
    """Every gradient norm from the third on is Inf on this machine."""
    from megatron.core.optimizer import Optimizer

    whole, count = Optimizer.grad_norm, [0]

    def norm(self):
        count[0] += 1
        return math.inf if count[0] >= 3 else whole(self)

    monkeypatch.setattr(Optimizer, "grad_norm", norm)


def always_high(monkeypatch) -> None:
    """Every loss from the third step on is a spike on this machine."""
    from megatron.core.models.gpt import GPTModel

    whole, count = GPTModel.loss, [0]

    def high(self, *arguments, **named):
        loss, nll = whole(self, *arguments, **named)
        count[0] += 1
        return (loss * 50.0 if count[0] > 4 else loss), nll

    monkeypatch.setattr(GPTModel, "loss", high)


def always_nan(monkeypatch) -> None:
    """An activation is NaN in every forward from the third step on."""
    monkeypatch.setattr(pretraining, "hooks_of", pretraining.hooks_of)
    plant_fault("nan-always@3:0", 0)


def on_machine(monkeypatch, host: str, argv: list[str], broken=None) -> int:
    """Run on a machine of that name, broken or not."""
    with monkeypatch.context() as context:
        context.setattr(socket, "gethostname", lambda: host)
        if broken is not None:
            broken(context)
        return run_here(argv)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("nan", always_nan),
        pytest.param("inf_norm", always_inf, marks=pytest.mark.slow),
        pytest.param("spike", always_high, marks=pytest.mark.slow),
    ],
)
@pytest.mark.covers("bad step computed again")
def test_faulty_machine_is_identified_and_excluded_from_restarts(
    prefix, clean, tmp_path, monkeypatch, capsys, kind, broken
):
    save, base = tmp_path / "save", f"--global-batch-size 4 {SIX}"
    more = "--loss-spike-factor 3 --loss-spike-window 2 --on-reproduced-fault restart"
    argv = flags(prefix, f"{base} --save {save} --load {save} {more}")
    code = on_machine(monkeypatch, "bad", argv, broken)
    assert code == ExitCode.RESTART_ELSEWHERE == 16
    assert "start again on other machines to tell data from machine" in capsys.readouterr().err
    assert latest_checkpoint(save) == save / "iter_0000002"
    if kind == "nan":  # in the other two what is planted counts from the start of the process
        assert on_machine(monkeypatch, "bad", argv, broken) == 16
        assert "as before, and again on bad" in capsys.readouterr().err
    assert on_machine(monkeypatch, "good", argv) == 0
    assert f"on bad it was not, twice ({kind}): persistent, listed in" in capsys.readouterr().out
    last = faults_of(save)[-1]
    assert (last["iteration"], last["kind"], last["verdict"]) == (3, kind, "persistent")
    assert last["ranks"] == {"0": "bad"}
    assert len(last["bits"]) == 3
    assert last["bits"][0] == last["bits"][1] != last["bits"][2]
    (entry,) = json.loads((save / "faulty_hosts.json").read_text())["hosts"]
    assert (entry["host"], entry["sound_on"]) == ("bad", ["good"])
    # Nothing of what the bad machine computed is left.
    assert digests(save / "iter_0000006") == digests(clean(1, base) / "iter_0000006")
    capsys.readouterr()
    again = [*argv, "--exit-interval", "1"]
    assert on_machine(monkeypatch, "bad", again) == 16
    shown = capsys.readouterr()
    assert "rank 0 is on bad, which gave a wrong iteration 3" in shown.err
    assert "iteration" not in shown.out, "not a step was taken"
    (save / "faulty_hosts.json").write_text('{"hosts": []}')
    assert on_machine(monkeypatch, "bad", again) == 0


@pytest.mark.slow
def test_every_rank_ends_if_one_is_on_a_listed_machine(prefix, tmp_path):
    (tmp_path / "faulty_hosts.json").write_text(json.dumps({"hosts": [{"host": HOST, "rank": 7}]}))
    with running(2, flags(prefix, f"{SIX} --save {tmp_path}")) as ranks:
        found = ranks.outcomes(timeout=100)
        text = "".join(ranks.log(rank) for rank in range(2))
    assert [outcome.exit_code for outcome in found] == [ExitCode.RESTART_ELSEWHERE] * 2
    assert text.count(f"rank 0 is on {HOST}, which gave a wrong iteration") == 1
    assert not list(tmp_path.glob("iter_*"))

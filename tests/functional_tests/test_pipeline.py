# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel runs: every schedule matches one process, also with other features."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.training import step
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.planted_faults import run_with
from tests.functional_tests.small_run import (
    digests,
    flags,
    losses,
    run_on,
    running,
)

PP = "--pipeline-model-parallel-size 2"
#: Four layers, a tied embedding, and all statistics that are reduced over stages.
SHORT = (
    "--num-layers 4 --no-untie-embeddings-and-output-weights --train-iters 4 --eval-interval 2 "
    "--log-params-norm --log-num-zeros-in-grad"
)
LONG = "--train-iters 3000 --lr-decay-iters 40 --eval-interval 7"


@pytest.fixture(scope="module")
def single_rank(prefix, tmp_path_factory) -> Path:
    """Return the metrics of a single process."""
    metrics = tmp_path_factory.mktemp("alone") / "metrics.jsonl"
    run_on(1, flags(prefix, f"{SHORT} --metrics-file {metrics}"))
    return metrics


def measured(metrics: Path) -> dict[str, list[float]]:
    """Return the statistics of weights and gradients that a run logged, in order."""
    names = ("grad_norm", "params_norm", "num_zeros", "learning_rate")
    events = read_metrics(metrics)
    return {name: [event[name] for event in events if name in event] for name in names}


def print_executed_kinds(rank: int) -> None:
    """Print the kinds of actions that a stage has executed."""
    run_schedule = step.Executor.run

    def run(self: step.Executor) -> None:
        run_schedule(self)
        kinds = {a.kind.value for a in self.schedule.ranks[self.group.rank]}
        print(
            f"ran {self.schedule.name} in {self.schedule.chunks}: {' '.join(sorted(kinds))}",
            flush=True,
        )

    step.Executor.run = run


@pytest.mark.parametrize(
    ("ran", "world", "options"),
    [
        ("1f1b in 1: B F RB SF", 2, ""),
        ("zb-h1 in 1: F I RB SF W", 2, "--pipeline-schedule zb-h1 --check-collectives"),
        (
            "interleaved in 2: B F G R RB RF SB SF",
            4,
            "--num-layers-per-virtual-pipeline-stage 1 --check-weight-gather "
            "--microbatch-group-size-per-virtual-pipeline-stage 2 "
            "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather "
            "--log-straggler --overlap-grad-reduce --recompute-granularity selective",
        ),
    ],
    ids=["1f1b", "zb-h1", "interleaved"],
)
@pytest.mark.covers("matches a single process")
@pytest.mark.gpus("world")
def test_every_schedule_matches_one_process(prefix, tmp_path, single_rank, ran, world, options):
    metrics = tmp_path / "metrics.jsonl"
    argv = flags(prefix, f"{SHORT} {PP} {options} --metrics-file {metrics}")
    outcomes, logs = run_with(print_executed_kinds, argv, world=world)
    assert [o.exit_code for o in outcomes] == [0] * world, logs
    assert logs[0].count(f"ran {ran}\n") == 4, logs[0]
    assert logs[-1].count("ran forward in ") == 3 * 2, "validation, a step's microbatches at a time"
    for kind, count in (("train", 4), ("validation", 3)):
        actual = losses(metrics, kind)
        assert len(actual) == count
        assert actual == pytest.approx(losses(single_rank, kind), rel=1e-6)
    expected = measured(single_rank)
    assert {len(values) for values in expected.values()} == {4}
    for name, values in measured(metrics).items():
        assert values == pytest.approx(expected[name], rel=1e-5), name
    initial_loss, *_, final_loss = losses(single_rank).values()
    assert final_loss < initial_loss - 0.1, "the model has not learnt anything"


def test_log_describes_stages_and_bubble(prefix, tmp_path):
    options = f"{SHORT} {PP} --pipeline-schedule zb-h1 --train-iters 1 --lr-warmup-iters 0"
    argv = flags(
        prefix,
        f"{options} --profile --use-pytorch-profiler --profile-ranks 0 1 "
        f"--profile-step-start 0 --profile-step-end 1 --profile-dir {tmp_path / 'traces'}",
    )
    with running(2, argv) as ranks:
        outcomes = ranks.outcomes(timeout=60)
        text, log_of_rank_0 = ranks.log(1), ranks.log(0)
    assert [o.exit_code for o in outcomes] == [0, 0], text
    whole = 4 * (2 * 48 + 48 * 96 + 48 * 48 + 3 * 48 * 64) + 48 + 61 * 48
    assert f"{whole:,} parameters in float32" in text
    assert "pipeline parallel 2 (zb-h1), 2|2 layers, data parallel 1 (no_shard)" in text
    # (p - 1)(F + I - W) of m (F + I + W) + (p - 1)(F + I - W), all of them 1
    assert (
        "pipeline: zb-h1, 2 stages of 2|2 layers, 4 microbatches, bubble 7.7 % if a layer's input "
        "and weight gradients take as long as its forward"
    ) in text
    assert "per rank at most " in text
    assert "lm loss" not in log_of_rank_0
    assert len(list((tmp_path / "traces").rglob("*.json*"))) == 2, "a trace of each stage"


@pytest.mark.covers("graceful stop with a save")
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(2)
def test_stopped_pipeline_run_resumes_on_one_process(prefix, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with running(2, flags(prefix, f"{LONG} {PP} --save {cut}")) as ranks:
        ranks.wait_for_line(1, "iteration        3/", timeout=60)
        ranks.kill(0, signal.SIGTERM)
        outcomes = ranks.outcomes(timeout=60)
        text = ranks.log(1)
    assert [o.exit_code for o in outcomes] == [0, 0], text
    match = re.search(r"stopped at iteration (\d+) because a signal asks", text)
    assert match, text
    end = int(match[1]) + 2
    assert latest_checkpoint(cut) == cut / f"iter_{end - 2:07d}"
    run_on(1, flags(prefix, f"{LONG} --save {cut} --load {cut} --exit-interval {end}"))
    run_on(1, flags(prefix, f"{LONG} --save {whole} --exit-interval {end}"))
    name = f"iter_{end:07d}"
    assert losses(cut / "metrics.jsonl") == pytest.approx(losses(whole / "metrics.jsonl"), rel=1e-5)
    assert digests(cut / name).keys() == digests(whole / name).keys()

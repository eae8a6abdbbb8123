# SPDX-License-Identifier: Apache-2.0
"""Runs that resume on fewer or more processes keep the global batch and match the losses of an
uninterrupted single process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import (
    flags,
    losses,
    run_in_process,
    running,
    write_tokens,
)

COMMON = "--train-iters 6 --eval-interval 3 --eval-iters 2"
UNEVEN = "--allow-uneven-batch"
TP_PAIRS = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def _assert_same(resumed: Path, reference: Path) -> None:
    """Assert that two runs have equal losses and consumed samples."""
    for kind in ("train", "validation"):
        expected = losses(reference, kind)
        actual = losses(resumed, kind)
        assert actual.keys() == expected.keys()
        for iteration, loss in actual.items():
            assert loss == pytest.approx(expected[iteration], rel=1e-6), (kind, iteration)

    def counted(metrics: Path) -> list[tuple]:
        names = ("iteration", "consumed_samples", "global_batch_size", "learning_rate")
        events = [e for e in read_metrics(metrics) if e["kind"] == "train"]
        return [tuple(event[name] for name in names) for event in events]

    assert counted(resumed) == counted(reference)


#: Processes, options, exit iteration and expected log line of each phase.
PHASES = (
    (4, "", 2, "global batch 8 = 4 x 2 x 1 microbatches"),
    (
        3,
        UNEVEN,
        4,
        "uneven batch: 4 microbatches of 2, on 3 data-parallel ranks, 2 each, 1 padding "
        "microbatch on ranks 1-2; 33.3 % of their time is wasted",
    ),
    (4, f"{UNEVEN} {TP_PAIRS}", 6, "global batch 8 = 2 x 2 x 2 microbatches"),
)


@pytest.mark.timeout(300)
@pytest.mark.covers("matches a single process")
@pytest.mark.covers("resume on another layout")
def test_run_on_4_ranks_resumes_on_3_and_on_tp2_dp2(prefix, tmp_path):
    """Train with dropout, Adam, clipping, and validation on each number of processes."""
    uninterrupted, resumed = tmp_path / "whole.jsonl", tmp_path / "parts"
    assert run_in_process(flags(prefix, f"{COMMON} --metrics-file {uninterrupted}")) == 0
    expected = losses(uninterrupted)
    assert expected[6] < expected[2] - 0.1, "the model has not learnt anything"
    for world, options, exit_iteration, message in PHASES:
        flags_of_phase = (
            f"{COMMON} {options} --save {resumed} --load {resumed} --exit-interval {exit_iteration}"
        )
        with running(world, flags(prefix, flags_of_phase)) as ranks:
            outcomes = ranks.outcomes(timeout=100)
            logs = "".join(ranks.log(rank) for rank in range(world))
        assert [o.exit_code for o in outcomes] == [0] * world, logs
        assert message in logs, logs
    _assert_same(resumed / "metrics.jsonl", uninterrupted)


def test_implicit_global_batch_size_change_is_refused(prefix, tmp_path, capsys):
    """Without --global-batch-size the batch would follow the number of processes."""
    save = tmp_path / "save"
    short = "--train-iters 3 --eval-interval 0"
    argv = flags(prefix, f"{short} --exit-interval 1 --save {save}")
    assert run_in_process(argv) == 0
    without = flags(prefix, f"{short} --load {save}")
    index = without.index("--global-batch-size")
    del without[index : index + 2]
    capsys.readouterr()
    assert run_in_process(without) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--global-batch-size 8" in err
    assert run_in_process([*without, "--global-batch-size", "2"]) == 0

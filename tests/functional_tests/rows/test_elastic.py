# SPDX-License-Identifier: Apache-2.0
"""Runs that resume on fewer or more processes keep the global batch and match the losses of an
uninterrupted single process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.training import checkpoint, pretrain_gpt, train_steps
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import (
    flags,
    losses,
    run_in_process,
    running,
)
from tests.support.ranks import Outcome, start_ranks

COMMON = "--train-iters 6 --eval-interval 3 --eval-iters 2"
UNEVEN = "--allow-uneven-batch"
TP_PAIRS = "--tensor-model-parallel-size 2 --sequence-parallel"


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


@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(300)
def test_checkpoint_after_layout_change_compares_equal(prefix, tmp_path, capsys):
    """Use biases of attention keys, whose gradient is zero in exact arithmetic."""
    biased = "--position-embedding-type learned_absolute --max-position-embeddings 24"
    common = f"--train-iters 6 --eval-interval 0 --lr 1e-3 {biased}"
    left_out = ("--disable-bias-linear", "--normalization", "--swiglu")
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "parts"
    assert run_in_process(flags(prefix, f"{common} --save {uninterrupted}", without=left_out)) == 0
    for options, exit_iteration in (("", 3), (TP_PAIRS, 6)):
        flags_of_phase = (
            f"{common} {options} --save {resumed} --load {resumed} --exit-interval {exit_iteration}"
        )
        with running(2, flags(prefix, flags_of_phase, without=left_out)) as ranks:
            assert [o.exit_code for o in ranks.outcomes(timeout=100)] == [0, 0], ranks.log(0)
    capsys.readouterr()
    code = checkpoint.main(["compare", str(uninterrupted), str(resumed), "--tolerance", "1e-5"], {})
    out = capsys.readouterr().out
    assert code == 0, out
    rounding = out.partition("which does not count:\n  decoder")[2]
    assert rounding.count("attention.key.bias: ") == 6, "two layers, two moments each"


def _counted_rank(
    rank: int, world: int, port: int, argv: list[str], counts: list[int], dies_in: int
) -> NoReturn:
    """Run a rank with the launcher's restart count; rank 1 exits in step `dies_in`."""
    take_step = train_steps.SessionSteps.take_step
    steps = [0]

    def dying(self, *args, **kwargs):
        steps[0] += 1
        if rank == 1 and steps[0] == dies_in:
            os._exit(9)
        return take_step(self, *args, **kwargs)

    train_steps.SessionSteps.take_step = dying
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(counts[rank]),
    }
    code = pretrain_gpt.main(argv, environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(
    port: int, argv: list[str], counts: list[int], dies_in: int
) -> tuple[list[Outcome], str]:
    world = len(counts)
    with start_ranks(_counted_rank, world, port, argv, counts, dies_in, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=100)
        return outcomes, "".join(ranks.log(rank) for rank in range(world))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_restarted_launcher_resumes_after_losing_a_node(prefix, tmp_path):
    """No --load is given, and the launchers of the nodes count restarts differently."""
    uninterrupted, save = tmp_path / "whole.jsonl", tmp_path / "save"
    plain = "--train-iters 4 --eval-interval 0"
    assert run_in_process(flags(prefix, f"{plain} --metrics-file {uninterrupted}")) == 0
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = flags(prefix, f"{plain} {UNEVEN} --save {save} --save-interval 1")
    outcomes, logs = _start(server.port, argv, [0, 0, 0], 3)
    assert outcomes[1].exit_code == 9
    assert latest_checkpoint(save) == save / "iter_0000002"
    # Node 0 saw the failure; node 1 was restarted because a third node had left.
    outcomes, logs = _start(server.port, argv, [1, 0], 0)
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    assert f"loaded {save / 'iter_0000002'}; resuming at iteration 2" in logs
    assert "restart 1 by the launcher" in logs
    _assert_same(save / "metrics.jsonl", uninterrupted)


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

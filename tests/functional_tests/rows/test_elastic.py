# SPDX-License-Identifier: Apache-2.0
"""A run that goes on with fewer processes and with more: the global batch stays, and the losses are
those of a single process that was never interrupted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing import latest_checkpoint, read_extra
from megatron.training import checkpoint, pretrain_gpt, session
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import (
    flags,
    losses,
    run_here,
    running,
    write_tokens,
)
from tests.functional_tests.torchrun_job import torchrun
from tests.support.ranks import Outcome, start_ranks

COMMON = "--train-iters 6 --eval-interval 3 --eval-iters 2"
UNEVEN = "--allow-uneven-batch"
PAIRS = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def _assert_same(resumed: Path, reference: Path) -> None:
    """See that a run has the losses of another, and has consumed as many samples."""
    for kind in ("train", "validation"):
        expected = losses(reference, kind)
        got = losses(resumed, kind)
        assert got.keys() == expected.keys()
        for iteration, loss in got.items():
            assert loss == pytest.approx(expected[iteration], rel=1e-6), (kind, iteration)

    def counted(metrics: Path) -> list[tuple]:
        names = ("iteration", "consumed_samples", "global_batch_size", "learning_rate")
        events = [e for e in read_metrics(metrics) if e["kind"] == "train"]
        return [tuple(event[name] for name in names) for event in events]

    assert counted(resumed) == counted(reference)


#: Processes, options and last iteration of each part, and what its log says.
PARTS = (
    (4, "", 2, "global batch 8 = 4 x 2 x 1 microbatches"),
    (
        3,
        UNEVEN,
        4,
        "uneven batch: 4 microbatches of 2, on 3 data-parallel ranks, 2 each, 1 padding "
        "microbatch on ranks 1-2; 33.3 % of their time is wasted",
    ),
    (4, f"{UNEVEN} {PAIRS}", 6, "global batch 8 = 2 x 2 x 2 microbatches"),
)


@pytest.mark.timeout(300)
@pytest.mark.covers("numbers of one process", runs="ranks")
@pytest.mark.covers("resumed on another layout", runs="loads")
def test_a_run_of_four_goes_on_as_three_and_as_two_pairs(prefix, tmp_path):
    """With dropout, Adam, clipping, and validation on each number of processes."""
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts"
    assert run_here(flags(prefix, f"{COMMON} --metrics-file {whole}")) == 0
    expected = losses(whole)
    assert expected[6] < expected[2] - 0.1, "the model has not learnt anything"
    for world, options, last, said in PARTS:
        more = f"{COMMON} {options} --save {parts} --load {parts} --exit-interval {last}"
        with running(world, flags(prefix, more)) as ranks:
            found = ranks.outcomes(timeout=100)
            logs = "".join(ranks.log(rank) for rank in range(world))
        assert [o.exit_code for o in found] == [0] * world, logs
        assert said in logs, logs
    _assert_same(parts / "metrics.jsonl", whole)


@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(300)
def test_a_run_on_other_layouts_compares_equal(prefix, tmp_path, capsys):
    """With biases on the keys of attention, whose gradient is zero in exact arithmetic."""
    biased = "--position-embedding-type learned_absolute --max-position-embeddings 24"
    common = f"--train-iters 6 --eval-interval 0 --lr 1e-3 {biased}"
    left_out = ("--disable-bias-linear", "--normalization", "--swiglu")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_here(flags(prefix, f"{common} --save {whole}", without=left_out)) == 0
    for options, last in (("", 3), (PAIRS, 6)):
        more = f"{common} {options} --save {parts} --load {parts} --exit-interval {last}"
        with running(2, flags(prefix, more, without=left_out)) as ranks:
            assert [o.exit_code for o in ranks.outcomes(timeout=100)] == [0, 0], ranks.log(0)
    capsys.readouterr()
    code = checkpoint.main(["compare", str(whole), str(parts), "--tolerance", "1e-5"], {})
    out = capsys.readouterr().out
    assert code == 0, out
    rounding = out.partition("which does not count:\n  decoder")[2]
    assert rounding.count("attention.key.bias: ") == 6, "two layers, two moments each"


def _counted_rank(
    rank: int, world: int, port: int, argv: list[str], counts: list[int], dies_in: int
) -> NoReturn:
    """Be a rank to whom its launcher tells a count of restarts; rank 1 may die in a step."""
    whole = session.SessionSteps.take_step
    steps = [0]

    def dying(self, *arguments, **named):
        steps[0] += 1
        if rank == 1 and steps[0] == dies_in:
            os._exit(9)
        return whole(self, *arguments, **named)

    session.SessionSteps.take_step = dying
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
        found = ranks.outcomes(timeout=100)
        return found, "".join(ranks.log(rank) for rank in range(world))


@pytest.mark.timeout(300)
def test_a_launcher_that_loses_a_machine_goes_on_by_itself(prefix, tmp_path):
    """Without --load, although the launchers of machines count restarts differently."""
    whole, save = tmp_path / "whole.jsonl", tmp_path / "save"
    plain = "--train-iters 4 --eval-interval 0"
    assert run_here(flags(prefix, f"{plain} --metrics-file {whole}")) == 0
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = flags(prefix, f"{plain} {UNEVEN} --save {save} --save-interval 1")
    found, logs = _start(server.port, argv, [0, 0, 0], 3)
    assert found[1].exit_code == 9
    assert latest_checkpoint(save) == save / "iter_0000002"
    # The first machine saw the failure; the other was restarted as a third one had left.
    found, logs = _start(server.port, argv, [1, 0], 0)
    assert [o.exit_code for o in found] == [0, 0], logs
    assert f"loaded {save / 'iter_0000002'}; resuming at iteration 2" in logs
    assert "restart 1 by the launcher" in logs
    _assert_same(save / "metrics.jsonl", whole)


def test_implicit_global_batch_size_change_is_refused(prefix, tmp_path, capsys):
    """Without --global-batch-size it would follow the number of processes."""
    save = tmp_path / "save"
    once = "--train-iters 3 --eval-interval 0"
    argv = flags(prefix, f"{once} --exit-interval 1 --save {save}")
    assert run_here(argv) == 0
    without = flags(prefix, f"{once} --load {save}")
    at = without.index("--global-batch-size")
    del without[at : at + 2]
    capsys.readouterr()
    assert run_here(without) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        "the checkpoint's global batch is 8, and this run's would be 2, as it follows the number "
        "of processes: give --global-batch-size 8 to keep it, or 2 to change it" in said
    ), said
    assert run_here([*without, "--global-batch-size", "2"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_jobs_of_the_launcher_four_then_three_then_four(prefix, tmp_path):
    whole, save = tmp_path / "whole.jsonl", tmp_path / "save"
    common = "--train-iters 9 --eval-interval 3"
    assert run_here(flags(prefix, f"{common} --metrics-file {whole}")) == 0
    for processes, last in ((4, 3), (3, 6), (4, 9)):
        more = f"{common} {UNEVEN} --save {save} --load {save} --exit-interval {last}"
        job = torchrun(flags(prefix, more), "--standalone", processes=processes)
        output, _ = job.communicate(timeout=120)
        assert job.returncode == 0, output
        assert ("uneven batch" in output) == (processes == 3)
    _assert_same(save / "metrics.jsonl", whole)
    assert read_extra(save / "iter_0000009")["progress"]["consumed_samples"] == 72

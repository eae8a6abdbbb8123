# SPDX-License-Identifier: Apache-2.0
"""User errors on one rank, and runs whose loss stays NaN."""

from __future__ import annotations

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from tests.functional_tests.planted_faults import on_microbatch, run_with
from tests.functional_tests.small_run import flags, run_in_process, write_tokens


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def plant_bad_microbatch(rank: int) -> None:
    def fail(batch):
        raise ValueError("the sixth microbatch is bad:\n mend it")

    if rank == 1:
        on_microbatch(6, fail)


def test_error_on_one_rank_is_printed_once_by_that_rank(prefix):
    options = "--train-iters 100000 --lr-decay-iters 40 --eval-interval 0"
    outcomes, logs = run_with(plant_bad_microbatch, flags(prefix, options))
    assert [o.exit_code for o in outcomes] == [ExitCode.PEER_LOST, ExitCode.USER_ERROR], logs
    error_lines = [line for log in logs for line in log.splitlines() if "sixth microbatch" in line]
    assert error_lines == ["pretrain_gpt: error: the sixth microbatch is bad: mend it"]
    assert "Traceback" not in "".join(logs)
    assert abs(outcomes[0].at - outcomes[1].at) < 5.0


def test_endless_nan_stops_run_and_keeps_last_good_checkpoint(prefix, tmp_path, capsys):
    save = tmp_path / "save"
    options = "--eval-interval 0 --save-interval 1 --lr 1e30 --clip-grad 0 --lr-warmup-iters 2"
    code = run_in_process(flags(prefix, f"{options} --max-consecutive-bad-steps 3 --save {save}"))
    printed = capsys.readouterr()
    assert code == ExitCode.BAD_STEPS, printed
    assert "3 steps in a row had a NaN or Inf loss or gradient norm" in printed.err
    assert printed.err.count("\n") == 1
    assert "number of skipped iterations:   1 |" in printed.out
    verify_checkpoint(latest_checkpoint(save))

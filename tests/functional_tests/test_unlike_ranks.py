# SPDX-License-Identifier: Apache-2.0
"""Ranks started with different options, which separate scripts on each node make likely."""

from __future__ import annotations

import functools

from megatron.cli.errors import ExitCode
from tests.functional_tests.small_run import flags, rank_process, running, write_tokens


def _unlike(rank: int, world: int, port: int, argv: list[str], *, rank_1_flags: str) -> None:
    rank_process(rank, world, port, [*argv, *rank_1_flags.split()] if rank else argv)


def test_run_with_different_options_per_rank_is_refused(tmp_path):
    prefix, save = write_tokens(tmp_path / "tokens"), tmp_path / "save"
    process = functools.partial(_unlike, rank_1_flags="--lr 1e-3")
    with running(2, flags(prefix, f"--save {save}"), process=process) as ranks:
        codes = [outcome.exit_code for outcome in ranks.outcomes(timeout=60)]
        output = "".join(ranks.log(rank) for rank in range(2))
    assert codes == [ExitCode.USER_ERROR] * 2, output
    (error,) = [line for line in output.splitlines() if "error: " in line]
    assert "--lr is 0.005 on rank 0 and 0.001 on rank 1" in error
    assert not save.exists()

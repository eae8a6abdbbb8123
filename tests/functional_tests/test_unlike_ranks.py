# SPDX-License-Identifier: Apache-2.0
"""Ranks started with different options, which separate scripts on each node make likely."""

from __future__ import annotations

import functools

import pytest

from megatron.cli.errors import ExitCode
from tests.functional_tests.small_run import flags, rank_process, running, write_tokens


def _unlike(rank: int, world: int, port: int, argv: list[str], *, rank_1_flags: str) -> None:
    rank_process(rank, world, port, [*argv, *rank_1_flags.split()] if rank else argv)


@pytest.mark.parametrize(
    ("model", "rank_1_flags", "message"),
    [
        ("", "--lr 1e-3", "--lr is 0.005 on rank 0 and 0.001 on rank 1"),
        (
            "--hybrid-layer-pattern G-*-",
            "--norm-epsilon 1e-6",
            "--norm-epsilon is 1e-05 on rank 0 and 1e-06 on rank 1",
        ),
    ],
)
def test_run_with_different_options_per_rank_is_refused(tmp_path, model, rank_1_flags, message):
    prefix, save = write_tokens(tmp_path / "tokens"), tmp_path / "save"
    without = {"--num-layers"} if model else ()
    argv = flags(prefix, f"{model} --save {save}", without=without)
    with running(2, argv, process=functools.partial(_unlike, rank_1_flags=rank_1_flags)) as ranks:
        codes = [outcome.exit_code for outcome in ranks.outcomes(timeout=60)]
        output = "".join(ranks.log(rank) for rank in range(2))
    assert codes == [ExitCode.USER_ERROR] * 2, output
    errors = [line for line in output.splitlines() if "error: " in line]
    assert len(errors) == 1, output
    assert message in errors[0]
    assert not save.exists()

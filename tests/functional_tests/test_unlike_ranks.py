# SPDX-License-Identifier: Apache-2.0
"""Ranks of the entry scripts that were started with different options, as one script on each
machine makes likely."""

from __future__ import annotations

import functools

import pytest

from megatron.cli.errors import ExitCode
from tests.functional_tests.small_run import flags, rank_process, running, write_tokens


def _unlike(rank: int, world: int, port: int, argv: list[str], *, more: str) -> None:
    rank_process(rank, world, port, [*argv, *more.split()] if rank else argv)


@pytest.mark.parametrize(
    ("model", "more", "named"),
    [
        ("", "--lr 1e-3", "--lr is 0.005 on rank 0 and 0.001 on rank 1"),
        (
            "--hybrid-layer-pattern G-*-",
            "--norm-epsilon 1e-6",
            "--norm-epsilon is 1e-05 on rank 0 and 1e-06 on rank 1",
        ),
    ],
)
def test_nothing_is_trained_or_saved(tmp_path, model, more, named):
    prefix, save = write_tokens(tmp_path / "tokens"), tmp_path / "save"
    without = {"--num-layers"} if model else ()
    argv = flags(prefix, f"{model} --save {save}", without=without)
    with running(2, argv, process=functools.partial(_unlike, more=more)) as ranks:
        codes = [outcome.exit_code for outcome in ranks.outcomes(timeout=60)]
        output = "".join(ranks.log(rank) for rank in range(2))
    assert codes == [ExitCode.USER_ERROR] * 2, output
    errors = [line for line in output.splitlines() if "error: " in line]
    assert len(errors) == 1, output
    assert named in errors[0]
    assert not save.exists()

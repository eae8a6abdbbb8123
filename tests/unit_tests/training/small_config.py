# SPDX-License-Identifier: Apache-2.0
"""A small valid config for tests, and the arguments that make it."""

from __future__ import annotations

from megatron.cli.flags import parse_command_line
from megatron.training.config import Config
from tests.support.arguments import last_wins

ARGUMENTS = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 6 --seq-length 20 --micro-batch-size 3 "
    "--train-iters 10 --lr 1e-3 --data-path corpus --position-embedding-type rope"
)


def small_config(more: str = "", *, without: tuple[str, ...] = ()) -> Config:
    """Return the config of ARGUMENTS and further flags.

    Args:
        more: flags to add; they win.
        without: flags of ARGUMENTS to leave out, `--train-iters`.
    """
    words = ARGUMENTS.split()
    remaining = [w for i, w in enumerate(words) if w not in without and words[i - 1] not in without]
    words = last_wins([*remaining, *more.split()])
    return parse_command_line(Config, words, prog="p", description="d").config

# SPDX-License-Identifier: Apache-2.0
"""Checks and log lines for a global batch that does not divide evenly over ranks."""

from __future__ import annotations

import pytest

from megatron.training.config.check import check
from megatron.training.config.resolve import resolve
from megatron.training.startup_report import batch_line, batch_words
from tests.unit_tests.training.small_config import small_config

UNEVEN = "--allow-uneven-batch"
EXPERTS = "--num-experts 4 --disable-bias-linear"


def test_stages_run_the_same_number_of_microbatches():
    options = (
        "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule interleaved "
        "--num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2 --allow-uneven-batch "
    )
    assert check(small_config(f"{options} --global-batch-size 14"), 4) == []
    assert check(small_config(f"{options} --global-batch-size 10"), 4) == []
    assert resolve(small_config(f"{options} --global-batch-size 10"), 4).num_microbatches == 3


@pytest.mark.parametrize(
    ("samples", "world", "line"),
    [
        (12, 3, None),
        (
            1024,
            3,
            "uneven batch: 512 microbatches of 2, on 3 data-parallel ranks, 171 each, 1 padding "
            "microbatch on rank 2; 0.2 % of their time is wasted",
        ),
        (
            8,
            3,
            "uneven batch: 4 microbatches of 2, on 3 data-parallel ranks, 2 each, 1 padding "
            "microbatch on ranks 1-2; 33.3 % of their time is wasted",
        ),
        (
            11,
            3,
            "uneven batch: 6 microbatches of 2, the last one of 1, on 3 data-parallel ranks, "
            "2 each, no padding microbatch; 8.3 % of their time is wasted",
        ),
        (
            7,
            1,
            "uneven batch: 4 microbatches of 2, the last one of 1, on 1 data-parallel rank, "
            "4 each, no padding microbatch; 0.0 % of their time is wasted",
        ),
    ],
)
def test_uneven_batch_cost_is_logged(samples, world, line):
    options = f"--micro-batch-size 2 --global-batch-size {samples} {UNEVEN}"
    run = resolve(small_config(options), world)
    assert batch_line(run) == line
    words = (
        "global batch 12 = 3 x 2 x 2 microbatches" if line is None else f"global batch {samples}"
    )
    assert batch_words(run).startswith(words)
    assert run.num_microbatches == -(-samples // (2 * world))

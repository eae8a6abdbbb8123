# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of tp2 x dp2 goes on at tp1 and at tp4 with the losses of the original layout."""

from __future__ import annotations

import pytest

from tests.functional_tests.small_run import flags, losses, run_on, write_tokens

COMMON = "--eval-interval 0 --train-iters 6 --micro-batch-size 4"


@pytest.mark.timeout(200)
def test_other_layouts_continue_within_a_millionth(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    original = tmp_path / "original"
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    run_on(4, flags(prefix, f"{COMMON} {layout} --save-interval 3 --save {original}"))
    expected = losses(original / "metrics.jsonl")
    assert expected[5] != pytest.approx(expected[1], rel=1e-3), "the model has not learnt anything"
    start = original / "iter_0000003"
    for world, layout in (
        (1, ""),
        (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    ):
        metrics = tmp_path / f"tp{world}.jsonl"
        more = f"{COMMON} {layout} --load {start} --metrics-file {metrics}"
        run_on(world, flags(prefix, more))
        found = losses(metrics)
        assert sorted(found) == [4, 5, 6]
        for iteration, loss in found.items():
            assert loss == pytest.approx(expected[iteration], rel=1e-6), (world, iteration)

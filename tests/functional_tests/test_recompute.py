# SPDX-License-Identifier: Apache-2.0
"""Recomputed activations do not change a bit of the losses."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megatron.core.models import decoder
from tests.functional_tests.small_run import flags, losses, run_in_process, write_tokens

FULL = "--recompute-granularity full"


@pytest.mark.gpus(1)
def test_recomputed_run_has_bitwise_equal_losses(tmp_path: Path):
    prefix = write_tokens(tmp_path / "data")

    def run(name: str, options: str) -> tuple[dict[int, float], int, int]:
        """Return the losses and the numbers of full and selective recomputations."""
        metrics = tmp_path / f"{name}.jsonl"
        words = f"--train-iters 3 --eval-interval 0 --metrics-file {metrics} {options}"
        with (
            mock.patch.object(decoder, "recomputed", wraps=decoder.recomputed) as recomputed_mock,
            mock.patch.object(
                decoder, "discard_until_backward", wraps=decoder.discard_until_backward
            ) as selective,
        ):
            assert run_in_process(flags(prefix, words)) == 0
        return losses(metrics), recomputed_mock.call_count, selective.call_count

    expected, *calls = run("kept", "")
    assert len(expected) == 3
    assert calls == [0, 0]
    microbatches, layers, blocks = 3 * 4, 2, 4
    uniform_flags = f"{FULL} --recompute-method uniform --recompute-num-layers 2"
    block_flags = f"{FULL} --recompute-method block --recompute-num-layers 1"
    assert run("uniform", uniform_flags) == (expected, microbatches * layers // 2, 0)
    assert run("block", block_flags) == (expected, microbatches, 0)
    selective = run("selective", "--recompute-granularity selective")
    assert selective == (expected, 0, microbatches * blocks)

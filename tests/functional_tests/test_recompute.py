# SPDX-License-Identifier: Apache-2.0
"""A run that recomputes activations has the losses of one that keeps them, to the last bit."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megatron.cli.launch import Launch
from megatron.core.models import decoder
from megatron.training.pretrain_gpt import read_run
from tests.functional_tests.small_run import flags, losses, run_here, write_tokens

FULL = "--recompute-granularity full"


@pytest.mark.gpus(1)
def test_a_run_recomputes_and_learns_the_same(tmp_path: Path):
    data = write_tokens(tmp_path / "data")

    def run(name: str, more: str) -> tuple[dict[int, float], int, int]:
        """Return the losses, and how often a run of layers and an input were recomputed."""
        metrics = tmp_path / f"{name}.jsonl"
        words = f"--train-iters 3 --eval-interval 0 --metrics-file {metrics} {more}"
        with (
            mock.patch.object(decoder, "recomputed", wraps=decoder.recomputed) as full,
            mock.patch.object(
                decoder, "discard_until_backward", wraps=decoder.discard_until_backward
            ) as selective,
        ):
            assert run_here(flags(data, words)) == 0
        return losses(metrics), full.call_count, selective.call_count

    kept, *calls = run("kept", "")
    assert len(kept) == 3
    assert calls == [0, 0]
    microbatches, layers, blocks = 3 * 4, 2, 4
    one_run = f"{FULL} --recompute-method uniform --recompute-num-layers 2"
    each_first = f"{FULL} --recompute-method block --recompute-num-layers 1"
    assert run("uniform", one_run) == (kept, microbatches * layers // 2, 0)
    assert run("block", each_first) == (kept, microbatches, 0)
    selective = run("selective", "--recompute-granularity selective")
    assert selective == (kept, 0, microbatches * blocks)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (FULL, "full needs --recompute-method: give it"),
        (f"{FULL} --recompute-method block", "full needs --recompute-num-layers: give it"),
        (
            f"{FULL} --recompute-method block --recompute-num-layers 3",
            "--recompute-num-layers 3 is above the model's 2 layers: lower it",
        ),
        (
            "--recompute-granularity selective --recompute-num-layers 1",
            "--recompute-num-layers has no effect without --recompute-granularity full: add that",
        ),
        (
            "--recompute-method uniform",
            "--recompute-method has no effect without --recompute-granularity full: add that",
        ),
        (
            f"{FULL} --recompute-method block --recompute-num-layers 0",
            "--recompute-num-layers is 0: it must be above 0",
        ),
    ],
)
def test_incompatible_recompute_options_are_reported(words: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_run(flags(Path("data"), words), Launch(world_size=1))

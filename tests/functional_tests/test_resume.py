# SPDX-License-Identifier: Apache-2.0
"""A run that stops and resumes equals an uninterrupted run bit for bit."""

from __future__ import annotations

import pytest

from megatron.core.dist_checkpointing import read_extra
from tests.functional_tests.small_run import (
    digests,
    flags,
    run_on,
    timeless,
    write_tokens,
)


@pytest.mark.parametrize(
    "options",
    [
        "--fp16 --initial-loss-scale 4e6 --loss-scale-window 2 --dataloader-type cyclic",
        "--optimizer sgd --calculate-per-token-loss --start-weight-decay 0 --end-weight-decay 0.1 "
        "--weight-decay-incr-style cosine --eval-interval 2",
    ],
)
@pytest.mark.covers("bit-identical resume")
@pytest.mark.gpus(1)
def test_all_training_state_survives_a_checkpoint(tmp_path, options):
    """Save within a log window, with all kinds of state, on one process."""
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    common = f"--train-iters 8 --save-interval 3 --log-interval 4 --eval-interval 0 {options}"
    run_on(1, flags(prefix, f"{common} --save {whole}"))
    run_on(1, flags(prefix, f"{common} --save {cut} --exit-interval 3"))
    assert not (cut / "iter_0000006").exists()
    run_on(1, flags(prefix, f"{common} --save {cut} --load {cut}"))
    assert digests(cut / "iter_0000008") == digests(whole / "iter_0000008")
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    whole_extra, cut_extra = (read_extra(folder / "iter_0000008") for folder in (whole, cut))
    for section in ("progress", "optimizer", "window", "data", "model"):
        assert whole_extra[section] == cut_extra[section], section

# SPDX-License-Identifier: Apache-2.0
"""A job killed with SIGKILL and restarted equals an uninterrupted job bit for bit."""

from __future__ import annotations

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import read_extra
from megatron.training.fault_tolerance.stopping import StopRequests
from megatron.training.train_steps import SessionSteps
from tests.functional_tests.small_run import (
    digests,
    flags,
    run_in_process,
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


def test_pending_validation_is_logged_once_after_restart(tmp_path, monkeypatch):
    """A signal leaves a due validation to the next start, which crashes after the validation and
    before a save."""
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    common = "--train-iters 6 --save-interval 6 --eval-interval 3 --eval-iters 1"
    run_on(1, flags(prefix, f"{common} --save {whole}"))
    argv = flags(prefix, f"{common} --save {cut} --load {cut}")
    with monkeypatch.context() as patch:
        stop_reasons = iter([None, None, "a signal asks"])
        patch.setattr(StopRequests, "reason", staticmethod(lambda sums: next(stop_reasons)))
        run_on(1, argv)
    assert read_extra(cut / "iter_0000003")["progress"]["validation_pending"] == 1
    assert [e["iteration"] for e in timeless(cut / "metrics.jsonl")][-1] == 3
    with monkeypatch.context() as patch:

        def failing_step(*args, **kwargs):
            raise KeyError("in step 4")

        patch.setattr(SessionSteps, "take_step", failing_step)
        assert run_in_process(argv) == ExitCode.CRASH
    assert timeless(cut / "metrics.jsonl")[-1]["kind"] == "validation"
    run_on(1, argv)
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")

# SPDX-License-Identifier: Apache-2.0
"""A hybrid model trained on split sequences has the losses of whole sequences."""

from __future__ import annotations

import pytest

from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import flags, losses, run_in_process, write_tokens

HYBRID = (
    "--hybrid-layer-pattern GM*- --num-layers 4 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--mamba-head-dim 12 --mamba-state-dim 8 --mamba-num-groups 2 "
    "--train-iters 4 --eval-interval 0"
)
SPLITS = "--experiment recurrence_splits --experiment-option"
CUT = f"{SPLITS} recurrence_splits.splits=3 recurrence_splits.chunk=8"
#: Four microbatches per step, two recurrent blocks.
RECURRENCES = 4 * 2


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def cut(metrics) -> list[float]:
    """Return the number of split recurrences in each step of a run."""
    return [e["recurrences_cut"] for e in read_metrics(metrics) if e["kind"] == "train"]


def test_split_run_matches_losses_of_whole_sequences(prefix, tmp_path):
    whole, split = tmp_path / "whole.jsonl", tmp_path / "split.jsonl"
    assert run_in_process(flags(prefix, f"{HYBRID} --metrics-file {whole}")) == 0
    assert run_in_process(flags(prefix, f"{HYBRID} {CUT} --metrics-file {split}")) == 0
    assert cut(split) == [RECURRENCES] * 4
    actual, expected = losses(split), losses(whole)
    assert actual == pytest.approx(expected, rel=1e-5)


def test_run_with_short_sequences_logs_zero_cuts(prefix, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    options = f"{HYBRID} --exit-interval 1 --experiment recurrence_splits --metrics-file {metrics}"
    assert run_in_process(flags(prefix, options)) == 0
    assert cut(metrics) == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--experiment recurrence_splits", "no recurrent block"),
        (f"{HYBRID} {SPLITS} recurrence_splits.splits=0", "use positive numbers"),
        (f"{HYBRID} {SPLITS} recurrence_splits.parts=2", "use one of splits, chunk"),
    ],
)
def test_options_without_effect_are_refused(prefix, capsys, options, message):
    assert run_in_process(flags(prefix, options)) == 2
    assert message in capsys.readouterr().err

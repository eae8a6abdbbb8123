# SPDX-License-Identifier: Apache-2.0
"""Context parallel runs on packed documents: every strategy has the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional_tests.small_run import (
    flags,
    losses,
    run_on,
    running,
    write_tokens,
)

CP, TP = "--context-parallel-size 2", "--tensor-model-parallel-size 2"
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
SHORT = f"--train-iters 3 --eval-interval 3 --lr-warmup-iters 0 {PACKED}"
BY_DOCUMENTS = "--context-parallel-cut documents"
#: A window across chunk boundaries and learned sinks need the tokens of other ranks.
SINKS = "--window-size 9 --softmax-type learnable"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Write documents that end with token 3 and return their prefix."""
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "tokens")
    described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
    prefix.with_suffix(".json").write_text(json.dumps(described))
    return prefix


@pytest.mark.parametrize(
    ("common", "world", "options", "line"),
    [
        (
            "",
            2,
            f"{CP} --cp-comm-type p2p --check-collectives --log-straggler {BY_DOCUMENTS} "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "context parallel 2 by p2p: p2p was requested",
        ),
        (
            f"{SINKS} --calculate-per-token-loss",
            4,
            f"{CP} {TP} --sequence-parallel --cp-comm-type a2a --no-overlap-grad-reduce "
            f"{BY_DOCUMENTS}",
            "context parallel 2 by a2a: a2a was requested",
        ),
        (
            SINKS,
            4,
            f"{CP} --data-parallel-sharding-strategy optim_grads_params --overlap-param-gather",
            "context parallel 2 by all_gather: fewest bytes sent per rank and layer",
        ),
    ],
)
@pytest.mark.covers("matches a single process")
@pytest.mark.gpus("world")
def test_context_parallel_losses_match_one_process(
    prefix, tmp_path, capsys, common, world, options, line
):
    reference, sharded = tmp_path / "one.jsonl", tmp_path / "shared.jsonl"
    run_on(1, flags(prefix, f"{SHORT} {common} --metrics-file {reference}"))
    with running(
        world, flags(prefix, f"{SHORT} {common} {options} --metrics-file {sharded}")
    ) as ranks:
        outcomes = ranks.outcomes(timeout=100)
        log = ranks.log(world - 1)
    assert all(outcome.exit_code == 0 for outcome in outcomes), log
    assert line in log
    assert "; each rank has 12 of the 24 tokens of a sample" in log
    assert "by documents, with " in log
    assert (BY_DOCUMENTS in options) == ("; by --context-parallel-cut: documents" in log), log
    for kind in ("train", "validation"):
        expected = losses(reference, kind)
        assert expected
        assert losses(sharded, kind) == pytest.approx(expected, rel=1e-6)

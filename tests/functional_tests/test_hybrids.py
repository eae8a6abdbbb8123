# SPDX-License-Identifier: Apache-2.0
"""Hybrid runs by pretrain_hybrid: gated delta nets and Mamba-2 with attention, in any layout, with
packed documents; unsupported options are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import IndexedDatasetWriter
from megatron.core.dist_checkpointing import latest_checkpoint
from tests.functional_tests.small_run import (
    VOCABULARY,
    flags,
    losses,
    run_on,
    running,
    write_tokens,
)
from tests.support.inputs import one_thread

CP, PP, TP = (f"--{kind}-parallel-size 2" for kind in ("context", "pipeline-model", "tensor-model"))
SQUARE = f"{TP} --sequence-parallel {CP}"
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
#: Initial weights so large that a carried state changes losses by a thousandth; with the usual
#: initialization it changes them by a millionth.
SHORT = (
    "--train-iters 4 --global-batch-size 4 --eval-interval 4 --lr-warmup-iters 0 "
    f"--init-method-std 0.3 {PACKED}"
)
DELTA_NET = (
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 "
    "--linear-value-head-dim 10 --linear-conv-kernel-dim 3"
)
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 6 --mamba-state-dim 5 --mamba-num-groups 2"
SHAPES = f"{DELTA_NET} {MAMBA} --attention-output-gate --apply-layernorm-1p"
#: All block kinds of a hybrid, and an MTP layer; later options override.
MODEL = f"--num-layers 6 --hybrid-layer-pattern G-M-*-/*- {SHAPES}"
#: The token that ends a document.
EOD = 3


def describe(prefix: Path) -> Path:
    """Write the token that ends a document to the description and return the prefix."""
    described = {"tokenizer": {"vocab_size": VOCABULARY, "eod": EOD}}
    prefix.with_suffix(".json").write_text(json.dumps(described))
    return prefix


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """Give single-process runs one thread, like ranks."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Write documents that end with EOD and return their prefix."""
    return describe(write_tokens(tmp_path_factory.mktemp("data") / "tokens"))


@pytest.fixture(scope="module")
def single_rank(prefix, tmp_path_factory) -> Path:
    """Train on one process with an intermediate checkpoint and return the folder."""
    folder = tmp_path_factory.mktemp("alone")
    run_on(1, flags(prefix, f"{SHORT} {MODEL} --save {folder} --save-interval 2"))
    return folder


def trained(world: int, argv: list[str]) -> str:
    """Train on `world` ranks and return the last rank's log."""
    with running(world, argv) as ranks:
        outcomes = ranks.outcomes(timeout=100)
        log_of_rank_0, log = ranks.log(0), ranks.log(world - 1)
    assert all(outcome.exit_code == 0 for outcome in outcomes), (log_of_rank_0, log)
    return log


def assert_losses_match(metrics: Path, single_rank: Path, *, since: int = 0) -> None:
    """Assert that losses from iteration `since` on match the single-process run."""
    for kind in ("train", "validation"):
        expected = losses(single_rank / "metrics.jsonl", kind)
        assert 4 in expected
        expected = {number: loss for number, loss in expected.items() if number >= since}
        assert losses(metrics, kind) == pytest.approx(expected, rel=1e-6)


def test_hybrid_run_of_4_ranks_resumes_on_one_rank(prefix, single_rank, tmp_path):
    save = tmp_path / "save"
    saves = f"{SHORT} {MODEL} --save {save} --load {save} --save-interval 2"
    begins = flags(prefix, f"{saves} {SQUARE} --linear-cp-mode headwise --exit-interval 2")
    log = trained(4, begins)
    for name in ("gated delta net", "Mamba-2"):
        assert f"{name}: recurrences over context parallel 2 by headwise: headwise was" in log
    assert latest_checkpoint(save, say=print) == save / "iter_0000002"
    run_on(1, flags(prefix, saves))
    assert_losses_match(save / "metrics.jsonl", single_rank)


def write_rows(prefix: Path, order: list[int]) -> Path:
    """Write 8 rows of 24 tokens with three documents each, in the given order."""
    random, tokens = np.random.default_rng(7), []
    for _ in range(8):
        documents = [random.integers(EOD + 1, VOCABULARY, size) for size in (4, 7, 10)]
        for which in order:
            tokens += [*documents[which].tolist(), EOD]
    tokens.append(EOD)  # the last label, which is masked
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        # A single sequence keeps its order.
        writer.add_documents(np.array(tokens), np.array([len(tokens)]))
    return describe(prefix)


@pytest.mark.parametrize("pattern", ["G-", "M-"])
@pytest.mark.gpus(1)
def test_document_does_not_affect_later_documents_in_a_row(tmp_path, pattern):
    """Losses and updates do not depend on preceding documents in a row. Without attention, only
    states and convolutions could carry values over."""
    model = f"--num-layers 2 --hybrid-layer-pattern {pattern} --hidden-dropout 0 "
    model += DELTA_NET if pattern == "G-" else MAMBA
    attention = [
        "--num-attention-heads", "--group-query-attention", "--num-query-groups",
        "--attention-dropout",
    ]  # fmt: skip

    def losses_of(name: str, order: list[int], packed: str) -> dict[int, float]:
        options = f"{SHORT.replace(PACKED, packed)} {model} --split 100,0,0 --train-iters 2"
        options += f" --eval-interval 0 --metrics-file {tmp_path / name}.jsonl"
        rows = write_rows(tmp_path / name, order)
        run_on(1, flags(rows, options, without=attention))
        return losses(tmp_path / f"{name}.jsonl")

    ends = losses_of("ends", [0, 1, 2], PACKED)
    assert sorted(ends) == [1, 2]
    assert losses_of("moved", [2, 0, 1], PACKED) == pytest.approx(ends, rel=1e-6)
    joined = losses_of("joined", [0, 1, 2], "--eod-mask-loss")
    assert abs(joined[1] - ends[1]) > 1e-5, (joined, ends)

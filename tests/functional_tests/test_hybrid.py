# SPDX-License-Identifier: Apache-2.0
"""Hybrids by their entry script: gated delta nets and Mamba-2 between attention, on any grid, with
documents packed to length; what cannot be is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.training.data.corpus import build_corpus
from megatron.training.data.preprocessing.options import PreprocessConfig
from megatron.training.exit_codes import ExitCode
from megatron.training.preprocess_data import preprocess
from tests.functional_tests.small_run import (
    flags,
    losses,
    run_here,
    run_on,
    running,
    write_tokens,
)
from tests.functional_tests.torchrun_job import torchrun

PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DELTA_NET = (
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 "
    "--linear-value-head-dim 10 --linear-conv-kernel-dim 3"
)
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 6 --mamba-state-dim 5 --mamba-num-groups 2"
#: All kinds of blocks of a hybrid; further options win.
BOTH = f"--hybrid-layer-pattern G-M*- --num-layers 5 {DELTA_NET} {MAMBA}"
SHORT = f"--train-iters 4 --global-batch-size 4 --eval-interval 0 --lr-warmup-iters 0 {PACKED}"
CP, TP = "--context-parallel-size 2", "--tensor-model-parallel-size 2"
SQUARE = f"{TP} --sequence-parallel {CP}"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Return where documents are, which a token ends."""
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "tokens")
    described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
    prefix.with_suffix(".json").write_text(json.dumps(described))
    return prefix


@pytest.fixture(scope="module")
def whole(prefix, tmp_path_factory) -> dict[int, float]:
    """Return the losses of one process that was not interrupted."""
    metrics = tmp_path_factory.mktemp("whole") / "metrics.jsonl"
    run_on(1, flags(prefix, f"{SHORT} {BOTH} --metrics-file {metrics}"))
    return losses(metrics)


def test_four_ranks_begin_and_one_goes_on_with_the_losses_of_one(prefix, whole, tmp_path):
    save = tmp_path / "save"
    saves = f"{SHORT} {BOTH} --save {save} --load {save} --save-interval 2"
    begins = flags(prefix, f"{saves} {SQUARE} --linear-cp-mode headwise --exit-interval 2")
    with running(4, begins) as ranks:
        found = ranks.outcomes(timeout=100)
        log = ranks.log(3)
    assert all(outcome.exit_code == 0 for outcome in found), log
    assert "recurrences over context parallel 2 by headwise: headwise was asked for" in log
    assert latest_checkpoint(save, say=print) == save / "iter_0000002"
    run_on(1, flags(prefix, saves))
    assert losses(save / "metrics.jsonl") == pytest.approx(whole, rel=1e-6)


def test_documents_matter_to_hybrids(prefix, whole, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    leaking = SHORT.replace(PACKED, "--eod-mask-loss").replace("--train-iters 4", "--train-iters 2")
    run_on(1, flags(prefix, f"{leaking} {BOTH} --metrics-file {metrics}"))
    assert abs(losses(metrics)[2] - whole[2]) > 1e-5


def refused(capsys, argv: list[str], *texts: str, program: str = "pretrain_hybrid") -> None:
    """Expect one line on stderr with these texts, and the code of a user's error."""
    assert run_here(argv) == ExitCode.USER_ERROR
    err = capsys.readouterr().err
    assert err.startswith(f"{program}: ")
    assert err.count("\n") == 1, err
    for text in texts:
        assert text in err


REFUSED = {
    "a row that does not divide": (
        f"{BOTH} {CP} --seq-length 26",
        ["--seq-length 26 is not a multiple of 2 x --context-parallel-size 2 = 4"],
    ),
    "an unknown symbol": (
        "--hybrid-layer-pattern G-X*-",
        ["'X' at 3 is unknown", "'G' (gated delta net)", "'M' (Mamba-2)"],
    ),
    "key heads that tensor parallel ranks cannot share": (
        f"{BOTH} --linear-num-key-heads 3 --linear-num-value-heads 3 {TP}",
        ["linear-num-key-heads 3 must divide by tensor-model-parallel-size 2"],
    ),
    "heads that headwise cannot cut": (
        f"{BOTH} --linear-num-key-heads 3 --linear-num-value-heads 3 {CP} "
        "--linear-cp-mode headwise",
        ["headwise", "do not divide", "use segments"],
    ),
    "groups that tensor parallel ranks cannot share": (
        f"{BOTH} --mamba-num-heads 6 --mamba-num-groups 3 {TP}",
        ["mamba-num-groups 3 must divide tensor-model-parallel-size 2"],
    ),
    "another number of blocks": (
        f"{BOTH} --num-layers 7",
        ["--num-layers 7", "5"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_told_before_anything_is_read(capsys, name):
    more, texts = REFUSED[name]
    refused(capsys, flags(Path("/absent"), more), *texts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, ""),
        (2, f"{CP} --linear-cp-mode segments"),
        (4, f"{TP} --data-parallel-sharding-strategy optim_grads_params"),
        (4, f"{TP} --pipeline-model-parallel-size 2"),
    ],
)
def test_the_corpus_is_resumed_on_other_grids(tmp_path, world, layout):
    """A hybrid of sixteen blocks on 2 x 2 ranks by the launcher of real jobs; the losses are those
    of one process alone."""
    build_corpus(tmp_path / "corpus.jsonl", library=Path(json.__file__).parent)
    preprocess(
        PreprocessConfig(
            input=(str(tmp_path / "corpus.jsonl"),),
            output_prefix=str(tmp_path / "corpus"),
            tokenizer_type="byte",
            append_eod=True,
        )
    )
    model = f"--hidden-size 48 --ffn-hidden-size 64 --seq-length 256 {DELTA_NET}"
    model += " --hybrid-layer-pattern G-G-G-*-G-G-G-*- --num-layers 16"
    alone, save = tmp_path / "alone.jsonl", tmp_path / "save"
    common = f"{SHORT} {model} --tokenizer-type byte --train-iters 6"

    def argv(more: str) -> list[str]:
        words = flags(tmp_path / "corpus", f"{common} {more}")
        return [word for word in words if word not in ("--vocab-size", "61")]

    run_on(1, argv(f"--metrics-file {alone}"))
    saves = f"--save {save} --load {save} --save-interval 3"
    job = torchrun(
        argv(f"{saves} --exit-interval 3 {SQUARE}"),
        "--standalone",
        processes=4,
        module="megatron.training.pretrain_hybrid",
    )
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    assert "tensor parallel 2 with sequence parallel, context parallel 2" in output
    assert latest_checkpoint(save, say=print) == save / "iter_0000003"
    run_on(world, argv(f"{saves} {layout}"), timeout=300)
    assert losses(save / "metrics.jsonl") == pytest.approx(losses(alone), rel=1e-6)

# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks share the tokens of their samples: every engine has the numbers of one process,
with documents packed to length."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.training.data.preprocessing.options import PreprocessConfig
from megatron.training.preprocess_data import preprocess
from megatron.training.quickstart import build_corpus
from tests.functional_tests.small_run import (
    flags,
    losses,
    run_here,
    run_on,
    running,
    write_tokens,
)
from tests.functional_tests.torchrun_job import torchrun

CP, TP = "--context-parallel-size 2", "--tensor-model-parallel-size 2"
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
SHORT = f"--train-iters 3 --eval-interval 3 --lr-warmup-iters 0 {PACKED}"
APART = "--context-parallel-cut documents"
#: Nothing that a rank could leave out for itself: a window over borders of chunks, learned sinks.
SINKS = "--window-size 9 --softmax-type learnable"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Return where documents are, which a token ends."""
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "tokens")
    described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
    prefix.with_suffix(".json").write_text(json.dumps(described))
    return prefix


@pytest.mark.parametrize(
    ("alike", "world", "more", "line"),
    [
        (
            "",
            2,
            f"{CP} --cp-comm-type p2p --check-collectives --log-straggler {APART} "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "context parallel 2 by p2p: p2p was asked for",
        ),
        (
            f"{SINKS} --calculate-per-token-loss",
            4,
            f"{CP} {TP} --sequence-parallel --cp-comm-type a2a --no-overlap-grad-reduce {APART}",
            "context parallel 2 by a2a: a2a was asked for",
        ),
        (
            SINKS,
            4,
            f"{CP} --data-parallel-sharding-strategy optim_grads_params --overlap-param-gather",
            "context parallel 2 by all_gather: least of what leaves a rank",
        ),
    ],
)
@pytest.mark.covers("numbers of one process", runs="ranks")
@pytest.mark.gpus("world")
def test_ranks_that_share_samples_have_the_losses_of_one(
    prefix, tmp_path, capsys, alike, world, more, line
):
    one, shared = tmp_path / "one.jsonl", tmp_path / "shared.jsonl"
    run_on(1, flags(prefix, f"{SHORT} {alike} --metrics-file {one}"))
    with running(world, flags(prefix, f"{SHORT} {alike} {more} --metrics-file {shared}")) as ranks:
        found = ranks.outcomes(timeout=100)
        log = ranks.log(world - 1)
    assert all(outcome.exit_code == 0 for outcome in found), log
    assert line in log
    assert "; each rank has 12 of the 24 tokens of a sample" in log
    assert "by documents, with " in log
    assert (APART in more) == ("; by --context-parallel-cut: documents" in log), log
    for kind in ("train", "validation"):
        wanted = losses(one, kind)
        assert wanted
        assert losses(shared, kind) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(2)
def test_a_run_goes_on_with_its_documents_cut_in_another_way(prefix, tmp_path):
    one, save = tmp_path / "one.jsonl", tmp_path / "save"
    common = SHORT.replace("--eval-interval 3", "--eval-interval 2")
    run_on(1, flags(prefix, f"{common} --metrics-file {one}"))
    saves = f"{common} {CP} --save {save} --load {save} --save-interval 2"
    run_on(2, flags(prefix, f"{saves} {APART} --exit-interval 2"))
    run_on(2, flags(prefix, f"{saves} --context-parallel-cut row"))
    for kind in ("train", "validation"):
        wanted = losses(one, kind)
        assert 2 in wanted
        assert losses(save / "metrics.jsonl", kind) == pytest.approx(wanted, rel=1e-6)


def test_documents_matter_to_these_runs(prefix, tmp_path):
    # The same tokens count in all of them.
    whole = "--eod-mask-loss"
    cases = {"packed": PACKED, "whole": whole, "window": f"{whole} --window-size 9"}
    cases["all"] = f"{PACKED} {SINKS}"
    found = []
    for name, more in cases.items():
        metrics = tmp_path / f"{name}.jsonl"
        common = SHORT.replace(PACKED, more).replace("--eval-interval 3", "--eval-interval 0")
        run_on(1, flags(prefix, f"{common} --metrics-file {metrics}"))
        found.append(losses(metrics)[3])
    ordered = sorted(found)
    assert min(b - a for a, b in pairwise(ordered)) > 1e-5, found


def test_indivisible_sizes_are_reported_before_reading_files(capsys):
    absent = flags(Path("/absent"), f"{CP} --seq-length 26 --cp-comm-type a2a")
    assert run_here(absent) == ExitCode.USER_ERROR
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{CP} does not divide the world of 1 processes" in err
    assert f"--seq-length 26 is not a multiple of 2 x {CP} = 4" in err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.covers("resumed on another layout", runs="loads")
def test_eight_ranks_on_the_corpus_are_resumed_by_one(tmp_path):
    """2 x 2 x 2 ranks by the launcher of real jobs; the losses are those of one process alone."""
    build_corpus(tmp_path / "corpus.jsonl", library=Path(json.__file__).parent)
    preprocess(
        PreprocessConfig(
            input=(str(tmp_path / "corpus.jsonl"),),
            output_prefix=str(tmp_path / "corpus"),
            tokenizer_type="byte",
            append_eod=True,
        )
    )
    model = "--num-layers 2 --hidden-size 48 --ffn-hidden-size 64 --seq-length 256"
    whole, save = tmp_path / "whole.jsonl", tmp_path / "save"
    common = f"{SHORT} {model} --tokenizer-type byte --train-iters 6 --eval-interval 0"

    def argv(more: str) -> list[str]:
        words = flags(tmp_path / "corpus", f"{common} {more}")
        return [word for word in words if word not in ("--vocab-size", "61")]

    run_on(1, argv(f"--metrics-file {whole}"))
    saves = f"--save {save} --load {save} --save-interval 3"
    layout = f"{TP} {CP} --pipeline-model-parallel-size 2 --sequence-parallel"
    job = torchrun(argv(f"{saves} --exit-interval 3 {layout}"), "--standalone", processes=8)
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    assert "tensor parallel 2 with sequence parallel, context parallel 2, pipeline paral" in output
    assert latest_checkpoint(save, say=print) == save / "iter_0000003"
    run_on(1, argv(saves))
    assert losses(save / "metrics.jsonl") == pytest.approx(losses(whole), rel=1e-6)

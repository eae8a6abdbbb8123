# SPDX-License-Identifier: Apache-2.0
"""Generalized tensor parallelism by its flags: a run resumes on layouts with and without it, with
the losses of a single process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.data.encoder import PreprocessConfig
from megatron.training.preprocess_data import preprocess
from megatron.training.quickstart import build_corpus
from tests.functional_tests.small_run import (
    flags,
    losses,
    run_on,
    write_tokens,
)

TP, SHARDS = "--tensor-model-parallel-size", "--tensor-parallel-num-weight-shards"
FORMAT, SCALE_BLOCKS = "--weight-gather-format", "--weight-gather-scale-blocks"
STRATEGY = "--data-parallel-sharding-strategy"
COMMON = (
    "--eval-interval 4 --train-iters 12 --hidden-dropout 0.1 --attention-dropout 0.1 "
    "--position-embedding-type learned_absolute --max-position-embeddings 30"
)


def train(prefix, save, world, options):
    """Train to the end, or to `--exit-interval`; return the losses."""
    run_on(world, flags(prefix, f"{options} --save {save} --load {save}"))
    return losses(save / "metrics.jsonl")


@pytest.mark.timeout(200)
@pytest.mark.covers("matches a single process")
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(4)
def test_run_resumes_with_and_without_weight_shards(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    expected = train(prefix, tmp_path / "whole", 1, COMMON)
    assert expected[12] < expected[2] - 0.1, "the model has not learnt anything"
    resumed = tmp_path / "parts"
    for world, layout, exit_iteration in (
        (2, f"{SHARDS} 2", 2),
        (4, f"{SHARDS} 2 {STRATEGY} optim --overlap-param-gather", 4),
        (4, f"{TP} 2 --sequence-parallel {SHARDS} 4 --pipeline-model-parallel-size 1", 6),
        (4, f"{SHARDS} 4 --check-collectives", 8),
        (2, f"{SHARDS} 2 {STRATEGY} optim_grads_params", 10),
        (1, "", 12),
    ):
        actual = train(
            prefix, resumed, world, f"{COMMON} {layout} --exit-interval {exit_iteration}"
        )
        assert max(actual) == exit_iteration
    assert actual.keys() == expected.keys()
    for iteration, loss in actual.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
    validation = [
        losses(tmp_path / run / "metrics.jsonl", "validation") for run in ("whole", "parts")
    ]
    assert validation[0].keys() == validation[1].keys() != set()
    for iteration, loss in validation[0].items():
        assert validation[1][iteration] == pytest.approx(loss, rel=1e-6), iteration


@pytest.mark.timeout(200)
def test_run_with_quantized_gathers_resumes_exactly(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    layout = f"{COMMON} {SHARDS} 2 {FORMAT} mxfp8 {STRATEGY} optim --gtp-reduce-scatter-per step"
    expected = train(prefix, tmp_path / "whole", 2, layout)
    plain = train(prefix, tmp_path / "plain", 2, f"{COMMON} {SHARDS} 2")
    assert expected != plain, "weights are gathered as they are"
    train(prefix, tmp_path / "parts", 2, f"{layout} --exit-interval 6")
    actual = train(prefix, tmp_path / "parts", 2, layout)
    assert actual == expected


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The corpus of `make pretrain`, as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    build_corpus(folder / "corpus.jsonl", library=Path(json.__file__).parent)
    preprocess(
        PreprocessConfig(
            input=(str(folder / "corpus.jsonl"),),
            output_prefix=str(folder / "corpus"),
            tokenizer_type="byte",
            append_eod=True,
        )
    )
    return folder / "corpus"


def on_corpus(corpus, options):
    """Return the arguments of a run of byte tokens on the corpus."""
    return flags(
        corpus, f"--tokenizer-type byte --eval-interval 0 {options}", without=["--vocab-size"]
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quantized_gathers_train_as_well_as_bf16(corpus, tmp_path):
    model = (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --seq-length 128 --lr 3e-3 "
        f"--train-iters 200 {SHARDS} 2 {STRATEGY} optim"
    )

    def final_loss(gather_format, options=""):
        metrics = tmp_path / f"{gather_format}{len(options)}.jsonl"
        run_on(
            2,
            on_corpus(
                corpus, f"{model} {FORMAT} {gather_format} {options} --metrics-file {metrics}"
            ),
        )
        run_losses = losses(metrics)
        assert len(run_losses) == 200
        return sum(run_losses[i] for i in range(181, 201)) / 20

    plain = final_loss("bf16")
    assert plain < 3.0, "the model has not learnt anything"
    for gather_format, bound, options in (
        ("fp8", 0.01, ""),
        ("mxfp8", 0.01, ""),
        ("nvfp4", 0.03, ""),
        ("mxfp8", 0.01, f"{SCALE_BLOCKS} 1d"),
        ("nvfp4", 0.03, f"{SCALE_BLOCKS} 1d"),
    ):
        loss = final_loss(gather_format, options)
        print(gather_format, options, plain, loss, loss / plain - 1)
        assert loss != plain
        assert abs(loss / plain - 1) < bound, gather_format

# SPDX-License-Identifier: Apache-2.0
"""Generalized tensor parallelism by its flags: a run resumes on layouts with and without it, with
the losses of a single process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core import ProcessGroupCollection
from megatron.core.comm import CollectiveRecord
from megatron.training.data.encoder import PreprocessConfig
from megatron.training.preprocess_data import preprocess
from megatron.training.quickstart import build_corpus
from tests.functional_tests.small_run import (
    digests,
    flags,
    losses,
    output_of,
    rank_process,
    run_on,
    running,
    timeless,
    write_tokens,
)
from tests.functional_tests.torchrun_job import torchrun

TP, SHARDS = "--tensor-model-parallel-size", "--tensor-parallel-num-weight-shards"
EXPERT_SHARDS = "--expert-tensor-parallel-num-weight-shards"
FORMAT, SCALE_BLOCKS = "--weight-gather-format", "--weight-gather-scale-blocks"
STRATEGY = "--data-parallel-sharding-strategy"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 40 --moe-shared-expert-intermediate-size 24 "
    "--moe-aux-loss-coeff 0.02 --eval-interval 0 --train-iters 6 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)
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


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.covers("matches a single process")
def test_expert_weights_have_separate_weight_shards(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    single_rank = EXPERTS.replace("--expert-model-parallel-size 2 ", "")
    expected = train(prefix, tmp_path / "whole", 1, single_rank)
    layout = f"{EXPERTS} {SHARDS} 4 {EXPERT_SHARDS} 2"
    output = output_of(4, flags(prefix, f"{layout} --save {tmp_path / 'parts'} --exit-interval 4"))
    line = next(line for line in output.splitlines() if "weight shards: " in line)
    assert "over gtp 4" in line
    assert "of experts over egtp 2" in line
    actual = train(prefix, tmp_path / "parts", 1, single_rank)
    assert actual.keys() == expected.keys()
    for iteration, loss in actual.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration


def traced_process(rank: int, world: int, port: int, argv: list[str]) -> None:
    """Run one rank that writes its collectives to a file next to its metrics."""
    metrics = Path(argv[argv.index("--metrics-file") + 1])
    create = ProcessGroupCollection.create

    def create_traced(*args: object, **kwargs: object) -> ProcessGroupCollection:
        groups = create(*args, **kwargs)  # type: ignore[arg-type]
        lines = metrics.with_name(f"trace{rank}").open("w", buffering=1)

        def note(record: CollectiveRecord) -> None:
            lines.write(f"{record}\n")

        groups.observers.append(note)
        return groups

    ProcessGroupCollection.create = staticmethod(create_traced)  # type: ignore[method-assign]
    rank_process(rank, world, port, argv)


@pytest.mark.timeout(200)
def test_explicit_single_weight_shard_changes_nothing(tmp_path):
    """An explicit count of one shard per tp or etp rank changes no bit and no collective."""
    prefix = write_tokens(tmp_path / "tokens")
    layout = (
        f"{TP} 2 --num-experts 4 --moe-ffn-hidden-size 40 --eval-interval 0 --train-iters 3 "
        f"--expert-tensor-parallel-size 1 {STRATEGY} optim"
    )
    runs = []
    for folder, shards in (("plain", ""), ("explicit", f"{SHARDS} 2 {EXPERT_SHARDS} 1")):
        save = tmp_path / folder
        metrics = f"--metrics-file {save / 'metrics.jsonl'} --save {save}"
        argv = flags(prefix, f"{layout} {metrics} {shards}")
        save.mkdir()
        with running(4, argv, process=traced_process) as ranks:
            outcomes = ranks.outcomes(timeout=100)
            assert all(o.exit_code == 0 for o in outcomes), [ranks.log(rank) for rank in range(4)]
        traces = [(save / f"trace{rank}").read_text() for rank in range(4)]
        assert all(text.count("reduce_scatter") > 3 for text in traces)
        runs.append((timeless(save / "metrics.jsonl"), digests(save / "iter_0000003"), traces))
    assert runs[0] == runs[1]
    assert "gtp" not in "".join(runs[0][2])


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
def test_checkpoint_of_tp_gtp_ep_egtp_resumes_on_one_rank(corpus, tmp_path):
    """Dense weights over tp 2 and gtp 2, experts over ep 2 and egtp 2, 20 steps."""
    model = (
        "--num-layers 2 --hidden-size 48 --ffn-hidden-size 64 --seq-length 64 --lr 1e-3 "
        "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
    )
    save, whole = tmp_path / "save", tmp_path / "whole.jsonl"
    layout = (
        f"{TP} 2 {SHARDS} 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        f"{EXPERT_SHARDS} 2"
    )
    train_20 = f"{model} --train-iters 20 --save {save} --load {save} --save-interval 10"
    job = torchrun(on_corpus(corpus, f"{train_20} {layout} --exit-interval 10"), "--standalone",
                   processes=8)  # fmt: skip
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    assert "over gtp 2" in output
    assert "of experts over egtp 2" in output
    run_on(1, on_corpus(corpus, train_20))
    run_on(1, on_corpus(corpus, f"{model} --train-iters 20 --metrics-file {whole}"))
    expected = losses(whole)
    assert len(expected) == 20
    assert losses(save / "metrics.jsonl") == pytest.approx(expected, rel=1e-6)


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

# SPDX-License-Identifier: Apache-2.0
"""From conversations in JSONL to a fine-tuned model, on one process and on tp 2 x dp 2."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.errors import ExitCode
from megatron.core.datasets import IndexedDatasetWriter
from megatron.core.datasets.chat_dataset import mask_prefix
from megatron.training.monitoring.metrics import read_metrics
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from tests.functional_tests.small_run import digests, flags, losses, run_in_process, run_on

COMMON = (
    "--vocab-size 257 --seq-length 96 --max-position-embeddings 96 --eval-interval 4 "
    "--eval-iters 1 --split 90,10 --train-iters 8 --lr 1e-2 --attention-dropout 0 "
    "--hidden-dropout 0"
)


@pytest.fixture
def talks(tmp_path):
    """Write and preprocess conversations that count; return the prefix."""
    source = random.Random(3)
    lines = []
    for i in range(80):
        start = source.randrange(50)
        counted = " ".join(str(start + j) for j in range(source.randrange(2, 9)))
        turns = [("user", f"count from {start}"), ("assistant", counted)]
        if i % 3 == 0:
            turns += [("user", "again"), ("assistant", str(start))]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    prefix = tmp_path / "talks"
    preprocess(
        PreprocessConfig(
            input=(f"{prefix}.jsonl",),
            output_prefix=str(prefix),
            tokenizer_type="byte",
            chat=True,
            chat_template="plain",
        )
    )
    return prefix


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.covers("fine-tuning on chats")
@pytest.mark.covers("bit-identical resume")
@pytest.mark.gpus("world")
def test_fine_tuning_matches_across_layouts_and_resumes(talks, tmp_path, capsys, world):
    """Tensor parallel 2; the slow case has two data-parallel ranks in addition."""
    common = f"--sft {COMMON} --save-interval 4"
    assert run_in_process(flags(talks, f"{common} --save {tmp_path}/one")) == 0
    assert "conversations packed into" in capsys.readouterr().out
    layout = f"{common} --tensor-model-parallel-size 2 --sequence-parallel"
    layout += " --use-distributed-optimizer"
    run_on(world, flags(talks, f"{layout} --save {tmp_path}/many"))
    single, parallel = (losses(tmp_path / name / "metrics.jsonl") for name in ("one", "many"))
    assert parallel == pytest.approx(single, rel=2e-4)
    assert single[8] < 0.8 * single[1]
    kinds = [e["kind"] for e in read_metrics(tmp_path / "one/metrics.jsonl")]
    assert kinds.count("validation") == 3

    resumed = f"{common} --load {tmp_path}/one/iter_0000004 --save {tmp_path}/again"
    assert run_in_process(flags(talks, resumed)) == 0
    assert digests(tmp_path / "again/iter_0000008") == digests(tmp_path / "one/iter_0000008")


#: Pages of the documentation that train on conversations.
PAGES = ("README.md", *(f"docs/{page}.md" for page in ("hugging-face", "your-own-data")))


def test_documented_fine_tuning_weighs_every_token_alike():
    root = Path(__file__).resolve().parents[2]
    everything = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/**/*.*")]
    pages = set()
    for page in everything:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            words = line.split()
            if "megatron.training.pretrain_gpt" in words and "--sft" in words:
                assert "--calculate-per-token-loss" in words, f"{page}: {line}"
                pages.add(str(page.relative_to(root)))
    assert pages == set(PAGES)


def test_a_pretrained_model_is_fine_tuned(talks, tmp_path, capsys):
    """Train on plain samples of the tokens first, then on the conversations."""
    before = f"{COMMON} --save {tmp_path}/base --train-iters 4"
    assert run_in_process(flags(talks, before)) == ExitCode.USER_ERROR
    err = capsys.readouterr().err
    assert f"{talks} contains conversations" in err
    assert "--sft" in err
    assert "--allow-chat-as-text" in err
    assert not (tmp_path / "base").exists()
    assert run_in_process(flags(talks, f"{before} --allow-chat-as-text")) == 0
    sft = f"--sft {COMMON} --train-iters 4"
    capsys.readouterr()
    assert run_in_process(flags(talks, f"{sft} --load {tmp_path}/base")) == 2
    assert "kind: None in the checkpoint, sft now" in capsys.readouterr().err
    run_losses = {}
    for name, load_flags in (
        ("finetune", f"--load {tmp_path}/base --finetune"),
        ("pretrained", f"--pretrained-checkpoint {tmp_path}/base"),
        ("scratch", ""),
    ):
        assert (
            run_in_process(
                flags(talks, f"{sft} {load_flags} --metrics-file {tmp_path}/{name}.jsonl")
            )
            == 0
        )
        run_losses[name] = losses(tmp_path / f"{name}.jsonl")
    assert run_losses["finetune"] == run_losses["pretrained"]
    assert run_losses["finetune"][1] < 0.9 * run_losses["scratch"][1]


#: Expert bias, capacity, both auxiliary losses and an MTP layer.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 "
    "--moe-z-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --moe-expert-capacity-factor 1.0 --mtp-num-layers 1"
)


def write_long_talks(prefix: Path) -> Path:
    """Write conversations of 82 to 97 tokens: a row of 96, 128 or 160 tokens holds one
    conversation, and 97 tokens fill a row of 96 inputs and labels."""
    source = np.random.default_rng(3)
    with (
        IndexedDatasetWriter(prefix, np.uint16) as tokens,
        IndexedDatasetWriter(mask_prefix(str(prefix)), np.uint8) as mask,
    ):
        for number in range(40):
            count = 97 if number % 3 == 0 else int(source.integers(82, 97))
            tokens.add_document(source.integers(0, 256, size=count))
            mask.add_document((source.random(count) < 0.6).astype(np.uint8))
    return prefix


def printed_loads(text: str) -> list[str]:
    """Return the router statistics of log lines."""
    return re.findall(r"load balance: .*z loss [0-9.]+", text)


@pytest.mark.covers("fine-tuning on chats")
def test_expert_losses_are_independent_of_row_length(tmp_path, capsys):
    prefix, runs = write_long_talks(tmp_path / "talks"), []
    common = f"--sft {COMMON} --max-position-embeddings 160 --train-iters 3 --eval-interval 3"
    for length in (96, 128):
        file = tmp_path / f"{length}.jsonl"
        argv = flags(prefix, f"{common} {EXPERTS} --seq-length {length} --metrics-file {file}")
        assert run_in_process(argv) == 0
        runs.append((read_metrics(file), capsys.readouterr().out))
    (short, short_log), (long, long_log) = runs
    assert len(printed_loads(short_log)) == 3
    assert printed_loads(short_log) == printed_loads(long_log)
    bounds = {"lm_loss": 1e-7, "mtp_1_loss": 1e-7, "expert_load": 0.0, "tokens_dropped": 0.0}
    norms = ("grad_norm", "aux_loss", "z_loss", "router_entropy")
    bounds |= dict.fromkeys(norms, 1e-6)
    for short_event, long_event in zip(short, long, strict=True):
        assert short_event.keys() == long_event.keys()
        for name, bound in bounds.items():
            if bound and name in short_event:
                assert short_event[name] == pytest.approx(long_event[name], rel=bound), name
            else:
                assert short_event.get(name) == long_event.get(name), name
    trained = [event for event in short if event["kind"] == "train"]
    assert [min(event[name] for name in norms) > 0 for event in trained] == [True] * 3
    assert min(event["tokens_dropped"] for event in trained) > 0.01

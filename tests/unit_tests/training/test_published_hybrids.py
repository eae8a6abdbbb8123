# SPDX-License-Identifier: Apache-2.0
"""Published hybrid models: example files and presets agree, with the published parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.launch import Launch
from megatron.core.models import mamba2, nemotron_h, qwen3_next
from megatron.training.config.model_table import gpt_config
from megatron.training.pretrain_gpt import read_run
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from megatron.training.startup_report import parameters

EXAMPLES = Path(__file__).parents[3] / "examples" / "hybrid"
PUBLISHED = [
    ("qwen3_next_80b", qwen3_next, 151_936),
    ("mamba2_2.7b", mamba2, 50_288),
    ("nemotron_h_8b", nemotron_h, 131_072),
]


@pytest.mark.parametrize(("name", "preset", "vocab_size"), PUBLISHED)
def test_example_file_and_preset_describe_one_model(name, preset, vocab_size):
    words = f"--config {EXAMPLES / name}.yaml --mock-data --tokenizer-type null --seq-length 64"
    words += " --micro-batch-size 1 --train-iters 1 --lr 1e-3"
    run = read_run(words.split(), Launch(), program=PRETRAIN_HYBRID)
    assert run.config.tokenizer.vocab_size == vocab_size
    assert gpt_config(run.config, vocab_size) == preset()
    assert preset().problems() == []


def test_presets_have_the_published_parameter_counts():
    """The counts are sums over the published shapes, written out here."""
    h, vocab = 2048, 151_936
    keys, values, heads = 16 * 128, 32 * 128, 32
    delta = h * (2 * keys + 2 * values + 2 * heads) + values * h + 4 * (2 * keys + values)
    delta += 2 * heads + 128  # A_log, dt_bias, the norm of a head
    attention = h * (2 * 16 + 2 * 2) * 256 + 16 * 256 * h + 2 * 256  # queries with gates
    expert = 3 * h * 512
    non_expert = (
        2 * vocab * h + h + 48 * (2 * h + 512 * h + expert + h) + 36 * delta + 12 * attention
    )
    counts = parameters(qwen3_next())
    assert counts == (non_expert + 48 * 512 * expert, non_expert + 48 * 10 * expert)
    assert (round(counts[0] / 1e9, 1), round(counts[1] / 1e9, 1)) == (79.7, 3.9)

    h, inner, state = 2560, 5120, 128
    block = h * (2 * inner + 2 * state + 80) + 5 * (inner + 2 * state) + 3 * 80 + inner + inner * h
    assert parameters(mamba2())[0] == 50_288 * h + h + 64 * (block + h)

    h, inner, state = 4096, 8192, 8 * 128
    block = h * (2 * inner + 2 * state + 128) + 5 * (inner + 2 * state) + 3 * 128 + inner
    block += inner * h
    attention = h * (32 + 2 * 8) * 128 + 32 * 128 * h
    blocks = 24 * block + 24 * 2 * h * 21_504 + 4 * attention
    assert parameters(nemotron_h())[0] == 2 * 131_072 * h + h + 52 * h + blocks


def test_presets_can_be_scaled_down():
    scaled_down = qwen3_next(num_layers=6, hidden_size=32, vocab_size=50, mtp_num_layers=1)
    assert (scaled_down.pattern, scaled_down.mtp_blocks) == ("GEGEGE*EGEGE", "*E")
    assert scaled_down.problems() == []
    assert mamba2(num_layers=3, hidden_size=128, vocab_size=50).mamba.num_heads == 4
    assert nemotron_h(pattern="M-*-", vocab_size=50).blocks == "M-*-"

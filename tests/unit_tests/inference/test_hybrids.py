# SPDX-License-Identifier: Apache-2.0
"""The command on a hybrid checkpoint against a full forward; chunked prefill; two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core import ProcessGroupCollection
from megatron.core.models import GPTConfig, GPTModel, InferenceOptimizedModel
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig, RopeConfig
from megatron.inference.generate import main
from tests.support.commands import run_on_ranks
from tests.support.greedy_command import (
    PROMPTS,
    arguments,
    assert_argmax_of_full_forward,
    assert_same_outputs,
    fill_weights,
    outputs_of,
    read_outputs,
    save_filled,
)
from tests.support.optimized_steps import note_optimized_steps

CONFIG = GPTConfig(
    num_layers=8,
    pattern="GEM-(*E)M-",
    hidden_size=20,
    vocab_size=259,
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=8, output_gate=True
    ),
    rope=RopeConfig(percent=0.25),
    mlp=MLPConfig(ffn_hidden_size=36),
    moe=MoEConfig(
        num_experts=4, ffn_hidden_size=14, router=RouterConfig(topk=2), capacity_factor=0.5
    ),
    delta_net=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=6, value_channels=5
    ),
    mamba=Mamba2Config(num_heads=4, head_channels=7, state_channels=3, num_groups=2, bias=True),
    mtp=MTPConfig(num_layers=1, pattern="*-"),
    init_std=0.4,
)
SCALE = 0.2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_filled(folder, GPTModel(CONFIG, ProcessGroupCollection.single()), SCALE)
    return folder


@pytest.fixture(scope="module")
def expected_outputs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("text") / "one.json"
    return outputs_of(arguments(root, path), path)


def test_greedy_tokens_are_the_argmax_of_a_full_forward(
    expected_outputs: list[dict[str, Any]],
) -> None:
    # Run each prompt alone, without a cache, in a model without expert capacity.
    moe = replace(CONFIG.moe, capacity_factor=None)
    config = replace(CONFIG, moe=moe, mtp=None)
    model = GPTModel(config, ProcessGroupCollection.single())
    fill_weights(model, SCALE)
    assert_argmax_of_full_forward(expected_outputs, model)


@pytest.mark.parametrize("rows", ["16", "3", "1"])
def test_chunked_prefill_and_batch_size_change_no_token(
    root: Path,
    expected_outputs: list[dict[str, Any]],
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    # note_optimized_steps replaces __call__; monkeypatch restores it after the test.
    monkeypatch.setattr(InferenceOptimizedModel, "__call__", InferenceOptimizedModel.__call__)
    note_optimized_steps(lengths)
    path = tmp_path / "parts.json"
    flags = ("--inference-max-tokens", "5", "--inference-max-requests", rows)
    assert_same_outputs(outputs_of(arguments(root, path, *flags), path), expected_outputs)
    longest = len(PROMPTS[2].encode())
    assert longest == 12
    assert max(lengths) == 5


@pytest.mark.parametrize("extra_flags", [("--transformer-impl", "local"), ("--sequence-parallel",)])
def test_two_ranks_generate_the_single_process_tokens(
    root: Path, expected_outputs: list[dict[str, Any]], tmp_path: Path, extra_flags: tuple[str, ...]
) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--inference-max-requests", "3", *extra_flags)
    flags += ("--inference-max-tokens", "6")
    words = arguments(root, tmp_path / "two.json", *flags)
    outcomes = run_on_ranks(main, words)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert all((outcome.steps > 1) == ("local" not in extra_flags) for outcome in outcomes)
    assert_same_outputs(read_outputs(tmp_path / "two.json"), expected_outputs)

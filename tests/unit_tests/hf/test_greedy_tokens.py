# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of models read from folders, against full forwards of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.inference import Engine, EngineConfig, EngineRequest, SamplingParams, generate
from megatron.core.models import InferenceOptimizedModel
from tests.support.hf_converter import checkpoint_model, imported
from tests.support.hf_folders import VOCABULARY, make_model, save_folder
from tests.support.inputs import generator, one_thread

NEW_TOKENS = 12
#: Prompts longer than a window, than a chunk of the prefill, and than a cache block.
LENGTHS = (3, 17, 29, 41)
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=generator(length)).tolist() for length in LENGTHS
]


def greedy_tokens(model: Any, prompt: list[int]) -> list[int]:
    """Return the tokens with the largest logits, by full forwards."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "case",
    [
        "smollm3",
        "cwm",
        "qwen3_mix",
        "qwen2_moe_mix",
        "dots1",
        "gpt_oss",
        "ministral3",
        "gpt2",
        "gemma3",
    ],
)
def test_greedy_tokens_match_transformers(case: str, tmp_path: Path) -> None:
    hf_model = make_model(case)
    source = save_folder(hf_model, tmp_path / "source")
    model = InferenceOptimizedModel(checkpoint_model(imported(source, tmp_path / "a")))
    config = EngineConfig(num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=16)
    requests = [
        EngineRequest(
            prompt=tuple(prompt),
            max_new_tokens=NEW_TOKENS,
            sampling=SamplingParams(temperature=0),
        )
        for prompt in PROMPTS
    ]
    with one_thread(), torch.no_grad():
        expected = [greedy_tokens(hf_model, prompt) for prompt in PROMPTS]
        outputs = generate(Engine(model, config), requests)
    assert [list(output.tokens) for (output,) in outputs] == expected

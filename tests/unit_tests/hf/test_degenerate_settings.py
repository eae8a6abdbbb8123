# SPDX-License-Identifier: Apache-2.0
"""Degenerate settings of an architecture: import, logits equal to transformers', and export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.closeness import assert_all_equal, assert_close_by_metric
from tests.support.hf_converter import checkpoint_model, convert, imported, tensors
from tests.support.hf_folders import VOCABULARY, load_folder, make_model, save_folder
from tests.support.inputs import generator, one_thread

TOKENS = torch.randint(VOCABULARY, (2, 19), generator=generator(23))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral, one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen3moe, one expert a token": ("qwen3moe-yarn", {"num_experts_per_tok": 1}),
    "deepseek, dense": ("deepseek", {"first_k_dense_replace": 3}),
    "qwen3next, dense": ("qwen3next", {"mlp_only_layers": [0, 1]}),
    "qwen3next, dense by step": ("qwen3next", {"decoder_sparse_step": 9}),
    "qwen3next, no attention": ("qwen3next", {"layer_types": ["linear_attention"] * 2}),
    "qwen3next, dense attention": (
        "qwen3next", {"layer_types": ["full_attention"] * 2, "mlp_only_layers": [0, 1]},
    ),
    "nemotronh, only mixers": ("nemotronh-dense", {"hybrid_override_pattern": "MM"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_degenerate_folder_survives_import_and_export(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    folder = save_folder(make_model(name, **changes), tmp_path / "model")
    checkpoint = imported(folder, tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint/hugging_face")  # config.json is written, not copied
    convert("export", "--load", checkpoint.parent, "--save", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert_all_equal(after, before)
    with one_thread(), torch.no_grad():
        expected = load_folder(folder)(TOKENS, use_cache=False).logits
        exported_logits = load_folder(tmp_path / "out")(TOKENS, use_cache=False).logits
        logits = checkpoint_model(checkpoint).full_logits(TOKENS).transpose(0, 1)
    assert_close_by_metric("exported logits", exported_logits, expected)
    assert_close_by_metric("logits", logits, expected)

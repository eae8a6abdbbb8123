# SPDX-License-Identifier: Apache-2.0
"""Hybrid models in real files: logits, all gradients, and names of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.hf.architectures import ARCHITECTURES
from tests.support.closeness import assert_all_close, assert_all_equal
from tests.support.hf_converter import (
    checkpoint_model,
    checkpoint_weights,
    convert,
    imported,
    tensors,
)
from tests.support.hf_family_cases import FAMILY_CASES
from tests.support.hf_folders import (
    HYBRID_CASES,
    change_json,
    make_model,
    save_folder,
)
from tests.support.hf_gradients import (
    TOKENS,
    gradients_by_name,
    hf_gradients,
    mcore_gradients,
    zero_gradients,
)
from tests.support.inputs import one_thread

#: The block pattern of each case: the comparison must cover every kind of block.
BLOCKS = {
    "qwen3next": "GE*E",
    "qwen3next-mixed-biases": "*EG-GE",
    "mamba2": "MM",
    "mamba2-tied-biases": "MM",
    "nemotronh": "ME*M-",
    "nemotronh-groups": "EM*",
    "nemotronh-dense": "M-*-",
    "smollm3": "*-W-W-*-",
    "ministral": "W-*-W-",
    "cwm": "*-W-W-",
    "qwen2_mix": "W-*-W-",
    "qwen3_mix": "*-W-W-",
    "qwen2_moe_mix": "W-*EW-*-",
    "dots1": "W-*EWE",
}


@pytest.mark.parametrize("case", [*HYBRID_CASES, *FAMILY_CASES])
def test_logits_and_all_gradients_match_transformers(case: str, tmp_path: Path) -> None:
    hf_model = make_model(case)
    source = save_folder(hf_model, tmp_path / "source")
    model = checkpoint_model(imported(source, tmp_path / "checkpoints"))
    assert model.config.blocks == BLOCKS.get(case, model.config.blocks)
    with one_thread():
        logits, gradients = hf_gradients(hf_model)
        actual, actual_gradients = mcore_gradients(model)
    assert logits.std() > 1  # otherwise an absolute bound would prove little
    expected = gradients_by_name(ARCHITECTURES[hf_model.config.model_type], model, gradients)
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.values())
    actual, expected = {"logits": actual, **actual_gradients}, {"logits": logits, **expected}
    biases = {name for name in expected if name.endswith("bias")}
    zeros = zero_gradients(model.config, biases)
    bound = 1e-4 if case in FAMILY_CASES else 1e-5
    weights = ({n: d[n] for n in d if n not in biases} for d in (actual, expected))
    assert_all_close(*weights, bound=bound)
    # Bias gradients are nearly vanishing sums; transformers' are as far from fp64.
    if biases:
        bias_gradients = ({n: d[n] for n in d if n in biases} for d in (actual, expected))
        assert_all_close(*bias_gradients, bound=max(bound, 3e-5), zeros=zeros)


@pytest.mark.parametrize("case", ["qwen3next", "nemotronh"])
def test_in_memory_names_and_skipped_mtp_tensors(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    hub = save_folder(model, tmp_path / "hub")
    memory = save_folder(model, tmp_path / "memory", save_original_format=False)
    names = tensors(memory).keys()
    assert names != tensors(hub).keys()
    assert any(name.endswith(".experts.down_proj") for name in names)
    assert case != "nemotronh" or "model.embeddings.weight" in names
    mtp_tensors = {"mtp.layers.0.norm.weight": torch.ones(48), "mtp.fc.weight": torch.ones(4, 4)}
    save_file({**tensors(hub), **mtp_tensors}, hub / "model.safetensors")
    printed = convert("import", "--hf", hub, "--save", tmp_path / "a")
    assert "skipped 2 tensors under mtp." in printed
    before, after = (
        checkpoint_weights(tmp_path / "a/iter_0000000"),
        checkpoint_weights(imported(memory, tmp_path / "b")),
    )
    assert_all_equal(after, before)


def test_gpt2_files_of_the_hub_have_no_prefix_but_masks(tmp_path: Path) -> None:
    folder = save_folder(make_model("gpt2"), tmp_path / "hub")
    expected = checkpoint_weights(imported(folder, tmp_path / "a"))
    hub = {name.removeprefix("transformer."): t for name, t in tensors(folder).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8).tril() for layer in range(2)}
    save_file({**hub, **masks}, folder / "model.safetensors")
    assert_all_equal(checkpoint_weights(imported(folder, tmp_path / "b")), expected)


def test_time_step_limit_is_used_not_transformers_time_step_min(
    tmp_path: Path,
) -> None:
    """Transformers up to 5.23 bounds the steps of Nemotron-H by time_step_min, without an upper
    bound; the weights were trained with the bounds of time_step_limit."""
    hf_model = make_model("nemotronh-dense", time_step_min=0.9)
    source = save_folder(hf_model, tmp_path / "source")
    model = checkpoint_model(imported(source, tmp_path / "a"))
    assert model.config.mamba.dt_limit[0] == 0.0
    change_json(source / "config.json", time_step_limit=[0.9, {"__float__": "Infinity"}])
    bounded = checkpoint_model(imported(source, tmp_path / "b"))
    with one_thread(), torch.no_grad():
        expected = hf_model(TOKENS, use_cache=False).logits
        unbounded_logits, bounded_logits = (
            m.full_logits(TOKENS).transpose(0, 1) for m in (model, bounded)
        )
    assert float((bounded_logits - expected).abs().max()) < 1e-4
    assert float((unbounded_logits - expected).abs().max()) > 1e-2
    # `--verify` compares with transformers under the published limit.
    convert("export", "--load", tmp_path / "a", "--save", tmp_path / "out", "--verify")

# SPDX-License-Identifier: Apache-2.0
"""Hybrid models in real files: logits, all gradients, and names of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.hf.architectures import ARCHITECTURES
from megatron.hf.tensor_map import tensor_map
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
    VOCABULARY,
    change_json,
    make_model,
    save_folder,
)
from tests.support.inputs import generator, one_thread

#: More than one chunk of the delta rule, and not a multiple of the chunk size.
LENGTH = 77
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=generator(14))
LABELS = torch.randint(VOCABULARY, (2, LENGTH), generator=generator(15))
WEIGHTS = 0.5 + torch.rand(2, LENGTH, generator=generator(16))

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


def hf_logits_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return transformers' logits and the gradients of a weighted loss by Hugging Face names."""
    logits = model(TOKENS, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), reduction="none"
    )
    (losses * WEIGHTS.flatten()).sum().backward()
    named = dict(model.named_parameters())
    named |= {"lm_head.weight": model.lm_head.weight}
    return logits.detach(), {n: p.grad for n, p in named.items() if p.grad is not None}


def mcore_logits_and_gradients(model: GPTModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits and gradients of our model by its own names."""
    engine = DataParallel(model.store, model.groups)
    engine.begin_step()
    loss, _ = model.loss(TOKENS, LABELS, WEIGHTS)
    engine.backward(loss, last=True)
    engine.finish()
    gradients: dict[str, torch.Tensor] = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            shard = flat[box.start : box.start + box.numel].view(box.sizes)
            gradient = gradients.setdefault(box.name, torch.full(box.shape, torch.nan))
            gradient[
                tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            ] = shard
    with torch.no_grad():
        return model.full_logits(TOKENS).transpose(0, 1), gradients


def is_rotary(config: GPTConfig, name: str) -> bool:
    """Return whether the attention block of a weight has rotary positions."""
    symbol = config.blocks[int(name.split(".")[2])]
    return (config.window_rope if symbol == "W" else config.attention_rope) is not None


@pytest.mark.parametrize("case", [*HYBRID_CASES, *FAMILY_CASES])
def test_logits_and_all_gradients_match_transformers(case: str, tmp_path: Path) -> None:
    hf_model = make_model(case)
    source = save_folder(hf_model, tmp_path / "source")
    model = checkpoint_model(imported(source, tmp_path / "checkpoints"))
    assert model.config.blocks == BLOCKS.get(case, model.config.blocks)
    with one_thread():
        logits, gradients = hf_logits_and_gradients(hf_model)
        actual, actual_gradients = mcore_logits_and_gradients(model)
    assert logits.std() > 1  # otherwise an absolute bound would prove little
    mapped = tensor_map(ARCHITECTURES[hf_model.config.model_type], model.config, names=gradients)
    expected = {}
    for name, tensor in mapped.mcore_tensors.items():
        if name in model.store.states:
            continue
        expected[name] = torch.full(tensor.shape, torch.nan)
        for tensor_slice in tensor.slices:
            box = tensor_slice.mcore_box(tensor_slice.whole)
            hf_tensor = mapped.hf_tensors[tensor_slice.hf_name]
            hf_box, layout = tensor_slice.hf_box(tensor_slice.whole), hf_tensor.layout
            values = gradients[tensor_slice.hf_name]
            if layout is None:
                values = values[hf_box.slices]
            else:
                stored_box = layout.stored_box(hf_box, hf_tensor.shape)
                values = layout.select(values[stored_box.slices])
            expected[name][box.slices] = values.reshape(box.sizes)
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.values())
    actual, expected = {"logits": actual, **actual_gradients}, {"logits": logits, **expected}
    biases = {name for name in expected if name.endswith("bias")}
    # Without rotary positions, a bias of all keys changes no softmax.
    zeros = {
        n for n in biases if n.endswith("attention.key.bias") and not is_rotary(model.config, n)
    }
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

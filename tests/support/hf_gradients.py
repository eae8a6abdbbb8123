# SPDX-License-Identifier: Apache-2.0
"""Logits, and gradients of a weighted loss, of a model of transformers and of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.hf.architecture import Architecture
from megatron.hf.tensor_map import tensor_map
from tests.support.hf_folders import VOCABULARY
from tests.support.inputs import generator

#: More than one chunk of the delta rule, and not a multiple of the chunk size.
LENGTH = 77
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=generator(14))
LABELS = torch.randint(VOCABULARY, (2, LENGTH), generator=generator(15))
WEIGHTS = 0.5 + torch.rand(2, LENGTH, generator=generator(16))


def hf_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return transformers' logits and the gradients of a weighted loss by Hugging Face names."""
    logits = model(TOKENS, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), reduction="none"
    )
    (losses * WEIGHTS.flatten()).sum().backward()
    named = dict(model.named_parameters())
    named |= {"lm_head.weight": model.lm_head.weight}
    return logits.detach(), {n: p.grad for n, p in named.items() if p.grad is not None}


def mcore_gradients(model: GPTModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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


def zero_gradients(config: GPTConfig, names: Iterable[str]) -> set[str]:
    """Return the biases of keys without rotary positions: a bias of all keys changes no softmax."""
    return {
        name
        for name in names
        if name.endswith("attention.key.bias") and not _is_rotary(config, name)
    }


def _is_rotary(config: GPTConfig, name: str) -> bool:
    """Return whether the attention block of a weight has rotary positions."""
    symbol = config.blocks[int(name.split(".")[2])]
    return (config.window_rope if symbol == "W" else config.attention_rope) is not None


def gradients_by_name(
    kind: Architecture, model: GPTModel, gradients: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return transformers' gradients by the names of our weights."""
    mapped = tensor_map(kind, model.config, names=gradients)
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
    return expected

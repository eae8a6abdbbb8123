# SPDX-License-Identifier: Apache-2.0
"""A folder as upstream's `torch_dist` has them, by rules written out here once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

#: Of the models that are written so.
LAYERS, GROUPS, CHANNELS, QUERIES = 3, 2, 6, 2

#: Rows that upstream adds to the vocabulary.
PADDING = 7

Tensors = dict[str, torch.Tensor]


def upstream_layer(weights: Tensors, layer: int, *, gated: bool, fused: bool) -> Tensors:
    """Return the tensors of a layer as upstream has them."""
    mixer, ffn = f"decoder.blocks.{2 * layer}", f"decoder.blocks.{2 * layer + 1}"
    found = {}
    for kind in ("weight", "bias"):
        if f"{mixer}.attention.query.{kind}" in weights:
            query, key, value = (
                weights[f"{mixer}.attention.{name}.{kind}"] for name in ("query", "key", "value")
            )
            rows = []
            for group in range(GROUPS):
                wide = QUERIES * CHANNELS
                rows.append(query[group * wide : (group + 1) * wide])
                rows.append(key[group * CHANNELS : (group + 1) * CHANNELS])
                rows.append(value[group * CHANNELS : (group + 1) * CHANNELS])
            found[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        names = {
            "self_attention.linear_proj": f"{mixer}.attention.output",
            "self_attention.q_layernorm": f"{mixer}.attention.query_norm",
            "self_attention.k_layernorm": f"{mixer}.attention.key_norm",
            "mlp.linear_fc2": f"{ffn}.mlp.down",
        }
        if not gated:
            names["mlp.linear_fc1"] = f"{ffn}.mlp.up"
        for theirs, name in names.items():
            if f"{name}.{kind}" in weights:
                found[f"{theirs}.{kind}"] = weights[f"{name}.{kind}"]
        for before, alone, block in (
            ("self_attention.linear_qkv.layer_norm_", "input_layernorm.", mixer),
            ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", ffn),
        ):
            if f"{block}.norm.{kind}" in weights:
                found[(before if fused else alone) + kind] = weights[f"{block}.norm.{kind}"]
    if gated:
        found["mlp.linear_fc1.weight"] = torch.cat(
            [weights[f"{ffn}.mlp.gate.weight"], weights[f"{ffn}.mlp.up.weight"]]
        )
    return found


def upstream_ends(weights: Tensors) -> Tensors:
    """Return embedding, final norm and head as upstream has them."""
    padding = torch.full((PADDING, weights["embedding.weight"].shape[1]), 9.0)
    names = {
        "embedding.weight": "embedding.word_embeddings.weight",
        "head.weight": "output_layer.weight",
        "decoder.final_norm.weight": "decoder.final_layernorm.weight",
        "decoder.final_norm.bias": "decoder.final_layernorm.bias",
    }
    found = {theirs: weights[name] for name, theirs in names.items() if name in weights}
    found = {
        name: torch.cat([value, padding.to(value.dtype)]) if value.dim() == 2 else value
        for name, value in found.items()
    }
    positions = "embedding.position_embeddings.weight"  # by the same name, without padding
    return found | ({positions: weights[positions]} if positions in weights else {})


def cut(value: torch.Tensor, *, dim: int, pieces: int, rank: int) -> Any:
    """Return a tensor of which two ranks hold every second of some equal pieces, layer by layer."""
    size = value.shape[dim] // pieces
    shards = []
    for layer in range(value.shape[0]):
        for piece in range(rank, pieces, 2):
            offsets = [0] * value.dim()
            offsets[0], offsets[dim] = layer, piece * size
            part = value[layer : layer + 1].narrow(dim, piece * size, size).contiguous()
            shards.append(Shard.from_tensor_and_offsets(part, offsets, rank))
    return init_from_local_shards(shards, *value.shape)


def save_upstream(rank: int, world: int, weights: Tensors, folder: Path) -> None:
    """Save as two tensor parallel ranks of upstream do: one axis of layers, cut rows or columns."""
    layers = [upstream_layer(weights, layer, gated=True, fused=True) for layer in range(LAYERS)]
    state: dict[str, Any] = dict(upstream_ends(weights))
    for name in layers[0]:
        value = torch.stack([layer[name] for layer in layers])
        key = f"decoder.layers.{name}"
        if "linear_qkv.weight" in name:
            state[key] = cut(value, dim=1, pieces=2, rank=rank)
        elif "fc1.weight" in name:  # each rank has some of the gate and some of up
            state[key] = cut(value, dim=1, pieces=4, rank=rank)
        elif "linear_proj" in name or "fc2" in name:
            state[key] = cut(value, dim=2, pieces=2, rank=rank)
        else:
            state[key] = value
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(22)
    state["decoder.layers.self_attention.core_attention._extra_state/shard_0_1"] = {"fp8": rank}
    state["rng_state/shard_0_1"] = {"seed": 3}
    dcp.save(state, checkpoint_id=folder)

# SPDX-License-Identifier: Apache-2.0
"""A folder in upstream's `torch_dist` format, by rules restated independently here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

#: Sizes of the models in this format.
LAYERS, GROUPS, CHANNELS, QUERIES = 3, 2, 6, 2

#: Rows that upstream adds to the vocabulary.
PADDING = 7

Tensors = dict[str, torch.Tensor]


def upstream_layer(weights: Tensors, layer: int, *, gated: bool, fused: bool) -> Tensors:
    """Return the tensors of a layer in upstream's layout."""
    mixer, ffn = f"decoder.blocks.{2 * layer}", f"decoder.blocks.{2 * layer + 1}"
    tensors = {}
    for kind in ("weight", "bias"):
        if f"{mixer}.attention.query.{kind}" in weights:
            query, key, value = (
                weights[f"{mixer}.attention.{name}.{kind}"] for name in ("query", "key", "value")
            )
            rows = []
            for group in range(GROUPS):
                query_rows = QUERIES * CHANNELS
                rows.append(query[group * query_rows : (group + 1) * query_rows])
                rows.append(key[group * CHANNELS : (group + 1) * CHANNELS])
                rows.append(value[group * CHANNELS : (group + 1) * CHANNELS])
            tensors[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        names = {
            "self_attention.linear_proj": f"{mixer}.attention.output",
            "self_attention.q_layernorm": f"{mixer}.attention.query_norm",
            "self_attention.k_layernorm": f"{mixer}.attention.key_norm",
            "mlp.linear_fc2": f"{ffn}.mlp.down",
        }
        if not gated:
            names["mlp.linear_fc1"] = f"{ffn}.mlp.up"
        for upstream_name, name in names.items():
            if f"{name}.{kind}" in weights:
                tensors[f"{upstream_name}.{kind}"] = weights[f"{name}.{kind}"]
        for fused_name, separate_name, block in (
            ("self_attention.linear_qkv.layer_norm_", "input_layernorm.", mixer),
            ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", ffn),
        ):
            if f"{block}.norm.{kind}" in weights:
                tensors[(fused_name if fused else separate_name) + kind] = weights[
                    f"{block}.norm.{kind}"
                ]
    if gated:
        tensors["mlp.linear_fc1.weight"] = torch.cat(
            [weights[f"{ffn}.mlp.gate.weight"], weights[f"{ffn}.mlp.up.weight"]]
        )
    return tensors


def upstream_ends(weights: Tensors) -> Tensors:
    """Return embedding, final norm and head in upstream's layout."""
    padding = torch.full((PADDING, weights["embedding.weight"].shape[1]), 9.0)
    names = {
        "embedding.weight": "embedding.word_embeddings.weight",
        "head.weight": "output_layer.weight",
        "decoder.final_norm.weight": "decoder.final_layernorm.weight",
        "decoder.final_norm.bias": "decoder.final_layernorm.bias",
    }
    tensors = {
        upstream_name: weights[name] for name, upstream_name in names.items() if name in weights
    }
    tensors = {
        name: torch.cat([value, padding.to(value.dtype)]) if value.dim() == 2 else value
        for name, value in tensors.items()
    }
    positions = "embedding.position_embeddings.weight"  # by the same name, without padding
    return tensors | ({positions: weights[positions]} if positions in weights else {})


def cut(value: torch.Tensor, *, dim: int, num_shards: int, rank: int) -> Any:
    """Return a sharded tensor: of `num_shards` equal shards of a layer, a rank has every second."""
    size = value.shape[dim] // num_shards
    shards = []
    for layer in range(value.shape[0]):
        for index in range(rank, num_shards, 2):
            offsets = [0] * value.dim()
            offsets[0], offsets[dim] = layer, index * size
            shard = value[layer : layer + 1].narrow(dim, index * size, size).contiguous()
            shards.append(Shard.from_tensor_and_offsets(shard, offsets, rank))
    return init_from_local_shards(shards, *value.shape)


def save_upstream(rank: int, world: int, weights: Tensors, folder: Path) -> None:
    """Save like two tensor parallel ranks of upstream: stacked layers, sharded rows or columns."""
    layers = [upstream_layer(weights, layer, gated=True, fused=True) for layer in range(LAYERS)]
    state: dict[str, Any] = dict(upstream_ends(weights))
    for name in layers[0]:
        value = torch.stack([layer[name] for layer in layers])
        key = f"decoder.layers.{name}"
        if "linear_qkv.weight" in name:
            state[key] = cut(value, dim=1, num_shards=2, rank=rank)
        elif "fc1.weight" in name:  # each rank has some of the gate and some of up
            state[key] = cut(value, dim=1, num_shards=4, rank=rank)
        elif "linear_proj" in name or "fc2" in name:
            state[key] = cut(value, dim=2, num_shards=2, rank=rank)
        else:
            state[key] = value
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(22)
    state["decoder.layers.self_attention.core_attention._extra_state/shard_0_1"] = {"fp8": rank}
    state["rng_state/shard_0_1"] = {"seed": 3}
    dcp.save(state, checkpoint_id=folder)

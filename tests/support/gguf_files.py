# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small random models, written by the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.support.hf_folders import LENGTH, make_model

#: A multiple of the 256 elements of a block.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
#: Bytes of a K-quantized block and the positions of its fp16 scales.
_BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor of Hugging Face."""
    module, _, suffix = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.{suffix}"
    return f"{_NAMES[module]}.{suffix}"


def _random_blocks(shape: Sequence[int], kind: str, seed: int) -> np.ndarray:
    """Return random K-quantized blocks with scales of moderate size."""
    random = np.random.default_rng(seed)
    size, scale_positions = _BLOCKS[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    for position in scale_positions:
        scales = random.uniform(1e-4, 4e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., position : position + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    case: str,
    kind: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    rope_factors: bool = False,
    **changes: Any,
) -> Any:
    """Write a model with matrices of one type of GGUF, and return the model of transformers."""
    model = make_model(case, **{**SIZES, **changes})
    write_model(path, model, kind, context=LENGTH, metadata=metadata, rope_factors=rope_factors)
    return model


def write_model(
    path: Path,
    model: Any,
    kind: str,
    *,
    context: int,
    metadata: Mapping[str, Any] | None = None,
    rope_factors: bool = False,
) -> None:
    """Write a model of transformers with matrices of one type of GGUF.

    Args:
        path: of the file.
        model: a model of the Llama or Qwen shape.
        kind: type of the matrices, as `gguf.GGMLQuantizationType` names it.
        context: longest text in tokens.
        metadata: more entries.
        rope_factors: write the tensor that scales the frequencies of rotary positions.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(str(path), architecture)
    heads, rope = config.num_attention_heads, config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    for name, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(name, value)
    if rope_factors:
        plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        scaled = model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    qtype = gguf.GGMLQuantizationType[kind]
    for seed, (name, weight) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values.astype(np.float32))
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = values.reshape(-1, 2, head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if kind in _BLOCKS:
            stored = _random_blocks(values.shape, kind, seed)
        else:
            stored = gguf.quants.quantize(values, qtype)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reference_logits(path: Path, model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [s, b, v] of a model of transformers with the weights of a GGUF file, which
    the package `gguf` has read and dequantized."""
    reader = gguf.GGUFReader(str(path))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = model.config
    with torch.no_grad():
        for name, weight in model.named_parameters():
            tensor = stored[gguf_name(name)]
            values = torch.from_numpy(
                np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            )
            if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
                pairs = values.view(-1, config.head_dim // 2, 2, weight.shape[1])
                values = pairs.transpose(1, 2).reshape(weight.shape)
            weight.copy_(values.view(weight.shape))
        return model(tokens, use_cache=False).logits.transpose(0, 1)

# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as config.json and tensors with Hugging Face's names.

Only this module imports the package `gguf`, which dequantizes blocks. The header is read by
`megatron.cli.gguf_file`, within bounds.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch

from megatron.cli.gguf_file import GGUFFile, GGUFTensor
from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing.safetensors_file import TensorInfo, as_bytes

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

#: Types that are read without the package `gguf`.
_FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_MODEL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
)
_LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_ROPE_FACTORS = "rope_freqs.weight"
#: Frequency bounds and original length of the RoPE scaling of Llama 3.
_LLAMA3 = MappingProxyType(
    {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)
#: Metadata of an architecture that is read, or that does not change the model.
_FIELD_NAMES = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of config.json for the metadata of a GGUF file.

    Raises:
        ValueError: the architecture or a value is not supported; the message names the field.
    """
    metadata = _Metadata(file)
    architecture = metadata.architecture
    for name in file.metadata:
        field = name.removeprefix(f"{architecture}.")
        if field != name and field not in _FIELD_NAMES:
            metadata.refuse(field, "it is unknown and could change the model")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path} has no matrix token_embd.weight")
    hidden_size, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", max(1, hidden_size // heads))
    for field in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(field, head_dim) != head_dim:
            metadata.refuse(field, f"supported is the size of a head, {head_dim}")
    if metadata.find("expert_count"):
        metadata.refuse("expert_count", "models with experts are not supported")
    config: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "torch_dtype": _dtype_name(file),
    }
    if (scaling := _rope_scaling(file, metadata, config)) is not None:
        config["rope_scaling"] = scaling
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    for name in ("bos", "eos"):
        number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(number) is int and number < embedding.shape[0]:
            config[f"{name}_token_id"] = number
    return config


class _Metadata:
    """Typed access to the metadata of a file's architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.architecture = file.metadata.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{file.path}: general.architecture is {self.architecture!r:.80}: supported are "
                f"{', '.join(_ARCHITECTURES)}"
            )

    def find(self, field: str) -> Any:
        """Return a value of the architecture, None if it is absent."""
        return self._file.metadata.get(f"{self.architecture}.{field}")

    def refuse(self, field: str, why: str) -> NoReturn:
        """Raise ValueError for a value."""
        raise ValueError(
            f"{self._file.path}: {self.architecture}.{field} is {self.find(field)!r:.80}: {why}"
        )

    def count(self, field: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.find(field)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < 1 << 31:
            self.refuse(field, "expected a positive integer")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.find(field)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            self.refuse(field, "expected a positive number")
        # A 32-bit value: the shortest decimal fraction that rounds to it.
        return float(str(np.float32(value)))


def _dtype_name(file: GGUFFile) -> str:
    """Return the dtype of the matrices; bfloat16 if they are quantized or of several types."""
    types = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _rope_scaling(
    file: GGUFFile, metadata: _Metadata, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json, None without scaling."""
    kind = metadata.find("rope.scaling.type")
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        metadata.refuse("rope.scaling.type", "supported are none, linear and yarn")
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        length = metadata.count("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    return scaling


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of Llama 3 for the divisors of frequencies that the file contains."""
    tensor = file.tensors[_ROPE_FACTORS]
    half = config["head_dim"] // 2
    if tensor.shape != (half,) or tensor.type.name != "F32":
        raise ValueError(f"{file.path}: {_ROPE_FACTORS} is not F32 [{half}]")
    divisors = torch.empty(half)
    file.read_into(as_bytes(divisors), tensor.begin)
    factor = round(float(divisors.max()), 4)  # of an fp32 quotient
    frequencies = config["rope_theta"] ** -(torch.arange(half) / half)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not factor >= 1 or not torch.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{file.path}: {_ROPE_FACTORS} is not the RoPE scaling of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


@dataclass(frozen=True)
class _Source:
    """A tensor of the file, and the number of channels of a head whose RoPE rows are permuted."""

    tensor: GGUFTensor
    permuted_heads: int | None


class GGUFTensors:
    """The tensors of an open GGUF file by Hugging Face's names.

    Llama's files interleave the rows of queries and keys: the rows of a head [2, d / 2] are stored
    as [d / 2, 2]. They are read in Hugging Face's order.

    Args:
        file: the open file.
        config: the fields of config.json for it.

    Attributes:
        tensors: dtype and shape of each tensor. Quantized tensors are BF16.

    Raises:
        ValueError: the package `gguf` is needed and is not installed.
    """

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        self._file, self.path = file, file.path
        self._sources: dict[str, _Source] = {}
        for gguf_name, tensor in file.tensors.items():
            if gguf_name == _ROPE_FACTORS:
                continue
            name = _hf_name(gguf_name)
            if name in self._sources:
                raise ValueError(f"{file.path} has two tensors for {name}")
            is_permuted = config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name)
            self._sources[name] = _Source(tensor, config["head_dim"] if is_permuted else None)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                source.tensor.type.name if source.tensor.type.name in _FLOATS else "BF16",
                source.tensor.shape,
                source.tensor.begin,
                source.tensor.end,
            )
            for name, source in self._sources.items()
        }
        types = {source.tensor.type.name for source in self._sources.values()}
        if types - _FLOATS.keys() and importlib.util.find_spec("gguf") is None:
            raise ValueError(
                f"{file.path} has tensors of {', '.join(sorted(types - _FLOATS.keys()))}, which "
                "need the package gguf: pip install gguf"
            )

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, header included."""
        return self._file.bytes_read

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read only the blocks of a box of a tensor, dequantized, into `target` [*box.sizes].

        Raises:
            ValueError: the file was truncated or cannot be read, or a value is not finite.
        """
        source = self._sources[name]
        for band in row_boxes(box.sizes, torch.float32.itemsize):
            if not band.numel:
                continue
            values = self._read(source, band.within(box.offsets))
            if not bool(values.isfinite().all()):
                raise ValueError(f"{self.path}: {name} is not finite")
            target[band.slices].copy_(values.view(band.sizes))

    def _read(self, source: _Source, box: Box) -> torch.Tensor:
        """Return a box of a tensor in fp32, from the blocks of its rows."""
        tensor = source.tensor
        shape, offsets, sizes = tensor.shape, box.offsets, box.sizes
        if len(shape) == 1:  # a vector is a row, or rows of one element if they are permuted
            is_column = source.permuted_heads is not None
            shape = (shape[0], 1) if is_column else (1, shape[0])
            offsets = (offsets[0], 0) if is_column else (0, offsets[0])
            sizes = (sizes[0], 1) if is_column else (1, sizes[0])
        assert len(shape) == 2, "check_tensors refuses tensors with more dimensions"
        kind = tensor.type
        begin_block = offsets[1] // kind.block_size
        end_block = -(-(offsets[1] + sizes[1]) // kind.block_size)
        row_bytes = shape[1] // kind.block_size * kind.block_bytes
        stored = torch.empty(
            (sizes[0], (end_block - begin_block) * kind.block_bytes), dtype=torch.uint8
        )
        for row, byte, count in self._runs(source, offsets[0], stored, row_bytes):
            begin = tensor.begin + byte + begin_block * kind.block_bytes
            view = as_bytes(stored[row : row + count])
            if self._file.read_into(view, begin) < len(view):
                raise ValueError(f"{self.path} was truncated while it was read")
        skipped = offsets[1] - begin_block * kind.block_size
        return _dequantize(stored, kind.name).narrow(1, skipped, sizes[1])

    def _runs(
        self, source: _Source, begin_row: int, stored: torch.Tensor, row_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (row of `stored`, byte of the row in the tensor, number of adjacent rows)."""
        num_rows, read_bytes = stored.shape
        dim = source.permuted_heads
        if dim is None and read_bytes == row_bytes:
            yield 0, begin_row * row_bytes, num_rows
            return
        for row in range(num_rows):
            stored_row = begin_row + row
            if dim is not None:
                head, channel = divmod(stored_row, dim)
                half, index = divmod(channel, dim // 2)
                stored_row = head * dim + 2 * index + half
            yield row, stored_row * row_bytes, 1


def _hf_name(gguf_name: str) -> str:
    """Return Hugging Face's name of a tensor; an unknown name is returned unchanged."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{suffix}"
    words = stem.split(".")
    if len(words) == 3 and words[0] == "blk" and words[2] in _LAYER_NAMES:
        return f"model.layers.{words[1]}.{_LAYER_NAMES[words[2]]}.{suffix}"
    return gguf_name


def _dequantize(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """Return rows of blocks [rows, bytes] in fp32."""
    if kind in _FLOATS:
        return stored.view(_FLOATS[kind]).float()
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # `read_box` refuses values that are not finite
        return torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType[kind]))

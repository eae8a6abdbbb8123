# SPDX-License-Identifier: Apache-2.0
"""Parse `quantization_config` in config.json: the formats FP8, MXFP4, AWQ, GPTQ and
compressed-tensors.

A field that is unknown is an error, because it could change the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron.hf.fields import Fields
from megatron.hf.packed_int4 import AWQ, COMPRESSED_TENSORS, GPTQ, PackedInt4
from megatron.hf.quantized import FP8, GROUP, INT8, MXFP4, Quantization, ScaledMatrices

#: Lists of modules whose weights are not quantized, which their tensors show.
_MODULE_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")

#: Fields of GPTQ and AWQ that describe how a model was quantized, or choose a kernel.
_NEUTRAL_INT4_FIELDS = (
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_percent",
    "dataset",
    "desc_act",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "hyb_act",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_fuse",
    "offload_to_disk",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)


def quantization_of(config: Mapping[str, Any], *, where: str) -> Quantization | None:
    """Return the quantization of a config.json; None without a quantization_config.

    Args:
        config: the fields of config.json.
        where: its path, for errors.

    Raises:
        ValueError: the quantization is not supported; the message names the field.
    """
    quantization_config = config.get("quantization_config")
    if quantization_config is None:
        return None
    if not isinstance(quantization_config, dict):
        Fields(config, where).refuse("quantization_config", "expected an object")
    fields = Fields(quantization_config, where, prefix="quantization_config.")
    method = quantization_config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        fields.refuse(
            "quant_method",
            f"supported are {', '.join(_METHODS)}: save the model dequantized, without "
            "quantization_config",
        )
    return _METHODS[method](fields)


def _fp8(fields: Fields) -> Quantization:
    """Parse "fp8": DeepSeek's and Qwen's blocks, or scales of matrices and rows."""
    fields.must_be("fmt", "e4m3")
    fields.must_be("scale_fmt", "ue8m0", "float")
    # The quantization of activations and of the cache does not change the weights.
    _refuse_unknown(
        fields, "fmt", "scale_fmt", "weight_block_size", "activation_scheme", "kv_cache_scheme"
    )
    return ScaledMatrices(_block(fields, "weight_block_size"))


def _mxfp4(fields: Fields) -> Quantization:
    """Parse "mxfp4", the experts of gpt-oss."""
    _refuse_unknown(fields, "dequantize")  # `dequantize` only tells transformers what to do
    return MXFP4()


def _gptq(fields: Fields) -> Quantization:
    """Parse "gptq" (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write it."""
    fields.must_be("checkpoint_format", "gptq", "gptq_v2")
    fields.must_be("is_marlin_format", False)
    _check_int4(fields, "checkpoint_format", "is_marlin_format")
    return PackedInt4(
        GPTQ,
        _group_size(fields),
        is_symmetric=fields.flag("sym", False),
        zero_offset=int(fields.raw.get("checkpoint_format") != "gptq_v2"),
        needs_index=fields.flag("desc_act", False),
    )


def _awq(fields: Fields) -> Quantization:
    """Parse "awq" (Lin et al. 2023, arXiv 2306.00978), as AutoAWQ writes it."""
    for name in ("version", "checkpoint_format"):
        fields.must_be(name, "gemm", "GEMM")
    fields.must_be("zero_point", True)
    _check_int4(fields, "version", "checkpoint_format", "zero_point")
    return PackedInt4(AWQ, _group_size(fields))


def _check_int4(fields: Fields, *names: str) -> None:
    """Check the fields that GPTQ and AWQ have in common."""
    if fields.raw.get("bits") != 4 or type(fields.raw["bits"]) is not int:
        fields.refuse("bits", "supported is 4")
    fields.must_be("pack_dtype", "int32")
    if fields.raw.get("dynamic"):
        fields.refuse("dynamic", "other settings for some modules are not supported")
    method_names = ("format", "method")
    for name in method_names:
        fields.must_be(name, "gptq", "gptq_v2", "awq", "gemm")
    _refuse_unknown(
        fields,
        "bits",
        "group_size",
        "pack_dtype",
        "dynamic",
        *method_names,
        *_NEUTRAL_INT4_FIELDS,
        *names,
    )


def _group_size(fields: Fields) -> int | None:
    """Return the number of input channels per scale; None for -1, all input channels."""
    return None if fields.raw.get("group_size") == -1 else fields.count("group_size")


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block, from a list or a text like 128x128."""
    block = fields.raw.get(name)
    if block is None:
        return None
    if isinstance(block, str) and (match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", block)):
        block = [int(match[1]), int(match[2])]
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size < 1 << 31 for size in block)
    ):
        fields.refuse(name, "expected rows and columns of a block, [128, 128]")
    return block[0], block[1]


def _compressed_tensors(fields: Fields) -> Quantization:
    """Parse "compressed-tensors", as LLM Compressor writes it.

    All groups of modules must have the same quantization of weights.
    """
    for name in ("sparsity_config", "transform_config"):
        config = fields.inner(name)
        if config is not None and config.raw.get("format") != "dense":
            fields.refuse(name, "sparse and transformed weights are not supported")
    fields.must_be("quantization_status", "compressed", "frozen")
    _refuse_unknown(
        fields,
        "config_groups",
        "format",
        "global_compression_ratio",
        "kv_cache_scheme",
        "quantization_status",
        "sparsity_config",
        "transform_config",
        "version",
    )
    groups = fields.inner("config_groups")
    if groups is None:
        fields.refuse("config_groups", "expected the groups of quantized modules")
    quantizations = []
    for name in groups.raw:
        group = groups.inner(name)
        weights = None if group is None else group.inner("weights")
        if group is None or weights is None:
            groups.refuse(name, "it does not quantize weights, which is not supported")
        has_format = group.raw.get("format") is not None
        quantizations.append(_compressed_weights(group if has_format else fields, weights))
    if any(quantization != quantizations[0] for quantization in quantizations):
        fields.refuse("config_groups", "all groups must quantize weights in the same way")
    return quantizations[0]


def _compressed_weights(format_fields: Fields, weights: Fields) -> Quantization:
    """Return the quantization of a group of modules of compressed-tensors.

    Args:
        format_fields: the fields with `format`.
        weights: how the weights of the group are quantized.
    """
    for name in weights.raw:
        if name not in _WEIGHT_FIELDS:
            weights.refuse(name, "it is unknown and could change the weights")
    weights.must_be("dynamic", False)
    form, strategy = format_fields.raw.get("format"), weights.raw.get("strategy")
    is_symmetric = weights.flag("symmetric", True)
    kind = (weights.raw.get("type", "int"), weights.raw.get("num_bits"))
    if form not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized") and (
        form != "mxfp4-pack-quantized"
    ):
        format_fields.refuse(
            "format",
            "supported are float-quantized, int-quantized, naive-quantized, pack-quantized and "
            "mxfp4-pack-quantized",
        )
    if form == "mxfp4-pack-quantized":
        if kind != ("float", 4) or weights.raw.get("group_size") != GROUP:
            weights.refuse("num_bits", f"{form} needs 4 bits, type float and group_size {GROUP}")
        return MXFP4(is_flat=True)
    if form == "pack-quantized":
        if kind != ("int", 4) or strategy not in ("group", "channel"):
            weights.refuse("num_bits", f"{form} needs 4 bits, type int, strategy group or channel")
        return PackedInt4(
            COMPRESSED_TENSORS,
            _group_size(weights) if strategy == "group" else None,
            is_symmetric=is_symmetric,
            needs_index=weights.raw.get("actorder") in ("group", "dynamic"),
        )
    if kind not in (("float", 8), ("int", 8)) or not is_symmetric:
        weights.refuse("num_bits", f"{form} needs 8 bits, and symmetric quantization")
    block = None
    if strategy == "block":
        block = _block(weights, "block_structure")
    elif strategy == "group":
        block = (1, weights.count("group_size"))
    if strategy not in ("tensor", "channel", "group", "block") or (strategy == "block") > (
        block is not None
    ):
        weights.refuse("strategy", "supported are tensor, channel, group, block with its size")
    return ScaledMatrices(block, FP8 if kind[0] == "float" else INT8)


_WEIGHT_FIELDS = frozenset(
    {
        "actorder",
        "block_structure",
        "dynamic",
        "group_size",
        "num_bits",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "strategy",
        "symmetric",
        "type",
        "zp_dtype",
    }
)

_METHODS: Mapping[str, Callable[[Fields], Quantization]] = MappingProxyType(
    {
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
    }
)


def _refuse_unknown(fields: Fields, *names: str) -> None:
    """Reject unknown fields, which could change the weights, and malformed lists of modules."""
    for name in _MODULE_LISTS:
        listed = fields.raw.get(name) or []
        if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
            fields.refuse(name, "expected names of modules")
    for name in fields.raw:
        if name not in ("quant_method", *_MODULE_LISTS, *names):
            fields.refuse(name, "it is unknown and could change the weights")

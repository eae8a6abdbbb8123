# SPDX-License-Identifier: Apache-2.0
"""Check this package's uses of TransformerEngine against the source of a release.

    python -m tests.support.te_contract build/transformer-engine/2.20.2 te-2.19.0.whl

reads folders or wheels without importing them, prints one table for all releases, one line per
drift, and exits with 1 if there is one. The table below is the whole contract: what
`megatron.core.extensions.transformer_engine` passes, overrides and implements.
"""

from __future__ import annotations

import argparse
import ast
import posixpath
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Use:
    """A function or method of TE that we call, or one that TE calls on us.

    Args:
        path: of the module, below transformer_engine/pytorch.
        name: `Class.method`, a function, or a class of fields: a dataclass or an enum.
        arguments: that must exist, by name.
        positions: how many arguments TE or we give by position, without self.
    """

    path: str
    name: str
    arguments: tuple[str, ...]
    positions: int


_TENSOR_PARALLEL = ("parallel_mode", "tp_group", "tp_size", "sequence_parallel")
_LINEAR = ("bias", "params_dtype", "device", "fuse_wgrad_accumulation")
_NORM = ("eps", "zero_centered_gamma", "device", "dtype")
_TENSOR = ("shape", "dtype", "device", "requires_grad")
_TENSOR_DATA = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "quantizer",
    "with_gemm_swizzled_scales",
)

CONTRACT: tuple[Use, ...] = (
    Use("module/linear.py", "Linear.__init__", (*_TENSOR_PARALLEL, *_LINEAR), 2),
    Use("module/linear.py", "Linear.forward", (), 1),
    Use(
        "module/layernorm_linear.py",
        "LayerNormLinear.__init__",
        (*_TENSOR_PARALLEL, *_LINEAR, "eps", "normalization", "zero_centered_gamma"),
        2,
    ),
    Use("module/layernorm_linear.py", "LayerNormLinear.forward", (), 1),
    Use("module/grouped_linear.py", "GroupedLinear.__init__", (*_LINEAR, "use_grouped_tensor"), 3),
    Use("module/grouped_linear.py", "GroupedLinear.forward", (), 2),
    Use(
        "attention/dot_product_attention/dot_product_attention.py",
        "DotProductAttention.__init__",
        ("num_gqa_groups", "attention_dropout", "window_size", "softmax_scale", "softmax_type"),
        2,
    ),
    Use(
        "attention/dot_product_attention/dot_product_attention.py",
        "DotProductAttention.forward",
        (
            "qkv_format",
            "attn_mask_type",
            "cu_seqlens_q",
            "cu_seqlens_kv",
            "max_seqlen_q",
            "max_seqlen_kv",
        ),
        3,
    ),
    Use("module/rmsnorm.py", "RMSNorm.__init__", _NORM, 1),
    Use("ops/basic/rmsnorm.py", "RMSNorm.__init__", _NORM, 1),
    Use("module/layernorm.py", "LayerNorm.__init__", _NORM, 1),
    Use("ops/basic/layer_norm.py", "LayerNorm.__init__", _NORM, 1),
    Use("distributed_weight.py", "DistributedWeight.materialize_group_for_forward", (), 0),
    Use("distributed_weight.py", "DistributedWeight.materialize_group_for_backward", (), 0),
    Use("distributed_weight.py", "DistributedWeight.finalize_group_grads", (), 1),
    Use("distributed_weight.py", "DistributedWeight.grad_buffer", (), 0),
    Use("module/_common.py", "WeightGradStore.delay_wgrad_compute", (), 0),
    Use("module/_common.py", "WeightGradStore.put", (), 2),
    Use("quantization.py", "autocast.__init__", ("enabled", "recipe"), 0),
    *(
        Use("quantization.py", f"is_{name}_available", ("return_reason",), 0)
        for name in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4")
    ),
    Use("quantization.py", "FP8GlobalStateManager.get_buffer_info", (), 0),
    Use("module/base.py", "TransformerEngineBaseModule.init_fp8_metadata", ("num_gemms",), 0),
    Use("tensor/float8_tensor.py", "Float8Quantizer.__init__", (), 3),
    *(
        Use(path, f"{kind}.copy", (), 0)
        for path, kind in (
            ("tensor/float8_tensor.py", "Float8Quantizer"),
            ("tensor/float8_tensor.py", "Float8CurrentScalingQuantizer"),
            ("tensor/mxfp8_tensor.py", "MXFP8Quantizer"),
            ("tensor/float8_blockwise_tensor.py", "Float8BlockQuantizer"),
            ("tensor/nvfp4_tensor.py", "NVFP4Quantizer"),
        )
    ),
    Use(
        "tensor/float8_tensor.py",
        "Float8CurrentScalingQuantizer.__init__",
        ("rowwise", "columnwise"),
        2,
    ),
    Use(
        "tensor/storage/float8_tensor_storage.py",
        "Float8TensorStorage.__new__",
        ("data", "fp8_scale_inv", "fp8_dtype", "quantizer"),
        1,
    ),
    *(
        Use(f"tensor/{kind.lower()}_tensor.py", f"{kind}{name}", arguments, positions)
        for kind, dtype, extra_fields in (
            ("MXFP8", "fp8_dtype", ()),
            ("NVFP4", "fp4_dtype", ("amax_rowwise", "amax_columnwise")),
        )
        for name, arguments, positions in (
            ("Quantizer.__init__", ("rowwise", "columnwise", "with_2d_quantization"), 1),
            ("Quantizer.get_scale_shape", ("columnwise",), 1),
            ("Tensor.__new__", (*_TENSOR_DATA, dtype, *extra_fields), 0),
        )
    ),
    Use("quantized_tensor.py", "QuantizedTensor.__new__", _TENSOR, 0),
    Use("constants.py", "DType", ("kFloat8E4M3", "kFloat4E2M1"), 0),
    Use("quantized_tensor.py", "Quantizer.set_usage", ("rowwise", "columnwise"), 0),
    Use("../common/recipe/__init__.py", "Format", ("E4M3", "HYBRID"), 0),
    Use("../common/recipe/__init__.py", "DelayedScaling", ("fp8_format", "amax_history_len"), 0),
    *(
        Use("../common/recipe/__init__.py", kind, ("fp8_format",), 0)
        for kind in (
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
        )
    ),
)


def _make_reader(source: Path) -> Callable[[str], str | None]:
    """Return what reads a file below transformer_engine/pytorch; None where there is none."""
    if source.is_dir():
        folder = source / "transformer_engine" / "pytorch"

        def of_folder(path: str) -> str | None:
            file = folder / path
            return file.read_text() if file.is_file() else None

        return of_folder
    archive = zipfile.ZipFile(source)

    def of_wheel(path: str) -> str | None:
        name = posixpath.normpath(f"transformer_engine/pytorch/{path}")
        return archive.read(name).decode() if name in archive.namelist() else None

    return of_wheel


def drifts(source: Path, uses: tuple[Use, ...] = CONTRACT) -> Iterator[tuple[Use, str]]:
    """Yield each use that a release does not allow, and why.

    Args:
        source: a folder with `transformer_engine` in it, or a wheel.
    """
    read = _make_reader(source)
    for use in uses:
        text = read(use.path)
        if text is None:
            yield use, f"there is no {use.path}"
            continue
        tree = ast.parse(text)
        fields = _fields(tree, use.name)
        if fields is not None:
            missing = [name for name in use.arguments if name not in fields]
            if missing:
                yield use, f"{use.name} has no field {', '.join(missing)}"
            continue
        function = _function(tree, use.name)
        if function is None:
            yield use, f"{use.path} has no {use.name}"
            continue
        yield from ((use, problem) for problem in _problems(function.args, use))


def _fields(tree: ast.Module, name: str) -> set[str] | None:
    """Return the fields or members of a class; None if `name` is no class."""
    kinds = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    if not kinds:
        return None
    field_names: set[str] = set()
    for line in kinds[0].body:
        targets = line.targets if isinstance(line, ast.Assign) else []
        targets = [line.target] if isinstance(line, ast.AnnAssign) else targets
        field_names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return field_names


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    body: list[ast.stmt] = tree.body
    *classes, function_name = name.split(".")
    for class_name in classes:
        kinds = [n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name]
        if not kinds:
            return None
        body = kinds[0].body
    functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function_name]
    return functions[0] if functions else None


def _problems(arguments: ast.arguments, use: Use) -> Iterator[str]:
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if "." in use.name:
        positional = positional[1:]  # self
    parameter_names = {*positional, *(a.arg for a in arguments.kwonlyargs)}
    missing = [name for name in use.arguments if name not in parameter_names]
    if missing and arguments.kwarg is None:
        yield f"{use.name} has no argument {', '.join(missing)}"
    required = positional[: len(positional) - len(arguments.defaults)]
    least = len([name for name in required if name not in use.arguments])
    max_positional = len(positional) if arguments.vararg is None else use.positions
    if not least <= use.positions <= max_positional:
        counts = f"{least} to {max_positional} arguments by position"
        yield f"{use.name} takes {counts}, not {use.positions}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="te_contract", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, help="folders or wheels")
    sources = parser.parse_args().sources
    absent = [str(source) for source in sources if not source.exists()]
    if absent:
        parser.error(f"{', '.join(absent)}: no such folder or wheel, run make te-wheels")
    drifts_by_source = {source: dict(drifts(source)) for source in sources}
    width = max(len(use.name) for use in CONTRACT)
    print(f"{'':{width}}  " + "  ".join(source.name for source in sources))
    for use in CONTRACT:
        marks = (
            f"{'drift' if use in drifts_by_source[source] else 'ok':{len(source.name)}}"
            for source in sources
        )
        print(f"{use.name:{width}}  " + "  ".join(marks))
    for source, problems in drifts_by_source.items():
        for problem in problems.values():
            print(f"{source.name}: {problem}")
    return int(any(drifts_by_source.values()))


if __name__ == "__main__":
    sys.exit(main())

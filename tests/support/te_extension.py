# SPDX-License-Identifier: Apache-2.0
"""A stand-in for TransformerEngine's compiled extension, so that TE's own Python runs on a CPU.

The wheel `transformer-engine` has all of TE's Python; only the module `transformer_engine_torch`
needs CUDA. `install` puts one in its place that does in torch what the layers under test ask for:
matrix products (one or grouped, written to an output or added to it), the norms, and FP8 tensors
(`te_fp8`), which a product takes back to fp32 and multiplies exactly. Whatever else is called
raises `NotImplementedError` with its name. `CALLS` counts the calls by name.

It changes `torch.Tensor.is_cuda` and a few functions of `torch.cuda`: install it in a process of
its own, such as a rank of `tests.support.ranks`. It tests TE's Python and this package's use of it,
but not TE's kernels, streams and speed.

    install(te_wheel.tree("2.20.2"))
    from megatron.core.extensions import transformer_engine

To try an entry point with it, name its module and arguments:

    torchrun --nproc-per-node 2 -m tests.support.te_extension megatron.training.pretrain_gpt \\
        --transformer-impl transformer_engine ...
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import importlib.machinery
import itertools
import os
import runpy
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import te_wheel
from tests.support.te_fp8 import Fp8Functions, is_fp8

#: How often each function of the extension, and each class of TE's layers, was called in this
#: process.
CALLS: Counter[str] = Counter()


def install(tree: Path, capability: tuple[int, int] = (9, 0)) -> None:
    """Make `import transformer_engine.pytorch` work in this process, from an unpacked wheel.

    Args:
        capability: of the GPU that TE sees: Hopper, or (10, 0) for Blackwell, which has MXFP8.

    Raises:
        ValueError: there is no TransformerEngine in `tree`.
    """
    constants = tree / "transformer_engine" / "pytorch" / "constants.py"
    if not constants.is_file():
        raise ValueError(f"{tree} has no TransformerEngine: run python -m tests.support.te_wheel")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TE then loads no shared object
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # seconds, for a few elementwise functions
    os.environ["NVTE_MASKED_SOFTMAX_FUSION"] = "0"  # in bf16, a kernel of the extension
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # TE warns of any other with tensor parallelism
    sys.path.insert(0, str(tree))
    for name in ("onnx", "onnxscript", "onnxscript.onnx_opset", "einops"):
        sys.modules.setdefault(name, _permissive(name))
    sys.modules["transformer_engine_torch"] = _extension(
        _enum(constants, "DType"), transposes=capability < (10, 0)
    )
    _pretend_a_gpu(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TE says that it has found no shared object
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch
    torch.nn.modules.module.register_module_forward_hook(_count_layer)
    # torch's, of names of collectives that TE uses
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed")


def _count_layer(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    kind = type(module)
    if kind.__module__.startswith("transformer_engine"):
        CALLS[kind.__name__] += 1


def _enum(path: Path, name: str) -> type[enum.IntEnum]:
    """Return an enum of TE without importing it: members kX, numbered from 0 or as written."""
    (class_node,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    members: dict[str, int] = {}
    for line in class_node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            written = line.value.value if isinstance(line.value, ast.Constant) else len(members)
            members[line.targets[0].id] = written
    return enum.IntEnum(name, {n: v for n, v in members.items() if n.startswith("k")})


class _Permissive(types.ModuleType):
    """A stand-in for a module that TE imports but does not use here.

    Every name in it can be called, indexed and used as a decorator.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Permissive(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and callable(args[0]) else self

    def __getitem__(self, key: Any) -> _Permissive:
        return self


def _permissive(name: str) -> _Permissive:
    module = _Permissive(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # torch looks for some of them
    return module


class _Absent(type):
    """The type of every name that the stand-in lacks; calling it raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{cls.__name__} has no stand-in")

    def __int__(cls) -> int:
        return 0


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        absent = _Absent(name, (), {})
        setattr(self, name, absent)
        return absent


def _extension(dtypes: type[enum.IntEnum], *, transposes: bool) -> types.ModuleType:
    """Return the stand-in module with the counted functions of this file."""
    extension = _Extension("transformer_engine_torch")
    extension.DType = dtypes  # type: ignore[attr-defined]
    torch_dtypes = {
        dtypes["kFloat32"]: torch.float32,
        dtypes["kFloat16"]: torch.float16,
        dtypes["kBFloat16"]: torch.bfloat16,
        dtypes["kFloat8E4M3"]: torch.float8_e4m3fn,
        dtypes["kFloat8E5M2"]: torch.float8_e5m2,
    }
    fp8 = Fp8Functions(torch_dtypes, transposes=transposes, calls=CALLS)
    for function in (
        functools.partial(generic_gemm, fp8),
        functools.partial(te_general_grouped_gemm, fp8),
        fp8.quantize,
        fp8.split_quantize,
        fp8.dequantize,
        fp8.create_empty_quantized_tensor,
        fp8.fp8_transpose,
        functools.partial(rmsnorm_fwd, fp8),
        rmsnorm_bwd,
        functools.partial(layernorm_fwd, fp8),
        layernorm_bwd,
        convert_thd_to_bshd,
        convert_bshd_to_thd,
    ):
        name = getattr(function, "func", function).__name__  # type: ignore[union-attr]
        setattr(extension, name, _counted(name, function))
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum(  # type: ignore[attr-defined]
        "NVTE_Fused_Attn_Backend",
        {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
    )
    extension.get_cudnn_version = lambda: 91800  # type: ignore[attr-defined]
    none = extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    extension.get_fused_attn_backend = (  # type: ignore[attr-defined]
        # From 2.20 on it is asked with one object, and says why there is none.
        lambda *args, **options: (none, "on a CPU") if len(args) == 1 else none
    )
    extension.get_num_cublas_streams = lambda: 1  # type: ignore[attr-defined]
    extension.get_cublasLt_version = lambda: 120900  # type: ignore[attr-defined]
    extension.get_stream_priority_range = lambda *_: (0, 0)  # type: ignore[attr-defined]
    return extension


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        CALLS[name] += 1
        with torch.no_grad():
            return function(*args, **options)

    return call


# --- products -------------------------------------------------------------------------------------


def generic_gemm(
    fp8: Fp8Functions,
    a: torch.Tensor,
    transpose_a: bool,
    b: torch.Tensor,
    transpose_b: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: int,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_input: Any,
    grad: bool,
    workspace: Any,
    workspace_size: Any,
    accumulate: bool,
    *_: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Return op(b) op(a), the product of cuBLAS read in rows, and the gradient of a bias.

    | use | a | b | product |
    |---|---|---|---|
    | forward | W [o, h], transposed | x [t, h] | x Wᵀ |
    | dgrad | W [o, h] | dy [t, o] | dy W |
    | wgrad | x [t, h] | dy [t, o], transposed | dyᵀ x, and the sum of dy for a bias |
    """
    _plain(quantizer, gelu, *(v for v in options.values() if v is not None and v != 1.0))
    dtype = fp8.torch_dtypes[out_dtype]
    if is_fp8(a) != is_fp8(b):
        raise TypeError("transformer_engine_torch: a product of an FP8 tensor and one that is not")
    # As the extension does: an operand is read along the dimension that is summed over.
    a, b = fp8.operand(a, rowwise=transpose_a), fp8.operand(b, rowwise=not transpose_b)
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    bias_gradient = left.sum(0) if grad and bias is not None else None
    left, right = (left.t() if transpose_b else left), (right.t() if transpose_a else right)
    product = left.to(dtype) @ right.to(dtype)
    if bias is not None and not grad:
        product = product + bias
    if not transpose_b:
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    if out is None:
        return product, bias_gradient, None, None
    target = out.view(product.shape)
    if accumulate:
        target.add_(product)
    else:
        target.copy_(product)
    return out, bias_gradient, None, None


def te_general_grouped_gemm(
    fp8: Fp8Functions,
    a: list[torch.Tensor],
    transpose_a: bool,
    b: list[torch.Tensor],
    transpose_b: bool,
    out: list[torch.Tensor],
    out_dtype: int,
    splits: list[int],
    bias: list[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu: list[torch.Tensor],
    grad: bool,
    workspace: Any,
    workspace_size: Any,
    accumulate: bool,
    *_: Any,
) -> list[torch.Tensor]:
    """Write the products of pairs of operands, see `generic_gemm`; return the biases.

    The result of a pair without rows is left as it is if added to, and zero if not."""
    outs = list(out[0].split([int(rows) for rows in splits])) if single_output else out
    for left, right, target in zip(a, b, outs, strict=True):
        generic_gemm(
            fp8, left, transpose_a, right, transpose_b, target, None, out_dtype, None, None,
            False, None, grad, None, None, accumulate,
        )  # fmt: skip
    return bias


def _plain(*features: Any) -> None:
    """Raise if a product requests a feature that the stand-in lacks."""
    if any(features):
        raise NotImplementedError(f"transformer_engine_torch: a product with {features}")


# --- norms ----------------------------------------------------------------------------------------


def _factor(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def rmsnorm_fwd(fp8, x, weight, eps, out, quantizer, dtype, margin, zero_centered):
    """Return y [t, h], None and 1 / rms [t] in fp32."""
    inverse = torch.rsqrt(x.float().square().mean(-1) + eps)
    y = x.float() * inverse[:, None] * _factor(weight, zero_centered)
    return _normed(fp8, y.to(x.dtype), out, quantizer), None, inverse


def rmsnorm_bwd(dy, x, inverse, weight, margin, zero_centered):
    """Return dx [t, h] and dw [h]."""
    normed = x.float() * inverse[:, None]
    scaled = dy.float() * _factor(weight, zero_centered)
    dx = inverse[:, None] * (scaled - normed * (normed * scaled).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normed).sum(0).to(weight.dtype)


def layernorm_fwd(fp8, x, weight, bias, eps, out, quantizer, dtype, margin, zero_centered):
    """Return y [t, h], the means and 1 / standard deviation [t] in fp32."""
    mean = x.float().mean(-1)
    centered = x.float() - mean[:, None]
    inverse = torch.rsqrt(centered.square().mean(-1) + eps)
    y = centered * inverse[:, None] * _factor(weight, zero_centered) + bias.float()
    return _normed(fp8, y.to(x.dtype), out, quantizer), mean, inverse


def layernorm_bwd(dy, x, mean, inverse, weight, margin, zero_centered):
    """Return dx [t, h], dw [h] and db [h]."""
    normed = (x.float() - mean[:, None]) * inverse[:, None]
    scaled = dy.float() * _factor(weight, zero_centered)
    centered = scaled - scaled.mean(-1, keepdim=True)
    dx = inverse[:, None] * (centered - normed * (normed * scaled).mean(-1, keepdim=True))
    dw = (dy.float() * normed).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype), dy.float().sum(0).to(weight.dtype)


def _normed(fp8: Fp8Functions, y: torch.Tensor, out: torch.Tensor | None, quantizer: Any) -> Any:
    if quantizer is not None:
        return fp8.quantize(y, quantizer, out)
    return y if out is None else out.copy_(y)


# --- attention: TE's own unfused path, in torch, but for the packing of sequences -----------------


def convert_thd_to_bshd(packed, bounds, batch, longest):
    """Return [b, s, n, d] of packed sequences [t, n, d], with zeros after each."""
    padded = packed.new_zeros(batch, longest, *packed.shape[1:])
    for row, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        padded[row, : end - begin] = packed[begin:end]
    return padded


def convert_bshd_to_thd(padded, bounds, tokens):
    """Return packed sequences [t, n, d] of rows [b, s, n, d]."""
    packed = padded.new_zeros(tokens, *padded.shape[2:])
    for row, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        packed[begin:end] = padded[row, : end - begin]
    return packed


# --- torch ----------------------------------------------------------------------------------------


def _pretend_a_gpu(capability: tuple[int, int]) -> None:
    """Make TE, and only TE, see a GPU and treat CPU tensors as CUDA tensors."""
    major, minor = capability
    properties = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
    replacements = {
        "is_available": True,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "device": contextlib.nullcontext(),
        "is_current_stream_capturing": False,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, _for_te(value, getattr(torch.cuda, name)))
    # Gloo has no coalesced collectives: those of TE run one after the other, and are done.
    finished_work = types.SimpleNamespace(wait=lambda: None)
    manager = torch.distributed._coalescing_manager
    torch.distributed._coalescing_manager = _for_te(contextlib.nullcontext(finished_work), manager)
    is_cuda = torch.Tensor.is_cuda
    torch.Tensor.is_cuda = property(  # type: ignore[assignment,misc]
        lambda tensor: _called_by_te() or is_cuda.__get__(tensor)
    )
    to_gpu = torch.Tensor.cuda
    torch.Tensor.cuda = (  # type: ignore[method-assign]
        lambda tensor, *args, **options: (
            tensor if _called_by_te() else to_gpu(tensor, *args, **options)
        )
    )
    for name in ("empty", "zeros", "ones", "tensor", "full", "arange", "eye"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]


def _called_by_te() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("transformer_engine")


def _for_te(value: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns `value` to TE and calls `otherwise` for other callers."""

    @functools.wraps(otherwise)
    def wrapper(*args: Any, **options: Any) -> Any:
        return value if _called_by_te() else otherwise(*args, **options)

    return wrapper


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a constructor that creates GPU tensors, such as workspaces, on the CPU."""

    @functools.wraps(make)
    def wrapper(*args: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if device == 0 or str(device).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return wrapper


def main() -> None:
    """Run a module as a script, in a process that has the stand-in."""
    _, module, *arguments = sys.argv
    install(te_wheel.tree(), (10, 0) if "mxfp8" in arguments else (9, 0))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

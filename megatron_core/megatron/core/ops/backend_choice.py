# SPDX-License-Identifier: Apache-2.0
"""Choice of an op's implementation and of its matmul and accumulation dtypes by device."""

import functools
import importlib.metadata
import importlib.util
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

IMPLEMENTATIONS = ("reference", "triton")

#: Smallest speedup over fp32 at which a CPU multiplies in bf16. It lies well between CPUs with
#: bf16 instructions (2 with avx512_bf16, more with AMX) and CPUs without (0.5).
MIN_BF16_SPEEDUP = 1.2

_16_BIT_DTYPES = frozenset({torch.bfloat16, torch.float16})


@functools.cache
def triton_is_installed() -> bool:
    """Return whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


def triton_version() -> str | None:
    """Return the release of Triton, or None if it is not installed."""
    return importlib.metadata.version("triton") if triton_is_installed() else None


def ptxas_version(major: int) -> str | None:
    """Return the version of the assembler that Triton calls, or None if there is none.

    TRITON_PTXAS_PATH (on Blackwell TRITON_PTXAS_BLACKWELL_PATH) names the program; by default
    Triton's package brings one.

    Args:
        major: major version of the compute capability.
    """
    if not triton_is_installed():
        return None
    from triton import knobs

    tools = knobs.nvidia
    try:
        path = (tools.ptxas_blackwell if major > 9 else tools.ptxas).path
    except RuntimeError:  # no such file
        return None
    except OSError as error:  # not executable: Triton itself and every launch would fail on it
        name = "TRITON_PTXAS_BLACKWELL_PATH" if major > 9 else "TRITON_PTXAS_PATH"
        raise ValueError(f"{name} is not a program that runs here: {error}: unset it") from error
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d[\d.]*)", text)
    assert match is not None, f"{path} --version reports no version"
    return match[1]


def choose(
    implementation: str | None, tensor: torch.Tensor, op: str, *, has_triton: bool = True
) -> str:
    """Return the name of the implementation that `op` uses on the device of `tensor`.

    By default CUDA tensors use the Triton kernel if Triton is installed, and all other tensors the
    reference. An explicit choice that cannot take effect raises.

    Args:
        implementation: "reference", "triton" or None (choose by device).
        tensor: any input of the op; its device and dtype decide.
        op: the op's name, for error messages.
        has_triton: False if the op has no Triton kernel.

    Returns:
        "reference" or "triton".

    Raises:
        ValueError: an unknown name, "triton" without support for it, or a tensor on a GPU other
            than the current device.
    """
    if implementation is None:
        on_gpu = tensor.device.type == "cuda" and tensor.dtype != torch.float64
        if not (on_gpu and has_triton and triton_is_installed()):
            return "reference"
        _require_current(tensor, op)
        return "triton"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; use one of {IMPLEMENTATIONS} or"
            " None to pick by device"
        )
    if implementation == "triton":
        _require_triton(tensor, op, has_triton)
    return implementation


def _require_triton(tensor: torch.Tensor, op: str, has_triton: bool) -> None:
    """Raise ValueError if an explicitly chosen Triton kernel cannot run."""
    if not has_triton:
        raise ValueError(
            f"{op}: implementation='triton': there is no Triton kernel yet; use None or 'reference'"
        )
    if not triton_is_installed():
        raise ValueError(f"{op}: implementation='triton' needs the triton package; install it")
    if tensor.dtype == torch.float64:
        raise ValueError(f"{op}: the Triton kernel has no float64; use implementation='reference'")
    if tensor.device.type != "cuda":
        from triton import knobs

        if not knobs.runtime.interpret:
            raise ValueError(
                f"{op}: implementation='triton' on a {tensor.device.type} tensor runs only in"
                " Triton's interpreter (TRITON_INTERPRET=1)"
            )
    else:
        _require_current(tensor, op)


def _require_current(tensor: torch.Tensor, op: str) -> None:
    """Raise ValueError if Triton would launch on a GPU other than the tensor's.

    Triton launches on the current device, whatever device the pointers belong to.
    """
    current = torch.cuda.current_device()
    if tensor.device.index != current:
        raise ValueError(
            f"{op}: a tensor on {tensor.device} while cuda:{current} is the current device: call it"
            f" under torch.cuda.device({tensor.device.index})"
        )


@functools.cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of `dtype` are accumulated: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def uses_tensor_memory(x: torch.Tensor) -> bool:
    """Return whether matmuls of x accumulate in tensor memory: 16-bit dtypes from Blackwell on."""
    if x.device.type != "cuda" or x.dtype == torch.float32:
        return False
    return device_capability(x.device) >= (10, 0)


@functools.cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; cached, because the query takes microseconds a launch."""
    return torch.cuda.get_device_capability(device)


class StoredWeight(NamedTuple):
    """A small weight that an op reads in its storage, and the accumulation of its gradient.

    Args:
        value: the weight in its storage dtype.
        anchor: the leaf that makes the op's output require a gradient; its gradient is None.
        accumulate_grad: called with the gradient, or with addends of the gradient [n, ...], in the
            dtype in which it is accumulated.
    """

    value: torch.Tensor
    anchor: torch.Tensor
    accumulate_grad: Callable[[torch.Tensor], None]


class ForwardOnly:
    """The context of an autograd Function that runs without a backward: it saves nothing."""

    needs_input_grad = (False,) * 16

    def save_for_backward(self, *_: torch.Tensor | None) -> None:
        """Save nothing."""

    def mark_non_differentiable(self, *_: torch.Tensor) -> None:
        """Do nothing: no output is differentiable."""

    def set_materialize_grads(self, _: bool) -> None:
        """Do nothing: there will be no gradients."""


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd Function; if gradients are disabled, call its forward outside of autograd.

    Args:
        function: its `forward` takes a context and the arguments.
        args: as for `function.apply`.
    """
    if torch.is_grad_enabled():
        apply = super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]
        return apply(*args)  # as `direct_apply` does
    return function.forward(ForwardOnly(), *args)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the `apply` of an autograd Function without support for `torch.func`.

    `torch.autograd.Function.apply` first searches every argument for transforms of `torch.func`,
    which doubles its host time. No transform reaches a layer, because the weights of linear ops
    are outside of autograd. This is the function of C++ that it calls in the end.
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def cpu_bf16_speedup() -> float:
    """Measure this CPU's speedup of bf16 matmuls over fp32 matmuls of converted operands.

    The benchmark is the three matmuls of a linear layer of 512 features on 128 rows. Operands and
    results are bf16, so the fp32 time includes the conversions. It takes about 20 ms, once a
    process. The CPU time of one thread is measured, the minimum of three runs, so that other
    programs and a busy core change it little. Results differ by a quarter between runs: 1.8 to 2.9
    on an AMD EPYC with avx512_bf16 and ten runnable processes for each core, 0.4 to 0.5 with
    avx512_bf16 disabled.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight, grad = (torch.ones(n, 512, dtype=torch.bfloat16) for n in (128, 512, 128))
        seconds: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
        for _ in range(4):
            for dtype, timings in seconds.items():
                start = time.thread_time()
                operands = (t.to(dtype) for t in (x, weight, grad))
                _linear_step(*operands)
                timings.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(num_threads)
    # The first run loads and compiles kernels.
    return min(seconds[torch.float32][1:]) / min(seconds[torch.bfloat16][1:])


def _linear_step(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> None:
    """Run forward, dgrad and wgrad of a linear layer on x [t, h], weight [o, h], grad [t, o]."""
    for product in (x @ weight.t(), grad @ weight):
        product.to(torch.bfloat16)
    grad.t() @ x


@functools.cache
def measured_matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which this CPU should multiply matrices of `dtype`.

    bf16 is multiplied in bf16 if that is at least `MIN_BF16_SPEEDUP` times as fast as fp32, else in
    fp32, which is more precise: a CPU with similar speeds always uses fp32. fp16 is multiplied in
    fp32.
    """
    if dtype == torch.bfloat16 and cpu_bf16_speedup() >= MIN_BF16_SPEEDUP:
        return dtype
    return torch.float32 if dtype in _16_BIT_DTYPES else dtype


def matmul_dtype(x: torch.Tensor, cpu_dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype in which matrices like `x` are multiplied on the device of `x`.

    Args:
        x: an operand.
        cpu_dtype: dtype in which a CPU multiplies bf16 and fp16: the operands' dtype or fp32. None
            uses the faster one (`measured_matmul_dtype`). Every process measures for itself, so
            ranks that must agree need an explicit dtype.
    """
    dtype = x.dtype
    if dtype not in _16_BIT_DTYPES or x.device.type != "cpu":
        return dtype
    return measured_matmul_dtype(dtype) if cpu_dtype is None else cpu_dtype


def add_product_(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, overwrite: bool = False
) -> None:
    """Add left @ right to `total`, or write it to `total` if `overwrite`.

    A GPU accumulates bf16 products in fp32; `out_dtype` returns the fp32 accumulator, which is
    otherwise rounded to bf16. On a CPU the caller converts 16-bit operands to fp32 if that is
    faster (`matmul_dtype`).

    Args:
        total: [m, n], fp32 or the operands' dtype.
        left: [m, k].
        right: [k, n], the dtype of `left`.
    """
    if left.dtype == total.dtype:
        if overwrite:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
    elif left.device.type != "cpu":
        if overwrite:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            # Added in the matmul's epilogue: a separate product would be written and read again.
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif overwrite:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


# --- compilers of the kernels, and their known bugs

#: Two bugs affect Hopper. Triton 3.4.0 to 3.7.0 multiplies the transpose of an accumulator
#: wrongly (github.com/fla-org/flash-linear-attention issue 640, pull request 983). ptxas before
#: 13.3 may overwrite registers that a running wgmma still reads (github.com/triton-lang/triton
#: issue 9433, pull request 11781). `python -m tools.gpu_compile` searches the code of every
#: kernel for both.
HOPPER = 9
#: Releases with known bugs: Triton from the first to below the second, ptxas below `FIXED_PTXAS`.
BUGGY_TRITON = ((3, 4, 0), (3, 7, 1))
FIXED_PTXAS = (13, 3)
PTXAS_WHEEL = "nvidia-cuda-nvcc==13.3.73"


def compiler_faults(major: int, triton: str, ptxas: str | None) -> list[str]:
    """Return the known bugs of compiler releases on an architecture, each with its fix.

    Args:
        major: major version of the compute capability.
        triton, ptxas: releases; ptxas is None if there is none.
    """
    if major != HOPPER:
        return []
    faults = []
    introduced, fixed = BUGGY_TRITON
    if introduced <= _version_tuple(triton, 3) < fixed:
        release = ".".join(map(str, fixed))
        faults.append(
            f"Triton {triton} multiplies transposed accumulators wrongly on Hopper: pip install"
            f" triton=={release}"
        )
    if ptxas is not None and _version_tuple(ptxas, 2) < FIXED_PTXAS:
        faults.append(
            f"ptxas {ptxas} may overwrite the operands of a running wgmma: pip install"
            f" {PTXAS_WHEEL} and set TRITON_PTXAS_PATH to its ptxas"
        )
    return faults


def explain_compilers(device: torch.device) -> str | None:
    """Return the compilers of a device's kernels and their known bugs; None if it runs none."""
    triton = triton_version()
    if device.type != "cuda" or triton is None:
        return None
    major = torch.cuda.get_device_capability(device)[0]
    ptxas = ptxas_version(major)
    line = f"Triton {triton}, ptxas {ptxas or 'absent'}"
    if faults := compiler_faults(major, triton, ptxas):
        line += f"; {'; '.join(faults)}; make gpu-compile finds neither fault in our kernels"
    return line


def _version_tuple(version: str, count: int) -> tuple[int, ...]:
    """Return the first `count` components of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:count]))

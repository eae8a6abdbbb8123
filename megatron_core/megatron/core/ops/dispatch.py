# SPDX-License-Identifier: Apache-2.0
"""Choosing between an op's implementations, the dtype a device multiplies in, and wider sums."""

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

#: From how many times the speed of fp32 on a CPU multiplies in bf16. Well between what CPUs with
#: bf16 instructions reach (2 with avx512_bf16, more with AMX) and those without (0.5).
WORTH_NARROW = 1.2

_NARROW = frozenset({torch.bfloat16, torch.float16})


@functools.cache
def triton_is_installed() -> bool:
    """Say whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


def triton_version() -> str | None:
    """Return the release of Triton, or None where it is not installed."""
    return importlib.metadata.version("triton") if triton_is_installed() else None


def ptxas_version(major: int) -> str | None:
    """Return the version of the assembler that Triton calls, or None where there is none.

    It is the program of TRITON_PTXAS_PATH (on Blackwell TRITON_PTXAS_BLACKWELL_PATH) where that is
    set, else one in Triton's package.

    Args:
        major: of the compute capability.
    """
    if not triton_is_installed():
        return None
    import triton

    tools = triton.knobs.nvidia
    try:
        path = (tools.ptxas_blackwell if major > 9 else tools.ptxas).path
    except RuntimeError:  # not found
        return None
    except OSError as error:  # neither Triton nor its launches get past such a file
        name = "TRITON_PTXAS_BLACKWELL_PATH" if major > 9 else "TRITON_PTXAS_PATH"
        raise ValueError(f"{name} is no program that runs here: {error}: unset it") from error
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V(\d[\d.]*)", text)[1]


def choose(
    implementation: str | None, tensor: torch.Tensor, op: str, *, has_triton: bool = True
) -> str:
    """Name the implementation that `op` uses on the device of `tensor`.

    Without a choice, CUDA tensors take the Triton kernel where Triton is installed and everything
    else the reference. A forced choice that cannot take effect raises.

    Args:
        implementation: "reference", "triton" or None (pick by device).
        tensor: any of the op's inputs; its device and dtype decide.
        op: the op's name, for the message.
        has_triton: False where the op has no Triton kernel.

    Returns:
        "reference" or "triton".

    Raises:
        ValueError: unknown name, "triton" where it cannot run, or a tensor of another GPU than the
            current one.
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
    """Raise ValueError where a forced Triton kernel cannot run."""
    if not has_triton:
        raise ValueError(
            f"{op}: implementation='triton': there is no Triton kernel yet; use None or 'reference'"
        )
    if not triton_is_installed():
        raise ValueError(f"{op}: implementation='triton' needs the triton package; install it")
    if tensor.dtype == torch.float64:
        raise ValueError(f"{op}: the Triton kernel has no float64; use implementation='reference'")
    if tensor.device.type != "cuda":
        import triton

        if not triton.knobs.runtime.interpret:
            raise ValueError(
                f"{op}: implementation='triton' on a {tensor.device.type} tensor runs only in"
                " Triton's interpreter (TRITON_INTERPRET=1)"
            )
    else:
        _require_current(tensor, op)


def _require_current(tensor: torch.Tensor, op: str) -> None:
    """Raise ValueError where Triton would launch on another GPU than the tensor's."""
    current = torch.cuda.current_device()
    if tensor.device.index != current:
        raise ValueError(
            f"{op}: a tensor on {tensor.device} while cuda:{current} is the current device: call it"
            f" under torch.cuda.device({tensor.device.index})"
        )


@functools.cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which statistics of `dtype` are computed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def uses_tensor_memory(x: torch.Tensor) -> bool:
    """Say whether products of x accumulate in tensor memory: from Blackwell on, in 16 bits."""
    if x.device.type != "cuda" or x.dtype == torch.float32:
        return False
    return device_capability(x.device) >= (10, 0)


@functools.cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; asking CUDA takes microseconds at every launch."""
    return torch.cuda.get_device_capability(device)


class StoredWeight(NamedTuple):
    """A small weight as an op reads it where it is stored, and where its gradient goes.

    Args:
        value: the weight in the dtype that it is stored in.
        anchor: the leaf that makes the op's result require a gradient; the op returns None for it.
        put: takes the gradient, or addends of it [n, ...], in the dtype that it is summed in.
    """

    value: torch.Tensor
    anchor: torch.Tensor
    put: Callable[[torch.Tensor], None]


class ForwardOnly:
    """The context of an autograd Function of which only the forward runs: keeps nothing."""

    needs_input_grad = (False,) * 16

    def save_for_backward(self, *_: torch.Tensor | None) -> None:
        """Save nothing."""

    def mark_non_differentiable(self, *_: torch.Tensor) -> None:
        """Do nothing: no output is differentiable."""

    def set_materialize_grads(self, _: bool) -> None:
        """Do nothing: there will be no gradients."""


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd Function; where gradients are off, only its forward, outside of autograd.

    Args:
        function: its `forward` takes a context and the arguments.
        args: as for `function.apply`.
    """
    if torch.is_grad_enabled():
        return record_function(function, *args)
    return function.forward(ForwardOnly(), *args)


def record_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd Function as its `apply` does, outside of `torch.func`.

    `torch.autograd.Function.apply` looks for transforms of `torch.func` in every argument first,
    which takes the host as long again as what it calls. Layers run under none: the weights of their
    linear ops are outside of autograd.

    Args:
        function, args: as for `function.apply`.
    """
    return super(torch.autograd.Function, function).apply(*args)


@functools.cache
def cpu_bf16_speedup() -> float:
    """Measure how many times faster this CPU multiplies bf16 matrices as they are than in fp32.

    The three products of a linear layer of 512 features on 128 rows, operands in bf16 before and
    results in bf16 after; in fp32 the conversions count. About 20 ms, once a process. What is timed
    is the CPU time of one thread, the least of three turns, so that other programs and a busy
    core change it little. From run to run it stays within a quarter: 1.8 to 2.9 on an AMD EPYC
    with avx512_bf16 that has ten processes waiting for each core, 0.4 to 0.5 with that turned off.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight, grad = (torch.ones(n, 512, dtype=torch.bfloat16) for n in (128, 512, 128))
        seconds: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
        for _ in range(4):
            for dtype, taken in seconds.items():
                start = time.thread_time()
                operands = (t.to(dtype) for t in (x, weight, grad))
                _three_products(*operands)
                taken.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(before)
    # The first turn loads and compiles kernels.
    return min(seconds[torch.float32][1:]) / min(seconds[torch.bfloat16][1:])


def _three_products(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> None:
    """Multiply x [t, h], weight [o, h] and grad [t, o] as a linear layer does in a step."""
    for product in (x @ weight.t(), grad @ weight):
        product.to(torch.bfloat16)
    grad.t() @ x


@functools.cache
def measured_matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which this CPU should multiply matrices of `dtype`.

    bf16 where that is at least `WORTH_NARROW` times as fast as fp32, which is the more precise:
    a CPU whose two rates are near each other always takes fp32. fp16 is multiplied in fp32.
    """
    if dtype == torch.bfloat16 and cpu_bf16_speedup() >= WORTH_NARROW:
        return dtype
    return torch.float32 if dtype in _NARROW else dtype


def matmul_dtype(x: torch.Tensor, cpu_dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype in which matrices like `x` are multiplied where `x` is.

    Args:
        x: an operand.
        cpu_dtype: what a CPU multiplies bf16 and fp16 in: that dtype, or fp32. None is what it
            does faster (`measured_matmul_dtype`): every process measures for itself, so ranks that
            must compute alike are told.
    """
    dtype = x.dtype
    if dtype not in _NARROW or x.device.type != "cpu":
        return dtype
    return measured_matmul_dtype(dtype) if cpu_dtype is None else cpu_dtype


def add_product_(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, overwrite: bool = False
) -> None:
    """Put left @ right into `total`: written if `overwrite`, else added.

    A GPU sums bf16 products in fp32 and can hand the sums over unrounded; without saying so they
    come rounded to bf16. On a CPU narrow operands are widened by the caller where that pays
    (`dispatch.matmul_dtype`).

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
            # Added where it is made: a product put aside would be written and read once more.
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif overwrite:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)

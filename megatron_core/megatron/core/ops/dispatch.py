# SPDX-License-Identifier: Apache-2.0
"""Choosing between an op's implementations, and the dtype a device multiplies in."""

import functools
import importlib.util

import torch

IMPLEMENTATIONS = ("reference", "triton")


@functools.cache
def triton_is_installed() -> bool:
    """Say whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which statistics of `dtype` are computed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def cpu_matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which this CPU multiplies matrices of `dtype` fastest.

    With AMX tiles, bf16 products are several times faster than fp32 ones. Without them they run
    at half the speed of fp32 (measured with oneDNN on AVX-512), so the CPU paths of the ops
    compute in fp32 there, which is also more precise. On other devices ask nothing: use `dtype`.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return dtype
    fast = torch.cpu.get_capabilities().get("amx_bf16", False) and dtype == torch.bfloat16
    return dtype if fast else torch.float32

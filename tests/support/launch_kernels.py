# SPDX-License-Identifier: Apache-2.0
"""The kernels that a call launches, by name, so that no torch matmul hides behind a fused kernel.

Triton's launches are counted at the launch, in the interpreter as on a GPU. On a GPU the profiler
supplies all other kernels, and must also have seen every Triton launch. On a CPU torch's operations
are counted, except views.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.support.gpu_agreement import REHEARSES

#: Kinds of operations that a call may launch in addition to Triton kernels if allowed: a regular
#: expression for device kernels, and the names of torch operations.
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "fill": (
            r"FillFunctor|Memset|fill",
            ("zeros", "zeros_like", "zero_", "fill_", "full", "full_like", "ones", "ones_like")
            + ("new_zeros", "new_full", "new_ones", "scalar_tensor"),
        ),
        "copy": (
            r"copy|CatArray|Memcpy",
            ("copy_", "clone", "_to_copy", "cat", "stack", "contiguous", "lift_fresh_copy"),
        ),
        "sum": (r"reduce_kernel.*sum|sum_functor|func_wrapper_t.*sum", ("sum",)),
        "add": (r"CUDAFunctor_add|AddFunctor|CUDAFunctorOnSelf_add", ("add", "add_")),
        "multiply": (r"MulFunctor", ("mul", "mul_")),
        "range": (r"arange", ("arange",)),
        "index": (r"index", ("index", "index_select", "index_put_", "gather")),
    }
)
#: Matrix products of any library, as kernels and as operations. Never allowed.
PRODUCT_KERNELS = re.compile(
    r"gemm|gemv|cutlass|cublas|xmma|ampere_|hopper_|sm\d+_|wgmma|nvjet|splitk|dot_kernel|flash"
    r"|fmha|cudnn|convolution|trsm|trsv",
    re.IGNORECASE,
)
PRODUCT_OPERATIONS = re.compile(
    r"mm|bmm|addmm_?|addbmm_?|baddbmm_?|matmul|einsum|dot|vdot|mv|addmv_?|linear|_?conv\w*"
    r"|_\w*_mm|_scaled_dot_product\w*|linalg_\w*|triangular_solve"
)
#: Operations that only allocate or alias memory.
ROOM = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
    + ("_reshape_alias", "lift_fresh", "set_", "record_stream", "_pin_memory", "is_pinned")
    + ("promote_types",)
)


class _Operations(TorchDispatchMode):
    """Counts the torch operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        views = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if not views and name not in ROOM:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _triton_launches() -> Iterator[Counter[str]]:
    """Count the launches of Triton kernels, without the interpreter's own torch operations."""
    seen: Counter[str] = Counter()
    owner = InterpretedFunction if REHEARSES else JITFunction
    run = owner.run

    def counted(kernel, *args, **kwargs):
        if not kwargs.get("warmup", False):
            seen[kernel.__name__] += 1
        if not REHEARSES:
            return run(kernel, *args, **kwargs)
        with _disable_current_modes():
            return run(kernel, *args, **kwargs)

    with mock.patch.object(owner, "run", counted):
        yield seen


@dataclass(frozen=True)
class Launched:
    """The kernels that a call launched, by name.

    Args:
        kernels: Triton kernels.
        device_kernels: other device kernels, copies and fills; on a CPU torch operations.
    """

    kernels: Counter[str]
    device_kernels: Counter[str]


def launched(function: Callable[[], object]) -> Launched:
    """Return the kernels that a call launches.

    A first call compiles kernels and fills caches; the second call is measured. Take gradients with
    `torch.autograd.grad`: `backward` would accumulate into the gradients of the first call.

    Raises:
        AssertionError: the profiler has seen other launches of Triton's kernels than were made.
    """
    function()
    if REHEARSES:
        with _triton_launches() as seen, _Operations() as operations:
            function()
        return Launched(seen, operations.seen)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler, _triton_launches() as seen:
        function()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    device_kernels = Counter(
        {e.key: e.count for e in profiler.key_averages() if e.device_type == on_device}
    )
    profiled = Counter({name: device_kernels.pop(name, 0) for name in seen})
    assert profiled == seen, (
        f"launched {dict(seen)}, the profiler saw {dict(profiled)}: {device_kernels}"
    )
    return Launched(seen, device_kernels)


def assert_launches(
    function: Callable[[], object], expected: Mapping[str, int], *, allowed: tuple[str, ...] = ()
) -> None:
    """Assert that a call launches the expected kernels and no others.

    Args:
        function: see `launched`.
        expected: number of launches by Triton kernel.
        allowed: other kinds of operations that may run, keys of `KINDS`; "fill" is always allowed.

    Raises:
        AssertionError: other launches, a product of torch's, or an operation not allowed.
    """
    launches = launched(function)
    problems = [
        f"{name}: {launches.kernels[name]} launches, expected {expected.get(name, 0)}"
        for name in sorted(launches.kernels.keys() | expected.keys())
        if launches.kernels[name] != expected.get(name, 0)
    ]
    for name, count in launches.device_kernels.items():
        if is_product(name):
            problems.append(f"a product of torch's: {name}, {count} times")
        elif not _is_allowed(name, ("fill", *allowed)):
            problems.append(f"not allowed: {name}, {count} times")
    assert not problems, "\n".join(problems)


def is_product(name: str) -> bool:
    """Return whether a kernel (an operation in a rehearsal) is a matmul or a convolution."""
    if REHEARSES:
        return PRODUCT_OPERATIONS.fullmatch(name) is not None
    return PRODUCT_KERNELS.search(name) is not None


def _is_allowed(name: str, words: tuple[str, ...]) -> bool:
    """Return whether a kernel or operation belongs to one of the kinds `words`."""
    unknown = set(words) - KINDS.keys()
    assert not unknown, f"unknown kinds {sorted(unknown)}: use some of {sorted(KINDS)}"
    if REHEARSES:
        return any(name in KINDS[word][1] for word in words)
    return any(re.search(KINDS[word][0], name, re.IGNORECASE) for word in words)

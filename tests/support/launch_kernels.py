# SPDX-License-Identifier: Apache-2.0
"""Which kernels a call launches, by name: so that no product of torch's hides behind a fused one.

Triton's launches are counted where they are made, in the interpreter as on a GPU. What else runs
comes on a GPU from the profiler, which must also have seen every one of those launches; on a CPU it
is torch's own operations that are counted, less those that only look at memory.
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

#: What a call may launch beside Triton's kernels if it is allowed to, by word: parts of the names
#: of device kernels, and operations of torch.
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
#: Products, whatever library they are from, as kernels and as operations. Never allowed.
PRODUCT_KERNELS = re.compile(
    r"gemm|gemv|cutlass|cublas|xmma|ampere_|hopper_|sm\d+_|wgmma|nvjet|splitk|dot_kernel|flash"
    r"|fmha|cudnn|convolution|trsm|trsv",
    re.IGNORECASE,
)
PRODUCT_OPERATIONS = re.compile(
    r"mm|bmm|addmm_?|addbmm_?|baddbmm_?|matmul|einsum|dot|vdot|mv|addmv_?|linear|_?conv\w*"
    r"|_\w*_mm|_scaled_dot_product\w*|linalg_\w*|triangular_solve"
)
#: Operations that only make room.
ROOM = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
    + ("_reshape_alias", "lift_fresh", "set_", "record_stream", "_pin_memory", "is_pinned")
    + ("promote_types",)
)


class _Operations(TorchDispatchMode):
    """Counts the operations of torch that compute or move something."""

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
    """Count the launches of Triton's kernels; what the interpreter does itself is not seen."""
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
    """What a call launched, by name.

    Args:
        kernels: of Triton.
        others: kernels of the device, copies and fillings; on a CPU operations of torch.
    """

    kernels: Counter[str]
    others: Counter[str]


def launched(function: Callable[[], object]) -> Launched:
    """Return what a call launches.

    The function is called once before, which compiles kernels and makes what is made only once.
    Let it take gradients by `torch.autograd.grad`: `backward` adds to those of the call before.

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
    found = Counter({e.key: e.count for e in profiler.key_averages() if e.device_type == on_device})
    profiled = Counter({name: found.pop(name, 0) for name in seen})
    assert profiled == seen, f"launched {dict(seen)}, the profiler saw {dict(profiled)}: {found}"
    return Launched(seen, found)


def assert_launches(
    function: Callable[[], object], expected: Mapping[str, int], *, allowed: tuple[str, ...] = ()
) -> None:
    """Assert that a call launches these kernels, so many times each, and hides nothing beside.

    Args:
        function: see `launched`.
        expected: launches by the name of the Triton kernel.
        allowed: what else may run, words of `KINDS`; "fill" may always.

    Raises:
        AssertionError: other launches, a product of torch's, or an operation not allowed.
    """
    found = launched(function)
    problems = [
        f"{name}: {found.kernels[name]} launches, expected {expected.get(name, 0)}"
        for name in sorted(found.kernels.keys() | expected.keys())
        if found.kernels[name] != expected.get(name, 0)
    ]
    for name, count in found.others.items():
        if is_product(name):
            problems.append(f"a product of torch's: {name}, {count} times")
        elif not _is_allowed(name, ("fill", *allowed)):
            problems.append(f"not allowed: {name}, {count} times")
    assert not problems, "\n".join(problems)


def is_product(name: str) -> bool:
    """Say whether a kernel, or in a rehearsal an operation, multiplies matrices or convolves."""
    if REHEARSES:
        return PRODUCT_OPERATIONS.fullmatch(name) is not None
    return PRODUCT_KERNELS.search(name) is not None


def _is_allowed(name: str, words: tuple[str, ...]) -> bool:
    """Say whether a kernel or operation is of one of these kinds."""
    unknown = set(words) - KINDS.keys()
    assert not unknown, f"unknown kinds {sorted(unknown)}: use some of {sorted(KINDS)}"
    if REHEARSES:
        return any(name in KINDS[word][1] for word in words)
    return any(re.search(KINDS[word][0], name, re.IGNORECASE) for word in words)

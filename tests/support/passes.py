# SPDX-License-Identifier: Apache-2.0
"""Passes over a GPU's memory and launches of a training step, counted on a CPU without its values.

The step runs on meta tensors with every choice as on a Hopper GPU. A launch is a torch operation
that is no view, or a Triton kernel. Its bytes are the sizes of the tensors that it reads and
writes, each once; an expanded tensor counts with its original size. Matrix products, attention and
the chunks of recurrences count as launches but not as bytes, except the buffer that a product
accumulates into.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.models.gpt import GPTConfig
from megatron.core.ops import backend_choice, linear_cross_entropy
from megatron.core.ops.attention import fused
from tools.bench import mcore_step
from tools.bench.shapes import Shape

#: What makes room, or looks at it, and launches nothing.
_ROOM = re.compile(
    r"(new_)?empty(_like|_strided)?|new_empty_strided|lift_fresh|detach|_unsafe_view"
)
#: Operations that multiply matrices, by name, and attention, which does.
_PRODUCTS = re.compile(r"(add|badd)?b?mm_?|mv|dot|_?scaled_dot_product\w*|_scaled_grouped\w*")
#: Kernels that do: attention and what recurrences compute chunk by chunk.
_PRODUCT_KERNELS = re.compile(
    r"attention_forward|query_gradient|key_gradient|solve|\w*sweep|recurrence_gradients"
)
#: Kernels that write tensors that they have read.
_INPLACE_KERNELS = {"chunk_gradient_kernel": ("logits_ptr",)}
#: Operations that write tensors without reading them, and those that read nothing at all.
_OVERWRITES = re.compile(r"copy_|zero_|fill_|_foreach_copy_|_foreach_zero_")
_CREATES = re.compile(r"(new_)?(full|zeros|ones)(_like)?|arange")
_GPU = torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch.

    Args:
        name: name of the operation or kernel.
        traffic: bytes read and written; for a product only the buffer that it accumulates into.
    """

    name: str
    traffic: int


class LaunchTape(TorchDispatchMode):
    """Records launches, and reads 1 where the host would read a value of a meta tensor.

    Attributes:
        launches: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].is_meta:
            return 1.0
        if name == "_to_copy" and str(kwargs.get("device")) == "cpu" and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        results = func(*args, **kwargs)
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        touched = [x for x in tree_leaves([args, kwargs, results]) if torch.is_tensor(x)]
        if not views and not _ROOM.fullmatch(name) and any(x.is_meta for x in touched):
            self.launches.append(Launch(name, _traffic(func, args, kwargs, results)))
        return results

    def launch_kernel(self, kernel: Any, *args: Any, **_: Any) -> None:
        """Record a launch of a Triton kernel, and run nothing."""
        name = kernel.__name__
        named = dict(zip(kernel.arg_names, args, strict=False))
        tensors = [x for x in named.values() if torch.is_tensor(x)]
        tensors = [x for x in tensors if x.device.type == "meta"]
        traffic = sum(_distinct(tensors).values())
        traffic += sum(_bytes(named[again]) for again in _INPLACE_KERNELS.get(name, ()))
        if _PRODUCT_KERNELS.fullmatch(name.removesuffix("_kernel")):
            traffic = 0
        self.launches.append(Launch(name, traffic))


def _bytes(x: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor that lie at different addresses."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def _distinct(tensors: Sequence[torch.Tensor]) -> dict[tuple, int]:
    """Return the bytes of tensors by where they lie."""
    return {
        (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride()): _bytes(x)
        for x in tensors
    }


def _traffic(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> int:
    """Return the bytes that an operation of torch reads and writes."""
    name = func.overloadpacket.__name__
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if _PRODUCTS.fullmatch(name):
        # What a product adds to is read; it writes its result in any case.
        added = arguments.get("self") if "add" in name else None
        return 0 if added is None else _bytes(added)
    written, read = [], []
    for argument in func._schema.arguments:
        tensors = [x for x in tree_leaves(arguments.get(argument.name)) if torch.is_tensor(x)]
        mutated = argument.alias_info is not None and argument.alias_info.is_write
        if mutated:
            written += tensors
        overwritten = mutated and (argument.is_out or _OVERWRITES.fullmatch(name))
        if not overwritten and not _CREATES.fullmatch(name):
            read += tensors
    if not written:
        written = [x for x in tree_leaves(results) if torch.is_tensor(x)]
    return sum(_distinct(read).values()) + sum(_distinct(written).values())


@contextlib.contextmanager
def counted_as_on_gpu() -> Iterator[LaunchTape]:
    """Make ops choose as on a Hopper GPU for meta tensors, and record their launches."""
    from triton.runtime.jit import JITFunction

    def choose(
        implementation: str | None, tensor: torch.Tensor, op: str, *, has_triton: bool = True
    ) -> str:
        return implementation or ("triton" if has_triton else "reference")

    refusals, size = fused.refusals, linear_cross_entropy.tokens_per_chunk
    chosen = backend_choice.choose
    tape = LaunchTape()
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if not module.__name__.startswith("megatron."):
                continue
            if vars(module).get("choose") is chosen:
                stack.enter_context(mock.patch.object(module, "choose", choose))
            if vars(module).get("tokens_per_chunk") is size:
                patched = mock.patch.object(module, "tokens_per_chunk", lambda v, _: size(v, _GPU))
                stack.enter_context(patched)
        for name, value in (
            ("refusals", lambda _, *positional, **options: refusals(_GPU, *positional, **options)),
            ("device_capability", lambda _: (9, 0)),
            ("_has_cudnn", lambda: True),
        ):
            stack.enter_context(mock.patch.object(fused, name, value))
        stack.enter_context(
            mock.patch.object(
                JITFunction,
                "run",
                lambda kernel, *args, grid, warmup, **options: tape.launch_kernel(
                    kernel, *args, **options
                ),
            )
        )
        yield tape


def launches_of(shape: Shape, config: GPTConfig | None = None) -> list[Launch]:
    """Return the launches of forward and backward of a model's second training step."""
    before: list[int] = []
    with counted_as_on_gpu() as tape, tape:
        step, _, _ = mcore_step.training_parts(
            shape,
            bf16=True,
            device=torch.device("meta"),
            config=config,
            before_update=lambda: before.append(len(tape.launches)),
        )
        step()
        start = len(tape.launches)
        step()
    return tape.launches[start : before[-1]]

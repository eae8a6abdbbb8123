# SPDX-License-Identifier: Apache-2.0
"""Passes over a GPU's memory and launches of a training step, counted on a CPU without its values.

python -m tools.bench.passes                     bytes of a layer, launches of a step: Llama, hybrid
python -m tools.bench.passes --microbatch 4      of so many rows of 4,096 tokens
python -m tools.bench.passes --each              every operation of a layer, most bytes first

The step runs on meta tensors with every choice as on a Hopper GPU. A launch is a torch operation
that is no view, or a Triton kernel. Its bytes are the sizes of the tensors that it reads and
writes, each once; an expanded tensor counts with its original size. Matrix products, attention and
the chunks of recurrences count as launches but not as bytes, except the buffer that a product
accumulates into. The bytes of a layer are the difference between two models that differ in one
period of layers, so the embedding, the head and the optimizer cancel out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.models.gpt import GPTConfig
from megatron.core.ops import backend_choice, linear_cross_entropy
from megatron.core.ops.attention import fused
from tools.bench import gpu_train, mcore_step
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
_IN_PLACE_KERNELS = {"chunk_gradient_kernel": ("logits_ptr",)}
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
        is_triton: whether it is a Triton kernel.
    """

    name: str
    traffic: int
    is_triton: bool


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
            self.launches.append(Launch(name, _traffic(func, args, kwargs, results), False))
        return results

    def launch_kernel(self, kernel: Any, *args: Any, **_: Any) -> None:
        """Record a launch of a Triton kernel, and run nothing."""
        name = kernel.__name__
        named = dict(zip(kernel.arg_names, args, strict=False))
        tensors = [x for x in named.values() if torch.is_tensor(x)]
        tensors = [x for x in tensors if x.device.type == "meta"]
        traffic = sum(_distinct(tensors).values())
        traffic += sum(_bytes(named[again]) for again in _IN_PLACE_KERNELS.get(name, ()))
        if _PRODUCT_KERNELS.fullmatch(name.removesuffix("_kernel")):
            traffic = 0
        self.launches.append(Launch(name, traffic, True))


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
            ("_capability", lambda _: (9, 0)),
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


@dataclasses.dataclass(frozen=True)
class Counts:
    """The launches of a training step.

    Args:
        backward: forward and backward, in order.
        update: the remaining launches of the step.
    """

    backward: tuple[Launch, ...]
    update: tuple[Launch, ...]

    def launches(self, *, triton: bool) -> int:
        """Return how many launches of a step are Triton's, or torch's."""
        return sum(operation.is_triton == triton for operation in (*self.backward, *self.update))


def count(shape: Shape, config: GPTConfig | None = None) -> Counts:
    """Return the launches of the second training step of a model."""
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
    launches = tuple(tape.launches[start:])
    split = before[-1] - start
    return Counts(launches[:split], launches[split:])


def llama(layers: int, batch: int) -> Counts:
    """Count the 1.3 B Llama shape with so many layers."""
    return count(dataclasses.replace(gpu_train.LLAMA_1_3B, layers=layers, batch=batch))


def hybrid(layers: int, batch: int) -> Counts:
    """Count the 1.3 B hybrid shape with so many layers, a multiple of its period's."""
    shape = dataclasses.replace(gpu_train.LLAMA_1_3B, layers=layers, batch=batch)
    return count(shape, gpu_train.hybrid_config(shape))


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with a given number of layers and rows.

    Args:
        count: counts the launches of (layers, rows).
        period: length of the repeating layer pattern.
    """

    count: Callable[[int, int], Counts]
    period: int


MODELS = {
    "Llama": Model(llama, 1),
    "hybrid": Model(hybrid, gpu_train.PATTERN.count("-")),
}


def layer_traffic(model: Model, batch: int) -> tuple[float, Counter[str]]:
    """Return the bytes of a layer's forward and backward in all, and by operation, of a period."""
    one_period, two_periods = (
        model.count(periods * model.period, batch).backward for periods in (1, 2)
    )
    by_name: Counter[str] = Counter()
    for launches, sign in ((two_periods, 1), (one_period, -1)):
        for launch in launches:
            by_name[launch.name] += sign * launch.traffic
    return sum(by_name.values()) / model.period, by_name


def main() -> int:
    """Count from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatch", type=int, default=4, help="rows of 4,096 tokens")
    parser.add_argument("--each", action="store_true", help="list the operations of a layer")
    options = parser.parse_args()
    for name, model in MODELS.items():
        traffic, by_name = layer_traffic(model, options.microbatch)
        step = model.count(24, options.microbatch)
        print(
            f"{name}: {traffic / 1e6:,.0f} MB a layer, forward and backward; a step of 24 layers: "
            f"{step.launches(triton=False)} launches of torch, {step.launches(triton=True)} of "
            "Triton"
        )
        if options.each:
            for operation, launches in by_name.most_common():
                if launches:
                    print(f"  {launches / model.period / 1e6:10,.1f} MB a layer  {operation}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

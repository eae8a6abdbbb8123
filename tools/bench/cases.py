# SPDX-License-Identifier: Apache-2.0
"""Cases: an op, our implementation and its peers, with the bytes and FLOPs that it must take.

A builder yields the cases of an op, at a size for the bench's device; `register` adds it to the
registry. `python -m tools.bench.ops` times all cases, on a CPU, on a GPU or in Triton's
interpreter:

    @register("norm")
    def norm(bench):
        x = bench.drawn(*bench.sized((16384, 4096), (5, 40), cpu=(2048, 512)))
        yield Case(name="norm", mcore=lambda: rms_norm(x), peers={"torch": lambda: F.rms_norm(x)},
                   moved_bytes=2 * x.nbytes)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.bench.harness import Bench
    from tools.bench.timing import Call

#: Takes the inputs of an op; returns a tensor or several.
Function = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]
Builder = Callable[["Bench"], "Iterator[Case]"]

MCORE, COMPILED, TORCH = "ours", "torch.compile", "torch"
#: Largest difference over largest value between two implementations that round bf16 in other
#: places; fp32 stays far below it.
BOUND = 0.03


@dataclass(frozen=True, kw_only=True)
class Case:
    """One timed computation.

    Args:
        name: the op with its sizes, and the direction.
        mcore: our implementation.
        peers: others that compute the same, in their best mode, by name.
        moved_bytes: bytes that it must read and write, for the roofline.
        flops: its operations, for the roofline.
        targets: see `Row`.
        unit: "ms" or "us".
        count: repetitions of the op within one call; figures are per repetition.
        note: note for the reader.
    """

    name: str
    mcore: Call
    peers: Mapping[str, Call] = field(default_factory=dict)
    moved_bytes: float = 0.0
    flops: float = 0.0
    targets: Sequence[str] = ()
    unit: str = "ms"
    count: int = 1
    note: str = ""


#: Benches of a case. "gpu" and "decode", a bench of its own on GPUs, include rehearsals, in which
#: Triton's interpreter runs the kernels.
CPU_AND_GPU, GPU, CPU, DECODE = ("cpu", "gpu"), ("gpu",), ("cpu",), ("decode",)
#: Builders by name, and their benches.
_REGISTRY: dict[str, tuple[Builder, tuple[str, ...]]] = {}


def register(name: str, benches: tuple[str, ...] = CPU_AND_GPU) -> Callable[[Builder], Builder]:
    """Register the decorated builder of cases.

    Args:
        name: of the op.
        benches: where it has a size.
    """

    def add(build: Builder) -> Builder:
        if name in _REGISTRY:
            raise ValueError(f"two builders of cases are named {name!r}")
        _REGISTRY[name] = build, benches
        return build

    return add


def builders(bench: str) -> dict[str, Builder]:
    """Return the builders of a bench, "cpu", "gpu" or "decode", by name."""
    return {name: build for name, (build, benches) in _REGISTRY.items() if bench in benches}


def tensors_of(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the output or outputs of a function as a tuple."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def require_same(
    what: str,
    mcore: torch.Tensor | tuple[torch.Tensor, ...],
    peer: torch.Tensor | tuple[torch.Tensor, ...],
    bound: float = BOUND,
) -> None:
    """Raise ValueError unless two calls that race compute the same: else the race is void."""
    for x, y in zip(tensors_of(mcore), tensors_of(peer), strict=True):
        error = ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
        if not error <= bound:
            raise ValueError(f"{what}: error {error:.2g} > {bound:g}: the race is void")


def with_gradients(function: Function, leaves: Sequence[torch.Tensor]) -> tuple[Call, Call]:
    """Return (forward and backward, backward alone) of a function of leaves with gradients."""
    outputs = tensors_of(function(*leaves))
    grad_outputs = [torch.randn_like(x) for x in outputs]

    def whole() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(tensors_of(function(*leaves)), leaves, grad_outputs)

    def back() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph=True)

    return whole, back


def directions_of(
    name: str,
    functions: Mapping[str, Function],
    leaves: Sequence[torch.Tensor],
    *,
    moved_bytes: tuple[float, float] = (0.0, 0.0),
    flops: tuple[float, float] = (0.0, 0.0),
    targets: tuple[Sequence[str], Sequence[str]] = ((), ()),
    whole: bool = False,
    same: bool = True,
) -> Iterator[Case]:
    """Yield the cases of forward, and of backward alone.

    Args:
        name: the op with its sizes.
        functions: `MCORE` and the peers, by name; they take the leaves.
        leaves: inputs with gradients.
        moved_bytes, flops: of forward, and of backward.
        targets: of forward, and of the second case.
        whole: time forward and backward together instead of backward alone.
        same: check that all functions compute the same; False for random results.
    """
    plain = [x.detach() for x in leaves]
    if same:
        expected = functions[MCORE](*plain)
        for peer, function in functions.items():
            require_same(f"{name}, ours and {peer}", expected, function(*plain))

    def case(
        calls: dict[str, Call], direction: str, side: int, *, includes_forward: bool = False
    ) -> Case:
        return Case(
            name=f"{name}, {direction}",
            mcore=calls.pop(MCORE),
            peers=calls,
            moved_bytes=sum(moved_bytes) if includes_forward else moved_bytes[side],
            flops=sum(flops) if includes_forward else flops[side],
            targets=targets[side],
        )

    yield case(
        {key: partial(function, *plain) for key, function in functions.items()}, "forward", 0
    )
    pairs = {key: with_gradients(function, leaves) for key, function in functions.items()}
    calls = {key: pair[0 if whole else 1] for key, pair in pairs.items()}
    yield case(calls, "forward + backward" if whole else "backward", 1, includes_forward=whole)


def compiled(bench: Bench, formula: Function, *, eager: str = "") -> dict[str, Function]:
    """Return the peers that a formula in torch makes: by torch.compile and, on a CPU and named
    `eager`, as it is; in a rehearsal only as it is."""
    if bench.rehearse:
        return {COMPILED: formula}
    import torch._functorch.config as settings

    settings.donated_buffer = False  # backward is timed by itself, so its graph is kept
    uncompiled = {eager: formula} if eager and not bench.watch.on_gpu else {}
    return {COMPILED: torch.compile(formula, dynamic=False), **uncompiled}

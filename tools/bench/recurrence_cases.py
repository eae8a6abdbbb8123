# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernels of recurrent layers, against other implementations.

Operations and bytes count the formula, with each tensor read or written once. Recomputation and
internal buffers of a kernel therefore lower its share.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron.core.ops.recurrence import (
    PrologueWeights,
    UnitLayout,
    gated_delta_rule,
    gated_rms_norm,
    recurrence_prologue,
    state_space_dual,
)
from megatron.core.ops.sequences import Sequences
from tools.bench.cases import (
    GPU,
    MCORE,
    Case,
    Function,
    directions_of,
    register,
    require_same,
    tensors_of,
)
from tools.bench.harness import Bench

CHUNK = 64
FLA, MAMBA, REFERENCE = "fla", "mamba_ssm", "reference"

#: Published for the forward pass of Mamba-2's state-space dual in fused kernels.
SSD_TOKENS_PER_SECOND = 22.7e6


@dataclass(frozen=True)
class Heads:
    """The heads and the sequences of a recurrence.

    Args:
        groups, heads: number of query/key heads and of value heads.
        keys, values: head dimensions.
        bounds: start and end of each sequence.
    """

    groups: int
    heads: int
    keys: int
    values: int
    bounds: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The total number of tokens."""
        return self.bounds[-1]

    def ideal_bytes(self, bench: Bench) -> float:
        """Return the bytes of queries, keys, values and outputs, and of the gates."""
        element_bytes = bench.dtype.itemsize
        features = 2 * self.groups * self.keys + 2 * self.heads * self.values
        return self.tokens * (element_bytes * features + (4 + element_bytes) * self.heads)

    def delta_flops(self) -> tuple[float, float]:
        """Return the operations of the chunked delta rule, forward and backward."""
        c, k, v = CHUNK, self.keys, self.values
        forward = c * (6 * k + 4 * v) + 6 * k * v + 2 * c * c / 3
        backward = 16 * k * v + 16 * c * k + 10 * c * v + 4 * c * c
        return self.tokens * self.heads * forward, self.tokens * self.heads * backward

    def dual_flops(self) -> tuple[float, float]:
        """Return the rooflines of the chunked state-space dual."""
        c, k, v = CHUNK, self.keys, self.values
        forward = self.heads * (2 * c * v + 4 * k * v) + self.groups * 2 * c * k
        backward = self.heads * (4 * c * v + 4 * c * k + 10 * k * v) + self.groups * 2 * c * k
        return self.tokens * forward, self.tokens * backward


def drawn_inputs(bench: Bench, shape: Heads) -> list[torch.Tensor]:
    """Return (query, key, value, decay, strength) as layers make them, with gradients."""
    t, decays = shape.tokens, torch.rand(shape.tokens, shape.heads, device=bench.device)
    q, k = (bench.drawn(t, shape.groups, shape.keys).float() for _ in range(2))
    inputs = [F.normalize(q, dim=-1).to(bench.dtype), F.normalize(k, dim=-1).to(bench.dtype)]
    inputs += [bench.drawn(t, shape.heads, shape.values), -0.2 * decays]
    inputs.append(torch.rand(t, shape.heads, device=bench.device).to(bench.dtype))
    return [x.requires_grad_() for x in inputs]


def _fla(bench: Bench, shape: Heads) -> tuple[Callable[..., torch.Tensor] | None, str]:
    """Return (flash-linear-attention's delta rule of our arguments and bounds or None, a note)."""
    if importlib.util.find_spec("fla") is None:
        return None, "flash-linear-attention cannot be imported"
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    ratio = shape.heads // shape.groups

    def native(q, k, v, g, beta, bounds):
        many = {"cu_seqlens": bounds} if len(bounds) > 2 else {}
        return chunk_gated_delta_rule(*(x[None] for x in (q, k, v, g, beta)), **many)[0][0]

    def repeating(q, k, v, g, beta, bounds):
        q, k = (x.repeat_interleave(ratio, 1) for x in (q, k))
        return native(q, k, v, g, beta, bounds)

    few = replace(shape, bounds=(0, 2 * CHUNK))
    inputs, bounds = drawn_inputs(bench, few), torch.tensor(few.bounds, device=bench.device)
    with torch.no_grad():
        expected = repeating(*inputs, bounds)
        why = refusal(FLA, lambda: native(*inputs, bounds), expected)
    return (native, "") if not why else (repeating, f"keys repeated for fla, which says {why}")


def fla_of(
    bench: Bench, shape: Heads, inputs: Sequence[torch.Tensor], mcore: torch.Tensor
) -> tuple[Callable[..., torch.Tensor] | None, str]:
    """Return fla's delta rule where it computes what ours does, else None; and what to note."""
    try:
        fla, note = _fla(bench, shape)
    except Exception as problem:  # the library cannot run here: ours can still be timed
        return None, f"{FLA}: {type(problem).__name__}: {str(problem).strip()[:80]}"
    if fla is None:
        return None, note
    bounds = torch.tensor(shape.bounds, device=bench.device)
    why = refusal(FLA, lambda: fla(*inputs, bounds), mcore)
    return (None, f"{FLA}: {why}") if why else (fla, note)


def refusal(name: str, call: Callable[[], torch.Tensor], mcore: torch.Tensor) -> str:
    """Return why a library cannot race, or nothing: it fails here, or computes something else."""
    try:
        require_same(name, call().detach(), mcore)
    except Exception as problem:
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return ""


def delta_cases(bench: Bench, shape: Heads, *, max_ms: tuple[float, ...] = ()) -> Iterator[Case]:
    """Yield the cases of the delta rule: forward, then forward and backward.

    Args:
        max_ms: the best milliseconds ever published, forward, then of both, as far as they are
            known.
    """
    inputs = drawn_inputs(bench, shape)
    sequences = Sequences(shape.bounds, device=bench.device)
    bounds = torch.tensor(shape.bounds, device=bench.device)

    def of(implementation: str) -> Function:
        options = {"sequences": sequences, "implementation": implementation}
        return lambda *x: gated_delta_rule(*x, **options)[0]

    functions: dict[str, Function] = {MCORE: of("triton"), REFERENCE: of("reference")}
    fla, note = fla_of(bench, shape, inputs, functions[MCORE](*inputs).detach())
    if fla is not None:
        functions[FLA] = lambda *x: fla(*x, bounds)
    moved_bytes = shape.ideal_bytes(bench)
    promised = [[f"{FLA} >= 1.6", *[f"ms <= {ms}" for ms in max_ms[i : i + 1]]] for i in (0, 1)]
    for case in directions_of(
        f"gated delta rule {_named(shape)}",
        functions,
        inputs,
        flops=shape.delta_flops(),
        moved_bytes=(moved_bytes, 2 * moved_bytes),
        targets=(promised[0], promised[1]),
        whole=True,
    ):
        yield replace(case, note=note)


def _mamba(rates: torch.Tensor) -> tuple[Callable[..., torch.Tensor] | None, str]:
    """Return (mamba_ssm's state-space dual of our arguments or None, a note)."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return None, "mamba_ssm cannot be imported"
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as problem:  # the library cannot run here: ours can still be timed
        return None, f"{MAMBA}: {type(problem).__name__}: {str(problem).strip()[:80]}"

    def native(q, k, v, g, dt):
        many = (v[None], dt[None], rates, k[None], q[None])
        return mamba_chunk_scan_combined(*many, chunk_size=128)[0]

    return native, ""


@register("state-space dual", GPU)
def dual(bench: Bench) -> Iterator[Case]:
    """The state-space dual of Nemotron-H-8B."""
    tokens, groups, heads, keys, values = bench.sized((32768, 8, 128, 128, 64), (40, 2, 4, 8, 5))
    shape = Heads(groups, heads, keys, values, (0, tokens))
    inputs = drawn_inputs(bench, shape)
    sequences = Sequences(shape.bounds, device=bench.device)
    functions = {
        key: lambda *x, name=name: state_space_dual(*x, sequences=sequences, implementation=name)[0]
        for key, name in ((MCORE, "triton"), (REFERENCE, "reference"))
    }
    rates = -torch.rand(heads, device=bench.device)
    with torch.no_grad():  # mamba_ssm knows no decays but the step times a number of the head
        inputs[3].copy_(inputs[4].float() * rates)
    outs = {key: function(*inputs).detach() for key, function in functions.items()}
    require_same("state-space dual, ours and reference", *outs.values())
    mamba, note = _mamba(rates)
    if mamba is not None:
        note = refusal(MAMBA, lambda: mamba(*inputs), outs[MCORE])
    if not note:
        functions[MAMBA] = mamba
    del outs
    flops, moved = shape.dual_flops(), shape.ideal_bytes(bench)
    name = f"state-space dual {heads} heads of {values}, N {keys}, {tokens} tokens"
    plain = [x.detach() for x in inputs]
    calls = {key: lambda function=function: function(*plain) for key, function in functions.items()}
    yield Case(
        name=f"{name}, forward",
        mcore=calls.pop(MCORE),
        peers=calls,
        flops=flops[0],
        moved_bytes=moved,
        note=note,
        targets=[f"ms <= {1e3 * tokens / SSD_TOKENS_PER_SECOND:.4g}"],
    )
    # mamba_ssm has no gradient of a decay by itself: only that through its step.
    leaves = {key: inputs if key != MAMBA else [*inputs[:3], inputs[4]] for key in functions}
    calls = {}
    for key, function in functions.items():
        chosen, grad_output = leaves[key], bench.drawn(tokens, heads, values)
        calls[key] = lambda function=function, chosen=chosen, grad_output=grad_output: (
            torch.autograd.grad(function(*inputs), chosen, grad_output)
        )
    yield Case(
        name=f"{name}, forward + backward",
        mcore=calls.pop(MCORE),
        peers=calls,
        flops=sum(flops),
        moved_bytes=3 * moved,
        note=note,
    )


@register("prologue", GPU)
def prologue(bench: Bench) -> Iterator[Case]:
    """Convolution, SiLU, normalisation and gates in one kernel, against the ops in a row."""
    tokens, units, heads, size = bench.sized((32768, 16, 2, 128), (9, 1, 2, 8))
    unit = UnitLayout.delta(heads, size, size)
    source = bench.drawn(tokens, units, unit.width).requires_grad_()
    weights = PrologueWeights(
        bench.drawn(units, unit.conv_channels, 4).requires_grad_(),
        None,
        torch.rand(units * heads, device=bench.device).requires_grad_(),
        torch.rand(units * heads, device=bench.device).requires_grad_(),
    )
    sequences = Sequences((0, tokens), device=bench.device)

    def of(implementation: str) -> Function:
        def function(source, weight, rates, step_bias):
            prologue_weights = PrologueWeights(weight, None, rates, step_bias)
            inputs, _ = recurrence_prologue(
                source,
                prologue_weights,
                unit=unit,
                sequences=sequences,
                implementation=implementation,
            )
            return tensors_of(inputs)

        return function

    leaves = [source, weights.weight, weights.a_log, weights.dt_bias]
    element_bytes, out = bench.dtype.itemsize, tokens * units * heads * 8
    moved_bytes = 2 * tokens * units * unit.conv_channels * element_bytes + out
    yield from directions_of(
        f"prologue of a delta net, {units} units of {unit.width}, {tokens} tokens",
        {MCORE: of("triton"), REFERENCE: of("reference")},
        leaves,
        moved_bytes=(moved_bytes, 1.5 * moved_bytes),
    )


@register("epilogue", GPU)
def epilogue(bench: Bench) -> Iterator[Case]:
    """Norm and gate after a recurrence."""
    tokens, heads, size = bench.sized((32768, 32, 128), (40, 4, 8))
    x, gate = (bench.drawn(tokens, heads, size).requires_grad_() for _ in range(2))
    weight = torch.ones(size, device=bench.device, dtype=bench.dtype).requires_grad_()
    functions = {
        key: lambda x, g, w, name=name: gated_rms_norm(x, g, w, eps=1e-6, implementation=name)
        for key, name in ((MCORE, "triton"), (REFERENCE, "reference"))
    }
    yield from directions_of(
        f"norm and gate, {heads} heads of {size}, {tokens} tokens",
        functions,
        (x, gate, weight),
        moved_bytes=(3 * x.nbytes, 5 * x.nbytes),
    )


@register("delta rule", GPU)
def qwen(bench: Bench) -> Iterator[Case]:
    """The delta rule of Qwen3-Next over one long sequence."""
    shape = bench.sized(Heads(16, 32, 128, 128, (0, 32768)), Heads(2, 4, 8, 6, (0, 70)))
    # FlashQLA's figures on an H200: 0.877 ms forward, 2.515 ms backward.
    yield from delta_cases(bench, shape, max_ms=(0.88, 3.4))


@register("delta rule, 8,192 tokens", GPU)
def qwen_short(bench: Bench) -> Iterator[Case]:
    """The same over a shorter sequence."""
    shape = bench.sized(Heads(16, 32, 128, 128, (0, 8192)), Heads(1, 2, 8, 6, (0, 20)))
    yield from delta_cases(bench, shape)


@register("delta rule, packed", GPU)
def qwen_packed(bench: Bench) -> Iterator[Case]:
    """The same over four sequences."""
    bounds = bench.sized((0, 8192, 16384, 24576, 32768), (0, 9, 9, 20, 33))
    shape = bench.sized(Heads(16, 32, 128, 128, bounds), Heads(1, 2, 8, 6, bounds))
    # FlashInfer's figure on an H200: 0.425 ms forward.
    yield from delta_cases(bench, shape, max_ms=(0.43,))


def _named(shape: Heads) -> str:
    many = len(shape.bounds) - 1
    length = f"{shape.tokens // many}" if many == 1 else f"{many} x {shape.tokens // many}"
    return f"{shape.groups}/{shape.heads} heads of {shape.keys}, {length} tokens"

# SPDX-License-Identifier: Apache-2.0
"""The kernels of recurrent layers against other implementations and against their rooflines.

Operations and bytes count the formula, with each tensor read or written once. Recomputation and
internal buffers of a kernel therefore lower its share.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from experimental.recurrence_splits.splits import recur_split
from megatron.core.ops.recurrence import (
    PrologueWeights,
    RecurrenceInputs,
    UnitLayout,
    delta_recurrence,
    gated_delta_rule,
    gated_rms_norm,
    recurrence_prologue,
    state_space_dual,
)
from megatron.core.ops.sequences import Sequences
from tools.bench.gpu_bench import MCORE, Bench, require_same, with_gradients

CHUNK = 64
FLA, MAMBA, REFERENCE = "fla", "mamba_ssm", "reference"
#: Largest difference over largest value between two ways that round bf16 in other places.
BF16_BOUND = 0.03


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

    few = dataclasses.replace(shape, bounds=(0, 2 * CHUNK))
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
        require_same(name, call().detach(), mcore, BF16_BOUND)
    except Exception as problem:
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return ""


def delta(bench: Bench, shape: Heads, name: str, *, max_ms: tuple[float, ...] = ()) -> None:
    """Race the delta rule, forward, then forward and backward.

    Args:
        max_ms: the best milliseconds ever published, forward, then of both, as far as they are
            known.
    """
    inputs = drawn_inputs(bench, shape)
    sequences = Sequences(shape.bounds, device=bench.device)
    bounds = torch.tensor(shape.bounds, device=bench.device)

    def of(implementation: str) -> Callable[..., torch.Tensor]:
        options = {"sequences": sequences, "implementation": implementation}
        return lambda *x: gated_delta_rule(*x, **options)[0]

    functions = {MCORE: of("triton"), REFERENCE: of("reference")}
    outs = {key: function(*inputs).detach() for key, function in functions.items()}
    require_same("delta rule, ours and the reference", outs[MCORE], outs[REFERENCE], BF16_BOUND)
    fla, note = fla_of(bench, shape, inputs, outs[MCORE])
    if fla is not None:
        functions[FLA] = lambda *x: fla(*x, bounds)
    del outs
    flops, moved = shape.delta_flops(), shape.ideal_bytes(bench)
    promised = [f"{FLA} >= 1.6"]
    further = [[f"ms <= {ms}"] for ms in max_ms] + [[], []]
    calls = {}
    for key, function in functions.items():
        plain = [x.detach() for x in inputs]
        calls[key] = lambda function=function, plain=plain: function(*plain)
    bench.race(
        f"gated delta rule {name}, forward",
        calls,
        flops=flops[0],
        moved_bytes=moved,
        targets=promised + further[0],
        note=note,
    )
    calls = {key: with_gradients(function, inputs)[0] for key, function in functions.items()}
    bench.race(
        f"gated delta rule {name}, forward + backward",
        calls,
        flops=sum(flops),
        moved_bytes=3 * moved,
        targets=promised + further[1],
        note=note,
    )


def split(bench: Bench) -> None:
    """Race few heads over a long sequence that is split on the card against it in one piece."""
    tokens, size = bench.sized((32768, 128), (100, 8))
    shape = Heads(2, 4, size, size, (0, tokens))
    inputs = [x.detach() for x in drawn_inputs(bench, shape)]
    sequences = Sequences(shape.bounds, device=bench.device)

    def of(splits: int) -> Callable[[], object]:
        recurrence_inputs = RecurrenceInputs(*inputs)
        recurrence = delta_recurrence(implementation="triton").operations(recurrence_inputs)
        return lambda: recur_split(recurrence, recurrence_inputs, sequences, splits=splits)

    calls = {MCORE: of(bench.sized(16, 2)), "one piece": of(1)}
    bounds = torch.tensor(shape.bounds, device=bench.device)
    fla, note = fla_of(bench, shape, inputs, of(1)()[0])
    if fla is not None:
        calls[FLA] = lambda: fla(*inputs, bounds)
    bench.race(
        f"gated delta rule 2/4 heads, {tokens} tokens in {bench.sized(16, 2)} splits, forward",
        calls,
        flops=shape.delta_flops()[0],
        moved_bytes=shape.ideal_bytes(bench),
        note=note,
    )


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


def dual(bench: Bench) -> None:
    """Race the state-space dual of Nemotron-H-8B."""
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
    require_same("state-space dual, ours and reference", *outs.values(), BF16_BOUND)
    mamba, note = _mamba(rates)
    if mamba is not None:
        note = refusal(MAMBA, lambda: mamba(*inputs), outs[MCORE])
    if not note:
        functions[MAMBA] = mamba
    del outs
    flops, moved = shape.dual_flops(), shape.ideal_bytes(bench)
    what = f"state-space dual {heads} heads of {values}, N {keys}, {tokens} tokens"
    targets = [f"ms <= {1e3 * tokens / SSD_TOKENS_PER_SECOND:.4g}"]
    plain = [x.detach() for x in inputs]
    calls = {key: lambda function=function: function(*plain) for key, function in functions.items()}
    bench.race(
        f"{what}, forward", calls, flops=flops[0], moved_bytes=moved, note=note, targets=targets
    )
    # mamba_ssm has no gradient of a decay by itself: only that through its step.
    leaves = {key: inputs if key != MAMBA else [*inputs[:3], inputs[4]] for key in functions}
    calls = {}
    for key, function in functions.items():
        chosen, pull = leaves[key], bench.drawn(tokens, heads, values)
        calls[key] = lambda function=function, chosen=chosen, pull=pull: torch.autograd.grad(
            function(*inputs), chosen, pull
        )
    bench.race(
        f"{what}, forward + backward", calls, flops=sum(flops), moved_bytes=3 * moved, note=note
    )


def prologue(bench: Bench) -> None:
    """Race convolution, SiLU, normalisation and gates in one kernel against the ops in a row."""
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

    def of(implementation: str) -> Callable[..., RecurrenceInputs]:
        def function(source, weight, rates, step_bias):
            prologue_weights = PrologueWeights(weight, None, rates, step_bias)
            inputs, _ = recurrence_prologue(
                source,
                prologue_weights,
                unit=unit,
                sequences=sequences,
                implementation=implementation,
            )
            return inputs

        return function

    leaves = [source, weights.weight, weights.a_log, weights.dt_bias]
    functions = {MCORE: of("triton"), REFERENCE: of("reference")}
    plain = [x.detach() for x in leaves]
    element_bytes, out = bench.dtype.itemsize, tokens * units * heads * 8
    moved = 2 * tokens * units * unit.conv_channels * element_bytes + out
    what = f"prologue of a delta net, {units} units of {unit.width}, {tokens} tokens"
    calls = {key: lambda function=function: function(*plain) for key, function in functions.items()}
    bench.race(f"{what}, forward", calls, moved_bytes=moved)
    outputs = {key: function(*leaves) for key, function in functions.items()}
    grad_outputs = [torch.randn_like(x) for x in outputs[MCORE]]
    calls = {
        key: lambda ys=ys: torch.autograd.grad(list(ys), leaves, grad_outputs, retain_graph=True)
        for key, ys in outputs.items()
    }
    bench.race(f"{what}, backward", calls, moved_bytes=1.5 * moved)


def epilogue(bench: Bench) -> None:
    """Race norm and gate after a recurrence."""
    tokens, heads, size = bench.sized((32768, 32, 128), (40, 4, 8))
    x, gate = (bench.drawn(tokens, heads, size).requires_grad_() for _ in range(2))
    weight = torch.ones(size, device=bench.device, dtype=bench.dtype).requires_grad_()
    functions = {
        key: lambda x, g, w, name=name: gated_rms_norm(x, g, w, eps=1e-6, implementation=name)
        for key, name in ((MCORE, "triton"), (REFERENCE, "reference"))
    }
    what = f"norm and gate, {heads} heads of {size}, {tokens} tokens"
    plain = (x.detach(), gate.detach(), weight.detach())
    calls = {key: lambda function=function: function(*plain) for key, function in functions.items()}
    bench.race(f"{what}, forward", calls, moved_bytes=3 * x.nbytes)
    calls = {
        key: with_gradients(function, (x, gate, weight))[1] for key, function in functions.items()
    }
    bench.race(f"{what}, backward", calls, moved_bytes=5 * x.nbytes)


def qwen(bench: Bench) -> None:
    """Race the delta rule of Qwen3-Next over one long sequence."""
    shape = bench.sized(Heads(16, 32, 128, 128, (0, 32768)), Heads(2, 4, 8, 6, (0, 70)))
    # FlashQLA's figures on an H200: 0.877 ms forward, 2.515 ms backward.
    delta(bench, shape, _named(shape), max_ms=(0.88, 3.4))


def qwen_short(bench: Bench) -> None:
    """Race the same over a shorter one."""
    shape = bench.sized(Heads(16, 32, 128, 128, (0, 8192)), Heads(1, 2, 8, 6, (0, 20)))
    delta(bench, shape, _named(shape))


def qwen_packed(bench: Bench) -> None:
    """Race the same op over four sequences."""
    bounds = bench.sized((0, 8192, 16384, 24576, 32768), (0, 9, 9, 20, 33))
    shape = bench.sized(Heads(16, 32, 128, 128, bounds), Heads(1, 2, 8, 6, bounds))
    # FlashInfer's figure on an H200: 0.425 ms forward.
    delta(bench, shape, _named(shape), max_ms=(0.43,))


def _named(shape: Heads) -> str:
    many = len(shape.bounds) - 1
    length = f"{shape.tokens // many}" if many == 1 else f"{many} x {shape.tokens // many}"
    return f"{shape.groups}/{shape.heads} heads of {shape.keys}, {length} tokens"

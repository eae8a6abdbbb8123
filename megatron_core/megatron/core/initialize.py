# SPDX-License-Identifier: Apache-2.0
"""Values as a pure function of (seed, name, logical index): the same on every grid and device.

A weight's element number i (row-major, in the logical tensor: unfused, unpadded, unsharded) draws

    state = key(seed, name) + (i + 1) * 0x9E3779B97F4A7C15           mod 2^64
    bits  = the SplitMix64 mix of `state` (Steele, Lea and Flood 2014, "Fast splittable PRNGs")

so any box of a tensor can be filled alone, in any order, by any number of ranks. Everything up to
the last step is integer arithmetic, which CPU and GPU compute alike; log, cos and erfinv differ in
their last bits between devices and even between vector positions. Normal values come from a table
of 4,096 equally likely cells: 12 bits choose the cell, 19 bits the position between its two
quantiles, all in units of 2^-22. That is one exact conversion to fp32, one rounded multiplication
by `std`, and last the rounding to the weight's dtype.

The outermost quantiles are infinite; they are replaced by the one value (about 3.965) that gives
the table unit variance. No draw lies beyond it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_CELL_BITS, _FRACTION_BITS, _UNIT_BITS = 12, 19, 22
_UNIFORM_BITS = 24

#: Elements per step: on a CPU two int64 temporaries of this size stay in the second-level cache
#: (and each operation below torch's threading grain); on a GPU launches must not dominate.
_CPU_CHUNK, _GPU_CHUNK = 1 << 15, 1 << 22


@dataclass(frozen=True)
class InitSpec:
    """The distribution of a weight's initial values; create one with the class methods.

    Args:
        kind: the distribution.
        std: standard deviation of "normal" (mean 0).
        value: the value of "constant".
        low, high: the range [low, high) of "uniform"; for "log", the range of the argument of the
            logarithm; for "step", the log-uniform range of the value's softplus.

    Raises:
        ValueError: a negative or non-finite number, or an empty range.
    """

    kind: Literal["normal", "uniform", "constant", "log", "step"]
    std: float = 0.0
    value: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("normal", "uniform", "constant", "log", "step"):
            raise ValueError(
                f"unknown initial distribution {self.kind!r}: normal, uniform, constant, log or "
                "step"
            )
        if self.kind == "normal" and not (math.isfinite(self.std) and self.std >= 0.0):
            raise ValueError(f"initial std is {self.std}: use a finite number >= 0")
        least = -math.inf if self.kind == "uniform" else 0.0
        if self.kind in ("uniform", "log", "step") and not (
            least < self.low < self.high < math.inf
        ):
            raise ValueError(f"initial range is [{self.low}, {self.high}): use finite low < high")

    @classmethod
    def normal(cls, std: float) -> InitSpec:
        """Draw from a normal distribution of mean 0 (cut at 3.965 standard deviations)."""
        return cls("normal", std=std)

    @classmethod
    def uniform(cls, low: float, high: float) -> InitSpec:
        """Draw from [low, high) in 2^24 equal steps."""
        return cls("uniform", low=low, high=high)

    @classmethod
    def log_of_uniform(cls, low: float, high: float) -> InitSpec:
        """Draw the logarithm of numbers from [low, high), both positive: rates of decay."""
        return cls("log", low=low, high=high)

    @classmethod
    def step_bias(cls, low: float, high: float) -> InitSpec:
        """Draw x so that softplus(x) is log-uniform between `low` and `high`, both positive: biases
        of step sizes (Gu & Dao 2023, section 3.6)."""
        return cls("step", low=low, high=high)

    @classmethod
    def constant(cls, value: float) -> InitSpec:
        """Start every element at `value`."""
        return cls("constant", value=value)


def stream_key(seed: int, name: str) -> int:
    """Return the 64-bit key of the values called `name` under `seed`: BLAKE2b over both."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@torch.no_grad()
def fill_(
    out: Tensor,
    spec: InitSpec,
    *,
    seed: int,
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
) -> Tensor:
    """Write one box of a logical tensor's initial values into `out`.

    Any box is bitwise the slice of the whole tensor's values.

    Args:
        out: floating-point destination of any strides and device; its shape is the box's size.
        spec: the distribution.
        seed: the run's seed, any integer.
        name: the logical tensor's name.
        shape: shape of the logical tensor, unsharded and without padding.
        offsets: where the box starts in it.

    Returns:
        `out`.

    Raises:
        ValueError: the box does not lie inside `shape`, or `out` is not floating point.
    """
    sizes = tuple(out.shape)
    fits = len(sizes) == len(shape) == len(offsets) and all(
        offset >= 0 and offset + size <= whole
        for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: box of {sizes} at {tuple(offsets)} is not inside the logical shape "
            f"{tuple(shape)}: pass logical offsets without padding"
        )
    if not out.is_floating_point():
        raise ValueError(f"{name}: cannot draw initial values as {out.dtype}: use a float dtype")
    if spec.kind == "constant":
        return out.fill_(spec.value)
    if not sizes:
        fill_(out.view(1), spec, seed=seed, name=name, shape=(1,), offsets=(0,))
        return out
    if out.numel():
        limit = _CPU_CHUNK if out.device.type == "cpu" else _GPU_CHUNK
        key = stream_key(seed, name)
        for target, state in _states(out, key, shape=shape, offsets=offsets, limit=limit):
            target.copy_(_DRAWS[spec.kind](state, spec).view(target.shape))
    return out


def _states(
    out: Tensor, key: int, *, shape: Sequence[int], offsets: Sequence[int], limit: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk `out` in chunks of rows; yield each with its mixed states, a reused int64 buffer.

    Yields:
        Pairs of a view of `out` [rows, ...] and the states of its elements [rows, inner].
    """
    sizes, strides = tuple(out.shape), _row_major(shape)
    # A row is everything below dimension `dim`, the outermost one whose rows are within the limit.
    dim = next(
        d for d in range(len(sizes)) if d == len(sizes) - 1 or math.prod(sizes[d + 1 :]) <= limit
    )
    inner_sizes = sizes[dim + 1 :]
    inner = _steps(inner_sizes, strides[dim + 1 :], out.device)  # [inner]
    rows = min(sizes[dim], max(1, limit // inner.numel()))
    row_steps = _steps((rows,), (strides[dim],), out.device)  # [rows]
    state, scratch = (
        torch.empty(rows * inner.numel(), dtype=torch.int64, device=out.device) for _ in range(2)
    )
    outer = itertools.product(*(range(size) for size in sizes[:dim]), range(0, sizes[dim], rows))
    for start in outer:
        count = min(rows, sizes[dim] - start[-1])
        offset = sum((o + i) * s for o, i, s in zip(offsets, start, strides, strict=False))
        offset += sum(o * s for o, s in zip(offsets[dim + 1 :], strides[dim + 1 :], strict=True))
        begin = _signed(key + (offset + 1) * _GAMMA)
        block = state[: count * inner.numel()].view(count, -1)
        torch.add((row_steps[:count] + begin).unsqueeze(1), inner, out=block)
        _mix_(block, scratch[: block.numel()].view_as(block))
        yield out[start[:-1]].narrow(0, start[-1], count), block


def _steps(sizes: Sequence[int], strides: Sequence[int], device: torch.device) -> Tensor:
    """Return how far each element of a box moves the state: gamma times its linear index, int64."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for size, stride in zip(sizes, strides, strict=True):
        steps = torch.arange(size, dtype=torch.int64, device=device) * _signed(stride * _GAMMA)
        total = (total.unsqueeze(1) + steps).flatten()
    return total


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _signed(number: int) -> int:
    """Return the int64 that holds the low 64 bits of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift_right(state: Tensor, bits: int, out: Tensor) -> Tensor:
    """Shift the bit pattern right with zeros coming in; int64's own shift brings in the sign."""
    torch.bitwise_right_shift(state, bits, out=out)
    return out.bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(state: Tensor, scratch: Tensor) -> Tensor:
    """Mix int64 states in place; exactly SplitMix64 in the upper 31 bits, the only ones used.

    Its last step, state ^= state >> 31, changes only the 33 bits below them and is left out.
    """
    state.bitwise_xor_(_shift_right(state, 30, scratch)).mul_(_signed(_MIX_1))
    return state.bitwise_xor_(_shift_right(state, 27, scratch)).mul_(_signed(_MIX_2))


def _uniform(state: Tensor, spec: InitSpec) -> Tensor:
    """Turn mixed states into fp32 values of [low, high): bits/2^24 * (high - low) + low."""
    bits = _shift_right(state, 64 - _UNIFORM_BITS, state)
    # Two operations, each rounded once: an addcmul could be one rounding on some devices.
    values = bits.to(torch.float32).mul_((spec.high - spec.low) * 2.0**-_UNIFORM_BITS)
    # Rounding the sum may reach `high` when |low| is large: stay inside the half-open range.
    largest = torch.nextafter(torch.tensor(spec.high), torch.tensor(-math.inf)).item()
    return values.add_(spec.low).clamp_(max=largest)


def _normal(state: Tensor, spec: InitSpec) -> Tensor:
    """Turn mixed states into fp32 normal values by the table of quantiles. Overwrites `state`."""
    flat = state.view(-1)
    cell = _shift_right(flat, 64 - _CELL_BITS, torch.empty_like(flat))
    entry = torch.index_select(_quantile_table(flat.device), 0, cell)
    flat.bitwise_right_shift_(64 - _CELL_BITS - _FRACTION_BITS).bitwise_and_(
        (1 << _FRACTION_BITS) - 1
    )
    flat.mul_(torch.bitwise_and(entry, (1 << 32) - 1, out=cell)).bitwise_right_shift_(
        _FRACTION_BITS
    )
    flat.add_(entry.bitwise_right_shift_(32))
    return flat.to(torch.float32).mul_(spec.std * 2.0**-_UNIT_BITS)


def _log(state: Tensor, spec: InitSpec) -> Tensor:
    """Turn mixed states into logarithms of uniform values, in fp64, so that rounding differences
    between devices nearly vanish in fp32."""
    return _uniform(state, spec).double().log_()


def _step(state: Tensor, spec: InitSpec) -> Tensor:
    """Turn mixed states into fp64 values whose softplus is log-uniform."""
    log_range = InitSpec.uniform(math.log(spec.low), math.log(spec.high))
    step_size = _uniform(state, log_range).double().exp_()
    return step_size.neg().expm1().neg_().log_().add_(step_size)  # log(e^w - 1) = w + log(1 - e^-w)


_DRAWS = MappingProxyType({"normal": _normal, "uniform": _uniform, "log": _log, "step": _step})


@functools.cache
def _quantile_table(device: torch.device) -> Tensor:
    """Return the cells [4096] int64: lower quantile in the high 32 bits, the cell's width below.

    Both in units of 2^-22, so that even the largest value is exact in fp32. The quantiles are
    rounded from fp64, far coarser than its error: the table is the same on every machine.
    """
    cells = 1 << _CELL_BITS
    half = torch.arange(cells // 2 + 1, cells, dtype=torch.float64) / cells
    upper = torch.special.ndtri(half)  # the positive quantiles; the rest is symmetric
    knots = torch.cat([-upper.flip(0), upper.new_zeros(1), upper])  # [4095], without the two ends
    low, high = knots[:-1], knots[1:]
    # A value spread evenly over [a, b] has second moment (a^2 + ab + b^2) / 3. The two end cells
    # [last, end] must bring the mean over all cells to 1.
    inner = float((low * low + low * high + high * high).sum()) / 3.0
    last_knot = float(knots[-1])
    missing = 1.5 * (cells - inner) - last_knot * last_knot
    end = knots.new_tensor([(math.sqrt(last_knot * last_knot + 4.0 * missing) - last_knot) / 2.0])
    units = torch.cat([-end, knots, end]).mul(2.0**_UNIT_BITS).round().to(torch.int64)
    return (units[:-1] * (1 << 32) + (units[1:] - units[:-1])).to(device)

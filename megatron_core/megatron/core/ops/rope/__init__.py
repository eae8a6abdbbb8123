# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequencies once a model, a table of cosines and sines once a step, a
rotation of queries and keys per layer: the op, and its definition in plain torch, four half passes
over memory on a CPU.

`split_heads` takes query, key and value out of their fused projection, rotated, and writes the
gradients of all of them into that of the projection, in one pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron.core.ops.backend_choice import accumulation_dtype, choose, record_function

__all__ = [
    "HeadRotation",
    "RopeScaling",
    "apply_rope",
    "inverse_frequencies",
    "rotary_table",
    "split_heads",
    "tabulate",
]


class HeadRotation(NamedTuple):
    """How heads rotate.

    Args:
        cos, sin: fp32 [s, r/2] or [s, b, r/2], from `rotary_table`.
        interleaved: pair neighbouring features instead of halves.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    implementation: str | None = None,
) -> torch.Tensor:
    """Rotate the first features of every head by its position's angle (Su et al., 2021).

    Pair i is features (i, i + r/2) of the first r = 2 cos.shape[-1], or (2i, 2i + 1) when
    `interleaved`; the features from r on pass through. Backward is the rotation by the negative
    angle and saves only the table.

    Args:
        x: [s, b, n, d].
        cos: fp32 [s, r/2] or [s, b, r/2], from `rotary_table`.
        sin: same shape.
        interleaved: pair neighbouring features instead of halves.
        implementation: "reference", "triton" or None (by device).

    Returns:
        [s, b, n, d] in x's dtype; the arithmetic is fp32.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(x, cos, sin)
    turn = _rotate
    if (implementation or not x.is_cpu) and choose(implementation, x, "apply_rope") == "triton":
        from megatron.core.ops.rope import triton as kernels

        turn = kernels.rotate
    if torch.is_grad_enabled():
        return record_function(Rope, x, cos, sin, interleaved, turn)
    return turn(x, cos, sin, interleaved)


def split_heads(
    projection: torch.Tensor,
    sizes: Sequence[int],
    rotation: HeadRotation | None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Split the heads of a fused projection into query, key, value and, if there is one, gate.

    Query and key are rotated as `apply_rope` does; without a rotation all parts are views. Backward
    writes the gradients of all parts, those of query and key rotated back, into one tensor.

    Args:
        projection: [s, b, m, d].
        sizes: heads of each part, m in all.
        rotation: of queries and keys; None leaves them.
        implementation: "reference", "triton" or None (by device).

    Returns:
        A tensor [s, b, size, d] for each of `sizes`, in the projection's dtype.

    Raises:
        ValueError: sizes or a table that do not fit.
    """
    fits = projection.ndim == 4 and len(sizes) in (3, 4) and sum(sizes) == projection.shape[2]
    if not fits or min(sizes) < 1:
        raise ValueError(
            f"split_heads: {list(sizes)} heads of a projection {tuple(projection.shape)}: give "
            "those of query, key, value and gate of [s, b, m, d]"
        )
    if rotation is not None:
        _check(projection, rotation.cos, rotation.sin)
    pair = _rotate, _join_heads
    by_device = implementation or not projection.is_cpu
    if by_device and choose(implementation, projection, "split_heads") == "triton":
        from megatron.core.ops.rope import triton as kernels

        pair = kernels.rotate, kernels.join_heads
    if torch.is_grad_enabled():
        return record_function(SplitHeads, projection, tuple(sizes), rotation, *pair)
    return _split_heads(projection, sizes, rotation, pair[0])


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raise ValueError unless the table fits x."""
    if x.ndim != 4:
        raise ValueError(f"apply_rope: x {tuple(x.shape)} must be [s, b, n, d]")
    if cos.shape != sin.shape or cos.shape[:-1] not in (x.shape[:1], x.shape[:2]):
        raise ValueError(
            f"apply_rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be"
            f" [s, r/2] or [s, b, r/2] for x {tuple(x.shape)}"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"apply_rope: the table rotates {2 * cos.shape[-1]} features but heads have"
            f" {x.shape[-1]}; make rotary_table with a smaller dim"
        )


# --- reference: plain torch

KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context they were trained for.

    Args:
        kind: "linear" (Chen et al., 2023), "llama3" (Llama 3.1), "yarn" (Peng et al., 2023).
        factor: how many times longer the context becomes.
        low_freq_factor: llama3: wavelengths above original / low_freq_factor are stretched fully.
        high_freq_factor: llama3: wavelengths below original / high_freq_factor are kept.
        original_max_position: llama3, yarn: context of the original training, in tokens.
        beta_fast: yarn: features turning more often than this over that context are kept.
        beta_slow: yarn: features turning less often than this are stretched fully.
        attention_factor: yarn: factor on cosine and sine; None is 0.1 ln(factor) + 1.

    Raises:
        ValueError: every field out of its range, at once.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"kind={self.kind!r} must be one of {KINDS}")
        if self.factor < 1:
            problems.append(f"factor={self.factor} must be at least 1")
        if self.kind in ("llama3", "yarn") and not self.original_max_position:
            problems.append(f"original_max_position is required by kind={self.kind!r}")
        if self.low_freq_factor >= self.high_freq_factor:
            problems.append(
                f"low_freq_factor={self.low_freq_factor} must be below"
                f" high_freq_factor={self.high_freq_factor}"
            )
        if self.beta_slow > self.beta_fast:  # equal ones leave a step, as Kimi-K2 has it
            problems.append(
                f"beta_slow={self.beta_slow} must not be above beta_fast={self.beta_fast}"
            )
        if problems:
            raise ValueError("RopeScaling: " + "; ".join(problems))

    @property
    def magnitude(self) -> float:
        """Give the factor that cosine and sine are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


def inverse_frequencies(
    dim: int, *, base: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> torch.Tensor:
    """Compute the angle per position of each feature pair: base^(-2i/dim), scaled.

    Args:
        dim: number of rotated features, even.
        base: the base (theta).
        scaling: how to stretch, or None.
        device: where to put the result.

    Returns:
        fp32 [dim/2], radians a token.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return _yarn(frequencies, dim, base, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep short wavelengths, stretch long ones, blend linearly in 1/wavelength between."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _yarn(frequencies: torch.Tensor, dim: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    """Keep features that turn often, stretch those that turn rarely, ramp over the index."""

    def index_of(turns: float) -> float:
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by zero
    index = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    stretch = ((index - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * stretch + frequencies * (1 - stretch)


def rotary_table(
    positions: torch.Tensor,
    *,
    dim: int,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tabulate cosine and sine of position times frequency (Su et al., 2021), once a step.

    Args:
        positions: int64 [s] or [s, b].
        dim: number of rotated features, even.
        base: the base (theta).
        scaling: how to stretch, or None.

    Returns:
        (cos, sin), fp32 [s, dim/2] or [s, b, dim/2], times the scaling's magnitude.

    Raises:
        ValueError: an odd or non-positive `dim`, or positions of another shape or dtype.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary_table: dim={dim} must be positive and even")
    frequencies = inverse_frequencies(dim, base=base, scaling=scaling, device=positions.device)
    return tabulate(positions, frequencies, scaling)


def tabulate(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: RopeScaling | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table of `rotary_table` from frequencies that are known, fp32 [dim/2]."""
    if positions.ndim not in (1, 2) or positions.is_floating_point():
        raise ValueError(
            f"rotary_table: positions {tuple(positions.shape)} {positions.dtype} must be integers"
            " of shape [s] or [s, b]"
        )
    angles = positions[..., None].float() * frequencies  # [s, (b,) dim/2]
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return angles.cos().mul_(magnitude), angles.sin().mul_(magnitude)


class Rope(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for each feature pair.

    Forward: as above. dgrad: the same with -sin. No weights. Saves the table. `rotate` is that of
    this module or of `triton`.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved, rotate):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.rotate = interleaved, rotate
        return rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return ctx.rotate(grad, cos, sin, ctx.interleaved, sign=-1), None, None, None, None


class SplitHeads(torch.autograd.Function):
    """projection -> (query, key, value, gate), query and key rotated; see `split_heads`.

    Forward: as above. dgrad: the gradients of all parts in one tensor, those of query and key
    rotated by the negative angle. No weights. Saves the table. `rotate` and `join` are those of
    this module or of `triton`.
    """

    @staticmethod
    def forward(ctx, projection, sizes, rotation, rotate, join):
        ctx.save_for_backward(*(() if rotation is None else rotation[:2]))
        ctx.interleaved = rotation is not None and rotation.interleaved
        ctx.sizes, ctx.join = sizes, join
        return _split_heads(projection, sizes, rotation, rotate)

    @staticmethod
    def backward(ctx, *grads):
        table = ctx.saved_tensors or (None, None)
        shape = list(grads[0].shape)
        shape[2] = sum(ctx.sizes)
        joint = torch.empty(shape, dtype=grads[0].dtype, device=grads[0].device)
        if joint.numel():
            ctx.join(grads, joint, *table, ctx.interleaved)
        return joint, None, None, None, None


def _split_heads(
    projection: torch.Tensor,
    sizes: Sequence[int],
    rotation: HeadRotation | None,
    rotate: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return the parts of a projection [s, b, m, d], see `split_heads`."""
    if rotation is None:
        return projection.split(tuple(sizes), dim=2)
    rotated = sizes[0] + sizes[1]
    both = rotate(projection[:, :, :rotated], *rotation)
    rest = projection[:, :, rotated:].split(tuple(sizes[2:]), dim=2)
    return *both.split(tuple(sizes[:2]), dim=2), *rest


def _join_heads(
    grads: Sequence[torch.Tensor],
    joint: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """Write gradients [s, b, n, d] of the parts of a projection side by side into that of the
    projection, the first two rotated back."""
    parts = joint.split([grad.shape[2] for grad in grads], dim=2)
    for index, (grad, part) in enumerate(zip(grads, parts, strict=True)):
        if cos is not None and sin is not None and index < 2:
            _rotate(grad, cos, sin, interleaved, sign=-1, out=part)
        else:
            part.copy_(grad)


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    *,
    sign: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate x [s, b, n, d] by `sign` times the table's angles [s, (b,) r/2]; see `apply_rope`.

    The result is written to `out`, if that is given.
    """
    wide = accumulation_dtype(x.dtype)
    values, target = x.to(wide), out
    if out is None or out.dtype != wide:
        out = torch.empty(x.shape, dtype=wide, device=x.device)
    # [s, (b,) r/2] -> [s, b or 1, 1, r/2]
    shape = (*cos.shape[:-1], 1, cos.shape[-1]) if cos.ndim == 3 else (-1, 1, 1, cos.shape[-1])
    cos = cos.to(wide).view(shape)
    sin = sin.to(wide).view(shape)
    half = cos.shape[-1]
    rotated = 2 * half
    whole = rotated == x.shape[-1]
    split, dim = ((half, 2), -1) if interleaved else ((2, half), -2)
    pairs = (*x.shape[:-1], *split)  # [s, b, n, r/2, 2] or [s, b, n, 2, r/2]
    # [s, b, n, r/2] each
    first, second = (values if whole else values[..., :rotated]).view(pairs).unbind(dim)
    out_first, out_second = (out if whole else out[..., :rotated]).view(pairs).unbind(dim)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=sign)
    if not whole:
        out[..., rotated:] = values[..., rotated:]
    if target is None:
        return out.to(x.dtype)
    return out if target is out else target.copy_(out)

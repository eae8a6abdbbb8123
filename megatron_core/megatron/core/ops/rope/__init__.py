# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: inverse frequencies, a table of cosines and sines, and the rotation.

Frequencies are computed once per model, the table once per step, the rotation of queries and keys
in every layer. The plain PyTorch version takes four half passes over memory.

`split_heads` splits a fused projection into query, key and value and rotates them; its backward
writes all their gradients into the projection's gradient in one pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch

from megatron.core.ops.backend_choice import choose, direct_apply
from megatron.core.ops.rope import cpu

__all__ = [
    "RopeScaling",
    "RopeTable",
    "apply_rope",
    "inverse_frequencies",
    "rotary_table",
    "split_heads",
    "tabulate",
]


@dataclasses.dataclass(frozen=True, eq=False)
class RopeTable:
    """cos and sin of token positions.

    Args:
        cos, sin: fp32 [s, r/2] or [s, b, r/2], from `rotary_table`.
        interleaved: pair neighbouring features instead of halves.
        query_scale: fp32 [s] or [s, b], factor on the queries of each position; None for none.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    query_scale: torch.Tensor | None = None

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Return heads [s, b, n, d] rotated by the positions of their tokens."""
        return apply_rope(x, self.cos, self.sin, interleaved=self.interleaved)

    def rotate_(self, x: torch.Tensor) -> None:
        """Rotate heads [s, n, d] in place, outside of autograd, with a table [s, r/2]."""
        cpu.rotate_(x, *self._by_pair, self.interleaved)

    def scale(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries [s, b, n, d] times the factors of their positions."""
        if self.query_scale is None:
            return query
        scale = self.query_scale.unsqueeze(1) if self.query_scale.ndim == 1 else self.query_scale
        return query * scale[..., None, None].to(query.dtype)  # [s, 1 or b, 1, 1]

    def scale_(self, query: torch.Tensor) -> None:
        """Multiply queries [s, n, d] in place, outside of autograd, with factors [s]."""
        if self.query_scale is not None:
            query.mul_(self.query_scale[:, None, None].to(query.dtype))

    @functools.cached_property
    def _by_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for features in pairs, [s, 1, r/2, 1] if interleaved, else [s, 1, 1, r/2]."""
        dim = -1 if self.interleaved else -2
        return self.cos.unsqueeze(1).unsqueeze(dim), self.sin.unsqueeze(1).unsqueeze(dim)


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
    rotate_fn = cpu.rotate
    if (implementation or not x.is_cpu) and choose(implementation, x, "apply_rope") == "triton":
        from megatron.core.ops.rope import triton as kernels

        rotate_fn = kernels.rotate
    if torch.is_grad_enabled():
        return _apply_rope(x, cos, sin, interleaved, rotate_fn)
    return rotate_fn(x, cos, sin, interleaved)


def split_heads(
    projection: torch.Tensor,
    sizes: Sequence[int],
    rotation: RopeTable | None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Split the heads of a fused projection into query, key, value and optionally gate.

    Query and key are rotated as in `apply_rope`; without a rotation all outputs are views. Backward
    writes all gradients, rotated back for query and key, into one tensor.

    Args:
        projection: [s, b, m, d].
        sizes: heads of each output, m in all.
        rotation: of queries and keys, or None.
        implementation: "reference", "triton" or None (by device).

    Returns:
        A tensor [s, b, size, d] for each of `sizes`, in the projection's dtype.

    Raises:
        ValueError: sizes or a table that do not fit.
    """
    fits = projection.ndim == 4 and len(sizes) in (3, 4) and sum(sizes) == projection.shape[2]
    if not fits or min(sizes) < 1:
        raise ValueError(
            f"split_heads: {list(sizes)} heads of a projection {tuple(projection.shape)}: "
            "give the number of query, key, value and gate heads of [s, b, m, d]"
        )
    if rotation is not None:
        _check(projection, rotation.cos, rotation.sin)
    functions = cpu.rotate, cpu.join_heads
    by_device = implementation or not projection.is_cpu
    if by_device and choose(implementation, projection, "split_heads") == "triton":
        from megatron.core.ops.rope import triton as kernels

        functions = kernels.rotate, kernels.join_heads
    if torch.is_grad_enabled():
        return _apply_split_heads(projection, tuple(sizes), rotation, *functions)
    return _split_heads(projection, sizes, rotation, functions[0])


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


class Rope(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for each feature pair.

    Forward: as above. dgrad: the same with -sin. No weights. Saves the table. `rotate` is the
    function of `cpu` or of `triton`.
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


_apply_rope = direct_apply(Rope)


class SplitHeads(torch.autograd.Function):
    """projection -> (query, key, value, gate), query and key rotated; see `split_heads`.

    Forward: as above. dgrad: all gradients in one tensor, rotated by the negative angle for query
    and key. No weights. Saves the table. `rotate` and `join` are the functions of `cpu` or of
    `triton`.
    """

    @staticmethod
    def forward(ctx, projection, sizes, rotation, rotate, join):
        ctx.save_for_backward(*(() if rotation is None else (rotation.cos, rotation.sin)))
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


_apply_split_heads = direct_apply(SplitHeads)


def _split_heads(
    projection: torch.Tensor,
    sizes: Sequence[int],
    rotation: RopeTable | None,
    rotate: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return query, key, value (and gate) of a projection [s, b, m, d], see `split_heads`."""
    if rotation is None:
        return projection.split(tuple(sizes), dim=2)
    num_rotated = sizes[0] + sizes[1]
    query_key = rotate(
        projection[:, :, :num_rotated], rotation.cos, rotation.sin, rotation.interleaved
    )
    remaining = projection[:, :, num_rotated:].split(tuple(sizes[2:]), dim=2)
    return *query_key.split(tuple(sizes[:2]), dim=2), *remaining


# --- the table of angles

KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretch of rotary frequencies for contexts longer than in pretraining.

    Args:
        kind: "linear" (Chen et al., 2023), "llama3" (Llama 3.1), "yarn" (Peng et al., 2023).
        factor: ratio of the new context to the original one.
        low_freq_factor: llama3: wavelengths above original / low_freq_factor are fully stretched.
        high_freq_factor: llama3: wavelengths below original / high_freq_factor are unchanged.
        original_max_position: llama3, yarn: context in pretraining, in tokens.
        beta_fast: yarn: features with more rotations than this over that context are unchanged.
        beta_slow: yarn: features with fewer rotations than this are fully stretched.
        attention_factor: yarn: factor on cosine and sine; None is 0.1 ln(factor) + 1.
        truncate: yarn: round the bounds of the ramp to whole features (the lower bound down, the
            upper bound up).

    Raises:
        ValueError: lists every field that is out of range.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

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
        if (
            self.beta_slow > self.beta_fast
        ):  # equal betas make a step instead of a ramp, as in Kimi-K2
            problems.append(
                f"beta_slow={self.beta_slow} must not be above beta_fast={self.beta_fast}"
            )
        if problems:
            raise ValueError("RopeScaling: " + "; ".join(problems))

    @property
    def magnitude(self) -> float:
        """Factor on cosine and sine."""
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
        scaling: stretch of the frequencies, or None.
        device: of the result.

    Returns:
        fp32 [dim/2], radians per token.
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
    """Keep short wavelengths, stretch long ones, and interpolate linearly in 1/wavelength."""
    assert scaling.original_max_position is not None  # checked by RopeScaling
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _yarn(frequencies: torch.Tensor, dim: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    """Keep features with many rotations, stretch features with few, with a linear ramp between."""

    assert scaling.original_max_position is not None  # checked by RopeScaling
    length = scaling.original_max_position

    def index_of(turns: float) -> float:
        wavelength = length / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(base))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = high - low if high != low else 0.001  # avoids a division by zero: a step
    index = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    stretch = ((index - low) / ramp).clamp(0, 1)
    return frequencies / scaling.factor * stretch + frequencies * (1 - stretch)


def rotary_table(
    positions: torch.Tensor,
    *,
    dim: int,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tabulate cosine and sine of position times frequency (Su et al., 2021), once per step.

    Args:
        positions: int64 [s] or [s, b].
        dim: number of rotated features, even.
        base: the base (theta).
        scaling: stretch of the frequencies, or None.

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
    """Return the table of `rotary_table` for given frequencies, fp32 [dim/2]."""
    if positions.ndim not in (1, 2) or positions.is_floating_point():
        raise ValueError(
            f"rotary_table: positions {tuple(positions.shape)} {positions.dtype} must be integers"
            " of shape [s] or [s, b]"
        )
    angles = positions[..., None].float() * frequencies  # [s, (b,) dim/2]
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return angles.cos().mul_(magnitude), angles.sin().mul_(magnitude)

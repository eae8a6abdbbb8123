# SPDX-License-Identifier: Apache-2.0
"""Causal convolution of each channel by itself over packed tokens, with what came before them.

    pre[t] = bias + sum_k weight[..., W-1-k] · x[t-k],   k = 0 … W-1,   out = act(pre)

Tokens of another sequence are never read: before a sequence lie the W-1 rows of `initial`, or
zeros. `last` is what a next call needs as `initial` to go on: the last W-1 rows, carried ones
included where a sequence is shorter than that.

Plain torch on every device: on a GPU the kernels of `recurrence_prologue` and `recurrence_decode`
convolve in registers, and this is what they are compared with.
"""

from __future__ import annotations

import torch

from megatron.core.ops.causal_conv1d import reference
from megatron.core.ops.dispatch import apply_function
from megatron.core.ops.sequences import Sequences, require_sequences

__all__ = ["causal_conv1d", "causal_conv1d_step"]

ACTIVATIONS = (None, "silu")


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    sequences: Sequences,
    activation: str | None = None,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each sequence by itself; all in fp32 inside, fp64 stays fp64.

    Backward computes `pre` again: it saves x, the weights and `initial`.

    Args:
        x: [t, *c]; may be strided, such as a slice of the last dimension.
        weight: [*c, W]; the last column meets the token itself.
        bias: [*c] or None.
        sequences: where they begin and end.
        activation: "silu" or None.
        initial: [N, W-1, *c], the rows before each sequence, the last nearest to it; has a
            gradient. None is zeros.

    Returns:
        (out [t, *c], last [N, W-1, *c]), in x's dtype.

    Raises:
        ValueError: shapes that do not fit, or an unknown activation.
    """
    _check("causal_conv1d", x, weight, bias, activation=activation)
    require_sequences("causal_conv1d", sequences)
    sequences.check("causal_conv1d", x=x)
    wanted = (sequences.count, weight.shape[-1] - 1, *x.shape[1:])
    if initial is not None and tuple(initial.shape) != wanted:
        raise ValueError(
            f"causal_conv1d: initial {tuple(initial.shape)} must be {wanted}: the W-1 rows before "
            "each sequence"
        )
    return apply_function(
        reference.CausalConv1d, x, weight, bias, initial, sequences, activation == "silu"
    )


def causal_conv1d_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve one more token of each row, and let its slot go on by it, in place.

    Args:
        x: [b, *c].
        weight: [*c, W].
        bias: [*c] or None.
        state: [slots, W-1, *c], the rows before; written.
        slots: int64 [b], of each row, no slot twice; -1 is a padding row: its output is zero, and
            it touches no state.
        activation: "silu" or None.

    Returns:
        [b, *c] in x's dtype. Not differentiable.

    Raises:
        ValueError: shapes that do not fit, or an unknown activation.
    """
    _check("causal_conv1d_step", x, weight, bias, activation=activation)
    wanted = (weight.shape[-1] - 1, *x.shape[1:])
    if tuple(state.shape[1:]) != wanted:
        raise ValueError(
            f"causal_conv1d_step: state {tuple(state.shape)} must be [slots, *{wanted}]"
        )
    if slots.shape != x.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(
            f"causal_conv1d_step: slots {tuple(slots.shape)} {slots.dtype} must be int64, one for "
            f"each of {x.shape[0]} rows"
        )
    return reference.step(x, weight, bias, state=state, slots=slots, silu=activation == "silu")


def _check(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
) -> None:
    """Raise ValueError unless channels fit and the activation is known."""
    channels = tuple(x.shape[1:])
    if weight.ndim != x.ndim or tuple(weight.shape[:-1]) != channels or weight.shape[-1] < 1:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} must be [*c, W] for the channels {channels} of x "
            f"{tuple(x.shape)}"
        )
    if bias is not None and tuple(bias.shape) != channels:
        raise ValueError(f"{op}: bias {tuple(bias.shape)} must be {channels}, one for each channel")
    if not x.is_floating_point():
        raise ValueError(f"{op}: x has dtype {x.dtype}; give a floating-point tensor")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r} is unknown: use 'silu' or None")

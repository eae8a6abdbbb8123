# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution over packed tokens, with the rows before each sequence.

    pre[t] = bias + sum_k weight[..., W-1-k] · x[t-k],   k = 0 … W-1,   out = act(pre)

A sequence never reads the tokens of another: the W-1 rows before it are `initial`, or zeros. The
returned `final_rows` are `initial` of the next call: the last W-1 rows of each sequence, including
rows of `initial` if the sequence is shorter.

This is plain torch on every device. On a GPU the kernels of `recurrence_prologue` and
`recurrence_decode` convolve in registers, and tests compare them with this op.
"""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.recurrence.convolution.cpu import CausalConv1d
from megatron.core.ops.sequences import Sequences, require_sequences

__all__ = ["causal_conv1d"]

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
    """Convolve each sequence independently, in fp32, or in fp64 for fp64.

    Backward recomputes `pre`; saves x, the weights and `initial`.

    Args:
        x: [t, *c]; may be strided, such as a slice of the last dimension.
        weight: [*c, W]; the last column multiplies the token itself.
        bias: [*c] or None.
        sequences: the boundaries of the t tokens.
        activation: "silu" or None.
        initial: [N, W-1, *c], the rows before each sequence, in order; has a gradient. None is
            zeros.

    Returns:
        (out [t, *c], final_rows [N, W-1, *c]), in x's dtype.

    Raises:
        ValueError: incompatible shapes, or an unknown activation.
    """
    _check("causal_conv1d", x, weight, bias, activation=activation)
    require_sequences("causal_conv1d", sequences)
    sequences.check("causal_conv1d", x=x)
    expected = (sequences.count, weight.shape[-1] - 1, *x.shape[1:])
    if initial is not None and tuple(initial.shape) != expected:
        raise ValueError(
            f"causal_conv1d: initial {tuple(initial.shape)} must be {expected}: the W-1 rows "
            "before each sequence"
        )
    return apply_function(CausalConv1d, x, weight, bias, initial, sequences, activation == "silu")


def _check(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
) -> None:
    """Raise ValueError unless the channels match and the activation is known."""
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

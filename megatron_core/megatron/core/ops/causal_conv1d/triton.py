# SPDX-License-Identifier: Apache-2.0
"""Causal convolution in Triton: launch and autograd of the kernels.

One pass over memory each way, and one kernel for a step. Sums over tokens are partial sums of
programs, which are added up behind them, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from megatron.core.ops.causal_conv1d.gradient_kernels import convolution_backward_kernel
from megatron.core.ops.causal_conv1d.kernels import (
    convolution_forward_kernel,
    convolution_last_kernel,
    convolution_step_kernel,
)
from megatron.core.ops.launches import Launches
from megatron.core.ops.marks import Marks
from megatron.core.ops.row_steps import RowSteps
from megatron.core.ops.sequences import Sequences

FORWARD = Launches(
    "convolution_forward",
    {"BLOCK_T": 32, "BLOCK_C": 128, "num_warps": 4, "num_stages": 1},
    others=(
        {"BLOCK_T": 16, "BLOCK_C": 256, "num_warps": 4, "num_stages": 1},
        {"BLOCK_T": 64, "BLOCK_C": 128, "num_warps": 8, "num_stages": 1},
        {"BLOCK_T": 32, "BLOCK_C": 64, "num_warps": 4, "num_stages": 1},
    ),
)
BACKWARD = Launches(
    "convolution_backward",
    {"GROUP": 4, "AHEAD": 3, "BLOCK_C": 128, "num_warps": 1, "num_stages": 1},
    others=(
        {"GROUP": 4, "AHEAD": 1, "BLOCK_C": 128, "num_warps": 1, "num_stages": 1},
        {"GROUP": 8, "AHEAD": 1, "BLOCK_C": 128, "num_warps": 1, "num_stages": 1},
        {"GROUP": 4, "AHEAD": 2, "BLOCK_C": 128, "num_warps": 1, "num_stages": 1},
        {"GROUP": 2, "AHEAD": 3, "BLOCK_C": 256, "num_warps": 1, "num_stages": 1},
        {"GROUP": 4, "AHEAD": 1, "BLOCK_C": 256, "num_warps": 2, "num_stages": 1},
    ),
)
LAST = Launches("convolution_last", {"BLOCK_T": 8, "BLOCK_C": 256, "num_warps": 4, "num_stages": 1})
STEP = Launches("convolution_step", {"BLOCK_C": 256, "num_warps": 2, "num_stages": 1})

#: Programs of the backward pass, about: each writes W+1 partial sums of its channels, so more of
#: them are more traffic, and fewer leave some of a GPU without work at the end.
BACKWARD_PROGRAMS = 16384
#: Tokens of a program at least, where there are fewer.
BACKWARD_TOKENS = 64


class CausalConv1d(torch.autograd.Function):
    """Forward, dgrad and wgrad as in `reference.CausalConv1d`. Saves x, w, bias and the rows
    before; pre is computed again."""

    @staticmethod
    def forward(ctx, x, weight, bias, initial, sequences: Sequences, silu: bool):
        call = _Call.of(x, weight, bias, initial)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        near = (sequences.count, call.width - 1)
        last = torch.empty((*near, *x.shape[1:]), dtype=x.dtype, device=x.device)
        if out.numel():
            launch = FORWARD.pick(x, call.key)
            marks = Marks.of(sequences)
            tiles = triton.cdiv(call.tokens, launch["BLOCK_T"])
            convolution_forward_kernel[(tiles * call.parts(launch["BLOCK_C"]),)](
                call.x.base,
                *call.weights,
                call.taps if call.initial is None else call.initial,
                marks.after,
                marks.number,
                out,
                call.tokens,
                *call.sizes,
                **call.constants,
                SILU=silu,
                HAS_INITIAL=initial is not None,
                **launch,
            )
        if last.numel():
            _copy_last(call, sequences, last)
        ctx.save_for_backward(x, weight, bias, initial)
        ctx.sequences, ctx.silu = sequences, silu
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx, grad, grad_last):
        x, weight, bias, initial = ctx.saved_tensors
        call = _Call.of(x, weight, bias, initial)
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_initial = None
        if initial is not None and ctx.needs_input_grad[3]:
            # Of a sequence without tokens the rows before are the last ones; others are written.
            d_initial = (
                torch.zeros_like(initial, memory_format=torch.contiguous_format)
                if grad_last is None
                else grad_last.to(initial.dtype, memory_format=torch.contiguous_format, copy=True)
            )
        if grad is None:
            grad = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        if grad_last is not None:
            grad_last = grad_last.contiguous()
        sums = _differentiate(
            call, ctx.sequences, (grad.contiguous(), grad_last), (d_x, d_initial), silu=ctx.silu
        )  # [W+1, channels]
        d_weight = sums[:-1].t().to(weight.dtype).reshape(weight.shape)
        d_bias = None if bias is None else sums[-1].to(bias.dtype).view(bias.shape)
        return d_x, d_weight, d_bias, d_initial, None, None


def step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Convolve one token of each row [b, *c]; see `causal_conv1d_step`."""
    call = _Call.of(x, weight, bias, None)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = state.flatten(2) if state.ndim > 2 else state.unsqueeze(-1)  # [slots, W-1, channels]
    if call.width > 1 and (rows.data_ptr() != state.data_ptr() or rows.stride(-1) != 1):
        raise ValueError(
            f"causal_conv1d_step: state has strides {state.stride()}: the channels of a row must be"
            " dense, as it is written in place"
        )
    if out.numel():
        launch = STEP.pick(x, call.key)
        convolution_step_kernel[(len(x) * call.parts(launch["BLOCK_C"]),)](
            call.x.base,
            *call.weights,
            rows,
            slots.contiguous(),
            out,
            *call.sizes,
            rows.stride(0),
            rows.stride(1),
            **call.constants,
            SILU=silu,
            **launch,
        )
    return out


@dataclass(frozen=True)
class _Call:
    """What the launches of a call share; channels [*c] are units of dense ones."""

    x: RowSteps
    taps: torch.Tensor
    bias: torch.Tensor | None
    initial: torch.Tensor | None
    tokens: int
    units: int
    channels: int

    @staticmethod
    def of(x, weight, bias, initial) -> _Call:
        """Lay out x [t, *c], weight [*c, W], bias [*c] and initial [N, W-1, *c]."""
        tokens, width, channels = x.shape[0], weight.shape[-1], weight[..., 0].numel()
        dense = x.shape[-1] if x.ndim > 2 else channels
        grid = x.reshape(tokens, channels // max(dense, 1), dense)
        if grid.shape[2] > 1 and grid.stride(2) != 1:
            grid = grid.contiguous()
        if grid.shape[1] > 1 and grid.stride(1) == grid.shape[2]:
            grid = grid.flatten(1).unsqueeze(1)
        return _Call(
            x=RowSteps.of_grid(grid),
            taps=weight.reshape(weight[..., 0].numel(), width)
            .t()
            .contiguous(),  # [W, channels]: loaded wide
            bias=None if bias is None else bias.contiguous(),
            initial=None if initial is None else initial.contiguous(),
            tokens=tokens,
            units=grid.shape[1],
            channels=grid.shape[2],
        )

    @property
    def width(self) -> int:
        """W."""
        return self.taps.shape[0]

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps and biases, or taps in their place."""
        return self.taps, self.taps if self.bias is None else self.bias

    @property
    def sizes(self) -> tuple[int, ...]:
        """Units, channels, and where the rows of x are."""
        return self.units, self.channels, self.x.offset, self.x.outer, self.x.inner

    @property
    def constants(self) -> dict[str, object]:
        """Compile-time constants of all kernels that convolve."""
        return {"STEP": self.x.step, "WIDTH": self.width, "HAS_BIAS": self.bias is not None}

    @property
    def key(self) -> str:
        """For launches."""
        return f"w{self.width} {self.taps.dtype}".replace("torch.", "")

    def parts(self, block: int) -> int:
        """Return the blocks of channels of all units."""
        return self.units * triton.cdiv(self.channels, block)


def _copy_last(call: _Call, sequences: Sequences, last: torch.Tensor) -> None:
    """Write the last W-1 rows of each sequence."""
    near = call.width - 1
    launch = LAST.pick(last)
    tiles = triton.cdiv(sequences.count * near, launch["BLOCK_T"])
    convolution_last_kernel[(tiles * call.parts(launch["BLOCK_C"]),)](
        call.x.base,
        last if call.initial is None else call.initial,
        Marks.of(sequences).bounds,
        last,
        sequences.count,
        *call.sizes,
        STEP=call.x.step,
        NEAR=near,
        HAS_INITIAL=call.initial is not None,
        **launch,
    )


def _differentiate(
    call: _Call,
    sequences: Sequences,
    given: tuple[torch.Tensor, torch.Tensor | None],
    found: tuple[torch.Tensor, torch.Tensor | None],
    *,
    silu: bool,
) -> torch.Tensor:
    """Write the gradients of x and of the rows before sequences; return fp32 [W+1, channels].

    Args:
        call: the forward pass.
        sequences: of its tokens.
        given: gradients of the output and of the last rows, dense.
        found: gradients of x and of the rows before, dense; that of sequences without tokens stays.
        silu: the activation.

    Returns:
        The gradients of the taps, and of the bias behind them.
    """
    (grad, grad_last), (d_x, d_initial) = given, found
    width, channels = call.width, call.units * call.channels
    device = grad.device
    if not grad.numel():
        return torch.zeros((width + 1, channels), dtype=torch.float32, device=device)
    launch = BACKWARD.pick(grad, call.key)
    marks, parts = Marks.of(sequences), call.parts(launch["BLOCK_C"])
    tiles = min(triton.cdiv(BACKWARD_PROGRAMS, parts), triton.cdiv(call.tokens, BACKWARD_TOKENS))
    share = triton.cdiv(call.tokens, tiles)
    # Whole groups of rows, with the W-1 behind a program's own.
    group = launch["GROUP"]
    share = triton.cdiv(share + width - 1, group) * group - (width - 1)
    tiles = triton.cdiv(call.tokens, share)
    partial = torch.empty((tiles, width + 1, channels), dtype=torch.float32, device=device)
    has_last = grad_last is not None and grad_last.numel() > 0
    convolution_backward_kernel[(tiles * parts,)](
        call.x.base,
        *call.weights,
        call.taps if call.initial is None else call.initial,
        marks.after,
        marks.number,
        grad,
        grad_last if has_last else grad,
        d_x,
        d_x if d_initial is None else d_initial,
        partial,
        call.tokens,
        share,
        *call.sizes,
        **call.constants,
        SILU=silu,
        HAS_INITIAL=call.initial is not None,
        HAS_LAST=has_last,
        NEEDS_INITIAL=d_initial is not None and width > 1,
        **launch,
    )
    return partial.sum(0)

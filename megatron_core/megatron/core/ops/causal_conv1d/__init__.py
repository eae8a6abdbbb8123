# SPDX-License-Identifier: Apache-2.0
"""Causal convolution of each channel by itself over packed tokens, with what came before them.

    pre[t] = bias + sum_k weight[..., W-1-k] · x[t-k],   k = 0 … W-1,   out = act(pre)

Tokens of another sequence are never read: before a sequence lie the W-1 rows of `initial`, or
zeros. `last` is what a next call needs as `initial` to go on: the last W-1 rows, carried ones
included where a sequence is shorter than that.

Plain torch on every device: on a GPU the kernels of `recurrence_prologue` and `recurrence_decode`
convolve in registers, and this is what they are compared with. One plain convolution goes over all
tokens, as if they were one sequence, and then the few at borders are computed again. Tokens stay
rows: a CPU convolves the channels of rows in about the time of a copy.

Borders: where a convolution over packed tokens meets the beginning or the end of a sequence. The
W-1 first tokens of a sequence are its head, the last ones its tail; of a shorter sequence all are
both. What is not plain is put together from a small table of rows, by index: m head or tail rows,
and behind them what lies before each sequence, W-1 rows each. Row m by itself stands for zeros
where nothing lies there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
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
    return apply_function(CausalConv1d, x, weight, bias, initial, sequences, activation == "silu")


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
    return step(x, weight, bias, state=state, slots=slots, silu=activation == "silu")


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


# --- reference: plain torch


class Borders:
    """Index maps of one width, int64 on the device; columns of taps are in the order of weights.

    Args:
        sequences: of the packed tokens.
        width: W, at least 2.

    Attributes:
        count: m.
        head, tail: [m], the tokens.
        window: [m, W], what a head token sees: rows of [head; before].
        reach: [m, W], what sees a tail token: rows of [tail; zero].
        seen: [N · (W-1), W], what sees the rows before sequences: rows of [head; zero].
        last: [N · (W-1)], the last rows of each sequence: rows of [tail; before].
        tail_last: [m], which of `last` a tail token is.
        before_last: [N · (W-1)], which of `last` a row before is: rows of [last; zero].
    """

    def __init__(self, sequences: Sequences, width: int) -> None:
        near, lengths = width - 1, np.asarray(sequences.lengths, dtype=np.int64)
        starts = np.asarray(sequences.bounds[:-1], dtype=np.int64)
        counts = np.minimum(lengths, near)
        first = counts.cumsum() - counts  # of each sequence, among head rows as among tail rows
        self.count = m = int(counts.sum())
        number = np.repeat(np.arange(len(lengths)), counts)
        place = np.arange(m) - first[number]
        back = near - np.arange(width)  # of each tap, how many tokens it looks back
        moved = sequences.to_device
        self.head = moved(starts[number] + place)
        self.tail = moved((starts + lengths - counts)[number] + place)

        at = place[:, None] - back
        before = m + (number * near)[:, None] + near + at
        self.window = moved(np.where(at >= 0, first[number][:, None] + at, before))
        at = place[:, None] + back
        self.reach = moved(np.where(at < counts[number][:, None], first[number][:, None] + at, m))

        row = np.tile(np.arange(near), len(lengths))  # of the rows before each sequence
        number = np.repeat(np.arange(len(lengths)), near)
        at = row[:, None] - near + back
        inside = (at >= 0) & (at < counts[number][:, None])
        self.seen = moved(np.where(inside, first[number][:, None] + at, m))
        at = row - near + counts[number]
        carried = m + number * near + row + lengths[number]
        self.last = moved(np.where(at >= 0, first[number] + at, carried))
        left = row - lengths[number]
        self.before_last = moved(np.where(left >= 0, number * near + left, len(lengths) * near))
        number = np.repeat(np.arange(len(lengths)), counts)
        self.tail_last = moved(number * near + near - counts[number] + place)

    @staticmethod
    def of(sequences: Sequences, width: int) -> Borders:
        """Return those of a width, made once."""
        return sequences.cached(("borders", width), lambda: Borders(sequences, width))


#: Elements of a block of rows whose products are added up together: on a CPU few enough to stay in
#: its cache, elsewhere enough to keep it busy.
_CPU_BLOCK, _OTHER_BLOCK = 1 << 18, 1 << 22


class CausalConv1d(torch.autograd.Function):
    """pre[t] = bias + sum_k w[W-1-k] x[t-k], out = act(pre).

    Forward: as above. dgrad: dx[t] = sum_k w[W-1-k] dpre[t+k], dpre = dout act'(pre). wgrad:
    dw[W-1-k] = sum over t of dpre[t] x[t-k]; dbias = sum of dpre. Saves x, w, bias and the rows
    before; pre is computed again.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, initial, sequences: Sequences, silu: bool):
        conv = _Convolution.of(x, weight, bias, initial, sequences)
        out = conv.forward()
        if silu:
            F.silu(out, inplace=True)
        ctx.save_for_backward(x, weight, bias, initial)
        ctx.sequences, ctx.silu = sequences, silu
        ctx.set_materialize_grads(False)
        near = (sequences.count, weight.shape[-1] - 1)
        last = conv.last_rows(x, initial).view(*near, *x.shape[1:])
        return out.to(x.dtype).view(x.shape), last

    @staticmethod
    def backward(ctx, grad, grad_last):
        x, weight, bias, initial = ctx.saved_tensors
        needs = ctx.needs_input_grad
        conv = _Convolution.of(x, weight, bias, initial, ctx.sequences)
        grads: list[torch.Tensor | None] = [None] * 4
        if grad is None:
            grad = torch.zeros_like(x)
        d_pre = grad.reshape(conv.rows.shape).to(conv.rows.dtype)
        if ctx.silu:
            d_pre = torch.ops.aten.silu_backward(d_pre, conv.forward())
        if grad_last is not None:
            grad_last = grad_last.reshape(-1, conv.rows.shape[1]).to(conv.rows.dtype)
        if needs[0]:
            grads[0] = conv.input_gradient(d_pre, grad_last).to(x.dtype).view(x.shape)
        if initial is not None and needs[3]:
            d_initial = conv.initial_gradient(d_pre, grad_last)
            grads[3] = d_initial.to(initial.dtype).view(initial.shape)
        if bias is not None and needs[2]:
            grads[2] = d_pre.sum(0).to(bias.dtype).view(bias.shape)
        if needs[1]:
            d_weight = conv.weight_gradient(d_pre, own=ctx.silu)  # [W, c], writes to d_pre
            grads[1] = d_weight.t().to(weight.dtype).reshape(weight.shape)
        return *grads, None, None


@dataclass(frozen=True)
class _Convolution:
    """One call, wide and flat: x [t, c], taps [W, c], bias [c], rows before [N · (W-1), c]."""

    rows: torch.Tensor
    taps: torch.Tensor
    bias: torch.Tensor | None
    before: torch.Tensor | None
    sequences: Sequences

    @staticmethod
    def of(x, weight, bias, initial, sequences: Sequences) -> _Convolution:
        wide, channels = accumulation_dtype(x.dtype), weight[..., 0].numel()
        taps = weight.reshape(channels, -1).t().to(wide).contiguous()
        rows = x.reshape(x.shape[0], channels).to(wide)
        flat = None if bias is None else bias.reshape(channels).to(wide)
        before = None if initial is None else initial.reshape(-1, channels).to(wide)
        return _Convolution(rows, taps, flat, before, sequences)

    @property
    def _borders(self) -> Borders | None:
        """The borders, if there are any that a plain convolution is wrong at."""
        if self.taps.shape[0] == 1 or (self.sequences.count == 1 and self.before is None):
            return None
        return Borders.of(self.sequences, self.taps.shape[0])

    def forward(self) -> torch.Tensor:
        """Return pre [t, c]."""
        out = _convolved(self.rows, self.taps, self.bias)
        if (borders := self._borders) is not None:
            heads = _combined(self._heads(borders), self._window(borders), self.taps)
            if self.bias is not None:
                heads.add_(self.bias)
            out.index_copy_(0, borders.head, heads)
        return out

    def last_rows(self, x: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
        """Return the last W-1 rows [N · (W-1), *c] of each sequence, as they are."""
        if self.taps.shape[0] == 1:
            return x[:0]
        borders = Borders.of(self.sequences, self.taps.shape[0])
        before = None if initial is None else initial.flatten(0, 1).to(x.dtype)
        table = _with_rows(x.index_select(0, borders.tail), before)
        index = borders.last if before is not None else borders.last.clamp(max=borders.count)
        return table.index_select(0, index)

    def input_gradient(self, d_pre: torch.Tensor, d_last: torch.Tensor | None) -> torch.Tensor:
        """Return dx [t, c]."""
        found = _convolved(d_pre, self.taps, ahead=True)
        width = self.taps.shape[0]
        if width == 1 or (self._borders is None and d_last is None):
            return found
        borders = Borders.of(self.sequences, width)
        table = _with_rows(d_pre.index_select(0, borders.tail), None)
        tails = _combined(table, borders.reach, self.taps)
        if d_last is not None:
            tails.add_(d_last.index_select(0, borders.tail_last))
        return found.index_copy_(0, borders.tail, tails)

    def initial_gradient(self, d_pre: torch.Tensor, d_last: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the rows before, [N · (W-1), c]."""
        borders = self._borders
        if borders is None:  # a width of 1: there are none
            return d_pre[:0]
        table = _with_rows(d_pre.index_select(0, borders.head), None)
        found = _combined(table, borders.seen, self.taps)
        if d_last is not None:
            found.add_(_with_rows(d_last, None).index_select(0, borders.before_last))
        return found

    def weight_gradient(self, d_pre: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Return the gradient of taps [W, c]; writes to d_pre if it is our own."""
        borders = self._borders
        if borders is None:
            return _products(d_pre, self.rows, self.taps.shape[0])
        heads, table = d_pre.index_select(0, borders.head), self._heads(borders)
        d_pre = (d_pre if own else d_pre.clone()).index_fill_(0, borders.head, 0)
        found = _products(d_pre, self.rows, self.taps.shape[0])
        for tap, index in zip(found, self._window(borders).unbind(1), strict=True):
            tap.add_(table.index_select(0, index).mul_(heads).sum(0))
        return found

    def _heads(self, borders: Borders) -> torch.Tensor:
        """Return [head; before], or [head; zero]."""
        return _with_rows(self.rows.index_select(0, borders.head), self.before)

    def _window(self, borders: Borders) -> torch.Tensor:
        """Return which row of `_heads` each tap of a head token meets."""
        index = borders.window
        return index if self.before is not None else index.clamp(max=borders.count)


def step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Convolve one token of each row [b, *c]; see `causal_conv1d_step`.

    Padding rows do again what the first real row does, so that what is written twice is the same.
    """
    if len(slots) == 0:
        return torch.empty_like(x)
    live = slots >= 0
    donor = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    rows = slots.index_select(0, donor).clamp(min=0)
    old = state.index_select(0, rows)  # [b, W-1, *c]
    window = torch.cat([old, x.index_select(0, donor).to(state.dtype)[:, None]], 1)
    kept = torch.where(live.any(), window[:, 1:], old)
    state.index_copy_(0, rows, kept)
    wide = accumulation_dtype(x.dtype)
    seen = torch.cat([old.to(wide), x.to(wide)[:, None]], 1)  # [b, W, *c]
    out = (seen * weight.movedim(-1, 0).to(wide)).sum(1)
    if bias is not None:
        out = out + bias.to(wide)
    out = F.silu(out) if silu else out
    shown = live.view(-1, *[1] * (x.ndim - 1))
    return torch.where(shown, out, 0).to(x.dtype)


def _convolved(
    rows: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ahead: bool = False,
) -> torch.Tensor:
    """Return bias + sum_k taps[W-1-k] rows[t-k], of one sequence [t, c]; `ahead`: of rows[t+k]."""
    width, (tokens, channels) = taps.shape[0], rows.shape
    if _has_fast_convolution(rows) and 1 < width <= tokens:
        weight = taps.flip(0) if ahead else taps
        image = rows.view(1, 1, tokens, channels).permute(0, 3, 1, 2)  # channels last in memory
        kernel = weight.t().contiguous().view(channels, 1, 1, width)
        found = F.conv2d(image, kernel, bias, padding=(0, width - 1), groups=channels)
        found = found.permute(0, 2, 3, 1).reshape(-1, channels)  # [t + W-1, c]
        return found[width - 1 :] if ahead else found[:tokens]
    found = rows * taps[-1] if bias is None else torch.addcmul(bias, rows, taps[-1])
    for k in range(1, min(width, tokens)):
        if ahead:
            found[:-k].addcmul_(rows[k:], taps[-1 - k])
        else:
            found[k:].addcmul_(rows[:-k], taps[-1 - k])
    return found


def _has_fast_convolution(rows: torch.Tensor) -> bool:
    """Return whether oneDNN convolves these."""
    on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled


def _combined(table: torch.Tensor, index: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Return sum_j taps[j] table[index[:, j]], [m, c]."""
    found = torch.zeros_like(table[:1]).expand(index.shape[0], -1).clone()
    for column, tap in zip(index.unbind(1), taps, strict=True):
        found.addcmul_(table.index_select(0, column), tap)
    return found


def _products(d_pre: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return [W, c], of each tap the sum over t of d_pre[t] rows[t-k], as of one sequence.

    Blocks of rows are multiplied while they are in the cache, and added up row by row: sums are
    as short as they are many.
    """
    tokens, channels = rows.shape
    block = _CPU_BLOCK if rows.device.type == "cpu" else _OTHER_BLOCK
    size = max(1, min(tokens, block // max(channels, 1)))
    sums = rows.new_zeros(width, size, channels)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        for k in range(width):
            first = max(start, k)
            if first < stop:
                part = sums[width - 1 - k, first - start : stop - start]
                part.addcmul_(d_pre[first:stop], rows[first - k : stop - k])
    return sums.sum(1)


def _with_rows(table: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return a table with the rows before sequences behind it, or one of zeros."""
    return torch.cat([table, table.new_zeros(1, *table.shape[1:]) if before is None else before])

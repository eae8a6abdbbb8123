# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution in plain torch, token-major: a CPU takes about the time of a copy.

One convolution runs over all tokens as if they were one sequence, and then the few tokens at
boundaries are recomputed.

`ConvBoundaries` are the index maps for the tokens at the boundaries of sequences. The first W-1
tokens of a sequence are its head, the last W-1 its tail; all tokens of a shorter sequence are in
both. The maps index a small table of rows: m head or tail rows, then the W-1 initial rows of each
sequence. Without initial rows row m is a row of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.sequences import Sequences


class ConvBoundaries:
    """Index maps of one width, int64 on the device; tap columns have the order of the weight.

    Args:
        sequences: the boundaries of the packed tokens.
        width: W, at least 2.

    Attributes:
        count: m.
        head, tail: [m], the head and the tail tokens.
        window: [m, W], inputs of the output at a head token: rows of [head; initial].
        tail_readers: [m, W], outputs that read a tail token: rows of [tail; zero].
        initial_readers: [N · (W-1), W], outputs that read an initial row: rows of [head; zero].
        final_rows: [N · (W-1)], the last rows of each sequence: rows of [tail; initial].
        tail_in_final: [m], position of a tail token in `final_rows`.
        initial_in_final: [N · (W-1)], position of an initial row in [final_rows; zero].
    """

    def __init__(self, sequences: Sequences, width: int) -> None:
        history, lengths = width - 1, np.asarray(sequences.lengths, dtype=np.int64)
        starts = np.asarray(sequences.bounds[:-1], dtype=np.int64)
        counts = np.minimum(lengths, history)
        offsets = counts.cumsum() - counts  # first head row, and first tail row, of each sequence
        self.count = num_rows = int(counts.sum())
        seq = np.repeat(np.arange(len(lengths)), counts)
        positions = np.arange(num_rows) - offsets[seq]
        lags = history - np.arange(width)  # lag of each tap in tokens
        to_device = sequences.to_device
        self.head = to_device(starts[seq] + positions)
        self.tail = to_device((starts + lengths - counts)[seq] + positions)

        index = positions[:, None] - lags
        initial_rows = num_rows + (seq * history)[:, None] + history + index
        self.window = to_device(np.where(index >= 0, offsets[seq][:, None] + index, initial_rows))
        index = positions[:, None] + lags
        self.tail_readers = to_device(
            np.where(index < counts[seq][:, None], offsets[seq][:, None] + index, num_rows)
        )

        initial_row = np.tile(np.arange(history), len(lengths))  # per sequence
        seq = np.repeat(np.arange(len(lengths)), history)
        index = initial_row[:, None] - history + lags
        in_sequence = (index >= 0) & (index < counts[seq][:, None])
        self.initial_readers = to_device(
            np.where(in_sequence, offsets[seq][:, None] + index, num_rows)
        )
        index = initial_row - history + counts[seq]
        from_initial = num_rows + seq * history + initial_row + lengths[seq]
        self.final_rows = to_device(np.where(index >= 0, offsets[seq] + index, from_initial))
        shift = initial_row - lengths[seq]
        self.initial_in_final = to_device(
            np.where(shift >= 0, seq * history + shift, len(lengths) * history)
        )
        seq = np.repeat(np.arange(len(lengths)), counts)
        self.tail_in_final = to_device(seq * history + history - counts[seq] + positions)

    @staticmethod
    def of(sequences: Sequences, width: int) -> ConvBoundaries:
        """Return the boundaries for a width, built once."""
        return sequences.cached(
            ("conv_boundaries", width), lambda: ConvBoundaries(sequences, width)
        )


#: Elements of a block of rows whose products are summed: few enough for the cache of a CPU, enough
#: to keep another device busy.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 22


class CausalConv1d(torch.autograd.Function):
    """pre[t] = bias + sum_k w[W-1-k] x[t-k], out = act(pre).

    Forward: as above. dgrad: dx[t] = sum_k w[W-1-k] dpre[t+k], dpre = dout act'(pre). wgrad:
    dw[W-1-k] = sum over t of dpre[t] x[t-k]; dbias = sum of dpre. Saves x, w, bias and the initial
    rows; pre is recomputed.
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
        shape_prefix = (sequences.count, weight.shape[-1] - 1)
        final_rows = conv.final_rows(x, initial).view(*shape_prefix, *x.shape[1:])
        return out.to(x.dtype).view(x.shape), final_rows

    @staticmethod
    def backward(ctx, d_out, d_final):
        x, weight, bias, initial = ctx.saved_tensors
        needs = ctx.needs_input_grad
        conv = _Convolution.of(x, weight, bias, initial, ctx.sequences)
        grads: list[torch.Tensor | None] = [None] * 4
        if d_out is None:
            d_out = torch.zeros_like(x)
        d_pre = d_out.reshape(conv.rows.shape).to(conv.rows.dtype)
        if ctx.silu:
            d_pre = torch.ops.aten.silu_backward(d_pre, conv.forward())
        if d_final is not None:
            d_final = d_final.reshape(-1, conv.rows.shape[1]).to(conv.rows.dtype)
        if needs[0]:
            grads[0] = conv.input_gradient(d_pre, d_final).to(x.dtype).view(x.shape)
        if initial is not None and needs[3]:
            d_initial = conv.initial_gradient(d_pre, d_final)
            grads[3] = d_initial.to(initial.dtype).view(initial.shape)
        if bias is not None and needs[2]:
            grads[2] = d_pre.sum(0).to(bias.dtype).view(bias.shape)
        if needs[1]:
            d_weight = conv.weight_gradient(d_pre, overwrite=ctx.silu)  # [W, c], writes to d_pre
            grads[1] = d_weight.t().to(weight.dtype).reshape(weight.shape)
        return *grads, None, None


@dataclass(frozen=True)
class _Convolution:
    """Flat arguments in the accumulation dtype: x [t, c], taps [W, c], bias [c], initial rows
    `before` [N · (W-1), c]."""

    rows: torch.Tensor
    taps: torch.Tensor
    bias: torch.Tensor | None
    before: torch.Tensor | None
    sequences: Sequences

    @staticmethod
    def of(x, weight, bias, initial, sequences: Sequences) -> _Convolution:
        dtype, channels = accumulation_dtype(x.dtype), weight[..., 0].numel()
        taps = weight.reshape(channels, -1).t().to(dtype).contiguous()
        rows = x.reshape(x.shape[0], channels).to(dtype)
        flat_bias = None if bias is None else bias.reshape(channels).to(dtype)
        before = None if initial is None else initial.reshape(-1, channels).to(dtype)
        return _Convolution(rows, taps, flat_bias, before, sequences)

    @property
    def _boundaries(self) -> ConvBoundaries | None:
        """The boundaries; None if the convolution over all tokens is right everywhere."""
        if self.taps.shape[0] == 1 or (self.sequences.count == 1 and self.before is None):
            return None
        return ConvBoundaries.of(self.sequences, self.taps.shape[0])

    def forward(self) -> torch.Tensor:
        """Return pre [t, c]."""
        out = _convolved(self.rows, self.taps, self.bias)
        if (boundaries := self._boundaries) is not None:
            heads = _gather_products(self._heads(boundaries), self._window(boundaries), self.taps)
            if self.bias is not None:
                heads.add_(self.bias)
            out.index_copy_(0, boundaries.head, heads)
        return out

    def final_rows(self, x: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
        """Return the last W-1 rows [N · (W-1), *c] of each sequence, in x's dtype."""
        if self.taps.shape[0] == 1:
            return x[:0]
        boundaries = ConvBoundaries.of(self.sequences, self.taps.shape[0])
        initial_rows = None if initial is None else initial.flatten(0, 1).to(x.dtype)
        table = _with_rows(x.index_select(0, boundaries.tail), initial_rows)
        index = (
            boundaries.final_rows
            if initial_rows is not None
            else boundaries.final_rows.clamp(max=boundaries.count)
        )
        return table.index_select(0, index)

    def input_gradient(self, d_pre: torch.Tensor, d_final: torch.Tensor | None) -> torch.Tensor:
        """Return dx [t, c]."""
        d_x = _convolved(d_pre, self.taps, reverse=True)
        width = self.taps.shape[0]
        if width == 1 or (self._boundaries is None and d_final is None):
            return d_x
        boundaries = ConvBoundaries.of(self.sequences, width)
        table = _with_rows(d_pre.index_select(0, boundaries.tail), None)
        tails = _gather_products(table, boundaries.tail_readers, self.taps)
        if d_final is not None:
            tails.add_(d_final.index_select(0, boundaries.tail_in_final))
        return d_x.index_copy_(0, boundaries.tail, tails)

    def initial_gradient(self, d_pre: torch.Tensor, d_final: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the initial rows [N · (W-1), c]."""
        boundaries = self._boundaries
        if boundaries is None:  # width 1 has no initial rows
            return d_pre[:0]
        table = _with_rows(d_pre.index_select(0, boundaries.head), None)
        d_before = _gather_products(table, boundaries.initial_readers, self.taps)
        if d_final is not None:
            d_before.add_(_with_rows(d_final, None).index_select(0, boundaries.initial_in_final))
        return d_before

    def weight_gradient(self, d_pre: torch.Tensor, *, overwrite: bool) -> torch.Tensor:
        """Return the gradient of taps [W, c]; overwrites d_pre if `overwrite`."""
        boundaries = self._boundaries
        if boundaries is None:
            return _weight_products(d_pre, self.rows, self.taps.shape[0])
        heads, table = d_pre.index_select(0, boundaries.head), self._heads(boundaries)
        d_pre = (d_pre if overwrite else d_pre.clone()).index_fill_(0, boundaries.head, 0)
        d_taps = _weight_products(d_pre, self.rows, self.taps.shape[0])
        for tap, index in zip(d_taps, self._window(boundaries).unbind(1), strict=True):
            tap.add_(table.index_select(0, index).mul_(heads).sum(0))
        return d_taps

    def _heads(self, boundaries: ConvBoundaries) -> torch.Tensor:
        """Return [head; initial], or [head; zero]."""
        return _with_rows(self.rows.index_select(0, boundaries.head), self.before)

    def _window(self, boundaries: ConvBoundaries) -> torch.Tensor:
        """Return the row of `_heads` that each tap of a head token multiplies."""
        index = boundaries.window
        return index if self.before is not None else index.clamp(max=boundaries.count)


def _convolved(
    rows: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reverse: bool = False,
) -> torch.Tensor:
    """Return bias + sum_k taps[W-1-k] rows[t-k] of one sequence [t, c]; rows[t+k] if `reverse`."""
    width, (tokens, channels) = taps.shape[0], rows.shape
    if _has_fast_convolution(rows) and 1 < width <= tokens:
        weight = taps.flip(0) if reverse else taps
        image = rows.view(1, 1, tokens, channels).permute(0, 3, 1, 2)  # channels last in memory
        kernel = weight.t().contiguous().view(channels, 1, 1, width)
        out = F.conv2d(image, kernel, bias, padding=(0, width - 1), groups=channels)
        out = out.permute(0, 2, 3, 1).reshape(-1, channels)  # [t + W-1, c]
        return out[width - 1 :] if reverse else out[:tokens]
    out = rows * taps[-1] if bias is None else torch.addcmul(bias, rows, taps[-1])
    for k in range(1, min(width, tokens)):
        if reverse:
            out[:-k].addcmul_(rows[k:], taps[-1 - k])
        else:
            out[k:].addcmul_(rows[:-k], taps[-1 - k])
    return out


def _has_fast_convolution(rows: torch.Tensor) -> bool:
    """Return whether oneDNN can convolve `rows`."""
    on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _gather_products(table: torch.Tensor, index: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Return sum_j taps[j] table[index[:, j]], [m, c]."""
    out = torch.zeros_like(table[:1]).expand(index.shape[0], -1).clone()
    for column, tap in zip(index.unbind(1), taps, strict=True):
        out.addcmul_(table.index_select(0, column), tap)
    return out


def _weight_products(d_pre: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return the gradient of taps [W, c]: the sum over t of d_pre[t] rows[t-k], of one sequence.

    Products of a block of rows are added to one partial sum per row, while the block is in the
    cache. The short sums keep the rounding error small.
    """
    tokens, channels = rows.shape
    max_elements = _CPU_BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
    size = max(1, min(tokens, max_elements // max(channels, 1)))
    partial_sums = rows.new_zeros(width, size, channels)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        for k in range(width):
            start_row = max(start, k)
            if start_row < stop:
                block_sums = partial_sums[width - 1 - k, start_row - start : stop - start]
                block_sums.addcmul_(d_pre[start_row:stop], rows[start_row - k : stop - k])
    return partial_sums.sum(1)


def _with_rows(table: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return a table followed by the initial rows of sequences, or by one row of zeros."""
    return torch.cat([table, table.new_zeros(1, *table.shape[1:]) if before is None else before])

# SPDX-License-Identifier: Apache-2.0
"""ShortConv: the gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404).

    [B | C | x] = input(hidden);  y[t] = bias + sum_k w[W-1-k] (B x)[t-k],  k = 0 … W-1
    out = output(C y)

Channels are independent of each other, so tensor parallelism shards them. The state of a sequence
is its last W-1 products B x. With context parallelism each rank receives the W-1 products before
its sub-sequences: one all-to-all forward and one backward, in every mode of the other recurrent
mixers.
"""

from __future__ import annotations

import torch

from megatron.core.backend import LayerBuild
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.all_to_all import RecurrenceOutput
from megatron.core.ops.recurrence import causal_conv1d, causal_conv1d_decode
from megatron.core.ops.recurrence.interface import ProjectionSlice, slice_of
from megatron.core.ops.sequences import Sequences
from megatron.core.ssm.mixer import RecurrentCache, RecurrentMixer, load_state, store_state
from megatron.core.ssm.mixer_config import ShortConvConfig
from megatron.core.ssm.state_passing import halo_rows


class ShortConv(RecurrentMixer):
    """The gated short convolution of one block; channels are sharded over tp.

    A rank has one unit: the columns B and x of its c = h/tp channels, with C as the gate.

    Args:
        name: prefix of its weights.
        config: its shape.
        build: the backend, weight store and process groups.

    Raises:
        ValueError: channels that do not divide over the ranks.
    """

    def __init__(self, name: str, *, config: ShortConvConfig, build: LayerBuild) -> None:
        size, tp = build.hidden_size, build.region.group.size
        problems = config.problems(tp, hidden_size=size)
        if problems:
            raise ValueError("; ".join(problems))
        super().__init__(name, units=1, gate_channels=size // tp, build=build)
        self.config = config
        projections = [(f"{name}.{projection}", size, None) for projection in ("B", "x", "C")]
        self.input = build.column_linear(f"{name}.input", projections, bias=config.bias)
        depthwise = {"units": 1, "width": config.conv_width}
        self.conv = self.declare_convolution("weight", {"x": (size, None)}, **depthwise)
        if config.bias:
            self.conv_bias = self.declare_convolution("bias", {"x": (size, None)}, **depthwise)
        self.output = build.row_linear(f"{name}.output", size, bias=config.bias)

    def run_recurrence(
        self, columns: torch.Tensor | ProjectionSlice, layout: SequenceLayout
    ) -> RecurrenceOutput:
        """Return y from [s, b, 1, 2 c], see `RecurrentMixer.run_recurrence`."""
        products = _product(slice_of(columns).value)
        local = layout.local_sequences(products.shape[1])
        rows, packing = products.flatten(0, 1), local.indices  # [s · b, 1, c]
        halo = halo_rows(
            rows, local, self.context.group, width=self.config.conv_width - 1, packing=packing
        )
        packed = rows if packing is None else packing.pack(rows)  # [t, 1, c]
        out, _ = causal_conv1d(
            packed, *self._convolution(), sequences=local.sequences, initial=halo
        )
        return RecurrenceOutput(out, packing)

    def norm_and_gate(
        self, out: RecurrenceOutput, gate: torch.Tensor | ProjectionSlice
    ) -> torch.Tensor:
        """Return C y [s, b, c], see `RecurrentMixer.norm_and_gate`."""
        gate = slice_of(gate).value
        return (out.joined().view(gate.shape) * gate).flatten(2)

    def prefill(
        self,
        units: torch.Tensor,
        sequences: Sequences,
        slots: torch.Tensor,
        cache: RecurrentCache,
    ) -> torch.Tensor:
        """Return y [t, 1, c], see `RecurrentMixer.prefill`."""
        state = self._state(cache, units)
        out, final_rows = causal_conv1d(
            _product(units),
            *self._convolution(),
            sequences=sequences,
            initial=load_state(state, slots),
        )
        store_state(state, slots, final_rows)
        return out

    def decode_tokens(
        self, units: torch.Tensor, gate: torch.Tensor, slots: torch.Tensor, cache: RecurrentCache
    ) -> torch.Tensor:
        """Return C y [b, c], see `RecurrentMixer.decode_tokens`."""
        out = causal_conv1d_decode(
            _product(units), *self._convolution(), state=self._state(cache, units), slots=slots
        )
        absent = (slots < 0)[:, None, None]
        return (out * gate.masked_fill(absent, 0)).flatten(1)  # padding rows may be NaN

    def state_shapes(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of the products before the next token."""
        return {
            f"{self.name}.conv": ((self.config.conv_width - 1, 1, self.gate_channels), dtype),
        }

    def _state(self, cache: RecurrentCache, units: torch.Tensor) -> torch.Tensor:
        """Return the buffer of the states."""
        ((name, (shape, dtype)),) = self.state_shapes(units.dtype).items()
        return cache.buffer(name, shape, dtype=dtype, device=units.device)

    def _convolution(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight [1, c, W] and bias [1, c] of the convolution."""
        weight = self.conv.read_only().view(1, -1, self.config.conv_width)
        return weight, None if self.conv_bias is None else self.conv_bias.read_only().view(1, -1)


def _product(columns: torch.Tensor) -> torch.Tensor:
    """Return B x [..., c] of the columns B and x [..., 2 c]."""
    gate, x = columns.chunk(2, dim=-1)
    return gate * x

# SPDX-License-Identifier: Apache-2.0
"""Decoding through a recurrent layer against whole sequences, and errors of wrong arguments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.core.ops.recurrence import (
    GATE_FIRST,
    DecodeMemory,
    OutputNorm,
    PrologueWeights,
    UnitLayout,
    add_skip,
    gated_delta_rule,
    gated_rms_norm,
    recurrence_decode,
    recurrence_prologue,
    state_space_dual,
)
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import maker

UNITS, SLOTS, LENGTH = 2, 6, 5
#: The state slots of three sequences, and the sequences in each batch; None is a padding row.
SEQUENCE_SLOTS = (4, 0, 2)
BATCHES = ((0, None, 1, 2), (2, 0, 1), (1, None, 0, None), (2, 1), (0, 2), (None,), (1, 0, None))
LAYOUTS = {
    "delta": UnitLayout.delta(3, 4, 5),
    "space": UnitLayout.state_space(3, 4, 5, (0.01, 0.9)),
}
KINDS = pytest.mark.parametrize("kind", LAYOUTS)


def weights_of(layout: UnitLayout, make, *, width: int = 4) -> PrologueWeights:
    heads = UNITS * layout.heads
    rates = make(heads) / 2 - 1
    return PrologueWeights(
        make(UNITS, layout.conv_channels, width),
        make(UNITS, layout.conv_channels),
        rates,
        make(heads),
    )


def memory_of(layout: UnitLayout, slots: list[int], *, width: int = 4) -> DecodeMemory:
    """Return zero states for new sequences and NaN in the unused slot."""
    heads = UNITS * layout.heads
    fp64 = {"dtype": torch.float64}
    conv = torch.zeros(SLOTS, width - 1, UNITS, layout.conv_channels, **fp64)
    state = torch.zeros(SLOTS, heads, layout.key_channels, layout.value_channels, **fp64)
    conv[-1], state[-1] = math.nan, math.nan
    return DecodeMemory(conv, state, torch.tensor(slots))


@KINDS
@pytest.mark.parametrize("width", [1, 4])
def test_decode_matches_whole_sequences(kind: str, width: int) -> None:
    layout, make = LAYOUTS[kind], maker()
    heads, values = UNITS * layout.heads, layout.heads * layout.value_channels
    weights, scales, skip = weights_of(layout, make, width=width), make(heads * 5), make(heads)
    sources = make(3, LENGTH, UNITS, layout.width + values)  # of three sequences
    expected = []
    for source in sources:
        features, gate = source.split([layout.width, values], dim=-1)
        sequences = Sequences([0, LENGTH])
        inputs, _ = recurrence_prologue(features, weights, unit=layout, sequences=sequences)
        rule = gated_delta_rule if kind == "delta" else state_space_dual
        out = add_skip(rule(*inputs, sequences=sequences)[0], inputs.value, skip)
        gate = gate.reshape(LENGTH, -1)
        options = {"eps": 1e-5, "order": GATE_FIRST, "group_size": values}
        expected.append(gated_rms_norm(out.flatten(1), gate, scales, **options))
    memory, num_decoded = memory_of(layout, [], width=width), [0, 0, 0]
    padding = torch.full_like(sources[0, 0], math.nan)
    for rows in BATCHES:
        slots = torch.tensor([-1 if row is None else SEQUENCE_SLOTS[row] for row in rows])
        tokens = [padding if row is None else sources[row, num_decoded[row]] for row in rows]
        features, gate = torch.stack(tokens).split([layout.width, values], dim=-1)
        with nan_memory():
            y = recurrence_decode(
                features,
                weights,
                unit=layout,
                memory=replace(memory, slots=slots),
                skip=skip,
                norm=OutputNorm(gate, scales, 1e-5, GATE_FIRST, values),
            )
        for row, actual in zip(rows, y.flatten(1), strict=True):
            if row is None:
                assert not actual.any()
            else:
                assert relative_error(actual, expected[row][num_decoded[row]]) < 1e-12
                num_decoded[row] += 1
    assert num_decoded == [LENGTH, LENGTH, LENGTH - 1]
    for states in (memory.conv, memory.state):
        assert states[-1].isnan().all()
        assert not states[[1, 3]].any()


@KINDS
def test_head_norms_share_one_weight_and_norm_is_optional(
    kind: str,
) -> None:
    layout, make = LAYOUTS[kind], maker()
    weights, values = weights_of(layout, make), layout.heads * layout.value_channels
    source, gate, scale = make(2, UNITS, layout.width), make(2, UNITS, values), make(5)
    call = {"unit": layout}
    out = recurrence_decode(source, weights, memory=memory_of(layout, [1, 0]), **call)
    norm = OutputNorm(gate, scale, 1e-6)
    y = recurrence_decode(source, weights, memory=memory_of(layout, [1, 0]), norm=norm, **call)
    expected = gated_rms_norm(out, gate.view(out.shape), scale, eps=1e-6)
    assert relative_error(y, expected) < 1e-12


def test_wrong_arguments_are_refused_in_one_line() -> None:
    layout, make = LAYOUTS["delta"], maker()
    weights, memory = weights_of(layout, make), memory_of(layout, [1, 0])
    source = make(2, UNITS, layout.width)
    norm = OutputNorm(make(2, UNITS, 15), make(5), 1e-5)

    def refused(message: str, *, source=source, weights=weights, memory=memory, **options) -> None:
        with pytest.raises(ValueError, match=message) as error:
            recurrence_decode(source, weights, unit=layout, memory=memory, **options)
        assert "\n" not in str(error.value)

    refused(r"source \(2, 2, 28\)", source=source[..., 1:])
    refused(
        r"weight \(2, 22, 4\) must be \(2, 23, taps\)",
        weights=weights._replace(weight=weights.weight[:, 1:]),
    )
    refused(r"bias \(1, 23\)", weights=weights._replace(bias=weights.bias[1:]))
    refused(
        r"dt_bias \(5,\) must be \(6,\)",
        weights=weights._replace(dt_bias=weights.dt_bias[1:]),
    )
    refused(r"skip \(5,\) must be \(6,\)", skip=make(5))
    refused("state .* must be contiguous", memory=replace(memory, state=memory.state.mT))
    refused(r"conv \(6, 2, 2, 23\)", memory=replace(memory, conv=memory.conv[:, 1:]))
    counts = torch.zeros(SLOTS, UNITS)
    refused("arrival_counts is torch.float32", memory=replace(memory, arrival_counts=counts))
    refused("slots .* must be int64", memory=replace(memory, slots=memory.slots.int()))
    refused(r"gate \(2, 2, 14\)", norm=replace(norm, gate=norm.gate[..., 1:]))
    refused(
        r"weight \(4,\) must be one of \[\(5,\), \(30,\)\]",
        norm=replace(norm, weight=norm.weight[1:]),
    )
    refused("group_size 2 must divide", norm=replace(norm, group_size=2))
    refused("eps=-1", norm=replace(norm, eps=-1.0))
    refused("order='last'", norm=replace(norm, order="last"))
    refused("has no float64", implementation="triton")

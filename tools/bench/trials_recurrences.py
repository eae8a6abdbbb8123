# SPDX-License-Identifier: Apache-2.0
"""Trials of the kernels of recurrent layers and of paged attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.ops.paged_attention import (
    paged_attention,
    paged_latent_attention,
    write_to_pages,
)
from megatron.core.ops.recurrence import (
    DecodeMemory,
    OutputNorm,
    PrologueWeights,
    UnitLayout,
    add_skip,
    gated_delta_rule,
    recurrence_decode,
    recurrence_prologue,
    state_space_dual,
)
from megatron.core.ops.sequences import Sequences
from tests.support.paged_rows import moved, paged_rows
from tools.bench.trials import BACKWARD, FORWARD, Make, Problem, Trial


def packed(tokens: int, device: torch.device) -> Sequences:
    """Return bounds of three sequences: a third of the tokens, an empty one, and the rest."""
    return Sequences((0, tokens // 3, tokens // 3, tokens), device=device)


def recurrence(
    make: Make, tokens: int, *, groups: int, heads: int, keys: int, values: int, corrects: int
) -> Problem:
    """The gated delta rule, or without a correction the state-space dual."""
    query, key = (F.normalize(make(tokens, groups, keys), dim=-1) for _ in range(2))
    value, decay = make(tokens, heads, values), -0.2 * make(tokens, heads).abs()
    strength = make(tokens, heads).sigmoid()
    sequences = packed(tokens, value.device)
    op = gated_delta_rule if corrects else state_space_dual
    return Problem(
        function=lambda *x, **o: op(*x, sequences=sequences, **o),
        inputs=(query, key, value, decay, strength),
        fp32_inputs=(3,),
    )


def skipping(make: Make, tokens: int, *, heads: int, values: int) -> Problem:
    """The direct contribution of a token to its own output (D)."""
    shape = (tokens, heads, values)
    return Problem(
        function=add_skip, inputs=(make(*shape), make(*shape), make(heads)), fp32_inputs=(2,)
    )


def prologue(make: Make, tokens: int, *, units: int, heads: int, size: int) -> Problem:
    """Convolution, norms and gates before a delta rule."""
    unit = UnitLayout.delta(heads, size, size)
    rates, step_bias = make(units * heads), make(units * heads)
    inputs = (
        make(tokens, units, unit.width),
        make(units, unit.conv_channels, 4),
        rates,
        step_bias,
    )
    sequences = packed(tokens, rates.device)

    def function(source, weight, rates, step_bias, *, implementation):
        outputs, _ = recurrence_prologue(
            source,
            PrologueWeights(weight, None, rates, step_bias),
            unit=unit,
            sequences=sequences,
            implementation=implementation,
        )
        return tuple(outputs)

    return Problem(function=function, inputs=inputs, fp32_inputs=(2, 3))


def decode(make: Make, rows: int, *, units: int, heads: int, size: int) -> Problem:
    """One token of a gated delta net for every row, in place."""
    unit = UnitLayout.delta(heads, size, size)
    inputs = (
        make(rows, units, unit.width),
        make(units, unit.conv_channels, 4),
        make(rows + 1, 3, units, unit.conv_channels),
        make(rows, units, heads * size),
        make(size),
        make(rows + 1, units * heads, size, size),
        make(units * heads),
        make(units * heads),
    )
    slots = make(rows).argsort()
    arrived = torch.zeros(rows + 1, units, dtype=torch.int32, device=slots.device)

    def function(source, weight, conv, *buffers, implementation):
        gate, norm, state, rates, step_bias = buffers
        y = recurrence_decode(
            source,
            PrologueWeights(weight, None, rates, step_bias),
            unit=unit,
            memory=DecodeMemory(conv=conv, state=state, slots=slots, arrival_counts=arrived),
            norm=OutputNorm(gate=gate, weight=norm, eps=1e-6),
            implementation=implementation,
        )
        return y, state, conv

    return Problem(function=function, inputs=inputs, fp32_inputs=(5, 6, 7), differentiable=False)


def attention(
    make: Make, rows: int, *, heads: int, groups: int, features: int, new: int, context: int
) -> Problem:
    """Queries of `new` tokens of every row to its pages, contexts of all lengths."""
    device = make(1).device
    contexts = [max(new, context - 31 * row % context) for row in range(rows)]
    paged = paged_rows(
        [new] * rows, contexts, heads=(heads, groups), features=features, block_size=16
    )
    batch = moved(paged, device, torch.float32).batch
    # Places that hold nothing are NaN, which must not be read.
    inputs = tuple(x.to(device, torch.float32) for x in (paged.query, *paged.caches))

    def function(query, keys, values, *, implementation):
        return paged_attention(query, keys, values, batch=batch, implementation=implementation)

    return Problem(function=function, inputs=inputs, differentiable=False)


def latent_attention(make: Make, rows: int, *, heads: int, rank: int, context: int) -> Problem:
    """A new token of every row to the latents in its pages, with 64 rotated features each."""
    device = make(1).device
    contexts = [max(1, context - 31 * row % context) for row in range(rows)]
    paged = paged_rows([1] * rows, contexts, heads=(heads, 1), features=rank + 64, block_size=16)
    batch = moved(paged, device, torch.float32).batch
    inputs = tuple(x.to(device, torch.float32) for x in (paged.query, paged.caches[0][:, :, 0]))

    def function(query, latents, *, implementation):
        return paged_latent_attention(
            query,
            latents,
            batch=batch,
            scale=query.shape[-1] ** -0.5,
            value_features=rank,
            implementation=implementation,
        )

    return Problem(function=function, inputs=inputs, differentiable=False)


def writing(make: Make, tokens: int, *, groups: int, features: int) -> Problem:
    """Keys and values of new tokens to their places."""
    caches = (make(tokens // 16 + 1, 16, groups, features) for _ in range(2))
    inputs = make(tokens, groups, features), make(tokens, groups, features), *caches
    slots = make(tokens).argsort()

    def function(key, value, keys, values, *, implementation):
        write_to_pages(
            key,
            value,
            key_cache=keys,
            value_cache=values,
            slot_mapping=slots,
            implementation=implementation,
        )
        return keys, values

    return Problem(function=function, inputs=inputs, differentiable=False)


DELTA = {"groups": 16, "heads": 32, "keys": 128, "values": 128, "corrects": 1}
DUAL = {"groups": 8, "heads": 128, "keys": 128, "values": 64, "corrects": 0}
TINY = {"groups": 1, "heads": 2, "keys": 8, "values": 6}
TRIALS = (
    Trial(
        {
            "delta_rule_solve": FORWARD,
            "recurrence_sweep": FORWARD,
            "recurrence_reverse": BACKWARD,
            "recurrence_gradients": BACKWARD,
        },
        recurrence,
        (DELTA,),
        TINY | {"corrects": 1},
    ),
    Trial(
        {
            "recurrence_sums": FORWARD,
            "recurrence_sweep_dual": FORWARD,
            "recurrence_reverse": BACKWARD,
            "recurrence_gradients_dual": BACKWARD,
        },
        recurrence,
        (DUAL,),
        TINY | {"corrects": 0},
    ),
    Trial(
        {"add_skip_forward": FORWARD, "add_skip_backward": BACKWARD},
        skipping,
        ({"heads": 128, "values": 64},),
        {"heads": 2, "values": 6},
    ),
    Trial(
        {"prologue_forward": FORWARD, "prologue_backward": BACKWARD},
        prologue,
        ({"units": 16, "heads": 2, "size": 128},),
        {"units": 2, "heads": 2, "size": 8},
    ),
    Trial(
        {"recurrence_decode": FORWARD},
        decode,
        ({"units": 16, "heads": 2, "size": 128},),
        {"units": 2, "heads": 2, "size": 8},
        tokens=(3, 37, 256),
    ),
    Trial(
        {"paged_attention_decode": FORWARD},
        attention,
        ({"heads": 32, "groups": 8, "features": 128, "new": 1, "context": 4096},),
        {"heads": 4, "groups": 2, "features": 16, "new": 1, "context": 100},
        tokens=(3, 7, 64),
        few=(1, 2, 2),
    ),
    # Few rows of long contexts are cut into pieces.
    Trial(
        {"paged_attention_merge": FORWARD},
        attention,
        ({"heads": 32, "groups": 8, "features": 128, "new": 1, "context": 32768},),
        {"heads": 4, "groups": 2, "features": 16, "new": 1, "context": 530},
        tokens=(1, 3, 2),
        few=(1, 2, 2),
    ),
    Trial(
        {"paged_attention_prefill": FORWARD},
        attention,
        ({"heads": 32, "groups": 8, "features": 128, "new": 2048, "context": 4096},),
        {"heads": 4, "groups": 2, "features": 16, "new": 40, "context": 50},
        tokens=(1, 3, 8),
        few=(1, 2, 2),
    ),
    Trial(
        {"paged_latent_attention": FORWARD},
        latent_attention,
        ({"heads": 128, "rank": 512, "context": 4096},),
        {"heads": 4, "rank": 16, "context": 60},
        tokens=(3, 7, 64),
        few=(1, 2, 2),
    ),
    Trial(
        {"write_to_pages": FORWARD},
        writing,
        ({"groups": 8, "features": 128},),
        {"groups": 2, "features": 8},
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""The gates of the prologue: a token's decay and strength for each head of a unit."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.recurrence_prologue.row_kernels import place_of


@triton.jit
def softplus(x):
    """Return log(1 + e^x), as precise for small results as for large ones."""
    share = tl.exp(-tl.abs(x))
    whole = 1.0 + share
    # What 1 + share rounds off is made good by the slope of the logarithm.
    log = tl.where(whole == 1.0, share, tl.log(whole) * (share / tl.maximum(whole - 1.0, 1e-30)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def limited(x, low, high):
    """Return x, but at least `low` and at most `high`; what is no number stays none."""
    # Of a number and one that is none, `tl.maximum` returns the number on a GPU.
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def write_gates(
    source_ptr,
    weights,
    gates,
    numbers,
    limits,
    STRENGTHS: tl.constexpr,
    STEPS_COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_STRENGTHS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write decay and strength of BLOCK_T tokens of a unit."""
    rates_ptr, step_bias_ptr, places_ptr = weights
    decay_ptr, strength_ptr = gates
    start, unit, tokens, units, stride = numbers
    low, high = limits
    heads = tl.arange(0, BLOCK_H)
    real = heads < HEADS
    rate = tl.exp(tl.load(rates_ptr + unit * HEADS + heads, mask=real, other=0.0))
    step_bias = tl.load(step_bias_ptr + unit * HEADS + heads, mask=real, other=0.0)
    for first in range(0, BLOCK_T, GATE_T):
        token = start + first + tl.arange(0, GATE_T)
        inside = token < tokens
        mask = inside[:, None] & real[None, :]
        place = place_of(places_ptr, token, inside, HAS_PLACES)
        at = source_ptr + (place * stride)[:, None] + heads[None, :]
        raw = tl.load(at + STEPS_COLUMN, mask=mask, other=0.0).to(tl.float32)
        steps = softplus(raw + step_bias[None, :])
        if HAS_STRENGTHS:
            opened = tl.load(at + STRENGTHS, mask=mask, other=0.0).to(tl.float32)
            strength = tl.sigmoid(opened)
        else:
            steps = limited(steps, low, high)
            strength = steps
        out = (token * units + unit)[:, None] * HEADS + heads[None, :]
        tl.store(decay_ptr + out, -rate[None, :] * steps, mask=mask)
        tl.store(strength_ptr + out, strength, mask=mask)


@triton.jit
def differentiate_gates(
    source_ptr,
    weights,
    grads,
    results,
    partial_ptr,
    numbers,
    limits,
    STRENGTHS: tl.constexpr,
    STEPS_COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_STRENGTHS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write the gradients of a share of the tokens, and this share's part of those of weights."""
    rates_ptr, step_bias_ptr, places_ptr = weights
    d_decay_ptr, d_strength_ptr = grads
    d_source_ptr, d_stride = results
    share, shares, unit, tokens, units, stride = numbers
    low, high = limits
    heads = tl.arange(0, BLOCK_H)
    there = heads < HEADS
    rate = tl.exp(tl.load(rates_ptr + unit * HEADS + heads, mask=there, other=0.0))
    step_bias = tl.load(step_bias_ptr + unit * HEADS + heads, mask=there, other=0.0)
    sum_rates = tl.zeros([BLOCK_H], dtype=tl.float32)
    sum_steps = tl.zeros([BLOCK_H], dtype=tl.float32)
    for first in range(share * GATE_T, tokens, shares * GATE_T):  # int64, as `share` is
        token = first + tl.arange(0, GATE_T)
        inside = token < tokens
        mask = inside[:, None] & there[None, :]
        place = place_of(places_ptr, token, inside, HAS_PLACES)
        at = source_ptr + (place * stride)[:, None] + heads[None, :]
        out = d_source_ptr + (place * d_stride)[:, None] + heads[None, :]
        gate = (token * units + unit)[:, None] * HEADS + heads[None, :]
        d_decay = tl.load(d_decay_ptr + gate, mask=mask, other=0.0).to(tl.float32)
        d_strength = tl.load(d_strength_ptr + gate, mask=mask, other=0.0).to(tl.float32)
        raw = tl.load(at + STEPS_COLUMN, mask=mask, other=0.0).to(tl.float32)
        raw += step_bias[None, :]
        steps = softplus(raw)
        d_steps = -rate[None, :] * d_decay
        if HAS_STRENGTHS:
            opened = tl.load(at + STRENGTHS, mask=mask, other=0.0).to(tl.float32)
            strength = tl.sigmoid(opened)
            d_opened = d_strength * strength * (1.0 - strength)
            tl.store(out + STRENGTHS, d_opened.to(out.dtype.element_ty), mask=mask)
        else:
            beyond = (steps < low) | (steps > high)
            d_steps = tl.where(beyond, 0.0, d_steps + d_strength)
            steps = limited(steps, low, high)
        d_raw = d_steps * tl.sigmoid(raw)
        tl.store(out + STEPS_COLUMN, d_raw.to(out.dtype.element_ty), mask=mask)
        sum_rates += tl.sum(-rate[None, :] * steps * d_decay, 0)
        sum_steps += tl.sum(d_raw, 0)
    out = partial_ptr + share * 2 * units * HEADS + unit * HEADS + heads
    tl.store(out, sum_rates, mask=there)
    tl.store(out + units * HEADS, sum_steps, mask=there)

# SPDX-License-Identifier: Apache-2.0
"""Trials of the kernels that go over tokens once: norms, rotations, gates, losses, permutations;
and of the products of experts."""

from __future__ import annotations

from functools import partial

import torch

from megatron.core.ops.dropout import dropout
from megatron.core.ops.grouped_mm import RowRuns, grouped_mm, grouped_wgrad_
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.linear_cross_entropy import chunk_gradient_, chunk_statistics
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.recurrence import gated_rms_norm
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.swiglu import gated
from tools.bench.trials import BACKWARD, FORWARD, Make, Problem, Trial

WIDTHS = ({"features": 2048}, {"features": 4096})


def rms(make: Make, tokens: int, *, features: int) -> Problem:
    """RMSNorm as a layer has it."""
    inputs = make(tokens, features), make(features)
    return Problem(function=partial(rms_norm, eps=1e-5), inputs=inputs)


def layer(make: Make, tokens: int, *, features: int) -> Problem:
    """Layer normalisation."""
    inputs = make(tokens, features), make(features), make(features)
    return Problem(function=partial(layer_norm, eps=1e-5), inputs=inputs)


def gated_norm(make: Make, tokens: int, *, features: int) -> Problem:
    """Norm and gate after a recurrence."""
    inputs = make(tokens, features), make(tokens, features), make(features)
    return Problem(function=partial(gated_rms_norm, eps=1e-6), inputs=inputs)


def rope(make: Make, tokens: int, *, heads: int, features: int, rotated: int) -> Problem:
    """Rotary positions."""
    x = make(tokens, 1, heads, features)
    cos, sin = rotary_table(torch.arange(tokens, device=x.device), dim=rotated)
    return Problem(function=partial(apply_rope, cos=cos, sin=sin), inputs=(x,))


def gate(make: Make, tokens: int, *, width: int) -> Problem:
    """SwiGLU."""
    return Problem(function=partial(gated, activation="silu"), inputs=(make(tokens, 2 * width),))


def dropped(make: Make, tokens: int, *, features: int) -> Problem:
    """Dropout."""
    x = make(tokens, 1, features)
    ids = torch.arange(tokens, device=x.device)
    call = partial(dropout, rate=0.1, key=5, sample_ids=ids[:1], position_ids=ids)
    return Problem(function=call, inputs=(x,))


def chunk(make: Make, tokens: int, *, vocabulary: int) -> Problem:
    """The softmax of a chunk of logits, padded, and its gradient."""
    logits, weights = make(tokens, vocabulary), make(tokens).abs()
    targets = torch.arange(tokens, device=logits.device) * 7 % (vocabulary - 3)
    columns = {"vocab_start": 0, "valid_columns": vocabulary - 3}

    def sampled(logits, weights, *, implementation):
        shared = {**columns, "implementation": implementation}
        maximum, sums, target = chunk_statistics(logits, targets, **shared)
        lse = maximum + sums.log()
        return lse, target, chunk_gradient_(logits, targets, lse, weights, **shared)

    return Problem(
        function=sampled, inputs=(logits, weights), fp32_inputs=(1,), differentiable=False
    )


def drawn_permutation(make: Make, tokens: int, copies: int) -> Permutation:
    """Send every token to `copies` rows, in no order."""
    order = make(tokens * copies).argsort()
    return Permutation.of(order, tokens, copies)


def take(make: Make, tokens: int, *, copies: int, features: int) -> Problem:
    """Rows to their experts."""
    permutation = drawn_permutation(make, tokens, copies)
    inputs = (make(tokens, features),)
    return Problem(function=lambda x, **o: take_rows(x, permutation, **o), inputs=inputs)


def total(make: Make, tokens: int, *, copies: int, features: int) -> Problem:
    """Rows back from their experts, weighted."""
    permutation = drawn_permutation(make, tokens, copies)
    inputs = make(tokens * copies, features), make(tokens, copies)
    return Problem(
        function=lambda y, w, **o: sum_rows(y, permutation, weights=w, **o),
        inputs=inputs,
        fp32_inputs=(1,),
    )


def runs_of(make: Make, tokens: int, experts: int) -> RowRuns:
    """Divide rows unevenly among experts."""
    owner = make(tokens).mul(experts / 3).abs().long().clamp(max=experts - 1)
    counts = torch.zeros(experts, dtype=torch.int64, device=owner.device)
    return RowRuns.of(counts.index_add_(0, owner, torch.ones_like(owner)))


def expert_product(make: Make, tokens: int, *, experts: int, features: int, width: int) -> Problem:
    """Rows by the matrices of their experts."""
    call = partial(grouped_mm, runs=runs_of(make, tokens, experts), transposed=True)
    inputs = make(tokens, features), make(experts, width, features)
    return Problem(function=call, inputs=inputs, differentiable=False)


def expert_gradients(
    make: Make, tokens: int, *, experts: int, features: int, width: int
) -> Problem:
    """Weight gradients of experts, added to a buffer."""
    runs = runs_of(make, tokens, experts)

    def add(grad, x, total, *, implementation):
        options = {"overwrite": False, "implementation": implementation}
        grouped_wgrad_(total, grad, x, runs, **options)
        return total

    inputs = make(tokens, width), make(tokens, features), make(experts, width, features)
    return Problem(function=add, inputs=inputs, fp32_inputs=(2,), differentiable=False)


PRODUCTS = {
    "shapes": (
        {"experts": 8, "features": 2048, "width": 2816},
        {"experts": 64, "features": 2048, "width": 1408},
    ),
    "tiny": {"experts": 3, "features": 40, "width": 24},
}
EXPERTS = {
    "shapes": ({"copies": 8, "features": 2048}, {"copies": 10, "features": 2048}),
    "tiny": {"copies": 2, "features": 40},
}
TRIALS = (
    Trial({"rms_norm_forward": FORWARD, "rms_norm_backward": BACKWARD}, rms, WIDTHS, WIDTHS[0]),
    # Heads of queries, of which there are many.
    Trial(
        {"rms_norm_forward": FORWARD, "rms_norm_backward": BACKWARD},
        rms,
        ({"features": 128}, {"features": 256}),
        {"features": 8},
        tokens=(64, 1021, 1 << 19),
    ),
    Trial(
        {"layer_norm_forward": FORWARD, "layer_norm_backward": BACKWARD},
        layer,
        WIDTHS,
        {"features": 40},
    ),
    Trial(
        {"gated_norm_forward": FORWARD, "gated_norm_backward": BACKWARD},
        gated_norm,
        ({"features": 128},),
        {"features": 8},
        tokens=(64, 1021, 1 << 20),
    ),
    Trial(
        {"rope": FORWARD},
        rope,
        (
            {"heads": 32, "features": 128, "rotated": 128},
            {"heads": 8, "features": 128, "rotated": 128},
            {"heads": 16, "features": 256, "rotated": 64},
        ),
        {"heads": 3, "features": 8, "rotated": 4},
    ),
    Trial(
        {"gated_forward": FORWARD, "gated_backward": BACKWARD},
        gate,
        ({"width": 5632}, {"width": 768}),
        {"width": 40},
    ),
    Trial({"dropout": FORWARD}, dropped, WIDTHS[:1], {"features": 40}),
    Trial(
        {"chunk_statistics": FORWARD, "chunk_gradient": FORWARD},
        chunk,
        ({"vocabulary": 128256},),
        {"vocabulary": 40},
        tokens=(64, 511, 4096),
    ),
    Trial({"grouped_mm": FORWARD}, expert_product, **PRODUCTS),
    Trial({"grouped_wgrad": FORWARD}, expert_gradients, **PRODUCTS),
    Trial({"take_rows": FORWARD}, take, **EXPERTS),
    Trial({"sum_rows": FORWARD, "sum_rows_backward": BACKWARD}, total, **EXPERTS),
)

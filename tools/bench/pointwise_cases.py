# SPDX-License-Identifier: Apache-2.0
"""Cases of norms, gate, rotary embedding, dropout, permutation and loss.

Peers are torch's own ops and what torch.compile makes of the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from megatron.core.ops.dropout import dropout as mcore_dropout
from megatron.core.ops.layernorm import layer_norm as mcore_layer_norm
from megatron.core.ops.linear_cross_entropy import linear_cross_entropy
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.swiglu import gated
from tools.bench.cases import (
    GPU,
    MCORE,
    TORCH,
    Case,
    compiled,
    directions_of,
    register,
    with_gradients,
)
from tools.bench.harness import Bench

#: The promise of an op that only moves memory.
BANDWIDTH = (("share >= 0.85",), ("share >= 0.85",))
NO_TARGETS = ((), ())
#: 0.9 of the rate published for the backward pass of linear cross entropy, 8,192 x 2,048 x 131,072.
LOSS_FLOPS_PER_SECOND = 0.9 * 691e12


def _targets(bench: Bench) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the targets of both directions: shares of the bandwidth are promised on GPUs."""
    return NO_TARGETS if bench.is_cpu else BANDWIDTH


@register("norm")
def norm(bench: Bench) -> Iterator[Case]:
    """RMSNorm."""
    rows, features = bench.sized((16384, 4096), (5, 40), cpu=(2048, 512))
    x = bench.leaf(rows, features)
    weight = torch.ones(features, device=bench.device, dtype=bench.dtype).requires_grad_()
    functions = {
        MCORE: lambda x, w: rms_norm(x, w, eps=1e-5, implementation=bench.implementation),
        **compiled(bench, lambda x, w: F.rms_norm(x, (features,), w, 1e-5), eager=TORCH),
    }
    moved_bytes = (2 * x.nbytes, 3 * x.nbytes)
    name = f"RMSNorm {rows} x {features}"
    yield from directions_of(
        name, functions, (x, weight), moved_bytes=moved_bytes, targets=_targets(bench)
    )


@register("norm with residual")
def norm_with_residual(bench: Bench) -> Iterator[Case]:
    """RMSNorm and layer norm with the addition of the residual stream before them."""
    rows, features = bench.sized((16384, 4096), (5, 40), cpu=(2048, 512))
    x, residual, weight = (
        bench.leaf(rows, features),
        bench.leaf(rows, features),
        bench.leaf(features),
    )

    def rms_formula(x, r, w):
        return F.rms_norm(x + r, (features,), w, 1e-5), x + r

    def layer_formula(x, r, w):
        return F.layer_norm(x + r, (features,), w, w, 1e-5), x + r

    options = {"eps": 1e-5, "implementation": bench.implementation}
    for kind, mcore, formula in (
        ("RMSNorm", lambda x, r, w: rms_norm(x, w, residual=r, **options), rms_formula),
        (
            "layer norm",
            lambda x, r, w: mcore_layer_norm(x, w, w, residual=r, **options),
            layer_formula,
        ),
    ):
        functions = {MCORE: mcore, **compiled(bench, formula, eager=TORCH)}
        yield from directions_of(
            f"{kind} with residual {rows} x {features}",
            functions,
            (x, residual, weight),
            moved_bytes=(4 * x.nbytes, 4 * x.nbytes),
            targets=_targets(bench) if kind == "RMSNorm" else NO_TARGETS,
        )


@register("swiglu")
def swiglu(bench: Bench) -> Iterator[Case]:
    """SwiGLU of one fused product."""
    rows, width = bench.sized((16384, 5632), (5, 45), cpu=(2048, 1536))
    x = bench.leaf(rows, 2 * width)

    def formula(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return (F.silu(gate.float()) * up.float()).to(x.dtype)

    functions = {
        MCORE: lambda x: gated(x, "silu", implementation=bench.implementation),
        **compiled(bench, formula, eager=TORCH),
    }
    moved_bytes = (1.5 * x.nbytes, 2.5 * x.nbytes)
    name = f"SwiGLU {rows} x {width}"
    yield from directions_of(
        name, functions, (x,), moved_bytes=moved_bytes, targets=_targets(bench)
    )


@register("rope")
def rope(bench: Bench) -> Iterator[Case]:
    """Rotary position embedding."""
    tokens, heads, size = bench.sized((32768, 32, 128), (7, 3, 6), cpu=(2048, 8, 64))
    x = bench.leaf(tokens, 1, heads, size)
    cos, sin = rotary_table(torch.arange(tokens, device=bench.device), dim=size)

    def formula(x: torch.Tensor) -> torch.Tensor:
        left, right = x.float().chunk(2, -1)
        c, s = (table.view(tokens, 1, 1, size // 2) for table in (cos, sin))
        return torch.cat([left * c - right * s, right * c + left * s], -1).to(x.dtype)

    functions = {
        MCORE: lambda x: apply_rope(x, cos, sin, implementation=bench.implementation),
        **compiled(bench, formula, eager=TORCH),
    }
    moved_bytes = 2.0 * x.nbytes + 2 * cos.nbytes
    yield from directions_of(
        f"rope {tokens} x {heads} x {size}",
        functions,
        (x,),
        moved_bytes=(moved_bytes, moved_bytes),
        targets=_targets(bench),
    )


@register("dropout")
def dropout(bench: Bench) -> Iterator[Case]:
    """Dropout by position; torch draws other elements."""
    sequence, batch, features = bench.sized((8192, 4, 4096), (5, 2, 40), cpu=(512, 4, 512))
    x = bench.leaf(sequence, batch, features)
    samples = torch.arange(batch, device=bench.device)
    positions = torch.arange(sequence, device=bench.device)
    draw = {"rate": 0.1, "key": 1, "sample_ids": samples, "position_ids": positions}
    functions = {
        MCORE: lambda x: mcore_dropout(x, implementation=bench.implementation, **draw),
        TORCH: lambda x: F.dropout(x, 0.1),
    }
    yield from directions_of(
        f"dropout {sequence} x {batch} x {features}",
        functions,
        (x,),
        moved_bytes=(2 * x.nbytes, 2 * x.nbytes),
        same=False,
    )


@register("cross entropy")
def cross_entropy(bench: Bench) -> Iterator[Case]:
    """Linear cross entropy, forward and backward: ours computes the gradients while it has the
    logits, so backward alone would be empty."""
    tokens, features, vocabulary = bench.sized(
        (8192, 2048, 131072), (9, 12, 50), cpu=(2048, 512, 8192)
    )
    hidden = bench.leaf(tokens, features)
    # Logits of size one, as in training: peaked ones have denormal gradients, which are slow.
    weight = (features**-0.5 * bench.drawn(vocabulary, features)).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    weights = torch.full((tokens,), 1.0 / tokens, device=bench.device)

    def mcore(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        implementation = bench.implementation
        return linear_cross_entropy(hidden, weight, labels, weights, implementation=implementation)[
            0
        ]

    def formula(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    calls, peaks = {}, []
    for name, function in ((MCORE, mcore), (TORCH, formula), *compiled(bench, formula).items()):
        calls[name] = with_gradients(function, (hidden, weight))[0]
        peaks.append(_peak_bytes(bench, calls[name]))
    flops = 6.0 * tokens * features * vocabulary
    yield Case(
        name=f"linear cross entropy {tokens} x {features} x {vocabulary}, forward + backward",
        mcore=calls.pop(MCORE),
        peers=calls,
        flops=flops,
        note=f"peak {peaks[0] / 1e9:.1f} GB / {peaks[1] / 1e9:.1f} GB"
        if bench.watch.on_gpu
        else "",
        targets=() if bench.is_cpu else [f"ms <= {flops / LOSS_FLOPS_PER_SECOND * 1e3:.4g}"],
    )


def _peak_bytes(bench: Bench, call: Callable[[], object]) -> int:
    """Return the peak device memory that a call allocates."""
    call()
    if not bench.watch.on_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@register("permutation", GPU)
def permutation(bench: Bench) -> Iterator[Case]:
    """Copies of tokens in the order of their experts, and their weighted sums."""
    tokens, copies, features = bench.sized((32768, 8, 2048), (9, 2, 40))
    order = torch.randperm(tokens * copies, device=bench.device)
    permute = Permutation.of(order, tokens, copies)
    x, rows = bench.drawn(tokens, features), bench.drawn(tokens * copies, features)
    weights = torch.rand(tokens, copies, device=bench.device)
    moved_bytes = x.nbytes + rows.nbytes
    sizes = f"{copies} copies of {tokens} tokens of {features}"
    tokens_of_rows = permute.sources // copies
    yield Case(
        name=f"rows to experts, {sizes}",
        mcore=lambda: take_rows(x, permute, implementation="triton"),
        peers={TORCH: lambda: x[tokens_of_rows]},
        moved_bytes=moved_bytes,
    )
    yield Case(
        name=f"weighted sums back, {sizes}",
        mcore=lambda: sum_rows(rows, permute, weights=weights, implementation="triton"),
        moved_bytes=moved_bytes,
    )

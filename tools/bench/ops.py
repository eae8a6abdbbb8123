# SPDX-License-Identifier: Apache-2.0
"""Time every op, forward and backward, against what transformers does, interleaved.

    python tools/bench/ops.py [--dtype float32|bfloat16|both] [--shape S|M] [--rounds N] [--op NAME]

Prints the median of each side and their ratio; only ratios of one run mean anything. Needs
transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from megatron.core.ops.attention import attention
from megatron.core.ops.dropout import dropout
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.linear_cross_entropy import linear_cross_entropy
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.swiglu import swiglu
from tools.bench.table import Row, compared, format_table

# batch, sequence, hidden, ffn, heads, key heads, vocabulary: the peers' shapes
SHAPES = {
    "S": (4, 256, 256, 768, 4, 2, 4096),
    "M": (4, 512, 512, 1536, 8, 4, 8192),
}
Step = Callable[[], object]


def leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a random tensor that takes a gradient."""
    return torch.randn(shape, dtype=dtype).requires_grad_()


def step(function: Callable[..., object], inputs: list[torch.Tensor], grad_outputs: list) -> Step:
    """Make a forward and backward pass of `function`; a pull of None is a scalar loss."""
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad_outputs)


def norm_pairs(shape: tuple, dtype: torch.dtype) -> Iterator[tuple[str, Step, Step]]:
    """Yield (name, ours, theirs) of the normalisations and dropout."""
    batch, sequence, hidden, *_ = shape
    inputs = [leaf(sequence, batch, hidden, dtype=dtype) for _ in range(2)]
    weight = leaf(hidden, dtype=dtype)
    grad_outputs = [torch.randn_like(inputs[0]) for _ in range(2)]
    module = LlamaRMSNorm(hidden, eps=1e-5).to(dtype)

    def peer(x, residual):
        total = x + residual
        return module(total), total

    def theirs_layer(x, residual):
        total = x + residual
        return F.layer_norm(total, (hidden,), weight, weight, 1e-5), total

    mcore = step(
        lambda x, r, w: rms_norm(x, w, eps=1e-5, residual=r), [*inputs, weight], grad_outputs
    )
    module_inputs = [*inputs, module.weight]
    yield "rmsnorm+residual", mcore, step(lambda x, r, _: peer(x, r), module_inputs, grad_outputs)
    mcore = step(
        lambda x, r, w: layer_norm(x, w, w, eps=1e-5, residual=r), [*inputs, weight], grad_outputs
    )
    layer_inputs = [*inputs, weight]
    yield (
        "layernorm+residual",
        mcore,
        step(lambda x, r, _: theirs_layer(x, r), layer_inputs, grad_outputs),
    )
    samples, positions = torch.arange(batch), torch.arange(sequence)
    mcore = step(
        lambda x: dropout(x, rate=0.1, key=1, sample_ids=samples, position_ids=positions),
        inputs[:1],
        grad_outputs[:1],
    )
    yield "dropout", mcore, step(lambda x: F.dropout(x, 0.1), inputs[:1], grad_outputs[:1])


def attention_pairs(shape: tuple, dtype: torch.dtype) -> Iterator[tuple[str, Step, Step]]:
    """Yield (name, ours, theirs) of rotary embedding and attention."""
    batch, sequence, hidden, _, heads, groups, _ = shape
    features = hidden // heads
    inputs = [leaf(sequence, batch, n, features, dtype=dtype) for n in (heads, groups, groups)]
    flat = [leaf(batch, sequence, n, features, dtype=dtype) for n in (heads, groups, groups)]
    cos, sin = rotary_table(torch.arange(sequence), dim=features)
    rope_tables = [torch.cat([t, t], -1)[None].to(dtype) for t in (cos, sin)]
    grad_outputs = [torch.randn_like(x) for x in inputs]

    def peer(q, k):
        return apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rope_tables)

    flat_pulls = [torch.randn_like(x).transpose(1, 2) for x in flat]
    yield (
        "rope q, k",
        step(
            lambda q, k: (apply_rope(q, cos, sin), apply_rope(k, cos, sin)),
            inputs[:2],
            grad_outputs[:2],
        ),
        step(peer, flat[:2], flat_pulls[:2]),
    )

    def theirs_attention(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    yield (
        "attention",
        step(lambda *x: attention(*x)[0], inputs, grad_outputs[:1]),
        step(theirs_attention, flat, [torch.randn_like(flat[0])]),
    )


def mlp_pairs(shape: tuple, dtype: torch.dtype) -> Iterator[tuple[str, Step, Step]]:
    """Yield (name, ours, theirs) of the gated activation and the loss."""
    batch, sequence, hidden, ffn, _, _, vocabulary = shape
    gate_up = leaf(sequence, batch, 2 * ffn, dtype=dtype)
    halves = [leaf(batch, sequence, ffn, dtype=dtype) for _ in range(2)]
    pull = torch.randn(sequence, batch, ffn, dtype=dtype)
    yield (
        "swiglu",
        step(swiglu, [gate_up], [pull]),
        step(lambda g, u: F.silu(g) * u, halves, [torch.randn_like(halves[0])]),
    )
    tokens = batch * sequence
    # Logits of size one, as in training: peaked ones would make denormal gradients, which crawl.
    matrix = (torch.randn(vocabulary, hidden) * hidden**-0.5).to(dtype).requires_grad_()
    inputs = [leaf(tokens, hidden, dtype=dtype), matrix]
    targets, weights = torch.randint(vocabulary, (tokens,)), torch.full((tokens,), 1 / tokens)

    def peer(x, w):
        return F.cross_entropy(F.linear(x, w).float(), targets)

    yield (
        "linear_cross_entropy",
        step(lambda x, w: linear_cross_entropy(x, w, targets, weights)[0], inputs, [None]),
        step(peer, inputs, [None]),
    )


def measure(mcore: Step, peer: Step, rounds: int) -> tuple[float, float]:
    """Run both sides in turn; return their medians in ms."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds + 2):
        for function, record in zip((mcore, peer), times, strict=True):
            start = time.perf_counter()
            function()
            if index >= 2:  # the first rounds warm up
                record.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def rows(quick: bool) -> list[Row]:
    """Measure every op for the common table, as runs per second."""
    return compare("S" if quick else "M", ("float32", "bfloat16"), rounds=7 if quick else 21)


def compare(
    shape: str, dtypes: Sequence[str], *, rounds: int, only: str | None = None
) -> list[Row]:
    """Measure each op at one shape.

    Args:
        shape: a key of `SHAPES`.
        dtypes: names of torch dtypes.
        rounds: timed runs of each side.
        only: part of the names of the ops to run; None runs all.
    """
    torch.manual_seed(0)
    table_rows = []
    for name in dtypes:
        for pairs in (norm_pairs, attention_pairs, mlp_pairs):
            for op, mcore, peer_step in pairs(SHAPES[shape], getattr(torch, name)):
                if only is not None and only not in op:
                    continue
                mcore_seconds, peer_seconds = measure(mcore, peer_step, rounds)
                table_rows.append(
                    compared(
                        bench="ops",
                        what=f"{op}, {name}, {shape}: runs/s / transformers",
                        ours=1e3 / mcore_seconds,
                        peer=1e3 / peer_seconds,
                        ratio=peer_seconds / mcore_seconds,
                        target=">= 1.0",
                    )
                )
    return table_rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="M")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--op", help="run only the ops whose name contains this")
    args = parser.parse_args()
    dtypes = ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,)
    print(f"{torch.get_num_threads()} threads, forward + backward, medians")
    print(format_table(compare(args.shape, dtypes, rounds=args.rounds, only=args.op)))


if __name__ == "__main__":
    main()

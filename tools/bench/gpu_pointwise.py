# SPDX-License-Identifier: Apache-2.0
"""The kernels of transformers: how much of the device's bandwidth or products they reach.

Peers are what torch.compile makes of the formulas, and torch's own attention and cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.ops.attention import attention
from megatron.core.ops.backend_choice import add_product_
from megatron.core.ops.grouped_mm import RowRuns, grouped_mm, grouped_wgrad_
from megatron.core.ops.linear_cross_entropy import linear_cross_entropy
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.swiglu import gated
from tools.bench.gpu_bench import MCORE, Bench, require_same, with_gradients

COMPILED, TORCH, SDPA = "torch.compile", "torch", "SDPA"
Function = Callable[..., torch.Tensor]
PROMISED = ("share >= 0.85",)
#: 0.9 of the rate published for the backward pass of linear cross entropy, 8,192 x 2,048 x 131,072.
LOSS_FLOPS_PER_SECOND = 0.9 * 691e12
BF16_BOUND = 0.03


def both_ways(
    bench: Bench,
    what: str,
    functions: dict[str, Function],
    leaves: Sequence[torch.Tensor],
    moved: tuple[float, float],
) -> None:
    """Race a bandwidth-bound op forward, then backward alone.

    Args:
        moved: bytes that forward and backward must read and write.
    """
    plain = [x.detach() for x in leaves]
    outs = {key: function(*plain) for key, function in functions.items()}
    for key, out in outs.items():
        require_same(f"{what}, ours and {key}", outs[MCORE], out, BF16_BOUND)
    del outs
    calls = {key: lambda function=function: function(*plain) for key, function in functions.items()}
    bench.race(f"{what}, forward", calls, moved_bytes=moved[0], targets=PROMISED)
    calls = {key: with_gradients(function, leaves)[1] for key, function in functions.items()}
    bench.race(f"{what}, backward", calls, moved_bytes=moved[1], targets=PROMISED)


def compiled(bench: Bench, function: Function) -> dict[str, Function]:
    """Return what torch.compile makes of a formula; in a rehearsal the formula."""
    if bench.rehearse:
        return {COMPILED: function}
    import torch._functorch.config as settings

    settings.donated_buffer = False  # backward is timed by itself, so its graph is kept
    return {COMPILED: torch.compile(function, dynamic=False)}


def norm(bench: Bench) -> None:
    """Race RMSNorm."""
    rows, features = bench.sized((16384, 4096), (5, 40))
    x = bench.drawn(rows, features).requires_grad_()
    weight = torch.ones(features, device=bench.device, dtype=bench.dtype).requires_grad_()
    functions = {
        MCORE: lambda x, w: rms_norm(x, w, eps=1e-5, implementation="triton"),
        **compiled(bench, lambda x, w: F.rms_norm(x, (features,), w, 1e-5)),
    }
    what = f"RMSNorm {rows} x {features}"
    both_ways(bench, what, functions, (x, weight), (2 * x.nbytes, 3 * x.nbytes))


def norm_with_residual(bench: Bench) -> None:
    """Time RMSNorm with the addition before it, forward."""
    rows, features = bench.sized((16384, 4096), (5, 40))
    x, r, w = bench.drawn(rows, features), bench.drawn(rows, features), bench.drawn(features)
    calls = {MCORE: lambda: rms_norm(x, w, eps=1e-5, residual=r, implementation="triton")}
    what = f"RMSNorm with residual {rows} x {features}, forward"
    bench.race(what, calls, moved_bytes=4 * x.nbytes, targets=PROMISED)


def swiglu(bench: Bench) -> None:
    """Race SwiGLU."""
    rows, width = bench.sized((16384, 5632), (5, 45))
    x = bench.drawn(rows, 2 * width).requires_grad_()

    def formula(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return (F.silu(gate.float()) * up.float()).to(x.dtype)

    functions = {
        MCORE: lambda x: gated(x, "silu", implementation="triton"),
        **compiled(bench, formula),
    }
    moved = (1.5 * x.nbytes, 2.5 * x.nbytes)
    both_ways(bench, f"SwiGLU {rows} x {width}", functions, (x,), moved)


def rope(bench: Bench) -> None:
    """Race rotary positions."""
    tokens, heads, size = bench.sized((32768, 32, 128), (7, 3, 6))
    x = bench.drawn(tokens, 1, heads, size).requires_grad_()
    cos, sin = rotary_table(torch.arange(tokens, device=bench.device), dim=size)

    def formula(x: torch.Tensor) -> torch.Tensor:
        left, right = x.float().chunk(2, -1)
        c, s = (table.view(tokens, 1, 1, size // 2) for table in (cos, sin))
        return torch.cat([left * c - right * s, right * c + left * s], -1).to(x.dtype)

    functions = {
        MCORE: lambda x: apply_rope(x, cos, sin, implementation="triton"),
        **compiled(bench, formula),
    }
    moved = 2.0 * x.nbytes + 2 * cos.nbytes
    both_ways(bench, f"rope {tokens} x {heads} x {size}", functions, (x,), (moved, moved))


def permutation(bench: Bench) -> None:
    """Time the way of tokens to their experts and back."""
    tokens, copies, features = bench.sized((32768, 8, 2048), (9, 2, 40))
    order = torch.randperm(tokens * copies, device=bench.device)
    permute = Permutation.of(order, tokens, copies)
    x, rows = bench.drawn(tokens, features), bench.drawn(tokens * copies, features)
    weights = torch.rand(tokens, copies, device=bench.device)
    moved = x.nbytes + rows.nbytes
    what = f"{copies} copies of {tokens} tokens of {features}"
    tokens_of_rows = permute.sources // copies
    calls = {
        MCORE: lambda: take_rows(x, permute, implementation="triton"),
        TORCH: lambda: x[tokens_of_rows],
    }
    bench.race(f"rows to experts, {what}", calls, moved_bytes=moved)
    calls = {MCORE: lambda: sum_rows(rows, permute, weights=weights, implementation="triton")}
    bench.race(f"weighted sums back, {what}", calls, moved_bytes=moved)


def expert_products(bench: Bench) -> None:
    """Race the grouped products of experts with uneven loads: forward, and weight gradients added
    to a buffer in fp32, which torch's product rounds to bf16 first."""
    rows, experts, features, width = bench.sized((131072, 64, 2048, 1408), (29, 3, 40, 24))
    weights = torch.rand(experts, generator=torch.Generator().manual_seed(3)) + 0.2
    counts = (weights / weights.sum() * rows).long()
    counts[-1] += rows - counts.sum()
    runs = RowRuns.of(counts.to(bench.device))
    x, grad = bench.drawn(rows, features), bench.drawn(rows, width)
    matrices = bench.drawn(experts, width, features)
    total = torch.zeros(experts, width, features, device=bench.device)
    flops = 2.0 * rows * features * width
    what = f"{experts} experts of {width} x {features}, {rows:,} rows"

    def product(implementation: str | None) -> torch.Tensor:
        return grouped_mm(x, matrices, runs, transposed=True, implementation=implementation)

    def by_torch() -> None:
        total.add_(F.grouped_mm(grad.t(), x, offs=runs.ends))

    def by_loop() -> None:
        runs = (t.split(counts.tolist()) for t in (grad, x))
        for matrix, g, x_run in zip(total, *runs, strict=True):
            add_product_(matrix, g.t(), x_run)

    require_same(f"{what}, ours and our kernel", product(None), product("triton"), BF16_BOUND)
    calls = {MCORE: partial(product, None), "Triton kernel": partial(product, "triton")}
    bench.race(f"{what}, forward", calls, flops=flops)
    add = partial(grouped_wgrad_, total, grad, x, runs, overwrite=False, implementation="triton")
    calls = {MCORE: add, "torch grouped_mm, added": by_torch, "a loop of products": by_loop}
    bench.race(f"{what}, weight gradients", calls, flops=flops)


def cross_entropy(bench: Bench) -> None:
    """Race the loss of a large vocabulary, forward and backward: ours computes the gradients while
    it has the logits, so that its backward alone would be none."""
    tokens, features, vocabulary = bench.sized((8192, 2048, 131072), (9, 12, 50))
    hidden = bench.drawn(tokens, features).requires_grad_()
    weight = (0.02 * bench.drawn(vocabulary, features)).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    weights = torch.full((tokens,), 1.0 / tokens, device=bench.device)

    def mcore(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, labels, weights, implementation="triton")[0]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    calls, peaks = {}, []
    for name, function in ((MCORE, mcore), (TORCH, plain)):
        calls[name] = with_gradients(function, (hidden, weight))[0]
        peaks.append(_peak_bytes(bench, calls[name]))
    note = f"peak {peaks[0] / 1e9:.1f} GB / {peaks[1] / 1e9:.1f} GB" if bench.watch.on_gpu else ""
    flops = 6.0 * tokens * features * vocabulary
    what = f"linear cross entropy {tokens} x {features} x {vocabulary}, forward + backward"
    targets = [f"ms <= {flops / LOSS_FLOPS_PER_SECOND * 1e3:.4g}"]
    bench.race(what, calls, flops=flops, note=note, targets=targets)


def _peak_bytes(bench: Bench, call: Callable[[], object]) -> int:
    """Return the peak device memory that a call allocates."""
    if not bench.watch.on_gpu:
        call()
        return 0
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


#: (tokens, rows, query heads, key heads, features) of causal attention.
ATTENTION_SHAPES = (
    (4096, 4, 16, 16, 128),
    (8192, 1, 16, 16, 128),
    (8192, 1, 32, 8, 128),
    (32768, 1, 16, 16, 128),
    (4096, 2, 16, 16, 192),
)
TINY_ATTENTION = ((40, 1, 4, 2, 6),)


def causal_attention(bench: Bench) -> None:
    """Race causal attention, forward, then forward and backward: what the op takes by itself, our
    Triton kernel, and each backend of torch's scaled_dot_product_attention."""
    for shape in bench.sized(ATTENTION_SHAPES, TINY_ATTENTION):
        attention_of(bench, *shape)


#: Lengths of the documents that are packed into a row, beside what attention has besides.
PACKED_SHAPES = (
    ((8192,) * 4, 16, 16, 128, None),
    ((12000, 500, 7000, 1268, 4096, 7904), 32, 8, 128, None),
    ((32768,), 32, 8, 128, 4096),
)
TINY_PACKED = (((7, 21, 12), 4, 2, 8, None), ((40,), 4, 2, 8, 9))


def packed_attention(bench: Bench) -> None:
    """Race causal attention of documents packed into a row, and in a window."""
    for lengths, heads, groups, features, window in bench.sized(PACKED_SHAPES, TINY_PACKED):
        packed_attention_of(bench, lengths, (heads, groups, features), window)


def packed_attention_of(
    bench: Bench, lengths: Sequence[int], sizes: tuple[int, int, int], window: int | None
) -> None:
    """Race what the op takes by itself, our Triton kernel, which knows documents by their ids, and
    the op called for one document after the other.

    Args:
        lengths: of the documents of one row.
        sizes: query heads, key heads, features.
        window: of attention, or None.
    """
    heads, groups, features = sizes
    tokens, ends = sum(lengths), list(accumulate(lengths))
    leaves = [bench.drawn(tokens, 1, n, features).requires_grad_() for n in (heads, groups, groups)]
    packed: dict[str, object] = {"window": window}
    if len(lengths) > 1:
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        bounds = torch.tensor([0, *ends], dtype=torch.int32)
        packed |= {
            "document_ids": ids[:, None].to(bench.device),
            "cu_seqlens": bounds.to(bench.device),
            "max_seqlen": max(lengths),
        }

    def attend(*qkv: torch.Tensor, **options: object) -> torch.Tensor:
        return attention(*qkv, **packed, **options)[0]

    def one_by_one(*qkv: torch.Tensor) -> torch.Tensor:
        spans = zip([0, *ends], ends, strict=False)
        outputs = [attention(*(x[a:b] for x in qkv), window=window)[0] for a, b in spans]
        return torch.cat(outputs)

    functions = {MCORE: attend, "Triton kernel": partial(attend, implementation="triton")}
    if len(lengths) > 1:
        functions["one by one"] = one_by_one
    plain = [x.detach() for x in leaves]
    for name, function in functions.items():
        require_same(f"attention, ours and {name}", attend(*plain), function(*plain), BF16_BOUND)
    pairs = sum(n * n / 2 - max(n - (window or n), 0) ** 2 / 2 for n in lengths)
    flops = 4.0 * pairs * heads * features
    what = f"attention {heads}/{groups} heads of {features}, "
    what += f"{len(lengths)} documents in {tokens:,} tokens" if len(lengths) > 1 else (
        f"{tokens:,} tokens in a window of {window:,}"
    )  # fmt: skip
    calls = {key: partial(function, *plain) for key, function in functions.items()}
    bench.race(f"{what}, forward", calls, flops=flops)
    calls = {key: with_gradients(function, leaves)[0] for key, function in functions.items()}
    bench.race(f"{what}, forward + backward", calls, flops=3.5 * flops)


def attention_of(
    bench: Bench, tokens: int, rows: int, heads: int, groups: int, features: int
) -> None:
    """Race causal attention of one shape."""
    leaves = [
        bench.drawn(tokens, rows, n, features).requires_grad_() for n in (heads, groups, groups)
    ]

    def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v)[0]

    def mcore(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, implementation="triton")[0]

    def by_torch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend
    ) -> torch.Tensor:
        heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                *heads_first, is_causal=True, enable_gqa=heads != groups
            )
        return out.permute(2, 0, 1, 3)

    functions = {MCORE: chosen, "Triton kernel": mcore}
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
    if not bench.watch.on_gpu:
        backends = {"SDPA": SDPBackend.MATH}
    plain, refused = [x.detach() for x in leaves], []
    for name, backend in backends.items():
        function = partial(by_torch, backend=backend)
        try:
            require_same(
                f"attention, ours and {name}", chosen(*plain), function(*plain), BF16_BOUND
            )
        except RuntimeError as error:  # a backend that does not take the shape
            refused.append(f"{name}: {str(error).splitlines()[0][:80]}")
        else:
            functions[name] = function
    require_same("attention, ours and our kernel", chosen(*plain), mcore(*plain), BF16_BOUND)
    flops = 2.0 * tokens * tokens * rows * heads * features  # half of 4, as half is masked
    what = f"causal attention {heads}/{groups} heads of {features}, {rows} x {tokens:,} tokens"
    targets = [f"{name} >= 1.0" for name in functions if name in backends]
    note = "; ".join(refused)
    calls = {key: partial(function, *plain) for key, function in functions.items()}
    bench.race(f"{what}, forward", calls, flops=flops, targets=targets, note=note)
    calls = {key: with_gradients(function, leaves)[0] for key, function in functions.items()}
    bench.race(f"{what}, forward + backward", calls, flops=3.5 * flops, targets=targets, note=note)

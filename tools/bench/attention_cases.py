# SPDX-License-Identifier: Apache-2.0
"""Cases of attention: causal, packed and in a window, against torch's attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.ops.attention import attention
from tools.bench.cases import MCORE, Case, Function, directions_of, register, require_same
from tools.bench.harness import Bench

KERNEL = "Triton kernel"

#: (tokens, rows, query heads, key heads, features) of causal attention.
ATTENTION_SHAPES = (
    (4096, 4, 16, 16, 128),
    (8192, 1, 16, 16, 128),
    (8192, 1, 32, 8, 128),
    (32768, 1, 16, 16, 128),
    (4096, 2, 16, 16, 192),
)
CPU_ATTENTION, TINY_ATTENTION = ((512, 4, 8, 4, 64),), ((40, 1, 4, 2, 6),)


@register("attention")
def causal_attention(bench: Bench) -> Iterator[Case]:
    """Causal attention: what the op chooses, our Triton kernel, and each backend of torch."""
    for shape in bench.sized(ATTENTION_SHAPES, TINY_ATTENTION, cpu=CPU_ATTENTION):
        yield from _causal_cases(bench, *shape)


#: Lengths of the documents that are packed into a row, beside what attention has besides.
PACKED_SHAPES = (
    ((8192,) * 4, 16, 16, 128, None),
    ((12000, 500, 7000, 1268, 4096, 7904), 32, 8, 128, None),
    ((32768,), 32, 8, 128, 4096),
)
CPU_PACKED = (((512,) * 4, 8, 4, 64, None), ((2048,), 8, 4, 64, 512))
TINY_PACKED = (((7, 21, 12), 4, 2, 8, None), ((40,), 4, 2, 8, 9))


@register("attention, packed")
def packed_attention(bench: Bench) -> Iterator[Case]:
    """Causal attention of documents packed into a row, and in a window."""
    shapes = bench.sized(PACKED_SHAPES, TINY_PACKED, cpu=CPU_PACKED)
    for lengths, heads, groups, features, window in shapes:
        yield from _packed_cases(bench, lengths, (heads, groups, features), window)


def _packed_cases(
    bench: Bench, lengths: Sequence[int], sizes: tuple[int, int, int], window: int | None
) -> Iterator[Case]:
    """Yield the cases of one row: what the op chooses, our Triton kernel, which knows documents by
    their ids, and the op called for one document after the other.

    Args:
        lengths: of the documents of one row.
        sizes: query heads, key heads, features.
        window: of attention, or None.
    """
    heads, groups, features = sizes
    tokens, ends = sum(lengths), list(accumulate(lengths))
    leaves = [bench.leaf(tokens, 1, n, features) for n in (heads, groups, groups)]
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

    functions: dict[str, Function] = {MCORE: attend}
    if not bench.is_cpu:
        functions[KERNEL] = partial(attend, implementation="triton")
    if len(lengths) > 1:
        functions["one by one"] = one_by_one
    pairs = sum(n * n / 2 - max(n - (window or n), 0) ** 2 / 2 for n in lengths)
    flops = 4.0 * pairs * heads * features
    name = f"attention {heads}/{groups} heads of {features}, "
    if len(lengths) > 1:
        name += f"{len(lengths)} documents in {tokens:,} tokens"
    else:
        name += f"{tokens:,} tokens in a window of {window:,}"
    yield from directions_of(name, functions, leaves, flops=(flops, 2.5 * flops), whole=True)


def _causal_cases(
    bench: Bench, tokens: int, rows: int, heads: int, groups: int, features: int
) -> Iterator[Case]:
    """Yield the cases of one shape."""
    leaves = [bench.leaf(tokens, rows, n, features) for n in (heads, groups, groups)]

    def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v)[0]

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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

    functions: dict[str, Function] = {MCORE: chosen}
    if not bench.is_cpu:
        functions[KERNEL] = kernel
    if bench.watch.on_gpu:
        backends = {
            "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
        }
    else:
        backends = {"SDPA": SDPBackend.FLASH_ATTENTION if bench.is_cpu else SDPBackend.MATH}
    plain, refused = [x.detach() for x in leaves], []
    for name, backend in backends.items():
        function = partial(by_torch, backend=backend)
        try:
            require_same(f"attention, ours and {name}", chosen(*plain), function(*plain))
        except RuntimeError as error:  # a backend that does not take the shape
            refused.append(f"{name}: {str(error).splitlines()[0][:80]}")
        else:
            functions[name] = function
    flops = 2.0 * tokens * tokens * rows * heads * features  # half of 4, as half is masked
    targets = [f"{name} >= 1.0" for name in functions if name in backends]
    for case in directions_of(
        f"causal attention {heads}/{groups} heads of {features}, {rows} x {tokens:,} tokens",
        functions,
        leaves,
        flops=(flops, 2.5 * flops),
        targets=(targets, targets),
        whole=True,
    ):
        yield replace(case, note="; ".join(refused))

# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel on the GPU, forward and backward, against torch in fp64 on the GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding, blockwise
from megatron.core.context_parallel.blockwise import attention_blocks
from megatron.core.ops.attention import Mask, attention, fused
from megatron.core.ops.backend_choice import add_product_
from megatron.core.ops.dropout import AttentionDropout, dropout
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.linear_cross_entropy import linear_cross_entropy
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.swiglu import gated
from tests.support.closeness import relative_error
from tests.support.gpu_agreement import BOUND, DTYPES, agree, random_tensor, sized

pytestmark = pytest.mark.gpu

SEQUENCE, BATCH, HEADS, GROUPS = sized((2048, 2, 16, 4), (72, 2, 4, 2))
FEATURES, HIDDEN = sized((128, 2048), (6, 37))
WINDOW, GATED = sized((300, 5504), (11, 45))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_with_residual_match_reference(device, dtype, norm):
    x, r = (random_tensor(device, SEQUENCE, BATCH, HIDDEN + i) for i in (0, 1))
    w, b = random_tensor(device, HIDDEN), random_tensor(device, HIDDEN) + 1
    if norm == "rms":
        agree(
            lambda x, r, w, **o: rms_norm(x, w, eps=1e-5, residual=r, **o),
            (x, r[..., :HIDDEN], w),
            dtype,
        )
    else:
        agree(
            lambda x, r, w, b, **o: layer_norm(x, w, b, eps=1e-5, residual=r, **o),
            (x, r[..., :HIDDEN], w, b),
            dtype,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_matches_reference(device, dtype, interleaved):
    cos, sin = rotary_table(torch.arange(SEQUENCE, device=device), dim=FEATURES)
    agree(
        partial(apply_rope, cos=cos, sin=sin, interleaved=interleaved),
        (random_tensor(device, SEQUENCE, BATCH, HEADS, FEATURES),),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_activations_match_reference(device, dtype, activation):
    agree(
        lambda x, **o: gated(x, activation, **o),
        (random_tensor(device, SEQUENCE, BATCH, 2 * GATED),),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_drops_the_same_values_as_reference(device, dtype):
    x = random_tensor(device, SEQUENCE, BATCH, HIDDEN).to(dtype)
    options = {
        "rate": 0.1,
        "key": 5,
        "sample_ids": torch.tensor([8, 3], device=device),
        "position_ids": torch.arange(SEQUENCE, device=device),
    }
    actual = dropout(x, implementation="triton", **options)
    assert torch.equal(actual, dropout(x, implementation="reference", **options))
    on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    assert torch.equal(actual.cpu(), dropout(x.cpu(), **on_cpu)), "dropout depends on the device"
    dropped = (actual == 0).float().mean().item()
    assert 0.05 < dropped < 0.15


ATTENTION = {
    "causal": {},
    "window": {"window": WINDOW},
    "documents": {"documents": True},
    "bidirectional": {"causal": False},
    "places": {"query_start": 3 * WINDOW, "key_start": WINDOW // 3, "window": WINDOW},
    "ahead": {
        "query_start": 0,
        "key_start": SEQUENCE // 4,
        "documents": True,
        "query_documents": True,
    },
    "dropout": {"dropout": True},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_matches_reference(device, dtype, case):
    options = dict(ATTENTION[case])
    if options.pop("documents", False):
        rows = torch.arange(SEQUENCE, device=device)
        options["document_ids"] = torch.stack(
            [rows // (SEQUENCE // 3), (rows + 9) // (SEQUENCE // 7)], -1
        )
        if options.pop("query_documents", False):
            options["query_document_ids"] = options["document_ids"].flip(1)
    if options.pop("dropout", False):
        ids = torch.tensor([8, 3], device=device)
        drop = AttentionDropout(rate=0.3, key=5, sample_ids=ids, head_offset=2)
        # No kernel supports dropout: the same code in fp64 is the reference.
        agree(
            lambda q, k, v, implementation: attention(q, k, v, dropout=drop)[0],
            [
                random_tensor(device, sized(256, 20), BATCH, n, FEATURES)
                for n in (HEADS, GROUPS, GROUPS)
            ],
            dtype,
        )
        return
    agree(
        lambda q, k, v, **o: attention(q, k, v, **options, **o)[0],
        [random_tensor(device, SEQUENCE, BATCH, n, FEATURES) for n in (HEADS, GROUPS, GROUPS)],
        dtype,
    )


def packed_rows(device, length):
    """Return the attention arguments of two rows of packed documents."""
    rows = torch.arange(length)
    ids = torch.stack([rows // (length // 3), (rows + 9) // (length // 7)], -1)
    lengths = torch.cat([ids[:, row].unique_consecutive(return_counts=True)[1] for row in (0, 1)])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return {
        "document_ids": ids.to(device),
        "cu_seqlens": bounds.to(device),
        "max_seqlen": longest,
    }


@pytest.fixture
def fused_calls(monkeypatch):
    """Record the calls of the fused kernels."""
    calls = []

    def recorded(kernel):
        def call(*arguments, **options):
            calls.append(kernel.__name__)
            return kernel(*arguments, **options)

        return call

    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(fused, name, recorded(getattr(fused, name)))
    return calls


#: By name: (features, queries, keys, kernel on Hopper, attention options).
FUSED = {
    "causal 128": (128, 2048, 2048, "cuDNN", {}),
    "causal 64": (64, 1000, 1000, "cuDNN", {}),
    "whole 128": (128, 2048, 2048, "cuDNN", {"causal": False}),
    "odd heads": (100, 513, 513, "cuDNN", {}),
    "causal 192": (192, 2048, 2048, "FlashAttention-2", {}),
    "causal 256": (256, 513, 513, "FlashAttention-2", {}),
    "whole 256": (256, 513, 700, "FlashAttention-2", {"causal": False}),
    "window": (128, 1000, 1000, "FlashAttention-2", {"window": 200}),
    "documents": (128, 1000, 1000, "FlashAttention-2", {"documents": True}),
    "odd documents": (92, 700, 700, "FlashAttention-2", {"documents": True, "window": 90}),
    "last of more keys": (128, 300, 1000, "FlashAttention-2", {}),
    "among more keys": (64, 300, 1000, "FlashAttention-2", {"query_start": 411, "window": 200}),
    "after the keys": (64, 300, 500, "FlashAttention-2", {"query_start": 450, "window": 600}),
}


@pytest.mark.machine
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", FUSED)
def test_fused_attention_kernels_match_fp64(device, fused_calls, case, deterministic):
    """Output, log-sum-exp and gradients match fp64; the op chooses the fused kernels. Deterministic
    runs repeat their gradients bit for bit."""
    features, queries, keys, kernel, options = FUSED[case]
    options = dict(options)
    if options.pop("documents", False):
        options |= packed_rows(device, queries)
    query, key, value = (
        random_tensor(device, length, BATCH, heads, features).bfloat16()
        for length, heads in ((queries, HEADS), (keys, GROUPS), (keys, GROUPS))
    )
    grad = random_tensor(device, queries, BATCH, HEADS, features).bfloat16()

    def run(dtype, implementation):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (query, key, value)]
        out, lse = attention(*leaves, implementation=implementation, **options)
        return [out, lse, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    reference = run(torch.float64, "reference")
    torch.use_deterministic_algorithms(deterministic)
    try:
        mask = Mask(**options)
        if torch.cuda.get_device_capability(device) >= (9, 0):
            expected_kernel = "FlashAttention-2" if deterministic else kernel
            assert fused.kernel_of(query, key, mask) == expected_kernel
        actual = run(torch.bfloat16, None)
        repeated = run(torch.bfloat16, None) if deterministic else actual
    finally:
        torch.use_deterministic_algorithms(False)
    assert fused_calls == ["attention_forward", "attention_backward"] * (1 + deterministic)
    errors = [relative_error(*pair) for pair in zip(actual, reference, strict=True)]
    assert max(errors) <= BOUND[torch.bfloat16], errors
    differ = [not torch.equal(*pair) for pair in zip(actual, repeated, strict=True)]
    assert not any(differ), differ


@pytest.mark.machine
@pytest.mark.parametrize("window", [None, WINDOW])
def test_fused_attention_kernels_match_fp64_blockwise(device, fused_calls, window):
    """The rank with the middle of the row attends to all keys, like in ring attention."""
    sharding, features = SequenceSharding.of(1024, 2), 128
    layout = SequenceLayout.make(sharding, 1, rows=BATCH, device=device)
    blocks = layout.blocks(None, window)
    shapes = [(1024, BATCH, n, features) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    inputs = [random_tensor(device, *shape).bfloat16() for shape in shapes]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        query, key, value, grad = (x.to(dtype) for x in inputs)
        query, grad = query[layout.columns], grad[layout.columns]
        out, lse = blockwise.forward(query, key, value, blocks, scale=0.1, window=window)
        tensors = (grad, query, key, value, out.to(dtype), lse)
        grads = blockwise.backward(*tensors, blocks, scale=0.1, window=window)
        results.append([out, lse, *grads])
    assert len(fused_calls) == 2 * len(blocks), "another kernel ran"
    errors = [relative_error(*pair) for pair in zip(*results, strict=True)]
    assert max(errors) <= BOUND[torch.bfloat16], errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_attention_with_sinks_matches_reference(device, dtype, window):
    shapes = [(SEQUENCE, BATCH, n, FEATURES) for n in (HEADS, GROUPS, GROUPS)]
    agree(
        lambda q, k, v, sinks, **o: attention(q, k, v, sinks=sinks, window=window, **o)[0],
        [
            *(random_tensor(device, *shape) for shape in shapes),
            torch.linspace(-1, 6, HEADS, device=device),
        ],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("features", sized([64, 96, 192, 256, 272], [136]))
def test_attention_of_other_head_sizes_matches_reference(device, dtype, window, features):
    """Latent attention has head size 192, some models 256; 272 needs tiles of 512."""
    agree(
        lambda q, k, v, **o: attention(q, k, v, window=window, **o)[0],
        [
            random_tensor(device, sized(1000, 37), BATCH, n, features)
            for n in (HEADS, GROUPS, GROUPS)
        ],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", sized([(2049, 2049), (1000, 1777), (1, 700)], [(70, 70)]))
def test_attention_of_unsorted_documents_matches_reference(device, dtype, lengths):
    """Tiles of other documents are skipped in any order of documents."""
    queries, keys = lengths
    ids = torch.randint(-2, 2, (keys, BATCH), generator=torch.Generator().manual_seed(keys))
    ids = ids.repeat_interleave(97, 0)[:keys].to(device)
    agree(
        lambda q, k, v, **o: attention(q, k, v, document_ids=ids, **o)[0],
        [
            random_tensor(device, length, BATCH, heads, FEATURES)
            for length, heads in ((queries, HEADS), (keys, GROUPS), (keys, GROUPS))
        ],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_more_rows_than_the_grid_limit(device, dtype):
    """A grid has at most 65,535 programs in every dimension except the first."""
    rows = sized(70_000, 5)
    agree(attention_output, [random_tensor(device, 3, rows, 1, 16 + i) for i in range(3)], dtype)


def attention_output(q, k, v, **options):
    """Return the output of attention with head size 16."""
    return attention(*(x[..., :16] for x in (q, k, v)), **options)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_blockwise_attention_matches_reference(device, dtype, window):
    sharding = SequenceSharding.of(SEQUENCE, 2)
    documents = [
        [0, SEQUENCE // 3, 2 * SEQUENCE // 3, SEQUENCE],
        [0, SEQUENCE // 7 + 10, SEQUENCE],
    ]
    shapes = [(SEQUENCE, BATCH, n, FEATURES) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    inputs = [random_tensor(device, *shape).to(dtype) for shape in shapes]
    row_indices = torch.tensor(sharding.row_indices(1), device=device)
    runs = []
    for kind in (dtype, torch.float64):  # the kernel, and the reference in fp64
        query, key, value, grad = (x.to(kind) for x in inputs)
        query, grad, state, plans = query[row_indices], grad[row_indices], None, []
        for key_rank in range(sharding.size):
            blocks = attention_blocks(
                sharding.runs(1),
                sharding.runs(key_rank),
                rows=BATCH,
                documents=documents,
                window=window,
            )
            key_rows = torch.tensor(sharding.row_indices(key_rank), device=device)
            plans.append((blocks, key[key_rows], value[key_rows]))
            state = blockwise.forward(
                query, *plans[-1][1:], blocks, scale=0.1, window=window, into=state
            )
        out, lse = blockwise.finish(*state, random_tensor(device, HEADS), dtype=kind)
        runs.append([out, lse])
        for blocks, *pair in plans:
            arguments = (grad, query, *pair, out, lse, blocks)
            runs[-1] += blockwise.backward(*arguments, scale=0.1, window=window)
    errors = [relative_error(actual, expected) for actual, expected in zip(*runs, strict=True)]
    assert max(errors) <= BOUND[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_cross_entropy_matches_reference(device, dtype):
    tokens, vocabulary = sized((4096, 32000), (11, 2100))
    targets = torch.randint(0, vocabulary - 7, (tokens,), device=device)
    weights = torch.rand(tokens, device=device)
    hidden, weight = (random_tensor(device, n, sized(512, 7)) for n in (tokens, vocabulary))

    def loss(hidden, weight, **options):
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            weights.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32),
            valid_columns=vocabulary - 7,
            **options,
        )[0]

    agree(loss, (hidden, weight * 0.05), dtype)


@pytest.mark.machine
@pytest.mark.parametrize("overwrite", [True, False])
def test_weight_gradients_are_not_rounded_to_bf16(device, overwrite):
    left, right = (
        random_tensor(device, 512, 4096).bfloat16(),
        random_tensor(device, 4096, 384).bfloat16(),
    )
    total = random_tensor(device, 512, 384)
    expected = left.double() @ right.double() + (0.0 if overwrite else total.double())
    add_product_(total, left, right, overwrite=overwrite)
    assert relative_error(total, expected) < 2e-5, "bf16 would be 4e-3"

# SPDX-License-Identifier: Apache-2.0
"""Attention by torch's fused CUDA kernels.

On a CPU the tests cover the choice of the kernel, calls by the operators' schemas, and the use of
their outputs; on a GPU they compare the values of the kernels with fp64.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron.core import Group
from megatron.core.context_parallel import SequenceLayout, SequenceSharding, blockwise
from megatron.core.ops import attention as ops_attention
from megatron.core.ops.attention import Mask, attention, explain, fused
from megatron.core.transformer.attention import CoreAttention
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.gpu_agreement import BOUND, random_tensor

CUDA, META = torch.device("cuda", 0), torch.device("meta")
LENGTH, BATCH, HEADS, GROUPS, FEATURES = 40, 3, 6, 2, 16
#: Document boundaries of each row.
DOCUMENTS = ((0, 7, 40), (0, 40), (0, 20, 21, 40))
CU_SEQLENS = torch.tensor([0, 7, 40, 80, 100, 101, 120], dtype=torch.int32)
LONGEST = 40


def document_ids():
    rows = [torch.arange(len(r) - 1).repeat_interleave(torch.tensor(r).diff()) for r in DOCUMENTS]
    return torch.stack(rows, 1)  # [s, b]


def packed():
    return {"document_ids": document_ids(), "cu_seqlens": CU_SEQLENS, "max_seqlen": LONGEST}


@pytest.fixture
def hopper(monkeypatch):
    """Pretend to have a GPU that supports cuDNN attention and FlashAttention-2."""
    monkeypatch.setattr(fused, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "_has_cudnn", lambda: True)


def inputs(features=FEATURES, dtype=torch.float64, queries=LENGTH, keys=LENGTH):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(length, BATCH, heads, features, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for length, heads in ((queries, HEADS), (keys, GROUPS), (keys, GROUPS))
    ]


#: By name: (head size, number of queries, expected kernel, mask options).
CALLS = {
    "causal": (64, LENGTH, "cuDNN", {}),
    "not causal": (64, LENGTH, "cuDNN", {"causal": False}),
    "odd heads": (20, LENGTH, "cuDNN", {}),
    "wide heads": (192, LENGTH, "FlashAttention-2", {}),
    "window": (64, LENGTH, "FlashAttention-2", {"window": 8}),
    "documents": (64, LENGTH, "FlashAttention-2", packed()),
    "odd documents": (100, LENGTH, "FlashAttention-2", packed() | {"window": 5}),
    "last queries": (64, 9, "FlashAttention-2", {}),
    "queries within keys": (64, 9, "FlashAttention-2", {"query_start": 13}),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_match_the_operator_schemas(hopper, monkeypatch, case):
    """Run torch's shape functions on meta tensors."""
    features, queries, kernel, options = CALLS[case]
    as_on_cuda = fused.refusals
    monkeypatch.setattr(fused, "refusals", lambda _, *a, **k: as_on_cuda(CUDA, *a, **k))
    query = torch.empty(queries, BATCH, HEADS, features, device=META, dtype=torch.bfloat16)
    key, value = query.new_empty(2, LENGTH, BATCH, GROUPS, features)
    tensors = {name: x.to(META) for name, x in options.items() if isinstance(x, torch.Tensor)}
    mask = Mask(**options | tensors)
    assert fused.kernel_of(query, key, mask) == kernel
    out, lse = fused.attention_forward(query, key, value, None, 0.1, mask)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == ((BATCH, HEADS, queries), torch.float32)
    assert out.is_contiguous()
    arguments = (torch.empty_like(out), query, key, value, out, lse)
    grads = fused.attention_backward(*arguments, scale=0.1, mask=mask)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    sums, _ = fused.attention_forward(query, key, value, None, 0.1, mask, dtype=torch.float32)
    assert sums.dtype == torch.float32


class FakeOperators:
    """Formulas in fp64 that replace the operators, with their documented conventions.

    Args:
        monkeypatch: replaces torch's operators.
        cudnn: whether cuDNN is the chosen kernel.
    """

    def __init__(self, monkeypatch, *, cudnn):
        self.calls = []
        monkeypatch.setattr(fused, "refusals", lambda *_, **__: {"cuDNN": "" if cudnn else "no"} | {
            "FlashAttention-2": ""})  # fmt: skip
        for name in (
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
            "_flash_attention_forward",
            "_flash_attention_backward",
        ):
            packet = SimpleNamespace(default=getattr(self, name))
            monkeypatch.setattr(torch.ops.aten, name, packet)

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, compute_lse, dropout, causal, debug, *, scale
    ):
        assert (bias, compute_lse, dropout, debug) == (None, True, 0.0, False)
        self.calls.append("cuDNN forward")
        out, lse = banded(
            *(x.transpose(1, 2) for x in (q, k, v)), scale, None, 0 if causal else None
        )
        return out.transpose(1, 2), lse.unsqueeze(-1), *[None] * 7

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, queries, keys, dropout,
        causal, *, scale,
    ):  # fmt: skip
        assert (bias, cum_q, cum_k, queries, keys, dropout) == (None, None, None, LENGTH, LENGTH, 0)
        assert lse.is_contiguous()
        self.calls.append("cuDNN backward")
        tensors = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        grads = banded_gradients(*tensors, lse.squeeze(-1), scale, None, 0 if causal else None)
        return [x.transpose(1, 2) for x in grads]

    def _flash_attention_forward(
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, **window
    ):
        assert (dropout, debug, q.shape[-1] % 8) == (0.0, False, 0)
        self.calls.append("FlashAttention-2 forward")
        band = self._band(causal, **window)
        if cum_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return *banded(q, k, v, scale, *band), None, None, None
        outputs = [
            banded(*(x[None] for x in document), scale, *band)
            for document in self._split(cum_q, q, k, v)
        ]
        assert max_q == max_k >= int(cum_q.diff().max())
        out, lse = torch.cat([p[0][0] for p in outputs]), torch.cat([p[1][0] for p in outputs], 1)
        return out, lse, None, None, None

    def _flash_attention_backward(
        self, grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused,
        *, scale, **window,
    ):  # fmt: skip
        assert dropout == 0.0
        assert lse.is_contiguous()
        self.calls.append("FlashAttention-2 backward")
        band, tensors = self._band(causal, **window), (grad, q, k, v, out)
        if cum_q is None:
            return banded_gradients(*tensors, lse, scale, *band)
        rows = zip(self._split(cum_q, *tensors), self._split(cum_q, lse.t()), strict=True)
        gradients = [
            banded_gradients(*(x[None] for x in document), document_lse.t()[None], scale, *band)
            for document, (document_lse,) in rows
        ]
        return [torch.cat([x[0] for x in grads]) for grads in zip(*gradients, strict=True)]

    @staticmethod
    def _band(causal, *, window_size_left, window_size_right):
        assert window_size_left is None or window_size_left >= 0, "a negative size means no bound"
        assert window_size_right is None or window_size_right >= 0, "a negative size means no bound"
        return window_size_left, 0 if causal else window_size_right

    @staticmethod
    def _split(bounds, *tensors):
        return [[x[a:b] for x in tensors] for a, b in pairwise(bounds.tolist())]


def banded_logits(q, k, scale, left, right):
    """Return logits [b, n, s_q, s_k] with a band aligned to the last query and key."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
    query_positions = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = query_positions - torch.arange(k.shape[1])
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= False if left is None else distance > left
    hidden |= False if right is None else -distance > right
    return logits.masked_fill(hidden, float("-inf"))


def banded(q, k, v, scale, left, right):
    """Return (out [b, s_q, n, d], lse [b, n, s_q])."""
    logits = banded_logits(q, k, scale, left, right)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bnqk,bknd->bqnd", logits.softmax(-1), v), logits.logsumexp(-1)


def banded_gradients(grad, q, k, v, out, lse, scale, left, right):
    """Return (dq, dk, dv) from the out and lse over all keys."""
    weights = (banded_logits(q, k, scale, left, right) - lse[..., None]).exp()
    ratio = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(ratio, 2) for x in (k, v))
    delta = (grad * out).sum(-1).transpose(1, 2)[..., None]  # [b, n, s_q, 1]
    grad_logits = weights * (torch.einsum("bqnd,bknd->bnqk", grad, values) - delta) * scale
    d_query = torch.einsum("bnqk,bknd->bqnd", grad_logits, keys)
    pair = ("bnqk,bqnd->bknd", grad_logits, q), ("bnqk,bqnd->bknd", weights, grad)
    d_pair = [torch.einsum(*terms).unflatten(2, (-1, ratio)).sum(3) for terms in pair]
    return d_query, *d_pair


#: By name: (head size, number of queries, whether cuDNN is chosen, attention options).
RESULTS = {
    "cuDNN causal": (16, LENGTH, True, {}),
    "cuDNN, not causal": (20, LENGTH, True, {"causal": False}),
    "flash causal": (20, LENGTH, False, {}),
    "flash, not causal": (16, LENGTH, False, {"causal": False}),
    "window": (16, LENGTH, False, {"window": 6}),
    "window, not causal": (16, LENGTH, False, {"window": 6, "causal": False}),
    "documents": (20, LENGTH, False, packed()),
    "documents, window": (16, LENGTH, False, packed() | {"window": 6}),
    "last queries": (16, 9, False, {}),
    "queries within keys": (20, 9, False, {"query_start": 13, "window": 5}),
    "after the keys": (16, 9, False, {"query_start": 35, "window": 6}),
    "far from the keys' start": (16, 9, False, {"query_start": 103, "key_start": 100}),
}


@pytest.mark.parametrize("case", RESULTS)
def test_fused_attention_matches_the_reference(monkeypatch, case):
    features, queries, cudnn, options = RESULTS[case]
    expected_inputs = inputs(features, queries=queries)
    grad_out = torch.randn(queries, BATCH, HEADS, features).double()
    out, lse = attention(*expected_inputs, implementation="reference", **options)
    out.backward(grad_out)
    fake_operators = FakeOperators(monkeypatch, cudnn=cudnn)
    tensors = inputs(features, queries=queries)
    fused_out, fused_lse = attention(*tensors, implementation="fused", **options)
    fused_out.backward(grad_out)
    kernel = "cuDNN" if cudnn else "FlashAttention-2"
    assert fake_operators.calls == [f"{kernel} forward", f"{kernel} backward"]
    assert_close_by_metric("out", fused_out, out)
    assert_close_by_metric("lse", fused_lse, lse)
    for name, actual, expected in zip(
        ("query", "key", "value"), tensors, expected_inputs, strict=True
    ):
        assert_close_by_metric(name, actual.grad, expected.grad)
    with torch.no_grad():
        inference_out, _ = attention(*tensors, implementation="fused", **options)
    assert torch.equal(inference_out, fused_out)
    assert len(fake_operators.calls) == 3


@pytest.mark.parametrize("window", [None, 11])
def test_ring_attention_blocks_use_fused_kernels(monkeypatch, window):
    """The gradients of each block use the log-sum-exp over all blocks."""
    sharding = SequenceSharding.of(LENGTH, 2)
    layout = SequenceLayout.make(sharding, 1, rows=BATCH)
    positions = layout.columns
    options = {"scale": 0.2, "window": window}
    results = []
    for uses_fake_operators in (False, True):
        query, key, value = (x.detach() for x in inputs())
        query, grad = query[positions], torch.ones(len(positions), BATCH, HEADS, FEATURES).double()
        fake_operators = FakeOperators(monkeypatch, cudnn=False) if uses_fake_operators else None
        blocks = layout.blocks(None, window)
        out, lse = blockwise.forward(query, key, value, blocks, **options)
        grads = blockwise.backward(grad, query, key, value, out, lse, blocks, **options)
        results.append((out, lse, *grads))
    assert len(blocks) > 1
    assert fake_operators.calls == ["FlashAttention-2 forward"] * len(blocks) + [
        "FlashAttention-2 backward"
    ] * len(blocks)
    for name, expected, actual in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert_close_by_metric(name, actual, expected)


#: By name: (mask options, changes of the call, words of the reason).
CASES = {
    "documents": ({"document_ids": torch.zeros(LENGTH, BATCH).int()}, {}, "documents"),
    "documents of some queries": (packed() | {"query_start": 3}, {"queries": 9}, "documents"),
    "fp32": ({}, {"dtype": torch.float32}, "float32"),
    "wide heads": ({}, {"features": 264}, "heads of 264"),
    "before the keys": ({"query_start": -3}, {}, "rows without keys"),
    "after the window": ({"query_start": 30, "window": 30}, {}, "rows without keys"),
    "sinks": ({}, {"sinks": True}, "sinks"),
    "dropout": ({}, {"dropout": True}, "dropout"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals_name_the_unsupported_option(hopper, case):
    options, changes, words = CASES[case]
    sizes = {"features": 64, "dtype": torch.bfloat16, "queries": LENGTH} | changes
    unsupported = {name: changes.get(name) for name in ("sinks", "dropout")}
    query, key = (
        torch.empty(s, BATCH, n, sizes["features"], device=META, dtype=sizes["dtype"])
        for s, n in ((sizes["queries"], HEADS), (LENGTH, GROUPS))
    )
    option_names = fused.options_of(query, key, Mask(**options), **unsupported)
    reasons = fused.refusals(CUDA, sizes["dtype"], sizes["features"], options=option_names)
    assert fused.kernel_name(reasons) is None
    assert all(words in reason for reason in reasons.values())


def test_explain_names_kernel_and_refusals_of_faster_kernels(hopper, monkeypatch):
    def explain_options(features, *options):
        return explain(CUDA, torch.bfloat16, features, options=options)

    assert explain_options(128) == "torch's fused kernels (cuDNN)"
    for features, option in ((192, None), (128, "a window"), (64, "documents")):
        line = explain_options(features, *([option] if option else []))
        assert "(FlashAttention-2; not cuDNN" in line
        assert (option or "192").removeprefix("a ") in line
    assert "Triton" in explain_options(128, "sinks")
    assert "no sinks" in explain_options(128, "sinks")
    assert explain_options(128, "attention dropout").startswith("plain")
    monkeypatch.setattr(fused, "device_capability", lambda device: (8, 6))
    assert "older than Hopper" in explain_options(128)
    assert "Triton" in explain_options(200)
    assert "200 on compute capability 8.6" in explain_options(200)
    assert "FlashAttention-2;" in explain_options(256)
    monkeypatch.setattr(fused, "device_capability", lambda device: (7, 5))
    assert "older than Ampere" in explain_options(128)


def test_explain_names_plain_torch_if_triton_cannot_run(hopper, monkeypatch):
    line = explain(CUDA, torch.float64, 128)
    assert line.startswith("plain torch (")
    assert "no float64" in line
    assert explain(CUDA, torch.float32, 128).startswith("Megatron's Triton kernel (")
    monkeypatch.setattr(ops_attention, "triton_is_installed", lambda: False)
    assert explain(CUDA, torch.float32, 128).startswith("plain torch (")


def test_explain_refuses_unknown_options(hopper):
    with pytest.raises(ValueError, match=r"\['a windw'\] are unknown; use .*'a window'"):
        explain(CUDA, torch.bfloat16, 128, options=["a window", "a windw"])


def test_deterministic_runs_use_deterministic_kernels(hopper):
    torch.use_deterministic_algorithms(True)
    try:
        line = explain(CUDA, torch.bfloat16, 128)
        assert "(FlashAttention-2; not cuDNN: its backward is not deterministic" in line
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert "Triton" in explain(CUDA, torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)


def test_layers_pass_document_boundaries_to_attention():
    """The layout computes document boundaries once for all layers."""
    calls = []

    def recorded(query, *_, **options):
        calls.append(options)
        return query, None

    backend = SimpleNamespace(attention=recorded, batch_invariant=False)
    context = SimpleNamespace(group=Group.single("cp"))
    layer = CoreAttention(
        backend=backend, layer=None, context=context, scale=1.0, softcap=None, window=None,
        rate=0.0, dropout_key=0, head_offset=0,
    )  # fmt: skip
    sharding, ids = SequenceSharding.of(LENGTH, 1), document_ids().t()
    packed_layout = SequenceLayout.make(
        sharding, 0, rows=BATCH, document_ids=ids, masks_by_ids=True
    )
    for layout in (packed_layout, packed_layout, SequenceLayout.of_rows(LENGTH, document_ids=ids)):
        layer(*(x.detach() for x in inputs()), layout)
    call, second_call, call_by_ids = calls
    assert torch.equal(call["cu_seqlens"], CU_SEQLENS)
    assert torch.equal(call["document_ids"], document_ids())
    assert call["max_seqlen"] == LONGEST
    assert second_call["cu_seqlens"] is call["cu_seqlens"]
    assert call_by_ids["cu_seqlens"] is call_by_ids["max_seqlen"] is None


def test_fused_implementation_on_cpu_is_refused():
    with pytest.raises(ValueError, match="on cpu"):
        attention(*inputs(), implementation="fused")


def test_cu_seqlens_without_document_ids_are_refused():
    with pytest.raises(ValueError, match="document_ids"):
        attention(*inputs(), cu_seqlens=CU_SEQLENS)
    with pytest.raises(ValueError, match="int32"):
        attention(*inputs(), document_ids=document_ids(), cu_seqlens=CU_SEQLENS.long())


# --- values of the kernels, on a GPU


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


@pytest.mark.gpu
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
        random_tensor(device, length, 2, heads, features).bfloat16()
        for length, heads in ((queries, 16), (keys, 4), (keys, 4))
    )
    grad = random_tensor(device, queries, 2, 16, features).bfloat16()

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


@pytest.mark.gpu
@pytest.mark.machine
@pytest.mark.parametrize("window", [None, 300])
def test_fused_attention_kernels_match_fp64_blockwise(device, fused_calls, window):
    """The rank with the middle of the row attends to all keys, like in ring attention."""
    sharding, features = SequenceSharding.of(1024, 2), 128
    layout = SequenceLayout.make(sharding, 1, rows=2, device=device)
    blocks = layout.blocks(None, window)
    shapes = [(1024, 2, n, features) for n in (16, 4, 4, 16)]
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

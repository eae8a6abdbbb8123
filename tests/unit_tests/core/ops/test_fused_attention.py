# SPDX-License-Identifier: Apache-2.0
"""Attention by torch's fused CUDA kernels, as far as a CPU can show it: when they are taken, that
they are called as their schemas ask, and that what they return is put in its place.

Their values are held to fp64 in tests/gpu.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding, blockwise
from megatron.core.ops import attention as ops_attention
from megatron.core.ops.attention import Mask, attention, explain, fused
from megatron.core.process_groups import Group
from megatron.core.transformer.attention import CoreAttention
from tests.support.closeness import assert_close_by_metric

CUDA, META = torch.device("cuda", 0), torch.device("meta")
LENGTH, BATCH, HEADS, GROUPS, FEATURES = 40, 3, 6, 2, 16
#: Where the documents of each row begin and end.
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
    """A GPU on which both kinds of kernels could run."""
    monkeypatch.setattr(fused, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "_has_cudnn", lambda: True)


def inputs(features=FEATURES, dtype=torch.float64, queries=LENGTH, keys=LENGTH):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(length, BATCH, heads, features, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for length, heads in ((queries, HEADS), (keys, GROUPS), (keys, GROUPS))
    ]


#: By name: (heads' features, queries, the kernel, the mask).
CALLS = {
    "causal": (64, LENGTH, "cuDNN", {}),
    "whole": (64, LENGTH, "cuDNN", {"causal": False}),
    "odd heads": (20, LENGTH, "cuDNN", {}),
    "wide heads": (192, LENGTH, "FlashAttention-2", {}),
    "window": (64, LENGTH, "FlashAttention-2", {"window": 8}),
    "documents": (64, LENGTH, "FlashAttention-2", packed()),
    "odd documents": (100, LENGTH, "FlashAttention-2", packed() | {"window": 5}),
    "last of more keys": (64, 9, "FlashAttention-2", {}),
    "among more keys": (64, 9, "FlashAttention-2", {"query_start": 13}),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_as_the_operators_schemas_ask(hopper, monkeypatch, case):
    """On tensors without values, which torch's own shape functions are run for."""
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


class StandIns:
    """The operators' equations in fp64, by formula, with the conventions of their documentation.

    Args:
        monkeypatch: puts them in the place of torch's.
        cudnn: whether cuDNN is taken.
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
        parts = [
            banded(*(x[None] for x in part), scale, *band) for part in self._cut(cum_q, q, k, v)
        ]
        assert max_q == max_k >= int(cum_q.diff().max())
        out, lse = torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], 1)
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
        rows = zip(self._cut(cum_q, *tensors), self._cut(cum_q, lse.t()), strict=True)
        parts = [
            banded_gradients(*(x[None] for x in part), part_lse.t()[None], scale, *band)
            for part, (part_lse,) in rows
        ]
        return [torch.cat([x[0] for x in grads]) for grads in zip(*parts, strict=True)]

    @staticmethod
    def _band(causal, *, window_size_left, window_size_right):
        assert window_size_left is None or window_size_left >= 0, "it would be no bound"
        assert window_size_right is None or window_size_right >= 0, "it would be no bound"
        return window_size_left, 0 if causal else window_size_right

    @staticmethod
    def _cut(bounds, *tensors):
        return [[x[a:b] for x in tensors] for a, b in pairwise(bounds.tolist())]


def banded_logits(q, k, scale, left, right):
    """Logits [b, n, s_q, s_k] whose band is aligned to the last query and the last key."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
    places = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = places - torch.arange(k.shape[1])
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
    """Return (dq, dk, dv) by the complete out and lse."""
    weights = (banded_logits(q, k, scale, left, right) - lse[..., None]).exp()
    ratio = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(ratio, 2) for x in (k, v))
    delta = (grad * out).sum(-1).transpose(1, 2)[..., None]  # [b, n, s_q, 1]
    grad_logits = weights * (torch.einsum("bqnd,bknd->bnqk", grad, values) - delta) * scale
    d_query = torch.einsum("bnqk,bknd->bqnd", grad_logits, keys)
    pair = ("bnqk,bqnd->bknd", grad_logits, q), ("bnqk,bqnd->bknd", weights, grad)
    d_pair = [torch.einsum(*terms).unflatten(2, (-1, ratio)).sum(3) for terms in pair]
    return d_query, *d_pair


#: By name: (features, queries, whether cuDNN, what attention has).
RESULTS = {
    "cuDNN causal": (16, LENGTH, True, {}),
    "cuDNN whole": (20, LENGTH, True, {"causal": False}),
    "flash causal": (20, LENGTH, False, {}),
    "flash whole": (16, LENGTH, False, {"causal": False}),
    "window": (16, LENGTH, False, {"window": 6}),
    "window without order": (16, LENGTH, False, {"window": 6, "causal": False}),
    "documents": (20, LENGTH, False, packed()),
    "documents, window": (16, LENGTH, False, packed() | {"window": 6}),
    "last of more keys": (16, 9, False, {}),
    "among more keys": (20, 9, False, {"query_start": 13, "window": 5}),
    "after the keys": (16, 9, False, {"query_start": 35, "window": 6}),
    "far from the keys' start": (16, 9, False, {"query_start": 103, "key_start": 100}),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_are_those_of_the_reference(monkeypatch, case):
    features, queries, cudnn, options = RESULTS[case]
    expected_inputs = inputs(features, queries=queries)
    grad_out = torch.randn(queries, BATCH, HEADS, features).double()
    out, lse = attention(*expected_inputs, implementation="reference", **options)
    out.backward(grad_out)
    stand_ins = StandIns(monkeypatch, cudnn=cudnn)
    tensors = inputs(features, queries=queries)
    fused_out, fused_lse = attention(*tensors, **options)
    fused_out.backward(grad_out)
    kernel = "cuDNN" if cudnn else "FlashAttention-2"
    assert stand_ins.calls == [f"{kernel} forward", f"{kernel} backward"]
    assert_close_by_metric("out", fused_out, out)
    assert_close_by_metric("lse", fused_lse, lse)
    for name, mine, true in zip(("query", "key", "value"), tensors, expected_inputs, strict=True):
        assert_close_by_metric(name, mine.grad, true.grad)
    with torch.no_grad():
        again, _ = attention(*tensors, **options)
    assert torch.equal(again, fused_out)
    assert len(stand_ins.calls) == 3


@pytest.mark.parametrize("window", [None, 11])
def test_blocks_of_a_ring_take_them_and_merge(monkeypatch, window):
    """Each block's gradients go by the log-sum-exp over all blocks."""
    cut = SequenceSharding.of(LENGTH, 2)
    layout = SequenceLayout.make(cut, 1, rows=BATCH)
    place = layout.columns
    options = {"scale": 0.2, "window": window}
    results = []
    for uses_stand_ins in (False, True):
        query, key, value = (x.detach() for x in inputs())
        query, grad = query[place], torch.ones(len(place), BATCH, HEADS, FEATURES).double()
        stand_ins = StandIns(monkeypatch, cudnn=False) if uses_stand_ins else None
        blocks = layout.blocks(None, window)
        out, lse = blockwise.forward(query, key, value, blocks, **options)
        grads = blockwise.backward(grad, query, key, value, out, lse, blocks, **options)
        results.append((out, lse, *grads))
    assert len(blocks) > 1
    assert stand_ins.calls == ["FlashAttention-2 forward"] * len(blocks) + [
        "FlashAttention-2 backward"
    ] * len(blocks)
    for name, true, mine in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert_close_by_metric(name, mine, true)


#: By name: (options of the mask, changes of the call, words of the reason).
CASES = {
    "documents": ({"document_ids": torch.zeros(LENGTH, BATCH).int()}, {}, "documents"),
    "documents of a part": (packed() | {"query_start": 3}, {"queries": 9}, "documents"),
    "fp32": ({}, {"dtype": torch.float32}, "float32"),
    "wide heads": ({}, {"features": 264}, "heads of 264"),
    "before the keys": ({"query_start": -3}, {}, "rows without keys"),
    "after the window": ({"query_start": 30, "window": 30}, {}, "rows without keys"),
    "sinks": ({}, {"sinks": True}, "sinks"),
    "dropout": ({}, {"dropout": True}, "dropout"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_fused_kernels_do_not_compute_is_named(hopper, case):
    options, changes, words = CASES[case]
    sizes = {"features": 64, "dtype": torch.bfloat16, "queries": LENGTH} | changes
    given = {name: changes.get(name) for name in ("sinks", "dropout")}
    query, key = (
        torch.empty(s, BATCH, n, sizes["features"], device=META, dtype=sizes["dtype"])
        for s, n in ((sizes["queries"], HEADS), (LENGTH, GROUPS))
    )
    named = fused.options_of(query, key, Mask(**options), **given)
    reasons = fused.refusals(CUDA, sizes["dtype"], sizes["features"], options=named)
    assert fused.kernel_name(reasons) is None
    assert all(words in reason for reason in reasons.values())


def test_explain_names_the_kernel_and_why_no_faster_one(hopper, monkeypatch):
    def explained(features, *options):
        return explain(CUDA, torch.bfloat16, features, options=options)

    assert explained(128) == "torch's fused kernels (cuDNN)"
    for features, option in ((192, None), (128, "a window"), (64, "documents")):
        line = explained(features, *([option] if option else []))
        assert "(FlashAttention-2; not cuDNN" in line
        assert (option or "192").removeprefix("a ") in line
    assert "Triton" in explained(128, "sinks")
    assert "no sinks" in explained(128, "sinks")
    assert explained(128, "attention dropout").startswith("plain")
    monkeypatch.setattr(fused, "_capability", lambda device: (8, 6))
    assert "older than Hopper" in explained(128)
    assert "Triton" in explained(200)
    assert "200 on compute capability 8.6" in explained(200)
    assert "FlashAttention-2;" in explained(256)
    monkeypatch.setattr(fused, "_capability", lambda device: (7, 5))
    assert "older than Ampere" in explained(128)


def test_explain_names_no_triton_kernel_where_none_runs(hopper, monkeypatch):
    line = explain(CUDA, torch.float64, 128)
    assert line.startswith("plain torch (")
    assert "no float64" in line
    assert explain(CUDA, torch.float32, 128).startswith("Megatron's Triton kernel (")
    monkeypatch.setattr(ops_attention, "triton_is_installed", lambda: False)
    assert explain(CUDA, torch.float32, 128).startswith("plain torch (")


def test_explain_refuses_options_that_it_does_not_know(hopper):
    with pytest.raises(ValueError, match=r"\['a windw'\] are unknown; use .*'a window'"):
        explain(CUDA, torch.bfloat16, 128, options=["a window", "a windw"])


def test_deterministic_runs_take_deterministic_kernels(hopper):
    torch.use_deterministic_algorithms(True)
    try:
        line = explain(CUDA, torch.bfloat16, 128)
        assert "(FlashAttention-2; not cuDNN: its backward is not deterministic" in line
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert "Triton" in explain(CUDA, torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)


def test_layers_pass_on_where_documents_begin():
    """As the layout knows it, computed once for all layers."""
    calls = []

    def recorded(query, *_, **options):
        calls.append(options)
        return query, None

    backend = SimpleNamespace(attention=recorded, batch_invariant=False)
    context = SimpleNamespace(group=Group.single("cp"))
    layer = CoreAttention(
        backend=backend, layer=None, context=context, scale=1.0, window=None, rate=0.0,
        dropout_key=0, head_offset=0,
    )  # fmt: skip
    cut, ids = SequenceSharding.of(LENGTH, 1), document_ids().t()
    known = SequenceLayout.make(cut, 0, rows=BATCH, document_ids=ids, masks_by_ids=True)
    for layout in (known, known, SequenceLayout.of_rows(LENGTH, document_ids=ids)):
        layer(*(x.detach() for x in inputs()), layout)
    first, second, by_ids = calls
    assert torch.equal(first["cu_seqlens"], CU_SEQLENS)
    assert torch.equal(first["document_ids"], document_ids())
    assert first["max_seqlen"] == LONGEST
    assert second["cu_seqlens"] is first["cu_seqlens"]
    assert by_ids["cu_seqlens"] is by_ids["max_seqlen"] is None


def test_a_forced_choice_that_does_not_apply_is_an_error():
    with pytest.raises(ValueError, match="on cpu"):
        attention(*inputs(), implementation="fused")


def test_bounds_without_documents_are_an_error():
    with pytest.raises(ValueError, match="document_ids"):
        attention(*inputs(), cu_seqlens=CU_SEQLENS)
    with pytest.raises(ValueError, match="int32"):
        attention(*inputs(), document_ids=document_ids(), cu_seqlens=CU_SEQLENS.long())

# SPDX-License-Identifier: Apache-2.0
"""Attention by torch's fused CUDA kernels, as far as a CPU can show it: when they are taken, that
they are called as their schemas ask, and that what they return is put in its place.

Their values are held to fp64 in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.ops.attention import Mask, attention, explain, fused
from tests.support.closeness import assert_close_by_metric

CUDA = torch.device("cuda", 0)
LENGTH, BATCH, HEADS, GROUPS, FEATURES = 40, 3, 6, 2, 16


@pytest.fixture
def hopper(monkeypatch):
    """A GPU on which both kinds of kernels could run."""
    monkeypatch.setattr(fused, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    fused._has_cudnn.cache_clear()
    yield
    fused._has_cudnn.cache_clear()


def inputs(features=FEATURES, dtype=torch.float64, length=LENGTH):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(length, BATCH, heads, features, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


@pytest.mark.parametrize(("features", "kernel"), [(64, "cuDNN"), (192, "FlashAttention-2")])
@pytest.mark.parametrize("causal", [True, False])
def test_calls_are_as_the_operators_schemas_ask(hopper, features, kernel, causal):
    """On tensors without values, which torch's own shape functions are run for."""
    with FakeTensorMode():
        query = torch.empty(LENGTH, BATCH, HEADS, features, device=CUDA, dtype=torch.bfloat16)
        key, value = query.new_empty(2, LENGTH, BATCH, GROUPS, features)
        assert fused.kernel_name(query.device, features) == kernel
        mask = Mask(causal=causal)
        out, lse = fused.attention_forward(query, key, value, None, 0.1, mask)
        assert (out.shape, out.dtype) == (query.shape, query.dtype)
        assert (lse.shape, lse.dtype) == ((BATCH, HEADS, LENGTH), torch.float32)
        assert out.is_contiguous()
        grads = fused.attention_backward(
            torch.empty_like(out), query, key, value, out, lse, scale=0.1, mask=mask
        )
        assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def stand_in(monkeypatch, *, cudnn):
    """Let torch's CPU kernel, which has the same equations, stand in for those of CUDA."""
    aten, calls = torch.ops.aten, []
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    monkeypatch.setattr(fused, "problem", lambda *_, **__: "")
    monkeypatch.setattr(fused, "_takes_cudnn", lambda query: cudnn)

    def cudnn_forward(q, k, v, bias, compute_lse, dropout, causal, debug, *, scale):
        assert (bias, compute_lse, dropout, debug) == (None, True, 0.0, False)
        calls.append("cudnn forward")
        out, lse = forward(q, k, v, dropout, causal, scale=scale)
        return out, lse.unsqueeze(-1), None, None, None, None, None, None, None

    def cudnn_backward(
        grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, queries, keys, dropout, causal,
        *, scale,
    ):  # fmt: skip
        assert (bias, cum_q, cum_k, queries, keys, dropout) == (None, None, None, LENGTH, LENGTH, 0)
        calls.append("cudnn backward")
        return backward(grad, q, k, v, out, lse.squeeze(-1), dropout, causal, scale=scale)

    def flash_forward(q, k, v, dropout, causal, debug, *, scale):
        assert (dropout, debug) == (0.0, False)
        calls.append("flash forward")
        out, lse = forward(q, k, v, dropout, causal, scale=scale)
        return out, lse, None, None, None, None, None, None, None

    def flash_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cum_q,
        cum_k,
        queries,
        keys,
        dropout,
        causal,
        seed,
        offset,
        *,
        scale,
    ):
        assert (cum_q, cum_k, queries, keys, dropout) == (None, None, LENGTH, LENGTH, 0.0)
        calls.append("flash backward")
        return backward(grad, q, k, v, out, lse, dropout, causal, scale=scale)

    for name, function in {
        "cudnn_attention": cudnn_forward,
        "cudnn_attention_backward": cudnn_backward,
        "flash_attention": flash_forward,
        "flash_attention_backward": flash_backward,
    }.items():
        monkeypatch.setattr(aten, f"_scaled_dot_product_{name}", function)
    return calls


@pytest.mark.parametrize("cudnn", [True, False], ids=["cuDNN", "FlashAttention-2"])
@pytest.mark.parametrize("causal", [True, False])
def test_results_are_those_of_the_reference(monkeypatch, cudnn, causal):
    expected_inputs, grad_out = inputs(), torch.randn(LENGTH, BATCH, HEADS, FEATURES).double()
    out, lse = attention(*expected_inputs, causal=causal, implementation="reference")
    out.backward(grad_out)
    calls = stand_in(monkeypatch, cudnn=cudnn)
    tensors = inputs()
    fused_out, fused_lse = attention(*tensors, causal=causal)
    fused_out.backward(grad_out)
    kernel = "cudnn" if cudnn else "flash"
    assert calls == [f"{kernel} forward", f"{kernel} backward"]
    assert_close_by_metric("out", fused_out, out)
    assert_close_by_metric("lse", fused_lse, lse)
    for name, mine, true in zip(("query", "key", "value"), tensors, expected_inputs, strict=True):
        assert_close_by_metric(name, mine.grad, true.grad)
    with torch.no_grad():
        again, _ = attention(*tensors, causal=causal)
    assert torch.equal(again, fused_out)
    assert len(calls) == 3


CASES = {
    "window": ({"window": 8}, {}, "window"),
    "documents": ({"document_ids": torch.zeros(LENGTH, BATCH).int()}, {}, "documents"),
    "fp32": ({}, {"dtype": torch.float32}, "float32"),
    "odd heads": ({}, {"features": 20}, "heads of 20"),
    "wide heads": ({}, {"features": 264}, "heads of 264"),
    "among more keys": ({"query_start": 3}, {}, "queries stand"),
    "sinks": ({}, {"sinks": True}, "sinks"),
    "dropout": ({}, {"dropout": True}, "dropout"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_fused_kernels_do_not_compute_is_named(hopper, case):
    options, changes, words = CASES[case]
    changes = {"features": 64, "dtype": torch.bfloat16, "sinks": None, "dropout": None} | changes
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key = (
            torch.empty(LENGTH, BATCH, n, changes["features"], device=CUDA, dtype=changes["dtype"])
            for n in (HEADS, GROUPS)
        )
    assert fused.problem(query, key, Mask(), sinks=None, dropout=None) == "" or not options
    reason = fused.problem(
        query, key, Mask(**options), sinks=changes["sinks"], dropout=changes["dropout"]
    )
    assert words in reason


def test_deterministic_runs_and_old_gpus_take_our_kernel(hopper, monkeypatch):
    assert explain(CUDA, torch.bfloat16, 128) == "torch's fused kernels (cuDNN)"
    assert explain(CUDA, torch.bfloat16, 192) == "torch's fused kernels (FlashAttention-2)"
    torch.use_deterministic_algorithms(True)
    try:
        assert "Triton" in explain(CUDA, torch.bfloat16, 128)
        assert "not deterministic" in explain(CUDA, torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "no sinks" in explain(CUDA, torch.bfloat16, 128, options=["sinks"])
    assert explain(CUDA, torch.bfloat16, 128, options=["attention dropout"]).startswith("plain")
    monkeypatch.setattr(fused, "_capability", lambda device: (7, 5))
    assert "older than Ampere" in explain(CUDA, torch.bfloat16, 128)


def test_a_forced_choice_that_does_not_apply_is_an_error():
    with pytest.raises(ValueError, match="on cpu"):
        attention(*inputs(), implementation="fused")

# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments raise a one-line error with the value; forced backends apply or raise."""

import pytest
import torch

from megatron.core.ops import backend_choice
from megatron.core.ops.attention import attention
from megatron.core.ops.attention import cpu as attention_chunked
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.linear_cross_entropy import chunk_statistics, linear_cross_entropy
from megatron.core.ops.recurrence.chunks import Chunks
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.swiglu import activate, gated

X = torch.ones(5, 2, 4, 6)
IDS = torch.zeros(5, 2, dtype=torch.int64)
TABLE = torch.ones(5, 3)
BAD = {
    "norm weight": (lambda: rms_norm(X, torch.ones(5), eps=1e-5), r"\(5,\) must have the shape"),
    "norm eps": (lambda: rms_norm(X, torch.ones(6), eps=-1.0), r"eps=-1\.0"),
    "norm residual": (
        lambda: rms_norm(X, torch.ones(6), eps=0.0, residual=X[:4]),
        r"residual \(4, 2, 4, 6\)",
    ),
    "layer bias": (
        lambda: layer_norm(X, torch.ones(6), torch.ones(4), eps=0.0),
        r"bias \(4,\)",
    ),
    "odd table": (lambda: rotary_table(torch.arange(3), dim=5), "dim=5 must be positive and even"),
    "wide table": (lambda: apply_rope(X, torch.ones(5, 4), torch.ones(5, 4)), "8 features"),
    "table length": (lambda: apply_rope(X[:4], TABLE, TABLE), r"cos \(5, 3\)"),
    "odd gate": (lambda: gated(X[..., :5]), r"\(5, 2, 4, 5\) must be even"),
    "gate kind": (lambda: gated(X, "relu"), "activation='relu' is unknown"),
    "activation": (lambda: activate(X, "tanh"), "kind='tanh' is unknown"),
    "heads": (lambda: attention(X, X[:, :, :3], X[:, :, :3]), "4 query heads must be a multiple"),
    "order": (lambda: attention(X, X[:3], X[:3]), "causal with 5 queries and only 3 keys"),
    "window": (lambda: attention(X, X, X, window=0), "window=0 must be at least 1"),
    "sinks": (lambda: attention(X, X, X, sinks=torch.ones(3)), r"sinks \(3,\)"),
    "documents": (lambda: attention(X, X, X, document_ids=torch.ones(5, 2)), "must be integers"),
    "documents of queries": (
        lambda: attention(X, X, X, document_ids=IDS, query_document_ids=IDS[:4]),
        r"query_document_ids \(4, 2\) torch.int64 must be integers of shape \[s_q, b\] = \(5, 2\)",
    ),
    "documents of keys": (
        lambda: attention(X, X, X, query_document_ids=IDS),
        "query_document_ids need document_ids",
    ),
    "queries elsewhere": (
        lambda: attention(X[:3], X, X, document_ids=IDS, query_start=5, key_start=2),
        "3 queries from position 5 on are not all among the 5 keys from position 2",
    ),
    "dtypes": (lambda: attention(X, X.bfloat16(), X), "one dtype"),
    "vocabulary": (
        lambda: chunk_statistics(torch.ones(3, 4), torch.arange(3), vocab_start=0, valid_columns=5),
        r"valid_columns=5 must be in \[0, 4\]",
    ),
    "targets": (
        lambda: linear_cross_entropy(
            torch.ones(3, 4), torch.ones(7, 4), torch.arange(2), torch.ones(3)
        ),
        r"targets \(2,\)",
    ),
    "implementation": (
        lambda: rms_norm(X, torch.ones(6), eps=0.0, implementation="cuda"),
        "implementation='cuda' is unknown",
    ),
    "triton fp64": (
        lambda: gated(X.double(), implementation="triton"),
        r"needs the triton package|has no float64",
    ),
    "triton on a CPU": (
        lambda: gated(X, implementation="triton"),
        r"needs the triton package|TRITON_INTERPRET=1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_is_a_one_line_error(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_chunked_attention_never_stores_all_logits(monkeypatch):
    queries, keys = 256, 256
    sizes = []
    bmm = torch.bmm

    def recording_bmm(*args, **kwargs):
        product = bmm(*args, **kwargs)
        sizes.append(product.shape)
        return product

    monkeypatch.setattr(torch, "bmm", recording_bmm)
    x = torch.randn(queries, 1, 2, 8, requires_grad=True)
    out, _ = attention(x, x, x, window=100)
    out.sum().backward()
    assert sizes
    limit = attention_chunked.QUERIES_PER_CHUNK * keys
    assert max(size[1] * size[2] for size in sizes) <= limit
    # The window skips keys that no query of the chunk sees.
    assert max(size[2] for size in sizes) < keys


def test_gated_saves_only_its_input():
    x = torch.randn(4, 10, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


class TensorOnOtherGPU:
    device, dtype = torch.device("cuda", 1), torch.float32


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_kernel_is_not_launched_on_another_gpu(implementation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend_choice, "triton_is_installed", lambda: True)
    with pytest.raises(ValueError, match=r"on cuda:1 while cuda:0 .* torch.cuda.device\(1\)"):
        backend_choice.choose(implementation, TensorOnOtherGPU(), "gated")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert backend_choice.choose(implementation, TensorOnOtherGPU(), "gated") == "triton"


def test_tables_are_not_copied_during_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    chunks = Chunks.of(Sequences([0, 3, 7], device="cuda"), 2)
    with pytest.raises(RuntimeError, match="run the step once before"):
        _ = chunks.index

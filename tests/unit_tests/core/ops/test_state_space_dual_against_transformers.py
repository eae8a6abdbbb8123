# SPDX-License-Identifier: Apache-2.0
"""State-space duality in fp32 against the Mamba-2 scan of transformers, with other chunks."""

from itertools import pairwise

import pytest
import torch

from megatron.core.ops.recurrence import state_space_dual
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import assert_close_by_metric

BOUNDS = (0, 37, 38, 150)
HEADS, GROUPS, KEYS, VALUES = 4, 2, 16, 8


def test_ssd_matches_mamba2_scan():
    """transformers has no packed sequences, so each sequence is scanned alone, in chunks of 32."""
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    tokens = BOUNDS[-1]
    query, key = leaf(tokens, GROUPS, KEYS), leaf(tokens, GROUPS, KEYS)
    value, raw, rates = leaf(tokens, HEADS, VALUES), leaf(tokens, HEADS), leaf(HEADS)
    leaves = (query, key, value, raw, rates)
    dt, rate = torch.nn.functional.softplus(raw), -rates.exp()
    out, final = state_space_dual(query, key, value, dt * rate, dt, sequences=Sequences(BOUNDS))
    outs, final_states = [], []
    for begin, end in pairwise(BOUNDS):
        x, step, hf_b, hf_c = (t[None, begin:end] for t in (value, dt, key, query))
        hf_out, state = mamba2.mamba2_chunk_scan(
            x, step, rate, hf_b, hf_c, chunk_size=32, return_final_states=True
        )
        outs.append(hf_out[0])
        final_states.append(state.mT)  # transformers has [1, H, V, K]
    assert_close_by_metric("out", out, torch.cat(outs))
    assert_close_by_metric("last", final, torch.cat(final_states))
    d_out = torch.randn(out.shape, generator=generator)
    grads = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    expected = torch.autograd.grad(torch.cat(outs), leaves, d_out)
    for name, actual, expected_grad in zip(
        ("query", "key", "value", "dt", "A"), grads, expected, strict=True
    ):
        assert_close_by_metric(name, actual, expected_grad)

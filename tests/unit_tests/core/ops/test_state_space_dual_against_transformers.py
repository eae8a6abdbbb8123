# SPDX-License-Identifier: Apache-2.0
"""State-space duality in fp32 against transformers' scan of Mamba-2, which has other chunks."""

from itertools import pairwise

import pytest
import torch

from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual import state_space_dual
from tests.support.closeness import assert_close_by_metric

BOUNDS = (0, 37, 38, 150)
HEADS, GROUPS, KEYS, VALUES = 4, 2, 16, 8


def test_matches_the_scan_of_mamba2():
    """It knows no packs, so each sequence is scanned by itself; its chunks are of 32 tokens."""
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    tokens = BOUNDS[-1]
    query, key = leaf(tokens, GROUPS, KEYS), leaf(tokens, GROUPS, KEYS)
    value, raw, rates = leaf(tokens, HEADS, VALUES), leaf(tokens, HEADS), leaf(HEADS)
    leaves = (query, key, value, raw, rates)
    dt, rate = torch.nn.functional.softplus(raw), -rates.exp()
    out, last = state_space_dual(query, key, value, dt * rate, dt, sequences=Sequences(BOUNDS))
    outs, lasts = [], []
    for first, end in pairwise(BOUNDS):
        x, step, written, read = (t[None, first:end] for t in (value, dt, key, query))
        theirs, state = mamba2.mamba2_chunk_scan(
            x, step, rate, written, read, chunk_size=32, return_final_states=True
        )
        outs.append(theirs[0])
        lasts.append(state.mT)  # [1, H, V, K] there
    assert_close_by_metric("out", out, torch.cat(outs))
    assert_close_by_metric("last", last, torch.cat(lasts))
    pull = torch.randn(out.shape, generator=generator)
    grads = torch.autograd.grad(out, leaves, pull, retain_graph=True)
    expected = torch.autograd.grad(torch.cat(outs), leaves, pull)
    for name, mine, its in zip(("query", "key", "value", "dt", "A"), grads, expected, strict=True):
        assert_close_by_metric(name, mine, its)

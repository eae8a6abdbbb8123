# SPDX-License-Identifier: Apache-2.0
"""Dropout is a pure function of key, sample, position and feature, and drops at its rate."""

import pytest
import torch

from megatron.core.ops.dropout import AttentionDropout, dropout, dropout_key
from megatron.core.ops.dropout.cpu import hash_index

SAMPLES = torch.tensor([11, 4, 7])
POSITIONS = torch.arange(10) * 2


def drop(x, samples=SAMPLES, positions=POSITIONS, *, offset=0, rate=0.25, key=17):
    return dropout(
        x,
        rate=rate,
        key=key,
        sample_ids=samples,
        position_ids=positions,
        feature_offset=offset,
    )


def test_dropout_of_a_slice_is_a_slice_of_dropout():
    x = torch.randn(10, 3, 22)
    full = drop(x)
    assert torch.equal(drop(x[3:7], positions=POSITIONS[3:7]), full[3:7])
    assert torch.equal(drop(x[:, 1:], samples=SAMPLES[1:]), full[:, 1:])
    for begin, end in ((0, 11), (11, 22), (5, 6), (3, 17)):
        feature_slice = drop(x[..., begin:end].contiguous(), offset=begin)
        assert torch.equal(feature_slice, full[..., begin:end])
    order = torch.tensor([2, 0, 1])
    assert torch.equal(drop(x[:, order], samples=SAMPLES[order]), full[:, order])


def test_backward_reuses_forward_mask_and_saves_no_large_tensor():
    x = torch.randn(10, 3, 22, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = drop(x)
    assert all(t.numel() <= 10 for t in saved)
    y.backward(torch.ones_like(y))
    equal = bool(((x.grad != 0) == (y != 0)).all())
    assert equal
    torch.testing.assert_close(x.grad * x, y)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_rate_is_exact_and_draws_are_independent(rate):
    # 300,000 draws: five standard deviations of the kept fraction are below 0.5 %.
    x = torch.ones(100, 3, 1000)
    keep_mask = (drop(x, positions=torch.arange(100), rate=rate) != 0).double()
    assert abs(keep_mask.mean().item() - (1 - rate)) < 0.005
    # Rows, columns and neighbours are uncorrelated: each pair keeps a fraction (1 - rate)^2.
    pairings = [(keep_mask[1:], keep_mask[:-1]), (keep_mask[:, 1:], keep_mask[:, :-1])]
    pairings += [(keep_mask[..., step:], keep_mask[..., :-step]) for step in (1, 2, 3, 4)]
    for mask, neighbour_mask in pairings:
        assert abs((mask * neighbour_mask).mean().item() - (1 - rate) ** 2) < 0.006
    # Four corners of a rectangle would be correlated if row and column hashes were merely added.
    corners = keep_mask[:50] * keep_mask[50:]
    corners = corners[..., :500] * corners[..., 500:]
    assert abs(corners.mean().item() - (1 - rate) ** 4) < 0.01
    mean = drop(x, positions=torch.arange(100), rate=rate).double().mean().item()
    assert abs(mean - 1) < 0.005 / (1 - rate)


def test_dropout_keys_are_distinct_and_reproducible():
    assert dropout_key(1, "layers.3", 5) == -5789062027862315607
    keys = {dropout_key(s, n, i) for s in range(3) for n in ("a", "b") for i in range(4)}
    assert len(keys) == 24
    assert dropout_key(1, "2", 3) != dropout_key(1, 2, 3)
    x = torch.ones(10, 3, 1000)
    different = (drop(x, key=1, rate=0.5) != 0) != (drop(x, key=2, rate=0.5) != 0)
    assert abs(different.double().mean().item() - 0.5) < 0.02


def test_hash_matches_splitmix64():
    # The first outputs of the published SplitMix64 generator for seed 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [h % 2**64 for h in hash_index(0, torch.arange(3)).tolist()] == expected


def test_attention_mask_depends_only_on_global_indices():
    site = AttentionDropout(rate=0.4, key=9, sample_ids=torch.tensor([5, 2]))
    full_mask = site.keep(4, torch.arange(8), 0, 13)
    sharded_site = AttentionDropout(rate=0.4, key=9, sample_ids=torch.tensor([2]), head_offset=2)
    assert torch.equal(sharded_site.keep(2, torch.arange(3, 8), 6, 7), full_mask[1:, 2:, 3:, 6:])


def test_bad_dropout_arguments_are_refused():
    x = torch.ones(10, 3, 4)
    with pytest.raises(ValueError, match=r"rate=1\.0 must be in \[0, 1\)"):
        drop(x, rate=1.0)
    with pytest.raises(ValueError, match="position_ids"):
        drop(x, positions=torch.arange(9))
    assert drop(x, rate=0.0) is x

# SPDX-License-Identifier: Apache-2.0
"""Dropout is a pure function of key, sample, position and feature, and drops the right share."""

import pytest
import torch

from megatron.core.ops.dropout import AttentionDropout, dropout, dropout_key
from megatron.core.ops.dropout.reference import hash_index

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


def test_slices_equal_slices_of_the_whole():
    x = torch.randn(10, 3, 22)
    whole = drop(x)
    assert torch.equal(drop(x[3:7], positions=POSITIONS[3:7]), whole[3:7])
    assert torch.equal(drop(x[:, 1:], samples=SAMPLES[1:]), whole[:, 1:])
    for first, last in ((0, 11), (11, 22), (5, 6), (3, 17)):
        part = drop(x[..., first:last].contiguous(), offset=first)
        assert torch.equal(part, whole[..., first:last])
    order = torch.tensor([2, 0, 1])
    assert torch.equal(drop(x[:, order], samples=SAMPLES[order]), whole[:, order])


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
def test_share_and_independence(rate):
    # 300,000 draws: five standard deviations of the share are below 0.5 %.
    x = torch.ones(100, 3, 1000)
    kept = (drop(x, positions=torch.arange(100), rate=rate) != 0).double()
    assert abs(kept.mean().item() - (1 - rate)) < 0.005
    # Rows, columns and neighbours are uncorrelated: every pairing keeps (1 - rate)^2.
    pairings = [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1])]
    pairings += [(kept[..., step:], kept[..., :-step]) for step in (1, 2, 3, 4)]
    for one, other in pairings:
        assert abs((one * other).mean().item() - (1 - rate) ** 2) < 0.006
    # Four corners of a rectangle: the sum of row and column hashes must not show.
    corners = kept[:50] * kept[50:]
    corners = corners[..., :500] * corners[..., 500:]
    assert abs(corners.mean().item() - (1 - rate) ** 4) < 0.01
    mean = drop(x, positions=torch.arange(100), rate=rate).double().mean().item()
    assert abs(mean - 1) < 0.005 / (1 - rate)


def test_keys_tell_sites_apart_and_are_the_same_everywhere():
    assert dropout_key(1, "layers.3", 5) == -5789062027862315607
    keys = {dropout_key(s, n, i) for s in range(3) for n in ("a", "b") for i in range(4)}
    assert len(keys) == 24
    assert dropout_key(1, "2", 3) != dropout_key(1, 2, 3)
    x = torch.ones(10, 3, 1000)
    different = (drop(x, key=1, rate=0.5) != 0) != (drop(x, key=2, rate=0.5) != 0)
    assert abs(different.double().mean().item() - 0.5) < 0.02


def test_hash_is_split_mix_64():
    # The first outputs of the published generator seeded with 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [h % 2**64 for h in hash_index(0, torch.arange(3)).tolist()] == expected


def test_attention_mask_is_a_function_of_global_indices():
    site = AttentionDropout(rate=0.4, key=9, sample_ids=torch.tensor([5, 2]))
    whole = site.keep(4, torch.arange(8), 0, 13)
    other = AttentionDropout(rate=0.4, key=9, sample_ids=torch.tensor([2]), head_offset=2)
    assert torch.equal(other.keep(2, torch.arange(3, 8), 6, 7), whole[1:, 2:, 3:, 6:])


def test_bad_arguments():
    x = torch.ones(10, 3, 4)
    with pytest.raises(ValueError, match=r"rate=1\.0 must be in \[0, 1\)"):
        drop(x, rate=1.0)
    with pytest.raises(ValueError, match="position_ids"):
        drop(x, positions=torch.arange(9))
    assert drop(x, rate=0.0) is x

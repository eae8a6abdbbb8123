# SPDX-License-Identifier: Apache-2.0
"""Dropout is a pure function of key, sample, position and feature, and drops at its rate."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.dropout import AttentionDropout, dropout, dropout_key, naive
from tests.support.gpu_agreement import assert_refused, random_tensor, sized, use_launches
from tests.support.launch_kernels import is_product, launched

KERNELS = pytest.mark.gpu
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


def test_attention_mask_depends_only_on_global_indices():
    site = AttentionDropout(rate=0.4, key=9, sample_ids=torch.tensor([5, 2]))
    full_mask = site.keep(4, torch.arange(8), 0, 13)
    sharded_site = AttentionDropout(rate=0.4, key=9, sample_ids=torch.tensor([2]), head_offset=2)
    assert torch.equal(sharded_site.keep(2, torch.arange(3, 8), 6, 7), full_mask[1:, 2:, 3:, 6:])


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Use blocks so small that a row has several."""
    use_launches(monkeypatch, "dropout", ("DROP",), BLOCK=512)


@pytest.mark.parametrize("offset", [0, 5])
def test_dropout_matches_its_equation(backend, offset):
    """Bit for bit, on every device; packed rows have a sample id for each token."""
    ids = torch.arange(6)
    for features, samples in ((1030, torch.tensor([9, 0, 4])), (7, ids[:, None] // 2 + ids[:3])):
        (x,) = backend.random((6, 3, features))
        x = x.to(backend.dtype).requires_grad_()
        site = {"rate": 0.3, "key": -(1 << 61) + 5, "feature_offset": offset}
        expected = naive.dropout(
            x.cpu().float(), sample_ids=samples, position_ids=ids * 3, **site
        ).to(x)
        y = dropout(
            x,
            sample_ids=samples.to(x.device),
            position_ids=ids.to(x.device) * 3,
            implementation=backend.implementation,
            **site,
        )
        torch.testing.assert_close(
            y, expected, rtol=2**-8 if x.dtype == torch.bfloat16 else 1e-6, atol=0
        )
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(y.bool(), expected.bool())
        assert torch.equal(grad.bool(), expected.bool())


def test_a_value_is_dropped_from_its_level_on(backend):
    """At two neighbouring rates, in steps of 2^-16, the first value is kept and dropped."""
    x = torch.ones(1, 1, 4, device=backend.device)
    ids = {name: torch.tensor([7], device=x.device) for name in ("sample_ids", "position_ids")}
    low, high = 0, 65535
    while high - low > 1:
        level = (low + high) // 2
        keeps = bool(naive.dropout(x, rate=level / 65536, key=3, **ids)[0, 0, 0])
        low, high = (level, high) if keeps else (low, level)
    for level in (low, high):
        site = {"rate": level / 65536, "key": 3, **ids}
        y = dropout(x, implementation=backend.implementation, **site)
        assert torch.equal(y.bool(), naive.dropout(x, **site).bool())


def test_naive_hash_is_splitmix64():
    """The first outputs of the published generator for seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [naive.split_mix(0, index) for index in range(3)] == expected


@KERNELS
def test_dropout_is_one_kernel_each_way(device):
    """torch computes hashes of rows and columns; only the kernel passes over the input."""
    rows, features = sized((512, 2048), (3, 37))
    x = random_tensor(device, rows, 2, features).requires_grad_()
    site = {
        "rate": 0.1,
        "key": 5,
        "sample_ids": torch.tensor([8, 3], device=device),
        "position_ids": torch.arange(rows, device=device),
    }
    grad_out = torch.ones_like(x)
    launches = launched(
        lambda: torch.autograd.grad(dropout(x, implementation="triton", **site), x, grad_out)
    )
    assert launches.kernels == {"dropout_kernel": 2}
    assert not any(is_product(name) for name in launches.device_kernels), launches.device_kernels


BAD = {
    "rate": (lambda: drop(torch.ones(10, 3, 4), rate=1.0), r"rate=1\.0 must be in \[0, 1\)"),
    "positions": (
        lambda: drop(torch.ones(10, 3, 4), positions=torch.arange(9)),
        "position_ids",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_errors(name):
    assert_refused(*BAD[name])


def test_rate_zero_returns_the_input():
    x = torch.ones(10, 3, 4)
    assert drop(x, rate=0.0) is x

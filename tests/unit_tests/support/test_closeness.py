# SPDX-License-Identifier: Apache-2.0
"""The metric passes rounding, sees planted faults, and refuses comparisons that prove nothing."""

import math

import pytest
import torch

from tests.support.closeness import (
    assert_all_close,
    assert_close_by_metric,
    assert_piece_close,
    noise_floor,
    relative_error,
)
from tests.support.inputs import generator


def test_relative_error_divides_by_the_largest_value():
    ref = torch.tensor([1.0, -4.0, 1e-9])
    got = torch.tensor([1.0, -4.0, 3e-9])
    assert relative_error(got, ref) == pytest.approx(5e-10, rel=1e-3)
    assert relative_error(ref, ref) == 0.0


@pytest.mark.parametrize(
    ("got", "ref"),
    [
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([1.0]), torch.tensor([math.nan])),
        (torch.tensor([math.inf]), torch.tensor([math.inf])),
        (torch.tensor([1e-30]), torch.tensor([0.0])),
        (torch.ones(2, 1), torch.ones(1, 2)),
    ],
)
def test_nan_inf_and_shape_mismatch_have_infinite_error(got, ref):
    assert relative_error(got, ref) == math.inf
    with pytest.raises(AssertionError, match="weight: error inf"):
        assert_close_by_metric("weight", got, ref)


def test_rounding_passes_and_dropped_or_doubled_terms_do_not():
    source = generator(1)
    terms = torch.randn(4, 37, 5, generator=source)
    ref = terms.double().sum(0)
    assert assert_close_by_metric("sum", terms.sum(0), ref) < 7e-7
    for wrong in (terms[:3].sum(0), terms.sum(0) + terms[2], terms.sum(0) * (1 + 3e-5)):
        with pytest.raises(AssertionError, match=r"sum: error .* worst at"):
            assert_close_by_metric("sum", wrong, ref)


def test_message_names_the_worst_element():
    got = torch.zeros(3, 4)
    ref = torch.ones(3, 4)
    got[1, 2], ref[1, 2] = 5.0, -1.0
    with pytest.raises(AssertionError, match=r"\[1, 2\].*5.*-1 \(12.*12"):
        assert_close_by_metric("x", got, ref)


def test_every_name_is_compared():
    ref = {"a": torch.ones(2), "b": torch.ones(3)}
    assert assert_all_close(dict(ref), ref) == 0.0
    with pytest.raises(AssertionError, match="missing: b"):
        assert_all_close({"a": ref["a"]}, ref)
    with pytest.raises(AssertionError, match="unexpected: c"):
        assert_all_close({**ref, "c": torch.ones(1)}, ref)
    with pytest.raises(AssertionError, match="b: error 1 >"):
        assert_all_close({"a": ref["a"], "b": 2 * ref["b"]}, ref)
    with pytest.raises(AssertionError, match="the reference is empty"):
        assert_all_close({}, {})


def test_all_zero_reference_must_be_declared():
    zeros = {"a": torch.zeros(2), "b": torch.ones(2)}
    with pytest.raises(AssertionError, match="a: the reference is all zero"):
        assert_all_close(zeros, zeros)
    assert assert_all_close(zeros, zeros, zeros=("a",)) == 0.0
    with pytest.raises(AssertionError, match="b: declared to be zero"):
        assert_all_close(zeros, zeros, zeros=("a", "b"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_noise_is_refused_as_a_reference(dtype):
    """The gradient of a bias before a norm is a sum that is zero except for rounding."""
    terms = torch.randn(50, 7, generator=generator(2), dtype=dtype)
    noise = (terms - terms.mean(0)).sum(0)
    assert 0.0 < noise.abs().max() < noise_floor(noise, noise)
    assert relative_error(noise, noise) == math.inf
    with pytest.raises(AssertionError, match=r"bias: the reference .* noise .*`zeros`"):
        assert_close_by_metric("bias", noise, noise)
    peers = {"bias": noise, "weight": terms}
    with pytest.raises(AssertionError, match=r"^bias: the reference .* noise"):
        assert_all_close(peers, peers)
    # A declared zero is compared absolutely on both sides: other noise passes, a term does not.
    flipped = {"bias": -noise.flip(0), "weight": terms}
    assert assert_all_close(flipped, peers, zeros=("bias",)) == 0.0
    leaked = {"bias": noise + 1e-3 * terms[0], "weight": terms}
    for got, ref in ((leaked, peers), (peers, leaked)):
        with pytest.raises(AssertionError, match="bias: declared to be zero, but"):
            assert_all_close(got, ref, zeros=("bias",))
    with pytest.raises(AssertionError, match=r"\[50, 7\]"):
        assert_all_close({"bias": terms, "weight": terms}, peers, zeros=("bias",))


def test_noise_floor_is_relative_to_the_terms():
    tiny = torch.tensor([1e-6, -2e-6])
    with pytest.raises(AssertionError, match="noise of terms of magnitude 1:"):
        assert_close_by_metric("x", tiny, tiny)
    assert assert_close_by_metric("x", tiny, tiny, scale=1e-3) == 0.0
    assert relative_error(1e-30 * tiny, 1e-30 * tiny, scale=0.0) == 0.0  # a product
    ref = {"small": 10 * tiny, "large": torch.tensor([1e4])}
    with pytest.raises(AssertionError, match=r"small: .*magnitude 1e\+04"):
        assert_all_close(ref, ref)


def test_shard_error_is_relative_to_the_whole_tensor():
    whole = torch.arange(12.0).reshape(3, 4)
    shard = whole[1:, 2:] + 5.5e-5
    assert torch.equal(assert_piece_close("w", shard, whole, (1, 2)), whole[1:, 2:])
    for got, offsets in ((shard + 1e-3, (1, 2)), (shard, (0, 2))):
        with pytest.raises(AssertionError, match="w: error"):
            assert_piece_close("w", got, whole, offsets)
    with pytest.raises(AssertionError, match="w: the reference is all zero"):
        assert_piece_close("w", 0 * shard, 0 * whole, (1, 2))


def test_largest_error_is_reported_first():
    ref = {name: torch.ones(1) for name in "abc"}
    got = {"a": torch.tensor([1.1]), "b": torch.tensor([3.0]), "c": torch.tensor([1.5])}
    with pytest.raises(AssertionError) as caught:
        assert_all_close(got, ref)
    assert [line[0] for line in str(caught.value).splitlines()] == ["b", "c", "a"]

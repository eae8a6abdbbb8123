# SPDX-License-Identifier: Apache-2.0
"""The metric passes rounding, sees planted faults, and refuses comparisons that prove nothing."""

import math

import pytest
import torch

from tests.support.closeness import assert_all_close, assert_close_by_metric, relative_error
from tests.support.inputs import generator


def test_the_metric_is_the_largest_difference_over_the_largest_value():
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
def test_what_has_no_meaning_is_infinitely_wrong(got, ref):
    assert relative_error(got, ref) == math.inf
    with pytest.raises(AssertionError, match="weight: error inf"):
        assert_close_by_metric("weight", got, ref)


def test_rounding_passes_and_dropped_or_doubled_terms_do_not():
    source = generator(1)
    parts = torch.randn(4, 37, 5, generator=source)
    ref = parts.double().sum(0)
    assert assert_close_by_metric("sum", parts.sum(0), ref) < 7e-7
    for wrong in (parts[:3].sum(0), parts.sum(0) + parts[2], parts.sum(0) * (1 + 3e-5)):
        with pytest.raises(AssertionError, match=r"sum: error .* worst at"):
            assert_close_by_metric("sum", wrong, ref)


def test_the_message_names_the_worst_element():
    got = torch.zeros(3, 4)
    ref = torch.ones(3, 4)
    got[1, 2], ref[1, 2] = 5.0, -1.0
    with pytest.raises(AssertionError, match=r"worst at \[1, 2\]: got 5, reference -1 \(12 of 12"):
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


def test_a_reference_of_zeros_must_be_declared():
    zeros = {"a": torch.zeros(2), "b": torch.ones(2)}
    with pytest.raises(AssertionError, match="a: the reference is all zero"):
        assert_all_close(zeros, zeros)
    assert assert_all_close(zeros, zeros, zeros=("a",)) == 0.0
    with pytest.raises(AssertionError, match="b: declared to be zero"):
        assert_all_close(zeros, zeros, zeros=("a", "b"))


def test_the_worst_offender_comes_first():
    ref = {name: torch.ones(1) for name in "abc"}
    got = {"a": torch.tensor([1.1]), "b": torch.tensor([3.0]), "c": torch.tensor([1.5])}
    with pytest.raises(AssertionError) as caught:
        assert_all_close(got, ref)
    assert [line[0] for line in str(caught.value).splitlines()] == ["b", "c", "a"]

# SPDX-License-Identifier: Apache-2.0
"""Assertions about a trace of collectives pass exactly when the trace matches them."""

from dataclasses import dataclass

import pytest

from tests.support.activation import assert_active, assert_silent, matching, table


@dataclass(frozen=True)
class _Record:
    kind: str
    group: str
    bytes: int


TRACE = [
    _Record("all_reduce", "tp", 40),
    _Record("all_reduce", "tp", 2),
    _Record("all_gather", "dp", 8),
]


def test_claims_that_match_the_trace_pass():
    assert_active(TRACE, kind="all_reduce", group="tp", exactly=2, exactly_bytes=42)
    assert_active(TRACE, kind="all_gather")
    assert_active(TRACE, group="tp", at_least=2)
    assert_silent(TRACE, kind="all_gather", group="tp")
    assert len(matching(TRACE)) == 3


@pytest.mark.parametrize(
    "claim",
    [
        {"kind": "reduce_scatter"},
        {"kind": "all_gather", "group": "tp"},
        {"kind": "all_reduce", "at_least": 3},
        {"kind": "all_reduce", "exactly": 1},
        {"kind": "all_reduce", "exactly_bytes": 41},
    ],
)
def test_claims_that_differ_fail_and_show_the_trace(claim):
    with pytest.raises(AssertionError, match="all_reduce on tp: 2 x, 42 B"):
        assert_active(TRACE, **claim)


def test_assert_silent_fails_on_a_matching_collective():
    with pytest.raises(AssertionError, match="all_gather on any group: 1, wanted none"):
        assert_silent(TRACE, kind="all_gather")


def test_empty_trace_is_reported_as_such():
    assert table([]) == "no collective at all"
    with pytest.raises(AssertionError, match="no collective at all"):
        assert_active([], kind="all_reduce")

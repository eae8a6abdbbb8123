# SPDX-License-Identifier: Apache-2.0
"""Assertions about a trace of collectives pass exactly when the trace matches them."""

from types import SimpleNamespace

import pytest

from tests.support.activation import assert_active, assert_silent

TRACE = [
    SimpleNamespace(kind=kind, group=group, bytes=size)
    for kind, group, size in (
        ("all_reduce", "tp", 40),
        ("all_reduce", "tp", 2),
        ("gather", "dp", 8),
    )
]


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        ({"kind": "all_reduce", "group": "tp", "exactly": 2, "exactly_bytes": 42}, True),
        ({"group": "tp", "at_least": 2}, True),
        ({"kind": "reduce_scatter"}, False),
        ({"kind": "gather", "group": "tp"}, False),
        ({"kind": "all_reduce", "at_least": 3}, False),
        ({"kind": "all_reduce", "exactly": 1}, False),
        ({"kind": "all_reduce", "exactly_bytes": 41}, False),
    ],
)
def test_claims_hold_exactly_if_the_trace_matches(claim, holds):
    if holds:
        assert_active(TRACE, **claim)
    else:
        with pytest.raises(AssertionError, match="all_reduce"):
            assert_active(TRACE, **claim)


def test_silent_claim_fails_on_a_matching_collective():
    assert_silent(TRACE, kind="gather", group="tp")
    with pytest.raises(AssertionError, match="gather"):
        assert_silent(TRACE, kind="gather")

# SPDX-License-Identifier: Apache-2.0
"""Formulas for the collectives of a row's experts, compared with its trace."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.moe.dispatch import dispatched_rows
from tests.parity.experts import TOPK
from tests.parity.sequences import SEQUENCE, cut_of
from tests.parity.training import BATCH, HIDDEN, Run
from tests.support.activation import assert_active, assert_silent, matching
from tests.support.covering_array import Row

_GROUP = "etp_ep"


def assert_expert_traffic(row: Row, runs: Sequence[Run], number: int) -> None:
    """Assert that the collectives of token dispatch match the row in number and bytes."""
    for run in runs:
        records = run.steps[number].records
        counted = run.stage.experts.count * row["accumulation"]
        alone = row["tp"] * row["cp"] == 1
        assert_active(records, kind="all_reduce", group="tp_cp", exactly=0 if alone else counted)
    size = row["etp"] * row["ep"]
    if row["experts"] is None or size == 1:
        for run in runs:
            assert_silent(run.steps[number].records, group=_GROUP)
    elif row["dispatcher"] == "allgather":
        _gathers(row, runs, number, size=size)
    else:
        _exchanges(row, runs, number)


def _rows(row: Row) -> int:
    """Return the number of rows that a rank routes in a microbatch."""
    whole = row["cp"] == 1 and row["documents"] == "whole"
    length = SEQUENCE if whole else cut_of(row).local_length
    return -(-length * BATCH // row["tp"])


def _gathers(row: Row, runs: Sequence[Run], number: int, *, size: int) -> None:
    """Assert that features and weights of all rows are gathered, and partial sums are reduced."""
    features, weights = 4 * size * _rows(row) * HIDDEN, 4 * size * _rows(row) * TOPK
    assert features == 4 * HIDDEN * dispatched_rows(
        "allgather", tokens=_rows(row), topk=TOPK, etp=row["etp"], ep=row["ep"]
    )
    for run in runs:
        experts, microbatches = run.stage.experts, row["accumulation"]
        forward = (experts.count + experts.again) * microbatches
        backward = experts.count * microbatches
        for kind, count, total in (
            (
                "all_gather",
                2 * forward + backward,
                (features + weights) * forward + features * backward,
            ),
            (
                "reduce_scatter",
                forward + 2 * backward,
                features * forward + (features + weights) * backward,
            ),
        ):
            records = run.steps[number].records
            assert_active(records, kind=kind, group=_GROUP, exactly=count, exactly_bytes=total)


def _exchanges(row: Row, runs: Sequence[Run], number: int) -> None:
    """Assert that each row except padding and dropped rows is exchanged, in both directions.

    A rank sends its own rows but receives the rows routed to its experts, so the bytes are summed
    over all ranks.
    """
    exchange_bytes = (
        4
        * HIDDEN
        * dispatched_rows("alltoall", tokens=_rows(row), topk=TOPK, etp=row["etp"], ep=row["ep"])
    )
    sent = expected = 0
    for run in runs:
        experts, microbatches = run.stage.experts, row["accumulation"]
        count = (4 * experts.count + 2 * experts.again) * microbatches
        records = run.steps[number].records
        assert_active(records, kind="all_to_all", group=_GROUP, exactly=count)
        sent += sum(record.bytes for record in matching(records, kind="all_to_all", group=_GROUP))
        expected += count * exchange_bytes
    whole = row["cp"] == 1 and row["documents"] == "whole"
    if not whole:  # padding is not dispatched
        cut = cut_of(row)
        expected = expected * cut.length // cut.padded[-1]
    full = row["capacity"] is None
    if not (sent == expected if full else 0 < sent < expected):
        raise AssertionError(f"{sent} bytes dispatched, {expected} expected, capacity {not full}")

# SPDX-License-Identifier: Apache-2.0
"""Assert that a feature was active: collectives that a trace must, and must not, contain.

A feature that is silently off gives the reference's numbers, so a comparison alone cannot see it.
These functions read the records of `megatron.core.comm.trace()`: anything with `kind`, `group`
and `bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol


class Record(Protocol):
    """One collective as traced: its kind (`all_reduce` …), its group's name and the bytes sent."""

    kind: str
    group: str
    bytes: int


def matching(
    records: Iterable[Record], *, kind: str | None = None, group: str | None = None
) -> list[Record]:
    """Return the records of a kind, of a group, or of both."""
    return [r for r in records if kind in (None, r.kind) and group in (None, r.group)]


def table(records: Iterable[Record]) -> str:
    """Return the trace as text: calls and bytes per kind and group."""
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for record in records:
        calls[record.kind, record.group] += 1
        sent[record.kind, record.group] += record.bytes
    lines = [
        f"{kind} on {name}: {calls[kind, name]} x, {sent[kind, name]} B" for kind, name in calls
    ]
    return "\n".join(sorted(lines)) or "no collective at all"


def assert_active(
    records: Collection[Record],
    *,
    kind: str | None = None,
    group: str | None = None,
    at_least: int = 1,
    exactly: int | None = None,
    exactly_bytes: int | None = None,
) -> None:
    """Fail unless collectives of this kind on this group happened as often as claimed.

    `exactly_bytes` claims the sum of their bytes as well.
    """
    matches = matching(records, kind=kind, group=group)
    sent = sum(r.bytes for r in matches)
    wrong = len(matches) < at_least if exactly is None else len(matches) != exactly
    if wrong or (exactly_bytes is not None and sent != exactly_bytes):
        expected = f">= {at_least}" if exactly is None else f"{exactly}"
        size = "" if exactly_bytes is None else f" with {exactly_bytes} B"
        raise AssertionError(
            f"{kind or 'collectives'} on {group or 'any group'}: {len(matches)} with {sent} B, "
            f"wanted {expected}{size}; the trace:\n{table(records)}"
        )


def assert_silent(
    records: Collection[Record], *, kind: str | None = None, group: str | None = None
) -> None:
    """Fail if a collective of this kind on this group happened."""
    if matches := matching(records, kind=kind, group=group):
        raise AssertionError(
            f"{kind or 'collectives'} on {group or 'any group'}: {len(matches)}, wanted none; "
            f"the trace:\n{table(records)}"
        )

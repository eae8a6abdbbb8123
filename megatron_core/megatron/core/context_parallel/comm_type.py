# SPDX-License-Identifier: Apache-2.0
"""Choice of the context-parallel attention engine by communication volume. Pure arithmetic.

Volume per layer and rank, forward and backward, with t = s/cp local tokens of b rows, d features
per head and cp - 1 of cp shards leaving the rank:

    ring        2 (cp-1) steps of keys and values, and cp steps of their gradients in fp32
    all_gather  keys and values of the other ranks twice, their gradients once
    all_to_all  (cp-1)/cp of q, k, v, the output and all their gradients

Grouped-query attention makes ring and all_gather cheap; many ranks make all_to_all cheap, because
it moves 1/cp of each head. The ring never moves the least, because it sends fp32 sums. It is for
long rows: all_gather holds the keys and values of all ranks at a time, the ring only of two ranks.
Only the user knows this memory limit.
"""

from __future__ import annotations

from dataclasses import dataclass

RING, ALL_GATHER, ALL_TO_ALL, AUTO = "p2p", "all_gather", "a2a", "auto"
ENGINES = (RING, ALL_GATHER, ALL_TO_ALL)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The shape of one rank's attention.

    Args:
        tokens: local tokens of a row, s/cp, with padding.
        rows: b.
        heads: local query heads, n/tp.
        groups: local key heads, g/tp.
        features: features of a head, d.
        element_bytes: bytes of an element of an activation.
    """

    tokens: int
    rows: int
    heads: int
    groups: int
    features: int
    element_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of this rank's tokens."""
        return self.tokens * self.rows * self.features * self.element_bytes


@dataclass(frozen=True)
class CommTypeChoice:
    """An engine and the reason for its choice.

    Args:
        engine: one of `ENGINES`.
        why: the reason, one line.
    """

    engine: str
    why: str


def head_problem(heads: int, groups: int, cp: int) -> str | None:
    """Return why heads cannot be sharded over cp ranks, with the fix; None if they can."""
    if heads % cp:
        return f"{heads} query heads do not divide over {cp} context parallel ranks: use p2p"
    if groups % cp and cp % groups:
        return f"{groups} key heads do not divide over {cp} context parallel ranks: use p2p"
    return None


def context_problems(engine: str, *, heads: int, groups: int, cp: int) -> list[str]:
    """Return the reasons why an engine cannot run on cp ranks, each with its fix.

    Args:
        engine: "p2p", "all_gather", "a2a" or "auto".
        heads: query heads of a rank, n/tp.
        groups: key heads of a rank, at least 1.
        cp: ranks.
    """
    if engine not in (AUTO, *ENGINES):
        return [f"context-parallel engine {engine!r}: use {', '.join((AUTO, *ENGINES))}"]
    reason = head_problem(heads, groups, cp) if engine == ALL_TO_ALL else None
    return [] if reason is None else [f"context-parallel engine a2a: {reason}"]


def sent_groups(groups: int, cp: int) -> int:
    """Return the key heads of each rank under all_to_all, with copies."""
    return max(1, groups // cp)


def moved_bytes(engine: str, shape: AttentionShape, cp: int) -> int:
    """Return the bytes that leave a rank in forward and backward of one layer.

    Raises:
        ValueError: an unknown engine.
    """
    kv_bytes = 2 * shape.groups * shape.head_bytes
    if engine == RING:
        kv_grad_bytes = kv_bytes * 4 // shape.element_bytes  # fp32 sums
        return 2 * (cp - 1) * kv_bytes + (cp * kv_grad_bytes if cp > 1 else 0)
    if engine == ALL_GATHER:
        return 3 * (cp - 1) * kv_bytes
    if engine == ALL_TO_ALL:
        groups = cp * sent_groups(shape.groups, cp)
        return (cp - 1) * (4 * shape.heads + 4 * groups) * shape.head_bytes // cp
    raise ValueError(f"context-parallel engine {engine!r}: use {', '.join((AUTO, *ENGINES))}")


def choose(engine: str, shape: AttentionShape, cp: int) -> CommTypeChoice:
    """Return the requested engine, or for "auto" the engine with the least communication.

    Raises:
        ValueError: an unknown engine, or heads that do not divide for all_to_all.
    """
    reason = head_problem(shape.heads, shape.groups, cp)
    if engine != AUTO:
        moved_bytes(engine, shape, cp)
        if engine == ALL_TO_ALL and reason is not None:
            raise ValueError(f"context-parallel engine a2a: {reason}")
        return CommTypeChoice(engine, f"{engine} was requested")
    engines = [e for e in ENGINES if e != ALL_TO_ALL or reason is None]
    bytes_by_engine = {e: moved_bytes(e, shape, cp) for e in engines}
    best = min(engines, key=lambda e: bytes_by_engine[e])
    volumes = ", ".join(
        f"{e} {bytes_by_engine[e] / 1e6:,.2f} MB"
        for e in sorted(engines, key=lambda e: bytes_by_engine[e])
    )
    why = f"fewest bytes sent per rank and layer: {volumes}"
    if best == ALL_GATHER:
        kv_megabytes = 2 * shape.groups * shape.head_bytes / 1e6
        why += (
            f"; it stores {cp * kv_megabytes:,.2f} MB of keys and values at a time, p2p "
            f"{2 * kv_megabytes:,.2f} MB: use p2p where rows are long"
        )
    return CommTypeChoice(best, why if reason is None else f"{why}; not a2a: {reason}")


def explain(engine: str, shape: AttentionShape, cp: int) -> str:
    """Return one line with the chosen engine and the reason."""
    choice = choose(engine, shape, cp)
    return f"context parallel {cp} by {choice.engine}: {choice.why}"

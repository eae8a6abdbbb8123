# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: for every rank the list of its actions, in order.

`make_schedule` gives the computes alone; `transfers.py` adds the transfers between ranks, and
`simulate.py` runs and checks lists without processes. With p stages, m microbatches and v chunks:

- "1f1b": rank r computes min(p - r - 1, m) forwards, then forward and backward in turn, then the
  remaining backwards (Narayanan et al. 2021, "Efficient large-scale language model training on GPU
  clusters", section 2.2). At most p - r microbatches are alive. The fraction
  (p - 1) / (m + p - 1) of the time is idle.
- "interleaved": the same over v chunks a rank, in groups of N microbatches (ibid.). Idle is
  (p - 1) / (v m + p - 1) for N = p, for 1 + (p - 1) / (p v) times the activations.
- "zb-h1": 1f1b with split backward: rank r defers each weight gradient by r microbatches, which
  fills its time at the end (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv
  2401.10241, section 2.2). Every rank keeps at most p microbatches alive, which is the most of any
  rank in 1f1b.
- "forward": forwards alone, for evaluation.

In all of them every chunk computes its weight gradients in the order of the microbatches, so the
sums are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Kind(Enum):
    """What an action does with one chunk of layers and one microbatch."""

    FORWARD = "F"
    BACKWARD = "B"  # I and W at once
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    GATHER = "G"
    REDUCE = "R"


COMPUTES = frozenset(
    {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT},
)
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD})
TRANSFERS = SENDS | RECEIVES
#: Transfers of what forward computes; the others are of gradients, which go the other way.
AHEAD = frozenset({Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD})


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list.

    Args:
        chunk: the rank's own number of the chunk of layers, 0 the nearest to the embedding.
        microbatch: its number in the step.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The lists of all ranks.

    Args:
        stages: p, the ranks of the pipeline.
        chunks: v, the chunks of layers on each rank. Chunk c of rank r is virtual stage c · p + r.
        microbatches: m.
        ranks: by rank.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Return where in the model a rank's chunk is, from 0 to p · v - 1."""
        return chunk * self.stages + rank

    def following(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return (rank, chunk) that gets this chunk's output; None after the last."""
        following = self.virtual_stage(rank, chunk) + 1
        if following == self.stages * self.chunks:
            return None
        return following % self.stages, following // self.stages

    def preceding(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return (rank, chunk) whose output this chunk gets; None before the first."""
        preceding = self.virtual_stage(rank, chunk) - 1
        return None if preceding < 0 else (preceding % self.stages, preceding // self.stages)

    def other_end(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Return the other rank of a send or receive, and what is in its list; None without one."""
        if action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD):
            place = self.following(rank, action.chunk)
        elif action.kind in (Kind.SEND_BACKWARD, Kind.RECEIVE_FORWARD):
            place = self.preceding(rank, action.chunk)
        else:
            place = None
        if place is None:
            return None
        return place[0], Action(_OTHER_ENDS[action.kind], place[1], action.microbatch)


_OTHER_ENDS: Mapping[Kind, Kind] = MappingProxyType(
    {
        Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
        Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD,
        Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
        Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD,
    }
)


def make_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    group_size: int | None = None,
    weight_delay: int | None = None,
) -> Schedule:
    """Return a schedule's computing: no transfers, no traffic of weights.

    Args:
        name: "1f1b", "interleaved", "zb-h1" or "forward".
        stages: p.
        microbatches: m.
        chunks: v.
        group_size: N, how many microbatches one chunk computes before the next chunk starts; None
            is the least that leaves no group too small, p where m is a multiple of it. "1f1b" and
            "zb-h1" have none.
        weight_delay: how many microbatches "zb-h1" puts weight gradients off at most, and so keeps
            what they need; r if None. With 0 each W is right after its I, and a rank idles
            (p - 1)(F + I).

    Raises:
        ValueError: everything that `problems` lists.
    """
    wrong = problems(
        name, stages=stages, microbatches=microbatches, chunks=chunks, group_size=group_size
    )
    if weight_delay is not None and name != "zb-h1":
        wrong.append(f"{name} puts no weight gradients off: leave out weight delay {weight_delay}")
    if weight_delay is not None and weight_delay < 0:
        wrong.append(f"weight delay {weight_delay}: take 0 or more")
    if wrong:
        raise ValueError("; ".join(wrong))
    size = group_size or min(stages, microbatches)
    ranks: Iterator[list[Action]]
    if name == "1f1b":
        ranks = (_one_forward_one_backward(stages - r - 1, microbatches) for r in range(stages))
    elif name == "interleaved":
        size = group_size or _group_sizes(stages, microbatches)[0]
        turns = _turns(microbatches, chunks, size)
        ahead = (chunks - 1) * size
        ranks = (_interleaved(2 * (stages - r - 1) + ahead, turns, chunks) for r in range(stages))
    elif name == "zb-h1":
        delays = (r if weight_delay is None else min(r, weight_delay) for r in range(stages))
        ranks = (_zero_bubble(stages - r, microbatches, delay) for r, delay in enumerate(delays))
    else:
        turns = _turns(microbatches, chunks, size)
        ranks = ([Action(Kind.FORWARD, *turn) for turn in turns] for _ in range(stages))
    return Schedule(name, stages, chunks, microbatches, tuple(tuple(rank) for rank in ranks))


def problems(
    name: str, *, stages: int, microbatches: int, chunks: int = 1, group_size: int | None = None
) -> list[str]:
    """Return everything that keeps a schedule from being made, each with its fix.

    "interleaved" needs groups of at least p microbatches, the last one included, or of all of them:
    with fewer, rank 0 would need its second chunk's input before the last rank can have made it.
    """
    if name not in ("1f1b", "interleaved", "zb-h1", "forward"):
        return [f"no schedule {name!r}: take 1f1b, interleaved, zb-h1 or forward"]
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    wrong = [f"{what} {size}: take 1 or more" for what, size in sizes.items() if size < 1]
    if group_size is not None and group_size < 1:
        wrong.append(f"group size {group_size}: take 1 or more")
    if wrong:
        return wrong
    if name in ("1f1b", "zb-h1"):
        if chunks > 1:
            wrong.append(f"{name} has one chunk per stage, not {chunks}: take interleaved")
        if group_size is not None:
            wrong.append(f"{name} has no groups of microbatches: leave out group size {group_size}")
    if chunks > 1 and stages == 1:
        wrong.append(f"{chunks} chunks on one stage overlap nothing: take 1 chunk")
    if name == "interleaved":
        if chunks == 1:
            wrong.append("interleaved with one chunk per stage is 1f1b: take that or more chunks")
        elif stages > 1:
            wrong += _group_problems(stages, microbatches, group_size)
    return wrong


def _group_problems(stages: int, microbatches: int, group_size: int | None) -> list[str]:
    """Return what is wrong with the groups of the interleaved schedule."""
    legal = _group_sizes(stages, microbatches)
    size = legal[0] if group_size is None else group_size
    if size in legal:
        return []
    text = f"groups of {size} of {microbatches} microbatches on {stages} stages"
    if size > microbatches:
        text += " are too large"
    elif size < min(stages, microbatches):
        text += " are too small"
    else:
        text += f" leave {microbatches % size}, fewer than the stages, for the last group"
    nearest = min(legal, key=lambda n: (abs(n - size), n))
    return [f"{text}: take groups of {nearest}, or other numbers of microbatches"]


def _group_sizes(stages: int, microbatches: int) -> list[int]:
    """Return the groups of microbatches that the interleaved schedule can take, in order."""
    return [
        n
        for n in range(min(stages, microbatches), microbatches + 1)
        if microbatches % n == 0 or microbatches % n >= stages
    ]


def _one_forward_one_backward(ahead: int, microbatches: int) -> list[Action]:
    """Return the list of a rank that computes `ahead` forwards before the first pair."""
    ahead = min(ahead, microbatches)
    actions = [Action(Kind.FORWARD, 0, number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            actions.append(Action(Kind.FORWARD, 0, ahead + number))
        actions.append(Action(Kind.BACKWARD, 0, number))
    return actions


def _turns(microbatches: int, chunks: int, size: int) -> list[tuple[int, int]]:
    """Return (chunk, microbatch) in the order of the forwards: group by group, chunk by chunk."""
    return [
        (chunk, number)
        for start in range(0, microbatches, size)
        for chunk in range(chunks)
        for number in range(start, min(start + size, microbatches))
    ]


def _interleaved(ahead: int, turns: list[tuple[int, int]], chunks: int) -> list[Action]:
    """Return the list of a rank that computes `ahead` turns forward before the first pair.

    Backward takes the same turns with the chunks in reverse.
    """
    ahead = min(ahead, len(turns))
    actions = [Action(Kind.FORWARD, *turn) for turn in turns[:ahead]]
    for position, (chunk, number) in enumerate(turns):
        if ahead + position < len(turns):
            actions.append(Action(Kind.FORWARD, *turns[ahead + position]))
        actions.append(Action(Kind.BACKWARD, chunks - 1 - chunk, number))
    return actions


def _zero_bubble(ahead: int, microbatches: int, delay: int) -> list[Action]:
    """Return a rank's list of ZB-H1: `ahead` forwards, then I, the W of `delay` ago, and F.

    W comes before the next F, which would otherwise be one more microbatch alive.
    """
    ahead = min(ahead, microbatches)
    actions = [Action(Kind.FORWARD, 0, number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(Action(Kind.INPUT_GRADIENT, 0, number))
        if number >= delay:
            actions.append(Action(Kind.WEIGHT_GRADIENT, 0, number - delay))
        if ahead + number < microbatches:
            actions.append(Action(Kind.FORWARD, 0, ahead + number))
    put_off = range(max(microbatches - delay, 0), microbatches)
    return actions + [Action(Kind.WEIGHT_GRADIENT, 0, number) for number in put_off]

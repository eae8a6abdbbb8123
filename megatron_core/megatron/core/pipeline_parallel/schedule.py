# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: for every rank the list of its actions, in order.

`make_schedule` returns computes only; `transfers.py` adds the transfers between ranks, and
`simulate.py` times and checks schedules without processes. With p stages, m microbatches and v
model chunks per rank:

- "1f1b": rank r computes min(p - r - 1, m) warmup forwards, then alternates forward and backward in
  the steady state, and computes the remaining backwards in the cooldown (Narayanan et al. 2021,
  "Efficient large-scale language model training on GPU clusters", section 2.2). At most p - r
  microbatches are in flight. The bubble is (p - 1) / (m + p - 1) of the time.
- "interleaved": 1f1b over v model chunks per rank, in groups of N microbatches (ibid.). The bubble
  is (p - 1) / (v m + p - 1) for N = p, at 1 + (p - 1) / (p v) times the activation memory.
- "zb-h1": 1f1b with split backward: rank r defers each weight gradient by r microbatches, which
  fills the bubble of the cooldown (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv
  2401.10241, section 2.2). At most p microbatches are in flight on every rank, as on rank 0 in
  1f1b.
- "forward": forwards only, for evaluation.

In every schedule a model chunk computes its weight gradients in the order of the microbatches, so
their sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class ActionKind(Enum):
    """The operation of an action on one model chunk and one microbatch."""

    FORWARD = "F"
    BACKWARD = "B"  # I and W in one backward pass
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    GATHER = "G"
    REDUCE = "R"


COMPUTES = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.INPUT_GRADIENT,
        ActionKind.WEIGHT_GRADIENT,
    },
)
SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD})
TRANSFERS = SENDS | RECEIVES
#: Transfers of activations, towards the last stage. The other transfers are of their gradients.
FORWARD_TRANSFERS = frozenset({ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD})


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list.

    Args:
        chunk: the rank's own microbatch of the chunk of layers, 0 the nearest to the embedding.
        microbatch: its microbatch in the step.
    """

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The action lists of all ranks.

    Args:
        name: name of the schedule.
        stages: p, the number of ranks of the pipeline.
        chunks: v, the number of model chunks per rank. Chunk c of rank r is virtual pipeline stage
            c · p + r.
        microbatches: m, the number of microbatches in a step.
        ranks: the actions of each rank.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Return the virtual pipeline stage of a rank's chunk, from 0 to p · v - 1."""
        return chunk * self.stages + rank

    def next_stage(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return the (rank, chunk) that receives this chunk's output; None for the last stage."""
        next_virtual_stage = self.virtual_stage(rank, chunk) + 1
        if next_virtual_stage == self.stages * self.chunks:
            return None
        return next_virtual_stage % self.stages, next_virtual_stage // self.stages

    def prev_stage(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return the (rank, chunk) whose output this chunk receives; None for the first stage."""
        virtual_stage = self.virtual_stage(rank, chunk) - 1
        return (
            None
            if virtual_stage < 0
            else (virtual_stage % self.stages, virtual_stage // self.stages)
        )

    def matching_transfer(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Return the peer rank of a transfer and its matching action; None if there is none."""
        if action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD):
            stage = self.next_stage(rank, action.chunk)
        elif action.kind in (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_FORWARD):
            stage = self.prev_stage(rank, action.chunk)
        else:
            stage = None
        if stage is None:
            return None
        return stage[0], Action(_MATCHING_KINDS[action.kind], stage[1], action.microbatch)


_MATCHING_KINDS: Mapping[ActionKind, ActionKind] = MappingProxyType(
    {
        ActionKind.SEND_FORWARD: ActionKind.RECEIVE_FORWARD,
        ActionKind.RECEIVE_FORWARD: ActionKind.SEND_FORWARD,
        ActionKind.SEND_BACKWARD: ActionKind.RECEIVE_BACKWARD,
        ActionKind.RECEIVE_BACKWARD: ActionKind.SEND_BACKWARD,
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
    """Return a schedule of computes only, without transfers, all-gathers and reductions.

    Args:
        name: "1f1b", "interleaved", "zb-h1" or "forward".
        stages: p.
        microbatches: m.
        chunks: v.
        group_size: N, the number of microbatches that one chunk computes before the next chunk
            starts. None is the smallest valid number: p if m is a multiple of p. "1f1b" and "zb-h1"
            have none.
        weight_delay: maximum number of microbatches by which "zb-h1" defers a weight gradient, and
            keeps its activations; None is r. With 0 each W follows its I, and the bubble of a rank
            is (p - 1)(F + I).

    Raises:
        ValueError: all errors that `problems` lists, in one message.
    """
    errors = problems(
        name, stages=stages, microbatches=microbatches, chunks=chunks, group_size=group_size
    )
    if weight_delay is not None and name != "zb-h1":
        errors.append(f"{name} defers no weight gradients: leave out weight delay {weight_delay}")
    if weight_delay is not None and weight_delay < 0:
        errors.append(f"weight delay {weight_delay}: use 0 or more")
    if errors:
        raise ValueError("; ".join(errors))
    size = group_size or min(stages, microbatches)
    ranks: Iterator[list[Action]]
    if name == "1f1b":
        ranks = (_one_forward_one_backward(stages - r - 1, microbatches) for r in range(stages))
    elif name == "interleaved":
        # The smallest valid group has the shortest warmup, and so the least activation memory.
        size = group_size or _group_sizes(stages, microbatches)[0]
        table = _schedule_table(microbatches, chunks, size)
        # The warmup covers all chunks but the last, for one group of microbatches.
        num_extra_warmup = (chunks - 1) * size
        ranks = (
            _interleaved(2 * (stages - r - 1) + num_extra_warmup, table, chunks)
            for r in range(stages)
        )
    elif name == "zb-h1":
        delays = (r if weight_delay is None else min(r, weight_delay) for r in range(stages))
        ranks = (_zero_bubble(stages - r, microbatches, delay) for r, delay in enumerate(delays))
    else:
        table = _schedule_table(microbatches, chunks, size)
        ranks = ([Action(ActionKind.FORWARD, *entry) for entry in table] for _ in range(stages))
    return Schedule(name, stages, chunks, microbatches, tuple(tuple(rank) for rank in ranks))


def problems(
    name: str, *, stages: int, microbatches: int, chunks: int = 1, group_size: int | None = None
) -> list[str]:
    """Return all errors in the arguments of a schedule, each with its fix.

    The groups of "interleaved", also the last one, need at least p microbatches, unless one group
    has all microbatches. With fewer, rank 0 would need the input of its second chunk before the
    last rank has computed it.
    """
    if name not in ("1f1b", "interleaved", "zb-h1", "forward"):
        return [f"no schedule {name!r}: use 1f1b, interleaved, zb-h1 or forward"]
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    errors = [f"{what} {size}: use 1 or more" for what, size in sizes.items() if size < 1]
    if group_size is not None and group_size < 1:
        errors.append(f"group size {group_size}: use 1 or more")
    if errors:
        return errors
    if name in ("1f1b", "zb-h1"):
        if chunks > 1:
            errors.append(f"{name} has one chunk per stage, not {chunks}: use interleaved")
        if group_size is not None:
            errors.append(
                f"{name} has no groups of microbatches: leave out group size {group_size}"
            )
    if chunks > 1 and stages == 1:
        errors.append(f"{chunks} chunks on one stage overlap nothing: use 1 chunk")
    if name == "interleaved":
        if chunks == 1:
            errors.append("interleaved with one chunk per stage is 1f1b: use that or more chunks")
        elif stages > 1:
            errors += _group_problems(stages, microbatches, group_size)
    return errors


def _group_problems(stages: int, microbatches: int, group_size: int | None) -> list[str]:
    """Return the errors in the group size of the interleaved schedule."""
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
    return [f"{text}: use groups of {nearest}, or other numbers of microbatches"]


def _group_sizes(stages: int, microbatches: int) -> list[int]:
    """Return the valid group sizes of the interleaved schedule, in order."""
    return [
        n
        for n in range(min(stages, microbatches), microbatches + 1)
        if microbatches % n == 0 or microbatches % n >= stages
    ]


def _one_forward_one_backward(num_warmup: int, microbatches: int) -> list[Action]:
    """Return the 1F1B list of a rank with `num_warmup` forwards before its steady state."""
    num_warmup = min(num_warmup, microbatches)
    actions = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(num_warmup)]
    # Steady state, and without further forwards the cooldown. Forward comes first in a pair: the
    # next stage waits for its output.
    for microbatch in range(microbatches):
        if num_warmup + microbatch < microbatches:
            actions.append(Action(ActionKind.FORWARD, 0, num_warmup + microbatch))
        actions.append(Action(ActionKind.BACKWARD, 0, microbatch))
    return actions


def _schedule_table(microbatches: int, chunks: int, size: int) -> list[tuple[int, int]]:
    """Return (chunk, microbatch) in the order of forwards: by group, then by chunk."""
    return [
        (chunk, microbatch)
        for start in range(0, microbatches, size)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + size, microbatches))
    ]


def _interleaved(num_warmup: int, table: list[tuple[int, int]], chunks: int) -> list[Action]:
    """Return the interleaved 1F1B list of a rank with `num_warmup` warmup forwards.

    Backward follows the same table with the chunks in reverse order.
    """
    num_warmup = min(num_warmup, len(table))
    actions = [Action(ActionKind.FORWARD, *entry) for entry in table[:num_warmup]]
    for position, (chunk, microbatch) in enumerate(table):
        if num_warmup + position < len(table):
            actions.append(Action(ActionKind.FORWARD, *table[num_warmup + position]))
        # Backward enters the model at the last chunk.
        actions.append(Action(ActionKind.BACKWARD, chunks - 1 - chunk, microbatch))
    return actions


def _zero_bubble(num_warmup: int, microbatches: int, delay: int) -> list[Action]:
    """Return the ZB-H1 list of a rank: `num_warmup` forwards, then I, the W deferred by `delay`
    microbatches, and F.

    W comes before the next F, which would otherwise add a microbatch in flight.
    """
    num_warmup = min(num_warmup, microbatches)
    actions = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(microbatches):
        # I first: the previous stage waits for its input gradient.
        actions.append(Action(ActionKind.INPUT_GRADIENT, 0, microbatch))
        if microbatch >= delay:
            actions.append(Action(ActionKind.WEIGHT_GRADIENT, 0, microbatch - delay))
        if num_warmup + microbatch < microbatches:
            actions.append(Action(ActionKind.FORWARD, 0, num_warmup + microbatch))
    # Cooldown: the deferred weight gradients fill the bubble.
    deferred = range(max(microbatches - delay, 0), microbatches)
    return actions + [Action(ActionKind.WEIGHT_GRADIENT, 0, microbatch) for microbatch in deferred]

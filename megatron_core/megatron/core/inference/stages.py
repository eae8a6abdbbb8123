# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of an engine: hidden states from one to the next, results from the last to all.

Every rank of a pipeline runs an engine of its own over its part of the layers. All of them are told
the same requests and plan the same steps, so no plan is sent: the hidden states of a step go from
stage to stage, and what the last stage has chosen goes back to all others as one message each. A
stage waits for that only when it finishes the step, so as many steps may be under way as there are
stages. Drafts that the last stage predicts are a part of that message; those of a draft model,
which the first stage has, go from stage to stage before the hidden states of the step that verifies
them.

Messages of one kind between two ranks arrive in the order of the steps. Hidden states and results
have communicators of their own, so a result never queues behind hidden states that wait for their
receiver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.comm import Pending, all_reduce
from megatron.core.comm.point_to_point import P2PMessage, exchange_async
from megatron.core.inference.sampling import Sampled
from megatron.core.inference.scheduler import BatchPlan
from megatron.core.process_groups import Group, ProcessGroupCollection


@dataclass(frozen=True)
class PipelineGroups:
    """The pipeline stages of an engine.

    Args:
        stages: hidden states pass along them.
        results: the same ranks, over another communicator.
    """

    stages: Group
    results: Group

    @staticmethod
    def single() -> PipelineGroups:
        """Return the only stage."""
        return PipelineGroups(Group.single(), Group.single())

    @staticmethod
    def of(groups: ProcessGroupCollection) -> PipelineGroups:
        """Return those of a rank."""
        return PipelineGroups(groups["pp"], groups["pp_backward"])


@dataclass(frozen=True, eq=False, kw_only=True)
class StepResult:
    """What a step has computed, on the host once its work is done.

    Args:
        sampled: tokens of the rows that get some; None if there are none, or another pipeline stage
            has them.
        prompt_logprobs: of the prompts of some outputs, one after the other.
        drafts: of each sampled row, after what was chosen, where a proposer predicts them.
        results: these three, on their way from the last stage; None on that.
        sends: to other stages, on their way.
    """

    sampled: Sampled | None = None
    prompt_logprobs: Sequence[Tensor] = ()
    drafts: Sequence[Sequence[int]] = ()
    results: Pending | None = None
    sends: Sequence[Pending] = ()


def packed(
    sampled: Sampled | None,
    prompt_logprobs: Sequence[Tensor],
    drafts: Sequence[Sequence[int]],
    *,
    most: int,
) -> Tensor:
    """Return what a step has found as fp64 numbers, which hold all of it exactly; drafts are those
    of rows, each at most so many."""
    parts: list[Tensor] = []
    if sampled is not None:
        parts += [sampled.tokens, sampled.logprobs, sampled.finite]
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            parts += [sampled.top_ids.flatten(), sampled.top_logprobs.flatten()]
        parts += [_of_one_length(drafts, most, sampled.tokens.device).flatten()]
    return torch.cat([part.double() for part in (*parts, *prompt_logprobs)])


def unpacked(
    numbers: Tensor, *, rows: int, tops: int, prompts: Sequence[int], drafts: tuple[int, int]
) -> tuple[Sampled | None, list[Tensor], list[list[int]]]:
    """Undo `packed`.

    Args:
        rows: places after which a token is chosen.
        tops: alternatives that are reported of each.
        prompts: the lengths of the log-probabilities of prompts.
        drafts: rows that have drafts, and how many each has at most.
    """
    wide = rows * tops
    parts = numbers.split([rows, rows, rows, wide, wide, drafts[0] * drafts[1], *prompts])
    tokens, logprobs, finite, ids, found, following = parts[:6]
    if not rows:
        return None, list(parts[6:]), []
    sampled = Sampled(
        tokens=tokens.long(),
        logprobs=logprobs,
        finite=finite.bool(),
        top_ids=ids.view(rows, tops).long() if tops else None,
        top_logprobs=found.view(rows, tops) if tops else None,
    )
    return sampled, list(parts[6:]), _of_their_length(following.view(drafts))


def _of_one_length(drafts: Sequence[Sequence[int]], most: int, device: torch.device) -> Tensor:
    """Return the drafts of r rows as int64 [r, most], -1 where there are fewer."""
    padded = [[*found, *[-1] * (most - len(found))] for found in drafts]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def _of_their_length(padded: Tensor) -> list[list[int]]:
    """Undo `_of_one_length`."""
    return [[int(n) for n in row if n >= 0] for row in padded.tolist()]


class StageLink:
    """What one pipeline stage exchanges with the others; the only stage exchanges nothing.

    Args:
        groups: of the stages.
        dtype: of hidden states.
        device: where they are.

    Attributes:
        count: how many stages there are.
        is_first: this stage has the embedding.
        is_last: this stage has the head.
        idle_seconds: spent waiting for other stages.
    """

    def __init__(self, groups: PipelineGroups, *, dtype: torch.dtype, device: torch.device) -> None:
        self._stages, self._results = groups.stages, groups.results
        self._dtype, self._device = dtype, device
        rank, self.count = groups.stages.rank, groups.stages.size
        self.is_first, self.is_last = rank == 0, rank == self.count - 1
        self.idle_seconds = 0.0
        self._passed_on: list[Pending] = []  # drafts on their way to the stage after

    def receive_hidden(self, shape: Sequence[int]) -> Tensor:
        """Return the hidden states of a step from the stage before."""
        landing = torch.empty(shape, dtype=self._dtype, device=self._device)
        (pending,) = exchange_async(
            [P2PMessage(landing, self._stages.rank - 1, False)], self._stages
        )
        return self.wait(pending)

    def send_hidden(self, hidden: Tensor) -> list[Pending]:
        """Start to send hidden states to the stage after; wait before the step is forgotten."""
        message = P2PMessage(hidden.contiguous(), self._stages.rank + 1, True)
        return exchange_async([message], self._stages)

    def expect_results(self, count: int) -> Pending:
        """Start to receive fp64 [count] from the last stage."""
        landing = torch.empty(count, dtype=torch.float64, device=self._device)
        (pending,) = exchange_async(
            [P2PMessage(landing, self._stages.size - 1, False)], self._results
        )
        return pending

    def send_results(self, numbers: Tensor) -> list[Pending]:
        """Start to send fp64 numbers from the last stage to all others."""
        others = range(self.count - 1)
        return exchange_async([P2PMessage(numbers, rank, True) for rank in others], self._results)

    def of_first(self, drafts: Sequence[Sequence[int]], most: int) -> Sequence[Sequence[int]]:
        """Return the drafts that the first stage gives, at most so many of each row; every stage
        calls this between two steps, with as many rows."""
        if self.count == 1:
            return drafts
        padded = _of_one_length(drafts, most, self._device)
        if not self.is_first:
            message = P2PMessage(padded, self._stages.rank - 1, False)
            padded = self.wait(*exchange_async([message], self._stages))
        for pending in self._passed_on:
            self.wait(pending)
        self._passed_on = []
        if not self.is_last:
            message = P2PMessage(padded, self._stages.rank + 1, True)
            self._passed_on = exchange_async([message], self._stages)
        return _of_their_length(padded)

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over the stages, which all call this."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return all_reduce(own, self._stages, op="max").tolist()

    def of_stages(self, number: float) -> list[float]:
        """Return the number that each stage gives; all call this."""
        numbers = torch.zeros(self.count, dtype=torch.float64, device=self._device)
        numbers[self._stages.rank] = number
        return all_reduce(numbers, self._stages).tolist()

    def require_same_plan(self, plan: BatchPlan, group: Group) -> None:
        """Raise ValueError on all ranks of a group unless they have planned the same step."""
        digest = int.from_bytes(plan.digest()[:7], "big")
        own = torch.tensor([digest, -digest], device=self._device)
        most, least = all_reduce(own, group, op="max")
        if most != -least:
            raise ValueError(
                f"the {group.size} ranks of {group.name} have planned different steps: give all of "
                "them the same requests, in one order and before the same step"
            )

    def wait(self, pending: Pending) -> Tensor:
        """Return what is pending; the time that takes counts as idle."""
        start = time.perf_counter()
        found = pending.wait()
        self.idle_seconds += time.perf_counter() - start
        return found

# SPDX-License-Identifier: Apache-2.0
"""Pipeline-parallel inference: communication between the pipeline stages of an engine.

Each pipeline rank runs its own engine over its layers. All ranks add the same requests and schedule
the same steps, so no schedule is sent. The hidden states of a step pass from stage to stage. The
last stage sends the sampled tokens to all other stages, one message each. A stage waits for this
message only when it finishes the step, so as many steps are in flight as there are stages. The
message includes the drafts that the last stage predicts. Drafts of a draft model come from the
first stage and pass from stage to stage before the hidden states of the step that verifies them.

Messages of one kind between two ranks arrive in step order. Hidden states and results use separate
communicators, so that a result never queues behind hidden states whose receiver is still busy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.comm import Pending, all_reduce
from megatron.core.comm.collectives import P2PMessage, exchange_async
from megatron.core.inference.request_state import SchedulerOutput
from megatron.core.inference.sampling import Sampled
from megatron.core.process_groups import Group, ProcessGroupCollection


@dataclass(frozen=True)
class PipelineGroups:
    """Communicators of the pipeline stages of an engine.

    Args:
        stages: group for hidden states and drafts.
        results: the same ranks over a second communicator, for results.
    """

    stages: Group
    results: Group

    @staticmethod
    def single() -> PipelineGroups:
        """Return the groups of an engine with a single stage."""
        return PipelineGroups(Group.single(), Group.single())

    @staticmethod
    def from_groups(groups: ProcessGroupCollection) -> PipelineGroups:
        """Return the pipeline groups of this rank."""
        return PipelineGroups(groups["pp"], groups["pp_backward"])


@dataclass(frozen=True, eq=False, kw_only=True)
class StepResult:
    """Result of a step, on the host once the step's work is done.

    Args:
        sampled: sampled tokens; None without sampled sequences, or on stages before the last.
        prompt_logprobs: prompt log-probabilities, one fp64 tensor per entry of the step.
        drafts: predicted drafts of each sampled sequence.
        results: pending receive of the three values above on stages before the last, else None.
        sends: pending sends to other stages.
    """

    sampled: Sampled | None = None
    prompt_logprobs: Sequence[Tensor] = ()
    drafts: Sequence[Sequence[int]] = ()
    results: Pending | None = None
    sends: Sequence[Pending] = ()


def pack_results(
    sampled: Sampled | None,
    prompt_logprobs: Sequence[Tensor],
    drafts: Sequence[Sequence[int]],
    *,
    max_drafts: int,
) -> Tensor:
    """Pack the result of a step into one fp64 tensor.

    Args:
        sampled: sampled tokens; None without sampled sequences.
        prompt_logprobs: fp64 tensors of prompt log-probabilities.
        drafts: predicted drafts of each sampled sequence.
        max_drafts: drafts are padded to this number per sequence.
    """
    # One message per step. fp64 holds token ids, fp32 values and booleans exactly.
    tensors: list[Tensor] = []
    if sampled is not None:
        tensors += [sampled.tokens, sampled.logprobs, sampled.finite]
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            tensors += [sampled.top_ids.flatten(), sampled.top_logprobs.flatten()]
        tensors += [_pad_drafts(drafts, max_drafts, sampled.tokens.device).flatten()]
    return torch.cat([tensor.double() for tensor in (*tensors, *prompt_logprobs)])


def unpack_results(
    values: Tensor,
    *,
    num_rows: int,
    num_top: int,
    prompt_sizes: Sequence[int],
    drafts_shape: tuple[int, int],
) -> tuple[Sampled | None, list[Tensor], list[list[int]]]:
    """Invert `pack_results`.

    Args:
        values: fp64 result of a step.
        num_rows: number of sampled positions.
        num_top: reported alternatives per sampled position.
        prompt_sizes: sizes of the tensors of prompt log-probabilities.
        drafts_shape: number of sequences with drafts, and the padded number of drafts of each.
    """
    sizes = [num_rows] * 3 + [num_rows * num_top] * 2 + [drafts_shape[0] * drafts_shape[1]]
    tensors = values.split([*sizes, *prompt_sizes])
    tokens, logprobs, finite, top_ids, top_logprobs, drafts = tensors[:6]
    if not num_rows:
        return None, list(tensors[6:]), []
    sampled = Sampled(
        tokens=tokens.long(),
        logprobs=logprobs,
        finite=finite.bool(),
        top_ids=top_ids.view(num_rows, num_top).long() if num_top else None,
        top_logprobs=top_logprobs.view(num_rows, num_top) if num_top else None,
    )
    return sampled, list(tensors[6:]), _unpad_drafts(drafts.view(drafts_shape))


def _pad_drafts(drafts: Sequence[Sequence[int]], max_drafts: int, device: torch.device) -> Tensor:
    """Return the drafts of r sequences as int64 [r, max_drafts], padded with -1."""
    padded = [[*tokens, *[-1] * (max_drafts - len(tokens))] for tokens in drafts]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def _unpad_drafts(padded: Tensor) -> list[list[int]]:
    """Invert `_pad_drafts`."""
    return [[int(token) for token in tokens if token >= 0] for tokens in padded.tolist()]


class StageLink:
    """Communication of one pipeline stage; a single stage communicates nothing.

    Args:
        groups: communicators of the stages.
        dtype: dtype of hidden states.
        device: device of hidden states.

    Attributes:
        count: number of stages.
        is_first: True on the stage with the embedding.
        is_last: True on the stage with the output head.
        idle_seconds: seconds spent waiting for other stages.
    """

    def __init__(self, groups: PipelineGroups, *, dtype: torch.dtype, device: torch.device) -> None:
        self._stages, self._results = groups.stages, groups.results
        self._dtype, self._device = dtype, device
        rank, self.count = groups.stages.rank, groups.stages.size
        self.is_first, self.is_last = rank == 0, rank == self.count - 1
        self.idle_seconds = 0.0
        # Sends of drafts to the next stage. Their buffers must live until the sends complete.
        self._draft_sends: list[Pending] = []

    def receive_hidden(self, shape: Sequence[int]) -> Tensor:
        """Receive the hidden states of a step from the previous stage."""
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        (pending,) = exchange_async(
            [P2PMessage(buffer, self._stages.rank - 1, False)], self._stages
        )
        return self.wait(pending)

    def send_hidden(self, hidden: Tensor) -> list[Pending]:
        """Start sending hidden states to the next stage; wait before dropping the handles."""
        # The handle keeps the buffer alive, so the caching allocator cannot reuse it too early.
        message = P2PMessage(hidden.contiguous(), self._stages.rank + 1, True)
        return exchange_async([message], self._stages)

    def expect_results(self, count: int) -> Pending:
        """Start receiving a result, fp64 [count], from the last stage."""
        buffer = torch.empty(count, dtype=torch.float64, device=self._device)
        (pending,) = exchange_async(
            [P2PMessage(buffer, self._stages.size - 1, False)], self._results
        )
        return pending

    def send_results(self, values: Tensor) -> list[Pending]:
        """Start sending a result from the last stage to all other stages."""
        messages = [P2PMessage(values, rank, True) for rank in range(self.count - 1)]
        return exchange_async(messages, self._results)

    def broadcast_drafts(
        self, drafts: Sequence[Sequence[int]], max_drafts: int
    ) -> Sequence[Sequence[int]]:
        """Return the first stage's drafts on every stage.

        All stages call this between two steps with the same number of sequences.

        Args:
            drafts: drafts of each sequence; only the first stage's drafts count.
            max_drafts: drafts are padded to this number per sequence.
        """
        if self.count == 1:
            return drafts
        padded = _pad_drafts(drafts, max_drafts, self._device)
        if not self.is_first:
            message = P2PMessage(padded, self._stages.rank - 1, False)
            padded = self.wait(*exchange_async([message], self._stages))
        # The sends of the previous step must complete before their buffers are dropped.
        for pending in self._draft_sends:
            self.wait(pending)
        self._draft_sends = []
        if not self.is_last:
            message = P2PMessage(padded, self._stages.rank + 1, True)
            self._draft_sends = exchange_async([message], self._stages)
        return _unpad_drafts(padded)

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """All-reduce integers over the stages with max."""
        local_numbers = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return all_reduce(local_numbers, self._stages, op="max").tolist()

    def all_gather_number(self, number: float) -> list[float]:
        """All-gather one number per stage."""
        # A sum of one-hot vectors: the group of stages needs no all-gather of host objects.
        numbers = torch.zeros(self.count, dtype=torch.float64, device=self._device)
        numbers[self._stages.rank] = number
        return all_reduce(numbers, self._stages).tolist()

    def require_same_plan(self, scheduler_output: SchedulerOutput, group: Group) -> None:
        """Raise ValueError on all ranks of a group unless all have scheduled the same step."""
        # 7 bytes fit int64 with either sign. Equal maxima of d and -d mean equal digests, so every
        # rank detects the difference in a single all-reduce.
        digest = int.from_bytes(scheduler_output.digest()[:7], "big")
        bounds = torch.tensor([digest, -digest], device=self._device)
        max_digest, max_negative = all_reduce(bounds, group, op="max")
        if max_digest != -max_negative:
            raise ValueError(
                f"the {group.size} ranks of {group.name} have scheduled different steps: give "
                "all of them the same requests, in the same order and before the same step"
            )

    def wait(self, pending: Pending) -> Tensor:
        """Wait for a pending message and count the time as idle."""
        start = time.perf_counter()
        tensor = pending.wait()
        self.idle_seconds += time.perf_counter() - start
        return tensor

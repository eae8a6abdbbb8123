# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a step's microbatches through pipeline stages.

`PipelineForwardBackward` is the counterpart of the single stage's `ForwardBackward`. Every stage
reads the microbatches of its data-parallel rank, so that all stages know the shape of incoming
activations, and sequence lengths may vary. The last stage computes the loss; the other stages add
0, so that the sum over all ranks is the step's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import (
    Action,
    Schedule,
    make_schedule,
    with_transfers,
    with_weight_traffic,
)
from megatron.core.pipeline_parallel.runtime import AutogradWorker, Executor, program
from megatron.core.process_groups import ProcessGroupCollection
from megatron.training.fault_tolerance.replay import StageChecksums
from megatron.training.step import Microbatch, auxiliary_factors


class PipelineForwardBackward:
    """Run a step's microbatches through the pipeline stages, and reduce the gradients.

    Args:
        model: this rank's model chunks.
        engine: data-parallel engine over the model's store.
        groups: "pp" connects the stages; gradients are sent back over "pp_backward".
        schedule: "1f1b", "interleaved" or "zb-h1".
        group_size: consecutive microbatches of a chunk in the interleaved schedule.
        weight_delay: maximum number of microbatches by which "zb-h1" defers weight gradients, equal
            on all stages. Use 0 with full recomputation, which keeps the inputs of W in both cases.
        observe: called before each action of this rank.
        stage_checksums: checksums of the activations that each chunk of this rank receives and
            sends in a forward pass; None records none.
    """

    def __init__(
        self,
        model: GPTModel,
        engine: DataParallel,
        *,
        groups: ProcessGroupCollection,
        schedule: str = "1f1b",
        group_size: int | None = None,
        weight_delay: int | None = None,
        observe: Callable[[Action], None] | None = None,
        stage_checksums: StageChecksums | None = None,
    ) -> None:
        self.model, self.engine, self.group = model, engine, groups["pp"]
        self.backward_group = groups["pp_backward"]
        self.name, self.group_size, self.observe = schedule, group_size, observe
        self.weight_delay, self.stage_checksums = weight_delay, stage_checksums
        self._cached_schedule = lru_cache(maxsize=8)(self._make_schedule)
        model.store.splits = schedule == "zb-h1"

    def schedule(self, microbatches: int, *, backward: bool = True) -> Schedule:
        """Return the schedules of all stages for a step of `microbatches` microbatches."""
        return self._cached_schedule(microbatches, backward)

    def __call__(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the microbatches' contributions to the step's loss on this rank, an
        fp64 scalar.

        Args:
            factors: factor on each microbatch's token losses, loss scale included, fp32
                [microbatches].
        """
        total = torch.zeros((), dtype=torch.float64, device=self.model.store.device)
        cp = self.engine.groups["cp"]
        auxiliary = auxiliary_factors(self.model, microbatches, factors, cp=cp)

        def run(chunk: int, index: int, hidden_states: torch.Tensor | None) -> torch.Tensor:
            output = compute(chunk, index, hidden_states)
            if self.stage_checksums is not None:
                self.stage_checksums.show(chunk, hidden_states, output)
            return output

        def compute(chunk: int, index: int, hidden_states: torch.Tensor | None) -> torch.Tensor:
            batch = microbatches[index]
            if not self._is_last(chunk):
                return self.model(
                    batch.tokens,
                    layout=batch.layout,
                    chunk=chunk,
                    hidden_states=hidden_states,
                    **auxiliary[index],
                )
            loss, _ = self.model.loss(
                batch.tokens,
                batch.labels,
                batch.loss_mask * factors[index],
                chunk=chunk,
                layout=batch.layout,
                hidden_states=hidden_states,
                **batch.mtp_arguments(factors[index]),
                **auxiliary[index],
            )
            total.add_(loss.detach())
            return loss

        schedule = self.schedule(len(microbatches))
        self.engine.begin_step(program=program(schedule, self.group.rank))
        try:
            self._execute(schedule, microbatches, run, trains=True)
            self.engine.finish()
        except BaseException:
            self.engine.abort()
            raise
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the sums of masked token losses and of masks of the microbatches, fp64 [2];
        zeros if the last stage is on another rank."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.model.store.device)

        def run(chunk: int, index: int, hidden_states: torch.Tensor | None) -> torch.Tensor:
            batch = microbatches[index]
            forward_inputs = {"layout": batch.without_dropout, "hidden_states": hidden_states}
            if not self._is_last(chunk):
                return self.model(batch.tokens, chunk=chunk, **forward_inputs)
            loss, _ = self.model.loss(
                batch.tokens, batch.labels, batch.loss_mask, chunk=chunk, **forward_inputs
            )
            sums.add_(torch.stack([loss, batch.loss_mask.sum()]))
            return loss

        schedule = self.schedule(len(microbatches), backward=False)
        with self.engine.evaluation(program(schedule, self.group.rank)):
            self._execute(schedule, microbatches, run, trains=False)
        return sums

    def _execute(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        run: Callable[[int, int, torch.Tensor | None], torch.Tensor],
        *,
        trains: bool,
    ) -> None:
        store = self.model.store

        def recv_buffer(index: int) -> torch.Tensor:
            shape = self.model.boundary_shape(microbatches[index].tokens)
            return torch.empty(shape, dtype=store.dtype, device=store.device)

        worker = AutogradWorker(
            run,
            recv_buffer=recv_buffer,
            engine=self.engine,
            defer=store.defer if trains else None,
            microbatches=len(microbatches),
        )
        Executor(
            schedule,
            worker,
            group=self.group,
            backward_group=self.backward_group,
            observe=self.observe,
        ).run()

    def _is_last(self, chunk: int) -> bool:
        return self.model.holds_head and chunk == self.model.num_chunks - 1

    def _make_schedule(self, microbatches: int, backward: bool) -> Schedule:
        compute_schedule = make_schedule(
            self.name if backward else "forward",
            stages=self.group.size,
            microbatches=microbatches,
            chunks=self.model.num_chunks,
            group_size=self.group_size if backward else None,
            weight_delay=self.weight_delay if backward else None,
        )
        gathers, reduces = weight_traffic(self.engine)
        return with_weight_traffic(
            with_transfers(compute_schedule),
            gathers=gathers,
            reduces=reduces if backward else "none",
        )


def weight_traffic(engine: DataParallel) -> tuple[str, str]:
    """Return how often a step gathers each chunk's weights, and how often it reduces gradients.

    The values are "none", "once", or "each": in every forward or backward pass of the chunk.
    Nothing is communicated only if the data-parallel groups of both dense weights and experts,
    which may differ in size, have one rank.
    """
    if engine.groups["dense_dp"].size == engine.groups["expert_dp"].size == 1:
        return "none", "none"
    reshards = [gatherer.reshards for gatherer in engine.gatherers if gatherer.prefetch]
    gathers = "none" if not reshards else "each" if any(reshards) else "once"
    if engine.placement.gradient or any(bucket.every_microbatch for bucket in engine.buckets):
        return gathers, "each"
    return gathers, "once" if engine.config.overlap_grad_reduce else "none"

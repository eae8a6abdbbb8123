# SPDX-License-Identifier: Apache-2.0
"""The microbatches of a step through a pipeline: what `ForwardBackward` is for a single stage.

Every stage reads the microbatches of its lane, so that all know the shape of what arrives, and
sequences may be as long as they like. The loss is computed in the last stage; the others add 0 to
it, so that the sum over all ranks is the step's.
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
from megatron.core.pipeline_parallel.runtime import Executor
from megatron.core.pipeline_parallel.stage import AutogradWorker, program
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_sharding import Placement
from megatron.training.failures.evidence import StageBits
from megatron.training.step import Microbatch, auxiliary_factors


class PipelineForwardBackward:
    """Run the microbatches of a step through the stages and make every gradient whole.

    Args:
        model: this rank's chunks.
        engine: over its store.
        groups: "pp" are the stages; gradients go back over "pp_backward".
        schedule: "1f1b", "interleaved" or "zb-h1".
        group_size: microbatches that a chunk of the interleaved schedule takes in turn.
        weight_delay: how many microbatches "zb-h1" puts weight gradients off at most; the same on
            all stages. Take 0 if layers are recomputed: what W needs is kept, recomputed or not.
        observe: told every action of this rank before it is carried out.
        shown: shown what each chunk of this rank receives and sends in the forward of a step.
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
        shown: StageBits | None = None,
    ) -> None:
        self.model, self.engine, self.group = model, engine, groups["pp"]
        self.backward_group = groups["pp_backward"]
        self.name, self.group_size, self.observe = schedule, group_size, observe
        self.weight_delay, self.shown = weight_delay, shown
        self._made = lru_cache(maxsize=8)(self._make)
        model.store.splits = schedule == "zb-h1"

    def schedule(self, microbatches: int, *, backward: bool = True) -> Schedule:
        """Return the lists of all stages for a step of so many microbatches."""
        return self._made(microbatches, backward)

    def __call__(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the microbatches add to the step's loss on this rank, an fp64
        scalar.

        Args:
            factors: of each microbatch's token losses, loss scale included, fp32 [microbatches].
        """
        total = torch.zeros((), dtype=torch.float64, device=self.model.store.device)
        cp = self.engine.groups["cp"]
        auxiliary = auxiliary_factors(self.model, microbatches, factors, cp=cp)

        def run(chunk: int, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
            made = compute(chunk, index, hidden)
            if self.shown is not None:
                self.shown.show(chunk, hidden, made)
            return made

        def compute(chunk: int, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
            batch = microbatches[index]
            if not self._is_last(chunk):
                also = {"sample_ids": batch.sample_ids, **auxiliary[index]}
                return self._hidden(chunk, batch, hidden, **also)
            loss, _ = self.model.loss(
                batch.tokens,
                batch.labels,
                batch.loss_mask * factors[index],
                chunk=chunk,
                hidden=hidden,
                sample_ids=batch.sample_ids,
                **batch.further(factors[index]),
                **batch.documents,
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
        """Return the sums of masked token losses and of masks of these microbatches, fp64 [2];
        zeros where the last stage is elsewhere."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.model.store.device)

        def run(chunk: int, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
            batch = microbatches[index]
            if not self._is_last(chunk):
                return self._hidden(chunk, batch, hidden)
            loss, _ = self.model.loss(
                batch.tokens,
                batch.labels,
                batch.loss_mask,
                chunk=chunk,
                hidden=hidden,
                **batch.documents,
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

        def landing(index: int) -> torch.Tensor:
            shape = self.model.boundary_shape(microbatches[index].tokens)
            return torch.empty(shape, dtype=store.dtype, device=store.device)

        worker = AutogradWorker(
            run,
            landing=landing,
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

    def _hidden(
        self,
        chunk: int,
        batch: Microbatch,
        hidden: torch.Tensor | None,
        **also: torch.Tensor,
    ) -> torch.Tensor:
        return self.model.hidden(
            batch.tokens, chunk=chunk, hidden=hidden, **batch.documents, **also
        )

    def _is_last(self, chunk: int) -> bool:
        return self.model.holds_head and chunk == self.model.num_chunks - 1

    def _make(self, microbatches: int, backward: bool) -> Schedule:
        compute = make_schedule(
            self.name if backward else "forward",
            stages=self.group.size,
            microbatches=microbatches,
            chunks=self.model.num_chunks,
            group_size=self.group_size if backward else None,
            weight_delay=self.weight_delay if backward else None,
        )
        gathers, reduces = weight_traffic(self.engine)
        return with_weight_traffic(
            with_transfers(compute),
            gathers=gathers,
            reduces=reduces if backward else "none",
        )


def weight_traffic(engine: DataParallel) -> tuple[str, str]:
    """Return how often a step gathers each chunk's weights, and reduces its gradients: "none",
    "once" or "each" time that they are used, or put.

    Nothing travels only where experts, too, are alone on their lanes, which may be more or fewer
    than those of dense weights.
    """
    placement: Placement = engine.placement
    if engine.groups["lanes"].size == engine.groups["expert_lanes"].size == 1:
        return "none", "none"
    gathers = "none"
    if engine.config.overlap_param_gather and placement.optimizer:
        gathers = "each" if placement.weight else "once"
    if placement.gradient:
        return gathers, "each"
    return gathers, "once" if engine.config.overlap_grad_reduce else "none"

# SPDX-License-Identifier: Apache-2.0
"""One training step: forward and backward of all microbatches, gradient reduction, optimizer
update.

The loss of a step is defined here; all scaling is in the weight of each token's loss:

    mean:       mean over data-parallel ranks and microbatches of
                (masked sum over the microbatch / its tokens); microbatches of several sizes are
                weighted by their samples
    per token:  masked sum over everything / all tokens of the step

where a microbatch's tokens are counted over context-parallel ranks. Every gradient reduction is
then a plain sum, and the reported loss is the sum of the data-parallel ranks' losses.

`ForwardBackward` runs the microbatches on a single stage, `PipelineForwardBackward` through
pipeline stages. Every stage reads the microbatches of its data-parallel rank, so that all stages
know the shape of incoming activations, and sequence lengths may vary. The last stage computes the
loss; the other stages add 0, so that the sum over all ranks is the step's loss.
`FullIterationGraph` runs the microbatches of a step as one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import torch

from megatron.core.comm import all_reduce
from megatron.core.context_parallel import SequenceLayout
from megatron.core.device import Recorder
from megatron.core.distributed import DataParallel
from megatron.core.distributed.data_parallel import StepRecording, num_unplanned_uses
from megatron.core.models.gpt import GPTModel, MTPTargets
from megatron.core.moe import CapacityCheck
from megatron.core.optimizer import Optimizer
from megatron.core.pipeline_parallel import (
    Action,
    Schedule,
    make_schedule,
    with_transfers,
    with_weight_traffic,
)
from megatron.core.pipeline_parallel.runtime import AutogradWorker, Executor, program
from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.core.weight_sharding import loss_factor
from megatron.training.fault_tolerance.replay import (
    Replayer,
    RerunPolicy,
    StageChecksums,
    StepComputation,
)
from megatron.training.hooks import StepReport


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The inputs of one forward pass.

    Args:
        tokens, labels: int64 [b, s].
        loss_mask: fp32 [b, s]; 0 excludes a token from the loss.
        layout: positions, documents and, for dropout, sample numbers of these tokens. With context
            parallelism, s is s/cp in all tensors.
        mtp_targets: inputs and targets of multi-token prediction, with a mask as weights; None
            without it.
        share: share of this microbatch in the step's samples if microbatches differ in size, else
            None.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    layout: SequenceLayout
    mtp_targets: MTPTargets | None = None
    share: float | None = None

    @property
    def without_dropout(self) -> SequenceLayout:
        """The layout for evaluation, without sample numbers."""
        return self.layout.with_samples(None)

    def mtp_arguments(self, factor: torch.Tensor) -> dict[str, MTPTargets]:
        """Return the multi-token prediction targets in training, as keyword arguments; may be
        empty.

        Args:
            factor: factor on the token losses.
        """
        return {} if self.mtp_targets is None else {"mtp_targets": self.mtp_targets.scaled(factor)}


class LossModel(Protocol):
    """A model that a step can train."""

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether `loss` takes the factor of auxiliary losses, `aux_factor`, in training."""
        ...

    def loss(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        token_weights: torch.Tensor,
        *,
        layout: SequenceLayout,
        **training: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of token_weights · nll, nll [b, s]).

        Args:
            training: `aux_factor` and `mtp_targets`, for models with additional losses.
        """
        ...


class ForwardBackward:
    """Run forward and backward of a step's microbatches, and reduce the gradients.

    No operation needs a number on the host, so that a CUDA graph can capture all of it.
    """

    def __init__(self, model: LossModel, engine: DataParallel) -> None:
        self.model, self.engine = model, engine

    def __call__(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the microbatches' contributions to the step's loss on this rank, an
        fp64 scalar.

        Args:
            factors: factor on each microbatch's token losses, loss scale included, fp32
                [microbatches].
        """
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0].tokens.device)
        cp = self.engine.groups["cp"]
        auxiliary = auxiliary_factors(self.model, microbatches, factors, cp=cp)
        self.engine.begin_step(len(microbatches))
        try:
            for i, (batch, factor) in enumerate(zip(microbatches, factors, strict=True)):
                loss, _ = self.model.loss(
                    batch.tokens,
                    batch.labels,
                    batch.loss_mask * factor,
                    layout=batch.layout,
                    **batch.mtp_arguments(factor),
                    **auxiliary[i],
                )
                total += loss.detach()
                self.engine.backward(loss, last=i == len(microbatches) - 1)
            self.engine.finish()
        except BaseException:
            self.engine.abort()
            raise
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the sums of masked token losses and of masks, fp64 [2]."""
        sums = torch.zeros(2, dtype=torch.float64, device=microbatches[0].tokens.device)
        for batch in microbatches:
            with self.engine.evaluation():
                loss, _ = self.model.loss(
                    batch.tokens, batch.labels, batch.loss_mask, layout=batch.without_dropout
                )
            sums += torch.stack([loss, batch.loss_mask.sum()])
        return sums


def auxiliary_factors(
    model: LossModel, microbatches: Sequence[Microbatch], factors: torch.Tensor, *, cp: Group
) -> list[dict[str, torch.Tensor]]:
    """Return the keyword arguments of auxiliary losses for each microbatch.

    `aux_factor`, an fp32 scalar, is the factor in the step's loss of a mean over the microbatch's
    tokens on all ranks of cp. The mappings are empty for a model without auxiliary losses.

    Args:
        factors: factor on each microbatch's token losses, fp32 [microbatches].
    """
    if not model.has_auxiliary_losses:
        return [{} for _ in microbatches]
    counts = torch.stack([batch.loss_mask.sum(dtype=torch.float32) for batch in microbatches])
    aux_factors = all_reduce(counts, cp) * factors
    return [{"aux_factor": factor} for factor in aux_factors]


class StepRunner(Protocol):
    """Runs the microbatches of a step: `ForwardBackward`, its CUDA graph, or a pipeline."""

    def __call__(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> torch.Tensor:
        """Run forward and backward and reduce gradients; return this rank's loss, an fp64
        scalar."""
        ...

    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return this rank's sums of masked token losses and of masks, fp64 [2]; zeros except on
        the last stage of a pipeline."""
        ...


class TrainStep:
    """Runs training steps.

    Args:
        forward_backward: runs forward and backward; None uses `ForwardBackward`.
        per_token_loss: weight every token of the step equally instead of every microbatch.
        reruns: when a step is recomputed; only its gradients have changed by then.
        capacities: checks the capacity of expert ranks; None if they accept all tokens.
    """

    def __init__(
        self,
        model: LossModel,
        engine: DataParallel,
        *,
        optimizer: Optimizer,
        groups: ProcessGroupCollection,
        forward_backward: StepRunner | None = None,
        per_token_loss: bool = False,
        reruns: RerunPolicy | None = None,
        capacities: CapacityCheck | None = None,
    ) -> None:
        self.capacities = capacities
        self.forward_backward = forward_backward or ForwardBackward(model, engine)
        self.model, self.engine, self.optimizer = model, engine, optimizer
        self.groups, self.per_token_loss = groups, per_token_loss
        self.before_update: Callable[[], None] = lambda: None
        """Called before weights and optimizer state change: a background copy may be in
        progress."""
        self.replayer = Replayer(
            reruns or RerunPolicy(),
            engine=engine,
            world=groups["world"],
            pipelines=groups.grid.ranks(("pp",)),
        )

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        *,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        control_flags: Sequence[float] = (),
        loss_limit: float = math.inf,
    ) -> StepReport:
        """Train on one global batch's local microbatches and update the weights.

        Args:
            decoupled_lr: learning rate of embedding and head, if separate.
            control_flags: numbers to sum over all ranks, in the same all-reduce as the loss.
            loss_limit: skip the step if its loss is above this; equal on all ranks.

        Raises:
            ValueError: there is no microbatch; or tokens exceed the capacity of expert ranks,
                raised on every rank before anything has changed.
        """
        if not microbatches:
            raise ValueError("a step needs at least one microbatch")
        scale = self.optimizer.scaler.scale
        computed, anomaly = self.replayer.run(
            lambda: self._compute(microbatches, control_flags, loss_limit),
            loss_share=loss_limit * scale / self.groups["dense_dp"].size,
        )
        report = StepReport(
            computed.loss,
            False,
            math.nan,
            scale,
            control_flags=computed.control_flags,
            anomaly=anomaly,
        )
        if computed.kind == "nan":
            self.optimizer.scaler.update(True)
            return report
        if computed.kind == "spike":
            return replace(report, spiked=True)
        self.before_update()
        result = self.optimizer.step(
            lr, weight_decay, norm=computed.norm, decoupled_lr=decoupled_lr
        )
        if result.applied:
            self.engine.start_param_sync()
        return replace(
            report,
            applied=result.applied,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
        )

    def _compute(
        self, microbatches: Sequence[Microbatch], control_flags: Sequence[float], limit: float
    ) -> StepComputation:
        """Run forward and backward, reduce gradients, sum loss and control_flags, and classify the
        result."""
        scaler = self.optimizer.scaler
        factors = self.loss_factors(microbatches) * scaler.scale
        if self.capacities is not None:
            self.capacities.begin()
        total = self.forward_backward(microbatches, factors)
        # Every rank takes part, although ranks with the same tokens have the same loss: a decision
        # taken by some ranks only would leave them in different collectives. NaN and Inf times 0
        # are NaN, so they reach all ranks from any rank.
        local_total = total * float(self.groups.coordinates["tp"] == 0)
        numbers = [local_total.view(1), local_total.new_tensor(list(control_flags))]
        if self.capacities is not None:
            numbers.append(self.capacities.count())
        loss, *sums = all_reduce(torch.cat(numbers), self.groups["world"]).tolist()
        over_capacity = 0.0 if self.capacities is None else sums.pop()
        computed = StepComputation(loss / scaler.scale, tuple(sums), total)
        if not math.isfinite(loss):  # the router may send NaN tokens anywhere
            return replace(computed, kind="nan")
        if over_capacity and self.capacities is not None:
            self.capacities.fail()
        if computed.loss > limit:
            return replace(computed, kind="spike")
        norm = self.optimizer.grad_norm()
        # An fp16 overflow while the scale can still be lowered is not suspicious.
        suspicious = not (math.isfinite(norm) or scaler.seeks)
        return replace(computed, kind="inf_norm" if suspicious else None, norm=norm)

    def loss_factors(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the factor on each microbatch's token losses in the step's loss, fp32
        [microbatches]."""
        counts = torch.stack([m.loss_mask.sum(dtype=torch.float32) for m in microbatches])
        if self.per_token_loss:
            total_tokens = all_reduce(counts.sum(), self.groups["dense_dp"])
            return (1.0 / total_tokens.clamp(min=1.0)).expand(len(microbatches))
        counts = all_reduce(counts, self.groups["cp"])
        factor = loss_factor(self.groups.grid, len(microbatches))
        microbatch_shares = [m.share for m in microbatches]
        if all(share is None for share in microbatch_shares):
            return factor / counts.clamp(min=1.0)
        shares = counts.new_tensor(
            [factor if share is None else share for share in microbatch_shares]
        )
        return shares * counts.clamp(min=1.0).reciprocal()  # rounds like the division above

    def evaluate(self, microbatches: Iterable[Microbatch], *, at_a_time: int = 1) -> float:
        """Return the mean loss per token over all data-parallel ranks, without dropout and without
        touching gradients.

        Args:
            at_a_time: microbatches that pass through the pipeline together.
        """
        # On the device of the batches: an NCCL group cannot reduce CPU tensors.
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.store.device)
        source = iter(microbatches)
        while window := list(islice(source, at_a_time)):
            sums = sums + self._evaluated(window)
        total = all_reduce(all_reduce(sums, self.groups["dense_dp"]), self.groups["pp"])
        loss, tokens = total.tolist()
        return loss / max(tokens, 1.0)

    def _evaluated(self, window: Sequence[Microbatch]) -> torch.Tensor:
        """Return the sums of the microbatches' token losses and masks, fp64 [2].

        Expert ranks use their training capacity, so that the host reads no token counts. If tokens
        exceed it, the microbatches are recomputed without a limit.
        """
        if self.capacities is not None:
            with self.capacities.evaluation():
                losses = self.forward_backward.evaluate(window)
            if self.capacities.has_room():
                return losses
        return self.forward_backward.evaluate(window)


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


#: Eager steps after the warm-up in which the order of weight gathers may still change.
PATIENCE = 4


class StepInputs:
    """Static copies of a step's inputs, at fixed addresses.

    Args:
        microbatches, factors: inputs of the captured step.
    """

    def __init__(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> None:
        self.microbatches = [_copied(batch) for batch in microbatches]
        self.factors = factors.clone(memory_format=torch.contiguous_format)

    def fit(self, microbatches: Sequence[Microbatch]) -> bool:
        """Return whether a step has as many microbatches, with the same shapes and dtypes."""
        return [_signature(batch) for batch in self.microbatches] == [
            _signature(b) for b in microbatches
        ]

    def take(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> None:
        """Copy a step's inputs to the static buffers."""
        self.factors.copy_(factors)
        for static_batch, batch in zip(self.microbatches, microbatches, strict=True):
            batch_inputs = _inputs(batch)
            for name, static_input in _inputs(static_batch).items():
                static_input.copy_(batch_inputs[name])


class FullIterationGraph:
    """Run `ForwardBackward` eagerly at first, then by replaying a captured graph.

        steps 1 … n     eager: kernels are compiled, communicators created, the gather plan is made
        step n + 1      captured, then replayed
        later steps     inputs are copied to the captured addresses, and one call launches all

    The graph contains every gather and reduction between `begin_step` and `finish`. Outside of it
    remain the optimizer, evaluation, checkpoints, logs, and whatever needs a number on the host:
    the loss factors, the sum of the loss, and the control flags of the ranks. Dropout has no
    state: masks are computed from sample numbers, which are inputs. The loss scale is a factor of
    the inputs, so it may change between replays.

    A step whose inputs have other shapes than the captured ones runs eagerly, and is counted.

    Args:
        run: the function to capture.
        recorder: captures and replays on the device.
        warmup_steps: eager steps before the capture; up to `PATIENCE` more follow while layers need
            weights in another order than the gather plan.
        say: logs one line.

    Raises:
        ValueError: the engine's settings do not allow capturing a step.

    Attributes:
        replays, eager_steps: number of replayed and of eager steps.
    """

    def __init__(
        self,
        run: ForwardBackward,
        *,
        recorder: Recorder,
        warmup_steps: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run, self.recorder, self.warmup_steps, self.say = run, recorder, warmup_steps, say
        self.recording = StepRecording(run.engine)
        self.replays, self.eager_steps = 0, 0
        self._planned = True
        self._inputs: StepInputs | None = None
        self._total: torch.Tensor | None = None

    def __call__(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> torch.Tensor:
        """Return the result of `ForwardBackward`.

        Raises:
            ValueError: the order in which layers need weights keeps changing.
        """
        if self._inputs is None and self._warm():
            self._record(microbatches, factors)
        if self._inputs is None or not self._inputs.fit(microbatches):
            return self._eagerly(microbatches, factors)
        self._inputs.take(microbatches, factors)
        self.recorder.replay()
        self.recording.replayed()
        self.replays += 1
        assert self._total is not None
        return self._total.clone()  # the next replay overwrites it

    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the result of `ForwardBackward.evaluate`, eagerly."""
        return self.run.evaluate(microbatches)

    def _warm(self) -> bool:
        """Return whether to capture now: the last step gathered weights as its plan predicted."""
        if self.eager_steps < self.warmup_steps:
            return False
        if not self._planned and self.eager_steps >= self.warmup_steps + PATIENCE:
            raise ValueError(
                f"after {self.eager_steps} steps layers still need weights in another order than "
                "in the step before, so no step can be captured: drop --cuda-graph-impl"
            )
        return self._planned

    def _eagerly(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> torch.Tensor:
        before = num_unplanned_uses(self.run.engine)
        total = self.run(microbatches, factors)
        self._planned = num_unplanned_uses(self.run.engine) == before
        self.eager_steps += 1
        return total

    def _record(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> None:
        # Allocated before the capture: the graph's memory pool may reuse memory allocated inside
        # it.
        inputs = StepInputs(microbatches, factors)

        def run() -> None:
            with self.recording.capturing():
                self._total = self.run(inputs.microbatches, inputs.factors)

        self.recording.prepare()
        self.recorder.capture(run)
        self.recording.close()
        self._inputs = inputs
        self.say(
            f"captured forward and backward of {len(microbatches)} microbatches in one CUDA graph "
            f"after {self.eager_steps} eager steps"
        )


#: Layout tensors that differ between steps of the same shapes: everything else follows from the
#: split.
_LAYOUT_TENSORS = ("positions", "document_ids", "sample_ids", "padding")


def _tensors(owner: object) -> dict[str, torch.Tensor]:
    return {name: x for name, x in vars(owner).items() if isinstance(x, torch.Tensor)}


def _inputs(batch: Microbatch) -> dict[str, torch.Tensor]:
    """Return the input tensors of a microbatch by name, including tensors of its layout."""
    tensors = _tensors(batch)
    if batch.mtp_targets is not None:
        tensors |= {f"mtp_targets.{name}": x for name, x in _tensors(batch.mtp_targets).items()}
    layout_tensors = _tensors(batch.layout)
    return tensors | {
        f"layout.{name}": layout_tensors[name] for name in _LAYOUT_TENSORS if name in layout_tensors
    }


def _copied(batch: Microbatch) -> Microbatch:
    """Return a microbatch of copies of its inputs."""

    def copies(owner: object) -> dict[str, torch.Tensor]:
        tensors = {
            n: x
            for n, x in _tensors(owner).items()
            if owner is not batch.layout or n in _LAYOUT_TENSORS
        }
        return {n: x.clone(memory_format=torch.contiguous_format) for n, x in tensors.items()}

    mtp_targets = batch.mtp_targets
    layout = batch.layout.with_tensors(**copies(batch.layout))
    if mtp_targets is not None:
        mtp_targets = dataclasses.replace(mtp_targets, **copies(mtp_targets))
    return dataclasses.replace(batch, layout=layout, mtp_targets=mtp_targets, **copies(batch))


def _signature(batch: Microbatch) -> tuple[object, ...]:
    """Return the properties of a microbatch that must equal the captured one's."""
    shapes = {name: (x.shape, x.dtype) for name, x in _inputs(batch).items()}
    layout = batch.layout
    # Attention blocks and index maps are captured; they depend only on document boundaries.
    form = (layout.sharding, layout.rank, layout.rows, layout.documents)
    return shapes, (*form, layout.sample_length)

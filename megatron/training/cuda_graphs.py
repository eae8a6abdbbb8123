# SPDX-License-Identifier: Apache-2.0
"""FullIterationGraph: forward and backward of all microbatches of a step as one CUDA graph.

    steps 1 … n     eager: kernels are compiled, communicators created, the gather plan is made
    step n + 1      captured, then replayed
    later steps     inputs are copied to the captured addresses, and one call launches everything

The graph contains every gather and reduction between `begin_step` and `finish`. Outside of it
remain the optimizer, evaluation, checkpoints, logs, and whatever needs a number on the host:
the loss factors, the sum of the loss, and the control flags of the ranks. Dropout has no state:
masks are computed from sample numbers, which are inputs. The loss scale is a factor of the inputs,
so it may change between replays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megatron.core.device import Recorder
from megatron.core.distributed.data_parallel import StepRecording, num_unplanned_uses
from megatron.training.step import ForwardBackward, Microbatch

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

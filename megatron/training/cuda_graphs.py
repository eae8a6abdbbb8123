# SPDX-License-Identifier: Apache-2.0
"""FullIterationGraph: forward and backward of all microbatches of a step as one CUDA graph.

    steps 1 … n     eager: kernels are compiled, communicators opened, the gather plan is made
    step n + 1      captured, then replayed
    from there on   inputs are copied to the captured addresses, and one call launches everything

Inside are every gather and reduction between `begin_step` and `finish`; outside, with all that
needs a number on the host, the loss factors, the sum of the loss and the votes over the ranks, the
optimizer, evaluation, checkpoints and logs. Dropout has no state: its masks follow from the sample
numbers, which are inputs. The loss scale is a factor of the inputs too, so it may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megatron.core.device import Recorder
from megatron.core.distributed.capture import StepRecording, unforeseen_needs
from megatron.training.step import ForwardBackward, Microbatch

#: Eager steps after the warm-up in which the needs of weights may still differ from the plan.
PATIENCE = 4


class StepInputs:
    """Copies of a step's inputs whose addresses stay.

    Args:
        microbatches, factors: of the step that is recorded.
    """

    def __init__(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> None:
        self.microbatches = [_copied(batch) for batch in microbatches]
        self.factors = factors.clone(memory_format=torch.contiguous_format)

    def fit(self, microbatches: Sequence[Microbatch]) -> bool:
        """Return whether a step has as many microbatches, of the same shapes and dtypes."""
        return [_form(batch) for batch in self.microbatches] == [_form(b) for b in microbatches]

    def take(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> None:
        """Copy a step's inputs here."""
        self.factors.copy_(factors)
        for static_batch, batch in zip(self.microbatches, microbatches, strict=True):
            batch_inputs = _inputs(batch)
            for name, static_input in _inputs(static_batch).items():
                static_input.copy_(batch_inputs[name])


class FullIterationGraph:
    """Carry out `ForwardBackward` eagerly at first, then by replays of one recording.

    A step of another form than the recorded one runs eagerly, and is counted.

    Args:
        run: what is recorded.
        recorder: of the device on which it runs.
        warmup_steps: eager steps before the recording; more follow, up to `PATIENCE`, while
            weights are needed that the gather plan does not foresee.
        say: shows one line.

    Raises:
        ValueError: the engine's settings keep a step from being recorded.

    Attributes:
        replays, eager_steps: how many steps ran in which way.
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
        """Return what `ForwardBackward` does.

        Raises:
            ValueError: weights are needed in an order that keeps changing.
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
        """Return what `ForwardBackward` does, eagerly."""
        return self.run.evaluate(microbatches)

    def _warm(self) -> bool:
        """Return whether it is time to record: the last step needed only what its plan foresaw."""
        if self.eager_steps < self.warmup_steps:
            return False
        if not self._planned and self.eager_steps >= self.warmup_steps + PATIENCE:
            raise ValueError(
                f"after {self.eager_steps} steps layers still need weights in another order than "
                "in the step before, so no step can be recorded: drop --cuda-graph-impl"
            )
        return self._planned

    def _eagerly(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> torch.Tensor:
        before = unforeseen_needs(self.run.engine)
        total = self.run(microbatches, factors)
        self._planned = unforeseen_needs(self.run.engine) == before
        self.eager_steps += 1
        return total

    def _record(self, microbatches: Sequence[Microbatch], factors: torch.Tensor) -> None:
        # Allocated here and not inside: what a recording allocates it may use again for others.
        inputs = StepInputs(microbatches, factors)

        def run() -> None:
            with self.recording.inside():
                self._total = self.run(inputs.microbatches, inputs.factors)

        self.recording.prepare()
        self.recorder.capture(run)
        self.recording.close()
        self._inputs = inputs
        self.say(
            f"recorded forward and backward of {len(microbatches)} microbatches as one CUDA graph "
            f"after {self.eager_steps} eager steps"
        )


#: What of a layout differs between steps of one form: all else follows from its split.
_OF_LAYOUT = ("positions", "document_ids", "sample_ids", "padding")


def _tensors(of: object) -> dict[str, torch.Tensor]:
    return {name: x for name, x in vars(of).items() if isinstance(x, torch.Tensor)}


def _inputs(batch: Microbatch) -> dict[str, torch.Tensor]:
    """Return the inputs of a microbatch, those in its layout too, by name."""
    tensors = _tensors(batch)
    if batch.mtp_targets is not None:
        tensors |= {f"mtp_targets.{name}": x for name, x in _tensors(batch.mtp_targets).items()}
    inside = _tensors(batch.layout)
    return tensors | {f"layout.{name}": inside[name] for name in _OF_LAYOUT if name in inside}


def _copied(batch: Microbatch) -> Microbatch:
    """Return a microbatch of copies of its inputs."""

    def copies(of: object) -> dict[str, torch.Tensor]:
        tensors = {
            n: x for n, x in _tensors(of).items() if of is not batch.layout or n in _OF_LAYOUT
        }
        return {n: x.clone(memory_format=torch.contiguous_format) for n, x in tensors.items()}

    mtp_targets = batch.mtp_targets
    layout = batch.layout.with_tensors(**copies(batch.layout))
    if mtp_targets is not None:
        mtp_targets = dataclasses.replace(mtp_targets, **copies(mtp_targets))
    return dataclasses.replace(batch, layout=layout, mtp_targets=mtp_targets, **copies(batch))


def _form(batch: Microbatch) -> tuple[object, ...]:
    """Return what of a microbatch must be as it was recorded."""
    shapes = {name: (x.shape, x.dtype) for name, x in _inputs(batch).items()}
    layout = batch.layout
    # Blocks and maps are recorded as they were, and follow from where documents begin.
    form = (layout.cut, layout.rank, layout.rows, layout.documents)
    return shapes, (*form, layout.sample_length)

# SPDX-License-Identifier: Apache-2.0
"""The state of delayed scaling; imports no library.

Delayed scaling quantizes x to x · scale, with a scale from the largest magnitudes (amax) of
earlier steps (Micikevicius et al. 2022, section 3):

    scale = (largest number of the format / amax over the history) / 2^margin

Amax is gathered over all microbatches of a step, and reduced over all ranks of a pipeline stage
when the step ends. So all microbatches of a step have the same scales, which a recompute in
backward meets again, and which do not depend on how a batch is divided.
"""

from __future__ import annotations

import torch

from megatron.core.comm.collectives import all_reduce
from megatron.core.extensions import QuantizationConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightStore

E4M3_MAX, E5M2_MAX = 448.0, 57344.0

#: The tensors of a linear layer that are quantized, in the order of its scales.
QUANTIZED_TENSORS = ("input", "weight", "output_gradient")


class DelayedScales:
    """Of one weight's products: what its tensors are multiplied by, and their amax.

    Attributes:
        scale: fp32 [3], of `QUANTIZED_TENSORS`; a state of the model.
        history: fp32 [steps, 3], the amax of finished steps, the last one first; a state as well.
        amax: fp32 [3], of this step so far.
    """

    def __init__(self, name: str, steps: int, *, store: WeightStore) -> None:
        count = len(QUANTIZED_TENSORS)
        self.scale = store.declare_state(f"{name}.fp8_scale", (count,), initial=1.0, optional=True)
        history = f"{name}.fp8_amax_history"
        self.history = store.declare_state(history, (steps, count), optional=True)
        self.amax = torch.zeros_like(self.scale)


class DelayedScaling:
    """The scales of all weights of a model, updated once a step.

    A model's `Backend` has one. It is empty with recipes that have no state.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config
        self.scales: list[DelayedScales] = []

    def scales_of(self, name: str, *, store: WeightStore) -> DelayedScales:
        """Declare the scales of a weight's products."""
        scales = DelayedScales(name, self.config.amax_history_len, store=store)
        self.scales.append(scales)
        return scales

    def begin(self) -> None:
        """Begin a step: forget what an evaluation, or an unsound computation, has left."""
        if self.scales:
            torch._foreach_zero_([scales.amax for scales in self.scales])

    @torch.no_grad()
    def finish(self, groups: ProcessGroupCollection) -> None:
        """End a step: make the scales of the next from what all ranks of the stage have seen.

        An amax that is not finite, of a step whose loss has overflowed, is not remembered.
        """
        if not self.scales:
            return
        amax = torch.stack([scales.amax for scales in self.scales])  # [n, 3]
        for name in ("tp", "gtp_cp_dp"):
            all_reduce(amax, groups[name], op="max", out=amax)
        amax = torch.where(torch.isfinite(amax), amax, 0.0)
        histories = [scales.history for scales in self.scales]
        before = torch.stack(histories)  # [n, steps, 3]
        history = torch.cat((amax.unsqueeze(1), before[:, :-1]), 1)
        current = [scales.scale for scales in self.scales]
        scale = self._scale(history, torch.stack(current))
        torch._foreach_copy_(histories, list(history))
        torch._foreach_copy_(current, list(scale))
        self.begin()

    def _scale(self, history: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return scales [n, 3] from histories [n, steps, 3]; as before where nothing is known."""
        amax = history.amax(1) if self.config.amax_compute_algo == "max" else history[:, 0]
        gradient = E5M2_MAX if self.config.hybrid else E4M3_MAX
        largest = amax.new_tensor([E4M3_MAX, E4M3_MAX, gradient])
        scale = (largest / amax) / 2.0**self.config.margin
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        return torch.where(amax > 0.0, scale, before)
